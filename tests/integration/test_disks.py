"""
Run with a disk that fills up or damages files, with shards that disappear, kills during a save, a
second run in the folder, or a user's own files in it. A run keeps the user's files, and loses at
most the iterations since its last intact checkpoint.

A full disk is a real tmpfs. Other faults are injected at calls of torch and of the system, by
InProcessRun, fault_injection.py and mocks.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from fault_injection import fill, free, watched
from program import (
    ROOT,
    InProcessRun,
    Run,
    assert_same_run,
    contents,
    finish,
    flags,
    lines,
    refused,
    run,
    start,
    train,
    wait_for_line,
)

from compare import is_finished
from tools.curves import open_run

fcntl = pytest.importorskip("fcntl", reason="disks and signals of POSIX")

TINY = dict(n_embd=16, gradient_accumulation_steps=1, max_iters=8)
TINY |= dict(lr_decay_iters=12, eval_interval=4, eval_tokens=160, dropout=0.1, learning_rate=0.3)
TINY |= dict(warmup_iters=6)
# the loss falls, so the newest checkpoint is the best, and averages replace the weights at the end
AVERAGED = dict(learning_rate=0.01, warmup_iters=2, optimizer="muon")


@pytest.fixture
def on_disk(make_disk, straight, tiny, ran):
    """
    Return a function that puts the run on a disk with room for `files` checkpoints and its logs, or
    with 1 MB, and returns the disk's folder.
    """

    def put(files: int = 0) -> Path:
        size = files * (straight / "ckpt-00000008.pt").stat().st_size + (48 << 10)
        disk = make_disk(size if files else 1 << 20)
        tiny["out_dir"] = ran.out_dir = disk / "run"
        return disk

    return put


def best_logged(ran: Run) -> int:
    """Return the iteration after 0 with the lowest validation loss in the log."""
    losses = dict(ran.evals("iter", "val_loss")[1:])
    return min(losses, key=losses.get)


# -----------------------------------------------------------------------------
# Full disks


@pytest.mark.parametrize(
    "it, keys", [(4, {}), (8, {}), (12, AVERAGED)], ids=["first", "middle", "last"]
)
def test_a_save_on_a_full_disk_ends_the_run_and_the_same_command_continues_it(
    it, keys, tiny, ran, on_disk, tmp_path
):
    """Fill the disk in the middle of the save at this iteration."""
    disk, trainer = on_disk(), InProcessRun()
    tiny |= dict(max_iters=12, keep_checkpoints=9) | keys  # so that no older file makes room
    train(**tiny | dict(out_dir=tmp_path / "straight"))

    def fill_but(size: int) -> None:
        fill(disk)
        free(disk, size)

    trainer.at["update", it - 3] = lambda: fill_but(20_000)
    result = trainer.launch(**tiny)
    (line,) = lines(result.err, "error:")
    assert f"ckpt-{it:08}.pt: is not saved (No space left" in line
    assert result.err.count("launch lack lines") <= 1 and not [*ran.out_dir.glob("*.tmp")]
    assert ran.saved == [*range(4, it, 4)] and not ran.records("end")
    free(disk)
    assert "complete after" not in train(**tiny).out
    assert_same_run(tmp_path / "straight", ran.out_dir, 12)
    assert ran.best["iter_num"] == best_logged(ran)
    assert "complete after" in train(**tiny).out


def test_a_resumed_run_fits_in_the_disk_space_that_the_docs_name(tiny, ran, on_disk):
    """
    Leave room for three checkpoints: two to keep, and the best. The one that the run resumes from
    must be closed after loading it, because deleting an open file frees no space.
    """
    on_disk(files=3)
    train(**tiny | dict(eval_interval=2, max_iters=2))
    train(**tiny | dict(eval_interval=2, max_iters=10), init_from="resume")
    assert ran.column("checkpoint", "iter") == [2, 4, 6, 8, 10]
    assert ran.saved == sorted({8, 10, best_logged(ran)})


# -----------------------------------------------------------------------------
# Death at any moment


@contextlib.contextmanager
def before_disk_calls(action: Callable[[], None]):
    """
    Call action() before each open() for writing, before the data of such a file is handed to the
    system, and before each fsync, replace, rename, unlink and mkdir of the os module.
    """
    real_open = io.open

    class File(io.FileIO):
        def write(self, data):
            action()
            return super().write(data)

    def opening(file, mode="r", *arguments, **named):
        if not set(mode) & set("wax+"):
            return real_open(file, mode, *arguments, **named)
        assert "b" in mode, "a run writes text as bytes"
        action()
        raw = File(file, mode.replace("b", ""))
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    def wrapped(name):
        function = getattr(os, name)

        def call(*arguments, **named):
            action()
            return function(*arguments, **named)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as patches:
        for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
            patches.enter_context(wrapped(name))
        patches.enter_context(mock.patch("builtins.open", opening))
        patches.enter_context(mock.patch("io.open", opening))
        yield


def folders_before_disk_calls(copies: Path, **keys) -> list[Path]:
    """
    Return copies of out_dir, made before each call that before_disk_calls() watches. A kill
    at that moment would leave the same files. States that differ only in the contents of a
    non-empty log.txt or unfinished file share a copy.
    """
    states: dict[tuple, Path] = {}
    out_dir = keys["out_dir"]

    def look():
        state = []
        for path in sorted(out_dir.glob("*")):
            begun = path.suffix == ".tmp" or path.name == "log.txt"
            state.append((path.name, bool(path.stat().st_size) if begun else path.read_bytes()))
        if out_dir.exists() and tuple(state) not in states:
            states[tuple(state)] = copies / str(len(states))
            shutil.copytree(out_dir, states[tuple(state)])

    with before_disk_calls(look):
        train(**keys)
    return [*states.values()]


@pytest.mark.parametrize(
    "begins, ends, keys, best", [(2, 6, dict(log_interval=1, seed=25), 4), (0, 6, AVERAGED, 6)]
)
def test_a_kill_before_a_disk_call_loses_only_the_iterations_since_the_last_save(
    begins, ends, keys, best, tiny, ran, tmp_path
):
    """
    Start from scratch, or resume a run whose newest checkpoint is damaged. Afterwards the best
    weights and the newest are there.
    """
    tiny |= dict(eval_interval=2, max_iters=6, keep_checkpoints=1)
    tiny |= dict(log_interval=3) | keys  # each line is another state of the folder
    train(**tiny | dict(out_dir=tmp_path / "straight"))
    if begins:
        train(**tiny | dict(max_iters=begins))
        (ran.out_dir / "ckpt-00000003.pt").write_bytes(b"cut")
    folders = folders_before_disk_calls(tmp_path / "killed", **tiny | dict(max_iters=ends))
    assert len(folders) > 12
    for folder in folders:
        killed = Run(folder)
        newest = max({0, *killed.saved} - {3})
        train(**tiny | dict(out_dir=folder))
        if newest < 6:
            assert killed.column("start", "iter")[-1] == newest
        assert_same_run(tmp_path / "straight", folder, 6)
        assert is_finished(open_run(folder))  # its log says so even if only that was left to say
        assert killed.best["iter_num"] == best_logged(killed) == best
        assert killed.saved[-1] == 6
        assert not [*folder.glob("*.tmp")]


def test_a_save_syncs_the_log_then_the_file_before_renaming_it_then_the_folder(tiny, ran):
    """
    Lose no checkpoint to a power cut, which erases what the system still holds in memory. A resume
    does not repeat the evaluation of which the log has the only record.
    """
    calls = []

    def sync(file):
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        calls.append("folder" if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size))

    replace = os.replace

    def rename(source, target):
        found = os.stat(source)
        if Path(target).name.startswith("ckpt-"):
            calls.append(("rename", found.st_ino, found.st_size))
        replace(source, target)

    with mock.patch("os.fsync", sync), mock.patch("os.replace", rename):
        train(**tiny)
        train(**tiny | dict(max_iters=12), init_from="resume")
    renames = [n for n, call in enumerate(calls) if call[0] == "rename"]
    assert len(renames) == 3  # the checkpoints at 4, 8 and 12
    for n in renames:
        assert calls[n - 2][0] == (ran.out_dir / "metrics.jsonl").stat().st_ino
        assert calls[n - 1] == calls[n][1:]
        assert calls[n + 1] == "folder"


# -----------------------------------------------------------------------------
# Shards that cannot be read


def cut(shard: Path) -> None:
    os.truncate(shard, 1024)


def invalid(shard: Path) -> None:
    """Replace all ids by 61. The last id of the vocabulary is 60."""
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(b"\x3d\x00" * ((size - 1024) // 2))


HARMS = [  # a split, where the run evaluates, what happens to the split's shards
    ("val", 4, invalid),
    ("val", 12, cut),  # the last evaluation
    ("train", 100, Path.unlink),
]


@pytest.mark.parametrize("split, interval, harm", HARMS)
def test_an_unreadable_shard_ends_the_run_and_a_resume_continues_from_its_last_save(
    split, interval, harm, tiny, ran, tmp_path
):
    tiny |= dict(max_iters=12, eval_interval=interval, eval_tokens=400, checkpoint_interval=3)
    train(**tiny | dict(out_dir=tmp_path / "straight"))
    data = shutil.copytree(tiny["dataset"], tmp_path / "tokens")

    def spoil():
        for shard in data.glob(f"{split}_*.bin"):
            harm(shard)

    trainer = InProcessRun()
    trainer.at["update", 2] = spoil
    result = trainer.launch(**tiny | dict(dataset=data))
    assert result.code == 1
    (line,) = lines(result.err, "error:")
    assert f"{split}_0" in line
    assert "Traceback" not in result.err
    assert not ran.records("end")
    last = ran.steps("iter")[-1] + 1
    assert last == interval if split == "val" else 1 <= last < 12
    assert [it for it in range(3, last, 3)][-2:] == ran.saved
    train(**tiny)
    assert_same_run(tmp_path / "straight", ran.out_dir, 12)


# -----------------------------------------------------------------------------
# The folder, and who else is in it


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_continues(tiny, ran):
    tiny |= dict(max_iters=10**6, eval_interval=10**6, checkpoint_interval=5)
    first = start(*watched("time.sleep(0.03)"), *flags(**tiny))
    wait_for_line(first, "iter 9:")
    for init_from in ("scratch", "resume"):
        refused(run("train.py", *flags(**tiny | dict(max_iters=3), init_from=init_from)))
    # evaluating the run there is not refused
    train(**tiny, init_from="resume", eval_only=True)
    first.terminate()
    assert finish(first).code == 143
    assert ran.steps("iter") == [*range(ran.end["iters"])]
    assert len(ran.records("start")) == 1
    assert ran.state(ran.end["iters"])


def test_a_run_locks_its_folder_before_it_reads_a_checkpoint(tiny, monkeypatch):
    train(**tiny)
    monkeypatch.setattr("run.checkpoint.try_lock", lambda file: False)
    monkeypatch.setattr("run.checkpoint.load_first", None)
    refused(run("train.py", *flags(**tiny)), "another run is writing")


def test_a_new_run_does_not_delete_a_users_files_in_its_folder(tiny, ran):
    """Each file stays, under its own name or a new one."""
    ran.out_dir.mkdir()
    for name in (
        "log.txt",
        "loss.png",
        "metrics.jsonl",
        "notes.txt",
        "notes.tmp",
        "loss.png.a.tmp",
    ):
        (ran.out_dir / name).write_text(f"a user's {name}")
    before = contents(ran.out_dir)
    train(**tiny)
    assert {*before.values()} <= {*contents(ran.out_dir).values()}


def test_a_users_file_that_is_named_like_a_checkpoint_is_refused_and_kept(tiny, ran):
    ran.out_dir.mkdir()
    (ran.out_dir / "ckpt-notes.pt").write_text("a user's")
    assert run("train.py", *flags(**tiny)).code == 1
    assert [*contents(ran.out_dir).values()] == [b"a user's"]


def test_a_run_whose_folder_is_away_ends_at_its_save_and_continues_when_it_is_back(
    tiny, ran, straight, tmp_path
):
    """Save nothing in a new folder of the same name."""
    trainer, away = InProcessRun(), tmp_path / "away"
    trainer.at["update", 6] = lambda: ran.out_dir.rename(away)
    (line,) = lines(trainer.launch(**tiny).err, "error:")
    assert str(ran.out_dir) in line and "is not saved" in line
    assert not ran.out_dir.exists()
    away.rename(ran.out_dir)
    train(**tiny)
    assert_same_run(straight, ran.out_dir, 8)


# root may look into any folder, so these lines first give up all privileges
UNPRIVILEGED = """
    import ctypes
    version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version_3, none) == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's capabilities")
