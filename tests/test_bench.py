"""
Run bench.py from outside and compare its figures with the log of the train.py that it measures. The
processes that bench.py starts are forked from a warm one here, and compile nothing.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from fork_server import ForkedProcess
from program import FAST, flags, run, start, write_tokens

from bench import LADDER

SIZES = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4)
TINY = dict(SIZES, gradient_accumulation_steps=2, dataset="tokens", device="cpu", dtype="float32")

# What a child does before it becomes train.py
NO_COMPILER = "import torch; torch.nn.Module.compile = lambda *_, **__: None; "
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def out_of_memory(batch_size: int) -> str:
    """Return code that makes training run out of memory at micro-batches of this size."""
    return (
        "\nforward = torch.nn.Embedding.forward\n"
        "def watched(module, idx):\n"
        f"    if idx.dim() == 2 and len(idx) == {batch_size} and torch.is_grad_enabled():\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20 GiB')\n"
        "    return forward(module, idx)\n"
        "torch.nn.Embedding.forward = watched\n"
    )


@pytest.fixture
def children(monkeypatch, tmp_path) -> list:
    """
    Run bench.py in a temporary folder, fork the processes that it starts, and yield them. Each runs
    the code in subprocess.Popen.code first. At the end of the test all must have ended.
    """
    started: list = []
    popen = subprocess.Popen

    def fork(command, **options):
        if Path(command[1]).name != "train.py":
            return popen(command, **options)
        arguments = ["-c", NO_COMPILER + fork.code + RUN, *command[1:]]
        said = options["stderr"].name
        child = ForkedProcess(arguments, Path.cwd(), dict(os.environ), said, said)
        started.append(child)
        return child

    fork.code = ""
    monkeypatch.setattr(subprocess, "Popen", fork)
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens", [1000], [200])
    yield started
    assert all(child.poll() is not None for child in started)


def bench(*arguments: str, **keys) -> tuple[list[dict], str]:
    """Return the rows that bench.py writes with --json, and what it prints."""
    result = run("bench.py", *arguments, *flags(**keys), "--seconds=0", "--json=new/result.json")
    assert result.code == 0 and "warning: " not in result.err, result.err
    return json.loads(Path("new/result.json").read_text())["rows"], result.out


# -----------------------------------------------------------------------------
# One configuration


# iterations of 9, 9, 5, 0.25, 0.25, ... seconds in two micro-batches each; three threads work
CLOCK = """
import time, torch
backward, now, halves = torch.Tensor.backward, [0.0], iter([4.5] * 4 + [2.5] * 2)
def ticking(loss):
    now[0] += next(halves, 0.125)
    backward(loss)
