"""
How much GPU memory training takes, and the micro-batch that fits.

The bytes are counted from the tensors that autograd keeps. docs/internals/memory_model.md explains
each number; tests/test_gpus.py checks them on a CPU, and against torch's allocator on simulated
GPUs.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.console import warn
from configurator import Config, config_values, divisors
from model import GPT, GPTConfig
from model_fast import FastConfig, FastGPT, build_model
from train import MOST_CHUNKS, build_optimizer
from training.hardware import WINDOWS_DRIVER

# CUDA's context and its libraries' workspaces: an estimate; torch does not allocate them
CONTEXT_BYTES = 0.55e9
# what the allocator holds beyond its tensors, as a share of them; more without expandable segments
FRAGMENTATION = 0.06 if WINDOWS_DRIVER else 0.01
# both dropout masks of a block, per token and channel; compiled code draws them again instead
DROPOUT_BYTES = 2


@dataclass(frozen=True)
class Kept:
    """What a model keeps in memory until the backward pass."""

    block: int  # values per block, token and channel, without the residual stream
    logit: int  # the most bytes per logit at one time in eager mode
    recomputed: int  # gradients in the block that recompute runs again; values as in `block`


KEPT_BY_GPT2 = Kept(block=14, logit=12, recomputed=4)
KEPT_BY_FAST = Kept(block=16, logit=28, recomputed=8)


def kept_by(model: GPTConfig) -> Kept:
    return KEPT_BY_FAST if isinstance(model, FastConfig) else KEPT_BY_GPT2


def element_bytes(dtype: str) -> int:
    """Bytes of a value in a matmul."""
    return 4 if dtype == "float32" else 2


def stream_bytes(model: GPTConfig, dtype: str, compiled: bool) -> int:
    """Bytes of the residual stream per channel: all that recompute keeps of a block."""
    return 2 if dtype == "bfloat16" and (compiled or isinstance(model, FastConfig)) else 4


@functools.cache
def meta_model(config: GPTConfig) -> GPT | FastGPT:
    """The model without memory: only names and shapes, to read, not to change."""
    with torch.device("meta"):
        return build_model(config)


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    return sum(p.numel() for p in meta_model(config).parameters())


def memory_bytes(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> dict[str, float]:
    """GPU memory that training takes, in bytes, by part. `dtype`: of the matmuls."""
    params = count_parameters(model)
    tokens = batch_size * model.block_size
    # autocast copies each matrix; a tied embedding is the head's matrix too
    modules = meta_model(model).modules()
    others = [module for module in modules if not isinstance(module, nn.Embedding)]
    in_products = sum(p.numel() for m in others for p in m.parameters(recurse=False))
    copies = 0 if dtype == "float32" else 2 * in_products
    if model.recompute:
        copies -= copies_of_other_blocks(model, dtype)
    allocated = dict(
        weights=4 * params + copies,
        gradients=4 * params,
        optimizer=optimizer_bytes(model, tuple(config_values(config).items())),
        activations=activation_bytes(model, tokens, dtype, bool(config.compile)),
        logits=logit_bytes(model, tokens, dtype, bool(config.compile)),
    )
    reserved = FRAGMENTATION * sum(allocated.values())
    if not config.compile:
        # the last logits that are freed leave a gap of their size in the matmuls' dtype
        reserved += element_bytes(dtype) * logits_at_once(model, tokens)
    return allocated | dict(fragmentation=reserved, context=CONTEXT_BYTES)


@functools.cache
def optimizer_bytes(model: GPTConfig, keys: tuple[tuple[str, Any], ...]) -> int:
    """Bytes of the optimizer's state, after one update of tensors without memory."""
    copied, config = copy.deepcopy(meta_model(model)), Config(**dict(keys))
    optimizer = build_optimizer(copied, config, torch.float32)
    for p in copied.parameters():
        p.grad = torch.empty_like(p)
    try:
        optimizer.step()
    except Exception as error:  # some optimizers look at values, which are not there
        warn(f"the memory of optimizer={config.optimizer} is taken for Adam's: {error}")
        return 8 * count_parameters(model)
    state = tree_leaves([*optimizer.state.values()])  # also those in lists
    return sum(t.nbytes for t in state if isinstance(t, Tensor) and t.dim())  # without counters


