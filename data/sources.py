"""
Read documents from parquet, jsonl and text files, local or on the Hugging Face hub.

A document is a row whose text field is not blank, or a text file that is not blank. Documents come
in the order of the files and their rows, or in the order of a list of row groups (see order.py).
Training shuffles windows of their tokens (see loader.py).

    local_files    lists the files to read, in order
    hub_files      does the same for a dataset on the hub
    Source         reads their rows, starting at any Place
"""

import glob
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from common.console import UserError, raise_if_any, say, warn
from common.files import UTF16_MARKS, is_lfs_pointer

TEXT_FILES = (".txt", ".md", ".py")
JSON_FILES = tuple(f".{e}{z}" for e in ("jsonl", "ndjson", "json") for z in ("", ".gz", ".zst"))
ROW_FILES = (".parquet", *JSON_FILES)

FIELD = "text"
FALLBACK = "cp1252"  # encoding of text files that are not Unicode: Windows' Latin-1
FIRST_ROWS = 1000  # rows of a file to read before deciding that --text_field is wrong
BATCH_ROWS = 64  # parquet rows to decode at once; few, because each may be a book
# parquet column types that can hold text
TEXT_COLUMN = re.compile("(dictionary<values=)?(large_)?(string|binary)|null")
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except tab, newline and page break
MOST_CONTROLS = 0.001  # largest fraction of control characters in a text
# Separates the documents in one .txt file, as in TinyStories. Not in .md and .py, which may just
# mention it.
END_OF_TEXT = re.compile(r"<\|endoftext\|>\n?")
# Seconds to wait before each retry of a file on the hub, an hour in all. Reading resumes at the row
# where it failed. The hub's own library has retried several times before that.
PAUSES = (5, 10, 20, 40, 80, 160, 320, *[600] * 5)

# -----------------------------------------------------------------------------
# Which files


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    List the files of paths, folders and patterns in the order given; within a folder or pattern,
    sort by name. A file reachable under several names is listed once. Files with other endings, and
    names in folders that begin with a dot, are skipped with a warning. Raises UserError if a name
    matches no file, and for git-lfs pointers.
    """
    files: dict[tuple, str] = {}
    problems, hidden = [], list[Path]()
    others: dict[str, Path] = {}
    for name in names:
        paths = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        inside = [f for path in map(Path, paths) for f in files_in(path, hidden)]
        reads = {f: is_read(f, endings) for f in inside}
        found = sorted(str(f) for f in inside if reads[f])
        others |= {os.path.realpath(f): f for f in inside if not reads[f]}
        if not found:
            problems.append(f"{name}: {how_to_convert(inside)}; can read {', '.join(endings)}")
        for file in found:
            files.setdefault(file_id(file), file)
    raise_if_any(problems)
    if pointers := [f for f in files.values() if is_lfs_pointer(Path(f))]:
        held = f"{pointers[0]}: a git-lfs pointer, not the file itself"
        raise UserError(f"{held} (one of {len(pointers):,}); type git lfs pull in its folder")
    if others:
        kinds = ", ".join(sorted({f.suffix or f.name for f in others.values()})[:5])
        first = next(iter(others.values()))
        warn(f"{len(others):,} files are not read ({kinds}), such as {first}")
    if hidden:
        warn(f"{len(hidden):,} names begin with a dot and are skipped, such as {hidden[0]}")
    return list(files.values())


def files_in(path: Path, hidden: list[Path]) -> Iterator[Path]:
    """
    Yield the file, or all files in a folder and its subfolders, following links. Names that begin
    with a dot go to `hidden` instead. Raises OSError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    if not path.is_dir():
        yield path
        return
    entered = set()  # a link may lead back to a folder above it
    for folder, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        if file_id(folder) in entered:
            folders.clear()
            continue
        entered.add(file_id(folder))
        hidden += [Path(folder, name) for name in folders + files if name.startswith(".")]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def file_id(name: str) -> tuple:
    """Return an id that is the same for every name of a file or folder."""
    stat = os.stat(name)
    return stat.st_dev, stat.st_ino or os.path.realpath(name)  # st_ino is 0 on some network disks


