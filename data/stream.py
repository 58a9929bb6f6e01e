"""
Training straight from text: parquet or jsonl files, here or on the hub, tokenised on the way by
worker processes.

The stream is the documents of the source in their order, an end-of-text token before each, over and
over. Its first whole documents, as many as an evaluation reads, are held out for validation, as
preparation does it. Sequence n is the window of block_size + 1 tokens that begins n * block_size
tokens behind them. So the number of workers, processes or sequences in a batch does not change what
is trained on. A document and a number of tokens are all that a resumed run needs.

    open_stream    finds the files, reads what evaluations need
    Pieces         in each worker: text -> tokens, every n-th piece of the source
    Workers        starts them, takes their pieces in order, ends them
    Stream         pieces -> windows, and the position for a checkpoint
"""

import bisect
import glob
import hashlib
import json
import os
import re
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, parent_process, resource_tracker

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.console import RunError, UserError
from configurator import Config
from data import sources
from data.shards import Dataset, HeldTokens
from data.tokenizer import Tokenizer, encode_rows, named_spec

ANCHOR_TOKENS = 1_000_000  # a resumed run tokenises at most about so many tokens again
HUB_NAME = r"[\w.-]+/[\w.-]+(:[\w.-]+)?"
CONTINUE = "--init_from=resume continues the run"
NO_TOKENS = np.empty(0, dtype="<u2")

# -----------------------------------------------------------------------------
# In a worker process


@dataclass(eq=False)
class Pieces(IterableDataset):
    """
    The source from the document `first` on, for ever, in pieces of a few hundred documents: file,
    row of the piece's first document, and the tokens of them all, uint16. Each of n workers makes
    every n-th piece; DataLoader takes one from each in turn, which restores their order.
    """

    files: list[str]
    backoff: tuple[float, ...]
    tokenizer: dict
    first: tuple[int, int]  # file, row
    again_from: tuple[int, int]  # what comes after the last document: the first not held out

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray] | UserError]:
        worker = get_worker_info()
        turn = (worker.id, worker.num_workers) if worker else (0, 1)
        source = sources.files_source(self.files, self.backoff, turn, self.again_from)
        try:
            tokenizer = Tokenizer(self.tokenizer)
            for file, first, rows in source(*self.first):
                documents = [tokens for _, tokens, _ in encode_rows(first, rows, tokenizer)]
                yield file, first, np.concatenate([NO_TOKENS, *documents])
        except UserError as error:  # raised here, DataLoader would add the worker's traceback
            yield error


