"""
Documents in, token shards and manifest.json out: what prepare_fineweb.py and prepare_text.py share.

Documents keep the order of the source, an end-of-text token before each; null and empty ones are
skipped. A shard ends with a document. After each shard manifest.json is written, which also says
where in the source the next one begins: a file and a row. So an interrupted preparation continues
after the last finished shard. Its files are the same, byte for byte, however often it was
interrupted and however many threads it uses.

Validation is drawn in write_shards: the first documents that hold Plan.val_tokens tokens. Where
that is 0, the source has drawn it, as prepare_text.OwnText does. How files are read, and in which
order: sources.py.
"""

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.child import keep_awake
from common.console import RunError, UserError, command_line, print_err, say, warn
from common.files import lack_of_space, remove_temporaries, replacing, try_lock
from data.shards import read_manifest, write_shard
from data.sources import LeftOut, RowBatch, Source, report
from data.tokenizer import Tokenizer

SPARE_BYTES = 50_000_000  # left free on the disk
SMALL_DATASET = 100_000_000  # tokens; the quickstart's model suits fewer
READ_AHEAD = 2  # batches of documents for each thread that tokenises

CONTINUE = "the same command continues after the last finished shard"


@dataclass
class Plan:
    """What a data folder is to hold."""

    folder: Path
    source: str  # as the user named it
    files: list[str]  # the files to read, in order
    tokenizer: Tokenizer
    expected_tokens: int  # both splits; for the disk space and the progress bar
    settings: dict  # flags that change what is written
    revision: str | None = None  # on the hub
    val_tokens: int = 0  # taken from the first documents; 0: the source splits its rows
    train_tokens: int | None = None  # None: all of the source
    shard_tokens: int = 100_000_000
    least_tokens: int = 1  # in each split
    hint: str = "give more text"  # ends the error if a split has fewer

    def must_agree(self) -> dict:
        """What must be the same for a preparation to continue."""
        same: dict[str, Any] = dict(format="uint16 shards, llm.c header", source=self.source)
        same |= dict(revision=self.revision, tokenizer=self.tokenizer.kind)
        same |= dict(vocab=self.tokenizer.vocab, eot=self.tokenizer.eot)
        if self.tokenizer.kind == "bpe":
            spec = self.tokenizer.spec["json"]
            same["tokenizer_sha256"] = hashlib.sha256(spec.encode()).hexdigest()
        same |= dict(val_tokens=self.val_tokens, train_tokens=self.train_tokens)
        return same | dict(shard_tokens=self.shard_tokens, **self.settings)


def prepare(plan: Plan, source: Source, workers: int, follower: Any = None) -> dict:
    """
    Fill plan.folder from the source, or continue where an earlier launch stopped. `workers` threads
    tokenise. Returns the manifest. Raises UserError, and RunError for what fails on the way.

    With a stream.Follower a training run reads the shards at the same time: before each shard this
    waits until training needs it. If another preparation is writing to the folder, it waits until
    that one has ended.
    """
    check_folder(plan)
    if follower:
        follower.checked()
    plan.folder.mkdir(parents=True, exist_ok=True)
    keep_awake()
    locked = False
    try:
        with open(plan.folder / "lock", "ab") as lock:
            while not (locked := try_lock(lock)):
                if not follower:
                    problem = f"{plan.folder}: another preparation is writing to it"
                    raise UserError(f"{problem}; wait for that one, or choose another folder")
                time.sleep(1)
            manifest = begin_or_continue(plan)
            if manifest["complete"]:
                say(f"{plan.folder}: complete, nothing to do")
                report(manifest["left_out"])
            else:
                write_shards(plan, manifest, source, workers, follower)
    except KeyboardInterrupt:
        print_err(f"stopped: {CONTINUE}")
        raise
    except OSError as error:  # a full disk, whose error names no file, or a text file that is gone
        path = error.filename or plan.folder
        raise RunError(f"{path}: {error.strerror}; once that is fixed, {CONTINUE}") from None
    finally:
        if locked and not (plan.folder / "manifest.json").exists():
            with contextlib.suppress(OSError):  # another process waits for it
                (plan.folder / "lock").unlink()
                plan.folder.rmdir()
    return manifest


# -----------------------------------------------------------------------------
# The folder


def check_folder(plan: Plan) -> list[str]:
    """
    Raises UserError if the folder holds something else or its disk is too full. Returns the files
    of the source that have changed since the interrupted preparation began.
    """
    folder = plan.folder
    if folder.resolve() == Path(__file__).resolve().parent:
        raise UserError(f"{folder}: holds this program's own files; choose a folder in it")
    if (folder / "manifest.json").exists():
        return check_agrees(plan, read_manifest(folder))
    if any(folder.glob("*.bin")) or (folder / "tokenizer.json").exists():
        raise UserError(f"{folder}: holds files of another program; choose another folder")
    # a token takes 2 bytes
    if shortage := lack_of_space(folder, 2 * plan.expected_tokens + SPARE_BYTES):
        raise UserError(f"{shortage}; choose another folder, or fewer tokens")
    return []


