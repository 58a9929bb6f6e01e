"""
A run's log: lines on the console and in log.txt, records in metrics.jsonl, loss.png, and a tracker.

Console lines begin as nanoGPT's do, so its parsers still work. Warnings go to stderr.
"""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch

from common.child import start_child
from common.console import command_line, count, duration, keep_transcript, say, warn
from common.files import lack_of_space, plain, read_record, replacing
from configurator import FIELDS, NEVER, Config, config_values
from data.shards import Dataset
from training.checkpoint import claim_folder
from training.clock import Clock, clock_time
from training.hardware import MEASURED, Hardware, count_flops, cuda_hint, old_driver
from training.ranks import Ranks

PROJECT = Path(__file__).resolve().parent.parent
CPU_TOKENS = 100_000  # per iteration; more is rarely meant for a CPU
LARGE_CORPUS, MANY_EPOCHS = 100_000_000, 2  # tokens; of a smaller corpus many epochs are meant
FAR_AWAY = 16 * 3600  # seconds to --until that are probably a day too many
SHORTEST_RUN = 20.0  # seconds; of a shorter one no picture is drawn
UNCOMPILED_LINES = 10  # every so many lines say that the run is not compiled
PATIENCE = 20.0  # seconds to wait for a picture at the end of a run
# nanoGPT's names in wandb, so that its dashboards work; all others are KIND/NAME, as step/loss
NANOGPT_NAMES = {
    "step/lr": "lr",
    "step/mfu": "mfu",
    "eval/train_loss": "train/loss",
    "eval/val_loss": "val/loss",
}


