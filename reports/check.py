"""
bench.py check: does this machine train correctly, and as fast as it should?

A small model of each recipe trains on one batch, and its losses and gradients must agree with the
CPU's in float32. Then it is compiled and compared with eager code, as at the start of a run. A
matmul and a copy are timed and compared with the GPU's data sheet. The verdict is one of three:
trains correctly; trains correctly but slowly because ...; do not train here because ...
"""

import contextlib
import subprocess
import time
from argparse import Namespace
from dataclasses import replace

import torch

from common.console import COMMAND, UserError, say
from configurator import Config, load_config
from model_fast import build_model, model_config
from training import hardware, preflight, speed
from training.compiled import (
    CompilerError,
    WrongKernels,
    compare_with_eager,
    float32_matmuls,
    try_compiling,
)
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

# A GPU that reaches less than this fraction of the data sheet's peak or bandwidth is slow. Healthy
# GPUs reach 60% to 95% in published figures, and a hot T4 reaches 65%.
LEAST_SHARE = 0.5
HEATING_SECONDS = 2.0  # long enough for a GPU that lacks cooling or power to lower its clock
COPIED_BYTES = 2**28
MOST_LOAD = 20  # the percentage of a GPU's time that other programs may take


def check(config: Config, options: Namespace) -> dict:
    """
    Check this machine, and print the findings and a verdict. Returns what --json writes. Only keys
    about the machine matter, such as device and dtype. Raises UserError if too little memory is
    free.
    """
    # read other programs' load before this one adds its own
    load = smi(hardware.choose_device(config, local_rank=0), "utilization.gpu")
    hw = hardware.set_up(config, find_peak=True)
    say(f"checking {hw.name}, {hw.dtype_name}, torch {torch.__version__}: a minute or two")
    say("largest gradient error, relative to float32 on the CPU:")
    try:
        rows, wrong, slow = check_training(config, hw)
    except Exception as error:
        if hardware.is_out_of_memory(error):
            hint = "close other programs that use this device"
            raise UserError(f"check: too little memory is free; {hint}") from None
        raise
    if not wrong:
        slow += what_slows(config, hw)
        slow += check_speed(hw)
        if load and load[0] > MOST_LOAD:
            slow.append(f"other programs use it ({load[0]:.0f}% of its time before this check)")
    line = verdict("this machine" if hw.device.type == "cpu" else "this GPU", wrong, slow)
    say(line)
    return dict(verdict=line, wrong=wrong, slow=slow, rows=rows)


def verdict(name: str, wrong: list[str], slow: list[str]) -> str:
    if wrong:
        return f"do not train here because {'; '.join(wrong)}"
    if slow:
        slow = sorted(slow, key=lambda reason: COMMAND in reason)  # put a command last
        return f"{name} trains correctly but slowly because {'; '.join(slow)}"
    return f"{name} trains correctly"


# -----------------------------------------------------------------------------
# Does it train correctly?


def check_training(config: Config, hw: Hardware) -> tuple[list[dict], list[str], list[str]]:
    """
    Compare both recipes with the CPU in every way, and their compiled code with eager code. Returns
    a row for each way that is right, what is wrong, and why training will be slow.
    """
    rows: list[dict] = []
    wrong: list[str] = []
    slow: list[str] = []
    for recipe in RECIPES:
        c = config_of(recipe, config, hw)
        on_cpu = build(c, flash=False)  # plain attention, because a fused kernel may be wrong
        for name, way, matmuls in ways_to_train(config, hw):
            name = f"{recipe} {name}"
            began = time.perf_counter()
            try:
                model = build(c, flash=hw.flash(c)).to(hw.device)
                with matmuls:
                    error, weight = compare_with_eager(model, c.batch_size, VOCAB, way, on_cpu)
                rows.append(dict(name=name, gradient=error, weight=weight))
                result = f"{error:.1e} ({weight})"
                if way == hw and config.compile and hw.can_compile:
                    compiled = build(c, flash=hw.flash(c), compiled=True).to(hw.device)
                    problem = try_compiling(compiled, c.batch_size, VOCAB, hw)
                    result += f", compiled: {problem or 'as exact as uncompiled'}"
                    if problem:
                        slow.append(f"torch.compile does not work here ({problem})")
            except (WrongKernels, CompilerError) as error:
                result = f"computes wrongly ({error})"
                wrong.append(f"{name} {result}")
            except Exception as error:  # drivers and kernels raise all kinds of errors
                if hardware.is_out_of_memory(error):
                    raise
                result = f"fails ({type(error).__name__}: {error}".splitlines()[0] + ")"
                wrong.append(f"{name} {result}")
            say(f"  {name}: {result}; {time.perf_counter() - began:.1f} s")
    return rows, wrong, list(dict.fromkeys(slow))


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


