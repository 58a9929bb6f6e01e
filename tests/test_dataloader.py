"""
Tokens: files as they should and should not be, the order of the data, and fixed evaluation windows.
"""

import json
import os
import pickle
import threading
import time
from itertools import pairwise
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from helpers import ROOT, flags, load, records, run_process, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from common.console import RunError, UserError
from configurator import Config, load_config
from data.loader import (
    POLL_SECONDS,
    READ_AHEAD,
    Batches,
    ShuffledWindows,
    eval_batches,
    to_batch,
)
from data.shards import (
    HEADER_INTS,
    Dataset,
    ShardTokens,
    check_dataset,
    open_dataset,
    open_shard,
    split_of,
)
from data.tokenizer import Tokenizer
from data.writer import write_shard

CPU = torch.device("cpu")


def shards_of(tmp_path, sizes, vocab=50000):
    """A split whose token at position n is n, over shards of these sizes."""
    ends = np.cumsum([0, *sizes])
    shards = []
    for i, size in enumerate(sizes):
        path = tmp_path / f"train_{i:06}.bin"
        write_shard(path, np.arange(ends[i], ends[i] + size))
        shards.append(open_shard(path))
    return ShardTokens(shards, vocab)


def test_a_shard_is_llm_c_format(tmp_path):
    write_shard(tmp_path / "train_000001.bin", np.array([1, 2, 65535]))
    raw = (tmp_path / "train_000001.bin").read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 3] and not header[3:].any()
    assert np.frombuffer(raw[1024:], dtype="<u2").tolist() == [1, 2, 65535]


def test_windows_cross_shard_boundaries(tmp_path):
    split = shards_of(tmp_path, [5, 1, 7, 30])
    assert len(split) == 43
    np.testing.assert_array_equal(
        split.read_windows([3, 0, 33], 10), [range(3, 13), range(10), range(33, 43)]
    )


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(3, 500), block_size=st.integers(1, 40), seed=st.integers(0, 2**63 - 1))
def test_every_window_comes_exactly_once_per_epoch(tokens, block_size, seed):
    """nanoGPT #294 draws with replacement: some windows come often, a third of them never."""
    if tokens <= block_size:
        return
    order = ShuffledWindows(range(tokens), block_size, seed)
    n = 0
    for epoch in range(3):
        starts = [order.start(n)]
        assert order.epoch == epoch and 0 <= order.offset < block_size
        n += 1
        while n < order.first + order.windows:
            starts.append(order.start(n))
            n += 1
        starts.sort()
        assert starts[0] < block_size  # no window is left out at the start
        # nor in between, and none comes twice
        assert all(b - a == block_size for a, b in pairwise(starts))
        # only the tail is
        assert starts[-1] + block_size + 1 <= tokens < starts[-1] + 2 * block_size + 1


