"""
Token datasets on the disk: opened, checked, and read as one stream of tokens per split.

A dataset is a folder of shards in any of three forms: ours (llm.c's format and a manifest.json), a
folder of llm.c / modded-nanogpt shards, or nanoGPT's headerless train.bin and val.bin (+ meta.pkl).
A shard's file name says its split: see split_of.
"""

import bisect
import contextlib
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.console import RunError, UserError, did_you_mean, raise_if_any, warn
from common.files import plain_file, replacing
from configurator import Config
from data.tokenizer import GPT2_VOCAB, fits, read_bpe, read_meta

HEADER_INTS = 256  # int32 words at the head of an llm.c shard: magic, version, token count, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
MAX_VOCAB = 2**20  # more than any tokenizer's: a larger number is damage
CHECKED_TOKENS = 32768  # at both ends of a shard, looked at when it is opened
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


def open_shard(path: Path, listed: dict | None = None) -> Shard:
    """
    Read a shard's header, and compare it with the file's size and with what manifest.json lists.
    Raises UserError.
    """
    try:
        size = plain_file(path).stat().st_size
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; prepare the dataset again") from None
    magic, version, tokens = header.tolist()
    header_bytes = 4 * HEADER_INTS
    if magic != SHARD_MAGIC and path.name in ("train.bin", "val.bin"):  # nanoGPT's: only tokens
        header_bytes, tokens = 0, size // 2
        if size == 0 or size % 2 or header.tobytes().startswith(b"\x93NUMPY"):
            raise UserError(f"{path}: its {size:,} bytes are not uint16 alone; prepare it again")
    elif magic != SHARD_MAGIC:
        raise UserError(f"{path}: its magic number is {magic}, a shard's is {SHARD_MAGIC}")
    elif version != SHARD_VERSION:
        raise UserError(f"{path}: its version is {version}, only {SHARD_VERSION} can be read")
    held = (size - header_bytes) / 2
    if held != tokens or tokens < 0:
        promise = f"its header promises {tokens:,} tokens, the file holds {held:,.1f}"
        raise UserError(f"{path}: {promise}; prepare it again")
    if listed and listed["tokens"] != tokens:
        differs = f"holds {tokens:,} tokens, manifest.json says {listed['tokens']:,}"
        raise UserError(f"{path}: {differs}; delete {path.parent} and prepare it again")
    return Shard(path, header_bytes, tokens)


def is_file_name(name: str) -> bool:
    """Whether a shard's name stays in its folder, and is one that a file can have."""
    return name == Path(name).name and "\0" not in name


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


def allow_open_files(count: int) -> None:
    """Raise the limit of open files, usually 1,024 for a process, by `count`."""
    # ImportError: Windows, whose limit is higher; the others: macOS has a further limit of its own
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            # Linux has no unlimited hard limit; macOS's is a large number
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + count, hard), hard))


class TokenStream:
    """
    The shards of one split as one stream of tokens. Plain reads, not a memory map, whose pages
    would count as memory of the process.
    """

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = np.cumsum([shard.tokens for shard in shards]).tolist()
        allow_open_files(len(shards))
        try:
            self.files = [open(shard.path, "rb", buffering=0) for shard in shards]
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}; raise ulimit -n") from None
        # The thread that reads ahead and an evaluation share the files' positions
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[int, int]:
        """(shard number, token offset in that shard) of a position in the stream."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number] - self.shards[number].tokens)

    def read(self, position: int, out: np.ndarray) -> None:
        """
        Fill `out` (uint16) with the tokens from `position` on, across shard boundaries. Raises
        RunError where a file has become shorter or cannot be read.
        """
        filled = 0
        while filled < len(out):
            number, offset = self.locate(position + filled)
            shard, file = self.shards[number], self.files[number]
            piece = out[filled : filled + shard.tokens - offset]
            try:
                with self.lock:
                    file.seek(shard.header_bytes + 2 * offset)
                    size = file.readinto(memoryview(piece).cast("B"))
            except OSError as error:  # a failing disk, a network file system that has gone
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
        for row, position in zip(block, positions):
            self.read(position, row)
        if block.size and block.max() >= self.vocab:
            row, column = np.argwhere(block >= self.vocab)[0]
            number, offset = self.locate(positions[row] + int(column))
            where = f"{self.shards[number].path}: token {block[row, column]} at offset {offset:,}"
            raise RunError(f"{where} is outside the vocabulary of {self.vocab}; prepare it again")
        return block.astype(np.int64)


class HeldTokens:
    """Tokens in memory, read like a TokenStream: what a streaming run evaluates on."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        windows = [self.tokens[position : position + length] for position in positions]
        return np.stack(windows).astype(np.int64)


