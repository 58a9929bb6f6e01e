"""
Start the program's scripts in tests, and read what a run leaves behind.

All of this works from outside, by command lines, exit codes and files, so the program can be
rewritten while the tests stay. Faults come from outside too: signals, damaged bytes, a disk that is
really full, or patched functions of the standard library and torch (fault_injection.py).

    run("train.py", *flags(...))     in this process: some 50 ms for a tiny run
    train(...)                       the same, and checks that it succeeds
    write_tokens(folder, ...)        a dataset
    Run(folder)                      what a run has left there
    InProcessRun().launch(...)       a run that something happens to, or with a clock of its own
    start("train.py", *flags(...))   a process of its own, forked by fork_server.py: some 300 ms
    start(..., cold=True)            a fresh Python: some 3 s
    train_ranks(2, ...)              processes that train together, as torchrun would start them
    changed(folder, {...})           a copy of the program with some functions replaced

A test begins with fixtures of conftest.py. `tiny` has the keys of a small run: TINY_RUN, and what
the module of the test changes in its own TINY. `ran` is the Run in its folder, `straight` the
folder of a run with these keys that nothing has interrupted, and `tokens` their dataset:

    def test_a_stopped_run_ends_like_one_that_was_not_stopped(tiny, ran, straight):
        stopped(5, **tiny)
        train(**tiny)
        assert_same_run(straight, ran.out_dir, 12)
"""

import collections
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten

ROOT = Path(__file__).resolve().parent.parent

needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows sends no process a signal that it could answer"
)

# the keys of a run of some milliseconds; each test module adds what else its runs need
TINY_RUN = dict(
    n_layer=1,
    n_head=2,
    n_embd=32,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
    peak_tflops=1e-3,  # otherwise each run would measure it, which takes longer than the run
)
FAST = dict(model="fast", optimizer="muon", learning_rate=0.025, bias=True, tie_weights=False)


# -----------------------------------------------------------------------------
# A script in this process


class Result(NamedTuple):
    code: int
    out: str
    err: str


def flags(**keys) -> list[str]:
    return [f"--{name}={value}" for name, value in keys.items()]


