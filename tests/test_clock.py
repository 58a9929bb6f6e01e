"""
Check a run's clock by itself. integration/test_time_limits.py has whole runs by a fake clock.
"""

import time
from datetime import datetime, timedelta

import pytest

from run.clock import Clock, clock_time, training_hours


def clock_at(seconds: float, monkeypatch, **ledger: float) -> Clock:
    """Return the clock of a launch that began at time 0, `seconds` ago."""
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    return Clock(0.0, lambda: None, ledger)


def test_the_save_timer_leaves_out_the_start_up(monkeypatch):
    """It may download for an hour. test_time_limits.py has saves."""
    clock = clock_at(0, monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: 3600.0)
    clock.lap("start-up")
    monkeypatch.setattr(time, "perf_counter", lambda: 3670.0)
    assert clock.read()[1] == 70


def test_the_hours_count_evaluations_samples_and_saves_but_no_compilation(monkeypatch):
    clock = clock_at(0, monkeypatch)
    now = iter(range(0, 100, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock.lap("start-up")  # at 0; each category below begins and ends 10 seconds after the last
    for n, category in enumerate(("compile", "evaluation", "samples", "checkpoints"), 1):
        with clock.pause(category):
            pass
        counted = 2 * 10 * n - 10  # the seconds of steps between them, too
        assert 3600 * training_hours(clock.seconds) == pytest.approx(counted), category


def test_a_resumed_clock_continues_the_ledger_and_leaves_out_start_ups(monkeypatch):
    clock = clock_at(7, monkeypatch, steps=30.0)
    clock.lap("start-up")
    monkeypatch.setattr(time, "perf_counter", lambda: 17.0)
    clock.lap("compile")
    assert clock.seconds["compile"] == 10
    assert clock.hours() == pytest.approx(30 / 3600)
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
    assert clock.read()[0] == pytest.approx(33 / 3600)


def test_prints_clock_times_to_the_minute_with_the_zone_and_a_date_unless_today(monkeypatch):
    """Print 12:01 for 31 seconds after noon, and add the date to noon tomorrow."""
    noon = datetime.now().replace(hour=12, minute=0, second=0, microsecond=0)
    zone = noon.astimezone().tzname()
    monkeypatch.setattr(time, "time", noon.timestamp)
    found = [clock_time(s) for s in (-500, 0, 29, 31, 3600)]
    assert found == [f"{at} {zone}" for at in 3 * ["12:00"] + ["12:01", "13:00"]]
    assert clock_time(24 * 3600) == f"12:00 {zone} on {noon + timedelta(days=1):%Y-%m-%d}"
