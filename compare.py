"""
Compare runs: which was faster, and which learned more in equal iterations, tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070   nanoGPT's console output, MFU of this card

Time is that of iterations, evaluations and checkpoints, without start-up and compilation.

Losses are compared at the last evaluation of any run at which those of all runs are known. Between
two evaluations a loss is read off a straight line. It is not known if the line would be longer than
a fifth of the way so far, or would begin at iteration 0, because the loss falls steeply there.

Runs of unequal tokenizers are compared in bits per byte.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.console import Parser, UserError, duration, run_main, table_lines, warn
from configurator import FIELDS, NEVER, saved_config
from reports.curves import learning_curve, loss_at, reach
from reports.nanogpt_log import read_nanogpt_log
from reports.picture import count4, millions, save_picture
from reports.records import Records, RunRecords, percentile
from training.gpus import resolve_gpu, row_peak

# about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing
LOSS_NOISE = 0.005
# Figures that differ by no more than this share are equal. The tokens and the time to a loss are
# less certain: a straight line between evaluations that are half the way apart is off by a few per
# cent.
SAME, SAME_TO_LOSS = 0.005, 0.05
BITS = "bits per byte"
BITS_NOISE = 0.002  # LOSS_NOISE at GPT-2's 4.5 bytes per token
CPUS = {"x86_64", "AMD64", "aarch64", "arm64", "arm"}  # names that Python has for them
TOLD_ELSEWHERE = {"out_dir", "wandb_run_name", "device", "dtype"}

# -----------------------------------------------------------------------------
# Figures of one run


def figures_of(run: RunRecords) -> dict[str, float]:
    """Figures of a run as a whole. Means are over time, so that tok/s is tokens per time."""
    step, evals = run.step, run.eval
    step_ms_p50 = percentile(step["step_ms"], 50)
    after_log = run.iterations - np.max(step["iter"] + 1, initial=0)
    in_steps = float(np.sum(step["seconds"]) + np.nan_to_num(after_log * step_ms_p50 / 1e3))
    in_pauses = float(np.nansum(evals["seconds"]) + np.nansum(run.checkpoint["seconds"]))
    return {
        "parameters": run.parameters,
        "iterations": run.iterations,
        "tokens": run.tokens,
        "hours": (in_steps + in_pauses) / 3600,
        "tokens_per_sec": mean_over_time(step["tokens_per_sec"], step["seconds"]),
        "mfu": mean_over_time(step["mfu"], step["seconds"]),
        "step_ms_p50": step_ms_p50,
        "step_ms_p95": percentile(step["step_ms"], 95),
        "pause_share": in_pauses / (in_steps + in_pauses) if in_steps > 0 else math.nan,
    }


def mean_over_time(values: np.ndarray, seconds: np.ndarray) -> float:
    known = np.isfinite(values) & (seconds > 0)
    return float(np.average(values[known], weights=seconds[known])) if known.any() else math.nan


# -----------------------------------------------------------------------------
# Side by side


@dataclass
class Row:
    """One line of the table."""

    label: str
    key: str  # its name in the JSON
    values: list  # one per run, None if not known
    format: Callable[..., str]
    verdict: str


def none_if_nan(number: float) -> float | None:
    return None if math.isnan(number) else number


def ranked(values: list[float | None], better: str) -> list[int]:
    """The indices of the known values, the best first."""
    known = [i for i, value in enumerate(values) if value is not None]
    return sorted(known, key=lambda i: values[i], reverse=better == "higher")


def verdict(
    names: list[str], values: list[float | None], better: str, word: str, same: float = SAME
) -> str:
    """
    The best value against the next best: their ratio, "a 2.39x faster". Empty where fewer than two
    are known.
    """
    order = ranked(values, better)
    if len(order) < 2:
        return ""
    low, high = sorted(values[i] for i in order[:2])
    if high - low <= same * low:
        return "equal"
    return f"{names[order[0]]} {high / low:.2f}x {word}" if low > 0 else ""


def build_table(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    whole, tenths, percent = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
    rows = []
    # the keys in which the runs differ, and the device and dtype that were in use
    for key in FIELDS:
        values = [run.config.get(key) for run in runs]
        values = ["by the clock" if value == NEVER else value for value in values]
        if len(set(values) - {None}) > 1 and key not in TOLD_ELSEWHERE:
            rows.append(Row(key, f"config/{key}", values, str, "differs"))
    for key in ("device", "dtype"):
        values = [getattr(run, key) for run in runs]
        # nanoGPT's logs do not say which processor
        known = {"cpu" if value in CPUS else value for value in values} - {None}
        rows.append(Row(key, key, values, str, "differs" if len(known) > 1 else ""))
    names = [run.name for run in runs]
    figures = [figures_of(run) for run in runs]
    equal_batches = len({run.tokens_per_iter for run in runs}) == 1
    for key, label, form, better, word in (
        ("parameters", "parameters", millions, "higher", "larger"),
        ("iterations", "iterations", whole, "higher", "more"),
        ("tokens", "tokens", count4, "higher", "more"),
        ("hours", "time", time_text, "higher", "longer"),
        ("tokens_per_sec", "tok/s", whole, "higher", "faster"),
        ("mfu", "MFU", percent, "higher", "higher"),
        ("step_ms_p50", "iteration time p50, ms", tenths, "lower", "shorter"),
        ("step_ms_p95", "iteration time p95, ms", tenths, "lower", "shorter"),
        ("pause_share", "evaluations and checkpoints", percent, "lower", "less"),
    ):
        values = [none_if_nan(of_run[key]) for of_run in figures]
        result = verdict(names, values, better, word)
        if key in ("step_ms_p50", "step_ms_p95") and not equal_batches:
            result = "unequal tokens per iteration"
        rows.append(Row(label, key, values, form, result))
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    """
    Val loss at equal iterations, tokens and time, and the tokens and time to one loss: by default
    the lowest that all runs reach.
    """
    name, key, noise = "val loss", "val_loss", LOSS_NOISE
    if runs[0].loss_unit == BITS:
        name, key, noise = BITS, "bits_per_byte", BITS_NOISE
    loss, whole = "{:.4f}".format, "{:,.0f}".format
    lowest = [none_if_nan(percentile(run.eval["val_loss"], 0)) for run in runs]
    result = loss_verdict(runs, lowest, "iter", noise)
    rows = [Row(f"best {name}", f"best_{key}", lowest, loss, result)]
    if len(runs) > 1:
        for axis, where, form in (
            ("iter", "at iteration {}", whole),
            ("tokens", "at {} tokens", whole),
            ("hours", "after {}", time_text),
        ):
            curves = [learning_curve(run, axis) for run in runs]
            at = common_point(curves)
            if at is not None:
                label = f"{name} {where.format(form(at))}"
                losses = [loss_at(*curve, at) for curve in curves]
                result = loss_verdict(runs, losses, axis, noise)
                rows.append(Row(label, f"{key}_at_equal_{axis}", losses, loss, result))
    if target_loss is None and len(runs) > 1:
        target_loss = max([best for best in lowest if best is not None], default=None)
    if target_loss is not None:
        for axis, what, form in (("tokens", "tokens", count4), ("hours", "time", time_text)):
            label = f"{what} to {name} {target_loss:.4f}"
            reached = [reach(*learning_curve(run, axis), target_loss) for run in runs]
            result = loss_verdict(runs, reached, axis)
            rows.append(Row(label, f"{axis}_to_loss", reached, form, result))
    return rows


def loss_verdict(
    runs: list[RunRecords], values: list[float | None], axis: str, noise: float | None = None
) -> str:
    """The verdict on the tokens or time to a loss or, with `noise`, on losses: their difference."""
    in_bits = runs[0].loss_unit == BITS
    if in_bits and axis == "tokens":
        return "not comparable: unequal tokenizers"
    if len({run.config.get("dataset") for run in runs} - {None}) > 1 and not in_bits:
        return "not comparable: unequal datasets"
    # nanoGPT draws its tokens from the whole split
    fixed = [run.config for run in runs if run.config.get("eval_tokens") is not None]
    if len({saved_config(config).eval_size for config in fixed}) > 1 and not in_bits:
        return "not comparable: unequal tokens evaluated"
    names = [run.name for run in runs]
    if noise is None:
        return verdict(names, values, "lower", "less", same=SAME_TO_LOSS)
    order = ranked(values, "lower")
    if len(order) < 2:
        return ""
    gap = values[order[1]] - values[order[0]]
    return f"{names[order[0]]} {gap:.4f} lower" if gap > noise else f"equal within {noise}"


def common_point(curves: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The last evaluation of any run at which all losses are known; None where there is none."""
    for at in sorted(np.concatenate([x for x, _ in curves]), reverse=True):
        if all(loss_at(*curve, at) is not None for curve in curves):
            return float(at)
    return None


