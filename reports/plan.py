"""
bench.py plan: estimate a run's tokens, FLOPs, hours, memory, disk, energy and price before it
starts.

Everything follows from the pace, the seconds per iteration. It comes from --iter_seconds, from a
published or assumed MFU of a GPU (--gpu), or from a measurement on this machine. A plan is a flat
dict of figures, None if unknown: memory in GiB, disk in GB.
"""

import argparse
import contextlib
import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median

from common.console import (
    UserError,
    count,
    duration,
    parse_count,
    percent,
    print_err,
    raise_if_any,
    say,
)
from configurator import (
    NOT_WEIGHTS,
    SAVE_EVERY,
    UNREACHED,
    Config,
    divisors,
    resolve,
    with_batch,
)
from data.missing import (
    DOWNLOADED_ON_DEMAND,
    MOST_TOKENS,
    SHARD_TOKENS,
    preparation,
    run_tokens,
    shards_to_download,
    vocab_where_missing,
)
from data.shards import open_dataset
from data.tokenizer import GPT2_VOCAB
from model import GPTConfig
from model_fast import model_config
from training import hardware, preflight
from training.gpus import (
    GIB,
    PUBLISHED_WIDTH,
    assumed_mfus,
    published_mfus,
    read_gpu_table,
    resolve_gpu,
    row_peak,
    short_name,
)
from training.memory import (
    CHOSEN_MEMORY,
    USABLE_MEMORY,
    checkpoint_bytes,
    choose_batch,
    count_parameters,
    count_trained,
    fitting_batch,
    memory_bytes,
)
from training.pretrained import ARCHITECTURE, load_pretrained
from training.speed import count_flops

# What Muon's Newton-Schulz steps and the fast recipe's biases and gains add to an iteration. They
# take memory traffic and few FLOPs, and no published MFU includes them
# (dev/simulate_gpu/results.md).
MUON_OVERHEAD = 1.04
# The GB/s to assume between GPUs: within a machine PCIe 4.0 without peer access, unless gpus.csv
# has a faster link; between machines 100 Gbit/s. On a link, a byte takes ten bits.
PCIE_GBS = 12
NETWORK_GBS = 10
GPUS_OF_A_MACHINE = 8
CHECKPOINT_BYTES_PER_SEC = 0.5e9  # assumed
# Beyond this many FLOPs an iteration may take a CPU ten seconds, too long to measure several.
MOST_FLOPS_ON_A_CPU = 1e12
# A model narrower than PUBLISHED_WIDTH reaches a lower MFU: the likely one times
# (n_embd / 768) ** 0.25, the lowest times (n_embd / 768) ** 0.4. Public pairs of runs have 0.84 and
# 0.76 for half the width (docs/plan.md).
LIKELY_POWER, LOWEST_POWER = 0.25, 0.4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add plan's own flags to bench.py's parser."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="such as 4070 (default: this machine)")
    add("--gpus", type=parse_count, default=1, help="number of GPUs (default: 1)")
    add("--iter_seconds", type=parse_seconds, metavar="S", help="seconds per iteration on one GPU")
    add("--dataset_tokens", type=parse_count, help="such as 10B, to compute epochs")
    add("--watts", type=float, metavar="W", help="power of one GPU, to compute the energy")
    add("--price_kwh", type=float, metavar="P", help="price per kWh, to compute the energy's cost")


