"""Set up training in this process as train.py does, for tests that inspect its tensors."""

import tempfile
from pathlib import Path

import torch

import bench
from configurator import Config
from data.loader import Batches
from data.missing import vocab_where_missing
from data.shards import open_dataset
from model_fast import build_model
from train import build_optimizer, model_config, train_step
from training import hardware
from training.compiled import compile_model


class TrainingSetup:
    """Build a run's model, optimizer and batches, with random tokens if the dataset is missing."""

    def __init__(self, config: Config, build=build_model):
        self.config = config
        self.hw = hardware.set_up(config)
        torch.manual_seed(config.seed)
        dataset = config.dataset
        if vocab := vocab_where_missing(config):
            self.folder = tempfile.TemporaryDirectory()
            dataset = bench.write_random_tokens(Path(self.folder.name, "data"), vocab, config.seed)
        data = open_dataset(dataset)
        self.gpt_config = model_config(
            config, data.vocab, flash=self.hw.flash(config), compiled=config.compile
        )
        self.model = build(self.gpt_config).to(self.hw.device)
        if config.compile:
            compile_model(self.model)
        self.optimizer = build_optimizer(self.model, config, self.hw.dtype)
        is_scaled = self.hw.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.hw.device.type, enabled=is_scaled)
        self.batches = Batches(data, config, self.hw.device)

    def step(self) -> None:
        """Run one iteration."""
        train_step(
            self.model,
            self.optimizer,
            self.scaler,
            self.batches.take(self.config.gradient_accumulation_steps),
            self.config.grad_clip,
            self.hw.autocast(),
        )
