"""
loss.png, drawn beside the run by a process of its own: what goes wrong there does not hurt the run.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from common.console import warn

PROJECT = Path(__file__).resolve().parent.parent
DRAW_EVERY = 60.0  # seconds; a fiftieth of the run's time where that is longer
SHORTEST_RUN = 20.0  # seconds; a run that ends sooner is not drawn
PATIENCE = 20.0  # seconds that the end of a run waits for a picture


class Drawing:
    """Starts the process that draws: one at a time, and none that outlives the run."""

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        self.process: subprocess.Popen | None = None
        self.due = time.monotonic() + DRAW_EVERY
        self.can_draw = importlib.util.find_spec("matplotlib") is not None  # without importing it
        if not self.can_draw:
            warn("no loss.png: matplotlib is missing (pip install matplotlib)")

    def draw_if_due(self, run_seconds: float) -> None:
        """Begin a picture of the run so far, which has lasted so long in all of its starts."""
        if time.monotonic() >= self.due and self.wait(0.0):
            self.begin()
            self.due = time.monotonic() + max(DRAW_EVERY, run_seconds / 50)

    def draw_end(self, run_seconds: float) -> None:
        """Draw all of the run, after its last record."""
        is_over = self.wait(PATIENCE)
        if is_over and run_seconds >= SHORTEST_RUN:
            self.begin()
            is_over = self.wait(PATIENCE)
        if not is_over:
            self.process.kill()
            self.fail()

    def begin(self) -> None:
        if not self.can_draw:
            return
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "reports.picture", self.out_dir.resolve()],
                cwd=PROJECT,
                stdin=subprocess.PIPE,  # it closes when the run ends, however that does
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the run alone
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # on Windows
            )
        except OSError:
            self.fail()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the process to end. Returns whether none draws any more."""
        if self.process:
            try:
                failed = self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self.process = None
            if failed:
                self.fail()
        return True

    def fail(self) -> None:
        self.can_draw = False
        warn(f"loss.png is no longer drawn; python compare.py {self.out_dir} draws it, or says why")
