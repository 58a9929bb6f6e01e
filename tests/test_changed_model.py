"""A changed model: its FLOPs are counted as it runs, or somebody is told why they are not."""

import json
import random

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_same_state, load, records, run_here
from torch.nn import functional as F

import bench
import compare
import model as gpt2
import model_fast
from common.console import UserError
from configurator import Config, load_config
from model import GPT, CausalSelfAttention, GPTConfig, attend
from model_fast import FastConfig
from reports import memory, plan
from train import model_config
from training import log
from training.hardware import count_flops

GPT124M = GPTConfig(bias=False)
# 6 N + 12 L H Q T (PaLM paper, appendix B), by its parts: a layer's matrices, the head, a layer's
# attention
LAYER, HEAD, ATTENTION = 6 * 12 * 768**2, 6 * 768 * 50304, 12 * 768 * 1024


@pytest.fixture
def patch(monkeypatch):
    """monkeypatch for the model's code; what was counted and read of it is forgotten."""
    cached = (memory.meta_model, memory.count_parameters, count_flops)
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


def model_of(config: Config) -> GPTConfig:
    return model_config(config, 50257, flash=config.flash, compiled=config.compile)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_gpt124m_is_counted_as_by_hand(tie_weights):
    """
    nanoGPT's number, 854.8 MFLOP a token, is 6 N + 12 L H Q T with the norms' weights in N. A
    look-up table costs no FLOPs, so tying changes nothing.
    """
    config = load_config([f"{ROOT}/config/gpt124m_4070.py", f"--tie_weights={tie_weights}"])
    flops = count_flops(model_of(config))
    assert flops == 12 * (LAYER + ATTENTION) + HEAD
    assert flops == pytest.approx(854.8e6, rel=0.001)


def test_the_fast_124m_is_counted_as_by_hand():
    """Its six gates have 12 x 6 weights each; the tables are looked up."""
    config = load_config([f"{ROOT}/config/fast124m_4070.py"])
    flops = count_flops(model_of(config))
    assert flops == 12 * (LAYER + ATTENTION) + HEAD + 6 * 6 * 12 * 6


@pytest.mark.parametrize("kind", [GPTConfig, FastConfig])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(flash=False), dict(recompute=True), dict(loss_chunk=7), dict(dropout=0.1, bias=True)],
)
def test_the_count_is_the_same_whatever_computes_the_model(kind, changes):
    tables = dict(value_tables=1, bigram_rows=10**7) if kind is FastConfig else {}
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = kind(**dict(bias=False, tie_weights=False) | sizes | tables | changes)
    gates = 2 * 12 * 3 if kind is FastConfig else 0
    n = 100 * 96 + 2 * 12 * 96**2 + gates
    assert count_flops(config) == 6 * n + 12 * 2 * 96 * 40


class MiddleTwice(GPT):
    def __init__(self, config):
        super().__init__(config)
        first, *middle, last = self.transformer.h
        self.transformer.h = torch.nn.ModuleList([first, *middle, *middle, last])


def test_blocks_that_run_twice_count_twice(patch):
    patch.setattr(model_fast, "GPT", MiddleTwice)
    assert count_flops(GPT124M) == 22 * (LAYER + ATTENTION) + HEAD


def in_windows(layer, x, *_):
    """Sequences of 1024 in windows of 256: each token meets a quarter of the keys."""
    q, k, v = (part.unflatten(2, (-1, 256)) for part in qkv(layer, x))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3))


def own_products(layer, x, *_):
    return joined(layer, attend(*qkv(layer, x), flash=False, scale=64**-0.5))


def wider_queries(layer, x, *_):
    """Heads of 128 in the first of two products, and of 64 in the second."""
    q, k, v = qkv(layer, x)
    q, k = F.pad(q, (0, 64)), F.pad(k, (0, 64))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    "forward, factor", [(in_windows, 0.25), (own_products, 1), (wider_queries, 1.5)]
)
def test_attention_counts_as_it_runs(patch, forward, factor):
    patch.setattr(CausalSelfAttention, "forward", forward)
    assert count_flops(GPT124M) == 12 * (LAYER + factor * ATTENTION) + HEAD


