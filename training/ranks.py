"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the
same loop. And signals, which stop all of them together.

Rank 0 decides for all: it reads the command line, looks at the clock and writes the files. The
ranks exchange a few bytes through their hosts (gloo). Gradients are averaged by torch's
DistributedDataParallel on the devices. With one process nothing is sent, and the same calls return
its own values.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.console import RunError, UserError, print_err, warn

TIMEOUT = timedelta(minutes=10)  # for finding the others, and for averaging gradients on GPUs
# For everything else, because ranks wait so for what only rank 0 does, such as downloading weights
HOST_TIMEOUT = timedelta(hours=1)
LEAVE_SECONDS = 10.0  # for leaving the others after an error; then this process ends with code 1
SLOW_EXCHANGE = 60.0  # seconds for the first gradients to be averaged; then a warning
# What NCCL often fails or hangs over: cards that cannot read each other's memory (GeForce, some
# boards), and Docker's shared memory of 64 MB
NCCL_HINT = "try NCCL_P2P_DISABLE=1, in Docker --shm-size=1g, and NCCL_DEBUG=INFO"
SHARE_PATIENCE = 30.0  # seconds to wait for a network share to show a new file


class Ranks:
    """
    This process as one of the run's, according to torchrun's environment. Joins the others at once.
    Only rank 0 prints to stdout; all ranks print errors and warnings.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.local_rank = 0
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.world_size > 1:
            self.join()
        self.is_main = self.rank == 0  # the process that decides, logs and saves

    def join(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))  # torch says what is missing
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.rank > 0:
            sys.stdout = open(os.devnull, "w")
        # torchrun keeps one store across restarts, with the addresses of dead processes in it. A
        # prefix per restart hides them; without it, the second start fails now and then.
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=HOST_TIMEOUT,
        )

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """
        Return the model; with several ranks, wrapped so that its gradients are averaged over all of
        them. Gradients are then views of the buckets that are averaged, and take no memory of
        their own.
        """
        if self.world_size == 1:
            return model
        on_gpus = next(model.parameters()).is_cuda
        group = None  # gloo
        if on_gpus and dist.is_nccl_available():  # not built for Windows
            group = dist.new_group(backend="nccl", timeout=TIMEOUT)
        line = f"the ranks have not averaged gradients for {SLOW_EXCHANGE:.0f} s"
        hint = NCCL_HINT if group else "look at the network"
        slow = threading.Timer(SLOW_EXCHANGE, warn, [f"{line}; if this does not end, {hint}"])
        if self.is_main:
            slow.start()
        ddp_model = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )
        arrange_buckets(ddp_model)
        if on_gpus:
            torch.cuda.synchronize()
        slow.cancel()
        return ddp_model

    # -------------------------------------------------------------------------
    # Collectives. Every rank must call them, in the same order.

    def sum(self, *values: float, op=dist.ReduceOp.SUM) -> list[float]:
        """Return each value's sum (or op) over all ranks, in float64."""
        if self.world_size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def max(self, *values: float) -> list[float]:
        """Return each value's maximum over all ranks."""
        return self.sum(*values, op=dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list:
        """Return every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[..., Any], *args) -> Any:
        """
        Call function(*args) on rank 0; every rank gets its result. If it raises UserError, OSError
        or SystemExit (--help), every rank ends, and only rank 0 prints why.
        """
        box: list[Any] = [None]
        if self.is_main:
            try:
                box = [function(*args)]
            except (UserError, OSError, SystemExit) as error:
                box = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(box)
        if isinstance(box[0], SystemExit) or (isinstance(box[0], Exception) and self.is_main):
            raise box[0]
        if isinstance(box[0], Exception):
            raise RunError() if isinstance(box[0], RunError) else UserError()
        return box[0]

    def main_first(self, function: Callable[..., Any], *args) -> Any:
        """
        Call function(*args) on rank 0, and then on the others, which find what it has downloaded or
        prepared. Each rank gets its own result. Errors of rank 0 end all ranks, as in on_main.
        """
        mine = []
        self.on_main(lambda: mine.append(function(*args)))
        return mine[0] if self.is_main else function(*args)

    def fail(self, line: str) -> NoReturn:
        """End the run on all ranks with RunError; only rank 0 prints why."""
        raise RunError(line) if self.is_main else RunError()

    def check_same(self, name: str, value: Any, hint: str) -> None:
        """Raise UserError on every rank if any rank's value differs from rank 0's."""
        everywhere = self.gather(value)
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                line = f"{name}: {theirs} on rank {rank}, {everywhere[0]} on rank 0; {hint}"
                raise UserError(line) if self.is_main else UserError()

    def check_shared(self, file: Path, hint: str) -> None:
        """Raise UserError on every rank if some rank's machine sees another file than rank 0's."""
        if self.world_size == 1:
            return
        self.on_main(file.touch)
        began = time.monotonic()
        changed: list[int | None] = []
        # a network share shows a change a little later
        while len(set(changed)) != 1 and self.max(time.monotonic() - began)[0] < SHARE_PATIENCE:
            changed = self.gather(file.stat().st_mtime_ns if file.exists() else None)
            time.sleep(0.1)
        self.check_same(f"{file} was changed at", changed[self.rank], hint)


def arrange_buckets(ddp_model: DistributedDataParallel) -> None:
    """
    DDP rearranges its buckets after the first backward pass, and three or more ranks then sum in
    another order. So do that pass here, with zeros; a resumed run does it too. Only here the
    program uses what torch does not document: DDP's reducer.
    """
    ddp_model.reducer.prepare_for_backward([])  # else DDP would not look at this backward pass
    torch.autograd.backward([p.sum() * 0 for p in ddp_model.parameters()])


def end_process(code: int) -> NoReturn:
    """
    Exit; one of several ranks leaves the others first. It then exits at once, with its group still
    referenced: the destructor of torch's gloo group can wait forever for Python's lock.
    """
    if not dist.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # the others may be in a collective for which NCCL would wait
        faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=open(os.devnull, "w"))
    group = dist.group.WORLD  # noqa: F841  kept
    dist.destroy_process_group()
    os._exit(code)


def lost_rank(error: BaseException) -> str:
    """The error line for a process whose peer is gone; empty for other errors."""
    lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    if not (lost and isinstance(error, RuntimeError)):
        return ""
    reason = str(error).partition("\n")[0]
    line = f"another rank is gone ({reason}): look at that one's last lines, or at the network"
    return f"{line}; {NCCL_HINT}" if "NCCL" in str(error) else line


# -----------------------------------------------------------------------------
# Signals

# Each asks the run to save and stop. The last three are warnings: of Slurm, a CPU limit, a closing
# terminal. Windows has SIGINT and SIGBREAK, Ctrl-C and Ctrl-Break.
ASK_TO_STOP = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGUSR1", "SIGXCPU", "SIGHUP")
# A second one of these ends the process at once
STOP_AT_ONCE = ("SIGINT", "SIGTERM", "SIGBREAK")
SAME_STOP = 0.5  # seconds in which torchrun, systemd and Slurm may each pass on one stop


class StopSignals:
    """
    The signals that this process has received. All ranks look at them together, between two
    iterations and at each batch of an evaluation, so that all of them stop at the same place.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received = 0  # the number of the first one
        self.answered = threading.Event()  # the first one is confirmed on the console
        self.name: str | None = None  # of the signal that all ranks have agreed on
        # Python calls a handler when the main thread is back from its kernel or collective, which
        # may take minutes. So each number is also written into a socket, and a thread answers.
        reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno())
        for name in ASK_TO_STOP:
            number = getattr(signal, name, None)
            if not number:  # on Windows
                continue
            # nohup ignores SIGHUP, which a terminal sends when it closes
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)
        threading.Thread(target=self.answer, args=(reader,), daemon=True).start()

    def receive(self, number: int, frame=None) -> None:
        self.received = self.received or number

    def answer(self, reader: socket.socket) -> None:
        """Confirm the first signal at once, and end the process at the second stop."""
        stopped_at = None
        while received := reader.recv(1):  # nothing: the other end is closed
            number = received[0]
            self.receive(number)
            if self.ranks.is_main and not self.answered.is_set():
                print_err(
                    "stopping after this iteration; a second signal stops at once and saves nothing"
                )
            self.answered.set()
            if signal.Signals(number).name in STOP_AT_ONCE:
                now = time.monotonic()
                if stopped_at is not None and now - stopped_at > SAME_STOP:
                    os._exit(128 + number)
                stopped_at = stopped_at or now
        reader.close()

    def close(self) -> None:
        """Stop answering signals, after the run."""
        signal.set_wakeup_fd(-1)
        self.writer.close()

    def agree(self, *values: float) -> list[float]:
        """
        All ranks look together, and wait for each other: `name` is set if any of them has received
        a signal. Returns each value's maximum over all ranks.
        """
        number, *most = self.ranks.max(self.received, *values)
        if number and not self.name:
            self.name = signal.Signals(int(number)).name
            if self.received:
                self.answered.wait(1)  # its line comes before those of the end
        return most

    def stop_asked(self) -> bool:
        """Return whether any rank has received a signal. All ranks look together."""
        self.agree()
        return self.name is not None

    def wait(self, seconds: int) -> None:
        """Wait so long, or until a signal comes. All ranks wait together."""
        for _ in range(seconds):
            if self.stop_asked():
                return
            time.sleep(1)
