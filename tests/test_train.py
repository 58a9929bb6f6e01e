"""
The loop: what it logs, when it evaluates and saves, and that stopping and going on changes nothing.
"""

import contextlib
import functools
import json
import math
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    FAST,
    ROOT,
    assert_same_state,
    flags,
    load,
    load_newest,
    records,
    run_here,
    run_process,
    write_dataset,
)
from torch._inductor.exc import TritonMissing

import model
import train
from common.console import RunError, UserError, run_main
from configurator import Config, load_config
from data.loader import Batches, ShuffledWindows
from data.shards import ShardTokens
from model_fast import build_model
from train import build_optimizer, model_config
from training import compiled
from training.compiled import compile_or_warn
from training.hardware import set_up
from training.ranks import StopSignals


def test_iterations_evaluations_and_checkpoints_come_when_they_should(dataset, tmp_path, capsys):
    """nanoGPT runs one iteration too many, and saves nothing at the end."""
    assert (
        run_here(
            dataset,
            tmp_path,
            max_iters=7,
            eval_interval=3,
            checkpoint_interval=2,
            keep_checkpoints=10,
        )
        == 0
    )
    assert [r["iter"] for r in records(tmp_path, "step")] == [0, 1, 2, 3, 4, 5, 6]
    assert [r["iter"] for r in records(tmp_path, "eval")] == [0, 3, 6, 7]
    assert [r["iter"] for r in records(tmp_path, "checkpoint")] == [2, 3, 4, 6, 7]
    out = capsys.readouterr().out
    evaluation = r"^step 7: train loss \d\.\d{4}, val loss (\d\.\d{4}), time \d+\.\ds"
    assert re.search(rf"{evaluation}, perplexity [\d.]+, \d\.\d{{4}} bits per byte$", out, re.M)
    # its tokens are bytes
    last = records(tmp_path, "eval")[-1]
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert records(tmp_path, "start")[0]["tokenizer"] == "byte"
    assert re.search(
        rf"^checkpoint 7: {tmp_path}/ckpt-00000007.pt, 0\.\d\dMB, time \d+\.\ds, 20\d\d-", out, re.M
    )
    assert records(tmp_path, "end")[0]["reason"] == "max_iters"


def test_loss_falls_and_tokens_are_counted(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=40, eval_interval=20)
    steps, evals = records(tmp_path, "step"), records(tmp_path, "eval")
    assert steps[0]["loss"] == pytest.approx(math.log(128), abs=0.3)  # 64 ids, padded to 128
    assert evals[-1]["val_loss"] < 2.5
    # what the weights behind this loss were trained on
    assert steps[10]["tokens"] == 10 * 4 * 16 * 2


