"""
Builds the model and the optimizer of a configuration; counts parameters and FLOPs.
"""

import functools
import math
from dataclasses import fields, replace

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.console import did_you_mean, warn
from configurator import Config
from model import GPT, ChunkedLoss, GPTConfig
from model_fast import FastGPT
from training.hardware import no_trace
from training.muon import Muon, parameters_by_role

# Constants of optimizer=muon. The peak learning rate of the token embedding, by model; the fast
# model's is initialised at size 1
EMBEDDING_LR = dict(gpt2=0.004, fast=0.7)
# the rate of value embeddings, as a share of it (nanochat)
VALUE_RATE = 0.5
# the rate of the bigram embedding, as a share of it; 0.03 and 0.3 were worse (results/recipe.md)
BIGRAM_RATE = 0.1
VECTOR_LR = 0.015  # peak learning rate of biases and norms (records)
MATRIX_WEIGHT_DECAY = 0.05

# Tokens per chunk of the loss. Eager code keeps 12 bytes per logit, so its chunks are smaller.
# Compiled code keeps 2, and in larger chunks reads logits less often.
LOSS_CHUNK, COMPILED_LOSS_CHUNK = 512, 4096
SAME_LOSS = 5e-3  # relative; in bfloat16 compiled losses differ by at most 1e-4 (results/speed.md)
MOST_CHUNKS = 8  # compiled code with 16 chunks kept the gradients of all logits
# Repeating data up to four times is nearly as good as new data (arXiv:2305.16264). Without dropout
# small models still gained at five epochs, and got worse at eight (results/own_text.md).
MOST_EPOCHS = 6


def model_config(
    config: Config, vocab: int, weights: dict | None = None, flash: bool | None = None
) -> GPTConfig:
    """
    The GPTConfig of a configuration. `vocab` is padded; with saved `weights` their size counts
    instead. `flash`, if given, replaces the configuration's.
    """
    vocab_size = pad_vocab(vocab, config.pad_vocab_multiple)
    if weights:
        vocab_size = weights["model_config"]["vocab_size"]
    values: dict = dict(vocab_size=vocab_size, loss_chunk=loss_chunk(config))
    if flash is not None:
        values["flash"] = flash
    names = {f.name for f in fields(GPTConfig)} - values.keys()
    return GPTConfig(**values, **{name: getattr(config, name) for name in names})


