"""
convert.py: the same logits on either side, judged by transformers; files of strangers are read,
never run.
"""

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import load, run_here, run_process, write_dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import convert
import sample
from common.console import UserError
from data.tokenizer import gpt2_bpe
from model import GPT, GPTConfig
from training import checkpoint
from training.build import build_model

SIZES = dict(block_size=16, n_layer=2, n_head=2, n_embd=32)


def random_gpt(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(SIZES, vocab_size=128) | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)  # biases and norms too
    return model


def random_gpt2(folder: Path, **changes) -> GPT2LMHeadModel:
    """transformers' GPT-2 with weights far from their initial ones, saved to `folder`."""
    torch.manual_seed(0)
    config = GPT2Config(
        **dict(n_positions=16, n_layer=2, n_head=2, n_embd=32, vocab_size=128) | changes
    )
    reference = GPT2LMHeadModel(config).eval()
    for parameter in reference.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    return reference


def save(model: GPT, path: Path, vocab: int, tokenizer: str = "byte") -> Path:
    checkpoint.save(
        dict(
            model=model.state_dict(),
            model_config=asdict(model.config),
            vocab=vocab,
            tokenizer=dict(kind=tokenizer),
        ),
        path,
    )
    return path


def loaded(path: Path, block_size: int | None = None) -> GPT:
    state = convert.load_pretrained(str(path), block_size)
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def assert_same_logits(ours: GPT, reference, vocab: int, tolerance: float = 1e-4) -> None:
    """1e-4: fp32 rounding of logits of size 10 over a few layers, with room."""
    idx = torch.randint(
        vocab, (2, ours.config.block_size), generator=torch.Generator().manual_seed(0)
    )
    difference = ours(idx)[..., :vocab] - reference(idx).logits
    assert difference.abs().max() < tolerance


# -----------------------------------------------------------------------------
# To Hugging Face


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vocab", [128, 100])  # 100: 28 padded rows
def test_an_exported_model_gives_the_same_logits(tmp_path, script, tie_weights, bias, vocab):
    model = random_gpt(tie_weights=tie_weights, bias=bias)
    code, _, err = script(
        convert.main, "ckpt-to-hf", save(model, tmp_path / "x.pt", vocab), tmp_path / "hf"
    )
    assert (code, err) == (0, [])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert (
        exported.config.vocab_size == vocab and exported.config.tie_word_embeddings == tie_weights
    )
    assert_same_logits(model, exported, vocab)
    assert_same_logits(loaded(tmp_path / "hf"), exported, vocab)  # and back


def test_a_run_becomes_a_folder_that_transformers_loads(dataset, tmp_path):
    assert run_here(dataset, tmp_path / "run", max_iters=4, eval_interval=4) == 0
    code, out, err = run_process(
        "convert.py", "ckpt-to-hf", str(tmp_path / "run"), str(tmp_path / "hf")
    )
    assert code == 0 and "no tokenizer files" in out, err
    state = load(tmp_path / "run", 4)
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    assert_same_logits(model, exported, 64)
    assert exported.config.vocab_size == 64 and model.config.vocab_size == 128


def test_the_fast_model_is_sampled_and_cropped_but_not_exported(tmp_path, script):
    model = build_model(
        GPTConfig(**SIZES, vocab_size=128, bias=False, tie_weights=False, model="fast")
    )
    path = save(model, tmp_path / "fast.pt", 128)
    code, out, err = script(convert.main, "ckpt-to-hf", path, tmp_path / "hf")
    assert (code, out, len(err)) == (2, "", 1) and "Hugging Face has no architecture" in err[0]
    assert not (tmp_path / "hf").exists()
    assert (
        script(
            sample.main,
            f"--init_from={path}",
            "--max_new_tokens=20",
            "--num_samples=2",
            "--device=cpu",
        )[0]
        == 0
    )
    assert convert.load_pretrained(str(path), block_size=7)["model_config"]["block_size"] == 7


