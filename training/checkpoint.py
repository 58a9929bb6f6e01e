"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder they live in.

out_dir/ckpt-00000500.pt holds the state after 500 updates. It is written under a temporary name,
read back, flushed to the disk, and only then renamed, so a file under a checkpoint's name is whole.
Its last bytes are a sha256 of all bytes before them. torch.load ignores such a trailer, so
`torch.load(path, weights_only=True)` reads the file without this program.
"""

import contextlib
import hashlib
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from common.console import RunError, UserError, say, warn
from common.files import fsync_folder, is_same_file, lack_of_space, plain_file, replacing, try_lock
from configurator import Config
from training.ranks import Ranks

TRAILER = b"\nsha256 of all bytes before this line: "
TRAILER_BYTES = len(TRAILER) + 64
CHUNK_BYTES = 1 << 24


@dataclass
class Progress:
    """How far a run is: what a checkpoint needs besides weights, optimizer and random states."""

    iter_num: int = 0  # updates made
    tokens: int = 0
    sequences: int = 0  # position in the order of the data
    best_val_loss: float = math.inf
    best_iter: int = -1
    evaluated_at: int = -1
    lr_horizon: int = 0  # the iteration at which the learning rate's decay ends

    # not part of a checkpoint: an update has begun and its iteration is not over
    updating = False

    def begin_update(self, *_) -> None:
        """Called by the optimizer before it changes the first weight."""
        self.updating = True

    def advance(self, sequences: int, tokens: int) -> None:
        """After an iteration of so many sequences and tokens."""
        self.updating = False
        self.iter_num += 1
        self.sequences += sequences
        self.tokens += tokens


# -----------------------------------------------------------------------------
# One run's checkpoints


class Checkpoints:
    """
    The checkpoints of one run in out_dir: the newest `keep_checkpoints`, and best.pt. Other runs
    are kept out of the folder as long as this object lives. With eval_only nothing is written.
    """

    def __init__(self, config: Config, ranks: Ranks, resumed: dict | None, known: list[Path]):
        """
        `resumed` is the state the run goes on from, None for a fresh run, which clears out_dir of
        an earlier one. `known` are the checkpoints that were there when the run looked for one.
        """
        self.config, self.ranks, self.out_dir = config, ranks, Path(config.out_dir)
        progress = Progress(**resumed["progress"]) if resumed else None
        # iteration of the newest checkpoint, and the last evaluation that it knows of
        self.saved = (progress.iter_num, progress.evaluated_at) if progress else None
        self.best_before = math.inf, -1
        self.val_loss: float | None = None  # of the last evaluation of this start
        if not config.eval_only:
            ranks.from_first(self.open_folder, progress, known)

    def open_folder(self, progress: Progress | None, known: list[Path]) -> None:
        # released when this file is closed
        self.lock = make_out_dir(self.out_dir, fresh=progress is None, known=known)
        self.known = list_checkpoints(self.out_dir)  # a run that has been here leaves others
        if progress and progress.best_iter == progress.iter_num:
            # the run may have been killed after saving it and before marking it
            with contextlib.suppress(OSError):
                mark_best(self.path(progress.iter_num))

    def keep_folder(self) -> bool:
        """
        Make the folder or its lock again if somebody has deleted or replaced it under the run;
        returns whether that was so. Raises RunError where another run has begun there since.
        """
        if is_same_file(self.lock, self.out_dir / "lock"):
            return False
        try:
            kept = [path for path in self.known if path.exists()]
            self.lock = make_out_dir(self.out_dir, fresh=False, known=kept)
        except UserError as error:
            raise RunError(f"{self.out_dir}/lock was deleted under this run. {error}") from None
        return True

    def path(self, iter_num: int) -> Path:
        return self.out_dir / f"ckpt-{iter_num:08}.pt"

    def note_evaluation(self, progress: Progress, val_loss: float) -> bool:
        """Whether this evaluation is the best so far, which `progress` then notes."""
        self.val_loss = val_loss
        if val_loss < progress.best_val_loss:
            self.best_before = progress.best_val_loss, progress.best_iter
            progress.best_val_loss, progress.best_iter = val_loss, progress.iter_num
        return progress.best_iter == progress.iter_num

    def is_saved(self, progress: Progress) -> bool:
        """Whether nothing has happened since the last save: no iteration, no evaluation."""
        return self.saved == (progress.iter_num, progress.evaluated_at)

    def save(self, state: dict, progress: Progress, log, last: bool) -> None:
        """
        Save `state`, that of `progress`; rank 0 writes, all ranks take part. Where saving fails,
        an older checkpoint stays and the run goes on, unless there is none or this was the `last`
        chance: then it raises RunError.
        """
        began = time.perf_counter()
        if progress.evaluated_at == progress.iter_num:
            state["val_loss"] = self.val_loss
        size = self.ranks.from_first(self.write, state, progress, log, last)
        if size:
            self.saved = progress.iter_num, progress.evaluated_at
            path = self.path(progress.iter_num)
            log.checkpoint(progress.iter_num, path, size, time.perf_counter() - began)
        elif progress.best_iter == progress.iter_num:
            # best.pt still holds the one before
            progress.best_val_loss, progress.best_iter = self.best_before

    def write(self, state: dict, progress: Progress, log, last: bool) -> int:
        """The file's size in bytes; 0 where saving failed and will be tried again."""
        it, path = progress.iter_num, self.path(progress.iter_num)
        lost = ["lock"] if self.keep_folder() else []
        if log.reopen():
            lost.append("metrics.jsonl")
        if lost:
            names = " and ".join(lost)
            log.warn(it, f"{self.out_dir}: {names} deleted or replaced under the run; made again")
        if not all(weights.isfinite().all() for weights in state["model"].values()):
            # saved, it would in time push out the good ones
            problem = f"iter {it}: some weights are not finite and are not saved"
            mend = "the checkpoint before stands: --init_from=resume with a lower rate"
            raise RunError(f"{problem}; {mend}")
        try:
            size = save(state, path)
        except OSError as error:
            older = list_checkpoints(self.out_dir)
            if not older:
                raise RunError(f"checkpoint {it}: {error}; and there is no older one") from None
            if last:
                raise RunError(f"checkpoint {it}: {error}; {older[-1]} stands") from None
            log.warn(it, f"checkpoint failed: {error}; {older[-1]} stands")
            return 0
        try:
            if progress.best_iter == it:
                mark_best(path)
            prune(self.out_dir, self.config.keep_checkpoints, path)
        except OSError as error:  # the checkpoint itself is safe
            log.warn(it, f"{path} is saved, but deleting old ones failed: {error}")
        self.known = list_checkpoints(self.out_dir)
        return size


