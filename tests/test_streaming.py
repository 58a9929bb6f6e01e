"""
Training on text that is prepared meanwhile: the same windows however it is run, exact resume, no
process left behind, and one line for whatever goes wrong.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from documents import (
    REVISION,
    documents,
    serve_hub,
    write_jsonl,
    write_parquet,
    write_source,
)
from helpers import (
    ROOT,
    assert_same_state,
    flags,
    load,
    load_newest,
    needs_signals,
    records,
    run_here,
    run_process,
    start_process,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from common.console import RunError, UserError
from configurator import Config
from data import stream
from data.loader import Batches
from data.tokenizer import Tokenizer
from data.writer import Plan, prepare
from training.ranks import Ranks

STOPPING = r"stopping after this iteration; .*\n"
CPU = torch.device("cpu")
BYTE = Tokenizer({"kind": "byte"})
# with nulls and empty ones
TEXTS = [text for part in range(3) for text in documents(160, seed=part, words=40)]
# train.py, with shards so small that a preparation is long on its way
SMALL_SHARDS = """
from common.console import run_main
from data import stream
import train
stream.SHARD_TOKENS, stream.TOKENS_AHEAD = 5000, 20_000
run_main(train.main, train.explain)
"""
STREAM = dict(stream=True, tokenizer="byte")  # bytes for tokens need no vocabulary


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    """The current folder, where data/streamed is made; with shards so small that there are many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream, "SHARD_TOKENS", 5000)
    return tmp_path


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
    windows = (len(tokens) - 1) // block_size
    starts = [n % windows * block_size for n in range(first, first + count)]
    return [tokens[start : start + block_size + 1] for start in starts]


def config_for(dataset, **changes) -> Config:
    options = dict(block_size=32, batch_size=3, eval_tokens=500)
    return Config(**STREAM, dataset=str(dataset), **(options | changes))


def take(data, config: Config, count: int, consumed=0, rank=0, world_size=1) -> list[list[int]]:
    """`count` micro-batches as rows of T + 1 tokens."""
    batches = Batches(data, config, CPU, consumed, rank, world_size)
    rows = []
    for x, y in batches.take(count):
        rows += torch.cat([x, y[:, -1:]], dim=1).tolist()
    batches.close()
    return rows


def test_the_windows_are_those_counted_by_hand_and_validation_is_held_out(folder):
    config = config_for(folder, data_workers=2)
    data = stream.open_stream(config, Ranks())
    val, tokens = split_by_hand(TEXTS, 500)
    assert data.val.read_windows([0], len(val))[0].tolist() == val
    assert len(data.val) == len(val) and 500 <= len(data.train) < len(tokens)
    assert data.bytes_per_token == pytest.approx((len(val) - val.count(0)) / len(val))
    batches = 2 * len(tokens) // 96  # well into the third time through the source
    assert take(data, config, batches) == windows_by_hand(tokens, 32, 0, 3 * batches)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_windows_do_not_depend_on_batches_processes_or_resumes(tmp_path_factory, data):
    texts = data.draw(
        st.lists(st.sampled_from([None, "", "a", "bc", "d" * 9, "e" * 40]), min_size=8, max_size=40)
    )
    texts += ["the last ones leave something for training"] * 2
    T, held_out = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 30))
    batch_size, world_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("prepared")
    plan = Plan(folder, "texts", [], BYTE, 0, {}, val_tokens=held_out)
    plan.shard_tokens = data.draw(st.integers(1, 90))
    with mock.patch("os.fsync"):
        prepare(plan, lambda file, row: iter([(0, row, texts[row:])]), workers=2)
    config = config_for(folder, block_size=T, batch_size=batch_size)
    _, tokens = split_by_hand(texts, held_out)
    n = 0
    # a run and two resumes, perhaps with another number of processes, each anywhere
    for _ in range(3):
        steps, all_rows = data.draw(st.integers(0, 20)), []
        for rank in range(world_size):
            source = mock.Mock(stream=stream.Stream(folder, T))
            rows = take(source, config, steps, n, rank, world_size)
            all_rows.append([rows[i : i + batch_size] for i in range(0, len(rows), batch_size)])
        in_turn = [row for batches in zip(*all_rows, strict=True) for b in batches for row in b]
        assert in_turn == windows_by_hand(tokens, T, n, steps * world_size * batch_size)
        n += steps * world_size * batch_size
        world_size = data.draw(st.integers(1, 3))


