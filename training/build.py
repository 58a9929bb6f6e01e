"""
Which model and which optimizer a configuration asks for, and the arithmetic of either model.
"""

import functools
from dataclasses import fields

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from common.console import warn
from configurator import Config, config_values
from model import GPT, GPTConfig, LossWithGradients, pad_vocab
from model_fast import FastGPT
from training.muon import Muon, parameters_by_role

# Constants of optimizer=muon. The highest rate of the token embedding, by model: the fast one's
# starts at size 1
EMBEDDING_LR = dict(gpt2=0.004, fast=0.7)
# value embeddings learn at this share of it (nanochat)
VALUE_RATE = 0.5
# token pairs learn at this share of it: 0.03 and 0.3 were worse (results/LOG.md)
BIGRAM_RATE = 0.1
VECTOR_LR = 0.015  # highest rate of biases and norms (records)
MATRIX_WEIGHT_DECAY = 0.05

# Compiled code keeps 2 bytes of a bfloat16 logit, eager code 12: there it pays to chunk the loss.
EAGER_LOSS_CHUNK = 1024  # tokens
# repeating data up to four times is nearly as good as new data, more is not (arXiv:2305.16264)
MOST_EPOCHS = 4


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
    values = config_values(config) | dict(vocab_size=vocab_size, loss_chunk=loss_chunk(config))
    if flash is not None:
        values["flash"] = flash
    return GPTConfig(**{f.name: values[f.name] for f in fields(GPTConfig)})


def loss_chunk(config: Config) -> int:
    """The key's words as a number of tokens, 0 for off."""
    if config.loss_chunk == "auto":
        return 0 if config.compile else EAGER_LOSS_CHUNK
    return 0 if config.loss_chunk == "off" else int(config.loss_chunk)


def build_model(config: GPTConfig) -> GPT | FastGPT:
    return FastGPT(config) if config.model == "fast" else GPT(config)


def compile_model(model: nn.Module, **options) -> nn.Module:
    """torch.compile(model, **options): what it takes to have the model in one graph stands here."""
    # the compiler cannot follow its call of autograd, and need not
    torch.compiler.allow_in_graph(LossWithGradients)
    return torch.compile(model, **options)


class SkipInit(TorchFunctionMode):
    """Inside this, nn.init leaves tensors as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_shapes(config: GPTConfig) -> GPT | FastGPT:
    """
    The model without memory: only names and shapes. To draw random numbers there, torch would
    import its compiler, for seconds.
    """
    with torch.device("meta"), SkipInit():
        return build_model(config)


def build_optimizer(
    model: nn.Module, config: Config, dtype: torch.dtype, rank: int = 0, world_size: int = 1
) -> torch.optim.Optimizer:
    """
    `dtype` is what the device multiplies matrices in. Muon shares out its work among the
    `world_size` processes. Each group holds its highest learning rate as `initial_lr`; the first
    group's rate is the one in the log. A fused update skips itself on the device when asked to.
    MPS's fused kernel cannot.
    """
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    betas = (config.beta1, config.beta2)
    if config.optimizer == "adamw":
        groups = decay_groups(model, config.weight_decay)
        for group in groups:
            group["initial_lr"] = config.learning_rate
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)
    roles = parameters_by_role(model)
    muon = dict(momentum=config.muon_momentum, weight_decay=MATRIX_WEIGHT_DECAY)
    adam = dict(betas=betas, weight_decay=config.weight_decay)
    embedding_lr = EMBEDDING_LR[config.model]
    groups = [
        dict(muon, params=roles["matrices"], initial_lr=config.learning_rate, parts=1),
        # q, k and v are a matrix each
        dict(muon, params=roles["qkv"], initial_lr=config.learning_rate, parts=3),
        dict(adam, params=roles["embedding"], initial_lr=embedding_lr),
        dict(adam, params=roles["values"], initial_lr=VALUE_RATE * embedding_lr),
        dict(adam, params=roles["bigrams"], initial_lr=BIGRAM_RATE * embedding_lr),
        dict(adam, params=roles["head"], initial_lr=config.head_lr),
        dict(adam, params=roles["vectors"], initial_lr=VECTOR_LR, weight_decay=0.0),
    ]
    groups = [dict(group, lr=group["initial_lr"]) for group in groups if group["params"]]
    return Muon(groups, dtype, fused, rank, world_size)


def saved_state(optimizer: torch.optim.Optimizer) -> dict:
    """On rank 0, what a checkpoint holds of the optimizer. All processes take part."""
    if isinstance(optimizer, Muon):
        return optimizer.whole_state_dict()
    return optimizer.state_dict()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """
    AdamW's groups as GPT-2 is trained: matrices and embeddings decay, biases and norms do not.
    """
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        dict(params=decayed, weight_decay=weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


def warn_of_epochs(config: Config, dataset_tokens: int | None) -> None:
    tokens = config.iter_tokens * config.max_iters
    if dataset_tokens and tokens > MOST_EPOCHS * dataset_tokens:
        epochs = f"{tokens / dataset_tokens:.1f} epochs: more than about {MOST_EPOCHS} teach little"
        enough = max(1, MOST_EPOCHS * dataset_tokens // config.iter_tokens)
        fewer = f", or --max_iters={enough}" if enough > 2 * config.warmup_iters else ""
        warn(f"{epochs}; prepare a larger dataset{fewer}")


@functools.cache
def count_parameters(config: GPTConfig) -> tuple[int, int]:
    """
    All parameters, and those that take part in matrix products and norms (N in the formula below).
    """
    model = build_shapes(config)
    total = sum(p.numel() for p in model.parameters())
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tables = {id(m.weight): m.weight.numel() for m in embeddings}
    tables.pop(id(model.lm_head.weight), None)  # a tied embedding is a matrix too
    return total, total - sum(tables.values())


def flops_per_token(config: GPTConfig) -> int:
    """
    Floating-point operations per trained token, forward and backward: 6 N + 12 L H Q T, with N the
    parameters less look-up tables, L layers, H heads of size Q, T = block_size (PaLM paper,
    appendix B; nanoGPT's number for the tied model). A token embedding of its own is a table, so
    tying changes nothing. Recomputed activations do not count.
    """
    _, n = count_parameters(config)
    return 6 * n + 12 * config.n_layer * config.n_embd * config.block_size
