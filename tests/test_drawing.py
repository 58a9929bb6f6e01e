"""loss.png is drawn beside the run. What goes wrong there costs no more than the picture."""

import os
import select
import sys
import time
from unittest import mock

import pytest
from program import flags, run, start, write_tokens

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=1,
    device="cpu",
    dtype="float32",
    compile=False,
    max_iters=8,
    eval_interval=4,
    eval_tokens=64,
)
PATIENCE = 20_000  # ms for another process on a busy machine


@pytest.fixture
def train_long(tmp_path):
    """A run whose clock is turned on: of less than 20 seconds no picture is drawn."""
    tokens = write_tokens(tmp_path / "tokens", train=[2000], val=[300])
    perf_counter = time.perf_counter

    def train():
        with mock.patch("time.perf_counter", lambda: 1000 * perf_counter()):
            return run("train.py", *flags(**TINY, dataset=tokens, out_dir=tmp_path / "run"))

    return train


def test_the_last_picture_is_of_the_whole_run(train_long, tmp_path):
    assert train_long().code == 0
    picture = tmp_path / "run/loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    # begun after the last record
    assert picture.stat().st_mtime_ns > (tmp_path / "run/metrics.jsonl").stat().st_mtime_ns


@pytest.mark.parametrize("fault", ["raise SystemExit(1)", "import nothing_of_that_name", "abort()"])
def test_a_fault_in_drawing_is_one_line_and_no_more(fault, train_long, tmp_path, monkeypatch):
    (tmp_path / "broken/matplotlib").mkdir(parents=True)
    (tmp_path / "broken/matplotlib/__init__.py").write_text(f"from os import abort\n{fault}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    result = train_long()
    assert result.code == 0
    (said,) = result.err.splitlines()
    assert said.startswith("warning: loss.png")


def test_a_machine_that_starts_no_process_trains_on(train_long, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    result = train_long()
    assert result.code == 0
    assert result.err.count("loss.png") == 1


KILLED = """
import sys, time
from common.child import start_child
picture = start_child("-m", "reports.picture", sys.argv[1], cwd=".", stderr=-3)
print(picture.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe with a name, and numbers of priority")
def test_the_process_is_of_low_priority_hears_no_ctrl_c_and_ends_with_a_killed_run(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")  # reading it takes until somebody writes
    process = start("-c", KILLED, str(tmp_path))
    pid = int(process.stdout.readline())
    with open(tmp_path / "metrics.jsonl", "wb") as pipe:  # waits for the reader
        assert os.getpgid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        reader = select.poll()
        reader.register(pipe, 0)
        assert reader.poll(0) == []
        process.kill()
        assert reader.poll(PATIENCE), "it still reads"
    process.wait()