def test_half_and_half_equals_the_whole_bit_for_bit(folder, tmp_path):
    """
    With dropout and accumulation, across the source's end; the second half with another number of
    threads, and after the shards were deleted.
    """
    options = dict(STREAM, dropout=0.1, gradient_accumulation_steps=3, block_size=128)
    options |= dict(batch_size=16, eval_tokens=1000, lr_decay_iters=8)
    tokens = len(split_by_hand(TEXTS, 1000)[1])
    assert 4 * 3 * 16 * 128 < tokens < 8 * 3 * 16 * 128
    run_here(folder, tmp_path / "halves", **options, max_iters=4)
    (tmp_path / "data").rename(tmp_path / "moved")
    options |= dict(data_workers=2, max_iters=8)
    run_here(folder, tmp_path / "halves", **options, init_from="resume")
    run_here(folder, tmp_path / "whole", **options)
    assert_same_state(load(tmp_path / "halves", 8), load(tmp_path / "whole", 8))
    halves, whole = records(tmp_path / "halves", "step"), records(tmp_path / "whole", "step")
    assert [step["loss"] for step in halves] == [step["loss"] for step in whole]


def test_the_held_out_documents_stay_when_a_resumed_run_evaluates_on_more(folder, tmp_path):
    run_here(folder, tmp_path / "out", **STREAM, max_iters=2)
    more = dict(init_from="resume", eval_tokens=3000)
    assert run_here(folder, tmp_path / "out", **STREAM, max_iters=4, **more) == 0
    (manifest,) = tmp_path.glob("data/streamed/*/manifest.json")
    assert json.loads(manifest.read_text())["val_tokens"] == 256


def shards_in(work: Path) -> int:
    return len(list(work.glob("data/streamed/*/train_*.bin")))


def test_the_preparation_runs_no_further_ahead_than_wanted(folder, work, monkeypatch):
    monkeypatch.setattr(stream, "TOKENS_AHEAD", 10_000)
    data = stream.open_stream(config_for(folder), Ranks())
    assert len(split_by_hand(TEXTS, 500)[1]) > 35_000
    time.sleep(1)
    # what the start wanted, what lies ahead, and the shard that reaches it
    assert 1 <= shards_in(work) <= 3
    data.stream.ask(12_000)
    while shards_in(work) < 4:
        time.sleep(0.05)
    time.sleep(1)
    assert shards_in(work) <= 5
    data.stream.close()


def test_waiting_for_the_stream_is_said_and_booked_as_data_wait(
    folder, tmp_path, monkeypatch, capsys
):
    read = stream.Stream.read

    def slow(*arguments):
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(stream.Stream, "read", slow)
    run_here(folder, tmp_path, **STREAM, eval_interval=100)
    for step in records(tmp_path, "step")[4:]:  # the first are on what was read ahead meanwhile
        # two micro-batches of 100 ms, less what the reading overlaps
        assert step["step_ms"] > step["data_wait_ms"] > 50
    source = stream.open_stream(config_for(folder), Ranks()).stream
    monkeypatch.setattr(stream, "PATIENCE", 0.05)
    looks = []
    monkeypatch.setattr(source, "look", lambda *_: looks.append(1) or len(looks) > 3)
    source.data.complete = False
    read(source, 10**6, 1)
    assert re.search(r"data: [\d,]+ tokens are prepared, waiting for 32", capsys.readouterr().out)
    source.close()


def test_a_failure_is_a_warning_once_while_there_are_shards(folder, tmp_path, capsys):
    run_here(folder, tmp_path, **STREAM, max_iters=2)
    source = stream.open_stream(config_for(folder), Ranks()).stream
    source.problems.append(f"c.parquet: damaged; {stream.CONTINUE}")
    capsys.readouterr()
    for first in (0, 16):
        assert source.read(first, 16).shape[0] == 16
    warned = "warning: c.parquet: damaged; the run continues to the last shard\n"
    assert capsys.readouterr().err == warned
    source.close()


