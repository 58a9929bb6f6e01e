"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the
same loop.

Decisions and log figures are agreed on through the hosts (gloo, a few bytes); gradients are
averaged by torch's DistributedDataParallel on the devices. A process alone needs none of it:
everything here then returns its argument.
"""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.console import RunError, UserError, complain, end_process
from configurator import Config, print_config

TIMEOUT = timedelta(
    minutes=10
)  # of one collective; longer than any evaluation or checkpoint that a rank waits for


def meet(rank: int, world_size: int) -> dist.Store:
    """
    A store that holds only what this life of the job writes. torchrun keeps one store through its
    restarts, and in it the addresses of the dead, which gloo would wait for. Its restart count
    cannot tell lives apart, as it differs between machines; so rank 0 makes up a name for this life
    and gives it to whoever asks now.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asked by {rank}", me)
        life = store.get(f"answer to {me}").decode()
        store.set(f"{rank} in {life}", "")
        return dist.PrefixStore(life, store)
    missing = range(1, world_size)
    while missing := [other for other in missing if not store.check([f"{other} in {me}"])]:
        for other in missing:
            if store.check(
                [f"asked by {other}"]
            ):  # the question of a dead one may lie there still: answered in vain
                store.set(f"answer to {store.get(f'asked by {other}').decode()}", me)
        time.sleep(0.01)
    return dist.PrefixStore(me, store)


class Ranks:
    """This process among those of the run, from torchrun's environment. Joins them at once."""

    def __init__(self) -> None:
        self.rank, self.local_rank = (
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("LOCAL_RANK", 0)),
        )
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store = meet(self.rank, self.world_size)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
            )

    @property
    def first(self) -> bool:
        """Whether this is the process that logs and saves."""
        return self.rank == 0

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, its gradients averaged over all ranks where there are several."""
        return (
            DistributedDataParallel(model, gradient_as_bucket_view=True)
            if self.world_size > 1
            else model
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """
        Around what all ranks must do at once: raises RunError where another one has gone, or has
        not come for TIMEOUT.
        """
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
                raise
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"rank {self.rank} lost another rank ({reason}): look at that one's last lines, or at the network "
                f"between the machines"
            ) from None

    def reduce(self, values: list[float], op=dist.ReduceOp.SUM) -> list[float]:
        """Each value's sum (or op) over all ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.together():
            dist.all_reduce(tensor, op)
        return tensor.tolist()

    def max(self, values: list[float]) -> list[float]:
        return self.reduce(values, dist.ReduceOp.MAX)

    def from_first(self, function: Callable[..., Any], *args) -> Any:
        """
        What function(*args) returns on the first rank, or the UserError it raises there, on every
        rank.
        """
        box = [None]
        if self.first:
            try:
                box = [function(*args)]
            except UserError as error:
                box, error.agreed = [error], True
        if self.world_size > 1:
            with self.together():
                dist.broadcast_object_list(box)
        if isinstance(box[0], UserError):
            raise box[0]
        return box[0]

    def gather(self, value: Any) -> list:
        """Every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with self.together():
                dist.all_gather_object(values, value)
        return values

    def check_config(self, config: Config) -> list[str]:
        """Whether the ranks agree and can share out the GPUs (the first check for load_config)."""
        if self.world_size == 1:
            return []
        self.check_same("configuration", print_config(config))
        n, problems = self.world_size, []
        if torch.cuda.is_available() and config.device != "cpu":
            if config.device not in ("auto", "cuda"):
                problems.append(
                    f"device: {config.device} for {n} processes; --device=cuda gives each its own"
                )
            if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
                problems.append(
                    f"nproc_per_node: more processes than the {torch.cuda.device_count()} GPUs here"
                )
        return problems

    def check_share(self, steps: int) -> None:
        """Raises UserError where an iteration's micro-batches cannot be shared out evenly."""
        n = self.world_size
        if steps % n:
            fits = " or ".join(str(m) for m in (steps // n * n, steps // n * n + n) if m)
            what = f"{steps} micro-batches cannot be shared out to {n} processes; {fits} can"
            raise UserError(f"gradient_accumulation_steps: {what}")

    def check_same(self, what: str, value: str) -> None:
        """Raises UserError on every rank where one has another value than the first."""
        everywhere = self.gather(value)
        different = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
        if different:
            raise UserError(
                f"rank {different[0]} has another {what} than rank 0; start all processes with the same"
            )

    def leave(self, code: int) -> int:
        """The exit code; where there are several processes, this one ends with it here."""
        if self.world_size > 1:
            end_process(code)
        return code


class Interrupted(Exception):
    """A signal arrived; raised where the run can stop without losing anything."""


class Signals:
    """
    SIGINT and SIGTERM ask the run to save and stop, all ranks together; a second one ends the
    process at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.received, self.agreed = ranks, 0, 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)
        if (
            hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        ):  # a closed terminal, without nohup
            signal.signal(signal.SIGHUP, self.handle)

    def handle(self, number: int, frame) -> None:
        if self.received:
            if (
                time.monotonic() - self.since > 0.5
            ):  # SLURM, systemd and torchrun between them send one stop twice
                os._exit(128 + number)
            return
        self.received, self.since = number, time.monotonic()
        if self.ranks.first:
            complain("stopping: saving a checkpoint first; once more to stop at once")

    def check(self, ready: Callable[[], bool] = lambda: True) -> None:
        """
        Raises Interrupted on all ranks where one got a signal; otherwise returns once `ready()` is
        true on all of them.
        """
        waiting = True
        while waiting:
            waits_here = not ready()
            self.agreed, waiting = self.ranks.max([self.received, waits_here])
            if self.agreed:
                raise Interrupted
