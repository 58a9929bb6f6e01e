"""
Check what trackers, the loss curve and the console show, and that a failing tracker or
curve costs a run no more than a warning.
"""

import json
import os
import sys
import types
from unittest import mock

import pytest
from program import InProcessRun, Run, assert_same_run, finish, flags, lines, start, train

TINY = dict(n_layer=1, gradient_accumulation_steps=1, max_iters=8, warmup_iters=2)
TINY |= dict(eval_interval=4, eval_tokens=160)


# our names and nanoGPT's, which its users' dashboards expect; nanoGPT logs mfu in percent
NANOGPTS = {
    "step/lr": "lr",
    "step/mfu": "mfu",
    "eval/train_loss": "train/loss",
    "eval/val_loss": "val/loss",
}


def expected_numbers(ran: Run) -> dict[tuple[str, int], float]:
    """Return the numbers of metrics.jsonl, keyed by their name in a tracker and the iteration."""
    found = {}
    for record in ran.records("step") + ran.records("eval"):
        for field, value in record.items():
            if field in ("kind", "iter", "time", "complete") or value is None:
                continue
            name = f"{record['kind']}/{field}"
            percent = 100 if field == "mfu" else 1
            found[NANOGPTS.get(name, name), record["iter"]] = percent * value
    assert len(found) > 50
    return found


def test_tensorboard_shows_the_numbers_of_metrics_jsonl_even_after_a_resume(tiny, ran):
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module)
    keys = tiny | dict(tracker="tensorboard", peak_tflops=0.01)
    train(**keys)
    # as if killed before that save: iterations 4 to 7 are repeated
    (ran.out_dir / "ckpt-00000008.pt").unlink()
    train(**keys, init_from="resume")
    events = accumulator.EventAccumulator(str(ran.out_dir)).Reload()
    tags = events.Tags()["scalars"]
    found = {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}
    assert found == pytest.approx(expected_numbers(ran), rel=1e-6)  # TensorBoard keeps float32
    assert [event.step for event in events.Scalars("val/loss")] == [0, 4, 8]


class Wandb(types.ModuleType):
    """Stand in for the module wandb and its run, and fail in the method named `failing`."""

    def __init__(self, failing: str = "") -> None:
        super().__init__("wandb")
        self.failing = failing
        self.logged: dict[tuple[str, int], float] = {}
        self.ids: list[str] = []

    def fail(self, method: str) -> None:
        if method == self.failing:
            raise ConnectionError("no\nnetwork.")

    def init(self, id: str | None, resume: str, **_):
        self.fail("init")
        assert os.environ["TERM"] == "dumb"  # in any other terminal, it asks for a login and waits
        assert resume == "allow"
        self.id = id or f"run{len(self.ids)}"
        self.ids.append(self.id)
        return self

    def log(self, numbers: dict, step: int) -> None:
        self.fail("log")
        assert numbers.pop("iter") == step
        self.logged |= {(name, step): value for name, value in numbers.items()}

    def finish(self) -> None:
        self.fail("finish")


def test_wandb_receives_the_numbers_continues_on_a_resume_and_begins_another_for_a_new_run(
    tiny, ran, monkeypatch
):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("TERM", "xterm")
    keys = tiny | dict(tracker="wandb", peak_tflops=0.01)
    train(**keys | dict(max_iters=4))
    train(**keys, init_from="resume")
    assert wandb.logged == pytest.approx(expected_numbers(ran), rel=1e-8)  # the file has 9 digits
    assert wandb.ids == ["run0", "run0"]
    for path in ran.out_dir.glob("*.pt"):
        path.unlink()
    train(**keys)
    assert wandb.ids[2] == "run2"


@pytest.mark.slow
def test_wandb_offline_stores_the_numbers_of_metrics_jsonl_and_the_config(tiny, ran, tmp_path):
    pytest.importorskip("wandb")
    keys = dict(wandb_log=True, wandb_project="project", learning_rate=0.0123)
    command = ("train.py", *flags(**tiny | keys))
    result = finish(start(*command, WANDB_MODE="offline", HOME=str(tmp_path)))
    assert result.code == 0 and not lines(result.err, "warning: "), result.err
    (file,) = ran.out_dir.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()  # protobuf records, with values as JSON text
    texts = {"project", ran.out_dir.name, "learning_rate", "0.0123"}
    for (name, _), value in expected_numbers(ran).items():
        texts |= {name, json.dumps(value)}
    assert not [text for text in texts if text.encode() not in content]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_failing_tracker_gives_one_warning_and_the_run_trains_on(failing, tiny, ran, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(failing))
    (line,) = lines(train(**tiny, tracker="wandb").err, "warning: ")
    assert "no network" in line
    assert line in (ran.out_dir / "log.txt").read_text()
    assert ran.saved[-1] == 8


def test_a_loss_curve_that_cannot_be_drawn_costs_a_run_only_a_warning(tiny, ran):
    result = InProcessRun(fake_clock=True).launch(**tiny)  # drawing fails with its clock
    (line,) = lines(result.err, "warning: ")
    assert result.code == 0 and "loss.png" in line and ran.saved[-1] == 8


def test_a_sample_that_fails_is_the_last_one_and_changes_no_bit(tiny, ran, tmp_path, monkeypatch):
    keys = tiny | dict(sample_tokens=5, eval_interval=4, dropout=0.1)
    train(**keys | dict(out_dir=tmp_path / "straight"))
    monkeypatch.setattr("run.log.generate", mock.Mock(side_effect=RuntimeError("out of memory")))
    result = InProcessRun().launch(**keys)
    (line,) = lines(result.err, "warning: ")
    assert result.code == 0 and "sample_tokens: " in line and "without it" in line
    assert_same_run(tmp_path / "straight", ran.out_dir, 8)
