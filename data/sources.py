"""
Where text comes from: documents out of parquet, jsonl and text files, here or on the hub.

A source is a function of a place, (file number, row in that file). From there on it yields batches:
the file number, the row of the batch's first document, and for each row its text, None if it is
empty, or LeftOut if it has no readable text.

    READERS        which function reads which kind of file: another kind, such as CSV, goes there
    local_files    which files, in which order
    hub_files      the same for a dataset on the hub
    FilesSource    many files as one source

Documents keep the order of the files and of their rows; training shuffles windows of their tokens
(loader.py). To shuffle whole documents, shuffle the lines of the files, or the list of files that
local_files() and hub_files() return, the same way at each start.
"""

import glob
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from common.console import UserError, raise_if_any, say, warn
from common.files import UTF16_MARKS


@dataclass
class LeftOut:
    """A row that is left out, counted and reported."""

    kind: str  # "no text" or "broken"
    problem: str


FileRow = str | None | LeftOut
Row = FileRow | tuple[str, str]  # (for training, for validation)
RowBatch = tuple[int, int, Sequence[Row]]
Source = Callable[[int, int], Iterator[RowBatch]]

FIELD = "text"
NAME_THE_FIELD = "prepare with --text_field=NAME"
ROWS_PER_READ = 64  # few, because each may be a book
FIRST_ROWS = 1000  # that show whether the text field is the right one
MOST_WITHOUT = 0.01  # of the rows may have no text without a warning
# Seconds before a hub file that failed is opened again at the same row; the library has already
# retried several times
BACKOFF_SECONDS = (5, 10, 20, 40, 80, 160, 320)

TEXT_COLUMN = re.compile("(large_|dictionary<values=(large_)?)?(string|binary)|null")
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except tabs, line ends and page ends
MOST_CONTROLS = 0.001  # of the characters of a text

# By default tqdm shares a lock between processes. A killed preparation would leave it behind, and
# some systems would print a warning.
tqdm.set_lock(threading.RLock())

