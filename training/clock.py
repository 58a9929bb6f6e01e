"""
Where the time goes, and what follows from it: the end of a run with --hours, --until or
--max_minutes, how far its schedule is, when to evaluate and when to save. Needs no torch.
"""

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from configurator import NEVER, Config

CATEGORIES = ("start-up", "compile", "steps", "evaluation", "checkpoints")
SAVE_EVERY = 600.0  # seconds, unless checkpoint_interval is set
RESERVE = 0.01  # share of the time reserved for an evaluation or a save before the first one
wall = time.time  # the clock on the wall, which people may set


class Clock:
    """
    The ledger of a run: each second since it began, in all of its launches, belongs to exactly one
    category, so evaluation, checkpoints and compilation never count as iteration time. The time
    between two launches does not count towards `hours`; with `until` the deadline stays.
    """

    def __init__(self, config: Config, began: float, synchronize: Callable, resumed: dict):
        """
        `began`: time.perf_counter() at the beginning of this launch. `synchronize`: waits for the
        device. `resumed`: the checkpoint's state, or {}.
        """
        self.config, self.began, self.synchronize = config, began, synchronize
        saved = resumed.get("clock", {})
        self.seconds = dict.fromkeys(CATEGORIES, 0.0) | resumed.get("ledger", {})
        self.lapped_at = began  # the moment up to which the ledger counts
        self.setup_seconds = saved.get("setup_seconds")  # used before the first iteration
        self.deadline = None
        if config.until:
            self.deadline = next_time(config.until, wall() - (time.perf_counter() - began))
            if saved.get("until") == config.until:  # a resume that comes too late has no time left
                self.deadline = min(self.deadline, saved["deadline"])
        # share of the schedule, 0 at the first update, 1 at the last
        self.share = saved.get("share", 0.0) if config.by_clock else 0.0
        self.evaluated_share = saved.get("evaluated_share", -1.0)
        self.saved_at = self.used()
        # seconds of the last evaluation, save and iteration, the estimates for the next ones
        self.prices: dict[str, float] = saved.get("prices", {})

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        names = ("share", "evaluated_share", "setup_seconds", "deadline", "prices")
        return {name: getattr(self, name) for name in names} | dict(until=self.config.until)

    def lap(self, category: str) -> float:
        """
        Wait until the device has finished, and count the time since the last lap for a category.
        Returns these seconds.
        """
        self.synchronize()
        now = time.perf_counter()
        seconds, self.lapped_at = now - self.lapped_at, now
        self.seconds[category] += seconds
        if category == "evaluation":
            self.evaluated_share = self.share
        if category == "checkpoints":
            self.saved_at = self.used()
        if category in ("evaluation", "checkpoints"):
            self.prices[category] = seconds
        return seconds

    def used(self) -> float:
        """Seconds since the run began, in all launches."""
        return sum(self.seconds.values()) + time.perf_counter() - self.lapped_at

    def training_hours(self) -> float:
        """Hours of iterations, evaluations and checkpoints."""
        return (self.used() - self.seconds["start-up"] - self.seconds["compile"]) / 3600

    def left(self) -> float:
        """Seconds until `hours` or `until` is reached; infinite without them."""
        if self.deadline is not None:
            return self.deadline - wall()
        return 3600 * self.config.hours - self.used() if self.config.hours else math.inf

    def look(self, it: int) -> tuple[float, bool, bool, str]:
        """
        Called once before each iteration `it`. Returns the share of the schedule, whether an
        evaluation and a save are due, and why no iteration follows, or "".
        """
        c, over, has_time = self.config, "", True
        if self.setup_seconds is None:
            self.setup_seconds = self.used()
        if c.by_clock:
            if self.share >= 1:  # at the iteration before
                over = "until" if c.until else "hours"
            reserve = RESERVE * (self.used() + max(0.0, self.left()))
            closing = sum(self.prices.get(name, reserve) for name in ("evaluation", "checkpoints"))
            iteration, past = self.prices.get("iteration", 0.0), self.used() - self.setup_seconds
            room = self.left() - closing - iteration  # seconds until the last update must begin
            self.share = past / (past + room) if room > iteration else 1.0
            self.share = max(self.share, it / max(1, c.max_iters - 1))  # max_iters too
            has_time = room > closing + iteration
        if c.max_minutes and time.perf_counter() - self.began >= 60 * c.max_minutes:
            over = over or "max_minutes"
        if it >= c.max_iters:
            over = "max_iters"
        if c.eval_only:
            over = "eval_only"
        evaluation_due = it % c.eval_interval == 0
        if c.eval_interval == NEVER:  # at each twentieth of the schedule
            evaluation_due = int(20 * self.share) > int(20 * self.evaluated_share)
        save_due = self.used() - self.saved_at >= SAVE_EVERY
        if c.checkpoint_interval:
            save_due = it % c.checkpoint_interval == 0
        return self.share, evaluation_due and has_time, save_due and has_time and it > 0, over


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > begin else end + timedelta(days=1)).timestamp()
