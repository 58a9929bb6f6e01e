"""
Compare runs: which was faster, and which learned more in equal iterations, tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side, a verdict for each row
    python compare.py out/a results/public_runs/edu_124m_rtx4070.csv   beside a published run
    python compare.py out/idea-* --against out/base-*   is a change better? over several seeds

Time includes iterations, evaluations and checkpoints, but not startup and compilation.

Losses are comparable if the runs evaluate on the same validation tokens with the same settings;
bits per byte if they evaluate on the same text. The training data may differ.

Losses are compared at the last point at which one of the runs was evaluated and every run's loss
is known. Between two evaluations, losses are interpolated linearly. A loss is unknown where the gap
between two evaluations exceeds a fifth of the progress so far, and before the first evaluation
after iteration 0, where the loss falls steeply.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from common.console import Parser, UserError, duration, percent, run_main, table_lines, warn
from configurator import FIELDS, UNREACHED, Config
from reports import seeds
from reports.picture import count4, millions, save_picture
from reports.runs import PUBLISHED, Run, has_band, learning_curve, loss_at, open_run, percentile

# Smaller differences are noise: about twice the spread of a 124M model's loss between seeds.
LOSS_NOISE = 0.005
BITS_NOISE = 0.002  # LOSS_NOISE in bits per byte, at GPT-2's 4.5 bytes per token
SAME = 0.005  # figures that differ by at most this fraction count as equal
MOST_EVALUATIONS = 8  # rows of shared evaluations, so that the table of a long run stays readable
NO_VERDICT = "not comparable"
SHOWN_ELSEWHERE = {"out_dir", "wandb_run_name", "device", "dtype", "dataset"}

# -----------------------------------------------------------------------------
# Side by side


whole = "{:,.0f}".format
tenths = "{:,.1f}".format
decimals = "{:.4f}".format


def hours_as_time(hours: float) -> str:
    return time_text(3600 * hours)


def time_text(seconds: float) -> str:
    """Format seconds as in 3h12m; below 10 s with two digits, so that 0.4 s is not shown as 0s."""
    return duration(seconds) if seconds >= 10 or not seconds else f"{seconds:.2g}s"


AXES: dict[str, Callable[[float], str]] = dict(
    iter=lambda at: f"at iteration {at:,.0f}",
    tokens=lambda at: f"at {at:,.0f} tokens",
    hours=lambda at: f"after {hours_as_time(at)}",
)


class Point(NamedTuple):
    """Describes a point at which losses are compared."""

    axis: str
    at: float
    key: str  # the row's name in the JSON


# Says which run is best, given the known values with their runs' names; "" if none is
Judge = Callable[[list[tuple[Any, str]]], str]


def not_comparable(known: list[tuple[Any, str]]) -> str:
    return NO_VERDICT


def differs(known: list[tuple[Any, str]]) -> str:
    return "differs" if len({value for value, _ in known}) > 1 else ""


def lower(noise: float) -> Judge:
    """Judge by the difference of the lowest two: "a 0.0134 lower"; "" if only those are equal."""

    def judge(known: list[tuple[Any, str]]) -> str:
        if len(known) < 2:
            return ""
        (best, name), (second, _) = sorted(known)[:2]
        if max(known)[0] - best <= noise:
            return f"equal within {noise}"
        return f"{name} {second - best:.4f} lower" if second - best > noise else ""

    return judge


def ratio(word: str) -> Judge:
    """Judge by the ratio of the best two: "a 2.39x faster"; "" if only those are equal."""

    def judge(known: list[tuple[Any, str]]) -> str:
        if len(known) < 2:
            return ""
        (best, name), (second, _) = sorted(known, reverse=True)[:2]
        if best - min(known)[0] <= SAME * min(known)[0]:
            return "equal"
        return f"{name} {best / second:.2f}x {word}" if 0 < second < best / (1 + SAME) else ""

    return judge


@dataclass
class Row:
    """Holds one line of the table."""

    label: str
    key: str  # name in the JSON
    values: list  # one per run, None if unknown
    format: Callable[..., str] = str
    judge: Judge | None = None

    def verdict(self, names: list[str]) -> str:
        pairs = zip(self.values, names, strict=True)
        known = [(value, name) for value, name in pairs if value is not None]
        return self.judge(known) if self.judge else ""


def setting_rows(runs: list[Run]) -> list[Row]:
    """Build a row for each key in which the runs differ, and for the device and dtype in use."""
    rows = []
    datasets = [dataset_name(run) for run in runs]
    if len(set(datasets) - {None}) > 1 and not same_of_start(runs, "data_fingerprint"):
        rows.append(Row("dataset", "config/dataset", datasets, judge=differs))
    for key in FIELDS:
        values = [run.config.get(key) for run in runs]
        values = ["by the clock" if value == UNREACHED else value for value in values]
        if len(set(values) - {None}) > 1 and key not in SHOWN_ELSEWHERE:
            rows.append(Row(key, f"config/{key}", values, judge=differs))
    # Keys of a changed clone, which this one does not know. Runs of other clones lack them.
    recorded = [{} if is_published(run) else run.start.get("config") or {} for run in runs]
    for key in dict.fromkeys(key for config in recorded for key in config if key not in FIELDS):
        values = [config.get(key, "n/a") for config in recorded]
        if len({*map(str, values)}) > 1:
            rows.append(Row(key, f"config/{key}", values, judge=differs))
    for key in ("device", "dtype"):
        rows.append(Row(key, key, [run.start.get(key) for run in runs], judge=differs))
    return rows


def speed_rows(runs: list[Run]) -> list[Row]:
    parameters = [run.start.get("parameters") for run in runs]
    tokens_per_iter = [run.start.get("tokens_per_iter") for run in runs]
    tokens_per_sec = [percentile(run.step["tokens_per_sec"], 50) for run in runs]
    mfu = [percentile(run.step["mfu"], 50) for run in runs]
    step_ms = [percentile(run.step["step_ms"], 50) for run in runs]
    return [
        Row("parameters", "parameters", parameters, millions, ratio("larger")),
        Row("iterations", "iterations", [run.iterations for run in runs], whole, ratio("more")),
        Row("tokens", "tokens", [run.tokens for run in runs], count4, ratio("more")),
        Row("tokens per iteration", "tokens_per_iter", tokens_per_iter, whole, differs),
        Row("time", "hours", [run.hours for run in runs], hours_as_time, ratio("longer")),
        Row("tok/s", "tokens_per_sec", tokens_per_sec, whole, ratio("faster")),
        Row("MFU", "mfu", mfu, percent, ratio("higher")),
        # no verdict, because iterations may differ in tokens; tok/s has one
        Row("ms per iteration", "step_ms_p50", step_ms, tenths),
    ]


def pause_rows(runs: list[Run]) -> list[Row]:
    """Build the rows of evaluations and checkpoints: how many, and the time they took."""
    evaluations = [len(run.eval["iter"]) for run in runs]
    checkpoints = [None if is_published(run) else len(run.checkpoint["iter"]) for run in runs]
    seconds = [seconds_of_pauses(run) for run in runs]
    return [
        Row("evaluations", "evaluations", evaluations, whole),
        Row("checkpoints", "checkpoints", checkpoints, whole),
        Row("time of both", "pause_seconds", seconds, time_text),
    ]


def seconds_of_pauses(run: Run) -> float | None:
    """Return the seconds of all evaluations and checkpoints; None for a published run."""
    seconds = float(run.eval["seconds"].sum() + run.checkpoint["seconds"].sum())
    return None if math.isnan(seconds) else seconds


def loss_rows(runs: list[Run]) -> list[Row]:
    """
    Build the rows of losses, what decides first: of several runs, the val loss at equal iterations,
    tokens and time; of a single run, what was measured last. Then the best val loss and bits per
    byte, and the val loss at shared evaluations.
    """
    problem = why_losses_do_not_compare(runs)
    judge = not_comparable if problem else lower(LOSS_NOISE)
    lowest = [percentile(run.eval["val_loss"], 0) for run in runs]
    rows, common = [], []
    if len(runs) == 1:
        rows += last_rows(runs[0])
    else:
        rows += rows_at(runs, equal_points(runs), judge)
        if not problem:
            common = rows_at(runs, points_of_common_evaluations(runs), judge)
    rows.append(Row("best val loss", "best_val_loss", lowest, decimals, judge))
    label, key = "best bits per byte", "best_bits_per_byte"
    bits = Row(label, key, [percentile(run.eval["bits_per_byte"], 0) for run in runs], decimals)
    if problem:  # otherwise losses have a verdict, and the two could disagree
        bits.judge = not_comparable if why_bits_do_not_compare(runs) else lower(BITS_NOISE)
    return [*rows, bits, *common]


def measure_rows(runs: list[Run]) -> list[Row]:
    """Build a row for each other number that evaluations measured, with its last values."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.measures):
        last = [percentile(run.eval.get(name, np.empty(0))[-1:], 0) for run in runs]
        form = decimals if name.endswith("_loss") else "{:.4g}".format
        rows.append(Row(f"last {name.replace('_', ' ')}", f"measures/{name}", last, form))
    return rows


