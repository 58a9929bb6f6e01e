"""
Check before a run whether it can train on this machine, and suggest a fix if it cannot.
"""

import re
import sys

import torch

from common.console import COMMAND, UserError
from configurator import Config
from training.hardware import choose_device

CPU_TOKENS = 100_000  # tokens per iteration above which device=auto refuses to train on a CPU
# `+cu130` makes pip replace a CPU build of the same version too
CUDA_BUILD = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"


def check_device(config: Config) -> None:
    """Raise UserError if there is no such device."""
    wanted = config.device
    if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]{1,2})?", wanted):
        raise UserError(f"device: {wanted!r} is not one of auto, cuda, cuda:N, mps, cpu")
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs"
        anyway = "--device=cpu trains without one"
        raise UserError(f"device: {wanted}, but {seen} ({anyway}); {cuda_hint()}")


def check_gpu(config: Config) -> None:
    """Raise UserError if a run for a GPU would train on the CPU because torch sees no GPU."""
    if config.device != "auto" or choose_device(config, local_rank=0).type != "cpu":
        return
    if config.iter_tokens > CPU_TOKENS and not config.eval_only:
        tokens = f"{config.iter_tokens:,} tokens per iteration are too many for a CPU"
        anyway = "--device=cpu trains anyway"
        raise UserError(f"device: torch sees no GPU, and {tokens} ({anyway}); {cuda_hint()}")


def cuda_hint() -> str:
    """Suggest a fix if torch sees no GPU. On Windows, PyPI's torch has no CUDA."""
    if not (torch.version.cuda or torch.version.hip or sys.platform == "darwin"):
        return f"this torch has no CUDA; install one that has{COMMAND}{CUDA_BUILD}"
    return "check the driver with nvidia-smi"
