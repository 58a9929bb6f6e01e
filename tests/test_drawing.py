"""loss.png is drawn beside the run. What goes wrong there costs no more than the picture."""

import os
import sys
import time

import psutil
import pytest
from helpers import ON_WINDOWS, run_here, start_process

from training import log


def is_there(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A reports.picture of the test's own: it is started like the real one."""

    def write(code: str) -> None:
        (tmp_path / "project/reports").mkdir(parents=True)
        (tmp_path / "project/reports/picture.py").write_text(code)
        monkeypatch.setattr(log, "PROJECT", tmp_path / "project")

    return write


def test_the_last_picture_is_of_the_whole_run(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "SHORTEST_RUN", 0.0)
    monkeypatch.setattr(log, "PATIENCE", 100.0)  # on a busy machine
    assert run_here(dataset, tmp_path) == 0
    picture = tmp_path / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    # begun after the last record
    assert picture.stat().st_mtime_ns > (tmp_path / "metrics.jsonl").stat().st_mtime_ns


@pytest.mark.parametrize("fault", ["sys.exit(1)", "import nothing_of_that_name", "os.abort()"])
def test_a_fault_in_drawing_is_one_line_and_no_more(
    fault, dataset, tmp_path, stand_in, monkeypatch, capfd
):
    stand_in(f"import os, sys\n{fault}")
    monkeypatch.setattr(log, "SHORTEST_RUN", 0.0)
    assert run_here(dataset, tmp_path / "run", max_iters=8) == 0
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("warning: loss.png")


def test_a_machine_that_starts_no_process_trains_on(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    monkeypatch.setattr(log, "SHORTEST_RUN", 0.0)
    assert run_here(dataset, tmp_path / "run") == 0
    assert capsys.readouterr().err.count("loss.png") == 1


KILLED = """
import sys, time
from common.child import start_child
picture = start_child("-m", "reports.picture", sys.argv[1], cwd=".", stderr=-3)
print(picture.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(ON_WINDOWS, reason="needs a pipe with a name, and numbers of priority")
def test_the_process_is_of_low_priority_hears_no_ctrl_c_and_ends_with_a_killed_run(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")  # reading it takes until somebody writes
    run = start_process("-c", KILLED, str(tmp_path))
    pid = int(run.stdout.readline())
    assert is_there(pid) and os.getpgid(pid) == pid
    deadline = time.monotonic() + 20
    while (
        os.getpriority(os.PRIO_PROCESS, pid) <= os.getpriority(os.PRIO_PROCESS, 0)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)  # it is still importing
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    run.kill()
    deadline = time.monotonic() + 20
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there(pid)
