"""
Peak speeds and memory of GPUs, from gpus.csv beside this file. Needs no torch.
In the column `source`, "copy" means a copy of a page made in 2025, "recalled" a data sheet that was
not read again. Each peak was recomputed from SMs, clock and FLOPs per clock; FLAG in `note` marks a
difference of more than 3% to the sources. `link_gbs`: GB/s that each of several GPUs joined by
NVLink sends and receives in an all-reduce; assumed (docs/internals/multi_gpu.md).
"""

import csv
from pathlib import Path

GIB = 2**30
GPU_TABLE = Path(__file__).with_name("gpus.csv")
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
