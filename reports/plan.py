"""
bench.py's mode plan: tokens, FLOPs, hours, memory, energy and cost of a run before it starts, for
any GPU of gpus.csv.

The time per iteration is given (--iter_seconds), taken from a run's log (--from_run), or estimated
from the GPU's peak at an assumed MFU, with a range; without a GPU it is measured. Everything else
follows from it. A plan is a flat dict of figures, None if unknown: memory in GiB, disk in GB.
"""

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.console import (
    UserError,
    count,
    duration,
    parse_count,
    print_err,
    raise_if_any,
    say,
    table_lines,
    warn,
)
from configurator import NEVER, Config
from data.shards import MOST_TOKENS, missing_dataset_message, open_dataset, vocab_where_missing
from data.tokenizer import GPT2_VOCAB
from model import GPTConfig
from reports.cards import resolve_gpu, short_name
from reports.memory import (
    checkpoint_bytes,
    checkpoint_files,
    count_parameters,
    fitting_batch,
    memory_bytes,
)
from reports.records import percentile, read_run
from train import model_config
from training import hardware
from training.clock import SAVE_EVERY, next_time
from training.gpus import GIB, read_gpu_table, row_peak
from training.hardware import count_flops
from training.ranks import check_shares

# MFU of compiled GPT-2 training as (low, likely, high), for GPUs without a published measurement in
# gpus.csv. Published: four GeForce cards 55% to 84%, 18 kinds of others 25% to 58%. The peak of a
# laptop GPU is for its highest boost clock; the lowest is 0.6 to 0.8 of it.
GEFORCE_MFU = (0.45, 0.65, 0.85)
LAPTOP_MFU = (0.25, 0.50, 0.80)
OTHER_MFU = (0.25, 0.35, 0.50)
MFU_MARGIN = 0.1  # around published values, which are for other programs and machines
CHECKPOINT_BYTES_PER_SEC = 0.5e9  # assumed
# Assumed without --link_gbits, in GB/s: in a machine PCIe 4.0 without peer access, unless gpus.csv
# has another link; between machines 100 Gbit/s. Ten bits on the link carry a byte.
PCIE_GBS, NETWORK_GBS, GPUS_OF_A_MACHINE = 12, 10, 8
# The driver needs the rest of the memory. Torch reports less than the data sheet, especially with
# ECC (a T4 14.6 of 16 GiB), and a desktop uses some.
USABLE_MEMORY, USABLE_OF_DATA_SHEET = 0.95, 0.9
# Ten iterations with more FLOPs would take a CPU many minutes; GPT-2 124M's would take hours
MOST_FLOPS_MEASURED = 1e14
# relative; older logs have FLOPs by a formula that also counts norms
FLOPS_TOLERANCE = 0.01
# Repeating data up to four times is nearly as good as new data (arXiv:2305.16264)
MOST_EPOCHS = 6
# keys of the configuration that a plan contains
TAKEN_OVER = ("max_iters", "batch_size", "gradient_accumulation_steps")

# -----------------------------------------------------------------------------
# The GPU


def card_of_row(row: dict[str, str], config: Config) -> dict:
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if row["bf16_tflops"] else "float16"
    peak = config.peak_tflops or row_peak(row, dtype, config.tf32)
    memory = float(row["memory_gib"])
    return dict(gpu=short_name(row), dtype=dtype, peak_tflops=peak, gpu_memory_gib=memory)


def card_named(name: str, config: Config) -> dict:
    row = resolve_gpu(name)
    if config.dtype == "bfloat16" and not row["bf16_tflops"]:
        raise UserError(f"dtype: a {short_name(row)} only emulates bfloat16; --dtype=float16")
    return card_of_row(row, config)


def card_here(config: Config) -> dict:
    raise_if_any(hardware.check_device(config))
    hw, memory = hardware.set_up(config), None
    if hw.device.type == "cuda":
        memory = torch.cuda.get_device_properties(hw.device).total_memory / GIB
    dtype, peak = hw.dtype_name, hw.peak_tflops
    return dict(gpu=hw.name, dtype=dtype, peak_tflops=peak, gpu_memory_gib=memory)


