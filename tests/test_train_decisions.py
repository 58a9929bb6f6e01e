"""
Check what train.py's loop decides before each iteration, and where the peak rate of a wsd schedule
ends. Cases worked out by hand come first, then ten thousand simulated runs that train nothing.
"""

import copy
import itertools
import math
import random
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from configurator import UNREACHED, Config
from train import (
    COMPLETE,
    Progress,
    evaluation_due,
    get_lr,
    is_best,
    run_length,
    save_due,
    why_stop,
)
from training.clock import RESERVE, Clock, Position
from training.ranks import Ranks

IN_TIME = Position(seconds_since_save=10.0)
LATE = replace(IN_TIME, share=0.99, has_spare_time=False)
OVER = replace(LATE, share=1.0, time_is_up=True)
STOPS = (*COMPLETE, "data", "SIGTERM")

# -----------------------------------------------------------------------------
# Each question by itself


def twice(question, *arguments):
    """Ask twice, check that both answers agree, and return the answer."""
    answer = question(*arguments)
    assert question(*arguments) == answer
    return answer


def asked(question, *arguments):
    """Ask twice, check that the arguments did not change, and return the answer."""
    before = repr(arguments)
    answer = twice(question, *arguments)
    assert repr(arguments) == before
    assert question == why_stop or isinstance(answer, bool)
    return answer


def test_a_run_stops_and_names_the_first_reason_that_applies():
    def stop(now=IN_TIME, it=7, **keys):
        return asked(why_stop, Config(**keys), now, Progress(iter_num=it))

    assert stop(max_iters=8) is None
    assert stop(max_iters=7) == "max_iters"
    assert stop(max_iters=6) == "max_iters"  # a resume with a smaller max_iters
    assert stop(now=LATE, hours=1) is None
    assert stop(now=OVER, hours=1) == "hours"
    assert stop(now=OVER, hours=1, max_iters=7) == "max_iters"


def test_a_run_evaluates_at_every_interval_and_when_it_is_complete():
    def due(it, now=IN_TIME, stop=None, evaluated_at=5):
        progress = Progress(iter_num=it, evaluated_at=evaluated_at)
        return asked(evaluation_due, Config(eval_interval=10), now, progress, stop)

    assert [it for it in range(41) if due(it)] == [0, 10, 20, 30, 40]
    assert not due(20, evaluated_at=20)
    assert not due(20, now=LATE)  # the final evaluation must still fit
    assert {stop for stop in STOPS if due(20, stop=stop)} == set(COMPLETE)
    assert {stop for stop in STOPS if due(23, stop=stop)} == set(COMPLETE)
    assert due(23, now=OVER, stop="hours")
    assert not due(23, stop="max_iters", evaluated_at=23)


def test_a_timed_run_evaluates_once_in_each_twentieth_of_its_schedule():
    def due(share, evaluated_share, it=7, eval_interval=UNREACHED):
        c = Config(hours=1, eval_interval=eval_interval)
        progress = Progress(iter_num=it, evaluated_at=3, evaluated_share=evaluated_share)
        return asked(evaluation_due, c, replace(IN_TIME, share=share), progress, None)

    assert due(0.0, -1.0, it=0)  # no evaluation was made yet
    assert not due(0.049, 0.0) and due(0.051, 0.0)
    assert not due(0.099, 0.051) and due(0.101, 0.051)
    assert due(0.9, 0.101)
    assert not due(0.96, 0.951) and due(1.0, 0.96)  # the last twentieth begins at 0.95
    assert not due(0.3, 0.5)  # the share may fall
    assert due(0.0, -1.0)  # the evaluations so far belong to another schedule
    # unless eval_interval is set
    assert not due(0.9, 0.101, eval_interval=10) and due(0.9, 0.9, it=20, eval_interval=10)


