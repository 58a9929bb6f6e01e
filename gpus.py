"""
What is known of each GPU: gpus.csv beside this file, every row with its sources.
"""

import csv
import math
import re
from pathlib import Path

import torch

from configurator import UserError

GPU_TABLE = Path(__file__).with_name("gpus.csv")


def read_gpu_table() -> list[dict[str, str]]:
    with open(GPU_TABLE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def find_row(name: str, sm_count: int | None = None) -> dict[str, str] | None:
    """
    The row of gpus.csv for a device name as torch gives it: the whole name, less one leading "NVIDIA ", since names
    contain each other (A10 in A100, 4070 in 4070 Ti). The SM count tells parts of one name apart; another count is a
    cut-down or partitioned device, and unknown.
    """
    for row in read_gpu_table():
        names = [alias.removeprefix("NVIDIA ") for alias in row["name"].split("|")]
        if name.removeprefix("NVIDIA ") in names and (not row["sm_count"] or int(row["sm_count"]) == sm_count):
            return row
    return None


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    The row of gpus.csv that a person means: "4070", "rtx 4070 super", "a100", "3080 12GB". It is the name that has all
    the words typed and the fewest others. Raises UserError where there is none, or where such names have unequal peaks.
    """
    words = set(re.split(r"[\s_-]+", typed.strip().lower())) - {"nvidia"}
    found: dict[str, dict[str, str]] = {}
    fewest = math.inf
    for row in read_gpu_table():
        name = row["name"].partition("|")[0].removeprefix("NVIDIA ")
        name_words, memory = set(re.split(r"[\s_-]+", name.lower())), f"{row['memory_gib']}gb"
        others = len(name_words - words - {memory})
        if words and words <= name_words | {memory} and others <= fewest:
            found = (found if others == fewest else {}) | {f"{name}, {row['memory_gib']}GB": row}
            fewest = others
    if not found:
        raise UserError(f"gpu: {typed!r} is not in {GPU_TABLE.name}; write it as it stands there, such as 'RTX 4070'")
    if len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found.values()}) > 1:
        raise UserError(f"gpu: {typed!r} could be {' or '.join(map(repr, found))}")
    return next(iter(found.values()))


def row_peak(row: dict[str, str], dtype: torch.dtype, tf32: bool) -> float | None:
    """A table row's dense peak, TFLOP/s: fp32 products run at the TF32 rate where that is on and the card has it."""
    if "UNVERIFIED" in row["note"].replace("spelling UNVERIFIED", ""):  # a doubt about an alias is none about the peak
        return None
    columns = {torch.bfloat16: ["bf16_tflops"], torch.float16: ["fp16_tflops"]}.get(dtype, ["fp32_tflops"])
    if dtype == torch.float32 and tf32:
        columns.insert(0, "tf32_tflops")
    return next((float(row[column]) for column in columns if row[column]), None)
