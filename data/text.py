"""
Read documents from the rows of parquet, jsonl and text files, local or on the Hugging Face hub.

A document is a row whose text field is not blank, or a text file that is not blank. Documents come
in the order of the files and their rows, or with the row groups of all files shuffled by a seed.
Training shuffles windows of their tokens (see loader.py). files.py lists the files.
"""

import io
import math
import os
import random
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from tqdm import tqdm

from common.console import Unreachable, UserError, one_line, warn
from common.files import UTF16_MARKS
from data.files import TEXT_FILES, is_parquet, parse_line, read_lines

FIELD = "text"
MISSING = object()  # the value of a field that a row does not have, unlike null
# rows of a file to read before deciding that --text_field is wrong; fewer if they are long, because
# they are held in memory
FIRST_ROWS, FIRST_CHARACTERS = 1000, 2**22
# A larger text file is read in pieces, each a document of its own, so that no file has to fit into
# memory. Pieces end with a line.
LARGE_FILE = 2**26  # bytes
PIECE = 2**20  # bytes, plus the rest of the line
BATCH_ROWS = 64  # parquet rows to decode at once; few, because each may be a book
# parquet column types that can hold text
TEXT_COLUMN = re.compile("(dictionary<values=)?(large_)?(string|binary)|null")
# Separates the documents in one .txt file, as in TinyStories. Not in .md and .py, which may just
# mention it.
END_OF_TEXT = re.compile(r"<\|endoftext\|>\n?")
# Seconds to wait before each retry of a request to the hub, an hour in all. Reading resumes at the
# row where it failed. The hub's own library has retried several times before that.
PAUSES = (5, 10, 20, 40, 80, 160, 320, *[600] * 5)
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # all but tab, newline and page break
MOST_CONTROLS = 0.001  # largest fraction of control characters in a text
# The characters that one document gives to validation: few, so that many documents give some, but
# more than most web pages have, so that these are held out whole.
HELD_OUT_PIECE = 20_000
MOST_HELD_OUT = 50_000_000  # characters; about 11M GPT-2 tokens


class Place(NamedTuple):
    """
    Locate a row in the order of reading: how many row groups, and how many rows of the next one,
    come before it. divide() also notes how many characters it has read and held out before that.
    """

    group: int = 0
    row: int = 0
    read: int = 0
    held: int = 0


Row = tuple[Place, str | None]  # the place after a row, and its text, "" if it is blank


class Document(NamedTuple):
    """Holds a row of a source. A row without text is only counted."""

    after: Place  # where the next document begins
    text: str | None
    held_out: str = ""  # text cut off its end for validation, or all of it


