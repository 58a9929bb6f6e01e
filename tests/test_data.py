"""
Check how tokens reach the model: the order of windows, evaluations, good and bad folders.
"""

import filecmp
import json
import math
import os
import pickle
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from unittest import mock

import huggingface_hub
import numpy as np
import psutil
import pytest
import torch
from documents import Hub, serve_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from program import ROOT, finish, same, start, wait_for_line, write_tokens

from common.console import UserError
from configurator import Config, load_config
from data import prepare_text
from data.download import make_or_explain, vocab_where_missing
from data.loader import Batches, ShuffledWindows, eval_batches, to_batch
from data.shards import Shard, ShardTokens, open_dataset, open_shard


def shard(tokens, *numbers: int) -> bytes:
    """
    Return a shard file in llm.c's format. `numbers`, if given, replace the correct ones at the
    start of its header.
    """
    ids = np.asarray(tokens, dtype="<u2")
    head = np.zeros(256, "<i4")
    numbers = numbers or (20240520, 1, len(ids))
    head[: len(numbers)] = numbers
    return head.tobytes() + ids.tobytes()


# -----------------------------------------------------------------------------
# The order


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(3, 500), block_size=st.integers(1, 40), seed=st.integers(0, 2**63 - 1))
def test_reads_every_window_exactly_once_per_epoch(tokens, block_size, seed):
    """
    Draw without replacement; nanoGPT draws with replacement (#294), so that some windows come often
    and a third of them never.
    """
    if tokens <= block_size:
        return
    order = ShuffledWindows(range(tokens), block_size, seed)
    n = 0
    for _ in range(3):
        offset = order.start(n) % block_size
        windows = (tokens - 1 - offset) // block_size
        starts = sorted(order.start(n + i) for i in range(windows))
        n += windows
        assert starts[0] < block_size  # no window is left out at the start
        # nor in between, and none comes twice
        assert all(b - a == block_size for a, b in pairwise(starts))
        # only the tail is left out
        assert starts[-1] + block_size + 1 <= tokens < starts[-1] + 2 * block_size + 1


def test_each_epoch_cuts_the_text_at_different_places():
    order = ShuffledWindows(range(10_000), 100, seed=1)
    offsets = {order.start(100 * epoch) % 100 for epoch in range(9)}
    assert len(offsets) > 5  # of 100; by chance two may be equal


def split_of_numbers(folder: Path, sizes: list[int]) -> ShardTokens:
    """Return a split whose token at position n is n, over shards of these sizes."""
    ends = np.cumsum([0, *sizes])
    shards = []
    for i, size in enumerate(sizes):
        path = folder / f"train_{i:06}.bin"
        path.write_bytes(shard(np.arange(ends[i], ends[i] + size)))
        shards.append(open_shard(path))
    return ShardTokens(shards, 50_000)


def test_the_batch_of_an_iteration_follows_from_its_number_alone(tokens):
    """Ask twice, backwards over an epoch, and for one that was read in advance or was not."""
    c = Config(batch_size=2, tokens_per_iter=3 * 2 * 16, block_size=16)
    batches = Batches(open_dataset(str(tokens)), c, torch.device("cpu"))
    first = [batches.take(it) for it in range(20)]
    batches.read_ahead(5)
    for it in (5, 5, 0, 19, 6, 2):
        assert same(batches.take(it), first[it])
    assert not same(first[5], first[6])


def test_finds_a_token_behind_the_first_two_billion():
    """Numpy 1 adds in 32 bits on Windows."""
    split = ShardTokens([Shard(Path("any"), 1024, 10**8)] * 25, 50_257)
    assert len(split) == 2_500_000_000
    assert split.locate(2_400_000_005) == (24, 5)


def test_refuses_a_window_that_a_truncated_shard_cuts_off(tmp_path):
    """Read the windows before the cut, and name the shard in the error."""
    split = split_of_numbers(tmp_path, [1000])
    path = split.shards[0].path
    os.truncate(path, 1024 + 2 * 410)
    assert split.read_windows([390], 20).tolist() == [[*range(390, 410)]]
    with pytest.raises(UserError, match=str(path)):
        split.read_windows([400], 20)


