"""
Tokenize FineWeb, FineWeb-Edu, or another parquet or jsonl dataset of the Hugging Face hub into
token shards. For files of your own, see prepare_text.py.

    python data/prepare_fineweb.py --tokens=1B                FineWeb-Edu -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --dataset=fineweb --sample=100B --tokens=20B

The row groups of all the dataset's parquet files are read in an order that --seed shuffles. The
first documents, of about --val_tokens, are held out for validation, and those that follow are for
training. So folders with another --tokens or --tokenizer have the same validation text.

If it is interrupted, run the same command again: it continues after the last finished shard and
writes the same files. 10B tokens take two cores about 1.5 hours, plus the download, and 20 GB of
disk.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# text.py reads the rows, and writer.py writes the shards.

if __name__ == "__main__":
    # Import from the repository's root. Python would look in data/ first, where a user's file
    # could shadow a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import common.environment  # before numpy  # noqa: F401  isort: skip
from common.console import Parser, parse_count, run_main
from data.files import hub_files
from data.shards import read_manifest
from data.text import FIELD, FIRST_ROWS, Place, Source, with_retries
from data.tokenizer import TOKENIZERS, check_lossless, pick_tokenizer, train_bpe
from data.writer import Document, Plan, made_from, prepare, sample_text, say_what_it_holds

NAMED = dict(fineweb="HuggingFaceFW/fineweb", fineweb_edu="HuggingFaceFW/fineweb-edu")
SAMPLES = ("10B", "100B", "350B")  # sizes in tokens of the samples of FineWeb and FineWeb-Edu
SETTINGS = ("text_field", "val_tokens", "shard_tokens", "seed")  # flags that change the dataset
BYTES_PER_TOKEN = 5  # of validation text, assumed; GPT-2's tokenizer averages 4.7 on web pages


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub = "fineweb, fineweb_edu, or ORG/NAME on the hub"
    add("--dataset", default="fineweb_edu", help=f"{hub} (default: %(default)s)")
    add("--sample", choices=SAMPLES, help="size of fineweb or fineweb_edu to use (default: 10B)")
    add("--name", help="configuration of ORG/NAME (default: the dataset's default)")
    add("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    add("--tokens", type=parse_count, default="1B", help="training tokens (default: 1B)")
    held_out = f"validation tokens, of {BYTES_PER_TOKEN} bytes each (default: 10M)"
    add("--val_tokens", type=parse_count, default="10M", help=held_out)
    add("--shard_tokens", type=parse_count, default="100M", help="tokens per shard (default: 100M)")
    add("--text_field", default=FIELD, help="field that holds the text (default: %(default)s)")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="folder to write to (default: data/DATASET)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    arguments = parser.parse_args(argv)
    if arguments.dataset not in NAMED and "/" not in arguments.dataset:
        parser.error(f"--dataset={arguments.dataset}: unknown; give {hub}")
    if arguments.name and arguments.dataset in NAMED:
        parser.error(f"--name: {arguments.dataset} has samples; try --sample=10B")
    if arguments.sample and arguments.dataset not in NAMED:
        parser.error("--sample: works only with fineweb and fineweb_edu; leave it out")
    return arguments


def default_folder(arguments: argparse.Namespace) -> Path:
    name = arguments.dataset.rpartition("/")[2]
    if arguments.sample not in (None, "10B"):
        name += f"_{arguments.sample}"
    return Path("data", name)


def divide(source: Source, begin: Place, val_bytes: int) -> Iterator[Document]:
    """Turn rows into documents, starting at a place, and hold out the first `val_bytes` of text."""
    held = begin.val
    for after, text in source.rows(begin):
        is_val = held < val_bytes
        held += len((text or "").encode(errors="replace")) if is_val else 0
        place = after._replace(val=held)
        yield Document(place, None, text or "") if is_val else Document(place, text)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    out = arguments.out or default_folder(arguments)
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    dataset = NAMED.get(arguments.dataset, arguments.dataset)
    is_named = arguments.dataset in NAMED
    name = f"sample-{arguments.sample or '10B'}T" if is_named else arguments.name
    title = dataset if name is None else f"{dataset} {name}"
    started = read_manifest(out) if (out / "manifest.json").exists() else {}
    if started.get("source") != title:
        started = {}  # the manifest describes another source; prepare() will refuse the folder
    # The hub may have a newer revision by now.
    revision, counts = started.get("revision"), started.get("row_groups")
    files: list[str] = []
    is_finished = tokenizer and started.get("complete")
    if not is_finished:  # a finished folder needs no network
        address = f"hf://datasets/{dataset}"
        files, revision = with_retries(address, lambda _: hub_files(dataset, name, revision))
    field = arguments.text_field
    source = Source(files, field, seed=arguments.seed, known_counts=counts)
    if not is_finished:
        # read and encode some rows here, to fail before anything is written
        first = [text for _, text in islice(source.rows(Place()), FIRST_ROWS)]
        if tokenizer:
            check_lossless(tokenizer, arguments.tokenizer, first)

    val_bytes = arguments.val_tokens * (1 if arguments.tokenizer == "byte" else BYTES_PER_TOKEN)
    if not tokenizer:  # train one, on text that follows the validation text
        sample = sample_text(source.rows, source.group_bytes(), val_bytes)
        tokenizer = train_bpe(arguments.tokenizer, sample)
    settings = {key: vars(arguments)[key] for key in SETTINGS}
    settings |= dict(revision=revision, row_groups=source.counts)
    plan = Plan(
        folder=out,
        made_from=made_from(title, [], tokenizer, **settings),
        documents=lambda begin: divide(source, begin, val_bytes),
        tokenizer=tokenizer,
        expected_tokens=arguments.tokens + arguments.val_tokens,
        train_tokens=arguments.tokens,
        shard_tokens=arguments.shard_tokens,
        hint="give more text, or --val_tokens={twentieth}",
    )
    manifest = prepare(plan, arguments.workers)
    say_what_it_holds(out, manifest)


if __name__ == "__main__":
    run_main(main)