@pytest.mark.parametrize(
    "name, changes",
    [
        ("fp32 with dropout and accumulation", dict(dropout=0.1, gradient_accumulation_steps=3)),
        (
            "bf16, recomputed",
            dict(dtype="bfloat16", dropout=0.1, gradient_accumulation_steps=3, recompute=True),
        ),
        ("across epochs", dict(max_iters=32, batch_size=8)),
        ("untied, wsd", dict(tie_weights=False, lr_schedule="wsd")),
    ],
)
def test_n_plus_n_iterations_equal_2n_bit_for_bit(name, changes, dataset, tmp_path):
    """
    nanoGPT #467 repeats the batches; random states and the position in the data are lost there.
    1,537 tokens of training data in three shards: an epoch is 95 windows of 16.
    """
    total = changes.pop("max_iters", 8)
    run_here(dataset, tmp_path / "straight", max_iters=total, **changes)
    run_here(dataset, tmp_path / "broken", max_iters=total // 2, lr_decay_iters=total, **changes)
    run_here(dataset, tmp_path / "broken", max_iters=total, init_from="resume", **changes)
    assert_same_state(load(tmp_path / "straight", total), load(tmp_path / "broken", total))
    losses = [
        [r["loss"] for r in records(tmp_path / run, "step")] for run in ("straight", "broken")
    ]
    assert losses[0] == losses[1]
    if name == "across epochs":
        assert total * 8 * 2 > 5 * 95


PLAIN = dict(
    flash=False,
    loss_chunk="off",
    pad_vocab_multiple=1,
    tf32=False,
    n_embd=64,
    max_iters=12,
    eval_interval=12,
)
RECIPES = dict(classic=PLAIN, fast=PLAIN | FAST | dict(learning_rate=0.01))
# Each path's changes, and the most by which a loss may differ, in nats.
PATHS = dict(
    # the same operations on the same numbers
    recompute=(dict(recompute=True), 0.0),
    # losses of 4 in float32's 24 bits, 5e-7, times what 12 updates make of that
    fused=(dict(fused=True), 1e-5),
    # the same, as for the next two
    flash=(dict(flash=True), 1e-5),
    loss_chunk=(dict(loss_chunk="24"), 1e-5),
    compile=(dict(compile=True), 1e-5),
    # 8 bits: 0.4 % of a product
    bfloat16=(dict(dtype="bfloat16"), 0.03),
    # one more id in the softmax, ln(65 / 64) = 0.016, and other updates for it
    padding=(dict(pad_vocab_multiple=65), 0.05),
    together=(dict(fused=True, flash=True, compile=True, recompute=True, dtype="bfloat16"), 0.03),
)
SLOW_PATHS = ("compile", "together")


def build_with_weights_of_unpadded(config):
    """The model; random weights depend on the vocabulary's size, these do not."""
    plain, model = build_model(replace(config, vocab_size=64)), build_model(config)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            model.get_parameter(name)[: len(p)] = p
    return model


def build_without_fusing(*arguments):
    optimizer = build_optimizer(*arguments)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"] = False
    return optimizer


def losses_of(dataset, out_dir, fused=False, **options) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_model", build_with_weights_of_unpadded)
        if not fused:
            patch.setattr(train, "build_optimizer", build_without_fusing)
        assert run_here(dataset, out_dir, **options) == 0
    return [r["loss"] for r in records(out_dir, "step")]


@pytest.fixture(scope="module")
def plain_losses(dataset, tmp_path_factory):
    """plain_losses(recipe, device): those of the plain path, which is run once for each."""
    known = {}

    def losses(recipe, device):
        if (recipe, device) not in known:
            out_dir = tmp_path_factory.mktemp("plain") / "run"
            known[recipe, device] = losses_of(dataset, out_dir, device=device, **RECIPES[recipe])
        return known[recipe, device]

    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW_PATHS else []) for p in PATHS]
)
def test_every_fast_path_follows_the_plain_one(
    path, recipe, device, plain_losses, dataset, tmp_path
):
    """
    float32, eager, the plain formulas, an optimizer of single operations; and one change to that.
    """
    changes, tolerance = PATHS[path]
    plain = plain_losses(recipe, device)
    other = losses_of(dataset, tmp_path / "run", **RECIPES[recipe] | dict(device=device) | changes)
    assert len(plain) == len(other) == 12 and plain[-1] < plain[0] - 0.5
    assert max(abs(a - b) for a, b in zip(plain, other, strict=True)) <= tolerance


def test_another_micro_batch_goes_on_with_the_same_data_and_is_said(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path / "a", max_iters=8)
    run_here(dataset, tmp_path / "b", max_iters=4, lr_decay_iters=8)
    run_here(
        dataset,
        tmp_path / "b",
        max_iters=8,
        init_from="resume",
        batch_size=2,
        gradient_accumulation_steps=4,
    )
    assert "resume: batch_size = 2 (the checkpoint had 4)" in capsys.readouterr().out
    a, b = ([r["loss"] for r in records(tmp_path / run, "step")] for run in "ab")
    assert a == pytest.approx(b, abs=1e-5)  # the same sequences, summed in another order


EVALUATED = dict(batch_size=2, dropout=0.1, eval_tokens=64, keep_checkpoints=9)
BATCHES = 2 * 64 // (2 * 16)  # of an evaluation: both splits


@pytest.fixture(scope="module")
def straight(dataset, tmp_path_factory):
    """The run that nobody stops."""
    out_dir = tmp_path_factory.mktemp("straight")
    run_here(dataset, out_dir, **EVALUATED)
    return out_dir


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("iteration", [0, 4, 8])
def test_an_evaluation_that_a_signal_interrupts_is_made_by_the_resumed_run(
    iteration, batch, straight, dataset, tmp_path, monkeypatch
):
    """Before each of its batches, that of the last evaluation too."""
    looks, evaluation = iter(range(10**6)), iteration // 4
    stop_asked = StopSignals.stop_asked

    def interrupted(signals):
        if next(looks) == evaluation * BATCHES + batch:
            signal.raise_signal(signal.SIGTERM)
        return stop_asked(signals)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "stop_asked", interrupted)
        assert run_here(dataset, tmp_path, **EVALUATED) == 143
    assert [r["iter"] for r in records(tmp_path, "eval")] == [0, 4, 8][:evaluation]
    assert load_newest(tmp_path)["progress"]["iter_num"] == iteration
    assert load_newest(tmp_path)["progress"]["evaluated_at"] != iteration
    assert run_here(dataset, tmp_path, init_from="resume", **EVALUATED) == 0
    assert_same_log(tmp_path, straight)
    assert_same_state(load(tmp_path, 8), load(straight, 8))
    best = [torch.load(run / "best.pt", weights_only=True) for run in (tmp_path, straight)]
    assert_same_state(*best)


