"""Check the tokens per iteration that configs, flags and resumes lead to."""

import os
from pathlib import Path
from unittest import mock

import pytest
from program import flags, refused, run

from common.console import UserError
from configurator import Config, config_values
from machine.cost import choose_batch
from model_fast import model_config
from run import start
from run.checkpoint import State

TINY = dict(n_layer=1, n_embd=16, max_iters=4, eval_interval=2, eval_tokens=64)
BATCH = "block_size = 16\ntokens_per_iter = 512\n"


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
    assert run("train.py", config, "--batch_size=4", *flags(**keys | dict(max_iters=2))).code == 0
    resume = flags(**keys, init_from="resume")
    refused(run("train.py", config, "--tokens_per_iter=256", *resume), "--tokens_per_iter=512")
    again = run("train.py", config, "--batch_size=3", *resume)
    assert again.code == 0, again.err
    assert "batch_size: 2, because 3 sequences do not divide the 32 of an iter" in again.err
    assert "tokens per iteration will be: 512 = 16 x 2 x 16 (" in again.out
    assert ran.column("start", "tokens_per_iter") == [512, 512]
    assert [c["batch_size"] for c in ran.column("start", "config")] == [4, 2]
    assert [ran.state(it)["config"]["batch_size"] for it in ran.saved] == [4, 3]


def test_a_start_on_a_small_machine_changes_nothing_for_later_starts(config, keys, ran):
    """Name only the folder on a machine where more fits, and the run takes more again."""
    with mock.patch("machine.cost.NANOGPT_BATCH", 2):
        assert run("train.py", config, *flags(**keys | dict(max_iters=2))).code == 0
    again = run("train.py", *flags(out_dir=ran.out_dir, max_iters=4))
    assert again.code == 0, again.err
    assert [c["batch_size"] for c in ran.column("start", "config")] == [2, 8]
    assert "resume: max_iters = 4 (was 2)" in again.out and "resume: batch_size" not in again.out


# what a command sets, its processes, and the problem, or the micro-batch and how many there are
RESUMED = [
    ("", 1, (12, 40)),
    ("--batch_size=7", 1, (6, 80)),
    ("--batch_size=500", 1, (480, 1)),
    ("--batch_size=24 --gradient_accumulation_steps=20", 1, (24, 20)),
    ("--batch_size=5 --tokens_per_iter=491520", 1, (5, 96)),
    ("--batch_size=12 --gradient_accumulation_steps=80", 1, "--tokens_per_iter=491520"),
    ("--tokens_per_iter=245760", 1, "--tokens_per_iter=491520"),
    ("--tokens_per_iter=0", 1, (12, 40)),
    ("", 3, (10, 48)),
    ("--batch_size=6", 3, (5, 96)),
    ("--batch_size=20 --gradient_accumulation_steps=24", 3, (20, 24)),
]


def resumed(words: list[str], processes: int) -> Config:
    """Return the configuration of a command that resumes a run of nanoGPT's 40 x 12 sequences."""
    before = Config(tokens_per_iter=40 * 12 * 1024, eval_tokens=5000)
    checkpoint = State(config=config_values(before), optimizer=dict(param_groups=[]))
    with (
        mock.patch.object(start, "find_checkpoint", lambda c: checkpoint),
        mock.patch.dict(os.environ, WORLD_SIZE=str(processes)),
    ):
        c, *_ = start.choose_run(["--device=cpu", *words])
        return choose_batch(c, model_config(c, 50257), processes, memory_gib=None)


@pytest.mark.parametrize("words, processes, expected", RESUMED)
def test_numbers_of_the_batch_hold_on_a_resume_or_are_refused(words, processes, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            resumed(words.split(), processes)
    else:
        c = resumed(words.split(), processes)
        assert (c.batch_size, c.iter_sequences // c.batch_size) == expected


def test_a_run_resumes_on_every_number_of_gpus_that_divides_its_sequences():
    for processes in range(1, 65):
        if 480 % processes:
            with pytest.raises(UserError, match="cannot be shared"):
                resumed([], processes)
        else:
            c = resumed([], processes)
            assert c.iter_sequences == 480 and c.eval_tokens == 5000
            assert c.batch_size <= 12 and 480 // processes % c.batch_size == 0
