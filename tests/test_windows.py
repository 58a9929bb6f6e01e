"""
Check what the program does on Windows alone, one function at a time, with Windows' modules and
errors in the place of Linux's. CI runs all tests on Windows.
"""

import contextlib
import errno
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from common import console, files, process


@pytest.fixture
def windows(monkeypatch):
    """Make these modules believe that they run on Windows. Returns what only Windows has."""
    for module in (process, console, files):
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    there = SimpleNamespace(msvcrt=mock.Mock(LK_NBLCK=2), windll=mock.Mock())
    monkeypatch.setitem(sys.modules, "msvcrt", there.msvcrt)
    monkeypatch.setattr(process.ctypes, "windll", there.windll, raising=False)
    return there


@pytest.mark.parametrize("seconds, is_replaced", [(1, True), (9, False)])
def test_waits_for_a_virus_scanner_before_it_replaces_a_file(
    seconds, is_replaced, windows, tmp_path, monkeypatch
):
    """Windows refuses while another program has the file open, here for so many attempts."""
    path, replace, refused = tmp_path / "loss.png", files.os.replace, [None] * seconds
    path.write_bytes(b"old")

    def busy(old, new):
        if refused:
            refused.pop()
            raise PermissionError(errno.EACCES, "in use", str(new))
        replace(old, new)

    monkeypatch.setattr(files.os, "replace", busy)
    with contextlib.suppress(PermissionError), files.replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == (b"new" if is_replaced else b"old")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("answer, is_locked", [(None, True), (OSError(errno.EACCES, ""), False)])
def test_locks_a_byte_far_behind_the_contents(answer, is_locked, windows, tmp_path):
    windows.msvcrt.locking.side_effect = answer
    with open(tmp_path / "lock", "ab") as file:
        assert files.try_lock(file) == is_locked
        assert file.tell() == 2**30
        windows.msvcrt.locking.assert_called_once_with(file.fileno(), 2, 1)


def test_keeps_windows_awake_and_quotes_commands_for_its_shells(windows):
    process.keep_awake()
    windows.windll.kernel32.SetThreadExecutionState.assert_called_once_with(0x80000001)
    assert console.command_line("python", Path("a b.py")) == 'python "a b.py"'


@pytest.mark.parametrize("system", ["win32", "linux"])
def test_a_second_ctrl_c_ends_a_run_that_no_signal_ends(system, monkeypatch):
    """As on Windows, and as process 1 of a container."""
    codes: list[int] = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("os._exit", codes.append)
    stop = process.StopSignal()
    stop.receive(signal.SIGINT)
    stop.came -= 1  # second
    stop.receive(signal.SIGINT)
    assert codes == [130]


@pytest.mark.skipif(sys.platform == "win32", reason="imitates Ctrl-Break with a signal of Linux")
def test_ctrl_break_stops_a_run_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(process, "ASK_TO_STOP", [signal.Signals(21)])
    stop = process.StopSignal()
    signal.getsignal(21)(21, None)
    assert stop.number == 21
