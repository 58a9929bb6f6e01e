"""
Run train.py for bench.py, in a process that ends when bench.py does. Before each iteration it
writes the CPU seconds used so far to a file beside CONFIG.py. Two flags slow the run down for rows
of the ladder, and bench.py can ask for a profile of one iteration.

    python reports/bench_child.py [--host_sync] [--read_late] CONFIG.py
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
from data.loader import Batches
from model_fast import build_model

CPU_SECONDS = "cpu_seconds"  # the file's name
PROFILE_HEADING = "profile of one iteration:"
PROFILE_ROWS = 20


class LateBatches(Batches):
    """Reads each micro-batch only when it is needed, instead of ahead in a thread."""

    def read_ahead(self, first: int) -> None:
        pass

    def ready(self, count: int) -> bool:
        while len(self.blocks) < count:
            first = self.consumed + self.rank * self.batch_size
            self.blocks.append(self.load(first + len(self.blocks) * self.stride))
        return True


def wait_before_each_micro_step(build_model):
    """Wrap build_model() so that the model waits for the device before each forward pass."""

    def build(config):
        def wait(module, arguments) -> None:
            device = next(module.parameters()).device
            getattr(torch, device.type).synchronize()

        model = build_model(config)
        model.register_forward_pre_hook(wait)
        return model

    return build


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


def main(build_model=build_model) -> None:
    parser = Parser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--host_sync", action="store_true")
    parser.add_argument("--read_late", action="store_true")
    options = parser.parse_args()
    step = WatchedStep(train.train_step, options.config.with_name(CPU_SECONDS))
    end_with_parent(step.ask_for_profile)
    if options.host_sync:
        build_model = wait_before_each_micro_step(build_model)
    argv = [str(options.config)]

    def run(_: list[str]) -> int:
        batches = LateBatches if options.read_late else Batches
        return train.main(argv, build_model=build_model, make_batches=batches, train_step=step)

    run_main(run, lambda error, _: train.explain(error, argv))


if __name__ == "__main__":
    main()