def parse_seconds(text: str) -> float:
    """Return the seconds in "9.3". Raises ArgumentTypeError for anything else."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"needs seconds above 0, such as 9.3, got {text!r}")


# -----------------------------------------------------------------------------
# The GPU


@dataclass(frozen=True)
class Card:
    name: str
    dtype: str
    peak_tflops: float | None
    memory_gib: float | None = None
    published_mfu: tuple[float, ...] = ()  # fractions of the peak; empty if none is published
    published_by: str = ""
    link_gbs: float = PCIE_GBS  # between GPUs of this kind within one machine


def card_of_row(row: dict[str, str], config: Config) -> Card:
    name, dtype = short_name(row), config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if row["bf16_tflops"] else "float16"
    if dtype == "bfloat16" and not row["bf16_tflops"]:
        raise UserError(f"dtype: a {name} only emulates bfloat16; use --dtype=float16")
    percents = row["mfu_percent"]
    return Card(
        name=name,
        dtype=dtype,
        peak_tflops=config.peak_tflops or row_peak(row, dtype, config.tf32),
        memory_gib=float(row["memory_gib"]),
        published_mfu=published_mfus(row),
        published_by=row["mfu_source"] or f"published, compiled: {percents}% of its peak",
        link_gbs=float(row["link_gbs"] or PCIE_GBS),
    )


def card_here(config: Config) -> Card:
    preflight.check_device(config)
    hw = hardware.set_up(config)
    link_gbs = float((hw.row and hw.row["link_gbs"]) or PCIE_GBS)
    return Card(hw.name, hw.dtype_name, hw.peak_tflops, hw.memory_gib(), link_gbs=link_gbs)


# -----------------------------------------------------------------------------
# The pace


@dataclass(frozen=True)
class Pace:
    """Holds seconds per iteration on one GPU; all three are equal if the source has no range."""

    source: str
    likely: float
    fastest: float
    slowest: float


def one_pace(source: str, seconds: float) -> Pace:
    return Pace(source, seconds, seconds, seconds)


def pace_by_mfu(config: Config, model: GPTConfig, card: Card) -> Pace:
    """
    Return the pace at the GPU's median published MFU, with a range from the lowest and the highest
    one. If none is published, use the MFUs assumed for this kind of GPU. For a narrow model the
    median and the lowest MFU are reduced. Raises UserError if the GPU's peak or the model's FLOPs
    are unknown.
    """
    hint = "give --iter_seconds=S"
    flops = count_flops(model)
    if not card.peak_tflops:
        raise UserError(f"gpu: the peak of a {card.name} in {card.dtype} is unknown; {hint}")
    if not flops:
        raise UserError(f"model: its FLOPs cannot be counted; {hint}")
    at_peak = flops * config.iter_tokens / (card.peak_tflops * 1e12)
    if config.recompute:
        # The blocks' forward pass runs twice; it is a third of their work.
        head = 6 * model.n_embd * model.vocab_size
        at_peak *= 1 + (flops - head) / flops / 3
    if config.optimizer == "muon":
        at_peak *= MUON_OVERHEAD
    mfus, source = card.published_mfu, card.published_by
    if not mfus:
        low, likely, high = mfus = assumed_mfus(card.name)
        source = f"assumed: {likely:.0%} ({low:.0%} to {high:.0%}) of its peak; no MFU is published"
    width = min(1.0, model.n_embd / PUBLISHED_WIDTH)
    likely, lowest = width**LIKELY_POWER * median(mfus), width**LOWEST_POWER * min(mfus)
    if width < 1:
        part = width**LIKELY_POWER
        source += f"; {part:.0%} of that at n_embd {model.n_embd}, as in public runs (docs/plan.md)"
    return Pace(source, at_peak / likely, at_peak / max(mfus), at_peak / lowest)


def measured_pace(config: Config, model: GPTConfig, card: Card, measure: Callable) -> Pace:
    on_a_cpu = not (card.memory_gib or card.peak_tflops)
    if on_a_cpu and config.iter_tokens * (count_flops(model) or 0) > MOST_FLOPS_ON_A_CPU:
        raise UserError(
            "gpu: no GPU here, and timing this model on the CPU may take minutes; "
            "add --gpu=4070 or --iter_seconds=S"
        )
    say("measuring a few iterations on this machine")
    return one_pace("measured here", measure(config)["step_ms"] / 1000)


def card_and_pace(
    config: Config, model: GPTConfig, options: Namespace, measure: Callable
) -> tuple[Card, Pace]:
    """Return the GPU that --gpu names, else this machine's, and its pace."""
    card = card_of_row(resolve_gpu(options.gpu), config) if options.gpu else None
    if card and not options.iter_seconds:
        return card, pace_by_mfu(config, model, card)
    card = card or card_here(config)
    if options.iter_seconds:
        return card, one_pace("given", options.iter_seconds)
    return card, measured_pace(config, model, card, measure)


def exchange_seconds(card: Card, n: int, params: int) -> float:
    """
    Return the seconds to average the float32 gradients after an iteration. Each of n GPUs sends and
    receives 2 (n - 1) / n times all gradients (docs/internals/multi_gpu.md).
    """
    link_gbs = NETWORK_GBS if n > GPUS_OF_A_MACHINE else card.link_gbs
    return 2 * (n - 1) / n * 4 * params / (link_gbs * 1e9)


# -----------------------------------------------------------------------------
# The time of a run


