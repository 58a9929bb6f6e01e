"""
Implement the fast recipe a second time, in plain torch: the model, its learning rates, Muon, the
schedule, one iteration, an evaluation. Nothing of the program is imported; test_recipe.py compares
train.py's runs with this trainer. Only the names of the weights are the program's, so that its
checkpoints can be loaded. With bias=True, this is the recipe of train_gpt_simple.py at
record/fable-5-2726 in PrimeIntellect-ai/frontier-automated-speedrun.

Shapes in comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels,
V = vocabulary.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Config

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]  # by the program's names

# -----------------------------------------------------------------------------
# The model


def norm(x: Tensor, gains: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), gains)


def scaled_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply RMSNorm, with a gain for each channel if the model has biases."""
    return norm(x, w[f"{name}.weight"].type_as(x) if f"{name}.weight" in w else None)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """Keep and update the weights in float32, and multiply them in the dtype of x."""
    bias = w[f"{name}.bias"].type_as(x) if f"{name}.bias" in w else None
    return F.linear(x, w[f"{name}.weight"].type_as(x), bias)


def rotary_angles(T: int, head_size: int) -> Tensor:
    """
    Return the angles (T, 1, hs), opposite ones for channels i and i + hs / 2. Half of the pairs do
    not rotate.
    """
    radians_per_token = torch.zeros(head_size // 2)
    radians_per_token[: head_size // 4] = 1024 ** -torch.linspace(0, 1, head_size // 4)
    angles = torch.arange(T)[:, None, None] * radians_per_token
    return torch.cat((angles, -angles), dim=-1)


def rotate(x: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + hs / 2) of x (B, T, n, hs) by their position's angles."""
    T, head_size = x.size(1), x.size(-1)
    angles = rotary_angles(T, head_size)
    first, second = x.chunk(2, dim=-1)
    partners = torch.cat((second, first), dim=-1)
    return (x * angles.cos() + partners * angles.sin()).type_as(x)


def attention(w: Weights, name: str, x: Tensor, n_head: int) -> Tensor:
    """Apply causal self-attention, (B, T, C) -> (B, T, C)."""
    B, T, C = x.shape
    heads = linear(w, f"{name}.c_attn", x).view(B, T, 3, n_head, C // n_head)
    q, k, v = heads.unbind(dim=2)  # (B, T, nh, hs) each
    q = rotate(norm(q))
    k = rotate(norm(k))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, nh, T, hs)
    scale = 0.12 * math.sqrt(128 / (C // n_head))  # 0.12 at a head size of 128
    scores = q * scale @ k.mT  # (B, nh, T, T)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return linear(w, f"{name}.c_proj", y.transpose(1, 2).reshape(B, T, C))


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.c_proj", linear(w, f"{name}.c_fc", x).relu().square())


def mean_loss(w: Weights, c: Config, windows: list[Tensor]) -> Tensor:
    """Return the mean loss in nats on windows of T + 1 tokens."""
    block = torch.stack(windows)
    x = w["transformer.wte.weight"][block[:, :-1]]  # (B, T, C)
    x = scaled_norm(w, "transformer.ln_e", x)
    x = x.to(getattr(torch, c.dtype))  # from here on, for the residual stream and all matmuls
    for i in range(c.n_layer):
        name = f"transformer.h.{i}"
        x = x + attention(w, f"{name}.attn", scaled_norm(w, f"{name}.ln_1", x), c.n_head)
        x = x + mlp(w, f"{name}.mlp", scaled_norm(w, f"{name}.ln_2", x))
    logits = linear(w, "lm_head", scaled_norm(w, "transformer.ln_f", x)).float()  # (B, T, V)
    logits = logits / torch.sqrt(1 + (logits / 15).square())  # within +-15
    return F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())


# -----------------------------------------------------------------------------
# The optimizer: Muon for the matrices of the blocks, AdamW for everything else


# the public file's gradients are sums over the tokens of a batch, ours are means
BATCH = 524288
PUBLIC_ITERS = 2726  # of the public run, which counts two horizons in iterations
# the public file's, each of which makes a singular value x into 2 x - 1.5 x^3 + 0.5 x^5
NEWTON_SCHULZ = 18 * ((2.0, -1.5, 0.5),)


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate the nearest orthogonal matrix by Newton-Schulz iterations."""
    if matrix.size(0) > matrix.size(1):
        return orthogonalize(matrix.mT, dtype).mT  # cheaper on the shorter side
    X = (matrix / (matrix.norm() + 1e-7)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.float()


class Muon:
    def __init__(self, matrices: list[tuple[str, Tensor]], c: Config):
        """Set up the state of each matrix, a parameter or a part of one (see `parts_of`)."""
        self.matrices = matrices
        self.c = c
        self.dtype = getattr(torch, c.dtype)
        self.means = [torch.zeros_like(matrix) for _, matrix in matrices]  # of the gradients
        self.rows = [torch.zeros(len(matrix), 1) for _, matrix in matrices]  # mean squares
        self.steps = 0

    def step(self, gradients: list[Tensor], lr: float, done: float) -> None:
        """Update all matrices. `done` is the part of the run that is done."""
        self.steps += 1
        warm = min(1, done * PUBLIC_ITERS / 350)
        momentum = 0.85 * (1 - warm) + self.c.muon_momentum * warm
        for number, ((name, matrix), g) in enumerate(zip(self.matrices, gradients, strict=True)):
            mean, row = self.means[number], self.rows[number]
            mean.lerp_(g, 1 - momentum)
            ahead = g.lerp(mean, momentum)  # Nesterov's
            rate, decay, beta = lr, 0.08 * (1 - done) ** 2.25, 0.84 + 0.1 * done
            if "mlp" in name:
                third = int(name.split(".")[2]) * 3 // self.c.n_layer
                rate, beta = lr * 0.027 / 0.029, 0.86 + 0.1 * done
                decay = (0.16, 0.22, 0.28)[third] * (1 - done) ** 2.5
            row.lerp_(ahead.square().mean(1, keepdim=True), 1 - beta)
            unbiased = row / (1 - beta**self.steps)
            direction = orthogonalize(ahead / (unbiased.sqrt() + 1e-8 / BATCH), self.dtype)
            matrix.mul_(1 - rate * decay)
            matrix.sub_(direction * rate * math.sqrt(max(matrix.shape) / min(matrix.shape)))


def parts_of(name: str, weight: Tensor) -> list[Tensor]:
    """Split a weight into its matrices: c_attn holds three, of q, k and v."""
    return list(weight.chunk(3)) if name.endswith("c_attn.weight") else [weight]


def adamw_groups(w: Weights, c: Config) -> list[dict]:
    """Return AdamW's parameter groups, each with its highest rate as `peak_lr`."""
    vectors = [p for p in w.values() if p.dim() == 1]
    beta1 = 0.99 ** (PUBLIC_ITERS / c.max_iters)
    return [
        dict(params=[w["transformer.wte.weight"]], peak_lr=0.7),
        dict(params=[w["lm_head.weight"]], peak_lr=0.004),
        dict(params=vectors, peak_lr=0.035, betas=(beta1, 0.0), weight_decay=0.0),
    ]


def get_lr(it: int, highest: float, c: Config) -> float:
    """
    Warm up linearly, stay constant, and decay linearly to min_lr over the last decay_fraction of
    the run, but not below a fifth of the highest rate.
    """
    if it < c.warmup_iters:
        return highest * (it + 1) / (c.warmup_iters + 1)
    decay_iters = c.decay_fraction * c.max_iters
    left = min(1, (c.max_iters - it) / decay_iters)
    lowest = c.min_lr * (highest / c.learning_rate)
    return max(0.2 * highest, lowest + left * (highest - lowest))


# -----------------------------------------------------------------------------
# The data


def read_split(folder: Path, split: str) -> Tensor:
    """Return all tokens of a split, without the header of 1024 bytes in each of its files."""
    files = sorted(folder.glob(f"{split}_*.bin"))
    tokens = [np.fromfile(file, "<u2", offset=1024) for file in files]
    return torch.from_numpy(np.concatenate(tokens).astype(np.int64))


def shuffled_windows(tokens: Tensor, T: int, seed: int) -> Iterator[Tensor]:
    """Yield all windows of T + 1 tokens in random order; each epoch cuts them at a new offset."""
    epoch = 0
    while True:
        random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        offset = int(random.integers(T))
        count = (len(tokens) - 1 - offset) // T
        for number in random.permutation(np.arange(count, dtype=np.int32)):
            start = offset + int(number) * T
            yield tokens[start : start + T + 1]
        epoch += 1


def spread_windows(ids: Tensor, T: int, tokens: int) -> list[Tensor]:
    """Return the windows of an evaluation of `tokens` tokens, spread evenly over a split."""
    available = (len(ids) - 1) // T
    count = min(tokens // T, available)
    starts = [number * available // count * T for number in range(count)]
    return [ids[start : start + T + 1] for start in starts]


# -----------------------------------------------------------------------------
# The run


class Trainer:
    """Train on the tokens in `folder`, from a checkpoint's `weights`, which are not changed."""

    def __init__(self, weights: Weights, folder: Path, **keys):
        self.c = Config(**keys)
        self.it = 0
        self.splits = {split: read_split(folder, split) for split in ("train", "val")}
        self.windows = shuffled_windows(self.splits["train"], self.c.block_size, self.c.seed)
        self.weights = {name: p.clone().requires_grad_() for name, p in weights.items()}
        self.averages: Weights = {}
        self.matrices = [
            (n, p) for n, p in self.weights.items() if p.dim() == 2 and "transformer.h" in n
        ]
        parts = [(name, q.detach()) for name, p in self.matrices for q in parts_of(name, p)]
        self.muon = Muon(parts, self.c)
        self.adamw = torch.optim.AdamW(
            adamw_groups(self.weights, self.c),
            betas=(self.c.beta1, 0.0),  # the second one is set before each step
            eps=1e-10 / BATCH,
            weight_decay=self.c.weight_decay,
        )

    def step(self) -> tuple[float, float, float]:
        """Run one iteration, and return its loss, Muon's rate and the norm of its gradient."""
        c = self.c
        loss = 0.0
        for _ in range(c.gradient_accumulation_steps):
            batch = [next(self.windows) for _ in range(c.batch_size)]
            part = mean_loss(self.weights, c, batch) / c.gradient_accumulation_steps
            part.backward()  # adds to the gradients
            loss += part.item()
        gradients = [p.grad for p in self.weights.values()]
        grad_norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()

        lr, done = get_lr(self.it, c.learning_rate, c), self.it / c.max_iters
        for group in self.adamw.param_groups:
            group["lr"] = get_lr(self.it, group["peak_lr"], c)
            group["betas"] = (group["betas"][0], 0.965 + 0.034 * done)
        self.adamw.step()
        gradients = [part for name, p in self.matrices for part in parts_of(name, p.grad)]
        self.muon.step(gradients, lr, done)
        for p in self.weights.values():
            p.grad = None
        self.it += 1
        self.average()
        return loss, lr, grad_norm

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights over the run. After the last step, the average replaces them."""
        keep = 0.9935 ** (PUBLIC_ITERS / self.c.max_iters)
        for name, p in self.weights.items():
            before = self.averages.get(name, p)
            self.averages[name] = keep * before + (1 - keep) * p
            if self.it == self.c.max_iters:
                p.copy_(self.averages[name])

    @torch.no_grad()
    def evaluate(self, split: str) -> float:
        windows = spread_windows(self.splits[split], self.c.block_size, self.c.eval_tokens)
        return mean_loss(self.weights, self.c, windows).item()
