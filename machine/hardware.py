"""
Check, choose and set up the device, and report its dtype, memory and MFU.

MFU (model FLOPs utilisation) is the model's FLOPs per second divided by the device's dense peak for
the dtype in use (PaLM paper, appendix B). gpus.py reads the peaks from gpus.csv, and cost.py counts
FLOPs. Where no data sheet gives a peak, as on a CPU, a matmul at the start measures it.
"""

import contextlib
import ctypes
import math
import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from common.console import BELOW, UserError, warn
from common.process import local_rank, world_size
from configurator import Config
from machine.gpus import GIB, find_row, row_peak

# Whether the GPU has the Windows driver, as it also does under WSL. This driver moves data that
# does not fit on the GPU to system memory.
WINDOWS_DRIVER = sys.platform == "win32" or "microsoft" in platform.release().lower()
CPU_TOKENS = 100_000  # tokens per iteration above which device=auto refuses to train on a CPU
# `+cu130` makes pip replace a CPU build of the same version too
CUDA_BUILD = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"


@dataclass
class Hardware:
    device: torch.device
    dtype: torch.dtype
    name: str  # what the device calls itself
    peak_tflops: float  # dense, for `dtype`
    peak_source: str  # where peak_tflops comes from: gpus.csv, the key peak_tflops, or measured
    row: dict[str, str] | None = None  # the GPU's row in gpus.csv

    @property
    def dtype_name(self) -> Any:
        """Return the dtype's name as the key dtype spells it, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def adapt(self, c: Config) -> Config:
        """Return the config as this device runs it: with its dtype, and compiled if it can be."""
        # torch's compiler for MPS is an early prototype
        compiles = c.compile and self.device.type != "mps" and not c.eval_only
        return replace(c, dtype=self.dtype_name, compile=compiles)

    def line(self, compiled: bool) -> str:
        """Describe the device, its dtype and its peak."""
        is_cpu, memory = self.device.type == "cpu", self.memory_gib()
        parts = [f"CPU ({self.name})" if is_cpu else self.name]
        parts += [f"{memory:.1f}GiB"] if memory else []
        parts += [self.dtype_name] if compiled else [self.dtype_name, "not compiled"]
        peak = f"{self.peak_tflops:.3g} TFLOP/s, dense ({self.peak_source})"
        return f"device: {', '.join(parts)}; peak {peak}"

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return a context in which the forward pass runs its matmuls in `dtype`."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        getattr(torch, self.device.type).synchronize()

    def seed(self, *numbers: int) -> None:
        """Seed the random numbers of this process and of its device, such as those of dropout."""
        number = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
        # torch.manual_seed() would seed all devices, which takes 0.3 ms on a CPU
        torch.default_generator.manual_seed(number)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).manual_seed(number)

    def peak_memory_gib(self) -> float:
        """Return the peak GPU memory or, on Linux, the peak process memory; 0 if unknown."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / GIB
        if sys.platform == "linux":
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return int(peak[1]) * 1024 / GIB if peak else 0.0
        return 0.0

    def memory_gib(self) -> float | None:
        """Return a CUDA GPU's total memory; None on other devices, which share the system's."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self.device).total_memory / GIB

    def mfu(self, flops_per_token: float | None, tokens_per_sec: float) -> float | None:
        """
        Return the model FLOPs utilisation of all ranks' devices as a fraction, or None if the FLOPs
        are unknown.
        """
        if not flops_per_token:
            return None
        return flops_per_token * tokens_per_sec / (self.peak_tflops * 1e12 * world_size())


# -----------------------------------------------------------------------------
# Checking, before a run


def check_device(c: Config) -> None:
    """
    Raise UserError if there is no such device, or if a run for a GPU would train on the CPU because
    torch sees no GPU.
    """
    is_fallback = choose_device(c).type == "cpu" and c.device == "auto"
    if is_fallback and c.tokens_per_iter > CPU_TOKENS and not c.eval_only:
        tokens = f"{c.tokens_per_iter:,} tokens per iteration are too many for a CPU"
        anyway = "--device=cpu trains anyway"
        raise UserError(f"device: torch sees no GPU, and {tokens} ({anyway}); {cuda_hint()}")


def cuda_hint() -> str:
    """Suggest a fix if torch sees no GPU. On Windows, PyPI's torch has no CUDA."""
    if not (torch.version.cuda or torch.version.hip or sys.platform == "darwin"):
        return f"this torch has no CUDA; install one that has{BELOW}{CUDA_BUILD}"
    return "check the driver with nvidia-smi"


# -----------------------------------------------------------------------------
# Choosing and setting up


