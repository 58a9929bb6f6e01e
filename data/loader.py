"""
From tokens to the model: the order of the windows, and micro-batches on the device.

    documents -> tokens -> shards -> windows -> micro-batches

    documents      sources.py    rows of parquet and jsonl files, and text files
    tokens         writer.py     with tokenizer.py, an end-of-text before each document
    shards         writer.py     files of tokens and a manifest, read by shards.py
    windows        loader.py     block_size + 1 tokens each, in the order of ShuffledWindows
    micro-batches  loader.py     batch_size windows, on the device

With --stream=True, training begins while the shards are still being made: stream.py.

The order of the windows is a pure function of (seed, number of sequences consumed). So that number
is all a resumed run needs, and batch size, accumulation and the number of processes only cut the
same sequence of windows differently.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.console import RunError
from configurator import Config
from data.shards import Dataset, ShardTokens

READ_AHEAD = 4  # micro-batches, in addition to those of the next iteration
POLL_SECONDS = 0.2  # how often a wait for data looks at signals

Batch = tuple[Tensor, Tensor]  # inputs and targets


class ShuffledWindows:
    """
    The training sequences of a split on the disk. An epoch is every window of the split once, in a
    shuffled order. The windows tile the split from an offset in [0, block_size) that differs per
    epoch, so that later epochs cut the text at other places.
    """

    def __init__(self, tokens: ShardTokens, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.open_epoch(0, first=0)

    def open_epoch(self, epoch: int, first: int) -> None:
        self.epoch, self.first = epoch, first
        self.shuffled: np.ndarray | None = None
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

    def close(self) -> None:
        pass


class Batches:
    """
    The micro-batches of training, in order, as many at once as an iteration takes: inputs and
    targets, each (B, T) int64 on the device. A thread reads them ahead. And those of evaluations.

    With several processes, process `rank` of `world_size` takes every world_size-th micro-batch.
    `consumed` is the number of sequences that all processes together have taken; a resumed run
    starts with the number from its checkpoint.
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
        self.device = device
        self.config = config
        self.batch_size = config.batch_size
        self.rank = rank
        self.world_size = world_size
        self.stride = world_size * config.batch_size  # from one of our batches to the next
        self.consumed = consumed
        self.blocks: deque[Tensor] = deque()  # read, and not taken yet
        self.room = READ_AHEAD  # the most micro-batches that `blocks` may hold
        self.error: Exception | None = None  # what ended the reading, or an evaluation's
        self.waited = 0.0  # seconds, in ready()
        self.closed = False
        self.changed = threading.Condition()
        first = consumed + rank * config.batch_size
        # A daemon, so that a source that no longer answers cannot keep the process from ending
        self.reader = threading.Thread(target=self.read_ahead, args=(first,), daemon=True)
        self.reader.start()
        # A thread that still reads while Python shuts down can abort the process
        atexit.register(self.close)

    def read_ahead(self, first: int) -> None:
        try:
            while not self.closed:
                block = self.load(first)
                first += self.stride
                with self.changed:
                    self.blocks.append(block)
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: self.closed or len(self.blocks) < self.room)
        except Exception as error:  # for the thread that waits for the batch
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def load(self, first: int) -> Tensor:
        """
        The windows of sequences from `first` on, (B, T + 1) on the host. This runs ahead in a
        thread: random changes of the text go into take(), or a resume would draw others.
        """
        block = torch.from_numpy(self.windows.read(first, self.batch_size))
        return block.pin_memory() if self.device.type == "cuda" else block

    def ready(self, count: int) -> bool:
        """
        Wait up to POLL_SECONDS for the next `count` micro-batches. Returns whether they are on the
        host; if reading has failed, `error` says why.
        """
        began = time.perf_counter()
        with self.changed:
            if self.room < count + READ_AHEAD:
                self.room = count + READ_AHEAD
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.blocks) >= count or self.error, POLL_SECONDS)
            self.waited += time.perf_counter() - began
            return len(self.blocks) >= count

    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches. Raises the error that reading them raised."""
        while not self.ready(count):
            if self.error:
                raise self.error
        with self.changed:
            blocks = [self.blocks.popleft() for _ in range(count)]
            self.consumed += count * self.stride
            self.changed.notify_all()
        return [to_batch(block, self.device) for block in blocks]

    def read_eval(self, split: ShardTokens, tokens: int, spread: bool) -> list[Batch] | None:
        """
        This rank's share of eval_batches(), on the host. None if it cannot be read; `error` says
        why.
        """
        host = torch.device("cpu")
        ours = (self.rank, self.world_size)
        try:
            return [*eval_batches(split, tokens, self.config, host, spread, *ours)]
        except RunError as error:
            self.error = error
            return None

    def close(self) -> None:
        atexit.unregister(self.close)
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.windows.close()
        self.reader.join(timeout=1)  # a disk that does not answer would take longer


def to_batch(block: Tensor, device: torch.device) -> Batch:
    """
    (B, T + 1) tokens -> inputs (B, T) and targets (B, T), shifted by one, on the device; also of an
    evaluation. Only on CUDA does the copy not wait: on MPS it could read memory that has been freed
    meanwhile (pytorch #139550).
    """
    block = block.to(device, non_blocking=device.type == "cuda")
    # clones: in a batch of one sequence the two would share their memory
    x, y = block[:, :-1], block[:, 1:]
    x, y = (part.clone(memory_format=torch.contiguous_format) for part in (x, y))
    return x, y


def eval_batches(
    split: ShardTokens,
    tokens: int,
    config: Config,
    device: torch.device,
    spread: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """
    The fixed windows that an evaluation reads: the first `tokens` of the split in order, or with
    `spread` as many windows evenly over the whole of it. The same tokens at any batch size and
    number of processes: the last batches are filled up with targets of -1, which count for nothing.
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
        yield x, y
