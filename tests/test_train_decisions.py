"""
Check what train.py's loop decides before each iteration, and where the peak rate of a wsd schedule
ends. integration/test_time_limits.py has whole runs by a fake clock.
"""

import math
from dataclasses import replace

import pytest

from configurator import Config
from train import evaluation_due, get_lr, run_length, save_due, why_over

# -----------------------------------------------------------------------------
# Each question by itself


def test_a_run_is_over_for_the_first_reason_that_applies():
    def over(hours=0.5, it=7, **keys):
        return why_over(Config(**keys), it, hours)

    assert over(max_iters=8) == ""
    assert over(max_iters=7) == "max_iters"
    assert over(max_iters=6) == "max_iters"  # a resume with a smaller max_iters
    assert why_over(Config(hours=1.0), 7, 0.99) == ""
    assert why_over(Config(hours=1.0), 7, 1.0) == "hours"
    assert why_over(Config(hours=1.0, max_iters=7), 7, 1.0) == "max_iters"


def test_a_run_evaluates_at_every_interval():
    due = [it for it in range(41) if evaluation_due(Config(eval_interval=10), it)]
    assert due == [0, 10, 20, 30, 40]


def test_a_run_saves_at_intervals_and_after_an_evaluation():
    def due(it=20, since_save=10.0, val_loss=None, interval=15):
        return save_due(Config(checkpoint_interval=interval), it, val_loss, since_save)

    assert [it for it in range(46) if due(it)] == [15, 30, 45]
    assert not due(0) and not due(0, val_loss=5.6)  # the untrained model
    assert due(1, interval=1)
    assert due(val_loss=3.0)
    assert not due(since_save=599, interval=0) and due(since_save=600, interval=0)
    assert not due(since_save=600)  # an interval in iterations takes the place of the ten minutes


# linear warmup over three iterations to 1e-2; from iteration 11 on 1e-3
RATES = Config(max_iters=14, warmup_iters=3, lr_decay_iters=11, learning_rate=1e-2, min_lr=1e-3)
WARM, END = [2.5e-3, 5e-3, 7.5e-3], [1e-3] * 3
LINEAR = [*WARM, *(1e-2 - 1.125e-3 * step for step in range(8)), *END]
# 4.4 iterations of decay, which are the last two fifths of 11
WSD = [*WARM, *[1e-2] * 4, *(1e-3 + 9e-3 * left / 4.4 for left in (4, 3, 2, 1)), *END]
COSINE = [*(1e-3 + 4.5e-3 * (1 + math.cos(math.pi * it / 11)) for it in range(11)), *END]
SCHEDULES = {  # keys, and the rates of 14 iterations
    "linear": (dict(lr_schedule="wsd", decay_fraction=1.0), LINEAR),
    "to the end of the run": (
        dict(lr_schedule="wsd", decay_fraction=1.0, lr_decay_iters=0, max_iters=11),
        LINEAR,
    ),
    "wsd": (dict(lr_schedule="wsd", decay_fraction=0.4), WSD),
    "no decay": (dict(lr_schedule="wsd", decay_fraction=0.0), [*WARM, *[1e-2] * 8, *END]),
    "a warmup that outlasts the run": (
        dict(warmup_iters=20),
        [1e-2 * (it + 1) / 21 for it in range(14)],
    ),
    "cosine without a warmup": (dict(warmup_iters=0), COSINE),
    # a run by hours warms up for a tenth of its iterations at most
    "by hours": (
        dict(
            hours=1.0,
            lr_schedule="wsd",
            decay_fraction=1.0,
            warmup_iters=20,
            lr_decay_iters=11,
            min_lr=0.0,
        ),
        [1e-2 / 2.1, 2e-2 / 2.1, *(1e-2 * (11 - it) / 9.9 for it in range(2, 11)), *[0.0] * 3],
    ),
}


@pytest.mark.parametrize("keys, expected", SCHEDULES.values(), ids=SCHEDULES)
def test_the_learning_rates_of_each_schedule(keys, expected):
    c = replace(RATES, **keys)
    rates = [get_lr(it, c, run_length(it, c, 0.0), c.learning_rate) for it in range(14)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("peak", [1e-4, 7e-2])
def test_each_group_decays_to_the_same_fraction_of_its_peak(peak):
    """Scale min_lr with the peak. Otherwise the rate of a group with a small peak would rise."""
    rates = [get_lr(it, RATES, 14, peak) for it in range(14)]
    assert rates == pytest.approx([peak / 1e-2 * get_lr(it, RATES, 14, 1e-2) for it in range(14)])


def test_a_rate_below_min_lr_does_not_rise_to_it():
    """A resume after a divergence may type such a rate, and the run keeps its min_lr."""
    low = replace(RATES, learning_rate=1e-4)
    assert [get_lr(it, low, 14, 1e-4) for it in (3, 10, 13)] == [1e-4] * 3


def test_the_length_of_a_run_with_hours_follows_its_pace():
    timed = Config(hours=8.0, max_iters=10_000)
    assert run_length(0, Config(max_iters=300), 0.0) == 300
    assert run_length(50, timed, 0.8) == 500
    assert run_length(0, timed, 0.0) == 10_000  # before the first update nobody knows
    assert run_length(50, replace(timed, max_iters=200), 0.8) == 200
