"""
bench.py's mode peer: this trainer and a checkout of karpathy/nanoGPT in turn, on the same work.
"""

import importlib.util
import math
import statistics
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import measure
from common.console import UserError, say
from configurator import Config
from training import hardware

SIDES = ("ours", "nanoGPT")
# nats: bfloat16 rounding, and nanoGPT's exact GELU in place of GPT-2's tanh formula
SAME_LOSS = 0.02
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")


def main(config: Config, options: Namespace) -> dict:
    """
    This model and nanoGPT's in turn, each in a process of its own, through the same train_step:
    same weights, batches, dtype, compile setting and fused AdamW. Raises UserError where the work
    is not the same.
    """
    if not options.nanogpt or not (Path(options.nanogpt) / "model.py").is_file():
        raise UserError(f"nanogpt: {options.nanogpt}; --nanogpt= needs a clone of karpathy/nanoGPT")
    if not (config.tie_weights and config.model == "gpt2" and config.optimizer == "adamw"):
        theirs = "nanoGPT has tied weights, GPT-2 and AdamW; with others the work is not the same"
        raise UserError(f"tie_weights, model, optimizer: {theirs}")
    hw = hardware.set_up(config)
    with measure.readable_errors():
        losses, seconds, memory = take_turns(config, Path(options.nanogpt), options.trials or 5)
    pairs = zip(seconds["ours"], seconds["nanoGPT"], strict=True)
    ratios = [theirs / ours for ours, theirs in pairs]
    speed, low, high = statistics.median(ratios), min(ratios), max(ratios)
    for side in SIDES:
        rate = config.iter_tokens / statistics.median(seconds[side])
        gib = f"{memory[side] or math.nan:.2f} GiB"
        say(f"{side:<8} {rate:>9,.0f} tok/s, first loss {losses[side]:.4f}, memory {gib}")
    span = f"(median of {len(ratios)} pairs in turn, {low:.3f} to {high:.3f})"
    memory_ratio = memory["ours"] / memory["nanoGPT"] if memory["ours"] else None
    of_memory = f"{memory_ratio or math.nan:.3f} x the memory, both in {hw.dtype_name}"
    say(f"ours / nanoGPT: {speed:.3f} x the tokens/s {span}, {of_memory}")
    if hw.device.type == "cpu" and hw.dtype != torch.float32:
        say("nanoGPT's own train.py computes in float32 on a CPU: compare with --dtype=float32 too")
    result = dict(speed_ratio=speed, speed_ratio_range=[low, high], seconds_per_iter=seconds)
    result |= dict(memory_ratio=memory_ratio, memory_gib=memory, machine=measure.machine(hw))
    return result | dict(tokens_per_iter=config.iter_tokens, first_loss=losses)


def take_turns(config: Config, nanogpt: Path, trials: int) -> tuple[dict, dict, dict]:
    """
    For each side: its first loss, the seconds per iteration of each trial, and its memory in GiB.
    Raises UserError where the sides do not do the same work.
    """
    with measure.new_process() as our_process, measure.new_process() as their_process:
        processes = dict(ours=our_process, nanoGPT=their_process)
        # one after the other, so that only one needs the memory of starting
        ours = our_process.submit(start_side, config).result()
        theirs = their_process.submit(start_side, config, nanogpt).result()
        if abs(ours - theirs) > SAME_LOSS:
            raise UserError(f"nanogpt: other work: first loss {ours:.4f} here, {theirs:.4f} there")
        slower = max(process.submit(time_side, 1).result()[0] for process in processes.values())
        iters = measure.window_iters(slower)
        seconds = {side: [] for side in SIDES}
        memory = {}
        for trial in tqdm(range(trials), desc="peer", disable=None):
            # who begins changes from trial to trial
            for side in SIDES if trial % 2 else reversed(SIDES):
                taken, memory[side] = processes[side].submit(time_side, iters).result()
                seconds[side].append(taken)
    return dict(ours=ours, nanoGPT=theirs), seconds, memory


started: measure.Trainee  # in the process of one side: what start_side built


def start_side(config: Config, nanogpt: Path | None = None) -> float:
    """
    Build one side in this process and run its first iteration. Returns the loss. nanoGPT's side
    keeps the system's own handling of memory, as its users have it.
    """
    global started
    with measure.readable_errors():
        started = measure.Trainee(config, keep_memory=not nanogpt)
        if nanogpt:
            use_nanogpt(started, nanogpt)
        first_loss = started.step()[0].item()
        torch.cuda.empty_cache()  # the other side comes next
        return first_loss


def time_side(iters: int) -> tuple[float, float | None]:
    """Seconds per iteration of the side in this process, and its memory as Trainee has it."""
    with measure.readable_errors():
        if started.hw.device.type == "cuda":
            started.timed(1)  # takes back the memory that the last call released
        seconds = started.timed(iters)
        torch.cuda.empty_cache()
        return seconds, started.memory_gib()


class LossOnly(torch.nn.Module):
    """nanoGPT's model returns (logits, loss); train_step wants the loss."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y)[1]


def use_nanogpt(side: measure.Trainee, folder: Path) -> None:
    """Put nanoGPT's model in place of ours, with our weights."""
    c = side.config
    betas = (c.beta1, c.beta2)
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    sizes = {name: getattr(side.model.config, name) for name in SIZES}
    model = theirs.GPT(theirs.GPTConfig(**sizes)).to(side.hw.device)
    model.load_state_dict(side.model.state_dict())
    settings = (c.weight_decay, c.learning_rate, betas, side.hw.device.type)
    their_groups = model.configure_optimizers(*settings).param_groups
    # its groups in a fused AdamW, as ours: nanoGPT fuses the update on CUDA only
    groups = [dict(params=g["params"], weight_decay=g["weight_decay"]) for g in their_groups]
    side.optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=betas, fused=True)
    side.model = model
    side.step_model = LossOnly(torch.compile(model) if c.compile else model)
