"""
Pictures of runs: losses, speed and MFU over tokens and hours.
"""

import itertools
import os
from pathlib import Path

import numpy as np

from common.console import count, warn
from reports.records import RunRecords, median, read_metrics

PICTURE_POINTS = 600  # a line in a picture is drawn through at most this many means
COLORS = BLUE, RED, GREEN, *_, GREY = (
    "#4c78a8",
    "#e4572e",
    "#54a24b",
    "#b279a2",
    "#d6a000",
    "#17a2a2",
    "#7f5f3f",
    "#777777",
)


@np.errstate(all="ignore")  # odd records divide by zero, which is NaN and so not known
def draw_run(out_dir: Path) -> Path:
    """
    Draw out_dir/metrics.jsonl as out_dir/loss.png. It is called in the middle of a run, so trouble
    is only a warning.
    """
    path = out_dir / "loss.png"
    try:
        save_picture([read_metrics(out_dir / "metrics.jsonl", most_steps=6_000)], path)
    except ImportError:  # matplotlib is not needed to train
        pass
    except (
        Exception
    ) as error:  # whatever a record holds or the disk does, the run is worth more than its picture
        warn(f"{path}: not drawn ({type(error).__name__}: {error})")
    return path


def save_picture(runs: list[RunRecords], path: Path) -> None:
    """
    Write a PNG, all or nothing: one run's losses, checkpoints and speed, or several runs against
    tokens and hours.
    """
    from matplotlib.figure import (
        Figure,
    )  # not pyplot, which keeps every figure and may look for a screen

    alone = len(runs) == 1
    figure = Figure(figsize=(9, 6) if alone else (12, 7), facecolor="white", layout="constrained")
    draw_one(figure, runs[0]) if alone else draw_several(figure, runs)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)


def draw_one(figure, run: RunRecords) -> None:
    """
    Losses over tokens, evaluations and checkpoints marked, and below them tok/s with MFU on the
    right-hand axis.
    """
    losses, speed = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    step, evals, saved = run.step, run.eval, run.checkpoint
    mfu = (step["mfu"] > 0) & (step["tokens_per_sec"] > 0)
    draw_band(losses, step["tokens"], step["loss"], BLUE, "train loss, every log line")
    dots = dots_of(run)
    losses.plot(
        evals["tokens"],
        evals["train_loss"],
        **dots | dict(linewidth=0),
        color=BLUE,
        label="train loss, evaluated",
    )
    losses.plot(evals["tokens"], evals["val_loss"], color=RED, **dots, label="val loss, evaluated")
    losses.plot(
        saved["tokens"],
        np.full(len(saved["iter"]), 0.02),
        color=GREY,
        linewidth=0,
        marker="|",
        markersize=7,
        transform=losses.get_xaxis_transform(),
        label="checkpoint",
    )
    draw_band(speed, step["tokens"], step["tokens_per_sec"], GREEN)
    finish(losses, "", "loss, nats per token")
    finish(speed, "tokens", "tok/s" if mfu.any() else "tok/s (MFU n/a)", from_zero=True)
    limit_to_settled(losses, [run])
    losses.legend(frameon=False, loc="upper right")
    if mfu.any():  # proportional to tok/s, so one line serves two axes
        percent = 100 * median(step["mfu"][mfu] / step["tokens_per_sec"][mfu])
        speed.secondary_yaxis(
            "right", functions=(lambda y: y * percent, lambda y: y / percent)
        ).set_ylabel("MFU, %")
    parts = [
        run.name,
        run.parameters > 0 and f"{count4(run.parameters)} parameters",
        run.device,
        run.dtype,
    ]
    parts += [
        f"val loss {loss:.4f} at iter {it:.0f}"
        for loss, it in zip(evals["val_loss"][-1:], evals["iter"][-1:])
    ]
    figure.suptitle("   |   ".join(filter(None, parts)), fontsize=10, x=0.01, ha="left")


def draw_several(figure, runs: list[RunRecords]) -> None:
    """
    Val and train loss over tokens, val loss over hours, tok/s and, where known, MFU over tokens;
    one colour a run.
    """
    knows_mfu = any(np.isfinite(run.step["mfu"]).any() for run in runs)
    panels = figure.subplot_mosaic(
        [["losses", "hours"], ["speed", "mfu" if knows_mfu else "speed"]], height_ratios=(5, 3)
    )
    losses, hours, speed, mfu = (panels.get(name) for name in ("losses", "hours", "speed", "mfu"))
    for run, color in zip(runs, itertools.cycle(COLORS)):
        step, evals = run.step, run.eval
        losses.plot(
            *thin_out(step["tokens"], step["loss"])[:2], color=color, linewidth=0.8, alpha=0.4
        )
        losses.plot(evals["tokens"], evals["val_loss"], color=color, **dots_of(run), label=run.name)
        hours.plot(evals["hours"], evals["val_loss"], color=color, **dots_of(run))
        draw_band(speed, step["tokens"], step["tokens_per_sec"], color)
        if mfu:
            draw_band(mfu, step["tokens"], 100 * step["mfu"], color)
    finish(losses, "tokens", "loss, nats per token", "val loss (dots) and train loss (thin)")
    finish(hours, "hours of iterations, evaluations and checkpoints", "", "val loss over time")
    finish(speed, "tokens", "tok/s", from_zero=True)
    if mfu:
        finish(mfu, "tokens", "MFU, %", from_zero=True)
    limit_to_settled(losses, runs)
    limit_to_settled(hours, runs)
    losses.legend(frameon=False, loc="upper right")


def dots_of(run: RunRecords) -> dict:
    return dict(linewidth=1.6, marker="o", markersize=4 if len(run.eval["iter"]) < 80 else 2)


def draw_band(axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    x, mean, low, high = thin_out(x, y)
    axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(x, mean, color=color, linewidth=1.2, label=label)


def thin_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """
    At most PICTURE_POINTS groups of neighbours: their mean x, and their mean, lowest and highest y,
    finite ones only.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return x, y, y, y
    starts = np.unique(
        np.linspace(0, len(x), min(len(x), PICTURE_POINTS), endpoint=False).astype(int)
    )
    sizes = np.diff(np.append(starts, len(x)))
    return (
        np.add.reduceat(x, starts) / sizes,
        np.add.reduceat(y, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )


def finish(axes, x_label: str, y_label: str, title: str = "", from_zero: bool = False) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    if x_label == "tokens":
        axes.xaxis.set_major_formatter(count4)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(count4)


def limit_to_settled(axes, runs: list[RunRecords]) -> None:
    """
    Fit the loss axis to what follows the first 2 % of a run of some length: the drop from ln V
    would flatten the rest.
    """
    losses = np.empty(0)
    for run in runs:
        last = max(np.max(kind["iter"], initial=0) for kind in (run.step, run.eval))
        first = 0.02 * last if len(run.step["iter"]) > 20 else 0
        for kind, name in ((run.step, "loss"), (run.eval, "train_loss"), (run.eval, "val_loss")):
            losses = np.append(losses, kind[name][kind["iter"] >= first])
    losses = losses[np.isfinite(losses)]
    if len(losses):
        margin = 0.05 * np.ptp(losses) or 0.1
        axes.set_ylim(losses.min() - 2 * margin, losses.max() + margin)


def count4(number: float, _position: int = 0) -> str:
    """40560000 -> 40.56M; also matplotlib's form of a tick."""
    return count(number, digits=4)
