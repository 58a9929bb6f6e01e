"""
Checkpoint files: all or nothing, checked before they are believed, never the last good one lost.
"""

import os

import pytest
import torch
from helpers import ON_WINDOWS, run_process

from common.console import UserError
from common.files import remove_temporaries, replacing
from training import checkpoint
from training.checkpoint import find_newest, link, list_checkpoints, load, prune, save


def state(value=1.0):
    return dict(
        model=dict(w=torch.full((1000,), value)),
        progress=dict(iter_num=int(value)),
        shards_read=[],
        text="x",
        flag=True,
    )


def path(folder, n):
    return folder / f"ckpt-{n:08}.pt"


def find_damage(file) -> str:
    """What is said of a damaged file; empty for a whole one."""
    try:
        checkpoint.load(file)
    except UserError as error:
        return str(error)
    return ""


def test_torch_alone_reads_the_file(tmp_path):
    save(state(3.0), path(tmp_path, 3))
    loaded = torch.load(path(tmp_path, 3), weights_only=True)
    assert torch.equal(loaded["model"]["w"], torch.full((1000,), 3.0)) and loaded["text"] == "x"


def test_truncation_at_every_sixteenth_is_found(tmp_path):
    save(state(), path(tmp_path, 1))
    content = path(tmp_path, 1).read_bytes()
    for sixteenth in range(16):
        path(tmp_path, 1).write_bytes(content[: len(content) * sixteenth // 16])
        assert find_damage(path(tmp_path, 1))
    path(tmp_path, 1).write_bytes(content)
    assert find_damage(path(tmp_path, 1)) == ""


def test_no_flipped_bit_changes_what_is_loaded(tmp_path):
    """
    torch.load itself loads a file with a flipped bit in a tensor without a word. Where bits between
    the records flip, nothing that is loaded changes.
    """
    save(state(), path(tmp_path, 1))
    content = bytearray(path(tmp_path, 1).read_bytes())
    rest, found = {name: value for name, value in state().items() if name != "model"}, 0
    generator = torch.Generator().manual_seed(0)
    for bit in torch.randint(8 * len(content), (200,), generator=generator).tolist():
        content[bit // 8] ^= 1 << bit % 8
        path(tmp_path, 1).write_bytes(content)
        try:
            loaded = checkpoint.load(path(tmp_path, 1))
        except UserError:
            found += 1
        else:
            assert torch.equal(loaded.pop("model")["w"], torch.ones(1000)), f"bit {bit}"
            assert loaded == rest, f"bit {bit}"
        content[bit // 8] ^= 1 << bit % 8
    assert found > 150


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(tmp_path, capsys):
    save(state(1.0), path(tmp_path, 1))
    save(state(2.0), path(tmp_path, 2))
    with open(path(tmp_path, 2), "r+b") as file:
        file.truncate(500)
    assert load(find_newest(tmp_path))["progress"]["iter_num"] == 1
    assert "ckpt-00000002.pt" in capsys.readouterr().err
    path(tmp_path, 1).write_bytes(b"")
    with pytest.raises(UserError, match="none of its 2 checkpoints can be resumed"):
        load(find_newest(tmp_path))


def test_the_newest_is_chosen_by_iteration_not_by_date(tmp_path):
    for n in (900, 10000, 20):
        save(state(n), path(tmp_path, n))
    assert load(find_newest(tmp_path))["progress"]["iter_num"] == 10000


def test_retention_keeps_the_newest_and_best(tmp_path):
    for n in range(1, 6):
        save(state(n), path(tmp_path, n))
        if n == 2:
            link(path(tmp_path, n), tmp_path / "best.pt")
        prune(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["ckpt-00000004.pt", "ckpt-00000005.pt"]
    assert checkpoint.load(tmp_path / "best.pt")["progress"]["iter_num"] == 2


def test_best_is_copied_where_links_do_not_exist(tmp_path, monkeypatch):
    no_links(monkeypatch)
    save(state(1), path(tmp_path, 1))
    link(path(tmp_path, 1), tmp_path / "best.pt")
    assert (tmp_path / "best.pt").read_bytes() == path(tmp_path, 1).read_bytes()


def test_data_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """
    A killed process does not lose the page cache, a power cut does: fsync file, rename, fsync
    folder, in this order.
    """
    calls = []

    def recorded(function):
        def call(*arguments):
            calls.append(function.__name__)
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", recorded(os.fsync))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    save(state(), path(tmp_path, 1))
    # Windows can open no folder
    assert calls == (["fsync", "replace"] if ON_WINDOWS else ["fsync", "replace", "fsync"])


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    )
    with pytest.raises(OSError, match="GB free"):
        save(state(), path(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_runs_code_is_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("code ran",)

    file = path(tmp_path, 1)
    torch.save(dict(model=Evil()), file)
    with pytest.raises(UserError, match="none of its 1"):
        load(find_newest(tmp_path))
    assert "not a checkpoint of tensors and plain values" in capsys.readouterr().err
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load(file)
    assert "code ran" not in capsys.readouterr().out


def test_a_file_of_the_users_beside_the_one_that_is_written_stays(tmp_path):
    (tmp_path / "n.tmp").write_text("mine")
    with replacing(tmp_path / "n.png") as file:
        file.write(b"picture")
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == [
        ("n.png", b"picture"),
        ("n.tmp", b"mine"),
    ]


def test_two_processes_write_one_picture_at_a_time(tmp_path):
    """As two compares beside a run do."""
    with replacing(tmp_path / "loss.png") as file:
        theirs = (
            "import pathlib, sys; from common.files import replacing\n"
            "with replacing(pathlib.Path(sys.argv[1])) as other:\n    other.write(b'theirs')"
        )
        assert run_process("-c", theirs, str(tmp_path / "loss.png")) == (0, "", "")
        assert (tmp_path / "loss.png").read_bytes() == b"theirs"
        file.write(b"mine")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("loss.png", b"mine")]


def test_what_killed_saves_have_left_goes_and_files_of_others_stay(tmp_path):
    left = ["ckpt-00000004.pt.77.tmp", "best.pt.77.tmp"]
    others = ["ckpt-00000004.pt", "best.pt", "best.pt.old.tmp", "loss.png.77.tmp", "notes.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"")
    remove_temporaries(tmp_path, "ckpt-*.pt", "best.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def no_links(monkeypatch) -> None:
    def link(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", link)


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    no_links(monkeypatch)
    save(state(2), path(tmp_path, 2))
    link(path(tmp_path, 2), tmp_path / "best.pt")
    save(state(6), path(tmp_path, 6))

    def full(source, target):
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.shutil, "copyfileobj", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        link(path(tmp_path, 6), tmp_path / "best.pt")
    assert sorted(tmp_path.iterdir()) == before
    assert checkpoint.load(tmp_path / "best.pt")["progress"]["iter_num"] == 2
