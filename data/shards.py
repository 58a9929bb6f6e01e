"""
Token datasets on the disk: opened, checked, and read as one row of tokens per split.

A dataset is a folder of shards in any of four forms: ours (llm.c's format and a manifest.json), a
folder of llm.c / modded-nanogpt shards, build-nanogpt's .npy shards, or nanoGPT's headerless
train.bin and val.bin. Without a manifest.json, meta.pkl may say the vocabulary.
A shard's file name says its split: see split_of.
"""

import bisect
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.console import (
    COMMAND,
    RunError,
    UserError,
    command_line,
    count,
    did_you_mean,
    raise_if_any,
    say,
)
from common.files import is_lfs_pointer, read_json, replacing
from configurator import Config
from data.tokenizer import BYTE_VOCAB, GPT2_VOCAB, MOST_IDS, pick_tokenizer, read_bpe, read_meta

HEADER_INTS = 256  # int32 words at the head of an llm.c shard: magic, version, token count, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
CHECKED_TOKENS = 32768  # at both ends of a shard, looked at when it is opened
MOST_TOKENS = 10**10  # of FineWeb-Edu's usual sample
HOURS_TOKENS = 2 * 10**9  # more than a GeForce trains on in a night with --hours
PREPARED_ON_DEMAND = "python_stdlib"  # the quickstart's dataset: train.py makes it itself

# -----------------------------------------------------------------------------
# Shards


@dataclass(frozen=True)
class Shard:
    path: Path
    header_bytes: int
    tokens: int


def split_of(name: str) -> str | None:
    """
    "train" or "val", whichever stands last in a file name as a word of its own: "retrieval" is
    none. None for a file that belongs to neither.
    """
    words = re.findall(r"(?:^|[_.-])(train|val)(?=[_.0-9-])", name)
    return words[-1] if words else None


