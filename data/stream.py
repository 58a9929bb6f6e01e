"""
Training straight from text: parquet or jsonl files, here or on the hub, tokenised on the way by
worker processes.

The stream is the documents of the source in their order, an end-of-text token before each, over and
over. Its first whole documents, as many as an evaluation reads, are held out for validation, as
preparation does it. Sequence n is the window of block_size + 1 tokens that begins n * block_size
tokens behind them. So the number of workers, processes or sequences in a batch does not change what
is trained on. A document and a number of tokens are all that a resumed run needs to go on.

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
from multiprocessing import parent_process, resource_tracker
from operator import call

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.console import RunError, UserError
from configurator import Config
from data import sources
from data.shards import Dataset, HeldTokens
from data.tokenizer import Tokenizer, named_spec
from data.writer import PLACE, encode_rows, has_fields

ANCHOR_TOKENS = 1_000_000  # a resumed run tokenises up to about so many tokens again
HUB_NAME = r"[\w.-]+/[\w.-]+(:[\w.-]+)?"
GO_ON = "--init_from=resume goes on"
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
        share = (worker.id, worker.num_workers) if worker else (0, 1)
        source = sources.files_source(self.files, self.backoff, share, self.again_from)
        try:
            tokenizer = Tokenizer(self.tokenizer)
            for file, first, rows in source(*self.first):
                documents = [tokens for _, tokens, _ in encode_rows(first, rows, tokenizer)]
                yield file, first, np.concatenate([NO_TOKENS, *documents])
        except UserError as error:  # DataLoader would make a traceback of it
            yield error


def set_up_worker(number: int) -> None:
    """Called in each worker, after it has started."""
    from tqdm import tqdm

    # The lock of tqdm's own is a semaphore of the system's, which a killed worker leaves behind
    tqdm.set_lock(threading.RLock())
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

    How workers end, and why so:

    1. They are killed, when the run ends, in whatever way. A worker that ends by itself while
       Arrow's threads read ahead is aborted by them with a message on stderr, and one that has been
       stopped (SIGSTOP) would not end at all.
    2. The iterator of a DataLoader whose workers were killed is never freed. Freeing it, torch
       takes a lock that the workers share, and waits for ever if one was killed while it held that.
    3. They end when the training process does, even if that is killed while they start. torch's own
       check misses the latter, so a thread in each worker waits for the parent's end.

    Ctrl-C in a terminal is a signal to all processes there. The workers ignore it: the training
    process saves a checkpoint first, and then kills them.
    """

    never_freed: list[Iterator] = []  # see 2.; shared by all objects, lives until Python ends

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
        # how DataLoader tells of a dead worker; one killed while it sends ends the connection
        except (RuntimeError, OSError, EOFError) as error:
            self.raise_if_dead()
            raise RunError(f"a data worker failed ({error}); {GO_ON}") from error
        if isinstance(piece, UserError):
            raise RunError(*(f"{line}; once that is mended, {GO_ON}" for line in piece.problems))
        file, row, tokens = piece
        return file, row, tokens.numpy()

    def start(self) -> None:
        """
        Start the workers, from the thread that reads: DataLoader raises in the thread that started
        it when a worker dies, and the main thread may be in the middle of anything. By spawn: a
        fork of a process with running threads can hang.
        """
        if self.count:
            block_ctrl_c()
        loader = DataLoader(
            self.pieces,
            batch_size=None,
            num_workers=self.count,
            multiprocessing_context="spawn" if self.count else None,
            worker_init_fn=set_up_worker,
            # A generator of its own: drawing from torch's would change what dropout draws
            generator=torch.Generator(),
        )
        self.iterator = iter(loader)
        if self.count:
            self.processes = self.iterator._workers

    def raise_if_dead(self) -> None:
        for number, process in enumerate(self.processes):
            process.join(1)  # its end may come a moment after the news of it
            if process.exitcode:
                how = "failed"
                if process.exitcode < 0:
                    how = f"was ended by {signal.Signals(-process.exitcode).name}"
                raise RunError(f"data worker {number} (process {process.pid}) {how}; {GO_ON}")

    def kill(self) -> None:
        if self.processes:
            self.never_freed.append(self.iterator)
        for process in self.processes:
            process.kill()


