"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder they live in.

out_dir/ckpt-00000500.pt holds the state after 500 updates. It is written under a temporary name,
flushed to the disk, and only then renamed, so a file under a checkpoint's name is whole. It is
torch's own file, a zip that holds a CRC-32 of every record. torch.load does not look at them, so
they are checked here first.
"""

import errno
import math
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
import torch.utils.serialization  # or torch.save would, perhaps from a venv that has gone
from torch.utils._pytree import tree_leaves

from common.console import RunError, UserError, warn
from common.files import fsync_folder, lack_of_space, remove_temporaries, replacing, try_lock
from configurator import Config
from training.progress import Progress
from training.ranks import Ranks, Signals

FULL = (errno.ENOSPC, errno.EDQUOT)  # no space left, or none of this user's
RETRY_SECONDS = 60  # between two tries of the last save; other ranks wait for each

# -----------------------------------------------------------------------------
# One run's checkpoints


class Checkpoints:
    """
    The checkpoints of one run in out_dir: the newest `keep_checkpoints`, and best.pt. Other runs
    are kept out of the folder as long as this object lives. With eval_only nothing is written.
    """

    def __init__(self, config: Config, ranks: Ranks, check: Callable[[dict, Path], None]):
        """
        `check` raises UserError for a state that cannot be resumed, and is asked of the first one
        saved. Raises UserError where another run is in the folder. A folder that no run has had yet
        is made or taken by `claim_folder`: a mistake in the configuration leaves no trace.
        """
        self.check, self.checked = check, False
        self.failed = False  # the last save has; another one would only fail again
        self.config, self.ranks, self.out_dir = config, ranks, Path(config.out_dir)
        self.lock = None
        # iteration of the newest checkpoint, and the last evaluation that it knows of
        self.saved: tuple[int, int] | None = None
        self.best_before = math.inf, math.inf, -1
        if not config.eval_only:
            ranks.from_main(self.lock_existing)

    def lock_existing(self) -> None:
        if (self.out_dir / "lock").exists():
            self.lock = lock_folder(self.out_dir)

    def claim_folder(self, resumed: Progress | None) -> None:
        """
        From here on the folder is this run's. `resumed` is how far it was; None for a fresh run,
        which clears away what one has left that never saved. Raises UserError.
        """
        if resumed:
            self.saved = resumed.iter_num, resumed.evaluated_at
        if not self.config.eval_only:
            self.ranks.from_main(self.open_folder, resumed is None)

    def open_folder(self, fresh: bool) -> None:
        if self.lock is None:
            self.lock = lock_folder(self.out_dir)
        # after a kill while saving, they may fill the place of the next checkpoint
        remove_temporaries(self.out_dir, "ckpt-*.pt", "best.pt", "metrics.jsonl", "loss.png")
        if fresh:
            for name in ("metrics.jsonl", "log.txt", "loss.png"):
                (self.out_dir / name).unlink(missing_ok=True)

    def path(self, iter_num: int) -> Path:
        return self.out_dir / f"ckpt-{iter_num:08}.pt"

    def note_evaluation(self, progress: Progress, train_loss: float, val_loss: float) -> bool:
        """Note the evaluation in `progress`. Returns whether it is the best so far."""
        progress.evaluated_at = progress.iter_num
        progress.train_loss, progress.val_loss = train_loss, val_loss
        if val_loss < progress.best_val_loss:
            self.best_before = progress.best_val_loss, progress.best_train_loss, progress.best_iter
            progress.best_val_loss, progress.best_iter = val_loss, progress.iter_num
            progress.best_train_loss = train_loss
        return progress.best_iter == progress.iter_num

    def newest(self) -> str:
        """Where a run that ends without another save can be resumed from, for messages."""
        if not self.saved:
            return "the run begins anew: it has no checkpoint"
        return f"--init_from=resume continues from {self.path(self.saved[0])}"

    def is_saved(self, progress: Progress) -> bool:
        """Whether nothing has happened since the last save: no iteration, no evaluation."""
        return self.saved == (progress.iter_num, progress.evaluated_at)

    def save(self, state: dict, progress: Progress, log, last: bool, signals: Signals) -> None:
        """
        Save `state`, that of `progress`; rank 0 writes, all ranks take part. Where saving fails,
        the run continues without. The `last` save is tried again each minute, until a signal comes.
        Then it raises RunError.
        """
        began = time.perf_counter()
        if progress.evaluated_at == progress.iter_num:
            state["val_loss"] = progress.val_loss
        self.failed = True  # unless write() returns
        while True:
            final = last and signals.wait(0)
            size = self.ranks.from_main(self.write, state, progress, log, last, final)
            if size or not last:
                break
            signals.wait(RETRY_SECONDS)  # all ranks together: none waits longer for another
        self.failed = False
        if size:
            self.saved = progress.iter_num, progress.evaluated_at
            path = self.path(progress.iter_num)
            log.checkpoint(progress.iter_num, path, size, time.perf_counter() - began)
        elif progress.best_iter == progress.iter_num:
            # best.pt still holds the one before
            progress.best_val_loss, progress.best_train_loss, progress.best_iter = self.best_before

    def write(self, state: dict, progress: Progress, log, last: bool, final: bool) -> int:
        """The file's size in bytes; 0 where saving failed and will be tried again."""
        it, path = progress.iter_num, self.path(progress.iter_num)
        if not all(weights.isfinite().all() for weights in state["model"].values()):
            # saved, it would in time push out the good ones
            problem = f"iter {it}: some weights are not finite and are not saved"
            raise RunError(f"{problem}; with a lower learning_rate, {self.newest()}")
        if not (self.out_dir / "lock").exists():
            log.warn(it, f"{self.out_dir} has gone, with the log in it; making it anew")
        try:
            size = self.save_somehow(state, path, log)
        except OSError as error:
            problem = f"checkpoint {it} is not saved: {error.strerror or error}"
            if final:
                raise RunError(f"{problem}; once that is mended, {self.newest()}") from None
            again = "at the next save"
            if last:
                again = f"each minute, with the card in use. Ctrl-C frees it: {self.newest()}"
            log.warn(it, f"{problem}; trying again {again}")
            return 0
        if not self.checked:
            self.check(load(path), path)
            self.checked = True
        try:
            # older ones go before best.pt is made, which is a copy on a disk without links
            best = self.find_unmarked_best(progress.best_iter)
            prune(self.out_dir, self.config.keep_checkpoints, path, best)
            if best:
                mark_best(best)
        except OSError as error:
            log.warn(it, f"{path} is saved, but best.pt and older files are unchanged: {error}")
        return size

    def save_somehow(self, state: dict, path: Path, log) -> int:
        """As save(). On a full disk, deletes what is needed least, one file after the other."""
        while True:
            try:
                return save(state, path)
            except OSError as error:
                if error.errno not in FULL or not (old := self.find_least_needed()):
                    raise
                # said before: its line in the log could take the room that comes free
                log.warn(state["progress"]["iter_num"], f"{error.strerror}; deleting {old}")
                old.unlink()

    def find_least_needed(self) -> Path | None:
        """
        The oldest checkpoint but the newest valid one; after them best.pt, if that can be made
        again. None where there is neither, or deleting it would free nothing.
        """
        newest = self.saved and self.path(self.saved[0])
        if not newest or find_damage(newest):
            return None
        best_iter = read(newest)["progress"]["best_iter"]
        unmarked, best = self.find_unmarked_best(best_iter), self.out_dir / "best.pt"
        found = [path for path in list_checkpoints(self.out_dir) if path not in (newest, unmarked)]
        if best.exists() and (unmarked or self.path(best_iter) == newest):
            found.append(best)
        return next((path for path in found if path.stat().st_nlink == 1), None)

    def find_unmarked_best(self, best_iter: int) -> Path | None:
        """The checkpoint that best.pt should be and is not yet, if only since a kill in between."""
        path, best = self.path(best_iter), self.out_dir / "best.pt"
        return path if checksums(path) not in ([], checksums(best)) else None


