"""
Implement the fast recipe a second time, in plain torch: the model, its learning rates, Muon, the
schedule, one iteration, an evaluation. Nothing of the program is imported; test_recipe.py compares
train.py's runs with this trainer. Only the names of the weights are the program's, so that its
checkpoints can be loaded. With bias=True, optimizer=plain_muon and no lookup tables, this is the
recipe of modded-nanogpt's train_gpt_simple.py.

Shapes in comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels,
V = vocabulary.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Config

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

# -----------------------------------------------------------------------------
# The model


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Norm(nn.RMSNorm):
    """Apply RMSNorm, with a gain for each channel if the config has biases."""

    def __init__(self, c: Config):
        super().__init__(c.n_embd, elementwise_affine=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        gains = None if self.weight is None else self.weight.type_as(x)
        return F.rms_norm(x, (x.size(-1),), gains)


class Linear(nn.Linear):
    """Keep and update the weights in float32, and multiply them in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.type_as(x)
        return F.linear(x, self.weight.type_as(x), bias)


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


def offset_keys(k: Tensor) -> Tensor:
    """Take the channels of k (B, T, nh, hs) that do not rotate from the token before."""
    k = k.clone()
    channel = torch.arange(k.size(-1))
    resting = channel % (k.size(-1) // 2) >= k.size(-1) // 4
    k[:, 1:, :, resting] = k[:, :-1, :, resting].clone()
    return k


class Attention(nn.Module):
    def __init__(self, c: Config, has_table: bool):
        super().__init__()
        self.n_head = c.n_head
        self.has_bigrams = c.bigram_rows > 0
        # 0.12 at a head size of 128: nearly without biases, exactly with them
        self.scale = (0.12 * math.sqrt(128) if c.bias else 1.36) / math.sqrt(c.n_embd // c.n_head)
        self.c_attn = Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)  # q, k and v
        self.c_proj = Linear(c.n_embd, c.n_embd, bias=c.bias)
        if has_table:
            self.value_gate = Linear(12, c.n_head, bias=False)

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.unbind(dim=2)  # (B, T, nh, hs) each
        if values is not None:
            gate = 3 * self.value_gate(x[..., :12]).sigmoid()  # (B, T, nh)
            v = v + gate[..., None] * values.view_as(v)
        q = rotate(norm(q))
        k = rotate(norm(k))
        if self.has_bigrams:
            k = offset_keys(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, nh, T, hs)
        scores = q * self.scale @ k.mT  # (B, nh, T, T)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c_fc = Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu().square())


class Block(nn.Module):
    def __init__(self, c: Config, has_table: bool):
        super().__init__()
        self.ln_1 = Norm(c)
        self.attn = Attention(c, has_table)
        self.ln_2 = Norm(c)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), values)
        return x + self.mlp(self.ln_2(x))


class FastGPT(nn.Module):
    def __init__(self, c: Config, vocab: int):
        super().__init__()
        self.dtype = getattr(torch, c.dtype)
        # the first layers have a value embedding each, and the last layers share them
        tables = list(range(c.value_tables))
        without = c.n_layer - 2 * c.value_tables
        self.table_of_layer = tables + without * [None] + tables
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, c.n_embd),
                ln_e=Norm(c),
                value_tables=nn.ModuleList(nn.Embedding(vocab, c.n_embd) for _ in tables),
                h=nn.ModuleList(Block(c, table is not None) for table in self.table_of_layer),
                ln_f=Norm(c),
            )
        )
        if c.bigram_rows:
            self.transformer.bigrams = nn.Embedding(c.bigram_rows, c.n_embd)
        self.lm_head = Linear(c.n_embd, vocab, bias=c.bias)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return each target's loss in nats, (B, T), for idx and targets (B, T)."""
        x = self.transformer.ln_e(self.transformer.wte(idx))  # (B, T, C)
        if "bigrams" in self.transformer:
            x = x + self.transformer.bigrams(self.pair_rows(idx))
        x = x.to(self.dtype)  # from here on the residual stream and all matmuls
        values = [table(idx).type_as(x) for table in self.transformer.value_tables]
        for block, table in zip(self.transformer.h, self.table_of_layer, strict=True):
            x = block(x, None if table is None else values[table])
        logits = self.lm_head(self.transformer.ln_f(x)).float()  # (B, T, V)
        logits = logits / torch.sqrt(1 + (logits / 15).square())  # within +-15
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def pair_rows(self, idx: Tensor) -> Tensor:
        """Hash each token and the one before it to a row. The first counts as following token 0."""
        before = torch.zeros_like(idx)
        before[:, 1:] = idx[:, :-1]
        rows = self.transformer.bigrams.num_embeddings
        spread = int(0.6180339887498949 * rows)  # Fibonacci hashing
        return (before * spread + idx) % rows


# -----------------------------------------------------------------------------
# The optimizer: Muon for the matrices of the blocks, AdamW for everything else


# modded-nanogpt's gradients are sums over the tokens of a batch, ours are means
BATCH = 524288


def orthogonalize(matrix: Tensor, dtype: torch.dtype, is_plain: bool) -> Tensor:
    """Approximate the nearest orthogonal matrix by Newton-Schulz, in 5 steps or, plain, in 12."""
    if matrix.size(0) > matrix.size(1):
        return orthogonalize(matrix.mT, dtype, is_plain).mT  # cheaper on the shorter side
    X = (matrix / (matrix.norm() + (1e-7 / BATCH if is_plain else 1e-7))).to(dtype)
    for a, b, c in [(2.0, -1.5, 0.5)] * 12 if is_plain else [(3.4445, -4.7750, 2.0315)] * 5:
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.float()


