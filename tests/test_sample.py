"""
Compare generate() with transformers, and run sample.py on the runs, texts, prompts and terminals
that people have.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from char_dataset import LETTERS, RULER, sample, train_short, write_letters, write_parrot
from hf_reference import as_transformers, random_model
from program import Run, refused, run, write_tokens

from configurator import read_config
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig, generate, sample_next
from sample import SampleConfig, encode

GREEDY = 0.0  # temperature


def small_model(**changes) -> GPT:
    sizes = dict(block_size=24, vocab_size=128, n_layer=3, n_head=2, n_embd=32)
    return random_model(GPTConfig(**sizes | changes))


# -----------------------------------------------------------------------------
# generate


def test_greedy_generation_with_the_cache_matches_transformers_token_for_token():
    model = small_model()
    reference = as_transformers(model.state_dict(), model.config)
    idx = torch.randint(128, (3, 5))
    options = dict(attention_mask=torch.ones_like(idx), max_new_tokens=19)
    expected = reference.generate(idx, do_sample=False, use_cache=False, **options)
    assert torch.equal(generate(model, idx, 19, 128, GREEDY), expected)


@pytest.mark.parametrize("flash, prompt", [(True, 1), (False, 23), (True, 24), (False, 31)])
def test_generation_past_the_context_uses_the_last_block_size_tokens(flash, prompt):
    model = small_model(flash=flash)
    idx = torch.randint(128, (2, prompt))
    expected = idx
    with torch.no_grad():
        for _ in range(40):
            logits = model(expected[:, -24:])[:, -1, :100]
            expected = torch.cat((expected, logits.argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, idx, 40, 100, GREEDY), expected)


@pytest.mark.parametrize(
    "top_k, top_p, temperature",
    [(3, 1, 1), (0, 0.7, 1), (5, 0.6, 2), (1, 1, 1), (0, 1e-9, 1), (0, 1e-46, 1)],
)
def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps(top_k, top_p, temperature):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TopPLogitsWarper(top_p)(None, scores).softmax(dim=-1)[0]
    generator = torch.Generator().manual_seed(2)
    logits = logits.expand(20_000, -1)
    drawn = sample_next(logits, temperature, top_k, top_p, generator).flatten()
    found = torch.bincount(drawn, minlength=12) / 20_000
    assert torch.equal(found > 0, expected > 0)
    # five standard deviations of a share of 20,000 draws
    assert (found - expected).abs().max() < 0.02


# -----------------------------------------------------------------------------
# Whole runs

UNTIED = dict(bias=True, tie_weights=False)  # as write_parrot() needs it
GREEDILY = ("--start=a", "--max_new_tokens=5", "--num_samples=1", "--temperature=0")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """Train a small run on letters and return its folder."""
    folder = tmp_path_factory.mktemp("letters")
    train_short(write_letters(folder / "data"), folder / "run", **UNTIED)
    return folder / "run"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Train a small run on bytes and return its folder."""
    folder = tmp_path_factory.mktemp("bytes")
    tokens = write_tokens(folder / "tokens", [900], [200], vocab=256)
    train_short(tokens, folder / "run", **UNTIED)
    return folder / "run"


def test_padding_ids_are_never_sampled_even_if_the_model_predicts_them(gpt2, tmp_path):
    weights = Run(gpt2).state(8)["model"]["lm_head.weight"]
    assert len(weights) == 128 > len(LETTERS)
    parrot = write_parrot(gpt2, tmp_path / "parrot.pt", token=100)
    for temperature in (0, 1, 5):
        arguments = ("--start=a", "--max_new_tokens=40", "--num_samples=3")
        for text in sample(f"--init_from={parrot}", f"--temperature={temperature}", *arguments):
            assert len(text) == 41
            assert set(text) <= set(LETTERS)


def test_a_seed_always_gives_the_same_samples_and_another_seed_gives_others(gpt2):
    arguments = (f"--out_dir={gpt2}", "--start=abc", "--max_new_tokens=30", "--num_samples=3")
    texts = sample(*arguments)
    assert [text[:3] for text in texts] == ["abc"] * 3
    assert len(set(texts)) == 3
    assert sample(*arguments) == texts
    assert sample(*arguments, "--seed=1") != texts


PARROTS = {"x": 4.0, "y": 3.0, "z": None, "a": 5.0}  # the losses of a run's checkpoints, by token


