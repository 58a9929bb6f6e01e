"""
Open token datasets on disk, check them, and read each split as one long sequence of tokens.

A dataset is a folder of shards in one of three formats: ours (llm.c's shards plus a manifest.json),
llm.c's or modded-nanogpt's shards alone, or nanoGPT's headerless train.bin and val.bin. Without a
manifest.json, the vocabulary comes from meta.pkl if there is one. A shard's file name says which
split it belongs to: see split_of.
"""

import bisect
import hashlib
import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.console import UserError, raise_if_any, short, warn
from common.files import names_in, read_json, replacing
from data.tokenizer import GPT2_VOCAB, MOST_IDS, read_bpe, read_meta

HEADER_INTS = 256  # int32 words in an llm.c header: magic, version, token count, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
GET_AGAIN = "move it away, and get or prepare it again"
# llm.c's and modded-nanogpt's runs are evaluated on the first 10,485,760 of the 100M tokens in this
# file. The split ends there, so that losses can be compared with theirs
FINEWEB_VAL, FINEWEB_VAL_TOKENS = "fineweb_val_000000.bin", 10_485_760
CHECKED_TOKENS = 32768  # tokens at each end of a shard to check when a dataset is opened
PROBE = 1024  # this many tokens in a row are all 0 only where a download has left a hole
PROBE_EVERY = 2**21  # tokens from one probe to the next: 50 short reads for a shard of 100M tokens

# -----------------------------------------------------------------------------
# Shards


@dataclass(frozen=True)
class Shard:
    path: Path
    header_bytes: int
    tokens: int


def split_of(name: str) -> str | None:
    """
    Return "train" or "val", whichever comes last in a file name as a separate word ("retrieval" is
    neither), or None if the file belongs to no split.
    """
    words = re.findall(r"(?:^|[_.-])(train|val)(?=[_.0-9-])", name)
    return words[-1] if words else None


