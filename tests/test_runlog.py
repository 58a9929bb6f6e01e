"""The numbers on the log line, with a clock that the test turns by hand."""

import hashlib
import io
import json
import math
import os
import re
import sys
import time
from datetime import datetime, timedelta

import pytest
import torch
from helpers import flags, load, needs_a_full_disk, records, run_here
from training.metrics import drop_records, plain
from training.progress import Progress
from training.runlog import CATEGORIES, MAX_SKIPS, RunLog, tokenizer_name
from training.tracker import Tracker

import train
from common import console
from common.console import RunError, count, duration, print_err, say, warn
from configurator import Config
from training.clock import Clock
from training.hardware import Hardware
from training.ranks import Ranks

KINDS = ("step", "eval", "checkpoint", "event")


class Hand:
    """Time that passes only where the test says so: on the wall, and of the processor."""

    def __init__(self):
        self.now = self.processor = 0.0

    def sleep(self, seconds: float, processor: float = 0.0) -> None:
        self.now += seconds
        self.processor += processor


@pytest.fixture
def hand(monkeypatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(time, "perf_counter", lambda: hand.now)
    monkeypatch.setattr(time, "process_time", lambda: hand.processor)
    return hand


def make_log(tmp_path, resumed: dict | None = None, dtype=torch.bfloat16, **changes) -> RunLog:
    config = Config(
        out_dir=str(tmp_path),
        batch_size=8,
        block_size=1024,
        gradient_accumulation_steps=64,
        **changes,
    )
    hw = Hardware(torch.device("cpu"), dtype, "test", 58.3)
    began, resumed = time.perf_counter(), resumed or {}
    log = RunLog(config, hw, Ranks(), Clock(config, began, resumed), resumed)
    log.train_tokens, log.flops_per_token = 10_000_000, 854_770_176
    log.bytes_per_token = None
    return log


def note(log: RunLog, p: Progress, loss=3.0, norm=0.5) -> None:
    """An iteration of 524,288 tokens, of this mean loss."""
    results = torch.tensor(524288 * loss), torch.tensor(524288), torch.tensor(norm)
    log.note(p, 6e-4, *results)
    p.iter_num, p.tokens = p.iter_num + 1, p.tokens + 524288


def evaluate(log: RunLog, iter_num: int, train_loss: float, val_loss: float) -> None:
    p = Progress(iter_num=iter_num)
    p.note_evaluation(val_loss)
    log.evaluation(p, train_loss)


# -----------------------------------------------------------------------------
# Where the time went


def test_every_second_is_booked_once(tmp_path, hand):
    log = make_log(tmp_path)
    booked = dict.fromkeys(CATEGORIES, 0.0)
    laps = [("start-up", 3.0), ("compile", 60.0), ("steps", 5.0), ("evaluation", 4.0)]
    for category, seconds in [*laps, ("steps", 0.25), ("checkpoints", 2.0), ("steps", 1.0)]:
        hand.sleep(seconds)
        assert log.lap(category) == seconds
        booked[category] += seconds
    assert log.seconds == booked and sum(booked.values()) == hand.now == 75.25


def test_a_resumed_runs_time_goes_on_and_what_older_versions_told_apart_are_steps(tmp_path, hand):
    hand.now = 1000.0
    ledger = {"start-up": 5.0, "steps": 100.0, "data wait": 7.0, "other": 1.0, "pause": 2.0}
    resumed = dict(ledger=ledger, progress=dict(iter_num=10, tokens=10, evaluated_at=8))
    (tmp_path / "metrics.jsonl").touch()
    log = make_log(tmp_path, resumed)
    assert sum(log.seconds.values()) == 115 == log.clock.used()
    assert log.seconds["steps"] == 110
    hand.sleep(3)
    log.lap("start-up")
    assert log.seconds["start-up"] == 8 and sum(log.seconds.values()) == 118 == log.clock.used()


def test_the_laps_of_a_run_add_up_to_its_wall_time_resumed_or_not(dataset, tmp_path):
    began = time.perf_counter()
    run_here(dataset, tmp_path, max_iters=4)
    run_here(dataset, tmp_path, max_iters=8, init_from="resume")
    took = time.perf_counter() - began
    ledger = records(tmp_path, "end")[-1]["ledger"]
    assert set(ledger) == set(CATEGORIES)
    # a checkpoint does not hold the seconds that it takes itself, nor the last lines
    assert 0.8 * took < sum(ledger.values()) <= took
    assert all(ledger[name] > 0 for name in CATEGORIES if name != "compile")


def test_time_speed_mfu_and_eta_with_evaluations_between_log_lines(tmp_path, hand, capsys):
    """
    nanoGPT #215, PR#673: evaluation in the iteration time; PR#527: MFU above 100 % when
    log_interval > 1.
    """
    log = make_log(tmp_path, log_interval=5, max_iters=100, eval_interval=50)
    p = Progress()
    for seconds, category in ((30, "start-up"), (90, "compile")):
        hand.sleep(seconds)
        log.lap(category)
    for it in range(10):
        if it in (0, 7):
            log.lap("steps")
            hand.sleep(60)
            log.clock.note("evaluation", log.lap("evaluation"))
            hand.sleep(10)
            log.lap("checkpoints")
        hand.sleep(9.34)
        note(log, p)
    log.line(p, waited=3.4)
    line = capsys.readouterr().out
    mem = log.hw.peak_memory_gib()  # None where the system does not tell
    mem = "n/a" if mem is None else f"{mem:.1f}GiB"
    # 524,288 tokens in 9.34 s on a 58.3 TFLOP/s card; 90 iterations and two evaluations of 60 s
    # are left
    assert line == (
        "iter 9: loss 3.0000, time 9340.00ms, mfu 82.30%, tok/s 56,134, lr 6.00e-04, "
        "norm 0.50, tokens 4.72M, epoch 0.47, "
        f"mem {mem}, eta {duration(90 * 9.34 + 2 * 60)}\n"
    )
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step_ms"] == pytest.approx(9340) and record["data_wait_ms"] == pytest.approx(340)
    assert record["mfu"] == pytest.approx(0.823, abs=0.0005)
    assert record["tokens_per_sec"] == pytest.approx(56133.6, abs=0.1)
    assert log.pace == log.clock.prices["iteration"] == pytest.approx(9.34)


def test_a_line_counts_its_own_iterations_alone(tmp_path, hand):
    """Also the first one after a resume."""
    (tmp_path / "metrics.jsonl").touch()
    progress = dict(iter_num=100, tokens=100 * 524288, evaluated_at=100)
    log = make_log(tmp_path, dict(ledger=dict(steps=5000.0), progress=progress))
    p, waited = Progress(iter_num=100, tokens=100 * 524288), 0.0
    for count_, seconds, wait in ((1, 7.0, 1.0), (10, 2.0, 0.0), (3, 4.0, 0.5)):
        for _ in range(count_):
            hand.sleep(seconds)
            waited += wait
            note(log, p)
        log.line(p, waited)
    lines = records(tmp_path, "step")
    assert [r["iter"] for r in lines] == [100, 110, 113]
    assert [r["tokens"] for r in lines] == [524288 * n for n in (100, 110, 113)]
    assert [r["step_ms"] for r in lines] == [7000.0, 2000.0, 4000.0]
    assert [r["data_wait_ms"] for r in lines] == [1000.0, 0.0, 500.0]
    assert [r["tokens_per_sec"] for r in lines] == pytest.approx([524288 / s for s in (7, 2, 4)])


def test_records_say_the_hours_and_tokens_so_far_of_all_starts(tmp_path, hand):
    """Start-up and compilation are left out; those of a stop are not known here."""
    resumed = {"start-up": 500.0, "compile": 60.0, "steps": 36.0, "evaluation": 3.0}
    progress = dict(iter_num=10, tokens=10 * 524288, evaluated_at=10)
    (tmp_path / "metrics.jsonl").touch()
    log = make_log(tmp_path, dict(ledger=resumed, progress=progress))
    p = Progress(iter_num=10, tokens=10 * 524288)
    for seconds, category in ((30, "start-up"), (90, "compile")):
        hand.sleep(seconds)
        log.lap(category)
    hand.sleep(7)
    note(log, p)
    log.line(p, waited=0.0)
    hand.sleep(4)
    p.note_evaluation(3.0)
    log.evaluation(p, 3.0)
    hand.sleep(1)
    log.lap("evaluation")
    log.end("max_iters", p, 0.0)
    found = [
        (r["kind"], r["tokens"] / 524288, round(r["hours"] * 3600, 3)) for r in records(tmp_path)
    ]
    # a step's tokens are those before it, as its `iter`
    assert found == [("step", 10, 46), ("eval", 11, 50), ("end", 11, 51)]


def test_eta_counts_this_starts_iterations_and_what_lies_between_them(tmp_path, hand):
    (tmp_path / "metrics.jsonl").touch()
    resumed = dict(ledger=dict(steps=5000.0), progress=dict(iter_num=100, evaluated_at=100))
    log = make_log(tmp_path, resumed, max_iters=1000, eval_interval=300)
    for name, seconds in (("evaluation", 50.0), ("checkpoints", 5.0)):
        log.clock.note(name, seconds)
    hand.sleep(20)
    log.lap("steps")
    # two iterations of 10 s; evaluations at 300, 600, 900 and the end
    assert log.eta(101) == 898 * 10 + 4 * 55
    assert log.eta(300) == 699 * 20 / 201 + 3 * 55
    log.config.max_minutes = 1.0
    assert log.eta(101) == 40.0  # what is left of this start


def test_the_line_is_readable_by_nanogpts_parsers(tmp_path, hand, capsys):
    log, p = make_log(tmp_path), Progress()
    hand.sleep(2)
    note(log, p, loss=10.9)
    log.line(p, 0.0)
    evaluate(log, 0, 10.9, 10.95)
    iteration, evaluation = capsys.readouterr().out.splitlines()
    assert re.match(
        r"iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (-?\d+\.\d\d)%", iteration
    )
    assert re.match(r"step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})", evaluation)


# -----------------------------------------------------------------------------
# Lines and records


def last_record(out_dir):
    """The last line of metrics.jsonl, by a reader that takes only what JSON allows."""
    line = (out_dir / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(line, parse_constant=pytest.fail)


def test_an_evaluation_tells_perplexity_and_bits_per_byte(tmp_path, hand, capsys):
    """A loss of ln 8 is 3 bits per token, and as sure as a choice among 8."""
    log = make_log(tmp_path)
    log.bytes_per_token = 1.5
    evaluate(log, 500, math.log(16), math.log(8))
    said = "step 500: train loss 2.7726, val loss 2.0794, time 0.0s"
    assert capsys.readouterr().out == f"{said}, perplexity 8, 2.0000 bits per byte\n"
    record = last_record(tmp_path)
    del record["time"]
    assert record == dict(
        kind="eval",
        iter=500,
        train_loss=2.77258872,
        val_loss=2.07944154,
        seconds=0.0,
        perplexity=8.0,
        bits_per_byte=2.0,
        tokens=0,
        hours=0.0,
    )


def test_bits_per_byte_are_null_where_nobody_counted_the_bytes(tmp_path, hand, capsys):
    log = make_log(tmp_path)
    evaluate(log, 0, 1.0, math.log(8))
    assert capsys.readouterr().out.endswith(", perplexity 8\n")
    assert last_record(tmp_path)["bits_per_byte"] is None


@pytest.mark.parametrize(
    "loss, perplexity, bits",
    [(709.0, 8.21840746e307, 1022.87078), (710.0, None, 1024.31348), (1e300, None, 1.44269504e300)]
    + [(math.inf, None, None), (math.nan, None, None)],
)
def test_a_loss_of_any_size_is_a_line_and_a_record(loss, perplexity, bits, tmp_path, hand, capsys):
    """A run that explodes has lost enough already. 710 nats are 710 / ln 2 bits."""
    log = make_log(tmp_path)
    log.bytes_per_token = 1.0
    evaluate(log, 0, loss, loss)
    assert capsys.readouterr().out.startswith("step 0: train loss ")
    record = last_record(tmp_path)
    assert (record["perplexity"], record["bits_per_byte"]) == (perplexity, bits)


def test_tokenizers_are_named_so_that_no_two_are_alike():
    of_json = hashlib.sha256(b'{"model": "\xc3\xa4"}').hexdigest()
    names = {
        "gpt2": dict(kind="gpt2"),
        "byte": dict(kind="byte"),
        "unknown": dict(kind="unknown"),
        f"bpe {of_json}": dict(kind="bpe", json='{"model": "\u00e4"}'),
        f"char {hashlib.sha256(b'abc').hexdigest()}": dict(kind="char", itos=["a", "b", "c"]),
    }
    for name, spec in names.items():
        assert tokenizer_name(spec) == name


def test_loss_is_the_mean_over_all_targets(tmp_path, hand, capsys):
    """nanoGPT prints the last micro-batch's."""
    log, p = make_log(tmp_path), Progress()
    hand.sleep(1)
    log.note(p, 6e-4, torch.tensor(63.0), torch.tensor(2), torch.tensor(0.5))
    p.iter_num += 1
    log.line(p, 0.0)
    assert "loss 31.5000" in capsys.readouterr().out


def skip_line(log: RunLog, p: Progress, hand: Hand, pattern: str) -> None:
    """Iterations whose gradients are finite (.), infinite (i) or not a number (n), and a line."""
    for letter in pattern:
        hand.sleep(1)
        note(log, p, norm={".": 0.5, "i": math.inf, "n": math.nan}[letter])
    log.line(p, 0.0)


def test_skipped_updates_are_counted_at_each_line(tmp_path, hand, capsys):
    log, p = make_log(tmp_path), Progress()
    for pattern in (".", "..i.n.i...", "..........", "n"):
        skip_line(log, p, hand, pattern)
    said = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    why = "updates skipped since the last line: a gradient was not finite"
    assert said == [f"warning: iter 10: 3 {why}", f"warning: iter 21: 1 {why}"]
    events = records(tmp_path, "event")
    assert [(e["iter"], e["message"]) for e in events] == [(10, f"3 {why}"), (21, f"1 {why}")]


@pytest.mark.parametrize(
    "patterns, ends",
    [
        (["n" * MAX_SKIPS], True),
        (["i" * MAX_SKIPS], True),  # float16's too: 2^16 can be halved 16 times
        (["n" * (MAX_SKIPS - 1)], False),
        ([".." + "n" * 10, "n" * 5, "n" * 5], True),  # over several lines
        (["n" * 15 + ".", "n" * 15], False),  # not in a row
        (["n" * MAX_SKIPS + "."], False),  # it has recovered by itself
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_too_many_skips_in_a_row_end_the_run(patterns, ends, dtype, tmp_path, hand):
    """nanoGPT #136, #167, #383: NaN goes on for hours."""
    log, p = make_log(tmp_path, dtype=dtype), Progress()
    *before, last = patterns
    for pattern in before:
        skip_line(log, p, hand, pattern)
    if not ends:
        return skip_line(log, p, hand, last)
    with pytest.raises(RunError, match="^20 updates in a row skipped; try a lower learning_rate"):
        skip_line(log, p, hand, last)


def test_float16_that_looks_for_its_loss_scale_is_explained(tmp_path, hand, capsys):
    log, p = make_log(tmp_path, dtype=torch.float16), Progress()
    skip_line(log, p, hand, "i" * 16)
    err = capsys.readouterr().err
    assert "16 updates skipped" in err
    assert "a few are normal while float16 finds its loss scale" in err


def test_a_run_whose_gradients_stay_nan_ends_and_keeps_its_last_checkpoint(
    dataset, tmp_path, monkeypatch, script
):
    step, steps = train.train_step, []

    def poisoned(model, *arguments):
        steps.append(1)
        if len(steps) > 5:  # as a damaged weight would
            loss_sum, targets, norm = step(model, *arguments)
            return loss_sum * math.nan, targets, norm * math.nan
        return step(model, *arguments)

    monkeypatch.setattr(train, "train_step", poisoned)
    code, _, err = script(train.main, *flags(dataset, tmp_path, max_iters=100))
    assert code == 1 and len(steps) == 5 + MAX_SKIPS
    assert err[-1].startswith("error: 20 updates in a row skipped; ")
    assert load(tmp_path, 24)["progress"]["iter_num"] == 24


def test_a_loss_spike_is_marked_once_it_comes(tmp_path, hand, capsys):
    """nanoGPT #137, #468, #524, #554: explosions that nobody notices for hours."""
    log, p = make_log(tmp_path), Progress()
    for loss in [3.1, 3.0, 3.2, 2.9, 6.5, 3.0, math.nan, 3.0, 7.0]:
        hand.sleep(1)
        note(log, p, loss=loss)
        log.line(p, 0.0)
    err = capsys.readouterr().err
    # one that is no number does not enter the mean
    assert re.findall(r"iter (\d+): loss spike", err) == ["4", "8"]
    assert "iter 4: loss spike, 6.5000 after a running mean of 3.0" in err


def test_a_cpu_whose_threads_wait_for_one_another_is_told_so_once(tmp_path, hand, monkeypatch):
    """Two threads that compute for a second in ten; evaluations and saves are not looked at."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    log, p = make_log(tmp_path, max_iters=100), Progress()
    for processor in (20.0, 1.0, 1.0):
        hand.sleep(10.0, processor)
        log.lap("steps")
        hand.sleep(100.0, 20.0)
        log.lap("evaluation")
        note(log, p)
        log.line(p, 0.0)
    (event,) = records(tmp_path, "event")
    assert event["iter"] == 1
    assert event["message"].startswith("the 2 CPU threads were busy for 5% of the time: ")
    assert event["message"].endswith("try OMP_NUM_THREADS=1 before the command")


def test_the_wait_for_data_is_not_taken_for_threads_that_wait(tmp_path, hand, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    log, p = make_log(tmp_path, max_iters=100), Progress()
    hand.sleep(100.0, 18.0)
    note(log, p)
    log.line(p, waited=90.0)
    assert records(tmp_path, "event") == []


def test_a_resumed_log_reads_as_one_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [dict(kind="start", iter=0)]
    for it in range(6):
        if it % 2 == 0:
            lines += [dict(kind="eval", iter=it), dict(kind="checkpoint", iter=it)]
        lines.append(dict(kind="step", iter=it))
    lines.append(dict(kind="event", iter=4))
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(whole + 'not a record\n{"kind": "step", "iter": 6, "lo')
    drop_records(path, iter_num=4, evaluated_at=4)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    iters = {kind: [r["iter"] for r in kept if r["kind"] == kind] for kind in KINDS}
    # the run goes on with iteration 4; the evaluation that ckpt-4 was saved after stays
    assert iters == dict(step=[0, 1, 2, 3], eval=[0, 2, 4], checkpoint=[0, 2, 4], event=[])
    # a signal came before the evaluation, which the resumed run makes up for
    drop_records(path, iter_num=4, evaluated_at=2)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["iter"] for r in kept if r["kind"] == "eval"] == [0, 2]


def test_a_run_says_when_it_began_saved_and_ended(dataset, tmp_path, capsys):
    began = datetime.now().astimezone() - timedelta(seconds=1)  # records have whole seconds
    run_here(dataset, tmp_path, max_iters=4)
    for kind in ("start", "checkpoint", "end"):
        told = datetime.fromisoformat(records(tmp_path, kind)[-1]["time"])
        assert began <= told <= datetime.now().astimezone(), kind
    lines = (tmp_path / "log.txt").read_text().splitlines()
    for beginning in ("start: ", "checkpoint 4: ", "end: max_iters "):
        (line,) = [line for line in lines if line.startswith(beginning)]
        told = datetime.strptime(line[-19:], "%Y-%m-%d %H:%M:%S").astimezone()
        assert began <= told <= datetime.now().astimezone(), line


def test_metrics_emptied_under_the_run_go_on_at_the_beginning(tmp_path):
    """`> metrics.jsonl` in a shell: no zeros where the old records were."""
    log = make_log(tmp_path)
    for it in range(2):
        os.truncate(tmp_path / "metrics.jsonl", 0)
        evaluate(log, it, 1.0, 1.0)
    assert [r["iter"] for r in records(tmp_path)] == [1]


@pytest.mark.parametrize(
    "losses, said",
    [
        ([4.0, 3.0, 3.02], []),  # noise
        ([4.0, 3.0, 3.1, 3.5], ["2: validation has not improved since step 1 (3.0000); best.pt"]),
        ([4.0, 4.5], ["1: validation has not improved since step 0 (4.0000); lower"]),
        ([4.0, math.nan, math.inf], []),
    ],
)
def test_a_validation_loss_that_has_turned_is_told_once(losses, said, tmp_path, hand, capsys):
    log, p = make_log(tmp_path), Progress()
    for p.iter_num, loss in enumerate(losses):
        p.note_evaluation(loss)
        log.evaluation(p, 1.0)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == len(said)
    assert all(f"warning: iter {start}" in line for line, start in zip(err, said, strict=True))


def test_numbers_keep_nine_digits_and_what_json_cannot_say_is_null():
    assert plain(6.05123e-5) == 6.05123e-5 and plain(3.0512345678e-8) == 3.05123457e-8
    assert plain(float("nan")) is None and plain(3) == 3


@needs_a_full_disk
def test_a_console_on_a_full_disk_costs_its_lines_not_the_run(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, open("/dev/full", "w"))
    for _ in range(2):
        say("iter 1: loss 2.0")
        warn("metrics.jsonl: No space left on device; the run continues")
    assert sys.stdout.name == sys.stderr.name == os.devnull


class Disk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, room: int):
        self.room, self.content = room, b""

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        size = min(len(content), self.room)
        self.content += content[:size]
        self.room -= size
        return size


def test_records_that_a_full_disk_refuses_are_written_once_there_is_room(capsys):
    log = RunLog.__new__(RunLog)
    log.file, log.tracker, log.unwritten = Disk(300), Tracker(Config()), b""
    for it in range(9):
        if it == 7:
            log.file.room = 10_000
        log.record("step", iter=it, loss=3.0)
    assert [json.loads(line)["iter"] for line in log.file.content.splitlines()] == list(range(9))
    assert capsys.readouterr().err.count("metrics.jsonl: No space left on device") == 1


class Interrupted(io.RawIOBase):
    """A file whose first write is interrupted by a signal whose handler speaks."""

    def __init__(self):
        self.content, self.handlers = b"", [lambda: print_err("a checkpoint is saved first")]

    def writable(self):
        return True

    def write(self, data):
        if self.handlers:
            self.handlers.pop()()
        self.content += bytes(data)
        return len(data)


@pytest.mark.parametrize("place", ["console", "log.txt"])
def test_a_signal_in_the_middle_of_a_line_costs_its_own_line_not_the_run(place, monkeypatch):
    """Python refuses a second write while it is in the first: "reentrant call"."""
    raw = Interrupted()
    text = io.TextIOWrapper(io.BufferedWriter(raw), write_through=place == "console")
    if place == "console":
        monkeypatch.setattr(sys, "stderr", text)
    else:
        monkeypatch.setattr(console, "transcript", text)
    print_err("iter 4: loss spike")
    text.flush()
    assert not raw.handlers and raw.content == b"iter 4: loss spike\n"


@needs_a_full_disk
def test_a_full_disk_does_not_cost_the_run(tmp_path, hand, capsys):
    log = make_log(tmp_path)
    log.file = open("/dev/full", "wb", buffering=0)
    evaluate(log, 0, 1.0, 1.0)
    assert "No space left on device; keeping its records in memory" in capsys.readouterr().err


def test_a_failing_tracker_does_not_stop_the_run(tmp_path, hand, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    log = make_log(tmp_path, tracker="wandb")
    evaluate(log, 0, 1.0, 1.0)
    assert "continuing without it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"),
        (999, "999"),
        (20480, "20.5k"),
        (52_428_800, "52.4M"),
        (123.4e6, "123M"),
        (10.5e9, "10.5B"),
    ],
)
def test_count(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (11520, "3h12m"), (180000, "50h00m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
