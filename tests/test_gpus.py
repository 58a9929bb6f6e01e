"""The memory model against hand-computed values, and the micro-batch it names."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare_nanogpt import memory_of_imports
from helpers import write_dataset
from trainee import Trainee

import bench
from common.console import UserError
from configurator import Config, divisors, load_config
from model import GPTConfig
from reports.memory import (
    CONTEXT_BYTES,
    block_bytes,
    fitting_batch,
    memory_bytes,
    memory_needed,
)
from train import model_config
from training import hardware
from training.gpus import GIB, read_gpu_table, resolve_gpu, short_name

BF16 = "bfloat16"
PEAKS = ("bf16_tflops", "fp16_tflops")
GPT124M = GPTConfig(bias=False)
ROOT = Path(__file__).parent.parent
CONFIG_FOLDER = ROOT / "config"
CONFIG_FILES = [
    path for path in sorted(CONFIG_FOLDER.glob("*.py")) if "# estimated: " in path.read_text()
]
# rows of tests/nullgpu/run.py, but nanoGPT's
SIMULATED = json.loads((ROOT / "results" / "nullgpu.json").read_text())["rows"]
SIMULATED = {name: row for name, row in SIMULATED.items() if row["model"] != "nanoGPT"}
GPT40M = GPTConfig(n_embd=384, n_head=6, bias=False)


def model_of(config: Config) -> GPTConfig:
    return model_config(config, 50257, flash=config.flash, compiled=config.compile)


def peak_bytes(trainee: Trainee) -> int:
    """
    Weights, optimizer state and the most that lives beside them in an iteration, as the allocator
    counted it.
    """
    trainee.step()  # makes the optimizer's state
    moments = (v for state in trainee.optimizer.state.values() for v in state.values())
    resident = sum(t.numel() * t.element_size() for t in (*trainee.model.parameters(), *moments))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        trainee.step()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return resident + max(
        itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns()))
    )


@pytest.mark.parametrize(
    "batch_size, compiled, gigabytes",
    [(8, False, 11.4), (8, True, 6.2), (16, False, 20.0), (16, True, 9.5)],
)
def test_memory_of_gpt124m(batch_size, compiled, gigabytes):
    """
    By hand: 1.01 (18 N + B T (12 * 36.08 C + 6 C + k V)) + 0.55 GB with N = 124.4M, k = 12 eager
    and 2 compiled; compiled another 2 C V = 0.08 GB, and the stream in 2 bytes, B T 26 C less;
    eager a gap of 2 B T V; GB = 1e9.
    """
    parts = memory_bytes(Config(compile=compiled), GPT124M, BF16, batch_size)
    assert sum(parts.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_parts_of_gpt124m_by_hand():
    """N = 50304 * 768 + 1024 * 768 + 12 * (12 * 768^2 + 2 * 768) + 768 = 124,373,760."""
    parts = memory_bytes(Config(), GPT124M, BF16, 8)
    # positions are looked up in float32
    assert parts["weights"] == 6 * 124_373_760 - 2 * 1024 * 768
    assert parts["gradients"] == 4 * 124_373_760
    assert parts["optimizer"] == 8 * 124_373_760
    # one momentum of 12 * 12 * 768^2 weights, and a number for each index of their longer sides
    with_muon = memory_bytes(Config(optimizer="muon"), GPT124M, BF16, 8)
    sides = 12 * (4 * 768 + 2 * 3072)
    assert with_muon["optimizer"] == 8 * 124_373_760 - 4 * 84_934_656 + 4 * sides
    assert parts["logits"] == 2 * 50304 * (8 * 1024 + 768)
    assert parts["activations"] == 8 * 1024 * (12 * (32 * 768 + 16 + 48) + 4 * 768)
    chunked = memory_bytes(Config(compile=False), replace(GPT124M, loss_chunk=1024), BF16, 8)
    assert chunked["logits"] == 50304 * (12 * 1024 + 4 * 768)  # and the head's gradient in float32


def test_the_example_in_memory_md_is_what_the_model_counts():
    text = (ROOT / "docs" / "internals" / "memory_model.md").read_text(encoding="utf-8")
    text = text.split("\n## An example\n")[1].split("\n## ")[0]
    rows = dict((r[0], r[1:]) for r in re.findall(r"^\| (\S+) \| (.*?) ?\| (\S+) \|$", text, re.M))
    config = load_config([str(CONFIG_FOLDER / "gpt124m_4070.py")])
    parts = memory_bytes(config, model_of(config), BF16, config.batch_size)
    for name, size in parts.items():
        formula, shown = rows[name]
        assert float(shown) == pytest.approx(size / 1e9, abs=0.0051), name
        if name not in ("fragmentation", "context"):
            assert eval(formula, dict(N=124_373_760)) == size, name
    gib, shown = rows["**sum**"]
    assert shown == f"**{sum(parts.values()) / 1e9:.2f}**"
    assert gib == f"{sum(parts.values()) / GIB:.1f} GiB"


def test_recompute_keeps_the_stream_at_each_blocks_entry():
    """
    By hand: 6.2 GB less 8 * 1024 * 12 * (30 * 768 + 64) = 2.27 and autocast's copies of 11 blocks,
    2 * 11 * 12 * 768^2.
    """
    parts = memory_bytes(Config(), replace(GPT124M, recompute=True), BF16, 8)
    # the logits outweigh one block's
    assert parts["activations"] == 8 * 1024 * (12 * 2 * 768 + 4 * 768)
    assert sum(parts.values()) / 1e9 == pytest.approx(3.7, abs=0.06)


def test_plain_attention_keeps_its_square_of_weights():
    flash, plain = (
        memory_bytes(Config(), GPTConfig(bias=False, flash=f), BF16, 8)["activations"]
        for f in (True, False)
    )
    assert plain - flash == 12 * 8 * 12 * 1024 * 1024 * 6


def test_largest_micro_batch_that_fits_divides_the_sequences():
    """512 sequences an iteration; 12 would fit into 9 GB, but does not divide 512."""
    assert fitting_batch(Config(), GPT124M, BF16, 512, 9e9) == 8
    assert fitting_batch(Config(), GPT124M, BF16, 480, 9e9) == 12
    assert fitting_batch(Config(), GPT124M, BF16, 512, 2e9) is None


def test_divisors_of_a_number_too_large_to_count_to():
    assert divisors(2**40) == [2**n for n in range(41)]
    assert [divisors(n) for n in (1, 36)] == [[1], [1, 2, 3, 4, 6, 9, 12, 18, 36]]


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("RTX4070", "GeForce RTX 4070"),
        ("geforce 4070", "GeForce RTX 4070"),
        ("4070ti", "GeForce RTX 4070 Ti"),
        ("rtx3080-12gb", "GeForce RTX 3080"),
        ("A100-80GB", "A100-SXM4-80GB"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "GeForce RTX 4070 Laptop GPU"),
        ("rtx-4070-laptop", "GeForce RTX 4070 Laptop GPU"),
        ("rtx 4070 mobile", "GeForce RTX 4070 Laptop GPU"),
        ("a100 80", "A100-SXM4-80GB"),
        ("h100 sxm", "H100 80GB HBM3"),
        ("rtx 3080 12", "GeForce RTX 3080"),
        ("4070", "GeForce RTX 4070"),
    ],
)
def test_a_name_may_be_written_in_one_word(typed, meant):
    row = resolve_gpu(typed)
    assert short_name(row) == meant
    if "3080" in typed:
        assert row["memory_gib"] == "12"


def test_each_card_is_found_by_the_name_that_an_error_offers():
    for row in read_gpu_table():
        found = resolve_gpu(f"{short_name(row)}, {row['memory_gib']}GB")
        assert [found[key] for key in PEAKS] == [row[key] for key in PEAKS], short_name(row)


@pytest.mark.parametrize("typed", ["407", "RTX 4O90", "4070 Tii", "M3", "GTX1080", ""])
def test_an_unknown_or_mistyped_card_is_told_of_the_list(typed):
    with pytest.raises(UserError, match="is not in gpus.csv; python bench.py plan --gpu=all lists"):
        resolve_gpu(typed)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_what_a_configs_comments_say_about_memory_is_estimated(path):
    """`batch_size = 8  # estimated: 6.1 GiB; 16 would need 9.4 GiB`"""
    config = load_config([str(path)])
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("batch_size = ")]
    claims = dict([(config.batch_size, float(re.search(r"estimated: ([\d.]+) GiB", line)[1]))])
    for batch_size, gib in re.findall(r"(\d+) would need ([\d.]+) GiB", line):
        claims[int(batch_size)] = float(gib)
    for batch_size, gib in claims.items():
        needed = memory_needed(config, model_of(config), config.dtype, batch_size)
        assert gib == pytest.approx(needed / 2**30, abs=0.06)
        assert batch_size * config.block_size * 50304 < 2**31  # logits, for 32-bit indices


# -----------------------------------------------------------------------------
# The memory model against torch's allocator on simulated cards


def tensor_bytes(config: Config, model: GPTConfig, dtype: str, batch_size: int) -> float:
    """What the model says of the tensors alone."""
    parts = memory_bytes(config, model, dtype, batch_size)
    return sum(parts.values()) - parts["fragmentation"] - parts["context"]


@pytest.mark.upstream
@pytest.mark.parametrize("name", SIMULATED)
def test_memory_is_within_a_twentieth_of_the_allocators(name):
    """Of the tensors at the peak, and within a tenth of what the allocator reserves for them."""
    row = SIMULATED[name]
    config = load_config(row["command"].split())
    sizes = (config, model_of(config), config.dtype, config.batch_size)
    assert tensor_bytes(*sizes) / GIB == pytest.approx(row["allocated_gib"], rel=0.05)
    reserved = memory_needed(*sizes) - CONTEXT_BYTES
    assert reserved / GIB == pytest.approx(row["reserved_gib"], rel=0.1)


# -----------------------------------------------------------------------------
# The memory model on a CPU


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """8,190 ids: enough that the logits are most of the memory, a sixth of GPT-2's to compute."""
    return write_dataset(tmp_path_factory.mktemp("data") / "words", [4000], vocab=8190)


