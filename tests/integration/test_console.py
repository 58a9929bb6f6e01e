"""Check what a run prints at its start and its end, and which peak its MFU is relative to."""

import re
import shlex
from pathlib import Path

import pytest
from program import (
    TINY_RUN,
    InProcessRun,
    checkpoint,
    column,
    finish,
    flags,
    records,
    run,
    start,
    train,
    write_tokens,
)

TINY = TINY_RUN | dict(max_iters=4, eval_interval=2, eval_tokens=64)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [900], [150])


def test_mfu_on_a_cpu_is_relative_to_a_measured_peak_that_a_resume_keeps(tokens, tmp_path):
    out_dir = tmp_path / "run"
    keys = TINY | dict(dataset=tokens, out_dir=out_dir)
    train(**keys | dict(max_iters=2))
    (first,) = records(out_dir, "start")
    assert first["peak_source"] == "measured"
    assert 1e-4 < first["peak_tflops"] < 100  # one core of any CPU is in this range
    step = records(out_dir, "step")[-1]
    flops = first["flops_per_token"] * step["tokens_per_sec"]
    assert step["mfu"] == pytest.approx(flops / (first["peak_tflops"] * 1e12), rel=1e-6)
    train(**keys, init_from="resume")
    assert column(out_dir, "start", "peak_tflops") == 2 * [first["peak_tflops"]]
    assert checkpoint(out_dir, 4)["peak"]["tflops"] == pytest.approx(first["peak_tflops"])


def test_console_and_log_begin_with_the_command_in_a_form_to_paste(tokens, tmp_path):
    out_dir, config = tmp_path / "a run", tmp_path / "mine.py"
    config.write_text(f"dataset = {str(tokens)!r}\n", "utf-8")
    typed = [str(config), *flags(**TINY | dict(out_dir=out_dir))]
    result = run("train.py", *typed)
    lines = result.out.splitlines()
    assert (out_dir / "log.txt").read_text().splitlines()[:3] == lines[:3]
    label, python, _, *shown = shlex.split(lines[0])
    assert (label, python, shown) == ("command:", "python", typed)
    assert "float32, not compiled; peak " in result.out
    again = run("train.py", *typed, "--init_from=auto", f"--out_dir={tmp_path / 'b'}")
    assert again.out.startswith(f"new run: {tmp_path / 'b'} ")


@pytest.mark.slow
def test_a_successful_run_writes_nothing_to_stderr(tokens, tmp_path):
    """
    Undo gc.freeze() at exit. From torch 2.15 on, Triton would report the frozen objects as leaks.
    """
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", warmup_iters=0)
    code = "import atexit, gc, runpy; atexit.register(lambda: print('kept', gc.get_freeze_count()))"
    code += "; runpy.run_path('train.py', run_name='__main__')"
    ended = finish(start("-c", code, *flags(**keys), cold=True), timeout=300)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("\nkept 0\n")


def test_a_run_ends_with_its_figures_one_per_line(tokens, tmp_path):
    out_dir = tmp_path / "run"
    trainer = InProcessRun(fake_clock=True)
    keys = TINY | dict(peak_tflops=1e-6)
    result = trainer.launch(**keys, dataset=tokens, out_dir=out_dir)
    found = dict(re.findall(r"^(\w+): (\S+)$", result.out, re.MULTILINE))
    (begun,) = records(out_dir, "start")
    assert (begun["peak_tflops"], begun["peak_source"]) == (1e-6, "peak_tflops")
    (end,) = records(out_dir, "end")
    last = records(out_dir, "eval")[-1]
    assert float(found["val_loss"]) == pytest.approx(last["val_loss"], abs=1e-4)
    assert float(found["bits_per_byte"]) == pytest.approx(last["bits_per_byte"], abs=1e-4)
    assert int(found["tokens"]) == end["tokens"]
    assert float(found["epochs"]) == pytest.approx(end["tokens"] / 900, abs=0.01)
    for tokens_before, epoch in column(out_dir, "step", "tokens", "epoch"):
        assert epoch == pytest.approx(tokens_before / 900)
    assert float(found["hours_per_epoch"]) == pytest.approx(
        end["hours"] / end["tokens"] * 900, 0.01
    )
    assert float(found["seconds"]) == pytest.approx(sum(end["ledger"].values()), abs=0.06)
    speed = end["tokens"] / end["ledger"]["steps"]
    assert float(found["tokens_per_sec"]) == pytest.approx(speed, abs=0.5)
    assert float(found["mfu"]) > 0
    assert float(found["mem_gib"]) > 0


def test_a_resumed_run_ends_with_total_tokens_and_seconds_but_the_speed_of_its_last_launch(
    tokens, tmp_path, monkeypatch
):
    """
    Sum tokens and seconds over both launches. Give speed, MFU and peak memory of the second one.
    """
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", peak_tflops=0.001)
    trainer = InProcessRun(fake_clock=True)
    trainer.seconds["iteration"] = 0.005
    trainer.launch(**keys)
    (before,) = records(tmp_path / "run", "end")
    # the last evaluation needs more memory than the iterations
    peaks = iter([1.0] * 4 + [3.0] * 9)
    monkeypatch.setattr("training.hardware.Hardware.peak_memory_gib", lambda self: next(peaks))
    trainer.seconds["iteration"] = 0.003
    result = trainer.launch(**keys | dict(max_iters=8, init_from="resume"))
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
