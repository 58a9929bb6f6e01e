"""
Tokens to the model: the order in which windows of a dataset are read, and micro-batches on the
device.

A training sequence is a window of block_size + 1 tokens of the training split, or of a stream
(streaming.py). The order is a pure function of (seed, number of sequences consumed), so that number
is all a resumed run needs, and batch size, accumulation and the number of processes only cut the
same sequence of windows differently.
"""

import atexit
import contextlib
import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from configurator import Config
from data.shards import Dataset, HeldTokens, TokenStream

PREFETCHED_BATCHES = 4
MOMENT = 0.2  # seconds that a wait for data lasts before signals are looked at again


class WindowOrder:
    """
    Where the n-th training sequence starts. An epoch is every window of the stream once, in a
    shuffled order; its windows tile the stream from an offset of its own in [0, block_size), so
    that later epochs see other cuts.
    """

    def __init__(self, tokens: int, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.open_epoch(0, first=0)

    def open_epoch(self, epoch: int, first: int) -> None:
        self.epoch, self.first, self.shuffled = epoch, first, None
        self.random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        self.offset = int(self.random.integers(min(self.block_size, self.tokens - self.block_size)))
        self.windows = (
            self.tokens - 1 - self.offset
        ) // self.block_size  # a window's last target lies one beyond it

    def start(self, n: int) -> int:
        """Position in the stream of the n-th sequence, counted from 0 over all epochs."""
        if n < self.first:
            self.open_epoch(0, first=0)
        while n >= self.first + self.windows:
            self.open_epoch(self.epoch + 1, self.first + self.windows)
        if self.shuffled is None:
            self.shuffled = self.random.permutation(np.arange(self.windows, dtype=np.int32))
        return self.offset + int(self.shuffled[n - self.first]) * self.block_size


class ShuffledWindows:
    """The windows of a split on the disk, in WindowOrder's order."""

    def __init__(self, tokens: TokenStream, config: Config):
        self.tokens, self.block_size, self.seed = tokens, config.block_size, config.seed
        self.order = self.new_order()

    def new_order(self) -> WindowOrder:
        return WindowOrder(len(self.tokens), self.block_size, self.seed)

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64. Raises
        RunError.
        """
        return self.tokens.read_windows(
            [self.order.start(n) for n in range(first, first + count)], self.block_size + 1
        )

    def locate(self, n: int) -> str:
        """Where the n-th sequence stands, for messages."""
        number, offset = self.tokens.locate(
            self.new_order().start(n)
        )  # the reading thread uses the other order
        return f"{self.tokens.shards[number].path} at token {offset:,}"

    def close(self) -> None:
        pass


class TrainBatches:
    """
    Endless iterator over micro-batches: inputs and targets, each (B, T) int64 on the device. Read
    ahead by a thread.

    With several processes, process `rank` of `world_size` takes each world_size-th micro-batch.
    `consumed` is the number of sequences that all processes together have used up before the first
    batch.
    """

    def __init__(
        self,
        data: Dataset,
        config: Config,
        device: torch.device,
        consumed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.windows = data.stream or ShuffledWindows(data.train, config)
        self.device, self.batch_size, self.stride = (
            device,
            config.batch_size,
            world_size * config.batch_size,
        )
        self.loaded: queue.SimpleQueue[tuple[Tensor, Tensor] | Exception] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = (
            queue.SimpleQueue()
        )  # one entry for each batch that may be read ahead
        for _ in range(PREFETCHED_BATCHES):
            self.room.put(None)
        self.next_batch: tuple[Tensor, Tensor] | Exception | None = (
            None  # taken out of `loaded` by ready()
        )
        self.closed = False
        # A daemon, so that a source that no longer answers cannot keep the process from ending
        self.reader = threading.Thread(
            target=self.read_ahead, args=(consumed + rank * config.batch_size,), daemon=True
        )
        self.reader.start()
        atexit.register(
            self.close
        )  # a thread that still reads while Python shuts down can abort the process

    def read_ahead(self, first: int) -> None:
        try:
            while True:
                self.room.get()
                if self.closed:
                    return
                self.loaded.put(self.load(first))
                first += self.stride
        except Exception as error:  # for the thread that waits for the batch
            self.loaded.put(error)

    def load(self, first: int) -> tuple[Tensor, Tensor]:
        """The micro-batch of sequences from `first` on, on the host."""
        batch = split_block(torch.from_numpy(self.windows.read(first, self.batch_size)))
        return tuple(half.pin_memory() for half in batch) if self.device.type == "cuda" else batch

    def ready(self) -> bool:
        """Whether the next batch is there, after waiting a moment for it."""
        with contextlib.suppress(queue.Empty):
            if self.next_batch is None:
                self.next_batch = self.loaded.get(timeout=MOMENT)
        return self.next_batch is not None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        while not self.ready():
            pass
        batch, self.next_batch = self.next_batch, None
        self.room.put(None)
        if isinstance(batch, Exception):
            raise batch
        return move(batch, self.device)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.closed = True
        self.room.put(None)  # the reader may be waiting for it
        self.reader.join(timeout=1)  # longer only where no data comes
        self.windows.close()


def split_block(block: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T + 1) tokens -> inputs (B, T) and targets (B, T), shifted by one."""
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def move(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


def eval_batches(
    stream: TokenStream | HeldTokens,
    tokens: int,
    config: Config,
    device: torch.device,
    spread: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """
    The fixed windows that an evaluation reads, as (inputs, targets, number of tokens): the first
    `tokens` of the stream in order, or with `spread` as many windows evenly over the whole of it.
    The same tokens at any batch size and number of processes: the last batches are filled up with
    targets of -1, which count for nothing.
    """
    T = config.block_size
    available = (len(stream) - 1) // T
    count = min(max(tokens // T, 1), available)
    starts = (
        [n * available // count * T for n in range(count)]
        if spread
        else [n * T for n in range(count)]
    )
    for first in range(0, count, config.batch_size * world_size):
        first += rank * config.batch_size
        rows = starts[first : first + config.batch_size]
        block = stream.read_windows(rows + starts[:1] * (config.batch_size - len(rows)), T + 1)
        x, y = split_block(torch.from_numpy(block))
        y[len(rows) :] = -1
        yield *move((x, y), device), len(rows) * T
