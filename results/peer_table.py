"""
README's table of nanoGPT and this trainer, from every results/*/peer*.json (bench.py peer wrote them).

    python results/peer_table.py
"""

import json
import shlex
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import bench
from configurator import Config, load_config
from errors import Parser, run_main

HEAD = """\
| device | model, micro-batch | dtype | nanoGPT, tok/s | here, tok/s | ratio of pairs | memory |
| --- | --- | --- | --- | --- | --- | --- |"""


def config_of(command: str) -> Config:
    """The configuration behind `python bench.py peer CONFIG --key=value ...`."""
    arguments = [str(ROOT / a) if a.startswith("config/") else a for a in shlex.split(command)[3:]]
    return load_config(bench.read_flags("peer", arguments)[1])


def row(result: dict) -> str:
    c, machine, shipped = config_of(result["command"]), result["machine"], result["as_shipped"]
    rates = {
        side: result["tokens_per_iter"] / statistics.median(seconds) for side, seconds in result["seconds_per_iter"].items()
    }
    cpu = f"{machine['threads']} cores, {machine['cpu'].replace('(R)', '')}"
    device = machine["device"] if machine.get("device_type") == "cuda" else cpu
    mode = "compiled" if c.compile else "eager"
    dtype = (
        f"nanoGPT as shipped: float32, {shipped}; here {machine['dtype']}, {mode}" if shipped else f"{machine['dtype']}, {mode}"
    )
    low, high = result["speed_ratio_range"]
    columns = (
        device, f"{c.n_layer} x {c.n_embd}, {c.batch_size} x {c.block_size}", dtype,
        f"{rates['nanoGPT']:,.0f}", f"{rates['ours']:,.0f}",
        f"{result['speed_ratio']:.2f} ({low:.2f} to {high:.2f})",
        f"{result['memory_ratio']:.2f}" if result["memory_ratio"] else "n/a",
    )  # fmt: skip
    return f"| {' | '.join(columns)} |"


def table() -> str:
    files = sorted(ROOT.glob("results/*/peer*.json"))
    return "\n".join([HEAD, *(row(json.loads(file.read_text())) for file in files)])


def main(argv: list[str]) -> None:
    Parser(description=__doc__).parse_args(argv)
    print(table())


if __name__ == "__main__":
    run_main(main)
