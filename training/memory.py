"""
How much GPU memory training takes, and the micro-batch that fits.

The bytes are counted from the tensors that autograd keeps, not measured on a GPU. docs/memory.md
explains each number; tests/test_gpus.py checks them on a CPU.
"""

from dataclasses import dataclass

from configurator import Config, divisors
from model import GPTConfig
from training.build import OPTIMIZERS, build_shapes, count_parameters, is_stock, optimizer_groups

# the driver needs the rest of a card's memory; a desktop, which needs more, is not modelled
USABLE_MEMORY = 0.95
# CUDA context, cuBLAS workspaces and fragmentation
WORKSPACE_BYTES = 0.6e9
# the residual stream, per token and channel: all that recompute keeps of a block
STREAM_BYTES = 4
# both dropout masks of a block in eager mode, per token and channel; compiled code draws them again
DROPOUT_BYTES = 2


@dataclass(frozen=True)
class Bytes:
    """What a model keeps in memory in one kind of dtype, in bytes."""

    element: int  # of a number in a matrix product
    block: int  # of a block until its backward pass, per token and channel
    compiled: int  # the same in compiled code
    logit: int  # the most that lives for one logit in eager mode; compiled: the logit alone
    chunked: int  # the same where the loss is made in chunks with its gradients
    recomputed: int  # gradients in the block that recompute runs again, per token and channel


GPT2_HALF = Bytes(element=2, block=36, compiled=36, logit=12, chunked=10, recomputed=10)
GPT2_FLOAT32 = Bytes(element=4, block=64, compiled=64, logit=12, chunked=8, recomputed=16)
# compiled code computes the rotations again
FAST_HALF = Bytes(element=2, block=48, compiled=36, logit=28, chunked=18, recomputed=18)
FAST_FLOAT32 = Bytes(element=4, block=72, compiled=72, logit=28, chunked=16, recomputed=34)


def bytes_of(model: GPTConfig, dtype: str) -> Bytes:
    if model.model == "fast":
        return FAST_FLOAT32 if dtype == "float32" else FAST_HALF
    return GPT2_FLOAT32 if dtype == "float32" else GPT2_HALF


def memory_bytes(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> dict[str, float]:
    """GPU memory that training takes, in bytes, by part. `dtype`: that of matrix products."""
    params, in_products = count_parameters(model)
    matrices_of_a_block = 12 * model.n_embd**2
    weights = 4 * params
    if dtype != "float32":
        # autocast keeps a copy of each matrix; with recompute only of one block's at a time
        weights += 2 * in_products
        if model.recompute:
            weights -= 2 * (model.n_layer - 1) * matrices_of_a_block
    moments = OPTIMIZERS[config.optimizer].moments
    groups = optimizer_groups(build_shapes(model), config)
    kept = sum(len(moments(group)) * p.numel() for group in groups for p in group["params"])
    tokens = batch_size * model.block_size
    return dict(
        weights=weights,
        gradients=4 * params,
        optimizer=4 * kept,
        activations=activation_bytes(model, tokens, dtype, config.compile),
        logits=logit_bytes(model, tokens, dtype, config.compile),
        workspace=WORKSPACE_BYTES,
    )


def activation_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """What all blocks and the last norm keep, with recompute at its peak beside the logits."""
    b, C = bytes_of(model, dtype), model.n_embd
    block = block_bytes(model, dtype, compiled)
    kept_of_a_block = STREAM_BYTES * C if model.recompute else block
    kept = tokens * model.n_layer * kept_of_a_block
    # the stream at the last norm, and the head's input
    beside_logits = kept + tokens * (STREAM_BYTES + b.element) * C
    # a token's row of each table, and the values it is added to in two layers
    beside_logits += tokens * model.value_tables * 3 * b.element * C
    if model.bigram_rows and compiled:
        beside_logits += tokens * b.element * C  # the stream with token pairs
    if not model.recompute:
        return beside_logits
    # The peak may come later: the logits are gone, but one block is computed again, and gradients
    # exist beside it.
    again = tokens * (block + b.recomputed * C)
    again += 4 * count_parameters(model)[0] if compiled else 4 * b.element * C**2
    return max(beside_logits, kept + again - logit_bytes(model, tokens, dtype, compiled))


def block_bytes(model: GPTConfig, dtype: str, compiled: bool) -> int:
    """What one block keeps of a token until its backward pass, in bytes."""
    b = bytes_of(model, dtype)
    per_channel = b.compiled if compiled else b.block
    if model.dropout and not compiled:
        per_channel += DROPOUT_BYTES
    if model.bigram_rows:
        per_channel += b.element  # keys before and after their offset
    # two float32 numbers for each of the two norms, one for each head
    size = per_channel * model.n_embd + 16 + 4 * model.n_head
    if not model.flash:
        size += (4 if dtype == "float32" else 6) * model.n_head * model.block_size
    return size


def logit_bytes(model: GPTConfig, tokens: int, dtype: str, compiled: bool) -> int:
    """The logits, and beside them the gradient of the head where both exist at once."""
    b, C, chunk = bytes_of(model, dtype), model.n_embd, model.loss_chunk
    in_chunks = 0 < chunk < tokens
    if in_chunks and compiled:
        # compiled code adds up the chunks' gradients of the head at the end
        copies = 4 if dtype == "float32" else b.element * -(-tokens // chunk)
        per_id = 2 * b.element * chunk + copies * C
    elif in_chunks:
        per_id = b.chunked * chunk + 4 * C
    elif compiled:
        per_id = b.element * (tokens + C)
    else:
        per_id = b.logit * tokens
    return per_id * model.vocab_size


def memory_needed(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> float:
    """All parts of memory_bytes() together, in bytes."""
    return sum(memory_bytes(config, model, dtype, batch_size).values())


def memory_caveat(model: GPTConfig) -> str:
    """What belongs behind a figure of memory where the model's code has changed; else nothing."""
    return "" if is_stock(model) else " (activations as in the shipped model; this one has changed)"


def fitting_batch(
    config: Config, model: GPTConfig, dtype: str, sequences: int, capacity: float
) -> int | None:
    """
    The largest micro-batch that divides `sequences` and fits into `capacity` bytes. None where not
    even one sequence fits.
    """
    sizes = reversed(divisors(sequences))
    return next((n for n in sizes if memory_needed(config, model, dtype, n) <= capacity), None)


def out_of_memory_advice(
    config: Config, model: GPTConfig, dtype: str, capacity: float, world_size: int = 1
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
    fitting = f"the same tokens per iteration in about {gigabytes}{memory_caveat(model)}: {pair}"
    return f"out of memory with batch_size={config.batch_size}; {fitting}"
