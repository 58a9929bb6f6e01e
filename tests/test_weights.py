"""
Load other people's weights: which tokenizer belongs to them, and names from wrappers. transformers
is the reference for tokenizers. test_convert.py tests convert.py, test_bad_input.py files of
another kind.
"""

import pickle
from pathlib import Path

import pytest
import tokenizers
import torch
from cases import slow
from char_dataset import write_nanogpts_checkpoint
from doc_pages import code_blocks
from hf_reference import own_bpe, random_gpt2
from program import ROOT, run, same
from transformers import AutoTokenizer, GPT2Tokenizer

import convert
from common.console import UserError
from data.tokenizer import Tokenizer, pick_tokenizer, same_tokenizer
from training.pretrained import load_pretrained

SMALL = dict(n_layer=1, n_head=2, n_embd=8, n_positions=16)
OWN = own_bpe().get_vocab_size()
TEXT = "the cat sat on the mat, naïve\n"


def write_own(folder) -> None:
    """Write a tokenizer of OWN ids, as transformers saves it."""
    own_bpe().save(str(folder / "tokenizer.json"))


def test_hugging_face_weights_use_the_tokenizer_in_their_folder(tmp_path):
    """Load weights with as many rows as GPT-2, for which a guess would pick GPT-2's tokenizer."""
    random_gpt2(tmp_path, **SMALL, vocab_size=50257)
    write_own(tmp_path)
    state = load_pretrained(str(tmp_path))
    text = Tokenizer(state["tokenizer"])
    reference = own_bpe()
    reference.no_truncation()
    ids = reference.encode(TEXT, add_special_tokens=False).ids
    assert list(text.encode(TEXT)) == ids
    assert state["vocab"] == OWN  # the other rows have no tokens
    # data made with that file or folder fits, but GPT-2's does not
    given = pick_tokenizer(str(tmp_path), tmp_path)
    assert same_tokenizer(state["tokenizer"], given.spec)
    assert same_tokenizer(state["tokenizer"], dict(kind="bpe", json=reference.to_str()))
    assert not same_tokenizer(state["tokenizer"], dict(kind="gpt2"))
    assert not same_tokenizer(state["tokenizer"], dict(kind="byte"))


@pytest.mark.parametrize(
    "rows, pad, vocab, kind",
    [
        (50304, False, 50257, "gpt2"),
        slow((50257, True, 50257, "gpt2")),  # a [PAD] without a row, which no text contains
        (50264, True, 50258, "bpe"),
    ],
)
def test_gpt2s_tokenizer_is_recognized_even_if_the_embedding_was_resized(
    rows, pad, vocab, kind, tmp_path
):
    convert.write_tokenizer(tmp_path, dict(kind="gpt2"), block_size=16)
    if not (tmp_path / "tokenizer.json").exists():
        pytest.skip("needs GPT-2's files in tiktoken's cache")
    if pad:
        theirs = GPT2Tokenizer.from_pretrained(tmp_path)
        theirs.add_special_tokens({"pad_token": "[PAD]"})
        theirs.save_pretrained(tmp_path)
    random_gpt2(tmp_path, **SMALL, vocab_size=rows)
    state = load_pretrained(str(tmp_path))
    assert (state["vocab"], state["tokenizer"]["kind"]) == (vocab, kind)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert list(Tokenizer(state["tokenizer"]).encode(TEXT)) == reference.encode(TEXT)
    assert same_tokenizer(state["tokenizer"], dict(kind="gpt2"))