def needs_a_gpu(layer, x, *_):
    raise RuntimeError("this kernel needs a GPU\nand more lines")


def test_a_model_that_does_not_run_here_is_not_counted(patch):
    patch.setattr(CausalSelfAttention, "forward", needs_a_gpu)
    assert count_flops(GPTConfig(n_layer=1, n_embd=96, vocab_size=64)) is None


def test_without_a_count_training_and_plan_go_on_and_say_why(patch, dataset, tmp_path, capsys):
    for module in (log, plan):
        patch.setattr(module, "count_flops", lambda config: None)
    assert run_here(dataset, tmp_path / "run", max_iters=2, peak_tflops=1) == 0
    out = capsys.readouterr().out
    assert out.count("FLOPs not counted") == 1
    assert "mfu n/a, tok/s" in out
    assert records(tmp_path / "run", "start")[0]["flops_per_token"] is None
    compare.main([str(tmp_path / "run"), "--gpu=4070"])
    assert "n/a" in capsys.readouterr().out
    arguments = [f"{ROOT}/config/gpt124m_4070.py", "--gpu=4070"]
    with pytest.raises(UserError, match="model: FLOPs not counted; give --iter_seconds or"):
        bench.main(["plan", *arguments])
    bench.main(["plan", *arguments, "--iter_seconds=9", f"--json={tmp_path}/plan.json"])
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["flops_per_token"] is figures["total_flops"] is figures["mfu"] is None
    assert figures["hours"] > 0
    assert "FLOPs n/a" in capsys.readouterr().out


def test_counting_draws_no_random_number_of_the_runs(patch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    count_flops(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64))
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(gpt2.MLP):
    """It draws by each of the three sources of random numbers."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            y = y * (torch.rand(()) + np.random.rand() + random.gauss(1, 0.1))
        return y


def test_what_a_model_draws_by_torch_numpy_and_python_is_seeded_and_resumed(
    patch, dataset, tmp_path
):
    patch.setattr(gpt2, "MLP", Noisy)
    for run in ("straight", "halves"):
        random.seed()
        np.random.seed()
        iterations = 8 if run == "straight" else 3
        assert run_here(dataset, tmp_path / run, max_iters=iterations, lr_decay_iters=8) == 0
    random.seed()
    np.random.seed()
    more = dict(init_from="resume", lr_decay_iters=8)
    assert run_here(dataset, tmp_path / "halves", **more) == 0
    assert_same_state(load(tmp_path / "straight", 8), load(tmp_path / "halves", 8))


@pytest.mark.parametrize("factor, refused", [(1, 0), (1.01, 1)])
def test_a_compiled_model_that_draws_is_judged_by_its_evaluation(
    factor, refused, patch, dataset, tmp_path, capsys
):
    """Compiled code draws other numbers, so that its loss in training is another."""

    def compile(call):
        def compiled(*batch):
            torch.rand(7)
            return factor * call(*batch)

        return compiled

    patch.setattr(gpt2, "MLP", Noisy)
    patch.setattr(torch, "compile", compile)
    assert run_here(dataset, tmp_path, compile=True, max_iters=2) == 0
    assert capsys.readouterr().err.count("torch.compile does not work here") == refused


def test_a_mask_of_infinities_is_saved_and_resumed(patch, dataset, tmp_path):
    """Only weights that have become infinite are not."""
    stock = gpt2.MLP.__init__

    def with_a_mask(self, config):
        stock(self, config)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    patch.setattr(gpt2.MLP, "__init__", with_a_mask)
    assert run_here(dataset, tmp_path, max_iters=4) == 0
    assert run_here(dataset, tmp_path, max_iters=8, init_from="resume") == 0
    assert load(tmp_path, 8)["model"]["transformer.h.0.mlp.mask"][0, 1] == -torch.inf