def copies_of_other_blocks(model: GPTConfig, dtype: str) -> int:
    """Autocast's copies of the matrices of all blocks but one, in bytes."""
    return 0 if dtype == "float32" else 2 * (model.n_layer - 1) * 12 * model.n_embd**2


def activation_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """Bytes that all blocks and the last norm keep; with recompute, at the peak of memory."""
    element, C = element_bytes(dtype), model.n_embd
    stream = stream_bytes(model, dtype, compiled) * C
    block = block_bytes(model, dtype, compiled)
    kept = tokens * model.n_layer * (stream if model.recompute else block)
    # the stream at the last norm, and the head's input
    beside_logits = kept + tokens * (stream + element * C)
    # a token's row of each value embedding, and the values it is added to in two layers
    beside_logits += tokens * getattr(model, "value_tables", 0) * 3 * element * C
    if getattr(model, "bigram_rows", 0) and compiled:
        beside_logits += tokens * element * C  # the stream with the bigram embedding
    if not model.recompute:
        return beside_logits
    if not compiled and 0 < model.loss_chunk < tokens:
        beside_logits += copies_of_other_blocks(model, dtype)  # the forward pass is still running
    # The peak may come later: the logits are freed, but one block is computed again, and there are
    # gradients.
    again = tokens * (block + (kept_by(model).recomputed * element + 2) * C)
    again += 4 * count_parameters(model) if compiled else 4 * element * C**2
    return max(beside_logits, kept + again - logit_bytes(model, tokens, dtype, compiled))


def block_bytes(model: GPTConfig, dtype: str, compiled: bool) -> int:
    """Bytes that one block keeps per token until its backward pass."""
    element = element_bytes(dtype)
    # each of the two norms keeps the residual stream
    per_channel = kept_by(model).block * element + 2 * stream_bytes(model, dtype, compiled)
    if model.dropout and not compiled:
        per_channel += DROPOUT_BYTES
    if getattr(model, "bigram_rows", 0):
        per_channel += element  # keys before and after the key offset
    # two float32 values per norm, one per head
    size = per_channel * model.n_embd + 16 + 4 * model.n_head
    if not model.flash:
        size += (4 if dtype == "float32" else 6) * model.n_head * model.block_size
    return size


def logits_at_once(model: GPTConfig, tokens: int) -> int:
    return min(model.loss_chunk or tokens, tokens) * model.vocab_size


def logit_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """Bytes of the logits, and of the head's gradient if both exist at once."""
    element = element_bytes(dtype)
    logits = logits_at_once(model, tokens)
    head = model.n_embd * model.vocab_size
    chunked = 0 < model.loss_chunk < tokens
    if not compiled:
        return kept_by(model).logit * logits + (4 * head if chunked else 0)
    if not chunked:
        return element * (logits + head)
    # the head's gradient of each chunk; the logits of one chunk, and their gradient
    chunks = -(-tokens // model.loss_chunk)
    most = 2 * logits if chunks <= MOST_CHUNKS else tokens * model.vocab_size
    return element * (most + chunks * head)


def memory_needed(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> float:
    """All parts of memory_bytes() together, in bytes."""
    return sum(memory_bytes(config, model, dtype, batch_size).values())


def fitting_batch(
    config: Config, model: GPTConfig, dtype: str, sequences: int, capacity: float
) -> int | None:
    """
    The largest micro-batch that divides `sequences` and fits into `capacity` bytes. None if not
    even one sequence fits.
    """
    sizes = reversed(divisors(sequences))
    return next((n for n in sizes if memory_needed(config, model, dtype, n) <= capacity), None)


# -----------------------------------------------------------------------------
# On the disk


def checkpoint_bytes(config: Config, model: GPTConfig) -> int:
    """Bytes of a checkpoint: the weights and the optimizer's state."""
    parts = memory_bytes(config, model, "float32", config.batch_size)
    return int(4 * count_parameters(model) + parts["optimizer"])


def checkpoint_files(config: Config) -> int:
    """
    The most checkpoints on the disk at one time: those that are kept, at least two while one is
    being written, and best.pt.
    """
    return max(config.keep_checkpoints, 2) + 1
