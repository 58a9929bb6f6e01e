"""
Write files that survive a kill or a full disk, lock them, read text and metrics.jsonl records, and
read and write JSON.
"""

import codecs
import contextlib
import errno
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.console import UserError, say, warn

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    Open a file for writing that appears as `path` only once it is complete and durable. If writing
    fails, `path` is left as it was. Raises OSError, which names a file.
    """
    # The pid keeps apart two processes that write the same picture, and spares a user's own X.tmp.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
        fsync_folder(path.parent)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or path  # a full disk names no file
        temporary.unlink(missing_ok=True)
        raise


def rename(temporary: Path, path: Path) -> None:
    """Rename a file, replacing `path` if it exists. Raises OSError."""
    try:
        patiently(os.replace, temporary, path)
    except OSError as error:
        # some network disks never rename onto a file; Windows' errors are others
        if error.errno not in (errno.EPERM, errno.EEXIST):
            raise
        path.unlink(missing_ok=True)
        os.rename(temporary, path)


def patiently(function: Callable, *arguments) -> Any:
    """
    Call function(*arguments), and retry for some seconds on Windows, which cannot replace or delete
    a file while another program, such as a virus scanner, has it open.
    """
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4) if sys.platform == "win32" else ():
        try:
            return function(*arguments)
        except PermissionError:
            time.sleep(seconds)
    return function(*arguments)


def remove_temporaries(folder: Path, *names: str) -> None:
    """
    Delete temporary files of these names that killed processes left behind. Hold the folder's lock
    when calling this, because another process may be writing one.
    """
    for name in names:
        for path in folder.glob(f"{name}.[0-9]*.tmp"):
            patiently(path.unlink, True)  # missing_ok


def fsync_folder(folder: Path) -> None:
    """
    Make the names in a folder durable; without this, a power cut can undo a rename. Some network
    shares cannot do it.
    """
    if sys.platform == "win32":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def try_lock(file: BinaryIO) -> bool:
    """
    Try to lock a file, opened for writing, for this process until it closes the file or exits.
    Returns True if that worked, and also, with a warning, if the disk does not support locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # lock a byte past the contents, because nobody can read a locked one
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # lockf, because forked workers would inherit flock's lock
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if sys.platform == "win32" or isinstance(error, (BlockingIOError, PermissionError)):
            return False
        warn(f"{file.name}: this disk does not support locks; start no second process there")
    return True


def names_in(folder: Path) -> list[str]:
    """
    Return the names in a folder, none if there is no such folder. Raises OSError if the disk fails
    or forbids it. glob() then finds nothing, and so do exists() and is_dir() from Python 3.14 on.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    Lock a file during the block, and create it if necessary. While another process holds the lock,
    say so once and wait.
    """
    with open(path, "ab") as file:
        if not try_lock(file):
            say(f"{path.parent}: another process is writing to it; waiting")
            while not try_lock(file):
                time.sleep(1)
        yield


def read_text(path: Path, errors: str = "replace") -> str:
    """
    Read a text file that a person wrote: UTF-16 if it begins with UTF-16's byte-order mark, as
    files from PowerShell do, else UTF-8. Invalid bytes become U+FFFD, or with errors="strict" raise
    UnicodeDecodeError. Lines end in LF. Raises OSError.
    """
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig"
    return content.decode(encoding, errors).replace("\r\n", "\n")


def read_json(path: Path, hint: str) -> dict:
    """Read a JSON object from a file. Raises OSError, and UserError, which ends with `hint`."""
    try:
        return dict(json.loads(patiently(path.read_text, "utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {hint}") from None


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object by replacing(), in a folder that need not exist. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def read_record(line: bytes) -> dict:
    """Parse one line of metrics.jsonl; {} if it is not a record."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


def plain(value):
    """Prepare a value for JSON: round a float to nine digits, or make it null if not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
