"""Count a model's FLOPs, and describe a model."""

import functools
from dataclasses import replace

import torch

from common.console import count
from model import GPTConfig
from model_fast import build_model, config_to_dict


@functools.cache
def count_flops(config: GPTConfig) -> float | None:
    """
    Return the FLOPs of training on one token, by running one sequence forward and backward without
    data or memory; None if the model does not run on fake tensors. torch counts all matmuls, and
    attention as if it had no mask. For GPT-2 the result is
    the PaLM paper's 6 N + 12 L H Q T (appendix B) without the norms.
    """
    # imported lazily: FakeTensorMode imports torch's compiler, which takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    try:
        # Fake tensors need no memory and draw no random numbers, but a modified model may set the
        # seed. torch cannot count FLOPs of the CPU's fused attention.
        with torch.random.fork_rng([]), FakeTensorMode():
            model = build_model(replace(config, loss_chunk=0))
            idx = torch.zeros(1, config.block_size, dtype=torch.long)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                torch.autograd.backward(model(idx, idx))
    except Exception:  # a modified model can raise anything
        return None
    return counter.get_total_flops() / config.block_size


def describe(model, vocab: int) -> str:
    """
    Describe a model: its file, which is where to edit its layers, its size and its FLOPs. `vocab`
    is the vocabulary size before padding.
    """
    kind = config_to_dict(model.config)["model"]
    parameters = sum(p.numel() for p in model.parameters())
    rows, flops = model.config.vocab_size, count_flops(model.config)
    vocabulary = f"vocabulary {vocab}" if rows == vocab else f"vocabulary {vocab}, padded to {rows}"
    work = "FLOPs not known, because it does not run on fake tensors"
    if flops:
        work = f"{count(flops)} FLOPs per token, counted by PyTorch"
    name = f"{kind} ({type(model).__module__}.py), {parameters / 1e6:.2f}M parameters"
    return f"model: {name}, {vocabulary}, {work}"
