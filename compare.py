"""
Pictures and tables of runs: which was faster, which learnt more, at equal iterations, tokens and hours.

    python compare.py out/gpt124m                       one run: its figures, and its picture in out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png          side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070        also nanoGPT's console output, with MFU on the card it ran on

Hours are those of iterations, evaluations and checkpoints: start-up and compilation are left out.
"""

import argparse
import ast
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import FIELDS
from errors import UserError, run_main

PICTURE_POINTS = 600  # a line in a picture is drawn through at most this many means
COLORS = BLUE, RED, GREEN, *_, GREY = "#4c78a8", "#e4572e", "#54a24b", "#b279a2", "#d6a000", "#17a2a2", "#7f5f3f", "#777777"
LOSS_NOISE = 0.005  # about twice the spread over seeds of a 124M model's loss: a smaller difference decides nothing
NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
NANOGPT_DEFAULTS = dict(device="cuda", dtype="bfloat16", lr_decay_iters=600000)  # where this program's differ

# -----------------------------------------------------------------------------
# Reading a run


@dataclass
class RunRecords:
    """
    One run: `start` says what was trained on what (config, parameters, device, tokens_per_iter, ...; keys may be missing).
    The rest are its records as columns, arrays of equal length per kind, NaN where a value is not known. In `step`,
    `iters` is how many iterations a record stands for, `seconds` what they took. `tokens` are those trained on before the
    record's iteration, `hours` those spent until the evaluation was done.
    """

    name: str
    start: dict
    step: dict[str, np.ndarray]
    eval: dict[str, np.ndarray]
    checkpoint: dict[str, np.ndarray]
    warnings: list[str]


COLUMNS = dict(
    step=("iter", "tokens", "loss", "step_ms", "tokens_per_sec", "mfu"),
    eval=("iter", "train_loss", "val_loss", "seconds"),
    checkpoint=("iter", "seconds"),
)
STEP_LINE = '{"kind": "step"'


