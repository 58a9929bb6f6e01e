"""
Check what a run does at its start if it cannot do what it was asked, the documented exit codes, and
night.sh, which acts on them.
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

import psutil
import pytest
from doc_pages import GUIDES, read
from program import ROOT, InProcessRun, finish, flags, run, start, train

TINY = dict(n_layer=1, gradient_accumulation_steps=1, max_iters=8, eval_interval=4, eval_tokens=160)


# -----------------------------------------------------------------------------
# What a machine cannot do


def test_a_run_trains_on_with_a_warning_without_the_tokenizer_of_its_samples(tiny, ran, tmp_path):
    data = shutil.copytree(tiny["dataset"], tmp_path / "tokens")
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"byte"', '"gpt2"'))
    with mock.patch("tiktoken.get_encoding", side_effect=ConnectionError):
        result = train(**tiny | dict(dataset=data, sample_tokens=5))
    assert result.err.startswith("warning: ") and result.err.count(": sample_tokens: ") == 1
    assert ran.saved[-1] == 8


# -----------------------------------------------------------------------------
# The documented codes

(CODES,) = [text for text in map(read, GUIDES) if "\n| 128 + N | " in text]
# the codes of the signals that save a run
SIGNALS = {
    129: "SIGHUP",
    130: "SIGINT",
    138: "SIGUSR1",
    140: "SIGUSR2",
    143: "SIGTERM",
    152: "SIGXCPU",
}


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("code", SIGNALS)
def test_a_signal_saves_the_run_and_ends_it_with_the_documented_exit_code(code, tiny, ran):
    assert str(code) in CODES
    trainer = InProcessRun()
    trainer.at["iteration", 3] = lambda: signal.raise_signal(getattr(signal, SIGNALS[code]))
    assert (trainer.launch(**tiny).code, ran.saved[-1]) == (code, 3)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_while_a_script_imports_its_libraries_prints_nothing():
    code = "import common.environment, signal; signal.raise_signal(signal.SIGINT)"
    ended = finish(start("-c", code, cold=True))
    assert (ended.code, ended.err) == (-signal.SIGINT, "")


def test_a_share_that_drops_while_a_checkpoint_is_read_begins_no_new_run(tiny, ran, tmp_path):
    train(**tiny | dict(max_iters=4))

    def drop(file):
        ran.out_dir.rename(tmp_path / "away")
        raise OSError(errno.EIO, "Input/output error")

    with mock.patch("zipfile.ZipFile.testzip", drop):
        assert run("train.py", *flags(**tiny)).code == 1
    assert not ran.out_dir.exists()


def test_the_documented_systemd_line_takes_a_stop_by_a_signal_as_a_success():
    (listed,) = re.findall(r"SuccessExitStatus=([\d ]+)", CODES)
    assert [int(code) for code in listed.split()] == [*SIGNALS]


# -----------------------------------------------------------------------------
# night.sh

needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


@pytest.fixture
def slept(tmp_path, monkeypatch) -> Path:
    """Replace sleep by a program that writes into this file how long it should take."""
    (tmp_path / "sleep").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/slept\n")
    (tmp_path / "sleep").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "slept"


@needs_bash
@pytest.mark.parametrize(
    "codes", [(1, 137, 0), (134, 135, 139, 0), (1,) * 5, *((n,) for n in (2, 127, 129, 130, 143))]
)
def test_night_sh_repeats_its_command_after_an_error_and_gives_up_after_five_short_launches(
    codes, slept, tmp_path
):
    command = 'echo "$1" >> starts; code=$(head -n 1 codes); sed -i 1d codes; exit $code'
    (tmp_path / "codes").write_text("\n".join(map(str, codes)))
    words = ["bash", ROOT / "night.sh", "sh", "-c", command, "sh", "two words"]
    assert subprocess.run(words, cwd=tmp_path).returncode == codes[-1]
    assert (tmp_path / "starts").read_text().splitlines() == ["two words"] * len(codes)
    assert len(codes) == 1 or slept.read_text().split() == ["300"] * (len(codes) - 1)


@needs_bash
@pytest.mark.slow
def test_night_sh_trains_on_after_a_kill_and_ends_at_ctrl_c(tiny, ran, slept, tmp_path):
    keys = tiny | dict(max_iters=10**6, eval_interval=100, checkpoint_interval=5)
    with open(tmp_path / "said", "w") as said:
        words = ["bash", ROOT / "night.sh", sys.executable, ROOT / "train.py", *flags(**keys)]
        night = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)

    def wait_for(iteration: int) -> None:
        while not ran.out_dir.exists() or not ran.saved or ran.saved[-1] < iteration:
            assert night.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)

    try:
        wait_for(5)
        (child,) = psutil.Process(night.pid).children()
        child.kill()
        child.wait()
        wait_for(ran.saved[-1] + 5)
        os.killpg(night.pid, signal.SIGINT)  # as a terminal does
        assert night.wait(timeout=120) == 130
    finally:
        night.kill()
    assert (ran.end["reason"], ran.saved[-1]) == ("SIGINT", ran.end["iters"])
    assert (tmp_path / "said").read_text().count("night.sh: exit code 137") == 1
