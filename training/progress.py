"""
How far a run is.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Progress:
    """What changes from iteration to iteration, other than weights and optimizer."""

    iter_num: int = 0  # updates made
    tokens: int = 0  # trained on
    sequences: int = 0  # read: the position in the order of the data
    evaluated_at: int = -1  # iteration of the last evaluation
    val_loss: float = math.inf  # of the last evaluation
    best_val_loss: float = math.inf
    best_iter: int = -1

    def advance(
        self, micro_batches: list[tuple[Tensor, Tensor]], world_size: int, sequences: int
    ) -> None:
        """
        Count an iteration on these micro-batches, and as many in each other process. `sequences`:
        how many have been read so far.
        """
        self.iter_num += 1
        self.sequences = sequences
        self.tokens += world_size * sum(x.numel() for x, _ in micro_batches)

    def note_evaluation(self, val_loss: float) -> bool:
        """Record an evaluation. Returns whether it is the best so far."""
        self.evaluated_at, self.val_loss = self.iter_num, val_loss
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_iter = val_loss, self.iter_num
        return self.best_iter == self.iter_num