def read_run(path: Path, gpu: str | None) -> RunRecords:
    """A run from its folder, its metrics.jsonl, or nanoGPT's console output in a file. Raises UserError."""
    if path.is_dir() and not (path / "metrics.jsonl").is_file():
        raise UserError(f"{path}: holds no metrics.jsonl; give the out_dir of a run, or a file with nanoGPT's output")
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = read_metrics(file) if file.suffix == ".jsonl" else read_nanogpt_log(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the out_dir of a run, or a file with nanoGPT's output") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: no iteration and no evaluation in it; give the out_dir of a run, or nanoGPT's output")
    if gpu and not np.isfinite(run.step["mfu"]).any():
        run.step["mfu"] = mfu_on(gpu, run)
    return run


def read_metrics(path: Path, most_steps: int | None = None) -> RunRecords:
    """
    metrics.jsonl of one run. A torn last line (a killed run) and lines that are no records are passed over. Of more
    than `most_steps` step records, evenly spread ones are read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if most_steps and len(lines) > most_steps:
        steps = [line for line in lines if line.startswith(STEP_LINE)]
        lines = [line for line in lines if not line.startswith(STEP_LINE)] + steps[:: -(-len(steps) // most_steps)]
    try:
        records = json.loads(f"[{','.join(lines)}]")  # at once: three times as fast as line by line
    except ValueError:
        records = [record for line in lines for record in parse_line(line)]
    records = [record for record in records if isinstance(record, dict)]
    start = next((record for record in records if record.get("kind") == "start"), {})
    run = tabulate(path.resolve().parent.name, start, records)
    if text and not text.endswith("\n"):
        run.warnings.append(f"{path}: its last line is cut short (the run was killed); read without it")
    return run


def parse_line(line: str) -> list:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def tabulate(name: str, start: dict, records: list[dict]) -> RunRecords:
    """Records, in the order of their iterations, as columns."""
    columns = {}
    for kind, names in COLUMNS.items():
        of_kind = [record for record in records if record.get("kind") == kind]
        columns[kind] = {name: np.array([as_number(r.get(name)) for r in of_kind], dtype=float) for name in names}
    run = RunRecords(name, start, **columns, warnings=[])
    step, tokens_per_iter = run.step, as_number(start.get("tokens_per_iter"))
    step["iters"] = np.diff(step["iter"], prepend=as_number(start.get("iter"), 0) - 1)
    step["seconds"] = step["iters"] * np.where(np.isfinite(step["step_ms"]), step["step_ms"], median(step["step_ms"])) / 1e3
    for kind in (run.eval, run.checkpoint):
        # not N * tokens_per_iter: a resume may have changed the batch
        kind["tokens"] = carry_on(kind["iter"], step["iter"], step["tokens"], tokens_per_iter)
    seconds = carry_on(run.eval["iter"], step["iter"] + 1, np.cumsum(step["seconds"]), median(step["step_ms"]) / 1e3)
    seconds += np.cumsum(np.nan_to_num(run.eval["seconds"]))
    saved_before = np.searchsorted(run.checkpoint["iter"], run.eval["iter"])
    run.eval["hours"] = (seconds + np.append(0, np.cumsum(np.nan_to_num(run.checkpoint["seconds"])))[saved_before]) / 3600
    return run


def as_number(value, otherwise: float = math.nan) -> float:
    return value if isinstance(value, int | float) else otherwise


def median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def carry_on(x: np.ndarray, known_x: np.ndarray, known_y: np.ndarray, slope: float) -> np.ndarray:
    """y at x, from (0, 0) through the known points by straight lines, beyond the last of them at `slope`."""
    known_x, known_y = np.append(0, known_x), np.append(0, known_y)
    return np.where(x > known_x[-1], known_y[-1] + (x - known_x[-1]) * slope, np.interp(x, known_x, known_y))


# -----------------------------------------------------------------------------
# nanoGPT's console output

ITER_LINE = re.compile(r"iter (\d+): loss (\S+), time ([\d.]+)ms, mfu (-?[\d.]+)%")
STEP_LINE_NANOGPT = re.compile(r"step (\d+): train loss (\S+), val loss ([^\s,]+)")
CONFIG_LINE = re.compile(r"(?:Overriding: )?(\w+) = ([^#]+)(?:#.*)?")


def read_nanogpt_log(path: Path) -> RunRecords:
    """
    What nanoGPT prints, or the part of it that was kept. Its iteration times hold evaluation and checkpoint where there
    was one: there, what exceeds the median is booked as evaluation. Its MFU is relative to an A100, so it is not taken
    over; the model's FLOPs per token come from what is printed of its configuration, else from that MFU.
    """
    evals, checkpoints, iters, config, numbers = {}, {}, {}, {}, {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if ", tok/s " in line:
            raise UserError(f"{path}: this is train.py's console output; give its out_dir, whose metrics.jsonl says more")
        if match := ITER_LINE.match(line):
            it, loss, ms, mfu = int(match[1]), *map(to_float, match.groups()[1:])
            iters[it] = dict(kind="step", iter=it, loss=loss, step_ms=ms, printed_mfu=mfu / 100 if mfu > 0 else math.nan)
        elif match := STEP_LINE_NANOGPT.match(line):
            it = int(match[1])
            evals[it] = dict(kind="eval", iter=it, train_loss=to_float(match[2]), val_loss=to_float(match[3]))
        elif line.startswith("saving checkpoint to") and evals:
            checkpoints[max(evals)] = dict(kind="checkpoint", iter=max(evals))
        elif match := re.search(r"tokens per iteration will be: ([\d,]+)", line):
            numbers["tokens_per_iter"] = int(match[1].replace(",", ""))
        elif match := re.search(r"number of parameters: ([\d.]+)M", line):  # position embeddings left out
            numbers["matmul_parameters"] = round(float(match[1]) * 1e6)
        elif (match := CONFIG_LINE.fullmatch(line)) and match[1] in FIELDS:
            config[match[1]] = constant(match[2].strip())
    tidy_times(iters, evals)
    start = describe_nanogpt_run(config, numbers, list(iters.values()))
    for record in iters.values():
        record["tokens"] = record["iter"] * numbers.get("tokens_per_iter", math.nan)
        record["tokens_per_sec"] = numbers.get("tokens_per_iter", math.nan) / record["step_ms"] * 1e3
    records = [*iters.values(), *evals.values(), *checkpoints.values()]
    run = tabulate(path.stem, start, sorted(records, key=lambda record: record["iter"]))
    if "tokens_per_iter" not in numbers:
        run.warnings.append(f"{path}: no 'tokens per iteration will be: N' in it, so no tok/s; add that line to the file")
    return run


def tidy_times(iters: dict[int, dict], evals: dict[int, dict]) -> None:
    """Take evaluation, checkpoint and, in the first iteration, compilation out of the iterations' times."""
    usual = median(np.array([record["step_ms"] for it, record in iters.items() if it not in evals and it > 0]))
    for it in iters.keys() & (evals.keys() | {0}):
        if it > 0 and math.isfinite(usual):
            evals[it]["seconds"] = max(0.0, iters[it]["step_ms"] - usual) / 1e3
        iters[it]["step_ms"] = math.nan


def describe_nanogpt_run(config: dict, numbers: dict, iters: list[dict]) -> dict:
    """What a start record would say. flops_per_token is one card's share, as its MFU is, where tokens are those of all."""
    start = dict(numbers)
    mfu, step_ms = (median(np.array([it[name] for it in iters])) for name in ("printed_mfu", "step_ms"))
    per_card = mfu * NANOGPT_PEAK_FLOPS * step_ms / 1e3 / numbers.get("tokens_per_iter", math.nan)
    start["flops_per_token"] = per_card  # only roughly: a running mean that evaluations pull down
    if config:
        defaults = {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS
        start["config"] = config = defaults | config
        start["dtype"] = config["dtype"]
    if config and "matmul_parameters" in numbers:
        n = numbers["matmul_parameters"]
        L, C, T = (as_number(config[name]) for name in ("n_layer", "n_embd", "block_size"))
        flops_per_token = 6 * n + 12 * L * C * T
        cards = flops_per_token / per_card
        start["parameters"] = n + T * C
        start["flops_per_token"] = flops_per_token / (max(1, round(cards)) if math.isfinite(cards) else 1)
    return start


def to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def constant(text: str):
    """The value on a line of a printed config file; `5 * 8` is the one kind of formula in use there."""
    try:
        factors = [ast.literal_eval(factor.strip()) for factor in text.split("*")]
        return math.prod(factors) if len(factors) > 1 else factors[0]
    except (ValueError, SyntaxError, TypeError):
        return text


def mfu_on(gpu: str, run: RunRecords) -> np.ndarray:
    """MFU of each step record, a fraction, had it run on this card. Raises UserError where the card is not known."""
    import torch  # seconds, for these runs alone

    import gpus

    dtype = run.start.get("dtype", "bfloat16")
    tf32 = run.start.get("config", {}).get("tf32", True)
    row = gpus.resolve_gpu(gpu)
    run.start.setdefault("device", row["name"].partition("|")[0])
    peak = gpus.row_peak(row, getattr(torch, str(dtype), torch.bfloat16), tf32)
    if peak is None:
        raise UserError(f"gpu: gpus.csv has no certain {dtype} peak for {gpu}; leave --gpu away")
    return run.start.get("flops_per_token", math.nan) * run.step["tokens_per_sec"] / (peak * 1e12)


# -----------------------------------------------------------------------------
# Side by side


@dataclass
class Row:
    """One line of the table: a value per run (None: not known), how it reads, and which run it speaks for."""

    key: str
    label: str
    values: list
    texts: list[str]
    verdict: str


def build_row(runs: list[RunRecords], key: str, label: str, values: list, form: Callable, verdict: Callable | None) -> Row:
    """The row of one value per run; `verdict` is asked where at least two runs know theirs."""
    values = [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    known = [(v, run.name) for v, run in zip(values, runs) if v is not None]
    texts = ["n/a" if v is None else form(v) for v in values]
    return Row(key, label, values, texts, verdict(known) if verdict and len(known) > 1 else "")


def build_table(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    equal_work = len({as_number(run.start.get("tokens_per_iter"), 0) for run in runs}) == 1
    shorter = ratio("shorter", lower=True) if equal_work else lambda known: "unequal tokens per iteration"
    rows = [build_row(runs, f"config/{key}", key, [config_of(run).get(key) for run in runs], str, lambda known: "differs")
            for key in differing_keys(runs)]  # fmt: skip
    figures = [figures_of(run) for run in runs]
    for key, label, form, verdict in (
        ("device", "device", str, None),
        ("dtype", "dtype", str, None),
        ("parameters", "parameters", short_count, ratio("larger")),
        ("iterations", "iterations", "{:,.0f}".format, ratio("more")),
        ("tokens", "tokens", short_count, ratio("more")),
        ("hours", "hours", "{:.2f}".format, ratio("longer")),
        ("tokens_per_sec", "tok/s", "{:,.0f}".format, ratio("faster")),
        ("mfu", "MFU", "{:.1%}".format, difference("{:.1%} of the peak higher", noise=5e-4)),
        ("step_ms_p50", "iteration time p50, ms", "{:,.1f}".format, shorter),
        ("step_ms_p95", "iteration time p95, ms", "{:,.1f}".format, shorter),
        ("pause_share", "evaluations and checkpoints", "{:.1%} of time".format, difference("{:.1%} of time less", True, 5e-4)),
    ):
        rows.append(build_row(runs, key, label, [of_run[key] for of_run in figures], form, verdict))
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[RunRecords], target_loss: float | None) -> list[Row]:
    """Val loss at equal iterations, tokens and hours, and the tokens and hours to one loss: one that all runs reach."""
    lower, less = difference("{:.4f} lower", lower=True, noise=LOSS_NOISE), ratio("less", lower=True)
    if len({config_of(run).get("dataset") for run in runs if config_of(run)}) > 1:
        lower = less = lambda known: "not comparable: unequal datasets"
    best = [float(np.min(run.eval["val_loss"], initial=math.inf, where=np.isfinite(run.eval["val_loss"]))) for run in runs]
    rows = [build_row(runs, "best_val_loss", "best val loss", best, "{:.4f}".format, lower)]
    if len(runs) > 1:
        for axis, form in (("iter", "iteration {:,.0f}".format), ("tokens", lambda x: f"{short_count(x)} tokens"),
                           ("hours", "{:.2f} hours".format)):  # fmt: skip
            x = last_common_evaluation(runs, axis)
            losses = [loss_at(run, axis, x) for run in runs]
            rows.append(build_row(runs, f"val_loss_at_equal_{axis}", f"val loss at {form(x)}", losses, "{:.4f}".format, lower))
        target_loss = max(best) if target_loss is None else target_loss
    if target_loss is not None:
        for axis, form in (("tokens", short_count), ("hours", "{:.2f}".format)):
            reached = [reach(run, axis, target_loss) for run in runs]
            rows.append(build_row(runs, f"{axis}_to_loss", f"{axis} to val loss {target_loss:.4f}", reached, form, less))
    return rows


def config_of(run: RunRecords) -> dict:
    config = run.start.get("config")
    return config if isinstance(config, dict) else {}


def differing_keys(runs: list[RunRecords]) -> list[str]:
    """The config keys, in their order of definition, on which the runs that know them disagree."""
    keys = [key for key in FIELDS if key not in ("out_dir", "overwrite", "wandb_run_name")]
    return [key for key in keys if len({repr(config_of(run)[key]) for run in runs if key in config_of(run)}) > 1]


def figures_of(run: RunRecords) -> dict:
    """What can be said of a run as a whole; means are over time, so that tok/s is tokens per time."""
    step, start, timed = run.step, run.start, np.isfinite(run.step["step_ms"])
    seconds, pauses = np.sum(step["seconds"]), np.nansum(run.eval["seconds"]) + np.nansum(run.checkpoint["seconds"])
    figures = dict(device=start.get("device"), dtype=start.get("dtype"), parameters=as_number(start.get("parameters")))
    figures["hours"], figures["pause_share"] = (seconds + pauses) / 3600, pauses / (seconds + pauses) if seconds else math.nan
    for key, name, per_iter in (("iterations", "iter", 1), ("tokens", "tokens", as_number(start.get("tokens_per_iter")))):
        figures[key] = max([value + per_iter for value in step[name][-1:]] + run.eval[name][-1:].tolist())
    for name in ("tokens_per_sec", "mfu"):
        known = timed & np.isfinite(step[name]) & (step["seconds"] > 0)
        figures[name] = np.average(step[name][known], weights=step["seconds"][known]) if known.any() else math.nan
    for key, q in (("step_ms_p50", 50), ("step_ms_p95", 95)):
        figures[key] = np.percentile(step["step_ms"][timed], q) if timed.any() else math.nan
    return {key: float(value) if isinstance(value, np.floating) else value for key, value in figures.items()}


def last_common_evaluation(runs: list[RunRecords], axis: str) -> float:
    """The last point that all runs got to; an iteration that all have evaluated, where there is one after the start."""
    points = [run.eval[axis][np.isfinite(run.eval["val_loss"])] for run in runs]
    common = set.intersection(*(set(p[p > 0].tolist()) for p in points)) if axis == "iter" else ()
    return max(common) if common else min(float(np.max(p, initial=0)) for p in points)


def loss_at(run: RunRecords, axis: str, x: float) -> float:
    """The val loss at x, between evaluations by a straight line; NaN before the first."""
    known = np.isfinite(run.eval["val_loss"]) & np.isfinite(run.eval[axis])
    return float(np.interp(x, run.eval[axis][known], run.eval["val_loss"][known], left=math.nan)) if known.any() else math.nan


def reach(run: RunRecords, axis: str, loss: float) -> float:
    """Where on the axis the val loss first comes down to `loss`, between evaluations by a straight line; NaN: never."""
    x, losses = run.eval[axis], run.eval["val_loss"]
    i = next(iter(np.flatnonzero(losses <= loss)), None)
    if i is None or i == 0:
        return math.nan if i is None else float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (losses[i - 1] - loss) / (losses[i - 1] - losses[i]))


def ratio(word: str, lower: bool = False) -> Callable:
    """A verdict such as "a 2.39x faster": the best against the next best."""

    def verdict(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        low, high = sorted((best, second))
        return "equal" if high < 1.005 * low else f"{name} {high / low:.2f}x {word}" if low > 0 else ""

    return verdict


def difference(form: str, lower: bool = False, noise: float = 0.0) -> Callable:
    """A verdict such as "b 0.0134 lower": the best against the next best, if they differ by more than `noise`."""

    def verdict(known: list[tuple[float, str]]) -> str:
        (best, name), (second, _) = sorted(known, reverse=not lower)[:2]
        return f"{name} {form.format(abs(best - second))}" if abs(best - second) > noise else f"equal within {noise}"

    return verdict


def short_count(number: float) -> str:
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e9:,.2f}B" if number >= 1e10 else f"{number / 1e6:,.2f}M"


def find_warnings(runs: list[RunRecords]) -> list[str]:
    """What stands in the way of comparing these runs."""
    warnings = [warning for run in runs for warning in run.warnings]
    for what, value, consequence in (
        ("datasets", lambda config: config.get("dataset"), "losses are not comparable"),
        ("evaluation tokens", evaluation_tokens, "small differences in val loss say little"),
    ):
        values = {run.name: value(config_of(run)) for run in runs if config_of(run)}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in values.items())
            warnings.append(f"unequal {what} ({listed}), so {consequence}")
    return warnings


def evaluation_tokens(config: dict) -> int:
    factors = [as_number(config.get(name), 0) for name in ("eval_iters", "batch_size", "block_size")]
    return int(config.get("eval_tokens") or math.prod(factors))


def print_table(rows: list[Row], runs: list[RunRecords]) -> None:
    cells = [["", *(run.name for run in runs), ""], *([row.label, *row.texts, row.verdict] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:-1], widths[1:])), line[-1]]).rstrip())
    if len(runs) > 1:
        print("Between two evaluations, losses, tokens and hours are those on the straight line from one to the other.")


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


