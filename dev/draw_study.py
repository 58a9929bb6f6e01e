"""
Draw the two pictures of the recipe study from results/transfer*.json.

    python dev/draw_study.py

results/loss_over_tokens.png shows each run's final loss over its tokens, at one model size;
results/transfer.png shows the token ratio over the model size.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent.parent / "results"
SIZE = 4_718_592  # non-embedding parameters of the first picture

# Okabe and Ito's colours, and markers, for colour-blind readers
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
# a recipe's name in the files -> its label, colour and marker in the pictures
RECIPES = dict(
    classic=("GPT-2 recipe", BLUE, "o"),
    fast=("fast recipe", ORANGE, "s"),
    no_tables=("fast recipe without lookup tables", GREEN, "^"),
)
# a study's file -> its label and line style
STUDIES = dict(
    transfer=("prose", "-"),
    transfer_again=("prose, second seed and split", "--"),
    transfer_sources=("Python code", ":"),
)
LENGTHS = {2: (BLUE, "o"), 4: (ORANGE, "s"), 8: (GREEN, "^")}  # baseline tokens per parameter


def read(study: str) -> dict:
    return json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))


def draw_losses(figure: Figure) -> None:
    study, axes = read("transfer"), figure.subplots()
    runs = [run for run in study["runs"] if run["matrices"] == SIZE]
    for name, (label, color, marker) in RECIPES.items():
        ends = sorted((run["tokens"] / 1e6, run["val_loss"]) for run in runs if run["name"] == name)
        axes.plot(*zip(*ends, strict=True), color=color, marker=marker, markersize=8, label=label)
    (baseline,) = [run for run in runs if run["name"] == "classic"]
    tokens, loss = baseline["tokens"] / 1e6, baseline["val_loss"]
    axes.axhline(loss, color="gray", linewidth=1, linestyle="--")
    axes.annotate(f"{tokens:.1f}M tokens", (tokens, loss + 0.04), ha="center", color=BLUE)
    for row in study["shares"]:
        if (row["of"], row["matrices"]) == ("classic", SIZE) and row["by"] in RECIPES:
            color, at = RECIPES[row["by"]][1], row["share"] * tokens
            axes.vlines(at, 4.05, loss, color=color, linestyle=":")
            text = f"same loss with\n{at:.1f}M tokens ({row['share']:.0%})"
            axes.annotate(text, (1.03 * at, 4.07), color=color)
    axes.set_title("4.7M non-embedding parameters, English prose; each point is a run", fontsize=10)
    axes.set(
        xlabel="training tokens of the run, millions",
        ylabel="final validation loss, nats per token",
    )
    axes.set(xscale="log", xlim=(1, 26), ylim=(4.05, 5.05))
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_ratios(figure: Figure) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, recipe in zip(panels, ("fast", "no_tables"), strict=True):
        for study, (what, line) in STUDIES.items():
            for length, (color, marker) in LENGTHS.items():
                asked = ("classic", recipe, length)
                rows = [
                    row
                    for row in read(study)["shares"]
                    if (row["of"], row["by"], row["length"]) == asked
                ]
                points = sorted((row["matrices"] / 1e6, 100 * row["share"]) for row in rows)
                style = dict(color=color, marker=marker, linestyle=line)
                fill = "white" if study == "transfer_sources" else color
                label = f"{length} tokens per parameter, {what}"
                x, y = zip(*points, strict=True) if points else ((), ())
                axes.plot(x, y, markerfacecolor=fill, label=label, **style)
        axes.set_title(RECIPES[recipe][0], fontsize=10)
        axes.set(xscale="log", xlabel="non-embedding parameters", ylim=(0, 30))
        axes.set_xticks([0.79, 2.21, 4.72], ["0.79M", "2.21M", "4.72M"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("% of the GPT-2 recipe's tokens\nfor the same loss")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3, fontsize=8)


def main() -> None:
    for draw, name in ((draw_losses, "loss_over_tokens"), (draw_ratios, "transfer")):
        figure = Figure(figsize=(8.5, 5), facecolor="white", layout="constrained")
        draw(figure)
        figure.savefig(RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
