"""
Read a run into columns of numbers, from its metrics.jsonl or from the CSV of a published run, and
look up its learning curve.

Losses are known at evaluations. Between two evaluations they are interpolated linearly.
"""

import ast
import contextlib
import csv
import math
import re
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.console import UserError
from common.files import read_record, read_text
from configurator import FIELDS, from_nanogpt

# The kinds of records that become columns, and the values that are kept
COLUMNS = {
    "step": """
        iter tokens tokens_after hours loss lr step_ms tokens_per_sec mfu mem_gib
        compile_seconds
    """.split(),
    "eval": """
        iter tokens hours train_loss val_loss perplexity bits_per_byte seconds low high
    """.split(),
}
PUBLISHED = "published"  # the program of a run that is read from a CSV
LOSSES = ("train_loss", "val_loss", "low", "high")  # a CSV's columns besides iter
# Interpolate over gaps of at most this fraction of the progress so far. For a loss that falls like
# 1/sqrt(x) and is 1 nat above its floor, the error is about 0.2^2 / 8 * 3/4 = 0.004 nats, which is
# less than the noise between seeds.
NEAR = 0.2


class Run:
    """
    Holds one run as its records describe it so far.

    `start` is the last start record; `end` is empty while the run trains and after a kill. `step`
    and `eval` are columns, ordered by iteration: one array per value, NaN if unknown. Only
    published means of several runs have a band of val losses, from `low` to `high`.
    `measures` names the numbers that only this run's evaluations have; they are columns too.
    `config` has the keys of the last launch, but says from which weights the first one began.
    `iterations`, `tokens` and `hours` are None if unknown; `hours` includes iterations,
    evaluations, samples and checkpoints.
    """

    def __init__(self, name: str, records: Iterable[dict]):
        self.name = name
        self.end: dict = {}
        starts = []
        evaluations = {}  # by iteration; a complete run may evaluate its last one twice
        rows = {kind: array("d") for kind in COLUMNS}  # flat: row after row
        for record in records:
            kind = record.get("kind")
            if kind == "start":
                starts.append(record)
            elif kind == "end":
                self.end = record
            elif kind == "eval":
                evaluations[record.get("iter")] = record
            elif kind in COLUMNS:
                rows[kind].extend([number(record.get(key)) for key in COLUMNS[kind]])
        pairs = (pair for record in evaluations.values() for pair in record.items())
        numbers = {key for key, value in pairs if isinstance(value, int | float)}
        self.measures = sorted(numbers - {*COLUMNS["eval"]})
        columns = [*COLUMNS["eval"], *self.measures]
        for record in evaluations.values():
            rows["eval"].extend([number(record.get(key)) for key in columns])
        self.step = to_columns(rows["step"], COLUMNS["step"])
        self.eval = to_columns(rows["eval"], columns)
        first, self.start = (starts[0], starts[-1]) if starts else ({}, {})
        self.config = config_of(self.start)
        if "init_from" in self.config:
            self.config["init_from"] = config_of(first)["init_from"]
        # take the highest of all records; a step record at N means N + 1 iterations
        step, evals, end = self.step, self.eval, self.end
        self.iterations = highest(step["iter"] + 1, evals["iter"], end.get("iters"))
        self.tokens = highest(step["tokens_after"], evals["tokens"], end.get("tokens"))
        self.hours = highest(step["hours"], evals["hours"], end.get("hours"))


def open_run(path: Path) -> Run:
    """
    Read a run from its folder, its metrics.jsonl, or the CSV of a published run. Raises UserError
    if the file cannot be read, or if it has neither an iteration nor an evaluation.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a CSV of results/public_runs"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        run = Run(file.stem, read_csv(file)) if file.suffix == ".csv" else read_run(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: holds no iteration and no evaluation; {hint}")
    return run


def read_run(file: Path) -> Run:
    """Read a run from its metrics.jsonl. Ignores lines that are not records. Raises OSError."""
    with open(file, "rb") as lines:
        return Run(file.resolve().parent.name, map(read_record, lines))


def read_csv(file: Path) -> list[dict]:
    """
    Return the records of a published run, or of the mean of several: facts and settings in lines
    with #, then a header with iter, val_loss and perhaps train_loss, low and high. Raises OSError.
    """
    lines = read_text(file).splitlines()
    facts = {}
    for line in lines:
        if fact := re.fullmatch(r"# (\w+) = (.+)", line):
            with contextlib.suppress(ValueError, SyntaxError):  # skip remarks, such as a date
                facts[fact[1]] = ast.literal_eval(fact[2])
    records = [dict(facts, kind="start", program=PUBLISHED, config=facts)]
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row.get("val_loss"):
            losses = {key: float(row[key]) for key in LOSSES if row.get(key)}
            it = int(row["iter"])
            tokens = it * facts.get("tokens_per_iter", math.nan)
            records.append(dict(kind="eval", iter=it, tokens=tokens, **losses))
    return records


def to_columns(rows: array, names: list[str]) -> dict[str, np.ndarray]:
    table = np.array(rows).reshape(-1, len(names))
    return dict(zip(names, table[np.argsort(table[:, 0], kind="stable")].T, strict=True))


def config_of(start: dict) -> dict:
    """
    Return a start record's keys under today's names. Keys that are missing get their defaults,
    except in a published run.
    """
    values = from_nanogpt(start.get("config") or {})
    if start.get("program") == PUBLISHED:  # its facts are beside its keys
        return {name: value for name, value in values.items() if name in FIELDS}
    if not values:
        return {}
    return {name: f.default for name, f in FIELDS.items()} | values


def number(value: float | None) -> float:
    """Return a record's value as a float; NaN if the value is null or missing."""
    return math.nan if value is None else float(value)


def percentile(values: np.ndarray, q: float) -> float | None:
    """Return a percentile of the finite values (0: lowest, 100: highest), or None without any."""
    values = values[np.isfinite(values)]
    return float(np.percentile(values, q)) if len(values) else None


def highest(step: np.ndarray, evals: np.ndarray, end: float | None) -> float | None:
    return percentile(np.concatenate([step, evals, [number(end)]]), 100)


def has_band(run: Run) -> bool:
    return bool(np.isfinite(run.eval["low"]).any())


# -----------------------------------------------------------------------------
# The learning curve


def learning_curve(run: Run, axis: str, measure: str = "val_loss") -> tuple[np.ndarray, np.ndarray]:
    """
    Return where on the axis (iter, tokens or hours) the run was evaluated, and its val losses, or
    another measure's values, there. The evaluation at iteration 0 is left out.
    """
    x, values = run.eval[axis], run.eval[measure]
    known = (run.eval["iter"] > 0) & np.isfinite(x) & np.isfinite(values)
    return x[known], values[known]


def loss_at(x: np.ndarray, losses: np.ndarray, at: float) -> float | None:
    """
    Interpolate the val loss at this x; None outside the evaluations, or if the two around it are
    too far apart.
    """
    i = int(np.searchsorted(x, at))
    if i == len(x) or (x[i] > at and (i == 0 or x[i] - x[i - 1] > NEAR * at)):
        return None
    return float(np.interp(at, x, losses))
