"""
Files that survive a kill and a full disk: all-or-nothing writes, locks, free space.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    A file that appears under its name once it is whole and on the disk, or, where writing fails,
    not at all.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; give a file in it", str(path))
    temporary = path.with_name(path.name + ".tmp")  # X.tmp may be a file of the user's
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on the disk only after this."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
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


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names the open file, which may have been deleted or replaced since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def plain_file(path: Path) -> Path:
    """
    `path`. Raises OSError if it is a named pipe, a socket or a device: reading one can take for
    ever.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is a named pipe, a socket or a device, not a file", str(path))
    return path


def lack_of_space(folder: Path, needed: int) -> str:
    """
    A message where the disk that `folder`, which need not exist yet, is or would be on has less
    than the `needed` bytes free. Empty where it has.
    """
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    lacks = f"{folder}: needs {needed / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f} GB free"
    return lacks if free < needed else ""
