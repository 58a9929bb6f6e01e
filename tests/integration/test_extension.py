"""
Extend a finished run with lr_schedule=wsd from peak.pt, the checkpoint before its decay. The
extended copy ends with the same bits as a run planned for that length from the start.
"""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cases import slow_but
from fault_injection import watched, with_faults
from program import (
    TINY_RUN,
    InProcessRun,
    Result,
    assert_same_run,
    checkpoints,
    column,
    finish,
    finish_ranks,
    flags,
    run,
    start,
    start_ranks,
    train,
)

pytest.importorskip("fcntl", reason="cp, signals and disks of POSIX")

# the rate is constant for 6 iterations and falls to 0 at 12; in a run of 24, constant for 12
NIGHT = TINY_RUN | dict(
    n_layer=1,
    n_embd=16,
    gradient_accumulation_steps=2,
    max_iters=12,
    lr_schedule="wsd",
    decay_fraction=0.5,
    min_lr=0.0,
    warmup_iters=2,
    learning_rate=0.01,
    dropout=0.1,
    eval_interval=4,
    eval_tokens=160,
    checkpoint_interval=2,
    init_from="auto",
)


@pytest.fixture(scope="module", params=slow_but(1, of=[1, 2]))
def planned(request, tokens, tmp_path_factory) -> tuple[int, Path]:
    """Train a run planned for 24 iterations. Return its number of ranks and its folder."""
    out_dir = tmp_path_factory.mktemp("planned")
    launch(request.param, *flags(**NIGHT | dict(max_iters=24, dataset=tokens, out_dir=out_dir)))
    return request.param, out_dir


def launch(ranks: int, *arguments, script=("train.py",), code: int = 0) -> Result:
    """
    Train in `ranks` processes, which must all end with exit code `code`. Return the result of the
    first process.
    """
    if ranks == 1:
        results = [finish(start(*script, *arguments))]
    else:
        results = finish_ranks(start_ranks(ranks, *arguments, script=script))
    assert [result.code for result in results] == [code] * ranks, results
    return results[0]


