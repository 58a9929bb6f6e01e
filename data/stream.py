"""
Training straight from text: parquet or jsonl files, here or on the hub, tokenised on the way by
worker processes.

The stream is the source's documents in their order, an end-of-text token before each, over and
over. Its first whole documents, as many as an evaluation reads, are held out for validation, as
preparation does it. Sequence n is the window of block_size + 1 tokens that begins n * block_size
tokens behind them. So no number of workers, processes or sequences in a batch changes what is
trained on, and a document and a number of tokens are all that a resumed run needs to go on.
"""

import bisect
import glob
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import parent_process, resource_tracker

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from common.console import RunError, UserError
from configurator import Config
from data.shards import Dataset, HeldTokens
from data.sources import (
    BACKOFF_SECONDS,
    Source,
    describe_files,
    files_source,
    hub_files,
    local_files,
)
from data.tokenizer import Tokenizer
from data.writer import encode_rows

TOKENIZER = {"kind": "gpt2"}
ANCHOR_TOKENS = 1_000_000  # a resumed run tokenises up to about so many tokens again
HUB_NAME = r"[\w.-]+/[\w.-]+(:[\w.-]+)?"

killed: list[
    Iterator
] = []  # kept to Python's end: torch, freeing one, would wait for ever for a lock that its workers held

# -----------------------------------------------------------------------------
# What a worker process does


@dataclass(eq=False)
class Pieces(IterableDataset):
    """
    The source from the document (file, row) `first` on, for ever, in pieces of a few hundred
    documents: file, row of the piece's first document, its tokens. Each of several workers takes
    every so-many-th piece, which DataLoader puts in order.
    """

    files: list[str]
    backoff: tuple[float, ...]
    tokenizer: dict
    first: tuple[int, int]
    again_from: tuple[int, int]  # in place of the source's beginning, which is held out

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray] | UserError]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        tqdm.set_lock(
            threading.RLock()
        )  # its own is a semaphore of the system's, which a killed worker would leave behind
        source = files_source(
            self.files, self.backoff, tuple(i == number for i in range(workers)), self.again_from
        )
        try:
            tokenizer = Tokenizer(self.tokenizer)
            for file, row, rows in islice(source(*self.first), number, None, workers):
                documents = [
                    tokens for tokens in encode_rows(rows, tokenizer) if tokens is not None
                ]
                yield file, row, np.concatenate([np.empty(0, dtype="<u2"), *documents])
        except UserError as error:  # DataLoader would make a traceback of it
            yield error


def end_with_parent(worker: int) -> None:
    """
    In a worker: end when the training process does, even if it is killed while this one starts,
    which torch would miss.
    """

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# -----------------------------------------------------------------------------
# The training process's side


