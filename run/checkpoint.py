"""
Saves and loads checkpoints that survive kills, full disks and flipped bits; manages out_dir.

out_dir/ckpt-00000500.pt holds the State after 500 iterations, which train.py collects. A checkpoint
is written under a temporary name, flushed to disk and then renamed, so any file with a checkpoint's
name is complete. The file is in torch's own format, a zip archive with a CRC-32 for every record.
torch.load does not verify these checksums, so load() does.
"""

import contextlib
import errno
import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.utils.serialization  # torch.save() would import it hours later, from a lost disk
from torch import Tensor

from common.console import UserError, keep_transcript, one_line, warn
from common.files import names_in, read_record, remove_temporaries, replacing, try_lock
from configurator import LaunchKeys, TrainingKeys, find_keys
from model_fast import FastConfig

# -----------------------------------------------------------------------------
# What a checkpoint holds


@dataclass
class State:
    """
    Holds what a run begins with, and what a checkpoint stores. A new run's State has the weights of
    init_from, or nothing. Only that of a run to resume has an optimizer. What is not in here,
    such as the order of the data and dropout's random numbers, follows from the run's keys and the
    number of the iteration.
    """

    source: str = ""  # the file, or the name on the hub; not stored
    # The weights under model.py's names, the sizes of their model, and their tokens
    model: dict[str, Tensor] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)
    vocab: int = 0  # the vocabulary size before padding
    tokenizer: dict[str, Any] = field(default_factory=dict)
    iter_num: int = 0  # iterations done, including those whose update was skipped
    val_loss: float | None = None  # the weights' validation loss, None: not evaluated
    complete: bool = False  # whether the run was over, so that these weights are final
    # The run that trained them. `config` has all keys as resolved, before the device adapts them,
    # but dtype as it ran
    config: dict[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    ledger: dict[str, float] = field(default_factory=dict)  # the clock's seconds
    # What else its next update needs: state_dicts
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        return bool(self.optimizer)

    def load_weights(self, model) -> None:
        """Copy the weights to a model. Raises UserError if they do not fit or are not finite."""
        try:
            model.load_state_dict(self.model)
        except RuntimeError as error:  # a line for each kind of misfit, from the second on
            first = str(error).splitlines()[1].strip("\t .")
            hint = "use the config and the model.py that it was trained with"
            raise UserError(f"{self.source}: {first:.200}; {hint}") from None
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                raise UserError(f"{self.source}: {name} is not finite; give an older checkpoint")


# -----------------------------------------------------------------------------
# One file


FORMAT = 7  # raise this when older checkpoints cannot be resumed any more; they are then refused


def write(state: State, path: Path) -> None:
    """Write `state` to `path` atomically. On OSError, `path` is left as it was."""
    # Without what a run may change, so that a program without a key for training reads the weights
    may_change = find_keys(TrainingKeys) | find_keys(LaunchKeys)
    sizes = {name: x for name, x in state.model_config.items() if name not in may_change}
    parts = vars(state) | dict(format=FORMAT, model_config=sizes)
    del parts["source"]
    with replacing(path) as file:
        try:
            torch.save(parts, file)
        except RuntimeError as error:
            # after a failed write, torch's archive writer hides the OSError behind its own error
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path, whole: bool = True) -> dict:
    """
    Return what a file holds, after reading the `whole` of it for damage. No code from the file is
    executed. Tensors are memory-mapped, so they are read on first use, and processes on one machine
    share their pages. Raises UserError if the file is damaged or cannot be read.
    """
    # torch maps a file by its name in UTF-8, so one whose name is not UTF-8 is read at once
    maps = os.fsencode(path) == str(path).encode(errors="replace")
    try:
        with open(path, "rb") as file:
            if whole and zipfile.ZipFile(file).testzip():
                raise zipfile.BadZipFile
            file.seek(0)
            source = path if maps else file
            return dict(torch.load(source, map_location="cpu", weights_only=True, mmap=maps))
    except Exception as error:  # a damaged file can raise anything
        problem = (
            f"damaged, or not a checkpoint of tensors and plain values ({type(error).__name__})"
        )
        # A dead link or a failing disk. EINVAL means damage: zipfile seeks to where a damaged
        # directory points.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            problem = f"cannot be read ({error.strerror})"
        raise UserError(f"{path}: {problem}") from None