def last_rows(run: Run) -> list[Row]:
    """Build the rows of a run's last train loss and last val loss, the later one first."""
    found = []
    for name, kind, key in (("train", "step", "loss"), ("val", "eval", "val_loss")):
        its, losses = (getattr(run, kind)[column] for column in ("iter", key))
        if len(its):
            label, last = f"{name} loss at iteration {its[-1]:,.0f}", percentile(losses[-1:], 0)
            found.append((its[-1], Row(label, f"{name}_loss", [last], decimals)))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [row for _, row in found]


def rows_at(runs: list[Run], points: list[Point], judge: Judge) -> list[Row]:
    """Build a row of val losses for each point."""
    rows = []
    for axis, at, key in points:
        losses = [loss_at(*learning_curve(run, axis), at) for run in runs]
        rows.append(Row(f"val loss {AXES[axis](at)}", key, losses, decimals, judge))
    return rows


def equal_points(runs: list[Run]) -> list[Point]:
    """Return for each axis the last evaluation, of any run, where every run has a known loss."""
    points = []
    for axis in AXES:
        curves = [learning_curve(run, axis) for run in runs]
        known = [
            at for x, _ in curves for at in x if all(loss_at(*c, at) is not None for c in curves)
        ]
        if known:
            points.append(Point(axis, float(max(known)), f"val_loss_at_equal_{axis}"))
    return points


