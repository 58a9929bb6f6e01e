"""
Pictures of runs: losses and speed over tokens, and for several runs the val loss over time.

A run starts `python -m reports.picture OUT_DIR` to draw its own picture.
"""

import os
import sys
from pathlib import Path

import numpy as np

from common.child import end_with_parent
from common.console import UserError, count
from common.files import replacing
from reports.runs import Run, learning_curve, read_run

PICTURE_POINTS = 600  # at most this many per line, so that a long run stays readable
# for colour-blind readers: Okabe and Ito's colours (jfly.uni-koeln.de/color), and markers
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
MARKERS = "os^Dv*XP"


def save_picture(runs: list[Run], path: Path) -> None:
    """
    Write a PNG of one run or of several. Raises UserError if matplotlib is missing, and OSError;
    then the old file stays as it was.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: it may look for a screen
    except ImportError as error:
        raise UserError(f"no picture: {error} (pip install matplotlib)") from None

    figure = Figure(figsize=(12, 7), facecolor="white", layout="constrained")
    with replacing(path) as file:
        draw(figure, runs)
        figure.savefig(file, format="png", dpi=110)


def draw(figure, runs: list[Run]) -> None:
    """
    Losses and tok/s over tokens, and val loss over time. Each run has a colour and a marker: a pale
    line for its train loss, a line with markers for its val loss.
    """
    panels = figure.subplot_mosaic([["losses", "time"], ["speed", "speed"]], height_ratios=(5, 2.5))
    longest = max(run.hours or 0 for run in runs)
    time_unit, units_per_hour = ("hours", 1) if longest >= 1 else ("minutes", 60)
    settled = []  # losses after the first 2% of a run, whose fall from ln V would flatten the rest
    for i, run in enumerate(runs):
        line = dict(color=COLORS[i % len(COLORS)])
        marked = dict(line, marker=MARKERS[i % len(MARKERS)], markersize=4)
        tokens, losses = thin_out(run.step["tokens"], run.step["loss"])
        hours, vals = learning_curve(run, "hours")
        panels["losses"].plot(tokens, losses, linewidth=1, alpha=0.6, **line)
        panels["losses"].plot(*learning_curve(run, "tokens"), label=heading(run), **marked)
        panels["time"].plot(hours * units_per_hour, vals, **marked)
        speeds = thin_out(run.step["tokens"], run.step["tokens_per_sec"])
        panels["speed"].plot(*speeds, linewidth=1, **line)
        for x, y in ((tokens, losses), (hours, vals)):
            settled.append(y[x >= 0.02 * np.max(x, initial=0)])
    finish(panels["losses"], "tokens", "loss, nats per token")
    if len(shown := np.concatenate(settled)):
        panels["losses"].set_ylim(shown.min() - 0.1, shown.max() + 0.1)
    finish(panels["time"], time_unit, "val loss, nats per token")
    finish(panels["speed"], "tokens", "tokens per second")
    # from 0, so that differences are in proportion
    panels["speed"].set_ylim(0, 1.1 * panels["speed"].get_ylim()[1])
    panels["speed"].yaxis.set_major_formatter(count4)
    # below the panels, so that it covers nothing
    figure.legend(frameon=False, loc="outside lower center", ncols=1 if len(runs) < 4 else 2)
    how = "val loss: lines with markers; train loss: pale lines"
    figure.suptitle(how, fontsize=10, x=0.01, ha="left")


def thin_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The means of x and y over at most PICTURE_POINTS groups of neighbours. Points with unknown
    y are left out.
    """
    known = np.isfinite(y)
    size = known.sum() // PICTURE_POINTS + 1
    starts = range(0, known.sum(), size)
    x, y = (np.array([v[i : i + size].mean() for i in starts]) for v in (x[known], y[known]))
    return x, y


def finish(axes, x_label: str, y_label: str) -> None:
    """Labels and grid."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    if x_label == "tokens":
        axes.xaxis.set_major_formatter(count4)


def millions(parameters: float) -> str:
    """828500 -> 0.83M, as this program and nanoGPT print a model's size."""
    return f"{parameters / 1e6:.2f}M"


def heading(run: Run) -> str:
    """The run's name, its size, and its number of iterations."""
    parts = [run.name]
    if parameters := run.start.get("parameters"):
        parts.append(f"{millions(parameters)} parameters")
    if run.iterations is not None:
        parts.append(f"{'ended after ' if run.end else ''}{run.iterations:,.0f} iterations")
    return ", ".join(parts)


def count4(number: float, _position: int = 0) -> str:
    """40560000 -> 40.56M. The signature is that of a matplotlib formatter."""
    return count(number, digits=4)


if __name__ == "__main__":  # next to a run, which has priority on the CPU
    end_with_parent()
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    out_dir = Path(sys.argv[1])
    save_picture([read_run(out_dir / "metrics.jsonl")], out_dir / "loss.png")
