"""Resume runs that were already finished, or whose dataset has changed."""

import shutil

import numpy as np
import pytest
import torch
from char_dataset import SHORT_RUN, T
from program import Run, contents, flags, refused, run, train


@pytest.fixture
def ran(tmp_path) -> Run:
    return Run(tmp_path / "run")


def test_a_finished_run_goes_on_if_it_is_given_more_iterations(corpus, ran):
    """The same command, or one with fewer iterations or another line, writes nothing."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, warmup_iters=0)
    keys |= dict(lr_schedule="wsd", decay_fraction=0.5, learning_rate=0.01, min_lr=0.0)
    train(**keys | dict(max_iters=4))
    before = contents(ran.out_dir)
    for again in (dict(max_iters=4), dict(max_iters=2), dict(max_iters=4, log_interval=2)):
        assert "all 4 iterations are done" in train(**keys | again).out
    assert contents(ran.out_dir) == before
    train(**keys | dict(max_iters=8))
    assert ran.steps("iter") == [*range(8)]


ANOTHER = {
    "a flag": (dict(grad_clip=0.5), {}, "grad_clip = 0.5 (it had 1.0)"),
    "no flag": ({}, dict(grad_clip=0.5), "grad_clip = 1.0 (it had 0.5)"),
    "a dropout": (dict(dropout=0.1), {}, "dropout = 0.1 (it had 0.0)"),
}


@pytest.mark.parametrize("second, first, words", ANOTHER.values(), ids=ANOTHER)
def test_a_finished_run_refuses_a_command_that_asks_for_another_run(
    second, first, words, corpus, ran
):
    """A loop over rates, or two configs of nanoGPT, would else train only the first, in silence."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=2)
    train(**keys | first)
    before = contents(ran.out_dir)
    refused(run("train.py", *flags(**keys | second)), words, "another --out_dir")
    assert contents(ran.out_dir) == before


def test_an_unfinished_run_is_refused_fewer_iterations_than_it_has_done(corpus, ran):
    """The fast recipe would replace its only raw weights by averages."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=4)
    train(**keys)
    state = ran.state()
    state["progress"]["complete"] = False
    torch.save(state, ran.out_dir / "ckpt-00000004.pt")
    before = contents(ran.out_dir)
    refused(run("train.py", *flags(**keys | dict(max_iters=3))), "max_iters: ")
    assert contents(ran.out_dir) == before
    train(**keys)
    assert ran.state()["progress"]["complete"]


def test_eval_iters_counts_the_micro_batches_of_an_evaluation(corpus, tmp_path):
    losses = []
    for name, size in (("iters", dict(eval_iters=3)), ("tokens", dict(eval_tokens=3 * 4 * T))):
        keys = {name: value for name, value in SHORT_RUN.items() if name != "eval_tokens"}
        train(**keys | dict(max_iters=0) | size, dataset=corpus, out_dir=tmp_path / name)
        losses.append(Run(tmp_path / name).evals("train_loss", "val_loss"))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("split", ["train", "val"])
def test_resuming_is_refused_if_a_file_of_the_dataset_changed(split, letters, ran, tmp_path):
    """
    Notice new content in nanoGPT's own folder, which has no manifest, although the file's name and
    size stay the same.
    """
    data = shutil.copytree(letters, tmp_path / "letters")
    keys = SHORT_RUN | dict(dataset=data, out_dir=ran.out_dir, max_iters=2)
    train(**keys)
    before = contents(ran.out_dir)
    ids = np.fromfile(data / f"{split}.bin", "<u2")
    ids[::-1].tofile(data / f"{split}.bin")
    for more in (dict(max_iters=4, init_from="resume"), {}):  # also if the run is complete
        refused(run("train.py", *flags(**keys | more)), str(data))
    assert contents(ran.out_dir) == before