def trainee(**changes) -> Trainee:
    keys = dict(n_head=2, batch_size=4, block_size=256, gradient_accumulation_steps=2)
    keys |= dict(device="cpu", compile=False, dataset="none") | changes
    return Trainee(load_config([f"--{name}={value}" for name, value in keys.items()]))


SMALL = dict(n_layer=2, n_embd=128, dtype="float32")
HALF = dict(n_layer=4, n_embd=128, dtype="bfloat16")
FAST = dict(model="fast", optimizer="muon", tie_weights=False)
SHAPES = [
    SMALL | dict(n_embd=256, loss_chunk="off", tie_weights=False),
    SMALL | dict(loss_chunk=256),
    HALF,
    SMALL | FAST,
    HALF | dict(recompute=True),
    # few logits: the peak is in a block
    HALF | dict(n_layer=8, recompute=True, dataset="tiny"),
    SMALL | FAST | dict(n_layer=4, recompute=True, dataset="tiny"),
]
SLOW_SHAPES = [
    SMALL | dict(dataset="none"),  # GPT-2's vocabulary
    SMALL | dict(optimizer="muon"),
    SMALL | FAST | dict(optimizer="adamw"),
    SMALL | dict(n_layer=4, n_embd=256, recompute=True, dataset="tiny"),
]
# compiled. The fast model in bfloat16 is left to the simulated cards: on a CPU its norms are
# composed in float32
SLOW_SHAPES += [
    HALF | dict(n_layer=2, compile=True),
    SMALL | dict(n_layer=4, n_embd=256, compile=True),
    HALF | dict(n_layer=2, n_embd=256, compile=True, loss_chunk="256"),
    HALF | dict(recompute=True, compile=True),
]


