"""
Several processes, one run: torchrun starts them, each with a device of its own, and each runs the same loop.

Decisions and log figures are agreed on through the hosts (gloo, a few bytes); gradients are averaged by torch's
DistributedDataParallel on the devices. A process alone needs none of it: everything here then returns its argument.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import Config, UserError

TIMEOUT = timedelta(minutes=10)  # of one collective; longer than any evaluation or checkpoint that a rank waits for


class Ranks:
    """This process among those of the run, from torchrun's environment. Joins them at once."""

    def __init__(self) -> None:
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.world_size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this is the process that logs and saves."""
        return self.rank == 0

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, its gradients averaged over all ranks where there are several."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world_size > 1 else model

    def reduce(self, values: list[float], op=dist.ReduceOp.SUM) -> list[float]:
        """Each value's sum (or op) over all ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def max(self, values: list[float]) -> list[float]:
        return self.reduce(values, dist.ReduceOp.MAX)

    def from_first(self, function: Callable[..., Any], *args) -> Any:
        """What function(*args) returns on the first rank, or the UserError it raises there, on every rank."""
        box = [None]
        if self.first:
            try:
                box = [function(*args)]
            except UserError as error:
                box = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(box)
        if isinstance(box[0], UserError):
            raise box[0]
        return box[0]

    def gather(self, value: Any) -> list:
        """Every rank's value, in order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_config(self, config: Config) -> list[str]:
        """Whether the micro-batches of an iteration can be shared out evenly (for load_config)."""
        steps, n = config.gradient_accumulation_steps, self.world_size
        if steps % n == 0:
            return []
        return [f"gradient_accumulation_steps: {steps} micro-batches cannot be shared out to {n} processes; "
                f"{' or '.join(str(m) for m in (steps // n * n, steps // n * n + n) if m)} can"]  # fmt: skip

    def check_same(self, what: dict[str, str]) -> None:
        """Raises UserError on every rank where one has other data or another configuration than the first."""
        everywhere = self.gather(what)
        for rank, other in enumerate(everywhere):
            if different := [name for name in what if other[name] != everywhere[0][name]]:
                raise UserError(f"rank {rank} has another {' and '.join(different)} than rank 0; start all with the same")

    def leave(self) -> None:
        if self.world_size > 1:
            dist.destroy_process_group()
