"""
Moments of a run, seen from outside: an update, a batch of an evaluation, a call that changes the
disk, a wait. Tests act there: they fill the disk, send a signal, damage a file.

These are calls of torch and of the standard library, so nothing here names the program. As a
script it starts another one with what is planned for it, see act_as_planned.
"""

import contextlib
import io
import itertools
import json
import os
import runpy
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import (
    register_optimizer_step_pre_hook,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = 1 << 12  # what a tmpfs gives out


@contextlib.contextmanager
def hooked(register, action: Callable[[int, torch.optim.Optimizer], None]):
    numbers = itertools.count(1)

    def hook(optimizer, *_):
        # a step without data, as one makes to count its memory, is no update
        if not any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            action(next(numbers), optimizer)

    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def before_updates(action: Callable[[int, torch.optim.Optimizer], None]):
    """Call action(n, optimizer) before this process's n-th update, counted from 1."""
    return hooked(register_optimizer_step_pre_hook, action)


def at_update(number: int, action: Callable[[], None]):
    """Call action() before this process's update of that number, counted from 1."""
    return before_updates(lambda n, optimizer: action() if n == number else None)


@contextlib.contextmanager
def before_eval_lookups(action: Callable[[int], None]):
    """Call action(n) before the n-th embedding is looked up in evaluation mode, counted from 1."""
    numbers = itertools.count(1)

    def hook(module, inputs):
        if isinstance(module, torch.nn.Embedding) and not module.training:
            action(next(numbers))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def after_saves(action: Callable[[int], None]):
    """Call action(n) once torch.save has written its n-th file, which has no name yet."""
    numbers, save = itertools.count(1), torch.save

    def saving(*arguments, **named):
        save(*arguments, **named)
        action(next(numbers))

    return mock.patch("torch.save", saving)


@contextlib.contextmanager
def before_disk_calls(action: Callable[[str], None]):
    """
    Call action(name) before every call that changes a disk: one that opens a file for writing,
    writes to it, syncs, renames, links, deletes, makes a folder.
    """
    real_open = io.open

    class File(io.FileIO):
        def write(self, data):
            action("write")
            return super().write(data)

    def opening(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest):
        if not set(mode) & set("wax+"):
            return real_open(file, mode, buffering, encoding, errors, newline, *rest)
        action("open")
        raw = File(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def wrapped(name):
        function = getattr(os, name)

        def call(*arguments, **named):
            action(name)
            return function(*arguments, **named)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as patches:
        for name in ("fsync", "replace", "rename", "link", "unlink", "remove", "mkdir"):
            patches.enter_context(wrapped(name))
        patches.enter_context(mock.patch("builtins.open", opening))
        patches.enter_context(mock.patch("io.open", opening))
        yield


class Clock:
    """
    The clock of a run, turned by hand: `ahead` seconds before the real one. Sleeping turns it
    instead of waiting, after `on_sleep`.
    """

    def __init__(self, on_sleep: Callable[[], None] = lambda: None):
        self.ahead, self.on_sleep, self.sleeps = 0.0, on_sleep, 0

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        assert self.sleeps < 10_000, "waits for ever"
        self.on_sleep()
        self.ahead += seconds

    @contextlib.contextmanager
    def patched(self):
        with contextlib.ExitStack() as patches:
            for name in ("perf_counter", "monotonic"):
                patches.enter_context(mock.patch.object(time, name, self.read(name)))
            patches.enter_context(mock.patch("time.sleep", self.sleep))
            # a run that seems long would be drawn, by another process that imports matplotlib
            patches.enter_context(mock.patch("subprocess.Popen", side_effect=OSError("no child")))
            yield self

    def read(self, name: str) -> Callable[[], float]:
        real = getattr(time, name)
        return lambda: real() + self.ahead


# -----------------------------------------------------------------------------
# A disk that others fill


def fill(disk: Path) -> None:
    """Somebody else's file takes all that is free."""
    file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(PAGE))
    os.close(file)


def free(disk: Path, size: int | None = None) -> None:
    """The other's file gives back so many bytes, or all."""
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
        return  # its memory is only counted
    n += 1
ACTION

register_optimizer_step_post_hook(updated)
BEFORE
sys.argv[0] = "train.py"
runpy.run_path("ROOT/train.py", run_name="__main__")
"""


def watched(action: str = "", before: str = "") -> list[str]:
    """
    train.py for start() or start_ranks(): it runs some lines of Python before its start, and
    `action` after its n-th update.
    """
    text = WATCHED.replace("ACTION", textwrap.indent(textwrap.dedent(action), "    "))
    return ["-c", text.replace("BEFORE", textwrap.dedent(before)).replace("ROOT", str(ROOT))]


# -----------------------------------------------------------------------------
# As a script: python tests/fault_injection.py PLAN train.py --key=value ...


def act_as_planned(plan: dict) -> contextlib.ExitStack:
    """
    plan["steps"]: [moment, n, action] each, where `moment` is update, lookup, disk or save, and
    `action` is fill, free or a signal's name. They happen on plan["disk"], only on the rank
    plan["rank"], and not again in a process that torchrun has restarted. A run that waits for room
    gets it at once. What happens is said on stderr.
    """
    disk = Path(plan["disk"])

    def act(moment: str, n: int) -> None:
        for step_moment, step_n, action in plan["steps"]:
            if (step_moment, step_n) != (moment, n):
                continue
            print(f"storm: {action} at {moment} {n}", file=sys.stderr)
            if action in ("fill", "free"):
                dict(fill=fill, free=free)[action](disk)
            else:
                os.kill(os.getpid(), getattr(signal, action))

    calls = itertools.count(1)
    patches = contextlib.ExitStack()
    is_it = os.environ.get("RANK", "0") == str(plan.get("rank", 0))
    if not is_it or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return patches
    patches.enter_context(before_updates(lambda n, optimizer: act("update", n)))
    patches.enter_context(before_eval_lookups(lambda n: act("lookup", n)))
    patches.enter_context(before_disk_calls(lambda name: act("disk", next(calls))))
    patches.enter_context(after_saves(lambda n: act("save", n)))
    patches.enter_context(Clock(lambda: free(disk)).patched())
    return patches


if __name__ == "__main__":
    todo = json.loads(sys.argv[1])
    sys.argv, sys.path[0] = sys.argv[2:], str(ROOT)
    with act_as_planned(todo):
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
