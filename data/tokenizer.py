"""
Convert text to token ids and back, with GPT-2's BPE, your own BPE, bytes, or nanoGPT's character
tables.

A `spec` is the dict that describes a tokenizer in datasets and checkpoints. Its `kind` is gpt2,
bpe, byte, char or unknown. A bpe spec also has `json`, the text of a tokenizer.json from the
`tokenizers` library; a char spec has `itos`, the list of characters, or of words, by id.
"""

import hashlib
import json
import pickle
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.console import UserError, one_line, say
from common.files import names_in

GPT2_VOCAB = 50257  # including end-of-text, the last id
# SHA-256 of GPT-2's vocabulary: see identity()
GPT2_SHA256 = "855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2"
BYTE_VOCAB = 256
MOST_IDS = 65_536  # shards store ids as uint16
SAMPLE_MB = 50  # text to train bpe:N on, at most
TOKENIZERS = f"byte, gpt2, a tokenizer.json, or bpe:N to train N ids on up to {SAMPLE_MB} MB"
MAKE_JSON = "transformers writes one: AutoTokenizer.from_pretrained('IN').save_pretrained('OUT')"
# What tokenizers call end-of-text. Those that we train use the last name. It comes last because
# transformers adds it, as one more id, to the tokenizer of a GPT-2 with another name
ENDS = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")
# A text in two pieces, as split_long() makes them. A tokenizer changes it if it normalizes letters,
# quotes, spaces or line ends, if it adds a space to each piece, or if it cannot encode rare
# characters.
PROBE = [
    "A b\r\n  \u00c9e\u0301 \ufb01",
    "\n\u6f22\U0001f642\U0010fffd``\t<|endoftext|> ",
]
# Characters with every byte that UTF-8 has
EVERY_BYTE = [
    chr(n) for n in (*range(256), *range(256, 0xD800, 64), *range(0xE000, 0x110000, 4096))
]
# A chunk of split_long(): 200,000 characters plus the rest of the word, or all that is left
CHUNK = re.compile(r"(?s).{200000}.*?\S(?=[ \n])|.+")
# The time to train a BPE grows with the square of a word's length. DNA in one line is one word.
LONG_WORD = re.compile(r"(\S{1000}|\s{1000})")


class Tokenizer:
    """
    Encode and decode with the tokenizer that a spec describes. For bytes, end-of-text is byte 0,
    which no text needs; char has no end-of-text, and takes the longest words that fit. Raises
    UserError for an unknown kind, or if tiktoken cannot load its vocabulary.

    vocab   number of ids
    eot     id of end-of-text, or None
    """

    def __init__(self, spec: dict, path: str | Path = "tokenizer.json"):
        """Set up the tokenizer of a spec. `path` is where a bpe spec came from, for messages."""
        self.spec, self.kind = spec, spec.get("kind")
        self.eot: Any  # an int or None
        if self.kind == "byte":
            self.vocab, self.eot = BYTE_VOCAB, 0
        elif self.kind == "char":
            self.vocab, self.eot = len(spec["itos"]), None
            self.stoi = {piece: i for i, piece in enumerate(spec["itos"])}
            longest = sorted(filter(None, spec["itos"]), key=len, reverse=True)
            self.pieces = re.compile("|".join(map(re.escape, longest)))
        elif self.kind == "gpt2":
            self.bpe = gpt2_bpe()
            self.vocab, self.eot = self.bpe.n_vocab, self.bpe.eot_token
        elif self.kind == "bpe":
            self.bpe, self.vocab, self.eot = load_bpe(spec["json"], path)
        else:
            raise UserError(
                "tokenizer: unknown; copy the dataset's meta.pkl beside the checkpoint; if the ids "
                "are not text, see docs/data.md"
            )

    def encode(self, text: str) -> np.ndarray | list[int]:
        """
        Return the ids of a text, without special tokens. Characters that char does not know are
        left out. Threads may call this concurrently.
        """
        if self.kind == "byte":
            content = text.replace("\0", "").encode(errors="replace")
            return np.frombuffer(content, dtype=np.uint8)
        if self.kind == "char":
            return [self.stoi[piece] for piece in self.pieces.findall(text)]
        if self.kind == "gpt2":
            whole = text.encode(errors="replace").decode()  # UTF-8 cannot hold a lone surrogate
            return self.bpe.encode_to_numpy(whole, disallowed_special=())
        return encode_bpe(self.bpe, text)

    def decode(self, ids) -> str:
        """Return the text of a sequence of ids."""
        if self.kind == "byte":
            return bytes(ids).decode(errors="replace")
        if self.kind == "char":
            return "".join(self.spec["itos"][i] for i in ids)
        if self.kind == "gpt2":
            return self.bpe.decode(ids)
        return self.bpe.decode(list(ids), skip_special_tokens=False)

    def start_ids(self) -> list[int]:
        """Return the ids that start a sample without a prompt: end-of-text, or else a newline."""
        if self.eot is not None:
            return [self.eot]
        return list(self.encode("\n")) or [0]


