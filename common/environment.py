"""
Set the environment variables that libraries read as they load, and end a script with one line if
torch, numpy or tqdm is missing. Scripts import this module first. A variable that the user has set
keeps its value. hardware.set_up() sets two more, which depend on the configuration.
"""

import importlib.metadata
import os
import platform
import re
import sys
import time
from pathlib import Path

# How often a waiting thread spins before it sleeps, about 0.1 ms in all; libgomp's default is
# 300,000. On idle cores this costs 2% to 9% of the speed; if other programs start later, training
# is 1.06 to 3.0 times as fast (results/README.md).
SPINS = "10000"
READINGS, PAUSE = 9, 0.01  # how often to count running threads, and seconds between counts


def cores_are_taken() -> bool:
    """Return whether other programs run on cores that this one's threads will need. Linux only."""
    cpus = os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    cores = len({path.read_text() for path in siblings})  # torch starts one thread per core
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdecimal() else cores or cpus
    if threads == 1:  # a single thread never waits
        return False
    others = []
    for _ in range(READINGS):
        # the load average lags behind by a minute, and an installation has just raised it
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except OSError:  # a hardened container hides it
            return False
        others.append(int(running) - 1)  # without this thread
        time.sleep(PAUSE)
    return sorted(others)[READINGS // 2] > cpus - threads


def how_threads_wait() -> tuple[str | None, str | None]:
    """
    Choose libgomp's OMP_WAIT_POLICY and GOMP_SPINCOUNT. In each matmul or other operation, a thread
    that has finished its share first spins and then sleeps until the others have finished theirs.
    Spinning is faster on idle cores. Beside other programs, a spinning thread may occupy the core
    that the thread it waits for needs. No result depends on this, and a run on a GPU has no such
    operations in its loop.
    """
    if sys.platform != "linux" or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return None, None
    return ("passive", None) if cores_are_taken() else (None, SPINS)


def cache_folder() -> str | None:
    """
    Return a folder for compiled code in the home folder, or None where it would not work: a
    container may give its user no home, torch's compiler cannot use a path with a space or quote,
    and no compiled code runs from a disk mounted with noexec.
    """
    home = os.path.expanduser("~")
    if not os.access(home, os.W_OK) or re.search(r"[\s'\"]", home):
        return None
    if sys.platform == "linux" and os.statvfs(home).f_flag & os.ST_NOEXEC:
        return None
    return f"{home}/.cache/torchinductor"


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version without importing it, or (0, 0) if it is missing."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def explain_missing_package(kind: type, error: BaseException, trace) -> None:
    """
    Print one line if this Python lacks a package without which no script starts. Takes the place of
    sys.excepthook, so other errors keep their traceback.
    """
    name = getattr(error, "name", None)
    if kind is not ModuleNotFoundError or name not in ("torch", "numpy", "tqdm"):
        return sys.__excepthook__(kind, error, trace)
    ways = "activate the venv that has it, or begin the command with `uv run` instead of `python`"
    print(f"error: {name} is not installed for {sys.executable}; {ways}", file=sys.stderr)
    sys.exit(2)


sys.excepthook = explain_missing_package

WINDOWS = sys.platform == "win32"
WSL = "microsoft" in platform.release().lower()
HAS_SEGMENTS = sys.platform == "linux" and not WSL and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
POLICY, SPINNING = how_threads_wait()

# Each variable's reason, name and value; None leaves it unset
VARIABLES = {
    # Idle threads sleep at once if other programs need their cores, and
    # otherwise after a moment.
    "OMP_WAIT_POLICY": POLICY,
    "GOMP_SPINCOUNT": SPINNING,
    # Most Windows users may not create symbolic links, and the hub's library would warn at length.
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    # writer.py already uses threads. If the library did too, it would warn at every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # torch's default is in /tmp, which is emptied at reboot.
    "TORCHINDUCTOR_CACHE_DIR": cache_folder(),
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
