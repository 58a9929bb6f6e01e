"""
Training straight from text: the same windows whoever tokenises them, exact resume, and one line for
whatever goes wrong.
"""

import multiprocessing
import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from documents import REVISION, documents, serve_hub, write_jsonl, write_parquet, write_source
from helpers import (
    assert_same_state,
    flags,
    load,
    load_newest,
    records,
    run_here,
    run_process,
    start_process,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import train
from common.console import UserError
from configurator import Config
from data import sources, stream
from data.loader import TrainBatches

STOPPING = r"stopping after this iteration, about \d+ s; again: at once, back to .*\n"
CPU = torch.device("cpu")
# with nulls and empty ones
TEXTS = [text for part in range(3) for text in documents(160, seed=part, words=40)]
# bytes for tokens need no vocabulary
BYTES = "from data import stream\nstream.named_spec = lambda name: {'kind': 'byte'}\n"
TRAIN = (
    BYTES + "import train; from common import console\nconsole.run_main(train.main, train.explain)"
)


@pytest.fixture(autouse=True)
def byte_tokens(monkeypatch):
    monkeypatch.setattr(stream, "named_spec", lambda name: {"kind": "byte"})


@pytest.fixture
def warm_workers(monkeypatch):
    """
    Workers that fork from a process that has imported torch already. As users have them, each a
    new Python, they are in the tests that run train.py in a process of its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench", "data.stream"])

    def loader(pieces, **options):
        if options["num_workers"]:
            options["multiprocessing_context"] = context
        return DataLoader(pieces, **options)

    monkeypatch.setattr(stream, "DataLoader", loader)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """TEXTS in two parquet files, which a new process opens faster than jsonl."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder / "a.parquet", TEXTS[:250])
    write_parquet(folder / "b.parquet", TEXTS[250:])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """TEXTS in files of both forms, the parquet ones in row groups of 100."""
    folder = tmp_path_factory.mktemp("text")
    write_parquet(folder / "a.parquet", TEXTS[:160])
    write_jsonl(folder / "b.jsonl", TEXTS[160:320])
    write_parquet(folder / "c.parquet", TEXTS[320:])
    return folder


def split_by_hand(texts: list, held_out: int) -> tuple[list[int], list[int]]:
    """
    Validation: whole documents until there are as many tokens; training: the others, a zero before
    each.
    """
    val, rest = [], [[0, *text.encode()] for text in texts if text]
    while len(val) < held_out:
        val += rest.pop(0)
    return val, sum(rest, [])


def windows_by_hand(tokens: list[int], block_size: int, first: int, count: int) -> list[list[int]]:
    endless = np.resize(np.array(tokens), (first + count) * block_size + 1)
    starts = [n * block_size for n in range(first, first + count)]
    return [endless[start : start + block_size + 1].tolist() for start in starts]


def config_for(dataset, **changes) -> Config:
    options = dict(block_size=32, batch_size=3, eval_tokens=500, data_workers=0)
    return Config(stream=True, dataset=str(dataset), **(options | changes))


def take(
    config: Config, count: int, position: dict | None = None, rank: int = 0, world_size: int = 1
) -> tuple[list, dict]:
    """
    The first `count` micro-batches as rows of T + 1 tokens, and the position behind them (all
    ranks').
    """
    data = stream.open_stream(config, position)
    consumed = position["sequence"] if position else 0
    batches = TrainBatches(data, config, CPU, consumed, rank, world_size)
    rows = []
    for x, y in batches.take(count):
        rows += torch.cat([x, y[:, -1:]], dim=1).tolist()
    end = data.stream.position(consumed + count * world_size * config.batch_size)
    batches.close()
    return rows, end


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers_reads_the_windows_counted_by_hand(
    folder, parquet, workers, warm_workers
):
    config = config_for(parquet if workers else folder, data_workers=workers)
    data = stream.open_stream(config)
    val, tokens = split_by_hand(TEXTS, 500)
    assert data.val.tokens.tolist() == val and data.train.tokens.tolist() == tokens[:500]
    batches = 2 * len(tokens) // 96  # well into the third time through the source
    assert take(config, batches)[0] == windows_by_hand(tokens, 32, 0, 3 * batches)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_windows_do_not_depend_on_batches_processes_or_resumes(tmp_path_factory, data):
    texts = data.draw(
        st.lists(st.sampled_from([None, "", "a", "bc", "d" * 9, "e" * 40]), min_size=8, max_size=40)
    )
    texts += ["the last ones leave something for training"] * 2
    T, held_out = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 30))
    batch_size, world_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    path = tmp_path_factory.mktemp("source") / "a.parquet"
    prepared = write_parquet(path, texts)
    config = config_for(prepared, block_size=T, eval_tokens=held_out, batch_size=batch_size)
    val, tokens = split_by_hand(texts, max(held_out, T + 1))
    position, n = None, 0
    # a run and two resumes, perhaps with another number of processes, each anywhere
    for _ in range(3):
        steps = data.draw(st.integers(0, 20))
        ranks = [take(config, steps, position, rank, world_size) for rank in range(world_size)]
        rows = [
            [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)] for rows, _ in ranks
        ]
        in_turn = [row for batches in zip(*rows, strict=True) for batch in batches for row in batch]
        assert in_turn == windows_by_hand(tokens, T, n, steps * world_size * batch_size)
        position, n = ranks[0][1], n + steps * world_size * batch_size
        assert position["sequence"] == n
        assert all(type(value) in (int, str) for value in position.values())
        world_size = data.draw(st.integers(1, 3))


