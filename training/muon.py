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

from collections import Counter

import torch
import torch.distributed as dist
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

    Each of `world_size` processes orthogonalises its share of the matrices of each shape, and only
    it keeps their momentum. All get the results and move alike.

    Like torch's fused optimizers, a step with `fused` reads `found_inf` (0 or 1, on the device)
    where the caller or a GradScaler has set it, and changes nothing where it is 1.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype, fused=True, rank=0, world_size=1):
        super().__init__(groups, eps=ADAM_EPS, fused=fused)
        self.dtype, self.rank, self.world_size = dtype, rank, world_size
        # dealt out in turn, sorted by shape: every process gets as many of each shape
        matrices = [p for group in groups if "momentum" in group for p in group["params"]]
        matrices.sort(key=lambda p: p.shape)
        self.owner = {p: number % self.world_size for number, p in enumerate(matrices)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        groups = self.param_groups
        for group in groups:
            if "momentum" in group:
                self.step_matrices(group, getattr(self, "found_inf", None))
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step()  # AdamW's
        self.param_groups = groups

    def step_matrices(self, group: dict, found_inf: Tensor | None) -> None:
        """
        With momentum mu and gradient g: the matrix shrinks by the share lr * weight_decay, m <- m +
        (1 - mu) (g - m), and the matrix moves by lr * sqrt(max(1, rows / cols)) against the
        orthogonal matrix nearest to g + mu (m - g), Nesterov's look-ahead, evened out by
        `normalize`. Matrices of one shape move together, in a few kernels: one by one they would
        take hundreds of small ones.
        """
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for same in by_shape.values():
            # a skipped update is one whose rates are all 0
            applied = 1 - (same[0].new_zeros(()) if found_inf is None else found_inf)
            own = self.update_momenta(group, same, applied)
            directions = self.gather(orthogonalize(own, self.dtype), same, group["parts"])
            # in float32: float16 has no room for small rates
            self.move(group, same, directions.float(), applied)

    def update_momenta(self, group: dict, same: list[Tensor], applied: Tensor) -> Tensor:
        """
        Of those in `same`, matrices of one shape, that are this process's: bring the momenta up to
        date, and return the look-aheads, (n * parts, rows / parts, cols).
        """
        rows, cols = same[0].shape
        mine = [p for p in same if self.owner[p] == self.rank]
        if not mine:
            return same[0].new_empty(0, rows // group["parts"], cols)
        for p in mine:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum"] for p in mine]
        m, g = torch.stack(momenta), torch.stack([p.grad for p in mine])  # (n, rows, cols) each
        g.masked_fill_(applied == 0, 0)  # NaN times a rate of 0 would be NaN
        m.lerp_(g, (1 - group["momentum"]) * applied)
        torch._foreach_copy_(momenta, m.unbind())
        return g.lerp_(m, group["momentum"]).view(-1, rows // group["parts"], cols)

    def gather(self, own: Tensor, same: list[Tensor], parts: int) -> Tensor:
        """
        The directions of all of `same`, (n * parts, rows / parts, cols), from those of this
        process's share, `own`.
        """
        if not dist.is_initialized():
            return own
        most = max(Counter(self.owner[p] for p in same).values()) * parts
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        in_turn = [iter(directions.split(parts)) for directions in everyone]
        return torch.cat([next(in_turn[self.owner[p]]) for p in same])

    def move(self, group: dict, same: list[Tensor], directions: Tensor, applied: Tensor) -> None:
        """Shrink the matrices, even out their directions, and move against them."""
        for p in same:
            if "mean_squares" not in self.state[p]:  # checkpoints from before NorMuon lack it too
                stacked = p.view(group["parts"], -1, p.size(1))
                self.state[p]["mean_squares"] = torch.zeros_like(mean_squares(stacked))
        means = [self.state[p]["mean_squares"] for p in same]
        # (n * parts, rows / parts, 1) or (n * parts, 1, cols)
        mean = torch.cat(means).lerp_(mean_squares(directions), (1 - NORMUON_BETA) * applied)
        torch._foreach_copy_(means, mean.split(group["parts"]))

        _, rows, cols = directions.shape
        lr = group["lr"] * applied
        updates = normalize(directions, mean) * (lr * max(1, rows / cols) ** 0.5)
        torch._foreach_mul_(same, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(same, updates.view(-1, *same[0].shape).unbind())

    def numbered(self) -> list[tuple[int, Tensor]]:
        """The parameters with their numbers in a state_dict."""
        return list(enumerate(p for group in self.param_groups for p in group["params"]))

    def whole_state_dict(self) -> dict:
        """
        state_dict() for a checkpoint: with the momenta of all processes on the first, elsewhere
        with one's own. All take part.
        """
        whole = self.state_dict()
        for number, p in self.numbered():
            owner = self.owner.get(p, 0)
            if owner == 0 or p not in self.state:  # nothing to send, or no update yet
                continue
            if self.rank == owner:
                dist.send(self.state[p]["momentum"].cpu(), 0)
            elif self.rank == 0:
                momentum = torch.empty(p.shape)
                dist.recv(momentum, owner)
                whole["state"][number] = dict(whole["state"][number], momentum=momentum)
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a whole one, but for the momenta of other processes' matrices."""
        states = dict(state_dict["state"])
        for number, p in self.numbered():
            if number in states and self.owner.get(p, self.rank) != self.rank:
                others = states[number].items()
                states[number] = {name: value for name, value in others if name != "momentum"}
        super().load_state_dict(dict(state_dict, state=states))

    def __setstate__(self, state: dict) -> None:
        # AdamW's looks for a step in each parameter's state, and matrices have none
        torch.optim.Optimizer.__setstate__(self, state)


def parameters_by_role(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """
    matrices (of hidden layers), qkv (three in one), embedding, values (value embeddings), bigrams
    (token pairs), head and vectors. A head tied to the embedding counts as head. Raises ValueError
    for a parameter that has no role here.
    """
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
