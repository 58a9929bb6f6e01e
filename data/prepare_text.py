"""
Make a dataset from your own text, or, with no argument, from the Python standard library's sources
(needs no download).

    python data/prepare_text.py                                   4.4M byte tokens, in seconds
    python data/prepare_text.py book.txt notes/ --out=data/mine   .txt, .md, .py; all in a folder
    python data/prepare_text.py posts.jsonl --tokenizer=gpt2      .jsonl, .parquet: column `text`
    python data/prepare_text.py book.txt --tokenizer=bpe:4096     a tokenizer made for this text

A text file is one document, and so is a row. Validation is the first documents, as many as make up
--val_fraction of the text; a single document is cut in two at a paragraph.
"""

import argparse
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    # The root in place of data/, whose files could hide others
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, UserError, parse_count, run_main
from data.shards import PREPARED_ON_DEMAND
from data.sources import ROW_FILES, Batch, Source, file_ending, files_source, local_files
from data.tokenizer import TOKENIZERS, open_tokenizer
from data.writer import Plan, prepare

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".parquet")

# The standard library's modules that every CPython from 3.10 on has on every system, as source, at
# much the same size. Those for validation are of many kinds and, together, about as predictable
# from the others as a module is on average.
VALIDATION = """
textwrap trace csv socketserver gettext pprint email.generator json.decoder poplib compileall
""".split()
TRAINING = """
_collections_abc argparse ast asyncio.base_events asyncio.events asyncio.futures asyncio.locks
asyncio.streams asyncio.tasks asyncio.selector_events asyncio.sslproto bdb cmd codecs collections
concurrent.futures._base concurrent.futures.process configparser contextlib dataclasses difflib
doctest email._parseaddr email.charset email.feedparser email.header email.headerregistry
email.message email.utils email._policybase fileinput fractions ftplib functools gzip html.parser
http.client http.cookiejar http.cookies http.server importlib.metadata inspect ipaddress
json.encoder logging logging.config logging.handlers lzma mailbox modulefinder
multiprocessing.connection multiprocessing.managers multiprocessing.pool multiprocessing.queues
multiprocessing.shared_memory multiprocessing.synchronize multiprocessing.util
multiprocessing.process ntpath optparse os pdb pickle pkgutil platform plistlib posixpath pstats
runpy selectors shlex shutil smtplib socket ssl statistics subprocess tarfile tempfile threading
tokenize tracemalloc typing unittest.case unittest.loader unittest.mock unittest.suite urllib.parse
urllib.request warnings weakref wsgiref.handlers wsgiref.validate xml.dom.expatbuilder
xml.dom.minidom xml.etree.ElementTree xml.etree.ElementPath xml.sax.expatreader xml.sax.handler
xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server zipfile
""".split()
MOST = 0.9  # of the modules must be there, or the dataset is another one

# -----------------------------------------------------------------------------
# Which text


def stdlib_files(names: list[str]) -> list[str]:
    """The source files of those modules, without importing them; a missing one is left out."""
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for name in names:
        place = library.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                files.append(str(file))
    return files


def stdlib_source() -> tuple[str, list[str], int]:
    """Title, files, and how many of the first ones are for validation. Raises UserError."""
    validation = stdlib_files(VALIDATION)
    files = validation + stdlib_files(TRAINING)
    if len(files) < MOST * len(VALIDATION + TRAINING):
        library = sysconfig.get_path("stdlib")
        raise UserError(f"{library}: holds too few modules as source; name files of your own")
    return f"Python {platform.python_version()} standard library", files, len(validation)


def read_text(path: str) -> str:
    """A text file. Any line ends become \\n, so that every system makes the same tokens."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        mend = f"convert it: iconv -f latin1 -t utf-8 {path}"
        raise UserError(f"{path}: byte {error.start:,} is not UTF-8; {mend}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def text_source(files: list[str]) -> Source:
    """Text files, a document each, and files of rows, a document a row."""

    def source(file: int, row: int) -> Iterator[Batch]:
        for number in range(file, len(files)):
            if file_ending(files[number]) in ROW_FILES:
                for _, first, rows in files_source([files[number]])(0, row):
                    yield number, first, rows
            else:
                yield number, 0, [read_text(files[number])]
            row = 0

    return source


# -----------------------------------------------------------------------------
# Where validation ends


def measure(source: Source) -> tuple[list[int], str]:
    """
    Read everything once: the size of each document in bytes, and a hash of the whole. Raises
    UserError.
    """
    sizes, sha256 = [], hashlib.sha256()
    for _, _, rows in source(0, 0):
        for text in filter(None, rows):
            content = text.encode(errors="replace")
            sizes.append(len(content))
            sha256.update(content + b"\0")
    return sizes, sha256.hexdigest()


def cut_in_two(source: Source, fraction: float) -> Source:
    """
    A source of one document as one of two, cut after that share of it, where a paragraph ends, or
    else a line.
    """
    text = next(text for _, _, rows in source(0, 0) for text in rows if text)
    wanted = max(int(len(text) * fraction), 1)
    at = wanted
    for mark in ("\n", "\n\n"):  # the last one found counts
        found = text.find(mark, wanted)
        if found >= 0 and found + len(mark) < len(text):
            at = found + len(mark)
    return lambda file, row: iter([(0, 0, [text[:at], text[at:]])])


# -----------------------------------------------------------------------------
# Command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="files, folders, patterns; none: the Python standard library")
    add("--tokenizer", default="byte", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="the folder to make (default: data/ and the first file's name)")
    add("--val_fraction", type=float, default=0.05, help="validation's share (default: 0.05)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: one a core)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_fraction < 1:
        parser.error(f"--val_fraction: {arguments.val_fraction} is not between 0 and 1")
    return arguments


def default_out(names: list[str], files: list[str]) -> Path:
    if not names:
        return Path("data", PREPARED_ON_DEMAND)
    first = Path(names[0])
    return Path("data", first.resolve().stem if first.exists() else Path(files[0]).stem)


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    if arguments.files:
        title = " ".join(arguments.files)[:200]
        files = local_files(arguments.files, ENDINGS)
    else:
        title, files, val_documents = stdlib_source()
    source = text_source(files)
    sizes, sha256 = measure(source)
    if not sizes:
        raise UserError(f"{title}: holds no text")
    if len(sizes) == 1:
        source, val_documents = cut_in_two(source, arguments.val_fraction), 1
        sizes, sha256 = measure(source)
    elif arguments.files:
        enough = arguments.val_fraction * sum(sizes)
        val_documents = 1 + sum(total < enough for total in accumulate(sizes))
    out = arguments.out or default_out(arguments.files, files)
    val_bytes = sum(sizes[:val_documents])
    tokenizer = open_tokenizer(arguments.tokenizer, out, source, val_bytes, sum(sizes))
    bytes_per_token = 1 if tokenizer.kind == "byte" else 3  # 3: a cautious guess for the disk
    expected_tokens = sum(sizes) // bytes_per_token + len(sizes)
    plan = Plan(out, title, sha256, tokenizer, expected_tokens, val_documents=val_documents)
    return prepare(plan, source, arguments.workers)


if __name__ == "__main__":
    run_main(main)
