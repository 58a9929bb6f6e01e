"""
Check the comparison of code with eager code in float32: it finds what a compiler or a kernel may
get wrong in either model and in every dtype, passes correct code, and changes nothing. At the end,
check what `bench.py check`, which uses the same comparison, says of a machine.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from cases import slow_but
from program import run
from torch import Tensor
from torch.nn import functional as F

import model
from common.console import UserError
from configurator import Config
from machine import compile_check, hardware
from machine.compile_check import compile_checked, compile_model, eager_float32, try_code
from model import GPTConfig
from model_fast import FastConfig, build_model

SIZES = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
MODELS = {
    "gpt2": GPTConfig(**SIZES),
    "fast": FastConfig(**SIZES, bias=True),
    "gpt2 in chunks": GPTConfig(**SIZES, loss_chunk="64"),
    "fast in chunks": FastConfig(**SIZES, bias=True, loss_chunk="64"),
}
DTYPES = ("float32", "bfloat16", "float16")
BATCH = 4
VOCAB = 500


def hardware_in(dtype: str) -> hardware.Hardware:
    with mock.patch.object(hardware, "keep_freed_memory"):  # the setting would stay for other tests
        return hardware.set_up(Config(device="cpu", dtype=dtype))


def compiler(code):
    """Stand in for torch.compile. Compiled code computes code(model, x, y)."""
    return mock.patch("torch.compile", lambda call: lambda *batch: code(call.__self__, *batch))


def right(gpt, *batch) -> Tensor:
    return gpt.forward(*batch)


def check(code, name: str, dtype: str, batch: int = BATCH) -> str:
    """Return the problem that the check finds, or ""."""
    torch.manual_seed(1)
    gpt = build_model(MODELS[name])
    with compiler(code):
        return try_code(gpt, *eager_float32(gpt, batch, VOCAB), hardware_in(dtype))[0]


# -----------------------------------------------------------------------------
# Faults of a compiler


def of_loss(change):
    """Change the loss, or the gradient that flows out of it."""
    return lambda gpt, *batch: change(gpt.forward(*batch))


def without_gradient(gpt, *batch):
    """Lose the gradient of the token embedding."""
    weight = gpt.transformer.wte.weight.requires_grad_(False)
    loss = gpt.forward(*batch)
    weight.requires_grad_(True)
    return loss


def attending(wrong):
    """Let attention return wrong(correct attention, *arguments)."""

    def code(gpt, *batch):
        module = sys.modules[type(gpt).__module__]
        with mock.patch.object(module, "attend", partial(wrong, module.attend)):
            return gpt.forward(*batch)

    return code


def seven_tenths(attend, *arguments, **named):
    return 0.7 * attend(*arguments, **named)


def mixing_rows(attend, *arguments, **named):
    """Give the second sequence of the batch the first one's attention output."""
    y = attend(*arguments, **named)
    return torch.cat((y[:1], y[:1], y[2:]))


def cast(attend, q, *rest, **named):
    """Round the queries to bfloat16, as half precision does anyway."""
    return attend(q.bfloat16().type_as(q), *rest, **named)


FAULTS = {
    "a loss 1% off": of_loss(lambda loss: loss + 0.01 * loss.detach()),
    "a loss that is not a number": of_loss(lambda loss: loss * torch.nan),
    "gradients 20% off": of_loss(lambda loss: 0.8 * loss + 0.2 * loss.detach()),
    "an embedding without gradient": without_gradient,
    "a wrong scale": attending(seven_tenths),
    "a mixed-up sequence": attending(mixing_rows),
    "a cast too early": attending(cast),
}
CASES = [(f, d) for f in FAULTS for d in DTYPES if d == "float32" or "cast" not in f]
# half precision must find the smallest error by default too
DEFAULT = [case for case in CASES if case[1] == "float32" or "scale" in case[0]]


@pytest.mark.parametrize("fault, dtype", slow_but(*DEFAULT, of=CASES))
def test_check_finds_faults_in_an_untrained_model(fault, dtype):
    """
    Find each fault although the fast model's head and projections, and GPT-2's biases, start at
    zero.
    """
    for name in ("gpt2", "fast"):
        found = check(FAULTS[fault], name, dtype)
        assert found.startswith(("the gradient of ", "the evaluation loss ", "the training loss "))


# -----------------------------------------------------------------------------
# Correct code


