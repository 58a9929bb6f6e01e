"""
Coordinates the processes of a multi-GPU run, and handles the signals that stop them together.

torchrun starts one process per device, and all of them run the same loop. Each reads the command,
the checkpoint and the data for itself; rank 0 alone looks at the clock and writes the files. The
ranks exchange small messages on the host (gloo), and torch's DistributedDataParallel averages
gradients on the devices. With a single process nothing is sent, and the same calls return the
process's own values.
"""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.console import UserError, print_in_handler

TIMEOUT = timedelta(minutes=10)  # for ranks to find each other, and for averaging gradients on GPUs
# For all other collectives. The ranks wait in one while another machine downloads its tokens. If a
# process dies, the others notice at once; if a machine vanishes, only after this time.
HOST_TIMEOUT = timedelta(hours=6)


class Ranks:
    """
    Represents this process among the run's ranks, according to torchrun's environment variables.
    The constructor joins the process group. Only rank 0 prints to stdout; all ranks print errors
    and warnings.
    """

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_main = self.rank == 0  # the process that decides, logs and saves
        if self.world_size > 1:
            self.join()

    def join(self) -> None:
        # torchrun keeps one store across restarts, and that store still holds the addresses of dead
        # processes. A prefix per restart hides them; without it, restarts occasionally fail.
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=HOST_TIMEOUT,
        )
        if self.rank > 0:
            sys.stdout = open(os.devnull, "w")

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """
        Wrap the model in DDP, which averages gradients across ranks. With one rank, return the
        model unchanged. DDP's gradients are views of its communication buckets, so they need no
        extra memory.
        """
        if self.world_size == 1:
            return model
        on_gpus = next(model.parameters()).is_cuda
        group = None  # the default group, gloo
        if on_gpus and dist.is_nccl_available():  # torch for Windows is built without NCCL
            group = dist.new_group(backend="nccl", timeout=TIMEOUT)
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    # -------------------------------------------------------------------------
    # Collectives. Every rank must call them, in the same order.

    def sum(self, *values: float) -> list[float]:
        """Return each value's sum over all ranks, in float64."""
        return self.reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Return each value's maximum over all ranks."""
        return self.reduce(values, dist.ReduceOp.MAX)

    def reduce(self, values: tuple[float, ...], op) -> list[float]:
        if self.world_size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def gather(self, value: Any) -> list:
        """Return every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[..., Any], *args) -> Any:
        """
        Call function(*args) on rank 0 and return the result on every rank. If the call raises
        UserError or OSError, every rank exits, and only rank 0 prints why.
        """
        box: list[Any] = [None]
        if self.is_main:
            try:
                box = [function(*args)]
            except (UserError, OSError) as error:
                box = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(box)
        if isinstance(box[0], Exception):
            raise box[0] if self.is_main else UserError()
        return box[0]

    def each(self, function: Callable[..., Any], *args) -> Any:
        """
        Call function(*args) on every rank, and return each rank's own result. If some rank's call
        raises UserError or OSError, every rank exits, and the first of those ranks prints why.
        """
        result, error = None, None
        try:
            result = function(*args)
        except (UserError, OSError) as raised:
            error = raised
        failed = [rank for rank, fails in enumerate(self.gather(error is not None)) if fails]
        if failed:
            raise error if error and failed[0] == self.rank else UserError()
        return result

    def fail(self, line: str) -> NoReturn:
        """Raise an error to end the run. All ranks must call this; only rank 0 prints the line."""
        raise UserError(line) if self.is_main else UserError()


def end_process(code: int) -> NoReturn:
    """
    Exit with `code`. With several ranks, do so without running destructors: gloo's can wait forever
    for the GIL, and NCCL's for ranks that are in a collective.
    """
    if not dist.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -----------------------------------------------------------------------------
# Signals

# Each of these asks the run to save and stop, however often it comes: torchrun, systemd and Slurm
# may all forward the same signal. Ctrl-\ (SIGQUIT) ends it at once. SIGUSR1 is Slurm's advance
# warning, SIGUSR2 that of Grid Engine and LSF, SIGXCPU announces a CPU time limit, and SIGHUP a
# closing terminal. Windows has only SIGINT (Ctrl-C), SIGTERM and SIGBREAK (Ctrl-Break).
ASK_TO_STOP = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP")


class StopSignals:
    """
    Receives the signals that ask a run to stop. The ranks compare what they have received at fixed
    points, such as between iterations, so that all of them stop at the same one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received = 0  # number of the first signal, or 0
        self.name = ""  # the signal that all ranks have agreed on, if one has come
        numbers = [getattr(signal, name) for name in ASK_TO_STOP if hasattr(signal, name)]
        # SIGHUP is ignored under nohup, and SIGINT after `&` in a script. Keep ignoring them.
        self.numbers = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
        for number in self.numbers:
            signal.signal(number, self.receive)

    def release(self) -> None:
        """Let each of the signals end the process again, as it does by default."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)

    def receive(self, number: int, frame=None) -> None:
        """Confirm the first signal."""
        if self.ranks.is_main and not self.received:
            hint = "Ctrl-\\ (on Windows: close the window) ends it at once, without a save"
            print_in_handler(f"stopping after this iteration; {hint}")
        self.received = self.received or number

    @property
    def exit_code(self) -> int:
        """Return the exit code of a run that stops by this signal, or 0 if none has come."""
        return 128 + signal.Signals[self.name] if self.name else 0

    def must_stop(self) -> bool:
        """
        Return whether the run must stop because some rank has received a signal, whose name is then
        known to all. This is a collective, so every rank must call it.
        """
        (number,) = self.ranks.max(self.received)
        if number:
            self.name = signal.Signals(int(number)).name
        return bool(number)
