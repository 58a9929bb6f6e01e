"""
Choose how torch's CPU threads wait for one another. Import this before torch, whose OpenMP runtime
on Linux (libgomp) reads the two variables only once, as it loads.

In each matmul or other operation, a thread that has finished its share first spins and then sleeps
until the others have finished theirs. Spinning is faster on idle cores. Beside other programs it
can keep a core from the very thread that is waited for. No result depends on it, and a run on a GPU
has no such operations in its loop.
"""

import os
import sys
import time
from pathlib import Path

# About 0.1 ms; libgomp's own number is 300,000. On idle cores this costs 2% to 9% of the speed, and
# beside programs that start later training is 1.06 to 3.0 times as fast (results/README.md).
SPINS = 10_000
READINGS, PAUSE = 9, 0.01  # of the number of running threads, and the seconds between them


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


if sys.platform == "linux" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    if cores_are_taken():
        os.environ["OMP_WAIT_POLICY"] = "passive"  # idle threads sleep at once; log.py reports this
    else:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
