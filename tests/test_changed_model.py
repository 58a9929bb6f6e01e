"""
A changed model: its FLOPs are counted as it runs.
"""

import pytest
import torch
from torch.nn import functional as F

from model import GPT, CausalSelfAttention, GPTConfig, plain_attention
from training import build
from training.build import count_flops, flops_per_token

GPT124M = GPTConfig(bias=False)
# see test_model.py: 6 N of all layers, and of the ten in the middle
PRODUCTS, MIDDLE = 6 * 123_587_328, 6 * 10 * (12 * 768**2 + 2 * 768)
ATTENTION = 12 * 768 * 1024  # of a layer


@pytest.fixture
def patch(monkeypatch):
    """monkeypatch for the model's code; what was counted and read of it is forgotten."""
    cached = (build.count_parameters, count_flops)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def qkv(layer: CausalSelfAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    B, T, C = x.shape
    heads = layer.c_attn(x).view(B, T, 3 * layer.n_head, C // layer.n_head)
    return heads.transpose(1, 2).chunk(3, dim=1)


def joined(layer: CausalSelfAttention, y: torch.Tensor) -> torch.Tensor:
    return layer.c_proj(y.transpose(1, 2).flatten(2))


# -----------------------------------------------------------------------------
# FLOPs


class MiddleTwice(GPT):
    def hidden(self, idx, caches=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        first, *middle, last = self.transformer.h
        for block in (first, *middle, *middle, last):
            x = block(x)
        return self.transformer.ln_f(x)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_blocks_that_run_twice_count_twice(patch, tie_weights):
    patch.setattr(build, "GPT", MiddleTwice)
    config = GPTConfig(bias=False, tie_weights=tie_weights)
    flops = PRODUCTS + MIDDLE + 22 * ATTENTION
    assert count_flops(config) == (flops, "counted from the modules that run")
    assert build.count_parameters(config)[1] == PRODUCTS / 6  # but they are there once


def test_a_window_that_cuts_the_keys_counts_less(patch):
    """Sequences of 1024 in windows of 256: each token meets a quarter of the keys."""

    def in_windows(layer, x, cache=None):
        q, k, v = (part.unflatten(2, (-1, 256)) for part in qkv(layer, x))
        return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3))

    patch.setattr(CausalSelfAttention, "forward", in_windows)
    flops = PRODUCTS + 12 * ATTENTION // 4
    assert count_flops(GPT124M) == (flops, "counted from the modules that run")


def own_products(layer, x, cache=None):
    return joined(layer, plain_attention(*qkv(layer, x), 0.0, True))


def wider_queries(layer, x, cache=None):
    """Heads of a size of their own cannot be told from the narrow model."""
    q, k, v = qkv(layer, x)
    q, k = F.pad(q, (0, 64)), F.pad(k, (0, 64))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("forward", [own_products, wider_queries])
def test_attention_that_cannot_be_counted_is_said_not_to_be(patch, forward):
    patch.setattr(CausalSelfAttention, "forward", forward)
    words = "counted from the modules that run, attention not counted"
    assert count_flops(GPT124M) == (PRODUCTS, words)


def test_a_model_that_asks_for_its_own_size_is_counted_by_its_parameters(patch):
    def rotate(layer, x, cache=None):
        raise ValueError("n_embd must be a multiple of 64")

    patch.setattr(CausalSelfAttention, "forward", rotate)
    words = "6 N, attention not counted: the model does not run at a small n_embd"
    assert count_flops(GPT124M) == (PRODUCTS, words)


@pytest.mark.parametrize("kind", ["gpt2", "fast"])
@pytest.mark.parametrize("changes", [dict(), dict(flash=False), dict(recompute=True, loss_chunk=4)])
def test_the_shipped_models_have_their_formula_whatever_computes_them(kind, changes):
    tables = dict(value_tables=1, bigram_rows=10**7) if kind == "fast" else {}
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = GPTConfig(model=kind, bias=False, tie_weights=False, **sizes, **tables, **changes)
    gate = 2 * 12 * 3 if kind == "fast" else 5 * 96  # weights of two gates, or of five norms
    n = 100 * 96 + 2 * 12 * 96**2 + gate
    assert count_flops(config) == (6 * n + 12 * 2 * 96 * 40, "6 N + 12 L H Q T")


def test_counting_draws_no_random_number_of_the_runs(patch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    flops_per_token(GPT124M)
    assert torch.equal(torch.get_rng_state(), before)
