"""
Check the model against transformers' GPT-2, against numbers computed by hand, and against itself
with each switch changed.
"""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from cases import another_value, slow_but
from hf_reference import as_transformers, random_model

import model as model_file
from configurator import FIELDS, RunKeys, find_keys
from model import GPT, ChunkedLoss, GPTConfig, KVCache, cap_logits, mean_loss, prefers_plain
from model_fast import FastConfig, build_model, config_from_dict

SMALL = dict(block_size=64, vocab_size=211, n_layer=3, n_head=4, n_embd=48)


def tokens(B, T, vocab, seed=0):
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))


SHAPES = {
    "small": SMALL,
    "one head": dict(block_size=33, vocab_size=97, n_layer=1, n_head=1, n_embd=16),
    "untied": dict(
        block_size=128, vocab_size=512, n_layer=2, n_head=6, n_embd=96, tie_weights=False
    ),
    "124M": dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768),
}


BY_HF = [(name, flash) for name in SHAPES for flash in (True, False)]


@pytest.mark.parametrize("name, flash", slow_but(*BY_HF[:-2], of=BY_HF))
def test_logits_equal_transformers_gpt2(name, flash):
    """Compare at equal weights, with fused and with plain attention."""
    shape = SHAPES[name]
    model = random_model(GPTConfig(**shape, flash=flash))
    idx = tokens(2, min(40, shape["block_size"]), shape["vocab_size"])
    with torch.no_grad():
        expected = as_transformers(model.state_dict(), model.config)(idx).logits
        # 1e-4 allows for fp32 rounding of logits of about 10, in a different order of operations
        torch.testing.assert_close(model(idx), expected, atol=1e-4, rtol=1e-4)


def test_gpt2s_matrices_start_with_the_standard_deviations_of_its_paper():
    """Smaller in front of the residual stream, to which two projections of each layer add."""
    torch.manual_seed(0)
    for name, p in GPT(GPTConfig(**SMALL)).named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
            # this allows three standard errors, 1 / sqrt(2 n) each, for 2,304 numbers or more
            assert p.std().item() == pytest.approx(std, rel=0.045), name


PLAIN = [
    ("cpu", torch.bfloat16, 512, True),
    ("cpu", torch.bfloat16, 513, False),
    ("cpu", torch.float32, 64, False),
    ("cuda", torch.bfloat16, 64, False),
    ("mps", torch.float32, 1024, True),  # whose fused kernel may be wrong
]


@pytest.mark.parametrize("device, dtype, T, plain", PLAIN)
def test_short_sequences_in_bfloat16_on_a_cpu_and_all_on_a_mac_take_plain_attention(
    device, dtype, T, plain
):
    q = SimpleNamespace(device=torch.device(device), dtype=dtype, size=(1, 2, T, 8).__getitem__)
    assert prefers_plain(q) is plain


@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize("chunk", ["off", "16"])
def test_the_loss_of_bfloat16_logits_is_computed_in_float32(chunk, cap):
    """
    Round less than bfloat16, in which a loss of 5 would be off by up to 0.016 and the sum of many
    by far more.
    """
    torch.manual_seed(0)
    x, head = torch.randn(1, 64, 8).bfloat16(), torch.randn(211, 8).bfloat16()
    targets = tokens(1, 64, 211)
    logits = (x[0] @ head.T).float()
    if cap:
        logits = cap * logits / (logits**2 + cap**2).sqrt()
    expected = torch.nn.functional.cross_entropy(logits, targets[0]).item()
    loss = mean_loss(x, head, targets, GPTConfig(loss_chunk=chunk), cap)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def compile_function(function, **options):
    torch.compiler.allow_in_graph(ChunkedLoss)
    return torch.compile(function, **options)


def loss_and_gradients(
    config: GPTConfig, dtype: torch.dtype, compiled: bool = False, scale: float = 1.0
):
    torch.manual_seed(0)
    model = build_model(config)
    # the fast model's projections start as zeros, which hide gradients
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    idx, targets = tokens(3, 50, config.vocab_size), tokens(3, 50, config.vocab_size, seed=1)
    targets[0, :22] = -1  # 128 targets remain: dividing by 128 rounds nothing
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = (compile_function(model) if compiled else model)(idx, targets)
    (scale * loss).backward()
    return loss.detach(), torch.cat([p.grad.flatten() / scale for p in model.parameters()])


