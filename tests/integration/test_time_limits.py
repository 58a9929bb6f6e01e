"""
Run with hours and the default ten minutes between checkpoints, on a simulated clock and once in
real time.
"""

import errno
import re
from itertools import pairwise
from unittest import mock

import pytest
from fault_injection import watched
from program import InProcessRun, Run, finish_ranks, flags, sigterm, start_ranks

TINY = dict(n_layer=1, n_head=1, n_embd=16, gradient_accumulation_steps=1, eval_tokens=64)
TINY |= dict(lr_schedule="wsd", decay_fraction=1.0, learning_rate=1.0, min_lr=0.0, warmup_iters=0)
HOURS = 0.25
SECONDS = 900  # some 80 iterations of 10 s


@pytest.fixture
def trainer() -> InProcessRun:
    return InProcessRun(fake_clock=True)


def rate_at(ran: Run, hours: float) -> float:
    """Return the learning rate of the first iteration that ended after this many hours."""
    return next(lr for used, lr in ran.steps("hours", "lr") if used >= hours)


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
    assert rate_at(ran, HOURS / 2) == pytest.approx(0.5, abs=0.03)
    last = len(rate)
    assert ran.evals("iter") == [*range(0, last, 5), last]
    assert ran.saved[-1] == last


def test_the_schedule_of_a_timed_run_follows_a_jump_of_the_clock(trainer, tiny, ran):
    """Let the clock jump by five minutes, as it does for a suspended process."""

    def suspend():
        trainer.now += 300

    trainer.at["iteration", 30] = suspend
    trainer.launch(**tiny, hours=HOURS)
    assert SECONDS <= 3600 * ran.end["hours"] <= SECONDS + 20
    assert ran.steps("lr")[-1] <= 16 / SECONDS
    assert len(ran.steps("lr")) == pytest.approx(60, abs=3)


def test_max_iters_ends_the_schedule_of_a_timed_run_earlier(trainer, tiny, ran):
    trainer.launch(**tiny, hours=HOURS, max_iters=41)
    assert ran.end["reason"] == "max_iters"
    assert ran.steps("lr") == pytest.approx([1 - it / 41 for it in range(41)])


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
    processes = start_ranks(2, *flags(**keys), script=TWO_CLOCKS)
    results = finish_ranks(processes, timeout=60)
    assert [result.code for result in results] == [0, 0]
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
    result = trainer.launch(**tiny, hours=0.1, init_from="auto")
    assert result.code == 0 and "iterations are done" in result.out
    assert (ran.out_dir / "metrics.jsonl").read_bytes() == log

    assert trainer.launch(**tiny, hours=0.2, init_from="auto").code == 0
    rate = ran.steps("lr")
    assert len(rate) == pytest.approx(2 * iterations, abs=4)
    # half of the longer schedule is over
    assert rate[iterations] == pytest.approx(0.5, abs=0.05)
    assert rate[-1] == pytest.approx(0.0, abs=0.02)


def test_a_run_that_ended_before_its_hours_resumes_with_more_iterations(trainer, tiny, ran):
    keys = tiny | dict(hours=HOURS)
    for iterations in (10, 10, 20):
        result = trainer.launch(**keys | dict(max_iters=iterations, init_from="auto"))
        assert result.code == 0 and len(ran.steps("lr")) == iterations


def test_the_hours_do_not_include_the_time_between_launches(trainer, tiny, ran):
    trainer.at["iteration", 42] = sigterm
    assert trainer.launch(**tiny, hours=HOURS).code == 143
    trainer.now += 5 * 3600
    assert trainer.launch(**tiny, hours=HOURS, init_from="auto").code == 0
    assert SECONDS <= 3600 * ran.end["hours"] <= SECONDS + 20
    assert all(0 < before - after < 0.03 for before, after in pairwise(ran.steps("lr")))
    assert ran.steps("lr")[-1] <= 16 / SECONDS


