"""
Say which of torchrun's processes this is, by the variables that torchrun sets, and keep the machine
awake while it works.
"""

import ctypes
import os
import sys


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


def keep_awake() -> None:
    """
    Keep Windows from going to sleep until this process ends. Without this, Windows sleeps after
    some minutes without user input, even while computing. The screen may still turn off.
    """
    if sys.platform == "win32":
        # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)
