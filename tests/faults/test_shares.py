"""
Disks that are not this machine's own: network shares, FUSE, what WSL shows of Windows. Some cannot
sync a folder, some have no locks. And a Mac's disk, which syncs less than it is asked to.
"""

import errno
import os
import stat
from pathlib import Path

import pytest
from helpers import records, run_here

from common.files import fsync_folder, replacing

fcntl = pytest.importorskip("fcntl", reason="Windows syncs no folder and has no fcntl")


def refuse_folders(monkeypatch, number: int) -> None:
    """os.fsync() of a folder fails with this errno."""

    def fsync(file):
        if isinstance(file, int) and stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_share_that_cannot_sync_a_folder_saves_and_says_so_once(
    number, dataset, tmp_path, monkeypatch, capsys
):
    refuse_folders(monkeypatch, number)
    assert run_here(dataset, tmp_path) == 0
    assert [r["iter"] for r in records(tmp_path, "checkpoint")] == [4, 8]
    assert (tmp_path / "best.pt").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}: this disk cannot sync it; ")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts in Linux's /proc")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_only_a_full_disk_counts_and_none_leaves_the_folder_open(number, tmp_path, monkeypatch):
    refuse_folders(monkeypatch, number)
    before = os.listdir("/proc/self/fd")
    if number == errno.EINVAL:
        fsync_folder(tmp_path)
    else:
        with pytest.raises(OSError, check=lambda error: error.errno == number):
            fsync_folder(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_disk_without_locks_is_said_once(dataset, tmp_path, monkeypatch, capsys):
    """As Lustre without its option, or NFS without its daemon."""

    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert run_here(dataset, tmp_path, max_iters=1) == 0
    assert run_here(dataset, tmp_path, max_iters=2, init_from="resume") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "locks" in line]
    assert warnings == [
        f"warning: {tmp_path}/lock: this disk has no locks; start no second process here"
    ]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_mac_empties_the_drives_cache_too_where_the_disk_can(refuses, tmp_path, monkeypatch):
    calls = []

    def control(file, command):
        calls.append((os.fstat(file.fileno()).st_size, command))
        if refuses:
            raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    with replacing(tmp_path / "file") as file:
        file.write(b"12345")
    assert calls == [(5, 51)] and (tmp_path / "file").read_bytes() == b"12345"
