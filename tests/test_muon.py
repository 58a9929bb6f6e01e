"""Muon against an SVD, torch's own Muon and AdamW; the split of parameters; skipped updates."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from helpers import flags
from training.build import build_optimizer, build_shapes
from training.muon import Muon, orthogonalize, parameters_by_role

import train
from common.console import UserError
from configurator import Config
from model import GPT, GPTConfig, mark
from model_fast import FastGPT
from training import muon

CONFIG = Config(
    model="fast",
    optimizer="muon",
    learning_rate=0.02,
    head_lr=0.01,
    weight_decay=0.01,
    beta1=0.8,
)
SMALL = GPTConfig(
    model="fast",
    block_size=8,
    vocab_size=32,
    n_layer=2,
    n_head=2,
    n_embd=16,
    bias=True,
    tie_weights=False,
)


def fast_model(**changes) -> FastGPT:
    torch.manual_seed(0)
    return FastGPT(replace(SMALL, **changes))


def told(module: nn.Module, **words) -> nn.Module:
    mark(module, **words)
    return module


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (1, 8)])
def test_newton_schulz_against_the_singular_value_decomposition(shape):
    """
    The same singular vectors; values near 1: the five steps map [0.01, 1] into [0.67, 1.21]
    (Jordan's post).
    """
    torch.manual_seed(0)
    G = torch.randn(3, *shape, dtype=torch.float64)
    U, S, Vt = torch.linalg.svd(G, full_matrices=False)
    inner = U.mT @ orthogonalize(G, torch.float64) @ Vt.mT
    values = inner.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(inner, torch.diag_embed(values), atol=1e-9, rtol=0)
    assert values[S / S.norm(dim=1, keepdim=True) > 0.01].min() > 0.67 and values.max() < 1.21


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.004)])
def test_newton_schulz_in_half_precision_stays_close(dtype, tolerance):
    """
    A few roundings of 2^-8 or 2^-11 on entries of about 1 / sqrt(48); relative to the whole matrix.
    """
    G = torch.randn(2, 48, 48, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(G.double(), torch.float64)
    assert (orthogonalize(G, dtype).double() - exact).norm() < tolerance * exact.norm()


def test_matrices_move_as_with_torchs_own_muon(monkeypatch):
    """But for NorMuon's part, which torch's has not."""
    monkeypatch.setattr(muon, "normalize", lambda directions, mean: directions)
    torch.manual_seed(0)
    shapes = [(24, 24), (16, 64), (64, 16), (16, 64), (24, 24)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(ours)
    group = dict(params=ours, lr=0.1, initial_lr=0.1, momentum=0.9, weight_decay=0.2, parts=())
    reference = torch.optim.Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.2)
    optimizers = (Muon([group], torch.bfloat16), reference)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    # torch's products run in bfloat16: 2^-8 of a move of 0.1, five times
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=5e-3, rtol=0)


def test_each_neuron_moves_by_its_mean_square_over_time():
    """NorMuon, by hand and matrix by matrix: tall, wide, three in one, and two unlike in one."""
    torch.manual_seed(0)
    shapes, parts = [(8, 4), (4, 8), (12, 4), (10, 4)], [(8,), (4,), (4, 4, 4), (8, 2)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [p.detach().clone() for p in ours]
    keys = dict(lr=0.1, momentum=0.9, weight_decay=0.0)
    optimizer = Muon(
        [dict(keys, params=[p], parts=n) for p, n in zip(ours, parts, strict=True)], torch.float32
    )
    momenta = [torch.zeros(shape) for shape in shapes]
    squares = [[0.0] * len(rows) for rows in parts]
    for _ in range(4):
        for i, p in enumerate(ours):
            p.grad = torch.randn(p.shape)
            momenta[i] += 0.1 * (p.grad - momenta[i])
            look_ahead = p.grad + 0.9 * (momenta[i] - p.grad)
            for k, (matrix, u) in enumerate(
                zip(theirs[i].split(parts[i]), look_ahead.split(parts[i]), strict=True)
            ):
                rows, cols = matrix.shape
                o = orthogonalize(u[None], torch.float32)[0]
                mean = (o**2).mean(dim=1 if rows >= cols else 0, keepdim=True)
                squares[i][k] = 0.95 * squares[i][k] + 0.05 * mean
                even = o / squares[i][k].sqrt()
                matrix -= 0.1 * max(1, rows / cols) ** 0.5 * even * o.norm() / even.norm()
        optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def test_a_matrix_without_a_gradient_yet_stays_finite():
    """What feeds a matrix of zeros has a gradient of zeros in the first iteration."""
    p = nn.Parameter(torch.randn(8, 4))
    optimizer = Muon(
        [dict(params=[p], parts=(), lr=0.1, momentum=0.9, weight_decay=0.0)], torch.float32
    )
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert p.isfinite().all() and not torch.equal(p, before)


def test_a_checkpoint_of_muon_before_normuon_goes_on():
    model = fast_model()
    before = build_optimizer(model, CONFIG, torch.float32)
    give_gradients(model, 0)
    before.step()
    state = before.state_dict()
    for moments in state["state"].values():
        moments.pop("mean_squares", None)
    after = build_optimizer(model, CONFIG, torch.float32)
    after.load_state_dict(state)
    after.step()
    assert all(p.isfinite().all() for p in model.parameters())


VIEWS = ("view", "split_with_sizes", "unbind", "mT", "transpose")  # start no kernel


def operators(step: Callable[[], None]) -> int:
    """How many operators a step calls itself: about as many kernels as it starts on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    called = [e for e in profiler.events() if e.name.startswith("aten::")]
    parents = [e.cpu_parent for e in called if e.name.removeprefix("aten::") not in VIEWS]
    return sum(parent is None or not parent.name.startswith("aten::") for parent in parents)


def test_a_step_starts_few_kernels():
    """Matrices of one shape move together: 12 layers in a fifth of the kernels of torch's Muon."""
    model = FastGPT(replace(SMALL, n_layer=12, bias=False))
    give_gradients(model, 0)
    ours = build_optimizer(model, CONFIG, torch.bfloat16)
    roles = parameters_by_role(model)
    theirs = torch.optim.Muon(roles["matrix", ()] + roles["matrix", (16, 16, 16)])
    ours.step()  # makes its state
    theirs.step()
    assert 5 * operators(ours.step) < operators(theirs.step)


def test_q_k_and_v_are_a_matrix_each():
    torch.manual_seed(0)
    fused = nn.Parameter(torch.zeros(48, 16))
    apart = [nn.Parameter(torch.zeros(16, 16)) for _ in range(3)]
    fused.grad = torch.randn(48, 16)
    for p, grad in zip(apart, fused.grad.chunk(3), strict=True):
        p.grad = grad.clone()
    keys = dict(lr=1.0, initial_lr=1.0, momentum=0.9, weight_decay=0.0)
    Muon([dict(keys, params=[fused], parts=(16, 16, 16))], torch.float32).step()
    Muon([dict(keys, params=apart, parts=())], torch.float32).step()
    torch.testing.assert_close(fused, torch.cat(apart))


def test_everything_else_moves_as_with_adamw():
    model = fast_model(value_tables=1, bigram_rows=50)
    twin = copy.deepcopy(model)
    ours, roles = build_optimizer(model, CONFIG, torch.float32), parameters_by_role(twin)
    keys = dict(betas=(0.8, 0.95), eps=1e-10, foreach=False)
    theirs = [
        torch.optim.AdamW(roles["embedding", ()], lr=0.7, weight_decay=0.01, **keys),
        torch.optim.AdamW(roles["values", ()], lr=0.35, weight_decay=0.01, **keys),
        torch.optim.AdamW(roles["bigrams", ()], lr=0.07, weight_decay=0.01, **keys),
        torch.optim.AdamW(roles["head", ()], lr=0.01, weight_decay=0.01, **keys),
        torch.optim.AdamW(roles["vector", ()], lr=0.015, weight_decay=0.0, **keys),
    ]
    for step in range(5):
        for net in (model, twin):
            give_gradients(net, step)
        for optimizer in (ours, *theirs):
            optimizer.step()
    for role in ("embedding", "values", "bigrams", "head", "vector"):
        for p, q in zip(parameters_by_role(model)[role, ()], roles[role, ()], strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "model",
    [
        GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=16)),
        fast_model(value_tables=1, bigram_rows=50),
    ],
)
def test_every_parameter_has_one_role(model):
    found = [id(p) for group in parameters_by_role(model).values() for p in group]
    assert sorted(found) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.Conv1d(4, 4, 3), r"it is \[4, 4, 3\] and has no role"),
        (nn.Linear(16, 32, bias=False), r"it is \[32, 16\] and has no role"),  # a second head
        (told(nn.Linear(16, 48), role="heads"), r"it is \[48, 16\] and has the role 'heads'"),
        (told(nn.Linear(16, 48), parts=(16, 16)), r"its parts \(16, 16\) do not add up to 48"),
    ],
)
def test_a_weight_that_leaves_it_open_is_an_error(module, words):
    """Outside of the blocks, where it may be anything."""
    model = fast_model()
    model.another = module
    with pytest.raises(UserError, match=rf"another.weight: {words}"):
        parameters_by_role(model)