# Ctrl-C, on the first rank
STOPPED = """
    if n == 10 and RANK == "0":
        os.kill(os.getpid(), signal.SIGINT)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def named(out: str) -> list[tuple[str, str]]:
    """
    Return the checkpoint that a run's output names for a longer run, and the name of its copy.
    """
    return re.findall(r"resume a copy of (.*\.pt) that you name (.*\.pt): see docs/hours.md", out)


def peak_iter(out_dir: Path) -> int:
    return torch.load(out_dir / "peak.pt", weights_only=True)["progress"]["iter_num"]


def copy_for_longer(out: str, folder: Path) -> dict:
    """Copy the checkpoint that `out` names and its metrics.jsonl, as docs/hours.md shows."""
    ((start, name),) = named(out)
    folder.mkdir()
    shutil.copy(start, folder / name)
    shutil.copy(Path(start).with_name("metrics.jsonl"), folder)
    return dict(out_dir=folder, init_from="resume", max_iters=24)


@pytest.mark.parametrize("keep", slow_but(2, of=[1, 2]))
def test_a_wsd_run_also_keeps_its_last_checkpoint_before_the_decay(keep, tokens, tmp_path):
    peaks = []
    trainer = InProcessRun()
    trainer.at["update", None] = lambda: peaks.append((tmp_path / "run" / "peak.pt").exists())
    trainer.launch(**NIGHT, dataset=tokens, out_dir=tmp_path / "run", keep_checkpoints=keep)
    assert checkpoints(tmp_path / "run") == [10, 12][-keep:]
    assert peaks[:7] == [False] * 7  # no peak.pt yet while the rate is at its peak
    assert peaks[8:] == [True] * 4
    assert peak_iter(tmp_path / "run") == 6


@pytest.mark.parametrize(
    "changes",
    [
        dict(lr_schedule="constant", decay_fraction=0.2),
        dict(lr_schedule="cosine", decay_fraction=0.2),
        dict(hours=1),
    ],
    ids=["constant", "cosine", "hours"],
)
def test_a_run_with_another_schedule_or_hours_keeps_only_its_newest_checkpoint(
    changes, tokens, tmp_path
):
    """Name no checkpoint for a longer run, either."""
    keys = NIGHT | dict(dataset=tokens, out_dir=tmp_path / "run", keep_checkpoints=1) | changes
    train(**keys)
    assert checkpoints(tmp_path / "run") == [12]
    result = train(**keys)
    assert "iterations are done" in result.out and not named(result.out)


def test_a_run_extended_from_the_named_checkpoint_equals_one_planned_for_that_length(
    planned, tokens, tmp_path
):
    """
    With one rank, also kill the run in the first save of its decay, and its extension during its
    own decay. The folder's name contains a space.
    """
    ranks, longer = planned
    out_dir = tmp_path / "a run"
    keys = NIGHT | dict(dataset=tokens, out_dir=out_dir, keep_checkpoints=1)
    arguments = flags(**keys)
    if ranks == 1:
        killed = with_faults(tmp_path, ("saved", 4, "SIGKILL"))
        launch(1, *arguments, script=killed, code=-signal.SIGKILL)
    launch(ranks, *arguments)
    before = files(out_dir)

    asked = launch(ranks, *arguments)
    assert files(out_dir) == before
    assert named(asked.out) == [(f"{out_dir}/peak.pt", "ckpt-00000006.pt")]
    arguments = flags(**keys | copy_for_longer(asked.out, tmp_path / "a run_24"))
    if ranks == 1:
        killed = with_faults(tmp_path, ("update", 9, "SIGKILL"))
        launch(1, *arguments, script=killed, code=-signal.SIGKILL)
        assert checkpoints(tmp_path / "a run_24")[-1] == 14
    result = launch(ranks, *arguments)
    assert "raises" not in result.err
    assert_same_run(longer, tmp_path / "a run_24", 24)
    assert files(out_dir) == before  # the finished run stays as it was


def test_a_resume_that_raises_the_learning_rate_names_the_checkpoint_for_a_longer_run(
    tokens, tmp_path
):
    keys = NIGHT | dict(dataset=tokens, out_dir=tmp_path / "run")
    train(**keys)
    asked = named(train(**keys).out)
    raised = train(**keys | dict(max_iters=24))
    assert "raises it from 0.00e+00 to 1.00e-02" in raised.err
    assert named(raised.out) == asked == [(f"{tmp_path}/run/peak.pt", "ckpt-00000006.pt")]


def test_an_unfinished_run_can_be_decayed_in_a_copy_and_then_continued(planned, tokens, tmp_path):
    """Stop a run, decay a copy of it at once, and continue the original as it was planned."""
    ranks, longer = planned
    keys = NIGHT | dict(max_iters=24, dataset=tokens, out_dir=tmp_path / "night")
    launch(ranks, *flags(**keys | dict(max_iters=24)), script=watched(STOPPED), code=130)
    (tmp_path / "morning").mkdir()
    for name in ("ckpt-00000010.pt", "metrics.jsonl"):
        shutil.copy(tmp_path / "night" / name, tmp_path / "morning")
    before = files(tmp_path / "night")
    decayed = dict(max_iters=15, decay_fraction=0.33, out_dir=tmp_path / "morning")
    launch(ranks, *flags(**keys | decayed))
    rates = dict(column(tmp_path / "morning", "step", "iter", "lr"))
    assert rates[9] == rates[10] == 0.01
    assert [rates[it] for it in range(11, 15)] == pytest.approx([0.008, 0.006, 0.004, 0.002])
    assert files(tmp_path / "night") == before
    launch(ranks, *flags(**keys))
    assert_same_run(longer, tmp_path / "night", 24)


def test_a_wsd_run_fits_on_a_disk_for_as_many_checkpoints_as_bench_plan_counts(
    tokens, make_disk, tmp_path
):
    keys = NIGHT | dict(dataset=tokens, keep_checkpoints=2)
    train(**keys | dict(out_dir=tmp_path / "first"))
    size = (tmp_path / "first" / "ckpt-00000012.pt").stat().st_size
    assert (
        run(
            "bench.py", "plan", *flags(**keys), "--iter_seconds=1", f"--json={tmp_path}/plan.json"
        ).code
        == 0
    )
    kept = json.loads((tmp_path / "plan.json").read_text())["checkpoints_kept"]
    assert kept == 4  # the newest two, best.pt, and the last before the decay
    disk = make_disk(kept * size + (64 << 10))
    result = train(**keys | dict(out_dir=disk / "run"))
    assert "not saved" not in result.err
    assert checkpoints(disk / "run") == [10, 12] and peak_iter(disk / "run") == 6
