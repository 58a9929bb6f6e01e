"""
What only a CUDA device can show: no waiting inside an iteration, bit-exact resumes, every dtype.
"""

import pytest
import torch
from helpers import FAST, assert_same_state, load, records, run_here

import train
from benchmarks import measure
from configurator import load_config
from training import hardware
from training.gpus import WORKSPACE_BYTES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "changes",
    [dict(recompute=True), dict(compile=True), dict(dtype="float32"), FAST | dict(dropout=0.0)],
    ids=["bf16 recomputed", "compiled", "fp32", "fast"],
)
def test_n_plus_n_iterations_equal_2n_bit_for_bit_with_deterministic(changes, dataset, tmp_path):
    options = (
        dict(device="cuda", dtype="bfloat16", deterministic=True, dropout=0.1, n_embd=64) | changes
    )
    run_here(dataset, tmp_path / "straight", max_iters=8, **options)
    run_here(dataset, tmp_path / "broken", max_iters=4, lr_decay_iters=8, **options)
    run_here(dataset, tmp_path / "broken", max_iters=8, init_from="resume", **options)
    assert_same_state(load(tmp_path / "straight", 8), load(tmp_path / "broken", 8))


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(loss_chunk="16"),
        dict(recompute=True),
        dict(compile=True),
        FAST | dict(dropout=0.0),
    ],
    ids=["eager", "chunks", "recomputed", "compiled", "fast"],
)
def test_an_iteration_never_waits_for_the_device(changes, dataset, tmp_path, monkeypatch):
    """CUDA itself complains of every synchronisation inside train_step."""
    original = train.train_step
    calls = iter(range(100))

    def watched(*args):
        torch.cuda.set_sync_debug_mode(
            "error" if next(calls) > 1 else "default"
        )  # the first ones allocate and set up
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(train, "train_step", watched)
    assert (
        run_here(
            dataset,
            tmp_path,
            device="cuda",
            dtype="bfloat16",
            **dict(dropout=0.1, n_embd=64) | changes,
        )
        == 0
    )


@pytest.mark.parametrize("recipe", [{}, FAST | dict(muon_lr=0.01)], ids=["classic", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_follows_the_same_losses(dtype, recipe, dataset, tmp_path):
    """
    Losses of ~4 stay within 2 %: bfloat16 keeps 8 bits, float16 11 and skips its first updates
    while it finds a scale.
    """
    options = dict(max_iters=50, eval_interval=50, n_embd=64, log_interval=50) | recipe
    run_here(dataset, tmp_path / "exact", device="cuda", dtype="float32", tf32=False, **options)
    run_here(dataset, tmp_path / "lower", device="cuda", dtype=dtype, max_skips=50, **options)
    exact, lower = (records(tmp_path / run, "eval")[-1]["val_loss"] for run in ("exact", "lower"))
    assert lower == pytest.approx(exact, rel=0.1 if dtype == "float16" else 0.02)


def test_step_time_memory_and_mfu_are_reported(dataset, tmp_path):
    run_here(dataset, tmp_path, device="cuda", dtype="bfloat16", n_embd=64, peak_tflops=100)
    step = records(tmp_path, "step")[-1]
    assert step["mfu"] > 0 and 0 < step["mem_gib"] < 10


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_memory_model_is_within_a_tenth_of_what_the_allocator_reserved(compile):
    """GPT-2's 12 layers of 768, 8 x 1024 tokens, all logits at once and (eager) in chunks."""
    for loss_chunk in ("off",) if compile else ("off", "1024"):
        flags = dict(
            batch_size=8,
            gradient_accumulation_steps=2,
            compile=compile,
            loss_chunk=loss_chunk,
            dataset="none",
        )
        result = measure.attempt(
            load_config([f"--{name}={value}" for name, value in flags.items()]), trials=1
        )
        modelled = (
            result["mem_model_gib"] - WORKSPACE_BYTES / hardware.GIB
        )  # the allocator knows nothing of CUDA's own
        assert modelled == pytest.approx(result["mem_training_gib"], rel=0.1)


def test_chunks_of_the_loss_change_no_loss(dataset, tmp_path):
    for chunk in ("off", "16"):
        run_here(
            dataset, tmp_path / chunk, device="cuda", dtype="float16", n_embd=64, loss_chunk=chunk
        )
    whole, chunked = (
        [r["loss"] for r in records(tmp_path / chunk, "step")] for chunk in ("off", "16")
    )
    assert chunked == pytest.approx(whole, rel=5e-3)  # losses of ~4 and float16's 11 bits
