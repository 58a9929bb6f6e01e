"""
Tokens from disk to the model: shard files, the order in which they are read, micro-batches on the device.

A dataset is a folder of shards, `*train*.bin` and `*val*.bin`, in any of three forms: ours (llm.c's format and a
manifest.json), a folder of llm.c / modded-nanogpt shards, or nanoGPT's headerless train.bin and val.bin (+ meta.pkl).
The shards of a split are one long stream of tokens; a training sequence is a window of block_size + 1 of them.

The order is a pure function of (seed, number of sequences consumed), so that number is all a resumed run needs, and
batch size, accumulation and the number of processes only cut the same sequence of windows differently.
"""

import bisect
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configurator import Config
from errors import RunError, UserError
from tokenizer import GPT2_VOCAB, read_meta

HEADER_INTS = 256  # int32 words at the head of an llm.c shard: magic, version, token count, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
PREPARED_ON_DEMAND = "python_stdlib"  # the quickstart's dataset: train.py makes it where it is missing
PREFETCHED_BATCHES = 4

# -----------------------------------------------------------------------------
# Shards and datasets


@dataclass(frozen=True)
class Shard:
    path: Path
    header_bytes: int
    tokens: int


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write uint16 tokens as an llm.c shard, durable before it appears under its name; returns the file's sha256."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    body = np.ascontiguousarray(tokens, dtype="<u2")
    sha256 = hashlib.sha256(header)
    sha256.update(body)  # no copies: a shard of 100M tokens is 200 MB
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(header)
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return sha256.hexdigest()


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
            raise UserError(f"{path}: starts with {header[0]}, not with a shard's magic number {SHARD_MAGIC}")
        if size == 0 or size % 2:
            raise UserError(f"{path}: {size:,} bytes are no whole number of 2-byte tokens, or none; prepare it again")
        return Shard(path, 0, size // 2)
    if header[1] != SHARD_VERSION:
        raise UserError(f"{path}: shard version {header[1]}; this program reads version {SHARD_VERSION} (uint16 tokens)")
    if size != 4 * HEADER_INTS + 2 * int(header[2]):
        held = (size - 4 * HEADER_INTS) / 2
        raise UserError(f"{path}: its header promises {header[2]:,} tokens, the file holds {held:,.1f}; prepare it again")
    return Shard(path, 4 * HEADER_INTS, int(header[2]))


class TokenStream:
    """The shards of one split as one stream. Plain reads, not a memory map: mapped pages count as the process's memory."""

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = list(np.cumsum([shard.tokens for shard in shards]).tolist())
        self.files = [open(shard.path, "rb", buffering=0) for shard in shards]
        self.lock = threading.Lock()  # the thread that reads ahead and an evaluation share the files' positions

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[int, int]:
        """(shard number, token offset in that shard) of a position in the stream."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number] - self.shards[number].tokens)

    def read(self, position: int, out: np.ndarray) -> None:
        """Fill `out` (uint16) with the tokens from `position` on, across shard boundaries. Raises RunError."""
        filled = 0
        while filled < len(out):
            number, offset = self.locate(position + filled)
            shard, file = self.shards[number], self.files[number]
            piece = out[filled : filled + shard.tokens - offset]
            with self.lock:
                file.seek(shard.header_bytes + 2 * offset)
                size = file.readinto(memoryview(piece).cast("B"))
            if size != piece.nbytes:
                raise RunError(f"{shard.path}: ends before token {offset + len(piece):,}; it changed since the run began")
            filled += len(piece)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        """The windows that start at `positions`, (len(positions), length) int64, every token checked. Raises RunError."""
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


@dataclass
class Dataset:
    folder: Path
    train: TokenStream
    val: TokenStream
    vocab: int  # before padding
    tokenizer: dict  # what Tokenizer needs to encode and decode; travels in checkpoints
    fingerprint: str  # changes when the tokens do


def dataset_folder(name: str) -> Path:
    return Path("data", name) if Path("data", name).is_dir() or not Path(name).is_dir() else Path(name)


def open_dataset(name: str) -> Dataset:
    """Open data/NAME, or a folder by its path; check every header. Raises UserError with one line per problem."""
    folder = dataset_folder(name)
    if not folder.is_dir():
        command = "data/prepare_fineweb.py --out=" if "fineweb" in name else "data/prepare_text.py FILE --out="
        raise UserError(f"dataset: there is no folder {folder}; make it with: python {command}{folder}")
    manifest = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
    meta = read_meta(folder / "meta.pkl") if (folder / "meta.pkl").exists() else {}
    try:
        listed = {shard["name"]: dict(shard, tokens=int(shard["tokens"])) for shard in manifest.get("shards", [])}
        vocab = int(manifest.get("vocab") or meta.get("vocab_size") or GPT2_VOCAB)
        tokenizer = dict(kind=manifest.get("tokenizer") or ("char" if "itos" in meta else "gpt2"))
        if "itos" in meta:
            tokenizer["itos"] = [meta["itos"][i] for i in range(vocab)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: manifest.json or meta.pkl is damaged ({error!r}); prepare the dataset again") from None
    if manifest.get("complete") is False:
        raise UserError(f"{folder}: its preparation is unfinished; run the command that began it again")
    names = sorted(listed) or sorted(path.name for path in folder.glob("*.bin"))
    problems, shards = [], {"train": [], "val": []}
    for shard_name in names:
        try:
            shard = open_shard(folder / shard_name)
        except UserError as error:
            problems += error.problems
            continue
        if listed and listed[shard_name]["tokens"] != shard.tokens:
            problems.append(f"{shard.path}: {shard.tokens:,} tokens; manifest.json says {listed[shard_name]['tokens']:,}")
        for split in ("train", "val"):
            if split in shard_name:
                shards[split].append(shard)
    for split in ("train", "val"):
        if not sum(shard.tokens for shard in shards[split]) and not problems:
            problems.append(f"{folder}: holds no tokens for {split} (*{split}*.bin); prepare the dataset again")
    if problems:
        raise UserError(*problems)
    fingerprint = hashlib.sha256(json.dumps(listed, sort_keys=True).encode())
    streams = {split: TokenStream(shards[split], vocab) for split in shards}
    for stream in streams.values():
        for number, shard in enumerate(stream.shards):  # look at both ends; the rest is checked as it is read
            start, length = stream.ends[number] - shard.tokens, min(shard.tokens, 32768)
            ends = stream.read_windows([start, stream.ends[number] - length], length)
            fingerprint.update(f"{shard.path.name} {shard.tokens} ".encode() + ends.tobytes())
    return Dataset(folder, streams["train"], streams["val"], vocab, tokenizer, fingerprint.hexdigest())


def is_made_on_demand(config: Config) -> bool:
    """Whether this is the quickstart's dataset and it is still to be made, or to be finished."""
    manifest = dataset_folder(config.dataset) / "manifest.json"
    return config.dataset == PREPARED_ON_DEMAND and (not manifest.exists() or read_json(manifest).get("complete") is False)


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
        f"block_size: {config.block_size} needs {needed} tokens; the {split} split of {data.folder} has {len(stream):,}"
        for split, stream in (("train", data.train), ("val", data.val))
        if len(stream) <= config.block_size
    ]


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); prepare the dataset again") from None


