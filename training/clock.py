"""
The time of a run: where it went, and in a run by the clock (`hours` or `until`) how much is left
and how far the schedule is. Needs no torch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from configurator import NEVER, Config

CATEGORIES = ("start-up", "compile", "steps", "data wait", "evaluation", "checkpoints", "pause")
CATEGORIES += ("other",)
PAUSE = 60.0  # seconds without a look at the clock: the process was stopped, or the machine slept
HEARTBEAT = 10.0  # seconds between looks while the run itself is busy
HALF_LIFE = 120.0  # seconds of iterations after which one counts half in the mean
SAVE_EVERY = 600.0  # seconds, where checkpoint_interval is not set


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


class Clock:
    """
    How much of its time a run has used, and what the rest is good for. Seconds, on rank 0's clock:
    the others take over what it says. Pauses do not count as used, nor does the time between a stop
    and a resume; `until` passes in both.

    The host runs ahead of a GPU, and its time is early by the launches that wait in the driver's
    queue: about a thousand kernels, which is less than what the end may be off by.
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
        self.saved_at = self.used()
        # of the iterations in log lines: recent seconds and number, and seconds of one
        self.recent, self.pace = (0.0, 0.0), 0.0
        # what look() finds: the share of the next update, whether an evaluation and a save fit in
        # before the last ones, whether SAVE_EVERY has passed
        self.next_share, self.spare, self.save = 0.0, True, False

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
        return f"{datetime.fromtimestamp(wall() + self.left()):%H:%M on %Y-%m-%d}"

    def hours_text(self) -> str:
        return f"{self.used() / 3600:.2f} of {(self.used() + self.left()) / 3600:.2f}"

    # -------------------------------------------------------------------------
    # What things take

    def note_iterations(self, seconds: float, number: int) -> None:
        """So many iterations took so long: `pace` is a mean over the last minutes."""
        fade = 0.5 ** (seconds / HALF_LIFE)
        self.recent = fade * self.recent[0] + seconds, fade * self.recent[1] + number
        self.pace = self.recent[0] / self.recent[1]

    def note_price(self, category: str, seconds: float) -> None:
        """An evaluation or a save took this long: a running mean, the last one counts half."""
        self.prices[category] = (self.prices.get(category, seconds) + seconds) / 2
        if category == "checkpoints":
            self.saved_at = self.used()

    # -------------------------------------------------------------------------
    # The schedule

    def look(self, it: int) -> None:
        """Before iteration `it`. In a run by the clock all ranks take part."""
        if self.config.by_clock:
            self.next_share, self.spare, self.save = self.from_main(self.read, it)

    def read(self, it: int) -> tuple[float, bool, bool]:
        used, after = self.used(), sum(self.prices.values())  # an evaluation and a save come last
        # seconds until the last update has to begin, and since the first one began
        room = self.left() - after - self.pace
        past = used - self.before_updates if it > 0 else 0.0
        share = past / (past + room) if room > self.pace else 1.0
        share = max(share, it / max(1, self.config.max_iters - 1))
        save = not self.config.checkpoint_interval and used - self.saved_at > SAVE_EVERY
        return share, room > after + 2 * self.pace, save

    def is_up(self) -> bool:
        """Whether the last update has been made, and no longer time been given since."""
        return self.share >= 1 and self.next_share >= 1

    def evaluation_due(self, it: int) -> bool:
        due = it % self.config.eval_interval == 0
        if self.config.eval_interval == NEVER:  # each twentieth of the schedule
            due = due or int(20 * self.next_share) > int(20 * self.share)
        return self.spare and due

    def save_due(self, it: int) -> bool:
        interval = self.config.checkpoint_interval
        at_interval = interval > 0 and it % interval == 0 and it > 0
        return self.spare and (at_interval or self.save)

    def begin_update(self, it: int, horizon: int) -> float:
        """
        The iteration at which the learning rate's decay ends: `horizon`, or, by the clock, the one
        that a steady pace would reach when the time is up.
        """
        if it == 0:
            self.before_updates = self.used()
        if not self.config.by_clock:
            self.share = min(1.0, it / horizon)
            return horizon
        self.share = self.next_share
        return min(horizon, it / self.share) if self.share else horizon


def next_time(clock_time: str, since: float) -> float:
    """The next 07:00 after `since`, in seconds since 1970."""
    begin = datetime.fromtimestamp(since)
    hour, minute = map(int, clock_time.split(":"))
    end = begin.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if end <= begin:
        end += timedelta(days=1)
    return end.timestamp()
