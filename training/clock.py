"""
Accounts for wall-clock time, and schedules runs with --hours or --until. Does not import torch.

The clock books each second to one category. The schedule combines the clock with the durations that
train.py reports. It computes how much of a run's time is over, whether its time is up, and whether
there is time for another evaluation or save. train.py acts on that.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from configurator import Config

CATEGORIES = ("start-up", "compile", "steps", "evaluation", "checkpoints")
RESERVE = 0.01  # share of the time to reserve for an evaluation or save not yet timed


class Clock:
    """
    Keeps a ledger in which each second of the run, across all launches, belongs to exactly one
    category. Evaluations, checkpoints and compilation therefore never count as iteration time. Time
    between launches is not counted.
    """

    def __init__(self, began: float, synchronize: Callable, resumed: dict | None):
        """
        Start the ledger, or continue the one in `resumed`, the checkpoint that a resumed run
        loads. `began` is time.perf_counter() at launch; `synchronize` waits for the device.
        """
        self.began = began
        self.synchronize = synchronize
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        if resumed:
            self.seconds |= resumed["ledger"]
        self.lapped_at = began  # every second before this moment is in the ledger
        self.booked_at = dict.fromkeys(CATEGORIES, began)  # when each category was booked last

    def lap(self, category: str) -> float:
        """Wait for the device, book the time since the last lap, and return it in seconds."""
        self.synchronize()
        now = time.perf_counter()
        seconds = now - self.lapped_at
        self.lapped_at = self.booked_at[category] = now
        self.seconds[category] += seconds
        return seconds

    def since_lap(self) -> float:
        """Return the seconds since the last lap, which are not yet booked to any category."""
        return time.perf_counter() - self.lapped_at

    def since(self, category: str) -> float:
        """Return the seconds since this category's last lap, or since the launch."""
        return time.perf_counter() - self.booked_at[category]

    def since_launch(self) -> float:
        """Return the seconds since this launch began."""
        return time.perf_counter() - self.began

    def used(self) -> float:
        """Return the seconds that the run has used, across all launches."""
        return sum(self.seconds.values()) + self.since_lap()

    def training_hours(self) -> float:
        """Return the hours of iterations, evaluations and saves, across all launches."""
        return (self.used() - self.seconds["start-up"] - self.seconds["compile"]) / 3600


@dataclass
class Speed:
    """Holds means over the iterations between two log lines."""

    iter_seconds: float  # includes waiting for data
    wait_seconds: float  # the part of iter_seconds spent waiting for data
    tokens_per_sec: float  # across all ranks
    mem_gib: float  # peak so far, on the rank that uses most; 0: unknown


class Speedometer:
    """
    Measures training speed between two log lines. Evaluations and checkpoints do not lower the
    speed, because the clock books them to other categories.
    """

    def __init__(self, clock: Clock, hw, iter_num: int, tokens: int):
        self.clock = clock
        self.hw = hw
        self.before = (iter_num, tokens, clock.seconds["steps"], 0.0)

    def read(self, iter_num: int, tokens: int, waited: float, ranks) -> Speed:
        """
        Return the speed since the last call, as seen by the slowest rank. Call this right after
        lap("steps"), on every rank. `iter_num`, `tokens` and `waited` (the seconds spent waiting
        for data) are running totals.
        """
        now = (iter_num, tokens, self.clock.seconds["steps"], waited)
        iterations, trained, elapsed, waited = (
            after - before for after, before in zip(now, self.before, strict=True)
        )
        self.before = now
        elapsed, waited, mem_gib = ranks.max(elapsed, waited, self.hw.peak_memory_gib() or 0.0)
        return Speed(elapsed / iterations, waited / iterations, trained / elapsed, mem_gib)


# -----------------------------------------------------------------------------
# Runs with a time limit


