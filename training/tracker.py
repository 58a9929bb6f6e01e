"""
wandb and tensorboard, beside metrics.jsonl.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from common.console import warn
from configurator import Config, config_values


class Tracker:
    """
    wandb or tensorboard beside metrics.jsonl. One that is missing or fails warns once and is left
    out. What tensorboard has in out_dir from iteration `purge_from` on is replaced; wandb shows
    each resume as a run of its own.
    """

    def __init__(self, config: Config, wanted: bool = True, purge_from: int = 0):
        self.kind, self.writer = config.tracker if wanted else "none", None
        with self.forgiving():
            if self.kind == "wandb":
                import wandb

                settings = dict(
                    project=config.wandb_project, name=config.wandb_run_name, dir=config.out_dir
                )
                self.writer = wandb.init(**settings, config=config_values(config))
            elif self.kind == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(config.out_dir, purge_step=purge_from)

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker does, the run is worth more
            reason = " ".join(str(error).splitlines())
            warn(f"tracker {self.kind}: {reason}; going on without it")
            self.writer = None

    def log(self, record: dict) -> None:
        if self.writer is None or record["kind"] not in ("step", "eval"):
            return
        with self.forgiving():
            numbers = {
                f"{record['kind']}/{k}": v
                for k, v in record.items()
                if isinstance(v, int | float) and k != "iter"
            }
            if self.kind == "wandb":
                self.writer.log(numbers, step=record["iter"])
            else:
                for name, value in numbers.items():
                    self.writer.add_scalar(name, value, record["iter"])

    def close(self) -> None:
        if self.writer is not None:
            with self.forgiving():
                self.writer.finish() if self.kind == "wandb" else self.writer.close()
