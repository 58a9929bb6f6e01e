"""The clock and the schedule of a run, by themselves. With a whole run: integration/."""

import time
from datetime import datetime

import pytest

from configurator import Config
from training.clock import Clock, Schedule


def clock_at(seconds: float, monkeypatch, resumed: dict | None = None) -> Clock:
    """Of a launch that began at 0 and is so many seconds old."""
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    return Clock(began=0.0, synchronize=lambda: None, resumed=resumed)


def test_an_until_that_passes_while_torch_is_imported_is_not_tomorrows(monkeypatch):
    """Typed at 06:59:50; the schedule is made at 07:00:20."""
    now = datetime(2026, 3, 4, 7, 0, 20).timestamp()
    monkeypatch.setattr(time, "time", lambda: now)
    schedule = Schedule(Config(until="07:00"), clock_at(30, monkeypatch), resumed=None)
    assert schedule.left() == pytest.approx(-20)


def test_a_run_that_is_stopped_before_its_last_update_makes_it_on_a_resume(monkeypatch):
    """The resume takes longer than what was left. The rate would not come down to min_lr."""
    c = Config(hours=1)
    schedule = Schedule(c, clock_at(0, monkeypatch), resumed=None)
    schedule.look(0)
    for what, seconds in dict(iteration=60, evaluation=10, checkpoints=10).items():
        schedule.expect(what, seconds)
    clock_at(3500, monkeypatch)
    before = schedule.look(50)
    assert before.share == 1 and not before.time_is_up
    resumed = dict(clock=schedule.state_dict(), ledger=dict(steps=3500.0))
    schedule = Schedule(c, clock_at(40, monkeypatch, resumed), resumed)
    last = schedule.look(50)
    assert last.share == 1 and not last.time_is_up
    assert schedule.look(51).time_is_up
