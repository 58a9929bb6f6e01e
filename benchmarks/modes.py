"""
bench.py's modes step, sweep and ladder.
"""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.measure import Trainee, attempt, readable_errors, time_windows
from common.console import UserError, say
from configurator import Config, divisors, print_config
from training import hardware

# -----------------------------------------------------------------------------
# step


def step(config: Config, options: Namespace) -> dict:
    trials = options.trials or 5
    say("compiling and warming up, about a minute" if config.compile else "warming up")
    with readable_errors():
        trainee = Trainee(config)
        r = time_windows(trainee, trials)
        if options.profile:
            profile_step(trainee, options.profile)
    m = r["machine"]
    say(f"machine  {m['device']} ({m['cpu']}), {m['dtype']}, torch {m['torch']}")
    say(f"step     {speed_text(r)}")
    slowest, fastest = r["tokens_per_sec_range"]
    say(f"         median of {trials} windows, {slowest:,.0f} to {fastest:,.0f} tok/s")
    say(f"compile  {r['compile_seconds']:.1f} s")
    return r


def speed_text(r: dict) -> str:
    if r["tokens_per_sec"] is None:
        return "out of memory"
    speed = f"{r['step_ms']:.1f} ms/iteration, {r['tokens_per_sec']:,.0f} tok/s"
    return f"{speed}, mfu {percent(r['mfu'])}, mem {r['mem_gib'] or math.nan:.1f} GiB"


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{fraction:.1%}"


def profile_step(trainee: Trainee, trace: str) -> None:
    """Print what takes most of an iteration, and write a trace for chrome://tracing."""
    with torch.profiler.profile() as profiler:
        trainee.step()
        trainee.hw.synchronize()
    profiler.export_chrome_trace(trace)
    on_gpu = trainee.hw.device.type == "cuda"
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    say(*profiler.key_averages().table(sort_by=order, row_limit=20).splitlines())


# -----------------------------------------------------------------------------
# sweep


def sweep(config: Config, options: Namespace) -> dict:
    sizes = sweep_sizes(config)
    if options.write and Path(options.write).exists():
        raise UserError(f"write: {options.write} exists; remove it or choose another name")
    rows = []
    for size in tqdm(sizes, desc="micro-batches", disable=None):
        rows.append(attempt(with_batch(config, size), trials=options.trials or 3))
    measured = [row for row in rows if row["tokens_per_sec"]]
    if not measured:
        listed = ", ".join(map(str, sizes))
        raise UserError(f"batch_size: {listed} all ran out of memory; try a smaller one")
    best = max(measured, key=lambda row: row["tokens_per_sec"])
    machine = best["machine"]
    say(f"{config.iter_tokens:,} tokens per iteration on {machine['device']}, {machine['dtype']}")
    for row in rows:
        row["name"] = f"{row['batch_size']} x {row['gradient_accumulation_steps']}"
        mark = "  <- fastest" if row is best else ""
        say(f"{row['name']:>10}  {speed_text(row)}{mark}")
    if options.write:
        write_config(Path(options.write), config, best)
    if options.png:
        draw(options.png, "micro-batch x accumulation", rows)
    return dict(rows=rows, fastest=best["batch_size"])


def with_batch(config: Config, batch_size: int) -> Config:
    """The same tokens per iteration in micro-batches of another size."""
    accumulation = config.iter_sequences // batch_size
    return replace(config, batch_size=batch_size, gradient_accumulation_steps=accumulation)


def sweep_sizes(config: Config) -> list[int]:
    """A quarter to four times batch_size, those that divide the sequences of an iteration."""
    b = config.batch_size
    return [n for n in divisors(config.iter_sequences) if n in (b / 4, b / 2, b, 2 * b, 4 * b)]


