"""
Train on text that is prepared during the run: what the preparation makes and when it ends, what a
run does when no more text arrives, and exact resumes. test_losses.py and test_interrupts.py also
test streams, and test_ranks.py tests them with two ranks.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cases import slow_but
from documents import (
    digests,
    documents,
    manifest_of,
    serve_hub,
    stored,
    write_jsonl,
    write_parquet,
)
from program import (
    ROOT,
    TINY_RUN,
    Result,
    assert_same_run,
    changed,
    checkpoints,
    column,
    finish,
    flags,
    needs_signals,
    run,
    start,
    train,
    wait_for_line,
)

FINEWEB = ROOT / "data/prepare_fineweb.py"
TINY = TINY_RUN | dict(
    n_layer=1,
    eval_tokens=256,
    eval_interval=10**6,
    stream=True,
    tokenizer="byte",
)
TOKENS_PER_ITERATION = 16 * 4 * 2


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    """Change to this test's folder, where data/streamed is made."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """
    Copy the program, but prepare smaller shards, and fewer tokens ahead of training, so that no
    preparation of `source` ends before its run.
    """
    constants = "SHARD_TOKENS = 5000\nTOKENS_AHEAD = 20_000"
    return changed(tmp_path_factory.mktemp("program") / "changed", {"data/stream.py": constants})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Write text of 3 million byte tokens, more than any run here reads."""
    folder = tmp_path_factory.mktemp("source")
    write_parquet(folder / "0.parquet", documents(3000))
    for n in range(1, 8):
        shutil.copy(folder / "0.parquet", folder / f"{n}.parquet")
    return folder


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -----------------------------------------------------------------------------
# The preparation alone, as a run starts it: it reads how many tokens it may prepare


