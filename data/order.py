"""
In which order the rows of a source are read, and which of them are held out for validation.

    prefix      the order of the files; validation is the first documents
    shuffled    row groups of the whole source in a seeded shuffle, and the documents of each window
                of them shuffled again; validation is spread over the whole source
    records     prefix, cut into the shards that llm.c's script makes; validation is the first one

A row group is a part of a parquet file that can be read alone; any other file is one row group.
Validation follows from the files and --val_tokens, so that folders with another --tokens or --seed
have the same one.
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

from tqdm import tqdm

from data.sources import Group, Place, Row, Source
from data.writer import Document

ORDERS = ("shuffled", "prefix", "records")
WINDOW_ROWS = 2**13  # a window of the shuffle has that many rows, at most twice
WINDOW_CHARACTERS = 2**24  # or that much text; in memory are this window and the next one
GROUP_TOKENS = 250_000  # that validation takes of a row group; FineWeb's hold some 700,000
LEAST_GROUPS = 16  # that validation is taken from
MOST_HELD_OUT = 1 / 20  # of the row groups and of their text; else single documents are held out


@dataclass
class Shuffled:
    """The documents of a source, those held out for validation first."""

    source: Source
    groups: list[Group]  # all of the source
    held_out: dict  # choose_held_out()'s
    seed: int

    def __post_init__(self) -> None:
        held = {tuple(group) for group in self.held_out.get("groups", ())}
        self.validation = [group for group in self.groups if group in held]
        self.training = [group for group in self.groups if group not in held]
        random.Random(self.seed).shuffle(self.training)

    def documents(self, begin: Place) -> Iterator[Document]:
        """From a place on. Raises UserError as Source.rows() does."""
        if begin.given is None:
            for behind, text in self.validation_rows(begin):
                yield Document(behind, None, text or "")
            begin = self.training_begin()
        yield from self.training_documents(begin)

    def training_begin(self) -> Place:
        return Place(*self.training[0], given=0) if self.training else Place()

    def validation_rows(self, begin: Place) -> Iterator[Row]:
        """In the order of the files: the same rows in the same order for every seed."""
        if not self.validation:
            for behind, text in self.source.rows(begin):
                if self.is_held_out(behind):
                    yield behind, text
            return
        for group in self.validation:
            size = 0
            for behind, text in self.source.rows(Place(*group), [group]):
                size += len((text or "").encode(errors="replace"))
                if behind > begin:
                    yield behind, text
                if size >= self.held_out["bytes_per_group"]:
                    break

    def is_held_out(self, behind: Place) -> bool:
        return place_hash(behind) <= self.held_out.get("up_to_hash", "")

    def training_documents(self, begin: Place) -> Iterator[Document]:
        """
        The place behind a document names where its window begins, and how many documents of the
        window have been given: a preparation that continues reads the window again.
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
                kept = [text for behind, text in window if not self.is_held_out(behind)]
                random.Random(f"{self.seed} {begin[:3]}").shuffle(kept)
                before = begin.given or 0
                for given, text in enumerate(kept[before:], before + 1):
                    yield Document(begin._replace(given=given), text)
                begin = window[-1][0]._replace(given=0)
        finally:  # all tokens are there, or Ctrl-C
            ended.set()
            reader.join(timeout=1)  # a hub that does not answer would take longer

    def windows(self, begin: Place, ended: threading.Event) -> Iterator[list[Row]]:
        """
        The rows of each window from a place on, until nobody needs them. A window ends with a row
        group, of which otherwise a part would be downloaded twice, or within a very large one.
        """
        window = []
        size = 0
        place = begin._replace(given=None)
        for group in self.training[self.training.index((begin.file, begin.group)) :]:
            place = place if place[:2] == group else Place(*group)
            for behind, text in self.source.rows(place, [group]):
                if ended.is_set():
                    return
                window.append((behind, text))
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
    Read the next window in a thread. The queue gets it, None after the last one, or the error. The
    thread is a daemon, so that nobody who types Ctrl-C waits for a hub that does not answer.
    """
    answer: SimpleQueue = SimpleQueue()

    def read() -> None:
        try:
            answer.put(next(windows, None))
        except Exception as error:  # for the thread that takes it
            answer.put(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader, answer


def list_groups(counts: list[int]) -> list[Group]:
    """All row groups, in the order of the files; `counts`: of each file."""
    return [(file, group) for file, count in enumerate(counts) for group in range(count)]


def choose_held_out(source: Source, groups: list[Group], tokens: int, token_bytes: int) -> dict:
    """
    What is held out for validation, for the manifest: row groups at even distances in the text, or,
    where these are too few, too small or too large, the documents with the lowest hashes of their
    places. `token_bytes`: of text per token, assumed.
    """
    wanted = tokens * token_bytes
    number = max(LEAST_GROUPS, math.ceil(tokens / GROUP_TOKENS))
    share = math.ceil(wanted / number)
    if number <= MOST_HELD_OUT * len(groups):
        sizes = source.group_bytes()
        ends = [*itertools.accumulate(sizes)]
        middles = ((2 * n + 1) * ends[-1] / (2 * number) for n in range(number))
        chosen = [*dict.fromkeys(bisect.bisect_left(ends, middle) for middle in middles)]
        is_enough = sum(min(sizes[n], share) for n in chosen) >= 0.9 * wanted
        # their rest is not trained on
        if is_enough and sum(sizes[n] for n in chosen) <= MOST_HELD_OUT * ends[-1]:
            return dict(groups=[[*groups[n]] for n in chosen], bytes_per_group=share)
    lowest: list[tuple[int, int]] = []  # a heap, the highest hash first
    size = 0
    # disable=None: shown on a terminal only
    rows = tqdm(source.rows(Place()), desc="choosing validation", unit="row", disable=None)
    for behind, text in rows:
        if not text:
            continue
        length = len(text.encode(errors="replace"))
        heapq.heappush(lowest, (-int(place_hash(behind), 16), length))
        size += length
        while size - lowest[0][1] >= wanted:
            size -= heapq.heappop(lowest)[1]
    return dict(up_to_hash=f"{-lowest[0][0]:016x}" if lowest else "")


def place_hash(behind: Place) -> str:
    return hashlib.blake2b(repr(behind[:3]).encode(), digest_size=8).hexdigest()
