"""
Compile the model, and check that compiled code computes the same as eager code.
"""

import atexit
import contextlib
import gc
import math
import os
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.console import one_line, say
from configurator import Config
from data.loader import to_batch
from model import ChunkedLoss
from training.hardware import Hardware, is_out_of_memory
from training.ranks import Ranks

# A compiled gradient's error may be this many times an eager one's, because the two round at
# different points. The largest ratio we measured was 1.8.
BOUND = 3
# Weights with fewer than FEW numbers get a wider bound. Their gradients may cancel almost entirely
# by chance, and rounding then weighs more: up to 18 times as much in 240 trials with one number, at
# most twice as much with four (measured).
FEW, BOUND_OF_FEW = 4, 100
# The smallest relative error to compare with, in case eager code rounds less by luck. It is about
# eps * sqrt(8192), because a gradient sums over thousands of tokens in float32. Summing in another
# order, compiled code changed gradients by up to 2.4e-6 in our measurements.
FLOAT32_ERROR = 1e-5
# Eager code runs the same kernels and may be wrong too. Its median error may be this many eps of
# its dtype. We measured at most 2.2 eps; with attention scaled by 0.7, at least 29 in bfloat16.
MOST_ROUNDING = 8
LOSS_SCALE = 1024.0  # keeps float16's gradients from underflowing; a power of two adds no rounding


class CompilerError(Exception):
    """Raised if the compiler fails, or if compiled code differs from eager code; says why."""


class WrongKernels(Exception):
    """Raised if eager code, too, is wrong in the run's dtype, so that no code is left to run."""


def compile_model(model, **options) -> None:
    """
    Compile the model in place: model(...) runs compiled code, model.forward(...) still eager code.
    `options` go to torch.compile.
    """
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot trace into it, and need not
    model.compile(**options)


def try_compiling(model, batch_size: int, vocab: int, hw: Hardware) -> str:
    """
    Compile the model and compare it with eager code on one micro-batch of ids below `vocab`.
    Returns why compiled code cannot be used here, or "". Weights, gradients, buffers and random
    states stay as they were. Raises WrongKernels, and whatever eager code raises.
    """
    try:
        compile_model(model)
    except Exception as error:  # for example, a Python that torch.compile does not support
        return reason_of(error)
    try:
        compare_with_eager(model, batch_size, vocab, hw)
    except CompilerError as error:
        return str(error)
    return ""


def reason_of(error: Exception) -> str:
    """Return an error of torch's compiler as one line, or what a fresh Linux lacks."""
    if sys.platform == "linux":
        # Both backends compile C or C++ that includes Python.h. If either is missing, torch's error
        # shows only the compiler's command line.
        if not shutil.which(os.environ.get("CXX", "g++")):
            return "there is no g++; type sudo apt install g++ python3-dev"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "there is no Python.h; type sudo apt install g++ python3-dev"
    return one_line(error)


