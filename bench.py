"""
Measure and plan training, with the training step of train.py.

    python bench.py step CONFIG      speed, MFU, memory and compile time of a configuration
    python bench.py ladder CONFIG    what each optimisation is worth on this machine
    python bench.py sweep CONFIG     the fastest micro-batch at the same tokens per iteration
    python bench.py plan CONFIG      hours, memory, energy and cost of a run before it starts
    python bench.py peer CONFIG      this model and nanoGPT's in the same training step, in turn

CONFIG stands for config files and --key=value flags, as for train.py. All modes train for some
seconds, plan only on a machine without a GPU; if the dataset is missing, on random tokens.

    python bench.py MODE --help      the flags of a mode
    python train.py --help           every configuration key

Examples:

    python bench.py step config/gpt124m_4070.py --profile=trace.json
    python bench.py ladder config/gpt124m_4070.py --png=ladder.png
    python bench.py sweep config/gpt124m_4070.py --write=config/mine.py
    python bench.py plan config/gpt124m_4070.py --gpu=4070 --watts=200
    python bench.py plan config/fast124m_4070.py --gpu=4070 --hours=8
    python bench.py peer config/gpt124m_4070.py --nanogpt=../nanoGPT
"""

import common  # before torch  # noqa: F401  isort: skip
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.child import keep_awake
from common.console import (
    Parser,
    RunError,
    UserError,
    did_you_mean,
    parse_count,
    print_err,
    raise_if_any,
    run_main,
    say,
)
from configurator import Config, divisors, load_config, print_config
from data.loader import Batch, Batches, to_batch
from data.shards import Dataset, ShardTokens, check_dataset, open_dataset, vocab_where_missing
from data.tokenizer import GPT2_VOCAB
from model_fast import build_model
from reports import plan
from train import build_optimizer, model_config, train_step
from training import hardware
from training.compiled import compile_model

# a timed window holds as many whole iterations as fill this time
WINDOW_SECONDS = 1.0
RANDOM_TOKENS = 2**22

# -----------------------------------------------------------------------------
# A model in training


class Trainee:
    """
    A model in training, set up as in train.py, with random weights. For the ladder it can train in
    two slower ways: without `read_ahead` each batch is loaded only when it is needed, and with
    `host_sync` the host waits for the device before each micro-step.
    """

    def __init__(
        self, config: Config, read_ahead=True, host_sync=False, nanogpt: Path | None = None
    ):
        """
        `nanogpt`: a checkout of nanoGPT, whose model trains instead of ours, with the system's
        default memory handling, as its users have it. Raises UserError.
        """
        self.config, self.read_ahead = config, read_ahead
        self.hw = hw = hardware.set_up(config, keep_memory=not nanogpt)
        self.memory_before = hw.peak_memory_gib() or 0.0
        torch.manual_seed(config.seed)
        data = real_or_random_data(config)
        self.gpt_config = model_config(
            config, data.vocab, flash=hw.flash(config), compiled=config.compile
        )
        self.model: torch.nn.Module = build_model(self.gpt_config).to(hw.device)
        if host_sync:
            self.model.register_forward_pre_hook(lambda *_: hw.synchronize())
        if config.compile:
            compile_model(self.model)
        self.optimizer = build_optimizer(self.model, config, hw.dtype)
        self.scaler = torch.amp.GradScaler(hw.device.type, enabled=hw.dtype == torch.float16)
        self.batches = Batches(data, config, hw.device)
        self.loaded = 0  # sequences, without read_ahead
        if not read_ahead:
            self.batches.close()  # ends the thread that reads
        if nanogpt:
            use_nanogpt(self, nanogpt)

    def step(self) -> Tensor:
        """One iteration. Returns its mean loss, nats per token."""
        loss_sum, _ = train_step(
            self.model,
            self.optimizer,
            self.scaler,
            self.micro_batches(),
            self.config.grad_clip,
            self.hw.autocast(),
        )
        return loss_sum / self.config.gradient_accumulation_steps

    def micro_batches(self) -> list[Batch]:
        accum = self.config.gradient_accumulation_steps
        if self.read_ahead:
            return self.batches.take(accum)
        first, self.loaded = self.loaded, self.loaded + self.config.iter_sequences
        starts = range(first, self.loaded, self.config.batch_size)
        return [to_batch(self.batches.load(start), self.hw.device) for start in starts]

    def timed(self, iters: int) -> float:
        """Seconds per iteration over a window of `iters`."""
        self.hw.synchronize()
        began = time.perf_counter()
        for _ in range(iters):
            self.step()
        self.hw.synchronize()
        return (time.perf_counter() - began) / iters

    def memory_gib(self) -> float | None:
        """The most memory that training has added to the process, GiB; None where unknown."""
        peak = self.hw.peak_memory_gib()
        return None if peak is None else peak - self.memory_before


