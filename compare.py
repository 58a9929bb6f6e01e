"""
Compare runs: which was faster, and which learned more in equal iterations, tokens and time.

    python compare.py out/gpt124m                  one run: its figures; draws out/gpt124m/loss.png
    python compare.py out/a out/b --png=ab.png     several runs side by side, a verdict for each row
    python compare.py old.log new.log --gpu=4070   nanoGPT's console output, MFU of this card

Time includes iterations, evaluations and checkpoints, but not startup and compilation.

Losses are compared at the latest evaluation of any run at which the loss of every run is known.
Between two evaluations a loss is interpolated linearly. It is unknown if they are further apart
than a fifth of the way so far, or if the first is at iteration 0, where the loss falls steeply.

Losses with different tokenizers are not comparable; their bits per byte are.
"""

import common  # before torch  # noqa: F401  isort: skip
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

import numpy as np

from common.console import Parser, UserError, duration, run_main, table_lines, warn
from configurator import FIELDS, NEVER, Config, check_value, from_nanogpt
from reports.picture import count4, millions, save_picture
from reports.runs import Run, learning_curve, loss_at, number, open_run, percentile, reach
from training.gpus import resolve_gpu, row_peak

# about twice the spread over seeds of a 124M model's loss; smaller differences are noise
LOSS_NOISE = 0.005
# Figures that differ by at most this share are equal. Tokens and time to a loss are less certain:
# interpolating between evaluations that are far apart is off by a few percent.
SAME, SAME_TO_LOSS = 0.005, 0.05
BITS_NOISE = 0.002  # bits per byte: LOSS_NOISE at GPT-2's 4.5 bytes per token
SHORT_RUN = 400  # iterations: after more, padding costs nothing (results/own_text.md)
LOWEST_IS_BEST = ("lower", "less")
SHOWN_ELSEWHERE = {"out_dir", "wandb_run_name", "device", "dtype"}
UNEQUAL_TOKENIZERS = "unequal tokenizers; bits per byte are, on the same text"

# -----------------------------------------------------------------------------
# Side by side


whole, tenths, percent = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
decimals = "{:.4f}".format


def time_text(hours: float) -> str:
    seconds = 3600 * hours
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


AXES: list[tuple[str, str, Callable]] = [("iter", "at iteration {}", whole)]
AXES += [("tokens", "at {} tokens", whole), ("hours", "after {}", time_text)]


@dataclass
class Row:
    """One line of the table."""

    label: str
    key: str  # name in the JSON
    values: list  # one per run, None if not known
    format: Callable[..., str]
    word: str = ""  # what the best run is, such as faster; lower: a loss, compared by difference
    same: float = SAME  # values that differ by at most this share are equal; losses: by this much

    def verdict(self, names: list[str]) -> str:
        """
        The best value against the next best: "a 2.39x faster", "a 0.0134 lower". Empty if fewer
        than two values are known.
        """
        pairs = zip(self.values, names, strict=True)
        known = [(value, name) for value, name in pairs if value is not None]
        if self.word in ("", "not comparable"):
            return self.word
        if self.word == "differs":
            return self.word if len({value for value, _ in known}) > 1 else ""
        if len(known) < 2:
            return ""
        (best, name), (second, _) = sorted(known, reverse=self.word not in LOWEST_IS_BEST)[:2]
        values = [value for value, _ in known]
        if self.word == "lower":
            if (lower := second - best) > self.same:
                return f"{name} {lower:.4f} lower"
            return f"equal within {self.same}" if max(values) - best <= self.same else ""
        low, high = sorted((best, second))
        if high - low <= self.same * low:  # of more than two runs, the others may differ
            return "equal" if max(values) - min(values) <= self.same * min(values) else ""
        return f"{name} {high / low:.2f}x {self.word}" if low > 0 else ""


