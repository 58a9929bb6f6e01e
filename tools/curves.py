"""
Read a run into columns of numbers, from its metrics.jsonl or from the CSV of a published run, and
draw runs: losses, speed and learning rate over tokens, and val loss over time.
"""

import ast
import contextlib
import csv
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.console import UserError, one_line, short
from common.files import read_record, read_text, replacing
from configurator import FIELDS, Config, config_values

# What becomes columns of the records of iterations and evaluations
STEP = "iter tokens tokens_after hours loss lr step_ms tokens_per_sec mfu mem_gib compile_seconds"
EVAL = "iter tokens hours complete train_loss val_loss perplexity bits_per_byte seconds low high"
PUBLISHED = "published"  # the program of a run that is read from a CSV
# Interpolate over gaps of at most this fraction of the progress so far. For a loss that falls like
# 1/sqrt(x) and is 1 nat above its floor, the error is about 0.2^2 / 8 * 3/4 = 0.004 nats, which is
# less than the noise between seeds.
NEAR = 0.2
POINTS = 200  # at most this many points per line of a picture, each the mean of its neighbours
# Okabe and Ito's colours, and markers, for colour-blind readers (jfly.uni-koeln.de/color)
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
MARKERS = "os^Dv*XP"

# -----------------------------------------------------------------------------
# Reading


class Run:
    """
    Holds one run as its records describe it so far.

    `start` and `end` are the last records of these kinds. `step` and `eval` are columns, ordered by
    iteration: one array per value, NaN if unknown. Only published means of several runs have a band
    of val losses, from `low` to `high`. `others` names the numbers that only this run's evaluations
    have; they are columns too.
    `config` has the keys of the last launch. `iterations`, `tokens` and `hours` are None if
    unknown; `hours` includes iterations, evaluations, samples and saves.
    """

    def __init__(self, name: str, records: Iterable[dict]):
        self.name = name
        self.start: dict = {}
        self.end: dict = {}
        steps = []
        evals = {}  # by iteration; a run that is killed or continued may evaluate one twice
        for record in records:
            kind = record.get("kind")
            if kind in ("start", "end"):
                setattr(self, kind, record)
            elif kind == "step":
                steps.append([record.get(key) for key in STEP.split()])
            elif kind == "eval":
                evals[record.get("iter")] = record
        pairs = (pair for record in evals.values() for pair in record.items())
        found = {k for k, v in pairs if isinstance(v, int | float)}
        self.others = sorted(found - {*EVAL.split()})
        columns = [*EVAL.split(), *self.others]
        rows = [[record.get(key) for key in columns] for record in evals.values()]
        self.step, self.eval = to_columns(steps, STEP.split()), to_columns(rows, columns)
        self.config = config_of(self.start)
        # take the highest of all records; a step record at N means N + 1 iterations
        self.iterations = self.highest(self.step["iter"] + 1, "iter", "iters")
        self.tokens = self.highest(self.step["tokens_after"], "tokens", "tokens")
        self.hours = self.highest(self.step["hours"], "hours", "hours")

    def highest(self, step: np.ndarray, of_eval: str, of_end: str) -> float | None:
        end = np.array([self.end.get(of_end)], dtype=float)
        return percentile(np.concatenate([step, self.eval[of_eval], end]), 100)

    @property
    def is_published(self) -> bool:
        return self.start.get("program") == PUBLISHED

    @property
    def has_band(self) -> bool:
        return bool(np.isfinite(self.eval["low"]).any())

    def curve(self, axis: str, column: str = "val_loss") -> tuple[np.ndarray, np.ndarray]:
        """
        Return where on the axis (iter, tokens or hours) the run was evaluated, and its val losses,
        or another column's values, there. The evaluation at iteration 0 is left out.
        """
        x, values = self.eval[axis], self.eval[column]
        known = (self.eval["iter"] > 0) & np.isfinite(x) & np.isfinite(values)
        return x[known], values[known]


