"""
Processes that a run starts beside itself, and that end with it, however it ends.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable


def start_child(*arguments, **options) -> subprocess.Popen:
    """
    Start `python ARGUMENTS`, which is to call end_with_parent(). Its stdin is a pipe, unbuffered; a
    terminal's Ctrl-C does not reach it. `options`: of Popen. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # on Windows
        **options,
    )


def end_with_parent(receive: Callable[[str], None] = lambda line: None) -> None:
    """
    End this process when its parent does: then stdin closes. Until then each line that comes there
    goes to `receive`, in a thread.
    """

    def listen() -> None:
        for line in sys.stdin:
            receive(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
