"""Type the quickstart's commands in an empty folder, without a network."""

import json
import math
import shutil
from pathlib import Path

import pytest
from program import ROOT, Run, finish, run, start

OFFLINE = """
import socket

def connect(self, address):
    if self.family != socket.AF_UNIX:
        open("network_was_asked", "a").write(f"{address}\\n")
        raise OSError(101, "Network is unreachable")
    return original(self, address)

original = socket.socket.connect
socket.socket.connect = connect
"""


def told(*command: str) -> str:
    result = run(*command)
    assert result.code == 0, result.err
    return result.out


def test_the_quickstart_trains_samples_compares_plans_and_exports_without_a_network(
    tmp_path, monkeypatch
):
    """Train in a fresh Python, as a user does, and run the other commands in this one."""
    monkeypatch.chdir(tmp_path)
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(OFFLINE)
    shutil.copytree(ROOT / "config", "config")
    shorter = ("--max_iters=5", "--eval_interval=5", "--eval_tokens=2048", "--sample_tokens=20")
    command = (str(ROOT / "train.py"), "config/quickstart.py", *shorter, "--batch_size=4")
    fresh = dict(cwd=tmp_path, cold=True, PYTHONPATH=str(tmp_path / "site"))
    result = finish(start(*command, **fresh), timeout=300)
    assert result.code == 0 and "sample 5:" in result.out, result.err
    assert not Path("network_was_asked").exists()
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
