"""
When to evaluate, to save and to end (`hours`, `until`, `max_minutes`), and how far a run with
--hours or --until is in its schedule. Needs no torch.
"""

import math
import time
from datetime import datetime, timedelta

from common.console import warn
from configurator import NEVER, Config

SAVE_EVERY = 600.0  # seconds, unless checkpoint_interval is set
RESERVE = 0.01  # share of the time reserved for an evaluation or a save before the first one
LONG_UNTIL = 16 * 3600  # seconds to --until that are probably a day too many
CLOCK_JUMP = 60.0  # seconds
wall = time.time  # the clock on the wall, which people may set


class Clock:
    """
    Counts the seconds that a run has used, in all of its launches. The time between two launches
    does not count towards `hours`; with `until` the deadline stays.
    """

    def __init__(self, config: Config, began: float, resumed: dict):
        """
        `began`: time.perf_counter() at the beginning of this launch. `resumed`: the checkpoint's
        state, or {}.
        """
        self.config, self.began = config, began
        saved, ledger = resumed.get("clock", {}), resumed.get("ledger", {})
        self.used_before = sum(ledger.values())
        # seconds used before the first iteration; checkpoints of c336bd1 do not say
        before = ledger.get("start-up", 0.0) + ledger.get("compile", 0.0)
        self.setup_seconds = saved.get("setup_seconds", before) if resumed else None
        self.deadline = None
        self.offset = wall() - time.perf_counter()  # moves when somebody sets the clock
        if config.until:
            self.deadline = next_time(config.until, wall() - (time.perf_counter() - began))
            if saved.get("until") == config.until:  # a resume that comes too late has no time left
                self.deadline = min(self.deadline, saved["deadline"])
        # share of the schedule, 0 at the first update, 1 at the last: at the previous look, and now
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
        """Seconds until `hours`, `until` or `max_minutes` is reached; infinite without them."""
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
        Record how long an "evaluation", the "checkpoints" or an "iteration" took, as the estimate
        for the next one. The estimate at most doubles, so that a single hang counts little. What
        was not `done` is not recorded.
        """
        if name == "checkpoints":
            self.saved_at = self.used()
        if done:
            self.prices[name] = min(seconds, 2 * (self.prices.get(name) or seconds))
        if done and name == "evaluation":
            self.evaluated_share = self.share

    def look(self, it: int) -> tuple[float, bool, bool, str | None]:
        """
        Called once before each iteration `it`. Returns the share of the schedule, whether an
        evaluation and a save are due, and why no iteration follows, or None. Rank 0's clock decides
        for all.
        """
        c, used, over, has_time = self.config, self.used(), None, True
        moved = wall() - time.perf_counter() - self.offset
        if c.until and abs(moved) > CLOCK_JUMP:
            self.offset += moved
            slept = f"the clock has moved by {moved:+,.0f} s, or the machine slept"
            warn(f"{slept}; the run ends at {c.until} of this clock")
        if self.setup_seconds is None:
            self.setup_seconds = used
        self.last_share = self.share
        if c.by_clock:
            iteration, last = self.prices.get("iteration", 0.0), self.closing_seconds()
            left, past = self.left_of_run(), used - self.setup_seconds
            room = left - last - iteration  # seconds until the last update must begin
            self.share = past / (past + room) if room > iteration else 1.0
            self.share = max(self.share, it / max(1, c.max_iters - 1))  # max_iters too
            has_time = left > 2 * (last + iteration)  # leaves room for the last evaluation and save
            if self.last_share >= 1 and room < 0:
                over = "until" if c.until else "hours"
        if self.left_of_start() <= 0:
            over = over or "max_minutes"
        evaluation_due, save_due = it % c.eval_interval == 0, used - self.saved_at >= SAVE_EVERY
        if c.eval_interval == NEVER:  # at each twentieth of the schedule
            evaluation_due = int(20 * self.share) > int(20 * self.evaluated_share)
        if c.checkpoint_interval:
            save_due = it % c.checkpoint_interval == 0
        return self.share, evaluation_due and has_time, save_due and has_time and it > 0, over

    def closing_seconds(self) -> float:
        """Seconds reserved for the evaluation and the save after the last update."""
        reserve = RESERVE * (self.used() + max(0.0, self.left_of_run()))
        return sum(self.prices.get(name, reserve) for name in ("evaluation", "checkpoints"))


def clock_time(seconds: float) -> str:
    """The clock time `seconds` from now: 07:00, with the date if that is not today."""
    end, today = (datetime.fromtimestamp(wall() + s) for s in (max(0.0, seconds) + 30, 0))
    return f"{end:%H:%M}" if end.date() == today.date() else f"{end:%H:%M on %Y-%m-%d}"


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > begin else end + timedelta(days=1)).timestamp()
