"""
Made tests/checkpoints_b22bbcc: checkpoints of an older program, and how its runs went on.

    python tests/make_checkpoints.py b22bbcc     # writes tests/checkpoints_b22bbcc

The commit's own program trains each of RUNS for ten iterations or half of its time, which gives the
file, and then for ten more, whose losses and learning rates go to losses.json.
test_old_checkpoints.py lets today's program train these ten.

Files that are made again differ in times and paths, and there is no reason to: they must stay as
they are, whatever a checkpoint looks like one day.
"""

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from unittest import mock

import torch
from program import column, finish_ranks, flags, start, start_ranks, write_tokens
from torch.optim import optimizer

from dev.same_run import check_out

TESTS = Path(__file__).resolve().parent
COMMON = dict(
    n_layer=2,
    n_head=2,
    n_embd=8,  # the files are to be small
    pad_vocab_multiple=32,
    block_size=16,
    batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-2,
    warmup_iters=2,
    eval_interval=10,
    eval_tokens=256,
    checkpoint_interval=10,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
BY_ITERATIONS = dict(max_iters=20, lr_decay_iters=20)
MUON = dict(optimizer="muon", learning_rate=0.1, head_lr=0.05, beta1=0.8)
FAST = MUON | dict(
    model="fast",
    value_tables=1,
    bigram_rows=50,
    warmup_iters=0,
    grad_clip=0.0,
    min_lr=0.0,
)
# No dropout: other machines draw other random numbers. `ranks` alone has it, see the test.
RUNS = dict(
    gpt2=BY_ITERATIONS,
    fast=BY_ITERATIONS | FAST,
    muon=BY_ITERATIONS | MUON | dict(bias=True),
    float16=BY_ITERATIONS | dict(dtype="float16"),
    stream=BY_ITERATIONS | dict(stream=True, tokenizer="byte"),
    ranks=BY_ITERATIONS | dict(dropout=0.2),
    hours=dict(hours=1, lr_schedule="linear", warmup_iters=0, min_lr=0.0),
    # a constant rate, so that the losses do not depend on the time of day
    until=dict(until="07:15", lr_schedule="constant"),
)
# Where they are saved: after ten iterations, half of the hour, most of the half hour
SAVED_AT = dict.fromkeys(RUNS, 10) | dict(hours=30, until=20)
STARTED = datetime(2025, 11, 24, 6, 45)
VOCAB = 30


@contextlib.contextmanager
def turned_clock() -> Iterator[None]:
    """An update takes a minute, and nothing else takes any time."""
    seconds = 0.0

    def turn(stepped: torch.optim.Optimizer, *_) -> None:
        nonlocal seconds
        if not stepped.param_groups[0]["params"][0].is_meta:  # whose memory is only counted
            seconds += 60

    hook = optimizer.register_optimizer_step_post_hook(turn)
    with (
        mock.patch.object(time, "perf_counter", lambda: seconds),
        mock.patch.object(time, "time", lambda: STARTED.timestamp() + seconds),
    ):
        yield
    hook.remove()


# train.py by the turned clock
BY_TURNED_CLOCK = f"""
import runpy, sys
sys.path.append({str(TESTS)!r})
import make_checkpoints
with make_checkpoints.turned_clock():
    runpy.run_path("train.py", run_name="__main__")
"""


def write_texts(path: Path) -> None:
    """What the stream reads: documents of a few letters."""
    with path.open("w", newline="\n") as file:
        for n in range(300):
            words = ["abcde"[i % 3 : i % 5 + 1] for i in range(n, n + 12)]
            print(json.dumps(dict(text=" ".join(words))), file=file)


def keys_of(name: str, folder: Path) -> dict:
    """The keys of a run that reads `folder`."""
    dataset = folder / ("texts.jsonl" if name == "stream" else "tokens")
    return COMMON | dict(dataset=dataset, out_dir=folder / name) | RUNS[name]


def write_data(folder: Path) -> None:
    write_tokens(folder / "tokens", [4000, 37, 3000], [250, 150], vocab=VOCAB)
    write_texts(folder / "texts.jsonl")


def make(program: Path, name: str, folder: Path, saved: Path) -> dict:
    """
    Train a run to its checkpoint, which goes to `saved`, and ten iterations on. Returns the figures
    of these.
    """
    it = SAVED_AT[name]
    path = folder / name / f"ckpt-{it:08}.pt"
    if name in ("hours", "until"):
        launch(program, name, folder, max_minutes=it)
        later = dict(max_minutes=10)
    else:
        launch(program, name, folder, max_iters=it)
        later = {}
    if name == "float16":
        change_scale(path)
    if name == "until":
        later["until"] = "17:00"
    shutil.copy(path, saved / f"{name}.pt")
    launch(program, name, folder, init_from="resume", **later)
    steps = column(folder / name, "step", "iter", "loss", "lr")[-10:]
    assert [step[0] for step in steps] == list(range(it, it + 10)), steps
    return dict(loss=[loss for _, loss, _ in steps], lr=[lr for _, _, lr in steps])


def launch(program: Path, name: str, folder: Path, **changes) -> None:
    command = flags(**keys_of(name, folder) | changes)
    where = dict(cwd=program, cold=True)
    if name == "ranks":
        processes = start_ranks(2, *command, **where)
    elif name in ("hours", "until"):
        processes = [start("-c", BY_TURNED_CLOCK, *command, **where)]
    else:
        processes = [start("train.py", *command, **where)]
    for result in finish_ranks(processes):
        if result.code:
            sys.exit(f"{name}: exit code {result.code}: {result.err}")


def change_scale(path: Path) -> None:
    """As after overflows, long ago. No gradient of so small a model overflows by itself."""
    state = torch.load(path, weights_only=True)
    state["scaler"] |= dict(scale=4096.0, _growth_tracker=1998)  # it doubles at 2000
    torch.save(state, path)


def main(commit: str) -> None:
    saved, figures = TESTS / f"checkpoints_{commit}", {}
    saved.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program = check_out(commit, folder / "program")
        write_data(folder)
        for name in RUNS:
            figures[name] = make(program, name, folder, saved)
            print(name, figures[name]["loss"], flush=True)
    text = json.dumps(figures, indent=1)
    (saved / "losses.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
