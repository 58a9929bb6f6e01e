"""
Train a GPT: `python train.py config/gpt124m_4070.py --batch_size=4`

The whole run is on this page. `main` at the end is its story: configuration, data, model,
optimizer, resume, and the loop. One iteration is train_step(): gradient_accumulation_steps
micro-batches forward and backward, then one update. model.py has the model, model_fast.py the fast
recipe, configurator.py the keys, training/ the machine around it.

    torchrun --standalone --nproc_per_node=2 train.py config/gpt124m_a100.py     several GPUs

Exit codes: 0 done, 1 failed, 2 bad configuration or data, 128 + signal: stopped by it, and saved.
"""

import contextlib
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if __name__ == "__main__":
    STARTED = time.perf_counter()  # importing torch is a part of the run's time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile: no traceback


import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.child import keep_awake
from common.console import RunError, UserError, command_line, raise_if_any, run_main, say, warn
from configurator import Config, config_values, read_config, resolve
from data.loader import Batch, TrainBatches, eval_batches, to_batch
from data.shards import Dataset, check_dataset, dataset_folder, is_made_on_demand, open_dataset
from data.stream import open_stream
from data.tokenizer import Tokenizer
from model import FREE_ON_RESUME, ChunkedLoss, GPTConfig, generate
from model_fast import FastConfig, Muon, build_model, config_to_dict, muon_groups
from training import checkpoint, hardware
from training.clock import Clock
from training.hardware import Hardware
from training.log import Log
from training.pretrained import load_pretrained
from training.ranks import Ranks, Signals, check_shares