# -----------------------------------------------------------------------------
# Datasets


@dataclass
class Dataset:
    source: str  # the folder, or what is streamed
    train: TokenStream | HeldTokens  # of a stream, only as many tokens as an evaluation reads
    val: TokenStream | HeldTokens
    vocab: int  # before padding
    tokenizer: dict  # the spec for Tokenizer; saved in checkpoints
    fingerprint: str  # changes when the tokens do
    stream: Any = None  # the data.stream.Stream that training reads in place of `train`
    modified: float = 0.0  # when the newest of its files was changed, as st_mtime; 0.0 on the hub
    bytes_per_token: float | None = None  # of the validation text; None where nobody has counted


def dataset_folder(name: str) -> Path:
    """data/NAME, or NAME as a path where only that is a folder."""
    if Path(name).is_dir() and not Path("data", name).is_dir():
        return Path(name)
    return Path("data", name)


def open_dataset(name: str) -> Dataset:
    """
    Open data/NAME, or a folder by its path; check every header. Raises UserError with one line per
    problem.
    """
    folder = dataset_folder(name)
    if not folder.is_dir():
        raise UserError(missing_dataset(name, folder))
    listed, vocab, tokenizer = read_description(folder)
    shards = open_shards(folder, listed)
    train, val = TokenStream(shards["train"], vocab), TokenStream(shards["val"], vocab)
    fingerprint = check_tokens(listed, [train, val])
    modified = max(shard.path.stat().st_mtime for shard in train.shards + val.shards)
    size = bytes_per_token(listed, tokenizer["kind"])
    return Dataset(str(folder), train, val, vocab, tokenizer, fingerprint, None, modified, size)


def missing_dataset(name: str, folder: Path) -> str:
    """The message where the folder is not there."""
    problem = f"dataset: there is no folder {folder}"
    if name == "openwebtext":  # the default, which most likely nobody asked for
        problem += ", the default; config/quickstart.py needs no data"
    made = [path.parent.name for path in Path("data").glob("*/*.bin")]
    command = "prepare_fineweb.py --tokens=10B" if "fineweb" in name else "prepare_text.py FILE"
    make = f"make it with: python data/{command} --out={folder}"
    return f"{problem}{did_you_mean(name, made)}; {make}"


def read_description(folder: Path) -> tuple[dict[str, dict], int, dict]:
    """
    What manifest.json and meta.pkl say, where they are there: the shards by name, the vocabulary
    and the tokenizer's spec. Raises UserError.
    """
    manifest_path, meta_path = folder / "manifest.json", folder / "meta.pkl"
    manifest = read_json(manifest_path) if manifest_path.exists() else {}
    meta = read_meta(meta_path) if meta_path.exists() else {}
    if manifest.get("complete") is False:
        raise UserError(f"{folder}: unfinished; run the command that began it again")
    try:
        listed = {}
        for shard in manifest.get("shards", []):
            if not is_file_name(shard["name"]):
                raise ValueError(f"a shard named {shard['name'][:50]!r}")
            listed[shard["name"]] = dict(shard, tokens=int(shard["tokens"]))
        vocab = int(manifest.get("vocab") or meta.get("vocab_size") or GPT2_VOCAB)
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError("vocabulary out of range")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"{folder}: manifest.json or meta.pkl is damaged ({error!r})"
        raise UserError(f"{problem}; prepare the dataset again") from None
    if manifest.get("tokenizer") == "bpe":
        return listed, vocab, read_bpe(folder / "tokenizer.json", manifest)
    return listed, vocab, tokenizer_spec(manifest, meta, vocab)


def tokenizer_spec(manifest: dict, meta: dict, vocab: int) -> dict:
    """The tokenizer's spec. Of kind unknown, it lets a run train, but print no samples."""
    if manifest.get("tokenizer"):
        spec = dict(kind=manifest["tokenizer"])
    elif "itos" in meta:
        spec = dict(kind="char")
    elif meta and vocab != GPT2_VOCAB:
        return dict(kind="unknown")  # a tokenizer of somebody's own, which meta.pkl does not hold
    else:
        spec = dict(kind="gpt2")
    with contextlib.suppress(LookupError, TypeError):  # then it does not fit
        spec["itos"] = [meta["itos"][i] for i in range(vocab)]
    return spec if fits(spec, vocab) else dict(kind="unknown")


