"""
bench.py plan: estimate a run's tokens, FLOPs, hours, memory, disk, energy and price before it
starts. The hours follow from the seconds per iteration, which are given, or computed from the MFU
that is published or assumed for a GPU.
"""

import argparse
import math
from argparse import Namespace
from bisect import bisect_left
from dataclasses import replace

from common.console import UserError, parse_count, percent, raise_if_any, say, short
from configurator import SAVE_EVERY, TRAIN_EVAL_TOKENS, Config, problems_of, resolve
from data.download import (
    FAST_DATA,
    SAMPLE_TOKENS,
    SHARD_TOKENS,
    files_to_download,
    vocab_where_missing,
)
from data.shards import open_dataset
from machine import cost, hardware
from machine.gpus import GIB, PUBLISHED_WIDTH, known_mfus, resolve_gpu, row_peak, short_name
from model_fast import model_config
from run.start import config_of_weights

# What the fast recipe's biases, gains, Newton-Schulz iterations and averages add to an iteration of
# GPT-2. docs/internals/simulated_gpus.md derives 3.9%, and 4.5% with 18 Newton-Schulz iterations;
# two GPUs measured 1.5% and 8.9%. No published MFU includes this.
MUON_OVERHEAD = 1.045
# The GB/s to assume between a machine's GPUs, unless gpus.csv has a faster link: PCIe 4.0 without
# peer access
PCIE_GBS = 12
CHECKPOINT_BYTES_PER_SEC = 0.5e9  # assumed
# A model narrower than PUBLISHED_WIDTH reaches a lower MFU: the likely one times
# (n_embd / 768) ** 0.25, the lowest times (n_embd / 768) ** 0.4. Public pairs of runs have 0.84 and
# 0.76 for half the width (results/public_runs, and llm-foundry's benchmarks on A100s).
LIKELY_POWER, LOWEST_POWER = 0.25, 0.4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add plan's own flags to bench.py's parser."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="such as 4070 (default: this machine's)")
    add("--gpus", type=parse_count, default=1, help="GPUs of one machine (default: 1)")
    add("--iter_seconds", type=float, metavar="S", help="seconds per iteration on one GPU")
    add("--dataset_tokens", type=parse_count, help="such as 10B, to compute epochs")
    add("--watts", type=float, metavar="W", help="power of one GPU, to compute the energy")
    add("--price_kwh", type=float, metavar="P", help="price per kWh, to compute the energy's cost")


def plan(c: Config, options: Namespace) -> dict:
    """
    Print the plan, and return its figures for --json: memory in GiB, disk in GB, None if unknown.
    `options` holds plan's flags, None if not given. Raises UserError.
    """
    # The run. Weights in init_from set the model's sizes, and a dataset its vocabulary
    c, begin = config_of_weights(c)
    c = resolve(c)
    raise_if_any(problems_of(c, options.gpus))
    dataset_tokens, gpus = options.dataset_tokens, options.gpus
    vocab = vocab_where_missing(c)
    if vocab is None:
        data = open_dataset(c.dataset)
        vocab, dataset_tokens = data.vocab, dataset_tokens or len(data.train)
        c = replace(c, eval_tokens=min(c.eval_tokens, len(data.val)))
    sizes = model_config(c, vocab, begin.model_config)
    params, flops = cost.count_parameters(sizes), cost.count_flops(sizes)

    # This machine's device, or the GPU that --gpu names
    if not options.gpu:
        hw = hardware.set_up(c)
        row, name, memory_gib, dtype = hw.row, hw.name, hw.memory_gib(), hw.dtype_name
        peak, peak_source = hw.peak_tflops, hw.peak_source
    else:
        row = resolve_gpu(options.gpu)
        name, memory_gib, dtype = short_name(row), float(row["memory_gib"]), c.dtype
        if dtype == "auto":
            dtype = "bfloat16" if row["bf16_tflops"] else "float16"
        peak = c.peak_tflops or row_peak(row, dtype, c.tf32) or 0.0  # 0: unknown
        peak_source = "peak_tflops" if c.peak_tflops else "gpus.csv"
    c = cost.choose_batch(replace(c, dtype=dtype), sizes, gpus, memory_gib)

    # The likely, the shortest and the longest seconds of an iteration on one GPU. The known MFUs
    # are relative to a data sheet's peak, not to a measured one
    seconds, source = [options.iter_seconds] * 3, "given"
    if not options.iter_seconds:
        if not (peak and flops) or peak_source == "measured":
            why = "no data sheet gives its peak" if flops else "the model's FLOPs are unknown"
            problem = f"the hours on {name} in {dtype} cannot be estimated, because {why}"
            hint = "give --gpu=NAME, or --iter_seconds=S, which bench.py CONFIG measures"
            raise UserError(f"gpu: {problem}; {hint}")
        low, likely, high, source = known_mfus(name, row)
        source += "" if c.compile else "; with --compile=False it is lower"
        width = min(1.0, sizes.n_embd / PUBLISHED_WIDTH)
        mfus = width**LIKELY_POWER * likely, high, width**LOWEST_POWER * low
        work = flops * c.tokens_per_iter * (MUON_OVERHEAD if c.optimizer == "muon" else 1)
        seconds = [work / (mfu * peak * 1e12) for mfu in mfus]
    # Several GPUs share the work evenly, and then average their float32 gradients: each sends and
    # receives 2 (n - 1) / n times all gradients (docs/internals/multi_gpu.md)
    link_gbs = float((row and row["link_gbs"]) or PCIE_GBS)
    exchange = 2 * (gpus - 1) / gpus * 4 * cost.count_trained(sizes) / (link_gbs * 1e9)
    iter_seconds, shortest, longest = (s / gpus + exchange for s in seconds)

    # The length. An evaluation runs the forward pass alone, a third of the work
    checkpoint_gb = cost.checkpoint_bytes(c, sizes) / 1e9
    eval_tokens = c.eval_tokens + min(c.eval_tokens, TRAIN_EVAL_TOKENS)  # of val and of train
    eval_seconds = eval_tokens * iter_seconds / c.tokens_per_iter / 3
    save_seconds = 1e9 * checkpoint_gb / CHECKPOINT_BYTES_PER_SEC
    save_interval = c.checkpoint_interval or math.ceil(SAVE_EVERY / iter_seconds)

    def pauses_until(it: int) -> tuple[int, int]:  # every evaluation but the first also saves
        evaluated_at = range(0, it, c.eval_interval)
        return len(evaluated_at), len({*evaluated_at[1:], *range(save_interval, it, save_interval)})

    def iterations_until(it: int) -> float:  # in units of the first, if the batch size changes
        return c.tokens_between(0, it) / c.tokens_per_iter

    def seconds_until(it: int) -> float:
        evaluations, saves = pauses_until(it)
        return (
            iterations_until(it) * iter_seconds + evaluations * eval_seconds + saves * save_seconds
        )

    iters = c.max_iters
    if c.hours:  # as in train.py, the iteration during which they pass is the last
        iters = bisect_left(range(iters), 3600 * c.hours, key=seconds_until)
    if iters < c.max_iters:
        shortest = longest = iter_seconds  # the run ends on time, whatever its pace
    last_seconds = eval_seconds + save_seconds  # an evaluation and a save follow
    evaluations, saves = (1 + n for n in pauses_until(iters))
    tokens, tokens_per_sec = c.tokens_between(0, iters), c.tokens_per_iter / iter_seconds

    # What is printed
    epochs = dataset_tokens and tokens / dataset_tokens
    of_data = f", {epochs:.2f} epochs of {short(dataset_tokens)}" if dataset_tokens else ""
    say(f"model    {params / 1e6:.2f}M parameters, vocabulary {sizes.vocab_size}")
    say(f"tokens   {tokens / max(1, iters):,.0f} per iteration x {iters:,} = {tokens:,}{of_data}")
    figures: dict = dict(params=params, tokens_per_iter=c.tokens_per_iter, max_iters=iters)
    figures |= dict(total_tokens=tokens, epochs=epochs)

    total_flops = flops and flops * tokens
    if flops:
        say(f"compute  {short(flops)} FLOPs per token, {total_flops:.3g} in all")
    of_peak = f", {peak:.3g} TFLOP/s dense peak ({peak_source})" if peak else ""
    say(f"GPU      {gpus} x {name}, {dtype}{of_peak}")
    mfu = flops * tokens_per_sec / (peak * 1e12 * gpus) if flops and peak else None
    time = f"{iter_seconds:.3g} s per iteration, {exchange:.2g} s of it between GPUs"
    say(f"pace     {time}, {tokens_per_sec:,.0f} tok/s, mfu {percent(mfu)}", f"         {source}")
    figures |= dict(flops_per_token=flops, total_flops=total_flops, peak_tflops=peak or None)
    figures |= dict(iter_seconds=iter_seconds, tokens_per_sec=tokens_per_sec, mfu=mfu, pace=source)

    hours, fewest, most = (
        iterations_until(iters) * s / 3600 for s in (iter_seconds, shortest, longest)
    )
    span = f" ({fewest:.3g} h to {most:.3g} h)" if fewest < most else ""
    say(f"time     {hours:.3g} h{span} of iterations")
    hours_total = (seconds_until(iters) + last_seconds) / 3600
    pauses = f"{evaluations} evaluations of {eval_seconds:.3g} s and {saves} checkpoints of"
    say(f"         {hours_total:.3g} h with {pauses} {save_seconds:.3g} s")
    if iters < c.max_iters:
        last = f"{last_seconds:.3g} s for a last evaluation and checkpoint"
        say(f"         {c.hours:g} h are training; extra: start-up, compilation, and {last}")
    figures |= dict(hours=hours, hours_range=[fewest, most], hours_total=hours_total)
    figures |= dict(evaluations=evaluations, checkpoints=saves)

    part_bytes = cost.memory_bytes(c, sizes, c.batch_size)
    parts = {part: number / GIB for part, number in part_bytes.items()}
    vram_gib, usable = sum(parts.values()), cost.USABLE_MEMORY * (memory_gib or 0)
    fits = vram_gib <= usable if usable else None
    say(f"memory   {vram_gib:.1f} GiB for batch_size {c.batch_size}, estimated")
    say(*(f"           {part:<13} {gib:5.2f}" for part, gib in parts.items()))
    if usable:
        verdict = "fits in" if fits else "does not fit in"
        say(f"         {verdict} {usable:.1f} of {memory_gib:.3g} GiB, without a desktop")
    figures |= dict(vram_gib=vram_gib, vram_parts_gib=parts, fits=fits)

    # Without a dataset, assume shards with as many tokens as the run reads or downloads
    stored = dataset_tokens or min(tokens, SAMPLE_TOKENS)
    if c.dataset == FAST_DATA and not dataset_tokens:
        stored = SHARD_TOKENS * len(files_to_download(c))
    # the most at one time: those that are kept, at least two during a save, and the best
    shards_gb, files = 2 * stored / 1e9, max(c.keep_checkpoints, 2) + 1
    disk_gb = shards_gb + files * checkpoint_gb
    shards = f"{shards_gb:.3g} GB of shards ({short(stored)} tokens)"
    say(f"disk     {disk_gb:.3g} GB: {shards} and {files} checkpoints of {checkpoint_gb:.2g} GB")
    figures |= dict(checkpoint_gb=checkpoint_gb, disk_gb=disk_gb)

    if options.watts:  # the rest of the machine draws more
        kwh = gpus * options.watts / 1000 * hours_total
        price = options.price_kwh and kwh * options.price_kwh
        costs = f", cost {price:.2f}" if price else ""
        say(f"energy   {kwh:.3g} kWh at {options.watts:.3g} W per GPU{costs}")
        figures |= dict(kwh_total=kwh, cost=price)
    return figures
