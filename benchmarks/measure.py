"""
Time a few seconds of the training that train.py does. bench.py's modes measure with it.
"""

import contextlib
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import train
from common.console import RunError, UserError
from configurator import Config
from data.loader import TrainBatches, move
from data.shards import Dataset, check_dataset, dataset_folder, open_dataset
from data.tokenizer import GPT2_VOCAB
from data.writer import write_shard
from training import hardware
from training.build import build_model, build_optimizer, flops_per_token, model_config
from training.gpus import memory_bytes

# a timed window holds as many whole iterations as fit into this time: at least one, at most 100
WINDOW_SECONDS = 1.0
MAX_WINDOW_ITERS = 100
RANDOM_TOKENS = 2**22


class OutOfMemory(UserError):
    """The micro-batch does not fit into memory."""


# -----------------------------------------------------------------------------
# A model in training


@dataclass
class Trainee:
    """A model in training, set up as train.py does it; `step` is one iteration."""

    config: Config
    hw: hardware.Hardware
    model: torch.nn.Module
    step_model: torch.nn.Module  # what train_step calls: the model, compiled or wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Iterator
    between_micro_steps: Callable[[], None] = lambda: None

    def step(self) -> Tensor:
        """One iteration. Returns the losses of its micro-batches, nats per token."""
        losses, _ = train.train_step(
            self.step_model,
            self.optimizer,
            self.scaler,
            self.batches,
            self.config.gradient_accumulation_steps,
            self.config.grad_clip,
            self.hw.autocast(),
            self.between_micro_steps,
        )
        return losses

    def timed(self, iters: int) -> float:
        """Seconds per iteration over a window of `iters`."""
        self.hw.synchronize()
        began = time.perf_counter()
        for _ in range(iters):
            self.step()
        self.hw.synchronize()
        return (time.perf_counter() - began) / iters


class HostSync(torch.nn.Module):
    """A model whose last loss can be fetched to the host, as a loop does that prints each loss."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.last_loss = torch.zeros(())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        self.last_loss = loss.detach()
        return loss

    def fetch(self) -> None:
        self.last_loss.item()  # waits for the device


def build(
    config: Config, hw: hardware.Hardware, data: Dataset, read_ahead=True, host_sync=False
) -> Trainee:
    """
    A trainee with random weights. read_ahead: a thread loads the next batches meanwhile, as in
    train.py. host_sync: each loss is fetched to the host before the next micro-step begins.
    """
    torch.manual_seed(config.seed)
    gpt_config = model_config(config, data.vocab, flash=hw.flash(config))
    model = build_model(gpt_config).to(hw.device)
    batches = TrainBatches(data, config, hw.device)
    optimizer = build_optimizer(model, config, hw.dtype)
    step_model = torch.compile(model) if config.compile else model
    trainee = Trainee(config, hw, model, step_model, optimizer, hw.grad_scaler(), batches)
    if not read_ahead:
        trainee.batches = load_when_needed(batches, hw.device)
    if host_sync:
        trainee.step_model = HostSync(step_model)
        trainee.between_micro_steps = trainee.step_model.fetch
    return trainee


def load_when_needed(batches: TrainBatches, device: torch.device) -> Iterator:
    """The same batches, each loaded only when it is asked for."""
    n = 0
    while True:
        yield move(batches.load(n), device)
        n += batches.batch_size


def real_or_random_data(config: Config, folder: Path) -> Dataset:
    """
    The config's dataset, or random tokens written to `folder` where there is none. Raises UserError
    where the dataset does not suit the config.
    """
    if dataset_folder(config.dataset).is_dir() and not config.stream:
        if problems := check_dataset(config):
            raise UserError(*problems)
        return open_dataset(config.dataset)
    size = max(RANDOM_TOKENS, 8 * config.block_size)
    tokens = np.random.default_rng(config.seed).integers(0, GPT2_VOCAB, size)
    write_shard(folder / "train_000000.bin", tokens)
    write_shard(folder / "val_000000.bin", tokens[: 2 * config.block_size])
    return open_dataset(str(folder))


@contextlib.contextmanager
def readable_errors(config: Config) -> Iterator[None]:
    """
    Turns out of memory in any of its forms, a killed process included, into OutOfMemory, and a
    torch.compile that does not work into RunError: one line each.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenProcessPool) or hardware.is_out_of_memory(error):
            message = f"out of memory with batch_size={config.batch_size}; a smaller --batch_size"
            raise OutOfMemory(message) from None
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            reason = str(error).strip().partition("\n")[0]
            message = f"torch.compile does not work here ({reason}); --compile=False"
            raise RunError(message) from None
        raise


