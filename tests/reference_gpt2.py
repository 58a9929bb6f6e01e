"""
Train GPT-2 a second time, in plain torch: the model, the schedule and both evaluations, with
torch's AdamW and the order of the windows in reference_fast.py. Nothing of the program is imported.
Tests compare real runs with this trainer.

    weights = reference_gpt2.weights(checkpoint["model"])
    run = reference_gpt2.train(weights, tokens, config)      changes `weights`, as training does

`config` is a dict of the program's keys. Everything is computed in float64, so a real run differs
only by the rounding of its own float32.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from reference_fast import read_split, shuffled_windows, spread_windows
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


def loss_of(w: Weights, config: dict, windows: list[Tensor]) -> Tensor:
    """
    Return GPT-2's mean loss in nats on windows of T + 1 tokens. The padding of the vocabulary takes
    part in the softmax.
    """
    block = torch.stack(windows)
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


def train(w: Weights, folder: Path, config: dict) -> Run:
    """Train for max_iters iterations. Only matrices and embeddings decay."""
    run = Run([], [])
    windows = shuffled_windows(read_split(folder, "train"), config["block_size"], config["seed"])
    trained = [*w.values()]
    groups = [
        dict(params=[p for p in trained if p.dim() > 1], weight_decay=config["weight_decay"]),
        dict(params=[p for p in trained if p.dim() == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config["beta1"], config["beta2"]), foreach=False)
    sequences = config["batch_size"] * config["gradient_accumulation_steps"]
    for it, lr in enumerate(cosine(config)):
        if it % config["eval_interval"] == 0:
            run.evals.append((it, *evaluate(w, folder, config)))
        loss = loss_of(w, config, [next(windows) for _ in range(sequences)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config["grad_clip"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        run.steps.append((loss.item(), lr, norm.item()))
    run.evals.append((config["max_iters"], *evaluate(w, folder, config)))
    return run


@torch.no_grad()
def evaluate(w: Weights, folder: Path, config: dict) -> list[float]:
    """
    Return the train and val loss of an evaluation, on equally many windows of each split, spread
    over the whole of it.
    """
    losses = []
    tokens = min(config["eval_tokens"], len(read_split(folder, "val")))
    for name in ("train", "val"):
        windows = spread_windows(read_split(folder, name), config["block_size"], tokens)
        losses.append(loss_of(w, config, windows).item())
    return losses
