"""
Run train.py for bench.py, in a process that ends when bench.py does. Before each iteration it
writes the CPU seconds used so far to a file beside CONFIG.py. If bench.py asks for a profile, it
profiles one iteration and ends.

    python reports/bench_child.py CONFIG.py
"""

import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    # Import from the repository's root. Python put reports/ here.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

import train
from common.child import end_with_parent
from common.console import Parser, run_main, say

CPU_SECONDS = "cpu_seconds"  # the file's name
PROFILE_HEADING = "profile of one iteration:"
PROFILE_ROWS = 20


class WatchedStep:
    """
    Calls train.py's train_step() and records CPU seconds. Once a trace is asked for, it profiles
    the next iteration, prints a table, writes the trace and ends the process.
    """

    def __init__(self, train_step, cpu_seconds: Path):
        self.train_step = train_step
        self.cpu_seconds = open(cpu_seconds, "w", buffering=1)  # flush each line: bench.py kills us
        self.asked = threading.Event()
        self.trace = ""

    def ask_for_profile(self, line: str) -> None:
        self.trace = line.rstrip("\n")
        self.asked.set()

    def __call__(self, *arguments):
        self.cpu_seconds.write(f"{time.process_time()}\n")
        if not self.asked.is_set():
            return self.train_step(*arguments)
        with torch.profiler.profile() as profiler:
            _, grad_norm = self.train_step(*arguments)
            grad_norm.item()  # waits for the device
        profiler.export_chrome_trace(self.trace)
        order = "self_cuda_time_total" if grad_norm.is_cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=PROFILE_ROWS)
        say(PROFILE_HEADING, *table.splitlines())
        sys.exit(0)


def main() -> None:
    parser = Parser()
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    step = WatchedStep(train.train_step, config.with_name(CPU_SECONDS))
    end_with_parent(step.ask_for_profile)
    run_main(lambda argv: train.main(argv, train_step=step), train.explain)


if __name__ == "__main__":
    main()