@settings(max_examples=30, deadline=None)
@given(
    split=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    consumed=st.integers(0, 60),
    seed=st.integers(0, 99),
    size=st.integers(18, 200),
)
def test_the_order_does_not_depend_on_batch_size_or_number_of_processes(
    split, consumed, seed, size, tmp_path_factory
):
    batch_size, world_size = split
    tokens = shards_of(tmp_path_factory.mktemp("d"), [size // 2, size - size // 2])

    def sequences(batch_size, world_size, count):
        config = Config(batch_size=batch_size, block_size=8, seed=seed)
        data = Dataset("", tokens, tokens, vocab=1, tokenizer={})
        numbers = range(world_size)
        ranks = [Batches(data, config, CPU, consumed, n, world_size) for n in numbers]
        rows = []
        while len(rows) < count:
            for batches in ranks:
                ((x, y),) = batches.take(1)
                assert x.shape == y.shape == (batch_size, 8)
                assert torch.equal(x[:, 1:], y[:, :-1])
                rows += x[:, 0].tolist()
        for batches in ranks:
            batches.close()
        return rows[:count]

    assert sequences(batch_size, world_size, 30) == sequences(1, 1, 30)


class Source:
    """Windows of the numbers 0, 1, 2, ...; the first sequence at or after `bad` cannot be read."""

    def __init__(self, bad: int = 10**9):
        self.bad, self.reads, self.closed = bad, 0, False
        self.gate = threading.Event()  # closed: nothing is read
        self.gate.set()

    def read(self, first: int, count: int) -> np.ndarray:
        assert self.gate.wait(60)
        if first + count > self.bad:
            raise RunError(f"sequence {first} is gone")
        self.reads += 1
        return np.arange(first, first + count)[:, None] + np.zeros(9, dtype=np.int64)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make_batches():
    made = []

    def make(source: Source, consumed=0, rank=0, world_size=1) -> Batches:
        data = Dataset("", None, None, vocab=1, tokenizer={}, stream=source)
        config = Config(batch_size=2, block_size=8)
        made.append((Batches(data, config, CPU, consumed, rank, world_size), source))
        return made[-1][0]

    yield make
    for batches, source in made:
        source.gate.set()
        batches.close()


def first_tokens(batches: list) -> list[int]:
    return [token for x, _ in batches for token in x[:, 0].tolist()]


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 3, 4 * READ_AHEAD])
def test_an_iteration_takes_its_micro_batches_in_order(count, make_batches):
    """Also more of them than are read ahead."""
    batches = make_batches(Source(), consumed=6, rank=1, world_size=2)
    # from sequence 6 on rank 0 takes 6 and 7, rank 1 8 and 9, rank 0 10 and 11, ...
    expected = [n for first in range(8, 8 + 4 * 3 * count, 4) for n in (first, first + 1)]
    taken = []
    for _ in range(3):
        wait_until(lambda: batches.ready(count))
        taken += first_tokens(batches.take(count))
    assert taken == expected


def test_no_more_is_read_than_the_next_iteration_and_a_few(make_batches):
    source = Source()
    batches = make_batches(source)
    wait_until(lambda: batches.ready(10))
    wait_until(lambda: source.reads >= 10 + READ_AHEAD)
    time.sleep(0.05)
    assert source.reads == 10 + READ_AHEAD


def test_waiting_for_data_lasts_a_moment_and_is_counted(make_batches):
    """So that signals and other ranks are looked at meanwhile."""
    source = Source()
    source.gate.clear()
    batches = make_batches(source)
    began = time.monotonic()
    assert not batches.ready(1) and not batches.ready(1)
    took = time.monotonic() - began
    assert 2 * POLL_SECONDS <= took < 20 and 2 * POLL_SECONDS * 0.9 <= batches.waited <= took
    assert batches.error is None
    source.gate.set()
    assert first_tokens(batches.take(2)) == [0, 1, 2, 3]


def test_an_error_while_reading_waits_until_its_batch_is_needed(make_batches):
    """What was read before it is trained on: three iterations of two micro-batches."""
    batches = make_batches(Source(bad=13))
    for first in (0, 4, 8):
        wait_until(lambda: batches.ready(2))
        assert first_tokens(batches.take(2)) == [*range(first, first + 4)]
    wait_until(lambda: batches.error)
    began = time.monotonic()
    assert not batches.ready(2) and time.monotonic() - began < POLL_SECONDS  # nothing to wait for
    assert str(batches.error) == "sequence 12 is gone"
    with pytest.raises(RunError, match="^sequence 12 is gone$"):
        batches.take(2)


@pytest.mark.parametrize("state", ["reading", "full", "failed"])
def test_closing_ends_the_reader_and_its_source(state, make_batches):
    source = Source(bad=3 if state == "failed" else 10**9)
    batches = make_batches(source)
    if state == "full":
        wait_until(lambda: source.reads == READ_AHEAD)
    batches.close()
    assert source.closed and not batches.reader.is_alive()
    batches.close()  # once more, at the process's end


