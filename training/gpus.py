"""
Peak speeds and memory of GPUs, from gpus.csv beside this file, and how much memory training takes.
"""

import csv
import re
from pathlib import Path

import torch

from common.console import UserError
from configurator import Config, divisors
from model import GPTConfig
from training.build import count_parameters

GPU_TABLE = Path(__file__).with_name("gpus.csv")

# The memory model. docs/memory.md explains each number; tests/test_gpus.py checks them on a CPU.
# `half` in the keys below: matrix products run in bfloat16 or float16.

# the driver needs the rest of a card's memory; a desktop, which needs more, is not modelled
USABLE_MEMORY = 0.95
# CUDA context, cuBLAS workspaces and fragmentation
WORKSPACE_BYTES = 0.6e9
# kept until the backward pass, per token and channel of a block, by (model, half)
BLOCK_BYTES = {("gpt2", True): 36, ("gpt2", False): 64, ("fast", True): 48, ("fast", False): 72}
# compiled code computes the fast model's rotations again
COMPILED_BLOCK_BYTES = BLOCK_BYTES | {("fast", True): 36}
# the most that lives for one logit in eager mode, by model; compiled code keeps the logit alone
LOGIT_BYTES = {"gpt2": 12, "fast": 28}
# the same where the loss is made in chunks with its gradients, by (model, half)
CHUNKED_BYTES = {("gpt2", True): 10, ("gpt2", False): 8, ("fast", True): 18, ("fast", False): 16}
# the residual stream at a block's entry, per token and channel: all that recompute keeps of a block
STREAM_BYTES = 4
# the last norm and the head's input, per token and channel, by half
LAST_NORM_BYTES = {True: 6, False: 8}
# both dropout masks of a block in eager mode, per token and channel; compiled code draws them again
DROPOUT_BYTES = 2
# plain attention's weights, per head and pair of tokens, by half
ATTENTION_BYTES = {True: 6, False: 4}
# gradients inside the block that recompute runs again, per token and channel, by (model, half)
RECOMPUTE_BYTES = {("gpt2", True): 10, ("gpt2", False): 16, ("fast", True): 18, ("fast", False): 34}

# -----------------------------------------------------------------------------
# The table


