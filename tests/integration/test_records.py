"""Check what a run prints, and what other programs read: its log lines and metrics.jsonl."""

import re
import shutil
import subprocess
from datetime import datetime

import pytest
from char_dataset import SHORT_RUN, T
from program import InProcessRun, Result, Run, gradients_of_nan, train

from run.log import git_commit

TINY = dict(max_iters=4, eval_interval=2, eval_tokens=64)
N = r"-?[\d.]+"
ITER = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms, mfu ({N})%", re.MULTILINE)
STEP = re.compile(rf"^step (\d+): train loss ({N}), val loss ({N})", re.MULTILINE)
FIELDS = dict(
    start="commit config data_fingerprint device device_type dtype flops_per_token iter parameters"
    " peak_source peak_tflops tokenizer tokens_per_iter torch val_fingerprint"
    " train_tokens val_tokens world_size",
    step="compile_seconds epoch grad_norm hours iter loss lr mem_gib mfu"
    " step_ms tokens tokens_after tokens_per_sec",
    eval="bits_per_byte complete hours iter perplexity seconds tokens train_loss val_loss",
    checkpoint="bytes iter path seconds",
    sample="iter text",
    event="iter message",
    end="hours iters ledger reason tokens",
)


@pytest.fixture(scope="module")
def logged(tokens, tmp_path_factory) -> tuple[Run, Result]:
    """Train a run with all kinds of records, which skips the update of iteration 4."""
    out_dir = tmp_path_factory.mktemp("logged") / "run"
    changes = dict(sample_tokens=5, peak_tflops=0.01, log_interval=2)
    with gradients_of_nan([4 * 2]):  # two micro-batches an iteration
        result = train(**SHORT_RUN | changes, dataset=tokens, out_dir=out_dir)
    return Run(out_dir), result


def test_scripts_that_parse_nanogpts_log_lines_can_parse_ours(logged):
    ran, (_, out, _) = logged
    lines = ITER.findall(out)
    assert lines == [
        (str(it), f"{loss:.4f}", f"{ms:.2f}", f"{100 * mfu:.2f}")
        for it, loss, ms, mfu in ran.steps("iter", "loss", "step_ms", "mfu")
    ]
    assert [int(line[0]) for line in lines] == [0, 2, 4, 6, 7]
    evaluations = [
        (str(it), f"{train_loss:.4f}", f"{val_loss:.4f}")
        for it, train_loss, val_loss in ran.evals("iter", "train_loss", "val_loss")
    ]
    assert re.findall(r"tokens [\d.]+k? \((\d+)%\)", out) == ["0", "25", "50", "75", "88"]
    assert STEP.findall(out) == evaluations
    assert [int(line[0]) for line in evaluations] == [0, 4, 8]
    assert f"tokens per iteration will be: {4 * 2 * T:,}" in out


def test_each_kind_of_record_in_metrics_jsonl_has_its_fields(logged):
    for record in logged[0].records():
        assert record.keys() - {"kind", "time"} == set(FIELDS[record["kind"]].split())
        assert datetime.fromisoformat(record["time"]).tzinfo
    assert {record["kind"] for record in logged[0].records()} == FIELDS.keys()


def test_log_txt_holds_what_the_console_showed(logged):
    """But for the first line of a new run, which comes before its folder is made."""
    ran, (_, out, _) = logged
    lines = (ran.out_dir / "log.txt").read_text().splitlines()
    first, *others = out.splitlines()
    assert first.endswith("a new run begins") and {*others} <= {*lines, ""}


def test_mfu_on_a_cpu_is_relative_to_a_measured_peak(tiny, ran):
    out = train(**tiny | dict(max_iters=2, peak_tflops=0)).out
    (first,) = ran.records("start")
    assert first["peak_source"] == "measured" and " TFLOP/s, dense (measured)" in out
    assert 1e-5 < first["peak_tflops"] < 100  # one core of any CPU is in this range
    step = ran.records("step")[-1]
    flops = first["flops_per_token"] * step["tokens_per_sec"]
    assert step["mfu"] == pytest.approx(flops / (first["peak_tflops"] * 1e12), rel=1e-6)


def test_a_run_ends_with_its_figures_one_per_line(tiny, ran):
    result = InProcessRun(fake_clock=True).launch(**tiny | dict(peak_tflops=1e-6))
    found = {k: float(v) for k, v in re.findall(r"^(\w+): (\S+)$", result.out, re.MULTILINE)}
    assert ran.column("start", "peak_tflops", "peak_source") == [(1e-6, "peak_tflops")]
    end, last = ran.end, ran.records("eval")[-1]
    assert found["val_loss"] == pytest.approx(last["val_loss"], abs=1e-4)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], abs=1e-4)
    assert found["tokens"] == end["tokens"] == 4 * 2 * 4 * T
    assert found["epochs"] == pytest.approx(end["tokens"] / 1237, abs=0.01)
    for tokens_before, epoch in ran.steps("tokens", "epoch"):
        assert epoch == pytest.approx(tokens_before / 1237)
    assert found["seconds"] == pytest.approx(sum(end["ledger"].values()), abs=0.06)
    # an iteration takes ten seconds
    assert found["tokens_per_sec"] == pytest.approx(2 * 4 * T / 10, abs=0.5)
    assert found["mfu"] > 0 and found["mem_gib"] > 0


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_log_names_the_commit_in_another_users_clone_too(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_DIR")  # see conftest.py
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*name, "commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr("run.log.PROJECT", tmp_path)
    ours = git_commit()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # read by git itself
    assert ours and git_commit() == ours
