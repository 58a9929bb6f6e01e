"""
The bill before the run: tokens, FLOPs, hours, memory, energy and cost, for any GPU of gpus.csv.

    python bench.py plan config/gpt124m_4070.py --gpu=4070 --watts=200 --price_kwh=0.30

The iteration time is given (--iter_seconds), taken from a run's log (--from_run=out/x), or
estimated from the card's peak at an assumed MFU, with a range. Everything else is arithmetic, and
each figure says what it rests on.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from common.console import UserError, count, say
from configurator import Config
from data.shards import dataset_folder, open_dataset
from data.tokenizer import GPT2_VOCAB
from model import GPTConfig
from training import hardware
from training.build import count_parameters, flops_per_token, model_config
from training.gpus import (
    USABLE_MEMORY,
    fitting_batch,
    memory_bytes,
    read_gpu_table,
    resolve_gpu,
    row_peak,
)
from training.runlog import read_records

# What compiled GPT-2 training reaches, as (low, likely, high): users' RTX 4070 logs 69 and 82 %;
# A100 PCIe 32 %,
# A100 SXM 60 %, H100 40 % (throughput published by llm.c and its readers).
ASSUMED_MFU = {True: (0.45, 0.65, 0.85), False: (0.30, 0.40, 0.60)}  # is it a GeForce?
CHECKPOINT_BYTES_PER_SEC = 0.5e9  # assumed: written, hashed and read back


@dataclass
class Card:
    name: str
    dtype: torch.dtype
    peak_tflops: float | None  # dense, for `dtype`; None: unknown
    memory_bytes: float | None


@dataclass
class Pace:
    """
    How long things take, in seconds; the range is for an iteration, `source` says where it comes
    from.
    """

    iter_seconds: float | None
    low: float | None
    high: float | None
    eval_seconds: float | None
    checkpoint_seconds: float
    source: str


# -----------------------------------------------------------------------------
# The card


def card_of_row(row: dict[str, str], config: Config) -> Card:
    half = "bfloat16" if row["bf16_tflops"] else "float16"
    dtype = getattr(torch, half if config.dtype == "auto" else config.dtype)
    peak = config.peak_tflops or row_peak(row, dtype, config.tf32)
    return Card(
        row["name"].partition("|")[0].removeprefix("NVIDIA "),
        dtype,
        peak,
        float(row["memory_gib"]) * hardware.GIB,
    )


def card_here(config: Config) -> Card:
    if problems := hardware.check_device(config):
        raise UserError(*problems)
    device = hardware.choose_device(config)
    dtype = hardware.choose_dtype(config, device)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    peak = config.peak_tflops or hardware.find_peak(device, dtype, config.tf32)
    return Card(hardware.device_name(device), dtype, peak, memory)


# -----------------------------------------------------------------------------
# The pace


def given_pace(config: Config, iter_seconds: float, params: int, source: str = "given") -> Pace:
    """
    An evaluation is forward passes alone, a third of training's work per token; a checkpoint is
    weights and moments.
    """
    eval_seconds = iter_seconds * 2 * config.eval_size / config.iter_tokens / 3  # two splits
    return Pace(
        iter_seconds,
        iter_seconds,
        iter_seconds,
        eval_seconds,
        12 * params / CHECKPOINT_BYTES_PER_SEC,
        source,
    )


def estimated_pace(config: Config, model: GPTConfig, card: Card, gpus: int) -> Pace:
    params, _ = count_parameters(model)
    if not card.peak_tflops:
        return Pace(
            None,
            None,
            None,
            None,
            12 * params / CHECKPOINT_BYTES_PER_SEC,
            "unknown peak: give --iter_seconds",
        )
    at_peak = flops_per_token(model) * config.iter_tokens / (card.peak_tflops * 1e12 * gpus)
    if config.recompute:  # the blocks' forward pass once more
        head = 6 * model.n_embd * model.vocab_size
        at_peak *= 1 + (flops_per_token(model) - head) / flops_per_token(model) / 3
    more = ", what is recomputed on top" * config.recompute
    low, likely, high = ASSUMED_MFU["GeForce" in card.name]
    pace = given_pace(
        config,
        at_peak / likely,
        params,
        f"estimated at {likely:.0%} MFU, range {low:.0%} to {high:.0%}{more}",
    )
    pace.low, pace.high = at_peak / high, at_peak / low
    return pace


def measured_pace(config: Config, model: GPTConfig, run: Path, gpus: int) -> tuple[Pace, Card]:
    """
    The median iteration of a run and its evaluations and checkpoints, scaled by tokens and GPUs;
    and the card it ran on.
    """
    file = run / "metrics.jsonl"
    records = (
        read_records(file.read_text(encoding="utf-8", errors="replace").splitlines())
        if file.exists()
        else []
    )
    found = {
        kind: [r for r in records if r.get("kind") == kind]
        for kind in ("start", "step", "eval", "checkpoint")
    }
    if not found["start"] or not found["step"]:
        raise UserError(f"from_run: {file} holds no iteration; give the out_dir of a run")
    start = found["start"][-1]
    if start["flops_per_token"] != flops_per_token(model):
        raise UserError(
            f"from_run: {run} trained {start['flops_per_token'] / 1e6:.1f} MFLOP/token, this configuration is "
            f"{flops_per_token(model) / 1e6:.1f}; give the run's own config file"
        )
    fewer = start.get("world_size", 1) / gpus
    seconds = fewer * statistics.median(r["step_ms"] for r in found["step"]) / 1000
    pace = given_pace(
        config,
        seconds * config.iter_tokens / start["tokens_per_iter"],
        start["parameters"],
        f"measured in {run}",
    )
    if found["eval"]:
        ran = Config(
            **{k: v for k, v in start["config"].items() if k in Config.__dataclass_fields__}
        )
        pace.eval_seconds = (
            fewer
            * statistics.median(r["seconds"] for r in found["eval"])
            * config.eval_size
            / ran.eval_size
        )
    if found["checkpoint"]:
        pace.checkpoint_seconds = statistics.median(r["seconds"] for r in found["checkpoint"])
    return pace, Card(start["device"], getattr(torch, start["dtype"]), start["peak_tflops"], None)


def count_pauses(config: Config) -> tuple[int, int]:
    """(evaluations, checkpoints) of the whole run, each evaluation saving one."""
    n, evals, saves = config.max_iters, config.eval_interval, config.checkpoint_interval
    saved = n // evals + (n // saves - n // math.lcm(evals, saves) if saves else 0)
    at_the_end = n % evals != 0 and (not saves or n % saves != 0)
    return -(-n // evals) + 1, saved + at_the_end


# -----------------------------------------------------------------------------
# The plan


def make_plan(
    config: Config,
    model: GPTConfig,
    card: Card,
    pace: Pace,
    gpus: int = 1,
    dataset_tokens: float | None = None,
    watts: float | None = None,
    price_kwh: float | None = None,
) -> dict:
    """
    All figures of a run as a flat dict, None where unknown. hours and kwh are the iterations alone,
    hours_total, kwh_total and cost the evaluations and checkpoints too. watts is one GPU's draw;
    the rest of the machine is not in it. Several GPUs share the work evenly; what averaging their
    gradients costs stands apart, as exchange_gb and link_gb_per_sec.
    """
    (params, n), flops = count_parameters(model), flops_per_token(model)
    tokens = config.iter_tokens * config.max_iters
    parts = memory_bytes(model, config.batch_size, card.dtype, config.compile, config.optimizer)
    needed, usable = sum(parts.values()), USABLE_MEMORY * (card.memory_bytes or math.inf)
    best = card.memory_bytes and fitting_batch(
        model, config.iter_sequences // gpus, usable, card.dtype, config.compile, config.optimizer
    )
    evaluations, checkpoints = count_pauses(config)
    exchanged = (
        2 * (gpus - 1) / gpus * 4 * params / 1e9
    )  # a ring all-reduce of float32 gradients: each GPU sends that much
    p = dict(
        gpu=card.name,
        gpus=gpus,
        dtype=str(card.dtype).removeprefix("torch."),
        peak_tflops=card.peak_tflops,
        batch_size=config.batch_size,
        block_size=config.block_size,
        max_iters=config.max_iters,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        tokens_per_iter=config.iter_tokens,
        total_tokens=tokens,
        dataset_tokens=dataset_tokens,
        epochs=tokens / dataset_tokens if dataset_tokens else None,
        params=params,
        params_in_products=n,
        flops_per_token=flops,
        flops_6nd=6 * n * tokens,
        total_flops=flops * tokens,
        iter_seconds=pace.iter_seconds,
        pace=pace.source,
        evaluations=evaluations,
        eval_seconds=pace.eval_seconds,
        checkpoints=checkpoints,
        checkpoint_seconds=pace.checkpoint_seconds,
        vram_gib=needed / hardware.GIB,
        vram_parts_gib={part: size / hardware.GIB for part, size in parts.items()},
        gpu_memory_gib=card.memory_bytes and card.memory_bytes / hardware.GIB,
        fits=needed <= usable if card.memory_bytes else None,
        batch_size_that_fits=best,
        watts=watts,
        price_kwh=price_kwh,
        exchange_gb=exchanged,
        link_gb_per_sec=9 * exchanged / pace.iter_seconds
        if pace.iter_seconds
        else None,  # 90 %: a ninth on top, unhidden
    )
    known = dict.fromkeys(
        ("hours", "hours_range", "hours_total", "tokens_per_sec", "mfu", "kwh", "kwh_total", "cost")
    )
    if pace.iter_seconds:
        hours = config.max_iters * pace.iter_seconds / 3600
        total = (
            hours + (evaluations * pace.eval_seconds + checkpoints * pace.checkpoint_seconds) / 3600
        )
        tokens_per_sec = p["tokens_per_iter"] / pace.iter_seconds
        kilowatts = watts and watts * gpus / 1000
        known = dict(
            hours=hours,
            hours_range=[config.max_iters * s / 3600 for s in (pace.low, pace.high)],
            hours_total=total,
            tokens_per_sec=tokens_per_sec,
            mfu=flops * tokens_per_sec / (card.peak_tflops * 1e12 * gpus)
            if card.peak_tflops
            else None,
            kwh=kilowatts and hours * kilowatts,
            kwh_total=kilowatts and total * kilowatts,
            cost=kilowatts and price_kwh and total * kilowatts * price_kwh,
        )
    return p | known


def plan_lines(p: dict, vocab: int) -> list[str]:
    """A plan for people."""
    epochs = (
        f"{p['epochs']:.2f} epochs of {count(p['dataset_tokens'])}"
        if p["epochs"]
        else "epochs n/a (--dataset_tokens=)"
    )
    lines = [
        f"model    {p['params'] / 1e6:.2f}M parameters, {p['flops_per_token'] / 1e6:.1f} MFLOP/token "
        f"(6 N + 12 L H Q T, N = {p['params_in_products'] / 1e6:.2f}M), vocabulary {vocab}",
        f"tokens   {p['tokens_per_iter']:,} per iteration x {p['max_iters']:,} = {p['total_tokens']:,}, {epochs}",
        f"compute  {p['total_flops']:.2e} FLOPs (6 N D alone {p['flops_6nd']:.2e})",
        f"card     {p['gpus']} x {p['gpu']}, {p['dtype']}, "
        + (f"{p['peak_tflops']} TFLOP/s dense peak" if p["peak_tflops"] else "peak unknown"),
    ]
    if p["hours"] is None:
        return lines + [f"time     n/a, {p['pace']}", *memory_lines(p)]
    low, high = p["hours_range"]
    lines += [
        f"speed    {p['iter_seconds']:.3f} s per iteration ({p['pace']}), {p['tokens_per_sec']:,.0f} tok/s, mfu "
        + (f"{p['mfu']:.1%}" if p["mfu"] else "n/a"),
        f"time     {p['hours']:.1f} h"
        + (f" ({low:.1f} to {high:.1f})" if low < high else "")
        + f" of iterations; {p['hours_total']:.1f} h with {p['evaluations']} evaluations of {p['eval_seconds']:.1f} s and "
        f"{p['checkpoints']} checkpoints of {p['checkpoint_seconds']:.1f} s",
        *memory_lines(p),
    ]
    if p["gpus"] > 1:
        lines.append(
            f"link     {p['exchange_gb']:.3g} GB sent and received by each GPU per iteration; 90 % efficiency needs "
            f"{p['link_gb_per_sec']:.3g} GB/s"
        )
    if p["kwh"] is None:
        return lines + ["energy   n/a (--watts= the draw of one GPU)"]
    cost = "n/a (--price_kwh=)" if p["cost"] is None else f"{p['cost']:.2f}"
    return lines + [
        f"energy   {p['kwh']:.1f} kWh of iterations, {p['kwh_total']:.1f} kWh in all at {p['watts']:g} W a GPU "
        f"(the rest of the machine not counted); cost {cost}"
    ]


def memory_lines(p: dict) -> list[str]:
    parts = ", ".join(f"{name} {size:.2f}" for name, size in p["vram_parts_gib"].items())
    lines = [f"memory   {p['vram_gib']:.1f} GiB modelled for batch_size {p['batch_size']}: {parts}"]
    if p["fits"] is None:
        return lines
    usable, best = USABLE_MEMORY * p["gpu_memory_gib"], p["batch_size_that_fits"]
    verdict = (
        f"fits into {usable:.1f} of {p['gpu_memory_gib']:.0f} GiB"
        if p["fits"]
        else f"DOES NOT FIT into {usable:.1f} GiB"
    )
    if best is None:
        return lines + [
            f"         {verdict}, nor does batch_size 1; --recompute=True, a smaller model or block_size may"
        ]
    accum = p["batch_size"] * p["gradient_accumulation_steps"] // best
    return lines + [
        f"         {verdict}; the largest that does: --batch_size={best} --gradient_accumulation_steps={accum}"
    ]


def table_lines(plans: list[dict]) -> list[str]:
    """One line for each card, the fastest first."""
    lines = [f"{'GPU':<50}  GiB    dtype  TFLOP/s      tok/s   hours         (range) batch_size"]
    for p in sorted(plans, key=lambda p: p["hours"] or math.inf):
        start = f"{p['gpu']:<50} {p['gpu_memory_gib']:>4.0f} {p['dtype']:>8} {p['peak_tflops'] or 'n/a':>8} "
        speed = f"{'n/a':>10} {'n/a':>7} {'':>15} "
        if p["hours"]:
            span = "{:.1f} to {:.1f}".format(*p["hours_range"])
            speed = f"{p['tokens_per_sec']:>10,.0f} {p['hours']:>7.1f} {span:>15} "
        lines.append(start + speed + f"{p['batch_size_that_fits'] or 'too small':>10}")
    return lines


def main(config: Config, options: dict) -> dict:
    """
    `bench.py plan`: print the plan and return it for --json. `options` are its flags, None where
    not given.
    """
    folder, gpus = dataset_folder(config.dataset), options["gpus"] or 1
    data = open_dataset(config.dataset) if folder.is_dir() and not config.stream else None
    vocab = data.vocab if data else GPT2_VOCAB
    model = model_config(config, vocab)
    bill = dict(
        gpus=gpus,
        dataset_tokens=options["dataset_tokens"] or (len(data.train) if data else None),
        watts=options["watts"],
        price_kwh=options["price_kwh"],
    )
    check_inputs(config, options, gpus)
    if options["gpu"] == "all":
        cards = [card_of_row(row, config) for row in read_gpu_table()]
        plans = [
            make_plan(config, model, card, estimated_pace(config, model, card, gpus), **bill)
            for card in cards
        ]
        say("\n".join(table_lines(plans)))
        geforce, other = (
            "{1:.0%} MFU ({0:.0%} to {2:.0%})".format(*ASSUMED_MFU[kind]) for kind in (True, False)
        )
        say(
            f"estimated at {other}, GeForce at {geforce}; batch_size is the largest that the memory model fits in"
        )
        return dict(plans=plans)
    card = card_of_row(resolve_gpu(options["gpu"]), config) if options["gpu"] else None
    if options["from_run"]:
        pace, ran_on = measured_pace(config, model, Path(options["from_run"]), gpus)
        card = card or ran_on
    elif options["iter_seconds"]:
        source = "given" if gpus == 1 else f"given as {options['iter_seconds']:g} s on one GPU"
        pace = given_pace(
            config, options["iter_seconds"] / gpus, count_parameters(model)[0], source
        )
        card = card or card_here(config)
    else:
        card = card or card_here(config)
        pace = estimated_pace(config, model, card, gpus)
    result = make_plan(config, model, card, pace, **bill)
    say("\n".join(plan_lines(result, vocab)))
    return result


def check_inputs(config: Config, options: dict, gpus: int) -> None:
    problems = []
    if config.max_iters == 0:
        problems.append("max_iters: 0 iterations are no run to plan; --max_iters=20000")
    if config.gradient_accumulation_steps % gpus:
        problems.append(
            f"gpus: {gpus} do not divide gradient_accumulation_steps {config.gradient_accumulation_steps}"
        )
    if options["iter_seconds"] and options["from_run"]:
        problems.append("iter_seconds: from_run measures it; drop one of the two")
    if options["gpu"] == "all" and (options["iter_seconds"] or options["from_run"]):
        problems.append("gpu: one iteration time cannot serve all; name one card")
    if problems:
        raise UserError(*problems)
