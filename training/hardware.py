"""
Handles everything about the machine: device, dtype, peak speed, memory, random states and MFU.

MFU (model FLOPs utilisation) is the model's FLOPs per second divided by the device's dense peak for
the dtype in use (PaLM paper, appendix B). gpus.py reads the peaks from gpus.csv.
"""

import contextlib
import ctypes
import functools
import math
import os
import platform
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from timeit import default_timer

import numpy as np
import torch

from common.console import COMMAND, UserError, warn
from configurator import Config, divisors, launched
from model import GPTConfig
from model_fast import build_model
from training.gpus import GIB, find_row, row_peak

# Whether the GPU has the Windows driver, as it also does under WSL. This driver lacks expandable
# segments, and it moves data that does not fit on the GPU to system memory.
WINDOWS_DRIVER = sys.platform == "win32" or "microsoft" in platform.release().lower()
CPU_TOKENS = 100_000  # tokens per iteration above which device=auto refuses to train on a CPU
# The longest context, in tokens, at which plain attention beats the fused kernel on a CPU in
# bfloat16 (results/cpu/kernels.json)
PLAIN_ATTENTION_TOKENS = 512
# `+cu130` makes pip replace a CPU build of the same version too
CUDA_BUILD = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
# On an H100 or B200 torch prefers cuDNN's attention, for which wrong values and NaN have been
# reported (pytorch #193893, #196678). The second variable disables the compiler's cache, whose code
# would still call cuDNN, because the first variable is not part of the cache key.
NO_CUDNN_ATTENTION = "TORCH_CUDNN_SDPA_DEPRIORITIZED=1 TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
SHARED_MEMORY = 0.9  # the share of the free system memory that an integrated GPU may take
# How torch, cuBLAS, Triton and the system say that memory ran out; the last two alternatives are
# Windows' and MPS's
OUT_OF_MEMORY = "out of memory|ALLOC_FAILED|allocate memory|not enough memory|Invalid buffer size"

# The NVIDIA driver that each CUDA version needs (docs.nvidia.com/deploy/cuda-compatibility)
LEAST_DRIVER = {12: "525 or newer", 13: "580 or newer"}

MEASURED = "measured"  # peak_source if the peak was measured instead of looked up
MATMUL_SECONDS, MOST_MATMUL_SIZE = 0.002, 8192


