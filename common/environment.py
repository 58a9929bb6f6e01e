"""
Set the environment variables that libraries read as they load. Scripts import this module first. A
variable that the user has set keeps its value. hardware.set_up() sets two more, which depend on the
configuration.
"""

import os
import platform
import sys
import time
from pathlib import Path


def cores_are_taken() -> bool:
    """
    Return whether other programs now run on cores that this one's CPU threads will need. torch
    starts one thread per core. Linux only.
    """
    try:
        siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
        threads = int(os.environ.get("OMP_NUM_THREADS", len({p.read_text() for p in siblings})))
        others = []
        for _ in range(9):  # the load average would lag behind by a minute
            time.sleep(0.01)
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            others.append(int(running) - 1)  # without this thread
        return threads + sorted(others)[4] > (os.cpu_count() or 1)
    except (OSError, ValueError):  # a hardened container hides these files
        return False


WINDOWS = sys.platform == "win32"
WSL = "microsoft" in platform.release().lower()
SPINS = sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ
HAS_SEGMENTS = sys.platform == "linux" and not WSL and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ

# Each variable's reason, name and value; None leaves it unset
VARIABLES = {
    # A CPU thread that waits for the others spins before it sleeps: on idle cores that is faster,
    # but beside other programs it may occupy the core that the others need. So sleep at once if the
    # cores are taken, and otherwise after 10,000 spins, about 0.1 ms, instead of libgomp's 300,000
    # (results/README.md).
    "GOMP_SPINCOUNT": ("0" if cores_are_taken() else "10000") if SPINS else None,
    # Most Windows users may not create symbolic links, and the hub's library would warn at length.
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    # writer.py already uses threads. If the library did too, it would warn at every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # On Windows a path may have at most 260 characters.
    "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "0" if WINDOWS else None,
    # Otherwise Intel's runtime, part of some numpy builds, kills the process on Ctrl-C.
    "FOR_DISABLE_CONSOLE_CTRL_HANDLER": "1" if WINDOWS else None,
    # Before torch 2.15, compiled code may lose norm gradients on a GPU (pytorch #193061). Turning
    # this off costs about 1% of the speed, with later versions too.
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0",
    # Expandable segments reduce fragmentation, so larger batches fit. PyTorch for Windows has none.
    # They stay off under WSL, where NVIDIA's drivers before R615 may crash on them (pytorch
    # #192330), and if the old name is set.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True" if HAS_SEGMENTS else None,
}

for name, value in VARIABLES.items():
    if value:
        os.environ.setdefault(name, value)