def test_a_weight_without_a_role_is_found_before_anything_is_made(
    dataset, tmp_path, script, monkeypatch
):
    stock = GPT.__init__

    def with_a_second_head(self, config):
        stock(self, config)
        self.second = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    monkeypatch.setattr(GPT, "__init__", with_a_second_head)
    build_shapes.cache_clear()
    command = flags(dataset, tmp_path / "run", optimizer="muon", learning_rate=0.02)
    code, _, (line,) = script(train.main, *command)
    build_shapes.cache_clear()
    assert code == 2 and "second.weight: it is [128, 32] and has no role; call mark(" in line
    assert not (tmp_path / "run").exists()


def test_a_bare_parameter_of_a_block_is_no_matrix():
    model = fast_model()
    model.transformer.h[0].attn.biases = nn.Parameter(torch.zeros(2, 16))
    with pytest.raises(UserError, match=r"attn.biases: it is \[2, 16\] and has no role"):
        parameters_by_role(model)


def test_a_weight_may_say_what_it_is():
    model = fast_model()
    model.another = told(nn.Linear(16, 32), role="head")
    model.projection = told(nn.Linear(16, 16))
    model.transformer.h[0].mlp.gate = nn.Linear(16, 8)
    for roles in map(parameters_by_role, (model, copy.deepcopy(model))):
        assert [p.shape for p in roles["head", ()]] == [(32, 16), (32, 16)]
        # of two blocks, attention's projection and the MLP's two
        shapes = [tuple(p.shape) for p in roles["matrix", ()]]
        assert shapes == [(16, 16), (64, 16), (16, 64), (8, 16)] + [*shapes[:3], (16, 16)]
        assert [p.shape for p in roles["matrix", (16, 16, 16)]] == [(48, 16), (48, 16)]


def test_a_skipped_update_changes_nothing():
    model = fast_model()
    optimizer = build_optimizer(model, CONFIG, torch.float32)
    give_gradients(model, 0)
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    give_gradients(model, 1)
    model.transformer.h[0].attn.c_attn.weight.grad[0, 0] = float("nan")
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[0][name]), name
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[key], before[1][i][key]) for key in state)


@pytest.mark.parametrize("fused", [True, False])
def test_a_grad_scaler_skips_and_lowers_its_scale(fused):
    model = fast_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    groups = build_optimizer(model, CONFIG, torch.float32).param_groups
    optimizer = Muon([dict(group, fused=fused) for group in groups], torch.float32, fused)
    before = copy.deepcopy(model.state_dict())
    idx = torch.arange(8)[None]
    for factor, moved in ((float("inf"), False), (1.0, True)):
        scaler.scale(model(idx, idx) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 512.0
        state = model.state_dict()
        assert moved == any(not torch.equal(state[name], before[name]) for name in state)
