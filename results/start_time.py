"""
Seconds from the command to the first logged iteration, with an empty cache of compiled code and with a warm one, in turn.

    python results/start_time.py [--pairs=3] CONFIG [--key=value ...] > start_time.json
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import hardware
import measure
from configurator import load_config
from console import parse_count
from data.shards import write_shard
from errors import Parser, UserError, run_main
from tokenizer import GPT2_VOCAB


def seconds_to_first_iteration(argv: list[str], out_dir: Path, cache: Path) -> float:
    command = [sys.executable, str(ROOT / "train.py"), *argv, f"--out_dir={out_dir}", "--overwrite=True", "--max_iters=1",
               "--log_interval=1", "--sample_tokens=0", "--eval_tokens=1024"]  # fmt: skip
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(cache))
    ) as run:
        for line in run.stdout:
            if line.startswith("iter 0:"):
                return time.perf_counter() - began
    raise UserError(f"train.py ended with exit code {run.returncode} before its first iteration")


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--pairs", type=parse_count, default=3, metavar="N")
    args, rest = parser.parse_known_args(argv)
    seconds = dict(cold=[], warm=[])
    for _ in tqdm(range(args.pairs), unit="pair"):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "random")
            data.mkdir()
            for split in ("train", "val"):
                write_shard(data / f"{split}_000000.bin", np.random.default_rng(0).integers(0, GPT2_VOCAB, 2**20))
            for state in seconds:
                arguments = [*rest, f"--dataset={data}"]
                seconds[state].append(seconds_to_first_iteration(arguments, Path(folder, "out"), Path(folder, "cache")))
    ratios = [warm / cold for cold, warm in zip(seconds["cold"], seconds["warm"])]
    machine = measure.machine(hardware.set_up(load_config(rest)))
    result = dict(command=f"python results/start_time.py {' '.join(argv)}", seconds=seconds, ratios=ratios, machine=machine)
    print(json.dumps(result, indent=1))
    print(f"warm {statistics.median(seconds['warm']):.1f} s, cold {statistics.median(seconds['cold']):.1f} s, "
          f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    run_main(main)