def read_gpu_table() -> list[dict[str, str]]:
    with open(GPU_TABLE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def short_name(row: dict[str, str]) -> str:
    """The first of a row's names, without the maker: GeForce RTX 4070."""
    return row["name"].partition("|")[0].removeprefix("NVIDIA ")


def find_row(name: str, sm_count: int | None = None) -> dict[str, str] | None:
    """
    The row of gpus.csv for a device name as torch reports it, or None. Whole names are compared,
    because names contain each other (A10 in A100, 4070 in 4070 Ti). The number of SMs tells apart
    cards that share a name. A number that the table lacks means a cut-down or partitioned card,
    whose peak is unknown.
    """
    for row in read_gpu_table():
        names = [alias.removeprefix("NVIDIA ") for alias in row["name"].split("|")]
        same_size = not row["sm_count"] or int(row["sm_count"]) == sm_count
        if name.removeprefix("NVIDIA ") in names and same_size:
            return row
    return None


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    The row of gpus.csv that a person means by "4070", "RTX4070", "a100 sxm4" or "3080 12GB". Its
    name contains every typed word and the fewest others. Raises UserError if there is none, or if
    there are several whose peaks differ.
    """
    rows = read_gpu_table()
    known_words = set().union(*map(row_words, rows))
    asked = set()
    for word in split_words(typed) - {"nvidia"}:
        if word in known_words:
            asked.add(word)
        else:
            asked.update(re.findall(r"[a-z]+|\d+", word))  # RTX4070 means RTX 4070
    candidates = [row for row in rows if asked and asked <= row_words(row)]
    if not candidates:
        hint = "--gpu=all lists it; for another card give --iter_seconds or --from_run"
        raise UserError(f"gpu: {typed!r} is not in {GPU_TABLE.name}; {hint}")
    fewest_words = min(len(row_words(row)) for row in candidates)
    found = [row for row in candidates if len(row_words(row)) == fewest_words]
    if len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found}) > 1:
        options = [f"'{short_name(row)}, {row['memory_gib']}GB'" for row in found]
        raise UserError(f"gpu: {typed!r} could be {' or '.join(options)}")
    return found[0]


def split_words(name: str) -> set[str]:
    return set(re.split(r"[\s_-]+", name.strip().lower()))


def row_words(row: dict[str, str]) -> set[str]:
    """Its name's words and its memory, such as 12gb, which tells two RTX 3080 apart."""
    return split_words(short_name(row)) | {f"{row['memory_gib']}gb"}


def row_peak(row: dict[str, str], dtype: torch.dtype, tf32: bool) -> float | None:
    """
    A row's dense peak for `dtype` in TFLOP/s. None where it is missing or marked UNVERIFIED. With
    `tf32`, float32 products run at the TF32 rate on cards that have it.
    """
    # "spelling UNVERIFIED" doubts the card's name, not its peak
    if "UNVERIFIED" in row["note"].replace("spelling UNVERIFIED", ""):
        return None
    if dtype == torch.bfloat16:
        peak = row["bf16_tflops"]
    elif dtype == torch.float16:
        peak = row["fp16_tflops"]
    elif tf32 and row["tf32_tflops"]:
        peak = row["tf32_tflops"]
    else:
        peak = row["fp32_tflops"]
    return float(peak) if peak else None


# -----------------------------------------------------------------------------
# Memory


def memory_bytes(
    model: GPTConfig, batch_size: int, dtype: torch.dtype, compiled: bool, optimizer: str = "adamw"
) -> dict[str, float]:
    """
    GPU memory that training takes, in bytes, by part. It is counted from the tensors that autograd
    keeps, not measured on a GPU; docs/memory.md has the derivation.
    """
    params, in_products = count_parameters(model)
    half = dtype != torch.float32
    element = 2 if half else 4
    C = model.n_embd
    tokens = batch_size * model.block_size
    matrices_of_a_block = 12 * C**2

    # autocast keeps a copy of each matrix; with recompute only of one block's at a time
    copied = in_products
    if model.recompute:
        copied -= (model.n_layer - 1) * matrices_of_a_block
    # Adam keeps two moments of each parameter, Muon only one of each matrix
    moments = 2 * params
    if optimizer == "muon":
        moments -= model.n_layer * matrices_of_a_block

    # per id of the vocabulary: its logits, and beside them the gradient of its row of the head
    chunk = model.loss_chunk
    if 0 < chunk < tokens and compiled:
        logits = 2 * element * chunk + (10 if half else 4) * C
    elif 0 < chunk < tokens:
        logits = CHUNKED_BYTES[model.model, half] * chunk + 4 * C
    elif compiled:
        logits = element * (tokens + C)
    else:
        logits = LOGIT_BYTES[model.model] * tokens
    logits *= model.vocab_size

    block = block_bytes(model, half, compiled)
    kept_of_a_block = STREAM_BYTES * C if model.recompute else block
    activations = tokens * (model.n_layer * kept_of_a_block + LAST_NORM_BYTES[half] * C)
    # a token's row of each table, and the values it is added to in two layers
    activations += tokens * model.value_tables * 3 * element * C
    if model.bigram_rows and compiled:
        activations += tokens * element * C  # the stream with token pairs
    if model.recompute:
        # The peak may come later: the logits are gone, but one block is computed again, and
        # gradients exist beside it.
        again = tokens * (block + RECOMPUTE_BYTES[model.model, half] * C)
        again += 4 * params if compiled else 4 * element * C**2
        activations = max(activations, tokens * model.n_layer * kept_of_a_block + again - logits)
    return dict(
        weights=4 * params + (2 * copied if half else 0),
        gradients=4 * params,
        optimizer=4 * moments,
        activations=activations,
        logits=logits,
        workspace=WORKSPACE_BYTES,
    )


def block_bytes(model: GPTConfig, half: bool, compiled: bool) -> int:
    """What one block keeps of a token until its backward pass, in bytes."""
    kept = COMPILED_BLOCK_BYTES if compiled else BLOCK_BYTES
    per_channel = kept[model.model, half]
    if model.dropout and not compiled:
        per_channel += DROPOUT_BYTES
    if model.bigram_rows:
        per_channel += 2 if half else 4  # keys before and after their offset
    # two float32 numbers for each of the two norms, one for each head
    size = per_channel * model.n_embd + 16 + 4 * model.n_head
    if not model.flash:
        size += ATTENTION_BYTES[half] * model.n_head * model.block_size
    return size


def memory_needed(config: Config, model: GPTConfig, dtype: torch.dtype, batch_size: int) -> float:
    """All parts of memory_bytes() together, in bytes."""
    parts = memory_bytes(model, batch_size, dtype, config.compile, config.optimizer)
    return sum(parts.values())


def fitting_batch(
    config: Config, model: GPTConfig, dtype: torch.dtype, sequences: int, capacity: float
) -> int | None:
    """
    The largest micro-batch that divides `sequences` and fits into `capacity` bytes. None where not
    even one sequence fits.
    """
    sizes = reversed(divisors(sequences))
    return next((n for n in sizes if memory_needed(config, model, dtype, n) <= capacity), None)


def out_of_memory_advice(
    config: Config, model: GPTConfig, dtype: torch.dtype, capacity: float, world_size: int = 1
) -> str:
    """
    The error line for a micro-batch that did not fit into `capacity` bytes. It names a smaller
    micro-batch that does, at the same tokens per iteration.
    """
    sequences = config.iter_sequences // world_size  # of one process
    smaller = [n for n in divisors(sequences) if n < config.batch_size]
    if not smaller:
        recompute = "" if model.recompute else "--recompute=True, "
        smaller_run = f"{recompute}a smaller --block_size or model, or --dtype=bfloat16, needs less"
        return f"out of memory with batch_size=1; {smaller_run}"
    fits = fitting_batch(config, model, dtype, sequences, capacity)
    batch_size = min(fits or 1, smaller[-1])
    gigabytes = f"{memory_needed(config, model, dtype, batch_size) / 1e9:.1f} GB"
    accumulation = sequences // batch_size * world_size
    pair = f"--batch_size={batch_size} --gradient_accumulation_steps={accumulation}"
    fitting = f"the same tokens per iteration in about {gigabytes}: {pair}"
    return f"out of memory with batch_size={config.batch_size}; {fitting}"
