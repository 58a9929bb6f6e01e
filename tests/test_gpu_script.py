"""
results/gpu.sh: every part on a CPU with a tiny model, as on a machine without network, matplotlib
and datasets.
"""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("timeout"), reason="needs GNU timeout")

# What each part writes in a dry run, besides its archive
PARTS = {
    "correct": ["machine.json", "real_shapes.json", "other_tests.json"],
    "speed": ["step_4.json", "fast_step.json"],
    "knobs": ["baseline.json", "bf16_stream.json", "loss_chunk.json"],
    "recipe": ["prepare.json", "classic.json", "classic.jsonl", "fast.json", "fast.jsonl"]
    + ["first_edition.json", "first_edition.jsonl"]
    + ["compare.json"],
    "eager": ["peer_eager.json"],
    "ladder": ["ladder.json"],
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


def start(part: str, folder: Path) -> subprocess.Popen:
    """gpu.sh with its output below `folder`. It leads a group of processes of its own."""
    (folder / "inputs/nanoGPT").mkdir(parents=True, exist_ok=True)
    (folder / "inputs/nanoGPT/model.py").write_text(NANOGPT)
    for name in ("matplotlib", "datasets"):
        module = folder / "missing" / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"raise ImportError('no {name} here')")
    environment = os.environ | {"PYTHONPATH": str(folder / "missing")}
    environment |= {"GPU_INPUTS": str(folder / "inputs"), "WORK": str(folder / "work")}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.Popen(
        ["bash", "results/gpu.sh", part, "dry"],
        cwd=ROOT,
        env=environment | {"OUT": str(folder / "out")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def archived(archive: Path) -> set[str]:
    with tarfile.open(archive) as files:
        return {Path(name).name for name in files.getnames()}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run_leaves_the_json_of_each_row_and_an_archive(part, tmp_path):
    output, _ = start(part, tmp_path).communicate(timeout=300)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted([*PARTS[part], f"{part}.tgz"]), (
        output
    )
    rows = [name for name in PARTS[part] if name.endswith(".json")]
    assert all(json.loads((out / name).read_text()) for name in rows)
    if part == "ladder":
        ladder = json.loads((out / "ladder.json").read_text())["rows"]
        assert len(ladder) == 2 and all(row["first"]["tokens_per_sec"] > 0 for row in ladder)
    logs = {name.replace(".json", ".log") for name in rows}
    assert archived(out / f"{part}.tgz") >= {*rows, *logs}


def test_a_part_that_is_killed_keeps_its_rows_and_goes_on_after_them(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # as if the first row had been measured on another machine
    done = tmp_path / "inputs" / "done"
    done.mkdir(parents=True)
    (done / "step_4.json").write_text('{"step_ms": 1.0}')
    process = start("speed", tmp_path)
    while process.poll() is None and not (out / "fast_step_unfinished.json").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert "step_4: measured before" in output
    assert json.loads((out / "step_4.json").read_text()) == {"step_ms": 1.0}
    assert not (out / "fast_step.json").exists()

    output, _ = start("speed", tmp_path).communicate(timeout=300)
    assert "step_4: measured before" in output and "fast_step: exit 0" in output
    assert json.loads((out / "fast_step.json").read_text())["tokens_per_sec"] > 0
    assert not (out / "fast_step_unfinished.json").exists()


# python3, but for train.py and compare.py, which fail as without a dataset: in no time
FAILING = """#!/bin/sh
case $1 in train.py | compare.py) echo "error: dataset: no folder" >&2; exit 2 ;; esac
exec {python} "$@"
"""


def test_a_row_that_fails_does_not_stop_the_next_one(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(FAILING.format(python=shutil.which("python3")))
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "work").mkdir()
    # a file in place of the dataset's folder
    (tmp_path / "work" / "prose").write_text("")
    output, _ = start("recipe", tmp_path).communicate(timeout=300)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    rows = ("prepare", "classic", "fast", "first_edition", "compare")
    assert names == {f"{row}_unfinished.json" for row in rows} | {"recipe.tgz"}, output
    assert json.loads((tmp_path / "out" / "prepare_unfinished.json").read_text())["exit"] == 2


def test_an_unknown_part_is_one_line(tmp_path):
    process = start("everything", tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and output.count("\n") == 1 and "correct|speed" in output
