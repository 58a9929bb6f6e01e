"""
Implement a second trainer in plain torch: GPT-2, AdamW, the schedule, the order of the windows and
both evaluations. Nothing of the program is imported. Tests compare real runs with this trainer.

    weights = reference_gpt2.weights(checkpoint["model"])
    run = reference_gpt2.train(weights, tokens, config)      changes `weights`, as training does

`config` is a dict of the program's keys. Everything is computed in float64, so a real run differs
only by the rounding of its own float32.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]  # by nanoGPT's names; without the head if it is tied to the embedding


class Run(NamedTuple):
    """Hold what a run logs."""

    steps: list[tuple[float, float, float]]  # loss, learning rate, gradient norm before clipping
    evals: list[tuple[int, float, float]]  # iteration, train loss, validation loss


def weights(state: Weights) -> Weights:
    """Return a checkpoint's weights in float64, ready for train()."""
    tied = torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    names = [name for name in state if not (tied and name == "lm_head.weight")]
    return {name: state[name].double().requires_grad_() for name in names}


# -----------------------------------------------------------------------------
# The model


def loss_of(w: Weights, config: dict, rows: np.ndarray) -> Tensor:
    """
    Return GPT-2's mean loss in nats on windows (B, T + 1). The padding of the vocabulary takes part
    in the softmax.
    """
    block = torch.from_numpy(rows)
    targets = block[:, 1:]
    logits = logits_of(w, config, block[:, :-1])
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def logits_of(w: Weights, config: dict, idx: Tensor) -> Tensor:
    """Return the logits (B, T, V) for tokens (B, T)."""
    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][: idx.size(1)]
    for i in range(config["n_layer"]):
        name = f"transformer.h.{i}"
        x = x + attention(w, f"{name}.attn", norm(w, f"{name}.ln_1", x), config["n_head"])
        x = x + mlp(w, f"{name}.mlp", norm(w, f"{name}.ln_2", x))
    head = w.get("lm_head.weight", w["transformer.wte.weight"])
    return norm(w, "transformer.ln_f", x) @ head.T


def attention(w: Weights, name: str, x: Tensor, n_head: int) -> Tensor:
    """Apply causal self-attention, (B, T, C) -> (B, T, C)."""
    qkv = linear(w, f"{name}.c_attn", x).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv)  # (B, nh, T, hs)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    attended = scores.masked_fill(~seen(x.size(1)), -math.inf).softmax(-1) @ v
    return linear(w, f"{name}.c_proj", attended.transpose(1, 2).flatten(2))


def seen(T: int) -> Tensor:
    """Return which tokens each token attends to, (T, T): itself and those before it."""
    return torch.ones(T, T).tril().bool()


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply two matrices, with the tanh approximation of GELU between them."""
    u = linear(w, f"{name}.c_fc", x)
    gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return linear(w, f"{name}.c_proj", gelu)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply LayerNorm, with or without a bias."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


# -----------------------------------------------------------------------------
# The data


def split(folder: Path, name: str) -> np.ndarray:
    """Return all tokens of a split, its shards one after another."""
    header = 512  # 256 int32, in uint16
    shards = [np.fromfile(path, "<u2")[header:] for path in sorted(folder.glob(f"{name}_*.bin"))]
    return np.concatenate(shards).astype(np.int64)


def shuffled(ids: np.ndarray, T: int, seed: int) -> Iterator[np.ndarray]:
    """
    Yield the training windows. An epoch is every window once, in an order and from an offset that
    follow from the seed and the epoch.
    """
    epoch = 0
    while True:
        random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        offset = int(random.integers(min(T, len(ids) - T)))
        count = (len(ids) - 1 - offset) // T
        for n in random.permutation(np.arange(count, dtype=np.int32)):
            yield ids[offset + n * T :][: T + 1]
        epoch += 1


def batches(folder: Path, config: dict) -> Iterator[np.ndarray]:
    """Yield the windows of each iteration, (sequences, T + 1)."""
    ids = split(folder, "train")
    T = config["block_size"]
    windows = shuffled(ids, T, config["seed"])
    sequences = config["batch_size"] * config["gradient_accumulation_steps"]
    while True:
        yield np.stack([next(windows) for _ in range(sequences)])


# -----------------------------------------------------------------------------
# Training


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


class AdamW:
    """Implement AdamW (Loshchilov & Hutter 2019). Only matrices and embeddings decay."""

    def __init__(self, w: Weights, config: dict):
        self.w = w
        self.betas = config["beta1"], config["beta2"]
        self.decay = config["weight_decay"]
        self.updates = 0
        self.means = {name: torch.zeros_like(p) for name, p in w.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in w.items()}

    @torch.no_grad()
    def update(self, grads: Weights, lr: float) -> None:
        self.updates += 1
        for name, p in self.w.items():
            self.means[name].lerp_(grads[name], 1 - self.betas[0])
            self.squares[name].lerp_(grads[name].square(), 1 - self.betas[1])
            mean = self.means[name] / (1 - self.betas[0] ** self.updates)
            square = self.squares[name] / (1 - self.betas[1] ** self.updates)
            if p.dim() > 1:
                p *= 1 - lr * self.decay
            p -= lr * mean / (square.sqrt() + 1e-8)


def train(w: Weights, folder: Path, config: dict, rates: list[float] | None = None) -> Run:
    """Train for max_iters iterations, at the given learning rates or those of cosine()."""
    run = Run([], [])
    optimizer = AdamW(w, config)
    data = batches(folder, config)
    for it, lr in enumerate(rates or cosine(config)):
        if it % config["eval_interval"] == 0:
            run.evals.append((it, *evaluate(w, folder, config)))
        loss = loss_of(w, config, next(data))
        grads = dict(zip(w, torch.autograd.grad(loss, [*w.values()]), strict=True))
        total = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        scale = min(1.0, config["grad_clip"] / total)
        optimizer.update({name: grad * scale for name, grad in grads.items()}, lr)
        run.steps.append((loss.item(), lr, total))
    run.evals.append((config["max_iters"], *evaluate(w, folder, config)))
    return run


@torch.no_grad()
def evaluate(w: Weights, folder: Path, config: dict) -> tuple[float, float]:
    """
    Return the train and val loss of an evaluation, on equally many windows of each split, spread
    over the whole of it.
    """
    T = config["block_size"]
    tokens = min(config["eval_tokens"], len(split(folder, "val")))
    losses = []
    for name in ("train", "val"):
        ids = split(folder, name)
        available = (len(ids) - 1) // T
        count = min(tokens // T, available)
        rows = [ids[n * available // count * T :][: T + 1] for n in range(count)]
        losses.append(loss_of(w, config, np.stack(rows)).item())
    return losses[0], losses[1]
