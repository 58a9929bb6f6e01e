"""
Check a run's clock by itself. test_train_decisions.py runs whole nights by a fake clock.
"""

import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from configurator import Config
from training.clock import Clock, Position, Speed, clock_time
from training.ranks import Ranks

BEGINNING = SimpleNamespace(iter_num=0, tokens=0)  # the fields of a Progress that a clock reads


def clock_at(seconds: float, c: Config, monkeypatch, resumed: dict | None = None) -> Clock:
    """Return the clock of a launch that began at time 0, `seconds` ago."""
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    return Clock(0.0, lambda: None, c, resumed, Ranks())


HOUR = Config(hours=1)
TIMED = dict(iteration=60, evaluation=100, checkpoints=20)
# The keys, the estimates, the seconds since the launch and the iteration; 400 seconds of the launch
# were start-up. Then the share and whether there is spare time, both worked out by hand
POSITIONS = {
    "by iterations": (Config(max_iters=10), TIMED, 7200, 9, 0, True),
    "at the first update": (HOUR, {}, 400, 0, 0, True),
    # 1000 of the 3200 seconds after the start-up, without 180 for the last steps
    "on the way": (HOUR, TIMED, 1400, 50, 1000 / (3200 - 180), True),
    # an evaluation and a save take 36 seconds each unless they were timed
    "not timed yet": (HOUR, {}, 1400, 50, 1000 / (3200 - 72), True),
    "one of them timed": (HOUR, dict(checkpoints=20), 1400, 50, 1000 / (3200 - 56), True),
    # max_iters is nearer than the hour
    "before max_iters": (Config(hours=1, max_iters=101), TIMED, 1400, 50, 0.5, True),
    "at the last of two iterations": (Config(hours=1, max_iters=2), TIMED, 1400, 1, 1, True),
    "at one iteration in all": (Config(hours=1, max_iters=1), {}, 400, 0, 0, True),
    # 361 and 360 seconds are left; 360 is 2 * 180
    "just before the spare time ends": (HOUR, TIMED, 3239, 90, 2839 / 3020, True),
    "when the spare time ends": (HOUR, TIMED, 3240, 90, 2840 / 3020, False),
    # just enough, or just not enough, time for one more iteration before the last update
    "before the last update but one": (HOUR, TIMED, 3359, 95, 2959 / 3020, False),
    "before the last update": (HOUR, TIMED, 3360, 95, 1, False),
    # an update ends just when the last one must begin
    "when the last update must begin": (HOUR, TIMED, 3420, 95, 1, False),
    "after the hour": (HOUR, TIMED, 3700, 95, 1, False),  # and a start-up of all its time
}


@pytest.mark.parametrize("name", POSITIONS)
def test_computes_the_share_of_time_used_and_the_spare_time(name, monkeypatch):
    """
    Compare the share of the training time, and whether there is time to spare, with figures worked
    out by hand.
    """
    c, estimates, seconds, it, share, has_spare_time = POSITIONS[name]
    clock = clock_at(400, c, monkeypatch)
    clock.begin_iterations(BEGINNING)
    clock.estimates.update(estimates)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    before = repr(vars(clock))
    found = clock.position(it)
    assert clock.position(it) == found and repr(vars(clock)) == before  # asking changes nothing
    assert found.share == pytest.approx(share, abs=1e-12)
    assert found.has_spare_time == has_spare_time
    clock.advance(0.999)
    assert not clock.position(it).time_is_up  # no update was made at share 1
    clock.advance(1.0)
    # 180 seconds before the hour the last update must have begun
    assert clock.position(it).time_is_up == (c.by_clock and seconds > 3420)


def test_the_save_timer_counts_from_the_launch_and_then_from_the_end_of_a_save(monkeypatch):
    clock = clock_at(70, HOUR, monkeypatch)
    assert clock.position(0).seconds_since_save == 70
    with clock.pause("evaluation"):
        pass
    assert clock.position(0).seconds_since_save == 70
    with clock.pause("checkpoints"):
        monkeypatch.setattr(time, "perf_counter", lambda: 72.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 75.0)
    assert clock.position(0) == Position(seconds_since_save=3, share=clock.position(0).share)


def test_an_estimate_follows_the_last_duration_but_at_most_doubles(monkeypatch):
    """Follow a shorter duration at once, and a longer one only up to twice the estimate before."""
    clock = clock_at(0, HOUR, monkeypatch)
    found = []
    for seconds in (10, 5, 30, 30, 1):
        clock.expect("evaluation", seconds)
        found.append(clock.estimates["evaluation"])
    assert found == [10, 5, 10, 20, 1]


