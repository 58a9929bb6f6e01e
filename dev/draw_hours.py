"""
Draw results/hours.png for docs/hours.md: the learning rate of config/fast124m_4070.py over time,
at three speeds, as train.get_lr gives it.

    python dev/draw_hours.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

from configurator import load_config  # noqa: E402
from train import get_lr  # noqa: E402

HOURS = 8
PACES = (6, 12, 24)  # seconds per iteration, as examples
WIDTHS = (6, 3, 1.2)  # different line widths, because the right panel's lines coincide


def rates(flags: list[str], pace: float) -> tuple[list[float], list[float]]:
    """Return each iteration's start in hours, and its learning rate."""
    config = load_config([str(ROOT / "config" / "fast124m_4070.py"), *flags])
    iterations = int(3600 * config.hours / pace) + 1 if config.hours else config.max_iters
    hours = [it * pace / 3600 for it in range(iterations)]
    shares = [h / config.hours if config.hours else 0.0 for h in hours]
    peak = config.learning_rate
    return hours, [get_lr(it, config, share, peak) for it, share in enumerate(shares)]


def draw(path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharex=True, sharey=True)
    titles = ("the config: max_iters = 3250", f"--hours={HOURS}")
    for panel, title, flags in zip(panels, titles, ([], [f"--hours={HOURS}"]), strict=True):
        for pace, width in zip(PACES, WIDTHS, strict=True):
            hours, lr = rates(flags, pace)
            panel.plot(hours, lr, linewidth=width, label=f"{pace} s each: {len(lr):,} iterations")
        panel.set(title=title, xlabel="hours")
        panel.legend(fontsize="small")
    panels[0].set(ylabel="learning rate", ylim=(0, 0.036), xticks=range(0, 18, 2))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(ROOT / "results" / "hours.png")
