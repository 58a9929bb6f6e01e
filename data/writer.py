"""
Turn documents into token shards and a manifest.json, for prepare_fineweb.py and prepare_text.py.

Documents keep the order in which text.py reads them, each preceded by an end-of-text token. Shards
end at a document boundary. After each shard, manifest.json records where in the source the next one
begins. Running the same command again continues after the last finished shard, and the files are
byte-identical however often it was interrupted and however many threads it used.
"""

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.console import UserError, command_line, say, warn
from common.files import locked, names_in, remove_temporaries, replacing, write_json
from common.process import keep_awake
from data.shards import dataset_folder, read_manifest, write_shard
from data.text import Document, Place
from data.tokenizer import SAMPLE_MB, Tokenizer, split_long

# The most that a thread tokenizes at once: documents, and characters
BATCH = 64
BATCH_CHARACTERS = 2**18
# Batches in flight: several of FineWeb's row groups, to keep tokenizing during a download
READ_AHEAD = 64
# From how many places a tokenizer's sample comes, and a short text's validation text. With fewer, a
# single topic could dominate.
PLACES = 16

SMALL_TEXT = 5_000_000  # training tokens; config/own_text.py suits up to about so many

# By default tqdm shares a lock between processes. A killed preparation would leak that lock, which
# makes some systems print a warning.
tqdm.set_lock(threading.RLock())


@dataclass
class Job:
    """Describe the data folder to make."""

    folder: Path
    made_from: dict  # everything that determines the shards: see made_from()
    documents: Callable[[Place], Iterator[Document]]  # yields the documents from a place on
    tokenizer: Tokenizer
    train_tokens: int | None = None  # stop at this many; None: use the whole source
    shard_tokens: int = 100_000_000


def made_from(source: str, files: list[str], tokenizer: Tokenizer, **settings) -> dict:
    """
    Return the part of manifest.json that must stay the same for a preparation to continue: the
    source as the user named it, the sizes and times of its local `files`, the tokenizer, and the
    flags that change the output.
    """
    same: dict[str, Any] = dict(format="uint16 shards, llm.c header", source=source)
    same |= dict(tokenizer=tokenizer.kind, vocab=tokenizer.vocab, eot=tokenizer.eot)
    if tokenizer.kind == "bpe":
        same["tokenizer_sha256"] = hashlib.sha256(tokenizer.spec["json"].encode()).hexdigest()
    stats = {name: os.stat(name) for name in files}
    stamps = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return same | settings | dict(files=stamps)


def prepare(job: Job, workers: int) -> None:
    """
    Fill job.folder, or continue where an earlier launch stopped, tokenizing on `workers` threads,
    and print what it holds. Raises UserError, also if reading or writing fails on the way.
    """
    read_begun(job.folder, **job.made_from)  # refuses before anything is written
    job.folder.mkdir(parents=True, exist_ok=True)
    keep_awake()
    try:
        with locked(job.folder / "lock"):
            manifest = begin_or_continue(job)
            if not manifest["complete"]:
                write_shards(job, manifest, workers)
                finish(job, manifest)
    except OSError as error:  # a full disk, or a deleted source
        path = error.filename or job.folder
        hint = "once that is fixed, the same command continues after the last finished shard"
        raise UserError(f"{path}: {error.strerror}; {hint}") from None
    say_what_it_holds(job.folder, manifest)


# -----------------------------------------------------------------------------
# The folder


def read_begun(folder: Path, **asked) -> dict:
    """
    Return the manifest of a folder in which an earlier launch has finished a shard, or {}. Raises
    UserError if the manifest has other values than those asked for, or if another program's files
    are there.
    """
    names = names_in(folder)
    if "manifest.json" not in names:
        if "tokenizer.json" in names or any(name.endswith(".bin") for name in names):
            raise UserError(f"{folder}: holds files from another program; give another --out")
        return {}
    manifest = read_manifest(folder)
    if manifest.get("complete") is False and not manifest["shards"]:
        return {}
    if differs := [key for key, value in asked.items() if manifest.get(key) != value]:
        problem = f"was made from other text or with other flags ({', '.join(differs)})"
        raise UserError(f"{folder}: {problem}; give another --out")
    return manifest


