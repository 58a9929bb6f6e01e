"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

The whole run is on this page, in the order in which it happens. main() at the end tells the story
and makes every decision: when to evaluate, to save, to try a save again, to make best.pt, to end.
One iteration is train_step(): gradient_accumulation_steps micro-batches forward and backward, then
one update. model.py has GPT-2, model_fast.py the fast recipe, configurator.py every key, data/ the
tokens, and training/ the machine around the run, one job a file.

    torchrun --standalone --nproc_per_node=2 train.py config/gpt124m_a100.py     several GPUs

Exit codes: 0 done or max_minutes over, 1 failed, 2 bad configuration or data, 128 + signal: stopped
by it, and saved unless it came twice or before the loop.
"""

import copy
import gc
import math
import os
import signal
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch is a part of the run's time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C comes during the imports

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.child import keep_awake
from common.console import RunError, UserError, raise_if_any, run_main, say, warn
from configurator import (
    FIELDS,
    UNREACHED,
    Config,
    config_values,
    read_config,
    resolve,
)
from data.loader import Batch, Batches
from data.shards import Dataset, check_dataset, make_on_demand, open_dataset
from data.stream import open_stream
from data.tokenizer import Tokenizer
from model import FREE_ON_RESUME, GPTConfig, generate
from model_fast import FastConfig, Muon, build_model, config_to_dict, muon_groups
from training import checkpoint, hardware
from training.clock import Clock, Schedule, Speedometer
from training.compiled import compile_and_check
from training.hardware import Hardware
from training.log import Log
from training.pretrained import load_pretrained, load_weights
from training.ranks import Ranks, StopSignals, end_process, lost_rank

# Keys that decide the shapes and names of the weights. A new field of the models' configs is one of
# them, unless FREE_ON_RESUME names it. The vocabulary's size is no key: it follows from the dataset
ARCHITECTURE = (
    "model",
    *(f.name for f in fields(FastConfig) if f.name not in (*FREE_ON_RESUME, "vocab_size")),
)
# Keys that a resumed run keeps; setting one to another value is an error. Add a key here if
# changing it would make the saved state wrong
FIXED_ON_RESUME = (*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream")
# Tokens per chunk of the loss. Eager code keeps 12 bytes per logit, so its chunks are smaller.
# Compiled code keeps 2, and with more than 8 chunks it kept the gradients of all logits.
LOSS_CHUNK, COMPILED_LOSS_CHUNK, MOST_CHUNKS = 512, 4096, 8
SAVE_EVERY = 600  # seconds between saves, unless checkpoint_interval is set
RETRY_SECONDS = 30  # from a save that failed to the next try
FINAL_RETRY_SECONDS = 60  # the same for the last save of a run, which waits for room
MAX_SKIPS = 20  # updates in a row; float16 may need 16 to find its loss scale
# Reasons to stop that finish a run. A run stopped for any other reason can be resumed. A new reason
# here also needs a line in is_done() and say_done()
COMPLETE = ("eval_only", "max_iters", "hours", "until")


@dataclass
class Progress:
    """How far a run is. The loop changes it; checkpoints keep it."""

    iter_num: int = 0  # iterations done, those with a skipped update included
    tokens: int = 0  # trained on
    sequences: int = 0  # read: the position in the order of the data
    evaluated_at: int = -1  # iteration of the last evaluation
    evaluated_share: float = -1.0  # with hours or until: the share of the time done at that point
    val_loss: float = math.inf  # of the last evaluation
    best_val_loss: float = math.inf  # the lowest of the start and of the checkpoints on the disk
    best_iter: int = -1  # its iteration; 0 is the untrained model, which has no best.pt as a rule


# -----------------------------------------------------------------------------
# Where the run starts


def newest_checkpoint(c: Config) -> Path | None:
    """
    Return the newest checkpoint of the run that this command resumes, its checksums compared; None
    for a new run. Raises UserError.
    """
    # --eval_only without --init_from evaluates out_dir's run
    evaluates_run = c.eval_only and "init_from" not in c.set_keys
    if c.init_from not in ("resume", "auto") and not evaluates_run:
        return None
    out_dir = Path(c.out_dir)
    path = checkpoint.find_newest(out_dir)
    if path is None and c.init_from == "resume":
        hint = weights_hint(out_dir) or "--init_from=auto starts a new run there"
        raise UserError(f"init_from: {out_dir} holds no checkpoint (ckpt-*.pt) to resume; {hint}")
    return path


def initial_weights(c: Config) -> dict | None:
    """
    Load the weights that a new run starts from; None for random ones. Raises UserError, also if
    another run is in out_dir.
    """
    from_scratch = c.init_from in ("scratch", "auto")
    out_dir = Path(c.out_dir)
    others = sorted(out_dir.glob("*.pt"))
    if others and (from_scratch or not c.eval_only):
        has_run = checkpoint.list_checkpoints(out_dir)
        way = "--init_from=auto resumes it" if has_run else weights_hint(out_dir)
        raise UserError(
            f"out_dir: {others[-1]} is of an earlier run; {way}; for a new run: another --out_dir"
        )
    if from_scratch:
        return None
    return load_pretrained(c.init_from, c.block_size if "block_size" in c.set_keys else None)


def weights_hint(out_dir: Path) -> str:
    """What to type if a folder has only weights: best.pt, or nanoGPT's ckpt.pt. Else empty."""
    weights = sorted(out_dir.glob("*.pt"))
    if not weights:
        return ""
    return f"--init_from={weights[0]} with another --out_dir starts from its weights"