def build_table(runs: list[Run], target_loss: float | None) -> list[Row]:
    rows = []
    # the keys in which the runs differ, and the device and dtype in use
    for key in FIELDS:
        values = [run.config.get(key) for run in runs]
        values = ["by the clock" if value == NEVER else value for value in values]
        if len(set(values) - {None}) > 1 and key not in SHOWN_ELSEWHERE:
            rows.append(Row(key, f"config/{key}", values, str, "differs"))
    device, dtype, parameters = (
        [run.start.get(key) for run in runs] for key in ("device", "dtype", "parameters")
    )

    def of_steps(key: str, q: float) -> list[float | None]:
        return [percentile(run.step[key], q) for run in runs]

    rows += [
        Row("device", "device", device, str, "differs"),
        Row("dtype", "dtype", dtype, str, "differs"),
        Row("parameters", "parameters", parameters, millions, "larger"),
        Row("iterations", "iterations", [run.iterations for run in runs], whole, "more"),
        Row("tokens", "tokens", [run.tokens for run in runs], count4, "more"),
        Row("time", "hours", [run.hours for run in runs], time_text, "longer"),
        Row("tok/s", "tokens_per_sec", of_steps("tokens_per_sec", 50), whole, "faster"),
        Row("MFU", "mfu", of_steps("mfu", 50), percent, "higher"),
        # no verdict: tok/s has it, and iterations may differ in tokens
        Row("iteration time p50, ms", "step_ms_p50", of_steps("step_ms", 50), tenths),
        Row("iteration time p95, ms", "step_ms_p95", of_steps("step_ms", 95), tenths),
    ]
    return rows + loss_rows(runs, target_loss)


def loss_rows(runs: list[Run], target_loss: float | None) -> list[Row]:
    """
    Val loss at equal iterations, tokens and time, and the tokens and time to one loss: by default
    the lowest that all runs reach. And the bits per byte, which compare unequal tokenizers.
    """
    lowest, bits = (
        [percentile(run.eval[key], 0) for run in runs] for key in ("val_loss", "bits_per_byte")
    )
    rows = [Row("best val loss", "best_val_loss", lowest, decimals, "lower", LOSS_NOISE)]
    for axis, where, form in AXES if len(runs) > 1 else []:
        curves = [learning_curve(run, axis) for run in runs]
        at = common_point(curves)
        if at is not None:
            label, key = f"val loss {where.format(form(at))}", f"val_loss_at_equal_{axis}"
            values = [loss_at(*curve, at) for curve in curves]
            rows.append(Row(label, key, values, decimals, "lower", LOSS_NOISE))
    if target_loss is None and len(runs) > 1:
        target_loss = max([best for best in lowest if best is not None], default=None)
    if target_loss is not None:
        for axis, what, form in (("tokens", "tokens", count4), ("hours", "time", time_text)):
            label = f"{what} to val loss {target_loss:.4f}"
            values = [reach(*learning_curve(run, axis), target_loss) for run in runs]
            rows.append(Row(label, f"{axis}_to_loss", values, form, "less", SAME_TO_LOSS))
    problem = why_not_comparable(runs)
    if problem:
        rows = [replace(row, word="not comparable") for row in rows]
    # no second verdict where the losses have one
    word = "lower" if problem == UNEQUAL_TOKENIZERS else ""
    row = Row("best bits per byte", "best_bits_per_byte", bits, decimals, word, BITS_NOISE)
    return [*rows, row]


def why_not_comparable(runs: list[Run]) -> str:
    """Why the losses of these runs are not comparable; empty if they are."""
    if len({run.start.get("tokenizer") for run in runs} - {None, "unknown"}) > 1:
        return UNEQUAL_TOKENIZERS
    if len({run.config.get("dataset") for run in runs} - {None}) > 1:
        return "unequal datasets"
    # nanoGPT draws its tokens from the whole split
    fixed = [run.config for run in runs if run.config.get("eval_tokens") is not None]
    return (
        "unequal tokens evaluated" if len({evaluated(saved_config(c)) for c in fixed}) > 1 else ""
    )


def evaluated(config: Config) -> tuple:
    """
    What decides on an evaluation's loss: it does not compare with one where this differs. Keys of
    your own count if their names begin with eval_.
    """
    ours = {"eval_interval", "eval_iters", "eval_tokens", "eval_only"}
    own = [name for name in FIELDS if name.startswith("eval_") and name not in ours]
    return config.eval_size, *(getattr(config, name) for name in own)


def saved_config(values: dict) -> Config:
    """
    The configuration that a checkpoint or metrics.jsonl holds. Raises UserError for a value that
    does not fit.
    """
    keys = from_nanogpt(values)
    return Config(**{n: check_value(keys[n], f, n) for n, f in FIELDS.items() if n in keys})


