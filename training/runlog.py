"""
What a run says: lines on the console, records in out_dir/metrics.jsonl, and where the time went.

Console lines begin with nanoGPT's grammar, so its parsers still work. Warnings go to stderr. Every
second of the run is booked in the Ledger under one category, so evaluation, checkpoints and
compilation never enter an iteration's time.
"""

import contextlib
import hashlib
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters  # imported here, or the first iteration would import it

from common.console import count, duration, keep_transcript, say, warn
from configurator import NEVER, Config, config_values
from data.shards import Dataset
from model import GPTConfig
from training.build import count_flops, count_parameters, describe_flops, warn_of_epochs
from training.clock import Clock, Ledger, clock_time
from training.hardware import Hardware
from training.metrics import drop_records, plain
from training.progress import Progress
from training.ranks import Ranks
from training.tracker import Tracker

SPIKE = 2.0  # a loss this many times its running mean gets a warning
CPU_TOKENS = 100_000  # per iteration: more is hardly meant for a CPU

# -----------------------------------------------------------------------------
# The log of one run


@dataclass
class Iteration:
    """What an iteration leaves behind. Its tensors stay on the device until somebody looks."""

    iter_num: int
    tokens: int  # trained on before this iteration, as `sequences`
    sequences: int
    lr: float
    losses: Tensor  # (micro-steps,), nats per token
    grad_norm: Tensor  # before clipping


