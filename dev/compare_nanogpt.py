"""
Compare this model's tokens/s and memory with nanoGPT's. The two take turns, and train.train_step
trains both. On a CPU, nanoGPT is measured twice: with our allocator settings and with the system's,
because nanoGPT itself sets none.

    python dev/compare_nanogpt.py CONFIG --nanogpt=../nanoGPT [--trials=5] [--json=PATH]

CONFIG stands for config files and --key=value flags, as for train.py. Every side runs train.py in a
new process, with the same weights, batches, dtype, compile setting and optimizer; nanoGPT's sides
use nanoGPT's model.py. The threads of all sides wait alike, as common/environment.py decides.
Speeds are compared as in bench.py: on a CPU by CPU time.
"""

import json
import re
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
from common.console import Parser, UserError, command_line, parse_count, run_main, say
from configurator import Config, load_config
from model_fast import build_model
from reports import bench_child
from training import hardware

ROOT = Path(__file__).resolve().parent.parent
OURS, THEIRS, AS_SHIPPED = "ours", "nanoGPT", "nanoGPT as shipped"
# in nats; allows for bfloat16 rounding, and for nanoGPT's exact GELU where GPT-2 has the tanh one
SAME_LOSS = 0.02
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")

# -----------------------------------------------------------------------------
# The process that is measured


class NanoGPT(torch.nn.Module):
    """nanoGPT's model, called as train.py calls ours: it returns the loss alone."""

    def __init__(self, theirs: torch.nn.Module, config):
        super().__init__()
        self.theirs = theirs
        self.config = config  # our config, which train.py logs and counts FLOPs from

    def forward(self, idx, targets):
        return self.theirs(idx, targets)[1]


def load_nanogpt(folder: str) -> ModuleType:
    loader = SourceFileLoader("nanogpt_model", str(Path(folder, "model.py")))
    module = ModuleType(loader.name)
    sys.modules[loader.name] = module  # torch.compile looks up the module's globals here
    loader.exec_module(module)
    return module


def nanogpts(folder: str, build_ours):
    """Return a build_model() that builds nanoGPT's model with the initial weights of ours."""
    nano = load_nanogpt(folder)

    def build(config) -> NanoGPT:
        theirs = nano.GPT(nano.GPTConfig(**{name: getattr(config, name) for name in SIZES}))
        theirs.load_state_dict(build_ours(config).state_dict())
        return NanoGPT(theirs, config)

    return build


def run_side(side: str, nanogpt: str) -> None:
    """Run reports/bench_child.py, with nanoGPT's model on nanoGPT's sides."""
    if side == AS_SHIPPED:
        hardware.keep_freed_memory = lambda: None
    if side != OURS:
        bench_child.train.build_model = nanogpts(nanogpt, build_model)
    bench_child.main()


# -----------------------------------------------------------------------------
# The comparison


def take_turns(config: Config, nanogpt: str, trials: int) -> dict[str, list[dict]]:
    """
    Measure the sides in turn. Returns the results of bench.measure() for each side, one per trial.
    Raises UserError if the sides do not do the same work.
    """
    sides = [OURS, THEIRS] + ([] if torch.cuda.is_available() else [AS_SHIPPED])
    rows: dict[str, list[dict]] = {side: [] for side in sides}
    for trial in tqdm(range(trials), disable=None):
        # alternate which side goes first
        for side in reversed(sides) if trial % 2 else sides:
            command = (Path(__file__), f"--side={side}", nanogpt)
            rows[side].append(bench.measure(config, command=command))
        losses = [rows[side][-1]["first_loss"] for side in sides]
        if max(losses) - min(losses) > SAME_LOSS:
            raise UserError(f"nanogpt: the sides differ: first losses {losses} of {sides}")
    return rows


def memory_of_imports() -> float:
    """Return the GiB used before there is a model; 0 on a GPU, where only torch's memory counts."""
    if torch.cuda.is_available():
        return 0.0
    # read /proc, because resource.getrusage() of a child process includes its parent's memory
    code = "import reports.bench_child; print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return int(re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)[0]) / 2**20


def main(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--nanogpt", required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--trials", type=parse_count, default=5, help="pairs (default: 5)")
    parser.add_argument("--json", help="write all figures as JSON")
    options, keys = parser.parse_known_args(argv)
    config = load_config(keys)
    nanogpt = str(Path(options.nanogpt).absolute())
    if not Path(nanogpt, "model.py").is_file():
        raise UserError(f"nanogpt: {options.nanogpt} is not a clone of karpathy/nanoGPT")
    if not (config.tie_weights and config.model == "gpt2" and config.optimizer == "adamw"):
        raise UserError("tie_weights, model, optimizer: nanoGPT has tied weights, GPT-2 and AdamW")
    rows = take_turns(config, nanogpt, options.trials)
    imports = memory_of_imports()
    memory = {side: max(r["mem_gib"] for r in found) - imports for side, found in rows.items()}
    machine = rows[OURS][0]["machine"]
    say(bench.machine_text(machine))
    for side, found in rows.items():
        rate = statistics.median(bench.pace(r) for r in found)
        loss = found[0]["first_loss"]
        say(f"{side:<18} {rate:>9,.0f} tok/s, first loss {loss:.4f}, memory {memory[side]:.2f} GiB")
    speeds = {}
    for side in [*rows][1:]:
        pairs = zip(rows[OURS], rows[side], strict=True)
        ratios = [bench.pace(ours) / bench.pace(theirs) for ours, theirs in pairs]
        speeds[side] = [statistics.median(ratios), min(ratios), max(ratios)]
        median, low, high = speeds[side]
        say(
            f"ours / {side}: {median:.3f} x the tokens/s ({low:.3f} to {high:.3f} in "
            f"{options.trials} pairs), {memory[OURS] / memory[side]:.3f} x the memory"
        )
    if machine["device_type"] == "cpu":
        say("tokens per second of CPU time, because other programs change the wall-clock time")
    if options.json:
        result = dict(
            command=command_line("python", "dev/compare_nanogpt.py", *argv),
            speed_ratio={side: speed[0] for side, speed in speeds.items()},
            speed_ratio_range={side: speed[1:] for side, speed in speeds.items()},
            seconds_per_iter={s: [r["step_ms"] / 1000 for r in rows[s]] for s in rows},
            cpu_seconds_per_iter={s: [r["cpu_ms"] / 1000 for r in rows[s]] for s in rows},
            memory_ratio={side: memory[OURS] / memory[side] for side in speeds},
            memory_gib=memory,
            machine=machine,
            tokens_per_iter=config.iter_tokens,
            first_loss={side: found[0]["first_loss"] for side, found in rows.items()},
        )
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--side="):
        run_side(sys.argv.pop(1).removeprefix("--side="), sys.argv.pop(1))
    else:
        run_main(main)
