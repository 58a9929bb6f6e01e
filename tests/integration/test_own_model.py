"""Train the docs' example of your own model."""

import shutil

import pytest
import torch
from char_dataset import SHORT_RUN
from program import ROOT, Run, changed, finish, flags, start

# step 1 of docs/from_nanogpt.md
OWN_MODEL = {"model_fast.py": "from mine import GPT"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_documented_own_model_trains_resumes_and_samples(optimizer, letters, tmp_path):
    home = changed(tmp_path / "copy", OWN_MODEL)
    shutil.copy(ROOT / "docs/rotary_model.py", home / "mine.py")

    def ran(*arguments: str) -> str:
        result = finish(start(*map(str, arguments), cwd=home))
        assert result.code == 0, result.err
        return result.out

    given = SHORT_RUN | dict(dataset=letters, optimizer=optimizer, dropout=0.1, lr_decay_iters=8)
    ran("train.py", *flags(**given, out_dir="straight"))
    # go back to the checkpoint of iteration 4, as a kill would
    shutil.copytree(home / "straight", home / "halves")
    (home / "halves" / "ckpt-00000008.pt").unlink()
    ran("train.py", *flags(**given, out_dir="halves", init_from="resume"))
    whole, halves = (Run(home / name).state(8) for name in ("straight", "halves"))
    assert "transformer.wpe.weight" not in whole["model"]  # its positions are rotary
    for name, weight in whole["model"].items():
        assert torch.equal(weight, halves["model"][name]), name
    losses = Run(home / "straight").evals("val_loss")
    assert losses[-1] < losses[0] - 0.1

    text = ran("sample.py", "--out_dir=straight", "--start=abc", "--device=cpu")
    assert text.startswith("abc")
