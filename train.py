"""
Train a GPT.

    python train.py config/quickstart.py                       minutes, on any machine
    python train.py config/gpt124m_4070.py                     GPT-124M on an RTX 4070
    python train.py config/gpt124m_4070.py --batch_size=4      override anything
    python train.py config/gpt124m_4070.py --init_from=resume  go on where a run stopped, as the card's config does anyway
    python train.py --help                                     every key

One iteration is train_step() below: gradient_accumulation_steps micro-batches forward and backward,
one update. Exit codes: 0 done, 1 failed while running, 2 bad configuration or data, 130/143 stopped
by a signal after saving.
"""

import time

BEGAN = (
    time.perf_counter()
)  # importing torch takes seconds, which belong to the run's start-up time

import contextlib
import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C while torch is imported: no traceback; run_main takes over

import torch
from torch import Tensor
from torch._dynamo.utils import (
    counters,
)  # the optimizer's first step would import it in the middle of an iteration
from torch.nn.parallel import DistributedDataParallel

from common.console import RunError, UserError, run_main, say, warn
from configurator import Config, config_values, load_config
from data.loader import TrainBatches, eval_batches, move, split_block
from data.shards import HeldTokens, TokenStream
from data.tokenizer import Tokenizer
from model import generate
from reports.picture import draw_run
from training import checkpoint, hardware
from training.build import build_model, build_optimizer, loss_chunk, model_config
from training.gpus import out_of_memory_advice
from training.ranks import Interrupted, Ranks, Signals
from training.runlog import IterationResult, Ledger, RunLog
from training.start import Start, check_data, open_data, prepare_on_demand

# -----------------------------------------------------------------------------
# One iteration


def train_step(
    model,
    optimizer,
    scaler,
    batches: Iterator,
    grad_accum: int,
    grad_clip: float,
    autocast,
    between_micro_steps: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """
    One iteration: grad_accum micro-batches forward and backward (this rank's share), then one
    update, which is skipped where a gradient is not finite. Returns the micro-batches' losses
    (grad_accum,) and the gradient norm before clipping; both stay on the device, and nothing here
    waits for it.
    """
    losses = []
    for micro_step in range(grad_accum):
        between_micro_steps()
        x, y = next(batches)
        averages_later = micro_step < grad_accum - 1 and isinstance(model, DistributedDataParallel)
        with (
            model.no_sync() if averages_later else contextlib.nullcontext()
        ):  # ranks average their gradients once, at the last
            with autocast:
                loss = model(x, y)
            scaler.scale(loss / grad_accum).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    if not optimizer.defaults["fused"]:
        if grad_norm.isfinite():  # waits for the device, as no fused update can skip by itself
            scaler.step(optimizer)
    else:
        if not scaler.is_enabled():
            optimizer.found_inf = (
                ~grad_norm.isfinite()
            ).float()  # the fused update reads it on the device
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses), grad_norm


