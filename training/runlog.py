"""
What a run says: lines on the console, records in out_dir/metrics.jsonl, and where the time went.

Console lines begin with nanoGPT's grammar, so its parsers still work. Warnings go to stderr. Every
second of the run is booked in the Ledger under one category, so evaluation, checkpoints and
compilation never enter an iteration's time.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.console import RunError, UserError, complain, count, duration, say, warn
from configurator import Config, config_values
from data.loader import ShuffledWindows
from data.shards import Dataset
from model import GPTConfig
from training.build import count_parameters, flops_per_token
from training.checkpoint import replacing
from training.hardware import Hardware, speed_hints
from training.ranks import Ranks
from training.tracker import Tracker

CATEGORIES = ("start-up", "compile", "steps", "data wait", "evaluation", "checkpoints", "other")
SPIKE = 1.25  # a loss this many times its running mean is marked
LOSS_SCALE_HALVINGS = 16  # from torch.amp.GradScaler's first loss scale, 2^16, down to none


class Ledger:
    """
    Books wall time under exactly one category at a time: "start-up" until the first `switch`, then
    "other" except inside `book`. Nested bookings take their time out of the outer one. Times are in
    seconds.
    """

    def __init__(self, began: float, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.since, self.category = clock, began, "start-up"
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)

    def switch(self, category: str) -> str:
        """
        Charge the time since the last switch to the category that ends; returns that category.
        """
        now = self.clock()
        self.seconds[self.category] += now - self.since
        self.since, ended, self.category = now, self.category, category
        return ended

    @contextlib.contextmanager
    def book(self, category: str) -> Iterator[None]:
        outer = self.switch(category)
        try:
            yield
        finally:
            self.switch(outer)

    def book_waits(self, batches: Iterator) -> Iterator:
        """The same batches, each wait for one booked as data wait."""
        while True:
            with self.book("data wait"):
                batch = next(batches)
            yield batch

    def move(self, seconds: float, source: str, target: str) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def total(self) -> float:
        self.switch(self.category)
        return sum(self.seconds.values())


@dataclass
class IterationResult:
    """What an iteration leaves behind, its tensors still on the device."""

    iter_num: int
    tokens: int  # trained on before this iteration, as sequences below
    sequences: int
    lr: float
    losses: Tensor  # (micro-steps,), nats per token
    grad_norm: Tensor
    timed: bool = True  # False where it was compiled in


class RunLog:
    """
    Console and metrics.jsonl of one run (eval_only: console alone), written by the first rank for
    all. Resumed at (iteration, last evaluation), the records that the run will write again are
    dropped, so that the file reads as one.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        hw: Hardware,
        ranks: Ranks,
        resumed_at: tuple[int, int] | None = None,
    ):
        self.config, self.ledger, self.hw, self.ranks, self.file = config, ledger, hw, ranks, None
        after = (
            resumed_at[0] + 1 if resumed_at else 0
        )  # the evaluation before the resumed iteration stands
        self.tracker = Tracker(config, wanted=ranks.first, purge_from=after)
        self.results: list[IterationResult] = []  # since the last line
        self.logged = dict(ledger.seconds)  # as of the last line
        self.kwh_before = hw.energy_kwh()
        self.skips_in_a_row, self.halvings_in_a_row, self.mean_loss = 0, 0, None
        if ranks.first and not config.eval_only:
            path = Path(config.out_dir) / "metrics.jsonl"
            if resumed_at is not None:
                drop_records(path, *resumed_at)
            self.file = open(path, "wb" if resumed_at is None else "ab", buffering=0)

    def record(self, kind: str, **values) -> None:
        """One line of metrics.jsonl, flushed."""
        record = dict(kind=kind, **{name: plain(value) for name, value in values.items()})
        if self.file:
            try:
                self.file.write(json.dumps(record).encode() + b"\n")
            except OSError as error:  # a full disk: the run is worth more than its record
                warn(f"metrics.jsonl: {error.strerror}; going on")
        self.tracker.log(record)

    def start(self, data: Dataset, model: GPTConfig, iter_num: int) -> None:
        """The first lines: what is trained, on what, with what."""
        c, hw = self.config, self.hw
        self.train_tokens = (
            None if data.stream else len(data.train)
        )  # a stream's nobody has counted
        self.flops_per_token, train = (
            flops_per_token(model),
            count(self.train_tokens) if self.train_tokens else "streamed",
        )
        parameters, _ = count_parameters(model)
        peak = (
            f"{hw.peak_tflops} TFLOP/s dense peak"
            if hw.peak_tflops
            else "peak unknown, so mfu n/a (--peak_tflops sets it)"
        )
        dtype = str(hw.dtype).removeprefix("torch.")
        say(
            f"model: {parameters / 1e6:.2f}M parameters, vocabulary {data.vocab} -> {model.vocab_size}, "
            f"{self.flops_per_token / 1e6:.1f} MFLOP/token (6 N + 12 L H Q T)"
        )
        say(f"device: {hw.name}, {dtype}, {peak}")
        say(f"data: {data.source}, {train} train and {count(len(data.val))} val tokens")
        say(
            f"tokens per iteration will be: {c.iter_tokens:,} = batch_size {c.batch_size} * block_size {c.block_size} * "
            f"gradient_accumulation_steps {c.gradient_accumulation_steps}"
        )
        if self.ranks.world_size > 1:
            say(f"processes: {self.ranks.world_size}, each with its share of the micro-batches")
        for hint in speed_hints(c, model.vocab_size, hw) if self.ranks.first else []:
            complain(hint)
        self.record(
            "start",
            iter=iter_num,
            config=config_values(c),
            parameters=parameters,
            device=hw.name,
            dtype=dtype,
            peak_tflops=hw.peak_tflops,
            flops_per_token=self.flops_per_token,
            tokens_per_iter=c.iter_tokens,
            world_size=self.ranks.world_size,
            torch=torch.__version__,
        )

    def steps(self, windows: ShuffledWindows) -> None:
        """
        One line and record for the iterations since the last. Only here do their numbers leave the
        device, which must be idle by now, or their time is not all in the ledger. Raises RunError
        after max_skips skipped updates in a row.
        """
        (any_timed,) = self.ranks.max([any(result.timed for result in self.results)])
        if not any_timed:  # compiled in: the next line speaks for these too
            return
        self.check_skips(windows)
        last, seconds = self.results[-1], self.ledger.seconds
        waited = seconds["data wait"] - self.logged["data wait"]
        elapsed = seconds["steps"] - self.logged["steps"] + waited
        (loss,) = self.ranks.reduce([last.losses.mean().item()])
        elapsed, waited, mem_gib = self.ranks.max(
            [elapsed, waited, self.hw.peak_memory_gib() or 0.0]
        )
        timed = sum(result.timed for result in self.results) or 1
        loss, step_seconds, mem_gib = loss / self.ranks.world_size, elapsed / timed, mem_gib or None
        tokens_per_sec = self.config.iter_tokens / step_seconds
        epoch = f"{last.tokens / self.train_tokens:.2f}" if self.train_tokens else "n/a"
        mfu = self.hw.mfu(self.flops_per_token, tokens_per_sec, self.ranks.world_size)
        values = dict(
            iter=last.iter_num,
            tokens=last.tokens,
            loss=loss,
            lr=last.lr,
            grad_norm=last.grad_norm.item(),
            step_ms=1000 * step_seconds,
            tokens_per_sec=tokens_per_sec,
            mfu=mfu,
            mem_gib=mem_gib,
            data_wait_ms=1000 * waited / timed,
        )
        say(
            f"iter {last.iter_num}: loss {values['loss']:.4f}, time {values['step_ms']:.2f}ms, "
            f"mfu {'n/a' if mfu is None else f'{mfu:.2%}'}, tok/s {tokens_per_sec:,.0f}, lr {last.lr:.2e}, "
            f"norm {values['grad_norm']:.2f}, tokens {count(last.tokens)}, epoch {epoch}, "
            f"mem {'n/a' if mem_gib is None else f'{mem_gib:.1f}GiB'}, eta {duration(self.eta(step_seconds))}"
        )
        self.record("step", **values)
        self.mark_spike(last.iter_num, values["loss"])
        self.results.clear()
        self.logged = dict(seconds)

    def mark_spike(self, iter_num: int, loss: float) -> None:
        """
        Warn of a loss far above the running mean of the lines before; one that is not finite is not
        taken into it.
        """
        if self.mean_loss is not None and loss > SPIKE * self.mean_loss:
            self.warn(
                iter_num,
                f"iter {iter_num}: loss spike, {loss:.4f} after a running mean of {self.mean_loss:.4f}",
            )
        if math.isfinite(loss):
            self.mean_loss = loss if self.mean_loss is None else 0.9 * self.mean_loss + 0.1 * loss

    def eta(self, step_seconds: float) -> float:
        """
        Seconds to the end: the iterations left, and the evaluations and checkpoints left at their
        mean price so far.
        """
        c, it = self.config, self.results[-1].iter_num
        pauses = (self.ledger.seconds["evaluation"] + self.ledger.seconds["checkpoints"]) / (
            it // c.eval_interval + 1
        )
        return (c.max_iters - it - 1) * step_seconds + (
            c.max_iters // c.eval_interval - it // c.eval_interval
        ) * pauses

    def check_skips(self, windows: ShuffledWindows) -> None:
        """
        Name the iterations whose update was skipped for a non-finite gradient, and the first
        micro-batch at fault. With float16 some are normal: the loss scale is too large at first and
        from time to time, and each skip halves it.
        """
        normal_halvings = LOSS_SCALE_HALVINGS if self.hw.dtype == torch.float16 else 0
        finite = torch.stack([result.grad_norm for result in self.results]).isfinite().tolist()
        for result, good in zip(self.results, finite):
            if good:
                self.skips_in_a_row, self.halvings_in_a_row = 0, 0
                continue
            bad = (
                (~result.losses.isfinite()).nonzero().flatten().tolist()
            )  # of this rank's share of the micro-batches
            mine = bad[0] * self.ranks.world_size + self.ranks.rank if bad else math.inf
            first = -self.ranks.max([-mine])[0]
            if first == math.inf and self.halvings_in_a_row < normal_halvings:
                self.halvings_in_a_row += 1
                self.record(
                    "event",
                    iter=result.iter_num,
                    message="update skipped, the loss scale is halved",
                )
                continue
            self.skips_in_a_row += 1
            where = windows.locate(
                result.sequences + (int(first) if first < math.inf else 0) * self.config.batch_size
            )
            what = (
                f"micro-batch {int(first)} reads"
                if first < math.inf
                else "all losses are finite; the iteration begins at"
            )
            self.warn(
                result.iter_num,
                f"iter {result.iter_num}: update skipped, its gradient is not finite; {what} {where}",
            )
            if self.skips_in_a_row >= self.config.max_skips:
                error = RunError(
                    f"{self.skips_in_a_row} updates in a row skipped, their gradients are not finite; "
                    f"a lower learning_rate or dtype=float32 may help"
                )
                error.agreed = True  # all ranks have the same gradients
                raise error

    def evaluation(self, iter_num: int, train_loss: float, val_loss: float, seconds: float) -> None:
        say(
            f"step {iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, time {seconds:.1f}s"
        )
        self.record(
            "eval", iter=iter_num, train_loss=train_loss, val_loss=val_loss, seconds=seconds
        )

    def checkpoint(self, iter_num: int, path: Path, size: int, seconds: float) -> None:
        readable = f"{size / 1e9:.2f}GB" if size >= 1e9 else f"{size / 1e6:.2f}MB"
        say(f"checkpoint {iter_num}: {path}, {readable}, time {seconds:.1f}s")
        self.record("checkpoint", iter=iter_num, path=str(path), bytes=size, seconds=seconds)

    def sample(self, iter_num: int, text: str) -> None:
        say(f"sample {iter_num}:\n{text}\n")
        self.record("sample", iter=iter_num, text=text)

    def warn(self, iter_num: int, message: str) -> None:
        if self.ranks.first:
            warn(message)
        self.record("event", iter=iter_num, message=message)

    def end(self, reason: str, iters: int, tokens: int) -> None:
        """The last lines: why the run ended, and where its wall time went."""
        total = self.ledger.total()
        shares = ", ".join(
            f"{name} {s:.1f}s ({s / total:.1%})"
            for name, s in self.ledger.seconds.items()
            if s >= 0.05
        )
        say(f"time: {duration(total)} wall = {shares}")
        kwh = self.hw.energy_kwh()  # of this process's GPU, since the driver was loaded
        kwh = None if kwh is None or self.kwh_before is None else kwh - self.kwh_before
        used = (
            f"; {kwh:.3g} kWh measured on the {'first ' * (self.ranks.world_size > 1)}GPU since the start"
            if kwh
            else ""
        )
        say(
            f"end: {reason} after {iters:,} iterations, {count(tokens)} tokens{self.against_plan(iters)}{used}"
        )
        self.record(
            "end",
            reason=reason,
            iters=iters,
            tokens=tokens,
            kwh=kwh,
            ledger=dict(self.ledger.seconds),
        )
        self.tracker.close()

    def against_plan(self, iters: int) -> str:
        """
        Actual against planned hours of iterations, where `bench.py plan --json=OUT_DIR/plan.json`
        made a plan.
        """
        try:
            plan = json.loads((Path(self.config.out_dir) / "plan.json").read_text(encoding="utf-8"))
            planned = plan["hours"] * iters / plan["max_iters"]
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ):  # none, or one without an iteration time
            return ""
        actual = (self.ledger.seconds["steps"] + self.ledger.seconds["data wait"]) / 3600
        off = f" ({actual / planned - 1:+.1%})" if planned else ""
        return f"; {actual:.3g} h of iterations, {planned:.3g} h planned{off}"


def read_records(lines: list[str]) -> list[dict]:
    """The records of metrics.jsonl's lines, without what is none."""
    try:
        records = json.loads(f"[{','.join(lines)}]")  # at once: three times as fast as line by line
    except (ValueError, RecursionError):
        records = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def drop_records(path: Path, iter_num: int, evaluated_at: int) -> None:
    """
    Rewrite metrics.jsonl without what a run resumed at iter_num says again, and without lines that
    are no records.
    """
    # ckpt-N is saved before iteration N, and after the evaluation at N, unless a signal came before
    # that
    last = dict(
        step=iter_num - 1,
        event=iter_num - 1,
        eval=evaluated_at,
        sample=evaluated_at,
        checkpoint=iter_num,
    )
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # a kill can leave half a line at the end
            record = json.loads(line)
            if record["kind"] != "end" and record["iter"] <= last.get(record["kind"], math.inf):
                kept.append(line + b"\n")
    try:
        with replacing(path) as file:
            file.writelines(kept)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; make room, then the same command goes on"
        ) from None


def plain(value):
    """A value for JSON: nine digits of a float, null for one that is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