def choose_device(c: Config) -> torch.device:
    """
    Choose this rank's device. Unless the `device` key names a GPU, local rank N takes GPU N. Raises
    UserError if there is no such device.
    """
    wanted = c.device
    if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]{1,2})?", wanted):
        raise UserError(f"device: {wanted!r} is not one of auto, cuda, cuda:N, mps, cpu")
    version, anyway = f"torch {torch.__version__}", "--device=cpu trains without one"
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device: mps, but {version} sees no Apple GPU ({anyway})")
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = f"{version} sees {torch.cuda.device_count()} CUDA GPUs"
        raise UserError(f"device: {wanted}, but {seen} ({anyway}); {cuda_hint()}")
    if wanted not in ("auto", "cuda"):
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def cpu_name() -> str:
    """Return the CPU's model name or, failing that, its vendor and family or architecture."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    name = re.search(r"model name\s*: *(.+)", cpu)
    return name[1] if name else platform.processor() or platform.machine()


def best_dtype(device: torch.device) -> torch.dtype:
    """
    Return the dtype for --dtype=auto: half precision if that makes matmuls faster, else float32.
    For a CPU this depends on its instruction set, as measured in results/README.md.
    """
    if device.type == "cuda":
        # GPUs older than Ampere, such as a T4, only emulate bfloat16 (nanoGPT #525)
        is_old = torch.cuda.get_device_capability(device) < (8, 0)
        return torch.float16 if is_old else torch.bfloat16
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    fast = device.type == "cpu" and (amx or (avx512 and "AMD" in cpu_name()))
    return torch.bfloat16 if fast else torch.float32


def set_up(c: Config) -> Hardware:
    """Choose the device and dtype, set torch's options for them, and find the peak."""
    device = choose_device(c)
    best = best_dtype(device)
    dtype = best if c.dtype == "auto" else getattr(torch, c.dtype)
    if device.type == "cuda" and dtype == torch.bfloat16 != best:
        slow = "this GPU only emulates bfloat16; --dtype=float16 is faster"
        warn(f"dtype: {slow} (with --init_from=resume, if the run has begun)")
    hw = Hardware(device, dtype, cpu_name(), c.peak_tflops, "peak_tflops")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if WINDOWS_DRIVER:
            # Too large a batch must raise an error. Without a limit, this driver would silently
            # spill to system memory, which makes training several times slower.
            free, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(free / total, 1.0), device)
        hw.name = torch.cuda.get_device_name(device)
        hw.row = find_row(hw.name, torch.cuda.get_device_properties(device).multi_processor_count)
        peak = hw.row and row_peak(hw.row, hw.dtype_name, c.tf32)
        if peak and not hw.peak_tflops:
            hw.peak_tflops, hw.peak_source = peak, "gpus.csv"
    if device.type == "cpu":
        keep_freed_memory()
    # TF32 has float32's range but only 10 bits of mantissa. Without TF32, float32 matmuls do not
    # use the tensor cores.
    torch.set_float32_matmul_precision("high" if c.tf32 else "highest")
    if c.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this
        # Without this variable, torch.compile times matmuls to decide whether to pad them, and the
        # outcome may differ at the next start. torch reads the variable on importing its compiler.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
    if not hw.peak_tflops:
        hw.peak_tflops = measure_matmul(hw)
        hw.peak_source = "measured"
    return hw


def measure_matmul(hw: Hardware) -> float:
    """
    Return the TFLOP/s of the fastest of eight matmuls in hw.dtype. The matrices grow until one
    takes 2 ms or has 4,096 rows, because small ones cannot keep a fast device busy. They hold
    random numbers, because ones need less power, so a GPU that lacks power would look fast.
    """
    size, best = 256, 0.0
    while best < 0.002 and size < 4096:
        size, best = 2 * size, math.inf
        a = torch.randn(size, size, dtype=hw.dtype, device=hw.device)
        for _ in range(8):  # the first one also loads the kernel
            hw.synchronize()
            began = perf_counter()
            torch.nn.functional.linear(a, a)  # torch.mm is slower in half precision on a CPU
            hw.synchronize()
            best = min(best, perf_counter() - began)
    return 2 * size**3 / best / 1e12


def keep_freed_memory() -> None:
    """
    Make glibc's malloc keep freed memory. By default malloc returns blocks above 32 MB to the
    system, and allocating them again takes up to half of a CPU step. See mallopt(3); the numbers
    are from malloc.h.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, M_TRIM_THRESHOLD, M_MMAP_MAX = ctypes.CDLL(None), -1, -4
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