def test_half_and_half_equals_the_whole_bit_for_bit(folder, tmp_path, monkeypatch, warm_workers):
    """
    With dropout and accumulation, across the source's end, and another number of workers in the
    second half.
    """
    monkeypatch.setattr(stream, "ANCHOR_TOKENS", 2000)
    options = dict(stream=True, dropout=0.1, gradient_accumulation_steps=3, block_size=128)
    options |= dict(batch_size=16, eval_tokens=1000, lr_decay_iters=8)
    tokens = len(split_by_hand(TEXTS, 1000)[1])
    assert 4 * 3 * 16 * 128 < tokens < 8 * 3 * 16 * 128
    run_here(folder, tmp_path / "halves", **options, data_workers=1, max_iters=4)
    options |= dict(data_workers=0, max_iters=8)
    run_here(folder, tmp_path / "halves", **options, init_from="resume")
    run_here(folder, tmp_path / "whole", **options)
    halves, whole = load(tmp_path / "halves", 8), load(tmp_path / "whole", 8)
    assert_same_state(halves, whole)
    # counted from a document on the way
    assert load(tmp_path / "halves", 4)["stream"]["token"] < 4 * 3 * 16 * 128
    halves, whole = records(tmp_path / "halves", "step"), records(tmp_path / "whole", "step")
    assert [step["loss"] for step in halves] == [step["loss"] for step in whole]


def test_the_held_out_documents_stay_when_a_resumed_run_evaluates_on_more(folder, tmp_path):
    options = dict(stream=True, data_workers=0)
    run_here(folder, tmp_path, **options, max_iters=2)
    run_here(folder, tmp_path, **options, max_iters=4, init_from="resume", eval_tokens=3000)
    assert [load(tmp_path, i)["stream"]["held_out"] for i in (2, 4)] == [256, 256]


def test_the_bytes_of_the_held_out_documents_are_counted_without_end_of_text(folder):
    val, _ = split_by_hand(TEXTS, 500)
    data = stream.open_stream(config_for(folder))
    assert data.bytes_per_token == pytest.approx((len(val) - val.count(0)) / len(val))


def test_waiting_for_the_stream_is_booked_as_data_wait(folder, tmp_path, monkeypatch):
    read = stream.Stream.read

    def slow(*arguments):
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(stream.Stream, "read", slow)
    run_here(folder, tmp_path, stream=True, data_workers=0, eval_interval=100)
    for step in records(tmp_path, "step")[4:]:  # the first are on what was read ahead meanwhile
        # two micro-batches of 100 ms, less what the reading overlaps
        assert step["step_ms"] > step["data_wait_ms"] > 50


# -----------------------------------------------------------------------------
# Processes


def start_training(dataset, out_dir, code=TRAIN, **changes):
    # lines so rare that nobody needs to read them for the run to go on
    options = dict(stream=True, data_workers=1, max_iters=10**6, eval_interval=10**6)
    options |= dict(log_interval=20, batch_size=16)
    return start_process("-c", code, *flags(dataset, out_dir, **(options | changes)))


