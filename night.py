"""
Repeat a command until it is done, or until a signal stops it.

    python night.py train.py config/fast.py      a first word in .py runs with this Python
    python night.py torchrun --standalone --nproc_per_node=2 train.py config/fast.py

Every launch continues the run. After an error or a crash, this launches it again in five minutes.
It gives up after five launches in a row of less than nine minutes, in which no save was due. It
passes signals on to the command, waits for its end, and exits with its code.
"""

import signal
import subprocess
import sys
import time

from common.console import run_main, say
from common.process import ASK_TO_STOP

REPEATED = (1, 134, 135, 137, 139)  # an error; a crash of PyTorch or a driver, or lack of memory
PAUSE_SECONDS = 300
SHORT_SECONDS = 540
POLL_SECONDS = 0.2


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(__doc__.strip())
        return 0 if argv else 1
    command = [sys.executable, *argv] if argv[0].endswith(".py") else argv
    came: list[int] = []  # the signals, in order
    for name in ASK_TO_STOP:
        number = getattr(signal, name, None)
        # SIGHUP is ignored under nohup, and SIGINT after `&` in a script. Keep ignoring them.
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: came.append(number))
    short = 0  # launches in a row
    while True:
        began = time.monotonic()
        code = launch(command, came)
        short = short + 1 if time.monotonic() < began + SHORT_SECONDS else 0
        if came or code not in REPEATED or short == 5:
            return code
        hint = "launching again in five minutes, unless you press Ctrl-C"
        say(f"night.py: exit code {code}; {hint}", console="stderr")
        resumes = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < resumes:
            if came:
                return 128 + came[0]
            time.sleep(POLL_SECONDS)


def launch(command: list[str], came: list[int]) -> int:
    """
    Run a command to its end and pass on the signals that come. Returns its exit code, or 128 + N if
    signal N killed it. Raises OSError.
    """
    # in a session of its own, so that a terminal's Ctrl-C comes once, from here
    child = subprocess.Popen(command, start_new_session=True)
    passed = 0
    while (code := child.poll()) is None:
        if passed < len(came):
            if sys.platform != "win32":  # there the console sends Ctrl-C to both
                child.send_signal(came[passed])
            passed += 1
        time.sleep(POLL_SECONDS)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    run_main(main)
