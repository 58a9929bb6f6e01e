"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

The whole run is on this page, in the order in which it happens; main() at the end is its story. One
iteration is train_step(): gradient_accumulation_steps micro-batches forward and backward, then one
update. model.py has GPT-2, model_fast.py the fast recipe, configurator.py every key, data/ the
tokens, and training/ the machine around the run, one job a file.

    torchrun --standalone --nproc_per_node=2 train.py config/gpt124m_a100.py     several GPUs

Exit codes: 0 done or max_minutes over, 1 failed, 2 bad configuration or data, 128 + signal: stopped
by it, and saved unless it came twice or before the loop.
"""

import contextlib
import gc
import math
import os
import signal
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch is a part of the run's time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile: no traceback

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.child import keep_awake
from common.console import RunError, UserError, raise_if_any, run_main, say
from configurator import (
    FIELDS,
    NEVER,
    Config,
    config_values,
    divisors,
    read_config,
    resolve,
    rounding_line,
)
from data.loader import Batch, Batches
from data.shards import Dataset, check_dataset, make_on_demand, open_dataset
from data.stream import open_stream
from data.tokenizer import Tokenizer
from model import FREE_ON_RESUME, GPTConfig, generate
from model_fast import FastConfig, Muon, build_model, config_to_dict, muon_groups
from training import checkpoint, hardware
from training.clock import Clock
from training.compiled import compile_and_check
from training.hardware import Hardware
from training.log import Log
from training.pretrained import load_pretrained, load_weights
from training.ranks import Ranks, StopSignals, check_shares, end_process, lost_rank

# What decides the weights' shapes and names. vocab_size is no key: it follows from the dataset.
NOT_A_SHAPE = FREE_ON_RESUME | {"vocab_size"}
ARCHITECTURE = ["model", *(f.name for f in fields(FastConfig) if f.name not in NOT_A_SHAPE)]
# What a resume takes from the checkpoint; to ask for another value is an error. settle() takes some
# more unless they are given. All other keys come from the command, as at a first launch
FIXED_ON_RESUME = [*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream"]
# Tokens per chunk of the loss. Eager code keeps 12 bytes per logit, so its chunks are smaller.
# Compiled code keeps 2, and with more than 8 chunks it kept the gradients of all logits.
LOSS_CHUNK, COMPILED_LOSS_CHUNK, MOST_CHUNKS = 512, 4096, 8
MAX_SKIPS = 20  # updates in a row; float16 may need 16 to find its loss scale
RETRY_SECONDS = 60  # between two tries of the last save; for those before, see training/clock.py
# Ends that complete a run, after a last evaluation. After others init_from=auto resumes it.
COMPLETE = ("eval_only", "max_iters", "hours", "until")


@dataclass
class Progress:
    """How far a run is: what changes from iteration to iteration besides weights and optimizer."""

    iter_num: int = 0  # iterations done, those with a skipped update included
    tokens: int = 0  # trained on
    sequences: int = 0  # read: the position in the order of the data
    evaluated_at: int = -1  # iteration of the last evaluation
    val_loss: float = math.inf  # of the last evaluation
    best_val_loss: float = math.inf  # the lowest of the start and of the checkpoints on the disk
    best_iter: int = -1  # its iteration; best.pt is the checkpoint of it


# -----------------------------------------------------------------------------
# Where the run starts


def newest_checkpoint(c: Config) -> Path | None:
    """The checkpoint that the run goes on from, checked. None for a new run. Raises UserError."""
    evaluates_run = c.eval_only and "init_from" not in c.given
    if c.init_from not in ("resume", "auto") and not evaluates_run:
        return None
    out_dir = Path(c.out_dir)
    path = checkpoint.find_newest(out_dir)
    if path or c.init_from == "auto" or evaluates_run:
        return path
    hint = "--init_from=auto starts a new run there"
    if others := sorted(out_dir.glob("*.pt")):  # best.pt alone, or nanoGPT's ckpt.pt
        hint = f"--init_from={others[0]} with another --out_dir starts from its weights"
    raise UserError(f"init_from: {out_dir} holds no checkpoint (ckpt-*.pt) to resume; {hint}")


def find_start(c: Config, newest: Path | None) -> tuple[dict | None, dict | None]:
    """
    Where the run starts: (the state that it goes on from, the state whose weights the model takes).
    None where there is none. Raises UserError if another run is in the way.
    """
    if newest:
        state = checkpoint.load(newest)
        return state, state  # this run's own
    is_new = c.init_from in ("scratch", "auto")
    others = sorted(Path(c.out_dir).glob("*.pt"))
    if others and (is_new or not c.eval_only):
        way = "--init_from=auto resumes it"
        if not checkpoint.list_checkpoints(Path(c.out_dir)):  # best.pt alone, or nanoGPT's ckpt.pt
            way = f"--init_from={others[0]} with another --out_dir starts from its weights"
        raise UserError(
            f"out_dir: {others[-1]} is of an earlier run; {way}; for a new run: another --out_dir"
        )
    if is_new:
        return None, None  # random weights
    block_size = c.block_size if "block_size" in c.given else None
    return None, load_pretrained(c.init_from, block_size)  # weights trained elsewhere


def settle(c: Config, resumed: dict | None, initial: dict | None, world_size: int) -> Config:
    """
    The configuration with what the start and this machine decide. Nothing changes it afterwards.
    Raises UserError with a line for each problem, before anything is written.
    """
    problems: list[str] = []
    if resumed:
        c, problems = keep_values(c, FIXED_ON_RESUME, resumed["config"], c.out_dir)
        kept = [name for name in ("dataset", "tokenizer") if name not in c.given]
        kept += ["dtype"] if c.dtype == "auto" else []  # the one that the run started with
        c = replace(c, **{name: resumed["config"][name] for name in kept})
        if c.is_resized:
            c, indivisible = keep_tokens(c, resumed["config"])
            problems += indivisible
    elif initial:
        saved = initial["model_config"]
        names = ARCHITECTURE
        if saved["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
            saved = saved | dict(pad_vocab_multiple=1)
            names = [*names, "pad_vocab_multiple"]
        c, problems = keep_values(c, names, saved, c.init_from)
    problems += hardware.check_device(c)
    problems += [] if c.stream else check_dataset(c)
    c, impossible = resolve(c)
    raise_if_any(problems + impossible + check_shares(c, world_size))
    if c.dtype == "auto":
        dtype = hardware.best_dtype(hardware.choose_device(c, local_rank=0))
        c = replace(c, dtype=str(dtype).removeprefix("torch."))
    return c


def keep_values(c: Config, names: list[str], saved: dict, source: str) -> tuple[Config, list[str]]:
    """
    The configuration with the saved values of these keys, and a problem if a file or flag sets one
    of them to something else. A key that is newer than the saved values had its default.
    """
    values = {name: saved.get(name, FIELDS[name].default) for name in names}
    different = [
        f"{name} {value!r} (asked for: {getattr(c, name)!r})"
        for name, value in values.items()
        if name in c.given and getattr(c, name) != value
    ]
    if not different:
        return replace(c, **values), []
    hint = "leave them out, or give another --out_dir or --init_from"
    return replace(c, **values), [f"init_from: {source} has {', '.join(different)}; {hint}"]


def keep_tokens(c: Config, saved: dict) -> tuple[Config, list[str]]:
    """The configuration with the saved tokens per iteration, if the new batch_size divides them."""
    sequences = saved["gradient_accumulation_steps"] * saved["batch_size"]
    accum, rest = divmod(sequences, c.batch_size)
    if not rest:
        kept = dict(gradient_accumulation_steps=accum, tokens_per_iter=saved["tokens_per_iter"])
        return replace(c, **kept, rounded_from=0), []
    sizes = divisors(sequences)
    near = [
        *[n for n in sizes if n < c.batch_size][-1:],
        *[n for n in sizes if n > c.batch_size][:1],
    ]
    problem = f"{c.batch_size} does not divide the {sequences} sequences of this run's iterations"
    return c, [f"batch_size: {problem}; nearest: {' or '.join(map(str, near))}"]


def is_done(c: Config, resumed: dict) -> bool:
    """Whether the run that is resumed was complete, and is not given more time or iterations."""
    it = resumed["progress"]["iter_num"]
    before = resumed["config"]
    same_end = (c.hours, c.until) == (before["hours"], before["until"])
    time_is_up = c.by_clock and same_end and resumed["clock"]["share"] >= 1
    return resumed["progress"]["evaluated_at"] == it and (time_is_up or it >= c.max_iters)


def open_data(c: Config, resumed: dict | None, initial: dict | None, ranks: Ranks) -> Dataset:
    """
    The dataset: a folder, or a stream, which rank 0 prepares for all. Raises UserError if it is not
    the one that the run or the weights were trained on.
    """
    if c.stream:
        data = open_stream(c, ranks, resumed["shards_read"] if resumed else [])
    else:
        ranks.on_main(make_on_demand, c)  # the quickstart's, if it is missing
        data = open_dataset(c.dataset)
    ranks.check_same("dataset", data.fingerprint, "give all machines the same files")
    ranks.on_main(check_data, c, data, resumed, initial)
    return data


def check_data(c: Config, data: Dataset, resumed: dict | None, initial: dict | None) -> None:
    """Raises UserError if the data do not belong to the run or the weights."""
    if not initial:
        return
    source = c.out_dir if resumed else c.init_from
    theirs, ours = initial["tokenizer"], data.tokenizer
    if theirs != ours and "unknown" not in (theirs["kind"], ours["kind"]):
        kinds = f"another tokenizer ({ours['kind']}) than {source} ({theirs['kind']})"
        raise UserError(f"dataset: {data.source} has {kinds}; give data made with that one")
    if resumed and resumed["data_fingerprint"] != data.fingerprint:
        trained = f"what {c.out_dir} was trained on ({resumed['config']['dataset']})"
        hint = "or has changed since; for a new run give another --out_dir"
        raise UserError(f"dataset: {data.source} is not {trained}, {hint}")
    if initial["vocab"] < data.vocab:
        known = f"{data.vocab} token ids, but {source} knows only {initial['vocab']}"
        raise UserError(f"dataset: {data.source} has {known}; give data made with its tokenizer")


def say_start(c: Config, resumed: dict | None, initial: dict | None) -> None:
    """Print where the run begins, and on a resume what has changed since the checkpoint."""
    if not resumed:
        if c.rounded_from:
            say(rounding_line(c))
        if initial:
            rest = "" if c.eval_only else "; iterations and learning rate start from 0"
            say(f"weights: {initial['source']}{rest}")
        elif c.eval_only:
            say(f"eval_only: {c.out_dir} holds no checkpoint; this model is untrained")
        return
    it = resumed["progress"]["iter_num"]
    say(f"resume: {checkpoint.checkpoint_path(c.out_dir, it)}, iteration {it:,}")
    for name, value in config_values(c).items():
        before = resumed["config"].get(name, FIELDS[name].default)
        is_news = name not in ("init_from", "wandb_run_name") and NEVER not in (value, before)
        if value != before and is_news:
            say(f"resume: {name} = {value!r} (the checkpoint had {before!r})")


# -----------------------------------------------------------------------------
# Model, optimizer, schedule


def model_config(
    c: Config, vocab: int, *, flash: bool, compiled: bool, initial: dict | None = None
) -> GPTConfig:
    """
    The model that a configuration describes. `vocab` is rounded up; with `initial` weights their
    size counts instead. `flash` and `compiled`: whether this machine does what the keys ask for.
    """
    kind = FastConfig if c.model == "fast" else GPTConfig
    values = {f.name: getattr(c, f.name) for f in fields(kind) if f.name in FIELDS}
    multiple = c.pad_vocab_multiple
    values["vocab_size"] = -(-vocab // multiple) * multiple  # 50257 -> 50304
    if initial:
        values["vocab_size"] = initial["model_config"]["vocab_size"]
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
    The learning rate of iteration `it`: linear warmup to `peak`, then decay to min_lr. With hours
    or until, `share` of the schedule is done, from 0 to 1: it tells in which iteration the decay
    ends, and warmup takes at most a tenth of these iterations.
    """
    # where the decay ends; with hours or until both keys are endless, unless flags set them
    end: float = c.lr_decay_iters or c.max_iters
    warmup: float = c.warmup_iters
    if c.by_clock:
        if it > 0 and share > 0:
            end = min(end, it / share)  # where the time is up, if the pace holds
        warmup = min(warmup, end / 10)
    # 1) linear warmup; the first rate is above 0, as nanoGPT's
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    # 2) no decay
    if c.lr_schedule == "constant":
        return peak
    # 3) decay: from the end of the warmup, or with wsd in the last part
    start = warmup
    if c.lr_schedule == "wsd":
        start = max(start, end - round(c.decay_fraction * end))
    done = 1.0 if it >= end else max(0, it - start) / max(1, end - start)
    left = dict(
        cosine=0.5 * (1 + math.cos(math.pi * done)),
        linear=1 - done,
        wsd=1 - done,
    )
    return c.min_lr + left[c.lr_schedule] * (peak - c.min_lr)


# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, Tensor]:
    """
    One iteration: this rank's micro-batches, (B, T) inputs and targets each, forward and backward;
    then one update, which is skipped if a gradient is not finite. The gradient is that of the mean
    over the micro-batches of their mean losses.

    Returns the sum of these losses, in nats, and the gradient norm before clipping. Both stay on
    the device; with a fused optimizer nothing here waits for it.
    """
    accum = len(micro_batches)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for micro_step, (x, y) in enumerate(micro_batches):
        # several ranks average their gradients once, at the last micro-step
        defers = isinstance(model, DistributedDataParallel) and micro_step < accum - 1
        with model.no_sync() if defers else contextlib.nullcontext():
            with autocast:
                loss = model(x, y)
            scaler.scale(loss / accum).backward()  # adds to the gradients
        loss_sum += loss.detach()
    scaler.unscale_(optimizer)
    # with grad_clip = 0 the norm is only measured
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    if optimizer.defaults.get("fused"):
        # 1 makes the update change nothing, and nobody waits for the device. In float16 the scaler
        # puts its own finding there.
        optimizer.found_inf = (~grad_norm.isfinite()).float()
        scaler.step(optimizer)
    elif grad_norm.isfinite():  # waits for the device
        scaler.step(optimizer)
    scaler.update()
    # With None, DDP would allocate every gradient a second time: 4 bytes per parameter.
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return loss_sum, grad_norm