class RandomTokens(ShardTokens):
    """Random tokens in memory, read like a dataset's."""

    def __init__(self, vocab: int, seed: int):
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, vocab, RANDOM_TOKENS, dtype=np.uint16)

    def __len__(self) -> int:
        return len(self.tokens)

    def read_windows(self, positions: list[int], length: int) -> np.ndarray:
        windows = [self.tokens[position : position + length] for position in positions]
        return np.stack(windows).astype(np.int64)


def real_or_random_data(config: Config) -> Dataset:
    """
    The config's dataset, or random tokens if there is none. Raises UserError if the dataset does
    not suit the config.
    """
    vocab = vocab_where_missing(config)
    if vocab is None:
        raise_if_any(check_dataset(config))
        return open_dataset(config.dataset)
    tokens = RandomTokens(vocab, config.seed)
    return Dataset("random tokens", tokens, tokens, vocab, dict(kind="unknown"), "random")


# -----------------------------------------------------------------------------
# The measurement


def measure(trainee: Trainee, trials: int) -> dict:
    """Train for a few seconds: compile first, then time `trials` windows."""
    config, hw = trainee.config, trainee.hw
    began = time.perf_counter()
    first_loss = trainee.step().item()
    first = time.perf_counter() - began
    iters = math.ceil(WINDOW_SECONDS / trainee.timed(1))
    windows = [trainee.timed(iters) for _ in range(trials)]
    seconds = statistics.median(windows)
    rate = config.iter_tokens / seconds
    flops = hardware.count_flops(trainee.gpt_config)
    return batch_keys(config, config.batch_size) | dict(
        step_ms=1000 * seconds,
        tokens_per_iter=config.iter_tokens,
        tokens_per_sec=rate,
        tokens_per_sec_range=[config.iter_tokens / max(windows), config.iter_tokens / min(windows)],
        mfu=hw.mfu(flops, rate),
        mem_gib=hw.peak_memory_gib(),
        mem_training_gib=trainee.memory_gib(),
        first_loss=first_loss,
        compile_seconds=max(first - seconds, 0.0) if config.compile else 0.0,
        machine=machine(hw),
    )


def machine(hw: hardware.Hardware) -> dict:
    """What the figures were measured on, for the JSON."""
    return dict(
        device=hw.name,
        dtype=hw.dtype_name,
        peak_tflops=hw.peak_tflops,
        cpu=hardware.cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
    )


def measure_apart(config: Config, trials: int, **how) -> dict:
    """
    measure() in a new process, so that no memory and no compiled code is left over from the
    previous measurement. `how`: the trainee's read_ahead, host_sync and nanogpt. If memory runs
    out, the result holds only the micro-batch, and None as its tokens_per_sec.
    """
    try:
        with new_process() as pool:
            return pool.submit(build_and_measure, config, trials, **how).result()
    except Exception as error:
        # a pool breaks when the system kills its process, most likely for its memory
        if not (isinstance(error, BrokenProcessPool) or hardware.is_out_of_memory(error)):
            raise
        return batch_keys(config, config.batch_size) | dict(tokens_per_sec=None)


