"""Continue runs by other commands, finished runs, and runs whose dataset has changed."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import another_value
from char_dataset import SHORT_RUN, T
from program import (
    InProcessRun,
    Run,
    assert_same_run,
    contents,
    flags,
    lines,
    refused,
    run,
    sigterm,
    train,
)

from configurator import FIELDS, Config, read_config
from run.start import config_of_run


@pytest.fixture
def ran(tmp_path) -> Run:
    return Run(tmp_path / "run")


def test_a_finished_run_goes_on_if_it_is_given_more_iterations(corpus, ran):
    """The same command, or one with fewer iterations or another line, opens and writes nothing."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, warmup_iters=0)
    keys |= dict(lr_schedule="wsd", decay_fraction=0.5, learning_rate=0.01, min_lr=0.0)
    train(**keys | dict(max_iters=4))
    before = contents(ran.out_dir)
    for again in (dict(max_iters=4), dict(max_iters=2), dict(max_iters=4, log_interval=2)):
        said = f"complete after 4 iterations (max_iters = {again['max_iters']})"
        assert said in train(**keys | again | dict(dataset="missing")).out
    assert contents(ran.out_dir) == before
    train(**keys | dict(max_iters=8))
    assert ran.steps("iter") == [*range(8)]


@pytest.mark.parametrize("words", ["", "--dtype=auto", "--init_from=resume"])
def test_a_resumed_run_keeps_each_key_that_its_command_does_not_set(words):
    """Keep dtype also where the command says auto, which goes on meaning what it meant."""
    argv = ["--out_dir=mine", *words.split()]
    for name, key in FIELDS.items():
        before = replace(Config(), **{name: another_value(key, getattr(Config(), name))})
        assert config_of_run(argv, read_config(argv), before) == replace(before, out_dir="mine")


# keys of each class with other values than their defaults
OTHERS = dict(grad_clip=0.5, dropout=0.1, dtype="bfloat16", lr_schedule="wsd", decay_fraction=0.5)
OTHERS |= dict(min_lr=1e-4, lr_decay_iters=6, batch_size=2, tokens_per_iter=192, eval_interval=3)
OTHERS |= dict(log_interval=2, sample_tokens=3, loss_chunk="16")


def test_a_run_goes_on_by_itself_if_the_command_names_only_its_folder(corpus, ran, tmp_path):
    keys = SHORT_RUN | dict(dataset=corpus) | OTHERS
    train(**keys, out_dir=tmp_path / "straight")
    trainer = InProcessRun()
    trainer.at["iteration", 5] = sigterm
    assert trainer.launch(**keys, out_dir=ran.out_dir).code == 143
    result = train(out_dir=ran.out_dir)
    _, keeps = lines(result.out, "resume: ")
    # but for dtype, which the device's line shows
    assert all(f"{name} = {x}" in keeps for name, x in OTHERS.items() if name != "dtype")
    assert_same_run(tmp_path / "straight", ran.out_dir, 8)
    first, second = ran.column("start", "config")
    assert second == first and OTHERS.items() <= first.items()
    assert (
        "complete after 8 iterations (max_iters = 8 of this run)" in train(out_dir=ran.out_dir).out
    )