# -----------------------------------------------------------------------------
# Processes


def start_training(dataset, out_dir, work, code="", **changes):
    # lines so rare that nobody needs to read them for the run to go on
    options = dict(STREAM, max_iters=10**6, eval_interval=10**6)
    options |= dict(log_interval=20, batch_size=16)
    arguments = flags(dataset, out_dir, **(options | changes))
    return start_process("-c", code + SMALL_SHARDS, *arguments, cwd=work, PYTHONPATH=str(ROOT))


def wait_for(process, text) -> None:
    while text not in (line := process.stdout.readline()):
        assert line, process.stderr.read()


def preparation_of(process) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # another one, which has ended
            if "--follow" in child.cmdline():
                return child
    return None


def is_gone(process: psutil.Process) -> bool:
    for _ in range(300):
        # in a container nobody may bury it
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def endless(tmp_path) -> Path:
    """A source whose preparation is not done before its training stops."""
    text = write_parquet(tmp_path / "endless" / "a.parquet", documents(6000)).parent
    for name in "bcdefgh":
        os.link(text / "a.parquet", text / f"{name}.parquet")
    return text


def test_a_killed_preparation_ends_the_run_with_one_line_and_a_checkpoint(endless, work, tmp_path):
    # it would be done with what training wants before the test can kill it
    out = tmp_path / "out"
    process = start_training(endless, out, work, block_size=128)
    wait_for(process, "iter 20")
    preparation = preparation_of(process)
    preparation.suspend()
    preparation.kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert re.fullmatch(r"error: the preparation of .* ended \((-9|15)\); --init_from=.*\n", stderr)
    assert load_newest(out)["progress"]["iter_num"] > 20


@needs_signals
def test_sigterm_while_waiting_for_data_saves_and_ends(endless, work, tmp_path):
    out = tmp_path / "out"
    process = start_training(endless, out, work, block_size=128)
    wait_for(process, "iter 20")
    preparation = preparation_of(process)
    preparation.suspend()  # so that no more data comes
    steps = 0
    while steps != (steps := len(records(out, "step"))):
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.fullmatch(STOPPING, stderr)
    assert load_newest(out)["progress"]["iter_num"] > 20
    assert is_gone(preparation)


@needs_signals
def test_ctrl_c_in_a_terminal_is_the_training_s_to_handle(endless, work, tmp_path):
    process = start_training(endless, tmp_path / "out", work, code="import os; os.setsid()\n")
    wait_for(process, "iter 20")
    preparation = preparation_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(STOPPING, stderr)
    assert is_gone(preparation)


def test_the_preparation_ends_with_a_killed_run(endless, work, tmp_path):
    process = start_training(endless, tmp_path / "out", work)
    wait_for(process, "iter 20")
    preparation = preparation_of(process)  # it waits until more is wanted
    process.kill()
    process.communicate()
    assert is_gone(preparation)


def test_a_second_run_reads_along_and_goes_on_where_the_first_ends(endless, work, tmp_path):
    """Its preparation waits for the first one's. Neither says a word to stderr."""
    first = start_training(endless, tmp_path / "1", work, max_iters=60)
    wait_for(first, "iter 0")
    preparation = preparation_of(first)
    preparation.suspend()
    options = dict(max_iters=120, eval_interval=120)
    second = start_training(endless, tmp_path / "2", work, **options)
    wait_for(second, "iter 0")
    time.sleep(1)
    prepared = shards_in(work)
    time.sleep(1)
    assert shards_in(work) == prepared and second.poll() is None
    preparation.resume()
    assert first.communicate(timeout=120)[1] == "" and first.returncode == 0
    assert second.communicate(timeout=120)[1] == "" and second.returncode == 0
    run_here(endless, tmp_path / "3", **STREAM, batch_size=16, **options)
    assert_same_state(load(tmp_path / "2", 120), load(tmp_path / "3", 120))


