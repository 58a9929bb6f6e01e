"""
Compare training recipes over several seeds: validation loss against tokens, and the tokens each
needs for the loss that the first one ends at.

    python results/ablate.py out/quickstart_pair --seeds=3 classic=config/quickstart.py fast=config/fast_quickstart.py
    python results/ablate.py out/lr --seeds=1 'a=config/x.py --learning_rate=1e-3' 'b=config/x.py --learning_rate=2e-3'

Each NAME='ARGUMENTS' is a command line of train.py, or of another --script; every run gets a folder
of its own, OUT/NAME-SEED, and the same command goes on where it was stopped and leaves finished
runs alone. Ends with a table, OUT/ablation.json and OUT/ablation.png.
"""

import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common.console import Parser, UserError, run_main
from compare import reach
from reports.records import read_metrics


def read_variants(given: list[str], file: Path) -> dict[str, str]:
    """
    Name -> arguments; kept in `file`, as a folder with finished runs does not tell what they were
    given.
    """
    variants = dict(variant.partition("=")[::2] for variant in given)
    problems = [
        f"{variant}: needs NAME='ARGUMENTS'" for variant in given if not all(variant.partition("="))
    ]
    known = json.loads(file.read_text()) if file.exists() else {}
    problems += [
        f"{name}: was {known[name]!r} in this folder; choose another name"
        for name in variants.keys() & known.keys()
        if variants[name] != known[name]
    ]
    if problems or len(variants) < len(given):
        raise UserError(*problems or ["variants: two have one name; choose another for one"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known | variants, indent=1))
    return variants


def train(script: Path, arguments: str, out_dir: Path, seed: int) -> None:
    command = [
        sys.executable,
        str(script),
        *shlex.split(arguments),
        f"--out_dir={out_dir}",
        f"--seed={seed}",
        "--init_from=auto",
        "--keep_checkpoints=1",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(
            f"{shlex.join(command)}: exit code {done.returncode}; its message is above; the same command goes on"
        )


def read_curve(out_dir: Path) -> dict:
    """
    tokens and val_loss at every evaluation but the first, and the seconds spent in training steps.
    """
    run = read_metrics(out_dir / "metrics.jsonl")
    trained = run.eval["iter"] > 0
    return dict(
        tokens=run.eval["tokens"][trained].tolist(),
        val_loss=run.eval["val_loss"][trained].tolist(),
        step_seconds=float(run.step["seconds"].sum()),
    )


def summarize(name: str, arguments: str, curves: list[dict], target: float) -> dict:
    tokens, losses = (
        np.array(curves[0]["tokens"]),
        np.array([curve["val_loss"] for curve in curves]),
    )
    reached = reach(tokens, losses.mean(axis=0), target)
    return dict(
        name=name,
        arguments=arguments,
        tokens=tokens[-1],
        val_loss=losses.mean(axis=0)[-1],
        spread=np.ptp(losses[:, -1]),
        tokens_to_target=None if np.isnan(reached) else reached,
        step_seconds=float(np.mean([curve["step_seconds"] for curve in curves])),
        curves=curves,
    )


def draw(path: Path, rows: list[dict], target: float) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        tokens = np.array(row["curves"][0]["tokens"]) / 1e6
        losses = np.array([curve["val_loss"] for curve in row["curves"]])
        (line,) = axes.plot(
            tokens, losses.mean(axis=0), label=f"{row['name']}: {row['val_loss']:.3f}"
        )
        axes.fill_between(
            tokens, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.2
        )
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle="--")
    axes.set(xlabel="tokens, millions", ylabel="validation loss, nats per token")
    lowest = min(row["val_loss"] for row in rows)
    axes.set_ylim(
        lowest - 0.05, min(max(row["curves"][0]["val_loss"][0] for row in rows), lowest + 1.2)
    )
    axes.grid(alpha=0.3)
    axes.legend(title=f"mean of {len(rows[0]['curves'])} seeds, band: all of them", frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--seeds",
        type=int,
        choices=range(1, 100),
        default=3,
        metavar="N",
        help="seeds 1 to N (default: 3)",
    )
    parser.add_argument(
        "--script", type=Path, default=ROOT / "train.py", help="what trains (default: train.py)"
    )
    parser.add_argument("variants", nargs="+", metavar="NAME='ARGUMENTS'")
    args = parser.parse_args(argv)
    variants = read_variants(args.variants, args.out / "variants.json")
    runs = [(name, seed) for seed in range(1, args.seeds + 1) for name in variants]
    for name, seed in tqdm(runs, unit="run"):
        train(args.script, variants[name], args.out / f"{name}-{seed}", seed)
    curves = {
        name: [read_curve(args.out / f"{name}-{seed}") for seed in range(1, args.seeds + 1)]
        for name in variants
    }
    target = np.mean([curve["val_loss"] for curve in curves[next(iter(variants))]], axis=0)[-1]
    rows = [summarize(name, variants[name], curves[name], target) for name in variants]
    print(
        f"{'variant':<20}{'tokens':>10}{'val loss':>10}{'spread':>8}{f'tokens to {target:.3f}':>18}{'steps':>8}"
    )
    for row in rows:
        reached = (
            f"{row['tokens_to_target'] / 1e6:.2f}M" if row["tokens_to_target"] else "not reached"
        )
        print(
            f"{row['name']:<20}{row['tokens'] / 1e6:>9.2f}M{row['val_loss']:>10.4f}{row['spread']:>8.4f}{reached:>18}"
            f"{row['step_seconds']:>7.0f}s"
        )
    command = shlex.join(["python", "results/ablate.py", *argv])
    result = dict(
        command=command,
        date=str(date.today()),
        torch=torch.__version__,
        target=target,
        variants=rows,
    )
    (args.out / "ablation.json").write_text(json.dumps(result, indent=1))
    draw(args.out / "ablation.png", rows, target)


if __name__ == "__main__":
    run_main(main)
