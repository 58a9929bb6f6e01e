"""
Read documents from the rows of parquet, jsonl and text files, local or on the Hugging Face hub.

A document is a row whose text field is not blank, or a text file that is not blank. Documents come
in the order of the files and their rows, or in the order of a list of row groups (see order.py).
Training shuffles windows of their tokens (see loader.py). files.py lists the files.
"""

import io
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from common.console import UserError, say, warn
from common.files import UTF16_MARKS
from data.files import TEXT_FILES, first_line, is_parquet, parse_line, read_lines

FIELD = "text"
MISSING = object()  # the value of a field that a row does not have, unlike null
FIRST_ROWS = 1000  # rows of a file to read before deciding that --text_field is wrong
BATCH_ROWS = 64  # parquet rows to decode at once; few, because each may be a book
# parquet column types that can hold text
TEXT_COLUMN = re.compile("(dictionary<values=)?(large_)?(string|binary)|null")
# Separates the documents in one .txt file, as in TinyStories. Not in .md and .py, which may just
# mention it.
END_OF_TEXT = re.compile(r"<\|endoftext\|>\n?")
# Seconds to wait before each retry of a file on the hub, an hour in all. Reading resumes at the row
# where it failed. The hub's own library has retried several times before that.
PAUSES = (5, 10, 20, 40, 80, 160, 320, *[600] * 5)
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # all but tab, newline and page break
MOST_CONTROLS = 0.001  # largest fraction of control characters in a text


class Place(NamedTuple):
    """Locate a row by file, row group (0 if not parquet) and number within the row group."""

    file: int = 0
    group: int = 0
    row: int = 0
    # How many documents of a shuffled window that begins here have been read. manifest.json stores
    # this name.
    given: int | None = None


Group = tuple[int, int]  # file number and row group number
Row = tuple[Place, str | None]  # the place after a row, and its text, "" if it is blank


