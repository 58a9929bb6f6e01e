"""
Prepare data by the commands: the right tokens in the right shards, the same bytes after
interruptions, and one line for each problem. test_text.py tests what is read from which file,
and test_bad_input.py tests bad command lines.
"""

import hashlib
import os
import random
import shlex
import signal
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cases import slow
from documents import (
    REVISION,
    Hub,
    digests,
    documents,
    manifest_of,
    on_hub,
    serve_hub,
    stored,
    stored_texts,
    write_jsonl,
    write_parquet,
)
from program import ROOT, Result, contents, finish, needs_signals, refused, run, start

from data import prepare_text, writer
from data.text import Document, Place, Source
from data.tokenizer import Tokenizer, read_bpe

FINEWEB, TEXT = "data/prepare_fineweb.py", "data/prepare_text.py"
EOT = 50256
TEXTS = [text for text in documents(700) if text]
HUB = ["--dataset=org/name", "--tokenizer=byte"]
FLAGS = [*HUB, "--val_fraction=0.0625", "--shard_tokens=3k"]


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(*arguments, script: str = FINEWEB) -> Result:
    """Prepare in this process, and check for exit code 0 and nothing on stderr."""
    result = run(script, *arguments)
    assert (result.code, result.err) == (0, ""), result
    return result


@pytest.mark.parametrize(
    "words, asked",
    [
        ("", ("HuggingFaceFW/fineweb-edu", "sample-10BT")),
        ("--dataset=fineweb --name=sample-100BT", ("HuggingFaceFW/fineweb", "sample-100BT")),
        ("--dataset=org/name --name=small", ("org/name", "small")),
    ],
)
def test_flags_choose_the_hubs_dataset(words, asked):
    with mock.patch("data.text.hub_files", side_effect=OSError) as hub_files:
        assert run(FINEWEB, "--tokenizer=byte", *words.split()).code == 1
    assert hub_files.call_args.args[:2] == asked


# -----------------------------------------------------------------------------
# The right tokens


def held_out(texts: list[str], fraction: float) -> list[bool]:
    """
    Return which of these short documents are held out: those before which validation has no more
    than this fraction of the text.
    """
    held: list[bool] = []
    before = given = 0
    for text in texts:
        held.append(given <= fraction * before)
        before, given = before + len(text), given + len(text) * held[-1]
    return held


@pytest.mark.parametrize(
    "write, ending, size", [(write_parquet, "parquet", 100), (write_jsonl, "jsonl", 1000)]
)
def test_shards_hold_every_document_once_in_the_order_of_the_shuffled_row_groups(
    gpt2_bpe, tmp_path, write, ending, size, monkeypatch
):
    """Store the tokens that tiktoken computes, with an end-of-text before each document."""
    monkeypatch.setattr(writer, "READ_AHEAD", 2)  # threads tokenize while shards are filled
    texts = documents(700) + ["<|endoftext|> in a text is text"]
    files = texts[:450], texts[450:]
    names = [write(tmp_path / f"{n}.{ending}", file) for n, file in enumerate(files)]
    out = tmp_path / "out"
    sizes = ["--val_fraction=0.125", "--shard_tokens=3k"]
    with on_hub(*names):
        result = run(FINEWEB, "--dataset=org/name", f"--out={out}", *sizes)
    assert result.code == 0
    assert "3 of 701 rows hold no text" in result.err
    groups = [file[at : at + size] for file in files for at in range(0, len(file), size)]
    random.Random(0).shuffle(groups)
    assert groups[0] != texts[:size]
    whole = [text for group in groups for text in group if text]
    is_val = held_out(whole, 0.125)
    for split in ("val", "train"):
        texts = [t for t, held in zip(whole, is_val, strict=True) if held == (split == "val")]
        tokens = [[EOT, *gpt2_bpe.encode_ordinary(text)] for text in texts]
        assert stored(out, split) == sum(tokens, [])
    manifest = manifest_of(out)
    shards = manifest["shards"]
    assert sum(shard["documents"] for shard in shards) == len(whole)
    assert sum(shard["bytes"] for shard in shards) == sum(len(text.encode()) for text in whole)
    for shard in shards:
        content = (out / shard["name"]).read_bytes()
        assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, shard["tokens"]]
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert np.frombuffer(content[1024:], "<u2")[0] == EOT


