"""
Look up GPUs' peak speeds and memory in gpus.csv, next to this file. Needs no torch.

The columns of gpus.csv:
    source       "copy" means a copy of a page made in 2025, "recalled" a data sheet that was not
                 read again
    note         every peak was recomputed from SMs, clock and FLOPs per clock; FLAG means that this
                 and the sources differ by more than 3%, UNVERIFIED that the peak is not used
    mfu_percent  MFUs measured in training GPTs in bfloat16: GPT-2 124M, compiled, or what
                 mfu_source says. plan takes their median, and prints their range
    mfu_source   what plan prints about them in place of "published, compiled: 80% of its peak"
    link_gbs     the GB/s that each of several GPUs joined by NVLink sends and receives in an
                 all-reduce; assumed (docs/internals/multi_gpu.md)
"""

import csv
import re
from pathlib import Path
from statistics import median

from common.console import UserError

GIB = 2**30
PEAK_COLUMNS = dict(bfloat16="bf16_tflops", float16="fp16_tflops", float32="fp32_tflops")
# The MFUs (lowest, likely, highest) to assume if gpus.csv has no published one. Each key is a word
# in the GPU's name, "" matches any GPU, and the first match counts. The ranges are about those of
# gpus.csv. A laptop GPU's peak is stated at its highest boost clock; its lowest boost clock is 0.6
# to 0.8 of that.
ASSUMED_MFU = {
    "Laptop": (0.34, 0.50, 0.67),
    "GeForce": (0.57, 0.75, 0.84),
    "": (0.25, 0.35, 0.58),
}
PUBLISHED_WIDTH = 768  # n_embd of most models whose MFUs are published; some are wider


def read_gpu_table() -> list[dict[str, str]]:
    with open(Path(__file__).with_name("gpus.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def find_row(name: str, sm_count: int | None = None) -> dict[str, str] | None:
    """
    Find the row of gpus.csv for a device name as torch reports it; None if the peak is unknown.

    Whole names are compared, because one may contain another (A10 in A100, 4070 in 4070 Ti). The
    number of SMs distinguishes cards of the same name, and cut-down or partitioned cards, whose
    peak is unknown. Of cards that differ only in their memory, this returns the first row. A laptop
    GPU's peak is unknown too, because it depends on the power limit.
    """
    for row in read_gpu_table():
        names = [alias.removeprefix("NVIDIA ") for alias in row["name"].split("|")]
        same_size = not row["sm_count"] or int(row["sm_count"]) == sm_count
        if name.removeprefix("NVIDIA ") in names and same_size and "Laptop" not in name:
            return row
    return None


def row_peak(row: dict[str, str], dtype: str, tf32: bool) -> float | None:
    """
    Return a row's dense peak in TFLOP/s for `dtype`, such as "bfloat16"; None if it is missing or
    marked UNVERIFIED. With `tf32`, float32 matmuls run at the TF32 rate on cards that have it.
    """
    if "UNVERIFIED" in row["note"]:
        return None
    column = PEAK_COLUMNS[dtype]
    if dtype == "float32" and tf32 and row["tf32_tflops"]:
        column = "tf32_tflops"
    return float(row[column]) if row[column] else None


def known_mfus(name: str, row: dict[str, str] | None) -> tuple[float, float, float, str]:
    """
    Return the lowest, likely and highest MFU published for a GPU, else those to assume for it, and
    a sentence about their source.
    """
    if row and row["mfu_percent"]:
        percents = row["mfu_percent"]
        published = [float(percent) / 100 for percent in percents.split()]
        source = row["mfu_source"] or f"published, compiled: {percents}% of its peak"
        return min(published), median(published), max(published), source
    low, likely, high = next(mfus for word, mfus in ASSUMED_MFU.items() if word in name)
    source = f"assumed: {likely:.0%} ({low:.0%} to {high:.0%}) of its peak; no MFU is published"
    return low, likely, high, source


# -----------------------------------------------------------------------------
# Names as people type them


def short_name(row: dict[str, str]) -> str:
    """Return the first of a row's names without the maker, such as GeForce RTX 4070."""
    return row["name"].partition("|")[0].removeprefix("NVIDIA ")


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    Find the row of gpus.csv that a person means by "4070", "RTX4070", "a100 sxm4" or "3080 12 GB":
    the one with exactly this name, else one whose name and memory contain what is typed. Of cards
    that differ only in their memory, this returns the first row. Raises UserError if there is none,
    or if several fit and their peaks differ.
    """
    wanted = compact(typed)
    rows = {f"{short_name(row)} {row['memory_gib']}GB": row for row in read_gpu_table()}
    rows = {name: row for name, row in rows.items() if wanted in compact(name)}
    if not rows or not wanted:
        raise UserError(f"gpu: {typed!r} is unknown; machine/gpus.csv lists the known ones")
    exact = {name: row for name, row in rows.items() if wanted == compact(short_name(row))}
    rows = exact or rows
    if len({(row["bf16_tflops"], row["fp16_tflops"]) for row in rows.values()}) > 1:
        names = " or ".join(f"--gpu='{name}'" for name in rows)
        raise UserError(f"gpu: {typed!r} fits several cards; type {names}")
    return next(iter(rows.values()))


def compact(name: str) -> str:
    """Return a name without the words that people leave out, spaces and punctuation."""
    return re.sub(r"nvidia|geforce|rtx|tesla|[\W_]", "", name.lower())