def build_and_measure(config: Config, trials: int, **how) -> dict:
    # here too, because torch's errors can be lost between processes
    with readable_errors(config):
        return measure(Trainee(config, **how), trials)


def end_with_the_bench() -> None:
    """Have this process end when its parent does, even if that is killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a child has one
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def new_process() -> ProcessPoolExecutor:
    """
    One process, which ends when this one does, however it ends. Spawned, because CUDA does not
    survive a fork.
    """
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_the_bench)


@contextlib.contextmanager
def readable_errors(config: Config) -> Iterator[None]:
    """A RunError of one line when memory runs out or torch.compile does not work here."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if hardware.is_out_of_memory(error):
            raise RunError(hardware.out_of_memory_line(config)) from None
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            reason = str(error).strip().partition("\n")[0]
            line = f"torch.compile does not work here ({reason}); --compile=False"
            raise RunError(line) from None
        raise


def batch_keys(config: Config, batch_size: int) -> dict:
    """The same tokens per iteration in micro-batches of this size, as keys of the configuration."""
    accumulation = config.iter_sequences // batch_size
    return dict(batch_size=batch_size, gradient_accumulation_steps=accumulation)


# -----------------------------------------------------------------------------
# For people


def speed_text(r: dict) -> str:
    if r["tokens_per_sec"] is None:
        return "out of memory"
    speed = f"{r['step_ms']:.1f} ms/iteration, {r['tokens_per_sec']:,.0f} tok/s"
    return f"{speed}, mfu {percent(r['mfu'])}, mem {known(r['mem_gib'], 1)} GiB"


def known(number: float | None, digits: int) -> str:
    return f"{number:.{digits}f}" if number else "n/a"


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{fraction:.1%}"


def draw(path: str, title: str, rows: list[dict]) -> None:
    """
    Horizontal bars of tokens/s, one per row, the first on top, with the range of the windows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.4), layout="constrained")
    label = "tokens per second: median, and from the slowest window to the fastest"
    axes = figure.add_subplot(title=title, xlabel=label)
    rates = np.array([row["tokens_per_sec"] or 0 for row in rows])
    # a row that ran out of memory has no bar
    low, high = np.transpose([row.get("tokens_per_sec_range", (0, 0)) for row in rows])
    names = [row["name"] for row in rows]
    bars = axes.barh(names, rates, xerr=(rates - low, high - rates), capsize=3)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    figure.savefig(path, dpi=110)


# -----------------------------------------------------------------------------
# step


def step(config: Config, options: Namespace) -> dict:
    trials = options.trials or 5
    say("compiling and warming up, about a minute" if config.compile else "warming up")
    with readable_errors(config):
        trainee = Trainee(config)
        r = measure(trainee, trials)
        if options.profile:
            profile_step(trainee, options.profile)
    m = r["machine"]
    cpu = "" if m["cpu"] == m["device"] else f" ({m['cpu']})"
    say(f"machine  {m['device']}{cpu}, {m['dtype']}, torch {m['torch']}")
    say(f"step     {speed_text(r)}")
    slowest, fastest = r["tokens_per_sec_range"]
    say(f"         median of {trials} windows, {slowest:,.0f} to {fastest:,.0f} tok/s")
    say(f"compile  {r['compile_seconds']:.1f} s")
    return r


def profile_step(trainee: Trainee, trace: str) -> None:
    """Print what takes most of an iteration, and write a trace for chrome://tracing."""
    with torch.profiler.profile() as profiler:
        trainee.timed(1)
    profiler.export_chrome_trace(trace)
    on_gpu = trainee.hw.device.type == "cuda"
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    say(*profiler.key_averages().table(sort_by=order, row_limit=20).splitlines())


# -----------------------------------------------------------------------------
# sweep


