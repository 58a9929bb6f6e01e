"""
Check compare.py's table and picture against figures worked out by hand. Most runs are a few records
in memory; the last part goes through files and commands.
"""

import json
import math
import re
import statistics
from pathlib import Path

import mpmath
import numpy as np
import pytest
from matplotlib.figure import Figure
from program import ROOT, InProcessRun, run, write_tokens

import compare
from common.console import UserError
from tools.curves import Run, draw, open_run

TINY = dict(n_layer=1, n_embd=16, max_iters=4, eval_interval=2, eval_tokens=256)


def make_records(
    val_losses: dict[int, float],
    step_ms: float = 100,
    bits: float | None = None,
    start: dict | None = None,
    **config,
) -> list[dict]:
    """
    Return the records of a finished run: one for every iteration, evaluations of 2 s and, with each
    but the first, a checkpoint of 1 s. `bits` is the bits per byte of a loss of 1, and `start` adds
    or replaces fields of the start record.
    """
    first = dict(kind="start", config=dict(dataset="d", eval_tokens=4096) | config)
    first |= dict(tokenizer="gpt2", data_fingerprint="all", val_fingerprint="val")
    first |= dict(tokens_per_iter=1000) | (start or {})
    size, last, hours = first["tokens_per_iter"], max(val_losses), 0.0
    records = [first]
    for it in range(last + 1):
        at = dict(iter=it, tokens=it * size)
        if it in val_losses:
            hours += 2 / 3600
            losses = dict(val_loss=val_losses[it], bits_per_byte=bits and val_losses[it] * bits)
            line = dict(kind="eval", hours=hours, complete=it == last, seconds=2)
            records.append(line | at | losses)
        if it in val_losses and it > 0:
            hours += 1 / 3600
            records.append(dict(kind="checkpoint", iter=it, seconds=1))
        if it < last:
            hours += step_ms / 3.6e6
            line = dict(kind="step", hours=hours, loss=4 + (-1) ** it, lr=0.1)
            speed = dict(step_ms=step_ms, tokens_per_sec=size / step_ms * 1000)
            records.append(line | at | speed | dict(tokens_after=(it + 1) * size))
    end = dict(kind="end", reason="max_iters", iters=last, tokens=last * size, hours=hours)
    return [*records, end]


def make_run(name: str, val_losses: dict[int, float], step_ms: float = 100, **keys) -> Run:
    return Run(name, make_records(val_losses, step_ms, **keys))


def write_run(folder: Path, val_losses: dict[int, float], **keys) -> Path:
    folder.mkdir()
    lines = map(json.dumps, make_records(val_losses, **keys))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


class Table:
    """Hold what compare.py says of these runs."""

    def __init__(self, *runs: Run):
        table = compare.compare_runs([*runs])
        self.runs = table["runs"]
        self.verdicts = table["verdicts"]
        self.problem = table["problem"]

    def values(self, key: str) -> list:
        return [figures[key] for figures in self.runs.values()]

    def keys(self, beginning: str) -> list[str]:
        return [key for key in next(iter(self.runs.values())) if key.startswith(beginning)]


# -----------------------------------------------------------------------------
# Figures and verdicts


