"""
Check what a run does at its start if it cannot do what it was asked, the documented exit codes, and
the systemd unit and the script that act on them.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from doc_pages import GUIDES, block_with, read
from program import InProcessRun, Result, flags, run, train

TINY = dict(n_layer=1, gradient_accumulation_steps=1, max_iters=8, eval_interval=4, eval_tokens=160)


# -----------------------------------------------------------------------------
# A run does what it was asked, or says what to type


def no_compiler(*batch):
    raise RuntimeError("no compiler")


BPE = SimpleNamespace(n_vocab=61, eot_token=0, decode=lambda ids: "a sample")
WANDB = SimpleNamespace(id="a run", log=lambda *_, **__: None, finish=lambda: None)
# what is asked -> a patch with which it works here, a patch with which it does not, the flag that
# the error must name, and a resume's exit code (0: the resume warns and trains on)
ASKED = {
    ("compile", True): (
        mock.patch("torch.compile", lambda call: call),
        mock.patch("torch.compile", lambda call: no_compiler),
        ("compile", False),
        1,
    ),
    ("tracker", "wandb"): (
        mock.patch.dict(sys.modules, wandb=SimpleNamespace(init=lambda **_: WANDB)),
        mock.patch.dict(sys.modules, wandb=None),
        ("tracker", "none"),
        0,
    ),
    ("sample_tokens", 5): (
        mock.patch("tiktoken.get_encoding", lambda name: BPE),
        mock.patch("tiktoken.get_encoding", side_effect=ConnectionError),
        ("sample_tokens", 0),
        0,
    ),
}


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked[0])
@pytest.mark.parametrize("resumes", [False, True], ids=["a new run", "a resume"])
def test_a_run_does_what_it_was_asked_or_ends_before_training_with_a_flag_that_starts_it(
    asked, resumes, tiny, ran, tmp_path
):
    """
    First try a machine that cannot do what is asked, then the flag from its error line, then a
    machine that can. A resume whose tracker or samples fail trains on, because neither changes a
    weight.
    """
    able, unable, fix, code_of_resume = ASKED[asked]
    data = shutil.copytree(tiny["dataset"], tmp_path / "tokens")
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"byte"', '"gpt2"'))
    tiny |= dict(dataset=data, init_from="auto", eval_interval=2)
    if resumes:
        train(**tiny | dict(max_iters=4))

    def launch(patch, key: tuple) -> Result:
        with patch:
            return run("train.py", *flags(**tiny | dict([key])))

    result = launch(unable, asked)
    expected = code_of_resume if resumes else 1
    assert result.code == expected, result
    if expected:
        (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: {asked[0]}: ") and f"--{fix[0]}={fix[1]}" in line
        assert ran.saved[-1:] == ([4] if resumes else [])
        assert launch(unable, fix).code == 0
    else:
        assert result.err.count(f": {asked[0]}: ") == 1 and "warning: " in result.err
        assert ran.saved[-1] == 8
    if not resumes:
        tiny["out_dir"] = ran.out_dir = tmp_path / "able"
        assert launch(able, asked).code == 0
        (config,) = ran.column("start", "config")
        assert config[asked[0]] == asked[1]
        assert len(ran.column("sample", "text")) == 4 * (asked[0] == "sample_tokens")


# -----------------------------------------------------------------------------
# The documented codes

(CODES,) = [text for text in map(read, GUIDES) if "\n| 128 + N | " in text]
# the codes of the signals that save a run
SIGNALS = {129: "SIGHUP", 130: "SIGINT", 138: "SIGUSR1", 143: "SIGTERM", 152: "SIGXCPU"}


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("code", SIGNALS)
def test_a_signal_saves_the_run_and_ends_it_with_the_documented_exit_code(code, tiny, ran):
    assert str(code) in CODES
    trainer = InProcessRun()
    trainer.at["iteration", 3] = lambda: signal.raise_signal(getattr(signal, SIGNALS[code]))
    assert (trainer.launch(**tiny).code, ran.saved[-1]) == (code, 3)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_signal_that_another_library_handles_does_not_stop_the_run(tiny):
    number = signal.SIGRTMIN + 1 if sys.platform == "linux" else signal.SIGUSR2
    trainer, handled = InProcessRun(), []
    trainer.at["iteration", 3] = lambda: signal.raise_signal(number)
    before = signal.signal(number, lambda *_: handled.append(True))
    assert (trainer.launch(**tiny).code, handled) == (0, [True])
    signal.signal(number, before)


def test_a_share_that_drops_while_a_checkpoint_is_read_begins_no_new_run(tiny, ran, tmp_path):
    train(**tiny | dict(max_iters=4))

    def drop(file):
        ran.out_dir.rename(tmp_path / "away")
        raise OSError(errno.EIO, "Input/output error")

    with mock.patch("zipfile.ZipFile.testzip", drop):
        assert run("train.py", *flags(**tiny, init_from="auto")).code == 1
    assert not ran.out_dir.exists()


def test_the_documented_systemd_unit_restarts_a_run_only_after_a_failure():
    first = block_with("SuccessExitStatus=").partition("tell@.service\n")[0]
    unit = dict(re.findall(r"^(\w+)=(.*)$", first, re.M))
    assert [int(code) for code in unit["SuccessExitStatus"].split()] == [*SIGNALS]
    assert unit["Restart"] == "on-failure"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_documented_units(tmp_path):
    text = block_with("SuccessExitStatus=").replace("User=me", "User=root")
    text = re.sub(r"=/(home/me/nightshift/\.venv|usr)/bin/\S+", "=/bin/sh", text)
    names = re.findall(r"^# /etc/systemd/system/(\S+)$", text, re.M)
    assert len(names) == 2
    for name, unit in zip(names, re.split(r"^# /etc/.*$", text, flags=re.M)[1:], strict=True):
        (tmp_path / name).write_text(unit)
    said = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / name for name in names)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
    )
    assert (said.returncode, said.stderr) == (0, "")


STUBS = {
    ".venv/bin/python": """echo "$@" >> starts
        set -- $(cat codes)
        code=$1; shift; echo $* > codes; exit $code""",
    "sleep": "",
    "curl": 'echo "$2" > told',
}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "codes, starts",
    [((1, 137, 0), 3), ((134, 135, 139, 0), 4), *(((n,), 1) for n in (143, 130)), ((1,) * 9, 5)],
)
def test_the_documented_script_restarts_only_after_a_failure_and_reports_the_last_exit_code(
    codes, starts, tmp_path
):
    for name, code in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text(" ".join(map(str, codes)))
    (tmp_path / "trainer.sh").write_text(block_with("sleep 60 ;;"))
    command = ["bash", "trainer.sh", "--device=cpu"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    started = (tmp_path / "starts").read_text().splitlines()
    assert len(started) == starts
    assert all(line.endswith(" --device=cpu") for line in started)
    assert (tmp_path / "told").read_text().endswith(f" exit code {codes[starts - 1]}\n")