def open_run(path: Path) -> Run:
    """
    Read a run from its folder, its metrics.jsonl, or the CSV of a published run. Raises UserError
    if the file cannot be read, or if it has neither an iteration nor an evaluation.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a CSV of results/public_runs"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = Run(file.stem, read_csv(file)) if file.suffix == ".csv" else read_run(file)
    except OSError as error:
        raise UserError(f"{one_line(error)}; {hint}") from None
    except (ValueError, TypeError, LookupError) as error:  # a word where a number should be
        raise UserError(f"{file}: {one_line(error)}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: holds no iteration and no evaluation; {hint}")
    return run


def read_run(file: Path) -> Run:
    """Read a run from its metrics.jsonl. Ignores lines that are not records. Raises OSError."""
    with open(file, "rb") as lines:
        return Run(file.resolve().parent.name, map(read_record, lines))


def read_csv(file: Path) -> list[dict]:
    """
    Return the records of a published run, or of the mean of several: facts and settings in lines
    with #, then a header with iter, val_loss and perhaps train_loss, low and high. Raises OSError.
    """
    lines = read_text(file).splitlines()
    facts = {}
    for line in lines:
        if fact := re.fullmatch(r"# (\w+) = (.+)", line):
            with contextlib.suppress(ValueError, SyntaxError):  # skip remarks, such as a date
                facts[fact[1]] = ast.literal_eval(fact[2])
    records = [dict(facts, kind="start", program=PUBLISHED, config=facts)]
    size = facts.get("tokens_per_iter", math.nan)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row.get("val_loss"):
            known = {key: float(row[key]) for key in EVAL.split() if row.get(key)}
            records.append(dict(known, kind="eval", tokens=known["iter"] * size))
    return records


def to_columns(rows: list[list], names: list[str]) -> dict[str, np.ndarray]:
    table = np.array(rows, dtype=float).reshape(-1, len(names))  # None becomes NaN
    return dict(zip(names, table[np.argsort(table[:, 0], kind="stable")].T, strict=True))


def config_of(start: dict) -> dict:
    """
    Return a start record's keys. Keys that are missing get their defaults, except in a published
    run, whose facts stand beside its keys.
    """
    values = start.get("config") or {}
    if start.get("program") == PUBLISHED:
        return {name: value for name, value in values.items() if name in FIELDS}
    return values and config_values(Config()) | values


def percentile(values: np.ndarray, q: float) -> float | None:
    """Return a percentile of the finite values (0: lowest, 100: highest), or None without any."""
    values = values[np.isfinite(values)]
    return float(np.percentile(values, q)) if len(values) else None


def loss_at(x: np.ndarray, losses: np.ndarray, at: float) -> float | None:
    """
    Interpolate a curve's loss linearly at this x; None outside the evaluations, or if the two
    around it are too far apart.
    """
    i = int(np.searchsorted(x, at))
    if i == len(x) or (x[i] > at and (i == 0 or x[i] - x[i - 1] > NEAR * at)):
        return None
    return float(np.interp(at, x, losses))


# -----------------------------------------------------------------------------
# Drawing


def save_picture(groups: list[list[Run]], path: Path, problem: str = "") -> None:
    """
    Write a PNG of one or several groups of runs: the seeds of one setting, or a single run. The
    title says why losses are not comparable, if there is a `problem`. Raises OSError; an old file
    then stays as it was.
    """
    # Jupyter sets a backend for its terminals and kernels that other environments do not have
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure  # not pyplot, which may look for a display; slow to import

    figure = Figure(figsize=(12, 7), facecolor="white", layout="constrained")
    with replacing(path) as file:
        draw(figure, groups, problem)
        figure.savefig(file, format="png", dpi=110)


def draw(figure, groups: list[list[Run]], problem: str = "") -> None:
    """
    Draw losses, tok/s and learning rate over tokens, and val loss over time. Each group has a
    colour and a marker.
    """
    places = [["losses", "hours"], ["speed", "rate"]]
    panels = figure.subplot_mosaic(places, height_ratios=(5, 2.5))
    # losses after 2% of a run; the fall from ln V would flatten the rest of the plot
    settled = []
    for i, run in ((i, run) for i, group in enumerate(groups) for run in group):
        line = dict(color=COLORS[i % len(COLORS)], linewidth=1)
        marked = dict(line, marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.5)
        # give each group one entry in the legend, which would leave out a name that begins with _
        label = " " + ", ".join(r.name for r in groups[i]) if run is groups[i][0] else None
        curves = [(thin_out(run, "loss"), dict(line, alpha=0.8))]
        curves.append((run.curve("tokens"), dict(marked, label=label)))
        for n, name in enumerate((n for n in run.others if n.endswith("_loss")), start=i + 1):
            style = marked | dict(marker=MARKERS[n % len(MARKERS)], linestyle="--")
            style |= dict(label=f"{name.replace('_', ' ')} of {run.name}")
            curves.append((run.curve("tokens", name), style))
        for (x, y), style in curves:
            panels["losses"].plot(x, y, **style)
            settled.append(y[x >= 0.02 * np.max(x, initial=0)])
        panels["hours"].plot(*run.curve("hours"), **marked)
        panels["speed"].plot(*thin_out(run, "tokens_per_sec"), **line)
        panels["rate"].plot(*thin_out(run, "lr"), **line)
    if len(shown := np.concatenate(settled)):
        panels["losses"].set_ylim(shown.min() - 0.1, shown.max() + 0.1)
    title = "markers: val loss; lines: train loss; the first 2% may be cut off"
    panels["losses"].set_title(title, fontsize=9, loc="left")
    labels = dict(
        losses=("tokens", "loss, nats per token"),
        hours=("hours", "val loss, nats per token"),
        speed=("tokens", "tokens per second"),
        rate=("tokens", "learning rate"),
    )
    for place, axes in panels.items():
        x_label, y_label = labels[place]
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        if x_label == "tokens":
            axes.xaxis.set_major_formatter(count4)
    # start the axis at 0, so that differences in speed look as large as they are
    panels["speed"].set_ylim(0, 1.1 * panels["speed"].get_ylim()[1])
    panels["speed"].yaxis.set_major_formatter(count4)
    # put the legend below the panels, where it covers nothing
    legend = figure.legend(frameon=False, loc="outside lower center")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain $
    if problem:
        figure.suptitle(f"Losses are not comparable: {problem}")


def thin_out(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the tokens and a column of a run's iterations, with neighbours averaged so that at most
    POINTS remain. Points with unknown values are left out.
    """
    known = np.isfinite(run.step[name])
    starts = np.arange(0, known.sum(), known.sum() // POINTS + 1)
    sizes = np.diff(starts, append=known.sum())
    x, y = (np.add.reduceat(run.step[key][known], starts) / sizes for key in ("tokens", name))
    return x, y


def count4(number: float, _position: int = 0) -> str:
    """Format 40560000 as 40.56M. matplotlib calls formatters with a second argument."""
    return short(number, digits=4)
