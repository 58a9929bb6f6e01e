"""
Inject faults: fill a disk, act before each call that changes one, or start train.py in its own
process with lines of Python that run after each update. In the test's own process, use
program.InProcessRun instead.
"""

import contextlib
import io
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest import mock

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


@contextlib.contextmanager
def before_disk_calls(action: Callable[[], None]):
    """
    Call action() before each open() for writing, before the data of such a file is handed to the
    system, and before each fsync, replace, rename, unlink and mkdir of the os module.
    """
    real_open = io.open

    class File(io.FileIO):
        def write(self, data):
            action()
            return super().write(data)

    def opening(file, mode="r", *arguments, **named):
        if not set(mode) & set("wax+"):
            return real_open(file, mode, *arguments, **named)
        assert "b" in mode, "a run writes text as bytes"
        action()
        raw = File(file, mode.replace("b", ""))
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    def wrapped(name):
        function = getattr(os, name)

        def call(*arguments, **named):
            action()
            return function(*arguments, **named)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as patches:
        for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
            patches.enter_context(wrapped(name))
        patches.enter_context(mock.patch("builtins.open", opening))
        patches.enter_context(mock.patch("io.open", opening))
        yield


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
