"""
Peak speeds and memory of GPUs, from gpus.csv beside this file. Needs no torch.
In the column `source`, "copy" means a copy of a page made in 2025, "recalled" a data sheet that was
not read again. Each peak was recomputed from SMs, clock and FLOPs per clock; FLAG in `note` marks a
difference of more than 3% to the sources. `mfu_percent`: the published MFU of GPT-2 training in
bfloat16, one number or the lowest and highest; `mfu_source`: whose, if plan is to print more than
"published". `link_gbs`: GB/s that each of several GPUs joined by NVLink sends and receives in an
all-reduce; assumed (docs/internals/multi_gpu.md).
"""

import csv
import re
from pathlib import Path

from common.console import UserError

GIB = 2**30
GPU_TABLE = Path(__file__).with_name("gpus.csv")
MEMORY = re.compile(r"\d+gb")  # a word of a name
PEAK_COLUMNS = dict(bfloat16="bf16_tflops", float16="fp16_tflops", float32="fp32_tflops")


def read_gpu_table() -> list[dict[str, str]]:
    with open(GPU_TABLE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def find_row(name: str, sm_count: int | None = None) -> dict[str, str] | None:
    """
    The row of gpus.csv for a device name as torch reports it, or None. Whole names are compared,
    because names contain each other (A10 in A100, 4070 in 4070 Ti). The number of SMs tells apart
    cards that share a name. Another number than the table's means a cut-down or partitioned card,
    whose peak is unknown. So is the peak of a laptop GPU, which depends on its power limit.
    """
    for row in read_gpu_table():
        names = [alias.removeprefix("NVIDIA ") for alias in row["name"].split("|")]
        same_size = not row["sm_count"] or int(row["sm_count"]) == sm_count
        if name.removeprefix("NVIDIA ") in names and same_size and "Laptop" not in name:
            return row
    return None


def row_peak(row: dict[str, str], dtype: str, tf32: bool) -> float | None:
    """
    A row's dense peak for `dtype`, such as "bfloat16", in TFLOP/s. None where it is missing or
    marked UNVERIFIED. With `tf32`, float32 matmuls run at the TF32 rate on cards that have it.
    """
    if "UNVERIFIED" in row["note"]:
        return None
    column = PEAK_COLUMNS[dtype]
    if dtype == "float32" and tf32 and row["tf32_tflops"]:
        column = "tf32_tflops"
    return float(row[column]) if row[column] else None


# -----------------------------------------------------------------------------
# A row by the name that a person types


def short_name(row: dict[str, str]) -> str:
    """The first of a row's names, without the maker: GeForce RTX 4070."""
    return row["name"].partition("|")[0].removeprefix("NVIDIA ")


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    The row of gpus.csv that a person means by "4070", "RTX4070", "a100 sxm4" or "3080 12 GB". Its
    name contains every typed word and the fewest others. Raises UserError if there is none, or if
    there are several whose peaks differ.
    """
    rows = read_gpu_table()
    known_words = set().union(*map(row_words, rows))
    asked: set[str] = set()
    for word in split_words(typed.lower().replace("mobile", "laptop")) - {"nvidia"}:
        known = {word, f"{word}gb"} & known_words  # a100 80 means 80gb
        asked.update(known or re.findall(r"[a-z]+|\d+", word))  # RTX4070 means RTX 4070
    named = {word for word in asked if not MEMORY.fullmatch(word)}
    candidates = [row for row in rows if named and named <= row_words(row)]
    if not candidates:
        raise UserError(
            f"gpu: {typed!r} is not in {GPU_TABLE.name}; python bench.py plan --gpu=all lists its "
            "cards; for another one give plan the pace instead: --iter_seconds=S or --from_run=RUN"
        )
    fewest_words = min(len(row_words(row)) for row in candidates)
    candidates = [row for row in candidates if len(row_words(row)) == fewest_words]
    found = [row for row in candidates if asked <= row_words(row)]  # of the typed memory
    if not found or len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found}) > 1:
        options = [f"'{short_name(row)}, {row['memory_gib']}GB'" for row in found or candidates]
        raise UserError(f"gpu: {typed!r} could be {' or '.join(options)}")
    return found[0]


def split_words(name: str) -> set[str]:
    name = name.strip().lower()
    name = re.sub(r"(sxm|hbm)\d", "sxm", name)  # an H100 SXM is an H100 80GB HBM3
    name = re.sub(r"(\d) +gb\b", r"\1gb", name)  # 10 GB is one word, as row_words() writes it
    return set(re.split(r"[\s,_-]+", name))


def row_words(row: dict[str, str]) -> set[str]:
    """Its name's words and its memory, such as 12gb, which tells two RTX 3080 apart."""
    return split_words(short_name(row)) | {f"{row['memory_gib']}gb"}
