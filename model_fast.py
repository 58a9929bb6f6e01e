"""
The fast recipe: a GPT of GPT-2's size that needs fewer tokens for the same loss, and its optimizer,
Muon. Model and learning rates were tuned together.

With bias=True, model and updates are those of train_gpt_simple.py at record/fable-5-2726 in
PrimeIntellect-ai/frontier-automated-speedrun, which descends from modded-nanogpt's file of that
name, so that its published losses apply (dev/compare_modded.py).

FastGPT has the same interface as model.py's GPT. Where it differs, a comment says why and names the
source. "Record of" a date refers to the modded-nanogpt speedrun, which accepts a change only if it
reaches the same loss in less time; records/track_1_short there has a folder for each date. Shapes
in comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels, and a
vocabulary of V tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model import (
    GPT,
    GPTConfig,
    KVCache,
    attend,
    cap_logits,
    head_context,
    mean_loss,
    product_dtype,
)

# tokens per radian of the slowest rotating pair, where RoFormer has 10,000 (record of 2024-12-17)
ROTARY_BASE = 1024
# Soft-cap logits, as Gemma 2 does (arXiv:2408.00118), so that no token becomes certain early. The
# cap of 15 is from the record of 2025-01-04.
LOGIT_CAP = 15.0
# Multiplies 1 / sqrt(hs), giving 0.12 at hs = 128. With normed q and k, 1 / sqrt(hs) alone makes
# attention too flat (record of 2025-01-16).
ATTENTION_SCALE = 0.12 * 128**0.5
# Epsilons of AdamW and of Muon's division of rows. train_gpt_simple.py has 1e-10 and 1e-8, but it
# sums the loss over a batch's 524,288 tokens, so its gradients are that many times larger than
# ours.
ADAM_EPS, ROW_EPS = 2e-16, 2e-14
NORM_EPS = 1e-7  # of Newton-Schulz's norm
# train_gpt_simple.py counts three horizons in iterations of a run of 2,726. Runs of other lengths
# get the same fractions: Muon's momentum rises for 13% of the run, the weights' average reaches
# back over about 6% of it, and the momentum of biases and gains over 4%.
PUBLIC_ITERS = 2726
MOMENTUM_WARMUP, FIRST_MOMENTUM = 350 / PUBLIC_ITERS, 0.85
AVERAGE_DECAY, VECTORS_BETA1 = 0.9935, 0.99


@dataclass(frozen=True)
class FastConfig(GPTConfig):
    tie_weights: bool = False  # always False: see lm_head


# -----------------------------------------------------------------------------
# The layers


def norm(x: Tensor, gains: Tensor | None = None) -> Tensor:
    """
    Apply RMSNorm (arXiv:1910.07467) over the last dimension, then multiply by the gains, if any.
    Runs in the dtype of x; CUDA's autocast would use float32.
    """
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, (x.size(-1),), None if gains is None else gains.type_as(x))


class Norm(nn.Module):
    """Norm the residual stream. With bias=True, it has gains."""

    def __init__(self, config: FastConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight)


def rotary_tables(positions: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """
    Return the cosines and sines of each position's angles, (T, 1, hs) each (RoFormer,
    arXiv:2104.09864). The two channels of a pair have opposite angles. Half of the pairs do not
    rotate, so they can carry what does not depend on distance (record of 2024-12-17).
    """
    turning = ROTARY_BASE ** -torch.linspace(0, 1, head_size // 4, device=positions.device)
    angles = positions[:, None, None] * F.pad(turning, (0, head_size // 2 - len(turning)))
    angles = torch.cat((angles, -angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Rotate the channel pairs (i, i + hs / 2) of x (B, T, nh, hs) by their position's angles, so that
    q k^T depends on the distance between tokens.
    """
    # flip, because joining two halves compiles to far more GPU instructions (results/README.md)
    partners = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + partners * sin


class CausalSelfAttention(nn.Module):
    def __init__(self, config: FastConfig):
        super().__init__()
        self.n_head = config.n_head
        self.flash = config.flash
        self.scale = ATTENTION_SCALE * (config.n_embd // config.n_head) ** -0.5
        # q, k and v in one matmul
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend: x (B, T, C), rotary_tables() of its positions -> (B, T, C)."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        qk, v = qkv.split((2 * self.n_head, self.n_head), dim=2)
        # QK-norm limits the attention scores (arXiv:2010.04245, record of 2024-10-14). The rotation
        # runs in float32.
        qk = rotate(norm(qk), *angles).type_as(v)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)  # (B, nh, T, hs) each
        v = v.transpose(1, 2)
        if cache:
            k, v = cache.extend(k, v)
        # no dropout here: Block applies it to the result
        y = attend(q, k, v, self.flash, self.scale)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: FastConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU^2 learns faster than GELU (Primer, arXiv:2109.08668, record of 2024-10-14)
        h = self.c_fc(x).relu()
        return self.c_proj(h * h)  # CUDA's autocast would run square() in float32


