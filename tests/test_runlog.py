"""The numbers on the log line, with a clock that the test turns by hand."""

import hashlib
import io
import json
import math
import os
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
import torch
from helpers import needs_a_full_disk, records, run_here

from common import console
from common.console import count, duration, print_err, say, warn
from common.files import plain
from configurator import Config, config_values
from training.clock import CATEGORIES, Clock
from training.hardware import Hardware
from training.log import Log, drop_records, tokenizer_name
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


def make_log(tmp_path, resumed: dict | None = None, dtype=torch.bfloat16, **changes) -> Log:
    config = Config(
        out_dir=str(tmp_path),
        batch_size=8,
        block_size=1024,
        gradient_accumulation_steps=64,
        **changes,
    )
    hw = Hardware(torch.device("cpu"), dtype, "test", 58.3, "test")
    if resumed:
        resumed = resumed | dict(config=config_values(config))
    clock = Clock(config, time.perf_counter(), hw.synchronize, resumed)
    log = Log(config, clock, hw, Ranks())
    log.file = open(tmp_path / "metrics.jsonl", "ab", buffering=0)
    log.first_iter = resumed["progress"]["iter_num"] if resumed else 0
    log.first_steps = clock.seconds["steps"]
    log.bytes_per_token = None
    return log


def evaluate(log: Log, iter_num: int, train_loss: float, val_loss: float) -> None:
    log.report_eval(iter_num, 0, train_loss, val_loss)


# -----------------------------------------------------------------------------
# Where the time went


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


def test_eta_counts_this_starts_iterations_and_what_lies_between_them(tmp_path, hand):
    (tmp_path / "metrics.jsonl").touch()
    resumed = dict(ledger=dict(steps=5000.0), progress=dict(iter_num=100), clock={})
    log = make_log(tmp_path, resumed, max_iters=1000, eval_interval=300)
    for name, seconds in (("evaluation", 50.0), ("checkpoints", 5.0)):
        log.clock.took(name, seconds)
    hand.sleep(20)
    log.clock.lap("steps")
    # two iterations of 10 s; evaluations at 300, 600, 900 and the end
    assert log.eta(101) == 898 * 10 + 4 * 55
    assert log.eta(300) == 699 * 20 / 201 + 3 * 55
    log.clock.config = log.config = replace(log.config, max_minutes=1.0)
    assert log.eta(101) == 40.0  # what is left of this start


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
    drop_records(path, dict(iter_num=4, evaluated_at=4))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    iters = {kind: [r["iter"] for r in kept if r["kind"] == kind] for kind in KINDS}
    # the run goes on with iteration 4; the evaluation that ckpt-4 was saved after stays
    assert iters == dict(step=[0, 1, 2, 3], eval=[0, 2, 4], checkpoint=[0, 2, 4], event=[])
    # a signal came before the evaluation, which the resumed run makes up for
    drop_records(path, dict(iter_num=4, evaluated_at=2))
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