# -----------------------------------------------------------------------------
# One file


def save(state: dict, path: Path) -> int:
    """
    Write `state` to `path`, all or nothing. Returns the file's size in bytes. Raises OSError,
    leaving `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it under the run
    check_space(state, path.parent)
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's archive writer, closing after a failed write, hides the OSError behind its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    fsync_folder(path.parent)  # the rename itself must reach the disk
    return path.stat().st_size


def check_space(state: dict, folder: Path) -> None:
    """Raises OSError where the folder's disk has no room for the state's tensors."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}  # tied weights count once
    if lacks := lack_of_space(folder, sum(sizes.values())):
        raise OSError(errno.ENOSPC, lacks)


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint file, in a few words; empty if all its checksums hold."""
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
    except Exception as error:  # a damaged file can raise anything
        return f"cut short or damaged ({error})"
    return f"bytes of its record {record} have changed" if record else ""


def checksums(path: Path) -> list[int]:
    """Those of a checkpoint's records, which tell one file from another; none if unreadable."""
    try:
        with zipfile.ZipFile(path) as file:
            return [record.CRC for record in file.infolist()]
    except (OSError, zipfile.BadZipFile):
        return []


def read(path: Path) -> dict:
    """
    What an undamaged file holds. Its tensors are the file's pages in the system's cache: the
    processes of a machine share them, and they are read from the disk when they are used.
    """
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def load(path: Path) -> dict:
    """
    A checkpoint's state, mapped into CPU memory. Runs no code from the file. Raises UserError where
    the file is damaged.
    """
    damage = find_damage(path)
    if not damage:
        try:
            return read(path)
        except Exception as error:  # another program's, or one that holds code
            damage = f"not a checkpoint of tensors and plain values ({type(error).__name__})"
    raise UserError(f"{path}: {damage}")


