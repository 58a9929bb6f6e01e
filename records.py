"""
What a run left behind, read for comparing: this program's metrics.jsonl, or what nanoGPT printed.
"""

import contextlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configurator import FIELDS, parse, set_value
from errors import UserError

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
NANOGPT_DEFAULTS = dict(device="cuda", dtype="bfloat16", lr_decay_iters=600000)  # where this program's differ


@dataclass
class RunRecords:
    """
    One run: what its last start record says (numbers are NaN, texts None, keys missing from `config` where not known),
    and its records as columns: arrays of equal length per kind, ordered by iteration, NaN where a value is not known.
    In `step`, `iters` is how many iterations a record stands for, `seconds` what they took; `tokens` are those trained
    on before the record's iteration, `hours` those spent until the evaluation was done.
    """

    name: str
    config: dict
    device: str | None
    dtype: str | None
    parameters: float
    tokens_per_iter: float
    flops_per_token: float
    step: dict[str, np.ndarray]
    eval: dict[str, np.ndarray]
    checkpoint: dict[str, np.ndarray]
    warnings: list[str] = field(default_factory=list)


COLUMNS = dict(
    step=("iter", "tokens", "loss", "step_ms", "tokens_per_sec", "mfu"),
    eval=("iter", "train_loss", "val_loss", "seconds"),
    checkpoint=("iter", "seconds"),
)
STEP_LINE = '{"kind": "step"'


def read_run(path: Path, gpu: str | None) -> RunRecords:
    """A run from its folder, its metrics.jsonl, or nanoGPT's console output in a file. Raises UserError."""
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
    run = tabulate(path.resolve().parent.name, read_records(lines))
    if text and not text.endswith("\n"):
        run.warnings.append(f"{path}: its last line is cut short (the run was killed); read without it")
    return run


def read_records(lines: list[str]) -> list[dict]:
    """The records of metrics.jsonl's lines, without what is none."""
    try:
        records = json.loads(f"[{','.join(lines)}]")  # at once: three times as fast as line by line
    except (ValueError, RecursionError):
        records = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def tabulate(name: str, records: list[dict]) -> RunRecords:
    """Records as columns; what is not as this program writes it counts as not known."""
    starts = [record for record in records if record.get("kind") == "start"] or [{}]
    config, last = {}, starts[-1]  # a resume may have changed what the first one said
    for key, value in last["config"].items() if isinstance(last.get("config"), dict) else ():
        if key in FIELDS:
            set_value(config, key, value, "", [])
    device, dtype = (last[key] if isinstance(last.get(key), str) else None for key in ("device", "dtype"))
    numbers = {key: as_number(last.get(key)) for key in ("parameters", "tokens_per_iter", "flops_per_token")}
    if as_number(last.get("world_size")) > 1:  # tokens/s are those of all cards together, MFU is one's
        numbers["flops_per_token"] /= last["world_size"]
    run = RunRecords(name, config, device, dtype, **numbers, **{kind: columns(records, kind) for kind in COLUMNS})
    first_iter = as_number(starts[0].get("iter"))
    add_totals(run, first_iter if first_iter >= 0 else 0)
    return run


def columns(records: list[dict], kind: str) -> dict[str, np.ndarray]:
    rows = [record for record in records if record.get("kind") == kind]
    table = {name: np.array([as_number(row.get(name)) for row in rows], dtype=float) for name in COLUMNS[kind]}
    order = np.argsort(table["iter"], kind="stable")
    order = order[np.isfinite(table["iter"][order])]
    return {name: column[order] for name, column in table.items()}


def add_totals(run: RunRecords, first_iter: float = 0) -> None:
    """Add the columns that sum up others: iters and seconds of steps, tokens and hours of evaluations."""
    step = run.step
    step["iters"] = np.diff(step["iter"], prepend=first_iter - 1)
    step["seconds"] = step["iters"] * np.where(np.isfinite(step["step_ms"]), step["step_ms"], median(step["step_ms"])) / 1e3
    for kind in (run.eval, run.checkpoint):
        # not N * tokens_per_iter: a resume may have changed the batch
        kind["tokens"] = carry_on(kind["iter"], step["iter"], step["tokens"], run.tokens_per_iter)
    seconds = carry_on(run.eval["iter"], step["iter"] + 1, np.cumsum(step["seconds"]), median(step["step_ms"]) / 1e3)
    seconds += np.cumsum(np.nan_to_num(run.eval["seconds"]))
    saved_before = np.searchsorted(run.checkpoint["iter"], run.eval["iter"])
    run.eval["hours"] = (seconds + np.append(0, np.cumsum(np.nan_to_num(run.checkpoint["seconds"])))[saved_before]) / 3600


