"""
convert.py: the same logits on either side, judged by transformers; files of strangers are read,
never run.
"""

import json
import os
import pickle
import resource
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import load, run_here, run_process, write_dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
from weights import TRANSPOSED, as_transformers, assert_refused, random_gpt2

import convert
import sample
from common.console import UserError
from data.tokenizer import gpt2_bpe
from model import GPT, GPTConfig
from training import checkpoint
from training.build import build_model
from training.pretrained import load_pretrained

SIZES = dict(block_size=16, n_layer=2, n_head=2, n_embd=32)


def random_gpt(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(SIZES, vocab_size=128) | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)  # biases and norms too
    return model


def state_of(model: GPT, vocab: int, tokenizer: str = "byte") -> dict:
    return dict(
        model=model.state_dict(),
        model_config=asdict(model.config),
        vocab=vocab,
        tokenizer=dict(kind=tokenizer),
    )


def save(model: GPT, path: Path, vocab: int, tokenizer: str = "byte") -> Path:
    checkpoint.save(state_of(model, vocab, tokenizer), path)
    return path


def export(script, source: Path, folder: Path) -> str:
    """What ckpt-to-hf prints."""
    code, out, err = script(convert.main, "ckpt-to-hf", source, folder)
    assert (code, err) == (0, [])
    return out


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def loaded(path: Path, block_size: int | None = None) -> GPT:
    state = load_pretrained(str(path), block_size)
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def assert_same_logits(ours: GPT, reference, vocab: int, tolerance: float = 1e-4) -> None:
    """1e-4: fp32 rounding of logits of size 10 over a few layers, with room."""
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(vocab, (2, ours.config.block_size), generator=generator)
    difference = ours(idx)[..., :vocab] - reference(idx).logits
    assert difference.abs().max() < tolerance


# -----------------------------------------------------------------------------
# To Hugging Face


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vocab", [128, 100])  # 100: 28 padded rows
def test_an_exported_model_gives_the_same_logits(tmp_path, script, tie_weights, bias, vocab):
    model = random_gpt(tie_weights=tie_weights, bias=bias)
    export(script, save(model, tmp_path / "x.pt", vocab), tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert exported.config.vocab_size == vocab
    assert exported.config.tie_word_embeddings == tie_weights
    assert_same_logits(model, exported, vocab)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode & 0o044  # for colleagues too
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
    config = GPTConfig(**SIZES, vocab_size=128, bias=False, tie_weights=False, model="fast")
    path = save(build_model(config), tmp_path / "fast.pt", 128)
    words = ("Hugging Face has no architecture",)
    assert_refused(script, convert.main, "ckpt-to-hf", path, tmp_path / "hf", words=words)
    assert not (tmp_path / "hf").exists()
    short = ("--max_new_tokens=20", "--num_samples=2", "--device=cpu")
    assert script(sample.main, f"--init_from={path}", *short)[0] == 0
    assert load_pretrained(str(path), block_size=7)["model_config"]["block_size"] == 7


def test_gpt2s_tokenizer_goes_with_the_weights(tmp_path, script):
    try:
        bpe = gpt2_bpe()
    except UserError as error:
        pytest.skip(str(error))
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    export(script, save(model, tmp_path / "x.pt", 50257, "gpt2"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "It's naïve:  a café — 12345 tokens,\n\n\tand ✓ <tags>."
    assert tokenizer(text).input_ids == bpe.encode_ordinary(text)
    assert tokenizer.decode(bpe.encode_ordinary(text)) == text
    assert tokenizer.eos_token_id == bpe.eot_token and tokenizer.model_max_length == 16
    # another model in the same place must not keep it
    export(script, save(random_gpt(), tmp_path / "y.pt", 128), tmp_path / "hf")
    assert not (tmp_path / "hf" / "vocab.json").exists()


def test_without_gpt2s_files_the_weights_are_written_and_the_rest_said(
    tmp_path, script, monkeypatch
):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda url: 1 / 0)
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    out = export(script, save(model, tmp_path / "x.pt", 50257, "gpt2"), tmp_path / "hf")
    assert "tokenizer: cannot get GPT-2's files" in out
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]


def test_an_export_over_a_run_or_a_strangers_model_is_refused(dataset, tmp_path, script):
    """The run would be read from its export from then on, and a fine-tuned model would be lost."""
    path = save(random_gpt(), tmp_path / "x.pt", 128)
    run = tmp_path / "run"
    assert run_here(dataset, run, max_iters=4, eval_interval=4) == 0
    before = sorted(os.listdir(run))
    assert_refused(script, convert.main, "ckpt-to-hf", run, run, words=("holds a run",))
    assert sorted(os.listdir(run)) == before

    random_gpt2(tmp_path / "theirs")
    random_gpt2(tmp_path / "configless")
    (tmp_path / "configless" / "config.json").unlink()
    for folder in (tmp_path / "theirs", tmp_path / "configless"):
        before = (folder / "model.safetensors").read_bytes()
        words = ("did not write",)
        assert_refused(script, convert.main, "ckpt-to-hf", path, folder, words=words)
        assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "generation_config.json"])
