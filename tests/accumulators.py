"""
Multiply float16 matrices on a CPU as a GeForce's tensor cores do with float16 accumulators.

A tensor core adds 16 products at a time to a running sum, which it rounds to float16. With float32
accumulators, only the result is rounded. Run as a program, this file prints, as JSON, how far off
the gradients of both models are, at the width and vocabulary of 124M parameters:

    python tests/accumulators.py
"""

import json
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # import from the root

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_fast import build_model, config_from_dict
from training.compiled import LOSS_SCALE, errors, moved_weights, take_gradients

aten = torch.ops.aten
PRODUCTS = 16  # products that a tensor core adds at once: the k of mma.m16n8k16
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# each way to train: its dtype, and its value of the key fp16_accumulation
WAYS = {
    "bfloat16": (torch.bfloat16, False),
    "fp16_accumulation": (torch.float16, True),
    "fp16_accumulation, in the head too": (torch.float16, False),
}
WIDTHS = dict(n_embd=768, vocab_size=50304)  # both models' sizes at 124M
MODELS = {"gpt2": dict(model="gpt2", n_head=12), "fast": dict(model="fast", n_head=6)}
MICRO_BATCHES = (8192, 16384, 32768)  # tokens, in the configs of GeForce cards


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float16 matrices (..., m, k) and (..., k, n), with float16 accumulators."""
    total = a.new_zeros(*a.shape[:-1], b.size(-1))
    for i in range(0, a.size(-1), PRODUCTS):
        # products of float16 numbers are exact in float32, and sums of 16 are nearly exact
        part = a[..., i : i + PRODUCTS].float() @ b[..., i : i + PRODUCTS, :].float()
        total.copy_(part.add_(total))
    return total


class Float16Accumulators(TorchDispatchMode):
    """
    Give matmuls of float16 matrices float16 accumulators inside this context. Count these matmuls
    and those of bfloat16 matrices, which have float32 accumulators on every GPU. Leave attention,
    and matmuls in other dtypes, as they are.
    """

    def __init__(self):
        super().__init__()
        self.float16 = self.bfloat16 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        factors = kwargs or {}
        if func not in MATMULS or args[-1].dtype not in (torch.float16, torch.bfloat16):
            return func(*args, **factors)
        *_, a, b = args
        if a.dtype == torch.float16:
            self.float16 += 1
            product = multiply(a, b).float()
        else:
            self.bfloat16 += 1
            product = a.float() @ b.float()
        if len(args) == 3:
            product = factors.get("alpha", 1) * product + factors.get("beta", 1) * args[0].float()
        return product.to(a.dtype)


def gradient_errors(
    sizes: dict, tokens: int, ways: dict = WAYS
) -> dict[str, tuple[float, float, Float16Accumulators]]:
    """
    Return, for each way, the median and the largest error of the gradients, relative to their norms
    in float32, on seeded random weights, and the context that counted the matmuls.
    """
    torch.manual_seed(0)
    model = build_model(config_from_dict(dict(bias=True, block_size=tokens // 2) | sizes))
    two = (torch.rand(2, tokens // 2 + 1) ** 4 * sizes["vocab_size"]).long()
    x, y = two[:, :-1], two[:, 1:]
    found = {}
    with moved_weights(model, torch.device("cpu"), seed=0):
        (model(x, y) * LOSS_SCALE).backward()
        exact = [gradient.clone() for _, gradient in take_gradients(model)]
        for way, (dtype, key) in ways.items():
            model.config = config_from_dict(
                dict(bias=True, block_size=tokens // 2, fp16_accumulation=key) | sizes
            )
            with Float16Accumulators() as counted:
                with torch.autocast("cpu", dtype):
                    loss = model(x, y)
                (loss * LOSS_SCALE).backward()
            off = errors(model, exact)
            found[way] = (statistics.median(off), max(off), counted)
    return found


def weight_gradient_errors(tokens: int) -> dict[str, float]:
    """
    Return the relative error of dy^T x, a sum over all tokens of a micro-batch, for random x and
    dy, with float16 accumulators and in bfloat16.
    """
    torch.manual_seed(0)
    x, dy = torch.randn(tokens, 256), torch.randn(tokens, 256)
    exact = dy.double().T @ x.double()
    found = {
        "bfloat16": (dy.bfloat16().float().T @ x.bfloat16().float()).bfloat16(),
        "fp16_accumulation": multiply(dy.half().T, x.half()),
    }
    return {way: ((got - exact).norm() / exact.norm()).item() for way, got in found.items()}


def main() -> None:
    table: dict = dict(command="python tests/accumulators.py", layers=4, tokens=128)
    for name, model in MODELS.items():
        found = gradient_errors(WIDTHS | model | dict(n_layer=table["layers"]), table["tokens"])
        table[name] = {way: dict(median=m, largest=most) for way, (m, most, _) in found.items()}
    table["weight_gradient"] = {tokens: weight_gradient_errors(tokens) for tokens in MICRO_BATCHES}
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
