"""
Check how the fast model starts, trains and compiles. test_recipe.py compares it with a second
implementation.
"""

import math
from dataclasses import replace

import pytest
import torch
from program import Run, train

from model_fast import FastConfig, FastGPT

SMALL = FastConfig(block_size=24, vocab_size=64, n_layer=3, n_head=2, n_embd=32, bias=True)


def tokens(B: int, T: int, vocab: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def test_biases_gains_and_weights_start_as_in_the_public_file():
    """
    Start biases, output projections and head at 0, gains at 1, and other matrices orthogonal, as
    train_gpt_simple.py does.
    """
    torch.manual_seed(0)
    config = replace(SMALL, n_embd=128)
    for name, p in FastGPT(config).named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
            continue
        is_zero = name.endswith(("c_proj.weight", "lm_head.weight"))
        std = 0 if is_zero else 1 if "wte" in name else math.sqrt(0.33 / 128)
        # this allows three standard errors, 1 / sqrt(2 n) each, for 8,192 numbers or more
        assert p.std().item() == pytest.approx(std, rel=0.025), name
        if not is_zero and "wte" not in name:
            for matrix in p.chunk(3 if "c_attn" in name else 1):
                product = matrix.mT @ matrix * 128 / len(matrix)
                torch.testing.assert_close(product, 0.33 * torch.eye(128), rtol=0, atol=1e-5)


TINY = dict(warmup_iters=2, max_iters=30, eval_interval=30, eval_tokens=256)


@pytest.mark.parametrize(
    "mixed",
    [dict(model="fast", learning_rate=1e-2), dict(optimizer="muon", learning_rate=1e-2)],
    ids=["fast", "muon"],
)
def test_adamw_can_train_the_fast_model_and_muon_can_train_gpt2(mixed, tiny):
    """Lower the val loss by more than 0.2 in 30 iterations with either combination."""
    train(**tiny | mixed)
    first, last = Run(tiny["out_dir"]).evals("val_loss")
    assert last < first - 0.2


def test_a_run_can_start_from_a_checkpoint_with_a_longer_context(tiny, tmp_path):
    """Load weights with block_size=8 instead of 16, and begin near the checkpoint's val loss."""
    long = tiny | dict(model="fast", max_iters=2)
    train(**long)
    train(**long | dict(block_size=8, init_from=long["out_dir"], out_dir=tmp_path / "short"))
    newest = Run(long["out_dir"]).evals("val_loss")[-1]
    # the same weights on half of the context
    assert Run(tmp_path / "short").evals("val_loss")[0] == pytest.approx(newest, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_models_residual_stream_is_bfloat16_under_bfloat16_but_never_float16(dtype):
    """
    Keep the stream in float32 under float16 autocast, because a sum over all blocks may overflow
    float16.
    """
    with torch.autocast("cpu", dtype):
        stream = FastGPT(SMALL).hidden(tokens(2, 8))
    assert stream.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