def test_a_resumed_clock_continues_the_ledger_and_the_schedule(monkeypatch):
    c = HOUR
    clock = clock_at(0, c, monkeypatch)
    assert clock.left() == 3600
    monkeypatch.setattr(time, "perf_counter", lambda: 50.0)
    assert clock.lap("start-up") == 50
    clock.begin_iterations(BEGINNING)
    clock.advance(0.25)
    clock.expect("iteration", 9)
    monkeypatch.setattr(time, "perf_counter", lambda: 80.0)
    assert clock.lap("steps") == 30
    resumed = dict(clock=clock.state_dict(), ledger=dict(clock.seconds))

    later = clock_at(7, c, monkeypatch, resumed)
    later.begin_iterations(BEGINNING)
    assert later.state_dict() == clock.state_dict()
    assert (later.updated_share, later.setup_seconds) == (0.25, 50)
    assert later.estimates == dict(iteration=9)
    assert later.left() == 3600 - 87
    assert later.used() == 87
    assert later.training_hours() == pytest.approx(37 / 3600)
    monkeypatch.setattr(time, "perf_counter", lambda: 17.0)
    assert later.lap("compile") == 17
    assert later.training_hours() == pytest.approx(30 / 3600)
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
    assert later.lap("compile") == 3 and later.seconds["compile"] == 20
    later.expect("iteration", 3)
    assert resumed["clock"]["estimates"] == dict(iteration=9)  # the checkpoint stays what it was
    assert clock_at(7, Config(max_iters=5), monkeypatch, resumed).updated_share == 0
    assert clock_at(7, Config(hours=2), monkeypatch, resumed).left() == 7200 - 87
    assert clock_at(7, Config(), monkeypatch, resumed).left() == float("inf")


def test_a_pause_books_the_seconds_before_it_to_steps_and_expects_as_many_again(monkeypatch):
    clock = clock_at(0, HOUR, monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    with clock.pause("evaluation"):
        monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
        monkeypatch.setattr(time, "perf_counter", lambda: 15.0)
    assert (clock.seconds["steps"], clock.seconds["evaluation"]) == (10, 5)
    assert clock.estimates == dict(evaluation=5)


class Slower:
    """
    Stand in for two ranks. The other rank takes twice as long, and uses half the memory.
    """

    def max(self, elapsed, mem_gib):
        return [2 * elapsed, max(mem_gib, mem_gib / 2)]


def test_speed_counts_iterations_since_the_last_log_line_on_the_slowest_rank(monkeypatch):
    """
    Leave out seven iterations of an earlier launch and the time of an evaluation, and wait for the
    device before each lap.
    """
    now, waits = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    resumed = dict(clock={}, ledger=dict(steps=500.0))
    clock = Clock(0.0, lambda: waits.append(now[0]), HOUR, resumed, Slower())
    clock.begin_iterations(SimpleNamespace(iter_num=7, tokens=700))
    now[0] = 30.0
    speed = clock.lap_iterations(SimpleNamespace(iter_num=10, tokens=1000), 4.5)
    assert speed == Speed(20.0, 300 / 60, 4.5)
    assert clock.estimates == dict(iteration=20.0)
    now[0] = 130.0
    clock.lap("evaluation")  # no part of an iteration
    now[0] = 138.0
    speed = clock.lap_iterations(SimpleNamespace(iter_num=12, tokens=1200), 4.6)
    assert speed == Speed(8.0, 200 / 16, 4.6)
    assert clock.seconds["steps"] == 538 and clock.seconds["evaluation"] == 100
    assert waits == [30.0, 130.0, 138.0]


def test_prints_clock_times_to_the_minute_with_the_zone_and_a_date_unless_today(monkeypatch):
    """Print 12:01 for 31 seconds after noon, and add the date to noon tomorrow."""
    noon = datetime.now().replace(hour=12, minute=0, second=0, microsecond=0)
    zone = noon.astimezone().tzname()
    monkeypatch.setattr(time, "time", noon.timestamp)
    found = [clock_time(s) for s in (-500, 0, 29, 31, 3600)]
    assert found == [f"{at} {zone}" for at in 3 * ["12:00"] + ["12:01", "13:00"]]
    assert clock_time(24 * 3600) == f"12:00 {zone} on {noon + timedelta(days=1):%Y-%m-%d}"
