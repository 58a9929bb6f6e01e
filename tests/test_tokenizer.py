"""
Train and use your own tokenizer: what it makes of any text, where it is stored, and that two
tokenizers are never mixed.
"""

import collections
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
from char_dataset import SHORT_RUN, train_short
from documents import (
    check_documents,
    documents,
    manifest_of,
    on_hub,
    stored,
    write_jsonl,
    write_parquet,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from program import Result, Run, flags, refused, run

from common.console import UserError
from data import tokenizer as tokenizer_module
from data.shards import open_dataset
from data.text import Source, divide
from data.tokenizer import Tokenizer, pick_tokenizer, same_tokenizer, split_long, train_bpe
from data.writer import sample_text

TEXT, FINEWEB = "data/prepare_text.py", "data/prepare_fineweb.py"
TEXTS = [text for text in documents(300, seed=3) if text]
# as large as the tests' models need
VOCAB = 300


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return train_bpe(f"bpe:{VOCAB}", TEXTS)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """Prepare a data folder with its own tokenizer, by running prepare_text.py."""
    return prepare_rows(tmp_path_factory.mktemp("mine"), TEXTS)


def prepare_rows(folder: Path, texts: list, tokenizer: str = f"bpe:{VOCAB}") -> Path:
    source = write_parquet(folder / "rows.parquet", texts)
    result = run(TEXT, source, f"--tokenizer={tokenizer}", f"--out={folder / 'data'}")
    assert (result.code, result.err) == (0, "")
    return folder / "data"


# -----------------------------------------------------------------------------
# Text to ids and back


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=40))
@example("<|endoftext|> in a text<|endoftext|>")
@example("\ud83d\ude42 \udfff\x00\x1c\x85\u2028\ufeff e\u0301 \u00e9 \u1100\u1161")
@example("  \r\n\t\n  a  b\n\n\n")
def test_the_ids_of_any_text_decode_to_it_and_do_not_include_end_of_text(own, text):
    """Turn a lone surrogate, which UTF-8 cannot hold, into a question mark."""
    ids = own.encode(text)
    assert own.decode(ids) == text.encode(errors="replace").decode()
    assert own.eot not in ids and all(0 <= i < VOCAB for i in ids)


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n \t", "  "])
def test_a_long_document_split_into_pieces_has_the_same_tokens(own, separator, monkeypatch):
    """Encode a text in more than a hundred pieces to the same ids as in one."""
    text = separator.join(" ".join(TEXTS[:40]).split(" ")) + separator
    whole = list(own.encode(text))
    pattern = tokenizer_module.CHUNK.pattern.replace("200000", "7")
    monkeypatch.setattr(tokenizer_module, "CHUNK", tokenizer_module.re.compile(pattern))
    assert len(split_long(text)) > 100 and "".join(split_long(text)) == text
    assert list(own.encode(text)) == whole


# -----------------------------------------------------------------------------
# Preparation


def test_a_data_folder_holds_its_tokenizer_and_tokens_that_decode_to_the_text(mine, own):
    manifest, content = manifest_of(mine), (mine / "tokenizer.json").read_bytes()
    assert (manifest["tokenizer"], manifest["vocab"]) == ("bpe", VOCAB)
    data = open_dataset(str(mine))
    assert data.tokenizer == dict(kind="bpe", json=content.decode()) and data.vocab == VOCAB
    texts = [Tokenizer(data.tokenizer).decode(stored(mine, split)) for split in ("val", "train")]
    check_documents(*(text.split("<|endoftext|>")[1:] for text in texts), TEXTS)


