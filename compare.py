"""
Compare runs: which was faster, and which learned more in equal iterations, tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070   nanoGPT's console output, MFU of this card

Time is that of iterations, evaluations and checkpoints, without start-up and compilation.

Losses are compared at the last evaluation of any run at which those of all runs are known. Between
two evaluations a loss is read off a straight line. It is not known if the line would be longer than
a fifth of the way so far, or would begin at iteration 0, because the loss falls steeply there.

Losses of unequal tokenizers do not compare; their bits per byte do.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.console import Parser, UserError, duration, run_main, table_lines, warn
from configurator import FIELDS, NEVER, saved_config
from reports.nanogpt_log import read_nanogpt_log
from reports.picture import count4, millions, save_picture
from reports.records import Run, learning_curve, loss_at, number, percentile, reach, read_run
from training.gpus import resolve_gpu, row_peak

# about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing
LOSS_NOISE = 0.005
# Figures that differ by no more than this share are equal. The tokens and the time to a loss are
# less certain: a straight line between evaluations that are half the way apart is off by a few per
# cent.
SAME, SAME_TO_LOSS = 0.005, 0.05
BITS_NOISE = 0.002  # bits per byte: LOSS_NOISE at GPT-2's 4.5 bytes per token
SHORT_RUN = 3_000  # iterations: nanoGPT's example for a CPU makes 2,000
CPUS = {"x86_64", "AMD64", "aarch64", "arm64", "arm"}  # names that Python has for them
LOWEST_IS_BEST = ("shorter", "less")
TOLD_ELSEWHERE = {"out_dir", "wandb_run_name", "device", "dtype"}

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


def ranked(names: list[str], values: list[float | None], highest: bool) -> list[tuple]:
    """The known values with their runs' names, the best first."""
    known = [(value, name) for value, name in zip(values, names, strict=True) if value is not None]
    return sorted(known, key=lambda pair: pair[0], reverse=highest)


def verdict(names: list[str], values: list[float | None], word: str, same: float = SAME) -> str:
    """
    The best value against the next best: their ratio, "a 2.39x faster". Empty where fewer than two
    are known.
    """
    order = ranked(names, values, word not in LOWEST_IS_BEST)
    if len(order) < 2:
        return ""
    low, high = sorted(value for value, _ in order[:2])
    if high - low <= same * low:
        return "equal"
    return f"{order[0][1]} {high / low:.2f}x {word}" if low > 0 else ""


def loss_verdict(names: list[str], losses: list[float | None], noise: float = LOSS_NOISE) -> str:
    """The same of losses: their difference."""
    order = ranked(names, losses, highest=False)
    if len(order) < 2:
        return ""
    (best, name), (second, _) = order[:2]
    return f"{name} {second - best:.4f} lower" if second - best > noise else f"equal within {noise}"


def build_table(runs: list[Run], target_loss: float | None) -> list[Row]:
    whole, tenths, percent = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
    rows = []
    # the keys in which the runs differ, and the device and dtype that were in use
    for key in FIELDS:
        values = [run.config.get(key) for run in runs]
        values = ["by the clock" if value == NEVER else value for value in values]
        if len(set(values) - {None}) > 1 and key not in TOLD_ELSEWHERE:
            rows.append(Row(key, f"config/{key}", values, str, "differs"))
    for key in ("device", "dtype"):
        values = [run.start.get(key) for run in runs]
        # nanoGPT's logs do not say which processor
        known = {"cpu" if value in CPUS else value for value in values} - {None}
        rows.append(Row(key, key, values, str, "differs" if len(known) > 1 else ""))
    names = [run.name for run in runs]
    equal_batches = len({run.start.get("tokens_per_iter") for run in runs}) == 1
    for key, label, form, word in (
        ("parameters", "parameters", millions, "larger"),
        ("iterations", "iterations", whole, "more"),
        ("tokens", "tokens", count4, "more"),
        ("hours", "time", time_text, "longer"),
        ("tokens_per_sec", "tok/s", whole, "faster"),
        ("mfu", "MFU", percent, "higher"),
        ("step_ms_p50", "iteration time p50, ms", tenths, "shorter"),
        ("step_ms_p95", "iteration time p95, ms", tenths, "shorter"),
    ):
        values = [figures_of(run)[key] for run in runs]
        result = verdict(names, values, word)
        if key in ("step_ms_p50", "step_ms_p95") and not equal_batches:
            result = "unequal tokens per iteration"
        rows.append(Row(label, key, values, form, result))
    return rows + loss_rows(runs, target_loss)


