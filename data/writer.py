"""
Documents in, token shards and manifest.json out: what prepare_fineweb.py and prepare_text.py share.

Documents keep the order of the source, an end-of-text token before each. A shard ends with a
document, except in the order of the records. After each shard manifest.json is written, which also
says where in the source the next one begins. So the same command, run again, continues after the
last finished shard: its files are the same, byte for byte, however often it was stopped and however
many threads it uses. With a larger --tokens it continues a finished folder.

How files are read: sources.py. In which order: order.py.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from common.child import keep_awake
from common.console import RunError, UserError, command_line, print_err, say, warn
from common.files import lack_of_space, remove_temporaries, replacing, try_lock
from data.shards import read_manifest, write_shard
from data.sources import Place
from data.tokenizer import Tokenizer

BATCH = 64  # documents that a thread tokenises at once
READ_AHEAD = 2  # such batches for each thread
MOST_HASHED = 10**10  # bytes of local sources, which take some ten seconds
LOCK_SECONDS = 10  # to wait for a preparation that is just ending
SMALL_DATASET = 100_000_000  # tokens; the quickstart's model suits fewer
MEDIUM_DATASET = 8_000_000_000  # the fast recipe reads 1.3B tokens, the GPT-2 recipe 10B
RECORDS_EVAL_TOKENS = 10_485_760  # the first ones of validation, on which 3.28 is reached

CONTINUE = "the same command continues after the last finished shard"

# By default tqdm shares a lock between processes. A killed preparation would leave it behind, and
# some systems would print a warning.
tqdm.set_lock(threading.RLock())


class Document(NamedTuple):
    """A row of a source; without text it is only counted."""

    behind: Place  # where the next one begins
    text: str | None
    held_out: str = ""  # what the source has cut off its end for validation


@dataclass
class Plan:
    """What a data folder is to hold."""

    folder: Path
    made_from: dict  # what determines its shards: see made_from()
    documents: Callable[[Place], Iterator[Document]]  # from a place on
    tokenizer: Tokenizer
    expected_tokens: int = 0  # both splits; for the disk space and the progress bar
    val_tokens: int = 0  # of the first documents, held out whole; 0: the source holds out its own
    train_tokens: int | None = None  # the most; None: all of the source
    shard_tokens: int = 100_000_000
    cuts_documents: bool = False  # every shard is full, as llm.c's are; blank text is a document
    least_tokens: int = 1  # in each split
    # ends the error if a split has fewer; {twentieth} becomes a twentieth of all tokens
    hint: str = "give more text"
    # for a stream: the run that trains meanwhile, and a wait until more training tokens are wanted
    run_id: str = ""
    wait: Callable[[int], None] = lambda tokens: None


def made_from(
    folder: Path, source: str, files: list[str], tokenizer: Tokenizer, **settings
) -> dict:
    """
    What must stay the same for a preparation of this folder to continue: the source as the user
    named it, its files, the tokenizer, and the flags that change what is written.
    """
    same: dict[str, Any] = dict(format="uint16 shards, llm.c header", source=source)
    same |= dict(tokenizer=tokenizer.kind, vocab=tokenizer.vocab, eot=tokenizer.eot)
    if tokenizer.kind == "bpe":
        same["tokenizer_sha256"] = hashlib.sha256(tokenizer.spec["json"].encode()).hexdigest()
    begun = read_manifest(folder) if (folder / "manifest.json").exists() else {}
    local = [name for name in files if "://" not in name]
    return same | settings | dict(files=stamp_files(local, begun.get("files", {})))


def stamp_files(names: list[str], noted: dict[str, list]) -> dict[str, list]:
    """
    Return size, mtime and sha256 of local files. A file with the noted size and mtime is not read,
    but returned as noted. Nor are more than MOST_HASHED bytes read; their mtime alone decides.
    """
    quick = {name: [(stat := os.stat(name)).st_size, stat.st_mtime_ns] for name in names}
    is_hashed = sum(size for size, _ in quick.values()) <= MOST_HASHED
    stamps = {}
    for name, stamp in quick.items():
        if noted.get(name, [])[:2] == stamp:
            stamps[name] = noted[name]
        elif is_hashed:
            with open(name, "rb") as file:
                stamps[name] = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
        else:
            stamps[name] = stamp
    return stamps


def is_same_file(stamp: list, noted: list) -> bool:
    """Return whether two stamps are of the same bytes. Without both hashes the mtime decides."""
    return stamp == noted or (len(stamp) == len(noted) == 3 and stamp[2] == noted[2])


def prepare(plan: Plan, workers: int) -> dict:
    """
    Fill plan.folder, or continue where an earlier launch stopped. `workers` threads tokenise.
    Returns the manifest. Raises UserError, and RunError for what fails on the way.
    """
    check_folder(plan)
    plan.folder.mkdir(parents=True, exist_ok=True)
    keep_awake()
    try:
        with open(plan.folder / "lock", "ab") as lock:
            wait_for_lock(lock, plan.folder)
            manifest = begin_or_continue(plan)
            if not manifest["complete"]:
                if manifest["next"]:  # else the source had ended when the last launch was stopped
                    write_shards(plan, manifest, workers)
                finish(plan, manifest)
    except KeyboardInterrupt:
        print_err(f"stopped: {CONTINUE}")
        raise
    except OSError as error:  # a full disk, whose error names no file, or a text file that is gone
        path = error.filename or plan.folder
        raise RunError(f"{path}: {error.strerror}; once that is fixed, {CONTINUE}") from None
    return manifest


# -----------------------------------------------------------------------------
# The folder


def wait_for_lock(lock, folder: Path) -> None:
    began = time.monotonic()
    while not try_lock(lock):
        if time.monotonic() - began > LOCK_SECONDS:
            problem = f"{folder}: another preparation is writing to it"
            raise UserError(f"{problem}; wait for that one, or choose another folder")
        time.sleep(0.2)


def check_folder(plan: Plan) -> None:
    """Raises UserError if the folder holds something else than what this plan makes."""
    folder = plan.folder
    if folder.resolve() == Path(__file__).resolve().parent:
        raise UserError(f"{folder}: holds this program's own files; choose a folder in it")
    if (folder / "manifest.json").exists():
        check_manifest(plan, read_manifest(folder))
    elif any(folder.glob("*.bin")) or (folder / "tokenizer.json").exists():
        raise UserError(f"{folder}: holds files of another program; choose another folder")


def check_manifest(plan: Plan, manifest: dict) -> None:
    """Raises UserError if the folder was made from other text or flags."""
    asked = dict(plan.made_from)
    manifest = dict(order="prefix") | manifest  # that of earlier versions
    noted = manifest.get("files", {})
    # of an unfinished one a line may have been mended meanwhile
    is_begun = not manifest.get("complete", True)
    if list(asked["files"]) == list(noted) and (
        is_begun or all(map(is_same_file, asked["files"].values(), noted.values()))
    ):
        del asked["files"]
    if differs := [key for key, value in asked.items() if manifest.get(key) != value]:
        flags = [
            f"{key} {manifest[key]}, asked for {asked[key]}"
            for key in differs
            if isinstance(asked[key], int | str) and key in manifest and "sha256" not in key
        ]
        named = "; ".join(flags or differs)
        problem = f"exists, made from other text or with other flags ({named})"
        raise UserError(f"{plan.folder}: {problem}; choose another folder, or delete that one")
    before = manifest.get("train_tokens")  # earlier versions noted that, and no place to go on
    if "next" not in manifest and before and (plan.train_tokens or 0) > before:
        problem = "an earlier version made it, so that it cannot be given more tokens"
        raise UserError(f"{plan.folder}: {problem}; choose another folder, or delete that one")


def begin_or_continue(plan: Plan) -> dict:
    """The manifest of a folder that is locked for this process: a new one, or what is there."""
    folder = plan.folder
    check_folder(plan)  # another process may have been here
    remove_temporaries(folder, "*.bin", "*.json")
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        for name, stamp in plan.made_from["files"].items():
            if not is_same_file(stamp, manifest["files"][name]):  # a line of it has been mended
                changed = "has changed since the preparation began; finished shards stay"
                hint = f"if rows were added or removed, delete {folder} and begin again"
                warn(f"{name}: {changed}; {hint}")
    else:
        if shortage := lack_of_space(folder, 2 * plan.expected_tokens):  # 2 bytes per token
            warn(f"{shortage}; when the disk is full, make room: {CONTINUE}")
        manifest = plan.made_from | dict(complete=False, shards=[], next=Place()._asdict())
        manifest |= {"left_out": {"rows": 0, "no text": 0}, "val_text_sha256": ""}
    has_room = plan.train_tokens is None or tokens_of(manifest)["train"] < plan.train_tokens
    if manifest["complete"] and not (manifest.get("next") and has_room):
        say(f"{folder}: complete, nothing to do")
    elif manifest["complete"]:
        say(f"{folder}: adding tokens; runs that began with fewer cannot be resumed on it")
        manifest["complete"] = False
    elif manifest["shards"]:
        say(f"{folder}: continuing after {len(manifest['shards'])} shards")
    manifest["files"] = plan.made_from["files"]
    if plan.run_id:
        manifest["run_id"] = plan.run_id  # tells that run that the shards are from its source
    write_manifest(folder, manifest)
    own_json = folder / "tokenizer.json"
    if plan.tokenizer.kind == "bpe" and not own_json.exists():
        with replacing(own_json) as file:
            file.write(plan.tokenizer.spec["json"].encode())
    return manifest


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


def finish(plan: Plan, manifest: dict) -> None:
    """End a preparation. Raises UserError if a split has too few tokens."""
    totals, left_out = tokens_of(manifest), manifest["left_out"]
    if left_out["no text"]:
        held = f"{left_out['no text']:,} of {left_out['rows']:,} rows hold no text"
        warn(f"{manifest['source']}: {held} in the field and are left out")
    if min(totals.values()) < plan.least_tokens:
        discard(plan.folder, manifest)
        held = f"{totals['val']:,} tokens for validation and {totals['train']:,} for training"
        hint = plan.hint.format(twentieth=max(sum(totals.values()) // 20, 1))
        needs = f"each needs at least {plan.least_tokens}; {hint}"
        raise UserError(f"{manifest['source']}: {held}, {needs}")
    if manifest["next"] is None and totals["train"] < (plan.train_tokens or 0):
        say(f"the source has no more: {plan.train_tokens:,} tokens were asked for")
    manifest["complete"] = True
    write_manifest(plan.folder, manifest)


def discard(folder: Path, manifest: dict) -> None:
    """Leave nothing that looks like a dataset. A run beside this one reads the manifest first."""
    shards = [shard["name"] for shard in manifest["shards"]]
    with contextlib.suppress(OSError):  # Windows deletes no file that is open, as the lock is
        for name in ["manifest.json", "tokenizer.json", *shards, "lock"]:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def say_what_it_holds(folder: Path, manifest: dict, config: Path | None = None) -> None:
    """
    Print what a data folder holds and the command that trains on it, with `config` if one was
    written for it.
    """
    tokens, shards = tokens_of(manifest), manifest["shards"]
    total = sum(tokens.values())
    documents, size = (sum(shard[key] for shard in shards) for key in ("documents", "bytes"))
    held = f"{tokens['train']:,} tokens for training and {tokens['val']:,} for validation"
    files = len(manifest["files"])  # local ones
    of = f" of {files:,} files" if files > 1 else ""
    say(f"{folder}: {documents:,} documents{of}, {held} in {len(shards)} shards")
    say(f"text: {size:,} bytes, {size / total:.3f} bytes per token; {2 * total / 1e6:,.1f} MB here")
    arguments: list[object] = [config]
    if config is None:
        recipe = "fast124m_4070.py" if total < MEDIUM_DATASET else "gpt124m_4070.py"
        config = Path("config", "quickstart.py" if total < SMALL_DATASET else recipe)
        name: object = folder.name if folder.parent == Path("data") else folder
        if Path("data", folder).is_dir() and not folder.is_absolute():
            name = f"./{folder}"  # data/NAME is another dataset
        arguments = [config, f"--dataset={name}", f"--out_dir=out/{config.stem}_{folder.name}"]
        if manifest.get("order") == "records":
            arguments.append(f"--eval_tokens={min(RECORDS_EVAL_TOKENS, tokens['val'])}")
    say(f"next: {command_line('python', 'train.py', *arguments)}")


# -----------------------------------------------------------------------------
# From documents to shards


@dataclass
class Part:
    """The contents of a shard to be written."""

    tokens: bytearray = field(default_factory=bytearray)  # two bytes each
    documents: int = 0
    bytes: int = 0  # of their text


class Encoded(NamedTuple):
    """A document's tokens, two bytes each, end-of-text first; and its text in UTF-8."""

    tokens: bytes
    text: bytes
    begins: bool = True  # False for the rest of a document that a shard's end has cut


