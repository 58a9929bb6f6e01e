"""
Train on text while it is being tokenized. train.py starts prepare_fineweb.py as a second process,
which writes small shards to data/streamed/NAME. Training reads the shards in order and waits for
those that do not exist yet.

Sequence n is the window of block_size + 1 tokens that begins at token n * block_size of the
training shards. After the last shard, the next epoch starts over with the first. So the number of
sequences consumed is all that a resumed run needs, and neither threads nor ranks nor batch size
change what it trains on.

    open_stream    starts the preparation, and waits for the tokens that evaluations read
    Stream         runs in the training process: waits for shards and reads windows
    Allowance      runs in the preparation: limits how far it gets ahead, and ends it with the run
"""

import bisect
import contextlib
import glob
import os
import re
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.child import end_with_parent, start_child
from common.console import RunError, UserError, print_err, say, warn
from common.files import lack_of_space
from configurator import Config
from data.shards import Dataset, ShardTokens, check_and_fingerprint, read_folder, read_manifest
from data.writer import CONTINUE

HUB_NAME = r"[\w.-]+/[\w.-]+(:[\w.-]+)?"
SCRIPT = Path(__file__).with_name("prepare_fineweb.py")
SHARD_TOKENS = 2**22  # takes a thread one to three seconds to tokenize
TOKENS_AHEAD = 2**25  # how far the preparation may get ahead of training
POLL_SECONDS = 0.1  # how often to check the folder for new shards
RESUME = "--init_from=resume continues the run"
PATIENCE = 30  # seconds between lines that say training is waiting for data

# -----------------------------------------------------------------------------
# In the training process


class Stream:
    """Read training sequences from a folder that is still being filled."""

    def __init__(self, folder: Path, block_size: int, before: Sequence[str] = ()):
        self.folder, self.block_size = folder, block_size
        self.preparing: subprocess.Popen | None = None  # on rank 0: fills the folder
        self.run_id = ""  # on rank 0: the manifest has it once the shards are from this source
        self.errors: list[str] = []  # error lines printed by the preparation
        nothing = ShardTokens([], 0)
        # what the folder held when it was last looked at
        self.data = Dataset(str(folder), nothing, nothing, 0, {}, dict(complete=False))
        self.closed = False
        self.before = [*before]  # a resumed run's shards_read(), from its checkpoint
        self.epochs = 0  # complete passes over the source

    def start(self, config: Config, held_out: int) -> None:
        """
        Start the preparation process, which ends when this process does, even if this one is
        killed. It holds out `held_out` tokens for validation, or as many as the folder already has.
        """
        if (self.folder / "manifest.json").exists():
            there = read_manifest(self.folder)["val_tokens"]
            if there < held_out:
                fewer = f"evaluations read {there:,} tokens, not {held_out:,}"
                warn(f"eval_tokens: {fewer}, because {self.folder} holds out no more")
            held_out = there
        flags = dict(source=config.dataset, tokenizer=config.tokenizer, out=str(self.folder))
        flags["order"] = "prefix"  # the only order in which training can begin at once
        if re.fullmatch(HUB_NAME, config.dataset) and not glob.glob(config.dataset):
            flags["dataset"], _, flags["name"] = flags.pop("source").partition(":")
        self.run_id = flags["run_id"] = secrets.token_hex(8)
        sizes = dict(val_tokens=held_out, shard_tokens=SHARD_TOKENS, workers=config.data_workers)
        arguments = [f"--{name}={value}" for name, value in (flags | sizes).items()]
        # Send its stderr to a file, because a pipe would need a thread that keeps emptying it.
        stderr, path = tempfile.mkstemp()
        self.printed = open(path, encoding="utf-8", errors="replace")
        self.preparing = start_child(SCRIPT, *arguments, stderr=stderr)
        os.close(stderr)
        with contextlib.suppress(OSError):  # Windows cannot delete an open file
            os.unlink(path)

    def listen(self) -> None:
        """Print the preparation's warnings and collect its errors."""
        for line in self.printed:
            if line.startswith("error: "):
                self.errors.append(line.removeprefix("error: ").rstrip())
            else:
                print_err(line.rstrip())

    def look(self, wanted: int, hint: str = CONTINUE) -> bool:
        """
        Look for new shards. Returns True if there are `wanted` training tokens, or if the source
        has ended. Raises RunError, with `hint` at the end, if the preparation has failed.
        """
        code = self.preparing.poll() if self.preparing else None  # None: still running
        if self.preparing:
            self.listen()
        manifest = self.folder / "manifest.json"
        if manifest.exists():
            seen = [*self.data.train.shards, *self.data.val.shards]
            try:
                if self.run_id in ("", read_manifest(self.folder).get("run_id")):
                    self.data = read_folder(self.folder, {shard.path.name: shard for shard in seen})
            except (FileNotFoundError, UserError):
                if manifest.exists():  # no manifest: the preparation gave up for lack of text
                    raise
        if self.holds(wanted):
            return True
        if code is not None:
            ended = (
                f"the process that prepares {self.folder} stopped with exit code {code}; {CONTINUE}"
            )
            raise RunError(*(line.replace(CONTINUE, hint) for line in self.errors or [ended]))
        return False

    def holds(self, tokens: int) -> bool:
        """Return True if this many training tokens are ready, or the whole source is."""
        return self.data.complete or len(self.data.train) >= tokens

    def ask(self, tokens: int) -> None:
        """Allow the preparation to write this many training tokens, and TOKENS_AHEAD more."""
        if self.preparing and self.preparing.stdin:
            with contextlib.suppress(OSError):  # it has ended, and look() will say why
                self.preparing.stdin.write(f"{tokens + TOKENS_AHEAD}\n".encode())

    def read(self, first: int, count: int) -> np.ndarray:
        """
        Return the windows of sequences `first` to first + count - 1 as (count, block_size + 1)
        int64, waiting until they are prepared. Raises RunError if the preparation has failed, or if
        a resumed run's text has changed.
        """
        wanted, began = (first + count) * self.block_size + 1, time.monotonic()
        self.ask(wanted)
        while not (self.holds(wanted) or self.look(wanted, RESUME)):
            if self.closed:
                raise RunError()  # the run is ending and needs no more windows
            if time.monotonic() - began > PATIENCE:
                began = time.monotonic()
                prepared = len(self.data.train)
                say(f"data: {prepared:,} tokens are prepared, waiting for {wanted:,}")
            time.sleep(POLL_SECONDS)
        if self.before and self.shards_read(first)[: len(self.before)] != self.before:
            other = f"dataset: the text in {self.folder} differs from what this run has trained on"
            raise RunError(f"{other}; restore its source, or start a new run in another --out_dir")
        self.before = []  # checked once per launch
        windows = (len(self.data.train) - 1) // self.block_size
        epochs = (first + count - 1) // windows
        if epochs > self.epochs:
            self.epochs = epochs
            read = f"all {len(self.data.train):,} training tokens of {self.data.source} were read"
            say(f"data: {read}; epoch {epochs + 1} begins")
        begins = [n % windows * self.block_size for n in range(first, first + count)]
        return self.data.train.read_windows(begins, self.block_size + 1)

    def shards_read(self, sequences: int) -> list[str]:
        """Return the SHA-256 of each shard that the first `sequences` sequences read from."""
        train = self.data.train
        last = bisect.bisect_left(train.ends, sequences * self.block_size)
        return [shard["sha256"] for shard in self.data.listed(train)[: last + 1]]

    def close(self) -> None:
        self.closed = True
        if self.preparing:
            self.preparing.kill()
            self.printed.close()


