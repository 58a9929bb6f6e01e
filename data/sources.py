"""
Read documents from parquet, jsonl and text files, local or on the Hugging Face hub.

A document is a row whose text field is not blank, or a text file that is not blank. Documents come
in the order of the files and their rows, or in the order of a list of row groups (see order.py).
Training shuffles windows of their tokens (see loader.py).

    local_files    lists the files to read, in order
    hub_files      does the same for a dataset on the hub
    Source         reads their rows, starting at any Place
"""

import contextlib
import glob
import gzip
import io
import json
import os
import re
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from common.console import UserError, command_line, raise_if_any, say, warn
from common.files import UTF16_MARKS, is_lfs_pointer, refuse_lfs_pointer

TEXT_FILES = (".txt", ".md", ".py")
# Table formats whose files also hold deleted rows: the library that reads each format, and the log
# that says which rows are valid
TABLE_LOGS = dict(deltalake="_delta_log", hudi=".hoodie", pyiceberg="metadata/*.metadata.json")
UNPACK = dict.fromkeys((".tar", ".tgz"), "tar xf") | {".zip": "unzip", ".zst": "unzstd"}
UNPACK |= {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
# Words in file and folder names that say which split a file belongs to, as on the hub
SPLITS = re.compile(
    r"(?:^|[-._/0-9])(train|test|val|dev|eval)(?:ing|id|idation|uation)?(?=[-._/0-9]|$)"
)
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
    List the files of paths, folders and patterns in the order given. A file reachable under several
    names is listed once. Raises UserError with what is wrong with each name.
    """
    files: dict[tuple, str] = {}
    problems = []
    for name in names:
        try:
            for file in files_of(name, endings):
                files.setdefault(file_id(str(file)), str(file))
        except UserError as error:
            problems.append(str(error))
    raise_if_any(problems)
    return list(files.values())


def files_of(name: str, endings: tuple[str, ...]) -> list[Path]:
    """
    List the files of one path, folder or pattern, sorted by name. Warns about what it holds
    besides: files with other endings, hidden ones, and the test and validation files beside
    training files. Raises UserError if there is nothing to read, and for dead links, git-lfs
    pointers and tables with a log.
    """
    paths = [name] if os.path.lexists(name) else glob.glob(name, recursive=True)
    # the file or folder that the user spelled out
    root = Path(name if paths == [name] else os.path.dirname(re.split(r"[*?\[]", name)[0]))
    found = sorted({f for path in map(Path, paths) for f in files_in(path)}, key=str)
    hidden = [f for f in found if is_hidden(f, root)]
    shown = [f for f in found if not is_hidden(f, root)]
    # A dead link stands for missing text if it has a text file's name or may be a folder.
    wanted = (*endings, Path(name).name.lower())
    dead = [f for f in shown if f.is_symlink() and not f.exists()]
    if dead := [f for f in dead if not f.suffix or f.name.lower().endswith(wanted)]:
        link = f"{dead[0]}: a link to {os.readlink(dead[0])}, which is not there"
        raise UserError(f"{link} (one of {len(dead):,}); get that file, or delete the link")
    readable = [f for f in shown if is_read(f, endings)]
    tests = test_files(readable, root)
    if not readable:
        convert = how_to_convert(sorted({*shown} - test_files(shown, root)))
        raise UserError(f"{name}: {convert}; can read {', '.join(endings)}")
    files = [f for f in readable if f not in tests]
    for file in files:
        refuse_lfs_pointer(file)
    refuse_tables([f for f in files if is_parquet(str(f))])
    if others := sorted({*shown} - {*readable}):
        kinds = ", ".join(sorted({f.suffix or f.name for f in others})[:5])
        what = f"{len(others):,} files of other types ({kinds}), such as {others[0]}"
        warn(f"skipping {what}; to include them, save them as text")
    if hidden:
        warn(f"{len(hidden):,} names begin with a dot or _ and are skipped, such as {hidden[0]}")
    if tests:
        held = f"{len(tests):,} test or validation files are left out, such as {min(tests)}"
        warn(f"{held}; to read them too, give their names")
    return files


def is_hidden(file: Path, root: Path) -> bool:
    """
    Return True if a name below `root` begins with a dot or, for a file of rows, with `_`. Spark,
    Hive and pyarrow skip such names too: they hold rows of killed jobs, or the table's log.
    """
    marks = (".", "_") if file.name.lower().endswith(ROW_FILES) else "."
    return any(part.startswith(marks) for part in file.relative_to(root).parts)


def test_files(files: list[Path], root: Path) -> set[Path]:
    """
    Return the files named test or validation, if others are named train. A .txt counts only beside
    a training text whose name begins alike, because an article may be about driving tests.
    """
    named = {}
    for file in files:
        name = file.relative_to(root).as_posix().lower()
        if (words := [*SPLITS.finditer(name)]) and not name.endswith((".md", ".py")):
            begins = name[: words[-1].start(1)] if name.endswith(".txt") else ""
            named[file] = begins, words[-1][1]
    trained = {begins for begins, split in named.values() if split == "train"}
    return {f for f, (begins, split) in named.items() if split != "train" and begins in trained}


def refuse_tables(files: list[Path]) -> None:
    """Raise UserError if parquet files belong to a table whose log says which rows are deleted."""
    paths = {path for file in files for path in (file.absolute(), file.resolve())}
    for folder in {folder for path in paths for folder in path.parents}:
        for library, log in TABLE_LOGS.items():
            if glob.glob(os.path.join(glob.escape(str(folder)), log)):
                held = f"{folder}: a table with a log ({log}), whose files also hold dead rows"
                raise UserError(f"{held}; read it with {library} and write new parquet files first")


def files_in(path: Path) -> Iterator[Path]:
    """
    Yield the file, or all files in a folder and its subfolders, following links. Of a folder whose
    name begins with a dot, yields only its name. Raises OSError for a folder that cannot be read.
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
        yield from (Path(folder, name) for name in files)
        yield from (Path(folder, name) for name in folders if name.startswith("."))
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def file_id(name: str) -> tuple:
    """Return an id that is the same for every name of a file or folder."""
    stat = os.stat(name)
    return stat.st_dev, stat.st_ino or os.path.realpath(name)  # st_ino is 0 on some network disks


def is_read(file: Path, endings: tuple[str, ...]) -> bool:
    """
    Return True if a file is one to read. A .json file is read if its first two lines are objects,
    as in jsonl, or its only line if its name is of a numbered part; most other .json files hold one
    object or one list.
    """
    name = file.name.lower()
    if not (name.endswith(endings) and file.is_file()):
        return False
    if not name.endswith(".json") or is_lfs_pointer(file):
        return True
    try:
        first = [parse_line(line) for _, line in islice(read_lines(str(file)), 2)]
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile):
        return False
    is_part = re.match(r"part-|\d+\.", name)
    return bool(len(first) == 2 or is_part) and all(isinstance(row, dict) for row in first)


