"""
Tokens per second of our preparation against tiktoken alone and against the route of nanoGPT's data/openwebtext/prepare.py.

    python results/prepare_speed.py DOCUMENTS.parquet [--documents=6000] [--rounds=5]    -> results/prepare_speed.json

The same documents, on all cores, in turn, several rounds in one run; the ratios are medians over the rounds.
  ours      data/shards.py from the parquet file to finished shards: read, tokenise, write, fsync, sha256, manifest
  tiktoken  encode_to_numpy of documents in memory on one thread per core, in lists of 32; nothing is kept
  nanogpt   Dataset.map(encode_ordinary + end-of-text, num_proc=cores) of an Arrow file, then np.concatenate into a memmap
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import datasets
import numpy as np
import pyarrow.parquet as pq
import tiktoken

from data.prepare_fineweb import files_source
from data.shards import Plan, prepare
from errors import Parser, run_main
from tokenizer import Tokenizer

RESULT = Path(__file__).with_suffix(".json")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DOCUMENTS_PER_BATCH = 7826  # nanoGPT writes 8,013,769 documents in 1024 batches
bpe = tiktoken.get_encoding("gpt2")


def ours(parquet: Path, folder: Path) -> int:
    plan = Plan(folder / "out", "speed", "speed", Tokenizer({"kind": "gpt2"}), expected_tokens=0)
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(plan, files_source([str(parquet)]), CORES)
    return sum(shard["tokens"] for shard in json.loads((folder / "out" / "manifest.json").read_text())["shards"])


def tiktoken_alone(texts: list[str]) -> int:
    def encode(part: list[str]) -> int:
        return sum(len(bpe.encode_to_numpy(text, disallowed_special=())) for text in part)

    with ThreadPoolExecutor(CORES) as pool:
        return sum(pool.map(encode, [texts[i : i + 32] for i in range(0, len(texts), 32)])) + len(texts)


def encode_document(row: dict) -> dict:
    ids = bpe.encode_ordinary(row["text"]) + [bpe.eot_token]
    return dict(ids=ids, len=len(ids))


def nanogpt(rows: datasets.Dataset, folder: Path) -> int:
    cache = str(folder / "map.arrow")
    encoded = rows.map(encode_document, remove_columns=["text"], num_proc=CORES, cache_file_name=cache)
    total, filled = int(np.sum(encoded["len"], dtype=np.uint64)), 0
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
    batches = max(len(rows) // DOCUMENTS_PER_BATCH, 1)
    for number in range(batches):
        shard = encoded.shard(num_shards=batches, index=number, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        tokens[filled : filled + len(ids)] = ids
        filled += len(ids)
    tokens.flush()
    return total


def measure(routes: list, rounds: int, temporary: str) -> list[dict[str, dict]]:
    """Each route's speed in each round; the order turns, so that none always comes after the same one."""
    measured = []
    for number in range(rounds):
        measured.append({})
        for name, route in routes[number % len(routes) :] + routes[: number % len(routes)]:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                start, cpu_start = time.perf_counter(), sum(os.times()[:4])  # processes it started and ended included
                tokens = route(Path(folder))
                seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - cpu_start
            measured[-1][name] = dict(per_second=round(tokens / seconds), per_cpu_second=round(tokens / cpu_seconds))
        print(measured[-1], flush=True)
    return measured


def ratio(rounds: list[dict], other: str, unit: str) -> float:
    return round(statistics.median(r["ours"][unit] / r[other][unit] for r in rounds), 3)


def read_arguments(argv: list[str], usage: str, documents: int) -> argparse.Namespace:
    parser = Parser(usage)
    parser.add_argument("source", type=Path)
    parser.add_argument("--documents", type=int, default=documents)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


def take_documents(arguments: argparse.Namespace, folder: str) -> tuple[Path, list[str]]:
    """A parquet file with the first documents of the source, and their texts."""
    parquet = Path(folder, "documents.parquet")
    table = pq.read_table(arguments.source, columns=["text"]).slice(0, arguments.documents)
    pq.write_table(table, parquet, compression="zstd", row_group_size=1000)
    return parquet, table.column("text").to_pylist()


def main(argv: list[str]) -> None:
    arguments = read_arguments(argv, __doc__, documents=6000)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        parquet, texts = take_documents(arguments, temporary)
        rows = datasets.load_dataset("parquet", data_files=str(parquet), cache_dir=temporary)["train"]
        tokens = tiktoken_alone(texts)
        routes = [
            ("ours", lambda folder: ours(parquet, folder)),
            ("tiktoken", lambda folder: tiktoken_alone(texts)),
            ("nanogpt", lambda folder: nanogpt(rows, folder)),
        ]
        rounds = measure(routes, arguments.rounds, temporary)
    flags = f"--documents={arguments.documents} --rounds={arguments.rounds}"
    result = dict(
        command=f"python results/prepare_speed.py {arguments.source.name} {flags}",
        date=date.today().isoformat(),
        machine=dict(system=platform.system(), processor=platform.machine(), cores=CORES),
        versions={"python": platform.python_version()} | {n: version(n) for n in ("tiktoken", "datasets", "pyarrow", "numpy")},
        documents=len(texts),
        tokens=tokens,
        tokens_per_second={name: statistics.median(r[name]["per_second"] for r in rounds) for name, _ in routes},
        ours_to_tiktoken=ratio(rounds, "tiktoken", "per_second"),
        ours_to_nanogpt=ratio(rounds, "nanogpt", "per_second"),
        ours_to_nanogpt_per_cpu_second=ratio(rounds, "nanogpt", "per_cpu_second"),
        rounds=rounds,
    )
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"ours / tiktoken {result['ours_to_tiktoken']}, ours / nanoGPT's route {result['ours_to_nanogpt']}")


if __name__ == "__main__":
    run_main(main)
