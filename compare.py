"""
Pictures and tables of runs: which was faster, which learnt more, at equal iterations, tokens and hours.

    python compare.py out/gpt124m                       one run: its figures, and its picture in out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png          side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070        also nanoGPT's console output, with MFU on the card it ran on

Hours are those of iterations, evaluations and checkpoints: start-up and compilation are left out.
"""

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import FIELDS, Config
from console import count, warn
from errors import Parser, UserError, run_main
from records import RunRecords, median, read_metrics, read_run

PICTURE_POINTS = 600  # a line in a picture is drawn through at most this many means
COLORS = BLUE, RED, GREEN, *_, GREY = "#4c78a8", "#e4572e", "#54a24b", "#b279a2", "#d6a000", "#17a2a2", "#7f5f3f", "#777777"
LOSS_NOISE = 0.005  # about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing

# -----------------------------------------------------------------------------
# Side by side


@dataclass
class Row:
    """One line of the table: a value per run (None where not known), how it reads, and how the best is told."""

    key: str
    label: str
    values: list
    form: Callable[..., str]
    judge: Callable[[list[tuple]], str] | None = None

    def __post_init__(self):
        self.values = [None if isinstance(v, float) and not math.isfinite(v) else v for v in self.values]

    def texts(self) -> list[str]:
        return ["n/a" if v is None else self.form(v) for v in self.values]

    def verdict(self, runs: list[RunRecords]) -> str:
        known = [(v, run.name) for v, run in zip(self.values, runs) if v is not None]
        return self.judge(known) if self.judge and len(known) > 1 else ""