def test_weights_are_the_best_if_their_own_validation_loss_is_the_lowest_so_far():
    def best(val_loss, best_val_loss, it=20, evaluated_at=20, best_iter=10):
        values = dict(val_loss=val_loss, best_val_loss=best_val_loss, best_iter=best_iter)
        return asked(is_best, Progress(iter_num=it, evaluated_at=evaluated_at, **values))

    assert best(2.9, 3.0)
    assert not best(3.1, 3.0)
    assert not best(3.0, 3.0)  # the earlier weights stay the best
    assert not best(2.9, 3.0, evaluated_at=19)
    assert not best(math.nan, 3.0) and not best(math.inf, math.inf)
    assert best(2.9, math.inf)  # no earlier loss counts
    assert not best(4.0, 4.0, it=0, evaluated_at=0, best_iter=0)  # nothing to beat yet


def test_a_run_saves_at_intervals_at_a_new_best_loss_and_at_its_end():
    """
    Save after other evaluations only with always_save_checkpoint. Retry a failed save after 30
    seconds.
    """

    def due(it=20, now=IN_TIME, stop=None, failed=False, newest=(10, 10), keys=(), **progress):
        values = dict(evaluated_at=10, val_loss=3.0, best_val_loss=2.0, best_iter=5) | progress
        c = Config(**dict(checkpoint_interval=15, always_save_checkpoint=False) | dict(keys))
        saver = SimpleNamespace(newest=newest, failed=failed)
        return asked(save_due, c, now, Progress(iter_num=it, **values), saver, stop)

    by_time = dict(checkpoint_interval=0)
    always = dict(always_save_checkpoint=True)
    after = {
        seconds: replace(IN_TIME, seconds_since_save=seconds) for seconds in (29, 30, 599, 600)
    }
    late_after = replace(LATE, seconds_since_save=600)

    assert [it for it in range(46) if due(it)] == [15, 30, 45]
    assert not due(0)  # the untrained model
    assert not due(15, newest=(15, 10)) and due(15, newest=(15, 5)) and due(15, newest=(14, 10))
    assert due(15, newest=None)
    assert not due(15, now=LATE)
    assert not due(now=after[599], keys=by_time) and due(now=after[600], keys=by_time)
    assert not due(now=after[600])  # an interval in iterations takes the place of the ten minutes
    assert not due(now=late_after, keys=by_time)

    assert due(evaluated_at=20, val_loss=1.0)  # the best so far
    assert not due(evaluated_at=20)
    assert due(evaluated_at=20, keys=always)
    assert not due(evaluated_at=19, val_loss=1.0, keys=always)
    assert not due(evaluated_at=20, val_loss=1.0, now=LATE)
    assert not due(0, evaluated_at=0, best_iter=0, keys=always)

    assert not due(failed=True) and not due(now=after[29], failed=True)
    assert due(now=after[30], failed=True) and not due(now=after[30])
    assert not due(now=after[30], failed=True, newest=(20, 10))

    for stop in STOPS:
        assert due(stop=stop) and due(0, stop=stop) and due(now=LATE, stop=stop)
        assert not due(stop=stop, newest=(20, 10))  # this iteration is on the disk already


# max_iters, lr_decay_iters, warmup_iters, decay_fraction: the end of the peak, by hand
PEAKS = {
    (100, 0, 5, 0.4): 60,
    (11, 0, 0, 0.4): 7,  # the decay begins at 6.6
    (11, 0, 0, 0.6): 5,  # at 4.4
    (100, 0, 70, 0.4): 70,  # no decay before the end of the warmup
    (100, 50, 5, 0.4): 30,
    (100, 200, 5, 0.4): 120,  # beyond the run
    (100, 0, 5, 0.0): 100,
    (100, 0, 5, 1.0): 5,
}


def test_a_longer_wsd_run_has_the_same_learning_rates_up_to_the_decay():
    """
    Check that a longer run has the same rates up to the last iteration before the decay.
    """
    for (max_iters, lr_decay_iters, warmup_iters, decay_fraction), last in PEAKS.items():
        keys = dict(lr_schedule="wsd", warmup_iters=warmup_iters, decay_fraction=decay_fraction)
        c = Config(**keys, max_iters=max_iters, lr_decay_iters=lr_decay_iters)
        longer = Config(**keys | dict(decay_fraction=0.0), max_iters=1000)
        for it in range(last):  # the iterations before that checkpoint
            assert get_lr(it, c, max_iters, 1.0) == get_lr(it, longer, 1000, 1.0)
        assert get_lr(last + 1, c, max_iters, 1.0) < 1


