"""
The time of a run: where it went, and in a run by the clock (`hours` or `until`) how much is left
and how far the schedule is. Needs no torch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from configurator import NEVER, Config

CATEGORIES = ("start-up", "compile", "steps", "data wait", "evaluation", "checkpoints", "pause")
CATEGORIES += ("other",)
PAUSE = 60.0  # seconds without a look at the clock: the process was stopped, or the machine slept
HEARTBEAT = 10.0  # seconds between looks while the run itself is busy
HALF_LIFE = 120.0  # seconds of iterations after which one counts half in the mean
SAVE_EVERY = 600.0  # seconds, where checkpoint_interval is not set
UNSEEN = 0.01  # share of the run set aside for an evaluation or a save before the first one


def now() -> float:
    """Seconds on a clock that nobody can set and that, on Linux, runs while the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.perf_counter()


wall = time.time  # the clock that people look at, and set


# -----------------------------------------------------------------------------
# Where the time goes


class Ledger:
    """
    Books wall time under exactly one category at a time: "start-up" until the first `switch`, then
    "other" except inside `book`. Nested bookings take their time out of the outer one. A gap of
    over a minute between two looks at the clock is a "pause" in any of them. Seconds.
    """

    def __init__(self, began: float, clock: Callable[[], float] | None = None):
        self.clock, self.since, self.category = clock or now, began, "start-up"
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.looked_at = self.clock()
        self.lock, self.closed = threading.Lock(), threading.Event()

    def look(self) -> float:
        """The time. Where nobody has looked for over a minute, that was a pause."""
        with self.lock:  # two threads look
            seconds = self.clock()
            gap, self.looked_at = seconds - self.looked_at, seconds
            if gap > PAUSE:
                # some of it was work; an iteration of no time at all would have endless tok/s
                self.seconds["pause"] += gap - HEARTBEAT
                self.since += gap - HEARTBEAT
        return seconds

    def keep_looking(self) -> None:
        """For a thread of its own: an iteration of some minutes is no pause."""
        while not self.closed.wait(HEARTBEAT):
            self.look()

    def switch(self, category: str) -> str:
        """
        Charge the time since the last switch to the category that ends, and return that category.
        """
        seconds = self.look()
        self.seconds[self.category] += seconds - self.since
        self.since, ended, self.category = seconds, self.category, category
        return ended

    @contextlib.contextmanager
    def book(self, category: str) -> Iterator[None]:
        outer = self.switch(category)
        try:
            yield
        finally:
            self.switch(outer)

    def total(self) -> float:
        self.switch(self.category)
        return sum(self.seconds.values())


# -----------------------------------------------------------------------------
# A run by the clock


@dataclass
class Reading:
    """What the clock says before an iteration. In a run by iterations it says nothing."""

    share: float = 0.0  # of the schedule: 0 at the first update, 1 at the last
    is_up: bool = False  # the last update has been made
    evaluate: bool = False  # a twentieth of the schedule has passed
    save: bool = False  # SAVE_EVERY has passed
    spare: bool = True  # there is time for an evaluation and a save before the last ones