def wait_for(process, text) -> None:
    while text not in (line := process.stdout.readline()):
        assert line, process.stderr.read()


def workers_of(process) -> list[int]:
    children = psutil.Process(process.pid).children()
    return sorted(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))


def is_gone(pid: int) -> bool:
    for _ in range(300):
        try:
            # in a container nobody may bury it
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_worker_ends_the_run_with_one_line_and_a_checkpoint(parquet, tmp_path):
    # DataLoader looks for dead workers every 5 seconds
    hasty = "from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator\n"
    hasty += "Iterator._try_get_data.__defaults__ = (0.2,)\n"
    process = start_training(parquet, tmp_path, code=hasty + TRAIN, data_workers=2)
    wait_for(process, "iter 20")
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert stderr.startswith("error: a data worker failed (") and stderr.count("\n") == 1
    assert stderr.endswith("--init_from=resume continues the run\n")
    saved = load_newest(tmp_path)
    assert saved["progress"]["iter_num"] > 20
    assert saved["stream"]["sequence"] == saved["progress"]["sequences"]
    assert all(map(is_gone, workers))


def test_sigterm_while_waiting_for_data_saves_and_ends(parquet, tmp_path):
    process = start_training(parquet, tmp_path)
    wait_for(process, "iter 20")
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGSTOP)  # so that no more data comes
    steps = 0
    while steps != (steps := len(records(tmp_path, "step"))):
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.fullmatch(STOPPING, stderr)
    assert load_newest(tmp_path)["progress"]["iter_num"] > 20
    assert is_gone(worker)


def test_ctrl_c_in_a_terminal_is_the_main_process_s_to_handle(parquet, tmp_path):
    process = start_training(parquet, tmp_path, code="import os; os.setsid()\n" + TRAIN)
    wait_for(process, "iter 20")
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(STOPPING, stderr)
    assert load_newest(tmp_path)["progress"]["iter_num"] > 20
    assert workers and all(map(is_gone, workers))


def test_ctrl_c_while_the_workers_start_ends_without_a_traceback(parquet, tmp_path):
    """Before the loop begins there is nothing to save, and nothing is said."""
    process = start_training(parquet, tmp_path, code="import os; os.setsid()\n" + TRAIN)
    wait_for(process, "tokens per iteration")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(f"({STOPPING})?", stderr)


@pytest.mark.parametrize(
    "moment",
    ["tokens per iteration", pytest.param("iter 20", marks=pytest.mark.slow)],
    ids=["while they start", "later"],
)
def test_workers_end_with_a_killed_run(moment, parquet, tmp_path):
    process = start_training(parquet, tmp_path)
    wait_for(process, moment)
    while not (workers := workers_of(process)):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert all(map(is_gone, workers))


def test_a_run_ends_without_a_word_to_stderr(folder, tmp_path):
    """Its workers read both forms: parquet with Arrow's threads, jsonl with tqdm's bars."""
    options = flags(folder, tmp_path, stream=True, data_workers=2, batch_size=32)
    code, _, stderr = run_process("-c", TRAIN, *options, WHOLE_END="1")
    assert (code, stderr) == (0, "")


def test_the_hub_and_local_files_give_the_same_stream(tmp_path):
    """In a process of its own: the hub's address is read when its library is imported."""
    code = """
import sys, hashlib, torch
from configurator import Config
from data import stream
from data.loader import TrainBatches
for name in sys.argv[1:]:
    config = Config(stream=True, tokenizer="byte", dataset=name, data_workers=0)
    config.block_size, config.batch_size, config.eval_tokens = 64, 64, 9000
    data = stream.open_stream(config)
    batches = TrainBatches(data, config, torch.device("cpu"))
    sha256 = hashlib.sha256(data.val.tokens)
    for _ in range(50):
        sha256.update(batches.take(1)[0][1].numpy())
    revision, place = data.stream.identity["revision"], data.stream.workers.pieces.files[0]
    print(revision, sha256.hexdigest(), place, sep="|")
    batches.close()
"""
    source = write_source(tmp_path / "source")
    with serve_hub(source) as address:
        hub = dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path))
        code, stdout, stderr = run_process("-c", code, "org/name:small", str(source), **hub)
    assert (code, stderr) == (0, "")
    from_hub, local = (line.split("|") for line in stdout.splitlines())
    assert from_hub[0] == REVISION and "hf://datasets/org/name@" in from_hub[2]
    assert from_hub[1] == local[1]