# vocab_size is not a key; it follows from the dataset
ARCHITECTURE = [f.name for f in fields(FastConfig) if f.name not in FREE_ON_RESUME | {"vocab_size"}]
ARCHITECTURE += ["model"]
FIXED_ON_RESUME = [*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream"]
# Tokens per chunk of the loss. Eager code keeps 12 bytes per logit, so its chunks are smaller.
# Compiled code keeps 2, and with more than 8 chunks it kept the gradients of all logits.
LOSS_CHUNK, COMPILED_LOSS_CHUNK, MOST_CHUNKS = 512, 4096, 8
SAME_LOSS = 5e-3  # relative; in bfloat16 compiled losses differ by at most 1e-4 (results/speed.md)
MAX_SKIPS = 20  # updates in a row; float16 may need 16 to find its loss scale
RETRY_SECONDS = 60  # between two tries of the last save
# ends that complete a run, after a last evaluation; after others the same command resumes it
COMPLETE = ("eval_only", "max_iters", "hours", "until")


@dataclass
class Progress:
    """What changes from iteration to iteration, other than weights and optimizer."""

    iter_num: int = 0  # updates made
    tokens: int = 0  # trained on
    sequences: int = 0  # read: the position in the order of the data
    evaluated_at: int = -1  # iteration of the last evaluation
    val_loss: float = math.inf  # of the last evaluation
    best_val_loss: float = math.inf
    best_iter: int = -1


# -----------------------------------------------------------------------------
# Configuration, and where the run starts


def prepare(argv: list[str], world_size: int) -> tuple[Config, Path | None]:
    """
    The configuration of a command line, and the checkpoint to resume from, if any. Raises a
    UserError with all problems, before anything is written.
    """
    c = read_config(argv)
    problems, path = [], None
    try:
        path, start = find_checkpoint(c)
        problems = adopt(c, start or load_start(c, path))
    except UserError as error:
        problems = error.problems
    problems += hardware.check_device(c) + ([] if c.stream else check_dataset(c))
    raise_if_any(problems + resolve(c) + check_shares(c, world_size))
    if c.dtype == "auto":  # rank 0 chooses for all
        dtype = hardware.best_dtype(hardware.choose_device(c, local_rank=0))
        c.dtype = str(dtype).removeprefix("torch.")
    return c, path


def find_checkpoint(c: Config) -> tuple[Path | None, dict]:
    """
    The newest checkpoint of the run to resume, checked, and its state. None and {} for a new run.
    Raises UserError.
    """
    out_dir, newest = Path(c.out_dir), None
    state: dict = {}
    if c.init_from in ("resume", "auto"):
        newest, state = checkpoint.find_newest(out_dir)
    if not newest and c.init_from == "resume":
        hint = "--init_from=auto starts a new run there"
        raise UserError(f"init_from: {out_dir} holds no ckpt-*.pt to resume; {hint}")
    if not newest and not c.eval_only and (others := sorted(out_dir.glob("*.pt"))):
        ways = "--init_from=auto resumes ckpt-*.pt; for a new run: another --out_dir"
        raise UserError(f"out_dir: {others[-1]} is of an earlier run; {ways}")
    return newest, state


def load_start(c: Config, path: Path | None) -> dict:
    """The state of a checkpoint, or weights trained elsewhere, or {}: random weights."""
    if path:
        return checkpoint.load(path)
    if c.init_from in ("scratch", "auto"):
        return {}
    return load_pretrained(c.init_from, c.block_size if "block_size" in c.given else None)


def adopt(c: Config, start: dict) -> list[str]:
    """
    Take over the keys that a checkpoint or other weights decide. Returns those that a file or flag
    sets to something else.
    """
    if not start:
        return []
    resumed = "progress" in start
    saved = start["config"] if resumed else start["model_config"]
    fixed, source = (FIXED_ON_RESUME, c.out_dir) if resumed else (ARCHITECTURE, c.init_from)
    problems = [
        f"{name}: {getattr(c, name)!r} asked for, but {source} has {saved[name]!r}; leave it out"
        for name in fixed
        if name in c.given and getattr(c, name) != saved.get(name, getattr(c, name))
    ]
    defaults = [name for name in ("dataset", "tokenizer", "dtype") if name not in c.given]
    for name in fixed + (defaults if resumed else []):
        setattr(c, name, saved.get(name, getattr(c, name)))
    return problems


def open_data(c: Config, start: dict, ranks: Ranks) -> Dataset:
    """
    The dataset: a folder, or a stream, which rank 0 prepares for all. Raises UserError if it is not
    the one that the checkpoint or the weights were trained on.
    """
    if c.stream:
        data = open_stream(c, ranks, start.get("shards_read", []))
    else:
        ranks.from_main(make_quickstart_data, c)
        data = open_dataset(c.dataset)
    ranks.check_same("dataset", data.fingerprint, "give all machines the same files")
    theirs = start.get("tokenizer", data.tokenizer)
    problem = ""
    if start.get("data_fingerprint", data.fingerprint) != data.fingerprint and "progress" in start:
        problem = f"is not what {c.out_dir} was trained on ({start['config']['dataset']})"
    elif theirs != data.tokenizer and "unknown" not in (theirs["kind"], data.tokenizer["kind"]):
        problem = f"has the tokenizer {data.tokenizer['kind']}, the weights {theirs['kind']}"
    elif start.get("vocab", data.vocab) < data.vocab:
        problem = f"has {data.vocab} token ids, the weights {start['vocab']}"
    if problem and ranks.is_main:
        raise UserError(f"dataset: {data.source} {problem}; for a new run: another --out_dir")
    return data


def make_quickstart_data(c: Config) -> None:
    """Make the quickstart's dataset if it is missing: the one dataset that needs no download."""
    if not is_made_on_demand(c):
        return
    folder, script = dataset_folder(c.dataset), Path(__file__).parent / "data" / "prepare_text.py"
    say(f"data: preparing {folder} from Python's own source files")
    command = [sys.executable, str(script), f"--out={folder}"]
    # hide its output, which ends with a command to type next
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"dataset: {script} failed; see its message above")
    raise_if_any(check_dataset(c))


# -----------------------------------------------------------------------------
# Model and optimizer