def points_of_common_evaluations(runs: list[Run]) -> list[Point]:
    """
    Return evenly spaced evaluations that all runs share, without the last one, which equal_points()
    returns.
    """
    # If the runs' iterations differ in tokens, losses at equal iterations would mislead.
    axis = "iter" if len({run.start.get("tokens_per_iter") for run in runs}) == 1 else "tokens"
    evaluated = [set(learning_curve(run, axis)[0].tolist()) for run in runs]
    shared = sorted(set.intersection(*evaluated))
    spacing = math.ceil(len(shared) / MOST_EVALUATIONS)
    chosen = shared[::-1][::spacing][::-1] if shared else []
    return [Point(axis, at, f"val_loss_at_{axis}/{at:.0f}") for at in chosen[:-1]]


def print_table(rows: list[Row], names: list[str]) -> None:
    cells = [["", *names]]
    for row in rows:
        values = ["n/a" if value is None else row.format(value) for value in row.values]
        cells.append([row.label, *values])
    header, *lines = table_lines(cells)
    print(header)
    for line, row in zip(lines, rows, strict=True):
        print(f"{line}  {row.verdict(names)}".rstrip())


# -----------------------------------------------------------------------------
# Seeds of a change against seeds of its base


def compare_seeds(change: list[Run], base: list[Run]) -> dict:
    """
    Print a table of both sides, then the difference, its noise and the verdict, one `name: value`
    per line. Returns the dict that --json writes. Raises UserError if the runs are not comparable.
    """
    runs, sides = [*change, *base], (change, base)
    seeds.check(change)
    seeds.check(base)
    figure = "val_loss"
    if problem := why_losses_do_not_compare(runs):
        figure = "bits_per_byte"
        if bits := why_bits_do_not_compare(runs):
            raise UserError(f"losses are not comparable: {problem}; nor are bits per byte: {bits}")
    lasts = [[seeds.last_value(run, figure) for run in side] for side in sides]
    found, noise = seeds.difference(*lasts)
    told = seeds.verdict(found, noise)

    cells = [["", *map(seeds.name_of, sides)]]
    for row in setting_rows(runs):
        if row.key != "config/seed" and len(set(row.values)) > 1:
            settings = row.values[: len(change)], row.values[len(change) :]
            cells.append([row.label, *(" ".join(dict.fromkeys(map(str, s))) for s in settings)])
    label = figure.replace("_", " ")
    speeds = [[percentile(run.step["tokens_per_sec"], 50) or 0 for run in side] for side in sides]
    cells += [
        ["seeds", *(str(len(side)) for side in sides)],
        ["tokens", *(count4(mean(run.tokens or 0 for run in side)) for side in sides)],
        ["tok/s", *(whole(mean(values)) for values in speeds)],
        [f"{label}, lowest", *(decimals(min(values)) for values in lasts)],
        [f"{label}, highest", *(decimals(max(values)) for values in lasts)],
        [f"{label}, mean", *(decimals(mean(values)) for values in lasts)],
    ]
    for row in measure_rows(runs):
        measured = row.values[: len(change)], row.values[len(change) :]
        cells.append(
            [f"{row.label}, mean", *("n/a" if None in v else row.format(mean(v)) for v in measured)]
        )
    print(*table_lines(cells), sep="\n")
    print(f"difference: {found:+.4f}", f"noise: {noise:.4f}", f"verdict: {told}", sep="\n")
    if told == "inconclusive" and 0 < noise < math.inf:
        _, less = seeds.difference(*lasts, times=2)
        print(f"with twice as many seeds, differences above about {less:.4f} would show")

    warnings = [warning for run in runs for warning in run.warnings]
    warnings += [reason for side in sides if (reason := seeds.why_uneven(side))]
    if math.isinf(noise):
        warnings.append("one seed decides nothing; train two or more seeds of each side")
    for warning in warnings:
        warn(warning)
    values = [
        {run.name: value for run, value in zip(side, last, strict=True)}
        for side, last in zip(sides, lasts, strict=True)
    ]
    verdicts = dict(difference=found, noise=noise if math.isfinite(noise) else None, verdict=told)
    return dict(figure=figure, change=values[0], base=values[1], **verdicts, warnings=warnings)


