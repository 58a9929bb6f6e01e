"""
Documents in, token shards and manifest.json out: what prepare_fineweb.py and prepare_text.py have
in common.

Documents keep the source's order, an end-of-text token before each; null and empty ones are
skipped. The first whole documents are the validation split, the rest is training. A shard is
written when it is full, and after it the manifest, which also says where in the source the next
shard begins. So an interrupted preparation goes on at the last finished shard, and its files come
out the same, byte for byte, however often it was interrupted and with any number of workers.
"""

import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.console import RunError, UserError
from common.files import free_bytes, fsync_folder, replacing, try_lock
from data.shards import (
    HEADER_INTS,
    SHARD_MAGIC,
    SHARD_VERSION,
    Shard,
    dataset_folder,
    open_shard,
    read_json,
)
from data.sources import Batch, Rows, Source
from data.tokenizer import Tokenizer

FORMAT = "uint16 shards, llm.c header"
IDENTITY = (
    "format",
    "tokenizer",
    "vocab",
    "eot",
    "source",
    "revision",
    "settings",
)  # must agree for a start to go on
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
SPARE_BYTES = 50_000_000  # left free on the disk
CHARS_PER_TASK = 300_000  # what one thread tokenises at a time, some 15 ms of work
READ_AHEAD = 64  # such tasks, besides one for each thread
CHECK_TOKENS = 1 << 24  # read at a time by --check

GO_ON = "the same command goes on after the last finished shard"


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

    def manifest(self) -> dict:
        """The manifest to begin with."""
        settings = {
            k: getattr(self, k)
            for k in ("train_tokens", "val_tokens", "val_documents", "shard_tokens")
        }
        return dict(
            format=FORMAT,
            tokenizer=self.tokenizer.kind,
            vocab=self.tokenizer.vocab,
            eot=self.tokenizer.eot,
            source=self.source,
            revision=self.revision,
            settings=settings,
            documents=0,
            complete=False,
            shards=[],
        )


def prepare(plan: Plan, source: Source, workers: int) -> int:
    """
    Fill plan.folder from the source, or go on where an earlier start stopped. Returns the exit
    code.
    """
    writer = ShardWriter(plan)
    if writer.manifest["complete"]:
        print(f"{describe(plan.folder, writer.manifest)}: nothing to do")
        return 0
    start = writer.manifest.get("next") or dict(file=0, row=0, token=0)
    try:
        with tqdm(
            total=plan.expected_tokens,
            initial=writer.tokens,
            unit="tok",
            unit_scale=True,
            disable=None,
        ) as bar:
            batches = encode_batches(source(start["file"], start["row"]), plan.tokenizer, workers)
            for file, first_row, documents in batches if not writer.has_all else ():
                for row, tokens in enumerate(documents, first_row):
                    if tokens is not None and (file, row) >= (start["file"], start["row"]):
                        done = start["token"] if (file, row) == (start["file"], start["row"]) else 0
                        writer.add(tokens, file, row, done)
                bar.update(writer.tokens - bar.n)
                if writer.has_all:
                    break
            batches.close()
        writer.complete()
    except KeyboardInterrupt:
        print(f"stopped: {GO_ON}", file=sys.stderr)
        return 130
    except RunError:
        raise
    except UserError as error:  # the source's
        raise RunError(
            *(f"{problem}; {GO_ON}, from the same source" for problem in error.problems)
        ) from None
    print(describe(plan.folder, writer.manifest))
    return 0


def describe(folder: Path, manifest: dict) -> str:
    totals = tokens_of(manifest)
    return (
        f"{folder}: {manifest['documents']:,} documents, {totals['train']:,} tokens for training and {totals['val']:,} for "
        f"validation in {len(manifest['shards'])} shards, {2 * sum(totals.values()) / 1e6:,.1f} MB"
    )


# -----------------------------------------------------------------------------
# From text to tokens


