"""
Text to token ids and back: GPT-2's BPE, bytes, or nanoGPT's character tables.
"""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.console import UserError

GPT2_VOCAB = 50257  # BPE tokens, end-of-text (the last id) included


class Tokenizer:
    """
    `spec` is what a dataset or a checkpoint says of its tokenizer: kind gpt2 | byte | char, and for
    char its table `itos`. Byte 0, which no text needs, is the byte tokenizer's end-of-text. Raises
    UserError where tiktoken cannot get its vocabulary.
    """

    encode: Callable[
        [str], np.ndarray | list[int]
    ]  # plain text, no special tokens; safe to call from many threads
    decode: Callable[[list[int]], str]

    def __init__(self, spec: dict):
        self.kind = spec["kind"]
        if self.kind == "byte":
            self.vocab, self.eot = 256, 0
            self.encode = lambda text: np.frombuffer(
                text.replace("\0", "").encode(errors="replace"), dtype=np.uint8
            )
            self.decode = lambda ids: bytes(ids).decode(errors="replace")
        elif self.kind == "char":
            itos, stoi = spec["itos"], {char: i for i, char in enumerate(spec["itos"])}
            self.vocab, self.eot = len(itos), None
            self.encode = lambda text: [stoi[char] for char in text if char in stoi]
            self.decode = lambda ids: "".join(itos[i] for i in ids)
        else:
            bpe = gpt2_bpe()
            self.vocab, self.eot = bpe.n_vocab, bpe.eot_token
            self.encode = lambda text: bpe.encode_to_numpy(text, disallowed_special=())
            self.decode = bpe.decode

    def prompt(self) -> list[int]:
        """What a sample from nothing starts with: the end of the text before, or a new line."""
        return [self.eot] if self.eot is not None else list(self.encode("\n")) or [0]


def gpt2_bpe():
    try:
        import tiktoken  # here, so that a machine with prepared shards can train without it

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network throws
        raise UserError(
            f"tokenizer gpt2: tiktoken cannot get its vocabulary ({type(error).__name__}); connect to the internet once, "
            "or set TIKTOKEN_CACHE_DIR to a folder that holds it"
        ) from None


def read_meta(path: Path) -> dict:
    """
    nanoGPT's meta.pkl. A pickle can run code when it is loaded: this reads plain containers and
    refuses the rest.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    try:
        with open(path, "rb") as file:
            return dict(PlainUnpickler(file).load())
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path}: refused, not a plain dictionary ({error}); prepare the dataset again"
        ) from None