def evaluated(split: ShardTokens, tokens: int, batch_size: int, world_size: int) -> list[int]:
    """Return the targets that an evaluation of so many tokens counts on all ranks, in order."""
    config = Config(batch_size=batch_size, block_size=10)
    ranks = []
    for rank in range(world_size):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world_size)):
            ranks.append(eval_batches(split, tokens, config))
    seen = []
    # equally many batches on each rank, or one rank would wait for another forever
    for batches in zip(*ranks, strict=True):
        for x, y in batches:
            assert x.shape == y.shape == (batch_size, 10)
            counted = y[:, 0] != -1  # a window counts as a whole, or only fills up a last batch
            assert torch.equal(x[counted, 1:], y[counted, :-1])
            assert (y[~counted] == -1).all()
            seen += y[counted].flatten().tolist()
    return seen


@pytest.mark.parametrize("batch_size, world_size", [(1, 1), (5, 1), (3, 1), (4, 2), (1, 3), (8, 3)])
def test_evaluation_reads_the_same_tokens_at_any_batch_size_and_number_of_ranks(
    batch_size, world_size, tmp_path
):
    """Evaluate fixed windows that are spread over the split (nanoGPT #644)."""
    split = split_of_numbers(tmp_path, [100, 101])  # 20 windows of 10 tokens, and a last target
    # 13 of the 20: window n is the (n * 20 / 13)-th, rounded down
    starts = [0, 10, 30, 40, 60, 70, 90, 100, 120, 130, 150, 160, 180]
    expected = [start + 1 + i for start in starts for i in range(10)]
    assert evaluated(split, 130, batch_size, world_size) == expected
    assert evaluated(split, 139, batch_size, world_size) == expected  # whole windows
    everything = [*range(1, 201)]
    assert evaluated(split, 200, batch_size, world_size) == everything
    assert evaluated(split, 999, batch_size, world_size) == everything


def test_the_public_runs_validation_tokens_are_read_as_they_read_them(tmp_path):
    """They evaluate 10,240 windows of 1,024 tokens from the beginning of a longer shard."""
    ids = np.arange(10_500_000) % 50_021  # a prime, so no two windows begin with the same id
    write_files(tmp_path, {"fineweb_val_000000.bin": shard(ids), "fineweb_train_1.bin": shard(ids)})
    data = open_dataset(str(tmp_path))
    starts = data.val.spread(10_485_760, 1024)
    assert starts == [1024 * n for n in range(10_240)]
    assert data.val.spread(2 * 10_485_760, 1024) == starts
    assert data.val.spread(4096, 1024) == [0, 2_621_440, 5_242_880, 7_864_320]  # a quarter apart
    window = data.val.read_windows(starts[-1:], 1025)
    assert (window == ids[10_484_736:10_485_761]).all()
    # others are read to their ends: 10,253 windows of 1,024
    assert data.train.spread(10**9, 1024)[-1] == 10_252 * 1024


@pytest.mark.parametrize("device, non_blocking", [("cuda", True), ("mps", False), ("cpu", False)])
def test_only_cuda_copies_a_batch_without_waiting(device, non_blocking):
    """Wait on MPS, where the copy could read memory that is already freed: silently wrong data."""
    block = mock.MagicMock()
    to_batch(block, torch.device(device))
    block.to.assert_called_once_with(torch.device(device), non_blocking=non_blocking)


def test_reading_a_shard_does_not_keep_it_in_memory(tmp_path):
    """
    Grow by less than 30 MB while reading 100 MB; the pages of a memory map would count as the
    process's (nanoGPT #287).
    """
    path = tmp_path / "train_000000.bin"
    path.write_bytes(shard(np.zeros(50_000_000, dtype="<u2")))
    split = ShardTokens([open_shard(path)], 256)
    before = psutil.Process().memory_info().rss
    for position in range(0, len(split), 1_000_000):
        split.read_windows([position], 1_000_000)
    # a window of a million tokens is 8 MB, and malloc keeps some
    assert psutil.Process().memory_info().rss - before < 30e6


# -----------------------------------------------------------------------------
# Folders