def config_of_run(c: Config, resumed, weights, world_size: int) -> Config:
    """
    Return the configuration with what the checkpoint or the weights (both None from scratch) and
    this machine decide. Nothing changes it afterwards. Raises UserError with a line for each
    problem, before anything is written.
    """
    problems: list[str] = []
    if resumed:
        other = "--out_dir for a new run"
        c, problems = keep_values(c, FIXED_ON_RESUME, resumed["config"], c.out_dir, other)
        kept = [name for name in ("dataset", "tokenizer") if name not in c.set_keys]
        kept += ["dtype"] if c.dtype == "auto" else []  # the one that the run started with
        c = replace(c, **{name: resumed["config"][name] for name in kept})
    elif weights:
        saved = weights["model_config"]
        names = ARCHITECTURE
        if saved["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
            saved = saved | dict(pad_vocab_multiple=1)
            names = (*names, "pad_vocab_multiple")
        c, problems = keep_values(c, names, saved, c.init_from, "--init_from")
    problems += hardware.check_device(c)
    problems += [] if c.stream else check_dataset(c)
    c, impossible = resolve(c, world_size, resumed["config"] if resumed else None)
    raise_if_any(problems + impossible + hardware.no_gpu_problem(c))
    if c.dtype == "auto":
        dtype = hardware.best_dtype(hardware.choose_device(c, local_rank=0))
        c = replace(c, dtype=str(dtype).removeprefix("torch."))
    return c


def keep_values(
    c: Config, names: tuple[str, ...], saved: dict, source: str, other: str
) -> tuple[Config, list[str]]:
    """
    Return the configuration with the saved values of these keys, and a problem for each that a file
    or flag sets to something else. A key that is newer than the saved values had its default.
    """
    values = {name: saved.get(name, FIELDS[name].default) for name in names}
    problems = [
        f"{name}: {source} has {value!r}, you asked for {getattr(c, name)!r}. "
        f"Drop {'--' if name in c.typed else ''}{name}, or give another {other}"
        for name, value in values.items()
        if name in c.set_keys and getattr(c, name) != value
    ]
    return replace(c, **values), problems


def is_done(c: Config, resumed: dict) -> bool:
    """Whether the resumed run was complete, and this launch adds no time or iterations."""
    it = resumed["progress"]["iter_num"]
    before = resumed["config"]
    same_end = (c.hours, c.until) == (before["hours"], before["until"])
    time_is_up = c.by_clock and same_end and resumed["clock"]["share"] >= 1
    return resumed["progress"]["evaluated_at"] == it and (time_is_up or it >= c.max_iters)


def say_done(c: Config, resumed: dict) -> None:
    it = resumed["progress"]["iter_num"]
    key = "max_iters" if it >= c.max_iters else "until" if c.until else "hours"
    done = f"all {it:,} iterations are done"
    say(f"{c.out_dir}: {done}; to continue, give another --{key}; for a new run, --out_dir")


def open_data(c: Config, resumed: dict | None, weights: dict | None, ranks: Ranks) -> Dataset:
    """
    Open the dataset, or start the stream. Raises UserError if the data do not match the checkpoint
    or the weights.
    """
    if c.stream:
        data = open_stream(c, ranks, resumed["shards_read"] if resumed else [])
    else:
        ranks.on_main(make_on_demand, c)  # the quickstart's, if it is missing
        data = open_dataset(c.dataset)
    ranks.check_same("dataset", data.fingerprint, "give all machines the same files")
    ranks.on_main(check_data, c, data, resumed, weights)
    return data


def check_data(c: Config, data: Dataset, resumed: dict | None, weights: dict | None) -> None:
    """Raise UserError if the data do not match the checkpoint or the weights."""
    if not weights:
        return
    source = c.out_dir if resumed else c.init_from
    theirs, ours = weights["tokenizer"], data.tokenizer
    if theirs != ours and "unknown" not in (theirs["kind"], ours["kind"]):
        kinds = f"another tokenizer ({ours['kind']}) than {source} ({theirs['kind']})"
        raise UserError(f"dataset: {data.source} has {kinds}; give data made with that one")
    if resumed and resumed["data_fingerprint"] != data.fingerprint:
        trained = f"what {c.out_dir} was trained on ({resumed['config']['dataset']})"
        hint = "or has changed since; for a new run give another --out_dir"
        raise UserError(f"dataset: {data.source} is not {trained}, {hint}")
    if weights["vocab"] < data.vocab:
        known = f"{data.vocab} token ids, but {source} knows only {weights['vocab']}"
        raise UserError(f"dataset: {data.source} has {known}; give data made with its tokenizer")


# -----------------------------------------------------------------------------
# Model, optimizer, schedule


def model_config(
    c: Config, vocab: int, *, flash: bool, compiled: bool, weights: dict | None = None
) -> GPTConfig:
    """
    Return the model that a configuration describes. `vocab` is rounded up, unless loaded `weights`
    have a size of their own. `flash` and `compiled`: whether this machine does what the keys ask.
    """
    kind = FastConfig if c.model == "fast" else GPTConfig
    values = {f.name: getattr(c, f.name) for f in fields(kind) if f.name in FIELDS}
    multiple = c.pad_vocab_multiple
    values["vocab_size"] = -(-vocab // multiple) * multiple  # 50257 -> 50304
    if weights:
        values["vocab_size"] = weights["model_config"]["vocab_size"]
    return kind(**values | dict(flash=flash, loss_chunk=loss_chunk(c, compiled)))


def loss_chunk(c: Config, compiled: bool) -> int:
    """Tokens whose logits are in memory at one time; 0: those of the whole micro-batch."""
    if c.loss_chunk != "auto":
        return 0 if c.loss_chunk == "off" else int(c.loss_chunk)
    if compiled:
        return max(COMPILED_LOSS_CHUNK, c.batch_size * c.block_size // MOST_CHUNKS)
    return LOSS_CHUNK


def build_optimizer(model, c: Config, dtype: torch.dtype) -> torch.optim.Optimizer:
    """
    Each group has its peak learning rate as initial_lr, which get_lr() scales; the log shows that
    of the first group. `dtype`: of Muon's matmuls.

    For another optimizer: a choice in configurator.py, and a return at the end of this function.
    Each weight is in one group, as (name, weight); a resume compares the names. If its defaults say
    fused=True, an update with found_inf = 1 must change nothing; otherwise each iteration waits for
    the device.
    """
    # a fused one can skip an update without waiting for the device
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    betas = (c.beta1, c.beta2)
    weights = [*model.named_parameters()]
    if c.optimizer == "muon":
        groups = muon_groups(
            model,
            matrix_lr=c.learning_rate,
            head_lr=c.head_lr,
            momentum=c.muon_momentum,
            betas=betas,
            weight_decay=c.weight_decay,
        )
    else:
        matrices = [(name, p) for name, p in weights if p.dim() >= 2]  # embeddings too
        vectors = [(name, p) for name, p in weights if p.dim() < 2]  # biases and norms
        adam = dict(betas=betas, initial_lr=c.learning_rate)
        groups = [
            dict(adam, params=matrices, weight_decay=c.weight_decay),
            dict(adam, params=vectors, weight_decay=0.0),
        ]
    groups = [dict(group, lr=group["initial_lr"]) for group in groups if group["params"]]
    grouped = [name for group in groups for name, _ in group["params"]]
    if wrong := [name for name, _ in weights if grouped.count(name) != 1]:
        raise UserError(f"optimizer: not in exactly one group: {', '.join(wrong)}")
    if c.optimizer == "muon":
        return Muon(groups, dtype, fused)
    return torch.optim.AdamW(groups, fused=fused)


def get_lr(it: int, c: Config, share: float, peak: float) -> float:
    """
    Return the learning rate of iteration `it`: linear warmup to `peak`, then a decay to min_lr.

    A run with hours or until does not know its number of iterations. `share`, the part of its
    schedule that is done (0 to 1), predicts it: at this pace, iteration it / share is the last.
    Such a run warms up for at most a tenth of its iterations.
    """
    decay_end: float = c.lr_decay_iters or c.max_iters
    warmup: float = c.warmup_iters
    if c.by_clock:  # decay_end is then endless, unless flags set it
        if it > 0 and share > 0:
            decay_end = min(decay_end, it / share)
        warmup = min(warmup, decay_end / 10)
    # 1) linear warmup; like nanoGPT's, it starts above 0
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    # 2) constant: no decay
    if c.lr_schedule == "constant":
        return peak
    # 3) decay, from the end of the warmup; with wsd only in the last decay_fraction of the run
    decay_start = warmup
    if c.lr_schedule == "wsd":
        decay_start = max(warmup, decay_end - round(c.decay_fraction * decay_end))
    done = 1.0  # the part of the decay that is done, from 0 to 1
    if it < decay_end:
        done = max(0, it - decay_start) / max(1, decay_end - decay_start)
    left = 1 - done
    if c.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    return c.min_lr + left * (peak - c.min_lr)


def warn_of_higher_rate(c: Config, schedule: Schedule, resumed: dict) -> None:
    """Warn if a resume raises the learning rate, as more max_iters do after the decay."""
    it = resumed["progress"]["iter_num"]
    before = Config(**{n: v for n, v in resumed["config"].items() if n in FIELDS})
    share = resumed["clock"]["share"]
    old = get_lr(it, before, share, before.learning_rate)
    if (before.hours, before.until) != (c.hours, c.until):
        share = copy.copy(schedule).look(it).share  # of a copy, because a look counts
    new = get_lr(it, c, share, c.learning_rate)
    if new > 1.01 * old:
        why = "its schedule is not the checkpoint's (see the resume: lines)"
        warn(f"learning_rate: this resume raises it from {old:.2e} to {new:.2e}; {why}")


# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, Tensor]:
    """
    Run forward and backward over this rank's micro-batches, (B, T) inputs and targets each, then
    update the weights once. The gradient is that of the mean of the micro-batches' mean losses. If
    it is not finite, the update is skipped.

    Returns the sum of these losses in nats, and the gradient norm before clipping. Both stay on the
    device: with a fused optimizer, nothing in this function waits for the GPU.
    """
    accum = len(micro_batches)
    is_ddp = isinstance(model, DistributedDataParallel)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for micro_step, (x, y) in enumerate(micro_batches):
        if is_ddp:  # average gradients across ranks once per iteration, in the last backward pass
            model.require_backward_grad_sync = micro_step == accum - 1
        with autocast:
            loss = model(x, y)
        scaler.scale(loss / accum).backward()  # accumulates into .grad
        loss_sum += loss.detach()

    # clip; with grad_clip = 0 the norm is only measured
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)

    # update, unless a gradient is not finite. A fused optimizer reads found_inf on the device (in
    # float16, GradScaler overwrites it). Any other optimizer has to wait for the norm
    is_fused = optimizer.defaults.get("fused")
    if is_fused:
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    if is_fused or grad_norm.isfinite():
        scaler.step(optimizer)
    scaler.update()

    # With None, DDP would allocate every gradient a second time: 4 bytes per parameter.
    optimizer.zero_grad(set_to_none=not is_ddp)
    return loss_sum, grad_norm


def wait_for_data(batches: Batches, accum: int, signals: StopSignals) -> bool:
    """
    Wait until every rank has the micro-batches of the next iteration on the host. Returns False if
    a signal comes, or if a rank cannot read on.
    """
    while True:
        ready = batches.ready(accum)
        failed, waiting = signals.agree(batches.error is not None, not ready)
        # what was read before a failure is still trained on
        if signals.name or (waiting and failed):
            return False
        if not waiting:
            return True


# -----------------------------------------------------------------------------
# Evaluating and sampling


class CutShort(Exception):
    """Ends an evaluation on all ranks: a signal has come, or a rank cannot read its data."""


@torch.no_grad()
def estimate_loss(model, data, batches, c, hw, ranks, signals) -> dict[str, float]:
    """
    Return the mean losses on fixed windows of the train and val splits, in nats per token, without
    dropout. The tokens are the same at any micro-batch size and number of ranks. All ranks take
    part. Raises CutShort.
    """
    tokens = min(c.eval_size, len(data.val))  # as many of the train split
    losses = {}
    model.eval()
    try:
        for name, split in (("train", data.train), ("val", data.val)):
            micro_batches = batches.read_eval(split, tokens, spread=name == "train")
            (failed,) = signals.agree(micro_batches is None)
            if failed or micro_batches is None:
                raise CutShort
            loss_sum, count = ranks.sum(*sum_losses(model, micro_batches, hw, signals))
            losses[name] = loss_sum / count
    finally:
        model.train()
    return losses


def sum_losses(model, micro_batches: list[Batch], hw, signals) -> tuple[float, int]:
    """Return the summed loss over all targets in nats, and their number. Raises CutShort."""
    losses, counts = [], []
    for x, y in micro_batches:  # as many on each rank, so that all ranks look for signals together
        if signals.stop_asked():
            raise CutShort
        with hw.autocast():
            losses.append(model(x.to(hw.device), y.to(hw.device)))
        counts.append(int((y != -1).sum()))
    means = torch.stack(losses).tolist()
    # a micro-batch without targets, at the end of some rank's share, has no mean
    return math.fsum(mean * n for mean, n in zip(means, counts, strict=True) if n), sum(counts)


def print_sample(model, data: Dataset, it: int, c: Config, hw: Hardware, log: Log) -> None:
    """Print sample_tokens tokens from the model, drawn with the same random numbers each time."""
    try:
        text = Tokenizer(data.tokenizer)
    except UserError as error:  # offline, without its vocabulary
        log.warn(it, f"no sample: {error}")
        return
    prompt = text.start_ids()
    idx = torch.tensor([prompt], device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    model.eval()
    with hw.autocast():
        ids = generate(model, idx, c.sample_tokens, data.vocab, 0.8, 200, generator=generator)
    model.train()
    log.report_sample(it, text.decode(ids[0, len(prompt) :].tolist()))


# -----------------------------------------------------------------------------
# Saving and resuming


def check_finite(model, it: int, c: Config, ranks: Ranks) -> None:
    """End the run if a weight is not finite, before a save can replace the good checkpoints."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            problem = f"iter {it}: {name} is not finite, so the weights are not saved"
            hint = checkpoint.resume_hint(c.out_dir)
            ranks.fail(f"{problem}; with a lower learning_rate, {hint}")


def state_to_save(c, data, model, optimizer, scaler, progress, schedule, hw, ranks) -> dict:
    """Return what a checkpoint holds: all that a resume needs. All ranks take part."""
    return dict(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
        rng=ranks.gather(hardware.get_rng_state(hw.device)),  # one entry per rank
        progress=asdict(progress),
        ledger=dict(schedule.clock.seconds),
        clock=schedule.state_dict(),
        model_config=config_to_dict(model.config),
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        data_fingerprint=data.fingerprint,
        shards_read=data.stream.shards_read(progress.sequences) if data.stream else [],
        config=config_values(c),
        val_loss=progress.val_loss if progress.evaluated_at == progress.iter_num else None,
        peak=hw.peak_to_save(),
    )


def restore(resumed: dict, optimizer, scaler, c: Config, hw: Hardware, rank: int) -> Progress:
    """
    Restore the optimizer, the scaler, the random states and the progress. Clock, Schedule, Saver,
    the peak and a stream take their own parts of the checkpoint. Raises UserError.
    """
    restore_optimizer(optimizer, resumed["optimizer"], c)
    if scaler.is_enabled() and resumed["scaler"]:
        scaler.load_state_dict(resumed["scaler"])
    if rank < len(resumed["rng"]):
        hardware.set_rng_state(resumed["rng"][rank], hw.device)
    progress = Progress(**resumed["progress"])
    before = Config(**{n: v for n, v in resumed["config"].items() if n in FIELDS})
    if before.eval_size != c.eval_size:
        progress.best_val_loss = math.inf  # losses on other tokens do not compare: a new best
    if (before.hours, before.until) != (c.hours, c.until):
        progress.evaluated_share = -1.0  # of another schedule: an evaluation is due soon
    return progress


def restore_optimizer(optimizer, saved: dict, c: Config) -> None:
    """Restore the optimizer's state. Its hyperparameters stay the configuration's."""
    ours, theirs = optimizer.state_dict()["param_groups"], saved["param_groups"]
    if [group["param_names"] for group in ours] != [group["param_names"] for group in theirs]:
        problem = f"the optimizer in {c.out_dir} is not this one (its groups hold other weights)"
        raise UserError(f"init_from: {problem}; a new --out_dir takes its weights alone")
    optimizer.load_state_dict(saved | dict(param_groups=ours))
    # copy: CPU tensors are memory-mapped to the checkpoint, which could otherwise never be freed
    for moments in optimizer.state.values():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.device.type == "cpu":
                moments[name] = moment.clone()


# -----------------------------------------------------------------------------
# The run


def main(
    argv: list[str],
    import_seconds: float = 0.0,
    *,
    build_model=build_model,  # bench.py measures runs with a model, batches and a step of its own
    make_batches=Batches,
    train_step=train_step,
) -> int:
    began = time.perf_counter() - import_seconds

    # Which run is this? Rank 0 reads the command and finds the checkpoint; all ranks load it
    ranks = Ranks()
    asked = ranks.on_main(read_config, argv)  # called on rank 0; all ranks get the result or error
    newest = ranks.on_main(newest_checkpoint, asked)
    if newest:
        ranks.check_same(str(newest), newest.exists(), "several machines need one shared --out_dir")
    resumed = ranks.main_first(checkpoint.load, newest) if newest else None  # this run's own state
    weights = resumed or ranks.main_first(initial_weights, asked)  # fills the model; None: random
    c = ranks.on_main(config_of_run, asked, resumed, weights, ranks.world_size)

    # Device and data
    keep_awake()
    hw = hardware.set_up(c, ranks.local_rank)
    saved_peak = resumed["peak"] if resumed else None
    hw.find_peak(saved_peak)
    data = open_data(c, resumed, weights, ranks)
    if resumed and is_done(c, resumed) and not c.eval_only:
        say_done(c, resumed)
        return 0
    compiles = bool(c.compile) and hw.can_compile and not c.eval_only

    # Model and optimizer. All ranks start from the same weights, and then drop out differently
    hardware.set_seed(c.seed)
    gpt_config = model_config(c, data.vocab, flash=hw.flash(c), compiled=compiles, weights=weights)
    model = build_model(gpt_config).to(hw.device)
    hardware.set_seed(c.seed + ranks.rank)
    optimizer = build_optimizer(model, c, hw.dtype)
    # float16 gradients would underflow without a loss scale; for other dtypes this does nothing
    scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
    progress = Progress()
    on_disk = None  # the newest checkpoint: (its iteration, the iteration of its last evaluation)
    if weights:
        load_weights(model, weights)
    if resumed:
        progress = restore(resumed, optimizer, scaler, c, hw, ranks.rank)
        on_disk = (progress.iter_num, progress.evaluated_at)
    # The weights to evaluate, sample and save as "model". If you make this an average, also save
    # the weights of `model` and load them here, or a resume would train the average
    eval_model = model

    # Files, clock, log and batches. From here on out_dir belongs to this run
    saver = checkpoint.Saver(Path(c.out_dir), c.keep_checkpoints)
    if not c.eval_only:
        ranks.on_main(saver.open, resumed)
        ranks.check_shared(saver.out_dir / "lock", "several machines need one shared --out_dir")
    clock = Clock(began, hw.synchronize, resumed)
    hw.find_peak(saved_peak)  # a second try, some seconds later: the better one counts
    schedule = Schedule(c, clock, resumed)
    log = Log(c, schedule, hw, ranks, saver.write_record)
    ranks.on_main(log.open, progress.iter_num)
    log.begin(model, data, progress.iter_num, progress.tokens, compiles, resumed, weights)
    if resumed and not c.eval_only:
        ranks.on_main(warn_of_higher_rate, c, schedule, resumed)
    batches = make_batches(data, c, hw.device, progress.sequences, ranks.rank, ranks.world_size)
    speedometer = Speedometer(clock, hw, progress.iter_num, progress.tokens)
    del resumed, weights  # frees the loaded checkpoint
    clock.lap("start-up")  # book the seconds since the last lap

    # Compile, and prepare the loop
    if c.compile and not hw.can_compile:
        say("compile: off; torch's compiler for MPS is an early prototype")
    problem = ""  # why the run is not compiled, if it should be; compile=required ends here
    if compiles:
        say("compiling: about a minute, or several on few CPU cores")
        problem = compile_and_check(model, c, data.vocab, hw, ranks)
        if problem:
            model.loss_chunk = loss_chunk(c, compiled=False)
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    gc.collect()  # what compiling left behind
    gc.freeze()  # or every collection would scan a million objects of torch
    seconds = clock.lap("compile")
    if compiles:
        log.report_compile(progress.iter_num, seconds, problem)
    accum = (
        c.gradient_accumulation_steps // ranks.world_size
    )  # a rank's micro-batches per iteration
    autocast = hw.autocast()
    skips_in_a_row = torch.zeros((), device=hw.device)  # updates skipped, up to the last one
    skips_since_line = torch.zeros((), device=hw.device)
    save_failed = False  # the last try to save
    signals = StopSignals(ranks)  # from here on, a signal makes the loop save and stop

    while True:
        it = progress.iter_num
        # Rank 0 looks at the clock for all ranks. If each rank looked at its own, they would decide
        # differently and wait for each other forever. clock.Now explains the fields
        now = ranks.on_main(schedule.look, it)

        # end? `stop` is the reason, or None. An evaluation that is cut short also sets it
        stop: str | None = None
        if c.eval_only:
            stop = "eval_only"
        elif it >= c.max_iters:  # never, with hours or until alone
            stop = "max_iters"
        elif now.time_is_up:
            stop = "until" if c.until else "hours"
        elif c.max_minutes and now.launch_minutes >= c.max_minutes:  # the last save comes on top
            stop = "max_minutes"
        elif not wait_for_data(batches, accum, signals):  # here all ranks also look for signals
            stop = signals.name or "data"

        # evaluate: every eval_interval iterations, with hours or until every twentieth of the time,
        # and when the run is complete. Base no decision on this last evaluation: a longer run would
        # not make it
        eval_due = it % c.eval_interval == 0
        if c.eval_interval == UNREACHED:
            eval_due |= int(20 * now.share) > int(20 * progress.evaluated_share)
        eval_due = eval_due and now.has_spare_time and not stop
        if (eval_due or stop in COMPLETE) and (progress.evaluated_at != it or c.eval_only):
            clock.lap("steps")
            try:
                losses = estimate_loss(eval_model, data, batches, c, hw, ranks, signals)
            except CutShort:
                stop = signals.name or "data"  # a resumed run begins with this evaluation
                clock.lap("evaluation")
            else:
                progress.val_loss = losses["val"]
                progress.evaluated_at = it
                progress.evaluated_share = now.share
                is_finite = math.isfinite(losses["val"])
                if it == 0 and is_finite:  # best.pt has to beat the untrained model
                    progress.best_val_loss = losses["val"]
                    progress.best_iter = 0
                log.report_eval(it, progress.tokens, losses, clock.since_lap())
                if c.sample_tokens and ranks.is_main and it > 0 and is_finite:
                    print_sample(eval_model, data, it, c, hw, log)
                schedule.expect("evaluation", clock.lap("evaluation"))

        # save: every checkpoint_interval iterations or ten minutes, after an evaluation, half a
        # minute after a save that failed, and at the end
        is_evaluated = progress.evaluated_at == it
        is_improved = progress.val_loss < progress.best_val_loss
        is_best = is_evaluated and (
            is_improved or progress.best_iter == it
        )  # the latter: at 0 alone
        if c.checkpoint_interval:
            save_due = it % c.checkpoint_interval == 0
        else:
            save_due = now.seconds_since_save >= SAVE_EVERY
        save_due |= is_best or (is_evaluated and c.always_save_checkpoint)
        save_due &= it > 0 and now.has_spare_time
        retry_due = save_failed and now.seconds_since_save >= RETRY_SECONDS
        is_unsaved = on_disk != (it, progress.evaluated_at) and not c.eval_only
        if is_unsaved and (save_due or retry_due or stop):
            clock.lap("steps")
            check_finite(eval_model, it, c, ranks)
            to_save = replace(progress)  # becomes progress if it is saved
            if is_best:  # a best that is not on the disk does not count
                to_save.best_val_loss = progress.val_loss
                to_save.best_iter = it
            state = state_to_save(
                c, data, eval_model, optimizer, scaler, to_save, schedule, hw, ranks
            )
            problem = ranks.on_main(saver.save, state, is_best)  # "", or such as a full disk
            while problem and stop:  # nothing follows, so wait for room until a signal comes
                if signals.stop_asked():
                    ranks.fail(f"{problem}; make room, then {checkpoint.resume_hint(c.out_dir)}")
                hint = "trying again each minute; Ctrl-C gives up, and frees the device"
                log.warn(it, f"{problem}; {hint}")
                signals.wait(FINAL_RETRY_SECONDS)
                problem = ranks.on_main(saver.save, state, is_best)
            del state
            if not problem:
                progress = to_save
                on_disk = (it, progress.evaluated_at)
                log.report_save(it, checkpoint.checkpoint_path(c.out_dir, it), clock.since_lap())
                schedule.expect("checkpoints", clock.since_lap())
            elif not save_failed:  # warn once, until one is saved
                log.warn(it, f"{problem}; trying again within a minute")
            save_failed = bool(problem)
            clock.lap("checkpoints")  # seconds_since_save restarts here, also if the save failed

        if stop:
            break

        # train: one iteration, on all ranks
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, c, now.share, group["initial_lr"])
        micro_batches = batches.take(accum)
        loss_sum, grad_norm = train_step(
            ddp_model, optimizer, scaler, micro_batches, c.grad_clip, autocast
        )
        is_skipped = ~grad_norm.isfinite()  # equal on all ranks, because they average gradients
        skips_in_a_row = (skips_in_a_row + 1) * is_skipped
        skips_since_line = skips_since_line + is_skipped
        tokens_before = progress.tokens
        progress.iter_num += 1
        progress.tokens += ranks.world_size * sum(x.numel() for x, _ in micro_batches)
        progress.sequences = batches.consumed

        # log: every log_interval iterations, and after the last one. The loop waits for the device
        # only here, so this is also where it notices skipped updates
        is_last = progress.iter_num == c.max_iters or now.share >= 1
        if it % c.log_interval == 0 or is_last:
            clock.lap("steps")
            (total,) = ranks.sum(loss_sum.item())
            loss = total / (len(micro_batches) * ranks.world_size)
            # per iteration since the last line: with waits for data, without evaluations and saves
            speed = speedometer.read(progress.iter_num, progress.tokens, batches.waited, ranks)
            schedule.expect("iteration", speed.iter_seconds)  # moves the rates of an --hours run
            lr = optimizer.param_groups[0]["lr"]
            norm = grad_norm.item()
            log.report_step(it, tokens_before, progress.tokens, loss, lr, norm, speed)
            if skipped := int(skips_since_line):
                reason = "a gradient was not finite"
                log.warn(it, f"{skipped} updates skipped since the last line: {reason}")
                skips_since_line = torch.zeros_like(skips_since_line)
            if int(skips_in_a_row) >= MAX_SKIPS:
                hint = "try a lower learning_rate or dtype=float32"
                if hw.device.type == "cuda":
                    hint += f"; on an H100 or B200 also {hardware.NO_CUDNN_ATTENTION}"
                ranks.fail(f"{MAX_SKIPS} updates in a row skipped; {hint}")

    batches.close()
    clock.lap("steps")  # the last seconds, before the log says where all of them went
    # the last evaluation and save may have needed more memory than the iterations
    (mem_gib,) = ranks.max(hw.peak_memory_gib() or 0.0)
    log.finish(stop, stop in COMPLETE, progress, batches.waited, mem_gib)
    saver.close()
    signals.close()
    if stop == "data":  # the rank that cannot read raises its error
        raise batches.error or RunError()
    return 128 + signal.Signals[stop] if stop == signals.name else 0


def explain(error: Exception, argv: list[str]) -> str:
    """The error line for an exhausted memory or a lost rank; empty for other errors."""
    if not hardware.is_out_of_memory(error):
        return lost_rank(error)
    c = read_config(argv)
    newest = newest_checkpoint(c)
    resumed = checkpoint.load(newest) if newest else None  # it decides some keys
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    c = config_of_run(c, resumed, resumed, world_size)
    return hardware.out_of_memory_line(c, world_size)


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED), explain, end_process)