def open_shard(path: Path) -> Shard:
    """Read a shard's header and check it against the file size. Raises UserError."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begins = file.read(12)
    magic, version, tokens = np.frombuffer(begins.ljust(12, b"\0"), dtype="<i4").tolist()
    header_bytes = 4 * HEADER_INTS
    if magic != SHARD_MAGIC and path.name in ("train.bin", "val.bin"):  # nanoGPT's have no header
        header_bytes, tokens = 0, size // 2
    elif (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        found = f"its first two numbers are {magic} and {version}"
        rule = f"but should be {SHARD_MAGIC} and {SHARD_VERSION}"
        rule += " (only train.bin and val.bin need no header)"
        raise UserError(f"{path}: is not a token shard: {found}, {rule}; {GET_AGAIN}")
    expected = header_bytes + 2 * tokens
    if size != expected:
        problem = f"{path}: has {size:,} bytes, but {tokens:,} tokens take {expected:,}"
        raise UserError(f"{problem}; {GET_AGAIN}")
    return Shard(path.absolute(), header_bytes, tokens)


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """
    Write uint16 tokens as an llm.c shard, which appears under its name only once it is safely on
    disk. Returns the file's SHA-256.
    """
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    body = np.ascontiguousarray(tokens, dtype="<u2")
    sha256 = hashlib.sha256(header)
    sha256.update(body)  # hash and write without copying: a shard of 100M tokens is 200 MB
    with replacing(path) as file:
        file.write(header)
        file.write(body)
    return sha256.hexdigest()


class ShardTokens:
    """Read the shards of one split as if their tokens were one long sequence."""

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = [*itertools.accumulate(shard.tokens for shard in shards)]

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[int, int]:
        """Return (shard number, token offset in that shard) for a position in the split."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number] - self.shards[number].tokens)

    def spread(self, tokens: int, length: int) -> list[int]:
        """
        Return where the windows of an evaluation of `tokens` tokens start. They are `length` tokens
        and a last target long, and spaced evenly over the whole split.
        """
        available = (len(self) - 1) // length  # subtract 1 for the last target
        count = min(max(tokens // length, 1), available)
        return [n * available // count * length for n in range(count)]

    def read(self, position: int, out: np.ndarray) -> None:
        """
        Fill `out` (uint16) with the tokens from `position` on, across shard boundaries. Raises
        OSError if a file cannot be read, and UserError if it is now too short.
        """
        filled = 0
        while filled < len(out):
            number, offset = self.locate(position + filled)
            shard = self.shards[number]
            piece = out[filled : filled + shard.tokens - offset]
            try:
                # Do not memory-map: mapped pages would count as this process's memory.
                with open(shard.path, "rb") as file:
                    file.seek(shard.header_bytes + 2 * offset)
                    size = file.readinto(piece)
            except OSError as error:
                error.filename = shard.path  # readinto() names no file
                raise
            if size != piece.nbytes:
                raise UserError(f"{shard.path}: is shorter than when the run began; restore it")
            filled += len(piece)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        """
        Return the windows that start at `positions` as (len(positions), length) int64. Raises
        OSError and UserError as read() does, and UserError for a token outside the vocabulary.
        """
        block = np.empty((len(positions), length), dtype="<u2")
        for row, position in zip(block, positions, strict=True):
            self.read(position, row)
        if block.size and block.max() >= self.vocab:
            row, column = np.argwhere(block >= self.vocab)[0]
            number, offset = self.locate(positions[row] + int(column))
            where = f"{self.shards[number].path}: token {block[row, column]} at offset {offset:,}"
            hint = "prepare the dataset again"
            raise UserError(f"{where} is outside the vocabulary of {self.vocab}; {hint}")
        return block.astype(np.int64)


# -----------------------------------------------------------------------------
# Datasets


@dataclass
class Dataset:
    source: str  # the folder's path
    splits: dict[str, ShardTokens]  # train and val; each evaluation measures the loss of every one
    vocab: int  # vocabulary size before padding
    tokenizer: dict  # Tokenizer's spec, which checkpoints save
    manifest: dict = field(default_factory=dict)  # manifest.json; {} without one
    # Differs if the shards' names, sizes, tokens at the ends or, with a manifest.json, SHA-256s do.
    # Without one, as in fineweb_records, other tokens in the middle of a shard do not change it.
    fingerprint: str = ""
    val_fingerprint: str = ""  # a hash of the validation split's tokens

    @property
    def train(self) -> ShardTokens:
        return self.splits["train"]

    @property
    def val(self) -> ShardTokens:
        return self.splits["val"]

    def line(self) -> str:
        """Describe the data."""
        tokens = f"{short(len(self.train))} train and {short(len(self.val))} val tokens"
        return f"data: {self.source}, {tokens}, tokenizer {self.tokenizer['kind']}"

    def record(self) -> dict:
        """Return what a run's log records about its data."""
        return dict(
            tokenizer=tokenizer_name(self.tokenizer),
            data_fingerprint=self.fingerprint,
            val_fingerprint=self.val_fingerprint,
            train_tokens=len(self.train),
            val_tokens=len(self.val),
        )

    def listed(self, split: ShardTokens) -> list[dict]:
        """Return the manifest's entries of a split's shards, in order; [] without a manifest."""
        entries = {entry["name"]: entry for entry in self.manifest.get("shards", [])}
        return [entries[shard.path.name] for shard in split.shards if entries]

    @property
    def bytes_per_token(self) -> float | None:
        """Return UTF-8 bytes per validation token, or None if no manifest counts the bytes."""
        val = self.listed(self.val)
        if not val or "bytes" not in val[0]:
            return None
        return sum(shard["bytes"] for shard in val) / sum(shard["tokens"] for shard in val)

    def bits_per_byte(self, val_loss: float) -> float | None:
        """Convert a loss to bits per byte; None if the validation text's bytes were not counted."""
        if not (self.bytes_per_token and math.isfinite(val_loss)):
            return None
        return val_loss / math.log(2) / self.bytes_per_token


def tokenizer_name(spec: dict) -> str:
    """Return the tokenizer's kind and, if it has its own table, the table's sha256."""
    table = spec.get("json") or "".join(spec.get("itos", []))
    sha256 = hashlib.sha256(table.encode(errors="replace")).hexdigest()
    return f"{spec['kind']} {sha256}" if table else spec["kind"]


def dataset_folder(name: str) -> Path:
    """
    Return the folder that a --dataset means: data/NAME, or NAME itself as a path if it begins with
    a dot, if only that folder exists, or if neither exists and NAME contains a slash.
    """
    if name.startswith("."):
        return Path(name)
    is_path = Path(name).is_dir() or Path(name).name != name
    return Path(name) if is_path and not Path("data", name).is_dir() else Path("data", name)


def open_dataset(name: str) -> Dataset:
    """
    Open a dataset by name or path, and check every shard. Raises UserError, also if there is no
    such folder, and OSError.
    """
    folder = dataset_folder(name)
    data = read_folder(folder)
    for split, held in data.splits.items():
        if not len(held):
            number = f"00000{int(split == 'train')}"
            hint = f"get or prepare {split}.bin or a shard such as fineweb_{split}_{number}.bin"
            raise UserError(f"{folder}: has no {split} tokens; {hint}")
    data.fingerprint = check_and_fingerprint(data)
    tokens = np.empty(len(data.val), dtype="<u2")
    data.val.read(0, tokens)
    data.val_fingerprint = hashlib.sha256(tokens).hexdigest()
    return data


def read_folder(folder: Path) -> Dataset:
    """
    Read what a folder holds, according to its manifest.json or else its meta.pkl, if it has either.
    Checks the header of every shard. If the tokenizer's kind is unknown, a run can train but not
    print samples. Raises UserError.
    """
    manifest: dict = {}
    vocab, tokenizer = GPT2_VOCAB, dict(kind="gpt2")
    there = names_in(folder)
    if "manifest.json" in there:
        manifest = read_manifest(folder)
        if not manifest.get("complete", True):
            hint = "wait; if nothing prepares it now, repeat the command that prepares it"
            raise UserError(f"{folder}: is unfinished; {hint}")
        vocab = manifest.get("vocab", GPT2_VOCAB)
        tokenizer = dict(kind=manifest.get("tokenizer", "unknown"))
        if tokenizer["kind"] == "bpe":
            hint = "restore it, or prepare the dataset again"
            tokenizer = read_bpe(folder / "tokenizer.json", hint)
    elif "meta.pkl" in there:
        vocab, tokenizer = read_meta(folder / "meta.pkl")
    shards: dict[str, list[Shard]] = {"train": [], "val": []}
    if vocab > MOST_IDS:
        problem = f"{folder}: has a vocabulary of {vocab:,}, but its uint16 shards hold ids below"
        raise UserError(f"{problem} {MOST_IDS:,}; choose a tokenizer with fewer ids")
    # A Mac leaves ._train.bin beside train.bin on other disks.
    names = [name for name in there if name.endswith(".bin") and not name.startswith(".")]
    listed = [shard["name"] for shard in manifest.get("shards", [])]
    for name in sorted(listed or names):
        if split := split_of(name):
            shard = open_shard(folder / name)
            if name == FINEWEB_VAL:  # add 1 for the last target
                shard = replace(shard, tokens=min(shard.tokens, FINEWEB_VAL_TOKENS + 1))
            shards[split].append(shard)
    splits = {split: ShardTokens(held, vocab) for split, held in shards.items()}
    return Dataset(str(folder), splits, vocab, tokenizer, manifest)


def read_manifest(folder: Path) -> dict:
    """Read manifest.json. Raises UserError."""
    return read_json(folder / "manifest.json", "prepare the dataset again")


def check_and_fingerprint(data: Dataset) -> str:
    """
    Check the tokens at both ends of each shard and, without a manifest.json, look for zeros that do
    not belong there; training checks the rest as it reads them. Returns the dataset's fingerprint,
    a SHA-256 over the tokens at the ends and manifest.json's entries. Raises UserError and OSError.
    """
    splits = data.splits.values()
    # Leave out `bytes`, which says nothing about the tokens.
    listed = [entry for split in splits for entry in data.listed(split)]
    entries = {e["name"]: {k: v for k, v in e.items() if k != "bytes"} for e in listed}
    fingerprint = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for split in splits:
        for shard, end in zip(split.shards, split.ends, strict=True):
            begin, length = end - shard.tokens, min(shard.tokens, CHECKED_TOKENS)
            tokens = split.read_windows([begin, end - length], length)
            if not shard.header_bytes:
                check_width(shard.path, tokens[0])
            # Skip nanoGPT's files, which have no header: one character may rightly repeat.
            elif not data.manifest and shard.tokens >= PROBE:
                check_hole(shard, split, begin)
            fingerprint.update(os.fsencode(f"{shard.path.name} {shard.tokens} ") + tokens.tobytes())
    return fingerprint.hexdigest()


def check_hole(shard: Shard, split: ShardTokens, begin: int) -> None:
    """
    Raise UserError if a part of a shard was not downloaded. Programs that download several parts at
    once begin with a file of zeros. `begin` is the shard's begin in `split`.
    """
    offsets = [*range(0, shard.tokens - PROBE, PROBE_EVERY), shard.tokens - PROBE]
    empty = ~split.read_windows([begin + offset for offset in offsets], PROBE).any(axis=1)
    if empty.any():
        where = f"{PROBE:,} tokens from offset {offsets[empty.argmax()]:,} on"
        problem = f"{where} are all 0, as in an unfinished download"
        raise UserError(f"{shard.path}: {problem}; {GET_AGAIN}")


def check_width(path: Path, tokens: np.ndarray) -> None:
    """
    Raise UserError if a headerless file holds 32- or 64-bit numbers: when they are read as 16-bit
    tokens, every second token is an upper half, which is 0. Warn about what may be 8-bit numbers:
    bytes below 128, such as letters, where 16-bit tokens would sooner or later have one above that.
    """
    if len(tokens) > 1 and tokens.any() and not tokens[1::2].any():
        problem = f"{path}: every second value is 0, so this looks like int32 or int64"
        raise UserError(f"{problem}; save the file as uint16, if no id is above 65,535")
    if len(tokens) > 100 and (tokens > 255).any() and not (tokens & 0x8080).any():
        warn(f"{path}: every byte is below 128; if this is uint8, save it as uint16")


def check_dataset(data: Dataset, block_size: int) -> None:
    """Raise UserError if a split is too short for one window."""
    problems = []
    for split, held in data.splits.items():
        if len(held) <= block_size:
            short = f"the {split} split of {data.source} has only {len(held):,} tokens"
            problems.append(f"block_size: {short}; use --block_size={max(len(held) - 1, 1)}")
    raise_if_any(problems)