class Preparation:
    """Start a preparation as a run does, and write the tokens that it may prepare to its stdin."""

    def __init__(self, source: Path, out: Path):
        names = dict(
            source=source, out=out, tokenizer="byte", run_id="r", workers=1, order="prefix"
        )
        sizes = dict(val_tokens=1000, shard_tokens=5000)
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, str(FINEWEB), *flags(**names, **sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def allow(self, tokens: int) -> None:
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()

    def shards(self) -> int:
        return len(list(self.out.glob("train_*.bin")))


@pytest.mark.slow
def test_a_streams_preparation_makes_only_the_allowed_tokens_and_ends_with_its_pipe(source, work):
    """
    Allow 0, 12,000, 21,000 and 31,000 tokens, which take 0, 3, 5 and 7 whole shards. Each time,
    close the pipe, and let the same command continue.
    """
    sizes = dict(tokenizer="byte", val_tokens=1000, shard_tokens=5000, order="prefix")
    sizes = flags(source=source, **sizes)
    assert run("data/prepare_fineweb.py", *sizes, "--tokens=60k", "--out=straight").code == 0
    straight = digests(Path("straight"))
    for allowed, shards in ((0, 0), (12_000, 3), (21_000, 5), (31_000, 7)):
        preparation = Preparation(source, work / "out")
        preparation.allow(allowed)
        wait_until((work / "out/val_000000.bin").exists)
        while preparation.shards() < shards:
            time.sleep(0.005)
        time.sleep(0.1)  # the next one would take some 10 ms
        assert preparation.shards() == shards
        assert manifest_of(work / "out")["run_id"] == "r"
        preparation.process.stdin.close()
        assert preparation.process.wait(20) == 1 and preparation.process.stderr.read() == ""
    assert digests(work / "out").items() < straight.items()


# -----------------------------------------------------------------------------
# The run


def start_run(program: Path, source, out: Path, before: str = "", **changes):
    """Start the changed program's train.py in this test's folder, where it makes data/streamed."""
    keys = TINY | dict(dataset=source, out_dir=out, max_iters=10**6, log_interval=10) | changes
    code = f"import os, runpy, sys\n{before}\nos.chdir({str(Path.cwd())!r})\n"
    code += f"sys.path[0] = {str(program)!r}\n"
    code += "sys.argv[0] = 'train.py'\n"
    code += f"runpy.run_path({str(program / 'train.py')!r}, run_name='__main__')"
    return start("-c", code, *flags(**keys), cwd=program, only_torch=True)


def preparation_of(process) -> psutil.Process:
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # another one, which has ended
            if any(word.startswith("--run_id=") for word in child.cmdline()):
                return child
    raise AssertionError("no preparation")


def is_gone(process: psutil.Process) -> bool:
    # in a container nobody may bury it
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_the_preparation_ends_when_its_run_is_killed(program, source, work):
    """Kill the run with kill -9, so that it cannot tell its preparation to end."""
    process = start_run(program, source, work / "out")
    wait_for_line(process, "iter 10")
    preparation = preparation_of(process)
    process.kill()
    process.communicate()
    wait_until(lambda: is_gone(preparation))


@needs_signals
@pytest.mark.parametrize(
    "number", slow_but(signal.SIGINT, of=[signal.SIGTERM, signal.SIGINT]), ids=str
)
def test_a_run_that_waits_for_data_saves_and_ends_at_a_signal(number, program, source, work):
    """Send SIGINT to the run's whole process group, as Ctrl-C does, and SIGTERM to the run only."""
    process = start_run(program, source, work / "out", before="os.setsid()", block_size=128)
    wait_for_line(process, "iter 10")
    preparation = preparation_of(process)
    preparation.suspend()  # so that no more data comes
    wait_until(lambda: "running" not in psutil.Process(process.pid).status())
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert re.fullmatch(r"stopping after this iteration; .*\n", err)
    assert checkpoints(work / "out")[-1] > 10
    wait_until(lambda: is_gone(preparation))


def test_a_killed_preparation_ends_the_run_with_one_line_and_a_checkpoint(program, source, work):
    process = start_run(program, source, work / "out", block_size=128)
    wait_for_line(process, "iter 10")
    preparation = preparation_of(process)
    preparation.suspend()
    preparation.kill()
    code, _, err = finish(process)
    assert code == 1
    assert re.fullmatch(
        r"error: the process that prepares .* exit code (-9|15); --init_from=.*\n", err
    )
    assert checkpoints(work / "out")[-1] > 10


@pytest.mark.slow
def test_a_broken_line_in_a_streams_source_ends_the_run_after_the_text_before_it(program, work):
    """Remove the line and resume. The losses then equal those of a run that met no error."""
    texts = [text for text in documents(1500, words=20) if text]
    lines = [json.dumps(dict(text=text)) for text in texts]
    path = work / "a.jsonl"
    path.write_text("\n".join([*lines[:1200], "{", *lines[1200:]]))
    keys = dict(lr_schedule="constant", batch_size=32, block_size=64, log_interval=1)
    code, _, err = finish(start_run(program, path, work / "out", **keys))
    assert code == 1
    (error,) = err.splitlines()
    assert error.startswith("error: ") and "a.jsonl: line 1,201 is not a JSON object" in error
    assert error.endswith("--init_from=resume continues the run")
    stopped = checkpoints(work / "out")[-1]
    (folder,) = Path("data/streamed").iterdir()
    # all that is in shards; another epoch does not begin
    assert stopped == (len(stored(folder, "train")) - 1) // (2 * 32 * 64)
    path.write_text("\n".join(lines))
    keys |= dict(max_iters=stopped + 4)
    code, _, err = finish(start_run(program, path, work / "out", **keys, init_from="resume"))
    assert code == 0 and "a.jsonl: has another size or time" in err
    losses = column(work / "out", "step", "iter", "loss")
    shutil.rmtree("data")
    train(**TINY | keys, dataset=path, out_dir="whole")
    assert losses == column(work / "whole", "step", "iter", "loss")


# -----------------------------------------------------------------------------
# Resumes


def test_a_resumed_stream_prepares_deleted_shards_again_and_refuses_changed_text(work):
    """Use another number of threads, and resume in the second epoch of the source."""
    texts = [text for text in documents(40) if text]
    path = write_jsonl(work / "a.jsonl", texts)
    keys = TINY | dict(dataset=path, dropout=0.1, lr_decay_iters=80, eval_interval=40)
    train(**keys, out_dir="whole", max_iters=80)
    (folder,) = Path("data/streamed").iterdir()
    assert 40 * TOKENS_PER_ITERATION > len(stored(folder, "train"))
    train(**keys, out_dir="halves", max_iters=40)
    shutil.rmtree("data")
    train(**keys | dict(data_workers=2), out_dir="halves", max_iters=80, init_from="resume")
    assert_same_run(Path("whole"), Path("halves"), 80)
    shutil.rmtree("data")
    write_jsonl(path, [*texts[:-1], "other"])
    result = run("train.py", *flags(**keys, out_dir="halves", max_iters=90, init_from="resume"))
    assert result.code == 1
    assert "differs from what this run has trained on" in result.err


@pytest.mark.slow
def test_a_resumed_stream_keeps_its_validation_text_even_if_eval_tokens_is_raised(work):
    path = write_jsonl(work / "a.jsonl", [text for text in documents(100) if text])
    keys = TINY | dict(dataset=path, out_dir="out")
    train(**keys, max_iters=2)
    more = dict(init_from="resume", max_iters=4, eval_tokens=3000)
    result = run("train.py", *flags(**keys | more))
    assert result.code == 0 and "evaluations read 256 tokens, not 3,000" in result.err
    (folder,) = Path("data/streamed").iterdir()
    assert manifest_of(folder)["val_tokens"] == 256


@pytest.mark.parametrize(
    "flag, said",
    [
        pytest.param("--stream=False", "stream", marks=pytest.mark.slow),
        pytest.param("--dataset=b.jsonl", "b.jsonl is not what", marks=pytest.mark.slow),
        ("--dataset=a.jsonl", "other text or with other flags (files)"),
    ],
)
def test_resuming_a_stream_with_stream_off_or_another_source_is_refused(flag, said, work):
    write_jsonl(work / "a.jsonl", documents(100))
    write_jsonl(work / "b.jsonl", documents(100, seed=5))
    keys = TINY | dict(dataset="a.jsonl", out_dir="out", max_iters=2)
    train(**keys)
    if flag == "--dataset=a.jsonl":
        write_jsonl(work / "a.jsonl", documents(101))
    words = flags(**keys | dict(max_iters=4, init_from="resume"))
    result = run("train.py", *words, flag)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 2 and len(errors) == 1 and said in errors[0], result.err


# -----------------------------------------------------------------------------
# The source


def test_a_source_too_small_for_a_stream_is_refused_in_one_line_before_training(work):
    write_jsonl(work / "a.jsonl", ["a few words"] * 20)
    result = run("train.py", *flags(**TINY, dataset="a.jsonl", out_dir="out", max_iters=2))
    assert result.code == 2 and result.err.count("error: ") == 1, result.err
    assert "a.jsonl" in result.err and "choose a larger --dataset" in result.err
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_stream_from_the_hub_trains_like_one_from_local_files(work):
    write_parquet(work / "source/a.parquet", [text for text in documents(300) if text])
    keys = TINY | dict(max_iters=4, eval_interval=2)
    train(**keys, dataset="source", out_dir="here")
    with serve_hub(work / "source") as address:
        hub = dict(HF_ENDPOINT=address, HF_HOME=str(work), HF_HUB_OFFLINE="0")
        words = flags(**keys, dataset="org/name:small", out_dir="hub")
        result: Result = finish(start(str(ROOT / "train.py"), *words, cwd=work, **hub))
    assert result.code == 0, result.err
    for kind, name in (("step", "loss"), ("eval", "val_loss")):
        assert column(Path("hub"), kind, name) == column(Path("here"), kind, name)
