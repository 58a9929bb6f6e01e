"""The numbers on the log line, with a clock that the test turns by hand."""

import hashlib
import io
import json
import math
import os
import re
import sys
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from helpers import records, run_here

from common import console
from common.console import RunError, complain, count, duration, say, warn
from configurator import Config
from training import runlog, skips
from training.clock import Ledger
from training.hardware import Hardware
from training.metrics import drop_records, plain
from training.ranks import Ranks
from training.runlog import Iteration, RunLog, tokenizer_name
from training.skips import Skips
from training.tracker import Tracker

KINDS = ("step", "eval", "checkpoint", "event")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Windows:
    def locate(self, n):
        return f"sequence {n}"


@pytest.fixture
def clock():
    return Clock()


def make_log(tmp_path, clock, ledger, **changes):
    config = Config(
        out_dir=str(tmp_path),
        batch_size=8,
        block_size=1024,
        gradient_accumulation_steps=64,
        **changes,
    )
    hw = Hardware(torch.device("cpu"), torch.bfloat16, "test", 58.3)
    log = RunLog(config, hw, Ranks(), began=0.0, resumed={})
    log.ledger = ledger
    log.train_tokens, log.flops_per_token = 10_000_000, 854_770_176
    log.bytes_per_token = None
    return log


def result(it, loss=3.0, norm=0.5):
    losses = loss if isinstance(loss, torch.Tensor) else torch.full((64,), loss)
    return Iteration(it, it * 524288, it * 512, 6e-4, losses, torch.tensor(norm))


def test_every_second_is_booked_once(clock):
    ledger = Ledger(0.0, clock)
    clock.sleep(3)
    ledger.switch("other")
    with ledger.book("steps"):
        clock.sleep(5)
        with ledger.book("data wait"):
            clock.sleep(2)
        clock.sleep(1)
    clock.sleep(0.25)
    with pytest.raises(KeyError), ledger.book("evaluation"):
        clock.sleep(4)
        raise KeyError
    assert ledger.total() == clock.now == 15.25
    assert {k: v for k, v in ledger.seconds.items() if v} == {
        "start-up": 3,
        "steps": 6,
        "data wait": 2,
        "evaluation": 4,
        "other": 0.25,
    }


def test_time_speed_mfu_and_eta_with_evaluations_between_log_lines(tmp_path, clock, capsys):
    """
    nanoGPT #215, PR#673: evaluation in the iteration time; PR#527: MFU above 100 % when
    log_interval > 1.
    """
    ledger = Ledger(0.0, clock)
    log = make_log(tmp_path, clock, ledger, log_interval=5, max_iters=100, eval_interval=50)
    ledger.switch("other")
    for it in range(10):
        if it in (0, 7):
            with log.book("evaluation"):
                clock.sleep(60)
        with ledger.book("steps"):
            with ledger.book("data wait"):
                clock.sleep(0.34)
            clock.sleep(9)
        log.timed += 1
    log.line(result(9))
    line = capsys.readouterr().out
    # 524,288 tokens in 9.34 s on a 58.3 TFLOP/s card; 90 iterations and two evaluations of 60 s
    # are left
    assert line == (
        "iter 9: loss 3.0000, time 9340.00ms, mfu 82.30%, tok/s 56,134, lr 6.00e-04, "
        "norm 0.50, tokens 4.72M, epoch 0.47, "
        f"mem {log.hw.peak_memory_gib():.1f}GiB, eta {duration(90 * 9.34 + 2 * 60)}\n"
    )
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step_ms"] == pytest.approx(9340) and record["data_wait_ms"] == pytest.approx(340)
    assert record["mfu"] == pytest.approx(0.823, abs=0.0005) and record[
        "tokens_per_sec"
    ] == pytest.approx(56133.6, abs=0.1)


