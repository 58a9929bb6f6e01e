"""
Tokenize FineWeb, FineWeb-Edu, or another parquet or jsonl dataset of the Hugging Face hub into
token shards. For files of your own, see prepare_text.py.

    python data/prepare_fineweb.py --tokens=1B                FineWeb-Edu -> data/fineweb_edu, 2 GB
    python data/prepare_fineweb.py --dataset=fineweb --sample=100B --tokens=20B

The row groups of all the dataset's parquet files are read in an order that --seed shuffles. The
first sixteen, or all if there are fewer, give equal parts of the validation text, and the rest is
for training. Folders with another --tokens or --tokenizer have the same validation text.

If it is interrupted, run the same command again: it continues after the last finished shard and
writes the same files. 10B tokens take two cores about 1.5 hours, plus the download, and 20 GB of
disk.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

if __name__ == "__main__":
    # Import from the repository's root. Python would look in data/ first, where a user's file
    # could shadow a library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import common.environment  # before numpy  # noqa: F401  isort: skip
from common.console import Parser, count, parse_count, run_main, warn
from data.files import hub_files
from data.text import FIELD, FIRST_ROWS, Place, Source, with_retries
from data.tokenizer import TOKENIZERS, Tokenizer, check_lossless, pick_tokenizer, train_bpe
from data.writer import (
    PLACES,
    Document,
    Plan,
    made_from,
    prepare,
    read_begun,
    sample_text,
    say_what_it_holds,
    tokens_of,
)

NAMED = dict(fineweb="HuggingFaceFW/fineweb", fineweb_edu="HuggingFaceFW/fineweb-edu")
SAMPLES = ("10B", "100B", "350B")  # sizes in tokens of the samples of FineWeb and FineWeb-Edu
SETTINGS = ("text_field", "val_tokens", "shard_tokens", "seed")  # flags that change the dataset
BYTES_PER_TOKEN = 5  # assumed for validation text; GPT-2's tokenizer averages 4.7 on web pages


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    hub = "fineweb, fineweb_edu, or ORG/NAME on the hub"
    add("--dataset", default="fineweb_edu", help=f"{hub} (default: %(default)s)")
    add("--sample", choices=SAMPLES, help="size of fineweb or fineweb_edu to use (default: 10B)")
    add("--name", help="configuration of ORG/NAME (default: the dataset's default)")
    add("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    add("--tokens", type=parse_count, default="1B", help="training tokens (default: 1B)")
    held_out = f"validation text, counted as {BYTES_PER_TOKEN} bytes a token (default: 10M, 50 MB)"
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
        parser.error(f"--name: use --sample for {arguments.dataset}, such as --sample=10B")
    if arguments.sample and arguments.dataset not in NAMED:
        parser.error("--sample: works only with fineweb and fineweb_edu; leave it out")
    return arguments


def default_folder(arguments: argparse.Namespace) -> Path:
    name = arguments.dataset.rpartition("/")[2]
    if arguments.sample not in (None, "10B"):
        name += f"_{arguments.sample}"
    return Path("data", name)


def place_before(group: int, source: Source, val_bytes: int) -> Place:
    """
    Return the place at which a row group begins, if the groups before it gave their parts of the
    validation text. The first sixteen row groups, or all if there are fewer, give equal parts.
    """
    return Place(group, 0, val_bytes * max(1 - group / min(PLACES, len(source.groups)), 0))


def divide(
    source: Source, begin: Place, val_bytes: int, only_val: bool = False
) -> Iterator[Document]:
    """
    Turn rows into documents, starting at a place. Hold out the first documents of each row group,
    until it has given its part of the validation text, and what shorter groups before it lacked.
    With only_val, skip the documents for training.
    """
    owed = begin.owed
    for group in range(begin.group, len(source.groups)):
        least = place_before(group + 1, source, val_bytes).owed
        if only_val and owed <= least:
            continue
        for after, text in source.group_rows(group, begin.row if group == begin.group else 0):
            if owed > least:
                owed -= len((text or "").encode(errors="replace"))
                yield Document(after._replace(owed=owed), None, text or "")
            elif only_val:
                break
            else:
                yield Document(after._replace(owed=owed), text)


def check_first(
    documents: Iterator[Document], tokenizer: Tokenizer | None, name: str
) -> Iterator[Document]:
    """
    Read and encode some documents, to fail before anything is written. Returns all documents.
    Raises UserError.
    """
    first = [*islice(documents, FIRST_ROWS)]
    if tokenizer:
        check_lossless(tokenizer, name, (document.text or document.held_out for document in first))
    return chain(first, documents)


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    out = arguments.out or default_folder(arguments)
    tokenizer = pick_tokenizer(arguments.tokenizer, out)
    dataset = NAMED.get(arguments.dataset, arguments.dataset)
    is_named = arguments.dataset in NAMED
    name = f"sample-{arguments.sample or '10B'}T" if is_named else arguments.name
    title = dataset if name is None else f"{dataset} {name}"
    begun = read_begun(out)
    if begun.get("source") != title:
        begun = {}  # the manifest describes another source; prepare() will refuse the folder
    # The hub may have a newer revision by now.
    revision, counts = begun.get("revision"), begun.get("row_groups")
    is_begun = (out / "manifest.json").exists
    files: list[str] = []
    if not (tokenizer and begun.get("complete")):  # a finished folder needs no network
        address = f"hf://datasets/{dataset}"
        files, revision = with_retries(
            address, lambda: hub_files(dataset, name, revision), is_begun
        )
    source = Source(files, arguments.text_field, None, arguments.seed, counts, is_begun)
    val_bytes = arguments.val_tokens * BYTES_PER_TOKEN
    begin = Place(owed=val_bytes)
    all_documents = divide(source, begin, val_bytes)
    if not begun:
        all_documents = check_first(all_documents, tokenizer, arguments.tokenizer)

    def documents(place: Place, only_val: bool) -> Iterator[Document]:
        return all_documents if place == begin else divide(source, place, val_bytes, only_val)

    def documents_from(group: int) -> Iterator[Document]:
        return divide(source, place_before(group, source, val_bytes), val_bytes)

    if not tokenizer:  # train one
        sample = sample_text(documents_from, source.group_bytes())
        tokenizer = train_bpe(arguments.tokenizer, sample)
    settings = {key: vars(arguments)[key] for key in SETTINGS}
    settings |= dict(revision=revision, row_groups=source.counts)
    plan = Plan(
        folder=out,
        made_from=made_from(title, [], tokenizer, **settings),
        documents=documents,
        tokenizer=tokenizer,
        begin=begin,
        expected_tokens=arguments.tokens + arguments.val_tokens,
        train_tokens=arguments.tokens,
        shard_tokens=arguments.shard_tokens,
        hint="give more text, or --val_tokens={twentieth}",
    )
    manifest = prepare(plan, arguments.workers)
    held, total = tokens_of(manifest)["val"], sum(tokens_of(manifest).values())
    if manifest.get("next") is None and held > total / 4:
        fewer = count(arguments.val_tokens * total / (20 * held), 1)  # a twentieth of the text
        hint = f"delete {out} and repeat the command with --val_tokens={fewer}"
        warn(f"{held:,} of {total:,} tokens are held out for validation; to train on more, {hint}")
    say_what_it_holds(out, manifest)


if __name__ == "__main__":
    run_main(main)
