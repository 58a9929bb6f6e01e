"""
Check the comparison of code with eager code in float32: it finds what a compiler or a kernel may
get wrong in either model and in every dtype, passes correct code, and changes nothing.
"""

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import slow_but
from torch import Tensor

import model
import model_fast
from configurator import Config
from model import GPTConfig
from model_fast import FastConfig, build_model
from training import compiled, hardware
from training.compiled import WrongCode, check_code

SIZES = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
MODELS = {
    "gpt2": GPTConfig(**SIZES),
    "fast": FastConfig(**SIZES, bias=True),
    "gpt2 in chunks": GPTConfig(**SIZES, loss_chunk="64"),
    "fast in chunks": FastConfig(**SIZES, bias=True, loss_chunk="64"),
}
DTYPES = ("float32", "bfloat16", "float16")
BATCH = 4

gpt_attend = model.attend
fast_attend = model_fast.attend
norm = model_fast.norm


def right(call):
    """Stand in for a compiler without faults, by running eager code."""
    return lambda *batch: call.__self__.forward(*batch)


def without_gradient(name: str):
    """Return a compiler that loses the gradient of a weight."""

    def compiler(call):
        def compiled(*batch):
            gpt = call.__self__
            weights = {name: gpt.get_parameter(name).detach()}
            return torch.func.functional_call(Uncompiled(gpt), weights, batch)

        return compiled

    return compiler


class Uncompiled(torch.nn.Module):
    """Wrap a model so that its calls are not compiled, with the same weight names."""

    def __init__(self, gpt):
        super().__init__()
        self.__dict__ |= {"_modules": gpt._modules, "gpt": gpt}

    def forward(self, *batch) -> Tensor:
        return self.gpt.forward(*batch)


def patched(target: str, function):
    """Return a compiler that computes another function in place of the target."""

    def compiler(call):
        def compiled(*batch):
            with mock.patch(target, function):
                return call.__self__.forward(*batch)

        return compiled

    return compiler


def of_loss(change):
    """Return a compiler that changes the loss, or the gradient that flows out of it."""
    return lambda call: lambda *batch: change(call.__self__.forward(*batch))


def gradients_times(factor: float):
    return of_loss(lambda loss: factor * loss + (1 - factor) * loss.detach())


def looking_ahead(attend):
    """Let each token also see the next one."""

    def wrong(q, k, v, flash, scale, dropout=0.0):
        scores = q * scale @ k.mT
        mask = torch.full_like(scores[0, 0], -torch.inf).triu(2)
        return (scores + mask).softmax(dim=-1) @ v

    return wrong


def mixing_rows(attend):
    """Give the second sequence of the batch the first one's attention output."""

    def wrong(*arguments, **options):
        y = attend(*arguments, **options)
        return torch.cat((y[:1], y[:1], y[2:]))

    return wrong


def cast(function):
    return lambda x, *rest, **more: function(x.bfloat16().type_as(x), *rest, **more)


# name: (the models in which it can occur, the wrong compiler)
FAULTS = {
    "a loss 1% off": ("gpt2 fast", of_loss(lambda loss: loss + 0.01 * loss.detach())),
    "a loss that is not a number": ("gpt2 fast", of_loss(lambda loss: loss * torch.nan)),
    "gradients halved": ("gpt2 fast", gradients_times(0.5)),
    "gradients 20% off": ("gpt2 fast", gradients_times(0.8)),
    "an embedding without gradient": ("gpt2 fast", without_gradient("transformer.wte.weight")),
    "positions without gradient": ("gpt2", without_gradient("transformer.wpe.weight")),
    "a bias without gradient": ("gpt2", without_gradient("transformer.h.1.mlp.c_fc.bias")),
    "a gain without gradient": ("fast", without_gradient("transformer.h.1.ln_2.weight")),
    "a head's bias without gradient": ("fast", without_gradient("lm_head.bias")),
    "a wrong mask in gpt2": ("gpt2", patched("model.attend", looking_ahead(gpt_attend))),
    "a wrong mask in fast": ("fast", patched("model_fast.attend", looking_ahead(fast_attend))),
    "a mixed-up sequence in gpt2": ("gpt2", patched("model.attend", mixing_rows(gpt_attend))),
    "a mixed-up sequence in fast": ("fast", patched("model_fast.attend", mixing_rows(fast_attend))),
    "a cast too early in gpt2": ("gpt2", patched("model.mean_loss", cast(model.mean_loss))),
    "a cast too early in fast": ("fast", patched("model_fast.norm", cast(norm))),
}


def seeing_all(attend):
    """Compute attention without its mask."""
    return lambda q, k, v, flash, scale, dropout=0.0: (q * scale @ k.mT).softmax(dim=-1) @ v


def seven_tenths(attend):
    return lambda *arguments, **options: 0.7 * attend(*arguments, **options)


KERNELS = {"attention without its mask": seeing_all, "attention times 0.7": seven_tenths}


def wrong_kernel(name: str, kernel: str):
    """
    Plant a kernel that is wrong only in half precision, in compiled and uncompiled code alike.
    """
    module = model_fast if "fast" in name else model
    attend, wrong = module.attend, KERNELS[kernel](module.attend)

    def either(*arguments, **options):
        chosen = wrong if torch.is_autocast_enabled("cpu") else attend
        return chosen(*arguments, **options)

    return mock.patch.object(module, "attend", either)


