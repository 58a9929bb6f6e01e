"""
GPT-2, the whole of it.

Parameter names are nanoGPT's, so its checkpoints load as they are; the mathematics is GPT-2's (tanh
GELU, learned positions, pre-norm), so weights go to and from Hugging Face exactly. Shapes in
comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels, V =
vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024
    # 50257 padded to a multiple of 128: the head's matrix product runs on full tiles
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linear and LayerNorm, as in GPT-2
    tie_weights: bool = True  # the output head is the token embedding
    flash: bool = True  # fused attention kernel; False: the plain formula
    model: str = "gpt2"  # or "fast": model_fast.py
    loss_chunk: int = 0  # tokens whose logits exist at once in training; 0: all
    recompute: bool = False  # keep each block's input alone; the backward pass runs it again
    # model_fast.py's tables of value embeddings, and the rows of its table of token pairs
    value_tables: int = 0
    bigram_rows: int = 0


# Fields that a resume may change: how the model is computed, and how its loss is weighed. All
# others are its architecture.
FREE_ON_RESUME = frozenset({"dropout", "flash", "loss_chunk", "recompute"})


# -----------------------------------------------------------------------------
# The layers


def mark(module: nn.Module, role: str = "matrix", parts: tuple[int, ...] = ()) -> None:
    """
    Say what optimizer=muon shall do with a module's weight, where it is no plain matrix of a block:
    its role (training/muon.py lists them), and the rows of each matrix that is stacked in it.
    """
    vars(module)["muon"] = role, parts


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None = None
) -> Tensor:
    """F.scaled_dot_product_attention in plain products: q, k, v and result (B, nh, T, hs)."""
    # on a CPU in bfloat16 it is faster, 4 times at 64 tokens (results/cpu/kernels.json)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    scores = q * scale @ k.transpose(-2, -1)  # (B, nh, T, T plus cached tokens)
    if is_causal:
        # an addition is faster than masked_fill
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1)
    return F.dropout(F.softmax(scores, dim=-1), dropout_p) @ v


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout, self.flash = config.n_head, config.dropout, config.flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        mark(self.c_attn, parts=3 * (config.n_embd,))  # q, k and v
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: "KVCache | None" = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(k, v)
        # A single token, as in generation, sees all tokens before it and needs no mask. There the
        # plain formula serves: cuDNN would plan its fused kernel anew at each length.
        attention = F.scaled_dot_product_attention if self.flash and T > 1 else plain_attention
        y = attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=T > 1)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        # GPT-2's own; the exact GELU moves its logits by up to 1e-3
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: "KVCache | None" = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


# -----------------------------------------------------------------------------
# The model


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer: Any = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        mark(self.lm_head, role="head")
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self.init_weights()

    def init_weights(self) -> None:
        """
        GPT-2's initialisation: N(0, 0.02), biases zero; the projections back into the residual
        stream by a further 1/sqrt(2 n_layer), so that the sum over 2 n_layer of them keeps its size
        (GPT-2 paper, section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        kinds = (nn.Linear, nn.Embedding)  # others begin as they have made themselves
        plain = {p for m in self.modules() if isinstance(m, kinds) for p in m.parameters(False)}
        for name, p in self.named_parameters():
            if p not in plain:
                continue
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=residual_std)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.zeros_(p)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """
        idx (B, T) int64 -> logits (B, T, V) without targets, else the mean loss over targets (B,
        T), in nats per token; targets of -1 count for nothing. T may be anything up to block_size.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        return mean_loss(x, self.lm_head.weight, targets, self.config)

    def hidden(self, idx: Tensor, caches: "list[KVCache] | None" = None) -> Tensor:
        """
        idx (B, T), after what is in the caches -> the normed residual stream (B, T, C) that the
        head reads.
        """
        past = caches[0].length if caches else 0
        positions = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        x = self.transformer.drop(x)
        if torch.compiler.is_compiling() and product_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too; an eager CPU's norms would sum in it
        recompute = self.config.recompute and self.training and not caches
        blocks = self.transformer.h
        for block, cache in zip(blocks, caches if caches else [None] * len(blocks), strict=True):
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x, cache)
        return self.transformer.ln_f(x)

    def new_caches(self, room: int) -> "list[KVCache]":
        """Empty caches for `hidden`, one for each block, with room for so many tokens."""
        return [KVCache(room) for _ in self.transformer.h]

    def next_logits(self, idx: Tensor, caches: "list[KVCache]") -> Tensor:
        """
        idx (B, T), the tokens after those in the caches -> logits (B, V) for the one after them;
        extends the caches. T is 1 unless the caches are empty.
        """
        return self.lm_head(self.hidden(idx, caches)[:, -1])


# -----------------------------------------------------------------------------
# The loss


def loss_sum(logits: Tensor, targets: Tensor, config: GPTConfig, cap: float | None) -> Tensor:
    """
    What training minimises and evaluation reports: the loss of logits (n, V), not capped yet,
    against targets (n,), summed over those that are not -1, in nats. The one place for it: a term
    added to `loss` acts everywhere, all logits at once or in chunks, compiled or not. One that
    compares targets with each other needs loss_chunk=off.
    """
    loss = F.cross_entropy(cap_logits(logits, cap), targets, ignore_index=-1, reduction="sum")
    return loss


def mean_loss(
    x: Tensor, weight: Tensor, targets: Tensor, config: GPTConfig, cap: float | None = None
) -> Tensor:
    """
    `loss_sum` of the head's logits against targets (B, T), divided by the number of those that are
    not -1; without any, the loss and its gradients are 0. x is (B, T, C), the head's weight (V, C),
    `cap` as in `cap_logits`.

    With a loss_chunk > 0 the logits of only so many tokens exist at once. Their gradient is made
    along with them, before it is divided, so that float16 has room for it without GradScaler's
    factor.
    """
    chunk = config.loss_chunk
    x, targets = x.flatten(0, 1), targets.flatten()
    count = (targets != -1).sum().clamp(min=1)  # a masked micro-batch must not cost the update

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(F.linear(x, weight), targets, config, cap)

    if not 0 < chunk < len(x):
        return loss(x, targets) / count
    if torch.is_grad_enabled():
        return ChunkedLoss.apply(x, weight, targets, config, cap, product_dtype(x))
    parts = zip(x.split(chunk), targets.split(chunk), strict=True)
    return torch.stack([loss(*part) for part in parts]).sum() / count


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of x are computed in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Logits in at least float32, squeezed by the cap, if any: cap z / sqrt(z^2 + cap^2)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if cap is None else cap * logits * torch.rsqrt(logits.square() + cap**2)


class ChunkedLoss(torch.autograd.Function):
    """
    `mean_loss` of x (N, C) and targets (N,) with its gradients, made in the forward pass chunk by
    chunk. Products run in `dtype`; the weight's gradient is summed in at least float32.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, config, cap, dtype) -> Tensor:
        head = weight.detach().to(dtype).requires_grad_()
        dx, losses, chunk = [], [], config.loss_chunk
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32))
        for x_part, y_part in zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True):
            x_part = x_part.detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_sum(x_part @ head.T, y_part, config, cap)
            dx_part, dhead = torch.autograd.grad(loss, (x_part, head))
            losses.append(loss.detach())
            dx.append(dx_part)
            dweight += dhead
            del loss, dhead  # before the next chunk's are made
        # only here: for a count made before, the compiler would make all chunks' logits at once
        count = (targets != -1).sum().clamp(min=1)
        ctx.save_for_backward(torch.cat(dx), dweight, count)
        return sum(losses) / count

    @staticmethod
    def backward(ctx, dloss: Tensor):
        dx, dweight, count = ctx.saved_tensors
        scale = dloss / count
        return dx.to(dweight.dtype) * scale, dweight * scale, None, None, None, None