# -----------------------------------------------------------------------------
# A run beside the band of published runs


def judge_by_band(run: Run, band: Run) -> str:
    """
    Say whether a run's val losses are inside the band at all evaluations that both have, or what to
    set so that they can be compared: all settings in the band's CSV must be the run's too, and the
    run's epoch must have at least as many tokens as an epoch of the band's runs.
    """
    name = f"the band of {band.name}"
    config = run.config | dict(dataset=dataset_name(run))
    other = [f"--{key}={value}" for key, value in band.config.items() if config.get(key) != value]
    its, i, j = np.intersect1d(run.eval["iter"], band.eval["iter"], return_indices=True)
    losses, lows, highs = run.eval["val_loss"][i], band.eval["low"][j], band.eval["high"][j]
    ours, least = (r.start.get("train_tokens") for r in (run, band))
    if other:
        problem = f"train with {' '.join(other)}"
    elif ours and least and ours < least:
        problem = f"an epoch has {ours:,} tokens and needs at least {least:,.0f}; get all shards"
    elif not len(its):
        often = band.eval["iter"][0]
        problem = f"no iteration yet where both were evaluated; set --eval_interval={often:.0f}"
    else:
        problem = why_losses_do_not_compare([run, band])
    if problem:
        return f"{run.name}: not comparable with {name}: {problem}"
    for it, loss, low, high in zip(its, losses, lows, highs, strict=True):
        if not low <= loss <= high:  # NaN is outside too
            off = f"{max(low - loss, loss - high):.4f} outside {name} ({low:.4f} to {high:.4f})"
            found = f"{run.name}: val loss {loss:.4f} at iteration {it:,.0f} is {off}"
            return f"{found}; see docs/first_hour.md"
    many = f"{len(its)} iterations at which both were evaluated, the last being {its[-1]:,.0f}"
    return f"{run.name}: inside {name} at all {many}"


# -----------------------------------------------------------------------------
# Which losses are comparable


def is_published(run: Run) -> bool:
    return run.start.get("program") == PUBLISHED


def dataset_name(run: Run) -> str | None:
    """Return the dataset's name without its folder, because the folder may differ between runs."""
    return Path(run.config["dataset"]).name if "dataset" in run.config else None


def same_of_start(runs: list[Run], key: str) -> bool | None:
    """Return whether all start records have the same value, or None if one has no value."""
    values = [run.start.get(key) for run in runs]
    return len(set(values)) == 1 if all(values) else None


def why_losses_do_not_compare(runs: list[Run]) -> str:
    """Return why the val losses of these runs are not comparable, "" if they are."""
    if len(runs) == 1:
        return ""
    if len({run.start.get("tokenizer") for run in runs} - {None, "unknown"}) > 1:
        return "different tokenizers"
    ours = [run for run in runs if not is_published(run)]
    # a published run names its dataset but has no fingerprint
    if len(ours) < len(runs) and len({dataset_name(run) for run in runs}) > 1:
        return "different datasets"
    for run in filter(is_published, runs):
        if "eval_tokens" not in run.config:
            return f"nanoGPT evaluated {run.name} on random tokens"
    if len({eval_settings(run) for run in runs}) > 1:
        return "different evaluation settings; choose the same eval_tokens"
    if len(ours) > 1 and not same_of_start(ours, "val_fingerprint"):
        return "different validation tokens"
    return ""


