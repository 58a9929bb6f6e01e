"""
The numbers of real runs, judged from outside: by a second trainer (plain.py), by figures computed
by hand, and by runs that must be equal.
"""

import json
import math
import re
import shutil
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import plain
import pytest
import torch
from program import (
    ROOT,
    STEP,
    assert_same_run,
    changed,
    checkpoint,
    checkpoints,
    column,
    finish,
    finish_ranks,
    flags,
    records,
    run,
    same,
    start,
    start_ranks,
    train,
    write_tokens,
)

T = 16  # context
V = 61  # vocabulary; padded to 128
TRAIN = [700, 37, 500]  # tokens of the shards: 77 windows, of which 12 iterations take 144
VAL = [250, 150]
BASE = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=T,
    bias=True,
    batch_size=4,
    gradient_accumulation_steps=3,
    max_iters=12,
    learning_rate=1e-2,
    min_lr=1e-3,
    warmup_iters=3,
    lr_decay_iters=11,
    weight_decay=0.3,
    beta1=0.8,
    beta2=0.95,
    grad_clip=0.5,
    eval_interval=6,
    eval_tokens=18 * T,  # four micro-batches and a half
    keep_checkpoints=99,
    device="cpu",
    dtype="float32",
    compile=False,
    seed=5,
)
TOKENS = 12 * T  # of an iteration
# A run rounds to float32, plain.py does not. That moves a loss by up to 1e-6, measured over all kinds
# below; the exact GELU would move it by 3e-4.
CLOSE = dict(abs=5e-6)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("numbers") / "tokens", TRAIN, VAL, V)


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    """
    Makes a file with weights like those of a trained model: so far from 0 that each part of the
    model matters, biases and norms too. A run from scratch would hardly show which GELU it has.
    """
    folder = tmp_path_factory.mktemp("trained")

    def make(**changes) -> Path:
        config = BASE | changes
        name = f"bias_{config['bias']}_tied_{config.get('tie_weights', True)}"
        if not (folder / f"{name}.pt").exists():
            train(**config | dict(max_iters=0), dataset=tokens, out_dir=folder / name)
            state = checkpoint(folder / name, 0)
            generator = torch.Generator().manual_seed(0)
            # one tensor may have two names
            for p in {p.data_ptr(): p for p in state["model"].values()}.values():
                p += 0.2 * torch.randn(p.shape, generator=generator)
            torch.save(state, folder / f"{name}.pt")
        return folder / f"{name}.pt"

    return make


# -----------------------------------------------------------------------------
# Against the second trainer

KINDS = dict(
    gpt2=dict(),
    no_bias=dict(bias=False),
    untied=dict(tie_weights=False),
    one_micro_batch=dict(gradient_accumulation_steps=1),
    not_clipped=dict(grad_clip=1e9),
    # clipped to 1e-5, most gradients are near Adam's eps of 1e-8, which then decides on the step
    tiny_gradients=dict(grad_clip=1e-5),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_run_is_the_plain_trainers(kind, tokens, trained, tmp_path):
    config = BASE | KINDS[kind]
    weights = trained(**config)
    train(**config, init_from=weights, dataset=tokens, out_dir=tmp_path)
    w = plain.weights(torch.load(weights)["model"])
    expected = plain.train(w, tokens, config)

    losses, rates, norms = zip(*expected.steps, strict=True)
    assert column(tmp_path, "step", "loss") == pytest.approx(losses, **CLOSE)
    assert column(tmp_path, "step", "lr") == pytest.approx(rates, rel=1e-8)  # nine digits
    assert column(tmp_path, "step", "grad_norm") == pytest.approx(norms, rel=2e-6)
    size = config["gradient_accumulation_steps"] * config["batch_size"] * T
    positions = [(it, it * size, (it + 1) * size) for it in range(12)]
    assert column(tmp_path, "step", "iter", "tokens", "tokens_after") == positions

    found = column(tmp_path, "eval", "iter", "train_loss", "val_loss")
    for ours, theirs in zip(found, expected.evals, strict=True):
        assert ours == pytest.approx(theirs, **CLOSE)
    for record in records(tmp_path, "eval"):
        nats = record["val_loss"]
        assert record["perplexity"] == pytest.approx(math.exp(nats))
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / 3)  # bytes per token
        assert record["tokens"] == record["iter"] * size

    last = plain.weights(checkpoint(tmp_path, 12)["model"])
    assert last.keys() == w.keys()
    for name in w:
        ours, theirs = (without_keys_bias(name, found[name]) for found in (last, w))
        # some ten times what rounding makes of 12 updates; decay on norms alone is 1e-3
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0, msg=name)


def without_keys_bias(name: str, p: torch.Tensor) -> torch.Tensor:
    """
    A bias of attention's keys changes nothing, as it moves all scores of a query alike. So its
    gradient is rounding, which Adam makes large.
    """
    if not name.endswith("c_attn.bias"):
        return p
    q, _, v = p.chunk(3)
    return torch.cat([q, v])


def test_a_run_from_scratch_starts_with_gpt2s_weights_and_a_loss_of_ln_v(tokens, tmp_path):
    sizes = dict(n_layer=4, n_embd=128, tie_weights=False, max_iters=0)
    train(**BASE | sizes, dataset=tokens, out_dir=tmp_path)
    for name, p in checkpoint(tmp_path, 0)["model"].items():
        if p.dim() == 2:
            # GPT-2 paper, section 2.3; two projections of each layer add to the residual stream
            std = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            # 2,048 numbers in the smallest matrix: their deviation is known to 1.6 %, their mean to
            # 2 % of it; this allows five times that
            assert p.std() == pytest.approx(std, rel=0.08), name
            assert p.mean() == pytest.approx(0, abs=0.1 * std), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    # random logits of this variance cost half of it over a uniform guess
    variance = 0.02**2 * 128
    [(train_loss, val_loss)] = column(tmp_path, "eval", "train_loss", "val_loss")
    assert train_loss == pytest.approx(math.log(128) + variance / 2, abs=0.02)
    assert val_loss == pytest.approx(math.log(128) + variance / 2, abs=0.02)


