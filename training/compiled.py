"""
Compile the model, and check that its code computes what eager code does in float32.
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

# A loss is a mean over all tokens, so it may be off by the rounding of one number in the run's
# dtype. A gradient passes through all layers, so it may be off by BOUND times as much. Correct code
# was off by at most 0.3 roundings (loss) and 6 (gradient) in up to 24 layers; code with attention
# scaled by 0.7 by 29 (measured).
BOUND = 16
# A float32 sum over thousands of tokens depends on its order: an H100 changed a loss by 8e-6.
FLOAT32_ROUNDING = 2e-5
LOSS_SCALE = 1024.0  # keeps float16's gradients from underflowing; a power of two adds no rounding
SEED = 0  # of the weights and ids that the check uses


class WrongCode(Exception):
    """Raised if code does not run here, or computes something other than eager float32 does."""


def compile_model(model, **options) -> None:
    """
    Compile the model in place: model(...) runs compiled code, model.forward(...) still eager code.
    `options` go to torch.compile.
    """
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot trace into it, and need not
    model.compile(**options)


def compile_checked(model, c: Config, vocab: int, hw: Hardware, ranks: Ranks) -> None:
    """
    Compile the model and check it on all ranks, which must all call this. End the run if compiled
    code fails or is wrong on some rank.
    """
    began = time.perf_counter()
    say("compiling: about a minute, or several minutes with few CPU cores")
    problem = ""
    try:
        check_code(model, c.batch_size, vocab, hw, compiled=True)
    except WrongCode as error:
        problem = str(error)
    if problem := next(filter(None, ranks.gather(problem)), ""):
        hint = "--compile=False is slower; python bench.py check says whether it is right"
        ranks.fail(f"compile: torch.compile does not work here ({problem}); {hint}")
    say(f"compile: {time.perf_counter() - began:.1f}s")


def check_code(
    model, batch_size: int, vocab: int, hw: Hardware, compiled: bool, reference=None
) -> tuple[float, str]:
    """
    Check the losses of training and evaluation, and every gradient, against the model's eager code
    in float32, on seeded random weights and ids. With `compiled`, compile the model and check its
    compiled code; otherwise check its eager code in the run's dtype. Weights, buffers and random
    states stay as they were.

    The model is its own reference, unless `reference` is an equal model on another device. Then
    this finds kernels that are wrong in float32, too.

    Raises WrongCode if compiling fails, or if a loss or a gradient is off by more than rounding
    explains. Returns the largest error of a gradient, and its weight's name. With dropout only the
    evaluation is compared, because the random numbers differ.

    The micro-batch repeats two sequences. Eager code runs each of them once, on its own, and the
    reference gradients are kept on the host. So the check takes a small part of the compile time,
    and less device memory than an iteration.
    """
    with moved_weights(model, hw.device):
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
            wanted = run_code(exact_model, exact_model.forward, sequences, plain)
        exact = [gradient.cpu() for _, _, gradient in take_gradients(exact_model)]

        # 2) the code to check
        if not compiled:
            # with a reference, find kernels that confuse sequences; a run saves memory instead
            pieces = [(x, y, 1.0)] if reference else sequences
            losses = run_code(model, model.forward, pieces, hw.autocast())
        else:
            try:
                compile_model(model)  # fails if torch.compile does not support this Python
                losses = run_code(model, model, [(x, y, 1.0)], hw.autocast())
            except Exception as raised:  # without a compiler, each backend raises a different error
                if is_out_of_memory(raised):
                    raise
                raise WrongCode(reason_of(raised)) from raised
        found = errors(model, exact)

        # 3) compare
        if model.config.dropout:
            found = []
            del losses["training"]
        largest, weight = max(found, default=(0.0, ""))
        if largest > BOUND * rounding(hw):
            raise WrongCode(f"the gradient of {weight} is off by {largest:.2g} of its norm")
        for name, loss in losses.items():
            if not abs(loss - wanted[name]) <= rounding(hw) * abs(wanted[name]):
                raise WrongCode(f"the {name} loss is {loss:.6g} instead of {wanted[name]:.6g}")
    return largest, weight


def rounding(hw: Hardware) -> float:
    """Return the relative error with which this dtype rounds a number, or sums in float32."""
    if hw.dtype != torch.float32:
        return torch.finfo(hw.dtype).eps
    if hw.device.type == "cuda" and torch.get_float32_matmul_precision() == "high":
        return torch.finfo(torch.float16).eps  # TF32 keeps as many bits
    return FLOAT32_ROUNDING


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
def moved_weights(model, device: torch.device) -> Iterator[None]:
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
            torch.manual_seed(SEED)
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


def run_code(model, call, pieces: list[tuple[Tensor, Tensor, float]], autocast) -> dict[str, float]:
    """
    Run a forward and backward pass and an evaluation by `call` on each piece, which is x and y,
    (B, T) each, and its share of the loss. Returns both losses, and leaves gradients in the model.
    """
    device = next(model.parameters()).device
    losses = dict(training=0.0, evaluation=0.0)  # a user's loss may have a term for training only
    for mode in losses:
        trains = mode == "training"
        model.train(trains)
        for x, y, share in pieces:
            with autocast, torch.set_grad_enabled(trains):
                loss = share * call(x.to(device), y.to(device))
            if trains:
                (loss * LOSS_SCALE).backward()
            losses[mode] += loss.item()
    return losses


def take_gradients(model) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each trained weight's name, itself and its gradient, and clear it in the model."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
            yield name, p, gradient


def errors(model, exact: list[Tensor]) -> list[tuple[float, str]]:
    """
    Return each gradient's distance from the exact one, relative to the exact one's norm, with its
    weight's name; infinity for a distance that is not a number. Clears the gradients.
    """
    # A gradient of one number may cancel almost entirely. Relative to its own norm, rounding then
    # reached 500 times bfloat16's, so a gradient far below the median is not judged.
    least = statistics.median(gradient.norm().item() for gradient in exact) / 2
    found = []
    for (name, p, gradient), reference in zip(take_gradients(model), exact, strict=True):
        reference = reference.to(p.device)  # one at a time, to save device memory
        distance = (gradient - reference).norm()
        error = (distance / reference.norm().clamp(min=least)).item() if distance else 0.0
        found.append((math.inf if math.isnan(error) else error, name))
    return found