def assumed_mfu(card: dict) -> tuple[tuple[float, float, float], str]:
    """(low, likely, high), and where they come from."""
    published = {short_name(row): row["mfu_percent"] for row in read_gpu_table()}
    if percent := published.get(card["gpu"].removeprefix("NVIDIA ")):
        low, high = float(percent.split("-")[0]) / 100, float(percent.split("-")[-1]) / 100
        span = (1 - MFU_MARGIN) * low, (low + high) / 2, (1 + MFU_MARGIN) * high
        return span, f"others measured {percent}% in bfloat16 on this GPU"
    if "Laptop" in card["gpu"]:
        return LAPTOP_MFU, "a laptop's power limit decides"
    of_its_kind = GEFORCE_MFU if "GeForce" in card["gpu"] else OTHER_MFU
    return of_its_kind, "no measurement in training/gpus.csv"


# -----------------------------------------------------------------------------
# The pace: the time per iteration on all GPUs together, and where it comes from


def estimated_pace(config: Config, model: GPTConfig, card: dict, gpus: int) -> dict:
    known = "give --iter_seconds or --from_run"
    if not card["peak_tflops"]:
        hint = f"name another GPU, as in --gpu=4070, or {known}"
        raise UserError(f"gpu: unknown peak of {card['gpu']} in {card['dtype']}; {hint}")
    flops = count_flops(model)
    if flops is None:
        raise UserError(f"model: FLOPs not counted; {known}")
    (low, likely, high), basis = assumed_mfu(card)
    at_peak = flops * config.iter_tokens / (card["peak_tflops"] * 1e12 * gpus)
    if config.recompute:
        # the blocks' forward pass, a third of their work, runs a second time
        head = 6 * model.n_embd * model.vocab_size
        at_peak *= 1 + (flops - head) / flops / 3
    source = f"estimated at {likely:.0%} MFU, range {low:.0%} to {high:.0%}: {basis}"
    span = [at_peak / high, at_peak / low]
    return dict(pace=source, iter_seconds=at_peak / likely, iter_seconds_range=span)


def known_pace(source: str, seconds: float) -> dict:
    return dict(pace=source, iter_seconds=seconds, iter_seconds_range=[seconds, seconds])


def pace_of_run(config: Config, model: GPTConfig, options: Namespace) -> tuple[dict, dict]:
    """
    The GPU of a run, and the pace of `config` by the run's median iteration, without the run's
    exchange of gradients, so that the plan's exchange is the only one. Raises UserError if the log
    has no iteration, another model, or less time than the exchange takes.
    """
    run = Path(options.from_run)
    path, start, rate = run / "metrics.jsonl", {}, None
    if path.is_file():
        records = read_run(path)
        start, rate = records.start, percentile(records.step["tokens_per_sec"], 50)
    if not rate:
        raise UserError(f"from_run: {path} holds no iteration; give the out_dir of a run")
    theirs, ours = start["flops_per_token"], count_flops(model)
    same_flops = not (theirs and ours) or math.isclose(theirs, ours, rel_tol=FLOPS_TOLERANCE)
    if start["parameters"] != count_parameters(model) or not same_flops:
        differ = "trained another model than this configuration and code"
        raise UserError(f"from_run: {run} {differ}; give the run's own config file, code and data")
    n, seconds = start.get("world_size", 1), start["tokens_per_iter"] / rate
    exchange, link = exchange_seconds(start["device"], n, start["parameters"], options)
    if exchange > seconds:
        short = f"an iteration took {seconds:.3g} s, {exchange:.3g} s for its gradients"
        raise UserError(f"from_run: {short} at {link:g} GB/s; try --link_gbits=")
    share = config.iter_tokens / start["tokens_per_iter"] * n / options.gpus
    # on a slower link, more of the same time was exchange
    span = [share * (seconds - exchange / 2), share * max(0.0, seconds - 2 * exchange)]
    pace = dict(pace=f"measured in {run}", iter_seconds=share * (seconds - exchange))
    card = dict(gpu=start["device"], dtype=start["dtype"], peak_tflops=start["peak_tflops"])
    return card | dict(gpu_memory_gib=None), pace | dict(iter_seconds_range=span)


def card_and_pace(config: Config, model: GPTConfig, options: Namespace) -> tuple[dict, dict]:
    """
    The GPU: named, else the run's, else this machine's. The pace: known, else measured if this
    machine has no GPU, else estimated.
    """
    card = card_named(options.gpu, config) if options.gpu else None
    if options.from_run:
        card_of_run, pace = pace_of_run(config, model, options)
        if card and card["gpu"] not in card_of_run["gpu"]:
            where = f"{options.from_run} ran on {card_of_run['gpu']}"
            raise UserError(f"gpu: {where}, not on {card['gpu']}; leave out one of the two flags")
        return card or card_of_run, pace
    card = card or card_here(config)
    if options.iter_seconds:
        return card, known_pace("given", options.iter_seconds / options.gpus)
    work = 10 * config.iter_tokens * (count_flops(model) or 0)
    if not (card["gpu_memory_gib"] or card["peak_tflops"] or work > MOST_FLOPS_MEASURED):
        seconds = options.measure(config)["step_ms"] / 1000 / options.gpus
        return card, known_pace("measured here", seconds)
    return card, estimated_pace(config, model, card, options.gpus)


