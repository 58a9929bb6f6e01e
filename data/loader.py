"""
From tokens to the model: the order of the windows, and micro-batches on the device.

    documents -> tokens -> shards -> windows -> micro-batches

    documents      sources.py    rows of parquet and jsonl files; prepare_text.py: text files
    tokens         writer.py     with tokenizer.py, an end-of-text before each document
    shards         writer.py     files of tokens and a manifest, read by shards.py
    windows        loader.py     block_size + 1 tokens each, in the order of ShuffledWindows
    micro-batches  loader.py     batch_size windows, on the device

With --stream=True, stream.py goes from documents to windows while training, without shards.

The order of the windows is a pure function of (seed, number of sequences consumed). So that number
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
from data.shards import Dataset, HeldTokens, ShardTokens

PREFETCHED_BATCHES = 4
MOMENT = 0.2  # seconds that a wait for data lasts before signals are looked at again

Batch = tuple[Tensor, Tensor]  # inputs and targets


class ShuffledWindows:
    """
    The training sequences of a split on the disk. An epoch is every window of the split once, in a
    shuffled order; its windows tile the split from an offset of its own in [0, block_size), so that
    later epochs see other cuts.
    """

    def __init__(self, tokens: ShardTokens, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.open_epoch(0, first=0)

    def open_epoch(self, epoch: int, first: int) -> None:
        self.epoch, self.first, self.shuffled = epoch, first, None
        self.random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        size = len(self.tokens)
        self.offset = int(self.random.integers(min(self.block_size, size - self.block_size)))
        # - 1: the last target of a window lies one token beyond it
        self.windows = (size - 1 - self.offset) // self.block_size

    def start(self, n: int) -> int:
        """Position in the split of the n-th sequence, counted from 0 over all epochs."""
        if n < self.first:
            self.open_epoch(0, first=0)
        while n >= self.first + self.windows:
            self.open_epoch(self.epoch + 1, self.first + self.windows)
        if self.shuffled is None:
            self.shuffled = self.random.permutation(np.arange(self.windows, dtype=np.int32))
        return self.offset + int(self.shuffled[n - self.first]) * self.block_size

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64. Raises
        RunError.
        """
        starts = [self.start(n) for n in range(first, first + count)]
        return self.tokens.read_windows(starts, self.block_size + 1)

    def locate(self, n: int) -> str:
        """Where the n-th sequence stands, for messages."""
        # others, because the reading thread is at an epoch of its own
        others = ShuffledWindows(self.tokens, self.block_size, self.seed)
        number, offset = self.tokens.locate(others.start(n))
        return f"{self.tokens.shards[number].path} at token {offset:,}"

    def close(self) -> None:
        pass


class TrainBatches:
    """
    Endless iterator over micro-batches: inputs and targets, each (B, T) int64 on the device. Read
    ahead by a thread.

    With several processes, process `rank` of `world_size` takes every world_size-th micro-batch.
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
        self.windows = data.stream or ShuffledWindows(data.train, config.block_size, config.seed)
        self.device, self.batch_size = device, config.batch_size
        self.stride = world_size * config.batch_size  # from one of our batches to the next
        self.loaded: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()
        # How many more blocks may be read ahead
        self.room = threading.Semaphore(PREFETCHED_BATCHES)
        self.arrived: Tensor | Exception | None = None  # taken out of `loaded` by wait()
        self.closed = False
        first = consumed + rank * config.batch_size
        # A daemon, so that a source that no longer answers cannot keep the process from ending
        self.reader = threading.Thread(target=self.read_ahead, args=(first,), daemon=True)
        self.reader.start()
        # A thread that still reads while Python shuts down can abort the process
        atexit.register(self.close)

    def read_ahead(self, first: int) -> None:
        try:
            while True:
                self.room.acquire()
                if self.closed:
                    return
                self.loaded.put(self.load(first))
                first += self.stride
        except Exception as error:  # for the thread that waits for the batch
            self.loaded.put(error)

    def load(self, first: int) -> Tensor:
        """The windows of sequences from `first` on, (B, T + 1) on the host."""
        block = torch.from_numpy(self.windows.read(first, self.batch_size))
        return block.pin_memory() if self.device.type == "cuda" else block

    def wait(self) -> bool:
        """Wait for the next micro-batch, but no more than a moment. Whether it has come."""
        if self.arrived is None:
            with contextlib.suppress(queue.Empty):
                self.arrived = self.loaded.get(timeout=MOMENT)
        return self.arrived is not None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch. Raises what reading it raised."""
        while not self.wait():
            pass
        block, self.arrived = self.arrived, None
        self.room.release()
        if isinstance(block, Exception):
            raise block
        return to_batch(block, self.device)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.closed = True
        self.room.release()  # the reader may be waiting for it
        self.reader.join(timeout=1)  # longer only where no data comes
        self.windows.close()


def to_batch(block: Tensor, device: torch.device) -> Batch:
    """
    (B, T + 1) tokens -> inputs (B, T) and targets (B, T), shifted by one, on the device. Only on
    CUDA does the copy not wait: on MPS it could read memory that has been freed meanwhile (pytorch
    #139550).
    """
    block = block.to(device, non_blocking=device.type == "cuda")
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def eval_batches(
    split: ShardTokens | HeldTokens,
    tokens: int,
    config: Config,
    device: torch.device,
    spread: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """
    The fixed windows that an evaluation reads, as (inputs, targets, number of tokens): the first
    `tokens` of the split in order, or with `spread` as many windows evenly over the whole of it.
    The same tokens at any batch size and number of processes: the last batches are filled up with
    targets of -1, which count for nothing.
    """
    T = config.block_size
    available = (len(split) - 1) // T
    count = min(max(tokens // T, 1), available)
    room = available if spread else count
    starts = [n * room // count * T for n in range(count)]
    for first in range(0, count, config.batch_size * world_size):
        first += rank * config.batch_size
        rows = starts[first : first + config.batch_size]
        filling = [starts[0]] * (config.batch_size - len(rows))
        x, y = to_batch(torch.from_numpy(split.read_windows(rows + filling, T + 1)), device)
        y[len(rows) :] = -1
        yield x, y, len(rows) * T
