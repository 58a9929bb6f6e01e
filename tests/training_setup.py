"""Set up training in this process as train.py does, for tests that inspect its tensors."""

import torch
from torch import Tensor

from configurator import Config
from data.loader import Batch, to_batch
from machine import hardware
from machine.compile_check import compile_model
from model_fast import build_model, model_config
from optimizer import build_optimizer
from train import train_step


class TrainingSetup:
    """Hold a run's model, its optimizer and the micro-batches of an iteration, of random tokens."""

    def __init__(self, config: Config, vocab: int = 50257, build=build_model):
        self.config = config
        self.hw = hardware.set_up(config)
        torch.manual_seed(config.seed)
        self.model = build(model_config(config, vocab)).to(self.hw.device)
        if config.compile:
            compile_model(self.model)
        self.optimizer = build_optimizer(self.model, config, self.hw.dtype)
        is_scaled = self.hw.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.hw.device.type, enabled=is_scaled)
        tokens = torch.randint(vocab, (config.batch_size, config.block_size + 1))
        number = range(config.iter_sequences // config.batch_size)
        self.batches = [to_batch(tokens, self.hw.device) for _ in number]

    def step(self, batches: list[Batch] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one iteration, by default on `self.batches`. Returns what train_step() does."""
        return train_step(
            self.model,
            self.optimizer,
            self.scaler,
            batches or self.batches,
            self.config.grad_clip,
            self.hw.autocast(),
        )
