"""
Run several processes (gloo, on the CPU): they train like one, decide together, and leave no process
behind. test_losses.py compares the numbers of two ranks.

Most tests start the ranks themselves, with the environment that torchrun would give them. The tests
in which torchrun itself starts, stops and restarts ranks use the real torchrun, and are slow.
"""

import shutil
from pathlib import Path

import psutil
import pytest
from fault_injection import watched
from program import (
    FAST,
    ROOT,
    Run,
    finish,
    flags,
    lines,
    start,
    train,
    train_ranks,
    wait_for_line,
    write_tokens,
)

pytest.importorskip("fcntl", reason="signals of POSIX")


TINY = dict(gradient_accumulation_steps=4, learning_rate=0.01, warmup_iters=2)
TINY |= dict(max_iters=12, lr_decay_iters=12, eval_interval=6, eval_tokens=320)


def assert_same_numbers(left: Path, ran: Run) -> None:
    """
    Compare two logs as far as the left run went. Several ranks sum in a different order than one,
    so allow for rounding.
    """
    for kind, names in (("step", ("loss", "tokens")), ("eval", ("val_loss",))):
        iterations = Run(left).column(kind, "iter")
        assert iterations
        assert ran.column(kind, "iter")[: len(iterations)] == iterations
        for name in names:
            expected = pytest.approx(Run(left).column(kind, name), abs=1e-4)
            assert ran.column(kind, name)[: len(iterations)] == expected


# -----------------------------------------------------------------------------
# The same training

# what this rank holds of the weights and of the optimizer's state
HOLDS = """
    import hashlib
    from torch.utils._pytree import tree_leaves
    weights = [group["params"] for group in optimizer.param_groups]
    held = tree_leaves([weights, optimizer.state_dict()["state"]])
    content = b"".join(x.detach().numpy().tobytes() for x in held)
    print("holds", hashlib.sha256(content).hexdigest(), file=sys.stderr)
"""
STOPS = """
    if n == 6 and RANK == "0":
        signal.raise_signal(signal.SIGTERM)
"""


def test_ranks_hold_the_same_weights_and_a_run_of_theirs_resumes_in_one_process(
    tiny, ran, tmp_path
):
    """Compare the weights and the optimizer's state bit for bit after each update."""
    # with one window per batch, the second rank has none of an evaluation's 15 windows in the last
    # batch
    keys = tiny | FAST | dict(batch_size=1, eval_tokens=15 * 16)
    train(**keys | dict(out_dir=tmp_path / "alone"))
    one, two = train_ranks(2, codes=[143, 143], script=watched(HOLDS + STOPS), **keys)
    assert lines(one.err, "holds ") == lines(two.err, "holds ")
    assert len(lines(one.err, "holds ")) >= 6
    train(**keys)
    assert_same_numbers(tmp_path / "alone", ran)


@pytest.mark.slow
def test_compiled_ranks_train_like_one_eager_process(tiny, ran, straight):
    for last in (6, 12):
        results = train_ranks(2, **tiny | dict(max_iters=last, compile=True))
        assert "".join(result.out for result in results).count("compile: ") == 1
    assert_same_numbers(straight, ran)
    assert not ran.records("event")


# -----------------------------------------------------------------------------
# Bad starts


def refused_on_two_ranks(folder: Path, before: str, words: list[str], **keys) -> None:
    """Check that two ranks, which first run `before`, end with one error line of these words."""
    script = watched(before=before)
    results = train_ranks(2, codes=[None, None], script=script, cwd=folder, **keys)
    # once, unless this machine is too slow to end the second rank in time
    (line,) = {*lines("".join(result.err for result in results), "error: ")}
    assert not any("Traceback" in result.err for result in results)
    assert all(word in line for word in words), line


# each rank in a folder of its own, as on another machine
APART = "os.chdir(RANK)"
# what each rank does first, its keys, and the words of the one error line
BAD_STARTS = {
    "other data": (APART, dict(dataset="data"), ["data", "rank", "same"]),
    "a file in the place of out_dir": ("", dict(out_dir=Path("file/run")), ["file/run"]),
    "a network that is not there": (
        'os.environ["GLOO_SOCKET_IFNAME"] = "none0"',
        {},
        ["none0", "GLOO_SOCKET_IFNAME"],
    ),
    "variables of torchrun's, but not all": ('del os.environ["MASTER_ADDR"]', {}, ["MASTER_ADDR"]),
}


