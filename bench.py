"""
Measure training on this machine, and plan a run. bench.py measures train.py itself: it starts a run
for a few seconds, on random tokens if the dataset is missing, and reads the run's log.

    python bench.py check            does this machine train correctly?
    python bench.py                  measure GPT-2 124M: speed, MFU, memory
    python bench.py CONFIG           measure a configuration
    python bench.py CONFIG --row=FLAGS --row=FLAGS    a table: each row is CONFIG with its flags
    python bench.py ladder CONFIG    a table: each row switches one more optimisation on
    python bench.py plan CONFIG      estimate a run's hours, memory, energy and cost

CONFIG stands for config files and --key=value flags, as for train.py.

    python bench.py MODE --help      the flags of a mode
    python train.py --help           every configuration key

Examples:

    python bench.py config/gpt124m_4070.py --batch_size=16
    python bench.py config/gpt124m_4070.py --row=--batch_size=8 --row=--batch_size=16
    python bench.py ladder config/gpt124m_4070.py --json=ladder.json
    python bench.py plan config/gpt124m_4070.py --gpu=4070 --watts=200
    python bench.py plan config/fast.py --gpu=4070 --hours=8
"""

import common.environment  # before torch  # noqa: F401  isort: skip
import ctypes
import pickle
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.console import (
    Parser,
    UserError,
    command_line,
    percent,
    run_main,
    say,
    table_lines,
)
from common.files import plain, write_json
from configurator import NANOGPT_BATCH, Config, config_text, load_config, read_config
from data.download import vocab_where_missing
from machine import hardware
from machine.compile_check import eager_float32, try_code
from model import GPTConfig
from model_fast import FastConfig, build_model
from tools import plan
from tools.curves import Run, percentile, read_run

TRAIN = str(Path(__file__).with_name("train.py"))
POLL_SECONDS = 0.2  # how often to read the log
# Log lines to discard: in the first ones, the optimizer and the device allocate their memory.
UNCOUNTED = 2
LEAST_LINES = 3  # counted log lines to wait for; together they must also span --seconds
# Micro-batches per log line: few, so that a measurement is short, but more than one, because the
# run waits for the device at each line. A line covers one to log_interval iterations.
MICRO_BATCHES_PER_LINE = 10
RANDOM_TOKENS = 2**22
# the start record's values that a measurement keeps
OF_THE_MACHINE = ("device", "device_type", "dtype", "peak_tflops", "peak_source", "torch")

# Measured when no config file is given: GPT-2 124M with the settings of nanoGPT's bench.py. On a
# CPU the model sees shorter sequences, so that an idle machine is done in two minutes.
BARE = ["--batch_size=12", "--gradient_accumulation_steps=1"]
BARE_CPU = [
    "--batch_size=1",
    "--block_size=256",
    "--gradient_accumulation_steps=1",
    "--compile=False",
]

UNREACHED = 2**40  # an iteration that no run reaches

# Overrides for a measured run: it trains from random weights until it is killed. Apart from the
# evaluation before its first iteration it neither evaluates nor saves.
OVERRIDES: dict[str, Any] = dict(
    init_from="scratch",
    max_iters=UNREACHED,
    lr_decay_iters=0,
    eval_interval=UNREACHED,
    eval_tokens=1,
    eval_only=False,
    sample_tokens=0,
    checkpoint_interval=UNREACHED,
    tracker="none",
)


# -----------------------------------------------------------------------------
# One measurement


