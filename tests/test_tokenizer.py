"""
A tokenizer of one's own: what it makes of any text, where it comes from, and that two are never
mixed.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from documents import check_documents, documents, write_jsonl, write_parquet
from helpers import flags as all_flags
from helpers import full_disk_at, load, needs_signals, run_here, start_process
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sample
import train
from common.console import RunError, UserError
from data import prepare_fineweb, prepare_text
from data import tokenizer as tokenizer_module
from data.shards import open_dataset, read_folder
from data.tokenizer import Tokenizer, split_long, train_bpe
from data.writer import Plan, prepare

TEXTS = [text for text in documents(300, seed=3) if text]
OTHER_TEXTS = [text[::-1] for text in TEXTS]
# as large as the models of tests need it
VOCAB = 300


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return train_bpe(f"bpe:{VOCAB}", TEXTS)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A data folder with a tokenizer of its own, prepared by the command."""
    return prepare_rows(tmp_path_factory.mktemp("mine"), TEXTS)


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> Path:
    """The same from other text: a tokenizer of as many ids."""
    return prepare_rows(tmp_path_factory.mktemp("another"), OTHER_TEXTS)


def prepare_rows(folder: Path, texts: list, tokenizer: str = f"bpe:{VOCAB}") -> Path:
    source = write_parquet(folder / "rows.parquet", texts)
    flags = [str(source), f"--tokenizer={tokenizer}", f"--out={folder / 'data'}", "--workers=1"]
    assert prepare_text.main(flags) is None
    return folder / "data"


def tokens_of(folder: Path, split: str) -> list[int]:
    """Read without any of our code: 1024 bytes of header, then uint16."""
    files = sorted(folder.glob(f"{split}_*.bin"))
    return [int(i) for file in files for i in np.fromfile(file, dtype="<u2", offset=1024)]


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


# -----------------------------------------------------------------------------
# Text to ids and back


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=40))
@example("<|endoftext|> in a text<|endoftext|>")
@example("\ud83d\ude42 \udfff\x00\x1c\x85\u2028\ufeff e\u0301 \u00e9 \u1100\u1161")
@example("  \r\n\t\n  a  b\n\n\n")
def test_any_text_comes_back_and_holds_no_end_of_text(own, text):
    """A lone surrogate, which UTF-8 cannot hold, comes back as a question mark, as from bytes."""
    ids = own.encode(text)
    assert own.decode(ids) == text.encode(errors="replace").decode()
    assert own.eot not in ids and all(0 <= i < VOCAB for i in ids)


def test_end_of_text_has_an_id_and_any_byte_another(own):
    assert own.decode([own.eot]) == "<|endoftext|>"
    smallest = train_bpe("bpe:257", TEXTS)
    assert len(smallest.encode("na\u00efve")) == 6  # its UTF-8 bytes


def test_gpt2s_tokens_of_a_lone_surrogate_are_a_question_marks():
    """As jsonl of the web has them; tiktoken alone would end the preparation."""
    try:
        gpt2 = Tokenizer({"kind": "gpt2"})
    except UserError as error:
        pytest.skip(str(error))
    assert list(gpt2.encode("a \ud83d b")) == list(gpt2.encode("a ? b"))


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n \t", "  "])
def test_a_long_document_is_the_same_in_pieces(own, separator, monkeypatch):
    """The library gets it in pieces, which must not show in the tokens."""
    text = separator.join(" ".join(TEXTS[:40]).split(" ")) + separator
    whole = list(own.encode(text))
    pattern = tokenizer_module.CHUNK.pattern.replace("200000", "7")
    monkeypatch.setattr(tokenizer_module, "CHUNK", tokenizer_module.re.compile(pattern))
    assert len(split_long(text)) > 100 and "".join(split_long(text)) == text
    assert list(own.encode(text)) == whole


# -----------------------------------------------------------------------------
# Preparation