class Muon:
    def __init__(self, matrices: list[Tensor], c: Config):
        """Set up the state of each matrix, a parameter or a part of one (see `parts_of`)."""
        self.matrices = matrices
        self.momentum = c.muon_momentum
        self.dtype = getattr(torch, c.dtype)
        self.is_plain = c.optimizer == "plain_muon"
        self.means = [torch.zeros_like(matrix) for matrix in matrices]  # of the gradients
        self.mean_squares = [0.0 for _ in matrices]  # of each neuron's directions

    def step(self, gradients: list[Tensor], lr: float) -> None:
        for number, (matrix, gradient) in enumerate(zip(self.matrices, gradients, strict=True)):
            mean = self.means[number]
            mean.lerp_(gradient, 1 - self.momentum)
            ahead = gradient.lerp(mean, self.momentum)  # Nesterov's
            direction = orthogonalize(ahead, self.dtype, self.is_plain)
            if not self.is_plain:
                direction = self.even_out(number, direction)
            rows, cols = matrix.shape
            matrix.mul_(1 - lr * 0.05)  # weight decay
            matrix.sub_(direction * (lr * max(1, rows / cols) ** 0.5))

    def even_out(self, number: int, direction: Tensor) -> Tensor:
        """
        Even out the neurons as NorMuon does, so that none moves far more than the others. The
        matrix keeps its norm.
        """
        rows, cols = direction.shape
        squares = direction.square().mean(dim=1 if rows >= cols else 0, keepdim=True)
        mean = 0.95 * self.mean_squares[number] + 0.05 * squares
        self.mean_squares[number] = mean
        even = direction * mean.clamp(min=1e-10).rsqrt()
        return even * (direction.norm() / even.norm().clamp(min=1e-10))


def parts_of(name: str, weight: Tensor) -> list[Tensor]:
    """Split a weight into its matrices: c_attn holds three, of q, k and v."""
    return list(weight.chunk(3)) if name.endswith("c_attn.weight") else [weight]


def adamw_groups(model: FastGPT, c: Config) -> list[dict]:
    """Return AdamW's parameter groups, each with its highest rate as `initial_lr`."""
    t = model.transformer
    bigrams = [p for name, p in t.named_parameters() if name.startswith("bigrams")]
    return [
        dict(params=[t.wte.weight], initial_lr=0.7),
        dict(params=list(t.value_tables.parameters()), initial_lr=0.35),
        dict(params=bigrams, initial_lr=0.07),
        dict(params=[model.lm_head.weight], initial_lr=c.head_lr),
        dict(params=[p for p in model.parameters() if p.dim() == 1], initial_lr=0.015),
    ]


def get_lr(it: int, highest: float, c: Config) -> float:
    """
    Warm up linearly, stay constant, and decay linearly to min_lr over the last decay_fraction of
    the run.
    """
    if it < c.warmup_iters:
        return highest * (it + 1) / (c.warmup_iters + 1)
    decay_iters = round(c.decay_fraction * c.max_iters)
    left = min(1, (c.max_iters - it) / decay_iters)
    return c.min_lr + left * (highest - c.min_lr)


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


# -----------------------------------------------------------------------------
# The run


class Trainer:
    """Train on the tokens in `folder`, from a checkpoint's `weights`, which are not changed."""

    def __init__(self, weights: dict[str, Tensor], folder: Path, **keys):
        self.c = Config(**keys)
        self.it = 0
        self.splits = {split: read_split(folder, split) for split in ("train", "val")}
        self.windows = shuffled_windows(self.splits["train"], self.c.block_size, self.c.seed)
        self.model = FastGPT(self.c, vocab=len(weights["lm_head.weight"]))
        self.model.load_state_dict(weights)
        blocks = self.model.transformer.h.named_parameters()
        self.matrices = [(name, p) for name, p in blocks if p.dim() == 2]
        parts = [part.detach() for name, p in self.matrices for part in parts_of(name, p)]
        self.muon = Muon(parts, self.c)
        self.adamw = torch.optim.AdamW(
            adamw_groups(self.model, self.c),
            betas=(self.c.beta1, self.c.beta2),
            eps=1e-10 / BATCH if self.c.optimizer == "plain_muon" else 1e-10,
            weight_decay=self.c.weight_decay,
        )

    def mean_loss(self, windows: list[Tensor]) -> Tensor:
        block = torch.stack(windows)  # (n, T + 1)
        return self.model(block[:, :-1], block[:, 1:]).mean()

    def step(self) -> tuple[float, float, float]:
        """Run one iteration, and return its loss, Muon's rate and the norm of its gradient."""
        c = self.c
        loss = 0.0
        for _ in range(c.gradient_accumulation_steps):
            batch = [next(self.windows) for _ in range(c.batch_size)]
            part = self.mean_loss(batch) / c.gradient_accumulation_steps
            part.backward()  # adds to the gradients
            loss += part.item()
        gradients = [p.grad for p in self.model.parameters()]
        grad_norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()

        lr = get_lr(self.it, c.learning_rate, c)
        for group in self.adamw.param_groups:
            group["lr"] = get_lr(self.it, group["initial_lr"], c)
        self.adamw.step()
        self.muon.step([part for name, p in self.matrices for part in parts_of(name, p.grad)], lr)
        self.model.zero_grad()
        self.it += 1
        return loss, lr, grad_norm

    @torch.no_grad()
    def evaluate(self, split: str) -> float:
        """Return the loss of the first windows of val, or of as many spread evenly over train."""
        tokens = self.splits[split]
        T = self.c.block_size
        count = self.c.eval_tokens // T
        room = (len(tokens) - 1) // T if split == "train" else count
        starts = [number * room // count * T for number in range(count)]
        return self.mean_loss([tokens[start : start + T + 1] for start in starts]).item()
