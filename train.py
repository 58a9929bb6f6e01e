"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

This file contains the whole run, in the order in which it happens. main(), at the end, starts or
resumes it and then loops. Five functions decide for the loop: why_stop(), evaluation_due(),
save_due(), is_best() and get_lr(). One iteration is train_step(), which runs
gradient_accumulation_steps micro-batches forward and backward and then updates the weights. GPT-2
is in model.py, the fast model in model_fast.py, AdamW and Muon in optimizer.py, every key in
configurator.py, the tokens in data/, and the machinery around a run in training/.

    torchrun --standalone --nproc_per_node=2 train.py config/gpt124m_a100.py     several GPUs

Exit codes: 0 done, 1 failed, 128 + N stopped by signal N. In the last case the run has saved,
unless it had --eval_only, or the signal came twice or before the training loop began.
"""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch counts towards the run's time

import common.environment  # before torch  # noqa: F401  isort: skip
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.child import keep_awake
from common.console import (
    UserError,
    explain_errors,
    raise_if_any,
    run_main,
    say,
)
from configurator import (
    FIELDS,
    NOT_WEIGHTS,
    SAVE_EVERY,
    Config,
    config_values,
    read_config,
    resolve,
)
from data.loader import Batch, Batches
from data.missing import make_or_explain
from data.shards import Dataset, ShardTokens, check_dataset, open_dataset
from data.tokenizer import Tokenizer, same_tokenizer
from model import GPT, generate
from model_fast import build_model, config_to_dict, model_config
from optimizer import build_optimizer, load_averages
from training import checkpoint, hardware, preflight
from training.checkpoint import Saver
from training.clock import Clock, Now, training_seconds
from training.compiled import compile_checked, freeze_garbage
from training.hardware import Hardware
from training.log import Log, evaluation_line, origin_lines
from training.memory import fit_run
from training.pretrained import ARCHITECTURE, check_fields, load_pretrained, load_weights
from training.ranks import Ranks, StopSignals, end_process
from training.speed import describe

# Keys that a resumed run keeps; setting one to another value is an error. Add a key here if
# changing that key would invalidate the saved state. Other keys get the command's values, or their
# defaults, except dtype and the evaluations' tokens: see config_of_run()
FIXED_ON_RESUME = (*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "init_from")
# Keys that a resumed run keeps unless the command sets them. The three of the batch may only change
# so that an iteration has as many tokens as before: see share_iteration()
KEPT_UNLESS_SET = ("dataset", "batch_size", "gradient_accumulation_steps", "tokens_per_iter")
RETRY_SECONDS = 30  # seconds from a failed save to the next attempt
FINAL_RETRY_SECONDS = 60  # seconds between attempts at the final save, which waits for disk space
MAX_SKIPS = 20  # skips in a row that end a run, checked when logging; float16 may need 16 at first
MAX_LOSS = 100.0  # val loss in nats that forbids a save; random guesses among 65,536 ids give 11
RESUME = "--init_from=resume continues from the newest checkpoint"


@dataclass
class Progress:
    """Records how far a run has come. The loop updates this, and checkpoints store it."""

    iter_num: int = 0  # iterations done, including those whose update was skipped
    tokens: int = 0  # tokens trained on
    sequences: int = 0  # sequences read, which is the position in the data order
    evaluated_at: int = -1  # iteration of the last evaluation
    val_loss: float = math.inf  # validation loss of the last evaluation
    best_val_loss: float = math.inf  # lowest val_loss among iteration 0 and the saved checkpoints
    best_iter: int = -1  # iteration of best_val_loss; at 0 (untrained) there is usually no best.pt

    @property
    def is_evaluated(self) -> bool:
        """Return whether val_loss was measured with the current weights."""
        return self.evaluated_at == self.iter_num

    def evaluate(self, val_loss: float) -> None:
        """Record an evaluation of the current weights."""
        self.val_loss, self.evaluated_at = val_loss, self.iter_num
        if self.iter_num == 0 and math.isfinite(val_loss):  # best.pt must beat the untrained model
            self.best_val_loss, self.best_iter = val_loss, 0


# -----------------------------------------------------------------------------
# Where the run starts


@dataclass(frozen=True)
class Start:
    """Says where a run begins: with random weights, with given ones, or at its own checkpoint."""

    source: str = ""  # the checkpoint's path, or init_from's value
    state: dict | None = None  # a checkpoint's state or load_pretrained()'s; None: random weights

    @property
    def resumed(self) -> dict | None:
        """Return the state of the run that continues; None if another begins."""
        return self.state if self.state and "progress" in self.state else None


def choose_run(argv: list[str], ranks: Ranks) -> tuple[Config, Start]:
    """Read the command. Returns the final configuration, and where it begins. Raises UserError."""
    asked = ranks.on_main(read_config, argv)
    start = find_start(asked, ranks)
    return ranks.on_main(config_of_run, asked, start, ranks.world_size), start


def find_start(c: Config, ranks: Ranks) -> Start:
    """Find the checkpoint or the weights that this command begins with. Raises UserError."""
    if path := ranks.on_main(find_checkpoint, c):
        state = checkpoint.read(path)
        ranks.on_main(check_fields, path, state)
        if (it := state["progress"]["iter_num"]) != checkpoint.iteration(path):
            ranks.fail(f"{path}: holds iteration {it}, so its name is wrong; rename it")
        return Start(str(path), state)
    if c.init_from in NOT_WEIGHTS:
        return Start()
    block_size = c.block_size if "block_size" in c.set_keys else None
    return Start(c.init_from, ranks.main_first(load_pretrained, c.init_from, block_size))


def find_checkpoint(c: Config) -> Path | None:
    """
    Return the newest valid checkpoint of out_dir's run, or None if this command neither continues
    nor evaluates that run. Raises UserError if another run would begin in its folder.
    """
    out_dir = Path(c.out_dir)
    names_weights = c.init_from not in NOT_WEIGHTS
    # --eval_only evaluates the weights that init_from names or, without init_from, out_dir's run
    if c.eval_only:
        wants_run = c.init_from in ("resume", "auto") or "init_from" not in c.set_keys
    else:
        wants_run = c.init_from != "scratch"
    if wants_run and (path := checkpoint.find_newest(out_dir)):
        return path
    others = sorted(out_dir.glob("*.pt"))
    if others and not (c.eval_only and names_weights):
        hint = "--init_from=auto resumes it, another --out_dir starts a new run"
        if not checkpoint.list_checkpoints(out_dir):  # nanoGPT's ckpt.pt, or best.pt alone
            hint = f"--init_from={others[-1]} --out_dir=NEW starts a new run from its weights"
        raise UserError(f"out_dir: {others[-1]} is from an earlier run; {hint}")
    if c.init_from == "resume":
        hint = "is its disk mounted? --init_from=auto begins a new run"
        raise UserError(f"init_from: {c.out_dir} holds no checkpoint (ckpt-*.pt) to resume; {hint}")
    return None


def config_of_run(c: Config, start: Start, world_size: int) -> Config:
    """
    Return the final configuration, with the keys that the checkpoint or the weights and this
    machine decide. Raises UserError, with a line for each problem, before anything is written.
    """
    problems: list[str] = []
    if start.resumed:
        before = config_before(start.resumed)
        if c.init_from in NOT_WEIGHTS:  # the run keeps the one that began it
            c = replace(c, init_from=before.init_from)
        other = "--out_dir for a new run"
        c, problems = keep_values(c, FIXED_ON_RESUME, start.resumed["config"], c.out_dir, other)
        kept = {n: getattr(before, n) for n in KEPT_UNLESS_SET if n not in c.set_keys}
        c = replace(c, **kept)
        if c.dtype == "auto":
            c = replace(c, dtype=before.dtype)
        is_unasked = not c.eval_tokens and c.eval_iters == before.eval_iters
        if is_unasked and c.eval_size != before.eval_size:
            # otherwise a new batch_size would change which tokens are evaluated
            c = replace(c, eval_tokens=before.eval_size)
    elif start.state:
        saved = start.state["model_config"]
        names = ARCHITECTURE
        if saved["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
            saved = saved | dict(pad_vocab_multiple=1)
            names = (*names, "pad_vocab_multiple")
        c, problems = keep_values(c, names, saved, start.source, "--init_from")
    c, impossible = resolve(c, world_size, start.resumed["config"] if start.resumed else None)
    problems += impossible
    try:
        preflight.check_device(c)
        preflight.check_gpu(c)
    except UserError as error:
        problems += error.problems
    raise_if_any(problems)
    if c.dtype == "auto":
        dtype = hardware.best_dtype(hardware.choose_device(c, local_rank=0))
        c = replace(c, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    return c


def keep_values(
    c: Config, names: tuple[str, ...], saved: dict, source: str, other: str
) -> tuple[Config, list[str]]:
    """
    Return the configuration with the saved values of these keys, and a problem for each key that a
    file or flag sets to something else. A key missing from the saved values gets its default.
    """
    values = {name: saved.get(name, FIELDS[name].default) for name in names}
    problems = [
        f"{name}: {source} has {value!r}, you asked for {getattr(c, name)!r}. "
        f"Give --{name}={value}, or another {other}"
        for name, value in values.items()
        if name in c.set_keys and getattr(c, name) != value
    ]
    return replace(c, **values), problems


def config_before(resumed: dict) -> Config:
    return Config(**{n: v for n, v in resumed["config"].items() if n in FIELDS})


def is_done(c: Config, resumed: dict) -> bool:
    """Return whether this launch resumes a finished run and adds no time or iterations to it."""
    it = resumed["progress"]["iter_num"]
    time_is_up = c.hours and training_seconds(resumed["ledger"]) >= 3600 * c.hours
    return resumed["progress"]["evaluated_at"] == it and (time_is_up or it >= c.max_iters)


def open_data(c: Config, key: str, ranks: Ranks) -> Dataset:
    """Open the dataset that this key names. Raises UserError if it is missing or too short."""
    make_or_explain(c, key)
    data = open_dataset(getattr(c, key), c.eval_size)
    if any(theirs != data.fingerprint for theirs in ranks.gather(data.fingerprint)):
        ranks.fail(f"{key}: some rank has other files; give all machines the same")
    ranks.on_main(check_dataset, data, c.block_size)
    return data


def check_data(c: Config, data: Dataset, start: Start) -> None:
    """Raise UserError if the data do not match the checkpoint or the weights."""
    if start.state:
        check_tokens("dataset", data, start.state, c.out_dir if start.resumed else start.source)
    if start.resumed and start.resumed["data_fingerprint"] != data.fingerprint:
        trained = f"what {c.out_dir} was trained on ({start.resumed['config']['dataset']})"
        change = "or has changed since; for a new run give another --out_dir"
        raise UserError(f"dataset: {data.source} is not {trained}, {change}")


def check_tokens(key: str, data: Dataset, known: dict, source: str) -> None:
    """
    Raise UserError if the dataset of this key has other tokens than `source`, whose tokenizer and
    vocab are `known`: a checkpoint, weights, or another dataset's facts().
    """
    hint = f"prepare the text with the tokenizer of {source}"
    theirs, ours = known["tokenizer"], data.tokenizer
    if not same_tokenizer(theirs, ours):
        kinds = f"a different tokenizer ({ours['kind']}) from {source} ({theirs['kind']})"
        raise UserError(f"{key}: {data.source} has {kinds}; {hint}")
    if known["vocab"] < data.vocab:
        ids = f"{data.vocab} token ids, but {source} knows only {known['vocab']}"
        raise UserError(f"{key}: {data.source} has {ids}; {hint}")


# -----------------------------------------------------------------------------
# Model, optimizer, schedule


def make_model(c: Config, vocab: int, hw: Hardware, weights: dict | None):
    """Return the model on its device, with `weights` or else with random ones, which seed sets."""
    torch.manual_seed(c.seed)
    config = model_config(c, vocab, flash=hw.flash(c), compiled=hw.compiles, weights=weights)
    model = build_model(config).to(hw.device)
    if weights:
        load_weights(model, weights)
    return model


def run_length(it: int, c: Config, share: float) -> float:
    """
    Return how many iterations the run has. With hours this is predicted at iteration `it`, from the
    share of them that has passed, as if the pace stayed the same.
    """
    return min(c.max_iters, it / share) if it and share else c.max_iters


def get_lr(it: int, c: Config, length: float, peak: float) -> float:
    """
    Return the learning rate of iteration `it` in a run of `length` iterations. The rate warms up to
    `peak`, then decays to the fraction of it that min_lr is of learning_rate. A run with hours
    warms up for at most a tenth of its iterations.
    """
    decay_end: float = c.lr_decay_iters or length
    warmup: float = c.warmup_iters
    if c.hours:
        decay_end = min(decay_end, length)
        warmup = min(warmup, decay_end / 10)
    # 1) linear warmup; like nanoGPT's, it starts above 0
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    # 2) constant: no decay
    if c.lr_schedule == "constant":
        return peak
    # 3) decay from the end of the warmup or, with wsd, over the last decay_fraction of the run
    begin = warmup
    if c.lr_schedule == "wsd":
        begin = max(warmup, (1 - c.decay_fraction) * decay_end)
    decayed = 1.0  # how much of the decay is over, from 0 to 1
    if it < decay_end:
        decayed = max(0, it - begin) / max(1, decay_end - begin)
    left = 1 - decayed
    if c.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * decayed))
    lowest = c.min_lr * (peak / c.learning_rate if c.learning_rate else 1)
    return max(c.lr_floor * peak, lowest + left * (peak - lowest))


def set_rates(optimizer, it: int, c: Config, share: float) -> None:
    """Set each group's learning rate for iteration `it`, and what Muon's other schedules follow."""
    length = run_length(it, c, share)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it, c, length, group["initial_lr"])
        group["share"], group["length"] = it / length, length


# -----------------------------------------------------------------------------
# Why the run stops


class Stopped(Exception):
    """Raised on all ranks where the run cannot go on; `reason` is a signal's name, or "data"."""

    def __init__(self, reason: str | None):
        super().__init__(reason)
        self.reason = reason or "data"  # no signal: a rank cannot read its data


