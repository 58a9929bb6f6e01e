"""
bench.py's modes step, sweep and ladder.
"""

import math
import statistics
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.measure import Trainee, attempt, measure
from common.console import UserError, say
from configurator import FIELDS, Config
from data.tokenizer import GPT2_VOCAB
from training import hardware
from training.build import flops_per_token, model_config
from training.gpus import USABLE_MEMORY, divisors, fitting_batch

# the side of the square matrices whose product step times
MATMUL_SIZE = {"cuda": 8192, "mps": 2048, "cpu": 2048}

# -----------------------------------------------------------------------------
# step


def step(config: Config, options: Namespace) -> dict:
    trials = options.trials or 5

    def examine(trainee: Trainee) -> dict:
        found = compare_with_matmul(trainee, trials)
        if options.profile:
            found["top_kernels"] = profile_step(trainee, Path(options.profile))
        return found

    r = measure(config, trials, examine=examine)
    m = r["machine"]
    say(f"machine  {m['device']} ({m['cpu']}), {m['dtype']}, torch {m['torch']}")
    say(f"step     {describe(r)}")
    windows = f"{trials} windows of {r['iters_per_trial']} iterations"
    fastest, slowest = r["step_ms_range"]
    say(f"         median of {windows}, {fastest:.1f} to {slowest:.1f} ms")
    say(f"compile  {r['compile_seconds']:.1f} s")
    low, high = r["mfu_of_matmul_range"]
    share = f"{r['mfu_of_matmul']:.1%} of that ({low:.1%} to {high:.1%}, measured in turn)"
    say(f"matmul   {r['matmul_tflops']:.3g} TFLOP/s in a large product; the step reaches {share}")
    for kernel in r.get("top_kernels", []):
        say(f"         {kernel['ms']:9.2f} ms  {kernel['calls']:>6} x  {kernel['kernel'][:80]}")
    return r


def describe(r: dict) -> str:
    return (
        f"{r['step_ms']:.1f} ms/iteration, {r['tokens_per_sec']:,.0f} tok/s, "
        f"mfu {percent(r['mfu'])}, mem {r['mem_gib'] or math.nan:.1f} GiB"
    )


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{fraction:.1%}"


def compare_with_matmul(trainee: Trainee, trials: int) -> dict:
    """
    The step's rate as a share of what a large matrix product reaches here. Both are measured in
    turn, so that a busy machine slows both.
    """
    flops = flops_per_token(trainee.model.config) * trainee.config.iter_tokens
    rates, shares = [], []
    for _ in range(trials):
        rate = matmul_tflops(trainee.hw)
        rates.append(rate)
        shares.append(flops / trainee.timed(1) / 1e12 / rate)
    return dict(
        matmul_tflops=statistics.median(rates),
        mfu_of_matmul=statistics.median(shares),
        mfu_of_matmul_range=[min(shares), max(shares)],
    )


def matmul_tflops(hw: hardware.Hardware) -> float:
    """The rate of a large square matrix product in hw.dtype, TFLOP/s, the best of ten."""
    n = MATMUL_SIZE[hw.device.type]
    a, b = torch.randn(2, n, n, device=hw.device, dtype=hw.dtype).unbind()
    fastest = math.inf
    for _ in range(10):
        hw.synchronize()
        began = time.perf_counter()
        a @ b
        hw.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * n**3 / fastest / 1e12


def profile_step(trainee: Trainee, trace: Path) -> list[dict]:
    """The ten kernels that take most of an iteration; writes a trace for chrome://tracing."""
    with torch.profiler.profile() as profiler:  # of the CPU, and of CUDA where there is one
        trainee.step()
        trainee.hw.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = list(profiler.key_averages())
    spent = "self_cpu_time_total"
    if trainee.hw.device.type == "cuda":
        # operators on the CPU would count the kernels that they start once more
        events = [event for event in events if event.device_type.name == "CUDA"]
        spent = "self_device_time_total"
    events.sort(key=lambda event: getattr(event, spent), reverse=True)
    return [dict(kernel=e.key, ms=getattr(e, spent) / 1000, calls=e.count) for e in events[:10]]


# -----------------------------------------------------------------------------
# sweep


