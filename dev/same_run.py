"""
Check whether this checkout trains exactly as another commit did.

    python dev/same_run.py HEAD~1                             # equal to the last bit?
    python dev/same_run.py HEAD~3 --rows=gpt2,ranks           # some rows only
    python dev/same_run.py HEAD~1 --loss_tolerance=2e-6       # are the losses this close?

Both programs train the same small models on the same tokens, on one CPU thread, once without a stop
and once stopped halfway and resumed. Their logs and last checkpoints are compared, and the first
difference of each kind is printed. All rows take about six minutes, half of that for `compiled`.
Exits with 0 if all are the same, with 1 if they are not or a run fails.

The comparison uses only command lines, metrics.jsonl and checkpoints, so the code may differ.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from program import finish_ranks, flags, start, start_ranks  # noqa: E402

ITERATIONS, HALFWAY = 60, 30
VOCAB = 257  # not a multiple of 128, so that the models pad it
# sized so that the first epoch ends in the second half of a run's 720 sequences
TRAIN_SHARDS, VAL_SHARDS = (17_000, 9_001, 8_000), (6_000, 5_000)
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
    head_lr=0.004,
    weight_decay=0.001,
    beta1=0.8,
    beta2=0.95,
    grad_clip=0.0,
    warmup_iters=0,
    lr_schedule="wsd",
    decay_fraction=0.7,
    min_lr=0.0,
)
# keys of train.py, and the number of ranks
ROWS = dict(
    gpt2=GPT2,
    fast=FAST,
    muon=GPT2 | dict(optimizer="muon", learning_rate=0.025, bias=True, weight_decay=0.0),
    bfloat16=FAST | dict(dtype="bfloat16"),
    float16=GPT2 | dict(dtype="float16", grad_clip=0.1, n_layer=1, n_embd=32),
    ranks=GPT2 | dict(ranks=2, gradient_accumulation_steps=4),
    compiled=FAST | dict(compile=True, n_layer=2, n_embd=32),
)
LOGGED = dict(step=("loss", "lr", "grad_norm"), eval=("train_loss", "val_loss"))
PROGRESS = ("iter_num", "tokens", "sequences")
GROUP = ("params", "lr", "initial_lr", "weight_decay", "betas", "momentum")
# --loss_tolerance applies to LOSSES. Where losses differ, FOLLOWS differ too, so that with
# --loss_tolerance they are printed but not judged.
LOSSES, FOLLOWS = ("loss", "train_loss", "val_loss"), ("grad_norm", "model", "optimizer.state")

# -----------------------------------------------------------------------------
# The two programs, their dataset and their runs


def check_out(commit: str, folder: Path) -> Path:
    """Extract the files of a commit of this repository into `folder`."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, stdout=subprocess.PIPE)
    if archive.returncode:
        sys.exit(f"{commit}: there is no such commit here")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def write_dataset(folder: Path, vocab: int = VOCAB) -> Path:
    """
    Write shards and manifest.json as a preparation does, but without the code under comparison. The
    tokens repeat some phrases, so that there is something to learn.
    """
    folder.mkdir()
    # numpy guarantees the same numbers in all versions only for this legacy class
    rng = np.random.RandomState(1337)
    phrases = rng.randint(1, vocab, (50, 12), dtype=np.int64)
    shards = []
    for number, size in enumerate(VAL_SHARDS + TRAIN_SHARDS):
        name = f"{'val' if number < len(VAL_SHARDS) else 'train'}_{number:06}.bin"
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, size  # llm.c's magic number and version
        chosen = rng.randint(0, 50, size // 12 + 1, dtype=np.int64)
        tokens = phrases[chosen].ravel()[:size].astype("<u2")
        tokens[0] = 0  # end-of-text begins a document
        content = header.tobytes() + tokens.tobytes()
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        shards.append(dict(name=name, tokens=size, sha256=sha256, documents=1, bytes=size))
    manifest = dict(format="uint16 shards, llm.c header", tokenizer="byte", vocab=vocab, eot=0)
    manifest |= dict(source="numpy", revision="", documents=len(shards), complete=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | dict(shards=shards)))
    return folder


def train(program: Path, out_dir: Path, ranks: int = 1, **keys) -> None:
    """Run a program's train.py once. Exits if the run fails."""
    command = flags(**keys, out_dir=out_dir)
    where = dict(cwd=program, only_torch=True)
    if ranks == 1:
        processes = [start("train.py", *command, **where)]
    else:
        processes = start_ranks(ranks, *command, **where)
    for result in finish_ranks(processes, timeout=600):
        if result.code:
            sys.exit(f"{program}: exit code {result.code}: {' '.join(command)}\n{result.err}")
        if "torch.compile" in result.err:  # a warning: this run would have compared eager code
            sys.exit(f"{program}: {result.err}")


