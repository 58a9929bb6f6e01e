"""
Measure how much more runs scatter if each has its own data order, and whether a bfloat16 token
embedding scatters them too.

    python dev/measure_spread.py DATASET [RUNS]

The ten public runs of results/public_runs/fineweb_124m_muon_h100.csv read their data in one order
and keep the token embedding and its moments in bfloat16; a run of train.py does neither. This
trains small models of the fast recipe as theirs, as theirs in float32, and as ours, from the same
initial weights in each (RUNS seeds, by default 8), and prints the mean and standard deviation of
the val losses.

If order and initial weights act independently, a run with its own order differs from the mean of N
runs that share another order by sqrt(2 ours^2 - theirs^2 + theirs^2 / N), where ours and theirs are
the two standard deviations: the variance of the order counts twice, once for each order. `factor`
is this over theirs, from `ratio`, the geometric mean of ours / theirs over the evaluations.
"""

import json
import sys
from pathlib import Path
from statistics import geometric_mean, mean, stdev

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # import from the root

import torch

from configurator import Config
from data.loader import ShuffledWindows, eval_batches, to_batch
from data.shards import open_dataset
from model_fast import build_model
from train import build_optimizer, get_lr, model_config, train_step

PUBLIC_RUNS = 10  # N
ITERATIONS = 200
# Evaluate where iterations 125, 250, ... of the public runs' 3,250 would be.
EVALUATED = {round(ITERATIONS * it / 3250): it for it in (125, 250, 500, 1000, 2000, 3250)}
EVAL_TOKENS = 32768
SETTINGS = Config(
    model="fast",
    optimizer="muon",
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=64,
    batch_size=16,
    learning_rate=0.025,
    head_lr=0.008,
    weight_decay=0.001,
    beta1=0.8,
    beta2=0.95,
    max_iters=ITERATIONS,
    warmup_iters=0,
    lr_schedule="wsd",
    decay_fraction=0.7,
    min_lr=0.0,
)
# whether each run has its own data order, and the embedding's dtype
SIDES = {
    "theirs": (False, "bfloat16"),
    "theirs in float32": (False, "float32"),
    "ours": (True, "float32"),
}
CPU = torch.device("cpu")


def train(data, batches: list, seed: int, order: int, kept_in: str) -> dict[int, float]:
    """Train one model in float32. Returns its val losses, by iterations of the public runs."""
    torch.manual_seed(seed)
    model = build_model(model_config(SETTINGS, data.vocab, flash=True, compiled=False))
    if kept_in == "bfloat16":  # AdamW's moments have their weight's dtype
        embedding = model.transformer.wte.bfloat16()
        embedding.register_forward_hook(lambda module, inputs, output: output.float())
    optimizer = build_optimizer(model, SETTINGS, torch.float32)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    autocast = torch.autocast("cpu", enabled=False)
    windows = ShuffledWindows(data.train, SETTINGS.block_size, order)
    losses = {}
    for it in range(ITERATIONS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, SETTINGS, 0.0, group["initial_lr"])
        block = windows.read(it * SETTINGS.batch_size, SETTINGS.batch_size)
        batch = to_batch(torch.from_numpy(block), CPU)
        train_step(model, optimizer, scaler, [batch], 0.0, autocast)
        if it + 1 in EVALUATED:
            with torch.no_grad():
                losses[EVALUATED[it + 1]] = mean(float(model(x, y)) for x, y in batches)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    data = open_dataset(sys.argv[1])
    batches = [*eval_batches(data.val, EVAL_TOKENS, SETTINGS)]
    spread = {}
    for side, (has_own_order, kept_in) in SIDES.items():
        found = []
        for seed in range(1, 1 + int((sys.argv[2:] or [8])[0])):
            found.append(train(data, batches, seed, seed * has_own_order, kept_in))
            print(side, seed, found[-1], file=sys.stderr, flush=True)
        columns = {it: [losses[it] for losses in found] for it in EVALUATED.values()}
        spread[side] = [stdev(column) for column in columns.values()]
        means = {f"mean at {it:,}": round(mean(column), 4) for it, column in columns.items()}
        spreads = {f"sd at {it:,}": round(stdev(column), 4) for it, column in columns.items()}
        print(json.dumps({"side": side, "runs": len(found)} | means | spreads))
    ratio = geometric_mean(a / b for a, b in zip(spread["ours"], spread["theirs"], strict=True))
    factor = (2 * ratio**2 - 1 + 1 / PUBLIC_RUNS) ** 0.5
    print(json.dumps(dict(ratio=round(ratio, 2), factor=round(factor, 2))))


if __name__ == "__main__":
    main()