def test_the_line_is_readable_by_nanogpts_parsers(tmp_path, clock, capsys):
    ledger = Ledger(0.0, clock)
    log = make_log(tmp_path, clock, ledger)
    with ledger.book("steps"):
        clock.sleep(2)
    log.timed += 1
    log.line(result(0, loss=10.9))
    log.evaluation(0, 10.9, 10.95)
    iteration, evaluation = capsys.readouterr().out.splitlines()
    assert re.match(
        r"iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (-?\d+\.\d\d)%", iteration
    )
    assert re.match(r"step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})", evaluation)


def last_record(out_dir):
    """The last line of metrics.jsonl, by a reader that takes only what JSON allows."""
    line = (out_dir / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(line, parse_constant=pytest.fail)


def test_an_evaluation_tells_perplexity_and_bits_per_byte(tmp_path, clock, capsys):
    """A loss of ln 8 is 3 bits per token, and as sure as a choice among 8."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.bytes_per_token = 1.5
    log.evaluation(500, math.log(16), math.log(8))
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
    )


def test_bits_per_byte_are_null_where_nobody_counted_the_bytes(tmp_path, clock, capsys):
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.evaluation(0, 1.0, math.log(8))
    assert capsys.readouterr().out.endswith(", perplexity 8\n")
    assert last_record(tmp_path)["bits_per_byte"] is None


@pytest.mark.parametrize(
    "loss, perplexity, bits",
    [(709.0, 8.21840746e307, 1022.87078), (710.0, None, 1024.31348), (1e300, None, 1.44269504e300)]
    + [(math.inf, None, None), (math.nan, None, None)],
)
def test_a_loss_of_any_size_is_a_line_and_a_record(loss, perplexity, bits, tmp_path, clock, capsys):
    """A run that explodes has lost enough already. 710 nats are 710 / ln 2 bits."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.bytes_per_token = 1.0
    log.evaluation(0, loss, loss)
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


def test_loss_is_the_mean_over_all_micro_batches(tmp_path, clock, capsys):
    """nanoGPT prints the last micro-batch's."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    clock.sleep(1)
    log.ledger.switch("steps")
    clock.sleep(1)
    log.ledger.switch("other")
    log.timed += 1
    log.line(result(0, loss=torch.arange(64.0)))
    assert "loss 31.5000" in capsys.readouterr().out


def make_skips(log) -> Skips:
    return Skips(log.config, log.hw, log.ranks, log, Windows())


def test_skipped_updates_are_named_and_too_many_in_a_row_end_the_run(
    tmp_path, clock, capsys, monkeypatch
):
    """nanoGPT #136, #167, #383: NaN goes on for hours."""
    monkeypatch.setattr(skips, "MAX_SKIPS", 2)
    finder = make_skips(make_log(tmp_path, clock, Ledger(0.0, clock)))
    poisoned = torch.ones(64)
    poisoned[5:] = float("nan")
    finder.add(result(0), look=False)
    finder.add(result(1, loss=poisoned, norm=float("nan")), look=False)
    finder.add(result(2), look=True)
    # iteration 1 begins at sequence 512; micro-step 5 of 8 sequences each
    err = capsys.readouterr().err
    assert "iter 1: update skipped" in err and f"sequence {512 + 5 * 8}" in err
    finder.add(result(3, norm=float("inf")), look=False)
    with pytest.raises(RunError, match="2 updates in a row"):
        finder.add(result(4, norm=float("nan")), look=True)


def test_the_micro_batch_at_fault_is_counted_over_all_ranks(tmp_path, clock, capsys):
    """
    Ranks take micro-batches in turn: the fourth of rank 1 of two is number 3 * 2 + 1, after 7
    batches of 8 sequences.
    """
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.ranks.rank, log.ranks.world_size, log.ranks.reduce = 1, 2, lambda values, op=None: values
    poisoned = torch.ones(32)
    poisoned[3] = float("inf")
    make_skips(log).add(result(10, loss=poisoned, norm=float("nan")), look=True)
    event = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert event["iter"] == 10
    assert f"micro-batch 7 reads sequence {10 * 512 + 7 * 8}" in event["message"]


def test_float16_looks_for_its_loss_scale_without_a_word_but_not_for_ever(
    tmp_path, clock, capsys, monkeypatch
):
    """2^16 can be halved 16 times; a loss that is not finite is no matter of its scale."""
    monkeypatch.setattr(skips, "MAX_SKIPS", 2)
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.hw.dtype = torch.float16
    finder = make_skips(log)
    for it in range(16):
        finder.add(result(it, norm=float("inf")), look=True)
    finder.add(result(16), look=False)
    finder.add(result(17, norm=float("inf")), look=False)
    finder.add(result(18, loss=float("nan"), norm=float("nan")), look=False)
    finder.add(result(19), look=True)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "update skipped" in line]
    assert len(warnings) == 1 and "iter 18" in warnings[0]
    with pytest.raises(RunError, match="2 updates in a row"):
        for it in range(20, 38):
            finder.add(result(it, norm=float("inf")), look=True)


