"""
bench.py plan: estimate a run's tokens, FLOPs, hours, memory, disk, energy and price before it
starts.

Everything follows from the seconds per iteration. They come from --iter_seconds, or from the
published or assumed MFU of a GPU. A plan is a flat dict of figures, None if unknown: memory in GiB,
disk in GB.
"""

import argparse
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.console import UserError, count, parse_count, percent, raise_if_any, say
from configurator import NOT_WEIGHTS, SAVE_EVERY, Config, resolve, with_batch
from data.missing import FAST_DATA, SHARD_TOKENS, files_to_download, vocab_where_missing
from data.shards import open_dataset
from model import GPTConfig
from model_fast import model_config
from training import hardware
from training.cost import (
    CHOSEN_MEMORY,
    USABLE_MEMORY,
    checkpoint_bytes,
    choose_batch,
    count_flops,
    count_parameters,
    count_trained,
    memory_bytes,
)
from training.gpus import GIB, PUBLISHED_WIDTH, known_mfus, resolve_gpu, row_peak, short_name
from training.pretrained import ARCHITECTURE, load_pretrained

# What Muon's Newton-Schulz steps and the fast recipe's biases and gains add to an iteration. They
# take memory traffic and few FLOPs, and no published MFU includes them
# (docs/internals/simulated_gpus.md).
MUON_OVERHEAD = 1.04
# The GB/s to assume between GPUs: within a machine PCIe 4.0 without peer access, unless gpus.csv
# has a faster link; between machines 100 Gbit/s. On a link, a byte takes ten bits.
PCIE_GBS = 12
NETWORK_GBS = 10
GPUS_OF_A_MACHINE = 8
CHECKPOINT_BYTES_PER_SEC = 0.5e9  # assumed
# A model narrower than PUBLISHED_WIDTH reaches a lower MFU: the likely one times
# (n_embd / 768) ** 0.25, the lowest times (n_embd / 768) ** 0.4. Public pairs of runs have 0.84 and
# 0.76 for half the width (docs/plan.md).
LIKELY_POWER, LOWEST_POWER = 0.25, 0.4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add plan's own flags to bench.py's parser."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="such as 4070 (default: this machine's)")
    add("--gpus", type=parse_count, default=1, help="number of GPUs (default: 1)")
    add("--iter_seconds", type=float, metavar="S", help="seconds per iteration on one GPU")
    add("--dataset_tokens", type=parse_count, help="such as 10B, to compute epochs")
    add("--watts", type=float, metavar="W", help="power of one GPU, to compute the energy")
    add("--price_kwh", type=float, metavar="P", help="price per kWh, to compute the energy's cost")


def plan(config: Config, options: Namespace) -> dict:
    """
    Print the plan, and return it for --json. `options` holds plan's flags, None if not given.
    Raises UserError.
    """
    config, uneven = resolve(config, options.gpus)
    raise_if_any(uneven)
    config, weights = with_initial_sizes(config)
    vocab = vocab_where_missing(config)
    if vocab is None:
        data = open_dataset(config.dataset, config.eval_size)
        vocab = data.vocab
        options.dataset_tokens = options.dataset_tokens or len(data.train)
        config = replace(config, eval_tokens=min(config.eval_size, len(data.val)))
    model = model_config(
        config, vocab, flash=config.flash, compiled=config.compile, weights=weights
    )
    card = find_card(config, options.gpu)
    if config.tokens_per_iter:
        memory = CHOSEN_MEMORY * (card.memory_gib or 0) * GIB
        size = choose_batch(config, model, card.dtype, options.gpus, memory)
        config = with_batch(config, size, config.iter_sequences)
    p = make_plan(config, model, card, options)
    say(*plan_lines(p))
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


# -----------------------------------------------------------------------------
# The GPU and its pace


@dataclass(frozen=True)
class Card:
    name: str
    dtype: str
    peak_tflops: float | None
    peak_source: str
    memory_gib: float | None
    row: dict[str, str] | None  # in gpus.csv


def find_card(config: Config, name: str | None) -> Card:
    """Return the GPU that --gpu names, else this machine's device."""
    if not name:
        hardware.check_device(config)
        hw = hardware.set_up(config)
        name, dtype = hw.name, hw.dtype_name
        return Card(name, dtype, hw.peak_tflops, hw.peak_source, hw.memory_gib(), hw.row)
    row, dtype = resolve_gpu(name), config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if row["bf16_tflops"] else "float16"
    peak = config.peak_tflops or row_peak(row, dtype, config.tf32)
    source = "peak_tflops" if config.peak_tflops else "gpus.csv"
    return Card(short_name(row), dtype, peak, source, float(row["memory_gib"]), row)


def seconds_by_mfu(config: Config, model: GPTConfig, card: Card) -> tuple[list[float], str]:
    """
    Return the likely, the shortest and the longest seconds of an iteration on one GPU, by the MFUs
    that are published or assumed for it, and where these are from. Raises UserError if the GPU's
    peak or the model's FLOPs are unknown. MFUs are not known relative to a measured peak.
    """
    flops = count_flops(model)
    if not (card.peak_tflops and flops) or card.peak_source == "measured":
        why = "no data sheet gives its peak" if flops else "the model's FLOPs are unknown"
        raise UserError(
            f"gpu: the hours on a {card.name} in {card.dtype} cannot be estimated, because {why}; "
            "give --gpu=NAME, or --iter_seconds=S, which bench.py CONFIG measures"
        )
    at_peak = flops * config.iter_tokens / (card.peak_tflops * 1e12)
    if config.optimizer == "muon":
        at_peak *= MUON_OVERHEAD
    low, likely, high, source = known_mfus(card.name, card.row)
    width = min(1.0, model.n_embd / PUBLISHED_WIDTH)
    likely, low = width**LIKELY_POWER * likely, width**LOWEST_POWER * low
    return [at_peak / mfu for mfu in (likely, high, low)], source


def exchange_seconds(card: Card, n: int, params: int) -> float:
    """
    Return the seconds to average the float32 gradients after an iteration. Each of n GPUs sends and
    receives 2 (n - 1) / n times all gradients (docs/internals/multi_gpu.md).
    """
    link_gbs = float((card.row and card.row["link_gbs"]) or PCIE_GBS)
    if n > GPUS_OF_A_MACHINE:
        link_gbs = NETWORK_GBS
    return 2 * (n - 1) / n * 4 * params / (link_gbs * 1e9)


def time_run(config: Config, iter_seconds: float, checkpoint_gb: float) -> dict:
    """
    Return the plan's figures about time. `hours` counts iterations only, `hours_total` also
    evaluations and checkpoints. Under the key `hours`, a run has as many iterations as fit into
    them.
    """
    n = config.max_iters
    if config.hours:
        n = max(1, min(n, int(3600 * config.hours / iter_seconds)))
    evals = config.eval_interval
    saves = config.checkpoint_interval or math.ceil(SAVE_EVERY / iter_seconds)
    # every evaluation except the first saves a checkpoint
    saved_at = {n, *range(evals, n, evals), *range(saves, n, saves)}
    evaluations = math.ceil(n / evals) + 1
    # An evaluation runs the forward pass only, a third of the work per token, on two splits.
    eval_seconds = 2 * config.eval_size * iter_seconds / config.iter_tokens / 3
    checkpoint_seconds = 1e9 * checkpoint_gb / CHECKPOINT_BYTES_PER_SEC
    pauses = evaluations * eval_seconds + len(saved_at) * checkpoint_seconds
    seconds = n * iter_seconds + pauses
    if config.hours and seconds > 3600 * config.hours:  # the pauses use up part of the hours
        n = max(1, int(n * 3600 * config.hours / seconds))
        seconds = 3600 * config.hours
    return dict(
        iter_seconds=iter_seconds,
        tokens_per_sec=config.iter_tokens / iter_seconds,
        max_iters=n,
        total_tokens=config.iter_tokens * n,
        hours=n * iter_seconds / 3600,
        hours_total=seconds / 3600,
        evaluations=evaluations,
        eval_seconds=eval_seconds,
        checkpoints=len(saved_at),
        checkpoint_seconds=checkpoint_seconds,
    )


# -----------------------------------------------------------------------------
# The plan


def make_plan(config: Config, model: GPTConfig, card: Card, options: Namespace) -> dict:
    """
    Compute all figures of a run. hours counts iterations only; hours_total, kwh_total and cost also
    evaluations and checkpoints. Several GPUs share the work evenly and then average their
    gradients. watts is the power of one GPU, without the rest of the machine.
    """
    n, flops = options.gpus, count_flops(model)
    seconds, source = [options.iter_seconds] * 3, "given"
    if not options.iter_seconds:
        seconds, source = seconds_by_mfu(config, model, card)
    exchange = exchange_seconds(card, n, count_trained(model))
    likely, shortest, longest = (s / n + exchange for s in seconds)
    if config.hours:
        shortest = longest = likely  # the run ends on time, whatever its pace
    checkpoint_gb = checkpoint_bytes(config, model) / 1e9
    times = time_run(config, likely, checkpoint_gb)
    tokens, rate = times["total_tokens"], times["tokens_per_sec"]

    # Without a dataset, or while it grows, assume shards with as many tokens as the run can read.
    disk_tokens = options.dataset_tokens or tokens
    if config.dataset == FAST_DATA and not options.dataset_tokens:
        disk_tokens = SHARD_TOKENS * len(files_to_download(config))
    shards_gb = 2 * disk_tokens / 1e9
    parts = memory_bytes(config, model, card.dtype, config.batch_size)
    vram_gib = sum(parts.values()) / GIB
    usable_gib = card.memory_gib and USABLE_MEMORY * card.memory_gib
    kilowatts = options.watts and n * options.watts / 1000
    kwh_total = kilowatts and kilowatts * times["hours_total"]

    return dict(
        gpu=card.name,
        gpus=n,
        dtype=card.dtype,
        peak_tflops=card.peak_tflops,
        peak_source=card.peak_source,
        gpu_memory_gib=card.memory_gib,
        params=count_parameters(model),
        vocab_size=model.vocab_size,
        flops_per_token=flops,
        batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        tokens_per_iter=config.iter_tokens,
        dataset_tokens=options.dataset_tokens,
        epochs=options.dataset_tokens and tokens / options.dataset_tokens,
        total_flops=flops and flops * tokens,
        pace=source,
        exchange_seconds=exchange,
        mfu=flops * rate / (card.peak_tflops * 1e12 * n) if flops and card.peak_tflops else None,
        **times,
        hours_range=[times["hours"] * s / likely for s in (shortest, longest)],
        vram_gib=vram_gib,
        vram_parts_gib={part: size / GIB for part, size in parts.items()},
        usable_gib=usable_gib,
        fits=vram_gib <= usable_gib if usable_gib else None,
        checkpoint_gb=checkpoint_gb,
        checkpoints_kept=config.checkpoint_files,
        disk_tokens=disk_tokens,
        shards_gb=shards_gb,
        disk_gb=shards_gb + config.checkpoint_files * checkpoint_gb,
        watts=options.watts,
        kwh_total=kwh_total,
        cost=kwh_total and options.price_kwh and kwh_total * options.price_kwh,
    )


def plan_lines(p: dict) -> list[str]:
    def shown(key: str, form: Callable[[float], str] = "{:.3g}".format) -> str:
        """Format a figure; an unknown one as n/a."""
        return "n/a" if p[key] is None else form(p[key])

    low, high = (f"{hours:.3g} h" for hours in p["hours_range"])
    hours_range = f" ({low} to {high})" if low != high else ""
    lines = [
        f"model    {p['params'] / 1e6:.2f}M parameters, vocabulary {p['vocab_size']}, "
        f"{shown('flops_per_token', count)} FLOPs per token",
        f"tokens   {p['tokens_per_iter']:,} per iteration x {p['max_iters']:,} = "
        f"{p['total_tokens']:,}",
        f"epochs   {shown('epochs', '{:.2f}'.format)} of {shown('dataset_tokens', count)} tokens "
        "(--dataset_tokens)",
        f"compute  {shown('total_flops')} FLOPs",
        f"GPU      {p['gpus']} x {p['gpu']}, {shown('gpu_memory_gib')} GB, {p['dtype']}, "
        f"{shown('peak_tflops')} TFLOP/s dense peak ({p['peak_source']})",
        f"pace     {p['iter_seconds']:.3g} s per iteration, {p['exchange_seconds']:.2g} s of it "
        f"between GPUs, {p['tokens_per_sec']:,.0f} tok/s, mfu {percent(p['mfu'])}",
        f"         {p['pace']}",
        f"time     {p['hours']:.3g} h{hours_range} of iterations",
        f"         {p['hours_total']:.3g} h with {p['evaluations']} evaluations of "
        f"{p['eval_seconds']:.3g} s and {p['checkpoints']} checkpoints of "
        f"{p['checkpoint_seconds']:.3g} s",
        f"memory   {p['vram_gib']:.1f} GiB for batch_size {p['batch_size']}, estimated",
        *(f"           {part:<13} {size:5.2f}" for part, size in p["vram_parts_gib"].items()),
    ]
    if p["usable_gib"]:
        verdict = "fits in" if p["fits"] else "does not fit in"
        lines.append(f"         {verdict} {p['usable_gib']:.1f} GiB without a desktop")
    return [
        *lines,
        f"disk     {p['disk_gb']:.3g} GB: {p['shards_gb']:.3g} GB of shards "
        f"({count(p['disk_tokens'])} tokens) and {p['checkpoints_kept']} checkpoints of "
        f"{p['checkpoint_gb']:.2g} GB",
        f"energy   {shown('kwh_total')} kWh at {shown('watts')} W per GPU; cost "
        f"{shown('cost', '{:.2f}'.format)} (--watts, --price_kwh)",
    ]