def set_up_worker(number: int) -> None:
    """
    Called in each worker as it starts. The worker ends when its parent does, even if that is killed
    at this moment, which torch's own check would miss.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


# -----------------------------------------------------------------------------
# In the training process


class Workers:
    """
    The worker processes, as an iterator over their pieces in order. With a count of 0 the thread
    that asks for a piece makes it.

    A run that ends, in whatever way, kills them: a worker that ends by itself while Arrow's threads
    read ahead is aborted by them with a message on stderr.
    """

    def __init__(self, pieces: Pieces, count: int):
        self.pieces, self.count = pieces, count
        self.iterator: Iterator | None = None  # the workers start with the first piece
        self.processes = []

    def next_piece(self) -> tuple[int, int, np.ndarray]:
        """File, row, tokens. Raises RunError where the source fails or a worker has died."""
        if self.iterator is None:
            self.start()
        try:
            piece = next(self.iterator)
        # RuntimeError: DataLoader has found a worker dead. The others: it died while it was sending
        except (RuntimeError, OSError, EOFError) as error:
            raise RunError(f"a data worker failed ({error}); {CONTINUE}") from error
        if isinstance(piece, UserError):
            raise RunError(*(f"{line}; once that is mended, {CONTINUE}" for line in piece.problems))
        file, row, tokens = piece
        return file, row, tokens.numpy()

    def start(self) -> None:
        """
        Start the workers, from the thread that reads: DataLoader raises in the thread that started
        it when a worker dies, and the main thread may be in the middle of anything.
        """
        if self.count and hasattr(signal, "pthread_sigmask"):  # Windows has none
            # Ctrl-C in a terminal goes to all processes there, as SLURM's warning does. What this
            # thread starts from here on ignores both: the training process saves a checkpoint
            # first, and then kills the workers.
            resource_tracker.ensure_running()  # started later, it would undo the next line
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
        loader = DataLoader(
            self.pieces,
            batch_size=None,
            num_workers=self.count,
            # a fork of a process with running threads can hang
            multiprocessing_context="spawn" if self.count else None,
            worker_init_fn=set_up_worker,
            # A generator of its own: drawing from torch's would change what dropout draws
            generator=torch.Generator(),
        )
        self.iterator = iter(loader)
        if self.count:
            self.processes = active_children()  # a training process has no others

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


class Stream:
    """
    The windows of a source in its order, from a checkpoint's `position` on, or from the beginning.
    `identity` is what the position must say besides: the source's revision, and how many tokens
    are held out.
    """

    def __init__(self, workers: Workers, block_size: int, identity: dict, position: dict):
        self.workers, self.block_size, self.identity = workers, block_size, identity
        sequence, token = position.get("sequence", 0), position.get("token", 0)
        self.buffer = NO_TOKENS
        self.begins = sequence * block_size - token  # number of the buffer's first token
        # Where in the stream some documents begin: (token number, file, row), in order
        self.anchors = [(self.begins, *workers.pieces.first)]
        self.next_piece = workers.next_piece
        self.tokens_of_later_ranks = 0

    def join_ranks(self, from_main: Callable, rank: int, world_size: int, batch_size: int) -> None:
        """
        Be one of several processes that read the same stream. Rank 0's workers tokenise, and
        from_main(function) gives all what the function returns there, or raises.

        Process `rank` reads every world_size-th batch. All read as far as the last of them needs,
        so that what fails, fails for all of them in the same micro-step.
        """
        self.next_piece = partial(from_main, self.workers.next_piece)
        self.tokens_of_later_ranks = (world_size - 1 - rank) * batch_size * self.block_size

    def position(self, n: int) -> dict:
        """Where sequence n begins, for a checkpoint: tokens after a document's beginning."""
        begins_at = n * self.block_size
        number = bisect.bisect_right(self.anchors, begins_at, key=lambda anchor: anchor[0]) - 1
        begins, file, row = self.anchors[number]
        return dict(self.identity, sequence=n, file=file, row=row, token=begins_at - begins)

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64; never
        earlier ones than before. Raises RunError.
        """
        begin, end = first * self.block_size, (first + count) * self.block_size + 1
        while self.begins + len(self.buffer) < end + self.tokens_of_later_ranks:
            file, row, tokens = self.next_piece()
            position = self.begins + len(self.buffer)
            if position - self.anchors[-1][0] >= ANCHOR_TOKENS:
                self.anchors.append((position, file, row))
            used = min(max(begin - self.begins, 0), len(self.buffer))
            self.buffer = np.concatenate([self.buffer[used:], tokens])
            self.begins += used
        tokens = self.buffer[begin - self.begins : end - self.begins]
        every = np.lib.stride_tricks.sliding_window_view(tokens, self.block_size + 1)
        return every[:: self.block_size].astype(np.int64)

    def close(self) -> None:
        self.workers.kill()


# -----------------------------------------------------------------------------
# Opening a source


def open_stream(config: Config, position: dict | None = None) -> Dataset:
    """
    Open the source that config.dataset names (files, a folder, a pattern, or ORG/NAME[:CONFIG] on
    the hub), at a checkpoint's `position` where there is one, and read what evaluations need of it.
    Raises UserError.
    """
    position, name = position or {}, config.dataset
    if re.fullmatch(HUB_NAME, name) and not glob.glob(name):
        dataset, _, builder = name.partition(":")
        begun = position.get("revision")
        files, revision = sources.hub_files(dataset, builder or None, begun, flag="--dataset")
        backoff = sources.BACKOFF_SECONDS
    else:
        files = sources.local_files([name], sources.ROW_FILES, flag="--dataset=")
        backoff, revision = (), sources.describe_files(files)
    tokenizer = Tokenizer(named_spec(config.tokenizer), config.tokenizer)
    held_out = position.get("held_out") or max(config.eval_size, config.block_size + 1)
    source = sources.files_source(files, backoff)
    val, train, begin, val_bytes = read_first(source, tokenizer, held_out)
    if len(train) <= config.block_size:
        held = f"{len(val):,} tokens for validation and {len(train):,} for training"
        mend = "choose a larger --dataset, or smaller --eval_tokens and --block_size"
        raise UserError(f"dataset: {name} holds {held}; {mend}")

    identity = dict(revision=revision, held_out=held_out)
    described = json.dumps([identity, tokenizer.spec, [os.path.basename(file) for file in files]])
    fingerprint = hashlib.sha256(described.encode() + val.tobytes()).hexdigest()
    first = (position["file"], position["row"]) if position else begin
    workers = Workers(Pieces(files, backoff, tokenizer.spec, first, begin), config.data_workers)
    stream = Stream(workers, config.block_size, identity, position)
    held, size = (HeldTokens(train), HeldTokens(val)), val_bytes / len(val)
    return Dataset(name, *held, tokenizer.vocab, tokenizer.spec, fingerprint, stream, size)


def read_first(
    source: sources.Source, tokenizer: Tokenizer, wanted: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int], int]:
    """
    The first whole documents that hold `wanted` tokens, the next `wanted` tokens, the file and row
    where these begin, and the bytes of the former's text. Fewer where the source ends.
    """
    val, train, begin, val_bytes = array("H"), array("H"), (0, 0), 0
    for file, first, rows in source(0, 0):
        for row, tokens, size in encode_rows(first, rows, tokenizer):
            if len(val) < wanted:
                val.frombytes(tokens.tobytes())
                val_bytes += size
            else:
                if not train:
                    begin = (file, row)
                train.frombytes(tokens.tobytes())
        if len(train) >= wanted:
            break
    return np.array(val), np.array(train[:wanted]), begin, val_bytes
