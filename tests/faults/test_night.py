"""What a night can bring besides signals and full disks: mostly what attacks have found."""

import functools
import json
import math
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
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
from common.console import RunError, UserError, printable, warn
from common.files import plain_file
from training import checkpoint, hardware, runlog
from training.ranks import Ranks

# -----------------------------------------------------------------------------
# The folder of a run


def at_call(monkeypatch, owner, name, number, action):
    """Do something before the n-th call of a function."""
    original, calls = getattr(owner, name), iter(range(10**9))

    def call(*args, **kwargs):
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def test_a_deleted_folder_that_another_run_has_taken_is_left_to_it(dataset, tmp_path, monkeypatch):
    out_dir = tmp_path / "run"
    ready = "iter 2:"

    def another_run_begins():
        shutil.rmtree(out_dir)
        options = flags(dataset, out_dir, seed=5, max_iters=10**6, eval_interval=10**6)
        other = start_process("train.py", *options)
        while not other.stdout.readline().startswith(ready):
            assert other.poll() is None
        others.append(other)

    others = []
    at_call(monkeypatch, train, "train_step", 2, another_run_begins)
    with pytest.raises(RunError, match="was deleted under this run.*another run is writing"):
        run_here(dataset, out_dir, max_iters=8)
    before = sorted(p.name for p in out_dir.iterdir())
    others[0].terminate()
    others[0].communicate(timeout=60)
    assert others[0].returncode == 143
    assert not [name for name in before if name.endswith(".pt")]  # the old run saved nothing there
    assert checkpoint.load_newest(out_dir)["config"]["seed"] == 5


def test_a_deleted_folder_is_made_again_with_its_log(dataset, tmp_path, monkeypatch, capsys):
    out_dir = tmp_path / "run"
    at_call(monkeypatch, train, "train_step", 5, lambda: shutil.rmtree(out_dir))
    assert run_here(dataset, out_dir) == 0
    assert capsys.readouterr().err.count("deleted or replaced under the run") == 1
    assert [r["kind"] for r in records(out_dir)][:1] == ["start"]
    assert records(out_dir, "end") and (out_dir / "log.txt").exists()
    with pytest.raises(UserError, match="holds an earlier run"):
        run_here(dataset, out_dir)


def delete_lock(out_dir):
    (out_dir / "lock").unlink()


def replace_lock(out_dir):
    delete_lock(out_dir)
    (out_dir / "lock").touch()


def replace_folder(out_dir):
    shutil.copytree(out_dir, out_dir.with_name("copy"))
    shutil.rmtree(out_dir)
    out_dir.with_name("copy").rename(out_dir)


def delete_log(out_dir):
    (out_dir / "metrics.jsonl").unlink()


def replace_log(out_dir):
    shutil.copy(out_dir / "metrics.jsonl", out_dir / "edited")
    (out_dir / "edited").replace(out_dir / "metrics.jsonl")


def block_log(out_dir):
    delete_log(out_dir)
    (out_dir / "metrics.jsonl").mkdir()


@pytest.mark.parametrize("change", [delete_lock, replace_lock, replace_folder])
def test_a_lock_deleted_or_replaced_under_the_run_is_taken_again(
    change, dataset, tmp_path, monkeypatch, capsys
):
    out_dir = tmp_path / "run"
    at_call(monkeypatch, train, "train_step", 5, lambda: change(out_dir))
    assert run_here(dataset, out_dir, checkpoint_interval=2) == 0
    assert capsys.readouterr().err.count("deleted or replaced under the run") == 1
    assert [r["iter"] for r in records(out_dir, "checkpoint")] == [2, 4, 6, 8]
    assert len(records(out_dir, "start")) == 1


def test_a_deleted_lock_that_another_run_holds_is_left_to_it(dataset, tmp_path, monkeypatch):
    def another_run_begins():
        delete_lock(tmp_path)
        locks.append(
            checkpoint.make_out_dir(tmp_path, False, checkpoint.list_checkpoints(tmp_path))
        )

    locks = []
    at_call(monkeypatch, train, "train_step", 5, another_run_begins)
    # a process does not keep itself out
    monkeypatch.setattr(checkpoint, "try_lock", lambda file: not locks)
    with pytest.raises(RunError, match="lock was deleted under this run.*another run is"):
        run_here(dataset, tmp_path)
    assert not (tmp_path / "ckpt-00000008.pt").exists()


