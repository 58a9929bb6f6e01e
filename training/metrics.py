"""
Read the records of metrics.jsonl, and rewrite them when a run resumes. Needs no torch.
"""

import contextlib
import json
import math
from pathlib import Path

from common.console import warn
from common.files import replacing


def plain(value):
    """A value for JSON: a float with nine digits, or null if it is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None


def read_record(line: bytes) -> dict:
    """The record on a line of metrics.jsonl; {} if the line is not a record."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


def drop_records(path: Path, iter_num: int, evaluated_at: int) -> None:
    """
    Rewrite metrics.jsonl without the records that a run resumed at iteration `iter_num` will write
    again, and without lines that are not records, such as half a line left by a kill. The last
    evaluation was at `evaluated_at`.
    """
    # ckpt-N is saved before iteration N, and after the evaluation at N unless a signal came first
    last = {"step": iter_num - 1, "event": iter_num - 1, "checkpoint": iter_num}
    last |= {"eval": evaluated_at, "sample": evaluated_at, "end": -1}
    try:
        with replacing(path) as file, open(path, "rb") as lines:
            for line in lines:
                record = read_record(line)
                it, kind = record.get("iter"), record.get("kind", "")
                if isinstance(it, int) and it <= last.get(kind, math.inf):
                    file.write(line.rstrip() + b"\n")
    except OSError as error:  # a full disk
        warn(f"{path}: {error.strerror}; repeated records remain")
