"""
Check convert.py: the same logits on either side, judged by transformers; folders that other
programs read; weights that do not fit. Bad command lines are in test_bad_input.py.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import torch
from hf_reference import own_bpe, random_gpt2, random_model
from program import ROOT, refused, run
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    pipeline,
)

from common.console import UserError
from data.tokenizer import same_tokenizer
from model import GPT, GPTConfig, generate
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from run.checkpoint import FORMAT
from run.pretrained import fetch, load_pretrained

SIZES = dict(block_size=16, n_layer=2, n_head=2, n_embd=32, vocab_size=128)


def random_gpt(**changes) -> GPT:
    return random_model(GPTConfig(**SIZES | changes))


def random_fast(**changes) -> FastGPT:
    return random_model(FastConfig(**SIZES | dict(block_size=256) | changes), std=1.0)


def save(model: GPT | FastGPT, path: Path, vocab: int = 128, kind: str = "byte", **spec) -> Path:
    """Save a checkpoint of the model with a tokenizer of this kind."""
    state = dict(model=model.state_dict(), model_config=config_to_dict(model.config), vocab=vocab)
    torch.save(state | dict(tokenizer=dict(kind=kind, **spec), format=FORMAT), path)
    return path


def convert(*arguments) -> str:
    """Return what convert.py prints; it must end with exit code 0."""
    result = run("convert.py", *arguments)
    assert result.code == 0, result.err
    return result.out


@torch.no_grad()
def assert_same_logits(ours: GPT | FastGPT, reference, vocab: int, tolerance: float = 1e-4) -> None:
    """
    Check that logits differ by less than `tolerance`. The default leaves room for float32 rounding
    in a few layers, with logits of about 10.
    """
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(vocab, (2, ours.config.block_size), generator=generator)
    difference = ours(idx)[..., :vocab] - reference(idx).logits
    assert difference.abs().max() < tolerance


# -----------------------------------------------------------------------------
# To Hugging Face


@pytest.mark.parametrize("tied, bias, vocab", [(True, False, 100), (False, True, 128)])
def test_an_exported_gpt2_model_gives_the_same_logits_in_transformers(tied, bias, vocab, tmp_path):
    """
    Export a model, tied or not, with or without biases; leave out 28 rows of padding for a
    vocabulary of 100.
    """
    model = random_gpt(tie_weights=tied, bias=bias)
    convert(save(model, tmp_path / "x.pt", vocab), tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert exported.config.vocab_size == vocab
    assert exported.config.tie_word_embeddings == tied
    assert_same_logits(model, exported, vocab)
    # a tied head is not written twice, and mlx-lm asks for the names in OpenAI's file
    names = {name.split(".")[0] for name in load_file(tmp_path / "hf/model.safetensors")}
    assert names == ({"wte", "wpe", "h", "ln_f"} if tied else {"transformer", "lm_head"})


def test_the_example_in_the_docs_generates_text_from_a_byte_level_export(tmp_path, monkeypatch):
    """
    Run the Python code of docs/sampling.md on a model with a context of 64, like README's first
    one.
    """
    monkeypatch.chdir(tmp_path)
    save(random_gpt(vocab_size=256, block_size=64), tmp_path / "x.pt", 256)
    convert("x.pt", "anna-hf")
    page = (ROOT / "docs" / "sampling.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*anna-hf.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["text"].startswith("The ")
    assert 4 < len(names["ids"]) <= 64
    assert names["model"].generation_config.eos_token_id == 0
    with pytest.raises(ValueError):  # rather than an empty GPT-2 tokenizer
        AutoTokenizer.from_pretrained("anna-hf")


TEXT = "the cat 's naïve:  café — 12345 tokens,\n\n\tand did n't ✓ <tags> ."


def test_exports_your_own_tokenizer_with_the_weights(tmp_path):
    """Give transformers a BPE tokenizer with the same ids, and other programs what they ask for."""
    bpe = own_bpe("</s>")
    vocab = bpe.get_vocab_size()
    path = save(random_gpt(vocab_size=384), tmp_path / "x.pt", vocab, "bpe", json=bpe.to_str())
    folder = tmp_path / "hf"
    assert "no files" not in convert(path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    bpe.no_truncation()
    ids = bpe.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer(TEXT).input_ids == ids
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == vocab
    assert tokenizer.eos_token == "</s>"
    # what other programs read; docs/sampling.md has results with llama.cpp and mlx-lm
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.model_max_length == config["n_positions"] == config["n_ctx"] == 16
    assert config["eos_token_id"] == config["bos_token_id"] == tokenizer.eos_token_id == 0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # transformers 4 has the class too; it would add token_type_ids, and GPT-2 their embeddings
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    # pipeline() asks for 256 new tokens unless the export has a length
    (answer,) = pipeline("text-generation", model=str(folder))("the cat")
    assert answer["generated_text"].startswith("the cat")


def test_exports_gpt2s_tokenizer_with_the_weights(gpt2_bpe, tmp_path):
    """Write tokenizer files that give tiktoken's ids."""
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    convert(save(model, tmp_path / "x.pt", 50257, "gpt2"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    ids = gpt2_bpe.encode_ordinary(TEXT)
    assert tokenizer(TEXT).input_ids == alone.encode(TEXT).ids == ids
    assert tokenizer.decode(ids) == alone.decode(ids) == TEXT
    assert tokenizer.eos_token_id == gpt2_bpe.eot_token
    assert tokenizer.model_max_length == 16
    # datasets of --tokenizer=gpt2 fit it, and those of another BPE do not
    spec = load_pretrained(str(tmp_path / "hf")).tokenizer
    assert same_tokenizer(spec, dict(kind="gpt2"))
    assert not same_tokenizer(spec, dict(kind="bpe", json=own_bpe().to_str()))


# -----------------------------------------------------------------------------
# A model.py that somebody has changed


def windowed(q, k, v, flash, scale, dropout=0.0):
    """Let no token see more than the 15 last ones."""
    seen = torch.ones(q.size(2), k.size(2)).tril().triu(-14).bool()
    return (q * scale @ k.mT).masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v


def test_refuses_to_export_a_model_that_transformers_could_not_reproduce(tmp_path):
    path = save(random_gpt(), tmp_path / "x.pt", 100)
    with mock.patch("model.attend", windowed):
        refused(run("convert.py", path, tmp_path / "hf"), "logits", "transformers' GPT-2")
    assert not (tmp_path / "hf").exists()


# -----------------------------------------------------------------------------
# The fast model in transformers


@pytest.fixture(scope="module")
def fast_export(tmp_path_factory):
    """Return a fast model, and its export, opened as by a user who has only the folder."""
    tmp = tmp_path_factory.mktemp("fast")
    model = random_fast(bias=True)
    path = save(model, tmp / "x.pt", 100, "unknown")  # 28 padded rows
    convert(path, tmp / "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # where transformers adds its copies of the code
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp / "modules"))
        for module in ("common", "configurator", "data", "model", "model_fast", "run"):
            patch.setitem(sys.modules, module, None)  # importing it fails
        loaded = AutoModelForCausalLM.from_pretrained(tmp / "hf", trust_remote_code=True)
    return model, loaded.eval()


def random_ids(rows: int, length: int) -> torch.Tensor:
    """Return random ids without 0, because 0 is the padding id in these tests."""
    return torch.randint(1, 100, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_an_exported_fast_model_gives_the_logits_and_text_of_model_fast(fast_export):
    """Compute the same logits, and generate the same tokens whichever cache the caller asks for."""
    model, exported = fast_export
    assert exported.dtype == torch.float32
    assert exported.config.vocab_size == 100
    assert_same_logits(model, exported, 100)
    idx = random_ids(8, 10)
    expected = generate(model, idx, 40, 100, temperature=0)
    assert len(expected[:, 30:].unique()) > 10  # not the same few again and again
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert torch.equal(exported.generate(idx, **options), expected)
    options["max_new_tokens"] = 10
    for cache in (dict(use_cache=False), dict(cache_implementation="static")):  # no cache
        assert torch.equal(exported.generate(idx, **cache, **options), expected[:, :20])
    last = exported(idx, logits_to_keep=2).logits
    assert last.shape == (8, 2, 100)
    # 1e-4: as in assert_same_logits()
    assert (last - model(idx)[:, -2:, :100]).abs().max() < 1e-4


LEFT_PADDED = torch.ones(2, 8, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)


@pytest.mark.parametrize(
    "options",
    [
        # with a cache, a caller would give only the new tokens
        dict(past_key_values=DynamicCache()),
        dict(attention_mask=LEFT_PADDED),
        dict(position_ids=torch.arange(8)),
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_exported_fast_model_refuses_options_it_would_have_to_ignore(options, fast_export):
    """Raise a ValueError that names the option, such as past_key_values."""
    _, exported = fast_export
    (name,) = options
    idx = random_ids(2, 8)
    with pytest.raises(ValueError, match=name):
        exported(idx, **options)
    if name == "attention_mask":
        with pytest.raises(ValueError, match=name):
            exported.generate(idx, max_new_tokens=2, return_dict_in_generate=True, **options)


# -----------------------------------------------------------------------------
# From Hugging Face


def imported(folder: Path) -> GPT | FastGPT:
    """Return the model that --init_from=FOLDER gives."""
    state = load_pretrained(str(folder))
    model = build_model(config_from_dict(state.model_config)).eval()
    state.load_weights(model)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        dict(vocab_size=384),
        dict(vocab_size=384, tie_word_embeddings=False),
        dict(vocab_size=128, activation_function="gelu_pytorch_tanh", n_inner=128),
    ],
)
def test_a_hub_model_gives_the_logits_of_transformers(changes, tmp_path):
    """Never sample the rows that its tokenizer has no token for."""
    reference = random_gpt2(tmp_path / "hf", **changes)
    assert_same_logits(imported(tmp_path / "hf"), reference, changes["vocab_size"])
    rows = min(changes["vocab_size"], own_bpe().get_vocab_size())
    assert load_pretrained(str(tmp_path / "hf")).vocab == rows


def test_reads_weights_in_the_layout_of_gpt2_on_the_hub(tmp_path):
    """Read names without "transformer.", skip the causal masks among them, and tie the head."""
    reference = random_gpt2(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = {name.removeprefix("transformer."): w for name, w in load_file(file).items()}
    weights.pop("lm_head.weight", None)
    for i in range(2):
        weights[f"h.{i}.attn.bias"] = torch.ones(16, 16).tril().view(1, 1, 16, 16)
        weights[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, file, metadata={"format": "pt"})
    assert_same_logits(imported(tmp_path / "hf"), reference, 128)


@pytest.mark.parametrize("name", ["gpt2", "owner/model"])
def test_an_unreachable_hub_gives_one_error_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(run("sample.py", f"--init_from={name}"), f"{name}: no such file", "cannot be fetched")


def test_wrong_bytes_from_the_hub_are_refused_and_deleted(tmp_path, monkeypatch):
    """The hub's library links a file to one that is named after the SHA-256 that the hub sends."""
    random_gpt2(tmp_path)
    weights = tmp_path / "model.safetensors"
    blob = weights.rename(tmp_path / hashlib.sha256(weights.read_bytes()).hexdigest())
    weights.symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path)
    assert fetch("owner/model") == tmp_path
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="owner/model: .*promises"):
        fetch("owner/model")
    assert not blob.exists()
