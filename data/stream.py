"""
Training on text that is prepared meanwhile: train.py starts prepare_fineweb.py beside it, which
writes small shards to data/streamed/NAME. Training reads that folder in order, and waits for what
is still to come.

Sequence n is the window of block_size + 1 tokens that begins at token n * block_size of training's
shards; after the last one they begin again. So the number of sequences is all that a resumed run
needs, and neither threads, processes nor batch size change what is trained on.

    open_stream    starts the preparation, waits for what evaluations read
    Stream         waits for shards, reads windows
    Follower       in the preparation: no further ahead than training wants, and ends with it
"""

import bisect
import contextlib
import glob
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.child import end_with_parent, start_child
from common.console import RunError, UserError, complain, say, warn
from common.files import lack_of_space
from configurator import Config
from data.shards import Dataset, ShardTokens, check_tokens, read_folder, read_manifest
from data.writer import CONTINUE

HUB_NAME = r"[\w.-]+/[\w.-]+(:[\w.-]+)?"
SCRIPT = Path(__file__).with_name("prepare_fineweb.py")
SHARD_TOKENS = 2**22  # one to three seconds of work for a thread
TOKENS_AHEAD = 2**25  # that are prepared before they are needed
CHECKED = "checked"  # a line of the preparation
MOMENT = 0.1  # seconds between two looks at the folder
RESUME = "--init_from=resume continues the run"
PATIENCE = 30  # seconds of waiting after which a line says so

# -----------------------------------------------------------------------------
# In the training process


class Stream:
    """The training sequences of a folder that still grows."""

    def __init__(self, folder: Path, block_size: int):
        self.folder, self.block_size = folder, block_size
        self.preparing: subprocess.Popen | None = None  # of rank 0: the process that fills it
        nothing = ShardTokens([], 0)
        # as far as it has been seen
        self.data = Dataset(str(folder), nothing, nothing, 0, {}, complete=False)
        self.closed = self.has_warned = False
        self.checked = True  # whether what is there is of this source
        self.problems: list[str] = []  # error lines of the preparation
        self.before: list[str] = []  # shards_read() of the checkpoint that is resumed
        self.readings = 0  # of all the source

    def start(self, config: Config, held_out: int) -> None:
        """
        Start the preparation, with `held_out` tokens for validation, or as many as an earlier run
        has held out. It ends when this process does, in whatever way.
        """
        if (self.folder / "manifest.json").exists():
            there = read_manifest(self.folder)["val_tokens"]
            if there < held_out:
                fewer = f"evaluations read {there:,} tokens, not {held_out:,}"
                warn(f"eval_tokens: {fewer}: {self.folder} has held out no more")
            held_out = there
        flags = dict(source=config.dataset, tokenizer=config.tokenizer, out=str(self.folder))
        if re.fullmatch(HUB_NAME, config.dataset) and not glob.glob(config.dataset):
            flags["dataset"], _, flags["name"] = flags.pop("source").partition(":")
        sizes = dict(val_tokens=held_out, shard_tokens=SHARD_TOKENS, workers=config.data_workers)
        arguments = [f"--{name}={value}" for name, value in (flags | sizes).items()]
        self.checked = False
        self.preparing = start_child(SCRIPT, "--follow", *arguments, stderr=subprocess.PIPE)
        lines = self.preparing.stderr
        self.listener = threading.Thread(target=self.listen, args=[lines], daemon=True)
        self.listener.start()

    def listen(self, lines) -> None:
        """Pass on the warnings of the preparation, and keep its errors, which read() says."""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text == CHECKED:
                self.checked = True
            elif text.startswith("error: "):
                self.problems.append(text.removeprefix("error: "))
            else:
                complain(text)

    def look(self, wanted: int, mend: str = CONTINUE) -> bool:
        """
        Look at the folder. Whether it has as many tokens for training as are `wanted`, or all that
        the source has. Raises RunError, which ends in `mend`, where they will never be there.
        """
        code = self.preparing.poll() if self.preparing else None  # None: it goes on
        manifest = self.folder / "manifest.json"
        if manifest.exists():
            seen = [*self.data.train.shards, *self.data.val.shards]
            try:
                self.data = read_folder(self.folder, {shard.path.name: shard for shard in seen})
            except (FileNotFoundError, UserError):
                if manifest.exists():  # else the preparation has found too little text
                    raise
        ready = self.checked and self.holds(wanted)
        if code is not None and not ready:
            self.listener.join(timeout=1)
            lines = self.problems or [
                f"the preparation of {self.folder} has ended ({code}); {CONTINUE}"
            ]
            raise RunError(*(line.replace(CONTINUE, mend) for line in lines))
        return ready

    def holds(self, tokens: int) -> bool:
        """Whether so many tokens for training have been seen, or all that there are."""
        return self.data.complete or len(self.data.train) >= tokens

    def ask(self, tokens: int) -> None:
        """Have so many tokens for training prepared, and some more."""
        if self.preparing and self.preparing.stdin:
            with contextlib.suppress(OSError):  # it has ended; look() says why
                self.preparing.stdin.write(f"{tokens + TOKENS_AHEAD}\n".encode())

    def read(self, first: int, count: int) -> np.ndarray:
        """
        The windows of sequences `first` to first + count, (count, block_size + 1) int64. Waits for
        them. Raises RunError where they will never be there.
        """
        wanted, began = (first + count) * self.block_size + 1, time.monotonic()
        self.ask(wanted)
        if self.problems and not self.has_warned:
            self.has_warned = True
            problem = self.problems[0].partition(f"; {CONTINUE}")[0]
            warn(f"{problem}; the run goes on to the last shard")
        while not (self.holds(wanted) or self.look(wanted, RESUME)):
            if self.closed:
                raise RunError()  # nobody waits for it any more
            if time.monotonic() - began > PATIENCE:
                began = time.monotonic()
                prepared = len(self.data.train)
                say(f"data: {prepared:,} tokens are prepared, waiting for {wanted:,}")
            time.sleep(MOMENT)
        if self.before and self.shards_read(first)[: len(self.before)] != self.before:
            other = f"dataset: the text in {self.folder} is not what the run was trained on so far"
            raise RunError(f"{other}; restore its source, or start a new run in another --out_dir")
        self.before = []  # once is enough
        windows = (len(self.data.train) - 1) // self.block_size
        readings = (first + count - 1) // windows
        if readings > self.readings:
            self.readings = readings
            again = f"all {len(self.data.train):,} training tokens of {self.data.source}"
            say(f"data: {again} have been read {readings} times; again from the beginning")
        begins = [n % windows * self.block_size for n in range(first, first + count)]
        return self.data.train.read_windows(begins, self.block_size + 1)

    def shards_read(self, sequences: int) -> list[str]:
        """The SHA-256 of each shard that the first so many sequences have tokens of."""
        train = self.data.train
        last = bisect.bisect_left(train.ends, sequences * self.block_size)
        return [self.data.listed[shard.path.name]["sha256"] for shard in train.shards[: last + 1]]

    def close(self) -> None:
        self.closed = True
        if self.preparing:
            self.preparing.kill()