# -----------------------------------------------------------------------------
# The folder


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    numbers = {path: path.stem.removeprefix("ckpt-") for path in out_dir.glob("ckpt-*.pt")}
    return sorted((p for p in numbers if numbers[p].isdecimal()), key=lambda p: int(numbers[p]))


def find_newest(out_dir: Path, check=lambda state, path: None) -> Path | None:
    """
    The newest valid checkpoint; damaged ones, and those for which check(state, path) raises
    UserError, are named on the way. None where out_dir holds no checkpoint. Raises UserError where
    there are checkpoints and none is valid: never a silent new start.
    """
    paths = list_checkpoints(out_dir)
    for path in reversed(paths):
        try:
            check(load(path), path)
            return path
        except UserError as error:
            warn(f"{error}; trying the one before")
    if paths:
        problem = f"none of its {len(paths)} checkpoints is valid"
        raise UserError(f"{out_dir}: {problem}; restore one, or start in another --out_dir")
    return None


def load_newest(out_dir: Path) -> dict | None:
    """The newest valid checkpoint's state, as find_newest() finds it."""
    path = find_newest(out_dir)
    return path and read(path)


def load_together(out_dir: Path, check: Callable, ranks: Ranks) -> dict | None:
    """
    The newest valid checkpoint's state on every rank, found and checked by rank 0 as above. The
    others map the same file. Where one does not see it, as with a disk of its own, rank 0 sends all
    of them what it has read.
    """
    path = ranks.from_main(find_newest, out_dir, check)
    if path is None:
        return None
    sees_it = checksums(path) == ranks.from_main(checksums, path)
    if all(ranks.gather(sees_it)):
        return read(path)
    return ranks.from_main(read, path)


def prune(out_dir: Path, keep: int, newest: Path, best: Path | None = None) -> None:
    """
    Delete all checkpoints but `best` and the newest `keep`, counted from `newest` down: those above
    it were found damaged when the run was resumed.
    """
    paths = list_checkpoints(out_dir)
    kept = paths[: paths.index(newest) + 1][-keep:]
    for path in paths:
        if path not in kept and path != best:
            path.unlink(missing_ok=True)


def mark_best(path: Path) -> None:
    """
    Make best.pt the same file as `path`, atomically. A copy where the file system has no links.
    """
    best, link = path.with_name("best.pt"), path.with_name("best.pt.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
        os.replace(link, best)
    except OSError:
        with replacing(best) as file, open(path, "rb") as content:
            shutil.copyfileobj(content, file)


def lock_folder(out_dir: Path) -> BinaryIO:
    """
    Make out_dir if need be, and keep other runs out of it as long as the returned file is open.
    Raises OSError where it cannot be written, UserError where another run is there.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    lock = open(out_dir / "lock", "ab")
    if not try_lock(lock):
        mend = "stop that one first, or choose another --out_dir"
        raise UserError(f"out_dir: another run is writing to {out_dir}; {mend}")
    return lock


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
