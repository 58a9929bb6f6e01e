"""
Documents out of parquet, jsonl and text files, here or on the hub.

A document is a row whose text field holds more than blanks, or a text file that does. Documents
keep the order of the files and of their rows, or that of a list of row groups (order.py); training
shuffles windows of their tokens (loader.py).

    local_files    which files, in which order
    hub_files      the same for a dataset on the hub
    Source         their rows, from any Place on
"""

import glob
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
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
FALLBACK = "cp1252"  # of text files that are not Unicode: Windows' Latin-1
FIRST_ROWS = 1000  # of a file, which show whether the text field is the right one
BATCH_ROWS = 64  # of parquet, decoded at once; few, because each may be a book
TEXT_COLUMN = re.compile("(dictionary<values=)?(large_)?(string|binary)|null")  # of parquet
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except tabs, line ends and page ends
MOST_CONTROLS = 0.001  # of the characters of a text
# Between the documents of one .txt, as in TinyStories. In .md and .py people write about it.
END_OF_TEXT = re.compile(r"<\|endoftext\|>\n?")
# Seconds before a file on the hub that failed is opened again, at the same row: an hour in all. The
# hub's library has already retried several times.
PAUSES = (5, 10, 20, 40, 80, 160, 320, *[600] * 5)

# -----------------------------------------------------------------------------
# Which files

WITH_DATASETS = 'make parquet of it: python -c "from datasets import *; {}.to_parquet({!r})"'


def local_files(names: list[str], endings: tuple[str, ...]) -> list[str]:
    """
    List the files of some paths, folders and patterns in the order given, those of one folder or
    pattern sorted by name. A file that has several names is listed once. Files with other endings
    and, in folders, names that begin with a dot are left out and counted. Raises UserError for a
    name without any file, and for git-lfs pointers.
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
            problems.append(f"{name}: {how_to_convert(inside)}; read are {', '.join(endings)}")
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
    Yield a file, or the files of a folder and of all folders in it, links included. Names that
    begin with a dot are added to `hidden` instead. Raises OSError for a folder that cannot be read.
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
    """Return what all names of one file or folder share."""
    stat = os.stat(name)
    return stat.st_dev, stat.st_ino or os.path.realpath(name)  # some network disks number no files


def is_read(file: Path, endings: tuple[str, ...]) -> bool:
    """
    Return whether a file is one to read: of a .json, whether its first two lines are objects, as
    in jsonl. Most others hold one object or one list.
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
    """What to do with files of which none is read."""
    if not others:
        return "no such file, or none there"
    # of a folder that save_to_disk has made
    first = next((file for file in others if file.suffix == ".arrow"), others[0])
    kind = first.suffix.lower()
    parquet = str(first.with_suffix(".parquet"))
    if kind == ".arrow":
        load = f"load_from_disk({str(first.parent)!r})"
        return WITH_DATASETS.format(load, f"{first.parent}.parquet")
    if kind in (".csv", ".json"):
        load = f"load_dataset({kind[1:]!r}, data_files={str(first)!r}, split='train')"
        return WITH_DATASETS.format(load, parquet)
    if kind == ".feather":
        read = f"pandas.read_feather({str(first)!r}).to_parquet({parquet!r})"
        return f'make parquet of it: python -c "import pandas; {read}"'
    return "save it as text first"


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
    except Exception as error:  # offline, gated, misspelt
        raise UserError(f"{dataset}: {first_line(error)}; or give local files") from None
    if not files or not all(file.endswith(ROW_FILES) for file in files):
        raise UserError(f"{dataset}: no training split of parquet or jsonl files; choose another")
    return files, revision


# -----------------------------------------------------------------------------
# Their rows


class Place(NamedTuple):
    """Where a row is: in which file, in which of its row groups (0 if not parquet), and there."""

    file: int = 0
    group: int = 0
    row: int = 0
    given: int | None = None  # of a shuffled window that begins here: how many documents are read


Group = tuple[int, int]  # a file and one of its row groups
Row = tuple[Place, str | None]  # the place behind a row, and its text if it is a document