def assert_same_log(one: Path, two: Path) -> None:
    """The same losses, rates and tokens, to the last bit."""
    names = ("iter", "loss", "lr", "grad_norm", "tokens", "train_loss", "val_loss")
    for kind in ("step", "eval"):
        left, right = (
            [[r.get(n) for n in names] for r in records(run, kind)] for run in (one, two)
        )
        assert left == right


def test_a_lone_best_is_not_deleted_without_a_word(dataset, tmp_path):
    run_here(dataset, tmp_path / "run", max_iters=4)
    (tmp_path / "lone").mkdir()
    shutil.copy(tmp_path / "run" / "best.pt", tmp_path / "lone")
    for init_from in ("scratch", "auto"):
        with pytest.raises(UserError, match="best.pt|holds an earlier run"):
            run_here(dataset, tmp_path / "lone", init_from=init_from)
    assert (tmp_path / "lone" / "best.pt").exists()


def test_a_misspelt_start_is_told_what_was_meant(dataset, tmp_path):
    for typed, meant in (("resum", "resume"), ("gpt2-larg", "gpt2-large")):
        with pytest.raises(UserError, match=f"{typed}: no such file or folder; .*mean {meant}"):
            run_here(dataset, tmp_path, init_from=typed)


@pytest.mark.parametrize("lr_decay_iters", [0, 8])
def test_a_larger_max_iters_has_a_longer_schedule_unless_its_end_is_given(
    lr_decay_iters, dataset, tmp_path, capsys
):
    run_here(dataset, tmp_path / "run", max_iters=8, lr_decay_iters=lr_decay_iters)
    longer = dict(max_iters=12, lr_decay_iters=lr_decay_iters)
    run_here(dataset, tmp_path / "run", **longer, init_from="resume")
    assert "resume: max_iters = 12 (the checkpoint had 8)" in capsys.readouterr().out
    run_here(dataset, tmp_path / "whole", **longer)
    broken, whole = ([r["lr"] for r in records(tmp_path / n, "step")] for n in ("run", "whole"))
    assert len(broken) == 12 and broken[8:] == whole[8:]
    if lr_decay_iters:
        assert broken == whole and broken[8:] == [6e-5] * 4


def test_resume_takes_the_architecture_from_the_checkpoint_and_refuses_another(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=4)
    plain = [
        f"--out_dir={tmp_path}",
        "--init_from=resume",
        "--device=cpu",
        "--compile=False",
        "--max_iters=5",
        "--batch_size=4",
        "--gradient_accumulation_steps=2",
        "--dtype=float32",
        "--eval_tokens=256",
    ]
    assert train.main(plain) == 0
    with pytest.raises(UserError) as error:
        train.main(
            [*plain, "--n_layer=3", "--seed=5", "--max_iters=9"][1:] + [f"--out_dir={tmp_path}"]
        )
    problems = error.value.problems
    assert any("n_layer 2 (asked for: 3), seed 1337 (asked for: 5)" in p for p in problems)


def test_resume_refuses_other_data(dataset, tmp_path):
    run_here(dataset, tmp_path / "run", max_iters=4)
    other = write_dataset(tmp_path / "other", [1000, 38, 500])
    with pytest.raises(UserError, match="or has changed since"):
        run_here(other, tmp_path / "run", init_from="resume")


def test_a_finished_run_with_another_text_or_model_is_not_done(dataset, tmp_path, capsys):
    """A student copies a config and forgets out_dir: done, it would sample another one's model."""
    mine = write_dataset(tmp_path / "mine", [1000, 37, 500])
    auto = dict(init_from="auto", max_iters=4)
    assert run_here(mine, tmp_path / "run", **auto) == 0
    other = write_dataset(tmp_path / "other", [1000, 38, 500])
    with pytest.raises(
        UserError, match="or has changed since; for a new run give another --out_dir$"
    ):
        run_here(other, tmp_path / "run", **auto)
    with pytest.raises(UserError, match=r"n_layer 2 \(asked for: 3\); .* another --out_dir"):
        run_here(mine, tmp_path / "run", n_layer=3, **auto)
    # the same tokens under another name are the same text
    assert run_here(dataset, tmp_path / "run", **auto) == 0
    write_dataset(mine, [1000, 39, 500])
    with pytest.raises(UserError, match="or has changed since"):
        run_here(mine, tmp_path / "run", **auto)


def test_a_fresh_run_does_not_touch_another(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=4)
    with pytest.raises(UserError, match="init_from=auto resumes"):
        run_here(dataset, tmp_path)
    assert [r["iter"] for r in records(tmp_path, "step")] == [0, 1, 2, 3]