# -----------------------------------------------------------------------------
# Order and batches


class WindowOrder:
    """
    Where the n-th training sequence starts. An epoch is every window of the stream once, in a shuffled order; its
    windows tile the stream from an offset of its own in [0, block_size), so that later epochs see other cuts.
    """

    def __init__(self, tokens: int, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.open_epoch(0, first=0)

    def open_epoch(self, epoch: int, first: int) -> None:
        self.epoch, self.first, self.shuffled = epoch, first, None
        self.random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        self.offset = int(self.random.integers(min(self.block_size, self.tokens - self.block_size)))
        self.windows = (self.tokens - 1 - self.offset) // self.block_size  # a window's last target lies one beyond it

    def start(self, n: int) -> int:
        """Position in the stream of the n-th sequence, counted from 0 over all epochs."""
        if n < self.first:
            self.open_epoch(0, first=0)
        while n >= self.first + self.windows:
            self.open_epoch(self.epoch + 1, self.first + self.windows)
        if self.shuffled is None:
            self.shuffled = self.random.permutation(np.arange(self.windows, dtype=np.int32))
        return self.offset + int(self.shuffled[n - self.first]) * self.block_size


class TrainBatches:
    """
    Endless iterator over micro-batches: inputs and targets, each (B, T) int64 on the device. Read ahead by a thread.

    With several processes, process `rank` of `world_size` takes each world_size-th micro-batch. `consumed` is the
    number of sequences that all processes together have used up before the first batch.
    """

    def __init__(self, data: Dataset, config: Config, device: torch.device, consumed: int = 0,
                 rank: int = 0, world_size: int = 1):
        self.stream, self.device = data.train, device
        self.batch_size, self.block_size = config.batch_size, config.block_size
        self.order = WindowOrder(len(data.train), config.block_size, config.seed)
        self.next_read = consumed + rank * config.batch_size
        self.stride = world_size * config.batch_size
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self.pending: deque[Future[Tensor]] = deque()
        for _ in range(PREFETCHED_BATCHES):
            self.read_ahead()

    def read_ahead(self) -> None:
        self.pending.append(self.reader.submit(self.load, self.next_read))
        self.next_read += self.stride

    def load(self, first: int) -> Tensor:
        starts = [self.order.start(n) for n in range(first, first + self.batch_size)]
        block = torch.from_numpy(self.stream.read_windows(starts, self.block_size + 1))
        return block.pin_memory() if self.device.type == "cuda" else block

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        block = self.pending.popleft().result()
        self.read_ahead()
        return split_block(block, self.device)

    def locate(self, n: int) -> str:
        """Where the n-th sequence stands on the disk, for messages."""
        number, offset = self.stream.locate(WindowOrder(len(self.stream), self.block_size, self.order.seed).start(n))
        return f"{self.stream.shards[number].path} at token {offset:,}"

    def close(self) -> None:
        self.reader.shutdown(wait=False, cancel_futures=True)


def split_block(block: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T + 1) tokens -> inputs (B, T) and targets (B, T), shifted by one, on the device."""
    block = block.to(device, non_blocking=True)
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def eval_batches(stream: TokenStream, tokens: int, config: Config, device: torch.device, spread: bool = False,
                 rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor, int]]:
    """
    The fixed windows that an evaluation reads, as (inputs, targets, number of tokens): the first `tokens` of the
    stream in order, or with `spread` as many windows evenly over the whole of it. The same tokens at any batch size
    and number of processes: the last batches are filled up with targets of -1, which count for nothing.
    """
    T = config.block_size
    available = (len(stream) - 1) // T
    count = min(max(tokens // T, 1), available)
    starts = [n * available // count * T for n in range(count)] if spread else [n * T for n in range(count)]
    for first in range(0, count, config.batch_size * world_size):
        first += rank * config.batch_size
        rows = starts[first : first + config.batch_size]
        block = torch.from_numpy(stream.read_windows(rows + starts[:1] * (config.batch_size - len(rows)), T + 1))
        x, y = split_block(block, device)
        y[len(rows) :] = -1
        yield x, y, len(rows) * T