@dataclass
class Source:
    """The rows of some files. Blank lines and blank text files are no rows."""

    files: list[str]
    field: str = FIELD  # holds the text, in parquet and jsonl
    encoding: str | None = None  # of text files that are neither UTF-8 nor UTF-16
    keeps_blank: bool = False  # whether text of blanks is a document, as it is for llm.c
    footers: dict[str, bytes] = dataclass_field(default_factory=dict)  # of parquet files, packed

    def rows(self, begin: Place, groups: list[Group] | None = None) -> Iterator[Row]:
        """
        The rows from a place on: of all files, or of these row groups in this order. Raises
        UserError for a file that cannot be read, for a broken line, and if most of the first rows
        of a file have no text; of a few rows of a row group it does not judge.
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
            for behind, text in self.read_patiently(place, group):
                seen += 1
                without += text is None
                if seen == FIRST_ROWS and is_checked:
                    self.check_field(file, without, seen)
                yield behind, text
            if seen < FIRST_ROWS and is_checked and self.is_whole(file, group):
                self.check_field(file, without, seen)

    def is_whole(self, file: int, group: int | None) -> bool:
        """Whether this is all of a file."""
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
        """How many row groups each file has. Of a parquet file only the end is read."""
        # disable=None: shown on a terminal only
        files = tqdm(self.files, desc="row groups", unit="file", disable=None)
        return [self.footer(f).num_row_groups if is_parquet(f) else 1 for f in files]

    def group_bytes(self) -> list[int]:
        """
        About the size of the text in each row group, file by file: of a file that is not parquet,
        the size that it has.
        """
        sizes: list[int] = []
        for name in tqdm(self.files, desc="sizes", unit="file", disable=None):
            if is_parquet(name):
                footer = self.footer(name)  # once per file: it may have a thousand row groups
                groups = map(footer.row_group, range(footer.num_row_groups))
                sizes += [text_bytes(group, self.field) for group in groups]
            else:
                sizes.append(patiently(name, partial(file_size, name)))
        return sizes

    def footer(self, name: str):
        """A parquet file's metadata, downloaded once, kept packed: of 100B tokens, 150 files."""
        import pyarrow.parquet

        if name not in self.footers:
            self.footers[name] = patiently(name, lambda: read_footer(name))
        return pyarrow.parquet.read_metadata(io.BytesIO(zlib.decompress(self.footers[name])))

    def read_patiently(self, place: Place, group: int | None) -> Iterator[Row]:
        """
        The rows of a file, or of one of its row groups, from a place on. A file on the hub is asked
        again for an hour.
        """
        name = self.files[place.file]
        failures = 0
        while True:
            try:
                for behind, text in self.read(name, place, group):
                    yield behind, text
                    place = behind
                    failures = 0
                return
            except UserError:
                raise
            except Exception as error:
                wait_or_raise(name, error, failures)
                failures += 1

    def read(self, name: str, place: Place, group: int | None) -> Iterator[Row]:
        # To read CSV, write a reader like those below, with csv.DictReader, choose it here, and add
        # ".csv" to ROW_FILES.
        if is_parquet(name):
            footer = self.footer(name)
            groups = range(place.group, footer.num_row_groups) if group is None else [group]
            return read_parquet(name, place, self.field, footer, groups, self.keeps_blank)
        if name.lower().endswith(TEXT_FILES):
            return read_text(name, place, self.encoding)
        return read_jsonl(name, place, self.field, self.keeps_blank)


def text_bytes(row_group, field: str) -> int:
    """Of a parquet file's row group, uncompressed; 0 without this field."""
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def wait_or_raise(name: str, error: Exception, failures: int) -> None:
    """Wait before a file on the hub that failed is opened again. Raises UserError."""
    problem = f"{name}: {first_line(error)}"  # the words of the library
    # waiting mends neither a damaged file nor one that is not there
    is_final = isinstance(error, ValueError | EOFError | FileNotFoundError)
    if is_final or "://" not in name or failures == len(PAUSES):
        raise UserError(problem) from None
    warn(f"{problem}; again in {PAUSES[failures]} s")
    time.sleep(PAUSES[failures])


def patiently(name: str, read: Callable) -> Any:
    failures = 0
    while True:
        try:
            return read()
        except Exception as error:
            wait_or_raise(name, error, failures)
            failures += 1


def open_ranges(name: str):
    """A file of which only what is asked for is downloaded, without reading ahead."""
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


def read_parquet(
    name: str, place: Place, field: str, footer, groups: Iterable[int], keeps_blank: bool
) -> Iterator[Row]:
    """
    By pyarrow alone: the datasets library reads some 300 MB ahead of a slower consumer, and
    downloads what a resumed preparation skips.
    """
    import pyarrow.parquet

    with open_ranges(name) as file:
        # pre-buffered bytes would be kept until the end of the file
        parquet = pyarrow.parquet.ParquetFile(file, metadata=footer, pre_buffer=False)
        fields = column_types(parquet.schema_arrow)
        if not TEXT_COLUMN.match(fields.get(field, "")):
            problem = f"{name}: no text in the field {field}; {list_fields(fields)}"
            raise UserError(f"{problem}; give --text_field=NAME")
        row = place.row
        for group in groups:
            rows = parquet.metadata.row_group(group).num_rows
            if row >= rows:
                row -= rows  # all of it has been read; it is not downloaded again
                continue
            for text in read_group(parquet, group, row, field, keeps_blank):
                row += 1
                yield Place(place.file, group, row), text
            row = 0


def read_group(
    parquet, group: int, row: int, field: str, keeps_blank: bool
) -> Iterator[str | None]:
    """The texts of a row group from a row on."""
    import pyarrow

    begin = 0
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[field]):
        column = batch.column(0)[max(row - begin, 0) :]
        begin += len(batch)
        for content in column.cast(pyarrow.large_binary()).to_pylist():
            # invalid UTF-8 becomes U+FFFD
            text = None if content is None else content.decode(errors="replace")
            yield as_document(text, keeps_blank)


