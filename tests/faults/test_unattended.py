"""
The exit codes of docs/recovery.md are the program's, and what docs/unattended.md puts around a run
decides by them.
"""

import re
import shutil
import signal
import subprocess

import pytest
import torch
from helpers import ROOT, flags, records, run_here
from test_stopping import send_at

import train
from training import checkpoint
from training.ranks import Ranks, StopSignals

pytest.importorskip("fcntl", reason="signals and shells of POSIX")
PAGE = (ROOT / "docs" / "unattended.md").read_text(encoding="utf-8")
CODES = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
ROWS = {int(code): after for code, after in re.findall(r"^\| (\d+) \| ([^|]*) \|", CODES, re.M)}
NAMES = {code: after.partition(":")[0] for code, after in ROWS.items() if code > 2}
OTHERS = ("SIGKILL", "SIGBREAK")  # never saves; is on Windows alone
SAVING = {code: getattr(signal, name) for code, name in NAMES.items() if name not in OTHERS}


def block(language: str) -> str:
    return re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)[1]


def test_the_page_names_every_exit_code(monkeypatch):
    handled = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    StopSignals(Ranks())
    assert set(SAVING.values()) == set(handled)
    unseen = {0, 1, 2, 128 + signal.SIGKILL, 149}
    assert set(ROWS) == {*unseen, *(128 + number for number in handled)}


@pytest.mark.parametrize("code", SAVING)
def test_a_stop_saves_and_ends_with_the_code_of_the_page(code, dataset, tmp_path, monkeypatch):
    send_at(monkeypatch, train, "train_step", 2, SAVING[code])
    assert run_here(dataset, tmp_path) == code
    assert checkpoint.load(checkpoint.find_newest(tmp_path))["progress"]["iter_num"] == 3


def test_a_complete_run_ends_with_0_also_when_it_is_started_again(dataset, tmp_path):
    for _ in range(2):
        assert run_here(dataset, tmp_path, init_from="auto", max_iters=2) == 0
    assert run_here(dataset, tmp_path / "minutes", max_iters=10**6, max_minutes=1e-4) == 0
    assert records(tmp_path / "minutes", "end")[0]["reason"] == "max_minutes"


def test_a_failure_while_running_ends_with_1_and_a_mistake_with_2(
    dataset, tmp_path, monkeypatch, script
):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "train_step", fail)
    assert script(train.main, *flags(dataset, tmp_path))[0] == 1
    for mistake in (dict(init_from="resume"), dict(device="cuda"), dict(n_head=3)):
        assert script(train.main, *flags(dataset, tmp_path / "none", **mistake))[0] == 2


def test_the_units_success_and_no_restart_are_the_codes_of_the_page():
    unit = dict(re.findall(r"^(\w+)=(.*)$", block("ini").partition("tell@.service\n")[0], re.M))
    assert [int(code) for code in unit["SuccessExitStatus"].split()] == list(SAVING)
    assert unit["RestartPreventExitStatus"] == "2" and unit["Restart"] == "on-failure"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_knows_every_line_of_the_units(tmp_path):
    text = block("ini").replace("User=me", "User=root")
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


@pytest.mark.parametrize(
    "codes, starts", [((1, 137, 0), 3), ((143,), 1), ((130,), 1), ((2,), 1), ((1,) * 9, 5)]
)
def test_the_script_starts_again_after_a_failure_only_and_tells_the_last_code(
    codes, starts, tmp_path
):
    stubs = {
        ".venv/bin/python": """echo "$@" >> starts
            set -- $(cat codes)
            code=$1; shift; echo $* > codes; exit $code""",
        "sleep": "",
        "curl": 'echo "$2" > told',
    }
    for name, code in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text(" ".join(map(str, codes)))
    (tmp_path / "night.sh").write_text(block("bash"))
    path = f"{tmp_path}:/usr/bin:/bin"
    command = ["bash", "night.sh", "--device=cpu"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": path}, check=True)
    started = (tmp_path / "starts").read_text().splitlines()
    assert len(started) == starts and all(line.endswith(" --device=cpu") for line in started)
    assert (tmp_path / "told").read_text().endswith(f" exit code {codes[starts - 1]}\n")
