"""
Interrupt runs at random by kills, signals, disks that are full for a while, and damaged
checkpoints. Each run must end like an uninterrupted one.
"""

import random
import signal
from pathlib import Path

import pytest
from cases import slow_but
from fault_injection import free, watched
from program import Run, assert_same_run, finish, flags, start, train

pytest.importorskip("fcntl", reason="disks and signals of POSIX")

END = 40
TINY = dict(n_embd=16, max_iters=END, lr_decay_iters=END, eval_interval=7)
TINY |= dict(eval_tokens=160, checkpoint_interval=3, keep_checkpoints=2, dropout=0.1)
TINY |= dict(learning_rate=0.01, warmup_iters=2)
LAUNCHES = 4


def draw_steps(chance: random.Random) -> tuple[str, int]:
    """
    Draw what happens in one launch: perhaps a disk that is full for a while, and a kill or a stop.
    Returns lines for watched(), and the signal.
    """
    number = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    steps = [f"if n == {chance.randint(1, 14)}: os.kill(os.getpid(), {number:d})"]
    if chance.random() < 0.6:
        begin = chance.randint(1, 14)
        steps.append(f"if n == {begin}: fill(disk)")
        steps.append(f"if n == {begin + chance.randint(1, 14)}: free(disk)")
    return "\n".join(steps), number


def damage(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    how = chance.choice(["flipped bit in", "cut"])
    if how == "cut":
        del content[place:]
    else:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"{how} {path.name} at {place}"


@pytest.mark.parametrize("seed", slow_but(0, of=range(100)))
def test_a_run_interrupted_at_random_ends_like_an_uninterrupted_one(
    seed, tiny, ran, straight, make_disk
):
    # The last evaluation is the best, so a failed save of an earlier one leaves no trace.
    assert Run(straight).best["iter_num"] == END
    disk, chance = make_disk(1 << 20), random.Random(seed)  # room for a few checkpoints
    tiny["out_dir"] = ran.out_dir = disk / "run"
    log_has_gaps = False
    here = f"from fault_injection import *; disk = Path({str(disk)!r})"
    for launch in range(LAUNCHES):
        steps, number = draw_steps(chance)
        result = finish(start(*watched(steps, before=here), *flags(**tiny)))
        print(f"launch {launch}: {steps}: exit code {result.code}\n{result.err}")
        # 0: the run ended before the signal. -number: SIGKILL, or a signal before the loop. 1: a
        # save met the full disk
        assert result.code in (0, -number, 128 + number, 1)
        assert "Traceback" not in result.err
        assert result.code != 1 or "fill" in steps
        free(disk)
        # records that a full disk refused are lost if the run ends before there is room
        log_has_gaps |= "lack lines" in result.err
        if len(ran.saved) > 1 and chance.random() < 0.5:
            print(damage(ran.out_dir / f"ckpt-{ran.saved[-1]:08}.pt", chance))
    train(**tiny)
    assert_same_run(straight, ran.out_dir, END, log_has_gaps)
    assert ran.best["iter_num"] == END
    # an iteration is there twice if a signal ended its evaluation: without the evaluation, and with
    # it
    saved = ran.column("checkpoint", "iter")
    assert saved == sorted(saved)
    assert ran.end["reason"] == "max_iters"