class Log:
    """
    The log of one run, which rank 0 writes for all. The other ranks, and all of them with
    eval_only, have no files.
    """

    def __init__(self, config: Config, clock: Clock, hw: Hardware, ranks: Ranks):
        self.config = config
        self.clock = clock
        self.hw = hw
        self.ranks = ranks
        self.out_dir = Path(config.out_dir)
        self.file: BinaryIO | None = None
        self.unwritten = b""  # records that a full disk has not taken; a checkpoint has them too
        self.tracker: Tracker | None = None
        self.picture: subprocess.Popen | None = None  # the process that draws loss.png
        self.picture_failed = False
        self.has_saved = False  # in this launch
        self.total_gib = hw.memory_gib()
        self.uncompiled = ""  # why the run is not compiled, if it should be

    def open(self, resumed: dict | None) -> None:
        """
        Take the run's folder, and open the files in it. On resume, the records that the run will
        write again are removed, so that the file reads as one run. Raises UserError and OSError.
        """
        if self.config.eval_only:
            return
        progress = resumed["progress"] if resumed else None
        self.lock = claim_folder(self.out_dir, progress)
        metrics = self.out_dir / "metrics.jsonl"
        if resumed:
            drop_records(metrics, resumed["progress"])
            self.unwritten = missing_lines(metrics, resumed["unwritten"])
        self.file = open(metrics, "ab", buffering=0)
        keep_transcript(open(self.out_dir / "log.txt", "a", encoding="utf-8", errors="replace"))
        # the evaluation at the resumed iteration stands; later records are written again
        self.tracker = Tracker(self.config, purge_from=progress["iter_num"] + 1 if progress else 0)

    # -------------------------------------------------------------------------
    # The beginning

    def say_settings(self, compiles: bool, flash: bool) -> None:
        """
        The first lines, which can be pasted: the command, the keys that are not defaults, and the
        switches in use; `compiles` and `flash` are what this machine makes of the keys.
        """
        c = self.config
        values = config_values(c)
        changed = [name for name in values if values[name] not in (FIELDS[name].default, NEVER)]
        say(f"command: {self.command()}")
        say("settings: " + command_line(*[f"--{name}={values[name]}" for name in changed]))
        sizes = f"{c.n_layer} layers x {c.n_embd}, learning_rate {c.learning_rate:g}, {c.dtype}"
        switches = f"compile {compiles}, flash {flash}, tf32 {c.tf32}, tie_weights {c.tie_weights}"
        say(f"switches: {sizes}, {switches}")

    def command(self) -> str:
        script = "python" if self.ranks.world_size == 1 else "torchrun ..."
        return f"{script} {command_line(*sys.argv)}"

    def begin(self, data: Dataset, model, it: int, tokens: int) -> None:
        """
        The first lines: the model, the device, the data, and the length of the run, which is at
        iteration `it` after so many tokens.
        """
        c, hw = self.config, self.hw
        self.first_iter = it
        self.first_tokens = tokens
        self.first_steps = self.clock.seconds["steps"]
        # at the last line: iterations, tokens, and seconds of steps and of waiting
        self.reported = (it, tokens, self.first_steps, 0.0)
        self.train_tokens = None if data.stream else len(data.train)  # a stream's are unknown
        self.bytes_per_token = data.bytes_per_token
        self.flops_per_token = count_flops(model.config) if self.ranks.is_main else None
        parameters = sum(p.numel() for p in model.parameters())
        say(f"start: {date()}")
        flops = "FLOPs not counted, so mfu n/a"
        if self.flops_per_token:
            flops = f"{self.flops_per_token / 1e6:.1f} MFLOP/token (counted)"
        vocabulary = f"vocabulary {data.vocab} -> {model.config.vocab_size}"
        say(f"model: {parameters / 1e6:.2f}M parameters, {vocabulary}, {flops}")
        say(f"device: {hw.name}, {hw.dtype_name}, {peak_text(hw)}")
        train = count(self.train_tokens) if self.train_tokens else "streamed"
        held = f"{train} train and {count(len(data.val))} val tokens"
        order = f", order {data.order}" if data.order else ""
        say(f"data: {data.source}, {held}{order}")
        sizes = f"{c.gradient_accumulation_steps} x {c.batch_size} x {c.block_size}"
        say(f"tokens per iteration will be: {c.iter_tokens:,} = {sizes} (micro-batches x B x T)")
        if not c.eval_only:
            say(f"run: {self.length(tokens)}, in {c.out_dir}")
            self.warn_of_epochs(tokens)
        if self.ranks.world_size > 1:
            say(f"processes: {self.ranks.world_size}, each with its share of the micro-batches")
        self.warn_of_space(parameters)
        is_meant = c.iter_tokens <= CPU_TOKENS and not old_driver()
        if hw.device.type == "cpu" and c.device == "auto" and not is_meant:
            warn(f"this trains on the CPU, very slowly: torch sees no GPU; {cuda_hint()}")
        if c.until and self.clock.left_of_run() > FAR_AWAY and self.ranks.is_main:
            hours = self.clock.left_of_run() / 3600
            warn(f"until: {c.until} is {hours:.1f} h away; here it is {clock_time(0)}")
        self.record(
            "start",
            iter=it,
            config=config_values(c),
            parameters=parameters,
            device=hw.name,
            device_type=hw.device.type,
            dtype=hw.dtype_name,
            peak_tflops=hw.peak_tflops,
            peak_source=hw.peak_source,
            flops_per_token=self.flops_per_token,
            tokens_per_iter=c.iter_tokens,
            world_size=self.ranks.world_size,
            tokenizer=tokenizer_name(data.tokenizer),
            data_fingerprint=data.fingerprint,
            val_fingerprint=data.val_fingerprint,
            val_text_sha256=data.val_text_sha256,
            val_tokens=len(data.val),
            torch=torch.__version__,
        )

    def warn_of_space(self, parameters: int) -> None:
        """Warn if the disk cannot hold all checkpoints of the run."""
        if not self.file:
            return
        files = max(2, self.config.keep_checkpoints) + 1  # the newest stays during a write; best.pt
        size = 12 * parameters  # weights and two moments in float32
        # best.pt is usually a link to one of them
        there = {path.stat().st_ino: path.stat().st_size for path in self.out_dir.glob("*.pt")}
        if shortage := lack_of_space(self.out_dir, files * size - sum(there.values())):
            warn(f"{shortage}, for {files} checkpoints of {size / 1e9:.2f} GB (docs/recovery.md)")

    def tokens_at_end(self, tokens: int) -> int:
        """Of a run by iterations that has trained on so many."""
        return tokens + self.config.iter_tokens * (self.config.max_iters - self.first_iter)

    def warn_of_epochs(self, tokens: int) -> None:
        """A large corpus is rarely meant to be read more than twice."""
        c, corpus = self.config, self.train_tokens
        if c.by_clock or not corpus or corpus < LARGE_CORPUS:
            return
        if (epochs := self.tokens_at_end(tokens) / corpus) > MANY_EPOCHS:
            hint = f"prepare more tokens, or give --max_iters={2 * corpus // c.iter_tokens}"
            warn(f"{epochs:.1f} epochs of the {count(corpus)} tokens in {c.dataset}; {hint}")

    def length(self, tokens: int) -> str:
        """How long the run is that has trained on so many tokens, in words."""
        c = self.config
        iterations = f"{c.max_iters:,} iterations"
        if not c.by_clock:
            total = self.tokens_at_end(tokens)
            epochs = f", {total / self.train_tokens:.2f} epochs" if self.train_tokens else ""
            return f"{iterations}, {count(total)} tokens{epochs}"
        bound = "" if c.max_iters == NEVER else f" or {iterations}"
        stops = f"stops by about {clock_time(self.clock.left())}"
        return f"hours {self.clock.hours_text()}{bound}; {stops}"

    def report_compile(self, it: int, seconds: float, problem: str) -> None:
        """After compiling; with why the run goes on uncompiled, if it does."""
        say(f"compile: {seconds:.1f}s")
        self.uncompiled = problem
        if problem:
            self.warn(it, f"torch.compile does not work here ({problem}); continuing without it")

    # -------------------------------------------------------------------------
    # While it runs

    def report_step(
        self,
        it: int,
        tokens: int,
        tokens_after: int,
        loss: float,
        lr: float,
        grad_norm: float,
        waited: float,
    ) -> None:
        """
        One line and record. loss, lr and grad_norm are of iteration `it`, `tokens` of training
        before it and `tokens_after` after it; time, tok/s and mfu are means of the iterations since
        the previous line. `waited`: seconds that this launch has waited for data. All ranks take
        part.
        """
        c, clock, ranks = self.config, self.clock, self.ranks
        now = (it + 1, tokens_after, clock.seconds["steps"], waited)
        iterations, trained, elapsed, waited = (
            after - before for after, before in zip(now, self.reported, strict=True)
        )
        self.reported = now
        # the maximum over the ranks, of each value
        elapsed, waited, mem = ranks.max(elapsed, waited, self.hw.peak_memory_gib() or 0.0)
        pace = elapsed / iterations  # seconds
        clock.took("iteration", pace)
        tokens_per_sec = trained / elapsed
        mfu = self.hw.mfu(self.flops_per_token, tokens_per_sec, ranks.world_size)

        mfu_text = "n/a" if mfu is None else f"{mfu:.2%}"
        epoch = f"{tokens / self.train_tokens:.2f}" if self.train_tokens else "n/a"
        of_all = f" of {self.total_gib:.1f}" if self.total_gib else ""
        mem_text = f"{mem:.1f}{of_all}GiB" if mem else "n/a"
        hours = f"hours {clock.hours_text()}, " if c.by_clock else ""
        is_tenth = it % (UNCOMPILED_LINES * c.log_interval) == 0
        end = ", not compiled" if self.uncompiled and is_tenth else ""
        say(
            f"iter {it}: loss {loss:.4f}, time {1000 * pace:.2f}ms, mfu {mfu_text}, "
            f"tok/s {tokens_per_sec:,.0f}, lr {lr:.2e}, norm {grad_norm:.2f}, "
            f"tokens {count(tokens)}, epoch {epoch}, mem {mem_text}, "
            f"{hours}eta {duration(self.eta(it))}{end}"
        )
        self.record(
            "step",
            iter=it,
            tokens=tokens,
            tokens_after=tokens_after,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            step_ms=1000 * pace,
            tokens_per_sec=tokens_per_sec,
            mfu=mfu,
            mem_gib=mem or None,
            data_wait_ms=1000 * waited / iterations,
            hours=clock.training_hours(),
        )

    def eta(self, it: int) -> float:
        """
        Seconds to the end: the iterations left at the mean pace of this launch, and an evaluation
        and a save per interval left; at most what the clock allows.
        """
        c, clock = self.config, self.clock
        pace = (clock.seconds["steps"] - self.first_steps) / (it + 1 - self.first_iter)
        intervals = math.ceil(c.max_iters / c.eval_interval) - it // c.eval_interval
        pause = sum(clock.seconds_per.get(name, 0.0) for name in ("evaluation", "checkpoints"))
        left = (c.max_iters - it - 1) * pace + intervals * pause
        return max(0.0, min(left, clock.left()))

    def report_eval(self, it: int, tokens: int, train_loss: float, val_loss: float) -> None:
        """After an evaluation, before its lap. Losses are in nats per token."""
        seconds = self.clock.since_lap()
        # a float holds no more than exp(709)
        perplexity = math.inf if val_loss > 709 else math.exp(val_loss)
        bits = self.bits_per_byte(val_loss)
        end = "" if bits is None else f", {bits:.4f} bits per byte"
        losses = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}"
        say(f"step {it}: {losses}, time {seconds:.1f}s, perplexity {perplexity:.4g}{end}")
        self.record(
            "eval",
            iter=it,
            tokens=tokens,
            hours=self.clock.training_hours(),
            train_loss=train_loss,
            val_loss=val_loss,
            seconds=seconds,
            perplexity=perplexity,
            bits_per_byte=bits,
        )
        self.draw()

    def bits_per_byte(self, val_loss: float) -> float | None:
        """None if the bytes of the validation text were not counted."""
        if not (self.bytes_per_token and math.isfinite(val_loss)):
            return None
        return val_loss / math.log(2) / self.bytes_per_token

    def report_save(self, it: int, path: Path) -> None:
        """After a save, before its lap."""
        size, seconds = path.stat().st_size, self.clock.since_lap()
        readable = f"{size / 1e9:.2f}GB" if size >= 1e9 else f"{size / 1e6:.2f}MB"
        say(f"checkpoint {it}: {path}, {readable}, time {seconds:.1f}s, {date()}")
        self.record("checkpoint", iter=it, path=str(path), bytes=size, seconds=seconds)
        self.has_saved = True

    def report_sample(self, it: int, text: str) -> None:
        say(f"sample {it}:", *text.split("\n"), "")
        self.record("sample", iter=it, text=text)

    def warn(self, it: int, message: str) -> None:
        """A warning that belongs to an iteration."""
        if self.ranks.is_main:
            warn(f"iter {it}: {message}")
        self.record("event", iter=it, message=message)

    def record(self, kind: str, **values) -> None:
        """One line of metrics.jsonl, flushed, and the tracker's share of it."""
        if not self.file:
            return
        record = dict(kind=kind, **{name: plain(value) for name, value in values.items()})
        record["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
        lines = self.unwritten + json.dumps(record).encode() + b"\n"
        end = self.file.seek(0, os.SEEK_END)
        try:
            left = lines
            while left:
                left = left[self.file.write(left) :]
            self.unwritten = b""
        except OSError as error:  # a full disk: the run matters more than its records
            with contextlib.suppress(OSError):
                self.file.truncate(end)  # or half a line would stay
            waiting = bool(self.unwritten)
            self.unwritten = lines
            if not waiting:
                rest = "keeping its records in memory until there is room"
                warn(f"metrics.jsonl: {error.strerror}; {rest}")
        if self.tracker:
            self.tracker.log(record)

    def draw(self) -> None:
        """Start a process that draws loss.png, one at a time; its failure cannot hurt the run."""
        if not self.file or self.clock.used() < SHORTEST_RUN:
            return
        if self.picture and self.picture.poll() is None:  # still drawing
            return
        command = ("-m", "reports.picture", self.out_dir.resolve())
        try:
            self.picture = start_child(*command, cwd=PROJECT, stderr=subprocess.DEVNULL)
        except OSError:  # no memory for a process, say
            self.picture = None
            self.picture_failed = True

    # -------------------------------------------------------------------------
    # The end

    def finish(
        self, reason: str, complete: bool, it: int, tokens: int, val_loss: float, waited: float
    ) -> None:
        """
        The last lines: where the time went, what came out, why the run ended, and if it is not
        complete, what to type.
        """
        seconds = self.clock.seconds
        total = sum(seconds.values())
        launch = duration(time.perf_counter() - self.clock.began)
        shares = [f"{name} {s:.1f}s ({s / total:.1%})" for name, s in seconds.items()]
        spent = ", ".join(shares).replace("evaluation", "evaluation with any sample")
        say(f"time: {duration(total)} wall (this launch {launch}) = {spent}")
        say(f"waited for data: {waited:.1f}s of the steps of this launch")
        if self.uncompiled:
            hint = "--compile=required ends such a run at its start"
            say(f"not compiled: {self.uncompiled}; {hint}")
        say(*self.results(tokens, val_loss))
        said = "the schedule is complete" if reason in ("hours", "until") else reason
        say(f"end: {said} after {it:,} iterations, {count(tokens)} tokens, {date()}")
        hours = self.clock.training_hours()
        self.record("end", reason=reason, iters=it, tokens=tokens, hours=hours, ledger=seconds)
        if not complete and not self.config.eval_only:
            more = "" if self.config.init_from == "auto" else " --init_from=resume"
            say(f"to continue: {self.command()}{more}")
        if self.tracker:
            self.tracker.close()
        if not reason.startswith("SIG"):  # a signal must not wait for a picture
            self.draw_end()
        keep_transcript(None)
        if self.file:
            self.file.close()
            self.lock.close()

    def results(self, tokens: int, val_loss: float) -> list[str]:
        """
        What a script reads at the end of a run, one `name: value` a line. mfu, tokens_per_sec and
        the peak memory are of this launch, the others of the whole run. All ranks take part.
        """
        clock = self.clock
        # the last evaluation and save may have needed more than the iterations
        (mem_gib,) = self.ranks.max(self.hw.peak_memory_gib() or 0.0)
        steps = clock.seconds["steps"] - self.first_steps
        trained = tokens - self.first_tokens
        rate = trained / steps if trained else None
        mfu = self.hw.mfu(self.flops_per_token, rate, self.ranks.world_size) if rate else None
        hours_per_epoch = None
        if self.train_tokens and tokens:
            hours_per_epoch = clock.training_hours() * self.train_tokens / tokens
        values = dict(
            val_loss=(val_loss if math.isfinite(val_loss) else None, ".4f"),
            bits_per_byte=(self.bits_per_byte(val_loss), ".4f"),
            tokens=(tokens, "d"),
            epochs=(tokens / self.train_tokens if self.train_tokens else None, ".2f"),
            hours_per_epoch=(hours_per_epoch, ".3g"),
            seconds=(sum(clock.seconds.values()), ".1f"),
            tokens_per_sec=(rate, ".0f"),
            mfu=(mfu, ".4f"),
            mem_gib=(mem_gib or None, ".2f"),
        )
        return [
            f"{name}: {'n/a' if value is None else format(value, form)}"
            for name, (value, form) in values.items()
        ]

    def draw_end(self) -> None:
        """Draw the whole run, and wait for it, but not for long."""
        self.wait_for_picture()
        self.draw()
        self.wait_for_picture()
        if self.picture_failed:
            warn(f"loss.png is not drawn; python compare.py {self.out_dir} draws it, or says why")

    def wait_for_picture(self) -> None:
        if self.picture is None:
            return
        try:
            self.picture_failed = self.picture.wait(PATIENCE) != 0
        except subprocess.TimeoutExpired:
            self.picture_failed = True
            self.picture.kill()


class Tracker:
    """
    Sends steps and evaluations to wandb or tensorboard, with MFU in percent. If the tracker is
    missing or fails, this warns once and sends nothing more. On resume, tensorboard's curves in
    out_dir are replaced from iteration `purge_from` on; wandb shows each resume as a separate run.
    """

    def __init__(self, config: Config, purge_from: int):
        self.kind = config.tracker
        self.writer: Any = None
        with self.warn_on_failure():
            if self.kind == "wandb":
                import wandb

                self.writer = wandb.init(
                    project=config.wandb_project,
                    name=config.wandb_run_name,
                    dir=config.out_dir,
                    config=config_values(config),
                )
            elif self.kind == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(config.out_dir, purge_step=purge_from)

    @contextlib.contextmanager
    def warn_on_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker does, the run is worth more
            reason = " ".join(str(error).splitlines()).rstrip(".")
            if isinstance(error, ImportError):
                reason += f" (pip install {self.kind})"
            warn(f"tracker {self.kind}: {reason}; continuing without it")
            self.kind = "none"

    def log(self, record: dict) -> None:
        if self.kind == "none" or record["kind"] not in ("step", "eval"):
            return
        numbers = {}
        for name, value in record.items():
            if isinstance(value, int | float) and name != "iter":
                name = f"{record['kind']}/{name}"
                numbers[NANOGPT_NAMES.get(name, name)] = value
        if numbers.get("mfu"):
            numbers["mfu"] *= 100
        with self.warn_on_failure():
            if self.kind == "wandb":
                self.writer.log(numbers | {"iter": record["iter"]}, step=record["iter"])
            else:
                for name, value in numbers.items():
                    self.writer.add_scalar(name, value, record["iter"])

    def close(self) -> None:
        with self.warn_on_failure():
            if self.kind == "wandb":
                self.writer.finish()
            elif self.kind == "tensorboard":
                self.writer.close()


# -----------------------------------------------------------------------------
# Records


def drop_records(path: Path, progress: dict) -> None:
    """
    Rewrite metrics.jsonl without the records that a resumed run will write again, and without lines
    that are not records, such as half a line left by a kill.
    """
    # ckpt-N is saved before iteration N, and after the evaluation at N unless a signal came first
    it, evaluated_at = progress["iter_num"], progress["evaluated_at"]
    last = {"step": it - 1, "event": it - 1, "checkpoint": it, "start": it}
    last |= {"eval": evaluated_at, "sample": evaluated_at}  # and no end
    if not path.exists():
        return
    try:
        with replacing(path) as file, open(path, "rb") as lines:
            for line in lines:
                record = read_record(line)
                at, kind = record.get("iter"), record.get("kind", "")
                if isinstance(at, int) and at <= last.get(kind, -1):
                    file.write(line.rstrip() + b"\n")
    except OSError as error:  # a full disk
        warn(f"{path}: {error.strerror}; repeated records remain")


def missing_lines(path: Path, lines: str) -> bytes:
    """The lines that are not in the file, which need not exist."""
    there = set(path.read_bytes().splitlines()) if path.exists() else set()
    missing = [line for line in lines.encode().splitlines() if line not in there]
    return b"".join(line + b"\n" for line in missing)


def peak_text(hw: Hardware) -> str:
    peak = f"peak {hw.peak_tflops:.3g} TFLOP/s"
    if hw.peak_source == MEASURED:
        return f"{peak} (measured here by a matmul; no data sheet)"
    return f"{peak} (dense, {hw.peak_source})"


def tokenizer_name(spec: dict) -> str:
    """The kind of a tokenizer and, if it has its own table, the sha256 of the table."""
    table = spec.get("json") or "".join(spec.get("itos", []))
    sha256 = hashlib.sha256(table.encode(errors="replace")).hexdigest()
    return f"{spec['kind']} {sha256}" if table else spec["kind"]


def date() -> str:
    """Date and time for people; records use ISO 8601."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