class Clock:
    """
    How much of its time a run has used, and what the rest is good for. Seconds, on rank 0's clock:
    the others take over what it says. Pauses do not count as used, nor does the time between a stop
    and a resume; `until` passes in both.

    The host runs ahead of a GPU, so its time is too early for the iteration it is about to start.
    Where it last waited for the device both agree; each iteration since then counts as long as
    the mean of those before, or as long as the host took, whichever is more.
    """

    def __init__(self, config: Config, ledger: Ledger, saved: dict | None, from_main: Callable):
        """`saved`: state_dict() of the run's checkpoint. `from_main`: see Ranks."""
        self.config, self.ledger, self.from_main = config, ledger, from_main
        if config.until:
            # the next one since the run began, which is when its ledger did
            self.deadline = next_time(config.until, wall() - (ledger.look() - ledger.since))
        state = dict(share=0.0, before_updates=0.0, prices={}) | (saved or {})
        self.share: float = state["share"]  # of the schedule, when the last update began
        self.before_updates: float = state["before_updates"]  # used before the first one
        self.prices: dict[str, float] = state["prices"]  # of an evaluation and of a save
        self.reading, self.saved_at = Reading(), self.used()
        # of the iterations that the device has done: recent seconds and number, seconds in all
        self.recent, self.booked = (0.0, 0.0), self.iteration_seconds()
        self.pending = 0  # iterations since then

    def state_dict(self) -> dict:
        """What a checkpoint keeps, beside the ledger."""
        return dict(share=self.share, before_updates=self.before_updates, prices=self.prices)

    def used(self) -> float:
        return self.ledger.total() - self.ledger.seconds["pause"]

    def left(self) -> float:
        if self.config.until:
            return self.deadline - wall()
        return 3600 * self.config.hours - self.used()

    def end_text(self) -> str:
        """When the run will end: 07:00, with the date if that is not today."""
        end, today = datetime.fromtimestamp(wall() + self.left()), datetime.fromtimestamp(wall())
        return f"{end:%H:%M}" if end.date() == today.date() else f"{end:%H:%M on %Y-%m-%d}"

    def hours_text(self) -> str:
        return f"{self.used() / 3600:.2f} of {(self.used() + self.left()) / 3600:.2f}"

    # -------------------------------------------------------------------------
    # What things take

    def iteration_seconds(self) -> float:
        return self.ledger.seconds["steps"] + self.ledger.seconds["data wait"]

    def device_is_done(self) -> None:
        """The host has waited for the device: it has done all pending iterations."""
        if not self.pending:
            return
        booked = self.iteration_seconds()
        fade = 0.5 ** ((booked - self.booked) / HALF_LIFE)
        seconds, number = self.recent
        self.recent = seconds * fade + booked - self.booked, number * fade + self.pending
        self.booked, self.pending = booked, 0

    def pace(self) -> float:
        """Seconds of an iteration, a mean over the last minutes."""
        seconds, number = self.recent
        return seconds / number if number else 0.0

    def note_price(self, category: str, seconds: float) -> None:
        """An evaluation or a save took this long: a running mean, the last one counts half."""
        self.prices[category] = (self.prices.get(category, seconds) + seconds) / 2
        if category == "checkpoints":
            self.saved_at = self.used()

    # -------------------------------------------------------------------------
    # The schedule

    def look(self, it: int) -> None:
        """Before iteration `it`: what the clock says. In a run by the clock all ranks take part."""
        if self.config.by_clock:
            self.reading = self.from_main(self.read, it)

    def evaluation_due(self, it: int) -> bool:
        at_interval = it % self.config.eval_interval == 0
        return self.reading.spare and (at_interval or self.reading.evaluate)

    def save_due(self, it: int) -> bool:
        interval = self.config.checkpoint_interval
        at_interval = interval > 0 and it % interval == 0 and it > 0
        return self.reading.spare and (at_interval or self.reading.save)

    def read(self, it: int) -> Reading:
        pace, used, left = self.pace(), self.used(), self.left()
        ahead = max(0.0, self.booked + self.pending * pace - self.iteration_seconds())
        used, left = used + ahead, left - ahead
        # an evaluation and a save come last
        unseen = UNSEEN * (used + left)
        after = sum(self.prices.get(name, unseen) for name in ("evaluation", "checkpoints"))
        # seconds until the last update has to begin, and since the first one began
        room = left - after - pace
        past = used - self.before_updates if it > 0 else 0.0
        share = past / (past + room) if room > pace else 1.0
        share = max(share, it / max(1, self.config.max_iters - 1))
        return Reading(
            share=share,
            is_up=self.share >= 1 and room < 0,
            evaluate=int(20 * share) > int(20 * self.share) and self.config.eval_interval == NEVER,
            save=not self.config.checkpoint_interval and used - self.saved_at > SAVE_EVERY,
            spare=share < 1 and room > after + 2 * pace,
        )

    def begin_update(self, it: int, horizon: int) -> float:
        """
        The iteration at which the learning rate's decay ends: `horizon`, or, by the clock, the one
        that a steady pace would reach when the time is up.
        """
        if it == 0:
            self.before_updates = self.used()
        if not self.config.by_clock:
            self.share = it / horizon if it < horizon else 1.0
            return horizon
        self.share = self.reading.share
        return min(horizon, it / self.share) if self.share else horizon


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if end <= begin:
        end += timedelta(days=1)
    return end.timestamp()