def test_gpt2s_tokenizer_goes_with_the_weights(tmp_path, script):
    try:
        bpe = gpt2_bpe()
    except UserError as error:
        pytest.skip(str(error))
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    assert (
        script(
            convert.main,
            "ckpt-to-hf",
            save(model, tmp_path / "x.pt", 50257, "gpt2"),
            tmp_path / "hf",
        )[0]
        == 0
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "It's naïve:  a café — 12345 tokens,\n\n\tand ✓ <tags>."
    assert tokenizer(text).input_ids == bpe.encode_ordinary(text)
    assert tokenizer.decode(bpe.encode_ordinary(text)) == text
    assert tokenizer.eos_token_id == bpe.eot_token and tokenizer.model_max_length == 16
    # another model in the same place must not keep it
    assert (
        script(
            convert.main, "ckpt-to-hf", save(random_gpt(), tmp_path / "y.pt", 128), tmp_path / "hf"
        )[0]
        == 0
    )
    assert not (tmp_path / "hf" / "vocab.json").exists()


def test_without_gpt2s_files_the_weights_are_written_and_the_rest_said(
    tmp_path, script, monkeypatch
):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda url: 1 / 0)
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    code, out, _ = script(
        convert.main, "ckpt-to-hf", save(model, tmp_path / "x.pt", 50257, "gpt2"), tmp_path / "hf"
    )
    assert code == 0 and "tokenizer: GPT-2's files are not here" in out
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]


# -----------------------------------------------------------------------------
# From Hugging Face


@pytest.mark.parametrize("tied", [True, False])
def test_an_imported_model_gives_the_same_logits(tmp_path, script, tied):
    reference = random_gpt2(tmp_path / "hf", tie_word_embeddings=tied)
    code, out, err = script(convert.main, "hf-to-ckpt", tmp_path / "hf", tmp_path / "x.pt")
    assert (code, err) == (0, []) and "tokenizer: not known" in out
    assert_same_logits(loaded(tmp_path / "x.pt"), reference, 128)
    torch.load(tmp_path / "x.pt", weights_only=True)


def test_the_hubs_own_gpt2_layout_is_read(tmp_path):
    """openai-community/gpt2: names without "transformer.", causal masks among them, no lm_head."""
    reference = random_gpt2(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()
    }
    weights.pop("lm_head.weight", None)
    for i in range(2):
        weights[f"h.{i}.attn.bias"] = torch.ones(16, 16).tril().view(1, 1, 16, 16)
        weights[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, file, metadata={"format": "pt"})
    assert_same_logits(loaded(tmp_path / "hf"), reference, 128)


def test_weights_in_several_files_are_read(tmp_path):
    reference = random_gpt2(tmp_path / "hf")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same_logits(loaded(tmp_path / "shards"), reference, 128)


def test_block_size_is_cropped_and_never_stretched(tmp_path):
    reference = random_gpt2(tmp_path / "hf")
    cropped = loaded(tmp_path / "hf", block_size=7)
    assert cropped.config.block_size == 7 and cropped.transformer.wpe.weight.shape == (7, 32)
    assert_same_logits(cropped, reference, 128)
    with pytest.raises(UserError, match="has 16 positions"):
        loaded(tmp_path / "hf", block_size=17)


def test_a_padded_or_plain_gpt2_vocabulary_is_recognised(tmp_path):
    random_gpt2(tmp_path / "hf", vocab_size=50257, n_embd=8, n_layer=1)
    state = convert.load_pretrained(str(tmp_path / "hf"))
    assert (state["model_config"]["vocab_size"], state["vocab"]) == (50257, 50257)


def test_the_hub_out_of_reach_is_one_line(tmp_path):
    code, _, err = run_process(
        "convert.py",
        "hf-to-ckpt",
        "gpt2",
        str(tmp_path / "x.pt"),
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path),
    )
    assert code == 2 and len(err.splitlines()) == 1 and "gpt2: cannot be fetched" in err


# -----------------------------------------------------------------------------
# From nanoGPT


def nanogpt_checkpoint(path: Path, **changes) -> GPT2LMHeadModel:
    """nanoGPT's ckpt.pt of a compiled model with exact GELU, and the same model in transformers."""
    reference = random_gpt2(path.parent / "hf", activation_function="gelu")
    weights = {}
    for name, tensor in reference.state_dict().items():
        weights[f"_orig_mod.{name}"] = (
            tensor.t().contiguous() if name.endswith(convert.TRANSPOSED) else tensor
        )
    weights |= {
        f"_orig_mod.transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)
    }
    state = dict(
        model=weights,
        optimizer=dict(state={}, param_groups=[]),
        iter_num=7,
        best_val_loss=torch.tensor(3.5),
        model_args=dict(
            n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True, vocab_size=128, dropout=0.0
        ),
        config=dict(dataset="shakespeare", out_dir="out"),
    )
    torch.save(state | changes, path)
    return reference


