"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder of a run.

out_dir/ckpt-00000500.pt holds the state after 500 updates; train.py says what that is. It is
written under a temporary name, flushed to the disk, and only then renamed, so a file with a
checkpoint's name is complete. It is torch's own format, a zip with a CRC-32 of every record.
torch.load ignores these, so they are checked here first.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
import torch.utils.serialization  # torch.save imports it lazily; a job's venv may be gone by then
from torch.utils._pytree import tree_leaves

from common.console import RunError, UserError, warn
from common.files import (
    fsync_folder,
    lack_of_space,
    patiently,
    read_record,
    remove_temporaries,
    replacing,
    try_lock,
)

# -----------------------------------------------------------------------------
# One file


FORMAT = 1  # raise it when a checkpoint of the version before cannot be resumed any more


class OtherFormat(UserError):
    """A checkpoint of a format that this version does not read."""


def save(state: dict, path: Path) -> None:
    """Write `state` to `path`, all or nothing. Raises OSError, leaving `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}  # tied weights count once
    if shortage := lack_of_space(path.parent, sum(sizes.values())):
        raise OSError(errno.ENOSPC, shortage)
    with replacing(path) as file:
        try:
            torch.save(dict(format=FORMAT) | state, file)
        except RuntimeError as error:
            # torch's archive writer, closing after a failed write, hides the OSError behind its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path) -> dict:
    """
    The state in a file, its checksums compared. Runs no code from it. Its tensors are mapped: the
    processes of a machine share their pages, which are read when they are used. Raises UserError if
    it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path}: cut short or damaged ({error})") from None
    if record:
        raise UserError(f"{path}: bytes of its record {record} have changed")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # another program's, or one that holds code
        problem = f"not a checkpoint of tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path}: {problem}") from None
    if "progress" in state and state.get("format") != FORMAT:  # a run's, not only weights
        theirs = state.get("format")
        hint = f"this version reads format {FORMAT}, so use the version that wrote it"
        raise OtherFormat(f"{path}: its format is {theirs}; {hint}")
    return state


# -----------------------------------------------------------------------------
# The folder


def checkpoint_path(out_dir: str | Path, iter_num: int) -> Path:
    return Path(out_dir) / f"ckpt-{iter_num:08}.pt"


def iteration(path: Path) -> int:
    """Return 500 for ckpt-00000500.pt, and -1 for any other name."""
    number = path.stem.removeprefix("ckpt-")
    return int(number) if number.isdecimal() else -1


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    return sorted((p for p in out_dir.glob("ckpt-*.pt") if iteration(p) >= 0), key=iteration)


def is_whole(path: Path) -> bool:
    try:
        load(path)
    except UserError:
        return False
    return True


def find_newest(out_dir: Path) -> Path | None:
    """
    The newest valid checkpoint, with a warning for each damaged one. None if out_dir holds no
    checkpoint. Raises UserError if there are checkpoints and none is valid: a run never starts from
    scratch silently.
    """
    paths = list_checkpoints(out_dir)
    for path in reversed(paths):
        try:
            load(path)
            return path
        except OtherFormat:
            raise  # resuming from an earlier one would lose iterations
        except UserError as error:
            warn(f"{error}; trying the one before")
    if paths:
        problem = f"none of its {len(paths)} checkpoints can be resumed, see above"
        hint = "restore one, or start in another --out_dir"
        if len(paths) == 1:
            hint += "; with --keep_checkpoints=2 a run has an earlier one to fall back on"
        raise UserError(f"{out_dir}: {problem}; {hint}")
    return None


def resume_hint(out_dir: str | Path) -> str:
    """For messages: from where a run that ends now can be resumed."""
    paths = list_checkpoints(Path(out_dir))
    if not paths:
        return "there is no checkpoint to resume from"
    return f"--init_from=resume continues from {paths[-1]}"


