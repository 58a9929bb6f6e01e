"""
Interrupt runs by signals, kills and errors, and damage their checkpoints. A resumed run equals an
uninterrupted one, and the interrupted run's exit code and folder tell what happened.
"""

import signal
import sys
import textwrap
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from fault_injection import watched
from program import (
    FAST,
    InProcessRun,
    Run,
    assert_same_run,
    finish,
    flags,
    gradients_of_nan,
    lines,
    needs_signals,
    run,
    same,
    sigterm,
    start,
    stopped,
    train,
)

TINY = dict(gradient_accumulation_steps=3, learning_rate=0.01, min_lr=0.001)
TINY |= dict(warmup_iters=3, max_iters=12, lr_decay_iters=12, eval_interval=4, eval_tokens=20 * 16)
TINY |= dict(keep_checkpoints=9, seed=5, dropout=0.2)


# -----------------------------------------------------------------------------
# Stopped and resumed = straight

KINDS = {
    "float16 with its scale": dict(dtype="float16"),
    "fast with Muon": FAST,
    "bfloat16, untied, wsd": dict(
        dtype="bfloat16", tie_weights=False, lr_schedule="wsd", decay_fraction=0.6
    ),
    "AdamW with samples, rarely logged": dict(sample_tokens=8, log_interval=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_run(kind, tiny, ran, tmp_path):
    keys = tiny | KINDS[kind]
    train(**keys | dict(out_dir=tmp_path))
    stopped(6, **keys)
    assert ran.saved[-1] == 6
    train(**keys)
    assert_same_run(tmp_path, ran.out_dir, 12)
    samples = ran.column("sample", "iter", "text")
    assert samples == Run(tmp_path).column("sample", "iter", "text")
    assert len(samples) == (3 if "sample_tokens" in keys else 0)


def send_two(first: int, second: int, apart: float) -> Callable[[], None]:
    """Return a function that sends this process two signals, with so many seconds between them."""

    def send() -> None:
        signal.raise_signal(first)
        time.sleep(apart)
        signal.raise_signal(second)

    return send


TIMEOUT = send_two(signal.SIGINT, signal.SIGINT, 0.0)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
# the moment, what happens then, the exit code, and the checkpoints and evaluations that it leaves
BREAKS = {
    "a signal in the first evaluation": (("evaluation", 1), sigterm, 143, [0], [0]),
    "a signal in a save": (("save", 2), sigterm, 143, [4, 8, 9], [0, 4, 8]),
    "a signal in the last iteration": (("iteration", 12), sigterm, 0, [4, 8, 12], [0, 4, 8, 12]),
    "out of memory": (("iteration", 6), mock.Mock(side_effect=NO_MEMORY), 1, [4], [0, 4]),
    # two within half a second count as one
    "timeout -s INT": (("iteration", 6), TIMEOUT, 130, [4, 6], [0, 4]),
}
if sys.platform != "win32":  # its warning, then its end
    SLURM = send_two(signal.SIGUSR1, signal.SIGTERM, 0.6)
    BREAKS["Slurm"] = (("iteration", 6), SLURM, 138, [4, 6], [0, 4])


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_run_saves_what_it_can_and_resumes_as_if_nothing_had_happened(
    what, tiny, ran, straight
):
    """Save at a signal, but not after an error, which may come in the middle of an update."""
    moment, happens, code, saved, evaluated = BREAKS[what]
    trainer = InProcessRun()
    trainer.at[moment] = happens
    result = trainer.launch(**tiny)
    assert (result.code, ran.saved, ran.evals("iter")) == (code, saved, evaluated)
    reasons = [signal.Signals(code - 128).name] if code > 1 else ["max_iters"] * (code == 0)
    assert ran.column("end", "reason") == reasons
    assert ("error: out of memory; " in result.err) == (code == 1)
    assert ("stopping" in result.err) == (code != 1)
    assert trainer.launch(**tiny).code == 0
    assert_same_run(straight, ran.out_dir, 12)


TWICE = """
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.6)
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.5)
"""
# The code that a separate process runs after its sixth update, its exit code, the checkpoints that
# it leaves, and words of its output
ENDS = {
    "Ctrl-C twice": (TWICE, -2, [4], "stopping"),  # killed by it
    # every further line printed to the terminal fails
    "a closed terminal": ("os.close(terminal)", 129, [4, 6], ""),
}
OWN_TERMINAL = """
    terminal, its_end = os.openpty()
    os.login_tty(its_end)
    import io  # a terminal has no position, and after it closes nothing can be flushed
    sys.stdout = sys.stderr = io.TextIOWrapper(open(1, "wb", 0), "utf-8", write_through=True)
"""


@needs_signals
@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_is_stopped_resumes_as_if_nothing_had_happened(end, tiny, ran, straight):
    """Leave each record once in the log."""
    action, code, saved, said = ENDS[end]
    before = OWN_TERMINAL if "terminal" in end else ""
    script = watched("if n == 6:\n" + textwrap.indent(textwrap.dedent(action), "    "), before)
    result = finish(start(*script, *flags(**tiny)))
    assert (result.code, ran.saved) == (code, saved)
    assert said in result.err
    reasons = [signal.Signals(code - 128).name] if 6 in saved else []
    assert ran.column("end", "reason") == reasons
    train(**tiny)
    assert_same_run(straight, ran.out_dir, 12)
    assert ran.column("checkpoint", "iter") == sorted({*saved, 8, 12})
    assert ran.column("end", "reason") == ["max_iters"]


def test_a_fast_run_ends_with_the_averages_of_its_weights_and_goes_on_from_the_weights(
    tiny, ran, tmp_path
):
    """Exchange both only when the run is complete, and once, also if a kill delays its end."""
    keys, trainer = tiny | FAST, InProcessRun()
    train(**keys | dict(out_dir=tmp_path))
    before: list[torch.Tensor] = []  # the weights of an embedding before each update
    after: list[torch.Tensor] = []
    for moment, weights in (("update", before), ("iteration", after)):
        trainer.at[moment, None] = lambda w=weights: w.append(trainer.embedding.weight.clone())
    trainer.at["evaluation", 4] = mock.Mock(side_effect=KeyboardInterrupt())
    assert trainer.launch(**keys).code == 130
    assert trainer.launch(**keys).code == 0
    assert_same_run(tmp_path, ran.out_dir, 12)
    assert trainer.launch(**keys | dict(max_iters=13, keep_checkpoints=99)).code == 0
    assert torch.equal(before[-1], after[11])
    for it, last in ((8, after[7]), (12, after[11])):
        saved = ran.state(it)
        groups, state = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
        numbers = {n: i for g in groups for n, i in zip(g["param_names"], g["params"], strict=True)}
        averages = {name: state[number]["average"] for name, number in numbers.items()}
        assert averages.keys() == saved["model"].keys()
        both = (averages, saved["model"])
        assert [any(torch.equal(last, p) for p in some.values()) for some in both] == (
            [True, False] if it == 12 else [False, True]
        )


@pytest.mark.parametrize("recipe", [FAST, {}], ids=["averages", "adamw"])
def test_a_resume_that_ends_where_it_begins_completes_the_run_once(recipe, tiny, ran):
    """Evaluate and save the averages, which replace the weights that were evaluated there."""
    keys = tiny | recipe
    stopped(5, **keys)
    (ran.out_dir / "ckpt-00000005.pt").unlink()
    before = ran.state(4)
    assert before["val_loss"] is not None
    train(**keys | dict(max_iters=4))
    after = ran.state(4)
    assert after["complete"] and same(before["model"], after["model"]) == (recipe == {})
    assert after["val_loss"] == pytest.approx(ran.evals("val_loss")[-1], rel=1e-8)
    assert (before["val_loss"] == after["val_loss"]) == (recipe == {})
    assert "complete after" in train(**keys | dict(max_iters=4)).out


def test_a_resume_takes_its_hyperparameters_from_the_command(tiny, ran):
    train(**tiny | dict(max_iters=8))
    others = dict(learning_rate=5e-3, decay_fraction=0.0, beta1=0.7)
    others |= dict(lr_schedule="wsd", weight_decay=0.3)
    others |= dict(dropout=0.1, flash=False, loss_chunk="16")  # the model's free keys
    result = train(**tiny | others, init_from="resume")
    told = lines(result.out, "resume: ")
    assert "ckpt-00000008.pt" in told[0]
    for name, value in (others | dict(max_iters=12)).items():
        assert [line for line in told if f"{name} = {value!r}" in line]
    assert ran.steps("lr")[8:] == [5e-3] * 4
    group = ran.state(12)["optimizer"]["param_groups"][0]
    assert (group["betas"][0], group["weight_decay"]) == (0.7, 0.3)


# -----------------------------------------------------------------------------
# Weights: the best, and those that are not saved


def test_a_resume_changes_no_key_but_those_that_the_command_changes(tiny, ran):
    keys = tiny | dict(eval_iters=5)
    del keys["eval_tokens"]  # as in nanoGPT's configs
    del keys["dtype"]  # auto, which is not float16 on a CPU
    stopped(1, **keys, dtype="float16")
    smaller = dict(batch_size=2, gradient_accumulation_steps=6)  # as many sequences
    train(**keys | smaller)
    first, second = ran.column("start", "config")
    assert second == first | dict(batch_size=2)


def test_weights_that_are_not_finite_are_not_saved(tiny, ran):
    trainer = InProcessRun()
    trainer.at["iteration", 6] = lambda: trainer.embedding.weight.data.fill_(torch.inf)
    # such a model is evaluated first, but no text is drawn from it
    keys = dict(eval_interval=6, sample_tokens=4, checkpoint_interval=2)
    result = trainer.launch(**tiny | keys)
    assert (result.code, ran.saved) == (1, [2, 4])
    assert all(word in result.err.splitlines()[-1] for word in ("not finite", "--init_from=resume"))
    assert "Traceback" not in result.err
    assert ran.evals("iter", "val_loss")[-1] == (6, None)
    # a resume continues from the good weights
    train(**tiny)
    assert ran.steps("iter") == [*range(12)]


@pytest.mark.parametrize("factor", [torch.nan, 100.0], ids=["nan", "above MAX_LOSS"])
def test_a_diverged_model_with_finite_weights_replaces_no_checkpoint(factor, tiny, ran):
    """The next launch resumes from the last good checkpoint; nobody has to move a file."""
    train(**tiny | dict(max_iters=4))
    loss = torch.nn.functional.cross_entropy

    def diverged(*arguments, **named):
        return loss(*arguments, **named) * (1 if torch.is_grad_enabled() else factor)

    with mock.patch("torch.nn.functional.cross_entropy", diverged):
        result = run("train.py", *flags(**tiny, init_from="resume"))
    assert (result.code, ran.saved) == (1, [4])
    assert ran.evals("iter")[-1] == 8
    train(**tiny, init_from="resume")
    assert ran.saved == [4, 8, 12]


@pytest.mark.parametrize(
    "skipped, code", [([*range(3, 22), 23, 24], 0), (range(3, 23), 1)], ids=["19", "20"]
)
def test_twenty_skipped_updates_in_a_row_end_the_run(skipped, code, tiny, ran):
    """Allow 19 in a row, because float16 may skip 16 until its loss scale is low enough."""
    keys = tiny | dict(gradient_accumulation_steps=1, max_iters=25, eval_interval=100)
    with gradients_of_nan(skipped):
        result = run("train.py", *flags(**keys))
    assert result.code == code
    last = result.err.splitlines()[-1]
    # a run that has saved nothing has nothing to resume
    assert "skipped" in last and "--init_from=resume" not in last
    assert len(ran.steps("iter")) == (23 if code else 25)


# -----------------------------------------------------------------------------
# Signals to a process


@needs_signals
@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_run_ignores_a_signal_that_was_ignored_when_it_started(name, tiny, ran):
    """Ignore SIGHUP under nohup, and Ctrl-C meant for another program after `&` in a script."""
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
    trainer = InProcessRun()
    trainer.at["iteration", 3] = lambda: signal.raise_signal(number)
    assert (trainer.launch(**tiny).code, ran.saved[-1]) == (0, 12)