@dataclass
class Hardware:
    device: torch.device
    dtype: torch.dtype
    name: str  # what the device calls itself
    peak_tflops: float | None  # dense, for `dtype`; None if unknown
    peak_source: str | None  # where peak_tflops comes from
    row: dict[str, str] | None = None  # of gpus.csv
    warned_of_peak: bool = False

    @property
    def dtype_name(self) -> str:
        """Return the dtype's name without "torch.", such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def find_peak_flops(self, saved: dict | None) -> None:
        """
        Measure the peak with a matmul in `dtype` if no data sheet gives one. A resumed run takes
        the `saved` peak from its checkpoint, so that the whole run uses one peak.
        """
        if self.peak_source:
            return
        if saved and (saved["device"], saved["dtype"]) == (self.name, self.dtype_name):
            self.peak_tflops = saved["tflops"]
        else:
            dtype = self.dtype
            if self.device.type == "cpu" and dtype == torch.float16:
                dtype = torch.float32  # torch.mm in float16 is slower than autocast's layers
            self.peak_tflops = measure_matmul(self.device, dtype, self.synchronize)
        self.peak_source = MEASURED

    def peak_to_save(self) -> dict | None:
        """Return the measured peak, for find_peak_flops() on a resume; None if it was looked up."""
        if self.peak_source != MEASURED:
            return None
        return dict(device=self.name, dtype=self.dtype_name, tflops=self.peak_tflops)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return a context in which the forward pass runs its matmuls in `dtype`."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @property
    def can_compile(self) -> bool:
        return self.device.type != "mps"  # torch's compiler for MPS is an early prototype

    def flash(self, config: Config | GPTConfig) -> bool:
        """
        Return whether attention uses the fused kernel. The `flash` key is overruled on a CPU in
        bfloat16 with a short context, where plain attention is faster, and on MPS, whose fused
        kernel may attend to later tokens in half precision without gradients (pytorch #195910).
        """
        short = config.block_size <= PLAIN_ATTENTION_TOKENS
        plain_is_faster = self.device.type == "cpu" and self.dtype == torch.bfloat16 and short
        return config.flash and not plain_is_faster and self.device.type != "mps"

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        getattr(torch, self.device.type).synchronize()

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

    def mfu(
        self, flops_per_token: float | None, tokens_per_sec: float, devices: int = 1
    ) -> float | None:
        """
        Return model FLOPs utilisation as a fraction, or None if the FLOPs or the peak are unknown.
        Warns once if training is faster than a measured peak.
        """
        if not (flops_per_token and self.peak_tflops):
            return None
        mfu = flops_per_token * tokens_per_sec / (self.peak_tflops * 1e12 * devices)
        if mfu > 1 and self.peak_source == MEASURED and not self.warned_of_peak:
            self.warned_of_peak = True
            warn(f"mfu {mfu:.0%}: the peak was measured on a busy machine, and is too low")
        return mfu


# -----------------------------------------------------------------------------
# Choosing and setting up


def check_device(config: Config) -> list[str]:
    """Return what is wrong with the device and dtype on this machine, one line per problem."""
    wanted = config.device
    if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]{1,2})?", wanted):
        return [f"device: {wanted!r} is none of auto, cuda, cuda:N, mps, cpu"]
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs"
        return [f"device: {wanted}, but {seen} (--device=cpu trains without); {cuda_hint()}"]
    here = launched("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count()
    if kind != "cpu" and gpus and here > gpus:
        return [f"nproc_per_node: {gpus} GPUs here are too few for {here} processes; start {gpus}"]
    device = choose_device(config, local_rank=0)
    if device.type == "cuda" and not has_kernels(device):
        name = torch.cuda.get_device_name(device)
        code = f"torch {torch.__version__} has code for {' '.join(torch.cuda.get_arch_list())} only"
        build = "an old GPU needs a build of torch for CUDA 12.6, a new one a newer torch"
        return [f"device: a {name} cannot run this torch: {code}; {build}"]
    if config.dtype == "bfloat16" and emulates_bfloat16(device):
        return ["dtype: this GPU only emulates bfloat16, many times slower; --dtype=float16"]
    if kind == "mps" and not torch.backends.mps.is_available():
        return ["device: mps asked for, but torch finds no Metal here; --device=cpu"]
    # torch has this option for NVIDIA's GPUs only, and the model's head needs bfloat16
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if config.fp16_accumulation and (not is_nvidia or emulates_bfloat16(device)):
        needs = "needs an NVIDIA GPU, RTX 30 series or newer"
        return [f"fp16_accumulation: {needs}; --fp16_accumulation=False"]
    return []


def has_kernels(device: torch.device) -> bool:
    """
    Return whether this build of torch runs on the GPU. If not, the first kernel raises "no kernel
    image". Binary code (sm_86) runs on GPUs with the same major version and at least its minor
    version; PTX (compute_90) runs on every later GPU. Architectures with a letter (sm_90a) are
    ignored, because builds that have them include the plain one too. Returns True if torch lists no
    such architectures, as for AMD GPUs.
    """
    card = torch.cuda.get_device_capability(device)
    arches = re.findall(r"\b(sm|compute)_(\d+)(\d)\b", " ".join(torch.cuda.get_arch_list()))
    for kind, major, minor in arches:
        code = (int(major), int(minor))
        if code <= card and (kind == "compute" or code[0] == card[0]):
            return True
    return not arches


def no_gpu_problem(config: Config) -> list[str]:
    """Return a problem if a run for a GPU would train on the CPU because torch sees no GPU."""
    is_for_gpu = config.device == "auto" and config.iter_tokens > CPU_TOKENS
    if not is_for_gpu or config.eval_only or choose_device(config, local_rank=0).type != "cpu":
        return []
    tokens = f"{config.iter_tokens:,} tokens per iteration are too many for a CPU"
    anyway = "--device=cpu trains anyway"
    return [f"device: torch sees no GPU, and {tokens} ({anyway}); {cuda_hint()}"]


def cuda_hint() -> str:
    """Suggest a fix if torch sees no GPU. On Windows, PyPI's torch has no CUDA."""
    if not (torch.version.cuda or torch.version.hip or sys.platform == "darwin"):
        return f"this torch has no CUDA; install one that has{COMMAND}{CUDA_BUILD}"
    return old_driver() or "check the driver with nvidia-smi"


def old_driver() -> str:
    """Suggest a fix if NVIDIA's driver is too old for this torch to see the GPU, else return ""."""
    if not torch.version.cuda:
        return ""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:  # no NVIDIA driver installed
        return ""
    version = ctypes.c_int()  # the CUDA version: 12080 means 12.8
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = f"{version.value // 1000}.{version.value % 1000 // 10}"
    needed = int(torch.version.cuda.partition(".")[0])
    if version.value == 0 or version.value // 1000 >= needed:  # 0: a stub without a driver
        return ""
    least = LEAST_DRIVER.get(needed, "the newest")
    problem = f"the NVIDIA driver here is for CUDA {found}, this torch for CUDA {needed}"
    line = f"{problem}; update the driver to {least}"
    if version.value >= 12000:  # in a rented container the user cannot update the driver
        release = torch.__version__.partition("+")[0]
        line += f", or install torch {release} for CUDA 12 (listed at download.pytorch.org/whl)"
    return line


def choose_device(config: Config, local_rank: int) -> torch.device:
    """Choose this rank's device. Unless the key names a GPU, local rank N takes GPU N."""
    if config.device not in ("auto", "cuda"):
        return torch.device(config.device)
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def cpu_name() -> str:
    """Return the CPU's model name or, failing that, its vendor and family or architecture."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    name = re.search(r"model name\s*: *(.+)", cpu)
    return name[1] if name else platform.processor() or platform.machine()


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether this is a GPU that is older than Ampere, such as a T4."""
    # is_bf16_supported() is True even for a T4's emulation (nanoGPT #525)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def best_dtype(device: torch.device) -> torch.dtype:
    """
    Return the dtype for --dtype=auto: half precision if that makes matmuls faster, else float32.
    For a CPU this depends on its instruction set, as measured in results/README.md.
    """
    if device.type == "cuda":
        return torch.float16 if emulates_bfloat16(device) else torch.bfloat16
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    fast = device.type == "cpu" and (amx or (avx512 and "AMD" in cpu_name()))
    return torch.bfloat16 if fast else torch.float32


def set_up(config: Config, local_rank: int = 0) -> Hardware:
    """Choose the device and dtype, set torch's options for them, and look up the peak."""
    device = choose_device(config, local_rank)
    dtype = best_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    hw = Hardware(device, dtype, cpu_name(), None, None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        limit_memory(device)
        check_allocator(device)
        hw.name = torch.cuda.get_device_name(device)
        hw.row = find_row(hw.name, torch.cuda.get_device_properties(device).multi_processor_count)
        hw.peak_tflops = row_peak(hw.row, hw.dtype_name, config.tf32) if hw.row else None
        if hw.peak_tflops and config.fp16_accumulation and "GeForce" in hw.name:
            hw.peak_tflops *= 2  # on other cards, float32 accumulators are as fast
        hw.peak_source = "gpus.csv" if hw.peak_tflops else None
    if config.peak_tflops:
        hw.peak_tflops = config.peak_tflops
        hw.peak_source = "peak_tflops"
    if device.type == "cpu" and dtype == torch.float16:
        warn("float16 is some 20 times slower than float32 on a CPU; use --dtype=float32")
    if device.type == "cpu":
        keep_freed_memory()
    # TF32 has float32's range but only 10 bits of mantissa. Without TF32, float32 matmuls do not
    # use the tensor cores.
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # cuBLAS reads this option at each matmul, in compiled code too.
    torch.backends.cuda.matmul.allow_fp16_accumulation = config.fp16_accumulation
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this
        # Without this variable, torch.compile times matmuls to decide whether to pad them, and the
        # outcome may differ at the next start. torch reads the variable on importing its compiler.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
    return hw


def limit_memory(device: torch.device) -> None:
    """
    Limit torch to the GPU's free memory, so that too large a batch raises an error. Without a
    limit, the driver for Windows and WSL2 would silently spill to system memory, which makes
    training several times slower, and a machine whose GPU shares system memory (a GB10) would hang.
    """
    is_integrated = torch.cuda.get_device_properties(device).is_integrated
    if not (WINDOWS_DRIVER or is_integrated):
        return
    free: float
    free, total = torch.cuda.mem_get_info(device)
    if is_integrated and sys.platform == "linux":
        # Unlike CUDA, Linux counts the page cache as available. Leave some memory for the system.
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = SHARED_MEMORY * int(available[1]) * 1024 if available else free
    torch.cuda.set_per_process_memory_fraction(min(free / total, 1.0), device)


def check_allocator(device: torch.device) -> None:
    """
    Allocate a little GPU memory. Raises UserError if the driver has no virtual memory calls, which
    expandable segments need, as on some vGPUs and Jetsons and in some containers.
    """
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        hint = "set the environment variable PYTORCH_ALLOC_CONF=expandable_segments:False"
        raise UserError(f"device: {reason}; {hint} and try again") from None


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


def measure_matmul(device: torch.device, dtype: torch.dtype, synchronize: Callable) -> float:
    """
    Measure the TFLOP/s of a square matmul in `dtype`, the best of a few runs. The matrices grow
    until one matmul takes MATMUL_SECONDS, because small ones cannot saturate a fast device. They
    hold random numbers, because ones need less power, so a GPU that lacks power would look fast.
    On Linux, a CPU is timed by the CPU time that this process uses, because other programs make
    the wall-clock time several times as long. Windows counts CPU time too coarsely, and on macOS
    torch's number of threads is not that of the matmul.
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


# -----------------------------------------------------------------------------
# Random states


def set_seed(seed: int) -> None:
    """Seed torch, Python and numpy, so that code you add may use any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32-bit seeds only


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """
    Return the random states of torch (used for dropout), Python and numpy (for code that you add)
    without waiting for the device.
    """
    # Python and numpy draw normals in pairs and keep the second one. inf encodes Python's None.
    _, numbers, half = random.getstate()
    python = [*numbers, math.inf if half is None else half]
    _, keys, *rest = np.random.get_state()
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys, *rest], dtype=torch.float64),
    }
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    *numbers, half = states["python"].tolist()
    random.setstate((3, tuple(map(int, numbers)), None if half == math.inf else half))
    *keys, at, has_half, half = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, "u4"), int(at), int(has_half), half))
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type])


