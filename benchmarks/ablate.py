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

from common.console import Parser, UserError, duration, run_main, table_lines
from configurator import saved_config
from reports.curves import learning_curve, reach
from reports.picture import COLORS, MARKERS, count4, finish
from reports.records import Records, RunRecords


def read_variants(given: list[str], file: Path) -> dict[str, str]:
    """
    Name -> arguments. `file` keeps them, because a folder of finished runs does not say what they
    were given. Raises UserError.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    # one that failed before its first run may be mended under its name
    known = {name: text for name, text in known.items() if list(file.parent.glob(f"{name}-*"))}
    variants = {}
    for text in given:
        name, _, arguments = text.partition("=")
        if not name or not arguments:
            raise UserError(f"{text}: needs NAME='ARGUMENTS'")
        if known.setdefault(name, arguments) != arguments:
            raise UserError(f"{name}: was {known[name]!r} before; choose another name")
        variants[name] = arguments
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1))
    return variants


def train(script: Path, arguments: str, out_dir: Path, seed: int) -> None:
    command = [sys.executable, str(script), *shlex.split(arguments), f"--out_dir={out_dir}"]
    command += [f"--seed={seed}", "--init_from=auto", "--keep_checkpoints=1"]
    if code := subprocess.run(command, stdout=subprocess.PIPE).returncode:
        hint = "see its message above; the same command continues"
        raise UserError(f"{shlex.join(command)}: exit code {code}; {hint}")


def check_comparable(runs: dict[str, list[RunRecords]]) -> None:
    """Raises UserError for losses on unequal tokens, and for seeds with other settings."""
    scored = [run for seeds in runs.values() for run in seeds]
    if len({(run.data_fingerprint, saved_config(run.config).eval_size) for run in scored}) > 1:
        raise UserError("losses do not compare: variants differ in their data or in eval_tokens")
    for name, seeds in runs.items():
        for run in seeds:
            keys = seeds[0].config.keys() - {"seed", "out_dir"}
            if changed := {key for key in keys if run.config[key] != seeds[0].config[key]}:
                hint = "a config file has changed; choose another name"
                raise UserError(f"{name}: its seeds differ in {', '.join(sorted(changed))}; {hint}")


def summarize(name: str, arguments: str, runs: list[RunRecords], target: float | None) -> dict:
    """
    One variant's means over its seeds, whose evaluations are at the same tokens. `target`: the val
    loss to reach; None for the first variant, whose last one it is.
    """
    curves = [learning_curve(run, "tokens") for run in runs]
    tokens, losses = curves[0][0], np.array([losses for _, losses in curves])
    mean = losses.mean(axis=0)
    return {
        "name": name,
        "arguments": arguments,
        "tokens": tokens[-1],
        "val_loss": mean[-1],
        "spread": np.ptp(losses[:, -1]),
        "tokens_to_target": reach(tokens, mean, mean[-1] if target is None else target),
        "step_seconds": np.mean([run.step["seconds"].sum() for run in runs]),
        "parameters": runs[0].parameters,
        "curves": dict(tokens=tokens.tolist(), val_loss=losses.tolist()),  # a row for each seed
    }


def lines_of(rows: list[dict], target: float) -> list[str]:
    """The table for people."""
    cells = [["variant", "tokens", "val loss", "spread", f"tokens to {target:.3f}", "steps"]]
    for row in rows:
        reached = count4(row["tokens_to_target"]) if row["tokens_to_target"] else "n/a"
        losses = [f"{row['val_loss']:.4f}", f"{row['spread']:.4f}"]
        seconds = f"{row['step_seconds']:.0f}s"
        cells.append([row["name"], count4(row["tokens"]), *losses, reached, seconds])
    return table_lines(cells)


def draw(path: Path, rows: list[dict]) -> None:
    """The mean curve of each variant, within a band from the lowest of its seeds to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row, color, marker in zip(rows, itertools.cycle(COLORS), itertools.cycle(MARKERS)):
        tokens, losses = row["curves"]["tokens"], np.array(row["curves"]["val_loss"])
        label = f"{row['name']}, {count4(row['parameters'])} parameters: "
        label += f"{row['val_loss']:.3f} after {duration(row['step_seconds'])} of steps"
        style = dict(color=color, marker=marker, markersize=4)
        axes.plot(tokens, losses.mean(axis=0), label=label, **style)
        axes.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.25)
    name = f"{rows[0]['name']}'s last loss"
    axes.axhline(rows[0]["val_loss"], color="0.5", linewidth=0.8, linestyle="--", label=name)
    finish(axes, "tokens", "val loss, nats per token")
    axes.set_title(f"mean of {len(losses)} seeds, band: min to max", fontsize=10, loc="left")
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
    runs: dict[str, list[RunRecords]] = {name: [] for name in variants}
    for name, seed in tqdm([(name, seed) for seed in seeds for name in variants], unit="run"):
        out_dir = args.out / f"{name}-{seed}"
        train(args.script, variants[name], out_dir, seed)
        runs[name].append(Records(out_dir / "metrics.jsonl").read())
        check_comparable(runs)

    rows, target = [], None
    for name in variants:
        rows.append(summarize(name, variants[name], runs[name], target))
        target = rows[0]["val_loss"]
    print(*lines_of(rows, target), sep="\n")
    command = shlex.join(["python", "-m", "benchmarks.ablate", *argv])
    result = {"command": command, "date": str(date.today()), "torch": torch.__version__}
    result |= {"commit": subprocess.getoutput("git rev-parse --short HEAD")}
    result |= {"target": target, "variants": rows}
    (args.out / "ablation.json").write_text(json.dumps(result, indent=1))
    draw(args.out / "ablation.png", rows)


if __name__ == "__main__":
    run_main(main)
