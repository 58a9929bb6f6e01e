"""
bench.py check: does this machine train correctly, and as fast as it should?

Two small models train for a few iterations on the device with train.py's own train_step, and again
on the CPU, where gradients are computed in float64. Losses and gradients must agree within the
dtype's rounding. Then both models are compiled and compared with eager code, as at the start of a
run. A matmul and a copy are timed and compared with the GPU's data sheet. The verdict is one of
three: trains correctly; trains correctly but slowly because ...; do not train here because ...
"""

import contextlib
import math
import subprocess
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.console import COMMAND, UserError, say
from configurator import Config, load_config
from data.loader import Batch, to_batch
from model_fast import build_model
from train import build_optimizer, model_config, train_step
from training import hardware, preflight, speed
from training.compiled import (
    LOSS_SCALE,
    WrongKernels,
    errors,
    float32_matmuls,
    take_gradients,
    trained,
    try_compiling,
)
from training.hardware import Hardware

# Large enough for the GPU kernels of a real run, and small enough for float64 on a slow CPU. A
# batch has two different sequences, so that a kernel that confuses sequences is noticed.
SIZES = dict(n_layer=2, n_embd=768, block_size=1024, batch_size=2)
SIZES_ON_A_CPU = dict(n_layer=2, n_embd=128, block_size=64, batch_size=4)
RECIPES = {
    "gpt2": dict(),
    "fast": dict(model="fast", bias=True, optimizer="muon"),
}
HEAD_SIZES = {"gpt2": 64, "fast": 128}  # as in config/, because other head sizes run other kernels
VOCAB = 1000
ITERATIONS = 3
SEED = 1

# The largest relative errors to accept: of a loss, and of a weight's gradient as a vector. On a CPU
# we measured at most a third of these.
LARGEST_ERRORS = {
    "float32": (1e-4, 1e-4),
    "TF32": (2e-3, 0.01),  # keeps as many bits as float16
    "float16": (2e-3, 0.01),
    "bfloat16": (5e-3, 0.04),
    "float16 accumulation": (5e-3, 0.04),  # the head's matmuls run in bfloat16
}

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
    say("largest relative errors, against float64 on the CPU:")
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


@dataclass
class Exact:
    """Holds the reference: one batch in float64 and a few iterations in float32, on the CPU."""

    evaluation: float  # the batch's loss, evaluated without gradients
    gradients: list[Tensor]  # the batch's gradients times LOSS_SCALE, rounded to float32
    losses: list[float]  # one per iteration


@dataclass
class Way:
    """Describes one way to train on the device: its dtype, and which options are on."""

    hw: Hardware
    tf32: bool
    fp16_accumulation: bool = False

    @property
    def name(self) -> str:
        if self.fp16_accumulation:
            return "float16 accumulation"
        return "TF32" if self.tf32 and self.hw.dtype == torch.float32 else self.hw.dtype_name


def ways_to_train(config: Config, hw: Hardware) -> list[Way]:
    # float32 without TF32 rounds so little that any fault shows
    plain = Way(replace(hw, dtype=torch.float32), tf32=False)
    asked = Way(hw, config.tf32 and hw.device.type == "cuda", config.fp16_accumulation)
    return [plain, asked] if asked != plain else [plain]


def check_training(config: Config, hw: Hardware) -> tuple[list[dict], list[str], list[str]]:
    """
    Train both recipes in every way. Returns a row of errors for each way that ran, what is wrong,
    and why training will be slow.
    """
    rows: list[dict] = []
    wrong: list[str] = []
    slow: list[str] = []
    for recipe in RECIPES:
        c = config_of(recipe, config, hw)
        model = model_off_zero(c, hw)
        exact = train_exactly(c, model)
        for way in ways_to_train(config, hw):
            name = f"{recipe} {way.name}"
            began = time.perf_counter()
            try:
                row = dict(name=name, **train_here(c, way, model, exact))
            except Exception as error:  # drivers and kernels raise all kinds of errors
                if hardware.is_out_of_memory(error):
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"  {name}: {reason}")
                wrong.append(f"{name} fails ({reason})")
                continue
            rows.append(row)
            wrong += [f"{name} has a wrong {what}" for what in what_is_wrong(row, way)]
            losses = f"loss {row['loss']:.1e}, evaluation {row['evaluation']:.1e}"
            gradient = f"gradient {row['gradient']:.1e} ({row['weight']})"
            say(f"  {name}: {losses}, {gradient}; {time.perf_counter() - began:.1f} s")
        if config.compile and hw.can_compile and not wrong:
            began = time.perf_counter()
            compiled = copy_of(model, c, hw, compiled=True)
            try:
                problem = try_compiling(compiled, c.batch_size, VOCAB, hw)
                if problem:
                    slow.append(f"torch.compile does not work here ({problem})")
            except WrongKernels as error:
                problem = str(error)
                wrong.append(f"{recipe} has {problem}")
            result = f"compiled: {problem or 'as exact as uncompiled'}"
            say(f"  {recipe} {hw.dtype_name}, {result}; {time.perf_counter() - began:.1f} s")
    return rows, wrong, list(dict.fromkeys(slow))