# linear warmup over three iterations to 1e-2; from iteration 11 on 1e-3
SCHEDULES = dict(
    cosine=[
        *(2.5e-3, 5e-3, 7.5e-3),
        *(1e-3 + 4.5e-3 * (1 + math.cos(math.pi * eighth / 8)) for eighth in range(9)),
        *(1e-3, 1e-3),
    ],
    linear=[
        *(2.5e-3, 5e-3, 7.5e-3),
        *(1e-2, 8.875e-3, 7.75e-3, 6.625e-3, 5.5e-3, 4.375e-3, 3.25e-3, 2.125e-3, 1e-3),
        *(1e-3, 1e-3),
    ],
    # decays in the last two fifths of 11 iterations: 4 of them
    wsd=[
        *(2.5e-3, 5e-3, 7.5e-3),
        *(1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 7.75e-3, 5.5e-3, 3.25e-3, 1e-3),
        *(1e-3, 1e-3),
    ],
    constant=[2.5e-3, 5e-3, 7.5e-3, *[1e-2] * 11],
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_uses_the_rates_of_its_schedule(schedule, tokens, trained, tmp_path):
    rates = SCHEDULES[schedule]
    config = BASE | dict(max_iters=14, lr_schedule=schedule)
    extra = dict(decay_fraction=0.4) if schedule == "wsd" else {}
    weights = trained()
    train(**config, **extra, init_from=weights, dataset=tokens, out_dir=tmp_path)
    assert column(tmp_path, "step", "lr") == pytest.approx(rates, rel=1e-8)  # nine digits
    # the rates are not only logged
    expected = plain.train(plain.weights(torch.load(weights)["model"]), tokens, config, rates)
    losses = [loss for loss, _, _ in expected.steps]
    assert column(tmp_path, "step", "loss") == pytest.approx(losses, **CLOSE)


STREAMED = dict(stream=True, tokenizer="byte", dataset="text.jsonl")


def test_a_stream_trains_on_the_shards_that_a_preparation_makes(trained, tmp_path, monkeypatch):
    """In order, and evaluates on the same tokens as a run on them."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{word} {n} " * (n % 7 + 1) for n in range(40) for word in ("alpha", "beta", "zeta")]
    rows = [json.dumps(dict(text=text)) + "\n" for text in texts]
    Path("text.jsonl").write_text("".join(rows))
    prepare = ["--source=text.jsonl", "--tokenizer=byte", f"--val_tokens={BASE['eval_tokens']}"]
    assert run("data/prepare_fineweb.py", *prepare, "--out=shards").code == 0
    config = BASE | dict(pad_vocab_multiple=1)  # 257 tokens

    train(**config | STREAMED, out_dir="streamed")
    train(**config | dict(max_iters=0), dataset="shards", out_dir="prepared")
    assert column(Path("streamed"), "eval")[0] == column(Path("prepared"), "eval")[0]
    w = plain.weights(checkpoint(Path("prepared"), 0)["model"])
    expected = plain.train(w, Path("shards"), config | dict(stream=True))
    losses = [loss for loss, _, _ in expected.steps]
    assert column(Path("streamed"), "step", "loss") == pytest.approx(losses, **CLOSE)


# -----------------------------------------------------------------------------
# Dropout and samples


def test_dropout_acts_in_every_iteration_and_in_no_evaluation(tokens, trained, tmp_path):
    """Also in those after an evaluation and a sample."""
    config = BASE | dict(dropout=0.5, eval_interval=4, sample_tokens=4, checkpoint_interval=1)
    train(**config, init_from=trained(), dataset=tokens, out_dir=tmp_path)
    assert len(records(tmp_path, "sample")) == 3
    for it, *losses in column(tmp_path, "eval", "iter", "train_loss", "val_loss")[1:]:
        w = plain.weights(checkpoint(tmp_path, it)["model"])
        assert losses == pytest.approx(plain.evaluate(w, tokens, config), **CLOSE)
    batches = plain.batches(tokens, config)
    next(batches)
    for it, loss in enumerate(column(tmp_path, "step", "loss")[1:], 1):
        w = plain.weights(checkpoint(tmp_path, it)["model"])
        # without dropout they would be within 5e-6
        assert abs(loss - plain.loss_of(w, config, next(batches)).item()) > 0.01, it


def test_samples_change_no_bit_of_the_training(tokens, tmp_path):
    config = BASE | dict(dropout=0.3, eval_interval=3, dataset=tokens)
    train(**config, out_dir=tmp_path / "silent")
    train(**config, out_dir=tmp_path / "sampling", sample_tokens=12)
    assert len(records(tmp_path / "sampling", "sample")) == 4
    assert_same_run(tmp_path / "silent", tmp_path / "sampling", 12)


def test_a_sample_is_made_without_dropout(tokens, trained, tmp_path):
    # with rates of 0 both runs keep the weights that they start from
    config = BASE | dict(learning_rate=0, min_lr=0, sample_tokens=40, init_from=trained())
    for dropout in (0.0, 0.5):
        train(**config, dropout=dropout, dataset=tokens, out_dir=tmp_path / str(dropout))
    texts = column(tmp_path / "0.5", "sample", "text")
    assert texts == column(tmp_path / "0.0", "sample", "text")
    assert len(texts[0]) > 10
