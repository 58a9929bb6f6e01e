"""
Resume recorded checkpoints of the present format, which dev/make_golden.py made, and refuse what
only version 0.2 can compute. plain.pt and tables.pt are of that version.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from program import column, run, train

from common.console import UserError
from dev.make_golden import GOLDEN, MODELS, SAVED_AT, write_dataset
from training import checkpoint

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
def test_a_model_that_only_version_0_2_has_is_refused_in_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    shutil.copy(GOLDEN / "tables.pt", f"run/ckpt-{SAVED_AT:08}.pt")
    write_dataset(Path("tokens"))
    result = run(*command.split())
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert "0.2.0" in line and "877e89a" in line
    assert not Path("new").exists()


def normuon(state: dict) -> None:
    state["config"]["optimizer"] = "muon"
    for number in (0, 1):  # the blocks' matrices
        state["optimizer"]["state"][number]["mean_squares"] = torch.ones(8)


def plain_muon(state: dict) -> None:
    state["config"]["optimizer"] = "plain_muon"


def no_gains(state: dict) -> None:
    del state["model_config"]["gains"]


def no_biases(state: dict) -> None:
    """Make it a model without biases, whose attention had another scale in version 0.2."""
    state["model_config"] |= dict(bias=False, gains=False)


@pytest.mark.parametrize(
    "model, change, has_todays_model",
    [
        ("plain", normuon, True),
        ("gpt2", normuon, True),
        ("gpt2", plain_muon, True),
        ("plain", no_gains, False),
        ("plain", no_biases, False),
    ],
)
def test_a_run_of_version_0_2_with_another_optimizer_is_refused_but_not_its_weights(
    model, change, has_todays_model, tmp_path
):
    """Refuse the weights too if today's model would compute other logits from them."""
    path = tmp_path / "changed.pt"
    state = torch.load(GOLDEN / f"{model}.pt", weights_only=True)
    change(state)
    torch.save(state, path)
    if has_todays_model:
        assert "value_tables" not in checkpoint.load(path)["model_config"]
    else:
        with pytest.raises(UserError, match="877e89a"):
            checkpoint.load(path)
    with pytest.raises(UserError, match="877e89a"):
        checkpoint.read(path)  # to resume
