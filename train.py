"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

This file is the run. main() opens what a run needs, and then loops: evaluate and save once in a
while, train_step(), log. train_step() runs an iteration's micro-batches forward and backward and
then updates the weights. To change when a run ends, evaluates or saves, or the learning rate, edit
why_over(), evaluation_due(), save_due() or get_lr(). How a run starts is in run/start.py, GPT-2 in
model.py, the fast model in model_fast.py, AdamW and Muon in optimizer.py, every key in
configurator.py, the tokens in data/, what surrounds a run in run/, and the device and the processes
in machine/.

    torchrun --standalone --nproc_per_node=2 train.py config/gpt124m_a100.py     several GPUs

Exit codes: 0 done; 1 any error; 128 + N stopped by signal N, after a save if the training loop had
begun.
"""

import math
import time
from dataclasses import replace
from pathlib import Path
from signal import Signals

import common.environment  # before torch  # noqa: F401  isort: skip
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from common.console import UserError, run_main, say
from common.process import StopSignal, is_main, keep_awake, rank, world_size
from configurator import SAVE_EVERY, TRAIN_EVAL_TOKENS, Config, config_values
from data.loader import Batch, Batches, eval_batches
from data.shards import Dataset
from machine import hardware, ranks
from machine.compile_check import compile_checked, freeze_garbage
from machine.cost import choose_batch, describe
from machine.hardware import Hardware
from model import GPTConfig, count_targets
from model_fast import build_model, config_to_dict, model_config
from optimizer import build_optimizer, swap_averages
from run.checkpoint import State, newest_first
from run.clock import Clock, training_hours
from run.log import Log, evaluation_line
from run.start import check_data, choose_run, open_data, over_line

MAX_SKIPS = 20  # skips in a row that end a run, checked when logging; float16 may need 16 at first
MAX_LOSS = 100.0  # val loss in nats that forbids a save; random guesses among 65,536 ids give 11
SHORTEST_RUN = 20.0  # seconds; shorter runs get no loss.png
MEMORY_HINT = (
    "give half the batch_size that the line `tokens per iteration` shows, or a smaller block_size"
)


def main(argv: list[str]) -> int:
    began = time.perf_counter()
    ranks.quiet_others()
    keep_awake()

    # The run: its configuration, its folder, and what it begins with: a checkpoint to resume,
    # weights, or nothing. Each rank reads this for itself, and join() ends the run if they differ
    c, state, folder, about = choose_run(argv)
    it, val_loss = state.iter_num, state.val_loss
    over = why_over(c, it, training_hours(state.ledger))
    if state.complete and over and not c.eval_only:
        say(over_line(c, state, over))
        return 0
    data = open_data(c)  # may download the tokens first
    check_data(c, data, state)
    hw = hardware.set_up(c)
    sizes = model_config(c, data.vocab, state.model_config)
    # What was asked is stored, and each start fits it to its own device
    asked, c = c, choose_batch(hw.adapt(c), sizes, world_size(), hw.memory_gib())
    ranks.join(config=c, checkpoint=(it, val_loss), dataset=data.fingerprint, device=hw.name)

    # What learns, and from what
    model = make_model(sizes, c.seed, hw, state)
    about += [hw.line(c.compile), describe(model, data.vocab), data.line()]
    if c.eval_only:
        say(*about)
        evaluate_only(model, data, c, hw, it)
        return 0
    optimizer = build_optimizer(model, c, hw.dtype)
    # float16 gradients would underflow without a loss scale; for other dtypes this does nothing
    scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
    restore(state, optimizer, scaler)
    batches = Batches(data, c, hw.device)

    # What keeps the books. From here on out_dir belongs to this run
    ranks.on_main(folder.claim, state)  # only rank 0 writes
    clock = Clock(began, hw.synchronize, state.ledger)
    log = Log(c, clock, hw, data, model, it, folder)
    log.begin(about)
    saved = (it, val_loss) if state.is_run else None  # what the newest checkpoint is of
    del state  # frees the loaded checkpoint

    # Compiled code is compared with eager code in float32. If it fails or is wrong, the run ends
    if c.compile:
        with clock.pause("compile", before="start-up"):
            compile_checked(model, c, data.vocab, hw)
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    freeze_garbage()  # so that collections need not scan a million torch objects
    skipped = torch.zeros((), device=hw.device)  # updates skipped in a row, counted on the device
    stop = StopSignal()  # from now on, a signal makes the loop end and save
    clock.lap("start-up")

    # What does not change during the run stands in these two, and what does is passed to them
    def evaluate(it: int, complete: bool = False) -> float:
        with clock.pause("evaluation"):  # keeps its seconds out of iteration times
            measured = estimate_loss(model, data, c, hw)
            log.report_eval(it, measured, complete)
        return measured["val_loss"]

    def save(it: int, val_loss: float | None, complete: bool = False) -> tuple[int, float | None]:
        """Save what a resume needs, and return what the newest checkpoint is of."""
        with clock.pause("checkpoints"):
            end_if_diverged(model, c, it, val_loss)
            to_keep = replace(asked, dtype=c.dtype)  # what auto means here, for good
            state = state_to_save(
                to_keep, data, model, optimizer, scaler, clock, it, val_loss, complete
            )
            log.report_save(it, *ranks.on_main(folder.save, state, c.keep_checkpoints))
        return it, val_loss

    # The loop ends when the run is over, or at a signal. An error ends the run, also one of a save,
    # but not one of what only reports. The same command resumes from the newest checkpoint
    while True:
        # all ranks get rank 0's training hours, seconds since its last save, and signal
        hours, since_save, signal = ranks.on_main(lambda: (*clock.read(), stop.number))
        over = why_over(c, it, hours)
        if over or signal:
            break
        if val_loss is None and evaluation_due(c, it):
            val_loss = evaluate(it)
            continue  # look at the clock and for a signal again, because this may take minutes
        if (it, val_loss) != saved and save_due(c, it, val_loss, since_save):
            saved = save(it, val_loss)
            if val_loss is not None:
                log.sample(it)
        set_rates(optimizer, it, c, hours)
        hw.seed(c.seed, it, rank())  # so dropout follows from these, whatever drew in between
        micro_batches = batches.take(it)
        total_loss, numbers = train_step(
            ddp_model, optimizer, scaler, micro_batches, c.grad_clip, hw.autocast()
        )
        batches.read_ahead(it + 1)  # while the device works
        skipped = (skipped + 1) * ~numbers["grad_norm"].isfinite()

        # log every log_interval iterations, and after max_iters. With a fused optimizer, training
        # waits for the device only here and in pauses
        if it % c.log_interval == 0 or it + 1 == c.max_iters:
            # the numbers of this iteration alone, but the speed since the last line
            loss, *means = ranks.sum(
                total_loss.item() / (len(micro_batches) * world_size()),
                *(float(number) / world_size() for number in numbers.values()),
            )
            clock.lap("steps")
            mean_numbers = dict(zip(numbers, means, strict=True))
            log.report_step(it, loss, optimizer.param_groups[0], mean_numbers)
            if skips := int(skipped):
                log.warn(it, f"{skips} updates in a row skipped: a gradient was not finite")
                end_if_skipping(skips, c)
        it, val_loss = it + 1, None  # nobody has evaluated the new weights

    # The end. A complete run exchanges its weights for their averages, if the optimizer keeps them,
    # and is evaluated. One that was stopped before is only saved, and resumes where it stopped
    if over:
        if swap_averages(optimizer):
            log.report_averages(it)
        val_loss = evaluate(it, complete=True)
        save(it, val_loss, complete=True)
        log.sample(it)
    elif (it, val_loss) != saved:
        save(it, val_loss)
    clock.lap("steps")  # book the last seconds before the log prints the ledger
    if over and is_main():  # after a signal, exit without waiting for loss.png
        log.attempt("loss.png", draw_losses, folder.path, sum(clock.seconds.values()))
    log.finish(over or Signals(signal).name, it, val_loss)
    return 0 if over else 128 + signal


# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Run forward and backward over this rank's micro-batches, (B, T) inputs and targets each, then
    update the weights once. The loss is the mean over all ranks' targets other than -1, so it does
    not depend on the micro-batch size. If a gradient is not finite, the update is skipped.

    Returns the sum of the micro-batches' shares of the loss in nats, and other numbers for the log,
    which main() averages over the ranks: the gradient norm before clipping, and the means of what
    forward() has left in the model's dict `numbers`. All stay on the device, so with a fused
    optimizer nothing in this function waits for the GPU.
    """
    accum = len(micro_batches)
    is_ddp = isinstance(model, DistributedDataParallel)
    total_loss = torch.zeros((), device=micro_batches[0][0].device)
    # Weigh each micro-batch by its targets. The mean over all micro-batches, which the division by
    # accum and DDP take, is then the mean over all targets. If none is masked, each share is 1.0
    counts = torch.stack([count_targets(targets) for _, targets, *_ in micro_batches])
    all_targets, all_micro_batches = counts.sum(), accum
    if is_ddp:
        torch.distributed.all_reduce(all_targets, group=model.process_group)
        all_micro_batches *= model.process_group.size()
    shares = counts * all_micro_batches / all_targets.clamp(min=1)
    unwrapped = model.module if is_ddp else model
    numbers: dict[str, Tensor] = {}
    for micro_step, batch in enumerate(micro_batches):
        if is_ddp:  # average gradients across ranks once per iteration, in the last backward pass
            model.require_backward_grad_sync = micro_step == accum - 1
        with autocast:
            loss = shares[micro_step] * model(*batch)
        scaler.scale(loss / accum).backward()  # accumulates into .grad
        total_loss += loss.detach()
        numbers = {  # popped, because a number left on the model would keep its graph in memory
            name: numbers.get(name, 0) + shares[micro_step] * number.detach() / accum
            for name, number in vars(unwrapped).pop("numbers", {}).items()
        }

    # clip; with grad_clip = 0 the norm is only measured
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, grad_norm)

    # update, unless a gradient is not finite. A fused optimizer reads found_inf on the device (in
    # float16, GradScaler overwrites it). Any other optimizer has to wait for the norm
    is_fused = optimizer.defaults.get("fused")
    if is_fused:
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    if is_fused or grad_norm.isfinite():
        scaler.step(optimizer)
    scaler.update()

    # Under DDP, zero the gradients instead of setting them to None. Otherwise DDP would allocate
    # each of them a second time, at 4 bytes per parameter.
    optimizer.zero_grad(set_to_none=not is_ddp)
    return total_loss, dict(numbers, grad_norm=grad_norm)