def test_auto_starts_and_goes_on_with_one_command(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path / "a", init_from="auto", max_iters=4, lr_decay_iters=8)
    run_here(dataset, tmp_path / "a", init_from="auto", max_iters=6, lr_decay_iters=8)
    run_here(dataset, tmp_path / "a", init_from="auto", max_iters=8)
    assert "resume: lr_decay_iters = 0 (the checkpoint had 8)" in capsys.readouterr().out
    run_here(dataset, tmp_path / "b", max_iters=8)
    assert_same_state(load(tmp_path / "a", 8), load(tmp_path / "b", 8))


def test_only_improvements_are_saved_if_asked(dataset, tmp_path):
    run_here(
        dataset,
        tmp_path,
        max_iters=12,
        learning_rate=0.3,
        always_save_checkpoint=False,
        keep_checkpoints=9,
    )
    saved = [r["iter"] for r in records(tmp_path, "checkpoint")]
    evals = {r["iter"]: r["val_loss"] for r in records(tmp_path, "eval")}
    best = [it for it in evals if all(evals[it] < loss for i, loss in evals.items() if i < it)]
    assert saved == sorted({*best, 12} - {0})


def test_eval_only_evaluates_once_and_writes_nothing(dataset, tmp_path, capsys):
    """nanoGPT: eval_only with resume trains on."""
    run_here(dataset, tmp_path / "run", max_iters=4)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    capsys.readouterr()
    assert run_here(dataset, tmp_path / "run", init_from="resume", eval_only=True) == 0
    out = capsys.readouterr().out
    assert "step 4: train loss" in out and "\niter " not in out
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
    # it would evaluate random weights, not those of the run
    with pytest.raises(UserError, match="init_from=auto resumes"):
        run_here(dataset, tmp_path / "run", eval_only=True)
    assert capsys.readouterr().err == ""
    assert run_here(dataset, tmp_path / "new", eval_only=True) == 0
    assert not (tmp_path / "new").exists()
    out = capsys.readouterr().out
    assert "step 0:" in out and "untrained" in out


def test_validation_loss_is_the_same_function_of_the_weights_at_any_batch_size(dataset, tmp_path):
    """
    nanoGPT #644. Equal chunks are equal to the last bit; other chunks differ by the order of
    summation.
    """
    losses = []
    for i, batch_size in enumerate((8, 16, 8)):
        run_here(dataset, tmp_path / str(i), batch_size=batch_size, max_iters=0, eval_tokens=512)
        losses.append(records(tmp_path / str(i), "eval")[0]["val_loss"])
    assert losses[0] == losses[2]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_float16_run_outlives_the_search_for_its_loss_scale(
    dataset, tmp_path, monkeypatch, capsys
):
    """
    Scaled by 2^26, gradients of 1e-2 overflow float16's 65,504 until the scale has been halved
    several times.
    """
    monkeypatch.setattr(
        torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**26)
    )
    assert run_here(dataset, tmp_path, dtype="float16", max_iters=30) == 0
    halved = sum(r["grad_norm"] is None for r in records(tmp_path, "step"))  # it is not finite
    assert 3 <= halved <= 16
    assert load(tmp_path, 30)["scaler"]["scale"] == 2.0 ** (26 - halved)
    losses = [r["loss"] for r in records(tmp_path, "step")]
    assert losses[halved] == pytest.approx(losses[0], abs=0.5) and losses[-1] < losses[0] - 0.5


# -----------------------------------------------------------------------------
# What an iteration is made of


# what somebody adds to the loop: a micro-batch more every three iterations
RAMP = ("    while True:\n", "    while True:\n        accum = 1 + p.iter_num // 3\n")


def test_a_batch_ramp_logs_what_was_trained_on_and_resumes_exactly(dataset, tmp_path):
    source = (ROOT / "train.py").read_text()
    head, main = source.split("\ndef main(")
    assert main.count(RAMP[0]) == 1
    script = f"{head}\ndef main({main.replace(*RAMP)}"

    def ramp(out_dir, **changes):
        code, _, err = run_process("-c", script, *flags(dataset, out_dir, dropout=0.1, **changes))
        assert code == 0, err

    ramp(tmp_path / "straight")
    ramp(tmp_path / "broken", max_iters=4, lr_decay_iters=8)
    ramp(tmp_path / "broken", init_from="resume")
    assert_same_log(tmp_path / "broken", tmp_path / "straight")
    assert_same_state(load(tmp_path / "broken", 8), load(tmp_path / "straight", 8))
    steps = records(tmp_path / "straight", "step")
    sizes = [4 * 16 * micro_batches for micro_batches in (1, 1, 1, 2, 2, 2, 3, 3)]
    assert [step["tokens"] for step in steps] == [sum(sizes[:n]) for n in range(8)]
    for step, size in zip(steps, sizes, strict=True):
        assert step["tokens_per_sec"] * step["step_ms"] / 1000 == pytest.approx(size)
    progress = load(tmp_path / "straight", 8)["progress"]
    assert progress["tokens"] == 16 * progress["sequences"] == sum(sizes)