def test_compares_two_runs_at_equal_tokens_and_hours():
    """Interpolate val losses at the last token count and time that both runs reached."""
    a = make_run("a", {0: 8.0, 50: 4.0, 90: 3.2, 100: 3.0}, step_ms=36_000)
    losses = {0: 8.0, 40: 4.0, 46: 3.8, 54: 3.4, 95: 2.5}
    b = make_run("b", losses, step_ms=72_000, start=dict(tokens_per_iter=2000))
    table = Table(a, b)
    # a's last evaluation ends after 3600 + 8 + 2 s; b's third and fourth after 3312 + 6 + 1 s and
    # 3888 + 8 + 2 s
    between = (3610 - 3319) / (3898 - 3319)
    expected = dict(
        val_loss_at_equal_tokens=[3.0, 3.6],  # 100k are b's iteration 50, half-way from 3.8 to 3.4
        val_loss_at_equal_hours=[3.0, 3.8 - 0.4 * between],
        last_val_loss=[3.0, 2.5],
        tokens=[100_000, 190_000],
        hours=[(3600 + 4 * 2 + 3 * 1) / 3600, (95 * 72 + 5 * 2 + 4 * 1) / 3600],
    )
    for key, values in expected.items():
        assert table.values(key) == pytest.approx(values), key
    assert table.keys("")[:2] == [*expected][:2]  # what decides comes first
    assert table.verdicts["val_loss_at_equal_tokens"] == "a 0.6000 lower"


def curve(interval: int, last: int) -> dict[int, float]:
    """Evaluate a steep curve. A line from iteration 0 would be off by 1.2 at iteration 300."""
    return {it: 1.2 + 4.2 / (1 + it / 40) ** 0.8 for it in range(0, last + 1, interval)}


def ends(loss: float, at: int = 10) -> dict[int, float]:
    return {0: 8.0, at: loss}


AT_EQUAL = "val_loss_at_equal_tokens"
EQUAL = "the lowest two are equal within 0.005"
VERDICTS = [  # losses of each run; the verdict at equal tokens, None if there is none
    ([ends(3.0), ends(3.001), ends(3.004)], EQUAL),
    ([ends(3.0), ends(3.0134)], "a 0.0134 lower"),
    # interpolates at iteration 100 if the gap is at most a fifth of the iterations so far
    ([ends(3.5, 100), {0: 8.0, 90: 3.1, 110: 2.9}], "b 0.5000 lower"),
    ([ends(3.5, 100), {0: 8.0, 75: 3.1, 125: 2.9, 1000: 2.1}], None),
    # one loss curve, evaluated at different iterations
    ([curve(70, 1400), curve(400, 1600)], EQUAL),
]


@pytest.mark.parametrize("losses, verdict", VERDICTS)
def test_prefers_a_run_only_beyond_small_differences(losses, verdict):
    assert Table(*map(make_run, "abc", losses)).verdicts.get(AT_EQUAL) == verdict


def test_counts_iterations_by_the_end_record_or_the_last_line_of_a_killed_run():
    step = dict(kind="step", iter=25, tokens_after=26_000, hours=25, loss=3)
    end = dict(kind="end", reason="SIGTERM", iters=41, tokens=41_000, hours=41)
    table = Table(Run("a", [step, end]), Run("b", [step]))
    assert (table.values("iterations"), table.values("tokens")) == ([41, 26], [41_000, 26_000])
    assert table.values("hours") == [41, 25]


def test_of_two_evaluations_of_one_iteration_the_last_counts():
    """A complete run evaluates the averages of weights that it may have evaluated before."""
    losses = [(0, 8.0), (4, 3.0), (4, 2.0)]
    run = Run("a", [dict(kind="eval", iter=it, val_loss=loss) for it, loss in losses])
    assert [*run.eval["iter"]] == [0, 4] and [*run.eval["val_loss"]] == [8, 2]


def test_the_best_loss_is_that_of_weights_that_the_run_has_trained():
    """No checkpoint of a fine-tuned model has the lower loss of the model that it began with."""
    table = Table(make_run("tuned", {0: 2.5, 5: 3.2, 10: 3.3}, bits=1.0))
    assert table.values("best_val_loss") == table.values("best_bits_per_byte") == [3.2]


WHOLE = make_records(curve(20, 300))


