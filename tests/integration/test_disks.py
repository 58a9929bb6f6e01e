"""
Run with a disk that fills up or damages files, with shards that disappear, kills during a save, a
second run in the folder, or a user's own files in it. A run keeps the user's files, and loses at
most the iterations since its last intact checkpoint.

A full disk is a real tmpfs. Other faults are injected at calls of torch and of the system, by
InProcessRun, fault_injection.py and mocks.
"""

import errno
import os
import re
import shutil
import signal
import stat
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from unittest import mock

import pytest
import torch
from cases import slow_but
from fault_injection import fill, free, watched
from program import (
    EVAL,
    ROOT,
    STEP,
    TINY_RUN,
    InProcessRun,
    Result,
    assert_same_run,
    best,
    checkpoint,
    checkpoints,
    column,
    finish,
    flags,
    records,
    run,
    same,
    start,
    train,
    wait_for_line,
)

fcntl = pytest.importorskip("fcntl", reason="disks and signals of POSIX")

TINY = TINY_RUN | dict(
    n_layer=1,
    n_embd=16,
    gradient_accumulation_steps=1,
    max_iters=8,
    lr_decay_iters=12,
    eval_interval=4,
    eval_tokens=160,
    dropout=0.1,
    learning_rate=0.3,
    warmup_iters=6,
)
# the loss falls, so the newest checkpoint is the best
FALLING = dict(learning_rate=0.01, warmup_iters=2)
FOREVER = dict(max_iters=10**6, eval_interval=10**6)


@pytest.fixture(scope="module")
def straight(tokens, tmp_path_factory) -> Path:
    """Train a run that nothing interrupts."""
    out_dir = tmp_path_factory.mktemp("straight")
    train(**TINY, dataset=tokens, out_dir=out_dir)
    return out_dir


def run_tiny(tokens: Path, out_dir: Path, trainer: InProcessRun | None = None, **changes) -> Result:
    trainer = trainer or InProcessRun()
    return trainer.launch(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes)


def train_tiny(*arguments, **named) -> Result:
    result = run_tiny(*arguments, **named)
    assert result.code == 0, result.err
    return result


def start_tiny(tokens: Path, out_dir: Path, **changes):
    return start("train.py", *flags(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes))


def lines(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(beginning)]


