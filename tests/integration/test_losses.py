"""
Check the numbers of real runs against a second trainer (reference_gpt2.py), figures computed by
hand, and runs that must be equal.
"""

import functools
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import reference_gpt2
import torch
from cases import slow_but
from fault_injection import watched
from program import (
    EVAL,
    FAST,
    STEP,
    TINY_RUN,
    InProcessRun,
    Run,
    assert_same_run,
    gradients_of_nan,
    lines,
    same,
    train,
    train_ranks,
    unchanged,
)

import common.environment  # noqa: F401  (counts threads for 0.09 s, which no run's clock may see)
from configurator import Config
from model_fast import model_config

T = 16  # context
BASE = TINY_RUN | dict(
    n_layer=2,
    bias=True,
    gradient_accumulation_steps=3,
    max_iters=12,
    learning_rate=0.01,
    min_lr=0.001,
    warmup_iters=3,
    lr_decay_iters=11,
    weight_decay=0.3,
    beta1=0.8,
    beta2=0.95,
    grad_clip=0.5,
    eval_interval=6,
    eval_tokens=18 * T,  # four and a half micro-batches
    seed=5,
)
# A run rounds to float32, reference_gpt2.py does not. Rounding moves a loss by up to 1e-6, as
# measured over all kinds below; the exact GELU would move a loss by 1e-4.
CLOSE = dict(abs=5e-6)


def write_weights(folder: Path, tokens: Path, **config) -> Path:
    """
    Write weights as far from 0 as a trained model's, biases and norms included. With the small
    weights of a new model, a wrong GELU would hardly change the loss.
    """
    train(**config | dict(max_iters=0), dataset=tokens, out_dir=folder)
    state = Run(folder).state(0)
    generator = torch.Generator().manual_seed(0)
    # a tied weight has two names
    for p in {p.data_ptr(): p for p in state["model"].values()}.values():
        p += 0.2 * torch.randn(p.shape, generator=generator)
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


# -----------------------------------------------------------------------------
# Against the second trainer

KINDS = dict(
    gpt2=dict(),
    # Evaluations take whole windows only. The last two keys change only rounding; a chunk of the
    # loss is less than half a micro-batch
    untied_computed_otherwise=dict(
        tie_weights=False, eval_tokens=6 * T + 4, flash=False, loss_chunk="24"
    ),
    # more than there is: both splits are evaluated on as many tokens as val has
    no_bias_all_of_val=dict(bias=False, eval_tokens=10**6),
    one_micro_batch_not_clipped=dict(gradient_accumulation_steps=1, grad_clip=1e9),
    # clipped to 1e-5, most gradients are near Adam's eps of 1e-8, which then decides on the step
    tiny_gradients=dict(grad_clip=1e-5),
    compiled=dict(compile=True),
)


@pytest.mark.parametrize("kind", slow_but(*[*KINDS][:3], of=KINDS))
def test_a_run_logs_and_saves_what_a_second_trainer_computes(kind, tokens, tmp_path):
    """
    Compare losses, learning rates, gradient norms and weights with the plain trainer in
    reference_gpt2.py.
    """
    config = BASE | KINDS[kind]
    weights = write_weights(tmp_path / "before", tokens, **config)
    train(**config, init_from=weights, dataset=tokens, out_dir=tmp_path)
    before, second = (reference_gpt2.weights(torch.load(weights)["model"]) for _ in "ab")
    expected = reference_gpt2.train(second, tokens, config)

    losses, rates, norms = zip(*expected.steps, strict=True)
    assert Run(tmp_path).steps("loss") == pytest.approx(losses, **CLOSE)
    assert Run(tmp_path).steps("lr") == pytest.approx(rates, rel=1e-8)  # nine digits
    assert Run(tmp_path).steps("grad_norm") == pytest.approx(norms, rel=2e-6)
    size = config["gradient_accumulation_steps"] * config["batch_size"] * T
    positions = [(it, it * size, (it + 1) * size) for it in range(12)]
    assert Run(tmp_path).steps("iter", "tokens", "tokens_after") == positions

    found = Run(tmp_path).evals("iter", "train_loss", "val_loss")
    for ours, theirs in zip(found, expected.evals, strict=True):
        assert ours == pytest.approx(theirs, **CLOSE)
    for record in Run(tmp_path).records("eval"):
        nats = record["val_loss"]
        assert record["perplexity"] == pytest.approx(math.exp(nats))
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / 3)  # bytes per token
        assert record["tokens"] == record["iter"] * size

    last = reference_gpt2.weights(Run(tmp_path).state(12)["model"])
    # Where a weight's gradient is nothing but rounding, Adam still makes a whole step of it, so a
    # few weights may differ. Decay on norms would move the weights 6 % as far as training does.
    assert distance(last, second) < 0.004 * distance(before, second)


