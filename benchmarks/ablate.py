"""
Compare training recipes over several seeds: validation loss against tokens, and the tokens that
each recipe needs to reach the final loss of the first one.

    python -m benchmarks.ablate out/pair --seeds=3 classic=config/quickstart.py \\
        fast=config/fast_quickstart.py
    python -m benchmarks.ablate out/lr --seeds=1 'a=config/x.py --learning_rate=1e-3' \\
        'b=config/x.py --learning_rate=2e-3'

Each NAME='ARGUMENTS' is a command line of train.py (or of another --script). Every run gets a
folder of its own, OUT/NAME-SEED. The same command again continues where it was stopped and leaves
finished runs alone. At the end it prints a table and writes OUT/ablation.json and
OUT/ablation.png.
"""

import itertools
import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common.console import Parser, UserError, duration, raise_if_any, run_main
from reports.curves import learning_curve, reach
from reports.picture import COLORS, MARKERS, count4, finish
from reports.records import MetricsFile


def read_variants(given: list[str], file: Path) -> dict[str, str]:
    """
    Name -> arguments. `file` keeps them, because a folder of finished runs does not say what they
    were given. Raises UserError.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    variants, problems = {}, []
    for text in given:
        name, _, arguments = text.partition("=")
        if not name or not arguments:
            problems.append(f"{text}: needs NAME='ARGUMENTS'")
        elif name in variants:
            problems.append(f"{name}: two variants have this name; rename one")
        elif known.get(name, arguments) != arguments:
            problems.append(f"{name}: was {known[name]!r} in this folder; choose another name")
        variants[name] = arguments
    raise_if_any(problems)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known | variants, indent=1))
    return variants


def train(script: Path, arguments: str, out_dir: Path, seed: int) -> None:
    command = [sys.executable, str(script), *shlex.split(arguments), f"--out_dir={out_dir}"]
    command += [f"--seed={seed}", "--init_from=auto", "--keep_checkpoints=1"]
    if code := subprocess.run(command, stdout=subprocess.PIPE).returncode:
        hint = "see its message above; the same command continues"
        raise UserError(f"{shlex.join(command)}: exit code {code}; {hint}")


def read_curve(out_dir: Path) -> dict:
    """Tokens and val loss at each evaluation after iteration 0, time in steps, parameters."""
    run = MetricsFile(out_dir / "metrics.jsonl").read()
    tokens, losses = learning_curve(run, "tokens")
    seconds = float(run.step["seconds"].sum())
    curve = {"tokens": tokens.tolist(), "val_loss": losses.tolist(), "step_seconds": seconds}
    return curve | {"parameters": run.parameters}


def summarize(name: str, arguments: str, curves: list[dict], target: float) -> dict:
    """One variant's means over its seeds, whose evaluations are at the same tokens."""
    tokens = np.array(curves[0]["tokens"])
    losses = np.array([curve["val_loss"] for curve in curves])
    return {
        "name": name,
        "arguments": arguments,
        "tokens": tokens[-1],
        "val_loss": losses.mean(axis=0)[-1],
        "spread": np.ptp(losses[:, -1]),
        "tokens_to_target": reach(tokens, losses.mean(axis=0), target),
        "step_seconds": float(np.mean([curve["step_seconds"] for curve in curves])),
        "parameters": curves[0]["parameters"],
        "curves": curves,
    }


def print_table(rows: list[dict], target: float) -> None:
    columns = ("variant", "tokens", "val loss", "spread", f"tokens to {target:.3f}", "steps")
    print("{:<20}{:>10}{:>10}{:>8}{:>18}{:>8}".format(*columns))
    for row in rows:
        reached = count4(row["tokens_to_target"]) if row["tokens_to_target"] else "n/a"
        print(
            f"{row['name']:<20}{count4(row['tokens']):>10}{row['val_loss']:>10.4f}"
            f"{row['spread']:>8.4f}{reached:>18}{row['step_seconds']:>7.0f}s"
        )


def draw(path: Path, rows: list[dict], target: float) -> None:
    """The mean curve of each variant, within a band from the lowest of its seeds to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row, color, marker in zip(rows, itertools.cycle(COLORS), itertools.cycle(MARKERS)):
        losses = np.array([curve["val_loss"] for curve in row["curves"]])
        tokens, minutes = row["curves"][0]["tokens"], duration(row["step_seconds"])
        label = f"{row['name']}, {count4(row['parameters'])} parameters: "
        label += f"{row['val_loss']:.3f} after {minutes} of steps"
        style = dict(color=color, marker=marker, markersize=4)
        axes.plot(tokens, losses.mean(axis=0), label=label, **style)
        axes.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.25)
    name = f"{rows[0]['name']}'s last loss"
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle="--", label=name)
    finish(axes, "tokens", "val loss, nats per token")
    seeds = f"mean of {len(rows[0]['curves'])} seeds, band: min to max"
    axes.set_title(f"{path.stem}: {seeds}", fontsize=10, loc="left")
    figure.legend(frameon=False, loc="outside lower center")
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--seeds", type=int, choices=range(1, 100), default=3, metavar="N", help="default: 3")
    add("--script", type=Path, default=Path("train.py"), help="what trains; default: train.py")
    add("variants", nargs="+", metavar="NAME='ARGUMENTS'")
    args = parser.parse_args(argv)
    variants = read_variants(args.variants, args.out / "variants.json")
    seeds = range(1, args.seeds + 1)

    # one seed of all variants before the next seed: a study that is cut short still compares
    for name, seed in tqdm([(name, seed) for seed in seeds for name in variants], unit="run"):
        train(args.script, variants[name], args.out / f"{name}-{seed}", seed)

    curves = {}
    for name in variants:
        curves[name] = [read_curve(args.out / f"{name}-{seed}") for seed in seeds]
    first = next(iter(curves.values()))
    target = np.mean([curve["val_loss"][-1] for curve in first])
    rows = [summarize(name, variants[name], curves[name], target) for name in variants]
    print_table(rows, target)
    command = shlex.join(["python", "-m", "benchmarks.ablate", *argv])
    result = {"command": command, "date": str(date.today()), "torch": torch.__version__}
    result |= {"commit": subprocess.getoutput("git rev-parse --short HEAD")}
    result |= {"target": target, "variants": rows}
    (args.out / "ablation.json").write_text(json.dumps(result, indent=1))
    draw(args.out / "ablation.png", rows, target)


if __name__ == "__main__":
    run_main(main)