def gpt2_bpe():
    try:
        import tiktoken  # lazily, so that training on prepared shards works without it

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # network errors come in many types
        problem = f"tokenizer gpt2: tiktoken cannot get its vocabulary ({type(error).__name__})"
        ways = "go online once, or set TIKTOKEN_CACHE_DIR to its cache"
        raise UserError(f"{problem}; {ways}") from None


# -----------------------------------------------------------------------------
# A BPE of your own


def pick_tokenizer(name: str, out: Path) -> Tokenizer | None:
    """
    Return the tokenizer that --tokenizer names. For bpe:N, return the one in the folder `out`, or
    None if it has none of that size yet, so that one must be trained. Raises UserError.
    """
    kind, _, size = name.partition(":")
    if kind != "bpe":
        if name in ("gpt2", "byte"):
            return Tokenizer(dict(kind=name))
        # Shells do not expand the ~ in --tokenizer=~/x.
        tokenizer = Tokenizer(read_bpe(Path(name).expanduser()), name)
        check_lossless(tokenizer, name)
        return tokenizer
    if not (size.isdecimal() and BYTE_VOCAB < int(size) <= MOST_IDS):
        raise UserError(f"--tokenizer={name}: N must be a whole number from 257 to {MOST_IDS:,}")
    path = out / "tokenizer.json"
    is_there = path.name in names_in(out)  # raises OSError, instead of training another one
    if is_there and (tokenizer := Tokenizer(read_bpe(path), path)).vocab == int(size):
        return tokenizer
    return None


def check_lossless(tokenizer: Tokenizer, name: str) -> None:
    """
    Raise UserError if a BPE changes PROBE or the spaces around an added token, or loses a byte.
    Sampling with other people's weights does not need this check.
    """
    added = tokenizer.bpe.get_added_tokens_decoder().values()
    around = ([f"a  {token.content}  b"] for token in added)
    for pieces in (PROBE, *around, *([character] for character in EVERY_BYTE)):
        text, ids = "".join(pieces), chain.from_iterable(map(tokenizer.encode, pieces))
        if (back := tokenizer.decode(ids)) != text:
            hint = "choose another tokenizer, such as --tokenizer=gpt2 or bpe:N, or a copy of it"
            hint += ' with "normalizer": null (to fine-tune, put it beside the weights too)'
            raise UserError(f"--tokenizer={name}: changes the text {text!a} to {back!a}; {hint}")


def read_bpe(path: Path, hint: str = f"give one of {TOKENIZERS}") -> dict:
    """
    Read a tokenizer.json, or the tokenizer in a Hugging Face folder, into a spec. Raises UserError,
    with `hint` at the end.
    """
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        return dict(kind="bpe", json=file.read_bytes().decode(errors="replace"))
    except OSError as error:
        raise UserError(f"{one_line(error)}; {hint}") from None


def load_bpe(content: str, path: str | Path):
    """Return the library's tokenizer, its number of ids, and end-of-text's id. Raises UserError."""
    try:
        import tokenizers  # lazily, as tiktoken above

        bpe = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more specific
        problem = f"the tokenizers library cannot read it ({one_line(error)})"
        raise UserError(f"{path}: {problem}; give a tokenizer.json ({MAKE_JSON})") from None
    bpe.no_truncation()
    bpe.no_padding()
    if hasattr(bpe.model, "dropout"):
        bpe.model.dropout = None  # dropout would make each preparation's tokens different
    bpe.encode_special_tokens = True  # encode <|endoftext|> in a document as plain text
    special = {t.content: id for id, t in bpe.get_added_tokens_decoder().items() if t.special}
    ends = [special[name] for name in ENDS if name in special]
    # no text has a special token but end-of-text, and a model may lack those that were added
    used = {id for name, id in bpe.get_vocab().items() if name not in special} | {*ends[:1]}
    vocab = 1 + max(used, default=0)
    if vocab > MOST_IDS:
        problem = f"{path}: has {vocab:,} ids, more than 16-bit tokens allow ({MOST_IDS:,})"
        raise UserError(f"{problem}; give another tokenizer, such as bpe:32768")
    if not ends:
        raise UserError(f"{path}: has no special token that ends a text, such as {', '.join(ENDS)}")
    return bpe, vocab, ends[0]