@dataclass
class Source:
    """
    Read the rows of a list of files. Blank lines and blank text files do not count as rows. A row
    group is a part of a parquet file that can be read on its own; any other file counts as one.
    """

    files: list[str]
    field: str = FIELD  # the field that holds the text, in parquet and jsonl
    encoding: str | None = None  # for text files that are neither UTF-8 nor UTF-16
    seed: int | None = None  # shuffles the row groups; None: in the order of the files
    # compressed footers of parquet files, by name
    footers: dict[str, bytes] = dataclass_field(default_factory=dict)

    @cached_property
    def counts(self) -> list[int]:
        """Count the row groups of each file, reading only the footers of parquet files."""
        # disable=None shows the bar on a terminal only
        files = tqdm(self.files, desc="row groups", unit="file", disable=None)
        return [self.footer(f).num_row_groups if is_parquet(f) else 1 for f in files]

    @cached_property
    def groups(self) -> list[tuple[str, int]]:
        """List (file, number in the file) of all row groups in the order of reading."""
        files = zip(self.files, self.counts, strict=True)
        groups = [(name, number) for name, count in files for number in range(count)]
        if self.seed is not None:
            random.Random(self.seed).shuffle(groups)
        return groups

    def rows(self, begin: Place) -> Iterator[Row]:
        """Yield the rows from `begin` on. Raises UserError as group_rows() does."""
        for number in range(begin.group, len(self.groups)):
            yield from self.group_rows(number, begin.row if number == begin.group else 0)

    def group_rows(self, number: int, row: int = 0) -> Iterator[Row]:
        """
        Yield the rows of a row group after the first `row`. Raises UserError for a file that cannot
        be read, for a broken line, and if most of a file's first FIRST_ROWS rows have no text, or
        text full of control characters.
        """
        rows = self.read_with_retries(number, row)
        name, _ = self.groups[number]
        if row == 0 and not name.lower().endswith(TEXT_FILES):
            first: list[Row] = []
            room = FIRST_CHARACTERS
            for after, text in islice(rows, FIRST_ROWS):
                first.append((after, text))
                room -= len(text or "")
                if room < 0:
                    break
            # one of several short row groups is not enough to judge by
            is_part = is_parquet(name) and self.footer(name).num_row_groups > 1
            if len(first) == FIRST_ROWS or room < 0 or not is_part:
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

    def group_bytes(self) -> list[int]:
        """
        Return the approximate bytes of text in each row group, in the order of reading. Files that
        are not parquet count with their file size.
        """
        sizes: dict[tuple[str, int], int] = {}
        for name in tqdm(self.files, desc="sizes", unit="file", disable=None):
            if is_parquet(name):
                footer = self.footer(name)  # parsed once, for up to a thousand row groups
                for number in range(footer.num_row_groups):
                    sizes[name, number] = text_bytes(footer.row_group(number), self.field)
            else:
                sizes[name, 0] = file_size(name)
        return [sizes[group] for group in self.groups]

    def footer(self, name: str):
        """Return a parquet file's metadata, downloaded once and kept compressed in memory."""
        import pyarrow.parquet

        if name not in self.footers:
            self.footers[name] = read_footer(name)
        return pyarrow.parquet.read_metadata(io.BytesIO(zlib.decompress(self.footers[name])))

    def read_with_retries(self, number: int, row: int) -> Iterator[Row]:
        """Yield the rows of a row group after the first `row`. Retries if the hub fails."""
        name, _ = self.groups[number]
        failures = 0
        while True:
            try:
                for text in self.read(number, row):
                    row += 1
                    yield Place(number, row), text
                    failures = 0
                return
            except UserError:
                raise
            except Exception as error:
                # Waiting does not repair a damaged file or create a missing one.
                is_final = isinstance(error, ValueError | EOFError | FileNotFoundError)
                if is_final or "://" not in name:
                    raise UserError(f"{name}: {one_line(error)}") from None
                wait_or_raise(name, error, failures)
                failures += 1

    def read(self, number: int, row: int) -> Iterator[str | None]:
        # To read CSV: write a reader like those below with csv.DictReader, call it here, and add
        # ".csv" to ROW_FILES.
        name, group = self.groups[number]
        if is_parquet(name):
            return self.read_parquet(name, group, row)
        if name.lower().endswith(TEXT_FILES):
            return islice(read_text(name, self.encoding), row, None)
        return self.read_jsonl(name, row)

    def read_parquet(self, name: str, group: int, row: int) -> Iterator[str | None]:
        """
        Yield the texts of a row group after the first `row`. Uses pyarrow directly, because the
        datasets library downloads the rows that a continued preparation skips.
        """
        import pyarrow.parquet

        footer = self.footer(name)
        if row == footer.row_group(group).num_rows:
            return  # the last shard ended with this row group; do not download it for nothing
        with open_ranges(name) as file:
            # With pre_buffer, pyarrow would keep every downloaded byte until the file is closed.
            parquet = pyarrow.parquet.ParquetFile(file, metadata=footer, pre_buffer=False)
            columns = parquet.schema_arrow
            kind = str(columns.field(self.field).type) if self.field in columns.names else "absent"
            if not TEXT_COLUMN.match(kind):
                problem = f"{name}: no text in the field {self.field!r} ({kind})"
                there = ", ".join(columns.names)
                raise UserError(f"{problem}; give --text_field=NAME, one of {there}")
            yield from self.read_group(parquet, group, row)

    def read_group(self, parquet, group: int, row: int) -> Iterator[str | None]:
        """Yield the texts of a row group, starting at `row`. Broken UTF-8 becomes U+FFFD."""
        import pyarrow

        begin = 0
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.field]):
            column = batch.column(0)[max(row - begin, 0) :]
            begin += len(batch)
            for content in column.cast(pyarrow.large_binary()).to_pylist():
                yield as_document(None if content is None else content.decode(errors="replace"))

    def read_jsonl(self, name: str, row: int) -> Iterator[str | None]:
        """
        Yield the texts of a jsonl file after the first `row`: each line that is not blank holds one
        JSON object.
        """
        for number, line in islice(read_lines(name), row, None):
            try:
                text = parse_line(line).get(self.field, MISSING)
            except (ValueError, AttributeError, RecursionError) as error:
                problem = f"is not a JSON object ({one_line(error)})"
                if isinstance(error, UnicodeDecodeError):
                    problem = "is not UTF-8; convert the file with iconv"
                if line.lstrip().startswith(b"["):
                    problem = "holds an array; write one object per line"
                raise UserError(f"{name}: line {number:,} {problem}") from None
            yield as_document(text)


