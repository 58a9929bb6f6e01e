"""
Pictures of runs: losses, speed and MFU over tokens, and for several runs the loss over time.

A run has `python -m reports.picture OUT_DIR` draw its own picture beside it.
"""

import os
import sys
import threading
from pathlib import Path

import numpy as np

from common.console import UserError, count
from common.files import replacing
from reports.curves import learning_curve
from reports.records import Records, RunRecords

PICTURE_POINTS = 600  # a line has at most this many, so that a long run stays readable
SHORT = 1_000  # a run of fewer iterations is mostly the fall of its first losses
# told apart by colour-blind readers too: Okabe and Ito's (jfly.uni-koeln.de/color), and by markers
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
MARKERS = "os^Dv*XP"


def save_picture(runs: list[RunRecords], path: Path) -> None:
    """
    Write a PNG of one run or of several. Raises UserError where matplotlib is missing, and OSError,
    and leaves the old file as it was.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: it may look for a screen
    except ImportError as error:
        raise UserError(f"no picture: {error} (pip install matplotlib)") from None

    size = (12, 7) if len(runs) > 1 else (9, 6)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    with replacing(path) as file:
        draw(figure, runs)
        figure.savefig(file, format="png", dpi=110)


def draw(figure, runs: list[RunRecords]) -> None:
    """
    Losses and tok/s over tokens, MFU where it is known, and for several runs the val loss over
    time. Train loss is a pale line, val loss a line with markers. Several runs have a colour and a
    marker each.
    """
    several = len(runs) > 1
    knows_mfu = any(np.isfinite(run.step["mfu"]).any() for run in runs)
    top = ["losses", "time"] if several else ["losses", "losses"]
    bottom = ["speed", "mfu"] if knows_mfu else ["speed", "speed"]
    panels = figure.subplot_mosaic([top, bottom], height_ratios=(5, 2.5))
    longest = max(np.max(run.eval["hours"], initial=0) for run in runs)
    time_unit, units_per_hour = ("hours", 1) if longest >= 1 else ("minutes", 60)

    for i, run in enumerate(runs):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        tokens = run.step["tokens"]
        train_line = dict(color=color, linewidth=1)
        val_line = dict(color=color if several else COLORS[1], marker=marker, markersize=4)
        train_name, val_name = (None, size_text(run)) if several else ("train loss", "val loss")
        train_curve = thin_out(tokens, run.step["loss"])
        panels["losses"].plot(*train_curve, alpha=0.6, label=train_name, **train_line)
        panels["losses"].plot(*learning_curve(run, "tokens"), label=val_name, **val_line)
        if several:
            hours, losses = learning_curve(run, "hours")
            panels["time"].plot(hours * units_per_hour, losses, **val_line)
        panels["speed"].plot(*thin_out(tokens, run.step["tokens_per_sec"]), **train_line)
        if knows_mfu:
            panels["mfu"].plot(*thin_out(tokens, 100 * run.step["mfu"]), **train_line)

    train_losses = [settled(run.step["iter"], run.step["loss"]) for run in runs]
    val_losses = [settled(*learning_curve(run, "iter")) for run in runs]
    finish(panels["losses"], "tokens", f"loss, {runs[0].loss_unit}")
    fit_height(panels["losses"], train_losses + val_losses)
    # below the panels, where it covers nothing
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    finish(panels["speed"], "tokens", "tokens per second", from_zero=True)
    if knows_mfu:
        finish(panels["mfu"], "tokens", "MFU, %", from_zero=True)
    if several:
        finish(panels["time"], time_unit, f"val loss, {runs[0].loss_unit}")
        fit_height(panels["time"], val_losses)
    title = "val loss: lines with markers; train loss: pale lines" if several else heading(runs[0])
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")


def thin_out(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """
    The means of x and y over at most PICTURE_POINTS groups of neighbours. Points whose y is not
    known are left out.
    """
    known = np.isfinite(y)
    x, y = x[known], y[known]
    size = len(x) // PICTURE_POINTS + 1
    starts = range(0, len(x), size)
    return [x[i : i + size].mean() for i in starts], [y[i : i + size].mean() for i in starts]


def finish(axes, x_label: str, y_label: str, from_zero: bool = False) -> None:
    """Labels and grid. `from_zero` is for speeds: it shows differences in proportion."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    if x_label == "tokens":
        axes.xaxis.set_major_formatter(count4)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(count4)


def fit_height(axes, losses: list[np.ndarray]) -> None:
    """Fit the loss axis to these losses."""
    shown = np.concatenate(losses)
    shown = shown[np.isfinite(shown)]
    if len(shown):
        margin = max(0.05 * np.ptp(shown), 0.01)
        axes.set_ylim(shown.min() - 2 * margin, shown.max() + margin)


def settled(iters: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """
    The losses after the first 2 % of the run: the fall from ln V would flatten the rest. Of a short
    run all.
    """
    last = np.max(iters, initial=0)
    return losses[iters >= (0.02 * last if last >= SHORT else 0)]


def size_text(run: RunRecords) -> str:
    return f"{run.name}, {millions(run.parameters)} parameters" if run.parameters > 0 else run.name


def millions(parameters: float) -> str:
    """828500 -> 0.83M, as this program and nanoGPT print a model's size."""
    return f"{parameters / 1e6:.2f}M"


def heading(run: RunRecords) -> str:
    """The run's name, size, device, dtype, end and last val loss, as far as they are known."""
    parts = [size_text(run), run.device, run.dtype]
    if run.end:
        parts.append(f"ended after {run.iterations:,.0f} iterations")
    if len(run.eval["iter"]):
        parts.append(f"val loss {run.eval['val_loss'][-1]:.4f} at iter {run.eval['iter'][-1]:.0f}")
    return "   |   ".join(part for part in parts if part)


def count4(number: float, _position: int = 0) -> str:
    """40560000 -> 40.56M. Has the form that matplotlib wants for the labels of an axis."""
    return count(number, digits=4)


# -----------------------------------------------------------------------------
# Beside a run


def end_with_parent() -> None:
    """stdin is a pipe from the run: it closes when the run ends, however it does."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def draw_beside_run(out_dir: Path) -> None:
    """Draw out_dir/loss.png. The run goes first where both want the processor."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):  # Windows has priorities too: runlog.py gives it
        os.nice(10)
    save_picture([Records(out_dir / "metrics.jsonl").read()], out_dir / "loss.png")


if __name__ == "__main__":
    draw_beside_run(Path(sys.argv[1]))
