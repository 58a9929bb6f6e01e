"""
What the code for several processes costs a run that has one: whole iterations of train.py against bare calls of
train_step on the same batches and weights, in turn. Ratios of wall and of processor time, the median of all pairs.

    python results/ranks_speed.py [PAIRS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from configurator import load_config
from data.shards import write_shard
from errors import Parser, run_main
from ranks import Ranks
from start import Start
from train import Run, train_step

FLAGS = ["--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=128", "--batch_size=4", "--gradient_accumulation_steps=2",
         "--device=cpu", "--dtype=float32", "--compile=False"]  # fmt: skip


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("pairs", nargs="?", type=int, default=100, help="of iterations (default: 100)")
    pairs = parser.parse_args(argv).pairs
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train_000001.bin", "val_000000.bin"):
            write_shard(Path(folder, name), np.random.default_rng(0).integers(0, 256, 1_000_000))
        Path(folder, "manifest.json").write_text('{"tokenizer": "byte", "vocab": 256}')
        ranks = Ranks()
        run = Run(load_config([*FLAGS, f"--dataset={folder}", f"--out_dir={folder}/out"]), Start(ranks), ranks)
        run.step_model = ranks.data_parallel(run.compiled)

        def bare():
            train_step(run.model, run.optimizer, run.scaler, run.batches, 2, 1.0, run.hw.autocast())

        ratios = []
        for pair in range(pairs + 3):  # the first ones warm up
            took = {}
            for step in (bare, run.iterate) if pair % 2 else (run.iterate, bare):
                wall, processor = time.perf_counter(), time.process_time()
                step()
                took[step.__name__] = time.perf_counter() - wall, time.process_time() - processor
            ratios.append([took["iterate"][i] / took["bare"][i] for i in range(2)])
        for name, column in zip(("wall", "processor"), zip(*ratios[3:])):
            low, middle, high = statistics.quantiles(column, n=4)
            print(f"{name} time, iteration / bare train_step: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")
        run.batches.close()


if __name__ == "__main__":
    run_main(main)