def check_agrees(plan: Plan, found: dict) -> list[str]:
    """
    Raises UserError if the folder's manifest, `found`, was made from other text or flags. Returns
    the files of the source that have changed since.
    """
    asked, then, now = plan.must_agree(), found.get("files", {}), stamps(plan.files)
    differs = [key for key in asked if found.get(key) != asked[key]]
    if [*then] != [*now]:
        names = sorted({*then} ^ {*now})
        differs.append(f"{names[0]} is new or missing" if names else "the order of the files")
    changed = [name for name in then if then[name] != now.get(name)]
    if changed and found["complete"]:
        differs.append(f"{changed[0]} has changed")
    if "files" not in found:
        differs = ["an earlier version of this program made it"]
    if differs:
        problem = f"exists, made from other text or with other flags ({', '.join(differs)})"
        raise UserError(f"{plan.folder}: {problem}; choose another folder, or delete that one")
    return changed


def begin_or_continue(plan: Plan) -> dict:
    """The manifest of a folder that is locked for this process: a new one, or what is there."""
    folder, changed = plan.folder, check_folder(plan)
    remove_temporaries(folder, "*.bin", "*.json")
    for name in changed:  # as by fixing a line of it
        warn(f"{name}: has changed since the preparation began; finished shards keep the old text")
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        if not manifest["complete"]:
            say(f"{folder}: continuing after {len(manifest['shards'])} shards")
    else:
        manifest = plan.must_agree() | dict(files=stamps(plan.files), complete=False, shards=[])
        manifest |= dict(left_out={"rows": 0, "no text": 0, "broken": 0})
        manifest["next"] = dict(file=0, row=0)
        write_manifest(folder, manifest)
    own_json = folder / "tokenizer.json"
    if plan.tokenizer.kind == "bpe" and not own_json.exists():
        with replacing(own_json) as file:
            file.write(plan.tokenizer.spec["json"].encode())
    return manifest