@dataclass
class Source:
    """Read the rows of a list of files. Blank lines and blank text files do not count as rows."""

    files: list[str]
    field: str = FIELD  # the field that holds the text, in parquet and jsonl
    encoding: str | None = None  # for text files that are neither UTF-8 nor UTF-16
    # of parquet files, by name; compressed
    footers: dict[str, bytes] = dataclass_field(default_factory=dict)

    def rows(self, begin: Place) -> Iterator[Row]:
        """Yield the rows of all files from `begin` on. Raises UserError as file_rows() does."""
        for file in range(begin.file, len(self.files)):
            yield from self.file_rows(begin if file == begin.file else Place(file))

    def file_rows(self, begin: Place, one_group: bool = False) -> Iterator[Row]:
        """
        Yield the rows of a file, or only of the row group, from `begin` on. Raises UserError for a
        file that cannot be read, for a broken line, and if most of the first FIRST_ROWS rows have
        no text, or text full of control characters. A shorter row group is not enough to judge by.
        """
        name = self.files[begin.file]
        rows = self.read_with_retries(begin, one_group)
        if begin == Place(begin.file) and not name.lower().endswith(TEXT_FILES):
            first = [*islice(rows, FIRST_ROWS)]
            is_part = one_group and is_parquet(name) and self.footer(name).num_row_groups > 1
            if len(first) == FIRST_ROWS or not is_part:
                self.check_field(name, [text for _, text in first])
            yield from first
        yield from rows

    def check_field(self, name: str, first: list[str | None]) -> None:
        """Raise UserError if most of a file's first rows, without blank ones, hold no text."""
        readable = [is_text(text) for text in first if text != ""]
        without = readable.count(False)
        if 2 * without <= len(readable):
            return
        rows = f"{without:,} of the first {len(first):,} rows"
        held = f"{rows} have no readable text in their field {self.field!r}"
        raise UserError(f"{name}: {held}; give --text_field=NAME")

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
                sizes.append(with_retries(name, file_size))
        return sizes

    def footer(self, name: str):
        """Return a parquet file's metadata, downloaded once and kept compressed in memory."""
        import pyarrow.parquet

        if name not in self.footers:
            self.footers[name] = with_retries(name, read_footer)
        return pyarrow.parquet.read_metadata(io.BytesIO(zlib.decompress(self.footers[name])))

    def read_with_retries(self, place: Place, one_group: bool) -> Iterator[Row]:
        """
        Yield the rows of a file, or of one of its row groups, starting at a place. Retries a file
        on the hub for an hour.
        """
        name = self.files[place.file]
        failures = 0
        while True:
            try:
                for after, text in self.read(place, one_group):
                    yield after, text
                    place = after
                    failures = 0
                return
            except UserError:
                raise
            except Exception as error:
                wait_or_raise(name, error, failures)
                failures += 1

    def read(self, place: Place, one_group: bool) -> Iterator[Row]:
        # To read CSV: write a reader like those below with csv.DictReader, call it here, and add
        # ".csv" to ROW_FILES.
        name = self.files[place.file]
        if is_parquet(name):
            return self.read_parquet(name, place, one_group)
        if name.lower().endswith(TEXT_FILES):
            return read_text(name, place, self.encoding)
        return self.read_jsonl(name, place)

    def read_parquet(self, name: str, place: Place, one_group: bool) -> Iterator[Row]:
        """
        Yield the rows of one row group or of all, starting at a place. Uses pyarrow directly,
        because the datasets library downloads the rows that a continued preparation skips.
        """
        import pyarrow.parquet

        footer = self.footer(name)
        with open_ranges(name) as file:
            # With pre_buffer, pyarrow would keep every downloaded byte until the file is closed.
            parquet = pyarrow.parquet.ParquetFile(file, metadata=footer, pre_buffer=False)
            columns = parquet.schema_arrow
            kind = str(columns.field(self.field).type) if self.field in columns.names else "absent"
            if not TEXT_COLUMN.match(kind):
                problem = f"{name}: no text in the field {self.field!r} ({kind})"
                there = ", ".join(columns.names)
                raise UserError(f"{problem}; give --text_field=NAME, one of {there}")
            last = place.group if one_group else footer.num_row_groups - 1
            for n in range(place.group, last + 1):
                done = place.row if n == place.group else 0
                if done < footer.row_group(n).num_rows:  # the group has rows left to read
                    for row, text in enumerate(self.read_group(parquet, n, done), done + 1):
                        yield Place(place.file, n, row), text

    def read_group(self, parquet, group: int, row: int) -> Iterator[str | None]:
        """Yield the texts of a row group, starting at `row`. Broken UTF-8 becomes U+FFFD."""
        import pyarrow

        begin = 0
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.field]):
            column = batch.column(0)[max(row - begin, 0) :]
            begin += len(batch)
            for content in column.cast(pyarrow.large_binary()).to_pylist():
                yield as_document(None if content is None else content.decode(errors="replace"))

    def read_jsonl(self, name: str, place: Place) -> Iterator[Row]:
        """Yield the rows of a jsonl file: each line that is not blank holds one JSON object."""
        for number, line in read_lines(name, place.row):
            try:
                text = parse_line(line).get(self.field, MISSING)
            except (ValueError, AttributeError, RecursionError) as error:
                problem = f"is not a JSON object ({first_line(error)})"
                if isinstance(error, UnicodeDecodeError):
                    problem = "is not UTF-8; convert the file with iconv"
                if line.lstrip().startswith(b"["):
                    problem = "holds an array; write one object per line"
                raise UserError(f"{name}: line {number:,} {problem}") from None
            yield Place(place.file, 0, number), as_document(text)


def text_bytes(row_group, field: str) -> int:
    """Return the uncompressed bytes of a field in a parquet row group; 0 without that field."""
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)


