"""
Measure what the check of compiled code finds and costs.

    python dev/measure_check.py --json=check.json
    python dev/measure_check.py dev/gpt124m_cpu.py --batch_size=4 --json=check.json

Without a config, it plants faults, and counts false positives on small versions of shipped configs.
With a config, it measures the check's time beside a cold compile and its memory beside an
iteration; each row is a new process with an empty compile cache. Both can write to the same file.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIALS = 3
SEEDS = 24
SMALL = "--n_layer=2 --n_embd=128 --block_size=128 --batch_size=4"  # keeps the shipped head sizes
SHAPES = {  # flags -> vocabulary size
    "dev/small_gpt2.py": 256,
    "dev/small_gpt2.py --n_layer=1": 256,
    "config/quickstart.py": 256,
    f"config/gpt124m_4070.py {SMALL} --n_head=2": 1000,
    f"config/fast124m_4070.py {SMALL} --n_head=1": 1000,
}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def child(argv: list[str], with_check: bool) -> None:
    """
    Print four figures as JSON: seconds to compile and check, seconds to check again, seconds of the
    compiled passes within a check, and the memory peak in GiB.
    """
    import torch

    from configurator import load_config
    from data.loader import to_batch
    from model_fast import build_model
    from train import model_config
    from training import hardware
    from training.compiled import compare_with_eager, compile_model

    c = load_config(argv)
    hw = hardware.set_up(c)
    vocab = 50257
    model = build_model(model_config(c, vocab, flash=hw.flash(c), compiled=True)).to(hw.device)
    compile_model(model)
    began = time.perf_counter()
    if with_check:
        compare_with_eager(model, c.batch_size, vocab, hw)
    first = time.perf_counter() - began
    x, y = to_batch(torch.randint(vocab, (c.batch_size, c.block_size + 1)), hw.device)
    for _ in range(2):  # the forward and backward passes of one iteration
        with hw.autocast():
            loss = model(x, y)
        loss.backward()
    peak = hw.peak_memory_gib()
    began = time.perf_counter()
    if with_check:
        compare_with_eager(model, c.batch_size, vocab, hw)
    again = time.perf_counter() - began
    began = time.perf_counter()
    with hw.autocast():
        model(x, y).backward()
    model.eval()
    with hw.autocast(), torch.no_grad():
        model(x, y)
    hw.synchronize()
    passes = time.perf_counter() - began
    print(json.dumps(dict(first=first, again=again, passes=passes, peak_gib=peak)))


def measure(argv: list[str], with_check: bool) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", *["--check"] * with_check, *argv]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def quiet_hardware(dtype: str):
    from test_compiled import hardware_in

    with contextlib.redirect_stderr(None):  # hides the warning that float16 is slow on a CPU
        return hardware_in(dtype)


def planted() -> list[dict]:
    """Plant each fault, and return which error finds it."""
    from test_compiled import BATCH, DTYPES, FAULTS, KERNELS, compiled_by, right, wrong_kernel

    from training.compiled import CompilerError, WrongKernels, compare_with_eager

    trials = []  # (fault, model, dtypes, compiler, a context in which it is planted)
    for fault, (names, compiler) in FAULTS.items():
        # in half precision, a planted cast changes nothing
        dtypes = ["float32"] if "cast" in fault else DTYPES
        for name in names.split():
            trials.append((fault, name, dtypes, compiler, contextlib.nullcontext()))
    for kernel in KERNELS:
        for name in ("gpt2", "fast"):
            fault = f"uncompiled too: {kernel}"
            trials.append((fault, name, DTYPES[1:], right, wrong_kernel(name, kernel)))
    rows = []
    for fault, name, dtypes, compiler, planted in trials:
        row = dict(fault=fault, model=name)
        with planted:
            for dtype in dtypes:
                try:
                    gpt = compiled_by(compiler, name)
                    compare_with_eager(gpt, BATCH, 500, quiet_hardware(dtype))
                    row[dtype] = "NOT FOUND"
                except (CompilerError, WrongKernels) as error:
                    row[dtype] = str(error)
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)
    return rows


def false_alarms() -> list[dict]:
    """Check correct compiled code with many seeds, and return the false positives."""
    import torch
    from test_compiled import DTYPES

    from configurator import load_config
    from model_fast import build_model
    from train import model_config
    from training.compiled import CompilerError, WrongKernels, compare_with_eager, compile_model

    rows = []
    for flags, vocab in SHAPES.items():
        for dtype in DTYPES:
            c = load_config([*flags.split(), "--device=cpu", f"--dtype={dtype}"])
            hw = quiet_hardware(dtype)
            torch.compiler.reset()
            model = build_model(model_config(c, vocab, flash=hw.flash(c), compiled=True))
            compile_model(model)
            alarms = []
            for seed in range(SEEDS):
                try:
                    compare_with_eager(model, c.batch_size, vocab, hw, seed)
                except (CompilerError, WrongKernels) as error:
                    alarms.append(f"seed {seed}: {error}")
            rows.append(dict(flags=flags, dtype=dtype, seeds=SEEDS, alarms=alarms))
            print(*rows[-1].values(), sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options, argv = parser.parse_known_args()
    if options.child:
        return child(argv, options.check)
    found = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    command = " ".join(sys.argv[1:])
    if argv:
        found |= dict(costs_command=command, costs=measure_costs(argv))
    else:
        found |= dict(command=command, false_alarms=false_alarms(), faults=planted())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure_costs(argv: list[str]) -> list[dict]:
    costs = []
    for _ in range(TRIALS):
        checked, plain = measure(argv, with_check=True), measure(argv, with_check=False)
        cost = dict(
            cold_compile_seconds=checked["first"] - checked["again"],
            check_seconds=checked["again"] - checked["passes"],
            compiled_passes_seconds=checked["passes"],
            peak_gib=checked["peak_gib"],
            peak_without_check_gib=plain["peak_gib"],
        )
        cost["share"] = cost["check_seconds"] / cost["cold_compile_seconds"]
        print(json.dumps(cost, indent=1))
        costs.append(cost)
    return costs


if __name__ == "__main__":
    main()
