"""
Seconds: where they went, and what follows from them. The ledger books each second of a run to one
category. With --hours or --until the clock also says how far the schedule is, when the time is
over, and what the end will cost. Needs no torch.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from configurator import NEVER, Config

CATEGORIES = ("start-up", "compile", "steps", "evaluation", "checkpoints")
SAVE_EVERY = 600.0  # seconds, unless checkpoint_interval is set
RETRY_AFTER = 30.0  # seconds from a save that failed to the next try
RESERVE = 0.01  # share of the time kept for an evaluation or a save that has not been timed yet


@dataclass
class Now:
    """What the clock says between two iterations; train.py's loop decides what to do about it."""

    minutes: float  # since the start of this launch
    save: bool  # the last save was ten minutes ago
    retry: bool  # the last save has failed, and it is time to try again
    # of a run with hours or until; another one has time, and is never over
    share: float  # of its schedule: 0 at the first update, 1 at the last
    evaluate: bool  # without eval_interval: another twentieth of the schedule is done
    has_time: bool  # for an evaluation or a save besides those at the end
    is_over: bool  # the time is used up


class Clock:
    """
    The ledger of a run: each second since it began, in all of its launches, belongs to exactly one
    category, so evaluation, checkpoints and compilation never count as iteration time. The time
    between two launches does not count towards `hours`; with `until` the deadline stays.
    """

    def __init__(self, config: Config, began: float, synchronize: Callable, resumed: dict | None):
        """
        `began`: time.perf_counter() at the beginning of this launch. `synchronize`: waits for the
        device. `resumed`: the checkpoint's state, if it is a resume.
        """
        self.config = config
        self.began = began
        self.synchronize = synchronize
        self.lapped_at = began  # the moment up to which the ledger counts
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        saved: dict = {}
        before = None
        if resumed:
            self.seconds |= resumed["ledger"]
            saved = resumed["clock"]
            before = (resumed["config"]["hours"], resumed["config"]["until"])
        # used before the first iteration
        self.setup_seconds: float | None = saved.get("setup_seconds")
        self.deadline: float | None = None
        if config.until:
            self.deadline = next_time(config.until, time.time() - (time.perf_counter() - began))
            if saved.get("until") == config.until:  # a resume that comes too late has no time left
                self.deadline = min(self.deadline, saved["deadline"])
        # Shares of the schedule: at the previous call of decide(), now, and at the last evaluation
        self.last_share = self.share = saved.get("share", 0.0) if config.by_clock else 0.0
        self.evaluated_share = -1.0
        if resumed and (config.hours, config.until) == before:
            # with other hours the same moment has another share, and an evaluation is due soon
            self.evaluated_share = saved.get("evaluated_share", -1.0)
        # seconds that the last evaluation, save and iteration took
        self.seconds_per: dict[str, float] = dict(saved.get("prices", {}))
        self.saved_at = self.used()
        self.failed_at: float | None = None  # when the last save failed

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return dict(
            share=self.last_share,
            evaluated_share=self.evaluated_share,
            setup_seconds=self.setup_seconds,
            until=self.config.until,
            deadline=self.deadline,
            prices=self.seconds_per,
        )

    # -------------------------------------------------------------------------
    # The ledger

    def lap(self, category: str, done: bool = True) -> float:
        """
        Wait until the device has finished, and book the time since the last lap. `done`: whether
        the evaluation was finished, or the checkpoint is on the disk. Returns these seconds.
        """
        self.synchronize()
        now = time.perf_counter()
        seconds = now - self.lapped_at
        self.lapped_at = now
        self.seconds[category] += seconds
        if category == "evaluation" and done:
            self.evaluated_share = self.share
        if category == "checkpoints":
            self.saved_at = self.used()
            self.failed_at = None if done else self.saved_at
        if category in ("evaluation", "checkpoints") and done:
            self.took(category, seconds)
        return seconds

    def took(self, name: str, seconds: float) -> None:
        """
        Keep what an evaluation, the checkpoints or an iteration took, as the estimate for the next
        one. It at most doubles, or one hang would end a run with hours that much too early.
        """
        before = self.seconds_per.get(name) or seconds
        self.seconds_per[name] = min(seconds, 2 * before)

    def since_lap(self) -> float:
        """Seconds that no category has yet."""
        return time.perf_counter() - self.lapped_at

    def used(self) -> float:
        """Seconds since the run began, in all launches."""
        return sum(self.seconds.values()) + self.since_lap()

    def training_hours(self) -> float:
        """Hours of iterations, evaluations and checkpoints, in all launches."""
        return (self.used() - self.seconds["start-up"] - self.seconds["compile"]) / 3600

    # -------------------------------------------------------------------------
    # The time left

    def left_of_run(self) -> float:
        """Seconds until `hours` or `until` is reached; infinite without them."""
        if self.deadline is not None:
            return self.deadline - time.time()
        return 3600 * self.config.hours - self.used() if self.config.hours else math.inf

    def left(self) -> float:
        """Seconds until `hours`, `until` or `max_minutes` is reached; infinite without them."""
        minutes = self.config.max_minutes
        launch = self.began + 60 * minutes - time.perf_counter() if minutes else math.inf
        return max(0.0, min(self.left_of_run(), launch))

    def hours_text(self) -> str:
        end = self.used() + max(0.0, self.left_of_run())
        return f"{self.used() / 3600:.2f} of {end / 3600:.2f}"

    def decide(self, it: int) -> Now:
        """What the clock says before iteration `it`. Call it once before each iteration."""
        c = self.config
        used = self.used()
        if self.setup_seconds is None:
            self.setup_seconds = used
        self.last_share = self.share
        is_over = False
        has_time = True
        if c.by_clock:
            left = self.left_of_run()
            iteration = self.seconds_per.get("iteration", 0.0)
            closing = self.closing_seconds()
            past = used - self.setup_seconds
            room = left - closing - iteration  # seconds until the last update must begin
            self.share = past / (past + room) if room > iteration else 1.0
            self.share = max(self.share, it / max(1, c.max_iters - 1))  # max_iters ends it too
            # room for this evaluation or save, and for those at the end
            has_time = left > 2 * (closing + iteration)
            is_over = self.last_share >= 1 and room < 0
        # with hours or until, and without eval_interval: at each twentieth of the schedule
        another = int(20 * self.share) > int(20 * self.evaluated_share)
        return Now(
            minutes=(time.perf_counter() - self.began) / 60,
            save=not c.checkpoint_interval and used - self.saved_at >= SAVE_EVERY,
            retry=self.failed_at is not None and used - self.failed_at >= RETRY_AFTER,
            share=self.share,
            evaluate=c.eval_interval == NEVER and another,
            has_time=has_time,
            is_over=is_over,
        )

    def closing_seconds(self) -> float:
        """Seconds kept for the evaluation and the save after the last update."""
        reserve = RESERVE * (self.used() + max(0.0, self.left_of_run()))
        return sum(self.seconds_per.get(name, reserve) for name in ("evaluation", "checkpoints"))


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
