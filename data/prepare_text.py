"""
Make a dataset from your own text or, without arguments, from the source code of Python's standard
library, which needs no download.

    python data/prepare_text.py                                   4.7M byte tokens, in seconds
    python data/prepare_text.py book.txt notes/ --out=data/mine   .txt, .md, .py; whole folders
    python data/prepare_text.py posts.jsonl --tokenizer=gpt2      .jsonl, .parquet: field `text`
    python data/prepare_text.py book.txt --tokenizer=bpe:4096     trains a tokenizer on the text

Each text file is one document (above 64 MB, each piece of about 1 MB), and so is each row of a
.jsonl or .parquet file. Text files must be UTF-8, or UTF-16 with a byte-order mark. 5% of the text
is held out for validation, but no more than 50 million characters unless you give --val_fraction:
short documents and the ends of long ones, spread over the text. With a single document its end is
held out. bpe:N trains a tokenizer on the text.

The text may have any size. If it is interrupted, run the same command again: it continues after the
last finished shard.
"""

import argparse
import glob
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    # Import from the repository's root. Python would look in data/ first, where a user's file
    # could shadow a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import common.environment  # before numpy  # noqa: F401  isort: skip

from common.console import Parser, parse_count, parse_fraction, run_main
from data import text
from data.download import QUICKSTART_DATA
from data.tokenizer import TOKENIZERS, pick_tokenizer, train_bpe
from data.writer import PLACES, Job, made_from, prepare, sample_text

VAL_FRACTION = 0.05  # held out, unless --val_fraction says otherwise


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="files, folders, patterns (default: Python's standard library)")
    add("--tokenizer", default="byte", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="folder to write to (default: data/NAME, named after the text)")
    held_out = f"fraction held out (default: {VAL_FRACTION}, at most 50M characters)"
    add("--val_fraction", type=parse_fraction, help=held_out)
    add("--text_field", default=text.FIELD, help="field that holds the text (default: %(default)s)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    return parser.parse_args(argv)


def find_files(names: list[str]) -> tuple[str, list[str], str]:
    """Return the text's title, its files, and a name for the dataset. Raises UserError."""
    if not names:
        library = glob.escape(str(Path(os.__file__).parent))
        title = f"Python {sys.version.split()[0]} standard library"
        return title, text.local_files([f"{library}/*.py"], (".py",)), QUICKSTART_DATA
    files = text.local_files(names, text.TEXT_FILES + text.ROW_FILES)
    first = Path(names[0])
    named = first.resolve() if first.exists() else Path(files[0])
    return " ".join(str(Path(name)) for name in names)[:200], files, named.stem


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    title, files, name = find_files(arguments.files)
    out = arguments.out or Path("data", name)
    source = text.Source(files, arguments.text_field)
    size = source.size()  # in bytes, about as many as the characters
    fraction = arguments.val_fraction or min(VAL_FRACTION, text.MOST_HELD_OUT / max(size, 1))
    piece = min(fraction * size / PLACES, text.HELD_OUT_PIECE)

    def documents(begin: text.Place) -> Iterator[text.Document]:
        return text.divide(source, begin, fraction, piece)

    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    if not tokenizer:  # train one
        tokenizer = train_bpe(arguments.tokenizer, sample_text(documents, len(source.groups)))
    settings = dict(text_field=arguments.text_field, val_fraction=fraction)
    job = Job(
        folder=out,
        made_from=made_from(title, files, tokenizer, **settings),
        documents=documents,
        tokenizer=tokenizer,
    )
    prepare(job, arguments.workers)


if __name__ == "__main__":
    run_main(main)
