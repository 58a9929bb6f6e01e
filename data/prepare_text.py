"""
Make a dataset from your own text, or, with no argument, from the Python standard library's sources
(needs no download).

    python data/prepare_text.py                                   4.4M byte tokens, in seconds
    python data/prepare_text.py book.txt notes/ --out=data/mine   .txt, .md, .py; all in a folder
    python data/prepare_text.py posts.jsonl --tokenizer=gpt2      .jsonl, .parquet: column `text`
    python data/prepare_text.py book.txt --write=config/book.py   and a config: docs/own_text.md
    python data/prepare_text.py book.txt --tokenizer=bpe:4096 --write=config/book_bpe.py

A text file is one document, and so is a row. Text is UTF-8, UTF-16 with its mark, or else in
--encoding. Validation is --val_fraction of the text: documents, or ends of large ones, from all
over it; of a single document its end. bpe:N is a tokenizer made for the text.
"""

import argparse
import bisect
import codecs
import csv
import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from charset_normalizer import from_bytes  # tiktoken brings it along

from common.console import Parser, UserError, parse_count, raise_if_any, run_main, say
from data.own_config import BLOCK_SIZE
from data.shards import PREPARED_ON_DEMAND
from data.sources import ROW_FILES, Batch, Rows, files_source, local_files
from data.tokenizer import TOKENIZERS, pick_tokenizer, train_tokenizer
from data.writer import Plan, prepare

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# The standard library's modules that every CPython from 3.10 on has on every system, as source, at
# much the same size. Those for validation come first, are of many kinds and, together, about as
# predictable from the others as a module is on average.
MODULES = Path(__file__).with_name("python_stdlib.csv")

CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # but tabs, line and page ends
MOST_CONTROLS = 0.001  # of the characters of a text
# of texts that are not mostly ASCII; with more to choose from, rare ones win on short files
ENCODINGS = "cp1251 koi8_r shift_jis gb18030 big5 euc_kr utf_16_le".split()

PIECES = 16  # of large documents make up validation: more than one subject, or language
GOLDEN_RATIO = 0.6180339887498949  # so many steps of this share of a text as you like fall evenly
MOST_NAMES = 16  # in a line
LEAST_TOKENS = 64 + 1  # of a split: one window of config/quickstart.py

# -----------------------------------------------------------------------------
# Which text


def stdlib_source() -> tuple[str, list[str], int]:
    """
    Title, files, and how many of the first ones are for validation; a missing module is left out.
    """
    library = Path(os.__file__).parent
    found = {"val": [], "train": []}
    with open(MODULES, newline="") as file:
        for row in csv.DictReader(file):
            path = library / row["path"]
            if path.is_file():  # zipfile is a file in some versions, and a folder in others
                found[row["split"]].append(str(path))
    files = found["val"] + found["train"]
    return f"Python {sys.version.split()[0]} standard library", files, len(found["val"])


# -----------------------------------------------------------------------------
# Encodings


def encoding_of(path: str, given: str | None) -> str:
    """
    The encoding of a text file: UTF-16 where it begins with its mark, UTF-8 where it is that, or
    else the one given. Raises UserError, which says what the file looks like.
    """
    content = Path(path).read_bytes()
    own = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    if is_read_by(own, content):
        return own
    utf8 = content.decode(errors="replace")
    broken = utf8.count("\ufffd")
    # most letters are UTF-8: another encoding might read the file, and get all of them wrong
    if broken and sum(char > "\x7f" for char in utf8) > 2 * broken:
        line = 1 + utf8.partition("\ufffd")[0].count("\n")
        clean = "the rest is: iconv -c -f utf-8 -t utf-8 FILE > NEW leaves such bytes out"
        raise UserError(f"{path}: line {line:,} is not UTF-8; {clean}")
    if given and is_read_by(given, content):
        return given
    # bytes of another encoding can look like UTF-8's control characters, but not like ASCII's
    count = count_controls(content.decode("ascii", "replace") if broken else utf8)
    raise UserError(f"{path}: no text in {given or 'UTF-8'}; {looks_like(content, count, given)}")


