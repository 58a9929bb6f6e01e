"""List the files to read, in order, and read the lines of jsonl."""

import glob
import gzip
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.console import UserError, one_line, raise_if_any, warn

TEXT_FILES = (".txt", ".md", ".py")
# A plain .json is refused, because most hold one object or one list.
PACKED = tuple(f".{e}{z}" for e in ("jsonl", "ndjson", "json") for z in (".gz", ".zst"))
ROW_FILES = (".parquet", ".jsonl", ".ndjson", *PACKED)
HUB_TIMEOUT = 20  # seconds


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    List the files of paths, folders and patterns in the order given. A file reachable under several
    names is listed once. Raises UserError with what is wrong with each name.
    """
    files: dict[tuple, str] = {}
    problems = []
    for name in names:
        try:
            for file in files_of(name, endings):
                files.setdefault(file_id(str(file)), str(file))
        except UserError as error:
            problems.append(str(error))
    raise_if_any(problems)
    return list(files.values())


def files_of(name: str, endings: tuple[str, ...]) -> list[Path]:
    """
    List the files of one path, folder or pattern, sorted by name. Warns about files that are left
    out: files with other endings and hidden ones. Raises UserError if there is nothing to read, and
    for dead links and git-lfs pointers.
    """
    paths = [name] if os.path.lexists(name) else glob.glob(name, recursive=True)
    # the file or folder that the user spelled out
    root = Path(name if paths == [name] else os.path.dirname(re.split(r"[*?\[]", name)[0]))
    found = sorted({f for path in map(Path, paths) for f in files_in(path)}, key=str)
    hidden = [f for f in found if is_hidden(f, root)]
    shown = [f for f in found if not is_hidden(f, root)]
    # A dead link stands for missing text if it has a text file's name or may be a folder.
    wanted = (*endings, Path(name).name.lower())
    dead = [f for f in shown if f.is_symlink() and not f.exists()]
    if dead := [f for f in dead if not f.suffix or f.name.lower().endswith(wanted)]:
        link = f"{dead[0]}: links to {os.readlink(dead[0])}, which does not exist"
        raise UserError(f"{link} (dead links: {len(dead):,}); get that file, or delete the link")
    readable = [f for f in shown if f.name.lower().endswith(endings) and f.is_file()]
    if not readable:
        problem = f"{name}: no such file, or only names that begin with a dot or _"
        if shown:
            problem = f"{shown[0]}: cannot be read as text or rows"
        hint = "rename a .json with an object on each line to .jsonl"
        raise UserError(f"{problem}; give {', '.join(endings)}; {hint}")
    for file in readable:
        refuse_lfs_pointer(file)
    if others := sorted({*shown} - {*readable}):
        kinds = ", ".join(sorted({f.suffix or f.name for f in others})[:5])
        what = f"skipping files of other types: {len(others):,} ({kinds}), such as {others[0]}"
        warn(f"{what}; only {', '.join(endings)} are read here")
    if hidden:
        warn(f"skipping names that begin with a dot or _: {len(hidden):,}, such as {hidden[0]}")
    return readable


def is_hidden(file: Path, root: Path) -> bool:
    """
    Return True if a name below `root` begins with a dot or, for a file of rows, with `_`. Spark,
    Hive and pyarrow skip such names too: they hold rows of killed jobs, or the table's log.
    """
    marks = (".", "_") if file.name.lower().endswith(ROW_FILES) else "."
    return any(part.startswith(marks) for part in file.relative_to(root).parts)


def refuse_lfs_pointer(path: Path) -> None:
    """
    Raise UserError for a placeholder that `git lfs pull` replaces: it would be read as text or
    tokens.
    """
    with open(path, "rb") as file:
        if file.read(1024).startswith(b"version https://git-lfs") and not file.read(1):
            raise UserError(f"{path}: is a git-lfs pointer; type git lfs pull in its folder")


def files_in(path: Path) -> Iterator[Path]:
    """
    Yield the file, or all files in a folder and its subfolders, following links. For a folder whose
    name begins with a dot, yields only its name. Raises OSError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    if not path.is_dir():
        yield path
        return
    entered = set()  # folders by identity, because a link may lead back to a parent
    for folder, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        if file_id(folder) in entered:
            folders.clear()
            continue
        entered.add(file_id(folder))
        yield from (Path(folder, name) for name in files)
        yield from (Path(folder, name) for name in folders if name.startswith("."))
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def file_id(name: str) -> tuple:
    """Return an id that is the same for every name of a file or folder."""
    stat = os.stat(name)
    return stat.st_dev, stat.st_ino or os.path.realpath(name)  # st_ino is 0 on some network disks


def hub_files(dataset: str, name: str | None, revision: str | None) -> tuple[list[str], str | None]:
    """
    Return the URLs of a hub dataset's training files, in the dataset's order, and their revision:
    the one given, or else the newest. Raises UserError.
    """
    import datasets
    from huggingface_hub import HfApi, get_session

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are still raised
    get_session().event_hooks["request"].append(limit_waiting)
    try:
        revision = revision or HfApi().dataset_info(dataset).sha
        builder = datasets.load_dataset_builder(dataset, name, revision=revision)
    except Exception as error:  # a wrong name, no network, or no permission
        hint = "check the names and the network, and set HF_TOKEN if the dataset asks for it"
        raise UserError(f"{dataset}: {one_line(error)}; {hint}") from None
    files = [str(file) for file in (builder.config.data_files or {}).get("train", ())]
    if not files or not all(file.endswith(ROW_FILES) for file in files):
        problem = f"{dataset}: has no training split of parquet or jsonl files"
        hint = "give another --dataset=ORG/NAME, or prepare files of your own with prepare_text.py"
        raise UserError(f"{problem}; {hint}")
    return files, revision


def limit_waiting(request) -> None:
    """Limit how long a request to the hub waits. The library lists files without a time limit."""
    limits = request.extensions["timeout"]  # seconds to connect, read, ...
    request.extensions["timeout"] = {key: limits[key] or HUB_TIMEOUT for key in limits}


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def read_lines(name: str) -> Iterator[tuple[int, bytes]]:
    """
    Yield (number, line) for each non-blank line, numbered from 1. Detects gzip and zstd by a file's
    first bytes, because a download may unpack a file but keep its name.
    """
    import fsspec

    # fsspec would take a :: in a local name for a chain of file systems.
    with fsspec.open(name) if "://" in name else open(name, "rb") as file:
        # Without this buffer, every line of a file on the hub would copy megabytes.
        lines: Any = io.BufferedReader(file, 2**20)
        magic = lines.peek(4)[:4]
        if magic.startswith(b"\x1f\x8b"):
            lines = io.BufferedReader(gzip.GzipFile(fileobj=lines), 2**20)
        elif magic == b"\x28\xb5\x2f\xfd" or magic[1:] == b"\x2a\x4d\x18":
            import pyarrow

            # fsspec's own zstd reader ends a truncated file without an error.
            packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(lines, "r"), "zstd")
            lines = io.BufferedReader(packed, 2**20)
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield number, line
