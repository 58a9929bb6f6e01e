"""
Tokenize FineWeb, FineWeb-Edu, or any other parquet or jsonl files, local or on the Hugging Face
hub, into token shards.

    python data/prepare_fineweb.py --tokens=1B                FineWeb-Edu -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --dataset=fineweb --sample=100B --tokens=20B
    python data/prepare_fineweb.py --source='/disk/*.parquet' --out=data/mine       all of it

If it is interrupted, run the same command again: it continues after the last finished shard and
writes the same files. 10B tokens take two cores about 1.5 hours, plus the download, and 20 GB of
disk.
"""

import argparse
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

# order.py chooses the order and the validation text, text.py reads the rows, and writer.py
# writes the shards.

if __name__ == "__main__":
    # Import from the repository's root. Python would look in data/ first, where a user's file
    # could shadow a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import common.environment  # before numpy  # noqa: F401  isort: skip
from common.console import Parser, count, parse_count, run_main, warn
from data.files import ROW_FILES, hub_files, local_files
from data.order import ORDERS, InFileOrder, Shuffled, choose_held_out
from data.shards import read_manifest
from data.text import FIELD, FIRST_ROWS, Place, Source
from data.tokenizer import TOKENIZERS, check_lossless, pick_tokenizer, train_bpe
from data.writer import Plan, made_from, prepare, say_what_it_holds, tokens_of

NAMED = dict(fineweb="HuggingFaceFW/fineweb", fineweb_edu="HuggingFaceFW/fineweb-edu")
SAMPLES = ("10B", "100B", "350B")  # sizes in tokens of the samples of FineWeb and FineWeb-Edu
BYTES_PER_TOKEN = 5  # an assumption; GPT-2's tokenizer averages 4.7 on web pages


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub = "fineweb, fineweb_edu, or ORG/NAME on the hub"
    add("--dataset", default="fineweb_edu", help=f"{hub} (default: %(default)s)")
    add("--sample", choices=SAMPLES, help="size of fineweb or fineweb_edu to use (default: 10B)")
    add("--name", help="configuration of ORG/NAME (default: the dataset's default)")
    local = "local .parquet or .jsonl (also .gz, .zst): file, folder or quoted pattern"
    add("--source", type=os.path.expanduser, help=local)  # shells do not expand the ~ in --source=~
    order = "order of the documents (default: %(default)s)"
    add("--order", choices=ORDERS, default=ORDERS[0], help=order)
    add("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    tokens = "training tokens (default: 1B of a dataset on the hub, all of --source)"
    add("--tokens", type=parse_count, help=tokens)
    add("--val_tokens", type=parse_count, default="10M", help="validation tokens (default: 10M)")
    add("--shard_tokens", type=parse_count, default="100M", help="tokens per shard (default: 100M)")
    add("--text_field", default=FIELD, help="field that holds the text (default: %(default)s)")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, help="folder to write to (default: data/DATASET)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    arguments = parser.parse_args(argv)
    if not (arguments.source or arguments.tokens):
        arguments.tokens = 10**9
    if arguments.source and not arguments.out:
        parser.error("--source: needs a folder to write to; add --out=data/NAME")
    if arguments.dataset not in NAMED and "/" not in arguments.dataset and not arguments.source:
        parser.error(f"--dataset={arguments.dataset}: unknown; give {hub}")
    if arguments.name and (arguments.dataset in NAMED and not arguments.source):
        parser.error(f"--name: {arguments.dataset} has samples; try --sample=10B")
    if arguments.sample and (arguments.dataset not in NAMED or arguments.source):
        parser.error("--sample: works only with fineweb and fineweb_edu; leave it out")
    return arguments


def default_folder(arguments: argparse.Namespace) -> Path:
    name = arguments.dataset.rpartition("/")[2]
    if arguments.sample not in (None, "10B"):
        name += f"_{arguments.sample}"
    return Path("data", name)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    out = arguments.out or default_folder(arguments)
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    started = read_manifest(out) if (out / "manifest.json").exists() else {}
    order, val_tokens = arguments.order, arguments.val_tokens
    revision = None
    if arguments.source:
        title, files = arguments.source, local_files([arguments.source], ROW_FILES)
    else:
        dataset = NAMED.get(arguments.dataset, arguments.dataset)
        is_named = arguments.dataset in NAMED
        name = f"sample-{arguments.sample or '10B'}T" if is_named else arguments.name
        title = dataset if name is None else f"{dataset} {name}"
        if started.get("source") == title:
            revision = started["revision"]  # the hub may have a newer one by now
        files, revision = hub_files(dataset, name, revision)
    if started.get("source") != title:
        started = {}  # the manifest describes another source; prepare() will refuse the folder
    source = Source(files, arguments.text_field)
    # read and encode some rows here, to fail before anything is written
    first = [text for _, text in islice(source.rows(Place()), FIRST_ROWS)]
    if tokenizer:
        check_lossless(tokenizer, arguments.tokenizer, first)
    per_token = 1 if arguments.tokenizer == "byte" else BYTES_PER_TOKEN
    settings: dict[str, Any] = dict(revision=revision, text_field=arguments.text_field)
    settings |= dict(val_tokens=val_tokens, shard_tokens=arguments.shard_tokens, order=order)
    reading: InFileOrder | Shuffled = InFileOrder(source, val_tokens)
    if order == "shuffled":
        # Reuse what the manifest recorded, except for local files, which may have changed since.
        counts = started.get("row_groups") if revision else None
        counts = counts or source.row_groups()
        if [started.get(key) for key in ("row_groups", "val_tokens")] == [counts, val_tokens]:
            held_out = started["held_out"]
        else:
            held_out = choose_held_out(source, counts, val_tokens, per_token)
        reading = Shuffled(source, counts, held_out, arguments.seed)
    if not tokenizer:
        # in file order, skip the validation text, about 6 bytes per token
        skip = 6 * reading.val_tokens
        tokenizer = train_bpe(arguments.tokenizer, reading.sample(), skip)
    if arguments.tokens:
        expected_tokens = arguments.tokens + val_tokens
    else:  # all the text
        expected_tokens = sum(source.group_bytes()) // per_token
    plan = Plan(
        folder=out,
        made_from=made_from(title, files, tokenizer, **settings, **reading.settings),
        documents=reading.documents,
        tokenizer=tokenizer,
        expected_tokens=expected_tokens,
        val_tokens=reading.val_tokens,
        train_tokens=arguments.tokens,
        shard_tokens=arguments.shard_tokens,
        hint="give more text, or --val_tokens={twentieth}",
    )
    manifest = prepare(plan, arguments.workers)
    tokens = tokens_of(manifest)
    total = sum(tokens.values())
    if order == "shuffled" and manifest.get("next") is None and tokens["val"] > total / 4:
        held = f"{tokens['val']:,} of {total:,} tokens are held out for validation"
        more = f"delete {out} and run again with --val_tokens={count(total / 20, 1)}"
        warn(f"{held}; to train on more, {more}")
    say_what_it_holds(out, manifest)


if __name__ == "__main__":
    run_main(main)
