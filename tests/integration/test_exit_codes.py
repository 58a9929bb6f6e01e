"""
Check what a run does at its start if it cannot do what it was asked, the documented exit codes, and
night.py, which acts on them.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from doc_pages import read
from program import ROOT, InProcessRun, finish, flags, needs_signals, run, start, train

import night

TINY = dict(n_layer=1, gradient_accumulation_steps=1, max_iters=8, eval_interval=4, eval_tokens=160)


# -----------------------------------------------------------------------------
# What a machine cannot do


def test_a_run_trains_on_with_a_warning_without_the_tokenizer_of_its_samples(tiny, ran, tmp_path):
    data = shutil.copytree(tiny["dataset"], tmp_path / "tokens")
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"byte"', '"gpt2"'))
    with mock.patch("tiktoken.get_encoding", side_effect=ConnectionError):
        result = train(**tiny | dict(dataset=data, sample_tokens=5))
    assert result.err.startswith("warning: ") and result.err.count("sample_tokens: ") == 1
    assert ran.saved[-1] == 8


# -----------------------------------------------------------------------------
# The documented codes

(STOPS,) = re.findall(r"SuccessExitStatus=([\d ]+)", read("docs/recovery.md"))
STOPS = [int(code) - 128 for code in STOPS.split()]


@needs_signals
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_saves_the_run_and_ends_it_with_the_documented_exit_code(number, tiny, ran):
    trainer = InProcessRun()
    trainer.at["iteration", 3] = lambda: signal.raise_signal(number)
    assert (trainer.launch(**tiny).code, ran.saved[-1]) == (128 + number, 3)


@needs_signals
def test_a_script_that_ctrl_c_has_stopped_is_killed_by_sigint():
    """Bash ends a loop only then; otherwise one over rates would go on with the next rate."""
    stopped = "import signal; from common.console import run_main; run_main(lambda argv: 130)"
    ended = finish(start("-c", stopped, cold=True))
    assert (ended.code, ended.err) == (-signal.SIGINT, "")


def test_a_share_that_drops_while_a_checkpoint_is_read_begins_no_new_run(tiny, ran, tmp_path):
    train(**tiny | dict(max_iters=4))

    def drop(file):
        ran.out_dir.rename(tmp_path / "away")
        raise OSError(errno.EIO, "Input/output error")

    with mock.patch("zipfile.ZipFile.testzip", drop):
        assert run("train.py", *flags(**tiny)).code == 1
    assert not ran.out_dir.exists()


# -----------------------------------------------------------------------------
# night.py

# writes down its argument and every signal; ends with the next code of the file, at SIGTERM with 7
COMMAND = """
import signal, sys, time
from pathlib import Path

def receive(number, frame):
    with open("signals", "a") as file:
        file.write(f"{number} ")
    if number == signal.SIGTERM:
        time.sleep(0.2)  # a Ctrl-C may come a moment later
        sys.exit(7)

for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, receive)
with open("starts", "a") as file:
    file.write(f"{sys.argv[1]}\\n")
number = len(Path("starts").read_text().splitlines())
code = Path("codes").read_text().split()[number - 1]
while code == "wait":
    time.sleep(0.05)
sys.exit(int(code))
"""
# repeats without a pause
AT_ONCE = "import sys, night; night.PAUSE_SECONDS = 0; sys.exit(night.main(sys.argv[1:]))"


@pytest.fixture
def command(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(night, "PAUSE_SECONDS", 0)
    Path("command.py").write_text(COMMAND)
    return ["command.py", "two words"]


@pytest.mark.parametrize(
    "codes",
    [(1, 137, 0), (2, 134, 135, 139, 0), (1,) * 5, *((128 + number,) for number in STOPS)],
)
def test_night_repeats_its_command_after_an_error_and_gives_up_after_five_short_launches(
    codes, command, capfd
):
    Path("codes").write_text(" ".join(map(str, codes)))
    assert night.main(command) == codes[-1]
    assert Path("starts").read_text().splitlines() == ["two words"] * len(codes)
    said = [f"night.py: exit code {code}; launching again in five minutes" for code in codes[:-1]]
    if codes == (1,) * 5:
        said.append("night.py: exit code 1; giving up")
    assert [line.split(",")[0] for line in capfd.readouterr().err.splitlines()] == said


def test_night_goes_on_if_a_save_was_due_in_each_launch(command, monkeypatch):
    monkeypatch.setattr(night, "SHORT_SECONDS", 0)
    Path("codes").write_text("1 1 1 1 1 1 0")
    assert night.main([sys.executable, *command]) == 0


def launch_night(*words, **options) -> subprocess.Popen:
    """Start night.py in a session of its own, as in a terminal. Its pause takes no time."""
    environment = os.environ | dict(PYTHONPATH=str(ROOT))
    line = [sys.executable, "-c", AT_ONCE, *map(str, words)]
    return subprocess.Popen(line, env=environment, start_new_session=True, **options)


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@needs_signals
@pytest.mark.parametrize(
    "send, name, ignored, signals, code",
    [
        ("killpg", "SIGINT", None, {"2", "15"}, 130),  # a terminal sends Ctrl-C to both
        ("kill", "SIGINT", None, {"15"}, 130),
        ("kill", "SIGHUP", None, {"15"}, 129),
        ("kill", "SIGTERM", None, {"15"}, 143),
        ("killpg", "SIGINT", ignore_ctrl_c, {"15"}, 143),  # after `&` in a script; then SIGTERM
    ],
)
def test_night_stops_its_command_at_any_signal_but_an_ignored_one(
    send, name, ignored, signals, code, command
):
    Path("codes").write_text("wait")
    process = launch_night(*command, preexec_fn=ignored)
    try:
        while not Path("starts").exists():
            time.sleep(0.05)
        getattr(os, send)(process.pid, getattr(signal, name))
        if ignored:
            time.sleep(0.5)
            assert process.poll() is None
            process.terminate()
        assert process.wait(timeout=60) == code  # a loop of a shell ends at Ctrl-C
    finally:
        process.kill()
    assert {*Path("signals").read_text().split()} == signals


def test_night_ends_at_a_signal_in_its_pause(command, monkeypatch):
    Path("codes").write_text("1")
    monkeypatch.setattr(night, "PAUSE_SECONDS", 300)
    monkeypatch.setattr(night, "say", lambda *line, console: signal.raise_signal(signal.SIGINT))
    assert night.main(command) == 130
