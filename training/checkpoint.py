"""
Checkpoints that survive a kill, a full disk and a flipped bit, and the folder they live in.

out_dir/ckpt-00000500.pt holds the state after 500 updates. It is written under a temporary name,
flushed to the disk, and only then renamed, so a file with a checkpoint's name is complete. It is
torch's own format, a zip with a CRC-32 of every record. torch.load ignores these, so they are
checked here first.
"""

import os
import shutil
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
import torch.utils.serialization  # noqa: F401  torch.save would import it later

from common.console import UserError, warn
from common.files import patiently, replacing, try_lock


def checkpoint_path(out_dir: str | Path, iter_num: int) -> Path:
    return Path(out_dir) / f"ckpt-{iter_num:08}.pt"


def list_checkpoints(out_dir: Path) -> list[Path]:
    """ckpt-*.pt, oldest first."""
    return sorted(out_dir.glob("ckpt-" + 8 * "[0-9]" + ".pt"))


def save(state: dict, path: Path) -> None:
    """Write `state` to `path`, all or nothing. Raises OSError, leaving `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's archive writer, closing after a failed write, hides the OSError behind its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path) -> dict:
    """
    A checkpoint, its checksums compared. Runs no code from it. Raises UserError if it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path}: cut short or damaged ({error})") from None
    if record:
        raise UserError(f"{path}: bytes of its record {record} have changed")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # another program's, or one that holds code
        problem = f"not a checkpoint of tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path}: {problem}") from None


def save_in_folder(state: dict, out_dir: Path, keep: int) -> Path:
    """
    Save `state` as the newest checkpoint, and keep that many. Older ones are deleted before the
    write, to make room; the newest only after it. If it is the best so far, best.pt becomes a link
    to it. Raises OSError.
    """
    path = checkpoint_path(out_dir, state["progress"]["iter_num"])
    prune(out_dir, max(1, keep - 1))
    save(state, path)
    prune(out_dir, keep)
    if state["progress"]["best_iter"] == state["progress"]["iter_num"]:
        mark_best(path)
    return path


def prune(out_dir: Path, keep: int) -> None:
    for path in list_checkpoints(out_dir)[:-keep]:
        patiently(path.unlink)


def mark_best(path: Path) -> None:
    """Make best.pt a link to `path`, atomically; or a copy, if the file system has no links."""
    best, link = path.with_name("best.pt"), path.with_name("best.pt.tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        patiently(os.replace, link, best)
    except OSError:
        with replacing(best) as file, open(path, "rb") as content:
            shutil.copyfileobj(content, file)


def find_newest(out_dir: Path) -> tuple[Path | None, dict]:
    """
    The newest valid checkpoint, and its state; damaged ones are renamed to ckpt-*.pt.damaged, with
    a warning. None and {} if out_dir holds no checkpoint. Raises UserError if there are checkpoints
    and none is valid: a run never starts from scratch silently.
    """
    paths = list_checkpoints(out_dir)
    for path in reversed(paths):
        try:
            return path, load(path)
        except UserError as error:
            warn(f"{error}; trying the one before")
            path.replace(path.with_name(f"{path.name}.damaged"))
    if paths or list(out_dir.glob("ckpt-*.pt.damaged")):
        problem = "none of its checkpoints can be resumed"
        raise UserError(f"{out_dir}: {problem}; restore one, or start in another --out_dir")
    return None, {}


def claim_folder(out_dir: Path) -> BinaryIO:
    """
    Make out_dir if it does not exist, keep other runs out while the returned file is open, and
    delete what killed saves left. Raises OSError if it cannot be written, UserError if another run
    uses it.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    lock = open(out_dir / "lock", "ab")
    if not try_lock(lock):
        hint = "stop that one first, or choose another --out_dir"
        raise UserError(f"out_dir: another run is writing to {out_dir}; {hint}")
    # temporary files could leave no room for the next checkpoint
    for pattern in ("ckpt-*.tmp", "best.pt*.tmp", "metrics.jsonl*.tmp", "loss.png*.tmp"):
        for path in out_dir.glob(pattern):
            patiently(path.unlink)
    return lock
