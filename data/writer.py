"""
Documents in, token shards and manifest.json out: what prepare_fineweb.py and prepare_text.py have
in common.

Documents keep the order of the source, an end-of-text token before each; null and empty ones are
skipped. The first whole documents are the validation split, the rest is training. A shard is
written when it is full, and after it the manifest, which also says where in the source the next
shard begins. So an interrupted preparation continues after the last finished shard, and its files
come out the same, byte for byte, however often it was interrupted and with any number of workers.
"""

import hashlib
import json
import math
import shlex
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.console import RunError, UserError, complain, raise_if_any, say
from common.files import fsync_folder, lack_of_space, remove_temporaries, replacing, try_lock
from data.own_config import write_config
from data.shards import dataset_folder, read_manifest, split_of, write_shard
from data.sources import Batch, Source
from data.tokenizer import Tokenizer, encode_rows, read_bpe

FORMAT = "uint16 shards, llm.c header"
# What must be the same for a preparation to continue
IDENTITY = ("format", "tokenizer", "vocab", "tokenizer_sha256", "source", "revision")
IDENTITY += ("train_tokens", "val_tokens", "val_documents", "shard_tokens")  # its settings

SPARE_BYTES = 50_000_000  # left free on the disk
READ_AHEAD = 2  # batches of documents for each thread that tokenises
SMALL_DATASET = 100_000_000  # tokens; the quickstart's model suits fewer

CONTINUE = "the same command continues after the last finished shard"


@dataclass
class Plan:
    """
    What a data folder is to hold. Validation is over when both val_tokens and val_documents are
    reached.
    """

    folder: Path
    source: str  # as the user named it
    revision: str  # changes when the source does
    tokenizer: Tokenizer
    expected_tokens: int  # both splits; for the disk space and the progress bar
    train_tokens: int | None = None  # None: all there are
    val_tokens: int = 0
    val_documents: int = 1
    shard_tokens: int = 100_000_000
    least_tokens: int = 1  # of each split
    mend: str = "give more text, or a lower --val_tokens"  # where a split has fewer
    config: Path | None = None  # a file to make for it

    def manifest(self) -> dict:
        """The manifest to begin with."""
        settings = dict(train_tokens=self.train_tokens, val_tokens=self.val_tokens)
        settings |= dict(val_documents=self.val_documents, shard_tokens=self.shard_tokens)
        tokens = self.tokenizer
        manifest = dict(format=FORMAT, tokenizer=tokens.kind, vocab=tokens.vocab, eot=tokens.eot)
        if tokens.kind == "bpe":
            manifest["tokenizer_sha256"] = hashlib.sha256(tokens.spec["json"].encode()).hexdigest()
        manifest |= dict(source=self.source, revision=self.revision, settings=settings)
        # where the next shard begins: a document, and its first token that is in no shard yet
        begin = dict(file=0, row=0, token=0)
        return manifest | dict(documents=0, complete=False, shards=[], next=begin)


def prepare(plan: Plan, source: Source, workers: int) -> int:
    """
    Fill plan.folder from the source, or continue where an earlier start stopped. Prints what the
    folder holds and the command to type next. Returns the exit code.
    """
    writer = ShardWriter(plan)
    if writer.manifest["complete"]:
        say(f"{plan.folder}: complete, nothing to do")
    else:
        try:
            write_all(writer, source, workers)
        except KeyboardInterrupt:
            complain(f"stopped: {CONTINUE}")
            return 130
        except OSError as error:  # a full disk, which names no file, or a text that has gone
            path = error.filename or plan.folder
            raise RunError(f"{path}: {error.strerror}; once that is mended, {CONTINUE}") from None
    if plan.config:
        write_config(plan.config, plan.folder, plan.tokenizer, **tokens_of(writer.manifest))
    say_what_it_holds(plan.folder, writer.manifest, plan.config)
    return 0


def write_all(writer: "ShardWriter", source: Source, workers: int) -> None:
    """Write what comes after the finished shards."""
    start = writer.manifest["next"]
    begin = (start["file"], start["row"])
    batches = encode_batches(source(*begin), writer.plan.tokenizer, workers)
    total, done = writer.plan.expected_tokens, sum(writer.totals.values())
    # disable=None: shown on a terminal only
    with tqdm(total=total, initial=done, unit="tok", unit_scale=True, disable=None) as bar:
        while not writer.has_all and (batch := next(batches, None)):
            file, documents = batch
            for row, tokens, size in documents:
                done = start["token"] if (file, row) == begin else 0
                writer.add(tokens, size, file, row, done)
            bar.update(sum(writer.totals.values()) - bar.n)
    batches.close()  # ends the threads
    writer.complete()


