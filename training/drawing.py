"""
loss.png, drawn beside the run by a process of its own: what goes wrong there does not hurt the run.
"""

import subprocess
import time
from pathlib import Path

from common.child import start_child
from common.console import warn

PROJECT = Path(__file__).resolve().parent.parent
DRAW_EVERY = 60.0  # seconds
SHORTEST_RUN = 20.0  # seconds; a run that ends sooner is not drawn
PATIENCE = 20.0  # seconds that the end of a run waits for a picture


class Drawing:
    """Starts the process that draws: one at a time, and none that outlives the run."""

    def __init__(self, out_dir: Path):
        self.out_dir, self.failed = out_dir, False
        self.process: subprocess.Popen | None = None
        self.due = time.monotonic() + DRAW_EVERY

    def draw_if_due(self) -> None:
        """Begin a picture of the run so far."""
        if time.monotonic() >= self.due and self.wait(0.0):
            self.begin()

    def draw_end(self, run_seconds: float) -> None:
        """Draw all of the run, which has lasted so long in all of its starts."""
        until = time.monotonic() + PATIENCE
        can_draw = self.wait(PATIENCE)
        if can_draw and run_seconds >= SHORTEST_RUN:
            self.begin()
            can_draw = self.wait(until - time.monotonic())
        if self.process and not can_draw and not self.failed:
            self.process.kill()
            self.fail()

    def begin(self) -> None:
        self.due = time.monotonic() + DRAW_EVERY
        command = ("-m", "reports.picture", self.out_dir.resolve())
        try:
            self.process = start_child(*command, cwd=PROJECT, stderr=subprocess.DEVNULL)
        except OSError:
            self.fail()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the picture begun before. Returns whether another may be."""
        try:
            if not self.failed and self.process and self.process.wait(seconds) != 0:
                self.fail()
        except subprocess.TimeoutExpired:
            return False
        return not self.failed

    def fail(self) -> None:
        self.failed = True
        warn(f"loss.png is no longer drawn; python compare.py {self.out_dir} draws it, or says why")