def open_stream(config: Config, ranks, before: Sequence[str] = ()) -> Dataset:
    """
    Start preparing config.dataset (a file, a folder, a pattern, or ORG/NAME[:CONFIG] on the hub),
    and wait for the tokens that evaluations read: the validation split and the first training
    shards. `before` is a resumed run's shards_read(), from its checkpoint. Every rank must call
    this. Raises UserError.
    """
    held_out = max(config.eval_size, config.block_size + 1)
    stream = Stream(streamed_folder(config), config.block_size, before)
    ranks.on_main(stream.start, config, held_out)
    stream.ask(held_out)
    ready = False
    while not ready:
        try:
            ready = ranks.on_main(stream.look, held_out)
        except RunError as error:
            raise UserError(*error.args) from None
        time.sleep(POLL_SECONDS)
    there = (stream.folder / "manifest.json").exists()
    ranks.check_same("stream", there, "several machines need one shared folder")
    while not stream.look(held_out):
        time.sleep(POLL_SECONDS)
    if ranks.is_main:
        check_room(config, stream, held_out)
    return describe(config.dataset, stream, held_out)


def streamed_folder(config: Config) -> Path:
    """Return the folder of a stream's shards."""
    name = re.sub(r"\W+", "_", f"{config.dataset} {config.tokenizer}")
    return Path("data", "streamed", name[-100:])


def check_room(config: Config, stream: Stream, held_out: int) -> None:
    """Print how much disk space the stream will take, and warn if there is not enough."""
    needed = ""
    if not config.by_clock:
        most = held_out + config.iter_tokens * config.max_iters + TOKENS_AHEAD + SHARD_TOKENS
        needed = f", at most {2 * most / 1e9:.3g} GB in this run"
        there = len(stream.data.train) + len(stream.data.val)
        if shortage := lack_of_space(stream.folder, 2 * (most - there)):
            warn(f"{shortage}; a full disk ends the run with a checkpoint to resume from")
    say(f"stream: {stream.folder} takes 2 bytes per token{needed}")


def describe(source: str, stream: Stream, evaluated: int) -> Dataset:
    """
    Return a stream's Dataset: the whole validation split, and as many training shards as hold the
    first `evaluated` tokens. Raises UserError if there is too little text.
    """
    data = replace(stream.data, source=source, stream=stream)
    last = bisect.bisect_left(data.train.ends, evaluated)
    data.train = ShardTokens(data.train.shards[: last + 1], data.vocab)
    if len(data.train) <= stream.block_size:
        held = f"{len(data.val):,} tokens for validation and {len(data.train):,} for training"
        hint = "choose a larger --dataset, or smaller --eval_tokens and --block_size"
        raise UserError(f"dataset: {source} holds {held}; {hint}")
    # Leave out the training shards, which are still being written. The manifest names their source.
    data.fingerprint = check_and_fingerprint(data, data.val)
    data.val_fingerprint = data.fingerprint
    return data


# -----------------------------------------------------------------------------
# In the preparation


class Allowance:
    """
    Limit how many training tokens are prepared. The training process writes the limit to stdin, one
    number per line. When stdin closes, this process exits.
    """

    def __init__(self) -> None:
        self.tokens, self.changed = 0, threading.Condition()
        end_with_parent(self.receive)

    def receive(self, line: str) -> None:
        with self.changed:
            self.tokens = int(line)
            self.changed.notify()

    def wait(self, tokens: int) -> None:
        """Wait until more than `tokens` training tokens may be prepared."""
        with self.changed:
            self.changed.wait_for(lambda: self.tokens > tokens)
