"""What a night can bring besides signals and full disks: mostly what attacks have found."""

import re
import sys

import pytest
import torch
from helpers import (
    flags,
    load,
    needs_a_full_disk,
    records,
    run_here,
    run_process,
)

import train
from common.console import RunError, UserError, printable, warn
from training import checkpoint, log

# -----------------------------------------------------------------------------
# Failures in the middle of an iteration


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), ValueError("unforeseen")]


@pytest.mark.parametrize("error", ERRORS, ids=["out of memory", "unforeseen"])
def test_an_error_costs_what_came_after_the_newest_checkpoint(
    error, dataset, tmp_path, monkeypatch
):
    """Also one in the middle of an update: half an update is never saved."""
    step = torch.optim.AdamW.step
    calls = iter(range(100))

    def half(optimizer, *args):
        optimizer.param_groups[0]["params"][0].data.add_(1)
        if next(calls) == 5:
            raise error
        return step(optimizer, *args)

    build = train.build_optimizer

    def build_optimizer(*args):
        optimizer = build(*args)
        monkeypatch.setattr(type(optimizer), "step", torch.optim.Optimizer.profile_hook_step(half))
        return optimizer

    monkeypatch.setattr(train, "build_optimizer", build_optimizer)
    with pytest.raises(type(error)):
        run_here(dataset, tmp_path, eval_interval=4, dropout=0.1)
    monkeypatch.undo()
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["ckpt-00000004.pt"]


def test_a_diverged_model_is_not_sampled(dataset, tmp_path, capsys):
    with pytest.raises(RunError):
        run_here(
            dataset, tmp_path, sample_tokens=5, learning_rate=1e20, eval_interval=2, max_iters=40
        )
    assert "Traceback" not in capsys.readouterr().err


# -----------------------------------------------------------------------------
# Whole checkpoints that cannot be resumed


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("saved")
    run_here(dataset, out_dir, checkpoint_interval=2, max_iters=4, lr_decay_iters=8)
    return out_dir


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", ["gpt2", "fast"])
def test_the_state_of_every_optimizer_and_model_is_accepted(optimizer, model, dataset, tmp_path):
    options = dict(optimizer=optimizer, model=model, tie_weights=model == "gpt2")
    for max_iters in (0, 4, 5):
        options |= dict(max_iters=max_iters, init_from="auto")
        assert run_here(dataset, tmp_path, **options) == 0
    assert load(tmp_path, 5)["progress"]["iter_num"] == 5


# -----------------------------------------------------------------------------
# The start and the console


def test_a_resumed_run_says_from_where_and_how_far(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4)
    capsys.readouterr()
    run_here(dataset, tmp_path, max_iters=8, init_from="resume", lr_decay_iters=8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resume: {tmp_path / 'ckpt-00000004.pt'}, iteration 4"
    assert f"run: 8 iterations, 1.02k tokens, 0.67 epochs, in {tmp_path}" in lines[:9]


def test_a_resumed_run_of_an_earlier_version_says_nothing_of_keys_that_moved(
    dataset, tmp_path, capsys
):
    options = dict(optimizer="muon", learning_rate=0.02, max_iters=4, lr_decay_iters=8)
    run_here(dataset, tmp_path, **options)
    state = load(tmp_path, 4)
    state["config"] |= dict(backend="nccl")
    checkpoint.save(state, tmp_path / "ckpt-00000004.pt")
    capsys.readouterr()
    run_here(dataset, tmp_path, **options | dict(init_from="resume", max_iters=5))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")]
    assert len(said) == 2 and said[1] == "resume: max_iters = 5 (the checkpoint had 4)"


def test_a_disk_too_full_to_rewrite_the_log_does_not_stop_a_resume(
    dataset, tmp_path, monkeypatch, capsys
):
    run_here(dataset, tmp_path, max_iters=4)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "replacing", full)
    assert run_here(dataset, tmp_path, init_from="resume") == 0
    assert "metrics.jsonl: No space left on device" in capsys.readouterr().err


def test_a_run_in_the_way_is_one_line_with_every_way_out(dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=2)
    with pytest.raises(UserError) as error:
        run_here(dataset, tmp_path, init_from="auto", n_layer=3, n_embd=64)
    (problem,) = error.value.problems
    for words in (
        str(tmp_path),
        "n_layer 2 (asked for: 3)",
        "n_embd 32",
        "another --out_dir",
    ):
        assert words in problem


