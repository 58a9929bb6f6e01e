"""
Look up GPUs' peak speeds and memory in gpus.csv, next to this file. Needs no torch.

The columns of gpus.csv:
    source       "copy" means a copy of a page made in 2025, "recalled" a data sheet that was not
                 read again
    note         every peak was recomputed from SMs, clock and FLOPs per clock; FLAG means that this
                 and the sources differ by more than 3%, UNVERIFIED that the peak is not used
    mfu_percent  MFUs measured in training GPTs in bfloat16: GPT-2 124M, compiled, or
                 what mfu_source says. plan takes their median, and prints their range
    mfu_source   what plan prints about them in place of "published, compiled: 80% of its peak"
    link_gbs     the GB/s that each of several GPUs joined by NVLink sends and receives in an
                 all-reduce; assumed (docs/internals/multi_gpu.md)
"""

import csv
import re
from pathlib import Path

from common.console import UserError

GIB = 2**30
GPU_TABLE = Path(__file__).with_name("gpus.csv")
MEMORY = re.compile(r"\d+gb")  # a word such as 12gb in a GPU's name
PEAK_COLUMNS = dict(bfloat16="bf16_tflops", float16="fp16_tflops", float32="fp32_tflops")
# The MFUs (lowest, likely, highest) to assume if gpus.csv has no published one. Each key is a word
# in the GPU's name, "" matches any GPU, and the first match counts. The ranges span the published
# MFUs of 124M models. A laptop GPU's peak is stated at its highest boost clock; its lowest boost
# clock is 0.6 to 0.8 of that.
ASSUMED_MFU = {
    "Laptop": (0.34, 0.50, 0.67),
    "GeForce": (0.57, 0.75, 0.84),
    "": (0.25, 0.35, 0.58),
}
PUBLISHED_WIDTH = 768  # n_embd of the models whose MFUs are published


def read_gpu_table() -> list[dict[str, str]]:
    with open(GPU_TABLE, newline="", encoding="utf-8") as file:
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


def published_mfus(row: dict[str, str]) -> tuple[float, ...]:
    """Return the MFUs published for a GPU, as fractions; () if there are none."""
    return tuple(float(percent) / 100 for percent in row["mfu_percent"].split())


def assumed_mfus(name: str) -> tuple[float, float, float]:
    """Return the lowest, likely and highest MFU to assume for a GPU if none is published."""
    return next(mfus for word, mfus in ASSUMED_MFU.items() if word in name)


# -----------------------------------------------------------------------------
# Names as people type them


def short_name(row: dict[str, str]) -> str:
    """Return the first of a row's names without the maker, such as GeForce RTX 4070."""
    return row["name"].partition("|")[0].removeprefix("NVIDIA ")


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    Find the row of gpus.csv that a person means by "4070", "RTX4070", "a100 sxm4" or "3080 12 GB":
    the row whose name contains every typed word and the fewest others. Raises UserError if there is
    none, or if several match and their peaks differ.
    """
    rows = read_gpu_table()
    known_words = set().union(*map(row_words, rows))
    asked: set[str] = set()
    for word in split_words(typed.lower().replace("mobile", "laptop")) - {"nvidia"}:
        known = {word, f"{word}gb"} & known_words  # a100 80 means 80gb
        asked.update(known or re.findall(r"[a-z]+|\d+", word))  # RTX4070 -> RTX 4070
    named = {word for word in asked if not MEMORY.fullmatch(word)}
    candidates = [row for row in rows if named and named <= row_words(row)]
    if not candidates:
        raise UserError(f"gpu: {typed!r} is unknown; training/gpus.csv lists the known ones")
    fewest_words = min(len(row_words(row)) for row in candidates)
    candidates = [row for row in candidates if len(row_words(row)) == fewest_words]
    found = [row for row in candidates if asked <= row_words(row)]  # rows with the typed memory
    if not found or len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found}) > 1:
        options = [
            f"--gpu='{short_name(row)} {row['memory_gib']}GB'" for row in found or candidates
        ]
        problem = "is more than one card" if found else "is not known with that memory"
        raise UserError(f"gpu: {typed!r} {problem}; type {' or '.join(options)}")
    return found[0]


def split_words(name: str) -> set[str]:
    name = name.strip().lower()
    name = re.sub(r"(sxm|hbm)\d", "sxm", name)  # the H100 80GB HBM3 is also called H100 SXM
    name = re.sub(r"(\d) +gb\b", r"\1gb", name)  # 10 GB -> 10gb, as row_words() writes it
    return set(re.split(r"[\s,_-]+", name))


def row_words(row: dict[str, str]) -> set[str]:
    """Return the words of a row's name, plus its memory, which distinguishes two RTX 3080s."""
    return split_words(short_name(row)) | {f"{row['memory_gib']}gb"}