def looks_like(content: bytes, controls: int, given: str | None) -> str:
    """What a file that cannot be read looks like, and what mends it."""
    mostly_ascii = len(content.decode("ascii", "ignore")) > 0.7 * len(content)
    names = ["cp1252"] if mostly_ascii and not controls else ENCODINGS
    found = from_bytes(content, cp_isolation=names).best()
    if controls and not found:
        return f"{controls:,} NULs and control characters: binary, or damaged; leave it out"
    if not found:
        return "find its encoding: iconv -f NAME -t utf-8 FILE > NEW"
    name = found.encoding.replace("_", "-").replace("16-le", "16le")  # as iconv says
    mend = f"iconv -f {name} -t utf-8 FILE > NEW"
    if not given:
        mend += f" (or --encoding={name} for all such files)"
    reads = f"as {name} it reads {excerpt(str(found))!r}"
    return f"{reads}: if that is right, {mend}; else another encoding"


def excerpt(text: str) -> str:
    """The first words with other than ASCII characters: they show a wrong encoding."""
    return " ".join(re.findall(r"\S*[^\x00-\x7f]\S*", text) or text.split())[:40]


def is_read_by(encoding: str, content: bytes) -> bool:
    try:
        return not count_controls(TextIOWrapper(BytesIO(content), encoding).read())
    except UnicodeError:
        return False


def count_controls(text: str) -> int:
    """The NULs and other control characters of a text that is full of them, or else 0."""
    controls = len(CONTROLS.findall(text))
    return controls if controls > 5 + MOST_CONTROLS * len(text) else 0


# -----------------------------------------------------------------------------
# Documents


class OwnText:
    """
    The documents of some files, numbered from 0. `shares` says which part of a document is for
    validation: the end of it, or with 1 all of it.

    Called as a data.sources.Source, it goes through the files twice: first come the documents for
    validation, then, with file numbers from len(files) on, those for training.
    """

    def __init__(self, files: list[str], given: str | None = None):
        """Reads everything once. Raises UserError with a line for each file that it cannot read."""
        self.files, self.shares = files, {}
        self.encodings = {}  # of the text files
        self.starts, self.sizes = [], []  # first document of each file; bytes of each document
        self.sha256, problems = hashlib.sha256(), []
        for index, name in enumerate(files):
            self.starts.append(len(self.sizes))
            try:
                if not name.lower().endswith(ROW_FILES):
                    self.encodings[name] = encoding_of(name, given)
                for _, texts in self.read_file(index, 0):
                    contents = [(text or "").encode(errors="replace") for text in texts]
                    self.sizes += map(len, contents)
                    for content in filter(None, contents):
                        self.sha256.update(content + b"\0")
            except UserError as error:
                problems += error.problems
        raise_if_any(problems)

    def read_file(self, index: int, row: int) -> Iterator[tuple[int, Rows]]:
        """Batches of a file from a row on: row of the first document, and the documents' texts."""
        name = self.files[index]
        if encoding := self.encodings.get(name):
            # any line ends become \n, so that every system makes the same tokens
            yield 0, [Path(name).read_text(encoding=encoding).removeprefix("\ufeff")]
        else:
            for _, first, texts in files_source([name])(0, row):
                yield first, texts

    def __call__(self, file: int, row: int) -> Iterator[Batch]:
        for number in range(file, 2 * len(self.files)):
            split, index = divmod(number, len(self.files))
            for first, texts in self.read_file(index, row):
                numbered = enumerate(texts, self.starts[index] + first)
                parts = [cut(text or "", self.shares.get(n, 0))[split] for n, text in numbered]
                yield number, first, parts
            row = 0

    def draw_validation(self, fraction: float) -> None:
        """
        Set `shares`: the documents at places that are spread evenly over the text. One larger than
        a piece gives that much of its end each time; so of a single document, or of a few,
        validation is the end, as in nanoGPT.
        """
        ends, taken = list(accumulate(self.sizes)), Counter()
        wanted = fraction * sum(self.sizes)
        place = 0.0
        while taken.total() < wanted:
            place = (place + GOLDEN_RATIO) % 1
            document = bisect.bisect(ends, place * ends[-1])
            taken[document] += math.ceil(wanted / PIECES)
            taken[document] = min(taken[document], self.sizes[document])
        self.shares = {n: taken[n] / self.sizes[n] for n in sorted(taken)}
        self.sha256.update(repr(self.shares).encode())

    def name(self, document: int) -> str:
        path = Path(self.files[bisect.bisect(self.starts, document) - 1])
        file = os.path.join(*path.parts[-2:])
        return file if self.shares[document] == 1 else f"the end of {file}"


