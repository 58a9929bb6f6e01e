"""
Draw results/ladder.png for docs/ladder.md: what each optimisation gained on an H200, and on an A100
in the notes that bench.py's ladder follows.

    python dev/draw_ladder.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent.parent / "results"
BLUE, ORANGE = "#0072b2", "#d55e00"  # Okabe and Ito's colours, for colour-blind readers
HEIGHT = 0.38  # of a bar; 1 is the distance between two rungs


def rows_of(path: str) -> dict:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def main() -> None:
    ladders = {
        "A100, the notes": (rows_of("rows.json")["notes_ladder"]["rows"], ORANGE),
        "H200": (rows_of("h200/ladder.json")["rows"], BLUE),
    }
    figure = Figure(figsize=(8.5, 4.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for place, (label, (rows, color)) in enumerate(ladders.items()):
        rates = [row["tokens_per_sec"] for row in rows]
        gains = [after / before for before, after in zip(rates, rates[1:], strict=False)]
        at = [i + (place - 0.5) * HEIGHT for i in range(len(gains))]
        total = f"{label}: {max(rates) / rates[0]:.1f} times in all"
        axes.barh(at, [gain - 1 for gain in gains], HEIGHT, left=1, color=color, label=total)
        for y, gain in zip(at, gains, strict=True):
            axes.text(max(gain, 1) + 0.02, y, f"{gain:.2f}", va="center", fontsize=9, color=color)
    (notes, _), _ = ladders.values()
    axes.set_yticks(range(len(gains)), [row["name"] for row in notes[1:]])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="tokens per second, relative to the rung above", xlim=(0.9, 3.05))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(RESULTS / "ladder.png", dpi=110)


if __name__ == "__main__":
    main()
