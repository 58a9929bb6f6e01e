"""
What the tests share: a tiny dataset, a tiny configuration, and train.py run in this process or in
its own.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from program import TINY_RUN

import train
from data.writer import write_shard

ROOT = Path(__file__).resolve().parent.parent
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
FAST = dict(
    model="fast",
    optimizer="muon",
    value_tables=1,
    bigram_rows=100,
    learning_rate=0.025,
    warmup_iters=0,
    grad_clip=0.0,
    min_lr=0.0,
    beta1=0.8,
)


def write_dataset(
    folder: Path, shard_tokens: list[int], vocab: int = 64, val_tokens: int = 700
) -> Path:
    """A dataset of random tokens with a little structure to learn, in shards of the given sizes."""
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
    """train.py in this process; returns its exit code."""
    return train.main(flags(dataset, out_dir, **changes), train_step=train_step)


def records(out_dir: Path, kind: str | None = None) -> list[dict]:
    found = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if kind in (None, record["kind"])]


def load(out_dir: Path, iter_num: int) -> dict:
    return torch.load(out_dir / f"ckpt-{iter_num:08}.pt", weights_only=True)


def assert_same_state(a: dict, b: dict) -> None:
    """Weights, optimizer, random states and progress equal to the last bit."""
    for left, right in ((a["model"], b["model"]), *zip(a["rng"], b["rng"], strict=True)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left)
    for i, moments in a["optimizer"]["state"].items():
        assert all(torch.equal(moments[k], b["optimizer"]["state"][i][k]) for k in moments)
    assert a["progress"] == b["progress"]
