"""Compare whole runs of the fast recipe with the second trainer in reference_fast.py."""

import pytest
from cases import slow_but
from program import Run, train
from reference_fast import Trainer

from optimizer import NEWTON_SCHULZ

ITERATIONS = 12
# config/fast.py made small, with a schedule that has all its parts
RECIPE = dict(n_layer=3, n_head=2, n_embd=32, bias=True, optimizer="muon", block_size=16)
RECIPE |= dict(batch_size=4, gradient_accumulation_steps=3, learning_rate=0.025, muon_momentum=0.9)
RECIPE |= dict(weight_decay=0.1, beta1=0.8, warmup_iters=2, min_lr=0.001, decay_fraction=0.7)
RECIPE |= dict(max_iters=ITERATIONS, eval_tokens=20 * 16, seed=5)
ONLY_TRAIN_PY = dict(model="fast", lr_schedule="wsd", grad_clip=0.0, eval_interval=6)
ONLY_TRAIN_PY |= dict(checkpoint_interval=2, keep_checkpoints=9, log_interval=1, device="cpu")
ONLY_TRAIN_PY |= dict(compile=False)


# How far apart sums in a different order may be: losses in nats, norms relative, weights relative
# to how far they have moved, in two iterations and in all. In float32 they were 7e-7, 1e-5, 4e-4
# and 5e-4; in bfloat16 3e-4, 2e-4, 6e-8 and 0.2, with 0.011 and 0.31 for the weights on another
# CPU. In the bfloat16 run, float32 would move the first norm by 2e-3, and the first weights by 0.03
# even if only the residual stream or only Muon is in float32.
TOLERANCES = dict(
    float32=dict(loss=1e-5, norm=5e-5, moved=(2e-3, 5e-3)),
    bfloat16=dict(loss=1e-3, norm=1e-3, moved=(0.015, 0.45)),
)


RUNS = [
    ({}, "float32", dict(loss_chunk=20)),  # of 64 tokens in a micro-batch
    (dict(bias=False), "float32", dict(loss_chunk=20, flash=False)),
    ({}, "bfloat16", {}),
]


@pytest.mark.parametrize("changes, dtype, computed", slow_but(RUNS[0], of=RUNS))
def test_a_fast_run_logs_and_saves_what_a_second_trainer_computes(
    changes, dtype, computed, tokens, tmp_path, monkeypatch
):
    """
    Compare losses, learning rates, gradient norms and weights with the independent trainer in
    reference_fast.py, which makes the public 18 Newton-Schulz iterations in float32.
    """
    if dtype == "bfloat16":  # 18 would round differently, by as much as float32
        monkeypatch.setattr("reference_fast.NEWTON_SCHULZ", NEWTON_SCHULZ)
    keys = RECIPE | changes | dict(dtype=dtype)
    command = keys | ONLY_TRAIN_PY | computed | dict(dataset=tokens, out_dir=tmp_path)
    train(**command | dict(max_iters=0))
    first = Run(tmp_path).state(0)["model"]
    train(**command, init_from="resume")
    second = Trainer(first, tokens, **keys)
    steps = []
    evals = [(0, second.evaluate("train"), second.evaluate("val"))]
    weights = {}
    for it in range(ITERATIONS):
        steps.append((it, *second.step()))
        if second.it % 6 == 0:
            evals.append((second.it, second.evaluate("train"), second.evaluate("val")))
        weights[second.it] = {n: w.clone() for n, w in second.weights.items()}

    close = TOLERANCES[dtype]
    its, losses, rates, norms = zip(*steps, strict=True)
    assert Run(tmp_path).steps("iter") == list(its)
    assert Run(tmp_path).steps("loss") == pytest.approx(losses, abs=close["loss"])
    assert Run(tmp_path).steps("lr") == pytest.approx(rates, rel=1e-8)  # nine digits are kept
    assert Run(tmp_path).steps("grad_norm") == pytest.approx(norms, rel=close["norm"])
    found = Run(tmp_path).evals("iter", "train_loss", "val_loss")
    for a, b in zip(found, evals, strict=True):
        assert a == pytest.approx(b, abs=close["loss"])
    for it, tolerance in zip((2, ITERATIONS), close["moved"], strict=True):
        saved = Run(tmp_path).state(it)["model"]
        for name, weight in weights[it].items():
            moved = (weight - first[name]).norm()
            assert (saved[name] - weight).norm() <= tolerance * moved, (it, name)