def test_a_run_says_what_it_keeps_that_a_command_leaves_out(corpus, ran):
    """It says nothing of a value that the command would begin a new run with."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=2, learning_rate=1e-5)
    train(**keys, dropout=0.2, min_lr=6e-5)
    kept = "resume: keeps dropout = 0.2, min_lr = 6e-05"
    assert kept in train(**keys | dict(max_iters=3)).out.splitlines()
    assert "resume: keeps" not in train(**keys | dict(max_iters=4), dropout=0.2, min_lr=6e-5).out
    assert ran.state()["config"]["min_lr"] == 6e-5


def test_a_config_file_computes_with_the_values_that_its_run_keeps(corpus, ran, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("lr_decay_iters = max_iters\neval_interval = 1 + max_iters // 2\n")
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir)
    keys.pop("eval_interval", None)
    trainer = InProcessRun()
    trainer.at["iteration", 5] = sigterm
    assert trainer.launch(str(file), **keys).code == 143
    del keys["max_iters"]
    assert trainer.launch(str(file), **keys).code == 0
    first, second = ran.column("start", "config")
    assert second == first and first["lr_decay_iters"] == 8


def test_a_complete_run_takes_no_rate_that_it_would_not_train_with(corpus, ran):
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=2)
    train(**keys)
    before = contents(ran.out_dir)
    other = keys | dict(init_from="resume", learning_rate=0.02)
    refused(run("train.py", *flags(**other)), "learning_rate: ", "a larger --max_iters")
    assert contents(ran.out_dir) == before
    train(**other | dict(max_iters=3))
    assert ran.state()["config"]["learning_rate"] == 0.02


def test_a_checkpoint_without_an_optimizer_begins_no_new_run_in_its_folder(corpus, ran):
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=2)
    train(**keys)
    torch.save(ran.state() | dict(optimizer={}), ran.out_dir / "ckpt-00000002.pt")
    before = contents(ran.out_dir)
    refused(run("train.py", *flags(**keys)), "ckpt-00000002.pt: has no optimizer")
    assert contents(ran.out_dir) == before


def test_a_checkpoint_under_another_iterations_name_is_refused(corpus, ran):
    """It would be taken for the newest at each start, although the run saves newer ones."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=2)
    train(**keys)
    (ran.out_dir / "ckpt-00000002.pt").rename(ran.out_dir / "ckpt-00000009.pt")
    before = contents(ran.out_dir)
    result = run("train.py", *flags(**keys | dict(max_iters=4)))
    refused(result, "ckpt-00000009.pt: holds iteration 2", "ckpt-00000002.pt")
    assert contents(ran.out_dir) == before


@pytest.mark.parametrize("is_over", [False, True], ids=["stopped", "over"])
def test_a_run_takes_other_hyperparameters_only_with_init_from_resume(is_over, corpus, ran):
    """
    Refuse each that a command sets to another value. A loop over rates, or a config that somebody
    has edited, would else train on with them, or in a folder whose run is over not at all.
    """
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir)
    trainer = InProcessRun()
    if not is_over:
        trainer.at["iteration", 5] = sigterm
    trainer.launch(**keys)
    before = contents(ran.out_dir)
    others = (("learning_rate", 0.01, 0.02), ("dropout", 0.0, 0.1), ("eval_tokens", 10 * T, 64))
    for name, value, other in others:
        ways = (f"--{name}={value}", "another --out_dir", "--init_from=resume")
        refused(run("train.py", *flags(**keys | {name: other})), f"{name}: ", *ways)
    train(**keys | dict(learning_rate=0.02, eval_only=True))  # which depends on none of them
    assert contents(ran.out_dir) == before
    result = train(**keys | dict(learning_rate=0.02, max_iters=10, init_from="resume"))
    assert "resume: learning_rate = 0.02 (was 0.01)" in result.out
    assert ran.state()["config"]["learning_rate"] == 0.02


def test_a_command_of_another_run_gets_a_line_for_each_key_and_one_with_what_to_type(corpus, ran):
    """Two configs that share an out_dir differ in many keys, also in some that a resume changes."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir)
    train(**keys | dict(max_iters=0))
    others = dict(n_layer=3, learning_rate=0.02, batch_size=9)
    result = run("train.py", *flags(**keys | others))
    *differ, last = result.err.splitlines()
    assert result.code == 1
    assert [line.split(":")[:2] for line in differ] == [
        ["error", " n_layer"],
        ["error", " tokens_per_iter"],
        ["error", " learning_rate"],
    ]
    words = f"--n_layer={SHORT_RUN['n_layer']} --tokens_per_iter=128 --learning_rate=0.01"
    assert last == f"    give another --out_dir for a new run, or {words}"


def test_an_unfinished_run_is_refused_fewer_iterations_than_it_has_done(corpus, ran):
    """It would end without decaying the learning rate."""
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=ran.out_dir, max_iters=4)
    train(**keys)
    state = ran.state()
    state["complete"] = False
    torch.save(state, ran.out_dir / "ckpt-00000004.pt")
    before = contents(ran.out_dir)
    refused(run("train.py", *flags(**keys | dict(max_iters=3))), "max_iters: ")
    assert contents(ran.out_dir) == before
    train(**keys)
    assert ran.state()["complete"]


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
    more = dict(max_iters=4, init_from="resume")
    refused(run("train.py", *flags(**keys | more)), str(data))
    assert contents(ran.out_dir) == before