def encode_batches(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int):
    """
    Tokenise on `workers` threads (tiktoken releases the GIL) and keep the order: yields file
    number, first row and the tokens of each document. Enough is read ahead for the threads to go on
    while the source downloads or a shard is written, and little enough for memory not to grow with
    the source.
    """
    pool, pending = ThreadPoolExecutor(workers, thread_name_prefix="encode"), deque()
    try:
        for file, row, rows in split_batches(batches):
            pending.append((file, row, pool.submit(encode_rows, rows, tokenizer)))
            if len(pending) > READ_AHEAD + workers:
                file, row, future = pending.popleft()
                yield file, row, future.result()
        for file, row, future in pending:
            yield file, row, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def split_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same documents in batches of about CHARS_PER_TASK."""
    for file, row, rows in batches:
        first = chars = 0
        for number, text in enumerate(rows, 1):
            chars += len(text or "")
            if chars >= CHARS_PER_TASK or number == len(rows):
                yield file, row + first, rows[first:number]
                first, chars = number, 0


def encode_rows(rows: Rows, tokenizer: Tokenizer) -> list[np.ndarray | None]:
    """
    The tokens of each document, uint16, end-of-text first; None for one that is null or empty.
    """
    encoded: list[np.ndarray | None] = []
    for text in rows:
        ids = tokenizer.encode(text) if text else ()
        if len(ids) == 0:
            encoded.append(None)
            continue
        tokens = np.empty(len(ids) + 1, dtype="<u2")
        tokens[0], tokens[1:] = tokenizer.eot, ids
        encoded.append(tokens)
    return encoded


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
        self.totals = tokens_of(
            self.manifest
        )  # tokens taken, those of the shard in the making included
        self.split = "train" if self.totals["train"] else "val"
        self.buffer = np.empty(plan.shard_tokens, dtype="<u2")  # takes memory only as it fills
        self.filled = self.documents = 0  # tokens and first tokens of documents in the buffer

    @property
    def tokens(self) -> int:
        return sum(self.totals.values())

    @property
    def has_all(self) -> bool:
        return self.plan.train_tokens is not None and self.totals["train"] >= self.plan.train_tokens

    @property
    def has_validation(self) -> bool:
        documents = self.manifest["documents"] + self.documents
        return self.totals["val"] >= self.plan.val_tokens and documents >= self.plan.val_documents

    def add(self, tokens: np.ndarray, file: int, row: int, done: int = 0) -> None:
        """
        Take the document at that place in the source, whose first `done` tokens are in finished
        shards already.
        """
        self.documents += done == 0
        while done < len(tokens) and not self.has_all:
            room = self.plan.shard_tokens - self.filled
            if self.split == "train" and self.plan.train_tokens is not None:
                room = min(room, self.plan.train_tokens - self.totals["train"])
            piece = tokens[done : done + room]
            self.buffer[self.filled : self.filled + len(piece)] = piece
            self.filled += len(piece)
            self.totals[self.split] += len(piece)
            done += len(piece)
            if len(piece) == room:
                self.finish_shard(dict(file=file, row=row, token=done))
        if self.split == "val" and self.has_validation:
            self.finish_shard(dict(file=file, row=row, token=done))
            self.split = "train"

    def finish_shard(self, next_place: dict | None = None) -> None:
        """
        Write the shard, then the manifest that names it and the place where the next begins. Raises
        RunError.
        """
        if self.filled:
            name = f"{self.split}_{len(self.manifest['shards']):06d}.bin"
            with clean_errors(self.folder / name):
                sha256 = write_shard(self.folder / name, self.buffer[: self.filled])
            self.manifest["shards"].append(
                dict(name=name, tokens=self.filled, sha256=sha256, documents=self.documents)
            )
            self.manifest["documents"] += self.documents
            self.filled = self.documents = 0
        self.manifest["next"] = next_place
        with clean_errors(self.folder / "manifest.json"):
            write_manifest(self.folder, self.manifest)

    def complete(self) -> None:
        """
        The source has ended, or enough tokens are there. Raises RunError where none are left for
        training.
        """
        if not self.totals["train"]:  # leave nothing that looks like a dataset
            for name in [shard["name"] for shard in self.manifest["shards"]] + ["manifest.json"]:
                (self.folder / name).unlink()
            self.release()
            with suppress(OSError):  # not empty: something else is in it
                self.folder.rmdir()
            if not self.tokens:
                raise RunError(f"{self.plan.source}: holds no text")
            smaller = (
                f"--val_tokens={max(self.tokens // 20, 1)}"
                if self.plan.val_tokens
                else "a smaller --val_fraction"
            )
            raise RunError(
                f"{self.plan.source}: validation takes all of its {self.tokens:,} tokens and leaves none for training; "
                f"try {smaller}"
            )
        self.manifest["complete"] = True
        self.finish_shard()
        self.release()

    def release(self) -> None:
        self.lock.close()
        (self.folder / "lock").unlink()


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """
    Write uint16 tokens as an llm.c shard, durable before it appears under its name; returns the
    file's sha256.
    """
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    body = np.ascontiguousarray(tokens, dtype="<u2")
    sha256 = hashlib.sha256(header)
    sha256.update(body)  # no copies: a shard of 100M tokens is 200 MB
    with replacing(path) as file:
        file.write(header)
        file.write(body)
    return sha256.hexdigest()


def tokens_of(manifest: dict) -> dict[str, int]:
    """The tokens that are in finished shards, by split."""
    shards = manifest["shards"]
    return {
        split: sum(s["tokens"] for s in shards if s["name"].startswith(split))
        for split in ("train", "val")
    }


@contextmanager
def clean_errors(path: Path) -> Iterator[None]:
    """Where writing `path` fails, say how to go on. Raises RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; once that is mended, {GO_ON}") from None


