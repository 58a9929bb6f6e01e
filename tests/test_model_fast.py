"""Check the fast model against plain formulas written out here."""

import math
from dataclasses import replace

import pytest
import torch
from program import TINY_RUN, column, train, write_tokens
from torch.func import functional_call

from model import KVCache
from model_fast import FastConfig, FastGPT, rotary_tables, rotate

SMALL = FastConfig(
    block_size=24,
    vocab_size=64,
    n_layer=3,
    n_head=2,
    n_embd=32,
    bias=True,
)


def perturbed(config: FastConfig = SMALL) -> FastGPT:
    """Return a model whose projections and head are not zero, so that everything in it matters."""
    torch.manual_seed(0)
    model = FastGPT(config)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def tokens(B: int, T: int, vocab: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def test_rotary_multiplies_channel_pairs_by_complex_numbers():
    """
    Multiply channel pair k at position t by exp(-i t w_k), where half of the w_k fall from 1 to
    1/1024 and the others are 0.
    """
    T, hs = 10, 16
    x = torch.randn(2, T, 3, hs, dtype=torch.float64)
    w = torch.tensor([1024 ** (-i / 3) for i in range(4)] + [0.0] * 4, dtype=torch.float64)
    angle = torch.arange(T, dtype=torch.float64)[:, None, None] * w
    expected = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), -angle)
    turned = rotate(x, *(table.double() for table in rotary_tables(torch.arange(T), hs)))
    # float32 tables
    both = torch.cat((expected.real, expected.imag), -1)
    torch.testing.assert_close(turned, both, atol=1e-5, rtol=0)


def test_rotary_scores_depend_only_on_the_distance():
    """Give copies of one query and one key the same score wherever they are equally far apart."""
    q, k = (
        torch.randn(1, 1, 1, 16).expand(1, 12, 1, 16),
        torch.randn(1, 1, 1, 16).expand(1, 12, 1, 16),
    )
    tables = rotary_tables(torch.arange(12), 16)
    scores = rotate(q, *tables).squeeze() @ rotate(k, *tables).squeeze().mT
    for distance in range(12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)


def plain_logits(
    weights: dict[str, torch.Tensor], idx: torch.Tensor, config: FastConfig
) -> torch.Tensor:
    """Compute the whole model by its formulas, one head and one query at a time."""

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    def turn(x, position):  # (hs,) as complex pairs
        half = len(x) // 2
        w = [1024 ** (-i / (half // 2 - 1)) if i < half // 2 else 0.0 for i in range(half)]
        z = torch.complex(x[:half], x[half:]) * torch.exp(
            -1j * position * torch.tensor(w, dtype=torch.float64)
        )
        return torch.cat((z.real, z.imag))

    def normed(x, name):
        return rms(x) * weights.get(f"transformer.{name}.weight", 1)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    C, hs = config.n_embd, config.n_embd // config.n_head
    factor = 0.12 * math.sqrt(128)
    rows = []
    for sequence in idx:
        x = normed(weights["transformer.wte.weight"][sequence], "ln_e")
        for layer in range(config.n_layer):
            name = f"transformer.h.{layer}."
            into_attention = normed(x, f"h.{layer}.ln_1")
            q, k, v = linear(into_attention, name + "attn.c_attn").split(C, dim=-1)
            heads = []
            for h in range(config.n_head):
                cut = slice(h * hs, (h + 1) * hs)
                keys = torch.stack([turn(rms(row), s) for s, row in enumerate(k[:, cut])])
                out = []
                for t in range(len(sequence)):
                    query = turn(rms(q[t, cut]), t)
                    scores = factor / math.sqrt(hs) * keys[: t + 1] @ query
                    out.append(scores.softmax(0) @ v[: t + 1, cut])
                heads.append(torch.stack(out))
            x = x + linear(torch.cat(heads, -1), name + "attn.c_proj")
            h = linear(normed(x, f"h.{layer}.ln_2"), name + "mlp.c_fc").clamp(min=0) ** 2
            x = x + linear(h, name + "mlp.c_proj")
        z = linear(normed(x, "ln_f"), "lm_head")
        rows.append(15 * z / (z**2 + 225).sqrt())
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [True, False])
def test_logits_equal_the_plain_formulas(bias):
    config = replace(SMALL, bias=bias)
    model, idx = perturbed(config).double(), tokens(2, 9)
    expected = plain_logits(model.state_dict(), idx, config)
    # the model's rotary tables and logits are float32
    torch.testing.assert_close(model(idx).double(), expected, atol=1e-4, rtol=1e-4)
    assert model(idx).abs().max() < 15


def test_gradients_equal_finite_differences(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # float64 throughout
    config = FastConfig(
        block_size=5,
        vocab_size=7,
        n_layer=2,
        n_head=1,
        n_embd=8,
        bias=True,
    )
    model, idx = perturbed(config).double(), tokens(1, 5, 7)
    names, weights = zip(
        *((name, p.detach().requires_grad_()) for name, p in model.named_parameters()),
        strict=True,
    )
    assert torch.autograd.gradcheck(
        lambda *w: functional_call(model, dict(zip(names, w, strict=True)), (idx, idx.flip(1))),
        weights,
        fast_mode=True,
    )


def test_the_fast_models_first_loss_is_the_log_of_the_vocabulary_size():
    torch.manual_seed(0)
    assert FastGPT(SMALL)(tokens(4, 24), tokens(4, 24, seed=1)).item() == pytest.approx(
        math.log(64), abs=1e-5
    )


def test_biases_gains_and_weights_start_as_in_modded_nanogpt():
    """
    Start biases, output projections and head at 0, and gains at 1, as train_gpt_simple.py does.
    """
    torch.manual_seed(0)
    config = replace(SMALL, n_embd=128)
    for name, p in FastGPT(config).named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
            continue
        is_zero = name.endswith(("c_proj.weight", "lm_head.weight"))
        std = 0 if is_zero else 1 if "wte" in name else math.sqrt(0.33 / 128)
        # 8,192 numbers and more: three of their standard errors, which are 1 / sqrt(2 n)
        assert p.std().item() == pytest.approx(std, rel=0.025), name


def test_the_fast_model_without_biases_has_as_many_parameters_as_counted_by_hand():
    """Count an embedding and a head of 50304 x 768, and 12 layers of 12 x 768^2."""
    with torch.device("meta"):
        model = FastGPT(FastConfig(n_head=6, bias=False))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 2 * 50304 * 768 + 12 * 12 * 768**2


@pytest.mark.parametrize("T", [1, 7, 24])
def test_the_fast_models_logits_do_not_depend_on_later_tokens(T):
    """Compute the same logits for the first 1, 7 or 24 tokens as for the whole text."""
    model = perturbed()
    torch.testing.assert_close(
        model(tokens(2, 24))[:, :T], model(tokens(2, 24)[:, :T]), atol=1e-5, rtol=1e-5
    )


def test_fast_model_dropout_acts_on_embeddings_and_block_outputs_only_in_training():
    """Zero 40% of the embeddings and of what attention and MLP each add."""
    model = perturbed(replace(SMALL, dropout=0.4, n_embd=512))
    streams = []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0]))

    def zeros() -> list[float]:
        streams.clear()
        model.hidden(tokens(4, 24))
        added = [after - before for before, after in zip(streams, streams[1:], strict=False)]
        return [(x == 0).float().mean().item() for x in streams[:1] + added]

    embeddings, *added = zeros()
    assert embeddings == pytest.approx(0.4, abs=0.01)
    # attention and MLP both add nothing
    assert added == [pytest.approx(0.16, abs=0.01)] * 2
    model.eval()
    assert max(zeros()) < 0.001


