"""Provide a tiny dataset, the keys of a tiny run, and a function that runs it in this process."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from program import TINY_RUN

import train
from data.writer import write_shard

ON_WINDOWS = sys.platform == "win32"
needs_signals = pytest.mark.skipif(
    ON_WINDOWS, reason="Windows sends no process a signal that it could answer"
)
TINY = TINY_RUN | dict(
    learning_rate=0.01,
    warmup_iters=2,
    max_iters=8,
    eval_interval=4,
    eval_tokens=256,
)


def write_dataset(
    folder: Path, shard_tokens: list[int], vocab: int = 64, val_tokens: int = 700
) -> Path:
    """
    Write a dataset of random tokens with a little structure to learn: one validation shard, and
    training shards of the given sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    manifest = dict(tokenizer="byte", vocab=vocab, eot=0, shards=[])
    for i, tokens in enumerate([val_tokens, *shard_tokens]):
        ids = np.cumsum(rng.integers(0, 3, tokens)) % vocab
        name = f"{'train' if i else 'val'}_{i:06}.bin"
        manifest["shards"].append(
            dict(name=name, tokens=tokens, bytes=tokens, sha256=write_shard(folder / name, ids))
        )
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def flags(dataset: Path, out_dir: Path, **changes) -> list[str]:
    return [
        f"--{k}={v}" for k, v in (TINY | dict(dataset=dataset, out_dir=out_dir) | changes).items()
    ]


def run_here(dataset: Path, out_dir: Path, train_step=train.train_step, **changes) -> int:
    """Run train.py in this process, and return its exit code."""
    return train.main(flags(dataset, out_dir, **changes), train_step=train_step)