# -----------------------------------------------------------------------------
# Data that cannot be had


@pytest.mark.parametrize("iteration", [2, 4])
def test_a_signal_ends_the_wait_for_data_and_nothing_is_lost(
    iteration, straight, dataset, tmp_path, monkeypatch
):
    """At iteration 4 an evaluation is due; it is left to the resumed run."""
    read = ShuffledWindows.read
    close, closed = Batches.close, threading.Event()

    def hanging(windows, first, count):
        if first == 2 * iteration * count:  # two micro-batches an iteration
            threading.Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
            closed.wait(30)
        return read(windows, first, count)

    with monkeypatch.context() as patch:
        patch.setattr(ShuffledWindows, "read", hanging)
        patch.setattr(Batches, "close", lambda batches: (closed.set(), close(batches)))
        began = time.monotonic()
        assert run_here(dataset, tmp_path, **EVALUATED) == 143
        assert time.monotonic() - began < 20
    ends_like(straight, dataset, tmp_path, iteration, "SIGTERM")


@pytest.mark.parametrize("iteration", [2, 4])
def test_data_that_cannot_be_read_end_the_run_with_a_checkpoint(
    iteration, straight, dataset, tmp_path, monkeypatch, script
):
    read = ShuffledWindows.read

    def damaged(windows, first, count):
        if first == (2 * iteration + 1) * count:  # its second micro-batch
            raise RunError("train_000002.bin: cut short")
        return read(windows, first, count)

    with monkeypatch.context() as patch:
        patch.setattr(ShuffledWindows, "read", damaged)
        code, out, err = script(train.main, *flags(dataset, tmp_path, **EVALUATED))
    assert (code, err) == (1, ["error: train_000002.bin: cut short"])
    assert f"end: data after {iteration} iterations" in out
    ends_like(straight, dataset, tmp_path, iteration, "data")


def test_a_shard_that_an_evaluation_cannot_read_costs_no_iteration(
    straight, dataset, tmp_path, monkeypatch, script
):
    windows, reads = ShardTokens.read_windows, iter(range(10**6))

    def damaged(split, positions, length):
        # val's, of which a start reads samples four times: the second evaluation
        if len(split) == 700 and next(reads) == BATCHES // 2 + 4:
            raise RunError("val_000000.bin: cut short")
        return windows(split, positions, length)

    with monkeypatch.context() as patch:
        patch.setattr(ShardTokens, "read_windows", damaged)
        code, _, err = script(train.main, *flags(dataset, tmp_path, **EVALUATED))
    assert (code, err) == (1, ["error: val_000000.bin: cut short"])
    ends_like(straight, dataset, tmp_path, 4, "data")


def ends_like(straight, dataset, out_dir, iteration, reason):
    """It has saved this iteration, and the resumed run is the one that nothing has stopped."""
    assert load_newest(out_dir)["progress"]["iter_num"] == iteration
    assert records(out_dir, "end")[0]["reason"] == reason
    assert run_here(dataset, out_dir, init_from="resume", **EVALUATED) == 0
    assert_same_log(out_dir, straight)
    assert_same_state(load(out_dir, 8), load(straight, 8))


def test_compiling_leaves_buffers_as_they_were(dataset, tmp_path, monkeypatch):
    """They are made on throw-away data."""
    stock = model.MLP.forward

    def forward(self, x):
        if self.training:
            self.c_fc.seen += 1
        return stock(self, x)

    def build_counting(config):
        gpt = build_model(config)
        for block in gpt.transformer.h:
            block.mlp.c_fc.register_buffer("seen", torch.zeros(()))
        return gpt

    monkeypatch.setattr(model.MLP, "forward", forward)
    monkeypatch.setattr(torch, "compile", lambda call: call)
    config = load_config(flags(dataset, tmp_path, compile=True))
    gpt = build_counting(model_config(config, 64, flash=True, compiled=False))
    compile_or_warn(gpt, config.batch_size, 64, set_up(config))
    assert [block.mlp.c_fc.seen.item() for block in gpt.transformer.h] == [0, 0]


def test_a_constant_rate_is_that_rate_to_the_bit():
    config = load_config(["--learning_rate=3e-5", "--decay_lr=False", "--warmup_iters=0"])
    assert {train.get_lr(it, config, 0.0, 3e-5) for it in range(20)} == {3e-5}


