"""Resume recorded checkpoints, which dev/make_golden.py made."""

import json
import shutil

import pytest
from program import column, train

from dev.make_golden import GOLDEN, MODELS, SAVED_AT, write_dataset

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
