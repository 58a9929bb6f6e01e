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

from tqdm import tqdm

from common.console import UserError, raise_if_any, warn

Rows = list[str | None]  # None: a null in the file
Batch = tuple[int, int, Rows]
Source = Callable[[int, int], Iterator[Batch]]

COLUMN = "text"
ROW_FILES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
ROWS_PER_READ = 256  # of jsonl
BYTES_PER_READ = 4_000_000  # of parquet, but no more than MAX_ROWS
MAX_ROWS = 1024
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
    return files


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


# Which pieces of a source a worker reads, every n-th: (its number, how many workers there are)
Turn = tuple[int, int]


def has_turn(piece: int, turn: Turn) -> bool:
    return piece % turn[1] == turn[0]


def read_rows(
    name: str, row: int, piece: int, turn: Turn
) -> Iterator[tuple[int, int, Rows | None]]:
    """
    The texts of a file, a path or an hf:// address, from `row` on in pieces: the piece's first row,
    the row after its last, and its texts. The first piece has the number `piece`; pieces that are
    the turn of others have None for texts and are not decoded. Raises UserError where there is no
    text, and whatever reading throws.
    """
    read = read_parquet if name.lower().endswith(".parquet") else read_jsonl
    return read(name, row, piece, turn)


def read_parquet(name: str, row: int, piece: int, turn: Turn):
    """
    read_rows of a parquet file, with pyarrow alone: the datasets library reads some 300 MB ahead of
    a slower consumer and, when it begins in the middle of a file, downloads what it skips.
    """
    import fsspec
    import pyarrow.parquet

    with fsspec.open(name) as file:
        # pre-buffered bytes would be kept until the end of the file
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        check_column(name, parquet.schema_arrow)
        group_begins = 0
        for group in range(parquet.num_row_groups):
            group_ends = group_begins + parquet.metadata.row_group(group).num_rows
            size = rows_per_piece(parquet, group)
            # Lazy: reads from the file when the first batch is asked for, decodes batch by batch
            batches = parquet.iter_batches(size, row_groups=[group], columns=[COLUMN])
            decoded = group_begins
            for begin in range(group_begins, group_ends, size):
                end = min(begin + size, group_ends)
                if end <= row:
                    continue
                texts = None
                if has_turn(piece, turn):
                    while decoded < end:
                        batch = next(batches)
                        decoded += len(batch)
                    texts = to_texts(batch.column(0))[max(row - begin, 0) :]
                yield max(begin, row), end, texts
                piece += 1
            group_begins = group_ends


def rows_per_piece(parquet, group: int) -> int:
    """As many rows of the row group as make up some BYTES_PER_READ, by its metadata."""
    leaves = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    metadata = parquet.metadata.row_group(group)
    text_bytes = metadata.column(leaves.index(COLUMN)).total_uncompressed_size
    row_bytes = text_bytes // max(metadata.num_rows, 1) + 1
    return min(max(BYTES_PER_READ // row_bytes, 1), MAX_ROWS)


def read_jsonl(name: str, row: int, piece: int, turn: Turn):
    """read_rows of a jsonl file, with the datasets library."""
    files = [name if "://" in name else glob.escape(name)]
    # spelt "utf-8", the library would not look at encoding_errors
    encoding = dict(encoding="UTF-8", encoding_errors="replace")
    load = quiet_datasets().load_dataset
    rows = load("json", data_files=files, split="train", streaming=True, **encoding)
    begin = 0
    for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_READ):
        check_column(name, table.schema)
        end = begin + len(table)
        if end > row:
            texts = None
            if has_turn(piece, turn):
                texts = to_texts(table.column(COLUMN))[max(row - begin, 0) :]
            yield max(begin, row), end, texts
            piece += 1
        begin = end


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
    turn: Turn = (0, 1),
    again_from: tuple[int, int] | None = None,
) -> Source:
    """
    Files as a source of the pieces whose `turn` it is. A file that fails is opened again at the
    same row after each wait of `backoff`, in seconds. The source ends with the last file, or, given
    `again_from`, goes on for ever from that place.
    """

    def source(file: int, row: int) -> Iterator[Batch]:
        piece, failures = 0, 0
        while file < len(files):
            try:
                for begin, end, texts in read_rows(files[file], row, piece, turn):
                    if texts is not None:
                        yield file, begin, texts
                    row = end
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
