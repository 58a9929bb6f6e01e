"""Run the quickstart in a fresh copy of the program, without a network."""

import json
import math

import pytest
from program import Run, changed, finish, run, start

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


def test_the_quickstart_works_in_a_fresh_copy_without_a_network(tmp_path, monkeypatch):
    """Train for five iterations in a fresh Python, then run the other commands."""
    home = changed(tmp_path / "nightshift", {})
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OFFLINE)
    shorter = ("--max_iters=5", "--eval_interval=5", "--eval_tokens=2048", "--sample_tokens=20")
    fresh = dict(cwd=home, cold=True, PYTHONPATH=str(tmp_path / "site"))
    result = finish(start("train.py", "config/quickstart.py", *shorter, **fresh), timeout=300)
    assert result.code == 0 and "Traceback" not in result.err, result.err
    assert "sample 5:" in result.out
    assert not (home / "network_was_asked").exists()
    losses = Run(home / "out" / "quickstart").evals("val_loss")
    assert losses[0] == pytest.approx(math.log(256), abs=1e-4)  # docs/training.md
    assert losses[1] < losses[0] - 0.5

    def told(*arguments: str) -> str:
        result = run(*arguments)
        assert result.code == 0, result.err
        return result.out

    monkeypatch.chdir(home)
    greedy = ("--temperature=0", "--num_samples=1", "--max_new_tokens=20", "--device=cpu")
    assert told("sample.py", "config/quickstart.py", "--start=def ", *greedy).startswith("def ")
    assert f"{losses[1]:.4f}" in told("compare.py", "out/quickstart", "--json=table.json")
    (figures,) = json.loads((home / "table.json").read_text())["runs"].values()
    assert (figures["best_val_loss"], figures["iterations"]) == (losses[1], 5)
    plan = told("bench.py", "plan", "config/quickstart.py", "--iter_seconds=0.1")
    assert f"{300 * 16 * 128:,}" in plan
    told("convert.py", "out/quickstart", "hf")
    assert (home / "hf" / "model.safetensors").exists()
    assert (home / "out" / "quickstart" / "loss.png").exists()
