"""The cards of training/gpus.csv by the names that people type. Needs no torch."""

import re

from common.console import UserError
from training.gpus import GPU_TABLE, read_gpu_table


def short_name(row: dict[str, str]) -> str:
    """The first of a row's names, without the maker: GeForce RTX 4070."""
    return row["name"].partition("|")[0].removeprefix("NVIDIA ")


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    The row of gpus.csv that a person means by "4070", "RTX4070", "a100 sxm4" or "3080 12GB". Its
    name contains every typed word and the fewest others. Raises UserError if there is none, or if
    there are several whose peaks differ.
    """
    rows = read_gpu_table()
    known_words = set().union(*map(row_words, rows))
    asked: set[str] = set()
    for word in split_words(typed.lower().replace("mobile", "laptop")) - {"nvidia"}:
        known = {word, f"{word}gb"} & known_words  # a100 80 means 80gb
        asked.update(known or re.findall(r"[a-z]+|\d+", word))  # RTX4070 means RTX 4070
    candidates = [row for row in rows if asked and asked <= row_words(row)]
    if not candidates:
        hint = "python bench.py plan --gpu=all lists its cards"
        hint += "; for another one plan takes --iter_seconds or --from_run"
        raise UserError(f"gpu: {typed!r} is not in {GPU_TABLE.name}; {hint}")
    fewest_words = min(len(row_words(row)) for row in candidates)
    found = [row for row in candidates if len(row_words(row)) == fewest_words]
    if len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found}) > 1:
        options = [f"'{short_name(row)}, {row['memory_gib']}GB'" for row in found]
        raise UserError(f"gpu: {typed!r} could be {' or '.join(options)}")
    return found[0]


def split_words(name: str) -> set[str]:
    name = re.sub(r"(sxm|hbm)\d", "sxm", name.strip().lower())  # an H100 SXM is an H100 80GB HBM3
    return set(re.split(r"[\s,_-]+", name))


def row_words(row: dict[str, str]) -> set[str]:
    """Its name's words and its memory, such as 12gb, which tells two RTX 3080 apart."""
    return split_words(short_name(row)) | {f"{row['memory_gib']}gb"}
