"""
Checkpoints that commit b22bbcc wrote: today's program resumes them, on the tokens that they were
trained on. make_checkpoints.py says how they came to be; losses.json has what b22bbcc then logged.
"""

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from make_checkpoints import COMMON, RUNS, SAVED_AT, keys_of, turned_clock, write_data
from program import (
    checkpoint,
    column,
    finish_ranks,
    flags,
    records,
    start_ranks,
    train,
)

SAVED = Path(__file__).with_name("checkpoints_b22bbcc")
FIGURES = json.loads((SAVED / "losses.json").read_text())
SEQUENCES = COMMON["batch_size"] * COMMON["gradient_accumulation_steps"]
BY_ITERATIONS = [name for name in RUNS if "max_iters" in RUNS[name]]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def keys(data, tmp_path, monkeypatch):
    """The keys that resume a run of b22bbcc, whose checkpoint lies in tmp_path then."""
    monkeypatch.chdir(tmp_path)  # where a stream is prepared

    def resume(name: str, **changes) -> dict:
        shutil.copy(SAVED / f"{name}.pt", tmp_path / f"ckpt-{SAVED_AT[name]:08}.pt")
        return keys_of(name, data) | dict(out_dir=tmp_path, init_from="resume") | changes

    return resume


def assert_went_on(name: str, out_dir: Path, loss=2e-5, lr=1e-6) -> dict:
    """
    Ten iterations with b22bbcc's figures, within these relative tolerances: other data or moments
    move losses by 1e-3 and more, a rate of one group by 6e-5, other processors by less than 1e-5.
    Returns the checkpoint behind them.
    """
    first = SAVED_AT[name]
    last = first + 10
    its = column(out_dir, "step", "iter")
    assert its == list(range(first, last))
    assert column(out_dir, "step", "loss") == pytest.approx(FIGURES[name]["loss"], rel=loss)
    assert column(out_dir, "step", "lr") == pytest.approx(FIGURES[name]["lr"], rel=lr)
    tokens = SEQUENCES * COMMON["block_size"]
    assert column(out_dir, "step", "tokens") == [tokens * it for it in its]
    state = checkpoint(out_dir, last)
    assert state["progress"]["iter_num"] == last
    assert state["progress"]["tokens"] == tokens * last
    assert state["progress"]["sequences"] == SEQUENCES * last
    return state


@pytest.mark.parametrize("name", [name for name in BY_ITERATIONS if name != "ranks"])
def test_a_run_by_iterations_goes_on_as_it_did(name, keys, tmp_path):
    train(**keys(name))
    state = assert_went_on(name, tmp_path, loss=1e-4 if name == "float16" else 2e-5)
    if name == "float16":
        # 4096, doubled after the second of these updates
        assert state["scaler"]["scale"] == 8192
        assert state["scaler"]["_growth_tracker"] == 8


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="draws other random numbers")
def test_two_ranks_go_on_each_with_its_own_random_numbers(keys, tmp_path):
    """It has dropout."""
    for code, _, err in finish_ranks(start_ranks(2, *flags(**keys("ranks")))):
        assert code == 0, err
    state = assert_went_on("ranks", tmp_path)
    assert len(state["rng"]) == 2


@pytest.fixture
def no_pictures():
    """These runs are so long, by their clocks, that they would be drawn, by another process."""
    with mock.patch("subprocess.Popen", side_effect=OSError("no child")):
        yield


def test_hours_go_on_counting_where_the_run_stopped(keys, tmp_path, no_pictures):
    """Half of the hour is used; an update takes a minute."""
    with turned_clock():
        train(**keys("hours", max_minutes=10))
    # the rates depend on the time that is reserved for the last evaluation and save
    assert_went_on("hours", tmp_path, loss=1e-3, lr=0.03)
    (end,) = records(tmp_path, "end")
    assert end["reason"] == "max_minutes"


def test_hours_that_are_used_up_end_the_run_at_once(keys, tmp_path, no_pictures):
    train(**keys("hours", hours=0.4, max_minutes=1))
    (end,) = records(tmp_path, "end")
    assert end["reason"] == "hours"
    assert 30 <= end["iters"] <= 32
    assert column(tmp_path, "eval", "iter")[-1] == end["iters"]


def test_until_keeps_its_deadline_which_has_passed(keys, tmp_path, no_pictures):
    """And does not train until the next 07:15."""
    train(**keys("until", max_minutes=1))
    (end,) = records(tmp_path, "end")
    assert end["reason"] == "until"
    assert 20 <= end["iters"] <= 22
    state = checkpoint(tmp_path, end["iters"])
    assert state["progress"]["sequences"] == end["iters"] * SEQUENCES


def test_another_until_goes_on(keys, tmp_path, no_pictures):
    later = datetime.now() + timedelta(hours=12)
    later = later.replace(minute=later.minute // 2 * 2)  # never 07:15
    train(**keys("until", until=f"{later:%H:%M}", max_iters=30))
    assert_went_on("until", tmp_path)
