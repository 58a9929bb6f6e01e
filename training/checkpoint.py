"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder they live in.

out_dir/ckpt-00000500.pt holds the state after 500 updates; train.py says what that is. It is
written under a temporary name, flushed to the disk, and only then renamed, so a file with a
checkpoint's name is complete. It is torch's own format, a zip with a CRC-32 of every record.
torch.load ignores these, so they are checked here first.
"""

import errno
import itertools
import os
import shutil
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
import torch.utils.serialization  # torch.save imports it lazily; a job's venv may be gone by then
from torch.utils._pytree import tree_leaves

from common.console import UserError, warn
from common.files import (
    fsync_folder,
    lack_of_space,
    patiently,
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
    """Of ckpt-00000500.pt: 500; -1 for another name."""
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
        raise UserError(f"{out_dir}: {problem}; restore one, or start in another --out_dir")
    return None


def resume_hint(out_dir: str | Path) -> str:
    """For messages: from where a run that ends now can be resumed."""
    paths = list_checkpoints(Path(out_dir))
    if not paths:
        return "there is no checkpoint to resume from"
    return f"--init_from=resume goes on from {paths[-1]}"


def claim_folder(out_dir: Path, progress: dict | None) -> BinaryIO:
    """
    Make out_dir if it does not exist; keep other runs out while the returned file is open, which
    the system closes when this process ends; and mend what a kill has left. `progress`: of the
    checkpoint that the run goes on from; None for a new run. Raises OSError if the folder cannot be
    written, UserError if another run uses it, or has written to it since this one looked.
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


def set_aside(path: Path) -> None:
    """Rename a file, if there is one, to NAME.1, or to NAME.2, ... if that exists too."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    if path.exists():
        patiently(path.rename, next(name for name in names if not name.exists()))


def save_newest(state: dict, out_dir: Path, keep: int, check: bool) -> Path:
    """
    Save `state` as the newest checkpoint, and keep that many; the best one so far becomes best.pt
    too. Older ones are deleted before the write, to make room; the newest only after it. `check`:
    read the file back. Raises OSError if the disk is full or fails.
    """
    path = checkpoint_path(out_dir, state["progress"]["iter_num"])
    prune(out_dir, max(1, keep - 1))
    save(state, path)
    if check:
        load(path)
    prune(out_dir, keep)
    if state["progress"]["best_iter"] == state["progress"]["iter_num"]:
        link(path, path.with_name("best.pt"))
    return path


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