def test_a_log_deleted_or_replaced_under_the_run_goes_on_in_the_new_file(
    dataset, tmp_path, monkeypatch, capsys
):
    for change, kinds in ((delete_log, ["start", "event"]), (replace_log, ["start", "eval"])):
        out_dir = tmp_path / change.__name__
        at_call(monkeypatch, train, "train_step", 5, functools.partial(change, out_dir))
        assert run_here(dataset, out_dir, checkpoint_interval=2) == 0
        monkeypatch.undo()
        assert capsys.readouterr().err.count("metrics.jsonl deleted or replaced") == 1
        assert [r["kind"] for r in records(out_dir)][:2] == kinds
        assert [r["iter"] for r in records(out_dir, "step")][-2:] == [6, 7]
        assert records(out_dir, "end") and len(records(out_dir, "start")) == 1


def test_a_folder_in_place_of_the_log_costs_the_records_not_the_run(dataset, tmp_path, monkeypatch):
    at_call(monkeypatch, train, "train_step", 5, lambda: block_log(tmp_path))
    assert run_here(dataset, tmp_path, checkpoint_interval=2) == 0
    assert (tmp_path / "ckpt-00000008.pt").exists()


def test_iterations_beyond_eight_digits_and_folders_named_like_checkpoints(tmp_path):
    for name in ("ckpt-99999999.pt", "ckpt-100000000.pt", "ckpt-00000001.pt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "ckpt-00000002.pt").mkdir()
    names = [p.name for p in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["ckpt-00000001.pt", "ckpt-99999999.pt", "ckpt-100000000.pt"]
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["ckpt-100000000.pt"]


def test_a_lock_that_is_a_link_does_not_empty_what_it_points_to(dataset, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    assert run_here(dataset, tmp_path / "run", max_iters=1) == 0
    assert (tmp_path / "precious").read_text() == "precious"


PIPES = ("data/train_000001.bin", "data/manifest.json", "data/meta.pkl")
PIPES += ("run/lock", "run/log.txt", "run/metrics.jsonl")


@pytest.mark.parametrize("name", PIPES)
def test_a_named_pipe_is_refused_and_not_waited_for(name, dataset, saved, tmp_path):
    shutil.copytree(dataset, tmp_path / "data")
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    options = flags(tmp_path / "data", tmp_path / "run", init_from="resume", max_iters=5)
    code, _, err = run_process("train.py", *options)
    assert code == 2 and len(err.splitlines()) == 1
    assert str(tmp_path / name) in err and "named pipe" in err


def test_a_named_pipe_in_place_of_a_plan_or_a_log_to_compare_is_not_waited_for(dataset, tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    assert run_process("train.py", *flags(dataset, tmp_path, max_iters=1))[0] == 0
    os.mkfifo(tmp_path / "old.log")
    code, _, err = run_process("compare.py", str(tmp_path / "old.log"))
    assert code == 2 and "old.log: is a named pipe" in err and "not a file" in err


def test_a_device_or_a_socket_in_place_of_a_file_is_refused_and_not_read(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path in (Path("/dev/zero"), tmp_path / "socket"):
        with pytest.raises(OSError, match="a device, not a file"):
            plain_file(path)
    for path in (tmp_path, tmp_path / "missing"):
        assert plain_file(path) == path


# -----------------------------------------------------------------------------
# Failures in the middle of an iteration


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), ValueError("unforeseen")]


@pytest.mark.parametrize("error", ERRORS, ids=["out of memory", "unforeseen"])
def test_what_fails_before_an_update_costs_no_iteration(error, dataset, tmp_path, monkeypatch):
    def fail():
        raise error

    at_call(monkeypatch, train.torch.nn.utils, "clip_grad_norm_", 3, fail)
    with pytest.raises((RunError, ValueError)):
        run_here(dataset, tmp_path / "broken", eval_interval=100, dropout=0.1)
    monkeypatch.undo()
    assert checkpoint.load_newest(tmp_path / "broken")["progress"]["iter_num"] == 3
    run_here(dataset, tmp_path / "broken", eval_interval=100, dropout=0.1, init_from="resume")
    run_here(dataset, tmp_path / "straight", eval_interval=100, dropout=0.1)
    assert_same_state(load(tmp_path / "broken", 8), load(tmp_path / "straight", 8))


def test_what_fails_right_after_an_update_saves_no_iteration_with_old_random_numbers(
    dataset, tmp_path, monkeypatch
):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    # two calls before the loop, then one for each iteration
    at_call(monkeypatch, train.hardware, "get_rng_state", 5, fail)
    with pytest.raises(RunError):
        run_here(dataset, tmp_path, eval_interval=2, dropout=0.1)
    assert checkpoint.load_newest(tmp_path)["progress"]["iter_num"] == 4


@pytest.mark.parametrize("error", ERRORS, ids=["out of memory", "unforeseen"])
def test_half_an_update_is_never_saved(error, dataset, tmp_path, monkeypatch):
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
    with pytest.raises((RunError, ValueError)):
        run_here(dataset, tmp_path, eval_interval=4)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["ckpt-00000004.pt"]


def test_the_command_that_an_out_of_memory_line_advises_starts(dataset, tmp_path, monkeypatch):
    for eval_interval, iteration in ((100, 0), (2, 3)):  # without a checkpoint, and with one
        out_dir = tmp_path / str(eval_interval)

        def fail():
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            at_call(patch, train, "train_step", iteration, fail)
            with pytest.raises(RunError) as error:
                run_here(dataset, out_dir, eval_interval=eval_interval)
        advised = re.findall(r"--\S+", str(error.value))
        command = [*flags(dataset, out_dir, eval_interval=eval_interval), *advised]
        changed = [
            c for c in command if c.partition("=")[0] not in [a.partition("=")[0] for a in advised]
        ]
        assert train.main([*changed, *advised]) == 0


def test_a_long_log_interval_is_looked_at_before_its_line(dataset, tmp_path, monkeypatch):
    """Each iteration kept 35 kB until the next line, and max_skips was looked at only then."""
    monkeypatch.setattr(runlog, "MOST_ITERATIONS", 4)
    check_skips, kept = runlog.RunLog.check_skips, []

    def count_kept(log):
        kept.append(len(log.iterations))
        check_skips(log)

    monkeypatch.setattr(runlog.RunLog, "check_skips", count_kept)
    options = dict(log_interval=10**6, eval_interval=100)
    assert run_here(dataset, tmp_path / "long", max_iters=30, **options) == 0
    assert sum(kept) == 30 and max(kept) == 4
    # three skips in a row end the run at the first look, not at its last line
    diverging = options | dict(learning_rate=1e30, max_skips=3)
    with pytest.raises(RunError, match="3 updates in a row skipped"):
        run_here(dataset, tmp_path / "bad", max_iters=100, **diverging)
    assert sum(kept) - 30 < 10


def test_a_diverged_model_is_not_sampled(dataset, tmp_path, capsys):
    with pytest.raises(RunError):
        run_here(
            dataset, tmp_path, sample_tokens=5, learning_rate=1e20, eval_interval=2, max_iters=40
        )
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("max_iters", [4, 5, 6, 9])
def test_a_last_line_right_after_such_a_look_has_its_numbers(
    max_iters, dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(runlog, "MOST_ITERATIONS", 4)
    assert run_here(dataset, tmp_path, log_interval=10**6, max_iters=max_iters) == 0
    assert [r["iter"] for r in records(tmp_path, "step")] == [0, max_iters - 1]


# -----------------------------------------------------------------------------
# Checkpoints with a right checksum and other contents


def corrupt(name, state):
    weights = next(iter(state["model"].values()))
    moments = state["optimizer"]["state"][0]
    match name:
        case "a key of a later version":
            state["progress"]["tomorrow"] = 1
        case "no config":
            del state["config"]
        case "an unknown ledger":
            state["ledger"] = dict(tomorrow=1.0)
        case "an optimizer state of another shape":
            moments["exp_avg"] = moments["exp_avg"][:1, :1].clone()
        case "weights that are not finite":
            weights.view(-1)[0] = torch.nan
        case "weights of another shape":
            state["model"]["transformer.wpe.weight"] = torch.zeros(3, 3)
        case "10^15 sequences":
            state["progress"]["sequences"] = 10**15
        case "10^15 iterations":
            state["progress"]["iter_num"] = 10**15
        case "a moment that is missing":
            del moments["exp_avg"]
        case "a moment without memory of its own":
            moments["exp_avg"] = torch.zeros(1).expand(moments["exp_avg"].shape)
        case "a step of three":
            moments["step"] = torch.zeros(3)
        case "a seed beyond torch's":
            state["config"]["seed"] = 2**64
        case "a loss in words":
            state["progress"]["best_val_loss"] = "low"
        case "a random state that is none":
            state["rng"][0]["cpu"] = torch.zeros(3, dtype=torch.uint8)
        case "endless seconds of evaluation":
            state["ledger"]["evaluation"] = math.inf
        case "seconds in a tensor":
            state["ledger"]["steps"] = torch.tensor(3.0)
        case "seconds beyond any float":
            state["ledger"]["steps"] = 10**400
        case "a ledger of a later version":
            state["ledger"]["tomorrow"] = 1.0
        case "tokens beyond any float":
            state["progress"]["tokens"] = 10**400
        case "fractional sequences":
            state["progress"]["sequences"] = 32.0
        case "fractional iterations":
            state["progress"]["iter_num"] = 4.0
        case "10^12 sequences":
            state["progress"] |= dict(sequences=10**12, tokens=16 * 10**12)
        case "an endless decay":
            state["progress"]["lr_horizon"] = math.inf
        case "a decay until nan":
            state["progress"]["lr_horizon"] = math.nan
        case "no best iteration":
            del state["progress"]["best_iter"]
        case "Muon's moments under AdamW":
            state["optimizer"]["state"][0] = dict(momentum=moments["exp_avg"])
        case "no optimizer state":
            state["optimizer"]["state"].clear()
        case "half an optimizer state":
            del state["optimizer"]["state"][1]
        case "a moment in float64":
            moments["exp_avg"] = moments["exp_avg"].double()
        case "a scaler of other keys":
            state["scaler"] = dict(scale=1.0)
        case "a scale in words":
            state["scaler"] = torch.amp.GradScaler("cpu").state_dict() | dict(scale="x")
        case "a list for a scaler":
            state["scaler"] = [1]
        case "no fingerprint":
            del state["data_fingerprint"]
        case "a date in a tensor":
            state["data_modified"] = torch.ones(3)
        case "another model in the config":
            state["config"]["model"] = "fast"
        case "no dataset":
            del state["config"]["dataset"]
        case "fractional layers":
            state["config"]["n_layer"] = 2.0
        case "a negative square":
            state["optimizer"]["state"][0]["exp_avg_sq"] -= 1
        case "a stream at another place":
            state["stream"] = dict(sequence=2**40)
        case "a weight of whole numbers":
            state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"].int()
    return state


NAMES = (
    "a key of a later version",
    "no config",
    "an unknown ledger",
    "an optimizer state of another shape",
    "weights that are not finite",
    "weights of another shape",
    "10^15 sequences",
    "10^15 iterations",
    "a random state that is none",
    "a moment that is missing",
    "a moment without memory of its own",
    "a step of three",
    "a seed beyond torch's",
    "a loss in words",
    "endless seconds of evaluation",
    "seconds in a tensor",
    "seconds beyond any float",
    "a ledger of a later version",
    "tokens beyond any float",
    "fractional sequences",
    "fractional iterations",
    "10^12 sequences",
    "an endless decay",
    "a decay until nan",
    "no best iteration",
    "Muon's moments under AdamW",
    "no optimizer state",
    "half an optimizer state",
    "a moment in float64",
    "a scaler of other keys",
    "a scale in words",
    "a list for a scaler",
    "no fingerprint",
    "a date in a tensor",
    "another model in the config",
    "no dataset",
    "fractional layers",
    "a negative square",
    "a stream at another place",
    "a weight of whole numbers",
)


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("saved")
    run_here(dataset, out_dir, checkpoint_interval=2, max_iters=4, lr_decay_iters=8)
    return out_dir


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_other_contents_is_named_and_the_one_before_taken(
    name, saved, dataset, tmp_path, capsys
):
    shutil.copytree(saved, tmp_path / "run")
    newest = tmp_path / "run" / "ckpt-00000004.pt"
    (tmp_path / "run" / "best.pt").unlink()
    checkpoint.save(corrupt(name, checkpoint.load(newest)), newest)
    assert run_here(dataset, tmp_path / "run", init_from="auto") == 0
    output = capsys.readouterr()
    assert f"warning: {newest}" in output.err and "ckpt-00000002.pt, iteration 2 of 8" in output.out


def test_a_tokenizer_that_is_a_list_counts_as_unknown(saved, dataset, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    state = load(tmp_path / "run", 4) | dict(tokenizer=["gpt2"])
    checkpoint.save(state, tmp_path / "run" / "ckpt-00000004.pt")
    assert run_here(dataset, tmp_path / "run", init_from="resume") == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", ["gpt2", "fast"])
def test_the_state_of_every_optimizer_and_model_is_accepted(optimizer, model, dataset, tmp_path):
    options = dict(optimizer=optimizer, model=model, tie_weights=model == "gpt2")
    for max_iters in (0, 4, 5):
        options |= dict(max_iters=max_iters, init_from="auto")
        assert run_here(dataset, tmp_path, **options) == 0
    assert load(tmp_path, 5)["progress"]["iter_num"] == 5


@pytest.mark.parametrize("half", [False, True], ids=["no archive", "half an archive"])
def test_a_right_trailer_around_no_archive_is_damage(half, saved, dataset, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "run")
    newest = tmp_path / "run" / "ckpt-00000004.pt"
    content = newest.read_bytes()[:3000] if half else b"no archive"
    with open(newest, "wb") as file:
        writer = checkpoint.HashingWriter(file)
        writer.write(content)
        file.write(checkpoint.TRAILER + writer.sha256.hexdigest().encode())
    assert run_here(dataset, tmp_path / "run", init_from="auto") == 0
    assert f"warning: {newest}: " in capsys.readouterr().err


# -----------------------------------------------------------------------------
# The start and the console


def test_a_resumed_run_says_from_where_and_how_far(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4)
    capsys.readouterr()
    run_here(dataset, tmp_path, max_iters=8, init_from="resume", lr_decay_iters=8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resume: {tmp_path}/ckpt-00000004.pt, iteration 4 of 8"
    assert f"run: 8 iterations, 1.02k tokens, 0.67 epochs, in {tmp_path}" in lines[:9]


def test_a_disk_too_full_to_rewrite_the_log_does_not_stop_a_resume(
    dataset, tmp_path, monkeypatch, capsys
):
    run_here(dataset, tmp_path, max_iters=4)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runlog, "replacing", full)
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
        "--out_dir=",
        "--overwrite=True",
    ):
        assert words in problem
    assert (
        run_here(dataset, tmp_path, init_from="scratch", overwrite=True, n_layer=3, n_embd=64) == 0
    )


def test_an_interrupted_run_prints_the_command_that_goes_on(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "config/x.py"])
    run_here(dataset, tmp_path, max_minutes=1e-6)
    assert "to go on: python train.py config/x.py --init_from=resume" in capsys.readouterr().out
    run_here(dataset, tmp_path, overwrite=True, max_minutes=1e-6)
    # the last of equal flags counts, so this goes on and deletes nothing
    assert "config/x.py --overwrite=False --init_from=resume" in capsys.readouterr().out


def test_log_txt_keeps_the_lines_of_the_console(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4, lr_decay_iters=8)
    run_here(dataset, tmp_path, max_iters=8, lr_decay_iters=8, init_from="resume")
    shown = capsys.readouterr().out.splitlines()
    kept = (tmp_path / "log.txt").read_text().splitlines()
    assert kept == shown


def test_data_written_to_since_the_checkpoint_is_warned_of(tmp_path, capsys):
    data = write_dataset(tmp_path / "data", [200_000])
    run_here(data, tmp_path / "run", max_iters=2)
    with open(data / "train_000001.bin", "r+b") as file:
        file.seek(200_000)  # in the middle, where the fingerprint does not look
        file.write(bytes(1000))
    os.utime(data / "train_000001.bin", (1, 2**31))
    capsys.readouterr()
    assert run_here(data, tmp_path / "run", init_from="resume") == 0
    assert f"files of {data} were written after" in capsys.readouterr().err


def test_a_problem_of_one_rank_alone_is_said_by_that_rank():
    ranks = Ranks()
    ranks.rank, ranks.world_size = 1, 2
    everywhere = [], ["dataset: only here"]
    ranks.gather = lambda problems: everywhere
    with pytest.raises(UserError, match="dataset: only here") as error:
        ranks.raise_together(everywhere[1])
    assert not error.value.agreed  # so that it is not muted
    ranks.rank = 0
    with pytest.raises(UserError, match="another rank cannot start") as error:
        ranks.raise_together([])
    everywhere = ["n_head: 7"], ["n_head: 7"]
    ranks.rank = 1
    with pytest.raises(UserError) as error:
        ranks.raise_together(everywhere[1])
    assert error.value.agreed  # rank 0 says it for both


@pytest.mark.parametrize(
    "world_size, agreed, said", [("2", True, False), ("2", False, True), (None, True, True)]
)
def test_only_what_all_ranks_agree_on_is_left_to_the_first(
    world_size, agreed, said, script, monkeypatch
):
    def fail(argv):
        error = UserError("only here")
        error.agreed = agreed
        raise error

    monkeypatch.setenv("LOCAL_RANK", "1")
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr("common.console.end_process", sys.exit)
    assert script(fail)[::2] == (2, ["error: only here"] if said else [])


def test_a_machine_without_a_home_folder_trains(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(hardware.Path, "home", no_home)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    hardware.set_environment()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ  # torch's own default stays


def test_a_rank_without_a_world_is_a_run_of_its_own(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_here(dataset, tmp_path, max_iters=2) == 0
    assert checkpoint.load_newest(tmp_path)["progress"]["iter_num"] == 2


@pytest.mark.parametrize(
    "world_size, rank", [("", "0"), ("abc", "0"), ("2", ""), ("2", "5"), ("0", "0")]
)
def test_an_environment_that_torchrun_did_not_make_is_one_line(
    world_size, rank, script, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("common.console.end_process", sys.exit)
    code, _, err = script(train.main)
    assert code == 2 and len(err) == 1 and err[0].startswith("error: ")


def test_a_console_that_was_closed_costs_nothing_but_its_lines(dataset, tmp_path):
    code = os.system(
        f"{sys.executable} {ROOT}/train.py {' '.join(flags(dataset, tmp_path, max_iters=2))} >&-"
    )
    assert code == 0 and checkpoint.load_newest(tmp_path)["progress"]["iter_num"] == 2


def test_what_the_system_refuses_is_one_line(script, tmp_path, dataset):
    code, _, err = script(train.main, *flags("a" * 300, tmp_path))
    assert code == 2 and err == [f"error: {'a' * 300}: File name too long"]


def test_a_newline_in_a_name_forges_no_line(dataset, tmp_path, capsys):
    assert run_here(dataset, tmp_path / "run\niter 9: loss 0.0", max_iters=1) == 0
    assert "run\\niter 9" in (output := capsys.readouterr().out) and "\niter 9" not in output


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
    def prompt(self):
        return [0]

    def decode(self, ids):
        return "\x1b[31m"


FULL_CONSOLES = {
    "sample": (1, ["--out_dir=RUN", "--device=cpu", "--num_samples=1", "--max_new_tokens=2"]),
    "compare": (1, ["RUN"]),
    "configurator": (1, []),
    "train": (0, ["RUN'S FLAGS"]),  # of a run that is finished
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
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


PLANS = [dict(hours=hours, max_iters=8) for hours in (math.nan, math.inf, -1, 0, 10**400, "1", [])]


@pytest.mark.parametrize("plan", [*PLANS, dict(hours=1, max_iters=0), [], 3])
def test_a_plan_of_nonsense_does_not_end_the_run_badly(plan, dataset, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert run_here(dataset, tmp_path, max_iters=2) == 0
    assert capsys.readouterr().out.endswith("end: max_iters after 2 iterations, 256 tokens\n")


def test_a_mistyped_folder_to_resume_is_told_from_the_runs_beside_it(dataset, tmp_path):
    run_here(dataset, tmp_path / "quickstart", max_iters=1)
    (tmp_path / "quikstar").mkdir()  # nearer, but no run
    with pytest.raises(UserError, match=f"did you mean {tmp_path}/quickstart\\?"):
        run_here(dataset, tmp_path / "quikstart", init_from="resume")


def test_a_run_of_many_epochs_is_warned_of_once_and_a_usual_one_never(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path / "few", max_iters=40, eval_interval=40)  # 3.3 epochs
    assert "epochs: " not in capsys.readouterr().err
    run_here(dataset, tmp_path / "many", max_iters=60, eval_interval=60)  # 5.0 of 1,537 tokens
    assert capsys.readouterr().err.count("5.0 epochs: more than about 4 teach little") == 1


def test_a_cpu_without_room_for_the_model_is_told_more_than_nvidia_smi(
    dataset, tmp_path, monkeypatch
):
    at_call(monkeypatch, train, "build_model", 0, lambda: exec("raise MemoryError"))
    with pytest.raises(RunError, match="no room for the model.*CPU: top"):
        run_here(dataset, tmp_path)


def test_the_last_lines_of_a_resumed_run_tell_this_start_from_all(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=4)
    newest = checkpoint.list_checkpoints(tmp_path)[-1]
    state = checkpoint.load(newest)
    state["ledger"] |= dict(steps=3600.0, evaluation=60.0)
    checkpoint.save(state, newest)
    run_here(dataset, tmp_path, init_from="resume", max_iters=6)
    last = capsys.readouterr().out
    assert re.search(r"time: 1h01m wall \(this start \d+s\) = .*steps 3600", last)
    assert "evaluation with sample and picture 60." in last
