"""
Make the checkpoints in tests/golden, one per model, and the losses of the iterations after them.

    python dev/make_golden.py [NAME]

tests/integration/test_golden.py resumes the checkpoints. If a change makes a run's checkpoints
unusable, run this again.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from program import column, train, write_tokens  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
SAVED_AT = 10
COMMON = dict(
    n_layer=2,
    n_head=2,
    n_embd=8,  # keeps the files small
    pad_vocab_multiple=32,
    block_size=16,
    batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-2,
    warmup_iters=2,
    max_iters=2 * SAVED_AT,
    eval_interval=SAVED_AT,
    eval_tokens=256,
    checkpoint_interval=SAVED_AT,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
FAST = dict(
    model="fast",
    bias=True,
    optimizer="muon",
    learning_rate=0.3,
    warmup_iters=0,
    grad_clip=0.0,
    min_lr=0.0,
)
MODELS = dict(gpt2=COMMON, fast=COMMON | FAST)


def write_dataset(folder: Path) -> Path:
    return write_tokens(folder, [4000, 37, 3000], [250, 150], vocab=30)


def main() -> None:
    losses = json.loads((GOLDEN / "losses.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        dataset = write_dataset(Path(temporary, "tokens"))
        for name in sys.argv[1:] or MODELS:
            keys = MODELS[name]
            out_dir = Path(temporary, name)
            train(**keys, dataset=dataset, out_dir=out_dir, keep_checkpoints=3)
            shutil.copy(out_dir / f"ckpt-{SAVED_AT:08}.pt", GOLDEN / f"{name}.pt")
            losses[name] = column(out_dir, "step", "loss")[SAVED_AT:]
    (GOLDEN / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
