"""
torch.compile, and the proof that it computes what eager code does.
"""

import math
import sys

import torch

from common.console import warn
from data.loader import to_batch
from model import ChunkedLoss
from training.hardware import Hardware, is_out_of_memory, preserving_state

SAME_LOSS = 5e-3  # relative; in bfloat16 compiled losses differ by at most 1e-4 (results/speed.md)


def compile_model(model, **options) -> None:
    """
    From now on calls of the model run compiled, but not model.forward. `options` go to
    torch.compile.
    """
    torch.compiler.allow_in_graph(ChunkedLoss)  # the compiler cannot follow it, and need not
    model.compile(**options)


def compile_or_warn(model, batch_size: int, vocab: int, hw: Hardware) -> bool:
    """
    Compile the model for training and for evaluation, on random tokens below `vocab`. If that
    fails, or its loss differs from that of model.forward, warn, and leave the model uncompiled.
    Returns whether it is compiled. Weights, gradients and random states stay as they were.
    """
    compile_model(model)
    reason = ""
    with preserving_state(model, hw.device):
        tokens = torch.randint(vocab, (batch_size, model.config.block_size + 1))
        x, y = to_batch(tokens, hw.device)  # with the strides of real batches, or it compiles again
        try:
            check_losses(model, x, y, hw)
        except Exception as error:  # no compiler: every backend fails in its own way
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    model.train()
    if not reason:
        return True
    if sys.platform == "win32" and "riton" in reason:  # not part of torch there
        reason += '; pip install "triton-windows<3.8"'
    warn(f"torch.compile does not work here ({reason}); continuing without it")
    model._compiled_call_impl = None  # undoes model.compile(), for which torch has no call
    return False


def check_losses(model, x: torch.Tensor, y: torch.Tensor, hw: Hardware) -> None:
    """
    Run a compiled forward and backward pass, and a compiled evaluation, of x and y, (B, T) each.
    Raises ArithmeticError if a loss differs from the uncompiled one.
    """
    model.train()
    with hw.autocast():
        loss = model(x, y)
    loss.backward()
    losses = {} if model.config.dropout else {"training": loss.item()}
    model.eval()
    with hw.autocast(), torch.no_grad():
        losses["evaluation"] = model(x, y).item()
        # one sequence at a time, so that the check needs less memory than the step
        parts = [model.forward(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    eager = torch.stack(parts).mean().item()
    for name, found in losses.items():
        if not math.isclose(found, eager, rel_tol=SAME_LOSS):
            raise ArithmeticError(f"{name} loss {found:.4f} compiled, {eager:.4f} uncompiled")