def test_nothing_waits_for_the_device_between_log_lines(dataset, tmp_path):
    """
    aten::_local_scalar_dense is what .item() and `if tensor` run: none in an iteration, a few at
    each log line.
    """

    def syncs(max_iters, log_interval):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run_here(
                dataset,
                tmp_path / f"{max_iters}-{log_interval}",
                max_iters=max_iters,
                eval_interval=100,
                n_layer=1,
                eval_tokens=16,
                log_interval=log_interval,
            )
        return sum(
            e.name == "aten::_local_scalar_dense" and not in_fused_update(e)
            for e in profile.events()
        )

    def in_fused_update(event):
        """
        The CPU's fused AdamW reads its step counts, which lie in CPU memory; on CUDA they are read
        on the device.
        """
        return event is not None and (
            event.name == "aten::_fused_adamw_" or in_fused_update(event.cpu_parent)
        )

    syncs(0, 100)  # counts what is counted once: FLOPs, and what the optimizer keeps
    few = syncs(3, 100)
    assert syncs(6, 100) == few  # two log lines each: three more iterations, not one more sync
    # four more lines: no more than one for each number of a record
    most = 4 * len(records(tmp_path / "6-100", "step")[-1])
    assert few < syncs(6, 1) <= few + most


def test_the_loop_itself_costs_under_half_a_percent_of_a_150_ms_step(
    dataset, tmp_path, monkeypatch
):
    """
    From the end of one step until the next one takes its micro-batches, in processor time of this
    thread: other programs on a busy machine take none of that.
    """
    began, ended, take = [], [], Batches.take

    def taken(*arguments):
        began.append(time.thread_time())
        return take(*arguments)

    monkeypatch.setattr(Batches, "take", taken)

    def step(*_):
        time.sleep(0.02)  # meanwhile data are read ahead, as in a longer step
        ended.append(time.thread_time())
        return torch.ones(()), torch.ones(())

    monkeypatch.setattr(train, "train_step", step)
    run_here(dataset, tmp_path, max_iters=40, eval_interval=40, log_interval=10)
    between = [after - before for before, after in zip(ended[:-1], began[1:], strict=True)]
    assert statistics.mean(between) < 0.005 * 0.15


HORIZON = 100


def rate(it: int, config: Config, horizon: int) -> float:
    return train.get_lr(it, replace(config, max_iters=horizon), 0.0, 1.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(
    "warmup, horizon", [(0, 0), (0, 1), (1, 1), (10, 10), (10, 5), (0, 100), (10, 100), (200, 100)]
)
@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
def test_schedules_stay_in_range_and_never_divide_by_zero(schedule, warmup, horizon, fraction):
    config = Config(
        learning_rate=1.0,
        min_lr=0.1,
        warmup_iters=warmup,
        lr_schedule=schedule,
        decay_fraction=fraction,
    )
    rates = [rate(it, config, horizon) for it in range(2 * HORIZON)]
    assert all(0 < rate <= 1 for rate in rates)
    assert all(rate == 0.1 for rate in rates[max(warmup, horizon) :])


def test_schedules_by_hand():
    cosine = Config(learning_rate=1.0, min_lr=0.1, warmup_iters=10)
    assert rate(0, cosine, 110) == pytest.approx(1 / 11)  # nanoGPT's warm-up
    assert rate(10, cosine, 110) == 1.0
    assert rate(60, cosine, 110) == pytest.approx(0.55)
    wsd = Config(
        learning_rate=1.0, min_lr=0.0, warmup_iters=0, lr_schedule="wsd", decay_fraction=0.2
    )
    assert [rate(it, wsd, 100) for it in (0, 80, 90, 99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    linear = Config(learning_rate=1.0, min_lr=0.0, warmup_iters=0, lr_schedule="linear")
    assert rate(25, linear, 100) == 0.75
    constant = Config(learning_rate=1.0, lr_schedule="constant", warmup_iters=10)
    # warm-up also without decay
    assert rate(4, constant, 100) == pytest.approx(5 / 11)
    assert rate(500, constant, 100) == 1.0


def test_an_optimizer_needs_no_more_than_torchs_interface():
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, dict(lr=0.5))

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p -= 0.5 * p.grad.sign()

    class Bowl(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))

        def forward(self, x, y):
            return self.weight.square().sum()

    batch = torch.zeros(1, 1, dtype=torch.long)
    bowl, scaler = Bowl(), torch.amp.GradScaler("cpu", enabled=False)
    rest = ([(batch, batch)], 0.0, contextlib.nullcontext())
    train.train_step(bowl, SignDescent(bowl.parameters()), scaler, *rest)
    assert bowl.weight.tolist() == [0.5, -1.5]


def test_compile_falls_back_with_one_warning_where_no_compiler_works(
    dataset, tmp_path, capsys, monkeypatch
):
    """nanoGPT PR#242, #226, #477: Windows and machines without a C compiler."""

    def broken(model):
        def call(*_):
            raise RuntimeError("no C compiler\nlong details")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    assert run_here(dataset, tmp_path, compile=True, max_iters=2) == 0
    err = capsys.readouterr().err
    assert (
        err.count("torch.compile does not work here") == 1
        and "no C compiler" in err
        and "long details" not in err
    )


def test_where_triton_is_missing_on_windows_the_warning_says_what_to_install(
    dataset, tmp_path, capsys, monkeypatch
):
    """torch's own requirements name Triton for Linux alone."""

    def broken(model):
        def call(*_):
            raise TritonMissing(None)

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiled, "sys", SimpleNamespace(platform="linux"))  # for it alone
    assert run_here(dataset, tmp_path / "linux", compile=True, max_iters=1) == 0
    assert "pip install" not in capsys.readouterr().err
    monkeypatch.setattr(compiled, "sys", SimpleNamespace(platform="win32"))
    assert run_here(dataset, tmp_path / "windows", compile=True, max_iters=1) == 0
    assert 'pip install "triton-windows<3.8"' in capsys.readouterr().err