def compare_with_eager(
    model, batch_size: int, vocab: int, hw: Hardware, reference=None, seed: int = 0
) -> tuple[float, str]:
    """
    Compare training and evaluation with eager code in float32, on seeded random weights and ids:
    the model's eager code in the run's dtype, and then what model(...) runs, its compiled code.

    A run compares on its own device, where the model is its own reference. This finds what the
    compiler does wrong, and eager code in which half of the gradients are wrong. `reference` may be
    an equal model on another device. Then every loss and gradient of eager code must be right.

    Raises CompilerError if compiled code fails, or if its loss or a gradient is further from the
    reference than eager code's rounding explains, and WrongKernels if eager code is further from it
    than rounding explains. Returns the largest error of eager code's gradients, and its weight's
    name. With dropout only the evaluation is compared, because compiled code draws different random
    numbers.

    The micro-batch repeats two sequences. Eager code runs each of them once, on its own, and the
    reference gradients are kept on the host. So the check takes a small part of the compile time,
    and less device memory than an iteration.
    """
    with moved_weights(model, hw.device, seed):
        # Make a few ids frequent, as in text, so that rounding averages out in their gradients.
        two = (torch.rand(2, model.config.block_size + 1) ** 4 * vocab).long()
        tokens = two[torch.arange(batch_size) % 2]
        x, y = to_batch(tokens, hw.device)  # with a real batch's strides, to avoid a recompile
        # weight each sequence by its share of the micro-batch's loss
        shares = [(batch_size + 1) // 2 / batch_size, batch_size // 2 / batch_size]
        sequences = [(x[n : n + 1], y[n : n + 1], share) for n, share in enumerate(shares) if share]

        # 1) exact: eager, in float32
        exact_model = reference or model
        if reference:
            reference.load_state_dict(model.state_dict())
        with float32_matmuls():
            plain = contextlib.nullcontext()
            wanted = {"evaluation": eager_evaluation(exact_model, sequences, plain)}
            wanted["training"] = eager_pass(exact_model, sequences, plain)
        exact = [gradient.cpu() for _, gradient in take_gradients(exact_model)]
        if not all(gradient.isfinite().all() for gradient in exact):
            problem = "an uncompiled gradient is not finite on random weights"
            raise CompilerError(f"compiled code cannot be checked: {problem}")

        # 2) how much rounding changes: eager, in the dtype of the run
        losses = {"training": eager_pass(model, sequences, hw.autocast())}
        rounding = errors(model, exact)
        typical = statistics.median(rounding)
        most = MOST_ROUNDING * smallest_difference(model, hw)
        if not typical <= most:
            off = f"half of the gradients are off by {typical:.2g} of their norm or more"
            raise WrongKernels(f"even uncompiled, {off}")
        typical = max(typical, FLOAT32_ERROR)
        tolerance = typical / 2  # a loss is a mean over all tokens, so its error is far smaller
        largest, weight = max(zip(rounding, (name for name, _ in trained(model)), strict=True))
        if reference:
            losses["evaluation"] = eager_evaluation(model, sequences, hw.autocast())
            problem = wrong_loss(losses, wanted, tolerance)
            if largest > most:
                problem = f"the gradient of {weight} is off by {largest:.2g} of its norm"
            if problem:
                raise WrongKernels(f"even uncompiled, {problem}")

        # 3) compiled
        try:
            model.train()
            with hw.autocast():
                loss = model(x, y)
            (loss * LOSS_SCALE).backward()
            found = errors(model, exact)
            model.eval()
            with hw.autocast(), torch.no_grad():
                losses = {"evaluation": model(x, y).item()}
        except Exception as raised:  # without a compiler, each backend raises a different error
            if is_out_of_memory(raised):
                raise
            raise CompilerError(reason_of(raised)) from raised

        if not model.config.dropout:
            losses["training"] = loss.item()
            for (name, p), error, eager in zip(trained(model), found, rounding, strict=True):
                bound = BOUND_OF_FEW if p.numel() < FEW else BOUND
                # use the typical error if eager code rounded this gradient better by chance
                if not error <= bound * max(eager, typical):
                    off = f"{error:.2g} of its norm ({eager:.2g} uncompiled)"
                    raise CompilerError(f"the gradient of {name} is off by {off}")
        if problem := wrong_loss(losses, wanted, tolerance):
            raise CompilerError(problem)
    return largest, weight


def smallest_difference(model, hw: Hardware) -> float:
    """Return the relative error with which this dtype rounds a number, or sums in float32."""
    if hw.dtype != torch.float32:
        return torch.finfo(hw.dtype).eps
    if torch.get_float32_matmul_precision() == "highest":
        return FLOAT32_ERROR
    return torch.finfo(torch.float16).eps  # TF32 keeps as many bits


def wrong_loss(losses: dict[str, float], wanted: dict[str, float], tolerance: float) -> str:
    """Return which loss is further from the wanted one than the relative tolerance, or ""."""
    for name, loss in losses.items():
        if not abs(loss - wanted[name]) <= tolerance * abs(wanted[name]):
            return f"the {name} loss is {loss:.6g} instead of {wanted[name]:.6g}"
    return ""


def compile_or_end(model, c: Config, vocab: int, hw: Hardware, ranks: Ranks) -> None:
    """
    Compile the model and check it on all ranks, which must all call this. If compiled or eager code
    is wrong on some rank, end the run.
    """
    began = time.perf_counter()
    say("compiling: about a minute, or several minutes with few CPU cores")
    problem = ""
    try:
        if failed := try_compiling(model, c.batch_size, vocab, hw):
            problem = f"compile: torch.compile does not work here ({failed})"
            problem += "; --compile=False trains without it, more slowly"
    except WrongKernels as error:
        other = "--tf32=False" if hw.dtype == torch.float32 else "--dtype=float32"
        problem = f"wrong kernels in {hw.dtype_name}: {error}"
        problem += f"; python bench.py check names the kernels; {other} may avoid them"
    if problem := next(filter(None, ranks.gather(problem)), ""):
        ranks.fail(problem)
    say(f"compile: {time.perf_counter() - began:.1f}s")


def freeze_garbage() -> None:
    gc.collect()  # free the garbage that compiling left
    gc.freeze()  # otherwise each collection would scan a million torch objects
    atexit.register(gc.unfreeze)  # otherwise Triton would report leaks at exit, from torch 2.15 on


@contextlib.contextmanager
def float32_matmuls() -> Iterator[None]:
    """Run float32 matmuls without TF32 inside the context."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def moved_weights(model, device: torch.device, seed: int) -> Iterator[None]:
    """
    Add seeded random numbers to the weights inside the context, because a new model has zeros,
    which would hide errors in what they are multiplied by. Afterwards, restore weights, buffers and
    random states bit for bit, and clear gradients.
    """
    tensors = [*model.parameters(), *model.buffers()]
    # keep the copies on the host, because the optimizer's state may already fill the device
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(seed)
            for p in model.parameters():
                if p.is_floating_point():  # an integer one is a lookup table that must not change
                    scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.1
                    p.data.add_(torch.randn_like(p), alpha=scale)
            yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
        model.zero_grad()
        model.train()


def eager_evaluation(model, sequences: list[tuple[Tensor, Tensor, float]], autocast) -> float:
    """Return the loss of an evaluation in eager code. A sequence is as in eager_pass()."""
    model.eval()  # a user's loss may have a term for training only
    device = next(model.parameters()).device
    with torch.no_grad(), autocast:
        return sum(s * model.forward(x.to(device), y.to(device)).item() for x, y, s in sequences)


def eager_pass(model, sequences: list[tuple[Tensor, Tensor, float]], autocast) -> float:
    """
    Run the forward and backward pass of each sequence in eager code, without dropout. A sequence is
    x and y, (1, T) each, and its share of the loss. Returns the loss.
    """
    model.train(not model.config.dropout)
    device = next(model.parameters()).device
    losses = []
    for x, y, share in sequences:
        with autocast:
            loss = model.forward(x.to(device), y.to(device)) * share
        (loss * LOSS_SCALE).backward()
        losses.append(loss.item())
    return sum(losses)


def trained(model) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def take_gradients(model) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight with its gradient, and clear the gradient in the model."""
    for _, p in trained(model):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
        yield p, gradient


def errors(model, exact: list[Tensor]) -> list[float]:
    """
    Return each gradient's distance from the exact one, relative to the exact one's norm; infinity
    for one that is not a number. Clears the gradients.
    """
    found = []
    for (p, gradient), reference in zip(take_gradients(model), exact, strict=True):
        reference = reference.to(p.device)  # one at a time, to save device memory
        distance = (gradient - reference).norm()
        error = (distance / reference.norm()).item() if distance else 0.0
        found.append(math.inf if math.isnan(error) else error)
    return found