@pytest.mark.parametrize(
    "records, at_end",
    [
        (WHOLE[:-2], True),  # killed before the record of its last save
        (WHOLE[:-3], False),  # killed before its last evaluation
        ([*WHOLE[:-3], WHOLE[-3] | dict(complete=False)], False),
    ],
)
def test_says_that_a_run_is_not_at_its_end_and_compares_at_equal_tokens(records, at_end, capsys):
    table = Table(Run("a", records), make_run("b", curve(20, 400)))
    assert ("\na: not at its end" in capsys.readouterr().out) == (not at_end)
    assert "equal" in table.verdicts[AT_EQUAL]


def test_shows_no_mfu_of_a_measured_peak():
    step = dict(kind="step", iter=0, loss=3, mfu=0.5)
    starts = [dict(kind="start", peak_source=source) for source in ("measured", "gpus.csv")]
    table = Table(*(Run(name, [start, step]) for name, start in zip("ab", starts, strict=True)))
    assert table.values("mfu") == [None, 0.5]


SETTINGS = [  # what another run has; the rows of the table
    (dict(compile=False), ["config/compile"]),
    (dict(dropout=0.1), ["config/dropout"]),  # a run from before this key has the key's default
    (dict(out_dir="b"), []),
    (dict(doc_mask=True), ["config/doc_mask"]),  # only the change's clone knows this key
]


@pytest.mark.parametrize("changes, differs", SETTINGS)
def test_shows_a_row_for_each_setting_that_differs(changes, differs):
    """Ignore out_dir; a key that an older run lacks has its default."""
    table = Table(make_run("a", {5: 3.0}), make_run("b", {5: 3.0}, **changes))
    assert table.keys("config/") == differs


def test_shows_the_keys_of_the_last_launch():
    short, long = (make_records({5: 3.0}, max_iters=length) for length in (30, 60))
    table = Table(Run("a", short[:1] + long), Run("b", short))
    assert table.keys("config/") == ["config/max_iters"]
    assert table.values("config/max_iters") == [60, 30]


# -----------------------------------------------------------------------------
# Which losses compare

LOSS = "b 0.5000 lower"  # of 3.0 and 2.5 nats
NO = "not comparable"


def read(val_tokens: int | None = None, **config) -> dict:
    """Return keys by which a run evaluates a part of so many validation tokens."""
    sizes = dict(eval_tokens=0, block_size=512, batch_size=8)
    return sizes | config | dict(start=dict(val_tokens=val_tokens))


COMPARED = [  # keys of both runs, the verdict on their losses
    # the same validation tokens, whatever was trained on
    ({}, dict(start=dict(data_fingerprint="more")), LOSS),
    ({}, dict(start=dict(val_fingerprint="others")), NO),
    (read(eval_tokens=4096), read(eval_tokens=8192), NO),
    # as many tokens, but the windows lie at other places
    (read(9000, eval_tokens=4096), read(9000, eval_tokens=4096, block_size=1024), NO),
    (read(eval_tokens=4096), read(eval_tokens=4096, block_size=1024), NO),
    # the split is so small that both evaluate all of it
    (read(3000, eval_tokens=4096), read(3000, eval_tokens=8192), LOSS),
    (read(3073, eval_tokens=3072), read(3073, eval_tokens=4096, block_size=1024), LOSS),
    # nearly all of it: 205 x 512 and 102 x 1024
    (read(105_000, eval_tokens=2**20), read(105_000, eval_tokens=2**20, block_size=1024), LOSS),
    # each window has one more token, the last one's target: 5 x 512, and 2 x 1024, of 3,072
    (read(3072, eval_tokens=3072), read(3072, eval_tokens=3072, block_size=1024), NO),
]


@pytest.mark.parametrize("of_a, of_b, loss", COMPARED)
def test_compares_losses_of_equal_validation_tokens_and_settings(of_a, of_b, loss, capsys):
    """Work the evaluated windows out from each run's settings, and warn if they differ."""
    a = make_run("a", {0: 8.0, 5: 3.0}, **of_a)
    b = make_run("b", {0: 8.0, 5: 2.5}, dataset="other", **of_b)
    table = Table(a, b)
    assert table.verdicts["val_loss_at_equal_hours"] == table.verdicts[AT_EQUAL] == loss
    reason = "" if loss == LOSS else "eval_" if of_a else "different validation tokens"
    assert reason in table.problem and bool(table.problem) == bool(reason)
    assert ("losses are not comparable" in capsys.readouterr().err) == bool(reason)


