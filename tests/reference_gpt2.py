"""
Train GPT-2 a second time, with transformers' model and torch's AdamW in float64; the schedule, the
order of the windows and both evaluations stand here. Nothing of the program is imported. Tests
compare real runs with this trainer, from which they differ only by the rounding of their float32.

    model = reference_gpt2.model_of(checkpoint["model"], config)
    run = reference_gpt2.train(model, tokens, config)         trains `model`

`config` is a dict of the program's keys.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from hf_reference import as_transformers
from reference_fast import read_split, shuffled_windows
from torch import Tensor
from transformers import GPT2LMHeadModel


class Run(NamedTuple):
    """Hold what a run logs."""

    steps: list[tuple[float, float, float]]  # loss, learning rate, gradient norm before clipping
    evals: list[tuple[int, float, float]]  # iteration, train loss, validation loss


def model_of(weights: dict[str, Tensor], config: dict) -> GPT2LMHeadModel:
    """Return a model with a checkpoint's weights. Biases that they lack stay 0."""
    model = as_transformers(weights, SimpleNamespace(**config)).double()
    for name, p in model.named_parameters():
        p.requires_grad_(name in weights)
    return model


def loss_of(model: GPT2LMHeadModel, windows: list[Tensor]) -> Tensor:
    """
    Return the mean loss in nats on windows of T + 1 tokens. The padding of the vocabulary takes
    part in the softmax.
    """
    block = torch.stack(windows)
    logits = model(block[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())


def cosine(config: dict) -> list[float]:
    """Return each iteration's learning rate: linear warmup, then half a cosine to min_lr."""
    warmup = config["warmup_iters"]
    peak = config["learning_rate"]
    lowest = config["min_lr"]
    rates = []
    for it in range(config["max_iters"]):
        over = min(1.0, (it - warmup) / (config["lr_decay_iters"] - warmup))
        decayed = lowest + 0.5 * (1 + math.cos(math.pi * over)) * (peak - lowest)
        rates.append(peak * (it + 1) / (warmup + 1) if it < warmup else decayed)
    return rates


def train(model: GPT2LMHeadModel, folder: Path, config: dict) -> Run:
    """Train for max_iters iterations. Only matrices and embeddings decay."""
    run = Run([], [])
    windows = shuffled_windows(read_split(folder, "train"), config["block_size"], config["seed"])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        dict(params=[p for p in trained if p.dim() > 1], weight_decay=config["weight_decay"]),
        dict(params=[p for p in trained if p.dim() == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config["beta1"], config["beta2"]), foreach=False)
    sequences = config["batch_size"] * config["gradient_accumulation_steps"]
    for it, lr in enumerate(cosine(config)):
        if it % config["eval_interval"] == 0:
            run.evals.append((it, *evaluate(model, folder, config)))
        loss = loss_of(model, [next(windows) for _ in range(sequences)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config["grad_clip"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        run.steps.append((loss.item(), lr, norm.item()))
    run.evals.append((config["max_iters"], *evaluate(model, folder, config)))
    return run


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, folder: Path, config: dict) -> list[float]:
    """
    Return the train and val loss of an evaluation, on equally many windows of each split, spread
    over the whole of it.
    """
    T, losses = config["block_size"], []
    tokens = min(config["eval_tokens"], len(read_split(folder, "val")))
    for name in ("train", "val"):
        ids = read_split(folder, name)
        available = (len(ids) - 1) // T
        count = min(tokens // T, available)
        starts = [n * available // count * T for n in range(count)]
        losses.append(loss_of(model, [ids[at : at + T + 1] for at in starts]).item())
    return losses