def test_a_resume_computes_in_what_the_run_was_begun_in(dataset, tmp_path, monkeypatch, capsys):
    """On another machine auto would be another type, and the run another run."""
    for best in (torch.bfloat16, torch.float32):
        monkeypatch.setattr("training.hardware.best_dtype", lambda _, best=best: best)
        run_here(dataset, tmp_path, dtype="auto", init_from="auto", max_iters=2, lr_decay_iters=8)
        run_here(dataset, tmp_path, dtype="auto", init_from="auto", max_iters=4, lr_decay_iters=8)
    assert {r["dtype"] for r in records(tmp_path, "start")} == {"bfloat16"}
    run_here(dataset, tmp_path, dtype="float32", init_from="auto")
    assert "resume: dtype = 'float32' (the checkpoint had 'bfloat16')" in capsys.readouterr().out
    assert records(tmp_path, "start")[-1]["dtype"] == "float32"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("factor, refused", [(1, 0), (1.01, 1), (0.99, 1), (math.nan, 1)])
def test_a_compiler_whose_loss_is_another_is_refused(
    factor, refused, dropout, dataset, tmp_path, monkeypatch, capsys
):
    """Either way it is the run without one: no random number, gradient or setting is left over."""

    def compile(call):  # of the model
        return lambda *batch: factor * call(*batch)

    run_here(dataset, tmp_path / "eager", dropout=dropout)
    monkeypatch.setattr(torch, "compile", compile)
    run_here(dataset, tmp_path / "compiled", dropout=dropout, compile=True, loss_chunk=512)
    err = capsys.readouterr().err
    assert err.count("torch.compile does not work here (ArithmeticError: ") == refused
    assert err.count("warning") == refused
    assert_same_state(*(load(tmp_path / run, 8) for run in ("eager", "compiled")))


def test_an_error_of_the_model_is_shown_whole(dataset, tmp_path, capsys, monkeypatch):
    """A new term with a mistake in it, which the compiler meets first."""

    def wrong(logits, targets, cap=None):
        return (logits @ logits).sum()

    monkeypatch.setattr(model, "loss_sum", wrong)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        run_here(dataset, tmp_path, compile=True)
    assert error.traceback[-1].name == "wrong"


def test_the_silence_of_compiling_is_announced_before_it(dataset, tmp_path, capsys, monkeypatch):
    seen = []

    def compile(call):
        seen.append(capsys.readouterr().out.splitlines()[-1])
        return call

    monkeypatch.setattr(torch, "compile", compile)
    assert run_here(dataset, tmp_path, compile=True, max_iters=1) == 0
    assert seen == ["compiling: this takes about a minute"]


def test_a_model_whose_evaluation_alone_does_not_compile_still_trains_as_one(
    dataset, tmp_path, monkeypatch, capsys
):
    def compile(call):
        def half_compiled(*batch):
            assert gpt.training, "no kernel for this"
            return call(*batch)

        return half_compiled

    monkeypatch.setattr(torch, "compile", compile)
    config = load_config(flags(dataset, tmp_path, compile=True))
    gpt = build_model(model_config(config, 64, flash=True, compiled=False))
    compile_or_warn(gpt, config.batch_size, 64, set_up(config))
    assert "no kernel for this" in capsys.readouterr().err
    assert gpt.training and gpt.transformer.h[0].training
    gpt.eval()(torch.zeros(1, 4, dtype=torch.long))  # not by what does not compile
    assert all(p.grad is None for p in gpt.parameters())


