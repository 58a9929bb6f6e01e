"""
Processes that a run starts, and that end with it, however it ends. And keeping the machine awake
while this process works.
"""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable


def start_child(*arguments, **options) -> subprocess.Popen:
    """
    Start `python ARGUMENTS`; that program must call end_with_parent(). Its stdin is an unbuffered
    pipe. Ctrl-C and Ctrl-Break in the terminal do not reach it. `options` go to Popen; without a
    stdout among them its lines are lost. Raises OSError.
    """
    options.setdefault("stdout", subprocess.DEVNULL)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        bufsize=0,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},  # Windows would use its region's encoding
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # the same on Windows
        **options,
    )


def end_with_parent(receive: Callable[[str], None] = lambda line: None) -> None:
    """
    End this process when its parent ends, which closes stdin. Until then a thread passes each line
    from stdin to `receive`.
    """

    lines = os.fdopen(os.dup(0))
    # On Windows, looking at a pipe that a thread is reading blocks. Some libraries look at stdin on
    # import (numpy #24290), so from here on stdin is empty.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def listen() -> None:
        for line in lines:
            receive(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def keep_awake() -> None:
    """
    Keep Windows from sleeping until this process ends. It would otherwise sleep after some minutes
    without a key pressed, even while computing. The screen may still go dark.
    """
    if sys.platform == "win32":
        # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)
