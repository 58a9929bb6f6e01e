"""
What a run left behind: metrics.jsonl as columns of numbers.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configurator import FIELDS, saved_keys
from training.metrics import read_records


@dataclass
class RunRecords:
    """
    One run. What holds for all of it comes from its last start record. A number is NaN and a text
    None if it is not known, and `config` holds only the keys that are known.

    Its records are columns, ordered by iteration: one array for each value of a kind of record. A
    value that is not known is NaN. Added to the values in metrics.jsonl are

    - `step["iters"]`: how many iterations a record is the mean of
    - `step["seconds"]`: the time of those iterations
    - `eval["tokens"]`: tokens trained on before the evaluation
    - `eval["hours"]`: time spent until the end of the evaluation: iterations, evaluations and
      checkpoints, without start-up and compilation
    """

    name: str
    config: dict
    device: str | None
    dtype: str | None
    tokenizer: str | None
    parameters: float
    tokens_per_iter: float
    flops_per_token: float  # divided by the number of cards
    step: dict[str, np.ndarray]
    eval: dict[str, np.ndarray]
    checkpoint: dict[str, np.ndarray]
    loss_unit: str = "nats per token"
    warnings: list[str] = field(default_factory=list)


STEP_COLUMNS = ("iter", "tokens", "loss", "step_ms", "tokens_per_sec", "mfu")
EVAL_COLUMNS = ("iter", "train_loss", "val_loss", "bits_per_byte", "seconds")
CHECKPOINT_COLUMNS = ("iter", "seconds")
STEP_LINE = '{"kind": "step"'  # how a step record begins in metrics.jsonl


def read_metrics(path: Path, most_steps: int | None = None) -> RunRecords:
    """
    Read the metrics.jsonl of one run. Lines that are not records are skipped, such as a last line
    that a killed run left unfinished. With `most_steps`, a longer file is read with about that many
    step records, evenly spread. Raises OSError.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if most_steps is not None and len(lines) > most_steps:
        steps = [line for line in lines if line.startswith(STEP_LINE)]
        others = [line for line in lines if not line.startswith(STEP_LINE)]
        lines = others + steps[:: len(steps) // most_steps + 1]
    run = tabulate(path.resolve().parent.name, read_records(lines))
    if text and not text.endswith("\n"):
        run.warnings.append(f"{path}: left out the last line, which a killed run left unfinished")
    return run


def tabulate(name: str, records: list[dict]) -> RunRecords:
    """Turn records into columns. A record without a whole number `iter` is dropped."""
    records = [record for record in records if isinstance(record.get("iter"), int)]
    starts = [record for record in records if record.get("kind") == "start"]
    last = starts[-1] if starts else {}  # a resume may have changed what the first start said
    run = RunRecords(
        name=name,
        config=known_keys(last.get("config") or {}),
        device=last.get("device"),
        dtype=last.get("dtype"),
        tokenizer=last.get("tokenizer"),
        parameters=number(last.get("parameters")),
        tokens_per_iter=number(last.get("tokens_per_iter")),
        # tok/s are those of all cards together, but MFU is that of one card
        flops_per_token=number(last.get("flops_per_token")) / last.get("world_size", 1),
        step=columns(records, "step", STEP_COLUMNS),
        eval=columns(records, "eval", EVAL_COLUMNS),
        checkpoint=columns(records, "checkpoint", CHECKPOINT_COLUMNS),
    )
    add_totals(run, starts[0]["iter"] if starts else 0)
    return run


def known_keys(values: dict) -> dict:
    """The keys that this program has too, by today's names, with a value of the key's type."""
    values = saved_keys(values)
    known = values.keys() & FIELDS.keys()
    return {key: values[key] for key in known if type(values[key]) is FIELDS[key].type}


def number(value: float | None) -> float:
    """A record's value as a float; NaN for null or a value that is missing."""
    return math.nan if value is None else float(value)


def columns(records: list[dict], kind: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    rows = [record for record in records if record.get("kind") == kind]
    rows.sort(key=lambda row: row["iter"])
    return {name: np.array([number(row.get(name)) for row in rows]) for name in names}


def add_totals(run: RunRecords, first_iter: int = 0) -> None:
    """
    Add the columns that follow from others: iters and seconds of steps, tokens and hours of
    evaluations.
    """
    step, evals = run.step, run.eval
    usual_ms = percentile(step["step_ms"], 50)
    # a step record stands for the iterations since the record before it
    step["iters"] = np.diff(step["iter"], prepend=first_iter - 1)
    known_ms = np.where(np.isfinite(step["step_ms"]), step["step_ms"], usual_ms)
    step["seconds"] = step["iters"] * known_ms / 1e3

    # from the step records: iter * tokens_per_iter is wrong if a resume changed the batch
    tokens = total_at(evals["iter"], step["iter"], step["tokens"], run.tokens_per_iter)
    evals["tokens"] = np.round(tokens)

    # an evaluation at N ends after the iterations 0 to N-1, after itself and the evaluations
    # before it, and after the checkpoints before N
    step_totals, after_step = np.cumsum(step["seconds"]), step["iter"] + 1
    seconds = total_at(evals["iter"], after_step, step_totals, usual_ms / 1e3)
    seconds += np.cumsum(np.nan_to_num(evals["seconds"]))
    checkpoint_totals = np.append(0, np.cumsum(np.nan_to_num(run.checkpoint["seconds"])))
    seconds += checkpoint_totals[np.searchsorted(run.checkpoint["iter"], evals["iter"])]
    evals["hours"] = seconds / 3600


def total_at(x: np.ndarray, known_x: np.ndarray, totals: np.ndarray, slope: float) -> np.ndarray:
    """
    A running total at x, along straight lines from (0, 0) through the known points, and with this
    slope beyond the last of them.
    """
    known_x, totals = np.append(0, known_x), np.append(0, totals)
    beyond = totals[-1] + (x - known_x[-1]) * slope
    return np.where(x > known_x[-1], beyond, np.interp(x, known_x, totals))


def percentile(values: np.ndarray, q: float) -> float:
    """A percentile of the finite values (0: the lowest, 100: the highest); NaN for none."""
    values = values[np.isfinite(values)]
    return float(np.percentile(values, q)) if len(values) else math.nan
