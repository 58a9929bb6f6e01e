"""
A changed model: its FLOPs are counted as it runs, and where figures or weights are those of other
code, somebody is told.
"""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, flags, load, records, run_here, start_process
from test_ranks import run_ranks
from torch.nn import functional as F

import bench
import compare
import convert
import model as gpt2
import sample
from benchmarks import plan
from benchmarks.plan import card_figures, card_lines, estimated_pace, make_plan, plan_lines
from common.console import UserError
from configurator import Config, load_config
from model import GPT, CausalSelfAttention, GPTConfig, plain_attention
from training import build, runlog
from training.build import SHIPPED_CODE, code_of, count_flops, model_config
from training.memory import out_of_memory_advice

GPT124M = GPTConfig(bias=False)
# 6 N + 12 L H Q T (PaLM paper, appendix B), by its parts: a layer's matrices, the head, a layer's
# attention
LAYER, HEAD, ATTENTION = 6 * 12 * 768**2, 6 * 768 * 50304, 12 * 768 * 1024
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


@pytest.mark.parametrize("tie_weights", [True, False])
def test_gpt124m_is_counted_as_by_hand(tie_weights):
    """
    nanoGPT's number, 854.8 MFLOP a token, is 6 N + 12 L H Q T with the norms' weights in N. A
    look-up table costs no FLOPs, so tying changes nothing.
    """
    config = load_config([f"{ROOT}/config/gpt124m_4070.py", f"--tie_weights={tie_weights}"])
    flops, words = count_flops(model_config(config, 50257))
    assert (flops, words) == (12 * (LAYER + ATTENTION) + HEAD, "counted")
    assert flops == pytest.approx(854.8e6, rel=0.001)


def test_the_fast_124m_is_counted_as_by_hand():
    """Its six gates have 12 x 6 weights each; the tables are looked up."""
    config = load_config([f"{ROOT}/config/fast124m_4070.py"])
    flops, _ = count_flops(model_config(config, 50257))
    assert flops == 12 * (LAYER + ATTENTION) + HEAD + 6 * 6 * 12 * 6


@pytest.mark.parametrize("kind", ["gpt2", "fast"])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(flash=False), dict(recompute=True), dict(loss_chunk=7), dict(dropout=0.1, bias=True)],
)
def test_the_count_is_the_same_whatever_computes_the_model(kind, changes):
    tables = dict(value_tables=1, bigram_rows=10**7) if kind == "fast" else {}
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = GPTConfig(**dict(model=kind, bias=False, tie_weights=False) | sizes | tables | changes)
    gates = 2 * 12 * 3 if kind == "fast" else 0
    n = 100 * 96 + 2 * 12 * 96**2 + gates
    assert count_flops(config) == (6 * n + 12 * 2 * 96 * 40, "counted")


class MiddleTwice(GPT):
    def hidden(self, idx, caches=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        first, *middle, last = self.transformer.h
        for block in (first, *middle, *middle, last):
            x = block(x)
        return self.transformer.ln_f(x)


def test_blocks_that_run_twice_count_twice(patch):
    patch.setattr(build, "GPT", MiddleTwice)
    assert count_flops(GPT124M)[0] == 22 * (LAYER + ATTENTION) + HEAD


def in_windows(layer, x, cache=None):
    """Sequences of 1024 in windows of 256: each token meets a quarter of the keys."""
    q, k, v = (part.unflatten(2, (-1, 256)) for part in qkv(layer, x))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3))


def own_products(layer, x, cache=None):
    return joined(layer, plain_attention(*qkv(layer, x), 0.0, True))


def wider_queries(layer, x, cache=None):
    """Heads of 128 in the first of two products, and of 64 in the second."""
    q, k, v = qkv(layer, x)
    q, k = F.pad(q, (0, 64)), F.pad(k, (0, 64))
    return joined(layer, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    "forward, factor", [(in_windows, 0.25), (own_products, 1), (wider_queries, 1.5)]
)
def test_attention_counts_as_it_runs(patch, forward, factor):
    patch.setattr(CausalSelfAttention, "forward", forward)
    assert count_flops(GPT124M)[0] == 12 * (LAYER + factor * ATTENTION) + HEAD


class Mixture(gpt2.MLP):
    """Four experts, each for the tokens that the router gives it."""

    def __init__(self, config):
        super().__init__(config)
        self.router = torch.nn.Linear(config.n_embd, 4, bias=False)
        self.others = torch.nn.ModuleList(MLP(config) for _ in range(3))

    def forward(self, x):
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate([super().forward, *self.others]):
            y[chosen == number] = expert(x[chosen == number])
        return y


MLP = gpt2.MLP


def test_a_mixture_counts_the_experts_that_its_tokens_reach(patch):
    """Which tokens those are, only real ones can tell."""
    patch.setattr(gpt2, "MLP", Mixture)
    sizes = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=128)
    flops, words = count_flops(GPTConfig(bias=False, **sizes))
    one_expert = 6 * (128 * 64 + 2 * (12 * 64**2 + 4 * 64)) + 12 * 2 * 64 * 64
    assert words == "counted" and flops == one_expert


def needs_a_gpu(layer, x, cache=None):
    raise RuntimeError("this kernel needs a GPU\nand more lines")


def test_a_model_that_cannot_be_counted_says_why(patch):
    patch.setattr(CausalSelfAttention, "forward", needs_a_gpu)
    reason = "the model does not run on a CPU: RuntimeError: this kernel needs a GPU"
    assert count_flops(GPT124M) == (None, reason)


def test_without_a_count_training_and_plan_go_on_and_say_why(patch, dataset, tmp_path, capsys):
    unknown = (None, "the model does not run on a CPU: RuntimeError: no kernel")
    for module in (build, runlog, plan):
        patch.setattr(module, "count_flops", lambda config: unknown)
    assert run_here(dataset, tmp_path / "run", max_iters=2, peak_tflops=1) == 0
    said = "FLOPs not counted: the model does not run on a CPU: RuntimeError: no kernel, so mfu n/a"
    out = capsys.readouterr().out
    assert said in out and "mfu n/a, tok/s" in out
    assert records(tmp_path / "run", "start")[0]["flops_per_token"] is None
    compare.main([str(tmp_path / "run"), "--gpu=4070"])
    assert "n/a" in capsys.readouterr().out
    arguments = [f"{ROOT}/config/gpt124m_4070.py", "--gpu=4070"]
    with pytest.raises(UserError, match="model: FLOPs not counted: .*; give --iter_seconds or"):
        bench.main(["plan", *arguments])
    bench.main(["plan", *arguments, "--iter_seconds=9", f"--json={tmp_path}/plan.json"])
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["flops_per_token"] is figures["total_flops"] is figures["mfu"] is None
    assert figures["hours"] > 0 and said in capsys.readouterr().out


def test_counting_draws_no_random_number_of_the_runs(patch):
    patch.setattr(gpt2, "MLP", Mixture)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    count_flops(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64))
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
        (memory,) = [line for line in plan_lines(p, GPT124M) if line.startswith("memory")]
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
    flops = 24 * (LAYER + ATTENTION) + HEAD
    assert f"{flops / 1e6:.1f} MFLOP/token (counted)" in out
    assert out.count(AS_SHIPPED) == 1
    arguments = flags(dataset, tmp_path / "out", init_from="resume", max_iters=5)
    out, err = said("train.py", *arguments)
    assert err.count(CHANGED) == 1


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