def measure(config: Config, seconds: float) -> dict:
    """
    Measure the speed and memory of a configuration on this machine, from train.py's log.

    Returns a dict of figures, among them the median `step_ms` of the log lines and the highest
    `mem_gib`. The lines span about `seconds`. Raises UserError if train.py ends on its own, for
    example because the micro-batch does not fit.
    """
    run = run_train(config, seconds)
    step_ms = run.step["step_ms"][UNCOUNTED:]
    start = run.start
    batch_size = start["config"]["batch_size"]  # as the device runs it
    machine = {name: start[name] for name in OF_THE_MACHINE}
    machine |= dict(cpu=hardware.cpu_name(), threads=torch.get_num_threads())
    machine |= dict(date=time.strftime("%Y-%m-%d"))
    return dict(
        batch_size=batch_size,
        gradient_accumulation_steps=config.iter_sequences // batch_size,
        step_ms=float(np.median(step_ms)),
        tokens_per_iter=config.tokens_per_iter,
        tokens_per_sec=1000 * config.tokens_per_iter / float(np.median(step_ms)),
        tokens_per_sec_range=[1000 * config.tokens_per_iter / f(step_ms) for f in (max, min)],
        lines=len(step_ms),
        mfu=percentile(run.step["mfu"][UNCOUNTED:], 50),
        mem_gib=percentile(run.step["mem_gib"], 100),
        first_loss=float(run.step["loss"][0]),
        compile_seconds=float(run.step["compile_seconds"][0]),
        parameters=start["parameters"],
        machine=machine,
    )


def run_train(config: Config, seconds: float) -> Run:
    """Run train.py in a child process until its log has enough lines, then kill it."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        # by itself it ends only if this process is killed before it can kill the run
        values = dict(OVERRIDES, out_dir=str(Path(folder, "run")), hours=1 + seconds / 3600)
        size = config.batch_size or NANOGPT_BATCH
        every = max(1, MICRO_BATCHES_PER_LINE * size // config.iter_sequences)
        values["log_interval"] = min(config.log_interval, every)
        if vocab := vocab_where_missing(config):
            values["dataset"] = write_random_tokens(Path(folder, "random"), vocab, config.seed)
        file = Path(folder, "config.py")
        file.write_text(config_text(replace(config, **values)), "utf-8")
        log = Path(folder, "run", "metrics.jsonl")
        # Linux then kills the run: prctl(PR_SET_PDEATHSIG, SIGKILL)
        begin = (lambda: ctypes.CDLL(None).prctl(1, 9)) if sys.platform == "linux" else None
        with open(Path(folder, "errors"), "wb") as errors:
            command = [sys.executable, TRAIN, str(file)]
            files: dict = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
            child = subprocess.Popen(command, **files, preexec_fn=begin)
            try:
                while child.poll() is None and not has_enough(log, seconds):
                    time.sleep(POLL_SECONDS)
                is_measured = child.poll() is None
            finally:
                child.kill()
                child.wait()
        if said := Path(folder, "errors").read_text("utf-8", errors="replace").rstrip():
            say(said, console="stderr")
        if not is_measured:
            raise UserError(f"train.py ended with exit code {child.returncode}; see above")
        return read_run(log)


def has_enough(log: Path, seconds: float) -> bool:
    """Return whether the log has enough lines to measure."""
    if not log.exists():
        return False
    step = read_run(log).step
    # the first line is left out, because no line before it says how many iterations it covers
    line_seconds = np.diff(step["iter"]) * step["step_ms"][1:] / 1000
    counted = line_seconds[UNCOUNTED - 1 :]
    return len(counted) >= LEAST_LINES and sum(counted) >= seconds


def write_random_tokens(folder: Path, vocab: int, seed: int) -> str:
    """Write a dataset of random tokens in nanoGPT's format, and return its folder."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    for split in ("train", "val"):
        tokens = random.integers(0, vocab, RANDOM_TOKENS, dtype=np.uint16)
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=vocab)))
    return str(folder)


# -----------------------------------------------------------------------------
# A table of measurements

# The rows of `bench.py ladder`: plain float32, and then each with the flags of all rows above it
PLAIN = (
    "--dtype=float32 --tf32=False --compile=False --flash=False --loss_chunk=off "
    "--pad_vocab_multiple=1 --tie_weights=False"
)
LADDER = [
    "--tf32=True",
    "--dtype=auto",
    "--compile=True --loss_chunk=auto",
    "--flash=True",
    "--pad_vocab_multiple=128",
    "--tie_weights=True",
]


