"""
What a disk can do to a run: it fills up, it damages files, a shard disappears, the run is killed
while it writes, another run or the user's own files are in the folder. No iteration, no record and
no file is lost that anybody could want back.

A full disk is a real tmpfs. The moments are calls of torch and of the system: see moments.py.
"""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import plain
import pytest
import torch
from moments import (
    PAGE,
    Clock,
    after_updates,
    at_update,
    before_disk_calls,
    before_updates,
    fill,
    free,
)
from program import (
    Result,
    assert_same_run,
    best,
    checkpoint,
    checkpoints,
    column,
    finish,
    finish_ranks,
    flags,
    records,
    run,
    same,
    start,
    start_ranks,
    train,
    wait_for_line,
    write_tokens,
)

fcntl = pytest.importorskip("fcntl", reason="disks and signals of POSIX")

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=1,
    max_iters=8,
    lr_decay_iters=12,
    eval_interval=4,
    eval_tokens=160,
    log_interval=1,
    dropout=0.1,
    # the validation loss falls up to iteration 4, and at 6, 8 and 10 it is between those of 2 and 4
    learning_rate=0.3,
    warmup_iters=6,
    device="cpu",
    dtype="float32",
    compile=False,
)
FALLING = dict(learning_rate=0.01, warmup_iters=2)  # then the newest is the best
FOREVER = dict(max_iters=10**6, eval_interval=10**6)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [700, 37, 500], [250, 150])