def how_to_convert(others: list[Path]) -> str:
    """Say how to convert `others`, none of which this program can read."""
    if not others:
        return "no such file, or no files there but names that begin with a dot or _"
    # In a folder that save_to_disk made, only the .arrow files can be converted.
    first = next((file for file in others if file.suffix == ".arrow"), others[0])
    kind = first.suffix.lower()
    if not first.is_file():
        return "not a file"
    if kind in UNPACK:
        return f"packed; type {command_line(*UNPACK[kind].split(), first)}"
    if kind not in (".arrow", ".csv", ".json"):
        named = command_line("mv", first, f"{first}.txt")
        return f"save it as text first or, if it is plain text, type {named}"
    same = [file for file in others if file.suffix == first.suffix]
    files = str(first if len(same) == 1 else first.with_name(f"*{first.suffix}"))
    load = f"load_dataset({kind[1:]!r}, data_files={files!r}, split='train')"
    out = first.with_suffix(".parquet")
    choose = ""
    if first.with_name("state.json").exists():  # by save_to_disk; map() adds cache-*.arrow files
        folder = first.parent
        if splits := {file.parent.name for file in same} - {folder.name}:
            choose = f"for SPLIT take {folder.name} or {' or '.join(sorted(splits))}; "
            folder = folder.with_name("SPLIT")
            out = folder.with_name("SPLIT.parquet")
        load = f"load_from_disk({str(folder)!r})"
    command = f"from datasets import *; {load}.to_parquet({str(out)!r})"
    return f'{choose}convert it to parquet: python -c "{command}"'


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
    encoding: str | None = None  # of text that is neither UTF-8 nor UTF-16; jsonl is always UTF-8
    keeps_blank: bool = False  # treat blank text as a document, as llm.c does
    footers: dict[str, bytes] = dataclass_field(default_factory=dict)  # parquet, compressed
    warned: set[tuple[str, str]] = dataclass_field(default_factory=set)  # file, kind of warning

    def rows(self, begin: Place) -> Iterator[Row]:
        """Yield the rows of all files from `begin` on. Raises UserError as file_rows() does."""
        for file in range(begin.file, len(self.files)):
            yield from self.file_rows(begin if file == begin.file else Place(file))

    def file_rows(self, begin: Place, one_group: bool = False) -> Iterator[Row]:
        """
        Yield the rows of a file, or only of the row group, from `begin` on. Raises UserError for a
        file that cannot be read, for a broken line, and if most of the first FIRST_ROWS rows have
        no text, or text full of control characters. A smaller row group is not enough to judge by.
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
        """Raise UserError if most of the first rows of a file hold no text that can be read."""
        without = sum(not is_text(text) for text in first)
        if 2 * without <= len(first):
            return
        if is_parquet(name):
            fields = column_types(self.footer(name).schema.to_arrow_schema())
        else:
            fields = jsonl_fields(name, self.field)
        rows = f"{without:,} of the first {len(first):,} rows"
        held = f"{rows} hold no text in the field {self.field} that can be read"
        hint = "give --text_field=NAME or, of parquet, --encoding=NAME"
        raise UserError(f"{name}: {held}; {list_fields(fields)}; {hint}")

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
            last = place.group if one_group else footer.num_row_groups - 1
            for n in range(place.group, last + 1):
                done = place.row if n == place.group else 0
                if done < footer.row_group(n).num_rows:  # otherwise, do not download it again
                    for row, text in enumerate(self.read_group(name, parquet, n, done), done + 1):
                        yield Place(place.file, n, row), text

    def read_group(self, name: str, parquet, group: int, row: int) -> Iterator[str | None]:
        """Yield the texts of a row group, starting at `row`."""
        import pyarrow

        begin = 0
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.field]):
            column = batch.column(0)[max(row - begin, 0) :]
            begin += len(batch)
            for content in column.cast(pyarrow.large_binary()).to_pylist():
                text = None if content is None else self.decode_row(name, content)
                yield as_document(text, self.keeps_blank)

    def decode_row(self, name: str, content: bytes) -> str | None:
        """
        Decode a parquet row as a text file, with one warning per file for each kind of trouble.
        Returns None if it is not text, and keeps the rest of damaged UTF-8.
        """
        if not self.encoding:
            with contextlib.suppress(UnicodeError):
                return content.decode()
        text: str | None
        try:
            text, trouble = decode(content, self.encoding)
            kind = "guessed"
        except UserError as error:
            text, kind = None, "left out"
            trouble = f"{error}; leaving out rows like this one; or give another --encoding"
            if is_damaged(content):
                text = content.decode(unicode_of(content), errors="replace")
                trouble, kind = "broken UTF-8 becomes U+FFFD", "damaged"
        if trouble and (name, kind) not in self.warned:
            self.warned.add((name, kind))
            warn(f"{name}: in one of its rows, {trouble}")
        return text

    def read_jsonl(self, name: str, place: Place) -> Iterator[Row]:
        """Yield the rows of a jsonl file: each line that is not blank holds one JSON object."""
        for number, line in read_lines(name, place.row):
            try:
                text = parse_line(line).get(self.field)
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


def with_retries(name: str, read: Callable[[str], Any]) -> Any:
    for failures in count():
        try:
            return read(name)
        except Exception as error:
            wait_or_raise(name, error, failures)


def open_ranges(name: str):
    """Open a file so that only the requested byte ranges are downloaded, without read-ahead."""
    import fsspec

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


def parse_line(line: bytes) -> Any:
    """Parse a line of jsonl. Files from Windows, also where joined, begin with byte-order marks."""
    return json.loads(line.decode().lstrip("\ufeff").strip())


def how_to_mend(line: bytes, error: Exception) -> str:
    """Say how to repair a file with this line; suggest a command only if no row would be lost."""
    if isinstance(error, UnicodeDecodeError):
        encoding = "UTF-16" if line.startswith(UTF16_MARKS) else "ENCODING"
        return f"convert the file to UTF-8: iconv -f {encoding} -t utf-8 FILE > NEW"
    text = line.decode(errors="replace").lstrip("\ufeff").strip()
    rest = text[error.pos :] if isinstance(error, json.JSONDecodeError) else text  # not parsed
    if rest == ",":
        return "it ends in a comma; remove such commas: sed 's/,[[:space:]]*$//' FILE > NEW"
    if rest.startswith("\ufeff"):
        return "files were joined there: sed 's/\\xef\\xbb\\xbf/\\n/g' FILE > NEW"
    spans_lines = line.endswith(b"\n") and not rest and text.endswith(("{", "[", ","))
    if spans_lines or text.startswith("[") or (text.startswith("{") and rest.startswith("{")):
        return "write one object per line: jq -c 'arrays[], objects' FILE > NEW"
    if not line.endswith(b"\n"):
        return "this is the last line, so the file may be cut off: get it again"
    return "fix that line"


def read_lines(name: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """
    Yield (number, line) for each non-blank line after the first `first`, numbered from 1. Unpacks
    gzip and zstd by a file's first bytes, because downloads may unpack it and keep its name.
    """
    import fsspec

    with fsspec.open(name) as file:
        # Without this buffer, every line of a file on the hub would copy megabytes.
        lines: Any = io.BufferedReader(file, 2**20)
        magic = lines.peek(4)[:4]
        if magic.startswith(b"\x1f\x8b"):
            lines = io.BufferedReader(gzip.GzipFile(fileobj=lines), 2**20)
        elif magic == b"\x28\xb5\x2f\xfd" or magic[1:] == b"\x2a\x4d\x18":
            import pyarrow

            # fsspec's own zstd reader ends a truncated file without an error.
            packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(lines, "r"), "zstd")
            lines = io.BufferedReader(packed, 2**20)
        try:
            for number, line in enumerate(islice(lines, first, None), first + 1):
                if not line.isspace():
                    yield number, line
        except OSError as error:
            if "too much memory" not in str(error):
                raise
            smaller = "pack it anew: unzstd --long=31 -c FILE | zstd > NEW"
            raise UserError(f"{name}: has a zstd window above 128 MB; {smaller}") from None


def read_text(name: str, place: Place, encoding: str | None) -> Iterator[Row]:
    """Yield a text file as one row, or as several if <|endoftext|> separates them in a .txt."""
    content = Path(name).read_bytes()
    stated = stated_encoding(content) if name.lower().endswith(".py") else None
    try:
        text, guess = decode(content, stated or encoding)
    except UserError as error:
        raise UserError(f"{name}: {error}; leave it out, or give its --encoding=NAME") from None
    if guess and not stated:
        warn(f"{name}: {guess}")
    # Normalise line endings, so that every operating system produces the same tokens.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    whole = re.sub("(?m)^\ufeff", "", text)  # byte-order marks; joined files may have several
    texts = END_OF_TEXT.split(whole) if name.lower().endswith(".txt") else [whole]
    rows = [*filter(as_document, texts)]
    if len(texts) > 1:
        say(f"{name}: {len(rows):,} documents, separated by <|endoftext|>")
    for row in range(place.row, len(rows)):
        yield Place(place.file, 0, row + 1), rows[row]


def stated_encoding(content: bytes) -> str | None:
    """Return the encoding that a Python file states in its first lines (PEP 263), if any."""
    with contextlib.suppress(SyntaxError):
        stated = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        return None if stated.startswith("utf-8") else stated
    return None


def as_document(text: object, keeps_blank: bool = False) -> str | None:
    if not isinstance(text, str):
        return None
    return text if keeps_blank or (text and not text.isspace()) else None


def decode(content: bytes, given: str | None) -> tuple[str, str]:
    """
    Decode a text: as UTF-16 if it begins with that byte-order mark, else as UTF-8, else in the
    `given` encoding or FALLBACK. Returns the text, and how it was guessed, "" for Unicode. Raises
    UserError if it is not text.
    """
    unicode, other = unicode_of(content), given or FALLBACK
    text, problem = try_decode(content, unicode)
    if not problem:
        return text, ""
    if not text and is_damaged(content):
        drop = f"iconv -c -f {unicode} -t utf-8 FILE > NEW"
        raise UserError(f"{problem}; to drop the broken bytes: {drop}")
    if text and not given:  # FALLBACK, too, would read the control characters
        raise UserError(problem)
    text, worse = try_decode(content, other)
    if worse:
        raise UserError(f"{problem}; {worse}")
    words = " ".join(re.findall(r"\S*[^\x00-\x7f]\S*", text[:100_000]))[:40]
    hint = "" if given else "; or give --encoding=NAME"
    return text, f"{problem}; read as {other}: {words!r}{hint}"


def try_decode(content: bytes, encoding: str) -> tuple[str, str]:
    """Return the text, "" if it is not in this encoding, and what is wrong with it, if anything."""
    try:
        text = content.decode(encoding)
    except LookupError as error:
        return "", first_line(error)
    except UnicodeError as error:
        at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
        line = 1 + content[:at].count(b"\n")
        problem = f"line {line:,} is not {encoding}: {content[at : at + 8]!r}"
        joined = encoding == "utf-8" and content[at : at + 2] in UTF16_MARKS
        return "", problem + (", where a UTF-16 file was appended" if joined else "")
    controls = too_many_controls(text)
    return text, f"{controls:,} NULs and control characters in {encoding}" if controls else ""


def too_many_controls(text: str) -> int:
    """Count the control characters of a text, or return 0 if they are few enough for a text."""
    controls = len(CONTROLS.findall(text))
    most = min(5 + MOST_CONTROLS * len(text), len(text) / 4)
    return controls if controls > most else 0


def is_text(text: str | None) -> bool:
    return text is not None and not too_many_controls(text)


def unicode_of(content: bytes) -> str:
    return "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"


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
    rows = (parse_line(line) for _, line in read_lines(name))
    row = next(row for row in rows if not is_text(as_document(row.get(field))))
    return {key: type(value).__name__ for key, value in row.items()}


def list_fields(fields: dict[str, str]) -> str:
    listed = ", ".join(f"{name} ({kind})" for name, kind in fields.items())
    return f"fields: {listed[:200]}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}"
