"""
convert.py: the same logits on either side, judged by transformers; files of strangers are read,
never run.
"""

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from helpers import ROOT, load, run_here, run_process, write_dataset
from pages import code_blocks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GPT2LMHeadModel
from weights import TRANSPOSED, assert_refused, random_gpt2

import convert
import model as model_py
import train
from common.console import UserError
from data.tokenizer import gpt2_bpe
from model import GPT, GPTConfig, generate
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from training import checkpoint
from training.pretrained import load_pretrained

SIZES = dict(block_size=16, n_layer=2, n_head=2, n_embd=32)


def random_gpt(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(SIZES, vocab_size=128) | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)  # biases and norms too
    return model


def random_fast(**changes) -> FastGPT:
    """A fast model, every parameter of which matters: each is far from its initial value."""
    config = dict(SIZES, vocab_size=128, block_size=256, value_tables=1, bigram_rows=100)
    torch.manual_seed(0)
    model = FastGPT(FastConfig(**config | changes)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    return model


def state_of(model: GPT | FastGPT, vocab: int, tokenizer: str = "byte") -> dict:
    return dict(
        model=model.state_dict(),
        model_config=config_to_dict(model.config),
        vocab=vocab,
        tokenizer=dict(kind=tokenizer),
    )


def save(model: GPT | FastGPT, path: Path, vocab: int, tokenizer: str = "byte") -> Path:
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
    model = build_model(config_from_dict(state["model_config"])).eval()
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def assert_same_logits(ours: GPT | FastGPT, reference, vocab: int, tolerance: float = 1e-4) -> None:
    """1e-4: fp32 rounding of logits of size 10 over a few layers, with room."""
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(vocab, (2, ours.config.block_size), generator=generator)
    difference = ours(idx)[..., :vocab] - reference(idx).logits
    assert difference.abs().max() < tolerance


# -----------------------------------------------------------------------------
# To Hugging Face


def test_of_a_run_the_best_model_is_exported_and_else_the_newest(tmp_path, script):
    run = tmp_path / "run"
    run.mkdir()
    best, newest = save(random_gpt(), run / "best.pt", 128), run / "ckpt-00000004.pt"
    torch.manual_seed(1)
    save(GPT(random_gpt().config), newest, 128)
    for name, path in (("best", best), ("newest", newest)):
        export(script, run, tmp_path / name)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert_same_logits(loaded(path), exported, 128)
        path.unlink()


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


def test_a_run_becomes_a_folder_that_transformers_loads(dataset, tmp_path, script):
    assert run_here(dataset, tmp_path / "run", max_iters=4, eval_interval=4) == 0
    assert "no tokenizer files" in export(script, tmp_path / "run", tmp_path / "hf")
    with pytest.raises(ValueError):  # and no empty GPT-2 tokenizer
        AutoTokenizer.from_pretrained(tmp_path / "hf")
    state = load(tmp_path / "run", 4)
    model = build_model(config_from_dict(state["model_config"])).eval()
    model.load_state_dict(state["model"])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    assert_same_logits(model, exported, 64)
    assert exported.config.vocab_size == 64 and model.config.vocab_size == 128


@contextlib.contextmanager
def transformers_cache(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """transformers copies the code of an export into this folder, and forgets it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # where transformers adds its copies
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
        yield patch
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_an_export_of_bytes_writes_text_as_its_page_shows(tmp_path, script):
    model = random_fast(vocab_size=256)
    export(script, save(model, tmp_path / "x.pt", 256), tmp_path / "anna-hf")
    (block,) = code_blocks(ROOT / "docs" / "export.md", "python")
    names: dict = {}
    with transformers_cache(tmp_path):
        exec(block.replace("anna-hf", str(tmp_path / "anna-hf")), names)
    assert names["text"].startswith("The ") and 4 < len(names["ids"]) <= 104
    names["model"].eval()
    assert_same_logits(model, names["model"], 256)
    assert names["model"].generation_config.eos_token_id == 0


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


def own_bpe(end: str = "<|endoftext|>") -> tokenizers.Tokenizer:
    """
    A byte-level BPE of 300 ids. Unless told not to, it puts end-of-text before each text and cuts
    it after four tokens.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end],
        initial_alphabet=bpe.pre_tokenizer.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat, that is where the cat sat"] * 2, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, 0)]
    )
    bpe.enable_truncation(4)
    return bpe