def sweep(config: Config, options: Namespace) -> dict:
    sizes = sweep_sizes(config, options.batch_sizes)
    if options.write and Path(options.write).exists():
        raise UserError(f"write: {options.write} exists; remove it or choose another name")
    rows = []
    for size in tqdm(sizes, desc="micro-batches", disable=None):
        rows.append(attempt(with_batch(config, size), trials=options.trials or 3))
    measured = [row for row in rows if row["tokens_per_sec"]]
    if not measured:
        listed = ", ".join(map(str, sizes))
        raise UserError(f"batch_sizes: {listed} all ran out of memory; try smaller ones")
    best = max(measured, key=lambda row: row["tokens_per_sec"])
    largest = measured[-1]
    machine = best["machine"]
    say(f"{config.iter_tokens:,} tokens per iteration on {machine['device']}, {machine['dtype']}")
    for row in rows:
        what = describe(row) if row["tokens_per_sec"] else "out of memory"
        if row is best:
            what += "  <- fastest"
        if row is largest:
            what += "  <- largest that fits"
        say(f"{row['batch_size']:>5} x {row['gradient_accumulation_steps']:<5} {what}")
    if options.write:
        write_config(Path(options.write), config, best)
    if options.png:
        names = [f"{row['batch_size']} x {row['gradient_accumulation_steps']}" for row in rows]
        bars = {machine["device"]: [row["tokens_per_sec"] for row in rows]}
        draw(Path(options.png), "micro-batch x accumulation", names, bars)
    return dict(rows=rows, fastest=best["batch_size"], largest_that_fits=largest["batch_size"])


def with_batch(config: Config, batch_size: int) -> Config:
    """The same tokens per iteration in micro-batches of another size."""
    accumulation = config.iter_sequences // batch_size
    return replace(config, batch_size=batch_size, gradient_accumulation_steps=accumulation)


def sweep_sizes(config: Config, given: str | None) -> list[int]:
    """
    Micro-batches that divide an iteration's sequences, ascending: those given, else a quarter to
    four times the config's.
    """
    allowed = divisors(config.iter_sequences)
    if given is None:
        b = config.batch_size
        return [n for n in allowed if n in (b / 4, b / 2, b, 2 * b, 4 * b)]
    try:
        sizes = sorted({int(text) for text in given.split(",")})
    except ValueError:
        raise UserError(f"batch_sizes: needs whole numbers such as 4,8,16, got {given!r}") from None
    wrong = [str(n) for n in sizes if n not in allowed]
    if wrong:
        raise UserError(
            f"batch_sizes: {', '.join(wrong)} do not divide the {config.iter_sequences} sequences "
            f"of an iteration; these do: {', '.join(map(str, allowed[:20]))}"
        )
    return sizes