@pytest.fixture(scope="module")
def straight(tokens, tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    out_dir = tmp_path_factory.mktemp("straight")
    train(**TINY, dataset=tokens, out_dir=out_dir)
    return out_dir


def run_tiny(tokens: Path, out_dir: Path, **changes) -> Result:
    return run("train.py", *flags(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes))


def train_tiny(tokens: Path, out_dir: Path, **changes) -> Result:
    return train(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes)


def start_tiny(tokens: Path, out_dir: Path, **changes):
    return start("train.py", *flags(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes))


def planned(tmp_path: Path, *steps, rank: int = 0) -> list[str]:
    """train.py, with steps of moments.py."""
    plan = dict(disk=str(tmp_path), rank=rank, steps=steps)
    return ["tests/moments.py", json.dumps(plan), "train.py"]


def lines(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(beginning)]


def leftovers(out_dir: Path) -> list[Path]:
    return [*out_dir.glob("*.tmp")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def best_iter(out_dir: Path) -> int:
    return best(out_dir)["progress"]["iter_num"]


def best_logged(out_dir: Path) -> int:
    """The iteration of the lowest validation loss; the untrained model of 0 is never saved."""
    losses = dict(column(out_dir, "eval", "iter", "val_loss"))
    return min((it for it in losses if it), key=losses.get)


# -----------------------------------------------------------------------------
# Full disks


@pytest.fixture
def make_disk(tmp_path):
    """A folder on a disk of its own, of so many bytes."""
    mounted = []

    def make(size: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs to be root, to mount a disk")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def seems_empty():
    """As with a quota: the disk tells of free room, and a write fails in the middle of the file."""
    statvfs = os.statvfs
    return mock.patch("os.statvfs", lambda path: statvfs("/"))


def no_wait():
    """A run that waits for room fails the test."""
    return Clock(lambda: pytest.fail("waits for room")).turned()


@pytest.mark.parametrize("noticed, left", [("before", 0), ("in the middle", 20_000)])
def test_a_full_disk_costs_no_iteration_no_record_and_no_save_that_can_still_be_made(
    noticed, left, tokens, make_disk, tmp_path
):
    options = dict(max_iters=40, lr_decay_iters=40)
    disk, seen = make_disk(1 << 20), []

    def act(n, optimizer):
        if n == 6:
            fill(disk)
            free(disk, left)
        if n == 31:
            seen.extend([checkpoints(disk / "run"), leftovers(disk / "run")])
            free(disk)

    with before_updates(act), seems_empty() if noticed == "in the middle" else nullcontext():
        result = train_tiny(tokens, disk / "run", **options)
    assert seen == [[4], []]
    (line,) = [line for line in result.err.splitlines() if "not saved" in line]
    assert line.startswith("warning: iter 8: ")
    # the records of 25 iterations need more than the rest of the last page of the file
    assert len(lines(result.err, "warning: metrics.jsonl")) == (0 if left else 1)
    saved = column(disk / "run", "checkpoint", "iter")
    assert saved[0] == 4
    assert not [it for it in saved if 4 < it < 30]
    train_tiny(tokens, tmp_path / "straight", **options)
    assert_same_run(tmp_path / "straight", disk / "run", 40)


def test_records_that_a_disk_refused_to_the_end_are_in_the_checkpoint(
    tokens, straight, make_disk, tmp_path
):
    """metrics.jsonl alone is on the full disk. A resume makes a new file in out_dir of it."""
    disk, out_dir = make_disk(PAGE), tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
    with at_update(7, lambda: signal.raise_signal(signal.SIGTERM)):
        stopped = run_tiny(tokens, out_dir)
    assert stopped.code == 128 + signal.SIGTERM
    assert column(out_dir, "step", "iter") != list(range(7))
    train_tiny(tokens, out_dir, init_from="resume")
    assert_same_run(straight, out_dir, 8)


def test_a_failed_save_is_tried_again_within_a_minute(tokens, make_disk):
    """Iterations of 20 seconds, and the next regular save is far away."""
    disk, clock = make_disk(1 << 20), Clock()

    def act(n, optimizer):
        clock.ahead += 20
        if n == 10:
            fill(disk)
        if n == 12:
            free(disk)

    options = dict(max_iters=21, eval_interval=100, checkpoint_interval=10)
    with before_updates(act), clock.turned():
        train_tiny(tokens, disk / "run", **options)
    first, *others = column(disk / "run", "checkpoint", "iter")
    assert 11 <= first <= 12 + 3
    assert others == [20, 21]


@pytest.mark.parametrize("begins, best_there", [("full", 8), ("with room", 4)])
def test_the_last_save_waits_until_there_is_room(begins, best_there, tokens, straight, make_disk):
    disk = make_disk(1 << 20)

    def look():
        if clock.sleeps > 150:  # each of a second, and more than one try
            free(disk)

    clock = Clock(look)
    if begins == "full":
        fill(disk)
        free(disk, 64 << 10)  # for the log
    with at_update(5, lambda: fill(disk)), clock.turned():
        result = train_tiny(tokens, disk / "run")
    assert clock.sleeps > 150
    assert lines(result.err, "warning: iter 8:")
    assert same(checkpoint(disk / "run", 8)["model"], checkpoint(straight, 8)["model"])
    assert column(disk / "run", "step", "iter", "loss") == column(straight, "step", "iter", "loss")
    assert best_iter(disk / "run") == best_there


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_room_and_the_run_can_be_resumed(
    number, tokens, straight, make_disk
):
    disk = make_disk(1 << 20)
    # only one, because a second signal would end this process
    clock = Clock(lambda: signal.raise_signal(number) if clock.sleeps == 5 else None)
    with at_update(6, lambda: fill(disk)), clock.turned():
        result = run_tiny(tokens, disk / "run")
    assert clock.sleeps == 5
    assert result.code == 1
    (line,) = lines(result.err, "error:")
    assert "--init_from=resume" in line
    assert str(disk / "run" / "ckpt-00000004.pt") in line
    assert checkpoints(disk / "run") == [4]
    assert not leftovers(disk / "run")
    free(disk)
    train_tiny(tokens, disk / "run", init_from="resume")
    assert_same_run(straight, disk / "run", 8)


def test_a_save_that_is_refused_is_tried_again(tokens, straight, tmp_path):
    """A missing permission, or a network share that is away for a while."""
    replace, refused = os.replace, []

    def refuse(source, target):
        if Path(target).name == "ckpt-00000008.pt" and len(refused) < 3:
            refused.append(target)
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        replace(source, target)

    with mock.patch("os.replace", refuse), Clock().turned():
        result = train_tiny(tokens, tmp_path / "run")
    assert len(refused) == 3
    assert "Permission denied" in result.err
    assert not leftovers(tmp_path / "run")
    assert_same_run(straight, tmp_path / "run", 8)


@pytest.mark.parametrize("always", [True, False])
def test_the_best_is_the_best_that_is_on_the_disk(always, tokens, make_disk):
    """The save at the best evaluation, 4, fails. That at 6 is better than all that are saved."""
    disk = make_disk(1 << 20)

    def act(n, optimizer):
        if n == 4:
            fill(disk)
        if n == 6:
            free(disk)

    options = dict(eval_interval=2, max_iters=7, always_save_checkpoint=always)
    with before_updates(act):
        train_tiny(tokens, disk / "run", **options)
    losses = dict(column(disk / "run", "eval", "iter", "val_loss"))
    assert losses[4] < losses[6] < losses[2]
    assert [it for it in column(disk / "run", "checkpoint", "iter") if it < 7] == [2, 6]
    assert best_iter(disk / "run") == 6


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("worse_later", [True, False])
def test_a_disk_with_the_room_that_the_page_names_is_enough(
    worse_later, links, tokens, straight, make_disk
):
    """Of keep_checkpoints=2 and best.pt: three files, and one more on a disk without hard links."""
    size = (straight / "ckpt-00000008.pt").stat().st_size
    disk = make_disk((3 if links else 4) * size + (48 << 10))
    options = dict(eval_interval=2, max_iters=10) | ({} if worse_later else FALLING)
    refusal = OSError(errno.EPERM, "Operation not permitted")
    with mock.patch("os.link", os.link if links else mock.Mock(side_effect=refusal)):
        with no_wait():
            train_tiny(tokens, disk / "run", **options)
    assert column(disk / "run", "checkpoint", "iter") == [2, 4, 6, 8, 10]
    assert checkpoints(disk / "run") == [8, 10]
    assert best_iter(disk / "run") == best_logged(disk / "run")
    assert (best_iter(disk / "run") == 10) != worse_later


def test_a_disk_too_full_to_rewrite_the_log_does_not_stop_a_resume(tokens, straight, make_disk):
    disk = make_disk(1 << 20)
    train_tiny(tokens, disk / "run", max_iters=4)
    fill(disk)
    with at_update(2, lambda: free(disk)):
        train_tiny(tokens, disk / "run", init_from="resume")
    assert same(checkpoint(disk / "run", 8)["model"], checkpoint(straight, 8)["model"])


@pytest.mark.parametrize("files, warned", [(2, True), (4, False)])
def test_a_disk_too_small_for_the_run_is_said_at_the_start(
    files, warned, tokens, straight, make_disk
):
    size = (straight / "ckpt-00000008.pt").stat().st_size
    result = train_tiny(tokens, make_disk(files * size) / "run", max_iters=1)
    assert bool([line for line in lines(result.err, "warning:") if "disk" in line]) == warned


# -----------------------------------------------------------------------------
# Death at any moment


def folders_at_every_disk_call(tokens: Path, out_dir: Path, copies: Path, **changes) -> list[Path]:
    """
    Copies of out_dir, as it is before each call of a run that changes the disk. This is what the
    run leaves if it is killed there. Of two that differ only in the length of log.txt or of a file
    that is not complete yet, there is one copy.
    """
    states = {}

    def look(name):
        if not out_dir.exists():
            return
        state = []
        for path in sorted(out_dir.iterdir()):
            begun = path.suffix == ".tmp" or path.name == "log.txt"
            state.append((path.name, bool(path.stat().st_size) if begun else path.read_bytes()))
        if tuple(state) not in states:
            states[tuple(state)] = copies / str(len(states))
            shutil.copytree(out_dir, states[tuple(state)])

    with before_disk_calls(look):
        train_tiny(tokens, out_dir, **changes)
    return [*states.values()]


@pytest.mark.parametrize("begins, ends", [(0, 2), (2, 6)])
def test_death_at_any_disk_call_costs_no_more_than_the_iterations_since_the_last_save(
    begins, ends, tokens, tmp_path
):
    """From scratch, and resumed with a damaged newest file. 4 is the best, so best.pt stays."""
    options = dict(eval_interval=2, max_iters=6, keep_checkpoints=1)
    train_tiny(tokens, tmp_path / "straight", **options)
    options |= dict(init_from="auto")
    if begins:
        train_tiny(tokens, tmp_path / "run", **options | dict(max_iters=begins))
        (tmp_path / "run" / "ckpt-00000003.pt").write_bytes(b"cut")
    folders = folders_at_every_disk_call(
        tokens, tmp_path / "run", tmp_path / "killed", **options | dict(max_iters=ends)
    )
    assert len(folders) > 12
    for folder in folders:
        newest = max(it for it in [0, *checkpoints(folder)] if it != 3)
        train_tiny(tokens, folder, **options)
        if newest < 6:
            assert column(folder, "start", "iter")[-1] == newest
        assert_same_run(tmp_path / "straight", folder, 6)
        assert best_iter(folder) == best_logged(folder) == 4
        assert checkpoints(folder)[-1] == 6
        assert not leftovers(folder)


def test_a_save_that_was_killed_leaves_the_one_before_and_its_remains_go(
    tokens, straight, tmp_path
):
    script = planned(tmp_path, ("save", 2, "SIGKILL"))
    process = start(*script, *flags(**TINY, dataset=tokens, out_dir=tmp_path / "run"))
    assert finish(process).code == -signal.SIGKILL
    assert leftovers(tmp_path / "run")
    for key in ("model", "optimizer", "rng", "progress"):
        assert same(checkpoint(tmp_path / "run", 4)[key], checkpoint(straight, 4)[key])
    mine = tmp_path / "run" / "notes.tmp"
    mine.write_text("mine")
    train_tiny(tokens, tmp_path / "run", init_from="auto")
    assert leftovers(tmp_path / "run") == [mine]
    assert_same_run(straight, tmp_path / "run", 8)


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_run_goes_on(
    tokens, tmp_path
):
    """A killed process does not lose what the system holds in memory; a power cut does."""
    calls = []

    def sync(file):
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        calls.append("folder" if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size))

    replace = os.replace

    def rename(source, target):
        found = os.stat(source)
        if Path(target).name.startswith(("ckpt-", "metrics.jsonl")):
            calls.append(("rename", found.st_ino, found.st_size))
        replace(source, target)

    with mock.patch("os.fsync", sync), mock.patch("os.replace", rename):
        train_tiny(tokens, tmp_path / "run")
        train_tiny(tokens, tmp_path / "run", max_iters=12, init_from="resume")
    renames = [n for n, call in enumerate(calls) if call[0] == "rename"]
    # at 4, 8 and 12, and the log of the first launch
    assert len(renames) == 4
    for n in renames:
        assert calls[n - 1] == calls[n][1:]
        assert calls[n + 1] == "folder"


# -----------------------------------------------------------------------------
# Damaged files


def flipped(content: bytes, place: int) -> bytes:
    damaged = bytearray(content)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def replace_newest(out_dir: Path, content: bytes) -> None:
    """Without a change of best.pt, which may be a link to it."""
    newest = out_dir / f"ckpt-{checkpoints(out_dir)[-1]:08}.pt"
    newest.unlink()
    newest.write_bytes(content)


def test_no_flipped_bit_reaches_a_run(tokens, straight, tmp_path):
    """
    Every one costs the iterations since the checkpoint before, except between the records of the
    file, where it changes nothing that is read.
    """
    content = (straight / "ckpt-00000008.pt").read_bytes()
    noticed = 0
    for place in random.Random(0).sample(range(8 * len(content)), 14):
        out_dir = tmp_path / str(place)
        shutil.copytree(straight, out_dir)
        replace_newest(out_dir, flipped(content, place))
        result = train_tiny(tokens, out_dir, init_from="auto")
        noticed += "ckpt-00000008.pt" in result.err
        assert_same_run(straight, out_dir, 8)
    assert noticed >= 10


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["empty", "half", "a byte less"])
def test_a_newest_file_that_is_cut_costs_one_interval(share, tokens, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    content = (straight / "ckpt-00000008.pt").read_bytes()
    replace_newest(tmp_path / "run", content[: round(share * (len(content) - 1))])
    result = train_tiny(tokens, tmp_path / "run", init_from="resume")
    assert "ckpt-00000008.pt" in result.err
    assert column(tmp_path / "run", "start", "iter")[-1] == 4
    assert_same_run(straight, tmp_path / "run", 8)


@pytest.mark.parametrize("init_from", ["auto", "resume", "scratch"])
def test_a_run_whose_checkpoints_are_all_damaged_is_never_started_anew(
    init_from, tokens, straight, tmp_path
):
    shutil.copytree(straight, tmp_path / "run")
    for path in (tmp_path / "run").glob("ckpt-*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    before = contents(tmp_path / "run")
    result = run_tiny(tokens, tmp_path / "run", init_from=init_from)
    assert result.code == 2
    assert len(lines(result.err, "error:")) == 1
    assert contents(tmp_path / "run") == before


def test_a_disk_that_damages_files_is_noticed_at_the_first_save(tokens, tmp_path):
    """It is read back then, and not when it is needed."""
    replace = os.replace

    def damage(source, target):
        replace(source, target)
        if Path(target).name.startswith("ckpt-"):
            content = Path(target).read_bytes()
            Path(target).write_bytes(flipped(content, 4 * len(content)))

    with mock.patch("os.replace", damage):
        result = run_tiny(tokens, tmp_path / "run")
    assert result.code != 0
    (line,) = lines(result.err, "error:")
    assert "ckpt-00000004.pt" in line
    assert column(tmp_path / "run", "step", "iter") == [0, 1, 2, 3]


def test_no_code_in_a_checkpoint_runs(tokens, tmp_path):
    marker = tmp_path / "code ran"

    class Evil:
        def __reduce__(self):
            return os.makedirs, (str(marker), 0o777, True)

    out_dir = tmp_path / "run"
    train_tiny(tokens, out_dir, max_iters=4)
    state = checkpoint(out_dir, 4)
    for path in out_dir.glob("*.pt"):
        torch.save(state | dict(config=Evil(), progress=Evil()), path)
    torch.load(path, weights_only=False)
    marker.rmdir()  # so the code is there, and would run
    starts = [("resume", out_dir), ("auto", out_dir), (out_dir / "best.pt", tmp_path / "new")]
    for init_from, folder in starts:
        result = run_tiny(tokens, folder, init_from=init_from)
        assert result.code == 2
        assert len(lines(result.err, "error:")) == 1
        assert not marker.exists()


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tokens, tmp_path):
    def lose(n, optimizer):
        if n == 6:
            optimizer.param_groups[0]["params"][0].data[0, 0] = torch.inf

    with after_updates(lose):
        result = run_tiny(tokens, tmp_path / "run", keep_checkpoints=1)
    assert result.code == 1
    assert len(lines(result.err, "error:")) == 1
    assert checkpoints(tmp_path / "run") == [4]


# -----------------------------------------------------------------------------
# Shards that cannot be read


def cut(shard: Path) -> None:
    os.truncate(shard, 1024)


def invalid(shard: Path) -> None:
    """Ids outside the vocabulary, which ends with 60."""
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(b"\x3d\x00" * ((size - 1024) // 2))


@pytest.mark.parametrize("harm", [Path.unlink, cut, invalid])
@pytest.mark.parametrize("moment", ["val in an evaluation", "train in an evaluation", "train"])
def test_a_shard_that_cannot_be_read_ends_the_run_with_all_iterations_saved(
    moment, harm, tokens, tmp_path
):
    data, out_dir = tmp_path / "tokens", tmp_path / "run"
    shutil.copytree(tokens, data)
    split, _, evaluates = moment.partition(" ")
    options = dict(max_iters=12, eval_interval=4 if evaluates else 100, eval_tokens=400)
    train_tiny(data, tmp_path / "straight", **options)

    def spoil():
        for shard in data.glob(f"{split}_*.bin"):
            harm(shard)

    with at_update(2, spoil):
        result = run_tiny(data, out_dir, **options)
    assert result.code == 1
    (line,) = lines(result.err, "error:")
    assert f"{split}_0" in line
    assert "Traceback" not in result.err
    (saved,) = checkpoints(out_dir)
    assert saved == column(out_dir, "step", "iter")[-1] + 1
    assert saved == 4 if evaluates else 2 <= saved < 12
    shutil.copytree(tokens, data, dirs_exist_ok=True)
    train_tiny(data, out_dir, init_from="resume", **options)
    assert_same_run(tmp_path / "straight", out_dir, 12)


def test_a_shard_is_trained_on_up_to_what_cannot_be_read(tmp_path):
    """Which is found out earlier, as a thread reads ahead."""
    data = write_tokens(tmp_path / "tokens", [1200], [250])
    options = dict(eval_tokens=16, eval_interval=10**6, seed=5)
    *_, eleventh = itertools.islice(plain.batches(data, TINY | options), 11)
    ids = plain.split(data, "train")
    (place,) = (n for n in range(len(ids) - 16) if (ids[n : n + 17] == eleventh[0]).all())

    def spoil():
        with open(data / "train_000001.bin", "r+b") as file:
            file.seek(1024 + 2 * (place + 8))
            file.write(b"\xff\xff")

    with at_update(1, spoil):
        result = run_tiny(data, tmp_path / "run", **options | dict(max_iters=12))
    assert result.code == 1
    assert checkpoints(tmp_path / "run") == [10]
    assert column(tmp_path / "run", "step", "iter") == [*range(10)]


# -----------------------------------------------------------------------------
# Ranks that die


RANKS = dict(gradient_accumulation_steps=2, dropout=0.0, max_iters=20, lr_decay_iters=20)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_peer_has_died_says_so_and_ends(victim, tokens, tmp_path):
    script = planned(tmp_path, ("update", 8, "SIGKILL"), rank=victim)
    options = TINY | RANKS | dict(dataset=tokens, out_dir=tmp_path / "run")
    processes = start_ranks(2, *flags(**options), script=script)
    # torch's own patience is ten minutes
    results = finish_ranks(processes, timeout=30)
    other = results[1 - victim]
    assert results[victim].code == -signal.SIGKILL
    assert other.code > 0
    (line,) = lines(other.err, "error:")
    assert "rank" in line
    assert "Traceback" not in other.err


def test_ranks_that_are_restarted_go_on_from_the_checkpoint(tokens, tmp_path):
    """As torchrun --max-restarts does it: the same command in the same environment."""
    options = TINY | RANKS | dict(dataset=tokens, init_from="auto", checkpoint_interval=3)
    arguments = flags(**options, out_dir=tmp_path / "run")
    script = planned(tmp_path, ("update", 8, "SIGKILL"), rank=1)
    killed = start_ranks(2, *arguments, script=script, TORCHELASTIC_RESTART_COUNT="0")
    assert all(result.code != 0 for result in finish_ranks(killed))
    assert checkpoints(tmp_path / "run")[-1] in (6, 7)
    results = finish_ranks(start_ranks(2, *arguments, TORCHELASTIC_RESTART_COUNT="1"))
    assert [result.code for result in results] == [0, 0], results
    train(**options, out_dir=tmp_path / "alone")
    # two ranks sum in another order than one process
    for kind, name in (("step", "loss"), ("eval", "val_loss")):
        both = column(tmp_path / "run", kind, "iter", name)
        alone = column(tmp_path / "alone", kind, "iter", name)
        assert [it for it, _ in both] == [it for it, _ in alone]
        assert [x for _, x in both] == pytest.approx([x for _, x in alone], abs=1e-4)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_has_died(tokens, tmp_path):
    """Its store outlives the restart, with the addresses of the dead processes."""
    options = TINY | RANKS | dict(dataset=tokens, init_from="auto", checkpoint_interval=3)
    script = planned(tmp_path, ("update", 8, "SIGKILL"), rank=1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "--max-restarts=1", *script, *flags(**options, out_dir=tmp_path / "run")]
    result = finish(start(*command, GLOO_SOCKET_IFNAME="lo"))
    assert result.code == 0, result.err
    assert column(tmp_path / "run", "start", "iter")[-1] in (6, 7)
    assert column(tmp_path / "run", "step", "iter") == [*range(20)]


# -----------------------------------------------------------------------------
# The folder, and who else is in it


def test_a_second_run_in_a_folder_is_refused_and_disturbs_nothing(tokens, tmp_path):
    out_dir = tmp_path / "run"
    options = FOREVER | dict(checkpoint_interval=5)
    first = start_tiny(tokens, out_dir, **options)
    wait_for_line(first, "iter 9:")
    for init_from in ("scratch", "auto", "resume"):
        result = run_tiny(tokens, out_dir, **options | dict(init_from=init_from, max_iters=3))
        assert result.code == 2
        assert len(lines(result.err, "error:")) == 1
    # reading is free
    train_tiny(tokens, out_dir, **options | dict(init_from="resume", eval_only=True))
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 143
    (end,) = records(out_dir, "end")
    assert column(out_dir, "step", "iter") == [*range(end["iters"])]
    assert len(records(out_dir, "start")) == 1
    assert checkpoint(out_dir, end["iters"])


def test_a_dead_run_does_not_hold_the_folder(tokens, tmp_path):
    first = start_tiny(tokens, tmp_path / "run", **FOREVER | dict(checkpoint_interval=5))
    wait_for_line(first, "iter 9:")
    first.kill()
    finish(first)
    newest = checkpoints(tmp_path / "run")[-1]
    train_tiny(tokens, tmp_path / "run", init_from="auto", max_iters=newest + 1)


def test_of_two_runs_that_start_together_one_has_the_folder(tokens, tmp_path):
    runs = {seed: start_tiny(tokens, tmp_path / "run", seed=seed) for seed in (1, 2)}
    results = {seed: finish(process) for seed, process in runs.items()}
    assert sorted(result.code for result in results.values()) == [0, 2]
    (seed,) = (seed for seed in results if results[seed].code == 0)
    assert checkpoint(tmp_path / "run", 8)["config"]["seed"] == seed
    assert [r["config"]["seed"] for r in records(tmp_path / "run", "start")] == [seed]
    assert column(tmp_path / "run", "step", "iter") == [*range(8)]


USERS_FILES = [
    *("log.txt", "loss.png", "metrics.jsonl", "lock"),
    *("best.pt", "notes.txt", "notes.tmp", "ckpt-notes.pt"),
]


@pytest.mark.parametrize("init_from", ["scratch", "auto"])
@pytest.mark.parametrize("name", USERS_FILES)
def test_a_fresh_run_keeps_every_file_that_it_did_not_write(name, init_from, tokens, tmp_path):
    """Under its name or another one; the run may also refuse the folder."""
    content = b"what a user has kept here\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    assert run_tiny(tokens, tmp_path / "run", init_from=init_from).code in (0, 2)
    assert content in contents(tmp_path / "run").values()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept_and_the_best(keep, tokens, tmp_path):
    there = set()
    options = dict(eval_interval=2, max_iters=10, keep_checkpoints=keep)
    with before_updates(lambda n, optimizer: there.add(len(checkpoints(tmp_path / "run")))):
        train_tiny(tokens, tmp_path / "run", **options)
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 8, 10][-keep:]
    assert max(there) == keep
    assert best_iter(tmp_path / "run") == 4


def test_a_folder_that_is_deleted_under_the_run_is_made_again(tokens, straight, tmp_path):
    out_dir = tmp_path / "run"
    with at_update(6, lambda: shutil.rmtree(out_dir)), no_wait():
        train_tiny(tokens, out_dir)
    assert same(checkpoint(out_dir, 8)["model"], checkpoint(straight, 8)["model"])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_share_that_cannot_sync_a_folder_saves(number, tokens, straight, tmp_path):
    def sync(file):
        if isinstance(file, int) and stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))

    with mock.patch("os.fsync", sync):
        train_tiny(tokens, tmp_path / "run")
    assert_same_run(straight, tmp_path / "run", 8)


def test_a_disk_without_locks_is_warned_of_once(tokens, straight, tmp_path):
    """As Lustre without its option, or NFS without its daemon."""
    refusal = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("fcntl.lockf", side_effect=refusal):
        with mock.patch("fcntl.flock", side_effect=refusal):
            result = train_tiny(tokens, tmp_path / "run")
    assert_same_run(straight, tmp_path / "run", 8)
    assert len([line for line in lines(result.err, "warning:") if "locks" in line]) == 1