@pytest.mark.parametrize("model", ["gpt2", "fast"])
def test_a_tokenizer_of_ones_own_goes_with_the_weights(model, tmp_path, script):
    bpe, folder = own_bpe("</s>"), tmp_path / "hf"
    vocab = bpe.get_vocab_size()
    weights = random_gpt(vocab_size=384) if model == "gpt2" else random_fast(vocab_size=384)
    state = state_of(weights, vocab) | dict(tokenizer=dict(kind="bpe", json=bpe.to_str()))
    checkpoint.save(state, tmp_path / "x.pt")
    assert "no tokenizer" not in export(script, tmp_path / "x.pt", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "the cat 's naïve café — 12345 ,\n\n\tand did n't ✓ <tags> ."
    bpe.no_truncation()
    ids = bpe.encode(text, add_special_tokens=False).ids
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text and len(tokenizer) == vocab
    assert tokenizer.eos_token == "</s>" and tokenizer.model_max_length == weights.config.block_size
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == tokenizer.eos_token_id == 0
    if model == "gpt2":  # on the way back it is the one that the data was made with
        back = load_pretrained(str(folder))
        assert (back["vocab"], back["tokenizer"]) == (vocab, state["tokenizer"])


def test_without_gpt2s_files_the_weights_are_written_and_the_rest_said(
    tmp_path, script, monkeypatch
):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda url: 1 / 0)
    model = random_gpt(vocab_size=50304, n_embd=8, n_layer=1)
    out = export(script, save(model, tmp_path / "x.pt", 50257, "gpt2"), tmp_path / "hf")
    assert "tokenizer: cannot get GPT-2's files" in out
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]