@pytest.mark.parametrize(
    "shard_tokens, tokens", [(1, None), (100, None), (7, None), (1000, 200), (33, 1), (25, 10**6)]
)
def test_a_split_or_shard_ends_with_the_document_that_reaches_its_size(shard_tokens, tokens):
    """When a training shard ends, validation's does too, so that all text before it is stored."""
    texts = ["a", "bc", "d" * 9, "e" * 40, "f", "g" * 9, "h" * 40, "ij"] * 6
    write_jsonl(Path("a.jsonl"), texts)
    flags = [*HUB, "--out=out", "--val_fraction=0.25", f"--shard_tokens={shard_tokens}"]
    with on_hub("a.jsonl"):
        prepare(*flags, *([f"--tokens={tokens}"] if tokens else []))
    expected: dict[str, list[list[int]]] = dict(val=[[]], train=[[]])
    left = tokens or 10**9
    for text, held in zip(texts, held_out(texts, 0.25), strict=True):
        expected["val" if held else "train"][-1] += [0, *text.encode()]
        if len(expected["train"][-1]) >= min(shard_tokens, left):
            left -= len(expected["train"][-1])
            for shards in expected.values():
                shards.append([])
        if left <= 0:
            break
    for split, made in expected.items():
        shards = sorted(Path("out").glob(f"{split}_*.bin"))
        held = [np.fromfile(shard, dtype="<u2", offset=1024).tolist() for shard in shards]
        assert held == [shard for shard in made if shard]


# -----------------------------------------------------------------------------
# Validation and order


def test_fewer_tokens_are_the_beginning_of_both_splits_and_each_row_is_read_once():
    """All of a source has the same validation text for every tokenizer."""
    write_parquet(Path("a.parquet"), TEXTS)
    read = mock.Mock(side_effect=Source.read)
    changes = dict(all=[], few=["--tokens=20k"], bpe=["--tokenizer=bpe:300"], seed=["--seed=1"])
    with on_hub("a.parquet"):
        with mock.patch.object(Source, "read", lambda *arguments: read(*arguments)):
            prepare(*FLAGS, "--out=all")
        assert read.call_count == 7
        for name in ("few", "bpe", "seed"):
            prepare(*FLAGS, *changes[name], f"--out={name}")
    bpe = Tokenizer(read_bpe(Path("bpe"))).decode(stored(Path("bpe"), "val"))
    held_out = stored_texts(Path("all"), "val")
    assert held_out == bpe.split("<|endoftext|>")[1:] != stored_texts(Path("seed"), "val")
    for split in ("train", "val"):
        few, every = (stored(Path(name), split) for name in ("few", "all"))
        assert 1000 < len(few) < len(every) and few == every[: len(few)]


@pytest.mark.parametrize(
    "most, flags", [(50_000_000, []), (2000, []), (2000, ["--val_fraction=0.05"])]
)
def test_at_most_50_mb_of_your_own_text_are_held_out_unless_a_fraction_is_typed(
    most, flags, monkeypatch, capsys
):
    write_jsonl(Path("a.jsonl"), TEXTS)
    monkeypatch.setattr("data.text.MOST_HELD_OUT", most)
    command = ["a.jsonl", *flags, "--out=out"]
    share = 0.05 if flags else min(0.05, most / os.path.getsize("a.jsonl"))
    prepare_text.main(command)
    characters = [sum(map(len, stored_texts(Path("out"), split))) for split in ("val", "train")]
    assert 0.9 * share < characters[0] / sum(characters) < 1.1 * share
    assert "nothing to do" not in capsys.readouterr().out
    prepare_text.main(command)
    assert "nothing to do" in capsys.readouterr().out
    refused(run(TEXT, *command, "--val_fraction=0.3"), "val_fraction", "another --out")


# -----------------------------------------------------------------------------
# Interrupted, and run again

