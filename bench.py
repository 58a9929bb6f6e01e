"""
Measure and plan training, with the very step that train.py runs.

    python bench.py plan config/gpt124m_4070.py --gpu=4070 --watts=200    hours, memory, energy before a run

Every mode takes config files and --key=value flags as train.py does, and writes what it prints with --json=PATH.
"""

import argparse
import json
import math
from pathlib import Path

import hardware
import plan
from configurator import UserError, did_you_mean, load_config, run_main

# -----------------------------------------------------------------------------
# The command line

NUMBERS = {"trials", "gpus", "iter_seconds", "dataset_tokens", "watts", "price_kwh"}
MODES = {
    "plan": (plan.main, ("gpu", "gpus", "iter_seconds", "from_run", "dataset_tokens", "watts", "price_kwh")),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def read_flags(mode: str, argv: list[str]) -> tuple[dict, list[str]]:
    """(the mode's own flags, None where not given; what is left for load_config). Raises UserError."""
    parser = Parser(prog=f"bench.py {mode}", allow_abbrev=False, add_help=False)
    for name in (*MODES[mode][1], "json"):
        parser.add_argument(f"--{name}")
    known, rest = parser.parse_known_args(argv)
    options, problems = vars(known), []
    for name in sorted(NUMBERS & options.keys()):
        text = options[name]
        try:
            options[name] = text and float(text.replace("_", ""))
        except ValueError:
            options[name] = -1
        if text is not None and not 0 < options[name] < math.inf:
            problems.append(f"{name}: needs a number above 0, got {text!r}")
    if problems:
        raise UserError(*problems)
    return options, rest


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    mode, checks = argv[0], () if argv[0] == "plan" else (hardware.check_device,)
    if mode not in MODES:
        raise UserError(f"{mode}: no such mode; one of {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    options, rest = read_flags(mode, argv[1:])
    config = load_config(rest, checks)
    result = MODES[mode][0](config, options)
    if options["json"]:
        path = Path(options["json"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(command=f"python bench.py {' '.join(argv)}") | result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