# -----------------------------------------------------------------------------
# What the loop asks before each iteration. Asking changes nothing


def why_stop(c: Config, now: Now, progress: Progress) -> str | None:
    """Return why the run is complete here, or None. is_done() must know each reason, too."""
    if progress.iter_num >= c.max_iters:
        return "max_iters"
    if now.share >= 1:  # counting all launches; a last evaluation and save follow
        return "hours"
    return None


def evaluation_due(c: Config, progress: Progress, stop: str | None) -> bool:
    """
    Return whether to evaluate here: every eval_interval iterations, and when the run is complete
    (`stop`).
    """
    if progress.is_evaluated:
        return False  # the resumed run made this evaluation before it saved
    return bool(stop) or progress.iter_num % c.eval_interval == 0


def is_best(progress: Progress) -> bool:
    """Return whether the weights of this iteration have a lower val_loss than any saved before."""
    return progress.is_evaluated and progress.val_loss < progress.best_val_loss


def save_due(c: Config, now: Now, progress: Progress, saver: Saver, stop: str | None) -> bool:
    """
    Return whether to save here: every checkpoint_interval iterations or ten minutes, after an
    evaluation, half a minute after a failed save, and at the end.
    """
    it = progress.iter_num
    if saver.newest == (it, progress.evaluated_at):
        return False
    if stop:
        return True
    # The retry saves the current weights. If the best ones could not be saved, they are lost
    if saver.failed and now.seconds_since_save >= RETRY_SECONDS:
        return True
    if it == 0:
        return False
    if progress.is_evaluated:
        return True
    if c.checkpoint_interval:
        return it % c.checkpoint_interval == 0
    return now.seconds_since_save >= SAVE_EVERY


# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Run forward and backward over this rank's micro-batches, (B, T) inputs and targets each, then
    update the weights once. The loss is the mean over all ranks' targets other than -1, so it does
    not depend on the micro-batch size. If a gradient is not finite, the update is skipped.

    Returns the sum of the micro-batches' weighted losses in nats, and other numbers for the log: by
    default the gradient norm before clipping. All stay on the device, so with a fused optimizer
    nothing in this function waits for the GPU.
    """
    accum = len(micro_batches)
    is_ddp = isinstance(model, DistributedDataParallel)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    # Weigh each micro-batch by its targets. The mean over all micro-batches, which the division by
    # accum and DDP take, is then the mean over all targets. If none is masked, each weight is 1.0
    targets = torch.stack([(y != -1).sum() for _, y in micro_batches])
    all_targets, all_micro_batches = targets.sum(), accum
    if is_ddp:
        torch.distributed.all_reduce(all_targets, group=model.process_group)
        all_micro_batches *= model.process_group.size()
    weights = targets * all_micro_batches / all_targets.clamp(min=1)
    for micro_step, (x, y) in enumerate(micro_batches):
        if is_ddp:  # average gradients across ranks once per iteration, in the last backward pass
            model.require_backward_grad_sync = micro_step == accum - 1
        with autocast:
            loss = weights[micro_step] * model(x, y)
        scaler.scale(loss / accum).backward()  # accumulates into .grad
        loss_sum += loss.detach()

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
    return loss_sum, dict(grad_norm=grad_norm)


def report_skips(in_a_row: Tensor, it: int, log: Log, ranks: Ranks) -> None:
    """Warn if the last updates were skipped. MAX_SKIPS of them end the run."""
    skipped = int(in_a_row)
    if skipped:
        log.warn(it, f"the last {skipped} updates were skipped: a gradient was not finite")
    if skipped >= MAX_SKIPS:
        hint = "try a lower learning_rate or --dtype=float32"
        ranks.fail(f"{skipped} updates in a row skipped; {hint}; {RESUME}")


def wait_for_data(batches: Batches, accum: int, signals: StopSignals) -> None:
    """
    Wait until every rank has the next iteration's micro-batches in host memory. Raises Stopped if a
    signal arrives or a rank cannot read any more data.
    """
    while True:
        ready = batches.ready(accum)
        # agree() returns the maxima over all ranks, and sets signals.name if any rank got a signal
        failed, waiting = signals.agree(batches.error is not None, not ready)
        # batches that were read before a failure are still used
        if signals.name or (waiting and failed):
            raise Stopped(signals.name)
        if not waiting:
            return


# -----------------------------------------------------------------------------
# Evaluating and sampling


@torch.no_grad()
def estimate_loss(
    model, splits: dict[str, ShardTokens], measures, batches, c, hw, ranks, signals
) -> dict[str, float]:
    """
    Return an evaluation's numbers by name. NAME_loss is a split's mean loss on fixed windows, in
    nats per token, without dropout. The windows do not depend on the micro-batch size or the number
    of ranks. The other numbers come from `measures`. Every rank must call this, and gets all
    numbers. Raises Stopped if a signal arrives or a rank cannot read its data.
    """
    tokens = min(c.eval_size, len(splits["val"]))  # the same number from each split
    losses: dict[str, float] = {}
    others: dict[str, float] = {}
    model.eval()
    try:
        for name, split in splits.items():
            micro_batches = batches.read_eval(
                split, tokens, spread=name == "train", wait=signals.comes_within
            )
            (failed,) = signals.agree(micro_batches is None)
            if failed or micro_batches is None:
                raise Stopped(signals.name)
            loss_sum, count = ranks.sum(*sum_losses(model, micro_batches, hw, signals))
            losses[f"{name}_loss"] = loss_sum / count
        for name, function in measures.items():
            if signals.stop_asked():
                raise Stopped(signals.name)
            others[name] = ranks.on_main(measure, function, model, hw)
    finally:
        model.train()
    return dict(**losses, **others)  # raises TypeError if a measure has the name of a loss


def measure(function: Callable[[GPT], float], model, hw: Hardware) -> float:
    """Return the number that function(model) returns. Nothing is compiled for it."""
    with hw.autocast(), torch.compiler.set_stance("force_eager"):
        return float(function(model))


def sum_losses(model, micro_batches: list[Batch], hw, signals) -> tuple[float, int]:
    """Return the summed loss over all targets in nats, and their number. Raises Stopped."""
    counts = []
    # Allocate one tensor before the loop. On a CPU, a small tensor per micro-batch would lie
    # between the freed logits, and memory would grow by gigabytes (see keep_freed_memory in
    # hardware.py)
    means = torch.empty(len(micro_batches), device=hw.device)
    for n, (x, y) in enumerate(micro_batches):  # every rank has as many, so all ask the signals
        with hw.autocast():
            means[n] = model(x.to(hw.device), y.to(hw.device))
        if signals.stop_asked():
            raise Stopped(signals.name)
        counts.append(int((y != -1).sum()))
    # a micro-batch without targets, at the end of a rank's share, has no mean loss
    sums = [mean * n for mean, n in zip(means.tolist(), counts, strict=True) if n]
    return math.fsum(sums), sum(counts)


def evaluate_only(model, data: Dataset, splits, measures, c, hw, ranks: Ranks, start: Start) -> int:
    """Evaluate the weights once, print the numbers and write nothing. Returns the exit code."""
    say(*origin_lines(c, start), hw.line(), describe(model, data.vocab), data.line())
    if not start.state:
        say(f"eval_only: {c.out_dir} holds no checkpoint; this model is untrained")
    batches = Batches(data, c, hw.device, 0, ranks.rank, ranks.world_size)
    signals = StopSignals(ranks)
    began = time.perf_counter()
    try:
        numbers = estimate_loss(model, splits, measures, batches, c, hw, ranks, signals)
    except Stopped as stopped:
        return exit_code(stopped.reason, batches, signals)
    finally:
        batches.close()
    it = start.resumed["progress"]["iter_num"] if start.resumed else 0
    say(evaluation_line(it, numbers, time.perf_counter() - began, data))
    say(f"val_loss: {numbers['val_loss']:.4f}")
    return 0


def sample_tokenizer(c: Config, data: Dataset, progress, log: Log) -> Tokenizer | None:
    """Open the tokenizer of samples, if the run prints any. Warn if it is missing."""
    try:
        return Tokenizer(data.tokenizer) if c.sample_tokens else None
    except UserError as error:  # offline, and the vocabulary is not cached
        log.warn(progress.iter_num, f"sample_tokens: {error}; continuing without samples")
        return None


def print_sample(
    model, text: Tokenizer, data: Dataset, progress, c: Config, hw: Hardware, log: Log
) -> None:
    """Print sample_tokens tokens from the model, always drawn with the same random numbers."""
    prompt = text.start_ids()
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    model.eval()
    with hw.autocast():
        idx = torch.tensor([prompt], device=hw.device)
        ids = generate(model, idx, c.sample_tokens, data.vocab, 0.8, 200, generator=generator)
    model.train()
    log.report_sample(progress.iter_num, text.decode(ids[0, len(prompt) :].tolist()))


# -----------------------------------------------------------------------------
# Saving and resuming


def end_if_diverged(model, progress: Progress, ranks: Ranks) -> None:
    """End the run if it has diverged, before a save could replace a good checkpoint."""
    signs = [f"{n} is not finite" for n, p in model.named_parameters() if not p.isfinite().all()]
    if progress.evaluated_at > 0 and not progress.val_loss < MAX_LOSS:
        signs.append(f"the val loss is {progress.val_loss:.4g}")
    signs = [sign for of_rank in ranks.gather(signs) for sign in of_rank]
    if signs:
        problem = f"iter {progress.iter_num}: {signs[0]}, so the weights are not saved"
        ranks.fail(f"{problem}; use a lower learning_rate; {RESUME}")


def state_to_save(c, data: Dataset, model, optimizer, scaler, progress, clock, hw, ranks) -> dict:
    """Collect what a resume needs into a checkpoint. Every rank must call this."""
    return data.facts() | dict(
        config=config_values(c),
        model_config=config_to_dict(model.config),
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
        rng=ranks.gather(hw.get_rng_states()),  # one entry per rank
        progress=asdict(progress),
        ledger=dict(clock.seconds),
        val_loss=progress.val_loss if progress.is_evaluated else None,
    )


def save(state: dict, stop: str | None, saver: Saver, signals: StopSignals, log: Log) -> bool:
    """
    Save the state, and return whether that worked. If the disk is full or missing, warns once. At
    the end of a run (`stop`), waits until it has room or is back. After a signal, tries only once
    and then raises UserError, because the sender wants the device back.
    """
    it, has_failed = state["progress"]["iter_num"], saver.failed
    while problem := saver.save(state):
        if not stop:
            if not has_failed:
                log.warn(it, f"{problem}; trying again within a minute")
            return False
        if signals.stop_asked():
            saver.ranks.fail(f"{problem}; {RESUME}")
        hint = "trying again every minute; Ctrl-C gives up and frees the device"
        log.warn(it, f"{problem}; {hint}")
        signals.wait(FINAL_RETRY_SECONDS)
    log.report_save(it)
    return True


def restore(resumed: dict, optimizer, scaler, c: Config, hw: Hardware, rank: int) -> Progress:
    """
    Restore the optimizer, the scaler, the random states and the progress. Other parts of the
    checkpoint are read by Clock and Saver. Raises UserError.
    """
    restore_optimizer(optimizer, resumed["optimizer"], c)
    if scaler.is_enabled() and resumed["scaler"]:
        scaler.load_state_dict(resumed["scaler"])
    if rank < len(resumed["rng"]):
        hw.set_rng_states(resumed["rng"][rank])
    return Progress(**resumed["progress"])


def restore_optimizer(optimizer, saved: dict, c: Config) -> None:
    """Restore the optimizer's state. The hyperparameters come from the configuration."""
    ours, theirs = optimizer.state_dict()["param_groups"], saved["param_groups"]
    if [group["param_names"] for group in ours] != [group["param_names"] for group in theirs]:
        problem = f"the optimizer in {c.out_dir} groups the weights differently"
        hint = f"--init_from={c.out_dir} with another --out_dir starts from the weights alone"
        raise UserError(f"init_from: {problem}; {hint}")
    optimizer.load_state_dict(saved | dict(param_groups=ours))
    # Clone CPU tensors. They are mapped from the checkpoint file, and would keep it open for the
    # whole run.
    for moments in optimizer.state.values():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.device.type == "cpu":
                moments[name] = moment.clone()