def test_a_tokenizer_is_not_trained_on_validation_text(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["xyxyxyxyxy " * 150, *TEXTS])  # the first row
    book = tmp_path / "book.txt"  # its end is for validation
    book.write_text("".join(TEXTS) + "\n\n" + "xyxyxyxyxy " * 50, "utf-8")
    flags = [f"--tokenizer=bpe:{VOCAB}", f"--out={tmp_path / 'out'}"]
    for command in (
        [TEXT, book, "--val_fraction=0.03"],
        [FINEWEB, "--dataset=org/name", "--val_fraction=0.01"],
    ):
        with on_hub(source):
            assert run(*command, *flags).code == 0
        content = json.loads((tmp_path / "out/tokenizer.json").read_text("utf-8"))
        vocab = content["model"]["vocab"]
        assert "\u0120alpha" in vocab and not [token for token in vocab if "xyxy" in token]
        shutil.rmtree(tmp_path / "out")


def test_a_tokenizer_is_trained_on_a_bounded_sample_from_the_whole_text(tmp_path, monkeypatch):
    """Sample several files, but all of a shorter text. Leave out what is held out."""
    monkeypatch.setattr("data.writer.SAMPLE_MB", 0.1)

    def sample(files: int, rows: int) -> collections.Counter:
        names = [tmp_path / f"{n}.jsonl" for n in range(files)]
        for n, name in enumerate(names):
            write_jsonl(name, ["abcdefgh"[8 * n // files] * 100] * rows)
        source = Source([*map(str, names)])
        # so small a fraction that only the first row is held out
        texts = sample_text(lambda place: divide(source, place, 1e-9, 1000), files)
        return collections.Counter(text[0] for text in texts)

    assert sample(files=8, rows=500) == dict.fromkeys("abcdefgh", 125)  # 0.4 MB
    assert sample(files=8, rows=120) == dict.fromkeys("abcdefgh", 119)  # each without its first row
    assert sample(files=1, rows=5000) == dict(a=1000)
    assert sample(files=80, rows=50) == dict.fromkeys("abcdefgh", 126)


def test_training_a_tokenizer_on_one_endless_word_is_not_slow():
    """Cut the word, because training on the whole word would take a hundred times as long."""
    text = "".join(random.Random(0).choices("ACGT", k=200_000))

    def seconds(texts: list[str]) -> float:
        began = time.process_time()
        train_bpe("bpe:300", texts)
        return time.process_time() - began

    short = seconds([text[at : at + 1000] for at in range(0, len(text), 1000)])
    assert seconds([text]) < 5 * short + 1


# -----------------------------------------------------------------------------
# Training with your own tokenizer


def train_on(dataset, out_dir, **options) -> Result:
    return run("train.py", *flags(**SHORT_RUN | dict(dataset=dataset, out_dir=out_dir) | options))


def test_a_run_with_its_own_tokenizer_trains_resumes_samples_and_is_fine_tuned(mine, tmp_path):
    train_short(mine, tmp_path / "run", max_iters=4, sample_tokens=5)
    train_short(mine, tmp_path / "run", init_from="resume", max_iters=6)
    state = Run(tmp_path / "run").state(6)
    assert state["tokenizer"] == dict(kind="bpe", json=(mine / "tokenizer.json").read_text("utf-8"))
    assert state["vocab"] == VOCAB
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")  # a sample needs no data folder
    flags = [f"--out_dir={tmp_path / 'elsewhere'}", "--start=alpha<|endoftext|> na\u00efve"]
    result = run("sample.py", *flags, "--num_samples=2", "--max_new_tokens=20")
    assert result.code == 0 and result.out.startswith("alpha<|endoftext|> na\u00efve")
    train_short(mine, tmp_path / "tuned", init_from=tmp_path / "run", max_iters=2)


@pytest.mark.parametrize("tokenizer", [f"bpe:{VOCAB}", "byte"])
def test_resuming_or_fine_tuning_with_another_tokenizer_is_refused(tokenizer, mine, tmp_path):
    another = prepare_rows(tmp_path, [text[::-1] for text in TEXTS], tokenizer)
    train_short(mine, tmp_path / "run", max_iters=1)
    for folder, weights in (("run", "resume"), ("new", tmp_path / "run")):
        result = train_on(another, tmp_path / folder, init_from=weights)
        refused(result, f"a different tokenizer ({tokenizer.partition(':')[0]})")


DIGITS = {"type": "Digits", "individual_digits": True}
CUTS = [  # a change of a tokenizer.json, and whether a text has the same ids
    (lambda c: c["pre_tokenizer"].pop("use_regex"), True),  # as in older files
    (lambda c: c["added_tokens"].append(SWALLOWS), True),
    (lambda c: c["pre_tokenizer"].update(use_regex=False), False),
    (
        lambda c: c.update(pre_tokenizer=sequence("pretokenizers", DIGITS, c["pre_tokenizer"])),
        False,
    ),
    (lambda c: c.update(normalizer={"type": "Lowercase"}), False),
]


def sequence(kind: str, *parts: dict) -> dict:
    return {"type": "Sequence", kind: parts}


@pytest.mark.parametrize("change, same", CUTS)
def test_tokenizers_that_cut_a_text_into_other_words_are_different(change, same):
    ours, theirs = (dict(kind="bpe", json=edited(how)) for how in (lambda c: None, change))
    assert same_tokenizer(ours, theirs) == same


def test_a_data_folder_that_has_no_tokenizer_yet_is_reported_as_unfinished(mine, tmp_path):
    begun = manifest_of(mine) | dict(shards=[], complete=False)
    (tmp_path / "manifest.json").write_text(json.dumps(begun), "utf-8")
    refused(train_on(tmp_path, tmp_path / "run"), "repeat the command that prepares it")


def test_training_works_without_the_tokenizers_library(mine, tmp_path, monkeypatch):
    """Warn on a resume that there are no samples. The checkpoint still holds the tokenizer."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    train_short(mine, tmp_path / "run", max_iters=1)
    resumed = train_short(mine, tmp_path / "run", max_iters=2, init_from="resume", sample_tokens=3)
    assert "tokenizer.json: the tokenizers library" in resumed.err
    assert Run(tmp_path / "run").state(2)["tokenizer"] == open_dataset(str(mine)).tokenizer


# -----------------------------------------------------------------------------
# Bad input: one line, exit code 1, nothing left behind


@pytest.mark.parametrize(
    "name, message",
    [
        ("bpe:256", "from 257 to 65,536"),
        ("bpe:60000", "or more text"),
        ("gtp2", "give one of byte, gpt2, "),
    ],
)
def test_a_tokenizer_that_cannot_be_read_or_trained_is_refused_and_leaves_no_folder(
    tmp_path, name, message
):
    source, out = write_parquet(tmp_path / "a.parquet", TEXTS), tmp_path / "out"
    flags = [f"--tokenizer={name}", f"--out={out}"]
    for command in ([TEXT, source], [FINEWEB, "--dataset=org/name", "--val_fraction=0.1"]):
        with on_hub(source):
            result = run(*command, *flags)
        refused(result, message)
        # all others are refused before text is read
        assert bool(result.out) == (name == "bpe:60000") and not out.exists()


def edited(change) -> str:
    content = json.loads(train_bpe("bpe:257", TEXTS).spec["json"])
    change(content)
    return json.dumps(content)


def many_ids(content: dict) -> None:
    content["model"]["vocab"] |= {f"token{i}": i for i in range(257, 65_537)}


def spell_with_spaces_before(content: dict) -> None:
    """Put a space before a text, as Llama 2's tokenizer does, and take the first one off again."""
    after = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content["normalizer"] = {"type": "Prepend", "prepend": " "}
    content["decoder"] = sequence("decoders", content["decoder"], after)


SWALLOWS = dict(id=257, content="<user>", lstrip=True, rstrip=True, single_word=False)
SWALLOWS |= dict(normalized=False, special=False)
SPACES = dict(type="Replace", pattern={"Regex": " {2,}"}, content=" ")
NORMALIZERS = [*(dict(type=name) for name in ("NFC", "NFD", "Lowercase", "Nmt")), SPACES]
TOKENIZER_FILES = [  # a change of a tokenizer.json, words of the refusal
    (lambda c: c.clear(), "cannot read it"),
    (many_ids, "65,537 ids"),
    (lambda c: c["added_tokens"].clear(), "<|endoftext|>"),
    (lambda c: c["model"]["vocab"].pop("ó"), "bpe:N"),
    (spell_with_spaces_before, "bpe:N"),
    (lambda c: c.update(decoder=None), "changes the text"),
    (lambda c: c["added_tokens"].append(SWALLOWS), "changes the text 'a  <user>  b'"),
    *((lambda c, n=n: c.update(normalizer=n), "changes the text") for n in NORMALIZERS),
]


@pytest.mark.parametrize("change, words", TOKENIZER_FILES)
def test_a_tokenizer_json_that_cannot_be_read_or_changes_text_is_refused(change, words, tmp_path):
    """It loses text, has more ids than two bytes hold, or ends no text."""
    path = tmp_path / "tokenizer.json"
    path.write_text(edited(change), "utf-8")
    with pytest.raises(UserError) as error:
        pick_tokenizer(str(path), tmp_path)
    assert str(path) in str(error.value) and words in str(error.value)


def test_a_tokenizer_json_may_lack_the_13_bytes_that_no_utf8_contains(tmp_path):
    """GPT-NeoX's, Pythia's and OLMo's lack them."""
    path = tmp_path / "tokenizer.json"
    absent = [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    path.write_text(edited(lambda c: [c["model"]["vocab"].pop(name) for name in absent]), "utf-8")
    prepare_rows(tmp_path, TEXTS, path)


def test_a_tokenizer_json_may_rename_end_of_text_and_its_truncation_and_dropout_are_ignored(own):
    """transformers adds <|endoftext|> to the tokenizer of a GPT-2 that ends texts otherwise."""
    content = json.loads(own.spec["json"])
    content["added_tokens"][0]["content"] = "</s>"
    content["model"]["vocab"]["</s>"] = content["model"]["vocab"].pop("<|endoftext|>")
    content["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    content["model"]["dropout"] = 0.9
    ids = list(own.encode(TEXTS[0]))
    added = dict(content["added_tokens"][0], content="<|endoftext|>", id=own.vocab)
    for more in ([], [added]):
        content["added_tokens"] += more
        theirs = Tokenizer(dict(kind="bpe", json=json.dumps(content)))
        assert (theirs.eot, theirs.vocab) == (own.eot, own.vocab)
        assert list(theirs.encode(TEXTS[0])) == ids and len(ids) > 4


def test_a_folder_whose_tokenizer_is_missing_or_changed_is_refused(mine, tmp_path):
    """Train on it only with the tokenizer, and prepare on only with the same tokenizer."""
    folder = shutil.copytree(mine, tmp_path / "data")
    with open(folder / "tokenizer.json", "a") as file:
        file.write("\n")
    flags = [mine.parent / "rows.parquet", f"--out={folder}", f"--tokenizer=bpe:{VOCAB}"]
    refused(run(TEXT, *flags), "(tokenizer_sha256); give another --out")
    (folder / "tokenizer.json").unlink()
    refused(train_on(folder, tmp_path / "run"), "tokenizer.json: ", "restore it, or prepare")


@pytest.mark.parametrize("name", ["out/tokenizer.json", "bpe:300", "byte"])
def test_a_users_tokenizer_json_in_the_output_folder_is_never_overwritten_or_deleted(
    name, own, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("out/tokenizer.json").write_text(own.spec["json"], "utf-8")
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    refused(run(TEXT, source, f"--tokenizer={name}", "--out=out"), "give another --out")
    assert os.listdir("out") == ["tokenizer.json"]
    assert Path("out/tokenizer.json").read_text("utf-8") == own.spec["json"]
