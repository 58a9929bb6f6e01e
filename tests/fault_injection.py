"""
Inject faults: fill a disk, or start train.py in its own process with lines of Python that run after
each update. In the test's own process, use program.InProcessRun instead.
"""

import contextlib
import os
import textwrap
from pathlib import Path
from string import Template

from program import ROOT

PAGE = 1 << 12  # bytes; a tmpfs hands out space in pages of this size


# -----------------------------------------------------------------------------
# Disks


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
$action

register_optimizer_step_post_hook(updated)
$before
sys.argv[0] = "train.py"
runpy.run_path("$program/train.py", run_name="__main__")
"""


def watched(action: str = "", before: str = "") -> list[str]:
    """
    Return arguments for start() or start_ranks() that run `before`, then train.py, with `action`
    after each update. Both are lines of Python; in `action`, n is the number of updates so far.
    """
    lines = textwrap.indent(textwrap.dedent(action), "    ")
    text = Template(WATCHED)
    return ["-c", text.substitute(action=lines, before=textwrap.dedent(before), program=ROOT)]
