"""A tracker gets the numbers of metrics.jsonl; one that is missing or fails costs the run a warning and nothing else."""

import sys
from types import SimpleNamespace

import pytest
from conftest import records, run_here


class Recorder:
    """wandb's run and tensorboard's SummaryWriter in one; fails in the method that `failing` names."""

    def __init__(self, failing: str = ""):
        self.failing, self.logged, self.closed = failing, {}, False

    def init(self, **settings):
        self.act("init")
        self.settings = settings
        return self

    def log(self, numbers: dict, step: int):
        self.act("log")
        self.logged |= {(name, step): value for name, value in numbers.items()}

    def add_scalar(self, name: str, value: float, step: int):
        self.act("log")
        self.logged[name, step] = value

    def finish(self):
        self.act("close")
        self.closed = True

    close = finish

    def act(self, what: str):
        if self.failing == what:
            raise ConnectionError("no network")


def install(monkeypatch, recorder: Recorder) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=recorder.init))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda _: recorder.init()))


@pytest.mark.parametrize("changes", [dict(wandb_log=True, wandb_project="p", wandb_run_name="r"), dict(tracker="tensorboard")])
def test_a_tracker_gets_the_numbers_of_metrics_jsonl(dataset, tmp_path, monkeypatch, changes):
    recorder = Recorder()
    install(monkeypatch, recorder)
    assert run_here(dataset, tmp_path, **changes) == 0
    expected = {
        (f"{record['kind']}/{name}", record["iter"]): value
        for record in records(tmp_path) if record["kind"] in ("step", "eval")
        for name, value in record.items() if name not in ("kind", "iter") and value is not None
    }  # fmt: skip
    assert recorder.logged == expected and len(expected) > 50
    assert recorder.closed
    if "wandb_log" in changes:
        assert (recorder.settings["project"], recorder.settings["name"]) == ("p", "r")


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
@pytest.mark.parametrize("failing", ["init", "log", "close"])
def test_a_failing_tracker_never_stops_a_run(dataset, tmp_path, monkeypatch, capsys, tracker, failing):
    install(monkeypatch, Recorder(failing))
    assert run_here(dataset, tmp_path, tracker=tracker) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")] == [
        f"warning: tracker {tracker}: no network; going on without it"
    ]
    assert records(tmp_path)[-1]["kind"] == "end"


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_missing_tracker_never_stops_a_run(dataset, tmp_path, monkeypatch, capsys, tracker):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run_here(dataset, tmp_path, tracker=tracker) == 0
    assert f"warning: tracker {tracker}: " in capsys.readouterr().err
    assert records(tmp_path)[-1]["kind"] == "end"
