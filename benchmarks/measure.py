"""
Time a few seconds of the training that train.py does. The modes of bench.py measure with this.
"""

import contextlib
import itertools
import math
import multiprocessing
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import train
from common.console import RunError, raise_if_any
from configurator import Config
from data.loader import Batch, TrainBatches, to_batch
from data.shards import Dataset, HeldTokens, check_dataset, open_dataset, vocab_where_missing
from data.stream import set_up_worker
from training import build, hardware
from training.gpus import GIB
from training.memory import memory_needed

# a timed window holds as many whole iterations as fill this time
WINDOW_SECONDS = 1.0
RANDOM_TOKENS = 2**22


# -----------------------------------------------------------------------------
# A model in training


class Trainee:
    """
    A model in training, set up as train.py does it, with random weights. It can also train in two
    slower ways, which the ladder compares with: without `read_ahead` each batch is loaded only when
    it is needed, and with `host_sync` the host waits for the device after each micro-step.
    """

    def __init__(
        self,
        config: Config,
        read_ahead: bool = True,
        host_sync: bool = False,
        keep_memory: bool = True,
    ):
        """Raises UserError. `keep_memory`: see hardware.set_up."""
        self.config, self.host_sync = config, host_sync
        self.hw = hw = hardware.set_up(config, keep_memory=keep_memory)
        self.memory_before = hw.peak_memory_gib()
        torch.manual_seed(config.seed)
        data = real_or_random_data(config)
        gpt_config = build.model_config(config, data.vocab, flash=hw.flash(config))
        self.model = build.build_model(gpt_config).to(hw.device)
        # what train_step calls
        self.step_model = build.compile_model(self.model) if config.compile else self.model
        self.optimizer = build.build_optimizer(self.model, config, hw.dtype)
        self.scaler = hw.grad_scaler()
        self.batches = TrainBatches(data, config, hw.device)
        if not read_ahead:
            self.batches = load_when_needed(self.batches)

    def step(self) -> Tensor:
        """One iteration. Returns the losses of its micro-batches, nats per token."""
        accum, clip = self.config.gradient_accumulation_steps, self.config.grad_clip
        autocast = self.hw.autocast()
        losses, _ = train.train_step(
            self.step_model, self.optimizer, self.scaler, self.next_batch, accum, clip, autocast
        )
        return losses

    def next_batch(self) -> Batch:
        if self.host_sync:
            self.hw.synchronize()
        return next(self.batches)

    def timed(self, iters: int) -> float:
        """Seconds per iteration over a window of `iters`."""
        self.hw.synchronize()
        began = time.perf_counter()
        for _ in range(iters):
            self.step()
        self.hw.synchronize()
        return (time.perf_counter() - began) / iters

    def memory_gib(self) -> float | None:
        """The most memory that training has added to the process, GiB; None where unknown."""
        peak = self.hw.peak_memory_gib()
        return None if peak is None else peak - self.memory_before


def load_when_needed(batches: TrainBatches) -> Iterator:
    """The same batches, each loaded only when it is asked for."""
    for first in itertools.count(step=batches.batch_size):
        yield to_batch(batches.load(first), batches.device)


def real_or_random_data(config: Config) -> Dataset:
    """
    The config's dataset, or random tokens where there is none. Raises UserError if the dataset does
    not suit the config.
    """
    vocab = vocab_where_missing(config)
    if vocab is None:
        raise_if_any(check_dataset(config))
        return open_dataset(config.dataset)
    random = np.random.default_rng(config.seed)
    tokens = HeldTokens(random.integers(0, vocab, RANDOM_TOKENS, dtype=np.uint16))
    return Dataset("random tokens", tokens, tokens, vocab, dict(kind="unknown"), "random")


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """
    One line when memory runs out (OutOfMemory) or torch.compile does not work here (RunError).
    torch's own errors can also be lost on their way from one process to another.
    """
    try:
        with hardware.on_out_of_memory(lambda: "out of memory; a smaller --batch_size"):
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"torch.compile does not work here ({reason}); --compile=False") from None


# -----------------------------------------------------------------------------
# The measurement


def time_training(config: Config, trials: int, **how) -> dict:
    """
    time_windows() with random weights. `how` may hold read_ahead and host_sync, for the trainee.
    Raises OutOfMemory.
    """
    with readable_errors():
        return time_windows(Trainee(config, **how), trials)


def time_windows(trainee: Trainee, trials: int) -> dict:
    """Train for a few seconds: compile first, then time `trials` windows."""
    config, hw, model = trainee.config, trainee.hw, trainee.model.config
    first = trainee.timed(1)
    iters = window_iters(trainee.timed(1))
    windows = [trainee.timed(iters) for _ in range(trials)]
    seconds = statistics.median(windows)
    rate = config.iter_tokens / seconds
    # what the whole process has, what training added to it, and what the memory model says
    memory, added = hw.peak_memory_gib(), trainee.memory_gib()
    if hw.device.type == "cuda":
        added = torch.cuda.max_memory_reserved() / GIB
    modelled = memory_needed(config, model, hw.dtype_name, config.batch_size) / GIB
    return micro_batch(config) | dict(
        step_ms=1000 * seconds,
        tokens_per_iter=config.iter_tokens,
        tokens_per_sec=rate,
        tokens_per_sec_range=[config.iter_tokens / max(windows), config.iter_tokens / min(windows)],
        mfu=hw.mfu(build.count_flops(model)[0], rate),
        mem_gib=memory,
        mem_training_gib=added,
        mem_model_gib=modelled,
        compile_seconds=max(first - seconds, 0.0) if config.compile else 0.0,
        machine=machine(hw),
    )


def micro_batch(config: Config) -> dict[str, int]:
    accumulation = config.gradient_accumulation_steps
    return dict(batch_size=config.batch_size, gradient_accumulation_steps=accumulation)


def window_iters(seconds: float) -> int:
    """How many iterations of so many seconds a timed window holds."""
    return math.ceil(WINDOW_SECONDS / seconds)


def attempt(config: Config, **arguments) -> dict:
    """
    time_training() in a new process, so that neither memory nor compiled code is left over from the
    measurement before. If memory runs out, the result holds only the micro-batch, and None as its
    tokens_per_sec.
    """
    try:
        with readable_errors(), new_process() as pool:
            return pool.submit(time_training, config, **arguments).result()
    except hardware.OutOfMemory:
        return micro_batch(config) | dict(tokens_per_sec=None)


def new_process() -> ProcessPoolExecutor:
    """
    One process, which ends when this one does, in whatever way. Spawned rather than forked: CUDA
    does not survive a fork.
    """
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_up_worker, (0,))


def machine(hw: hardware.Hardware) -> dict:
    """What a figure was measured on, for the JSON."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu_name = re.search(r"model name\s*: *(.+)", cpu)
    return dict(
        device=hw.name,
        dtype=hw.dtype_name,
        peak_tflops=hw.peak_tflops,
        cpu=cpu_name[1] if cpu_name else platform.processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
    )