# -----------------------------------------------------------------------------
# The measurement


def measure(
    config: Config, trials: int, examine: Callable[[Trainee], dict] | None = None, **how
) -> dict:
    """
    Train with random weights for a few seconds: compile first, then time `trials` windows.
    `examine` may look at the trainee afterwards; what it returns is added. `how`: host_sync and
    read_ahead, for build(). Raises OutOfMemory.
    """
    hw = hardware.set_up(config)
    memory_before = hw.peak_memory_gib() or 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, readable_errors(config):
        data = real_or_random_data(config, Path(folder))
        trainee = build(config, hw, data, **how)
        first = trainee.timed(1)
        iters = window_iters(trainee.timed(1))
        windows = [trainee.timed(iters) for _ in range(trials)]
        seconds = statistics.median(windows)
        rate = config.iter_tokens / seconds
        flops = flops_per_token(trainee.model.config)
        result = micro_batch(config) | dict(trials=trials, iters_per_trial=iters)
        result["step_ms"] = 1000 * seconds
        result["step_ms_range"] = [1000 * min(windows), 1000 * max(windows)]
        result |= dict(tokens_per_iter=config.iter_tokens, tokens_per_sec=rate)
        result |= dict(mfu=hw.mfu(flops, rate), flops_per_token=flops)
        result |= memory_figures(trainee, memory_before)
        result["compile_seconds"] = max(first - seconds, 0.0) if config.compile else 0.0
        result["machine"] = machine(hw)
        if examine:
            result |= examine(trainee)
        return result


def micro_batch(config: Config) -> dict[str, int]:
    accumulation = config.gradient_accumulation_steps
    return dict(batch_size=config.batch_size, gradient_accumulation_steps=accumulation)


def memory_figures(trainee: Trainee, before_gib: float) -> dict[str, float | None]:
    """The peak of this process, what training added to it, and what the memory model says, GiB."""
    c, hw = trainee.config, trainee.hw
    parts = memory_bytes(trainee.model.config, c.batch_size, hw.dtype, c.compile, c.optimizer)
    peak = hw.peak_memory_gib()
    if hw.device.type == "cuda":
        training = torch.cuda.max_memory_reserved() / hardware.GIB
    else:
        training = (peak or 0) - before_gib
    modelled = sum(parts.values()) / hardware.GIB
    return dict(mem_gib=peak, mem_training_gib=training, mem_model_gib=modelled)


def window_iters(seconds: float) -> int:
    """How many iterations of so many seconds a timed window holds."""
    return min(math.ceil(WINDOW_SECONDS / seconds), MAX_WINDOW_ITERS)


def attempt(config: Config, **arguments) -> dict:
    """
    measure() in a new process, so that neither memory nor compiled code is left from what ran
    before. Out of memory gives a result with out_of_memory and no rate.
    """
    with new_process() as pool:
        try:
            return pool.submit(measure, config, **arguments).result()
        # a broken pool: the system killed the process, most likely for its memory
        except (OutOfMemory, BrokenProcessPool):
            return micro_batch(config) | dict(tokens_per_sec=None, out_of_memory=True)


def new_process() -> ProcessPoolExecutor:
    """One process, spawned rather than forked: CUDA does not survive a fork."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def machine(hw: hardware.Hardware) -> dict:
    """What a figure was measured on, for the JSON."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu_name = re.search(r"model name\s*: *(.+)", cpu)
    return dict(
        device=hw.name,
        device_type=hw.device.type,
        dtype=str(hw.dtype).removeprefix("torch."),
        peak_tflops=hw.peak_tflops,
        cpu=cpu_name[1] if cpu_name else platform.processor(),
        cpu_cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.system(),
        date=time.strftime("%Y-%m-%d"),
    )
