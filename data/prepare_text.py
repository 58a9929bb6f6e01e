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
import csv
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, UserError, parse_count, run_main
from data.shards import PREPARED_ON_DEMAND
from data.sources import Batch, Source, files_source, local_files
from data.tokenizer import TOKENIZERS, pick_tokenizer
from data.writer import Plan, prepare

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# The standard library's modules that every CPython from 3.10 on has on every system, as source, at
# much the same size. Those for validation come first, are of many kinds and, together, about as
# predictable from the others as a module is on average.
MODULES = Path(__file__).with_name("python_stdlib.csv")
LEAST_FOUND = 0.9  # of the modules: with fewer it would be another dataset

# -----------------------------------------------------------------------------
# Which text


def stdlib_source() -> tuple[str, list[str], int]:
    """
    Title, files, and how many of the first ones are for validation; a missing module is left out.
    Raises UserError.
    """
    library = Path(sysconfig.get_path("stdlib"))
    with open(MODULES, newline="") as file:
        rows = list(csv.DictReader(file))
    found = {"val": [], "train": []}
    for row in rows:
        place = library.joinpath(*row["module"].split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                found[row["split"]].append(str(path))
    files = found["val"] + found["train"]
    if len(files) < LEAST_FOUND * len(rows):
        raise UserError(f"{library}: holds too few modules as source; name files of your own")
    return f"Python {platform.python_version()} standard library", files, len(found["val"])


# -----------------------------------------------------------------------------
# Where validation ends


def sizes_and_sha256(source: Source) -> tuple[list[int], str]:
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
    for mark in ("\n", "\n\n"):  # a paragraph's end is better than a line's
        found = text.find(mark, wanted)
        if found >= 0 and found + len(mark) < len(text):
            at = found + len(mark)

    def source_of_two(file: int, row: int) -> Iterator[Batch]:
        yield 0, row, [text[:at], text[at:]][row:]

    return source_of_two


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
    source = files_source(files)
    sizes, sha256 = sizes_and_sha256(source)
    if not sizes:
        raise UserError(f"{title}: holds no text")
    if len(sizes) == 1:
        source, val_documents = cut_in_two(source, arguments.val_fraction), 1
        sizes, sha256 = sizes_and_sha256(source)
    elif arguments.files:
        enough = arguments.val_fraction * sum(sizes)
        val_documents = 1 + sum(total < enough for total in accumulate(sizes))
    out = arguments.out or default_out(arguments.files, files)
    val_bytes = sum(sizes[:val_documents])
    tokenizer = pick_tokenizer(arguments.tokenizer, out, source, val_bytes, sum(sizes))
    bytes_per_token = 1 if tokenizer.kind == "byte" else 3  # 3: a cautious guess for the disk
    expected_tokens = sum(sizes) // bytes_per_token + len(sizes)
    plan = Plan(out, title, sha256, tokenizer, expected_tokens, val_documents=val_documents)
    return prepare(plan, source, arguments.workers)


if __name__ == "__main__":
    run_main(main)
