"""
Files that survive a kill and a full disk: all-or-nothing writes, locks, free space. And JSON, read
with one line for what is wrong with it.
"""

import codecs
import contextlib
import errno
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.console import UserError, warn

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
warn_once = functools.cache(warn)  # of a disk, which stays as it is


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    A file that appears under its name once it is whole and on the disk, or, where writing fails,
    not at all. After it the name is on the disk too.
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
            # Macs only have this call. There fsync leaves the data in the drive's own cache
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
    function(*arguments), some times where Windows refuses it: another program, such as a virus
    scanner, may have the file open for a moment, and then nobody replaces or deletes it.
    """
    for seconds in (0.1, 0.2, 0.4, 0.8) if sys.platform == "win32" else ():
        try:
            return function(*arguments)
        except PermissionError:
            time.sleep(seconds)
    return function(*arguments)


def remove_temporaries(folder: Path, *names: str) -> None:
    """
    Delete what killed processes have left of files of these names. Only for who holds the lock of
    the folder: another process may be writing one.
    """
    for name in names:
        for path in folder.glob(f"{name}*.tmp"):
            patiently(path.unlink, True)  # which may be missing


def fsync_folder(folder: Path) -> None:
    """
    Make the names in a folder durable: a rename is on the disk only after this. Some shares know no
    such thing, which is said once.
    """
    if sys.platform == "win32":  # a folder cannot be opened
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
    Whether this process has the file for itself, until it closes it or ends in any way. True, with
    a warning, where the disk has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # behind all that is in it: nobody can read a locked byte
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # forked workers keep flock's, not this one
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if sys.platform == "win32" or isinstance(error, (BlockingIOError, PermissionError)):
            return False
        warn_once(f"{file.name}: this disk has no locks; start no second process here")
    return True


def read_text(path: Path, errors: str = "replace") -> str:
    """
    A text file of the user's: UTF-16 where it begins with a byte-order mark, as PowerShell writes
    it, else UTF-8, with U+FFFD where it is not, or UnicodeDecodeError with errors="strict". Lines
    end in LF. Raises OSError.
    """
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig"
    return content.decode(encoding, errors).replace("\r\n", "\n")


def read_json(path: Path, mend: str) -> dict:
    """A JSON object from a file. Raises UserError, which ends in `mend`."""
    try:
        return dict(json.loads(patiently(path.read_text, "utf-8")))
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
