"""Continue runs by other commands, finished runs, and runs whose dataset has changed."""

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import another_value
from char_dataset import SHORT_RUN, T
from program import (
    Run,
    assert_same_run,
    flags,
    lines,
    refused,
    run,
    stopped,
    train,
    unchanged,
)

from configurator import FIELDS, Config, LaunchKeys, find_keys, read_config
from run.start import config_of_run

TINY = SHORT_RUN


def test_a_finished_run_goes_on_if_it_is_given_more_iterations(tiny, ran):
    """The same command, or one with fewer iterations or another line, opens and writes nothing."""
    keys = tiny | dict(warmup_iters=0)
    keys |= dict(lr_schedule="wsd", decay_fraction=0.5, learning_rate=0.01, min_lr=0.0)
    train(**keys | dict(max_iters=4))
    with unchanged(ran.out_dir):
        for again in (dict(max_iters=4), dict(max_iters=2), dict(max_iters=4, log_interval=2)):
            said = f"complete after 4 iterations (max_iters = {again['max_iters']})"
            assert said in train(**keys | again | dict(dataset="missing")).out
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


def test_a_resume_that_names_only_the_folder_equals_an_uninterrupted_run(tiny, ran, tmp_path):
    tiny |= OTHERS
    train(**tiny | dict(out_dir=tmp_path / "straight"))
    stopped(5, **tiny)
    result = train(out_dir=ran.out_dir)
    _, keeps = lines(result.out, "resume: ")
    # but for dtype, which the device's line shows
    assert all(f"{name} = {x}" in keeps for name, x in OTHERS.items() if name != "dtype")
    assert_same_run(tmp_path / "straight", ran.out_dir, 8)
    first, second = ran.column("start", "config")
    assert second == first and OTHERS.items() <= first.items()
    again = train(out_dir=ran.out_dir)
    assert "complete after 8 iterations (max_iters = 8 of this run)" in again.out


LENGTH_AND_DATA = {"max_iters", "hours", "warmup_iters", "lr_decay_iters", "dataset", "eval_only"}
NOT_TRIED = {"out_dir", "device", "compile", "tracker", "wandb_project", "log_interval"}


def test_what_a_plain_command_may_change_does_not_change_what_a_run_learns(tiny, ran, straight):
    """Set all keys of LaunchKeys but those of the run's length and its data to other values."""
    stopped(4, **tiny)
    names = find_keys(LaunchKeys).keys() - LENGTH_AND_DATA - NOT_TRIED
    others = {n: OTHERS.get(n, another_value(FIELDS[n], getattr(Config(), n))) for n in names}
    del tiny["gradient_accumulation_steps"]  # with another batch_size, more tokens in an iteration
    result = train(**tiny | others)
    assert all(f"resume: {name} = " in result.out for name in others)
    assert ran.steps("loss") == pytest.approx(Run(straight).steps("loss"), rel=1e-5)


def test_a_run_says_what_it_keeps_that_a_command_leaves_out(tiny, ran):
    """It says nothing of a value that the command would begin a new run with."""
    keys = tiny | dict(max_iters=2, learning_rate=1e-5)
    train(**keys, dropout=0.2, min_lr=6e-5)
    kept = "resume: keeps dropout = 0.2, min_lr = 6e-05"
    assert kept in train(**keys | dict(max_iters=3)).out.splitlines()
    assert "resume: keeps" not in train(**keys | dict(max_iters=4), dropout=0.2, min_lr=6e-5).out
    assert ran.state()["config"]["min_lr"] == 6e-5


