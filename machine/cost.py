"""
Say what training a model costs: its parameters, FLOPs, GPU memory and checkpoints; and choose a
micro-batch that fits.
"""

import copy
import functools
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.console import one_line, short, warn
from common.process import is_main
from configurator import NANOGPT_BATCH, Config
from machine.gpus import GIB
from machine.hardware import WINDOWS_DRIVER
from model import GPT, MOST_CHUNKS, GPTConfig, chunk_size
from model_fast import FastConfig, FastGPT, build_model, config_to_dict
from optimizer import build_optimizer

# estimated size of CUDA's context and its libraries' workspaces, which torch does not allocate
CONTEXT_BYTES = 0.55e9
# Memory that the allocator holds beyond its tensors, as a fraction of them. It is higher without
# the expandable segments that common/environment.py turns on.
FRAGMENTATION = 0.06 if WINDOWS_DRIVER else 0.01
# The fraction of a GPU's memory that a run can use. The driver and a desktop need some, and torch
# reports less than the data sheet, especially with ECC (14.6 of 16 GiB on a T4).
USABLE_MEMORY = 0.9
# The fraction of a GPU's memory that a run fills if it chooses its micro-batch. A browser or a game
# that is opened later must not end the run. On 12 GB, the fast recipe leaves 5 GiB with 8 sequences
# and 2.3 GiB with 16, and nobody has measured that 16 is faster there.
CHOSEN_MEMORY = 0.75


# -----------------------------------------------------------------------------
# Parameters and FLOPs


@functools.cache
def meta_model(sizes: GPTConfig) -> GPT | FastGPT:
    """Build the model on the meta device: only names and shapes. It is cached; do not change it."""
    with torch.device("meta"):
        return build_model(sizes)


@functools.cache
def count_parameters(sizes: GPTConfig) -> int:
    return sum(p.numel() for p in meta_model(sizes).parameters())


@functools.cache
def count_trained(sizes: GPTConfig) -> int:
    """Count the parameters that are not frozen. Only these have gradients and optimizer state."""
    return sum(p.numel() for p in meta_model(sizes).parameters() if p.requires_grad)


@functools.cache
def count_flops(sizes: GPTConfig) -> float | None:
    """
    Return the FLOPs of training on one token, by running one sequence forward and backward without
    data or memory; None if the model does not run on fake tensors. torch counts all matmuls, and
    attention as if it had no mask. For GPT-2 the result is the PaLM paper's 6 N + 12 L H Q T
    (appendix B) without the norms.
    """
    # imported lazily: FakeTensorMode imports torch's compiler, which takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    try:
        # fake tensors need no memory; torch cannot count FLOPs of the CPU's fused attention
        with FakeTensorMode():
            model = build_model(replace(sizes, loss_chunk="off"))
            idx = torch.zeros(1, sizes.block_size, dtype=torch.long)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                torch.autograd.backward(model(idx, idx))
    except Exception:  # a modified model can raise anything
        return None
    return counter.get_total_flops() / sizes.block_size


def describe(model, vocab: int) -> str:
    """
    Describe a model: its file, which is where to edit its layers, its size and its FLOPs. `vocab`
    is the vocabulary size before padding.
    """
    kind = config_to_dict(model.config)["model"]
    parameters = sum(p.numel() for p in model.parameters())
    rows, flops = model.config.vocab_size, count_flops(model.config)
    vocabulary = f"vocabulary {vocab}" if rows == vocab else f"vocabulary {vocab}, padded to {rows}"
    work = "FLOPs not known, because it does not run on fake tensors"
    if flops:
        work = f"{short(flops)} FLOPs per token, counted by PyTorch"
    name = f"{kind} ({type(model).__module__}.py), {parameters / 1e6:.2f}M parameters"
    return f"model: {name}, {vocabulary}, {work}"


# -----------------------------------------------------------------------------
# Memory


