"""
Muon for the matrices of the hidden layers, AdamW for everything else: one optimizer for the
training loop.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that every direction in it
moves by the same amount (K. Jordan et al., "Muon: an optimizer for hidden layers in neural
networks", 2024), and NorMuon then evens out its neurons. torch.optim.Muon is the same mathematics
without NorMuon. This one also runs its products in a dtype that the card has, batches all matrices
of a shape, takes the parts of a fused q, k, v matrix apart, and skips an update on the device where
a gradient is not finite.
"""

import torch
import torch.nn as nn
from torch import Tensor

# a, b, c of the quintic a x + b x^3 + c x^5 that lifts small singular values fastest (Jordan)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5  # from 1e-3 to between 0.7 and 1.2: near enough to 1
# how long NorMuon's mean squares remember (track 3 of modded-nanogpt's records)
NORMUON_BETA = 0.95
# by a module's name in model_fast.py
EMBEDDING_ROLES = dict(value_tables="values", bigrams="bigrams")
ADAM_EPS = 1e-10  # rare tokens' rows of the embedding have tiny gradients


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Newton-Schulz: matrices (n, rows, cols) -> U V^T of each one's singular value decomposition
    U S V^T, nearly: singular values end between 0.7 and 1.2. The products run in `dtype`.
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalize(matrices.mT, dtype).mT  # products of the shorter side are cheaper
    a, b, c = NEWTON_SCHULZ
    # divided by their norms, no singular value is above 1
    X = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def mean_squares(matrices: Tensor) -> Tensor:
    """
    Of matrices (n, rows, cols), for each index of the longer side: (n, rows, 1), or (n, 1, cols)
    where they are wide.
    """
    _, rows, cols = matrices.shape
    return matrices.square().mean(dim=2 if rows >= cols else 1, keepdim=True)


def normalize(directions: Tensor, mean: Tensor) -> Tensor:
    """
    NorMuon (arXiv:2510.05491): divide what belongs to each index of the longer side by the root of
    its mean square over time, so that no neuron moves far more than the others. Each matrix keeps
    its norm. directions is (n, rows, cols), mean as from `mean_squares`.
    """
    even = directions * mean.clamp(min=1e-10).rsqrt()
    norms = directions.norm(dim=(1, 2), keepdim=True)
    # clamped: a direction of zeros, as the first iteration has some, must not become NaN
    return even * (norms / even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10))


class Muon(torch.optim.AdamW):
    """
    Groups with a `momentum` are matrices for Muon (`parts`: how many matrices are stacked in each),
    the others go to AdamW with their `betas`. `dtype` is that of Newton-Schulz's products.

    Every rank moves all matrices: ranks of one kind of GPU get the same bits from the averaged
    gradients, so nothing is exchanged.

    Like torch's fused optimizers, a step with `fused` reads `found_inf` (0 or 1, on the device)
    where the caller or a GradScaler has set it, and changes nothing where it is 1.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype, fused: bool = True):
        super().__init__(groups, eps=ADAM_EPS, fused=fused)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        for group in groups:
            if "momentum" in group:
                self.step_matrices(group, getattr(self, "found_inf", None))
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step()  # AdamW's
        self.param_groups = groups

    def step_matrices(self, group: dict, found_inf: Tensor | None) -> None:
        """
        Matrices of one shape move together, in a few kernels: one by one they would take hundreds
        of small ones.
        """
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for same in by_shape.values():
            # a skipped update is one whose rates are all 0
            applied = 1 - (same[0].new_zeros(()) if found_inf is None else found_inf)
            self.move(group, same, applied)

    def move(self, group: dict, same: list[Tensor], applied: Tensor) -> None:
        """
        Move n matrices of one shape, `same`. With momentum mu and gradient g: a matrix shrinks by
        the share lr * weight_decay, m <- m + (1 - mu) (g - m), and it moves by lr * sqrt(max(1,
        rows / cols)) against the orthogonal matrix nearest to g + mu (m - g), Nesterov's
        look-ahead, evened out by `normalize`.
        """
        mu, lr, parts = group["momentum"], group["lr"] * applied, group["parts"]
        rows, cols = same[0].size(0) // parts, same[0].size(1)  # of each matrix that is stacked
        for p in same:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            if "mean_squares" not in state:  # checkpoints from before NorMuon lack it too
                state["mean_squares"] = torch.zeros_like(mean_squares(p.view(parts, rows, cols)))
        momenta = [self.state[p]["momentum"] for p in same]
        means = [self.state[p]["mean_squares"] for p in same]

        m = torch.stack(momenta)  # (n, parts * rows, cols), and so is g
        g = torch.stack([p.grad for p in same if p.grad is not None])
        g.masked_fill_(applied == 0, 0)  # NaN times a rate of 0 would be NaN
        m.lerp_(g, (1 - mu) * applied)
        torch._foreach_copy_(momenta, m.unbind())
        look_ahead = g.lerp_(m, mu).view(-1, rows, cols)  # (n * parts, rows, cols)
        # in float32: float16 has no room for small rates
        directions = orthogonalize(look_ahead, self.dtype).float()

        # (n * parts, rows, 1) or (n * parts, 1, cols)
        mean = torch.cat(means).lerp_(mean_squares(directions), (1 - NORMUON_BETA) * applied)
        torch._foreach_copy_(means, mean.split(parts))
        updates = normalize(directions, mean) * (lr * max(1, rows / cols) ** 0.5)
        torch._foreach_mul_(same, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(same, updates.view(-1, *same[0].shape).unbind())

    def __setstate__(self, state: dict) -> None:
        # AdamW's looks for a step in each parameter's state, and matrices have none
        torch.optim.Optimizer.__setstate__(self, state)


def parameters_by_role(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """
    matrices (of hidden layers), qkv (three in one), embedding, values (value embeddings), bigrams
    (token pairs), head and vectors. A head tied to the embedding counts as head. Raises ValueError
    for a parameter that has no role here.
    """
    roles: dict[str, list[nn.Parameter]]
    roles = dict(matrices=[], qkv=[], head=[], embedding=[], values=[], bigrams=[], vectors=[])
    modules = dict(model.named_modules())
    # a tied head goes under its last name
    names = {p: name for name, p in model.named_parameters(remove_duplicate=False)}
    for p, name in names.items():
        owner = modules[name.rpartition(".")[0]]
        if name == "lm_head.weight":
            role = "head"
        elif isinstance(owner, nn.Embedding):
            role = EMBEDDING_ROLES.get(name.split(".")[1], "embedding")
        elif p.dim() < 2:
            role = "vectors"
        elif isinstance(owner, nn.Linear):
            role = "qkv" if name.endswith("c_attn.weight") else "matrices"
        else:
            raise ValueError(f"{name}: no matrix, embedding, head or vector; Muon has no rule")
        roles[role].append(p)
    return roles
