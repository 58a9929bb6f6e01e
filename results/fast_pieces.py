"""
Train the fast recipe with one more of the public records' pieces, to see whether it earns its lines (results/README.md).

    python results/fast_pieces.py x0 config/fast_quickstart.py --out_dir=out/x0         then what train.py takes
    python results/ablate.py out/pieces --script=results/fast_pieces.py 'none=none config/fast_quickstart.py' \\
        'x0=x0 config/fast_quickstart.py'                                               over seeds

none       the recipe as it is
x0         each block reads a learnt mixture of the stream and of the normed token embedding
values     in the first and the last block, the values get a learnt share of a second embedding of the token
residual   in all blocks but the first, the values get a learnt share of the first block's
momentum   Muon's momentum grows from 0.85 to its configured value in the first tenth of the run
cautious   Muon's weight decay only where it and the update point the same way
normuon    Muon's direction is scaled per neuron by a running mean of its squares

Several are joined by +. Training alone: no samples, no cache, no recompute.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import model_fast
import muon
import recipe
import train
from configurator import load_config
from errors import UserError, run_main
from muon import orthogonalize

FIRST_MOMENTUM = 0.85
SQUARES_DECAY = 0.95  # of NorMuon's running mean
PIECES = ("none", "x0", "values", "residual", "momentum", "cautious", "normuon")


class SharedValues(nn.Module):
    """Stands where attention expects a KVCache, and mixes the block's values with others."""

    def __init__(self, vocab_size: int | None, n_embd: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_embd) if vocab_size else None  # N(0, 1), as the token embedding
        self.share = nn.Parameter(torch.tensor([0.5, 0.5]))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, nh, T, hs) -> k and the mixture."""
        B, nh, T, hs = v.shape
        other = self.source if self.table is None else self.table(self.source).view(B, T, nh, hs).transpose(1, 2)
        return k, self.share[0] * v + self.share[1] * other.type_as(v)


class FirstValues:
    """Stands where the first block expects a KVCache, and remembers its values."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.values = v
        return k, v


class FastGPT(model_fast.FastGPT):
    pieces: set[str]

    def __init__(self, config: model_fast.GPTConfig):
        super().__init__(config)
        layers, tables = range(config.n_layer), "values" in self.pieces
        if "x0" in self.pieces:
            self.mixtures = nn.ParameterList(nn.Parameter(torch.tensor([1.0, 0.0])) for _ in layers)
        mixed = (0, layers[-1]) if tables else layers[1:] if "residual" in self.pieces else ()
        self.values = nn.ModuleDict({str(i): SharedValues(config.vocab_size if tables else None, config.n_embd) for i in mixed})

    def hidden(self, idx: Tensor, caches: None = None) -> Tensor:
        x = x0 = model_fast.norm(self.transformer.wte(idx))
        head_size = self.config.n_embd // self.config.n_head
        cos, sin = model_fast.rotary_tables(torch.arange(idx.size(1), device=idx.device), head_size)
        first = FirstValues() if "residual" in self.pieces else None
        for i, block in enumerate(self.transformer.h):
            if "x0" in self.pieces:
                x = self.mixtures[i][0] * x + self.mixtures[i][1] * x0
            cache = self.values[str(i)] if str(i) in self.values else first
            if cache is not first:
                cache.source = first.values if first else idx
            x = block(x, cos, sin, cache)
        return model_fast.norm(x)


class Muon(muon.Muon):
    pieces: set[str]
    warmup: int  # iterations in which the momentum grows

    def step_matrices(self, group: dict, found_inf: Tensor | None) -> None:
        params, momentum, weight_decay = group["params"], group["momentum"], group["weight_decay"]
        self.kept = self.state[params[0]]  # saved with a checkpoint, as the groups' settings are not
        if "momentum" in self.pieces:
            self.kept["iters"] = self.kept.get("iters", 0) + 1
            group["momentum"] -= max(0.0, 1 - self.kept["iters"] / self.warmup) * (momentum - FIRST_MOMENTUM)
        if "normuon" in self.pieces:
            muon.orthogonalize = lambda matrices, dtype: self.normalize(orthogonalize(matrices, dtype))
        before = [p.clone() for p in params] if "cautious" in self.pieces else []
        group["weight_decay"] = 0.0 if before else weight_decay
        super().step_matrices(group, found_inf)
        for p, old in zip(params, before):
            p.sub_(group["lr"] * weight_decay * old * ((old - p) * old > 0))
        group.update(momentum=momentum, weight_decay=weight_decay)

    def normalize(self, directions: Tensor) -> Tensor:
        """
        NorMuon (arXiv:2510.05491): each neuron of the matrices (n, rows, cols) to the same size, the matrix's norm kept. Of the
        MLP's two matrices, the hidden units: c_fc comes transposed, and the records do so with c_proj.
        """
        squares = directions.float().square().mean(dim=-1 if directions.size(1) == directions.size(2) else -2, keepdim=True)
        mean = self.kept.setdefault(f"squares {tuple(directions.shape)}", torch.zeros_like(squares))
        mean.lerp_(squares, 1 - SQUARES_DECAY)
        scaled = directions / (mean.sqrt() + 1e-10)
        return scaled * (directions.norm(dim=(1, 2), keepdim=True) / scaled.norm(dim=(1, 2), keepdim=True).clamp_min(1e-10))


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    pieces = set(argv[0].split("+")) if argv else {""}
    if unknown := pieces - set(PIECES):
        raise UserError(f"{'+'.join(sorted(unknown))}: no such piece; first one or more of {', '.join(PIECES)}, joined by +")
    if {"values", "residual"} <= pieces:
        raise UserError("values+residual: both mix the same values; choose one")
    FastGPT.pieces = Muon.pieces = pieces
    recipe.FastGPT, recipe.Muon = FastGPT, Muon
    config = load_config(argv[1:])
    Muon.warmup = max(1, (config.lr_decay_iters or config.max_iters) // 10)
    return train.main([*argv[1:], "--sample_tokens=0", "--recompute=False"])


if __name__ == "__main__":
    run_main(main)
