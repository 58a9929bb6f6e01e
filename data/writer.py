"""
Documents in, token shards and manifest.json out: what prepare_fineweb.py and prepare_text.py have
in common.

Documents keep the order of the source, an end-of-text token before each; null and empty ones are
skipped. The first whole documents are the validation split, the rest is training. A shard is
written when it is full, and after it the manifest, which also says where in the source the next
shard begins. So an interrupted preparation goes on at the last finished shard, and its files come
out the same, byte for byte, however often it was interrupted and with any number of workers.
"""

import hashlib
import json
import math
import shlex
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.console import RunError, UserError, complain, raise_if_any, say
from common.files import fsync_folder, lack_of_space, plain_file, replacing, try_lock
from data.shards import dataset_folder, is_file_name, open_shard, read_json, split_of, write_shard
from data.sources import Batch, Rows, Source
from data.tokenizer import Tokenizer, read_bpe

FORMAT = "uint16 shards, llm.c header"
# What must be the same for a preparation to go on
IDENTITY = ("format", "tokenizer", "vocab", "tokenizer_sha256", "source", "revision", "settings")
# What a manifest must hold, for itself and for each shard
FIELDS = dict(tokenizer=str, source=str, revision=str, documents=int, complete=bool, shards=list)
SHARD_FIELDS = dict(name=str, tokens=int, sha256=str, documents=int)
# Where the next shard begins: a document in the source, and its first token that is in no shard yet
PLACE = dict(file=int, row=int, token=int)

MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
SPARE_BYTES = 50_000_000  # left free on the disk
READ_AHEAD = 2  # batches of documents for each thread that tokenises
SMALL_DATASET = 100_000_000  # tokens; the quickstart's model suits fewer

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
        settings = dict(train_tokens=self.train_tokens, val_tokens=self.val_tokens)
        settings |= dict(val_documents=self.val_documents, shard_tokens=self.shard_tokens)
        tokens = self.tokenizer
        manifest = dict(format=FORMAT, tokenizer=tokens.kind, vocab=tokens.vocab, eot=tokens.eot)
        if tokens.kind == "bpe":
            manifest["tokenizer_sha256"] = hashlib.sha256(tokens.spec["json"].encode()).hexdigest()
        manifest |= dict(source=self.source, revision=self.revision, settings=settings)
        return manifest | dict(documents=0, complete=False, shards=[], next=dict.fromkeys(PLACE, 0))


def prepare(plan: Plan, source: Source, workers: int) -> int:
    """
    Fill plan.folder from the source, or go on where an earlier start stopped. Prints what the
    folder holds and the command to type next. Returns the exit code.
    """
    writer = ShardWriter(plan)
    if writer.manifest["complete"]:
        say(f"{plan.folder}: complete, nothing to do")
    else:
        try:
            write_all(writer, source, workers)
        except KeyboardInterrupt:
            complain(f"stopped: {GO_ON}")
            return 130
    describe(plan.folder, writer.manifest)
    return 0


def write_all(writer: "ShardWriter", source: Source, workers: int) -> None:
    """Write what comes after the finished shards. Raises RunError."""
    start = writer.manifest["next"]
    begin = (start["file"], start["row"])
    found = writer.has_all or not any(start.values())
    batches = encode_batches(source(*begin), writer.plan.tokenizer, workers)
    with progress_bar(writer.plan.expected_tokens, writer.tokens) as bar:
        while not writer.has_all and (batch := next(batches, None)):
            file, documents = batch
            for row, tokens, size in documents:
                done = start["token"] if (file, row) == begin else 0
                found = found or ((file, row) == begin and done <= len(tokens))
                if found:
                    writer.add(tokens, size, file, row, done)
            bar.update(writer.tokens - bar.n)
    batches.close()  # ends the threads
    if not found:
        raise RunError(damaged(writer.folder))
    writer.complete()


def progress_bar(tokens: int, done: int) -> tqdm:
    # disable=None: shown on a terminal only
    return tqdm(total=tokens, initial=done, unit="tok", unit_scale=True, disable=None)