def test_an_export_goes_into_an_empty_folder_alone(tmp_path, script):
    """A run would be read from its export from then on, and a fine-tuned model would be lost."""
    path, folder = save(random_gpt(), tmp_path / "x.pt", 128), tmp_path / "hf"
    folder.mkdir()
    export(script, path, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert_refused(script, convert.main, "ckpt-to-hf", path, folder, words=("is not empty",))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_full_disk_is_one_line_and_leaves_no_half_a_model(tmp_path, script):
    resource = pytest.importorskip("resource", reason="needs a limit to what a file may hold")
    path, folder = save(random_gpt(), tmp_path / "x.pt", 128), tmp_path / "hf"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        code, out, err = script(convert.main, "ckpt-to-hf", path, folder)
        assert (code, out, err) == (1, "", ["error: File too large"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    export(script, path, folder)  # once more, where there is room


# -----------------------------------------------------------------------------
# A model.py that somebody has changed


def use_exact_gelu(patch) -> None:
    def forward(self, x):
        return self.c_proj(torch.nn.functional.gelu(self.c_fc(x)))

    patch.setattr(model_py.MLP, "forward", forward)


def see_all_but_the_farthest(patch) -> None:
    """A window of 15 in a context of 16: the last token does not see the first."""

    stock = model_py.CausalSelfAttention.forward

    def forward(self, x, *others):
        y = stock(self, x, *others)
        y[:, -1] = stock(self, x[:, 1:])[:, -1]
        return y

    patch.setattr(model_py.CausalSelfAttention, "forward", forward)


def see_one_document(patch):
    """After an end-of-text, of bytes 0, nothing is as it was."""
    whole = model_py.GPT.forward

    def forward(self, idx, targets=None):
        return whole(self, idx) + (idx == 0).cumsum(1)[..., None]

    patch.setattr(model_py.GPT, "forward", forward)


class GatedMLP(model_py.MLP):
    def __init__(self, config):
        super().__init__(config)
        self.c_gate = torch.nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(torch.nn.functional.silu(self.c_gate(x)) * self.c_fc(x))


NOT_GPT2 = ("model.py computes something else than GPT-2", "transformers has no class")


@pytest.mark.parametrize("change", [use_exact_gelu, see_all_but_the_farthest, see_one_document])
def test_a_model_that_computes_something_else_is_not_exported_as_gpt2(
    change, tmp_path, script, monkeypatch
):
    """transformers would load it without a word and compute GPT-2."""
    change(monkeypatch)
    path = save(random_gpt(flash=False), tmp_path / "x.pt", 100)
    assert_refused(script, convert.main, "ckpt-to-hf", path, tmp_path / "hf", words=NOT_GPT2)
    assert not (tmp_path / "hf").exists()


def test_tensors_that_gpt2_does_not_have_are_not_exported(tmp_path, script, monkeypatch):
    monkeypatch.setattr(model_py, "MLP", GatedMLP)
    path = save(random_gpt(), tmp_path / "x.pt", 100)
    names = "h.0.mlp.c_gate.weight, h.0.mlp.c_gate.bias, h.1.mlp.c_gate.weight, ..."
    words = (f"GPT-2 has no {names}; transformers has no class",)
    assert_refused(script, convert.main, "ckpt-to-hf", path, tmp_path / "hf", words=words)
    assert not (tmp_path / "hf").exists()


def test_an_export_is_checked_without_transformers_too(tmp_path, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = save(random_gpt(), tmp_path / "x.pt", 100)
    export(script, path, tmp_path / "hf")
    use_exact_gelu(monkeypatch)
    assert_refused(script, convert.main, "ckpt-to-hf", path, tmp_path / "other", words=NOT_GPT2)


@pytest.mark.parametrize("model", [GPT, FastGPT])
def test_blocks_that_share_their_weights_are_exported_each_with_its_own(
    model, tmp_path, script, monkeypatch
):
    """GPT-2 with equal blocks computes the same."""
    stock = model.__init__

    def shared(self, config):
        stock(self, config)
        for name in ("attn", "mlp"):
            setattr(self.transformer.h[1], name, getattr(self.transformer.h[0], name))

    monkeypatch.setattr(model, "__init__", shared)
    gpt = random_gpt() if model is GPT else random_fast()
    export(script, save(gpt, tmp_path / "x.pt", 60), tmp_path / "hf")
    if model is GPT:
        reference = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
        assert_same_logits(gpt, reference, 60)


def test_a_fast_model_that_imports_more_than_an_export_holds_is_refused(
    tmp_path, script, monkeypatch
):
    for name in ("training/modeling_fast.py", "model_fast.py", "model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "layers.py").write_text("")
    text = (ROOT / "model_fast.py").read_text()
    (tmp_path / "model_fast.py").write_text(text.replace("import torch\n", "import layers\n", 1))
    monkeypatch.setattr(convert, "__file__", str(tmp_path / "convert.py"))
    source = save(random_fast(), tmp_path / "x.pt", 60)
    code, _, err = script(convert.main, "ckpt-to-hf", source, tmp_path / "hf")
    why = "model_fast.py: imports layers, which is not exported; put what it needs into"
    assert code == 2 and err == [f"error: {why} model_fast.py"]
    assert not (tmp_path / "hf").exists()


def test_gpt2_in_other_words_is_exported(tmp_path, script, monkeypatch):
    """What counts is what model.py computes, up to rounding, and not how."""

    def forward(self, x):
        h = self.c_fc(x)
        bent = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        first, second = bent.chunk(2, dim=-1)
        halves = self.c_proj.weight.chunk(2, dim=1)
        return first @ halves[0].T + second @ halves[1].T + self.c_proj.bias

    monkeypatch.setattr(model_py.MLP, "forward", forward)
    model = random_gpt(flash=False)
    export(script, save(model, tmp_path / "x.pt", 100), tmp_path / "hf")
    assert_same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), 100)


# -----------------------------------------------------------------------------
# The fast model in transformers


@pytest.fixture(scope="module")
def fast_export(tmp_path_factory):
    """A fast model and its export, opened as by a user who has the folder and no more."""
    tmp = tmp_path_factory.mktemp("fast")
    model = random_fast(bias=True, bigram_rows=20_000)  # a row for each pair of ids
    path = save(model, tmp / "x.pt", 100, "unknown")  # 28 padded rows
    convert.main(["ckpt-to-hf", str(path), str(tmp / "hf")])
    with transformers_cache(tmp) as patch:
        for module in ("model", "model_fast", "training"):
            patch.setitem(sys.modules, module, None)  # importing it fails
        exported = AutoModelForCausalLM.from_pretrained(tmp / "hf", trust_remote_code=True)
    return model, exported, tmp / "hf"


def test_a_fast_model_that_the_modelling_file_does_not_follow_is_refused(
    tmp_path, script, monkeypatch
):
    """It calls hidden and logits, for its own losses, and not forward."""
    monkeypatch.setattr(FastGPT, "forward", lambda self, idx: self.logits(0.9 * self.hidden(idx)))
    path = save(random_fast(), tmp_path / "x.pt", 100)
    words = ("logits differ by", "modeling_fast.py")
    assert_refused(script, convert.main, "ckpt-to-hf", path, tmp_path / "hf", words=words)
    assert not (tmp_path / "hf").exists()


other_weights = pytest.mark.xfail(
    reason="nobody compares the weights with the model that their config describes", strict=True
)


@other_weights
def test_a_fast_checkpoint_with_other_tensors_is_refused(tmp_path, script):
    """Trained by another model_fast.py: the export would have this one's code."""
    state = state_of(random_fast(), 100)
    state["model"]["lm_head.scale"] = torch.ones(())
    checkpoint.save(state, tmp_path / "x.pt")
    words = ("lm_head.scale",)
    assert_refused(
        script, convert.main, "ckpt-to-hf", tmp_path / "x.pt", tmp_path / "hf", words=words
    )


def test_weights_that_were_compared_are_still_copied_into_a_model():
    """Loaded with assign=True, a dict of weights would put its tensors in place of parameters."""
    model = random_gpt()
    state = state_of(model, 100)
    hf = convert.hf_config(state["tokenizer"], model.config, 100)
    convert.check_logits(state, convert.gpt2_weights(state), hf)
    other = GPT(model.config)
    parameters = list(other.parameters())  # an optimizer holds these
    other.load_state_dict(state["model"])
    assert all(a is b for a, b in zip(other.parameters(), parameters, strict=True))


def random_ids(rows: int, length: int) -> torch.Tensor:
    """None is 0, which the tests give to transformers as padding."""
    return torch.randint(1, 100, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_an_exported_fast_model_computes_what_model_fast_computes(fast_export):
    model, exported, folder = fast_export
    assert exported.dtype == torch.float32 and exported.config.vocab_size == 100
    assert_same_logits(model, exported, 100)
    idx = random_ids(8, 10)
    expected = generate(model, idx, 100, 100, temperature=0)
    assert len(expected[:, 60:].unique()) > 10  # not the same few again and again
    options = dict(max_new_tokens=100, do_sample=False, pad_token_id=0)
    assert torch.equal(exported.generate(idx, **options), expected)
    options["max_new_tokens"] = 30
    for cache in (dict(use_cache=False), dict(cache_implementation="static")):  # it uses none
        assert torch.equal(exported.generate(idx, **cache, **options), expected[:, :40])


@torch.no_grad()
def test_an_exported_fast_model_goes_on_beyond_its_block_size(fast_export):
    """Rotary positions have no last one; all tokens stay visible, as model_fast.py computes it."""
    model, exported, _ = fast_export
    idx = random_ids(1, 250)
    longer = exported.generate(idx, max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = model(longer)[0, 249:-1, :100].argmax(dim=-1)
    assert torch.equal(longer[0, 250:], expected)


@torch.no_grad()
def test_an_exported_fast_model_refuses_a_cache_and_cuts_logits(fast_export):
    """With a cache a caller would give the new tokens alone, and miss what came before."""
    model, exported, _ = fast_export
    idx = random_ids(2, 12)
    with pytest.raises(ValueError, match="there is no cache"):
        exported(idx[:, 5:], past_key_values=DynamicCache())
    last = exported(idx, logits_to_keep=2).logits
    assert (last - model(idx)[:, -2:, :100]).abs().max() < 1e-4 and last.shape == (2, 2, 100)


@torch.no_grad()
def test_padding_before_a_token_is_refused_and_after_it_ignored(fast_export):
    _, exported, _ = fast_export
    idx, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    padded = exported(idx, attention_mask=mask).logits
    assert (padded[1, :5] - exported(idx[1:, :5]).logits[0]).abs().max() < 1e-4
    with pytest.raises(ValueError, match="one at a time"):
        exported(idx, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="one at a time"):
        exported.generate(idx, max_new_tokens=5, pad_token_id=0, attention_mask=mask)


def test_an_exported_fast_model_can_be_trained_on(fast_export):
    """transformers shifts the labels; -100 counts for nothing."""
    model, exported, _ = fast_export
    idx = random_ids(2, 8)
    labels = idx.clone()
    labels[0, :4] = -100
    logits = model(idx)[:, :-1, :100]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss = exported(idx, labels=labels).loss
    assert abs(loss - expected) < 1e-5
    loss.backward()
    assert exported.model.lm_head.weight.grad.any()
    exported.zero_grad()


@pytest.mark.slow
def test_a_fast_export_is_opened_elsewhere_without_a_network(fast_export, tmp_path):
    """And saved again by transformers, code included, as a fine-tuned model is."""
    code = """
import sys
from itertools import pairwise
from transformers import AutoModelForCausalLM
for source, target in pairwise(sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    model.save_pretrained(target)
print(model(model.dummy_inputs["input_ids"]).logits.sum().item())
"""
    _, exported, folder = fast_export
    code, out, err = run_process(
        "-c",
        code,
        *map(str, (folder, tmp_path / "a", tmp_path / "b")),
        cwd=tmp_path,
        cold=True,
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "home"),
    )
    assert code == 0, err
    expected = exported(exported.dummy_inputs["input_ids"]).logits.sum().item()
    assert float(out) == pytest.approx(expected, rel=1e-4)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {output}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["cat", "mat, that is"]
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "fast"])
def test_lm_evaluation_harness_measures_an_export_without_a_network(model, tmp_path, script):
    pytest.importorskip("lm_eval", reason='needs pip install "lm_eval[hf]"')
    weights = random_gpt(vocab_size=384, block_size=256)
    if model == "fast":
        weights = random_fast(vocab_size=384)
    bpe = dict(kind="bpe", json=own_bpe().to_str())
    checkpoint.save(state_of(weights, 300) | dict(tokenizer=bpe), tmp_path / "x.pt")
    export(script, tmp_path / "x.pt", tmp_path / "hf")
    data = tmp_path / "data.jsonl"
    lines = [dict(question="the cat sat on the", answer="mat, that is"), dict(question="the")]
    data.write_text("".join(json.dumps(dict(answer="cat") | line) + "\n" for line in lines))
    for name, output in (("choice", "multiple_choice"), ("text", "generate_until")):
        task = TASK.format(name=name, data=data, output=output)
        if output == "generate_until":
            task = task.replace('doc_to_choice: ["cat", "mat, that is"]\n', "")
        (tmp_path / f"{name}.yaml").write_text(task)
    code, out, err = run_process(
        "-m",
        "lm_eval",
        "--model=hf",
        f"--model_args=pretrained={tmp_path / 'hf'},trust_remote_code=True",
        "--tasks=choice,text",
        f"--include_path={tmp_path}",
        "--device=cpu",
        "--batch_size=1",
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "home"),
    )
    assert code == 0, err
    assert "|choice|" in out and "exact_match" in out


# -----------------------------------------------------------------------------
# From Hugging Face


@pytest.mark.parametrize("tied", [True, False])
def test_an_imported_model_gives_the_same_logits(tmp_path, script, tied):
    reference = random_gpt2(tmp_path / "hf", tie_word_embeddings=tied)
    code, out, err = script(convert.main, "hf-to-ckpt", tmp_path / "hf", tmp_path / "x.pt")
    assert (code, err) == (0, []) and "train or sample from it" in out
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


def test_block_size_is_cropped_and_never_stretched(tmp_path):
    reference = random_gpt2(tmp_path / "hf")
    cropped = loaded(tmp_path / "hf", block_size=7)
    assert cropped.config.block_size == 7 and cropped.transformer.wpe.weight.shape == (7, 32)
    assert_same_logits(cropped, reference, 128)
    assert loaded(tmp_path / "hf", block_size=17).config.block_size == 16


def test_a_padded_or_plain_gpt2_vocabulary_is_recognised(tmp_path):
    random_gpt2(tmp_path / "hf", vocab_size=50257, n_embd=8, n_layer=1)
    state = load_pretrained(str(tmp_path / "hf"))
    assert (state["model_config"]["vocab_size"], state["vocab"]) == (50257, 50257)


def test_the_hub_out_of_reach_is_one_line(tmp_path, script, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ("gpt2: cannot be fetched",)
    assert_refused(script, convert.main, "hf-to-ckpt", "gpt2", tmp_path / "x.pt", words=words)


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
    for source in ("ckpt.pt", "x.pt"):  # an export says so too, whichever way the weights came
        out = script(convert.main, "ckpt-to-hf", tmp_path / source, tmp_path / f"{source}-hf")[1]
        assert "up to 1e-3" in out
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


@other_weights
@pytest.mark.parametrize(
    "config, word",
    [
        (dict(n_layer=3), "c_attn.bias"),
        (dict(n_layer=1), "h.1."),
        (dict(n_positions=32), "wpe.weight"),
    ],
)
def test_weights_of_another_model_than_the_folder_says_are_refused(config, word, tmp_path, script):
    random_gpt2(tmp_path / "hf")
    edit_config(tmp_path / "hf", **config)
    out = tmp_path / "out.pt"
    assert_refused(script, convert.main, "hf-to-ckpt", tmp_path / "hf", out, words=(word,))
    assert not out.exists()


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

    strange = state_of(random_gpt(), 128) | dict(model_config=None)
    checkpoint.save(strange, tmp_path / "strange.pt")
    diverged = random_gpt()
    diverged.transformer.ln_f.weight.data[0] = torch.nan
    save(diverged, tmp_path / "diverged.pt", 128)

    out, exported, good = tmp_path / "out.pt", tmp_path / "exported", tmp_path / "good"
    for mode, source, word, target in (
        ("hf-to-ckpt", folder("llama", model_type="llama"), "'llama'", out),
        ("hf-to-ckpt", folder("fast", model_type="nightshift_fast"), "nightshift_fast", out),
        ("hf-to-ckpt", folder("relu", activation_function="relu"), "activation_function", out),
        ("hf-to-ckpt", folder("mistral", scale_attn_by_inverse_layer_idx=True), "layer_idx", out),
        ("hf-to-ckpt", cut, "not a model (SafetensorError", out),
        ("hf-to-ckpt", missing, "model.safetensors", out),
        ("hf-to-ckpt", torn, "JSON", out),
        ("hf-to-ckpt", tmp_path / "nowhere", "no such file", out),
        ("hf-to-ckpt", good, "exists", taken),
        ("nanogpt-to-ckpt", tmp_path / "text.pt", "text.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "empty.pt", "empty.pt", out),
        ("nanogpt-to-ckpt", tmp_path / "other.pt", "neither", out),
        ("ckpt-to-hf", tmp_path / "strange.pt", "not a model", exported),
        ("ckpt-to-hf", tmp_path / "diverged.pt", "logits differ by nan", exported),
        ("ckpt-to-hf", flipped, "flipped.pt", exported),
        ("ckpt-to-hf", tmp_path / "nowhere.pt", "no such", exported),
        ("ckpt-to-hf", tmp_path, "no checkpoint or config.json", exported),
        ("ckpt-to-hf", taken, "text.pt: Not a directory", tmp_path / "text.pt"),
    ):
        assert_refused(script, convert.main, mode, source, target, words=(word,))
    assert not out.exists() and not exported.exists()
    assert_refused(script, convert.main, "hf-to-gguf", "a", "b")
    assert_refused(script, convert.main)


# -----------------------------------------------------------------------------
# GPT-2 as the baseline


@torch.no_grad()
def test_gpt2_on_ones_own_validation_split_is_transformers_loss(tmp_path, script):
    data = write_dataset(tmp_path / "data", [1000], val_tokens=40 * 16 + 1)
    reference = random_gpt2(tmp_path / "hf", vocab_size=64)
    code, out, err = script(
        train.main,
        ROOT / "config" / "eval_gpt2.py",
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