def is_read(file: Path, endings: tuple[str, ...]) -> bool:
    """
    Return True if a file is one to read. A .json file is read if its first two lines are objects,
    as in jsonl; most other .json files hold one object or one list.
    """
    name = file.name.lower()
    if not (name.endswith(endings) and file.is_file()):
        return False
    if not name.endswith(".json") or is_lfs_pointer(file):
        return True
    try:
        first = [
            json.loads(line.decode("utf-8-sig")) for _, line in islice(read_lines(str(file)), 2)
        ]
    except (ValueError, RecursionError):
        return False
    return len(first) == 2 and all(isinstance(row, dict) for row in first)


def how_to_convert(others: list[Path]) -> str:
    """Say how to convert `others`, none of which this program can read."""
    if not others:
        return "no such file, or no files there"
    # In a folder that save_to_disk made, only the .arrow files can be converted.
    first = next((file for file in others if file.suffix == ".arrow"), others[0])
    kind = first.suffix.lower()
    if kind not in (".arrow", ".csv", ".json"):
        return "save it as text first"
    is_alone = sum(file.suffix == first.suffix for file in others) == 1
    files = str(first if is_alone else first.with_name(f"*{first.suffix}"))
    load = f"load_dataset({kind[1:]!r}, data_files={files!r}, split='train')"
    if first.with_name("state.json").exists():  # by save_to_disk; map() adds cache-*.arrow files
        load = f"load_from_disk({str(first.parent)!r})"
    save = f"to_parquet({str(first.with_suffix('.parquet'))!r})"
    return f'convert it to parquet: python -c "from datasets import *; {load}.{save}"'


def hub_files(dataset: str, name: str | None, revision: str | None) -> tuple[list[str], str | None]:
    """
    Return the URLs of a hub dataset's training files, in the dataset's order, and their revision:
    the one given, or else the newest. Raises UserError.
    """
    try:
        import datasets
        from huggingface_hub import HfApi

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are still raised
        revision = revision or HfApi().dataset_info(dataset).sha
        builder = datasets.load_dataset_builder(dataset, name, revision=revision)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", ())]
    except Exception as error:  # offline, gated, misspelt
        raise UserError(f"{dataset}: {first_line(error)}; or give local files") from None
    if not files or not all(file.endswith(ROW_FILES) for file in files):
        raise UserError(f"{dataset}: no training split of parquet or jsonl files; choose another")
    return files, revision


# -----------------------------------------------------------------------------
# Rows of the source files


class Place(NamedTuple):
    """Locate a row by file, row group (0 if not parquet) and number within the row group."""

    file: int = 0
    group: int = 0
    row: int = 0
    # How much has been read of what begins here: documents of a shuffled window, or, with
    # --order=records, tokens of a document. manifest.json stores this name.
    given: int | None = None


Group = tuple[int, int]  # file number and row group number
Row = tuple[Place, str | None]  # the place after a row, and its text if it is a document