def bytes_per_token(listed: dict[str, dict], kind: str) -> float | None:
    """
    UTF-8 bytes of the validation text per token of it, as manifest.json has counted them; None
    where it has not. Of byte tokens an older one tells enough: all but the documents' end-of-texts.
    """
    val = [shard for name, shard in listed.items() if split_of(name) == "val"]
    try:
        if kind == "byte":
            val = [dict(bytes=s["tokens"] - s.get("documents", 0)) | s for s in val]
        return sum(shard["bytes"] for shard in val) / sum(shard["tokens"] for shard in val)
    except (LookupError, TypeError, ArithmeticError):  # not counted, or damaged
        return None


def open_shards(folder: Path, listed: dict[str, dict]) -> dict[str, list[Shard]]:
    """
    The shards of each split by name: those that manifest.json lists, or else all in the folder.
    Raises UserError.
    """
    shards: dict[str, list[Shard]] = {"train": [], "val": []}
    problems = []
    for name in sorted(listed) or sorted(path.name for path in folder.glob("*.bin")):
        if split := split_of(name):
            try:
                shards[split].append(open_shard(folder / name, listed.get(name)))
            except UserError as error:
                problems += error.problems
    raise_if_any(problems)
    for split in shards:
        names = [shard.path.name for shard in shards[split]]
        if f"{split}.bin" in names and len(names) > 1:
            raise UserError(f"{folder}: {' and '.join(names[:3])} are two datasets; remove one")
        if not any(shard.tokens for shard in shards[split]):
            files = f"{split}_000001.bin or NAME_{split}_000001.bin"
            raise UserError(f"{folder}: holds no tokens for {split} ({files}); prepare it again")
    return shards


def check_tokens(listed: dict[str, dict], streams: list[TokenStream]) -> str:
    """
    Check both ends of each shard; the rest is checked as it is read. Returns the fingerprint, a
    sha256 of these tokens and of what manifest.json lists. Raises RunError.
    """
    # without `bytes`, which the same tokens prepared by an older version lack
    entries = {n: {k: v for k, v in listed[n].items() if k != "bytes"} for n in listed}
    fingerprint = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for stream in streams:
        for shard, end in zip(stream.shards, stream.ends):
            length = min(shard.tokens, CHECKED_TOKENS)
            tokens = stream.read_windows([end - shard.tokens, end - length], length)
            if not shard.header_bytes and tokens[0, ::2].any() and not tokens[0, 1::2].any():
                raise RunError(f"{shard.path}: every second token is 0, as in int32; write uint16")
            fingerprint.update(os.fsencode(f"{shard.path.name} {shard.tokens} ") + tokens.tobytes())
    return fingerprint.hexdigest()


def is_made_on_demand(config: Config) -> bool:
    """Whether this is the quickstart's dataset, and it is not made yet, or only in part."""
    if config.dataset != PREPARED_ON_DEMAND:
        return False
    manifest = dataset_folder(config.dataset) / "manifest.json"
    return not manifest.exists() or read_json(manifest).get("complete") is False


def check_dataset(config: Config) -> list[str]:
    """What is wrong with the dataset for this configuration, one line each."""
    try:
        if is_made_on_demand(config):
            return []
        data = open_dataset(config.dataset)
    except UserError as error:
        return error.problems
    unread = sorted(p.name for p in Path(data.source).glob("*.bin") if not split_of(p.name))[:3]
    if unread:
        warn(f"{data.source}: neither train nor val by name, so not read: {', '.join(unread)}")
    problems = []
    for split, stream in (("train", data.train), ("val", data.val)):
        if len(stream) <= config.block_size:
            short = f"the {split} split of {data.source} has only {len(stream):,} tokens"
            problems.append(f"block_size: {short}; --block_size={max(len(stream) - 1, 1)}")
    return problems


def read_json(path: Path, mend: str = "prepare the dataset again") -> dict:
    """A JSON object from a file. Raises UserError, which ends in `mend`."""
    try:
        return dict(json.loads(plain_file(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {mend}") from None
