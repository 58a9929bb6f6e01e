"""
A tracker gets the numbers of metrics.jsonl; one that is missing or fails costs the run a warning
and nothing else.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import flags, records, run_here, run_process

from configurator import Config
from training.log import Tracker

NANOGPT_NAMES = {"eval/train_loss": "train/loss", "eval/val_loss": "val/loss", "step/lr": "lr"}


def expected_numbers(out_dir: Path) -> dict:
    """By the name under which a tracker shows it, and the iteration. On a CPU there is no mfu."""
    found = {
        (f"{record['kind']}/{name}", record["iter"]): value
        for record in records(out_dir)
        if record["kind"] in ("step", "eval")
        for name, value in record.items()
        if name not in ("kind", "iter", "time") and value is not None
    }
    return {(NANOGPT_NAMES.get(name, name), it): value for (name, it), value in found.items()}


def test_tensorboard_reads_the_numbers_of_metrics_jsonl_resumed_or_not(dataset, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run_here(dataset, tmp_path, tracker="tensorboard") == 0
    # as if killed before: iterations 4 to 7 are made again
    (tmp_path / "ckpt-00000008.pt").unlink()
    assert run_here(dataset, tmp_path, tracker="tensorboard", init_from="resume") == 0
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    found = {
        (tag, event.step): event.value
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    }
    expected = expected_numbers(tmp_path)
    assert len(expected) > 50 and found == pytest.approx(expected, rel=1e-6)  # it keeps float32
    assert [event.step for event in events.Scalars("val/loss")] == [0, 4, 8]
    # 4 is the same again
    assert [event.step for event in events.Scalars("step/loss")] == [0, 1, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.slow
def test_wandb_offline_keeps_the_numbers_of_metrics_jsonl_and_the_configuration(dataset, tmp_path):
    pytest.importorskip("wandb")
    arguments = flags(
        dataset,
        tmp_path,
        wandb_log=True,
        wandb_project="project",
        wandb_run_name="named",
        learning_rate=0.0123,
    )
    code, _, err = run_process("train.py", *arguments, WANDB_MODE="offline", HOME=str(tmp_path))
    assert code == 0 and "warning" not in err, err
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()  # records of protobuf, their values as JSON texts
    for (name, _), value in expected_numbers(tmp_path).items():
        assert name.encode() in content and json.dumps(value).encode() in content, name
    for text in ("project", "named", "learning_rate", "0.0123"):
        assert text.encode() in content


class Failing:
    """wandb and its run in one, failing in the method that `failing` names."""

    def __init__(self, failing: str):
        self.failing = failing

    def act(self, what: str):
        if self.failing == what:
            raise ConnectionError("no\nnetwork.")

    def init(self, **_):
        self.act("init")
        return self

    def log(self, *_, **__):
        self.act("log")

    def finish(self):
        self.act("finish")


def assert_one_warning(out_dir: Path, err: str, reason: str) -> None:
    """On the console and in log.txt; the run came to its end."""
    warning = f"warning: tracker wandb: {reason}; continuing without it"
    for text in (err, (out_dir / "log.txt").read_text()):
        assert [line for line in text.splitlines() if line.startswith("warning")] == [warning]
    assert records(out_dir)[-1]["kind"] == "end"


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_failing_tracker_never_stops_a_run(dataset, tmp_path, monkeypatch, capsys, failing):
    monkeypatch.setitem(sys.modules, "wandb", Failing(failing))
    assert run_here(dataset, tmp_path, tracker="wandb") == 0
    assert_one_warning(tmp_path, capsys.readouterr().err, "no network")


def test_a_missing_tracker_never_stops_a_run(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_here(dataset, tmp_path, tracker="wandb") == 0
    reason = "import of wandb halted; None in sys.modules (pip install wandb)"
    assert_one_warning(tmp_path, capsys.readouterr().err, reason)


def test_nanogpts_dashboards_find_their_names_and_units(monkeypatch, tmp_path):
    """Its train.py logs iter, train/loss, val/loss, lr, and mfu in per cent."""
    logged = []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    tracker = Tracker(Config(tracker="wandb", out_dir=str(tmp_path)), purge_from=0)
    tracker.log(dict(kind="eval", iter=5, train_loss=2.0, val_loss=3.0, time="x"))
    tracker.log(dict(kind="step", iter=6, loss=1.0, lr=1e-3, mfu=0.42))
    assert logged == [
        (5, {"train/loss": 2.0, "val/loss": 3.0, "iter": 5}),
        (6, {"step/loss": 1.0, "lr": 1e-3, "mfu": 42.0, "iter": 6}),
    ]
