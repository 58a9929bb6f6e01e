"""
How far a run is.
"""

import math
from dataclasses import dataclass, fields

TURNED = 1.01  # times the best validation loss: usually more than noise


@dataclass
class Progress:
    """What changes from iteration to iteration, besides weights and optimizer."""

    iter_num: int = 0  # updates made
    tokens: int = 0
    sequences: int = 0  # position in the order of the data
    best_val_loss: float = math.inf
    best_train_loss: float = math.inf  # of the same evaluation
    best_iter: int = -1
    evaluated_at: int = -1
    val_loss: float = math.inf  # then
    train_loss: float = math.inf
    lr_horizon: int = 0  # the iteration at which the learning rate's decay ends

    # Of this process alone, so not in state_dict(): an update has begun and its iteration is not
    # over; this rank's random states as of the last whole iteration
    updating: bool = False
    rng: dict | None = None

    def begin_update(self, *_) -> None:
        """Called by the optimizer before it changes the first weight."""
        self.updating = True

    def advance(self, sequences: int, tokens: int, rng: dict) -> None:
        """After an iteration of so many sequences and tokens, which left these random states."""
        self.updating, self.rng = False, rng
        self.iter_num += 1
        self.sequences += sequences
        self.tokens += tokens

    @property
    def overfitted(self) -> bool:
        """
        Whether the last evaluation had a clearly higher validation loss than that of `best_iter`,
        and a lower training loss.
        """
        fell = self.train_loss < self.best_train_loss < math.inf  # in older checkpoints not known
        return fell and TURNED * self.best_val_loss < self.val_loss < math.inf

    def state_dict(self) -> dict:
        """What a checkpoint keeps; Progress(**state) continues from there."""
        own = ("updating", "rng")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
