"""
Interrupt runs by signals, kills and errors, and damage their checkpoints. A resumed run equals an
uninterrupted one, and the interrupted run's exit code and folder tell what happened.
"""

import os
import signal
import sys
import time
from unittest import mock

import pytest
import torch
from cases import slow_but
from fault_injection import watched
from program import (
    FAST,
    TINY_RUN,
    InProcessRun,
    assert_same_run,
    best,
    checkpoint,
    checkpoints,
    column,
    finish,
    flags,
    needs_signals,
    raises,
    records,
    run,
    same,
    sigterm,
    start,
    train,
    wait_for_line,
    write_tokens,
)

TINY = TINY_RUN | dict(
    gradient_accumulation_steps=3,
    learning_rate=0.01,
    min_lr=0.001,
    warmup_iters=3,
    max_iters=12,
    lr_decay_iters=12,
    eval_interval=4,
    eval_tokens=20 * 16,
    keep_checkpoints=9,
    seed=5,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    """Write a dataset, and return the keys of a run of 12 iterations on it."""
    folder = tmp_path_factory.mktemp("nights")
    return TINY | dict(dataset=write_tokens(folder / "tokens", [700, 37, 500], [250, 150]))


# -----------------------------------------------------------------------------
# Stopped and resumed = unbroken

KINDS = {
    "AdamW with dropout": dict(dropout=0.2),
    "float16 with its scale": dict(dropout=0.2, dtype="float16"),
    "fast with Muon": FAST | dict(dropout=0.2),
    "bfloat16, recomputed, untied, wsd": dict(
        dropout=0.2,
        dtype="bfloat16",
        recompute=True,
        tie_weights=False,
        lr_schedule="wsd",
        decay_fraction=0.6,
    ),
    "with samples, rarely logged": dict(dropout=0.2, sample_tokens=8, log_interval=5),
}


@pytest.mark.parametrize("kind", slow_but("AdamW with dropout", "fast with Muon", of=KINDS))
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_run(kind, tiny, tmp_path):
    keys = tiny | KINDS[kind]
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    train(**keys, out_dir=unbroken)
    trainer = InProcessRun()
    trainer.at["iteration", 6] = sigterm
    # auto starts a run if there is none, so the same command serves twice
    again = keys | dict(out_dir=stopped, init_from="auto")
    assert trainer.launch(**again).code == 143
    assert checkpoints(stopped)[-1] == 6
    assert trainer.launch(**again).code == 0
    assert_same_run(unbroken, stopped, 12)
    samples = column(stopped, "sample", "iter", "text")
    assert samples == column(unbroken, "sample", "iter", "text")
    assert len(samples) == (3 if "sample_tokens" in KINDS[kind] else 0)


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("unbroken")
    train(**tiny, dropout=0.2, out_dir=out_dir)
    return out_dir


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
# the moment, what happens then, the exit code, and the checkpoints and evaluations that it leaves
BREAKS = {
    "a signal in the first evaluation": (("evaluation", 1), sigterm, 143, [0], []),
    "a signal in the first iteration": (("iteration", 1), sigterm, 143, [1], [0]),
    "a signal in an evaluation": (("evaluation", 3), sigterm, 143, [4, 8], [0, 4]),
    "a signal in a save": (("save", 2), sigterm, 143, [4, 8, 9], [0, 4, 8]),
    "a signal before the last evaluation": (("iteration", 12), sigterm, 143, [4, 8, 12], [0, 4, 8]),
    "a signal in the last evaluation": (("evaluation", 4), sigterm, 143, [4, 8, 12], [0, 4, 8]),
    "out of memory": (("iteration", 6), raises(NO_MEMORY), 1, [4], [0, 4]),
    "an unforeseen error": (("iteration", 6), raises(ValueError("unforeseen")), 1, [4], [0, 4]),
}
KEPT = ("a signal in an evaluation", "a signal in a save", "a signal in the last evaluation")


@pytest.mark.parametrize("what", slow_but(*KEPT, "out of memory", of=BREAKS))
def test_a_broken_run_saves_what_it_can_and_resumes_as_if_nothing_had_happened(
    what, tiny, unbroken, tmp_path
):
    """Save at a signal, but not after an error, which may come in the middle of an update."""
    moment, happens, code, saved, evaluated = BREAKS[what]
    keys = tiny | dict(dropout=0.2, out_dir=tmp_path, init_from="auto")
    trainer = InProcessRun()
    trainer.at[moment] = happens
    result = trainer.launch(**keys)
    assert (result.code, checkpoints(tmp_path)) == (code, saved)
    assert column(tmp_path, "eval", "iter") == evaluated
    assert column(tmp_path, "end", "reason") == (["SIGTERM"] if code == 143 else [])
    assert ("Traceback" in result.err) == (what == "an unforeseen error")
    assert trainer.launch(**keys).code == 0
    assert_same_run(unbroken, tmp_path, 12)


@pytest.mark.parametrize("moment", [("iteration", 12), ("evaluation", 4)])
def test_a_fast_run_ends_with_the_averages_of_its_weights(moment, tiny, tmp_path):
    """Use the averages only when the run is complete, and once, also if a signal delays its end."""
    keys = tiny | FAST
    train(**keys, out_dir=tmp_path / "unbroken")
    again = keys | dict(out_dir=tmp_path / "stopped", init_from="auto")
    trainer = InProcessRun()
    trainer.at[moment] = sigterm
    assert trainer.launch(**again).code == 143
    assert trainer.launch(**again).code == 0
    assert_same_run(tmp_path / "unbroken", tmp_path / "stopped", 12)
    for it, is_averaged in ((8, False), (12, True)):
        saved = checkpoint(tmp_path / "stopped", it)
        groups, state = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
        numbers = {n: i for g in groups for n, i in zip(g["param_names"], g["params"], strict=True)}
        averages = {name: state[number]["average"] for name, number in numbers.items()}
        assert averages.keys() == saved["model"].keys()
        assert is_averaged == all(same(averages[name], p) for name, p in saved["model"].items())


def test_a_signal_ends_eval_only_with_the_signals_exit_code(tiny, tmp_path):
    train(**tiny, out_dir=tmp_path)
    before = contents(tmp_path)
    trainer = InProcessRun()
    trainer.at["evaluation", 1] = sigterm
    result = trainer.launch(**tiny, out_dir=tmp_path, init_from="resume", eval_only=True)
    assert result.code == 143
    assert "end: eval_only" not in result.out
    assert contents(tmp_path) == before


def contents(folder) -> dict[str, bytes]:
    """Return the contents of each file in a folder, by name, except the lock's."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_a_resume_takes_its_hyperparameters_from_the_command(tiny, tmp_path):
    train(**tiny | dict(max_iters=8), out_dir=tmp_path)
    others = dict(learning_rate=5e-3, lr_schedule="constant", beta1=0.7, weight_decay=0.3)
    result = train(**tiny | others, out_dir=tmp_path, init_from="resume")
    told = [line for line in result.out.splitlines() if line.startswith("resume: ")]
    assert "ckpt-00000008.pt" in told[0]
    for name, value in (others | dict(max_iters=12)).items():
        assert [line for line in told if f"{name} = {value!r}" in line]
    assert column(tmp_path, "step", "lr")[8:] == [5e-3] * 4
    group = checkpoint(tmp_path, 12)["optimizer"]["param_groups"][0]
    assert (group["betas"][0], group["weight_decay"]) == (0.7, 0.3)


def test_a_resume_takes_model_data_and_seed_from_the_checkpoint(tiny, unbroken, tmp_path):
    """Resume without typing the model's sizes, the dataset and the seed again."""
    keys = tiny | dict(dropout=0.2, out_dir=tmp_path)
    train(**keys | dict(max_iters=8))
    kept = ("n_layer", "n_head", "n_embd", "block_size", "seed", "dataset")
    rest = {name: value for name, value in keys.items() if name not in kept}
    train(**rest, init_from="resume")
    assert_same_run(unbroken, tmp_path, 12)


def test_a_resume_with_another_micro_batch_size_trains_on_the_same_windows(tiny, tmp_path):
    train(**tiny, out_dir=tmp_path / "unbroken")
    trainer = InProcessRun()
    trainer.at["iteration", 5] = sigterm
    trainer.launch(**tiny, out_dir=tmp_path / "cut")
    cut_otherwise = dict(batch_size=2, gradient_accumulation_steps=6, init_from="resume")
    train(**tiny | cut_otherwise, out_dir=tmp_path / "cut")
    for kind, names in (("step", ("loss", "lr", "grad_norm", "tokens")), ("eval", ("val_loss",))):
        for name in names:
            # float32 adds in a different order; other windows would differ by about 0.1
            expected = pytest.approx(column(tmp_path / "unbroken", kind, name), abs=1e-4)
            assert column(tmp_path / "cut", kind, name) == expected


def test_a_run_saved_before_its_first_iteration_resumes(tiny, unbroken, tmp_path):
    """Resume from a checkpoint with initial weights and no optimizer state."""
    keys = tiny | dict(dropout=0.2, out_dir=tmp_path)
    train(**keys | dict(max_iters=0))
    train(**keys, init_from="resume")
    assert_same_run(unbroken, tmp_path, 12)


def test_a_resume_does_not_repeat_the_evaluation_of_its_checkpoint(tiny, tmp_path):
    train(**tiny | dict(max_iters=8), out_dir=tmp_path)
    # the newest checkpoint has the most iterations, even if another was touched since
    os.utime(tmp_path / "ckpt-00000004.pt")
    trainer = InProcessRun()
    trainer.launch(**tiny, out_dir=tmp_path, init_from="resume")
    assert trainer.count["evaluation"] == 1
    assert column(tmp_path, "eval", "iter") == [0, 4, 8, 12]


def start_watched(action: str, **keys):
    return start(*watched(action), *flags(**keys))


@needs_signals
def test_after_kill_9_and_a_resume_the_log_holds_each_record_once(tiny, unbroken, tmp_path):
    keys = tiny | dict(dropout=0.2, out_dir=tmp_path)
    # after the evaluation and the save at 8, and two more iterations
    at_10 = """
        if n == 10:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = start_watched(at_10, **keys)
    assert finish(killed).code == -signal.SIGKILL
    assert column(tmp_path, "step", "iter") == [*range(9)]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "it')  # what a kill or a power cut may leave of a line
    train(**keys, init_from="auto")
    assert_same_run(unbroken, tmp_path, 12)
    assert column(tmp_path, "checkpoint", "iter") == [4, 8, 12]
    assert len(records(tmp_path, "end")) == 1


# -----------------------------------------------------------------------------
# Checkpoints: the best, the kept, the damaged


# a rate far too high, with which a run gets worse
WORSE = dict(learning_rate=0.3, min_lr=0.3, max_iters=24, init_from="resume")
BETTER = dict(learning_rate=1e-2, min_lr=1e-2, max_iters=24, init_from="resume")


def losses_of(out_dir) -> dict[int, float]:
    losses = dict(column(out_dir, "eval", "iter", "val_loss"))
    del losses[0]  # untrained weights are not saved
    return losses


@pytest.mark.parametrize("then, number", slow_but((WORSE, 12), of=[(WORSE, 12), (BETTER, 24)]))
def test_best_pt_has_the_lowest_logged_loss_across_a_resume(then, number, tiny, tmp_path):
    train(**tiny, out_dir=tmp_path)
    train(**tiny | then, out_dir=tmp_path)
    losses = losses_of(tmp_path)
    assert number == min(losses, key=losses.get), losses
    assert same(best(tmp_path)["model"], checkpoint(tmp_path, number)["model"])
    # the log keeps nine digits
    assert best(tmp_path)["val_loss"] == pytest.approx(losses[number], rel=1e-8)


OTHERS = {
    "eval_tokens": (dict(), dict(eval_tokens=64)),
    "eval_iters": (dict(eval_tokens=0, eval_iters=5), dict(eval_tokens=0, eval_iters=1)),
    "batch_size": (dict(eval_tokens=0, eval_iters=5), dict(batch_size=2)),  # as many tokens
}


@pytest.mark.parametrize("key", slow_but("eval_tokens", of=OTHERS))
def test_best_pt_stays_if_a_resume_finds_no_lower_loss(key, tiny, tmp_path):
    before, after = OTHERS[key]
    train(**tiny | before, out_dir=tmp_path)
    train(**tiny | after | WORSE, out_dir=tmp_path)
    losses = losses_of(tmp_path)
    number = min(losses, key=losses.get)
    assert best(tmp_path)["progress"]["iter_num"] == number <= 12


def test_a_resume_with_the_same_flags_changes_no_key(tiny, tmp_path):
    """
    The resume also keeps eval_tokens=0, which every config of nanoGPT has, because otherwise
    compare.py would warn that the key changed.
    """
    keys = tiny | dict(eval_tokens=0, eval_iters=5, out_dir=tmp_path, init_from="auto")
    trainer = InProcessRun()
    trainer.at["iteration", 1] = sigterm
    trainer.launch(**keys)
    train(**keys)
    first, second = column(tmp_path, "start", "config")
    assert second == first


def flip(content: bytearray) -> None:
    content[len(content) // 3] ^= 1


def cut(content: bytearray) -> None:
    del content[-100:]


def blank(content: bytearray) -> None:
    content[:] = bytes(len(content))


def damage(path, how) -> None:
    content = bytearray(path.read_bytes())
    how(content)
    path.unlink()  # best.pt may be a link to this file
    path.write_bytes(content)


@pytest.mark.parametrize("how", slow_but(flip, cut, of=[flip, cut, blank, bytearray.clear]))
def test_a_damaged_newest_checkpoint_is_named_and_the_run_resumes_from_the_one_before(
    how, tiny, unbroken, tmp_path
):
    keys = tiny | dict(dropout=0.2, out_dir=tmp_path)
    train(**keys | dict(max_iters=8))
    damage(tmp_path / "ckpt-00000008.pt", how)
    trainer = InProcessRun()
    result = trainer.launch(**keys, init_from="auto")
    assert result.code == 0
    assert "ckpt-00000008.pt" in result.err
    # resumed from iteration 4
    assert trainer.count["iteration"] == 8
    assert_same_run(unbroken, tmp_path, 12)


@pytest.mark.parametrize("value", slow_but(torch.inf, of=[torch.nan, torch.inf]))
def test_weights_with_nan_or_infinity_are_not_saved(value, tiny, tmp_path):
    def spoil(model):
        with torch.no_grad():
            next(model.parameters()).fill_(value)

    trainer = InProcessRun()
    trainer.at["iteration", 6] = lambda: spoil(trainer.embedding)
    # such a model is evaluated first, but no text is drawn from it
    keys = tiny | dict(eval_interval=6, sample_tokens=4, checkpoint_interval=2, out_dir=tmp_path)
    result = trainer.launch(**keys)
    assert result.code == 1
    assert "not finite" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert checkpoints(tmp_path) == [2, 4]
    assert column(tmp_path, "eval", "iter", "val_loss")[-1] == (6, None)
    # a resume continues from the good weights
    train(**tiny, out_dir=tmp_path, init_from="auto")
    assert column(tmp_path, "step", "iter") == [*range(12)]


DEAD = {
    "a huge val loss": (dict(learning_rate=1e3, min_lr=1e3, grad_clip=0, eval_interval=8), ""),
    "skipped updates": (dict(), "if n == 5: torch.Tensor.backward = spoilt"),
}
SPOILT = """
    backward = torch.Tensor.backward
    def spoilt(loss):
        backward(loss * torch.nan)
"""


@pytest.mark.parametrize("sign", DEAD)
def test_a_diverged_state_replaces_no_checkpoint_and_the_error_names_the_one_to_resume(
    sign, tiny, tmp_path
):
    """Resume from that checkpoint with the earlier rate, without moving any file."""
    keys = tiny | dict(max_iters=20, eval_interval=4, keep_checkpoints=2, out_dir=tmp_path)
    train(**keys | dict(max_iters=4))
    changes, action = DEAD[sign]
    script = watched(action, before=SPOILT)
    process = start(*script, *flags(**keys | changes, init_from="resume"))
    result = finish(process)
    assert result.code == 1
    assert checkpoints(tmp_path) == ([4, 8] if action else [4])
    newest = tmp_path / f"ckpt-{checkpoints(tmp_path)[-1]:08}.pt"
    assert result.err.endswith(f"--init_from=resume continues from {newest}\n")
    train(**keys, init_from="resume")
    assert checkpoints(tmp_path) == [16, 20]


@pytest.mark.parametrize("kind", slow_but({}, of=[{}, FAST]), ids=["gpt2", "fast"])
def test_a_final_evaluation_that_runs_out_of_memory_comes_after_a_save(kind, tiny, tmp_path):
    """End as soon again if the memory is still short, and otherwise like a run that had enough."""

    keys = tiny | kind | dict(out_dir=tmp_path / "run", init_from="auto")
    train(**keys | dict(out_dir=tmp_path / "whole"))
    for evaluation in (4, 1):  # of the launch: each time that of the trained model
        trainer = InProcessRun()
        trainer.at["evaluation", evaluation] = raises(NO_MEMORY)
        result = trainer.launch(**keys)
        assert result.code == 1 and "--batch_size=3" in result.err.splitlines()[-1]
        assert checkpoints(tmp_path / "run") == [4, 8, 12]
    train(**keys)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 12)


SKIPPED = {
    "19": (range(3, 22), 0),
    "20": (range(3, 23), 1),
    "22, but not in a row": ([*range(12), *range(13, 23)], 0),
}


@pytest.mark.parametrize("updates", slow_but("20", of=SKIPPED))
def test_twenty_skipped_updates_in_a_row_end_the_run(updates, tiny, tmp_path):
    """Allow 19 in a row, because float16 may skip 16 until its loss scale is low enough."""
    skipped, code = SKIPPED[updates]
    backward = torch.Tensor.backward
    iterations = iter(range(40))

    def spoilt(loss):
        is_bad = next(iterations) in skipped
        backward(loss * torch.nan if is_bad else loss)

    keys = tiny | dict(gradient_accumulation_steps=1, max_iters=25, eval_interval=100)
    with mock.patch.object(torch.Tensor, "backward", spoilt):
        result = run("train.py", *flags(**keys, out_dir=tmp_path))
    assert result.code == code
    assert "skipped" in result.err.splitlines()[-1]
    assert len(records(tmp_path, "step")) == (23 if code else 25)


# -----------------------------------------------------------------------------
# Signals to a process


@needs_signals
@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_run_ignores_a_signal_that_was_ignored_when_it_started(name, tiny, tmp_path):
    """Ignore SIGHUP under nohup, and Ctrl-C meant for another program after `&` in a script."""
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
    trainer = InProcessRun()
    trainer.at["iteration", 3] = lambda: signal.raise_signal(number)
    assert trainer.launch(**tiny, out_dir=tmp_path).code == 0
    assert checkpoints(tmp_path)[-1] == 12


@needs_signals
def test_a_second_ctrl_c_ends_the_run_at_once(tiny, tmp_path):
    train(**tiny | dict(max_iters=4), out_dir=tmp_path)
    keys = tiny | dict(init_from="resume", out_dir=tmp_path)
    long_iteration = """
        print("updated")
        time.sleep(100)
    """
    process = start_watched(long_iteration, **keys)
    wait_for_line(process, "updated")
    process.send_signal(signal.SIGINT)
    # the answer to the first Ctrl-C
    assert "stopping" in process.stderr.readline()
    time.sleep(0.6)  # two within half a second count as one that torchrun sent twice
    process.send_signal(signal.SIGINT)
    result = finish(process, timeout=60)
    assert result.code == 130
    assert checkpoints(tmp_path) == [4]
    train(**tiny, out_dir=tmp_path, init_from="resume")


ONE_STOP = {
    "Slurm's warning and then its end": ("SIGUSR1", 0.6, "SIGTERM", 138),
    "SIGXCPU each second": ("SIGXCPU", 0.6, "SIGXCPU", 152),
    "passed on by torchrun": ("SIGTERM", 0.0, "SIGTERM", 143),
}


@needs_signals
@pytest.mark.parametrize("sender", slow_but("passed on by torchrun", of=ONE_STOP))
def test_a_stop_sent_as_two_signals_still_saves(sender, tiny, tmp_path):
    """Cover the pairs of signals that Slurm, a CPU limit and torchrun send."""
    first, seconds, second, code = ONE_STOP[sender]
    at_3 = f"""
        if n == 3:
            signal.raise_signal(signal.{first})
            time.sleep({seconds})
            signal.raise_signal(signal.{second})
            time.sleep(0.1)
    """
    keys = tiny | dict(max_iters=10**6, eval_interval=10**6, out_dir=tmp_path)
    result = finish(start_watched(at_3, **keys))
    assert result.code == code
    (end,) = records(tmp_path, "end")
    assert (end["reason"], end["iters"]) == (first, 3)
    assert checkpoints(tmp_path) == [3]


@pytest.mark.skipif(not hasattr(os, "login_tty"), reason="needs pseudo-terminals")
def test_a_run_saves_and_ends_if_its_terminal_is_closed(tiny, tmp_path):
    """Save even though every further line printed to the terminal fails."""
    terminal, its_end = os.openpty()
    login = f"os.login_tty(os.open({os.ttyname(its_end)!r}, os.O_RDWR))"
    keys = tiny | dict(max_iters=10**6, eval_interval=10**6, out_dir=tmp_path)
    process = start(*watched(before=login), *flags(**keys))
    seen = b""
    while b"iter 5:" not in seen:
        seen += os.read(terminal, 1000)
    os.close(its_end)
    os.close(terminal)
    assert finish(process).code == 129
    (end,) = records(tmp_path, "end")
    assert checkpoints(tmp_path) == [end["iters"]]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_run_trains_on_and_stops_at_a_signal_if_nobody_reads_its_console(tiny, tmp_path):
    """Write all lines to log.txt, long after the pipe is full."""
    keys = tiny | dict(max_iters=10**6, eval_interval=10**6, out_dir=tmp_path)
    process = start("train.py", *flags(**keys))
    deadline = time.monotonic() + 60
    log = tmp_path / "log.txt"
    while not log.exists() or log.stat().st_size < 100_000:  # a pipe holds 65,536 bytes
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    (end,) = records(tmp_path, "end")
    lines = [line for line in log.read_text().splitlines() if line.startswith("iter ")]
    assert len(lines) == end["iters"] == checkpoints(tmp_path)[-1]


@needs_signals
def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback():
    process = start("-X", "importtime", "train.py", "config/quickstart.py")
    for line in process.stderr:
        if "torch" in line:
            break
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert "Traceback" not in result.err
    assert result.code in (-signal.SIGINT, 130)