def block_ctrl_c() -> None:
    """Block SIGINT in this thread, and so in the processes that it starts from now on."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        resource_tracker.ensure_running()  # started later, with a worker, it would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


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
        self.begins = sequence * block_size - token  # where in the stream the buffer does
        # Where in the stream some documents begin: (token number, file, row), in order
        self.anchors = [(self.begins, *workers.pieces.first)]
        self.from_first, self.tokens_of_later_ranks = call, 0

    def share(self, from_first: Callable, rank: int, world_size: int, batch_size: int) -> None:
        """
        Be one of several processes that read the same stream. The first one's workers tokenise,
        and from_first(function) gives all what the function returns there, or raises.

        Process `rank` reads every world_size-th batch. All read as far as the last of them needs,
        so that what fails, fails for all of them in the same micro-step.
        """
        self.from_first = from_first
        self.tokens_of_later_ranks = (world_size - 1 - rank) * batch_size * self.block_size

    def position(self, n: int) -> dict:
        """Where sequence n begins, for a checkpoint: tokens after a document's beginning."""
        begins_at = n * self.block_size
        number = bisect.bisect_right(self.anchors, begins_at, key=lambda anchor: anchor[0]) - 1
        begins, file, row = self.anchors[number]
        return dict(self.identity, sequence=n, file=file, row=row, token=begins_at - begins)

    def locate(self, n: int) -> str:
        """Where the n-th sequence stands, for messages."""
        place = self.position(n)
        name = self.workers.pieces.files[place["file"]]
        return f"{name}, {place['token']:,} tokens after the beginning of row {place['row']:,}"

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64; never
        earlier ones than before. Raises RunError.
        """
        begin, end = first * self.block_size, (first + count) * self.block_size + 1
        while self.begins + len(self.buffer) < end + self.tokens_of_later_ranks:
            file, row, tokens = self.from_first(self.workers.next_piece)
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


def is_on_hub(name: str) -> bool:
    return bool(re.fullmatch(HUB_NAME, name)) and not glob.glob(name)


def check_source(config: Config) -> list[str]:
    """What is wrong with the source, one line each, as far as it shows without the network."""
    try:
        if not is_on_hub(config.dataset):
            sources.local_files([config.dataset], sources.ROW_FILES, flag="--dataset=")
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
        begun = position.get("revision")
        files, revision = sources.hub_files(dataset, builder or None, begun, flag="--dataset")
        backoff, modified = sources.BACKOFF_SECONDS, 0.0
    else:
        files = sources.local_files([name], sources.ROW_FILES, flag="--dataset=")
        backoff, modified = (), max(map(os.path.getmtime, files))
        revision = sources.describe_files(files)
    known = has_fields(position, PLACE | dict(sequence=int, held_out=int))
    if position and not (known and position["file"] < len(files)):
        raise UserError(f"dataset: {name} has no such place as the checkpoint's, {position}")
    tokenizer = Tokenizer(named_spec(config.tokenizer), config.tokenizer)
    held_out = position.get("held_out") or max(config.eval_size, config.block_size + 1)
    source = sources.files_source(files, backoff)
    val, train, begin, val_bytes = read_first(source, tokenizer, held_out)
    check_first(config, len(val), len(train))

    identity = dict(revision=revision, held_out=held_out)
    described = json.dumps([identity, tokenizer.spec, [os.path.basename(file) for file in files]])
    fingerprint = hashlib.sha256(described.encode() + val.tobytes()).hexdigest()
    first = (position["file"], position["row"]) if position else begin
    workers = Workers(Pieces(files, backoff, tokenizer.spec, first, begin), config.data_workers)
    stream = Stream(workers, config.block_size, identity, position)
    return Dataset(
        name,
        HeldTokens(train),
        HeldTokens(val),
        tokenizer.vocab,
        tokenizer.spec,
        fingerprint,
        stream,
        modified,
        bytes_per_token=val_bytes / len(val),
    )


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


def check_first(config: Config, val_tokens: int, train_tokens: int) -> None:
    """Raises UserError where a source is too short to train on."""
    if train_tokens > config.block_size:
        return
    mend = "choose another --dataset"
    if val_tokens:
        mend = f"try --eval_tokens={max((val_tokens + train_tokens) // 20, 1)}"
    held = f"{val_tokens:,} tokens for validation and {train_tokens:,} for training"
    needs = f"which needs more than block_size {config.block_size}"
    raise UserError(f"dataset: {config.dataset} holds {held}, {needs}; {mend}")
