"""
Muon for the matrices of the hidden layers, AdamW for everything else: one optimizer for the
training loop.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that every direction in it
moves by the same amount (K. Jordan et al., "Muon: an optimizer for hidden layers in neural
networks", 2024). NorMuon then evens out its neurons. torch.optim.Muon is the same without NorMuon.
This one also runs its matmuls in a dtype that the GPU has, batches all matrices of a shape, splits
a fused q, k, v matrix, and skips an update on the device if a gradient is not finite.
"""

from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor

from common.console import raise_if_any

# a, b, c of the quintic a x + b x^3 + c x^5 that lifts small singular values fastest (Jordan)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5  # from 1e-3 to between 0.7 and 1.2: near enough to 1
# decay of NorMuon's mean squares (track 3 of modded-nanogpt's records)
NORMUON_BETA = 0.95
ADAM_EPS = 1e-10  # embedding rows of rare tokens have tiny gradients
# roles of a weight: Muon updates matrices, Adam the others, each role with its own learning rate
ROLES = ("matrix", "embedding", "values", "bigrams", "head", "vector")


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Newton-Schulz: matrices (n, rows, cols) -> U V^T of each one's singular value decomposition
    U S V^T, approximately: singular values end between 0.7 and 1.2. Matmuls run in `dtype`.
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalize(matrices.mT, dtype).mT  # cheaper on the shorter side
    a, b, c = NEWTON_SCHULZ
    # divided by the norm, so that no singular value is above 1
    X = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def mean_squares(matrices: Tensor) -> Tensor:
    """
    The mean squares of matrices (n, rows, cols) for each index of the longer side: (n, rows, 1), or
    (n, 1, cols) if they are wide.
    """
    _, rows, cols = matrices.shape
    return matrices.square().mean(dim=2 if rows >= cols else 1, keepdim=True)


def normalize(directions: Tensor, mean: Tensor) -> Tensor:
    """
    NorMuon (arXiv:2510.05491): divide each row or column along the longer side by the root of its
    mean square over time, so that no neuron moves far more than the others. Each matrix keeps its
    norm. directions is (n, rows, cols), mean as from `mean_squares`.
    """
    even = directions * mean.clamp(min=1e-10).rsqrt()
    norms = directions.norm(dim=(1, 2), keepdim=True)
    # clamped, because a direction of zeros, as in the first iteration, must not become NaN
    return even * (norms / even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10))


class Muon(torch.optim.AdamW):
    """
    Groups with a `momentum` hold matrices for Muon; `parts` are the rows of each matrix stacked in
    a weight, or () for a single one. AdamW updates the other groups with their `betas`. `dtype`: of
    Newton-Schulz's matmuls.

    Every rank updates all matrices. Ranks with the same kind of GPU compute the same bits from the
    averaged gradients, so nothing is exchanged.

    Like torch's fused optimizers, a step with `fused` reads `found_inf` (0 or 1, on the device) if
    the caller or a GradScaler has set it, and changes nothing if it is 1.
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
        Update all matrices of one shape together, in a few kernels instead of hundreds of small
        ones.
        """
        by_shape: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for p in group["params"]:
            if p.grad is not None:
                for matrix in self.matrices(p, p.grad, group["parts"]):
                    by_shape.setdefault(matrix[0].shape, []).append(matrix)
        for same in by_shape.values():
            # a skipped update has learning rates of 0
            applied = 1 - (same[0][0].new_zeros(()) if found_inf is None else found_inf)
            self.move(group, same, applied)

    def matrices(self, p: Tensor, grad: Tensor, parts: tuple[int, ...]) -> Iterable[tuple]:
        """Each matrix in a weight, with its gradient, momentum and NorMuon's mean squares."""
        state, lengths = self.state[p], [max(rows, p.size(1)) for rows in parts or (len(p),)]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        if "mean_squares" not in state:  # nor do checkpoints from before NorMuon have it
            state["mean_squares"] = p.new_zeros(sum(lengths))
        whole = p, grad, state["momentum"], state["mean_squares"].view(-1)
        if not parts:
            return [whole]
        split = [tensor.split(parts) for tensor in whole[:3]]
        return zip(*split, whole[3].split(lengths), strict=True)

    def move(self, group: dict, same: list[tuple[Tensor, ...]], applied: Tensor) -> None:
        """
        Update n matrices of one shape, each given with its gradient g, momentum m and mean squares.
        With mu the group's momentum: the matrix is multiplied by 1 - lr * weight_decay; m <- m +
        (1 - mu) (g - m); and the matrix moves by -lr * sqrt(max(1, rows / cols)) times the
        orthogonal matrix nearest to g + mu (m - g), Nesterov's lookahead, after `normalize`.
        """
        matrices, gradients, momenta, squares = zip(*same, strict=True)
        mu, lr, (rows, cols) = group["momentum"], group["lr"] * applied, matrices[0].shape
        m, g = torch.stack(momenta), torch.stack(gradients)  # (n, rows, cols)
        g.masked_fill_(applied == 0, 0)  # NaN times a rate of 0 would be NaN
        m.lerp_(g, (1 - mu) * applied)
        torch._foreach_copy_(momenta, m.unbind())
        # in float32: small learning rates underflow in float16
        directions = orthogonalize(g.lerp_(m, mu), self.dtype).float()

        now = mean_squares(directions)  # (n, rows, 1) or (n, 1, cols)
        mean = torch.stack(squares).view_as(now).lerp_(now, (1 - NORMUON_BETA) * applied)
        torch._foreach_copy_(squares, mean.flatten(1).unbind())
        updates = normalize(directions, mean) * (lr * max(1, rows / cols) ** 0.5)
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(matrices, updates.unbind())

    def __setstate__(self, state: dict) -> None:
        # AdamW's expects a step in each parameter's state, which matrices do not have
        torch.optim.Optimizer.__setstate__(self, state)


def parameters_by_role(model) -> dict[tuple[str, tuple[int, ...]], list[nn.Parameter]]:
    """
    A model's parameters by (role, parts), in the order of ROLES: as model.mark() says for their
    module, else a vector, an embedding, or a single matrix of a block. A head tied to the embedding
    is a head. Raises UserError for a weight whose role is not clear.
    """
    # the last one counts: for a tied head and embedding, the marked one
    modules = sorted(model.modules(), key=lambda module: hasattr(module, "muon"))
    owners = {p: module for module in modules for p in module.parameters(recurse=False)}
    in_blocks, problems = {*model.transformer.h.parameters()}, []
    roles: dict[tuple[str, tuple[int, ...]], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        role, parts = getattr(owners[p], "muon", ("", ()))
        if p.dim() < 2:
            role, parts = "vector", ()
        elif not role and isinstance(owners[p], nn.Embedding):
            role = "embedding"
        elif not role and p in in_blocks and isinstance(owners[p], nn.Linear):
            role = "matrix"
        if role not in ROLES or (role == "matrix" and p.dim() != 2):
            found = f"has the role {role!r}" if role else "has no role"
            hint = f"call mark(module, role=...) where its module is made; {', '.join(ROLES)}"
            problems.append(f"{name}: it is {[*p.shape]} and {found}; {hint}")
        elif parts and sum(parts) != len(p):
            problems.append(f"{name}: its parts {parts} do not add up to {len(p)} rows")
        roles.setdefault((role, parts), []).append(p)
    raise_if_any(problems)
    return dict(sorted(roles.items(), key=lambda item: (ROLES.index(item[0][0]), item[0][1])))