def write_config(path: Path, config: Config, best: dict) -> None:
    """The configuration with the fastest micro-batch, as a config file for train.py."""
    # a folder of its own, because the config that was measured may have a run in its own
    config = replace(with_batch(config, best["batch_size"]), out_dir=f"out/{path.stem}")
    m = best["machine"]
    measured = f"# The fastest micro-batch of a sweep: {speed_text(best)}\n"
    where = f"# {m['device']}, {m['dtype']}, torch {m['torch']}, {m['date']}\n\n"
    path.write_text(measured + where + print_config(config))
    say(f"wrote {path}")


# -----------------------------------------------------------------------------
# ladder

# where the ladder begins: everything off
LOWEST = dict(dtype="float32", tf32=False, compile=False, flash=False)
LOWEST |= dict(loss_chunk="off", pad_vocab_multiple=1, tie_weights=False)


def ladder(config: Config, options: Namespace) -> dict:
    """
    Measure and print a table in which each row adds one thing to those above it. `gain` is over the
    row measured before, `total_gain` over the first.
    """
    device = hardware.set_up(config).device
    title = f"micro-batch {config.batch_size}"
    say(title)
    say(f"{'':<18}{'batch':>6} {'tok/s':>9} {'gain':>6} {'total':>6} {'GiB':>6} {'mfu':>6}")
    arguments = dict(trials=options.trials or 3)
    rows, rates = [], []
    for name, changes, more_arguments in ladder_rows(device, config):
        config = replace(config, **changes)
        arguments |= more_arguments
        row = dict(name=name) | attempt(config, **arguments)
        rows.append(row)
        rate = row["tokens_per_sec"]
        if rate is None:
            say(f"{name:<18}{row['batch_size']:>6} out of memory")
            continue
        row["gain"] = rate / rates[-1] if rates else 1.0
        rates.append(rate)
        row["total_gain"] = rate / rates[0]
        gains = f"{row['gain']:>5.2f}x {row['total_gain']:>5.2f}x"
        load = f"{row['mem_gib'] or math.nan:>6.1f} {percent(row['mfu']):>6}"
        say(f"{name:<18}{row['batch_size']:>6} {rate:>9,.0f} {gains} {load}")
    say("each row runs in a process of its own; mfu is relative to the peak of the row's own dtype")
    if options.png:
        draw(options.png, title, rows)
    return dict(rows=rows)


def ladder_rows(device: torch.device, config: Config) -> list[tuple]:
    """
    The rows that this machine and this model can have: name, the config keys that the row changes,
    and the arguments of time_training() that it changes. The changes stay for the rows below.
    """
    amp = dict(dtype="auto" if config.dtype == "float32" else config.dtype)
    rows = [
        ("float32", LOWEST, dict(host_sync=True, read_ahead=False)),
        ("TF32", dict(tf32=True), {}),
        ("no host sync", {}, dict(host_sync=False)),
        ("AMP", amp, {}),
        ("compile", dict(compile=True), {}),
        ("flash attention", dict(flash=True), {}),
        ("padded vocabulary", dict(pad_vocab_multiple=128), {}),
        ("tied weights", dict(tie_weights=True), {}),
        ("loader thread", {}, dict(read_ahead=True)),
    ]
    left_out = set()
    if config.model == "fast":  # it has a head of its own
        left_out.add("tied weights")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        left_out.add("TF32")  # needs a GPU of the Ampere generation or later
    return [row for row in rows if row[0] not in left_out]


# -----------------------------------------------------------------------------
# Pictures


def draw(path: str, title: str, rows: list[dict]) -> None:
    """
    Horizontal bars of tokens/s, one for each row, the first on top, with the range of its windows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.4), layout="constrained")
    label = "tokens per second: median, and from the slowest window to the fastest"
    axes = figure.add_subplot(title=title, xlabel=label)
    rates = np.array([row["tokens_per_sec"] or 0 for row in rows])
    # a row that ran out of memory has no bar
    low, high = np.transpose([row.get("tokens_per_sec_range", (0, 0)) for row in rows])
    names = [row["name"] for row in rows]
    bars = axes.barh(names, rates, xerr=(rates - low, high - rates), capsize=3)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    figure.savefig(path, dpi=110)