def model_config(
    c: Config, vocab: int, weights: dict | None = None, flash: bool | None = None
) -> GPTConfig:
    """
    `vocab` is rounded up; with saved `weights` their size counts instead. `flash`, if given,
    replaces the configuration's.
    """
    kind = FastConfig if c.model == "fast" else GPTConfig
    values = {f.name: getattr(c, f.name) for f in fields(kind) if f.name != "vocab_size"}
    multiple = c.pad_vocab_multiple
    values["vocab_size"] = -(-vocab // multiple) * multiple  # 50257 -> 50304
    if weights:
        values["vocab_size"] = weights["model_config"]["vocab_size"]
    if flash is not None:
        values["flash"] = flash
    if c.loss_chunk != "auto":
        values["loss_chunk"] = 0 if c.loss_chunk == "off" else int(c.loss_chunk)
    elif c.compile:
        least = c.batch_size * c.block_size // MOST_CHUNKS
        values["loss_chunk"] = max(COMPILED_LOSS_CHUNK, least)
    else:
        values["loss_chunk"] = LOSS_CHUNK
    return kind(**values)


def build_optimizer(model, c: Config, dtype: torch.dtype) -> torch.optim.Optimizer:
    """
    Each group has its highest learning rate as initial_lr; that of the first one is logged.
    `dtype`: of Muon's matmuls. A fused optimizer can skip an update on the device; that of MPS
    cannot.
    """
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    betas = (c.beta1, c.beta2)
    optimizer: torch.optim.Optimizer
    if c.optimizer == "muon":
        groups = muon_groups(
            model,
            matrix_lr=c.learning_rate,
            head_lr=c.head_lr,
            momentum=c.muon_momentum,
            betas=betas,
            weight_decay=c.weight_decay,
        )
        optimizer = Muon(groups, dtype, fused)
    else:
        matrices = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
        vectors = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
        adam = dict(betas=betas, initial_lr=c.learning_rate)
        groups = [
            dict(adam, params=matrices, weight_decay=c.weight_decay),
            dict(adam, params=vectors, weight_decay=0.0),  # biases and norms
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, fused=fused)
    grouped = [name for group in optimizer.param_groups for name in group["param_names"]]
    if lost := [name for name, _ in model.named_parameters() if name not in grouped]:
        raise UserError(
            f"optimizer: {', '.join(lost)}: in no group; name its rate where groups are made"
        )
    return optimizer


def get_lr(it: int, c: Config, share: float, highest: float) -> float:
    """
    The learning rate of iteration `it`: linear warmup to `highest`, then decay to min_lr. `share`:
    of the time of a run with --hours or --until; at a steady pace its decay ends when that is up.
    """
    end: float = c.lr_decay_iters or c.max_iters
    warmup: float = c.warmup_iters
    if c.by_clock:
        end = min(end, it / share) if share > 0 else end
        warmup = min(warmup, end / 10)
    if it < warmup:
        return highest * (it + 1) / (warmup + 1)  # as nanoGPT: the first rate is above 0
    if c.lr_schedule == "constant":
        return highest
    start = warmup
    if c.lr_schedule == "wsd":
        start = max(start, end - round(c.decay_fraction * end))
    over = 1.0 if it >= end else max(0, it - start) / max(1, end - start)
    left = 0.5 * (1 + math.cos(math.pi * over)) if c.lr_schedule == "cosine" else 1 - over
    return c.min_lr + left * (highest - c.min_lr)


def compile_model(model) -> None:
    """From now on calls of the model run compiled, but not model.forward."""
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot follow it, and need not
    model.compile()


def compile_or_warn(model, c: Config, vocab: int, hw: Hardware) -> None:
    """
    Compile the model, for training and evaluation, on random data. If that fails, or gives another
    loss, warn and leave it uncompiled.
    """
    say("compiling: this takes about a minute")
    x, y = to_batch(torch.randint(vocab, (c.batch_size, c.block_size + 1)), hw.device)
    compile_model(model)
    try:
        with hw.autocast():
            loss = model(x, y)
        loss.backward()
        total, count = evaluate(model, [(x, y)], hw.autocast())
        losses = [total / count] if c.dropout else [total / count, loss.item()]
        model.eval()
        with hw.autocast(), torch.no_grad():  # sequence by sequence, which needs less memory
            parts = [model.forward(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        eager = torch.stack(parts).mean().item()
        if not all(math.isclose(found, eager, rel_tol=SAME_LOSS) for found in losses):
            raise ArithmeticError(f"losses {losses}, without it {eager:.4f}")
    except Exception as error:  # no compiler: every backend fails in its own way
        if hardware.is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        warn(f"torch.compile does not work here ({reason}); continuing without it")
        c.compile = False
        model._compiled_call_impl = None  # undoes model.compile(), for which torch has no call
        model.loss_chunk = min(model.loss_chunk, LOSS_CHUNK)
    model.train()
    model.zero_grad()


# -----------------------------------------------------------------------------
# One iteration, and evaluation


def train_step(
    model, optimizer, scaler, micro_batches: list[Batch], grad_clip: float, autocast
) -> tuple[Tensor, Tensor]:
    """
    One iteration: this rank's micro-batches, (B, T) inputs and targets each, forward and backward;
    then one update, which is skipped if a gradient is not finite. Returns the sum of the losses in
    nats, and the gradient norm before clipping, on the device; nothing here waits for it.
    """
    accum, loss_sum = len(micro_batches), torch.zeros((), device=micro_batches[0][0].device)
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
    fused = optimizer.defaults["fused"]
    if fused:  # 1: the update changes nothing. In float16 the scaler replaces it by its own finding
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    if fused or grad_norm.isfinite():  # that of MPS is not fused, and has to wait here
        scaler.step(optimizer)
    scaler.update()
    # DDP's gradients are views of its buckets; after None they would take memory of their own
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return loss_sum, grad_norm


@torch.no_grad()
def evaluate(model, batches: Iterable[Batch], autocast) -> tuple[float, int]:
    """
    Sum of the loss over all targets of `batches` in nats, without dropout, and their number. Leaves
    the model in training mode.
    """
    losses, counts = [], []
    model.eval()
    for x, y in batches:
        with autocast:
            losses.append(model(x, y))
        counts.append((y != -1).sum())
    model.train()
    pairs = [(loss.item(), int(n)) for loss, n in zip(losses, counts, strict=True)]
    return math.fsum(loss * n for loss, n in pairs), sum(n for _, n in pairs)


def estimate_loss(
    model, data: Dataset, c: Config, hw: Hardware, signals: Signals
) -> list[float] | None:
    """
    Mean loss on fixed windows of the train and of the val split: the same tokens at any micro-batch
    and number of ranks. None if a signal came. All ranks take part.
    """
    means, ranks = [], signals.ranks
    # both splits are evaluated on the same number of tokens
    tokens = min(c.eval_size, len(data.val))
    for split, spread in ((data.train, True), (data.val, False)):
        batches = eval_batches(split, tokens, c, hw.device, spread, ranks.rank, ranks.world_size)
        until_signal = itertools.takewhile(lambda _: not signals.came(), batches)
        total, count = ranks.sum(*evaluate(model, until_signal, hw.autocast()))
        if signals.name:
            return None
        means.append(total / count)
    return means


def sample_text(model, data: Dataset, c: Config, hw: Hardware) -> str:
    """sample_tokens tokens from the model, drawn with the same random numbers each time."""
    try:
        text = Tokenizer(data.tokenizer)
    except UserError as error:  # offline, without its vocabulary
        return f"no sample: {error}"
    prompt = text.start_ids()
    idx = torch.tensor([prompt], device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    model.eval()
    with hw.autocast():
        ids = generate(model, idx, c.sample_tokens, data.vocab, 0.8, 200, generator=generator)
    model.train()
    return text.decode(ids[0, len(prompt) :].tolist())


def wait_for_data(batches: TrainBatches, accum: int, signals: Signals) -> str:
    """
    Wait until every rank has the windows of the next iteration on the host. Returns why no
    iteration can follow: a signal's name, "data" if a rank cannot read on, or "".
    """
    while True:
        ready = batches.ready(accum)
        failed, waiting = signals.look(batches.error is not None, not ready)
        if signals.name or (failed and waiting):  # for windows that will never come
            return signals.name or "data"
        if not waiting:
            return ""


# -----------------------------------------------------------------------------
# Saving and resuming


def save(state: dict, log: Log, signals: Signals, last: bool) -> bool:
    """
    Rank 0 saves `state`; all ranks take part. Returns whether it is on the disk: a full disk does
    not stop the run. The `last` save is tried every minute until it works; after a signal it fails.
    """
    it, c = state["progress"]["iter_num"], log.config

    def write() -> str:
        if not all(tensor.isfinite().all() for tensor in state["model"].values()):
            # if saved, they would soon replace the good checkpoints
            raise RunError(
                f"iter {it}: weights are not finite, and not saved; resume with a lower lr"
            )
        try:
            path = checkpoint.save_in_folder(state, Path(c.out_dir), c.keep_checkpoints)
        except OSError as error:
            return f"checkpoint {it} is not saved: {error.strerror or error}"
        log.checkpoint(it, path)
        return ""

    while problem := signals.ranks.from_main(write):
        if last and signals.came():
            signals.ranks.fail(problem)
        log.event(it, f"{problem}; trying again {'in a minute' if last else 'with the next save'}")
        if not last:
            return False
        for _ in range(RETRY_SECONDS):
            if not signals.came():
                time.sleep(1)
    return True


def restore(start: dict, optimizer, scaler, hw: Hardware, rank: int) -> Progress:
    """Everything of a checkpoint but the weights; hyperparameters are the configuration's."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(dict(state=start["optimizer"]["state"], param_groups=groups))
    if start["scaler"]:
        scaler.load_state_dict(start["scaler"])
    if rank < len(start["rng"]):
        hardware.set_rng_state(start["rng"][rank], hw.device)
    return Progress(**start["progress"])


def say_start(c: Config, start: dict, p: Progress) -> None:
    """Print where this run begins, and how it differs from the checkpoint."""
    if "progress" in start:
        say(f"resume: {c.out_dir}, iteration {p.iter_num:,}")
        for name, value in config_values(c).items():
            before = start["config"].get(name, value)
            if before != value and name != "init_from":
                say(f"resume: {name} = {value!r} (the checkpoint had {before!r})")
    elif start:
        say(f"weights: {start['source']}; iterations start from 0")


# -----------------------------------------------------------------------------
# The run


def main(argv: list[str], import_seconds: float = 0.0) -> int:
    began = time.perf_counter() - import_seconds
    ranks = Ranks()  # the processes of torchrun; without it, rank 0 of 1
    c, path = ranks.from_main(prepare, argv, ranks.world_size)
    start = load_start(c, path)  # the checkpoint to resume, other weights, or empty
    keep_awake()  # Windows would sleep
    hw = hardware.set_up(c, ranks.local_rank)
    data = open_data(c, start, ranks)

    # Model and optimizer; on resume, in their saved state
    torch.manual_seed(c.seed)  # the same weights on every rank
    model = build_model(model_config(c, data.vocab, start, hw.flash(c))).to(hw.device)
    torch.manual_seed(c.seed + ranks.rank)  # but different dropout
    optimizer = build_optimizer(model, c, hw.dtype)
    scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
    p = Progress()
    if start:
        model.load_state_dict(start["model"])
    if path:
        p = restore(start, optimizer, scaler, hw, ranks.rank)
    saved = (p.iter_num, p.evaluated_at) if path else None  # what is on the disk

    # Clock, log and data. From here on out_dir belongs to this run
    resumed = start if path else {}
    clock = Clock(c, began, hw.synchronize, resumed)  # when to evaluate, to save and to end
    log = Log(c, clock, hw, ranks)
    ranks.from_main(log.open, resumed)
    say_start(c, start, p)
    log.start(data, model, p.iter_num)
    batches = TrainBatches(data, c, hw.device, p.sequences, ranks.rank, ranks.world_size)
    del start, resumed  # frees the loaded checkpoint
    clock.lap("start-up")

    if c.compile and not c.eval_only:
        random_states = hardware.get_rng_state(hw.device)
        compile_or_warn(model, c, data.vocab, hw)
        hardware.set_rng_state(random_states, hw.device)
    ddp_model = ranks.data_parallel(model)  # averages the gradients of all ranks
    gc.collect()  # free what compiling left behind
    gc.freeze()  # or each collection would search a million objects of torch
    clock.lap("compile")
    accum, autocast = c.gradient_accumulation_steps // ranks.world_size, hw.autocast()
    skipped = torch.zeros((), device=hw.device)  # updates in a row
    signals = Signals(ranks)  # from here on a signal asks the loop to save and stop

    while True:
        # Between two iterations: rank 0's clock decides for all. A signal to any rank, or a rank
        # that cannot read its data, ends the loop for all
        share, evaluation_due, save_due, over = ranks.from_main(clock.look, p.iter_num)
        reason = over or wait_for_data(batches, accum, signals)

        # every eval_interval, and at the end: all ranks evaluate, unless a signal comes
        due = reason in COMPLETE or (evaluation_due and not reason)
        if due and (c.eval_only or p.evaluated_at != p.iter_num):
            clock.lap("steps")
            losses = estimate_loss(model, data, c, hw, signals)
            if losses:
                p.evaluated_at, p.val_loss = p.iter_num, losses[1]
                if p.val_loss < p.best_val_loss:
                    p.best_val_loss, p.best_iter = p.val_loss, p.iter_num
                improved = p.best_iter == p.iter_num
                save_due |= p.iter_num > 0 and (improved or c.always_save_checkpoint)
                log.evaluation(p.iter_num, p.tokens, *losses)
                if c.sample_tokens and ranks.is_main and p.iter_num > 0:
                    log.sample(p.iter_num, sample_text(model, data, c, hw))
            else:
                reason = signals.name  # the resumed run begins with this evaluation
            clock.lap("evaluation")

        # rank 0 saves: after an evaluation, every checkpoint_interval or ten minutes, at the end
        if (reason or save_due) and saved != (p.iter_num, p.evaluated_at) and not c.eval_only:
            clock.lap("steps")
            state = dict(
                model=model.state_dict(),
                optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(),
                rng=ranks.gather(hardware.get_rng_state(hw.device)),
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
            )
            if save(state, log, signals, last=bool(reason)):
                saved = p.iter_num, p.evaluated_at
            del state
            clock.lap("checkpoints")
        if reason:
            break

        # one iteration: all ranks, each with its own micro-batches
        for group in optimizer.param_groups:
            group["lr"] = get_lr(p.iter_num, c, share, group["initial_lr"])
        loss_sum, grad_norm = train_step(
            ddp_model, optimizer, scaler, batches.take(accum), c.grad_clip, autocast
        )
        skipped = (skipped + 1) * ~grad_norm.isfinite()
        it, p.iter_num = p.iter_num, p.iter_num + 1
        p.tokens, p.sequences = p.tokens + c.iter_tokens, batches.consumed

        # every log_interval, and at the end: only here do iterations wait for the device
        if it % c.log_interval == 0 or p.iter_num == c.max_iters or share >= 1:
            clock.lap("steps")
            lr = optimizer.param_groups[0]["lr"]
            loss = loss_sum.item() / accum
            log.step(it, p.tokens, loss, lr, grad_norm.item(), batches.waited)
            if skipped >= MAX_SKIPS:  # all ranks have the same gradients
                ranks.fail(f"{MAX_SKIPS} updates in a row skipped; try a lower learning_rate")

    batches.close()
    log.end(reason, p.iter_num, p.tokens, batches.waited)
    if reason not in COMPLETE:
        resume = "" if c.init_from == "auto" else " --init_from=resume"
        say(f"to continue: python {command_line(*sys.argv)}{resume}")
    if reason == "data":  # the rank that cannot read raises its error
        raise batches.error or RunError()
    return 128 + signal.Signals[reason] if reason == signals.name else 0


def explain(error: Exception, argv: list[str]) -> str:
    """The error line for an exhausted memory; empty for other errors."""
    if not hardware.is_out_of_memory(error):
        return ""
    c = read_config(argv)
    resolve(c)
    return hardware.out_of_memory_line(c, int(os.environ.get("WORLD_SIZE", 1)))


if __name__ == "__main__":
    run_main(lambda argv: main(argv, time.perf_counter() - STARTED), explain)