def say_what_it_holds(folder: Path, manifest: dict, written: Path | None = None) -> None:
    """
    Print what a data folder holds and the command that trains on it, with the config file that was
    `written` for it.
    """
    tokens = tokens_of(manifest)
    total = sum(tokens.values())
    held = f"{tokens['train']:,} tokens for training and {tokens['val']:,} for validation"
    size = f"{len(manifest['shards'])} shards, {2 * total / 1e6:,.1f} MB"
    say(f"{folder}: {manifest['documents']:,} documents, {held} in {size}")
    # older manifests have not counted the bytes
    if total and all("bytes" in shard for shard in manifest["shards"]):
        size = sum(shard["bytes"] for shard in manifest["shards"])
        say(f"text: {size:,} bytes, {size / total:.3f} bytes per token")
    config = "config/quickstart.py" if total < SMALL_DATASET else "config/gpt124m_4070.py"
    name = folder.name if folder.parent == Path("data") else folder
    arguments = [config, f"--dataset={name}", f"--out_dir=out/{Path(config).stem}_{folder.name}"]
    own = written or Path("config", f"{folder.name}.py")
    if own.exists() and f'"{folder.as_posix()}"' in own.read_text("utf-8"):  # or written earlier
        arguments = [str(own)]
    command = shlex.join(["python", "train.py", *arguments])
    unfinished = "unfinished: the command that began it continues it"
    say(f"next: {command}" if manifest["complete"] else unfinished)


# -----------------------------------------------------------------------------
# From text to tokens


