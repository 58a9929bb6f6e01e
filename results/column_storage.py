"""
One token of the 124M model with its matrices stored by rows and by columns, in turn; writes column_storage.json beside it.

    python results/column_storage.py            a minute
"""

import copy
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from errors import Parser, run_main
from generate import store_by_columns
from model import GPT, GPTConfig, KVCache

PAST, TOKENS = 200, 40


@torch.no_grad()
def measure(dtype: torch.dtype) -> dict:
    rows = GPT(GPTConfig()).eval().to(dtype)
    columns = copy.deepcopy(rows)
    store_by_columns(columns)
    models, past = dict(rows=rows, columns=columns), torch.randint(50257, (1, PAST))
    caches = {name: [KVCache(PAST + TOKENS) for _ in range(12)] for name in models}
    milliseconds = {name: [] for name in models}
    for name, model in models.items():
        model.next_logits(past, caches[name])
    for _ in range(TOKENS):
        for name, model in models.items():
            began = time.perf_counter()
            model.next_logits(past[:, :1], caches[name])
            milliseconds[name].append(1e3 * (time.perf_counter() - began))
    return {name: dict(least=min(values), median=statistics.median(values)) for name, values in milliseconds.items()}


def main(argv: list[str]) -> None:
    Parser(__doc__).parse_args(argv)
    torch.manual_seed(0)
    results = {str(dtype).removeprefix("torch."): measure(dtype) for dtype in (torch.float32, torch.bfloat16)}
    results |= dict(unit="ms a token", threads=torch.get_num_threads(), torch=torch.__version__)
    text = json.dumps(results, indent=1)
    Path(__file__).with_suffix(".json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    run_main(main)