def test_more_hours_on_a_resume_stretch_the_rest_of_the_schedule(trainer, tiny, ran):
    trainer.at["iteration", 40] = sigterm
    trainer.launch(**tiny, hours=HOURS)
    half = ran.steps("lr")[-1]
    assert half == pytest.approx(0.56, abs=0.02)
    assert trainer.launch(**tiny, hours=2 * HOURS, init_from="auto").code == 0
    assert ran.steps("lr")[40] == pytest.approx(1 - (1 - half) / 2, abs=0.02)
    assert ran.steps("lr")[-1] <= 16 / SECONDS
    assert 2 * SECONDS <= 3600 * ran.end["hours"] <= 2 * SECONDS + 20


def test_a_run_may_switch_between_max_iters_and_hours_when_it_resumes(trainer, tiny, ran):
    trainer.at["iteration", 20] = sigterm
    trainer.launch(**tiny, max_iters=100)
    trainer.at["iteration", 50] = sigterm
    trainer.launch(**tiny, hours=HOURS, init_from="auto")
    assert ran.steps("lr")[-1] == pytest.approx(1 - trainer.now / SECONDS, abs=0.05)
    trainer.launch(**tiny, max_iters=100, init_from="auto")
    assert ran.steps("lr")[50] == pytest.approx(0.5)
    assert trainer.count["iteration"] == 100


# -----------------------------------------------------------------------------
# What else follows the clock


def test_a_checkpoint_is_saved_every_ten_minutes_by_default(trainer, tiny, ran):
    trainer.seconds |= dict(iteration=60.0, save=30.0)
    trainer.launch(**tiny, max_iters=35, eval_interval=1000)
    # ten minutes after the first evaluation, and after each save
    assert ran.column("checkpoint", "iter") == [10, 20, 30, 35]


def test_a_failed_save_is_tried_again_when_the_next_one_is_due(trainer, tiny, ran):
    """Keep the training fast while the disk is full."""

    def fail():
        if trainer.now < 1300:
            raise OSError(errno.ENOSPC, "No space left on device")

    trainer.seconds |= dict(iteration=60.0, save=0.0)
    for number in range(1, 100):
        trainer.at["save", number] = fail
    trainer.launch(**tiny, max_iters=35, eval_interval=1000)
    assert ran.column("event", "iter") == [10, 20]
    assert ran.column("checkpoint", "iter") == [30, 35]


ETA = re.compile(r"^iter (\d+): .* eta (?:(\d+)m)?(\d+)s$", re.MULTILINE)


def etas(out: str) -> dict[int, int]:
    """Map each iteration to its printed eta in seconds."""
    return {int(it): 60 * int(m or 0) + int(s) for it, m, s in ETA.findall(out)}


def test_eta_follows_this_launchs_pace_with_its_evaluations_and_saves(trainer, tiny):
    """Leave out the evaluation before the first iteration."""
    keys = tiny | dict(max_iters=100, eval_interval=30)
    trainer.at["iteration", 40] = sigterm
    first = etas(trainer.launch(**keys).out)
    # 36 iterations of 10 s, and after them an evaluation of 4 s and two files of 1 s, are over
    assert first[35] == round((36 * 10 + 4 + 2) / 36 * 64)
    trainer.seconds["iteration"] = 20.0
    second = etas(trainer.launch(**keys, init_from="auto").out)
    assert second[50] == 49 * 20  # none since the resume
    # no eta is longer than the time that hours leave
    more = keys | dict(max_iters=200, hours=(trainer.now + 120) / 3600)
    assert etas(trainer.launch(**more, init_from="auto").out)[101] <= 120 - 2 * 20 + 2


def test_compile_time_is_recorded_separately_and_not_counted_as_training_time(trainer, tiny, ran):
    def compile_slowly(function, **options):
        trainer.now += 100.0
        return function

    with mock.patch("torch.compile", compile_slowly):
        trainer.launch(**tiny | dict(compile=True), max_iters=5)
    end = ran.end
    # 100 s to compile, then an eager and a compiled evaluation, which check the compiled code
    assert end["ledger"]["compile"] == 100 + 2 * 4
    # five iterations, the evaluation at their end, and a save; InProcessRun takes the evaluation at
    # their beginning for a part of the check before it, so it adds no time to the fake clock
    assert 3600 * end["hours"] == pytest.approx(5 * 10 + 4 + 1)