RAW = np.arange(40, dtype="<u2").tobytes()
LETTERS = {i: chr(65 + i) for i in range(40)}
GPT2 = (50257, "gpt2")


def meta_pkl(vocab: int, itos: dict | None = None) -> bytes:
    """Return the content of nanoGPT's meta.pkl: the vocabulary's size, and the table if given."""
    stoi = {text: i for i, text in (itos or {}).items()}
    return pickle.dumps(dict(vocab_size=vocab) | (dict(itos=itos, stoi=stoi) if itos else {}))


def shards(**sizes: int) -> dict[str, bytes]:
    return {f"{name}.bin": shard(range(size)) for name, size in sizes.items()}


NAMED = shards(train_of_thought_val_000000=1, constrained_val_000000=2, my_val_set_train_000001=8)
NAMED |= shards(**{"medieval.train": 4, "retrieval-train-0001": 16})
NAMED |= dict.fromkeys(("retrieval.bin", "training_000000.bin"), b"?")  # of no split
LLMC = shards(edufineweb_train_000001=40, edufineweb_val_0=30)
# a folder's files, and what is read there: tokens of train and val, vocabulary, tokenizer
FOLDERS = {
    "llm.c's": (LLMC | {"._edufineweb_train_000001.bin": b"a Mac's note"}, (40, 30, *GPT2)),
    "nanoGPT's characters": (
        {"train.bin": RAW, "val.bin": RAW[:60], "meta.pkl": meta_pkl(40, LETTERS)},
        (40, 30, 40, "char"),
    ),
    "the last word train or val in a name decides": (NAMED, (4 + 8 + 16, 1 + 2, *GPT2)),
    # with a known tokenizer, a sample would end in a traceback, hours into the run
    "an unknown tokenizer of one's own": (
        {"train.bin": RAW, "val.bin": RAW, "meta.pkl": meta_pkl(60_000)},
        (40, 40, 60_000, "unknown"),
    ),
    "an unknown tokenizer with too few letters": (
        {"train.bin": RAW, "val.bin": RAW, "meta.pkl": meta_pkl(40, {0: "a"})},
        (40, 40, 40, "unknown"),
    ),
}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", FOLDERS)
def test_reads_datasets_made_by_other_programs(name, tmp_path):
    """
    Find the number of tokens, the vocabulary and the tokenizer of folders from llm.c, nanoGPT,
    build-nanogpt and others.
    """
    files, expected = FOLDERS[name]
    write_files(tmp_path, files)
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val), data.vocab, data.tokenizer["kind"]) == expected


# each is beside a good val_0.bin; test_bad_input.py has more of them
BAD_FILES = {
    "wrong version": ("train_1.bin", shard(range(10), 20240520, 7, 10), "20240520 and 7"),
    "count too large": ("train_1.bin", shard(range(10), 20240520, 1, 11), "1,044 bytes"),
    "empty shard": ("train_1.bin", b"", "not a token shard"),
    "llm.c's tokens of Llama 3": ("train_1.bin", shard([0] * 80, 20240801, 7, 40), "20240801"),
    "end not downloaded": ("train_1.bin", shard([*range(500), *[0] * 1500]), "unfinished download"),
    "middle not downloaded": (
        "train_1.bin",
        shard(np.r_[np.full(2**21, 7), np.zeros(1500), np.full(999, 7)]),
        "offset 2,097,152",
    ),
    "no tokens at all": ("train_1.bin", shard([]), "no train tokens"),
    "odd bytes": ("train.bin", b"abc", "3 bytes"),
    "int32 tokens": ("train.bin", np.arange(40, dtype="<i4").tobytes(), "int32"),
    "a vocabulary in manifest.json": ("manifest.json", b'{"vocab": 65537}', "65,537"),
    "ids that have wrapped": ("meta.pkl", meta_pkl(70_000), "70,000"),
    "token beyond vocab": ("train_1.bin", shard([65535] * 40), "vocabulary"),
    "meta cut short": ("meta.pkl", meta_pkl(3)[:-4], "nanoGPT's prepare.py"),
}