# -----------------------------------------------------------------------------
# Text, id by id


class KVCache:
    """Keys and values of one layer's past tokens: room for `capacity`, `length` filled."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in k and v, (B, nh, T, hs) each, of further tokens; returns those of all so far."""
        if self.length == 0:
            B, nh, _, hs = k.shape
            self.k = k.new_empty(B, nh, self.capacity, hs)
            self.v = v.new_empty(B, nh, self.capacity, hs)
        start, self.length = self.length, self.length + k.size(2)
        if self.length > self.capacity:
            raise ValueError("a KVCache is full: each block that runs, also twice, needs its own")
        self.k[:, :, start : self.length], self.v[:, :, start : self.length] = k, v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


@dataclass(frozen=True)
class Sampling:
    """How an id is chosen from those that may come next."""

    temperature: float = 1.0  # 0: the likeliest; 1: as the model predicts
    top_k: int = 0  # from the k likeliest; 0: from all
    top_p: float = 1.0  # from the fewest that have this probability together; 1: from all


@torch.no_grad()
def generate_tokens(
    model,
    idx: Tensor,
    max_new_tokens: int,
    vocab: int,
    sampling: Sampling = Sampling(),
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """
    Continue idx (B, T), T > 0, yielding max_new_tokens times the next ids (B, 1). Only ids below
    `vocab` (the vocabulary before padding) are chosen. `model`: a GPT or FastGPT.

    Up to block_size tokens the past is cached. Beyond, each id follows from the last block_size
    tokens alone, all computed anew: what is cached of a token knows of those that have left the
    window.
    """
    T, window = idx.size(1), model.config.block_size
    caches, new = list[KVCache](), idx
    for _ in range(max_new_tokens):
        if not caches or caches[0].length == window:
            caches = model.new_caches(min(T + max_new_tokens, window))
            new = idx[:, -window:]
        logits = model.next_logits(new, caches)[:, :vocab].float()
        new = sample_next(logits, sampling, generator)
        idx = torch.cat((idx[:, -window:], new), dim=1)
        yield new


def generate(model, idx: Tensor, *args, **kwargs) -> Tensor:
    """idx (B, T) and all that `generate_tokens` continues it with, -> (B, T + max_new_tokens)."""
    return torch.cat((idx, *generate_tokens(model, idx, *args, **kwargs)), dim=1)


def sample_next(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One id per row of logits (B, vocab), as (B, 1)."""
    if sampling.temperature < 1e-5:  # greedy, and what would overflow on the way there
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.size(-1):
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probs = F.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        descending, order = probs.sort(dim=-1, descending=True)
        before = descending.cumsum(dim=-1) - descending
        descending[:, 1:][before[:, 1:] >= sampling.top_p] = 0  # those before have it already
        probs = torch.zeros_like(probs).scatter(1, order, descending)
    return torch.multinomial(probs, 1, generator=generator)
