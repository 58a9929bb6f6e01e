"""
Make a dataset from your own text, or, without arguments, from the source code of the Python
standard library (needs no download).

    python data/prepare_text.py                                   4.7M byte tokens, in seconds
    python data/prepare_text.py book.txt notes/ --out=data/mine   .txt, .md, .py; all in a folder
    python data/prepare_text.py posts.jsonl --tokenizer=gpt2      .jsonl, .parquet: field `text`
    python data/prepare_text.py book.txt --write=config/book.py   and a config: docs/own_text.md
    python data/prepare_text.py book.txt --tokenizer=bpe:4096 --write=config/book_bpe.py

Each text file is one document, and so is each row. Text must be UTF-8, or UTF-16 with a byte-order
mark, or in --encoding. --val_fraction of the text is held out for validation: whole short documents
and the ends of long ones, spread over the text. From a single document, its end is held out. bpe:N
trains a tokenizer on the text.
In the code, OwnText chooses the validation text, and sources.py reads the files.
"""

import argparse
import glob
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, UserError, command_line, parse_count, raise_if_any, run_main, say
from data import sources
from data.shards import PREPARED_ON_DEMAND
from data.tokenizer import TOKENIZERS, Tokenizer, pick_tokenizer, train_bpe
from data.writer import Plan, prepare, say_what_it_holds, tokens_of

TEMPLATE = Path(__file__).with_name("own_config.template")

VAL_PARTS = 16  # validation comes from this many places, so that no single subject fills it
SETTINGS = ("val_fraction", "encoding", "text_field")  # flags that change the dataset
MOST_NAMES = 10  # file names to print
LEAST_TOKENS = 64 + 1  # in a split: one window of config/quickstart.py
LEAST_TOKENS_WRITTEN = 256 + 1  # one window of a written config

# -----------------------------------------------------------------------------
# Documents


class OwnText:
    """
    Files as a source of rows in two parts, for training and for validation, either may be empty.

    Each document adds `fraction` of its size to what validation is owed. As soon as the debt is a
    sixteenth of all validation, the end of the document pays it, or all of a shorter document. So
    the text is read one document at a time, and validation is spread evenly over it.
    """

    def __init__(self, files: sources.FilesSource, fraction: float):
        """Reads everything once, to know its size. Raises UserError."""
        self.files, self.fraction = files, fraction
        self.characters = self.bytes = self.documents = 0
        for text in (row for _, _, rows in files(0, 0) for row in rows if isinstance(row, str)):
            self.characters += len(text)
            self.bytes += len(text.encode(errors="replace"))
            self.documents += bool(text)

    def __call__(self, file: int, row: int) -> Iterator[sources.RowBatch]:
        owed, part = 0.0, self.fraction * self.characters / VAL_PARTS
        # always from the beginning: the debt depends on everything that came before
        for number, first, rows in self.files(0, 0):
            divided: list[sources.LeftOut | tuple[str, str]] = []
            for text in rows:
                if not text or isinstance(text, sources.LeftOut):
                    divided.append(text or ("", ""))
                    continue
                owed += self.fraction * len(text)
                at = len(text)
                if owed >= part:
                    at = find_split(text, int(owed))
                    owed -= len(text) - at
                divided.append((text[:at], text[at:]))
            if (number, first + len(divided)) > (file, row):
                done = max(row - first, 0) if number == file else 0
                yield number, first + done, divided[done:]