def build_table(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    equal_work = len({run.tokens_per_iter for run in runs}) == 1
    shorter = ratio("shorter", lower=True) if equal_work else lambda known: "unequal tokens per iteration"
    figures = [figures_of(run) for run in runs]
    keys = [key for key in FIELDS if key not in ("out_dir", "overwrite", "wandb_run_name")]
    keys = [key for key in keys if len({run.config[key] for run in runs if key in run.config}) > 1]
    rows = [Row(f"config/{key}", key, [run.config.get(key) for run in runs], str, lambda known: "differs") for key in keys]
    rows += [Row(key, label, [of_run[key] for of_run in figures], form, judge) for key, label, form, judge in (
        ("device", "device", str, None),
        ("dtype", "dtype", str, None),
        ("parameters", "parameters", count4, ratio("larger")),
        ("iterations", "iterations", "{:,.0f}".format, ratio("more")),
        ("tokens", "tokens", count4, ratio("more")),
        ("hours", "hours", "{:.3g}".format, ratio("longer")),
        ("tokens_per_sec", "tok/s", "{:,.0f}".format, ratio("faster")),
        ("mfu", "MFU", "{:.1%}".format, difference("{:.1%} of the peak higher", noise=5e-4)),
        ("step_ms_p50", "iteration time p50, ms", "{:,.1f}".format, shorter),
        ("step_ms_p95", "iteration time p95, ms", "{:,.1f}".format, shorter),
        ("pause_share", "evaluations and checkpoints", "{:.1%} of time".format, difference("{:.1%} of time less", True, 5e-4)),
    )]  # fmt: skip
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    """Val loss at equal iterations, tokens and hours, and the tokens and hours to one loss: one that all runs reach."""
    lower, less = difference("{:.4f} lower", lower=True, noise=LOSS_NOISE), ratio("less", lower=True)
    if len({run.config["dataset"] for run in runs if "dataset" in run.config}) > 1:
        lower = less = lambda known: "not comparable: unequal datasets"
    best = [float(np.min(run.eval["val_loss"], initial=math.inf, where=np.isfinite(run.eval["val_loss"]))) for run in runs]
    loss = "{:.4f}".format
    rows = [Row("best_val_loss", "best val loss", best, loss, lower)]
    if len(runs) > 1:
        for axis, form in (("iter", "iteration {:,.0f}"), ("tokens", "{:,.0f} tokens"), ("hours", "{:.3g} hours")):
            x = min(float(np.max(run.eval[axis][np.isfinite(run.eval["val_loss"])], initial=0)) for run in runs)
            losses = [loss_at(run, axis, x) for run in runs]
            rows.append(Row(f"val_loss_at_equal_{axis}", f"val loss at {form.format(x)}", losses, loss, lower))
        target_loss = max(best) if target_loss is None else target_loss
    if target_loss is not None:
        for axis, form in dict(tokens=count4, hours="{:.3g}".format).items():
            reached = [reach(run.eval[axis], run.eval["val_loss"], target_loss) for run in runs]
            rows.append(Row(f"{axis}_to_loss", f"{axis} to val loss {target_loss:.4f}", reached, form, less))
    return rows


def figures_of(run: RunRecords) -> dict:
    """What can be said of a run as a whole; means are over time, so that tok/s is tokens per time."""
    step, timed = run.step, np.isfinite(run.step["step_ms"])
    seconds, pauses = np.sum(step["seconds"]), np.nansum(run.eval["seconds"]) + np.nansum(run.checkpoint["seconds"])
    figures = dict(device=run.device, dtype=run.dtype, parameters=run.parameters, hours=(seconds + pauses) / 3600)
    figures["pause_share"] = pauses / (seconds + pauses) if seconds else math.nan
    for key, name, per_iter in (("iterations", "iter", 1), ("tokens", "tokens", run.tokens_per_iter)):
        figures[key] = max([value + per_iter for value in step[name][-1:]] + run.eval[name][-1:].tolist())
    for name in ("tokens_per_sec", "mfu"):
        known = timed & np.isfinite(step[name]) & (step["seconds"] > 0)
        figures[name] = np.average(step[name][known], weights=step["seconds"][known]) if known.any() else math.nan
    for key, q in (("step_ms_p50", 50), ("step_ms_p95", 95)):
        figures[key] = np.percentile(step["step_ms"][timed], q) if timed.any() else math.nan
    return {key: float(value) if isinstance(value, np.floating) else value for key, value in figures.items()}


def loss_at(run: RunRecords, axis: str, x: float) -> float:
    """The val loss at x, between evaluations by a straight line; NaN before the first."""
    known = np.isfinite(run.eval["val_loss"]) & np.isfinite(run.eval[axis])
    return float(np.interp(x, run.eval[axis][known], run.eval["val_loss"][known], left=math.nan)) if known.any() else math.nan


def reach(x: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """Where on x the losses first come down to `loss`, between evaluations by a straight line; NaN: never."""
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return math.nan
    i = max(1, below[0])
    return float(np.interp(-loss, -losses[i - 1 : i + 1], x[i - 1 : i + 1])) if below[0] else float(x[0])


def ratio(word: str, lower: bool = False) -> Callable:
    """A verdict such as "a 2.39x faster": the best against the next best."""

    def judge(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        low, high = sorted((best, second))
        return "equal" if high < 1.005 * low else f"{name} {high / low:.2f}x {word}" if low > 0 else ""

    return judge


def difference(form: str, lower: bool = False, noise: float = 0.0) -> Callable:
    """A verdict such as "b 0.0134 lower": the best against the next best, if they differ by more than `noise`."""

    def judge(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        return f"{name} {form.format(abs(best - second))}" if abs(best - second) > noise else f"equal within {noise}"

    return judge


def count4(number: float, _position: int = 0) -> str:
    """40560000 -> 40.56M; also matplotlib's form of a tick."""
    return count(number, digits=4)


def find_warnings(runs: list[RunRecords]) -> list[str]:
    """What stands in the way of comparing these runs."""
    warnings = [warning for run in runs for warning in run.warnings]
    for what, value, consequence in (
        ("datasets", lambda c: c.get("dataset"), "losses are not comparable"),
        ("evaluation tokens", lambda c: Config(**c).eval_size, "small differences in val loss say little"),
    ):
        values = {run.name: value(run.config) for run in runs if run.config}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in values.items())
            warnings.append(f"unequal {what} ({listed}), so {consequence}")
    return warnings


def print_table(rows: list[Row], runs: list[RunRecords]) -> None:
    cells = [["", *(run.name for run in runs), ""], *([row.label, *row.texts(), row.verdict(runs)] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:-1], widths[1:])), line[-1]]).rstrip())
    if len(runs) > 1:
        print("Between two evaluations, losses, tokens and hours are those on the straight line from one to the other.")


# -----------------------------------------------------------------------------
# Pictures


@np.errstate(all="ignore")  # odd records divide by zero, which is NaN and so not known
def draw_run(out_dir: Path) -> Path:
    """Draw out_dir/metrics.jsonl as out_dir/loss.png. It is called in the middle of a run, so trouble is only a warning."""
    path = out_dir / "loss.png"
    try:
        save_picture([read_metrics(out_dir / "metrics.jsonl", most_steps=6_000)], path)
    except ImportError:  # matplotlib is not needed to train
        pass
    except Exception as error:  # whatever a record holds or the disk does, the run is worth more than its picture
        warn(f"{path}: not drawn ({type(error).__name__}: {error})")
    return path


def save_picture(runs: list[RunRecords], path: Path) -> None:
    """Write a PNG, all or nothing: one run's losses, checkpoints and speed, or several runs against tokens and hours."""
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure and may look for a screen

    alone = len(runs) == 1
    figure = Figure(figsize=(9, 6) if alone else (12, 7), facecolor="white", layout="constrained")
    draw_one(figure, runs[0]) if alone else draw_several(figure, runs)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)


