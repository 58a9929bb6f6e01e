"""
loss.png, drawn by a separate process, so that a failure there cannot hurt the run.
"""

import subprocess
import time
from pathlib import Path

from common.child import start_child
from common.console import warn

PROJECT = Path(__file__).resolve().parent.parent
DRAW_EVERY = 60.0  # seconds
SHORTEST_RUN = 20.0  # seconds; shorter runs are not drawn
PATIENCE = 20.0  # seconds to wait for a picture at the end of a run


class Drawing:
    """Starts processes that draw: one at a time, and none outlives the run."""

    def __init__(self, out_dir: Path):
        self.out_dir, self.failed = out_dir, False
        self.process: subprocess.Popen | None = None
        self.due = time.monotonic() + DRAW_EVERY

    def draw_if_due(self) -> None:
        """Start drawing the run so far, at most once per DRAW_EVERY."""
        if time.monotonic() >= self.due and self.wait(0.0):
            self.begin()

    def draw_end(self, run_seconds: float) -> None:
        """Draw the whole run, which has lasted `run_seconds` in all of its launches."""
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
        """Wait up to `seconds` for the picture being drawn. Returns whether another may start."""
        try:
            if not self.failed and self.process and self.process.wait(seconds) != 0:
                self.fail()
        except subprocess.TimeoutExpired:
            return False
        return not self.failed

    def fail(self) -> None:
        self.failed = True
        warn(f"loss.png is no longer drawn; python compare.py {self.out_dir} draws it, or says why")