def find_split(text: str, length: int) -> int:
    """
    Where to split off the end of a text, `length` characters or up to half as many more: at a
    paragraph, or else at a line, or at a word.
    """
    at = max(len(text) - length, 0)
    early = max(at - length // 2, 0)
    for mark in ("\n\n", "\n", " "):
        if mark in text[early:at]:
            return text.rindex(mark, early, at) + len(mark)
    return at


def check_encodings(files: list[str], given: str | None) -> None:
    """
    Show how --encoding reads some words of the files. Raises UserError with a line for each text
    file that cannot be read.
    """
    problems, shown = [], []
    for name in (name for name in files if name.lower().endswith(sources.TEXT_FILES)):
        try:
            text, encoding = sources.decode(name, given)
        except UserError as error:
            problems += error.problems
            continue
        if encoding == given:
            # the first words with non-ASCII characters, which show a wrong encoding
            words = re.findall(r"\S*[^\x00-\x7f]\S*", text[:100_000])
            shown.append(f"{name}: {' '.join(words)[:40]!r}")
    raise_if_any(problems)
    if shown:
        say(f"files read as {given}, {len(shown):,} in all, such as:", *shown[:MOST_NAMES])


# -----------------------------------------------------------------------------
# Command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="files, folders, patterns; none: the Python standard library")
    add("--tokenizer", default="byte", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="the folder to make (default: data/NAME, as the config or text)")
    add("--write", type=Path, metavar="CONFIG.py", help="a config file to make for this text")
    add("--val_fraction", type=float, default=0.05, help="share held out (default: %(default)s)")
    add("--encoding", help="of text files that are neither UTF-8 nor UTF-16, such as cp1252")
    add("--text_field", default=sources.FIELD, help="field with the text (default: %(default)s)")
    add("--skip_broken", action="store_true", help="leave out lines that are not JSON objects")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_fraction <= 0.5:
        parser.error(f"--val_fraction: {arguments.val_fraction} is not between 0 and 0.5")
    if arguments.write and (arguments.write.exists() or arguments.write.suffix != ".py"):
        parser.error(f"--write={arguments.write}: give a .py file that does not exist yet")
    if arguments.write and arguments.tokenizer == "gpt2":
        parser.error("--write: not for gpt2; to fine-tune GPT-2 on this text: docs/finetune.md")
    return arguments


def find_files(names: list[str]) -> tuple[str, list[str], str]:
    """The text's title, its files, and a name for the dataset. Raises UserError."""
    if not names:
        library = glob.escape(str(Path(os.__file__).parent))
        title = f"Python {sys.version.split()[0]} standard library"
        return title, sources.local_files([f"{library}/*.py"], (".py",)), PREPARED_ON_DEMAND
    files = sources.local_files(names, sources.TEXT_FILES + sources.ROW_FILES)
    first = Path(names[0])
    named = first.resolve() if first.exists() else Path(files[0])
    return " ".join(str(Path(name)) for name in names)[:200], files, named.stem


def write_config(path: Path, dataset: Path, tokenizer: Tokenizer, tokens: int) -> None:
    """
    Write a config file for a dataset with this many training tokens. The rule for its numbers is in
    own_config.template. Raises OSError.
    """
    values = dict(path=command_line(path), out_dir=f"out/{path.stem}", tokens=tokens)
    values |= dict(dataset=dataset.as_posix(), tokenizer=tokenizer)
    text = TEMPLATE.read_text("utf-8").format(**values, is_bytes=tokenizer.kind == "byte")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    config = arguments.write
    title, files, name = find_files(arguments.files)
    out = arguments.out or Path("data", config.stem if config else name)
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    check_encodings(files, arguments.encoding)
    reader = sources.FilesSource(
        files, arguments.text_field, arguments.encoding, arguments.skip_broken
    )
    sources.check_field(reader)
    source = OwnText(reader, arguments.val_fraction)
    if not tokenizer:
        # trained on the training text alone
        rows = (row for _, _, rows in source(0, 0) for row in rows)
        texts = (row[0] for row in rows if isinstance(row, tuple))
        tokenizer = train_bpe(arguments.tokenizer, texts, total=source.bytes)
    bytes_per_token = 1 if tokenizer.kind == "byte" else 3  # 3: a cautious guess for the disk
    least = LEAST_TOKENS_WRITTEN if config else LEAST_TOKENS
    least_in_all = 100 * math.ceil(least / arguments.val_fraction / 100)
    plan = Plan(
        folder=out,
        source=title,
        files=files,
        tokenizer=tokenizer,
        expected_tokens=source.bytes // bytes_per_token + source.documents,
        settings={key: vars(arguments)[key] for key in SETTINGS},
        least_tokens=least,
        hint=f"give more text, about {least_in_all:,} tokens in all",
    )
    manifest = prepare(plan, source, arguments.workers)
    if config:
        write_config(config, out, tokenizer, tokens_of(manifest)["train"])
    say_what_it_holds(out, manifest, config)


if __name__ == "__main__":
    run_main(main)
