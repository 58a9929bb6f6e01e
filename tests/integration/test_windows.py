"""
Run the scripts on a simulated Windows (dev/simulate_windows), and test code for Windows and other
systems that needs no simulation.
"""

import subprocess
import sys

import pytest
from char_dataset import SHORT_RUN
from program import ROOT, assert_same_run, finish, flags, start, train, write_tokens

from common import child

simulated = pytest.mark.skipif(sys.platform != "linux", reason="simulates Windows on Linux")

# run(SCRIPT, ARGUMENT, ...) does what `python SCRIPT.py ARGUMENT ...` does, and returns its exit
# code. This code itself is not the project's, so it sees Linux.
BEGIN = f"""
import importlib, os, signal, sys, threading, time
import torch
sys.path[:0] = [{str(ROOT / "dev/simulate_windows")!r}, {str(ROOT)!r}]
import notwindows
notwindows.install()
from common.console import run_main

def run(name, *arguments):
    sys.argv = [name.replace(".", "/") + ".py", *arguments]
    try:
        run_main(importlib.import_module(name).main)
    except SystemExit as exit:
        return exit.code
"""
SLEEPS_NOT = "calls: [(2147483649,)]"  # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
SMALL = SHORT_RUN | dict(n_layer=1, warmup_iters=0, eval_interval=2)
SMALL |= dict(out_dir="my run", dataset="tokens")


@pytest.fixture
def started(tmp_path):
    """
    Return a function that starts a process on the simulated Windows, in tmp_path, which runs Python
    code with the given arguments.
    """

    def begin(code: str, *arguments):
        process = start("-c", BEGIN + code, *arguments, cwd=tmp_path, only_torch=True)
        process.stdout.reconfigure(encoding="cp1252")
        return process

    return begin


NIGHT = """
save, saves = torch.save, []

def look_and_break(*arguments):
    save(*arguments)
    saves.append(1)
    if len(saves) == 2:  # a virus scanner
        threading.Timer(0.3, open("my run/best.pt", "rb").close).start()
    if len(saves) == 3:  # Ctrl-Break
        signal.raise_signal(21)

torch.save = look_and_break
codes = [run("train", *sys.argv[1:])]
codes.append(run("train", *sys.argv[1:], "--init_from=resume"))
draw = torch.multinomial

def draw_and_look(*arguments, **options):
    print("held:", notwindows.holders("my run/best.pt"))
    return draw(*arguments, **options)

torch.multinomial = draw_and_look
prompt = "--start=caf\u00e9 \u2603"
codes.append(run("sample", "--out_dir=my run", prompt, "--num_samples=1", "--max_new_tokens=5"))
codes.append(run("compare", "my run"))
print("codes:", codes, "calls:", notwindows.Recorder.calls)
"""


@simulated
def test_a_run_on_windows_is_stopped_resumed_sampled_and_compared(started, tmp_path, monkeypatch):
    """
    Hold best.pt open for a moment, as a virus scanner does, and end the run with Ctrl-Break. The
    resumed run equals an uninterrupted one.
    """
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens", [3000], [700], vocab=256)
    code, out, err = finish(started(NIGHT, *flags(**SMALL)))
    assert "codes: [149, 0, 0, 0]" in out, out + err
    assert "calls: [(2147483649,), (2147483649,)]" in out  # each launch kept the machine awake
    # in double quotes, which cmd and PowerShell both know
    assert '"--out_dir=my run"' in out.partition("command: python train.py ")[2]
    # sample.py holds no file open, and the console cannot print a snowman
    assert "held: []" in out and "caf\u00e9 ?" in out and "mem n/a" in out
    assert "warning" not in err and list(tmp_path.rglob("*.tmp")) == []
    train(**SMALL | dict(out_dir="straight"))
    assert_same_run(tmp_path / "my run", tmp_path / "straight", 8)


# -----------------------------------------------------------------------------
# What needs no simulation


def test_a_child_process_sees_an_empty_stdin_and_ends_with_its_parent(tmp_path, monkeypatch):
    """
    Hide the pipe from libraries: on Windows, inspecting a pipe that a thread reads blocks until the
    next line arrives. The child exits when its parent closes the pipe.
    """
    code = (
        "import os, sys, threading, time\n"
        "threading.Timer(60, os._exit, [3]).start()\n"
        "os.write(2, repr(sys.stdin.read()).encode() + b'\\n')\n"
        "time.sleep(600)"
    )
    (tmp_path / "reader.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    process = child.start_child("reader", stderr=subprocess.PIPE)
    assert process.stderr.readline() == b"''\n"
    process.stdin.close()
    assert process.wait(20) == 1
