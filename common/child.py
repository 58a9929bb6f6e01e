"""
Processes that a run starts beside itself, and that end with it, however it ends. And the machine
kept awake for as long as this process works.
"""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable


def start_child(*arguments, **options) -> subprocess.Popen:
    """
    Start `python ARGUMENTS`, which is to call end_with_parent(). Its stdin is a pipe, unbuffered; a
    terminal's Ctrl-C and Ctrl-Break do not reach it. `options`: of Popen. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},  # Windows would have the region's own
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # the same on Windows
        **options,
    )


def end_with_parent(receive: Callable[[str], None] = lambda line: None) -> None:
    """
    End this process when its parent does: then stdin closes. Until then each line that comes there
    goes to `receive`, in a thread.
    """

    lines = os.fdopen(os.dup(0))
    # On Windows nobody can look at a pipe that a thread reads. Libraries do look at stdin when they
    # are loaded, and would wait (numpy #24290): from here on they find none.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def listen() -> None:
        for line in lines:
            receive(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def keep_awake() -> None:
    """
    Until this process ends, Windows does not sleep. Else it would after some minutes without a key
    pressed, whatever computes. The screen may go dark.
    """
    if sys.platform == "win32":
        # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)