@dataclass
class Now:
    """Describes where a run stands between two iterations, relative to its time limits."""

    launch_minutes: float  # since this launch began
    seconds_since_save: float  # since the last attempt to save, or since the launch
    # The rest is for runs with hours or until. Other runs always have time to spare.
    share: float  # how much of the schedule is done: 0 at the first update, 1 at the last
    time_is_up: bool
    has_spare_time: bool  # for another evaluation or save besides the final ones


class Schedule:
    """
    Tracks how far a run with hours or until has come, and when it has to stop so that a final
    evaluation and save still fit. Resuming a run does not move its deadline (until).
    """

    def __init__(self, c: Config, clock: Clock, resumed: dict | None):
        self.c = c
        self.clock = clock
        saved = resumed["clock"] if resumed else {}
        # seconds used before the first iteration
        self.setup_seconds: float | None = saved.get("setup_seconds")
        self.deadline: float | None = None
        if c.until:
            self.deadline = next_time(c.until, since=time.time() - clock.since_launch())
            if saved.get("until") == c.until:  # if past, no time is left
                self.deadline = min(self.deadline, saved["deadline"])
        # the shares at the last look and at the one before
        self.share = self.last_share = saved.get("share", 0.0) if c.by_clock else 0.0
        # expected seconds of the next iteration, evaluation and save
        self.estimates: dict[str, float] = dict(saved.get("estimates", {}))

    def state_dict(self) -> dict:
        """Return the state that a checkpoint keeps."""
        return dict(
            share=self.last_share,
            setup_seconds=self.setup_seconds,
            until=self.c.until,
            deadline=self.deadline,
            estimates=self.estimates,
        )

    def expect(self, what: str, seconds: float) -> None:
        """
        Expect the next iteration, evaluation or save to take as long as the last one. `what` is
        "iteration", "evaluation" or "checkpoints". An estimate at most doubles per call, so that a
        single hang does not end the run far too early.
        """
        before = self.estimates.get(what) or seconds
        self.estimates[what] = min(seconds, 2 * before)

    def left(self) -> float:
        """Return the seconds until `hours` or `until` is reached; inf if neither is set."""
        if self.deadline is not None:
            return self.deadline - time.time()
        return 3600 * self.c.hours - self.clock.used() if self.c.hours else math.inf

    def look(self, it: int) -> Now:
        """Read the clock. Call this exactly once before each iteration `it`."""
        used = self.clock.used()
        if self.setup_seconds is None:
            self.setup_seconds = used
        self.last_share = self.share
        time_is_up = False
        has_spare_time = True
        if self.c.by_clock:
            left = self.left()
            reserve = RESERVE * (used + max(0.0, left))
            closing = sum(
                self.estimates.get(name, reserve) for name in ("evaluation", "checkpoints")
            )
            iteration = self.estimates.get("iteration", 0.0)
            past = used - self.setup_seconds
            room = left - closing - iteration  # seconds until the last update must begin
            self.share = past / (past + room) if room > iteration else 1.0
            # max_iters may end the run before the time is up
            self.share = max(self.share, it / max(1, self.c.max_iters - 1))
            time_is_up = self.last_share >= 1 and room < 0
            # twice: the final evaluation and save must still fit afterwards
            has_spare_time = left > 2 * (closing + iteration)
        return Now(
            launch_minutes=self.clock.since_launch() / 60,
            seconds_since_save=self.clock.since("checkpoints"),
            share=self.share,
            time_is_up=time_is_up,
            has_spare_time=has_spare_time,
        )


def clock_time(seconds: float) -> str:
    """Return the time of day `seconds` from now, as in 07:00, with the date if not today."""
    today = datetime.now().date()
    end = datetime.fromtimestamp(time.time() + max(0.0, seconds) + 30)  # rounded to a minute
    return f"{end:%H:%M}" if end.date() == today else f"{end:%H:%M on %Y-%m-%d}"


def next_time(clock_time: str, since: float) -> float:
    """Return when `clock_time` (such as 07:00) next comes after `since`, as a Unix time."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > begin else end + timedelta(days=1)).timestamp()