def pad_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary size rounded up to a multiple: 50257, 128 -> 50304."""
    return -(-vocab_size // multiple) * multiple


def loss_chunk(config: Config) -> int:
    """The value of the key loss_chunk as a number of tokens; 0 for off."""
    if config.loss_chunk == "auto":
        least = config.batch_size * config.block_size // MOST_CHUNKS
        return max(COMPILED_LOSS_CHUNK, least) if config.compile else LOSS_CHUNK
    return 0 if config.loss_chunk == "off" else int(config.loss_chunk)


def build_model(config: GPTConfig) -> GPT | FastGPT:
    return FastGPT(config) if config.model == "fast" else GPT(config)


def compile_model(model: nn.Module, **options) -> None:
    """
    model.compile(**options): from now on calls of the model run compiled, but not model.forward.
    Also does what is needed to compile the model as one graph.
    """
    # the compiler cannot follow its call of autograd, and does not need to
    torch.compiler.allow_in_graph(ChunkedLoss)
    if isinstance(model, FastGPT):
        model.keep_rotary_tables()
    model.compile(**options)


def check_loss(
    compiled_loss: float,
    model: GPT | FastGPT,
    batch: tuple[Tensor, Tensor],
    training: bool,
    autocast,
) -> None:
    """
    Raises ArithmeticError if the compiled model's loss of a batch, (B, T) inputs and targets, in
    nats, differs from that of its forward(), in training mode or as in an evaluation. Leaves the
    model in training mode.
    """
    own = model.config
    # sequence by sequence, which needs less memory than the compiled step did; 0 stays 0
    model.train(training).config = replace(own, loss_chunk=min(own.loss_chunk, LOSS_CHUNK // 2))
    sequences = zip(*(part.split(1) for part in batch), strict=True)
    with autocast, torch.set_grad_enabled(training):
        loss = torch.stack([model.forward(x, y).detach() for x, y in sequences]).mean().item()
    model.train().config = own
    if not math.isclose(compiled_loss, loss, rel_tol=SAME_LOSS):
        found = f"its loss is {compiled_loss:.4f}, without it and sequence by sequence {loss:.4f}"
        raise ArithmeticError(found)


@torch.no_grad()
def caches_differ(model: GPT | FastGPT, tokens: int) -> bool:
    """
    Whether logits computed with the caches differ from those of forward(), on as many random tokens
    as a sample has, at least 128. Then samples are not from this model: something in `hidden` looks
    at earlier tokens and has no cache for them.
    """
    weight, config = model.lm_head.weight, model.config
    T, generator = min(max(128, tokens), config.block_size), torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, T), generator=generator).to(weight.device)
    caches = model.new_caches(T)
    with torch.autocast(weight.device.type, enabled=False):
        for part in idx.split([max(1, T - 4), *[1] * min(4, T - 1)], dim=1):
            logits = model.next_logits(part, caches)
        expected = model.forward(idx)[:, -1]
    # rounding in float32 is 2e-6 of the largest logit, but TF32 has 13 bits less; in bfloat16 0.02
    tolerance = 0.01 if weight.dtype == torch.float32 else 0.05
    return not (logits - expected).abs().max() <= tolerance * expected.abs().max()


def warn_of_idle(model: nn.Module) -> None:
    """Warn of weights without a gradient, between a backward pass and its update."""
    weights = model.named_parameters()
    if idle := [name for name, p in weights if p.requires_grad and p.grad is None]:
        names = ", ".join(idle[:3]) + ", ..." * (len(idle) > 3)
        warn(f"no gradient reached {names} in the first update; does the loss depend on it?")


CACHES_DIFFER = "samples differ from the model: what looks at earlier tokens in `hidden` needs a"
CACHES_DIFFER += " cache (docs/hacking.md)"


class SkipInit(TorchFunctionMode):
    """Inside this, nn.init leaves tensors as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@functools.cache
def build_shapes(config: GPTConfig) -> GPT | FastGPT:
    """
    The model without memory: only names and shapes, to read, not to change. SkipInit, because
    drawing random numbers there makes torch import its compiler, which takes seconds.
    """
    with torch.device("meta"), SkipInit():
        return build_model(config)


def not_finite(weights: dict[str, Tensor], config: GPTConfig) -> list[str]:
    """The parameters that hold infinity or NaN. Buffers may, because a mask holds infinities."""
    names = [name for name, _ in build_shapes(config).named_parameters()]
    return [name for name in names if not weights[name].isfinite().all()]


# -----------------------------------------------------------------------------
# The optimizers


def adamw_groups(model: nn.Module, config: Config) -> list[dict]:
    """As for GPT-2: matrices and embeddings have weight decay, biases and norms do not."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    keys = dict(betas=(config.beta1, config.beta2), initial_lr=config.learning_rate)
    return [
        dict(keys, params=decayed, weight_decay=config.weight_decay),
        dict(keys, params=others, weight_decay=0.0),
    ]


def make_adamw(groups: list[dict], fused: bool, dtype: torch.dtype) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, fused=fused)


def muon_groups(model: nn.Module, config: Config) -> list[dict]:
    muon = dict(momentum=config.muon_momentum, weight_decay=MATRIX_WEIGHT_DECAY)
    adam = dict(betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
    embedding_lr = EMBEDDING_LR[config.model]
    of_role: dict[str, dict] = dict(
        matrix=dict(muon, initial_lr=config.learning_rate),
        embedding=dict(adam, initial_lr=embedding_lr),
        values=dict(adam, initial_lr=VALUE_RATE * embedding_lr),
        bigrams=dict(adam, initial_lr=BIGRAM_RATE * embedding_lr),
        head=dict(adam, initial_lr=config.head_lr),
        vector=dict(adam, initial_lr=VECTOR_LR, weight_decay=0.0),
    )
    roles = parameters_by_role(model).items()
    return [dict(of_role[role], params=params, parts=parts) for (role, parts), params in roles]


# By --optimizer: (model, config) -> parameter groups, each with its highest learning rate as
# initial_lr; and (groups, fused=, dtype=), see build_optimizer, -> the optimizer.
OPTIMIZERS = dict(adamw=(adamw_groups, make_adamw), muon=(muon_groups, Muon))


def check_optimizer(config: Config) -> list[str]:
    """The problem, if the configuration's optimizer is not in OPTIMIZERS."""
    if config.optimizer in OPTIMIZERS:
        return []
    names = f"{', '.join(OPTIMIZERS)}{did_you_mean(config.optimizer, OPTIMIZERS)}"
    return [f"optimizer: {config.optimizer!r} is none of {names}"]


