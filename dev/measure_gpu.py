"""
Measure a GPU in ten minutes, and write one file to send (docs/status.md says where). The rows
include commands of docs/first_hour.md.

    python dev/measure_gpu.py                for an RTX 4070, or any card with 8 GB or more
    python dev/measure_gpu.py 4090           with another card's configs: 3060, a100, h200, t4
    python dev/measure_gpu.py --minutes=40   all rows, for example on a rented card
    python dev/measure_gpu.py --dry_run      check on a CPU, with tiny models, that the rows run

Needs requirements-dev.txt, 4 GB of disk and no network. Each row is a command in its own process;
if one fails or takes too long, the next still runs. The file is written after each row. Run the
command again to measure the missing rows.
"""

import argparse
import getpass
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "measured"
PYTHON = sys.executable
CARDS = ["4070", "3060", "4090", "a100", "h200", "t4"]
# prints torch's name for the GPU, or an empty line if torch sees none
DEVICE = """
import torch
found = "mps" if torch.backends.mps.is_available() else ""
print(torch.cuda.get_device_name() if torch.cuda.is_available() else found)
"""
SMI = "name,driver_version,power.limit,clocks.max.sm,memory.total,pcie.link.gen.max"
# Tests that compile GPT-124M take as long as all other tests together, so they are a separate row.
REAL_SHAPES = "compiled_bfloat16 or data_parallel"
TINY = ["--device=cpu", "--dtype=float32", "--compile=False", "--n_layer=2", "--n_head=2"]
TINY += ["--n_embd=32", "--block_size=16", "--batch_size=1"]
LOG_LINES = 200  # how many of a row's last lines to keep


def rows(options: argparse.Namespace, device: str, work: Path) -> dict[str, tuple[int, list]]:
    """Return each row's time limit in seconds and its command, the most valuable rows first."""
    tokens = eval_tokens = 65536
    machine, sizes, tables, only = [], [], [], []  # extra flags
    if options.dry_run:
        tokens = 32
        eval_tokens = 256
        machine = ["--device=cpu", "--compile=False"]
        sizes = TINY
        tables = ["--value_tables=1", "--bigram_rows=64"]
        only = ["--collect-only"]
    elif device == "mps":
        machine = sizes = ["--dtype=float32", "--compile=False"]
    classic = [f"{ROOT / 'config' / f'gpt124m_{options.card}.py'}", *sizes]
    fast = [f"{ROOT / 'config' / f'fast124m_{options.card}.py'}", *sizes, *tables]

    def bench(*arguments: str, script: str = "bench.py") -> list[str]:
        size = f"--tokens_per_iter={tokens}"
        return [PYTHON, f"{ROOT / script}", *arguments, size, "--dataset=random"]

    train = [PYTHON, f"{ROOT / 'train.py'}", *classic, f"--tokens_per_iter={tokens // 2}"]
    train += ["--dataset=python_stdlib", "--lr_decay_iters=50", "--warmup_iters=10"]
    train += [
        "--log_interval=5",
        "--eval_interval=25",
        f"--eval_tokens={eval_tokens}",
        "--keep_checkpoints=1",
    ]
    train += ["--sample_tokens=100", "--init_from=auto", f"--out_dir={work / 'run'}"]
    pytest = [PYTHON, "-m", "pytest", f"{ROOT / 'tests'}", "-v", "--tb=short", *only]
    pytest += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    found = {
        "machine": (60, [PYTHON, "-m", "torch.utils.collect_env"]),
        "driver": (20, ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]),
        "check": (150, [PYTHON, f"{ROOT / 'bench.py'}", "check", *machine]),
        "step": (180, bench(*classic)),
        "train": (180, [*train, "--max_iters=40"]),
        "resume": (120, [*train, "--max_iters=50"]),
        "plan": (120, bench("plan", *classic)),
        "gpu_tests": (420, [*pytest, "-m", "gpu", "-k", f"not ({REAL_SHAPES})"]),
        "sweep": (180, bench("sweep", *classic, "--compile=False", "--trials=1")),
        # the rows below do not fit into ten minutes
        "fast_step": (180, bench(*fast)),
        "real_shapes": (420, [*pytest, "-m", "gpu", "-k", REAL_SHAPES]),
        "compiled_sweep": (600, bench("sweep", *classic, "--trials=2")),
    }
    if options.nanogpt:
        nanogpt = f"--nanogpt={options.nanogpt.resolve()}"
        found["peer"] = (600, bench(*classic, nanogpt, script="dev/compare_nanogpt.py"))
    if not Path(fast[0]).exists():
        del found["fast_step"]
    return found


