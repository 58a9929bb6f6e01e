"""
Measure what float16 accumulators would bring: GeForce cards multiply float16 twice as fast when
their tensor cores also add in float16, and nobody has published training with that.

    python dev/half_accumulators.py CONFIG [--trials=3] [--json=PATH]

CONFIG stands for config files and --key=value flags, as for train.py. First come the errors of one
micro-batch's gradients against float32, in half of the weights at most and in the worst, then the
speed of train.py, in turn. Both ways train in float16.
"""

import contextlib
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # import from the root

import torch

import bench
from common.console import Parser, command_line, parse_count, run_main, say
from configurator import Config, load_config
from data.loader import to_batch
from model_fast import build_model
from reports import bench_child
from train import model_config, train_step
from training import hardware
from training.compiled import eager_pass, errors, float32_matmuls, moved_weights, take_gradients

WAYS = {"float32 accumulators": False, "float16 accumulators": True}
VOCAB = 50257


def accumulate_in_float16(wanted: bool) -> None:
    torch.backends.cuda.matmul.allow_fp16_accumulation = wanted


def gradient_errors(config: Config) -> dict[str, list[float]]:
    """Return the median and the largest error of a gradient, relative to its norm, for each way."""
    hw = hardware.set_up(config)
    hardware.set_seed(config.seed)
    shape = model_config(config, VOCAB, flash=hw.flash(config), compiled=False)
    model = build_model(shape).to(hw.device)
    x, y = to_batch(torch.randint(VOCAB, (1, config.block_size + 1)), hw.device)
    found = {}
    with moved_weights(model, hw.device, config.seed):
        with float32_matmuls():
            eager_pass(model, [(x, y, 1.0)], contextlib.nullcontext())
        exact = [gradient.cpu() for _, gradient in take_gradients(model)]
        for way, wanted in WAYS.items():
            accumulate_in_float16(wanted)
            eager_pass(model, [(x, y, 1.0)], hw.autocast())
            off = errors(model, exact)
            found[way] = [statistics.median(off), max(off)]
    return found


def train_in_float16(*arguments):
    """Train by train.py's step. The check of compiled code has passed with float32 accumulators."""
    accumulate_in_float16(True)
    return train_step(*arguments)


def main(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--trials", type=parse_count, default=3, help="pairs (default: 3)")
    parser.add_argument("--json", help="write all figures as JSON")
    options, keys = parser.parse_known_args(argv)
    config = replace(load_config(keys), dtype="float16")
    off = gradient_errors(config)
    rows: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(options.trials):
        for way, wanted in WAYS.items():
            command = (Path(__file__), f"--half={wanted}")
            rows[way].append(bench.measure(config, command=command))
    for way, runs in rows.items():
        rate = statistics.median(bench.pace(run) for run in runs)
        median, largest = off[way]
        say(f"{way}: {rate:,.0f} tok/s, gradients off by {median:.2%}, at most {largest:.2%}")
    if options.json:
        result = dict(command=command_line("python", "dev/half_accumulators.py", *argv))
        result |= dict(gradient_errors=off, runs=rows)
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--half="):  # a run that bench.measure() has started
        if sys.argv.pop(1) == "--half=True":
            bench_child.train.train_step = train_in_float16
        bench_child.main()
    else:
        run_main(main)