# A preparation that sends itself a signal as it is about to rename its n-th file: the first
# manifest, a shard, the manifest that lists it, ...
KILLED = """
import os, runpy, signal, sys
import data.text
data.text.hub_files = lambda *_: ([os.environ["HUB_FILE"]], "a" * 40)
moment, replace = int(os.environ["MOMENT"]), os.replace
def replace_or_die(*arguments):
    global moment
    moment -= 1
    if moment == 0:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    replace(*arguments)
os.replace = replace_or_die
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


ROWS = "--dataset=org/name --val_fraction=0.2 --shard_tokens=1k --tokens=2k"


@needs_signals
@pytest.mark.parametrize(
    "script, line, before, moments",
    [
        (TEXT, "book.txt rows.jsonl --tokenizer=byte", "", (2, 4)),
        (FINEWEB, f"{ROWS} --tokenizer=byte", "", (1, 2, 3, 2)),
        # the last shard, which is short, is there already, but the folder is not yet complete
        (FINEWEB, f"{ROWS} --tokenizer=byte", "--tokens=1500", (7,)),
        slow((FINEWEB, f"{ROWS} --tokenizer=bpe:300", "", (1, 2))),
    ],
)
def test_a_killed_preparation_continues_to_the_same_bytes(script, line, before, moments, tmp_path):
    """
    Kill the preparation up to four times at different file renames, or press Ctrl-C, and launch it
    with another number of threads each time. Until the last launch it also has the flags `before`.
    """
    write_jsonl(Path("rows.jsonl"), TEXTS[:250])
    Path("book.txt").write_text("\n\n".join(TEXTS[250:400]), "utf-8")
    with on_hub("rows.jsonl"):
        prepare(*line.split(), "--out=straight", script=script)
    for workers, moment in enumerate(moments, 1):
        words = [str(ROOT / script), *f"{line} --out=out {before} --workers={workers}".split()]
        end = "SIGINT" if workers == 2 else "SIGKILL"
        here = dict(cwd=tmp_path, MOMENT=str(moment), HUB_FILE="rows.jsonl", SIGNAL=end)
        code, _, err = finish(start("-c", KILLED, *words, **here))
        assert (code, err) == (130 if end == "SIGINT" else -signal.SIGKILL, "")
        assert end == "SIGKILL" or not list(Path("out").glob("*.tmp"))
        assert not Path("out/manifest.json").exists() or not manifest_of(Path("out"))["complete"]
    with on_hub("rows.jsonl"):
        assert run(script, *line.split(), "--out=out").code == 0
    assert contents(Path("out")) == contents(Path("straight"))


def test_a_full_disk_is_reported_and_the_same_command_continues_later(make_disk):
    write_jsonl(Path("rows.jsonl"), TEXTS[:250])
    out = make_disk(2**16) / "out"
    flags = [*FLAGS, "--shard_tokens=5k", "--tokens=10M"]
    with on_hub("rows.jsonl"):
        result = run(FINEWEB, *flags, f"--out={out}")
    refused(result, f"{out}/", "No space left on device", "the same command continues")
    assert 1 < len(digests(out)) and not list(out.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=2m", str(out.parent)], check=True)
    with on_hub("rows.jsonl"):
        prepare(*flags, f"--out={out}")
        prepare(*flags, "--out=straight")
    assert contents(out) == contents(Path("straight"))


# flags after those of a finished folder, and words of the refusal
CHANGES = [
    ("--tokens=8k", ""),
    ("--tokens=1k", ""),
    ("--tokens=14k", "another --out"),
    ("--val_fraction=0.3", "val_fraction another --out"),
    ("--shard_tokens=8k", "shard_tokens another --out"),
    ("--tokenizer=bpe:300", "vocab another --out"),
    ("--text_field=id", "text_field another --out"),
    ("--seed=1", "seed another --out"),
    ("--dataset=org/other", "source another --out"),
]


@pytest.mark.parametrize("flag, words", CHANGES)
def test_a_finished_folder_is_never_changed_and_needs_no_network(flag, words):
    """Nobody would know what it holds. Only another tokenizer must be trained first."""
    write_jsonl(Path("rows.jsonl"), TEXTS[:250])
    flags = [*FLAGS, "--tokens=8k", "--out=out"]
    with on_hub("rows.jsonl"):
        prepare(*flags)
    before = contents(Path("out"))
    with on_hub(*["rows.jsonl"] * ("bpe" in flag)):
        result = run(FINEWEB, *flags, flag)
    if words:
        refused(result, *words.split())
    else:
        assert result.code == 0 and "complete, nothing to do" in result.out
    assert contents(Path("out")) == before


def test_a_folder_continues_only_with_the_text_that_it_was_begun_with():
    """Before its first shard it takes any text, such as one that has been repaired."""
    Path("a.txt").write_bytes(b"caf\xe9 " * 99)
    assert run(TEXT, "a.txt", "--out=out").code == 1
    Path("a.txt").write_text("words " * 99)
    prepare("a.txt", "--out=out", script=TEXT)
    before = contents(Path("out"))
    time = os.stat("a.txt").st_mtime_ns
    os.utime("a.txt", ns=(1, time + 10**9))
    refused(run(TEXT, "a.txt", "--out=out"), "other text", "files", "another --out")
    assert contents(Path("out")) == before


def test_a_source_that_is_too_small_to_be_divided_is_refused():
    write_jsonl(Path("a.jsonl"), ["a document"])
    with on_hub("a.jsonl"):
        result = run(FINEWEB, *HUB, "--out=out")
    refused(result, "11 tokens for validation and 0 for training")


def test_documents_are_read_only_so_far_ahead():
    read = []

    def documents():
        for n in range(1, 100_000):
            read.append(n)
            yield Document(Place(0, n, n), "x")

    next(writer.encode(documents(), Tokenizer(dict(kind="byte")), 1))
    assert read.pop() <= 65 * 64 + 1


# -----------------------------------------------------------------------------
# The hub

# As on Windows, there are no symbolic links, about which the hub's library would warn at length.
ON_THE_HUB = """
import os, runpy, sys, time
import data.writer
data.writer.READ_AHEAD = 0  # so that shards are finished before the last file is read
def refuse(*_, **__):
    raise OSError(22)
