"""
Runs by the clock (hours, until), with time that the test turns by hand: whatever the speed does,
the schedule is complete when the time is up.
"""

import json
import re
import time
from datetime import datetime

import pytest
from helpers import ROOT, flags, records, run_here, start_process
from test_ranks import patched, run_ranks

import bench
from common.console import UserError
from configurator import NEVER, Config, load_config
from training import clock
from training.clock import Clock, clock_time, next_time

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
    monkeypatch.setattr(time, "time", hand.wall)
    return hand


# -----------------------------------------------------------------------------
# The clock alone


def make_clock(resumed: dict | None = None, began: float = 0.0, **changes) -> Clock:
    keys = dict(max_iters=NEVER, eval_interval=NEVER) | changes
    if resumed:
        resumed = (
            dict(config=dict(hours=keys.get("hours", 0.0), until=keys.get("until", ""))) | resumed
        )
    return Clock(Config(**keys), began, lambda: None, resumed)


def test_both_the_hours_and_max_iters_bound_the_schedule(hand):
    run = make_clock(hours=1.0, max_iters=101)
    for it, share in ((0, 0.0), (50, 0.5), (100, 1.0)):
        assert run.decide(it).share == pytest.approx(share)
        hand.now += 1.0
    hand.now = HOUR / 2
    assert run.decide(10).share == pytest.approx(0.5, abs=0.02)


LEFT = {  # seconds left; evaluation 20 s, save 3 s, iteration 10 s
    "much": (67.0, True),
    "twice what the last ones take, which would delay them": (66.0, False),
    "little": (30.0, False),
}


@pytest.mark.parametrize("left, due", LEFT.values(), ids=LEFT.keys())
def test_short_of_time_nothing_is_due_but_the_last_evaluation_and_save(left, due, hand):
    run = make_clock(hours=1.0, eval_interval=5, checkpoint_interval=5)
    run.decide(0)
    for name, seconds in dict(evaluation=20.0, checkpoints=3.0, iteration=10.0).items():
        run.took(name, seconds)
    hand.now = HOUR - left
    assert run.decide(5).has_time == due


def test_one_that_hangs_is_not_taken_as_typical(hand):
    """By the clock the next ones would be left out for want of time, and the run end early."""
    run = make_clock(hours=1.0)
    prices = []
    for seconds in (2.0, 50.0, 50.0, 3.0):
        run.took("checkpoints", seconds)
        prices.append(run.seconds_per["checkpoints"])
    assert prices == [2.0, 4.0, 8.0, 3.0]


def saved_by(run: Clock, **ledger: float) -> dict:
    """What a checkpoint holds for the next start's clock, through JSON's eyes."""
    return json.loads(json.dumps(dict(clock=run.state_dict(), ledger=ledger)))


def test_a_resumed_run_goes_on_where_it_was(hand):
    first = make_clock(hours=1.0)
    hand.now = 45.0
    first.decide(0)
    first.took("iteration", 10.0)
    hand.now = HOUR / 2
    first.decide(100)
    first.decide(101)
    saved = saved_by(first, **{"start-up": 45.0, "steps": HOUR / 2 - 45})
    hand.now += 5 * HOUR  # hours between starts do not count
    run = make_clock(saved, began=hand.now, hours=1.0)
    assert run.used() == HOUR / 2 and run.left() == HOUR / 2
    assert run.decide(101).share == pytest.approx(first.share)
    assert run.setup_seconds == 45.0 and run.seconds_per == dict(iteration=10.0)


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
    run = make_clock(dict(clock=kept, ledger={}) if saved else None, began=hand.now, until=until)
    assert run.state_dict()["deadline"] == EVENING + deadline * HOUR
    assert run.left() == max(0, deadline - hour) * HOUR


def test_a_start_at_07_00_that_took_a_minute_is_until_the_next_day(hand):
    """From when the command was given, not from when torch was there."""
    hand.now = 30.0
    assert make_clock(began=-30.0, until="23:00").deadline == EVENING
    assert make_clock(began=0.0, until="23:00").deadline == EVENING + 24 * HOUR


def test_until_follows_a_clock_that_is_set(hand):
    run = make_clock(until="02:00")
    hand.ahead = 2 * HOUR
    assert run.left() == HOUR
    hand.ahead = -HOUR
    assert run.left() == 4 * HOUR


class ThatEvening(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(EVENING, tz)


def test_the_hours_used_and_the_end_are_told(hand, monkeypatch):
    hand.now = HOUR / 2
    assert make_clock(hours=8.0).hours_text() == "0.50 of 8.00"
    assert make_clock(until="02:00").hours_text() == "0.50 of 3.00"
    hand.now = 9 * HOUR
    assert make_clock(hours=8.0).hours_text() == "9.00 of 9.00"
    hand.now = 0.0
    # with the date where that is not today's; rounded to the minute, never to one gone by
    monkeypatch.setattr(clock, "datetime", ThatEvening)
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


def rates(tmp_path) -> list[float]:
    return [r["lr"] for r in records(tmp_path, "step")]


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


def test_an_until_of_tomorrow_is_said(dataset, tmp_path, capsys):
    """Launched a minute late, the run would take a day."""
    passed = datetime.fromtimestamp(time.time() - 60)
    run_here(dataset, tmp_path / "late", until=f"{passed:%H:%M}", max_iters=2)
    err = capsys.readouterr().err
    assert re.search(rf"warning: until: {passed:%H:%M} is 2[34]\.\d h away; here it is ", err)
