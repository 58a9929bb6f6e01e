"""
Updates that train_step skipped because a gradient was not finite: which data they read, and when to
give up.
"""

import math

import torch

from common.console import RunError
from configurator import Config
from training.hardware import Hardware
from training.ranks import Ranks
from training.runlog import Iteration, RunLog

MAX_SKIPS = 10  # in a row; after so many the run ends
MOST_ITERATIONS = 1000  # whose tensors are kept until somebody looks at them
LOSS_SCALE_HALVINGS = 16  # from torch.amp.GradScaler's first loss scale, 2^16, down to none


class Skips:
    """Looks for skipped updates now and then: to see one, the host must wait for the device."""

    def __init__(self, config: Config, hw: Hardware, ranks: Ranks, log: RunLog, windows):
        """`windows` tell where a sequence stands in the data: ShuffledWindows, or a Stream."""
        self.config, self.ranks, self.log, self.windows = config, ranks, log, windows
        self.normal_halvings = LOSS_SCALE_HALVINGS if hw.dtype == torch.float16 else 0
        self.iterations: list[Iteration] = []  # not looked at yet
        self.in_a_row = self.halvings_in_a_row = 0

    def add(self, it: Iteration, look: bool) -> None:
        """
        Note an iteration. If it is time to `look`, or long since, name those whose update was
        skipped. Raises RunError after MAX_SKIPS in a row.
        """
        self.iterations.append(it)
        if not look and len(self.iterations) < MOST_ITERATIONS:
            return
        self.log.wait_for_device()
        norms = torch.stack([it.grad_norm for it in self.iterations])
        for it, finite in zip(self.iterations, norms.isfinite().tolist(), strict=True):
            if finite:
                self.in_a_row = self.halvings_in_a_row = 0
            else:
                self.report(it)
        self.iterations.clear()

    def report(self, it: Iteration) -> None:
        """
        Say which data a skipped update read. With float16 some skips are normal: the loss scale is
        too large at first and from time to time, and each skip halves it.
        """
        micro_batch = self.first_bad_micro_batch(it)
        if micro_batch is None and self.halvings_in_a_row < self.normal_halvings:
            self.halvings_in_a_row += 1
            message = "update skipped, the loss scale is halved"
            self.log.record("event", iter=it.iter_num, message=message)
            return
        self.in_a_row += 1
        where = f"all losses are finite; the data begin at {self.windows.locate(it.sequences)}"
        if micro_batch is not None:
            sequence = it.sequences + micro_batch * self.config.batch_size
            where = f"micro-batch {micro_batch} reads {self.windows.locate(sequence)}"
        self.log.warn(it.iter_num, f"update skipped, its gradient is not finite; {where}")
        if self.in_a_row >= MAX_SKIPS:
            hint = "try a lower learning_rate or dtype=float32"
            # all ranks have the same gradients
            raise RunError(f"{self.in_a_row} updates in a row skipped; {hint}", on_all_ranks=True)

    def first_bad_micro_batch(self, it: Iteration) -> int | None:
        """The first micro-batch of all ranks whose loss is not finite. None: all are finite."""
        bad = (~it.losses.isfinite()).nonzero().flatten().tolist()
        # this rank has every world_size-th micro-batch
        mine = bad[0] * self.ranks.world_size + self.ranks.rank if bad else math.inf
        first = -self.ranks.max([-mine])[0]
        return int(first) if first < math.inf else None
