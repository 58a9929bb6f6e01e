"""
What a run left behind: metrics.jsonl as columns of numbers.
"""

import math
from array import array
from pathlib import Path

import numpy as np

from configurator import FIELDS, INITIAL, translate
from training.metrics import read_record

# The kinds of records that are columns, and those of their values that are kept
COLUMNS = {
    "step": ("iter", "tokens", "loss", "step_ms", "tokens_per_sec", "mfu"),
    "eval": ("iter", "train_loss", "val_loss", "bits_per_byte", "seconds"),
    "checkpoint": ("iter", "seconds"),
}


class Records:
    """The records of one run, taken in as they come. One of a step takes 48 bytes."""

    def __init__(self, path: Path):
        """`path`: a metrics.jsonl for read(), or a file whose records are added one by one."""
        self.path, self.position = path, 0
        self.starts: list[dict] = []
        self.end: dict = {}
        self.rows = {kind: array("d") for kind in COLUMNS}  # one after the other

    def read(self) -> "RunRecords":
        """
        All of the run so far. Each reading begins where the one before has ended. Lines that are
        no records are left out. Raises OSError.
        """
        with open(self.path, "rb") as file:
            file.seek(self.position)
            for line in file:
                self.add(read_record(line))
            self.position = file.tell()
        return RunRecords(self.path.resolve().parent.name, self)

    def add(self, record: dict) -> None:
        kind = record.get("kind")
        if kind == "start":
            self.starts.append(record)
        elif kind == "end":
            self.end = record
        elif kind in COLUMNS:
            self.rows[kind].extend([number(record.get(name)) for name in COLUMNS[kind]])

    def columns(self, kind: str) -> dict[str, np.ndarray]:
        names = COLUMNS[kind]
        # no copy: what is freed may stay with the process
        rows = np.frombuffer(self.rows[kind]).reshape(-1, len(names))
        return dict(zip(names, rows[np.argsort(rows[:, 0], kind="stable")].T, strict=True))


class RunRecords:
    """
    One run, as far as its records have come. What holds for all of it comes from its last start
    record. A number is NaN and a text None if it is not known, and `config` holds only the keys
    that are known.

    Its records are columns, ordered by iteration: one array for each value of a kind of record. A
    value that is not known is NaN. Added to the values in metrics.jsonl are

    - `step["seconds"]`: the time of the iterations that a record is the mean of
    - `eval["tokens"]`: tokens trained on before the evaluation
    - `eval["hours"]`: time spent until the end of the evaluation: iterations, evaluations and
      checkpoints, without start-up and compilation
    - `iterations` and `tokens`: made, and trained on, so far
    """

    def __init__(self, name: str, records: Records):
        # a resume may have changed what the first start said
        first, last = (records.starts[0], records.starts[-1]) if records.starts else ({}, {})
        self.name = name
        before, now = (known_keys(start.get("config") or {}) for start in (first, last))
        # what began it, and not the flag or the time of day that a resume was given
        self.config = now | {key: before[key] for key in INITIAL if key in before}
        self.device: str | None = last.get("device")
        self.dtype: str | None = last.get("dtype")
        self.tokenizer: str | None = last.get("tokenizer")
        self.data_fingerprint: str | None = last.get("data_fingerprint")
        self.parameters = number(last.get("parameters"))
        self.tokens_per_iter = number(last.get("tokens_per_iter"))
        # tok/s are those of all cards together, but MFU is that of one card
        self.flops_per_token = number(last.get("flops_per_token")) / last.get("world_size", 1)
        self.step = records.columns("step")
        self.eval = records.columns("eval")
        self.checkpoint = records.columns("checkpoint")
        self.end = records.end  # empty while the run trains, and after a kill
        self.loss_unit = "nats per token"
        self.warnings: list[str] = []
        if changed := {key for key in before if before[key] != self.config.get(key)}:
            keys = ", ".join(sorted(changed))
            self.warnings.append(f"{name}: resumed with other {keys}; shown as of the last start")
        add_totals(self, first.get("iter", 0))


def known_keys(values: dict) -> dict:
    """The keys that this program has too, by today's names, with a value of the key's type."""
    values = translate(values)
    known = values.keys() & FIELDS.keys()
    return {key: values[key] for key in known if type(values[key]) is FIELDS[key].type}


def number(value: float | None) -> float:
    """A record's value as a float; NaN for null or a value that is missing."""
    return math.nan if value is None else float(value)


def add_totals(run: RunRecords, first_iter: int = 0) -> None:
    """
    Add what follows from other columns: seconds of steps, tokens and hours of evaluations,
    iterations and tokens of the run.
    """
    step, evals = run.step, run.eval
    usual_ms = percentile(step["step_ms"], 50)
    known_ms = np.where(np.isfinite(step["step_ms"]), step["step_ms"], usual_ms)
    # a step record stands for the iterations since the record before it
    step["seconds"] = np.diff(step["iter"], prepend=first_iter - 1) * known_ms / 1e3

    # from the step records: iter * tokens_per_iter is wrong if a resume changed the batch
    tokens = total_at(evals["iter"], step["iter"], step["tokens"], run.tokens_per_iter)
    evals["tokens"] = np.round(tokens)
    # a step at N has trained on the iteration N; an evaluation at N comes before it
    iterations, tokens = np.append(step["iter"] + 1, evals["iter"]), evals["tokens"]
    tokens = np.append(step["tokens"] + run.tokens_per_iter, tokens)
    # a stop comes between two log lines
    run.iterations = percentile(np.append(iterations, number(run.end.get("iters"))), 100)
    run.tokens = percentile(np.append(tokens, number(run.end.get("tokens"))), 100)

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
