"""
Learning curves: the val loss of a run at a point, and the point at which it reaches a loss.

A loss is known where a run was evaluated. Between two evaluations it is read off a straight line.
"""

import numpy as np

from reports.records import RunRecords

# A straight line to a loss may span this share of the way so far. For a loss that falls like
# 1/sqrt(x) and is 1 nat above its floor, it is off by about 0.2^2 / 8 * 3/4 = 0.004 nats, less than
# the noise.
NEAR = 0.2


def learning_curve(run: RunRecords, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """
    Where on the axis (iter, tokens or hours) the run was evaluated, and its val losses there. The
    evaluation at iteration 0 is left out: it says nothing about what was learned.
    """
    x, losses = run.eval[axis], run.eval["val_loss"]
    known = (run.eval["iter"] > 0) & np.isfinite(x) & np.isfinite(losses)
    return x[known], losses[known]


def loss_at(x: np.ndarray, losses: np.ndarray, at: float) -> float | None:
    """The val loss at this x; None where a straight line to it would be too long."""
    i = int(np.searchsorted(x, at))
    if i == len(x) or (x[i] > at and (i == 0 or x[i] - x[i - 1] > NEAR * at)):
        return None
    return float(np.interp(at, x, losses))


def reach(x: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """
    Where on x a learning curve first comes down to this loss. None if it never does, or if it did
    so before its first evaluation.
    """
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    i = reached[0]
    if losses[i] == target:
        return float(x[i])
    # the loss falls from i - 1 to i, and np.interp wants it to rise
    return float(np.interp(target, losses[[i, i - 1]], x[[i, i - 1]])) if i > 0 else None
