"""
Send a run's figures to wandb or TensorBoard. Each is imported only if a run asks for it. Its errors
are caught in log.py.
"""

import os
from pathlib import Path
from typing import Any

from configurator import Config, config_values

# Metrics named as in nanoGPT, so that its wandb dashboards work. The rest are named KIND/NAME.
NANOGPT_NAMES = {
    "step/lr": "lr",
    "step/mfu": "mfu",
    "eval/train_loss": "train/loss",
    "eval/val_loss": "val/loss",
}


class Tracker:
    """Sends steps and evaluations to wandb or tensorboard, with MFU in percent."""

    def __init__(self, c: Config, it: int):
        """
        Start the tracker of a run that begins or resumes at iteration `it`. On a resume,
        tensorboard discards the curves in out_dir after that, and wandb continues the run whose id
        is in out_dir/wandb_id.txt, dropping steps at or below its last one.
        """
        self.is_wandb = c.tracker == "wandb"
        self.writer: Any
        if self.is_wandb:
            from wandb import init  # fails for a mere folder named wandb

            # In a terminal, wandb without a login would ask for one and wait all night. In a dumb
            # terminal it fails instead
            os.environ["TERM"] = "dumb"
            id_file = Path(c.out_dir, "wandb_id.txt")
            run_id = id_file.read_text() if it and id_file.exists() else ""
            self.writer = init(
                id=run_id or None,
                resume="allow",
                allow_val_change=True,  # keys may change on a resume
                project=c.wandb_project,
                name=Path(c.out_dir).name,
                dir=c.out_dir,
                config=config_values(c),
            )
            id_file.write_text(self.writer.id)
        else:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(c.out_dir, purge_step=it + 1 if it else 0)

    def log(self, record: dict) -> None:
        if record["kind"] not in ("step", "eval"):
            return
        numbers = {}
        for name, value in record.items():
            if type(value) in (int, float) and name != "iter":
                name = f"{record['kind']}/{name}"
                numbers[NANOGPT_NAMES.get(name, name)] = value
        if numbers.get("mfu"):
            numbers["mfu"] *= 100
        if self.is_wandb:
            self.writer.log(numbers | {"iter": record["iter"]}, step=record["iter"])
        else:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, record["iter"])

    def close(self) -> None:
        if self.is_wandb:
            self.writer.finish()
        else:
            self.writer.close()
