"""
Compare training recipes over several seeds: validation loss against tokens, and the tokens each needs for the loss that
the first one ends at.

    python results/ablate.py out/quickstart_pair --seeds=3 classic=config/quickstart.py fast=config/fast_quickstart.py
    python results/ablate.py out/lr --seeds=1 'a=config/x.py --learning_rate=1e-3' 'b=config/x.py --learning_rate=2e-3'

Each NAME='ARGUMENTS' is a command line of train.py; every run gets a folder of its own, OUT/NAME-SEED, and the same command
goes on where it was stopped and leaves finished runs alone. Ends with a table, OUT/ablation.json and OUT/ablation.png.
"""

import argparse
import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from errors import UserError, run_main
from records import read_run


def train(arguments: str, out_dir: Path, seed: int) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(arguments), f"--out_dir={out_dir}", f"--seed={seed}",
               "--init_from=auto", "--keep_checkpoints=1"]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: exit code {done.returncode}; its message is above; the same command goes on")


def read_curve(out_dir: Path) -> dict:
    """tokens and val_loss at every evaluation but the first, and the seconds spent in training steps."""
    run = read_run(out_dir, gpu=None)
    trained = run.eval["iter"] > 0
    return dict(tokens=run.eval["tokens"][trained].tolist(), val_loss=run.eval["val_loss"][trained].tolist(),
                step_seconds=float(run.step["seconds"].sum()))  # fmt: skip


def tokens_to_reach(loss: float, tokens: list[float], val_loss: list[float]) -> float | None:
    """Where the curve, straight between evaluations, first comes down to `loss`; None where it does not."""
    for n, value in enumerate(val_loss):
        if value <= loss:
            if n == 0:
                return tokens[0]
            share = (val_loss[n - 1] - loss) / (val_loss[n - 1] - value)
            return tokens[n - 1] + share * (tokens[n] - tokens[n - 1])
    return None


def summarize(name: str, arguments: str, curves: list[dict], target: float) -> dict:
    tokens, losses = curves[0]["tokens"], np.array([curve["val_loss"] for curve in curves])
    mean = losses.mean(axis=0).tolist()
    return dict(
        name=name, arguments=arguments, tokens=tokens[-1], val_loss=mean[-1], spread=float(np.ptp(losses[:, -1])),
        tokens_to_target=tokens_to_reach(target, tokens, mean),
        step_seconds=float(np.mean([curve["step_seconds"] for curve in curves])), curves=curves,
    )  # fmt: skip


def draw(path: Path, rows: list[dict], target: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        tokens = np.array(row["curves"][0]["tokens"]) / 1e6
        losses = np.array([curve["val_loss"] for curve in row["curves"]])
        (line,) = axes.plot(tokens, losses.mean(axis=0), label=f"{row['name']}: {row['val_loss']:.3f}")
        axes.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.2)
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle="--")
    axes.set(xlabel="tokens, millions", ylabel="validation loss, nats per token")
    lowest = min(row["val_loss"] for row in rows)
    axes.set_ylim(lowest - 0.05, min(max(row["curves"][0]["val_loss"][0] for row in rows), lowest + 1.2))
    axes.grid(alpha=0.3)
    axes.legend(title=f"mean of {len(rows[0]['curves'])} seeds, band: all of them", frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="seeds per variant, from 1 (default: %(default)s)")
    parser.add_argument("variants", nargs="+", metavar="NAME='ARGUMENTS'")
    args = parser.parse_args(argv)
    variants = dict(variant.partition("=")[::2] for variant in args.variants)
    runs = [(name, seed) for seed in range(1, args.seeds + 1) for name in variants]
    for name, seed in tqdm(runs, unit="run"):
        train(variants[name], args.out / f"{name}-{seed}", seed)
    curves = {name: [read_curve(args.out / f"{name}-{seed}") for seed in range(1, args.seeds + 1)] for name in variants}
    target = np.mean([curve["val_loss"] for curve in curves[next(iter(variants))]], axis=0).tolist()[-1]
    rows = [summarize(name, variants[name], curves[name], target) for name in variants]
    print(f"{'variant':<20}{'tokens':>10}{'val loss':>10}{'spread':>8}{f'tokens to {target:.3f}':>18}{'steps':>8}")
    for row in rows:
        reached = f"{row['tokens_to_target'] / 1e6:.2f}M" if row["tokens_to_target"] else "not reached"
        print(f"{row['name']:<20}{row['tokens'] / 1e6:>9.2f}M{row['val_loss']:>10.4f}{row['spread']:>8.4f}{reached:>18}"
              f"{row['step_seconds']:>7.0f}s")  # fmt: skip
    command = shlex.join(["python", "results/ablate.py", *argv])
    result = dict(command=command, date=str(date.today()), torch=torch.__version__, target=target, variants=rows)
    (args.out / "ablation.json").write_text(json.dumps(result, indent=1))
    draw(args.out / "ablation.png", rows, target)


if __name__ == "__main__":
    run_main(main)