def test_a_folder_holds_its_tokenizer_and_tokens_that_decode_to_the_text(mine, own):
    manifest, content = manifest_of(mine), (mine / "tokenizer.json").read_bytes()
    assert (manifest["tokenizer"], manifest["vocab"]) == ("bpe", VOCAB)
    data = open_dataset(str(mine))
    assert data.tokenizer == dict(kind="bpe", json=content.decode()) and data.vocab == VOCAB
    text = Tokenizer(data.tokenizer)
    splits = []
    for split in ("val", "train"):
        ids = tokens_of(mine, split)
        begins = [i for i, id in enumerate(ids) if id == manifest["eot"]]
        ends = [*begins[1:], len(ids)]
        splits.append([text.decode(ids[i + 1 : j]) for i, j in zip(begins, ends, strict=True)])
    check_documents(*splits, TEXTS)
    assert sum(map(len, splits)) == sum(shard["documents"] for shard in manifest["shards"])


def test_validation_text_trains_no_tokenizer(tmp_path):
    rows = ["xyxyxyxyxy " * 50] * 3 + TEXTS
    source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    book = tmp_path / "book.txt"  # its end is for validation
    book.write_text("".join(TEXTS) + "\n\n" + "xyxyxyxyxy " * 50, "utf-8")
    flags = ["--val_fraction=0.03", f"--tokenizer=bpe:{VOCAB}", f"--out={tmp_path / 'text'}"]
    assert prepare_text.main([str(book), *flags]) is None
    vocab = json.loads((tmp_path / "text/tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert "\u0120alpha" in vocab and not [token for token in vocab if "xyxy" in token]
    flags = ["--val_tokens=300", f"--tokenizer=bpe:{VOCAB}", f"--out={tmp_path / 'rows'}"]
    assert prepare_fineweb.main([f"--source={source}", *flags]) is None
    vocab = json.loads((tmp_path / "rows/tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert "\u0120alpha" in vocab and not [token for token in vocab if "xyxy" in token]


def test_the_sample_is_bounded_and_from_the_whole_text(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "SAMPLE_MB", 1)
    rows = [letter * 10_000 for letter in "abcdefgh" for _ in range(50)]  # 4 MB

    def sample(total: int) -> list[str]:
        return list(tokenizer_module.sample_text([None, "", *rows], 500_000, total))

    known, unknown = sample(total=4_000_000), sample(total=0)
    assert 0.6e6 < sum(map(len, known)) <= 1e6
    assert {text[0] for text in known} == set("bcdefgh")
    assert 1e6 <= sum(map(len, unknown)) <= 1.02e6 and unknown[0][0] == "b"


@needs_signals
@pytest.mark.slow
def test_ctrl_c_while_a_tokenizer_trains_ends_at_once(tmp_path):
    """The library would train on for minutes."""
    letters = np.random.default_rng(0).integers(97, 123, 20_000_000, dtype=np.uint8)
    letters[::9] = 32
    (tmp_path / "words.txt").write_bytes(letters.tobytes())
    out = tmp_path / "out"
    command = ["data/prepare_text.py", str(tmp_path / "words.txt"), f"--out={out}"]
    process = start_process(*command, "--tokenizer=bpe:60000")
    assert process.stdout.readline().startswith("tokenizer: training")
    time.sleep(4)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and time.monotonic() - began < 2
    assert not err and not out.exists()


def test_an_interrupted_preparation_goes_on_with_the_same_tokenizer(tmp_path, monkeypatch):
    straight, out = tmp_path / "straight", tmp_path / "out"
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    flags = [f"--source={source}", "--val_tokens=100", "--shard_tokens=1k", "--workers=1"]
    flags.append(f"--tokenizer=bpe:{VOCAB}")
    assert prepare_fineweb.main([*flags, f"--out={straight}"]) is None
    with full_disk_at("train_000003.bin"):
        with pytest.raises(RunError, match="the same command continues"):
            prepare_fineweb.main([*flags, f"--out={out}"])
    monkeypatch.setattr(prepare_fineweb, "train_bpe", None)  # is not needed again
    assert prepare_fineweb.main([*flags, f"--out={out}"]) is None
    for path in straight.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("shard_tokens", [7, 100, 10**6])
def test_every_byte_of_text_is_counted_in_one_shard(own, tmp_path, shard_tokens):
    def source(file, row):
        yield 0, 0, [None, "", "\ud83d", *TEXTS[:8]]

    for tokenizer in (own, Tokenizer({"kind": "byte"})):
        plan = Plan(tmp_path / tokenizer.kind, "s", [], tokenizer, 0, {}, val_tokens=1)
        plan.shard_tokens = shard_tokens
        with mock.patch("os.fsync"):
            shards = prepare(plan, source, 1)["shards"]
        assert sum(shard["bytes"] for shard in shards) == 1 + sum(
            len(text.encode()) for text in TEXTS[:8]
        )
        if tokenizer.kind == "byte":
            for shard in shards:
                assert shard["bytes"] == shard["tokens"] - shard["documents"]


def test_commands_end_with_what_there_is_and_how_to_train_on_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my novel.txt").write_text("caf\u00e9 \n" * 1000, "utf-8")
    assert prepare_text.main(["my novel.txt", "--tokenizer=bpe:260"]) is None
    lines = capsys.readouterr().out.splitlines()
    tokens = sum(len(tokens_of(Path("data/my novel"), split)) for split in ("train", "val"))
    command = "config/quickstart.py '--dataset=my novel' '--out_dir=out/quickstart_my novel'"
    assert lines[-3].startswith("data/my novel: 2 documents, ")
    assert lines[-2].startswith(f"text: 7,000 bytes, {7000 / tokens:.3f} bytes per token; ")
    # Windows' shells quote with "
    assert lines[-1].replace('"', "'") == f"next: python train.py {command}"
    # the same command again says the same
    assert prepare_text.main(["my novel.txt", "--tokenizer=bpe:260"]) is None
    again = capsys.readouterr().out.splitlines()
    assert again == ["data/my novel: complete, nothing to do", *lines[-3:]]


# -----------------------------------------------------------------------------
# Training with it


def test_training_sampling_and_resuming_as_with_gpt2(mine, tmp_path, script):
    run_here(mine, tmp_path / "run", max_iters=4, sample_tokens=5)
    run_here(mine, tmp_path / "run", init_from="resume", max_iters=6)
    state = load(tmp_path / "run", 6)
    assert state["tokenizer"] == dict(kind="bpe", json=(mine / "tokenizer.json").read_text("utf-8"))
    assert state["vocab"] == VOCAB
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")  # a sample needs no data folder
    flags = [f"--out_dir={tmp_path / 'elsewhere'}", "--start=alpha<|endoftext|> na\u00efve"]
    code, out, _ = script(sample.main, *flags, "--num_samples=2", "--max_new_tokens=20")
    assert code == 0 and out.startswith("alpha<|endoftext|> na\u00efve")
    run_here(mine, tmp_path / "tuned", init_from=tmp_path / "run", max_iters=2)


def test_two_tokenizers_are_never_mixed(mine, another, tmp_path, script):
    run_here(mine, tmp_path / "run", max_iters=1)
    for options in (dict(init_from="resume"), dict(init_from=tmp_path / "run")):
        out = tmp_path / "run" if options["init_from"] == "resume" else tmp_path / "new"
        code, _, err = run_flags(script, another, out, **options)
        assert code == 2 and len(err) == 1 and err[0].startswith("error: dataset: "), err
    assert "another tokenizer" in err[0]
    bytes_run = tmp_path / "bytes"
    run_here(prepare_rows(tmp_path, TEXTS, "byte"), bytes_run, max_iters=1)
    code, _, err = run_flags(script, mine, tmp_path / "new", init_from=bytes_run)
    assert code == 2 and len(err) == 1 and "another tokenizer (bpe)" in err[0]


def run_flags(script, dataset, out_dir, **options):
    return script(train.main, *all_flags(dataset, out_dir, **options))


def test_a_stream_takes_a_tokenizer_json_and_keeps_it(mine, another, tmp_path, script, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its shards go to data/streamed
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    options = dict(stream=True, data_workers=1, tokenizer=mine / "tokenizer.json")
    run_here(source, tmp_path / "run", max_iters=2, **options)
    state = load(tmp_path / "run", 2)
    assert state["tokenizer"] == open_dataset(str(mine)).tokenizer
    # without naming it again, as the dataset
    flags = [f"--out_dir={tmp_path / 'run'}", "--init_from=resume", "--compile=False"]
    flags += ["--device=cpu", "--dtype=float32", "--data_workers=1", "--eval_tokens=256"]
    assert train.main([*flags, "--batch_size=4", "--max_iters=3"]) == 0
    options |= dict(init_from="resume", max_iters=4, tokenizer=another / "tokenizer.json")
    code, _, err = run_flags(script, source, tmp_path / "run", **options)
    assert code == 2
    assert len(err) == 1
    assert "another tokenizer" in err[0]


def test_a_preparation_that_has_written_no_tokenizer_yet_is_read_as_unfinished(mine, tmp_path):
    """A stream looks at any moment."""
    manifest = json.loads((mine / "manifest.json").read_text("utf-8"))
    begun = json.dumps(manifest | dict(shards=[], complete=False))
    (tmp_path / "manifest.json").write_text(begun, "utf-8")
    assert len(read_folder(tmp_path).train) == 0
    with pytest.raises(UserError, match="unfinished"):
        open_dataset(str(tmp_path))


def test_a_tokenizer_for_a_folder_that_has_its_own_is_refused(mine, tmp_path, script):
    code, _, err = run_flags(script, mine, tmp_path / "run", tokenizer=mine / "tokenizer.json")
    assert code == 2 and len(err) == 1 and "tokenizer: a data folder has its own" in err[0]


def test_training_needs_no_tokenizers_library(mine, tmp_path, monkeypatch, capsys):
    """Prepared shards are enough; the checkpoint holds the tokenizer all the same."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    run_here(mine, tmp_path / "run", max_iters=1, sample_tokens=3)
    assert "no sample: tokenizer.json: the tokenizers library" in capsys.readouterr().err
    run_here(mine, tmp_path / "run", max_iters=2, init_from="resume")
    assert load(tmp_path / "run", 2)["tokenizer"] == open_dataset(str(mine)).tokenizer


# -----------------------------------------------------------------------------
# Bad input: one line, exit code 2, nothing left behind


@pytest.mark.parametrize(
    "name, message",
    [
        ("bpe:256", "N must be a whole number from 257 to 65,536"),
        ("bpe:65537", "N must be a whole number from 257 to 65,536"),
        ("bpe:abc", "N must be a whole number from 257 to 65,536"),
        ("bpe:", "N must be a whole number from 257 to 65,536"),
        ("bpe:60000", "or more text"),
        ("gtp2", "gtp2: No such file or directory; give one of byte, gpt2, "),
        (".", "; give one of byte, gpt2, "),
    ],
)
def test_a_tokenizer_that_there_is_not(tmp_path, script, name, message):
    source, out = write_parquet(tmp_path / "a.parquet", TEXTS), tmp_path / "out"
    flags = [f"--tokenizer={name}", f"--out={out}"]
    for main, files in (
        (prepare_text.main, [source]),
        (prepare_fineweb.main, [f"--source={source}", "--val_tokens=100"]),
    ):
        code, said, err = script(main, *files, *flags)
        assert code == 2 and len(err) == 1 and message in err[0] and not out.exists()
        assert bool(said) == (name == "bpe:60000")  # all others are refused before text is read


def edited(change) -> str:
    content = json.loads(train_bpe("bpe:257", TEXTS).spec["json"])
    change(content)
    return json.dumps(content)


def many_ids(content: dict) -> None:
    content["model"]["vocab"] |= {f"token{i}": i for i in range(257, 65_537)}


TOKENIZER_FILES = {
    "no JSON": ("{", "the tokenizers library refuses it"),
    "another JSON": ('{"vocab_size": 300}', "the tokenizers library refuses it"),
    "cut short": (lambda: edited(lambda c: None)[:2000], "the tokenizers library refuses it"),
    "no merges": (lambda: edited(lambda c: c["model"].pop("merges")), "library refuses it"),
    "65,537 ids": (lambda: edited(many_ids), "has 65,537 ids, shards hold 65,536 at most"),
    "no end-of-text": (
        lambda: edited(lambda c: c["added_tokens"].clear()),
        "has none of the special tokens <|endoftext|>, ",
    ),
    "lower case": (
        lambda: edited(lambda c: c.update(normalizer={"type": "Lowercase"})),
        "text does not come back as it was",
    ),
    "no decoder": (
        lambda: edited(lambda c: c.update(decoder=None)),
        "text does not come back as it was",
    ),
}


@pytest.mark.parametrize("content, message", TOKENIZER_FILES.values(), ids=TOKENIZER_FILES)
def test_a_tokenizer_json_that_cannot_be_used(tmp_path, script, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else content(), "utf-8")
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    flags = [f"--tokenizer={path}", f"--out={tmp_path / 'out'}"]
    code, _, err = script(prepare_text.main, source, *flags)
    assert code == 2 and len(err) == 1 and message in err[0] and f"{path}: " in err[0]
    assert not (tmp_path / "out").exists()


def test_other_names_of_end_of_text_and_settings_that_would_change_the_tokens(own, tmp_path):
    content = json.loads(own.spec["json"])
    content["added_tokens"][0]["content"] = "</s>"
    content["model"]["vocab"]["</s>"] = content["model"]["vocab"].pop("<|endoftext|>")
    content["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    theirs = Tokenizer(dict(kind="bpe", json=json.dumps(content)))
    assert theirs.eot == own.eot
    ids = list(own.encode(TEXTS[0]))
    assert list(theirs.encode(TEXTS[0])) == ids and len(ids) > 4


def test_a_folder_without_its_tokenizer_is_not_trained_on(mine, tmp_path, script):
    folder = shutil.copytree(mine, tmp_path / "data")
    (folder / "tokenizer.json").unlink()
    flags = [f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    code, _, err = script(train.main, *flags)
    message = "tokenizer.json: No such file or directory; restore it, or prepare it again"
    assert code == 2 and len(err) == 1 and message in err[0], err


def test_a_preparation_continues_with_no_other_tokenizer(mine, tmp_path, script):
    folder = shutil.copytree(mine, tmp_path / "data")
    content = (folder / "tokenizer.json").read_text("utf-8")
    (folder / "tokenizer.json").write_text(content + "\n", "utf-8")
    flags = [mine.parent / "rows.parquet", f"--out={folder}", f"--tokenizer=bpe:{VOCAB}"]
    code, _, err = script(prepare_text.main, *flags)
    assert code == 2 and len(err) == 1 and "other flags (tokenizer_sha256); choose" in err[0], err


def test_a_tokenizer_of_the_users_is_neither_overwritten_nor_deleted(own, tmp_path, script):
    path = tmp_path / "out/tokenizer.json"
    path.parent.mkdir()
    path.write_text(own.spec["json"], "utf-8")
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    for name in (path, "bpe:300", "bpe:280", "byte"):
        flags = [f"--tokenizer={name}", f"--out={path.parent}"]
        code, _, err = script(prepare_text.main, source, *flags)
        assert code == 2 and len(err) == 1 and "holds files of another program" in err[0]
    assert os.listdir(path.parent) == ["tokenizer.json"]
    assert path.read_text("utf-8") == own.spec["json"]


def test_too_little_text_leaves_nothing(tmp_path, script):
    source = write_parquet(tmp_path / "a.parquet", TEXTS[:20])
    out = tmp_path / "out"
    flags = [f"--source={source}", f"--out={out}", "--tokenizer=bpe:257"]
    code, _, err = script(prepare_fineweb.main, *flags, "--val_tokens=1M")
    assert code == 2 and "0 for training" in err[0] and not out.exists()
    code, _, err = script(
        prepare_fineweb.main, *flags[:2], "--tokenizer=bpe:999", "--val_tokens=1M"
    )
    assert code == 2 and "less validation" in err[0] and not out.exists()
