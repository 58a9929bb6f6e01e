"""
Use what nanoGPT's users bring along: checkpoints with meta.pkl, and code. test_pretrained.py trains
from nanoGPT's config files and checkpoints.
"""

import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch
from char_dataset import write_letters, write_nanogpts_checkpoint
from doc_pages import block_with
from hf_reference import random_gpt2
from program import ROOT, Run, flags, refused, run, stopped, train

from data.tokenizer import Tokenizer
from run.pretrained import load_pretrained

TINY = dict(n_layer=1, max_iters=2, eval_interval=2, eval_tokens=64)


def test_the_same_command_resumes_a_run_that_began_from_weights(tiny, tmp_path, monkeypatch):
    """
    Resume however the run ended, even if another command resumed it in between, as nanoGPT's users
    do, and say from which weights the run began. --eval_only evaluates those weights. Other weights
    are refused. The head keeps its 61 rows, instead of padding them to 128.
    """
    monkeypatch.chdir(tmp_path)
    write_nanogpts_checkpoint(tmp_path / "hf", vocab=61)
    command = tiny | dict(n_layer=2, out_dir="run", max_iters=8, init_from="hf")
    out = stopped(1, **command).out
    assert "weights: hf" in out
    untouched = train(**command, eval_only=True).out
    assert "weights: hf" in untouched and "resume:" not in untouched

    for rate, way in ((0.002, dict(init_from="resume")), (0.002, dict(init_from="scratch"))):
        out = stopped(1, **command | dict(learning_rate=rate) | way).out
        assert re.search("^resume: .*; the run began from hf$", out, re.MULTILINE)
        assert ("resume: learning_rate = 0.002 (was" in out) == (way["init_from"] == "resume")
        assert "resume: init_from" not in out
    train(**command)
    assert len(Run(tmp_path / "run").state(8)["model"]["lm_head.weight"]) == 61
    refused(run("train.py", *flags(**command | dict(init_from="gpt2"))), "another --out_dir")
    refused(run("train.py", *flags(**command | dict(learning_rate=1e-5))), "another --out_dir")
    assert "complete after 8 iterations (max_iters = 8)" in train(**command).out


# -----------------------------------------------------------------------------
# nanoGPT's folder: out-NAME/ckpt.pt, and the characters in data/NAME/meta.pkl


@pytest.fixture
def nanogpt(tmp_path) -> Path:
    """Create nanoGPT's folders, with a dataset and a checkpoint of 61 characters."""
    write_letters(tmp_path / "data" / "letters")
    return write_nanogpts_checkpoint(tmp_path / "out-letters" / "ckpt.pt").parent


SHORT = ("--start=tobe", "--num_samples=1", "--max_new_tokens=8", "--device=cpu")


@pytest.mark.parametrize("given", ["--out_dir={}", "--init_from={}", "--init_from={}/ckpt.pt"])
def test_a_nanogpt_checkpoint_is_sampled_with_the_characters_in_its_meta_pkl(given, nanogpt):
    result = run("sample.py", given.format(nanogpt), *SHORT)
    assert result.code == 0 and result.out.startswith("tobe")
    assert "iteration 500, val loss 2.5000" in result.err


def test_sampling_without_meta_pkl_is_refused_until_it_is_moved_beside_ckpt_pt(nanogpt):
    table = (nanogpt.parent / "data" / "letters" / "meta.pkl").rename(nanogpt / "kept.pkl")
    refused(run("sample.py", f"--out_dir={nanogpt}", *SHORT), "meta.pkl beside the checkpoint")
    table.rename(nanogpt / "meta.pkl")
    assert run("sample.py", f"--out_dir={nanogpt}", *SHORT).code == 0


def test_meta_pkl_beside_a_nanogpt_checkpoint_is_used_even_if_its_size_is_gpt2s(tmp_path):
    path = write_nanogpts_checkpoint(tmp_path / "ckpt.pt", vocab=50257, width=8)
    assert load_pretrained(str(path)).tokenizer == dict(kind="gpt2")
    itos = {i: chr(0x4E00 + i) for i in range(50257)}
    meta = dict(vocab_size=50257, itos=itos, stoi={c: i for i, c in itos.items()})
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    state = load_pretrained(str(path))
    assert state.vocab == 50257
    assert Tokenizer(state.tokenizer).decode([0, 50256]) == itos[0] + itos[50256]


# -----------------------------------------------------------------------------
# Scripts written for nanoGPT, with docs/nanogpt_model.py


@pytest.fixture
def calls(monkeypatch):
    """Import docs/nanogpt_model.py as a script beside it would."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("nanogpt_model")


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_nanogpt_model_returns_logits_and_loss_for_batches_of_one_to_three(rows, calls):
    """Leave targets of -1 out of the loss."""
    model = calls.GPT(calls.GPTConfig(8, 12, 1, 2, 16)).eval()
    idx = torch.zeros(rows, 5, dtype=torch.long)
    logits, loss = model(idx)
    assert logits.shape == (rows, 1, 12) and loss is None
    logits, loss = model(idx, idx)
    assert logits.shape == (rows, 5, 12) and loss.dim() == 0
    half = torch.cat((idx[:, :2], torch.full_like(idx[:, 2:], -1)), dim=1)
    expected = model(idx[:, :2], idx[:, :2])[1]
    assert model(idx, half)[1].item() == pytest.approx(expected.item(), abs=1e-6)


def test_calls_from_nanogpts_scripts_work_with_nanogpt_model(calls, tmp_path, monkeypatch):
    random_gpt2(tmp_path)
    monkeypatch.setattr("run.pretrained.fetch", lambda name: tmp_path)
    model = calls.GPT.from_pretrained("gpt2", dict(dropout=0.1))
    assert model.config.dropout == model.transformer.drop.p == 0.1
    idx = torch.randint(128, (2, 8))
    model = calls.GPT.from_pretrained("gpt2").eval()
    before, before_loss = model(idx, idx)
    model.crop_block_size(8)
    with pytest.raises(AssertionError):
        model.crop_block_size(16)
    assert model.config.block_size == 8 and torch.equal(model(idx, idx)[0], before)
    assert model.generate(idx, 4, top_k=None).shape == (2, 12)
    names = dict(source="gpt2", idx=idx, targets=idx)
    exec(block_with("from nanogpt_model import"), names)  # as the page calls it
    assert names["loss"].item() == pytest.approx(before_loss.item(), abs=1e-6)
    assert names["nothing"] is None and names["text"].shape == (2, 28)
    assert torch.allclose(names["last"], names["logits"][:, [-1]], atol=1e-5)
    # two layers of 12 C^2 weights and 13 C of biases and norms, the last norm, the tokens
    n = 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 128 * 32
    assert model.get_num_params() == n and model.get_num_params(False) == n + 8 * 32
    assert 0 < model.estimate_mfu(2, 1.0) < 1
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    decays = {group["weight_decay"]: group for group in optimizer.param_groups}
    assert {p.dim() for p in decays[0.1]["params"]} == {2} and len(decays[0.0]["params"]) > 0
    model(idx, idx)[1].backward()
    optimizer.step()
    assert not torch.equal(model(idx, idx)[0], before)
    assert calls.LayerNorm(4, False).bias is None and calls.LayerNorm(4, bias=True).eps == 1e-5
