"""
Disks with no room left: no run ends with weights that are nowhere. The disks are real, a tmpfs of a
few megabytes for each test.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers import flags, needs_signals, records, run_here, run_process, start_process
from test_saving import best_iter, scripted_losses

import train
from common.console import UserError
from training import checkpoint

# a checkpoint of 5 MB, beside which logs and the least free space that a save asks for are small
BIG = dict(n_embd=128, eval_interval=2)
WORSE = 9.0, 5.0, 6.0, 7.0, 8.0  # losses of evaluations: the best one is the first that is saved
BETTER = 9.0, 8.0, 7.0, 6.0, 5.0


@pytest.fixture(scope="module")
def size(dataset, tmp_path_factory) -> int:
    """Of a checkpoint, in bytes."""
    out_dir = tmp_path_factory.mktemp("size")
    run_here(dataset, out_dir, **BIG, max_iters=1)
    return (out_dir / "ckpt-00000001.pt").stat().st_size


@pytest.fixture
def make_disk(size, tmp_path):
    """A folder on a disk with room for so many checkpoints, and for logs."""
    mounted = []

    def make(checkpoints: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        room = f"size={checkpoints * size + (3 << 19)}"
        command = ["mount", "-t", "tmpfs", "-o", room, "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs to be root, to mount a disk")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file of somebody else's, which takes all that is free."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            return filler


def names(out_dir: Path) -> list[str]:
    return sorted(p.name for p in out_dir.iterdir() if ".pt" in p.name)


def numbers(out_dir: Path) -> list[int]:
    return [int(p.stem[5:]) for p in checkpoint.list_checkpoints(out_dir)]


def without_links(monkeypatch) -> None:
    def link(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", link)


# Each save writes its temporary file and then waits.
STOPPED_SAVE = (
    "import time, torch, train; from common import console\n"
    "save = torch.save\n"
    "def slow(state, file):\n"
    "    save(state, file)\n    print('written', flush=True)\n    time.sleep(60)\n"
    "torch.save = slow\n"
    "console.run_main(train.main)"
)


def test_what_a_killed_save_left_does_not_take_the_place_of_the_next(
    dataset, make_disk, monkeypatch, capsys
):
    """Two checkpoints, best.pt and the one being written: there is room for no fifth."""
    out_dir = make_disk(4) / "run"
    scripted_losses(monkeypatch, *WORSE)
    run_here(dataset, out_dir, **BIG, lr_decay_iters=14)
    assert numbers(out_dir) == [6, 8] and best_iter(out_dir) == 2
    options = BIG | dict(eval_interval=10**6, checkpoint_interval=2, max_iters=14)
    resume = flags(dataset, out_dir, **options, init_from="resume")
    process = start_process("-c", STOPPED_SAVE, *resume)
    while process.stdout.readline() != "written\n":
        assert process.poll() is None
    process.kill()  # -9
    process.communicate()
    assert any(name.endswith(".tmp") for name in names(out_dir))
    capsys.readouterr()
    scripted_losses(monkeypatch, 9.0)
    stop_waiting(monkeypatch)
    assert train.main(resume) == 0
    assert "not saved" not in capsys.readouterr().err
    assert names(out_dir) == ["best.pt", "ckpt-00000012.pt", "ckpt-00000014.pt"]


@pytest.mark.parametrize("losses", [WORSE, BETTER])
def test_a_disk_without_links_needs_no_more_room(losses, dataset, make_disk, monkeypatch, capsys):
    out_dir = make_disk(4) / "run"
    without_links(monkeypatch)
    scripted_losses(monkeypatch, *losses)
    stop_waiting(monkeypatch)
    assert run_here(dataset, out_dir, **BIG) == 0
    assert "not saved" not in capsys.readouterr().err
    assert names(out_dir) == ["best.pt", "ckpt-00000006.pt", "ckpt-00000008.pt"]
    assert best_iter(out_dir) == (8 if losses == BETTER else 2)


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("losses", [WORSE, BETTER])
def test_with_too_little_room_and_no_links_nothing_is_lost_that_is_saved(
    losses, room, dataset, make_disk, monkeypatch
):
    """With room for one file, the first one that was saved stays until there is more."""
    out_dir = make_disk(room) / "run"
    without_links(monkeypatch)
    scripted_losses(monkeypatch, *losses)
    stop_waiting(monkeypatch)
    options = BIG | dict(keep_checkpoints=1)
    if room < 3:
        with pytest.raises(UserError, match="checkpoint 8 is not saved: .*resume goes on from"):
            run_here(dataset, out_dir, **options)
        assert numbers(out_dir)[0] == 2
    else:
        assert run_here(dataset, out_dir, **options) == 0
        assert numbers(out_dir)[-1] == 8
    best = 8 if losses == BETTER and room == 3 else 2
    held = [torch.load(out_dir / name, weights_only=True) for name in names(out_dir)]
    assert best in [state["progress"]["iter_num"] for state in held]
    assert not list(out_dir.glob("*.tmp"))


def stop_waiting(monkeypatch) -> None:
    """Send SIGTERM in the first wait for room."""
    wait = train.StopSignals.wait

    def hurry(signals, seconds):
        if seconds:
            signal.raise_signal(signal.SIGTERM)
        return wait(signals, seconds)

    monkeypatch.setattr(train.StopSignals, "wait", hurry)


def test_older_checkpoints_go_before_the_new_one_is_written(dataset, make_disk, monkeypatch):
    """Two checkpoints, the one of them being written, and best.pt: room for three is enough."""
    out_dir = make_disk(3) / "run"
    scripted_losses(monkeypatch, *WORSE)
    stop_waiting(monkeypatch)
    assert run_here(dataset, out_dir, **BIG) == 0
    assert names(out_dir) == ["best.pt", "ckpt-00000006.pt", "ckpt-00000008.pt"]
    assert best_iter(out_dir) == 2


@pytest.mark.parametrize("room, warned", [(2, True), (4, False)])
def test_a_disk_too_small_for_the_run_is_said_before_the_first_iteration(
    room, warned, dataset, make_disk, capsys
):
    run_here(dataset, make_disk(room) / "run", **BIG, max_iters=1)
    output = capsys.readouterr()
    assert ("disk" in output.err and "3 checkpoints" in output.err) == warned


def test_a_run_that_starts_on_a_full_disk_saves_once_there_is_room(
    dataset, make_disk, monkeypatch, capsys
):
    disk = make_disk(3)
    filler = fill(disk)
    with open(filler, "r+b") as file:  # 64 kB for the log
        file.truncate(filler.stat().st_size - (1 << 16))
    monkeypatch.setattr(train.StopSignals, "wait", lambda signals, seconds: freed(filler, seconds))
    assert run_here(dataset, disk / "run", **BIG) == 0
    err = capsys.readouterr().err
    assert "iter 2: checkpoint 2 is not saved: " in err
    assert [r["iter"] for r in records(disk / "run", "checkpoint")] == [8]
    assert err.count("iter 8: checkpoint 8 is not saved: ") == 1


def freed(filler: Path, seconds: int) -> bool:
    if seconds:
        filler.unlink()
    return False


@needs_signals
def test_a_limit_that_stays_is_said_and_a_signal_ends_the_wait(dataset, tmp_path):
    """
    The kernel refuses to let a file grow past 20 kB. The oldest checkpoints have made room by then,
    the newest one stays.
    """
    run_here(dataset, tmp_path, max_iters=4, keep_checkpoints=9, eval_interval=2)
    limited = (
        "import resource, time, train; from common import console\n"
        "sleep, train.RETRY_SECONDS = time.sleep, 600\n"
        "time.sleep = lambda seconds: sleep(seconds / 10)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "console.run_main(train.main)"
    )
    process = start_process("-c", limited, *flags(dataset, tmp_path, init_from="resume"))
    for line in process.stderr:
        if "trying again each minute" in line:
            break
    assert "checkpoint 8 is not saved: File too large" in line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: checkpoint 8 is not saved: File too large; ")
    assert numbers(tmp_path) == [4] and "best.pt" in names(tmp_path)


def test_a_last_save_without_permission_waits_for_it(dataset, tmp_path, monkeypatch, script):
    """A chmod, or a disk that is mounted again, and nothing is lost."""
    save, tries = checkpoint.save, []

    def refused(state, path):
        tries.append(path.name)
        if len(tries) == 2:
            raise PermissionError(13, "Permission denied")
        return save(state, path)

    monkeypatch.setattr(checkpoint, "save", refused)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    code, _, err = script(train.main, *flags(dataset, tmp_path))
    assert code == 0 and tries == ["ckpt-00000004.pt", "ckpt-00000008.pt", "ckpt-00000008.pt"]
    assert err[0].startswith(
        "warning: iter 8: checkpoint 8 is not saved: Permission denied; trying "
    )


# -----------------------------------------------------------------------------
# best.pt, and the first save


def test_best_is_put_right_after_a_kill_between_the_save_and_its_mark(
    dataset, tmp_path, monkeypatch
):
    options = dict(eval_interval=2, keep_checkpoints=1)
    scripted_losses(monkeypatch, *BETTER)
    run_here(dataset, tmp_path, **options, max_iters=4, lr_decay_iters=8)
    older = torch.load(tmp_path / "best.pt", weights_only=True)
    older["progress"]["iter_num"] = 2
    (tmp_path / "best.pt").unlink()
    torch.save(older, tmp_path / "best.pt")
    os.utime(tmp_path / "best.pt", (0, 0))
    scripted_losses(monkeypatch, 8.0, 8.0)
    run_here(dataset, tmp_path, **options, max_iters=8, init_from="resume")
    assert best_iter(tmp_path) == 4


def test_the_first_save_imports_nothing(dataset, tmp_path):
    """The folder that it would be imported from may have been upgraded or removed by then."""
    watched = (
        "import sys, train\n"
        "save = train.save\n"
        "def watch(*arguments, **named):\n"
        "    before = set(sys.modules)\n"
        "    saved = save(*arguments, **named)\n"
        "    print('imported', sorted(set(sys.modules) - before))\n"
        "    return saved\n"
        "train.save = watch\n"
        "train.main(sys.argv[1:])"
    )
    options = dict(max_iters=2, eval_interval=100, checkpoint_interval=1, log_interval=100)
    arguments = flags(dataset, tmp_path, **options)
    code, out, err = run_process("-c", watched, *arguments, only_torch=True)
    assert code == 0 and re.findall(r"^imported (.*)$", out, re.MULTILINE) == ["[]", "[]"], (
        out + err
    )