# -----------------------------------------------------------------------------
# The plan


def make_plan(
    config: Config, model: GPTConfig, card: dict, pace: dict, options: Namespace, hours: float = 0
) -> dict:
    """
    All figures of a run; `hours`: of a run with --hours or --until. In a plan, hours and kwh are of
    iterations only; hours_total, kwh_total and cost include evaluations and checkpoints. watts is
    the power of one GPU, without the rest of the machine. Several GPUs share the work evenly, and
    average their gradients afterwards.
    """
    gpus, watts, most_iters = options.gpus, options.watts, config.max_iters
    params, flops = count_parameters(model), count_flops(model)
    p = card | pace | memory_figures(config, model, card, options)
    p |= exchange_figures(p, params, options)
    if hours:
        config = with_iterations(config, hours, p)
    tokens, dataset_tokens = config.iter_tokens * config.max_iters, options.dataset_tokens
    p |= {key: getattr(config, key) for key in TAKEN_OVER}
    p |= dict(gpus=gpus, tokens_per_iter=config.iter_tokens, total_tokens=tokens)
    p |= dict(dataset_tokens=dataset_tokens, epochs=dataset_tokens and tokens / dataset_tokens)
    p |= dict(vocab_size=model.vocab_size, params=params)
    p |= dict(flops_per_token=flops, total_flops=flops and flops * tokens, mfu=None)
    p |= time_figures(config, p)
    if flops and p["peak_tflops"]:
        p["mfu"] = flops * p["tokens_per_sec"] / (p["peak_tflops"] * 1e12 * gpus)
    if hours:
        p |= ranges_by_clock(p, hours, most_iters)
    rent = options.price_hour and p["hours_total"] * gpus * options.price_hour
    p |= dict(watts=watts, kwh=None, kwh_total=None, cost=None, rent=rent)
    if watts:
        kilowatts = watts * gpus / 1000
        p |= dict(kwh=p["hours"] * kilowatts, kwh_total=p["hours_total"] * kilowatts)
        p["cost"] = options.price_kwh and p["kwh_total"] * options.price_kwh
    return p | disk_figures(config, p)


def exchange_seconds(gpu: str, n: int, params: int, options: Namespace) -> tuple[float, float]:
    """
    Seconds to average the float32 gradients, and the link's GB/s. Each of n GPUs sends and receives
    2 (n - 1) / n times all gradients. --link_gbits counts if it is for the same kind of link.
    """
    links = {short_name(row): row["link_gbs"] for row in read_gpu_table()}
    inside = float(links.get(gpu.removeprefix("NVIDIA ")) or PCIE_GBS)
    across = n > GPUS_OF_A_MACHINE
    link = NETWORK_GBS if across else inside
    if options.link_gbits and across == (options.gpus > GPUS_OF_A_MACHINE):
        link = options.link_gbits / 10
    return 2 * (n - 1) / n * 4 * params / (link * 1e9), link


def exchange_figures(p: dict, params: int, options: Namespace) -> dict:
    """
    The time per iteration, with averaging the gradients after it (docs/internals/multi_gpu.md). The
    range includes that of the pace, and a link from twice to half as fast.
    """
    seconds, link = exchange_seconds(p["gpu"], options.gpus, params, options)
    low, high = p["iter_seconds_range"]
    span = sorted((low + seconds / 2, high + 2 * seconds))
    times = dict(iter_seconds=p["iter_seconds"] + seconds, iter_seconds_range=span)
    return times | dict(exchange_seconds=seconds, link_gbs=link)