def sweep(config: Config, options: Namespace) -> dict:
    sizes = sweep_sizes(config)
    if options.write and Path(options.write).exists():
        raise UserError(f"write: {options.write} exists; remove it or choose another name")
    rows = []
    for size in tqdm(sizes, desc="micro-batches", disable=None):
        resized = replace(config, **batch_keys(config, size))
        rows.append(measure_apart(resized, options.trials or 3))
    measured = [row for row in rows if row["tokens_per_sec"]]
    if not measured:
        listed = ", ".join(map(str, sizes))
        raise UserError(f"batch_size: {listed} all ran out of memory; try a smaller one")
    best = max(measured, key=lambda row: row["tokens_per_sec"])
    m = best["machine"]
    say(f"{config.iter_tokens:,} tokens per iteration on {m['device']}, {m['dtype']}")
    for row in rows:
        row["name"] = f"{row['batch_size']} x {row['gradient_accumulation_steps']}"
        mark = "  <- fastest" if row is best else ""
        say(f"{row['name']:>10}  {speed_text(row)}{mark}")
    if options.write:
        write_config(Path(options.write), config, best)
    if options.png:
        draw(options.png, "micro-batch x accumulation", rows)
    return dict(rows=rows, fastest=best["batch_size"])


def sweep_sizes(config: Config) -> list[int]:
    """A quarter to four times batch_size, if they divide the sequences of an iteration."""
    b = config.batch_size
    return [n for n in divisors(config.iter_sequences) if n in (b / 4, b / 2, b, 2 * b, 4 * b)]


def write_config(path: Path, config: Config, best: dict) -> None:
    """The configuration with the fastest micro-batch, as a config file for train.py."""
    # a new out_dir, because the measured config may have a run in its out_dir
    fastest = batch_keys(config, best["batch_size"]) | dict(out_dir=f"out/{path.stem}")
    m = best["machine"]
    measured = f"# The fastest micro-batch of a sweep: {speed_text(best)}\n"
    where = f"# {m['device']}, {m['dtype']}, torch {m['torch']}, {m['date']}\n\n"
    path.write_text(measured + where + print_config(replace(config, **fastest)), "utf-8")
    say(f"wrote {path}")


# -----------------------------------------------------------------------------
# ladder

# the first row of the ladder: everything off
LOWEST = dict(dtype="float32", tf32=False, compile=False, flash=False)
LOWEST |= dict(loss_chunk="off", pad_vocab_multiple=1, tie_weights=False)


def ladder(config: Config, options: Namespace) -> dict:
    """
    Measure and print a table in which each row adds one optimisation to those above it. `gain` is
    over the previous row, `total_gain` over the first.
    """
    device = hardware.set_up(config).device
    title = f"micro-batch {config.batch_size}"
    say(title)
    say(f"{'':<18}{'batch':>6} {'tok/s':>9} {'gain':>6} {'total':>6} {'GiB':>6} {'mfu':>6}")
    how: dict = {}
    rows, rates = [], []
    for name, changes, more_how in ladder_rows(device, config):
        config, how = replace(config, **changes), how | more_how
        row = dict(name=name) | measure_apart(config, options.trials or 3, **how)
        rows.append(row)
        rate = row["tokens_per_sec"]
        if rate is None:
            say(f"{name:<18}{row['batch_size']:>6} out of memory")
            continue
        rates.append(rate)
        row["gain"], row["total_gain"] = rate / rates[max(0, len(rates) - 2)], rate / rates[0]
        gains = f"{row['gain']:>5.2f}x {row['total_gain']:>5.2f}x"
        load = f"{known(row['mem_gib'], 1):>6} {percent(row['mfu']):>6}"
        say(f"{name:<18}{row['batch_size']:>6} {rate:>9,.0f} {gains} {load}")
    say("each row runs in a new process; mfu is relative to the peak of the row's dtype")
    if options.png:
        draw(options.png, title, rows)
    return dict(rows=rows)


