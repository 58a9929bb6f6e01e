"""loss.png is drawn beside the run. What goes wrong there costs no more than the picture."""

import os
import sys
import time

import psutil
import pytest
from helpers import ON_WINDOWS, run_here, start_process
from training.drawing import Drawing

import train
from training import drawing
from training.clock import Clock


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
        monkeypatch.setattr(drawing, "PROJECT", tmp_path / "project")

    return write


@pytest.mark.parametrize("end", ["max_minutes", "max_iters"])
def test_the_last_picture_is_of_the_whole_run(end, dataset, tmp_path, monkeypatch):
    original = train.train_step

    def step(*args):
        step.number += 1
        if step.number == 5 and end == "max_minutes":
            monkeypatch.setattr(Clock, "left_of_start", lambda clock: 0.0)
        return original(*args)

    step.number = 0
    monkeypatch.setattr(drawing, "SHORTEST_RUN", 0.0)
    monkeypatch.setattr(drawing, "PATIENCE", 100.0)  # on a busy machine
    monkeypatch.setattr(train, "train_step", step)
    assert run_here(dataset, tmp_path, max_minutes=60.0) == 0
    picture = tmp_path / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    # begun after the last record
    assert picture.stat().st_mtime_ns > (tmp_path / "metrics.jsonl").stat().st_mtime_ns


def test_a_picture_is_drawn_while_the_run_goes_on(dataset, tmp_path, monkeypatch):
    original, seen = train.train_step, []

    def step(*args):
        deadline = time.monotonic() + 60
        while len(seen) == 3 and time.monotonic() < deadline:
            if (tmp_path / "loss.png").exists():
                break
            time.sleep(0.1)
        seen.append((tmp_path / "loss.png").exists())
        return original(*args)

    monkeypatch.setattr(drawing, "DRAW_EVERY", 0.0)
    monkeypatch.setattr(train, "train_step", step)
    assert run_here(dataset, tmp_path, max_iters=5) == 0
    assert seen[3]


def test_a_run_draws_once_a_minute(tmp_path, monkeypatch):
    now, begun = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(drawing, "start_child", lambda *_, **__: begun.append(now[0]))
    picture = Drawing(tmp_path)
    for now[0] in range(200):
        picture.draw_if_due()
    assert begun == [60, 120, 180]


def test_none_is_begun_while_one_draws_and_none_outlives_the_run(tmp_path, stand_in, monkeypatch):
    stand_in(
        "import pathlib, os, sys, time\n"
        "(pathlib.Path(sys.argv[1]) / f'{os.getpid()}.pid').touch()\ntime.sleep(600)"
    )
    for name, seconds in (("DRAW_EVERY", 0.0), ("SHORTEST_RUN", 0.0), ("PATIENCE", 0.2)):
        monkeypatch.setattr(drawing, name, seconds)
    picture = Drawing(tmp_path)
    for _ in range(30):
        picture.draw_if_due()
        time.sleep(0.1)
    (pid,) = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert is_there(pid)
    began = time.monotonic()
    picture.draw_end(100.0)
    assert time.monotonic() - began < 10
    picture.process.wait(10)
    assert not is_there(pid)


@pytest.mark.parametrize("fault", ["sys.exit(1)", "import nothing_of_that_name", "os.abort()"])
def test_a_fault_in_drawing_is_one_line_and_no_more(
    fault, dataset, tmp_path, stand_in, monkeypatch, capfd
):
    stand_in(f"import os, sys\n{fault}")
    for name in ("DRAW_EVERY", "SHORTEST_RUN"):
        monkeypatch.setattr(drawing, name, 0.0)
    assert run_here(dataset, tmp_path / "run", max_iters=8) == 0
    (said,) = capfd.readouterr().err.splitlines()
    advice = f"python compare.py {tmp_path / 'run'} draws it, or says why"
    assert said == f"warning: loss.png is no longer drawn; {advice}"


def test_a_machine_that_starts_no_process_trains_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    picture = Drawing(tmp_path)
    picture.begin()
    picture.draw_end(100.0)
    assert capsys.readouterr().err.count("loss.png is no longer drawn") == 1


KILLED = """
import sys, time
from pathlib import Path
from training.drawing import Drawing
picture = Drawing(Path(sys.argv[1]))
picture.begin()
print(picture.process.pid, flush=True)
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
