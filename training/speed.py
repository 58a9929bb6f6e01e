"""
Count a model's FLOPs and measure how fast a device multiplies matrices. Peaks from data sheets are
in gpus.py.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from time import process_time
from timeit import default_timer

import torch

from common.console import count
from model import GPTConfig
from model_fast import build_model, config_to_dict

MATMUL_SECONDS, MOST_MATMUL_SIZE = 0.002, 8192


@functools.cache
def count_flops(config: GPTConfig) -> float | None:
    """
    Return the FLOPs of training on one token, by running one sequence forward and backward without
    data or memory; None if the model does not run on fake tensors. torch counts all matmuls, and
    attention as if it had no mask. What recompute repeats is not counted. For GPT-2 the result is
    the PaLM paper's 6 N + 12 L H Q T (appendix B) without the norms.
    """
    # imported lazily: FakeTensorMode imports torch's compiler, which takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    try:
        # Fake tensors need no memory and draw no random numbers, but a modified model may set the
        # seed. torch cannot count FLOPs of the CPU's fused attention.
        with torch.random.fork_rng([]), FakeTensorMode():
            model = build_model(replace(config, recompute=False, loss_chunk=0))
            idx = torch.zeros(1, config.block_size, dtype=torch.long)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                torch.autograd.backward(model(idx, idx))
    except Exception:  # a modified model can raise anything
        return None
    return counter.get_total_flops() / config.block_size


def describe(model, vocab: int) -> str:
    """
    Describe a model: its file, which is where to edit its layers, its size and its FLOPs. `vocab`
    is the vocabulary size before padding.
    """
    kind = config_to_dict(model.config)["model"]
    parameters = sum(p.numel() for p in model.parameters())
    rows, flops = model.config.vocab_size, count_flops(model.config)
    vocabulary = f"vocabulary {vocab}" if rows == vocab else f"vocabulary {vocab}, padded to {rows}"
    work = "FLOPs not known, because it does not run on fake tensors"
    if flops:
        work = f"{count(flops)} FLOPs per token, counted by PyTorch"
    name = f"{kind} ({type(model).__module__}.py), {parameters / 1e6:.2f}M parameters"
    return f"model: {name}, {vocabulary}, {work}"


def measure_matmul(device: torch.device, dtype: torch.dtype, synchronize: Callable) -> float:
    """
    Measure the TFLOP/s of a square matmul in `dtype`, the best of a few runs. The matrices grow
    until one matmul takes MATMUL_SECONDS, because small ones cannot saturate a fast device. They
    hold random numbers, because matrices of ones need less power, so a GPU that lacks power would
    look fast. On Linux, a CPU is timed by the CPU time that this process uses, because other
    programs make the wall-clock time several times as long. Windows counts CPU time too coarsely,
    and on macOS the matmul does not use torch's number of threads.
    """
    counts_cpu_time = device.type == "cpu" and sys.platform == "linux"

    def now() -> float:
        return process_time() / torch.get_num_threads() if counts_cpu_time else default_timer()

    generator = torch.Generator(device).manual_seed(0)  # leaves the run's random numbers alone
    size = 512
    while True:
        a = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        seconds: list[float] = []
        # the first call also loads the kernel; in float16 a CPU may be a hundred times slower
        while len(seconds) < 5 and sum(seconds) < 0.1:
            synchronize()
            began = now()
            torch.mm(a, a)
            synchronize()
            seconds.append(now() - began)
        best = min(seconds)
        if best >= MATMUL_SECONDS or size == MOST_MATMUL_SIZE:
            return 2 * size**3 / best / 1e12
        size *= 2