def open_shard(path: Path) -> Shard:
    """Read a shard's header, and compare it with the file's size. Raises UserError."""
    size = path.stat().st_size
    if is_lfs_pointer(path):
        raise UserError(f"{path}: a git-lfs pointer, not the shard; type git lfs pull there")
    if path.suffix == ".npy":
        return open_npy(path, size)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    magic, version, tokens = header.tolist()
    header_bytes = 4 * HEADER_INTS
    if magic != SHARD_MAGIC and path.name in ("train.bin", "val.bin"):  # nanoGPT's: only tokens
        header_bytes, tokens = 0, size // 2
    elif (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        begins = f"begins with {magic}, {version}, a shard with {SHARD_MAGIC}, {SHARD_VERSION}"
        raise UserError(f"{path}: {begins}; prepare it again")
    return checked_shard(path, header_bytes, tokens, size)


def open_npy(path: Path, size: int) -> Shard:
    """Read the header of numpy's format, of version 1 as numpy.save writes it. Raises UserError."""
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            header_bytes = file.tell()
    except ValueError as error:
        raise UserError(f"{path}: no shard of numpy.save ({error})") from None
    if len(shape) != 1 or dtype != np.dtype("<u2"):
        problem = f"{path}: holds {len(shape)}-dimensional {dtype}, a shard one row of uint16"
        raise UserError(f"{problem}; save it as uint16, if no id is above 65,535")
    return checked_shard(path, header_bytes, shape[0], size)


def checked_shard(path: Path, header_bytes: int, tokens: int, size: int) -> Shard:
    expected = header_bytes + 2 * tokens
    if size != expected:
        hint = f"delete {path.parent} and prepare it again"
        raise UserError(
            f"{path}: has {size:,} bytes, but {tokens:,} tokens take {expected:,}; {hint}"
        )
    return Shard(path, header_bytes, tokens)


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """
    Write uint16 tokens as an llm.c shard, durable before it appears under its name; returns the
    file's sha256.
    """
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    body = np.ascontiguousarray(tokens, dtype="<u2")
    sha256 = hashlib.sha256(header)
    sha256.update(body)  # no copies: a shard of 100M tokens is 200 MB
    with replacing(path) as file:
        file.write(header)
        file.write(body)
    return sha256.hexdigest()


class ShardTokens:
    """The shards of one split, read as if their tokens were one long row."""

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = np.cumsum([shard.tokens for shard in shards]).tolist()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[int, int]:
        """(shard number, token offset in that shard) of a position in the split."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number] - self.shards[number].tokens)

    def read(self, position: int, out: np.ndarray) -> None:
        """
        Fill `out` (uint16) with the tokens from `position` on, across shard boundaries. Raises
        RunError if a file has become shorter or cannot be read.
        """
        filled = 0
        while filled < len(out):
            number, offset = self.locate(position + filled)
            shard = self.shards[number]
            piece = out[filled : filled + shard.tokens - offset]
            try:
                # no memory map: its pages would count as memory of the process
                with open(shard.path, "rb") as file:
                    file.seek(shard.header_bytes + 2 * offset)
                    size = file.readinto(piece)
            except OSError as error:  # a failing disk, a network file system that is gone
                raise RunError(f"{shard.path}: {error.strerror}; resume once readable") from None
            if size != piece.nbytes:
                raise RunError(f"{shard.path}: cut short: it changed since the run began")
            filled += len(piece)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        """
        The windows that start at `positions`, (len(positions), length) int64, every token checked.
        Raises RunError.
        """
        block = np.empty((len(positions), length), dtype="<u2")
        for row, position in zip(block, positions, strict=True):
            self.read(position, row)
        if block.size and block.max() >= self.vocab:
            row, column = np.argwhere(block >= self.vocab)[0]
            number, offset = self.locate(positions[row] + int(column))
            where = f"{self.shards[number].path}: token {block[row, column]} at offset {offset:,}"
            raise RunError(f"{where} is outside the vocabulary of {self.vocab}; prepare it again")
        return block.astype(np.int64)


# -----------------------------------------------------------------------------
# Datasets


@dataclass
class Dataset:
    source: str  # the folder, or what is streamed
    train: ShardTokens  # of a stream only the first ones, which evaluations read
    val: ShardTokens
    vocab: int  # before padding
    tokenizer: dict  # the spec for Tokenizer; saved in checkpoints
    fingerprint: str = ""  # changes when the tokens do
    val_fingerprint: str = ""  # changes when those of the validation split do
    val_text_sha256: str | None = None  # of the validation text; None if the manifest has none
    order: str = ""  # of its documents: data/order.py; "" of another program's folder
    stream: Any = None  # the data.stream.Stream that training reads in place of `train`
    listed: dict[str, dict] = field(default_factory=dict)  # what manifest.json says of the shards
    complete: bool = True  # whether its preparation has ended

    def listed_val(self) -> dict[str, dict]:
        """What manifest.json says of the validation shards; empty without a manifest."""
        names = [shard.path.name for shard in self.val.shards]
        return {name: self.listed[name] for name in names if name in self.listed}

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the validation text per token of it; None if they were not counted."""
        val = [self.listed[shard.path.name] for shard in self.val.shards if self.listed]
        if not val or not all("bytes" in shard for shard in val):
            return None
        return sum(shard["bytes"] for shard in val) / sum(shard["tokens"] for shard in val)


def dataset_folder(name: str) -> Path:
    """
    data/NAME; or NAME as a path, if it begins with a dot, if only that exists, or if neither exists
    and NAME has a /.
    """
    if name.startswith("."):
        return Path(name)
    is_path = Path(name).is_dir() or Path(name).name != name
    return Path(name) if is_path and not Path("data", name).is_dir() else Path("data", name)


def open_dataset(name: str, tokens: int = MOST_TOKENS) -> Dataset:
    """
    Open data/NAME, or a folder by its path; check every header. Raises UserError with one line per
    problem. `tokens`: what a run needs, for the command that makes a dataset.
    """
    folder = dataset_folder(name)
    if not folder.is_dir():
        raise UserError(missing_dataset_message(name, tokens))
    data = read_folder(folder)
    if not data.complete:
        raise UserError(f"{folder}: unfinished; run its preparation again, with the same command")
    for split, held in (("train", data.train), ("val", data.val)):
        if not len(held):
            files = f"{split}_000001.bin or NAME_{split}_000001.npy"
            raise UserError(f"{folder}: holds no tokens for {split} ({files}); prepare it again")
    data.fingerprint = check_and_fingerprint(data.listed, [data.train, data.val])
    data.val_fingerprint = check_and_fingerprint(data.listed_val(), [data.val])
    return data


def missing_dataset_message(name: str, tokens: int) -> str:
    """The error message for a dataset whose folder does not exist."""
    folder = dataset_folder(name)
    problem = f"dataset: there is no folder {folder}"
    if folder == Path(name) and not folder.is_absolute():  # the shell may be in another one
        problem += f" in {Path.cwd()}; cd to where it is"
    if name == "openwebtext":  # the default of --dataset: most likely not asked for
        problem += ", the default; config/quickstart.py needs no data"
    made = [path.parent.name for path in Path("data").glob("*/*.bin")]
    if name == "shakespeare_char":
        return f"{problem}; docs/own_text.md makes it, or give nanoGPT's: --dataset=PATH"
    fineweb = f"prepare_fineweb.py --tokens={count(min(tokens, MOST_TOKENS))}"
    command = fineweb if "fineweb" in name else "prepare_text.py FILE"
    make = command_line("python", *f"data/{command}".split(), f"--out={folder}")
    ways = "give another folder, such as nanoGPT's, with --dataset=PATH, or make it with"
    return f"{problem}{did_you_mean(Path(name).name, made)}; {ways}{COMMAND}{make}"


def read_folder(folder: Path, known: dict[str, Shard] | None = None) -> Dataset:
    """
    What a folder holds, according to its manifest.json or else meta.pkl, if there is one. Its
    preparation may still be running. Checks the header of every shard except the `known` ones. With
    a tokenizer of kind unknown a run can train, but not print samples. Raises UserError.
    """
    listed, complete, vocab, tokenizer = {}, True, GPT2_VOCAB, dict(kind="gpt2")
    val_text_sha256 = None
    order = ""
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        listed = {shard["name"]: shard for shard in manifest.get("shards", [])}
        complete = manifest.get("complete", True)
        val_text_sha256 = manifest.get("val_text_sha256")
        # prepare_text.py's folders have neither; earlier versions of prepare_fineweb.py no order
        order = manifest.get("order", "prefix" if "val_tokens" in manifest else "")
        vocab = manifest.get("vocab", GPT2_VOCAB)
        tokenizer = dict(kind=manifest.get("tokenizer", "unknown"))
        if tokenizer["kind"] == "bpe" and listed:  # its file comes before the first shard
            tokenizer = read_bpe(folder / "tokenizer.json", "restore it, or prepare it again")
    elif (folder / "meta.pkl").exists():
        vocab, tokenizer = read_meta(folder / "meta.pkl")
    shards: dict[str, list[Shard]] = {"train": [], "val": []}
    if vocab > MOST_IDS:
        problem = f"{folder}: has a vocabulary of {vocab:,}, but its uint16 shards hold ids below"
        raise UserError(f"{problem} {MOST_IDS:,}; choose a tokenizer with fewer ids")
    found = [path for path in folder.iterdir() if split_of(path.name)]
    # numpy's shards only if there are no others: they may be the same tokens
    names = [path.name for path in found if path.suffix == ".bin"]
    names = names or [path.name for path in found if path.suffix == ".npy"]
    for name in sorted(listed or names):
        if split := split_of(name):
            shards[split].append((known or {}).get(name) or open_shard(folder / name))
    train, val = ShardTokens(shards["train"], vocab), ShardTokens(shards["val"], vocab)
    return Dataset(
        str(folder),
        train,
        val,
        vocab,
        tokenizer,
        val_text_sha256=val_text_sha256,
        order=order,
        listed=listed,
        complete=complete,
    )


def read_manifest(folder: Path) -> dict:
    """manifest.json. Raises UserError."""
    return read_json(folder / "manifest.json", "prepare the dataset again")


def check_and_fingerprint(listed: dict[str, dict], splits: list[ShardTokens]) -> str:
    """
    Check both ends of each shard; the rest is checked as it is read. Returns the fingerprint, a
    sha256 of these tokens and of what manifest.json lists. Raises RunError.
    """
    # without `bytes`: an older version has not counted them, and the tokens are the same
    entries = {n: {k: v for k, v in listed[n].items() if k != "bytes"} for n in listed}
    fingerprint = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for split in splits:
        for shard, end in zip(split.shards, split.ends, strict=True):
            length = min(shard.tokens, CHECKED_TOKENS)
            if not shard.header_bytes:
                check_width(shard.path, split, end - shard.tokens, length)
            tokens = split.read_windows([end - shard.tokens, end - length], length)
            fingerprint.update(os.fsencode(f"{shard.path.name} {shard.tokens} ") + tokens.tobytes())
    return fingerprint.hexdigest()


def check_width(path: Path, split: ShardTokens, begin: int, length: int) -> None:
    """
    Raise RunError for numbers of 32 or 64 bits: read as 16 bits, every second one is their upper
    half, which is small.
    """
    tokens = np.empty(length, dtype="<u2")
    split.read(begin, tokens)
    if length > 1 and tokens[::2].max() > 4096 * int(tokens[1::2].max()):
        raise RunError(
            f"{path}: every second token is near 0, as in int32 or int64; save it as uint16, if no "
            "id is above 65,535"
        )


def is_made_on_demand(config: Config) -> bool:
    """Whether this is the quickstart's dataset, and it is not made yet, or only in part."""
    if config.dataset != PREPARED_ON_DEMAND:
        return False
    folder = dataset_folder(config.dataset)
    made = (folder / "manifest.json").exists()
    return not made or read_manifest(folder).get("complete") is False


def make_on_demand(config: Config) -> None:
    """Make the quickstart's dataset if it is missing: the one dataset that needs no download."""
    if not is_made_on_demand(config):
        return
    folder = dataset_folder(config.dataset)
    script = Path(__file__).with_name("prepare_text.py")
    say(f"data: preparing {folder} from Python's own source files")
    command = [sys.executable, str(script), f"--out={folder}"]
    # hide its output, which ends with a command to type next
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"dataset: {script} failed; see its message above")
    raise_if_any(check_dataset(config))


