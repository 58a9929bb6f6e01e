"""
Run with hours and the default ten minutes between checkpoints, on a simulated clock.
"""

import re
from itertools import pairwise

import pytest
from fault_injection import watched
from program import InProcessRun, sigterm, train_ranks

TINY = dict(n_layer=1, n_head=1, n_embd=16, gradient_accumulation_steps=1, eval_tokens=64)
TINY |= dict(lr_schedule="wsd", decay_fraction=1.0, learning_rate=1.0, min_lr=0.0, warmup_iters=0)
HOURS = 0.25
SECONDS = 900  # some 80 iterations of 10 s


@pytest.fixture
def trainer() -> InProcessRun:
    return InProcessRun(fake_clock=True)


# -----------------------------------------------------------------------------
# The schedule of a timed run


def test_a_timed_run_trains_for_its_hours_with_its_schedule_complete(trainer, tiny, ran):
    result = trainer.launch(**tiny, hours=HOURS, eval_interval=5)
    assert result.code == 0
    assert "23:15" in result.out.partition("iter 0:")[0]
    # an iteration of 10 s or an evaluation of 4 s may end after the hours; an evaluation and a save
    # of 1 s follow
    assert SECONDS <= 3600 * ran.end["hours"] <= SECONDS + 10 + 4 + 4 + 1
    assert ran.end["reason"] == "hours"
    rate = ran.steps("lr")
    assert rate[0] == pytest.approx(1.0, abs=0.01) and 0 <= rate[-1] <= 16 / SECONDS
    assert all(0 < before - after <= 17 / SECONDS for before, after in pairwise(rate))
    shares = [int(share) for share in re.findall(r"\((\d+)%\), mem", result.out)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] >= 98
    halfway = next(lr for hours, lr in ran.steps("hours", "lr") if hours >= HOURS / 2)
    assert halfway == pytest.approx(0.5, abs=0.03)
    last = len(rate)
    assert ran.evals("iter") == [*range(0, last, 5), last]
    assert ran.saved[-1] == last


# ten seconds an iteration for one rank, and seven for the other
TWO_CLOCKS = watched(
    """
    global now
    now += (10, 7)[int(RANK)]
    """,
    before="""
    now = 0
    time.perf_counter = lambda: now
    """,
)


@pytest.mark.slow
def test_all_ranks_follow_the_clock_of_the_first(tiny, ran):
    """
    Give the second rank a slower clock. By its own clock it would train at other rates, and longer
    than the first.
    """
    keys = tiny | dict(gradient_accumulation_steps=2, hours=0.1, learning_rate=0.01)
    train_ranks(2, script=TWO_CLOCKS, **keys)
    assert len(ran.steps("lr")) in (35, 36)
    assert ran.steps("lr")[-1] == pytest.approx(0.01 / 36, rel=0.1)
    # rank 0's time for an iteration
    assert set(ran.steps("step_ms")) == {10_000}


# -----------------------------------------------------------------------------
# Resuming timed runs


def test_a_finished_run_resumes_only_if_it_is_given_more_time(trainer, tiny, ran):
    """test_resume.py gives a finished run more iterations."""
    trainer.launch(**tiny, hours=0.1)
    iterations = len(ran.steps("lr"))
    log = (ran.out_dir / "metrics.jsonl").read_bytes()
    result = trainer.launch(**tiny, hours=0.1)
    assert result.code == 0 and "iterations (hours = 0.1)" in result.out
    assert (ran.out_dir / "metrics.jsonl").read_bytes() == log

    assert trainer.launch(**tiny, hours=0.2).code == 0
    rate = ran.steps("lr")
    assert len(rate) == pytest.approx(2 * iterations, abs=4)
    # half of the longer schedule is over
    assert rate[iterations] == pytest.approx(0.5, abs=0.05)
    assert rate[-1] == pytest.approx(0.0, abs=0.02)


def test_more_hours_on_a_resume_stretch_the_rest_of_the_schedule(trainer, tiny, ran):
    trainer.at["iteration", 40] = sigterm
    trainer.launch(**tiny, hours=HOURS)
    half = ran.steps("lr")[-1]
    assert half == pytest.approx(0.56, abs=0.02)
    assert trainer.launch(**tiny, hours=2 * HOURS).code == 0
    assert ran.steps("lr")[40] == pytest.approx(1 - (1 - half) / 2, abs=0.02)
    assert ran.steps("lr")[-1] <= 16 / SECONDS
    assert 2 * SECONDS <= 3600 * ran.end["hours"] <= 2 * SECONDS + 20


def test_an_unfinished_run_is_refused_fewer_hours_than_it_has_done(trainer, tiny):
    trainer.at["iteration", 40] = sigterm
    trainer.launch(**tiny, hours=HOURS)
    fewer = trainer.launch(**tiny, hours=0.1)
    assert fewer.code == 1 and "--hours=0.6" in fewer.err  # half an hour more than was done


# -----------------------------------------------------------------------------
# What else follows the clock


def test_a_run_saves_every_ten_minutes(trainer, tiny, ran):
    trainer.seconds |= dict(iteration=60.0, save=0.0)
    trainer.launch(**tiny, max_iters=35, eval_interval=1000)
    assert ran.column("checkpoint", "iter") == [10, 20, 30, 35]


ETA = re.compile(r"^iter (\d+): .* eta (?:(\d+)m)?(\d+)s$", re.MULTILINE)


def etas(out: str) -> dict[int, int]:
    """Map each iteration to its printed eta in seconds."""
    return {int(it): 60 * int(m or 0) + int(s) for it, m, s in ETA.findall(out)}


def test_eta_follows_the_mean_pace_of_the_iterations_of_this_launch(trainer, tiny):
    keys = tiny | dict(max_iters=100, eval_interval=30)
    trainer.at["iteration", 40] = sigterm
    first = etas(trainer.launch(**keys).out)
    assert first[35] == 64 * 10  # after an evaluation and a save
    trainer.seconds["iteration"] = 20.0
    second = etas(trainer.launch(**keys).out)
    assert second[50] == 49 * 20
    # no eta is longer than the time that hours leave
    more = keys | dict(max_iters=200, hours=(trainer.now + 120) / 3600)
    assert etas(trainer.launch(**more).out)[101] <= 120 - 2 * 20 + 2
