"""Check which commit a run's log names, and how long its lines are."""

import shutil
import subprocess
from unittest.mock import Mock

import pytest

from run.log import Log, git_commit


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