@dataclass
class Source:
    """Read the rows of a list of files. Blank lines and blank text files do not count as rows."""

    files: list[str]
    field: str = FIELD  # the field that holds the text, in parquet and jsonl
    encoding: str | None = None  # of text files that are neither UTF-8 nor UTF-16
    keeps_blank: bool = False  # treat blank text as a document, as llm.c does
    footers: dict[str, bytes] = dataclass_field(default_factory=dict)  # parquet, compressed

    def rows(self, begin: Place, groups: list[Group] | None = None) -> Iterator[Row]:
        """
        Yield the rows of all files, or of `groups` in that order, starting at `begin`. Raises
        UserError for a file that cannot be read, for a broken line, and if most of the first
        FIRST_ROWS rows of a file have no text. A smaller row group is not enough to judge by.
        """
        parts: list[tuple[int, int | None]]
        if groups is None:
            parts = [(file, None) for file in range(begin.file, len(self.files))]
        else:
            parts = [*groups[groups.index((begin.file, begin.group)) :]]
        for n, (file, group) in enumerate(parts):
            place = Place(file, group or 0) if n else begin
            is_checked = place == Place(file) and not self.files[file].lower().endswith(TEXT_FILES)
            seen = without = 0
            for after, text in self.read_with_retries(place, group):
                seen += 1
                without += text is None
                if seen == FIRST_ROWS and is_checked:
                    self.check_field(file, without, seen)
                yield after, text
            if seen < FIRST_ROWS and is_checked and self.is_whole(file, group):
                self.check_field(file, without, seen)

    def is_whole(self, file: int, group: int | None) -> bool:
        """Return True if the row group is the whole file."""
        name = self.files[file]
        return group is None or not is_parquet(name) or self.footer(name).num_row_groups == 1

    def check_field(self, file: int, without: int, rows: int) -> None:
        if 2 * without > rows:
            held = f"{without:,} of the first {rows:,} rows hold no text in the field {self.field}"
            name = self.files[file]
            if is_parquet(name):
                fields = column_types(self.footer(name).schema.to_arrow_schema())
            else:
                fields = jsonl_fields(name, self.field)
            raise UserError(f"{name}: {held}; {list_fields(fields)}; give --text_field=NAME")

    def row_groups(self) -> list[int]:
        """Count the row groups of each file, reading only the footers of parquet files."""
        # disable=None shows the bar on a terminal only
        files = tqdm(self.files, desc="row groups", unit="file", disable=None)
        return [self.footer(f).num_row_groups if is_parquet(f) else 1 for f in files]

    def group_bytes(self) -> list[int]:
        """
        Return the approximate bytes of text in each row group, file by file. Files that are not
        parquet count as one row group of their file size.
        """
        sizes: list[int] = []
        for name in tqdm(self.files, desc="sizes", unit="file", disable=None):
            if is_parquet(name):
                footer = self.footer(name)  # parsed once, for up to a thousand row groups
                groups = map(footer.row_group, range(footer.num_row_groups))
                sizes += [text_bytes(group, self.field) for group in groups]
            else:
                sizes.append(with_retries(name, partial(file_size, name)))
        return sizes

    def footer(self, name: str):
        """Return a parquet file's metadata, downloaded once and kept compressed in memory."""
        import pyarrow.parquet

        if name not in self.footers:
            self.footers[name] = with_retries(name, lambda: read_footer(name))
        return pyarrow.parquet.read_metadata(io.BytesIO(zlib.decompress(self.footers[name])))

    def read_with_retries(self, place: Place, group: int | None) -> Iterator[Row]:
        """
        Yield the rows of a file, or of one of its row groups, starting at a place. Retries a file
        on the hub for an hour.
        """
        name = self.files[place.file]
        failures = 0
        while True:
            try:
                for after, text in self.read(place, group):
                    yield after, text
                    place = after
                    failures = 0
                return
            except UserError:
                raise
            except Exception as error:
                wait_or_raise(name, error, failures)
                failures += 1

    def read(self, place: Place, group: int | None) -> Iterator[Row]:
        # To read CSV: write a reader like those below with csv.DictReader, call it here, and add
        # ".csv" to ROW_FILES.
        name = self.files[place.file]
        if is_parquet(name):
            return self.read_parquet(name, place, group)
        if name.lower().endswith(TEXT_FILES):
            return read_text(name, place, self.encoding)
        return self.read_jsonl(name, place)

    def read_parquet(self, name: str, place: Place, group: int | None) -> Iterator[Row]:
        """
        Yield the rows of one row group or of all, starting at a place. Uses pyarrow directly,
        because the datasets library reads about 300 MB ahead of a slow consumer, and downloads the
        rows that a continued preparation skips.
        """
        import pyarrow.parquet

        footer = self.footer(name)
        with open_ranges(name) as file:
            # With pre_buffer, pyarrow would keep every downloaded byte until the file is closed.
            parquet = pyarrow.parquet.ParquetFile(file, metadata=footer, pre_buffer=False)
            fields = column_types(parquet.schema_arrow)
            if not TEXT_COLUMN.match(fields.get(self.field, "")):
                problem = f"{name}: no text in the field {self.field}; {list_fields(fields)}"
                raise UserError(f"{problem}; give --text_field=NAME")
            row = place.row
            for n in range(place.group, footer.num_row_groups) if group is None else [group]:
                rows = footer.row_group(n).num_rows
                if row >= rows:
                    row -= rows  # already read, so do not download it again
                    continue
                for text in self.read_group(parquet, n, row):
                    row += 1
                    yield Place(place.file, n, row), text
                row = 0

    def read_group(self, parquet, group: int, row: int) -> Iterator[str | None]:
        """Yield the texts of a row group, starting at `row`."""
        import pyarrow

        begin = 0
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.field]):
            column = batch.column(0)[max(row - begin, 0) :]
            begin += len(batch)
            for content in column.cast(pyarrow.large_binary()).to_pylist():
                # invalid UTF-8 becomes U+FFFD
                text = None if content is None else content.decode(errors="replace")
                yield as_document(text, self.keeps_blank)

    def read_jsonl(self, name: str, place: Place) -> Iterator[Row]:
        """Yield the rows of a jsonl file: each line that is not blank holds one JSON object."""
        for number, line in read_lines(name, place.row):
            try:
                # Files from Windows may begin with a byte-order mark.
                row = json.loads(line.decode().removeprefix("\ufeff").rstrip())
                text = row.get(self.field)
            except (ValueError, AttributeError, RecursionError) as error:
                problem = f"{name}: line {number:,} is not a JSON object ({first_line(error)})"
                raise UserError(f"{problem}; {how_to_mend(line, error)}") from None
            yield Place(place.file, 0, number), as_document(text, self.keeps_blank)


