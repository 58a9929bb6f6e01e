"""
The fast model: a GPT of GPT-2's size that needs fewer tokens for the same loss. It was tuned
together with its optimizer, Muon, which is in optimizer.py.

With bias=True, model and updates are those of train_gpt_simple.py at record/fable-5-2726 in
PrimeIntellect-ai/frontier-automated-speedrun, which descends from modded-nanogpt's file of that
name, except that Muon makes ten Newton-Schulz iterations instead of 18 and the token embedding is
float32. dev/compare_modded.py measures how far the losses are apart.

FastGPT has the same interface as model.py's GPT. Where it differs, a comment says why and names the
source. "Record of" a date refers to the modded-nanogpt speedrun, which accepts a change only if it
reaches the same loss in less time; records/track_1_short there has a folder for each date. Shapes
in comments: B sequences of T tokens, C = n_embd channels, nh heads of hs = C / nh channels, and a
vocabulary of V tokens.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from model import (
    GPT,
    GPTConfig,
    KVCache,
    attend,
    cap_logits,
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

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """
        Return the logits or the mean loss, as GPT.forward() does. T may exceed block_size, but the
        model is not trained on such positions.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        head = self.lm_head
        return mean_loss(x, head.weight, targets, self.config, LOGIT_CAP, head.bias, weights)

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
        for n, block in enumerate(self.transformer.h):
            x = block(x, angles, caches[n] if caches else None)
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


def model_config(c, vocab: int, sizes: dict | None = None) -> GPTConfig:
    """
    Return the model config of a run with the configurator.Config c. `vocab` is rounded up, unless
    the run begins with weights of other `sizes`, a checkpoint's model_config.
    """
    kind = FastConfig if c.model == "fast" else GPTConfig
    values = {f.name: getattr(c, f.name) for f in fields(kind) if hasattr(c, f.name)}
    multiple = c.pad_vocab_multiple
    values["vocab_size"] = -(-vocab // multiple) * multiple  # 50257 -> 50304
    if sizes:
        values["vocab_size"] = sizes["vocab_size"]
    return kind(**values)


def build_model(config: GPTConfig) -> GPT | FastGPT:
    return FastGPT(config) if isinstance(config, FastConfig) else GPT(config)


def config_to_dict(config: GPTConfig) -> dict[str, Any]:
    """Return a State's model_config. A checkpoint leaves out the fields that a run may change."""
    model = "fast" if isinstance(config, FastConfig) else "gpt2"
    return dict(asdict(config), model=model)


def config_from_dict(values: dict[str, Any]) -> GPTConfig:
    """
    Rebuild the config from a checkpoint's model_config. Missing fields get their defaults. Raises
    TypeError for an unknown field.
    """
    known = dict(values)
    kind = FastConfig if known.pop("model", "gpt2") == "fast" else GPTConfig
    return kind(**known)
