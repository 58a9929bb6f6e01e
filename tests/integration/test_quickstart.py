"""Type the quickstart's commands in an empty folder, without a network."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
from program import ROOT, Run, run


def told(*command: str) -> str:
    result = run(*command)
    assert result.code == 0, result.err
    return result.out


def test_the_quickstart_trains_samples_compares_plans_and_exports_without_a_network(
    tmp_path, monkeypatch
):
    network = mock.Mock(side_effect=OSError)
    monkeypatch.setattr("socket.socket.connect", network)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "config", "config")
    shorter = ("--max_iters=5", "--eval_interval=5", "--eval_tokens=2048", "--sample_tokens=20")
    assert "sample 5:" in told("train.py", "config/quickstart.py", *shorter, "--batch_size=4")
    losses = Run("out/quickstart").evals("val_loss")
    assert losses[0] == pytest.approx(math.log(256), abs=1e-4)  # docs/training.md
    assert losses[1] < losses[0] - 0.5

    greedy = ("--temperature=0", "--num_samples=1", "--max_new_tokens=20", "--device=cpu")
    assert told("sample.py", "config/quickstart.py", "--start=def ", *greedy).startswith("def ")
    assert f"{losses[1]:.4f}" in told("compare.py", "out/quickstart", "--json=table.json")
    (figures,) = json.loads(Path("table.json").read_text())["runs"].values()
    assert (figures["best_val_loss"], figures["iterations"]) == (losses[1], 5)
    plan = told("bench.py", "plan", "config/quickstart.py", "--iter_seconds=0.1")
    assert f"{300 * 16 * 128:,}" in plan
    told("convert.py", "out/quickstart", "hf")
    assert Path("hf/model.safetensors").exists() and Path("out/quickstart/loss.png").exists()
    assert not network.called
