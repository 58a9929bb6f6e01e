"""
results/gpu.sh: both queues on a CPU with tiny models, as on a machine without network, matplotlib
and datasets.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from helpers import ROOT

needed = ("timeout", "setsid")
has_tools = sys.platform != "win32" and all(map(shutil.which, needed))
pytestmark = pytest.mark.skipif(not has_tools, reason="needs GNU tools")

# The rows of each queue
TRAINED = ["classic", "fast", "no_tables"]
QUEUES = {
    "1": ["machine", "prepare", "real_shapes", "step", "fast_step", "peer", "step_before"]
    + ["fast_step_before", "fast_no_tables", *TRAINED, "compare", "loss_off", "cudnn_off"],
    "2": ["machine", "fast_128", "other_tests", "max_autotune", "baseline_again", "peer_eager"]
    + ["ladder"],
}
# Stands for nanoGPT's model.py: our own model behind its interface
NANOGPT = """
from model import GPT as Ours, GPTConfig as OurConfig
from configurator import Config
from training.build import adamw_groups
import torch
def GPTConfig(**sizes):
    return OurConfig(**sizes)
class GPT(Ours):
    def forward(self, x, y):
        return None, super().forward(x, y)
    def configure_optimizers(self, decay, lr, betas, device_type):
        return torch.optim.AdamW(adamw_groups(self, Config(weight_decay=decay)), lr=lr)
"""


def start(
    queue: str, folder: Path, rows: list[str] | None = None, **environment
) -> subprocess.Popen:
    """gpu.sh with its output below `folder`; all but `rows` were measured on another machine."""
    (folder / "inputs/nanoGPT").mkdir(parents=True, exist_ok=True)
    (folder / "inputs/nanoGPT/model.py").write_text(NANOGPT)
    (folder / "inputs/done").mkdir(exist_ok=True)
    before = {} if rows is None else dict.fromkeys(set(QUEUES[queue]) - {*rows}, {"step_ms": 1.0})
    (folder / f"inputs/done/rows_{queue}.json").write_text(json.dumps(before))
    for name in ("matplotlib", "datasets"):
        module = folder / "missing" / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"raise ImportError('no {name} here')")
    environment = os.environ | {"PYTHONPATH": str(folder / "missing")} | environment
    environment |= {"GPU_INPUTS": str(folder / "inputs"), "WORK": str(folder / "work")}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.Popen(
        ["bash", "results/gpu.sh", queue, "dry"],
        cwd=ROOT,
        env=environment | {"OUT": str(folder / "out")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def measured(folder: Path, queue: str) -> dict:
    return json.loads((folder / f"out/rows_{queue}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("queue", QUEUES)
def test_a_dry_run_brings_back_every_row_in_a_few_files(queue, tmp_path):
    output, _ = start(queue, tmp_path).communicate(timeout=600)
    files = {f"rows_{queue}.json", f"logs_{queue}.tgz", f"queue_{queue}.log"}
    files |= {f"{run}.jsonl" for run in TRAINED} if queue == "1" else set()
    assert {path.name for path in (tmp_path / "out").iterdir()} == files, output
    rows = measured(tmp_path, queue)
    assert rows.keys() == {*QUEUES[queue]} and not [r for r in rows if "unfinished" in rows[r]]
    if queue == "2":
        assert all(row["tokens_per_sec"] > 0 for row in (rows["fast_128"], rows["max_autotune"]))
    with tarfile.open(tmp_path / f"out/logs_{queue}.tgz") as archive:
        logs = {Path(name).name for name in archive.getnames()}
    assert logs >= {f"{row}.log" for row in QUEUES[queue]}


@pytest.mark.slow
def test_a_queue_outlives_its_call_and_the_next_call_waits_for_it(tmp_path):
    output, _ = start("2", tmp_path, ["machine"], WAIT="0").communicate(timeout=60)
    pid = int((tmp_path / "work/2/pid").read_text())
    os.kill(pid, 0)  # raises where there is no such process
    output, _ = start("2", tmp_path, ["machine"]).communicate(timeout=120)
    assert int((tmp_path / "work/2/pid").read_text()) == pid
    assert output.count("machine: exit 0") == 1 and "step_ms" in measured(tmp_path, "2")["ladder"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_queue_that_is_killed_keeps_its_rows_and_goes_on_after_them(tmp_path):
    rows = ["machine", "baseline_again"]
    process = start("2", tmp_path, rows)
    while (
        process.poll() is None and not (tmp_path / "work/2/rows/baseline_again.unfinished").exists()
    ):
        time.sleep(0.05)
    os.killpg(int((tmp_path / "work/2/pid").read_text()), signal.SIGKILL)
    process.communicate(timeout=60)
    stopped = measured(tmp_path, "2")
    assert stopped["baseline_again"] == {"unfinished": {"exit": None}}

    output, _ = start("2", tmp_path, rows).communicate(timeout=300)
    assert "machine: measured before" in output and "baseline_again: exit 0" in output
    finished = measured(tmp_path, "2")
    assert finished["baseline_again"]["tokens_per_sec"] > 0
    assert finished["machine"] == stopped["machine"]


# python3, but for train.py and compare.py, which fail as without a dataset: in no time
FAILING = """#!/bin/sh
case $1 in train.py | compare.py) echo "error: dataset: no folder" >&2; exit 2 ;; esac
exec {python} "$@"
"""


def test_a_row_that_fails_does_not_stop_the_next_one(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(FAILING.format(python=shutil.which("python3")))
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "work/1").mkdir(parents=True)
    # a file in place of the dataset's folder
    (tmp_path / "work/1/prose").write_text("")
    rows = ["prepare", *TRAINED, "compare"]
    output, _ = start("1", tmp_path, rows).communicate(timeout=300)
    found = measured(tmp_path, "1")
    assert [found[row]["unfinished"]["exit"] for row in rows if row != "prepare"] == [2] * 4, output
    # its figures are of another machine, whose dataset is not here
    assert found["prepare"] != {"step_ms": 1.0}


@pytest.mark.parametrize("queue, line", [("3", "usage: "), ("1", "python3's torch sees no CUDA")])
def test_what_cannot_be_measured_is_one_line(queue, line):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "results/gpu.sh", queue],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(line)
