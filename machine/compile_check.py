"""
Compile the model, and check that its code computes what eager code does in float32.

The check moves the weights by random numbers and runs a micro-batch of random tokens twice: eagerly
in float32 (eager_float32), and as a run will (try_code). compare() then allows the losses and
every gradient to differ by what rounding explains, and no more. A run compares its compiled code
with eager code on its device, and `bench.py check` small models with the CPU.
"""

import atexit
import contextlib
import gc
import math
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.console import UserError, is_out_of_memory, one_line, say
from configurator import Config
from data.loader import to_batch
from machine.hardware import Hardware
from model import ChunkedLoss, count_targets

# A loss is a mean over all tokens, so it may be off by the rounding of one number in the run's
# dtype. A gradient passes through all layers, so it may be off by BOUND times as much. Correct code
# was off by at most 0.3 roundings (loss) and 6 (gradient) in up to 24 layers; code with attention
# scaled by 0.7 by 29 (measured).
BOUND = 16
# A float32 sum over thousands of tokens depends on its order: an H100 changed a loss by 8e-6.
FLOAT32_ROUNDING = 2e-5
LOSS_SCALE = 1024.0  # keeps float16's gradients from underflowing; a power of two adds no rounding
SEED = 0  # of the ids, and of what the check adds to the weights

Results = tuple[dict[str, float], dict[str, Tensor]]  # losses by mode, gradients by weight


def compile_model(model, **options) -> None:
    """
    Compile the model in place: model(...) runs compiled code, model.forward(...) still eager code.
    `options` go to torch.compile.
    """
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot trace into it, and need not
    model.compile(**options)


def compile_checked(model, c: Config, vocab: int, hw: Hardware) -> None:
    """
    Compile the model and check its code. Raises UserError if the code fails or is wrong; otherwise
    leaves weights and buffers as they were.
    """
    began = time.perf_counter()
    say("compiling: about a minute, or several minutes with few CPU cores")
    tensors = [*model.parameters(), *model.buffers()]
    # keep the copies on the host, because the optimizer's state may already fill the device
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    problem, _ = try_code(model, *eager_float32(model, c.batch_size, vocab), hw)
    if problem:
        hint = "python bench.py check says whether --compile=False, which is slower, is right here"
        raise UserError(f"compile: torch.compile does not work here ({problem}); {hint}")
    for tensor, value in zip(tensors, before, strict=True):
        tensor.data.copy_(value)
    say(f"compile: {time.perf_counter() - began:.1f}s")


def eager_float32(model, batch_size: int, vocab: int) -> tuple[Tensor, Results]:
    """
    Move the model's weights by seeded random numbers, and return seeded windows of ids (B, T + 1)
    with their losses and gradients in float32, without TF32. The model must not be compiled yet.

    To need less device memory than an iteration, this runs one sequence at a time and returns
    tensors on the host.
    """
    torch.manual_seed(SEED)
    for p in model.parameters():
        if p.requires_grad:  # a new model has zeros, which hide errors in what they multiply
            scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.1
            p.data.add_(torch.randn_like(p), alpha=scale)
    # make a few ids frequent, as in text, so that rounding averages out in their gradients
    windows = (torch.rand(batch_size, model.config.block_size + 1) ** 4 * vocab).long()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    losses, gradients = run_code(model, windows.split(1), contextlib.nullcontext())
    torch.set_float32_matmul_precision(precision)
    return windows, (losses, {name: gradient.cpu() for name, gradient in gradients.items()})


