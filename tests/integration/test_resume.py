"""Resume runs that were stopped, moved or already finished, and check their exit codes."""

import re
import shutil
import signal
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from char_dataset import SHORT_RUN, T, files, sample
from program import (
    ROOT,
    checkpoints,
    column,
    finish,
    flags,
    run,
    start,
    train,
    wait_for_line,
)


def test_ctrl_c_ends_a_run_with_code_130_and_the_printed_command_continues_it(corpus, tmp_path):
    arguments = flags(**SHORT_RUN | dict(max_iters=10**6), dataset=corpus, out_dir=tmp_path / "run")
    process = start(str(ROOT / "train.py"), *arguments, cwd=tmp_path)
    wait_for_line(process, "iter 3:")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 128 + signal.SIGINT, result.err
    assert column(tmp_path / "run", "end", "reason") == ["SIGINT"]
    assert "second signal" in result.out + result.err  # what a second signal would do
    (saved,) = column(tmp_path / "run", "end", "iters")
    assert checkpoints(tmp_path / "run")[-1] == saved
    (line,) = re.findall(r"^to continue: python (.*)$", result.out, re.MULTILINE)
    script, *again = line.split()
    result = finish(start(script, *again, f"--max_iters={saved + 2}", cwd=tmp_path))
    assert result.code == 0, result.err
    assert column(tmp_path / "run", "step", "iter") == [*range(saved + 2)]


def test_a_resume_verifies_its_checkpoint_only_once(corpus, tmp_path):
    """Skip a second check, which takes seconds for a checkpoint of gigabytes."""
    arguments = dict(SHORT_RUN, dataset=corpus, out_dir=tmp_path / "run")
    train(**arguments | dict(max_iters=2))
    verified, testzip = [], zipfile.ZipFile.testzip

    def verify(file):
        verified.append(Path(file.filename).name)
        return testzip(file)

    with mock.patch("zipfile.ZipFile.testzip", verify):
        train(**arguments | dict(max_iters=4), init_from="resume")
    assert verified == ["ckpt-00000002.pt", "ckpt-00000004.pt"]  # 4 is read right after its save


@pytest.fixture(scope="module")
def eight(corpus, tmp_path_factory) -> Path:
    """Train a run of eight iterations, with checkpoints after 4 and 8."""
    out_dir = tmp_path_factory.mktemp("runs") / "eight"
    train(**SHORT_RUN, dataset=corpus, out_dir=out_dir)
    assert checkpoints(out_dir) == [4, 8]
    return out_dir


def test_a_run_moved_together_with_its_dataset_resumes(eight, corpus, tmp_path):
    shutil.copytree(eight, tmp_path / "moved")
    shutil.copytree(corpus, tmp_path / "tokens_moved")
    where = dict(out_dir=tmp_path / "moved", dataset=tmp_path / "tokens_moved")
    train(**SHORT_RUN | dict(max_iters=10), **where, init_from="resume")
    assert column(tmp_path / "moved", "step", "iter") == [*range(10)]


def test_a_finished_run_goes_on_if_it_is_given_more_iterations_and_warns_of_the_rate(
    corpus, tmp_path
):
    keys = SHORT_RUN | dict(dataset=corpus, out_dir=tmp_path, init_from="auto", warmup_iters=0)
    keys |= dict(lr_schedule="wsd", decay_fraction=0.5, learning_rate=0.01, min_lr=0.0)
    train(**keys | dict(max_iters=4))
    assert "all 4 iterations are done" in train(**keys | dict(max_iters=4)).out
    longer = train(**keys | dict(max_iters=8))
    assert "this resume raises it from 0.00e+00 to 1.00e-02" in longer.err
    assert column(tmp_path, "step", "iter") == [*range(8)]


def test_a_copy_of_best_pt_named_as_a_checkpoint_resumes(eight, corpus, tmp_path):
    """Resume a run of which only best.pt is left, after copying it to a checkpoint's name."""
    (tmp_path / "run").mkdir()
    shutil.copy(eight / "best.pt", tmp_path / "run" / "ckpt-00000008.pt")
    given = SHORT_RUN | dict(max_iters=10)
    train(**given, dataset=corpus, out_dir=tmp_path / "run", init_from="resume")
    assert column(tmp_path / "run", "step", "iter") == [8, 9]


@pytest.mark.slow
def test_a_run_that_still_trains_can_be_sampled_and_compared(letters, tmp_path):
    arguments = flags(**SHORT_RUN | dict(max_iters=10**6), dataset=letters, out_dir=tmp_path)
    process = start("train.py", *arguments)
    try:
        wait_for_line(process, "checkpoint 4:")
        (text,) = sample(f"--out_dir={tmp_path}", "--start=abc", "--num_samples=1")
        assert text.startswith("abc")
        assert run("compare.py", tmp_path, f"--png={tmp_path / 'so_far.png'}").code == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_eval_iters_counts_the_micro_batches_of_an_evaluation(corpus, tmp_path):
    for name, size in (("iters", dict(eval_iters=3)), ("tokens", dict(eval_tokens=3 * 4 * T))):
        given = SHORT_RUN | dict(eval_tokens=0, max_iters=0) | size
        train(**given, dataset=corpus, out_dir=tmp_path / name)
    losses = [
        column(tmp_path / name, "eval", "train_loss", "val_loss") for name in ("iters", "tokens")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("split", ["train", "val"])
def test_resuming_is_refused_if_a_file_of_the_dataset_changed(split, letters, tmp_path):
    """
    Notice new content in nanoGPT's own folder, which has no manifest, although the file's name and
    size stay the same.
    """
    data, out_dir = tmp_path / "letters", tmp_path / "run"
    shutil.copytree(letters, data)
    keys = SHORT_RUN | dict(dataset=data, out_dir=out_dir, max_iters=2)
    train(**keys)
    before = files(out_dir)
    ids = np.fromfile(data / f"{split}.bin", "<u2")
    ids[::-1].tofile(data / f"{split}.bin")
    result = run("train.py", *flags(**keys | dict(max_iters=4, init_from="resume")))
    assert result.code == 2
    (error,) = result.err.splitlines()
    assert str(data) in error
    assert files(out_dir) == before
