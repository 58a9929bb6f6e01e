"""Run the quickstart in a fresh copy of the program, without a network."""

import json
import math

import pytest
from program import changed, column, finish, start

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
RUN_SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_quickstart_works_in_a_fresh_copy_without_a_network(tmp_path):
    """Run its commands for 30 iterations, the first one in a fresh Python."""
    home = changed(tmp_path / "nightshift", {})
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OFFLINE)

    def begin(*arguments: str):
        return start("-c", OFFLINE + RUN_SCRIPT, *arguments, cwd=home, only_torch=True)

    def end(process) -> str:
        result = finish(process, timeout=300)
        assert result.code == 0, result.err
        assert "Traceback" not in result.err
        return result.out

    run_folder = home / "out" / "quickstart"
    shorter = ("--max_iters=30", "--eval_interval=30", "--log_interval=10")
    shorter += ("--eval_tokens=4096",)
    fresh = dict(cwd=home, cold=True, PYTHONPATH=str(tmp_path / "site"))
    out = end(start("train.py", "config/quickstart.py", *shorter, **fresh))
    assert "sample 30:" in out
    losses = column(run_folder, "eval", "val_loss")
    assert losses[0] == pytest.approx(math.log(256), abs=1e-4)  # docs/training.md
    assert losses[1] < losses[0] - 1

    greedy = ("--start=def ", "--temperature=0", "--num_samples=1", "--max_new_tokens=20")
    greedy += ("--device=cpu", "--dtype=float32")
    first = [
        begin("sample.py", "config/quickstart.py", *greedy),
        begin("compare.py", "out/quickstart", "--json=table.json"),
        begin("convert.py", "ckpt-to-hf", "out/quickstart", "hf"),
        begin("bench.py", "plan", "config/quickstart.py", "--iter_seconds=0.1"),
    ]
    text, table, _, plan = map(end, first)
    assert (run_folder / "loss.png").exists()
    assert text.startswith("def ")
    assert f"{losses[1]:.4f}" in table
    (figures,) = json.loads((home / "table.json").read_text())["runs"].values()
    assert figures["best_val_loss"] == losses[1]
    assert figures["iterations"] == 30
    assert f"{500 * 16 * 128:,}" in plan

    assert (home / "hf" / "model.safetensors").exists()
    assert not (home / "network_was_asked").exists()
