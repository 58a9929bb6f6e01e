"""
Measure a GPU in ten minutes, and write one file to send (docs/status.md says where). The rows
include commands of docs/first_hour.md.

    python dev/measure_gpu.py                for an RTX 4070, or any card with 8 GB or more
    python dev/measure_gpu.py 4090           with another card's configs: 3060, a100, h200, t4
    python dev/measure_gpu.py --minutes=50   all rows, for example on a rented card
    python dev/measure_gpu.py --dry_run      check on a CPU, with tiny models, that the rows run

Needs requirements-dev.txt, 4 GB of disk and no network. Each row runs a command in its own process
and records the GPU's clocks, power and memory by nvidia-smi beside it. If a row fails or takes too
long, the next still runs. The file is written after each row. Run the command again to measure the
missing rows.
"""

import argparse
import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "measured"
PYTHON = sys.executable
# The micro-batches of GPT-2 and of the fast recipe, and tokens per iteration. With fewer tokens the
# optimizer, above all Muon, would take a larger share of the time than in a real run.
CARDS = {
    "4070": (8, 8, 262144),
    "3060": (8, 8, 262144),
    "4090": (16, 32, 524288),
    "a100": (32, 32, 524288),
    "h200": (32, 32, 524288),
    "t4": (8, 8, 262144),
}
# prints torch's name for the GPU, or an empty line if torch sees none
DEVICE = """
import torch
found = "mps" if torch.backends.mps.is_available() else ""
print(torch.cuda.get_device_name() if torch.cuda.is_available() else found)
"""
# prints how fast the GPU multiplies, to judge the MFU that the other rows report
MATMUL = """
import torch
from training.speed import measure_matmul
device, wait = ("cuda", torch.cuda.synchronize) if torch.cuda.is_available() else ("cpu", int)
rate = measure_matmul(torch.device(device), torch.float16, wait)
print(f"float16 on {device}: {rate:.4g} TFLOP/s")
"""
SMI = "name,driver_version,power.limit,clocks.max.sm,memory.total,pcie.link.gen.max"
BESIDE = "index,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used,utilization.gpu"
BESIDE_SECONDS = 5  # between two lines of nvidia-smi
EXACT = "bit_equal or never_waits"
# Tests that compile GPT-124M take as long as all other tests together, so they are a separate row.
REAL_SHAPES = "compiled_bfloat16 or data_parallel"
TINY = ["--device=cpu", "--dtype=float32", "--compile=False", "--n_layer=6", "--n_head=2"]
TINY += ["--n_embd=32", "--block_size=16"]
LOG_LINES = 200  # how many of a row's last lines to keep


def rows(options: argparse.Namespace, device: str, work: Path) -> dict[str, tuple[int, list]]:
    """
    Return each row's time limit in seconds and its command, the most valuable rows first. The
    limits allow for compiling on two CPU cores.
    """
    of_gpt2, of_fast, tokens = CARDS[options.card]
    train_tokens = eval_tokens = 65536
    machine, sizes, only = [], [], []  # extra flags
    if options.dry_run:
        of_gpt2 = of_fast = 1
        tokens, train_tokens, eval_tokens = 32, 32, 256
        machine = ["--device=cpu", "--compile=False"]
        sizes = TINY
        only = ["--collect-only"]
    elif device == "mps":
        machine = sizes = ["--dtype=float32", "--compile=False"]
    classic = [f"{ROOT / 'config/gpt124m_4070.py'}", "--dtype=auto"]
    classic += [f"--batch_size={of_gpt2}", *sizes]
    fast = [f"{ROOT / 'config/fast124m.py'}", f"--batch_size={of_fast}", *sizes]

    def bench(*arguments: str) -> list[str]:
        size = f"--tokens_per_iter={tokens}"
        return [PYTHON, f"{ROOT / 'bench.py'}", *arguments, size, "--dataset=random"]

    train = [PYTHON, f"{ROOT / 'train.py'}", *classic, f"--tokens_per_iter={train_tokens}"]
    train += ["--dataset=python_stdlib", "--lr_decay_iters=50", "--warmup_iters=10"]
    train += ["--log_interval=5", "--eval_interval=25", f"--eval_tokens={eval_tokens}"]
    train += ["--keep_checkpoints=1"]
    train += ["--sample_tokens=100", "--init_from=auto", f"--out_dir={work / 'run'}"]
    pytest = [PYTHON, "-m", "pytest", f"{ROOT / 'tests'}", "-v", "--tb=short", *only]
    pytest += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", "gpu", "-k"]
    batches = [f"--row=--batch_size={size * of_gpt2}" for size in (1, 2, 4)]
    return {
        "machine": (60, [PYTHON, "-m", "torch.utils.collect_env"]),
        "driver": (20, ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]),
        "check": (240, [PYTHON, f"{ROOT / 'bench.py'}", "check", *machine]),
        "matmul": (60, [PYTHON, "-c", MATMUL]),
        "step": (240, bench(*classic)),
        "step_twice_the_batch": (240, bench(*classic, f"--batch_size={2 * of_gpt2}")),
        "fast_step": (300, bench(*fast)),
        "train": (240, [*train, "--max_iters=40"]),
        "resume": (180, [*train, "--max_iters=50"]),
        "exact": (300, [*pytest, EXACT]),
        # the rows below do not fit into ten minutes
        "real_shapes": (420, [*pytest, REAL_SHAPES]),
        "gpu_tests": (420, [*pytest, f"not ({EXACT} or {REAL_SHAPES})"]),
        "compiled_batches": (600, bench(*classic, *batches)),
        "plan": (120, bench("plan", *classic)),
        "batches": (300, bench(*classic, "--compile=False", *batches)),
    }