def time_text(hours: float) -> str:
    seconds = 3600 * hours
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def print_table(rows: list[Row], names: list[str]) -> None:
    cells = [["", *names]]
    for row in rows:
        values = ["n/a" if value is None else row.format(value) for value in row.values]
        cells.append([row.label, *values])
    header, *lines = table_lines(cells)
    print(header)
    for line, row in zip(lines, rows, strict=True):
        print(f"{line}  {row.verdict}".rstrip())
    if any(None in row.values for row in rows if "loss" in row.key):
        print("a loss is n/a where no evaluation is near enough: docs/compare.md")


# -----------------------------------------------------------------------------
# Runs


def read_run(path: Path, gpu: str | None) -> RunRecords:
    """
    A run from its folder, its metrics.jsonl, or a file with nanoGPT's output. Raises UserError.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a file with nanoGPT's output"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = Records(file).read() if file.suffix == ".jsonl" else read_nanogpt_log(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: no iteration and no evaluation in it; {hint}")
    on_a_card = run.config.get("device") not in ("cpu", "mps")
    if gpu and on_a_card and not np.isfinite(run.step["mfu"]).any():
        set_mfu(run, gpu)
    return run


def set_mfu(run: RunRecords, gpu: str) -> None:
    """
    Set the MFU of each step record, a fraction, for this card. Raises UserError if the card or its
    peak is not known.
    """
    row = resolve_gpu(gpu)
    dtype = run.dtype if run.dtype in ("float32", "float16") else "bfloat16"
    peak = row_peak(row, dtype, run.config.get("tf32", True))
    if peak is None:
        raise UserError(f"gpu: the {dtype} peak of {gpu} is not certain; leave out --gpu")
    run.step["mfu"] = run.flops_per_token * run.step["tokens_per_sec"] / (peak * 1e12)
    run.device = run.device or row["name"].partition("|")[0]


def read_runs(paths: list[Path], gpu: str | None) -> list[RunRecords]:
    runs = [read_run(path, gpu) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    name_settings(runs)
    use_one_unit(runs)
    return runs


def name_settings(runs: list[RunRecords]) -> None:
    """
    Call datasets by their folders' names, the same tokens by one name: nanoGPT's shakespeare_char
    is ../nanoGPT/data/shakespeare_char here. And leave to the clock what it decides.
    """
    names: dict[str, str] = {}
    for run in runs:
        c = run.config
        if "dataset" in c:
            name = Path(c["dataset"]).name
            c["dataset"] = names.setdefault(run.data_fingerprint or name, name)
        # by the clock a warm-up takes a tenth of the run at most
        if (c.get("hours") or c.get("until")) and 10 * c["warmup_iters"] > run.iterations:
            c["warmup_iters"] = NEVER


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
    runs[0].warnings.append(f"unequal tokenizers ({unequal}), so losses are in bits per byte")


def main(argv: list[str]) -> None:
    parser = Parser(description="The figures and picture of a run, or of several side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="out_dir, or file of nanoGPT's output")
    add("--loss", type=float, help="tokens and time to this val loss; default: one that all reach")
    add("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    add("--png", type=Path, help="write the picture here; default for one run: its loss.png")
    add("--json", type=Path, help="write the table here")
    args = parser.parse_args(argv)

    paths, png = list(dict.fromkeys(args.runs)), args.png
    runs = read_runs(paths, args.gpu)
    names = [run.name for run in runs]
    rows = build_table(runs, args.loss)
    warnings = [warning for run in runs for warning in run.warnings]
    print_table(rows, names)
    for warning in warnings:
        warn(warning)

    if len(runs) == 1 and png is None:
        png = paths[0] / "loss.png" if paths[0].is_dir() else paths[0].with_suffix(".png")
    values = {name: {row.key: row.values[i] for row in rows} for i, name in enumerate(names)}
    verdicts = {row.key: row.verdict for row in rows if row.verdict}
    table = {"runs": values, "verdicts": verdicts, "warnings": warnings}
    if png:
        save_picture(runs, png)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