def as_number(value) -> float:
    """A record's value or a log's text as a float, NaN where it is none or beyond anything that is counted here."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 1e30 else math.nan


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
EVAL_LINE = re.compile(r"step (\d+): train loss (\S+), val loss ([^\s,]+)")
TOKENS_LINE = re.compile(r"tokens per iteration will be: ([\d,]+)")
PARAMETERS_LINE = re.compile(r"number of parameters: ([\d.]+)M")  # position embeddings left out
CONFIG_LINE = re.compile(r"(?:Overriding: )?(\w+) = ([^#]+)(?:#.*)?")
PRODUCT = re.compile(r"(\d{1,9}) ?\* ?(\d{1,9})")  # the one kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> RunRecords:
    """
    What nanoGPT prints, or the part of it that was kept. Its iteration times hold evaluation and checkpoint where there
    was one: there, what exceeds the median is booked as evaluation. Its MFU is relative to an A100, so it is not taken
    over; the model's FLOPs per token come from what is printed of its configuration, else from that MFU.
    """
    steps, evals, saved, config, start = {}, {}, {}, {}, dict(kind="start")
    matmul_parameters = math.nan
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if ", tok/s " in line:
            raise UserError(f"{path}: this is train.py's console output; give its out_dir, whose metrics.jsonl says more")
        if match := ITER_LINE.match(line):
            steps[match[1]] = dict(kind="step", iter=match[1], loss=match[2], step_ms=match[3], mfu=match[4])
        elif match := EVAL_LINE.match(line):
            evals[match[1]] = dict(kind="eval", iter=match[1], train_loss=match[2], val_loss=match[3])
        elif line.startswith("saving checkpoint to") and evals:
            last = list(evals)[-1]
            saved[last] = dict(kind="checkpoint", iter=last)
        elif match := TOKENS_LINE.search(line):
            start["tokens_per_iter"] = match[1].replace(",", "")
        elif match := PARAMETERS_LINE.search(line):
            matmul_parameters = 1e6 * as_number(match[1])
        elif (match := CONFIG_LINE.fullmatch(line)) and match[1] in FIELDS:
            text = match[2].strip().strip("'\"")
            product = PRODUCT.fullmatch(text)
            config[match[1]] = int(product[1]) * int(product[2]) if product else parse(text, FIELDS[match[1]].type)
    if config:
        start["config"] = {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS | config
        start["dtype"] = start["config"]["dtype"]
    run = tabulate(path.stem, [start, *steps.values(), *evals.values(), *saved.values()])
    complete_nanogpt_run(run, matmul_parameters)
    if not math.isfinite(run.tokens_per_iter):
        run.warnings.append(f"{path}: no 'tokens per iteration will be: N' in it, so no tok/s; add that line to the file")
    return run


def complete_nanogpt_run(run: RunRecords, matmul_parameters: float) -> None:
    """Tell iterations from evaluations, and work out what nanoGPT does not print."""
    step, config = run.step, run.config
    evaluated = np.isin(step["iter"], run.eval["iter"])
    usual = median(step["step_ms"][~evaluated & (step["iter"] > 0)])
    excess = dict(zip(step["iter"], np.maximum(0, step["step_ms"] - usual) / 1e3))
    run.eval["seconds"] = np.array([excess.get(it, math.nan) if it > 0 else math.nan for it in run.eval["iter"]], dtype=float)
    step["step_ms"][evaluated | (step["iter"] == 0)] = math.nan  # the first one holds compilation, too
    step["tokens"] = step["iter"] * run.tokens_per_iter
    step["tokens_per_sec"] = run.tokens_per_iter / step["step_ms"] * 1e3
    printed_mfu = median(step["mfu"][step["mfu"] > 0]) / 100
    step["mfu"] = np.full(len(evaluated), math.nan)
    # Of several cards, tokens are those of all and its MFU is that of one. Only roughly: evaluations pull its mean down
    flops_per_card = printed_mfu * NANOGPT_PEAK_FLOPS * median(step["step_ms"]) / 1e3 / run.tokens_per_iter
    run.flops_per_token = flops_per_card
    if config and math.isfinite(matmul_parameters):
        L, C, T = config["n_layer"], config["n_embd"], config["block_size"]
        run.parameters = matmul_parameters + T * C
        flops = 6 * matmul_parameters + 12 * L * C * T
        run.flops_per_token = flops / max(1, round(flops / flops_per_card) if flops_per_card > 0 else 1)
    add_totals(run)


def mfu_on(gpu: str, run: RunRecords) -> np.ndarray:
    """MFU of each step record, a fraction, had it run on this card. Raises UserError where the card is not known."""
    import torch  # seconds, for these runs alone

    import gpus

    dtype, row = run.dtype if run.dtype in ("float32", "float16") else "bfloat16", gpus.resolve_gpu(gpu)
    run.device = run.device or row["name"].partition("|")[0]
    peak = gpus.row_peak(row, getattr(torch, dtype), run.config.get("tf32", True))
    if peak is None:
        raise UserError(f"gpu: gpus.csv has no certain {dtype} peak for {gpu}; leave --gpu away")
    return run.flops_per_token * run.step["tokens_per_sec"] / (peak * 1e12)