torch.Tensor.backward = ticking
time.perf_counter, time.process_time = lambda: now[0], lambda: 3 * now[0]
"""


@pytest.mark.parametrize("recipe", [{}, FAST], ids=["gpt2", "fast"])
def test_bench_reports_the_median_of_the_log_lines_from_the_third_on(recipe, children):
    """Count 2 x 4 x 16 tokens, and the fields of a dataset with 61 tokens, padded to 128."""
    subprocess.Popen.code = CLOCK
    (found,), out = bench(**TINY, **recipe, compile=False, peak_tflops=1e-3)
    assert found["lines"] >= 3 and found["tokens_per_iter"] == 128
    assert found["step_ms"] == pytest.approx(250)
    assert found["tokens_per_sec"] == pytest.approx(512)
    assert found["tokens_per_sec_range"] == pytest.approx([128 / 5, 512])
    flops = 6 * (2 * 12 * 32**2 + 32 * 128) + 2 * 12 * 32 * 16
    assert found["mfu"] == pytest.approx(512 * flops / 1e9)
    size = 128 * 32 + 16 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
    untied = 2 * 128 * 32 + 128 + 2 * 32 + 2 * (12 * 32**2 + 9 * 32 + 2 * 32)
    assert found["parameters"] == (untied if recipe else size)
    assert 0.05 < found["mem_gib"] < 20 and " 0.001 in float32 " in out


@pytest.mark.slow
def test_bench_without_a_config_uses_random_tokens_and_256_per_iteration_on_a_cpu(
    children, tmp_path
):
    """Train on random tokens without a dataset: the first loss is about ln 50304 = 10.83 nats."""
    (found,), out = bench(n_layer=1, n_head=1, n_embd=16, device="cpu")
    assert found["tokens_per_iter"] == 256 and 0 <= found["compile_seconds"] < 5
    assert found["first_loss"] == pytest.approx(math.log(50304), abs=0.3)
    assert "random tokens" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "tokens"]


# -----------------------------------------------------------------------------
# Several configurations


def test_each_row_is_the_config_with_its_flags_and_has_no_speed_if_its_run_fails(children):
    subprocess.Popen.code = out_of_memory(batch_size=2)
    keys = {**TINY, "compile": False, "tokens_per_iter": 128}
    del keys["gradient_accumulation_steps"]
    found, out = bench("--row=", "--row=--batch_size=2", "--row=--block_size=32", **keys)
    first, full, last = found
    batches = [(row["batch_size"], row["gradient_accumulation_steps"]) for row in (first, last)]
    assert batches == [(4, 2), (4, 1)]
    assert full == dict(name="--batch_size=2", tokens_per_sec=None)
    assert re.search("^--batch_size=2 +failed *$", out, re.M)
    assert last["total_gain"] == last["gain"] == pytest.approx(first["step_ms"] / last["step_ms"])
    assert re.search(rf"^--block_size=32 .* {last['gain']:.2f}x ", out, re.MULTILINE)
    assert "\nrow 3 of 3: --block_size=32\n" in out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{}, FAST], ids=["gpt2", "fast"])
def test_ladder_shows_its_rows_with_their_gains_and_the_product_of_gains(recipe, children):
    rows, out = bench("ladder", **TINY, **recipe)
    names = ["float32", *LADDER]
    assert [row["name"] for row in rows] == (names[:-1] if recipe else names)
    for row in rows:
        assert row["total_gain"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"])
        assert re.search(rf"^{row['name']} .* {row['gain']:.2f}x ", out, re.MULTILINE)
    gains = math.prod(row["gain"] for row in rows)
    assert gains == pytest.approx(rows[-1]["total_gain"])


# -----------------------------------------------------------------------------
# Runs that fail, and interruptions


@pytest.mark.parametrize("context, said", [(512, "block_size"), (16, "out of memory")])
def test_bench_prints_the_errors_of_a_training_run_that_fails(context, said, children):
    subprocess.Popen.code = out_of_memory(batch_size=4)
    result = run("bench.py", *flags(**TINY | dict(compile=False, block_size=context)))
    assert result.code == 1 and re.search(f"error: .*{said}", result.err), result.err
    assert "train.py ended with exit code" in result.err


def test_ctrl_c_ends_a_ladders_third_run_and_leaves_the_rows_of_the_first_two(children):
    sleep = time.sleep

    def interrupt(seconds: float) -> None:  # while bench.py waits for log lines
        if len(children) == 3:
            raise KeyboardInterrupt
        sleep(seconds)

    with mock.patch("time.sleep", interrupt):
        result = run("bench.py", "ladder", *flags(**TINY), "--seconds=0")
    assert result.code == 130 and children[-1].wait(10) == -9
    for name in ("float32", LADDER[0]):
        assert re.search(rf"^{name} .* [\d.]+ ms .*GiB", result.out, re.MULTILINE)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the run ends after its hours")
def test_a_killed_bench_leaves_no_training_run_behind():
    """A program that gives bench.py a time limit kills it alone."""
    bench = start("bench.py", *flags(**SIZES, device="cpu", compile=False))
    children: list = []
    while not any("train.py" in word for child in children for word in child.cmdline()):
        assert bench.poll() is None
        time.sleep(0.1)
        children = psutil.Process(bench.pid).children()
    bench.kill()
    assert not psutil.wait_procs(children, timeout=20)[1]
