"""
Milliseconds of the kernels that decide a CPU's step: matrix products of the 124M by dtype, attention fused and plain.

    python results/cpu_kernels.py [--rounds=15] > cpu_kernels.json
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import hardware
import measure
from configurator import Config
from console import parse_count
from errors import Parser, run_main
from model import plain_attention

PRODUCTS = ((1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768), (1024, 768, 50304))  # rows, inner, columns
HEADS = ((32, 4, 64, 32), (16, 4, 128, 32), (4, 12, 256, 64), (1, 12, 1024, 64))  # B, nh, T, hs


def timed_ms(work) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def medians(works: dict, rounds: int) -> dict[str, float]:
    """Each once for nothing, then all in turn."""
    for work in works.values():
        work()
    taken = [{name: timed_ms(work) for name, work in works.items()} for _ in range(rounds)]
    return {name: statistics.median(row[name] for row in taken) for name in works}


def products() -> dict:
    """Name -> a product of two matrices, in either dtype."""
    works = {}
    for rows, inner, columns in PRODUCTS:
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
            works[f"{rows} x {inner} x {columns}, {str(dtype).removeprefix('torch.')}"] = lambda a=a, b=b: a @ b.T
    return works


def attentions() -> dict:
    """Name -> causal attention forward and backward, fused and plain, in either dtype."""
    works = {}
    for B, nh, T, hs in HEADS:
        for dtype in (torch.float32, torch.bfloat16):
            qkv = torch.randn(B, T, 3 * nh, hs, dtype=dtype, requires_grad=True)
            grad = torch.randn(B, nh, T, hs, dtype=dtype)
            for name, attention in (("fused", F.scaled_dot_product_attention), ("plain", plain_attention)):

                def work(attention=attention, qkv=qkv, grad=grad) -> None:
                    q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
                    attention(q, k, v, dropout_p=0.0, is_causal=True).backward(grad)

                works[f"{B} x {nh} heads, {T} tokens, {hs} wide, {str(dtype).removeprefix('torch.')}, {name}"] = work
    return works


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=parse_count, default=15, metavar="N")
    rounds = parser.parse_args(argv).rounds
    hw = hardware.set_up(Config(device="cpu"))
    ms = medians(products(), rounds) | medians(attentions(), rounds)
    result = dict(command=f"python results/cpu_kernels.py --rounds={rounds}", ms=ms, machine=measure.machine(hw))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