# -----------------------------------------------------------------------------
# Counting


@functools.cache
def count_flops(config: GPTConfig) -> float | None:
    """
    Return the training FLOPs per token, or None if the model does not run on fake tensors. This is
    three times the forward FLOPs, because a backward pass takes twice as many as a forward pass
    (PaLM paper, appendix B). torch counts all matmuls, and attention as if it had no mask. For
    GPT-2 the result is the paper's 6 N + 12 L H Q T without the norms.
    """
    # imported lazily: FakeTensorMode imports torch's compiler, which takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    cpu = torch.device("cpu")
    random_states = get_rng_state(cpu)  # building the model draws random numbers
    try:
        # fake tensors need no memory; torch cannot count FLOPs of the CPU's fused attention
        with FakeTensorMode(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model = build_model(config)
            idx = torch.zeros(1, config.block_size, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                model(idx, idx)
    except Exception:  # a modified model can raise anything
        return None
    finally:
        set_rng_state(random_states, cpu)
    return 3 * counter.get_total_flops() / config.block_size


# -----------------------------------------------------------------------------
# Running out of memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that it wraps, says that memory ran out."""
    while error is not None:
        kinds = (torch.OutOfMemoryError, MemoryError)
        if isinstance(error, kinds) or re.search(OUT_OF_MEMORY, str(error)):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def out_of_memory_line(config: Config, world_size: int = 1) -> str:
    """Return the error line for a micro-batch that does not fit, suggesting a smaller one."""
    smaller = [n for n in divisors(config.iter_sequences // world_size) if n < config.batch_size]
    line = f"out of memory with batch_size={config.batch_size}"
    if not smaller:
        hint = "--recompute=True, a smaller --block_size or model, or --dtype=bfloat16, needs less"
        return f"{line}; {hint}"
    accumulation = config.iter_sequences // smaller[-1]
    pair = f"--batch_size={smaller[-1]} --gradient_accumulation_steps={accumulation}"
    return f"{line}; the next smaller: {pair} --eval_tokens={config.eval_size}"