# -----------------------------------------------------------------------------
# One file


class HashingWriter:
    """A file for torch.save that hashes what passes through it."""

    def __init__(self, file):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(state: dict, path: Path) -> int:
    """
    Write `state` to `path`, all or nothing. Returns the file's size in bytes. Raises OSError,
    leaving `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it under the run
    check_space(state, path.parent)
    with replacing(path) as file:
        writer = HashingWriter(file)
        try:
            torch.save(state, writer)
        except RuntimeError as error:
            # torch's archive writer, closing after a failed write, hides the OSError behind its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.write(TRAILER + writer.sha256.hexdigest().encode())
        file.flush()
        if damage := find_damage(Path(file.name)):
            raise OSError(f"{file.name} reads back wrong: {damage}")
    fsync_folder(path.parent)  # the rename itself must reach the disk
    return path.stat().st_size


def check_space(state: dict, folder: Path) -> None:
    """Raises OSError where the folder's disk has no room for the state."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}  # tied weights count once
    if lacks := lack_of_space(folder, sum(sizes.values()) + (1 << 20)):
        raise OSError(lacks)


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint file, in a few words; empty if its checksum holds."""
    try:
        left = path.stat().st_size - TRAILER_BYTES
        sha256 = hashlib.sha256()
        with open(path, "rb") as file:
            while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
                sha256.update(chunk)
                left -= len(chunk)
            trailer = file.read()
    except OSError as error:
        return error.strerror or str(error)
    if not trailer.startswith(TRAILER):
        return "cut short, or not written by this program"
    if trailer[len(TRAILER) :] != sha256.hexdigest().encode():
        return "its checksum does not match: bytes have changed"
    return ""


def read_trailer(path: Path) -> bytes:
    """The checksum that a checkpoint file ends with; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(-TRAILER_BYTES, os.SEEK_END)
            return file.read()
    except OSError:
        return b""


def read(path: Path) -> dict:
    """
    What an undamaged file holds. Its tensors are the file's pages in the system's cache: the
    processes of a machine share them, and they are read from the disk when they are used.
    """
    options = dict(map_location="cpu", weights_only=True)
    with contextlib.suppress(RuntimeError):  # not every file system can
        return torch.load(path, mmap=True, **options)
    return torch.load(path, **options)


def load(path: Path) -> dict:
    """
    A checkpoint's state, mapped into CPU memory. Runs no code from the file. Raises UserError where
    the file is damaged.
    """
    damage = find_damage(path)
    if not damage:
        try:
            return read(path)
        except pickle.UnpicklingError:
            damage = "refused: it holds more than tensors and plain values"
        except Exception as error:  # whatever torch makes of bytes that are no archive
            damage = f"not a checkpoint ({type(error).__name__})"
    raise UserError(f"{path}: {damage}")


