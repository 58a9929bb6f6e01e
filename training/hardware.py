"""
The machine: device, dtype, peak speed, and the arithmetic of MFU.

MFU (model FLOPs utilisation) = model FLOPs per second / the device's dense peak for the dtype in
use (PaLM paper, appendix B). What is known of each card stands in gpus.csv; gpus.py reads it.
"""

import contextlib
import ctypes
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from common.console import warn
from configurator import Config
from training.gpus import find_row, row_peak

os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torchinductor")
)  # /tmp is emptied
in_wsl = (
    "microsoft" in platform.release().lower()
)  # where NVIDIA's driver may crash on what follows (pytorch 192330)
if (
    sys.platform == "linux" and not in_wsl and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
):  # its older name: the user's choice
    os.environ.setdefault(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    )  # less fragmentation, so larger batches fit

GIB = 2**30
PLAIN_BLOCK_SIZE = (
    512  # up to which plain attention in bfloat16 clearly beats the fused kernel on a CPU
)
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


@dataclass
class Hardware:
    device: torch.device
    dtype: torch.dtype
    name: str  # what the device calls itself
    peak_tflops: float | None  # dense, for `dtype`; None: unknown

    def autocast(self) -> contextlib.AbstractContextManager:
        """The forward pass runs its matrix products in `dtype` inside this."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """
        float16 gradients underflow unless the loss is scaled; for other dtypes the scaler passes
        everything through.
        """
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).synchronize()

    def peak_memory_gib(self) -> float | None:
        """
        The most memory in use so far, GiB: the allocator's on CUDA, the process's on the CPU, None
        where unknown. On MPS what is in use now.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / GIB
        if (
            sys.platform == "linux"
        ):  # not ru_maxrss, which begins with what the parent process had in use
            peak = re.search(
                r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()
            )  # a sandbox may leave it out
            return int(peak[1]) * 1024 / GIB if peak else None
        if sys.platform == "darwin":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
        return None

    def usable_bytes(self) -> float:
        """
        Device memory that this process has or could still get, bytes: on CUDA what others leave,
        else infinite.
        """
        if self.device.type != "cuda":
            return float("inf")
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)

    def energy_kwh(self) -> float | None:
        """
        What this GPU has used since its driver was loaded, kWh: NVML counts it from Volta on. None
        where it does not.
        """
        if self.device.type != "cuda":
            return None
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        # the index is another's where devices are hidden
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        try:
            nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
            failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(
                uuid.encode(), ctypes.byref(handle)
            )
            failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(
                handle, ctypes.byref(millijoules)
            )
        except (OSError, AttributeError):  # no such library, or an older one
            return None
        return None if failed else millijoules.value / 3.6e9

    def mfu(self, flops_per_token: int, tokens_per_sec: float, devices: int = 1) -> float | None:
        """Model FLOPs utilisation as a fraction; not clamped; None where the peak is unknown."""
        return (
            flops_per_token * tokens_per_sec / (self.peak_tflops * 1e12 * devices)
            if self.peak_tflops
            else None
        )


def check_device(config: Config) -> list[str]:
    """What is wrong with config.device and config.dtype on this machine (for load_config)."""
    try:
        device = torch.device("cpu" if config.device == "auto" else config.device)
        known = device.type in ("cuda", "mps", "cpu")
    except RuntimeError:
        known = False
    if not known:
        return [f"device: {config.device!r} is none of auto, cuda, cuda:N, mps, cpu"]
    if device.type == "cuda" and not torch.cuda.is_available():
        return [
            f"device: {config.device} asked for, but torch {torch.__version__} sees no CUDA GPU; --device=cpu"
        ]
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return [
            f"device: there is no {config.device}; the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        ]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return ["device: mps asked for, but this is no Mac with Metal; --device=cpu"]
    return []


def choose_device(config: Config) -> torch.device:
    return torch.device(config.device if config.device != "auto" else best_device())


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    return getattr(torch, config.dtype) if config.dtype != "auto" else best_dtype(device)


def set_up(config: Config, local_rank: int = 0, keep_memory: bool = True) -> Hardware:
    """
    Choose device and dtype, set torch's switches for them, and look up the peak. Each local rank
    has its own GPU; on a CPU freed memory is kept, unless the system's own handling is wanted.
    """
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(
            device if device.index is not None else torch.device("cuda", local_rank)
        )
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu" and keep_memory:
        keep_freed_memory()
    dtype = choose_dtype(config, device)
    # TF32 keeps fp32's range with 10 bits of mantissa; without this, fp32 matrix products leave the
    # tensor cores idle
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with fixed workspaces
        torch.use_deterministic_algorithms(True)
    if dtype == torch.float16 and device.type == "cpu":
        warn("float16 on the CPU is emulated and very slow; --dtype=float32 or bfloat16")
    if dtype == torch.bfloat16 and device.type == "cuda" and best_dtype(device) != dtype:
        warn("this GPU only emulates bfloat16, many times slower; --dtype=float16")
    peak = config.peak_tflops or find_peak(device, dtype, config.tf32)
    return Hardware(device, dtype, device_name(device), peak)


def keep_freed_memory() -> None:
    """
    glibc's malloc gives freed blocks above 32 MB back to the system, and touching new pages takes
    up to half of a CPU step; after this it keeps them (mallopt(3); the constants are those of
    malloc.h).
    """
    if platform.libc_ver()[0] == "glibc":
        libc, M_TRIM_THRESHOLD, M_MMAP_MAX = ctypes.CDLL(None), -1, -4
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: torch.device) -> torch.dtype:
    """
    bfloat16 where the hardware computes in it; a T4 claims support, but emulates (nanoGPT #525).
    """
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    if device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return torch.bfloat16
    return torch.float32


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The random states that dropout draws on. No wait for the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type])


def find_peak(device: torch.device, dtype: torch.dtype, tf32: bool) -> float | None:
    """This device's dense peak for `dtype` in TFLOP/s; None where it is not known for sure."""
    if device.type != "cuda":
        return None
    row = find_row(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )
    return row_peak(row, dtype, tf32) if row else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """
    In any of its forms: torch's own error, cuBLAS's or Triton's, the system's, or one inside what
    torch.compile raises.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            words in text for words in OUT_OF_MEMORY
        ):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def speed_hints(config: Config, vocab_size: int, hw: Hardware) -> list[str]:
    """
    One line for each setting that costs speed on this device: sizes that keep matrix products off
    full tensor-core tiles (NVIDIA's matrix multiplication guide), the fused attention where plain
    products beat it (results/README.md).
    """
    if hw.device.type == "cpu":
        slow = config.flash and hw.dtype == torch.bfloat16 and config.block_size <= PLAIN_BLOCK_SIZE
        return ["hint: with so short a context --flash=False is faster on a CPU"] * slow
    sizes = (
        ("n_embd", config.n_embd, 64),
        ("n_embd / n_head, the head size,", config.n_embd // config.n_head, 8),
        ("the padded vocabulary", vocab_size, 64),
    )
    return [
        f"hint: {what} is {size}, no multiple of {multiple}; tensor cores run it slower"
        for what, size, multiple in sizes
        if size % multiple
    ]
