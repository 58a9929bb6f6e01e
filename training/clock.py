"""
The time of a run: where it went, and in a run by the clock (`hours` or `until`) how much is left
and how far the schedule is. Needs no torch.
"""

import contextlib
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
wall = time.time  # the clock that people look at, and set
# Linux's and macOS's clock that nobody sets and that runs while the machine sleeps
UNSET = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady() -> float:
    """Seconds that pass for everybody: nobody sets this clock, and no sleep stops it."""
    return time.monotonic() if UNSET is None else time.clock_gettime(UNSET)


# -----------------------------------------------------------------------------
# Where the time goes


class Ledger:
    """
    Books wall time under exactly one category at a time: "start-up" until the first `switch`, then
    "other" except inside `book`. Nested bookings take their time out of the outer one. A gap of
    over a minute between two looks at the clock is a "pause" in any of them. Seconds.
    """

    def __init__(self, began: float, clock: Callable[[], float] | None = None):
        self.clock = clock or time.perf_counter
        self.since, self.category, self.looked_at = began, "start-up", self.clock()
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)

    def look(self) -> float:
        """The time. Where nobody has looked for over a minute, that was a pause."""
        seconds = self.clock()
        gap, self.looked_at = seconds - self.looked_at, seconds
        if gap > PAUSE:
            # some of it was work; an iteration of no time at all would have endless tok/s
            self.seconds["pause"] += gap - HEARTBEAT
            self.since += gap - HEARTBEAT
        return seconds

    def keep_looking(self) -> None:
        """For a thread of its own: an iteration of some minutes is no pause."""
        while True:
            time.sleep(HEARTBEAT)
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

    share: float = -1.0  # of the schedule: 0 at the first update, 1 at the last; -1: not begun
    used: float = 0.0  # seconds
    spare: bool = True  # there is time for an evaluation and a save before the last ones
    is_up: bool = False  # the last update has been made


class Clock:
    """
    How much of its time a run has used, and what the rest is good for. Seconds, on rank 0's clock:
    the others take over what it says. Pauses do not count as used, nor does the time between a stop
    and a resume; `until` comes nearer in both, but not because somebody sets the clock.

    The host runs ahead of a GPU, but only as far as the queue of kernels reaches, about a second.
    At log lines, evaluations and saves it waits, so the mean of an iteration is the device's.
    """

    def __init__(self, config: Config, ledger: Ledger, saved: dict, from_main: Callable):
        """`saved`: state_dict() in the run's checkpoint. `from_main`: see Ranks."""
        self.config, self.ledger, self.from_main = config, ledger, from_main
        if config.until:
            # the next one since the run began, which is when its ledger did
            deadline = next_time(config.until, wall() - (ledger.look() - ledger.since))
            if saved.get("until") == config.until:
                # a resume keeps the one before, even if it has passed; with a clock that is behind
                # since a reboot, that could be years away
                deadline = min(deadline, saved["deadline"])
            self.deadline = steady() + deadline - wall()  # nobody moves it by setting the clock
        self.prices: dict[str, float] = saved.get("prices", {})  # of an evaluation, of a save
        share = saved.get("share", -1.0) if config.by_clock else -1.0
        self.last = self.reading = Reading(share, self.used())  # at the last update, and now
        # seconds and number of the last minutes' iterations, and seconds of one
        self.recent, self.pace = (0.0, 0.0), 0.0

    def used(self) -> float:
        return self.ledger.total() - self.ledger.seconds["pause"]

    def left(self) -> float:
        if self.config.until:
            return max(0.0, self.deadline - steady())
        return 3600 * self.config.hours - self.used()

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        until = dict(until=self.config.until, deadline=wall() + self.left())
        return dict(share=self.last.share, prices=self.prices, **until)

    def hours_text(self) -> str:
        return f"{self.used() / 3600:.2f} of {(self.used() + self.left()) / 3600:.2f}"

    def note_iterations(self, seconds: float, number: int) -> None:
        """`number` iterations took `seconds`. The pace is a mean over the last minutes."""
        fade = 0.5 ** (seconds / HALF_LIFE)
        self.recent = fade * self.recent[0] + seconds, fade * self.recent[1] + number
        self.pace = self.recent[0] / self.recent[1]

    def look(self, it: int) -> None:
        """Before iteration `it`: what the clock says. In a run by the clock all ranks take part."""
        if self.config.by_clock:
            self.reading = self.from_main(self.read, it)

    def read(self, it: int) -> Reading:
        used, left, pace = self.used(), self.left(), self.pace
        # an evaluation and a save come last
        unseen = UNSEEN * (used + left)
        after = sum(self.prices.get(name, unseen) for name in ("evaluation", "checkpoints"))
        # seconds until the last update has to begin, and since the first one could begin
        room, past = left - after - pace, 0.0
        if it > 0:
            past = used - self.ledger.seconds["start-up"] - self.ledger.seconds["compile"]
        share = past / (past + room) if room > pace else 1.0
        share = max(share, it / max(1, self.config.max_iters - 1))
        spare = share < 1 and room > after + 2 * pace
        return Reading(share, used, spare, is_up=self.last.share >= 1 and room < 0)

    def evaluation_due(self, it: int) -> bool:
        on_time = it % self.config.eval_interval == 0
        if self.config.eval_interval == NEVER:  # each twentieth of the schedule
            on_time = int(20 * self.reading.share) > int(20 * self.last.share)
        return on_time and self.reading.spare

    def save_due(self, it: int) -> bool:
        on_time = self.reading.used // SAVE_EVERY > self.last.used // SAVE_EVERY
        if self.config.checkpoint_interval:
            on_time = it % self.config.checkpoint_interval == 0
        return on_time and self.reading.spare and it > 0

    def horizon(self, it: int, horizon: int) -> float:
        """
        The iteration at which the learning rate's decay ends: `horizon`, or, by the clock, the one
        that a steady pace would reach when the time is up.
        """
        return min(horizon, it / self.reading.share) if self.reading.share > 0 else horizon


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
