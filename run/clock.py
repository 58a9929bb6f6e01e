"""
Accounts for wall-clock time.

The clock books each second to one category. From these seconds it counts the hours that a run has
trained: with --hours, train.py sets the learning rate and ends the run by them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import datetime

PAUSES = ("evaluation", "samples", "checkpoints")  # between iterations
CATEGORIES = ("start-up", "compile", "steps", *PAUSES)


class Clock:
    """
    Keeps a ledger in which each second belongs to one category. Evaluations, checkpoints and
    compilation therefore never count as iteration time. A resumed run continues the ledger of its
    checkpoint, which lacks the seconds of that save and of all that followed it. Every rank keeps
    its own ledger; only rank 0's clock decides the learning rate, and when a run saves and stops.
    """

    def __init__(self, began: float, synchronize: Callable, ledger: dict[str, float]):
        """
        Continue the ledger of the run's checkpoint, or start one if it is {}. `began` is
        time.perf_counter() when main() began; `synchronize` waits for the device.
        """
        self.synchronize = synchronize
        self.seconds = dict.fromkeys(CATEGORIES, 0.0) | ledger
        self.lapped_at = began  # every second before this moment is in the ledger
        self.save_timer_began = began

    # -------------------------------------------------------------------------
    # Questions. None of them changes the clock.

    def since_lap(self) -> float:
        """Return the seconds since the last lap, which are not yet booked to any category."""
        return time.perf_counter() - self.lapped_at

    def hours(self) -> float:
        """Return the training_hours() of all launches, the time since the last lap included."""
        return training_hours(self.seconds) + self.since_lap() / 3600

    def read(self) -> tuple[float, float]:
        """
        Return hours(), and the seconds since the last save, or since the start-up. Rank 0's clock
        must decide for all ranks: if each asked its own, they would soon wait for each other
        forever.
        """
        return self.hours(), time.perf_counter() - self.save_timer_began

    # -------------------------------------------------------------------------
    # Changes

    def lap(self, category: str) -> None:
        """Wait for the device, and book the time since the last lap."""
        self.synchronize()
        now = time.perf_counter()
        self.seconds[category] += now - self.lapped_at
        self.lapped_at = now
        if category in ("start-up", "checkpoints"):
            self.save_timer_began = now

    @contextlib.contextmanager
    def pause(self, category: str, before: str = "steps") -> Iterator[None]:
        """Book the seconds until this block to `before`, and the block's own to `category`."""
        self.lap(before)
        yield
        self.lap(category)


def training_hours(ledger: dict[str, float]) -> float:
    """Return the hours in a ledger that count for --hours: no start-up and no compilation."""
    return sum(ledger.get(name, 0.0) for name in ("steps", *PAUSES)) / 3600


def clock_time(seconds: float) -> str:
    """Return the time of day `seconds` from now, as in 07:00 UTC, with the date if not today."""
    today = datetime.now().date()
    end = datetime.fromtimestamp(time.time() + max(0.0, seconds) + 30)  # rounded to a minute
    date = "" if end.date() == today else f" on {end:%Y-%m-%d}"
    return f"{end:%H:%M} {end.astimezone():%Z}{date}"