def time_run(config: Config, iter_seconds: float, gb: float, at_most: float = 0.0) -> dict:
    """
    Return the plan's figures about time, for as many iterations as fit into `at_most` hours, if
    given. `hours` counts iterations only, `hours_total` also evaluations and checkpoints;
    `eval_seconds` and `checkpoint_seconds` are the times of one evaluation and one checkpoint of
    `gb` GB.
    """
    if at_most:
        config = fit_into_hours(config, at_most, iter_seconds, gb)
    n, evals = config.max_iters, config.eval_interval
    saves = config.checkpoint_interval or math.ceil(SAVE_EVERY / iter_seconds)
    # every evaluation except the first saves a checkpoint
    saved_at = {n, *range(evals, n, evals), *range(saves, n, saves)}
    evaluations = math.ceil(n / evals) + 1
    # An evaluation runs the forward pass only, a third of the work per token, on two splits.
    eval_seconds = 2 * config.eval_size * iter_seconds / config.iter_tokens / 3
    checkpoint_seconds = 1e9 * gb / CHECKPOINT_BYTES_PER_SEC
    pauses = evaluations * eval_seconds + len(saved_at) * checkpoint_seconds
    return dict(
        iter_seconds=iter_seconds,
        tokens_per_sec=config.iter_tokens / iter_seconds,
        max_iters=n,
        total_tokens=config.iter_tokens * n,
        hours=n * iter_seconds / 3600,
        hours_total=(n * iter_seconds + pauses) / 3600,
        evaluations=evaluations,
        eval_seconds=eval_seconds,
        checkpoints=len(saved_at),
        checkpoint_seconds=checkpoint_seconds,
    )


def fit_into_hours(config: Config, hours: float, iter_seconds: float, gb: float) -> Config:
    """
    Return the config with as many iterations as fit into the hours, and with the eval_interval that
    train.py would choose. Startup and compilation are not counted; they take a few minutes. Raises
    UserError if not even one iteration fits.
    """
    most = min(config.max_iters, int(3600 * hours / iter_seconds))
    if most < 1:
        raise UserError(
            f"hours: {hours:.3g} h is too short for one iteration of {seconds_text(iter_seconds)}; "
            "give more --hours"
        )
    evals = config.eval_interval if config.eval_interval < UNREACHED else math.ceil(most / 20)
    config = replace(config, max_iters=most, eval_interval=evals)
    # evaluations and checkpoints use up part of the hours
    share = min(1.0, hours / time_run(config, iter_seconds, gb)["hours_total"])
    return replace(config, max_iters=max(1, int(most * share)))


# -----------------------------------------------------------------------------
# The plan


def make_plan(config: Config, model: GPTConfig, card: Card, pace: Pace, options: Namespace) -> dict:
    """
    Compute all figures of a run. hours and kwh count iterations only; hours_total, kwh_total, cost
    and ends include evaluations and checkpoints. Several GPUs share the work evenly and then
    average their gradients. watts is the power of one GPU, without the rest of the machine.
    """
    n = options.gpus
    params = count_parameters(model)
    flops = count_flops(model)
    checkpoint_gb = checkpoint_bytes(config, model) / 1e9
    exchange = exchange_seconds(card, n, count_trained(model))
    hours = config.hours
    times, fastest, slowest = (
        time_run(config, seconds / n + exchange, checkpoint_gb, hours)
        for seconds in (pace.likely, pace.fastest, pace.slowest)
    )
    hours_total = min(times["hours_total"], hours or math.inf)  # rounded intervals may exceed them
    ends = datetime.fromtimestamp(time.time() + 3600 * hours_total)
    tokens, rate = times["total_tokens"], times["tokens_per_sec"]

    # Without a dataset, or while it grows, assume shards with as many tokens as the run can read.
    disk_tokens = options.dataset_tokens or min(fastest["total_tokens"], MOST_TOKENS)
    if config.dataset == DOWNLOADED_ON_DEMAND and not options.dataset_tokens:
        disk_tokens = SHARD_TOKENS * (1 + shards_to_download(run_tokens(config)))
    shards_gb = 2 * disk_tokens / 1e9
    kept = config.checkpoint_files
    kilowatts = n * options.watts / 1000 if options.watts else None
    kwh_total = kilowatts and kilowatts * hours_total

    return dict(
        gpu=card.name,
        gpus=n,
        dtype=card.dtype,
        peak_tflops=card.peak_tflops,
        gpu_memory_gib=card.memory_gib,
        params=params,
        vocab_size=model.vocab_size,
        flops_per_token=flops,
        batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        tokens_per_iter=config.iter_tokens,
        tokens_range=[slowest["total_tokens"], fastest["total_tokens"]],
        dataset_tokens=options.dataset_tokens,
        epochs=options.dataset_tokens and tokens / options.dataset_tokens,
        total_flops=flops and flops * tokens,
        pace=pace.source,
        iter_seconds_range=[fastest["iter_seconds"], slowest["iter_seconds"]],
        exchange_seconds=exchange,
        mfu=flops * rate / (card.peak_tflops * 1e12 * n) if flops and card.peak_tflops else None,
        **times,
        hours_range=[fastest["hours"], slowest["hours"]],
        ends=f"{ends:%Y-%m-%d %H:%M}",
        **memory_figures(config, model, card, n),
        checkpoint_gb=checkpoint_gb,
        checkpoints_kept=kept,
        disk_tokens=disk_tokens,
        shards_gb=shards_gb,
        disk_gb=shards_gb + kept * checkpoint_gb,
        watts=options.watts,
        kwh=kilowatts and kilowatts * times["hours"],
        kwh_total=kwh_total,
        cost=kwh_total and options.price_kwh and kwh_total * options.price_kwh,
    )


