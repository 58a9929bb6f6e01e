"""
Check that a run whose log does nothing trains, saves and ends like any other, and check what the
log's lines say.
"""

import contextlib
import shutil
import subprocess
from unittest.mock import Mock, patch

import pytest
from program import Run, same, train

from run.log import Log, git_commit

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
    for ran, log in ((logged, contextlib.nullcontext()), (silent, patch("run.log.Log", NoLog))):
        with log:
            train(**tiny | dict(max_iters=6, out_dir=ran.out_dir))
            train(**tiny | dict(out_dir=ran.out_dir), init_from="resume")
    assert logged.saved == silent.saved == [4, 6, 8, 12]
    pairs = [(logged.state(it), silent.state(it)) for it in silent.saved]
    for a, b in [*pairs, (logged.best, silent.best)]:
        for key in ("model", "optimizer", "scaler", "iter_num", "val_loss", "complete"):
            assert same(a[key], b[key]), key
    assert (tmp_path / "silent" / "metrics.jsonl").read_bytes() == b""


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


LONG = [  # iteration, seconds, tokens per second, tokens, GiB, seconds left
    (100, 9.34012, 56133.0, 52.4e6, 6.1, 177_120),
    (18_000, 9.34012, 56133.0, 9.44e9, 6.1, 40_000),
    (18_000, 2.91234, 180_022.0, 9.44e9, 13.2, 40_000),
    (18_000, 0.41234, 1_271_500.0, 9.44e9, 13.2, 440),
]


@pytest.mark.parametrize("it, seconds, rate, tokens, gib, left", LONG)
def test_a_line_of_a_long_run_fits_120_columns(it, seconds, rate, tokens, gib, left, capsys):
    log = Mock(last=(0, 0.0))
    log.speed.return_value, log.eta.return_value = (seconds, rate, 0.823), left
    log.config.tokens_between.return_value, log.train_tokens = tokens, 1e10
    log.hw.peak_memory_gib.return_value, log.clock.seconds = gib, dict(steps=0.0, compile=0.0)
    Log.report_step(log, it, 3.1234, dict(lr=8.46e-5, done=it / 19_073), {})
    (line,) = capsys.readouterr().out.splitlines()
    assert f"({it / 190.73:.0f}%)" in line and len(line) <= 120, line
