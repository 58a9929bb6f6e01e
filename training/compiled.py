"""
Compile the model, and check that compiled code computes the same as eager code.
"""

import atexit
import contextlib
import gc
import os
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from common.console import RunError, UserError, say, warn
from common.files import lack_of_space, try_lock
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
CACHE_BYTES = 200_000_000  # disk that compiling may need; on a CPU one header takes half of it
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


def compile_and_check(model, c: Config, vocab: int, hw: Hardware, ranks: Ranks) -> str:
    """
    Compile and check the model on all ranks, which must all call this. Returns why compiling does
    not work on some rank, or "". Raises RunError if eager code is wrong on some rank.
    """
    wrong = problem = ""
    try:
        problem = try_compiling(model, c.batch_size, vocab, hw)
    except WrongKernels as error:
        wrong = str(error)
    found = ranks.gather((wrong, problem))
    wrong, problem = (next(filter(None, lines), "") for lines in zip(*found, strict=True))
    if wrong:
        other = "--tf32=False" if hw.dtype == torch.float32 else "--dtype=float32"
        ranks.fail(f"{wrong}; python bench.py check names the kernels; {other} may avoid them")
    failed = f"compile: torch.compile does not work here ({problem})"
    return f"{failed}; --compile=False trains without it, more slowly" if problem else ""


def try_compiling(model, batch_size: int, vocab: int, hw: Hardware) -> str:
    """
    Compile the model and compare it with eager code on one micro-batch of ids below `vocab`.
    Returns why compiled code cannot be used here, "" if it can. Weights, gradients, buffers and
    random states stay as they were. Raises WrongKernels, and whatever eager code raises.
    """
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":  # torch.compile would run eager code without a word
            return f"{name} switches torch.compile off; unset {name}"
    try:
        compile_model(model)
    except Exception as error:  # for example, a Python that torch.compile does not support
        return reason_of(error)
    return compare_in_cache(model, batch_size, vocab, hw)


def compare_in_cache(model, batch_size: int, vocab: int, hw: Hardware) -> str:
    """
    Run compare_with_eager() in a folder that no other process has damaged. Returns why it failed.
    If it fails in a folder with files of earlier runs, try again without them.
    """
    marker, is_used = mark_cache()
    is_damaged = False
    try:
        compare_with_eager(model, batch_size, vocab, hw)
        return ""
    except CompilerError as error:
        if not (marker and is_used):
            return str(error)
        warn(f"compile: {error}; trying again without the files of earlier runs")
        marker.close()  # from here on, the folder counts as damaged
        torch.compiler.reset()
        from torch._inductor.utils import clear_caches  # slow to import

        clear_caches()
        problem = compare_in_cache(model, batch_size, vocab, hw)
        is_damaged = not problem
        return problem
    finally:
        if marker:
            release(marker, delete=not is_damaged)


def mark_cache() -> tuple[BinaryIO | None, bool]:
    """
    Choose the folder of torch's compiler: TORCHINDUCTOR_CACHE_DIR or, if a process died while
    it compiled there, the first of NAME-2, NAME-3, ... where no process did. Such a process leaves
    empty and half-written files, with which every later one would fail, or train without the CPU's
    vector instructions.

    A process that compiles locks a marker in its folder. An unlocked marker was left behind by a
    process that was killed, lost power or failed. Returns the marker, or None if the folder
    takes no files, and whether the folder has been used before.
    """
    from torch._inductor.runtime import cache_dir_utils  # slow to import

    try:
        folder = first = Path(cache_dir_utils.cache_dir())  # the variable, or torch's /tmp
        number = 1
        while any(map(is_left_behind, folder.glob("compiling-*"))):
            number += 1
            folder = first.with_name(f"{first.name}-{number}")
        if folder != first and not folder.exists():
            warn(f"compile: {first} may hold half-written files, so this run uses {folder} instead")
            # torch always keeps these in /tmp
            headers = Path(cache_dir_utils.default_cache_dir(), "precompiled_headers")
            for header in headers.rglob("*.?ch"):
                header.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        is_used = any(folder.iterdir())
        # "ab": on Windows, try_lock() moves the position to the byte that it locks, at 1 GiB
        marker = open(folder / f"compiling-{uuid.uuid4()}", "ab", buffering=0)
        try_lock(marker)
        marker.write(b"locked")  # an empty marker is not locked yet
        os.fsync(marker.fileno())
        return marker, is_used
    except OSError:
        return None, False


def is_left_behind(marker: Path) -> bool:
    """Return whether the process that wrote this marker ended while it compiled."""
    try:
        with open(marker, "r+b") as file:
            return bool(file.read(1)) and try_lock(file)
    except OSError:  # removed just now, or another user's
        return False


def release(marker: BinaryIO, delete: bool) -> None:
    """Unlock a marker and, with `delete`, delete it once the files beside it are on the disk."""
    if sys.platform != "win32":
        os.sync()
    marker.close()
    if delete:
        Path(marker.name).unlink(missing_ok=True)


