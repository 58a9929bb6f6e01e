"""
torch.compile, and the proof that it computes what eager code does.
"""

import contextlib
import os
import shutil
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.console import UserError
from configurator import Config
from data.loader import to_batch
from model import ChunkedLoss
from training.hardware import Hardware, is_out_of_memory, preserving_state, set_seed
from training.ranks import Ranks

# Compiled code rounds in other places than eager code. Its gradients were at most 1.8 times as far
# from the exact ones as eager code's are (measured).
BOUND = 3
# The gradient of one number is a sum that may cancel by chance, and rounding then weighs more: up
# to 18 times as much in 240 trials (measured). For four numbers it was at most twice as much.
FEW, BOUND_OF_FEW = 4, 100
# Relative, about eps * sqrt(8192): a gradient sums over thousands of tokens in float32. Compiled
# code, which sums in another order, changed gradients by up to 2.4e-6 (measured). Where eager code
# rounds less by luck, this is the yardstick.
FLOAT32_ERROR = 1e-5
# Eager code may be wrong as well, as it runs the same kernels. Its median error was at most 2.2 eps
# of its dtype; with attention times 0.7, at least 29 eps of bfloat16 (measured).
MOST_ROUNDING = 8
LOSS_SCALE = 1024.0  # float16's gradients underflow without it; a power of two rounds nothing


def compile_model(model, **options) -> None:
    """
    From now on calls of the model run compiled, but not model.forward. `options` go to
    torch.compile.
    """
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot follow it, and need not
    model.compile(**options)


def compile_and_check(model, c: Config, vocab: int, hw: Hardware, ranks: Ranks) -> str:
    """
    Compile the model for training and evaluation, as `try_compiling` does, on all ranks. Returns
    why that does not work here, on any rank; the model is then uncompiled on all. "" if it works.
    Raises UserError instead with compile=required.
    """
    problem = try_compiling(model, c.batch_size, vocab, hw)
    problem = next(filter(None, ranks.gather(problem)), "")
    if problem and c.compile == "required":
        failed = f"compile: required, but torch.compile does not work here ({problem})"
        hint = "--compile=True trains without it"
        raise UserError(f"{failed}; {hint}") if ranks.is_main else UserError()
    if problem:
        model._compiled_call_impl = None  # undoes model.compile(), for which torch has no call
    return problem