def eval_settings(run: Run) -> tuple:
    """
    Return the settings that an evaluation's loss depends on, besides the model and the split: the
    number of tokens evaluated, and keys that a user has added with names that begin with eval_.
    """
    config = Config(**run.config)
    windows = max(config.eval_size // config.block_size, 1)
    if run.start.get("val_tokens"):
        windows = min(windows, (run.start["val_tokens"] - 1) // config.block_size)
    ours = {"eval_interval", "eval_iters", "eval_tokens", "eval_only"}
    own = [name for name in FIELDS if name.startswith("eval_") and name not in ours]
    return windows * config.block_size, *(getattr(config, name) for name in own)


def why_bits_do_not_compare(runs: list[Run]) -> str:
    """Return why the bits per byte of these runs are not comparable, "" if they are."""
    same = same_of_start(runs, "val_text_sha256")
    if same is None:
        return "unknown validation text"
    if not same:
        return "different validation texts"
    # With different tokenizers, the first N tokens of the split cover different parts of the text.
    sizes = [run.start.get("val_tokens") or 0 for run in runs]
    evaluated = [Config(**run.config).eval_size for run in runs]
    if any(tokens < size for tokens, size in zip(evaluated, sizes, strict=True)):
        return f"only part of the text was evaluated; use --eval_tokens={max(sizes)}"
    return ""


# -----------------------------------------------------------------------------
# Runs


def open_runs(paths: list[Path]) -> list[Run]:
    """Open the runs and give each a unique name. Raises UserError if one cannot be read."""
    runs = [open_run(path) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    return runs


def collect_warnings(runs: list[Run]) -> list[str]:
    """Collect warnings about figures that are not comparable."""
    warnings = [warning for run in runs for warning in run.warnings]
    if reason := why_losses_do_not_compare(runs):
        bits = why_bits_do_not_compare(runs)
        of_bits = f"neither are bits per byte: {bits}" if bits else "bits per byte are"
        warnings.append(f"losses are not comparable: {reason}; {of_bits}")
    return warnings


def find_paths(given: list[Path]) -> list[Path]:
    """Expand patterns such as out/idea-*, which Windows shells do not, and drop duplicates."""
    named = [path for run in given for path in sorted(glob(str(run))) or [str(run)]]
    return [Path(path) for path in dict.fromkeys(named)]


def compare_runs(runs: list[Run]) -> dict:
    """Print the table and the warnings. Returns the dict that --json writes."""
    names = [run.name for run in runs]
    rows = [*loss_rows(runs), *measure_rows(runs), *setting_rows(runs)]
    rows += [*speed_rows(runs), *pause_rows(runs)]
    warnings = collect_warnings(runs)
    for warning in warnings:
        warn(warning)
    print_table(rows, names)
    for band in filter(has_band, runs):
        for run in runs:
            if not has_band(run):
                print(judge_by_band(run, band))
    values = {name: {row.key: row.values[i] for row in rows} for i, name in enumerate(names)}
    verdicts = {row.key: said for row in rows if (said := row.verdict(names))}
    return dict(runs=values, verdicts=verdicts, warnings=warnings)


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
    if args.png and args.png.suffix.lower() not in ("", ".png"):
        raise UserError(f"png: {args.png} would be a PNG; give a name that ends in .png")

    paths = find_paths(args.runs)
    base = find_paths(args.against)
    if both := [path for path in base if path in paths]:
        raise UserError(f"against: {both[0]} is on both sides; give it on only one")
    runs = open_runs([*paths, *base])
    groups = [[run] for run in runs]  # each is drawn in a colour of its own
    if args.against:
        groups = [runs[: len(paths)], runs[len(paths) :]]
        table = compare_seeds(*groups)
    else:
        table = compare_runs(runs)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if args.png:
        save_picture(groups, args.png, why_losses_do_not_compare(runs))
    elif len(runs) == 1 and paths[0].is_dir():
        try:
            save_picture(groups, paths[0] / "loss.png")
        except UserError as error:  # without matplotlib the table is still worth printing
            warn(str(error))


if __name__ == "__main__":
    run_main(main)
