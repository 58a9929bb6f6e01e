"""An example of your own model.py: GPT-2 with rotary positions (docs/from_nanogpt.md)."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT as Base
from model import MLP


def rotate(x, past):  # x (B, nh, T, hs), after `past` tokens
    T, half = x.size(2), x.size(3) // 2
    rates = 10000 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(past, past + T, device=x.device)[:, None] * rates
    cos, sin, (a, b) = angles.cos().to(x.dtype), angles.sin().to(x.dtype), x.split(half, dim=3)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=3)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):  # step 4: the cache
        B, T, C = x.shape
        parts = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in parts)
        past = cache.length if cache else 0
        q, k = rotate(q, past), rotate(k, past)
        if cache:
            k, v = cache.extend(k, v)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=T > 1)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(Base):  # step 2
    def __init__(self, config):
        nn.Module.__init__(self)
        self.config = config
        parts = dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        )
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.init_weights()

    def hidden(self, idx, caches=None):  # step 3: your forward, up to ln_f
        past = caches[0].length if caches else 0  # step 4
        x = self.transformer.drop(self.transformer.wte(idx[:, past:]))
        for n, block in enumerate(self.transformer.h):
            x = block(x, caches[n] if caches else None)
        return self.transformer.ln_f(x)
