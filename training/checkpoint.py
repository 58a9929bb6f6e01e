"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder they live in.

out_dir/ckpt-00000500.pt holds the state after 500 updates. It is written under a temporary name,
flushed to the disk, and only then renamed, so a file with a checkpoint's name is complete. It is
torch's own format, a zip with a CRC-32 of every record. torch.load ignores these, so they are
checked here first.
"""

import errno
import os
import platform
import shutil
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
import torch.utils.serialization  # torch.save would import it later, when the venv may be deleted
from torch.utils._pytree import tree_leaves

from common.console import UserError, warn
from common.files import lack_of_space, patiently, remove_temporaries, replacing, try_lock

# -----------------------------------------------------------------------------
# One file


def save(state: dict, path: Path) -> int:
    """
    Write `state` to `path`, all or nothing. Returns the file's size in bytes. Raises OSError,
    leaving `path` as it was.
    """
    check_space(state, path.parent)
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's archive writer, closing after a failed write, hides the OSError behind its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return path.stat().st_size


def check_space(state: dict, folder: Path) -> None:
    """Raises OSError if the folder's disk has no room for the state's tensors."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}  # tied weights count once
    if shortage := lack_of_space(folder, sum(sizes.values())):
        raise OSError(errno.ENOSPC, shortage)


def mark_best(path: Path) -> None:
    """
    Make best.pt a link to `path`, atomically; or a copy if the file system has no links, or, on
    Windows, another program reads `path`.
    """
    best, link = path.with_name("best.pt"), path.with_name("best.pt.tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        patiently(os.replace, link, best)
    except OSError:
        with replacing(best) as file, open(path, "rb") as content:
            shutil.copyfileobj(content, file)


def read(path: Path) -> dict:
    """
    The contents of an undamaged file. Runs no code from it. Its tensors are mapped: the processes
    of a machine share their pages, which are read from the disk when they are used.
    """
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def load(path: Path) -> dict:
    """Compare the file's checksums, then `read` it. Raises UserError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path}: cut short or damaged ({error})") from None
    if record:
        raise UserError(f"{path}: bytes of its record {record} have changed")
    try:
        return read(path)
    except Exception as error:  # another program's, or one that holds code
        problem = f"not a checkpoint of tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path}: {problem}") from None


# -----------------------------------------------------------------------------
# The folder


def checkpoint_path(out_dir: str | Path, iter_num: int) -> Path:
    return Path(out_dir) / f"ckpt-{iter_num:08}.pt"


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    numbers = {path: path.stem.removeprefix("ckpt-") for path in out_dir.glob("ckpt-*.pt")}
    return sorted((p for p in numbers if numbers[p].isdecimal()), key=lambda p: int(numbers[p]))


def prune(out_dir: Path, keep: int, newest: Path | None) -> None:
    """
    Delete all checkpoints except the newest `keep`, counted from `newest` down: later ones were
    found damaged when the run was resumed. If `newest` does not exist, nothing is deleted.
    """
    paths = list_checkpoints(out_dir)
    kept = paths[: paths.index(newest) + 1][-keep:] if newest in paths else paths
    for path in paths:
        try:
            if path not in kept:
                patiently(path.unlink, True)  # True: it may be missing
        except PermissionError as error:  # Windows, while it is read; the next save tries again
            warn(f"{path}: cannot be deleted now: {error.strerror}")


def find_newest(out_dir: Path, check=lambda state, path: None) -> tuple[Path, dict] | None:
    """
    The newest valid checkpoint, and its state. Warns of damaged ones, and of those for which
    check(state, path) raises UserError. None if out_dir holds no checkpoint. Raises UserError if
    there are checkpoints and none is valid: a run never starts from scratch silently.
    """
    paths = list_checkpoints(out_dir)
    for path in reversed(paths):
        try:
            state = load(path)
            check(state, path)
            return path, state
        except UserError as error:
            warn(f"{error}; trying the one before")
    if paths:
        problem = f"none of its {len(paths)} checkpoints can be resumed, see above"
        raise UserError(f"{out_dir}: {problem}; restore one, or start in another --out_dir")
    return None


# The lock of the folder that this process writes to, held while the file is open.
lock: BinaryIO | None = None


def lock_folder(out_dir: Path) -> BinaryIO:
    """
    Make out_dir if it does not exist, and keep other runs out until this process ends or calls
    unlock_folder(). Raises OSError if it cannot be written, UserError if another run uses it.
    """
    global lock
    unlock_folder()
    out_dir.mkdir(parents=True, exist_ok=True)
    lock = open(out_dir / "lock", "a+b", buffering=0)
    if not try_lock(lock):
        hint = "stop that one first, or choose another --out_dir"
        raise UserError(f"out_dir: another run is writing to {out_dir}; {hint}")
    return lock


def unlock_folder() -> None:
    global lock
    if lock:
        lock.close()
    lock = None


def claim_folder(out_dir: Path, fresh: bool) -> str:
    """
    As `lock_folder`; from here on the folder is this run's. Deletes what a killed save left, and
    before a `fresh` run the log of one that never saved. Returns the name of this run, which it
    writes into the lock. Raises UserError if a fresh run finds another run's files.
    """
    file = lock_folder(out_dir)
    if fresh and holds_run(out_dir):  # it came and went while this one was starting
        raise UserError(in_the_way(out_dir))
    owner = f"process {os.getpid()} of {platform.node()}, since {time.time():.3f}"
    file.truncate(0)
    file.write(owner.encode())
    os.fsync(file)
    # temporary files could leave no room for the next checkpoint
    remove_temporaries(out_dir, "ckpt-*.pt", "best.pt", "metrics.jsonl", "loss.png")
    for name in ("metrics.jsonl", "log.txt", "loss.png") if fresh else ():
        (out_dir / name).unlink(missing_ok=True)
    return owner


def holds_run(out_dir: Path) -> bool:
    """Whether there is something to lose: a checkpoint, or the log of a run that saved one."""
    log = out_dir / "metrics.jsonl"
    saved = log.is_file() and b'"kind": "checkpoint"' in log.read_bytes()
    others = any((out_dir / name).exists() for name in ("best.pt", "ckpt.pt"))
    return saved or others or bool(list_checkpoints(out_dir))


def in_the_way(out_dir: Path) -> str:
    """The error line for a fresh run in a folder that holds another."""
    if (out_dir / "ckpt.pt").exists():
        return f"out_dir: {out_dir} holds nanoGPT's ckpt.pt; give this run another --out_dir"
    ways = "--init_from=auto resumes it; for a new run: another --out_dir, or delete that folder"
    return f"out_dir: {out_dir} holds an earlier run; {ways}"