def test_closing_does_not_wait_for_a_source_that_no_longer_answers(make_batches):
    source = Source()
    source.gate.clear()
    batches = make_batches(source)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 20 and source.closed and batches.reader.is_alive()
    assert batches.reader.daemon  # the process can end


def test_a_run_whose_shard_is_cut_short_saves_and_says_so(tmp_path, script, monkeypatch):
    """What it has read before is trained on, and the resumed run goes on there."""
    folder, out_dir = write_dataset(tmp_path / "d", [3000]), tmp_path / "out"
    shard = folder / "train_000001.bin"
    content, step, steps = shard.read_bytes(), train.train_step, []

    def cutting_step(*arguments):
        steps.append(1)
        if len(steps) == 3:
            os.truncate(shard, 1100)
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", cutting_step)
    keys = dict(max_iters=16, eval_interval=100)
    code, out, err = script(train.main, *flags(folder, out_dir, **keys))
    assert code == 1 and len([line for line in err if line.startswith("error: ")]) == 1
    assert err[-1].startswith(f"error: {shard}: cut short: it changed since the run began")
    assert 3 <= len(steps) < 16 and f"end: data after {len(steps)} iterations" in out
    assert load(out_dir, len(steps))["progress"]["iter_num"] == len(steps)
    shard.write_bytes(content)
    done = len(steps)
    assert script(train.main, *flags(folder, out_dir, init_from="auto", **keys))[0] == 0
    assert len(steps) == 16
    assert [r["iter"] for r in records(out_dir, "step")] == list(range(16)) and done < 16


def test_seeds_and_epochs_give_other_orders(tmp_path):
    starts = [ShuffledWindows(range(10_000), 10, seed=1).start(n) for n in range(3000)]
    assert starts != [ShuffledWindows(range(10_000), 10, seed=2).start(n) for n in range(3000)]
    first, second = starts[:999], starts[999:1998]
    assert sorted(first) != sorted(second) and first[0] % 10 != second[0] % 10


def eval_tokens(split, tokens, batch_size, spread, world_size=1) -> list[int]:
    """The targets that an evaluation of all ranks counts, in order."""
    config = Config(batch_size=batch_size, block_size=10)
    ranks = [
        list(eval_batches(split, tokens, config, CPU, spread, rank, world_size))
        for rank in range(world_size)
    ]
    seen = []
    # equally many batches on each rank, or one would wait for another's for ever
    for batches in zip(*ranks, strict=True):
        for x, y in batches:
            assert x.shape == y.shape == (batch_size, 10)
            counted = y[:, 0] != -1  # a window counts whole, or fills up the last batches
            assert torch.equal(x[counted, 1:], y[counted, :-1])
            assert (y[~counted] == -1).all()
            seen += y[counted].flatten().tolist()
    return seen


@pytest.mark.parametrize("batch_size, world_size", [(1, 1), (5, 1), (3, 1), (4, 2), (1, 3), (8, 3)])
def test_evaluation_reads_the_same_tokens_at_any_batch_size_and_number_of_ranks(
    batch_size, world_size, tmp_path
):
    """nanoGPT #644: fixed validation."""
    split = shards_of(tmp_path, [100, 101])
    first = eval_tokens(split, 130, batch_size, False, world_size)
    assert first == list(range(1, 131))  # 13 windows, the first in order
    spread = eval_tokens(split, 130, batch_size, True, world_size)
    # of the 20 windows that there are, every 20 / 13-th
    starts = [10 * (n * 20 // 13) for n in range(13)]
    assert spread == [start + 1 + i for start in starts for i in range(10)]


def test_evaluation_larger_than_the_split_takes_what_there_is(tmp_path):
    split = shards_of(tmp_path, [45])
    batches = eval_batches(split, 10**9, Config(batch_size=3, block_size=10), CPU)
    assert sum((y != -1).sum().item() for _, y in batches) == 40


def test_nanogpt_folder_is_read_as_it_is(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "val.bin")
    itos = {i: chr(65 + i) for i in range(100)}
    stoi = {c: i for i, c in itos.items()}
    (tmp_path / "meta.pkl").write_bytes(meta(vocab_size=100, itos=itos, stoi=stoi))
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val), data.vocab) == (100, 50, 100)
    assert data.tokenizer["kind"] == "char"
    assert data.tokenizer["itos"][:3] == ["A", "B", "C"]
    assert data.train.read_windows([98], 2).tolist() == [[98, 99]]