def distance(a: reference_gpt2.Weights, b: reference_gpt2.Weights) -> float:
    """
    Return the distance between two models' weights, without the biases of attention's keys. These
    biases shift all scores of a query equally, which softmax cancels, so their gradients are only
    rounding.
    """
    total = 0.0
    for name in a.keys() | b.keys():
        difference = (a[name] - b[name]).detach()
        if name.endswith("c_attn.bias"):
            q, _, v = difference.chunk(3)
            difference = torch.cat([q, v])
        total += difference.square().sum().item()
    return math.sqrt(total)


def test_a_run_from_scratch_has_gpt2s_initial_weights_and_a_loss_near_ln_v(tokens, tmp_path):
    sizes = dict(n_layer=4, n_embd=128, tie_weights=False, max_iters=0)
    train(**BASE | sizes, dataset=tokens, out_dir=tmp_path)
    for name, p in Run(tmp_path).state(0)["model"].items():
        if p.dim() == 2:
            # GPT-2 paper, section 2.3; two projections of each layer add to the residual stream
            std = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            # the smallest matrix has 2,048 numbers, so the standard deviation is known to 1.6 % and
            # the mean to 2 % of the deviation; this allows five times as much
            assert p.std() == pytest.approx(std, rel=0.08), name
            assert p.mean() == pytest.approx(0, abs=0.1 * std), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    # random logits cost half of their variance more than a uniform guess
    variance = 0.02**2 * 128
    [(train_loss, val_loss)] = Run(tmp_path).evals("train_loss", "val_loss")
    assert train_loss == pytest.approx(math.log(128) + variance / 2, abs=0.02)
    assert val_loss == pytest.approx(math.log(128) + variance / 2, abs=0.02)


def test_the_vocabulary_is_padded_to_a_multiple_of_pad_vocab_multiple():
    for multiple, padded in {1: 61, 2: 62, 64: 64, 128: 128}.items():
        made = model_config(Config(pad_vocab_multiple=multiple), vocab=61)
        assert made.vocab_size == padded


# -----------------------------------------------------------------------------
# Dropout and samples


def test_dropout_acts_in_training_but_not_in_evaluations_and_samples(tokens, tmp_path):
    # with rates of 0 both runs keep the weights that they start from
    config = BASE | dict(learning_rate=0, min_lr=0, max_iters=6, eval_interval=3)
    weights = write_weights(tmp_path / "before", tokens, **config)
    config |= dict(sample_tokens=20, init_from=weights)
    without, dropping = (Run(tmp_path / name) for name in ("0.0", "0.5"))
    for seen in (without, dropping):
        train(**config, dropout=seen.out_dir.name, dataset=tokens, out_dir=seen.out_dir)
    (text, _) = without.column("sample", "text")
    assert len(text) > 10 and dropping.column("sample", "text") == without.column("sample", "text")
    assert dropping.evals(*EVAL) == without.evals(*EVAL)
    # also right after an evaluation or a sample
    losses = zip(without.steps("loss"), dropping.steps("loss"), strict=True)
    assert all(one != other for one, other in losses)


# -----------------------------------------------------------------------------
# Numbers of other precision, and no numbers


