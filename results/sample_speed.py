"""
What sampling gains from its cache, and what metrics, pictures and comparisons cost; writes sample_speed.json beside it.

    python results/sample_speed.py              some ten minutes on two cores

The contestants take turns, in sampling token by token, so a ratio compares neighbours in time. Metrics, pictures and
comparisons are counted in processor seconds. Medians and extremes over the turns are kept.
Random weights of the 124M model: speed does not depend on what they are.
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers

import compare
import hardware
import measure
from configurator import Config, config_values
from errors import Parser, run_main
from generate import store_by_columns, stream
from model import GPT, GPTConfig, KVCache
from ranks import Ranks
from runlog import IterationResult, Ledger, RunLog

PROMPT_TOKENS, NEW_TOKENS = 16, 512
EVERY = 16  # without the cache, each 16th token is timed
STEP_SECONDS, LOG_INTERVAL, EVAL_INTERVAL = 0.15, 10, 1000


def seconds(function, *args, **kwargs) -> float:
    began = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - began


def processor_seconds(function, *args, **kwargs) -> float:
    """Of this process and of those it has waited for: what is computed on one core, however busy the others keep it."""
    began = os.times()
    function(*args, **kwargs)
    return sum(os.times()[:4]) - sum(began[:4])


def summary(values: list[float]) -> dict:
    return dict(median=statistics.median(values), lowest=min(values), highest=max(values))


class TurnTaker(transformers.generation.streamers.BaseStreamer):
    """transformers' generate hands each token to this, which then lets the others make theirs: token by token in turn."""

    def __init__(self, model: GPT, idx: torch.Tensor):
        self.model, self.ours = model, stream(model, idx, NEW_TOKENS, 50257, temperature=0)
        self.times = dict(cached=[], transformers=[], uncached=[])
        self.since = None

    def put(self, tokens: torch.Tensor) -> None:
        if self.since is not None:  # the first call brings the prompt
            self.times["transformers"].append(time.perf_counter() - self.since)
            made = len(self.times["transformers"])
            self.times["cached"].append(seconds(next, self.ours))
            if made % EVERY == EVERY // 2:
                text = torch.zeros(1, PROMPT_TOKENS + made, dtype=torch.int64)
                caches = [KVCache(text.size(1)) for _ in self.model.transformer.h]
                self.times["uncached"].append(seconds(self.model.next_logits, text, caches))
        self.since = time.perf_counter()

    def end(self) -> None:
        pass


@torch.no_grad()
def sampling(dtype: torch.dtype, turns: int) -> dict:
    """tok/s of greedy text, batch 1, by the median token: with the cache, without, and transformers' generate."""
    model = GPT(GPTConfig()).eval().to(dtype)
    if dtype == torch.float32:
        store_by_columns(model)  # as sample.py does
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval().to(dtype)
    idx = torch.randint(50257, (1, PROMPT_TOKENS))
    tokens_per_sec = dict(cached=[], transformers=[], uncached=[])
    for turn in range(turns + 1):
        taker = TurnTaker(model, idx)
        peer.generate(idx, attention_mask=torch.ones_like(idx), do_sample=False, use_cache=True, pad_token_id=0, streamer=taker,
                      max_new_tokens=NEW_TOKENS if turn else 16, min_new_tokens=NEW_TOKENS if turn else 16)  # fmt: skip
        if turn:  # the first only warms up
            for name, times in taker.times.items():
                tokens_per_sec[name].append(1 / statistics.median(times))
            print(dtype, {name: f"{values[-1]:.2f} tok/s" for name, values in tokens_per_sec.items()}, flush=True)
    cached, peer_cached, uncached = tokens_per_sec.values()
    return dict(
        tokens_per_sec={name: summary(values) for name, values in tokens_per_sec.items()},
        speedup_of_the_cache=summary([c / u for c, u in zip(cached, uncached)]),
        speedup_over_transformers=summary([c / p for c, p in zip(cached, peer_cached)]),
    )


