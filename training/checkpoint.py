"""
Checkpoints that survive a kill, a full disk and a flipped bit.

out_dir/ckpt-00000500.pt holds the state after 500 updates. It is written under a temporary name,
read back, flushed to the disk, and only then renamed, so a file under a checkpoint's name is whole.
Its last bytes are a sha256 of all bytes before them; torch.load ignores such a trailer, so
`torch.load(path, weights_only=True)` reads the file alone.
"""

import hashlib
import os
import pickle
import shutil
from pathlib import Path
from typing import BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from common.console import UserError, warn
from common.files import free_bytes, fsync_folder, replacing, try_lock

TRAILER = b"\nsha256 of all bytes before this line: "
TRAILER_BYTES = len(TRAILER) + 64
CHUNK_BYTES = 1 << 24


class HashingWriter:
    """A file for torch.save that hashes what passes through it."""

    def __init__(self, file):
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data) -> int:
        self.sha256.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(state: dict, path: Path) -> int:
    """
    Write `state` to `path`, all or nothing; returns the file's size in bytes. Raises OSError,
    leaving `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it under the run
    check_space(state, path.parent)
    with replacing(path) as file:
        writer = HashingWriter(file)
        try:
            torch.save(state, writer)
        except (
            RuntimeError
        ) as error:  # torch's archive writer, closing after a failed write, complains in its place
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.write(TRAILER + writer.sha256.hexdigest().encode())
        file.flush()
        if damage := find_damage(Path(file.name)):
            raise OSError(f"{file.name} reads back wrong: {damage}")
    fsync_folder(path.parent)  # the rename itself must reach the disk
    return writer.bytes + TRAILER_BYTES


def check_space(state: dict, folder: Path) -> None:
    sizes = {
        leaf.data_ptr(): leaf.nbytes
        for leaf in tree_leaves(state)
        if isinstance(leaf, torch.Tensor)
    }  # tied ones once
    needed = sum(sizes.values()) + (1 << 20)
    free = free_bytes(folder)
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB free, a checkpoint needs {needed / 1e9:.2f} GB"
        )


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
    return (
        ""
        if trailer[len(TRAILER) :] == sha256.hexdigest().encode()
        else "its checksum does not match: bytes have changed"
    )


def load(path: Path) -> dict:
    """
    A checkpoint's state, in CPU memory. Runs no code from the file. Raises UserError where the file
    is damaged.
    """
    damage = find_damage(path)
    if not damage:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            damage = "refused: it holds more than tensors and plain values"
    raise UserError(f"{path}: {damage}")


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    return sorted(out_dir.glob("ckpt-" + "[0-9]" * 8 + ".pt"))


def load_newest(out_dir: Path) -> dict | None:
    """
    The newest valid checkpoint's state; damaged ones are named on the way. None where out_dir holds
    no checkpoint. Raises UserError where there are checkpoints and none is valid: never a silent
    new start.
    """
    paths = list_checkpoints(out_dir)
    for path in reversed(paths):
        try:
            return load(path)
        except UserError as error:
            warn(f"{error}; trying the one before")
    if paths:
        raise UserError(
            f"{out_dir}: none of its {len(paths)} checkpoints is valid; restore one, or start anew elsewhere"
        )
    return None


def prune(out_dir: Path, keep: int, newest: Path | None = None) -> None:
    """
    Delete all but the newest `keep` checkpoints, counted from `newest` down (those above it were
    found damaged when the run was resumed), and what killed saves left behind.
    """
    paths = list_checkpoints(out_dir)
    kept = [path for path in paths if newest is None or path <= newest][-keep:] if keep else []
    for path in [
        *(path for path in paths if path not in kept),
        *out_dir.glob("ckpt-????????.tmp"),
        out_dir / "best.tmp",
    ]:
        path.unlink(missing_ok=True)


def mark_best(path: Path) -> None:
    """
    Make best.pt the same file as `path`, atomically; a copy where the file system has no links.
    """
    best, temporary = path.with_name("best.pt"), path.with_name("best.tmp")
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
        lock = open(out_dir / "lock", "wb")
        if not try_lock(lock):
            raise UserError(
                f"out_dir: another run is writing to {out_dir}; stop that one first, or choose another --out_dir"
            )
        if list_checkpoints(out_dir) != known:
            raise UserError(
                f"out_dir: another run was writing to {out_dir} until now; the same command goes on from there"
            )
        if not os.access(out_dir, os.W_OK):
            raise UserError(f"out_dir: {out_dir}: read-only; choose another --out_dir")
        if fresh:
            prune(out_dir, keep=0)
            for name in ("best.pt", "metrics.jsonl", "loss.png"):
                (out_dir / name).unlink(missing_ok=True)
        fsync_folder(out_dir)
        return lock
    except OSError as error:
        raise UserError(f"out_dir: {out_dir}: {error.strerror}; choose another --out_dir") from None


def holds_run(out_dir: Path) -> bool:
    return bool(list_checkpoints(out_dir)) or any(
        (out_dir / name).exists() for name in ("metrics.jsonl", "best.pt")
    )