def set_aside(path: Path) -> None:
    """Rename a file, if there is one, to NAME.1, or to NAME.2, ... if that exists too."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    if path.exists():
        patiently(path.rename, next(name for name in names if not name.exists()))


def prune(out_dir: Path, keep: int) -> None:
    for path in list_checkpoints(out_dir)[:-keep]:
        try:
            patiently(path.unlink, True)  # True: it may be missing
        except PermissionError as error:  # Windows, while it is read; the next save tries again
            warn(f"{path}: cannot be deleted now: {error.strerror}")


def link(path: Path, name: Path) -> None:
    """
    Give a file a second name, atomically; or make a copy, if the file system has no links or, on
    Windows, another program has it open. Raises OSError.
    """
    temporary = name.with_name(f"{name.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(path, temporary)
        patiently(os.replace, temporary, name)
        fsync_folder(name.parent)
    except OSError:
        with replacing(name) as file, open(path, "rb") as content:
            shutil.copyfileobj(content, file)


# -----------------------------------------------------------------------------
# The folder of a run that trains


class Saver:
    """
    What a run needs on the disk, which rank 0 writes for all: the lock of out_dir, the checkpoints,
    best.pt and the records of metrics.jsonl. Records that a full disk refuses are kept in memory
    and in the checkpoints, until there is room.
    """

    def __init__(self, out_dir: Path, keep: int):
        self.out_dir = out_dir
        self.keep = keep  # so many of the newest checkpoints
        self.lock: BinaryIO | None = None
        self.metrics: BinaryIO | None = None
        self.unwritten = b""  # records that the disk has refused
        self.has_saved = False  # in this launch

    def open(self, resumed: dict | None) -> None:
        """
        Take the folder, and open metrics.jsonl. On a resume, the records that the run will write
        again are removed, so that the file reads as one run. Raises UserError and OSError.
        """
        self.lock = claim_folder(self.out_dir, resumed["progress"] if resumed else None)
        path = self.out_dir / "metrics.jsonl"
        if resumed:
            drop_records(path, resumed["progress"])
            self.unwritten = missing_lines(path, resumed["unwritten"])
        self.metrics = open(path, "ab", buffering=0)

    def save(self, state: dict, is_best: bool) -> str:
        """
        Save `state` as the newest checkpoint, and as best.pt if it is the best. Returns "", or if
        the disk is full or fails, why it is not saved. The first one is read back; raises RunError
        if that fails.
        """
        it = state["progress"]["iter_num"]
        if not self.out_dir.exists():
            warn(f"iter {it}: {self.out_dir} was deleted, with the log in it; making it again")
        path = checkpoint_path(self.out_dir, it)
        state = state | dict(unwritten=self.unwritten.decode())
        try:
            save_newest(state, path, self.keep, is_best, check=not self.has_saved)
        except OSError as error:
            return f"checkpoint {it} is not saved: {error.strerror or error}"
        except UserError as error:  # the first one, read back
            raise RunError(f"{error}; this disk does not keep what is written to it") from None
        self.has_saved = True
        return ""

    def write_record(self, record: dict) -> None:
        """Write a line of metrics.jsonl, after those that the disk has refused before."""
        if not self.metrics:  # with eval_only, and on other ranks
            return
        lines = self.unwritten + json.dumps(record).encode() + b"\n"
        end = self.metrics.seek(0, os.SEEK_END)
        try:
            left = lines
            while left:
                left = left[self.metrics.write(left) :]
            self.unwritten = b""
        except OSError as error:  # a full disk: the run matters more than its records
            with contextlib.suppress(OSError):
                self.metrics.truncate(end)  # or half a line would stay
            if not self.unwritten:
                rest = "keeping its records in memory until there is room"
                warn(f"metrics.jsonl: {error.strerror}; {rest}")
            self.unwritten = lines

    def close(self) -> None:
        """Let other runs use the folder."""
        for file in (self.metrics, self.lock):
            if file:
                file.close()


def save_newest(state: dict, path: Path, keep: int, is_best: bool, check: bool) -> None:
    """
    Save `state` as the newest checkpoint, and keep that many; the best one so far becomes best.pt
    too. Older ones are deleted before the write, to make room; the newest only after it. `check`:
    read the file back. Raises OSError if the disk is full or fails.
    """
    prune(path.parent, max(1, keep - 1))
    save(state, path)
    if check:
        load(path)
    prune(path.parent, keep)
    if is_best:
        link(path, path.with_name("best.pt"))


def claim_folder(out_dir: Path, progress: dict | None) -> BinaryIO:
    """
    Make out_dir if it does not exist, keep other runs out while the returned file is open (the
    system closes it when this process ends), and mend what a kill has left. `progress`: that of the
    resumed checkpoint, None for a new run. Raises OSError if the folder cannot be written,
    UserError if another run uses it, or has written to it since this one looked.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    lock = open(out_dir / "lock", "ab")
    if not try_lock(lock):
        hint = "stop that one first, or choose another --out_dir"
        raise UserError(f"out_dir: another run is writing to {out_dir}; {hint}")
    it = progress["iter_num"] if progress else -1
    newer = [path for path in list_checkpoints(out_dir) if iteration(path) > it]
    if any(is_whole(path) for path in newer):
        hint = "give the command again, or another --out_dir"
        raise UserError(f"out_dir: another run has just written to {out_dir}; {hint}")
    for path in newer:
        set_aside(path)  # damaged; prune() would keep it
    # temporary files could leave no room for the next checkpoint
    remove_temporaries(out_dir, "ckpt-*.pt", "best.pt", "metrics.jsonl", "loss.png")
    if progress is None:
        for name in ("metrics.jsonl", "log.txt", "loss.png"):
            set_aside(out_dir / name)  # of a run that never saved, or yours
        return lock
    path = checkpoint_path(out_dir, it)
    best = path.with_name("best.pt")
    if progress["best_iter"] == it:
        # a kill may have come between the two steps of save_newest()
        if not best.exists() or best.stat().st_mtime < path.stat().st_mtime:
            link(path, best)
    return lock


def drop_records(path: Path, progress: dict) -> None:
    """
    Rewrite metrics.jsonl without the records that a resumed run will write again, and without lines
    that are not records, such as half a line left by a kill.
    """
    # ckpt-N is saved before iteration N, and after the evaluation at N unless a signal came first
    it, evaluated_at = progress["iter_num"], progress["evaluated_at"]
    last = {"step": it - 1, "event": it - 1, "checkpoint": it, "start": it}
    last |= {"eval": evaluated_at, "sample": evaluated_at}  # and no end
    if not path.exists():
        return
    try:
        with replacing(path) as file, open(path, "rb") as lines:
            for line in lines:
                record = read_record(line)
                at, kind = record.get("iter"), record.get("kind", "")
                if isinstance(at, int) and at <= last.get(kind, -1):
                    file.write(line.rstrip() + b"\n")
    except OSError as error:  # a full disk
        warn(f"{path}: {error.strerror}; repeated records remain")


def missing_lines(path: Path, lines: str) -> bytes:
    """The lines that are not in the file, which need not exist."""
    there = set(path.read_bytes().splitlines()) if path.exists() else set()
    missing = [line for line in lines.encode().splitlines() if line not in there]
    return b"".join(line + b"\n" for line in missing)
