"""
Start processes that have already imported torch, which takes a fresh Python three seconds. Python's
own fork server forks them, and each then imports this program and runs a script, or the code given
with -c, as __main__. So it is a real process with its own signals, output and exit code.

A forked process cannot show anything about importing torch, environment variables that torch reads
when it is imported, or Python's own options. Start a cold process for those.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("forkserver")
SERVERS_NAME = "tests.fork_server"  # of this module in the process that forks the others
FORK.set_forkserver_preload([SERVERS_NAME])


class ForkedProcess(FORK.Process):
    """Run `python ARGUMENTS`, used like a subprocess.Popen whose output goes to two files."""

    def __init__(self, arguments: list[str], cwd: Path, environment: dict, out: str, err: str):
        super().__init__()
        self.arguments, self.cwd, self.environment = arguments, str(cwd), environment
        self.files = {1: out, 2: err}
        # the child would import the tests' main module
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        with contextlib.chdir(ROOT):  # where the server looks for what it preloads
            self.start()
        sys.modules["__main__"] = main

    def run(self) -> None:
        """Do in the child what a fresh Python does."""
        gc.freeze()  # or each collection would go through torch's million objects
        for number, path in self.files.items():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.cwd)
        os.fsync = lambda file: None  # as in conftest.py
        script, *words = self.arguments
        code = words.pop(0) if script == "-c" else ""
        sys.path.insert(0, "" if code else str(Path(script).resolve().parent))
        sys.argv = [script, *words]
        try:
            if code:
                sys.modules["__main__"] = types.ModuleType("__main__")
                exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
            else:
                runpy.run_path(script, run_name="__main__")
        except KeyboardInterrupt:  # Python then kills itself, which a shell calls 130
            sys.exit(128 + signal.SIGINT)
        finally:
            atexit._run_exitfuncs()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        return self.exitcode


def warm_up() -> None:
    """
    Import torch and run two tiny models forward on fake tensors, as each run does to count its
    FLOPs: with what torch then remembers, a forked process begins a run sooner. A backward pass
    would start threads in a CUDA build of torch, and forked processes could then make none. Forget
    the program again, because a forked process may run a changed copy of it.
    """
    import torch._dynamo  # which torch imports with the first optimizer
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from model import GPTConfig
    from model_fast import FastConfig, build_model

    for sizes in (GPTConfig, FastConfig):
        with FakeTensorMode(), FlopCounterMode(display=False):
            model = build_model(sizes(n_layer=1, n_head=2, n_embd=32, block_size=16))
            idx = torch.zeros(1, 16, dtype=torch.long)
            model(idx, idx)
    scripts = ("common", "configurator", "data", "machine", "model", "model_fast", "optimizer")
    for name in [name for name in sys.modules if name.split(".")[0] in scripts]:
        del sys.modules[name]


if __name__ == SERVERS_NAME:
    warm_up()
