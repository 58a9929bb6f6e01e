"""
Estimate how much GPU memory training takes, and which micro-batch fits.

The estimate counts the tensors that autograd keeps. docs/internals/memory_model.md explains each
number; tests/test_gpus.py checks them on a CPU, and against torch's allocator on simulated GPUs.
"""

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.console import say, warn
from configurator import Config, micro_batches, with_batch
from model import GPT, MOST_CHUNKS, GPTConfig, chunk_size
from model_fast import FastConfig, FastGPT, build_model, model_config
from optimizer import build_optimizer
from training.gpus import GIB
from training.hardware import WINDOWS_DRIVER, Hardware

# estimated size of CUDA's context and its libraries' workspaces, which torch does not allocate
CONTEXT_BYTES = 0.55e9
# Memory that the allocator holds beyond its tensors, as a fraction of them. It is higher without
# expandable segments, which Windows' driver lacks.
FRAGMENTATION = 0.06 if WINDOWS_DRIVER else 0.01
# The fraction of a GPU's memory that a run can use. The driver and a desktop need some, and torch
# reports less than the data sheet, especially with ECC (14.6 of 16 GiB on a T4).
USABLE_MEMORY = 0.9
# The fraction of a GPU's memory that a run fills if it chooses its micro-batch. A browser or a game
# that is opened later must not end the run. On 12 GB, the fast recipe leaves 5 GiB with 8 sequences
# and 2.3 GiB with 16, and nobody has measured that 16 is faster there.
CHOSEN_MEMORY = 0.75
MICRO_BATCH = 8  # the largest micro-batch that a run without CUDA chooses
# A block's two dropout masks, per token and channel. Compiled code keeps none and draws them again.
DROPOUT_BYTES = 2


@dataclass(frozen=True)
class Kept:
    """Counts what a model keeps in memory until the backward pass."""

    block: int  # values per block, token and channel, without the residual stream
    logit: int  # peak bytes per logit in eager mode


KEPT_BY_GPT2 = Kept(block=14, logit=12)
KEPT_BY_FAST = Kept(block=16, logit=28)


def kept_by(model: GPTConfig) -> Kept:
    return KEPT_BY_FAST if isinstance(model, FastConfig) else KEPT_BY_GPT2


def element_bytes(dtype: str) -> int:
    """Return the bytes per value in a matmul of this dtype."""
    return 4 if dtype == "float32" else 2


def stream_bytes(model: GPTConfig, dtype: str, compiled: bool) -> int:
    """Return the residual stream's bytes per token and channel."""
    return 2 if dtype == "bfloat16" and (compiled or isinstance(model, FastConfig)) else 4


@functools.cache
def meta_model(config: GPTConfig) -> GPT | FastGPT:
    """Build the model on the meta device: only names and shapes. It is cached; do not change it."""
    with torch.device("meta"):
        return build_model(config)


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    return sum(p.numel() for p in meta_model(config).parameters())


@functools.cache
def count_trained(config: GPTConfig) -> int:
    """Count the parameters that are not frozen. Only these have gradients and optimizer state."""
    return sum(p.numel() for p in meta_model(config).parameters() if p.requires_grad)


