"""
Check whether this checkout trains exactly as another commit did.

    python dev/same_run.py HEAD~1                             # equal to the last bit?
    python dev/same_run.py HEAD~3 --rows=gpt2,ranks           # some rows only

Both programs train the same small models on the same tokens, on one CPU thread, once without a stop
and once stopped halfway and resumed. Their logs and last checkpoints are compared, and the first
difference of each field is printed. All rows take about six minutes, half of that for `compiled`.
Exits with 0 if all are the same, with 1 if they are not or a run fails.

Before 85eb03d4 Muon made the public 18 Newton-Schulz iterations. To compare with such a commit,
type this first, and `git checkout optimizer.py` afterwards:

    echo "NEWTON_SCHULZ = 18 * ((2.0, -1.5, 0.5),)" >> optimizer.py

The comparison uses only command lines, metrics.jsonl and checkpoints, so the code may differ; the
row `masked` also wraps to_batch() of data/loader.py.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from program import (  # noqa: E402
    EVAL,
    STEP,
    Run,
    changed,
    finish_ranks,
    flags,
    same,
    start,
    start_ranks,
    write_tokens,
)

ITERATIONS, HALFWAY = 60, 30
VOCAB = 257  # not a multiple of 128, so that the models pad it
# sized so that the first epoch ends in the second half of a run's 720 sequences
TRAIN_SHARDS, VAL_SHARDS = [17_000, 9_001, 8_000], [6_000, 5_000]
COMMON = dict(
    dtype="float32",
    compile=False,
    device="cpu",
    n_head=4,
    n_embd=64,
    dropout=0.1,  # makes the random states matter
    block_size=64,
    batch_size=4,
    gradient_accumulation_steps=3,
    lr_decay_iters=ITERATIONS,  # otherwise the run to HALFWAY would have a shorter schedule
    eval_interval=20,
    eval_tokens=66 * 64,  # leaves the last batch of an evaluation partly filled
    log_interval=1,
)
GPT2 = dict(model="gpt2", n_layer=2, optimizer="adamw", learning_rate=3e-3, warmup_iters=5)
FAST = dict(
    model="fast",
    n_layer=3,
    bias=True,
    optimizer="muon",
    learning_rate=0.025,
    muon_momentum=0.9,
    weight_decay=0.001,
    beta1=0.8,
    beta2=0.95,
    grad_clip=0.0,
    warmup_iters=0,
    lr_schedule="wsd",
    decay_fraction=0.7,
    min_lr=0.0,
)
# targets that do not count, a different number in each micro-batch of 12 sequences
MASKED = """

whole_batch = to_batch


def to_batch(windows, device):
    x, y = whole_batch(windows, device)
    return x, y.masked_fill(y % 3 == 0, -1)
"""
# keys of train.py, the number of ranks, and what to write below data/loader.py
ROWS = dict(
    gpt2=GPT2,
    fast=FAST,
    muon=GPT2
    | dict(optimizer="muon", learning_rate=0.025, min_lr=0.0, bias=True, weight_decay=0.0),
    bfloat16=FAST | dict(dtype="bfloat16"),
    float16=GPT2 | dict(dtype="float16", grad_clip=0.1, n_layer=1, n_embd=32),
    masked=GPT2 | dict(batch_size=12, loader=MASKED),
    ranks=GPT2 | dict(ranks=2, gradient_accumulation_steps=4),
    compiled=FAST | dict(compile=True, n_layer=2, n_embd=32),
)


def check_out(commit: str, folder: Path) -> Path:
    """Extract the files of a commit of this repository into `folder`."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, stdout=subprocess.PIPE)
    if archive.returncode:
        sys.exit(f"{commit}: there is no such commit here")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def extended(program: Path, folder: Path, code: str) -> Path:
    """Copy a program to `folder`, and write `code` below its data/loader.py."""
    if program == ROOT:
        changed(folder, {})  # without datasets and runs
    else:
        shutil.copytree(program, folder)
    with open(folder / "data/loader.py", "a") as file:
        file.write(code)
    return folder


def train(program: Path, out_dir: Path, ranks: int = 1, **keys) -> None:
    """Run a program's train.py once. Exits if the run fails."""
    command = flags(**keys, out_dir=out_dir)
    where = dict(cwd=program, only_torch=True)
    processes = (
        start_ranks(ranks, *command, **where)
        if ranks > 1
        else [start("train.py", *command, **where)]
    )
    for result in finish_ranks(processes, timeout=600):
        if result.code:
            sys.exit(f"{program}: exit code {result.code}: {' '.join(command)}\n{result.err}")
        if "torch.compile" in result.err:  # a warning: this run would have compared eager code
            sys.exit(f"{program}: {result.err}")


def differences(theirs: Run, ours: Run) -> Iterator[str]:
    """Describe the first difference of each logged field, and name the parts that differ."""
    for kind, names in (("step", STEP), ("eval", EVAL)):
        for name in names:
            pairs = zip(theirs.column(kind, name), ours.column(kind, name), strict=True)
            differ = [(a, b) for a, b in pairs if a != b]  # true for NaN as well
            if differ:
                a, b = differ[0]
                yield f"{len(differ)} of {kind} {name} differ, the first by {b - a:.3g} from {a}"
    before, after = theirs.state(ITERATIONS), ours.state(ITERATIONS)
    for state in (before, after):
        state["optimizer"] = state["optimizer"]["state"]  # the groups hold the config's values
    for part in ("model", "optimizer", "scaler", "rng"):
        if not same(before[part], after[part]):
            yield f"{part} differs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to compare: %(default)s")
    arguments = parser.parse_args()
    rows = arguments.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    all_same = True
    with tempfile.TemporaryDirectory() as temporary:
        there = check_out(arguments.commit, Path(temporary, "there"))
        dataset = write_tokens(Path(temporary, "tokens"), TRAIN_SHARDS, VAL_SHARDS, VOCAB)
        for row in rows:
            keys_of_row = COMMON | ROWS[row] | dict(dataset=dataset)
            programs = dict(theirs=there, ours=ROOT)
            if code := keys_of_row.pop("loader", ""):
                programs = {
                    side: extended(program, Path(temporary, f"{row}-{side}"), code)
                    for side, program in programs.items()
                }
            for way in ("straight", "resumed"):
                runs = []
                for side, program in programs.items():
                    runs.append(Run(Path(temporary, f"{row}-{way}-{side}")))
                    keys = keys_of_row
                    if way == "resumed":
                        train(program, runs[-1].out_dir, **keys, max_iters=HALFWAY)
                        keys = keys | dict(init_from="resume")
                    train(program, runs[-1].out_dir, **keys, max_iters=ITERATIONS)
                found = [*differences(*runs)]
                print(f"{row} {way}, {ITERATIONS} iterations: {'NOT ' * bool(found)}equal")
                print(*(f"    {line}\n" for line in found), sep="", end="", flush=True)
                all_same &= not found
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
