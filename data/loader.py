"""
Feed the model: decide the order of the training windows, and load micro-batches onto the device.

    documents -> tokens -> shards -> windows -> micro-batches

    documents      text.py       rows of parquet and jsonl files, and text files
    tokens         writer.py     encoded by tokenizer.py, with end-of-text before each document
    shards         writer.py     token files and a manifest, read by shards.py
    windows        loader.py     block_size + 1 tokens each, in the order of ShuffledWindows
    micro-batches  loader.py     batch_size windows, on the device

The window order is a pure function of (seed, number of tokens trained on). That number is all a
resumed run needs, and changing the batch size, gradient accumulation or the number of ranks only
splits the same sequence of windows differently.
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from common.console import UserError
from common.files import retrying
from configurator import Config
from data.shards import Dataset, ShardTokens

READ_AHEAD = 4  # micro-batches to read beyond the next iteration's
POLL_SECONDS = 0.2  # how often to look for data, or for signals while waiting for data

Batch = tuple[Tensor, Tensor]  # inputs and targets


class ShuffledWindows:
    """
    Read the training windows of a split in shuffled order. An epoch visits every window once. The
    windows tile the split from an offset in [0, block_size) that changes with each epoch, so later
    epochs cut the text in different places.
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
        # subtract 1, because a window's last target is the token after the window
        self.windows = (size - 1 - self.offset) // self.block_size

    def start(self, n: int) -> int:
        """Return where sequence n begins in the split. n counts from 0, over all epochs."""
        if n < self.first:
            self.open_epoch(0, first=0)
        while n >= self.first + self.windows:
            self.open_epoch(self.epoch + 1, self.first + self.windows)
        if self.shuffled is None:
            self.shuffled = self.random.permutation(np.arange(self.windows, dtype=np.int32))
        return self.offset + int(self.shuffled[n - self.first]) * self.block_size

    def read(self, first: int, count: int) -> np.ndarray:
        """
        Return the windows of sequences `first` to first + count - 1 as (count, block_size + 1)
        int64. Raises OSError and UserError if a shard cannot be read.
        """
        starts = [self.start(n) for n in range(first, first + count)]
        return self.tokens.read_windows(starts, self.block_size + 1)


class Batches:
    """
    Hand out this rank's training micro-batches in order, an iteration's worth at a time, and read
    its evaluation micro-batches. A micro-batch is inputs and targets, each (B, T) int64 on the
    device. A background thread reads ahead.

    With several ranks, rank `rank` of `world_size` takes every world_size-th micro-batch. `trained`
    counts the tokens that all ranks together have taken before; a resumed run passes the count from
    its checkpoint.
    """

    def __init__(
        self,
        data: Dataset,
        config: Config,
        device: torch.device,
        trained: int,
        rank: int,
        world_size: int,
    ):
        self.windows = ShuffledWindows(data.train, config.block_size, config.seed)
        self.device = device
        self.config = config
        self.batch_size = config.batch_size
        self.rank = rank
        self.world_size = world_size
        self.stride = world_size * config.batch_size  # sequences from one micro-batch to our next
        self.waiting: deque[Tensor] = deque()  # micro-batches read but not taken yet
        self.room = READ_AHEAD  # the most micro-batches that may wait
        self.error: Exception | None = None  # why the reader thread or an evaluation failed
        self.closed = False
        self.changed = threading.Condition()
        first = trained // config.block_size + rank * config.batch_size
        # a daemon thread, so that a hung disk cannot keep the process from exiting
        self.reader = threading.Thread(target=self.read_ahead, args=(first,), daemon=True)
        self.reader.start()
        # A thread that is still reading while Python shuts down can abort the process.
        atexit.register(self.close)

    def read_ahead(self, first: int) -> None:
        try:
            while not self.closed:
                windows = retrying(self.pause, self.load, first)
                first += self.stride
                with self.changed:
                    self.waiting.append(windows)
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: self.closed or len(self.waiting) < self.room)
        except Exception as error:  # train.py asks for it while it waits for data
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`. Returns True at once if this object is closed."""
        with self.changed:
            return self.changed.wait_for(lambda: self.closed, seconds)

    def load(self, first: int) -> Tensor:
        """
        Load the windows of batch_size sequences, starting at sequence `first`, as (B, T + 1) on the
        host. Put random augmentation of the text into take(), not here: this runs ahead of training
        in a thread, so a resumed run would draw different random numbers.
        """
        windows = torch.from_numpy(self.windows.read(first, self.batch_size))
        return windows.pin_memory() if self.device.type == "cuda" else windows

    def ready(self, count: int) -> bool:
        """
        Wait up to POLL_SECONDS for the next `count` micro-batches. Returns True once they are in
        host memory. If it keeps returning False, check `error`: reading may have failed.
        """
        with self.changed:
            if self.room < count + READ_AHEAD:
                self.room = count + READ_AHEAD
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.waiting) >= count or self.error, POLL_SECONDS)
            return len(self.waiting) >= count

    def take(self, count: int) -> list[Batch]:
        """Return the next `count` micro-batches, for which ready() has returned True."""
        with self.changed:
            taken = [self.waiting.popleft() for _ in range(count)]
            self.changed.notify_all()
        return [to_batch(windows, self.device) for windows in taken]

    def read_eval(
        self, split: ShardTokens, tokens: int, spread: bool, wait: Callable[[float], bool]
    ) -> list[Batch] | None:
        """
        Read this rank's share of eval_batches() into host memory. Returns None if that fails, with
        the reason in `error`. wait(seconds) returns True if the run must stop, as for retrying().
        """
        arguments = (split, tokens, self.config, spread, self.rank, self.world_size)
        try:
            return retrying(wait, lambda: [*eval_batches(*arguments)])
        except (UserError, OSError) as error:
            self.error = error
            return None

    def close(self) -> None:
        atexit.unregister(self.close)
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.reader.join(timeout=1)  # do not wait for a hung disk


def to_batch(windows: Tensor, device: torch.device) -> Batch:
    """
    Split windows (B, T + 1) into inputs (B, T) and targets (B, T), shifted by one, on the device.
    The copy is asynchronous on CUDA only: on MPS it could read host memory that has already been
    freed (pytorch #139550).
    """
    windows = windows.to(device, non_blocking=device.type == "cuda")
    # Clone, because in a batch of one sequence inputs and targets would share memory.
    x, y = windows[:, :-1], windows[:, 1:]
    x, y = (part.clone(memory_format=torch.contiguous_format) for part in (x, y))
    return x, y


def eval_batches(
    split: ShardTokens,
    tokens: int,
    config: Config,
    spread: bool,
    rank: int,
    world_size: int,
) -> Iterator[Batch]:
    """
    Yield this rank's share of the fixed windows that an evaluation reads: the first `tokens` tokens
    of the split, or with `spread` as many windows spaced evenly over the whole split. Batch size
    and number of ranks do not change which tokens are evaluated. The last batches are padded with
    rows whose targets are -1, which the loss ignores. All batches stay on the host.
    """
    host = torch.device("cpu")
    T = config.block_size
    available = (len(split) - 1) // T
    count = min(max(tokens // T, 1), available)
    room = available if spread else count
    starts = [n * room // count * T for n in range(count)]
    for first in range(0, count, config.batch_size * world_size):
        first += rank * config.batch_size
        rows = starts[first : first + config.batch_size]
        filling = [starts[0]] * (config.batch_size - len(rows))
        x, y = to_batch(torch.from_numpy(split.read_windows(rows + filling, T + 1)), host)
        y[len(rows) :] = -1
        yield x, y
