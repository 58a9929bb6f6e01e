"""
Decide the order in which rows are read, and which are held out for validation.

    prefix      file order; validation is the first documents
    shuffled    all row groups in a seeded shuffle, then the documents within each window of row
                groups shuffled again; validation is spread over the whole source

A row group is a part of a parquet file that can be read on its own; any other file counts as one
row group. The validation text depends only on the files, the tokenizer and --val_tokens, so folders
made with a different --tokens or --seed share it.
"""

import bisect
import hashlib
import heapq
import itertools
import math
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import ClassVar

from tqdm import tqdm

from data.text import Group, Place, Row, Source
from data.tokenizer import SAMPLE_MB
from data.writer import Document

ORDERS = ("shuffled", "prefix")
# A shuffle window ends with the row group that brings it to this many rows or characters, or at the
# latest at twice as many. Two windows are in memory at a time.
WINDOW_ROWS = 2**13
WINDOW_CHARACTERS = 2**24
GROUP_TOKENS = 250_000  # validation tokens taken from one row group; FineWeb's hold about 700,000
LEAST_GROUPS = 16  # the fewest row groups to take validation from
SAMPLE_GROUPS = 16  # row groups to take a tokenizer's training text from
# largest fraction of the row groups, and of their text, to hold out; beyond it validation is made
# of single documents
MOST_HELD_OUT = 1 / 20


@dataclass
class InFileOrder:
    """Yield the documents of a source as they come. writer.py holds out the first of them."""

    source: Source
    val_tokens: int  # for writer.py to hold out
    settings: ClassVar[dict] = {}  # of this order, for the manifest

    def documents(self, begin: Place) -> Iterator[Document]:
        """Yield the documents, starting at a place. Raises UserError as Source.rows() does."""
        return itertools.starmap(Document, self.source.rows(begin))

    def sample(self) -> Iterator[str | None]:
        """Yield text to train a tokenizer on, from the beginning, as much as the caller takes."""
        return (text for _, text in self.source.rows(Place()))


@dataclass
class Shuffled:
    """Yield the documents of a source: first those held out for validation, then the others."""

    source: Source
    counts: list[int]  # row groups in each file
    held_out: dict  # what choose_held_out() returned
    seed: int
    val_tokens: ClassVar[int] = 0  # for writer.py to hold out

    def __post_init__(self) -> None:
        groups = list_groups(self.counts)
        held = {tuple(group) for group in self.held_out.get("groups", ())}
        self.validation = [group for group in groups if group in held]
        self.training = [group for group in groups if group not in held]
        random.Random(self.seed).shuffle(self.training)

    @property
    def settings(self) -> dict:
        """Return the settings of this order for the manifest."""
        return dict(seed=self.seed, row_groups=self.counts, held_out=self.held_out)

    def documents(self, begin: Place) -> Iterator[Document]:
        """Yield the documents, starting at a place. Raises UserError as Source.rows() does."""
        if begin.given is None:
            for after, text in self.validation_rows(begin):
                yield Document(after, None, text or "")
            begin = Place(*self.training[0], given=0) if self.training else Place()
        yield from self.training_documents(begin)

    def sample(self) -> Iterator[str | None]:
        """
        Yield training text to train a tokenizer on, as much as the caller takes, from the
        beginnings of several row groups. A .jsonl file is one row group, so if the text came from
        the first one, the tokenizer might see only one of several languages.
        """
        share = SAMPLE_MB * 1_000_000 / max(min(len(self.training), SAMPLE_GROUPS), 1)
        unread = []
        for group in self.training:
            rows = self.source.file_rows(Place(*group), one_group=True)
            texts = (text for after, text in rows if text and not self.is_held_out(after))
            unread.append(texts)
            taken = 0
            for text in texts:
                yield text
                taken += len(text.encode(errors="replace"))
                if taken >= share:
                    break
        yield from itertools.chain.from_iterable(unread)  # if the others were smaller

    def validation_rows(self, begin: Place) -> Iterator[Row]:
        """Yield held-out rows in file order, which no seed changes."""
        if not self.validation:
            for after, text in self.source.rows(begin):
                if self.is_held_out(after):
                    yield after, text
            return
        for group in self.validation:
            size = 0
            for after, text in self.source.file_rows(Place(*group), one_group=True):
                size += len((text or "").encode(errors="replace"))
                if after > begin:
                    yield after, text
                if size >= self.held_out["bytes_per_group"]:
                    break

    def is_held_out(self, after: Place) -> bool:
        return place_hash(after) <= self.held_out.get("up_to_hash", "")

    def training_documents(self, begin: Place) -> Iterator[Document]:
        """
        Yield the training documents, shuffled within each window. The place after a document is
        the start of its window plus the number of documents already yielded from that window, so
        continuing a preparation means reading that window again.
        """
        if not self.training:
            return
        ended = threading.Event()
        windows = self.windows(begin, ended)
        reader, coming = read_next(windows)
        try:
            while window := coming.get():
                if isinstance(window, Exception):
                    raise window
                reader, coming = read_next(windows)
                kept = [text for after, text in window if not self.is_held_out(after)]
                random.Random(f"{self.seed} {begin[:3]}").shuffle(kept)
                before = begin.given or 0
                for given, text in enumerate(kept[before:], before + 1):
                    yield Document(begin._replace(given=given), text)
                begin = window[-1][0]._replace(given=0)
        finally:  # the caller has enough tokens, or Ctrl-C
            ended.set()
            reader.join(timeout=1)  # do not wait for a hub that hangs

    def windows(self, begin: Place, ended: threading.Event) -> Iterator[list[Row]]:
        """
        Yield windows of rows, starting at a place, until `ended` is set. A window ends where a row
        group does, so that no row group is downloaded twice. Only a very large row group is cut.
        """
        window = []
        size = 0
        place = begin._replace(given=None)
        for group in self.training[self.training.index((begin.file, begin.group)) :]:
            place = place if place[:2] == group else Place(*group)
            for after, text in self.source.file_rows(place, one_group=True):
                if ended.is_set():
                    return
                window.append((after, text))
                size += len(text or "")
                if len(window) == 2 * WINDOW_ROWS or size >= 2 * WINDOW_CHARACTERS:
                    yield window
                    window = []
                    size = 0
            if len(window) >= WINDOW_ROWS or size >= WINDOW_CHARACTERS:
                yield window
                window = []
                size = 0
        if window:
            yield window