def test_an_interrupted_run_prints_the_command_that_goes_on(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "config/x.py"])
    run_here(dataset, tmp_path, max_minutes=1e-6)
    assert "to continue: python train.py config/x.py --init_from=resume" in capsys.readouterr().out


def test_log_txt_keeps_the_lines_of_the_console(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4, lr_schedule="constant")
    run_here(dataset, tmp_path, max_iters=8, lr_schedule="constant", init_from="resume")
    shown = capsys.readouterr().out.splitlines()
    kept = (tmp_path / "log.txt").read_text().splitlines()
    assert kept == shown


def test_what_the_system_refuses_is_one_line(script, tmp_path, dataset):
    code, _, err = script(train.main, *flags("a" * 300, tmp_path))
    assert code == 2 and err == [f"error: {'a' * 300}: File name too long"]


def test_control_characters_never_reach_a_console():
    assert printable("a\x1b[2J\tb\nc\x07\x00é\x9b") == "a\\x1b[2J\tb\nc\\x07\\x00é\\x9b"


def test_a_line_on_a_console_is_printable(dataset, tmp_path, monkeypatch, capsys):
    """A model of bytes samples ESC and BEL, and a file's name may hold them."""
    monkeypatch.setattr(train, "Tokenizer", lambda spec: Escapes())
    run_here(dataset, tmp_path, sample_tokens=5, max_iters=2, eval_interval=2)
    warn("a\x1b]0;b\x07.bin")
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err + (tmp_path / "log.txt").read_text()
    assert "sample 2:\n\\x1b[31m\n" in output.out and "a\\x1b]0;b\\x07.bin" in output.err


class Escapes:
    def start_ids(self):
        return [0]

    def decode(self, ids):
        return "\x1b[31m"


FULL_CONSOLES = {
    "sample": (1, ["--out_dir=RUN", "--device=cpu", "--num_samples=1", "--max_new_tokens=2"]),
    "compare": (1, ["RUN"]),
    "configurator": (1, []),
    "train": (0, ["RUN'S FLAGS"]),  # of a run that is finished
}


@needs_a_full_disk
@pytest.mark.parametrize("name", FULL_CONSOLES)
def test_a_full_console_is_one_line(name, saved, dataset):
    expected, arguments = FULL_CONSOLES[name]
    words = [word.replace("RUN", str(saved)) for word in arguments]
    if name == "train":
        words = flags(dataset, saved, max_iters=4, lr_decay_iters=8, init_from="resume")
    code = (
        f"import os, {name}; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        f"from common import console\nconsole.run_main({name}.main)"
    )
    code, _, err = run_process("-c", code, *words)
    problems = [line for line in err.splitlines() if not line.startswith("model: ")]
    assert code == expected
    assert problems == (["error: No space left on device"] if expected else [])


def test_a_folder_without_permission_is_one_line(dataset, tmp_path):
    (tmp_path / "private").mkdir(mode=0)
    folder = str(tmp_path / "private" / "x")
    # root may look anywhere, so give up all of root's privileges first
    unprivileged = (
        "import ctypes, importlib, sys; from common import console\n"
        "version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "assert ctypes.CDLL(None).capset(version_3, none) == 0\n"
        "console.run_main(importlib.import_module(sys.argv.pop(1)).main)"
    )
    for command in (
        ["train", *flags(dataset, folder)],
        ["train", *flags(folder, tmp_path / "run")],
        ["compare", folder],
        ["data.prepare_text", __file__, f"--out={folder}"],
    ):
        code, _, err = run_process("-c", unprivileged, *command)
        assert code == 2 and err.startswith(f"error: {folder}")
        assert err.endswith(": Permission denied\n") and err.count("\n") == 1


def test_no_sample_before_the_first_update(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, sample_tokens=5, max_iters=4)
    assert [r["iter"] for r in records(tmp_path, "sample")] == [4]


def test_the_last_lines_of_a_resumed_run_tell_this_start_from_all(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4)
    state = load(tmp_path, 4)
    state["ledger"] |= dict(steps=3600.0, evaluation=60.0)
    checkpoint.save(state, tmp_path / "ckpt-00000004.pt")
    run_here(dataset, tmp_path, init_from="resume", max_iters=6)
    last = capsys.readouterr().out
    assert re.search(r"time: 1h01m wall \(this launch \d+s\) = .*steps 3600", last)
    assert "evaluation with any sample 60." in last