def compile_here(gpt, code, hw) -> None:
    """Compile and check the model as a run does."""
    with compiler(code):
        compile_checked(gpt, Config(batch_size=BATCH), VOCAB, hw)


@pytest.mark.parametrize("name", slow_but("gpt2", "fast in chunks", of=MODELS))
def test_a_run_passes_correct_code_and_changes_nothing(name):
    """Leave weights and buffers bit for bit as they were, and no gradients."""
    hw = hardware_in("bfloat16")
    gpt = build_model(MODELS[name])
    weights = {n: p.clone() for n, p in gpt.state_dict().items()}
    compile_here(gpt, right, hw)
    for n, p in gpt.state_dict().items():
        assert torch.equal(p, weights[n]), n
    assert all(p.grad is None for p in gpt.parameters())
    assert gpt.training


@pytest.mark.parametrize("batch", [1, 5])
def test_check_accepts_a_loss_term_that_ignores_the_targets(batch):
    """Accept a penalty on activations that somebody added to the loss, at several batch sizes."""
    mean_loss = model.mean_loss

    def with_term(x: Tensor, *rest, **named) -> Tensor:
        return mean_loss(x, *rest, **named) + 0.1 * x.float().square().mean()

    with mock.patch("model.mean_loss", with_term):
        assert not check(right, "gpt2", "float32", batch)


def weighted(x, y):
    """Weigh and leave out targets, so that the sequences of a micro-batch count differently."""
    return x, y.masked_fill(y % 3 == 0, -1), x.float() / VOCAB - 0.3


def uncounted(x, y):
    """Count only targets after a special token, which random ids may not contain."""
    return x, y.fill_(-1)


@pytest.mark.parametrize("changed", [weighted, uncounted])
def test_check_accepts_what_somebodys_to_batch_returns(changed):
    plain = compile_check.to_batch
    ours = mock.patch.object(compile_check, "to_batch", lambda *words: changed(*plain(*words)))
    with ours:
        assert not check(right, "gpt2", "float32")
        wrong = check(of_loss(lambda loss: 1.01 * loss), "gpt2", "float32")
        assert bool(wrong) == (changed is weighted)


def drawing(gpt, *batch):
    """Compute the same as eager code, but draw more random numbers in between."""
    torch.rand(7)
    return gpt.forward(*batch)


def test_check_compares_evaluation_losses_if_there_is_dropout():
    """
    Pass correct code, which may draw other random numbers, and refuse a loss that is 1% off in
    evaluation.
    """
    with mock.patch.dict(MODELS, gpt2=replace(MODELS["gpt2"], dropout=0.3)):
        assert not check(drawing, "gpt2", "float32")
        assert "evaluation" in check(of_loss(lambda loss: 1.01 * loss), "gpt2", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "fast in chunks"])
def test_check_passes_torchs_compiler_on_random_weights_and_batches(name, dtype, monkeypatch):
    """Pass 24 random sets of weights and batches, compiled once."""
    hw, gpt = hardware_in(dtype), build_model(MODELS[name])
    start = {n: p.clone() for n, p in gpt.state_dict().items()}
    with torch.compiler.set_stance("default"):
        for seed in range(24):
            eager = build_model(MODELS[name])
            eager.load_state_dict(start)
            monkeypatch.setattr(compile_check, "SEED", seed)
            windows, exact = eager_float32(eager, BATCH, VOCAB)
            gpt.load_state_dict(eager.state_dict())
            assert not try_code(gpt, windows, exact, hw)[0]
            monkeypatch.setattr(compile_check, "compile_model", lambda model: None)
            torch.compiler.set_stance("fail_on_recompile")


# -----------------------------------------------------------------------------
# No compiler