RUN = TINY_RUN | dict(
    warmup_iters=2,
    max_iters=30,
    eval_interval=30,
    eval_tokens=256,
)


@pytest.mark.parametrize(
    "mixed",
    [dict(model="fast", learning_rate=1e-2), dict(optimizer="muon", learning_rate=1e-2)],
    ids=["fast", "muon"],
)
def test_adamw_can_train_the_fast_model_and_muon_can_train_gpt2(mixed, tmp_path):
    """Lower the val loss by more than 0.2 in 30 iterations with either combination."""
    data = write_tokens(tmp_path / "tokens", [1500], [300])
    train(**RUN | mixed, dataset=data, out_dir=tmp_path / "run")
    first, last = column(tmp_path / "run", "eval", "val_loss")
    assert last < first - 0.2


def test_a_run_can_start_from_a_checkpoint_with_a_longer_context(tmp_path):
    """Load weights with block_size=8 instead of 16, and begin near the checkpoint's val loss."""
    fast = RUN | dict(model="fast", max_iters=2, dataset=write_tokens(tmp_path / "t", [900], [300]))
    train(**fast, out_dir=tmp_path / "long")
    train(**fast | dict(block_size=8), init_from=tmp_path / "long", out_dir=tmp_path / "short")
    newest = column(tmp_path / "long", "eval", "val_loss")[-1]
    # the same weights on half of the context
    first = column(tmp_path / "short", "eval", "val_loss")[0]
    assert first == pytest.approx(newest, abs=0.1)


@pytest.mark.slow
def test_the_compiled_fast_model_looks_up_its_rotary_sines():
    """
    Leave no sine in the compiled graph, where each layer would compute it in both passes. Logits
    and the names in a checkpoint stay the same.
    """
    torch.compiler.reset()  # after many graphs of other tests torch would split this one
    model, idx = perturbed(), tokens(2, 24)
    expected, graphs = model(idx), []
    longer = model(tokens(2, 30))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model.compile(backend=backend)
    torch.testing.assert_close(model(idx), expected)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if "sin" in str(node.target).split("_")]
    # as generation reads them: of the tokens that the cache does not hold yet
    model.eval()
    caches = [KVCache(24) for _ in model.transformer.h]
    model.hidden(idx[:, :23], caches)
    last = model.logits(model.hidden(idx, caches))
    torch.testing.assert_close(last, expected[:, 23:], atol=1e-5, rtol=1e-5)
    # there are tables up to block_size; they are no part of a checkpoint
    torch.testing.assert_close(model(tokens(2, 30)), longer)
    assert model.state_dict().keys() == FastGPT(SMALL).state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_models_residual_stream_is_bfloat16_under_bfloat16_but_never_float16(dtype):
    """
    Keep the stream in float32 under float16 autocast, because a sum over all blocks may overflow
    float16.
    """
    with torch.autocast("cpu", dtype):
        stream = FastGPT(SMALL).hidden(tokens(2, 8))
    assert stream.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
