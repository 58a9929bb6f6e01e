"""
A save that ends at any moment, on any disk: the next start loads a valid checkpoint, at most one
save old.
"""

import pickle
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import (
    ON_WINDOWS,
    assert_same_state,
    flags,
    load,
    records,
    run_here,
    run_process,
    start_process,
    write_dataset,
)

import train
from common.console import RunError, UserError
from training import checkpoint


def load_newest(folder: Path) -> dict:
    return checkpoint.load(checkpoint.find_newest(folder))


def full_disk_at(monkeypatch, iter_num: int) -> None:
    """The save of that iteration's checkpoint fails."""
    save = checkpoint.save

    def full(saved, path):
        if path.name == f"ckpt-{iter_num:08}.pt":
            raise OSError(28, "No space left on device")
        return save(saved, path)

    monkeypatch.setattr(checkpoint, "save", full)


def test_a_full_disk_is_reported_and_training_goes_on_from_an_older_checkpoint(
    dataset, tmp_path, monkeypatch, capsys
):
    full_disk_at(monkeypatch, 4)
    assert run_here(dataset, tmp_path, checkpoint_interval=2, keep_checkpoints=10, max_iters=8) == 0
    assert "iter 4: checkpoint 4 is not saved: No space left on device; " in capsys.readouterr().err
    assert [r["iter"] for r in records(tmp_path, "checkpoint")] == [2, 6, 8]


def scripted_losses(monkeypatch, *val_losses):
    """What evaluations find in the validation split, one after the other."""
    losses = iter(([1.0, val_loss], None) for val_loss in val_losses)
    monkeypatch.setattr(train, "estimate_loss", lambda *_: next(losses))


def best_iter(out_dir) -> int:
    return checkpoint.load(out_dir / "best.pt")["progress"]["iter_num"]


@pytest.mark.parametrize("always", [True, False])
def test_the_best_of_the_saved_is_best_after_a_save_that_failed(
    always, dataset, tmp_path, monkeypatch
):
    full_disk_at(monkeypatch, 4)
    scripted_losses(monkeypatch, 9.0, 8.0, 5.0, 6.0, 7.0)
    assert (
        run_here(
            dataset, tmp_path, eval_interval=2, keep_checkpoints=9, always_save_checkpoint=always
        )
        == 0
    )
    assert best_iter(tmp_path) == 6
    assert (tmp_path / "ckpt-00000006.pt").samefile(tmp_path / "best.pt")


def test_of_two_runs_that_start_together_the_later_one_leaves_the_folder_alone(
    dataset, tmp_path, monkeypatch
):
    out_dir, open_data, codes = tmp_path / "run", train.open_data, []
    # as an earlier run has left it
    out_dir.mkdir()
    (out_dir / "lock").touch()

    def slow(*args):
        # the other one, from its start to its end
        codes.append(run_process("train.py", *flags(dataset, out_dir, seed=5))[0])
        return open_data(*args)

    monkeypatch.setattr(train, "open_data", slow)
    with pytest.raises(UserError, match="another run has just written"):
        run_here(dataset, out_dir, init_from="auto")
    assert codes == [0]
    assert load_newest(out_dir)["config"]["seed"] == 5


def test_the_one_resumed_from_stays_until_the_next_is_whole(dataset, tmp_path, monkeypatch):
    """Though a damaged one is newer, and only one is kept."""
    run_here(dataset, tmp_path)
    (tmp_path / "ckpt-00000008.pt").write_bytes(b"damaged")
    save, there = checkpoint.save, []

    def look(state, path):
        there.extend(checkpoint.list_checkpoints(tmp_path))
        return save(state, path)

    monkeypatch.setattr(checkpoint, "save", look)
    assert run_here(dataset, tmp_path, init_from="resume", keep_checkpoints=1) == 0
    assert there == [tmp_path / "ckpt-00000004.pt"]


def test_weights_that_are_lost_do_not_replace_a_good_checkpoint(dataset, tmp_path, monkeypatch):
    step = train.train_step

    def losing(model, optimizer, *args):
        result = step(model, optimizer, *args)
        if optimizer.state[model.lm_head.weight]["step"] == 6:
            model.lm_head.weight.data[0, 0] = torch.inf
        return result

    monkeypatch.setattr(train, "train_step", losing)
    with pytest.raises(RunError, match="iter 8: .*wte.weight is not finite, so the weights are"):
        run_here(dataset, tmp_path, keep_checkpoints=1)
    assert load_newest(tmp_path)["progress"]["iter_num"] == 4


