"""
What the check of compiled code costs and sees: its time beside a cold compile, its memory beside
an iteration, and the table of planted faults.

    python dev/measure_check.py config/gpt124m_cpu.py --batch_size=4 --json=check.json

Each row of times is a process of its own, with an empty cache of compiled code.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIALS = 3
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def child(argv: list[str], with_check: bool) -> None:
    """
    Prints seconds of compiling and checking, of checking again, and of the compiled passes in it,
    without which nothing would be compiled; and the peak of memory.
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
    for _ in range(2):  # of one iteration
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


def planted() -> list[dict]:
    """Which of the faults are seen, and by what."""
    import contextlib

    from test_compiled import BATCH, DTYPES, FAULTS, compiled_by, hardware_in

    from training.compiled import compare_with_eager

    rows = []
    for fault, (names, compiler) in FAULTS.items():
        for name in names.split():
            row = dict(fault=fault, model=name)
            for dtype in DTYPES:
                if "cast" in fault and dtype != "float32":
                    continue
                try:
                    with contextlib.redirect_stderr(None):  # float16 is slow on a CPU
                        hw = hardware_in(dtype)
                    compare_with_eager(compiled_by(compiler, name), BATCH, 500, hw)
                    row[dtype] = "NOT SEEN"
                except ArithmeticError as error:
                    row[dtype] = str(error)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options, argv = parser.parse_known_args()
    if options.child:
        return child(argv, options.check)
    rows = planted()
    for row in rows:
        print(*row.values(), sep=" | ")
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
    if options.json:
        found = dict(command=" ".join(sys.argv[1:]), costs=costs, faults=rows)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
