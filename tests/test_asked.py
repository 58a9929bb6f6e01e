"""
What people who train at night asked for in so many words: the tokens of an iteration, MFU on any
device, a log that can be pasted, figures that a script reads at the end, and warnings of traps.
"""

import io
import re
import runpy
import signal
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from program import ROOT, Night, checkpoint, column, flags, records, run, train, write_tokens

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    max_iters=4,
    eval_interval=2,
    eval_tokens=64,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
BATCH = "batch_size = 4\nblock_size = 16\ntokens_per_iter = 512\ngradient_accumulation_steps = {}\n"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [900], [150])


@pytest.fixture
def config(tmp_path, tokens) -> Path:
    """A config file that says its tokens per iteration twice."""
    path = tmp_path / "mine.py"
    path.write_text(f"dataset = {str(tokens)!r}\n{BATCH.format(8)}", "utf-8")
    return path


def run_tiny(*files, **changes):
    return run("train.py", *files, *flags(**TINY | changes))


# -----------------------------------------------------------------------------
# Tokens per iteration


def printed_config(*arguments) -> dict:
    result = run("configurator.py", *arguments)
    assert result.code == 0, result.err
    values: dict = {}
    exec(result.out, values)
    return values


def test_a_file_whose_accumulation_does_not_follow_is_told_the_one_to_write(tmp_path):
    (tmp_path / "x.py").write_text(BATCH.format(9), "utf-8")
    result = run("configurator.py", tmp_path / "x.py")
    assert result.code == 2
    assert "gradient_accumulation_steps = 8" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    "after, processes, accumulation",
    [
        ([], 1, 8),
        (["--batch_size=8"], 1, 4),
        (["--batch_size=3"], 1, 11),  # 512 / 48 = 10.67
        (["--batch_size=3"], 4, 12),
        (["--batch_size=32"], 4, 4),  # one each, though that is four times as many tokens
        (["--block_size=20"], 1, 6),  # 512 / 80 = 6.4
        (["--gradient_accumulation_steps=3"], 1, 3),
        (["--gradient_accumulation_steps=3", "--batch_size=3"], 1, 3),
        (["--tokens_per_iter=1024"], 1, 16),
        (["--gradient_accumulation_steps=3", "--tokens_per_iter=1024"], 1, 16),
    ],
)
def test_a_later_batch_size_rounds_the_accumulation(
    after, processes, accumulation, config, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with mock.patch("os._exit", sys.exit):  # how one of several processes ends
        values = printed_config(config, *after)
    assert values["gradient_accumulation_steps"] == accumulation


@pytest.mark.parametrize("order", [1, -1])
def test_tokens_per_iter_that_is_typed_must_divide(order, config):
    typed = ["--batch_size=3", "--tokens_per_iter=512"][::order]
    result = run("configurator.py", config, *typed)
    assert result.code == 2
    assert "480 or 528" in result.err


def test_a_resume_keeps_its_tokens_per_iteration(config, tmp_path):
    out_dir = tmp_path / "run"
    first = run_tiny(config, "--batch_size=3", out_dir=out_dir, max_iters=2)
    assert [
        line for line in first.out.splitlines() if ": 528 = 11 x 3 x 16 " in line and "512" in line
    ]
    resume = dict(out_dir=out_dir, init_from="resume")
    refused = run_tiny(config, "--batch_size=5", **resume)
    assert refused.code == 2
    assert "nearest: 3 or 11" in refused.err
    again = run_tiny(config, "--batch_size=11", **resume)
    assert again.code == 0, again.err
    assert set(column(out_dir, "start", "tokens_per_iter")) == {528}
    assert column(out_dir, "step", "tokens_after")[-1] == 4 * 528


GPU_CONFIGS = [p for p in (ROOT / "config").glob("gpt*m_*.py") if p.stem != "gpt124m_cpu"]
NINE_SUBJECTS = """
    batch_size gradient_accumulation_steps learning_rate compile tf32 dtype flash
    pad_vocab_multiple tie_weights
""".split()


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: path.stem)
def test_the_config_of_a_gpu_shows_the_nine_subjects(path):
    shown: dict = {}
    exec(path.read_text("utf-8"), shown)
    assert not [name for name in NINE_SUBJECTS if name not in shown]


def test_a_resume_keeps_tokens_that_only_its_accumulation_said(tokens, tmp_path):
    """As nanoGPT's configs do, without tokens_per_iter."""
    (tmp_path / "x.py").write_text(
        f"dataset = {str(tokens)!r}\nbatch_size = 4\nblock_size = 16\n"
        "gradient_accumulation_steps = 3\n",
        "utf-8",
    )
    keys = dict(out_dir=tmp_path / "run")
    assert run_tiny(tmp_path / "x.py", **keys, max_iters=2).code == 0
    again = run_tiny(tmp_path / "x.py", "--batch_size=6", **keys, init_from="resume")
    assert again.code == 0, again.err
    assert set(column(tmp_path / "run", "start", "tokens_per_iter")) == {4 * 16 * 3}