def describe(folder: Path, manifest: dict) -> None:
    """Print what the folder holds and the command that trains on it."""
    tokens = tokens_of(manifest)
    total = sum(tokens.values())
    say(
        f"{folder}: {manifest['documents']:,} documents, {tokens['train']:,} tokens for training "
        f"and {tokens['val']:,} for validation in {len(manifest['shards'])} shards, "
        f"{2 * total / 1e6:,.1f} MB"
    )
    if total and all(has_fields(shard, {"bytes": int}) for shard in manifest["shards"]):
        size = sum(shard["bytes"] for shard in manifest["shards"])  # older ones have not counted
        say(f"text: {size:,} bytes, {size / total:.3f} bytes per token")
    config = "config/quickstart.py" if total < SMALL_DATASET else "config/gpt124m_4070.py"
    name = folder.name if folder.parent == Path("data") else folder
    own = [f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    command = shlex.join(["python", "train.py", config, *own])
    unfinished = "unfinished: the command that began it goes on"
    say(f"next: {command}" if manifest["complete"] else unfinished)


# -----------------------------------------------------------------------------
# From text to tokens


def encode_batches(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int):
    """
    Tokenise on `workers` threads (BPEs release the GIL) and keep the order: yields the file
    number and the encode_rows of each batch. Reads so far ahead that the threads go on while the
    source downloads or a shard is written, and not so far that memory grows with the source. Raises
    RunError where the source fails.
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
        problems = [f"{problem}; {GO_ON}, from the same source" for problem in error.problems]
        raise RunError(*problems) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_rows(first_row: int, rows: Rows, tokenizer: Tokenizer) -> list[tuple]:
    """
    Row, tokens (uint16, end-of-text first) and bytes of text of each document. Those without text
    are left out.
    """
    documents = []
    for row, text in enumerate(rows, first_row):
        ids = tokenizer.encode(text) if text else ()
        if len(ids):
            tokens = np.concatenate([[tokenizer.eot], ids], dtype="<u2", casting="unsafe")
            documents.append((row, tokens, len(text.encode(errors="replace"))))
    return documents


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
        # documents that begin in the buffer, and bytes of the text whose tokens are in it
        self.documents = self.bytes = 0

    @property
    def tokens(self) -> int:
        return sum(self.totals.values())

    @property
    def has_all(self) -> bool:
        return self.totals["train"] >= self.train_tokens

    def add(self, tokens: np.ndarray, size: int, file: int, row: int, done: int = 0) -> None:
        """
        Take the document of `size` bytes at that place in the source, whose first `done` tokens are
        in finished shards already. Where shards divide it, so many tokens count for as many bytes.
        """
        if done == 0:
            self.documents += 1
        while done < len(tokens) and not self.has_all:
            room = self.plan.shard_tokens - self.filled
            if self.split == "train":
                room = min(room, self.train_tokens - self.totals["train"])
            piece = tokens[done : done + room]
            self.buffer[self.filled : self.filled + len(piece)] = piece
            self.filled += len(piece)
            self.totals[self.split] += len(piece)
            self.bytes -= size * max(done - 1, 0) // (len(tokens) - 1)  # end-of-text has none
            done += len(piece)
            self.bytes += size * (done - 1) // (len(tokens) - 1)
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
        Write the shard, then the manifest that names it and the place where the next begins. Raises
        RunError.
        """
        name = f"{self.split}_{len(self.manifest['shards']):06d}.bin"
        path = self.folder / name
        try:
            if self.filled:
                sha256 = write_shard(path, self.buffer[: self.filled])
                shard = dict(name=name, tokens=self.filled, sha256=sha256, documents=self.documents)
                self.manifest["shards"].append(dict(shard, bytes=self.bytes))
                self.manifest["documents"] += self.documents
                self.filled = self.documents = self.bytes = 0
            path = self.folder / "manifest.json"
            write_manifest(self.folder, self.manifest)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; once that is mended, {GO_ON}") from None

    def complete(self) -> None:
        """
        The source has ended, or enough tokens are there. Raises RunError where none are left for
        training.
        """
        if not self.totals["train"]:
            self.remove_all()
            raise RunError(f"{self.plan.source}: {self.why_no_training()}")
        self.manifest["complete"] = True
        del self.manifest["next"]
        self.finish_shard()
        self.release()

    def remove_all(self) -> None:
        """Leave nothing that looks like a dataset."""
        for shard in self.manifest["shards"]:
            (self.folder / shard["name"]).unlink()
        (self.folder / "manifest.json").unlink()
        (self.folder / "tokenizer.json").unlink(missing_ok=True)
        self.release()
        with suppress(OSError):  # not empty: something else is in it
            self.folder.rmdir()

    def why_no_training(self) -> str:
        if not self.tokens:
            return "holds no text"
        smaller = "a smaller --val_fraction"
        if self.plan.val_tokens:
            smaller = f"--val_tokens={max(self.tokens // 20, 1)}"
        taken = f"validation takes all of its {self.tokens:,} tokens"
        return f"{taken} and leaves none for training; try {smaller}"

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


def read_manifest(folder: Path) -> dict:
    """
    manifest.json, with all that --check and a preparation use of it. Raises UserError, also where
    tokenizer.json is not the one that it tells of.
    """
    path = folder / "manifest.json"
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: was not made by this program; choose another folder")
    whole = has_fields(manifest, FIELDS) and all(map(is_whole, manifest["shards"]))
    if not whole or not (manifest["complete"] or has_fields(manifest.get("next"), PLACE)):
        raise UserError(damaged(folder))
    if manifest["tokenizer"] == "bpe":
        read_bpe(folder / "tokenizer.json", manifest)
    return manifest


def damaged(folder: Path) -> str:
    return f"{folder / 'manifest.json'}: damaged; delete {folder} and prepare the dataset again"


def is_whole(shard) -> bool:
    """Whether a manifest's entry for a shard has all fields, and names a file in its folder."""
    in_folder = has_fields(shard, SHARD_FIELDS) and is_file_name(shard["name"])
    return in_folder and split_of(shard["name"]) is not None


def has_fields(values, fields: dict[str, type]) -> bool:
    """Whether all fields are there and of their types; an int must not be below 0."""
    if not isinstance(values, dict) or not all(type(values.get(k)) is fields[k] for k in fields):
        return False
    return all(values[name] >= 0 for name, kind in fields.items() if kind is int)


# -----------------------------------------------------------------------------
# One preparation at a time


def open_folder(plan: Plan) -> tuple[dict, BinaryIO | None]:
    """
    The manifest to go on with, a new one or that of an earlier start of the same preparation, and,
    unless it is complete, the open file that keeps other preparations out. Raises UserError.
    """
    folder, manifest = plan.folder, plan.manifest()
    path, own_json = folder / "tokenizer.json", plan.tokenizer.spec.get("json", "").encode()
    if (folder / "manifest.json").exists():
        found = read_manifest(folder)
        check_same(folder, found, manifest)
        manifest = found
    elif any(folder.glob("*.bin")) or (path.exists() and not (folder / "lock").exists()):
        raise UserError(f"{folder}: holds files of another program; choose another --out")
    if manifest["complete"]:
        return manifest, None
    to_come = max(plan.expected_tokens - sum(tokens_of(manifest).values()), 0)
    if lacks := lack_of_space(folder, 2 * to_come + SPARE_BYTES):  # a token takes 2 bytes
        raise UserError(f"{lacks}; choose another --out, or fewer tokens")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder, manifest)
        if own_json:
            with replacing(path) as file:
                file.write(own_json)
        write_manifest(folder, manifest)
    except OSError as error:
        problem = f"{folder}: cannot be written ({error.strerror})"
        raise UserError(f"{problem}; choose another --out") from None
    return manifest, lock


