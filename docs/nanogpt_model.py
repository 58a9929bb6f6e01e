"""Give this program's GPT-2 nanoGPT's interface, for existing scripts (docs/from_nanogpt.md)."""

import torch.nn as nn

import model
from configurator import Config
from machine.cost import count_flops
from model import GPTConfig
from model_fast import config_from_dict
from optimizer import build_optimizer
from run.pretrained import load_pretrained


class LayerNorm(nn.LayerNorm):
    def __init__(self, ndim, bias):
        super().__init__(ndim, bias=bias)


class GPT(model.GPT):
    def forward(self, idx, targets=None):  # type: ignore[override]  # nanoGPT has no weights
        if targets is None:
            return self.lm_head(self.hidden(idx)[:, -1:]), None
        logits = super().forward(idx)
        loss = model.loss_sum(logits.flatten(0, 1), targets.flatten(), self.config, None)
        return logits, loss / (targets != -1).sum().clamp(min=1)

    @classmethod
    def from_pretrained(cls, name, override_args=None):
        state = load_pretrained(str(name))
        config = config_from_dict(state.model_config | (override_args or {}))
        gpt = cls(config)
        gpt.load_state_dict(state.model)
        gpt.vocab = state.vocab  # type: ignore[assignment]  # before padding, so that generate() draws no padding id
        return gpt

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        vocab = getattr(self, "vocab", self.config.vocab_size)
        return model.generate(self, idx, max_new_tokens, vocab, temperature, top_k or 0)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        given = dict(weight_decay=weight_decay, learning_rate=learning_rate)
        config = Config(**given, beta1=betas[0], beta2=betas[1])
        optimizer = build_optimizer(self, config, self.lm_head.weight.dtype)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"]  # train.py's loop does this before each update
        return optimizer

    def crop_block_size(self, block_size):
        assert block_size <= self.config.block_size
        wpe = self.transformer.wpe.weight.detach()[:block_size].clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(wpe, freeze=False)
        self.config = GPTConfig(**vars(self.config) | dict(block_size=len(wpe)))

    def get_num_params(self, non_embedding=True):
        left_out = "wpe" if non_embedding else "none"
        return sum(p.numel() for name, p in self.named_parameters() if left_out not in name)

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        flops = count_flops(self.config) or 0.0  # per token
        return flops * self.config.block_size * fwdbwd_per_iter / dt / 312e12  # A100, as in nanoGPT