def cut(text: str, share: float) -> tuple[str, str]:
    """
    A document's end, that share of it or up to half as much again, and what comes before it. The
    cut is where a paragraph begins, or else a line, a word.
    """
    at = int(len(text) * (1 - share))
    early = max(at - (len(text) - at) // 2, 0)
    for mark in ("\n\n", "\n", " "):
        if mark in text[early:at]:
            at = text.rindex(mark, early, at) + len(mark)
            break
    return text[at:], text[:at]


# -----------------------------------------------------------------------------
# Command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="files, folders, patterns; none: the Python standard library")
    add("--tokenizer", default="byte", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="the folder to make (default: data/NAME, as the config or text)")
    add("--write", type=Path, metavar="CONFIG.py", help="a config file to make for this text")
    add("--val_fraction", type=float, default=0.05, help="validation's share (default: 0.05)")
    add("--encoding", help="of text files that are neither UTF-8 nor UTF-16, such as cp1252")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: one a core)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_fraction <= 0.5:
        parser.error(f"--val_fraction: {arguments.val_fraction} is not between 0 and 0.5")
    try:
        "x".encode(arguments.encoding or "utf-8")
    except LookupError as error:
        parser.error(f"--encoding: {error}")
    if arguments.write and (arguments.write.exists() or arguments.write.suffix != ".py"):
        parser.error(f"--write={arguments.write}: give a .py file that does not exist yet")
    if arguments.write and arguments.tokenizer == "gpt2":
        parser.error("--write: not for gpt2: docs/own_text.md has the command to fine-tune it")
    return arguments


def default_out(arguments: argparse.Namespace, files: list[str]) -> Path:
    if arguments.write:
        return Path("data", arguments.write.stem)
    if not arguments.files:
        return Path("data", PREPARED_ON_DEMAND)
    first = Path(arguments.files[0])
    return Path("data", first.resolve().stem if first.exists() else Path(files[0]).stem)


def describe(text: OwnText, names: list[str], given: str | None) -> list[str]:
    """
    How the files were read, with a piece of those in the encoding `given`, what was left out, and
    what is for validation, a line each.
    """
    others = set(local_files(names, ("",))) - set(text.files)
    left_out = Counter(Path(name).suffix or Path(name).name for name in sorted(others))
    left_out += Counter({"empty text": text.sizes.count(0)})
    in_given = [name for name, encoding in text.encodings.items() if encoding == given]
    pieces = [f"{name} {excerpt(Path(name).read_text(given))!r}" for name in in_given]
    lines = {"read": Counter(text.encodings.values()), f"as {given}": Counter(pieces)}
    lines |= {"left out": left_out, "validation": Counter(map(text.name, text.shares))}
    return [f"{key}: {tally(counts)}" for key, counts in lines.items() if counts]


def tally(counts: Counter) -> str:
    parts = [f"{what} ({count:,})" if count > 1 else what for what, count in counts.items()]
    if len(parts) > MOST_NAMES:
        parts[MOST_NAMES:] = [f"and {len(parts) - MOST_NAMES} more"]
    return ", ".join(parts)


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    if arguments.files:
        title, files = " ".join(arguments.files)[:200], local_files(arguments.files, ENDINGS)
    else:
        title, files, val_documents = stdlib_source()
    out = arguments.out or default_out(arguments, files)
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    text = OwnText(files, arguments.encoding)
    total = sum(text.sizes)
    if arguments.files:
        text.draw_validation(arguments.val_fraction)
        say(*describe(text, arguments.files, arguments.encoding))
    else:
        text.shares = dict.fromkeys(range(val_documents), 1)
    # not on validation's text
    tokenizer = tokenizer or train_tokenizer(arguments.tokenizer, text(len(files), 0), 0, total)
    bytes_per_token = 1 if tokenizer.kind == "byte" else 3  # 3: a cautious guess for the disk
    expected_tokens = total // bytes_per_token + len(text.sizes)
    plan = Plan(out, title, text.sha256.hexdigest(), tokenizer, expected_tokens)
    plan.val_documents, plan.config = len(text.shares), arguments.write
    plan.least_tokens = BLOCK_SIZE + 1 if plan.config else LEAST_TOKENS
    least = 100 * math.ceil(plan.least_tokens / arguments.val_fraction / 100)
    plan.mend = f"give more text, about {least:,} tokens in all"
    return prepare(plan, text, arguments.workers)


if __name__ == "__main__":
    run_main(main)
