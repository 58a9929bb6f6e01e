"""
Where text comes from: the rows of parquet and jsonl files, here or on the hub.
"""

import glob
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from tqdm import tqdm

from common.console import UserError

# A source is opened at a document, by the number of its file and its row there, and yields batches
# from it on: file
# number, row number of the batch's first document, and the documents' texts. Earlier rows than
# asked for do no harm.
Rows = list[str | None]
Batch = tuple[int, int, Rows]
Source = Callable[[int, int], Iterator[Batch]]

COLUMN = "text"
ROWS_PER_READ = 256  # of jsonl
BYTES_PER_READ = 4_000_000  # of parquet, but no more than MAX_ROWS
MAX_ROWS = 1024
FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
}  # file ending -> builder of the datasets library
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "null")  # of Arrow
BACKOFF_SECONDS = (
    5,
    10,
    20,
    40,
    80,
    160,
    320,
)  # waits while the hub fails, on top of the library's own attempts


def local_files(source: str, flag: str = "--source") -> list[str]:
    """
    The files of a path, folder or pattern, sorted by name. Raises UserError, which names the flag.
    """
    paths = (
        [Path(source)]
        if os.path.exists(source)
        else [Path(path) for path in glob.glob(source, recursive=True)]
    )
    if not paths:
        raise UserError(f"{flag}={source}: no such file")
    files = [
        inner
        for path in paths
        for inner in (path.rglob("*") if path.is_dir() else [path])
        if inner.is_file()
    ]
    names = sorted(str(file) for file in files if file_format(str(file)))
    if empty := [name for name in names if not os.path.getsize(name)]:
        raise UserError(*(f"{name}: is empty; remove it" for name in empty))
    if not names:
        raise UserError(
            f"{flag}={source}: needs .parquet or .jsonl files (.jsonl.gz and .jsonl.zst too)"
        )
    return names


def describe_files(files: list[str]) -> str:
    """What local files have in place of a revision."""
    return f"{len(files)} files, {sum(os.path.getsize(file) for file in files)} bytes"


def hub_files(
    dataset: str, name: str | None, revision: str | None, flag: str = "--source"
) -> tuple[list[str], str]:
    """
    The addresses of a hub dataset's training files, in its own order, and the revision they are
    from. Raises UserError.
    """
    try:
        from huggingface_hub import HfApi

        revision = revision or HfApi().dataset_info(dataset).sha
        builder = quiet_datasets().load_dataset_builder(dataset, name, revision=revision)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", ())]
    except Exception as error:  # whatever the network throws
        raise UserError(
            f"{dataset}: {reason(error)}; mend that, or give local files with {flag}"
        ) from None
    if not files or not all(map(file_format, files)):
        raise UserError(
            f"{dataset} {name or ''}: has no training split of parquet or jsonl files; choose another --name"
        )
    return files, revision