@pytest.mark.upstream
@pytest.mark.parametrize(
    "changes",
    [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES)],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_memory_model_counts_the_tensors_alive(changes, dataset, words, monkeypatch):
    """
    What lives is the same on every machine; eager within 1 %, compiled within 10 %, as what is
    fused varies. With the attention that a GPU would use.
    """
    monkeypatch.setattr(hardware, "PLAIN_ATTENTION_TOKENS", 0)
    folders = dict(tiny=dataset, words=words, none="none")
    t = trainee(**changes | dict(dataset=folders[changes.get("dataset", "words")]))
    measured = peak_bytes(t)
    modelled = tensor_bytes(t.config, t.model.config, t.hw.dtype_name, 4)
    assert modelled == pytest.approx(measured, rel=0.1 if t.config.compile else 0.01)


def saved_bytes(words: str, compiled: bool = False, **keys) -> tuple[int, GPTConfig]:
    """What autograd saves of a model 256 wide for 4 x 256 tokens, its parameters left out."""
    keys |= dict(n_embd=256, tie_weights=False, loss_chunk="off", dataset=words)
    t = trainee(**keys)
    forward, storages = torch.compile(t.model) if compiled else t.model, {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x
        return x

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with saving, torch.autocast("cpu", enabled=keys["dtype"] == "bfloat16"):
        forward(*torch.zeros(2, 4, 256, dtype=torch.long))
    for p in t.model.parameters():
        storages.pop(p.untyped_storage().data_ptr(), None)
    return sum(x.untyped_storage().nbytes() for x in storages.values()), t.model.config


@pytest.mark.upstream
@pytest.mark.parametrize(
    "model, dtype, compiled",
    [
        *itertools.product(["gpt2"], ["float32", "bfloat16"], [False]),
        ("fast", "float32", False),
        *(
            pytest.param(model, dtype, True, marks=pytest.mark.slow)
            for model, dtype in itertools.product(["gpt2", "fast"], ["float32", "bfloat16"])
        ),
    ],
)
def test_a_block_keeps_what_the_memory_model_says(model, dtype, compiled, words, monkeypatch):
    """
    What autograd saves for four layers, less that for two. The compiler decides this in the same
    way for a GPU. Autocast's copies of the matrices are among it.
    """
    monkeypatch.setattr(hardware, "PLAIN_ATTENTION_TOKENS", 0)
    keys = dict(model=model, dtype=dtype, compiled=compiled)
    two, _ = saved_bytes(words, n_layer=2, **keys)
    four, config = saved_bytes(words, n_layer=4, **keys)
    copies = 2 * 12 * 256**2 if dtype == "bfloat16" else 0
    of_a_block = (four - two) / 2 - copies
    assert of_a_block / (4 * 256) == pytest.approx(block_bytes(config, dtype, compiled), rel=0.002)


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [("float32", False), pytest.param("bfloat16", True, marks=pytest.mark.slow)],
)
def test_value_embeddings_and_token_pairs_keep_what_the_memory_model_says(
    dtype, compiled, words, monkeypatch
):
    """But for the gates, of one number a head and not a channel, and the rows' numbers."""
    monkeypatch.setattr(hardware, "PLAIN_ATTENTION_TOKENS", 0)
    keys = dict(model="fast", n_layer=4, dtype=dtype, compiled=compiled)
    saved, modelled = [], []
    for tables, rows in ((0, 0), (2, 64)):
        sizes = dict(value_tables=tables, bigram_rows=rows)
        total, config = saved_bytes(words, **sizes, **keys)
        saved.append(total)
        parts = memory_bytes(Config(compile=compiled), config, dtype, 4)
        modelled.append(parts["activations"])
    assert saved[1] - saved[0] == pytest.approx(modelled[1] - modelled[0], rel=0.03)


@pytest.mark.slow
def test_memory_of_a_process_is_what_it_grew_by():
    """
    Also where its parent had more in use. Kept memory is not in one piece, and a machine's own:
    between -10 and +150 %.
    """
    ballast = torch.ones(3 * 2**28)  # 3 GiB
    keys = HALF | dict(n_embd=256, n_head=4, dtype="float32", batch_size=4, block_size=256)
    keys |= dict(gradient_accumulation_steps=2, device="cpu", compile=False, dataset="none")
    flags = [f"--{name}={value}" for name, value in keys.items()]
    config = load_config(flags)
    grown = bench.measure(config, seconds=0)["mem_gib"] - memory_of_imports()
    needed = memory_needed(config, model_of(config), "float32", config.batch_size)
    modelled = (needed - CONTEXT_BYTES) / GIB
    assert 0.9 < grown / modelled < 2.5 and ballast.sum() == 3 * 2**28
