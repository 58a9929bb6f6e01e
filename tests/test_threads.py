"""
Check how torch's threads wait for one another.

libgomp itself reports how it waits: with OMP_DISPLAY_ENV it prints its settings when torch is
imported.
"""

import os
import re
import subprocess
import sys

import pytest
from cases import slow_but
from program import ROOT, train, write_tokens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's on Linux")
TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    batch_size=2,
    block_size=16,
    gradient_accumulation_steps=1,
    eval_interval=2,
    eval_tokens=64,
    device="cpu",
    dtype="float32",
    compile=False,
)
# Imports common.environment on a pretended machine: `cpus` CPUs, `per_core` of them to a core, and
# `running` threads that run on them.
DECIDE = """
import os, pathlib, sys
running, cpus, per_core = map(int, sys.argv[1:])
def read_text(path, *arguments, read=pathlib.Path.read_text, **options):
    if str(path) == "/proc/loadavg":
        return f"9.00 9.00 9.00 {running}/400 77\\n"
    if path.name != "siblings":
        return read(path, *arguments, **options)
    return str(int(path.parts[-3].removeprefix("cpu")) // per_core)
pathlib.Path.read_text = read_text
pathlib.Path.glob = lambda path, _: [path / f"cpu{n}/topology/siblings" for n in range(cpus)]
os.cpu_count = lambda: cpus
import common.environment
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""
SPINS, PASSIVE = "None 10000", "passive None"


def environment(**ours: str) -> dict[str, str]:
    """
    Return this process's variables without those about the number of threads or how they wait.
    """
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in names} | ours


def decide(*arguments: int, **variables: str) -> str:
    command = [sys.executable, "-c", DECIDE, *map(str, arguments)]
    kept = environment(**variables)
    return subprocess.check_output(command, cwd=ROOT, env=kept, text=True).strip()


@pytest.mark.parametrize(
    "running, cpus, per_core, decision",
    [
        (1, 2, 1, SPINS),  # this program alone
        (2, 2, 1, PASSIVE),  # beside one loop
        (4, 2, 1, PASSIVE),
        (9, 16, 2, SPINS),  # 8 threads on 8 cores, and 8 other programs find a place
        (10, 16, 2, PASSIVE),
        (40, 1, 1, SPINS),  # a single thread waits for nobody
    ],
)
def test_idle_threads_sleep_instead_of_spinning_if_other_programs_need_their_cores(
    running, cpus, per_core, decision
):
    assert decide(running, cpus, per_core) == decision


def test_idle_threads_may_spin_if_omp_num_threads_leaves_cores_to_other_programs():
    assert decide(3, 4, 1) == PASSIVE
    assert decide(3, 4, 1, OMP_NUM_THREADS="2") == SPINS


def test_the_users_omp_wait_policy_and_gomp_spincount_are_kept():
    assert decide(1, 2, 1, GOMP_SPINCOUNT="77") == "None 77"
    assert decide(4, 2, 1, GOMP_SPINCOUNT="77") == "None 77"
    assert decide(4, 2, 1, OMP_WAIT_POLICY="active") == "active None"


@pytest.mark.parametrize("script", slow_but("train.py", of=["train.py", "sample.py", "bench.py"]))
def test_every_script_that_trains_or_samples_sets_how_torchs_threads_wait(script):
    variables = dict(OMP_DISPLAY_ENV="verbose", OMP_NUM_THREADS="1")
    kept = environment(**variables)
    command = [sys.executable, script, "--help"]
    ended = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert ended.returncode == 0
    assert re.findall("GOMP_SPINCOUNT = '(.*)'", ended.stderr) == ["10000"]


@pytest.mark.parametrize("policy, said", [("passive", True), ("active", False)])
def test_the_device_line_says_if_idle_threads_sleep(policy, said, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    dataset = write_tokens(tmp_path / "tokens", [900], [150])
    result = train(**TINY, max_iters=1, dataset=dataset, out_dir=tmp_path / "run")
    (device,) = re.findall("^device: .*$", result.out, re.MULTILINE)
    assert ("threads sleep" in device) is said
