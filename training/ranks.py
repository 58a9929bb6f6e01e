"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the
same loop.

Decisions and log figures are agreed on through the hosts (gloo, a few bytes). Gradients are
averaged by torch's DistributedDataParallel on the devices. A process on its own needs none of
this: everything here then returns its argument.
"""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from common.console import RunError, UserError, complain
from configurator import Config

# Of one collective. Longer than any evaluation or checkpoint that a rank waits for.
TIMEOUT = timedelta(minutes=10)
# Of one piece of a stream. Rank 0 asks a silent hub again for longer than TIMEOUT.
STREAM_TIMEOUT = timedelta(hours=1)


def meet(rank: int, world_size: int) -> dist.Store:
    """
    A store that holds only what this life of the job writes.

    torchrun keeps one store through its restarts. It still holds the addresses of dead processes,
    which gloo would wait for, and torchrun's restart count differs between machines. So:
    1. rank 0 makes up a name for this life;
    2. each other rank asks for it under a key of its own;
    3. rank 0 answers whoever asks, until all have signed in under that name.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asked by {rank}", me)
        life = store.get(f"answer to {me}").decode()
        store.set(f"{rank} in {life}", "")
        return dist.PrefixStore(life, store)
    missing = list(range(1, world_size))
    while missing:
        for other in missing:
            # The question may be left over from a dead process. Answering it does no harm.
            if store.check([f"asked by {other}"]):
                store.set(f"answer to {store.get(f'asked by {other}').decode()}", me)
        time.sleep(0.01)
        missing = [other for other in missing if not store.check([f"{other} in {me}"])]
    return dist.PrefixStore(me, store)


