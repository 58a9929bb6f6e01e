"""
Inject faults: fill a disk, or start train.py in its own process with lines of Python or planned
steps that run at chosen moments. In the test's own process, use program.InProcessRun instead.

Run as a script, this file runs another script with the steps planned for it; see with_faults().
"""

import contextlib
import functools
import json
import os
import runpy
import signal
import sys
import textwrap
from pathlib import Path

from program import ROOT, InProcessRun

PAGE = 1 << 12  # bytes; a tmpfs hands out space in pages of this size


# -----------------------------------------------------------------------------
# A disk that others fill


def fill(disk: Path) -> None:
    """Fill the disk with a file, as another program might."""
    file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(PAGE))
    os.close(file)


def free(disk: Path, size: int | None = None) -> None:
    """Free `size` bytes of the file that fill() wrote, or all of it."""
    filler = disk / "filler"
    if filler.exists():
        os.truncate(filler, 0 if size is None else filler.stat().st_size - size)


# -----------------------------------------------------------------------------
# In a process of its own


WATCHED = """
import os, runpy, signal, sys, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK = os.environ.get("RANK", "0")
n = 0

def updated(optimizer, *_):
    global n
    if optimizer.param_groups[0]["params"][0].is_meta:
        return  # this optimizer is built only to count its memory
    n += 1
ACTION

register_optimizer_step_post_hook(updated)
BEFORE
sys.argv[0] = "train.py"
runpy.run_path("ROOT/train.py", run_name="__main__")
"""


def watched(action: str = "", before: str = "") -> list[str]:
    """
    Return arguments for start() or start_ranks() that run `before`, then train.py, with `action`
    after each update. Both are lines of Python; in `action`, n is the number of updates so far.
    """
    text = WATCHED.replace("ACTION", textwrap.indent(textwrap.dedent(action), "    "))
    return ["-c", text.replace("BEFORE", textwrap.dedent(before)).replace("ROOT", str(ROOT))]


# -----------------------------------------------------------------------------
# As a script: python tests/fault_injection.py '[DISK, STEP, ...]' train.py --key=value ...


def with_faults(disk: Path, *steps: tuple[str, int, str]) -> list[str]:
    """
    Return arguments for start() that run train.py with `steps`. Each is (moment, n, action): at the
    n-th such moment of InProcessRun, "fill" or "free" the disk or send a signal by its name, and
    report it on stderr.
    """
    return ["tests/fault_injection.py", json.dumps([str(disk), *steps]), "train.py"]


def planned(disk: Path, *steps: tuple[str, int, str]) -> InProcessRun:
    def act(moment: str, n: int) -> None:
        for step_moment, step_n, action in steps:
            if (step_moment, step_n) != (moment, n):
                continue
            print(f"storm: {action} at {moment} {n}", file=sys.stderr)
            if action in ("fill", "free"):
                dict(fill=fill, free=free)[action](disk)
            else:
                os.kill(os.getpid(), getattr(signal, action))

    trainer = InProcessRun()
    for moment, n, _ in steps:
        trainer.at[moment, n] = functools.partial(act, moment, n)
    return trainer


if __name__ == "__main__":
    folder, *todo = json.loads(sys.argv[1])
    sys.argv, sys.path[0] = sys.argv[2:], str(ROOT)
    with planned(Path(folder), *todo).watching():
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
