"""
The ruler: a few seconds of the training that train.py does, timed. bench.py and the scripts of
results/ measure with it.
"""

import contextlib
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
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

WINDOW_SECONDS = 1.0  # a timed window holds as many whole iterations as this takes, at least one,
MAX_WINDOW_ITERS = 100  # and at most these
RANDOM_TOKENS = 2**22


class OutOfMemory(UserError):
    """A micro-batch that does not fit."""


@dataclass
class Trainee:
    """A model in training, set up as train.py does it; `step` is one iteration."""

    config: Config
    hw: hardware.Hardware
    model: torch.nn.Module
    step_model: Callable
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Iterator
    between_micro_steps: Callable[[], None] = lambda: None

    def step(self) -> Tensor:
        c = self.config
        losses, _ = train.train_step(
            self.step_model,
            self.optimizer,
            self.scaler,
            self.batches,
            c.gradient_accumulation_steps,
            c.grad_clip,
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


def with_host_sync(trainee: Trainee) -> Trainee:
    """
    Fetches each micro-step's loss to the host before the next one begins, as a loop that prints it
    does.
    """
    last = torch.zeros(())

    def forward(x: Tensor, y: Tensor) -> Tensor:
        nonlocal last
        last = trainee.step_model(x, y)
        return last

    return replace(
        trainee, step_model=like(trainee.model, forward), between_micro_steps=lambda: last.item()
    )


def like(model: torch.nn.Module, forward: Callable) -> Callable:
    """`forward` as train_step wants a model: with its parameters."""
    forward.parameters = model.parameters
    return forward


def build(config: Config, hw: hardware.Hardware, data: Dataset, read_ahead: bool = True) -> Trainee:
    """A trainee with random weights; without read_ahead no thread reads its batches beforehand."""
    torch.manual_seed(config.seed)
    model = build_model(model_config(config, data.vocab)).to(hw.device)
    batches = TrainBatches(data, config, hw.device)
    optimizer, scaler = build_optimizer(model, config, hw.dtype), hw.grad_scaler()
    return Trainee(
        config,
        hw,
        model,
        torch.compile(model) if config.compile else model,
        optimizer,
        scaler,
        batches if read_ahead else load_when_needed(batches, hw.device),
    )


def load_when_needed(
    batches: TrainBatches, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches, each read only when it is asked for."""
    n = 0
    while True:
        yield move(batches.load(n), device)
        n += batches.batch_size


def open_data(config: Config, folder: Path) -> Dataset:
    """
    The config's dataset, or one of random tokens in `folder` where there is none. Raises UserError.
    """
    if dataset_folder(config.dataset).is_dir() and not config.stream:
        if problems := check_dataset(config):
            raise UserError(*problems)
        return open_dataset(config.dataset)
    tokens = np.random.default_rng(config.seed).integers(
        0, GPT2_VOCAB, max(RANDOM_TOKENS, 8 * config.block_size)
    )
    write_shard(folder / "train_000000.bin", tokens)
    write_shard(folder / "val_000000.bin", tokens[: 2 * config.block_size])
    return open_dataset(str(folder))


def measure(
    config: Config,
    trials: int,
    host_sync: bool = False,
    read_ahead: bool = True,
    examine: Callable[[Trainee], dict] = lambda trainee: {},
) -> dict:
    """
    Train with random weights for a few seconds: compilation apart, then `trials` timed windows.
    `examine` may look further at the trainee, and adds to the result. Raises OutOfMemory.
    """
    hw = hardware.set_up(config)
    memory_before = hw.peak_memory_gib() or 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, readable_errors(config):
        trainee = build(config, hw, open_data(config, Path(folder)), read_ahead)
        if host_sync:
            trainee = with_host_sync(trainee)
        first = trainee.timed(1)
        iters = window_iters(trainee.timed(1))
        windows = [trainee.timed(iters) for _ in range(trials)]
        seconds, model = statistics.median(windows), trainee.model.config
        rate, flops = config.iter_tokens / seconds, flops_per_token(model)
        modelled = memory_bytes(
            model, config.batch_size, hw.dtype, config.compile, config.optimizer
        )
        on_cuda = hw.device.type == "cuda"
        grown = (
            torch.cuda.max_memory_reserved() / hardware.GIB
            if on_cuda
            else (hw.peak_memory_gib() or 0) - memory_before
        )
        return dict(
            batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            step_ms=1000 * seconds,
            step_ms_range=[1000 * min(windows), 1000 * max(windows)],
            trials=trials,
            iters_per_trial=iters,
            tokens_per_iter=config.iter_tokens,
            tokens_per_sec=rate,
            mfu=hw.mfu(flops, rate),
            flops_per_token=flops,
            mem_gib=hw.peak_memory_gib(),
            mem_training_gib=grown,
            mem_model_gib=sum(modelled.values()) / hardware.GIB,
            compile_seconds=max(first - seconds, 0.0) if config.compile else 0.0,
            machine=machine(hw),
            **examine(trainee),
        )


def window_iters(seconds: float) -> int:
    """Iterations in a timed window, where one takes so many seconds."""
    return min(math.ceil(WINDOW_SECONDS / seconds), MAX_WINDOW_ITERS)


@contextlib.contextmanager
def readable_errors(config: Config):
    """
    Out of memory, in any of its forms (a killed process too), and a torch.compile that does not
    work, as one line.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenProcessPool) or hardware.is_out_of_memory(error):
            raise OutOfMemory(
                f"out of memory with batch_size={config.batch_size}; a smaller --batch_size"
            ) from None
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            text = str(error).strip().partition("\n")[0]
            raise RunError(f"torch.compile does not work here ({text}); --compile=False") from None
        raise


def attempt(config: Config, **arguments) -> dict:
    """
    measure() in a new process, so that neither memory nor compiled code is left from what ran
    before; with out_of_memory and no rate where that happened.
    """
    with new_process() as pool:
        try:
            return pool.submit(measure, config, **arguments).result()
        except (
            OutOfMemory,
            BrokenProcessPool,
        ):  # broken: the system killed it, most likely for its memory
            return dict(
                batch_size=config.batch_size,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                tokens_per_sec=None,
                out_of_memory=True,
            )


def new_process() -> ProcessPoolExecutor:
    """One process that starts from nothing, as CUDA needs it."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def machine(hw: hardware.Hardware) -> dict:
    """What a figure was measured on, for its JSON."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = [
        line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")
    ]
    return dict(
        device=hw.name,
        device_type=hw.device.type,
        dtype=str(hw.dtype).removeprefix("torch."),
        peak_tflops=hw.peak_tflops,
        cpu=names[0] if names else platform.processor(),
        cpu_cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.system(),
        date=time.strftime("%Y-%m-%d"),
    )