def write_shards(plan: Plan, manifest: dict, workers: int) -> None:
    """Write the shards that follow the finished ones. Raises UserError and RunError."""
    totals = tokens_of(manifest)
    most = plan.train_tokens or 2**63
    begin = Place(**manifest["next"])
    documents = encode(plan.documents(begin), plan.tokenizer, workers, plan.cuts_documents)
    if plan.cuts_documents:
        documents = cut_at_shards(documents, begin, plan.shard_tokens)
    # disable=None: shown on a terminal only
    with tqdm(total=plan.expected_tokens, unit="tok", unit_scale=True, disable=None) as bar:
        bar.update(sum(totals.values()))
        while manifest["next"] and totals["train"] < most:
            # how many tokens the next shard of each split may take
            room = dict(train=min(plan.shard_tokens, most - totals["train"]), val=plan.shard_tokens)
            if plan.cuts_documents:
                room["train"] = plan.shard_tokens  # the last shard is full, too
            split = "train"  # of whole documents
            if totals["val"] < plan.val_tokens:
                split = "val"
                room["val"] = min(plan.shard_tokens, plan.val_tokens - totals["val"])
            else:
                plan.wait(totals["train"])
            parts = take(documents, split, room, manifest, bar)
            for name in [*parts]:  # frees each part before the next one is written
                write_part(plan, manifest, name, parts.pop(name))
            write_manifest(plan.folder, manifest)
            totals = tokens_of(manifest)
    documents.close()  # ends the threads


