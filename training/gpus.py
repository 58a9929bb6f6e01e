"""
What is known of each GPU: gpus.csv beside this file, every row with its sources; and how much
memory training takes.
"""

import csv
import math
import re
from pathlib import Path

import torch

from common.console import UserError, did_you_mean
from configurator import Config
from model import GPTConfig
from training.build import count_parameters

GPU_TABLE = Path(__file__).with_name("gpus.csv")
USABLE_MEMORY = 0.95  # of a card's memory; the driver, and often a desktop, hold the rest
WORKSPACE_BYTES = 0.6e9  # CUDA context, cuBLAS workspaces, fragments

# -----------------------------------------------------------------------------
# The table


def read_gpu_table() -> list[dict[str, str]]:
    with open(GPU_TABLE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def find_row(name: str, sm_count: int | None = None) -> dict[str, str] | None:
    """
    The row of gpus.csv for a device name as torch gives it: the whole name, less one leading
    "NVIDIA ", since names contain each other (A10 in A100, 4070 in 4070 Ti). The SM count tells
    parts of one name apart; another count is a cut-down or partitioned device, and unknown.
    """
    for row in read_gpu_table():
        names = [alias.removeprefix("NVIDIA ") for alias in row["name"].split("|")]
        if name.removeprefix("NVIDIA ") in names and (
            not row["sm_count"] or int(row["sm_count"]) == sm_count
        ):
            return row
    return None


def resolve_gpu(typed: str) -> dict[str, str]:
    """
    The row of gpus.csv that a person means: "4070", "rtx 4070 super", "a100", "3080 12GB". It is
    the name that has all the words typed and the fewest others. Raises UserError where there is
    none, or where such names have unequal peaks.
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
        names = [
            row["name"].partition("|")[0].lower().removeprefix("nvidia ")
            for row in read_gpu_table()
        ]
        endings = [
            name.split(maxsplit=n)[-1] for name in names for n in range(3)
        ]  # geforce rtx 4070, rtx 4070, 4070
        hint = (
            did_you_mean(typed.strip().lower(), endings)
            or "; write it as it stands there, such as 'RTX 4070'"
        )
        raise UserError(f"gpu: {typed!r} is not in {GPU_TABLE.name}{hint}")
    if len({(row["bf16_tflops"], row["fp16_tflops"]) for row in found.values()}) > 1:
        raise UserError(f"gpu: {typed!r} could be {' or '.join(map(repr, found))}")
    return next(iter(found.values()))


def row_peak(row: dict[str, str], dtype: torch.dtype, tf32: bool) -> float | None:
    """
    A table row's dense peak, TFLOP/s: fp32 products run at the TF32 rate where that is on and the
    card has it.
    """
    if "UNVERIFIED" in row["note"].replace(
        "spelling UNVERIFIED", ""
    ):  # a doubt about an alias is none about the peak
        return None
    columns = {torch.bfloat16: ["bf16_tflops"], torch.float16: ["fp16_tflops"]}.get(
        dtype, ["fp32_tflops"]
    )
    if dtype == torch.float32 and tf32:
        columns.insert(0, "tf32_tflops")
    return next((float(row[column]) for column in columns if row[column]), None)


# -----------------------------------------------------------------------------
# Memory


def memory_bytes(
    model: GPTConfig, batch_size: int, dtype: torch.dtype, compiled: bool, optimizer: str = "adamw"
) -> dict[str, float]:
    """
    Memory that training with accumulated gradients takes, bytes by part: a model, counted from what
    autograd keeps until the backward pass, per token and with C = n_embd. Under autocast a block
    keeps, in bytes, the residual stream at both norms 8C, the norms' outputs 4C, q, k, v 6C,
    attention's output 2C, the MLP's hidden layer before and after GELU 16C, sum 36C; in float32
    64C; and two numbers per norm and one per head in float32. The plain attention formula keeps its
    T x T weights too, under CUDA's autocast in float32 and in bfloat16 (under a CPU's in bfloat16
    alone). A logit takes three float32 numbers in eager mode, when the loss's backward pass turns
    the gradient of its log-softmax into its own; compiled code writes the gradient over the logit
    itself, and then makes that of the head's weights. With loss_chunk there are logits of so many
    tokens only. With recompute only the stream at each block's entry is kept; once the logits are
    gone, one block's part is there again, with the gradients in its MLP and of its matrices
    (compiled code hands over those of all matrices at the end). On the CPU all this equals the
    tensors alive at the peak; with fewer tokens in a micro-batch than channels the peak comes later
    and is higher, when the gradients of a tied table are summed. The fast model's numbers are
    measured there: its rotations and norms run in float32, and so does its logits' cap, in four
    steps.
    """
    n, in_products = count_parameters(model)
    C, T, half, fast = model.n_embd, model.block_size, dtype != torch.float32, model.model == "fast"
    block = ((50 if half else 76) if fast else (36 if half else 64)) * C + 16 + 4 * model.n_head
    if model.dropout:
        block += 2 * C  # a mask of one byte after each half
    if not model.flash:
        block += (6 if half else 4) * model.n_head * T
    tokens, element = batch_size * T, 2 if half else 4
    at_once = min(tokens, model.loss_chunk or tokens)
    head_gradient = element * C if compiled or at_once < tokens else 0  # while logits are alive
    logits = (
        (element if compiled else 28 if fast else 12) * at_once + head_gradient
    ) * model.vocab_size
    activations = tokens * (
        model.n_layer * (4 * C if model.recompute else block) + (6 if half else 8) * C
    )  # and the last norm
    if model.recompute:
        in_products -= (
            (model.n_layer - 1) * 12 * C**2
        )  # autocast's copies for the other blocks are gone
        passing = (
            (28 if half else 47) if fast else (10 if half else 16)
        ) * C  # gradients in the MLP
        one_block = tokens * (block + passing) + (4 * n if compiled else 4 * element * C**2)
        activations = max(activations, tokens * model.n_layer * 4 * C + one_block - logits)
    return dict(
        weights=4 * n + (2 * in_products if half else 0),  # float32, and autocast's copy
        gradients=4 * n,
        optimizer=8 * n
        - (
            4 * 12 * model.n_layer * C**2 if optimizer == "muon" else 0
        ),  # Adam's two moments, Muon's one
        activations=activations,
        logits=logits,
        workspace=WORKSPACE_BYTES,
    )


def fitting_batch(
    model: GPTConfig,
    sequences: int,
    capacity: float,
    dtype: torch.dtype,
    compiled: bool,
    optimizer: str = "adamw",
) -> int | None:
    """
    The largest micro-batch that divides `sequences` and fits into `capacity` bytes; None where not
    even 1 does.
    """
    sizes = [b for b in range(1, sequences + 1) if sequences % b == 0]
    needed = {b: sum(memory_bytes(model, b, dtype, compiled, optimizer).values()) for b in sizes}
    return max((b for b in needed if needed[b] <= capacity), default=None)


def out_of_memory_advice(
    config: Config, model: GPTConfig, dtype: torch.dtype, capacity: float, world_size: int = 1
) -> str:
    """
    What to say where the config's micro-batch did not fit into `capacity` bytes: the pair with the
    same tokens that does.
    """
    sequences = config.iter_sequences // world_size  # of one process
    smaller = [b for b in range(1, config.batch_size) if sequences % b == 0]
    if not smaller:
        recompute = "" if model.recompute else "--recompute=True, "
        return f"out of memory with batch_size=1; {recompute}a smaller --block_size or model, or --dtype=bfloat16, needs less"
    b = min(
        fitting_batch(model, sequences, capacity, dtype, config.compile, config.optimizer) or 1,
        smaller[-1],
    )
    needed = sum(memory_bytes(model, b, dtype, config.compile, config.optimizer).values())
    return (
        f"out of memory with batch_size={config.batch_size}; the same tokens per iteration in about {needed / 1e9:.1f} GB: "
        f"--batch_size={b} --gradient_accumulation_steps={sequences // b * world_size}"
    )
