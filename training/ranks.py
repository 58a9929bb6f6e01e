"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the
same loop.

Rank 0 decides for all: it reads the command line, looks at the clock and writes the files. The
ranks exchange a few bytes through their hosts (gloo). Gradients are averaged by torch's
DistributedDataParallel on the devices. With one process nothing is sent, and the same
calls return its own values.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.console import RunError, UserError, print_err
from configurator import Config

# For one collective; longer than any evaluation or save that a rank waits for
TIMEOUT = timedelta(minutes=10)
# A second one of these ends the process at once; SIGBREAK exists on Windows only
STOPS = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGBREAK", None)


class Ranks:
    """
    This process as one of the run's, according to torchrun's environment. Joins the others at once.
    Only rank 0 prints to stdout; all ranks print errors and warnings.
    """

    def __init__(self) -> None:
        self.rank = self.local_rank = 0
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.world_size == 1:
            return
        self.rank = int(os.environ.get("RANK", 0))  # torch says what is missing
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.rank > 0:
            sys.stdout = open(os.devnull, "w")
        nccl = torch.cuda.is_available() and dist.is_nccl_available()  # not built for Windows
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        # torchrun keeps one store across restarts, with the addresses of dead processes in it. A
        # prefix per restart hides them.
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the process that decides, logs and saves."""
        return self.rank == 0

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """
        The model; with several ranks, its gradients are averaged over all of them. Gradients are
        then views of the buckets that are averaged, so they take no memory of their own. Zero them
        in place: setting them to None would cost 4 bytes per parameter.
        """
        if self.world_size == 1:
            return model
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # DDP rearranges its buckets after the first backward pass, and three or more ranks then sum
        # in another order. So do that pass here, with zeros; a resumed run does it too.
        ddp_model.reducer.prepare_for_backward([])
        torch.autograd.backward([p.sum() * 0 for p in ddp_model.parameters()])
        return ddp_model

    def reduce(self, *values: float, op=dist.ReduceOp.SUM) -> list[float]:
        """Each value's sum (or op) over all ranks, in float64."""
        if self.world_size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def max(self, *values: float) -> list[float]:
        """Each value's maximum over all ranks."""
        return self.reduce(*values, op=dist.ReduceOp.MAX)

    def from_main(self, function: Callable[..., Any], *args) -> Any:
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

    def gather(self, value: Any) -> list:
        """Every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def fail(self, line: str) -> NoReturn:
        """Raises RunError. All ranks call this together; only rank 0 prints why."""
        raise RunError(line) if self.is_main else RunError()

    def check_same(self, name: str, value: Any, hint: str) -> None:
        """Raises UserError on every rank if any rank's value differs from rank 0's."""
        everywhere = self.gather(value)
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                line = f"{name}: {theirs} on rank {rank}, {everywhere[0]} on rank 0; {hint}"
                raise UserError(line) if self.is_main else UserError()


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of all ranks' tensors, on the device. Does not wait for it."""
    if not dist.is_initialized():
        return value
    dist.all_reduce(value)
    return value / dist.get_world_size()


def lost_rank(error: BaseException) -> str:
    """The error line for a process whose peer is gone; empty for other errors."""
    lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    if not (isinstance(error, RuntimeError) and lost):
        return ""
    hint = "look at that one's last lines, or at the network between the machines"
    reason = str(error).partition("\n")[0]
    return f"rank {os.environ.get('RANK', 0)} lost another rank ({reason}): {hint}"


def check_shares(config: Config, n: int) -> list[str]:
    """The problem, if `n` processes cannot divide an iteration's micro-batches equally."""
    accum = config.gradient_accumulation_steps
    shared = f"{accum} micro-batches cannot be divided among {n} processes"
    hint, fits = f"a multiple of {n} can", (accum // n + 1) * n
    size, rest = divmod(config.batch_size * accum, fits)
    if not rest:
        pair = f"--batch_size={size} --eval_tokens={config.eval_size}"
        hint += f"; {fits} with {pair} is the same training"
    return [f"gradient_accumulation_steps: {shared}; {hint}"] if accum % n else []


def check_gpus(config: Config) -> list[str]:
    """The problem, if this machine has fewer GPUs than processes."""
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if torch.cuda.is_available() and config.device != "cpu" and here > gpus:
        return [f"nproc_per_node: {here} processes, but {gpus} GPUs here"]
    return []


# -----------------------------------------------------------------------------
# Signals


class Signals:
    """
    SIGINT, SIGTERM, and the warnings of Slurm, a CPU limit and a closing terminal ask the run to
    save and stop, all ranks together: the loop looks between two iterations, and at each batch of
    an evaluation. A second SIGINT or SIGTERM ends the process at once. Windows has SIGINT
    and SIGBREAK, Ctrl-C and Ctrl-Break.
    """

    def __init__(self, ranks: Ranks, log) -> None:
        """`log`: the RunLog, which knows how long an iteration takes and what has been saved."""
        self.ranks, self.log, self.received = ranks, log, 0
        self.answered = threading.Event()
        self.loop_is_over = False  # the run is stopping anyway
        self.name: str | None = None  # of the signal that all ranks have agreed on
        # The main thread may be in a kernel for seconds. So each signal's number is also written
        # into a socket, and another thread answers.
        reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno())
        for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGUSR1", "SIGXCPU", "SIGHUP"):
            number = getattr(signal, name, None)
            # nohup ignores SIGHUP, which a terminal sends when it closes
            if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):
                signal.signal(number, self.receive)
        threading.Thread(target=self.answer, args=(reader,), daemon=True).start()

    def receive(self, number: int, frame=None) -> None:
        self.received = self.received or number

    def answer(self, reader: socket.socket) -> None:
        """Confirm the first signal at once, and end the process at the second one."""
        first_stop = None
        while received := reader.recv(1):  # nothing: the other end is closed
            (number,) = received
            if not self.received:
                self.receive(number)
            if self.ranks.is_main and not self.loop_is_over and not self.answered.is_set():
                saved = self.log.saved_iter
                back = "the start" if saved is None else f"iteration {saved:,}"
                soon = f", about {math.ceil(self.log.pace)} s" if self.log.pace else ""
                again = f"a second signal stops at once, and loses all since {back}"
                print_err(f"stopping after this iteration{soon}; {again}")
            self.answered.set()
            if number in STOPS:
                # Slurm, systemd and torchrun may each pass on the same stop
                if first_stop is not None and time.monotonic() - first_stop > 0.5:
                    os._exit(128 + number)
                first_stop = first_stop or time.monotonic()
        reader.close()

    def close(self) -> None:
        """After the run: from here on signals are not answered."""
        signal.set_wakeup_fd(-1)
        self.writer.close()

    def look(self, *values: float) -> list[float]:
        """
        All ranks look together. Sets `name` if any of them has received a signal. Returns each
        value's maximum over all ranks.
        """
        number, *most = self.ranks.max(self.received, *values)
        if number and not self.name:
            self.name = signal.Signals(int(number)).name
            if self.received:
                self.answered.wait(1)
            if number == getattr(signal, "SIGXCPU", None):
                signal.signal(int(number), signal.SIG_IGN)  # it comes each second from now on
            if self.ranks.is_main and not self.received:
                print_err(f"another process got {self.name}: stopping, with a checkpoint")
        return most

    def came(self) -> bool:
        """Whether any rank has received a signal. All ranks take part."""
        self.look()
        return self.name is not None

    def wait(self, seconds: int) -> bool:
        """Wait, or until a signal comes. Returns whether one has. All ranks take part."""
        while not self.came() and seconds > 0:
            time.sleep(1)
            seconds -= 1
        return self.name is not None