def encode_batches(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int):
    """
    Tokenise on `workers` threads (BPEs release the GIL) and keep the order: yields the file
    number and the encode_rows of each batch. Reads so far ahead that the threads stay busy while
    the source downloads or a shard is written, and not so far that memory grows with the source.
    Raises RunError where the source fails.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    pending = deque()
    try:
        for file, first_row, rows in batches:
            pending.append((file, pool.submit(encode_rows, first_row, rows, tokenizer)))
            if len(pending) > READ_AHEAD * workers:
                file, future = pending.popleft()
                yield file, future.result()
        for file, future in pending:
            yield file, future.result()
    except UserError as error:
        problems = [f"{problem}; {CONTINUE}, from the same source" for problem in error.problems]
        raise RunError(*problems) from None
    finally:
        pool.shutdown(cancel_futures=True)


# -----------------------------------------------------------------------------
# From tokens to shards


class ShardWriter:
    """
    A data folder in the making: takes tokenised documents in order and writes each shard as it
    fills up.
    """

    def __init__(self, plan: Plan):
        self.plan, self.folder = plan, plan.folder
        self.manifest, self.lock = open_folder(plan)
        self.totals = tokens_of(self.manifest)  # by split, those in the buffer included
        self.split = "train" if self.totals["train"] else "val"
        self.buffer = np.empty(plan.shard_tokens, dtype="<u2")  # takes memory only as it fills
        self.filled = 0  # tokens in the buffer
        self.train_tokens = plan.train_tokens or math.inf
        # documents that begin in the buffer, and the bytes of their text
        self.documents = self.bytes = 0

    @property
    def has_all(self) -> bool:
        return self.totals["train"] >= self.train_tokens

    def add(self, tokens: np.ndarray, size: int, file: int, row: int, done: int = 0) -> None:
        """
        Take the document of `size` bytes at that place in the source, whose first `done` tokens are
        in finished shards already. It counts for the shard that it begins in.
        """
        if done == 0:
            self.documents += 1
            self.bytes += size
        while done < len(tokens) and not self.has_all:
            room = self.plan.shard_tokens - self.filled
            if self.split == "train":
                room = min(room, self.train_tokens - self.totals["train"])
            piece = tokens[done : done + room]
            self.buffer[self.filled : self.filled + len(piece)] = piece
            self.filled += len(piece)
            self.totals[self.split] += len(piece)
            done += len(piece)
            self.manifest["next"] = dict(file=file, row=row, token=done)
            if len(piece) == room:
                self.finish_shard()
        documents = self.manifest["documents"] + self.documents
        enough = self.totals["val"] >= self.plan.val_tokens and documents >= self.plan.val_documents
        if self.split == "val" and enough:
            self.finish_shard()
            self.split = "train"

    def finish_shard(self) -> None:
        """
        Write the shard, then the manifest that names it and the place where the next begins.
        """
        if self.filled:
            name = f"{self.split}_{len(self.manifest['shards']):06d}.bin"
            sha256 = write_shard(self.folder / name, self.buffer[: self.filled])
            shard = dict(name=name, tokens=self.filled, sha256=sha256, documents=self.documents)
            self.manifest["shards"].append(dict(shard, bytes=self.bytes))
            self.manifest["documents"] += self.documents
            self.filled = self.documents = self.bytes = 0
        write_manifest(self.folder, self.manifest)

    def complete(self) -> None:
        """
        The source has ended, or enough tokens are there. Raises UserError where a split has too
        few.
        """
        if min(self.totals.values()) < self.plan.least_tokens:
            # leave nothing that looks like a dataset
            names = [shard["name"] for shard in self.manifest["shards"]]
            for name in [*names, "manifest.json", "tokenizer.json"]:
                (self.folder / name).unlink(missing_ok=True)
            self.release()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
            held = "{val:,} tokens for validation and {train:,} for training".format(**self.totals)
            needs = f"each needs at least {self.plan.least_tokens}; {self.plan.mend}"
            raise UserError(f"{self.plan.source}: {held}, {needs}")
        if self.totals["train"] < (self.plan.train_tokens or 0):
            say(f"the source has no more: {self.plan.train_tokens:,} tokens were asked for")
        self.manifest["complete"] = True
        del self.manifest["next"]
        self.finish_shard()
        self.release()

    def release(self) -> None:
        self.lock.close()
        (self.folder / "lock").unlink()


def tokens_of(manifest: dict) -> dict[str, int]:
    """The tokens that are in finished shards, by split."""
    totals = {"train": 0, "val": 0}
    for shard in manifest["shards"]:
        totals[split_of(shard["name"])] += shard["tokens"]
    return totals


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace manifest.json in one step, after what it names is safe on the disk."""
    with replacing(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
        fsync_folder(folder)  # the names of the shards
    fsync_folder(folder)


def read_preparation(folder: Path) -> dict:
    """
    The manifest.json of a preparation, finished or not. Raises UserError, also where tokenizer.json
    is not the one that it tells of.
    """
    manifest = read_manifest(folder)
    if manifest.get("tokenizer") == "bpe":
        read_bpe(folder / "tokenizer.json", manifest)
    return manifest


# -----------------------------------------------------------------------------
# One preparation at a time


def open_folder(plan: Plan) -> tuple[dict, BinaryIO | None]:
    """
    The manifest to continue with, a new one or that of an earlier start of the same preparation,
    and, unless it is complete, the open file that keeps other preparations out. Raises UserError.
    """
    folder, manifest = plan.folder, plan.manifest()
    own_json = folder / "tokenizer.json"  # written first; it may be all that a kill has left
    if (folder / "manifest.json").exists():
        found = read_preparation(folder)
        then, now = found | found.get("settings", {}), manifest | manifest["settings"]
        if differs := [key for key in IDENTITY if then.get(key) != now.get(key)]:
            problem = f"exists, made from other text or with other flags ({', '.join(differs)})"
            raise UserError(f"{folder}: {problem}; choose another --out, or delete that folder")
        manifest = found
    elif any(folder.glob("*.bin")) or (own_json.exists() and not (folder / "lock").exists()):
        raise UserError(f"{folder}: holds files of another program; choose another --out")
    if manifest["complete"]:
        return manifest, None
    to_come = max(plan.expected_tokens - sum(tokens_of(manifest).values()), 0)
    if lacks := lack_of_space(folder, 2 * to_come + SPARE_BYTES):  # a token takes 2 bytes
        raise UserError(f"{lacks}; choose another --out, or fewer tokens")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "ab")
    if not try_lock(lock):
        problem = f"{folder}: another preparation is writing to it"
        raise UserError(f"{problem}; wait for that one, or choose another --out")
    remove_temporaries(folder, "*.bin", "*.json")
    if plan.tokenizer.kind == "bpe":
        with replacing(own_json) as file:
            file.write(plan.tokenizer.spec["json"].encode())
    write_manifest(folder, manifest)
    return manifest, lock


# -----------------------------------------------------------------------------
# Checking a folder


def check_folder(name: str) -> None:
    """
    Hold a data folder against its manifest and print what it holds. Raises UserError with a line
    per problem.
    """
    folder = dataset_folder(name)
    manifest = read_preparation(folder)
    problems = []
    for shard in tqdm(manifest["shards"], unit="shard", disable=None):
        path = folder / shard["name"]
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != shard["sha256"]:
            problems.append(f"{path}: its sha256 is not manifest.json's; prepare it again")
    raise_if_any(problems)
    say(f"{folder}: each sha256 agrees with manifest.json")
    say(f"source: {manifest['source']} ({manifest['revision']}), tokenizer {manifest['tokenizer']}")
    say_what_it_holds(folder, manifest)
