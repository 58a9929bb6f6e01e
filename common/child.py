"""
Start child processes that exit when this process does, even if it is killed, and keep the machine
awake while this process works.
"""

import ctypes
import os
import subprocess
import sys
import threading


def start_child(*arguments, **options) -> subprocess.Popen:
    """
    Start `python ARGUMENTS`, a program that must call end_with_parent(). Its stdin is a pipe, and
    Ctrl-C or Ctrl-Break in the terminal does not reach it. `options` go to Popen; stdout is
    discarded unless they include one. Raises OSError.
    """
    options.setdefault("stdout", subprocess.DEVNULL)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},  # Windows defaults to the locale's encoding
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # does the same on Windows
        **options,
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
