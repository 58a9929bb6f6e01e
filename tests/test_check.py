"""
Check which of its three verdicts `python bench.py check` prints for machines with planted faults.
The check's reference uses plain attention, so a fault planted in fused attention shows only on the
device's side.
"""

from functools import partial

import pytest
import torch
from cases import slow_but
from program import ROOT, run
from torch.nn import functional as F

from configurator import load_config
from machine import compiled
from machine.compiled import RECIPES, compile_model
from model_fast import FastConfig

RIGHT = "this machine trains correctly"
UNCOMPILED = "this machine trains correctly with --compile=False, because "
NOT_HERE = "do not train here because "


@pytest.fixture
def traced(monkeypatch):
    """Trace the model instead of compiling it, which takes less time."""
    monkeypatch.setattr(compiled, "compile_model", partial(compile_model, backend="eager"))


def verdict_of(*keys: str, code: int = 0) -> str:
    """Return the last line that the check prints."""
    result = run("bench.py", "check", *keys)
    assert result.code == code, result.err
    return result.out.splitlines()[-1]


@pytest.mark.parametrize("dtype", slow_but("float32", of=["float32", "bfloat16", "float16"]))
def test_check_passes_a_machine_without_faults(dtype, traced):
    """Print that this machine trains correctly, in every dtype."""
    assert verdict_of("--device=cpu", f"--dtype={dtype}") == RIGHT


@pytest.mark.parametrize("recipe, config", [("gpt2", "gpt124m_4070"), ("fast", "fast124m")])
def test_check_uses_the_models_of_the_124m_configs(recipe, config):
    """Use their biases and head size, because others run other kernels."""
    checked, trained = RECIPES[recipe], load_config([f"{ROOT}/config/{config}.py"])
    assert isinstance(checked, FastConfig) == (trained.model == "fast")
    assert checked.bias == trained.bias
    assert checked.n_embd // checked.n_head == trained.n_embd // trained.n_head


# -----------------------------------------------------------------------------
# Faults of a kernel: what attention returns instead of its own output


class GradientOff(torch.autograd.Function):
    """Return the same numbers, with a gradient that is 1% off."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


def fails(y, v):
    raise RuntimeError("CUDA error: no kernel image is available for execution")


KERNELS = {  # wrong kernels, each with a word of check's verdict
    "an output": (lambda y, v: 1.01 * y, "gradient"),
    "a gradient": (lambda y, v: GradientOff.apply(y), "gradient"),
    "not a number": (lambda y, v: y * float("nan"), "gradient"),
    # like Metal's kernel, pytorch #195910
    "without gradients alone": (
        lambda y, v: y if y.requires_grad else v.mean(dim=2, keepdim=True).expand_as(y),
        "evaluation",
    ),
    "the first sequence for all": (lambda y, v: y[:1].expand_as(y), "gradient"),  # a wrong stride
    "an error": (fails, "RuntimeError: CUDA error: no kernel"),
}


@pytest.mark.parametrize("kernel", slow_but("an output", of=KERNELS))
def test_check_advises_against_training_if_a_kernel_is_wrong(kernel, monkeypatch):
    """Exit with code 1, and say whether gradients or an evaluation are wrong."""
    fault, word = KERNELS[kernel]
    attention = F.scaled_dot_product_attention

    def faulty(q, k, v, **options):
        return fault(attention(q, k, v, **options), v)

    monkeypatch.setattr(F, "scaled_dot_product_attention", faulty)
    line = verdict_of("--device=cpu", "--dtype=float32", "--compile=False", code=1)
    assert line.startswith(f"{NOT_HERE}gpt2 exact float32 ") and word in line


# -----------------------------------------------------------------------------
# The compiler


def wrong(model) -> None:
    model.register_forward_hook(lambda module, inputs, loss: 1.01 * loss)


def missing(model) -> None:
    def backend(graph, inputs):
        raise FileNotFoundError("no g++ here")

    compile_model(model, backend=backend)


@pytest.mark.parametrize(
    "compiler, said", slow_but((wrong, "the "), of=[(wrong, "the "), (missing, "no g++ here")])
)
def test_check_says_if_the_compiler_fails_or_is_wrong(compiler, said, monkeypatch):
    """
    Print that torch.compile does not work here, with the compiler's error, and exit with code 0.
    """
    monkeypatch.setattr(compiled, "compile_model", compiler)
    line = verdict_of("--device=cpu", "--dtype=float32")
    assert line.startswith(f"{UNCOMPILED}torch.compile does not work here (")
    assert said in line and line.count("torch.compile") == 1


@pytest.mark.slow
def test_check_compiles_for_real_and_passes_this_machine():
    assert verdict_of("--device=cpu") == RIGHT
