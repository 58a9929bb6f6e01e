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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench
import hardware
from configurator import Config
from console import parse_count
from errors import Parser, run_main
from model import CausalSelfAttention, GPTConfig

PRODUCTS = ((1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768), (1024, 768, 50304))  # rows, inner, columns


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


def attentions(B: int, T: int) -> dict:
    """Name -> forward and backward pass of a layer of 12 heads of 64 under bfloat16 autocast."""
    works = {}
    for flash in (True, False):
        layer = CausalSelfAttention(GPTConfig(block_size=T, bias=False, flash=flash))
        x = torch.randn(B, T, 768, requires_grad=True)

        def work(layer=layer, x=x) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            y.sum().backward()

        works[f"attention layer, B={B} T={T}, {'fused' if flash else 'plain'}"] = work
    return works


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=parse_count, default=15, metavar="N")
    rounds = parser.parse_args(argv).rounds
    hw = hardware.set_up(Config(device="cpu"))
    ms = medians(products(), rounds) | medians(attentions(4, 256), rounds) | medians(attentions(1, 1024), rounds)
    result = dict(command=f"python results/cpu_kernels.py --rounds={rounds}", ms=ms, machine=bench.machine(hw))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
