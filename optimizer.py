"""
Build the optimizer of either model: AdamW, or Muon for the matrices of the blocks and AdamW for all
other weights.

Muon's numbers come from train_gpt_simple.py, the public program that model_fast.py names, except
its Newton-Schulz iterations. Those that are not keys, which config/fast.py sets, are all in this
file.
"""

from typing import Any

import torch
from torch import Tensor

from common.console import UserError
from configurator import Config
from model import GPT
from model_fast import FastGPT

# Epsilons of AdamW and of Muon's division of rows. train_gpt_simple.py has 1e-10 and 1e-8, but it
# sums the loss over a batch's 524,288 tokens, so its gradients are that many times larger than
# ours.
ADAM_EPS, ROW_EPS = 2e-16, 2e-14
NORM_EPS = 1e-7  # added to the norm before Newton-Schulz
# Each Newton-Schulz iteration makes a singular value x into a x + b x^3 + c x^5. The public program
# makes 18 with (2, -1.5, 0.5). These ten end within 0.0024 of the 18 for every x from 0 to 1, and
# save an eighth of a small run's CPU time. They come from Polar Express (arXiv:2505.16932) for x
# from 7.54e-6 to 1: each is the best polynomial for the interval that those before it leave. The
# cushion is 0.08, and the safety factor, which all but the last have, 1.02. So rounding may make x
# up to 1.9% too large before each iteration; at 2% they diverge.
NEWTON_SCHULZ = (
    (7.7163, -19.0742, 13.0162),
    (3.8579, -2.3843, 0.4068),
    (3.8569, -2.3841, 0.4068),
    (3.8531, -2.3833, 0.4070),
    (3.8379, -2.3804, 0.4076),
    (3.7799, -2.3693, 0.4100),
    (3.5733, -2.3336, 0.4207),
    (2.9504, -2.1239, 0.4380),
    (2.0494, -1.3879, 0.3604),
    (1.8776, -1.2529, 0.3753),
)
# train_gpt_simple.py counts three horizons in iterations of a run of 2,726. Runs of other lengths
# get the same fractions: Muon's momentum rises for 13% of the run, the weights' average reaches
# back over about 6% of it, and the momentum of biases and gains over 4%.
PUBLIC_ITERS = 2726
MOMENTUM_WARMUP = 350 / PUBLIC_ITERS
FIRST_MOMENTUM = 0.85
AVERAGE_DECAY = 0.9935


def build_optimizer(model, c: Config, dtype: torch.dtype) -> torch.optim.Optimizer:
    """
    Return the optimizer. get_lr() computes each group's learning rate from its peak_lr, and keeps
    it at or above lr_floor * peak_lr after the warmup; the log shows the first group's rate.
    `dtype` is the dtype of Muon's matmuls.

    To add an optimizer, add its name in configurator.py and return it at the end of this function.
    Each weight must be in exactly one group, as (name, weight); a resume compares the names. Before
    each update train.py sets a group's `lr`, the part of the run that is `done`, from 0 to 1, and
    the run's `length` in iterations. If the optimizer's defaults say fused=True, an update with
    found_inf = 1 must change nothing. For other optimizers each iteration waits for the device.
    """
    # a fused optimizer can skip an update without waiting for the device
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    weights = [*model.named_parameters()]
    if c.optimizer == "muon":
        groups = muon_groups(model, c)
    else:
        matrices = [(name, p) for name, p in weights if p.dim() >= 2]  # embeddings too
        vectors = [(name, p) for name, p in weights if p.dim() < 2]  # biases and norms
        adam = dict(betas=(c.beta1, c.beta2), peak_lr=c.learning_rate, lr_floor=0.0)
        groups = [
            dict(adam, params=matrices, weight_decay=c.weight_decay),
            dict(adam, params=vectors, weight_decay=0.0),
        ]
    start = dict(done=0.0, length=PUBLIC_ITERS)  # train.py sets both before each update
    groups = [dict(group, lr=group["peak_lr"], **start) for group in groups if group["params"]]
    grouped = [name for group in groups for name, _ in group["params"]]
    if wrong := [name for name, _ in weights if grouped.count(name) != 1]:
        raise UserError(f"optimizer: not in exactly one group: {', '.join(wrong)}")
    if c.optimizer == "muon":
        return Muon(groups, dtype, fused)
    return torch.optim.AdamW(groups, fused=fused)


