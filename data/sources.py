"""
Where text comes from: the rows of parquet and jsonl files, here or on the hub, and text files.

A source is a function of a place, (file number, row in that file). It yields the documents from
there on in batches: file number, row of the batch's first document, and the documents' texts.
"""

import glob
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.console import UserError, raise_if_any, warn

Rows = list[str | None]  # None: a null in the file
Batch = tuple[int, int, Rows]
Source = Callable[[int, int], Iterator[Batch]]

COLUMN = "text"
ROW_FILES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
ROWS_PER_READ = 64  # few, as each may be a book
# Seconds to wait while the hub fails, on top of the attempts of the library itself
BACKOFF_SECONDS = (5, 10, 20, 40, 80, 160, 320)

# By default tqdm's lock is one between processes, and Python warns at its end of those that killed
# data workers have left behind. The datasets library uses tqdm even where it shows no bars.
tqdm.set_lock(threading.RLock())

# -----------------------------------------------------------------------------
# Which files


def local_files(names: list[str], endings: tuple[str, ...], flag: str = "") -> list[str]:
    """
    The files of some paths, folders and patterns, in the order given, those of one folder or
    pattern sorted by name. Other endings are left out. Raises UserError where a name gives no file;
    its message begins with `flag`.
    """
    files, problems = [], []
    for name in names:
        found = []
        paths = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        for path in map(Path, paths):
            inside = path.rglob("*") if path.is_dir() else [path]
            found += [str(f) for f in inside if f.name.lower().endswith(endings) and f.is_file()]
        if not paths:
            problems.append(f"{flag}{name}: no such file")
        elif not found:
            hint = "" if ".txt" in endings else "; data/prepare_text.py takes text files"
            problems.append(f"{flag}{name}: holds no {', '.join(endings)} files{hint}")
        files += sorted(found)
    for file in files:
        if file.endswith(ROW_FILES) and not os.path.getsize(file):
            problems.append(f"{file}: is empty; remove it")
    raise_if_any(problems)
    return list(dict.fromkeys(files))  # one that was named twice is read once


def describe_files(files: list[str]) -> str:
    """Stands for the revision of local files: changes when their number or size does."""
    return f"{len(files)} files, {sum(os.path.getsize(file) for file in files)} bytes"


def hub_files(
    dataset: str, name: str | None, revision: str | None, flag: str
) -> tuple[list[str], str]:
    """
    The addresses of a hub dataset's training files, in its own order, and their revision: the one
    given, or else the newest. Raises UserError, which offers `flag` for local files.
    """
    try:
        from huggingface_hub import HfApi

        revision = revision or HfApi().dataset_info(dataset).sha
        builder = quiet_datasets().load_dataset_builder(dataset, name, revision=revision)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", ())]
    except Exception as error:  # whatever the network throws
        raise UserError(f"{dataset}: {reason(error)}; or give local files with {flag}") from None
    if not files or not all(file.endswith(ROW_FILES) for file in files):
        raise UserError(f"{dataset}: no training split of parquet or jsonl files; choose another")
    return files, revision


def quiet_datasets():
    """
    The datasets library, silent but for lost connections. Its errors reach us as exceptions.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it calls a server, for local files too
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.logging.get_logger("datasets.utils.file_utils").setLevel(datasets.logging.WARNING)
    return datasets


# -----------------------------------------------------------------------------
# Reading a file


def read_rows(name: str, row: int) -> Iterator[tuple[int, Any]]:
    """
    The texts of a file, a path or an hf:// address, from `row` on in pieces that begin and end
    where they do for any `row`: the piece's first row, and an Arrow column of texts. Raises
    UserError where there is no text, and whatever reading throws.
    """
    read = read_parquet if name.lower().endswith(".parquet") else read_jsonl
    for begin, column in read(name, row):
        before = max(row - begin, 0)
        if before < len(column):
            yield begin + before, column[before:]


def read_parquet(name: str, row: int):
    """
    Pieces of a parquet file, with pyarrow alone: the datasets library reads some 300 MB ahead of a
    slower consumer and, when it begins in the middle of a file, downloads what it skips.
    """
    import fsspec
    import pyarrow.parquet

    with fsspec.open(name) as file:
        # pre-buffered bytes would be kept until the end of the file
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        check_column(name, parquet.schema_arrow)
        end = 0
        for group in range(parquet.num_row_groups):
            begin, end = end, end + parquet.metadata.row_group(group).num_rows
            if end <= row:
                continue  # is not downloaded
            for batch in parquet.iter_batches(ROWS_PER_READ, row_groups=[group], columns=[COLUMN]):
                yield begin, batch.column(0)
                begin += len(batch)


def read_jsonl(name: str, row: int):
    """Pieces of a jsonl file from its beginning, with the datasets library."""
    files = [name if "://" in name else glob.escape(name)]
    # spelt "utf-8", the library would not look at encoding_errors
    encoding = dict(encoding="UTF-8", encoding_errors="replace")
    load = quiet_datasets().load_dataset
    rows = load("json", data_files=files, split="train", streaming=True, **encoding)
    begin = 0
    for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_READ):
        check_column(name, table.schema)
        yield begin, table.column(COLUMN)
        begin += len(table)


def check_column(name: str, schema) -> None:
    if COLUMN not in schema.names:
        raise UserError(f"{name}: has no column {COLUMN}; its columns: {', '.join(schema.names)}")


def to_texts(column) -> Rows:
    """The texts of an Arrow column. Invalid UTF-8 becomes U+FFFD."""
    import pyarrow

    texts = column.cast(pyarrow.large_binary()).to_pylist()
    return [text if text is None else text.decode(errors="replace") for text in texts]


# -----------------------------------------------------------------------------
# Reading many files


def files_source(
    files: list[str],
    backoff: tuple[float, ...] = (),
    turn: tuple[int, int] = (0, 1),
    again_from: tuple[int, int] | None = None,
) -> Source:
    """
    Files as a source of the pieces whose `turn` it is: (i, n) is the i-th of n workers, which has
    every n-th piece. A file that fails is opened again at the same row after each wait of
    `backoff`, in seconds. The source ends with the last file, or, given a place `again_from`,
    continues there for ever.
    """

    def source(file: int, row: int) -> Iterator[Batch]:
        piece, failures = 0, 0
        while file < len(files):
            try:
                for begin, column in read_rows(files[file], row):
                    if piece % turn[1] == turn[0]:
                        yield file, begin, to_texts(column)
                    row = begin + len(column)
                    piece += 1
                    failures = 0
            except UserError:
                raise
            except Exception as error:  # whatever a network or a damaged file throws
                if failures == len(backoff):
                    raise UserError(f"{files[file]}: {reason(error)}") from None
                warn(f"{files[file]}: {reason(error)}; again in {backoff[failures]} s")
                time.sleep(backoff[failures])
                failures += 1
                continue
            file, row = file + 1, 0
            if file == len(files) and again_from is not None:
                file, row = again_from

    return source


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"