def state_of(path: Path, saved: dict) -> State:
    """
    Return the State in what load() has read. Raises UserError if another version or program wrote
    it, or another model.py, whose model has fields that are unknown here.
    """
    if saved.get("format") != FORMAT:
        raise UserError(f"{path}: another version or program wrote it; use it or another --out_dir")
    known = {"model", *(f.name for f in fields(FastConfig))}
    sizes = saved.get("model_config", {})
    if strange := [f"{name}={value!r}" for name, value in sizes.items() if name not in known]:
        hint = "use the model.py that it was trained with"
        raise UserError(f"{path}: its model has {', '.join(strange)}, unknown here; {hint}")
    parts = {f.name: saved[f.name] for f in fields(State) if f.name in saved}
    return State(**parts | dict(source=str(path)))


# -----------------------------------------------------------------------------
# The run's folder


def checkpoint_name(iter_num: int) -> str:
    return f"ckpt-{iter_num:08}.pt"


def iteration(path: Path) -> int:
    """Return the iteration in a checkpoint's name, such as 500 for ckpt-00000500.pt."""
    return int(path.stem.removeprefix("ckpt-"))


def newest_first(out_dir: Path) -> list[Path]:
    """
    Return the paths of all checkpoints (ckpt-*.pt). Raises OSError for a folder that may not be
    listed.
    """
    paths = [out_dir / name for name in names_in(out_dir) if re.fullmatch(r"ckpt-\d+\.pt", name)]
    return sorted(paths, key=iteration, reverse=True)


def best_first(out_dir: Path) -> list[Path]:
    """
    Return the paths of the checkpoints that can be read, the best first: that whose weights have
    the lowest validation loss. Those that were not evaluated, or not trained, come last.
    """
    losses = {}
    for path in newest_first(out_dir):
        with contextlib.suppress(UserError):
            loss = load(path, whole=False).get("val_loss") if iteration(path) else None
            losses[path] = math.inf if loss is None or math.isnan(loss) else loss
    return sorted(losses, key=losses.__getitem__)


def load_first(out_dir: Path, order: Callable[[Path], list[Path]]) -> tuple[Path, dict] | None:
    """
    Return the first intact checkpoint in the order of newest_first() or best_first(), and what it
    holds; None if out_dir has no checkpoint. Warns about each damaged one that it passes over.
    Raises UserError if none can be read, so that a run never silently starts again.
    """
    listed, ordered = newest_first(out_dir), order(out_dir)
    unreadable = [path for path in listed if path not in ordered]  # best_first() leaves them out
    paths = [*unreadable, *ordered]
    for path in paths:
        try:
            return path, load(path)
        except UserError as error:
            if not os.path.lexists(path) and newest_first(out_dir):
                return load_first(out_dir, order)  # a run that saves has deleted it, so look again
            warn(f"{error}; trying another checkpoint")
    if paths:
        hint = "restore one, or start in another --out_dir"
        raise UserError(f"{out_dir}: none of its checkpoints can be read; {hint}")
    return None


def set_aside(path: Path) -> None:
    """Rename a file, if it exists, to the first free name among NAME.1, NAME.2, ..."""
    if os.path.lexists(path):  # also a dead link
        names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


# -----------------------------------------------------------------------------
# Writing the run's files during training