def test_llm_c_folder_without_manifest_is_read_as_it_is(tmp_path):
    write_shard(tmp_path / "edufineweb_train_000001.bin", np.arange(40))
    write_shard(tmp_path / "edufineweb_val_000000.bin", np.arange(30))
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val), data.vocab) == (40, 30, 50257)
    assert data.tokenizer["kind"] == "gpt2"


def test_the_fingerprint_follows_the_tokens(tmp_path):
    a = open_dataset(str(write_dataset(tmp_path / "a", [500]))).fingerprint
    assert open_dataset(str(write_dataset(tmp_path / "b", [500]))).fingerprint == a
    assert open_dataset(str(write_dataset(tmp_path / "c", [501]))).fingerprint != a
    # as of a folder of nanoGPT's, whose names and sizes stay
    (tmp_path / "c" / "manifest.json").unlink()
    before = open_dataset(str(tmp_path / "c")).fingerprint
    write_shard(tmp_path / "c" / "train_000001.bin", np.arange(501) % 64)
    assert open_dataset(str(tmp_path / "c")).fingerprint != before


def test_a_shard_cut_or_deleted_under_the_run_is_named_in_one_line(tmp_path):
    split = shards_of(tmp_path, [1000])
    path = split.shards[0].path
    os.truncate(path, 1024 + 2 * 410)
    with pytest.raises(RunError, match=f"{path}: cut short: it changed since the run began"):
        split.read_windows([400], 20)
    path.unlink()
    with pytest.raises(RunError, match=f"{path}: No such file or directory; resume once readable"):
        split.read_windows([400], 20)


def test_reading_shards_does_not_take_memory_as_they_are_read(tmp_path):
    """nanoGPT #287: the pages of a memory map count as the process's, 100 MB here."""
    path = tmp_path / "train_000000.bin"
    write_shard(path, np.zeros(50_000_000, dtype="<u2"))
    split = ShardTokens([open_shard(path)], 256)
    before = psutil.Process().memory_info().rss
    for position in range(0, len(split), 1_000_000):
        split.read_windows([position], 1_000_000)
    # a window of a million tokens is 8 MB, and malloc keeps some
    assert psutil.Process().memory_info().rss - before < 30e6


def test_a_token_outside_the_vocabulary_is_named_with_shard_and_offset(tmp_path):
    split = shards_of(tmp_path, [100, 100], vocab=150)
    with pytest.raises(RunError, match=r"train_000001.bin: token 150 at offset 50 "):
        split.read_windows([0, 140], 20)


def header(*numbers):
    return np.array([*numbers, *[0] * (HEADER_INTS - len(numbers))], dtype="<i4").tobytes()


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


