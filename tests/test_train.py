"""
Check that training waits for the device only at log lines, and that compiled code is used only if
it computes what eager code does.
"""

from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import pytest
import torch
from program import FAST, TINY_RUN, Run, assert_same_run, flags, refused, run, train, write_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_setup import TrainingSetup

from configurator import Config, load_config
from data.shards import open_dataset
from machine.hardware import set_up
from model import GPT, count_targets
from train import estimate_loss, sum_losses

TINY = TINY_RUN | dict(n_layer=1, gradient_accumulation_steps=3, learning_rate=0.01, warmup_iters=2)
TINY |= dict(max_iters=6, lr_decay_iters=6, eval_interval=3, eval_tokens=64, keep_checkpoints=9)


class NoFloat64(TorchDispatchMode):
    """Stand in for a device without float64, such as a Mac's GPU."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        assert all(t.dtype != torch.float64 for t in tensors), function
        return result


@pytest.mark.parametrize("recipe", [{}, FAST], ids=["gpt2", "fast"])
def test_an_iteration_needs_no_float64_on_the_device(recipe):
    """Give targets weights too."""
    setup = TrainingSetup(load_config(flags(**TINY | recipe)), vocab=61)
    (idx, targets), *others = setup.batches
    weights = torch.rand(targets.shape)
    with NoFloat64():
        setup.step([(idx, targets, weights), *others])
        assert count_targets(targets).dtype != torch.float64


class CountWaits(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(named or {}))


def test_training_waits_for_the_device_only_at_log_lines(tokens, tmp_path):
    """
    Count what .item() and `if tensor` call: none per iteration, a few per log line. An optimizer
    that is not fused would add one to each iteration.
    """

    def waits(max_iters: int, log_interval: int) -> int:
        keys = TINY | dict(max_iters=max_iters, log_interval=log_interval, eval_interval=100)
        with CountWaits() as counted:
            train(**keys, dataset=tokens, out_dir=tmp_path / f"{max_iters} {log_interval}")
        return counted.number

    # an earlier run, because a process computes some figures only once: FLOPs, optimizer bytes
    waits(0, 1)
    few = waits(3, 100)
    assert waits(6, 100) == few  # both print two log lines: three more iterations add no wait
    # four more lines: no more than one wait for each number of a record
    numbers = len(Run(tmp_path / "6 100").records("step")[-1])
    assert few < waits(6, 1) <= few + 4 * numbers


def test_an_evaluation_reads_a_million_tokens_of_train_and_of_others_as_many_as_asked(tmp_path):
    """Let the mean of the tokens be the loss: their windows are spread over the whole split."""

    class MeanOfTokens(torch.nn.Module):
        def forward(self, x, y):
            read.append(y.numel())
            return y.double().mean()

    def evaluate(eval_tokens: int) -> dict[str, float]:
        read.clear()
        c = Config(block_size=1024, batch_size=64, eval_tokens=eval_tokens, device="cpu")
        return estimate_loss(MeanOfTokens(), data, c, set_up(c))

    read: list[int] = []
    data = open_dataset(str(write_tokens(tmp_path / "data", [3 * 2**20 + 1], [2**21 + 1])))
    data.splits["more"] = data.val
    means = evaluate(2**20)
    assert sum(read) == 3 * 2**20
    assert evaluate(2**30)["train_loss"] == means["train_loss"]
    assert sum(read) == 2**20 + 2 * 2**21
    # the mean of a sample that is a third of all
    tokens = data.train.read_windows([1], 3 * 2**20)
    assert means["train_loss"] == pytest.approx(tokens.mean(), rel=1e-3)


def test_the_loss_of_an_iteration_is_the_mean_over_the_targets_of_all_its_micro_batches():
    """
    Compare the loss and the gradient norm of three weighted micro-batches, of which one has no
    targets, with those of their nine sequences in one. An evaluation has the same mean.
    """
    setup = TrainingSetup(load_config(flags(**TINY | dict(batch_size=9))), vocab=61)
    x, y = setup.batches[0]
    y[1, :5] = y[6:] = -1
    weights = torch.randn_like(y, dtype=torch.float32)
    whole, parts = [(x, y, weights)], [*zip(*(t.split(3) for t in (x, y, weights)), strict=True)]
    losses = torch.nn.functional.cross_entropy(
        setup.model(x).double().flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none"
    )
    expected = (losses * weights.flatten()).sum() / (y != -1).sum()
    for batches in (whole, parts):
        nats, count = sum_losses(setup.model, batches, setup.hw)
        assert nats / count == pytest.approx(expected.item(), rel=1e-5)
    start, norms = deepcopy(setup.model.state_dict()), []
    for batches in (whole, parts):
        setup.model.load_state_dict(start)
        loss, numbers = setup.step(batches)
        assert loss.item() / len(batches) == pytest.approx(expected.item(), rel=1e-5)
        norms.append(numbers["grad_norm"].item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


class Twice(GPT):
    def forward(self, *batch):
        loss = super().forward(*batch)
        self.numbers = dict(twice=2 * loss)
        return loss


@pytest.mark.parametrize("is_compiled", [False, True])
def test_numbers_that_the_model_leaves_are_averaged_as_the_loss_and_keep_no_graph(is_compiled):
    config = load_config(flags(**TINY | dict(batch_size=9)))
    setup = TrainingSetup(config, vocab=61, build=Twice)
    if is_compiled:
        setup.model.compile(backend="eager")
    x, y = setup.batches[0]
    y[4:] = -1  # so that micro-batches have other shares
    for _ in range(2):
        batches = [*zip(x.split(3), y.split(3), strict=True)]
        loss, numbers = setup.step(batches)
        assert numbers["twice"].item() == pytest.approx(2 * loss.item() / len(batches), rel=1e-6)
        assert not numbers["twice"].requires_grad and not hasattr(setup.model, "numbers")


# -----------------------------------------------------------------------------
# Compilers, by what torch.compile makes of a call of the model


def times(factor: float) -> Callable:
    return lambda call: lambda *batch: factor * call(*batch)


def broken(call: Callable) -> Callable:
    """Fail with torch's message, whose first line does not give the reason."""
    return mock.Mock(side_effect=RuntimeError("backend='inductor' raised:\nno C compiler"))


