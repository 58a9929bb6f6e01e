"""
Where the seconds of a run went, and how far a run with --hours or --until is. Needs no torch.

The clock only counts: it books each second to one category. The schedule computes the position of a
run in its time from the clock and from what train.py tells it. Neither decides anything.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from configurator import Config

CATEGORIES = ("start-up", "compile", "steps", "evaluation", "checkpoints")
RESERVE = 0.01  # share of the time kept for an evaluation or a save that has not been timed yet


class Clock:
    """
    A ledger: each second since the run began, in all of its launches, belongs to exactly one
    category, so evaluations, checkpoints and compilation never count as iteration time. The time
    between two launches does not count.
    """

    def __init__(self, began: float, synchronize: Callable, resumed: dict | None):
        """
        `began`: time.perf_counter() at the beginning of this launch. `synchronize`: waits for the
        device. `resumed`: this run's checkpoint, if it is a resume.
        """
        self.began = began
        self.synchronize = synchronize
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        if resumed:
            self.seconds |= resumed["ledger"]
        self.lapped_at = began  # the moment up to which the ledger counts
        self.booked_at = dict.fromkeys(CATEGORIES, began)  # when each category was booked last

    def lap(self, category: str) -> float:
        """Wait for the device, then book the time since the last lap. Returns these seconds."""
        self.synchronize()
        now = time.perf_counter()
        seconds = now - self.lapped_at
        self.lapped_at = self.booked_at[category] = now
        self.seconds[category] += seconds
        return seconds

    def since_lap(self) -> float:
        """Seconds that no category has yet."""
        return time.perf_counter() - self.lapped_at

    def since(self, category: str) -> float:
        """Seconds since the last lap of this category, or since the launch."""
        return time.perf_counter() - self.booked_at[category]

    def of_launch(self) -> float:
        """Seconds since this launch began."""
        return time.perf_counter() - self.began

    def used(self) -> float:
        """Seconds since the run began, in all launches."""
        return sum(self.seconds.values()) + self.since_lap()

    def training_hours(self) -> float:
        """Hours of iterations, evaluations and checkpoints, in all launches."""
        return (self.used() - self.seconds["start-up"] - self.seconds["compile"]) / 3600


@dataclass
class Speed:
    """Means over the iterations between two log lines."""

    iter_seconds: float  # waits for data included
    wait_seconds: float  # of these, waiting for data
    tokens_per_sec: float  # of all ranks together
    mem_gib: float  # the most in use so far, on any rank; 0: unknown


class Speedometer:
    """
    Measures the iterations between two log lines. Evaluations and checkpoints do not slow it down,
    however long they take, because the clock books them elsewhere.
    """

    def __init__(self, clock: Clock, hw, iter_num: int, tokens: int):
        self.clock = clock
        self.hw = hw
        self.before = (iter_num, tokens, clock.seconds["steps"], 0.0)

    def read(self, iter_num: int, tokens: int, waited: float, ranks) -> Speed:
        """
        After a lap of "steps". `iter_num`, `tokens` and `waited` (seconds for data) are totals. The
        slowest rank counts. All ranks take part.
        """
        now = (iter_num, tokens, self.clock.seconds["steps"], waited)
        iterations, trained, elapsed, waited = (
            after - before for after, before in zip(now, self.before, strict=True)
        )
        self.before = now
        elapsed, waited, mem_gib = ranks.max(elapsed, waited, self.hw.peak_memory_gib() or 0.0)
        return Speed(elapsed / iterations, waited / iterations, trained / elapsed, mem_gib)


# -----------------------------------------------------------------------------
# Runs with a time to end


@dataclass
class Now:
    """What the time is between two iterations, in a run's own terms."""

    launch_minutes: float  # since this launch began
    seconds_since_save: float  # since the last try to save, or since the launch
    # of a run with hours or until; another one has time to spare, and its time is never up
    share: float  # of its schedule that is done: 0 at the first update, 1 at the last
    time_is_up: bool
    has_spare_time: bool  # for an evaluation or a save besides those at the end


class Schedule:
    """
    How far a run with hours or until is, and when it has to end, so that there is time for a last
    evaluation and save. A deadline (until) stays when the run is resumed.
    """

    def __init__(self, c: Config, clock: Clock, resumed: dict | None):
        self.c = c
        self.clock = clock
        saved = resumed["clock"] if resumed else {}
        # used before the first iteration
        self.setup_seconds: float | None = saved.get("setup_seconds")
        self.deadline: float | None = None
        if c.until:
            self.deadline = next_time(c.until, since=time.time() - clock.of_launch())
            if saved.get("until") == c.until:  # a resume that comes too late has no time left
                self.deadline = min(self.deadline, saved["deadline"])
        # now, and at the look before that
        self.share = self.last_share = saved.get("share", 0.0) if c.by_clock else 0.0
        # what the last iteration, evaluation and save took
        self.estimates: dict[str, float] = dict(saved.get("estimates", {}))

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return dict(
            share=self.last_share,
            setup_seconds=self.setup_seconds,
            until=self.c.until,
            deadline=self.deadline,
            estimates=self.estimates,
        )

    def expect(self, what: str, seconds: float) -> None:
        """
        Expect the next iteration, evaluation or save (checkpoints) to take as long as the last one.
        The estimate at most doubles, or one hang would end a run that much too early.
        """
        before = self.estimates.get(what) or seconds
        self.estimates[what] = min(seconds, 2 * before)

    def left(self) -> float:
        """Seconds until `hours` or `until` is reached; infinite without them."""
        if self.deadline is not None:
            return self.deadline - time.time()
        return 3600 * self.c.hours - self.clock.used() if self.c.hours else math.inf

    def look(self, it: int) -> Now:
        """Look at the time before iteration `it`. Call it once before each iteration."""
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
            self.share = max(self.share, it / max(1, self.c.max_iters - 1))  # max_iters ends it too
            time_is_up = self.last_share >= 1 and room < 0
            # room for this evaluation or save, and for those at the end
            has_spare_time = left > 2 * (closing + iteration)
        return Now(
            launch_minutes=self.clock.of_launch() / 60,
            seconds_since_save=self.clock.since("checkpoints"),
            share=self.share,
            time_is_up=time_is_up,
            has_spare_time=has_spare_time,
        )


def clock_time(seconds: float) -> str:
    """The clock time `seconds` from now: 07:00, with the date if that is not today."""
    today = datetime.now().date()
    end = datetime.fromtimestamp(time.time() + max(0.0, seconds) + 30)  # to the nearest minute
    return f"{end:%H:%M}" if end.date() == today else f"{end:%H:%M on %Y-%m-%d}"


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > begin else end + timedelta(days=1)).timestamp()