class RunLog:
    """
    Console and metrics.jsonl of one run, written by rank 0 for all. With eval_only there is
    only the console. On resume, the records that the run will write again are dropped, so that the
    file reads as one run.
    """

    def __init__(self, config: Config, hw: Hardware, ranks: Ranks, began: float, resumed: dict):
        """
        `began`: time.perf_counter() when the run began. `resumed`: the checkpoint's state, empty
        where there is none.
        """
        self.draw_run: Callable[[], None] = lambda: None  # draws out_dir/loss.png
        self.config, self.hw, self.ranks, self.file = config, hw, ranks, None
        self.unwritten = b""  # records that a full disk has refused
        self.began, self.ledger = began, Ledger(began)
        threading.Thread(target=self.ledger.keep_looking, daemon=True).start()
        progress = Progress(**resumed.get("progress", {}))
        for category, seconds in resumed.get("ledger", {}).items():
            self.ledger.seconds[category] += seconds
        self.clock = Clock(config, self.ledger, resumed.get("clock", {}), ranks.from_main)
        # the evaluation at the resumed iteration stands; what comes after it is written again
        purge_from = progress.iter_num + 1 if resumed else 0
        self.tracker = Tracker(config, wanted=ranks.is_main, purge_from=purge_from)
        self.timed = 0  # iterations since the last line, without those compiled in
        self.logged = dict(self.ledger.seconds)  # as of the last line
        self.mean_loss: float | None = None  # a running mean over the lines
        self.said_turn = False
        self.drawn_at = 0.0
        self.processor_seconds = 0.0  # of all threads, in the iterations since the last line
        self.said_threads = False
        out_dir = Path(config.out_dir)
        if ranks.is_main and not config.eval_only:
            metrics, log = out_dir / "metrics.jsonl", out_dir / "log.txt"
            if resumed:
                drop_records(metrics, progress.iter_num, progress.evaluated_at)
            self.file = open(metrics, "ab", buffering=0)
            keep_transcript(open(log, "a", encoding="utf-8", errors="replace"))

    # -------------------------------------------------------------------------
    # Booking time

    @contextlib.contextmanager
    def book(self, category: str) -> Iterator[None]:
        """Book what happens inside. The iterations the device is still busy with end before it."""
        self.wait_for_device()
        before = self.ledger.seconds[category]
        with self.ledger.book(category):
            yield
        price, prices = self.ledger.seconds[category] - before, self.clock.prices
        # one that hangs must not pass for all to come
        prices[category] = min(price, 2 * prices.get(category, price))

    def wait_for_device(self) -> None:
        """Book the wait as steps: the device is still busy with iterations."""
        with self.ledger.book("steps"):
            self.hw.synchronize()

    @contextlib.contextmanager
    def iteration(self, iter_num: int) -> Iterator[None]:
        """Book one iteration as steps, or, if torch.compile ran again in it, as compile."""
        graphs, booked = counters["stats"]["unique_graphs"], self.ledger.seconds
        booked_before, processor_before = booked["steps"], time.process_time()
        with self.ledger.book("steps"):
            yield
        self.processor_seconds += time.process_time() - processor_before
        if counters["stats"]["unique_graphs"] == graphs:
            self.timed += 1
            return
        self.wait_for_device()
        seconds = booked["steps"] - booked_before
        booked["steps"] -= seconds
        booked["compile"] += seconds
        self.warn(iter_num, f"compiled again, {seconds:.1f}s booked as compile")

    def minutes(self) -> float:
        """Since the run began, this start alone."""
        return (self.ledger.clock() - self.began) / 60

    def seconds_left(self) -> float:
        """Until hours, until or max_minutes end this start; infinite without them."""
        c = self.config
        left = self.clock.left() if c.by_clock else math.inf
        return min(left, 60 * (c.max_minutes - self.minutes())) if c.max_minutes else left

    # -------------------------------------------------------------------------
    # Lines and records

    def record(self, kind: str, **values) -> None:
        """One line of metrics.jsonl, flushed."""
        record = dict(kind=kind, **{name: plain(value) for name, value in values.items()})
        record["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
        if self.file:
            waiting = bool(self.unwritten)
            self.unwritten += json.dumps(record).encode() + b"\n"
            try:
                while self.unwritten:
                    self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            except OSError as error:  # a full disk: the run is worth more than its records
                if not waiting:
                    warn(f"metrics.jsonl: {error.strerror}; its records wait in memory for room")
        self.tracker.log(record)

    def start(self, data: Dataset, model: GPTConfig, progress: Progress) -> None:
        """The first lines: what is trained, on what, with what, and for how long."""
        c, hw = self.config, self.hw
        parameters = count_parameters(model)
        self.flops_per_token, _ = count_flops(model)
        # nobody has counted a stream's tokens
        self.train_tokens = None if data.stream else len(data.train)
        self.bytes_per_token = data.bytes_per_token
        train = count(self.train_tokens) if self.train_tokens else "streamed"
        peak = f"{hw.peak_tflops} TFLOP/s dense peak" if hw.peak_tflops else "peak unknown, mfu n/a"
        vocabulary = f"vocabulary {data.vocab} -> {model.vocab_size}"
        say(f"start: {date()}")
        say(f"model: {parameters / 1e6:.2f}M parameters, {vocabulary}, {describe_flops(model)}")
        say(f"device: {hw.name}, {hw.dtype_name}, {peak}")
        say(f"data: {data.source}, {train} train and {count(len(data.val))} val tokens")
        sizes = f"{c.gradient_accumulation_steps} x {c.batch_size} x {c.block_size}"
        say(f"tokens per iteration will be: {c.iter_tokens:,} = {sizes} (micro-batches x B x T)")
        iterations, total = f"{c.max_iters:,} iterations", c.iter_tokens * c.max_iters
        if c.by_clock and not c.eval_only:
            bound = "" if c.max_iters == NEVER else f" or {iterations}"
            end = f"in {c.out_dir}; stops by about {clock_time(self.seconds_left())}"
            if c.warmup_iters:
                end += f"; warm-up: {c.warmup_iters:,} iterations, a tenth of the time at most"
            say(f"run: hours {self.clock.hours_text()}{bound}, {end}")
        elif not c.eval_only:
            epochs = f", {total / self.train_tokens:.2f} epochs" if self.train_tokens else ""
            say(f"run: {iterations}, {count(total)} tokens{epochs}, in {c.out_dir}")
        if self.ranks.is_main and not c.eval_only:
            if c.max_iters < NEVER:
                warn_of_epochs(c, total, self.train_tokens)
            for key in ("warmup_iters", "lr_decay_iters"):
                if getattr(c, key) > c.max_iters and c.lr_schedule != "constant":
                    warn(f"{key}: {getattr(c, key):,} is longer than the run; give a lower one")
            if self.hw.device.type == "cpu" and c.device == "auto" and c.iter_tokens > CPU_TOKENS:
                warn("torch sees no GPU here, so this trains on the CPU, very slowly")
        if self.ranks.world_size > 1:
            say(f"processes: {self.ranks.world_size}, each with its share of the micro-batches")
        self.record(
            "start",
            iter=progress.iter_num,
            config=config_values(c),
            parameters=parameters,
            device=hw.name,
            dtype=hw.dtype_name,
            peak_tflops=hw.peak_tflops,
            flops_per_token=self.flops_per_token,
            tokens_per_iter=c.iter_tokens,
            world_size=self.ranks.world_size,
            tokenizer=tokenizer_name(data.tokenizer),
            data_fingerprint=data.fingerprint,
            torch=torch.__version__,
        )

    def line(self, last: Iteration) -> None:
        """
        One line and record for the iterations since the line before, `last` the last of them. Only
        here do their numbers leave the device.
        """
        self.wait_for_device()
        seconds, ranks = self.ledger.seconds, self.ranks
        # all were compiled in: there is no time to tell, and the next line counts them too
        if not ranks.any(self.timed > 0):
            return
        waited = seconds["data wait"] - self.logged["data wait"]
        elapsed = seconds["steps"] - self.logged["steps"] + waited
        (loss_sum,) = ranks.reduce([last.losses.mean().item()])
        # of the slowest rank
        elapsed, waited, mem = ranks.max([elapsed, waited, self.hw.peak_memory_gib() or 0.0])
        timed = self.timed or 1
        step_seconds = elapsed / timed
        self.clock.note_iterations(elapsed, timed)
        tokens_per_sec = self.config.iter_tokens / step_seconds
        values = dict(
            iter=last.iter_num,
            tokens=last.tokens,
            loss=loss_sum / ranks.world_size,
            lr=last.lr,
            grad_norm=last.grad_norm.item(),
            step_ms=1000 * step_seconds,
            tokens_per_sec=tokens_per_sec,
            mfu=self.hw.mfu(self.flops_per_token, tokens_per_sec, ranks.world_size),
            mem_gib=mem or None,
            data_wait_ms=1000 * waited / timed,
        )
        say(self.format_step(values))
        self.record("step", **values)
        if self.mean_loss is None and self.config.max_iters == NEVER and ranks.is_main:
            # the first line of a run by the clock: now its speed is known
            tokens = last.tokens + tokens_per_sec * self.clock.left()
            warn_of_epochs(self.config, tokens, self.train_tokens)
        self.mark_spike(last.iter_num, values["loss"])
        advice = self.hw.too_many_threads(elapsed - waited, self.processor_seconds)
        if advice and not self.said_threads:
            self.warn(last.iter_num, advice)
            self.said_threads = True
        self.timed, self.processor_seconds = 0, 0.0
        self.logged = dict(seconds)
        self.draw(60)

    def format_step(self, v: dict) -> str:
        """nanoGPT's grammar first, then everything else."""
        mfu = "n/a" if v["mfu"] is None else f"{v['mfu']:.2%}"
        mem = "n/a" if v["mem_gib"] is None else f"{v['mem_gib']:.1f}GiB"
        hours = f"hours {self.clock.hours_text()}, " if self.config.by_clock else ""
        epoch = f"{v['tokens'] / self.train_tokens:.2f}" if self.train_tokens else "n/a"
        return (
            f"iter {v['iter']}: loss {v['loss']:.4f}, time {v['step_ms']:.2f}ms, mfu {mfu}, "
            f"tok/s {v['tokens_per_sec']:,.0f}, lr {v['lr']:.2e}, norm {v['grad_norm']:.2f}, "
            f"tokens {count(v['tokens'])}, epoch {epoch}, mem {mem}, "
            f"{hours}eta {duration(self.eta(v['iter']))}"
        )

    def eta(self, it: int) -> float:
        """
        Seconds to the end: the iterations left, at their mean over the last minutes, and an
        evaluation and a checkpoint for each interval left, as long as the last ones. By the clock,
        what is left.
        """
        c = self.config
        left = math.ceil(c.max_iters / c.eval_interval) - it // c.eval_interval
        pauses = left * sum(self.clock.prices.values())
        eta = (c.max_iters - it - 1) * self.clock.pace + pauses
        return max(0.0, min(eta, self.seconds_left()))

    def mark_spike(self, iter_num: int, loss: float) -> None:
        """
        Warn of a loss far above the running mean of the lines before. A loss that is not finite
        does not enter the mean.
        """
        mean = loss if self.mean_loss is None else self.mean_loss
        if loss > SPIKE * mean:
            self.warn(iter_num, f"loss spike, {loss:.4f} after a running mean of {mean:.4f}")
        if math.isfinite(loss):
            self.mean_loss = 0.9 * mean + 0.1 * loss

    def evaluation(self, iter_num: int, train_loss: float, val_loss: float) -> None:
        """Inside book("evaluation")."""
        seconds = self.ledger.clock() - self.ledger.since
        # a float holds no more than exp(709)
        perplexity = math.inf if val_loss > 709 else math.exp(val_loss)
        bits, end = None, ""
        if self.bytes_per_token:
            bits = val_loss / math.log(2) / self.bytes_per_token
            end = f", {bits:.4f} bits per byte"
        losses = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}"
        say(f"step {iter_num}: {losses}, time {seconds:.1f}s, perplexity {perplexity:.4g}{end}")
        values = dict(train_loss=train_loss, val_loss=val_loss, seconds=seconds)
        self.record("eval", iter=iter_num, **values, perplexity=perplexity, bits_per_byte=bits)
        self.draw(20)

    def note_turn(self, progress: Progress) -> None:
        """Say once that the model learns the training text by heart, and where the best one is."""
        if progress.overfitted and not self.said_turn:
            best = f"step {progress.best_iter} ({progress.best_val_loss:.4f})"
            kept = "best.pt keeps that model" if progress.best_iter else "lower learning_rate"
            self.warn(progress.iter_num, f"validation has not improved since {best}; {kept}")
            self.said_turn = True

    def checkpoint(self, iter_num: int, path: Path, size: int, seconds: float) -> None:
        readable = f"{size / 1e9:.2f}GB" if size >= 1e9 else f"{size / 1e6:.2f}MB"
        say(f"checkpoint {iter_num}: {path}, {readable}, time {seconds:.1f}s, {date()}")
        self.record("checkpoint", iter=iter_num, path=str(path), bytes=size, seconds=seconds)

    def sample(self, iter_num: int, text: str) -> None:
        say(f"sample {iter_num}:", *text.split("\n"), "")
        self.record("sample", iter=iter_num, text=text)

    def draw(self, seconds: float) -> None:
        """
        Draw loss.png again where it is older than so many seconds: drawing takes about half a
        second, and a small run may be evaluated every second.
        """
        if not self.file or time.monotonic() - self.drawn_at < seconds:
            return
        with self.ledger.book("evaluation"):
            self.draw_run()
        self.drawn_at = time.monotonic()

    def warn(self, iter_num: int, message: str) -> None:
        if self.ranks.is_main:
            warn(f"iter {iter_num}: {message}")
        self.record("event", iter=iter_num, message=message)

    def end(self, reason: str, progress: Progress) -> None:
        """The last lines: why the run ended, and where its wall time went."""
        total, seconds = self.ledger.total(), self.ledger.seconds
        shares = [f"{name} {s:.1f}s ({s / total:.1%})" for name, s in seconds.items() if s >= 0.05]
        spent = ", ".join(shares).replace("evaluation", "evaluation with any sample and picture")
        say(f"time: {duration(total)} wall (this start {duration(60 * self.minutes())}) = {spent}")
        iters, tokens = progress.iter_num, progress.tokens
        by_clock = reason in ("hours", "until")
        said = "the schedule is complete" if by_clock else reason
        say(f"end: {said} after {iters:,} iterations, {count(tokens)} tokens, {date()}")
        self.record("end", reason=reason, iters=iters, tokens=tokens, ledger=dict(seconds))
        self.draw(0)
        complete = iters >= self.config.max_iters or by_clock
        if not (self.config.eval_only or complete):
            more = "" if self.config.init_from == "auto" else " --init_from=resume"
            script = "python" if self.ranks.world_size == 1 else "torchrun ..."
            say(f"to continue: {script} {shlex.join(sys.argv)}{more}")
        self.tracker.close()
        keep_transcript(None)


def date() -> str:
    """Date and time, for people; records have theirs in ISO 8601."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def tokenizer_name(spec: dict) -> str:
    """The kind of a tokenizer and, if it has a table of its own, the sha256 of that."""
    table = spec.get("json") or "".join(spec.get("itos", []))
    sha256 = hashlib.sha256(table.encode(errors="replace")).hexdigest()
    return f"{spec['kind']} {sha256}" if table else spec["kind"]