def begin_or_continue(job: Job) -> dict:
    """Load or create the manifest of a folder that this process has locked."""
    folder = job.folder
    remove_temporaries(folder, "*.bin", "*.json")
    manifest = read_begun(folder, **job.made_from)
    if not manifest:
        manifest = job.made_from | dict(complete=False, shards=[], next=Place()._asdict())
        manifest["left_out"] = {"rows": 0, "no text": 0}
    if manifest["complete"]:
        if manifest.get("next") and tokens_of(manifest)["train"] < (job.train_tokens or 2**63):
            raise UserError(f"{folder}: is finished and takes no more tokens; give another --out")
        say(f"{folder}: complete, nothing to do")
    elif manifest["shards"]:
        say(f"{folder}: continuing after {len(manifest['shards'])} shards")
    return manifest


def tokens_of(manifest: dict) -> dict[str, int]:
    """Return the number of tokens in finished shards, by split."""
    totals = {"train": 0, "val": 0}
    for shard in manifest["shards"]:
        totals[shard["name"].partition("_")[0]] += shard["tokens"]
    return totals


def finish(job: Job, manifest: dict) -> None:
    """Mark a preparation as complete. Raises UserError if a split has no tokens."""
    totals, left_out = tokens_of(manifest), manifest["left_out"]
    if left_out["no text"]:
        held = f"{left_out['no text']:,} of {left_out['rows']:,} rows hold no text in UTF-8"
        warn(f"{manifest['source']}: {held} in the field --text_field, and are left out")
    if not all(totals.values()):
        held = f"{totals['val']:,} tokens for validation and {totals['train']:,} for training"
        raise UserError(f"{manifest['source']}: {held}; give more text")
    manifest["complete"] = True
    write_json(job.folder / "manifest.json", manifest)


