"""
Turn FineWeb-Edu, or any source of the same form, into token shards: the hub's files and local ones
through the same code.

    python data/prepare_fineweb.py --tokens=1B                   the hub's sample-10BT -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --source='/disk/fineweb/*.parquet' --tokens=10B --out=data/fineweb_10B
    python data/prepare_fineweb.py --check data/fineweb_edu --tokens_per_iter=524288 --max_iters=20000

Stopped in any way, the same command goes on after the last finished shard, and the files come out
the same.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # in place of data/, whose files could hide others

from common.console import Parser, UserError, parse_count, run_main
from data.sources import BACKOFF_SECONDS, describe_files, files_source, hub_files, local_files
from data.tokenizer import Tokenizer
from data.writer import MAX_SHARD_TOKENS, Plan, check_folder, prepare, read_manifest

# -----------------------------------------------------------------------------
# Command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--dataset",
        default="HuggingFaceFW/fineweb-edu",
        help="dataset on the hub (default: %(default)s)",
    )
    add("--name", default="sample-10BT", help="its configuration (default: %(default)s)")
    add(
        "--source",
        help="local files in place of the hub: a .parquet or .jsonl file, a folder, or a pattern in quotes",
    )
    add(
        "--tokens",
        type=parse_count,
        default="1B",
        help="tokens for training, fewer where the source ends (default: 1B)",
    )
    add(
        "--val_tokens",
        type=parse_count,
        default="10M",
        help="tokens for validation, at least (default: 10M)",
    )
    add(
        "--shard_tokens", type=parse_count, default="100M", help="tokens in a shard (default: 100M)"
    )
    add(
        "--out",
        type=Path,
        default=Path("data", "fineweb_edu"),
        help="the folder to fill (default: %(default)s)",
    )
    add(
        "--workers",
        type=parse_count,
        default=os.cpu_count(),
        help="threads that tokenise (default: one per core)",
    )
    add("--check", metavar="DIR", help="verify a data folder, and print what it holds")
    add(
        "--tokens_per_iter",
        type=parse_count,
        default="524288",
        help="with --check: for the epochs (default: 524288)",
    )
    add("--max_iters", type=parse_count, help="with --check: for the epochs")
    arguments = parser.parse_args(argv)
    if arguments.shard_tokens > MAX_SHARD_TOKENS:
        parser.error(f"--shard_tokens: at most {MAX_SHARD_TOKENS:,}, which the format can count")
    return arguments


def main(argv: list[str]) -> int | None:
    arguments = parse_arguments(argv)
    if arguments.check:
        return check_folder(arguments.check, arguments.tokens_per_iter, arguments.max_iters)
    tokenizer = Tokenizer({"kind": "gpt2"})
    if arguments.source:
        title, files = arguments.source, local_files(arguments.source)
        revision, source = describe_files(files), files_source(files)
    else:
        title = f"{arguments.dataset} {arguments.name}"
        files, revision = hub_files(
            arguments.dataset, arguments.name, begun_revision(arguments.out, title)
        )
        source = files_source(files, BACKOFF_SECONDS)
    if (
        next(source(0, 0), None) is None
    ):  # opening it finds a source without text before anything is written
        raise UserError(f"{title}: holds no documents")
    plan = Plan(
        arguments.out,
        title,
        revision,
        tokenizer,
        expected_tokens=arguments.tokens + arguments.val_tokens,
        train_tokens=arguments.tokens,
        val_tokens=arguments.val_tokens,
        shard_tokens=arguments.shard_tokens,
    )
    return prepare(plan, source, arguments.workers)


def begun_revision(folder: Path, title: str) -> str | None:
    """
    The revision that an earlier start took from the hub: the dataset may have changed there since.
    """
    begun = read_manifest(folder) if (folder / "manifest.json").exists() else {}
    return begun.get("revision") if begun.get("source") == title else None


if __name__ == "__main__":
    run_main(main)