def test_the_length_of_a_run_with_hours_follows_its_pace():
    timed = Config(hours=8.0, max_iters=UNREACHED)
    assert run_length(0, Config(max_iters=300), 0.0) == 300
    assert run_length(50, timed, 0.1) == 500
    # before the first update nobody knows, but a warmup over 5% of the run must begin well above 0
    assert 10 <= 0.05 * run_length(0, timed, 0.0) <= 1000
    assert run_length(0, replace(timed, max_iters=200), 0.0) == 200


# -----------------------------------------------------------------------------
# Whole nights

# The shortest and the longest duration, in seconds
RANGES = dict(
    iteration=(1.0, 30.0), evaluation=(0.5, 60.0), checkpoints=(0.2, 30.0), samples=(0.5, 30.0)
)


class Night:
    """
    Simulate all launches of a run with a fake clock: durations vary, the disk may be full, and
    signals and kills end launches.
    """

    def __init__(self, seed: int, is_rough: bool):
        self.chance = random.Random(seed)
        self.is_rough = is_rough  # a duration may be ten times the last one of its kind
        self.is_surprised = False  # whether a duration was over twice the expected one
        self.now = 0.0
        # short durations at first, for which the clock reserves time
        self.seconds = {what: low * self.chance.uniform(1, 3) for what, (low, _) in RANGES.items()}
        self.on_disk: dict | None = None  # the newest checkpoint
        self.saves: list[tuple[int, int]] = []
        self.evaluations: list[int] = []
        self.untrained = math.inf  # loss of the untrained weights
        # the val loss of each evaluation after which the weights were saved
        self.saved_losses: list[float] = []
        self.best_pt = math.inf  # val loss of the weights in best.pt
        self.shares: list[float] = []  # at each update
        self.overtime = -math.inf  # seconds
        self.c = self.choose_keys()

    def choose_keys(self) -> Config:
        chance = self.chance
        keys = dict(
            eval_interval=chance.choice([UNREACHED, UNREACHED, 1, 4, 15]),
            max_iters=chance.choice([UNREACHED, UNREACHED, 0, 1, 20]),
            checkpoint_interval=chance.choice([0, 0, 1, 7]),
            always_save_checkpoint=chance.random() < 0.5,
            sample_tokens=chance.choice([0, 100]),
        )
        length = chance.choice([dict(hours=0.02), dict(hours=0.1), {}])
        if not length:
            keys |= dict(eval_interval=4, max_iters=chance.choice([0, 1, 30]))
        return Config(**keys | length)

    def take(self, what: str, clock: Clock) -> None:
        """Advance the clock by a random duration of an iteration, an evaluation or a save."""
        reserve = math.inf if what == "iteration" else RESERVE * (clock.used() + clock.left())
        expected = clock.estimates.get(what, reserve)
        most = 10 if self.is_rough else 2
        low, high = RANGES[what]
        seconds = self.seconds[what] * math.exp(self.chance.uniform(-1, 1) * math.log(most))
        self.seconds[what] = min(max(seconds, low), high)
        self.now += self.seconds[what]
        self.is_surprised |= self.seconds[what] > 2 * expected

    def run(self) -> tuple[str, int]:
        """Launch until the run is complete. Return why it stopped, and at which iteration."""
        early_ends = self.chance.choices([0, 1, 10, 30], k=self.chance.randrange(3))
        for most in itertools.chain(early_ends, itertools.repeat(UNREACHED)):
            stop, it = self.launch(most)
            if stop in COMPLETE:
                return stop, it
            self.now += self.chance.uniform(0, 20)

    def launch(self, most: int) -> tuple[str, int]:
        """
        Do what the loop of train.py does, except for training. A kill or a signal ends the launch
        after `most` iterations at the latest. Return why it stopped, and at which iteration.
        """
        c, chance = self.c, self.chance
        clock = Clock(self.now, lambda: None, c, self.on_disk, Ranks())
        progress, saver = Progress(), SimpleNamespace(newest=None, failed=False)
        if self.on_disk:
            progress = Progress(**self.on_disk["progress"])
            saver.newest = (progress.iter_num, progress.evaluated_at)
        # the evaluations and updates after that checkpoint are lost
        self.evaluations = [it for it in self.evaluations if it <= progress.evaluated_at]
        self.shares = self.shares[: progress.iter_num]
        self.now += chance.uniform(0, 5)
        clock.lap("start-up")
        clock.begin_iterations(progress)
        end = max(self.now, self.now + clock.left())  # of the hours, if it lies ahead
        disk_is_full = False

        while True:
            it = progress.iter_num
            now = twice(clock.position, it)
            stop = twice(why_stop, c, now, progress)
            most -= 1
            if not stop and most < 0:
                if chance.random() < 0.5:
                    return "kill", it
                stop = "SIGTERM"

            is_sampled = False
            if twice(evaluation_due, c, now, progress, stop):
                with clock.pause("evaluation"):
                    self.take("evaluation", clock)
                    if chance.random() < 0.01:
                        stop = "SIGTERM"
                    else:
                        loss = chance.uniform(2, 9) if chance.random() < 0.95 else math.nan
                        progress.evaluate(loss, now.share)
                        if it == 0:
                            self.untrained = progress.best_val_loss
                        self.evaluations.append(it)
                        clock.expect("evaluation")
                        is_sampled = it > 0 and c.sample_tokens > 0

            if twice(save_due, c, now, progress, saver, stop):
                with clock.pause("checkpoints"):
                    to_save = progress
                    if twice(is_best, progress):
                        to_save = replace(progress, best_val_loss=progress.val_loss, best_iter=it)
                    disk_is_full = not stop and chance.random() < (0.7 if disk_is_full else 0.1)
                    if not disk_is_full:
                        self.on_disk = dict(
                            progress=asdict(to_save),
                            ledger=dict(clock.seconds),
                            clock=copy.deepcopy(clock.state_dict()),
                        )
                        self.take("checkpoints", clock)
                        progress = to_save
                        saver.newest = (it, progress.evaluated_at)
                        self.saves.append(saver.newest)
                        if progress.evaluated_at == it:
                            self.saved_losses.append(progress.val_loss)
                        if progress.best_iter == it:
                            self.best_pt = progress.val_loss
                        clock.expect("checkpoints")
                    saver.failed = disk_is_full

            if is_sampled:
                with clock.pause("samples"):
                    self.take("samples", clock)
                    clock.expect("samples")

            if stop:
                if stop == "hours":
                    # at most one iteration and one pause of each kind after the end of the hours
                    self.overtime = self.now - end - sum(self.seconds.values())
                return stop, it

            self.take("iteration", clock)
            self.shares.append(now.share)
            progress.iter_num += 1
            clock.advance(now.share)
            clock.expect("iteration", clock.lap("steps"))