def test_the_own_text_pages_code_mends_a_folder_with_too_few_rows(tmp_path, monkeypatch):
    """
    Refuse weights such as a German GPT-2 on the hub, whose config.json gives one row too few for
    its end-of-text token, and load what the page's code writes.
    """
    monkeypatch.chdir(tmp_path)
    random_gpt2(Path("hub_gpt2"), **SMALL, vocab_size=OWN)
    bpe = own_bpe("<s>")
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save("hub_gpt2/tokenizer.json")
    with pytest.raises(UserError, match=f"{OWN + 1} ids.* {OWN} rows"):
        load_pretrained("hub_gpt2")
    exec(code_blocks(ROOT / "docs" / "own_text.md", "python")[0], {})
    state = load_pretrained("my_gpt2")
    assert len(state["model"]["transformer.wte.weight"]) == state["vocab"] == OWN + 1
    pick_tokenizer("my_gpt2", tmp_path)  # as prepare_text.py --tokenizer=my_gpt2 does


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.model"])
def test_weights_whose_tokenizer_only_transformers_reads_load_with_an_unknown_tokenizer(
    name, tmp_path
):
    random_gpt2(tmp_path, **SMALL, vocab_size=50257)
    (tmp_path / name).write_text("[UNK]\n")
    state = load_pretrained(str(tmp_path))
    assert (state["vocab"], state["tokenizer"]) == (50257, dict(kind="unknown"))
    with pytest.raises(UserError, match="tokenizer.json into the weights' folder"):
        Tokenizer(state["tokenizer"])


def test_warns_if_the_weights_tokenizer_changes_the_prompt(tmp_path):
    """Show the prompt as the tokenizer reads it."""
    random_gpt2(tmp_path, **SMALL, vocab_size=3)
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    unigram.add_special_tokens(["</s>"])
    unigram.save(str(tmp_path / "tokenizer.json"))
    keys = ("--num_samples=1", "--max_new_tokens=1", "--device=cpu")
    result = run("sample.py", f"--init_from={tmp_path}", "--start=Hello", *keys)
    assert result.code == 0
    assert "reads this prompt as '<unk>'" in result.err


# -----------------------------------------------------------------------------
# nanoGPT's checkpoints


def test_meta_pkl_beside_a_nanogpt_checkpoint_is_used_even_if_its_size_is_gpt2s(tmp_path):
    path = write_nanogpts_checkpoint(tmp_path / "ckpt.pt", vocab=50257, width=8)
    assert load_pretrained(str(path))["tokenizer"] == dict(kind="gpt2")
    itos = {i: chr(0x4E00 + i) for i in range(50257)}
    meta = dict(vocab_size=50257, itos=itos, stoi={c: i for i, c in itos.items()})
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    state = load_pretrained(str(path))
    assert state["vocab"] == 50257
    assert Tokenizer(state["tokenizer"]).decode([0, 50256]) == itos[0] + itos[50256]


@pytest.mark.parametrize("name", ["ckpt.pt", "ckpt-00000005.pt"])
def test_a_tokenizer_json_copied_beside_a_checkpoint_is_used(name, tmp_path):
    """
    Do what the error about an unknown tokenizer advises, for nanoGPT's checkpoint and for that of a
    run whose dataset names no tokenizer.
    """
    path = write_nanogpts_checkpoint(tmp_path / "ckpt.pt", vocab=50304, width=8)
    if name != path.name:
        state = load_pretrained(str(path)) | dict(vocab=50257, tokenizer=dict(kind="unknown"))
        torch.save(state, tmp_path / name)
        path.unlink()
    write_own(tmp_path)
    weights = load_pretrained(str(tmp_path))
    reference = own_bpe()
    reference.no_truncation()
    ids = reference.encode(TEXT, add_special_tokens=False).ids
    assert list(Tokenizer(weights["tokenizer"]).encode(TEXT)) == ids
    assert weights["vocab"] == OWN


@pytest.mark.parametrize(
    "wrapped",
    [
        "module._orig_mod.{}.{}",
        "_fsdp_wrapped_module.{}._fsdp_wrapped_module.{}",
        "{}._checkpoint_wrapped_module.{}",
    ],
)
def test_weights_named_by_compile_ddp_or_fsdp_wrappers_are_read(wrapped, tmp_path):
    paths = [tmp_path / "plain.pt", tmp_path / "wrapped.pt"]
    expected, found = (
        load_pretrained(str(write_nanogpts_checkpoint(path, names=names)))["model"]
        for path, names in zip(paths, ("{}.{}", wrapped), strict=True)
    )
    assert same(found, expected)
