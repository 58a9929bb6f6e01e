"""
Compare runs: which was faster, and which learned more in equal iterations, tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070   nanoGPT's console output, MFU of this card

Time is that of iterations, evaluations and checkpoints, without start-up and compilation.

Losses are compared at the last evaluation that all runs share. If they share none, a loss is read
off the straight line between two evaluations. It is n/a if the line would be longer than a fifth of
the way so far, or would begin at iteration 0, because the loss falls steeply there. The true value
lies between those of the two evaluations. Runs whose ranges overlap are called equal.

Runs of unequal tokenizers are compared in bits per byte.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.console import Parser, UserError, duration, one_line, raise_if_any, run_main, warn
from common.files import plain_file
from configurator import FIELDS, saved_config
from reports.nanogpt_log import read_nanogpt_log
from reports.picture import count4, save_picture
from reports.records import RunRecords, percentile, read_metrics
from training.gpus import resolve_gpu, row_peak

# about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing
LOSS_NOISE = 0.005
BITS = "bits per byte"
BITS_NOISE = 0.002  # LOSS_NOISE at GPT-2's 4.5 bytes per token
# A straight line may span this share of the way so far. For a loss that falls like 1/sqrt(x) and is
# 1 nat above its floor, it is off by about 0.2^2 / 8 * 3/4 = 0.004 nats, less than the noise.
NEAR = 0.2
MUON_KEYS = {"muon_lr", "muon_momentum", "muon_weight_decay", "embed_lr", "head_lr"}
UNUSED_KEYS = dict(adamw=MUON_KEYS, muon={"learning_rate"})  # by the optimizer
TOLD_ELSEWHERE = {"out_dir", "overwrite", "wandb_run_name", "device", "dtype"}
FOOTNOTE = """\
Between two evaluations a value is read off a straight line. It is n/a if the line would begin at
iteration 0 or, for a loss, if the evaluations are further apart than a fifth of the way there."""

# -----------------------------------------------------------------------------
# Figures of one run


def figures_of(run: RunRecords) -> dict[str, float]:
    """Figures of a run as a whole. Means are over time, so that tok/s is tokens per time."""
    step, evals = run.step, run.eval
    in_steps = float(np.sum(step["seconds"]))
    in_pauses = float(np.nansum(evals["seconds"]) + np.nansum(run.checkpoint["seconds"]))
    # the last record is a step at N, which trained on the iteration N, or an evaluation after it
    iterations = np.append(step["iter"] + 1, evals["iter"])
    tokens = np.append(step["tokens"] + run.tokens_per_iter, evals["tokens"])
    return {
        "parameters": run.parameters,
        "iterations": percentile(iterations, 100),
        "tokens": percentile(tokens, 100),
        "hours": (in_steps + in_pauses) / 3600,
        "tokens_per_sec": mean_over_time(step["tokens_per_sec"], step["seconds"]),
        "mfu": mean_over_time(step["mfu"], step["seconds"]),
        "step_ms_p50": percentile(step["step_ms"], 50),
        "step_ms_p95": percentile(step["step_ms"], 95),
        "pause_share": in_pauses / (in_steps + in_pauses) if in_steps > 0 else math.nan,
    }


def mean_over_time(values: np.ndarray, seconds: np.ndarray) -> float:
    known = np.isfinite(values) & (seconds > 0)
    return float(np.average(values[known], weights=seconds[known])) if known.any() else math.nan


def learning_curve(run: RunRecords, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """
    Where on the axis (iter, tokens or hours) the run was evaluated, and its val losses there. The
    evaluation at iteration 0 is left out: it says nothing about what was learned.
    """
    x, losses = run.eval[axis], run.eval["val_loss"]
    known = (run.eval["iter"] > 0) & np.isfinite(x) & np.isfinite(losses)
    return x[known], losses[known]


@dataclass
class Estimate:
    """A value that lies between low and high. All three are NaN if it is not known."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan


def on_line(x: np.ndarray, y: np.ndarray, i: int, at: float) -> Estimate:
    """y at this x: at the point i, or on the straight line to it from the point before."""
    if x[i] == at:
        return Estimate(float(y[i]), float(y[i]), float(y[i]))
    if i == 0:
        return Estimate()
    share = (at - x[i - 1]) / (x[i] - x[i - 1])
    low, high = sorted((float(y[i - 1]), float(y[i])))
    return Estimate(float(y[i - 1] + share * (y[i] - y[i - 1])), low, high)


def loss_at(run: RunRecords, axis: str, at: float) -> Estimate:
    """The val loss at this point of the axis, by the rule in this file's docstring."""
    x, losses = learning_curve(run, axis)
    i = np.searchsorted(x, at)
    if i == len(x) or (x[i] > at and i > 0 and x[i] - x[i - 1] > NEAR * at):
        return Estimate()
    return on_line(x, losses, i, at)


def reach(x: np.ndarray, losses: np.ndarray, target: float) -> Estimate:
    """
    Where on x a learning curve first comes down to this loss. Unknown if it never does, or if it
    did so before its first evaluation.
    """
    reached = np.flatnonzero(losses <= target)
    return on_line(losses, x, reached[0], target) if len(reached) else Estimate()


# -----------------------------------------------------------------------------
# Side by side


@dataclass
class Row:
    """One line of the table."""

    label: str
    key: str  # its name in the JSON
    values: list  # one per run, None if not known
    format: Callable[..., str]
    better: str | None = None  # higher | lower; None: there is no best
    word: str = ""  # of the verdict: "a 2.39x faster"
    noise: float = 0.0  # above 0: the verdict is a difference larger than this, not a ratio
    estimates: list[Estimate] | None = None  # where the values come from, if they are uncertain
    note: str = ""  # said in place of a verdict

    def __post_init__(self):
        # NaN, the one value that is not equal to itself, means unknown
        self.values = [value if value == value else None for value in self.values]


def verdict(row: Row, names: list[str]) -> str:
    """The best value against the next best, such as "a 2.39x faster"; may be empty."""
    known = [i for i, value in enumerate(row.values) if value is not None]
    if row.note or len(known) < 2:
        return row.note
    if row.better is None:
        return "differs" if len({row.values[i] for i in known}) > 1 else ""
    known.sort(key=lambda i: row.values[i], reverse=row.better == "higher")
    best, second = known[0], known[1]
    if row.estimates and row.estimates[best].high > row.estimates[second].low:
        return "equal as far as the evaluations tell"
    low, high = sorted((row.values[best], row.values[second]))
    if row.noise and high - low <= row.noise:
        return f"equal within {row.noise}"
    if row.noise:
        return f"{names[best]} {high - low:.4f} lower"
    if high <= 1.005 * low:
        return "equal"
    return f"{names[best]} {high / low:.2f}x {row.word}" if low > 0 else ""