def write_config(path: Path, config: Config, best: dict) -> None:
    """A config file for train.py: what was given, with the fastest micro-batch."""
    values = {name: getattr(config, name) for name in FIELDS if name in config.given}
    values.pop("tokens_per_iter", None)  # batch_size and accumulation below give the same
    values["batch_size"] = best["batch_size"]
    values["gradient_accumulation_steps"] = best["gradient_accumulation_steps"]
    # not the out_dir of the config that was measured: a run may be there
    values["out_dir"] = f"out/{path.stem}"
    machine = best["machine"]
    lines = [
        f"# The fastest micro-batch of a sweep: {describe(best)}",
        f"# {machine['device']}, {machine['dtype']}, torch {machine['torch']}, {machine['date']}",
    ]
    lines += [f"{name} = {value!r}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    say(f"wrote {path}")


# -----------------------------------------------------------------------------
# ladder

# where the ladder begins: everything off
LOWEST = dict(dtype="float32", tf32=False, compile=False, flash=False)
LOWEST |= dict(loss_chunk="off", pad_vocab_multiple=1, tie_weights=False)
# Each row: its name, the config keys it changes, the arguments of measure() it changes. The rows
# below keep what a row has changed.
LADDER = [
    ("float32", LOWEST, dict(host_sync=True, read_ahead=False)),
    ("TF32", dict(tf32=True), {}),
    ("no host sync", {}, dict(host_sync=False)),
    ("AMP", {}, {}),  # ladder() sets the dtype: the config's, or this machine's best
    ("compile", dict(compile=True), {}),
    ("flash attention", dict(flash=True), {}),
    ("padded vocabulary", dict(pad_vocab_multiple=128), {}),
    ("tied weights", dict(tie_weights=True), {}),
    ("loader thread", {}, dict(read_ahead=True)),
]


def ladder(config: Config, options: Namespace) -> dict:
    """
    Each row adds one thing to those above it. All run at the config's micro-batch, and on CUDA once
    more at the largest that fits.
    """
    device = hardware.set_up(config).device
    columns = {"first": f"micro-batch {config.batch_size}"}
    if device.type == "cuda":
        columns["largest"] = "the largest micro-batch that fits"
    amp_dtype = "auto" if config.dtype == "float32" else config.dtype
    arguments = dict(trials=options.trials or 3)
    header = f"{'batch':>6} {'tok/s':>9} {'gain':>6} {'total':>6} {'GiB':>6} {'mfu':>6}"
    say(" " * 18 + "  ".join(header for _ in columns))
    rows = []
    for name, changes, more_arguments in LADDER:
        row = dict(name=name, why=missing(name, device, config))
        rows.append(row)
        if row["why"]:
            say(f"{name:<18}   n/a: {row['why']}")
            continue
        config = replace(config, **changes)
        if name == "AMP":
            config = replace(config, dtype=amp_dtype)
        arguments |= more_arguments
        row["first"] = attempt(config, **arguments)
        if "largest" in columns:
            row["largest"] = attempt_largest(config, arguments, device)
        for column in columns:
            add_gains([r[column] for r in rows if column in r])
        say(f"{name:<18}" + "  ".join(cell(row[column]) for column in columns))
    for column, title in columns.items():
        say_total_gain(rows, column, title)
    say("each row runs in a process of its own; mfu is relative to the peak of the row's own dtype")
    if options.png:
        bars = {}
        for column, title in columns.items():
            bars[title] = [row.get(column, {}).get("tokens_per_sec") for row in rows]
        draw(Path(options.png), "each row on top of those above", [r["name"] for r in rows], bars)
    return dict(rows=rows)


def missing(name: str, device: torch.device, config: Config) -> str | None:
    """Why this machine or model does not have the row, None where it has."""
    if name == "tied weights" and config.model == "fast":
        return "the fast model has a head of its own"
    if name == "TF32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return "needs a GPU of the Ampere generation or later"
    if name == "AMP" and device.type == "cpu" and hardware.best_dtype(device) == torch.float32:
        return "this processor computes in float32 only"
    return None


def attempt_largest(config: Config, arguments: dict, device: torch.device) -> dict:
    """
    At the largest micro-batch that should fit by the memory model; where it does not fit, at the
    next smaller ones.
    """
    c, dtype = config, hardware.choose_dtype(config, device)
    capacity = USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory
    model = model_config(c, GPT2_VOCAB)
    fits = fitting_batch(model, c.iter_sequences, capacity, dtype, c.compile, c.optimizer) or 1
    sizes = [size for size in divisors(c.iter_sequences) if size <= fits]
    result = attempt(with_batch(c, sizes.pop()), **arguments)
    while sizes and not result["tokens_per_sec"]:
        result = attempt(with_batch(c, sizes.pop()), **arguments)
    return result


def add_gains(results: list[dict]) -> None:
    """Adds gain, over the row measured before, and total_gain, over the first measured one."""
    measured = [r for r in results if r["tokens_per_sec"]]
    for i, r in enumerate(measured):
        r["gain"] = r["tokens_per_sec"] / measured[max(i - 1, 0)]["tokens_per_sec"]
        r["total_gain"] = r["tokens_per_sec"] / measured[0]["tokens_per_sec"]


def cell(r: dict) -> str:
    if r["tokens_per_sec"] is None:
        return f"{r['batch_size']:>6} {'out of memory':>36}"
    return (
        f"{r['batch_size']:>6} {r['tokens_per_sec']:>9,.0f} {r['gain']:>5.2f}x "
        f"{r['total_gain']:>5.2f}x {r['mem_gib'] or math.nan:>6.1f} {percent(r['mfu']):>6}"
    )


def say_total_gain(rows: list[dict], column: str, title: str) -> None:
    measured = [row for row in rows if "gain" in row.get(column, {})]
    if not measured:
        raise UserError(f"batch_size: every row ran out of memory at {title}; try a smaller one")
    gains = {row["name"]: row[column]["total_gain"] for row in measured}
    last, best = list(gains)[-1], max(gains, key=gains.get)
    both = f"{gains[last]:.1f}x with the last row, {gains[best]:.1f}x with the best ({best})"
    say(f"total gain at {title}: {both}")


# -----------------------------------------------------------------------------
# Pictures


def draw(path: Path, title: str, names: list[str], bars: dict[str, list[float | None]]) -> None:
    """Horizontal bars of tokens/s, the first name on top; `bars` holds a list for each label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(names) + 1.4), facecolor="white", layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        places = [n + i * height for n in range(len(names))]
        drawn = axes.barh(places, [value or 0 for value in values], height, label=label)
        axes.bar_label(drawn, [f"{value:,.0f}" if value else "n/a" for value in values], padding=3)
    axes.set_yticks([n + 0.4 - height / 2 for n in range(len(names))], names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="tokens per second", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