# -----------------------------------------------------------------------------
# Seeds of a change against seeds of its base


def make_side(name: str, losses: list[float], **keys) -> list[Run]:
    """Make one run for each final loss, with seeds 1, 2, and so on."""
    return [make_run(f"{name}-{n}", ends(x), seed=n, **keys) for n, x in enumerate(losses, start=1)]


# of the three losses of a change, 0.1 apart, the first; those of the base begin with 2.0
FIRST = [(1.7, "better"), (1.9, "inconclusive"), (2.1, "inconclusive"), (2.4, "worse")]


@pytest.mark.parametrize("first, verdict", FIRST)
def test_calls_a_change_better_or_worse_only_beyond_the_noise(first, verdict, capsys):
    """Compare the mean losses of three seeds per side, and print what --json gets."""
    change = make_side("idea", [first, first + 0.1, first + 0.2])
    table = compare.compare_seeds(change, make_side("base", [2.0, 2.1, 2.2]))
    printed = dict(re.findall(r"^(\w+): (\S+)$", capsys.readouterr().out, re.MULTILINE))
    assert printed["verdict"] == table["verdict"] == verdict
    # a variance of 0.01 on each side, and Student's t with 4 degrees of freedom from any table
    for key, value in dict(difference=first - 2.0, noise=2.776 * math.sqrt(0.02 / 3)).items():
        assert [table[key], float(printed[key])] == pytest.approx([value] * 2, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize(
    "change, base, differs",
    [
        ([1.685, 1.714], [1.834, 1.855], True),  # 1.82 degrees of freedom; 1 would be too few
        ([1.0, 2.0, 3.0], [2.0, 2.1, 2.2], False),  # 2.04
        ([2.0, 2.1] * 20, [2.01, 2.12] * 20, False),  # 77.3
    ],
)
def test_the_noise_is_a_95_percent_interval_at_welchs_degrees_of_freedom(change, base, differs):
    """Check with mpmath's incomplete beta function that 5% of Student's t lies beyond the noise."""
    found, noise = compare.difference(change, base)
    a, b = (statistics.variance(side) / len(side) for side in (change, base))
    freedom = (a + b) ** 2 / (a**2 / (len(change) - 1) + b**2 / (len(base) - 1))
    t_squared = noise**2 / (a + b)
    beyond = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t_squared), regularized=True)
    assert float(beyond) == pytest.approx(0.05, rel=1e-4)
    assert (abs(found) > noise) == differs


def test_one_seed_on_a_side_is_inconclusive_however_large_the_difference():
    one, three = make_side("idea", [1.0]), make_side("base", [3.0, 3.001, 3.002])
    for table in (compare.compare_seeds(one, three), compare.compare_seeds(three, one)):
        assert table["verdict"] == "inconclusive" and table["noise"] is None


UNFIT = [  # the records of each run of one side; the error
    ([make_records(ends(math.nan))], "a: its last evaluation has no val loss"),
    ([make_records(ends(2.0))[:-3]], "a: not at its end"),
    ([make_records(ends(2.0), seed=2)] * 2, "another run has seed 2 too"),
]


@pytest.mark.parametrize("side, said", UNFIT)
def test_refuses_seeds_that_cannot_be_compared(side, said):
    """Refuse unfinished runs, a seed used twice, and losses that are missing."""
    unfit, other = [*map(Run, "ab", side)], make_side("other", [2.0, 2.1])
    for sides in ((unfit, other), (other, unfit)):
        with pytest.raises(UserError, match=said):
            compare.compare_seeds(*sides)