@pytest.mark.parametrize("compiler, reason", [(times(1.01), "loss"), (broken, "no C compiler")])
def test_a_run_ends_before_training_if_the_compiler_fails_or_is_wrong(compiler, reason, tiny):
    with mock.patch("torch.compile", compiler):
        result = run("train.py", *flags(**tiny | dict(dropout=0.1, compile=True)))
    refused(result, "torch.compile", reason, "--compile=False")
    assert not Run(tiny["out_dir"]).records("step")


def test_an_error_in_the_model_is_shown_with_its_full_traceback(tokens, tmp_path):
    """Show a mistake in a new loss term, which appears first while the model is compiled."""
    wrong = mock.patch(
        "torch.nn.functional.cross_entropy", side_effect=TypeError("a mistake in the model")
    )
    # a width that no other test uses, because the process remembers which FLOPs it cannot count
    keys = TINY | dict(n_embd=40, compile=True, dataset=tokens, out_dir=tmp_path)
    with wrong, mock.patch("torch.compile", times(1)):
        result = run("train.py", *flags(**keys))
    assert result.code == 1
    assert "Traceback" in result.err and "loss_sum" in result.err
    assert result.err.endswith("TypeError: a mistake in the model\n")


@pytest.mark.slow
def test_a_compiled_run_resumes_bit_for_bit_and_records_its_compile_time(tokens, tmp_path):
    keys = TINY | dict(compile=True, dropout=0.1, dataset=tokens)
    torch.compiler.reset()  # an earlier test may have compiled the same model
    train(**keys, out_dir=tmp_path / "straight")
    train(**keys | dict(max_iters=3), out_dir=tmp_path / "broken")
    train(**keys, out_dir=tmp_path / "broken", init_from="resume")
    assert_same_run(tmp_path / "straight", tmp_path / "broken", 6)
    # ten iterations take 0.05 s; compiling takes seconds, or 0.5 s where the compiled code lies in
    # torch's cache on the disk
    assert Run(tmp_path / "straight").column("end", "ledger")[0]["compile"] > 0.2
    assert not Run(tmp_path / "straight").records("event")
