"""
Check how a run's folder is written and read. integration/test_disks.py does so with whole runs on
real disks.
"""

import json

import pytest
import torch
from fault_injection import PAGE, fill, free
from program import contents

from common.console import UserError, keep_transcript
from common.files import read_record
from run import checkpoint
from run.checkpoint import RunFolder, checkpoint_name


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


NEWEST = {  # how it gets its content, and words of the warning
    "a dead link": (lambda path, content: path.symlink_to("gone"), "cannot be read ("),
    "a folder": (lambda path, content: path.mkdir(), "cannot be read ("),
    "empty": (lambda path, content: path.touch(), "damaged"),
    "cut": (lambda path, content: path.write_bytes(content[:-100]), "damaged"),
    "zeros": (lambda path, content: path.write_bytes(bytes(len(content))), "damaged"),
    "a flipped bit": (lambda path, content: path.write_bytes(flipped(content)), "checksum"),
}


@pytest.mark.parametrize("make, words", NEWEST.values(), ids=NEWEST)
def test_resumes_an_older_checkpoint_if_the_newest_cannot_be_read(make, words, tmp_path, capsys):
    """Warn of the newest one, and rename it."""
    good, bad = (tmp_path / checkpoint_name(it) for it in (2, 3))
    progress = dict(iter_num=2, val_loss=None, best_val_loss=5.0)
    checkpoint.save(dict(model=torch.ones(9999), progress=progress), good)
    make(bad, good.read_bytes())
    resumed = checkpoint.read_newest(tmp_path)
    assert resumed["source"] == str(good)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {bad}: ") and words in line
    folder = RunFolder(tmp_path, keep=2)
    folder.claim(resumed)
    folder.close()
    keep_transcript(None)
    assert checkpoint.list_checkpoints(tmp_path) == [good]


@pytest.mark.parametrize("step", ["damage", "read"])
def test_a_checkpoint_that_a_run_deletes_while_it_is_read_gives_way_to_a_newer_one(
    step, tmp_path, monkeypatch, capsys
):
    folder, function = RunFolder(tmp_path, keep=1), getattr(checkpoint, step)
    assert not saved(folder, 2, 5.0, 5.0)
    reads = {"damage": 1, "read": 2}[step]  # damage() reads it too

    def delete_and_call(path):
        nonlocal reads
        reads -= 1
        if not reads:
            assert not saved(folder, 3, 5.0, 5.0)
        return function(path)

    monkeypatch.setattr(checkpoint, step, delete_and_call)
    assert checkpoint.read_newest(tmp_path)["progress"]["iter_num"] == 3
    assert not capsys.readouterr().err


@pytest.mark.parametrize("first", [1, None])
def test_a_launch_ends_if_another_one_has_saved_meanwhile(first, tmp_path):
    folder = RunFolder(tmp_path, keep=2)
    assert not first or not saved(folder, first, 4.0, 4.0)
    resumed = checkpoint.read_newest(tmp_path)
    assert not saved(folder, 2, 5.0, 4.0)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="ckpt-00000002.pt: was saved in the meantime"):
        folder.claim(resumed)
    folder.close()
    assert contents(tmp_path) == before | dict(lock=b"")


def test_a_save_that_fails_says_so_and_keeps_what_was_there(make_disk):
    folder = RunFolder(make_disk(1 << 20), keep=2)
    assert not saved(folder, 1, 5.0, 5.0)
    before = contents(folder.path)
    large = dict(model=torch.ones(10**6))
    assert folder.save("best.pt", large) == "best.pt is not saved: No space left on device"
    assert contents(folder.path) == before


def saved(folder: RunFolder, it: int, loss: float, best: float) -> str:
    """Save as train.py does. Returns what has failed."""
    progress = dict(iter_num=it, val_loss=loss, best_val_loss=best)
    state = dict(model=torch.full((9999,), loss), progress=progress)
    problem = folder.save("best.pt", state) if loss == best else ""
    return folder.save(checkpoint_name(it), state) or problem


def held(path) -> float:
    return float(checkpoint.read(path)["model"][0])


def test_best_pt_holds_the_best_and_the_newest_are_kept(tmp_path):
    folder = RunFolder(tmp_path, keep=2)
    for it, loss, best in ((1, 5.0, 5.0), (2, 4.0, 4.0), (3, 6.0, 4.0), (4, 7.0, 4.0)):
        assert not saved(folder, it, loss, best)
        assert held(tmp_path / "best.pt") == best
        assert held(tmp_path / checkpoint_name(it)) == loss
        assert not [*tmp_path.glob("*.tmp")]
    assert [*map(checkpoint.iteration, checkpoint.list_checkpoints(tmp_path))] == [3, 4]
    assert not saved(folder, 4, 7.0, 4.0)  # as a resume may do; no fourth file is needed
    assert [*map(checkpoint.iteration, checkpoint.list_checkpoints(tmp_path))] == [4]
    folder.keep = 1
    assert not saved(folder, 5, 7.0, 4.0)
    assert checkpoint.list_checkpoints(tmp_path) == [tmp_path / checkpoint_name(5)]


@pytest.mark.parametrize("others", ["none", "damaged"])
def test_best_pt_is_resumed_if_it_is_all_there_is(others, tmp_path, capsys):
    """After a kill in the first save, or with keep_checkpoints=1 and a damaged checkpoint."""
    assert not saved(RunFolder(tmp_path, keep=2), 2, 4.0, 4.0)
    newest = tmp_path / checkpoint_name(2)
    newest.unlink() if others == "none" else newest.write_bytes(b"cut")
    assert checkpoint.read_newest(tmp_path)["source"] == str(tmp_path / "best.pt")
    assert capsys.readouterr().err.count("\n") == (others == "damaged")


KEPT = b"""{"kind": "start", "iter": 0}
{"kind": "event", "iter": 0}
{"kind": "step", "iter": 0}
{"kind": "eval", "iter": 4}
a line that somebody has written
{"kind": "event", "iter": 4, "message": "a save that failed"}
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


def test_a_log_that_a_full_disk_cuts_goes_on_and_is_not_complete(make_disk, capsys):
    """Warn once. A reader skips only the line that was cut."""
    disk = make_disk(3 * PAGE)
    folder = RunFolder(disk, keep=1)
    record = json.dumps(dict(kind="step", text="x" * 700))
    fill(disk)
    free(disk, PAGE)
    for number in range(12):  # five fit
        if number == 9:
            free(disk)
        folder.append("metrics.jsonl", record)
    found = [read_record(line) for line in open(disk / "metrics.jsonl", "rb")]
    assert [bool(record) for record in found] == [True] * 5 + [False] + [True] * 3
    assert capsys.readouterr().err.count("lack lines") == 1
    assert folder.logs_lack_lines