def measure_rows(keys: list[str], rows: list[tuple[str, str]], seconds: float) -> dict:
    """
    Measure the config of these keys with the flags of each row, a pair of name and flags. Returns
    what --json writes: in each row, `gain` is the speedup over the row above, `total_gain` over the
    first row. A row whose run failed has no figures, and no row's gain refers to it. Prints the
    table, even after Ctrl-C.
    """
    configs = [load_config([*keys, *flags.split()]) for _, flags in rows]
    measured: list[dict] = []
    rates: list[float] = []  # tokens per second in the rows so far that were measured
    if vocab_where_missing(configs[0]):
        say(f"random tokens, because there is no finished dataset {configs[0].dataset}")
    try:
        for config, (name, _) in zip(configs, rows, strict=True):
            wait = ", a minute or two" if config.compile else ""
            say(f"row {len(measured) + 1} of {len(rows)}: {name}{wait}")
            figures: dict = dict(name=name, tokens_per_sec=None)
            try:
                figures |= measure(config, seconds)
            except UserError as error:
                say(str(error), console="stderr")
            else:
                rates.append(figures["tokens_per_sec"])
                above = rates[-2:][0]  # the first row's gain is 1
                figures |= dict(gain=rates[-1] / above, total_gain=rates[-1] / rates[0])
            measured.append(figures)
    finally:
        if rates:
            print_rows(measured)
    if not rates:
        raise UserError("no row could be measured; see above")
    return dict(rows=measured)


def print_rows(rows: list[dict]) -> None:
    table = [["", *"batch iteration tokens/s gain total MFU peak memory compile".split()]]
    sources: set[str] = set()  # of the rows' peaks
    for row in rows:
        if row["tokens_per_sec"] is None:
            table.append([row["name"], "", "failed", *[""] * 7])
            continue
        batch = f"{row['batch_size']} x {row['gradient_accumulation_steps']}"
        speed = [f"{row['step_ms']:,.1f} ms", f"{row['tokens_per_sec']:,.0f}"]
        speed += [f"{row[key]:.2f}x" for key in ("gain", "total_gain")]
        memory = "n/a" if row["mem_gib"] is None else f"{row['mem_gib']:.2f} GiB"
        machine = row["machine"]
        load = [percent(row["mfu"]), f"{machine['peak_tflops']:.3g} in {machine['dtype']}", memory]
        table.append([row["name"], batch, *speed, *load, f"{row['compile_seconds']:.0f} s"])
        of_cpu = f", {machine['threads']} CPU threads" if machine["device_type"] == "cpu" else ""
        device = f"{machine['device']}{of_cpu}, torch {machine['torch']}"
        sources.add(machine["peak_source"])
    say(f"{device}; peaks in TFLOP/s ({', '.join(sorted(sources))})", *table_lines(table))


# -----------------------------------------------------------------------------
# Check: does this machine train correctly?

# Large enough for the GPU kernels of a real run. Biases and head sizes are those in config/,
# because other head sizes run other kernels.
SIZES: dict[str, Any] = dict(n_layer=2, n_embd=768, vocab_size=1024, loss_chunk="1024")
RECIPES = {
    "gpt2": GPTConfig(**SIZES, n_head=12, bias=False),
    "fast": FastConfig(**SIZES, n_head=6, bias=True),
}
BATCH_SIZE = 2  # different sequences, so that a kernel that confuses sequences is noticed