def test_nanogpts_checkpoint_is_read_within_its_gelu(tmp_path, script):
    reference = nanogpt_checkpoint(tmp_path / "ckpt.pt")
    code, out, err = script(
        convert.main, "nanogpt-to-ckpt", tmp_path / "ckpt.pt", tmp_path / "x.pt"
    )
    assert (code, err) == (0, []) and "up to 1e-3" in out
    model = loaded(tmp_path / "x.pt")
    assert_same_logits(
        model, reference, 128, tolerance=1e-2
    )  # these weights are far larger than trained ones
    for block in model.transformer.h:
        block.mlp.gelu = torch.nn.GELU()
    assert_same_logits(model, reference, 128)  # with nanoGPT's own GELU: the same function


def test_nanogpts_characters_come_with_it(tmp_path, monkeypatch, script):
    nanogpt_checkpoint(tmp_path / "ckpt.pt")
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)
    itos = {i: chr(i) for i in range(128)}
    (folder / "meta.pkl").write_bytes(
        pickle.dumps(dict(vocab_size=128, itos=itos, stoi={c: i for i, c in itos.items()}))
    )
    monkeypatch.chdir(tmp_path)
    assert script(convert.main, "nanogpt-to-ckpt", "ckpt.pt", "x.pt")[0] == 0
    assert checkpoint.load(Path("x.pt"))["tokenizer"] == dict(
        kind="char", itos=[chr(i) for i in range(128)]
    )


# -----------------------------------------------------------------------------
# Files of strangers


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "spec",
    ["foo", 3, dict(kind="bpe"), dict(kind="char", itos=["a"]), dict(kind="char", itos=[1] * 128)],
)
def test_a_tokenizer_that_is_none_counts_as_unknown(tmp_path, script, spec):
    random_gpt2(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(tokenizer_spec=spec)))
    code, out, err = script(convert.main, "hf-to-ckpt", tmp_path / "hf", tmp_path / "x.pt")
    assert (code, err) == (0, []) and "tokenizer: not known" in out


@pytest.mark.parametrize("name", ["ckpt.pt", "meta.pkl", "ours.pt"])
def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch, script, name):
    monkeypatch.chdir(tmp_path)
    if name == "ckpt.pt":
        nanogpt_checkpoint(tmp_path / "ckpt.pt", config=dict(dataset=Payload()))
    else:
        nanogpt_checkpoint(tmp_path / "ckpt.pt")
        (tmp_path / "data" / "shakespeare").mkdir(parents=True)
        (tmp_path / "data" / "shakespeare" / "meta.pkl").write_bytes(
            pickle.dumps(dict(vocab_size=128, itos=Payload()))
        )
    if name == "ours.pt":
        checkpoint.save(dict(model_config=Payload()), tmp_path / "ckpt.pt")
    code, _, err = script(convert.main, "nanogpt-to-ckpt", "ckpt.pt", "x.pt")
    assert code == 2 and len(err) == 1
    assert not Path("executed").exists() and not Path("x.pt").exists()


