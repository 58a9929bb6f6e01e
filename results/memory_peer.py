"""
Bytes of tensors alive at the peak of an iteration, here and in a checkout of nanoGPT: the same on every machine.

    python results/memory_peer.py NANOGPT_CHECKOUT OUT.json [--key=value ...]

Weights, gradients, optimizer state and activations together; the device's allocator adds fragments to both.
"""

import itertools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import hardware
import measure
from configurator import load_config
from errors import Parser, run_main
from peer import nanogpt_trainee


def peak_bytes(trainee: measure.Trainee) -> int:
    """Weights, optimizer state and the most that lives beside them in an iteration, as the allocator counted it."""
    trainee.step()  # makes the optimizer's state
    moments = (v for state in trainee.optimizer.state.values() for v in state.values())
    resident = sum(t.numel() * t.element_size() for t in (*trainee.model.parameters(), *moments))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainee.step()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return resident + max(itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("nanogpt", type=Path, metavar="NANOGPT_CHECKOUT")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    args, flags = parser.parse_known_args(argv)
    if not (args.nanogpt / "model.py").is_file():
        parser.error(f"{args.nanogpt}: no checkout of karpathy/nanoGPT; give another")
    config = load_config([*flags, "--device=cpu", "--dataset=random"])
    hw, rows = hardware.set_up(config), {}
    with tempfile.TemporaryDirectory() as folder:
        data = measure.open_data(config, Path(folder))
        rows["nanoGPT"] = peak_bytes(nanogpt_trainee(measure.build(config, hw, data), args.nanogpt, fused=True))
        for chunk in ("off", "auto", "512"):
            rows[f"loss_chunk={chunk}"] = peak_bytes(measure.build(replace(config, loss_chunk=chunk), hw, data))
            rows[f"{chunk}, recompute"] = peak_bytes(measure.build(replace(config, loss_chunk=chunk, recompute=True), hw, data))
    for name, size in rows.items():
        print(f"{name:<16} {size / 2**20:8.1f} MiB  {size / rows['nanoGPT']:.3f}", flush=True)
    command = f"python results/memory_peer.py {' '.join(argv)}"
    args.out.write_text(json.dumps(dict(command=command, bytes=rows, machine=measure.machine(hw)), indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
