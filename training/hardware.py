"""
The machine: device, dtype, peak speed, running out of memory, and the arithmetic of MFU.

MFU (model FLOPs utilisation) = model FLOPs per second / the device's dense peak for the dtype in
use (PaLM paper, appendix B). The peaks are in gpus.csv, which gpus.py reads.
"""

import contextlib
import ctypes
import math
import os
import platform
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.console import warn
from configurator import Config, divisors
from model import GPTConfig
from training.gpus import GIB, find_row, row_peak

IN_WSL = "microsoft" in platform.release().lower()


def set_environment() -> None:
    """Defaults that torch reads when it first compiles or allocates. The user's own values win."""
    # torch's own default is in /tmp, which a restart empties. A container's user may have no home
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{home}/.cache/torchinductor")
    if sys.platform == "win32":
        os.environ.setdefault("TORCHINDUCTOR_UNIQUE_KERNEL_NAMES", "0")  # paths end at 260 letters
        # or Intel's runtime, in some builds of numpy, ends the process at Ctrl-C
        os.environ.setdefault("FOR_DISABLE_CONSOLE_CTRL_HANDLER", "1")
    # Less fragmentation, so that larger batches fit. Not under WSL, where NVIDIA's driver may crash
    # on it (pytorch #192330).
    # The user may have set it by its earlier name.
    if sys.platform == "linux" and not IN_WSL and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


set_environment()

# Warn of too many CPU threads if they compute for less than this share of the time
BUSY_SHARE = 0.6
LEAST_SECONDS = 5.0  # per log line, to judge that
# The longest context, in tokens, at which plain attention beats the fused kernel on a CPU in
# bfloat16 (results/cpu/kernels.json)
PLAIN_ATTENTION_TOKENS = 512
# with `+cu130` pip also replaces a CPU build of the same version
CUDA_BUILD = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
# What torch, cuBLAS, Triton and the system say when memory runs out; the last two: Windows and MPS
OUT_OF_MEMORY = "out of memory|ALLOC_FAILED|allocate memory|not enough memory|Invalid buffer size"


