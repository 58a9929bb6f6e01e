"""
This model and nanoGPT's in the same training step, in turn: tokens/s and memory.

    python tests/compare_nanogpt.py CONFIG --nanogpt=../nanoGPT [--trials=5] [--json=PATH]

CONFIG stands for config files and --key=value flags, as for train.py. Both sides are train.py, each
time in a new process, with the same weights, batches, dtype, compile setting, optimizer and
allocator settings; nanoGPT's side has nanoGPT's model.py in place of ours. The speed is compared as
bench.py compares rows: on a CPU by CPU time.
"""

import json
import statistics
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # import from the root

import torch
from tqdm import tqdm

import bench
import train
from common.console import Parser, UserError, command_line, parse_count, run_main, say
from configurator import Config, load_config
from reports import bench_child

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("ours", "nanoGPT")
# nats: bfloat16 rounding, and nanoGPT's exact GELU in place of GPT-2's tanh formula
SAME_LOSS = 0.02
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")

# -----------------------------------------------------------------------------
# The process that is measured


class NanoGPT(torch.nn.Module):
    """nanoGPT's model, called as train.py calls ours: it returns the loss alone."""

    def __init__(self, theirs: torch.nn.Module, config):
        super().__init__()
        self.theirs = theirs
        self.config = config  # ours: what train.py logs and counts
        self.loss_chunk = 0

    def forward(self, idx, targets):
        return self.theirs(idx, targets)[1]


def load_nanogpt(folder: str) -> ModuleType:
    loader = SourceFileLoader("nanogpt_model", str(Path(folder, "model.py")))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module


def nanogpts(folder: str, build_ours):
    """build_model() of train.py, for nanoGPT's model with the weights that ours begins with."""
    nano = load_nanogpt(folder)

    def build(config) -> NanoGPT:
        theirs = nano.GPT(nano.GPTConfig(**{name: getattr(config, name) for name in SIZES}))
        theirs.load_state_dict(build_ours(config).state_dict())
        return NanoGPT(theirs, config)

    return build


def run_side(nanogpt: str) -> None:
    """What reports/bench_child.py does; with nanoGPT's model, if a folder is given."""
    if nanogpt:
        train.build_model = nanogpts(nanogpt, train.build_model)
    bench_child.main()


# -----------------------------------------------------------------------------
# The comparison


def take_turns(config: Config, nanogpt: str, trials: int) -> dict[str, list[dict]]:
    """
    What bench.measure() returns, for each side and trial. Raises UserError if the sides do not do
    the same work.
    """
    rows: dict[str, list[dict]] = {side: [] for side in SIDES}
    for trial in tqdm(range(trials), disable=None):
        # the sides take turns in going first
        for side in reversed(SIDES) if trial % 2 else SIDES:
            command = (Path(__file__), f"--side={nanogpt if side == 'nanoGPT' else ''}")
            rows[side].append(bench.measure(config, command=command))
        ours, theirs = (rows[side][-1]["first_loss"] for side in SIDES)
        if abs(ours - theirs) > SAME_LOSS:
            raise UserError(f"nanogpt: other work: first loss {ours:.4f} here, {theirs:.4f} there")
    return rows


def memory_of_imports() -> float:
    """GiB in use before there is a model; 0 on a GPU, where only torch's own memory counts."""
    if torch.cuda.is_available():
        return 0.0
    code = "import resource, reports.bench_child; print(resource.getrusage(0).ru_maxrss / 2**20)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return float(done.stdout)


def main(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--nanogpt", required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--trials", type=parse_count, default=5, help="pairs (default: 5)")
    parser.add_argument("--json", help="write all figures as JSON")
    options, keys = parser.parse_known_args(argv)
    config = load_config(keys)
    nanogpt = str(Path(options.nanogpt).absolute())
    if not Path(nanogpt, "model.py").is_file():
        raise UserError(f"nanogpt: {options.nanogpt} is no clone of karpathy/nanoGPT")
    if not (config.tie_weights and config.model == "gpt2" and config.optimizer == "adamw"):
        raise UserError("tie_weights, model, optimizer: nanoGPT has tied weights, GPT-2 and AdamW")
    rows = take_turns(config, nanogpt, options.trials)
    pairs = zip(rows["ours"], rows["nanoGPT"], strict=True)
    ratios = [bench.pace(ours) / bench.pace(theirs) for ours, theirs in pairs]
    speed, span = statistics.median(ratios), [min(ratios), max(ratios)]
    imports = memory_of_imports()
    memory = {side: max(r["mem_gib"] for r in rows[side]) - imports for side in SIDES}
    machine = rows["ours"][0]["machine"]
    say(bench.machine_text(machine))
    for side in SIDES:
        rate = statistics.median(bench.pace(r) for r in rows[side])
        loss = rows[side][0]["first_loss"]
        say(f"{side:<8} {rate:>9,.0f} tok/s, first loss {loss:.4f}, memory {memory[side]:.2f} GiB")
    say(
        f"ours / nanoGPT: {speed:.3f} x the tokens/s ({span[0]:.3f} to {span[1]:.3f} in "
        f"{options.trials} pairs), {memory['ours'] / memory['nanoGPT']:.3f} x the memory"
    )
    if machine["device_type"] == "cpu":
        say("tokens per second of CPU time, because other programs change the wall time")
    if options.json:
        result = dict(
            command=command_line("python", "tests/compare_nanogpt.py", *argv),
            speed_ratio=speed,
            speed_ratio_range=span,
            seconds_per_iter={side: [r["step_ms"] / 1000 for r in rows[side]] for side in SIDES},
            cpu_seconds_per_iter={side: [r["cpu_ms"] / 1000 for r in rows[side]] for side in SIDES},
            memory_ratio=memory["ours"] / memory["nanoGPT"],
            memory_gib=memory,
            machine=machine,
            tokens_per_iter=config.iter_tokens,
            first_loss={side: rows[side][0]["first_loss"] for side in SIDES},
        )
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--side="):
        run_side(sys.argv.pop(1).removeprefix("--side="))
    else:
        run_main(main)
