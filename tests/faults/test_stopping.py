"""
Signals at any moment, kill -9 at any moment: nothing is lost, and the exit code says what happened.
"""

import os
import random
import signal
import time

import pytest
import torch
from helpers import (
    ROOT,
    assert_same_state,
    flags,
    load,
    needs_signals,
    records,
    run_here,
    start_process,
)

import train
from data.loader import Batches
from training import checkpoint


def send_at(monkeypatch, owner, name, call_number, number=signal.SIGTERM):
    """Make the process send itself a signal at the n-th call of a function."""
    original = getattr(owner, name)
    calls = iter(range(10**9))

    def call(*args, **kwargs):
        if next(calls) == call_number:
            signal.raise_signal(number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


# of evaluate's calls the first one compiles
MOMENTS = {
    "in the first evaluation": (train, "evaluate", 1),
    "in an iteration": (train, "train_step", 2),
    "while waiting for data": (Batches, "ready", 9),
    "while saving": (checkpoint, "save", 0),
    "while logging": (train.Log, "report_step", 3),
}


STOPPED = dict(dropout=0.1, gradient_accumulation_steps=3, compile=True)


def stop_compiling(patch) -> None:
    """Its place in the run counts in these tests, not its code."""
    patch.setattr(torch, "compile", lambda model: model)


@pytest.fixture(scope="module")
def straight(dataset, tmp_path_factory):
    """The run that nobody stops."""
    out_dir = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        stop_compiling(patch)
        run_here(dataset, out_dir, **STOPPED)
    return out_dir


# Both signals take the same way through the program, so SIGINT is sent at two moments only.
CASES = [(moment, signal.SIGTERM, 143) for moment in MOMENTS] + [
    ("in an iteration", signal.SIGINT, 130),
    ("while saving", signal.SIGINT, 130),
]


@pytest.mark.parametrize("moment, number, exit_code", CASES)
def test_a_signal_saves_and_the_resumed_run_equals_an_unbroken_one(
    moment, number, exit_code, straight, dataset, tmp_path, monkeypatch
):
    stop_compiling(monkeypatch)
    with monkeypatch.context() as patch:
        send_at(patch, *MOMENTS[moment], number)
        assert run_here(dataset, tmp_path, **STOPPED) == exit_code
    assert checkpoint.load(checkpoint.find_newest(tmp_path))
    assert records(tmp_path, "end")[0]["reason"] == number.name
    assert run_here(dataset, tmp_path, init_from="resume", **STOPPED) == 0
    assert_same_state(load(tmp_path, 8), load(straight, 8))
    for kind in ("step", "eval"):
        assert losses_of(tmp_path, kind) == losses_of(straight, kind)


def losses_of(out_dir, kind) -> list[tuple]:
    return [(r["iter"], r.get("loss"), r.get("val_loss")) for r in records(out_dir, kind)]


def train_process(dataset, out_dir, **changes):
    return start_process(str(ROOT / "train.py"), *flags(dataset, out_dir, **changes))


def wait_for(process, text):
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"ended before {text!r}: {process.stderr.read()}")


@pytest.mark.skipif(not hasattr(os, "login_tty"), reason="needs pseudo-terminals")
def test_a_terminal_that_closes_ends_with_129_after_saving(dataset, tmp_path):
    in_a_terminal = (
        "import os, sys, train; from common import console\n"
        "os.login_tty(os.open(sys.argv.pop(1), os.O_RDWR))\n"
        "console.run_main(train.main)"
    )
    terminal, its_end = os.openpty()
    options = flags(dataset, tmp_path, max_iters=10**6, eval_interval=10**6)
    process = start_process("-c", in_a_terminal, os.ttyname(its_end), *options)
    seen = b""
    while b"iter 3" not in seen:
        seen += os.read(terminal, 1000)
    os.close(its_end)
    os.close(terminal)  # every further line to it fails
    assert process.wait(60) == 129
    assert checkpoint.load(checkpoint.find_newest(tmp_path))["progress"]["iter_num"] >= 3


