"""
Compare runs: which was faster, and which learned more in equal tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side
    python compare.py out/a results/public_runs/edu_124m_rtx4070.csv   beside a published run
    python compare.py out/idea-* --against out/base-*   is a change better? over several seeds

Time includes iterations, evaluations and checkpoints, but not startup and compilation.

Losses are comparable if the runs evaluate on the same validation tokens with the same settings. The
training data may differ.

Losses are compared at the last point at which one of the runs was evaluated and every run's loss
is known. Between two evaluations, losses are interpolated linearly. A loss is unknown where the gap
between two evaluations exceeds a fifth of the progress so far, and before the first evaluation
after iteration 0, where the loss falls steeply.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, variance

import numpy as np

from common.console import (
    Parser,
    UserError,
    duration,
    percent,
    raise_if_any,
    run_main,
    table_lines,
    warn,
)
from common.files import write_json
from configurator import FIELDS, config_from
from tools.curves import Run, count4, loss_at, open_run, percentile, save_picture

# Smaller differences are noise: about twice the spread of a 124M model's loss between seeds.
LOSS_NOISE = 0.005
AT_EQUAL = "val_loss_at_equal_"  # begins the names of the rows that get a verdict
SHOWN_ELSEWHERE = {"out_dir", "device", "dtype"}

# -----------------------------------------------------------------------------
# The table


whole, decimals = "{:,.0f}".format, "{:.4f}".format


def hours_as_time(hours: float) -> str:
    return duration(3600 * hours)


def table_rows(runs: list[Run]) -> list[tuple[str, str, list, Callable[..., str]]]:
    """
    Return the rows of the table: a label, the name in the JSON, a value per run (None if unknown)
    and how to print it. What decides comes first: the val loss at equal tokens and time.
    """

    def last(name: str) -> list[float | None]:
        return [percentile(run.eval.get(name, np.empty(0))[-1:], 0) for run in runs]

    def best(name: str) -> list[float | None]:
        return [percentile(run.curve("iter", name)[1], 0) for run in runs]

    def median(name: str) -> list[float | None]:
        return [percentile(run.step[name], 50) for run in runs]

    def at_start(name: str) -> list:
        return [run.start.get(name) for run in runs]

    rows: list = []
    for axis in ("tokens", "hours") if len(runs) > 1 else ():
        curves = [run.curve(axis) for run in runs]
        at_all = [(at, [loss_at(*curve, at) for curve in curves]) for x, _ in curves for at in x]
        if known := [(at, losses) for at, losses in at_all if None not in losses]:
            at, losses = max(known)
            place = f"at {at:,.0f} tokens" if axis == "tokens" else f"after {hours_as_time(at)}"
            rows.append((f"val loss {place}", f"{AT_EQUAL}{axis}", losses, decimals))
    rows.append(("last val loss", "last_val_loss", last("val_loss"), decimals))
    rows.append(("best val loss", "best_val_loss", best("val_loss"), decimals))
    rows.append(("best bits per byte", "best_bits_per_byte", best("bits_per_byte"), decimals))
    for name in dict.fromkeys(name for run in runs for name in run.others):
        form = decimals if name.endswith("_loss") else "{:.4g}".format
        rows.append((f"last {name.replace('_', ' ')}", f"others/{name}", last(name), form))
    # the keys in which the runs differ; a published run has only the keys that it names
    for key in dict.fromkeys(key for run in runs for key in run.config):
        told = {str(r.config.get(key)) for r in runs if key in r.config or not r.is_published}
        if len(told) > 1 and key not in SHOWN_ELSEWHERE:
            rows.append((key, f"config/{key}", [run.config.get(key) for run in runs], str))
    # a measured peak is lower beside other programs, so its MFU compares with nothing
    sources = zip(median("mfu"), at_start("peak_source"), strict=True)
    mfu = [None if source == "measured" else value for value, source in sources]
    return [
        *rows,
        ("device", "device", at_start("device"), str),
        ("dtype", "dtype", at_start("dtype"), str),
        ("parameters", "parameters", at_start("parameters"), lambda n: f"{n / 1e6:.2f}M"),
        ("iterations", "iterations", [run.iterations for run in runs], whole),
        ("tokens", "tokens", [run.tokens for run in runs], count4),
        ("time", "hours", [run.hours for run in runs], hours_as_time),
        ("tok/s", "tokens_per_sec", median("tokens_per_sec"), whole),
        ("MFU", "mfu", mfu, percent),
    ]


def lowest(losses: list[float], names: list[str]) -> str:
    """Say which run's loss is the lowest, and by how much."""
    (best, name), (second, _) = sorted(zip(losses, names, strict=True))[:2]
    if second - best <= LOSS_NOISE:
        return f"the lowest two are equal within {LOSS_NOISE}"
    return f"{name} {second - best:.4f} lower"