def write_manifest(folder: Path, manifest: dict) -> None:
    """
    Replace manifest.json in one step, after what it names is safe on the disk. "next" is kept only
    while unfinished.
    """
    content = {
        key: value for key, value in manifest.items() if key != "next" or not manifest["complete"]
    }
    with replacing(folder / "manifest.json") as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
        fsync_folder(folder)  # the names of the shards
    fsync_folder(folder)


def open_folder(plan: Plan) -> tuple[dict, BinaryIO | None]:
    """
    The manifest to go on with, a new one or that of an earlier start of the same preparation, and,
    unless it is complete, what keeps other preparations out as long as it is open. Raises
    UserError.
    """
    folder, manifest = plan.folder, plan.manifest()
    if (folder / "manifest.json").exists():
        found = read_manifest(folder)
        differs = [
            f"{key} {found.get(key)} (now {manifest[key]})"
            for key in IDENTITY
            if found.get(key) != manifest[key]
        ]
        if differs:
            raise UserError(
                f"{folder}: was made from {', '.join(differs)}; choose another --out, or delete that folder"
            )
        for shard in found["shards"]:
            if open_shard(folder / shard["name"]).tokens != shard["tokens"]:
                raise UserError(
                    f"{folder / shard['name']}: not the shard that manifest.json names; delete {folder}"
                )
        manifest = found
    elif any(folder.glob("*.bin")):
        raise UserError(
            f"{folder}: holds shards that were not made by this program; choose another --out"
        )
    if manifest["complete"]:
        return manifest, None
    check_space(plan, sum(tokens_of(manifest).values()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb")
        if not try_lock(lock):
            raise UserError(
                f"{folder}: another preparation is writing to it; wait for that one, or choose another --out"
            )
        if (folder / "manifest.json").exists() and read_manifest(folder) != manifest:
            raise UserError(
                f"{folder}: another preparation was writing to it until now; the same command goes on"
            )
        write_manifest(folder, manifest)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose another --out"
        ) from None
    return manifest, lock


def read_manifest(folder: Path) -> dict:
    manifest = read_json(folder / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder / 'manifest.json'}: not a manifest of this program's; choose another folder"
        )
    return manifest