# -----------------------------------------------------------------------------
# Muon


def muon_groups(model: GPT | FastGPT, c: Config) -> list[dict[str, Any]]:
    """
    Return the parameter groups for Muon, with (name, parameter) pairs as their params. MLPs get a
    fixed part of attention's rate. From the other numbers set_schedule() computes, before each
    update, what changes over the run.
    """
    named = [*model.named_parameters()]
    vectors = [(name, p) for name, p in named if p.dim() < 2]  # biases and gains
    # if tied, the head is the token embedding too
    head = [(name, p) for name, p in named if p is model.lm_head.weight]
    matrices = [(name, p) for name, p in named if p.dim() == 2 and p is not model.lm_head.weight]
    embeddings = [(name, p) for name, p in matrices if ".wte." in name or ".wpe." in name]
    blocks = [(name, p) for name, p in matrices if name.startswith("transformer.h.")]
    projections = [(name, p) for name, p in blocks if ".attn." in name and "c_attn" not in name]
    qkv = [(name, p) for name, p in blocks if ".attn." in name and "c_attn" in name]
    mlps: list[list] = [[], [], []]  # in the first, the middle and the last third of the blocks
    for name, p in blocks:
        if ".attn." not in name:
            block = int(name.split(".")[2])  # transformer.h.BLOCK.mlp.c_fc.weight
            mlps[3 * block // model.config.n_layer].append((name, p))

    # The fast model's token embedding starts with a standard deviation of 1, GPT-2's of 0.02.
    embedding_lr = 0.7 if isinstance(model, FastGPT) else 0.004
    muon = dict(momentum=c.muon_momentum, stacked=1)
    attention = dict(muon, peak_lr=c.learning_rate, decay_power=2.25, row_beta=0.84)
    mlp = dict(muon, peak_lr=27 / 29 * c.learning_rate, decay_power=2.5, row_beta=0.86)
    adam = dict(beta1=c.beta1, weight_decay=c.weight_decay)
    groups: list[dict[str, Any]] = [
        dict(attention, params=projections, weight_decay=0.08),
        dict(attention, params=qkv, weight_decay=0.08, stacked=3),  # q, k and v in one weight
        dict(adam, params=embeddings, peak_lr=embedding_lr),
        dict(adam, params=head, peak_lr=0.004),
        dict(adam, params=vectors, peak_lr=0.035, public_beta1=0.99, weight_decay=0.0),
        dict(mlp, params=mlps[0], weight_decay=0.16),
        dict(mlp, params=mlps[1], weight_decay=0.22),
        dict(mlp, params=mlps[2], weight_decay=0.28),
    ]
    return [dict(group, lr_floor=0.2) for group in groups]


def set_schedule(group: dict[str, Any]) -> None:
    """Set what changes over a run in a group of muon_groups(), except the rate."""
    done, length = group["done"], group["length"]
    if "momentum" in group:  # matrices
        warm = min(1.0, done / MOMENTUM_WARMUP)
        group["mu"] = FIRST_MOMENTUM * (1 - warm) + group["momentum"] * warm
        group["beta2"] = group["row_beta"] + 0.1 * done
        group["decay"] = group["weight_decay"] * (1 - done) ** group["decay_power"]
    else:
        beta1 = group["beta1"]
        if "public_beta1" in group:
            beta1 = rescale(group["public_beta1"], length)
        group["betas"] = (beta1, 0.965 + 0.034 * done)
    group["average_weight"] = 1 - rescale(AVERAGE_DECAY, length)


def rescale(decay: float, length: float) -> float:
    """
    Convert the decay of a running mean in the public run for a run of `length` iterations, so that
    the mean covers the same fraction of either run.
    """
    return decay ** (PUBLIC_ITERS / length)


@torch.no_grad()
def swap_averages(optimizer: torch.optim.Optimizer) -> bool:
    """
    Exchange each weight with its average, if the optimizer keeps one. A second call undoes the
    first. Returns whether there were any averages.
    """
    averaged = [(p, state) for p, state in optimizer.state.items() if "average" in state]
    for p, state in averaged:
        weight = p.clone()
        p.copy_(state["average"])
        state["average"].copy_(weight)
    return bool(averaged)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Approximate the nearest orthogonal matrix to each of n matrices (n, rows, cols) by Newton-Schulz
    iteration: U V^T of the singular value decomposition U S V^T. Singular values above 1e-5 of the
    matrix's norm end within 1e-3 of 1, but for rounding; smaller ones may end anywhere from 0 to 1.
    Matmuls run in `dtype`.
    """
    if matrices.size(1) > matrices.size(2):
        # cheaper with X @ X.mT on the shorter side
        return orthogonalize(matrices.mT, dtype).mT
    # dividing by the norm leaves no singular value above 1
    X = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + NORM_EPS)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class Muon(torch.optim.AdamW):
    """
    Update matrices with Muon and everything else with AdamW. Groups with a `momentum` hold matrices
    for Muon, as many in each weight as `stacked` says. Muon replaces a matrix's momentum by the
    nearest orthogonal matrix, so that every direction moves by the same amount (K. Jordan et al.,
    2024, https://kellerjordan.github.io/posts/muon). Every rank updates all matrices, from the same
    gradients.

    set_schedule() says how momenta, weight decay and beta2 change over the run. The state keeps a
    running average of every weight, and swap_averages() ends a run with the averages.

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
            set_schedule(group)
            if "momentum" in group:
                self.step_matrices(group)
        # AdamW's step updates every group in param_groups, so hide the matrices from it.
        self.param_groups = [group for group in all_groups if "momentum" not in group]
        super().step()
        self.param_groups = all_groups
        for group in all_groups:
            self.average(group)

    def finite(self, p: Tensor) -> Tensor:
        """Return 1 on p's device, or 0 if found_inf says that this update is skipped."""
        return p.new_ones(()) if self.found_inf is None else 1 - self.found_inf

    def average(self, group: dict) -> None:
        """Move the averages towards the updated weights, unless the update was skipped."""
        weight = group["average_weight"] * self.finite(group["params"][0])
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.detach().clone()
                state["average"].lerp_(p, weight)

    def step_matrices(self, group: dict) -> None:
        """Update all matrices of the same shape together, in a few kernels instead of hundreds."""
        by_shape: dict[torch.Size, list] = {}
        for p in group["params"]:
            if p.grad is None:  # frozen
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
                state["row_squares"] = torch.zeros_like(p[:, :1])
            tensors = p, p.grad, state["momentum"], state["row_squares"]
            for matrix in zip(*(t.chunk(group["stacked"]) for t in tensors), strict=True):
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
        mu, beta2, decay = group["mu"], group["beta2"], group["decay"]
        finite = self.finite(matrices[0])  # 0 zeroes every rate below and so skips the update
        lr = group["lr"] * finite
        m = torch.stack(momenta)  # (n, rows, cols)
        g = torch.stack(gradients)
        g.masked_fill_(finite == 0, 0)  # NaN times 0 would be NaN
        m.lerp_(g, (1 - mu) * finite)
        torch._foreach_copy_(momenta, m.unbind())
        u = g.lerp_(m, mu)
        # without Adam's bias correction, which would scale all rows alike and so change nothing
        squares = torch.stack(row_squares)  # (n, rows, 1)
        squares.lerp_(u.square().mean(-1, keepdim=True), (1 - beta2) * finite)
        torch._foreach_copy_(row_squares, squares.unbind())
        # back to float32, because small learning rates would underflow in float16
        update = orthogonalize(u / (squares.sqrt() + ROW_EPS), self.dtype).float()
        scale = max(rows / cols, cols / rows) ** 0.5
        torch._foreach_mul_(matrices, 1 - lr * decay)
        torch._foreach_sub_(matrices, (update * (lr * scale)).unbind())

    def __setstate__(self, state: dict) -> None:
        # AdamW's version expects a `step` in every parameter's state, but the matrices have none.
        torch.optim.Optimizer.__setstate__(self, state)