class Block(nn.Module):
    def __init__(self, config: FastConfig):
        super().__init__()
        self.ln_1 = Norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = Norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), angles, cache))
        return x + self.dropout(self.mlp(self.ln_2(x)))


# -----------------------------------------------------------------------------
# The model


class FastGPT(nn.Module):
    def __init__(self, config: FastConfig):
        super().__init__()
        self.config = config
        self.transformer: Any = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                ln_e=Norm(config),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=Norm(config),
            )
        )
        # not tied to the token embedding, because tying raises the loss (record of 2024-11-03)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
        self.rotary: tuple[Tensor, Tensor] | None = None  # see compile()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """
        Initialise the token embedding to N(0, 1), which suits the norm after it, and matrices that
        read the residual stream to random orthogonal ones with entries of variance 0.33 / fan_in.
        Matrices that write to it and the head start at zero, so that every block begins as the
        identity and the first loss is ln V (as in muP, arXiv:2203.03466; records of 2024-10-14 and
        2024-11-03).
        """
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue  # other modules initialise themselves
            weight = module.weight
            if name.endswith(("c_proj", "lm_head")):
                nn.init.zeros_(weight)
            elif name == "transformer.wte":
                nn.init.normal_(weight)
            else:  # q, k and v are three matrices in one weight
                for matrix in weight.chunk(3 if name.endswith("c_attn") else 1):
                    rows, cols = matrix.shape
                    nn.init.orthogonal_(matrix, gain=(0.33 * max(1, rows / cols)) ** 0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """
        Return the logits (B, T, V) of idx (B, T) int64, or, given targets (B, T), the mean loss in
        nats per token; targets of -1 are ignored. T may exceed block_size, but the model is not
        trained on such positions.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        head = self.lm_head
        with head_context(x, self.config):
            return mean_loss(x, head.weight, targets, self.config, LOGIT_CAP, head.bias)

    def hidden(self, idx: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """
        Compute the normed residual stream (B, T, C), the head's input, for idx (B, T). With caches,
        one per block, compute and return only the tokens that they do not hold yet: all T in the
        first call, one in each later call.
        """
        past = caches[0].length if caches else 0
        new = idx[:, past:]
        x = self.transformer.ln_e(self.transformer.wte(new))
        if product_dtype(x) == torch.bfloat16:
            # run the residual stream in bfloat16 (record of 2024-11-08); weights stay float32
            x = x.bfloat16()
        x = self.transformer.drop(x)
        angles = self.angles(past, idx.size(1), idx.device)
        recompute = self.config.recompute and self.training
        blocks = self.transformer.h
        of_blocks: Sequence[KVCache | None] = caches or [None] * len(blocks)
        for block, cache in zip(blocks, of_blocks, strict=True):
            if recompute:
                x = checkpoint(block, x, angles, use_reentrant=False)
            else:
                x = block(x, angles, cache)
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: x (..., C) from hidden() -> soft-capped logits (..., V)."""
        return cap_logits(self.lm_head(x), LOGIT_CAP)

    def angles(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rotary_tables() of the positions from start up to, but not including, end."""
        if self.rotary and end <= self.config.block_size:
            cos, sin = self.rotary
            return cos[start:end], sin[start:end]
        positions = torch.arange(start, end, device=device)
        return rotary_tables(positions, self.config.n_embd // self.config.n_head)

    def compile(self, *args, **kwargs) -> None:
        """
        Compute the rotary tables on the model's device, then compile as nn.Module does. Without
        stored tables, compiled code would recompute the sines in every layer and pass. They are not
        buffers, because to() would round buffers along with the weights, and DDP would broadcast
        them in every forward pass.
        """
        self.rotary = self.angles(0, self.config.block_size, self.lm_head.weight.device)
        super().compile(*args, **kwargs)


# -----------------------------------------------------------------------------
# Building either model from its config


def build_model(config: GPTConfig) -> GPT | FastGPT:
    return FastGPT(config) if isinstance(config, FastConfig) else GPT(config)


def config_to_dict(config: GPTConfig) -> dict[str, Any]:
    """Return what a checkpoint stores as model_config."""
    model = "fast" if isinstance(config, FastConfig) else "gpt2"
    return dict(asdict(config), model=model)


def config_from_dict(values: dict[str, Any]) -> GPTConfig:
    """
    Rebuild the config from a checkpoint's model_config. Missing fields get their defaults. Raises
    TypeError for an unknown field.
    """
    fields = dict(values)
    kind = FastConfig if fields.pop("model", "gpt2") == "fast" else GPTConfig
    return kind(**fields)


# -----------------------------------------------------------------------------
# The optimizer: Muon for the matrices of the blocks, AdamW for everything else


def muon_groups(model: GPT | FastGPT, c) -> list[dict[str, Any]]:
    """
    Return the parameter groups for Muon, with the rates of a configurator.Config. Their params are
    (name, parameter) pairs, and initial_lr is a group's peak learning rate. The numbers, also those
    in Muon, are the public file's (see above); MLPs get a fixed part of attention's rate.
    """
    every = [*model.named_parameters()]
    head = [(name, p) for name, p in every if p is model.lm_head.weight]  # tied or not
    vectors = [(name, p) for name, p in every if p.dim() < 2]  # biases and gains

    def matrices(*beginnings: str) -> list[tuple[str, nn.Parameter]]:
        found = [(name, p) for name, p in every if name.startswith(beginnings) and p.dim() == 2]
        return [(name, p) for name, p in found if p is not model.lm_head.weight]

    blocks = matrices("transformer.h.")
    attention = [named for named in blocks if ".attn." in named[0]]
    # The fast model's token embedding starts with a standard deviation of 1, GPT-2's of 0.02.
    embedding_lr = 0.7 if isinstance(model, FastGPT) else 0.004
    muon = dict(initial_lr=c.learning_rate, momentum=c.muon_momentum, parts=1)
    muon |= dict(weight_decay=0.08, decay_power=2.25, row_beta=0.84)
    mlp = muon | dict(initial_lr=27 / 29 * c.learning_rate, decay_power=2.5, row_beta=0.86)
    adam = dict(betas=(c.beta1, 0.965), weight_decay=c.weight_decay)
    groups: list[dict[str, Any]] = [
        dict(muon, params=[named for named in attention if "c_attn" not in named[0]]),
        # q, k and v are three matrices in one weight
        dict(muon, params=[named for named in attention if "c_attn" in named[0]], parts=3),
        dict(adam, params=matrices("transformer.wte", "transformer.wpe"), initial_lr=embedding_lr),
        dict(adam, params=head, initial_lr=c.head_lr),
        dict(adam, params=vectors, initial_lr=0.035, public_beta1=VECTORS_BETA1, weight_decay=0.0),
    ]
    for third, decay in enumerate((0.16, 0.22, 0.28)):  # MLPs, from the first block to the last
        inside = [
            (name, p)
            for name, p in blocks
            if ".attn." not in name and 3 * int(name.split(".")[2]) // model.config.n_layer == third
        ]
        groups.append(dict(mlp, params=inside, weight_decay=decay))
    return [dict(g, progress=0.0, length=PUBLIC_ITERS) for g in groups if g["params"]]


def stretched(decay: float, length: float) -> float:
    """
    Return a decay for a run of `length` iterations whose running mean covers the same part of the
    run as the mean with `decay` covers of the public run.
    """
    return decay ** (PUBLIC_ITERS / length)


@torch.no_grad()
def load_averages(optimizer: torch.optim.Optimizer) -> bool:
    """
    Replace each weight by its average, if the optimizer keeps one. Twice is the same as once.
    Returns whether there were any.
    """
    averaged = [(p, state) for p, state in optimizer.state.items() if "average" in state]
    for p, state in averaged:
        p.copy_(state["average"])
    return bool(averaged)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Approximate the nearest orthogonal matrix to each of n matrices (n, rows, cols) by Newton-Schulz
    iteration: U V^T of the singular value decomposition U S V^T, with singular values within 1e-3
    of 1. Matmuls run in `dtype`.
    """
    if matrices.size(1) > matrices.size(2):
        # cheaper with X @ X.mT on the shorter side
        return orthogonalize(matrices.mT, dtype).mT
    a, b, c = 2.0, -1.5, 0.5  # iterating a x + b x^3 + c x^5 converges to 1
    # dividing by the norm leaves no singular value above 1
    X = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + NORM_EPS)).to(dtype)
    for _ in range(18):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class Muon(torch.optim.AdamW):
    """
    Update matrices with Muon and everything else with AdamW. Groups with a `momentum` hold matrices
    for Muon, `parts` of them stacked in each weight. Muon replaces a matrix's momentum by the
    nearest orthogonal matrix, so that every direction moves by the same amount (K. Jordan et al.,
    2024, https://kellerjordan.github.io/posts/muon). Every rank updates all matrices, from the same
    gradients.

    Momenta, weight decay and beta2 follow each group's `progress`, the part of the run that is
    done. The state keeps a running average of every weight. Its horizon, and that of a group with
    `public_beta1`, is a fraction of `length`, the run's iterations. load_averages() ends a run
    with the averages.

    As with torch's fused optimizers, a step changes nothing if the tensor `found_inf` is 1, and it
    never waits for the device.
    """

    # Set by the training step, or by a GradScaler, which deletes it again. Requires `fused`,
    # because torch's other AdamW implementations reject it.
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict], dtype: torch.dtype, fused: bool = True):
        """Set up the groups of muon_groups(). Newton-Schulz matmuls run in `dtype`."""
        super().__init__(groups, eps=ADAM_EPS, fused=fused)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        all_groups = self.param_groups
        for group in all_groups:
            if "momentum" in group:
                self.step_matrices(group)
                continue
            beta1 = group["betas"][0]
            if "public_beta1" in group:
                beta1 = stretched(group["public_beta1"], group["length"])
            group["betas"] = (beta1, 0.965 + 0.034 * group["progress"])
        # AdamW's step updates every group in param_groups, so hide the matrices from it.
        self.param_groups = [group for group in all_groups if "momentum" not in group]
        super().step()
        self.param_groups = all_groups
        for group in all_groups:
            self.average(group)

    def applied(self, p: Tensor) -> Tensor:
        """Return 1 on p's device, or 0 if this update is skipped."""
        return p.new_ones(()) if self.found_inf is None else 1 - self.found_inf

    def average(self, group: dict) -> None:
        """Move the averages towards the updated weights, unless the update was skipped."""
        applied = self.applied(group["params"][0])
        weight = (1 - stretched(AVERAGE_DECAY, group["length"])) * applied
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.detach().clone()
                state["average"].lerp_(p, weight)

    def step_matrices(self, group: dict) -> None:
        """Update all matrices of the same shape together, in a few kernels instead of hundreds."""
        parts = group["parts"]
        by_shape: dict[torch.Size, list] = {}
        for p in group["params"]:
            if p.grad is None:  # frozen
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
                state["row_squares"] = torch.zeros_like(p[:, :1])
            tensors = p, p.grad, state["momentum"], state["row_squares"]
            for matrix in zip(*(tensor.chunk(parts) for tensor in tensors), strict=True):
                by_shape.setdefault(matrix[0].shape, []).append(matrix)
        for same in by_shape.values():
            self.update(group, *zip(*same, strict=True))

    def update(self, group: dict, matrices, gradients, momenta, row_squares) -> None:
        """
        Update n matrices of one shape. For gradient g and momentum mu, m becomes m + (1 - mu) (g -
        m), and u is g + mu (m - g), which is Nesterov's lookahead. Each row of u is divided by the
        root of a running mean of its squares. The matrix is multiplied by 1 - lr * decay, then
        moved by -lr * sqrt(longer side / shorter side) times the orthogonal matrix nearest to u.
        """
        rows, cols = matrices[0].shape
        progress = group["progress"]
        warm = min(1.0, progress / MOMENTUM_WARMUP)
        mu = FIRST_MOMENTUM * (1 - warm) + group["momentum"] * warm
        row_beta = group["row_beta"] + 0.1 * progress
        decay = group["weight_decay"] * (1 - progress) ** group["decay_power"]
        applied = self.applied(matrices[0])  # 0 zeroes every rate below and so skips the update
        lr = group["lr"] * applied
        m = torch.stack(momenta)  # (n, rows, cols)
        g = torch.stack(gradients)
        g.masked_fill_(applied == 0, 0)  # NaN times 0 would be NaN
        m.lerp_(g, (1 - mu) * applied)
        torch._foreach_copy_(momenta, m.unbind())
        u = g.lerp_(m, mu)
        # without Adam's bias correction, which would scale all rows alike and so change nothing
        squares = torch.stack(row_squares)  # (n, rows, 1)
        squares.lerp_(u.square().mean(-1, keepdim=True), (1 - row_beta) * applied)
        torch._foreach_copy_(row_squares, squares.unbind())
        # back to float32, because small learning rates would underflow in float16
        update = orthogonalize(u / (squares.sqrt() + ROW_EPS), self.dtype).float()
        scale = max(rows / cols, cols / rows) ** 0.5
        torch._foreach_mul_(matrices, 1 - lr * decay)
        torch._foreach_sub_(matrices, (update * (lr * scale)).unbind())

    def __setstate__(self, state: dict) -> None:
        # AdamW's version expects a `step` in every parameter's state, but the matrices have none.
        torch.optim.Optimizer.__setstate__(self, state)