def read_next(windows: Iterator[list[Row]]) -> tuple[threading.Thread, SimpleQueue]:
    """
    Read the next window in a thread. The queue receives the window, None after the last one, or the
    error. The thread is a daemon, so that Ctrl-C does not wait for a hub that hangs.
    """
    answer: SimpleQueue = SimpleQueue()

    def read() -> None:
        try:
            answer.put(next(windows, None))
        except Exception as error:  # raised by the thread that takes it
            answer.put(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader, answer


def list_groups(counts: list[int]) -> list[Group]:
    """List all row groups in file order, given the number in each file."""
    return [(file, group) for file, count in enumerate(counts) for group in range(count)]


def choose_held_out(source: Source, counts: list[int], tokens: int, token_bytes: int) -> dict:
    """
    Choose what to hold out for validation: evenly spaced row groups or, where row groups are too
    few, too small or too large, the documents whose places have the lowest hashes. `tokens` is the
    number of validation tokens, `token_bytes` an assumed number of text bytes per token. Returns
    what the manifest stores as `held_out`.
    """
    groups = list_groups(counts)
    wanted = tokens * token_bytes
    number = max(LEAST_GROUPS, math.ceil(tokens / GROUP_TOKENS))
    share = math.ceil(wanted / number)
    if number <= MOST_HELD_OUT * len(groups):
        sizes = source.group_bytes()
        ends = [*itertools.accumulate(sizes)]
        middles = ((2 * n + 1) * ends[-1] / (2 * number) for n in range(number))
        chosen = [*dict.fromkeys(bisect.bisect_left(ends, middle) for middle in middles)]
        is_enough = sum(min(sizes[n], share) for n in chosen) >= 0.9 * wanted
        # the rest of a held-out row group is lost to training
        if is_enough and sum(sizes[n] for n in chosen) <= MOST_HELD_OUT * ends[-1]:
            return dict(groups=[[*groups[n]] for n in chosen], bytes_per_group=share)
    lowest: list[tuple[int, int]] = []  # a heap of (-hash, bytes), so the highest hash is popped
    size = 0
    # disable=None shows the bar on a terminal only
    rows = tqdm(source.rows(Place()), desc="choosing validation", unit="row", disable=None)
    for after, text in rows:
        if not text:
            continue
        length = len(text.encode(errors="replace"))
        heapq.heappush(lowest, (-int(place_hash(after), 16), length))
        size += length
        while size - lowest[0][1] >= wanted:
            size -= heapq.heappop(lowest)[1]
    return dict(up_to_hash=f"{-lowest[0][0]:016x}" if lowest else "")


def place_hash(after: Place) -> str:
    return hashlib.blake2b(repr(after[:3]).encode(), digest_size=8).hexdigest()
