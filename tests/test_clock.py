"""
Runs by the clock (hours, until), with time that the test turns by hand: whatever the speed does,
the schedule is complete when the time is up.
"""

import json
import re
import signal
import time
from datetime import datetime
from itertools import pairwise

import pytest
import torch
from helpers import ROOT, TINY, flags, load, records, run_here, start_process
from test_ranks import patched, run_ranks

import bench
import train
from common.console import UserError
from configurator import NEVER, Config, load_config
from training import checkpoint, clock
from training.clock import SAVE_EVERY, Clock, clock_time, next_time

HOUR = 3600.0
EVENING = datetime(2026, 3, 4, 23, 0).timestamp()
LINEAR = dict(lr_schedule="linear", warmup_iters=0, learning_rate=1.0, min_lr=0.0)


class Time:
    """Time that passes only where the test says so. The clock on the wall shows 23:00 at first."""

    def __init__(self):
        self.now, self.ahead = 0.0, 0.0  # seconds; and those by which somebody has set that clock

    def wall(self) -> float:
        return EVENING + self.now + self.ahead


@pytest.fixture
def hand(monkeypatch) -> Time:
    hand = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: hand.now)
    monkeypatch.setattr(clock, "wall", hand.wall)
    return hand


# -----------------------------------------------------------------------------
# The clock alone


def make_clock(resumed: dict | None = None, began: float = 0.0, **changes) -> Clock:
    keys = dict(max_iters=NEVER, eval_interval=NEVER) | changes
    return Clock(Config(**keys), began, resumed or {})


class Loop:
    """The loop of a run without its training: what a Clock says of it. Everything has its price."""

    def __init__(self, hand: Time, step_seconds=lambda it: 10.0, evaluation=20.0, save=3.0):
        self.hand, self.step_seconds, self.prices = hand, step_seconds, (evaluation, save)
        self.shares, self.evaluations, self.saves = [], [], []  # by iteration

    def run(self, run: Clock, log_interval: int = 1) -> str:
        """Until the clock ends the run; returns why. It evaluates and saves then too."""
        line, steps = 0, 0.0
        while True:
            it = len(self.shares)
            assert it < 10_000, "the run has no end"
            share, evaluation_due, save_due, over = run.look(it)
            due = dict(evaluation=over or evaluation_due, checkpoints=over or save_due)
            logs = (self.evaluations, self.saves)
            for name, seconds, log in zip(due, self.prices, logs, strict=True):
                if due[name]:
                    self.hand.now += seconds
                    run.note(name, seconds)
                    log.append(it)
            if over:
                return over
            self.shares.append(share)
            steps += self.step_seconds(it)
            self.hand.now += self.step_seconds(it)
            if it % log_interval == 0 or share >= 1:
                run.note("iteration", steps / (it + 1 - line))
                line, steps = it + 1, 0.0


SPEEDS = {
    "steady": (dict(), dict()),
    "halves in the middle": (dict(step_seconds=lambda it: 10.0 if it < 150 else 20.0), dict()),
    "doubles in the middle": (dict(step_seconds=lambda it: 10.0 if it < 150 else 5.0), dict()),
    "another each time": (dict(step_seconds=lambda it: (2.0, 9.0, 4.0, 14.0, 1.0)[it % 5]), dict()),
    "rarely logged": (dict(step_seconds=lambda it: 10.0 if it < 150 else 20.0), dict(lines=25)),
    "a third is evaluation": (dict(evaluation=60.0), dict()),
    "a third, by iterations": (dict(evaluation=60.0), dict(eval_interval=12)),
    "long evaluations": (dict(evaluation=600.0), dict(eval_interval=50)),
    "slow saves": (dict(save=120.0), dict()),
    "a pause": (dict(step_seconds=lambda it: 900.0 if it == 100 else 10.0), dict()),
}