def check(config: Config) -> dict:
    """
    Compare a small model of each recipe with the CPU: uncompiled in float32, in the run's dtype,
    and compiled. Print a line for each, and one of three verdicts. Stop if uncompiled code is
    wrong, because its error may have left the device unusable. Returns what --json writes. Only
    keys about the machine matter, such as device and dtype.
    """
    hw = hardware.set_up(config)
    say(f"checking {hw.name}, {hw.dtype_name}, torch {torch.__version__}: a minute or two")
    say("largest error of a loss or gradient; 100% is what rounding explains:")
    eager = replace(config, compile=False)
    # float32 without TF32 rounds so little that any fault shows
    ways = {"exact float32": replace(eager, dtype="float32", tf32=False), hw.dtype_name: eager}
    # a run on MPS does not compile
    ways |= {"compiled": config} if config.compile and hw.device.type != "mps" else {}
    rows: list[dict] = []
    wrong: list[str] = []
    for recipe, sizes in RECIPES.items():
        if wrong:
            break
        if hw.device.type == "cpu":  # it may be slow
            heads = sizes.n_head // 6
            sizes = replace(sizes, n_embd=128, n_head=heads, block_size=64, loss_chunk="64")
        torch.manual_seed(1)  # check the same weights every time
        # plain attention, because a fused kernel may be wrong
        on_cpu = build_model(replace(sizes, flash=False))
        windows, exact = eager_float32(on_cpu, BATCH_SIZE, sizes.vocab_size)
        for way, way_config in ways.items():
            began = time.perf_counter()
            way_hw = hardware.set_up(way_config)
            model = build_model(replace(sizes, flash=config.flash))
            model.load_state_dict(on_cpu.state_dict())
            model.to(hw.device)
            problem, error = try_code(model, windows, exact, way_hw, way_config.compile)
            rows.append(dict(name=f"{recipe} {way}", problem=problem, error=plain(error)))
            result = problem or f"right, {error:.0%}"
            say(f"  {recipe} {way}: {result}; {time.perf_counter() - began:.1f} s")
            if problem and way != "compiled":
                wrong.append(f"{recipe} {way} fails ({problem})")
                break
    verdict = f"this {'machine' if hw.device.type == 'cpu' else 'GPU'} trains correctly"
    if wrong:
        verdict = f"do not train here because {wrong[0]}"
    elif problems := dict.fromkeys(row["problem"] for row in rows if row["problem"]):
        reasons = "; ".join(problems)
        verdict += f" with --compile=False, because torch.compile does not work here ({reasons})"
    say(verdict)
    return dict(verdict=verdict, wrong=wrong, rows=rows)


# -----------------------------------------------------------------------------
# The command line

MODES = ("check", "", "ladder", "plan")


def parse_arguments(mode: str, argv: list[str]) -> tuple[Namespace, list[str]]:
    """Parse a mode's own flags. Returns them and the remaining arguments for load_config."""
    usage = " ".join(f"python bench.py {mode} [config.py ...] [--key=value ...] [flags]".split())
    parser = Parser(usage=usage, description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    if mode == "plan":
        plan.add_flags(parser)
    elif mode != "check":
        help_text = "seconds to measure after the first two log lines (default: 5)"
        add("--seconds", type=float, default=5.0, metavar="S", help=help_text)
    if not mode:
        help_text = "a table's row: CONFIG with these flags; repeat it; --row= is CONFIG as it is"
        add("--row", action="append", default=[], metavar="FLAGS", help=help_text)
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    mode, *rest = argv if argv and argv[0] in MODES else ["", *argv]
    options, keys = parse_arguments(mode, rest)
    if mode in ("", "ladder") and all(key.startswith("-") for key in keys):
        device = hardware.choose_device(read_config(keys))
        keys = [*(BARE_CPU if device.type == "cpu" else BARE), *keys]
    config = load_config(keys)
    if mode != "plan":  # a plan needs no device, because the run may be for another machine
        hardware.choose_device(config)
    if mode == "check":
        result = check(config)
    elif mode == "plan":
        result = plan.plan(config, options)
    else:
        if mode == "ladder":
            flags = accumulate([PLAIN, *LADDER], "{} {}".format)
            rows = [*zip(["float32", *LADDER], flags, strict=True)]
            if config.model == "fast":
                rows.pop()  # its head is never tied
        else:
            rows = [(flags or "CONFIG", flags) for flags in options.row or [""]]
        result = measure_rows(keys, rows, options.seconds)
    if options.json:
        command = command_line("python", "bench.py", *argv)
        write_json(options.json, dict(command=command) | result)
    return 1 if result.get("wrong") else 0


if __name__ == "__main__":
    run_main(main)
