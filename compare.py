"""
Pictures and tables of runs: which was faster, which learnt more, at equal iterations, tokens and
hours.

    python compare.py out/gpt124m                       one run: its figures, and its picture in out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png          side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070        also nanoGPT's console output, with MFU on the card it ran on

Hours are those of iterations, evaluations and checkpoints: start-up and compilation are left out.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.console import Parser, UserError, run_main, warn
from configurator import FIELDS, Config
from reports.nanogpt_log import read_nanogpt_log
from reports.picture import count4, save_picture
from reports.records import RunRecords, read_metrics

# about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing
LOSS_NOISE = 0.005

# -----------------------------------------------------------------------------
# Side by side


@dataclass
class Row:
    """
    One line of the table: a value per run (None where not known), how it reads, and how the best is
    told.
    """

    key: str
    label: str
    values: list
    form: Callable[..., str]
    judge: Callable[[list[tuple]], str] | None = None

    def __post_init__(self):
        self.values = [
            None if isinstance(v, float) and not math.isfinite(v) else v for v in self.values
        ]

    def texts(self) -> list[str]:
        return ["n/a" if v is None else self.form(v) for v in self.values]

    def verdict(self, runs: list[RunRecords]) -> str:
        known = [(v, run.name) for v, run in zip(self.values, runs) if v is not None]
        return self.judge(known) if self.judge and len(known) > 1 else ""


def build_table(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    equal_work = len({run.tokens_per_iter for run in runs}) == 1
    shorter = (
        ratio("shorter", lower=True) if equal_work else lambda known: "unequal tokens per iteration"
    )
    figures = [figures_of(run) for run in runs]
    keys = [key for key in FIELDS if key not in ("out_dir", "overwrite", "wandb_run_name")]
    keys = [key for key in keys if len({run.config[key] for run in runs if key in run.config}) > 1]
    rows = [
        Row(
            f"config/{key}",
            key,
            [run.config.get(key) for run in runs],
            str,
            lambda known: "differs",
        )
        for key in keys
    ]
    rows += [
        Row(key, label, [of_run[key] for of_run in figures], form, judge)
        for key, label, form, judge in (
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
            (
                "pause_share",
                "evaluations and checkpoints",
                "{:.1%} of time".format,
                difference("{:.1%} of time less", True, 5e-4),
            ),
        )
    ]
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    """
    Val loss at equal iterations, tokens and hours, and the tokens and hours to one loss: one that
    all runs reach.
    """
    lower, less = (
        difference("{:.4f} lower", lower=True, noise=LOSS_NOISE),
        ratio("less", lower=True),
    )
    if len({run.config["dataset"] for run in runs if "dataset" in run.config}) > 1:
        lower = less = lambda known: "not comparable: unequal datasets"
    best = [
        float(
            np.min(run.eval["val_loss"], initial=math.inf, where=np.isfinite(run.eval["val_loss"]))
        )
        for run in runs
    ]
    loss = "{:.4f}".format
    rows = [Row("best_val_loss", "best val loss", best, loss, lower)]
    if len(runs) > 1:
        for axis, form in (
            ("iter", "iteration {:,.0f}"),
            ("tokens", "{:,.0f} tokens"),
            ("hours", "{:.3g} hours"),
        ):
            x = min(
                float(np.max(run.eval[axis][np.isfinite(run.eval["val_loss"])], initial=0))
                for run in runs
            )
            losses = [loss_at(run, axis, x) for run in runs]
            rows.append(
                Row(
                    f"val_loss_at_equal_{axis}",
                    f"val loss at {form.format(x)}",
                    losses,
                    loss,
                    lower,
                )
            )
        target_loss = max(best) if target_loss is None else target_loss
    if target_loss is not None:
        for axis, form in dict(tokens=count4, hours="{:.3g}".format).items():
            reached = [reach(run.eval[axis], run.eval["val_loss"], target_loss) for run in runs]
            rows.append(
                Row(f"{axis}_to_loss", f"{axis} to val loss {target_loss:.4f}", reached, form, less)
            )
    return rows


def figures_of(run: RunRecords) -> dict:
    """
    What can be said of a run as a whole; means are over time, so that tok/s is tokens per time.
    """
    step, timed = run.step, np.isfinite(run.step["step_ms"])
    seconds, pauses = (
        np.sum(step["seconds"]),
        np.nansum(run.eval["seconds"]) + np.nansum(run.checkpoint["seconds"]),
    )
    figures = dict(
        device=run.device,
        dtype=run.dtype,
        parameters=run.parameters,
        hours=(seconds + pauses) / 3600,
    )
    figures["pause_share"] = pauses / (seconds + pauses) if seconds else math.nan
    for key, name, per_iter in (
        ("iterations", "iter", 1),
        ("tokens", "tokens", run.tokens_per_iter),
    ):
        figures[key] = max(
            [value + per_iter for value in step[name][-1:]] + run.eval[name][-1:].tolist()
        )
    for name in ("tokens_per_sec", "mfu"):
        known = timed & np.isfinite(step[name]) & (step["seconds"] > 0)
        figures[name] = (
            np.average(step[name][known], weights=step["seconds"][known])
            if known.any()
            else math.nan
        )
    for key, q in (("step_ms_p50", 50), ("step_ms_p95", 95)):
        figures[key] = np.percentile(step["step_ms"][timed], q) if timed.any() else math.nan
    return {
        key: float(value) if isinstance(value, np.floating) else value
        for key, value in figures.items()
    }


def loss_at(run: RunRecords, axis: str, x: float) -> float:
    """The val loss at x, between evaluations by a straight line; NaN before the first."""
    known = np.isfinite(run.eval["val_loss"]) & np.isfinite(run.eval[axis])
    return (
        float(np.interp(x, run.eval[axis][known], run.eval["val_loss"][known], left=math.nan))
        if known.any()
        else math.nan
    )


def reach(x: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """
    Where on x the losses first come down to `loss`, between evaluations by a straight line; NaN:
    never.
    """
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return math.nan
    i = max(1, below[0])
    return (
        float(np.interp(-loss, -losses[i - 1 : i + 1], x[i - 1 : i + 1]))
        if below[0]
        else float(x[0])
    )


def ratio(word: str, lower: bool = False) -> Callable:
    """A verdict such as "a 2.39x faster": the best against the next best."""

    def judge(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        low, high = sorted((best, second))
        return (
            "equal" if high < 1.005 * low else f"{name} {high / low:.2f}x {word}" if low > 0 else ""
        )

    return judge


def difference(form: str, lower: bool = False, noise: float = 0.0) -> Callable:
    """
    A verdict such as "b 0.0134 lower": the best against the next best, if they differ by more than
    `noise`.
    """

    def judge(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        return (
            f"{name} {form.format(abs(best - second))}"
            if abs(best - second) > noise
            else f"equal within {noise}"
        )

    return judge


def find_warnings(runs: list[RunRecords]) -> list[str]:
    """What stands in the way of comparing these runs."""
    warnings = [warning for run in runs for warning in run.warnings]
    for what, value, consequence in (
        ("datasets", lambda c: c.get("dataset"), "losses are not comparable"),
        (
            "evaluation tokens",
            lambda c: Config(**c).eval_size,
            "small differences in val loss say little",
        ),
    ):
        values = {run.name: value(run.config) for run in runs if run.config}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in values.items())
            warnings.append(f"unequal {what} ({listed}), so {consequence}")
    return warnings


def print_table(rows: list[Row], runs: list[RunRecords]) -> None:
    cells = [
        ["", *(run.name for run in runs), ""],
        *([row.label, *row.texts(), row.verdict(runs)] for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print(
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(c.rjust(w) for c, w in zip(line[1:-1], widths[1:])),
                    line[-1],
                ]
            ).rstrip()
        )
    if len(runs) > 1:
        print(
            "Between two evaluations, losses, tokens and hours are those on the straight line from one to the other."
        )


# -----------------------------------------------------------------------------


def read_run(path: Path, gpu: str | None) -> RunRecords:
    """
    A run from its folder, its metrics.jsonl, or nanoGPT's console output in a file. Raises
    UserError.
    """
    hint = "give the out_dir of a run, or a file with nanoGPT's output"
    if path.is_dir() and not (path / "metrics.jsonl").is_file():
        raise UserError(f"{path}: holds no metrics.jsonl; {hint}")
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = read_metrics(file) if file.suffix == ".jsonl" else read_nanogpt_log(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: no iteration and no evaluation in it; {hint}")
    if gpu and not np.isfinite(run.step["mfu"]).any():
        run.step["mfu"] = mfu_on(gpu, run)
    return run


def mfu_on(gpu: str, run: RunRecords) -> np.ndarray:
    """
    MFU of each step record, a fraction, had it run on this card. Raises UserError where the card is
    not known.
    """
    import torch

    from training import gpus

    dtype, row = (
        run.dtype if run.dtype in ("float32", "float16") else "bfloat16",
        gpus.resolve_gpu(gpu),
    )
    run.device = run.device or row["name"].partition("|")[0]
    peak = gpus.row_peak(row, getattr(torch, dtype), run.config.get("tf32", True))
    if peak is None:
        raise UserError(f"gpu: gpus.csv has no certain {dtype} peak for {gpu}; leave --gpu away")
    return run.flops_per_token * run.step["tokens_per_sec"] / (peak * 1e12)


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
    parser.add_argument(
        "runs",
        nargs="+",
        type=path_of,
        metavar="RUN",
        help="out_dir of a run, or nanoGPT's output in a file",
    )
    parser.add_argument(
        "--loss",
        type=float,
        help="compare the tokens and hours to this val loss; default: one that all reach",
    )
    parser.add_argument("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    parser.add_argument(
        "--png", type=path_of, help="write the picture here; one run alone: loss.png in its folder"
    )
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
    table = dict(
        runs=values,
        verdicts={row.key: row.verdict(runs) for row in rows if row.verdict(runs)},
        warnings=warnings,
    )
    try:
        if png:
            save_picture(runs, png)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be written ({error.strerror}); choose another --png or --json"
        ) from None


if __name__ == "__main__":
    run_main(main)