def memory_bytes(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> dict[str, float]:
    """
    Return the bytes of GPU memory that training takes, by part. `dtype` is the matmuls' dtype, such
    as "bfloat16". docs/internals/memory_model.md derives each part.
    """
    params = count_parameters(model)
    tokens = batch_size * model.block_size
    # Autocast copies the matrices of matmuls, so no embedding is copied unless tied to the head.
    modules = meta_model(model).modules()
    others = [module for module in modules if not isinstance(module, nn.Embedding)]
    in_products = sum(p.numel() for m in others for p in m.parameters(recurse=False))
    copies = 0 if dtype == "float32" else 2 * in_products
    allocated = dict(
        weights=4 * params + copies,
        gradients=4 * count_trained(model),
        optimizer=optimizer_bytes(model, config),
        activations=activation_bytes(model, tokens, dtype, config.compile),
        logits=logit_bytes(model, tokens, dtype, config.compile),
    )
    reserved = FRAGMENTATION * sum(allocated.values())
    if not config.compile:
        # The logits that are freed last leave a gap, of the size that logits have in the matmuls'
        # dtype.
        reserved += element_bytes(dtype) * logits_at_once(model, tokens, compiled=False)
    return allocated | dict(fragmentation=reserved, context=CONTEXT_BYTES)


@functools.cache
def optimizer_bytes(model: GPTConfig, config: Config) -> int:
    """Return the bytes of the optimizer's state, found by one update on the meta device."""
    copied = copy.deepcopy(meta_model(model))
    optimizer = build_optimizer(copied, config, torch.float32)
    for p in copied.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:  # some optimizers read values, which meta tensors do not have
        warn(f"optimizer={config.optimizer}: its memory is unknown, so Adam's is assumed: {error}")
        return 8 * count_trained(model)
    state = tree_leaves([*optimizer.state.values()])  # tree_leaves also finds tensors in lists
    return sum(t.nbytes for t in state if isinstance(t, Tensor) and t.dim())  # skip step counters


def activation_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """Return the bytes that all blocks and the last norm keep until the backward pass."""
    stream = stream_bytes(model, dtype, compiled) * model.n_embd
    kept = model.n_layer * block_bytes(model, dtype, compiled)
    # add the stream at the last norm, and the head's input
    return tokens * (kept + stream + element_bytes(dtype) * model.n_embd)


def block_bytes(model: GPTConfig, dtype: str, compiled: bool) -> int:
    """Return the bytes that one block keeps per token until its backward pass."""
    element = element_bytes(dtype)
    # each of the two norms keeps the residual stream
    per_channel = kept_by(model).block * element + 2 * stream_bytes(model, dtype, compiled)
    if model.dropout and not compiled:
        per_channel += DROPOUT_BYTES
    # add two float32 values for each norm, and one for each head
    size = per_channel * model.n_embd + 16 + 4 * model.n_head
    if not model.flash:
        size += (4 if dtype == "float32" else 6) * model.n_head * model.block_size
    return size


def logits_at_once(model: GPTConfig, tokens: int, compiled: bool) -> int:
    return chunk_size(model.loss_chunk, tokens, compiled) * model.vocab_size


def logit_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """Return the bytes of the logits, plus the head's gradient if both exist at once."""
    element = element_bytes(dtype)
    chunk = chunk_size(model.loss_chunk, tokens, compiled)
    logits = logits_at_once(model, tokens, compiled)
    head = model.n_embd * model.vocab_size
    chunked = chunk < tokens
    if not compiled:
        return kept_by(model).logit * logits + (4 * head if chunked else 0)
    if not chunked:
        return element * (logits + head)
    # count one chunk's logits and their gradient, and the head's gradient of every chunk
    chunks = -(-tokens // chunk)
    most = 2 * logits if chunks <= MOST_CHUNKS else tokens * model.vocab_size
    return element * (most + chunks * head)


def memory_needed(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> float:
    """Return the sum of all parts of memory_bytes(), in bytes."""
    return sum(memory_bytes(config, model, dtype, batch_size).values())


def choose_batch(c: Config, model: GPTConfig, dtype: str, processes: int, memory: float) -> int:
    """
    Return the largest micro-batch, up to batch_size, with which a run takes at most `memory` bytes
    of each GPU; without a GPU (0 bytes) the largest up to MICRO_BATCH. Returns 1 even if one
    sequence does not fit, because the estimate may be too high.
    """
    sizes = micro_batches(c, processes)
    if not memory:
        return max(n for n in sizes if n <= MICRO_BATCH)
    return max((n for n in sizes if memory_needed(c, model, dtype, n) <= memory), default=1)


def fit_batch(c: Config, vocab: int, hw: Hardware, world_size: int, weights: dict | None) -> Config:
    """
    Return the config with the micro-batch that fits this device. A run with an exact batch that can
    be divided among its processes keeps it. Only the size of the GPU counts, not what is free now,
    so that each start on a card, and each rank, chooses alike.
    """
    if not c.tokens_per_iter and c.gradient_accumulation_steps % world_size == 0:
        return c
    is_gpu = hw.device.type == "cuda"
    memory = CHOSEN_MEMORY * torch.cuda.mem_get_info(hw.device)[1] if is_gpu else 0.0
    size = choose_batch(c, model_config(c, vocab, weights), hw.dtype_name, world_size, memory)
    limit = f"to fit {memory / GIB:.1f} GiB" if is_gpu else "without CUDA"
    say(f"batch_size: {size} of at most {c.batch_size} sequences, {limit}")
    return with_batch(c, size)


# -----------------------------------------------------------------------------
# On the disk


def checkpoint_bytes(config: Config, model: GPTConfig) -> int:
    """Return the bytes of a checkpoint: the weights and the optimizer's state."""
    return 4 * count_parameters(model) + optimizer_bytes(model, config)
