"""Resume runs that were already finished, or whose dataset has changed."""

import shutil

import numpy as np
import pytest
from char_dataset import SHORT_RUN, T
from program import Run, contents, flags, refused, run, train


@pytest.fixture
def ran(tmp_path) -> Run:
    return Run(tmp_path / "run")


def test_a_finished_run_goes_on_if_it_is_given_more_iterations(corpus, ran, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "tokens")
    keys = SHORT_RUN | dict(dataset=data, out_dir=ran.out_dir, warmup_iters=0)
    keys |= dict(lr_schedule="wsd", decay_fraction=0.5, learning_rate=0.01, min_lr=0.0)
    train(**keys | dict(max_iters=4))
    shutil.move(data, away := tmp_path / "away")
    # needs no data, and writes nothing
    assert "all 4 iterations are done" in train(**keys | dict(max_iters=4)).out
    assert len(ran.records("start")) == 1
    shutil.move(away, data)
    train(**keys | dict(max_iters=8))
    assert ran.steps("iter") == [*range(8)]


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
    result = run("train.py", *flags(**keys | dict(max_iters=4, init_from="resume")))
    refused(result, str(data))
    assert contents(ran.out_dir) == before