def draw_one(figure, run: RunRecords) -> None:
    """Losses over tokens, evaluations and checkpoints marked, and below them tok/s with MFU on the right-hand axis."""
    losses, speed = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    step, evals, saved = run.step, run.eval, run.checkpoint
    mfu = (step["mfu"] > 0) & (step["tokens_per_sec"] > 0)
    draw_band(losses, step["tokens"], step["loss"], BLUE, "train loss, every log line")
    dots = dots_of(run)
    losses.plot(evals["tokens"], evals["train_loss"], **dots | dict(linewidth=0), color=BLUE, label="train loss, evaluated")
    losses.plot(evals["tokens"], evals["val_loss"], color=RED, **dots, label="val loss, evaluated")
    losses.plot(saved["tokens"], np.full(len(saved["iter"]), 0.02), color=GREY, linewidth=0, marker="|", markersize=7,
                transform=losses.get_xaxis_transform(), label="checkpoint")  # fmt: skip
    draw_band(speed, step["tokens"], step["tokens_per_sec"], GREEN)
    finish(losses, "", "loss, nats per token")
    finish(speed, "tokens", "tok/s" if mfu.any() else "tok/s (MFU n/a)", from_zero=True)
    limit_to_settled(losses, [run])
    losses.legend(frameon=False, loc="upper right")
    if mfu.any():  # proportional to tok/s, so one line serves two axes
        percent = 100 * median(step["mfu"][mfu] / step["tokens_per_sec"][mfu])
        speed.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent)).set_ylabel("MFU, %")
    parts = [run.name, run.parameters > 0 and f"{count4(run.parameters)} parameters", run.device, run.dtype]
    parts += [f"val loss {loss:.4f} at iter {it:.0f}" for loss, it in zip(evals["val_loss"][-1:], evals["iter"][-1:])]
    figure.suptitle("   |   ".join(filter(None, parts)), fontsize=10, x=0.01, ha="left")


def draw_several(figure, runs: list[RunRecords]) -> None:
    """Val and train loss over tokens, val loss over hours, tok/s and, where known, MFU over tokens; one colour a run."""
    knows_mfu = any(np.isfinite(run.step["mfu"]).any() for run in runs)
    panels = figure.subplot_mosaic([["losses", "hours"], ["speed", "mfu" if knows_mfu else "speed"]], height_ratios=(5, 3))
    losses, hours, speed, mfu = (panels.get(name) for name in ("losses", "hours", "speed", "mfu"))
    for run, color in zip(runs, itertools.cycle(COLORS)):
        step, evals = run.step, run.eval
        losses.plot(*thin_out(step["tokens"], step["loss"])[:2], color=color, linewidth=0.8, alpha=0.4)
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
    """At most PICTURE_POINTS groups of neighbours: their mean x, and their mean, lowest and highest y, finite ones only."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return x, y, y, y
    starts = np.unique(np.linspace(0, len(x), min(len(x), PICTURE_POINTS), endpoint=False).astype(int))
    sizes = np.diff(np.append(starts, len(x)))
    return (np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes,
            np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))  # fmt: skip


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
    """Fit the loss axis to what follows the first 2 % of a run of some length: the drop from ln V would flatten the rest."""
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


# -----------------------------------------------------------------------------


def read_runs(paths: list[Path], gpu: str | None) -> list[RunRecords]:
    runs, problems = [], []
    for path in paths:
        try:
            runs.append(read_run(path, gpu))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    names = [run.name for run in runs]
    for run, path in zip(runs, paths):
        run.name = str(path) if names.count(run.name) > 1 else run.name
    return runs


def path_of(text: str) -> Path:
    return Path(os.path.expanduser(text))  # a shell leaves the ~ of --png=~/x alone


@np.errstate(all="ignore")  # as in draw_run
def main(argv: list[str]) -> None:
    parser = Parser(description="One run's figures and picture, or several side by side.")
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="out_dir of a run, or nanoGPT's output in a file")
    parser.add_argument("--loss", type=float, help="compare the tokens and hours to this val loss; default: one that all reach")
    parser.add_argument("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    parser.add_argument("--png", type=path_of, help="write the picture here; one run alone: loss.png in its folder")
    parser.add_argument("--json", type=path_of, help="write the table here")
    args = parser.parse_args(argv)
    paths, png = list(dict.fromkeys(args.runs)), args.png
    runs = read_runs(paths, args.gpu)
    rows, warnings = build_table(runs, args.loss), find_warnings(runs)
    print_table(rows, runs)
    for warning in warnings:
        warn(warning)
    if len(runs) == 1 and not png:
        png = paths[0] / "loss.png" if paths[0].is_dir() else paths[0].with_suffix(".png")
    values = {run.name: {row.key: row.values[i] for row in rows} for i, run in enumerate(runs)}
    table = dict(runs=values, verdicts={row.key: row.verdict(runs) for row in rows if row.verdict(runs)}, warnings=warnings)
    try:
        if png:
            save_picture(runs, png)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); choose another --png or --json") from None


if __name__ == "__main__":
    run_main(main)
