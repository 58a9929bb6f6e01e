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
    saver = Saver(tmp_path, keep=1, facts={}, ranks=Ranks())
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
    "empty": (lambda path, content: path.touch(), "cut short"),
    "cut": (lambda path, content: path.write_bytes(content[:-100]), "cut short"),
    "zeros": (lambda path, content: path.write_bytes(bytes(len(content))), "cut short"),
    "a flipped bit": (lambda path, content: path.write_bytes(flipped(content)), "checksum"),
}


@pytest.mark.parametrize("make, words", NEWEST.values(), ids=NEWEST)
def test_resumes_an_older_checkpoint_if_the_newest_cannot_be_read(make, words, tmp_path, capsys):
    """Warn of the newest one."""
    good, bad = (checkpoint.checkpoint_path(tmp_path, it) for it in (2, 3))
    checkpoint.save(dict(model=torch.ones(9999), progress={}), good)
    make(bad, good.read_bytes())
    assert checkpoint.find_newest(tmp_path)[0] == good
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {bad}: ") and words in line


@pytest.mark.parametrize("when", ["before torch.load", "within torch.load"])
def test_looks_again_if_a_run_deletes_the_checkpoint(when, tmp_path, monkeypatch):
    """Read the next checkpoint, which the run wrote before it deleted the one that was found."""
    old, new = (checkpoint.checkpoint_path(tmp_path, it) for it in (2, 3))
    checkpoint.save(dict(progress=dict(iter_num=2)), old)
    loads = []

    def open_state(path):
        loads.append(path)
        if len(loads) == 2:  # the first load is damage()'s
            checkpoint.save(dict(progress=dict(iter_num=3)), new)
            old.unlink()
            if when == "within torch.load":
                raise FileNotFoundError(path)
        return torch.load(path, weights_only=True, mmap=True)

    monkeypatch.setattr(checkpoint, "open_state", open_state)
    path, state = checkpoint.find_newest(tmp_path)
    assert path == new and state and state["progress"] == dict(iter_num=3)
    assert old in loads and new in loads
