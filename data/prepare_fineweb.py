"""
Turn FineWeb-Edu, or any other parquet or jsonl files, on the hub or local, into token shards.

    python data/prepare_fineweb.py --tokens=1B                sample-10BT -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --source='/disk/*.parquet' --tokens=10B --out=data/fineweb_10B

However it is stopped, the same command continues after the last finished shard and writes the same
files. A larger --tokens continues a finished folder. sources.py reads the rows; writer.py holds out
the first ones for validation.
"""

import argparse
import os
import sys
from itertools import islice, starmap
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, parse_count, run_main
from data.shards import read_manifest
from data.sources import FIELD, FIRST_ROWS, ROW_FILES, Place, Source, hub_files, local_files
from data.stream import Allowance
from data.tokenizer import TOKENIZERS, pick_tokenizer, train_bpe
from data.writer import Document, Plan, made_from, prepare, say_what_it_holds


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub = "HuggingFaceFW/fineweb-edu"
    out = Path("data", "fineweb_edu")
    add("--dataset", default=hub, help="dataset on the hub (default: %(default)s)")
    add("--name", default="sample-10BT", help="its configuration (default: %(default)s)")
    add("--source", help="local .parquet or .jsonl: a file, a folder, or a pattern in quotes")
    add("--tokens", type=parse_count, default="1B", help="tokens for training (default: 1B)")
    add("--val_tokens", type=parse_count, default="10M", help="for validation (default: 10M)")
    add("--shard_tokens", type=parse_count, default="100M", help="tokens per shard (default: 100M)")
    add("--text_field", default=FIELD, help="field with the text (default: %(default)s)")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, default=out, help="the folder to fill (default: %(default)s)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    add("--run_id", help=argparse.SUPPRESS)  # of the run that streams: stream.py
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    allowance = Allowance() if arguments.run_id else None
    out, field = arguments.out, arguments.text_field
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    revision = None
    if arguments.source:
        title, files = arguments.source, local_files([arguments.source], ROW_FILES)
    else:
        title = f"{arguments.dataset} {arguments.name}"
        started = read_manifest(out) if (out / "manifest.json").exists() else {}
        if started.get("source") == title:
            revision = started["revision"]  # the dataset may have changed on the hub since
        files, revision = hub_files(arguments.dataset, arguments.name, revision)
    source = Source(files, field)
    for _ in islice(source.rows(Place()), FIRST_ROWS):  # raises before anything is written
        pass
    if not tokenizer:
        # skips the validation text: at most 6 bytes per token
        texts = (text for _, text in source.rows(Place()))
        tokenizer = train_bpe(arguments.tokenizer, texts, skip=6 * arguments.val_tokens)
    settings = dict(
        revision=revision,
        text_field=field,
        val_tokens=arguments.val_tokens,
        shard_tokens=arguments.shard_tokens,
    )
    plan = Plan(
        folder=out,
        made_from=made_from(title, files, tokenizer, **settings),
        documents=lambda place: starmap(Document, source.rows(place)),
        tokenizer=tokenizer,
        expected_tokens=arguments.tokens + arguments.val_tokens,
        val_tokens=arguments.val_tokens,
        train_tokens=arguments.tokens,
        shard_tokens=arguments.shard_tokens,
        hint="give more text, or a lower --val_tokens",
    )
    if allowance:
        plan.run_id = arguments.run_id
        plan.wait = allowance.wait
        plan.expected_tokens = 0
        plan.train_tokens = None  # as many as the run asks for
        plan.hint = "choose a larger --dataset, or smaller --eval_tokens"
    say_what_it_holds(out, prepare(plan, arguments.workers))


if __name__ == "__main__":
    run_main(main)
