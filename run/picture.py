"""
Draw runs: losses, speed and learning rate over tokens, and val loss over time or beside a band.

At its end, a run starts this module with its out_dir to draw its own picture.
"""

import os
import sys
from pathlib import Path

import numpy as np

from common.console import count
from common.files import replacing
from run.history import Run, has_band, learning_curve, read_run

PICTURE_POINTS = 200  # at most this many points per line, each the mean of its neighbours
# Okabe and Ito's colours, and markers, for colour-blind readers (jfly.uni-koeln.de/color)
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
MARKERS = "os^Dv*XP"


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
    Draw losses, tok/s, learning rate and other measures over tokens, and val loss over time. Each
    group has a colour and a marker. If a published run has a band, which is too narrow to see among
    the losses, draw the differences from its mean instead of the time.
    """
    runs = [run for group in groups for run in group]
    has_rates = any(np.isfinite(run.step["lr"]).any() for run in runs)
    places = [["losses", "right"], ["speed", "rate" if has_rates else "speed"]]
    if has_others := any(not name.endswith("_loss") for run in runs for name in run.measures):
        places.append(["others", "others"])
    panels = figure.subplot_mosaic(places, height_ratios=(5, 2.5, 2.5)[: len(places)])
    band = next(filter(has_band, runs), None)
    # losses before and after 2% of a run; the fall from ln V would flatten the rest of the plot
    first, settled = [], []
    for i, run in ((i, run) for i, group in enumerate(groups) for run in group):
        line = dict(color=COLORS[i % len(COLORS)], linewidth=1)
        marked = dict(line, marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.5)
        # give each group one entry in the legend
        label = ", ".join(r.name for r in groups[i]) if run is groups[i][0] else None
        tokens, losses = thin_out(run.step["tokens"], run.step["loss"])
        at, vals = learning_curve(run, "tokens")
        panels["losses"].plot(tokens, losses, alpha=0.8, **line)
        panels["losses"].plot(at, vals, label=label, **marked)
        curves = [(tokens, losses), (at, vals)]  # in the panel with the losses
        for n, name in enumerate(run.measures, start=i + 1):
            curve, is_loss = learning_curve(run, "tokens", name), name.endswith("_loss")
            style = marked | dict(marker=MARKERS[n % len(MARKERS)], linestyle="--")
            style |= dict(label=f"{name.replace('_', ' ')} of {run.name}")
            panels["losses" if is_loss else "others"].plot(*curve, **style)
            if is_loss:
                curves.append(curve)
        if band:
            mean_at, means = learning_curve(band, "tokens")
            both, ours, theirs = np.intersect1d(at, mean_at, return_indices=True)
            panels["right"].plot(both, vals[ours] - means[theirs], **marked)
            low, high = (run.eval[side] - run.eval["val_loss"] for side in ("low", "high"))
            panels["right"].fill_between(run.eval["tokens"], low, high, alpha=0.2, **line)
        else:
            panels["right"].plot(*learning_curve(run, "hours"), **marked)
        panels["speed"].plot(*thin_out(run.step["tokens"], run.step["tokens_per_sec"]), **line)
        if has_rates:
            panels["rate"].plot(*thin_out(run.step["tokens"], run.step["lr"]), **line)
        for x, y in curves:
            is_settled = x >= 0.02 * np.max(x, initial=0)
            first.append(y[~is_settled])
            settled.append(y[is_settled])
    finish(panels["losses"], "tokens", "loss, nats per token")
    title = "markers: val loss; lines: train loss"
    if len(shown := np.concatenate(settled)):
        panels["losses"].set_ylim(shown.min() - 0.1, top := shown.max() + 0.1)
        if np.max(np.concatenate(first), initial=top) > top:
            title += "; cut off: the losses of the first 2%"
    panels["losses"].set_title(title, fontsize=9, loc="left")
    if band:
        finish(panels["right"], "tokens", "val loss minus the band's mean")
    else:
        finish(panels["right"], "hours", "val loss, nats per token")
    if has_rates:
        finish(panels["rate"], "tokens", "learning rate")
    if has_others:
        finish(panels["others"], "tokens", "other measures")
    finish(panels["speed"], "tokens", "tokens per second")
    # start the axis at 0, so that differences in speed look as large as they are
    panels["speed"].set_ylim(0, 1.1 * panels["speed"].get_ylim()[1])
    panels["speed"].yaxis.set_major_formatter(count4)
    # put the legend below the panels, where it covers nothing
    figure.legend(frameon=False, loc="outside lower center")
    if problem:
        figure.suptitle(f"Losses are not comparable: {problem}")


def thin_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Average neighbouring points, so that at most PICTURE_POINTS remain. Points with unknown y are
    left out.
    """
    known = np.isfinite(y)
    size = known.sum() // PICTURE_POINTS + 1
    starts = range(0, known.sum(), size)
    x, y = (np.array([v[i : i + size].mean() for i in starts]) for v in (x[known], y[known]))
    return x, y


def finish(axes, x_label: str, y_label: str) -> None:
    """Set an axes' labels, grid and ticks."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    if x_label == "tokens":
        axes.xaxis.set_major_formatter(count4)


def millions(parameters: float) -> str:
    """Format a model's size as this program and nanoGPT print it: 828500 -> 0.83M."""
    return f"{parameters / 1e6:.2f}M"


def count4(number: float, _position: int = 0) -> str:
    """Format 40560000 as 40.56M. matplotlib calls formatters with a second argument."""
    return count(number, digits=4)


if __name__ == "__main__":
    out_dir = Path(sys.argv[1])
    save_picture([[read_run(out_dir / "metrics.jsonl")]], out_dir / "loss.png")
