"""
This trainer and a checkout of karpathy/nanoGPT in turn, on the same work.

    python bench.py peer config/gpt124m_4070.py --nanogpt=../nanoGPT
"""

import contextlib
import importlib.util
import io
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.measure import (
    Trainee,
    build,
    like,
    machine,
    new_process,
    open_data,
    readable_errors,
    window_iters,
)
from common.console import UserError, say
from configurator import Config
from training import hardware

SIDES = ("ours", "nanoGPT")
SAME_LOSS = (
    0.02  # nats: bfloat16 rounding, and nanoGPT's exact GELU instead of GPT-2's tanh formula
)


def main(config: Config, options: dict) -> dict:
    """
    This model and nanoGPT's in turn, each in a process of its own, through the same train_step:
    same weights, batches, dtype, compile setting and fused AdamW; as_shipped, nanoGPT in float32
    without a fused update, which is what it does on a CPU. Raises UserError where the work is not
    the same.
    """
    shipped, folder = options["as_shipped"], Path(options["nanogpt"] or "")
    if not options["nanogpt"] or not (folder / "model.py").is_file():
        raise UserError(
            f"nanogpt: {options['nanogpt'] or 'not given'}; --nanogpt= needs a checkout of karpathy/nanoGPT"
        )
    if not (config.tie_weights and config.model == "gpt2" and config.optimizer == "adamw"):
        raise UserError(
            "tie_weights, model, optimizer: nanoGPT has tied weights, GPT-2, AdamW; with anything else the work "
            "is not the same"
        )
    hw = hardware.set_up(config)
    if shipped not in (None, "eager", "compiled") or shipped and hw.device.type != "cpu":
        raise UserError(f"as_shipped: {shipped!r} is none of eager, compiled; for a CPU")
    theirs = replace(config, compile=shipped == "compiled", dtype="float32") if shipped else config
    with readable_errors(config):
        first, seconds, memory = take_turns(
            config, theirs, folder, not shipped, options["trials"] or 5
        )
    ratios = [nanogpt / ours for ours, nanogpt in zip(seconds["ours"], seconds["nanoGPT"])]
    speed, spread = statistics.median(ratios), [min(ratios), max(ratios)]
    memory_ratio = memory["ours"] / memory["nanoGPT"] if memory["ours"] else None
    for side in SIDES:
        rate = config.iter_tokens / statistics.median(seconds[side])
        say(
            f"{side:<8} {rate:>9,.0f} tok/s, first loss {first[side]['first_loss']:.4f}"
            + (f", memory {memory[side]:.2f} GiB" if memory[side] else "")
        )
    say(
        f"ours / nanoGPT: {speed:.3f} x the tokens/s ({spread[0]:.3f} to {spread[1]:.3f} over {len(ratios)} pairs of windows)"
        + (f", {memory_ratio:.3f} x the memory" if memory_ratio else "")
    )
    return dict(
        as_shipped=shipped,
        speed_ratio=speed,
        speed_ratio_range=spread,
        seconds_per_iter=seconds,
        memory_ratio=memory_ratio,
        memory_gib=memory,
        tokens_per_iter=config.iter_tokens,
        first=first,
        machine=machine(hw),
    )


def take_turns(
    config: Config, theirs: Config, nanogpt: Path, fused: bool, trials: int
) -> tuple[dict, dict, dict]:
    """
    For each side: its parameters and first loss, the seconds per iteration of each trial, and its
    memory in GiB. Raises UserError where the sides do not do the same work.
    """
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            for _ in SIDES
        ]
        pools = {side: stack.enter_context(new_process()) for side in SIDES}
        given = dict(ours=(config, folders[0]), nanoGPT=(theirs, folders[1], nanogpt, fused))
        first = {
            side: pools[side].submit(start_side, *given[side]).result() for side in SIDES
        }  # one at a time, for memory
        for what, tolerance in (("parameters", 0), ("first_loss", SAME_LOSS)):
            a, b = (first[side][what] for side in SIDES)
            if abs(a - b) > tolerance:
                raise UserError(
                    f"nanogpt: other work: {what.replace('_', ' ')} {a:.10g} here, {b:.10g} there"
                )
        iters = window_iters(max(pool.submit(time_side, 1).result()[0] for pool in pools.values()))
        seconds, memory = {side: [] for side in SIDES}, {}
        for trial in tqdm(range(trials), desc="peer", disable=None):
            for side in SIDES[:: 1 if trial % 2 else -1]:
                taken, memory[side] = pools[side].submit(time_side, iters).result()
                seconds[side].append(taken)
    return first, seconds, memory


started: tuple[
    Trainee, float
]  # in the process of one side: what start_side built, and the memory in use before


def start_side(
    config: Config, tokens: Path, nanogpt: Path | None = None, fused: bool = True
) -> dict:
    """
    Build one side in this process and run its first iteration. nanoGPT's keeps the system's
    handling of memory.
    """
    global started
    hw = hardware.set_up(config, keep_memory=not nanogpt)
    before = 0 if hw.device.type == "cuda" else hw.peak_memory_gib() or 0
    with readable_errors(config):
        side = build(config, hw, open_data(config, tokens))
        side = nanogpt_trainee(side, nanogpt, fused) if nanogpt else side
        started = side, before
        first = dict(
            parameters=sum(p.numel() for p in side.model.parameters()),
            first_loss=side.step()[0].item(),
        )
        torch.cuda.empty_cache()  # the other side's turn
        return first


def time_side(iters: int) -> tuple[float, float | None]:
    """
    Seconds per iteration of the side in this process, and the most memory it has taken, GiB; None
    where unknown.
    """
    side, before = started
    with readable_errors(side.config):
        if side.hw.device.type == "cuda":
            side.timed(1)  # takes from the card what the last call gave back
        seconds, peak = side.timed(iters), side.hw.peak_memory_gib()
        torch.cuda.empty_cache()
        return seconds, peak and peak - before


def nanogpt_trainee(ours: Trainee, folder: Path, fused: bool) -> Trainee:
    """The same trainee with nanoGPT's model in it, which takes over our weights."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    theirs = importlib.util.module_from_spec(spec)
    c, names = (
        ours.config,
        ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias"),
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            spec.loader.exec_module(theirs)
            sizes = {name: getattr(ours.model.config, name) for name in names}
            model = theirs.GPT(theirs.GPTConfig(**sizes)).to(ours.hw.device)
            model.load_state_dict(ours.model.state_dict())
            groups = model.configure_optimizers(
                c.weight_decay, c.learning_rate, (c.beta1, c.beta2), ours.hw.device.type
            )
    except (AttributeError, ImportError, TypeError, RuntimeError) as error:
        if hardware.is_out_of_memory(error):
            raise
        raise UserError(
            f"nanogpt: {folder} holds other work: {' '.join(str(error).split()[:30])}"
        ) from None
    groups = [
        dict(params=group["params"], weight_decay=group["weight_decay"])
        for group in groups.param_groups
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2), fused=fused)
    compiled = torch.compile(model) if c.compile else model
    return replace(
        ours,
        model=model,
        step_model=like(model, lambda x, y: compiled(x, y)[1]),
        optimizer=optimizer,
    )