def config_of(recipe: str, config: Config, hw: Hardware) -> Config:
    """Return the recipe's small configuration, with the machine's keys taken from `config`."""
    sizes = SIZES_ON_A_CPU if hw.device.type == "cpu" else SIZES
    keys = dict(device=str(hw.device), dtype=hw.dtype_name, flash=config.flash, warmup_iters=0)
    keys |= dict(dataset="random", gradient_accumulation_steps=1)
    keys |= dict(fp16_accumulation=config.fp16_accumulation)
    keys |= sizes | RECIPES[recipe] | dict(n_head=sizes["n_embd"] // HEAD_SIZES[recipe])
    return load_config([f"--{name}={value}" for name, value in keys.items()])


def model_off_zero(c: Config, hw: Hardware) -> torch.nn.Module:
    """
    Build the model on the CPU, with random numbers in matrices that start as zeros. A weight whose
    output passes through a zero matrix would have no gradient to compare.
    """
    torch.manual_seed(SEED)
    model = build_model(model_config(c, VOCAB, flash=hw.flash(c), compiled=False))
    for p in model.parameters():
        if p.dim() == 2 and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    return model


def batch_of(c: Config) -> Batch:
    """Make a batch of random tokens, the same one on every call."""
    generator = torch.Generator().manual_seed(SEED)
    block = torch.randint(VOCAB, (c.batch_size, c.block_size + 1), generator=generator)
    return to_batch(block, torch.device("cpu"))


def train_exactly(c: Config, model: torch.nn.Module) -> Exact:
    """
    Train the reference on the CPU, in eager code with plain attention: one batch in float64, the
    iterations in float32, because Muon keeps its state in float32.
    """
    cpu = Hardware(torch.device("cpu"), torch.float32, "", None, None)
    config: Any = model.config
    exact = build_model(replace(config, flash=False))
    exact.load_state_dict(model.state_dict())
    evaluation = pass_a_batch(exact.double(), c, cpu)
    gradients = [gradient.float() for _, gradient in take_gradients(exact)]
    exact.load_state_dict(model.state_dict())
    return Exact(evaluation, gradients, iterate(exact.float(), c, cpu))


def copy_of(model: torch.nn.Module, c: Config, hw: Hardware, compiled: bool) -> torch.nn.Module:
    """Copy the weights to the device, into the model that a run would train there."""
    copied = build_model(model_config(c, VOCAB, flash=hw.flash(c), compiled=compiled))
    copied.load_state_dict(model.state_dict())
    return copied.to(hw.device)


def train_here(c: Config, way: Way, model: torch.nn.Module, exact: Exact) -> dict:
    """
    Train on the device. Returns the largest relative errors, and the name of the weight whose
    gradient has the largest one.
    """
    ours = copy_of(model, c, way.hw, compiled=False)
    with contextlib.nullcontext() if way.tf32 else float32_matmuls():
        evaluation = pass_a_batch(ours, c, way.hw)
        gradients = errors(ours, exact.gradients)
        losses = iterate(ours, c, way.hw)
    names = [name for name, _ in trained(ours)]
    gradient, weight = max(zip(map(magnitude, gradients), names, strict=True))
    return dict(
        loss=max(magnitude(a / b - 1) for a, b in zip(losses, exact.losses, strict=True)),
        evaluation=magnitude(evaluation / exact.evaluation - 1),
        gradient=gradient,
        weight=weight,
    )


def magnitude(error: float) -> float:
    """Return the error's absolute value; infinity for NaN, so that NaN is the largest error."""
    return math.inf if math.isnan(error) else abs(error)


def pass_a_batch(model: torch.nn.Module, c: Config, hw: Hardware) -> float:
    """Compute the gradients of one batch, times LOSS_SCALE. Returns the loss of an evaluation."""
    x, y = (tokens.to(hw.device) for tokens in batch_of(c))
    model.eval()
    with torch.no_grad(), hw.autocast():
        evaluation = model(x, y).item()
    model.train()
    with hw.autocast():
        loss = model(x, y)
    (loss * LOSS_SCALE).backward()
    return evaluation


def iterate(model: torch.nn.Module, c: Config, hw: Hardware) -> list[float]:
    """Run train.py's train_step a few times on one batch. Returns the loss of each iteration."""
    x, y = (tokens.to(hw.device) for tokens in batch_of(c))
    optimizer = build_optimizer(model, c, hw.dtype)
    is_scaled = hw.dtype == torch.float16
    scaler = torch.amp.GradScaler(hw.device.type, init_scale=LOSS_SCALE, enabled=is_scaled)
    losses = []
    for _ in range(ITERATIONS):
        loss, _ = train_step(model, optimizer, scaler, [(x, y)], c.grad_clip, hw.autocast())
        losses.append(loss.item())
    return losses


def what_is_wrong(row: dict, way: Way) -> list[str]:
    most_loss, most_gradient = LARGEST_ERRORS[way.name]
    wrong = []
    if row["gradient"] > most_gradient:
        wrong.append(f"gradient of {row['weight']}, off by {row['gradient']:.2%}")
    for name in ("loss", "evaluation"):
        if row[name] > most_loss:
            wrong.append(f"{name}, off by {row[name]:.3%}")
    return wrong


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
