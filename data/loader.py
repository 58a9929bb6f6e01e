"""
Feed the model: decide the order of the training windows, and load micro-batches onto the device.

    documents -> tokens -> shards -> windows -> micro-batches

    documents      text.py       rows of parquet and jsonl files, and text files
    tokens         writer.py     encoded by tokenizer.py, with end-of-text before each document
    shards         writer.py     token files and a manifest, read by shards.py
    windows        loader.py     block_size + 1 tokens each, in the order of ShuffledWindows
    micro-batches  loader.py     batch_size windows, on the device

The window order of a split and a block_size is a pure function of the seed, and the place of an
iteration in it follows from its number. That number is all a resumed run needs, and changing the
batch size, gradient accumulation or the number of ranks only splits the same sequence of windows
differently.
"""

import contextlib

import numpy as np
import torch
from torch import Tensor

from common.console import UserError
from common.process import rank, world_size
from configurator import Config
from data.shards import Dataset, ShardTokens

Batch = tuple[Tensor, ...]  # inputs, targets and, if any, the weights of their losses


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
    Read this rank's training micro-batches of an iteration, and hand them out on the device. What
    is handed out is what to_batch() returns. Of n ranks, each takes every n-th micro-batch.
    """

    def __init__(self, data: Dataset, config: Config, device: torch.device):
        self.windows = ShuffledWindows(data.train, config.block_size, config.seed)
        self.device = device
        self.config = config
        self.ahead: dict[int, list[Tensor]] = {}  # an iteration that was read in advance

    def read(self, it: int) -> list[Tensor]:
        """
        Return this rank's windows of iteration `it`, a (B, T + 1) for each micro-batch, in host
        memory. Put random augmentation of the text into take(), not here: this runs ahead of
        training, before the iteration's seed is set. Raises OSError and UserError.
        """
        c, B, ranks = self.config, self.config.batch_size, world_size()
        first, end = (c.tokens_between(0, n) // c.block_size for n in (it, it + 1))  # of all ranks
        starts = [first + (n * ranks + rank()) * B for n in range((end - first) // (ranks * B))]
        blocks = [torch.from_numpy(self.windows.read(start, B)) for start in starts]
        return [block.pin_memory() for block in blocks] if self.device.type == "cuda" else blocks

    def read_ahead(self, it: int) -> None:
        """Read iteration `it` in advance, while the device works. take() raises its errors."""
        self.ahead = {}
        with contextlib.suppress(OSError, UserError):
            self.ahead = {it: self.read(it)}

    def take(self, it: int) -> list[Batch]:
        """Return iteration `it`'s micro-batches. Raises OSError and UserError."""
        blocks = self.ahead.get(it) or self.read(it)
        return [to_batch(windows, self.device) for windows in blocks]


def to_batch(windows: Tensor, device: torch.device) -> Batch:
    """
    Split windows (B, T + 1) int64 into inputs (B, T) and targets (B, T), shifted by one, on the
    device. A third tensor (B, T) would multiply the targets' losses, in training, evaluations and
    the check of compiled code. The copy is asynchronous on CUDA only: on MPS it could read host
    memory that has already been freed (pytorch #139550).
    """
    windows = windows.to(device, non_blocking=device.type == "cuda")
    # Clone, because in a batch of one sequence inputs and targets would share memory.
    x, y = windows[:, :-1], windows[:, 1:]
    x, y = (part.clone(memory_format=torch.contiguous_format) for part in (x, y))
    return x, y


def eval_batches(split: ShardTokens, tokens: int, config: Config) -> list[Batch]:
    """
    Read this rank's share of the fixed windows of an evaluation of `tokens` tokens. The windows are
    spread over the whole split. Batch size and number of ranks do not change which tokens are
    evaluated. The last batches are padded with rows whose targets are -1, which the loss ignores.
    All batches stay on the host. Raises OSError and UserError.
    """
    host, batches = torch.device("cpu"), []
    T = config.block_size
    starts = split.spread(tokens, T)
    for first in range(0, len(starts), config.batch_size * world_size()):
        first += rank() * config.batch_size
        rows = starts[first : first + config.batch_size]
        filling = [starts[0]] * (config.batch_size - len(rows))
        batch = to_batch(torch.from_numpy(split.read_windows(rows + filling, T + 1)), host)
        batch[1][len(rows) :] = -1
        batches.append(batch)
    return batches