def take(
    documents: Iterator, split: str, room: dict[str, int], manifest: dict, bar: tqdm
) -> dict[str, Part]:
    """
    The next documents, for this split, until one split has no room for another one. Notes in the
    manifest where the following ones begin, what is left out, and the validation text.
    """
    parts = {"train": Part(), "val": Part()}
    for behind, whole, held_out in documents:
        manifest["left_out"]["rows"] += whole.begins
        manifest["left_out"]["no text"] += not (whole.tokens or whole.text or held_out.text)
        for name, encoded in ((split, whole), ("val", held_out)):
            part = parts[name]
            part.tokens += encoded.tokens
            part.documents += bool(encoded.tokens) and encoded.begins
            part.bytes += len(encoded.text) if encoded.tokens else 0
            bar.update(len(encoded.tokens) // 2)
            if name == "val" and encoded.text:
                add_to_val_text(manifest, encoded.text)
        if any(len(parts[name].tokens) >= 2 * room[name] for name in room):
            manifest["next"] = behind._asdict()
            return parts
    manifest["next"] = None  # the source has ended
    return parts


def cut_at_shards(documents: Generator, begin: Place, shard_tokens: int) -> Generator:
    """
    The same tokens, a document in two where a shard ends within it. Its text counts for the shard
    in which it begins.
    """
    filled = 0  # of the shard
    before, cut = begin._replace(given=None), begin.given or 0
    for behind, whole, nothing in documents:
        rest = whole.tokens[2 * cut :]
        text = b"" if cut else whole.text
        begins = not cut
        while filled + len(rest) // 2 > shard_tokens:
            taken = shard_tokens - filled
            cut += taken
            yield before._replace(given=cut), Encoded(rest[: 2 * taken], text, begins), nothing
            rest = rest[2 * taken :]
            text = b""
            begins = False
            filled = 0
        yield behind, Encoded(rest, text, begins), nothing
        filled = (filled + len(rest) // 2) % shard_tokens
        before, cut = behind, 0


def add_to_val_text(manifest: dict, text: bytes) -> None:
    """
    Continue the hash of the validation text by a document: of the hash so far and the document's
    own. It does not depend on the tokenizer, on shards, or on where a preparation was stopped.
    """
    so_far = manifest.get("val_text_sha256")
    if so_far is not None:  # an earlier version began this folder without it
        both = bytes.fromhex(so_far) + hashlib.sha256(text).digest()
        manifest["val_text_sha256"] = hashlib.sha256(both).hexdigest()


def write_part(plan: Plan, manifest: dict, split: str, part: Part) -> None:
    """Write a shard and list it in the manifest, unless it is empty."""
    if not part.tokens:
        return
    name = f"{split}_{len(manifest['shards']):06d}.bin"
    sha256 = write_shard(plan.folder / name, np.frombuffer(part.tokens, "<u2"))
    listed = dict(name=name, tokens=len(part.tokens) // 2, sha256=sha256)
    manifest["shards"].append(listed | dict(documents=part.documents, bytes=part.bytes))


def encode(
    documents: Iterator[Document], tokenizer: Tokenizer, workers: int, keeps_blank: bool
) -> Generator:
    """
    Tokenise on `workers` threads (BPEs release the GIL) and keep the order: yields for each
    document the place behind it, its text and what is held out, both Encoded. Reads far enough
    ahead to keep the threads busy while the source downloads or a shard is written; memory does not
    grow with the source. Raises RunError if reading the source fails.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    pending: deque[Future] = deque()
    try:
        while batch := list(islice(documents, BATCH)):
            pending.append(pool.submit(encode_batch, batch, tokenizer, keeps_blank))
            if len(pending) > READ_AHEAD * workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()
    except UserError as error:
        raise RunError(*(f"{problem}; then {CONTINUE}" for problem in error.problems)) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(batch: list[Document], tokenizer: Tokenizer, keeps_blank: bool) -> list[tuple]:
    return [
        (behind, encode_text(text, tokenizer, keeps_blank), encode_text(held_out, tokenizer))
        for behind, text, held_out in batch
    ]


def encode_text(text: str | None, tokenizer: Tokenizer, keeps_blank: bool = False) -> Encoded:
    if text is None or not (text or keeps_blank):
        return Encoded(b"", b"")
    content = text.encode(errors="replace")
    ids = tokenizer.encode(text)
    if not len(ids) and not keeps_blank:
        return Encoded(b"", content)
    tokens = np.concatenate([[tokenizer.eot], ids], dtype="<u2", casting="unsafe")
    return Encoded(tokens.tobytes(), content)