def test_a_config_file_computes_with_the_values_that_its_run_keeps(tiny, ran, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("lr_decay_iters = max_iters\neval_interval = 1 + max_iters // 2\n")
    del tiny["eval_interval"]
    stopped(5, str(file), **tiny)
    del tiny["max_iters"]
    assert run("train.py", str(file), *flags(**tiny)).code == 0
    first, second = ran.column("start", "config")
    assert second == first and first["lr_decay_iters"] == 8


def test_a_complete_run_takes_no_rate_that_it_would_not_train_with(tiny, ran):
    keys = tiny | dict(max_iters=2)
    train(**keys)
    other = keys | dict(init_from="resume", learning_rate=0.02)
    with unchanged(ran.out_dir):
        refused(run("train.py", *flags(**other)), "learning_rate: ", "a larger --max_iters")
    train(**other | dict(max_iters=3))
    assert ran.state()["config"]["learning_rate"] == 0.02


def test_a_checkpoint_without_an_optimizer_begins_no_new_run_in_its_folder(tiny, ran):
    train(**tiny)
    torch.save(ran.state() | dict(optimizer={}), ran.out_dir / "ckpt-00000008.pt")
    with unchanged(ran.out_dir):
        refused(run("train.py", *flags(**tiny)), "ckpt-00000008.pt: has no optimizer")


def test_a_checkpoint_under_another_iterations_name_is_refused(tiny, ran):
    """It would be taken for the newest at each start, although the run saves newer ones."""
    train(**tiny)
    (ran.out_dir / "ckpt-00000008.pt").rename(ran.out_dir / "ckpt-00000009.pt")
    with unchanged(ran.out_dir):
        result = run("train.py", *flags(**tiny | dict(max_iters=12)))
        refused(result, "ckpt-00000009.pt: holds iteration 8", "ckpt-00000008.pt")


@pytest.mark.parametrize("begin", [functools.partial(stopped, 5), train], ids=["stopped", "over"])
def test_a_run_takes_other_hyperparameters_only_with_init_from_resume(begin, tiny, ran):
    """
    Refuse each that a command sets to another value. A loop over rates, or a config that somebody
    has edited, would else train on with them, or in a folder whose run is over not at all.
    """
    begin(**tiny)
    with unchanged(ran.out_dir):
        for name, other in dict(learning_rate=0.02, dropout=0.1, eval_tokens=64).items():
            kept = ran.state()["config"][name]
            ways = (f"--{name}={kept}", "another --out_dir", "--init_from=resume")
            refused(run("train.py", *flags(**tiny | {name: other})), f"{name}: ", *ways)
        train(**tiny | dict(learning_rate=0.02, eval_only=True))  # which depends on none of them
    result = train(**tiny | dict(learning_rate=0.02, max_iters=10, init_from="resume"))
    assert "resume: learning_rate = 0.02 (was 0.01)" in result.out
    assert ran.state()["config"]["learning_rate"] == 0.02


def test_a_command_of_another_run_gets_a_line_for_each_key_and_one_with_what_to_type(tiny, ran):
    """Two configs that share an out_dir differ in many keys, also in some that a resume changes."""
    train(**tiny | dict(max_iters=0))
    others = dict(n_layer=3, learning_rate=0.02, batch_size=9)
    result = run("train.py", *flags(**tiny | others))
    *differ, last = result.err.splitlines()
    assert result.code == 1
    differing = [line.split(":")[1].strip() for line in differ]
    assert differing == ["n_layer", "tokens_per_iter", "learning_rate"]
    words = f"--n_layer={tiny['n_layer']} --tokens_per_iter=128 --learning_rate=0.01"
    assert last == f"    give another --out_dir for a new run, or {words}"


def test_an_unfinished_run_is_refused_fewer_iterations_than_it_has_done(tiny, ran):
    """It would end without decaying the learning rate."""
    keys = tiny | dict(max_iters=4)
    train(**keys)
    torch.save(ran.state() | dict(complete=False), ran.out_dir / "ckpt-00000004.pt")
    with unchanged(ran.out_dir):
        refused(run("train.py", *flags(**keys | dict(max_iters=3))), "max_iters: ")
    train(**keys)
    assert ran.state()["complete"]


def test_eval_iters_counts_the_micro_batches_of_an_evaluation(tiny, ran):
    del tiny["eval_tokens"]
    train(**tiny | dict(max_iters=0), eval_iters=3)
    assert ran.state()["config"]["eval_tokens"] == 3 * 4 * T


@pytest.mark.parametrize("split", ["train", "val"])
def test_resuming_is_refused_if_a_file_of_the_dataset_changed(split, letters, tiny, ran, tmp_path):
    """
    Notice new content in nanoGPT's own folder, which has no manifest, although the file's name and
    size stay the same.
    """
    tiny["dataset"] = data = shutil.copytree(letters, tmp_path / "letters")
    train(**tiny)
    ids = np.fromfile(data / f"{split}.bin", "<u2")
    ids[::-1].tofile(data / f"{split}.bin")
    with unchanged(ran.out_dir):
        more = dict(max_iters=12, init_from="resume")
        refused(run("train.py", *flags(**tiny | more)), str(data))