def ladder_rows(device: torch.device, config: Config) -> list[tuple]:
    """
    The rows that this machine and this model can have: name, the config keys that the row changes,
    and the changed options of Trainee. The changes stay for the rows below.
    """
    amp = dict(dtype="auto" if config.dtype == "float32" else config.dtype)
    rows = [
        ("float32", LOWEST, dict(host_sync=True, read_ahead=False)),
        ("TF32", dict(tf32=True), {}),
        ("no host sync", {}, dict(host_sync=False)),
        ("AMP", amp, {}),
        ("compile", dict(compile=True), {}),
        ("flash attention", dict(flash=True), {}),
        ("padded vocabulary", dict(pad_vocab_multiple=128), {}),
        ("tied weights", dict(tie_weights=True), {}),
        ("loader thread", {}, dict(read_ahead=True)),
    ]
    left_out = set()
    if config.model == "fast":  # it has a head of its own
        left_out.add("tied weights")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        left_out.add("TF32")  # needs a GPU of the Ampere generation or later
    return [row for row in rows if row[0] not in left_out]


# -----------------------------------------------------------------------------
# plan


def plan_here(config: Config, options: Namespace) -> dict:
    return plan.plan(config, options, lambda config: measure_apart(config, trials=1))


# -----------------------------------------------------------------------------
# peer

SIDES = ("ours", "nanoGPT")
# nats: bfloat16 rounding, and nanoGPT's exact GELU in place of GPT-2's tanh formula
SAME_LOSS = 0.02
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")


def peer(config: Config, options: Namespace) -> dict:
    """
    This model and nanoGPT's alternately, each time in a new process, through the same train_step:
    same weights, batches, dtype, compile setting and fused AdamW. Raises UserError if the work is
    not the same.
    """
    if not options.nanogpt or not (Path(options.nanogpt) / "model.py").is_file():
        raise UserError(f"nanogpt: {options.nanogpt}; --nanogpt= needs a clone of karpathy/nanoGPT")
    if not (config.tie_weights and config.model == "gpt2" and config.optimizer == "adamw"):
        theirs = "nanoGPT has tied weights, GPT-2 and AdamW; with others the work is not the same"
        raise UserError(f"tie_weights, model, optimizer: {theirs}")
    rows = take_turns(config, Path(options.nanogpt), options.trials or 5)
    losses = {side: rows[side][0]["first_loss"] for side in SIDES}
    seconds = {side: [row["step_ms"] / 1000 for row in rows[side]] for side in SIDES}
    memory = {side: max(row["mem_training_gib"] or 0 for row in rows[side]) for side in SIDES}
    pairs = zip(seconds["ours"], seconds["nanoGPT"], strict=True)
    ratios = [theirs / ours for ours, theirs in pairs]
    speed, low, high = statistics.median(ratios), min(ratios), max(ratios)
    for side in SIDES:
        rate = config.iter_tokens / statistics.median(seconds[side])
        gib = f"{known(memory[side], 2)} GiB"
        say(f"{side:<8} {rate:>9,.0f} tok/s, first loss {losses[side]:.4f}, memory {gib}")
    m = rows["ours"][0]["machine"]
    span = f"(median of {len(ratios)} pairs in turn, {low:.3f} to {high:.3f})"
    memory_ratio = memory["ours"] / memory["nanoGPT"] if memory["ours"] else None
    of_memory = f"{known(memory_ratio, 3)} x the memory, both in {m['dtype']}"
    say(f"ours / nanoGPT: {speed:.3f} x the tokens/s {span}, {of_memory}")
    if config.device == "cpu" and m["dtype"] != "float32":
        say("nanoGPT's own train.py computes in float32 on a CPU: compare with --dtype=float32 too")
    return dict(
        speed_ratio=speed,
        speed_ratio_range=[low, high],
        seconds_per_iter=seconds,
        memory_ratio=memory_ratio,
        memory_gib=memory,
        machine=m,
        tokens_per_iter=config.iter_tokens,
        first_loss=losses,
    )


