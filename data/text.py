"""
Read documents from the rows of parquet, jsonl and text files, local or on the Hugging Face hub.

A document is a row whose text field is not blank, or a text file that is not blank. Documents come
in the order of the files and their rows, or with the row groups of all files shuffled by a seed.
Training shuffles windows of their tokens (see loader.py).
"""

import dataclasses
import glob
import io
import json
import math
import os
import random
import re
import zlib
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.console import UserError, one_line, warn
from common.files import UTF16_MARKS

TEXT_FILES = (".txt", ".md", ".py")
# A plain .json is refused, because most hold one object or one list.
PACKED = tuple(f".{e}{z}" for e in ("jsonl", "ndjson", "json") for z in (".gz", ".zst"))
ROW_FILES = (".parquet", ".jsonl", ".ndjson", *PACKED)
HUB_TIMEOUT = 20  # seconds
FIELD = "text"
# A larger text file is read in pieces, each a document of its own, so that no file has to fit into
# memory. Pieces end with a line.
LARGE_FILE = 2**26  # bytes
PIECE = 2**20  # bytes, plus the rest of the line
# Rows of a jsonl file after which a field without text is refused. Otherwise a wrong name would be
# found at the end of the source, after a night of downloading it.
FIRST_ROWS = 1000
BATCH_ROWS = 64  # parquet rows to decode at once; few, because each may be a book
# Separates the documents in one .txt file, as in TinyStories. Not in .md and .py, which may just
# mention it.
END_OF_TEXT = re.compile(r"<\|endoftext\|>\n?")
# The characters that one document gives to validation: few, so that many documents give some, but
# more than most web pages have, so that these are held out whole.
HELD_OUT_PIECE = 20_000
MOST_HELD_OUT = 50_000_000  # characters; about 11M GPT-2 tokens