def test_a_loss_spike_is_marked_once_it_comes(tmp_path, clock, capsys):
    """nanoGPT #137, #468, #524, #554: explosions that nobody notices for hours."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    for it, loss in enumerate([3.1, 3.0, 3.2, 2.9, 6.5, 3.0]):
        log.ledger.switch("steps")
        clock.sleep(1)
        log.ledger.switch("other")
        log.timed += 1
        log.line(result(it, loss=loss))
    err = capsys.readouterr().err
    assert err.count("loss spike") == 1 and "iter 4: loss spike, 6.5000" in err


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


def test_one_save_that_hangs_is_not_expected_of_all_to_come(tmp_path, clock):
    """By the clock the next ones would be left out for want of time, and the run end early."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock=clock))
    for seconds in (2, 50, 50):
        with log.book("checkpoints"):
            clock.now += seconds
        if seconds == 2:
            assert log.clock.prices["checkpoints"] == 2
    assert log.clock.prices["checkpoints"] == 8  # at most twice the last, each time


def test_metrics_emptied_under_the_run_go_on_at_the_beginning(tmp_path, clock):
    """`> metrics.jsonl` in a shell: no zeros where the old records were."""
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    for it in range(2):
        os.truncate(tmp_path / "metrics.jsonl", 0)
        log.evaluation(it, 1.0, 1.0)
    assert [r["iter"] for r in records(tmp_path)] == [1]


def test_a_run_that_is_evaluated_each_second_seldom_draws(tmp_path, clock, monkeypatch):
    """Drawing takes half a second: that would be half of the run."""
    log, drawn = make_log(tmp_path, clock, Ledger(0.0, clock)), []
    monkeypatch.setattr(runlog, "time", SimpleNamespace(monotonic=clock))
    log.draw_run = lambda: drawn.append(clock.now)
    clock.now = 1000.0
    for it in range(100):
        log.evaluation(it, 1.0, 1.0)
        clock.sleep(1)
    assert drawn == [1000, 1020, 1040, 1060, 1080]


def test_numbers_keep_nine_digits_and_what_json_cannot_say_is_null():
    assert plain(6.05123e-5) == 6.05123e-5 and plain(3.0512345678e-8) == 3.05123457e-8
    assert plain(float("nan")) is None and plain(3) == 3


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
        self.content, self.handlers = b"", [lambda: complain("a checkpoint is saved first")]

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
    complain("iter 4: loss spike")
    text.flush()
    assert not raw.handlers and raw.content == b"iter 4: loss spike\n"


def test_a_full_disk_does_not_cost_the_run(tmp_path, clock, capsys):
    log = make_log(tmp_path, clock, Ledger(0.0, clock))
    log.file = open("/dev/full", "wb", buffering=0)
    log.evaluation(0, 1.0, 1.0)
    assert "No space left on device; its records wait in memory" in capsys.readouterr().err


def test_a_failing_tracker_does_not_stop_the_run(tmp_path, clock, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    log = make_log(tmp_path, clock, Ledger(0.0, clock), tracker="wandb")
    log.evaluation(0, 1.0, 1.0)
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