# -----------------------------------------------------------------------------
# What the loop asks before each iteration. Asking changes nothing


def why_over(c: Config, it: int, hours: float) -> str:
    """Return why a run with `it` iterations and so many training hours is over, or ""."""
    if it >= c.max_iters:
        return "max_iters"
    if 0 < c.hours <= hours:  # counting all launches; a last evaluation and save follow
        return "hours"
    return ""


def evaluation_due(c: Config, it: int) -> bool:
    """Return whether to evaluate here. This is asked while the weights have no val_loss."""
    return it % c.eval_interval == 0


def save_due(c: Config, it: int, val_loss: float | None, since_save: float) -> bool:
    """
    Return whether to save here: after an evaluation, and every checkpoint_interval iterations or
    ten minutes, but not before the first iteration. This is asked of what is not saved yet.
    """
    if it == 0:
        return False
    if val_loss is not None:
        return True
    if c.checkpoint_interval:
        return it % c.checkpoint_interval == 0
    return since_save >= SAVE_EVERY


# -----------------------------------------------------------------------------
# Model and schedule


def make_model(sizes: GPTConfig, seed: int, hw: Hardware, state: State):
    """
    Return the model on its device, with the weights that the run begins with, or else random ones,
    the same on all ranks.
    """
    torch.manual_seed(seed)
    model = build_model(sizes).to(hw.device)
    if state.model:
        state.load_weights(model)
    return model


