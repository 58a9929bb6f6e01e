"""Check that a run warns of float16 on a CPU, and --eval_only on a run."""

from pathlib import Path

import pytest
from program import column, train, write_tokens

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    max_iters=4,
    eval_interval=2,
    eval_tokens=64,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [900], [150])


def test_eval_only_prints_the_runs_last_val_loss_and_adds_no_file(tokens, tmp_path):
    """Evaluate the run in out_dir when the command line has no init_from."""
    out_dir = tmp_path / "run"
    keys = TINY | dict(dataset=tokens, out_dir=out_dir, block_size=16, learning_rate=0.01)
    train(**keys)
    before = sorted(out_dir.iterdir())
    result = train(**keys, eval_only=True)
    last = column(out_dir, "eval", "val_loss")[-1]
    assert f"val loss {last:.4f}" in result.out
    assert sorted(out_dir.iterdir()) == before


def test_warns_that_float16_on_a_cpu_is_slow(tokens, tmp_path):
    keys = TINY | dict(dataset=tokens, out_dir=tmp_path / "run", block_size=8, dtype="float16")
    result = train(**keys | dict(n_embd=4, max_iters=1, batch_size=1, eval_tokens=8))
    assert "--dtype=float32" in result.err