def stamps(files: list[str]) -> dict[str, list[int]]:
    """Size in bytes and time of the last change of each local file among `files`."""
    local = {name: os.stat(name) for name in files if "://" not in name}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in local.items()}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace manifest.json in one step; the shards it lists are already on the disk."""
    with replacing(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")


def tokens_of(manifest: dict) -> dict[str, int]:
    """The number of tokens in finished shards, by split."""
    totals = {"train": 0, "val": 0}
    for shard in manifest["shards"]:
        totals[shard["name"].partition("_")[0]] += shard["tokens"]
    return totals


def say_what_it_holds(folder: Path, manifest: dict, config: Path | None = None) -> None:
    """
    Print what a data folder holds and the command that trains on it, with `config` if one was
    written for it.
    """
    tokens, shards = tokens_of(manifest), manifest["shards"]
    total = sum(tokens.values())
    documents, size = (sum(shard[key] for shard in shards) for key in ("documents", "bytes"))
    held = f"{tokens['train']:,} tokens for training and {tokens['val']:,} for validation"
    say(f"{folder}: {documents:,} documents, {held} in {len(shards)} shards")
    say(f"text: {size:,} bytes, {size / total:.3f} bytes per token; {2 * total / 1e6:,.1f} MB here")
    arguments: list[object] = [config]
    if config is None:
        config = Path("config", "quickstart.py" if total < SMALL_DATASET else "gpt124m_4070.py")
        name = folder.name if folder.parent == Path("data") else folder
        arguments = [config, f"--dataset={name}", f"--out_dir=out/{config.stem}_{folder.name}"]
    say(f"next: {command_line('python', 'train.py', *arguments)}")


# -----------------------------------------------------------------------------
# From documents to shards


@dataclass
class Part:
    """The contents of a shard to be written."""

    tokens: bytearray = field(default_factory=bytearray)  # two bytes each
    documents: int = 0
    bytes: int = 0  # of their text


def write_shards(plan: Plan, manifest: dict, source: Source, workers: int, follower: Any) -> None:
    """Write the shards that follow the finished ones. Raises UserError and RunError."""
    totals, most, place = tokens_of(manifest), plan.train_tokens or 2**63, manifest["next"]
    warned = False
    documents = encode(source(place["file"], place["row"]), plan.tokenizer, workers)
    # disable=None: shown on a terminal only
    with tqdm(total=plan.expected_tokens, unit="tok", unit_scale=True, disable=None) as bar:
        bar.update(sum(totals.values()))
        while totals["train"] < most:
            # the number of tokens that the next shard of each split may take
            if totals["val"] < plan.val_tokens:
                room = dict(val=min(plan.shard_tokens, plan.val_tokens - totals["val"]))
            else:
                room = dict(train=min(plan.shard_tokens, most - totals["train"]))
                if follower:
                    follower.wait(totals["train"])
            if plan.val_tokens == 0:
                room |= dict(val=plan.shard_tokens)
            parts, place = take(documents, room, manifest["left_out"], bar)
            if not place:
                break
            for split in [*parts]:  # frees each part before the next one is written
                write_part(plan, manifest, split, parts.pop(split))
            manifest["next"] = place
            write_manifest(plan.folder, manifest)
            if follower and not warned:  # the run may end before the source does
                warned = report(manifest["left_out"])
            totals = tokens_of(manifest)
    documents.close()  # ends the threads
    finish(plan, manifest, totals)


def take(
    documents: Iterator, room: dict[str, int], left_out: dict, bar: tqdm
) -> tuple[dict[str, Part], dict]:
    """
    The next documents, until one split has no room for another one, and the place in the source
    where the following ones begin, {} if the source has ended. Counts the rows in `left_out`.
    """
    parts, place = {split: Part() for split in room}, {}
    for file, row, texts in documents:
        place = dict(file=file, row=row + 1)
        left_out["rows"] += 1
        if isinstance(texts, LeftOut):
            left_out[texts.kind] += 1
            left_out.setdefault(f"first {texts.kind}", texts.problem)
            continue
        for part, (tokens, size) in zip(parts.values(), texts, strict=True):
            part.tokens += tokens
            part.documents += bool(tokens)
            part.bytes += size
            bar.update(len(tokens) // 2)
        if any(len(parts[split].tokens) >= 2 * room[split] for split in room):
            break
    return parts, place


def write_part(plan: Plan, manifest: dict, split: str, part: Part) -> None:
    """Write a shard and list it in the manifest, unless it is empty."""
    if not part.tokens:
        return
    name = f"{split}_{len(manifest['shards']):06d}.bin"
    sha256 = write_shard(plan.folder / name, np.frombuffer(part.tokens, "<u2"))
    listed = dict(name=name, tokens=len(part.tokens) // 2, sha256=sha256)
    manifest["shards"].append(listed | dict(documents=part.documents, bytes=part.bytes))


def finish(plan: Plan, manifest: dict, totals: dict[str, int]) -> None:
    """End a preparation. Raises UserError if a split has too few tokens."""
    folder = plan.folder
    report(manifest["left_out"])
    if min(totals.values()) < plan.least_tokens:
        # leave nothing that looks like a dataset; a run that follows reads the manifest first
        names = [shard["name"] for shard in manifest["shards"]]
        for name in ["manifest.json", "tokenizer.json", *names]:
            (folder / name).unlink(missing_ok=True)
        held = f"{totals['val']:,} tokens for validation and {totals['train']:,} for training"
        needs = f"each needs at least {plan.least_tokens}; {plan.hint}"
        raise UserError(f"{plan.source}: {held}, {needs}")
    if totals["train"] < (plan.train_tokens or 0):
        say(f"the source has no more: {plan.train_tokens:,} tokens were asked for")
    elif plan.train_tokens:
        at = f"file {manifest['next']['file'] + 1:,} of {len(plan.files):,}"
        say(f"--tokens={plan.train_tokens:,} ends in {at}; the rest of the source is not read")
    del manifest["next"]
    manifest["complete"] = True
    write_manifest(folder, manifest)


def encode(batches: Iterator[RowBatch], tokenizer: Tokenizer, workers: int) -> Generator:
    """
    Tokenise on `workers` threads (BPEs release the GIL) and keep the order: yields file, row and,
    for each part of the row, its tokens as bytes and the number of bytes of its text; or LeftOut.
    Reads far enough ahead to keep the threads busy while the source downloads or a shard is
    written; memory does not grow with the source. Raises RunError if reading the source fails.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    pending: deque[Future] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode_batch, batch, tokenizer))
            if len(pending) > READ_AHEAD * workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()
    except UserError as error:
        problems = [f"{problem}; {CONTINUE}, from the same source" for problem in error.problems]
        raise RunError(*problems) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(batch: RowBatch, tokenizer: Tokenizer) -> list[tuple]:
    file, first, rows = batch
    documents: list[tuple] = []
    for number, row in enumerate(rows, first):
        if isinstance(row, LeftOut):
            documents.append((file, number, row))
            continue
        parts = row if isinstance(row, tuple) else (row,)
        documents.append((file, number, [encode_document(text, tokenizer) for text in parts]))
    return documents


def encode_document(text: str | None, tokenizer: Tokenizer) -> tuple[bytes, int]:
    """A document's tokens, two bytes each, end-of-text first, and the bytes of its text."""
    ids = tokenizer.encode(text) if text else ()
    if not text or not len(ids):
        return b"", 0
    tokens = np.concatenate([[tokenizer.eot], ids], dtype="<u2", casting="unsafe")
    return tokens.tobytes(), len(text.encode(errors="replace"))
