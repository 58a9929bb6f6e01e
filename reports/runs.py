"""
Read a run into columns of numbers, from its metrics.jsonl or from nanoGPT's console output, and
look up its learning curve.

Losses are known at evaluations. Between two evaluations they are interpolated linearly.
"""

import math
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.console import UserError
from common.files import read_record
from configurator import FIELDS, from_nanogpt
from reports.nanogpt_log import read_nanogpt_log

INITIAL = ("init_from", "wandb_run_name")  # a run keeps its first values of these when it resumes
# The kinds of records that become columns, and the values that are kept
COLUMNS = {
    "step": """
        iter tokens tokens_after hours loss lr step_ms cpu_ms tokens_per_sec mfu mem_gib
        compile_seconds
    """.split(),
    "eval": """
        iter tokens hours train_loss val_loss perplexity bits_per_byte seconds low high
    """.split(),
    "checkpoint": "iter seconds".split(),
}
# Interpolate over gaps of at most this fraction of the progress so far. For a loss that falls like
# 1/sqrt(x) and is 1 nat above its floor, the error is about 0.2^2 / 8 * 3/4 = 0.004 nats, which is
# less than the noise between seeds.
NEAR = 0.2


class Run:
    """
    Holds one run as its records describe it so far.

    `start` is the last start record; `end` is empty while the run trains and after a kill. `step`,
    `eval` and `checkpoint` are columns, ordered by iteration: one array per value, NaN if unknown.
    Only published means of several runs have a band of val losses, from `low` to `high`.
    `measures` names the numbers that only this run's evaluations have; they are columns too.
    `config` has only keys that exist today. `iterations`, `tokens` and `hours` are None if unknown;
    `hours` includes iterations, evaluations, samples and checkpoints.
    """

    def __init__(self, name: str, records: Iterable[dict]):
        self.name = name
        self.end: dict = {}
        self.warnings: list[str] = []
        starts = []
        evaluations = []
        rows = {kind: array("d") for kind in COLUMNS}  # flat: row after row
        for record in records:
            kind = record.get("kind")
            if kind == "start":
                starts.append(record)
            elif kind == "end":
                self.end = record
            elif kind == "eval":
                evaluations.append(record)
            elif kind in COLUMNS:
                rows[kind].extend([number(record.get(key)) for key in COLUMNS[kind]])
        pairs = (pair for record in evaluations for pair in record.items())
        numbers = {key for key, value in pairs if isinstance(value, int | float)}
        self.measures = sorted(numbers - {*COLUMNS["eval"]})
        columns = [*COLUMNS["eval"], *self.measures]
        for record in evaluations:
            rows["eval"].extend([number(record.get(key)) for key in columns])
        self.step = to_columns(rows["step"], COLUMNS["step"])
        self.eval = to_columns(rows["eval"], columns)
        self.checkpoint = to_columns(rows["checkpoint"], COLUMNS["checkpoint"])
        # a resume may have changed the configuration
        first, self.start = (starts[0], starts[-1]) if starts else ({}, {})
        before, now = known_keys(first), known_keys(self.start)
        # for these keys, keep the value that the run began with, not its last resume's
        self.config = now | {key: before[key] for key in INITIAL if key in before}
        if changed := {key for key in before if before[key] != self.config.get(key)}:
            keys = ", ".join(sorted(changed))
            self.warnings.append(
                f"{name}: resumed with other values of {keys}; showing those of the last launch"
            )
        # take the highest of all records; a step record at N means N + 1 iterations
        step, evals, end = self.step, self.eval, self.end
        self.iterations = highest(step["iter"] + 1, evals["iter"], end.get("iters"))
        self.tokens = highest(step["tokens_after"], evals["tokens"], end.get("tokens"))
        self.hours = highest(step["hours"], evals["hours"], end.get("hours"))


def open_run(path: Path) -> Run:
    """
    Read a run from its folder, its metrics.jsonl, or a file with nanoGPT's output. Raises UserError
    if the file cannot be read, or if it has neither an iteration nor an evaluation.
    """
    hint = "give the out_dir of a run, such as out/quickstart, or a file with nanoGPT's output"
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        if file.suffix == ".jsonl":
            run = read_run(file)
        else:
            records, warnings = read_nanogpt_log(file)
            run = Run(path.stem, records)
            run.warnings = warnings
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {hint}") from None
    if not len(run.step["iter"]) and not len(run.eval["iter"]):
        raise UserError(f"{path}: holds no iteration and no evaluation; {hint}")
    return run


def read_run(file: Path) -> Run:
    """Read a run from its metrics.jsonl. Ignores lines that are not records. Raises OSError."""
    with open(file, "rb") as lines:
        return Run(file.resolve().parent.name, map(read_record, lines))


def to_columns(rows: array, names: list[str]) -> dict[str, np.ndarray]:
    table = np.array(rows).reshape(-1, len(names))
    return dict(zip(names, table[np.argsort(table[:, 0], kind="stable")].T, strict=True))


def known_keys(start: dict) -> dict:
    """
    Return a start record's keys that exist today, under today's names, if their values have the
    right type. Keys that are newer than the run get their defaults, except for a run of nanoGPT.
    """
    values = from_nanogpt(start.get("config") or {})
    if values and start.get("program") != "nanoGPT":
        values = {name: f.default for name, f in FIELDS.items()} | values
    kinds = {name: type(f.default) for name, f in FIELDS.items()}
    return {k: v for k, v in values.items() if k in kinds and isinstance(v, kinds[k])}


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


def reach(x: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """
    Return the x at which a learning curve first reaches this loss. None if it never does, if it was
    already below at its first evaluation, or if the two evaluations around it are too far apart.
    """
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    i = reached[0]
    if losses[i] == target:
        return float(x[i])
    if i == 0:
        return None
    # order the points from i to i - 1, because the loss falls and np.interp needs rising values
    at = float(np.interp(target, losses[[i, i - 1]], x[[i, i - 1]]))
    return at if loss_at(x, losses, at) is not None else None