def test_the_hub_and_local_files_give_the_same_stream(tmp_path):
    """In a process of its own: the hub's address is read when its library is imported."""
    code = """
import sys, hashlib, torch
from configurator import Config
from data import stream
from data.loader import Batches
from data.shards import read_manifest
from training.ranks import Ranks
for name in sys.argv[1:]:
    sizes = dict(block_size=64, batch_size=64, eval_tokens=9000, max_iters=9)
    config = Config(stream=True, tokenizer="byte", dataset=name, **sizes)
    data = stream.open_stream(config, Ranks())
    batches = Batches(data, config, torch.device("cpu"))
    sha256 = hashlib.sha256(data.val.read_windows([0], len(data.val)))
    for _ in range(50):
        sha256.update(batches.take(1)[0][1].numpy())
    print(read_manifest(data.stream.folder)["revision"], sha256.hexdigest(), sep="|")
    batches.close()
"""
    source = write_source(tmp_path / "source")
    with serve_hub(source) as address:
        hub = dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path), PYTHONPATH=str(ROOT))
        arguments = ["org/name:small", str(source)]
        code, stdout, stderr = run_process("-c", code, *arguments, cwd=tmp_path, **hub)
    assert (code, stderr) == (0, "")
    lines = [line.split("|") for line in stdout.splitlines() if "|" in line]
    assert [revision for revision, _ in lines] == [REVISION, "None"]
    assert lines[0][1] == lines[1][1]


# -----------------------------------------------------------------------------
# What goes wrong


def broken_source(folder: Path, name: str) -> Path:
    path = folder / name
    if name == "other.parquet":
        write_parquet(path, ["a"], column="body")
    elif name == "nothing.jsonl":
        write_jsonl(path, [None, "", None])
    elif name == "small.parquet":
        write_parquet(path, ["a few words"] * 20)
    elif name == "empty":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "name, message",
    [
        ("other.parquet", "no text in the field text; fields: id, body"),
        ("nothing.jsonl", "3 of 3 rows (100.0%) hold no text"),
        ("small.parquet", "choose a larger --dataset, or smaller --eval_tokens"),
        ("nowhere*.parquet", "no such file"),
        ("empty", "no such file, or none there; read are .parquet, "),
    ],
)
def test_a_source_that_cannot_be_used_is_one_line_before_training(tmp_path, script, name, message):
    broken = broken_source(tmp_path, name)
    code, _, lines = script(train.main, *flags(broken, tmp_path / "out", **STREAM))
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0] and name in lines[0] and not (tmp_path / "out").exists()


def test_without_a_network_one_line_names_the_way_out(work, tmp_path):
    nowhere = dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    options = flags("org/name:small", tmp_path / "out", **STREAM)
    code, _, stderr = run_process(str(ROOT / "train.py"), *options, cwd=work, **nowhere)
    assert code == 2 and stderr.count("\n") == 1, stderr
    assert "give local files" in stderr and not (tmp_path / "out").exists()


def test_a_source_that_fails_midway_ends_in_one_line_and_a_checkpoint(tmp_path, script):
    """And once it is fixed the run goes on as if nothing had been."""
    source = tmp_path / "source"
    write_parquet(source / "a.parquet", documents(1100))  # the first 1,000 are looked at before
    (source / "b.parquet").write_bytes(b"PAR1 damaged")
    options = STREAM | dict(batch_size=16)
    options |= dict.fromkeys(["max_iters", "eval_interval", "log_interval"], 10**6)
    code, _, lines = script(train.main, *flags(source, tmp_path / "out", **options))
    *warnings, error = lines  # a warning where the shards were not used up yet
    assert code == 1 and error.startswith("error: ") and "b.parquet" in error
    assert "--init_from=resume continues the run" in error
    assert len(warnings) < 2 and all("continues to the last shard" in line for line in warnings)
    stopped = load_newest(tmp_path / "out")["progress"]["iter_num"]
    # all that was in finished shards was trained on
    assert stopped > 2
    write_parquet(source / "b.parquet", documents(400, seed=9))
    options |= dict(max_iters=stopped + 4, lr_schedule="constant")
    run = flags(source, tmp_path / "out", **options, init_from="resume")
    code, _, lines = script(train.main, *run)
    assert code == 0 and any("b.parquet: has changed since" in line for line in lines)


