"""Check the tokens per iteration that configs, flags and resumes lead to."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from program import flags, refused, run

from common.console import UserError
from configurator import Config, config_values
from machine.cost import fit_device
from machine.hardware import Hardware
from model_fast import model_config
from run import start
from run.checkpoint import State

CPU = Hardware(torch.device("cpu"), torch.float32, "", 1.0, "")
TINY = dict(n_layer=1, n_embd=16, max_iters=4, eval_interval=2, eval_tokens=64)
# tokens_per_iter, and the accumulation that follows from it
BATCH = "batch_size = 4\nblock_size = 16\ntokens_per_iter = 512\ngradient_accumulation_steps = 8\n"


@pytest.fixture
def keys(tiny) -> dict:
    """Return the keys of a tiny run, without those that a config file sets here."""
    left_out = ("batch_size", "block_size", "gradient_accumulation_steps")
    return {name: value for name, value in tiny.items() if name not in left_out}


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(BATCH)
    return tmp_path / "mine.py"


def test_a_resume_keeps_the_tokens_per_iteration_of_its_run(config, keys, ran):
    assert run("train.py", config, *flags(**keys | dict(max_iters=2))).code == 0
    resume = flags(**keys, init_from="resume")
    refused(run("train.py", config, "--tokens_per_iter=256", *resume), "this run has 512")
    again = run("train.py", config, "--batch_size=3", *resume)
    assert again.code == 0, again.err
    assert ran.column("start", "tokens_per_iter") == [512, 512]
    assert [c["batch_size"] for c in ran.column("start", "config")] == [4, 2]
    assert [ran.state(it)["config"]["batch_size"] for it in ran.saved] == [4, 3]


def test_a_start_on_a_small_machine_changes_nothing_for_later_starts(config, keys, ran):
    """Name only the folder on a machine where more fits, and the run takes more again."""
    with mock.patch("machine.cost.CPU_BATCH", 2):
        assert run("train.py", config, *flags(**keys | dict(max_iters=2))).code == 0
    again = run("train.py", *flags(out_dir=ran.out_dir, max_iters=4))
    assert again.code == 0, again.err
    assert [c["batch_size"] for c in ran.column("start", "config")] == [2, 4]
    assert "resume: max_iters = 4 (was 2)" in again.out and "resume: batch_size" not in again.out


# what a command sets, its processes; batch_size and gradient_accumulation_steps, or the problem.
# Three processes cannot share 40 micro-batches of 12, but 60 of 8, the most without CUDA
RESUMED = [
    ("", 1, (12, 40)),
    ("--batch_size=24 --gradient_accumulation_steps=20", 1, (24, 20)),
    ("--batch_size=5 --tokens_per_iter=491520", 1, (5, 96)),
    ("--batch_size=12 --gradient_accumulation_steps=80", 1, "this run has 491520"),
    ("--batch_size=7", 1, "this run has 491520"),
    ("--tokens_per_iter=245760", 1, "this run has 491520"),
    ("--batch_size=12", 3, (8, 60)),
    ("--batch_size=10 --gradient_accumulation_steps=48", 3, (10, 48)),
]


def resumed(words: list[str], processes: int) -> Config:
    """Return the configuration of a command that resumes a run of 12 x 40 sequences."""
    before = replace(Config(), eval_tokens=5000)
    checkpoint = State(config=config_values(before), optimizer=dict(param_groups=[]))
    with (
        mock.patch.object(start, "find_checkpoint", lambda c: checkpoint),
        mock.patch.dict(os.environ, WORLD_SIZE=str(processes)),
    ):
        c, *_ = start.choose_run(["--device=cpu", *words])
        return fit_device(c, model_config(c, 50257), CPU)


@pytest.mark.parametrize("words, processes, expected", RESUMED)
def test_numbers_of_the_batch_hold_on_a_resume_or_are_refused(words, processes, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            resumed(words.split(), processes)
    else:
        c = resumed(words.split(), processes)
        assert (c.batch_size, c.gradient_accumulation_steps) == expected


def test_a_run_resumes_on_every_number_of_gpus_that_divides_its_sequences():
    for processes in range(1, 65):
        if 480 % processes:
            with pytest.raises(UserError, match="cannot be shared"):
                resumed([], processes)
        else:
            c = resumed([], processes)
            assert c.iter_sequences == 480 and c.eval_tokens == 5000
            assert c.batch_size <= 12 and c.gradient_accumulation_steps % processes == 0
