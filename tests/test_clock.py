"""
Runs by the clock (hours, until), with a clock that the test turns by hand: whatever the speed does,
the schedule is complete when the time is up.
"""

import json
import os
import re
import signal
import socket
import time
from datetime import datetime
from itertools import pairwise

import pytest
import torch
from helpers import ROOT, TINY, flags, load, records, run_here, start_process

import bench
import train
from common.console import UserError
from configurator import NEVER, Config, load_config
from training import clock, runlog
from training.checkpoint import Checkpoints
from training.clock import Clock, Ledger, next_time

HOUR = 3600.0
EVENING = datetime(2026, 3, 4, 23, 0).timestamp()
LINEAR = dict(lr_schedule="linear", warmup_iters=0, learning_rate=1.0, min_lr=0.0)


class World:
    """
    Time that passes only where the test says so. Of the training nothing is left but the time that
    it takes: `step_seconds` may look at the world.
    """

    def __init__(self):
        self.now, self.ledgers, self.steps, self.ahead = 1e6, [], 0, 0.0
        self.step_seconds, self.eval_seconds, self.save_seconds = lambda: 10.0, 20.0, 3.0

    def wall(self) -> float:
        """The clock that people set; it is ahead by so much."""
        return EVENING + self.now - 1e6 + self.ahead

    def pass_by(self, seconds: float) -> None:
        """As a run sees it, whose heartbeat looks at the clock."""
        while seconds > 0:
            self.now += min(30.0, seconds)
            seconds -= 30.0
            self.ledgers[-1].look()

    def train_step(self, model, optimizer, scaler, next_batch, *_):
        next_batch()  # a signal may come instead
        self.pass_by(self.step_seconds())
        self.steps += 1
        return torch.ones(2), torch.ones(())

    def estimate_loss(self, *_):
        self.pass_by(self.eval_seconds)
        return 1.0, 1.0


@pytest.fixture
def world(monkeypatch):
    world, save, open_data = World(), Checkpoints.save, train.open_data

    class WatchedLedger(Ledger):
        def __init__(self, began):
            super().__init__(began, lambda: world.now)
            world.ledgers.append(self)

    def slow_save(*arguments):
        world.pass_by(world.save_seconds)
        save(*arguments)

    def slow_start(*arguments):
        world.now += 45
        return open_data(*arguments)

    monkeypatch.setattr(train, "open_data", slow_start)
    monkeypatch.setattr(clock, "wall", world.wall)
    monkeypatch.setattr(clock, "steady", lambda: world.now)
    monkeypatch.setattr(time, "perf_counter", lambda: world.now)
    monkeypatch.setattr(runlog, "Ledger", WatchedLedger)
    monkeypatch.setattr(train, "train_step", world.train_step)
    monkeypatch.setattr(train, "estimate_loss", world.estimate_loss)
    monkeypatch.setattr(Checkpoints, "save", slow_save)
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


def assert_complete(tmp_path, seconds: float, hours: float) -> None:
    """The rate has come down to min_lr in small steps, and the time was kept."""
    assert abs(seconds - hours * HOUR) <= max(0.01 * hours * HOUR, 5), seconds
    lr = rates(tmp_path)
    assert lr[0] == 1.0 and lr[-1] == 0.0
    assert all(a >= b > a - 0.05 for a, b in pairwise(lr))
    last = records(tmp_path, "step")[-1]["iter"] + 1
    assert records(tmp_path, "eval")[-1]["iter"] == last
    assert load(tmp_path, last)["progress"]["iter_num"] == last