BAD_SHARDS = {
    "wrong magic": ("train_000001.bin", b"\1\0\0\0" * 300, "begins with 1, 1"),
    "wrong version": (
        "train_000001.bin",
        header(20240520, 7, 10) + b"\0" * 20,
        "begins with 20240520, 7",
    ),
    "count too large": ("train_000001.bin", header(20240520, 1, 11) + b"\0" * 20, "11 tokens take"),
    "count too small": ("train_000001.bin", header(20240520, 1, 9) + b"\0" * 20, "9 tokens take"),
    "header cut short": ("train_000001.bin", header(20240520, 1, 10)[:500], "10 tokens take"),
    "empty shard": ("train_000001.bin", b"", "begins with 0, 0"),
    "empty raw file": ("train.bin", b"", "no tokens for train"),
    "odd bytes": ("train.bin", b"abc", "prepare it again"),
    "int32 tokens": ("train.bin", np.arange(40, dtype="<i4").tobytes(), "as in int32"),
    "no tokens at all": ("train_000001.bin", header(20240520, 1, 0), "no tokens"),
    "broken manifest": ("manifest.json", b"{", "JSON"),
    "meta that runs code": ("meta.pkl", pickle.dumps(Evil()), "no plain dictionary"),
    "meta cut short": ("meta.pkl", pickle.dumps(dict(vocab_size=3))[:-4], "no plain dictionary"),
    "token beyond vocab": ("train_1.bin", header(20240520, 1, 40) + b"\xff" * 80, "vocabulary of"),
}


