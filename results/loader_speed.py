"""
What the data costs a run: reading shards, opening them, and tokenising a stream, as tokens per second, memory and seconds.

    python results/loader_speed.py DOCUMENTS.parquet [--documents=3000] [--rounds=5]    -> results/cpu/loader.json

  shards     TrainBatches over 1e9 tokens of synthetic shards in the page cache, 16 x 1024 at a time, on one core
  data wait  in 150 ms iterations of 524,288 tokens from those shards
  start-up   open_dataset and the first batch of 10B tokens in 100 sparse files
  stream     TrainBatches with stream=True, two workers, against tiktoken alone on two threads, in turn; ratios are medians
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch
from prepare_speed import read_arguments, take_documents, tiktoken_alone

from configurator import Config
from data.shards import write_shard
from dataloader import TrainBatches
from dataset import HEADER_INTS, SHARD_MAGIC, SHARD_VERSION
from errors import run_main
from start import open_data

RESULT = Path(__file__).parent / "cpu" / "loader.json"
CPU = torch.device("cpu")
BATCH = 16 * 1024  # tokens
APPETITE = {"RTX 4070": 56_134, "A100": 150_000, "H200": 600_000}  # tokens/s of a 124M model; the first is measured


def batches_of(dataset: Path, **changes) -> tuple[Config, TrainBatches]:
    config = Config(dataset=str(dataset), batch_size=16, block_size=1024, **changes)
    return config, TrainBatches(open_data(config), config, CPU)


def read_shards(folder: Path) -> dict:
    """1e9 tokens, ten epochs of 100M, on one core: speed, and how far resident memory moves meanwhile."""
    tokens = np.random.default_rng(0).integers(0, 50257, 25_000_000, dtype=np.uint16)
    for number in range(4):
        write_shard(folder / f"train_{number:06}.bin", tokens)
    write_shard(folder / "val_000000.bin", tokens[:10_000])
    del tokens
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    _, batches = batches_of(folder)
    for _ in islice(batches, 1000):
        pass
    memory, began, cpu_began = [], time.perf_counter(), time.process_time()
    for number, _ in enumerate(islice(batches, 10**9 // BATCH)):
        if number % 1000 == 0:
            memory.append(psutil.Process().memory_info().rss / 1e6)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    batches.close()
    os.sched_setaffinity(0, cores)
    memory_mb = dict(first=memory[0], lowest=min(memory), highest=max(memory), last=memory[-1])
    return dict(tokens_per_second=round(1e9 / seconds), tokens_per_cpu_second=round(1e9 / cpu_seconds),
                resident_mb={name: round(megabytes, 1) for name, megabytes in memory_mb.items()})  # fmt: skip


def data_wait(folder: Path) -> dict:
    """What 150 ms iterations of 524,288 tokens wait for data: 8 micro-steps of 64 x 1024, on a device that needs no core."""
    config = Config(dataset=str(folder), batch_size=64, block_size=1024)
    batches, waits = TrainBatches(open_data(config), config, CPU), []
    for _ in range(60):
        waits.append(0.0)
        for _ in range(8):
            began = time.perf_counter()
            batches.ready()
            batch = next(batches)
            waits[-1] += 1000 * (time.perf_counter() - began)
            time.sleep(0.150 / 8)
            del batch
    batches.close()
    wait_ms = statistics.median(waits)
    return dict(wait_ms=round(wait_ms, 3), share=round(wait_ms / 150, 5))


def start_up(folder: Path) -> dict:
    """10B tokens in 100 shards that hold nothing but zeros and so take no room."""
    for number in range(101):
        count = 100_000_000 if number else 10_000_000
        with open(folder / f"{'train' if number else 'val'}_{number:06}.bin", "wb") as file:
            file.write(np.array([SHARD_MAGIC, SHARD_VERSION, count] + [0] * (HEADER_INTS - 3), dtype="<i4").tobytes())
            file.truncate(4 * HEADER_INTS + 2 * count)
    began, cpu_began = time.perf_counter(), time.process_time()
    _, batches = batches_of(folder)
    next(batches)
    result = dict(seconds=round(time.perf_counter() - began, 3), cpu_seconds=round(time.process_time() - cpu_began, 3))
    batches.close()
    return result


def stream(parquet: Path, texts: list[str], rounds: int) -> dict:
    """Both ways through all of the documents in each round, the stream's read-ahead emptied before and filled after."""
    _, batches = batches_of(parquet, stream=True, data_workers=2, eval_tokens=100_000)
    first, measured = time.perf_counter(), []
    next(batches)
    first = time.perf_counter() - first
    tokens = tiktoken_alone(texts)
    processes = [psutil.Process(worker.pid) for worker in batches.windows.pieces._workers] + [psutil.Process()]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def stream_through() -> None:
        for _ in islice(batches, tokens // BATCH):
            pass

    for _ in range(rounds):
        for name, route in (("stream", stream_through), ("tiktoken", lambda: tiktoken_alone(texts))):
            if name == "stream":
                stream_through()
            else:
                time.sleep(3)
            began, cpu_began = time.perf_counter(), cpu_seconds()
            route()
            speed = tokens / (time.perf_counter() - began), tokens / (cpu_seconds() - cpu_began)
            measured.append(dict(route=name, per_second=round(speed[0]), per_cpu_second=round(speed[1])))
            print(measured[-1], flush=True)
    batches.close()
    pairs = list(zip(measured[::2], measured[1::2]))
    units = ("per_second", "per_cpu_second")
    ratio = {unit: round(statistics.median(ours[unit] / alone[unit] for ours, alone in pairs), 3) for unit in units}
    speed = statistics.median(ours["per_second"] for ours, _ in pairs)
    return dict(tokens=tokens, seconds_to_first_batch=round(first, 1), stream_to_tiktoken=ratio, tokens_per_second=round(speed),
                times_what_a_card_eats={card: round(speed / eats, 1) for card, eats in APPETITE.items()},
                rounds=measured)  # fmt: skip


def main(argv: list[str]) -> None:
    arguments = read_arguments(argv, __doc__, documents=3000)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, name) for name in ("shards", "sparse")}
        for folder in folders.values():
            folder.mkdir()
        parquet, texts = take_documents(arguments, temporary)
        result = dict(
            command=f"python results/loader_speed.py {arguments.source.name} --documents={arguments.documents} "
                    f"--rounds={arguments.rounds}",
            date=date.today().isoformat(),
            machine=dict(processor=platform.machine(), cores=len(os.sched_getaffinity(0)),
                         load_before=[round(load, 2) for load in os.getloadavg()]),
            versions={name: version(name) for name in ("torch", "numpy", "tiktoken", "pyarrow")},
            start_up=start_up(folders["sparse"]),
            shards=read_shards(folders["shards"]),
            data_wait=data_wait(folders["shards"]),
            stream=stream(parquet, texts, arguments.rounds),
        )  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    del result["stream"]["rounds"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