def hardware_in(dtype: str) -> hardware.Hardware:
    with mock.patch.object(hardware, "keep_freed_memory"):  # the setting would stay for other tests
        return hardware.set_up(Config(device="cpu", dtype=dtype))


def check(compiler, name: str, dtype: str, batch: int = BATCH) -> torch.nn.Module:
    """Check the code that the compiler makes of a model, or eager code if it is None."""
    torch.manual_seed(1)
    gpt = build_model(MODELS[name])
    with mock.patch("torch.compile", compiler):
        check_code(gpt, batch, 500, hardware_in(dtype), compiled=compiler is not None)
    return gpt


# half precision casts anyway where the last two cast too early
CASES = [(f, d) for f in FAULTS for d in DTYPES if d == "float32" or "cast" not in f]


@pytest.mark.parametrize(
    "fault, dtype", slow_but(*[case for case in CASES if "float32" in case], of=CASES)
)
def test_check_finds_compiler_faults_in_an_untrained_model(fault, dtype):
    """
    Find each fault although the fast model's head and projections, and GPT-2's biases, start at
    zero.
    """
    names, compiler = FAULTS[fault]
    for name in names.split():
        with pytest.raises(WrongCode, match="the (gradient of|evaluation loss|training loss) "):
            check(compiler, name, dtype)


@pytest.mark.parametrize("compiler", [right, None], ids=["compiled", "eager"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "fast"])
def test_check_finds_kernels_that_are_wrong_in_half_precision(name, dtype, kernel, compiler):
    with wrong_kernel(name, kernel), pytest.raises(WrongCode, match="the gradient of "):
        check(compiler, name, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_check_passes_correct_compiled_code_and_changes_nothing(name):
    """Leave weights, buffers and random states bit for bit as they were, and no gradients."""
    hw = hardware_in("bfloat16")
    torch.manual_seed(1)
    weights = build_model(MODELS[name]).state_dict()
    states = hw.get_rng_states()
    gpt = check(right, name, "bfloat16")
    for n, p in gpt.state_dict().items():
        assert torch.equal(p, weights[n]), n
    for n, state in hw.get_rng_states().items():
        assert torch.equal(torch.as_tensor(state), torch.as_tensor(states[n])), n
    assert all(p.grad is None for p in gpt.parameters())
    assert gpt.training


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_check_accepts_a_loss_term_that_ignores_the_targets(batch):
    """Accept a penalty on activations that somebody added to the loss, at several batch sizes."""
    mean_loss = model.mean_loss

    def with_term(x: Tensor, *rest, **named) -> Tensor:
        return mean_loss(x, *rest, **named) + 0.1 * x.float().square().mean()

    with mock.patch("model.mean_loss", with_term):
        check(right, "gpt2", "float32", batch)


APT = "; type sudo apt install g++ python3-dev"
FAILURES = {  # what looks for it and finds nothing, and what the message says
    "g++": ("shutil.which", f"there is no g++{APT}"),
    "Python.h": ("sysconfig.get_path", f"there is no Python.h{APT}"),
    "another": ("no.function", "cuda_utils.c"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other compilers")
@pytest.mark.parametrize("lookup, said", FAILURES.values(), ids=FAILURES)
def test_says_why_the_compiler_fails_in_one_line(lookup, said, monkeypatch, tmp_path):
    """Say what a fresh Linux lacks instead of printing g++'s command line."""
    (tmp_path / "Python.h").touch()
    found = {"shutil.which": "g++", "sysconfig.get_path": str(tmp_path)} | {lookup: ""}
    for name in ("shutil.which", "sysconfig.get_path"):
        monkeypatch.setattr(name, lambda _, found=found[name]: found)
    error = subprocess.CalledProcessError(1, ["g++", "cuda_utils.c"])
    with pytest.raises(WrongCode) as failure:
        check(lambda call: mock.Mock(side_effect=error), "gpt2", "float32")
    assert said in str(failure.value) and "\n" not in str(failure.value)


def drawing(call):
    """Compute the same as eager code, but draw more random numbers in between."""
    return lambda *batch: (torch.rand(7), call.__self__.forward(*batch))[1]


def test_check_compares_evaluation_losses_if_there_is_dropout():
    """
    Pass correct code, which may draw other random numbers, and refuse a loss that is 1% off in
    evaluation.
    """
    config = replace(MODELS["gpt2"], dropout=0.3)
    with mock.patch.dict(MODELS, gpt2=config):
        check(drawing, "gpt2", "float32")
        with pytest.raises(WrongCode, match="evaluation"):
            check(of_loss(lambda loss: 1.01 * loss), "gpt2", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "fast in chunks"])
def test_check_passes_torchs_compiler_on_random_weights_and_batches(name, dtype, monkeypatch):
    """Pass 24 random sets of weights and batches, compiled once."""
    gpt, hw = build_model(MODELS[name]), hardware_in(dtype)
    check_code(gpt, BATCH, 500, hw, compiled=True)
    monkeypatch.setattr(compiled, "compile_model", lambda model: None)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(1, 24):
            monkeypatch.setattr(compiled, "SEED", seed)
            check_code(gpt, BATCH, 500, hw, compiled=True)