# -----------------------------------------------------------------------------
# Which files


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    The files of some paths, folders and patterns, in the order given, those of one folder or
    pattern sorted by name. Files with other endings are left out. Raises UserError for a
    name without any file.
    """
    files, problems, others = [], [], list[Path]()
    for name in names:
        found = []
        paths = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        for path in map(Path, paths):
            inside = [f for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file()]
            found += [str(f) for f in inside if f.name.lower().endswith(endings)]
            others += [f for f in inside if not f.name.lower().endswith(endings)]
        if not found:
            there = (
                "save it as text first" if os.path.isfile(name) else "no such file, or none there"
            )
            problems.append(f"{name}: {there}; read are {', '.join(endings)}")
        files += sorted(found)
    raise_if_any(problems)
    if others:
        kinds = ", ".join(sorted({f.suffix or f.name for f in others})[:5])
        warn(f"{len(others):,} files are not read ({kinds}), such as {others[0]}")
    return list(dict.fromkeys(files))  # one that was named twice is read once


def hub_files(dataset: str, name: str | None, revision: str | None) -> tuple[list[str], str | None]:
    """
    The addresses of a hub dataset's training files, in its own order, and their revision: the one
    given, or else the newest. Raises UserError.
    """
    try:
        import datasets
        from huggingface_hub import HfApi

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised all the same
        revision = revision or HfApi().dataset_info(dataset).sha
        builder = datasets.load_dataset_builder(dataset, name, revision=revision)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", ())]
    except Exception as error:  # whatever the network throws
        raise UserError(f"{dataset}: {first_line(error)}; or give local files") from None
    if not files or not all(file.endswith(HUB_FILES) for file in files):
        raise UserError(f"{dataset}: no training split of parquet or jsonl files; choose another")
    return files, revision


# -----------------------------------------------------------------------------
# Reading a file
#
# A reader is a function of a path or an hf:// address, a row, the field that holds the text, and
# the encoding of text files. From that row on it yields lists of rows, each list with the number of
# its first row. A row is its text; None where it is no document; all of it, a dict, where it has no
# text in that field; or a ValueError where it cannot be read.


def read_parquet(
    name: str, row: int, field: str, _encoding: str | None
) -> Iterator[tuple[int, list]]:
    """
    With pyarrow alone: the datasets library reads some 300 MB ahead of a slower consumer and, when
    it begins in the middle of a file, downloads what it skips.
    """
    import fsspec
    import pyarrow.parquet

    with fsspec.open(name) as file:
        # pre-buffered bytes would be kept until the end of the file
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        types = {column.name: str(column.type) for column in parquet.schema_arrow}
        if not TEXT_COLUMN.match(types.get(field, "")):
            raise UserError(f"{no_text(name, field, types)}; {NAME_THE_FIELD}")
        end = 0
        for group in range(parquet.num_row_groups):
            begin, end = end, end + parquet.metadata.row_group(group).num_rows
            if end <= row:
                continue  # is not downloaded
            for batch in parquet.iter_batches(ROWS_PER_READ, row_groups=[group], columns=[field]):
                skipped = min(max(row - begin, 0), len(batch))
                texts = batch.column(0)[skipped:].cast(pyarrow.large_binary()).to_pylist()
                if texts:
                    # invalid UTF-8 becomes U+FFFD; a row without text is its columns
                    decoded = [(t or b"").decode(errors="replace") for t in texts]
                    yield begin + skipped, [t if t.strip() else types for t in decoded]
                begin += len(batch)


def read_jsonl(name: str, row: int, field: str, encoding: str | None) -> Iterator[tuple[int, list]]:
    """Each line is a row, a JSON object; a blank line is no document."""
    import fsspec

    if name.lower().endswith(".zst") and "zstd" not in fsspec.available_compressions():
        raise UserError(f"{name}: pip install zstandard, to read .zst files")
    with fsspec.open(name, compression="infer") as file:
        # without the buffer, files on the hub copy megabytes per line
        lines = islice(io.BufferedReader(file, 2**20), row, None)
        while found := [parse(line, field, encoding) for line in islice(lines, ROWS_PER_READ)]:
            yield row, found
            row += len(found)


def parse(line: bytes, field: str, given: str | None) -> str | None | dict | ValueError:
    """A line of jsonl as a row of a reader: UTF-8, or else in the `given` encoding."""
    if line.isspace():
        return None
    if line.startswith(b"["):
        return ValueError("a list; jq -c '.[]' FILE > NEW makes lines of it")
    try:
        try:
            content = line.decode()
        except UnicodeDecodeError:
            if not given or line.startswith(UTF16_MARKS):
                return ValueError("not UTF-8; iconv -f NAME -t utf-8 FILE > NEW converts it")
            content = line.decode(given)
        # files from Windows may begin with a byte-order mark
        values = json.loads(content.removeprefix("\ufeff").rstrip())
    except (ValueError, RecursionError) as error:  # also a number too long, nesting too deep
        return ValueError(getattr(error, "msg", str(error)))
    if not isinstance(values, dict):
        return ValueError(type(values).__name__)
    text = values.get(field)
    return text if isinstance(text, str) and text.strip() else values


def read_text(name: str, row: int, _field: str, encoding: str | None) -> Iterator[tuple[int, list]]:
    """A text file is one row."""
    if row == 0:
        yield 0, [decode(name, encoding)[0]]


def decode(name: str, given: str | None) -> tuple[str, str]:
    """
    The text of a file and its encoding: UTF-16 if it begins with that byte-order mark, UTF-8 if it
    is valid UTF-8, or else the given one. Raises UserError.
    """
    content, problems = Path(name).read_bytes(), []
    own = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    for encoding in filter(None, (own, given)):
        try:
            text = content.decode(encoding)
        except (UnicodeError, LookupError) as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say
            line = 1 + content[:at].count(b"\n")
            problems.append(f"line {line:,} is not {encoding}: {content[at : at + 8]!r}")
            continue
        controls = len(CONTROLS.findall(text))
        if controls <= 5 + MOST_CONTROLS * len(text):
            # the same line ends, so that every system makes the same tokens
            return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), encoding
        problems.append(f"{controls:,} NULs and control characters: binary, or not {encoding}")
    hint = "leave it out, or convert it: iconv -f NAME -t utf-8 FILE > NEW (-c drops bad bytes)"
    problems.append(f"{hint}, or give --encoding=NAME, such as cp1252, for all such files")
    raise UserError(f"{name}: {'; '.join(problems)}")


# What reads which kind of file, by its ending. To read CSV, write a reader like those above, with
# csv.DictReader, and add ".csv" to ROW_FILES and to READERS.
TEXT_FILES = (".txt", ".md", ".py")
LINES = (".jsonl", ".ndjson")
ROW_FILES = (".parquet", *LINES, *(f"{e}.{z}" for e in LINES for z in ("gz", "zst")))
HUB_FILES = (*ROW_FILES, ".json", ".json.gz", ".json.zst")  # a local .json is often one object
READERS: dict[str, Callable] = dict.fromkeys(HUB_FILES, read_jsonl)
READERS |= dict.fromkeys(TEXT_FILES, read_text) | {".parquet": read_parquet}

# -----------------------------------------------------------------------------
# Reading many files


@dataclass
class FilesSource:
    """Many files as one source."""

    files: list[str]
    field: str = FIELD  # holds the text, in parquet and jsonl
    encoding: str | None = None  # of text files that are neither UTF-8 nor UTF-16
    skip_broken: bool = False  # leave out lines that are not JSON objects

    def __call__(self, file: int, row: int) -> Iterator[tuple[int, int, list[FileRow]]]:
        """The batches from a place on. Raises UserError for a broken line or an unreadable file."""
        failures = 0
        while file < len(self.files):
            name = self.files[file]
            read = next(READERS[ending] for ending in READERS if name.lower().endswith(ending))
            try:
                for first, found in read(name, row, self.field, self.encoding):
                    yield file, first, [self.to_row(name, n, x) for n, x in enumerate(found, first)]
                    row = first + len(found)
                    failures = 0
            except UserError:
                raise
            except Exception as error:  # whatever a network or a damaged file throws
                if "://" not in name or failures == len(BACKOFF_SECONDS):
                    raise UserError(f"{name}: {first_line(error)}") from None
                warn(f"{name}: {first_line(error)}; again in {BACKOFF_SECONDS[failures]} s")
                time.sleep(BACKOFF_SECONDS[failures])
                failures += 1
                continue
            file, row = file + 1, 0

    def to_row(self, name: str, row: int, found: str | None | dict | ValueError) -> FileRow:
        """Turn what a reader found into a row of the source. Raises UserError."""
        if isinstance(found, ValueError):
            problem = f"{name}: line {row + 1:,} is no JSON object ({found})"
            if not self.skip_broken:
                raise UserError(f"{problem}; fix it, or prepare with --skip_broken")
            return LeftOut("broken", problem)
        if isinstance(found, dict):
            return LeftOut("no text", no_text(f"{name}: row {row + 1:,}", self.field, found))
        return found


def check_field(source: FilesSource) -> None:
    """
    Read the first rows of parquet and jsonl. Raises UserError if most have no text in the field.
    """
    files = [name for name in source.files if not name.lower().endswith(TEXT_FILES)]
    batches = replace(source, files=files)(0, 0)
    rows = list(islice((row for _, _, rows in batches for row in rows), FIRST_ROWS))
    without = [row for row in rows if isinstance(row, LeftOut) and row.kind == "no text"]
    if 2 * len(without) > len(rows):
        problem = f"{share(len(without), len(rows))} hold no text: {without[0].problem}"
        raise UserError(f"{problem}; {NAME_THE_FIELD}")


def report(left_out: dict) -> bool:
    """Report what a manifest's `left_out` counts. Returns whether many rows had no text."""
    has_many = left_out["no text"] > MOST_WITHOUT * left_out["rows"]
    if has_many:
        held = share(left_out["no text"], left_out["rows"])
        warn(f"{held} hold no text and are left out: {left_out['first no text']}")
    if left_out["broken"]:
        skipped = share(left_out["broken"], left_out["rows"])
        say(f"skipped: {skipped} are broken lines; the first: {left_out['first broken']}")
    return has_many


def share(part: int, rows: int) -> str:
    return f"{part:,} of {rows:,} rows ({part / rows:.1%})"


def no_text(where: str, field: str, fields: dict) -> str:
    return f"{where}: no text in the field {field}; fields: {', '.join(fields)[:200]}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"