def memory_figures(config: Config, model: GPTConfig, card: dict, options: Namespace) -> dict:
    parts = memory_bytes(config, model, card["dtype"], config.batch_size)
    vram, usable, fits, best = sum(parts.values()) / GIB, None, None, None
    if memory := card["gpu_memory_gib"]:
        usable = (USABLE_OF_DATA_SHEET if options.gpu else USABLE_MEMORY) * memory
        fits = vram <= usable
        sequences = config.iter_sequences // options.gpus
        best = fitting_batch(config, model, card["dtype"], sequences, usable * GIB)
    checkpoint_gb = checkpoint_bytes(config, model) / 1e9
    parts_gib = {part: size / GIB for part, size in parts.items()}
    p = dict(vram_gib=vram, vram_parts_gib=parts_gib, checkpoint_gb=checkpoint_gb)
    return p | dict(usable_gib=usable, fits=fits, batch_size_that_fits=best)


def count_pauses(config: Config, iter_seconds: float) -> tuple[int, int]:
    """(evaluations, checkpoints) of the whole run; each evaluation except the first saves one."""
    n, evals = config.max_iters, config.eval_interval
    saves = config.checkpoint_interval or math.ceil(SAVE_EVERY / iter_seconds)
    saved_at = {n, *range(evals, n, evals), *range(saves, n, saves)}
    return math.ceil(n / evals) + 1, len(saved_at)


def time_figures(config: Config, p: dict) -> dict:
    """`p` has the pace and the size of a checkpoint."""
    evaluations, checkpoints = count_pauses(config, p["iter_seconds"])
    rate = config.iter_tokens / p["iter_seconds"]
    # only the forward pass, a third of the work per token, on two splits
    eval_seconds = 2 * config.eval_size / rate / 3
    checkpoint_seconds = 1e9 * p["checkpoint_gb"] / CHECKPOINT_BYTES_PER_SEC
    pauses = evaluations * eval_seconds + checkpoints * checkpoint_seconds
    hours = config.max_iters * p["iter_seconds"] / 3600
    span = [config.max_iters * seconds / 3600 for seconds in p["iter_seconds_range"]]
    times = dict(hours=hours, hours_range=span, hours_total=hours + pauses / 3600)
    times |= dict(evaluations=evaluations, eval_seconds=eval_seconds, tokens_per_sec=rate)
    return times | dict(checkpoints=checkpoints, checkpoint_seconds=checkpoint_seconds)


def with_iterations(config: Config, hours: float, p: dict) -> Config:
    """
    For a run with --hours: with as many iterations as fit, and train.py's intervals. Startup and
    compilation, some minutes, are not counted.
    """
    most = min(config.max_iters, int(3600 * hours / p["iter_seconds"]))
    if most < 1:
        raise UserError(f"hours: {hours:.3g} hold no iteration of {p['iter_seconds']:.3g} s")
    evals = config.eval_interval if config.eval_interval < NEVER else math.ceil(most / 20)
    config = replace(config, max_iters=most, eval_interval=evals)
    # evaluations and checkpoints take part of the hours
    share = min(1.0, hours / time_figures(config, p)["hours_total"])
    return replace(config, max_iters=max(1, int(most * share)))


def ranges_by_clock(p: dict, hours: float, most_iters: int) -> dict:
    """The hours are given, so a faster GPU means more iterations, up to `most_iters`."""
    pauses = p["hours_total"] - p["hours"]
    # with --max_iters there may be time to spare
    room = p["hours"] if p["max_iters"] < most_iters else hours - pauses
    span = [min(room, most_iters * seconds / 3600) for seconds in p["iter_seconds_range"]]
    iters = [min(most_iters, 3600 * room / seconds) for seconds in p["iter_seconds_range"]]
    return dict(hours_range=span, tokens_range=[n * p["tokens_per_iter"] for n in reversed(iters)])


def disk_figures(config: Config, p: dict) -> dict:
    """
    GB of the shards and of all checkpoints that are kept. For a stream, and without a dataset, the
    shards hold all tokens that the run may read (with --hours, at the upper end of the range), at
    most FineWeb's sample.
    """
    most = max(p.get("tokens_range", [p["total_tokens"]]))
    tokens = p["dataset_tokens"] or min(most, MOST_TOKENS)
    shards = 2 * tokens / 1e9
    kept = checkpoint_files(config)
    disk = shards + kept * p["checkpoint_gb"]
    return dict(disk_tokens=tokens, shards_gb=shards, checkpoints_kept=kept, disk_gb=disk)


# -----------------------------------------------------------------------------
# For people


def hours_text(hours: float) -> str:
    """21.7 h; below an hour 12m30s."""
    return f"{hours:.1f} h" if hours >= 1 else duration(3600 * hours)


