"""
Measure how well a prefix and a shuffle of the same size represent text whose vocabulary drifts.

    python dev/drift.py > results/order_drift.json

Writes 16 parquet files whose words move from one end of a vocabulary to the other, prepares a tenth
of them in each order, trains a small model on each, and evaluates it on its own validation split
and on unseen documents from the whole range.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
FILES, GROUPS, ROWS = 16, 40, 50
WORDS = 2000
SEEDS = (1, 2)
MODEL = "--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=16 --device=cpu"
MODEL += " --gradient_accumulation_steps=1 --max_iters=200 --eval_interval=200 --eval_tokens=50000"
MODEL += " --learning_rate=2e-3 --warmup_iters=20 --lr_decay_iters=200 --compile=False"
MODEL += " --dtype=float32"


def document(rng: random.Random, at: float) -> str:
    """Draw words near a place in the vocabulary (0 to 1), and every tenth from all of it."""
    centre = at * WORDS
    picked = []
    for _ in range(40):
        place = rng.gauss(centre, WORDS / 20) if rng.random() > 0.1 else rng.random() * WORDS
        picked.append(int(min(max(place, 0), WORDS - 1)))
    return " ".join(VOCABULARY[p] for p in picked)


spelling = random.Random(0)
VOCABULARY = ["".join(spelling.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(WORDS)]


def run(*words: object) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def val_loss(out: str) -> float:
    return float(re.findall(r"val loss (\d+\.\d+)", out)[-1])


def main() -> None:
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "source").mkdir()
        whole = []
        for file in range(FILES):
            at = [(file + n / (GROUPS * ROWS)) / FILES for n in range(GROUPS * ROWS)]
            table = pa.table({"text": [document(rng, a) for a in at]})
            pq.write_table(table, work / "source" / f"{file:02}.parquet", row_group_size=ROWS)
            whole += [document(rng, a) for a in at[::50]]
        rng.shuffle(whole)
        pq.write_table(pa.table({"text": whole}), work / "whole.parquet")
        common = ["data/prepare_fineweb.py", "--tokenizer=byte", "--shard_tokens=1M"]
        run(
            *common,
            f"--source={work / 'whole.parquet'}",
            "--order=prefix",
            "--val_tokens=120k",
            "--tokens=10k",
            f"--out={work / 'whole'}",
        )
        rows = []
        for order in ("prefix", "shuffled"):
            out = work / order
            sizes = [f"--order={order}", "--val_tokens=100k", "--tokens=700k", f"--out={out}"]
            run(*common, f"--source={work / 'source'}", *sizes)
            for seed in SEEDS:
                place = work / f"run_{order}{seed}"
                flags = [*MODEL.split(), f"--out_dir={place}", f"--seed={seed}"]
                own = run("train.py", *flags, f"--dataset={out}")
                evaluate = ["--init_from=" + str(place), "--eval_only=True", "--max_iters=0"]
                flags = [*MODEL.split(), f"--out_dir={work / 'evaluated'}{order}{seed}"]
                all_of_it = run("train.py", *flags, f"--dataset={work / 'whole'}", *evaluate)
                rows.append(
                    dict(order=order, seed=seed, own_val=val_loss(own), whole=val_loss(all_of_it))
                )
        print(json.dumps(dict(command="python dev/drift.py", losses=rows), indent=1))


if __name__ == "__main__":
    main()
