"""List the files to read, in order, and read the lines of jsonl."""

import glob
import io
import os
from collections.abc import Iterator
from pathlib import Path

from common.console import UserError, one_line, warn

TEXT_FILES = (".txt", ".md", ".py")
# A plain .json is refused, because most hold one object or one list.
PACKED = tuple(f".{e}{z}" for e in ("jsonl", "ndjson", "json") for z in (".gz", ".zst"))
ROW_FILES = (".parquet", ".jsonl", ".ndjson", *PACKED)
HUB_TIMEOUT = 20  # seconds


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    List the files of paths, folders and patterns in the order given, each once. Warns about files with other endings, which are left out. Raises UserError for a
    name with nothing to read, and OSError.
    """
    files: dict[str, str] = {}  # by real path
    for name in names:
        found = {*files_in(name)}
        # a pipe may never end
        readable = [f for f in found if f.lower().endswith(endings) and not Path(f).is_fifo()]
        kinds = ", ".join(endings)
        if not readable:
            hint = "rename a .json with an object per line to .jsonl; docs/data.md converts a .csv"
            raise UserError(f"{name}: no such file, or none of these kinds: {kinds}; {hint}")
        if others := sorted(found - {*readable}):
            warn(f"{name}: {len(others):,} files are left out, such as {others[0]}; read: {kinds}")
        for file in sorted(readable):
            os.stat(file)  # raises OSError for a broken link
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def files_in(name: str) -> Iterator[str]:
    """
    Yield a file, the files of a pattern, or all files in a folder and its subfolders, following
    links, but no folder twice, and none whose name begins with a dot. Raises OSError for a folder
    that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for path in [name] if os.path.lexists(name) else glob.glob(name, recursive=True):
        if not os.path.isdir(path):
            yield path
            continue
        seen: set[str] = set()  # real paths; links may lead back to a folder
        for folder, folders, files in os.walk(path, onerror=refuse, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            # iCloud puts .NAME.icloud in the place of a file that it has not downloaded
            shown = (n for n in files if not n.startswith(".") or n.endswith(".icloud"))
            yield from (os.path.join(folder, name) for name in shown)


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
        hint = "check the names and the network; set HF_TOKEN if the dataset asks for it"
        hint += ", and unset it if it has expired"
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
    """Yield (number, line) for each non-blank line, numbered from 1, also of gzip and zstd."""
    import fsspec

    packed = {".gz": "gzip", ".zst": "zstd"}.get(name.lower()[name.rfind(".") :])
    # fsspec would take a :: in a local name for a chain of file systems.
    with fsspec.open(name) if "://" in name else open(name, "rb") as lines:
        if packed:
            import pyarrow

            # fsspec's own reader of zstd ends a truncated file without an error.
            lines = pyarrow.CompressedInputStream(pyarrow.PythonFile(lines, "r"), packed)
        # Without this buffer, every line of a file on the hub would copy megabytes.
        lines = io.BufferedReader(lines, 2**20)
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield number, line
