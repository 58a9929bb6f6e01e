"""
Check how a run's folder is written and read. integration/test_disks.py does so with whole runs on
real disks.
"""

import errno
import io
import json

import pytest
import torch

from training import checkpoint
from training.checkpoint import Saver
from training.pretrained import find_weights
from training.ranks import Ranks


class FillingFile(io.FileIO):
    """A file on a disk with room for so many more bytes."""

    room = 1000

    def write(self, content) -> int:
        if not FillingFile.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(content[: FillingFile.room])
        FillingFile.room -= written
        return written


def test_writes_every_record_whole_after_the_disk_was_full(tmp_path, monkeypatch, capsys):
    """Warn once. With room again, complete the record that was cut, and write the others."""
    saver = Saver(tmp_path, keep=1, ranks=Ranks())
    saver.claim(None)
    monkeypatch.setattr(
        checkpoint, "open", lambda path, mode, **_: FillingFile(path, mode), raising=False
    )
    records = [dict(kind="step", iter=it) for it in range(7)]
    for it, record in enumerate(records):
        monkeypatch.setattr(FillingFile, "room", {2: 10, 3: 0, 4: 0, 5: 0}.get(it, 1000))
        saver.write_record(record)
        written = (tmp_path / "metrics.jsonl").read_bytes()
        assert written.count(b"\n") == (2 if 2 <= it < 6 else it + 1)
    saver.close()
    assert [*map(json.loads, written.splitlines())] == records
    assert capsys.readouterr().err.count("metrics.jsonl") == 1


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
    """Warn of the newest one."""
    good, bad = (checkpoint.checkpoint_path(tmp_path, it) for it in (2, 3))
    checkpoint.save(dict(model=torch.ones(9999), progress={}), good)
    make(bad, good.read_bytes())
    assert checkpoint.find_newest(tmp_path) == good
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {bad}: ") and words in line


def saved(path, it: int, loss: float) -> None:
    progress = dict(iter_num=it, best_iter=it, best_val_loss=loss)
    checkpoint.save(dict(model=torch.full((9999,), loss), progress=progress), path)


# what best.pt and the best checkpoint, of iteration 3, hold; and the iteration in best.pt then
BEST = {
    "an older one, copied later": (lambda best, path: saved(best, 2, 5.0), 3),
    "the same": (lambda best, path: best.write_bytes(path.read_bytes()), 3),
    "the same iteration, trained otherwise": (lambda best, path: saved(best, 3, 5.0), 3),
    "a better one, whose checkpoint is gone": (lambda best, path: saved(best, 9, 3.0), 9),
    "a damaged one": (lambda best, path: best.write_bytes(path.read_bytes()[:-100]), 3),
    "none": (lambda best, path: None, 3),
    "an older one beside a damaged checkpoint": (
        lambda best, path: (saved(best, 2, 5.0), path.write_bytes(b"cut")),
        2,
    ),
}


@pytest.mark.parametrize("prepare, held", BEST.values(), ids=BEST)
def test_best_pt_follows_what_the_files_hold_and_not_their_times(prepare, held, tmp_path, capsys):
    """Until it does, read the best checkpoint, with a warning."""
    best, path = tmp_path / "best.pt", checkpoint.checkpoint_path(tmp_path, 3)
    saved(path, 3, 4.0)
    prepare(best, path)
    is_behind = held == 3 and not (best.exists() and best.read_bytes() == path.read_bytes())
    assert find_weights(str(tmp_path), best=True) == (path if is_behind else best)
    assert capsys.readouterr().err.count("warning: ") == is_behind
    checkpoint.link_best(tmp_path)
    state = checkpoint.read(best)
    loss = {2: 5.0, 3: 4.0, 9: 3.0}[held]
    assert state["progress"]["iter_num"] == held and state["model"][0] == loss
    assert find_weights(str(tmp_path), best=True) == best
    assert not capsys.readouterr().err
