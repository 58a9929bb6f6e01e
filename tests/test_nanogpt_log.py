"""Read a run's time and losses from nanoGPT's console output and from CSV files."""

import pytest
from program import ROOT, refused, run

from reports.runs import open_run

STEP_MS, PAUSE_MS, COMPILE_MS = 100, 5_000, 30_000


def launch(log_interval: int, last: int, eval_interval: int = 500, start: int = 0) -> str:
    """Return what nanoGPT prints from iteration `start` to `last`, with times chosen here."""
    lines = []
    for it in range(start, last + 1):
        ms = STEP_MS
        if it % eval_interval == 0:
            lines.append(f"step {it}: train loss 3.0000, val loss 3.1000")
            ms += PAUSE_MS
            if it > 0:
                lines.append("saving checkpoint to out")
        if it == start:
            ms += COMPILE_MS
        if it % log_interval == 0:
            mfu = -100 if it == start else 10
            lines.append(f"iter {it}: loss 3.0000, time {ms:.2f}ms, mfu {mfu:.2f}%")
    return "\n".join(lines) + "\n"


def hours(iterations: int, pauses: int) -> float:
    return (iterations * STEP_MS + pauses * PAUSE_MS) / 3.6e6


def read(tmp_path, text: str):
    path = tmp_path / "nanogpt.log"
    path.write_text(f"tokens per iteration will be: 524,288\n{text}")
    return open_run(path)


# log_interval and eval_interval: 7 and 500 meet at 3,500
@pytest.mark.parametrize("log, evals", [(1, 500), (7, 500), (200, 500), (1000, 2000)])
def test_the_hours_of_a_nanogpt_log_hold_every_evaluation_but_no_compile_time(log, evals, tmp_path):
    """
    Count the time of an evaluation even if log_interval skips the iteration at which it was made.
    The evaluation at iteration 0 counts as startup.
    """
    whole = launch(log, 8 * evals - 100, evals)
    resumed = launch(log, 17 * evals - 100, evals, start=8 * evals)  # hours are of the whole run
    for text, last in ((whole, 8 * evals - 100), (resumed, 17 * evals - 100)):
        seen = read(tmp_path, text)
        iterations = last // log * log + 1  # up to the last logged one
        expected = hours(iterations, (iterations - 1) // evals)
        assert seen.step["hours"][-1] == pytest.approx(expected)
        assert seen.eval["seconds"].max() == pytest.approx(PAUSE_MS / 1000) and not seen.warnings
    text = launch(log, 8 * evals, evals)
    ended = text[: text.index("saving checkpoint", text.index(f"step {8 * evals}"))]
    assert read(tmp_path, ended).hours == pytest.approx(hours(8 * evals, 8))
    again = launch(log, 8 * evals + 300, evals) + launch(log, 10 * evals, evals, start=8 * evals)
    for text, pauses in ((whole, 7), (ended, 8), (again, 10)):
        seconds = read(tmp_path, text).eval["seconds"]
        assert seconds.max() == pytest.approx(PAUSE_MS / 1000)
        assert seconds.sum() == pytest.approx(pauses * PAUSE_MS / 1000)


def test_compile_time_is_not_read_as_an_evaluation_if_a_resume_repeats_the_last_evaluation(
    tmp_path,
):
    """
    Read a log in which nanoGPT is killed right after an evaluation, and evaluates again when it is
    resumed.
    """
    before = launch(1, 1000).partition("saving checkpoint to out\niter 1000:")[0]
    seen = read(tmp_path, f"{before}\n{launch(1, 1200, start=1000)}")
    assert [*seen.eval["seconds"][1:]] == pytest.approx([PAUSE_MS / 1000] * 2)


# 3,500 is the first iteration that 7 and 500 share; every multiple of 1,000 has an evaluation in it
@pytest.mark.parametrize("log, time", [(7, hours(3000, 0)), (1000, None)])
def test_warns_if_a_log_does_not_show_how_long_evaluations_take(log, time, tmp_path):
    """
    Print n/a for the time of evaluations and checkpoints when every logged iteration includes an
    evaluation or none does.
    """
    path = tmp_path / "nanogpt.log"
    seen = read(tmp_path, launch(log, 3000))
    (warning,) = seen.warnings
    assert "evaluations" in warning
    assert seen.hours == (time and pytest.approx(time))
    (line,) = [line for line in run("compare.py", path).out.splitlines() if "of both" in line]
    assert line.split() == ["time", "of", "both", "n/a"]


# -----------------------------------------------------------------------------
# Other people's runs


def test_compare_refuses_a_csv_without_any_iteration_or_evaluation(tmp_path):
    for n, text in enumerate(["a,b\n1,2\n", "", "# dataset = 'x'\niter,val_loss\n5,\n"]):
        (tmp_path / f"{n}.csv").write_text(text)
        refused(run("compare.py", tmp_path / f"{n}.csv"), f"{n}.csv", "no iteration")


def test_the_mean_of_ten_public_runs_has_a_loss_band_and_no_hours():
    seen = open_run(ROOT / "results/public_runs/fineweb_124m_muon_h100.csv")
    assert seen.warnings == [] and seen.hours is None and len(seen.checkpoint["iter"]) == 0
    assert (seen.iterations, seen.tokens) == (3250, 3250 * 524_288)
    # embedding, head with bias, gains; each block 12 x 768^2 weights, 9 x 768 biases, 2 gains
    size = 2 * 50304 * 768 + 50304 + 2 * 768 + 12 * (12 * 768**2 + 9 * 768 + 2 * 768)
    assert seen.start["parameters"] == size
    at_250 = {key: seen.eval[key][1] for key in ("iter", "val_loss", "low", "high")}
    assert at_250 == dict(iter=250, val_loss=4.09784, low=4.05795, high=4.13773)
