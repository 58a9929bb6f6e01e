"""
Token datasets on the disk: opened, checked, and read as one stream of tokens per split.

A dataset is a folder of shards, `*train*.bin` and `*val*.bin`, in any of three forms: ours (llm.c's
format and a manifest.json), a folder of llm.c / modded-nanogpt shards, or nanoGPT's headerless
train.bin and val.bin (+ meta.pkl).
"""

import bisect
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.console import RunError, UserError
from configurator import Config
from data.tokenizer import GPT2_VOCAB, read_meta

HEADER_INTS = 256  # int32 words at the head of an llm.c shard: magic, version, token count, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
PREPARED_ON_DEMAND = (
    "python_stdlib"  # the quickstart's dataset: train.py makes it where it is missing
)

# -----------------------------------------------------------------------------
# Shards


@dataclass(frozen=True)
class Shard:
    path: Path
    header_bytes: int
    tokens: int


def open_shard(path: Path) -> Shard:
    """Read a shard's header and hold it against the file's size. Raises UserError."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(4 * HEADER_INTS).ljust(12, b"\0")[:12], dtype="<i4")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; prepare the dataset again") from None
    if header[0] != SHARD_MAGIC:  # nanoGPT's: nothing but tokens
        if path.name not in ("train.bin", "val.bin"):
            raise UserError(
                f"{path}: starts with {header[0]}, not with a shard's magic number {SHARD_MAGIC}"
            )
        if size == 0 or size % 2:
            raise UserError(
                f"{path}: {size:,} bytes are no whole number of 2-byte tokens, or none; prepare it again"
            )
        return Shard(path, 0, size // 2)
    if header[1] != SHARD_VERSION:
        raise UserError(
            f"{path}: shard version {header[1]}; this program reads version {SHARD_VERSION} (uint16 tokens)"
        )
    if size != 4 * HEADER_INTS + 2 * int(header[2]):
        held = (size - 4 * HEADER_INTS) / 2
        raise UserError(
            f"{path}: its header promises {header[2]:,} tokens, the file holds {held:,.1f}; prepare it again"
        )
    return Shard(path, 4 * HEADER_INTS, int(header[2]))


def allow_open_files(count: int) -> None:
    """So many more than the 1,024 that a process may usually have open unless it asks."""
    try:
        import resource
    except ImportError:  # Windows, whose limit is higher
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, OSError):  # macOS has a further limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class TokenStream:
    """
    The shards of one split as one stream. Plain reads, not a memory map: mapped pages count as the
    process's memory.
    """

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = list(np.cumsum([shard.tokens for shard in shards]).tolist())
        allow_open_files(len(shards))
        try:
            self.files = [open(shard.path, "rb", buffering=0) for shard in shards]
        except OSError as error:
            raise UserError(
                f"{error.filename}: {error.strerror}; larger shards, or a higher limit (ulimit -n)"
            ) from None
        self.lock = (
            threading.Lock()
        )  # the thread that reads ahead and an evaluation share the files' positions

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[int, int]:
        """(shard number, token offset in that shard) of a position in the stream."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number] - self.shards[number].tokens)

    def read(self, position: int, out: np.ndarray) -> None:
        """
        Fill `out` (uint16) with the tokens from `position` on, across shard boundaries. Raises
        RunError.
        """
        filled = 0
        while filled < len(out):
            number, offset = self.locate(position + filled)
            shard, file = self.shards[number], self.files[number]
            piece = out[filled : filled + shard.tokens - offset]
            with self.lock:
                file.seek(shard.header_bytes + 2 * offset)
                size = file.readinto(memoryview(piece).cast("B"))
            if size != piece.nbytes:
                raise RunError(
                    f"{shard.path}: ends before token {offset + len(piece):,}; it changed since the run began"
                )
            filled += len(piece)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        """
        The windows that start at `positions`, (len(positions), length) int64, every token checked.
        Raises RunError.
        """
        block = np.empty((len(positions), length), dtype="<u2")
        for row, position in zip(block, positions):
            self.read(position, row)
        if block.size and block.max() >= self.vocab:
            row, column = np.argwhere(block >= self.vocab)[0]
            number, offset = self.locate(positions[row] + int(column))
            raise RunError(
                f"{self.shards[number].path}: token {block[row, column]} at offset {offset:,} is outside the vocabulary "
                f"of {self.vocab}; the dataset is damaged or belongs to another tokenizer: prepare it again"
            )
        return block.astype(np.int64)


