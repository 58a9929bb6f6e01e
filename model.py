"""
GPT-2: the model, its loss, and text generation.

Parameter names are nanoGPT's, so its checkpoints load unchanged. The mathematics is GPT-2's (tanh
GELU, learned positions, pre-norm), so weights convert to and from Hugging Face exactly. Shapes in
comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels, and a
vocabulary of V tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024
    # 50257 padded to a multiple of 128, so that the head's matmul runs on full tiles
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linear and LayerNorm, as in GPT-2
    tie_weights: bool = True  # the output head is the token embedding
    flash: bool = True  # fused attention kernel; False: plain matmuls
    loss_chunk: str = "auto"  # compute the loss for this many tokens at a time; off: all at once


# Tokens per chunk of the loss if loss_chunk is auto. Eager code keeps 12 bytes per logit, 28 in the
# fast model, so its chunks are smaller. Compiled code keeps 2, but with more than 8 chunks it keeps
# the gradients of all logits.
LOSS_CHUNK, COMPILED_LOSS_CHUNK, MOST_CHUNKS = 512, 4096, 8
# The longest context, in tokens, at which plain attention beats the fused kernel on a CPU in
# bfloat16: 4 times at 64 tokens (results/cpu/kernels.json)
PLAIN_ATTENTION_TOKENS = 512


# -----------------------------------------------------------------------------
# The layers


def attend(
    q: Tensor, k: Tensor, v: Tensor, flash: bool, scale: float, dropout: float = 0.0
) -> Tensor:
    """
    Compute causal attention: q, k and v (B, nh, T, hs) -> (B, nh, T, hs). While generating, q may
    hold one new token only (T = 1); k and v then hold all tokens up to and including it.
    """
    is_causal = q.size(2) > 1  # a single token may attend to every token in k
    # A single token takes the plain path, because cuDNN would plan a kernel for each length of k.
    if flash and is_causal and not prefers_plain(q):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale
        )
    scores = q * scale @ k.mT  # (B, nh, T, T), or (B, nh, 1, all tokens)
    if is_causal:
        # adding a mask is faster than masked_fill
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    return F.dropout(F.softmax(scores, dim=-1), dropout) @ v


def prefers_plain(q: Tensor) -> bool:
    """
    Return whether queries (B, nh, T, hs) are on a device where the fused kernel is slower or, on
    MPS, wrong: in half precision without gradients it may attend to later tokens (pytorch #195910).
    """
    is_short = q.size(2) <= PLAIN_ATTENTION_TOKENS
    is_slower = q.device.type == "cpu" and q.dtype == torch.bfloat16 and is_short
    return is_slower or q.device.type == "mps"


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.flash = config.flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k and v
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: "KVCache | None" = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # (B, nh, T, hs) each
        if cache:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, self.flash, scale=q.size(-1) ** -0.5, dropout=dropout)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        # as in GPT-2; the exact GELU changes its logits by up to 1e-3
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
        wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.transformer: Any = nn.ModuleDict(
            dict(
                wte=wte,
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init_weights()
        if config.tie_weights:
            self.lm_head.weight = wte.weight

    def init_weights(self) -> None:
        """
        Initialise as GPT-2 does: weights are normal with standard deviation 0.02, biases zero. The
        2 n_layer projections into the residual stream are scaled by a further 1/sqrt(2 n_layer), so
        that their sum does not grow with depth (GPT-2 paper, section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue  # other modules initialise themselves
            nn.init.normal_(module.weight, std=residual_std if name.endswith("c_proj") else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """
        Return the logits (B, T, V) of idx (B, T) int64, or, given targets (B, T), the mean loss in
        nats per token; targets of -1 are ignored, and each other one counts as much as its weight,
        if there are weights (B, T). T is at most block_size.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        return mean_loss(x, self.lm_head.weight, targets, self.config, weights=weights)

    def hidden(self, idx: Tensor, caches: "list[KVCache] | None" = None) -> Tensor:
        """
        Compute the normed residual stream (B, T, C), the head's input, for idx (B, T). With caches,
        one per block, compute and return only the tokens that they do not hold yet: all T in the
        first call, one in each later call.
        """
        past = caches[0].length if caches else 0
        positions = torch.arange(past, idx.size(1), device=idx.device)
        x = self.transformer.wte(idx[:, past:]) + self.transformer.wpe(positions)
        x = self.transformer.drop(x)
        if product_dtype(x) == torch.bfloat16 and (x.is_cuda or torch.compiler.is_compiling()):
            x = x.bfloat16()  # as in llm.c; eager CPU code would sum norms' gradients in bfloat16
        for n, block in enumerate(self.transformer.h):
            x = block(x, caches[n] if caches else None)
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: x (..., C) from hidden() -> logits (..., V)."""
        return self.lm_head(x)


# -----------------------------------------------------------------------------
# The loss


def loss_sum(
    logits: Tensor,
    targets: Tensor,
    config: GPTConfig,
    cap: float | None,
    weights: Tensor | None = None,
) -> Tensor:
    """
    Return the cross-entropy of logits (n, V) against targets (n,), in nats, summed over the targets
    that are not -1, each times its weight. To change the loss, edit this function; both models and
    evaluation use it.
    """
    # If you add a loss term, compute it from the float32 logits of the next line too. With a second
    # conversion, each term's gradient would be rounded to bfloat16 before the two are added, and
    # the gradient of a small term could vanish.
    logits = cap_logits(logits, cap)
    if weights is None:
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    return (weights * losses).sum()


def count_targets(targets: Tensor) -> Tensor:
    """Return how many targets are not -1, by which a sum of losses is divided, on the device."""
    return (targets != -1).sum()


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """
    Convert logits z to float32 or wider and, given a cap, soft-cap them: cap z / sqrt(z^2 + cap^2).
    See LOGIT_CAP in model_fast.py.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cap is None:
        return logits
    return cap * logits * torch.rsqrt(logits.square() + cap**2)


def mean_loss(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    config: GPTConfig,
    cap: float | None = None,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """
    Apply the head, a weight (V, C) and perhaps a bias (V), to x (B, T, C) and return the mean loss
    over the targets (B, T) that are not -1, or 0 if there are none. Weights (B, T) multiply each
    target's loss. With a loss_chunk, the logits of only that many tokens are in memory at a time.
    """
    x = x.flatten(0, 1)
    rows = [part.flatten(0, 1) for part in (targets, weights) if part is not None]
    chunk = chunk_size(config.loss_chunk, len(x), torch.compiler.is_compiling())
    if torch.is_grad_enabled() and chunk < len(x):
        parameters = (head,) if bias is None else (head, bias)
        loss = ChunkedLoss.apply(x, rows, config, chunk, cap, product_dtype(x), *parameters)
    else:
        parts = zip(*(part.split(chunk) for part in (x, *rows)), strict=True)
        sums = [loss_sum(F.linear(part, head, bias), y, config, cap, *w) for part, y, *w in parts]
        loss = torch.stack(sums).sum()
    # Count after the loss. If counted before, the compiler computes all chunks' logits at once.
    return loss / count_targets(targets).clamp(min=1)


def chunk_size(loss_chunk: str, tokens: int, compiled: bool) -> int:
    """Return of how many of a micro-batch's tokens to hold the logits in memory at a time."""
    if loss_chunk == "off":
        return tokens
    if loss_chunk == "auto":
        chunk = max(COMPILED_LOSS_CHUNK, tokens // MOST_CHUNKS) if compiled else LOSS_CHUNK
        return min(chunk, tokens)
    return min(int(loss_chunk), tokens)


class ChunkedLoss(torch.autograd.Function):
    """
    Compute the sum of the losses of x (N, C) without keeping all logits. loss_sum() gets the same
    part of each tensor in `rows`: targets (N,), and perhaps weights (N,). The forward pass also
    computes the gradients, chunk by chunk, of the sum and not of the mean, so that they do not
    underflow in float16. Matmuls run in `dtype`; the gradients of the head, a weight and perhaps a
    bias, are summed in float32 or wider.
    """

    @staticmethod
    def forward(ctx, x, rows, config, chunk, cap, dtype, *parameters) -> Tensor:
        head = [parameter.detach().to(dtype).requires_grad_() for parameter in parameters]
        wide = torch.promote_types(dtype, torch.float32)
        dweight = torch.zeros_like(head[0], dtype=wide)
        dbias = []  # one per chunk: a running sum would compile to a kernel that needs all logits
        dx = []
        losses = []
        parts = zip(*(part.split(chunk) for part in (x.to(dtype), *rows)), strict=True)
        for x_part, y_part, *w_part in parts:
            x_part = x_part.detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_sum(F.linear(x_part, *head), y_part, config, cap, *w_part)
            dx_part, dweight_part, *dbias_part = torch.autograd.grad(loss, (x_part, *head))
            losses.append(loss.detach())
            dx.append(dx_part)
            dweight += dweight_part
            dbias += dbias_part
            del loss, dweight_part  # free their memory before the next chunk
        dhead = [dweight, torch.stack(dbias).sum(0, dtype=wide)] if dbias else [dweight]
        ctx.save_for_backward(torch.cat(dx), *dhead)
        return sum(losses)  # type: ignore[return-value]  # not empty

    @staticmethod
    def backward(ctx, dloss: Tensor):
        dx, *dhead = ctx.saved_tensors
        dx = dx.to(dhead[0].dtype) * dloss
        return dx, None, None, None, None, None, *(gradient * dloss for gradient in dhead)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matmuls of x run: autocast's if that is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# -----------------------------------------------------------------------------
# Generating text


class KVCache:
    """Store one block's keys and values for the `length` tokens so far, out of `capacity`."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        # extend() allocates them once it knows shape, dtype and device
        self.k = torch.empty(0)
        self.v = torch.empty(0)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, nh, T, hs) of T more tokens. Returns k and v of all tokens so far."""
        start = self.length
        end = start + k.size(2)
        if end > self.capacity:
            raise ValueError("KVCache is full: a block that runs twice needs two caches")
        if start == 0:
            B, nh, _, hs = k.shape
            self.k = k.new_empty(B, nh, self.capacity, hs)
            self.v = v.new_empty(B, nh, self.capacity, hs)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


@torch.no_grad()
def generate_tokens(
    model,
    idx: Tensor,
    max_new_tokens: int,
    vocab: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """
    Continue idx (B, T), T > 0, with a GPT or FastGPT: yield max_new_tokens tokens, one at a time,
    as ids (B, 1). Draws only ids below `vocab`, the vocabulary size before padding. For the
    sampling arguments see sample_next().
    """
    window = model.config.block_size
    room = min(idx.size(1) + max_new_tokens, window)
    caches = [KVCache(room) for _ in model.transformer.h]
    for _ in range(max_new_tokens):
        if idx.size(1) > window:
            caches = []  # the cache depends on tokens that have left the window
        x = model.hidden(idx[:, -window:], caches)[:, -1]  # (B, C)
        logits = model.logits(x)[:, :vocab].float()
        new = sample_next(logits, temperature, top_k, top_p, generator)
        idx = torch.cat((idx[:, -window:], new), dim=1)
        yield new


def generate(model, idx: Tensor, *args, **kwargs) -> Tensor:
    """Continue idx (B, T) with generate_tokens(); returns (B, T + max_new_tokens)."""
    return torch.cat((idx, *generate_tokens(model, idx, *args, **kwargs)), dim=1)


def sample_next(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """
    Draw one id per row of logits (B, vocab), as (B, 1). A temperature of 0 takes the likeliest id;
    1 samples from the model's distribution. top_k restricts sampling to the k likeliest ids (0:
    all), top_p to the smallest set of likeliest ids whose probabilities reach that sum (1: all).
    """
    if temperature < 1e-5:  # dividing by a tiny temperature would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = F.softmax(logits, dim=-1)
    if top_p < 1:
        descending, order = probs.sort(dim=-1, descending=True)
        before = descending.cumsum(dim=-1) - descending  # total probability of all likelier ids
        before[:, 0] = -1  # keep the likeliest id, however small top_p is
        probs = torch.zeros_like(probs).scatter(1, order, descending * (before < top_p))
    return torch.multinomial(probs, 1, generator=generator)