def wait_or_raise(name: str, error: Exception, failures: int) -> None:
    """Wait before retrying a file on the hub. Raises UserError if a retry cannot help."""
    problem = f"{name}: {first_line(error)}"  # the library's message
    # Waiting does not repair a damaged file or create a missing one.
    is_final = isinstance(error, ValueError | EOFError | FileNotFoundError)
    if is_final or "://" not in name or failures == len(PAUSES):
        raise UserError(problem) from None
    warn(f"{problem}; trying again in {PAUSES[failures]} s")
    time.sleep(PAUSES[failures])


def with_retries(name: str, read: Callable[[str], Any]) -> Any:
    for failures in count():
        try:
            return read(name)
        except Exception as error:
            wait_or_raise(name, error, failures)


def open_ranges(name: str):
    """Open a file so that only the requested byte ranges are downloaded, without read-ahead."""
    import fsspec

    if "://" not in name:
        return open(name, "rb")
    system, path = fsspec.url_to_fs(name)
    return system.open(path, cache_type="none")


def file_size(name: str) -> int:
    with open_ranges(name) as file:
        return file.seek(0, io.SEEK_END)


def read_footer(name: str) -> bytes:
    import pyarrow.parquet

    packed = io.BytesIO()
    with open_ranges(name) as file:
        pyarrow.parquet.read_metadata(file).write_metadata_file(packed)
    return zlib.compress(packed.getvalue(), 1)


def read_text(name: str, place: Place, encoding: str | None) -> Iterator[Row]:
    """Yield a text file as one row, or as several if <|endoftext|> separates them in a .txt."""
    try:
        text = decode(Path(name).read_bytes(), encoding)
    except UserError as error:
        hint = "another" if encoding else "its"
        hint += " encoding, such as --encoding=cp1252 (docs/data.md lists others)"
        raise UserError(f"{name}: {error}; leave the file out, or give {hint}") from None
    # Normalise line endings, so that every operating system produces the same tokens.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    whole = re.sub("(?m)^\ufeff", "", text)  # byte-order marks; joined files may have several
    texts = END_OF_TEXT.split(whole) if name.lower().endswith(".txt") else [whole]
    rows = [*filter(as_document, texts)]
    if len(texts) > 1:
        say(f"{name}: {len(rows):,} documents, separated by <|endoftext|>")
    for row in range(place.row, len(rows)):
        yield Place(place.file, 0, row + 1), rows[row]


def as_document(text: object) -> str | None:
    """Return a row's text, "" if the row is blank or null, or None if it holds no text."""
    if text is None:
        return ""
    if not isinstance(text, str):
        return None
    return "" if text.isspace() else text


# -----------------------------------------------------------------------------
# Bytes to text


def decode(content: bytes, given: str | None) -> str:
    """
    Decode a text as UTF-16 if it begins with a UTF-16 byte-order mark, else as UTF-8. If that
    fails, use the `given` encoding. Raises UserError if the result is not text.
    """
    problem = ""
    unicode = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    for encoding in (unicode, given) if given else (unicode,):
        try:
            text = content.decode(encoding)
        except LookupError as error:
            raise UserError(f"{problem}; {first_line(error)}") from None
        except UnicodeError as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
            line = 1 + content[:at].count(b"\n")
            problem = f"line {line:,} is not {encoding}"
            continue
        controls = too_many_controls(text)
        if not controls:
            return text
        problem = f"control characters, such as NUL: {controls:,} in {encoding}"
    raise UserError(problem)


def too_many_controls(text: str) -> int:
    """Count the control characters of a text, or return 0 if they are few enough for a text."""
    controls = len(CONTROLS.findall(text))
    most = min(5 + MOST_CONTROLS * len(text), len(text) / 4)
    return controls if controls > most else 0


def is_text(text: str | None) -> bool:
    # U+FFFD stands for a broken byte
    return text is not None and not too_many_controls(text.replace("\ufffd", "\0"))