# -----------------------------------------------------------------------------
# Published runs


# a published run, our run's keys, and why their losses are not comparable
LLMC = dict(dataset="d/fineweb_records", eval_tokens=10485760, block_size=1024)
BESIDE = [
    ("gpt2_124m_llmc", LLMC, ""),
    ("gpt2_124m_llmc", LLMC | dict(dataset="other"), "different datasets"),
    ("gpt2_124m_llmc", LLMC | dict(eval_tokens=1024), "choose the same eval_tokens"),
    ("fineweb_124m_rtx4070", LLMC | dict(dataset="fineweb"), "on random tokens"),
]


@pytest.mark.parametrize("name, keys, said", BESIDE)
def test_compares_with_a_published_run_of_the_same_data_and_evaluation(name, keys, said):
    facts = dict(tokens_per_iter=524_288, val_tokens=10_485_761)
    run = make_run("a", ends(6.0, 500), start=facts, **keys)
    table = Table(open_run(ROOT / f"results/public_runs/{name}.csv"), run)
    assert table.verdicts[AT_EQUAL] == (NO if said else f"{name} 0.6257 lower")
    assert said in table.problem


# -----------------------------------------------------------------------------
# The band of a recipe that others ran several times

BAND = """\
# dataset = 'd'
# max_iters = 30
# eval_tokens = 4096
# tokens_per_iter = 1000
# train_tokens = 30000
iter,val_loss,low,high,sd
10,4.00,3.90,4.10,0.02
20,3.50,3.45,3.55,0.01
30,3.00,2.98,3.02,0.01
"""
OTHER = "not comparable with the band of ten: "
IN_BAND = [  # val losses, other settings, and what the last line says of the run
    ({10: 4.10, 20: 3.46, 30: 3.0}, {}, "inside the band of ten at all 3 iterations"),
    ({10: 3.9, 20: 3.5}, {}, "inside the band of ten at all 2 iterations"),  # still training
    ({10: 4.25, 20: 9.0}, {}, "val loss 4.2500 at iteration 10 is 0.1500 outside the band of ten"),
    ({10: 4.0, 15: 9.0, 20: 3.41}, {}, "val loss 3.4100 at iteration 20 is 0.0400 outside"),
    ({10: 4.0, 20: math.nan}, {}, "val loss nan at iteration 20 is nan outside"),
    # the dataset's name has to match, but not its folder
    ({10: 5.0}, dict(dataset="elsewhere/d"), "val loss 5.0000"),
    ({10: 5.0}, dict(dataset="data/other"), f"{OTHER}train with --dataset=d"),
    ({10: 5.0}, dict(tokens_per_iter=500), f"{OTHER}train with --tokens_per_iter=1000"),
    ({10: 5.0}, dict(max_iters=20), f"{OTHER}train with --max_iters=30"),
    ({7: 4.0, 14: 3.5}, {}, f"{OTHER}no iteration yet"),
]


@pytest.mark.parametrize("losses, changes, said", IN_BAND)
def test_last_line_says_whether_a_run_is_inside_the_band(losses, changes, said, tmp_path, capsys):
    """
    Name the first val loss outside the reference runs' band, or else the settings with which the
    run would be comparable.
    """
    (tmp_path / "ten.csv").write_text(BAND)
    settings = dict(max_iters=30, tokens_per_iter=1000) | changes
    run = make_run("a", {0: 8.0} | losses, **settings)
    table = Table(run, open_run(tmp_path / "ten.csv"))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"a: {said}")
    assert said.startswith(OTHER) or not table.problem


# -----------------------------------------------------------------------------
# The picture


