"""
Compare Muon with modded-nanogpt's formulas. test_recipe.py compares it with a second
implementation.
"""

from unittest import mock

import pytest
import torch
import torch.nn as nn

from configurator import Config
from machine.cost import count_trained, optimizer_bytes
from model import GPTConfig
from model_fast import FastConfig, FastGPT, build_model
from optimizer import Muon, build_optimizer, muon_groups, orthogonalize

RECIPE = Config(optimizer="muon", learning_rate=0.029, beta1=0.8, weight_decay=0.01)
START = dict(done=0.0, length=100)  # of a run
SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32)


def test_newton_schulz_ends_where_the_public_files_18_iterations_do():
    """Apply 2 s - 1.5 s^3 + 0.5 s^5 eighteen times to each singular value s."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64)).Q for _ in range(2))
    S = torch.logspace(-9, 0, 64, dtype=torch.float64)
    s = S / (S.norm() + 1e-7)
    large = s > 1e-5
    for _ in range(18):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    found = U.mT @ orthogonalize((U * S @ V.mT)[None], torch.float64)[0] @ V
    torch.testing.assert_close(found, s.diag(), atol=0.0024, rtol=0.0)
    assert (found.diag()[large] - 1).abs().max() < 1e-3


# Matrices of rank one have a singular value of 1, which rounding may make larger. Equal numbers are
# all rounded alike: with a safety factor of 1.005, 397 ones would diverge in bfloat16.
@pytest.mark.parametrize("dtype, above", [(torch.bfloat16, 0.02), (torch.float16, 0.004)])
@pytest.mark.parametrize(
    "rows, columns", [(1, 1), (1, 223), (1, 397), (5, 7), (12, 48), (128, 128), (384, 96)]
)
def test_no_matrix_diverges_in_half_precision(dtype, above, rows, columns):
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(2, rows, columns, generator=generator)
    rank_one = G[:, :, :1] @ G[:, :1]
    matrices = torch.cat([G, rank_one, G.sign(), rank_one.sign(), torch.ones(1, rows, columns)])
    found = orthogonalize(matrices, dtype).float()
    largest = torch.linalg.matrix_norm(found, 2)
    assert ((largest > 0.98) & (largest < 1 + above)).all()


def test_muons_adamw_scales_its_epsilon_to_a_mean_loss():
    """
    Move a weight by lr g / (g + 1e-10), modded-nanogpt's first update, where g is summed over
    524,288 tokens. Our gradients are means: 2e-16 here, which is close to the scaled epsilon.
    """
    p = nn.Parameter(torch.zeros(3))
    group = dict(START, params=[p], lr=0.1, beta1=0.8, weight_decay=0.0)
    p.grad = torch.full((3,), 2e-16)
    Muon([group], torch.float32).step()
    summed = 2e-16 * 524288
    # our epsilon is rounded up by 5%
    assert p[0].item() == pytest.approx(-0.1 * summed / (summed + 1e-10), rel=0.03)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.004)])
def test_newton_schulz_in_half_precision_stays_close_to_float64(dtype, tolerance):
    """
    Stay within a few rounding errors of 2^-8 (bfloat16) or 2^-11 (float16), relative to the norm of
    the whole matrix.
    """
    G = torch.randn(2, 48, 48, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(G.double(), torch.float64)
    assert (orthogonalize(G, dtype).double() - exact).norm() < tolerance * exact.norm()


def test_a_matrix_whose_first_gradient_is_zero_stays_finite():
    """As in the first iteration of a matrix that feeds a matrix of zeros."""
    p = nn.Parameter(torch.randn(8, 4))
    group = muon_groups(FastGPT(FastConfig(**SIZES)), RECIPE)[0] | START
    group |= dict(params=[p], lr=0.1, weight_decay=0.0)
    optimizer, before = Muon([group], torch.float32), p.detach().clone()
    for gradient, moves in ((torch.zeros(8, 4), False), (torch.randn(8, 4), True)):
        p.grad = gradient
        optimizer.step()
        assert p.isfinite().all() and torch.equal(p, before) != moves


@pytest.mark.parametrize("kind, rate", [(GPTConfig, 0.004), (FastConfig, 0.7)])
def test_a_token_embedding_moves_at_the_rate_that_suits_its_initial_spread(kind, rate):
    """GPT-2's starts with a standard deviation of 0.02, the fast model's with 1."""
    model = build_model(kind(**SIZES, tie_weights=False))
    weight = model.transformer.wte.weight
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    build_optimizer(model, RECIPE, torch.float32).step()
    assert (before - weight).mean().item() == pytest.approx(rate, rel=0.01)


class ReadsProgress(torch.optim.SGD):
    """An optimizer that follows the run, and keeps one number for each weight."""

    def __init__(self, groups: list[dict], fused: bool) -> None:
        super().__init__(groups, momentum=0.9)

    def step(self, closure=None):
        assert all(0 <= group["done"] <= 1 <= group["length"] for group in self.param_groups)
        super().step()


def test_the_memory_of_an_optimizer_that_reads_the_runs_progress_is_counted():
    sizes = GPTConfig(**SIZES)
    with mock.patch("torch.optim.AdamW", ReadsProgress):  # its own seed, because results are cached
        assert optimizer_bytes(Config(seed=77), sizes) == 4 * count_trained(sizes)