def read_jsonl(name: str, place: Place, field: str, keeps_blank: bool) -> Iterator[Row]:
    """Each line that is not blank is a row, a JSON object."""
    for number, line in read_lines(name, place.row):
        try:
            # files from Windows may begin with a byte-order mark
            text = json.loads(line.decode().removeprefix("\ufeff").rstrip()).get(field)
        except (ValueError, AttributeError, RecursionError) as error:
            problem = f"{name}: line {number:,} is no JSON object ({first_line(error)})"
            raise UserError(f"{problem}; {how_to_mend(line, error)}") from None
        yield Place(place.file, 0, number), as_document(text, keeps_blank)


def how_to_mend(line: bytes, error: Exception) -> str:
    """Say what to do with a file that has this line: a command only if it keeps all rows."""
    if isinstance(error, UnicodeDecodeError):
        return "make UTF-8 of the file: iconv -f ENCODING -t utf-8 FILE > NEW"
    text = line.decode(errors="replace").removeprefix("\ufeff").strip()
    if text.endswith(",") and is_object(text[:-1]):
        return "it ends in a comma: sed 's/,[[:space:]]*$//' FILE > NEW takes them off all lines"
    rows = text.split("\r" if "\r" in text else "\n")
    if len(rows) > 1 and all(is_object(row) for row in rows if row.strip()):
        return "its lines end in CR: tr '\\r' '\\n' < FILE > NEW"
    at = error.pos if isinstance(error, json.JSONDecodeError) else 0
    goes_on = line.endswith(b"\n") and at >= len(text) and text.endswith(("{", "[", ","))
    if goes_on or text.startswith("["):
        return "make one object a line: jq -c 'arrays[], objects' FILE > NEW"
    if not line.endswith(b"\n"):
        return "the file ends in this line, so it may be cut: get it again"
    return "mend that line"


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(name: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """The lines after the `first` ones that are not blank, with their numbers from 1 on."""
    import fsspec

    is_zstd = name.lower().endswith(".zst")
    with fsspec.open(name, compression=None if is_zstd else "infer") as file:
        if is_zstd:
            import pyarrow

            # fsspec's own reader ends without an error where a file is cut
            file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        # without the buffer, files on the hub copy megabytes per line
        lines = io.BufferedReader(file, 2**20)
        for number, line in enumerate(islice(lines, first, None), first + 1):
            if not line.isspace():
                yield number, line


def read_text(name: str, place: Place, encoding: str | None) -> Iterator[Row]:
    """A text file is one row, or several with GPT-2's mark between them. Blank ones are none."""
    whole = decode(name, encoding)
    texts = END_OF_TEXT.split(whole) if name.lower().endswith(".txt") else [whole]
    rows = [*filter(as_document, texts)]
    if len(texts) > 1:
        say(f"{name}: {len(rows):,} documents, as <|endoftext|> stands between them")
    for row in range(place.row, len(rows)):
        yield Place(place.file, 0, row + 1), rows[row]


def as_document(text: object, keeps_blank: bool = False) -> str | None:
    if not isinstance(text, str):
        return None
    return text if keeps_blank or (text and not text.isspace()) else None


def decode(name: str, given: str | None) -> str:
    """
    The text of a file: UTF-16 if it begins with that byte-order mark, else UTF-8, else in the given
    encoding or FALLBACK, with a warning. Lines end in LF. Raises UserError if it is not text.
    """
    content = Path(name).read_bytes()
    unicode = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    problems = []
    for encoding in (unicode, given or FALLBACK):
        try:
            text = content.decode(encoding)
        except (UnicodeError, LookupError) as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say
            line = 1 + content[:at].count(b"\n")
            problem = f"line {line:,} is not {encoding}: {content[at : at + 8]!r}"
            if encoding == unicode and is_damaged(content):
                hint = "mend it: iconv -c -f utf-8 -t utf-8 FILE > NEW drops what is broken"
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
        # the same line ends, so that every system makes the same tokens
        return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    raise UserError(f"{name}: {'; '.join(problems)}; leave it out, or give its --encoding=NAME")


def is_damaged(content: bytes) -> bool:
    """Whether this is Unicode with some broken bytes: in another encoding most would be wrong."""
    lenient = content.decode(errors="replace")
    broken = lenient.count("\ufffd")
    valid = len(lenient) - broken - len(lenient.encode("ascii", "ignore"))
    return valid > broken or content.startswith(UTF16_MARKS)


# -----------------------------------------------------------------------------
# What messages say


def column_types(schema) -> dict[str, str]:
    return {column.name: str(column.type) for column in schema}


def jsonl_fields(name: str, field: str) -> dict[str, str]:
    """The fields of the first row without text."""
    rows = (json.loads(line.decode().removeprefix("\ufeff")) for _, line in read_lines(name))
    row = next(row for row in rows if not as_document(row.get(field)))
    return {key: type(value).__name__ for key, value in row.items()}


def list_fields(fields: dict[str, str]) -> str:
    listed = ", ".join(f"{name} ({kind})" for name, kind in fields.items())
    return f"fields: {listed[:200]}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}"