def metrics_and_pictures(turns: int) -> dict:
    """What a log line with its record costs, and a picture of 100,000 iterations, as shares of 150 ms iterations."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(out_dir=folder, log_interval=LOG_INTERVAL, eval_interval=EVAL_INTERVAL, device="cpu", dtype="float32")
        log = RunLog(config, Ledger(time.perf_counter()), hardware.set_up(config), Ranks())
        log.train_tokens, log.flops_per_token = 10**10, 854_800_000
        loss = torch.full((40,), 3.0)

        def write_lines(lines: int) -> None:
            for it in range(lines * LOG_INTERVAL):
                log.results.append(IterationResult(it, 491_520 * it, 480 * it, 6e-4, loss, loss[0]))
                log.ledger.seconds["steps"] += STEP_SECONDS
                if (it + 1) % LOG_INTERVAL == 0:
                    log.steps(None)

        with redirect_stdout(io.StringIO()):
            line = processor_seconds(write_lines, 10_000) / 10_000
        log.file.close()
        compare.draw_run(Path(folder))  # imports matplotlib
        pictures = [processor_seconds(compare.draw_run, Path(folder)) for _ in range(turns)]
    picture = statistics.median(pictures)
    return dict(
        step_seconds=STEP_SECONDS, log_interval=LOG_INTERVAL, eval_interval=EVAL_INTERVAL,
        log_line_ms=1e3 * line, picture_seconds=summary(pictures),
        share_of_wall_time=line / (STEP_SECONDS * LOG_INTERVAL) + picture / (STEP_SECONDS * EVAL_INTERVAL),
    )  # fmt: skip


def write_long_run(folder: Path, records: int = 100_000) -> None:
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        start = dict(kind="start", iter=0, config=config_values(Config()), parameters=124_439_808, tokens_per_iter=491_520)
        file.write(json.dumps(start) + "\n")
        for it in range(records):
            if it % EVAL_INTERVAL == 0:
                loss = 3 + 8 / (1 + it / 100)
                file.write(json.dumps(dict(kind="eval", iter=it, train_loss=loss, val_loss=loss, seconds=5.0)) + "\n")
            values = dict(iter=it, tokens=it * 491_520, loss=3.1234567, lr=6e-4, grad_norm=0.3456789, step_ms=150.1234567,
                          tokens_per_sec=3274105.1234567, mfu=0.4123456, mem_gib=9.8765432, data_wait_ms=0.1234567)  # fmt: skip
            file.write(json.dumps(dict(kind="step", **values)) + "\n")


def comparison(turns: int) -> dict:
    """Seconds of compare.py, its process included, on two runs of 100,000 step records each."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("a", "b")]
        for run in runs:
            write_long_run(run)
        command = [sys.executable, "compare.py", *map(str, runs)]
        table = [processor_seconds(subprocess.run, command, cwd=ROOT, check=True, capture_output=True) for _ in range(turns)]
        command.append(f"--png={folder}/ab.png")
        picture = [processor_seconds(subprocess.run, command, cwd=ROOT, check=True, capture_output=True) for _ in range(turns)]
    return dict(table_seconds=summary(table), table_and_picture_seconds=summary(picture))


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--turns", type=int, default=3, help="how often each contestant runs")
    turns = parser.parse_args(argv).turns
    torch.manual_seed(0)
    machine = measure.machine(hardware.set_up(Config(device="cpu"))) | dict(transformers=transformers.__version__)
    results = dict(command=f"python results/sample_speed.py --turns={turns}", machine=machine)
    results["comparison_of_two_runs_of_100000_records"] = comparison(turns)
    results["metrics_and_pictures"] = metrics_and_pictures(turns)
    results["prompt_tokens"], results["new_tokens"] = PROMPT_TOKENS, NEW_TOKENS
    for dtype in (torch.float32, torch.bfloat16):
        results[str(dtype).removeprefix("torch.")] = sampling(dtype, turns)
    results["machine"]["load_average_at_the_end"] = os.getloadavg()[0]
    text = json.dumps(results, indent=1)
    Path(__file__).with_suffix(".json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    run_main(main)