def encode_bpe(bpe, text: str) -> np.ndarray:
    # The fast variant skips computing where in the text each token lies.
    chunks = ([chunk] for chunk in split_long(text))
    ids = (bpe.encode_batch_fast(chunk, add_special_tokens=False)[0].ids for chunk in chunks)
    return np.fromiter(chain.from_iterable(ids), dtype=np.uint16)


def split_long(text: str) -> list[str]:
    """
    Split a text into chunks that end with a word, so that no token spans two chunks. The library
    needs about a hundred bytes per character of each call, too much for whole texts. A lone
    surrogate, which UTF-8 cannot hold, becomes a question mark.
    """
    return CHUNK.findall(text.encode(errors="replace").decode())


def train_bpe(name: str, texts: Iterable[str]) -> Tokenizer:
    """
    Train the tokenizer bpe:N, a byte-level BPE like GPT-2's (Radford et al. 2019), on a sample of
    text. Raises UserError if the sample yields fewer than N ids.
    """
    from tokenizers import ByteLevelBPETokenizer

    say(f"tokenizer: training {name} on at most {SAMPLE_MB} MB of the text")
    bpe, vocab = ByteLevelBPETokenizer(), int(name.partition(":")[2])
    sample = [part for text in texts for part in LONG_WORD.split(text)]
    bpe.train_from_iterator(sample, vocab, show_progress=False, special_tokens=[ENDS[-1]])
    if (ids := bpe.get_vocab_size()) < vocab:
        problem = f"the training text is enough for only {ids} ids"
        raise UserError(f"{name}: {problem}; give a smaller N, or more text")
    return Tokenizer(dict(kind="bpe", json=bpe.to_str()))


# -----------------------------------------------------------------------------
# The tokenizer of weights


def same_tokenizer(theirs: dict, ours: dict) -> bool:
    """
    Return whether two specs give a text the same ids, as far as is known. Tokens that were added to
    a finished tokenizer do not count, because hardly any text contains them.
    """
    return "unknown" in (theirs["kind"], ours["kind"]) or identity(theirs) == identity(ours)


def identity(spec: dict) -> dict:
    """
    Return what identifies a tokenizer: its kind, its tokens, and how it changes a text and cuts it
    into words. Raises UserError.
    """
    if spec["kind"] != "bpe":
        return spec
    try:
        content = json.loads(spec["json"])
        vocab = content["model"]["vocab"]
    except (ValueError, LookupError, TypeError):
        problem = "tokenizer.json: is not a file of the tokenizers library"
        raise UserError(f"{problem}; download or copy it again") from None
    digest = hashlib.sha256(json.dumps(vocab, sort_keys=True).encode()).hexdigest()
    parts = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    words = json.loads(parts, object_hook=without_defaults)
    if digest == GPT2_SHA256 and words == [None, dict(type="ByteLevel")]:
        return dict(kind="gpt2")
    return dict(kind="bpe", sha256=digest, words=words)


def without_defaults(part: dict) -> dict:
    """
    Leave out of a part of a tokenizer.json what older files lack, what changes no ids, and the
    space before a text, with which check_lossless() lets no dataset be made.
    """
    same = ("trim_offsets", "add_prefix_space")
    return {k: v for k, v in part.items() if k not in same and (k, v) != ("use_regex", True)}


# -----------------------------------------------------------------------------
# nanoGPT's meta.pkl


def read_meta(path: Path) -> tuple[int, dict]:
    """
    Read the vocabulary size and the tokenizer's spec from nanoGPT's meta.pkl. The spec is of kind
    char if the file has a character table, else unknown. Loading a pickle can run code, so this
    accepts plain containers only. Raises UserError.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    try:
        with open(path, "rb") as file:
            meta = PlainUnpickler(file).load()
        vocab, itos = meta["vocab_size"], meta.get("itos", {})
        texts = [itos[i] for i in range(min(vocab, len(itos)))]
    except Exception as error:  # a damaged pickle can raise anything
        problem = f"cannot be read as nanoGPT's ({one_line(error)})"
        raise UserError(f"{path}: {problem}; make it again with nanoGPT's prepare.py") from None
    if len(texts) == vocab and all(isinstance(text, str) for text in texts):
        return vocab, dict(kind="char", itos=texts)
    return vocab, dict(kind="unknown")  # a tokenizer that meta.pkl does not contain