@pytest.mark.parametrize("name, content, message", BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_bad_data_is_named_in_one_line(name, content, message, tmp_path, capsys):
    write_shard(tmp_path / "val_000000.bin", np.arange(30))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        open_dataset(str(tmp_path))
    assert message in str(error.value)
    assert "code ran" not in capsys.readouterr().out


def test_a_shard_that_is_gone_is_one_line(tmp_path, script):
    write_dataset(tmp_path, [500])
    gone = tmp_path / "train_000001.bin"
    gone.unlink()
    code, _, err = script(train.main, f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out'}")
    assert (code, err) == (2, [f"error: {gone}: No such file or directory"])


def test_a_shards_name_need_not_be_utf8(tmp_path):
    write_shard(tmp_path / "val_000000.bin", np.arange(30))
    write_shard(tmp_path / os.fsdecode(b"\xff_train_1.bin"), np.arange(30))
    assert len(open_dataset(str(tmp_path)).train) == 30


def test_an_empty_folder_and_a_missing_one_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_dataset(tmp_path / "data" / "fineweb_edu", [100])
    make = "make it with: python data"
    for name, message in (
        ("empty", "empty: holds no tokens for train"),
        ("fineweb", f"fineweb; did you mean fineweb_edu?; {make}/prepare_fineweb.py --tokens=10B"),
        ("mine", f"no folder data/mine; {make}/prepare_text.py FILE --out=data/mine; or give its"),
        ("openwebtext", "the default; config/quickstart.py needs no data; make it with"),
    ):
        with pytest.raises(UserError) as raised:
            open_dataset(name)
        assert all(message in problem or name == "empty" for problem in raised.value.problems)
        assert message in raised.value.problems[0]


@pytest.mark.parametrize(
    "arguments, tokens",
    [
        (["gpt124m_4070.py"], "10B"),
        (["fast124m_4070.py"], "1.3B"),
        (["fast124m_4070.py", "--hours=8"], "2B"),
    ],
)
def test_a_missing_dataset_is_made_with_as_many_tokens_as_the_run_reads(
    arguments, tokens, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config, *changes = arguments
    (problem,) = check_dataset(load_config([f"{ROOT}/config/{config}", *changes]))
    assert f"prepare_fineweb.py --tokens={tokens} --out=" in problem


def test_a_shard_is_of_the_split_that_its_name_says(tmp_path):
    """The letters of "val" stand in "retrieval": its training data would be validated on."""
    write_shard(tmp_path / "retrieval_train_000001.bin", np.arange(40))
    write_shard(tmp_path / "retrieval_val_000000.bin", np.arange(30))
    (tmp_path / "retrieval.bin").write_bytes(b"of no split, so never looked at")
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val)) == (40, 30)


SPLITS = {
    "train.bin": "train",
    "val_000000.bin": "val",
    "fineweb-train-0001.bin": "train",
    "medieval.train.bin": "train",
    "constrained_val_000000.bin": "val",
    "train_of_thought_val_000000.bin": "val",
    "my_val_set_train_000001.bin": "train",
    "evaluation_000000.bin": None,
    "training_000000.bin": None,
}


def test_the_last_word_train_or_val_in_a_name_decides():
    assert {name: split_of(name) for name in SPLITS} == SPLITS


def meta(**values) -> bytes:
    return pickle.dumps(values)


UNKNOWN_TOKENIZERS = {
    "nanoGPT's way with a tokenizer of one's own": ("meta.pkl", meta(vocab_size=100)),
    "more ids than GPT-2's": ("meta.pkl", meta(vocab_size=60_000)),
    "itos of numbers": ("meta.pkl", meta(vocab_size=40, itos=dict(enumerate(range(40))))),
    "itos too short": ("meta.pkl", meta(vocab_size=40, itos={0: "a"})),
}


@pytest.mark.parametrize(
    "name, content", UNKNOWN_TOKENIZERS.values(), ids=UNKNOWN_TOKENIZERS.keys()
)
def test_a_tokenizer_that_does_not_fit_is_unknown_and_no_reason_to_stop(name, content, tmp_path):
    """Its first sample would end in a traceback, hours into the run."""
    write_shard(tmp_path / "train_000001.bin", np.arange(40))
    write_shard(tmp_path / "val_000000.bin", np.arange(30))
    (tmp_path / name).write_bytes(content)
    assert open_dataset(str(tmp_path)).tokenizer == dict(kind="unknown")
    with pytest.raises(UserError, match="tokenizer: unknown"):
        Tokenizer(dict(kind="unknown"))


@pytest.mark.parametrize("device, non_blocking", [("cuda", True), ("mps", False), ("cpu", False)])
def test_only_cuda_copies_a_batch_without_waiting(device, non_blocking):
    """On MPS the copy would read memory that is freed already: silently wrong data."""
    block = mock.MagicMock()
    to_batch(block, torch.device(device))
    block.to.assert_called_once_with(torch.device(device), non_blocking=non_blocking)


def test_an_error_while_the_reader_is_busy_does_not_abort_the_process(dataset, tmp_path):
    """
    Python, shutting down under a thread inside of torch's C++, calls terminate(): SIGABRT in place
    of the exit code.
    """
    code = (
        "import sys, torch, train; from common import console; from data import loader\n"
        "load = loader.Batches.load\n"
        "def slow(self, first):\n"
        "    for _ in range(2):\n"
        "        torch.randn(1000, 1000) @ torch.randn(1000, 1000)\n"
        "    return load(self, first)\n"
        "loader.Batches.load = slow\n"
        "def fail(*_):\n"
        "    raise console.UserError('the next step of the start')\n"
        "train.StopSignals = fail\n"
        "console.run_main(train.main)\n"
    )
    code, _, err = run_process("-c", code, *flags(dataset, tmp_path), WHOLE_END="1")
    assert code == 2 and err == "error: the next step of the start\n"


@pytest.mark.parametrize(
    "change, expected",
    [
        # 300 and 400 tokens of validation
        (dict(bytes=[900, 500]), 2.0),
        (dict(bytes=[900, 500], tokenizer="gpt2"), 2.0),
        (dict(bytes=[0, 140], tokenizer="gpt2"), 0.2),  # a shard may hold no text's end
        (dict(documents=[20, 15]), None),  # an older version has not counted
    ],
)
def test_bytes_per_token_are_those_of_the_validation_split(change, expected, tmp_path):
    write_dataset(tmp_path / "d", [400, 1000], val_tokens=300)
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    first, second, train = manifest["shards"]
    (tmp_path / "d" / second["name"]).rename(tmp_path / "d" / "val_000001.bin")
    second["name"] = "val_000001.bin"
    manifest["tokenizer"] = change.pop("tokenizer", "byte")
    train["bytes"] = 12345  # of no interest
    del first["bytes"], second["bytes"]
    for name, values in change.items():
        first[name], second[name] = values
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(manifest))
    assert open_dataset(str(tmp_path / "d")).bytes_per_token == expected