def open_stream(config: Config, ranks, before: Sequence[str] = ()) -> Dataset:
    """
    Have the source that config.dataset names prepared (files, a folder, a pattern, or
    ORG/NAME[:CONFIG] on the hub), and wait for what evaluations read: the first documents for
    validation, and the first shards for training. `before` is shards_read() of a checkpoint. All
    ranks take part. Raises UserError.
    """
    held_out = max(config.eval_size, config.block_size + 1)
    stream = Stream(streamed_folder(config), config.block_size)
    stream.before = [*before]
    ranks.from_main(stream.start, config, held_out)
    stream.ask(held_out)
    ready = False
    while not ready:
        try:
            ready = ranks.from_main(stream.look, held_out)
        except RunError as error:
            raise UserError(*error.args) from None
        time.sleep(MOMENT)
    check_shared(stream.folder / "lock", ranks)
    while not stream.look(held_out):
        time.sleep(MOMENT)
    if ranks.is_main:
        check_room(config, stream, held_out)
    return describe(config.dataset, stream, held_out)


def check_shared(file: Path, ranks) -> None:
    """Raises UserError on all ranks where rank 0's file is not the one that all of them see."""
    ranks.from_main(file.touch)
    began = time.monotonic()
    changed: list[int | None] = []
    # a network's folder shows a change a little later
    while len(set(changed)) != 1 and ranks.max(time.monotonic() - began)[0] < PATIENCE:
        changed = ranks.gather(file.stat().st_mtime_ns if file.exists() else None)
        time.sleep(MOMENT)
    mend = "several machines need one shared folder for a stream"
    ranks.check_same(f"{file} was changed at", changed[ranks.rank], mend)


def streamed_folder(config: Config) -> Path:
    """Where the shards of a stream are."""
    name = re.sub(r"\W+", "_", f"{config.dataset} {config.tokenizer}")
    return Path("data", "streamed", name[-100:])


def check_room(config: Config, stream: Stream, held_out: int) -> None:
    """Say what the stream will take on the disk; a warning where there is no room for it."""
    needed = ""
    if not config.by_clock:
        most = held_out + config.iter_tokens * config.max_iters + TOKENS_AHEAD + SHARD_TOKENS
        needed = f", at most {2 * most / 1e9:.3g} GB in this run"
        there = len(stream.data.train) + len(stream.data.val)
        if lacks := lack_of_space(stream.folder, 2 * (most - there)):
            warn(f"{lacks}; the run will end there with a checkpoint, and can be resumed")
    say(f"stream: {stream.folder} takes 2 bytes a token{needed}")


def describe(source: str, stream: Stream, evaluated: int) -> Dataset:
    """
    The dataset of a stream: validation, and of training the first shards that hold as many tokens
    as are `evaluated`. Raises UserError.
    """
    data = replace(stream.data, source=source, stream=stream)
    last = bisect.bisect_left(data.train.ends, evaluated)
    data.train = ShardTokens(data.train.shards[: last + 1], data.vocab)
    if len(data.train) <= stream.block_size:
        held = f"{len(data.val):,} tokens for validation and {len(data.train):,} for training"
        hint = "choose a larger --dataset, or smaller --eval_tokens and --block_size"
        raise UserError(f"dataset: {source} holds {held}; {hint}")
    # the rest of the text follows from the source, which the manifest holds
    names = [shard.path.name for shard in data.val.shards]
    data.fingerprint = check_tokens({name: data.listed[name] for name in names}, [data.val])
    return data


# -----------------------------------------------------------------------------
# In the preparation


class Follower:
    """
    Keeps this process no further ahead of the training than that asks for, a line on stdin each
    time, and ends it with the other end of stdin.
    """

    def __init__(self):
        self.wanted, self.changed = 0, threading.Condition()
        end_with_parent(self.receive)

    def receive(self, line: str) -> None:
        with self.changed:
            self.wanted = int(line)
            self.changed.notify()

    def checked(self) -> None:
        """Say that the shards that are there are those of this source."""
        print(CHECKED, file=sys.stderr, flush=True)

    def wait(self, tokens: int) -> None:
        """Wait until more than so many tokens for training are wanted."""
        with self.changed:
            self.changed.wait_for(lambda: self.wanted > tokens)
