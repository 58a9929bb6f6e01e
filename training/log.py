"""
A run's log: lines on the console, records in out_dir/metrics.jsonl, loss.png, and a tracker.

Console lines begin as nanoGPT's do, so its parsers still work. Warnings go to stderr.
"""

import contextlib
import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from io import FileIO
from pathlib import Path

import torch

from common.child import start_child
from common.console import UserError, count, duration, keep_transcript, say, warn
from common.files import replacing
from configurator import Config, config_values
from data.shards import Dataset
from model import GPT
from model_fast import FastGPT
from reports.records import plain, read_record
from training.checkpoint import claim_folder
from training.clock import Clock
from training.hardware import Hardware, count_flops
from training.ranks import Ranks

PROJECT = Path(__file__).resolve().parent.parent
SHORTEST_RUN = 20.0  # seconds; of a shorter one no picture is drawn
PATIENCE = 20.0  # seconds to wait for a picture at the end of a run
# nanoGPT's names in wandb, so that its dashboards work; all others are KIND/NAME, as step/loss
NANOGPT_NAMES = {"step/lr": "lr", "step/mfu": "mfu"}
NANOGPT_NAMES |= {"eval/train_loss": "train/loss", "eval/val_loss": "val/loss"}


class Log:
    """
    The log of one run, which rank 0 writes for all; in the other processes, and with eval_only, it
    has no file. On resume, the records that the run will write again are removed, so that the file
    reads as one run.
    """

    def __init__(self, config: Config, clock: Clock, hw: Hardware, ranks: Ranks):
        self.config, self.clock, self.hw, self.ranks = config, clock, hw, ranks
        self.out_dir = Path(config.out_dir)
        self.file: FileIO | None = None
        self.unwritten = b""  # records that did not fit on a full disk
        self.picture: subprocess.Popen | None = None  # the process that draws loss.png
        self.track: Callable[[int, dict], None] = lambda it, numbers: None
        self.flops_per_token: float | None = None
        self.train_tokens: int | None = None  # None: a stream's is unknown
        self.before = (0, 0.0, 0.0)  # at the last line: iterations, seconds of steps and of waiting

    def open(self, resumed: dict) -> None:
        """Lock the run's folder and open its files. `resumed`: the checkpoint's state, or {}."""
        if self.config.eval_only:
            return
        path = self.out_dir / "metrics.jsonl"
        self.lock = claim_folder(self.out_dir)
        if resumed:
            drop_records(path, resumed["progress"])
        elif path.exists():  # of a run that never saved, or yours
            path.replace(path.with_name("metrics.jsonl.old"))
        self.file = open(path, "ab", buffering=0)
        keep_transcript(open(self.out_dir / "log.txt", "a", encoding="utf-8", errors="replace"))
        if self.config.tracker != "none":
            self.track = open_tracker(self.config, resumed)

    # -------------------------------------------------------------------------
    # Records

    def record(self, kind: str, **values) -> None:
        """One line of metrics.jsonl, flushed; and the numbers to the tracker."""
        if not self.file:
            return
        record = dict(kind=kind, **{name: plain(value) for name, value in values.items()})
        record["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
        self.unwritten += json.dumps(record).encode() + b"\n"
        try:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:  # a full disk: the run matters more than its records
            warn(f"metrics.jsonl: {error.strerror}; keeping records in memory until there is room")
        if kind in ("step", "eval"):
            numbers = {f"{kind}/{n}": v for n, v in values.items() if isinstance(v, int | float)}
            try:
                self.track(values["iter"], {NANOGPT_NAMES.get(n, n): v for n, v in numbers.items()})
            except Exception as error:  # whatever a tracker does, the run is worth more
                warn(f"tracker: {error}; continuing without it")
                self.track = lambda it, numbers: None

    def event(self, it: int, message: str) -> None:
        """A warning that belongs to an iteration."""
        if self.ranks.is_main:
            warn(f"iter {it}: {message}")
        self.record("event", iter=it, message=message)

    def sample(self, it: int, text: str) -> None:
        say(f"sample {it}:", *text.split("\n"), "")
        self.record("sample", iter=it, text=text)

    def checkpoint(self, it: int, path: Path) -> None:
        """After a save, before its lap."""
        size, seconds = path.stat().st_size, time.perf_counter() - self.clock.lapped_at
        say(f"checkpoint {it}: {path}, {size / 1e6:.2f}MB, time {seconds:.1f}s, {date()}")
        self.record("checkpoint", iter=it, path=str(path), bytes=size, seconds=seconds)

    def evaluation(self, it: int, tokens: int, train_loss: float, val_loss: float) -> None:
        """After an evaluation, before its lap."""
        seconds = time.perf_counter() - self.clock.lapped_at
        perplexity = math.exp(min(val_loss, 709))  # a float holds no more
        bits, end = None, ""
        if self.bytes_per_token:
            bits = val_loss / math.log(2) / self.bytes_per_token
            end = f", {bits:.4f} bits per byte"
        losses = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}"
        say(f"step {it}: {losses}, time {seconds:.1f}s, perplexity {perplexity:.4g}{end}")
        so_far = dict(iter=it, tokens=tokens, hours=self.clock.training_hours())
        values = dict(train_loss=train_loss, val_loss=val_loss, seconds=seconds)
        self.record("eval", **so_far, **values, perplexity=perplexity, bits_per_byte=bits)
        self.draw()

    def step(
        self, it: int, tokens: int, loss: float, lr: float, grad_norm: float, waited: float
    ) -> None:
        """
        One line and record for the iterations since the previous line, up to `it`, after which the
        run has trained on `tokens`. `waited`: seconds that this launch has waited for data. All
        ranks take part.
        """
        c, ranks, clock = self.config, self.ranks, self.clock
        now = it + 1, clock.seconds["steps"], waited
        iterations, elapsed, waited = (a - b for a, b in zip(now, self.before, strict=True))
        self.before = now
        loss = ranks.sum(loss)[0] / ranks.world_size
        # the maximum over the ranks, of each value
        elapsed, waited, memory = ranks.max(elapsed, waited, self.hw.peak_memory_gib() or 0.0)
        clock.prices["iteration"] = pace = elapsed / iterations
        rate, trained = c.iter_tokens / pace, tokens - c.iter_tokens
        mfu = self.hw.mfu(self.flops_per_token, rate, ranks.world_size)
        # what is left: iterations, and an evaluation and a save per interval; or the clock's time
        pauses = clock.prices.get("evaluation", 0.0) + clock.prices.get("checkpoints", 0.0)
        left = (c.max_iters - it - 1) * (pace + pauses / c.eval_interval)
        eta = duration(max(0.0, min(left, clock.left())))
        # nanoGPT's grammar first
        mfu_text = "n/a" if mfu is None else f"{mfu:.2%}"
        memory_text = f"{memory:.1f}GiB" if memory else "n/a"
        epoch = f"{trained / self.train_tokens:.2f}" if self.train_tokens else "n/a"
        say(
            f"iter {it}: loss {loss:.4f}, time {1000 * pace:.2f}ms, mfu {mfu_text}, "
            f"tok/s {rate:,.0f}, lr {lr:.2e}, norm {grad_norm:.2f}, "
            f"tokens {count(trained)}, epoch {epoch}, mem {memory_text}, eta {eta}"
        )
        values = dict(tokens=trained, tokens_after=tokens, loss=loss, lr=lr, grad_norm=grad_norm)
        speed = dict(step_ms=1000 * pace, tokens_per_sec=rate, mfu=mfu, mem_gib=memory or None)
        times = dict(data_wait_ms=1000 * waited / iterations, hours=clock.training_hours())
        self.record("step", iter=it, **values, **speed, **times)

    # -------------------------------------------------------------------------
    # The beginning and the end

    def start(self, data: Dataset, model: GPT | FastGPT, it: int) -> None:
        """The first lines: the model, the device, the data, and the length of the run."""
        c, hw, processes = self.config, self.hw, self.ranks.world_size
        self.before = it, self.clock.seconds["steps"], 0.0
        self.flops_per_token = count_flops(model.config) if self.ranks.is_main else None
        self.train_tokens = None if data.stream else len(data.train)
        self.bytes_per_token = data.bytes_per_token
        parameters = sum(p.numel() for p in model.parameters())
        flops = count(self.flops_per_token) if self.flops_per_token else "unknown"
        vocabulary = f"vocabulary {data.vocab} -> {model.config.vocab_size}"
        say(f"model: {parameters / 1e6:.2f}M parameters, {vocabulary}, {flops} FLOPs per token")
        peak = f"{hw.peak_tflops} TFLOP/s dense peak" if hw.peak_tflops else "peak unknown, mfu n/a"
        say(f"device: {processes} x {hw.name}, {hw.dtype_name}, {peak}")
        train = count(self.train_tokens) if self.train_tokens else "streamed"
        say(f"data: {data.source}, {train} train and {count(len(data.val))} val tokens")
        sizes = f"{c.gradient_accumulation_steps} x {c.batch_size} x {c.block_size}"
        say(f"tokens per iteration will be: {c.iter_tokens:,} = {sizes} (micro-batches x B x T)")
        length = f"{c.max_iters:,} iterations, {count(c.iter_tokens * c.max_iters)} tokens"
        if c.by_clock:
            end = datetime.fromtimestamp(time.time() + max(0.0, self.clock.left()))
            length = f"until about {end:%Y-%m-%d %H:%M}"
        say(f"run: {length}, in {c.out_dir}")
        machine: dict = dict(device=hw.name, device_type=hw.device.type, dtype=hw.dtype_name)
        machine |= dict(peak_tflops=hw.peak_tflops, world_size=processes, torch=torch.__version__)
        work: dict = dict(parameters=parameters, flops_per_token=self.flops_per_token)
        work |= dict(tokens_per_iter=c.iter_tokens, tokenizer=tokenizer_name(data.tokenizer))
        work |= dict(data_fingerprint=data.fingerprint)
        self.record("start", iter=it, config=config_values(c), **machine, **work)

    def draw(self) -> None:
        """Start a process that draws loss.png, one at a time; its failure cannot hurt the run."""
        idle = self.picture is None or self.picture.poll() is not None
        if self.file and idle and self.clock.used() >= SHORTEST_RUN:
            command = ("-m", "reports.picture", self.out_dir.resolve())
            self.picture = start_child(*command, cwd=PROJECT, stderr=subprocess.DEVNULL)

    def end(self, reason: str, it: int, tokens: int, waited: float) -> None:
        """The last lines: why the run ended, and where the time went."""
        seconds = self.clock.seconds
        total = sum(seconds.values())
        shares = [f"{name} {s:.1f}s ({s / total:.1%})" for name, s in seconds.items()]
        say(f"time: {duration(total)} in all launches = {', '.join(shares)}")
        say(f"waited for data: {waited:.1f}s of the steps of this launch")
        say(f"end: {reason} after {it:,} iterations, {count(tokens)} tokens, {date()}")
        hours = self.clock.training_hours()
        self.record("end", reason=reason, iters=it, tokens=tokens, hours=hours, ledger=seconds)
        if not reason.startswith("SIG"):  # stopping must not wait for a picture
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.picture:
                    self.picture.wait(PATIENCE)
                self.draw()
                if self.picture and self.picture.wait(PATIENCE):
                    warn(f"loss.png is not drawn; python compare.py {self.out_dir} says why")
        keep_transcript(None)


def open_tracker(config: Config, resumed: dict) -> Callable[[int, dict], None]:
    """A function that sends numbers of an iteration to wandb or tensorboard."""
    try:
        if config.tracker == "wandb":
            import wandb

            names: dict = dict(project=config.wandb_project, name=config.wandb_run_name)
            run = wandb.init(**names, dir=config.out_dir, config=config_values(config))
            return lambda it, numbers: run.log(numbers, step=it)
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"tracker: {error}; pip install {config.tracker}") from None
    # what comes after the resumed iteration is written again
    first = resumed["progress"]["iter_num"] + 1 if resumed else 0
    writer = SummaryWriter(config.out_dir, purge_step=first)

    def write(it: int, numbers: dict) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, it)

    return write


def drop_records(path: Path, progress: dict) -> None:
    """
    Rewrite metrics.jsonl without the records that a resumed run will write again, and without lines
    that are not records, such as half a line left by a kill.
    """
    # ckpt-N is saved before iteration N, and after the evaluation at N unless a signal came first
    it, evaluated_at = progress["iter_num"], progress["evaluated_at"]
    last = {"step": it - 1, "event": it - 1, "checkpoint": it, "eval": evaluated_at}
    last |= {"sample": evaluated_at, "start": it}
    lines = path.read_bytes().splitlines() if path.exists() else []
    with replacing(path) as file:
        for line in lines:
            record = read_record(line)
            if record.get("iter", math.inf) <= last.get(record.get("kind", ""), -1):
                file.write(line + b"\n")


def tokenizer_name(spec: dict) -> str:
    """The kind of a tokenizer and, if it has its own table, the sha256 of the table."""
    table = spec.get("json") or "".join(spec.get("itos", []))
    sha256 = hashlib.sha256(table.encode(errors="replace")).hexdigest()
    return f"{spec['kind']} {sha256}" if table else spec["kind"]


def date() -> str:
    """Date and time for people; records use ISO 8601."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