def vocab_where_missing(config: Config) -> int | None:
    """
    What to plan and measure with where there is no dataset: a stream's vocabulary, GPT-2's, or
    bytes for the one that is made on demand. None where the dataset is there. Raises UserError.
    """
    if dataset_folder(config.dataset).is_dir() and not config.stream:
        return None
    if config.stream and config.tokenizer != "gpt2":
        tokenizer = pick_tokenizer(config.tokenizer, Path())
        return tokenizer.vocab if tokenizer else None
    return BYTE_VOCAB if config.dataset == PREPARED_ON_DEMAND else GPT2_VOCAB


def check_dataset(config: Config) -> list[str]:
    """What is wrong with the dataset for this configuration, one line each."""
    try:
        if is_made_on_demand(config):
            return []
        tokens = (config.tokens_per_iter or config.iter_tokens) * config.max_iters
        data = open_dataset(config.dataset, HOURS_TOKENS if config.by_clock else tokens)
    except UserError as error:
        return error.problems
    problems = []
    for split, held in (("train", data.train), ("val", data.val)):
        if len(held) <= config.block_size:
            short = f"the {split} split of {data.source} has only {len(held):,} tokens"
            problems.append(f"block_size: {short}; --block_size={max(len(held) - 1, 1)}")
    return problems