def figures_of(run: Run) -> dict[str, float | None]:
    """Figures of a run as a whole."""
    return {
        "parameters": run.start.get("parameters"),
        "iterations": run.iterations,
        "tokens": run.tokens,
        "hours": run.hours,
        "tokens_per_sec": percentile(run.step["tokens_per_sec"], 50),
        "mfu": percentile(run.step["mfu"], 50),
        "step_ms_p50": percentile(run.step["step_ms"], 50),
        "step_ms_p95": percentile(run.step["step_ms"], 95),
    }


def loss_rows(runs: list[Run], target_loss: float | None) -> list[Row]:
    """
    Val loss at equal iterations, tokens and time, and the tokens and time to one loss: by default
    the lowest that all runs reach. And the bits per byte, which compare unequal tokenizers.
    """
    names, loss, whole = [run.name for run in runs], "{:.4f}".format, "{:,.0f}".format
    lowest = [percentile(run.eval["val_loss"], 0) for run in runs]
    rows = [Row("best val loss", "best_val_loss", lowest, loss, loss_verdict(names, lowest))]
    if len(runs) > 1:
        for axis, where, form in (
            ("iter", "at iteration {}", whole),
            ("tokens", "at {} tokens", whole),
            ("hours", "after {}", time_text),
        ):
            curves = [learning_curve(run, axis) for run in runs]
            at = common_point(curves)
            if at is not None:
                label = f"val loss {where.format(form(at))}"
                losses = [loss_at(*curve, at) for curve in curves]
                key, result = f"val_loss_at_equal_{axis}", loss_verdict(names, losses)
                rows.append(Row(label, key, losses, loss, result))
    if target_loss is None and len(runs) > 1:
        target_loss = max([best for best in lowest if best is not None], default=None)
    if target_loss is not None:
        for axis, what, form in (("tokens", "tokens", count4), ("hours", "time", time_text)):
            label = f"{what} to val loss {target_loss:.4f}"
            reached = [reach(*learning_curve(run, axis), target_loss) for run in runs]
            result = verdict(names, reached, "less", SAME_TO_LOSS)
            rows.append(Row(label, f"{axis}_to_loss", reached, form, result))
    if why_not_comparable(runs):
        rows = [replace(row, verdict="not comparable") for row in rows]
    bits = [percentile(run.eval["bits_per_byte"], 0) for run in runs]
    # where the losses decide, no second verdict beside theirs
    result = loss_verdict(names, bits, BITS_NOISE) if unequal_tokenizers(runs) else ""
    row = Row("best bits per byte", "best_bits_per_byte", bits, loss, result)
    return [*rows, row] if any(bits) else rows


def why_not_comparable(runs: list[Run]) -> str:
    """Why the losses of these runs do not compare; empty where they do."""
    if unequal_tokenizers(runs):
        named = ", ".join(f"{run.name}: {run.start.get('tokenizer')!s:.13}" for run in runs)
        return f"unequal tokenizers ({named}); bits per byte do, on the same text"
    if len({run.config.get("dataset") for run in runs} - {None}) > 1:
        return "unequal datasets"
    # nanoGPT draws its tokens from the whole split
    fixed = [run.config for run in runs if run.config.get("eval_tokens") is not None]
    return "unequal tokens evaluated" if len({saved_config(c).eval_size for c in fixed}) > 1 else ""