class RunFolder:
    """
    Writes a run's files: the lock on out_dir, the checkpoints, metrics.jsonl and log.txt. Only rank
    0 claims, saves and appends. Only the lock stays open, because a handle on a network disk dies
    with its connection.
    """

    def __init__(self, path: Path, only_reads: bool = False):
        """
        Take a run's folder and, unless this process `only_reads` in it, lock it, so that no other
        run changes its checkpoints. A new run locks its folder in claim(). Raises OSError and
        UserError.
        """
        self.path = path
        self.lock_file: BinaryIO | None = None
        self.has_warned = False  # that the disk does not take a log's line
        if not only_reads and ((path / "lock").exists() or newest_first(path)):
            self.lock()

    def lock(self) -> None:
        """Lock the folder until this process ends. Raises OSError and UserError."""
        self.lock_file = open(self.path / "lock", "ab")
        if not try_lock(self.lock_file):
            hint = "stop that one first, or choose another --out_dir"
            raise UserError(f"out_dir: another run is writing to {self.path}; {hint}")

    def claim(self, state: State) -> None:
        """
        Lock a new run's folder, delete temporary files and create the logs. In a new run, rename an
        earlier log. If it begins with a checkpoint, cut off the records that the run will write
        again, and rename newer checkpoints, which cannot be read. Raises OSError and UserError.
        """
        folder, it = self.path, state.iter_num if state.is_run else -1
        folder.mkdir(parents=True, exist_ok=True)
        if not self.lock_file:
            self.lock()
        for path in newest_first(folder):
            if iteration(path) > it:
                set_aside(path)  # prune() would count it among the newest
        # leftover temporary files could take the room that the next checkpoint needs
        remove_temporaries(folder, "ckpt-*.pt", "loss.png")
        if not state.is_run:  # keep the user's files and those of a run that never saved
            for name in ("metrics.jsonl", "log.txt", "loss.png"):
                set_aside(folder / name)
        # create both logs, or find that they cannot be written
        log = folder / "metrics.jsonl"
        try:
            cut_records(log, it)
            log = folder / "log.txt"
            open(log, "ab").close()
        except OSError as error:
            error.filename = log  # an error of reading, cutting or closing names no file
            raise
        keep_transcript(lambda text: self.append("log.txt", text))

    def save(self, state: State, keep: int) -> tuple[int, bool]:
        """
        Write the newest checkpoint, and keep so many of the newest, besides the best. Older ones
        are deleted before the write to make room, but the newest and the best stay until it has
        succeeded. Returns its bytes, and whether it is the best. Raises UserError if the disk is
        full, failing or missing.
        """
        path = self.path / checkpoint_name(state.iter_num)
        try:
            self.prune(max(1, keep - 1))
            with open(self.path / "metrics.jsonl", "ab") as log:
                os.fsync(log.fileno())  # a resume would not repeat the evaluation that it records
            write(state, path)
            is_best = self.prune(keep) == path and state.iter_num > 0 and state.val_loss is not None
            return path.stat().st_size, is_best
        except OSError as error:
            problem = f"{error.filename or path}: is not saved ({error.strerror})"
            hint = "once that is fixed, the same command resumes the run"
            raise UserError(f"{problem}; {hint}") from None

    def prune(self, keep: int) -> Path | None:
        """
        Delete all checkpoints but the newest `keep`, the best one and those that cannot be read.
        Returns the best one.
        """
        ranked = best_first(self.path)
        for path in newest_first(self.path)[keep:]:
            with contextlib.suppress(PermissionError):  # on Windows another program has it open
                if path in ranked[1:]:
                    path.unlink(missing_ok=True)
        return ranked[0] if ranked else None

    def append(self, name: str, line: str) -> None:
        """Append a line to metrics.jsonl or log.txt. Warns once if the disk does not take it."""
        try:
            with open(self.path / name, "ab") as file:
                file.write(f"{line}\n".encode(errors="replace"))
        except OSError as error:
            if not self.has_warned:
                self.has_warned = True  # before the warning, which comes back here
                warn(f"{name}: {one_line(error)}; the logs of this launch lack lines")


def cut_records(path: Path, it: int) -> None:
    """
    Cut metrics.jsonl after the last record of a checkpoint's run. The checkpoint holds the state
    after `it` iterations; a step record at N comes after iteration N, and so may an event; all
    others come before it. This also cuts off half a line left by a kill. Raises OSError.
    """
    end = here = 0
    with open(path, "a+b") as file:
        file.seek(0)
        for line in file:
            here += len(line)
            record = read_record(line)
            number, after = record.get("iter"), record.get("kind") in ("step", "event")
            if isinstance(number, int) and number + after <= it and line.endswith(b"\n"):
                end = here
        file.truncate(end)
