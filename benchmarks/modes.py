"""
bench.py's modes step, sweep and ladder.
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import Trainee, attempt, like, measure
from common.console import UserError, say
from configurator import FIELDS, Config
from data.tokenizer import GPT2_VOCAB
from training import hardware
from training.build import flops_per_token, model_config
from training.gpus import USABLE_MEMORY, fitting_batch

# -----------------------------------------------------------------------------
# step


def step(config: Config, options: dict) -> dict:
    trials = options["trials"] or 5

    def examine(trainee: Trainee) -> dict:
        flops = flops_per_token(trainee.model.config) * config.iter_tokens
        pairs = [
            (matmul_tflops(trainee.hw), trainee.timed(1)) for _ in range(trials)
        ]  # a busy machine slows both
        shares = [flops / seconds / 1e12 / rate for rate, seconds in pairs]
        found = dict(
            matmul_tflops=statistics.median(rate for rate, _ in pairs),
            mfu_of_matmul=statistics.median(shares),
            mfu_of_matmul_range=[min(shares), max(shares)],
            split_ms=split_ms(trainee),
        )
        if options["profile"]:
            found["top_kernels"] = profile_step(trainee, Path(options["profile"]))
        return found

    r = measure(config, trials, examine=examine)
    m, split = r["machine"], r["split_ms"]
    say(f"machine  {m['device']} ({m['cpu']}), {m['dtype']}, torch {m['torch']}")
    say(f"step     {describe(r)}")
    say(
        f"         median of {r['trials']} windows of {r['iters_per_trial']} iterations, {r['step_ms_range'][0]:.1f} to "
        f"{r['step_ms_range'][1]:.1f} ms"
    )
    say(f"compile  {r['compile_seconds']:.1f} s")
    say(
        f"matmul   {r['matmul_tflops']:.3g} TFLOP/s reached by a large product; the step is {r['mfu_of_matmul']:.1%} of that "
        f"({r['mfu_of_matmul_range'][0]:.1%} to {r['mfu_of_matmul_range'][1]:.1%}, in turn)"
    )
    say(
        "split    "
        + ", ".join(
            f"{part} {ms:.1f} ms ({ms / sum(split.values()):.0%})" for part, ms in split.items()
        )
    )
    for kernel in r.get("top_kernels", []):
        say(f"         {kernel['ms']:9.2f} ms  {kernel['calls']:>6} x  {kernel['kernel'][:80]}")
    return r


def describe(r: dict) -> str:
    mfu, mem = "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}", r["mem_gib"] or math.nan
    return f"{r['step_ms']:.1f} ms/iteration, {r['tokens_per_sec']:,.0f} tok/s, mfu {mfu}, mem {mem:.1f} GiB"


def matmul_tflops(hw: hardware.Hardware) -> float:
    """
    The rate of a large square matrix product in hw.dtype, the best of several: what this device
    really reaches.
    """
    n = 8192 if hw.device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=hw.device, dtype=hw.dtype).unbind()
    fastest = math.inf
    for _ in range(10):
        hw.synchronize()
        began = time.perf_counter()
        a @ b
        hw.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * n**3 / fastest / 1e12


def split_ms(trainee: Trainee, iters: int = 3) -> dict[str, float]:
    """
    Milliseconds per iteration by part. Each part waits for the device, so they add up to a little
    more than a step.
    """
    seconds, since = dict(data=0.0, forward=0.0, backward=0.0, optimizer=0.0), 0.0

    def mark(part: str) -> None:
        nonlocal since
        trainee.hw.synchronize()
        now = time.perf_counter()
        seconds[part] += now - since
        since = now

    def forward(x: Tensor, y: Tensor) -> Tensor:
        mark("data")
        loss = trainee.step_model(x, y)
        mark("forward")
        return loss

    class Scaler:
        def __getattr__(self, name: str):
            if name == "unscale_":  # train_step's first call after the last backward
                mark("backward")
            return getattr(trainee.scaler, name)

    watched = replace(
        trainee,
        step_model=like(trainee.model, forward),
        scaler=Scaler(),
        between_micro_steps=lambda: mark("backward"),
    )
    for _ in range(iters):
        trainee.hw.synchronize()
        since = time.perf_counter()
        watched.step()
        mark("optimizer")
    return {part: 1000 * total / iters for part, total in seconds.items()}


def profile_step(trainee: Trainee, trace: Path) -> list[dict]:
    """The kernels that take most of an iteration, and a trace of it for chrome://tracing."""
    with torch.profiler.profile() as profiler:  # what is there: CPU, and CUDA where there is one
        trainee.step()
        trainee.hw.synchronize()
    profiler.export_chrome_trace(str(trace))
    on_cuda = trainee.hw.device.type == "cuda"
    spent = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    events = [
        e for e in profiler.key_averages() if e.device_type.name == "CUDA" or not on_cuda
    ]  # operators repeat kernels
    events.sort(key=lambda event: getattr(event, spent), reverse=True)
    return [dict(kernel=e.key, ms=getattr(e, spent) / 1000, calls=e.count) for e in events[:10]]