def test_half_precision_losses_stay_close_to_float32(tokens, tmp_path):
    """
    Allow a relative difference of 2^-9 (bfloat16) or 2^-12 (float16) in each loss. The first losses
    must differ, which shows that half precision is used, in evaluation too.
    """
    for dtype in ("float32", "bfloat16", "float16"):
        config = BASE | dict(dtype=dtype, max_iters=6, eval_interval=3)
        train(**config, dataset=tokens, out_dir=tmp_path / dtype)
    whole = tmp_path / "float32"
    # A single number is rounded by 2**-9 or 2**-12 of itself. A loss is a mean of many numbers, but
    # over the iterations the rounding adds up: to a third of `near` in a loss, to more in a norm.
    for dtype, near in (("bfloat16", 2**-9), ("float16", 2**-12)):
        half = tmp_path / dtype
        for kind, name in (("step", "loss"), ("eval", "train_loss"), ("eval", "val_loss")):
            ours, theirs = Run(half).column(kind, name), Run(whole).column(kind, name)
            assert ours == pytest.approx(theirs, rel=near), (dtype, name)
            assert ours[0] != theirs[0], (dtype, name)  # of the initial weights
        ours, theirs = Run(half).steps("grad_norm"), Run(whole).steps("grad_norm")
        assert ours == pytest.approx(theirs, rel=50 * near), dtype


def test_a_float16_run_recovers_from_too_high_a_loss_scale(tokens, tmp_path):
    """
    Switch to it after 4 iterations, at 2^21. Each overflow halves the scale and logs null as
    grad_norm, and its iteration is saved; so is, once more, the one at which the run resumes.
    """
    config = BASE | dict(dataset=tokens, out_dir=tmp_path, eval_interval=100)
    # float16 is slow on a CPU
    config |= dict(n_layer=1, gradient_accumulation_steps=1, keep_checkpoints=1)
    train(**config | dict(max_iters=4))
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**21)
    with mock.patch("torch.amp.GradScaler", scaler):
        half = dict(dtype="float16", init_from="resume", checkpoint_interval=1, max_iters=16)
        train(**config | half)
    norms = Run(tmp_path).steps("grad_norm")
    halved = norms.count(None)  # norms that were not finite
    assert halved >= 3 and norms[4 : 4 + halved] == [None] * halved
    assert Run(tmp_path).state(16)["scaler"]["scale"] == 2.0 ** (21 - halved)
    assert Run(tmp_path).column("checkpoint", "iter") == [*range(4, 17)]
    losses = Run(tmp_path).steps("loss")
    assert losses[-1] < losses[4] - 0.01


ADAMW = torch.optim.AdamW.__init__
HALF = dict(dtype="float16")
OPTIMIZERS = {"": {}, "half": HALF, "muon": FAST, "muon in half": FAST | HALF, "not fused": {}}


@pytest.mark.parametrize("kind", slow_but("", "muon in half", "not fused", of=OPTIMIZERS))
def test_an_update_with_a_gradient_of_nan_is_skipped_with_a_warning(kind, tokens, tmp_path):
    config = BASE | OPTIMIZERS[kind]
    config |= dict(n_layer=1, checkpoint_interval=1, eval_interval=100, max_iters=5)
    config |= dict(keep_checkpoints=3)

    def adamw(self, groups, fused=None, **keys):
        ADAMW(self, groups, fused=fused and kind != "not fused", **keys)

    # in a micro-batch of iteration 3
    with mock.patch("torch.optim.AdamW.__init__", adamw), gradients_of_nan([3 * 3 + 1]):
        result = train(**config, dataset=tokens, out_dir=tmp_path)
    before, after, later = (Run(tmp_path).state(it) for it in (3, 4, 5))
    assert same(before["model"], after["model"])
    assert same(before["optimizer"]["state"], after["optimizer"]["state"])
    assert not same(after["model"], later["model"])
    norms = Run(tmp_path).steps("grad_norm")
    assert [it for it, norm in enumerate(norms) if norm is None] == [3]
    assert after["iter_num"] == 4
    assert "iter 3: 1 updates in a row skipped" in result.err


def test_eval_only_evaluates_once_and_writes_nothing(tokens, tmp_path):
    out_dir = tmp_path / "run"
    train(**BASE, dataset=tokens, out_dir=out_dir)
    last = out_dir / "ckpt-00000012.pt"
    losses = Run(out_dir).evals("train_loss", "val_loss")[-1]

    for start_from in (
        dict(init_from="resume", out_dir=out_dir),
        dict(out_dir=out_dir),  # the run that is there
        dict(init_from=last, out_dir=tmp_path / "new"),
    ):
        with unchanged(tmp_path):
            result = train(**BASE, **start_from, eval_only=True, dataset=tokens)
        (line,) = lines(result.out, "step ")
        assert "train loss {:.4f}, val loss {:.4f}".format(*losses) in line
        assert not lines(result.out, "iter ")
    assert not (tmp_path / "new").exists()