@pytest.mark.parametrize("row", BAD_STARTS)
def test_a_bad_start_prints_one_error_line_for_all_ranks_and_trains_nothing(
    row, tiny, ran, tmp_path
):
    before, changes, words = BAD_STARTS[row]
    (tmp_path / "file").touch()
    for rank in "01":
        write_tokens(tmp_path / rank / "data", [700 + int(rank)], [250])
    refused_on_two_ranks(tmp_path, before, words, **tiny | changes)
    assert not (ran.out_dir / "metrics.jsonl").exists() or not ran.steps("iter")
    assert not [*tmp_path.rglob("*.pt")]


def test_a_rank_left_in_the_environment_means_nothing_without_a_world_size(
    tiny, ran, straight, monkeypatch
):
    for name, value in dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="").items():
        monkeypatch.setenv(name, value)
    train(**tiny)
    assert_same_numbers(straight, ran)


def test_a_run_of_which_one_machine_lacks_the_checkpoint_is_refused(tiny, tmp_path):
    """Here after the evaluation at iteration 0, which one machine has done and one has not."""
    keys = tiny | dict(out_dir="out")
    train(**keys | dict(out_dir=tmp_path / "0/out", max_iters=0))
    (tmp_path / "1").mkdir()
    refused_on_two_ranks(tmp_path, APART, ["checkpoint", "same"], **keys)


# -----------------------------------------------------------------------------
# What ends one rank ends all of them

STOP = "signal.raise_signal(signal.SIGTERM)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# when, after update n, which rank does what; the exit codes, a word of the one error line,
# why the run ended, its checkpoints and its evaluations
BREAKS = {
    "a signal to all": ("n == 5", STOP, [143, 143], "", ["SIGTERM"], [5], [0]),
    # torchrun sends a signal to all, so what only another rank gets is not meant for the run
    "a signal to the second": (
        "n == 5 and RANK == '1'",
        STOP,
        [0, 0],
        "",
        ["max_iters"],
        [6, 12],
        [0, 6, 12],
    ),
    "one is killed": ("n == 8 and RANK == '1'", KILL, [None, -9], "", [], [6], [0, 6]),
    "no val shard": (
        "n == 2 and RANK == '1'",
        "os.truncate('tokens/val_000000.bin', 1100)",
        [None, 1],
        "val_000000.bin",
        [],
        [],
        [0],
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_what_ends_one_rank_ends_all_and_they_save_what_they_can(
    what, tiny, ran, tokens, straight, tmp_path
):
    """Resume in one process like one that nothing has broken."""
    when, action, codes, word, reason, saved, evaluated = BREAKS[what]
    for rank in "01":
        shutil.copytree(tokens, tmp_path / rank / "tokens")
    script = watched(f"if {when}:\n    {action}", APART)
    keys = tiny | dict(dataset="tokens")
    results = train_ranks(2, codes=codes, script=script, cwd=tmp_path, **keys)
    errors = lines("".join(result.err for result in results), "error: ")
    assert [word in line for line in errors] == [True] * bool(word), errors
    assert ran.column("end", "reason") == reason
    if reason:
        assert ran.saved[-1] == ran.end["iters"] == len(ran.steps("iter"))
    assert (ran.saved, ran.evals("iter")) == (saved, evaluated)
    train(**tiny)
    assert_same_numbers(straight, ran)


# -----------------------------------------------------------------------------
# torchrun


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_once_and_leaves_no_process(tiny, ran, straight):
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    words += [str(ROOT / "train.py"), *flags(**tiny | dict(max_iters=10**6))]
    process = start(*words, cold=True, GLOO_SOCKET_IFNAME="lo")
    try:
        wait_for_line(process, "iter 20:")
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.terminate()
        process.wait(timeout=120)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive
    assert (ran.end["reason"], ran.end["iters"]) == ("SIGTERM", ran.saved[-1])
    text = finish(process).out
    assert text.count("\niter 9:") == text.count(f"checkpoint {ran.saved[-1]}: ") == 1  # once
    assert_same_numbers(straight, ran)