@pytest.mark.parametrize("key", ["out_dir", "dataset"])
def test_a_folder_without_permission_is_refused(key, tiny, tmp_path):
    (tmp_path / "private").mkdir(mode=0)
    keys = tiny | {key: tmp_path / "private/x"}
    result = finish(start(*watched(before=UNPRIVILEGED), *flags(**keys)))
    refused(result, "private/x", "Permission denied")
    assert not tiny["out_dir"].exists()


def test_torch_load_reads_a_checkpoint_with_the_keys_that_the_docs_list(straight):
    page = (ROOT / "docs/internals/checkpoints.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## The order")[0], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == Run(straight).state().keys()


@pytest.mark.parametrize("lacks", ["os.fsync", "fcntl.lockf"])
def test_a_share_that_cannot_sync_folders_or_has_no_locks_is_used(
    lacks, tiny, ran, straight, monkeypatch
):
    """Warn if it has no locks: Lustre without its flock option, NFS without its lock daemon."""

    def refuse(file, *_):
        if lacks == "fcntl.lockf" or stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lacks, refuse)
    warned = lines(train(**tiny).err, "warning:")
    assert ["locks" in line for line in warned] == [True] * (lacks == "fcntl.lockf")
    assert_same_run(straight, ran.out_dir, 8)
