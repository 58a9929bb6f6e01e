"""
Say which of torchrun's processes this is, by the variables that torchrun sets, and which signals
ask it to stop, and keep the machine awake while it works.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

# Each of these asks the run to save and stop. SIGUSR1 is Slurm's advance warning, SIGUSR2 that of
# Grid Engine and LSF, SIGXCPU announces a CPU time limit, and SIGHUP a closing terminal. Windows
# has only SIGINT (Ctrl-C), SIGTERM and SIGBREAK (Ctrl-Break).
NAMES = "SIGINT SIGTERM SIGBREAK SIGUSR1 SIGUSR2 SIGXCPU SIGHUP".split()
ASK_TO_STOP = [number for number in signal.Signals if number.name in NAMES]


def on_stop(handler: Callable[[int, Any], None]) -> None:
    """Let a handler receive the signals that ask to stop, but not those that are ignored here."""
    for number in ASK_TO_STOP:
        # SIGHUP is ignored under nohup, and SIGINT after `&` in a script. Keep ignoring them.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return this process's number; 0 in a single process, whose shell may still hold a RANK."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def local_rank() -> int:
    """Return this process's number among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if world_size() > 1 else 0


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