@pytest.mark.parametrize("key", ["hours", "until"])
@pytest.mark.parametrize("world, keys", SPEEDS.values(), ids=SPEEDS.keys())
def test_the_schedule_is_complete_when_the_time_is_up(world, keys, key, hand):
    keys = dict(keys)
    log_interval = keys.pop("lines", 1)
    run = make_clock(**{key: dict(hours=1.0, until="00:00")[key]}, **keys)
    hand.now += 45  # until the first iteration
    loop = Loop(hand, **world)
    assert loop.run(run, log_interval) == key
    # one iteration of the slowest speed may be too long or left out
    assert HOUR - 40 <= hand.now <= HOUR + 20
    assert loop.shares[0] == 0.0 and loop.shares[-1] == 1.0
    # it rises in small steps, but for what is gone at once; the next iteration is expected to be as
    # long as the last one, which moves it by no more than the difference
    longest = max(map(loop.step_seconds, range(len(loop.shares)))) + sum(loop.prices)
    assert all(b - a <= 2.5 * longest / HOUR + 0.01 for a, b in pairwise(loop.shares))
    shortest = -14 / HOUR if "step_seconds" in world else 0
    assert all(b - a >= shortest for a, b in pairwise(loop.shares))
    assert loop.evaluations[-1] == loop.saves[-1] == len(loop.shares)