ROUNDED = {
    "float32": (torch.float32, False, 1.0, 1e-6),
    # the head's gradient is rounded to 8 bits once for each chunk
    "bfloat16": (torch.bfloat16, False, 1.0, 5e-3),
    # scaled as by GradScaler, and rounded to 11 bits
    "float16": (torch.float16, False, 2.0**12, 1e-3),
    # compiled code rounds elsewhere too
    "compiled": (torch.bfloat16, True, 1.0, 2e-2),
}


@pytest.mark.parametrize("rounded", slow_but(*[*ROUNDED][:3], of=ROUNDED))
@pytest.mark.parametrize(
    "changes", [{}, dict(tie_weights=False), dict(model="fast", tie_weights=False)], ids=str
)
def test_chunks_change_neither_the_loss_nor_its_gradients(changes, rounded):
    """Split 150 tokens into chunks of 23; the last is smaller, and the first has one target."""
    dtype, compiled, scale, tolerance = ROUNDED[rounded]
    whole, chunked = (config_from_dict(SMALL | changes | dict(loss_chunk=n)) for n in ("off", "23"))
    loss, gradients = loss_and_gradients(whole, dtype, scale=scale)
    chunked_loss, chunked_gradients = loss_and_gradients(chunked, dtype, compiled, scale)
    # float32 adds in a different order
    loss_tolerance = tolerance if compiled else 1e-6
    assert chunked_loss.item() == pytest.approx(loss.item(), rel=loss_tolerance)
    assert (chunked_gradients - gradients).norm() / gradients.norm() < tolerance


BACKENDS = [
    *((torch.float32, None, 1e-6), (torch.float16, None, 3e-3), (torch.bfloat16, None, 2e-2)),
    *((torch.float32, "aot_eager", 1e-6), (torch.float16, "aot_eager", 3e-3)),
    (torch.float32, "inductor", 1e-6),
]


@pytest.mark.parametrize("dtype, backend, tolerance", slow_but(*BACKENDS[:3], of=BACKENDS))
@pytest.mark.parametrize("chunk", ["off", "30"])
def test_a_changed_loss_with_weights_and_its_gradients_follow_their_formula(
    chunk, dtype, backend, tolerance, monkeypatch
):
    """
    Replace the loss by half the cross-entropy, with weights that may be negative, plus a z-loss,
    and compare it and its gradients with the formulas in float64.
    """
    stock, cap = model_file.loss_sum, 5.0

    def with_z_loss(logits, targets, config, cap, weights):
        logits = cap_logits(logits, cap)
        z = logits.logsumexp(-1)
        added = (z.square() * (targets != -1)).sum()
        return stock(logits, targets, config, None, weights) / 2 + added

    monkeypatch.setattr(model_file, "loss_sum", with_z_loss)
    torch.manual_seed(0)
    x, head, bias = (torch.randn(*n, requires_grad=True) for n in ((5, 10, 16), (37, 16), (37,)))
    targets, weights = tokens(5, 10, 37), torch.randn(5, 10)
    targets[2] = -1
    ours = compile_function(mean_loss, fullgraph=True, backend=backend) if backend else mean_loss
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = ours(x, head, targets, GPTConfig(loss_chunk=chunk), cap, bias, weights)
        with torch.no_grad():
            evaluated = ours(x, head, targets, GPTConfig(loss_chunk=chunk), cap, bias, weights)

    logits = x.double() @ head.double().T + bias
    logits = cap * logits / (logits**2 + cap**2).sqrt()
    z = logits.logsumexp(-1)
    cross_entropy = z - logits.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    expected = (weights * cross_entropy / 2 + z**2)[targets != -1].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert evaluated.item() == pytest.approx(expected.item(), rel=tolerance)
    parts = [x, head, bias]
    for a, b in zip(*(torch.autograd.grad(v, parts) for v in (loss, expected)), strict=True):
        assert (a - b).norm() < tolerance * b.norm()