def quiet_datasets():
    """
    The datasets library, its only messages those about lost connections; its errors reach us as
    exceptions.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it calls a server, for local files too
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.logging.get_logger("datasets.utils.file_utils").setLevel(datasets.logging.WARNING)
    return datasets


def file_format(name: str) -> str | None:
    path = Path(name)
    return FORMATS.get(Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix)


def read_rows(name: str, row: int, turns: Iterator[bool]) -> Iterator[tuple[int, Rows]]:
    """
    The texts of a file, a path or an hf:// address, from `row` on: the number of the first one, and
    some texts. `turns` says of each such batch whether to read it; the texts of one left out are
    None. Invalid UTF-8 becomes U+FFFD. Raises UserError where there is no text, and whatever
    reading throws.
    """
    import pyarrow

    for first, rows, load in (
        parquet_columns(name) if file_format(name) == "parquet" else json_columns(name)
    ):
        if first + rows <= row:
            continue
        skipped = max(row - first, 0)
        if next(turns):
            texts = load().slice(skipped).cast(pyarrow.large_binary()).to_pylist()
            yield (
                first + skipped,
                [text if text is None else text.decode(errors="replace") for text in texts],
            )
        else:
            yield first + skipped, [None] * (rows - skipped)


def parquet_columns(name: str):
    """
    The column of texts in pieces: the number of a piece's first row, its rows, and what reads it
    before the next is asked for. With pyarrow alone: the datasets library reads some 300 MB ahead
    of a slower consumer and, when it begins amid a file, downloads what it skips.
    """
    import pyarrow.parquet
    from huggingface_hub import HfFileSystem

    with HfFileSystem().open(name) if "://" in name else open(name, "rb") as file:
        parquet = pyarrow.parquet.ParquetFile(
            file, pre_buffer=False
        )  # pre-buffered bytes are kept until the file's end
        check_column(name, parquet.schema_arrow)
        leaves = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
        column, first = leaves.index(COLUMN), 0
        for group in range(parquet.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            row_bytes = (
                metadata.column(column).total_uncompressed_size // max(metadata.num_rows, 1) + 1
            )
            size = min(max(BYTES_PER_READ // row_bytes, 1), MAX_ROWS)
            batches = enumerate(
                parquet.iter_batches(size, row_groups=[group], columns=[COLUMN])
            )  # reads when it is asked
            for number, start in enumerate(range(0, metadata.num_rows, size)):
                rows = min(size, metadata.num_rows - start)
                yield first + start, rows, partial(find_column, batches, number)
            first += metadata.num_rows


def find_column(batches, wanted: int):
    return next(batch.column(0) for number, batch in batches if number == wanted)


def json_columns(name: str):
    pattern = name if "://" in name else glob.escape(name)
    stream = quiet_datasets().load_dataset(
        "json",
        data_files=[pattern],
        split="train",
        streaming=True,
        encoding="UTF-8",
        encoding_errors="replace",  # it repairs invalid UTF-8 only where that is not spelt utf-8
    )
    first = 0
    for table in stream.with_format("arrow").iter(batch_size=ROWS_PER_READ):
        check_column(name, table.schema)
        yield first, len(table), partial(table.column, COLUMN)
        first += len(table)


def check_column(name: str, schema) -> None:
    if COLUMN not in schema.names:
        raise UserError(f"{name}: has no column {COLUMN}; its columns: {', '.join(schema.names)}")
    if str(schema.field(COLUMN).type) not in TEXT_TYPES:
        raise UserError(f"{name}: its column {COLUMN} holds {schema.field(COLUMN).type}, not text")


def files_source(
    files: list[str],
    backoff: tuple[float, ...] = (),
    turns: tuple[bool, ...] = (True,),
    again_from: tuple[int, int] | None = None,
) -> Source:
    """
    Parquet and jsonl files as a source. A file that fails is opened again at the same row after
    each wait of `backoff`. Of each len(turns) batches those are read whose turn is true, the
    others' texts are None. The source ends with the last file, or goes on for ever at the place
    `again_from`.
    """

    def source(file: int, row: int) -> Iterator[Batch]:
        waits, batches = iter(backoff), 0
        while file < len(files):
            try:
                for first, rows in read_rows(
                    files[file], row, islice(cycle(turns), batches % len(turns), None)
                ):
                    yield file, first, rows
                    row, waits, batches = first + len(rows), iter(backoff), batches + 1
                file, row = file + 1, 0
                if file == len(files) and again_from is not None:
                    file, row = again_from
            except UserError:
                raise
            except Exception as error:  # whatever a network or a damaged file throws
                wait = next(waits, None)
                if wait is None:
                    raise UserError(f"{files[file]}: {reason(error)}") from None
                tqdm.write(
                    f"warning: {files[file]}: {reason(error)}; again in {wait} s", file=sys.stderr
                )
                time.sleep(wait)

    return source


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0].rstrip('.')}"