def check_space(plan: Plan, done: int) -> None:
    """Raises UserError where the disk cannot hold the tokens still to come, 2 bytes each."""
    needed, free = 2 * max(plan.expected_tokens - done, 0) + SPARE_BYTES, free_bytes(plan.folder)
    if free < needed:
        raise UserError(
            f"{plan.folder}: needs {needed / 1e9:,.2f} GB of disk, {free / 1e9:,.2f} GB are free; "
            "free some, choose another --out, or ask for fewer tokens"
        )


# -----------------------------------------------------------------------------
# Checking a folder


def check_folder(name: str, tokens_per_iter: int, max_iters: int | None) -> None:
    """
    Hold a data folder against its manifest and print what it holds. Raises UserError with a line
    per problem.
    """
    folder = dataset_folder(name)
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: has no manifest.json to check it against")
    manifest = read_manifest(folder)
    problems = []
    with tqdm(
        total=sum(tokens_of(manifest).values()), unit="tok", unit_scale=True, disable=None
    ) as bar:
        for listed in manifest["shards"]:
            try:
                problems += check_shard(open_shard(folder / listed["name"]), listed, manifest, bar)
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*problems)
    print(
        f"{describe(folder, manifest)}: sizes, headers, sha256, ids and documents agree with manifest.json"
    )
    print(
        f"source: {manifest['source']} ({manifest['revision']}), tokenizer {manifest['tokenizer']}"
    )
    if not manifest["complete"]:
        print("unfinished: the command that began it goes on")
    train = [shard["name"] for shard in manifest["shards"] if shard["name"].startswith("train")]
    tokens = tokens_of(manifest)["train"]
    if train and max_iters:
        seen = max_iters * tokens_per_iter
        print(
            f"{max_iters:,} iterations of {tokens_per_iter:,} tokens: {seen / 1e9:,.3f}B tokens, {seen / tokens:.2f} epochs"
        )
    elif train:
        print(
            f"one epoch: {tokens / tokens_per_iter:,.1f} iterations of {tokens_per_iter:,} tokens"
        )
    if train:
        print(f"the first training tokens: {excerpt(folder / train[0], manifest)}")


def check_shard(shard: Shard, listed: dict, manifest: dict, bar: tqdm) -> list[str]:
    problems, documents, position = [], 0, 0
    if shard.tokens != listed["tokens"]:
        return [
            f"{shard.path}: {shard.tokens:,} tokens; manifest.json says {listed['tokens']:,}; prepare it again"
        ]
    with open(shard.path, "rb") as file:
        sha256 = hashlib.sha256(file.read(shard.header_bytes))
        while len(tokens := np.frombuffer(file.read(2 * CHECK_TOKENS), dtype="<u2")):
            sha256.update(tokens)
            documents += int(np.count_nonzero(tokens == manifest["eot"]))
            if not problems and tokens.max() >= manifest["vocab"]:
                at = int(np.argmax(tokens >= manifest["vocab"]))
                problems.append(
                    f"{shard.path}: token {tokens[at]} at offset {position + at:,} is outside the vocabulary of "
                    f"{manifest['vocab']}; prepare it again"
                )
            position += len(tokens)
            bar.update(len(tokens))
    if documents != listed["documents"]:
        problems.append(
            f"{shard.path}: {documents:,} documents begin in it; manifest.json says {listed['documents']:,}"
        )
    if sha256.hexdigest() != listed["sha256"]:
        problems.append(
            f"{shard.path}: its sha256 is not manifest.json's: it was changed or damaged; prepare it again"
        )
    return problems


def excerpt(path: Path, manifest: dict, length: int = 120) -> str:
    tokens = np.fromfile(
        path, dtype="<u2", count=length, offset=open_shard(path).header_bytes
    ).tolist()
    try:
        return repr(Tokenizer({"kind": manifest["tokenizer"]}).decode(tokens))
    except UserError as error:
        return f"{tokens[:10]} ... ({error})"