def measure(name: str, seconds: float, command: list[str], work: Path) -> dict:
    """Run one row, and return its exit code, seconds, last lines and figures for the file."""
    figures, log, began = work / f"{name}.json", work / f"{name}.log", time.monotonic()
    figures.unlink(missing_ok=True)
    if command[1:] and command[1] == f"{ROOT / 'bench.py'}":
        command = [*command, f"--json={figures}"]
    with watched_gpu(work / f"{name}.smi") as beside:
        code = run(command, log, seconds)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    row = dict(command=" ".join(command).replace(PYTHON, "python"))
    row |= dict(exit=code, seconds=round(time.monotonic() - began, 1), log=lines[-LOG_LINES:])
    row["nvidia_smi"] = beside.read_text(encoding="utf-8").splitlines()
    records = work / "run" / "metrics.jsonl"
    if figures.exists():
        row["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    elif name == "resume" and records.exists():  # includes the records of the row "train"
        row["figures"] = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    return row


def run(command: list[str], log: Path, seconds: float) -> int | str:
    """Run a command with its output in `log`. Returns its exit code, or why there is none."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    environment |= {"PYTHONPATH": str(ROOT)}  # for MATMUL
    with log.open("wb") as output:
        options = dict(cwd=log.parent, env=environment, stdout=output, stderr=output)
        try:
            process = subprocess.Popen(command, start_new_session=True, **options)
        except OSError as error:  # the program is not installed
            return str(error)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s"
        finally:
            end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it has started, which could keep the GPU's memory."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


@contextlib.contextmanager
def watched_gpu(path: Path) -> Iterator[Path]:
    """Let nvidia-smi, if there is one, write the GPU's state to `path` every few seconds."""
    query = ["nvidia-smi", f"--query-gpu={BESIDE}", "--format=csv", "-l", f"{BESIDE_SECONDS}"]
    with path.open("wb") as output:
        try:
            process = subprocess.Popen(query, stdout=output, stderr=output)
        except OSError:
            yield path
            return
        try:
            yield path
        finally:
            process.kill()
            process.wait()


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
                path = r"[\\/]+".join(parts) + r"(?![\w.-])"  # repr() doubles backslashes
                value = re.sub(path, lambda _, short=short: short, value, flags=re.IGNORECASE)
        user = getpass.getuser()
        # temporary folders contain the user's name, which Windows may shorten to six letters and ~1
        name = rf"(?<=[\\/_-])({re.escape(user)}\b|{re.escape(user[:6])}~\d)"
        value = re.sub(name, "USER", value, flags=re.IGNORECASE)
    return value


def output_of(*command: str) -> str:
    """Return a program's output, or "" if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("card", nargs="?", choices=CARDS, default="4070")
    add("--minutes", type=float, default=10)
    add("--dry_run", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
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