# -----------------------------------------------------------------------------
# sweep


def sweep(config: Config, options: dict) -> dict:
    sizes, rows = sweep_sizes(config, options["batch_sizes"]), []
    if options["write"] and Path(options["write"]).exists():
        raise UserError(f"write: {options['write']} exists; remove it or choose another name")
    for b in tqdm(sizes, desc="micro-batches", disable=None):
        rows.append(attempt(with_batch(config, b), trials=options["trials"] or 3))
    measured = [r for r in rows if r["tokens_per_sec"]]
    if not measured:
        raise UserError(
            f"batch_sizes: {', '.join(map(str, sizes))} all ran out of memory; try smaller ones"
        )
    best = max(measured, key=lambda r: r["tokens_per_sec"])
    say(
        f"{config.iter_tokens:,} tokens per iteration on {best['machine']['device']}, {best['machine']['dtype']}"
    )
    for r in rows:
        notes = [
            note
            for note, row in (("fastest", best), ("largest that fits", measured[-1]))
            if row is r
        ]
        what = (
            describe(r) + ("  <- " + ", ".join(notes) if notes else "")
            if r["tokens_per_sec"]
            else "out of memory"
        )
        say(f"{r['batch_size']:>5} x {r['gradient_accumulation_steps']:<5} {what}")
    if options["write"]:
        write_config(Path(options["write"]), config, best)
    if options["png"]:
        bars = {
            f"{r['batch_size']} x {r['gradient_accumulation_steps']}": [r["tokens_per_sec"]]
            for r in rows
        }
        draw(Path(options["png"]), "micro-batch x accumulation", bars, [best["machine"]["device"]])
    return dict(rows=rows, fastest=best["batch_size"], largest_that_fits=measured[-1]["batch_size"])


def with_batch(config: Config, batch_size: int) -> Config:
    """The same tokens per iteration in other micro-batches."""
    return replace(
        config,
        batch_size=batch_size,
        gradient_accumulation_steps=config.iter_sequences // batch_size,
    )


def sweep_sizes(config: Config, given: str | None) -> list[int]:
    """
    Micro-batches that divide an iteration's sequences, ascending: those given, else around the
    config's.
    """
    sequences, b = config.iter_sequences, config.batch_size
    fits = [n for n in range(1, sequences + 1) if sequences % n == 0]
    if given is None:
        return [n for n in fits if n in (b / 4, b / 2, b, 2 * b, 4 * b)]
    try:
        sizes = sorted({int(text) for text in given.split(",")})
    except ValueError:
        raise UserError(f"batch_sizes: needs whole numbers such as 4,8,16, got {given!r}") from None
    if wrong := [str(n) for n in sizes if n not in fits]:
        raise UserError(
            f"batch_sizes: {', '.join(wrong)} do not divide the {sequences} sequences of an iteration; "
            f"these do: {', '.join(map(str, fits[:20]))}"
        )
    return sizes


def write_config(path: Path, config: Config, best: dict) -> None:
    """The configuration with the measured micro-batch, as a config file for train.py."""
    pair = {name: best[name] for name in ("batch_size", "gradient_accumulation_steps")}
    keys = {name: getattr(config, name) for name in FIELDS if name in config.given} | pair
    keys.pop("tokens_per_iter", None)  # the pair says it
    m = best["machine"]
    lines = [
        f"# The fastest micro-batch of a sweep: {describe(best)}",
        f"# {m['device']}, {m['dtype']}, torch {m['torch']}, {m['date']}",
        *(f"{name} = {value!r}" for name, value in keys.items()),
    ]
    path.write_text("\n".join(lines) + "\n")
    say(f"wrote {path}")


# -----------------------------------------------------------------------------
# ladder

# Each row: its name, the config keys it changes, the arguments of measure() it changes. Changes
# stay for the rows below.
LADDER = [
    (
        "float32",
        dict(
            dtype="float32",
            tf32=False,
            compile=False,
            flash=False,
            loss_chunk="off",
            pad_vocab_multiple=1,
            tie_weights=False,
        ),
        dict(host_sync=True, read_ahead=False),
    ),
    ("TF32", dict(tf32=True), {}),
    ("no host sync", {}, dict(host_sync=False)),
    ("AMP", {}, {}),  # the config's dtype, or this machine's best
    ("compile", dict(compile=True), {}),
    ("flash attention", dict(flash=True), {}),
    ("padded vocabulary", dict(pad_vocab_multiple=128), {}),
    ("tied weights", dict(tie_weights=True), {}),
    ("loader thread", {}, dict(read_ahead=True)),
]


