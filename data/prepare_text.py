"""
Make a dataset from your own text, or, with no argument, from the Python standard library's sources
(needs no download).

    python data/prepare_text.py                                   data/python_stdlib, about 4.4M byte tokens, in seconds
    python data/prepare_text.py book.txt notes/ --out=data/mine   .txt, .md, .py; a folder means all such files in it
    python data/prepare_text.py posts.jsonl --tokenizer=gpt2      .jsonl and .parquet: the column `text`, a row a document

A text file is one document. Validation is the first documents, as many as make up --val_fraction of
the text; a single document is cut in two at a paragraph.
"""

import argparse
import glob
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # in place of data/, whose files could hide others

from common.console import Parser, UserError, parse_count, run_main
from data.sources import Batch, Source
from data.tokenizer import Tokenizer
from data.writer import Plan, prepare

TEXT, ROWS = (".txt", ".md", ".py"), (".jsonl", ".parquet")

# The standard library's modules that every CPython from 3.10 on has on every system, as source, at
# much the same size.
# The validation modules are of many kinds and, together, about as predictable from the others as a
# module is on average.
VALIDATION = "textwrap trace csv socketserver gettext pprint email.generator json.decoder poplib compileall".split()
TRAINING = """
_collections_abc argparse ast asyncio.base_events asyncio.events asyncio.futures asyncio.locks asyncio.streams
asyncio.tasks asyncio.selector_events asyncio.sslproto bdb cmd codecs collections concurrent.futures._base
concurrent.futures.process configparser contextlib dataclasses difflib doctest email._parseaddr email.charset
email.feedparser email.header email.headerregistry email.message email.utils email._policybase fileinput fractions
ftplib functools gzip html.parser http.client http.cookiejar http.cookies http.server importlib.metadata inspect
ipaddress json.encoder logging logging.config logging.handlers lzma mailbox modulefinder multiprocessing.connection
multiprocessing.managers multiprocessing.pool multiprocessing.queues multiprocessing.shared_memory
multiprocessing.synchronize multiprocessing.util multiprocessing.process ntpath optparse os pdb pickle pkgutil
platform plistlib posixpath pstats runpy selectors shlex shutil smtplib socket ssl statistics subprocess tarfile
tempfile threading tokenize tracemalloc typing unittest.case unittest.loader unittest.mock unittest.suite
urllib.parse urllib.request warnings weakref wsgiref.handlers wsgiref.validate xml.dom.expatbuilder xml.dom.minidom
xml.etree.ElementTree xml.etree.ElementPath xml.sax.expatreader xml.sax.handler xml.sax.saxutils xml.sax.xmlreader
xmlrpc.client xmlrpc.server zipfile
""".split()
MOST = 0.9  # of the modules must be there, or the dataset is another one


def stdlib_files(names: list[str]) -> list[Path]:
    """The source files of those modules, without importing them; a missing one is left out."""
    library = Path(sysconfig.get_path("stdlib"))
    places = [library.joinpath(*name.split(".")) for name in names]
    files = [
        next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)
        for place in places
    ]
    return [file for file in files if file]


def find_files(arguments: list[str]) -> list[Path]:
    """
    Files, folders and patterns as a list of files, in the order given, each folder sorted. Raises
    UserError.
    """
    files, problems = [], []
    for argument in arguments:
        found = (
            [Path(argument)]
            if os.path.exists(argument)
            else [Path(p) for p in sorted(glob.glob(argument, recursive=True))]
        )
        if not found:
            problems.append(f"{argument}: no such file")
        for path in found:
            if path.is_dir():
                inside = sorted(
                    p for p in path.rglob("*") if p.suffix in TEXT + ROWS and p.is_file()
                )
                problems += [] if inside else [f"{path}: holds no {', '.join(TEXT + ROWS)} files"]
                files += inside
            elif path.suffix in TEXT + ROWS:
                files.append(path)
            else:
                problems.append(f"{path}: not one of {', '.join(TEXT + ROWS)}")
    if problems:
        raise UserError(*problems)
    return files


def read_text(path: Path) -> str:
    try:
        return path.read_text(
            encoding="utf-8-sig"
        )  # any line ends become \n, so that every system makes the same tokens
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start:,} is not UTF-8; convert it: iconv -f latin1 -t utf-8 {path}"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def file_source(files: list[Path]) -> Source:
    def source(file: int, row: int) -> Iterator[Batch]:
        for number in range(file, len(files)):
            if files[number].suffix in ROWS:
                from data.sources import files_source  # which text alone does not need

                for _, first, rows in files_source([str(files[number])])(0, row):
                    yield number, first, rows
            else:
                yield number, 0, [read_text(files[number])]
            row = 0

    return source


def cut_in_two(source: Source, fraction: float) -> Source:
    """
    A source of one document as one of two, cut after that share of it, where a paragraph ends, or
    else a line.
    """
    text = next(text for _, _, rows in source(0, 0) for text in rows if text)
    wanted = max(int(len(text) * fraction), 1)
    ends = [text.find(mark, wanted) + len(mark) for mark in ("\n\n", "\n") if mark in text[wanted:]]
    at = next((end for end in ends if end < len(text)), wanted)
    return lambda file, row: iter([(0, 0, [text[:at], text[at:]])])


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


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "files", nargs="*", help="files, folders or patterns; none: the Python standard library"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("byte", "gpt2"),
        default="byte",
        help="gpt2 needs 50,257 ids, byte 256",
    )
    parser.add_argument(
        "--out", type=Path, help="the folder to make (default: data/ and the first argument's name)"
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=0.05,
        help="validation's share of the text (default: 0.05)",
    )
    parser.add_argument(
        "--workers",
        type=parse_count,
        default=os.cpu_count(),
        help="threads (default: one per core)",
    )
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_fraction < 1:
        parser.error(f"--val_fraction: {arguments.val_fraction} is not between 0 and 1")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    tokenizer = Tokenizer({"kind": arguments.tokenizer})
    if arguments.files:
        files, title = find_files(arguments.files), " ".join(arguments.files[:3])
        title += f" and {len(arguments.files) - 3} more" if len(arguments.files) > 3 else ""
        first = Path(arguments.files[0])
        out = arguments.out or Path(
            "data", first.resolve().stem if first.exists() else files[0].stem
        )
    else:
        validation = stdlib_files(VALIDATION)
        files, title = (
            validation + stdlib_files(TRAINING),
            f"Python {platform.python_version()} standard library",
        )
        out = arguments.out or Path("data", "python_stdlib")
        if len(files) < MOST * len(VALIDATION + TRAINING):
            raise UserError(
                f"{sysconfig.get_path('stdlib')}: too few sources of the standard library; name files of your own"
            )
    source = file_source(files)
    sizes, sha256 = measure(source)
    if not sizes:
        raise UserError(f"{title}: holds no text")
    if len(sizes) == 1:
        source, val_documents = cut_in_two(source, arguments.val_fraction), 1
        sizes, sha256 = measure(source)
    elif not arguments.files:
        val_documents = len(validation)
    else:
        enough = arguments.val_fraction * sum(sizes)
        val_documents = next(
            number for number, total in enumerate(accumulate(sizes), 1) if total >= enough
        )
    expected_tokens = sum(sizes) // (1 if tokenizer.kind == "byte" else 3) + len(sizes)
    plan = Plan(out, title, sha256, tokenizer, expected_tokens, val_documents=val_documents)
    return prepare(plan, source, arguments.workers)


if __name__ == "__main__":
    run_main(main)