def test_a_run_ends_with_its_hours_and_its_schedule_at_a_steady_speed(run, world, tmp_path, capsys):
    seconds = run(hours=1)
    assert_complete(tmp_path, seconds, 1)
    assert seconds <= HOUR  # evaluation and save lie inside
    # an evaluation each twentieth, a save with each, and one at each ten minutes
    assert len(records(tmp_path, "eval")) == 21
    assert 20 <= len(records(tmp_path, "checkpoint")) <= 25
    # linear in time
    half = records(tmp_path, "step")[world.steps // 2]
    assert half["lr"] == pytest.approx(0.5, abs=0.01)
    out, err = capsys.readouterr()
    # at this speed 360 iterations of 128 tokens of 1,537
    assert re.findall(r"warning: ([23]\d)\.\d epochs: more than about 6 teach little", err)
    assert err.count("epochs") == 1
    assert "hours 0.01 of 1.00, in " in out
    assert "; stops by about 00:00 on 2026-03-05\n" in out
    assert re.search(r"iter \d+: .* hours 0\.50 of 1\.00, eta (29|30)m", out)
    assert "end: the schedule is complete after " in out and "to continue" not in out


@pytest.mark.parametrize("log_interval", [1, 25])
def test_the_speed_halves_in_the_middle(log_interval, run, world, tmp_path):
    world.step_seconds = lambda: 10.0 if world.now < 1e6 + HOUR / 2 else 20.0
    assert_complete_seconds = run(hours=1, log_interval=log_interval)
    lr = rates(tmp_path)
    assert abs(assert_complete_seconds - HOUR) < 36 and (lr[0], lr[-1]) == (1.0, 0.0)


def test_a_speed_that_changes_until_the_last_iteration(run, world, tmp_path):
    world.step_seconds = lambda: (2.0, 9.0, 4.0, 14.0, 1.0)[world.steps % 5]
    assert_complete(tmp_path, run(hours=1), 1)


@pytest.mark.parametrize("intervals", [dict(), dict(eval_interval=12)])
def test_evaluations_take_a_third_of_the_time(intervals, run, world, tmp_path):
    world.eval_seconds = 60.0
    seconds = run(hours=1, **intervals)
    assert_complete(tmp_path, seconds, 1)
    assert 19 <= len(records(tmp_path, "eval")) <= 22 and seconds <= HOUR


def test_an_evaluation_that_would_not_fit_is_left_to_the_last_one(run, world, tmp_path):
    world.eval_seconds = 600.0
    seconds = run(hours=1, eval_interval=50)
    assert_complete_without_steps = abs(seconds - HOUR) <= 36
    assert assert_complete_without_steps and rates(tmp_path)[-1] == 0.0


def test_given_intervals_stay_and_saves_come_every_ten_minutes(run, world, tmp_path):
    run(hours=1, eval_interval=300, checkpoint_interval=100, keep_checkpoints=9)
    assert [r["iter"] for r in records(tmp_path, "eval")][:-1] == [0, 300]
    assert [r["iter"] for r in records(tmp_path, "checkpoint")][:-1] == [100, 200, 300]


def test_a_long_run_saves_every_ten_minutes(run, world, tmp_path):
    world.step_seconds = lambda: 60.0
    run(hours=10)
    saved = [r["iter"] for r in records(tmp_path, "checkpoint")]
    assert max(b - a for a, b in pairwise(saved)) <= 11
    assert len(saved) < 80


class Killed(BaseException):
    """What no except clause of the run catches: nothing is saved."""


def test_a_run_killed_and_resumed_goes_on_where_it_was(run, world, tmp_path, capsys, monkeypatch):
    def step_seconds():
        if world.steps == 250:
            world.step_seconds = lambda: 10.0
            raise Killed
        return 10.0

    world.step_seconds = step_seconds
    with monkeypatch.context() as patch:
        patch.setattr(train.RunLog, "end", lambda *_: None)
        with pytest.raises(Killed):
            run(hours=1)
    saved = max(int(p.stem[5:]) for p in tmp_path.glob("ckpt-*.pt"))
    used = sum(load(tmp_path, saved)["ledger"].values())
    world.now += 5 * HOUR  # hours between starts do not count
    capsys.readouterr()
    seconds = run(hours=1, init_from="auto")
    assert_complete(tmp_path, used + seconds, 1)
    out = capsys.readouterr().out
    assert out.count("by the clock, not bit for bit the same run") == 1
    assert "the learning rate continues" not in out  # as before
    # complete: the same command has nothing to do
    assert run(hours=1, init_from="auto") == 0
    assert "iterations are done; to continue, give another --hours;" in capsys.readouterr().out


def stop_at(world, step):
    def step_seconds():
        if world.steps == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return 10.0

    world.step_seconds = step_seconds


def test_until_a_clock_time_counts_the_hours_between_starts(run, world, tmp_path, capsys):
    stop_at(world, 199)
    run(143, until="02:00")
    world.now += HOUR
    capsys.readouterr()
    run(until="02:00", init_from="auto")
    captured = capsys.readouterr()
    assert abs(world.wall() - datetime(2026, 3, 5, 2, 0).timestamp()) < 0.01 * 3 * HOUR
    assert rates(tmp_path)[-1] == 0.0 and "stops by about 02:00\n" in captured.out
    # 36 minutes of three hours are used, and then of two
    change = r"the learning rate continues at (\S+), not at (\S+), though its decay had begun"
    new, old = re.search(change, captured.err).groups()
    assert float(old) == pytest.approx(0.81, abs=0.02) and float(new) == pytest.approx(
        0.7, abs=0.02
    )
    assert records(tmp_path, "end")[-1]["reason"] == "until"


def test_until_keeps_its_deadline_where_a_resume_comes_too_late(run, world, tmp_path, capsys):
    """As systemd does it: a start at 07:03 must not hold the card until seven of the next day."""
    stop_at(world, 199)
    run(143, until="02:00")
    world.now += 3 * HOUR
    capsys.readouterr()
    assert run(until="02:00", init_from="auto") < 120
    captured = capsys.readouterr()
    assert "the learning rate continues at 0.00e+00, not at 8" in captured.err
    assert re.search(r"hours (0\.\d\d) of \1, .* stops by about 02:3\d\n", captured.out)
    assert world.steps == 201 and rates(tmp_path)[-1] == 0.0
    assert (
        records(tmp_path, "eval")[-1]["iter"] == 201 == load(tmp_path, 201)["progress"]["iter_num"]
    )
    # then it is complete
    assert run(until="02:00", init_from="auto") == 0
    assert "are done; to continue, give another --until;" in capsys.readouterr().out
    # the next one, of another value
    run(until="04:00", init_from="auto")
    assert world.wall() == pytest.approx(datetime(2026, 3, 5, 4, 0).timestamp(), abs=60)


def test_a_clock_behind_since_a_reboot_does_not_make_a_resumed_run_endless(run, world, tmp_path):
    stop_at(world, 199)
    run(143, until="02:00")
    world.ahead = -6 * 365 * 24 * HOUR  # 23:35, six years ago
    stop_at(world, 2000)
    assert run(until="02:00", init_from="auto") < 4 * HOUR


@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_is_set_does_not_move_until(hours, run, world, tmp_path):
    """As on a machine that has booted with a wrong date, until it has asked the network."""

    def step_seconds():
        world.ahead = hours * HOUR if world.steps >= 100 else 0.0
        return 10.0

    world.step_seconds = step_seconds
    assert_complete(tmp_path, run(until="02:00"), 3)
    # a resume knows the end by the clock as it is now
    last = records(tmp_path, "step")[-1]["iter"] + 1
    saved = load(tmp_path, last)["clock"]["deadline"]
    end = datetime(2026, 3, 5, 2, 0).timestamp() + hours * HOUR
    assert saved == pytest.approx(end, rel=0, abs=60)


def test_a_run_says_when_it_stops_only_as_far_as_it_knows(run, world, tmp_path, capsys):
    run(hours=8, max_minutes=60)
    assert "hours 0.01 of 8.00, in " in (out := capsys.readouterr().out)
    assert "; stops by about 00:00 on 2026-03-05\n" in out
    run(hours=8, max_iters=400, init_from="auto")
    assert re.search(
        r"of 8\.00 or 400 iterations, in .*; stops by about 07:0\d\n", capsys.readouterr().out
    )


def test_other_hours_on_a_resume_say_how_the_rate_changes(run, world, tmp_path, capsys):
    stop_at(world, 150)
    run(143, hours=1)
    capsys.readouterr()
    seconds = run(hours=2, init_from="auto")
    err = capsys.readouterr().err
    warning = (
        r"the learning rate continues at (7.\d+e-01), not at 5.\d+e-01, though its decay had begun"
    )
    new = float(re.search(warning, err)[1])
    assert rates(tmp_path)[151] == pytest.approx(new, abs=0.01)
    assert rates(tmp_path)[-1] == 0.0 and seconds == pytest.approx(1.55 * HOUR, rel=0.05)


def test_a_run_by_iterations_goes_on_by_the_clock_and_back(run, world, tmp_path):
    stop_at(world, 99)
    run(143, max_iters=1000)
    stop_at(world, 199)
    run(143, hours=1, init_from="auto")
    # 2,000 s of updates, 9 evaluations, 8 saves; all but the last evaluation and save
    assert rates(tmp_path)[-1] == pytest.approx(1 - (2000 + 180 + 24) / (HOUR - 43), abs=0.02)
    run(max_iters=250, init_from="auto")
    assert rates(tmp_path)[200] == pytest.approx(0.2) and world.steps == 250


def test_a_pause_is_no_time_of_the_run_and_no_iteration_is_slow(run, world, tmp_path, capsys):
    """The process is stopped, or the machine sleeps: nobody looks at the clock for six hours."""

    def step_seconds():
        if world.steps == 100:
            world.now += 6 * HOUR
        return 10.0

    world.step_seconds = step_seconds
    assert_complete(tmp_path, run(hours=1) - 6 * HOUR, 1)
    end = records(tmp_path, "end")[0]
    assert end["ledger"]["pause"] == pytest.approx(6 * HOUR, rel=0.01)
    assert max(r["step_ms"] for r in records(tmp_path, "step")) <= 41_000
    assert "eta 6h" not in capsys.readouterr().out


def test_until_a_clock_time_a_pause_is_lost(run, world, tmp_path):
    def step_seconds():
        if world.steps == 100:
            world.now += HOUR
        return 10.0

    world.step_seconds = step_seconds
    assert run(until="01:00") == pytest.approx(2 * HOUR, rel=0.01)
    assert rates(tmp_path)[-1] == 0.0


def test_an_explicit_max_iters_ends_earlier_and_the_schedule_with_it(run, world, tmp_path, capsys):
    seconds = run(hours=1, max_iters=100)
    assert world.steps == 100 and seconds < 0.5 * HOUR
    assert rates(tmp_path)[-1] == 0.0 and rates(tmp_path)[50] == pytest.approx(0.5, abs=0.02)
    assert "hours 0.01 of 1.00 or 100 iterations, in " in capsys.readouterr().out
    assert records(tmp_path, "end")[0]["reason"] == "max_iters"


def test_a_warm_up_longer_than_a_tenth_of_the_time_becomes_that(run, world, tmp_path, capsys):
    run(hours=1, warmup_iters=2000)
    assert "; warm-up: 2,000 iterations, a tenth of the time at most\n" in capsys.readouterr().out
    lr = rates(tmp_path)
    assert lr.index(max(lr)) == pytest.approx(world.steps / 10, abs=6) and max(lr) > 0.95
    assert lr[-1] == 0.0


def test_time_that_is_up_before_the_first_update_still_ends_well(run, world, tmp_path):
    world.eval_seconds = 60.0
    run(hours=0.01)
    assert world.steps <= 2 and rates(tmp_path)[-1] == 0.0
    assert (tmp_path / f"ckpt-{world.steps:08}.pt").exists()


# -----------------------------------------------------------------------------
# Real time

TWO_CLOCKS = """
import os
import time
import train
from common.console import run_main
seconds, rank, step = [0.0], int(os.environ["RANK"]), train.train_step
def slow_step(*arguments):
    seconds[0] += (10, 7)[rank]
    return step(*arguments)
time.perf_counter = lambda: seconds[0]
train.train_step = slow_step
run_main(train.main)
"""


def test_two_ranks_follow_the_clock_of_the_first(dataset, tmp_path):
    """On its own the second would go on when the first has left, and meanwhile at other rates."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    environment |= dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    options = LINEAR | dict(learning_rate=0.01, hours=0.1, max_iters=10**6, eval_interval=10)
    arguments = ["-c", TWO_CLOCKS, *flags(dataset, tmp_path, **options)]
    ranks = [
        start_process(*arguments, **environment, RANK=str(n), LOCAL_RANK=str(n)) for n in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
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
# The clock alone


class Hand:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_clock(**changes) -> tuple[Clock, Hand]:
    hand = Hand()
    ledger = Ledger(0.0, hand)
    return Clock(Config(max_iters=NEVER, **changes), ledger, {}, from_main=None), hand


def test_the_pace_is_a_mean_over_the_last_minutes():
    run, _ = make_clock(hours=1)
    for seconds, count in ((10, 100), (20, 30)):
        for _ in range(count):
            run.note_iterations(seconds, 1)
    assert 19 < run.pace < 20


def test_a_look_every_few_seconds_makes_a_long_iteration_no_pause():
    ledger = Ledger(0.0, hand := Hand())
    with ledger.book("steps"):
        for _ in range(50):
            hand.now += 10
            ledger.look()
        assert ledger.seconds["pause"] == 0
        hand.now += 100
    # the machine may have worked until just before the next look
    assert (ledger.seconds["steps"], ledger.seconds["pause"]) == (510, 90)


def test_the_next_clock_time_is_today_or_tomorrow():
    at = next_time("07:00", EVENING)
    assert datetime.fromtimestamp(at) == datetime(2026, 3, 5, 7, 0)
    assert datetime.fromtimestamp(next_time("23:30", EVENING)) == datetime(2026, 3, 4, 23, 30)
    assert datetime.fromtimestamp(next_time("7:00", at)) == datetime(2026, 3, 6, 7, 0)


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
    with pytest.raises(UserError, match="name one card"):
        bench.main(["plan", "--gpu=all", "--hours=8"])


def test_plan_says_how_much_disk(tmp_path, capsys, dataset):
    """Two checkpoints, best.pt and the one being written, each as large as a real one."""
    p = plan(tmp_path, "config/gpt124m_4070.py", "--iter_seconds=9.34", "--dataset_tokens=10B")
    line = "disk     26 GB: 20 GB of shards (10B tokens) and 4 checkpoints of 1.5 GB\n"
    assert line in capsys.readouterr().out
    assert p["disk_gb"] == pytest.approx(20 + 4 * 1.4924, abs=0.01)
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