os.symlink = refuse
time.sleep = lambda seconds: None  # by the hub's own library
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def from_hub(address: str, out: Path, *more: str) -> Result:
    """Prepare in a process that reads from a local server in place of the hub."""
    flags = [*FLAGS, "--name=small", "--shard_tokens=4k", "--seed=17", f"--out={out}"]
    flags += ["--workers=1"]  # one thread reads less ahead
    hub = dict(HF_ENDPOINT=address, HF_HOME=str(out.parent), HF_HUB_OFFLINE="0")
    return finish(start("-c", ON_THE_HUB, str(ROOT / FINEWEB), *flags, *more, **hub))


def test_the_hubs_files_make_the_shards_that_local_files_make(tmp_path):
    """Stop when the hub fails. The same command continues at the same revision."""
    source, out = tmp_path / "source", tmp_path / "out"
    files = [write_parquet(source / "a.parquet", TEXTS[:350])]
    files.append(write_jsonl(source / "b.jsonl", TEXTS[350:]))
    with on_hub(*files):
        prepare(*FLAGS, "--shard_tokens=4k", "--seed=17", f"--out={tmp_path / 'straight'}")
    with serve_hub(source) as address:
        Hub.away = {"small/b.jsonl"}
        refused(from_hub(address, out), "hf://datasets/org/name@", "repeat the command")
        assert 0 < len(digests(out)) < len(digests(tmp_path / "straight"))
        Hub.away, Hub.newest = set(), "b" * 40  # a newer revision has appeared
        code, _, err = from_hub(address, out)
        assert code == 0, err
    assert digests(out) == digests(tmp_path / "straight")
    assert manifest_of(out)["revision"] == REVISION


@pytest.mark.parametrize("flag", ["--dataset=org/nobody", "--name=large", "no network"])
def test_a_dataset_that_cannot_be_had_is_refused_at_once_in_one_line(flag, tmp_path):
    source = write_jsonl(tmp_path / "source/a.jsonl", TEXTS).parent
    with serve_hub(source) as address:
        if flag == "no network":
            address, flag = "http://127.0.0.1:9", "--name=small"
        result = from_hub(address, tmp_path / "out", flag)
    refused(result, "check the names and the network", "set HF_TOKEN")
    assert not (tmp_path / "out").exists()


# -----------------------------------------------------------------------------
# What is printed


def test_prints_a_training_command_for_the_prepared_dataset():
    """Quote a name with a space."""
    Path("my notes.txt").write_text("a line\n" * 400)
    result = prepare("my notes.txt", script=TEXT)
    words = shlex.split(result.out.splitlines()[-1])
    assert prepare("my notes.txt", script=TEXT).out.endswith(result.out)
    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=16", "--eval_tokens=16"]
    small += ["--device=cpu", "--compile=False", "--max_iters=0", "--out_dir=out"]
    train = run("train.py", words[4], *small)
    assert words[3] == "config/own_text.py"
    assert train.code == 0 and "data: data/my notes, " in train.out, train
