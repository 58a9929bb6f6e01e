"""
Set the environment variables that libraries read as they load. Scripts import this module first. A
variable that the user has set keeps its value. hardware.set_up() sets two more, which depend on the
configuration.
"""

import importlib.metadata
import os
import platform
import sys


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version without importing it, or (0, 0) if it is missing."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


WINDOWS = sys.platform == "win32"
WSL = "microsoft" in platform.release().lower()
HAS_SEGMENTS = sys.platform == "linux" and not WSL and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ

# Each variable's reason, name and value; None leaves it unset
VARIABLES = {
    # How often a waiting CPU thread spins before it sleeps, about 0.1 ms in all; libgomp's default
    # is 300,000. On idle cores this costs 2% to 9% of the speed; if other programs start later,
    # training is 1.06 to 3.0 times as fast (results/README.md).
    "GOMP_SPINCOUNT": "10000" if sys.platform == "linux" else None,
    # Most Windows users may not create symbolic links, and the hub's library would warn at length.
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    # writer.py already uses threads. If the library did too, it would warn at every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # On Windows a path may have at most 260 characters.
    "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "0" if WINDOWS else None,
    # Otherwise Intel's runtime, part of some numpy builds, kills the process on Ctrl-C.
    "FOR_DISABLE_CONSOLE_CTRL_HANDLER": "1" if WINDOWS else None,
    # In torch 2.10 to 2.14, compiled code may lose norm gradients on a GPU (pytorch #193061).
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0" if (2, 10) <= torch_version() < (2, 15) else None,
    # Expandable segments reduce fragmentation, so larger batches fit. They stay off under WSL,
    # where NVIDIA's driver may crash on them (pytorch #192330), and if the old name is set.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True" if HAS_SEGMENTS else None,
}

for name, value in VARIABLES.items():
    if value:
        os.environ.setdefault(name, value)
