"""Train the docs' example of your own model, and run a script written for nanoGPT's model."""

import json
import shutil

import pytest
import torch
from char_dataset import LETTERS, RULER, SHORT_RUN, T
from doc_pages import block_with
from program import ROOT, changed, checkpoint, column, finish, flags, start, train

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
        result = finish(start(*map(str, arguments), cwd=home, only_torch=True))
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


SCRIPT = """
import torch
torch.manual_seed(0)
ids = torch.tensor([*open(r"{val}", "rb").read()[1024:]][::2])
source, idx, targets = r"{source}", ids[:320].view(20, 16), ids[1:321].view(20, 16)
{page}
whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
assert torch.equal(whole, loss) or abs(whole - loss) < 1e-5
assert nothing is None and last.shape == (20, 1, 128)
assert torch.allclose(last, logits[:, [-1]], atol=1e-5)
assert text.shape == (20, 36) and text.max() < 61
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
model(idx, targets)[1].backward()
optimizer.step()
assert model(idx, targets)[1] < loss
print(loss.item())
"""


@pytest.mark.slow
def test_a_script_written_for_nanogpts_model_runs_with_nanogpt_model_py(corpus, tmp_path):
    train(**SHORT_RUN | dict(eval_tokens=20 * T), dataset=corpus, out_dir=tmp_path / "run")
    home = changed(tmp_path / "copy", {})
    shutil.copy(ROOT / "docs" / "nanogpt_model.py", home)
    page = block_with("from nanogpt_model import")
    names = dict(val=corpus / "val_000000.bin", source=tmp_path / "run", page=page)
    script = home / "script.py"
    script.write_text(SCRIPT.format(**names))
    result = finish(start(str(script), cwd=tmp_path, only_torch=True))
    assert result.code == 0, result.err
    val_loss = column(tmp_path / "run", "eval", "val_loss")[-1]
    assert float(result.out) == pytest.approx(val_loss, abs=1e-5)