# -----------------------------------------------------------------------------
# Bad input


def broken_source(folder: Path, name: str) -> Path:
    path = folder / name
    if name == "other.parquet":
        write_parquet(path, ["a"], column="body")
    elif name == "nothing.jsonl":
        write_jsonl(path, [None, "", None])
    elif name == "small.parquet":
        write_parquet(path, ["a few words"] * 20)
    elif name == "broken.jsonl":
        path.write_text('{"text": "a"}\n{"text": "b\n')
    elif name == "empty":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "name, message",
    [
        ("other.parquet", "has no column text; its columns: id, body"),
        ("nothing.jsonl", "0 for training; choose a larger --dataset"),
        ("small.parquet", "for training; choose a larger --dataset, or smaller --eval_tokens"),
        ("broken.jsonl", "JSON parse error"),
        ("nowhere*.parquet", "no such file"),
        ("empty", "holds no .parquet, .jsonl, .json, .jsonl.gz, "),
    ],
)
def test_a_source_that_cannot_be_used_is_one_line_before_training(tmp_path, script, name, message):
    broken = broken_source(tmp_path, name)
    options = flags(broken, tmp_path / "out", stream=True, data_workers=0)
    code, _, lines = script(train.main, *options)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0] and name in lines[0] and not (tmp_path / "out").exists()


def test_without_a_network_one_line_names_the_way_out(tmp_path):
    nowhere = dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    options = flags("org/name:small", tmp_path / "out", stream=True)
    code, _, stderr = run_process("-c", TRAIN, *options, **nowhere)
    assert code == 2 and stderr.count("\n") == 1, stderr
    assert "give local files with --dataset" in stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_that_fails_midway_ends_in_one_line_and_a_checkpoint(
    tmp_path, script, workers, warm_workers
):
    write_parquet(tmp_path / "a.parquet", documents(400))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 damaged")
    options = dict(stream=True, data_workers=workers, batch_size=16)
    options |= dict.fromkeys(["max_iters", "eval_interval", "log_interval"], 10**6)
    code, _, lines = script(train.main, *flags(tmp_path, tmp_path / "out", **options))
    assert code == 1 and len(lines) == 1 and "b.parquet" in lines[0]
    assert lines[0].endswith("--init_from=resume continues the run")
    saved = load_newest(tmp_path / "out")
    iterations = len(split_by_hand(documents(400), 256)[1]) // (16 * 2 * 16)
    # all that was there was trained on
    assert iterations - 2 <= saved["progress"]["iter_num"] <= iterations


def test_a_changed_source_and_a_changed_mind_are_refused_on_resume(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", documents(100))
    run_here(path, tmp_path / "out", stream=True, data_workers=0, max_iters=2)
    with pytest.raises(UserError, match=r"stream True \(asked for: False\)"):
        run_here(path, tmp_path / "out", stream=False, init_from="resume")
    write_parquet(path, documents(101))
    with pytest.raises(UserError, match="is not what the checkpoint was trained on"):
        run_here(path, tmp_path / "out", stream=True, data_workers=0, init_from="resume")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_failure_on_the_way_does_not_confuse_whose_turn_it_is(tmp_path, monkeypatch, form):
    texts = [str(i) for i in range(700)]
    path = (write_parquet if form == "parquet" else write_jsonl)(tmp_path / f"a.{form}", texts)
    whole = list(sources.files_source([str(path)])(0, 37))
    read_rows, good_reads = sources.read_rows, count()

    def failing(*arguments):
        for piece in read_rows(*arguments):
            if next(good_reads) % 3 == 1:
                raise ConnectionError("reset by peer")
            yield piece

    monkeypatch.setattr(sources, "read_rows", failing)
    for number in range(3):
        shared = list(sources.files_source([str(path)], (0, 0), (number, 3))(0, 37))
        assert shared == whole[number::3]
