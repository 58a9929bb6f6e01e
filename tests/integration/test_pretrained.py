"""Begin runs with other weights: nanoGPT's, a hub model's, another run's."""

import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from char_dataset import LETTERS, SHORT_RUN, T, sample, write_letters, write_nanogpts_checkpoint
from hf_reference import own_bpe, random_gpt2
from program import Run, run, train, unchanged

# the form of nanoGPT's own config files: products, imports, strings made at run time
NANOGPTS_CONFIG = """
import time
out_dir = 'out-letters'
eval_interval = 4 # often, because this overfits
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_run_name = 'mini-' + str(time.time())
dataset = 'letters'
gradient_accumulation_steps = 1 * 2
batch_size = 4
block_size = 16
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.2
learning_rate = 1e-2
max_iters = 8
lr_decay_iters = 8 # make equal to max_iters usually
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 2
device = 'cpu'
compile = False
dtype = 'float32'
"""


def loss_by_transformers(folder: Path, ids: np.ndarray) -> float:
    """Return transformers' mean loss of an exported model over whole windows of T tokens."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    count = (len(ids) - 1) // T
    windows = torch.from_numpy(ids.astype(np.int64))
    x = windows[: count * T].view(count, T)
    y = windows[1 : count * T + 1].view(count, T)
    with torch.no_grad():
        logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def evaluation_in(out: str) -> float:
    (loss,) = re.findall(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", out, re.MULTILINE)
    return float(loss)


def test_nanogpts_config_and_data_folder_train_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_letters(Path("data/letters"))
    Path("letters.py").write_text(NANOGPTS_CONFIG)
    result = run("train.py", "letters.py")
    assert result.code == 0, result.err
    ended = Run("out-letters")
    (config,) = ended.column("start", "config")
    assert (config["tracker"], config["dropout"]) == ("none", 0.2)
    assert ended.evals("iter") == [0, 4, 8]
    assert ended.column("start", "tokenizer")[0].startswith("char")  # of single characters
    (text,) = sample("letters.py", "--start=abc", "--num_samples=1", "--max_new_tokens=9")
    assert text.startswith("abc") and set(text) <= set(LETTERS)


def test_weights_can_be_sampled_evaluated_fine_tuned_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_letters(Path("nanoGPT/data/letters"))
    weights = write_nanogpts_checkpoint(Path("nanoGPT/out-letters/ckpt.pt"))
    greedy = ("--start=abc", "--temperature=0", "--num_samples=1", "--max_new_tokens=20")
    text = sample("--out_dir=nanoGPT/out-letters", *greedy)
    assert sample(f"--init_from={weights}", *greedy) == text
    assert run("convert.py", weights, "hf").code == 0
    val = np.fromfile(data / "val.bin", "<u2")
    before = loss_by_transformers(Path("hf"), val)

    # the sizes come from the weights, except for a shorter context
    names = ("n_layer", "n_head", "n_embd")
    keys = {name: value for name, value in SHORT_RUN.items() if name not in names}
    keys |= dict(dataset=data, init_from=weights, eval_tokens=20 * T)
    with unchanged(tmp_path):
        out = train(**keys, out_dir="tuned", eval_only=True).out
    # GPT-2's GELU, as transformers computes it; nanoGPT's would move the loss by less than this
    assert evaluation_in(out) == pytest.approx(before, abs=1e-4)

    train(**keys, out_dir="tuned")
    ran = Run("tuned")
    losses = ran.evals("val_loss")
    assert losses[0] == pytest.approx(before, abs=1e-5)
    assert losses[-1] < before - 0.5
    # new rows would be noise
    assert len(ran.state()["model"]["transformer.wte.weight"]) == len(LETTERS)
    assert run("convert.py", "tuned", "tuned-hf").code == 0
    # the export is of the best evaluation; transformers adds float32 in a different order
    after = loss_by_transformers(Path("tuned-hf"), val)
    assert after == pytest.approx(min(losses), abs=1e-5)


def test_a_hub_model_is_evaluated_fine_tuned_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_gpt2(Path("hub"), n_positions=2 * T, vocab_size=own_bpe().get_vocab_size())
    Path("my.txt").write_text("the cat sat on the mat, that is where it sat\n" * 200)
    words = ("my.txt", "--tokenizer=hub/tokenizer.json", "--val_fraction=0.3")
    assert run("data/prepare_text.py", *words).code == 0
    keys = {name: value for name, value in SHORT_RUN.items() if not name.startswith("n_")}
    keys |= dict(dataset="my", init_from="hub", eval_tokens=10**6, bias=True, out_dir="tuned")
    val = np.fromfile(next(Path("data/my").glob("val_*.bin")), "<u2")[512:]
    before = loss_by_transformers(Path("hub"), val)
    assert evaluation_in(train(**keys, eval_only=True).out) == pytest.approx(before, abs=1e-4)
    greedy = ("--start=the cat", "--num_samples=1", "--max_new_tokens=5", "--temperature=0")
    text = run("sample.py", "--init_from=hub", "--device=cpu", *greedy).out
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("hub").eval()
    prompt = torch.tensor([own_bpe().encode("the cat").ids])
    ids = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    assert own_bpe().decode(ids.tolist()) in text
    train(**keys)
    assert Run("tuned").evals("val_loss")[-1] < before - 0.5
    assert run("convert.py", "tuned", "tuned-hf").code == 0
    exported = tokenizers.Tokenizer.from_file("tuned-hf/tokenizer.json")
    assert exported.get_vocab() == own_bpe().get_vocab()


def test_weights_keep_their_bias_and_padding_and_say_which_flags_to_type(tmp_path, monkeypatch):
    """Train with these flags, and resume with the same command, although a file says otherwise."""
    monkeypatch.chdir(tmp_path)
    data = write_letters(Path("letters"))
    ckpt = write_nanogpts_checkpoint(Path("nanoGPT/ckpt.pt"))
    Path("gpu.py").write_text(f"{NANOGPTS_CONFIG}bias = True\npad_vocab_multiple = 128\n")
    where = ("gpu.py", f"--dataset={data}", f"--init_from={ckpt}", "--out_dir=more")
    result = run("train.py", *where, "--max_iters=4")
    (asked,) = (words.split() for words in re.findall(r"give .*, or (--.*)", result.err))
    assert (result.code, asked) == (1, ["--bias=False", "--pad_vocab_multiple=1"])
    for its in (4, 6):  # the second launch resumes the first
        result = run("train.py", *where, *asked, f"--max_iters={its}")
        assert result.code == 0, result.err
    assert Run("more").column("start", "config")[-1]["bias"] is False


def test_a_new_run_can_start_from_another_runs_weights(letters, tmp_path):
    gpt2 = tmp_path / "gpt2"
    train(**SHORT_RUN, dataset=letters, out_dir=gpt2, bias=True, tie_weights=False)
    other, ran = write_letters(tmp_path / "other"), Run(tmp_path / "tuned")
    given = SHORT_RUN | dict(learning_rate=1e-3, dropout=0.1, dataset=other, out_dir=ran.out_dir)
    with unchanged(gpt2):
        train(**given | dict(max_iters=4), init_from=gpt2)
    assert ran.evals("iter") == [0, 4]
    assert ran.steps("lr")[0] < 1e-3  # warms up again
    newest = Run(gpt2).evals("val_loss")[-1]
    assert ran.evals("val_loss")[0] == pytest.approx(newest, abs=1e-6)
    assert ran.state()["optimizer"]["state"][0]["step"] == 4
    # the new run is resumed like any other
    train(**given | dict(max_iters=6), init_from="resume")
    assert ran.saved == [4, 6]
