"""
What a recipe saves, by the size of the model and the length of the run: docs/fast_recipe.md.

    python -m benchmarks.transfer out/transfer [out/again ...]

It reads the studies of results/transfer.sh, OUT/SIZE-TOKENS/ablation.json, prints a table and
writes OUT/transfer.json, for each folder by itself. One picture, transfer.png in the first, shows
them all. A share of 0.2 means that a recipe ends at the loss of another one's run with a fifth of
that run's tokens, each with a whole schedule of its own.
"""

import itertools
import json
from pathlib import Path

import numpy as np

from common.console import Parser, UserError, run_main, table_lines
from reports.curves import reach
from reports.picture import COLORS, MARKERS, count4, millions

# whose loss, and who reaches it
CLASSIC = [("classic", "fast"), ("classic", "no_tables")]
# of the first ladder's lines and markers, the second's and the third's; a lone point has no line
STYLES = [("-", "full"), ("--", "none"), (":", "left")]
# what a group of pieces brings is what is missing without it
GROUPS = [("no_tables", "fast"), ("no_values", "fast"), ("no_pairs", "fast"), ("muon", "no_tables")]


def read_runs(out: Path) -> list[dict]:
    """
    The variants of ablate's JSON, the shortest run first. Adds what they were made with, and
    `matrices`, the parameters of the layers' matrices, and `length`, the tokens for each of those.
    """
    runs = []
    for file in out.glob("*x*-*/ablation.json"):
        layers, width = map(int, file.parent.name.split("-")[0].split("x"))
        matrices = 12 * layers * width**2
        study = json.loads(file.read_text())
        made = {key: study[key] for key in ("commit", "torch", "date")}
        for run in study["variants"]:
            length = round(run["tokens"] / matrices, 2)
            runs.append(run | made | dict(matrices=matrices, length=length))
    return sorted(runs, key=lambda run: run["tokens"])


def compare(runs: list[dict]) -> list[dict]:
    """
    A row for each run and recipe with its share: read off a straight line between the last losses
    of the recipe's own runs, over the logarithm of their tokens. Left out where none of these ends
    above the loss, or none below it.
    """
    rows = []
    for of, by in CLASSIC + GROUPS:
        for target in [run for run in runs if run["name"] == of]:
            matrices = target["matrices"]
            others = [run for run in runs if (run["name"], run["matrices"]) == (by, matrices)]
            tokens, losses = ([run[key] for run in others] for key in ("tokens", "val_loss"))
            found = reach(np.log(tokens), np.array(losses), target["val_loss"])
            if found is not None:
                row = dict(of=of, by=by, matrices=matrices, length=target["length"])
                row |= dict(loss=target["val_loss"], share=np.exp(found) / target["tokens"])
                rows.append(row)
    return rows


def draw(path: Path, ladders: list[tuple[str, list[dict]]]) -> None:
    """
    Each recipe's share of the classic's tokens against size, a line for each length and ladder: its
    name and its rows of `compare`.
    """
    from matplotlib.figure import Figure

    of_classic = [(name, [row for row in rows if row["of"] == "classic"]) for name, rows in ladders]
    every = [row for _, rows in of_classic for row in rows]
    lengths = sorted({row["length"] for row in every})
    sizes = sorted({row["matrices"] for row in every})
    figure = Figure(figsize=(9, 5), layout="constrained")
    panels = figure.subplots(1, len(CLASSIC), sharey=True)
    for axes, (_, by) in zip(panels, CLASSIC, strict=True):
        for (name, rows), (line, fill) in zip(of_classic, itertools.cycle(STYLES)):
            for length, color, marker in zip(lengths, COLORS, MARKERS, strict=False):
                shown = [row for row in rows if (row["by"], row["length"]) == (by, length)]
                x, y = ([row[key] for row in shown] for key in ("matrices", "share"))
                known = any(row["length"] == length for row in rows)
                label = f"{length:g} tokens a parameter, {name}" if known else None
                style = dict(color=color, marker=marker, linestyle=line, fillstyle=fill)
                axes.plot(x, y, label=label, **style)
        axes.set(title=by, xlabel="parameters in the layers' matrices", xscale="log")
        axes.set_xticks(sizes, map(millions, sizes))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="tokens for the classic's loss, as a share of its own", ylim=(0, None))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(ladders))
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="+", help="a folder of results/transfer.sh")
    folders = parser.parse_args(argv).out
    ladders = []
    for out in folders:
        runs = read_runs(out)
        rows = compare(runs)
        if not rows:
            raise UserError(f"{out}: no share is known; run results/transfer.sh {out} 4x128 first")
        cells = [[v if isinstance(v, str) else count4(v) for v in row.values()] for row in rows]
        print(f"{out}:", *table_lines([list(rows[0]), *cells]), sep="\n")
        (out / "transfer.json").write_text(json.dumps(dict(shares=rows, runs=runs), indent=1))
        ladders.append((out.name, rows))
    draw(folders[0] / "transfer.png", ladders)


if __name__ == "__main__":
    run_main(main)