def test_an_out_dir_that_cannot_be_made_is_one_line_before_training(dataset, tmp_path, script):
    (tmp_path / "file").write_text("")
    code, out, err = script(train.main, *flags(dataset, tmp_path / "file" / "run"))
    (line,) = err
    assert code == 2 and line.startswith(f"error: {tmp_path / 'file' / 'run'}: ")
    assert "iter 0" not in out


def test_two_runs_in_one_folder_do_not_touch_each_other(dataset, tmp_path):
    options = dict(max_iters=10**6, eval_interval=10**6, checkpoint_interval=5)
    first = start_process("train.py", *flags(dataset, tmp_path, **options))
    while first.stdout.readline()[:7] != "iter 9:":
        assert first.poll() is None
    stopped = psutil.Process(first.pid)
    stopped.suspend()  # it stays there, and writes nothing meanwhile
    while stopped.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    for changes in (dict(init_from="auto"), dict(init_from="scratch")):
        with pytest.raises(UserError, match="another run is writing to|of an earlier run"):
            run_here(dataset, tmp_path, **options | changes)
    assert run_here(dataset, tmp_path, init_from="resume", eval_only=True) == 0  # reading is free
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before
    first.kill()
    first.communicate()
    assert run_here(dataset, tmp_path, init_from="auto", max_iters=20) == 0  # the dead hold no lock


@pytest.mark.skipif(ON_WINDOWS, reason="Windows deletes no file that is open")
def test_a_folder_deleted_under_the_run_is_made_again(dataset, tmp_path, monkeypatch, capsys):
    original = train.train_step
    calls = iter(range(100))

    def deleting(*args, **kwargs):
        if next(calls) == 5:
            shutil.rmtree(tmp_path / "run")
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "train_step", deleting)
    assert run_here(dataset, tmp_path / "run") == 0
    assert "was deleted" in capsys.readouterr().err
    monkeypatch.undo()
    run_here(dataset, tmp_path / "straight")
    assert_same_state(load(tmp_path / "run", 8), load(tmp_path / "straight", 8))


def test_resume_after_every_kind_of_damage_to_the_newest(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path / "run", max_iters=8, checkpoint_interval=4, keep_checkpoints=9)
    straight = load(tmp_path / "run", 8)
    newest = tmp_path / "run" / "ckpt-00000008.pt"
    content = newest.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for damaged in (b"", content[: len(content) // 2], content[:-1], bytes(flipped)):
        newest.write_bytes(damaged)
        assert run_here(dataset, tmp_path / "run", init_from="auto", keep_checkpoints=9) == 0
        assert "trying the one before" in capsys.readouterr().err
        assert_same_state(load(tmp_path / "run", 8), straight)


def test_nothing_that_lies_in_out_dir_runs_as_code(dataset, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("code ran",)

    run_here(dataset, tmp_path, max_iters=4)
    for name in ("ckpt-00000004.pt", "best.pt"):
        torch.save(dict(model=Evil(), config=Evil()), tmp_path / name)
    (tmp_path / "config.py").write_text("print('code ran')")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Evil()))
    for init_from, out_dir in (
        ("resume", tmp_path),
        ("auto", tmp_path),
        (tmp_path / "best.pt", tmp_path / "new"),
    ):
        with pytest.raises(UserError):
            run_here(dataset, out_dir, init_from=init_from)
    assert "code ran" not in capsys.readouterr().out


def test_a_shard_cut_short_under_the_run_ends_it_with_a_checkpoint(tmp_path, monkeypatch):
    data = write_dataset(tmp_path / "data", [2000])
    original = train.train_step
    calls = iter(range(100))

    def cutting(*args, **kwargs):
        if next(calls) == 5:
            with open(data / "train_000001.bin", "r+b") as file:
                file.truncate(1024)
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "train_step", cutting)
    with pytest.raises(RunError, match="train_000001.bin.*changed since the run began"):
        run_here(data, tmp_path / "run", max_iters=100, eval_interval=100)
    assert 5 <= load_newest(tmp_path / "run")["progress"]["iter_num"] < 12


def test_auto_never_starts_anew_over_damaged_checkpoints(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=4)
    for path in tmp_path.glob("ckpt-*.pt"):
        path.write_bytes(b"damaged")
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    for init_from in ("auto", "resume"):
        with pytest.raises(UserError, match="none of its 1 checkpoints can be resumed"):
            run_here(dataset, tmp_path, init_from=init_from)
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before
