"""
Measure and plan training, with the very step that train.py runs.

    python bench.py step CONFIG      speed, MFU, memory and compile time of a configuration
    python bench.py ladder CONFIG    what each optimisation is worth on this machine
    python bench.py sweep CONFIG     the fastest micro-batch at the same tokens per iteration
    python bench.py plan CONFIG      hours, memory, energy and cost of a run before it starts
    python bench.py peer CONFIG      the same work in a checkout of nanoGPT, in turn

CONFIG stands for config files and --key=value flags, as train.py takes them. All modes but plan
train for some seconds, on random tokens where the dataset is missing.

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

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from common.console import Parser, UserError, complain, did_you_mean, parse_count, run_main
from configurator import Config, load_config
from data.shards import vocab_where_missing
from data.tokenizer import GPT2_VOCAB

# name: (type, what --help shows for the value, meaning)
FLAGS = {
    "trials": (parse_count, "N", "timed windows; the median counts (step and peer 5, others 3)"),
    "profile": (str, "TRACE.json", "list what takes most time, write a trace for chrome://tracing"),
    "png": (str, "PATH", "draw the result"),
    "write": (str, "CONFIG.py", "write the fastest micro-batch as a config file"),
    "nanogpt": (str, "FOLDER", "a checkout of karpathy/nanoGPT"),
    "gpu": (str, "NAME", "a card of training/gpus.csv such as 4070, or all; else this machine's"),
    "gpus": (parse_count, "N", "how many of them share the work; 1 if not given"),
    "iter_seconds": (float, "S", "seconds that an iteration takes on one GPU"),
    "from_run": (str, "OUT_DIR", "the same, from the log of a run"),
    "dataset_tokens": (parse_count, "N", "such as 10B, for the epochs; else the dataset's own"),
    "watts": (float, "W", "draw of one GPU, for the energy"),
    "price_kwh": (float, "P", "price of a kWh, for the cost"),
    "json": (str, "PATH", "write all figures as JSON"),
}
# name: its flags beside json
MODES = {
    "step": ["trials", "profile"],
    "ladder": ["trials", "png"],
    "sweep": ["trials", "write", "png"],
    "plan": ["gpu", "gpus", "iter_seconds", "from_run", "dataset_tokens", "watts", "price_kwh"],
    "peer": ["nanogpt", "trials"],
}


def find_mode(mode: str) -> tuple[Callable[[Config, Namespace], dict], tuple[Callable, ...]]:
    """The function of a mode, and how it checks the configuration."""
    if mode == "plan":  # arithmetic, perhaps for another machine: needs no device
        from benchmarks import plan

        return plan.main, ()
    from benchmarks import modes, peer
    from training.hardware import check_device

    functions = dict(step=modes.step, ladder=modes.ladder, sweep=modes.sweep, peer=peer.main)
    return functions[mode], (check_device,)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    mode = argv[0]
    if mode not in MODES:
        hint = did_you_mean(mode, MODES)
        raise UserError(f"{mode}: no such mode; one of {', '.join(MODES)}{hint}")
    epilog = "Configuration keys: python train.py --help; plan heeds its --hours and --until"
    usage = f"python bench.py {mode} [config.py ...] [--key=value ...] [flags]"
    parser = Parser(usage=usage, epilog=epilog)
    for name in [*MODES[mode], "json"]:
        kind, metavar, meaning = FLAGS[name]
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=meaning)
    # configuration flags are left over for load_config
    options, config_arguments = parser.parse_known_args(argv[1:])
    run_mode, checks = find_mode(mode)
    config = load_config(config_arguments, checks)
    for name in ("json", "png", "write", "profile"):  # what is written
        if path := getattr(options, name, None):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if vocab_where_missing(config) == GPT2_VOCAB and not config.stream:
        complain(f"vocabulary {GPT2_VOCAB:,}, GPT-2's, as dataset {config.dataset} is missing")
    result = run_mode(config, options)
    if options.json:
        result = dict(command=f"python bench.py {' '.join(argv)}") | result
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
