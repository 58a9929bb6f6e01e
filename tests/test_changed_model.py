"""
FLOPs are counted as a model runs: both recipes by hand, and changed models. What a changed model
draws, counts and masks is seeded, saved and resumed.
"""

from pathlib import Path

import pytest
from program import (
    ROOT,
    assert_same_run,
    changed,
    checkpoint,
    column,
    finish,
    flags,
    start,
    write_tokens,
)

from configurator import load_config
from model import GPTConfig
from model_fast import FastConfig
from train import model_config
from training.hardware import count_flops

# 6 N + 12 L H Q T (PaLM paper, appendix B), by its parts: a layer's matrices, the head, a layer's
# attention
LAYER, HEAD, ATTENTION = 6 * 12 * 768**2, 6 * 768 * 50304, 12 * 768 * 1024
GATES = 6 * 6 * 12 * 6  # six of 12 x 6 weights; the tables are looked up
COUNTS = {
    # nanoGPT's number, 854.8 MFLOP a token, is 6 N + 12 L H Q T with the norms' weights in N
    ("gpt124m_4070", "--tie_weights=True"): 12 * (LAYER + ATTENTION) + HEAD,
    # a look-up table costs no FLOPs
    ("gpt124m_4070", "--tie_weights=False"): 12 * (LAYER + ATTENTION) + HEAD,
    ("fast124m_4070", "--seed=1"): 12 * (LAYER + ATTENTION) + HEAD + GATES,
}


@pytest.mark.parametrize("config, flag", COUNTS)
def test_gpt124m_is_counted_as_by_hand(config, flag):
    c = load_config([f"{ROOT}/config/{config}.py", flag])
    assert count_flops(model_config(c, 50257, flash=True, compiled=True)) == COUNTS[config, flag]


@pytest.mark.parametrize("kind", [GPTConfig, FastConfig])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(flash=False), dict(recompute=True), dict(loss_chunk=7), dict(dropout=0.1, bias=True)],
)
def test_the_count_is_the_same_whatever_computes_the_model(kind, changes):
    tables = dict(value_tables=1, bigram_rows=10**7) if kind is FastConfig else {}
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = kind(**dict(bias=False, tie_weights=False) | sizes | tables | changes)
    gates = 2 * 12 * 3 if kind is FastConfig else 0
    n = 100 * 96 + 2 * 12 * 96**2 + gates
    assert count_flops(config) == 6 * n + 12 * 2 * 96 * 40


# -----------------------------------------------------------------------------
# Changed models

TINY = dict(
    n_layer=3,
    n_head=2,
    n_embd=32,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_iters=2,
    max_iters=8,
    lr_decay_iters=8,
    eval_interval=4,
    eval_tokens=64,
    keep_checkpoints=9,
    device="cpu",
    dtype="float32",
    compile=False,
)
# of TINY, with its vocabulary of 61 padded to 128
TINY_LAYER, TINY_HEAD, TINY_ATTENTION = 6 * 12 * 32**2, 6 * 32 * 128, 12 * 32 * 16

ATTEND = "        y = attend(q, k, v, self.flash, scale=q.size(-1) ** -0.5, dropout=dropout)\n"
BLOCKS = "        blocks = self.transformer.h\n"
# lines of model.py, what stands there instead, and the FLOPs of a token then
MODELS = {
    # each token meets a quarter of the keys
    "attention in windows": (
        ATTEND,
        "        q, k, v = (part.unflatten(2, (-1, 4)) for part in (q, k, v))\n"
        "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3)\n",
        3 * (TINY_LAYER + TINY_ATTENTION / 4) + TINY_HEAD,
    ),
    # heads of 32 in the first of two products, and of 16 in the second
    "wider queries": (
        ATTEND,
        "        q, k = F.pad(q, (0, 16)), F.pad(k, (0, 16))\n"
        "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
        3 * (TINY_LAYER + TINY_ATTENTION * 1.5) + TINY_HEAD,
    ),
    "the middle block twice": (
        BLOCKS,
        "        first, middle, last = self.transformer.h\n"
        "        blocks = [first, middle, middle, last]\n",
        4 * (TINY_LAYER + TINY_ATTENTION) + TINY_HEAD,
    ),
    # as a kernel that needs a GPU, or numbers that the model reads on the host
    "does not run without memory": (BLOCKS, f"{BLOCKS}        x.sum().item()\n", None),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [700, 37, 500], [250, 150])


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_model_is_counted_as_it_runs(name, tokens, tmp_path):
    old, new, flops = MODELS[name]
    program = changed(tmp_path / "program", {"model.py": [(old, new)]})
    keys = TINY | dict(max_iters=1, peak_tflops=1, dataset=tokens, out_dir=tmp_path / "run")
    result = finish(start("train.py", *flags(**keys), cwd=program, only_torch=True))
    assert result.code == 0, result.err
    assert column(tmp_path / "run", "start", "flops_per_token") == [flops]
    assert ("mfu n/a, tok/s" in result.out) == (flops is None)


# an MLP that draws by each of the three sources of random numbers, counts its calls, and holds a
# mask of infinities: only weights that have become infinite are not saved
NOISY = {
    "model.py": [
        ("import math\n", "import math\nimport random\n\nimport numpy as np\n"),
        (
            "        self.c_fc = nn.Linear(",
            '        self.register_buffer("calls", torch.zeros(()))\n'
            '        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))\n'
            "        self.c_fc = nn.Linear(",
        ),
        (
            "        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))\n",
            "        y = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))\n"
            "        if not self.training:\n"
            "            return y\n"
            "        self.calls += 1\n"
            "        return y * (torch.rand(()) + np.random.rand() + random.gauss(1, 0.1))\n",
        ),
    ]
}
# several launches in one process, as importing the changed program takes two seconds; in between
# the random numbers are somewhere else. The last one has a compiler, which computes the same.
LAUNCHES = """
import random, runpy, sys
import numpy as np, torch
given = sys.argv[1:]
for out_dir, *last in (
    ("straight", "--max_iters=8"),
    ("halves", "--max_iters=4"),
    ("halves", "--max_iters=8", "--init_from=resume"),
    ("compiled", "--max_iters=8", "--compile=True"),
):
    torch.compile = lambda call: call
    random.seed()
    np.random.seed()
    torch.seed()
    sys.argv = ["train.py", *given, f"--out_dir={out_dir}", *last]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def test_what_a_model_draws_counts_and_masks_is_seeded_saved_and_resumed(tokens, tmp_path):
    """And the proof that a compiler computes the same leaves no trace in it."""
    program = changed(tmp_path / "program", NOISY)
    words = flags(**TINY, dropout=0.1, dataset=tokens)
    result = finish(start("-c", LAUNCHES, *words, cwd=program, only_torch=True))
    assert result.code == 0, result.err
    assert "warning" not in result.err
    assert_same_run(program / "straight", program / "halves", 8)
    assert_same_run(program / "straight", program / "compiled", 8)
    weights = checkpoint(program / "straight", 8)["model"]
    assert weights["transformer.h.0.mlp.calls"] == 8 * 2  # micro-batches
    assert weights["transformer.h.0.mlp.mask"][0, 1] == float("-inf")
