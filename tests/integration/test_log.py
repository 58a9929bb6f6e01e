"""
Check that a run whose log does nothing trains, saves and ends like any other, and check what the
log's lines say.
"""

import contextlib
from unittest.mock import patch

from program import Run, same, train

TINY = dict(n_layer=1, n_embd=16, max_iters=12, warmup_iters=2, eval_interval=4, eval_tokens=160)
TINY |= dict(sample_tokens=5, dropout=0.1, learning_rate=0.01, keep_checkpoints=9)


class NoLog:
    """Stand in for a log, with methods that all do nothing."""

    def __init__(self, *arguments, **named):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def test_a_run_without_a_log_saves_the_same_checkpoints(tiny, tmp_path):
    logged, silent = Run(tmp_path / "logged"), Run(tmp_path / "silent")
    for ran, log in ((logged, contextlib.nullcontext()), (silent, patch("run.log.Log", NoLog))):
        with log:
            train(**tiny | dict(max_iters=6, out_dir=ran.out_dir))
            train(**tiny | dict(out_dir=ran.out_dir), init_from="resume")
    assert logged.saved == silent.saved == [4, 6, 8, 12]
    pairs = [(logged.state(it), silent.state(it)) for it in silent.saved]
    for a, b in [*pairs, (logged.best, silent.best)]:
        for key in ("model", "optimizer", "scaler", "iter_num", "val_loss", "complete"):
            assert same(a[key], b[key]), key
    assert (tmp_path / "silent" / "metrics.jsonl").read_bytes() == b""
