"""
When to evaluate, to save and to end (`hours`, `until`, `max_minutes`); and how far the schedule of
a run by the clock is. Needs no torch.
"""

import math
import time
from datetime import datetime, timedelta

from configurator import NEVER, Config

SAVE_EVERY = 600.0  # seconds, where checkpoint_interval is not set
RESERVE = 0.01  # share of the time set aside for an evaluation or a save before the first one
wall = time.time  # the clock that people look at, and set


class Clock:
    """
    Counts the seconds that a run has used, in all of its starts. Time between a stop and the next
    start does not count towards `hours`; `until` does not wait.
    """

    def __init__(self, config: Config, began: float, resumed: dict):
        """
        `began`: time.perf_counter() when this start began. `resumed`: the checkpoint's state, empty
        where there is none.
        """
        self.config, self.began = config, began
        saved, ledger = resumed.get("clock", {}), resumed.get("ledger", {})
        self.used_before = sum(ledger.values())
        # seconds used before the first iteration; checkpoints of c336bd1 do not say
        before = ledger.get("start-up", 0.0) + ledger.get("compile", 0.0)
        self.setup_seconds = saved.get("setup_seconds", before) if resumed else None
        self.deadline = None
        if config.until:
            self.deadline = next_time(config.until, wall() - (time.perf_counter() - began))
            if saved.get("until") == config.until:  # a resume that comes too late has no time left
                self.deadline = min(self.deadline, saved["deadline"])
        # fraction of the schedule, at the look before and at this one: 0 at the first update, 1 at
        # the last
        self.last_share = self.share = saved.get("share", 0.0) if config.by_clock else 0.0
        self.evaluated_share = saved.get("evaluated_share", self.share if resumed else -1.0)
        self.saved_at = self.used()
        self.prices: dict[str, float] = saved.get("prices", {})  # seconds, see note()

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return dict(
            share=self.last_share,
            evaluated_share=self.evaluated_share,
            setup_seconds=self.setup_seconds,
            until=self.config.until,
            deadline=self.deadline,
            prices=self.prices,
        )

    def used(self) -> float:
        return self.used_before + time.perf_counter() - self.began

    def left(self) -> float:
        """Seconds until `hours`, `until` or this start's `max_minutes`; infinite without them."""
        return max(0.0, min(self.left_of_run(), self.left_of_start()))

    def left_of_run(self) -> float:
        if self.deadline is not None:
            return self.deadline - wall()
        return 3600 * self.config.hours - self.used() if self.config.hours else math.inf

    def left_of_start(self) -> float:
        minutes = self.config.max_minutes
        return self.began + 60 * minutes - time.perf_counter() if minutes else math.inf

    def hours_text(self) -> str:
        end = self.used() + max(0.0, self.left_of_run())
        return f"{self.used() / 3600:.2f} of {end / 3600:.2f}"

    def note(self, name: str, seconds: float, done: bool = True) -> None:
        """
        How long an "evaluation", the "checkpoints" or an "iteration" has taken, as the estimate for
        the next one: at most twice the estimate before, so that one that hangs counts little. One
        that was not `done` tells nothing.
        """
        if name == "checkpoints":
            self.saved_at = self.used()
        if done:
            self.prices[name] = min(seconds, 2 * (self.prices.get(name) or seconds))
        if done and name == "evaluation":
            self.evaluated_share = self.share

    def look(self, it: int) -> tuple[float, bool, bool, str | None]:
        """
        Before iteration `it`, once for each: the share of the schedule, whether an evaluation and a
        save are due, and why no iteration follows. Rank 0's clock counts for all.
        """
        c, used, over, has_time = self.config, self.used(), None, True
        if self.setup_seconds is None:
            self.setup_seconds = used
        self.last_share = self.share
        if c.by_clock:
            iteration, last = self.prices.get("iteration", 0.0), self.closing_seconds()
            left, past = self.left_of_run(), used - self.setup_seconds
            room = left - last - iteration  # until the last update has to begin
            self.share = past / (past + room) if room > iteration else 1.0
            self.share = max(self.share, it / max(1, c.max_iters - 1))  # both bound the run
            has_time = left > 2 * (last + iteration)  # the last ones still fit after it
            if self.last_share >= 1 and room < 0:
                over = "until" if c.until else "hours"
        if self.left_of_start() <= 0:
            over = over or "max_minutes"
        evaluation_due, save_due = it % c.eval_interval == 0, used - self.saved_at >= SAVE_EVERY
        if c.eval_interval == NEVER:  # each twentieth of the schedule
            evaluation_due = int(20 * self.share) > int(20 * self.evaluated_share)
        if c.checkpoint_interval:
            save_due = it % c.checkpoint_interval == 0
        return self.share, evaluation_due and has_time, save_due and has_time and it > 0, over

    def closing_seconds(self) -> float:
        """What is set aside for the evaluation and the save after the last update."""
        reserve = RESERVE * (self.used() + max(0.0, self.left_of_run()))
        return sum(self.prices.get(name, reserve) for name in ("evaluation", "checkpoints"))


def clock_time(seconds: float) -> str:
    """The clock time in so many seconds: 07:00, with the date if that is not today."""
    end, today = (datetime.fromtimestamp(wall() + s) for s in (max(0.0, seconds) + 30, 0))
    return f"{end:%H:%M}" if end.date() == today.date() else f"{end:%H:%M on %Y-%m-%d}"


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > begin else end + timedelta(days=1)).timestamp()