# -----------------------------------------------------------------------------
# MFU without a data sheet


def test_mfu_is_of_a_measured_matmul_which_the_run_keeps(tokens, tmp_path):
    out_dir = tmp_path / "run"
    keys = TINY | dict(dataset=tokens, out_dir=out_dir, batch_size=2, block_size=16)
    train(**keys | dict(max_iters=2))
    (first,) = records(out_dir, "start")
    assert first["peak_source"] == "measured"
    assert 1e-4 < first["peak_tflops"] < 100  # of one core, whatever it is
    step = records(out_dir, "step")[-1]
    flops = first["flops_per_token"] * step["tokens_per_sec"]
    assert step["mfu"] == pytest.approx(flops / (first["peak_tflops"] * 1e12), rel=1e-6)
    train(**keys, init_from="resume")
    assert column(out_dir, "start", "peak_tflops") == 2 * [first["peak_tflops"]]
    assert checkpoint(out_dir, 4)["peak"]["tflops"] == pytest.approx(first["peak_tflops"])


def test_peak_tflops_overrides_what_is_measured(tokens, tmp_path):
    train(**TINY, dataset=tokens, out_dir=tmp_path / "run", block_size=16, peak_tflops=2.5)
    (start,) = records(tmp_path / "run", "start")
    assert (start["peak_tflops"], start["peak_source"]) == (2.5, "peak_tflops")


# -----------------------------------------------------------------------------
# What is printed


def test_console_and_log_begin_with_what_can_be_pasted_again(config, tmp_path):
    out_dir = tmp_path / "run"
    result = run_tiny(config, out_dir=out_dir)
    lines = result.out.splitlines()
    assert (out_dir / "log.txt").read_text().splitlines()[:3] == lines[:3]
    command, settings, switches = lines[:3]
    assert command.startswith("command: python ")
    assert command.endswith(f" {config} {' '.join(flags(**TINY | dict(out_dir=out_dir)))}")
    typed = re.findall(r"--\S+", settings)
    assert f"--out_dir={out_dir}" in typed
    assert not [flag for flag in typed if flag.startswith(("--seed=", "--bias="))]  # defaults
    for switch in ("1 layers x 16", "0.0006", "float32", "compile False", "tie_weights True"):
        assert switch in switches
    # the settings alone are the same run
    values = printed_config(*typed)
    assert values == printed_config(config, *flags(**TINY | dict(out_dir=out_dir)))


def test_a_run_ends_with_its_figures_one_a_line(tokens, tmp_path):
    out_dir = tmp_path / "run"
    night = Night(turned=True)
    result = night.launch(**TINY, dataset=tokens, out_dir=out_dir, batch_size=4, block_size=16)
    found = dict(re.findall(r"^(\w+): (\S+)$", result.out, re.MULTILINE))
    (end,) = records(out_dir, "end")
    last = records(out_dir, "eval")[-1]
    assert float(found["val_loss"]) == pytest.approx(last["val_loss"], abs=1e-4)
    assert float(found["bits_per_byte"]) == pytest.approx(last["bits_per_byte"], abs=1e-4)
    assert int(found["tokens"]) == end["tokens"]
    assert float(found["epochs"]) == pytest.approx(end["tokens"] / 900, abs=0.01)
    assert float(found["hours_per_epoch"]) == pytest.approx(
        end["hours"] / end["tokens"] * 900, 0.01
    )
    assert float(found["seconds"]) == pytest.approx(sum(end["ledger"].values()), abs=0.06)
    speed = end["tokens"] / end["ledger"]["steps"]
    assert float(found["tokens_per_sec"]) == pytest.approx(speed, abs=0.5)
    assert float(found["mfu"]) > 0
    assert float(found["mem_gib"]) > 0


def test_the_figures_of_a_resumed_run_are_the_whole_runs_or_this_launchs(
    tokens, tmp_path, monkeypatch
):
    """Tokens and seconds of both launches; speed, MFU and peak memory of the second one."""
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", batch_size=4, block_size=16)
    keys |= dict(max_iters=4, eval_interval=2, peak_tflops=0.001)
    night = Night(turned=True)
    night.seconds["iteration"] = 0.005
    night.launch(**keys)
    (before,) = records(tmp_path / "run", "end")
    # a last evaluation that needs more memory than the iterations
    peaks = iter([1.0] * 4 + [3.0] * 9)
    monkeypatch.setattr("training.hardware.Hardware.peak_memory_gib", lambda self: next(peaks))
    night.seconds["iteration"] = 0.003
    result = night.launch(**keys | dict(max_iters=8, init_from="resume"))
    found = dict(re.findall(r"^(\w+): (\S+)$", result.out, re.MULTILINE))
    assert (tmp_path / "run" / "log.txt").read_text().count("\nval_loss: ") == 2
    (end,) = records(tmp_path / "run", "end")
    assert int(found["tokens"]) == end["tokens"] == 2 * before["tokens"]
    seconds = sum(end["ledger"].values())
    assert seconds > sum(before["ledger"].values())
    assert float(found["seconds"]) == pytest.approx(seconds, abs=0.06)
    steps = end["ledger"]["steps"] - before["ledger"]["steps"]
    speed = (end["tokens"] - before["tokens"]) / steps
    assert float(found["tokens_per_sec"]) == pytest.approx(speed, abs=0.5)
    assert speed == pytest.approx(before["tokens"] / 4 / 0.003)
    (flops, *_) = {record["flops_per_token"] for record in records(tmp_path / "run", "start")}
    assert float(found["mfu"]) == pytest.approx(flops * speed / 1e9, abs=1e-4)
    assert found["mem_gib"] == "3.00"


