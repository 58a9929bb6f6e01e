"""
A changed model: its FLOPs are counted as it runs, and where figures or weights are those of other
code, somebody is told.
"""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, flags, load, run_here, start_process
from test_ranks import run_ranks
from torch.nn import functional as F

import convert
import model as gpt2
import sample
from benchmarks.plan import card_figures, card_lines, estimated_pace, make_plan, plan_lines
from configurator import Config
from model import GPT, CausalSelfAttention, GPTConfig, plain_attention
from training import build
from training.build import SHIPPED_CODE, code_of, count_flops, flops_per_token
from training.memory import out_of_memory_advice

GPT124M = GPTConfig(bias=False)
# see test_model.py: 6 N of all layers, and of the ten in the middle
PRODUCTS, MIDDLE = 6 * 123_587_328, 6 * 10 * (12 * 768**2 + 2 * 768)
ATTENTION = 12 * 768 * 1024  # of a layer
CHANGED = "what it computes now may be another model"
AS_SHIPPED = "(activations as in the shipped model; this one has changed)"


@pytest.fixture
def patch(monkeypatch):
    """monkeypatch for the model's code; what was counted and read of it is forgotten."""
    cached = (build.build_shapes, build.count_parameters, count_flops, code_of)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def qkv(layer: CausalSelfAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    B, T, C = x.shape
    heads = layer.c_attn(x).view(B, T, 3 * layer.n_head, C // layer.n_head)
    return heads.transpose(1, 2).chunk(3, dim=1)


def joined(layer: CausalSelfAttention, y: torch.Tensor) -> torch.Tensor:
    return layer.c_proj(y.transpose(1, 2).flatten(2))


# -----------------------------------------------------------------------------
# FLOPs


class MiddleTwice(GPT):
    def hidden(self, idx, caches=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        first, *middle, last = self.transformer.h
        for block in (first, *middle, *middle, last):
            x = block(x)
        return self.transformer.ln_f(x)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_blocks_that_run_twice_count_twice(patch, tie_weights):
    patch.setattr(build, "GPT", MiddleTwice)
    config = GPTConfig(bias=False, tie_weights=tie_weights)
    flops = PRODUCTS + MIDDLE + 22 * ATTENTION
    words = "counted from the modules that run, attention in 22 calls"
    assert count_flops(config) == (flops, words)
    assert build.count_parameters(config)[1] == PRODUCTS / 6  # but they are there once


def test_a_window_that_cuts_the_keys_counts_less(patch):
    """Sequences of 1024 in windows of 256: each token meets a quarter of the keys."""

    def in_windows(layer, x, cache=None):
        q, k, v = (part.unflatten(2, (-1, 256)) for part in qkv(layer, x))
        return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3))

    patch.setattr(CausalSelfAttention, "forward", in_windows)
    flops = PRODUCTS + 12 * ATTENTION // 4
    words = "counted from the modules that run, attention in 12 calls"
    assert count_flops(GPT124M) == (flops, words)


def own_products(layer, x, cache=None):
    return joined(layer, plain_attention(*qkv(layer, x), 0.0, True))


def wider_queries(layer, x, cache=None):
    """Heads of a size of their own cannot be told from the narrow model."""
    q, k, v = qkv(layer, x)
    q, k = F.pad(q, (0, 64)), F.pad(k, (0, 64))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_attention_of_which_a_part_is_counted_is_told_by_its_calls(patch):
    whole = CausalSelfAttention.forward
    half = iter([whole, own_products] * 6)
    patch.setattr(CausalSelfAttention, "forward", lambda *arguments: next(half)(*arguments))
    words = "counted from the modules that run, attention in 6 calls"
    assert count_flops(GPT124M) == (PRODUCTS + 6 * ATTENTION, words)


@pytest.mark.parametrize("forward", [own_products, wider_queries])
def test_attention_that_cannot_be_counted_is_said_not_to_be(patch, forward):
    patch.setattr(CausalSelfAttention, "forward", forward)
    words = "counted from the modules that run, attention not counted"
    assert count_flops(GPT124M) == (PRODUCTS, words)


def test_a_model_that_asks_for_its_own_size_is_counted_by_its_parameters(patch):
    def rotate(layer, x, cache=None):
        raise ValueError("n_embd must be a multiple of 64")

    patch.setattr(CausalSelfAttention, "forward", rotate)
    words = "6 N, attention not counted: the model does not run at a small n_embd"
    assert count_flops(GPT124M) == (PRODUCTS, words)


@pytest.mark.parametrize("kind", ["gpt2", "fast"])
@pytest.mark.parametrize("changes", [dict(), dict(flash=False), dict(recompute=True, loss_chunk=4)])
def test_the_shipped_models_have_their_formula_whatever_computes_them(kind, changes):
    tables = dict(value_tables=1, bigram_rows=10**7) if kind == "fast" else {}
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = GPTConfig(model=kind, bias=False, tie_weights=False, **sizes, **tables, **changes)
    gate = 2 * 12 * 3 if kind == "fast" else 5 * 96  # weights of two gates, or of five norms
    n = 100 * 96 + 2 * 12 * 96**2 + gate
    assert count_flops(config) == (6 * n + 12 * 2 * 96 * 40, "6 N + 12 L H Q T")


def test_counting_draws_no_random_number_of_the_runs(patch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    flops_per_token(GPT124M)
    assert torch.equal(torch.get_rng_state(), before)


# -----------------------------------------------------------------------------
# Fingerprints


@pytest.mark.upstream
def test_the_shipped_models_are_known_as_such():
    today = {name: code_of(name) for name in SHIPPED_CODE}
    assert SHIPPED_CODE == today, f"training/build.py needs SHIPPED_CODE = dict({today})"


def edit(patch, old: str, new: str) -> None:
    """model.py as if it had been written so."""
    assert build.SOURCES["model.py"].count(old) == 1
    patch.setitem(build.SOURCES, "model.py", build.SOURCES["model.py"].replace(old, new))
    code_of.cache_clear()


def test_only_what_is_computed_changes_the_fingerprint(patch):
    before = code_of("gpt2"), code_of("fast")
    edit(patch, '"""\nGPT-2, the whole of it.', '"""\nMine.')
    edit(patch, "# 50257 padded to a multiple of 128", "# padded")
    edit(patch, "returns those of all so far.", "and returns all.")  # in a method's docstring
    edit(patch, "        x = x + self.attn(", "\n        x = x + (\n            self.attn)(")
    assert (code_of("gpt2"), code_of("fast")) == before
    edit(patch, "0.02 / math.sqrt(2 *", "0.03 / math.sqrt(2 *")
    assert code_of("gpt2") != before[0] and code_of("fast") != before[1]
    before = code_of("gpt2"), code_of("fast")
    patch.setitem(build.SOURCES, "model_fast.py", build.SOURCES["model_fast.py"] + "\nx = 1\n")
    code_of.cache_clear()
    assert code_of("gpt2") == before[0] and code_of("fast") != before[1]


def test_memory_of_a_changed_model_is_said_to_be_the_shipped_ones(patch):
    config = Config(batch_size=32, gradient_accumulation_steps=16)
    options = Namespace(gpus=1, dataset_tokens=None, watts=None, gpu=None)
    card = card_figures("Tesla T4", "float16", 65.0, 15.0)

    def words() -> list[str]:
        pace = estimated_pace(config, GPT124M, card, 1)
        p = make_plan(config, GPT124M, card, pace, options)
        (memory,) = [line for line in plan_lines(p) if line.startswith("memory")]
        advice = out_of_memory_advice(config, GPT124M, "float16", 12e9)
        return [memory, card_lines([p])[-1], advice]

    # a fork's model may be changed today
    patch.setitem(SHIPPED_CODE, "gpt2", code_of("gpt2"))
    assert not [line for line in words() if AS_SHIPPED in line]
    edit(patch, "0.02 / math.sqrt(2 *", "0.03 / math.sqrt(2 *")
    assert [line for line in words() if AS_SHIPPED not in line] == []
    assert words()[-1].partition(": --batch_size=")[2]  # the flags stay last


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("changed") / "run"
    assert run_here(dataset, out_dir, max_iters=4) == 0
    return out_dir


def test_weights_of_other_code_are_announced_wherever_they_are_read(
    run, dataset, tmp_path, patch, capsys, script
):
    shutil.copytree(run, tmp_path / "run")
    read = dict(init_from=run, max_iters=1)
    resume = dict(init_from="resume", max_iters=6)
    newest = tmp_path / "run/ckpt-00000004.pt"

    def said() -> list[str]:
        return [line for line in capsys.readouterr().err.splitlines() if CHANGED in line]

    edit(patch, "# 50257 padded to a multiple of 128", "# padded")
    assert run_here(dataset, tmp_path / "same", **read) == 0 and not said()
    edit(patch, "0.02 / math.sqrt(2 *", "0.03 / math.sqrt(2 *")
    assert run_here(dataset, tmp_path / "new", **read) == 0 and len(said()) == 1
    assert run_here(dataset, tmp_path / "run", **resume) == 0
    since = "has changed since it was written"
    assert said() == [f"warning: {newest}: the code of model=gpt2 {since}; {CHANGED}"]
    for main, words in (
        (sample.main, [f"--out_dir={run}", "--max_new_tokens=1", "--device=cpu"]),
        (convert.main, ["ckpt-to-hf", run, tmp_path / "hf"]),
    ):
        _, _, lines = script(main, *words)
        assert len([line for line in lines if CHANGED in line]) == 1
    # what the changed code has written is its own
    assert load(tmp_path / "run", 6)["code"] == code_of("gpt2") != load(run, 4)["code"]
    assert run_here(dataset, tmp_path / "run", **resume | dict(max_iters=7)) == 0 and not said()


def test_a_checkpoint_that_does_not_know_its_code_is_read_in_silence(run, tmp_path, capsys, script):
    state = load(run, 4)
    del state["code"]
    torch.save(state, tmp_path / "old.pt")
    words = [f"--init_from={tmp_path}/old.pt", "--max_new_tokens=1", "--device=cpu"]
    code, _, lines = script(sample.main, *words)
    assert code == 0 and not [line for line in lines if CHANGED in line]


@pytest.mark.slow
def test_an_edited_copy_of_the_program_says_what_it_does_not_know(run, dataset, tmp_path):
    """The real thing: files edited on the disk, blocks run twice, processes of their own."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), ROOT / "training/gpus.csv"]:
        if "tests" not in path.parts:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    shutil.copytree(run, tmp_path / "out")
    old = "        return self.transformer.ln_f(x)"
    twice = "        for block in self.transformer.h:\n            x = block(x)\n"
    text = Path(gpt2.__file__).read_text()
    assert text.count(old) == 1
    (tmp_path / "model.py").write_text(text.replace(old, twice + old))

    def said(*words: str) -> tuple[str, str]:
        process = start_process(*words, cwd=tmp_path, only_torch=True)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out, err

    out, err = said("bench.py", "plan", "config/gpt124m_4070.py", "--gpu=4070")
    flops = PRODUCTS + 6 * 12 * (12 * 768**2 + 2 * 768) + 24 * ATTENTION
    words = "counted from the modules that run, attention in 24 calls"
    assert f"{flops / 1e6:.1f} MFLOP/token ({words}, N = 123.59M)" in out
    assert out.count(AS_SHIPPED) == 1
    arguments = flags(dataset, tmp_path / "out", init_from="resume", max_iters=5)
    out, err = said("train.py", *arguments)
    assert err.count(CHANGED) == 1 and "that run, attention in 4 calls)" in out


@pytest.mark.slow
def test_two_ranks_announce_it_once(run, dataset, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/ckpt-00000004.pt"
    torch.save(load(run, 4) | dict(code="another"), path)
    arguments = flags(dataset, tmp_path / "run", init_from="resume", max_iters=5)
    codes, _, err = run_ranks(2, "train.py", *arguments)
    assert codes == [0, 0] and err.count(CHANGED) == 1


def test_a_resume_says_that_an_optimizer_or_a_schedule_was_changed_in_place(
    dataset, tmp_path, patch, capsys
):
    """Under its old name, as people do it who come from nanoGPT."""
    said = "resume: train.py, build.py, muon.py or loader.py has changed; using the new code"
    run_here(dataset, tmp_path, max_iters=4)
    assert run_here(dataset, tmp_path, init_from="resume", max_iters=6) == 0
    assert said not in capsys.readouterr().out
    source = build.SOURCES["train.py"]
    assert source.count("math.cos(") == 1
    patch.setitem(build.SOURCES, "train.py", source.replace("math.cos(", "math.sin("))
    assert run_here(dataset, tmp_path, init_from="resume", max_iters=8) == 0
    assert capsys.readouterr().out.count(said) == 1