# -----------------------------------------------------------------------------
# The run


def main(argv: list[str], import_seconds: float = 0.0) -> int:
    began = time.perf_counter() - import_seconds

    # Which run is this, and where does it begin? All ranks go through this function together, but
    # rank 0 alone reads the command, prints, samples and writes: `on_main` calls a function there,
    # and all ranks get its result or its error
    ranks = Ranks()
    c, start = choose_run(argv, ranks)
    if start.resumed and not c.eval_only and is_done(c, start.resumed):
        ranks.on_main(checkpoint.link_best, Path(c.out_dir), start.resumed["progress"])
        done = f"all {start.resumed['progress']['iter_num']:,} iterations are done"
        say(f"{c.out_dir}: {done}; to start a new run, give another --out_dir")
        return 0

    # Data and device. An evaluation measures the loss of each split named here, and the number that
    # each function in `measures` returns for the model. All of them are logged, drawn and compared
    keep_awake()
    data = open_data(c, "dataset", ranks)  # may download the tokens first
    ranks.on_main(check_data, c, data, start)
    splits = {"train": data.train, "val": data.val}
    measures: dict[str, Callable[[GPT], float]] = {}
    hw = hardware.set_up(c, ranks.local_rank)
    if len({*ranks.gather(hw.name)}) > 1:  # they round differently
        ranks.fail("device: GPUs of different models; CUDA_VISIBLE_DEVICES=0,1 chooses some of one")
    c, fitted = fit_run(c, data.vocab, hw, ranks, start.state)  # the micro-batch that fits
    explain_errors(lambda error: hardware.explain_memory(error, c, ranks.world_size))

    # Model and optimizer. All ranks start from the same weights but draw different dropout masks;
    # a resume continues with the random states that it has saved
    model = make_model(c, data.vocab, hw, start.state)
    if c.eval_only:
        return evaluate_only(model, data, splits, measures, c, hw, ranks, start)
    torch.manual_seed(c.seed + ranks.rank)
    optimizer = build_optimizer(model, c, hw.dtype)
    # float16 gradients would underflow without a loss scale; for other dtypes this does nothing
    scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
    progress = Progress()
    if start.resumed:
        progress = restore(start.resumed, optimizer, scaler, c, hw, ranks.rank)

    # Files, clock, log and batches. out_dir is absolute, because after a share's return the current
    # folder may still be unreachable
    out_dir = Path(c.out_dir).absolute()
    saver = Saver(out_dir, c.keep_checkpoints, ranks)
    # From here on out_dir belongs to this run. Lock it, create the logs and delete temporary files.
    # In a new run, rename an earlier log. On a resume, drop the log records that the run will write
    # again, and rename newer checkpoints, which are damaged
    saver.claim(start.resumed)
    clock = Clock(began, hw.synchronize, c, start.resumed, ranks)
    log = Log(c, clock, hw, data, model, optimizer, progress, saver)
    log.begin(start, fitted)  # also starts the tracker
    tokenizer = sample_tokenizer(c, data, progress, log) if ranks.is_main else None
    # A thread of `batches` now reads ahead, beginning with the run's next sequence
    batches = Batches(data, c, hw.device, progress.sequences, ranks.rank, ranks.world_size)
    del start  # frees the loaded checkpoint

    # Compile, and compare with eager code in float32. If compiled code fails or is wrong, the run
    # ends
    if hw.compiles:
        clock.lap("start-up")  # book the seconds since the last lap
        compile_checked(model, c, data.vocab, hw, ranks)
        clock.lap("compile")
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    freeze_garbage()  # so that collections need not scan a million torch objects
    clock.lap("start-up")
    accum = c.gradient_accumulation_steps // ranks.world_size  # micro-batches per rank
    skipped = torch.zeros((), device=hw.device)  # updates in a row, counted on the device
    signals = StopSignals(ranks)  # from now on, a signal makes the loop save and stop
    clock.begin_iterations(progress)  # measure speed, and count hours, from here on

    while True:
        it = progress.iter_num
        now = clock.now()  # rank 0's clock decides for all ranks

        # `stop` is the reason to stop here, or None. "max_iters" and "hours" complete the run. With
        # any other reason, which Stopped brings, it can be resumed
        stop = why_stop(c, now, progress)
        numbers = None
        try:
            if not stop:
                wait_for_data(batches, accum, signals)  # also checks for signals

            # a complete run ends with the averages of its weights, if the optimizer keeps them
            if stop and load_averages(optimizer):
                log.report_averages(it)

            # evaluate once in a while and when the run is complete
            if evaluation_due(c, progress, stop):
                with clock.pause("evaluation"):  # keeps its seconds out of iteration times
                    numbers = estimate_loss(model, splits, measures, batches, c, hw, ranks, signals)
                    progress.evaluate(numbers["val_loss"])
                    log.report_eval(it, progress.tokens, numbers)
        except Stopped as stopped:  # the next launch makes the evaluation that was cut short
            stop = stopped.reason

        # save once in a while, and at the end. If the disk is full, keep training and try again;
        # at the end, wait until it has room or a signal comes
        if save_due(c, now, progress, saver, stop):
            with clock.pause("checkpoints"):
                end_if_diverged(model, progress, ranks)
                to_save = progress
                if is_best(progress):  # best.pt too, and the best so far if this save works
                    to_save = replace(progress, best_val_loss=progress.val_loss, best_iter=it)
                state = state_to_save(c, data, model, optimizer, scaler, to_save, clock, hw, ranks)
                if save(state, stop, saver, signals, log):
                    progress = to_save
                del state  # otherwise the tensors that an optimizer replaces would stay in memory

        # print a sample of the evaluated weights
        if numbers and tokenizer and it > 0:
            with clock.pause("samples"):
                print_sample(model, tokenizer, data, progress, c, hw, log)

        if stop:
            break

        # train for one iteration. An error here ends the run without another save
        set_rates(optimizer, it, c, now.share)
        micro_batches = batches.take(accum)
        loss_sum, step_numbers = train_step(
            ddp_model, optimizer, scaler, micro_batches, c.grad_clip, hw.autocast()
        )
        skipped = (skipped + 1) * ~step_numbers["grad_norm"].isfinite()
        tokens_before = progress.tokens
        progress.iter_num += 1
        progress.tokens += ranks.world_size * sum(x.numel() for x, _ in micro_batches)
        progress.sequences = batches.consumed

        # log every log_interval iterations, and after the last one. Training waits for the device
        # only here, so it also notices skipped updates here; MAX_SKIPS in a row end the run
        is_last = progress.iter_num == c.max_iters
        if it % c.log_interval == 0 or is_last:
            # speed since the last line, including waits for data but not evaluations and saves; but
            # the loss of this iteration alone
            speed = clock.lap_iterations(progress, hw.peak_memory_gib())
            (total,) = ranks.sum(loss_sum.item())
            loss = total / (len(micro_batches) * ranks.world_size)
            lr = optimizer.param_groups[0]["lr"]
            log.report_step(it, tokens_before, progress.tokens, loss, lr, step_numbers, speed)
            report_skips(skipped, it, log, ranks)

    batches.close()
    clock.lap("steps")  # book the last seconds before the log prints the ledger
    log.finish(stop, progress)
    saver.close()
    return exit_code(stop, batches, signals)


def exit_code(stop: str, batches: Batches, signals: StopSignals) -> int:
    """Return the exit code of a launch that stopped for this reason, or raise its error."""
    if stop == "data":  # the rank that failed to read raises its own error
        raise batches.error or UserError()
    return 128 + signal.Signals[stop] if stop == signals.name else 0


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED), end_process)
