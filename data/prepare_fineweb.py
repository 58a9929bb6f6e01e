"""
Tokenize FineWeb, FineWeb-Edu, or another parquet or jsonl dataset of the Hugging Face hub into
token shards. For files of your own, see prepare_text.py.

    python data/prepare_fineweb.py --tokens=1B                FineWeb-Edu -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --dataset=fineweb --name=sample-100BT --tokens=20B

The row groups of all the dataset's parquet files are read in an order that --seed shuffles. 1.25%
of the text, up to 50 million characters, is held out for validation: whole documents, and the ends
of very long ones. A folder with more --tokens begins with the same validation text.

If it is interrupted, run the same command again: it continues after the last finished shard and
writes the same files. 10B tokens take two cores about 1.5 hours, plus the download, and 20 GB of
disk.
"""

import argparse
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
from data.tokenizer import TOKENIZERS, pick_tokenizer, train_bpe
from data.writer import Job, made_from, prepare, read_begun, sample_text

NAMED = dict(fineweb="HuggingFaceFW/fineweb", fineweb_edu="HuggingFaceFW/fineweb-edu")
SETTINGS = ("text_field", "val_fraction", "shard_tokens", "seed")  # flags that change the dataset
# With --tokens=1B, the 10.5M validation tokens that config/fast.py evaluates, and some to spare
VAL_FRACTION = 0.0125


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub = "fineweb, fineweb_edu, or ORG/NAME on the hub"
    add("--dataset", default="fineweb_edu", help=f"{hub} (default: %(default)s)")
    add("--name", help="configuration (default: the dataset's default, of FineWeb sample-10BT)")
    add("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    add("--tokens", type=parse_count, default="1B", help="training tokens (default: 1B)")
    held_out = "fraction held out, up to 50M characters (default: %(default)s)"
    add("--val_fraction", type=parse_fraction, default=VAL_FRACTION, help=held_out)
    add("--shard_tokens", type=parse_count, default="100M", help="tokens per shard (default: 100M)")
    add("--text_field", default=text.FIELD, help="field that holds the text (default: %(default)s)")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="folder to write to (default: data/DATASET)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    out = arguments.out or Path("data", arguments.dataset.rpartition("/")[2])
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    dataset = NAMED.get(arguments.dataset, arguments.dataset)
    name = arguments.name or ("sample-10BT" if arguments.dataset in NAMED else None)
    title = dataset if name is None else f"{dataset} {name}"
    settings = {key: vars(arguments)[key] for key in SETTINGS}
    begun = read_begun(out, source=title, **settings)
    revision = begun.get("revision")  # the hub may have a newer one by now
    files: list[str] = []
    if not (tokenizer and begun.get("complete")):  # a finished folder needs no network
        files, revision = text.hub_files(dataset, name, revision)
    source = text.Source(files, arguments.text_field, arguments.seed)

    def documents(begin: text.Place) -> Iterator[text.Document]:
        limits = (text.HELD_OUT_PIECE, text.MOST_HELD_OUT)
        return text.divide(source, begin, arguments.val_fraction, *limits)

    if not tokenizer:  # train one
        tokenizer = train_bpe(arguments.tokenizer, sample_text(documents, len(source.groups)))
    settings |= dict(revision=revision)
    job = Job(
        folder=out,
        made_from=made_from(title, [], tokenizer, **settings),
        documents=documents,
        tokenizer=tokenizer,
        train_tokens=arguments.tokens,
        shard_tokens=arguments.shard_tokens,
    )
    prepare(job, arguments.workers)


if __name__ == "__main__":
    run_main(main)
