"""
Check how torch's threads wait for one another.

libgomp itself reports how it waits: with OMP_DISPLAY_ENV it prints its settings when torch is
imported.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from cases import slow_but
from program import finish, start

from common import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's on Linux")
SPINS, SLEEPS = dict(GOMP_SPINCOUNT="10000"), dict(OMP_WAIT_POLICY="passive")
# threads that run, CPUs, CPUs to a core, the user's variables; the variables afterwards
DECISIONS = [
    (1, 2, 1, {}, SPINS),  # this program alone
    (2, 2, 1, {}, SLEEPS),  # another program keeps one CPU busy
    (9, 16, 2, {}, SPINS),  # 8 threads on 8 cores, and 8 other programs find a place
    (10, 16, 2, {}, SLEEPS),
    (40, 1, 1, {}, SPINS),  # a single thread waits for nobody
    (3, 4, 1, dict(OMP_NUM_THREADS="2"), SPINS | dict(OMP_NUM_THREADS="2")),
    (4, 2, 1, dict(GOMP_SPINCOUNT="77"), dict(GOMP_SPINCOUNT="77")),
    (4, 2, 1, dict(OMP_WAIT_POLICY="active"), dict(OMP_WAIT_POLICY="active")),
]


@pytest.mark.parametrize("running, cpus, per_core, given, found", DECISIONS)
def test_idle_threads_sleep_instead_of_spinning_if_other_programs_need_their_cores(
    running, cpus, per_core, given, found, monkeypatch
):
    def read_text(path, *rest, read=Path.read_text, **named) -> str:
        if path == Path("/proc/loadavg"):
            return f"9.00 9.00 9.00 {running}/400 77\n"
        if path.name != "siblings":
            return read(path, *rest, **named)
        return str(int(path.parent.name.removeprefix("cpu")) // per_core)

    monkeypatch.setattr(os, "environ", {"HOME": "/home/user"} | given)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    files = [Path(f"cpu{n}/siblings") for n in range(cpus)]
    monkeypatch.setattr(Path, "glob", lambda path, pattern: files)
    monkeypatch.setattr(Path, "read_text", read_text)
    runpy.run_path(environment.__file__)
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    assert {name: os.environ[name] for name in names if name in os.environ} == found


@pytest.mark.parametrize("script", slow_but("train.py", of=["train.py", "sample.py", "bench.py"]))
def test_every_script_that_trains_or_samples_sets_how_torchs_threads_wait(script, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    ended = finish(start(script, "--help", cold=True, OMP_DISPLAY_ENV="verbose"))
    assert ended.code == 0
    assert re.findall("GOMP_SPINCOUNT = '(.*)'", ended.err) == ["10000"]