def test_a_vocabulary_that_cannot_be_had_costs_the_samples_not_the_run(
    dataset, tmp_path, monkeypatch, capsys
):
    def offline(spec):
        raise UserError("tokenizer gpt2: tiktoken cannot get its vocabulary")

    monkeypatch.setattr(train, "Tokenizer", offline)
    assert run_here(dataset, tmp_path, sample_tokens=5) == 0
    assert "no sample: tokenizer gpt2" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["train_step", "build_model"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
)
def test_out_of_memory_is_one_line_with_flags_that_need_less(
    where, error, dataset, tmp_path, monkeypatch, capsys
):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(train, where, full)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(dataset, tmp_path)])
    with pytest.raises(SystemExit) as end:
        run_main(train.main, train.explain)
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory with batch_size=4; ")
    assert "--batch_size=2 --gradient_accumulation_steps=4" in line


def test_block_size_longer_than_the_data_is_found_before_training(dataset, tmp_path):
    with pytest.raises(UserError, match="the val split .* has only 700 tokens"):
        train.main(flags(dataset, tmp_path / "run", block_size=1024))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_compiled_run_resumes_bit_for_bit_and_books_compilation(dataset, tmp_path):
    # 96 windows: the last is the next epoch's
    options = dict(compile=True, dropout=0.1, gradient_accumulation_steps=3)
    torch.compiler.reset()  # an earlier test may have compiled the same model
    run_here(dataset, tmp_path / "straight", **options)
    run_here(dataset, tmp_path / "broken", **options, max_iters=4, lr_decay_iters=8)
    run_here(dataset, tmp_path / "broken", **options, init_from="resume")
    assert_same_state(load(tmp_path / "straight", 8), load(tmp_path / "broken", 8))
    end = records(tmp_path / "straight", "end")[0]
    # ten iterations take 0.05 s; compiling takes seconds, or 0.5 s where the compiled code lies in
    # torch's cache on the disk
    assert end["ledger"]["compile"] > 0.2
    assert not records(tmp_path / "straight", "event")  # nothing was compiled again later


@pytest.mark.slow
def test_a_run_resumed_twice_eager_compiled_and_eager_again_is_the_same_run(
    dataset, tmp_path, capsys
):
    run_here(dataset, tmp_path / "straight")
    for max_iters, compile in ((3, False), (6, True), (8, False)):
        run_here(
            dataset,
            tmp_path / "crossed",
            init_from="auto",
            max_iters=max_iters,
            compile=compile,
            lr_decay_iters=8,
        )
    assert "resume: compile = True (the checkpoint had False)" in capsys.readouterr().out
    straight, crossed = (
        [r["loss"] for r in records(tmp_path / run, "step")] for run in ("straight", "crossed")
    )
    # losses of ~4; fused kernels round differently
    assert straight == pytest.approx(crossed, abs=1e-4)


def test_quickstart_command_makes_its_dataset(tmp_path):
    """
    The README's first command, cut to a few iterations, in an empty working directory, and as
    cold as a user's.
    """
    code, out, err = run_process(
        str(ROOT / "train.py"),
        str(ROOT / "config/quickstart.py"),
        "--max_iters=2",
        "--eval_tokens=256",
        "--sample_tokens=8",
        "--n_layer=1",
        cwd=tmp_path,
        cold=True,
    )
    assert code == 0, err
    assert "preparing" in out and (tmp_path / "data/python_stdlib/manifest.json").exists()
    assert (tmp_path / "out/quickstart/ckpt-00000002.pt").exists() and "sample 2:" in out


def test_weights_that_know_other_tokens_than_the_dataset_are_refused(dataset, tmp_path):
    run_here(dataset, tmp_path / "run", max_iters=1)
    other = write_dataset(tmp_path / "other", [1000])
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | dict(tokenizer="gpt2", vocab=50257)))
    with pytest.raises(UserError, match="another tokenizer"):
        run_here(other, tmp_path / "new", init_from=tmp_path / "run")


def test_a_resume_names_keys_that_came_since_the_checkpoint(dataset, tmp_path, capsys):
    """As on another branch of a fork, whose data or loss knows a key more."""
    run_here(dataset, tmp_path, max_iters=4)
    state = load(tmp_path, 4)
    del state["config"]["grad_clip"]
    torch.save(state, tmp_path / "ckpt-00000004.pt")
    capsys.readouterr()
    assert run_here(dataset, tmp_path, init_from="resume", grad_clip=0.5) == 0
    out = capsys.readouterr().out
    assert "resume: grad_clip = 0.5 (the checkpoint had 1.0)\n" in out
