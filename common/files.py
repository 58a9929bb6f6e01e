"""
Files that survive a kill and a full disk: all-or-nothing writes, locks, free space. And JSON, read
with one line for what is wrong with it.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.console import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    A file that appears under its name once it is whole and on the disk, or, where writing fails,
    not at all.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; give a file in it", str(path))
    # its own, as two processes may write one picture; X.tmp may be a file of the user's
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_temporaries(folder: Path, *names: str) -> None:
    """
    Delete what killed processes have left of files of these names. Only for who holds the lock of
    the folder: another process may be writing one.
    """
    for name in names:
        for path in folder.glob(f"{name}*.tmp"):
            path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on the disk only after this."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def try_lock(file: BinaryIO) -> bool:
    """
    Whether this process has the file for itself, until it closes it or ends in any way. True where
    the system has no such locks.
    """
    try:
        import fcntl

        # forked workers keep flock's, not this one
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # Windows; some network file systems
        pass
    return True


def read_json(path: Path, mend: str) -> dict:
    """A JSON object from a file. Raises UserError, which ends in `mend`."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or f"not readable as JSON ({error})"
        raise UserError(f"{path}: {reason}; {mend}") from None


def lack_of_space(folder: Path, needed: int) -> str:
    """
    A message where the disk that `folder`, which need not exist yet, is or would be on has less
    than the `needed` bytes free. Empty where it has.
    """
    place = folder.absolute()
    existing = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    lacks = f"{folder}: needs {needed / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f} GB free"
    return lacks if free < needed else ""
