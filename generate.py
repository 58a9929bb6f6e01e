"""
Text from a model, id by id, with its keys and values cached.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, KVCache
from model_fast import FastGPT


@torch.no_grad()
def stream(model: GPT | FastGPT, idx: Tensor, max_new_tokens: int, vocab: int, temperature: float = 1.0, top_k: int = 0,
           generator: torch.Generator | None = None, top_p: float = 1.0) -> Iterator[Tensor]:
    """
    Continue idx (B, T), T > 0, yielding max_new_tokens times the next ids (B, 1). Only ids below `vocab` (the
    vocabulary before padding) are drawn. temperature 0 takes the likeliest; top_k > 0 draws from the k likeliest;
    top_p < 1 from the fewest that have this probability together.

    Up to block_size tokens the past is cached. Beyond, each id follows from the last block_size tokens alone, all
    computed anew: what is cached of a token knows of those that have left the window.
    """
    T, window = idx.size(1), model.config.block_size
    caches, new = [], idx
    for _ in range(max_new_tokens):
        if not caches or caches[0].length == window:
            caches = [KVCache(min(T + max_new_tokens, window)) for _ in range(model.config.n_layer)]
            new = idx[:, -window:]
        logits = model.next_logits(new, caches)[:, :vocab].float()
        new = draw(logits, temperature, top_k, top_p, generator)
        idx = torch.cat((idx[:, -window:], new), dim=1)
        yield new


def generate(model: GPT | FastGPT, idx: Tensor, *args, **kwargs) -> Tensor:
    """idx (B, T) and all that `stream` continues it with, -> (B, T + max_new_tokens)."""
    return torch.cat((idx, *stream(model, idx, *args, **kwargs)), dim=1)


def store_by_columns(model: GPT | FastGPT) -> None:
    """
    Turn the matrices in memory, their values and shapes as they were. In float32 on a CPU the product of one with a
    single token's row then takes a tenth less time and more (results/column_storage.py); in bfloat16 it would take longer.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One id per row of logits (B, vocab), as (B, 1); see `stream`."""
    if temperature < 1e-5:  # greedy, and what would overflow on the way there
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probs = F.softmax(logits, dim=-1)
    if top_p < 1:
        descending, order = probs.sort(dim=-1, descending=True)
        before = descending.cumsum(dim=-1) - descending
        descending[:, 1:][before[:, 1:] >= top_p] = 0  # those before it have top_p already
        probs = torch.zeros_like(probs).scatter(1, order, descending)
    return torch.multinomial(probs, 1, generator=generator)