def test_an_export_deletes_no_tokenizer_of_the_users(name, tmp_path, script, monkeypatch):
    path, theirs = save(random_gpt(), tmp_path / "x.pt", 128), tmp_path / "theirs"
    theirs.mkdir()
    (theirs / name).write_text("mine")
    monkeypatch.chdir(theirs)
    for folder, word in ((".", "did not write"), ("", "'' is no folder")):
        assert_refused(script, convert.main, "ckpt-to-hf", path, folder, words=(word,))
    assert os.listdir(theirs) == [name] and (theirs / name).read_text() == "mine"


def test_a_name_with_control_characters_forges_no_line(tmp_path, script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(random_gpt(), tmp_path / "x.pt", 128)
    code, out, _ = script(convert.main, "hf-to-ckpt", path, "a\nerror: forged\x1b[31m.pt")
    assert code == 0 and "\nerror" not in out and "\x1b" not in out


def test_an_export_over_an_older_one_leaves_none_of_it(tmp_path, script):
    folder = tmp_path / "hf"
    export(script, save(random_gpt(bias=False), tmp_path / "old.pt", 128), folder)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    names = ["tokenizer.json", "generation_config.json", "vocab.json"]
    for name in (*names, "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    new = random_gpt()
    export(script, save(new, tmp_path / "new.pt", 128), folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert_same_logits(loaded(folder), as_transformers(new), 128)


def test_one_whole_file_of_weights_is_preferred_to_an_index(tmp_path):
    """As transformers prefers it: the index may be left over from another model."""
    reference = random_gpt2(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map={"wte.weight": "model-00001-of-00001.safetensors"}))
    )
    assert_same_logits(loaded(tmp_path / "hf"), reference, 128)


def test_a_full_disk_is_one_line_and_leaves_the_older_export(tmp_path, script):
    folder = tmp_path / "hf"
    export(script, save(random_gpt(), tmp_path / "old.pt", 128), folder)
    (folder / "vocab.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    larger = save(random_gpt(n_embd=64), tmp_path / "new.pt", 128)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        words = ("cannot be written",)
        assert_refused(script, convert.main, "ckpt-to-hf", larger, folder, words=words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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
    state = load_pretrained(str(tmp_path / "hf"))
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
            tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
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
    edit_config(tmp_path / "hf", tokenizer_spec=spec)
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
    assert_refused(script, convert.main, "nanogpt-to-ckpt", "ckpt.pt", "x.pt")
    assert not Path("executed").exists() and not Path("x.pt").exists()


def test_bad_input_is_one_line_each_and_exit_2(tmp_path, script):
    random_gpt2(tmp_path / "good")

    def folder(name: str, **config) -> Path:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        edit_config(tmp_path / name, **config)
        return tmp_path / name

    cut, missing, torn = folder("cut"), folder("missing"), folder("torn")
    weights = (tmp_path / "good" / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:-100])
    (missing / "model.safetensors").unlink()
    (torn / "config.json").write_text('{"model_type": "gp')
    (tmp_path / "text.pt").write_bytes(b"hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(dict(a=1), tmp_path / "other.pt")
    flipped = save(random_gpt(), tmp_path / "flipped.pt", 128)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    taken = save(random_gpt(), tmp_path / "taken.pt", 128)

    shardless = folder("shardless")
    (shardless / "model.safetensors.index.json").write_text("{}")
    (shardless / "model.safetensors").unlink()
    typed = dict(n_layer="2", n_head=2, n_embd=32, block_size=16, vocab_size=128)
    nanogpt_checkpoint(tmp_path / "typed.pt", model_args=typed)
    nanogpt_checkpoint(tmp_path / "listed.pt", model=[1, 2])
    model = random_gpt()
    for name, changes in (
        ("heads", dict(model_config=asdict(model.config) | dict(n_head=3))),
        ("layers", dict(model_config=asdict(model.config) | dict(n_layer=10**9))),
        ("config", dict(model_config=None)),
        ("vocabulary", dict(vocab=129)),
        ("weights", dict(model=dict(a="b"))),
    ):
        checkpoint.save(state_of(model, 128) | changes, tmp_path / f"{name}.pt")

    out, exported, good = tmp_path / "out.pt", tmp_path / "exported", tmp_path / "good"
    for mode, source, word, target in (
        ("hf-to-ckpt", folder("llama", model_type="llama"), "'llama'", out),
        ("hf-to-ckpt", folder("relu", activation_function="relu"), "activation_function", out),
        ("hf-to-ckpt", folder("cross", add_cross_attention=True), "add_cross_attention", out),
        ("hf-to-ckpt", folder("sizeless", n_layer="two"), "n_layer", out),
        ("hf-to-ckpt", folder("deeper", n_layer=3), "has no transformer.h.2", out),
        ("hf-to-ckpt", folder("shallower", n_layer=1), "which the model does not have", out),
        ("hf-to-ckpt", folder("longer", n_positions=32), "wpe.weight is (16, 32)", out),
        ("hf-to-ckpt", cut, "cut short", out),
        ("hf-to-ckpt", missing, "model.safetensors: missing", out),
        ("hf-to-ckpt", torn, "JSON", out),
        ("hf-to-ckpt", tmp_path / "nowhere", "no such file", out),
        ("hf-to-ckpt", good, "exists", taken),
        ("hf-to-ckpt", good, "end with .pt", tmp_path / "name"),
        # there would be no run in it to resume
        ("hf-to-ckpt", good, "name of a run's", tmp_path / "ckpt-00000001.pt"),
        ("nanogpt-to-ckpt", tmp_path / "text.pt", "text.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "empty.pt", "empty.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "other.pt", "neither", out),
        ("hf-to-ckpt", shardless, "names no files", out),
        ("hf-to-ckpt", folder("headless", n_head=3), "does not divide", out),
        ("nanogpt-to-ckpt", tmp_path / "typed.pt", "not a model", out),
        ("nanogpt-to-ckpt", tmp_path / "listed.pt", "not a model", out),
        ("ckpt-to-hf", tmp_path / "heads.pt", "n_head 3 does not divide n_embd 32", exported),
        ("ckpt-to-hf", tmp_path / "layers.pt", "fewer weights than n_layer", exported),
        ("ckpt-to-hf", tmp_path / "config.pt", "not a model", exported),
        ("ckpt-to-hf", tmp_path / "vocabulary.pt", "its vocabulary is 129", exported),
        ("ckpt-to-hf", tmp_path / "weights.pt", "fewer weights than n_layer", exported),
        ("ckpt-to-hf", flipped, "checksum", exported),
        ("ckpt-to-hf", tmp_path / "nowhere.pt", "no such", exported),
        ("ckpt-to-hf", tmp_path, "no checkpoint or config.json", exported),
        ("ckpt-to-hf", taken, "cannot be written", tmp_path / "text.pt"),
    ):
        assert_refused(script, convert.main, mode, source, target, words=(word,))
    assert not out.exists() and not exported.exists()
    assert_refused(script, convert.main, "hf-to-gguf", "a", "b")
    assert_refused(script, convert.main)


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