def say_what_it_holds(folder: Path, manifest: dict) -> None:
    """Print what a data folder holds, and the command that trains on it."""
    tokens, shards = tokens_of(manifest), manifest["shards"]
    documents, size = (sum(shard[key] for shard in shards) for key in ("documents", "bytes"))
    held = f"{tokens['train']:,} tokens for training and {tokens['val']:,} for validation"
    say(f"{folder}: {documents:,} documents, {held} in {len(shards)} shards")
    total = sum(tokens.values())
    say(f"text: {size:,} bytes, {size / total:.3f} bytes per token; {2 * total:,} bytes on disk")
    # ./NAME, or --dataset would mean data/NAME if that exists, too
    name = folder.name if dataset_folder(folder.name) == folder else os.path.join(".", folder)
    words = ["config/own_text.py", f"--dataset={name}"]
    if tokens["train"] >= SMALL_TEXT or manifest["tokenizer"] not in ("byte", "bpe"):
        say("docs/own_text.md says which tokenizer and which CONFIG suit how much text")
        words = ["CONFIG", f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    say(f"next: {command_line('python', 'train.py', *words)}")


# -----------------------------------------------------------------------------
# From documents to shards


@dataclass
class Part:
    """Holds the contents of a shard that is being filled."""

    tokens: bytearray = field(default_factory=bytearray)  # two bytes per token
    documents: int = 0
    bytes: int = 0  # UTF-8 bytes of their text


def sample_text(documents: Callable[[Place], Iterator[Document]], groups: int) -> Iterator[str]:
    """
    Yield up to SAMPLE_MB of text, nearly all of it for training, to train a tokenizer on: an equal
    part from the beginning of each of some stretches of the source's row groups.
    """
    stretch = math.ceil(groups / PLACES)
    begins = range(0, groups, stretch)
    for begin in begins:
        left = SAMPLE_MB * 1_000_000 // len(begins)
        for document in documents(Place(begin)):
            if left <= 0 or document.after.group >= begin + stretch:
                break
            yield from split_long(document.text)
            left -= len(document.text.encode(errors="replace"))


def write_shards(job: Job, manifest: dict, workers: int) -> None:
    """
    Write the shards that follow the finished ones. The last ones may be short. Only finish() lists
    these in manifest.json, so that an unfinished folder that is continued with more --tokens has no
    short shard in its middle. Raises UserError.
    """
    totals = tokens_of(manifest)
    most = job.train_tokens or 2**63
    # disable=None shows the bar on a terminal only
    with tqdm(total=job.train_tokens, unit="tok", unit_scale=True, disable=None) as bar:
        bar.update(totals["train"])
        documents = encode(job.documents(Place(**manifest["next"])), job.tokenizer, workers)
        while manifest["next"] and totals["train"] < most:
            write_json(job.folder / "manifest.json", manifest)  # its shards are on the disk
            room = min(job.shard_tokens, most - totals["train"])
            parts = take(documents, room, manifest, bar)
            if job.tokenizer.kind == "bpe" and not manifest["shards"]:
                with replacing(job.folder / "tokenizer.json") as file:
                    file.write(job.tokenizer.spec["json"].encode())
            for name in [*parts]:  # pop frees a part before the next one is written
                write_part(job, manifest, name, parts.pop(name))
            totals = tokens_of(manifest)
        documents.close()  # otherwise the threads would tokenize on


def take(documents: Iterator, room: int, manifest: dict, bar: tqdm) -> dict[str, Part]:
    """
    Take documents until those for training have `room` tokens. Notes in the manifest where the
    following documents begin, and how many rows were left out. Returns the shard contents by split.
    """
    parts = {"train": Part(), "val": Part()}
    for after, whole, held_out in documents:
        manifest["left_out"]["rows"] += 1
        manifest["left_out"]["no text"] += not (whole[0] or held_out[0])
        for part, (tokens, size) in ((parts["train"], whole), (parts["val"], held_out)):
            part.tokens += tokens
            part.documents += bool(tokens)
            part.bytes += size
        bar.update(len(whole[0]) // 2)
        if len(parts["train"].tokens) >= 2 * room:
            manifest["next"] = after._asdict()
            return parts
    manifest["next"] = None  # the source has ended
    return parts


def write_part(job: Job, manifest: dict, split: str, part: Part) -> None:
    """Write a shard and add it to the manifest, unless it is empty."""
    if not part.tokens:
        return
    name = f"{split}_{len(manifest['shards']):06d}.bin"
    sha256 = write_shard(job.folder / name, np.frombuffer(part.tokens, "<u2"))
    listed = dict(name=name, tokens=len(part.tokens) // 2, sha256=sha256)
    manifest["shards"].append(listed | dict(documents=part.documents, bytes=part.bytes))


def encode(documents: Iterator[Document], tokenizer: Tokenizer, workers: int) -> Generator:
    """
    Tokenize on `workers` threads (BPE libraries release the GIL). Yields for each document, in
    order, the place after it, and what encode_text() returns for its text and its held-out text.
    Reads far enough ahead to keep the threads busy while the source downloads or a shard is
    written; memory use does not grow with the source. Raises UserError if reading the source fails.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    pending: deque[Future] = deque()
    try:
        for batch in batches(documents):
            pending.append(pool.submit(encode_batch, batch, tokenizer))
            if len(pending) > READ_AHEAD:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield the documents in batches for one thread."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.held_out)
        if len(batch) == BATCH or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def encode_batch(batch: list[Document], tokenizer: Tokenizer) -> list[tuple]:
    return [
        (after, encode_text(text, tokenizer), encode_text(held_out, tokenizer))
        for after, text, held_out in batch
    ]


def encode_text(text: str, tokenizer: Tokenizer) -> tuple[bytes, int]:
    """Return a text's tokens, two bytes each and end-of-text first, and its size in UTF-8."""
    ids = tokenizer.encode(text)
    if not len(ids):
        return b"", 0
    tokens = np.concatenate([[tokenizer.eot], ids], dtype="<u2", casting="unsafe")
    return tokens.tobytes(), len(text.encode(errors="replace"))
