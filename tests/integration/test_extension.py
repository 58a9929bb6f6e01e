"""
One more night: a finished run with lr_schedule=wsd is extended from the checkpoint that was kept
before its decay, in a copy, and ends with the bits of a run that was planned that long.
"""

import json
import signal
from pathlib import Path

import pytest
from moments import before_updates
from program import (
    TINY_RUN,
    checkpoints,
    column,
    finish,
    flags,
    run,
    start,
    train,
    write_tokens,
)

pytest.importorskip("fcntl", reason="cp, signals and disks of POSIX")

# constant for 6 iterations, then down to 0 at 12; a run of 24 is constant for 12
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


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """1,238 tokens for training last for 9 iterations of 128."""
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [700, 37, 500], [250, 150])


def moment(disk: Path, *steps) -> list[str]:
    return ["tests/moments.py", json.dumps(dict(disk=str(disk), steps=steps)), "train.py"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_checkpoint_before_the_decay_is_kept_besides_the_newest(keep, tokens, tmp_path):
    there = []
    with before_updates(lambda n, optimizer: there.append(checkpoints(tmp_path / "run"))):
        train(**NIGHT, dataset=tokens, out_dir=tmp_path / "run", keep_checkpoints=keep)
    assert checkpoints(tmp_path / "run") == ([6, 12] if keep == 1 else [6, 10, 12])
    assert there[6] == ([6] if keep == 1 else [4, 6])  # none more while the rate is at its peak
    assert there[8] == [6, 8]
    assert there[10] == ([6, 10] if keep == 1 else [6, 8, 10])


@pytest.mark.parametrize(
    "changes",
    [
        dict(lr_schedule="constant", decay_fraction=0.2),
        dict(lr_schedule="cosine", decay_fraction=0.2),
        dict(hours=1),
    ],
    ids=["constant", "cosine", "by the clock"],
)
def test_a_run_with_another_schedule_keeps_only_the_newest(changes, tokens, tmp_path):
    keys = NIGHT | dict(dataset=tokens, out_dir=tmp_path / "run", keep_checkpoints=1) | changes
    train(**keys)
    assert checkpoints(tmp_path / "run") == [12]


def test_a_disk_with_room_for_the_files_that_plan_counts_is_enough(tokens, make_disk, tmp_path):
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
    assert kept == 4  # two, best.pt, and the one before the decay
    disk = make_disk(kept * size + (64 << 10))
    result = train(**keys | dict(out_dir=disk / "run"))
    assert "not saved" not in result.err
    assert checkpoints(disk / "run") == [6, 10, 12]


@pytest.mark.parametrize("room, warned", [(3.5, True), (5, False)])
def test_a_disk_too_small_for_that_is_said_at_the_start(room, warned, tokens, make_disk, tmp_path):
    keys = NIGHT | dict(dataset=tokens, max_iters=3)
    train(**keys | dict(out_dir=tmp_path / "first"))
    (parameters,) = column(tmp_path / "first", "start", "parameters")
    disk = make_disk(int(room * 12 * parameters))  # 12 bytes each in a checkpoint
    result = train(**keys | dict(out_dir=disk / "run"))
    assert ("for 4 checkpoints" in result.err) == warned


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_whose_newest_checkpoints_are_damaged_does_not_go_back_to_before_the_decay(
    keep, tokens, tmp_path
):
    out_dir = tmp_path / "run"
    keys = NIGHT | dict(dataset=tokens, out_dir=out_dir, keep_checkpoints=keep)
    train(**keys)
    newer = [out_dir / f"ckpt-{it:08}.pt" for it in checkpoints(out_dir) if it > 6]
    assert len(newer) == keep
    for path in newer:
        path.write_bytes(path.read_bytes()[:-1000])
    before = files(out_dir)
    result = run("train.py", *flags(**keys))
    assert result.code == 2 and files(out_dir) == before
    assert "to train again from ckpt-00000006.pt" in result.err
    for path in newer:
        path.rename(tmp_path / path.name)
    train(**keys)
    assert column(out_dir, "start", "iter")[-1] == 6


def test_a_damaged_checkpoint_soon_after_the_decay_began_costs_one_interval(tokens, tmp_path):
    """The one before is the newest intact one, whatever else it is kept for."""
    keys = NIGHT | dict(dataset=tokens, out_dir=tmp_path / "run")
    process = start(*moment(tmp_path, ("update", 9, "SIGKILL")), *flags(**keys))
    assert finish(process).code == -signal.SIGKILL
    assert checkpoints(tmp_path / "run") == [6, 8]
    newest = tmp_path / "run" / "ckpt-00000008.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    train(**keys)
    assert column(tmp_path / "run", "start", "iter") == [0, 6]
