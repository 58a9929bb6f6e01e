"""
Say which of torchrun's processes this is, run a module of this program in a child process that
exits when this process does, even if it is killed, and keep the machine awake while this process
works.

    python common/process.py MODULE ARGUMENTS     what start_child() types
"""

import ctypes
import os
import runpy
import subprocess
import sys
import threading
from typing import Any

FILE = os.path.abspath(__file__)

# -----------------------------------------------------------------------------
# This process among those that torchrun has started, as it tells each of them


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return this process's number among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_main() -> bool:
    """Return whether this is the process that decides, logs and saves."""
    return rank() == 0


# -----------------------------------------------------------------------------
# Child processes, and sleep


def start_child(module: str, *arguments, stderr: Any) -> subprocess.Popen:
    """
    Start a module as __main__ in a child. Its stdin is a pipe, which nobody may write to, and its
    stdout is discarded. Ctrl-C or Ctrl-Break in the terminal does not reach it. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, FILE, module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},  # Windows defaults to the locale's encoding
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # does the same on Windows
    )


def end_with_parent() -> None:
    """Exit when the parent process exits, which closes stdin."""
    stdin = os.dup(0)
    # On Windows, inspecting a pipe blocks while another thread reads from it, and some libraries
    # inspect stdin on import (numpy #24290). So replace stdin with an empty file.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def listen() -> None:
        os.read(stdin, 1)  # returns when the parent exits, because nobody writes to the pipe
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def keep_awake() -> None:
    """
    Keep Windows from going to sleep until this process ends. Without this, Windows sleeps after
    some minutes without user input, even while computing. The screen may still turn off.
    """
    if sys.platform == "win32":
        # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)


if __name__ == "__main__":
    end_with_parent()
    sys.path[0] = os.path.dirname(os.path.dirname(FILE))  # where MODULE is imported from
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