def test_the_schedule_is_linear_in_time_at_a_steady_pace(hand):
    loop = Loop(hand)
    loop.run(make_clock(hours=1.0))
    assert loop.shares[len(loop.shares) // 2] == pytest.approx(0.5, abs=0.01)
    # one at the start, one in each twentieth, the last of them at the end
    assert len(loop.evaluations) == 21
    # the gaps between them
    assert all(15 <= b - a <= 19 for a, b in pairwise(loop.evaluations))


def test_both_the_hours_and_max_iters_bound_the_schedule(hand):
    run = make_clock(hours=1.0, max_iters=101)
    for it, share in ((0, 0.0), (50, 0.5), (100, 1.0)):
        assert run.look(it)[0] == pytest.approx(share)
        hand.now += 1.0
    hand.now = HOUR / 2
    assert run.look(10)[0] == pytest.approx(0.5, abs=0.02)


LEFT = {  # seconds left; evaluation 20 s, save 3 s, iteration 10 s
    "much": (67.0, True),
    "twice what the last ones take, which would delay them": (66.0, False),
    "little": (30.0, False),
}


@pytest.mark.parametrize("left, due", LEFT.values(), ids=LEFT.keys())
def test_short_of_time_nothing_is_due_but_the_last_evaluation_and_save(left, due, hand):
    run = make_clock(hours=1.0, eval_interval=5, checkpoint_interval=5)
    run.look(0)
    for name, seconds in dict(evaluation=20.0, checkpoints=3.0, iteration=10.0).items():
        run.note(name, seconds)
    hand.now = HOUR - left
    assert run.look(5)[1:] == (due, due, None)


DUE = {  # keys, iteration, seconds of the run: an evaluation, a save
    "before the first iteration": (dict(eval_interval=4), 0, 0.0, (True, False)),
    "then too where saves have an interval": (dict(checkpoint_interval=4), 0, 0.0, (False, False)),
    "every so many iterations": (dict(eval_interval=4), 8, 9.0, (True, False)),
    "and not in between": (dict(eval_interval=4), 9, 9.0, (False, False)),
    "saves have an interval of their own": (dict(checkpoint_interval=3), 9, 9.0, (False, True)),
    "it replaces the ten minutes": (dict(checkpoint_interval=4), 9, SAVE_EVERY, (False, False)),
    "without it": (dict(), 9, SAVE_EVERY, (False, True)),
    "but not earlier": (dict(), 9, SAVE_EVERY - 1, (False, False)),
}


@pytest.mark.parametrize("keys, it, seconds, due", DUE.values(), ids=DUE.keys())
def test_when_a_run_by_iterations_evaluates_and_saves(keys, it, seconds, due, hand):
    run = make_clock(**dict(max_iters=100, eval_interval=1000) | keys)
    hand.now = seconds
    share, *found, over = run.look(it)
    if it == 0 and "eval_interval" not in keys:
        due = (True, due[1])
    assert (share, *found, over) == (0.0, *due, None)


def test_ten_minutes_count_from_the_last_save(hand):
    run = make_clock(max_iters=1000, eval_interval=1000)
    saved = []
    for it in range(1, 100):
        hand.now += 60.0
        if run.look(it)[2]:
            saved.append(it)
            hand.now += 30.0
            run.note("checkpoints", 30.0)
    assert saved == list(range(10, 100, 10))


def test_one_that_hangs_is_not_taken_as_typical(hand):
    """By the clock the next ones would be left out for want of time, and the run end early."""
    run = make_clock(hours=1.0)
    prices = []
    for seconds in (2.0, 50.0, 50.0, 3.0):
        run.note("checkpoints", seconds)
        prices.append(run.prices["checkpoints"])
    assert prices == [2.0, 4.0, 8.0, 3.0]


OVER = {  # keys, seconds used; and what another update at share 1 is followed by
    "max_minutes": (dict(max_minutes=5.0), 300.0, "max_minutes"),
    "not before": (dict(max_minutes=5.0), 299.0, None),
    "no limit": (dict(), 1e9, None),
}


@pytest.mark.parametrize("keys, seconds, over", OVER.values(), ids=OVER.keys())
def test_max_minutes_are_those_of_this_start(keys, seconds, over, hand):
    hand.now = 1000.0
    earlier = dict(ledger=dict(steps=5000.0), clock={})
    run = make_clock(earlier, began=1000.0, max_iters=100, eval_interval=1000, **keys)
    hand.now += seconds
    assert run.look(1)[3] == over
    assert run.left() == (pytest.approx(max(0.0, 300.0 - seconds)) if keys else float("inf"))


def saved_by(run: Clock, **ledger: float) -> dict:
    """What a checkpoint holds for the next start's clock, through JSON's eyes."""
    return json.loads(json.dumps(dict(clock=run.state_dict(), ledger=ledger)))


def test_a_resumed_run_goes_on_where_it_was(hand):
    first = make_clock(hours=1.0)
    hand.now = 45.0
    first.look(0)
    first.note("iteration", 10.0)
    hand.now = HOUR / 2
    first.look(100)
    first.look(101)
    saved = saved_by(first, **{"start-up": 45.0, "steps": HOUR / 2 - 45})
    hand.now += 5 * HOUR  # hours between starts do not count
    run = make_clock(saved, began=hand.now, hours=1.0)
    assert run.used() == HOUR / 2 and run.left() == HOUR / 2
    assert run.look(101)[0] == pytest.approx(first.share)
    assert run.setup_seconds == 45.0 and run.prices == dict(iteration=10.0)


def test_an_older_checkpoint_without_a_clocks_state_is_resumed(hand):
    run = make_clock(dict(ledger={"start-up": 40.0, "compile": 60.0, "steps": 1700.0}), hours=1.0)
    assert run.used() == HOUR / 2
    # the schedule began with the first iteration
    assert run.look(100)[0] == pytest.approx(1700 / (HOUR - 100), abs=0.02)


DEADLINES = {  # until; the checkpoint's, if any; the hour of the resume -> hours from 23:00
    "the next 02:00": ("02:00", None, 0, 3),
    "tomorrow's 22:00": ("22:00", None, 0, 23),
    "the checkpoint's": ("02:00", ("02:00", 3), 1, 3),
    "the checkpoint's, though it has gone by: not seven of the next day": (
        *("02:00", ("02:00", 3)),
        *(4, 3),
    ),
    "another one": ("04:00", ("02:00", 3), 4, 5),
    "a clock that is years behind since a reboot": ("02:00", ("02:00", 50_000), 0, 3),
}


@pytest.mark.parametrize("until, saved, hour, deadline", DEADLINES.values(), ids=DEADLINES.keys())
def test_until_has_one_deadline_which_a_resume_keeps(until, saved, hour, deadline, hand):
    kept = dict(until=saved[0], deadline=EVENING + saved[1] * HOUR) if saved else {}
    hand.now = hour * HOUR
    run = make_clock(dict(clock=kept) if saved else {}, began=hand.now, until=until)
    assert run.state_dict()["deadline"] == EVENING + deadline * HOUR
    assert run.left() == max(0, deadline - hour) * HOUR


def test_a_start_at_07_00_that_took_a_minute_is_until_the_next_day(hand):
    """From when the command was given, not from when torch was there."""
    hand.now = 30.0
    assert make_clock(began=-30.0, until="23:00").deadline == EVENING
    assert make_clock(began=0.0, until="23:00").deadline == EVENING + 24 * HOUR


def test_a_resume_that_comes_too_late_makes_one_last_update(hand):
    saved = dict(clock=dict(until="02:00", deadline=EVENING + 3 * HOUR, share=0.4))
    hand.now = 5 * HOUR
    loop = Loop(hand)
    assert loop.run(make_clock(saved, began=hand.now, until="02:00")) == "until"
    assert loop.shares == [1.0] and loop.evaluations == loop.saves == [1]


def test_until_follows_a_clock_that_is_set(hand):
    run = make_clock(until="02:00")
    hand.ahead = 2 * HOUR
    assert run.left() == HOUR
    hand.ahead = -HOUR
    assert run.left() == 4 * HOUR


def test_the_hours_used_and_the_end_are_told(hand):
    hand.now = HOUR / 2
    assert make_clock(hours=8.0).hours_text() == "0.50 of 8.00"
    assert make_clock(until="02:00").hours_text() == "0.50 of 3.00"
    hand.now = 9 * HOUR
    assert make_clock(hours=8.0).hours_text() == "9.00 of 9.00"
    hand.now = 0.0
    # with the date where that is not today's; rounded to the minute, never to one gone by
    for seconds, text in ((1800, "23:30"), (1831, "23:31"), (-5, "23:00")):
        assert clock_time(seconds) == text
    assert clock_time(HOUR) == "00:00 on 2026-03-05"


def test_the_next_clock_time_is_today_or_tomorrow():
    at = next_time("07:00", EVENING)
    assert datetime.fromtimestamp(at) == datetime(2026, 3, 5, 7, 0)
    assert datetime.fromtimestamp(next_time("23:30", EVENING)) == datetime(2026, 3, 4, 23, 30)
    assert datetime.fromtimestamp(next_time("7:00", at)) == datetime(2026, 3, 6, 7, 0)


# -----------------------------------------------------------------------------
# Whole runs, in time that is turned by hand


class World(Time):
    """
    Of the training nothing is left but the time that it takes: `step_seconds` may look at the
    world, and so may `eval_seconds`.
    """

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.step_seconds, self.eval_seconds = lambda: 10.0, lambda: 20.0
        self.save_seconds, self.disk_is_full = 3.0, lambda: False

    def train_step(self, *_):
        self.now += self.step_seconds()
        self.steps += 1
        return torch.tensor(128.0), torch.tensor(128), torch.ones(())

    def estimate_loss(self, model, data, config, hw, ranks, signals):
        self.now += self.eval_seconds()
        return None if signals.came() else [1.0, 1.0]

    def stop_at(self, step: int) -> None:
        """A signal comes in the iteration after so many."""

        def step_seconds():
            if self.steps == step:
                signal.raise_signal(signal.SIGTERM)
            return 10.0

        self.step_seconds = step_seconds


@pytest.fixture
def world(monkeypatch):
    world, save, open_data = World(), checkpoint.save, train.open_data

    def slow_save(*arguments):
        if world.disk_is_full():
            world.now += 0.1
            raise OSError(28, "No space left on device")
        world.now += world.save_seconds
        return save(*arguments)

    def slow_start(*arguments):
        world.now += 45
        return open_data(*arguments)

    monkeypatch.setattr(clock, "wall", world.wall)
    monkeypatch.setattr(time, "perf_counter", lambda: world.now)
    monkeypatch.setattr(train, "open_data", slow_start)
    monkeypatch.setattr(train, "train_step", world.train_step)
    monkeypatch.setattr(train, "estimate_loss", world.estimate_loss)
    monkeypatch.setattr(checkpoint, "save", slow_save)
    return world


@pytest.fixture
def run(world, dataset, tmp_path, monkeypatch):
    """run(hours=1): train.py in this world, its intervals left to the clock unless given."""
    for name in ("max_iters", "eval_interval"):
        monkeypatch.delitem(TINY, name)

    def run(code=0, **changes):
        began = world.now
        assert run_here(dataset, tmp_path, **LINEAR | dict(n_layer=1) | changes) == code
        return world.now - began

    return run


def rates(tmp_path) -> list[float]:
    return [r["lr"] for r in records(tmp_path, "step")]


def iters(tmp_path, kind: str) -> list[int]:
    return [r["iter"] for r in records(tmp_path, kind)]


def assert_complete(tmp_path, seconds: float, hours: float) -> None:
    """The rate has come down to min_lr in small steps, and the time was kept."""
    assert hours * HOUR - 40 <= seconds <= hours * HOUR + 5, seconds
    lr = rates(tmp_path)
    assert lr[0] == 1.0 and lr[-1] == 0.0
    assert all(a >= b > a - 0.05 for a, b in pairwise(lr))
    last = records(tmp_path, "step")[-1]["iter"] + 1
    assert iters(tmp_path, "eval")[-1] == last
    assert load(tmp_path, last)["progress"]["iter_num"] == last


def test_a_run_ends_with_its_hours_and_its_schedule(run, world, tmp_path, capsys):
    assert_complete(tmp_path, run(hours=1), 1)
    # an evaluation each twentieth, a save with each, and one at each ten minutes
    assert len(records(tmp_path, "eval")) == 21
    assert 20 <= len(records(tmp_path, "checkpoint")) <= 25
    out, err = capsys.readouterr()
    # at this speed 360 iterations of 128 tokens of 1,537
    assert re.findall(r"warning: ([23]\d)\.\d epochs: more than about 6 teach little", err)
    assert err.count("epochs") == 1
    assert "hours 0.01 of 1.00, in " in out
    assert "; stops by about 00:00 on 2026-03-05\n" in out
    assert re.search(r"iter \d+: .* hours 0\.50 of 1\.00, eta (29|30)m", out)
    assert "end: the schedule is complete after " in out and "to continue" not in out
    assert records(tmp_path, "end")[-1]["reason"] == "hours"


class Killed(BaseException):
    """What no except clause of the run catches: nothing is saved."""


def test_a_run_killed_and_resumed_goes_on_where_it_was(run, world, tmp_path, capsys):
    def step_seconds():
        if world.steps == 250:
            raise Killed
        return 10.0

    world.step_seconds = step_seconds
    with pytest.raises(Killed):
        run(hours=1)
    saved = max(int(p.stem[5:]) for p in tmp_path.glob("ckpt-*.pt"))
    used = sum(load(tmp_path, saved)["ledger"].values())
    world.now += 5 * HOUR  # hours between starts do not count
    world.step_seconds = lambda: 10.0
    capsys.readouterr()
    seconds = run(hours=1, init_from="auto")
    assert_complete(tmp_path, used + seconds, 1)
    assert capsys.readouterr().out.count("by the clock, not bit for bit the same run") == 1
    # complete: the same command has nothing to do
    assert run(hours=1, init_from="auto") == 0
    assert "iterations are done; to continue, give another --hours;" in capsys.readouterr().out


def test_more_hours_on_a_resume_stretch_what_is_left(run, world, tmp_path, capsys):
    world.stop_at(150)
    run(143, hours=1)
    before = rates(tmp_path)[-1]
    capsys.readouterr()
    used = sum(load(tmp_path, 151)["ledger"].values()) / HOUR
    assert 0.45 < used < 0.55
    seconds = run(hours=2, init_from="auto")
    assert "resume: hours = 2.0 (the checkpoint had 1.0)\n" in capsys.readouterr().out
    assert before == pytest.approx(1 - used, abs=0.02)
    assert rates(tmp_path)[151] == pytest.approx(1 - used / 2, abs=0.02)
    assert rates(tmp_path)[-1] == 0.0 and seconds == pytest.approx((2 - used) * HOUR, rel=0.02)


def test_a_complete_run_is_given_more_hours(run, world, tmp_path):
    run(hours=0.2)
    assert run(hours=0.4, init_from="auto") == pytest.approx(0.2 * HOUR, rel=0.1)
    assert rates(tmp_path)[-1] == 0.0 and max(rates(tmp_path)[-10:]) > 0


def test_until_counts_the_hours_between_starts(run, world, tmp_path, capsys):
    world.stop_at(199)
    run(143, until="02:00")
    world.now += HOUR
    capsys.readouterr()
    run(until="02:00", init_from="auto")
    end = datetime(2026, 3, 5, 2, 0).timestamp()
    assert end - 40 <= world.wall() <= end + 5
    assert rates(tmp_path)[-1] == 0.0
    assert "stops by about 02:00\n" in capsys.readouterr().out
    # 37 minutes of three hours are used, and then of two
    assert rates(tmp_path)[199] == pytest.approx(0.8, abs=0.02)
    assert rates(tmp_path)[200] == pytest.approx(0.7, abs=0.02)
    assert records(tmp_path, "end")[-1]["reason"] == "until"


def test_until_keeps_its_deadline_where_a_resume_comes_too_late(run, world, tmp_path, capsys):
    """As systemd does it: a start at 07:03 must not hold the card until seven of the next day."""
    world.stop_at(199)
    run(143, until="02:00")
    world.now += 3 * HOUR
    capsys.readouterr()
    assert run(until="02:00", init_from="auto") < 120
    out = capsys.readouterr().out
    assert re.search(r"hours (0\.\d\d) of \1, .* stops by about 02:3\d\n", out)
    assert world.steps == 201 and rates(tmp_path)[-1] == 0.0
    assert iters(tmp_path, "eval")[-1] == 201 == load(tmp_path, 201)["progress"]["iter_num"]
    # then it is complete
    assert run(until="02:00", init_from="auto") == 0
    assert "are done; to continue, give another --until;" in capsys.readouterr().out
    # the next one, of another value
    run(until="04:00", init_from="auto")
    assert world.wall() == pytest.approx(datetime(2026, 3, 5, 4, 0).timestamp(), abs=60)


def test_a_pause_is_time_of_the_run_and_is_made_up_for(run, world, tmp_path):
    """The process is stopped for half an hour: as others count it, by the clock on the wall."""
    world.step_seconds = lambda: 1800.0 if world.steps == 100 else 10.0
    seconds = run(hours=1)
    assert HOUR - 40 <= seconds <= HOUR + 5
    assert rates(tmp_path)[0] == 1.0 and rates(tmp_path)[-1] == 0.0


def test_max_minutes_end_this_start_and_not_the_schedule(run, world, tmp_path, capsys):
    assert run(hours=8, max_minutes=60) == pytest.approx(HOUR, abs=20)
    out = capsys.readouterr().out
    assert "hours 0.01 of 8.00, in " in out and "; stops by about 00:00 on 2026-03-05\n" in out
    assert "end: max_minutes after " in out and "\nto continue: " in out
    last = records(tmp_path, "step")[-1]["iter"] + 1
    # nothing is lost, and no time spent on an evaluation
    assert load(tmp_path, last)["progress"]["iter_num"] == last != iters(tmp_path, "eval")[-1]
    assert rates(tmp_path)[-1] == pytest.approx(7 / 8, abs=0.01)
    assert run(hours=8, max_minutes=60, init_from="auto") == pytest.approx(HOUR, abs=20)
    assert rates(tmp_path)[-1] == pytest.approx(6 / 8, abs=0.01)


def test_a_given_max_iters_ends_earlier_and_the_schedule_with_it(run, world, tmp_path, capsys):
    seconds = run(hours=1, max_iters=100)
    assert world.steps == 100 and seconds < 0.5 * HOUR
    assert rates(tmp_path)[-1] == 0.0 and rates(tmp_path)[50] == pytest.approx(0.5, abs=0.02)
    assert "hours 0.01 of 1.00 or 100 iterations, in " in capsys.readouterr().out
    assert records(tmp_path, "end")[0]["reason"] == "max_iters"
    assert run(hours=1, max_iters=100, init_from="auto") == 0


def test_a_run_by_iterations_goes_on_by_the_clock_and_back(run, world, tmp_path):
    world.stop_at(99)
    run(143, max_iters=1000)
    world.stop_at(199)
    run(143, hours=1, init_from="auto")
    used = sum(load(tmp_path, 200)["ledger"].values())
    assert rates(tmp_path)[-1] == pytest.approx(1 - used / HOUR, abs=0.02)
    run(max_iters=250, init_from="auto")
    assert rates(tmp_path)[200] == pytest.approx(0.2) and world.steps == 250


def test_a_warm_up_longer_than_a_tenth_of_the_time_becomes_that(run, world, tmp_path, capsys):
    run(hours=1, warmup_iters=2000)
    assert "; warmup: 2,000 iterations, at most a tenth of the time\n" in capsys.readouterr().out
    lr = rates(tmp_path)
    assert lr.index(max(lr)) == pytest.approx(world.steps / 10, abs=6) and max(lr) > 0.95
    assert lr[-1] == 0.0


def test_time_that_is_up_before_the_first_update_still_ends_well(run, world, tmp_path):
    world.eval_seconds = lambda: 60.0
    run(hours=0.01)
    assert world.steps <= 2 and rates(tmp_path)[-1] == 0.0
    assert (tmp_path / f"ckpt-{world.steps:08}.pt").exists()


def test_without_hours_too_a_save_comes_every_ten_minutes(run, world, tmp_path):
    """With no save after an error this bounds what an error costs."""
    world.step_seconds = lambda: 60.0
    run(max_iters=100, eval_interval=1000)
    saved = iters(tmp_path, "checkpoint")
    assert saved == [*range(saved[0], 100, 10), 100] and saved[0] in (9, 10)


@pytest.mark.parametrize("keys", [dict(hours=1), dict(until="00:00")])
@pytest.mark.parametrize("twentieth", [0, 10])
def test_an_evaluation_dropped_by_a_signal_stays_due(keys, twentieth, run, world, tmp_path):
    """The resumed run begins with it."""
    evaluations = iter(range(1000))

    def eval_seconds():
        if next(evaluations) == twentieth:
            signal.raise_signal(signal.SIGTERM)
            return 2.0
        return 20.0

    world.eval_seconds = eval_seconds
    run(143, **keys)
    due = world.steps
    assert due not in iters(tmp_path, "eval")
    run(init_from="auto", **keys)
    assert due in iters(tmp_path, "eval")
    assert len(records(tmp_path, "eval")) == 21


@pytest.mark.parametrize("keys", [dict(hours=1), dict(until="00:00")])
def test_the_last_evaluation_dropped_by_a_signal_stays_due(keys, run, world, tmp_path):
    evaluations = iter(range(1000))

    def eval_seconds():
        if next(evaluations) == 20:
            signal.raise_signal(signal.SIGTERM)
        return 20.0

    world.eval_seconds = eval_seconds
    run(143, **keys)
    last = world.steps
    assert rates(tmp_path)[-1] == 0.0 and last not in iters(tmp_path, "eval")
    run(init_from="auto", **keys)
    assert iters(tmp_path, "eval")[-1] == world.steps <= last + 1
    assert run(init_from="auto", **keys) == 0


def test_a_dropped_evaluation_is_no_measure_of_the_next(run, world, tmp_path):
    """Cut short after 0.1 s of 100 s, it would leave no time for the last one."""
    evaluations = iter(range(1000))

    def eval_seconds():
        if next(evaluations) == 18:
            signal.raise_signal(signal.SIGTERM)
            return 0.1
        return 100.0

    world.eval_seconds = eval_seconds
    first = run(143, hours=1)
    assert first + run(hours=1, init_from="auto") <= HOUR + 5


def test_a_save_that_failed_is_no_measure_of_the_next(run, world, tmp_path):
    """A full disk is noticed at once; the last save would find no time left for it."""
    world.save_seconds = 100.0
    world.disk_is_full = lambda: 2700 < world.now < 2900
    assert run(hours=1) <= HOUR + 5


# -----------------------------------------------------------------------------
# Real time

TWO_CLOCKS = """
seconds, step = [0.0], train.train_step
def slow_step(*arguments):
    seconds[0] += (10, 7)[int(RANK)]
    return step(*arguments)
time.perf_counter = lambda: seconds[0]
train.train_step = slow_step
"""


def test_two_ranks_follow_the_clock_of_the_first(dataset, tmp_path):
    """On its own the second would go on when the first has left, and meanwhile at other rates."""
    options = LINEAR | dict(learning_rate=0.01, hours=0.1, max_iters=10**6, eval_interval=10)
    codes, _, err = run_ranks(2, *patched(TWO_CLOCKS), *flags(dataset, tmp_path, **options))
    assert codes == [0, 0], err
    assert len(rates(tmp_path)) in (35, 36) and rates(tmp_path)[-1] == 0.0


@pytest.mark.slow
def test_a_real_run_ends_in_time_on_a_busy_machine(dataset, tmp_path):
    busy = [start_process("-c", "while True: pass") for _ in range(2)]
    began = time.monotonic()
    try:
        options = LINEAR | dict(learning_rate=0.01, hours=0.02)
        arguments = flags(dataset, tmp_path, **options)
        arguments = [a for a in arguments if not a.startswith(("--max_iters", "--eval_interval"))]
        script = str(ROOT / "train.py")
        process = start_process(script, *arguments, cold=True)
        process.communicate(timeout=120)
        seconds = time.monotonic() - began
    finally:
        for loop in busy:
            loop.kill()
    assert process.returncode == 0 and rates(tmp_path)[-1] == 0.0
    assert abs(seconds - 72) <= 5


# -----------------------------------------------------------------------------
# The plan


def plan(tmp_path, *arguments) -> dict:
    bench.main(["plan", *arguments, "--gpu=4070", f"--json={tmp_path}/plan.json"])
    return json.loads((tmp_path / "plan.json").read_text())


def test_plan_tells_what_the_hours_hold(tmp_path, capsys):
    """
    At 10 s an iteration 8 hours hold 2,880 less what evaluations (each 2 * 2,097,152 / 3 tokens at
    52,429 a second, 26.7 s) and checkpoints take.
    """
    p = plan(tmp_path, "config/fast124m_4070.py", "--hours=8", "--iter_seconds=10")
    assert p["hours_total"] == pytest.approx(8, rel=0.005)
    pauses = p["evaluations"] * 26.67 + p["checkpoints"] * p["checkpoint_seconds"]
    assert p["max_iters"] == pytest.approx(2880 - pauses / 10, rel=0.005)
    assert p["total_tokens"] == p["max_iters"] * 524288
    assert p["shards_gb"] == pytest.approx(2 * p["total_tokens"] / 1e9)
    # train.py's own intervals: a twentieth of the time, and ten minutes
    p = plan(tmp_path, "--hours=10", "--iter_seconds=10", "--eval_tokens=1000")
    assert p["evaluations"] == 21 and 60 <= p["checkpoints"] <= 80
    p = plan(tmp_path, "--hours=10", "--iter_seconds=10", "--max_iters=100")
    assert p["max_iters"] == 100
    with pytest.raises(UserError, match="name one GPU"):
        bench.main(["plan", "--gpu=all", "--hours=8"])


def test_plan_says_how_much_disk(tmp_path, capsys, dataset):
    """Two checkpoints, one of them half written, and best.pt, each as large as a real one."""
    p = plan(tmp_path, "config/gpt124m_4070.py", "--iter_seconds=9.34", "--dataset_tokens=10B")
    line = "disk     24.5 GB: 20 GB of shards (10B tokens) and 3 checkpoints of 1.5 GB\n"
    assert line in capsys.readouterr().out
    assert p["disk_gb"] == pytest.approx(20 + 3 * 1.4924, abs=0.01)
    shape = dict(n_embd=128, n_layer=2, max_iters=1)
    run_here(dataset, tmp_path / "run", **shape)
    p = plan(tmp_path, *flags(dataset, tmp_path, **shape), "--iter_seconds=1")
    size = (tmp_path / "run" / "ckpt-00000001.pt").stat().st_size
    assert size / 1e9 == pytest.approx(p["checkpoint_gb"], rel=0.03)


# -----------------------------------------------------------------------------
# Keys


def test_hours_replace_a_files_max_iters_but_not_a_flags(tmp_path):
    (tmp_path / "a.py").write_text("max_iters = 100\nlr_decay_iters = 90\neval_interval = 7\n")
    file = str(tmp_path / "a.py")
    for argv in ([file, "--hours=8"], ["--until=07:00", file]):
        c = load_config(argv)
        assert (c.max_iters, c.lr_decay_iters, c.eval_interval) == (NEVER, NEVER, 7)
    c = load_config([file, "--hours=8", "--max_iters=50"])
    assert (c.max_iters, c.lr_decay_iters) == (50, NEVER)
    assert load_config(["--hours=8"]).eval_interval == NEVER
    assert load_config([file, "--hours=8", "--hours=0"]).max_iters == 100


@pytest.mark.parametrize("text", ["7", "24:00", "07:60", "7 am", "07.00"])
def test_until_is_a_clock_time(text):
    with pytest.raises(UserError, match="write a clock time, --until=07:00"):
        load_config([f"--until={text}"])


def test_hours_and_until_exclude_each_other():
    with pytest.raises(UserError, match="give one of them"):
        load_config(["--hours=8", "--until=07:00"])


@pytest.mark.parametrize("key", ["warmup_iters", "lr_decay_iters"])
def test_a_schedule_longer_than_the_run_is_warned_of(key, dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4, **{key: 5})
    assert f"{key}: 5 is longer than the run; give a lower one" in capsys.readouterr().err


def test_a_clock_that_is_set_is_said_once_where_it_moves_the_end(monkeypatch, capsys):
    ahead = 0.0
    monkeypatch.setattr(clock, "wall", lambda: time.time() + ahead)
    until, hours = (
        Clock(c, time.perf_counter(), {}) for c in (Config(until="07:00"), Config(hours=1))
    )
    ahead = 3600.0
    until.look(1)
    until.look(2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the clock has moved by +3,600 s")
    hours.look(1)
    assert capsys.readouterr().err == ""


def test_an_until_of_tomorrow_is_said(dataset, tmp_path, capsys):
    """Launched a minute late, the run would take a day."""
    passed = datetime.fromtimestamp(time.time() - 60)
    run_here(dataset, tmp_path / "late", until=f"{passed:%H:%M}", max_iters=2)
    err = capsys.readouterr().err
    assert re.search(rf"warning: until: {passed:%H:%M} is 2[34]\.\d h away; here it is ", err)


def test_hours_that_are_used_up_are_said(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4)
    capsys.readouterr()
    run_here(dataset, tmp_path, init_from="resume", hours=1e-6)
    assert "warning: hours: 1e-06 are for all launches and used already" in capsys.readouterr().err