def test_a_disk_that_refuses_ends_in_one_line_and_a_checkpoint(endless, tmp_path, script):
    (place,) = [stream.streamed_folder(Config(dataset=str(endless), tokenizer="byte"))]
    prepared = []

    def refuse(self, *arguments, look=stream.Stream.look):
        if not prepared and (place / "manifest.json").exists():
            # what a full disk is for the preparation: an OSError from writing
            prepared.extend((place / f"train_{n:06}.bin").mkdir() or n for n in range(6, 400))
        return look(self, *arguments)

    options = STREAM | dict(batch_size=16)
    options |= dict.fromkeys(["max_iters", "eval_interval", "log_interval"], 10**6)
    with mock.patch.object(stream.Stream, "look", refuse):
        with mock.patch.object(stream, "TOKENS_AHEAD", 1000):
            code, _, lines = script(train.main, *flags(endless, tmp_path / "out", **options))
    *warnings, error = lines
    assert code == 1 and len(warnings) < 2 and ".bin: is a folder" in error, lines
    assert error.endswith("--init_from=resume continues the run")
    assert load_newest(tmp_path / "out")["progress"]["iter_num"] > 2


def test_what_a_stream_takes_on_the_disk_is_said_with_a_warning_where_it_lacks(
    folder, tmp_path, monkeypatch, capsys
):
    run_here(folder, tmp_path / "1", **STREAM, max_iters=2)
    output = capsys.readouterr()
    (most,) = re.findall(r"takes 2 bytes per token, at most (\S+) GB in this run", output.out)
    held = sum(file.stat().st_size for file in tmp_path.glob("data/streamed/*/*"))
    assert held < 1e9 * float(most) and output.err == ""
    free = mock.Mock(return_value=mock.Mock(free=10**8))
    monkeypatch.setattr("shutil.disk_usage", free)
    assert run_here(folder, tmp_path / "2", **STREAM, max_iters=10**6, hours="0.0001") == 0
    assert "GB of disk" not in capsys.readouterr().err  # by the clock nobody knows
    with mock.patch.object(train, "wait_for_data", lambda *_: "data"), pytest.raises(RunError):
        run_here(folder, tmp_path / "3", **STREAM, max_iters=10**6)
    assert "needs 0.32 GB of disk, has 0.10 GB free; the run" in capsys.readouterr().err


def test_what_cannot_be_continued_is_refused_in_one_line(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", documents(100))
    run_here(path, tmp_path / "out", **STREAM, max_iters=2)
    resume = dict(init_from="resume", max_iters=4)
    with pytest.raises(UserError, match=r"stream True \(asked for: False\)"):
        run_here(path, tmp_path / "out", stream=False, **resume)
    write_parquet(path, documents(101))
    with pytest.raises(UserError, match=r"a.parquet has changed\); .* delete that one"):
        run_here(path, tmp_path / "out", **STREAM, **resume)
    other = write_parquet(tmp_path / "b.parquet", documents(99, seed=5))
    with pytest.raises(UserError, match=r"was trained on .*a\.parquet\), or .* another --out_dir"):
        run_here(other, tmp_path / "out", **STREAM, **resume)
    with pytest.raises(UserError, match=r"was trained on .*a\.parquet\), or .* another --out_dir"):
        run_here(other, tmp_path / "out", **STREAM, init_from="auto", max_iters=2)


def test_other_text_behind_the_same_beginning_is_refused_too(tmp_path):
    """A folder that was deleted is prepared again: of the same text, or else the run is over."""
    texts = documents(100)
    path = write_parquet(tmp_path / "a.parquet", texts)
    run_here(path, tmp_path / "out", **STREAM, max_iters=200)  # reads all of it
    shutil.rmtree(tmp_path / "data" / "streamed")
    run_here(path, tmp_path / "out", **STREAM, max_iters=204, init_from="resume")
    shutil.rmtree(tmp_path / "data" / "streamed")
    write_parquet(path, [*texts[:-1], "other"])
    with pytest.raises(RunError, match="differs from what this run has trained on"):
        run_here(path, tmp_path / "out", **STREAM, max_iters=208, init_from="resume")