def compare_runs(runs: list[Run]) -> dict:
    """Print the table and what the bands say. Returns the dict that --json writes."""
    names = [run.name for run in runs]
    rows = table_rows(runs)
    problem = why_losses_do_not_compare(runs)
    if problem:
        warn(f"losses are not comparable: {problem}")
    cells, verdicts = [["", *names]], {}
    for label, key, values, form in rows:
        cells.append([label, *("n/a" if value is None else form(value) for value in values)])
        if key.startswith(AT_EQUAL):
            verdicts[key] = "not comparable" if problem else lowest(values, names)
    header, *lines = table_lines(cells)
    print(header)
    for line, (_, key, *_) in zip(lines, rows, strict=True):
        print(f"{line}  {verdicts.get(key, '')}".rstrip())
    for run in runs:
        if not is_finished(run):
            print(f"{run.name}: not at its end: still running, stopped, or its log lacks lines")
    for band in runs:
        for run in runs:
            if band.has_band and not run.has_band:
                print(judge_by_band(run, band))
    figures = {n: {key: values[i] for _, key, values, _ in rows} for i, n in enumerate(names)}
    return dict(runs=figures, verdicts=verdicts, problem=problem)


def judge_by_band(run: Run, band: Run) -> str:
    """
    Say whether a run's val losses are inside the band at all evaluations that both have, or which
    settings of the band's CSV are not the run's.
    """
    name = f"the band of {band.name}"
    config = run.config | dict(dataset=dataset_name(run))
    differ = {key: value for key, value in band.config.items() if config.get(key) != value}
    if other := [f"--{key}={value}" for key, value in differ.items()]:
        return f"{run.name}: not comparable with {name}: train with {' '.join(other)}"
    its, i, j = np.intersect1d(run.eval["iter"], band.eval["iter"], return_indices=True)
    if not len(its):
        return f"{run.name}: not comparable with {name}: no iteration yet where both were evaluated"
    losses, lows, highs = run.eval["val_loss"][i], band.eval["low"][j], band.eval["high"][j]
    for it, loss, low, high in zip(its, losses, lows, highs, strict=True):
        if not low <= loss <= high:  # NaN is outside too
            off = f"{max(low - loss, loss - high):.4f} outside {name} ({low:.4f} to {high:.4f})"
            found = f"{run.name}: val loss {loss:.4f} at iteration {it:,.0f} is {off}"
            return f"{found}; see docs/first_hour.md"
    many = f"{len(its)} iterations at which both were evaluated, the last being {its[-1]:,.0f}"
    return f"{run.name}: inside {name} at all {many}"


# -----------------------------------------------------------------------------
# Which losses are comparable


def is_finished(run: Run) -> bool:
    """Return whether a run was trained to its end, and its log has the last evaluation."""
    at_end = (run.eval["complete"] == 1) & (run.eval["iter"] == run.iterations)
    return run.is_published or bool(at_end.any())


def dataset_name(run: Run) -> str | None:
    """Return the dataset's name without its folder, because the folder may differ between runs."""
    return Path(run.config["dataset"]).name if "dataset" in run.config else None


def why_losses_do_not_compare(runs: list[Run]) -> str:
    """
    Return why the val losses of these runs are not comparable, "" if they are. A published run
    names its dataset but has no fingerprint of its validation tokens; nanoGPT's, which were
    evaluated on random tokens, have no eval_tokens.
    """
    ours = [run for run in runs if not run.is_published]
    fingerprints = {run.start.get("val_fingerprint") for run in ours}
    names = {dataset_name(run) for run in runs}
    if len(ours) > 1 and (len(fingerprints) > 1 or None in fingerprints):
        return "different validation tokens"
    if 0 < len(ours) < len(runs) and len(names) > 1:
        return "different datasets"
    if any("eval_tokens" not in run.config for run in runs if run.is_published) and len(runs) > 1:
        return "a published run was evaluated on random tokens"
    val_tokens = ours[0].start.get("val_tokens") if ours else None  # all have the same split
    if len({eval_settings(run, val_tokens) for run in runs}) > 1:
        hint = "choose the same eval_tokens and block_size, or evaluate the whole split"
        return f"different evaluation settings; {hint}"
    return ""