def wait_for_data(batches: Batches, accum: int, signals: StopSignals) -> str | None:
    """
    Wait until every rank has the micro-batches of the next iteration on the host. Returns why no
    iteration can follow: a signal's name, "data" if a rank cannot read on, or None.
    """
    while True:
        ready = batches.ready(accum)
        failed, waiting = signals.agree(batches.error is not None, not ready)
        if signals.name:
            return signals.name
        if not waiting:  # what was read before a failure is still trained on
            return None
        if failed:  # it would wait for windows that never come
            return "data"


# -----------------------------------------------------------------------------
# Evaluating and sampling


@torch.no_grad()
def evaluate(
    model, micro_batches: list[Batch], hw: Hardware, signals: StopSignals
) -> tuple[float, int]:
    """
    Sum of the loss over all targets of `micro_batches` in nats, without dropout, and their number;
    of fewer of them if a signal comes. Leaves the model in training mode.
    """
    losses, counts = [], []
    model.eval()
    for x, y in micro_batches:
        if signals.stop_asked():  # on all ranks together; each has as many micro-batches
            break
        with hw.autocast():
            losses.append(model(x.to(hw.device), y.to(hw.device)))
        counts.append(int((y != -1).sum()))
    model.train()
    found = torch.stack(losses).tolist() if losses else []
    # a micro-batch without targets, at the end of some rank's share, has no mean
    return math.fsum(loss * n for loss, n in zip(found, counts, strict=True) if n), sum(counts)