def run_length(it: int, c: Config, hours: float) -> float:
    """
    Return how many iterations the run has. With the key hours this is predicted at iteration `it`,
    after so many training hours, as if the pace stayed the same.
    """
    return min(c.max_iters, it * c.hours / hours) if c.hours and it and hours else c.max_iters


def get_lr(it: int, c: Config, length: float, peak: float, floor: float = 0.0) -> float:
    """
    Return the learning rate of iteration `it` in a run of `length` iterations. The rate warms up to
    `peak`, then decays to the fraction of it that min_lr is of learning_rate, but never below the
    fraction `floor`. A run with hours warms up for at most a tenth of its iterations.
    """
    decay_end: float = c.lr_decay_iters or length
    warmup: float = c.warmup_iters
    if c.hours:
        decay_end = min(decay_end, length)
        warmup = min(warmup, decay_end / 10)
    # linear warmup; like nanoGPT's, it starts above 0
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    # decay from the end of the warmup or, with wsd, linearly over the last decay_fraction
    begin = warmup
    if c.lr_schedule == "wsd":
        begin = max(warmup, (1 - c.decay_fraction) * decay_end)
    decayed = 1.0  # how much of the decay is over, from 0 to 1
    if it < decay_end:
        decayed = max(0, it - begin) / max(1, decay_end - begin)
    left = 1 - decayed
    if c.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * decayed))
    # a lower learning_rate, typed at a resume, may be below min_lr, but must not rise to it
    lowest = min(peak, c.min_lr * (peak / c.learning_rate if c.learning_rate else 1))
    return max(floor * peak, lowest + left * (peak - lowest))