FAILURES = {  # what looks for it and finds nothing, and what the message says
    "g++": ("shutil.which", "type sudo apt install g++ python3-dev"),
    "Python.h": ("sysconfig.get_path", "type sudo apt install g++ python3-dev"),
    "another": ("no.function", "cuda_utils.c"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other compilers")
@pytest.mark.parametrize("lookup, said", FAILURES.values(), ids=FAILURES)
def test_a_run_says_in_one_line_why_the_compiler_fails(lookup, said, monkeypatch, tmp_path):
    """Say what a fresh Linux lacks instead of printing g++'s command line."""
    (tmp_path / "Python.h").touch()
    found = {"shutil.which": "g++", "sysconfig.get_path": str(tmp_path)} | {lookup: ""}
    for name in ("shutil.which", "sysconfig.get_path"):
        monkeypatch.setattr(name, lambda _, found=found[name]: found)
    failing = mock.Mock(side_effect=subprocess.CalledProcessError(1, ["g++", "cuda_utils.c"]))
    with pytest.raises(UserError, match="python bench.py check") as failure:
        compile_here(build_model(MODELS["gpt2"]), failing, hardware_in("float32"))
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_a_compiler_gives_its_reason_after_its_command_line_and_warnings():
    """Quote what g++ says of a full /tmp, where torch prints 200,000 characters before it."""
    full = "fatal error: error writing to /tmp/ccRtbrHc.s: No space left on device"
    text = f"CppCompileError: C++ compile error\n\nCommand: g++ {'-O3 ' * 99}\n\nOutput:\n"
    text += f"{'vec256.h:245:25: warning: overflow ' * 99}\nmain.cpp:137:1: {full}\n  137 | }}"

    def code(gpt, x, y):
        raise RuntimeError(f"{text}\ncompilation terminated.\n\nSet TORCHDYNAMO_VERBOSE=1")

    assert check(code, "gpt2", "float32") == full


def test_a_run_says_that_memory_ran_out():
    failing = mock.Mock(side_effect=RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        compile_here(build_model(MODELS["gpt2"]), failing, hardware_in("float32"))


# -----------------------------------------------------------------------------
# bench.py check

RIGHT = "this machine trains correctly"


def verdict_of(*keys: str, code: int = 0) -> str:
    """Return the last line that the check prints."""
    result = run("bench.py", "check", "--device=cpu", *keys)
    assert result.code == code, result.err
    return result.out.splitlines()[-1]


@pytest.mark.parametrize("dtype", slow_but("float32", of=DTYPES))
def test_bench_check_passes_a_machine_without_faults(dtype, monkeypatch):
    """Trace the model instead of compiling it, which takes less time."""
    monkeypatch.setattr(compile_check, "compile_model", partial(compile_model, backend="eager"))
    assert verdict_of(f"--dtype={dtype}") == RIGHT


@pytest.mark.slow
def test_bench_check_compiles_for_real_and_passes_this_machine():
    assert verdict_of() == RIGHT


def fails(y, v):
    raise RuntimeError("CUDA error: no kernel image is available for execution")


KERNELS = {  # wrong fused attention, each with a word of the verdict
    "an output": (lambda y, v: 1.01 * y, "gradient"),
    # like Metal's kernel, pytorch #195910
    "without gradients alone": (
        lambda y, v: y if y.requires_grad else v.mean(dim=2, keepdim=True).expand_as(y),
        "evaluation",
    ),
    "an error": (fails, "RuntimeError: CUDA error: no kernel"),
}


@pytest.mark.parametrize("kernel", slow_but("an output", of=KERNELS))
def test_bench_check_advises_against_training_if_a_kernel_is_wrong(kernel, monkeypatch):
    """The reference uses plain attention, so the fault shows only on the device's side."""
    fault, word = KERNELS[kernel]
    attention = F.scaled_dot_product_attention

    def faulty(q, k, v, **options):
        return fault(attention(q, k, v, **options), v)

    monkeypatch.setattr(F, "scaled_dot_product_attention", faulty)
    line = verdict_of("--dtype=float32", "--compile=False", code=1)
    assert line.startswith("do not train here because gpt2 exact float32 ") and word in line


def wrong(model) -> None:
    model.register_forward_hook(lambda module, inputs, loss: 1.01 * loss)


def missing(model) -> None:
    def backend(graph, inputs):
        raise FileNotFoundError("no g++ here")

    compile_model(model, backend=backend)


@pytest.mark.parametrize(
    "compile_it, said", slow_but((wrong, "the "), of=[(wrong, "the "), (missing, "no g++ here")])
)
def test_bench_check_says_if_the_compiler_fails_or_is_wrong(
    compile_it, said, monkeypatch, tmp_path
):
    monkeypatch.setattr(compile_check, "compile_model", compile_it)
    line = verdict_of("--dtype=float32", f"--json={tmp_path / 'check.json'}")
    because = "torch.compile does not work here ("
    assert line.startswith(f"{RIGHT} with --compile=False, because {because}")
    assert said in line and line.count("torch.compile") == 1
    json.loads((tmp_path / "check.json").read_text(), parse_constant=pytest.fail)  # no NaN
