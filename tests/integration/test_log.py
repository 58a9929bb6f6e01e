"""
Check that a run whose log does nothing trains, saves and ends like any other, and check what the
log's lines say.
"""

import contextlib
import math
import re
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
from cases import slow_but
from program import (
    FAST,
    ROOT,
    InProcessRun,
    best,
    checkpoint,
    checkpoints,
    column,
    same,
    sigterm,
    train,
    write_tokens,
)

from configurator import Config
from train import Progress
from training import hardware
from training.checkpoint import size_of
from training.clock import Speed
from training.gpus import find_row
from training.log import Log, git_commit

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    max_iters=12,
    eval_interval=4,
    eval_tokens=160,
    sample_tokens=5,
    dropout=0.1,
    learning_rate=0.01,
    warmup_iters=2,
    keep_checkpoints=9,
    device="cpu",
    dtype="float32",
    compile=False,
)


class NoLog:
    """Replace the log by one whose methods all do nothing."""

    def __init__(self, *arguments, **named):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def no_log():
    return mock.patch("training.log.Log", NoLog)


def assert_same_files(left, right) -> None:
    """Check for equal checkpoints and an equal best.pt, apart from the times in them."""
    assert checkpoints(left) == checkpoints(right)
    pairs = [(checkpoint(left, it), checkpoint(right, it)) for it in checkpoints(left)]
    for a, b in [*pairs, (best(left), best(right))]:
        for key in ("model", "optimizer", "scaler", "rng", "progress", "val_loss"):
            assert same(a[key], b[key]), key


def test_a_run_without_a_log_saves_the_same_checkpoints(tokens, tmp_path):
    for name, log in (("logged", contextlib.nullcontext()), ("silent", no_log())):
        with log:
            train(**TINY | dict(max_iters=6), dataset=tokens, out_dir=tmp_path / name)
            train(**TINY, dataset=tokens, out_dir=tmp_path / name, init_from="resume")
    assert_same_files(tmp_path / "logged", tmp_path / "silent")
    assert checkpoints(tmp_path / "silent") == [4, 6, 8, 12]
    assert (tmp_path / "silent" / "metrics.jsonl").read_bytes() == b""


def test_a_log_line_of_a_long_gpu_run_fits_120_columns(capsys):
    c = Config(max_iters=99_999, hours=100.0)
    clock = SimpleNamespace(
        seconds=dict(steps=3.2e5, compile=32.0),
        since_launch=lambda: 3e5,
        training_hours=lambda: 90.0,
        estimates={},
        left=lambda: math.inf,
    )
    hw = SimpleNamespace(mfu=lambda *_: 0.412345, peak_source="measured")
    ranks = SimpleNamespace(is_main=False, world_size=1)
    saver = SimpleNamespace(ranks=ranks, write_record=None)
    data = SimpleNamespace(train_tokens=10**10)
    log = Log(c, clock, hw, data, None, Progress(), saver)
    log.report_step(
        65_432, 34_305_212_416, 0, 10.1234, 6e-4, 1.0, Speed(9.87654, 0, 53_084, 70.1, 1)
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("iter 65432: loss 10.1234, time 9876.54ms, mfu 41.23%, tok/s ")
    assert "tokens 34.3B" in line and "mem 70.1GiB" in line
    assert len(line) <= 120


@pytest.mark.parametrize("recipe", slow_but(FAST, of=[{}, FAST]), ids=["gpt2", "fast"])
def test_the_disk_space_that_a_run_asks_for_is_that_of_its_checkpoints(recipe, tokens, tmp_path):
    """Allow 2% for NorMuon's means of each row."""
    asked: list[int] = []
    keys = TINY | recipe | dict(n_embd=128, max_iters=1, keep_checkpoints=2)
    with mock.patch("training.log.lack_of_space", lambda folder, size: asked.append(size)):
        train(**keys, dataset=tokens, out_dir=tmp_path)
    files = Config(keep_checkpoints=2).checkpoint_files
    assert asked == [pytest.approx(files * size_of(checkpoint(tmp_path, 1)), rel=0.02)]


def last_line(out: str, name: str) -> str:
    return [line for line in out.splitlines() if line.startswith(f"{name}: ")][-1]


def test_a_stopped_run_names_its_last_losses_first_and_a_finished_run_the_sample_command(
    tokens, tmp_path
):
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", init_from="auto")
    trainer = InProcessRun()
    trainer.at["iteration", 6] = sigterm
    stopped = trainer.launch(**keys)
    (line,) = re.findall("^last measured: .*\nval_loss: ", stopped.out, re.MULTILINE)
    loss = column(tmp_path / "run", "step", "loss")[-1]
    val_loss = column(tmp_path / "run", "eval", "val_loss")[-1]
    assert f" {loss:.4f} at iteration 5, " in line and f" {val_loss:.4f} at iteration 4" in line
    assert "\nsample: python" not in stopped.out
    result = train(**keys)
    assert result.out.startswith(f"resume: {tmp_path / 'run' / 'ckpt-0000000'}")
    assert "last measured: " not in result.out
    assert (
        last_line(result.out, "sample") == f"sample: python sample.py --out_dir={keys['out_dir']}"
    )


@pytest.mark.parametrize(
    "change, warns",
    [
        (dict(max_iters=24), True),
        pytest.param(dict(hours=1.0), True, marks=pytest.mark.slow),
        pytest.param(dict(learning_rate=0.001), False, marks=pytest.mark.slow),
        (dict(batch_size=8, gradient_accumulation_steps=1), False),
    ],
    ids=["more iterations", "hours", "lower rate", "same schedule"],
)
def test_warns_if_a_resume_raises_the_learning_rate(change, warns, tokens, tmp_path):
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path, min_lr=0.001, eval_interval=100)
    trainer = InProcessRun(fake_clock=True)
    stop = 10
    trainer.at["iteration", stop] = sigterm
    trainer.launch(**keys)
    again = InProcessRun(fake_clock=True)
    again.at["iteration", stop + 1] = sigterm
    if "hours" in change:
        del keys["max_iters"]
    result = again.launch(**keys | change, init_from="resume")
    told = re.findall(r"warning: learning_rate: .* from (\S+) to (\S+);", result.err)
    assert len(told) == warns
    if warns:
        it = checkpoints(tmp_path)[0]
        old, new = map(float, told[0])
        assert old < 0.003
        rates = dict(column(tmp_path, "step", "iter", "lr"))
        assert new == pytest.approx(rates[it], rel=0.05)


