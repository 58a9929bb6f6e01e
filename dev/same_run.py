"""
Check whether this checkout trains exactly as another commit did, and resumes exactly.

    python dev/same_run.py HEAD~1                             # equal to the last bit?
    python dev/same_run.py HEAD~3 --rows=gpt2,ranks           # some rows only
    python dev/same_run.py -- config/small_gpt2.py --max_iters=30 --device=cpu
    python dev/same_run.py HEAD~1 -- config/small_gpt2.py --max_iters=30 --device=cpu

Both programs train the same small models on the same tokens, on one CPU thread, once without a stop
and once stopped halfway and resumed. Behind `--` is a command line of your own: this program trains
with it once without a stop, and once stopped by Ctrl-C after a third, killed after two thirds and
started again; with a commit, so does that one, without a stop. Logs and last checkpoints are
compared, and the first difference of each field is printed. All rows take about six minutes, half
of that for `compiled`. Exits with 0 if all are the same, with 1 if they are not or a run fails.

Before 85eb03d4 Muon made the public 18 Newton-Schulz iterations. To compare with such a commit,
type this first, and `git checkout optimizer.py` afterwards:

    echo "NEWTON_SCHULZ = 18 * ((2.0, -1.5, 0.5),)" >> optimizer.py

The comparison uses only command lines, metrics.jsonl and checkpoints, so the code may differ; the
row `masked` also wraps to_batch() of data/loader.py.
"""

import io
import os
import shutil
import signal
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
    finish,
    finish_ranks,
    flags,
    same,
    start,
    start_ranks,
    wait_for_line,
    write_tokens,
)

from common.console import Parser, UserError, run_main  # noqa: E402
from configurator import load_config  # noqa: E402
from data.shards import dataset_folder  # noqa: E402

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
    dropout=0.1,  # makes the random numbers matter
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
        raise UserError(f"{commit}: there is no such commit here")
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


def train(program: Path, out_dir: Path, *words: str, ranks: int = 1, **keys) -> None:
    """Run a program's train.py once. Exits if the run fails."""
    command = [*words, *flags(**keys, out_dir=out_dir)]
    where = dict(cwd=program)
    processes = (
        start_ranks(ranks, *command, **where)
        if ranks > 1
        else [start("train.py", *command, **where)]
    )
    for result in finish_ranks(processes, timeout=600):
        if result.code:
            raise UserError(
                f"{program}: exit code {result.code}: {' '.join(command)}\n{result.err}"
            )
        if "torch.compile" in result.err:  # a warning: this run would have compared eager code
            raise UserError(f"{program}: {result.err}")


def interrupt(out_dir: Path, words: list[str], it: int, number: int) -> None:
    """Run train.py of this program, and send it a signal after iteration `it`."""
    command = ["train.py", *words, *flags(out_dir=out_dir)]
    process = start(*command, cwd=ROOT)
    wait_for_line(process, f"iter {it}: ")
    os.kill(process.pid, number)
    finish(process, timeout=600)


def own_runs(words: list[str], there: Path | None, folder: Path) -> dict[str, tuple[Run, Run]]:
    """
    Train with a command line of one's own. Returns pairs of runs that should be equal: stopped,
    killed and resumed or not, and, given another program, its run and ours.
    """
    iters = load_config(words).max_iters
    dataset = dataset_folder(load_config(words).dataset).resolve()
    words = [str(Path(word).resolve()) if Path(word).is_file() else word for word in words]
    # These keys do not change the training. `there` has no datasets, so give the full path.
    words += flags(dataset=dataset, log_interval=1, checkpoint_interval=max(1, iters // 5))
    straight, resumed, theirs = (Run(folder / name) for name in ("straight", "resumed", "theirs"))
    train(ROOT, straight.out_dir, *words)
    interrupt(resumed.out_dir, words, iters // 3, signal.SIGINT)
    interrupt(resumed.out_dir, words, 2 * iters // 3, signal.SIGKILL)
    train(ROOT, resumed.out_dir, *words)
    pairs = {"your command, resumed": (straight, resumed)}
    if there:
        train(there, theirs.out_dir, *words)
        pairs["your command, straight"] = theirs, straight
    return pairs


def report(what: str, theirs: Run, ours: Run, iterations: int) -> bool:
    """Print whether two runs are equal, and return it."""
    found = [*differences(theirs, ours, iterations)]
    print(f"{what}, {iterations} iterations: {'NOT ' * bool(found)}equal")
    print(*(f"    {line}\n" for line in found), sep="", end="", flush=True)
    return not found


def differences(theirs: Run, ours: Run, iterations: int) -> Iterator[str]:
    """Describe the first difference of each logged field, and name the parts that differ."""
    for kind, names in (("step", STEP), ("eval", EVAL)):
        for name in names:
            pairs = zip(theirs.column(kind, name), ours.column(kind, name), strict=True)
            differ = [(a, b) for a, b in pairs if a != b]  # true for NaN as well
            if differ:
                a, b = differ[0]
                yield f"{len(differ)} of {kind} {name} differ, the first by {b - a:.3g} from {a}"
    before, after = theirs.state(iterations), ours.state(iterations)
    for state in (before, after):
        state["optimizer"] = state["optimizer"]["state"]  # the groups hold the config's values
    for part in ("model", "optimizer", "scaler"):
        if not same(before[part], after[part]):
            yield f"{part} differs"


def main(words: list[str]) -> int:
    end = words.index("--") if "--" in words else len(words)
    own = words[end + 1 :]
    parser = Parser(
        usage="python dev/same_run.py [COMMIT] [--rows ROWS] [-- COMMAND LINE]",
        description="\n\n".join(__doc__.split("\n\n")[:3]),
    )
    parser.add_argument("commit", nargs="?" if own else None)
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to compare: %(default)s")
    arguments = parser.parse_args(words[:end])
    rows = arguments.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    all_same = True
    with tempfile.TemporaryDirectory() as temporary:
        commit, folder = arguments.commit, Path(temporary)
        there = check_out(commit, folder / "there") if commit else None
        if own:
            pairs = own_runs(own, there, folder)
            iterations = load_config(own).max_iters
            return (
                0 if all([report(what, *pair, iterations) for what, pair in pairs.items()]) else 1
            )
        dataset = write_tokens(folder / "tokens", TRAIN_SHARDS, VAL_SHARDS, VOCAB)
        for row in rows:
            keys_of_row = COMMON | ROWS[row] | dict(dataset=dataset)
            programs = dict(theirs=there, ours=ROOT)
            if code := keys_of_row.pop("loader", ""):
                programs = {
                    side: extended(program, folder / f"{row}-{side}-program", code)
                    for side, program in programs.items()
                }
            for way in ("straight", "resumed"):
                runs = []
                for side, program in programs.items():
                    runs.append(Run(folder / f"{row}-{way}-{side}"))
                    keys = keys_of_row
                    if way == "resumed":
                        train(program, runs[-1].out_dir, **keys, max_iters=HALFWAY)
                        keys = keys | dict(init_from="resume")
                    train(program, runs[-1].out_dir, **keys, max_iters=ITERATIONS)
                all_same &= report(f"{row} {way}", *runs, ITERATIONS)
    return 0 if all_same else 1


if __name__ == "__main__":
    run_main(main)