def try_compiling(model, batch_size: int, vocab: int, hw: Hardware) -> str:
    """
    Compile the model, and compare it with eager code on micro-batches of ids below `vocab`. Returns
    why compiled code cannot be used here, "" if it can. Weights, gradients, buffers and random
    states stay as they were.
    """
    compile_model(model)
    try:
        compare_with_eager(model, batch_size, vocab, hw)
    except Exception as error:  # no compiler: every backend fails in its own way
        if is_out_of_memory(error):
            raise
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """Return an error of torch's compiler in one line, with what to install."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    reason = lines[0]
    if isinstance(error, ArithmeticError):  # the compiler works
        return reason
    if sys.platform == "linux":
        # Both backends compile C or C++ that includes Python.h. Where it fails, the error is only
        # the compiler's command line.
        if not shutil.which(os.environ.get("CXX", "g++")):
            return "there is no g++; sudo apt install g++ python3-dev"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "there is no Python.h; sudo apt install g++ python3-dev"
    if reason.endswith("raised:"):  # torch's wrapper of a backend's error, which follows
        reason = " ".join(lines[:2])
    if sys.platform == "win32" and "riton" in reason:  # not part of torch there
        reason += '; pip install "triton-windows<3.8"'
    return reason


def compare_with_eager(model, batch_size: int, vocab: int, hw: Hardware, seed: int = 0) -> None:
    """
    Compare a compiled forward and backward pass, and a compiled evaluation, with model.forward, on
    seeded random weights and ids. Raises ArithmeticError if the loss or the gradient of a weight is
    further from that of float32 than eager code's own rounding explains, or if eager code in the
    dtype of the run is further from it than rounding explains. With dropout, compiled training
    draws other random numbers, and only the evaluation is compared.

    The micro-batch is two sequences in turn. Eager code runs each of them once, alone, and the
    reference lies on the host, so that all of this takes a small part of the time of compiling, and
    less memory of the device than an iteration.
    """
    has_dropout = model.config.dropout > 0
    with preserving_state(model, hw.device), moved_weights(model, seed):
        # As in text, a few ids are frequent: their gradients add up and rounding averages out.
        two = (torch.rand(2, model.config.block_size + 1) ** 4 * vocab).long()
        tokens = two[torch.arange(batch_size) % 2]
        x, y = to_batch(tokens, hw.device)  # with the strides of real batches, or it compiles again
        # each with its share of the loss
        shares = [(batch_size + 1) // 2 / batch_size, batch_size // 2 / batch_size]
        sequences = [(x[n : n + 1], y[n : n + 1], share) for n, share in enumerate(shares) if share]

        # 1) exact: eager, in float32
        with float32_matmuls():
            model.eval()  # a term of the loss may be in training only
            with torch.no_grad():
                losses = [share * model.forward(x, y).item() for x, y, share in sequences]
            wanted = {"evaluation": sum(losses)}
            model.train(not has_dropout)
            wanted["training"] = eager_pass(model, sequences, contextlib.nullcontext())
        exact = [gradient.cpu() for _, gradient in take_gradients(model)]
        if not all(gradient.isfinite().all() for gradient in exact):
            raise ArithmeticError("an uncompiled gradient is not finite on random weights")

        # 2) how much rounding changes: eager, in the dtype of the run
        eager_pass(model, sequences, hw.autocast())
        rounding = errors(model, exact)
        typical = statistics.median(rounding)
        # in float32, matmuls may be in TF32, which has float16's bits
        dtype = torch.float16 if hw.dtype == torch.float32 else hw.dtype
        if not typical <= MOST_ROUNDING * torch.finfo(dtype).eps:
            off = f"half of the gradients are off by {typical:.2g} of their norm or more"
            hint = "python bench.py check tests this machine's kernels"
            raise ArithmeticError(f"uncompiled code in {hw.dtype_name} is wrong: {off}; {hint}")
        typical = max(typical, FLOAT32_ERROR)

        # 3) compiled
        model.train()
        with hw.autocast():
            loss = model(x, y)
        (loss * LOSS_SCALE).backward()
        found = errors(model, exact)
        model.eval()
        with hw.autocast(), torch.no_grad():
            got = {"evaluation": model(x, y).item()}

        if not has_dropout:
            got["training"] = loss.item()
            for (name, p), error, eager in zip(trained(model), found, rounding, strict=True):
                bound = BOUND_OF_FEW if p.numel() < FEW else BOUND
                # eager code may round a weight's gradient well by chance
                if not error <= bound * max(eager, typical):
                    off = f"{error:.2g}, uncompiled by {eager:.2g}"
                    raise ArithmeticError(f"the gradient of {name} is off by {off} of its norm")
        # the mean over all tokens is rounded far better than a gradient
        tolerance = typical / 2
        for name, value in got.items():
            if not abs(value - wanted[name]) <= tolerance * abs(wanted[name]):
                both = f"{value:.6g} compiled, {wanted[name]:.6g} uncompiled"
                raise ArithmeticError(f"the {name} loss is {both}")


@contextlib.contextmanager
def float32_matmuls() -> Iterator[None]:
    """Without TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def moving(model) -> list[Tensor]:
    """A weight of whole numbers is a table of something."""
    return [p for p in model.parameters() if p.is_floating_point()]


@contextlib.contextmanager
def moved_weights(model, seed: int) -> Iterator[None]:
    """
    Inside, every weight is off its value by a seeded random number, because a fresh model's zeros
    hide what they are multiplied by. Afterwards all are as before, to the bit.
    """
    # on the host: the optimizer's state may be on the device already
    before = [p.detach().to("cpu", copy=True) for p in model.parameters()]
    try:
        set_seed(seed)
        for p in moving(model):
            scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.1
            p.data.add_(torch.randn_like(p), alpha=scale)
        yield
    finally:
        for p, value in zip(model.parameters(), before, strict=True):
            p.data.copy_(value)
        model.train()


def eager_pass(model, sequences: list[tuple[Tensor, Tensor, float]], autocast) -> float:
    """
    Forward and backward of sequences: x and y, (1, T) each, and the share of the loss that they
    have. Returns the loss.
    """
    losses = []
    for x, y, share in sequences:
        with autocast:
            loss = model.forward(x, y) * share
        (loss * LOSS_SCALE).backward()
        losses.append(loss.item())
    return sum(losses)


def trained(model) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def take_gradients(model) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with its gradient, which it loses."""
    for _, p in trained(model):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
        yield p, gradient


def errors(model, exact: list[Tensor]) -> list[float]:
    """How far each gradient is from the exact one, relative to its norm; takes the gradients."""
    found = []
    for (p, gradient), reference in zip(take_gradients(model), exact, strict=True):
        reference = reference.to(p.device)  # one at a time
        distance = (gradient - reference).norm()
        found.append((distance / reference.norm()).item() if distance else 0.0)
    return found
