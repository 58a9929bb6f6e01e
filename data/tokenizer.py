"""
Text to token ids and back: GPT-2's BPE, one of your own, bytes, or nanoGPT's character tables.

A `spec` is what a dataset or a checkpoint says of its tokenizer. Its `kind` is gpt2, bpe, byte,
char or unknown. A bpe spec also has `json`, the text of a tokenizer.json of the library
`tokenizers`; a char spec has the table `itos`, a list of the characters by id.
"""

import os
import pickle
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.console import UserError, say

GPT2_VOCAB = 50257  # BPE tokens, end-of-text (the last id) included
BYTE_VOCAB = 256
MOST_IDS = 65_536  # of a tokenizer.json: what a shard's uint16 can tell apart
SAMPLE_MB = 50  # of text, which bpe:N is trained on
TOKENIZERS = f"byte, gpt2, a tokenizer.json, or bpe:N: trained, of N ids, on {SAMPLE_MB} MB at most"
# Names of end-of-text; a tokenizer that we train has the first
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
# A tokenizer must give this text back unchanged; one that lowercases it, for instance, does not
PROBE = "It's  12 Caf\u00e9s,\n\t\u6f22\u5b57 \U0001f642 \x80 <|endoftext|> "
# What split_long() makes: 200,000 characters and on to the end of a word, or all that is left
CHUNK = re.compile(r"(?s).{200000}.*?\S(?=[ \n])|.+")


class Tokenizer:
    """
    The tokenizer of a spec. Byte 0, which no text needs, is the byte tokenizer's end-of-text; char
    has none. Raises UserError for an unknown kind, and where tiktoken cannot get its vocabulary.

    vocab   the number of ids
    eot     the id of end-of-text, or None
    """

    def __init__(self, spec: dict, path: str | Path = "tokenizer.json"):
        """`path`: where a bpe spec was read, for messages."""
        self.spec, self.kind = spec, spec.get("kind")
        self.eot: Any  # an int or None
        if self.kind == "byte":
            self.vocab, self.eot = BYTE_VOCAB, 0
        elif self.kind == "char":
            self.vocab, self.eot = len(spec["itos"]), None
            self.stoi = {char: i for i, char in enumerate(spec["itos"])}
        elif self.kind == "gpt2":
            self.bpe = gpt2_bpe()
            self.vocab, self.eot = self.bpe.n_vocab, self.bpe.eot_token
        elif self.kind == "bpe":
            self.bpe, self.vocab, self.eot = load_bpe(spec["json"], path)
        else:
            raise UserError("tokenizer: unknown; copy data/NAME/meta.pkl beside the weights")

    def encode(self, text: str) -> np.ndarray | list[int]:
        """Ids of a text, without special tokens. Many threads may call it at once."""
        if self.kind == "byte":
            content = text.replace("\0", "").encode(errors="replace")
            return np.frombuffer(content, dtype=np.uint8)
        if self.kind == "char":
            return [self.stoi[char] for char in text if char in self.stoi]
        if self.kind == "gpt2":
            whole = text.encode(errors="replace").decode()  # UTF-8 cannot hold a lone surrogate
            return self.bpe.encode_to_numpy(whole, disallowed_special=())
        return encode_bpe(self.bpe, text)

    def decode(self, ids) -> str:
        """The text of a sequence of ids."""
        if self.kind == "byte":
            return bytes(ids).decode(errors="replace")
        if self.kind == "char":
            return "".join(self.spec["itos"][i] for i in ids)
        if self.kind == "gpt2":
            return self.bpe.decode(ids)
        return self.bpe.decode(list(ids), skip_special_tokens=False)

    def start_ids(self) -> list[int]:
        """The ids that a sample without a prompt starts with: end-of-text, or else a newline."""
        if self.eot is not None:
            return [self.eot]
        return list(self.encode("\n")) or [0]


def gpt2_bpe():
    try:
        import tiktoken  # here, so that a machine with prepared shards can train without it

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network throws
        problem = f"tokenizer gpt2: tiktoken cannot get its vocabulary ({type(error).__name__})"
        raise UserError(f"{problem}; go online once, or set TIKTOKEN_CACHE_DIR") from None


# -----------------------------------------------------------------------------
# A BPE of your own


def pick_tokenizer(name: str, out: Path) -> Tokenizer | None:
    """
    The tokenizer that --tokenizer names. None for a bpe:N that must still be trained: the folder
    `out` holds none from an earlier launch of the same preparation. Raises UserError.
    """
    kind, _, size = name.partition(":")
    if kind != "bpe":
        spec = dict(kind=name) if name in ("gpt2", "byte") else read_bpe(Path(name))
        return Tokenizer(spec, name)
    if not (size.isdecimal() and BYTE_VOCAB < int(size) <= MOST_IDS):
        raise UserError(f"--tokenizer={name}: N must be a whole number from 257 to {MOST_IDS:,}")
    path = out / "tokenizer.json"
    if path.exists() and (tokenizer := Tokenizer(read_bpe(path), path)).vocab == int(size):
        return tokenizer
    return None


