"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

`main` at the end is the story of a run, its loop on one screen. One iteration is train_step():
gradient_accumulation_steps micro-batches forward and backward, then one update.
Exit codes: 0 done, 1 failed, 2 bad configuration or data, 128 + signal: stopped by it and saved.
"""

import contextlib
import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch is a part of the run's time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile: no traceback

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.console import UserError, run_main, say, warn
from configurator import Config, config_values, read_config
from data.loader import Batch, TrainBatches, eval_batches, to_batch
from data.shards import Dataset
from data.tokenizer import Tokenizer
from model import GPTConfig, Sampling, generate
from reports.picture import RunPicture
from training import hardware
from training.build import build_model, build_optimizer, compile_model, loss_chunk, model_config
from training.checkpoint import Checkpoints, list_checkpoints
from training.clock import Clock
from training.hardware import Hardware, OutOfMemory, on_out_of_memory
from training.memory import out_of_memory_advice
from training.progress import Progress
from training.ranks import Interrupted, Ranks, Signals
from training.runlog import Iteration, RunLog
from training.skips import Skips
from training.start import (
    check_checkpoint,
    check_start,
    checkpoint_state,
    find_start,
    is_finished,
    open_data,
    restore,
    say_what_changed,
)

# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model,
    optimizer,
    scaler,
    next_batch: Callable[[], Batch],
    grad_accum: int,
    grad_clip: float,
    autocast,
) -> tuple[Tensor, Tensor]:
    """
    One iteration: grad_accum micro-batches forward and backward (this rank's share), then one
    update, which is skipped where a gradient is not finite. Returns the micro-batches' losses
    (grad_accum,) and the gradient norm before clipping. Both stay on the device, and with a fused
    optimizer nothing here waits for it.
    """
    losses = []
    for micro_step in range(grad_accum):
        x, y = next_batch()  # (B, T) each
        # several ranks average their gradients once, at the last micro-step
        last = micro_step == grad_accum - 1
        defers = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if defers else contextlib.nullcontext():
            with autocast:
                loss = model(x, y)
            scaler.scale(loss / grad_accum).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    # with grad_clip = 0 the norm is only measured
    if grad_clip:
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    else:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
    if optimizer.defaults.get("fused"):
        if not scaler.is_enabled():
            # a fused update skips itself on the device where this is 1
            optimizer.found_inf = (~grad_norm.isfinite()).float()
        scaler.step(optimizer)
    elif grad_norm.isfinite():  # waits for the device: other updates cannot skip themselves
        scaler.step(optimizer)
    scaler.update()
    # DDP's gradients are views of its buckets; set to None, they would take memory of their own
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return torch.stack(losses), grad_norm


@torch.no_grad()
def evaluate(
    model, batches: Iterator, autocast, between_batches: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """
    Sum of the loss over all tokens of `batches` in nats, without dropout, and their number. Leaves
    the model in training mode.
    """
    losses, counts = [], []
    model.eval()
    for x, y, tokens in batches:
        between_batches()  # a signal may interrupt an evaluation
        with autocast:
            losses.append(model(x, y))
        counts.append(tokens)
    model.train()
    pairs = zip(torch.stack(losses).tolist(), counts, strict=True)
    total = math.fsum(loss * n for loss, n in pairs if n)
    return total, sum(counts)


def get_lr(it: int, config: Config, horizon: float, highest: float) -> float:
    """
    The learning rate of iteration `it`: linear warm-up to `highest`, then the decay to min_lr at
    iteration `horizon`. By the clock that is it / share, with `share` of the time gone by.
    """
    warmup = config.warmup_iters
    if config.by_clock:
        warmup = min(warmup, horizon / 10)
    # nanoGPT's warm-up: the first rate is above 0
    if it < warmup:
        return highest * (it + 1) / (warmup + 1)
    if config.lr_schedule == "constant":
        return highest
    if it >= horizon:
        return config.min_lr
    # the decay starts after warm-up, with wsd in the last decay_fraction of the schedule
    start = warmup
    if config.lr_schedule == "wsd":
        start = max(start, horizon - round(config.decay_fraction * horizon))
    progress = max(0, it - start) / max(1, horizon - start)
    shapes = dict(cosine=0.5 * (1 + math.cos(math.pi * progress)))
    shapes |= dict(linear=1 - progress, wsd=1 - progress)
    return config.min_lr + shapes[config.lr_schedule] * (highest - config.min_lr)


def set_lr(optimizer, it: int, config: Config, horizon: float) -> float:
    """Set each group's rate for iteration `it`. Returns the first group's, which is logged."""
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it, config, horizon, group["initial_lr"])
    return optimizer.param_groups[0]["lr"]


# -----------------------------------------------------------------------------
# Around the iterations


def reason_to_end(config: Config, iter_num: int, log: RunLog, ranks: Ranks) -> str | None:
    if config.eval_only:
        return "eval_only"
    if iter_num >= config.max_iters:
        return "max_iters"
    if log.clock.reading.is_up:
        return "until" if config.until else "hours"
    if config.max_minutes and ranks.any(log.minutes() > config.max_minutes):
        return "max_minutes"
    return None


def evaluation_due(config: Config, progress: Progress, reason: str | None, clock: Clock) -> bool:
    """Every eval_interval and at a complete end, but not what a resumed run has evaluated."""
    if progress.evaluated_at == progress.iter_num and not config.eval_only:
        return False
    complete = reason in ("eval_only", "max_iters", "hours", "until")
    return complete or clock.evaluation_due(progress.iter_num)


def smaller_batch(config: Config, model: GPTConfig, hw: Hardware, ranks: Ranks) -> str:
    """What to try when the micro-batch did not fit into memory: flags that would fit."""
    advice = out_of_memory_advice(config, model, hw.dtype_name, hw.usable_bytes(), ranks.world_size)
    resumes = config.init_from != "auto" and list_checkpoints(Path(config.out_dir))
    return f"{advice} --init_from=resume" if resumes else advice


def compile_or_warn(model, config: Config, vocab: int, hw: Hardware) -> Callable:
    """
    The compiled model where compile is on, made on throw-away data, so that no iteration's time
    holds it; gradients and random states change. Where it fails: a warning, and compile is off.
    """
    if not config.compile:
        return model
    say("compiling: this takes about a minute")
    began = time.perf_counter()
    compiled = compile_model(model)
    # made like real batches, with their strides, or it would all compile again
    x, y = to_batch(torch.randint(vocab, (config.batch_size, config.block_size + 1)), hw.device)

    def throw_away_step(model) -> None:
        if not config.eval_only:
            with hw.autocast():
                loss = model(x, y)
            loss.backward()
        evaluate(model, [(x, y, 1)], hw.autocast())

    failure = ""
    try:
        throw_away_step(compiled)
    except Exception as error:  # no compiler here: every backend fails in its own way
        if hardware.is_out_of_memory(error):
            raise
        failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    if failure:
        config.compile, compiled = False, model
        model.config = replace(model.config, loss_chunk=loss_chunk(config))
        throw_away_step(model)  # raises where not the compiler is to blame
        warn(f"torch.compile does not work here ({failure}); continuing without it")
    say(f"compile: {time.perf_counter() - began:.1f}s")
    return compiled


def estimate_loss(
    model, data: Dataset, config: Config, hw: Hardware, ranks: Ranks, signals: Signals
) -> tuple[float, float]:
    """
    Mean loss on fixed windows of the train and of the val split: the same tokens at any micro-batch
    and number of ranks. All ranks take part.
    """
    means = []
    # both splits are evaluated on equally many tokens
    tokens = min(config.eval_size, len(data.val))
    for split, spread in ((data.train, True), (data.val, False)):
        windows = eval_batches(
            split, tokens, config, hw.device, spread, ranks.rank, ranks.world_size
        )
        total, count = ranks.reduce([*evaluate(model, windows, hw.autocast(), signals.check)])
        means.append(total / count)
    return means[0], means[1]


def open_tokenizer(data: Dataset, log: RunLog) -> Tokenizer | None:
    """For samples. Offline, without its vocabulary, the run continues without samples."""
    try:
        return Tokenizer(data.tokenizer)
    except UserError as error:
        log.warn(0, f"no samples: {error}")
        return None


def sample_text(model, text: Tokenizer, vocab: int, config: Config, hw: Hardware) -> str:
    """sample_tokens tokens from the model, with the same random numbers each time."""
    prompt, sampling = text.prompt(), Sampling(temperature=0.8, top_k=200)
    idx = torch.tensor([prompt], device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(config.seed)
    model.eval()
    with hw.autocast():
        ids = generate(model, idx, config.sample_tokens, vocab, sampling, generator)
    model.train()
    return text.decode(ids[0, len(prompt) :].tolist())


# -----------------------------------------------------------------------------
# The run


def main(argv: list[str], import_seconds: float = 0.0) -> int:
    # What is asked for. All that is wrong with it is listed before anything is written.
    began = time.perf_counter() - import_seconds
    ranks = Ranks()  # the processes of torchrun; without it, rank 0 of 1. Only rank 0 prints
    asked, problems = read_config(argv)
    ranks.raise_together(problems)
    ranks.check_same(**config_values(asked) | dict(wandb_run_name=""))  # it may hold the time
    checkpoints = Checkpoints(asked, ranks, check_checkpoint)  # keeps other runs out of out_dir
    start = find_start(asked, ranks)  # loads the checkpoint or the weights that init_from names
    c = check_start(asked, start, ranks)
    if is_finished(c, start):
        return 0
    signals = Signals(ranks)  # they set a flag; signals.check() raises Interrupted when safe
    hw = hardware.set_up(c, ranks.local_rank)
    ranks.check_same(dtype=hw.dtype_name)  # auto is another one on another card
    data = open_data(c, start, ranks)  # where it is missing, the quickstart's is made here

    # Model and optimizer; on resume, in their saved state
    with on_out_of_memory(lambda: hardware.NO_ROOM):
        torch.manual_seed(c.seed)  # the same weights on every rank
        raw_model = build_model(model_config(c, data.vocab, start.weights, hw.flash(c)))
        raw_model.to(hw.device)
        torch.manual_seed(c.seed + ranks.rank)  # but other dropout
        optimizer = build_optimizer(raw_model, c, hw.dtype)
        scaler = hw.grad_scaler()  # scales the loss in float16, otherwise does nothing
        p = restore(c, start, raw_model, optimizer, scaler, hw.device, ranks.rank)
    optimizer.register_step_pre_hook(p.begin_update)  # unfinished until p.advance()

    # From here on out_dir is this run's
    checkpoints.claim_folder(p if start.resumed else None)
    log = RunLog(c, hw, ranks, began, start.resumed or {})
    log.draw_run = RunPicture(c.out_dir).draw
    clock = log.clock  # knows when to evaluate and save, and with --hours when to end
    say_what_changed(c, start, ranks, clock, get_lr)
    log.start(data, raw_model.config, p)
    batches = TrainBatches(data, c, hw.device, p.sequences, ranks.rank, ranks.world_size)
    skips = Skips(c, hw, ranks, log, batches.windows)
    text = open_tokenizer(data, log) if c.sample_tokens and ranks.is_main else None
    del start  # frees the loaded checkpoint

    def next_batch() -> Batch:
        """The next micro-batch, once all ranks have theirs. A signal may come instead."""
        while True:
            with log.ledger.book("data wait"):
                ready = batches.wait()
            if signals.check(ready):  # raises Interrupted, on all ranks together
                return next(batches)

    def save(last: bool = False) -> None:
        """Save the last whole iteration, if it is not saved yet. All ranks take part."""
        if c.eval_only or p.updating or checkpoints.is_saved(p):
            return
        with log.book("checkpoints"), ranks.together():
            state = checkpoint_state(data, raw_model, optimizer, scaler, p, log)
            checkpoints.save(state, p, log, last, signals)

    def rewind() -> None:
        """Back to the last whole iteration: drop gradients and random numbers drawn since."""
        optimizer.zero_grad(set_to_none=True)
        hardware.set_rng_state(p.rng, hw.device)

    exit_code = 0
    try:
        with log.ledger.book("compile"):
            model = compile_or_warn(raw_model, c, data.vocab, hw)
            rewind()
        ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
        gc.collect()  # compiling leaves much behind
        gc.freeze()  # the collector would look through a million objects of torch's each time
        log.ledger.switch("other")  # the end of start-up
        accum, autocast = c.gradient_accumulation_steps // ranks.world_size, hw.autocast()

        while True:
            clock.look(p.iter_num)
            reason = reason_to_end(c, p.iter_num, log, ranks)  # all ranks decide together

            # every eval_interval, and when complete: all ranks evaluate, rank 0 shows and saves
            if evaluation_due(c, p, reason, clock):
                with log.book("evaluation"):
                    train_loss, val_loss = estimate_loss(model, data, c, hw, ranks, signals)
                    log.evaluation(p.iter_num, train_loss, val_loss)
                    is_best = checkpoints.note_evaluation(p, train_loss, val_loss)
                    log.note_turn(p)
                    if text and p.iter_num > 0 and math.isfinite(val_loss):
                        log.sample(p.iter_num, sample_text(raw_model, text, data.vocab, c, hw))
                if (is_best or c.always_save_checkpoint) and p.iter_num > 0:
                    save(last=reason is not None)

            # every checkpoint_interval, and at the end: rank 0 saves what is not saved yet
            if reason or clock.save_due(p.iter_num):
                save(last=reason is not None)
            if reason:
                break

            # one iteration: all ranks, each with its share of the micro-batches
            clock.last = clock.reading
            lr = set_lr(optimizer, p.iter_num, c, clock.horizon(p.iter_num, p.lr_horizon))
            with log.iteration(p.iter_num), ranks.together():
                losses, grad_norm = train_step(
                    ddp_model, optimizer, scaler, next_batch, accum, c.grad_clip, autocast
                )
            it = Iteration(p.iter_num, p.tokens, p.sequences, lr, losses, grad_norm)
            p.advance(c.iter_sequences, c.iter_tokens, hardware.get_rng_state(hw.device))

            # every log_interval, and the last one: iterations wait for the device only here
            is_last = p.iter_num == c.max_iters or clock.reading.share >= 1
            is_logged = it.iter_num % c.log_interval == 0 or is_last
            skips.add(it, look=is_logged)
            if is_logged:
                log.line(it)
    except Interrupted as stop:  # a signal, raised on all ranks together
        rewind()
        save(last=True)
        reason, exit_code = stop.args[0].name, 128 + stop.args[0]
    except Exception as error:  # bad data, a full disk, a lost rank, no memory, unforeseen
        rewind()
        # saving takes all ranks; after skipped or unfinished updates the previous one stays
        all_here = ranks.world_size == 1 or getattr(error, "on_all_ranks", False)
        if p.iter_num > 0 and all_here and not (skips.in_a_row or checkpoints.failed):
            say(f"saving after {type(error).__name__}: {error}")  # it may take long, or fail
            save(last=True)
        log.draw(0)
        if hardware.is_out_of_memory(error):
            raise OutOfMemory(smaller_batch(c, raw_model.config, hw, ranks)) from None
        raise
    finally:
        batches.close()
    log.end(reason, p)
    return exit_code


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED))