def save_picture(figure, path: Path) -> None:
    """Write the figure as a PNG, all or nothing."""
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)


def picture_of_run(run: RunRecords):
    """Losses over tokens, evaluations and checkpoints marked, and below them tok/s with MFU on the right-hand axis."""
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure and may look for a screen

    figure = Figure(figsize=(9, 6), facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    figure.subplots_adjust(left=0.085, right=0.915, top=0.92, bottom=0.09, hspace=0.08)
    step, evals, saved = run.step, run.eval, run.checkpoint
    draw_band(top, step["tokens"], step["loss"], BLUE, "train loss, every log line")
    dots = dict(marker="o", markersize=4 if len(evals["iter"]) < 80 else 2)
    top.plot(evals["tokens"], evals["train_loss"], color=BLUE, linewidth=0, **dots, label="train loss, evaluated")
    top.plot(evals["tokens"], evals["val_loss"], color=RED, linewidth=1.6, **dots, label="val loss, evaluated")
    top.plot(saved["tokens"], np.full(len(saved["iter"]), 0.02), color=GREY, linewidth=0, marker="|", markersize=7,
             transform=top.get_xaxis_transform(), label="checkpoint")  # fmt: skip
    limit_to_settled(top, [run])
    top.legend(frameon=False, loc="upper right")
    draw_band(bottom, step["tokens"], step["tokens_per_sec"], GREEN)
    finish(top, "", "loss, nats per token")
    finish(bottom, "tokens", "tok/s", from_zero=True)
    known = (step["mfu"] > 0) & (step["tokens_per_sec"] > 0)
    if known.any():  # MFU and tok/s are proportional, so one line serves two axes
        right = bottom.twinx()
        right.set_ylim(0, bottom.get_ylim()[1] * np.median(100 * step["mfu"][known] / step["tokens_per_sec"][known]))
        right.set_ylabel("MFU, %")
        right.spines[["top", "left"]].set_visible(False)
    else:
        bottom.set_title("MFU n/a: the device's peak is unknown", fontsize=8, loc="right", color=GREY, y=0.02)
    parts = [run.name]
    if as_number(run.start.get("parameters")) > 0:
        parts.append(f"{short_count(run.start['parameters'])} parameters")
    parts += [str(run.start[name]) for name in ("device", "dtype") if run.start.get(name)]
    parts += [f"val loss {loss:.4f} at iter {it:.0f}" for loss, it in zip(evals["val_loss"][-1:], evals["iter"][-1:])]
    figure.suptitle("   |   ".join(parts), fontsize=10, x=0.085, ha="left")
    return figure


def picture_of_runs(runs: list[RunRecords]):
    """Val and train loss over tokens, val loss over hours, tok/s and MFU over tokens; one colour a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), facecolor="white")
    (losses, hours), (speed, mfu) = figure.subplots(2, 2, height_ratios=(5, 3))
    figure.subplots_adjust(left=0.065, right=0.985, top=0.95, bottom=0.075, hspace=0.26, wspace=0.13)
    for run, color in zip(runs, itertools.cycle(COLORS)):
        step, evals = run.step, run.eval
        losses.plot(*thin_out(step["tokens"], step["loss"])[:2], color=color, linewidth=0.8, alpha=0.4)
        style = dict(color=color, linewidth=1.6, marker="o", markersize=4 if len(evals["iter"]) < 80 else 2, label=run.name)
        losses.plot(evals["tokens"], evals["val_loss"], **style)
        hours.plot(evals["hours"], evals["val_loss"], **style)
        draw_band(speed, step["tokens"], step["tokens_per_sec"], color)
        draw_band(mfu, step["tokens"], 100 * step["mfu"], color)
    finish(losses, "tokens", "loss, nats per token", "val loss (dots) and train loss (thin)")
    finish(hours, "hours of iterations, evaluations and checkpoints", "loss, nats per token", "val loss over time")
    finish(speed, "tokens", "tok/s", "speed", from_zero=True)
    finish(mfu, "tokens", "MFU, %", "model FLOPs utilisation", from_zero=True)
    for axes in (losses, hours):
        limit_to_settled(axes, runs)
    losses.legend(frameon=False, loc="upper right")
    return figure


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
        axes.xaxis.set_major_formatter(tick_label)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(tick_label)


def tick_label(x: float, position: int) -> str:
    """5e8 -> 500M"""
    return next((f"{x / size:g}{unit}" for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if x >= size), f"{x:g}")


def limit_to_settled(axes, runs: list[RunRecords]) -> None:
    """Fit the loss axis to what follows the first 2 % of a run of some length: the drop from ln V would flatten the rest."""
    losses = []
    for run in runs:
        last = max(np.max(kind["iter"], initial=0) for kind in (run.step, run.eval))
        first = 0.02 * last if len(run.step["iter"]) > 20 else 0
        for kind, name in ((run.step, "loss"), (run.eval, "train_loss"), (run.eval, "val_loss")):
            losses += kind[name][(kind["iter"] >= first) & np.isfinite(kind[name])].tolist()
    if losses:
        margin = 0.05 * (max(losses) - min(losses)) or 0.1
        axes.set_ylim(min(losses) - 2 * margin, max(losses) + margin)


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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="One run's figures and picture, or several side by side.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="out_dir of a run, or a file with nanoGPT's output")
    parser.add_argument("--loss", type=float, help="compare the tokens and hours to this val loss; default: one that all reach")
    parser.add_argument("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    parser.add_argument("--png", type=Path, help="write the picture here; one run alone: loss.png in its folder")
    parser.add_argument("--json", type=Path, help="write the table here")
    args = parser.parse_args(argv)
    runs, png = read_runs(args.runs, args.gpu), args.png
    rows, warnings = build_table(runs, args.loss), find_warnings(runs)
    print_table(rows, runs)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if len(runs) == 1 and not png:
        png = args.runs[0] / "loss.png" if args.runs[0].is_dir() else args.runs[0].with_suffix(".png")
    values = {run.name: {row.key: row.values[i] for row in rows} for i, run in enumerate(runs)}
    table = dict(runs=values, verdicts={row.key: row.verdict for row in rows if row.verdict}, warnings=warnings)
    try:
        if png:
            save_picture(picture_of_run(runs[0]) if len(runs) == 1 else picture_of_runs(runs), png)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); choose another --png or --json") from None


if __name__ == "__main__":
    run_main(main)