# -----------------------------------------------------------------------------
# One command


@pytest.mark.parametrize("extra, file", [("", "requirements.txt"), ("dev", "requirements-dev.txt")])
def test_uv_installs_what_pip_does(extra, file):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ours = project["optional-dependencies"][extra] if extra else project["dependencies"]
    lines = [
        line.partition("#")[0].strip() for line in (ROOT / file).read_text("utf-8").splitlines()
    ]
    assert ours == [line for line in lines if line and not line.startswith("-r")]


# -----------------------------------------------------------------------------
# Traps


def make_large(folder: Path) -> Path:
    """A folder of 101M tokens, all of them 0: a sparse file in nanoGPT's form."""
    folder.mkdir()
    for name, size in (("train.bin", 202_000_000), ("val.bin", 2000)):
        with open(folder / name, "wb") as file:
            file.truncate(size)
    return folder


@pytest.mark.parametrize("epochs, warned", [(1.9, False), (2.1, True)])
def test_more_than_two_epochs_of_a_large_corpus_are_warned_of(epochs, warned, tmp_path):
    data = make_large(tmp_path / "large")
    # eval_tokens and max_minutes end it at once; a minute has 60,000 milliseconds
    iterations = int(epochs * 101e6 / (12 * 16 * 40))
    keys = TINY | dict(dataset=data, out_dir=tmp_path / "run", block_size=16, max_minutes=1e-6)
    result = run("train.py", *flags(**keys | dict(max_iters=iterations)))
    assert result.code == 0, result.err
    assert ("2.1 epochs" in result.err) == warned


@pytest.mark.parametrize("tokens, warned", [("6B", False), ("2B", True)])
def test_plan_warns_of_them_too(tokens, warned):
    """10B tokens."""
    flags = ("config/gpt124m_4070.py", "--gpu=4070", f"--dataset_tokens={tokens}")
    result = run("bench.py", "plan", *flags)
    assert result.code == 0, result.err
    assert ("5.0 epochs" in result.err) == warned


def test_eval_only_on_a_run_evaluates_that_run(tokens, tmp_path):
    out_dir = tmp_path / "run"
    keys = TINY | dict(dataset=tokens, out_dir=out_dir, block_size=16, learning_rate=0.01)
    train(**keys)
    before = sorted(out_dir.iterdir())
    result = train(**keys, eval_only=True)
    last = column(out_dir, "eval", "val_loss")[-1]
    assert f"val loss {last:.4f}" in result.out
    assert sorted(out_dir.iterdir()) == before


def test_float16_on_a_cpu_is_said_to_be_slow(tokens, tmp_path):
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", block_size=8, dtype="float16")
    result = train(**keys | dict(n_embd=4, max_iters=1, batch_size=1, eval_tokens=8))
    assert "--dtype=float32" in result.err


# -----------------------------------------------------------------------------
# A notebook's `%run`


class OutStream(io.StringIO):
    """As in Jupyter: a stdout that is no TextIOWrapper."""


def test_a_notebook_runs_the_scripts_and_gets_its_signal_handlers_back(tokens, tmp_path):
    def of_the_notebook(number, frame):
        pass

    signal.signal(signal.SIGTERM, of_the_notebook)
    out_dir = tmp_path / "run"
    keys = TINY | dict(dataset=tokens, out_dir=out_dir, block_size=16)
    out = OutStream()
    scripts = [
        ("train.py", *flags(**keys)),
        ("train.py", *flags(**keys | dict(init_from="resume", learning_rate=-1))),  # refused
        ("sample.py", f"--out_dir={out_dir}", "--num_samples=1", "--max_new_tokens=3"),
        ("compare.py", out_dir),
        ("convert.py", "--help"),
    ]
    for script, *arguments in scripts:
        with (
            mock.patch("builtins.get_ipython", object, create=True),
            mock.patch("sys.stdout", out),
            mock.patch("sys.argv", [script, *map(str, arguments)]),
            pytest.raises(SystemExit),
        ):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert signal.getsignal(signal.SIGTERM) is of_the_notebook
    assert "iter 3: loss" in out.getvalue()
    assert "best val loss" in out.getvalue()
