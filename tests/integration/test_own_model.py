"""Train the docs' example of your own model."""

import json
import shutil

import pytest
import torch
from char_dataset import LETTERS, RULER, SHORT_RUN
from program import ROOT, changed, checkpoint, column, finish, flags, start

# step 1 of docs/from_nanogpt.md
OWN_MODEL = {"model_fast.py": "from mine import GPT"}
# continues with the likeliest letters, without a cache
PLAINLY = """
import sys, torch
from mine import GPT
from model_fast import config_from_dict
state = torch.load(sys.argv[1], weights_only=True)
model = GPT(config_from_dict(state["model_config"])).eval()
model.load_state_dict(state["model"])
idx = [int(id) for id in sys.argv[2].split(",")]
with torch.no_grad():
    for _ in range(40):
        idx.append(int(model(torch.tensor([idx[-16:]]))[0, -1, :61].argmax()))
print(idx)
"""


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
    whole, halves = (checkpoint(home / name, 8) for name in ("straight", "halves"))
    assert "transformer.wpe.weight" not in whole["model"]  # its positions are rotary
    for name, weight in whole["model"].items():
        assert torch.equal(weight, halves["model"][name]), name
    losses = column(home / "straight", "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.1

    file = home / "straight" / "ckpt-00000008.pt"
    greedy = ("--temperature=0", "--num_samples=1", "--max_new_tokens=40", "--dtype=float32")
    text = ran("sample.py", f"--init_from={file}", "--start=abc", "--device=cpu", *greedy)
    prompt = ",".join(str(LETTERS.index(letter)) for letter in "abc")
    ids = json.loads(ran("-c", PLAINLY, file, prompt))
    assert text == "".join(LETTERS[i] for i in ids) + RULER
