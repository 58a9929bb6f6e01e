"""
Files that survive a kill and a full disk: all-or-nothing writes, locks, free space. And JSON: files
read with a one-line error, and the records of metrics.jsonl.
"""

import codecs
import contextlib
import errno
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.console import UserError, warn

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
warn_once = functools.cache(warn)  # about a disk; it will not change during the run


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    A file that appears under its name only when it is complete and on the disk. If writing fails,
    nothing appears. Afterwards the name is on the disk too.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; give a file in it", str(path))
    # a name per process: two may write the same picture, and X.tmp may be a file of yours
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            # On a Mac fsync leaves the data in the drive's cache; only this call empties it
            with contextlib.suppress(ImportError, AttributeError, OSError):
                import fcntl

                fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined]  # Macs only
        patiently(os.replace, temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def patiently(function: Callable, *arguments) -> Any:
    """
    function(*arguments), retried if Windows refuses: a file that another program, such as a virus
    scanner, has open cannot be replaced or deleted.
    """
    for seconds in (0.1, 0.2, 0.4, 0.8) if sys.platform == "win32" else ():
        try:
            return function(*arguments)
        except PermissionError:
            time.sleep(seconds)
    return function(*arguments)


def remove_temporaries(folder: Path, *names: str) -> None:
    """
    Delete the temporary files of these names that killed processes left. Call it only with the lock
    of the folder, because another process may be writing one.
    """
    for name in names:
        for path in folder.glob(f"{name}.[0-9]*.tmp"):
            patiently(path.unlink, True)  # True: it may be missing


def fsync_folder(folder: Path) -> None:
    """
    Make the names in a folder durable: a rename is on the disk only after this. Some network
    shares cannot do that; then a warning, once.
    """
    if sys.platform == "win32":  # cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        warn_once(f"{folder}: this disk cannot sync it; a power cut may take the newest files")
    finally:
        os.close(descriptor)


def try_lock(file: BinaryIO) -> bool:
    """
    Try to lock the file for this process, until it closes the file or ends. Returns whether it has
    the lock; True, with a warning, if the disk has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # beyond the contents: a locked byte cannot be read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # unlike flock's, forked workers do not inherit this lock
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if sys.platform == "win32" or isinstance(error, (BlockingIOError, PermissionError)):
            return False
        warn_once(f"{file.name}: this disk has no locks; start no second process here")
    return True


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what git leaves in place of a large one until `git lfs pull`."""
    with open(path, "rb") as file:
        return file.read(1024).startswith(b"version https://git-lfs") and not file.read(1)


def read_text(path: Path, errors: str = "replace") -> str:
    """
    Read a text file written by a person: UTF-16 if it begins with that byte-order mark, as files
    from PowerShell do, else UTF-8. Invalid bytes become U+FFFD, or with errors="strict" raise
    UnicodeDecodeError. Lines end in LF. Raises OSError.
    """
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig"
    return content.decode(encoding, errors).replace("\r\n", "\n")


def read_json(path: Path, hint: str) -> dict:
    """A JSON object from a file. Raises UserError, which ends in `hint`."""
    try:
        return dict(json.loads(patiently(path.read_text, "utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or f"not readable as JSON ({error})"
        raise UserError(f"{path}: {reason}; {hint}") from None


def read_record(line: bytes) -> dict:
    """The record on a line of metrics.jsonl; {} if the line is not a record."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


def plain(value):
    """A value for JSON: a float with nine digits, or null if it is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None


def lack_of_space(folder: Path, needed: int) -> str:
    """
    A message if the disk of `folder`, which need not exist yet, has less than `needed` bytes free;
    empty otherwise.
    """
    place = folder.absolute()
    existing = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    shortage = f"{folder}: needs {needed / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f} GB free"
    return shortage if free < needed else ""
