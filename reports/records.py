"""
What a run left behind: metrics.jsonl as columns of numbers.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configurator import FIELDS, set_value
from training.runlog import read_records


@dataclass
class RunRecords:
    """
    One run: what its last start record says (numbers are NaN, texts None, keys missing from
    `config` where not known), and its records as columns: arrays of equal length per kind, ordered
    by iteration, NaN where a value is not known. In `step`, `iters` is how many iterations a record
    stands for, `seconds` what they took; `tokens` are those trained on before the record's
    iteration, `hours` those spent until the evaluation was done.
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


def read_metrics(path: Path, most_steps: int | None = None) -> RunRecords:
    """
    metrics.jsonl of one run. A torn last line (a killed run) and lines that are no records are
    passed over. Of more than `most_steps` step records, evenly spread ones are read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if most_steps and len(lines) > most_steps:
        steps = [line for line in lines if line.startswith(STEP_LINE)]
        lines = [line for line in lines if not line.startswith(STEP_LINE)] + steps[
            :: -(-len(steps) // most_steps)
        ]
    run = tabulate(path.resolve().parent.name, read_records(lines))
    if text and not text.endswith("\n"):
        run.warnings.append(
            f"{path}: its last line is cut short (the run was killed); read without it"
        )
    return run


def tabulate(name: str, records: list[dict]) -> RunRecords:
    """Records as columns; what is not as this program writes it counts as not known."""
    starts = [record for record in records if record.get("kind") == "start"] or [{}]
    config, last = {}, starts[-1]  # a resume may have changed what the first one said
    for key, value in last["config"].items() if isinstance(last.get("config"), dict) else ():
        if key in FIELDS:
            set_value(config, key, value, "", [])
    device, dtype = (
        last[key] if isinstance(last.get(key), str) else None for key in ("device", "dtype")
    )
    numbers = {
        key: as_number(last.get(key))
        for key in ("parameters", "tokens_per_iter", "flops_per_token")
    }
    if (
        as_number(last.get("world_size")) > 1
    ):  # tokens/s are those of all cards together, MFU is one's
        numbers["flops_per_token"] /= last["world_size"]
    run = RunRecords(
        name, config, device, dtype, **numbers, **{kind: columns(records, kind) for kind in COLUMNS}
    )
    first_iter = as_number(starts[0].get("iter"))
    add_totals(run, first_iter if first_iter >= 0 else 0)
    return run


def columns(records: list[dict], kind: str) -> dict[str, np.ndarray]:
    rows = [record for record in records if record.get("kind") == kind]
    table = {
        name: np.array([as_number(row.get(name)) for row in rows], dtype=float)
        for name in COLUMNS[kind]
    }
    order = np.argsort(table["iter"], kind="stable")
    order = order[np.isfinite(table["iter"][order])]
    return {name: column[order] for name, column in table.items()}


def add_totals(run: RunRecords, first_iter: float = 0) -> None:
    """
    Add the columns that sum up others: iters and seconds of steps, tokens and hours of evaluations.
    """
    step = run.step
    step["iters"] = np.diff(step["iter"], prepend=first_iter - 1)
    step["seconds"] = (
        step["iters"]
        * np.where(np.isfinite(step["step_ms"]), step["step_ms"], median(step["step_ms"]))
        / 1e3
    )
    for kind in (run.eval, run.checkpoint):
        # not N * tokens_per_iter: a resume may have changed the batch
        kind["tokens"] = carry_on(kind["iter"], step["iter"], step["tokens"], run.tokens_per_iter)
    seconds = carry_on(
        run.eval["iter"],
        step["iter"] + 1,
        np.cumsum(step["seconds"]),
        median(step["step_ms"]) / 1e3,
    )
    seconds += np.cumsum(np.nan_to_num(run.eval["seconds"]))
    saved_before = np.searchsorted(run.checkpoint["iter"], run.eval["iter"])
    run.eval["hours"] = (
        seconds + np.append(0, np.cumsum(np.nan_to_num(run.checkpoint["seconds"])))[saved_before]
    ) / 3600


def as_number(value) -> float:
    """
    A record's value or a log's text as a float, NaN where it is none or beyond anything that is
    counted here.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 1e30 else math.nan


def median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def carry_on(x: np.ndarray, known_x: np.ndarray, known_y: np.ndarray, slope: float) -> np.ndarray:
    """
    y at x, from (0, 0) through the known points by straight lines, beyond the last of them at
    `slope`.
    """
    known_x, known_y = np.append(0, known_x), np.append(0, known_y)
    return np.where(
        x > known_x[-1], known_y[-1] + (x - known_x[-1]) * slope, np.interp(x, known_x, known_y)
    )
