"""
Is a change better than its base? Several seeds of each decide, and never one seed.

Two seeds of one program differ, too. So a difference of two means counts only if it is larger than
its noise: half of its 95% confidence interval by Welch's t-test (Biometrika 34, 1947). If a change
does nothing, about one of 20 comparisons says otherwise.
"""

import math
import re
from collections import Counter
from os.path import commonprefix
from statistics import mean, variance

from common.console import raise_if_any
from reports.runs import Run, percentile

# Student's t for 95%, with 1 to 10 degrees of freedom. With more it is smaller, 1.96 at least.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
STEADY = 1.1  # seeds of one program on an idle machine differ less in speed


def difference(change: list[float], base: list[float]) -> tuple[float, float]:
    """
    (the mean of the change's losses less that of the base's, the noise of this difference). The
    noise of a single seed is infinite.
    """
    found = mean(change) - mean(base)
    if min(len(change), len(base)) < 2:
        return found, math.inf
    a, b = variance(change) / len(change), variance(base) / len(base)
    if a + b == 0:
        return found, 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(change) - 1) + b**2 / (len(base) - 1))
    t = T_95[min(math.floor(freedom + 1e-9), len(T_95)) - 1]
    return found, t * math.sqrt(a + b)


def verdict(found: float, noise: float) -> str:
    if abs(found) <= noise:
        return "inconclusive"
    return "better" if found < 0 else "worse"


def name_of(runs: list[Run]) -> str:
    """zloss-1 and zloss-2 are zloss."""
    if len(runs) == 1:
        return runs[0].name
    shared = commonprefix([run.name for run in runs])
    return re.sub(r"[-_.]\d*$", "", shared) or runs[0].name


def last_value(run: Run, figure: str) -> float:
    """The val_loss or bits_per_byte of the last evaluation."""
    return float(run.eval[figure][-1])


def check(runs: list[Run]) -> None:
    """Raises UserError if these runs of one side are not seeds of it, trained to their ends."""
    problems = []
    seeds = Counter(run.config.get("seed") for run in runs)
    for run in runs:
        seed = run.config.get("seed")
        if seed is not None and seeds[seed] > 1:
            problems.append(
                f"{run.name}: another run has seed {seed} too; give each its own --seed"
            )
        if not len(run.eval["iter"]) or not math.isfinite(last_value(run, "val_loss")):
            problems.append(f"{run.name}: its last evaluation has no val loss; leave it out")
        elif run.start.get("program") == "nanoGPT":
            continue  # its log does not tell why it ended
        elif (
            run.end.get("reason", "SIGKILL").startswith("SIG")
            or run.end["iters"] != run.eval["iter"][-1]
        ):
            problems.append(f"{run.name}: not trained to its end; resume it, or leave it out")
    raise_if_any(problems)


def why_uneven(runs: list[Run]) -> str:
    """Why equal hours were not equal work for these seeds; empty if they were."""
    if not any(run.config.get("hours") or run.config.get("until") for run in runs):
        return ""
    speeds = [percentile(run.step["tokens_per_sec"], 50) for run in runs]
    known = [speed for speed in speeds if speed]
    if not known or max(known) <= STEADY * min(known):
        return ""
    gap = f"seeds of {name_of(runs)} differ {max(known) / min(known):.1f}x in speed"
    return f"{gap}: the machine was busy; compare runs of equal --max_iters instead of --hours"