def reason_of(error: Exception) -> str:
    """Return an error of torch's compiler as one line, with what to install."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    reason = lines[0]
    if sys.platform == "linux":
        # Both backends compile C or C++ that includes Python.h. If either is missing, torch's error
        # shows only the compiler's command line.
        if not shutil.which(os.environ.get("CXX", "g++")):
            return "there is no g++; type sudo apt install g++ python3-dev"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "there is no Python.h; type sudo apt install g++ python3-dev"
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
        for place in (cache, tempfile.gettempdir()):
            if shortage := lack_of_space(Path(place), CACHE_BYTES):
                return shortage
        for place in (sys.prefix, cache):
            if re.search(r"[\s'\"]", place):  # torch up to 2.13 does not quote paths
                return f"torch's compiler cannot use a path with a space or quote: {place}; move it"
    if reason.endswith("raised:"):  # torch wraps a backend's error, which is on the next line
        reason = " ".join(lines[:2])
    if sys.platform == "win32" and "riton" in reason:  # torch for Windows does not include Triton
        reason += '; type pip install "triton-windows<3.8"'
    return reason


def compare_with_eager(model, batch_size: int, vocab: int, hw: Hardware, seed: int = 0) -> None:
    """
    Compare compiled training and evaluation with eager code, on seeded random weights and ids.

    The reference is eager code in float32. Raises CompilerError if compiled code fails, or if its
    loss or a gradient is further from the reference than eager code's rounding explains, and
    WrongKernels if eager code in the run's dtype is further from it than rounding explains. With
    dropout only the evaluation is compared, because compiled code draws different random numbers.

    The micro-batch repeats two sequences. Eager code runs each of them once, on its own, and the
    reference gradients are kept on the host. So the check takes a small part of the compile time,
    and less device memory than an iteration.
    """
    has_dropout = model.config.dropout > 0
    with moved_weights(model, hw.device, seed):
        # Make a few ids frequent, as in text, so that rounding averages out in their gradients.
        two = (torch.rand(2, model.config.block_size + 1) ** 4 * vocab).long()
        tokens = two[torch.arange(batch_size) % 2]
        x, y = to_batch(tokens, hw.device)  # with a real batch's strides, to avoid a recompile
        # weight each sequence by its share of the micro-batch's loss
        shares = [(batch_size + 1) // 2 / batch_size, batch_size // 2 / batch_size]
        sequences = [(x[n : n + 1], y[n : n + 1], share) for n, share in enumerate(shares) if share]

        # 1) exact: eager, in float32
        with float32_matmuls():
            model.eval()  # a user's loss may have a term for training only
            with torch.no_grad():
                losses = [share * model.forward(x, y).item() for x, y, share in sequences]
            wanted = {"evaluation": sum(losses)}
            model.train(not has_dropout)
            wanted["training"] = eager_pass(model, sequences, contextlib.nullcontext())
        exact = [gradient.cpu() for _, gradient in take_gradients(model)]
        if not all(gradient.isfinite().all() for gradient in exact):
            problem = "an uncompiled gradient is not finite on random weights"
            raise CompilerError(f"compiled code cannot be checked: {problem}")

        # 2) how much rounding changes: eager, in the dtype of the run
        eager_pass(model, sequences, hw.autocast())
        rounding = errors(model, exact)
        typical = statistics.median(rounding)
        # With float32, matmuls may run in TF32, which has as many bits as float16.
        dtype = torch.float16 if hw.dtype == torch.float32 else hw.dtype
        if model.config.fp16_accumulation:
            dtype = torch.bfloat16  # the head's dtype
        if not typical <= MOST_ROUNDING * torch.finfo(dtype).eps:
            off = f"half of the gradients are off by {typical:.2g} of their norm or more"
            raise WrongKernels(f"wrong kernels in {hw.dtype_name}: even uncompiled, {off}")
        typical = max(typical, FLOAT32_ERROR)

        # 3) compiled
        try:
            model.train()
            with hw.autocast():
                loss = model(x, y)
            (loss * LOSS_SCALE).backward()
            found = errors(model, exact)
            model.eval()
            with hw.autocast(), torch.no_grad():
                got = {"evaluation": model(x, y).item()}
        except Exception as raised:  # without a compiler, each backend raises a different error
            if is_out_of_memory(raised):
                raise
            raise CompilerError(reason_of(raised)) from raised

        if not has_dropout:
            got["training"] = loss.item()
            for (name, p), error, eager in zip(trained(model), found, rounding, strict=True):
                bound = BOUND_OF_FEW if p.numel() < FEW else BOUND
                # use the typical error if eager code rounded this gradient better by chance
                if not error <= bound * max(eager, typical):
                    off = f"{error:.2g} of its norm ({eager:.2g} uncompiled)"
                    raise CompilerError(f"the gradient of {name} is off by {off}")
        # a loss is a mean over all tokens, so its error is far smaller than a gradient's
        tolerance = typical / 2
        for name, value in got.items():
            if not abs(value - wanted[name]) <= tolerance * abs(wanted[name]):
                both = f"{value:.6g} compiled, {wanted[name]:.6g} uncompiled"
                raise CompilerError(f"the {name} loss is {both}")


def compile_or_end(model, c: Config, vocab: int, hw: Hardware, ranks: Ranks, is_new: bool) -> None:
    """
    Compile the model and check it. If that fails, a resumed run ends with exit code 1, so that the
    script or service that restarts it will try again: the cause may go away, for example a full
    disk. A new run ends with 2.
    """
    began = time.perf_counter()
    say("compiling: about a minute, or several minutes with few CPU cores")
    if problem := compile_and_check(model, c, vocab, hw, ranks):
        ranks.fail(problem, UserError if is_new else RunError)
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


def eager_pass(model, sequences: list[tuple[Tensor, Tensor, float]], autocast) -> float:
    """
    Run the forward and backward pass of each sequence in eager code. A sequence is x and y, (1, T)
    each, and its share of the loss. Returns the loss.
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
    """Yield each weight with its gradient, and clear the gradient in the model."""
    for _, p in trained(model):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
        yield p, gradient


def errors(model, exact: list[Tensor]) -> list[float]:
    """
    Return each gradient's distance from the exact one, relative to the exact one's norm. Clears the
    gradients.
    """
    found = []
    for (p, gradient), reference in zip(take_gradients(model), exact, strict=True):
        reference = reference.to(p.device)  # one at a time, to save device memory
        distance = (gradient - reference).norm()
        found.append((distance / reference.norm()).item() if distance else 0.0)
    return found