@pytest.mark.parametrize("flag", ["--out_dir", "--init_from"])
def test_a_runs_folder_means_its_whole_checkpoint_with_the_lowest_loss(flag, gpt2, tmp_path):
    """If none was evaluated, it means the newest one."""
    for it, (letter, val_loss) in enumerate(PARROTS.items(), 1):
        path = write_parrot(gpt2, tmp_path / f"ckpt-{it:08}.pt", token=LETTERS.index(letter))
        state = torch.load(path, weights_only=True)
        state |= dict(iter_num=it, val_loss=val_loss)
        torch.save(state, path)
    assert sample(f"{flag}={tmp_path}", *GREEDILY) == ["ayyyyy"]
    (tmp_path / "ckpt-00000002.pt").write_bytes(b"cut")
    assert sample(f"{flag}={tmp_path}", *GREEDILY) == ["axxxxx"]
    for it in (1, 2, 4):
        (tmp_path / f"ckpt-{it:08}.pt").unlink()
    assert sample(f"{flag}={tmp_path}", *GREEDILY) == ["azzzzz"]


def test_unknown_characters_in_a_prompt_are_left_out(gpt2):
    arguments = ("--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    result = run("sample.py", f"--out_dir={gpt2}", "--start=a!b", *arguments)
    assert result.out.startswith("ab")


@pytest.mark.parametrize("token, text", [(0, "The end"), (ord("."), "The end.....")])
def test_a_sample_ends_at_the_end_of_text_token(token, text, made, tmp_path):
    parrot = write_parrot(made, tmp_path / "x.pt", token)
    flags = ("--start=The end", "--max_new_tokens=5", "--num_samples=2", "--temperature=0")
    assert sample(f"--init_from={parrot}", *flags) == [text] * 2


# -----------------------------------------------------------------------------
# Prompts and terminals


SHORT = ("--num_samples=1", "--max_new_tokens=1", "--device=cpu", "--dtype=float32")


def test_a_word_vocabulary_encodes_a_prompt_by_longest_match():
    """Encode with a table of words, as a nanoGPT dataset's meta.pkl may hold."""
    words = Tokenizer(dict(kind="char", itos=["cat", " ", "the", "cats", "."]))
    assert encode("the cats.", words) == [2, 1, 3, 4]
    assert encode("\n", words) == [0]  # the default prompt is not in the table
    assert encode("the\tcats", words) == [2, 3]


def test_sample_py_accepts_nanogpts_keys_and_a_training_config(made, tmp_path):
    defaults = dict(init_from="resume", out_dir="out", start="\n", num_samples=10, compile=False)
    defaults |= dict(max_new_tokens=500, temperature=0.8, top_k=200, seed=1337)
    defaults |= dict(device="cuda", dtype="bfloat16")
    config = read_config([f"--{name}={value}" for name, value in defaults.items()], SampleConfig)
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert SampleConfig().top_k == 200 and SampleConfig().temperature == 0.8
    file = tmp_path / "training.py"
    file.write_text(
        f"out_dir = {str(made)!r}\ninit_from = 'scratch'\nbatch_size = 4\ndtype = 'float32'\n"
        "lr_decay_iters = max_iters\ntokens_per_iter = 524288\n"
    )
    result = run("sample.py", file, "--start=~/x", *SHORT)
    assert result.code == 0 and result.out.startswith("~/x")


def test_samples_print_control_characters_as_escapes_even_into_a_pipe(made, tmp_path):
    """Protect the terminal, which an ESC in a sample could recolour, retitle or reprogram."""
    two = ("--num_samples=2", "--max_new_tokens=2", "--device=cpu")
    parrot = write_parrot(made, tmp_path / "parrot.pt", token=27)
    result = run("sample.py", f"--init_from={parrot}", "--start=a\tb\r", *two)
    assert result.code == 0 and result.out == 2 * (r"a	b\x0d\x1b\x1b" + RULER)


def test_end_of_text_in_a_prompt_is_one_token():
    assert encode("a<|endoftext|>b" * 10, Tokenizer(dict(kind="byte"))) == [97, 0, 98] * 10


def test_a_vocabulary_that_cannot_be_downloaded_is_reported_in_one_line(made, tmp_path):
    state = Run(made).state(8) | dict(tokenizer=dict(kind="gpt2"))
    torch.save(state, tmp_path / "x.pt")
    with mock.patch("tiktoken.get_encoding", side_effect=ConnectionError):
        result = run("sample.py", f"--init_from={tmp_path / 'x.pt'}", *SHORT)
    refused(result, "TIKTOKEN_CACHE_DIR")