def hours_text(hours: float) -> str:
    """Format hours as 21.7 h; below an hour as 12m30s."""
    return f"{hours:.1f} h" if hours >= 1 else duration(3600 * hours)


def seconds_text(seconds: float) -> str:
    """Format seconds as 9.34 s; below a second as 41.5 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def range_text(low: str, high: str) -> str:
    return f" ({low} to {high})" if low != high else ""


def memory_text(p: dict) -> str:
    """Return the GPU's memory, and how to plan a card of the same name with another memory."""
    sizes = {row["memory_gib"] for row in read_gpu_table() if short_name(row) == p["gpu"]}
    told = f", {p['gpu_memory_gib']:.0f} GB" if sizes else ""
    # the driver reports a little less than the data sheet
    others = [size for size in sorted(sizes) if abs(float(size) - p["gpu_memory_gib"]) > 1]
    ways = " or ".join(f"--gpu='{p['gpu']} {size} GB'" for size in others)
    return f"{told} ({ways} for another memory)" if ways else told


def plan_lines(p: dict) -> list[str]:
    flops, compute = "FLOPs n/a", "n/a"
    if p["flops_per_token"]:
        flops = f"{count(p['flops_per_token'])} FLOPs per token"
        compute = f"{p['total_flops']:.2e} FLOPs"
    epochs = "n/a without a dataset; give --dataset_tokens=N"
    if p["epochs"]:
        epochs = f"{p['epochs']:.2f} of {count(p['dataset_tokens'])} tokens"
    peak = f"{p['peak_tflops']} TFLOP/s dense peak" if p["peak_tflops"] else "peak unknown"
    mfu = percent(p["mfu"]) + (", impossible on this GPU" if (p["mfu"] or 0) > 1 else "")
    iteration, eval_time, checkpoint_time = map(
        seconds_text, (p["iter_seconds"], p["eval_seconds"], p["checkpoint_seconds"])
    )
    tokens_range = range_text(*map(count, p["tokens_range"]))
    # With --hours the hours are fixed, and a faster GPU reads more tokens instead.
    hours_range = "" if tokens_range else range_text(*map(hours_text, p["hours_range"]))
    exchange = ""
    if p["gpus"] > 1:
        share = p["exchange_seconds"] / p["iter_seconds"]
        exchange = f", {share:.0%} of it averaging gradients"
    energy = "n/a without --watts=W, the power of one GPU"
    if p["watts"]:
        cost = f"{p['cost']:.2f}" if p["cost"] else "n/a without --price_kwh=P"
        energy = f"{p['kwh_total']:.3g} kWh at {p['watts']:g} W per GPU; cost {cost}"
    return [
        f"model    {p['params'] / 1e6:.2f}M parameters, vocabulary {p['vocab_size']}, {flops}",
        f"tokens   {p['tokens_per_iter']:,} per iteration x {p['max_iters']:,} = "
        f"{p['total_tokens']:,}{tokens_range}",
        f"epochs   {epochs}",
        f"compute  {compute}",
        f"GPU      {p['gpus']} x {p['gpu']}{memory_text(p)}, {p['dtype']}, {peak}",
        f"pace     {iteration} per iteration{exchange}, {p['tokens_per_sec']:,.0f} tok/s, "
        f"mfu {mfu}",
        f"         {p['pace']}",
        f"time     {hours_text(p['hours'])}{hours_range} of iterations",
        f"         {hours_text(p['hours_total'])} with {p['evaluations']} evaluations of "
        f"{eval_time} and {p['checkpoints']} checkpoints of {checkpoint_time}",
        f"         started now, it ends at {p['ends']}",
        *memory_lines(p),
        f"disk     {p['disk_gb']:.3g} GB: {p['shards_gb']:.3g} GB of shards "
        f"({count(p['disk_tokens'])} tokens) and {p['checkpoints_kept']} checkpoints of "
        f"{p['checkpoint_gb']:.2g} GB",
        f"energy   {energy}",
    ]


