"""
Decide whether a change is better than its base, from several seeds of each.

Seeds of the same program differ too, so a difference between two means counts only if it is larger
than its noise: half the width of its 95% confidence interval by Welch's t-test (Biometrika 34,
1947). About one in 20 comparisons still finds a difference for a change that does nothing.
"""

import math
from collections import Counter
from statistics import mean, variance

import numpy as np

from common.console import raise_if_any
from reports.runs import Run


def compare(change: list[Run], base: list[Run]) -> dict:
    """
    Print the difference of the last val losses, its noise and the verdict, one `name: value` per
    line. Returns what --json writes. Raises UserError if a side has other than finished runs of
    different seeds.
    """
    check(change)
    check(base)
    found, noise = difference(*([last_loss(run) for run in side] for side in (change, base)))
    told = verdict(found, noise)
    print(f"difference: {found:+.4f}", f"noise: {noise:.4f}", f"verdict: {told}", sep="\n")
    return dict(difference=found, noise=noise if math.isfinite(noise) else None, verdict=told)


def difference(change: list[float], base: list[float]) -> tuple[float, float]:
    """
    Return the change's mean loss minus the base's, and the noise of this difference. With a single
    seed on either side, the noise is infinite.
    """
    found = mean(change) - mean(base)
    n, m = len(change), len(base)
    if min(n, m) < 2:
        return found, math.inf
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


def last_loss(run: Run) -> float:
    return float(run.eval["val_loss"][-1])


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
        if not len(run.eval["iter"]) or not math.isfinite(last_loss(run)):
            problems.append(f"{run.name}: its last evaluation has no val loss; leave it out")
        elif (
            run.end.get("reason", "SIGKILL").startswith("SIG")
            or run.end["iters"] != run.eval["iter"][-1]
        ):
            problems.append(f"{run.name}: not trained to its end; resume it, or leave it out")
    raise_if_any(problems)
