"""
Say which of torchrun's processes this is, by the variables that torchrun sets, note the signal that
asks it to stop, and keep the machine awake while it works.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

# Each of these asks the run to save and stop. SIGUSR1 is Slurm's advance warning, SIGUSR2 that of
# Grid Engine and LSF, SIGXCPU announces a CPU time limit, and SIGHUP a closing terminal. Windows
# has only SIGINT (Ctrl-C), SIGTERM and SIGBREAK (Ctrl-Break).
NAMES = "SIGINT SIGTERM SIGBREAK SIGUSR1 SIGUSR2 SIGXCPU SIGHUP".split()
ASK_TO_STOP = [number for number in signal.Signals if number.name in NAMES]
SAME_STOP = 0.5  # seconds within which two signals are one, which `timeout` or torchrun sends twice


def on_stop(handler: Callable[[int, Any], None]) -> None:
    """Let a handler receive the signals that ask to stop, but not those that are ignored here."""
    for number in ASK_TO_STOP:
        # SIGHUP is ignored under nohup, and SIGINT after `&` in a script. Keep ignoring them.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignal:
    """
    Notes the first signal that asks the run to stop. Rank 0's decides for all ranks, because
    torchrun and Slurm send it to each of them. After it, Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.number = 0  # 0: none has come
        self.came = 0.0
        on_stop(self.receive)

    def receive(self, number: int, frame=None) -> None:
        if not self.number:
            self.number, self.came = number, time.monotonic()
            if is_main():
                hint = "a second Ctrl-C stops at once and saves nothing"
                with contextlib.suppress(RuntimeError, OSError):  # while a line is being printed
                    line = f"stopping when this iteration or evaluation is saved; {hint}"
                    print(line, file=sys.stderr, flush=True)
        elif number == signal.SIGINT and time.monotonic() > self.came + SAME_STOP:
            if sys.platform != "win32":
                signal.signal(number, signal.SIG_DFL)  # end by the signal itself, as exit_with()
                os.kill(os.getpid(), number)
            os._exit(128 + number)  # on Windows, and as process 1, which no such signal ends


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


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
