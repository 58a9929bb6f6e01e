"""
Check what a run does at its start if it cannot do what it was asked, the documented exit codes, and
the script that acts on them.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import pytest
from doc_pages import GUIDES, block_with, read
from program import InProcessRun, finish, flags, run, start, train, wait_for_line

TINY = dict(n_layer=1, gradient_accumulation_steps=1, max_iters=8, eval_interval=4, eval_tokens=160)


# -----------------------------------------------------------------------------
# What a machine cannot do


BPE = mock.patch("tiktoken.get_encoding", side_effect=ConnectionError)


@pytest.mark.parametrize("key, value", [("tracker", "wandb"), ("sample_tokens", 5)])
def test_a_run_trains_on_with_a_warning_without_its_tracker_or_samples(
    key, value, tiny, ran, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    data = shutil.copytree(tiny["dataset"], tmp_path / "tokens")
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"byte"', '"gpt2"'))
    with BPE:
        result = run("train.py", *flags(**tiny | {"dataset": data, key: value}))
    assert result.code == 0 and result.err.count(f": {key}: ") == 1 and "warning: " in result.err
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
def test_a_signal_ends_a_complete_run_that_waits_for_its_tracker(tiny, ran, tmp_path):
    """Replace wandb by a module that never finishes."""
    code = "def init(**_):\n    return __import__('wandb')\n\ndef log(*_, **__):\n    pass\n\n"
    code += "id = ''\n\ndef finish():\n    print('waiting')\n    __import__('time').sleep(99)\n"
    (tmp_path / "wandb.py").write_text(code)
    process = start(
        "train.py", *flags(**tiny, tracker="wandb"), cold=True, PYTHONPATH=str(tmp_path)
    )
    wait_for_line(process, "waiting")
    process.send_signal(signal.SIGTERM)
    assert finish(process, timeout=30).code == -signal.SIGTERM
    assert ran.state(8)["progress"]["complete"]
    assert ran.records("checkpoint")[-1]["complete"]


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
        assert run("train.py", *flags(**tiny, init_from="auto")).code == 1
    assert not ran.out_dir.exists()


def test_the_documented_systemd_line_takes_a_stop_by_a_signal_as_a_success():
    (listed,) = re.findall(r"SuccessExitStatus=([\d ]+)", CODES)
    assert [int(code) for code in listed.split()] == [*SIGNALS]


STUBS = {
    ".venv/bin/python": """echo "$@" >> starts
        set -- $(cat codes)
        code=$1; shift; echo $* > codes; exit $code""",
    "sleep": "",
}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "codes, starts",
    [((1, 137, 0), 3), ((134, 135, 139, 0), 4), *(((n,), 1) for n in (143, 130)), ((1,) * 9, 5)],
)
def test_the_documented_script_restarts_only_after_a_failure(codes, starts, tmp_path):
    for name, code in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text(" ".join(map(str, codes)))
    (tmp_path / "trainer.sh").write_text(block_with("sleep 60 ;;"))
    command = ["bash", "trainer.sh", ".venv/bin/python", "train.py", "--device=cpu"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    started = (tmp_path / "starts").read_text().splitlines()
    assert len(started) == starts
    assert {*started} == {"train.py --device=cpu"}
