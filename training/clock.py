"""
Accounts for wall-clock time, and says where a run with --hours stands. Does not import torch.

The clock books each second to one category. From these seconds, and from the durations that
train.py expects, it computes how much of the schedule is done, whether the time is up, and whether
there is time for another evaluation or save. train.py acts on that.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from configurator import Config

PAUSES = ("evaluation", "samples", "checkpoints")  # between iterations
CATEGORIES = ("start-up", "compile", "steps", *PAUSES)
RESERVE = 0.01  # share of the time to reserve for an evaluation, sample or save not yet timed


@dataclass(frozen=True)
class Position:
    """Describes where a run stands between two iterations, relative to its time limits."""

    seconds_since_save: float  # since the last attempt to save, or since the launch
    # The rest is for runs with hours
    share: float = 0.0  # how much of the schedule is done: 0 at the first update, 1 at the last
    time_is_up: bool = False
    has_spare_time: bool = True  # for another evaluation, save and sample besides the final ones


@dataclass
class Speed:
    """Holds means over the iterations between two log lines."""

    iter_seconds: float  # includes waiting for data
    tokens_per_sec: float  # across all ranks
    mem_gib: float  # peak so far, on the rank that uses most; 0: unknown


class Clock:
    """
    Keeps a ledger in which each second of the run, across all launches, belongs to exactly one
    category. Evaluations, checkpoints and compilation therefore never count as iteration time. Time
    between launches is not counted. Every rank keeps its own ledger; only rank 0's clock decides
    when a run evaluates, saves and stops.
    """

    def __init__(self, began: float, synchronize: Callable, c: Config, resumed: dict | None, ranks):
        """
        Start the ledger, or continue the one in `resumed`, the checkpoint that a resumed run
        loads. `began` is time.perf_counter() at launch; `synchronize` waits for the device.
        """
        self.ranks = ranks
        self.synchronize = synchronize
        self.c = c
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        if resumed:
            self.seconds |= resumed["ledger"]
        self.lapped_at = began  # every second before this moment is in the ledger
        self.save_timer_began = began
        # The rest is for runs with hours
        saved = resumed["clock"] if resumed else {}
        # seconds used before the first iteration; None until begin_iterations()
        self.setup_seconds: float | None = saved.get("setup_seconds")
        # the share at the last update; position().share is the current one
        self.updated_share = saved.get("share", 0.0) if c.by_clock else 0.0
        # expected seconds of the next iteration and of each kind of pause
        self.estimates: dict[str, float] = dict(saved.get("estimates", {}))

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps besides the ledger."""
        return dict(
            share=self.updated_share,
            setup_seconds=self.setup_seconds,
            estimates=self.estimates,
        )

    # -------------------------------------------------------------------------
    # Questions. None of them changes the clock.

    def since_lap(self) -> float:
        """Return the seconds since the last lap, which are not yet booked to any category."""
        return time.perf_counter() - self.lapped_at

    def used(self) -> float:
        """Return the seconds that the run has used, across all launches."""
        return sum(self.seconds.values()) + self.since_lap()

    def training_hours(self) -> float:
        """Return the hours of iterations, evaluations and saves, across all launches."""
        return (self.used() - self.seconds["start-up"] - self.seconds["compile"]) / 3600

    def left(self) -> float:
        """Return the seconds until `hours` is reached; inf if it is not set."""
        return 3600 * self.c.hours - self.used() if self.c.hours else math.inf

    def position(self, it: int) -> Position:
        """
        Return where the run stands before iteration `it`, by rank 0's clock. Every rank must call
        this: if each asked its own clock, they would soon wait for each other forever.
        """
        return self.ranks.on_main(self.position_here, it)

    def position_here(self, it: int) -> Position:
        """
        Return where the run stands by this rank's clock. The share is the time so far divided by
        the time at which the final update is due, or it / max_iters if max_iters ends the run
        sooner. After that update there is room for an evaluation, a save and a sample, which are
        expected to take as long as the previous ones did, or 1% of the time each if there was none.
        """
        since_save = time.perf_counter() - self.save_timer_began
        if not self.c.by_clock:
            return Position(since_save)
        used, left = self.used(), self.left()
        reserve = RESERVE * (used + left)
        last = [name for name in PAUSES if name != "samples" or self.c.sample_tokens]
        closing = sum(self.estimates.get(name, reserve) for name in last)
        iteration = self.estimates.get("iteration", 0.0)
        past = used - (self.setup_seconds or 0.0)
        room = left - closing - iteration  # seconds until the last update must begin
        share = past / (past + room) if room > iteration else 1.0
        share = max(share, it / max(1, self.c.max_iters - 1))  # max_iters may end the run first
        # time is up only after an update at share 1, which brings the learning rate down to min_lr
        time_is_up = self.updated_share >= 1 and room < 0
        # twice: the final evaluation and save must still fit afterwards
        has_spare_time = left > 2 * (closing + iteration)
        return Position(since_save, share, time_is_up, has_spare_time)

    # -------------------------------------------------------------------------
    # Changes

    def lap(self, category: str) -> float:
        """Wait for the device, book the time since the last lap, and return it in seconds."""
        self.synchronize()
        now = time.perf_counter()
        seconds = now - self.lapped_at
        self.lapped_at = now
        self.seconds[category] += seconds
        if category == "checkpoints":  # a failed save too: the next try waits half a minute
            self.save_timer_began = now
        return seconds

    @contextlib.contextmanager
    def pause(self, category: str) -> Iterator[None]:
        """
        Book the seconds until this block to steps, and the block's own to `category`. Expect the
        next such pause to take as long.
        """
        self.lap("steps")
        try:
            yield
        finally:  # a signal may end an evaluation
            seconds = self.lap(category)
        self.expect(category, seconds)

    def begin_iterations(self, progress) -> None:
        """Measure speed from now on and, in a new run, the share. Takes a train.Progress."""
        self.last_line = (progress.iter_num, progress.tokens, self.seconds["steps"])
        if self.setup_seconds is None:
            self.setup_seconds = self.used()

    def lap_iterations(self, progress, mem_gib: float) -> Speed:
        """
        Book a lap of steps, and return the speed since the last call, as seen by the slowest rank.
        Evaluations and checkpoints do not lower the speed, because they are booked to other
        categories. Every rank must call this. `mem_gib` is this rank's peak memory.
        """
        self.lap("steps")
        line = (progress.iter_num, progress.tokens, self.seconds["steps"])
        iterations, trained, elapsed = (
            after - before for after, before in zip(line, self.last_line, strict=True)
        )
        self.last_line = line
        elapsed, mem_gib = self.ranks.max(elapsed, mem_gib)
        self.expect("iteration", elapsed / iterations)
        return Speed(elapsed / iterations, trained / elapsed, mem_gib)

    def advance(self, share: float) -> None:
        """Remember the share at which an update was made."""
        self.updated_share = share

    def expect(self, what: str, seconds: float) -> None:
        """
        Expect the next iteration or pause to take as long as the last one. `what` is "iteration"
        or one of PAUSES. An estimate at most doubles per call, so that a single hang does not end
        the run far too early.
        """
        before = self.estimates.get(what) or seconds
        self.estimates[what] = min(seconds, 2 * before)


def clock_time(seconds: float) -> str:
    """Return the time of day `seconds` from now, as in 07:00 UTC, with the date if not today."""
    today = datetime.now().date()
    end = datetime.fromtimestamp(time.time() + max(0.0, seconds) + 30)  # rounded to a minute
    date = "" if end.date() == today else f" on {end:%Y-%m-%d}"
    return f"{end:%H:%M} {end.astimezone():%Z}{date}"
