"""
Text to token ids and back: GPT-2's BPE, bytes, or nanoGPT's character tables.

A `spec` is what a dataset or a checkpoint says of its tokenizer. Its `kind` is gpt2, byte, char or
unknown; a char spec also has the table `itos`, a list of the characters by id.
"""

import pickle
from pathlib import Path

import numpy as np

from common.console import UserError
from common.files import plain_file

GPT2_VOCAB = 50257  # BPE tokens, end-of-text (the last id) included
BYTE_VOCAB = 256


class Tokenizer:
    """
    The tokenizer of a spec. Byte 0, which no text needs, is the byte tokenizer's end-of-text; char
    has none. Raises UserError for an unknown kind, and where tiktoken cannot get its vocabulary.

    vocab            the number of ids
    eot              the id of end-of-text, or None
    encode(text)     ids, as an array or a list; no special tokens; safe from many threads
    decode(ids)      text
    """

    def __init__(self, spec: dict):
        self.kind = spec.get("kind")
        if self.kind == "byte":
            self.vocab, self.eot = BYTE_VOCAB, 0
            self.encode = encode_bytes
            self.decode = lambda ids: bytes(ids).decode(errors="replace")
        elif self.kind == "char":
            itos = spec["itos"]
            stoi = {char: i for i, char in enumerate(itos)}
            self.vocab, self.eot = len(itos), None
            self.encode = lambda text: [stoi[char] for char in text if char in stoi]
            self.decode = lambda ids: "".join(itos[i] for i in ids)
        elif self.kind == "gpt2":
            bpe = gpt2_bpe()
            self.vocab, self.eot = bpe.n_vocab, bpe.eot_token
            self.encode = lambda text: bpe.encode_to_numpy(text, disallowed_special=())
            self.decode = bpe.decode
        else:
            raise UserError("tokenizer: unknown, so ids cannot become text")

    def prompt(self) -> list[int]:
        """What a sample from nothing starts with: end-of-text, or without one a new line."""
        if self.eot is not None:
            return [self.eot]
        return list(self.encode("\n")) or [0]


def encode_bytes(text: str) -> np.ndarray:
    content = text.replace("\0", "").encode(errors="replace")
    return np.frombuffer(content, dtype=np.uint8)


def gpt2_bpe():
    try:
        import tiktoken  # here, so that a machine with prepared shards can train without it

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network throws
        problem = f"tokenizer gpt2: tiktoken cannot get its vocabulary ({type(error).__name__})"
        raise UserError(f"{problem}; go online once, or set TIKTOKEN_CACHE_DIR") from None


def fits(spec, vocab: int) -> bool:
    """Whether `spec`, from a file that may hold anything, has a text for each id below `vocab`."""
    if not isinstance(spec, dict):
        return False
    kind, itos = spec.get("kind"), spec.get("itos")
    if kind == "gpt2":
        return vocab <= GPT2_VOCAB
    if kind == "byte":
        return vocab <= BYTE_VOCAB
    if kind == "char" and isinstance(itos, list) and len(itos) >= vocab:
        return all(isinstance(char, str) for char in itos)
    return False


def read_meta(path: Path) -> dict:
    """
    nanoGPT's meta.pkl. A pickle can run code when it is loaded: this reads plain containers and
    refuses the rest.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    try:
        with open(plain_file(path), "rb") as file:
            return dict(PlainUnpickler(file).load())
    except Exception as error:  # a damaged pickle can raise anything
        problem = f"{path}: refused, not a plain dictionary ({error})"
        raise UserError(f"{problem}; prepare the dataset again") from None