# -----------------------------------------------------------------------------
# The folder


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    found = out_dir.glob("ckpt-" + "[0-9]" * 8 + "*.pt")  # from iteration 100,000,000 on, 9 digits
    numbered = [(path.stem.removeprefix("ckpt-"), path) for path in found if path.is_file()]
    return [path for _, path in sorted((int(n), path) for n, path in numbered if n.isdecimal())]


def find_newest(out_dir: Path, check=lambda state, path: None) -> tuple[Path | None, dict | None]:
    """
    The newest valid checkpoint and its state; damaged ones, and those for which check(state, path)
    raises UserError, are named on the way. None where out_dir holds no checkpoint. Raises UserError
    where there are checkpoints and none is valid: never a silent new start.
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
        problem = f"none of its {len(paths)} checkpoints is valid"
        raise UserError(f"{out_dir}: {problem}; restore one, or start in another --out_dir")
    return None, None


def load_newest(out_dir: Path) -> dict | None:
    """The newest valid checkpoint's state, as find_newest() finds it."""
    return find_newest(out_dir)[1]


def load_together(out_dir: Path, check: Callable, ranks: Ranks) -> dict | None:
    """
    The newest valid checkpoint's state on every rank, found and checked by rank 0 as above. The
    others map the same file where they see it, checked once on each machine. Where they do not, as
    with a disk of their own, rank 0 sends what it has read.
    """
    newest = ranks.from_first(describe_newest, out_dir, check)
    if not newest:
        return None
    path, trailer, tokenizer = newest
    has_file = ranks.first or read_trailer(path) == trailer
    if has_file and ranks.local_rank == 0 and not ranks.first:
        has_file = not find_damage(path)
    # what the first rank of this machine found
    is_whole = ranks.gather(has_file)[max(ranks.rank - ranks.local_rank, 0)]
    state = ranks.fill_in(read(path) if has_file and is_whole else None)
    state["tokenizer"] = tokenizer
    return state


def describe_newest(out_dir: Path, check: Callable) -> tuple[Path, bytes, dict] | None:
    """The newest valid checkpoint's path, checksum and tokenizer, which `check` may have mended."""
    path, state = find_newest(out_dir, check)
    if path is None:
        return None
    return path, read_trailer(path), state["tokenizer"]


def prune(out_dir: Path, keep: int, newest: Path | None = None) -> None:
    """
    Delete all but the newest `keep` checkpoints, counted from `newest` down (those above it were
    found damaged when the run was resumed), and what killed saves left behind.
    """
    paths = list_checkpoints(out_dir)
    good = paths[: paths.index(newest) + 1] if newest in paths else paths
    kept = good[-keep:] if keep else []
    unwanted = [path for path in paths if path not in kept]
    for path in [*unwanted, *out_dir.glob("ckpt-*.tmp"), out_dir / "best.pt.tmp"]:
        path.unlink(missing_ok=True)


def mark_best(path: Path) -> None:
    """
    Make best.pt the same file as `path`, atomically. A copy where the file system has no links.
    """
    best, temporary = path.with_name("best.pt"), path.with_name("best.pt.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, best)


def make_out_dir(out_dir: Path, fresh: bool, known: list[Path]) -> BinaryIO:
    """
    Create out_dir, keep other runs out of it as long as the returned file is open, and for a fresh
    run clear it of an earlier one's files. Raises UserError where it cannot be written, another run
    is there, or one was there until now and left other checkpoints than the `known` ones.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # not emptied: it may be a link to something else
        lock = open(plain_file(out_dir / "lock"), "ab")
        if not try_lock(lock):
            mend = "stop that one first, or choose another --out_dir"
            raise UserError(f"out_dir: another run is writing to {out_dir}; {mend}")
        if list_checkpoints(out_dir) != known:
            problem = f"another run was writing to {out_dir} until now"
            raise UserError(f"out_dir: {problem}; the same command goes on from there")
        if not os.access(out_dir, os.W_OK):
            raise UserError(f"out_dir: {out_dir}: read-only; choose another --out_dir")
        if fresh and known:
            say(f"overwrite: deleting the run in {out_dir}, up to {known[-1].name}")
        if fresh:
            prune(out_dir, keep=0)
            for name in ("best.pt", "metrics.jsonl", "log.txt", "loss.png"):
                (out_dir / name).unlink(missing_ok=True)
        fsync_folder(out_dir)
        return lock
    except OSError as error:
        where = error.filename or out_dir
        raise UserError(f"out_dir: {where}: {error.strerror}; choose another --out_dir") from None


def holds_run(out_dir: Path) -> bool:
    """Whether there is something to lose: a checkpoint, or the log of a run that saved one."""
    log = out_dir / "metrics.jsonl"
    saved = log.is_file() and b'"kind": "checkpoint"' in log.read_bytes()
    return saved or (out_dir / "best.pt").exists() or bool(list_checkpoints(out_dir))