def leftovers(out_dir: Path) -> list[Path]:
    return [*out_dir.glob("*.tmp")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def best_iter(out_dir: Path) -> int:
    return best(out_dir)["progress"]["iter_num"]


def best_logged(out_dir: Path) -> int:
    """Return the iteration after 0 with the lowest validation loss in the log."""
    losses = dict(column(out_dir, "eval", "iter", "val_loss"))
    return min((it for it in losses if it), key=losses.get)


# -----------------------------------------------------------------------------
# Full disks


def seems_empty():
    """Make a full disk report free space, as under a quota, so that a write fails midway."""
    statvfs = os.statvfs
    return mock.patch("os.statvfs", lambda path: statvfs("/"))


def no_wait() -> InProcessRun:
    """Return a run that fails the test if it waits for disk space."""
    trainer = InProcessRun(fake_clock=True)
    trainer.at["sleep", None] = lambda: pytest.fail("waits for room")
    return trainer


@pytest.mark.parametrize("noticed, left", [("before", 0), ("in the middle", 20_000)])
def test_a_run_trains_on_while_the_disk_is_full_and_saves_again_when_there_is_room(
    noticed, left, tokens, make_disk, tmp_path
):
    options = dict(max_iters=40, lr_decay_iters=40)
    disk, seen, trainer = make_disk(1 << 20), [], InProcessRun()

    def fill_most():
        fill(disk)
        free(disk, left)

    def look_and_free():
        seen.extend([checkpoints(disk / "run"), leftovers(disk / "run")])
        free(disk)

    trainer.at |= {("update", 6): fill_most, ("update", 31): look_and_free}
    with seems_empty() if noticed == "in the middle" else nullcontext():
        result = train_tiny(tokens, disk / "run", trainer, **options)
    assert seen == [[4], []]
    (line,) = [line for line in result.err.splitlines() if "not saved" in line]
    assert line.startswith("warning: iter 8: ")
    # the records of 25 iterations need more room than is left in the file's last page
    assert len(lines(result.err, "warning: metrics.jsonl")) == (0 if left else 1)
    saved = column(disk / "run", "checkpoint", "iter")
    assert saved[0] == 4
    assert not [it for it in saved if 4 < it < 30]
    train_tiny(tokens, tmp_path / "straight", **options)
    assert_same_run(tmp_path / "straight", disk / "run", 40)


@pytest.mark.parametrize(
    "begins, best_there", slow_but(("full", 8), of=[("full", 8), ("with room", 4)])
)
def test_the_last_save_waits_until_the_disk_has_room(
    begins, best_there, tokens, straight, make_disk
):
    disk, trainer = make_disk(1 << 20), InProcessRun(fake_clock=True)
    trainer.at["update", 5] = lambda: fill(disk)
    trainer.at["sleep", 151] = lambda: free(disk)  # by then it has tried to save more than once
    if begins == "full":
        fill(disk)
        free(disk, 64 << 10)  # for the log
    result = train_tiny(tokens, disk / "run", trainer)
    assert trainer.count["sleep"] > 150
    assert lines(result.err, "warning: iter 8:")
    assert same(checkpoint(disk / "run", 8)["model"], checkpoint(straight, 8)["model"])
    assert column(disk / "run", "step", "iter", "loss") == column(straight, "step", "iter", "loss")
    assert best_iter(disk / "run") == best_there


@pytest.mark.parametrize("number", slow_but(signal.SIGINT, of=[signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_the_wait_for_disk_space_and_the_run_can_be_resumed(
    number, tokens, straight, make_disk
):
    disk, trainer = make_disk(1 << 20), InProcessRun(fake_clock=True)
    trainer.at["update", 6] = lambda: fill(disk)
    # send only one signal, because a second would end this process
    trainer.at["sleep", 5] = lambda: signal.raise_signal(number)
    result = run_tiny(tokens, disk / "run", trainer)
    assert trainer.count["sleep"] == 5
    assert result.code == 1
    (line,) = lines(result.err, "error:")
    assert "--init_from=resume" in line
    assert str(disk / "run" / "ckpt-00000004.pt") in line
    assert checkpoints(disk / "run") == [4]
    assert not leftovers(disk / "run")
    free(disk)
    train_tiny(tokens, disk / "run", init_from="resume")
    assert_same_run(straight, disk / "run", 8)


def is_folder(file) -> bool:
    return isinstance(file, int) and stat.S_ISDIR(os.fstat(file).st_mode)


@pytest.mark.parametrize("always", slow_but(False, of=[True, False]))
def test_best_pt_holds_the_best_model_that_could_be_saved(always, tokens, make_disk):
    """
    Fail the save at iteration 4, which has the lowest loss. Of the saved iterations, 6 is then the
    best.
    """
    disk, trainer = make_disk(1 << 20), InProcessRun()
    trainer.at |= {("update", 4): lambda: fill(disk), ("update", 6): lambda: free(disk)}
    options = dict(eval_interval=2, max_iters=7, always_save_checkpoint=always)
    train_tiny(tokens, disk / "run", trainer, **options)
    losses = dict(column(disk / "run", "eval", "iter", "val_loss"))
    assert losses[4] < losses[6] < losses[2]
    assert [it for it in column(disk / "run", "checkpoint", "iter") if it < 7] == [2, 6]
    assert best_iter(disk / "run") == 6


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("worse_later", slow_but(True, of=[True, False]))
def test_a_run_fits_in_the_disk_space_that_the_docs_name(
    worse_later, links, tokens, straight, make_disk
):
    """
    Leave room for three checkpoints: two to keep, and best.pt. A disk without hard links needs one
    more.
    """
    size = (straight / "ckpt-00000008.pt").stat().st_size
    disk = make_disk((3 if links else 4) * size + (48 << 10))
    options = dict(eval_interval=2, max_iters=10) | ({} if worse_later else FALLING)
    refusal = OSError(errno.EPERM, "Operation not permitted")
    with mock.patch("os.link", os.link if links else mock.Mock(side_effect=refusal)):
        train_tiny(tokens, disk / "run", no_wait(), **options)
    assert column(disk / "run", "checkpoint", "iter") == [2, 4, 6, 8, 10]
    assert checkpoints(disk / "run") == [8, 10]
    assert best_iter(disk / "run") == best_logged(disk / "run")
    assert (best_iter(disk / "run") == 10) != worse_later


def test_a_resumed_run_frees_the_disk_space_of_the_checkpoint_it_started_from(
    tokens, straight, make_disk
):
    """Close the checkpoint after loading it: deleting an open file frees no space."""
    size = (straight / "ckpt-00000008.pt").stat().st_size
    disk = make_disk(3 * size + (48 << 10))
    train_tiny(tokens, disk / "run", eval_interval=2, max_iters=2)
    options = dict(eval_interval=2, max_iters=10, init_from="resume")
    train_tiny(tokens, disk / "run", no_wait(), **options)
    assert column(disk / "run", "checkpoint", "iter") == [2, 4, 6, 8, 10]
    assert best_iter(disk / "run") == 4


def test_a_disk_too_full_to_rewrite_the_log_does_not_stop_a_resume(tokens, straight, make_disk):
    disk = make_disk(1 << 20)
    train_tiny(tokens, disk / "run", max_iters=4)
    fill(disk)
    trainer = InProcessRun()
    trainer.at["update", 2] = lambda: free(disk)
    train_tiny(tokens, disk / "run", trainer, init_from="resume")
    assert same(checkpoint(disk / "run", 8)["model"], checkpoint(straight, 8)["model"])


@pytest.mark.parametrize("files, warned", [(2, True), (4, False)])
def test_warns_at_the_start_if_the_disk_is_too_small_for_the_run(
    files, warned, tokens, straight, make_disk
):
    size = (straight / "ckpt-00000008.pt").stat().st_size
    result = train_tiny(tokens, make_disk(files * size) / "run", max_iters=1)
    assert bool([line for line in lines(result.err, "warning:") if "disk" in line]) == warned


def test_a_checkpoint_between_evaluations_has_no_validation_loss(tokens, tmp_path):
    """Save None as the checkpoint's loss, because the last evaluation was of other weights."""
    train_tiny(tokens, tmp_path, checkpoint_interval=3, keep_checkpoints=9)
    losses = dict(column(tmp_path, "eval", "iter", "val_loss"))
    found = {it: checkpoint(tmp_path, it)["val_loss"] for it in checkpoints(tmp_path)}
    assert [it for it, loss in found.items() if loss is None] == [3, 6]
    assert found[4] == pytest.approx(losses[4])
    assert found[8] == pytest.approx(losses[8])


# -----------------------------------------------------------------------------
# Death at any moment


def folders_before_disk_calls(tokens: Path, out_dir: Path, copies: Path, **changes) -> list[Path]:
    """
    Return copies of out_dir, made before each call that program.before_disk_calls() watches. A kill
    at that moment would leave the same files. States that differ only in the contents of a
    non-empty log.txt or unfinished file share a copy.
    """
    states = {}

    def look():
        if not out_dir.exists():
            return
        state = []
        for path in sorted(out_dir.iterdir()):
            begun = path.suffix == ".tmp" or path.name == "log.txt"
            state.append((path.name, bool(path.stat().st_size) if begun else path.read_bytes()))
        if tuple(state) not in states:
            states[tuple(state)] = copies / str(len(states))
            shutil.copytree(out_dir, states[tuple(state)])

    trainer = InProcessRun()
    trainer.at["disk", None] = look
    train_tiny(tokens, out_dir, trainer, **changes)
    return [*states.values()]


@pytest.mark.parametrize("begins, ends", slow_but((2, 6), of=[(0, 2), (2, 6)]))
def test_a_kill_before_a_disk_call_loses_only_the_iterations_since_the_last_save(
    begins, ends, tokens, tmp_path
):
    """
    Start from scratch, or resume a run whose newest checkpoint is damaged. Iteration 4 has the
    lowest loss, so best.pt must still hold it at iteration 6.
    """
    options = dict(eval_interval=2, max_iters=6, keep_checkpoints=1)
    train_tiny(tokens, tmp_path / "straight", **options)
    options |= dict(init_from="auto")
    if begins:
        train_tiny(tokens, tmp_path / "run", **options | dict(max_iters=begins))
        (tmp_path / "run" / "ckpt-00000003.pt").write_bytes(b"cut")
    folders = folders_before_disk_calls(
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


def test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards(tokens, tmp_path):
    """Lose no checkpoint to a power cut, which erases what the system still holds in memory."""
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
    # the checkpoints at 4, 8 and 12, and the log of the first launch
    assert len(renames) == 4
    for n in renames:
        assert calls[n - 1] == calls[n][1:]
        assert calls[n + 1] == "folder"


# -----------------------------------------------------------------------------
# Damaged files


def test_a_disk_that_damages_files_is_noticed_at_the_first_save(tokens, tmp_path):
    """Read the first checkpoint of a launch back right after saving it."""
    replace = os.replace

    def damage(source, target):
        replace(source, target)
        if Path(target).name.startswith("ckpt-"):
            content = bytearray(Path(target).read_bytes())
            content[len(content) // 2] ^= 1
            Path(target).write_bytes(content)

    with mock.patch("os.replace", damage):
        result = run_tiny(tokens, tmp_path / "run")
    assert result.code != 0
    (line,) = lines(result.err, "error:")
    assert "ckpt-00000004.pt" in line
    assert column(tmp_path / "run", "step", "iter") == [0, 1, 2, 3]


# -----------------------------------------------------------------------------
# Shards that cannot be read


def cut(shard: Path) -> None:
    os.truncate(shard, 1024)


def invalid(shard: Path) -> None:
    """Replace all ids by 61. The last id of the vocabulary is 60."""
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(b"\x3d\x00" * ((size - 1024) // 2))


HARMS = [
    ("val in an evaluation", cut),
    ("train in an evaluation", invalid),
    ("train", Path.unlink),
    ("train", cut),
    ("train", invalid),
]


@pytest.mark.parametrize("moment, harm", slow_but(HARMS[0], HARMS[-1], of=HARMS))
def test_an_unreadable_shard_ends_the_run_after_saving_all_its_iterations(
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

    trainer = InProcessRun()
    trainer.at["update", 2] = spoil
    result = run_tiny(data, out_dir, trainer, **options)
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


@pytest.mark.parametrize("then", ["back", "signal"])
def test_a_run_waits_for_data_that_are_away_until_they_are_back_or_a_signal_comes(
    then, tokens, straight, tmp_path
):
    """The evaluation at iteration 4 finds its folder renamed, waits 1 second and then would 10."""
    data, away, out_dir = tmp_path / "tokens", tmp_path / "away", tmp_path / "run"
    shutil.copytree(tokens, data)
    trainer, acts = InProcessRun(), dict(back=(0.3, lambda: away.rename(data)))
    acts["signal"] = 1.3, lambda: signal.raise_signal(signal.SIGTERM)

    def leave():
        data.rename(away)
        Timer(*acts[then]).start()

    trainer.at["update", 4] = leave
    began = time.monotonic()
    result = run_tiny(data, out_dir, trainer)
    assert time.monotonic() - began < 9
    assert lines(result.err, "warning:")[0].endswith("trying again in 1 s")
    if then == "back":
        assert result.code == 0
        assert_same_run(straight, out_dir, 8)
    else:
        assert (result.code, checkpoints(out_dir)) == (143, [4])


# -----------------------------------------------------------------------------
# The folder, and who else is in it


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_continues(tokens, tmp_path):
    out_dir = tmp_path / "run"
    options = FOREVER | dict(checkpoint_interval=5)
    first = start_tiny(tokens, out_dir, **options)
    wait_for_line(first, "iter 9:")
    for init_from in ("scratch", "auto", "resume"):
        result = run_tiny(tokens, out_dir, **options | dict(init_from=init_from, max_iters=3))
        assert result.code == 2
        assert len(lines(result.err, "error:")) == 1
    # evaluating the run there is not refused
    train_tiny(tokens, out_dir, **options | dict(init_from="resume", eval_only=True))
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 143
    (end,) = records(out_dir, "end")
    assert column(out_dir, "step", "iter") == [*range(end["iters"])]
    assert len(records(out_dir, "start")) == 1
    assert checkpoint(out_dir, end["iters"])


def test_if_two_runs_start_at_once_in_one_folder_one_trains_and_one_is_refused(tokens, tmp_path):
    runs = {seed: start_tiny(tokens, tmp_path / "run", seed=seed) for seed in (1, 2)}
    results = {seed: finish(process) for seed, process in runs.items()}
    assert sorted(result.code for result in results.values()) == [0, 2]
    (seed,) = (seed for seed in results if results[seed].code == 0)
    assert checkpoint(tmp_path / "run", 8)["config"]["seed"] == seed
    assert [r["config"]["seed"] for r in records(tmp_path / "run", "start")] == [seed]
    assert column(tmp_path / "run", "step", "iter") == [*range(8)]


def test_a_slow_start_is_refused_if_another_run_has_finished_in_the_folder(tokens, tmp_path):
    """Leave the other run's files alone, even if that run began and ended during this start."""
    seed, codes = torch.manual_seed, []

    def overtaken(number):
        if not codes:
            codes.append(finish(start_tiny(tokens, tmp_path / "run", seed=5)).code)
        return seed(number)

    with mock.patch("torch.manual_seed", overtaken):
        result = run_tiny(tokens, tmp_path / "run", init_from="auto")
    assert (codes, result.code) == ([0], 2)
    assert len(lines(result.err, "error:")) == 1
    assert column(tmp_path / "run", "start", "config")[0]["seed"] == 5


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_a_line_and_keeps_its_log(
    tokens, tmp_path
):
    first = start_tiny(tokens, tmp_path / "run", **FOREVER)
    wait_for_line(first, "iter 3:")
    first.kill()
    finish(first)
    log = (tmp_path / "run" / "log.txt").read_bytes()
    result = train_tiny(tokens, tmp_path / "run", init_from="auto")
    (line,) = lines(result.err, "warning:")
    assert "begins at iteration 0" in line and "log.txt.1" in line
    assert (tmp_path / "run" / "log.txt.1").read_bytes() == log
    assert column(tmp_path / "run", "step", "iter") == [*range(8)]


def test_a_checkpoint_named_after_another_iteration_is_refused_with_its_right_name(
    straight, tokens, tmp_path
):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "ckpt-00000008.pt").rename(tmp_path / "run" / "ckpt-00000012.pt")
    result = run_tiny(tokens, tmp_path / "run", init_from="auto")
    assert result.code == 2
    (error,) = lines(result.err, "error:")
    assert "ckpt-00000012.pt: holds iteration 8" in error and "ckpt-00000008.pt" in error


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_a_reader_survives_a_run_that_deletes_the_newest_checkpoint(
    script, straight, tokens, tmp_path
):
    """Delete the newest checkpoint and save another one while the script reads the folder."""
    out_dir = tmp_path / "run"
    shutil.copytree(straight, out_dir)
    (out_dir / "ckpt-00000004.pt").rename(tmp_path / "ckpt-00000004.pt")
    (out_dir / "best.pt").unlink()
    testzip = zipfile.ZipFile.testzip

    def save_another(file):
        if (out_dir / "ckpt-00000008.pt").exists():
            (out_dir / "ckpt-00000008.pt").unlink()
            shutil.copy(tmp_path / "ckpt-00000004.pt", out_dir)
        return testzip(file)

    keys = TINY | dict(dataset=tokens, eval_only=True) if script == "train.py" else {}
    with mock.patch("zipfile.ZipFile.testzip", save_another):
        result = run(script, *flags(**keys, out_dir=out_dir))
    assert "ckpt-00000004.pt" in result.out + result.err
    assert result.code == 0, result.err


def test_a_save_imports_no_module(tokens, tmp_path):
    """Survive an upgrade or removal of the program's folder while a run trains."""
    between_updates = """
        if n > 1:
            print("imported", sorted(set(sys.modules) - before))
        globals()["before"] = set(sys.modules)
    """
    keys = dict(dataset=tokens, out_dir=tmp_path, max_iters=2, checkpoint_interval=1)
    command = [*watched(between_updates), *flags(**TINY | keys | dict(eval_interval=100))]
    result = finish(start(*command, only_torch=True))
    assert lines(result.out, "imported") == ["imported []"], result
    assert checkpoints(tmp_path) == [1, 2]


def test_torch_load_reads_a_checkpoint_with_the_keys_that_the_docs_list(straight):
    page = (ROOT / "docs/internals/checkpoints.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## The order")[0], re.MULTILINE)
    state = torch.load(straight / "ckpt-00000008.pt", weights_only=True)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == state.keys()


USERS_FILES = [
    *("log.txt", "loss.png", "metrics.jsonl"),
    *("best.pt", "notes.txt", "notes.tmp", "ckpt-notes.pt", "metrics.jsonl.mine.tmp"),
]


@pytest.mark.parametrize("name", slow_but("metrics.jsonl", "best.pt", "notes.tmp", of=USERS_FILES))
def test_a_new_run_does_not_delete_a_users_file_in_its_folder(name, tokens, tmp_path):
    """Keep the file under its own or another name, or refuse the folder."""
    content = b"what a user has kept here\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    code = 2 if name.endswith(".pt") else 0
    assert run_tiny(tokens, tmp_path / "run", init_from="auto").code == code
    assert content in contents(tmp_path / "run").values()


@pytest.mark.parametrize("keep", slow_but(2, of=[1, 2, 3]))
def test_a_run_keeps_the_newest_checkpoints_and_the_best(keep, tokens, tmp_path):
    there, trainer = set(), InProcessRun()
    trainer.at["update", None] = lambda: there.add(len(checkpoints(tmp_path / "run")))
    options = dict(eval_interval=2, max_iters=10, keep_checkpoints=keep)
    train_tiny(tokens, tmp_path / "run", trainer, **options)
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 8, 10][-keep:]
    assert max(there) == keep
    assert best_iter(tmp_path / "run") == 4


def lose_handle(path: Path) -> None:
    """Let this process's handle of a file name another one, as if its connection had died."""
    (number,) = (
        fd
        for fd in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)
    )
    with open(os.devnull) as file:
        os.dup2(file.fileno(), int(number))


@pytest.mark.parametrize("back", ["itself", "as a copy", "with a dead handle"])
def test_a_run_goes_on_if_its_folder_was_away_for_a_while(back, tokens, straight, tmp_path):
    """Save nothing below another name. Then lock the folder again, and lose no record."""
    out_dir, away = tmp_path / "run", tmp_path / "away"
    trainer = InProcessRun()

    def come_back():
        shutil.copytree(away, out_dir) if back == "as a copy" else away.rename(out_dir)
        if back == "with a dead handle":
            lose_handle(out_dir / "lock")

    trainer.at["update", 3] = lambda: out_dir.rename(away)
    trainer.at["update", 6] = come_back
    result = run_tiny(tokens, out_dir, trainer)
    assert result.code == 0
    assert len(lines(result.err, "warning: metrics.jsonl")) == 1
    assert len(lines(result.err, "warning: iter 4: checkpoint 4 is not saved")) == 1
    assert same(checkpoint(out_dir, 8)["model"], checkpoint(straight, 8)["model"])
    for kind, names in (("step", STEP), ("eval", EVAL)):
        assert column(out_dir, kind, *names) == column(straight, kind, *names)
    assert not leftovers(out_dir)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_run_ends_in_one_line_if_another_one_has_taken_its_folder(has_locks, tokens, tmp_path):
    """Write nothing more, also where a share without locks let the other run in."""
    out_dir, there = tmp_path / "run", []
    trainer = InProcessRun()

    def take():
        if has_locks:
            out_dir.rename(tmp_path / "old")
            out_dir.mkdir()
        with open(out_dir / "lock", "a") as lock:
            lock.write("another run's")
        there.append(contents(out_dir))

    trainer.at["update", 6] = take
    result = run_tiny(tokens, out_dir, trainer)
    assert result.code == 1
    (error,) = lines(result.err, "error:")
    assert f"{out_dir} or its lock was taken" in error
    assert there == [contents(out_dir)]


@pytest.mark.parametrize("number", slow_but(errno.EINVAL, of=[errno.EINVAL, errno.EIO]))
def test_warns_once_if_a_network_share_cannot_sync_folders(number, tokens, straight, tmp_path):
    def sync(file):
        if is_folder(file):
            raise OSError(number, os.strerror(number))

    with mock.patch("os.fsync", sync):
        result = train_tiny(tokens, tmp_path / "run")
    assert_same_run(straight, tmp_path / "run", 8)
    (line,) = lines(result.err, "warning:")
    assert "sync" in line


def test_warns_once_if_a_disk_has_no_locks(tokens, straight, tmp_path):
    """
    Train on such a disk, for example Lustre without its flock option, or NFS without its lock
    daemon.
    """
    refusal = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("fcntl.lockf", side_effect=refusal):
        with mock.patch("fcntl.flock", side_effect=refusal):
            result = train_tiny(tokens, tmp_path / "run")
    assert_same_run(straight, tmp_path / "run", 8)
    assert len([line for line in lines(result.err, "warning:") if "locks" in line]) == 1


def test_a_resume_does_not_warn_about_space_that_its_own_files_already_use(
    tokens, straight, make_disk
):
    size = (straight / "ckpt-00000008.pt").stat().st_size
    disk = make_disk(4 * size)  # three files, and the log
    for more in (dict(), dict(init_from="resume", max_iters=9)):
        assert not lines(train_tiny(tokens, disk / "run", **more).err, "warning:")


@pytest.mark.parametrize("other", slow_but(3, of=[3, None]))
def test_resuming_is_refused_if_the_newest_checkpoint_has_another_format(other, tokens, tmp_path):
    """Do not continue from an older checkpoint, which would silently lose iterations."""
    train_tiny(tokens, tmp_path)
    newest = tmp_path / "ckpt-00000008.pt"
    state = torch.load(newest)
    assert state.pop("format") == 2
    torch.save(state if other is None else state | dict(format=other), newest)
    before = contents(tmp_path)
    code, _, err = run_tiny(tokens, tmp_path, init_from="auto", max_iters=10)
    assert code == 2 and "another version" in err and contents(tmp_path) == before