def test_gradients_of_logits_far_beyond_their_cap_are_finite():
    """Stay finite although in float32 such a logit rounds to a little more than its cap."""
    head = torch.logspace(2, 8, 1000)[:, None].requires_grad_()
    x = torch.ones(1, 2, 1)
    for chunk in ("off", "1"):
        loss = mean_loss(x, head, torch.tensor([[0, 999]]), GPTConfig(loss_chunk=chunk), 15.0)
        (gradient,) = torch.autograd.grad(loss, head)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("weights", [None, torch.zeros(2, 10), torch.zeros(2, 10).bool()])
@pytest.mark.parametrize("chunk", ["off", "7"])
@pytest.mark.parametrize("cap", [None, 15.0])
def test_a_micro_batch_without_targets_has_zero_loss_and_gradients(cap, chunk, weights):
    """Return zeros, because NaN gradients of one micro-batch would skip the whole update."""
    x, head = torch.randn(2, 10, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.full((2, 10), -1) if weights is None else tokens(2, 10, 9)
    config = GPTConfig(loss_chunk=chunk)
    loss = mean_loss(x, head, targets, config, cap, weights=weights)
    loss.backward()
    with torch.no_grad():
        evaluated = mean_loss(x, head, targets, config, cap, weights=weights)
    assert loss.item() == evaluated.item() == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(head.grad, torch.zeros_like(head))


@pytest.mark.parametrize("model", ["gpt2", "fast"])
def test_dropout_acts_on_embeddings_attention_and_block_outputs_only_in_training(model):
    """
    Zero 40% of the embeddings and of what attention and MLP each add. GPT-2 drops attention's
    weights too.
    """
    sizes = SMALL | dict(model=model, dropout=0.4, n_embd=512, tie_weights=False)
    net = random_model(config_from_dict(sizes))
    streams: list[torch.Tensor] = []
    for block in net.transformer.h:
        block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0]))

    def shares_of_zeros() -> list[float]:
        streams.clear()
        net.hidden(tokens(4, 24, 211))
        added = [after - before for before, after in zip(streams, streams[1:], strict=False)]
        return [(x == 0).float().mean().item() for x in streams[:1] + added]

    assert max(shares_of_zeros()) < 0.001
    net.train()
    embedded, *added = shares_of_zeros()
    assert embedded == pytest.approx(0.4, abs=0.01)
    # 0.4 * 0.4, where attention and MLP both add nothing
    assert added == [pytest.approx(0.16, abs=0.01)] * 2
    # with all other dropout off, attention's weights still drop out; the fast model drops none
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    idx = tokens(1, 24, 211)
    assert torch.allclose(net(idx), net(idx), atol=1e-3) == (model == "fast")


BASE = dict(block_size=24, vocab_size=61, n_layer=3, n_head=2, n_embd=32)
ANOTHER = {f.name: another_value(f, getattr(GPTConfig(**BASE), f.name)) for f in fields(GPTConfig)}


@pytest.mark.parametrize("model", ["gpt2", "fast"])
@torch.no_grad()
def test_logits_with_kv_caches_equal_those_without(model):
    """Compute the first 1, 7 or all 24 tokens at once, and the others one by one."""
    model = random_model(config_from_dict(BASE | dict(model=model)))
    idx = tokens(2, 24, 61)
    expected = model(idx)
    for first in (1, 7, 24):
        caches = [KVCache(24) for _ in model.transformer.h]
        for end in range(first, 25):
            logits = model.logits(model.hidden(idx[:, :end], caches))
            # float32 adds in a different order
            start = 0 if end == first else end - 1
            torch.testing.assert_close(logits, expected[:, start:end], atol=1e-4, rtol=1e-4)


FREE = {f.name for f in fields(FastConfig)} & (FIELDS.keys() - find_keys(RunKeys).keys())


@pytest.mark.parametrize("field", sorted(FREE))
@pytest.mark.parametrize("model", ["gpt2", "fast"])
@torch.no_grad()
def test_settings_that_a_resume_may_change_alter_no_logits(model, field):
    """
    Load the same weights with another dropout, attention or loss_chunk, and evaluate to the same
    logits.
    """
    config = config_from_dict(BASE | dict(model=model))
    one, other = random_model(config), build_model(replace(config, **{field: ANOTHER[field]}))
    other.load_state_dict(one.state_dict())  # strict: names and shapes must match
    idx = tokens(2, 24, 61)
    # float32 adds in a different order
    torch.testing.assert_close(other.eval()(idx), one(idx), atol=1e-4, rtol=1e-4)