def text_bytes(row_group, field: str) -> int:
    """Return the uncompressed bytes of a field in a parquet row group; 0 without that field."""
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)


def wait_or_raise(name: str, error: Exception, failures: int) -> None:
    """
    Wait before asking the hub for `name` again. Raises Unreachable if it has failed for an hour.
    """
    problem = f"{name}: {one_line(error)}"  # the library's message
    if failures >= len(PAUSES):
        raise Unreachable(f"{problem}; check the network, then repeat the command") from None
    warn(f"{problem}; trying again in {PAUSES[failures]} s")
    time.sleep(PAUSES[failures])


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


def read_text(name: str, encoding: str | None) -> Iterator[str]:
    """
    Yield the documents of a text file: the file, several if <|endoftext|> separates them in a .txt,
    or pieces of a large file. Raises UserError.
    """
    rest = ""
    for block in read_blocks(name, encoding):
        texts = END_OF_TEXT.split(rest + block) if name.lower().endswith(".txt") else [rest + block]
        rest = "" if len(texts[-1]) >= PIECE // 2 else texts.pop()
        yield from filter(as_document, texts)
    if as_document(rest):
        yield rest


def read_blocks(name: str, encoding: str | None) -> Iterator[str]:
    """Yield a text file as one string, or a large file in blocks that end with a line."""
    lines = 0
    with open(name, "rb") as file:
        # In UTF-16, half of a character may look like a line's end.
        is_large = os.path.getsize(name) > LARGE_FILE and not file.peek(2).startswith(UTF16_MARKS)
        while content := file.read(PIECE if is_large else -1):
            content += file.readline()
            try:
                text = decode(content, encoding, lines)
            except UserError as error:
                hint = "another" if encoding else "its"
                hint += " encoding, such as --encoding=cp1252 (docs/data.md lists others)"
                problem = f"{name}: {error}; leave the file out, or give {hint}"
                raise UserError(problem) from None
            lines += content.count(b"\n")
            # Normalise line endings, so that every operating system produces the same tokens.
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            yield re.sub("(?m)^\ufeff", "", text)  # byte-order marks; joined files may have several


def as_document(text: object) -> str | None:
    """Return a row's text, "" if the row is blank or null, or None if it holds no text."""
    if text is None:
        return ""
    if not isinstance(text, str):
        return None
    return "" if text.isspace() else text


# -----------------------------------------------------------------------------
# Training and validation


def divide(
    source: Source, begin: Place, fraction: float, piece: float, most: float = math.inf
) -> Iterator[Document]:
    """
    Turn the rows from a place on into documents. Hold out about `fraction` of the text for
    validation, spread evenly over the text, until validation has `most` characters. What is held
    out depends only on the text before it.

    If validation has at most `fraction` of the text before a document, as it has before the first,
    that document gives its last `piece` characters, or all of them if it is shorter. If validation
    lacks more than a piece after a very long document, the document gives all that is lacking.
    """
    read, held = begin.read, begin.held
    for after, text in source.rows(begin):
        text = text or ""
        is_due = held <= fraction * read  # before this document, or long ones would be chosen more
        read += len(text)
        owed = fraction * read - held
        at = len(text)
        if text and held < most and (is_due or owed >= piece):
            at = find_split(text, int(max(owed, piece)))
            held += len(text) - at
        yield Document(after._replace(read=read, held=held), text[:at], text[at:])


def find_split(text: str, length: int) -> int:
    """
    Return the position at which to split off the end of a text, `length` characters long or up to
    half as long again: between paragraphs if possible, else between lines, else between words.
    """
    at = max(len(text) - length, 0)
    early = max(at - length // 2, 0)
    for mark in ("\n\n", "\n", " "):
        if mark in text[early:at]:
            return text.rindex(mark, early, at) + len(mark)
    return at


# -----------------------------------------------------------------------------
# Bytes to text


def decode(content: bytes, given: str | None, lines: int) -> str:
    """
    Decode a text as UTF-16 if it begins with a UTF-16 byte-order mark, else as UTF-8. If that
    fails, use the `given` encoding. Raises UserError if the result is not text, with the number of
    the line. `lines` is how many lines come before this text.
    """
    problem = ""
    unicode = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    for encoding in (unicode, given) if given else (unicode,):
        try:
            text = content.decode(encoding)
        except LookupError as error:
            raise UserError(f"{problem}; {one_line(error)}") from None
        except UnicodeError as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
            line = lines + 1 + content[:at].count(b"\n")
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
