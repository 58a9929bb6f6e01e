"""
Check how a run's folder is written and read. integration/test_disks.py does so with whole runs on
real disks.
"""

import errno
import json
import math
import operator
import os
import sys
from unittest import mock

import pytest
import torch
from fault_injection import PAGE, fill, free
from program import contents

from common.console import UserError, keep_transcript
from common.files import read_record
from run import checkpoint
from run.checkpoint import RunFolder, State, checkpoint_name


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def load_newest(folder) -> State:
    return checkpoint.state_of(*checkpoint.load_first(folder, checkpoint.newest_first))


def state(it: int, loss: float | None) -> State:
    """Return a state whose weights are its loss."""
    weights, groups = dict(w=torch.full((9999,), loss or 0)), dict(param_groups=[])
    return State(model=weights, iter_num=it, val_loss=loss, optimizer=groups)


NEWEST = {  # how it gets its content, and words of the warning
    "a dead link": (lambda path, content: path.symlink_to("gone"), "cannot be read ("),
    "a folder": (lambda path, content: path.mkdir(), "cannot be read ("),
    "empty": (lambda path, content: path.touch(), "damaged"),
    "cut": (lambda path, content: path.write_bytes(content[:-100]), "damaged"),
    "a list": (lambda path, content: torch.save([5], path), "not a checkpoint"),
    "a flipped bit": (lambda path, content: path.write_bytes(flipped(content)), "damaged"),
}


@pytest.mark.parametrize("make, words", NEWEST.values(), ids=NEWEST)
def test_resumes_an_older_checkpoint_if_the_newest_cannot_be_read(make, words, tmp_path, capsys):
    """Warn of the newest one, and rename it."""
    good, bad = (tmp_path / checkpoint_name(it) for it in (2, 3))
    checkpoint.write(state(2, None), good)
    make(bad, good.read_bytes())
    resumed = load_newest(tmp_path)
    assert resumed.source == str(good)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {bad}: ") and words in line
    folder = RunFolder(tmp_path)
    folder.claim(resumed)
    keep_transcript(None)
    assert checkpoint.newest_first(tmp_path) == [good]


FOREIGN = {
    "nanoGPT's": dict(model={}, optimizer={}, model_args={}, iter_num=2, config={}),
    "an earlier format": dict(model={}, optimizer={}, progress={}, format=checkpoint.FORMAT - 1),
}


@pytest.mark.parametrize("order", [checkpoint.newest_first, checkpoint.best_first])
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_checkpoint_of_another_program_or_version_is_refused_as_such(content, order, tmp_path):
    """Do not continue from an older checkpoint, which would silently lose iterations."""
    checkpoint.write(state(1, None), tmp_path / checkpoint_name(1))
    torch.save(content, tmp_path / checkpoint_name(2))
    with pytest.raises(UserError, match="another version or program"):
        checkpoint.state_of(*checkpoint.load_first(tmp_path, order))


@pytest.mark.parametrize("order", [checkpoint.newest_first, checkpoint.best_first])
def test_says_of_each_checkpoint_why_it_cannot_be_read_if_none_can(order, tmp_path, capsys):
    paths = [tmp_path / checkpoint_name(it) for it in (3, 2)]
    for path in paths:
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        checkpoint.load_first(tmp_path, order)
    warnings = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert warnings == [str(path) for path in paths]


def test_the_best_intact_checkpoint_is_taken_with_a_warning_of_a_damaged_one(tmp_path, capsys):
    checkpoint.write(state(2, 3.0), tmp_path / checkpoint_name(2))
    newest = tmp_path / checkpoint_name(3)
    newest.write_bytes(b"damaged")
    path, _ = checkpoint.load_first(tmp_path, checkpoint.best_first)
    assert path == tmp_path / checkpoint_name(2)
    assert str(newest) in capsys.readouterr().err


@pytest.mark.parametrize("step", ["zipfile.ZipFile", "torch.load"])
def test_a_checkpoint_that_a_run_deletes_while_it_is_read_gives_way_to_a_newer_one(
    step, tmp_path, monkeypatch, capsys
):
    folder, function = RunFolder(tmp_path), operator.attrgetter(step)(checkpoint)
    folder.save(state(2, 5.0), keep=1)

    def delete_and_call(*arguments, **named):
        monkeypatch.undo()
        folder.save(state(3, 4.0), keep=1)
        return function(*arguments, **named)

    module, name = step.split(".")
    monkeypatch.setattr(getattr(checkpoint, module), name, delete_and_call)
    assert load_newest(tmp_path).iter_num == 3
    assert not capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_checkpoints_below_a_name_that_is_not_utf8_are_read(tmp_path):
    """A zip from Windows leaves such names."""
    path = tmp_path / os.fsdecode("Müller".encode("latin-1"))
    path.mkdir()
    RunFolder(path).save(state(1, 5.0), keep=2)
    assert float(load_newest(path).model["w"][0]) == 5.0
    assert checkpoint.best_first(path) == [path / "ckpt-00000001.pt"]