def run(script: str, *arguments) -> Result:
    """
    Run `python SCRIPT ARGUMENTS` in this process. conftest.py restores the signal handlers after
    the test.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
        mock.patch.object(sys, "path", [str((ROOT / script).parent), *sys.path]),
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        except KeyboardInterrupt:  # Python then kills itself, which a shell calls 130
            code = 130
    return Result(code, *(file.buffer.getvalue().decode() for file in (out, err)))


def train(**keys) -> Result:
    """Run train.py in this process, and check that its exit code is 0."""
    result = run("train.py", *flags(**keys))
    assert result.code == 0, result.err
    return result


def lines(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(beginning)]


def refused(result: Result, *words: str) -> str:
    """
    Check that a command was refused before it did anything: exit code 1, and one line of error that
    holds these words. An indented line continues the line before. Returns the line.
    """
    assert result.code == 1, result
    said = result.err.replace("\n    ", " ").splitlines()
    (line,) = [line for line in said if not line.startswith("warning: ")]
    assert line.startswith("error: "), line
    for word in words:
        assert word in line, (word, line)
    return line


# -----------------------------------------------------------------------------
# A dataset, and what a run leaves


def write_tokens(folder: Path, train: list[int], val: list[int], vocab: int = 61) -> Path:
    """
    Write a dataset of random tokens with a little structure to learn, in shards of the given sizes.
    """
    folder.mkdir(parents=True)
    rng, shards = np.random.RandomState(1), []
    for i, size in enumerate([*val, *train]):
        name = f"{'val' if i < len(val) else 'train'}_{i:06}.bin"
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, size  # llm.c's format
        ids = np.cumsum(rng.randint(0, 3, size)) % vocab
        content = header.tobytes() + ids.astype("<u2").tobytes()
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        bytes_each = 3 if i < len(val) else 6  # so that bits per byte must count those of val
        shards.append(dict(name=name, tokens=size, bytes=bytes_each * size, sha256=sha256))
    manifest = dict(tokenizer="byte", vocab=vocab, eot=0, shards=shards)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Run:
    """Read what a run has left in its folder, at the moment of each question."""

    def __init__(self, out_dir: Path | str):
        self.out_dir = Path(out_dir)

    def records(self, kind: str | None = None) -> list[dict]:
        """
        Return the records of metrics.jsonl, either all or those of one kind, without lines that a
        full disk has cut.
        """
        found = []
        for line in (self.out_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if kind in (None, record["kind"])]

    def column(self, kind: str, *names: str) -> list:
        """
        Return a tuple of these fields for each record of a kind; for a single name, plain values.
        """
        rows = [tuple(record[name] for name in names) for record in self.records(kind)]
        return [row[0] for row in rows] if len(names) == 1 else rows

    def steps(self, *names: str) -> list:
        return self.column("step", *names)

    def evals(self, *names: str) -> list:
        return self.column("eval", *names)

    @property
    def saved(self) -> list[int]:
        """Return the iterations of the checkpoints, in order."""
        names = [path.stem for path in self.out_dir.glob("ckpt-*.pt")]
        return sorted(int(name.removeprefix("ckpt-")) for name in names)

    def state(self, iter_num: int = -1) -> dict:
        """Load the checkpoint of an iteration, or the newest one."""
        it = self.saved[-1] if iter_num < 0 else iter_num
        return torch.load(self.out_dir / f"ckpt-{it:08}.pt", weights_only=True)

    @property
    def best(self) -> dict:
        """Load the checkpoint with the lowest validation loss."""
        evaluated = [state for state in map(self.state, self.saved) if state["val_loss"]]
        return min(evaluated, key=lambda state: state["val_loss"])

    @property
    def end(self) -> dict:
        """Return the record of the end of the last launch."""
        return self.records("end")[-1]


def same(a, b) -> bool:
    """Return whether two parts of checkpoints are exactly equal, without any tolerance."""
    (ours, form), (theirs, other_form) = tree_flatten(a), tree_flatten(b)
    return form == other_form and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(ours, theirs, strict=True)
    )


def assert_same_run(left, right, iter_num: int, log_has_gaps: bool = False) -> None:
    """
    Check that two folders hold the same run: what is saved after `iter_num` iterations, and the
    fields STEP and EVAL of its records. If the log of `right` has gaps, check the records that it
    has.
    """
    left, right = Run(left), Run(right)
    a, b = left.state(iter_num), right.state(iter_num)
    assert same(a["optimizer"]["state"], b["optimizer"]["state"])
    # The rest of the optimizer follows from the keys, which may differ. The ledger counts seconds.
    for name in (a.keys() | b.keys()) - {"optimizer", "config", "model_config", "ledger"}:
        assert same(a[name], b[name]), name
    for kind, names in (("step", STEP), ("eval", EVAL)):
        ours, theirs = left.column(kind, *names), right.column(kind, *names)
        assert ours == theirs or (log_has_gaps and all(record in ours for record in theirs))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@contextlib.contextmanager
def unchanged(folder: Path):
    """Check that what is done in a `with` block changes no file of a folder."""
    before = contents(folder)
    yield
    assert contents(folder) == before


# the fields of a record that do not depend on time
STEP = ("iter", "loss", "lr", "grad_norm", "tokens", "tokens_after")
EVAL = ("iter", "train_loss", "val_loss", "tokens")


# -----------------------------------------------------------------------------
# What happens while a run trains in this process


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def gradients_of_nan(passes: Container[int]):
    """Make the gradients of these backward passes NaN; the first one inside the context is 0."""
    backward, numbers = torch.Tensor.backward, itertools.count()

    def spoilt(loss):
        backward(loss * torch.nan if next(numbers) in passes else loss)

    with mock.patch.object(torch.Tensor, "backward", spoilt):
        yield


class InProcessRun:
    """
    Launch train.py in this process, and call functions at chosen moments. at["iteration", 7] is
    called after the seventh update, counted over all launches, and at["lookup", None] at each one.

    update, iteration   before and after an update
    evaluation, lookup  before an evaluation, and before each embedding lookup without gradients
    save                before torch.save() writes a file, which is renamed only later

    With `fake_clock`, each moment takes its `seconds`, if it has any. Nothing else takes any time.
    The time of day is 23:00 at first. Child processes cannot be started, and loss.png cannot be
    drawn.
    """

    EVENING = datetime(2026, 11, 25, 23, 0).timestamp()

    def __init__(self, fake_clock: bool = False) -> None:
        self.at: dict[tuple[str, int | None], Callable[[], object]] = {}
        self.count: collections.Counter[str] = collections.Counter()
        self.seconds = dict(iteration=10.0, evaluation=4.0, save=1.0)
        self.now = 0.0
        self.fake_clock = fake_clock
        self.doing = ""  # what the model's last batch was for; "update" during an update
        self.embedding: torch.nn.Embedding  # the last embedding that was looked up

    def happens(self, what: str) -> None:
        self.now += self.seconds.get(what, 0.0)
        self.count[what] += 1
        assert self.count[what] < 10_000, "the run has no end"
        for number in (None, self.count[what]):
            self.at.get((what, number), lambda: None)()

    def before_forward(self, module, arguments) -> None:
        # where FLOPs are counted, tokens are on meta or of another type
        if not isinstance(module, torch.nn.Embedding) or type(arguments[0]) is not torch.Tensor:
            return
        if arguments[0].is_meta:
            return
        self.embedding = module
        if torch.is_grad_enabled():
            self.doing = "iteration"
            return
        if self.doing != "evaluation":
            self.doing = "evaluation"
            self.happens("evaluation")
        self.happens("lookup")

    # an optimizer that calls another one's step makes one update

    def before_step(self, *_) -> None:
        if self.doing == "iteration":
            self.doing = "update"
            self.happens("update")

    def after_step(self, *_) -> None:
        if self.doing == "update":
            self.doing = ""
            self.happens("iteration")

    def launch(self, *files, **keys) -> Result:
        """Run `python train.py FILE ... --KEY=VALUE ...`, and return its result."""
        save = torch.save

        def watched_save(*arguments, **options):
            self.happens("save")
            save(*arguments, **options)

        self.doing = ""
        patches = [
            register_module_forward_pre_hook(self.before_forward),
            mock.patch("torch.save", watched_save),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        if self.fake_clock:
            importlib.import_module("train")  # a module imported below would keep the fake clock
            patches += [
                mock.patch("time.perf_counter", lambda: self.now),
                mock.patch("time.monotonic", lambda: self.now),
                mock.patch("time.time", lambda: self.EVENING + self.now),
                # The class, because one instance would keep the frames that it was raised in, and
                # what they hold
                mock.patch("subprocess.Popen", side_effect=OSError),
                # drawing loss.png would take longer than all the rest
                mock.patch("tools.curves.save_picture", side_effect=OSError),
            ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            return run("train.py", *files, *flags(**keys))


def stopped(iteration: int, *files, **keys) -> Result:
    """Run train.py until SIGTERM comes after so many iterations."""
    trainer = InProcessRun()
    trainer.at["iteration", iteration] = sigterm
    result = trainer.launch(*files, **keys)
    assert result.code == 128 + signal.SIGTERM, result.err
    return result


# -----------------------------------------------------------------------------
# Processes

outputs = tempfile.TemporaryDirectory()  # of all processes
started: list = []  # by the running test


def start(*arguments: str, cwd: Path = ROOT, cold: bool = False, **environment: str):
    """
    Start `python ARGUMENTS` in a process of its own, with its output in two files. On Linux the
    process is forked from one that has imported torch, unless it must be `cold`, a fresh Python.
    """
    environment = os.environ | environment
    folder = Path(tempfile.mkdtemp(dir=outputs.name))
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        if cold or sys.platform != "linux":
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=err, env=environment)
        else:
            from fork_server import ForkedProcess  # which Windows does not have

            process = ForkedProcess([*arguments], cwd, environment, out.name, err.name)
    process.output = folder
    started.append(process)
    return process


def finish(process, timeout: float = 120) -> Result:
    """Wait for a process to end. After `timeout` seconds, kill it and raise TimeoutExpired."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Result(code, *((process.output / name).read_text("utf-8") for name in ("out", "err")))


