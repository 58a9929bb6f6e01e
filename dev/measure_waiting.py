"""
Measure what waiting in torch's OpenMP threads costs, on idle cores and beside busy loops.

Starts one run of train.py for each setting beside the same number of loops, so that the run itself
decides how to wait, and stops all but one at any time (SIGSTOP). The runs take turns of a few
seconds, so that all of them meet the same conditions. Linux only. Without further flags it measures
the quickstart and a small GPT-2, which takes about half an hour:

    python dev/measure_waiting.py OUT.json

Settings are variables, or "default" for what common/environment.py chooses:

    python dev/measure_waiting.py OUT.json --run=config/quickstart.py --loops 0 1 \\
        --settings default "GOMP_SPINCOUNT=5000 OMP_NUM_THREADS=2"
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[1]
SECONDS, LEAST_ITERATIONS, MOST_SECONDS = 1.8, 4, 10
LOOPS = (0, 1, 3)
RUNS = ("config/quickstart.py", "dev/small_gpt2.py")
SETTINGS = (
    "default",
    "GOMP_SPINCOUNT=10000",  # the default where loops start after the run
    "GOMP_SPINCOUNT=300000",  # as libgomp is shipped
    "OMP_WAIT_POLICY=passive",
    "OMP_NUM_THREADS=1",
)
OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")  # variables of this process's user


class Trial:
    """Holds a run of train.py under one setting, stopped except while it is measured."""

    def __init__(self, run: str, setting: str, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OWN}
        if setting != "default":
            environment |= dict(pair.split("=", 1) for pair in setting.split())
        self.metrics = folder / "metrics.jsonl"
        command = [sys.executable, "train.py", *shlex.split(run), f"--out_dir={folder}"]
        command += ["--max_iters=100000", "--log_interval=1", "--eval_interval=100000"]
        command += ["--eval_tokens=2048"]
        self.process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL
        )
        while len(self.iterations()) < LEAST_ITERATIONS:
            time.sleep(0.1)
            if self.process.poll() is not None:
                raise SystemExit(f"failed: {shlex.join(command)}")
        self.process.send_signal(signal.SIGSTOP)
        log = (folder / "log.txt").read_text()
        (self.device,) = [line for line in log.splitlines() if line.startswith("device: ")]

    def iterations(self) -> list[float]:
        """Return the milliseconds of each iteration so far."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().split("\n")[:-1]
        return [r["step_ms"] for r in map(json.loads, lines) if r["kind"] == "step"]

    def cpu_ms(self) -> float:
        """Return the process's CPU milliseconds so far, user and system."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return 1000 * (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self) -> tuple[float, float]:
        """Continue the run for a while. Returns the mean milliseconds and CPU ms per iteration."""
        seen = len(self.iterations())
        self.process.send_signal(signal.SIGCONT)
        while len(self.iterations()) == seen:  # skip the iteration that SIGSTOP interrupted
            time.sleep(0.02)
        first, cpu, begun = len(self.iterations()), self.cpu_ms(), time.perf_counter()
        while (seconds := time.perf_counter() - begun) < MOST_SECONDS:
            done = self.iterations()[first:]
            if seconds >= SECONDS and len(done) >= LEAST_ITERATIONS:
                break
            time.sleep(0.05)
        cpu = self.cpu_ms() - cpu
        self.process.send_signal(signal.SIGSTOP)
        # If no iteration ended, one takes at least as long as we waited.
        return (sum(done) / len(done), cpu / len(done)) if done else (1000 * seconds, cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--run", action="append", help="files and flags; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loops", type=int, nargs="*", default=LOOPS)
    args = parser.parse_args()
    rows = []
    for run, n in itertools.product(args.run or RUNS, args.loops):
        children: list[subprocess.Popen] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                endless = [sys.executable, "-c", "while True: pass"]
                children += [subprocess.Popen(endless) for _ in range(n)]
                trials = {}
                for place, setting in enumerate(args.settings):
                    trials[setting] = Trial(run, setting, Path(folder, str(place)))
                    children.append(trials[setting].process)
                figures = {setting: [] for setting in args.settings}
                for round_ in range(args.rounds):
                    for setting in args.settings if round_ % 2 == 0 else args.settings[::-1]:
                        figures[setting].append(trials[setting].measure())
        finally:
            for child in children:
                child.kill()
                child.wait()
        for setting, pairs in figures.items():
            row = dict(run=run, loops=n, setting=setting, device=trials[setting].device)
            for place, key in enumerate(("ms", "cpu_ms")):
                row[key] = [round(pair[place], 1) for pair in pairs]
                row[f"median_{key}"] = median(row[key])
            rows.append(row)
            print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
