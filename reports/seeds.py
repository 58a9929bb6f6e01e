"""
Decide whether a change is better than its base, from several seeds of each.

Seeds of the same program differ too, so a difference between two means counts only if it is larger
than its noise: half the width of its 95% confidence interval by Welch's t-test (Biometrika 34,
1947). About one in 20 comparisons still finds a difference for a change that does nothing.
"""

import math
import re
from collections import Counter
from os.path import commonprefix
from statistics import mean, variance

import numpy as np

from common.console import raise_if_any
from reports.runs import Run, percentile

STEADY = 1.1  # on an idle machine, the seeds' speeds differ by less than this factor


def difference(change: list[float], base: list[float], *, times: int = 1) -> tuple[float, float]:
    """
    Return the change's mean loss minus the base's, and the noise of this difference in the losses'
    unit, or the noise to expect with `times` times as many seeds. With a single seed on
    either side, the noise is infinite.
    """
    found = mean(change) - mean(base)
    if min(len(change), len(base)) < 2:
        return found, math.inf
    n, m = times * len(change), times * len(base)
    a, b = variance(change) / n, variance(base) / m
    if a + b == 0:
        return found, 0.0
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return found, student_t(freedom) * math.sqrt(a + b)


def student_t(freedom: float) -> float:
    """
    Return Student's t for 95%. `freedom` need not be a whole number. Substituting t = sqrt(freedom)
    * tan(x) turns the density into cos(x)^(freedom - 1), and 95% of the area lies below the result.
    """
    x, step = np.linspace(0, math.pi / 2, 10_000, endpoint=False, retstep=True)
    area = np.cumsum(np.cos(x + step / 2) ** (freedom - 1))  # from 0 to x + step
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * area[-1], area, x + step))


def verdict(found: float, noise: float) -> str:
    if abs(found) <= noise:
        return "inconclusive"
    return "better" if found < 0 else "worse"


def name_of(runs: list[Run]) -> str:
    """Return the part of the name that all runs share: zloss for zloss-1 and zloss-2."""
    if len(runs) == 1:
        return runs[0].name
    shared = commonprefix([run.name for run in runs])
    return re.sub(r"[-_.]\d*$", "", shared) or runs[0].name


def last_value(run: Run, figure: str) -> float:
    """Return the val_loss or bits_per_byte of the last evaluation."""
    return float(run.eval[figure][-1])


def check(runs: list[Run]) -> None:
    """
    Check that the runs of one side have different seeds and were trained to their ends. Raises
    UserError with one line per problem.
    """
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
        elif (
            run.end.get("reason", "SIGKILL").startswith("SIG")
            or run.end["iters"] != run.eval["iter"][-1]
        ):
            problems.append(f"{run.name}: not trained to its end; resume it, or leave it out")
    raise_if_any(problems)


def why_uneven(runs: list[Run]) -> str:
    """
    Return why these seeds did not do equal work in equal hours, "" if they did. Runs with --hours
    that differ in speed also differ in their number of iterations.
    """
    if not any(run.config.get("hours") for run in runs):
        return ""
    speeds = [percentile(run.step["tokens_per_sec"], 50) for run in runs]
    known = [speed for speed in speeds if speed]
    if not known or max(known) <= STEADY * min(known):
        return ""
    gap = f"seeds of {name_of(runs)} differ {max(known) / min(known):.1f}x in speed"
    return f"{gap}: the machine was busy; compare runs of equal --max_iters instead of --hours"
