"""
How an iteration's time and memory grow with batch, context, width and depth, against the FLOP formula and the memory model.

    python results/scaling.py FOLDER [CONFIG] [--key=value ...]      writes scaling.json and scaling.png to FOLDER

Each point changes one size of the first and runs in a process of its own.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure
from tqdm import tqdm

import hardware
import measure
from configurator import load_config
from errors import Parser, run_main
from gpus import WORKSPACE_BYTES

GRID = dict(batch_size=(1, 2, 4, 8), block_size=(1, 2, 4, 8), n_embd=(1, 2, 3, 4), n_layer=(1, 2, 3, 4))  # factors


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path)
    known, rest = parser.parse_known_args(argv)
    folder, first = known.folder, load_config(rest)
    on_cuda = hardware.set_up(first).device.type == "cuda"
    rows, workspace = [], 0 if on_cuda else WORKSPACE_BYTES / hardware.GIB
    points = [(name, factor) for name, factors in GRID.items() for factor in factors if factor > 1 or name == "batch_size"]
    for name, factor in tqdm(points, disable=None):
        changes = {name: factor * getattr(first, name)}
        if name == "n_embd":
            changes["n_head"] = factor * first.n_head  # heads keep their size
        r = measure.attempt(replace(first, **changes), trials=3)
        if r["tokens_per_sec"]:
            gflop = r["flops_per_token"] * r["tokens_per_iter"] / 1e9
            rows.append(dict(size=name, factor=factor, gflop=gflop, mem_gib=r["mem_training_gib"],
                             mem_model_gib=r["mem_model_gib"] - workspace, step_ms=r["step_ms"],
                             step_ms_range=r["step_ms_range"], machine=r["machine"]))  # fmt: skip
            print(f"{name} x {factor}: {r['step_ms']:.0f} ms, {gflop / r['step_ms']:.3f} TFLOP/s, "
                  f"{rows[-1]['mem_gib']:.2f} GiB, modelled {rows[-1]['mem_model_gib']:.2f}", flush=True)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    result = dict(command=f"python results/scaling.py {' '.join(argv)}", rows=rows)
    (folder / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, folder / "scaling.png")


def draw(rows: list[dict], path: Path) -> None:
    """Time against FLOPs, memory against the model, a marker for each size that was changed."""
    figure = Figure(figsize=(9, 4), facecolor="white", layout="constrained")
    time, memory = figure.subplots(1, 2)
    for axes, x, y, labels in ((time, "gflop", "step_ms", ("GFLOP an iteration by the formula", "ms an iteration")),
                               (memory, "mem_model_gib", "mem_gib", ("GiB by the memory model", "GiB measured"))):  # fmt: skip
        for name in GRID:
            axes.plot([r[x] for r in rows if r["size"] == name], [r[y] for r in rows if r["size"] == name], "o", label=name)
        most = max(r[x] for r in rows)
        slope = rows[0][y] / rows[0][x] if y == "step_ms" else 1
        line = "in proportion to the first" if y == "step_ms" else "equal"
        axes.plot([0, most], [0, slope * most], "--", color="grey", label=line)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run_main(main)