class HeldTokens:
    """Tokens in memory, to be read like a TokenStream: what a stream evaluates on."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        return np.stack(
            [self.tokens[position : position + length] for position in positions]
        ).astype(np.int64)


@dataclass
class Dataset:
    source: str  # the folder, or what is streamed
    train: TokenStream | HeldTokens  # of a stream, only as many tokens as an evaluation reads
    val: TokenStream | HeldTokens
    vocab: int  # before padding
    tokenizer: dict  # what Tokenizer needs to encode and decode; travels in checkpoints
    fingerprint: str  # changes when the tokens do
    stream: Any = None  # the streaming.Stream that training reads in place of `train`


# -----------------------------------------------------------------------------
# Datasets


def dataset_folder(name: str) -> Path:
    return (
        Path("data", name) if Path("data", name).is_dir() or not Path(name).is_dir() else Path(name)
    )


def open_dataset(name: str) -> Dataset:
    """
    Open data/NAME, or a folder by its path; check every header. Raises UserError with one line per
    problem.
    """
    folder = dataset_folder(name)
    if not folder.is_dir():
        command = (
            "data/prepare_fineweb.py --out="
            if "fineweb" in name
            else "data/prepare_text.py FILE --out="
        )
        raise UserError(
            f"dataset: there is no folder {folder}; make it with: python {command}{folder}"
        )
    manifest = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
    meta = read_meta(folder / "meta.pkl") if (folder / "meta.pkl").exists() else {}
    try:
        listed = {
            shard["name"]: dict(shard, tokens=int(shard["tokens"]))
            for shard in manifest.get("shards", [])
        }
        vocab = int(manifest.get("vocab") or meta.get("vocab_size") or GPT2_VOCAB)
        tokenizer = dict(kind=manifest.get("tokenizer") or ("char" if "itos" in meta else "gpt2"))
        if "itos" in meta:
            tokenizer["itos"] = [meta["itos"][i] for i in range(vocab)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: manifest.json or meta.pkl is damaged ({error!r}); prepare the dataset again"
        ) from None
    if manifest.get("complete") is False:
        raise UserError(
            f"{folder}: its preparation is unfinished; run the command that began it again"
        )
    names = sorted(listed) or sorted(path.name for path in folder.glob("*.bin"))
    problems, shards = [], {"train": [], "val": []}
    for shard_name in names:
        try:
            shard = open_shard(folder / shard_name)
        except UserError as error:
            problems += error.problems
            continue
        if listed and listed[shard_name]["tokens"] != shard.tokens:
            problems.append(
                f"{shard.path}: {shard.tokens:,} tokens; manifest.json says {listed[shard_name]['tokens']:,}"
            )
        for split in ("train", "val"):
            if split in shard_name:
                shards[split].append(shard)
    for split in ("train", "val"):
        if not sum(shard.tokens for shard in shards[split]) and not problems:
            problems.append(
                f"{folder}: holds no tokens for {split} (*{split}*.bin); prepare the dataset again"
            )
    if problems:
        raise UserError(*problems)
    fingerprint = hashlib.sha256(json.dumps(listed, sort_keys=True).encode())
    streams = {split: TokenStream(shards[split], vocab) for split in shards}
    for stream in streams.values():
        for number, shard in enumerate(
            stream.shards
        ):  # look at both ends; the rest is checked as it is read
            start, length = stream.ends[number] - shard.tokens, min(shard.tokens, 32768)
            ends = stream.read_windows([start, stream.ends[number] - length], length)
            fingerprint.update(f"{shard.path.name} {shard.tokens} ".encode() + ends.tobytes())
    return Dataset(
        str(folder), streams["train"], streams["val"], vocab, tokenizer, fingerprint.hexdigest()
    )


def is_made_on_demand(config: Config) -> bool:
    """Whether this is the quickstart's dataset and it is still to be made, or to be finished."""
    manifest = dataset_folder(config.dataset) / "manifest.json"
    return config.dataset == PREPARED_ON_DEMAND and (
        not manifest.exists() or read_json(manifest).get("complete") is False
    )


def check_dataset(config: Config) -> list[str]:
    """What is wrong with the dataset for this configuration, one line each (for load_config)."""
    if is_made_on_demand(config):
        return []
    try:
        data = open_dataset(config.dataset)
    except UserError as error:
        return error.problems
    needed = config.block_size + 1
    return [
        f"block_size: {config.block_size} needs {needed} tokens; the {split} split of {data.source} has {len(stream):,}"
        for split, stream in (("train", data.train), ("val", data.val))
        if len(stream) <= config.block_size
    ]


def read_json(path: Path, mend: str = "prepare the dataset again") -> dict:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {mend}") from None
