"""
bench.py check: does this machine train correctly?

A small model of each recipe computes the losses and gradients of one batch: uncompiled in float32
and in the run's dtype, then compiled as at the start of a run. They must agree with the CPU's in
float32. The verdict is one of three: trains correctly; trains correctly with --compile=False,
because ...; do not train here because ...
"""

import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch

from common.console import UserError, say
from configurator import Config
from machine import hardware
from machine.compiled import check_code, eager_float32
from machine.hardware import Hardware
from model import GPTConfig
from model_fast import FastConfig, build_model

# Large enough for the GPU kernels of a real run. Biases and head sizes are those in config/,
# because other head sizes run other kernels.
SIZES: dict[str, Any] = dict(n_layer=2, n_embd=768, vocab_size=1024, loss_chunk="1024")
RECIPES = {
    "gpt2": GPTConfig(**SIZES, n_head=12, bias=False),
    "fast": FastConfig(**SIZES, n_head=6, bias=True),
}
BATCH_SIZE = 2  # different sequences, so that a kernel that confuses sequences is noticed


def check(config: Config, options: Namespace) -> dict:
    """
    Check this machine, and print the findings and a verdict. Returns what --json writes. Only keys
    about the machine matter, such as device and dtype. Raises UserError if too little memory is
    free.
    """
    config = hardware.settle(config)
    hw = hardware.set_up(config)
    say(f"checking {hw.name}, {hw.dtype_name}, torch {torch.__version__}: a minute or two")
    say("largest gradient error, relative to float32 on the CPU:")
    try:
        rows = check_recipes(config, hw)
    except Exception as error:
        if hardware.is_out_of_memory(error):
            hint = "close other programs that use this device"
            raise UserError(f"check: too little memory is free; {hint}") from None
        raise
    name = "this machine" if hw.device.type == "cpu" else "this GPU"
    verdict = f"{name} trains correctly"
    failed = [row for row in rows if row["problem"]]
    wrong = [f"{row['name']} fails ({row['problem']})" for row in failed if not row["compiled"]]
    if wrong:
        verdict = f"do not train here because {wrong[0]}"
    elif failed:
        reasons = "; ".join({row["problem"]: None for row in failed})
        verdict += f" with --compile=False, because torch.compile does not work here ({reasons})"
    say(verdict)
    return dict(verdict=verdict, wrong=wrong, rows=rows)


def check_recipes(config: Config, hw: Hardware) -> list[dict]:
    """
    Compare each recipe with the CPU in each way to train. Print a line for each, and return a row.
    Stop if uncompiled code is wrong, because its error may have left the device unusable.
    """
    rows = []
    for recipe, sizes in RECIPES.items():
        if hw.device.type == "cpu":  # it may be slow
            heads = sizes.n_head // 6
            sizes = replace(sizes, n_embd=128, n_head=heads, block_size=64, loss_chunk="64")
        torch.manual_seed(1)  # check the same weights every time
        # plain attention, because a fused kernel may be wrong
        on_cpu = build_model(replace(sizes, flash=False))
        windows, exact = eager_float32(on_cpu, BATCH_SIZE, sizes.vocab_size)
        for name, way in ways_to_train(config, hw).items():
            began = time.perf_counter()
            way_hw = hardware.set_up(way)
            model = build_model(replace(sizes, flash=config.flash))
            model.load_state_dict(on_cpu.state_dict())
            model.to(hw.device)
            problem, largest = check_code(model, windows, exact, way_hw, way.compile)
            row = dict(name=f"{recipe} {name}", compiled=way.compile, problem=problem)
            row |= {} if problem else dict(gradient=largest[0], weight=largest[1])
            result = problem or "{:.1e} ({})".format(*largest)
            say(f"  {row['name']}: {result}; {time.perf_counter() - began:.1f} s")
            rows.append(row)
            if problem and not way.compile:
                return rows
    return rows


def ways_to_train(config: Config, hw: Hardware) -> dict[str, Config]:
    """Return float32, the run's own arithmetic, and that compiled, each with its name."""
    plain = replace(config, compile=False)
    # float32 without TF32 rounds so little that any fault shows
    ways = {"float32": replace(plain, dtype="float32", tf32=False)}
    has_tf32 = hw.dtype == torch.float32 and hw.device.type == "cuda" and config.tf32
    ways.setdefault("TF32" if has_tf32 else hw.dtype_name, plain)
    return ways | ({"compiled": config} if config.compile else {})