def plan_lines(p: dict, model: GPTConfig) -> list[str]:
    epochs = "epochs n/a (--dataset_tokens=)"
    if p["epochs"]:
        epochs = f"{p['epochs']:.2f} epochs of {count(p['dataset_tokens'])}"
    low, high = map(count, p.get("tokens_range") or (0, 0))
    if low != high:
        epochs += f"; {low} to {high} by the range of speeds"
    compute = f"{p['total_flops']:.2e} FLOPs" if p["total_flops"] else "FLOPs n/a"
    peak = f"{p['peak_tflops']} TFLOP/s dense peak" if p["peak_tflops"] else "peak unknown"
    mfu = f"{p['mfu']:.1%}" if p["mfu"] else "n/a"
    low, high = map(hours_text, p["hours_range"])
    span = f" ({low} to {high})" if low != high else ""
    known = "8 GPUs per machine, 100 Gbit/s" if p["gpus"] > GPUS_OF_A_MACHINE else "1 machine"
    seconds = p["exchange_seconds"]
    exchange = f"{seconds:.3f} s of an iteration ({seconds / p['iter_seconds']:.0%})"
    average = f"averaging gradients takes {exchange}, at {p['link_gbs']:g} GB/s"
    link = f"\nlink     {average} (without --link_gbits: {known})" if p["gpus"] > 1 else ""
    shards = f"{p['shards_gb']:.3g} GB of shards ({count(p['disk_tokens'])} tokens)"
    kept = f"{p['checkpoints_kept']} checkpoints of {p['checkpoint_gb']:.2g} GB"
    return [
        f"model    {p['params'] / 1e6:.2f}M parameters, vocabulary {p['vocab_size']}, "
        f"{count(p['flops_per_token'] or 0)} FLOPs per token",
        f"tokens   {p['tokens_per_iter']:,} per iteration x {p['max_iters']:,} = "
        f"{p['total_tokens']:,}, {epochs}",
        f"compute  {compute}",
        f"GPU      {p['gpus']} x {p['gpu']}, {p['dtype']}, {peak}",
        f"speed    {p['iter_seconds']:.3f} s per iteration ({p['pace']}), "
        f"{p['tokens_per_sec']:,.0f} tok/s, mfu {mfu}{link}",
        f"time     {hours_text(p['hours'])}{span} of iterations; {hours_text(p['hours_total'])} "
        f"with {p['evaluations']} evaluations of {p['eval_seconds']:.1f} s and "
        f"{p['checkpoints']} checkpoints of {p['checkpoint_seconds']:.1f} s",
        *memory_lines(p),
        f"disk     {p['disk_gb']:.3g} GB: {shards} and {kept}",
        energy_line(p),
        *rent_lines(p),
    ]


def memory_lines(p: dict) -> list[str]:
    parts = ", ".join(f"{name} {size:.2f}" for name, size in p["vram_parts_gib"].items())
    whose = f"estimated for batch_size {p['batch_size']} and the shipped blocks and head"
    line = f"memory   {p['vram_gib']:.1f} GiB {whose}: {parts}"
    if p["fits"] is None:
        return [line]
    verdict = "fits in" if p["fits"] else "does not fit in"
    verdict += f" {p['usable_gib']:.1f} GiB"
    advice = ", not even with batch_size=1; try --recompute=True, a smaller block_size or model"
    if best := p["batch_size_that_fits"]:
        accumulation = p["batch_size"] * p["gradient_accumulation_steps"] // best
        pair = f"--batch_size={best} --gradient_accumulation_steps={accumulation}"
        advice = f"; the largest that fits: {pair}"
    return [line, f"         {verdict}{advice}"]


def energy_line(p: dict) -> str:
    if p["kwh"] is None:
        return "energy   n/a (--watts= the power of one GPU)"
    energy = f"{p['kwh']:.3g} kWh of iterations, {p['kwh_total']:.3g} kWh in all"
    power = f"{p['watts']:g} W per GPU (without the rest of the machine)"
    cost = "n/a (--price_kwh=)" if p["cost"] is None else f"{p['cost']:.2f}"
    return f"energy   {energy} at {power}; cost {cost}"


def rent_lines(p: dict) -> list[str]:
    if p["rent"] is None:
        return []
    price, pauses = p["rent"] / p["hours_total"], p["hours_total"] - p["hours"]
    low, high = (price * (hours + pauses) for hours in p["hours_range"])
    span = f" ({low:.2f} to {high:.2f})" if low != high else ""
    return [f"rent     {p['rent']:.2f}{span} for {p['hours_total'] * p['gpus']:.1f} GPU hours"]


