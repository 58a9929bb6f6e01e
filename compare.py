"""
Pictures and tables of runs.

    python compare.py out/gpt124m                       one run: its figures, and its picture in out/gpt124m/loss.png
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PICTURE_POINTS = 600  # a line in a picture is drawn through at most this many means
TRAIN_COLOR, VAL_COLOR, SPEED_COLOR, MARK_COLOR = "#4c78a8", "#e4572e", "#54a24b", "#777777"


# -----------------------------------------------------------------------------
# Reading a run


@dataclass
class RunRecords:
    """The records of one run as columns: arrays of equal length per kind, NaN where a value is missing."""

    name: str
    start: dict  # the first start record: config, parameters, device, ...
    step: dict[str, np.ndarray]
    eval: dict[str, np.ndarray]
    checkpoint: dict[str, np.ndarray]


STEP_LINE = '{"kind": "step"'
COLUMNS = {
    "step": ("iter", "tokens", "loss", "step_ms", "tokens_per_sec", "mfu"),
    "eval": ("iter", "train_loss", "val_loss", "seconds"),
    "checkpoint": ("iter", "seconds"),
}


def read_metrics(path: Path, most_steps: int | None = None) -> RunRecords:
    """
    metrics.jsonl of one run. A torn last line (a killed run) and lines that are no records are passed over. Of more
    than `most_steps` step records, evenly spread ones are read.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if most_steps and len(lines) > most_steps:
        steps = [line for line in lines if line.startswith(STEP_LINE)]
        lines = [line for line in lines if not line.startswith(STEP_LINE)] + steps[:: -(-len(steps) // most_steps)]
    records = parse_lines(lines)
    kinds = {kind: [r for r in records if r.get("kind") == kind] for kind in ("start", *COLUMNS)}
    columns = {kind: {name: column(kinds[kind], name) for name in names} for kind, names in COLUMNS.items()}
    run = RunRecords(path.parent.name, kinds["start"][0] if kinds["start"] else {}, **columns)
    for marks in (run.eval, run.checkpoint):
        marks["tokens"] = tokens_at(marks["iter"], run)
    return run


def parse_lines(lines: list[str]) -> list[dict]:
    try:
        records = json.loads(f"[{','.join(lines)}]")  # at once: three times as fast as line by line
    except ValueError:
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                pass
    return [record for record in records if isinstance(record, dict)]


def column(records: list[dict], name: str) -> np.ndarray:
    values = [record.get(name) for record in records]
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError):
        return np.array([v if isinstance(v, int | float) else np.nan for v in values], dtype=float)


def tokens_at(iters: np.ndarray, run: RunRecords) -> np.ndarray:
    """Tokens trained on after `iters` updates: between step records by interpolation, since a resume may change the batch."""
    tokens_per_iter = run.start.get("tokens_per_iter") or 1
    if not len(run.step["iter"]):
        return iters * tokens_per_iter
    last_iter, last_tokens = run.step["iter"][-1], run.step["tokens"][-1]
    return np.where(
        iters > last_iter,
        last_tokens + (iters - last_iter) * tokens_per_iter,
        np.interp(iters, run.step["iter"], run.step["tokens"]),
    )


# -----------------------------------------------------------------------------
# Pictures


def draw_run(out_dir: Path) -> Path:
    """Draw out_dir/metrics.jsonl as out_dir/loss.png. It is called in the middle of a run, so trouble is only a warning."""
    path = out_dir / "loss.png"
    try:
        save_picture(picture_of_run(read_metrics(out_dir / "metrics.jsonl", most_steps=20_000)), path)
    except ImportError:  # matplotlib is not needed to train
        pass
    except Exception as error:  # whatever a record holds or the disk does, the run is worth more than its picture
        print(f"warning: {path}: not drawn ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
    return path


def picture_of_run(run: RunRecords):
    """Losses over tokens, and below them tok/s with MFU on the right-hand axis."""
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure and may look for a screen

    figure = Figure(figsize=(9, 6), facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    figure.subplots_adjust(left=0.085, right=0.915, top=0.92, bottom=0.09, hspace=0.08)
    step, evals, unit = run.step, run.eval, token_unit(run)

    x, mean, low, high = thin_out(step["tokens"] / unit[0], step["loss"])
    top.fill_between(x, low, high, color=TRAIN_COLOR, alpha=0.25, linewidth=0)
    top.plot(x, mean, color=TRAIN_COLOR, linewidth=1.2, label="train loss, every log line")
    marker = dict(marker="o", markersize=4 if len(evals["iter"]) < 80 else 2)
    x = evals["tokens"] / unit[0]
    top.plot(x, evals["train_loss"], color=TRAIN_COLOR, linewidth=0, **marker, label="train loss, evaluated")
    top.plot(x, evals["val_loss"], color=VAL_COLOR, linewidth=1.6, **marker, label="val loss, evaluated")
    top.plot(run.checkpoint["tokens"] / unit[0], np.full(len(run.checkpoint["iter"]), 0.02), color=MARK_COLOR, linewidth=0,
             marker="|", markersize=7, transform=top.get_xaxis_transform(), label="checkpoint")  # fmt: skip
    top.set_ylabel("loss, nats per token")
    limit_to_settled(top, run, unit[0])
    top.legend(frameon=False, loc="upper right")

    x, mean, low, high = thin_out(step["tokens"] / unit[0], step["tokens_per_sec"] / 1e3)
    bottom.fill_between(x, low, high, color=SPEED_COLOR, alpha=0.25, linewidth=0)
    bottom.plot(x, mean, color=SPEED_COLOR, linewidth=1.2)
    bottom.set_ylabel("thousand tok/s")
    bottom.set_ylim(0, 1.15 * np.nanmax(high) if len(high) and np.nanmax(high) > 0 else 1)
    bottom.set_xlabel(f"{unit[1]}tokens")
    per_token = step["mfu"] / step["tokens_per_sec"] * 1e5  # % per thousand tok/s: one number, unless the device changed
    if np.isfinite(per_token).any():
        scale = np.nanmedian(per_token)
        right = bottom.twinx()
        right.set_ylim(0, bottom.get_ylim()[1] * scale)
        right.set_ylabel("MFU, %")
        right.spines[["top", "left"]].set_visible(False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    bottom.set_xlim(left=0)
    figure.suptitle(title(run), fontsize=10, x=0.085, ha="left")
    return figure


def title(run: RunRecords) -> str:
    parts = [run.name]
    if run.start.get("parameters"):
        parts.append(f"{run.start['parameters'] / 1e6:.1f}M parameters")
    parts += [str(run.start[name]) for name in ("device", "dtype") if run.start.get(name)]
    if len(run.eval["iter"]):
        parts.append(f"val loss {run.eval['val_loss'][-1]:.4f} at iter {run.eval['iter'][-1]:.0f}")
    return "   |   ".join(parts)


def limit_to_settled(axes, run: RunRecords, unit: float) -> None:
    """Fit the loss axis to what follows the first 2 % of the run: the drop from ln V would flatten all the rest."""
    last = max(np.max(kind["tokens"], initial=0) for kind in (run.step, run.eval))
    settled = [kind[name][kind["tokens"] >= 0.02 * last] for kind, name in
               ((run.step, "loss"), (run.eval, "train_loss"), (run.eval, "val_loss"))]  # fmt: skip
    losses = np.concatenate(settled)
    losses = losses[np.isfinite(losses)]
    if len(losses):
        margin = 0.05 * (losses.max() - losses.min()) or 0.1
        axes.set_ylim(losses.min() - 2 * margin, losses.max() + margin)


def thin_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most PICTURE_POINTS groups of neighbours: their mean x, and their mean, lowest and highest y, finite ones only."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return x, y, y, y
    starts = np.unique(np.linspace(0, len(x), min(len(x), PICTURE_POINTS), endpoint=False).astype(int))
    sizes = np.diff(np.append(starts, len(x)))
    return (np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes,
            np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))  # fmt: skip


def token_unit(run: RunRecords) -> tuple[float, str]:
    """What to divide tokens by for the axis, and its name."""
    last = max(np.max(kind["tokens"], initial=0) for kind in (run.step, run.eval))
    units = (1e9, "billion "), (1e6, "million "), (1e3, "thousand ")
    return next(((size, name) for size, name in units if last >= size), (1, ""))


def save_picture(figure, path: Path) -> None:
    """Write the figure as a PNG, all or nothing."""
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)
