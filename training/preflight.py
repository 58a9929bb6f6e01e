"""
Check before a run whether it can train on this machine, and suggest a fix if it cannot.
"""

import re
import sys

import torch

from common.console import COMMAND, UserError, warn
from configurator import Config
from training.hardware import choose_device, emulates_bfloat16

CPU_TOKENS = 100_000  # tokens per iteration above which device=auto refuses to train on a CPU
# `+cu130` makes pip replace a CPU build of the same version too
CUDA_BUILD = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"


def check_device(config: Config) -> None:
    """
    Raise UserError if this machine cannot train with the configured device and dtype.
    """
    wanted = config.device
    if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]{1,2})?", wanted):
        raise UserError(f"device: {wanted!r} is not one of auto, cuda, cuda:N, mps, cpu")
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs"
        anyway = "--device=cpu trains without one"
        raise UserError(f"device: {wanted}, but {seen} ({anyway}); {cuda_hint()}")
    device = choose_device(config, local_rank=0)
    if device.type == "cuda" and not has_kernels(device):
        name = torch.cuda.get_device_name(device)
        code = f"torch {torch.__version__} has code for {' '.join(torch.cuda.get_arch_list())} only"
        build = "an old GPU needs a torch built for CUDA 12.6, a new one needs a newer torch"
        raise UserError(f"device: a {name} cannot run this torch: {code}; {build}")
    if config.dtype == "bfloat16" and emulates_bfloat16(device):
        hint = "use --dtype=float16"
        raise UserError(f"dtype: this GPU only emulates bfloat16, and slowly; {hint}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: torch finds no Metal for mps here; use --device=cpu")


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


def check_gpu(config: Config) -> None:
    """
    Raise UserError if a run for a GPU would train on the CPU because torch sees no GPU. Warn if a
    small run uses the CPU because the GPU's driver is too old.
    """
    if config.device != "auto" or choose_device(config, local_rank=0).type != "cpu":
        return
    if config.iter_tokens > CPU_TOKENS and not config.eval_only:
        tokens = f"{config.iter_tokens:,} tokens per iteration are too many for a CPU"
        anyway = "--device=cpu trains anyway"
        raise UserError(f"device: torch sees no GPU, and {tokens} ({anyway}); {cuda_hint()}")
    if hint := old_driver():
        warn(f"device: this runs on the CPU, very slowly, because torch sees no GPU; {hint}")


def cuda_hint() -> str:
    """Suggest a fix if torch sees no GPU. On Windows, PyPI's torch has no CUDA."""
    if not (torch.version.cuda or torch.version.hip or sys.platform == "darwin"):
        return f"this torch has no CUDA; install one that has{COMMAND}{CUDA_BUILD}"
    return old_driver() or "check the driver with nvidia-smi"


def old_driver() -> str:
    """Return torch's words if NVIDIA's driver is too old for this torch to see the GPU, else ""."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: this torch has no CUDA
        return str(error) if "too old" in str(error) else ""
    return ""