def take_turns(config: Config, nanogpt: Path, trials: int) -> dict[str, list[dict]]:
    """
    What measure() returns, for each side and trial. Raises UserError if the sides do not do the
    same work, RunError if one does not fit into memory.
    """
    rows: dict[str, list[dict]] = {side: [] for side in SIDES}
    for trial in tqdm(range(trials), desc="peer", disable=None):
        # the sides take turns in going first
        for side in reversed(SIDES) if trial % 2 else SIDES:
            row = measure_apart(config, 3, nanogpt=nanogpt if side == "nanoGPT" else None)
            if row["tokens_per_sec"] is None:
                raise RunError(f"{side}: {hardware.out_of_memory_line(config)}")
            rows[side].append(row)
        ours, theirs = (rows[side][-1]["first_loss"] for side in SIDES)
        if abs(ours - theirs) > SAME_LOSS:
            raise UserError(f"nanogpt: other work: first loss {ours:.4f} here, {theirs:.4f} there")
    return rows


class LossOnly(torch.nn.Module):
    """nanoGPT's model returns (logits, loss); train_step needs the loss alone."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y)[1]


def use_nanogpt(side: Trainee, folder: Path) -> None:
    """Replace our model by nanoGPT's, with our weights."""
    c = side.config
    betas = (c.beta1, c.beta2)
    loader = SourceFileLoader("nanogpt_model", str(folder / "model.py"))
    theirs = ModuleType(loader.name)
    loader.exec_module(theirs)
    sizes = {name: getattr(side.model.config, name) for name in SIZES}
    model = theirs.GPT(theirs.GPTConfig(**sizes)).to(side.hw.device)
    model.load_state_dict(side.model.state_dict())
    settings = (c.weight_decay, c.learning_rate, betas, side.hw.device.type)
    their_groups = model.configure_optimizers(*settings).param_groups
    # its groups in a fused AdamW, as ours; nanoGPT fuses the update on CUDA only
    groups = [dict(params=g["params"], weight_decay=g["weight_decay"]) for g in their_groups]
    side.optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=betas, fused=True)
    side.model = LossOnly(torch.compile(model) if c.compile else model)


# -----------------------------------------------------------------------------
# The command line

# name: (type, what --help shows for the value, meaning)
FLAGS: dict[str, tuple] = {
    "trials": (parse_count, "N", "timed windows; the median counts (step and peer 5, others 3)"),
    "profile": (str, "TRACE.json", "list what takes most time, write a trace for chrome://tracing"),
    "png": (str, "PATH", "draw the result"),
    "write": (str, "CONFIG.py", "write the fastest micro-batch as a config file"),
    "nanogpt": (str, "FOLDER", "a checkout of karpathy/nanoGPT"),
    "json": (str, "PATH", "write all figures as JSON"),
}
# name: its function, and its flags beside json
MODES = {
    "step": (step, ["trials", "profile"]),
    "ladder": (ladder, ["trials", "png"]),
    "sweep": (sweep, ["trials", "write", "png"]),
    "plan": (plan_here, []),
    "peer": (peer, ["nanogpt", "trials"]),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    keep_awake()
    mode = argv[0]
    if mode not in MODES:
        hint = did_you_mean(mode, MODES)
        raise UserError(f"{mode}: no such mode; one of {', '.join(MODES)}{hint}")
    run_mode, flags = MODES[mode]
    epilog = "Configuration keys: python train.py --help; plan uses its --hours and --until"
    usage = f"python bench.py {mode} [config.py ...] [--key=value ...] [flags]"
    parser = Parser(usage=usage, epilog=epilog)
    for name in [*flags, "json"]:
        kind, metavar, meaning = FLAGS[name]
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=meaning)
    if mode == "plan":
        plan.add_flags(parser)
    # configuration flags are left over for load_config
    options, config_arguments = parser.parse_known_args(argv[1:])
    # plan may be for another machine: it needs no device
    checks = [] if mode == "plan" else [hardware.check_device]
    config = load_config(config_arguments, checks)
    for name in ("json", "png", "write", "profile"):  # files to write
        if path := getattr(options, name, None):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if vocab_where_missing(config) == GPT2_VOCAB and not config.stream:
        print_err(f"vocabulary {GPT2_VOCAB:,}, GPT-2's, as dataset {config.dataset} is missing")
    result = run_mode(config, options)
    if options.json:
        result = dict(command=f"python bench.py {' '.join(argv)}") | result
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
