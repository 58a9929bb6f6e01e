"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the
same loop. And signals, which stop all of them together.

Rank 0 decides for all: it reads the command line, looks at the clock and writes the files. The
ranks exchange a few bytes through their hosts (gloo). Gradients are averaged by torch's
DistributedDataParallel on the devices. With one process nothing is sent, and the same
calls return its own values.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
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
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), 0
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0  # the process that decides, logs and saves
        if self.world_size == 1:
            return
        self.local_rank = int(os.environ["LOCAL_RANK"])
        if not self.is_main:
            sys.stdout = open(os.devnull, "w")
        nccl = torch.cuda.is_available() and dist.is_nccl_available()  # not built for Windows
        # torchrun keeps one store across restarts, with the addresses of dead processes in it. A
        # prefix per restart hides them.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        group: dict = dict(store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", **group)

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

    def sum(self, *values: float, op=dist.ReduceOp.SUM) -> list[float]:
        """Each value's sum (or op) over all ranks, in float64."""
        if self.world_size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def max(self, *values: float) -> list[float]:
        """Each value's maximum over all ranks."""
        return self.sum(*values, op=dist.ReduceOp.MAX)

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


def check_shares(config: Config, n: int) -> list[str]:
    """The problem, if `n` processes cannot divide an iteration's micro-batches equally."""
    accum = config.gradient_accumulation_steps
    shared = f"{accum} micro-batches cannot be divided among {n} processes"
    return [f"gradient_accumulation_steps: {shared}; a multiple of {n} can"] if accum % n else []


class Signals:
    """
    SIGINT, SIGTERM, and the warnings of Slurm, a CPU limit and a closing terminal ask the run to
    save and stop, all ranks together: the loop looks between two iterations, and at each batch of
    an evaluation. A second SIGINT or SIGTERM ends the process at once. Windows has SIGINT and
    SIGBREAK, Ctrl-C and Ctrl-Break.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.received, self.stopped_at = ranks, 0, 0.0
        self.name = ""  # of the signal that all ranks have agreed on
        for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGUSR1", "SIGXCPU", "SIGHUP"):
            number = getattr(signal, name, None)
            # nohup ignores SIGHUP, which a terminal sends when it closes
            if number and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame) -> None:
        if not self.received and self.ranks.is_main:
            print_err("stopping after this iteration; a second signal stops at once")
        self.received = self.received or number
        if number in STOPS:
            # torchrun, systemd and Slurm may each pass on the same stop
            if self.stopped_at and time.monotonic() - self.stopped_at > 0.5:
                os._exit(128 + number)
            self.stopped_at = self.stopped_at or time.monotonic()

    def look(self, *values: float) -> list[float]:
        """
        All ranks look together. Sets `name` if any of them has received a signal. Returns each
        value's maximum over all ranks.
        """
        number, *most = self.ranks.max(self.received, *values)
        if number:
            self.name = signal.Signals(int(number)).name
        return most

    def came(self) -> bool:
        """Whether any rank has received a signal. All ranks take part."""
        self.look()
        return bool(self.name)