def measure(name: str, seconds: float, command: list[str], work: Path) -> dict:
    """Run one row, and return its exit code, seconds, last lines and figures for the file."""
    figures, log, began = work / f"{name}.json", work / f"{name}.log", time.monotonic()
    figures.unlink(missing_ok=True)
    if command[1:] and command[1] in (
        f"{ROOT / 'bench.py'}",
        f"{ROOT / 'dev/compare_nanogpt.py'}",
    ):
        command = [*command, f"--json={figures}"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, cwd=work, env=environment, timeout=seconds, stdout=output, stderr=output
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = f"ended after {seconds:.0f} s"
        except OSError as error:  # the program is not installed
            code = str(error)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    row = dict(command=" ".join(command).replace(PYTHON, "python"))
    row |= dict(exit=code, seconds=round(time.monotonic() - began, 1), log=lines[-LOG_LINES:])
    records = work / "run" / "metrics.jsonl"
    if figures.exists():
        row["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    elif name == "resume" and records.exists():  # includes the records of the row "train"
        row["figures"] = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    return row


def without_names(value):
    """Remove this machine's folders and the user's name from a row's figures."""
    if isinstance(value, dict):
        return {key: without_names(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_names(inner) for inner in value]
    if isinstance(value, str):
        for folder, short in ((ROOT, "."), (Path(sys.prefix), "VENV"), (Path.home(), "~")):
            if len(folder.parts) > 1:  # in a container, the home folder may be /
                parts = [re.escape(part.strip("\\/")) for part in folder.parts]
                path = r"[\\/]+".join(parts) + r"(?![\w.-])"  # a repr has two backslashes for one
                value = re.sub(path, lambda _, short=short: short, value, flags=re.IGNORECASE)
        user = getpass.getuser()
        # temporary folders contain the user's name, which Windows may shorten to six letters and ~1
        name = rf"(?<=[\\/_-])({re.escape(user)}\b|{re.escape(user[:6])}~\d)"
        value = re.sub(name, "USER", value, flags=re.IGNORECASE)
    return value


def output_of(*command: str) -> str:
    """Return a program's output, "" if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("card", nargs="?", choices=CARDS, default="4070")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to measure in turn")
    parser.add_argument("--dry_run", action="store_true")
    options = parser.parse_args(argv)
    if not output_of(PYTHON, "-c", "import torch; print(torch.__version__)"):
        print("error: this Python has no torch; activate the venv first", file=sys.stderr)
        return 2
    device = "dry_run" if options.dry_run else output_of(PYTHON, "-c", DEVICE)
    if not device:
        print("error: torch sees no GPU here (docs/install.md); or try --dry_run", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    commit = output_of("git", "describe", "--always", "--dirty") or "unknown"
    work = OUT / re.sub(r"\W+", "_", f"{device} {options.card} {commit}")
    work.mkdir(parents=True, exist_ok=True)
    path = work.with_suffix(".json")
    found = dict(device=device, card=options.card, commit=commit, rows={})
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    for name, (seconds, command) in rows(options, device, work).items():
        left = deadline - time.monotonic()
        if found["rows"].get(name, {}).get("exit") == 0:
            print(f"{name}: measured before")
            continue
        if left < 0:
            print(f"{name}: no time left")
            continue
        print(f"{name}: at most {min(seconds, left):.0f} s", flush=True)
        row = measure(name, min(seconds, left), command, work)
        print(*row["log"][-3:], f"{name}: exit {row['exit']}, {row['seconds']} s", sep="\n")
        found["rows"][name] = without_names(row)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if found["rows"].get("resume", {}).get("exit") == 0:
        for checkpoint in (work / "run").glob("*.pt"):
            checkpoint.unlink()
    print(f"the file to send: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