def try_code(
    model, windows: Tensor, exact: Results, hw: Hardware, compiles: bool = True
) -> tuple[str, float]:
    """
    Compile the model unless `compiles` is False, run it as a run does, and compare() its results
    with the exact ones. Returns why its code must not be used, or "", and the largest error.
    """
    try:
        if compiles:
            compile_model(model)  # fails if torch.compile does not support this Python
        found = run_code(model, [windows], hw.autocast())
    except Exception as raised:  # compilers, drivers and kernels raise all kinds of errors
        if is_out_of_memory(raised):
            raise
        # torch's message gives g++'s command line and 200 kB of warnings before the reason, such as
        # a full /tmp
        reason = re.search("(?<=: )(fatal )?error: .{,300}", str(raised))
        problem = reason[0] if reason else one_line(raised)
        return (compiles and missing_package()) or problem, math.nan
    error, where = compare(found, exact, rounding_of(hw))
    problem = f"the {where} is off by {error:.2g} times what rounding explains"
    return "" if error <= 1 else problem, error


def run_code(model, blocks: Sequence[Tensor], autocast) -> Results:
    """
    Return the losses of training and evaluation, and every gradient times LOSS_SCALE, of the mean
    over blocks of windows, (B, T + 1) each. With dropout, return the loss of evaluation alone,
    because compiled code draws other random numbers than eager code.
    """
    device = next(model.parameters()).device
    losses = dict(training=0.0, evaluation=0.0)  # a user's loss may have a term for training only
    # as a run's, or a run would compile again; a user's may have masks and weights
    batches = [to_batch(block, device) for block in blocks]
    counts = [count_targets(y) for _, y, *_ in batches]
    for mode in losses:
        model.train(mode == "training")
        for batch, count in zip(batches, counts, strict=True):
            with autocast, torch.set_grad_enabled(model.training):
                loss = model(*batch) * (count / max(sum(counts), 1))
            if model.training:
                (loss * LOSS_SCALE).backward()
            losses[mode] += loss.item()
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()
    }
    model.zero_grad()
    if model.config.dropout:
        return dict(evaluation=losses["evaluation"]), {}
    return losses, gradients


def compare(found: Results, exact: Results, rounding: float) -> tuple[float, str]:
    """
    Compare results with exact ones, which may be on another device. Returns the largest error, as a
    multiple of what `rounding`, the relative error of one number, explains, and which it is of.
    """
    (losses, gradients), (exact_losses, exact_gradients) = found, exact
    # A gradient of one number may cancel almost entirely. Relative to its own norm, rounding then
    # reached 500 times bfloat16's, so a small gradient is judged relative to half the median norm.
    norms = torch.tensor([gradient.norm() for gradient in exact_gradients.values()])
    least = norms.median().item() / 2 or 1e-30
    errors: dict[str, float] = {}
    for name, gradient in gradients.items():
        reference = exact_gradients[name].to(gradient.device)  # one at a time, to save memory
        size = reference.norm().clamp(min=least)
        error = ((gradient - reference).norm() / size).item()
        errors[f"gradient of {name}"] = error / (BOUND * rounding)
    for mode, loss in losses.items():
        error = abs(loss - exact_losses[mode]) / abs(exact_losses[mode] or 1e-30)
        errors[f"{mode} loss"] = error / rounding
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def rounding_of(hw: Hardware) -> float:
    """Return the relative error with which this dtype rounds a number, or sums in float32."""
    if hw.dtype != torch.float32:
        return torch.finfo(hw.dtype).eps
    if hw.device.type == "cuda" and torch.get_float32_matmul_precision() == "high":
        return torch.finfo(torch.float16).eps  # TF32 keeps as many bits
    return FLOAT32_ROUNDING


def missing_package() -> str:
    """Return what torch's compiler needs and a fresh Linux lacks; "" if nothing."""
    # Both backends compile C or C++ that includes Python.h. If either is missing, torch's error
    # shows only the compiler's command line.
    header = Path(sysconfig.get_path("include"), "Python.h")
    if sys.platform != "linux" or (shutil.which(os.environ.get("CXX", "g++")) and header.exists()):
        return ""
    return "g++ or Python.h is missing; type sudo apt install g++ python3-dev"


def freeze_garbage() -> None:
    gc.collect()  # free the garbage that compiling left
    gc.freeze()  # otherwise each collection would scan a million torch objects
    atexit.register(gc.unfreeze)  # otherwise Triton would report leaks at exit, from torch 2.15 on