def set_rates(optimizer, it: int, c: Config, hours: float) -> None:
    """Set each group's learning rate for iteration `it`, and what set_schedule() follows."""
    length = run_length(it, c, hours)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it, c, length, group["peak_lr"], group["lr_floor"])
        group["done"], group["length"] = it / length, length


# -----------------------------------------------------------------------------
# Evaluating


@torch.no_grad()
def estimate_loss(model, data: Dataset, c: Config, hw: Hardware) -> dict[str, float]:
    """
    Return each split's mean loss on fixed windows as NAME_loss, in nats per token, without dropout.
    The windows do not depend on the micro-batch size or the number of ranks. Every rank must call
    this, and gets all losses. Raises OSError and UserError.
    """
    hw.seed(c.seed, rank())  # so masked diffusion, which draws in forward(), always draws the same
    tokens = min(c.eval_tokens, len(data.val))
    losses: dict[str, float] = {}
    model.eval()
    for name, split in data.splits.items():
        # the train loss only shows how far val is from it, so a million tokens will do
        most = TRAIN_EVAL_TOKENS if name == "train" else tokens
        micro_batches = eval_batches(split, min(tokens, most), c)
        nats, count = ranks.sum(*sum_losses(model, micro_batches, hw))
        losses[f"{name}_loss"] = nats / count
    model.train()
    return losses


def sum_losses(model, micro_batches: list[Batch], hw: Hardware) -> tuple[float, int]:
    """Return the summed loss over all targets in nats, and their number."""
    # Allocate one tensor before the loop. On a CPU, a small tensor per micro-batch would lie
    # between the freed logits, and memory would grow by gigabytes (see keep_freed_memory in
    # hardware.py)
    means = torch.empty(len(micro_batches), device=hw.device)
    for n, batch in enumerate(micro_batches):
        with hw.autocast():
            means[n] = model(*(part.to(hw.device) for part in batch))
    counts = [int(count_targets(targets)) for _, targets, *_ in micro_batches]
    # a micro-batch without targets, at the end of a rank's share, has no mean loss
    sums = [mean * n for mean, n in zip(means.tolist(), counts, strict=True) if n]
    return math.fsum(sums), sum(counts)


