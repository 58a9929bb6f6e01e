"""
Writes a run's log: the console and log.txt, metrics.jsonl, samples, and an optional tracker.

Console lines begin like nanoGPT's, so parsers written for nanoGPT still work. Warnings go to
stderr.
"""

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from common.console import (
    command_line,
    duration,
    keep_transcript,
    one_line,
    say,
    short,
    warn,
)
from common.files import plain
from common.process import is_main, world_size
from configurator import Config, config_values
from data.shards import Dataset
from data.tokenizer import Tokenizer
from machine.cost import count_flops
from machine.hardware import Hardware
from model import generate
from run.checkpoint import RunFolder, checkpoint_name
from run.clock import Clock, clock_time, training_hours

PROJECT = Path(__file__).resolve().parent.parent


class Log:
    """
    Logs one run; only rank 0 writes. Logging changes no weights, but --hours counts its time.
    """

    def __init__(
        self,
        c: Config,
        clock: Clock,
        hw: Hardware,
        data: Dataset,
        model,
        it: int,
        folder: RunFolder,
    ):
        """
        Take the parts of the run that the log tells about, the iteration at which this launch
        begins, and the folder, which writes.
        """
        self.first = self.last = it, clock.seconds["steps"]  # where this launch and a line begin
        self.config = c
        self.clock = clock
        self.hw = hw
        self.data = data
        self.model = model
        self.train_tokens = len(data.train)
        self.flops_per_token = count_flops(model.config)
        self.folder = folder
        self.tracker: Any = None  # a run.tracker.Tracker
        self.tokenizer: Tokenizer | None = None  # of samples
        self.failed: set[str] = set()  # what attempt() has given up

    def attempt(self, what: str, function: Callable, *arguments) -> Any:
        """
        Call what only reports: a tracker, a sample, a picture. If it fails, warn, and do without it
        from now on, because it must not end a run.
        """
        if what not in self.failed:
            try:
                return function(*arguments)
            except Exception as error:  # such as no network, or lack of memory
                self.failed.add(what)
                warn(f"{what}: {one_line(error)}; continuing without it")

    # -------------------------------------------------------------------------
    # The beginning

    def begin(self, about: list[str]) -> None:
        """
        Start the tracker, describe the run, and open the tokenizer of its samples. `about` has
        lines on what the run begins with, its device, model and data.
        """
        c, (it, _) = self.config, self.first
        if c.tracker != "none" and is_main():
            from run.tracker import Tracker  # only here, because few runs have one

            self.tracker = self.attempt(c.tracker, Tracker, c, it)
        commit = git_commit() if is_main() else None
        program = "nightshift" + (f" {commit}" if commit else "")
        sizes = f"{c.iter_sequences // c.batch_size} x {c.batch_size} x {c.block_size}"
        sizes += " (micro-batches x sequences x tokens)"
        say(
            f"command: {launch_command()}",
            f"start: {date()}, {program}, torch {torch.__version__}",
            *about,
            f"tokens per iteration will be: {c.tokens_per_iter:,} = {sizes}",
            f"run: {self.length()}, in {c.out_dir}",
        )
        if world_size() > 1:
            say(f"processes: {world_size()}, each with its share of the micro-batches")
        self.record(
            "start",
            iter=it,
            config=config_values(c),
            parameters=sum(p.numel() for p in self.model.parameters()),
            flops_per_token=self.flops_per_token,
            tokens_per_iter=c.tokens_per_iter,
            world_size=world_size(),
            torch=torch.__version__,
            commit=commit,
            device=self.hw.name,
            device_type=self.hw.device.type,
            dtype=self.hw.dtype_name,
            peak_tflops=self.hw.peak_tflops,
            peak_source=self.hw.peak_source,
            **self.data.record(),
        )
        if c.sample_tokens and is_main():  # offline, the vocabulary may not be cached
            self.tokenizer = self.attempt("sample_tokens", Tokenizer, self.data.tokenizer)

    def length(self) -> str:
        """Return the run's length as text."""
        c = self.config
        total = c.tokens_between(0, c.max_iters)
        epochs = f"{total / self.train_tokens:.2f} epochs"
        most = f"{c.max_iters:,} iterations, {short(total)} tokens, {epochs}"
        if not c.hours:
            return most
        done = training_hours(self.clock.seconds)
        end = clock_time(3600 * (c.hours - done))
        return f"{done:.3g} of {c.hours:.3g} hours are done, until about {end}; at most {most}"

    # -------------------------------------------------------------------------
    # During the run

    def report_step(self, it: int, loss: float, group: dict, numbers: dict[str, float]) -> None:
        """
        Print the log line of iteration `it`, and write its record. time, tok/s and mfu are means
        over the iterations since the previous line: they include waits for data, but no evaluations
        and saves. `group` is the optimizer's first: its rate, and how much of the run is done.
        `numbers` are train_step's other numbers; those of an experiment end the line. The gradient
        norm, the epoch and the hours are in the record alone.
        """
        tokens = self.config.tokens_between(0, it)  # before this iteration
        seconds, rate, mfu = self.speed(self.last, it + 1)
        self.last = it + 1, self.clock.seconds["steps"]
        mem_gib = self.hw.peak_memory_gib()
        mfu_text = "n/a" if mfu is None else f"{mfu:.2%}"
        mem_text = f"{mem_gib:.1f}GiB" if mem_gib else "n/a"
        own = [f", {n.replace('_', ' ')} {x:.4g}" for n, x in numbers.items() if n != "grad_norm"]
        say(
            f"iter {it}: loss {loss:.4f}, time {1000 * seconds:.2f}ms, mfu {mfu_text}, "
            f"tok/s {short(rate)}, lr {group['lr']:.1e}, tokens {short(tokens)} "
            f"({group['done']:.0%}), mem {mem_text}, eta {duration(self.eta(it + 1))}{''.join(own)}"
        )
        self.record(
            "step",
            iter=it,
            tokens=tokens,
            tokens_after=self.config.tokens_between(0, it + 1),
            epoch=tokens / self.train_tokens,
            loss=loss,
            lr=group["lr"],
            **numbers,
            step_ms=1000 * seconds,
            tokens_per_sec=rate,
            mfu=mfu,
            mem_gib=mem_gib or None,
            compile_seconds=self.clock.seconds["compile"],
            hours=self.clock.hours(),
        )

    def speed(self, since: tuple[int, float], it: int) -> tuple[float, float, float | None]:
        """
        Return the seconds of an iteration, and the tokens per second and the MFU of all ranks, as
        means from an earlier iteration, given with the clock's seconds there, to `it`.
        """
        first, before = since
        elapsed = self.clock.seconds["steps"] - before
        rate = self.config.tokens_between(first, it) / elapsed
        return elapsed / (it - first), rate, self.hw.mfu(self.flops_per_token, rate)

    def eta(self, it: int) -> float:
        """
        Return the seconds that the iterations from `it` on take at this launch's mean speed, or
        those that hours leaves.
        """
        c = self.config
        left = c.tokens_between(it, c.max_iters) / self.speed(self.first, it)[1]
        return max(0.0, min(left, 3600 * (c.hours - self.clock.hours()))) if c.hours else left

    def report_eval(self, it: int, numbers: dict[str, float], complete: bool) -> None:
        """
        Log the numbers of an evaluation, within its pause, and whether it is that of the complete
        run. Losses are in nats per token.
        """
        seconds = self.clock.since_lap()
        say(evaluation_line(it, numbers, seconds, self.data))
        self.record(
            "eval",
            iter=it,
            tokens=self.config.tokens_between(0, it),
            hours=self.clock.hours(),
            complete=complete,
            **numbers,
            seconds=seconds,
            perplexity=perplexity(numbers["val_loss"]),
            bits_per_byte=self.data.bits_per_byte(numbers["val_loss"]),
        )

    def report_averages(self, it: int) -> None:
        becomes = f"at iteration {it} each weight becomes its average over the last iterations"
        say(f"averages: training is complete; {becomes}")

    def report_save(self, it: int, size: int, is_best: bool) -> None:
        """Log a save of `size` bytes, while its pause still lasts, and whether it is the best."""
        seconds = self.clock.since_lap()
        path = Path(self.config.out_dir, checkpoint_name(it))
        readable = f"{size / 1e9:.2f}GB" if size >= 1e9 else f"{size / 1e6:.2f}MB"
        best = ", best checkpoint so far" if is_best else ""
        say(f"checkpoint {it}: {path}, {readable}, time {seconds:.1f}s, {date()}{best}")
        self.record("checkpoint", iter=it, path=str(path), bytes=size, seconds=seconds)

    def sample(self, it: int) -> None:
        """Log sample_tokens tokens from the model, always drawn with the same random numbers."""
        if not self.tokenizer:
            return
        self.model.eval()
        with self.clock.pause("samples"):
            text = self.attempt("sample_tokens", self.draw_text, self.tokenizer)
            if text is not None:
                say(f"sample {it}:", *text.split("\n"), "")
                self.record("sample", iter=it, text=text)
        self.model.train()

    def draw_text(self, tokenizer: Tokenizer) -> str:
        """Return sample_tokens tokens from the model as text."""
        prompt, device, c = tokenizer.start_ids(), self.hw.device, self.config
        idx, generator = torch.tensor([prompt], device=device), torch.Generator(device)
        generator.manual_seed(c.seed)
        with self.hw.autocast():
            more = (c.sample_tokens, self.data.vocab, 0.8, 200)
            ids = generate(self.model, idx, *more, generator=generator)
        return tokenizer.decode(ids[0, len(prompt) :].tolist())

    def warn(self, it: int, message: str) -> None:
        """Warn about iteration `it`, on the console and in metrics.jsonl."""
        if is_main():
            warn(f"iter {it}: {message}")
        self.record("event", iter=it, message=message)

    def record(self, kind: str, **values) -> None:
        """Write one line of metrics.jsonl, and pass the record to the tracker."""
        if not is_main():
            return
        record = dict(kind=kind, **{name: plain(value) for name, value in values.items()})
        record["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
        self.folder.append("metrics.jsonl", json.dumps(record))
        if self.tracker:
            self.attempt(self.config.tracker, self.tracker.log, record)

    # -------------------------------------------------------------------------
    # The end

    def finish(self, reason: str, it: int, val_loss: float | None) -> None:
        """Print where the time went, why the run ended, and its results."""
        # the final evaluation and save may have used more memory than the iterations did
        mem_gib = self.hw.peak_memory_gib()
        seconds, tokens = self.clock.seconds, self.config.tokens_between(0, it)
        total = sum(seconds.values())
        shares = [f"{name} {s:.1f}s ({s / total:.1%})" for name, s in seconds.items() if s]
        say(f"time: {duration(total)} wall = {', '.join(shares)}")
        say(f"end: {reason} after {it:,} iterations, {short(tokens)} tokens, {date()}")
        say(*self.results(it, val_loss, mem_gib))
        hours = training_hours(seconds)
        self.record("end", reason=reason, iters=it, tokens=tokens, hours=hours, ledger=seconds)
        if self.tracker:
            self.attempt(self.config.tracker, self.tracker.close)
        keep_transcript(None)

    def results(self, it: int, val_loss: float | None, mem_gib: float) -> list[str]:
        """
        Return the `name: value` lines that scripts read at the end of a run. val_loss is that of
        the last weights, or n/a if they were not evaluated. tokens_per_sec, mfu and mem_gib
        describe this launch; the other values describe the whole run.
        """
        tokens = self.config.tokens_between(0, it)
        val_loss = math.inf if val_loss is None else val_loss
        _, rate, mfu = self.speed(self.first, it) if it > self.first[0] else (None, None, None)
        values = dict(
            val_loss=(val_loss if math.isfinite(val_loss) else None, ".4f"),
            bits_per_byte=(self.data.bits_per_byte(val_loss), ".4f"),
            tokens=(tokens, "d"),
            epochs=(tokens / self.train_tokens, ".2f"),
            seconds=(sum(self.clock.seconds.values()), ".1f"),
            tokens_per_sec=(rate, ".0f"),
            mfu=(mfu, ".4f"),
            mem_gib=(mem_gib or None, ".2f"),
        )
        return [
            f"{name}: {'n/a' if value is None else format(value, form)}"
            for name, (value, form) in values.items()
        ]


def launch_command() -> str:
    """Return the command that launched this run."""
    if world_size() == 1:
        return command_line("python", *sys.argv)
    return f"torchrun ... {command_line(*sys.argv)}"


def perplexity(loss: float) -> float:
    return math.inf if loss > 709 else math.exp(loss)  # exp(709) is about the largest float


def evaluation_line(it: int, numbers: dict[str, float], seconds: float, data: Dataset) -> str:
    """Describe an evaluation that took `seconds`. Losses are in nats per token."""
    forms = {name: ".4f" if name.endswith("_loss") else ".4g" for name in numbers}
    text = ", ".join(f"{n.replace('_', ' ')} {numbers[n]:{form}}" for n, form in forms.items())
    bits = data.bits_per_byte(numbers["val_loss"])
    end = "" if bits is None else f", {bits:.4f} bits per byte"
    text += f", time {seconds:.1f}s, perplexity {perplexity(numbers['val_loss']):.4g}"
    return f"step {it}: {text}{end}"


def date() -> str:
    """Return the date and time in a readable form. Records use ISO 8601 instead."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def git_commit() -> str | None:
    """Describe the commit of this clone; None without git or outside a clone. Never fails."""
    if not (PROJECT / ".git").exists():  # git would find a repository that holds this folder
        return None
    # safe.directory, because git would not read another user's clone
    command = "git -c safe.directory=* --no-optional-locks describe --always --dirty".split()
    options: dict = dict(cwd=PROJECT, stdin=subprocess.DEVNULL, timeout=5, check=True)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, **options).stdout.strip()
    return None
