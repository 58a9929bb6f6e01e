"""Begin runs with other weights: nanoGPT's, Hugging Face's, another run's."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from char_dataset import (
    LETTERS,
    SHORT_RUN,
    T,
    files,
    sample,
    write_letters,
    write_nanogpts_checkpoint,
)
from hf_reference import random_gpt2
from program import Run, checkpoint, checkpoints, column, run, train

# the form of nanoGPT's own config files: products, imports, strings made at run time
NANOGPTS_CONFIG = """
import time
out_dir = 'out-letters'
eval_interval = 4 # often, because this overfits
eval_iters = 5
log_interval = 1
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_project = 'letters'
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


def test_a_nanogpt_checkpoint_can_be_sampled_exported_evaluated_and_fine_tuned(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data = write_letters(Path("nanoGPT/data/letters"))
    ckpt = write_nanogpts_checkpoint(Path("nanoGPT/out-letters/ckpt.pt"))
    Path("letters.py").write_text(NANOGPTS_CONFIG)
    greedy = ("--start=abc", "--temperature=0", "--num_samples=1", "--max_new_tokens=20")
    text = sample("--out_dir=nanoGPT/out-letters", *greedy)
    assert sample(f"--init_from={ckpt}", *greedy) == text

    assert run("convert.py", "ckpt-to-hf", ckpt, "hf").code == 0
    expected = loss_by_transformers(Path("hf"), np.fromfile(data / "val.bin", "<u2"))

    before = files(tmp_path)
    where = (f"--dataset={data}", f"--init_from={ckpt}", "--out_dir=tuned")
    evaluation = ("--eval_only=True", f"--eval_tokens={20 * T}")
    result = run("train.py", "letters.py", *where, *evaluation)
    assert result.code == 0, result.err
    # the program computes GPT-2's GELU, as transformers does; nanoGPT's would move the loss by less
    # than this tolerance
    assert evaluation_in(result.out) == pytest.approx(expected, abs=1e-4)
    assert files(tmp_path) == before  # an evaluation writes nothing

    result = run("train.py", "letters.py", *where)
    assert result.code == 0, result.err
    losses = column(Path("tuned"), "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.5
    state = checkpoint(Path("tuned"), 8)["model"]
    assert len(state["transformer.wte.weight"]) == len(LETTERS)  # new rows would be noise


def test_weights_keep_their_bias_and_padding_and_say_which_flags_to_type(tmp_path, monkeypatch):
    """Train with these flags, and resume with the same command, although a file says otherwise."""
    monkeypatch.chdir(tmp_path)
    data = write_letters(Path("letters"))
    ckpt = write_nanogpts_checkpoint(Path("nanoGPT/ckpt.pt"))
    Path("gpu.py").write_text(f"{NANOGPTS_CONFIG}bias = True\npad_vocab_multiple = 128\n")
    where = ("gpu.py", f"--dataset={data}", f"--init_from={ckpt}", "--out_dir=more")
    result = run("train.py", *where, "--max_iters=4")
    asked = re.findall(r"you asked for .*Give (--\S+), or", result.err)
    assert (result.code, asked) == (2, ["--bias=False", "--pad_vocab_multiple=1"])
    for its in (4, 6):  # the second launch resumes the first
        result = run("train.py", *where, *asked, f"--max_iters={its}")
        assert result.code == 0, result.err
    assert column(Path("more"), "start", "config")[-1]["bias"] is False


def test_a_hugging_face_model_can_be_evaluated_fine_tuned_and_exported(corpus, tmp_path):
    random_gpt2(tmp_path / "hf", n_positions=2 * T, vocab_size=61)
    val = np.fromfile(corpus / "val_000000.bin", "<u2")[512:]
    before = loss_by_transformers(tmp_path / "hf", val)

    # the sizes come from the weights, except for a shorter context
    names = ("n_layer", "n_head", "n_embd")
    given = {name: value for name, value in SHORT_RUN.items() if name not in names}
    given |= dict(dataset=corpus, init_from=tmp_path / "hf", eval_tokens=20 * T)
    result = train(**given, out_dir=tmp_path / "none", eval_only=True)
    assert evaluation_in(result.out) == pytest.approx(before, abs=1e-4)
    assert not (tmp_path / "none").exists()

    train(**given, out_dir=tmp_path / "tuned")
    losses = column(tmp_path / "tuned", "eval", "val_loss")
    assert losses[0] == pytest.approx(before, abs=1e-5)
    assert losses[-1] < before - 0.5
    result = run("convert.py", "ckpt-to-hf", tmp_path / "tuned", tmp_path / "tuned-hf")
    assert result.code == 0, result.err
    # the export is of the best evaluation; transformers adds float32 in a different order
    after = loss_by_transformers(tmp_path / "tuned-hf", val)
    assert after == pytest.approx(min(losses), abs=1e-5)


def test_a_new_run_can_start_from_another_runs_weights(gpt2, letters, tmp_path):
    other = write_letters(tmp_path / "other")
    given = SHORT_RUN | dict(learning_rate=1e-3, dropout=0.1, max_iters=4)
    before = files(gpt2)
    train(**given, dataset=other, init_from=gpt2, out_dir=tmp_path / "tuned")
    assert column(tmp_path / "tuned", "eval", "iter") == [0, 4]
    assert column(tmp_path / "tuned", "step", "lr")[0] < 1e-3  # warms up again
    newest = column(gpt2, "eval", "val_loss")[-1]
    assert column(tmp_path / "tuned", "eval", "val_loss")[0] == pytest.approx(newest, abs=1e-6)
    assert checkpoint(tmp_path / "tuned", 4)["optimizer"]["state"][0]["step"] == 4
    assert files(gpt2) == before
    # the new run is resumed like any other
    given |= dict(max_iters=6)
    train(**given, dataset=other, init_from="resume", out_dir=tmp_path / "tuned")
    assert checkpoints(tmp_path / "tuned") == [4, 6]