def evaluate_only(model, data: Dataset, c: Config, hw: Hardware, it: int) -> None:
    """Evaluate the weights once, print the numbers and write nothing."""
    began = time.perf_counter()
    numbers = estimate_loss(model, data, c, hw)
    say(evaluation_line(it, numbers, time.perf_counter() - began, data))
    say(f"val_loss: {numbers['val_loss']:.4f}")


# -----------------------------------------------------------------------------
# Saving and resuming


def lower_rate(c: Config) -> str:
    """Return what to type after a divergence: a run that has never saved begins anew."""
    if newest_first(Path(c.out_dir)):
        return "resume the newest checkpoint with --init_from=resume and a lower --learning_rate"
    return "try a lower --learning_rate"


def end_if_skipping(skips: int, c: Config) -> None:
    """End the run after MAX_SKIPS skipped updates in a row: more iterations will not help."""
    if skips >= MAX_SKIPS:
        raise UserError(f"{skips} updates in a row skipped; {lower_rate(c)} or --dtype=float32")


def end_if_diverged(model, c: Config, it: int, val_loss: float | None) -> None:
    """End the run if it has diverged, before a save could replace a good checkpoint."""
    signs = [f"{n} is not finite" for n, p in model.named_parameters() if not p.isfinite().all()]
    if it > 0 and val_loss is not None and not val_loss < MAX_LOSS:
        signs.append(f"the val loss is {val_loss:.4g}")
    if signs:
        raise UserError(f"iter {it}: {signs[0]}, so the weights are not saved; {lower_rate(c)}")


def state_to_save(
    c: Config,
    data: Dataset,
    model,
    optimizer,
    scaler,
    clock: Clock,
    it: int,
    val_loss: float | None,
    complete: bool,
) -> State:
    """Return what a checkpoint holds after `it` iterations: what a resume cannot compute."""
    return State(
        model=model.state_dict(),
        model_config=config_to_dict(model.config),
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        iter_num=it,
        val_loss=val_loss,
        complete=complete,
        config=config_values(c),
        data_fingerprint=data.fingerprint,
        ledger=clock.seconds,
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
    )


def restore(state: State, optimizer, scaler) -> None:
    """
    Restore the optimizer and the scaler of a run to resume. The optimizer's hyperparameters come
    from the configuration. Raises UserError.
    """
    if not state.is_run:
        return
    saved, groups = state.optimizer, optimizer.state_dict()["param_groups"]
    names, known = ([g["param_names"] for g in gs] for gs in (groups, saved["param_groups"]))
    if names != known:
        problem = f"the optimizer in {state.source} groups the weights differently"
        hint = f"--init_from={state.source} with another --out_dir takes the weights alone"
        raise UserError(f"init_from: {problem}; {hint}")
    optimizer.load_state_dict(saved | dict(param_groups=groups))
    # Clone CPU tensors, also in lists. They are mapped from the checkpoint file, and would keep it
    # open for the whole run.
    for p, tensors in optimizer.state.items():
        optimizer.state[p] = tree_map_only(Tensor, lambda t: t.clone() if t.is_cpu else t, tensors)
    if scaler.is_enabled() and state.scaler:
        scaler.load_state_dict(state.scaler)
    if state.complete:  # back to the weights, because the run has ended with their averages
        swap_averages(optimizer)


def draw_losses(out_dir: Path, seconds: float) -> None:
    """Draw loss.png when the run is complete. During the run, compare.py draws it."""
    if seconds >= SHORTEST_RUN:
        from tools.curves import read_run, save_picture  # only here, so that runs start sooner

        save_picture([[read_run(out_dir / "metrics.jsonl")]], out_dir / "loss.png")


if __name__ == "__main__":
    run_main(main, MEMORY_HINT)