NIGHTS = 10_000


@pytest.mark.parametrize(
    "seeds",
    [range(NIGHTS // 4), pytest.param(range(NIGHTS // 4, NIGHTS), marks=pytest.mark.slow)],
    ids=["a quarter", "the others"],
)
def test_ten_thousand_simulated_runs_end_near_their_hours_and_keep_the_best_weights(
    seeds, monkeypatch
):
    """
    Check that each run evaluates and saves its last iteration, repeats no evaluation and no save,
    keeps the best weights, and makes at most one iteration and pause of each kind after its hours
    unless one of these ever took more than twice as long as expected.
    """
    in_time = 0
    for seed in seeds:
        night = Night(seed, is_rough=seed % 4 == 0)
        monkeypatch.setattr(time, "perf_counter", lambda night=night: night.now)
        stop, it = night.run()
        name = f"night {seed}"
        if not night.is_surprised:
            in_time += 1
            assert night.overtime <= 1e-9, name
        assert len(set(night.evaluations)) == len(night.evaluations), name
        assert len(set(night.saves)) == len(night.saves), name
        assert night.evaluations[-1] == it and night.saves[-1] == (it, it), name
        # best.pt has the lowest loss that was saved, unless the untrained model's is lower
        lowest = min(filter(math.isfinite, night.saved_losses), default=math.inf)
        assert night.best_pt == (lowest if lowest <= night.untrained else math.inf), name
        # the learning rate has come down
        assert stop == "max_iters" or night.shares[-1] == 1, name
        assert all(0 <= share <= 1 for share in night.shares), name
    assert in_time > len(seeds) / 4
