"""
Check that a run whose log does nothing trains, saves and ends like any other, and check what the
log's lines say.
"""

import contextlib
import re
import subprocess
from unittest.mock import patch

import pytest
from cases import slow
from program import ROOT, InProcessRun, Run, same, train

from configurator import Config
from training import hardware
from training.gpus import find_row
from training.log import git_commit

TINY = dict(n_layer=1, n_embd=16, max_iters=12, warmup_iters=2, eval_interval=4, eval_tokens=160)
TINY |= dict(sample_tokens=5, dropout=0.1, learning_rate=0.01, keep_checkpoints=9)


class NoLog:
    """Stand in for a log, with methods that all do nothing."""

    def __init__(self, *arguments, **named):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def test_a_run_without_a_log_saves_the_same_checkpoints(tiny, tmp_path):
    logged, silent = Run(tmp_path / "logged"), Run(tmp_path / "silent")
    for ran, log in (
        (logged, contextlib.nullcontext()),
        (silent, patch("training.log.Log", NoLog)),
    ):
        with log:
            train(**tiny | dict(max_iters=6, out_dir=ran.out_dir))
            train(**tiny | dict(out_dir=ran.out_dir), init_from="resume")
    assert logged.saved == silent.saved == [4, 6, 8, 12]
    pairs = [(logged.state(it), silent.state(it)) for it in silent.saved]
    for a, b in [*pairs, (logged.best, silent.best)]:
        for key in ("model", "optimizer", "scaler", "rng", "progress", "val_loss"):
            assert same(a[key], b[key]), key
    assert (tmp_path / "silent" / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "share, keys, warns",
    [  # of the peak; an RTX 4090 reaches 57 to 75%, and 85% of 57% is 48%
        (0.46, {}, True),
        slow((0.50, {}, False)),
        slow((0.46, dict(n_embd=384), False)),
        slow((0.46, dict(recompute=True), False)),
    ],
)
def test_warns_once_if_a_run_is_slower_than_all_known_ones_of_its_gpu(share, keys, warns, tiny):
    keys = tiny | dict(n_embd=768, batch_size=1, sample_tokens=0, max_iters=52) | keys
    keys |= dict(gradient_accumulation_steps=1, eval_interval=52)
    hw = hardware.set_up(Config(device="cpu", dtype="float32", compile=False))
    hw.name, hw.row = "RTX 4090", find_row("NVIDIA GeForce RTX 4090", 128)
    # an iteration has 16 tokens and takes 10 seconds; FLOPs as in the PaLM paper
    width = keys["n_embd"]
    flops = 6 * (12 * width**2 + 128 * width) + 12 * width * 16
    hw.peak_tflops, hw.peak_source = 1.6 * flops / share / 1e12, "gpus.csv"
    trainer = InProcessRun(fake_clock=True)
    with patch("training.hardware.set_up", lambda *_, **__: hw):
        result = trainer.launch(**keys)
    found = re.findall(r"^warning: iter (\d+): mfu: (\d+)%", result.err, re.MULTILINE)
    assert found == [("50", f"{100 * share:.0f}")] * warns


def test_a_run_that_uv_started_names_its_command_with_uv(tiny, monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert train(**tiny).out.startswith("command: uv run ")


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
