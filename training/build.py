"""
Which model and which optimizer a configuration asks for, and the arithmetic of either model.
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

# Constants of optimizer=muon. The highest rate of the token embedding, by model: the fast one's
# starts at size 1
EMBEDDING_LR = dict(gpt2=0.004, fast=0.7)
# value embeddings learn at this share of it (nanochat)
VALUE_RATE = 0.5
# token pairs learn at this share of it: 0.03 and 0.3 were worse (results/recipe.md)
BIGRAM_RATE = 0.1
VECTOR_LR = 0.015  # highest rate of biases and norms (records)
MATRIX_WEIGHT_DECAY = 0.05

# Tokens whose logits exist at once. Eager code keeps 12 bytes of each logit. Compiled code keeps 2,
# but it reads logits once less where it makes their gradient at once.
LOSS_CHUNK, COMPILED_LOSS_CHUNK = 1024, 4096
SAME_LOSS = 5e-3  # relative; in bfloat16 compiled losses are 1e-4 off at most (results/speed.md)
MOST_CHUNKS = 8  # compiled code of 16 kept the gradients of all logits
# Repeating data up to four times is nearly as good as new data (arXiv:2305.16264). Without dropout
# small models still gained at five epochs, and got worse at eight (results/own_text.md).
MOST_EPOCHS = 6


def model_config(
    config: Config, vocab: int, weights: dict | None = None, flash: bool | None = None
) -> GPTConfig:
    """
    The model that the configuration asks for. `vocab` is padded, unless there are saved `weights`:
    then it is theirs. `flash`, where given, stands in place of the configuration's.
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
    """The key's words as a number of tokens, 0 for off."""
    if config.loss_chunk == "auto":
        least = config.batch_size * config.block_size // MOST_CHUNKS
        return max(COMPILED_LOSS_CHUNK, least) if config.compile else LOSS_CHUNK
    return 0 if config.loss_chunk == "off" else int(config.loss_chunk)


def build_model(config: GPTConfig) -> GPT | FastGPT:
    return FastGPT(config) if config.model == "fast" else GPT(config)


def compile_model(model: nn.Module, **options) -> None:
    """
    model.compile(**options): from now on its calls run compiled, and only model.forward does not.
    What it takes to have the model in one graph stands here.
    """
    # the compiler cannot follow its call of autograd, and need not
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
    Raises ArithmeticError where the compiled model's loss of a batch, (B, T) inputs and targets, is
    not that of its forward(), in nats; in training mode, or as an evaluation has it. Leaves the
    model in training mode.
    """
    own = model.config
    # sequence by sequence: less memory than the compiled step has taken
    model.train(training).config = replace(own, loss_chunk=LOSS_CHUNK // 4)
    sequences = zip(*(part.split(1) for part in batch), strict=True)
    with autocast, torch.set_grad_enabled(training):
        loss = torch.stack([model.forward(x, y).detach() for x, y in sequences]).mean().item()
    model.train().config = own
    if not math.isclose(compiled_loss, loss, rel_tol=SAME_LOSS):
        raise ArithmeticError(f"its loss is {compiled_loss:.4f}, without it {loss:.4f}")


@torch.no_grad()
def caches_differ(model: GPT | FastGPT, tokens: int) -> bool:
    """
    Whether logits through the caches are not those of forward(), on as many random tokens as a
    sample has, but no fewer than 128. Then samples are another model's: something in `hidden` looks
    at earlier tokens, and has no cache for them.
    """
    weight, config = model.lm_head.weight, model.config
    T, generator = min(max(128, tokens), config.block_size), torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, T), generator=generator).to(weight.device)
    caches = model.new_caches(T)
    with torch.autocast(weight.device.type, enabled=False):
        for part in idx.split([max(1, T - 4), *[1] * min(4, T - 1)], dim=1):
            logits = model.next_logits(part, caches)
        expected = model.forward(idx)[:, -1]
    # float32 moves logits by 2e-6 of the largest, but TF32 has 13 bits less; bfloat16 by 0.02
    tolerance = 0.01 if weight.dtype == torch.float32 else 0.05
    return not (logits - expected).abs().max() <= tolerance * expected.abs().max()


def warn_of_idle(model: nn.Module) -> None:
    """Between a backward pass and its update."""
    weights = model.named_parameters()
    if idle := [name for name, p in weights if p.requires_grad and p.grad is None]:
        names = ", ".join(idle[:3]) + ", ..." * (len(idle) > 3)
        warn(f"no gradient reached {names} in the first update; does the loss depend on it?")


CACHES_DIFFER = "samples are not what the model computes: in `hidden`, what looks at earlier tokens"
CACHES_DIFFER += " needs a cache (docs/hacking.md)"


class SkipInit(TorchFunctionMode):
    """Inside this, nn.init leaves tensors as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@functools.cache