def wait_for_line(process, beginning: str) -> None:
    """Wait until a line of a process's stdout has this beginning. Fail if it ends without one."""
    has_ended = False
    while f"\n{beginning}" not in f"\n{(process.output / 'out').read_text('utf-8')}":
        assert not has_ended, f"ended without {beginning!r}: {finish(process)}"
        time.sleep(0.02)
        has_ended = process.poll() is not None


def start_ranks(
    n: int, *arguments: str, script=("train.py",), cwd: Path = ROOT, **environment: str
) -> list:
    """
    Start train.py, or `script`, as n ranks on this machine, with the environment variables by which
    torchrun lets ranks find one another.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    shared |= dict(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n)) | environment
    return [
        start(*script, *arguments, cwd=cwd, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(n)
    ]


def finish_ranks(processes: list, timeout: float = 120) -> list[Result]:
    """Wait for all ranks to end. When one has failed, end the others, as torchrun does."""

    def finish_one(process) -> Result:
        result = finish(process, timeout)
        for other in processes if result.code else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(other.pid, signal.SIGTERM)
        return result

    try:
        with ThreadPoolExecutor() as pool:
            return [*pool.map(finish_one, processes)]
    finally:
        for process in processes:
            process.kill()


def train_ranks(
    n: int, *, codes: Sequence[int | None] = (), script=("train.py",), cwd: Path = ROOT, **keys
) -> list[Result]:
    """
    Train with n ranks and return their results, after checking that their exit codes are these, or
    all 0. None: any but 0, for a rank that may be ended before it notices that another one has.
    """
    processes = start_ranks(n, *flags(**keys), script=script, cwd=cwd)
    results = finish_ranks(processes, timeout=300)  # because compiling can take minutes
    for result, code in zip(results, codes or [0] * n, strict=True):
        assert result.code == code or (code is None and result.code), results
    return results


# -----------------------------------------------------------------------------
# A changed program


FOLDERS = (".", "common", "config", "data", "machine", "run", "tools")
CLASS = r"^class ({})\b.*\n((?:(?: .*)?\n)+)"  # with its members, which are indented


def changed(folder: Path, changes: dict[str, str], edits: Sequence[tuple[str, str, str]] = ()):
    """
    Copy the program to `folder`, and return it. Each edit is a file, text that it has once, and
    what replaces it. `changes` has Python code for some files: the members of a class that the file
    has come at that class's end, and all else at the file's end, where it hides what has the same
    name. Start the copy with cwd=folder.
    """
    paths = [path for name in FOLDERS for path in (ROOT / name).glob("*.py")]
    paths.append(ROOT / "machine/gpus.csv")
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}
    for name, old, new in edits:
        assert texts[name].count(old) == 1, old
        texts[name] = texts[name].replace(old, new)
    for name, code in changes.items():
        text, main, call = texts[name].partition('\nif __name__ == "__main__":')
        for new in re.finditer(CLASS.format(r"\w+"), f"{code}\n", re.MULTILINE):
            if known := re.search(CLASS.format(new[1]), text, re.MULTILINE):
                text = text[: known.end()] + new[2] + text[known.end() :]
                code = f"{code}\n".replace(new[0], "")
        texts[name] = text + code + main + call
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder
