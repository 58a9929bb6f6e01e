"""
A run's log: lines on the console, records in out_dir/metrics.jsonl, and where the time went.

Console lines begin as nanoGPT's do, so its parsers still work. Warnings go to stderr. Time is cut
into laps: each second since the run began belongs to exactly one category, so evaluation,
checkpoints and compilation never count as iteration time.
"""

import hashlib
import json
import math
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from common.console import command_line, count, duration, keep_transcript, say, warn
from common.files import lack_of_space
from configurator import NEVER, Config, config_values, decays
from data.shards import Dataset
from model import GPTConfig
from training.build import count_flops, count_parameters, describe_flops, warn_of_epochs
from training.checkpoint import checkpoint_path, claim_folder, unlock_folder
from training.clock import LONG_UNTIL, Clock, clock_time
from training.drawing import Drawing
from training.hardware import Hardware, cuda_hint
from training.memory import checkpoint_bytes, checkpoint_files
from training.metrics import drop_records, plain
from training.progress import Progress
from training.ranks import Ranks
from training.tracker import Tracker

CATEGORIES = ("start-up", "compile", "steps", "evaluation", "checkpoints")
# ends that complete a run, after a last evaluation; after others the same command resumes it
COMPLETE = ("eval_only", "max_iters", "hours", "until")
MAX_SKIPS = 20  # updates in a row; float16 may need 16 to find its loss scale
SPIKE = 2.0  # warn of a loss this many times its running mean
OVERFITS = 1.01  # warn of a validation loss this many times the best: more than noise
CPU_TOKENS = 100_000  # per iteration; more is rarely meant for a CPU


class RunLog:
    """
    The console and metrics.jsonl of one run. Rank 0 writes for all, but all ranks call lap(),
    line() and end(). Locks the run's folder, and deletes leftovers in it. With eval_only there is
    only the console. On resume, the records that the run will write again are removed, so that the
    file reads as one run.
    """

    def __init__(self, config: Config, hw: Hardware, ranks: Ranks, clock: Clock, resumed: dict):
        """`resumed`: the checkpoint's state, empty where there is none."""
        self.config, self.hw, self.ranks, self.clock = config, hw, ranks, clock
        self.drawing: Drawing | None = None  # of out_dir/loss.png
        self.file = None
        self.unwritten = b""  # records that did not fit on a full disk
        # Seconds in all launches, and the moment up to which they are counted
        self.seconds, self.lapped_at = dict.fromkeys(CATEGORIES, 0.0), clock.began
        for category, seconds in resumed.get("ledger", {}).items():
            # c336bd1 had more categories, mostly for waiting for data
            self.seconds[category if category in CATEGORIES else "steps"] += seconds
        self.cpu_seconds, self.cpu_at = 0.0, time.process_time()  # of all threads, in steps
        progress = resumed.get("progress", {})
        self.first_iter = progress.get("iter_num", 0)
        self.saved_iter: int | None = self.first_iter if resumed else None
        self.has_saved = False  # in this launch
        self.pace = 0.0  # seconds per iteration, at the last line
        self.first_steps = self.seconds["steps"]
        # At the last line: iterations, tokens, and seconds of steps, CPU and waiting
        self.logged = (self.first_iter, progress.get("tokens", 0), self.first_steps, 0.0, 0.0)
        # Updates skipped since the last line, and in a row; counted on the device
        self.skipped = torch.zeros((), device=hw.device)
        self.skipped_in_a_row = torch.zeros((), device=hw.device)
        self.mean_loss: float | None = None  # a running mean over the lines
        self.said: set[str] = set()  # warnings that are given once
        out_dir, self.owner = Path(config.out_dir), ""
        if not config.eval_only:
            self.owner = ranks.from_main(claim_folder, out_dir, not resumed)
        if ranks.is_main and not config.eval_only:
            if resumed:
                drop_records(out_dir / "metrics.jsonl", self.first_iter, progress["evaluated_at"])
            self.file = open(out_dir / "metrics.jsonl", "ab", buffering=0)
            keep_transcript(open(out_dir / "log.txt", "a", encoding="utf-8", errors="replace"))
        # the evaluation at the resumed iteration stands; what comes after it is written again
        purge_from = self.first_iter + 1 if resumed else 0
        self.tracker = Tracker(config, enabled=ranks.is_main, purge_from=purge_from)

    def lap(self, category: str) -> float:
        """
        Wait until the device has finished, and count the time since the last lap for a category.
        Returns these seconds.
        """
        self.hw.synchronize()
        now, cpu = time.perf_counter(), time.process_time()
        seconds = now - self.lapped_at
        self.seconds[category] += seconds
        if category == "steps":
            self.cpu_seconds += cpu - self.cpu_at
        self.lapped_at, self.cpu_at = now, cpu
        return seconds

    def hours(self) -> float:
        """Hours spent on iterations, evaluations and checkpoints, in all launches."""
        booked = sum(self.seconds[name] for name in CATEGORIES[2:])
        return (booked + time.perf_counter() - self.lapped_at) / 3600

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint known to be valid: saved in this launch, or resumed from."""
        n = self.saved_iter
        return None if n is None else checkpoint_path(self.config.out_dir, n)

    def way_back(self) -> str:
        """For messages: where a run that ends now can be resumed from."""
        if self.saved_iter is None:
            return "there is no checkpoint to resume from"
        return f"--init_from=resume continues from {self.newest_checkpoint()}"

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
            except OSError as error:  # a full disk: the run matters more than its records
                if not waiting:
                    rest = "keeping its records in memory until there is room"
                    warn(f"metrics.jsonl: {error.strerror}; {rest}")
        self.tracker.log(record)

    def start(self, data: Dataset, model: GPTConfig) -> None:
        """The first lines: the model, the device, the data, and the length of the run."""
        c, hw = self.config, self.hw
        parameters = count_parameters(model)
        self.flops_per_token = count_flops(model)[0] if self.ranks.is_main else None
        # the length of a stream is unknown
        self.train_tokens = None if data.stream else len(data.train)
        self.bytes_per_token = data.bytes_per_token
        train = count(self.train_tokens) if self.train_tokens else "streamed"
        peak = f"{hw.peak_tflops} TFLOP/s dense peak" if hw.peak_tflops else "peak unknown, mfu n/a"
        vocabulary = f"vocabulary {data.vocab} -> {model.vocab_size}"
        say(f"start: {date()}")
        flops = describe_flops(model) if self.ranks.is_main else ""  # counting takes some seconds
        say(f"model: {parameters / 1e6:.2f}M parameters, {vocabulary}, {flops}")
        say(f"device: {hw.name}, {hw.dtype_name}, {peak}")
        say(f"data: {data.source}, {train} train and {count(len(data.val))} val tokens")
        sizes = f"{c.gradient_accumulation_steps} x {c.batch_size} x {c.block_size}"
        say(f"tokens per iteration will be: {c.iter_tokens:,} = {sizes} (micro-batches x B x T)")
        iterations = f"{c.max_iters:,} iterations"
        total = self.logged[1] + c.iter_tokens * (c.max_iters - self.first_iter)
        if c.by_clock and not c.eval_only:
            bound = "" if c.max_iters == NEVER else f" or {iterations}"
            end = f"in {c.out_dir}; stops by about {clock_time(self.clock.left())}"
            if c.warmup_iters:
                end += f"; warmup: {c.warmup_iters:,} iterations, at most a tenth of the time"
            say(f"run: hours {self.clock.hours_text()}{bound}, {end}")
        elif not c.eval_only:
            epochs = f", {total / self.train_tokens:.2f} epochs" if self.train_tokens else ""
            say(f"run: {iterations}, {count(total)} tokens{epochs}, in {c.out_dir}")
        if self.ranks.is_main and not c.eval_only:
            self.warn_of_keys(total)
            self.warn_of_space(model)
        if self.file:
            self.drawing = Drawing(Path(c.out_dir))
        if self.ranks.world_size > 1:
            say(f"processes: {self.ranks.world_size}, each with its share of the micro-batches")
        self.record(
            "start",
            iter=self.first_iter,
            config=config_values(c),
            parameters=parameters,
            device=hw.name,
            device_type=hw.device.type,
            dtype=hw.dtype_name,
            peak_tflops=hw.peak_tflops,
            flops_per_token=self.flops_per_token,
            tokens_per_iter=c.iter_tokens,
            world_size=self.ranks.world_size,
            tokenizer=tokenizer_name(data.tokenizer),
            data_fingerprint=data.fingerprint,
            torch=torch.__version__,
        )

    def warn_of_keys(self, tokens: int) -> None:
        """Warn of keys that are probably not meant so. `tokens`: of the whole run."""
        c = self.config
        if c.max_iters < NEVER:
            warn_of_epochs(c, tokens, self.train_tokens)
        for key in ("warmup_iters", *["lr_decay_iters"] * decays(c)):
            if c.max_iters < getattr(c, key) < NEVER:
                warn(f"{key}: {getattr(c, key):,} is longer than the run; give a lower one")
        if self.hw.device.type == "cpu" and c.device == "auto" and c.iter_tokens > CPU_TOKENS:
            warn(f"this trains on the CPU, very slowly: torch sees no GPU; {cuda_hint()}")
        if c.until and (left := self.clock.left_of_run()) > LONG_UNTIL:
            warn(f"until: {c.until} is {left / 3600:.1f} h away; here it is {clock_time(0)}")

    def warn_of_space(self, model: GPTConfig) -> None:
        """Warn if the disk cannot hold all checkpoints of the run."""
        out_dir, files = Path(self.config.out_dir), checkpoint_files(self.config)
        size = checkpoint_bytes(self.config, model)
        # best.pt is usually a link to one of them
        there = {path.stat().st_ino: path.stat().st_size for path in out_dir.glob("*.pt")}
        if shortage := lack_of_space(out_dir, files * size - sum(there.values())):
            warn(f"{shortage}, for {files} checkpoints of {size / 1e9:.2f} GB (docs/recovery.md)")

    def note(
        self, p: Progress, lr: float, loss_sum: Tensor, targets: Tensor, grad_norm: Tensor
    ) -> None:
        """
        Keep what train_step returned for iteration p.iter_num, on the device until the next line.
        """
        self.last: dict = dict(iter=p.iter_num, tokens=p.tokens, lr=lr)
        self.loss_sum, self.targets, self.grad_norm = loss_sum, targets, grad_norm
        skipped = ~grad_norm.isfinite()
        self.skipped += skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skipped

    def line(self, p: Progress, waited: float) -> None:
        """
        One line and record for the iterations since the previous line, up to `p`. Only here do
        their values leave the device. `waited`: seconds that this launch has waited for data.
        Raises RunError after too many skipped updates in a row.
        """
        self.lap("steps")
        before, ranks = self.logged, self.ranks
        self.logged = p.iter_num, p.tokens, self.seconds["steps"], self.cpu_seconds, waited
        iterations, tokens, elapsed, cpu, waited = (
            now - then for now, then in zip(self.logged, before, strict=True)
        )
        if advice := self.hw.too_many_threads(elapsed - waited, cpu):
            self.warn_once("threads", self.last["iter"], advice)
        loss_sum, targets = ranks.reduce(self.loss_sum.item(), self.targets.item())
        # the maximum over the ranks, of each value
        elapsed, waited, mem = ranks.max(elapsed, waited, self.hw.peak_memory_gib() or 0.0)
        self.clock.note("iteration", elapsed / iterations)
        self.pace = elapsed / iterations
        tokens_per_sec = tokens / elapsed
        values = dict(
            iter=self.last["iter"],
            tokens=self.last["tokens"],
            tokens_after=p.tokens,
            loss=loss_sum / targets if targets else math.nan,
            lr=self.last["lr"],
            grad_norm=self.grad_norm.item(),
            step_ms=1000 * elapsed / iterations,
            tokens_per_sec=tokens_per_sec,
            mfu=self.hw.mfu(self.flops_per_token, tokens_per_sec, ranks.world_size),
            mem_gib=mem or None,
            data_wait_ms=1000 * waited / iterations,
            hours=self.hours(),
        )
        say(self.format_step(values))
        self.record("step", **values)
        if self.mean_loss is None and self.config.max_iters == NEVER and ranks.is_main:
            # the first line of a run by the clock: now its speed is known
            expected = p.tokens + tokens_per_sec * self.clock.left()
            warn_of_epochs(self.config, expected, self.train_tokens)
        self.warn_of_spike(values["iter"], values["loss"])
        self.warn_of_skips(values["iter"])
        if self.drawing:
            self.drawing.draw_if_due()

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
        Seconds to the end: the iterations left at the mean pace of this launch, and an evaluation
        and a save per interval left; at most what the clock allows.
        """
        c, done = self.config, max(1, it + 1 - self.first_iter)
        pace = (self.seconds["steps"] - self.first_steps) / done
        intervals = math.ceil(c.max_iters / c.eval_interval) - it // c.eval_interval
        prices = self.clock.prices
        pauses = intervals * (prices.get("evaluation", 0.0) + prices.get("checkpoints", 0.0))
        return max(0.0, min((c.max_iters - it - 1) * pace + pauses, self.clock.left()))

    def warn_of_skips(self, iter_num: int) -> None:
        """Warn of updates skipped since the last line. Raises RunError after too many."""
        skipped, in_a_row = int(self.skipped), int(self.skipped_in_a_row)
        self.skipped.zero_()
        if skipped:
            why = "a gradient was not finite"
            if self.hw.dtype == torch.float16:
                why += "; a few are normal while float16 finds its loss scale"
            self.warn(iter_num, f"{skipped} updates skipped since the last line: {why}")
        if in_a_row >= MAX_SKIPS:  # all ranks have the same gradients
            hint = "try a lower learning_rate or dtype=float32"
            self.ranks.fail(f"{in_a_row} updates in a row skipped; {hint}")

    def warn_of_spike(self, iter_num: int, loss: float) -> None:
        """
        Warn of a loss far above the running mean of the previous lines. A loss that is not finite
        does not count in the mean.
        """
        mean = loss if self.mean_loss is None else self.mean_loss
        if loss > SPIKE * mean:
            self.warn(iter_num, f"loss spike, {loss:.4f} after a running mean of {mean:.4f}")
        if math.isfinite(loss):
            self.mean_loss = 0.9 * mean + 0.1 * loss

    def evaluation(self, p: Progress, train_loss: float) -> None:
        """After an evaluation, before its lap. Its validation loss is in `p`."""
        seconds, val_loss = time.perf_counter() - self.lapped_at, p.val_loss
        # a float holds no more than exp(709)
        perplexity = math.inf if val_loss > 709 else math.exp(val_loss)
        bits, end = None, ""
        if self.bytes_per_token:
            bits = val_loss / math.log(2) / self.bytes_per_token
            end = f", {bits:.4f} bits per byte"
        losses = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}"
        say(f"step {p.iter_num}: {losses}, time {seconds:.1f}s, perplexity {perplexity:.4g}{end}")
        so_far = dict(iter=p.iter_num, tokens=p.tokens, hours=self.hours())
        values = dict(train_loss=train_loss, val_loss=val_loss, seconds=seconds)
        self.record("eval", **so_far, **values, perplexity=perplexity, bits_per_byte=bits)
        if OVERFITS * p.best_val_loss < val_loss < math.inf:
            best = f"step {p.best_iter} ({p.best_val_loss:.4f})"
            kept = "best.pt keeps that model" if p.best_iter else "lower learning_rate"
            line = f"validation has not improved since {best}; {kept}"
            self.warn_once("overfits", p.iter_num, line)

    def checkpoint(self, iter_num: int, path: Path, size: int) -> None:
        """After a save, before its lap."""
        seconds = time.perf_counter() - self.lapped_at
        readable = f"{size / 1e9:.2f}GB" if size >= 1e9 else f"{size / 1e6:.2f}MB"
        say(f"checkpoint {iter_num}: {path}, {readable}, time {seconds:.1f}s, {date()}")
        self.record("checkpoint", iter=iter_num, path=str(path), bytes=size, seconds=seconds)
        self.saved_iter, self.has_saved = iter_num, True

    def sample(self, iter_num: int, text: str) -> None:
        say(f"sample {iter_num}:", *text.split("\n"), "")
        self.record("sample", iter=iter_num, text=text)

    def warn(self, iter_num: int, message: str) -> None:
        if self.ranks.is_main:
            warn(f"iter {iter_num}: {message}")
        self.record("event", iter=iter_num, message=message)

    def warn_once(self, what: str, iter_num: int, message: str) -> None:
        """As `warn`, but only once for each `what`."""
        if what not in self.said:
            self.said.add(what)
            self.warn(iter_num, message)

    def end(self, reason: str, p: Progress, waited: float) -> None:
        """The last lines: why the run ended, and where the time went."""
        self.lap("evaluation")
        total, minutes = sum(self.seconds.values()), (time.perf_counter() - self.clock.began) / 60
        shares = [f"{name} {s:.1f}s ({s / total:.1%})" for name, s in self.seconds.items()]
        spent = ", ".join(shares).replace("evaluation", "evaluation with any sample")
        say(f"time: {duration(total)} wall (this launch {duration(60 * minutes)}) = {spent}")
        say(f"waited for data: {waited:.1f}s of the steps of this launch")
        by_clock = reason in ("hours", "until")
        said = "the schedule is complete" if by_clock else reason
        say(f"end: {said} after {p.iter_num:,} iterations, {count(p.tokens)} tokens, {date()}")
        so_far = dict(iters=p.iter_num, tokens=p.tokens, hours=self.hours())
        self.record("end", reason=reason, **so_far, ledger=dict(self.seconds))
        if not (self.config.eval_only or reason in COMPLETE):
            more = "" if self.config.init_from == "auto" else " --init_from=resume"
            script = "python" if self.ranks.world_size == 1 else "torchrun ..."
            say(f"to continue: {script} {command_line(*sys.argv)}{more}")
        self.tracker.close()
        if self.drawing and not reason.startswith("SIG"):  # stopping must not wait for a picture
            self.drawing.draw_end(total)
        keep_transcript(None)
        unlock_folder()


def date() -> str:
    """Date and time for people; records use ISO 8601."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def tokenizer_name(spec: dict) -> str:
    """The kind of a tokenizer and, if it has its own table, the sha256 of the table."""
    table = spec.get("json") or "".join(spec.get("itos", []))
    sha256 = hashlib.sha256(table.encode(errors="replace")).hexdigest()
    return f"{spec['kind']} {sha256}" if table else spec["kind"]