# -----------------------------------------------------------------------------
# Speed


def assert_speeds(ran: Run, size: int, devices: int = 1) -> None:
    """Check the speeds of a run whose iterations had `size` tokens each."""
    (flops_per_token,) = ran.column("start", "flops_per_token")
    for step in ran.records("step"):
        assert step["tokens_per_sec"] * step["step_ms"] / 1000 == pytest.approx(size)
        flops = flops_per_token * step["tokens_per_sec"]
        assert step["mfu"] == pytest.approx(flops / (1e12 * BASE["peak_tflops"] * devices))


def test_each_second_is_counted_once_and_evaluations_and_saves_do_not_lower_the_speed(
    tokens, tmp_path
):
    trainer = InProcessRun(fake_clock=True)
    trainer.seconds = dict(iteration=0.5, lookup=0.001, save=1.0)
    # evaluations and saves come at iterations 4 and 8, where there is no log line
    config = BASE | dict(eval_interval=4, log_interval=3)
    assert trainer.launch(**config, dataset=tokens, out_dir=tmp_path).code == 0

    lookups = trainer.count["lookup"]
    assert lookups > 4 * 2 * 5  # 4 evaluations, 2 splits, 5 batches of several lookups
    spent = dict(steps=12 * 0.5, evaluation=lookups * 0.001, checkpoints=3 * 1.0)
    [end] = Run(tmp_path).records("end")
    assert end["ledger"] == pytest.approx(spent | {"start-up": 0, "compile": 0, "samples": 0})
    assert 3600 * end["hours"] == pytest.approx(sum(spent.values()))

    assert Run(tmp_path).steps("iter") == [0, 3, 6, 9, 11]
    assert Run(tmp_path).steps("step_ms") == pytest.approx([500] * 5)
    assert_speeds(Run(tmp_path), size=12 * T)
    evaluations = Run(tmp_path).evals("seconds")
    assert evaluations == pytest.approx([spent["evaluation"] / 4] * 4)
    assert Run(tmp_path).column("checkpoint", "seconds") == pytest.approx([1.0] * 3)


# -----------------------------------------------------------------------------
# Two ranks


# leave each sequence another number of targets, and some sequences none
MASKED = """
    from data.loader import Batches
    unmasked = Batches.take

    def take(self, it):
        batches = unmasked(self, it)
        for x, y in batches:
            y[torch.arange(x.size(1)) >= x[:, :1] % 16] = -1
        return batches

    Batches.take = take
"""


def test_two_ranks_train_like_one_process_with_other_micro_batches(tokens, tmp_path):
    """
    Log the same numbers but for rounding, although targets are masked, and the 18 windows of an
    evaluation do not fill its last batch.
    """
    for ranks, batch_size, accum in ((1, 20, 1), (2, 5, 4)):
        sizes = dict(batch_size=batch_size, gradient_accumulation_steps=accum)
        files = dict(dataset=tokens, out_dir=tmp_path / str(ranks))
        train_ranks(ranks, script=watched(before=MASKED), **BASE | sizes | files)
    for kind, names in (("step", STEP), ("eval", EVAL)):
        one, two = (Run(tmp_path / n).column(kind, *names) for n in "12")
        for ours, theirs in zip(two, one, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)
    assert_speeds(Run(tmp_path / "2"), size=20 * T, devices=2)


def test_two_ranks_drop_other_units_and_resume_bit_for_bit(tokens, tmp_path):
    """Draw other random numbers on each rank, also right after an update."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    keys = BASE | dict(gradient_accumulation_steps=4, dropout=0.2, dataset=tokens)
    keys |= dict(max_iters=4, eval_interval=2)
    script = watched("print('drawn', torch.rand(1).item(), file=sys.stderr)")
    results = train_ranks(2, script=script, **keys, out_dir=whole)
    one, two = (lines(result.err, "drawn ") for result in results)
    assert len(one) == len(two) == 4 and not {*one} & {*two}
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("ckpt-00000004.pt"))
    train_ranks(2, **keys, out_dir=resumed, init_from="resume")
    assert_same_run(whole, resumed, 4)