def build_shapes(config: GPTConfig) -> GPT | FastGPT:
    """
    The model without memory: only names and shapes, to be read and not changed. To draw random
    numbers there, torch would import its compiler, for seconds.
    """
    with torch.device("meta"), SkipInit():
        return build_model(config)


def not_finite(weights: dict[str, Tensor], config: GPTConfig) -> list[str]:
    """The parameters that hold infinity or NaN. A buffer of a changed model may, as masks do."""
    names = [name for name, _ in build_shapes(config).named_parameters()]
    return [name for name in names if not weights[name].isfinite().all()]


# -----------------------------------------------------------------------------
# The optimizers


def adamw_groups(model: nn.Module, config: Config) -> list[dict]:
    """As GPT-2 is trained: matrices and embeddings decay, biases and norms do not."""
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
    """The problem of a configuration that asks for an optimizer that is not in OPTIMIZERS."""
    if config.optimizer in OPTIMIZERS:
        return []
    names = f"{', '.join(OPTIMIZERS)}{did_you_mean(config.optimizer, OPTIMIZERS)}"
    return [f"optimizer: {config.optimizer!r} is none of {names}"]


def optimizer_groups(model: nn.Module, config: Config) -> list[dict]:
    """The configured optimizer's groups that hold a parameter. The first one's rate is logged."""
    make_groups, _ = OPTIMIZERS[config.optimizer]
    groups = make_groups(model, config)
    return [dict(group, lr=group["initial_lr"]) for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: Config, dtype: torch.dtype) -> torch.optim.Optimizer:
    """
    `dtype` is what the device multiplies matrices in. A fused update skips itself on the device
    when asked to. MPS's fused kernel cannot.
    """
    groups, (_, make) = optimizer_groups(model, config), OPTIMIZERS[config.optimizer]
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    return make(groups, fused=fused, dtype=dtype)  # type: ignore[operator]  # class or function


# -----------------------------------------------------------------------------
# The arithmetic


def warn_of_epochs(config: Config, tokens: float, dataset_tokens: int | None) -> None:
    """
    `tokens`: those of the whole run. No warning for a dataset that nobody has counted, nor with
    dropout: who sets it means to read a text many times.
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

    They are three times those of a forward pass over one sequence, as a backward pass takes twice
    as many (PaLM paper, appendix B). torch counts the matrix products that run: those of attention
    without regard to its mask, those of a block that runs twice twice, those of an expert for the
    tokens that reach it, those of a model that leaves out blocks at random of one draw. For GPT-2
    that is the paper's 6 N + 12 L H Q T less its norms. How the model is computed changes nothing:
    fused attention, the loss in chunks, recomputed activations, torch.compile.
    """
    # imported here: FakeTensorMode imports torch's compiler, for a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # torch knows no count for the fused attention of a CPU
    plain_attention = sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), plain_attention, no_trace(nn.Module(), torch.device("cpu")):
        # of a model that draws, one draw: the same at each start, and in a plan
        torch.default_generator.manual_seed(0)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without memory
                return 3 * forward_flops(config), "counted"
        except Exception:
            pass  # a model that looks at values, as a router does, needs real ones
        try:
            return 3 * forward_flops(config), "counted"
        except Exception as error:  # people change models in all ways
            said = str(error).strip().partition("\n")[0][:80]
            return None, f"the model does not run on a CPU: {type(error).__name__}: {said}"


def forward_flops(config: GPTConfig) -> float:
    """Of one token: those of a sequence of block_size random tokens, divided by their number."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config)
    idx, targets = torch.randint(config.vocab_size, (2, 1, config.block_size))
    with FlopCounterMode(display=False) as counter:
        model(idx, targets)
    return counter.get_total_flops() / config.block_size


def describe_flops(config: GPTConfig) -> str:
    """For the line that describes the model in a run's log and in a plan."""
    flops, words = count_flops(config)
    if flops is None:
        return f"FLOPs not counted: {words}, so mfu n/a"
    return f"{flops / 1e6:.1f} MFLOP/token ({words})"