class Stream:
    """
    The windows of a source in its order, from where a checkpoint's `position` says on, or from the
    beginning.
    """

    def __init__(
        self, pieces: Pieces, block_size: int, workers: int, identity: dict, position: dict
    ):
        self.dataset, self.block_size, self.workers, self.identity = (
            pieces,
            block_size,
            workers,
            identity,
        )
        self.pieces: Iterator | None = None
        self.begins = position.get("sequence", 0) * block_size - position.get(
            "token", 0
        )  # of the buffer, in the stream
        self.buffer = np.empty(0, dtype="<u2")
        self.anchors = [(self.begins, *pieces.first)]  # where in the stream some documents begin

    def position(self, n: int) -> dict:
        """
        Where the n-th sequence begins, for a checkpoint: so many tokens after the beginning of a
        document.
        """
        begins, file, row = self.anchors[
            bisect.bisect_right(self.anchors, n * self.block_size, key=lambda a: a[0]) - 1
        ]
        return dict(
            self.identity, sequence=n, file=file, row=row, token=n * self.block_size - begins
        )

    def locate(self, n: int) -> str:
        place = self.position(n)
        return f"{self.dataset.files[place['file']]}, {place['token']:,} tokens after the beginning of row {place['row']:,}"

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64, never
        backwards. RunError.
        """
        begin, end = first * self.block_size, (first + count) * self.block_size + 1
        while self.begins + len(self.buffer) < end:
            file, row, tokens = self.next_piece()
            position = self.begins + len(self.buffer)
            if position - self.anchors[-1][0] >= ANCHOR_TOKENS:
                self.anchors.append((position, file, row))
            used = min(max(begin - self.begins, 0), len(self.buffer))
            self.buffer = np.concatenate([self.buffer[used:], tokens.numpy()])
            self.begins += used
        tokens = self.buffer[begin - self.begins : end - self.begins]
        return np.lib.stride_tricks.sliding_window_view(tokens, self.block_size + 1)[
            :: self.block_size
        ].astype(np.int64)

    def next_piece(self) -> tuple[int, int, torch.Tensor]:
        if self.pieces is None:
            self.start()
        try:
            piece = next(self.pieces)
        except RuntimeError:
            for number, worker in enumerate(getattr(self.pieces, "_workers", ())):
                if worker.exitcode:
                    how = (
                        f"was ended by {signal.Signals(-worker.exitcode).name}"
                        if worker.exitcode < 0
                        else "failed"
                    )
                    raise RunError(
                        f"data worker {number} (process {worker.pid}) {how}; --init_from=resume goes on"
                    ) from None
            raise
        if isinstance(piece, UserError):
            raise RunError(
                *(
                    f"{problem}; once that is mended, --init_from=resume goes on"
                    for problem in piece.problems
                )
            )
        return piece

    def start(self) -> None:
        """
        Start the workers, in the thread that reads: torch would let the death of one raise in the
        middle of anything that the main thread does. New processes, since a fork of one with
        running threads can hang.
        """
        if hasattr(
            signal, "pthread_sigmask"
        ):  # Ctrl-C in a terminal reaches them too; they leave it to the main process
            resource_tracker.ensure_running()  # which would unblock it again
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pieces = iter(
            DataLoader(
                self.dataset,
                batch_size=None,
                num_workers=self.workers,
                multiprocessing_context="spawn" if self.workers else None,
                worker_init_fn=end_with_parent,
                # its own: drawing from torch's would change what dropout draws
                generator=torch.Generator(),
            )
        )

    def close(self) -> None:
        if workers := getattr(self.pieces, "_workers", ()):
            killed.append(self.pieces)
        for worker in workers:
            # left to end by itself in the midst of reading ahead, Arrow's threads abort it aloud
            worker.kill()


# -----------------------------------------------------------------------------
# Opening a source


def is_on_hub(name: str) -> bool:
    return bool(re.fullmatch(HUB_NAME, name)) and not glob.glob(name)


def check_source(config: Config) -> list[str]:
    """
    What is wrong with the source for this configuration, as far as it shows without the network
    (for load_config).
    """
    try:
        if not is_on_hub(config.dataset):
            local_files(config.dataset, "--dataset")
    except UserError as error:
        return error.problems
    return []


def open_stream(config: Config, position: dict | None = None) -> Dataset:
    """
    Open the source that config.dataset names (files, a folder, a pattern, or ORG/NAME[:CONFIG] on
    the hub), at a checkpoint's `position` where there is one, and read what evaluations need of it.
    Raises UserError.
    """
    position, name = position or {}, config.dataset
    if is_on_hub(name):
        dataset, _, builder = name.partition(":")
        files, revision = hub_files(dataset, builder or None, position.get("revision"), "--dataset")
        backoff = BACKOFF_SECONDS
    else:
        files, backoff = local_files(name, "--dataset"), ()
        revision = describe_files(files)
    tokenizer = Tokenizer(TOKENIZER)
    held_out = position.get("held_out") or max(config.eval_size, config.block_size + 1)
    val, train, begin = read_first(files_source(files, backoff), tokenizer, held_out)
    if len(train) <= config.block_size:
        smaller = (
            f"try --eval_tokens={max((len(val) + len(train)) // 20, 1)}"
            if len(val)
            else "choose another --dataset"
        )
        raise UserError(
            f"dataset: {name} holds {len(val):,} tokens for validation and {len(train):,} for training, which "
            f"needs more than block_size {config.block_size}; {smaller}"
        )
    identity = dict(revision=revision, held_out=held_out)
    what = json.dumps([identity, TOKENIZER, [os.path.basename(file) for file in files]])
    fingerprint = hashlib.sha256(what.encode() + val.tobytes()).hexdigest()
    first = (position["file"], position["row"]) if position else begin
    pieces = Pieces(files, backoff, TOKENIZER, first, begin)
    stream = Stream(pieces, config.block_size, config.data_workers, identity, position)
    return Dataset(
        name, HeldTokens(train), HeldTokens(val), tokenizer.vocab, TOKENIZER, fingerprint, stream
    )


def read_first(
    source: Source, tokenizer: Tokenizer, wanted: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """
    The first whole documents that make up `wanted` tokens, as many tokens of those after them, and
    the file and row where these begin.
    """
    val, train, begin = [], [], (0, 0)
    held_out = ahead = 0
    for file, first, rows in source(0, 0):
        for row, tokens in enumerate(encode_rows(rows, tokenizer), first):
            if tokens is None:
                continue
            if held_out < wanted:
                val.append(tokens)
                held_out += len(tokens)
                continue
            begin = begin if train else (file, row)
            train.append(tokens)
            ahead += len(tokens)
        if ahead >= wanted:
            break
    empty = np.empty(0, dtype="<u2")
    return np.concatenate([empty, *val]), np.concatenate([empty, *train])[:wanted], begin