def read_bpe(path: Path, hint: str = f"give one of {TOKENIZERS}") -> dict:
    """The spec of a tokenizer.json. Raises UserError, which ends in `hint`."""
    try:
        return dict(kind="bpe", json=path.read_bytes().decode(errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {hint}") from None


def load_bpe(json: str, path: str | Path):
    """The library's tokenizer, the number of its ids, and that of end-of-text. Raises UserError."""
    # writer.py has threads of its own; after the library has used its own, each fork would warn
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers  # here, for the same reason as tiktoken

        bpe = tokenizers.Tokenizer.from_str(json)
    except Exception as error:  # the library raises no other
        raise UserError(f"{path}: the tokenizers library refuses it ({error})") from None
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True  # as text: no document can hold an end-of-text
    vocab = 1 + max(bpe.get_vocab().values(), default=0)
    special = {t.content: id for id, t in bpe.get_added_tokens_decoder().items() if t.special}
    ends = [special[name] for name in ENDS if name in special]
    if vocab > MOST_IDS:
        raise UserError(f"{path}: has {vocab:,} ids, shards hold {MOST_IDS:,} at most")
    if not ends:
        raise UserError(f"{path}: has none of the special tokens {', '.join(ENDS)}")
    if bpe.decode(list(encode_bpe(bpe, PROBE)), skip_special_tokens=False) != PROBE:
        raise UserError(f"{path}: text does not come back as it was; choose another")
    return bpe, vocab, ends[0]


def encode_bpe(bpe, text: str) -> np.ndarray:
    # "fast" skips working out where in the text each token is
    chunks = ([chunk] for chunk in split_long(text))
    ids = (bpe.encode_batch_fast(chunk, add_special_tokens=False)[0].ids for chunk in chunks)
    return np.fromiter(chain.from_iterable(ids), dtype=np.uint16)


def split_long(text: str) -> list[str]:
    """
    The text in chunks. Each ends with a word, so that no token crosses into the next one. Whole
    texts would take too much memory: the library needs some hundred bytes per character that it is
    given at once. A lone surrogate, which UTF-8 cannot hold, becomes a question mark.
    """
    return CHUNK.findall(text.encode(errors="replace").decode())


def train_bpe(name: str, texts: Iterable[str | None], skip: int = 0, total: int = 0) -> Tokenizer:
    """
    The tokenizer bpe:N: a byte-level BPE as GPT-2's (Radford et al. 2019), made from a sample of
    these texts (see sample_text). Raises UserError where they are too short or too varied for N
    ids.
    """
    from tokenizers import ByteLevelBPETokenizer

    say(f"tokenizer: training {name} on at most {SAMPLE_MB} MB of the text")
    bpe, vocab, bars = ByteLevelBPETokenizer(), int(name.partition(":")[2]), sys.stderr.isatty()
    sample = list(sample_text(texts, skip, total))
    # until it is done, the library lets no Python handler run: Ctrl-C ends the process at once
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    bpe.train_from_iterator(sample, vocab, show_progress=bars, special_tokens=[ENDS[0]])
    signal.signal(signal.SIGINT, handler)
    if (ids := bpe.get_vocab_size()) < vocab:
        hint = "a smaller N, less validation, or more text"
        raise UserError(f"{name}: the training text suffices for only {ids} ids; {hint}")
    return Tokenizer(dict(kind="bpe", json=bpe.to_str()))


def sample_text(texts: Iterable[str | None], skip: int, total: int) -> Iterator[str]:
    """
    The texts after the first `skip` bytes, which are validation's. Where there are more than
    SAMPLE_MB: chunks spread evenly over them, or the first SAMPLE_MB if `total`, the number of
    bytes, is not known.
    """
    most = SAMPLE_MB * 1_000_000
    read, taken, every = -skip, 0, 1 + total // most
    for chunk in (chunk for text in texts if text for chunk in split_long(text)):
        size = len(chunk.encode())
        read += size
        if taken * every < read:
            yield chunk
            taken += size
        if read > every * most:
            return


# -----------------------------------------------------------------------------
# From files of other programs


def read_meta(path: Path) -> tuple[int, dict]:
    """
    The vocabulary of nanoGPT's meta.pkl and the tokenizer's spec: its table of characters, or of
    kind unknown without one. A pickle can run code when it is loaded: this reads plain containers
    and refuses the rest.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    try:
        with open(path, "rb") as file:
            meta = PlainUnpickler(file).load()
        vocab, itos = meta["vocab_size"], meta.get("itos", {})
        texts = [itos[i] for i in range(min(vocab, len(itos)))]
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path}: no plain dictionary ({error}); prepare it again") from None
    if len(texts) == vocab and all(isinstance(text, str) for text in texts):
        return vocab, dict(kind="char", itos=texts)
    return vocab, dict(kind="unknown")  # a tokenizer that we do not know
