"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

`main` at the end is the whole run; its loop fits on one screen. One iteration is train_step():
gradient_accumulation_steps micro-batches forward and backward, then one update.
Exit codes: 0 done, 1 failed, 2 bad configuration or data, 128 + signal: stopped by it, and saved
unless it came twice or before the loop.
"""

import contextlib
import gc
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch is a part of the run's time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile: no traceback
    import common  # before torch  # noqa: F401

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.child import keep_awake
from common.console import RunError, UserError, run_main, say, warn
from configurator import SCHEDULES, Config, decays, family
from data.loader import Batch, TrainBatches, eval_batches, to_batch
from data.shards import Dataset
from data.tokenizer import Tokenizer
from model import Sampling, generate
from training import build, hardware
from training.build import build_model, build_optimizer, compile_model, loss_chunk, model_config
from training.clock import Clock
from training.hardware import Hardware
from training.muon import Muon
from training.progress import Progress
from training.ranks import Ranks, Signals, mean_over_ranks
from training.runlog import COMPLETE, RunLog
from training.start import (
    check_folder,
    explain,
    is_finished,
    load_start,
    open_data,
    prepare,
    say_start,
)
from training.state import checkpoint_state, restore, write_checkpoint

RETRY_SECONDS = 60  # between two tries of the last save

# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, Tensor, Tensor]:
    """
    One iteration: this rank's micro-batches, (B, T) inputs and targets each, forward and backward;
    then one update, which is skipped if a gradient is not finite. The gradient is that of the mean
    loss over all targets of the iteration, on all ranks; targets of -1 are ignored.

    Returns the sum of the loss over this rank's targets in nats, their number, and the gradient
    norm before clipping. All stay on the device; with a fused optimizer nothing here waits for it.
    """
    counts = torch.stack([(y != -1).sum() for _, y in micro_batches])
    mean_count = mean_over_ranks(counts.sum())  # DDP averages the ranks' gradients
    loss_sum = torch.zeros((), device=counts.device)
    for micro_step, (x, y) in enumerate(micro_batches):
        # several ranks average their gradients once, at the last micro-step
        last = micro_step == len(micro_batches) - 1
        defers = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if defers else contextlib.nullcontext():
            with autocast:
                loss = model(x, y)
            # weighted by its number of targets; if these are equal: loss / len(micro_batches)
            scaler.scale(loss / (mean_count / counts[micro_step])).backward()
        loss_sum += loss.detach() * counts[micro_step]
    scaler.unscale_(optimizer)
    # with grad_clip = 0 the norm is only measured
    if grad_clip:
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    else:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
    if not optimizer.state:  # the first update
        build.warn_of_idle(model)
    # other optimizers may have state that a skipped update would spoil
    if optimizer.defaults.get("fused") and type(optimizer) in (torch.optim.AdamW, Muon):
        if not scaler.is_enabled():
            # if it is 1, these two skip the update, without a host sync
            optimizer.found_inf = (~grad_norm.isfinite()).float()
        scaler.step(optimizer)
    elif grad_norm.isfinite():  # waits for the device
        scaler.step(optimizer)
    scaler.update()
    # DDP's gradients are views of its buckets; after None they would take memory of their own
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return loss_sum, counts.sum(), grad_norm


@torch.no_grad()
def evaluate(
    model, batches: Iterable[Batch], autocast, stop: Callable[[], bool] = lambda: False
) -> tuple[float, int] | None:
    """
    Sum of the loss over all targets of `batches` in nats, without dropout, and their number. None
    if stop(), which is called before each batch, returns true. Leaves the model in training mode.
    """
    losses, counts = [], []
    model.eval()
    for x, y in batches:
        if stop():
            model.train()
            return None
        with autocast:
            losses.append(model(x, y))
        counts.append((y != -1).sum())
    model.train()
    targets = torch.stack(counts).tolist()
    pairs = zip(torch.stack(losses).tolist(), targets, strict=True)
    return math.fsum(loss * n for loss, n in pairs if n), sum(targets)


def get_lr(it: int, config: Config, horizon: float, highest: float) -> float:
    """
    The learning rate of iteration `it`: linear warmup to `highest`, then decay to min_lr at
    iteration `horizon`. With --hours the horizon is it / share, with `share` of the time used.
    """
    warmup = min(config.warmup_iters, horizon / 10) if config.by_clock else config.warmup_iters
    if it < warmup:
        return highest * (it + 1) / (warmup + 1)  # as nanoGPT: the first rate is above 0
    if not decays(config):
        return highest  # exactly: min_lr + (highest - min_lr) rounds
    start: float = warmup
    if family(config.lr_schedule) == "wsd":
        start = max(start, horizon - round(config.decay_fraction * horizon))
    over = 1.0 if it >= horizon else max(0, it - start) / max(1, horizon - start)
    return config.min_lr + SCHEDULES[config.lr_schedule](over) * (highest - config.min_lr)


def set_lr(optimizer, it: int, config: Config, share: float) -> None:
    """
    Set each group's learning rate for iteration `it`. `share`: of the time of a run with --hours or
    --until; at a steady pace its decay ends when the time is up.
    """
    horizon: float = config.lr_decay_iters or config.max_iters
    if share > 0:
        horizon = min(horizon, it / share)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it, config, horizon, group["initial_lr"])


# -----------------------------------------------------------------------------
# Around the iterations


def compile_or_warn(model, config: Config, vocab: int, hw: Hardware) -> None:
    """Compile the model, on random data. If that fails, warn, and leave the model uncompiled."""
    say("compiling: this takes about a minute")
    began = time.perf_counter()
    # with the strides of real batches, or the first one would compile again
    x, y = to_batch(torch.randint(vocab, (config.batch_size, config.block_size + 1)), hw.device)
    before, training = hardware.get_rng_state(hw.device), not config.eval_only
    compile_model(model)
    try:
        if training:
            with hw.autocast():
                loss = model(x, y)
            loss.backward()
            # compiled code draws other random numbers; then compare an evaluation's loss
            now = hardware.get_rng_state(hw.device)
            training = all(torch.equal(before[name], now[name]) for name in before)
        total, count, *_ = evaluate(model, [(x, y)], hw.autocast()) or (math.nan, 1)
        compiled_loss = loss.item() if training else total / count
        build.check_loss(compiled_loss, model, (x, y), training, hw.autocast())
    except Exception as error:  # no compiler: every backend fails in its own way
        if hardware.is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if sys.platform == "win32" and "riton" in reason:  # not part of torch there
            reason += '; pip install "triton-windows<3.8"'
        warn(f"torch.compile does not work here ({reason}); continuing without it")
        config.compile = False
        model._compiled_call_impl = None  # undoes model.compile(), for which torch has no call
        model.train()
        model.config = replace(model.config, loss_chunk=loss_chunk(config))
    say(f"compile: {time.perf_counter() - began:.1f}s")


def reason_to_end(config: Config, iter_num: int, over: str | None) -> str | None:
    """Why the run is complete, or its time is up. `over`: what the clock says."""
    if config.eval_only:
        return "eval_only"
    return "max_iters" if iter_num >= config.max_iters else over


def wait_for_data(batches: TrainBatches, accum: int, signals: Signals) -> str | None:
    """
    Wait until every rank has the windows of the next iteration on the host. Returns why no
    iteration can follow: a signal's name, "data" if a rank cannot read on, or None.
    """
    while True:
        ready = batches.ready(accum)
        failed, waiting = signals.look(batches.error is not None, not ready)
        if signals.name or (failed and waiting):  # for windows that will never come
            return signals.name or "data"
        if not waiting:
            return None


def estimate_loss(
    model, data: Dataset, batches: TrainBatches, config: Config, hw: Hardware, signals: Signals
) -> list[float] | None:
    """
    Mean loss on fixed windows of the train and of the val split: the same tokens at any micro-batch
    and number of ranks. None if a signal came, or if a rank cannot read its windows; the reason is
    then in batches.error. All ranks take part.
    """
    means, ranks, host = [], signals.ranks, torch.device("cpu")
    # both splits are evaluated on the same number of tokens
    tokens = min(config.eval_size, len(data.val))
    for split, spread in ((data.train, True), (data.val, False)):
        pending = eval_batches(split, tokens, config, host, spread, ranks.rank, ranks.world_size)
        failed = False
        try:
            windows = list(pending)  # read before the evaluation, as for an iteration
        except RunError as error:
            batches.error, failed = error, True
        if any(signals.look(failed)):
            return None
        on_device = ((x.to(hw.device), y.to(hw.device)) for x, y in windows)
        result = evaluate(model, on_device, hw.autocast(), signals.came)
        if result is None:
            return None
        total, count = ranks.reduce(*result)
        means.append(total / count if count else math.nan)
    return means


def sample_text(model, data: Dataset, p: Progress, log: RunLog) -> None:
    """Print sample_tokens tokens from the model, drawn with the same random numbers each time."""
    config, hw = log.config, log.hw
    if not math.isfinite(p.val_loss):
        return
    try:
        text = Tokenizer(data.tokenizer)
    except UserError as error:  # offline, without its vocabulary
        log.warn(p.iter_num, f"no sample: {error}")
        return
    prompt, sampling = text.start_ids(), Sampling(temperature=0.8, top_k=200)
    idx = torch.tensor([prompt], device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(config.seed)
    model.eval()
    with hw.autocast():
        if build.caches_differ(model, config.sample_tokens):
            log.warn_once("caches", p.iter_num, build.CACHES_DIFFER)
        ids = generate(model, idx, config.sample_tokens, data.vocab, sampling, generator)
    model.train()
    log.sample(p.iter_num, text.decode(ids[0, len(prompt) :].tolist()))


def save_checkpoint(state: dict, log: RunLog, signals: Signals, last: bool) -> bool:
    """
    Rank 0 saves `state`; all ranks take part. Returns whether it is on the disk. A full disk does
    not stop the run; the next log line tries again. The `last` save is tried every minute until it
    works, and once more after a signal; then it raises RunError.
    """
    it, ranks = state["progress"]["iter_num"], log.ranks
    while problem := ranks.from_main(write_checkpoint, state, log):
        if last and signals.came():
            ranks.fail(f"{problem}; once that is fixed, {log.way_back()}")
        if not last:
            log.warn_once("not saved", it, f"{problem}; trying again with each log line")
            return False
        log.warn(it, f"{problem}; trying again each minute; Ctrl-C gives up, and frees the device")
        signals.wait(RETRY_SECONDS)
    log.said.discard("not saved")
    return True


# -----------------------------------------------------------------------------
# The run


def main(argv: list[str], import_seconds: float = 0.0) -> int:
    began = time.perf_counter() - import_seconds
    ranks = Ranks()  # the processes of torchrun; without it, rank 0 of 1
    # Rank 0 checks the command line, and lists all problems before anything is written
    c, path = ranks.from_main(prepare, argv, ranks.world_size)
    if path:
        ranks.check_same(str(path), path.exists(), "several machines need one shared --out_dir")
    start = load_start(c, path)  # the checkpoint, other weights, or empty
    if ranks.from_main(is_finished, c, start):
        return 0
    keep_awake()  # Windows would sleep
    hw = hardware.set_up(c, ranks.local_rank)
    data = open_data(c, start, ranks)  # if missing, the quickstart's is made here

    # Model and optimizer; on resume, in their saved state
    hardware.set_seed(c.seed)  # the same weights on every rank
    model = build_model(model_config(c, data.vocab, start, hw.flash(c))).to(hw.device)
    hardware.set_seed(c.seed + ranks.rank)  # but different dropout
    optimizer = build_optimizer(model, c, hw.dtype)
    scaler = hw.grad_scaler()  # scales the loss in float16, otherwise does nothing
    p = restore(start, model, optimizer, scaler, c, hw, ranks.rank)
    eval_model = model  # its weights are evaluated, sampled from, saved and exported

    # Log, clock and data. From here on out_dir belongs to this run
    clock = Clock(c, began, start if path else {})  # when to evaluate, to save and to end
    log = RunLog(c, hw, ranks, clock, start if path else {})
    check_folder(c, path, p.best_iter, log)
    say_start(c, start, ranks)
    log.start(data, model.config)
    batches = TrainBatches(data, c, hw.device, p.sequences, ranks.rank, ranks.world_size)
    del start  # frees the loaded checkpoint
    log.lap("start-up")

    if c.compile:
        with hardware.no_trace(model, hw.device):
            compile_or_warn(model, c, data.vocab, hw)
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    gc.collect()  # free what compiling left behind
    gc.freeze()  # or each collection would search a million objects of torch
    log.lap("compile")
    accum, autocast = c.gradient_accumulation_steps // ranks.world_size, hw.autocast()
    signals = Signals(ranks, log)  # from here on a signal asks the loop to save and stop
    unsaved = path is None  # the present state is not on the disk
    retry = is_logged = False

    while True:
        # Between two iterations: rank 0's clock decides for all. A signal to any rank, or a rank
        # that cannot read its data, ends the loop for all.
        share, evaluation_due, save_due, over = ranks.from_main(clock.look, p.iter_num)
        reason = reason_to_end(c, p.iter_num, over) or wait_for_data(batches, accum, signals)
        best_on_disk = p.best_val_loss, p.best_iter

        # every eval_interval, and at the end: all ranks evaluate, unless a signal comes
        due = reason in COMPLETE or (evaluation_due and not reason)
        if due and (c.eval_only or p.evaluated_at != p.iter_num):
            log.lap("steps")
            losses = estimate_loss(eval_model, data, batches, c, hw, signals)
            if losses:
                is_best, unsaved = p.note_evaluation(losses[1]), True
                save_due |= p.iter_num > 0 and (is_best or c.always_save_checkpoint)
                log.evaluation(p, losses[0])
                if c.sample_tokens and ranks.is_main and p.iter_num > 0:
                    sample_text(eval_model, data, p, log)
            else:
                reason = signals.name or "data"  # the resumed run begins with this evaluation
            clock.note("evaluation", log.lap("evaluation"), done=losses is not None)

        # rank 0 saves: after an evaluation, every checkpoint_interval or ten minutes, at a log line
        # after a failed save, and at the end
        signals.loop_is_over = reason not in (None, signals.name)
        if (reason or save_due or (retry and is_logged)) and unsaved and not c.eval_only:
            log.lap("steps")
            state = checkpoint_state(data, eval_model, optimizer, scaler, p, log)
            unsaved = retry = not save_checkpoint(state, log, signals, last=reason is not None)
            if retry:  # best.pt is still the previous one
                p.best_val_loss, p.best_iter = best_on_disk
            clock.note("checkpoints", log.lap("checkpoints"), done=not retry)
        if reason:
            break

        # one iteration: all ranks, each with its own micro-batches
        set_lr(optimizer, p.iter_num, c, share)
        micro_batches = batches.take(accum)
        loss_sum, targets, grad_norm = train_step(
            ddp_model, optimizer, scaler, micro_batches, c.grad_clip, autocast
        )
        lr = optimizer.param_groups[0]["lr"]  # which the optimizer may have changed
        log.note(p, lr, loss_sum, targets, grad_norm)
        p.advance(micro_batches, ranks.world_size, batches.consumed)
        unsaved = True

        # every log_interval, and at the end: only here do iterations wait for the device
        is_logged = (
            (p.iter_num - 1) % c.log_interval == 0 or p.iter_num == c.max_iters or share >= 1
        )
        if is_logged:
            log.line(p, batches.waited)

    batches.close()
    log.end(reason, p, batches.waited)
    signals.close()
    if reason == "data":  # the rank that cannot read raises its error
        raise batches.error or RunError()
    return 128 + signal.Signals[reason] if reason == signals.name else 0


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED), explain)
