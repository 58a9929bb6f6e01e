"""
Check the GPU names that people type, and plan's memory model against torch: its allocator on
simulated GPUs, and the tensors alive on a CPU. test_plan.py has figures worked out by hand.
"""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from cases import slow, slow_but
from doc_pages import read
from program import FAST, ROOT, flags
from training_setup import TrainingSetup

from common.console import UserError
from configurator import Config, load_config, problems_of, read_config, resolve
from machine.cost import CONTEXT_BYTES, choose_batch, memory_bytes
from machine.gpus import GIB, resolve_gpu, short_name
from model import GPTConfig
from model_fast import FastGPT, model_config

# The rows of simulated GPUs (docs/internals/simulated_gpus.md) for our GPT-2 with AdamW. Those with
# Muon were simulated with the recipe of 3,250 iterations, whose optimizer kept no averages.
SIMULATED = {
    name: row
    for name, row in json.loads(read("results/nullgpu.json"))["rows"].items()
    if row["model"] == "gpt2" and not re.search("muon|recompute", row["command"])
}


def model_of(config: Config) -> GPTConfig:
    return model_config(config, 50257)


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("RTX4070", "GeForce RTX 4070"),
        ("4070ti", "GeForce RTX 4070 Ti"),
        ("rtx3080-12gb", "GeForce RTX 3080, 12GB"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "GeForce RTX 4070 Laptop GPU"),
        ("a100", "A100-SXM4-40GB"),
        ("h100 80gb hbm3", "H100 80GB HBM3"),
        ("t4", "Tesla T4"),
    ],
)
def test_recognises_a_gpu_in_many_spellings(typed, meant):
    """Find the row with or without brand, spaces, capitals and memory size."""
    row = resolve_gpu(typed)
    name, _, memory = meant.partition(", ")
    assert short_name(row) == name
    assert memory in ("", f"{row['memory_gib']}GB")


@pytest.mark.parametrize("typed", ["h100", "3080", "v100"])
def test_a_name_that_fits_cards_of_several_speeds_is_an_error_that_lists_them(typed):
    with pytest.raises(UserError, match="fits several cards; type --gpu=.* or ") as error:
        resolve_gpu(typed)
    for name in re.findall("--gpu='(.*?)'", str(error.value)):
        assert typed in name.lower() and resolve_gpu(name)


# -----------------------------------------------------------------------------
# The memory model against torch's allocator on simulated cards


def tensor_bytes(config: Config, model: GPTConfig, batch_size: int) -> float:
    """Return what the memory model estimates for the tensors alone."""
    parts = memory_bytes(config, model, batch_size)
    return sum(parts.values()) - parts["fragmentation"] - parts["context"]


@pytest.mark.parametrize("name", slow_but("4070-gpt2-eager", "4070-gpt2-dropout", of=SIMULATED))
def test_plan_estimates_a_simulated_gpus_memory_within_a_tenth(name):
    """
    Estimate the tensors at the peak within 5%, and what torch's allocator reserves for them within
    10%.
    """
    row = SIMULATED[name]
    config = load_config(row["command"].split())
    sizes = (config, model_of(config), config.batch_size)
    assert tensor_bytes(*sizes) / GIB == pytest.approx(row["allocated_gib"], rel=0.05)
    reserved = sum(memory_bytes(*sizes).values()) - CONTEXT_BYTES
    assert reserved / GIB == pytest.approx(row["reserved_gib"], rel=0.1)


FITTED = [  # GiB of a GPU, processes, config and flags, the batch_size taken
    (12, 1, "fast", 8),  # 16 would leave 2.3 GiB
    (80, 1, "fast", 128),
    (80, 64, "fast", 8),  # all of a process's
    (4, 1, "fast", 1),  # nor does this fit: the run ends in its error
    (0, 1, "fast --device=cpu", 8),
    (12, 1, "fast --batch_size=0", 8),
    (12, 1, "fast --batch_size=32", 32),  # memory lowers no number that is set
    (4, 1, "gpt124m_4070", 8),
    (12, 1, "gpt124m_4070 --batch_size=16", 16),
    (12, 1, "gpt124m_4070 --batch_size=12", 8),  # 12 do not divide 512
    (80, 8, "gpt124m_4070 --batch_size=100", 64),
]


@pytest.mark.parametrize("gib, processes, words, taken", FITTED)
def test_a_set_batch_size_is_taken_and_otherwise_as_many_sequences_as_fit(
    gib, processes, words, taken, capsys
):
    name, *argv = words.split()
    asked = resolve(read_config([f"{ROOT}/config/{name}.py", "--dtype=bfloat16", *argv]))
    problems = problems_of(asked, processes)
    c = choose_batch(asked, model_of(asked), processes, gib)
    assert problems == [] and c.batch_size == taken
    assert c.tokens_per_iter == asked.tokens_per_iter == 2**19
    said = capsys.readouterr().err
    assert said.count(f"batch_size: {taken}, ") == (taken < asked.batch_size)


def test_a_model_of_unknown_memory_gets_nanogpts_batch(capsys, monkeypatch):
    """Its memory is not known, so a run that sets no batch_size starts with a warning."""
    monkeypatch.setattr(FastGPT, "__init__", lambda *_: torch.empty(1, device="meta").item())
    c = load_config([f"{ROOT}/config/fast.py", "--tokens_per_iter=491520"])
    assert choose_batch(c, replace(model_of(c), n_layer=5), 1, 80).batch_size == 12
    assert "batch_size: 12, because" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# The memory model on a CPU


BASE = dict(n_head=2, batch_size=4, block_size=256, gradient_accumulation_steps=2, device="cpu")
BASE |= dict(compile=False)
VOCAB = 8190  # the logits are most of the memory, at a sixth of GPT-2's time


def peak_bytes(setup: TrainingSetup) -> int:
    """
    Return the bytes of weights and optimizer state plus the most that lives beside them in an
    iteration, as the allocator counted it.
    """
    setup.step()  # makes the optimizer's state
    moments = [v for state in setup.optimizer.state.values() for v in state.values()]
    resident = sum(t.numel() * t.element_size() for t in (*setup.model.parameters(), *moments))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        setup.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return resident + max(itertools.accumulate(nbytes for _, nbytes in changes))


SMALL = dict(n_layer=2, n_embd=128, dtype="float32")
# without gains, because on a CPU the gradient of a norm with gains takes several tensors
NO_GAINS = FAST | dict(bias=False)
# the fast model in bfloat16 is left to the simulated cards, because on a CPU its norms are composed
# in float32
COMPILED = dict(n_layer=2, n_embd=256, dtype="bfloat16", compile=True, loss_chunk="256")
SHAPES = [SMALL | dict(loss_chunk=256), SMALL | NO_GAINS, slow(COMPILED)]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_plan_estimates_the_tensors_alive_in_an_iteration(changes, monkeypatch):
    """
    Estimate their peak in bytes within 1% for eager code, within 10% for compiled code, whose fused
    operations vary.
    """
    config = load_config(flags(**BASE | changes))
    monkeypatch.setattr("model.PLAIN_ATTENTION_TOKENS", 0)  # as on a GPU
    setup = TrainingSetup(config, VOCAB)
    modelled = tensor_bytes(config, setup.model.config, 4)
    within = 0.1 if config.compile else 0.01
    assert modelled == pytest.approx(peak_bytes(setup), rel=within)