def run(program: Path, out_dir: Path, resumed: bool, **keys) -> Path:
    """Train for ITERATIONS; if `resumed`, with a stop halfway. Returns out_dir."""
    if resumed:
        train(program, out_dir, **keys, max_iters=HALFWAY)
        keys["init_from"] = "resume"
    train(program, out_dir, **keys, max_iters=ITERATIONS)
    return out_dir


# -----------------------------------------------------------------------------
# Read what a run has written, and compare two runs


def flatten(tree, name: str) -> dict:
    """Map paths such as optimizer.state.3.exp_avg to the leaves of nested dicts and lists."""
    if isinstance(tree, dict | list | tuple):
        branches = tree.items() if isinstance(tree, dict) else enumerate(tree)
        leaves = {}
        for key, branch in branches:
            leaves |= flatten(branch, f"{name}.{key}")
        return leaves
    return {name: tree}


def pick(values: dict, names: tuple[str, ...]) -> dict:
    return {name: values[name] for name in names if name in values}


def read_checkpoint(out_dir: Path) -> dict[str, dict]:
    """Return the leaves of the last checkpoint by kind, such as model or rng, and path."""
    path = out_dir / f"ckpt-{ITERATIONS:08}.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    kinds = {kind: state[kind] for kind in ("model", "scaler", "rng")}
    kinds["optimizer.state"] = state["optimizer"]["state"]
    # pick known keys, because another checkpoint format may add some, such as parameter names
    kinds["optimizer.param_groups"] = [pick(group, GROUP) for group in groups]
    kinds["progress"] = pick(state["progress"], PROGRESS)
    return {kind: flatten(tree, kind) for kind, tree in kinds.items()}


def read_log(out_dir: Path) -> dict[str, dict]:
    """Return the logged values in metrics.jsonl by name and iteration."""
    values = {name: {} for names in LOGGED.values() for name in names}
    for line in (out_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in LOGGED.get(record["kind"], ()):
            if name in record:
                values[name][f"{name} of iteration {record['iter']}"] = record[name]
    return values


def distance(a, b) -> float:
    """Return the largest absolute difference between two leaves; 0 if they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        return 0.0 if torch.equal(a, b) else (a.double() - b.double()).abs().max().item()
    if a == b:
        return 0.0
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b)
    return float("inf")


def compare(theirs: dict[str, dict], ours: dict[str, dict], tolerance: float | None) -> bool:
    """Print the first difference of each kind. Returns True if no difference counts."""
    same, exact, apart = True, True, 0.0
    for kind, a in theirs.items():
        b = ours[kind]
        both = [path for path in a if path in b]
        # The checkpoint format may have changed, so report what only one side has, and compare the
        # rest.
        if alone := sorted(a.keys() ^ b.keys()):
            print(f"    {kind}: {len(alone)} on one side only, such as {alone[0]}")
        if not a and not b:
            continue
        if not both or (alone and kind in LOSSES):
            print(f"    {kind}: cannot be compared")
            same = False
            continue
        distances = {path: distance(a[path], b[path]) for path in both}
        most = max(distances.values())
        if kind in LOSSES:
            apart = max(apart, most)
        differ = [path for path in both if distances[path] != 0]  # true for NaN as well
        if not differ:
            continue
        exact = False
        judged = tolerance is None or kind not in FOLLOWS
        if judged and not (kind in LOSSES and most <= (tolerance or 0)):
            same = False
        first = differ[0]
        values = "" if isinstance(a[first], torch.Tensor) else f", {a[first]} and {b[first]}"
        told = "" if judged else "; not judged"
        count = f"{len(differ)} of {len(both)} differ, by {most:.3g} at most"
        print(f"    {kind}: {count}; the first is {first}{values}{told}")
    accepted = "equal" if exact else f"within {tolerance}"
    verdict = accepted if same else "NOT EQUAL"
    print(f"    {verdict}, losses differ by {apart:.3g} at most", flush=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--loss_tolerance", type=float, help="accept losses this far apart")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to compare: %(default)s")
    arguments = parser.parse_args()
    rows = arguments.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    all_same = True
    with tempfile.TemporaryDirectory() as temporary:
        there = check_out(arguments.commit, Path(temporary, "there"))
        dataset = write_dataset(Path(temporary, "tokens"))
        for row in rows:
            keys = dict(dataset=dataset) | COMMON | ROWS[row]
            for way in ("straight", "resumed"):
                found = []
                for program, side in ((there, "theirs"), (ROOT, "ours")):
                    out_dir = Path(temporary, f"{row}-{way}-{side}")
                    run(program, out_dir, way == "resumed", **keys)
                    found.append(read_log(out_dir) | read_checkpoint(out_dir))
                print(f"{row} {way}, {ITERATIONS} iterations:", flush=True)
                all_same &= compare(*found, arguments.loss_tolerance)
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
