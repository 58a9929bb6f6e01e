"""
Measure and plan training, with the very step that train.py runs.

    python bench.py step config/gpt124m_4070.py                            speed, MFU, memory, where an iteration's time goes
    python bench.py ladder config/gpt124m_4070.py --png=ladder.png         what each optimisation is worth on this machine
    python bench.py sweep config/gpt124m_4070.py --write=config/mine.py    the fastest micro-batch at the same tokens/iteration
    python bench.py plan config/gpt124m_4070.py --gpu=4070 --watts=200     hours, memory, energy and cost before a run
    python bench.py peer config/gpt124m_4070.py --nanogpt=../nanoGPT       the same work in a checkout of nanoGPT

Every mode takes config files and --key=value flags as train.py does; all but plan read random
tokens where there is no dataset. Their own flags, beside --json=PATH:

    step    --trials=5  --profile=TRACE.json (top kernels, and a trace for chrome://tracing)
    ladder  --trials=3  --png=PATH
    sweep   --trials=3  --png=PATH  --write=CONFIG.py  --batch_sizes=4,8,16 (default: a quarter to four times batch_size)
    plan    --gpu=NAME|all  --gpus=N  --iter_seconds=S | --from_run=out/x  --dataset_tokens=10B  --watts=W  --price_kwh=P
    peer    --trials=5  --nanogpt=FOLDER  --as_shipped=eager|compiled (nanoGPT in float32, as it trains on a CPU)
"""

import contextlib
import json
import math
from argparse import ArgumentTypeError
from pathlib import Path

from benchmarks import modes, peer, plan
from common.console import Parser, UserError, did_you_mean, parse_count, run_main
from configurator import load_config
from training import hardware

# -----------------------------------------------------------------------------
# The command line


def above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"needs a number above 0, got {text!r}")


NUMBERS = dict.fromkeys(("trials", "gpus", "dataset_tokens"), parse_count)
NUMBERS |= dict.fromkeys(("iter_seconds", "watts", "price_kwh"), above_zero)
MODES = {
    "step": (modes.step, ("trials", "profile")),
    "ladder": (modes.ladder, ("trials", "png")),
    "sweep": (modes.sweep, ("trials", "png", "write", "batch_sizes")),
    "peer": (peer.main, ("trials", "nanogpt", "as_shipped")),
    "plan": (
        plan.main,
        ("gpu", "gpus", "iter_seconds", "from_run", "dataset_tokens", "watts", "price_kwh"),
    ),
}


def read_flags(mode: str, argv: list[str]) -> tuple[dict, list[str]]:
    """
    (the mode's own flags, None where not given; what is left for load_config). Raises UserError.
    """
    parser = Parser(add_help=False)
    for name in (*MODES[mode][1], "json"):
        parser.add_argument(f"--{name}", type=NUMBERS.get(name, str))
    known, rest = parser.parse_known_args(argv)
    return vars(known), rest


def make_folder(name: str, path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{name}: {path} is a folder; give a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name}: {path}: {error.strerror}; choose another path") from None


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    mode, checks = argv[0], () if argv[0] == "plan" else (hardware.check_device,)
    if mode not in MODES:
        raise UserError(
            f"{mode}: no such mode; one of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    options, rest = read_flags(mode, argv[1:])
    config = load_config(rest, checks)
    for name in {
        "json",
        "png",
        "write",
        "profile",
    } & options.keys():  # before a measurement, not after it
        if options[name]:
            make_folder(name, Path(options[name]))
    result = MODES[mode][0](config, options)
    if options["json"]:
        result = dict(command=f"python bench.py {' '.join(argv)}") | result
        Path(options["json"]).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