def test_a_save_that_fails_leaves_the_newest_checkpoint_and_the_best(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    for it in (1, 2):
        folder.save(state(it, loss=float(it)), keep=1)
    monkeypatch.setattr(checkpoint, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(UserError):
        folder.save(state(3, loss=3.0), keep=1)
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == [
        checkpoint_name(2),
        checkpoint_name(1),
    ]


def test_the_newest_checkpoints_and_the_one_with_the_lowest_loss_are_kept(tmp_path):
    folder = RunFolder(tmp_path)

    def kept_after(it: int, loss: float | None, best: bool = False, keep: int = 2) -> list[int]:
        assert folder.save(state(it, loss), keep)[1] == best
        assert not [*tmp_path.glob("*.tmp")]
        return [*map(checkpoint.iteration, checkpoint.newest_first(tmp_path)[::-1])]

    assert kept_after(1, None) == [1]
    assert kept_after(2, 4.0, True) == [1, 2]
    assert kept_after(3, math.nan) == [2, 3]
    assert kept_after(4, 5.0) == [2, 3, 4]
    assert kept_after(4, 4.5) == [2, 4]  # as a resume may do; no fourth file is needed
    assert kept_after(5, None) == [2, 4, 5]
    assert kept_after(6, 3.0, True) == [5, 6]
    assert kept_after(7, 3.5, keep=1) == kept_after(7, 3.5, keep=1) == [6, 7]
    assert kept_after(8, 2.0, True, keep=1) == [8]
    (tmp_path / checkpoint_name(8)).write_bytes(b"cut")  # it may be the best on a disk that fails
    assert kept_after(9, 6.0, True, keep=1) == [8, 9]


def test_untrained_weights_are_never_the_best(tmp_path):
    """A run that was stopped in its first evaluation has saved them, with the lowest loss."""
    folder = RunFolder(tmp_path)
    assert [folder.save(state(*saved), keep=9)[1] for saved in [(0, 1.0), (5, None)]] == [False] * 2
    assert [*map(checkpoint.iteration, checkpoint.best_first(tmp_path))] == [5, 0]
    assert folder.save(state(10, 2.0), keep=9)[1]


def test_a_save_that_the_disk_of_the_log_refuses_names_the_log(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl: is not saved"):
        RunFolder(tmp_path).save(state(2, 5.0), keep=2)


def test_a_disk_that_renames_onto_no_file_takes_a_checkpoint_twice(tmp_path, monkeypatch):
    """Some network disks refuse that, and a resume may save an iteration again."""
    replace = os.replace

    def refuse(old, new):
        if new.exists():
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(old, new)

    monkeypatch.setattr("os.replace", refuse)
    folder = RunFolder(tmp_path)
    for loss in (5.0, 4.0):
        folder.save(state(2, loss), keep=2)
        assert float(load_newest(tmp_path).model["w"][0]) == loss
    assert contents(tmp_path).keys() == {"metrics.jsonl", checkpoint_name(2)}


KEPT = b"""{"kind": "start", "iter": 0}
{"kind": "event", "iter": 0}
{"kind": "step", "iter": 0}
{"kind": "eval", "iter": 4}
a line that somebody has written
{"kind": "event", "iter": 4, "message": "no more samples"}
{"kind": "sample", "iter": 4}
{"kind": "checkpoint", "iter": 4}
"""
AGAIN = [
    b'{"kind": "step", "iter": 4}\n{"kind": "eval", "iter": 5}\n{"kind": "en',
    b'{"kind": "end", "iters": 4}\n',
    b'{"kind": "event", "iter": 4, "message": "a skipped update"}\n',
    b"half a line",
    b"",
]


@pytest.mark.parametrize("again", AGAIN)
def test_a_resume_cuts_off_the_records_that_it_will_write_again(again, tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(KEPT + again)
    checkpoint.cut_records(log, 4)
    assert log.read_bytes() == KEPT


def test_a_log_goes_on_after_a_full_disk_and_says_once_that_it_lacks_lines(make_disk, capsys):
    """A reader skips what was cut, and the line behind it."""
    disk = make_disk(3 * PAGE)
    folder = RunFolder(disk)
    record = json.dumps(dict(kind="step", text="x" * 700))
    fill(disk)
    free(disk, PAGE)
    for number in range(12):  # five fit
        if number == 9:
            free(disk)
        folder.append("metrics.jsonl", record)
    found = [read_record(line) for line in open(disk / "metrics.jsonl", "rb")]
    assert [bool(record) for record in found] == [True] * 5 + [False] + [True] * 2
    assert capsys.readouterr().err.count("lack lines") == 1