@dataclass
class Hardware:
    device: torch.device
    dtype: torch.dtype
    name: str  # what the device calls itself
    peak_tflops: float | None  # dense, for `dtype`; None: not known for sure

    @property
    def dtype_name(self) -> str:
        """Such as bfloat16, without the "torch." before it."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> contextlib.AbstractContextManager:
        """The forward pass runs its matmuls in `dtype` inside this."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """
        float16 gradients underflow unless the loss is scaled. For other dtypes the scaler passes
        everything through.
        """
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def flash(self, config: Config | GPTConfig) -> bool:
        """
        Whether attention uses the fused kernel. On a CPU in bfloat16 with a short context plain
        attention is faster, so there the configuration's `flash` is not followed. Nor on MPS: in
        half precision and without gradients its kernel may look at later tokens (pytorch #195910).
        """
        short = config.block_size <= PLAIN_ATTENTION_TOKENS
        plain_is_faster = self.device.type == "cpu" and self.dtype == torch.bfloat16 and short
        return config.flash and not plain_is_faster and self.device.type != "mps"

    def synchronize(self) -> None:
        """Wait until the device has finished everything it was given."""
        getattr(torch, self.device.type).synchronize()

    def peak_memory_gib(self) -> float | None:
        """
        The most memory in use so far, in GiB. On CUDA this is the allocator's, on a CPU the whole
        process's. On MPS it is the memory in use now. None where unknown.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / GIB
        if sys.platform == "linux":
            # not ru_maxrss, which starts from what the parent process had in use
            status = Path("/proc/self/status").read_text()
            peak = re.search(r"VmHWM:\s+(\d+) kB", status)  # a sandbox may leave it out
            return int(peak[1]) * 1024 / GIB if peak else None
        return None

    def too_many_threads(self, wall: float, cpu: float) -> str:
        """
        The warning for iterations that took `wall` seconds and `cpu` seconds of all cores; usually
        empty. Threads that wait for each other while other programs use the cores slow down a small
        model on a CPU more than tenfold (results/speed.md).
        """
        threads, cores = torch.get_num_threads(), cpu / max(wall, LEAST_SECONDS)
        if self.device.type != "cpu" or threads == 1 or wall < LEAST_SECONDS:
            return ""
        if cores > BUSY_SHARE * threads:
            return ""
        why = "other programs are running, or the model is too small for that many threads"
        share = f"the {threads} CPU threads were busy for {cores / threads:.0%} of the time"
        better = f"OMP_NUM_THREADS={max(1, int(cores))}"
        if sys.platform == "win32":
            better = f"$env:{better} (cmd: set {better}) on a line"
        return f"{share}: {why}; try {better} before the command"

    def mfu(
        self, flops_per_token: float | None, tokens_per_sec: float, devices: int = 1
    ) -> float | None:
        """
        Model FLOPs utilisation as a fraction, not clamped. None where the FLOPs or the peak are
        unknown.
        """
        if not (flops_per_token and self.peak_tflops):
            return None
        return flops_per_token * tokens_per_sec / (self.peak_tflops * 1e12 * devices)


# -----------------------------------------------------------------------------
# Choosing and setting up


def check_device(config: Config) -> list[str]:
    """What is wrong with config.device on this machine, one line per problem."""
    wanted = config.device
    if not re.fullmatch("auto|cpu|(cuda|mps)(:[0-9]{1,2})?", wanted):
        return [f"device: {wanted!r} is none of auto, cuda, cuda:N, mps, cpu"]
    device = torch.device("cpu" if wanted == "auto" else wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        here = f"torch {torch.__version__} sees no CUDA GPU"
        return [f"device: {wanted}, but {here}; {cuda_hint()}, or --device=cpu"]
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        return [f"device: there is no {wanted}; the GPUs here are cuda:0 to cuda:{last}"]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return ["device: mps asked for, but torch finds no Metal here; --device=cpu"]
    return []


def cuda_hint() -> str:
    """The hint if torch sees no GPU. On Windows PyPI's torch cannot see one."""
    has_cuda = torch.version.cuda or torch.version.hip or sys.platform == "darwin"
    return "check the driver with nvidia-smi" if has_cuda else f"it has no CUDA: {CUDA_BUILD}"


def choose_device(config: Config) -> torch.device:
    if config.device != "auto":
        return torch.device(config.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def cpu_name() -> str:
    """The CPU's name; its maker and family if it has none."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    name = re.search(r"model name\s*: *(.+)", cpu)
    return name[1] if name else platform.processor()


def best_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """
    What --dtype=auto means here, and why: half precision if matmuls are faster in it, else float32.
    On a CPU this follows from its features, by measurements (results/speed.md).
    """
    if device.type == "cuda":
        # is_bf16_supported() counts a T4's emulation (nanoGPT #525)
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, "this GPU computes in it"
        return torch.float16, "this GPU only emulates bfloat16"
    if device.type == "mps":
        return torch.float32, "half precision is untried on Macs"
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    if amx or (avx512 and "AMD" in cpu_name()):
        return torch.bfloat16, "this CPU has AMX, or is an AMD with AVX512_BF16"
    return torch.float32, "this CPU has no AMX, and is not an AMD with AVX512_BF16"


def set_up(config: Config, local_rank: int = 0, keep_memory: bool = True) -> Hardware:
    """
    Choose device and dtype, set torch's options for them, and look up the peak. If the device has
    no number, each local rank takes the GPU of its number. On a CPU freed memory is kept, unless
    `keep_memory` is off.
    """
    device = choose_device(config)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        forbid_spilling(device)
    if device.type == "cpu" and keep_memory:
        keep_freed_memory()
    if device.type == "mps" and config.compile:
        config.compile = False
        warn("compile: off; torch's compiler for MPS is an early prototype")
    dtype = best_dtype(device)[0] if config.dtype == "auto" else getattr(torch, config.dtype)
    # TF32 keeps float32's range with 10 bits of mantissa. Without it, float32 matmuls do not
    # use the tensor cores.
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.deterministic:
        # cuBLAS is deterministic only with fixed workspaces
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if dtype == torch.bfloat16 and device.type == "cuda" and best_dtype(device)[0] != dtype:
        warn("this GPU only emulates bfloat16, many times slower; --dtype=float16")
    if device.type == "cuda" and torch.version.hip:
        warn("torch for AMD GPUs (ROCm): nobody has tried this program with it")
    hw = Hardware(device, dtype, platform.processor() or platform.machine(), None)
    if device.type == "cuda":
        hw.name = torch.cuda.get_device_name(device)
        row = find_row(hw.name, torch.cuda.get_device_properties(device).multi_processor_count)
        hw.peak_tflops = row_peak(row, hw.dtype_name, config.tf32) if row else None
    hw.peak_tflops = config.peak_tflops or hw.peak_tflops
    return hw


def forbid_spilling(device: torch.device) -> None:
    """
    Limit torch to the GPU's free memory. Without a limit, the driver of Windows and WSL2 moves what
    does not fit into system memory, and training gets several times slower without a message. With
    it, torch runs out of memory as on Linux.
    """
    if sys.platform == "win32" or IN_WSL:
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(free / total, device)


def keep_freed_memory() -> None:
    """
    Make glibc's malloc keep freed memory. By default it returns blocks above 32 MB to the system,
    and asking for them again takes up to half of a step on a CPU. See mallopt(3); the numbers are
    malloc.h's.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, M_TRIM_THRESHOLD, M_MMAP_MAX = ctypes.CDLL(None), -1, -4
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


# -----------------------------------------------------------------------------
# Random states


def set_seed(seed: int) -> None:
    """Of all random numbers that a model, an optimizer or a change of the text may draw."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """
    The random states that dropout draws on, and those of Python and numpy, on which people's
    changes do. Does not wait for the device.
    """
    # Python's and numpy's end with the second of two normal numbers; inf: Python has none
    _, numbers, half = random.getstate()
    _, keys, *rest = np.random.get_state()
    others = [*numbers, math.inf if half is None else half], [*keys, *rest]
    python, numpy = (torch.tensor(values, dtype=torch.float64) for values in others)
    states = {"cpu": torch.get_rng_state(), "python": python, "numpy": numpy}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:  # older checkpoints have neither
        *numbers, half = states["python"].tolist()
        random.setstate((3, tuple(map(int, numbers)), None if half == math.inf else half))
        *keys, at, has_half, half = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, "u4"), int(at), int(has_half), half))
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type])


@contextlib.contextmanager
def no_trace(model, device: torch.device) -> Iterator[None]:
    """What is computed inside leaves random states, gradients and buffers as they were."""
    random_states = get_rng_state(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    model.zero_grad()
    for buffer, before in buffers:
        buffer.data.copy_(before)
    set_rng_state(random_states, device)


# -----------------------------------------------------------------------------
# Running out of memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """
    Whether memory ran out. torch, cuBLAS, Triton and the system each have another error for it, and
    torch.compile wraps them. A pool breaks when the system kills one of its processes, most likely
    for its memory.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, BrokenProcessPool)):
            return True
        if re.search(OUT_OF_MEMORY, str(error)):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def out_of_memory_line(config: Config, world_size: int = 1) -> str:
    """The error line for a micro-batch that did not fit, with the next smaller one."""
    smaller = [n for n in divisors(config.iter_sequences // world_size) if n < config.batch_size]
    line = f"out of memory with batch_size={config.batch_size}"
    if not smaller:
        hint = "--recompute=True, a smaller --block_size or model, or --dtype=bfloat16, needs less"
        return f"{line}; {hint}"
    accumulation = config.iter_sequences // smaller[-1]
    pair = f"--batch_size={smaller[-1]} --gradient_accumulation_steps={accumulation}"
    if not config.eval_tokens:  # or it would evaluate on fewer
        pair += f" --eval_tokens={config.eval_size}"
    return f"{line}; the next smaller: {pair}"