# -----------------------------------------------------------------------------
# Which files


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    List the files of paths, folders and patterns in the order given. A file that has several names
    is listed once. Warns about files with other endings, which are left out. Raises UserError for a
    name with nothing to read, and OSError.
    """
    files: dict[object, str] = {}  # by real path, or by inode where a file has hard links
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
            stat = os.stat(file)  # raises OSError for a broken link
            # A disk may give all its files one inode number, but then none has hard links.
            is_linked = stat.st_nlink > 1
            key = (stat.st_dev, stat.st_ino) if is_linked else os.path.realpath(file)
            files.setdefault(key, file)
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


# -----------------------------------------------------------------------------
# Rows


class Place(NamedTuple):
    """
    Locate a row in the order of reading: how many row groups, and how many rows of the next one,
    come before it. divide() also notes how many characters it has read and held out before that.
    """

    group: int = 0
    row: int = 0
    read: int = 0
    held: int = 0


class Document(NamedTuple):
    """Holds a row of a source. A row without text is only counted."""

    after: Place  # where the next document begins
    text: str
    held_out: str = ""  # text cut off its end for validation, or all of it


@dataclasses.dataclass
class Source:
    """
    Read the rows of a list of files. Blank lines and blank text files do not count as rows. A row
    group is a part of a parquet file that can be read on its own; any other file counts as one.
    Raises UserError for a file beside its packed copy, which `zstd` and `gzip -k` leave.
    """

    files: list[str]
    field: str = FIELD  # the field that holds the text, in parquet and jsonl
    seed: int | None = None  # shuffles the row groups; None: in the order of the files
    # the metadata of parquet files, each downloaded once, and compressed to save memory
    footers: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        twins: dict[str, str] = {}
        for name in self.files:
            if (twin := twins.setdefault(re.sub(r"\.(gz|zst)$", "", name), name)) != name:
                raise UserError(f"{twin}, {name}: the same text twice; give only one of them")

    def size(self) -> int:
        """Return how many bytes of text the parquet files hold, and how many bytes the others."""
        size = 0
        for name in self.files:
            if not is_parquet(name):
                size += os.path.getsize(name)
                continue
            for group in self.footer(name).to_dict()["row_groups"]:
                texts = [c for c in group["columns"] if c["path_in_schema"] == self.field]
                size += sum(column["total_uncompressed_size"] for column in texts)
        return size

    @cached_property
    def groups(self) -> list[tuple[str, int]]:
        """
        List (file, number in the file) of all row groups in the order of reading. Reads only the
        footers of parquet files.
        """
        counts = {f: self.footer(f).num_row_groups if is_parquet(f) else 1 for f in self.files}
        groups = [(name, number) for name in self.files for number in range(counts[name])]
        if self.seed is not None:
            random.Random(self.seed).shuffle(groups)
        return groups

    def rows(self, begin: Place) -> Iterator[tuple[Place, str]]:
        """
        Yield the place after each row from `begin` on, and its text, "" if it holds none. Raises
        UserError as group_rows() does.
        """
        for number in range(begin.group, len(self.groups)):
            yield from self.group_rows(number, begin.row if number == begin.group else 0)

    def group_rows(self, number: int, row: int) -> Iterator[tuple[Place, str]]:
        """
        Yield the rows of a row group after the first `row`. Raises UserError for a file or line
        that cannot be read, and if the hub fails, whose library has then tried for half a minute.
        """
        name, _ = self.groups[number]
        try:
            for value in islice(self.read(number), row, None):
                row += 1
                yield Place(number, row), text_of(value)
        except UserError:
            raise
        except Exception as error:
            hint = "; convert it with iconv" if isinstance(error, UnicodeError) else ""
            hint = "; check the network, then repeat the command" if "://" in name else hint
            raise UserError(f"{name}: {one_line(error)}{hint}") from None

    def footer(self, name: str):
        """Return a parquet file's metadata. Raises UserError."""
        from pyarrow.parquet import read_metadata

        if name not in self.footers:
            packed = io.BytesIO()
            try:
                with open_ranges(name) as file:
                    read_metadata(file).write_metadata_file(packed)
            except Exception as error:  # a damaged file, or no network
                raise UserError(f"{name}: {one_line(error)}") from None
            self.footers[name] = zlib.compress(packed.getvalue(), 1)
        return read_metadata(io.BytesIO(zlib.decompress(self.footers[name])))

    def read(self, number: int) -> Iterator[object]:
        # To read CSV: write a reader like those below with csv.DictReader, call it here, and add
        # ".csv" to ROW_FILES.
        name, group = self.groups[number]
        if is_parquet(name):
            return self.read_parquet(name, group)
        if name.lower().endswith(TEXT_FILES):
            return read_text(name)
        return self.read_jsonl(name)

    def read_parquet(self, name: str, group: int) -> Iterator[bytes | None]:
        """
        Yield a field of the rows of a row group. Uses pyarrow directly, because the datasets
        library downloads the row groups that a continued preparation skips.
        """
        import pyarrow.parquet

        with open_ranges(name) as file:
            # With pre_buffer, pyarrow would keep every downloaded byte until the file is closed.
            parquet = pyarrow.parquet.ParquetFile(
                file, metadata=self.footer(name), pre_buffer=False
            )
            if self.field not in (there := parquet.schema_arrow.names):
                hint = f"give --text_field=NAME, one of {', '.join(there)}"
                raise UserError(f"{name}: has no field {self.field!r}; {hint}")
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.field]):
                yield from batch.column(0).cast(pyarrow.large_binary()).to_pylist()

    def read_jsonl(self, name: str) -> Iterator[object]:
        """
        Yield a field of each line of a jsonl file that is not blank. Raises UserError if the first
        FIRST_ROWS hold no text.
        """
        texts = 0
        for rows, (number, line) in enumerate(read_lines(name), 1):
            try:
                row = json.loads(line)
                value = row.get(self.field)
            except UnicodeDecodeError:
                row, value = {}, None
            except (ValueError, AttributeError, RecursionError) as error:
                problem = f"line {number:,} is not a JSON object ({one_line(error)})"
                raise UserError(f"{name}: {problem}") from None
            texts += bool(text_of(value))
            if rows == FIRST_ROWS and not texts:
                problem = f"no text in UTF-8 in the field {self.field!r} of the first {rows:,} rows"
                hint = f"give --text_field=NAME, one of {', '.join(row)}"
                raise UserError(f"{name}: {problem}; {hint}")
            yield value


def text_of(value: object) -> str:
    """Return a row's text, or "" if it is blank, not a string, or not UTF-8."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return ""
    return value if isinstance(value, str) and not value.isspace() else ""


def open_ranges(name: str):
    """Open a file so that only the requested byte ranges are downloaded, without read-ahead."""
    import fsspec

    if "://" not in name:
        return open(name, "rb")
    system, path = fsspec.url_to_fs(name)
    return system.open(path, cache_type="none")


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


def read_text(name: str) -> Iterator[str]:
    """
    Yield the documents of a text file: the file, several if <|endoftext|> separates them in a .txt,
    or pieces of a large file. Raises UnicodeDecodeError.
    """
    rest = ""
    for block in read_blocks(name):
        texts = END_OF_TEXT.split(rest + block) if name.lower().endswith(".txt") else [rest + block]
        rest = "" if len(texts[-1]) >= PIECE // 2 else texts.pop()
        yield from filter(text_of, texts)
    if text_of(rest):
        yield rest


def read_blocks(name: str) -> Iterator[str]:
    """
    Yield a text file as one string, or a large file in blocks that end with a line. Line ends
    become LF, so that every operating system produces the same tokens.
    """
    with open(name, "rb") as file:
        encoding = "utf-16" if file.read(2) in UTF16_MARKS else "utf-8-sig"
    size = PIECE if os.path.getsize(name) > LARGE_FILE else -1
    with open(name, encoding=encoding) as text:
        while block := text.read(size):
            if "\0" in block:  # as in UTF-16 without a mark
                raise UnicodeError("holds NUL, so it is not text in UTF-8")
            yield block + text.readline()


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