class Ranks:
    """
    This process among those of the run, from torchrun's environment. Joins them at once. What it
    prints is shown by rank 0 alone; errors and warnings are shown by all.
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
        store = meet(self.rank, self.world_size)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs and saves."""
        return self.rank == 0

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """
        The model, its gradients averaged over all ranks where there are several. They are then
        views of the buckets that are averaged, so they take no memory of their own. Zero them in
        place: setting them to None ends that, at 4 bytes a parameter.
        """
        if self.world_size == 1:
            return model
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # DDP arranges its buckets anew after the first backward pass, and three ranks or more then
        # sum in another order. That pass is one of zeros here, or a resumed run would differ.
        ddp_model.reducer.prepare_for_backward([])
        sum(p.sum() * 0 for p in ddp_model.parameters()).backward()
        return ddp_model

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """
        Around what all ranks must do at once. Raises RunError where another rank has gone, or has
        not come within TIMEOUT.
        """
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
                raise
            reason = str(error).partition("\n")[0]
            mend = "look at that one's last lines, or at the network between the machines"
            raise RunError(f"rank {self.rank} lost another rank ({reason}): {mend}") from None

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

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        return bool(self.max([value])[0])

    def from_main(self, function: Callable[..., Any], *args, group=None) -> Any:
        """
        What function(*args) returns on rank 0, or the UserError it raises there, on every rank.
        """
        box = [None]
        if self.is_main:
            try:
                box = [function(*args)]
            except UserError as error:
                box, error.on_all_ranks = [error], True
        if self.world_size > 1:
            with self.together():
                box = [self.hand_out(box[0], group)]
        if isinstance(box[0], UserError):
            raise box[0]
        return box[0]

    def hand_out(self, value: Any, group=None) -> Any:
        """
        Rank 0's value. Its tensors are sent one by one: pickling them all would need three
        times their memory.
        """
        box = [tree_map_only(Tensor, lambda tensor: tensor.to("meta"), value)]
        dist.broadcast_object_list(box, group=group)
        if not self.is_main:
            value = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), box[0])
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf.contiguous(), 0, group)
        return value

    def make_stream_from_main(self) -> Callable[..., Any]:
        """
        A from_main for the stream's reading thread. It has a process group of its own, so that the
        main thread can use the other one meanwhile. All ranks must call this together.
        """
        if self.world_size == 1:
            return self.from_main
        group = dist.new_group(backend="gloo", timeout=STREAM_TIMEOUT)
        return lambda function, *args: self.from_main(function, *args, group=group)

    def gather(self, value: Any) -> list:
        """Every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with self.together():
                dist.all_gather_object(values, value)
        return values

    # -------------------------------------------------------------------------
    # Checks before the first iteration

    def raise_together(self, problems: list[str]) -> None:
        """
        Raise a UserError on every rank where any has problems. Rank 0 speaks for all that have
        the same problems as it has.
        """
        everywhere = self.gather(list(dict.fromkeys(problems)))
        if not any(everywhere):
            return
        mine = everywhere[self.rank]
        said = mine or ["another rank cannot start; its own lines say why"]
        raise UserError(*said, on_all_ranks=mine in ([], everywhere[0]))

    def check_same(self, **values: Any) -> None:
        """Raises UserError on every rank where one has other values than the first; names them."""
        everywhere = self.gather(values)
        for rank, others in enumerate(everywhere):
            if different := [name for name in values if others[name] != everywhere[0][name]]:
                problem = f"rank {rank} has another {', '.join(different)} than rank 0"
                raise UserError(f"{problem}; start all processes with the same", on_all_ranks=True)

    def check_config(self, config: Config) -> list[str]:
        """Whether the ranks can share out the GPUs and the micro-batches of an iteration."""
        problems = check_shares(config, self.world_size)
        if torch.cuda.is_available() and config.device != "cpu":
            here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
            if here > gpus:
                problems.append(f"nproc_per_node: {here} processes, but {gpus} GPUs here")
        return problems


def check_shares(config: Config, n: int) -> list[str]:
    """Whether `n` processes can share out the micro-batches of an iteration."""
    accum = config.gradient_accumulation_steps
    shared = f"{accum} micro-batches cannot be shared out to {n} processes"
    mend, fits = f"a multiple of {n} can", (accum // n + 1) * n
    size, rest = divmod(config.batch_size * accum, fits)
    if not rest:
        pair = f"--batch_size={size} --eval_tokens={config.eval_size}"
        mend += f"; {fits} with {pair} is the same training"
    return [f"gradient_accumulation_steps: {shared}; {mend}"] if accum % n else []


# -----------------------------------------------------------------------------
# Signals


class Interrupted(Exception):
    """The signal in `args` arrived. Raised where the run can stop without losing anything."""


class Signals:
    """
    SIGINT, SIGTERM, and the warnings of SLURM, of a CPU limit and of a terminal that closes ask the
    run to save and stop, all ranks together. A second SIGINT or SIGTERM ends the process at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.received = ranks, 0
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGXCPU", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has the first two
            # nohup ignores SIGHUP, which a terminal sends when it closes
            if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):
                signal.signal(number, self.handle)

    def handle(self, number: int, frame) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            # the kernel sends SIGXCPU each second, while Python shuts down too
            signal.signal(number, signal.SIG_IGN)
        if self.received:
            # SLURM, systemd and torchrun between them send one stop twice
            if number in (signal.SIGINT, signal.SIGTERM) and time.monotonic() - self.since > 0.5:
                os._exit(128 + number)
            return
        self.received, self.since = number, time.monotonic()
        if self.ranks.is_main:
            then = "a checkpoint is saved first; again to stop now"
            complain(f"stopping after this micro-batch; {then}")

    def check(self, ready: bool = True) -> bool:
        """
        Raises Interrupted on all ranks where one got a signal. Otherwise returns whether all ranks
        are `ready`. All ranks take part.
        """
        number, waiting = self.ranks.max([self.received, not ready])
        if number:
            raise Interrupted(signal.Signals(int(number)))
        return not waiting

    def wait(self, seconds: int) -> bool:
        """
        Wait so long, or until a signal comes to any rank. Returns whether one has come. All ranks
        take part.
        """
        while not (came := self.ranks.any(self.received)) and seconds > 0:
            time.sleep(1)
            seconds -= 1
        return came