# -----------------------------------------------------------------------------
# Memory


def memory_figures(config: Config, model: GPTConfig, card: Card, n: int) -> dict:
    """Estimate the memory of each of n GPUs, and which micro-batch fits."""
    parts = memory_bytes(config, model, card.dtype, config.batch_size)
    vram = sum(parts.values()) / GIB
    usable = fitting = None
    if card.memory_gib:
        usable = USABLE_MEMORY * card.memory_gib
        sizes = divisors(config.iter_sequences // n)
        fitting = fitting_batch(config, model, card.dtype, sizes, usable * GIB)
    return dict(
        vram_gib=vram,
        vram_parts_gib={part: size / GIB for part, size in parts.items()},
        usable_gib=usable,
        fits=vram <= usable if usable else None,
        batch_size_that_fits=fitting,
        recompute=model.recompute,
    )


def memory_lines(p: dict) -> list[str]:
    lines = [f"memory   {p['vram_gib']:.1f} GiB for batch_size {p['batch_size']}, estimated"]
    lines += [f"           {part:<13} {size:5.2f}" for part, size in p["vram_parts_gib"].items()]
    if p["usable_gib"]:
        recompute = "" if p["recompute"] else "--recompute=True, "
        advice = f"not even batch_size=1 fits; try {recompute}a smaller block_size or model"
        if best := p["batch_size_that_fits"]:
            accumulation = p["batch_size"] * p["gradient_accumulation_steps"] // best
            pair = f"--batch_size={best} --gradient_accumulation_steps={accumulation}"
            advice = f"the largest that fits: {pair}"
        verdict = "fits in" if p["fits"] else "does not fit in"
        lines.append(f"         {verdict} {p['usable_gib']:.1f} GiB without a desktop; {advice}")
    return lines


# -----------------------------------------------------------------------------
# The mode


def plan(config: Config, options: Namespace, measure: Callable[[Config], dict]) -> dict:
    """
    Print the plan, and return it for --json. `options` holds plan's flags,
    None if not given. `measure` times a few iterations of train.py on this machine. Raises
    UserError.
    """
    config, uneven = resolve(config, options.gpus)
    raise_if_any(uneven)
    config, weights = with_initial_sizes(config)
    vocab = vocab_where_missing(config)
    if vocab is None:
        data = open_dataset(config.dataset, config.eval_size, config.stream)
        vocab = data.vocab
        options.dataset_tokens = options.dataset_tokens or data.train_tokens
        config = replace(config, eval_tokens=min(config.eval_size, len(data.val)))
    model = model_config(
        config, vocab, flash=config.flash, compiled=config.compile, weights=weights
    )
    card, pace = card_and_pace(config, model, options, measure)
    if config.tokens_per_iter:
        memory = CHOSEN_MEMORY * (card.memory_gib or 0) * GIB
        size = choose_batch(config, model, card.dtype, options.gpus, memory)
        config = with_batch(config, size, config.iter_sequences)
    p = make_plan(config, model, card, pace, options)
    say(*plan_lines(p))
    if config.dataset == DOWNLOADED_ON_DEMAND and not options.dataset_tokens:
        print_err("note: no dataset yet, so epochs are unknown; train.py downloads it")
    elif vocab == GPT2_VOCAB and not options.dataset_tokens:
        tokens = p["disk_tokens"]
        unit = 10 ** int(math.log10(tokens)) if config.by_clock else 1  # 1.71B -> 2B
        make = preparation(config.dataset, math.ceil(tokens / unit) * unit)
        print_err(f"note: no dataset yet, so epochs are unknown; get it with{make}")
    return p


def with_initial_sizes(config: Config) -> tuple[Config, dict | None]:
    """
    Return the config with the model sizes of the weights in init_from, and these sizes in the form
    that model_config() takes. Raises UserError if the weights cannot be read.
    """
    if config.init_from in NOT_WEIGHTS:
        return config, None
    block_size = config.block_size if "block_size" in config.set_keys else None
    sizes = load_pretrained(config.init_from, block_size)["model_config"]
    config = replace(config, **{name: sizes[name] for name in ARCHITECTURE if name in sizes})
    return config, dict(model_config=sizes)