def check_same(folder: Path, found: dict, wanted: dict) -> None:
    """Raises UserError where the folder is of another preparation, or its files have changed."""
    for key in IDENTITY:
        if found.get(key) != wanted.get(key):
            made_from = f"was made from {key} {found.get(key)} (now {wanted.get(key)})"
            raise UserError(f"{folder}: {made_from}; choose another --out, or delete that folder")
    for shard in found["shards"]:
        open_shard(folder / shard["name"], shard)


def lock_folder(folder: Path, manifest: dict) -> BinaryIO:
    """
    Keep other preparations out for as long as the file returned is open. Raises UserError where
    another one is in, or was in until now: then `manifest` is out of date.
    """
    lock = open(plain_file(folder / "lock"), "ab")  # it may be a link to a file that is not empty
    another = f"{folder}: another preparation"
    if not try_lock(lock):
        raise UserError(f"{another} is writing to it; wait for that one, or choose another --out")
    if (folder / "manifest.json").exists() and read_manifest(folder) != manifest:
        raise UserError(f"{another} has just written to it; type the same command again")
    return lock


# -----------------------------------------------------------------------------
# Checking a folder


def check_folder(name: str) -> None:
    """
    Hold a data folder against its manifest and print what it holds. Raises UserError with a line
    per problem.
    """
    folder = dataset_folder(name)
    if not (folder / "manifest.json").exists():
        raise UserError(f"{name}: no such folder, or it has no manifest.json to check it with")
    manifest = read_manifest(folder)
    problems = []
    with progress_bar(sum(tokens_of(manifest).values()), done=0) as bar:
        for shard in manifest["shards"]:
            try:
                check_shard(folder / shard["name"], shard)
            except UserError as error:
                problems += error.problems
            bar.update(shard["tokens"])
    raise_if_any(problems)
    say(f"{folder}: sizes, headers and sha256 agree with manifest.json")
    tokenizer = f"tokenizer {manifest['tokenizer']}"
    say(f"source: {manifest['source']} ({manifest['revision']}), {tokenizer}")
    describe(folder, manifest)


def check_shard(path: Path, listed: dict) -> None:
    """Raises UserError where a shard is not what its manifest says."""
    open_shard(path, listed)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != listed["sha256"]:
        raise UserError(f"{path}: its sha256 is not manifest.json's; prepare it again")