def build_table(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    whole, tenths, percent = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
    rows = []
    # the keys in which the runs differ, and the device and dtype that were in use
    unused = [UNUSED_KEYS.get(run.config.get("optimizer"), set()) for run in runs]
    left_out = TOLD_ELSEWHERE | set.intersection(*unused)
    for key in FIELDS:
        values = [run.config.get(key) for run in runs]
        if len(set(values) - {None}) > 1 and key not in left_out:
            rows.append(Row(key, f"config/{key}", values, str))
    for key in ("device", "dtype"):
        rows.append(Row(key, key, [getattr(run, key) for run in runs], str))
    figures = [figures_of(run) for run in runs]
    for key, label, form, better, word in (
        ("parameters", "parameters", count4, "higher", "larger"),
        ("iterations", "iterations", whole, "higher", "more"),
        ("tokens", "tokens", count4, "higher", "more"),
        ("hours", "time", time_text, "higher", "longer"),
        ("tokens_per_sec", "tok/s", whole, "higher", "faster"),
        ("mfu", "MFU", percent, "higher", "higher"),
        ("step_ms_p50", "iteration time p50, ms", tenths, "lower", "shorter"),
        ("step_ms_p95", "iteration time p95, ms", tenths, "lower", "shorter"),
        ("pause_share", "evaluations and checkpoints", percent, "lower", "less"),
    ):
        rows.append(Row(label, key, [of_run[key] for of_run in figures], form, better, word))
        if word == "shorter" and len({run.tokens_per_iter for run in runs}) > 1:
            rows[-1].note = "unequal tokens per iteration"
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    """
    Val loss at equal iterations, tokens and time, and the tokens and time to one loss: by default
    the lowest that all runs reach.
    """
    name, key, noise = "val loss", "val_loss", LOSS_NOISE
    if runs[0].loss_unit == BITS:
        name, key, noise = BITS, "bits_per_byte", BITS_NOISE
    best = [percentile(run.eval["val_loss"], 0) for run in runs]
    rows = [Row(f"best {name}", f"best_{key}", best, "{:.4f}".format, "lower", noise=noise)]
    if len(runs) > 1:
        for axis, where, form in (
            ("iter", "at iteration {}", "{:,.0f}".format),
            ("tokens", "at {} tokens", "{:,.0f}".format),
            ("hours", "after {}", time_text),
        ):
            at = common_point(runs, axis)
            if at is not None:
                label = f"{name} {where.format(form(at))}"
                losses = [loss_at(run, axis, at) for run in runs]
                rows.append(estimated_row(label, f"{key}_at_equal_{axis}", losses, "{:.4f}".format))
                rows[-1].noise = noise
        if target_loss is None:
            target_loss = percentile(np.array(best), 100)
    if target_loss is not None and math.isfinite(target_loss):
        for axis, what, form in (("tokens", "tokens", count4), ("hours", "time", time_text)):
            reached = [reach(*learning_curve(run, axis), target_loss) for run in runs]
            label = f"{what} to {name} {target_loss:.4f}"
            rows.append(estimated_row(label, f"{axis}_to_loss", reached, form, "less"))
    unequal_datasets = len({run.config["dataset"] for run in runs if "dataset" in run.config}) > 1
    for row in rows:
        if name == BITS and "tokens" in row.key:
            row.note = "not comparable: unequal tokenizers"
        elif name != BITS and unequal_datasets:
            row.note = "not comparable: unequal datasets"
    return rows


def estimated_row(label, key, estimates: list[Estimate], form, word: str = "lower") -> Row:
    values = [estimate.value for estimate in estimates]
    return Row(label, key, values, form, "lower", word, estimates=estimates)


def common_point(runs: list[RunRecords], axis: str) -> float | None:
    """
    Where to compare the losses: at the last evaluation that all runs share. If there is none, at
    the last evaluation of any run at which all losses are known. Failing that, at the end of the
    run that ends first. None if some run was not evaluated after iteration 0.
    """
    evaluated = [set(learning_curve(run, axis)[0].tolist()) for run in runs]
    if not all(evaluated):
        return None
    shared = set.intersection(*evaluated)
    if shared:
        return max(shared)
    for at in sorted(set.union(*evaluated), reverse=True):
        if all(math.isfinite(loss_at(run, axis, at).value) for run in runs):
            return at
    return min(max(points) for points in evaluated)


def find_warnings(runs: list[RunRecords]) -> list[str]:
    """The runs' own warnings, and one if their evaluations are of unequal size."""
    warnings = [warning for run in runs for warning in run.warnings]
    sizes = {run.name: saved_config(run.config).eval_size for run in runs if run.config}
    if len(set(sizes.values())) > 1:
        unequal = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        consequence = "small differences in val loss say little"
        warnings.append(f"unequal evaluation tokens ({unequal}), so {consequence}")
    return warnings


def time_text(hours: float) -> str:
    seconds = 3600 * hours
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def print_table(rows: list[Row], names: list[str]) -> None:
    lines = [["", *names, ""]]
    for row in rows:
        cells = ["n/a" if value is None else row.format(value) for value in row.values]
        lines.append([row.label, *cells, verdict(row, names)])
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    for label, *cells, end in lines:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        print(one_line("  ".join([label.ljust(widths[0]), *cells, end]).rstrip()))
    if len(names) > 1:
        print(FOOTNOTE)


# -----------------------------------------------------------------------------
# Runs


def read_run(path: Path, gpu: str | None) -> RunRecords:
    """
    A run from its folder, its metrics.jsonl, or a file with nanoGPT's output. Raises UserError.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a file with nanoGPT's output"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        read = read_metrics if file.suffix == ".jsonl" else read_nanogpt_log
        run = read(plain_file(file))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {hint}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}: a record is damaged ({error}); remove that line") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: no iteration and no evaluation in it; {hint}")
    if gpu and not np.isfinite(run.step["mfu"]).any():
        device = run.config.get("device")
        if device in ("cpu", "mps"):
            run.warnings.append(f"{path}: ran on {device}, so --gpu is ignored for it")
        else:
            set_mfu(run, gpu)
    return run


def set_mfu(run: RunRecords, gpu: str) -> None:
    """
    Set the MFU of each step record, a fraction, for this card. Raises UserError if the card or its
    peak is not known.
    """
    row = resolve_gpu(gpu)
    dtype = run.dtype if run.dtype in ("float32", "float16") else "bfloat16"
    peak = row_peak(row, getattr(torch, dtype), run.config.get("tf32", True))
    if peak is None:
        raise UserError(f"gpu: the {dtype} peak of {gpu} is not certain; leave out --gpu")
    run.step["mfu"] = run.flops_per_token * run.step["tokens_per_sec"] / (peak * 1e12)
    run.device = run.device or row["name"].partition("|")[0]


def read_runs(paths: list[Path], gpu: str | None) -> list[RunRecords]:
    runs, problems = [], []
    for path in paths:
        try:
            runs.append(read_run(path, gpu))
        except UserError as error:
            problems += error.problems
    raise_if_any(problems)
    names = [run.name for run in runs]
    for run, path in zip(runs, paths):
        if names.count(run.name) > 1:
            run.name = str(path)
    use_one_unit(runs)
    return runs


def use_one_unit(runs: list[RunRecords]) -> None:
    """
    Where the runs have unequal tokenizers, which nats per token cannot compare, give all losses in
    bits per byte, NaN where they are not known, and add a warning that says so.
    """
    if len({run.tokenizer for run in runs} - {None, "unknown"}) < 2:
        return
    for run in runs:
        run.step["loss"] *= percentile(run.eval["bits_per_byte"] / run.eval["val_loss"], 50)
        run.eval["val_loss"] = run.eval["bits_per_byte"]
        run.loss_unit = BITS
    unequal = ", ".join(f"{run.name}: {(run.tokenizer or 'unknown')[:13]}" for run in runs)
    meaning = "losses are in bits per byte; prepare the data of a run with n/a again"
    runs[0].warnings.append(f"unequal tokenizers ({unequal}), so {meaning}")


def path_of(text: str) -> Path:
    return Path(text).expanduser()  # a shell leaves the ~ of --png=~/x alone


def main(argv: list[str]) -> None:
    parser = Parser(description="The figures and picture of a run, or of several side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=path_of, metavar="RUN", help="out_dir, or file of nanoGPT's output")
    add("--loss", type=float, help="tokens and time to this val loss; default: one that all reach")
    add("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    add("--png", type=path_of, help="write the picture here; default for one run: its loss.png")
    add("--json", type=path_of, help="write the table here")
    args = parser.parse_args(argv)

    paths, png = list(dict.fromkeys(args.runs)), args.png
    runs = read_runs(paths, args.gpu)
    names = [run.name for run in runs]
    rows = build_table(runs, args.loss)
    warnings = find_warnings(runs)
    print_table(rows, names)
    for warning in warnings:
        warn(warning)

    if len(runs) == 1 and png is None:
        png = paths[0] / "loss.png" if paths[0].is_dir() else paths[0].with_suffix(".png")
    values = {name: {row.key: row.values[i] for row in rows} for i, name in enumerate(names)}
    verdicts = {row.key: verdict(row, names) for row in rows if verdict(row, names)}
    table = {"runs": values, "verdicts": verdicts, "warnings": warnings}
    try:
        if path := png:
            save_picture(runs, path)
        if path := args.json:
            plain_file(path).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


if __name__ == "__main__":
    run_main(main)