@torch.no_grad()
def evaluate(
    model, batches: Iterator, autocast, between_batches: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """
    Sum of the loss over all tokens of `batches`, without dropout, in nats, and their number; leaves
    the model training.
    """
    losses, counts = [], []
    model.eval()
    try:
        for x, y, tokens in batches:
            between_batches()
            with autocast:
                losses.append(model(x, y))
            counts.append(tokens)
    finally:
        model.train()
    return math.fsum(loss * n for loss, n in zip(torch.stack(losses).tolist(), counts) if n), sum(
        counts
    )


def get_lr(it: int, config: Config, horizon: int, highest: float) -> float:
    """
    The learning rate of iteration `it`: linear warm-up to `highest`, then the decay to min_lr at
    iteration `horizon`.
    """
    if it < config.warmup_iters:
        return highest * (it + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return highest
    start = config.warmup_iters
    if config.lr_schedule == "wsd":
        start = max(start, horizon - round(config.decay_fraction * horizon))
    if it >= horizon:
        return config.min_lr
    progress = max(0, it - start) / max(1, horizon - start)
    shape = (
        0.5 * (1 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1 - progress
    )
    return config.min_lr + shape * (highest - config.min_lr)


# -----------------------------------------------------------------------------
# A run and what can happen to it


@dataclass
class Progress:
    """How far the run is: what a checkpoint needs besides weights, optimizer and random states."""

    iter_num: int = 0  # updates made
    tokens: int = 0
    sequences: int = 0  # position in the order of the data
    best_val_loss: float = math.inf
    best_iter: int = -1
    evaluated_at: int = -1
    lr_horizon: int = 0  # where the learning rate's decay ends


class Run:
    """Everything one training run holds."""

    def __init__(self, config: Config, start: Start, ranks: Ranks):
        self.config, self.out_dir, self.ranks = config, Path(config.out_dir), ranks
        self.ledger, self.signals = Ledger(BEGAN), Signals(ranks)
        ranks.check_share(config.gradient_accumulation_steps)
        self.hw = hardware.set_up(config, ranks.local_rank)
        self.data = open_data(config, start.resumed and start.resumed.get("stream"))
        if start.resumed and start.resumed["data_fingerprint"] != self.data.fingerprint:
            raise UserError(
                f"dataset: {self.data.source} is not what the checkpoint was trained on, or has changed since; "
                f"restore it, or start anew with another --out_dir"
            )
        if start.saved and start.saved["vocab"] < self.data.vocab:
            known = start.saved["vocab"]
            raise UserError(
                f"dataset: its vocabulary is {self.data.vocab}, that of init_from={config.init_from} only {known}"
            )
        ranks.check_same("dataset", self.data.fingerprint)
        torch.manual_seed(config.seed)
        self.model_config = model_config(config, self.data.vocab, start.saved)
        self.model = build_model(self.model_config).to(self.hw.device)
        torch.manual_seed(config.seed + ranks.rank)  # other dropout on every rank
        self.compiled = self.model  # until compile(): the same weights, compiled
        self.optimizer = build_optimizer(self.model, config, self.hw.dtype)
        self.scaler = self.hw.grad_scaler()
        self.progress = Progress(lr_horizon=config.lr_decay_iters or config.max_iters)
        if start.saved:
            self.model.load_state_dict(start.saved["model"])
        if start.resumed:
            self.restore(start.resumed)
        self.grad_accum = config.gradient_accumulation_steps // ranks.world_size
        self.rng = hardware.get_rng_state(self.hw.device)  # as of the last whole iteration
        self.saved_at = self.progress.iter_num if start.resumed else None
        if not config.eval_only:
            ranks.from_first(self.take_out_dir, start)
        resumed_at = (self.progress.iter_num, self.progress.evaluated_at) if start.resumed else None
        self.log = RunLog(config, self.ledger, self.hw, ranks, resumed_at)
        self.log.start(self.data, self.model_config, self.progress.iter_num)
        self.batches = TrainBatches(
            self.data, config, self.hw.device, self.progress.sequences, ranks.rank, ranks.world_size
        )
        self.timed_batches = self.ledger.book_waits(self.batches)

    def take_out_dir(self, start: Start) -> None:
        # held as long as it is open
        self.lock = checkpoint.make_out_dir(
            self.out_dir, fresh=start.resumed is None, known=start.checkpoints
        )
        if (
            start.resumed and self.progress.best_iter == self.progress.iter_num
        ):  # a kill may have come between the two
            with contextlib.suppress(OSError):
                checkpoint.mark_best(self.path())

    def restore(self, state: dict) -> None:
        """
        Take over what a checkpoint holds besides weights, except hyper-parameters: those are the
        config's.
        """
        state["optimizer"]["param_groups"] = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) > self.ranks.rank:
            hardware.set_rng_state(state["rng"][self.ranks.rank], self.hw.device)
        self.progress = Progress(**state["progress"])
        if "lr_decay_iters" in self.config.given:
            self.progress.lr_horizon = self.config.lr_decay_iters or self.config.max_iters
        for category, seconds in state["ledger"].items():
            self.ledger.seconds[category] += seconds

    def state(self) -> dict:
        return dict(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            rng=self.ranks.gather(self.rng),
            progress=asdict(self.progress),
            ledger=dict(self.ledger.seconds),
            model_config=asdict(self.model_config),
            vocab=self.data.vocab,
            tokenizer=self.data.tokenizer,
            data_fingerprint=self.data.fingerprint,
            stream=self.data.stream and self.data.stream.position(self.progress.sequences),
            config=config_values(self.config),
        )

    def loop(self) -> str:
        """Iterate until there is a reason to stop, and return it."""
        c, p = self.config, self.progress
        if c.compile:
            self.compile()
        self.step_model = self.ranks.data_parallel(self.compiled)  # averages gradients
        gc.collect()  # what compiling left
        # the garbage collector would go through a million objects of torch's, again and again
        gc.freeze()
        self.ledger.switch("other")
        while True:
            done = p.iter_num >= c.max_iters or c.eval_only
            out_of_time = (
                c.max_minutes > 0
                and self.ranks.max([self.ledger.clock() - BEGAN])[0] > 60 * c.max_minutes
            )
            if (p.iter_num % c.eval_interval == 0 or done) and (
                p.evaluated_at != p.iter_num or c.eval_only
            ):
                improved = self.evaluate()
                if p.iter_num > 0 and (improved or c.always_save_checkpoint):
                    self.save()
            if (
                done
                or out_of_time
                or p.iter_num > 0
                and c.checkpoint_interval > 0
                and p.iter_num % c.checkpoint_interval == 0
            ):
                self.save(last=done or out_of_time)
            if done or out_of_time:
                return "eval_only" if c.eval_only else "max_iters" if done else "max_minutes"
            self.iterate()
            if (p.iter_num - 1) % c.log_interval == 0 or p.iter_num == c.max_iters:
                self.settle()
                self.log.steps(self.batches.windows)

    def iterate(self) -> None:
        c, p = self.config, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = get_lr(p.iter_num, c, p.lr_horizon, group["initial_lr"])
        lr = self.optimizer.param_groups[0]["lr"]
        graphs, steps_before = compiled_graphs(), self.ledger.seconds["steps"]
        with self.ledger.book("steps"), self.ranks.together():
            losses, grad_norm = train_step(
                self.step_model,
                self.optimizer,
                self.scaler,
                self.timed_batches,
                self.grad_accum,
                c.grad_clip,
                self.hw.autocast(),
                lambda: self.signals.check(self.data_ready),
            )
        if recompiled := compiled_graphs() != graphs:
            self.settle()
            seconds = self.ledger.seconds["steps"] - steps_before
            self.ledger.move(seconds, "steps", "compile")
            self.log.warn(
                p.iter_num, f"iter {p.iter_num}: compiled again, {seconds:.1f}s booked as compile"
            )
        self.log.results.append(
            IterationResult(
                p.iter_num, p.tokens, p.sequences, lr, losses, grad_norm, not recompiled
            )
        )
        p.iter_num += 1
        p.sequences += c.iter_sequences
        p.tokens += c.iter_tokens
        self.rng = hardware.get_rng_state(self.hw.device)

    def data_ready(self) -> bool:
        with self.ledger.book("data wait"):
            return self.batches.ready()

    def compile(self) -> None:
        """
        Compilation is lazy: make it happen here, on throw-away data, so that no iteration's time
        holds it.
        """
        began = self.ledger.clock()
        block = torch.randint(self.data.vocab, (self.config.batch_size, self.config.block_size + 1))
        x, y = move(
            split_block(block), self.hw.device
        )  # strides like the real ones, or it all compiles again
        with self.ledger.book("compile"):
            try:
                self.compiled = torch.compile(self.model)
                if not self.config.eval_only:
                    with self.hw.autocast():
                        loss = self.compiled(x, y)
                    loss.backward()
                evaluate(self.compiled, [(x, y, 1)], self.hw.autocast())
            except Exception as error:  # no compiler, or a platform without one: every backend fails in its own way
                if hardware.is_out_of_memory(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
                warn(f"torch.compile does not work here ({reason}); going on without")
                self.compiled, self.config.compile = self.model, False
                self.model_config = self.model.config = replace(
                    self.model_config, loss_chunk=loss_chunk(self.config)
                )
            self.rewind()
        say(f"compile: {self.ledger.clock() - began:.1f}s")

    def evaluate(self) -> bool:
        """
        Losses on fixed windows of both splits, a sample and the picture; returns whether the val
        loss is the best so far.
        """
        c, p = self.config, self.progress
        self.settle()
        began = self.ledger.clock()
        with self.ledger.book("evaluation"):
            train_loss = self.mean_loss(self.data.train, spread=True)
            val_loss = self.mean_loss(self.data.val)
            self.log.evaluation(p.iter_num, train_loss, val_loss, self.ledger.clock() - began)
            if c.sample_tokens and self.ranks.first:
                self.sample()
            if not c.eval_only and self.ranks.first:
                draw_run(self.out_dir)
        p.evaluated_at, self.saved_at = (
            p.iter_num,
            None,
        )  # a checkpoint of this iteration does not know of this evaluation
        if val_loss < p.best_val_loss:
            self.best_before = p.best_val_loss, p.best_iter
            p.best_val_loss, p.best_iter = val_loss, p.iter_num
        return p.best_iter == p.iter_num

    def mean_loss(self, stream: TokenStream | HeldTokens, spread: bool = False) -> float:
        c, ranks = self.config, self.ranks
        tokens = min(c.eval_size, len(self.data.val))  # as many of each split
        batches = eval_batches(
            stream, tokens, c, self.hw.device, spread, ranks.rank, ranks.world_size
        )
        total, count = ranks.reduce(
            [*evaluate(self.compiled, batches, self.hw.autocast(), self.signals.check)]
        )
        return total / count

    def sample(self) -> None:
        try:
            text = Tokenizer(self.data.tokenizer)
        except UserError as error:  # no vocabulary to be had offline: no reason to stop
            self.log.warn(self.progress.iter_num, f"no samples: {error}")
            self.config.sample_tokens = 0
            return
        idx = torch.tensor([text.prompt()], device=self.hw.device)
        generator = torch.Generator(self.hw.device).manual_seed(self.config.seed)
        self.model.eval()
        with self.hw.autocast():
            idx = generate(
                self.model, idx, self.config.sample_tokens, self.data.vocab, 0.8, 200, generator
            )
        self.model.train()
        self.log.sample(self.progress.iter_num, text.decode(idx[0].tolist()))

    def settle(self) -> None:
        """Wait for the device, as part of the iterations it is still busy with."""
        with self.ledger.book("steps"):
            self.hw.synchronize()

    def rewind(self) -> None:
        """
        Drop what was begun since the last whole iteration: its gradients and its use of random
        numbers.
        """
        self.model.zero_grad(set_to_none=True)
        hardware.set_rng_state(self.rng, self.hw.device)

    def path(self) -> Path:
        """Of the checkpoint of the last whole iteration."""
        return self.out_dir / f"ckpt-{self.progress.iter_num:08}.pt"

    def save(self, last: bool = False) -> None:
        """
        A checkpoint of the state after the last whole iteration. Raises RunError where it fails for
        good.
        """
        p, began = self.progress, self.ledger.clock()
        if self.saved_at == p.iter_num or self.config.eval_only:
            return
        self.settle()
        with self.ledger.book("checkpoints"):
            size = self.ranks.from_first(self.write, self.state(), self.path(), last)
        if size:
            self.saved_at = p.iter_num
            self.log.checkpoint(p.iter_num, self.path(), size, self.ledger.clock() - began)
        elif p.best_iter == p.iter_num:
            p.best_val_loss, p.best_iter = self.best_before  # what best.pt holds

    def write(self, state: dict, path: Path, last: bool) -> int:
        """
        The file's size; 0 where saving failed, an older checkpoint stands and there will be another
        try.
        """
        if not all(
            weights.isfinite().all() for weights in state["model"].values()
        ):  # in time they would replace the good ones
            raise RunError(
                f"iter {self.progress.iter_num}: some weights are not finite and are not saved; the checkpoint "
                f"before stands: --init_from=resume with a lower rate"
            )
        try:
            size = checkpoint.save(state, path)
        except OSError as error:
            older = checkpoint.list_checkpoints(self.out_dir)
            if last or not older:
                stands = f"{older[-1]} stands" if older else "and there is no older one"
                raise RunError(f"checkpoint {self.progress.iter_num}: {error}; {stands}") from None
            self.log.warn(
                self.progress.iter_num,
                f"checkpoint {self.progress.iter_num} failed: {error}; {older[-1]} stands",
            )
            return 0
        try:
            if self.progress.best_iter == self.progress.iter_num:
                checkpoint.mark_best(path)
            checkpoint.prune(self.out_dir, self.config.keep_checkpoints, path)
        except OSError as error:  # the checkpoint itself is safe
            self.log.warn(
                self.progress.iter_num, f"{path} is saved, but tidying up after it failed: {error}"
            )
        return size


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def main(argv: list[str]) -> int:
    ranks = Ranks()
    if not ranks.first:
        sys.stdout = open(os.devnull, "w")  # one voice
    start = Start(ranks)
    config = load_config(
        argv, checks=(ranks.check_config, start.find, hardware.check_device, check_data)
    )
    if start.finished(config):
        return 0
    start.say_what_changed(config)
    ranks.from_first(prepare_on_demand, config)
    try:
        run = Run(config, start, ranks)
    except (RuntimeError, MemoryError) as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise RunError(
            "device: out of memory before the first iteration; is another process using it? nvidia-smi"
        ) from None
    del start  # a checkpoint in memory
    try:
        reason = run.loop()
    except Interrupted:
        run.rewind()
        run.save(last=True)
        reason = signal.Signals(int(run.signals.agreed)).name
    except (RuntimeError, MemoryError) as error:
        if not hardware.is_out_of_memory(error):
            raise
        advice = out_of_memory_advice(
            config, run.model_config, run.hw.dtype, run.hw.usable_bytes(), ranks.world_size
        )
        raise RunError(advice) from None
    except RunError:
        run.rewind()
        if (
            not run.log.skips_in_a_row and ranks.world_size == 1
        ):  # otherwise the checkpoint from before is worth more
            run.save(last=True)
        raise
    finally:
        run.batches.close()
    run.log.end(reason, run.progress.iter_num, run.progress.tokens)
    return ranks.leave(128 + int(run.signals.agreed) if run.signals.agreed else 0)


if __name__ == "__main__":
    run_main(main)