def common_point(curves: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The latest evaluation of any run at which all losses are known, or None."""
    for at in sorted(np.concatenate([x for x, _ in curves]), reverse=True):
        if all(loss_at(*curve, at) is not None for curve in curves):
            return float(at)
    return None


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
# Runs


def set_mfu(run: Run, gpu: str) -> None:
    """
    Set the MFU of each step record, a fraction, for this card, where the run does not know it and
    ran on a GPU. Raises UserError if the card or its peak is not known.
    """
    start = run.start
    if np.isfinite(run.step["mfu"]).any() or start.get("device_type") in ("cpu", "mps"):
        return
    dtype = start.get("dtype") or "bfloat16"  # nanoGPT's default on all but old GPUs
    peak = row_peak(resolve_gpu(gpu), dtype, run.config.get("tf32", True))
    if peak is None:
        raise UserError(f"gpu: the {dtype} peak of {gpu} is not certain; leave out --gpu")
    # tok/s counts all GPUs together, MFU is per GPU
    flops = number(start.get("flops_per_token")) / start.get("world_size", 1)
    run.step["mfu"] = flops * run.step["tokens_per_sec"] / (peak * 1e12)


def open_runs(paths: list[Path], gpu: str | None) -> list[Run]:
    """
    The runs, each with a unique name. Datasets with the same tokens get the same name, such as
    shakespeare_char and ../nanoGPT/data/shakespeare_char.
    """
    runs = [open_run(path) for path in paths]
    if gpu:
        for run in runs:
            set_mfu(run, gpu)
    names, datasets = [run.name for run in runs], dict[str, str]()
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
        if "dataset" in run.config:
            name = Path(run.config["dataset"]).name
            # a stream's fingerprint covers only its validation split
            tokens = not run.config.get("stream") and run.start.get("data_fingerprint") or name
            run.config["dataset"] = datasets.setdefault(tokens, name)
    return runs


def collect_warnings(runs: list[Run]) -> list[str]:
    """What readers of the table must know."""
    warnings = [warning for run in runs for warning in run.warnings]
    if reason := why_not_comparable(runs):
        warnings.append(f"losses are not comparable: {reason}")
    logs = [run for run in runs if run.start.get("program") == "nanoGPT"]
    if logs and len(runs) > len(logs):
        random = "nanoGPT evaluates on random batches, which adds noise"
        warnings.append(f"{random}; evaluate its ckpt.pt here to be sure (docs/from_nanogpt.md)")
    for run in runs:
        if not logs or run in logs or (run.iterations or 0) >= SHORT_RUN:
            continue
        if any(run.config.get(k) != logs[0].config.get(k) for k in ("model", "dataset")):
            continue
        ours, theirs = (r.config.get("pad_vocab_multiple") for r in (run, logs[0]))
        if theirs is not None and ours != theirs:
            flag = f"--pad_vocab_multiple={theirs}"
            warnings.append(
                f"{run.name}: a short run compares with {logs[0].name} only with {flag}"
            )
    return warnings


def main(argv: list[str]) -> None:
    parser = Parser(description="The figures and picture of a run, or of several side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="out_dir, or file of nanoGPT's output")
    add("--loss", type=float, help="tokens and time to this val loss; default: one that all reach")
    add("--gpu", help="card of the runs that do not know their MFU, such as 4070")
    add("--png", type=Path, help="write the picture here; default for one run: its loss.png")
    add("--json", type=Path, help="write the table here")
    args = parser.parse_args(argv)

    # shells of Windows do not expand patterns
    named = [path for run in args.runs for path in sorted(glob(str(run))) or [run]]
    paths, png = [Path(path) for path in dict.fromkeys(named)], args.png
    runs = open_runs(paths, args.gpu)
    names = [run.name for run in runs]
    rows = build_table(runs, args.loss)
    warnings = collect_warnings(runs)
    print_table(rows, names)
    for warning in warnings:
        warn(warning)

    if len(runs) == 1 and png is None:
        png = paths[0] / "loss.png" if paths[0].is_dir() else paths[0].with_suffix(".png")
    values = {name: {row.key: row.values[i] for row in rows} for i, name in enumerate(names)}
    verdicts = {row.key: said for row in rows if (said := row.verdict(names))}
    table = {"runs": values, "verdicts": verdicts, "warnings": warnings}
    if png:
        save_picture(runs, png)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
