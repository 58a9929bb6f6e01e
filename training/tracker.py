"""
wandb and tensorboard, in addition to metrics.jsonl.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.console import warn
from configurator import Config, config_values

# nanoGPT's names, so that its dashboards work; all others are KIND/NAME, as step/loss
NANOGPT_NAMES = {"step/lr": "lr", "step/mfu": "mfu"}
NANOGPT_NAMES |= {"eval/train_loss": "train/loss", "eval/val_loss": "val/loss"}


class Tracker:
    """
    Sends the records of metrics.jsonl to wandb or tensorboard, with MFU in percent. If the tracker
    is missing or fails, this warns once and sends nothing more. On resume, tensorboard's curves in
    out_dir are replaced from iteration `purge_from` on; wandb shows each resume as a separate run.
    """

    def __init__(self, config: Config, enabled: bool = True, purge_from: int = 0):
        self.kind = config.tracker if enabled else "none"
        self.writer: Any
        with self.warn_on_failure():
            if self.kind == "wandb":
                import wandb

                names: dict = dict(project=config.wandb_project, name=config.wandb_run_name)
                self.writer = wandb.init(**names, dir=config.out_dir, config=config_values(config))
            elif self.kind == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(config.out_dir, purge_step=purge_from)

    @contextmanager
    def warn_on_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker does, the run is worth more
            reason = " ".join(str(error).splitlines()).rstrip(".")
            if isinstance(error, ImportError):
                reason += f" (pip install {self.kind})"
            warn(f"tracker {self.kind}: {reason}; continuing without it")
            self.kind = "none"

    def log(self, record: dict) -> None:
        if record["kind"] not in ("step", "eval"):
            return
        with self.warn_on_failure():
            numbers = {}
            for name, value in record.items():
                if isinstance(value, int | float) and name != "iter":
                    name = f"{record['kind']}/{name}"
                    numbers[NANOGPT_NAMES.get(name, name)] = value
            if numbers.get("mfu"):
                numbers["mfu"] *= 100
            if self.kind == "wandb":
                self.writer.log(numbers | {"iter": record["iter"]}, step=record["iter"])
            elif self.kind == "tensorboard":
                for name, value in numbers.items():
                    self.writer.add_scalar(name, value, record["iter"])

    def close(self) -> None:
        with self.warn_on_failure():
            if self.kind == "wandb":
                self.writer.finish()
            elif self.kind == "tensorboard":
                self.writer.close()