def eval_settings(run: Run, val_tokens: int | None) -> tuple:
    """
    Return the settings that an evaluation's loss depends on, besides the model and the split of
    `val_tokens` (None: unknown): the number and the length of the windows, which lie elsewhere if
    either differs, unless they cover the split, and keys that a user has added with names that
    begin with eval_.
    """
    config = config_from(run.config)
    windows, covers = max(config.eval_tokens // config.block_size, 1), False
    if val_tokens:
        windows = min(windows, (val_tokens - 1) // config.block_size)
        # 1% of the text changes the mean by less than LOSS_NOISE if its loss is within 0.5 nats
        covers = windows * config.block_size >= 0.99 * val_tokens
    ours = {"eval_interval", "eval_tokens", "eval_only"}
    own = [name for name in FIELDS if name.startswith("eval_") and name not in ours]
    part = "all" if covers else (windows, config.block_size)
    return part, *(getattr(config, name) for name in own)


# -----------------------------------------------------------------------------
# Seeds of a change against seeds of its base


def compare_seeds(change: list[Run], base: list[Run]) -> dict:
    """
    Print the difference of the mean last val losses, its noise and the verdict, one `name: value`
    per line. Returns what --json writes. Raises UserError if a side has other than finished runs of
    different seeds.

    Seeds of the same program differ too, so a difference counts only if it is larger than its
    noise. About one in 20 comparisons still finds a difference for a change that does nothing.
    """
    check_seeds(change)
    check_seeds(base)
    losses = ([float(run.eval["val_loss"][-1]) for run in side] for side in (change, base))
    found, noise = difference(*losses)
    verdict = "inconclusive" if abs(found) <= noise else "better" if found < 0 else "worse"
    print(f"difference: {found:+.4f}", f"noise: {noise:.4f}", f"verdict: {verdict}", sep="\n")
    return dict(difference=found, noise=noise if math.isfinite(noise) else None, verdict=verdict)


def difference(change: list[float], base: list[float]) -> tuple[float, float]:
    """
    Return the change's mean loss minus the base's, and the noise of this difference: half the width
    of its 95% confidence interval by Welch's t-test (Biometrika 34, 1947). With a single seed on
    either side, the noise is infinite.
    """
    found = mean(change) - mean(base)
    n, m = len(change), len(base)
    if min(n, m) < 2:
        return found, math.inf
    a, b = variance(change) / n, variance(base) / m
    if a + b == 0:
        return found, 0.0
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return found, student_t(freedom) * math.sqrt(a + b)


def student_t(freedom: float) -> float:
    """
    Return Student's t for 95%. `freedom` need not be a whole number. Substituting t = sqrt(freedom)
    * tan(x) turns the density into cos(x)^(freedom - 1), and 95% of the area lies below the result.
    """
    x, step = np.linspace(0, math.pi / 2, 10_000, endpoint=False, retstep=True)
    area = np.cumsum(np.cos(x + step / 2) ** (freedom - 1))  # from 0 to x + step
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * area[-1], area, x + step))


def check_seeds(runs: list[Run]) -> None:
    """
    Check that the runs of one side have different seeds and were trained to their ends. Raises
    UserError with one line per problem.
    """
    problems = []
    seeds = Counter(run.config.get("seed") for run in runs)
    for run in runs:
        seed = run.config.get("seed")
        if seed is not None and seeds[seed] > 1:
            problems.append(
                f"{run.name}: another run has seed {seed} too; give each its own --seed"
            )
        if not np.isfinite(run.eval["val_loss"][-1:]).any():
            problems.append(f"{run.name}: its last evaluation has no val loss; leave it out")
        elif not is_finished(run):
            problems.append(f"{run.name}: not at its end; resume it, or leave it out")
    raise_if_any(problems)


# -----------------------------------------------------------------------------
# The command line


def open_runs(paths: list[Path]) -> list[Run]:
    """Open the runs and give each a unique name. Raises UserError if one cannot be read."""
    runs = [open_run(path) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    return runs


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    run_help = "an out_dir, its metrics.jsonl, or a published run's CSV"
    add("runs", nargs="+", type=Path, metavar="RUN", help=run_help)
    seeds_help = "baseline runs, one per seed; the verdict says whether the other runs are better"
    add("--against", nargs="+", type=Path, default=[], metavar="RUN", help=seeds_help)
    add("--png", type=Path, help="write a .png picture (default for one out_dir: its loss.png)")
    add("--json", type=Path, metavar="PATH", help="write the table as JSON")
    args = parser.parse_args(argv)
    runs = open_runs([*args.runs, *args.against])
    groups = [[run] for run in runs]  # each is drawn in a colour of its own
    table = compare_runs(runs)
    problem = table["problem"]
    if args.against:
        groups = [runs[: len(args.runs)], runs[len(args.runs) :]]
        if problem:
            raise UserError(f"losses are not comparable: {problem}")
        table |= compare_seeds(*groups)
    if args.json:
        write_json(args.json, table)
    if args.png or (len(runs) == 1 and args.runs[0].is_dir()):
        save_picture(groups, args.png or args.runs[0] / "loss.png", problem)


if __name__ == "__main__":
    run_main(main)