@pytest.mark.parametrize(
    "warmup, warns", slow_but((11, False), (12, True), of=[(11, False), (12, True), (50, True)])
)
def test_warns_if_warmup_lasts_the_whole_run(warmup, warns, tokens, tmp_path):
    result = train(**TINY | dict(warmup_iters=warmup), dataset=tokens, out_dir=tmp_path)
    assert ("--warmup_iters=1 " in result.err) == warns


@pytest.mark.parametrize("train_tokens, warns", [(75, True), (77, False)])
def test_warns_of_more_than_20_epochs(train_tokens, warns, tmp_path):
    """Train on 12 * 8 windows of 16 tokens, which is 1,536 tokens."""
    data = write_tokens(tmp_path / "data", train=[train_tokens], val=[200])
    result = train(**TINY, dataset=data, out_dir=tmp_path / "run")
    assert ("warning: 20 epochs: " in result.err) == warns


@pytest.mark.parametrize(
    "share, keys, warns",
    [  # of the peak; an RTX 4090 reaches 57 to 75%, and 85% of 57% is 48%
        (0.46, {}, True),
        (0.50, {}, False),
        pytest.param(0.46, dict(n_embd=384), False, marks=pytest.mark.slow),
        pytest.param(0.46, dict(recompute=True), False, marks=pytest.mark.slow),
    ],
)
def test_warns_once_if_a_run_is_slower_than_all_known_ones_of_its_gpu(
    share, keys, warns, tokens, tmp_path
):
    keys = TINY | dict(n_embd=768, batch_size=1, sample_tokens=0, max_iters=52) | keys
    keys |= dict(gradient_accumulation_steps=1, eval_interval=52, log_interval=1)
    hw = hardware.set_up(Config(device="cpu", dtype="float32", compile=False))
    hw.name, hw.row = "RTX 4090", find_row("NVIDIA GeForce RTX 4090", 128)
    # an iteration has 16 tokens and takes 10 seconds; FLOPs as in the PaLM paper
    width = keys["n_embd"]
    flops = 6 * (12 * width**2 + 128 * width) + 12 * width * 16
    hw.peak_tflops, hw.peak_source = 1.6 * flops / share / 1e12, "gpus.csv"
    trainer = InProcessRun(fake_clock=True)
    with mock.patch("training.hardware.set_up", lambda *_, **__: hw):
        result = trainer.launch(**keys, dataset=tokens, out_dir=tmp_path)
    found = re.findall(r"^warning: iter (\d+): mfu: (\d+)%", result.err, re.MULTILINE)
    assert found == [("50", f"{100 * share:.0f}")] * warns


def test_the_log_names_the_commit_of_the_code_that_ran(tmp_path, monkeypatch):
    """Name none outside a clone, or without git."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("needs git and a checkout")
    assert head.stdout.startswith((git_commit() or "none").removesuffix("-dirty"))
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
    monkeypatch.undo()
    monkeypatch.setattr("training.log.PROJECT", tmp_path)
    assert git_commit() is None
