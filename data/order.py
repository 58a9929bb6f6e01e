"""
In which order the rows of a source are read, and which of them are held out for validation.

    prefix      the order of the files; validation is the first documents
    shuffled    row groups of the whole source in a seeded shuffle, and the documents of each window
                of them shuffled again; validation is spread over the whole source
    records     prefix, cut into the shards that llm.c's script makes; validation is the first one

A row group is a part of a parquet file that can be read alone; any other file is one row group.
Validation depends on the files and --val_tokens alone, so that folders with another --tokens or
--seed have the same one.
"""

import hashlib
import heapq
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data.sources import Group, Place, Row, Source
from data.writer import Document

ORDERS = ("shuffled", "prefix", "records")
WINDOW_ROWS = 2**13  # a window of the shuffle has that many rows, at most twice
WINDOW_BYTES = 2**24  # or that much text, which is in memory twice: this window and the next one
GROUP_TOKENS = 250_000  # that validation takes of a row group; FineWeb's hold some 700,000
LEAST_GROUPS = 16  # that validation is taken from
MOST_HELD_OUT = 1 / 20  # of the row groups; with fewer of them, single documents are held out


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
        with ThreadPoolExecutor(1, thread_name_prefix="window") as reader:
            windows = self.windows(begin)
            coming = reader.submit(next, windows, None)
            while window := coming.result():
                coming = reader.submit(next, windows, None)
                kept = [text for behind, text in window if not self.is_held_out(behind)]
                random.Random(f"{self.seed} {begin[:3]}").shuffle(kept)
                before = begin.given or 0
                for given, text in enumerate(kept[before:], before + 1):
                    yield Document(begin._replace(given=given), text)
                begin = window[-1][0]._replace(given=0)

    def windows(self, begin: Place) -> Iterator[list[Row]]:
        """
        The rows of each window from a place on. A window ends with a row group, of which otherwise
        a part would be downloaded twice, or within a very large one.
        """
        window, size = [], 0
        place = begin._replace(given=None)
        for group in self.training[self.training.index((begin.file, begin.group)) :]:
            place = place if place[:2] == group else Place(*group)
            for behind, text in self.source.rows(place, [group]):
                window.append((behind, text))
                size += len(text or "")
                if len(window) == 2 * WINDOW_ROWS or size >= 2 * WINDOW_BYTES:
                    yield window
                    window, size = [], 0
            if len(window) >= WINDOW_ROWS or size >= WINDOW_BYTES:
                yield window
                window, size = [], 0
        if window:
            yield window


def list_groups(counts: list[int]) -> list[Group]:
    """All row groups, in the order of the files; `counts`: of each file."""
    return [(file, group) for file, count in enumerate(counts) for group in range(count)]


def choose_held_out(source: Source, groups: list[Group], tokens: int, token_bytes: int) -> dict:
    """
    What is held out for validation, for the manifest: row groups at even distances, or, where they
    are too few or too small, the documents with the lowest hashes of their places. `token_bytes`:
    of text per token, assumed.
    """
    wanted = tokens * token_bytes
    number = max(LEAST_GROUPS, math.ceil(tokens / GROUP_TOKENS))
    share = math.ceil(wanted / number)
    if number <= MOST_HELD_OUT * len(groups):
        chosen = [groups[(2 * n + 1) * len(groups) // (2 * number)] for n in range(number)]
        if sum(min(source.group_bytes(group), share) for group in chosen) >= 0.9 * wanted:
            return dict(groups=[[*group] for group in chosen], bytes_per_group=share)
    lowest: list[tuple[int, int]] = []  # a heap, the highest hash first
    size = 0
    for behind, text in source.rows(Place()):
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