@needs_signals
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_real_signal_ends_with_128_and_its_number_after_saving(name, dataset, tmp_path):
    """SLURM warns with SIGUSR1 before it takes the machine away."""
    number = getattr(signal, name)
    process = train_process(dataset, tmp_path, max_iters=10**6, eval_interval=10**6)
    wait_for(process, "iter 3")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number == dict(SIGTERM=143, SIGUSR1=138)[name]
    assert "stopping after this iteration" in err and "Traceback" not in err
    assert checkpoint.load(checkpoint.find_newest(tmp_path))["progress"]["iter_num"] >= 3


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_run_under_nohup_outlives_its_terminal(dataset, tmp_path, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    send_at(monkeypatch, train, "train_step", 2, signal.SIGHUP)
    assert run_here(dataset, tmp_path) == 0
    assert records(tmp_path, "end")[0]["reason"] == "max_iters"


def test_a_stop_that_is_sent_twice_is_one_stop(dataset, tmp_path):
    """As SLURM, systemd and torchrun between them send it: both within half a second."""
    twice = (
        "import signal, train; from common import console\n"
        "original, calls = train.train_step, iter(range(10**9))\n"
        "def step(*arguments):\n"
        "    for _ in range(2 if next(calls) == 2 else 0):\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    return original(*arguments)\n"
        "train.train_step = step\n"
        "console.run_main(train.main)"
    )
    process = start_process("-c", twice, *flags(dataset, tmp_path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and err.count("stopping after this iteration") == 1
    assert checkpoint.load(checkpoint.find_newest(tmp_path))["progress"]["iter_num"] == 3


@needs_signals
def test_a_second_signal_ends_at_once_and_harms_nothing(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=4)
    slow_save = (
        "import sys, time, train; from common import console; from training import checkpoint\n"
        "def slow(*a):\n    print('saving', flush=True); time.sleep(60)\n"
        "checkpoint.lack_of_space = slow\n"
        "console.run_main(train.main)"
    )
    options = flags(dataset, tmp_path, max_iters=10**6, init_from="resume", eval_interval=10**6)
    process = start_process("-c", slow_save, *options)
    wait_for(process, "iter 9")
    process.send_signal(signal.SIGINT)
    wait_for(process, "saving")
    time.sleep(0.6)  # a copy of the first one, as torchrun and SLURM send it, would come at once
    process.send_signal(signal.SIGINT)
    began = time.perf_counter()
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.perf_counter() - began < 5
    assert checkpoint.load(checkpoint.find_newest(tmp_path))["progress"]["iter_num"] == 4


@needs_signals
@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_no_bit(dataset, tmp_path):
    options = dict(
        max_iters=1500, eval_interval=150, checkpoint_interval=1, dropout=0.1, log_interval=5
    )
    random.seed(0)
    kills = 0
    while kills < 30:
        process = train_process(dataset, tmp_path / "broken", init_from="auto", **options)
        wait_for(process, "tokens per iteration")
        time.sleep(random.uniform(0, 0.4))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode == -signal.SIGKILL, (
            "the run ended before it was killed thirty times"
        )
    for run, init_from in (("broken", "auto"), ("straight", "scratch")):
        process = train_process(dataset, tmp_path / run, init_from=init_from, **options)
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert_same_state(load(tmp_path / "broken", 1500), load(tmp_path / "straight", 1500))
    steps = [r["iter"] for r in records(tmp_path / "broken", "step")]
    assert steps == sorted(set(steps))
    assert torch.isfinite(
        torch.tensor([r["loss"] for r in records(tmp_path / "broken", "step")])
    ).all()


@needs_signals
def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback():
    process = start_process("-X", "importtime", "train.py", "config/quickstart.py")
    for line in process.stderr:
        if "torch" in line:
            break
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode in (-signal.SIGINT, 130)
