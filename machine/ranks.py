"""
Coordinates the processes of a multi-GPU run.

torchrun starts one process per device, and all of them run the same loop. Each reads the command,
the checkpoint and the data for itself before it joins the others. Rank 0's clock and signal decide
for all, and rank 0 alone writes the run's files. The ranks exchange small messages on the host
(gloo), and torch's DistributedDataParallel averages gradients on the devices. With a single process
nothing is sent, and the same calls return the process's own values.

An error ends the process that meets it, and torchrun then ends the others.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.console import UserError, one_line
from common.process import is_main, rank, world_size


def quiet_others() -> None:
    """Let only rank 0 print to stdout. All ranks print errors and warnings, to stderr."""
    if not is_main():
        sys.stdout = open(os.devnull, "w", errors="replace")


def join(**mine) -> None:
    """
    Join the process group. Raise UserError if the other ranks do not come, or if these values are
    not the same on all ranks: with other files, another checkpoint or another kind of GPU, which
    rounds differently, the ranks' weights would drift apart.
    """
    if world_size() == 1:
        return
    # torchrun keeps one store across restarts, and that store still holds the addresses of dead
    # processes. A prefix per restart hides them; without it, restarts occasionally fail.
    prefix = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(prefix, store)
        dist.init_process_group("gloo", store=store, rank=rank(), world_size=world_size())
    except (RuntimeError, ValueError) as error:  # after half an hour, or without MASTER_ADDR
        hint = "the others have ended or do not reach this one; GLOO_SOCKET_IFNAME sets its network"
        raise UserError(f"the processes did not meet ({one_line(error)}); {hint}") from None
    others = gather(mine)
    if unlike := [name for name in mine if any(other[name] != mine[name] for other in others)]:
        hint = "give all machines the same command, files and GPU model"
        raise UserError(f"{unlike[0]}: not the same on all ranks; {hint}")


def data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """
    Wrap the model in DDP, which averages gradients across ranks. With one rank, return the model
    unchanged. DDP's gradients are views of its communication buckets, so they need no extra memory.
    """
    if world_size() == 1:
        return model
    on_gpus = next(model.parameters()).is_cuda
    group = None  # the default group, gloo
    if on_gpus and dist.is_nccl_available():  # torch for Windows is built without NCCL
        group = dist.new_group(backend="nccl")
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


# -----------------------------------------------------------------------------
# Collectives. Every rank must call them, in the same order.


def sum(*values: float) -> list[float]:
    """Return each value's sum over all ranks, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor.tolist()


def gather(value: Any) -> list:
    """Return every rank's value, in order, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[..., Any], *args) -> Any:
    """Call function(*args) on rank 0 alone, and return the result on every rank."""
    box = [function(*args) if is_main() else None]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]