def estimate_loss(
    model, data: Dataset, batches: Batches, c: Config, hw: Hardware, signals: StopSignals
) -> tuple[list[float], str | None]:
    """
    Mean losses on fixed windows of the train and of the val split: the same tokens at any micro-
    batch and number of ranks; and what ended the evaluation before that, a signal's name or "data"
    if a rank cannot read its windows. All ranks take part.
    """
    means: list[float] = []
    # both splits are evaluated on the same number of tokens
    tokens = min(c.eval_size, len(data.val))
    for split, spread in ((data.train, True), (data.val, False)):
        windows = batches.read_eval(split, tokens, spread)
        (failed,) = signals.agree(windows is None)
        if failed:
            return means, signals.name or "data"
        loss_sum, count = signals.ranks.sum(*evaluate(model, windows or [], hw, signals))
        if signals.name:
            return means, signals.name
        means.append(loss_sum / count)
    return means, None


def print_sample(model, data: Dataset, p: Progress, c: Config, hw: Hardware, log: Log) -> None:
    """Print sample_tokens tokens from the model, drawn with the same random numbers each time."""
    try:
        text = Tokenizer(data.tokenizer)
    except UserError as error:  # offline, without its vocabulary
        log.warn(p.iter_num, f"no sample: {error}")
        return
    prompt = text.start_ids()
    idx = torch.tensor([prompt], device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    model.eval()
    with hw.autocast():
        ids = generate(model, idx, c.sample_tokens, data.vocab, 0.8, 200, generator=generator)
    model.train()
    log.report_sample(p.iter_num, text.decode(ids[0, len(prompt) :].tolist()))


# -----------------------------------------------------------------------------
# Saving and resuming


def state_to_save(
    c: Config, data: Dataset, model, optimizer, scaler, p: Progress, clock: Clock, log: Log
) -> dict:
    """
    What a checkpoint holds: all that restore() and Clock need. All ranks take part. Raises RunError
    if a weight is not finite: once saved, it would soon replace the good checkpoints.
    """
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            problem = f"iter {p.iter_num}: {name} is not finite, so the weights are not saved"
            hint = checkpoint.resume_hint(c.out_dir)
            log.ranks.fail(f"{problem}; with a lower learning_rate, {hint}")
    return dict(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
        rng=log.ranks.gather(hardware.get_rng_state(log.hw.device)),  # a rank's own each
        progress=asdict(p),
        ledger=dict(clock.seconds),
        clock=clock.state_dict(),
        model_config=config_to_dict(model.config),
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        data_fingerprint=data.fingerprint,
        shards_read=data.stream.shards_read(p.sequences) if data.stream else [],
        config=config_values(c),
        val_loss=p.val_loss if p.evaluated_at == p.iter_num else None,
        unwritten=log.unwritten.decode(),
        peak=log.hw.peak_to_save(),
    )


def restore(resumed: dict, optimizer, scaler, c: Config, hw: Hardware, rank: int) -> Progress:
    """All of a checkpoint but the weights. Hyperparameters are those of the configuration."""
    saved = resumed["optimizer"]
    ours = optimizer.param_groups  # load_state_dict() makes new ones
    names = [group["param_names"] for group in saved["param_groups"]]
    try:
        if names != [group["param_names"] for group in ours]:
            raise ValueError("its groups hold other weights")
        optimizer.load_state_dict(saved)  # compares the groups' sizes
    except ValueError as error:
        problem = f"the optimizer in {c.out_dir} is not this one ({error})"
        raise UserError(f"init_from: {problem}; a new --out_dir takes its weights alone") from None
    for group, hyperparameters in zip(optimizer.param_groups, ours, strict=True):
        group |= hyperparameters
    # on a CPU they are mapped to the file, whose space the disk could not use again
    for moments in optimizer.state.values():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.device.type == "cpu":
                moments[name] = moment.clone()
    if scaler.is_enabled() and resumed["scaler"]:
        scaler.load_state_dict(resumed["scaler"])
    if rank < len(resumed["rng"]):
        hardware.set_rng_state(resumed["rng"][rank], hw.device)
    p = Progress(**resumed["progress"])
    before = Config(**{n: v for n, v in resumed["config"].items() if n in FIELDS})
    if before.eval_size != c.eval_size:
        p.best_val_loss = math.inf  # losses on other tokens do not compare: a new best
    return p


def save(state: dict, c: Config, log: Log, signals: StopSignals, last: bool) -> bool:
    """
    Rank 0 saves `state`; all ranks take part. Returns whether it is on the disk: on a full disk the
    run goes on, and the loop tries again with newer state (now.retry). The `last` save is tried
    each minute until there is room. A signal ends that with RunError; after one that ended the run
    there is a single try.
    """
    it = state["progress"]["iter_num"]
    while problem := log.ranks.on_main(try_to_save, state, c, log):
        if not last:
            if log.clock.failed_at is None:  # said once, until one is saved
                log.warn(it, f"{problem}; trying again within a minute")
            return False
        if signals.stop_asked():
            log.ranks.fail(f"{problem}; make room, then {checkpoint.resume_hint(c.out_dir)}")
        log.warn(it, f"{problem}; trying again each minute; Ctrl-C gives up, and frees the device")
        signals.wait(RETRY_SECONDS)
    return True


def try_to_save(state: dict, c: Config, log: Log) -> str:
    """Returns an error line if the disk is full or fails, else ""."""
    it = state["progress"]["iter_num"]
    out_dir = Path(c.out_dir)
    try:
        if not out_dir.exists():
            log.warn(it, f"{out_dir} was deleted, with the log in it; making it again")
        path = checkpoint.save_newest(state, out_dir, c.keep_checkpoints, check=not log.has_saved)
    except OSError as error:
        return f"checkpoint {it} is not saved: {error.strerror or error}"
    except UserError as error:  # the first one, read back
        raise RunError(f"{error}; this disk does not keep what is written to it") from None
    log.report_save(it, path)
    return ""


# -----------------------------------------------------------------------------
# The run


def main(argv: list[str], import_seconds: float = 0.0) -> int:
    began = time.perf_counter() - import_seconds
    # The processes of torchrun; without it, rank 0 of 1. on_main(): rank 0 calls the function, and
    # all ranks get its result. main_first(): all call it, rank 0 before the others
    ranks = Ranks()
    asked = ranks.on_main(read_config, argv)
    newest = ranks.on_main(newest_checkpoint, asked)
    if newest:
        ranks.check_same(str(newest), newest.exists(), "several machines need one shared --out_dir")
    resumed, initial = ranks.main_first(find_start, asked, newest)  # on a resume one object
    c = ranks.on_main(settle, asked, resumed, initial, ranks.world_size)
    keep_awake()  # Windows would sleep
    hw = hardware.set_up(c, ranks.local_rank)
    data = open_data(c, resumed, initial, ranks)
    if resumed and is_done(c, resumed) and not c.eval_only:
        it = resumed["progress"]["iter_num"]
        key = "max_iters" if it >= c.max_iters else "until" if c.until else "hours"
        done = f"all {it:,} iterations are done"
        say(f"{c.out_dir}: {done}; to continue, give another --{key}; for a new run, --out_dir")
        return 0
    hw.find_peak(resumed["peak"] if resumed else None)
    compiles = bool(c.compile) and hw.can_compile and not c.eval_only

    # Model and optimizer; on resume, in their saved state
    hardware.set_seed(c.seed)  # the same weights on every rank
    gpt_config = model_config(c, data.vocab, flash=hw.flash(c), compiled=compiles, initial=initial)
    model = build_model(gpt_config).to(hw.device)
    hardware.set_seed(c.seed + ranks.rank)  # but different dropout
    optimizer = build_optimizer(model, c, hw.dtype)
    # scales the loss in float16, whose gradients would underflow; otherwise does nothing
    scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
    p = Progress()
    on_disk = None  # what is saved: (iteration, iteration of its last evaluation)
    if initial:
        load_weights(model, initial)
    if resumed:
        p = restore(resumed, optimizer, scaler, c, hw, ranks.rank)
        on_disk = (p.iter_num, p.evaluated_at)
    eval_model = model  # its weights are evaluated, sampled from, saved as "model" and exported

    # Clock, log and batches. From here on out_dir belongs to this run. `hours` counts all launches
    # from their start, but not the time between them
    clock = Clock(c, began, hw.synchronize, resumed)
    log = Log(c, clock, hw, ranks)
    ranks.on_main(log.open, resumed)
    if not c.eval_only:
        ranks.check_shared(Path(c.out_dir, "lock"), "several machines need one shared --out_dir")
    log.say_settings(compiles, gpt_config.flash)
    say_start(c, resumed, initial)
    log.begin(data, model, p.iter_num, p.tokens)
    batches = Batches(data, c, hw.device, p.sequences, ranks.rank, ranks.world_size)
    del resumed, initial  # frees the loaded checkpoint
    clock.lap("start-up")

    if c.compile and not hw.can_compile:
        say("compile: off; torch's compiler for MPS is an early prototype")
    problem = ""  # why the run is not compiled, if it should be; compile=required ends here
    if compiles:
        say("compiling: this takes about a minute")
        problem = compile_and_check(model, c, data.vocab, hw, ranks)
        if problem:
            model.loss_chunk = loss_chunk(c, compiled=False)
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    gc.collect()  # free what compiling left behind
    gc.freeze()  # or each collection would search a million objects of torch
    seconds = clock.lap("compile")
    if compiles:
        log.report_compile(p.iter_num, seconds, problem)
    accum = c.gradient_accumulation_steps // ranks.world_size  # a rank's micro-batches
    autocast = hw.autocast()
    in_a_row = torch.zeros((), device=hw.device)  # updates skipped, up to the last one
    since_line = torch.zeros((), device=hw.device)  # updates skipped since the last log line
    signals = StopSignals(ranks)  # from here on a signal asks the loop to save and stop

    while True:
        it = p.iter_num

        # between two iterations: does the run end here? Rank 0's clock says for all ranks, before
        # the evaluation and the save below:
        #   minutes   that this launch has lasted
        #   share     of the schedule by time that is done: 1 at the last update, after which there
        #             is time for an evaluation and a save
        #   is_over   no further update
        #   evaluate  by time without eval_interval: at each twentieth of share
        #   save      without checkpoint_interval: ten minutes after the last one
        #   retry     half a minute after a save that failed
        #   has_time  for an evaluation or a save besides those at the end
        now = ranks.on_main(clock.decide, it)
        stop: str | None
        if c.eval_only:
            stop = "eval_only"
        elif it >= c.max_iters:  # never, with hours or until alone
            stop = "max_iters"
        elif now.is_over:
            stop = "until" if c.until else "hours"
        elif c.max_minutes and now.minutes >= c.max_minutes:  # its last save comes on top
            stop = "max_minutes"
        else:
            # why no iteration can follow: a signal's name, "data", or None. An evaluation and a
            # last save that fails look for signals, too
            stop = wait_for_data(batches, accum, signals)

        # once in a while, and at the end: evaluate, on all ranks
        eval_due = (it % c.eval_interval == 0 or now.evaluate) and now.has_time and not stop
        if (eval_due or stop in COMPLETE) and (p.evaluated_at != it or c.eval_only):
            clock.lap("steps")
            losses, cut_short = estimate_loss(eval_model, data, batches, c, hw, signals)
            if cut_short:
                stop = cut_short  # whatever it was; the resumed run begins with this evaluation
            else:
                train_loss, p.val_loss = losses
                p.evaluated_at = it
                if it == 0 and math.isfinite(p.val_loss):  # best.pt must be better than the start
                    p.best_val_loss = p.val_loss
                    p.best_iter = 0
                log.report_eval(it, p.tokens, train_loss, p.val_loss)
                if c.sample_tokens and ranks.is_main and it > 0 and math.isfinite(p.val_loss):
                    print_sample(eval_model, data, p, c, hw, log)
            clock.lap("evaluation", done=not cut_short)

        # by iterations or time, after an evaluation (always_save_checkpoint=False: the best one),
        # after a save that failed, and at the end: rank 0 saves what is not on the disk
        is_unsaved = on_disk != (it, p.evaluated_at) and not c.eval_only
        is_evaluated = p.evaluated_at == it
        is_best = is_evaluated and p.val_loss < p.best_val_loss
        by_schedule = it % c.checkpoint_interval == 0 if c.checkpoint_interval else now.save
        has_reason = by_schedule or is_best or (is_evaluated and c.always_save_checkpoint)
        save_due = has_reason and it > 0 and now.has_time
        if is_unsaved and (save_due or now.retry or stop):
            clock.lap("steps")
            to_save = replace(p)  # becomes p if it is saved; else this best is forgotten
            if is_best:
                to_save.best_val_loss = p.val_loss
                to_save.best_iter = it  # this save makes best.pt
            state = state_to_save(c, data, eval_model, optimizer, scaler, to_save, clock, log)
            is_saved = save(state, c, log, signals, last=bool(stop))
            if is_saved:
                on_disk = (it, p.evaluated_at)
                p = to_save
            del state
            clock.lap("checkpoints", done=is_saved)
        if stop:
            break

        # one iteration: all ranks, each with its own micro-batches
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, c, now.share, group["initial_lr"])
        micro_batches = batches.take(accum)
        loss_sum, grad_norm = train_step(
            ddp_model, optimizer, scaler, micro_batches, c.grad_clip, autocast
        )
        skips = ~grad_norm.isfinite()  # all ranks have the same gradients
        in_a_row = (in_a_row + 1) * skips
        since_line = since_line + skips
        tokens_before = p.tokens
        p.iter_num += 1
        p.tokens += ranks.world_size * sum(x.numel() for x, _ in micro_batches)
        p.sequences = batches.consumed

        # every log_interval, and after the last update of the schedule: a line. Only here do
        # iterations wait for the device, so only here skipped updates are seen. `time`: the mean of
        # the iterations since the last line, waits for data included; laps of evaluations, saves
        # and compiling are not in it. `tok/s`: of all ranks in that time. `loss`: of this
        # iteration, on all ranks
        is_last = p.iter_num == c.max_iters or now.share >= 1  # 1: the clock's last update
        if it % c.log_interval == 0 or is_last:
            clock.lap("steps")
            (total,) = ranks.sum(loss_sum.item())
            loss = total / (len(micro_batches) * ranks.world_size)
            norm = grad_norm.item()
            lr = optimizer.param_groups[0]["lr"]
            log.report_step(it, tokens_before, p.tokens, loss, lr, norm, batches.waited)
            if skipped := int(since_line):
                reason = "a gradient was not finite"
                log.warn(it, f"{skipped} updates skipped since the last line: {reason}")
                since_line = torch.zeros_like(since_line)
            if int(in_a_row) >= MAX_SKIPS:
                hint = "try a lower learning_rate or dtype=float32"
                ranks.fail(f"{MAX_SKIPS} updates in a row skipped; {hint}")

    batches.close()
    clock.lap("steps")  # the last seconds, before the log says where all of them went
    log.finish(stop, stop in COMPLETE, p.iter_num, p.tokens, p.val_loss, batches.waited)
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
    if newest:  # which decides some keys
        c = settle(c, *find_start(c, newest), world_size=1)
    c, _ = resolve(c)
    return hardware.out_of_memory_line(c, int(os.environ.get("WORLD_SIZE", 1)))


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED), explain, end_process)