def ladder(config: Config, options: dict) -> dict:
    """
    Each row on top of those before it, at the config's micro-batch, and on CUDA again at the
    largest that fits.
    """
    device, arguments = hardware.set_up(config).device, dict(trials=options["trials"] or 3)
    columns = ("first", "largest") if device.type == "cuda" else ("first",)
    wanted, rows = "auto" if config.dtype == "float32" else config.dtype, []
    say(
        " " * 18
        + "  ".join(
            [f"{'batch':>6} {'tok/s':>9} {'gain':>6} {'total':>6} {'GiB':>6} {'mfu':>6}"]
            * len(columns)
        )
    )
    for name, changes, more in LADDER:
        row = dict(name=name, why=missing(name, device, config))
        if not row["why"]:
            config, arguments = replace(config, **changes), arguments | more
            config = replace(config, dtype=wanted) if name == "AMP" else config
            row["first"] = attempt(config, **arguments)
            if "largest" in columns:
                row["largest"] = attempt_largest(config, arguments, device)
        rows.append(row)
        for column in columns:
            add_gains(
                [row[column] for row in rows if column in row and row[column]["tokens_per_sec"]]
            )
        say(
            f"{name:<18}"
            + (
                f"   n/a: {row['why']}"
                if row["why"]
                else "  ".join(cell(row[column]) for column in columns)
            )
        )
    measured = {
        column: [row for row in rows if "gain" in row.get(column, {})] for column in columns
    }
    if not measured["first"]:
        raise UserError(
            f"batch_size: every row ran out of memory with {config.batch_size}; a smaller --batch_size"
        )
    for column, what in zip(
        columns, (f"micro-batch {config.batch_size}", "the largest micro-batch that fits")
    ):
        last, best = (
            measured[column][-1],
            max(measured[column], key=lambda row: row[column]["total_gain"]),
        )
        say(
            f"total gain at {what}: {last[column]['total_gain']:.1f}x with the last row, "
            f"{best[column]['total_gain']:.1f}x with the best ({best['name']})"
        )
    say("each row runs in a process of its own; mfu is of the row's own dtype peak")
    if options["png"]:
        bars = {
            row["name"]: [row.get(column, {}).get("tokens_per_sec") for column in columns]
            for row in rows
        }
        labels = [f"micro-batch {config.batch_size}", "the largest that fits"][: len(columns)]
        draw(Path(options["png"]), "each row on top of those above", bars, labels)
    return dict(rows=rows)


def missing(name: str, device: torch.device, config: Config) -> str | None:
    """Why this machine or model has no such row."""
    if config.model == "fast" and name == "tied weights":
        return "the fast model has a head of its own"
    if name == "TF32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "needs a GPU from Ampere on"
    if name == "AMP" and device.type == "cpu" and hardware.best_dtype(device) == torch.float32:
        return "this processor computes in float32 alone"
    return None


def attempt_largest(config: Config, arguments: dict, device: torch.device) -> dict:
    """At the largest micro-batch by the memory model, the next smaller ones where it was wrong."""
    sequences = config.iter_sequences
    model, dtype = (
        model_config(config, GPT2_VOCAB),
        getattr(torch, config.dtype, hardware.best_dtype(device)),
    )
    capacity = USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory
    b = fitting_batch(model, sequences, capacity, dtype, config.compile, config.optimizer) or 1
    while not (result := attempt(with_batch(config, b), **arguments))["tokens_per_sec"] and b > 1:
        b = max(n for n in range(1, b) if sequences % n == 0)
    return result


def add_gains(results: list[dict]) -> None:
    """gain: over the row before; total_gain: over the first."""
    for before, r in zip([results[0], *results] if results else [], results):
        r["gain"] = r["tokens_per_sec"] / before["tokens_per_sec"]
        r["total_gain"] = r["tokens_per_sec"] / results[0]["tokens_per_sec"]


def cell(r: dict) -> str:
    if r["tokens_per_sec"] is None:
        return f"{r['batch_size']:>6} {'out of memory':>36}"
    mfu = "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}"
    gains = f"{r['gain']:>5.2f}x {r['total_gain']:>5.2f}x"
    return f"{r['batch_size']:>6} {r['tokens_per_sec']:>9,.0f} {gains} {r['mem_gib'] or math.nan:>6.1f} {mfu:>6}"


def draw(path: Path, title: str, bars: dict[str, list[float | None]], labels: list[str]) -> None:
    """Horizontal bars of tokens/s, one group for each name, the first on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(bars) + 1.4), facecolor="white", layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(labels)
    for i, label in enumerate(labels):
        values = [values[i] or 0 for values in bars.values()]
        drawn = axes.barh([n + i * height for n in range(len(bars))], values, height, label=label)
        axes.bar_label(drawn, [f"{value:,.0f}" if value else "n/a" for value in values], padding=3)
    axes.set_yticks([n + 0.4 - height / 2 for n in range(len(bars))], list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="tokens per second", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