def optimizer_groups(model: nn.Module, config: Config) -> list[dict]:
    """The optimizer's groups that hold a parameter. The rate of the first one is logged."""
    make_groups, _ = OPTIMIZERS[config.optimizer]
    groups = make_groups(model, config)
    return [dict(group, lr=group["initial_lr"]) for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: Config, dtype: torch.dtype) -> torch.optim.Optimizer:
    """
    `dtype`: of the device's matmuls. A fused optimizer can skip an update on the device; that of
    MPS cannot.
    """
    groups, (_, make) = optimizer_groups(model, config), OPTIMIZERS[config.optimizer]
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    return make(groups, fused=fused, dtype=dtype)  # type: ignore[operator]  # class or function


# -----------------------------------------------------------------------------
# The arithmetic


def warn_of_epochs(config: Config, tokens: float, dataset_tokens: int | None) -> None:
    """
    `tokens`: of the whole run. No warning if the size of the dataset is unknown, or with dropout,
    which people set for many epochs.
    """
    if dataset_tokens and not config.dropout and tokens > MOST_EPOCHS * dataset_tokens:
        epochs = f"{tokens / dataset_tokens:.1f} epochs: more than about {MOST_EPOCHS} teach little"
        warn(f"{epochs}; prepare a larger dataset, or add --dropout=0.1")


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    return sum(p.numel() for p in build_shapes(config).parameters())


@functools.cache
def count_flops(config: GPTConfig) -> tuple[float | None, str]:
    """
    Floating-point operations per trained token, or None and why they cannot be counted.

    Three times those of a forward pass over one sequence, because a backward pass takes twice as
    many (PaLM paper, appendix B). torch counts the matmuls that run: attention as if without its
    mask, a block that runs twice counts twice, an expert for the tokens that reach it, blocks that
    are left out at random for one draw. For GPT-2 this is the paper's 6 N + 12 L H Q T without the
    norms. Fused attention, the loss in chunks, recomputed activations and torch.compile change
    nothing.
    """
    # imported here: FakeTensorMode imports torch's compiler, for a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # torch has no count for the fused attention of a CPU
    plain_attention = sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), plain_attention, no_trace(nn.Module(), torch.device("cpu")):
        # a model that draws random numbers: the same draw at each launch, and in a plan
        torch.default_generator.manual_seed(0)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without memory
                return 3 * forward_flops(config), "counted"
        except Exception:
            pass  # a model that looks at values, such as a router, needs real tensors
        try:
            return 3 * forward_flops(config), "counted"
        except Exception as error:  # changed models can raise anything
            said = str(error).strip().partition("\n")[0][:80]
            return None, f"the model does not run on a CPU: {type(error).__name__}: {said}"


def forward_flops(config: GPTConfig) -> float:
    """FLOPs of the forward pass per token, over a sequence of block_size random tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config)
    idx, targets = torch.randint(config.vocab_size, (2, 1, config.block_size))
    with FlopCounterMode(display=False) as counter:
        model(idx, targets)
    return counter.get_total_flops() / config.block_size


def describe_flops(config: GPTConfig) -> str:
    """FLOPs for the line that describes the model in a log and in a plan."""
    flops, words = count_flops(config)
    if flops is None:
        return f"FLOPs not counted: {words}, so mfu n/a"
    return f"{flops / 1e6:.1f} MFLOP/token ({words})"