def memory_bytes(c: Config, sizes: GPTConfig, batch_size: int) -> dict[str, float]:
    """
    Return the bytes of GPU memory that training takes at its peak, by part. The config's dtype must
    not be auto. The estimate counts the tensors that autograd keeps.
    tests/test_gpus.py checks it on a CPU, and against torch's allocator on simulated GPUs
    (docs/internals/memory_model.md).
    """
    is_fast, compiled, dtype = isinstance(sizes, FastConfig), c.compile, c.dtype
    tokens = batch_size * sizes.block_size
    value = 4 if dtype == "float32" else 2  # bytes of a value in a matmul
    # Bytes of a value in the residual stream that a norm keeps. CUDA's autocast converts the input
    # of GPT-2's eager norms to float32.
    stream = 2 if dtype == "bfloat16" and (compiled or is_fast) else 4

    # Autocast copies the matrices of matmuls, so no embedding is copied unless tied to the head.
    others = [m for m in meta_model(sizes).modules() if not isinstance(m, nn.Embedding)]
    in_matmuls = sum(p.numel() for m in others for p in m.parameters(recurse=False))
    copies = 0 if dtype == "float32" else 2 * in_matmuls

    # What a block keeps of each token until its backward pass: the outputs of both norms, q, k and
    # v, attention's output, and the MLP's hidden layer before and after the activation
    values = 2 + 3 + 1 + 4 + 4
    if is_fast:
        values += 2  # q and k after norm and rotation
    channel = values * value + 2 * stream  # each of the two norms keeps the residual stream
    if sizes.dropout and not compiled:
        channel += 2  # two masks of one byte; compiled code keeps none and draws them again
    # add two float32 values for each norm, and one for each head
    block = channel * sizes.n_embd + 16 + 4 * sizes.n_head
    if not sizes.flash:
        block += (4 if dtype == "float32" else 6) * sizes.n_head * sizes.block_size
    # The last norm keeps the residual stream, and the head its input.
    last = (stream + value) * sizes.n_embd

    # The loss of one chunk of tokens: its logits, what is computed from them, and the gradients of
    # logits and head
    chunk = chunk_size(sizes.loss_chunk, tokens, compiled)
    chunks = -(-tokens // chunk)
    logits = chunk * sizes.vocab_size
    head = sizes.n_embd * sizes.vocab_size
    if not compiled:
        per_logit = 28 if is_fast else 12  # the fast model caps them, in float32
        loss = per_logit * logits + (4 * head if chunks > 1 else 0)
    elif chunks == 1:
        loss = value * (logits + head)  # each logit is overwritten with its gradient
    else:  # the head's gradient of every chunk is kept until all are added
        most = 2 * logits if chunks <= MOST_CHUNKS else tokens * sizes.vocab_size
        loss = value * (most + chunks * head)

    allocated = dict(
        weights=4 * count_parameters(sizes) + copies,
        gradients=4 * count_trained(sizes),
        optimizer=optimizer_bytes(c, sizes),
        activations=tokens * (sizes.n_layer * block + last),
        logits=loss,
    )
    reserved = FRAGMENTATION * sum(allocated.values())
    if not compiled:
        reserved += value * logits  # the logits that are freed last leave a gap
    return allocated | dict(fragmentation=reserved, context=CONTEXT_BYTES)


@functools.cache
def optimizer_bytes(c: Config, sizes: GPTConfig) -> int:
    """Return the bytes of the optimizer's state, found by one update on the meta device."""
    copied = copy.deepcopy(meta_model(sizes))
    optimizer = build_optimizer(copied, c, torch.float32)
    for p in copied.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:  # some optimizers read values, which meta tensors do not have
        warn(f"optimizer={c.optimizer}: its memory is unknown, so Adam's is assumed: {error}")
        return 8 * count_trained(sizes)
    state = tree_leaves([*optimizer.state.values()])  # tree_leaves also finds tensors in lists
    return sum(t.nbytes for t in state if isinstance(t, Tensor) and t.dim())  # skip step counters


def checkpoint_bytes(c: Config, sizes: GPTConfig) -> int:
    """Return the bytes of a checkpoint: the weights and the optimizer's state."""
    return 4 * count_parameters(sizes) + optimizer_bytes(c, sizes)


# -----------------------------------------------------------------------------
# The micro-batch that fits


def choose_batch(c: Config, sizes: GPTConfig, processes: int, memory_gib: float | None) -> Config:
    """
    Return the config with the batch_size that a run takes: what is asked for or, if that is 0, as
    many sequences as fit into CHOSEN_MEMORY of a GPU with `memory_gib`, and without one 12, as in
    nanoGPT. It must divide each process's sequences, so the largest below it that does is taken.
    Only the GPU's size counts, not what is free now, so that each start on a card, and each rank,
    chooses alike.
    """
    share = c.iter_sequences // processes
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    chosen = max(n for n in divisors if n <= (c.batch_size or NANOGPT_BATCH))
    if memory_gib and not c.batch_size:
        memory = CHOSEN_MEMORY * memory_gib * GIB
        try:
            fits = [n for n in divisors if sum(memory_bytes(c, sizes, n).values()) <= memory]
            chosen = max(fits, default=1)  # try one that does not fit: the estimate may be too high
        except Exception as error:  # one's own model need not run on the meta device
            warn(f"batch_size: {chosen}, because it is unknown what fits: {one_line(error)}")
    if chosen < c.batch_size and is_main():
        each = f" on each of {processes} processes" if processes > 1 else ""
        problem = f"{c.batch_size} sequences do not divide the {share} of an iteration{each}"
        warn(f"batch_size: {chosen}, because {problem}")
    return replace(c, batch_size=chosen)