def text_bytes(row_group, field: str) -> int:
    """Return the uncompressed bytes of a field in a parquet row group; 0 without that field."""
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def wait_or_raise(name: str, error: Exception, failures: int) -> None:
    """Wait before retrying a file on the hub. Raises UserError if a retry cannot help."""
    problem = f"{name}: {first_line(error)}"  # the library's message
    # Waiting does not repair a damaged file or create a missing one.
    is_final = isinstance(error, ValueError | EOFError | FileNotFoundError)
    if is_final or "://" not in name or failures == len(PAUSES):
        raise UserError(problem) from None
    warn(f"{problem}; trying again in {PAUSES[failures]} s")
    time.sleep(PAUSES[failures])


def with_retries(name: str, read: Callable) -> Any:
    failures = 0
    while True:
        try:
            return read()
        except Exception as error:
            wait_or_raise(name, error, failures)
            failures += 1


def open_ranges(name: str):
    """Open a file so that only the requested byte ranges are downloaded, without read-ahead."""
    import fsspec

    system, path = fsspec.url_to_fs(name)
    return system.open(path, cache_type="none")


def file_size(name: str) -> int:
    import fsspec

    system, path = fsspec.url_to_fs(name)
    return system.size(path)


def read_footer(name: str) -> bytes:
    import pyarrow.parquet

    packed = io.BytesIO()
    with open_ranges(name) as file:
        pyarrow.parquet.read_metadata(file).write_metadata_file(packed)
    return zlib.compress(packed.getvalue(), 1)