def test_draws_losses_over_tokens_and_time_the_speed_and_the_learning_rate():
    """
    Draw five lines for each run: train loss and val loss over tokens, val loss over hours, speed,
    and learning rate. Say why losses do not compare.
    """
    a = make_run("a", {0: 8.0, 5: 4.0, 10: 3.0})
    b = make_run("b", {0: 8.0, 5: 3.0, 20: 2.0}, step_ms=200)
    draw(figure := Figure(), [[a], [b]], "of different tokens")
    assert figure.get_suptitle().endswith("not comparable: of different tokens")
    losses, over_time, speed, rate = (
        [([*line.get_xdata()], [*line.get_ydata()]) for line in axes.get_lines()]
        for axes in figure.axes
    )
    assert [*map(len, (losses, over_time, speed, rate))] == [4, 2, 2, 2]
    assert losses[1] == ([5000, 10_000], [4.0, 3.0])
    # 5 iterations of 0.1 s and 2 evaluations; then 5 more, a checkpoint and an evaluation
    assert over_time[0] == (pytest.approx([4.5 / 3600, 8 / 3600]), [4.0, 3.0])
    assert speed[0][1] == [10_000] * 10
    assert rate[0][1] == [0.1] * 10


# -----------------------------------------------------------------------------
# Files and commands


def test_reports_and_draws_a_real_run(tiny, ran, tmp_path):
    """Report the speed, losses, pauses and hours that the run recorded, and write loss.png."""
    folder = write_tokens(tmp_path / "tokens", train=[2000], val=[300])
    keys = tiny | dict(max_iters=12, eval_interval=5, log_interval=3, dataset=folder)
    InProcessRun(fake_clock=True).launch(**keys)
    file = tmp_path / "table.json"
    assert run("compare.py", ran.out_dir, f"--json={file}").code == 0
    figures = json.loads(file.read_text())["runs"]["out"]
    assert (ran.out_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert ran.column("start", "val_tokens") == [300]
    assert (figures["iterations"], figures["tokens"]) == (12, 12 * 128)
    assert figures["tokens_per_sec"] == pytest.approx(np.median(ran.steps("tokens_per_sec")))
    assert figures["best_val_loss"] == min(ran.evals("val_loss"))
    in_run = sum(ran.end["ledger"][name] for name in ("steps", "evaluation", "checkpoints"))
    # allows for a record's nine digits, and for what ends after the last lap
    assert figures["hours"] == pytest.approx(in_run / 3600, rel=1e-2)


def test_compares_and_draws_the_seeds_of_two_sides(tmp_path):
    idea, base = (
        [write_run(tmp_path / f"{name}{n}", ends(loss + n / 1000), seed=n) for n in (1, 2)]
        for name, loss in (("idea", 1.0), ("base", 2.0))
    )
    files = [f"--json={tmp_path / 'a/b.json'}", f"--png={tmp_path / 'c'}"]
    result = run("compare.py", *idea, "--against", *base, *files)
    assert result.code == 0 and "\nverdict: better\n" in result.out
    assert json.loads((tmp_path / "a/b.json").read_text())["verdict"] == "better"
    assert (tmp_path / "c").read_bytes().startswith(b"\x89PNG")
    other = write_run(tmp_path / "other", ends(1.0), start=dict(val_fingerprint="else"))
    refused = run("compare.py", other, "--against", *base)
    assert refused.code == 1 and "not comparable" in refused.err


EMPTY = """
{"kind": "step", "iter": 0, "loss": NaN, "step_ms": null, "mfu": null}
{"kind": "eval", "iter": 9, "val_loss": null}
[1]
\0\ufffd
{"kind": "step", "iter": 99, "tok"""  # torn by a kill


def test_ignores_broken_and_empty_records(tmp_path):
    """Ignore torn lines, unknown JSON and records without figures in metrics.jsonl."""
    a, b = (write_run(tmp_path / name, {0: 8.0, 5: 3.0}) for name in "ab")
    with open(a / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(EMPTY)
    table = Table(open_run(a), open_run(b))
    assert table.verdicts[AT_EQUAL] == EQUAL
    assert len(set(table.values("tokens_per_sec"))) == 1
