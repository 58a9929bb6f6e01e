"""
Repeat a command until it is done, or until a signal stops it.

    python night.py train.py config/fast.py      a first word in .py runs with this Python
    python night.py torchrun --standalone --nproc_per_node=2 train.py config/fast.py

Every launch resumes the run. After an error or a crash, this launches it again in five minutes,
but gives up after five launches in a row of less than a quarter of an hour: they may all have ended
at the same place. At a signal it stops the command by SIGTERM, waits for its end, and exits with
128 + the signal's number.
"""

import subprocess
import sys
import time

from common.console import run_main, say
from common.process import ASK_TO_STOP, on_stop

PAUSE_SECONDS = 300
SHORT_SECONDS = 900  # a longer launch has usually saved, so the next one begins later in the run


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(__doc__.strip())
        return 0 if argv else 1
    command = [sys.executable, *argv] if argv[0].endswith(".py") else argv
    came: list[int] = []  # the signals, in order
    on_stop(lambda number, frame: came.append(number))
    short = 0  # launches in a row
    while not came:
        began = time.monotonic()
        child = subprocess.Popen(command)
        while child.poll() is None and not came:
            time.sleep(0.2)
        if came and sys.platform != "win32":  # there the console sends Ctrl-C to both
            # SIGTERM, because Ctrl-C has reached a child in the same terminal already, and a second
            # SIGINT would end it before it has saved
            child.terminate()
        code = child.wait()
        code = 128 - code if code < 0 else code  # 128 + N if signal N killed it
        short = short + 1 if time.monotonic() < began + SHORT_SECONDS else 0
        if came or code in (0, *(128 + number for number in ASK_TO_STOP)):
            return 128 + came[0] if came else code
        if short == 5:
            why = "five launches in a row took less than a quarter of an hour; see their errors"
            say(f"night.py: exit code {code}; giving up, because {why}", console="stderr")
            return code
        hint = "launching again in five minutes, unless you press Ctrl-C"
        say(f"night.py: exit code {code}; {hint}", console="stderr")
        resumes = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < resumes and not came:
            time.sleep(0.2)
    return 128 + came[0]


if __name__ == "__main__":
    run_main(main)
