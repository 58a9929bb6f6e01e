"""
Resume recorded checkpoints, which dev/make_golden.py made. Refuse those of version 0.2, such as
tables.pt, and those of the fast recipe of 3,250 iterations, such as plain.pt.
"""

import json
import shutil
from pathlib import Path

import pytest
from program import column, flags, refused, run, train

from dev.make_golden import GOLDEN, MODELS, SAVED_AT, write_dataset
from training.pretrained import load_pretrained

LOSSES = json.loads((GOLDEN / "losses.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_checkpoint_resumes_with_its_recorded_losses(name, tmp_path):
    """
    Allow for other processors, which move a loss by less than 1e-5. Wrong data or moments would
    move it by 1e-3 or more.
    """
    shutil.copy(GOLDEN / f"{name}.pt", tmp_path / f"ckpt-{SAVED_AT:08}.pt")
    dataset = write_dataset(tmp_path / "tokens")
    train(**MODELS[name], dataset=dataset, out_dir=tmp_path, init_from="resume")
    assert column(tmp_path, "step", "loss") == pytest.approx(LOSSES[name], rel=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_recorded_checkpoint_are_read_in_spite_of_a_key_that_is_gone(name):
    assert "model" in load_pretrained(str(GOLDEN / f"{name}.pt"))


@pytest.mark.parametrize(
    "command",
    [
        "train.py --init_from=resume --out_dir=run --dataset=tokens",
        "train.py --init_from=run --out_dir=new --dataset=tokens",
        "train.py --init_from=run --out_dir=new --dataset=tokens --eval_only=True",
        "train.py --out_dir=run --dataset=tokens --eval_only=True",
        "sample.py --out_dir=run",
        "convert.py ckpt-to-hf run new",
    ],
)
def test_a_checkpoint_of_version_0_2_is_refused_in_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    shutil.copy(GOLDEN / "tables.pt", f"run/ckpt-{SAVED_AT:08}.pt")
    write_dataset(Path("tokens"))
    result = run(*command.split())
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert "git checkout 877e89a" in line
    assert not Path("new").exists()


def test_a_checkpoint_of_the_earlier_fast_recipe_is_refused_in_one_line(tmp_path):
    shutil.copy(GOLDEN / "plain.pt", tmp_path / f"ckpt-{SAVED_AT:08}.pt")
    keys = MODELS["fast"] | dict(dataset=write_dataset(tmp_path / "tokens"), out_dir=tmp_path)
    result = run("train.py", *flags(**keys, init_from="resume"))
    refused(result, "git checkout c4db720e", f"--init_from={tmp_path}")