def unequal_tokenizers(runs: list[Run]) -> bool:
    return len({run.start.get("tokenizer") for run in runs} - {None, "unknown"}) > 1


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
        print("a loss is n/a where no evaluation is near enough or recorded: docs/compare.md")


# -----------------------------------------------------------------------------
# Runs


def open_run(path: Path, gpu: str | None) -> Run:
    """
    A run from its folder, its metrics.jsonl, or a file with nanoGPT's output. Raises UserError.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a file with nanoGPT's output"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = read_run(file) if file.suffix == ".jsonl" else read_nanogpt_log(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: no iteration and no evaluation in it; {hint}")
    on_a_card = run.config.get("device") not in (None, "cpu", "mps")
    if gpu and on_a_card and not np.isfinite(run.step["mfu"]).any():
        set_mfu(run, gpu)
    return run


def set_mfu(run: Run, gpu: str) -> None:
    """
    Set the MFU of each step record, a fraction, for this card. Raises UserError if the card or its
    peak is not known.
    """
    row, dtype = resolve_gpu(gpu), run.start.get("dtype")
    peak = row_peak(row, dtype, run.config.get("tf32", True)) if dtype else math.nan
    if peak is None:
        raise UserError(f"gpu: the {dtype} peak of {gpu} is not certain; leave out --gpu")
    # tok/s are those of all cards together, MFU is that of one
    flops = number(run.start.get("flops_per_token")) / run.start.get("world_size", 1)
    run.step["mfu"] = flops * run.step["tokens_per_sec"] / (peak * 1e12)
    run.start["device"] = run.start.get("device") or row["name"].partition("|")[0]


def open_runs(paths: list[Path], gpu: str | None) -> list[Run]:
    runs = [open_run(path, gpu) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    name_settings(runs)
    return runs


def name_settings(runs: list[Run]) -> None:
    """
    Call datasets by their folders' names, the same tokens by one name: nanoGPT's shakespeare_char
    is ../nanoGPT/data/shakespeare_char here. And leave to the clock what it decides.
    """
    names: dict[str, str] = {}
    for run in runs:
        c = run.config
        if "dataset" in c:
            name = Path(c["dataset"]).name
            c["dataset"] = names.setdefault(run.start.get("data_fingerprint") or name, name)
        # by the clock a warm-up takes a tenth of the run at most
        if (c.get("hours") or c.get("until")) and 10 * c["warmup_iters"] > (run.iterations or 0):
            c["warmup_iters"] = NEVER


def collect_warnings(runs: list[Run]) -> list[str]:
    """What has to be known to read the table right."""
    warnings = [warning for run in runs for warning in run.warnings]
    if reason := why_not_comparable(runs):
        warnings.append(f"losses do not compare: {reason}")
    theirs = [run for run in runs if run.start.get("program") == "nanoGPT"]
    for run in runs:
        for other in theirs if run not in theirs and (run.iterations or 0) < SHORT_RUN else []:
            if flags := flags_to_equal(run, other):
                moves = "without, a short run's loss is some hundredths off"
                warnings.append(f"{run.name}: {flags} trains as nanoGPT's {other.name}; {moves}")
    return warnings


def flags_to_equal(run: Run, other: Run) -> str:
    """The flags that give `run` the padding and the dtype of `other`; empty where it has them."""
    flags = []
    for key in ("pad_vocab_multiple", "dtype"):
        # what a start says of itself was in use, whatever the configuration asked for
        ours, theirs = (r.start.get(key) or r.config.get(key) for r in (run, other))
        if ours and theirs and ours != theirs:
            flags.append(f"--{key}={theirs}")
    return " ".join(flags)


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
    runs = open_runs(paths, args.gpu)
    names = [run.name for run in runs]
    rows = build_table(runs, args.loss)
    warnings = collect_warnings(runs)
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