def card_lines(plans: list[dict]) -> list[str]:
    """One line per GPU, the fastest first."""
    rows = [["GPU", "GiB", "dtype", "TFLOP/s", "mfu", "tok/s", "time", "(range)", "batch_size"]]
    for p in sorted(plans, key=lambda p: p["hours"]):
        card = [p["gpu"], f"{p['gpu_memory_gib']:.0f}", p["dtype"], str(p["peak_tflops"])]
        span = " to ".join(map(hours_text, p["hours_range"]))
        speed = [f"{p['mfu']:.0%}", f"{p['tokens_per_sec']:,.0f}", hours_text(p["hours"]), span]
        rows.append([*card, *speed, str(p["batch_size_that_fits"] or "too small")])
    fits = "batch_size is the largest that fits (estimated)"
    return [*table_lines(rows), f"mfu is assumed, see docs/plan.md; {fits}"]


# -----------------------------------------------------------------------------
# The mode


def add_flags(parser: ArgumentParser) -> None:
    """The flags of this mode; those of the configuration are load_config's."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="a GPU of training/gpus.csv such as 4070, or all")
    add("--gpus", type=parse_count, metavar="N", help="number of GPUs; 1 if not given")
    add("--link_gbits", type=float, metavar="G", help="the link between them, Gbit/s")
    add("--iter_seconds", type=float, metavar="S", help="seconds per iteration on one GPU")
    add("--from_run", metavar="OUT_DIR", help="the same, from the log of a run")
    add("--dataset_tokens", type=parse_count, metavar="N", help="such as 10B, for the epochs")
    add("--watts", type=float, metavar="W", help="power of one GPU, for the energy")
    add("--price_kwh", type=float, metavar="P", help="price of a kWh, for the cost of the energy")
    add("--price_hour", type=float, metavar="P", help="price of one GPU per hour, for the rent")


def plan(config: Config, options: Namespace, measure: Callable[[Config], dict]) -> dict:
    """
    Print the plan and return it for --json. `options`: plan's flags, None where not given.
    `measure`: bench.py's.
    """
    options.measure = measure
    options.gpus = options.gpus or 1
    of_one_gpu = options.from_run, options.iter_seconds, options.watts, options.price_hour
    if options.gpu == "all" and (any(of_one_gpu) or config.by_clock):
        its = "--from_run, --iter_seconds, --watts, --price_hour, --hours and --until"
        raise UserError(f"gpu: {its} are not for all; name one GPU")
    raise_if_any(check_shares(config, options.gpus))
    vocab = vocab_where_missing(config)
    if vocab is None:
        data = open_dataset(config.dataset)
        vocab = data.vocab
        options.dataset_tokens = options.dataset_tokens or len(data.train)
        config = replace(config, eval_tokens=min(config.eval_size, len(data.val)))
    model = model_config(config, vocab, flash=config.flash, compiled=config.compile)
    if options.gpu == "all":
        return plan_all(config, model, options)
    card, pace = card_and_pace(config, model, options)
    p = make_plan(config, model, card, pace, options, hours_by_clock(config))
    if p["epochs"] and p["epochs"] > MOST_EPOCHS and not config.dropout:
        little = f"{p['epochs']:.1f} epochs: more than about {MOST_EPOCHS} teach little"
        warn(f"{little}; prepare a larger dataset, or add --dropout=0.1")
    if vocab == GPT2_VOCAB and not (options.dataset_tokens or config.stream):
        tokens = p["disk_tokens"]
        unit = 10 ** int(math.log10(tokens)) if config.by_clock else 1  # 1.71B -> 2B
        print_err(missing_dataset_message(config.dataset, math.ceil(tokens / unit) * unit))
    say(*plan_lines(p, model))
    return p


def hours_by_clock(config: Config) -> float:
    """The hours of a run with --hours or --until from now on; 0 for other runs."""
    if not config.until:
        return config.hours
    hours = (next_time(config.until, time.time()) - time.time()) / 3600
    say(f"until    {config.until}, {hours_text(hours)} from now")
    return hours


def plan_all(config: Config, model: GPTConfig, options: Namespace) -> dict:
    """Plan for every GPU of gpus.csv with a known peak."""
    plans = []
    for row in read_gpu_table():
        card = card_of_row(row, config)
        if card["peak_tflops"]:
            pace = estimated_pace(config, model, card, options.gpus)
            plans.append(make_plan(config, model, card, pace, options))
    say(*card_lines(plans))
    return dict(plans=plans)