def test_bad_input_is_one_line_each_and_exit_2(tmp_path, script):
    random_gpt2(tmp_path / "good")

    def folder(name: str, **config) -> Path:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return tmp_path / name

    cut, missing, torn = folder("cut"), folder("missing"), folder("torn")
    (cut / "model.safetensors").write_bytes(
        (tmp_path / "good" / "model.safetensors").read_bytes()[:-100]
    )
    (missing / "model.safetensors").unlink()
    (torn / "config.json").write_text('{"model_type": "gp')
    for name, content in (("text.pt", b"hello"), ("empty.pt", b""), ("other.pt", None)):
        torch.save(dict(a=1), tmp_path / name) if content is None else (
            tmp_path / name
        ).write_bytes(content)
    flipped = save(random_gpt(), tmp_path / "flipped.pt", 128)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    taken = save(random_gpt(), tmp_path / "taken.pt", 128)

    shardless = folder("shardless")
    (shardless / "model.safetensors.index.json").write_text("{}")
    nanogpt_checkpoint(
        tmp_path / "typed.pt",
        model_args=dict(n_layer="2", n_head=2, n_embd=32, block_size=16, vocab_size=128),
    )
    nanogpt_checkpoint(tmp_path / "listed.pt", model=[1, 2])
    model = random_gpt()
    for name, changes in (
        ("heads", dict(model_config=asdict(model.config) | dict(n_head=3))),
        ("layers", dict(model_config=asdict(model.config) | dict(n_layer=10**9))),
        ("config", dict(model_config=None)),
        ("vocabulary", dict(vocab=129)),
        ("weights", dict(model=dict(a="b"))),
    ):
        state = dict(
            model=model.state_dict(),
            model_config=asdict(model.config),
            vocab=128,
            tokenizer=dict(kind="byte"),
        )
        checkpoint.save(state | changes, tmp_path / f"{name}.pt")

    out = tmp_path / "out.pt"
    for mode, source, word, target in (
        ("hf-to-ckpt", folder("llama", model_type="llama"), "'llama'", out),
        ("hf-to-ckpt", folder("relu", activation_function="relu"), "activation_function", out),
        ("hf-to-ckpt", folder("wide", n_inner=99), "n_inner", out),
        ("hf-to-ckpt", folder("cross", add_cross_attention=True), "add_cross_attention", out),
        ("hf-to-ckpt", folder("sizeless", n_layer="two"), "n_layer", out),
        ("hf-to-ckpt", folder("deeper", n_layer=3), "has no transformer.h.2", out),
        ("hf-to-ckpt", folder("shallower", n_layer=1), "which the model has not", out),
        ("hf-to-ckpt", folder("longer", n_positions=32), "wpe.weight is (16, 32)", out),
        ("hf-to-ckpt", cut, "cut short", out),
        ("hf-to-ckpt", missing, "has no model.safetensors", out),
        ("hf-to-ckpt", torn, "JSON", out),
        ("hf-to-ckpt", tmp_path / "nowhere", "no such file", out),
        ("hf-to-ckpt", tmp_path / "good", "exists", taken),
        ("hf-to-ckpt", tmp_path / "good", "end with .pt", tmp_path / "name"),
        (
            "hf-to-ckpt",
            tmp_path / "good",
            "name of a run's",
            tmp_path / "ckpt-00000001.pt",
        ),  # nothing to resume from
        ("nanogpt-to-ckpt", tmp_path / "text.pt", "text.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "empty.pt", "empty.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "other.pt", "neither", out),
        ("hf-to-ckpt", shardless, "names no files", out),
        ("hf-to-ckpt", folder("headless", n_head=3), "does not divide", out),
        ("nanogpt-to-ckpt", tmp_path / "typed.pt", "not a model", out),
        ("nanogpt-to-ckpt", tmp_path / "listed.pt", "not a model", out),
        (
            "ckpt-to-hf",
            tmp_path / "heads.pt",
            "n_head 3 does not divide n_embd 32",
            tmp_path / "exported",
        ),
        ("ckpt-to-hf", tmp_path / "layers.pt", "fewer than n_layer", tmp_path / "exported"),
        ("ckpt-to-hf", tmp_path / "config.pt", "not a model", tmp_path / "exported"),
        ("ckpt-to-hf", tmp_path / "vocabulary.pt", "its vocabulary is 129", tmp_path / "exported"),
        ("ckpt-to-hf", tmp_path / "weights.pt", "fewer than n_layer", tmp_path / "exported"),
        ("ckpt-to-hf", flipped, "checksum", tmp_path / "exported"),
        ("ckpt-to-hf", tmp_path / "nowhere.pt", "no such", tmp_path / "exported"),
        ("ckpt-to-hf", tmp_path, "holds neither", tmp_path / "exported"),
        ("ckpt-to-hf", taken, "cannot be written", tmp_path / "text.pt"),
    ):
        code, _, err = script(convert.main, mode, source, target)
        assert code == 2 and len(err) == 1 and err[0].startswith("error: ") and word in err[0], (
            source,
            err,
        )
    assert not out.exists() and not (tmp_path / "exported").exists()
    assert script(convert.main, "hf-to-gguf", "a", "b")[0] == 2
    assert script(convert.main)[0] == 2


# -----------------------------------------------------------------------------
# GPT-2 as the baseline


@torch.no_grad()
def test_gpt2_on_ones_own_validation_split_is_transformers_loss(tmp_path):
    data = write_dataset(tmp_path / "data", [1000], val_tokens=40 * 16 + 1)
    reference = random_gpt2(tmp_path / "hf", vocab_size=64)
    code, out, err = run_process(
        "train.py",
        "config/eval_gpt2.py",
        f"--init_from={tmp_path / 'hf'}",
        f"--dataset={data}",
        f"--out_dir={tmp_path / 'run'}",
        "--device=cpu",
        "--dtype=float32",
    )
    assert code == 0 and not (tmp_path / "run").exists(), err
    idx = torch.from_numpy(
        np.fromfile(data / "val_000000.bin", dtype=np.uint16, offset=1024).astype(np.int64)
    )
    logits = reference(idx[:-1].view(40, 16)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), idx[1:])
    assert f"val loss {expected:.4f}" in out