def build(c: Config, flash: bool, compiled: bool = False) -> torch.nn.Module:
    torch.manual_seed(1)  # check the same weights every time
    return build_model(model_config(c, VOCAB, flash=flash, compiled=compiled))


# -----------------------------------------------------------------------------
# Is it as fast as it should be?


def what_slows(config: Config, hw: Hardware) -> list[str]:
    """Return reasons for slow training that can be found without measuring."""
    reasons = []
    if hw.device.type == "cpu" and config.device == "auto":
        reasons.append(f"torch sees no GPU; {preflight.cuda_hint()}")
    if not config.compile:
        reasons.append("compile is off")
    elif not hw.can_compile:
        reasons.append("torch's compiler for MPS is an early prototype")
    return reasons


def check_speed(hw: Hardware) -> list[str]:
    """
    Time a matmul and a copy, print them beside the data sheet's figures, and return the reasons to
    call this GPU slow.
    """
    peak = hw.peak_tflops
    if not peak or hw.peak_source == hardware.MEASURED:
        say(f"  matmul: {peak:.3g} TFLOP/s; no data sheet to compare it with")
        return []
    began = time.perf_counter()
    rates: list[float] = []
    while not rates or time.perf_counter() - began < HEATING_SECONDS:
        rates.append(speed.measure_matmul(hw.device, hw.dtype, hw.synchronize))
    say(f"  matmul: {rates[-1]:.3g} of {peak:g} TFLOP/s ({hw.peak_source})")
    slow = []
    if rates[-1] < LEAST_SHARE * peak:
        slow.append(f"a matmul reaches {rates[-1]:.3g} of {peak:g} TFLOP/s{state_of(hw.device)}")
    if hw.row and hw.row["bandwidth_gbs"]:
        bandwidth = float(hw.row["bandwidth_gbs"])
        copied = measure_copy(hw)
        say(f"  copy: {copied:.0f} of {bandwidth:g} GB/s (gpus.csv)")
        if copied < LEAST_SHARE * bandwidth:
            slow.append(f"its memory reaches {copied:.0f} of {bandwidth:g} GB/s")
    return slow


def measure_copy(hw: Hardware) -> float:
    """Return the bandwidth of a copy in GB/s, reads and writes together; the best of ten copies."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=hw.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        hw.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        hw.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * COPIED_BYTES / min(seconds) / 1e9


def state_of(device: torch.device) -> str:
    """Describe the GPU's clock, heat and power limit, which may explain why it is slow."""
    fields = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.limit", "power.default_limit")
    found = smi(device, *fields)
    if not found:
        return ""
    clock, most, heat, limit, usual = found
    power = f"its power limit at {limit:.0f} W (default {usual:.0f} W)"
    return f", with the GPU at {clock:.0f} of {most:.0f} MHz and {heat:.0f} C, and {power}"


def smi(device: torch.device, *fields: str) -> list[float]:
    """Read numbers from nvidia-smi for this device. Returns [] if one of them is unknown."""
    if device.type != "cuda":
        return []
    gpu = f"--id=GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
    query = ["nvidia-smi", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return [float(number) for number in done.stdout.split(",")]
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: "[N/A]" is not a number
        return []
