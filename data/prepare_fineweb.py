"""
Turn FineWeb-Edu, or any source of the same form, into token shards: the hub's files and local ones
through the same code.

    python data/prepare_fineweb.py --tokens=1B                sample-10BT -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --source='/disk/*.parquet' --tokens=10B --out=data/fineweb_10B

Stopped in any way, the same command continues after the last finished shard, and the files come out
the same. Rows are read in sources.py; validation, the first of them, is drawn in writer.py.
"""

import argparse
import os
import sys
from argparse import SUPPRESS
from pathlib import Path

if __name__ == "__main__":
    # Import from the root. Python has put data/ here, and a file there may hide a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.console import Parser, UserError, parse_count, run_main
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
    add("--shard_tokens", type=parse_count, default="100M", help="in a shard (default: 100M)")
    add("--text_field", default=sources.FIELD, help="what holds the text (default: %(default)s)")
    add("--skip_broken", action="store_true", help="leave out lines that are no JSON object")
    add("--tokenizer", default="gpt2", help=f"{TOKENIZERS} (default: %(default)s)")
    add("--out", type=Path, default=out, help="the folder to fill (default: %(default)s)")
    add("--workers", type=parse_count, default=os.cpu_count(), help="threads (default: one a core)")
    add("--follow", action="store_true", help=SUPPRESS)  # for a stream: see stream.py
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    follower = Follower() if arguments.follow else None
    name, out = arguments.tokenizer, arguments.out
    tokenizer = pick_tokenizer(name, out)
    title, revision, files, source = open_source(arguments)
    check_beginning(title, source)
    if not tokenizer:
        # not on validation's text: at most 6 bytes for each of its tokens
        texts = (text for _, _, texts in source(0, 0) for text in texts)
        tokenizer = train_bpe(name, texts, skip=6 * arguments.val_tokens)
    settings = {}  # beside those that Plan has; the usual field as earlier versions: without it
    if arguments.text_field != sources.FIELD:
        settings["text_field"] = arguments.text_field
    expected_tokens = arguments.tokens + arguments.val_tokens
    plan = Plan(out, title, files, tokenizer, expected_tokens, settings, revision)
    plan.train_tokens, plan.val_tokens = arguments.tokens, arguments.val_tokens
    plan.shard_tokens = arguments.shard_tokens
    if follower:
        plan.train_tokens, plan.expected_tokens = None, 0
        plan.hint = "choose a larger --dataset, or smaller --eval_tokens"
    manifest = prepare(plan, source, arguments.workers, follower)
    source.report()
    source.say_skipped()
    say_what_it_holds(out, manifest)


def check_beginning(title: str, source: sources.FilesSource) -> None:
    """
    Read the first rows, before anything is written. Raises UserError where they hold no text.
    """
    for _ in source(0, 0):
        if source.rows >= sources.FIRST_ROWS:
            break
    if not source.rows:
        raise UserError(f"{title}: holds no documents")
    source.report()


def open_source(
    arguments: argparse.Namespace,
) -> tuple[str, str | None, list[str], sources.FilesSource]:
    """The source's title and revision for the manifest, its files, and itself. Raises UserError."""
    how = dict(field=arguments.text_field, skip_broken=arguments.skip_broken)
    if arguments.source:
        files = sources.local_files([arguments.source], sources.ROW_FILES, flag="--source=")
        return arguments.source, None, files, sources.FilesSource(files, **how)
    title = f"{arguments.dataset} {arguments.name}"
    begun = begun_revision(arguments.out, title)
    files, revision = sources.hub_files(arguments.dataset, arguments.name, begun, flag="--source")
    source = sources.FilesSource(files, backoff=sources.BACKOFF_SECONDS, **how)
    return title, revision, files, source


def begun_revision(folder: Path, title: str) -> str | None:
    """
    The revision that an earlier start took from the hub: the dataset may have changed there since.
    """
    if not (folder / "manifest.json").exists():
        return None
    begun = read_manifest(folder)
    return begun["revision"] if begun["source"] == title else None


if __name__ == "__main__":
    run_main(main)