@pytest.mark.parametrize("problem", BAD_FILES)
def test_a_bad_data_file_gives_one_line_that_says_what_is_wrong(problem, tmp_path):
    """Refuse bad shards, raw files, meta.pkl and manifests."""
    name, content, word = BAD_FILES[problem]
    write_files(tmp_path, {"val_0.bin": shard(range(30)), name: content})
    with pytest.raises(UserError) as error:
        open_dataset(str(tmp_path))
    (line,) = error.value.args
    assert word in line and "\n" not in line


def test_the_commands_that_make_shakespeare_hold_out_its_last_tenth(tmp_path, monkeypatch):
    config = load_config([str(ROOT / "config/shakespeare_char.py")])
    monkeypatch.chdir(tmp_path)
    assert vocab_where_missing(config) == 256
    with pytest.raises(UserError, match="no folder data/shakespeare_char; ") as missing:
        make_or_explain(config, "dataset")
    _, download, prepare = str(missing.value).splitlines()
    text = "".join(f"To be, or not {n} to be: that is the question.\n" for n in range(2000))
    Path(download.split()[2]).write_text(text)
    prepare_text.main(prepare.split()[2:])
    data = open_dataset("shakespeare_char")
    held_out = bytes(data.val.read_windows([0], len(data.val))[0].tolist()).decode().strip("\0")
    assert text.endswith(held_out) and 0 <= len(held_out) - len(text) / 10 < 100


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve small records. Returns their folder."""
    source = write_tokens(tmp_path / "hub", [99] * 20, [99])
    for path in [*source.glob("*.bin")]:
        path.rename(source / f"fineweb_{path.name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)  # before each of the library's own retries
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve_hub(source, inside="") as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        yield source


RECORDS = Path("data/fineweb_records")


def get_records(*flags: str) -> None:
    few = ["--block_size=256", "--tokens_per_iter=256", "--max_iters=1"]
    config = load_config(["--dataset=fineweb_records", *few, *flags])
    make_or_explain(config, "dataset")


def assert_all_records(source: Path, folder: Path) -> None:
    names = {path.name for path in source.glob("*.bin")}
    assert {path.name for path in folder.iterdir()} == names | {"lock"} and len(names) == 21
    assert not filecmp.cmpfiles(source, folder, names, shallow=False)[1]


def test_an_interrupted_download_is_no_dataset_and_the_next_one_continues(hub):
    """Let the hub lack the last file at first."""
    last = {"fineweb_val_000000.bin": Hub.files.pop("fineweb_val_000000.bin")}
    with pytest.raises(UserError, match="val_000000.bin: .*404.*check the network"):
        get_records()
    assert len([*RECORDS.glob("*.bin")]) == 20
    assert vocab_where_missing(load_config(["--dataset=fineweb_records"])) == 50257
    with pytest.raises(UserError, match="no val tokens"):
        open_dataset("fineweb_records")
    Hub.files = last
    get_records()
    assert_all_records(hub, RECORDS)


def test_wrong_bytes_of_the_right_size_are_not_taken(hub):
    Hub.wrong = {"fineweb_train_000002.bin"}  # once
    with pytest.raises(UserError, match="hub promises"):
        get_records()
    assert [path.name for path in RECORDS.rglob("*.bin")] == ["fineweb_train_000001.bin"]
    get_records()
    assert_all_records(hub, RECORDS)


GET_RECORDS = """
import sys
from configurator import load_config
from data.download import make_or_explain
make_or_explain(load_config(["--dataset=fineweb_records", "--max_iters=1"]), "dataset")
"""


def test_one_of_two_processes_downloads_and_the_other_takes_over_if_it_ends(hub):
    """Several ranks of a run, or several runs, may find the dataset missing at once."""
    here = dict(cwd=Path.cwd(), HF_HOME=str(Path.cwd()), HF_HUB_OFFLINE="0")
    here |= dict(HF_ENDPOINT=huggingface_hub.constants.ENDPOINT, PYTHONPATH=str(ROOT))
    first = start("-c", GET_RECORDS, **here)
    wait_for_line(first, "data: file 1 ")
    second = start("-c", GET_RECORDS, **here)
    wait_for_line(second, "data/fineweb_records: another process is writing to it; waiting")
    first.kill()
    result = finish(second)
    assert (result.code, result.err) == (0, "") and "data: file 21 of 21" in result.out
    assert_all_records(hub, RECORDS)


@pytest.mark.parametrize(
    "trouble, said", [("no files", "404"), ("no network", "refused"), ("offline", "HF_HUB_OFFLINE")]
)
def test_a_download_that_cannot_begin_ends_at_once_in_one_line(trouble, said, hub, monkeypatch):
    Hub.files.clear()
    if trouble == "no network":
        url = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", trouble == "offline")
    with pytest.raises(UserError, match=f"train_000001.bin: .*{said}.*check the network") as error:
        get_records()
    assert len(error.value.args) == 1


@pytest.mark.parametrize("tokens, gb", [(1, 4.2), (2.1e9, 4.4), (9e10, 20.8)])
def test_downloads_as_many_records_as_the_run_reads(tokens, gb, hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: mock.Mock(total=10**9, free=10**8))
    with pytest.raises(UserError, match=f"needs {gb} GB of disk, has 0.1 GB free; make room"):
        get_records(f"--max_iters={math.ceil(tokens / 256)}")


def test_a_folder_with_too_few_records_may_be_moved_and_its_runs_continue(hub, capsys):
    """A folder that grew would refuse the runs that began with fewer tokens."""
    get_records()
    before = open_dataset("fineweb_records").fingerprint
    capsys.readouterr()
    get_records("--max_iters=100_000_000")
    move, keep = capsys.readouterr().out.splitlines()[1:]
    subprocess.run(shlex.split(move), check=True)
    old = load_config([keep.split()[-1]])
    make_or_explain(old, "dataset")
    assert open_dataset(old.dataset).fingerprint == before
    assert not RECORDS.exists()  # so a new run downloads them


def test_a_copied_dataset_keeps_its_fingerprint_and_other_tokens_change_it(tmp_path):
    folder = write_tokens(tmp_path / "a", [500], [100])
    ours = open_dataset(str(folder))
    copied = open_dataset(str(write_tokens(tmp_path / "b", [500], [100])))
    longer = open_dataset(str(write_tokens(tmp_path / "c", [501], [100])))
    assert longer.fingerprint != ours.fingerprint == copied.fingerprint
    # as in a folder of nanoGPT's, whose file names and sizes stay
    (folder / "manifest.json").unlink()
    before = open_dataset(str(folder)).fingerprint
    (folder / "train_000001.bin").write_bytes(shard(np.arange(500) % 61))
    assert open_dataset(str(folder)).fingerprint != before


def test_the_fingerprint_of_validation_is_that_of_its_tokens(tmp_path):
    """Losses of equal fingerprints compare: see test_compare.py."""

    def fingerprint(name: str, *val: list[int]) -> str:
        files = {f"val_{n}.bin": shard(tokens) for n, tokens in enumerate(val)}
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, {"train_1.bin": shard(range(200))} | files)
        return open_dataset(str(tmp_path / name)).record()["val_fingerprint"]

    some = fingerprint("a", [*range(100)])
    assert some == fingerprint("b", [*range(60)], [*range(60, 100)])
    assert some != fingerprint("c", [*range(99), 7])


def test_warns_of_what_may_be_8_bit_tokens(tmp_path, capsys):
    """Ids below 128 in 16 bits are none."""
    letters = b"letters, and a space between words" * 9
    ids = np.arange(9999, dtype="<u2") % 128
    write_files(tmp_path, {"train.bin": letters, "val.bin": ids.tobytes()})
    open_dataset(str(tmp_path))
    assert capsys.readouterr().err.count("uint8") == 1


@pytest.mark.parametrize("counted, expected", [((900, 500), 2.0), ((0, 140), 0.2)])
def test_bytes_per_token_are_counted_on_the_validation_split(counted, expected, tmp_path):
    """Add up its shards, of which one counts 0 bytes if no document begins in it."""
    folder = write_tokens(tmp_path / "d", train=[1000], val=[300, 400])
    manifest = json.loads((folder / "manifest.json").read_text())
    for i, shard in enumerate(manifest["shards"][:2]):
        shard["bytes"] = counted[i]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert open_dataset(str(folder)).bytes_per_token == expected