def how_to_mend(line: bytes, error: Exception) -> str:
    """Say how to repair a file with this line; suggest a command only if no row would be lost."""
    if isinstance(error, UnicodeDecodeError):
        return "convert the file to UTF-8: iconv -f ENCODING -t utf-8 FILE > NEW"
    text = line.decode(errors="replace").removeprefix("\ufeff").strip()
    if text.endswith(",") and is_object(text[:-1]):
        return "it ends in a comma; remove such commas: sed 's/,[[:space:]]*$//' FILE > NEW"
    rows = text.split("\r" if "\r" in text else "\n")
    if len(rows) > 1 and all(is_object(row) for row in rows if row.strip()):
        return "its lines end in CR; convert them: tr '\\r' '\\n' < FILE > NEW"
    at = error.pos if isinstance(error, json.JSONDecodeError) else 0
    spans_lines = line.endswith(b"\n") and at >= len(text) and text.endswith(("{", "[", ","))
    if spans_lines or text.startswith("["):
        return "write one object per line: jq -c 'arrays[], objects' FILE > NEW"
    if not line.endswith(b"\n"):
        return "this is the last line, so the file may be cut off: get it again"
    return "fix that line"


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(name: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each non-blank line after the first `first`, numbered from 1."""
    import fsspec

    is_zstd = name.lower().endswith(".zst")
    with fsspec.open(name, compression=None if is_zstd else "infer") as file:
        if is_zstd:
            import pyarrow

            # fsspec's own zstd reader ends a truncated file without an error.
            file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        # Without this buffer, every line of a file on the hub would copy megabytes.
        lines = io.BufferedReader(file, 2**20)
        for number, line in enumerate(islice(lines, first, None), first + 1):
            if not line.isspace():
                yield number, line


def read_text(name: str, place: Place, encoding: str | None) -> Iterator[Row]:
    """Yield a text file as one row, or as several if <|endoftext|> separates them in a .txt."""
    whole = decode(name, encoding)
    texts = END_OF_TEXT.split(whole) if name.lower().endswith(".txt") else [whole]
    rows = [*filter(as_document, texts)]
    if len(texts) > 1:
        say(f"{name}: {len(rows):,} documents, separated by <|endoftext|>")
    for row in range(place.row, len(rows)):
        yield Place(place.file, 0, row + 1), rows[row]


def as_document(text: object, keeps_blank: bool = False) -> str | None:
    if not isinstance(text, str):
        return None
    return text if keeps_blank or (text and not text.isspace()) else None


def decode(name: str, given: str | None) -> str:
    """
    Decode a text file: as UTF-16 if it begins with that byte-order mark, else as UTF-8, else in the
    `given` encoding or FALLBACK, with a warning. Lines end in LF. Raises UserError if it is not
    text.
    """
    content = Path(name).read_bytes()
    unicode = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    problems = []
    for encoding in (unicode, given or FALLBACK):
        try:
            text = content.decode(encoding)
        except (UnicodeError, LookupError) as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
            line = 1 + content[:at].count(b"\n")
            problem = f"line {line:,} is not {encoding}: {content[at : at + 8]!r}"
            if encoding == unicode and is_damaged(content):
                hint = "to drop the broken bytes: iconv -c -f utf-8 -t utf-8 FILE > NEW"
                raise UserError(f"{name}: {problem}; {hint}") from None
            problems.append(problem if isinstance(error, UnicodeError) else first_line(error))
            continue
        controls = len(CONTROLS.findall(text))
        if controls > 5 + MOST_CONTROLS * len(text):
            problems.append(f"{controls:,} NULs and control characters in {encoding}")
            if given:
                continue
            break
        if encoding != unicode:
            words = " ".join(re.findall(r"\S*[^\x00-\x7f]\S*", text[:100_000]))[:40]
            warn(f"{name}: {problems[0]}; read as {encoding}: {words!r}; or give --encoding=NAME")
        # Normalise line ends, so that every operating system makes the same tokens.
        return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    raise UserError(f"{name}: {'; '.join(problems)}; leave it out, or give its --encoding=NAME")


def is_damaged(content: bytes) -> bool:
    """Return True for Unicode with a few broken bytes; in another encoding most would be broken."""
    lenient = content.decode(errors="replace")
    broken = lenient.count("\ufffd")
    valid = len(lenient) - broken - len(lenient.encode("ascii", "ignore"))
    return valid > broken or content.startswith(UTF16_MARKS)


# -----------------------------------------------------------------------------
# What messages say


def column_types(schema) -> dict[str, str]:
    return {column.name: str(column.type) for column in schema}


def jsonl_fields(name: str, field: str) -> dict[str, str]:
    """Return the fields and types of the first row without text."""
    rows = (json.loads(line.decode().removeprefix("\ufeff")) for _, line in read_lines(name))
    row = next(row for row in rows if not as_document(row.get(field)))
    return {key: type(value).__name__ for key, value in row.items()}


def list_fields(fields: dict[str, str]) -> str:
    listed = ", ".join(f"{name} ({kind})" for name, kind in fields.items())
    return f"fields: {listed[:200]}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}"
