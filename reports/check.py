"""
bench.py check: does this machine train correctly?

A small model of each recipe trains on one batch, uncompiled and then compiled as at the start of a
run, and its losses and gradients must agree with the CPU's in float32. The verdict is one of three:
trains correctly; trains correctly with --compile=False, because ...; do not train here because ...
"""

import contextlib
import time
from argparse import Namespace
from dataclasses import replace

import torch

from common.console import UserError, say
from configurator import Config, load_config
from model_fast import build_model, model_config
from training import hardware
from training.compiled import WrongCode, check_code, float32_matmuls
from training.hardware import Hardware

# Large enough for the GPU kernels of a real run, and small enough for a slow CPU. A batch has two
# different sequences, so that a kernel that confuses sequences is noticed.
SIZES = dict(n_layer=2, n_embd=768, block_size=1024, batch_size=2)
SIZES_ON_A_CPU = dict(n_layer=2, n_embd=128, block_size=64, batch_size=4)
RECIPES = {
    "gpt2": dict(),
    "fast": dict(model="fast", bias=True, optimizer="muon"),
}
HEAD_SIZES = {"gpt2": 64, "fast": 128}  # as in config/, because other head sizes run other kernels
VOCAB = 1000


def check(config: Config, options: Namespace) -> dict:
    """
    Check this machine, and print the findings and a verdict. Returns what --json writes. Only keys
    about the machine matter, such as device and dtype. Raises UserError if too little memory is
    free.
    """
    hw = hardware.set_up(config)
    say(f"checking {hw.name}, {hw.dtype_name}, torch {torch.__version__}: a minute or two")
    say("largest gradient error, relative to float32 on the CPU:")
    try:
        rows, wrong, uncompiled = check_training(config, hw)
    except Exception as error:
        if hardware.is_out_of_memory(error):
            hint = "close other programs that use this device"
            raise UserError(f"check: too little memory is free; {hint}") from None
        raise
    name = "this machine" if hw.device.type == "cpu" else "this GPU"
    line = f"{name} trains correctly"
    if wrong:
        line = f"do not train here because {'; '.join(wrong)}"
    elif uncompiled:
        reasons = "; ".join(uncompiled)
        line += f" with --compile=False, because torch.compile does not work here ({reasons})"
    say(line)
    return dict(verdict=line, wrong=wrong, rows=rows)


# -----------------------------------------------------------------------------
# Does it train correctly?


def check_training(config: Config, hw: Hardware) -> tuple[list[dict], list[str], list[str]]:
    """
    Compare both recipes with the CPU in every way, and once compiled. Returns a row for each way
    that is right, what is wrong, and why compiled code does not work.
    """
    rows: list[dict] = []
    wrong: list[str] = []
    uncompiled: list[str] = []
    for recipe in RECIPES:
        c = config_of(recipe, config, hw)
        on_cpu = build(replace(c, flash=False))  # because a fused kernel may be wrong
        for name, way, matmuls in ways_to_train(config, hw):
            name = f"{recipe} {name}"
            began = time.perf_counter()
            try:
                model = build(c).to(hw.device)
                with matmuls:
                    error, weight = check_code(model, c.batch_size, VOCAB, way, False, on_cpu)
                rows.append(dict(name=name, gradient=error, weight=weight))
                result = f"{error:.1e} ({weight})"
                if way == hw and hw.compiles:
                    compiled = build(c).to(hw.device)
                    try:
                        error, _ = check_code(compiled, c.batch_size, VOCAB, hw, True, on_cpu)
                        result += f", compiled: {error:.1e}"
                    except WrongCode as problem:
                        result += f", compiled: {problem}"
                        uncompiled.append(str(problem))
            except WrongCode as error:
                result = f"computes wrongly ({error})"
                wrong.append(f"{name} {result}")
            except Exception as error:  # drivers and kernels raise all kinds of errors
                if hardware.is_out_of_memory(error):
                    raise
                result = f"fails ({type(error).__name__}: {error}".splitlines()[0] + ")"
                wrong.append(f"{name} {result}")
            say(f"  {name}: {result}; {time.perf_counter() - began:.1f} s")
    return rows, wrong, list(dict.fromkeys(uncompiled))


def ways_to_train(
    config: Config, hw: Hardware
) -> list[tuple[str, Hardware, contextlib.AbstractContextManager]]:
    """Return float32 and the run's dtype, each with its name and a context that it runs in."""
    # float32 without TF32 rounds so little that any fault shows
    plain = "float32", replace(hw, dtype=torch.float32), float32_matmuls()
    has_tf32 = hw.dtype == torch.float32 and config.tf32 and hw.device.type == "cuda"
    if hw.dtype == torch.float32 and not has_tf32:
        return [plain]
    return [plain, ("TF32" if has_tf32 else hw.dtype_name, hw, contextlib.nullcontext())]


def config_of(recipe: str, config: Config, hw: Hardware) -> Config:
    """Return the recipe's small configuration, with the machine's keys taken from `config`."""
    sizes = SIZES_ON_A_CPU if hw.device.type == "cpu" else SIZES
    keys = dict(device=str(hw.device), dtype=hw.dtype_name, flash=config.flash)
    keys |= dict(dataset="random", gradient_accumulation_steps=1)
    keys |= sizes | RECIPES[recipe] | dict(n_head=sizes["n_embd"] // HEAD_SIZES[recipe])
    return load_config([f"--{name}={value}" for name, value in keys.items()])


def build(c: Config) -> torch.nn.Module:
    torch.manual_seed(1)  # check the same weights every time
    return build_model(model_config(c, VOCAB))
