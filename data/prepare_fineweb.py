"""
Turn FineWeb-Edu, or any other parquet or jsonl files, on the hub or local, into token shards.

    python data/prepare_fineweb.py --tokens=1B                sample-10BT -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --source='/disk/*.parquet' --tokens=10B --out=data/fineweb_10B

However it is stopped, the same command continues after the last finished shard and writes the same
files. sources.py reads the rows; writer.py holds out the first ones for validation.
"""

import argparse
import os
import sys
from argparse import SUPPRESS
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, parse_count, run_main
from data import sources
from data.shards import read_manifest
from data.stream import Follower
from data.tokenizer import TOKENIZERS, pick_tokenizer, train_bpe
from data.writer import Plan, prepare, say_what_it_holds


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub, out = "HuggingFaceFW/fineweb-edu", Path("data", "fineweb_edu")
    add("--dataset", default=hub, help="dataset on the hub (default: %(default)s)")
    add("--name", default="sample-10BT", help="its configuration (default: %(default)s)")
    add("--source", help="local .parquet or .jsonl: a file, a folder, or a pattern in quotes")
    add("--tokens", type=parse_count, default="1B", help="tokens for training (default: 1B)")
    add("--val_tokens", type=parse_count, default="10M", help="for validation (default: 10M)")
    add("--shard_tokens", type=parse_count, default="100M", help="tokens per shard (default: 100M)")
    add("--text_field", default=sources.FIELD, help="field with the text (default: %(default)s)")
    add("--skip_broken", action="store_true", help="leave out lines that are not JSON objects")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, default=out, help="the folder to fill (default: %(default)s)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: all cores)")
    add("--follow", action="store_true", help=SUPPRESS)  # for a stream: see stream.py
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    follower = Follower() if arguments.follow else None
    out, field = arguments.out, arguments.text_field
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    revision = None
    if arguments.source:
        title, files = arguments.source, sources.local_files([arguments.source], sources.ROW_FILES)
    else:
        title = f"{arguments.dataset} {arguments.name}"
        started = read_manifest(out) if (out / "manifest.json").exists() else {}
        if started.get("source") == title:
            revision = started["revision"]  # the dataset may have changed on the hub since
        files, revision = sources.hub_files(arguments.dataset, arguments.name, revision)
    source = sources.FilesSource(files, field, skip_broken=arguments.skip_broken)
    sources.check_field(source)
    if not tokenizer:
        # skips the validation text: at most 6 bytes per token
        texts = (row for _, _, rows in source(0, 0) for row in rows if isinstance(row, str))
        tokenizer = train_bpe(arguments.tokenizer, texts, skip=6 * arguments.val_tokens)
    plan = Plan(
        folder=out,
        source=title,
        files=files,
        tokenizer=tokenizer,
        expected_tokens=0 if follower else arguments.tokens + arguments.val_tokens,
        settings=dict(text_field=field),
        revision=revision,
        val_tokens=arguments.val_tokens,
        train_tokens=None if follower else arguments.tokens,
        shard_tokens=arguments.shard_tokens,
        hint="give more text, or a lower --val_tokens",
    )
    if follower:
        plan.hint = "choose a larger --dataset, or smaller --eval_tokens"
    manifest = prepare(plan, source, arguments.workers, follower)
    say_what_it_holds(out, manifest)


if __name__ == "__main__":
    run_main(main)
