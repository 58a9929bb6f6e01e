"""Several processes under torchrun (gloo, CPU): the same training as alone, decisions taken together, nobody left behind."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT, flags, load, records, run_here, write_dataset

import checkpoint
import train
from ranks import Ranks

OPTIONS = dict(gradient_accumulation_steps=4, max_iters=50, eval_interval=25, log_interval=1)


def start_torchrun(n: int, *arguments: str, out=subprocess.PIPE) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True)


def torchrun(n, *arguments):
    process = start_torchrun(n, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_two_ranks_train_as_one(dataset, tmp_path):
    run_here(dataset, tmp_path / "1", **OPTIONS)
    code, out, err = torchrun(2, "train.py", *flags(dataset, tmp_path / "2", **OPTIONS))
    assert code == 0, err
    assert out.count("step 50:") == 1 and out.count("\niter 49:") == 1  # one voice
    one, two = (records(tmp_path / n, "step") for n in "12")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two, strict=True)) < 1e-4
    assert [r["tokens"] for r in one] == [r["tokens"] for r in two]
    vals = [[r["val_loss"] for r in records(tmp_path / n, "eval")] for n in "12"]
    assert vals[0] == pytest.approx(vals[1], abs=1e-4)


def test_weights_agree_after_one_iteration(dataset, tmp_path):
    options = OPTIONS | dict(max_iters=1, learning_rate=6e-4)  # Adam divides by |gradient|, which magnifies rounding
    run_here(dataset, tmp_path / "1", **options)
    assert torchrun(2, "train.py", *flags(dataset, tmp_path / "2", **options))[0] == 0
    one, two = (load(tmp_path / n, 1)["model"] for n in "12")
    assert all(torch.allclose(one[k], two[k], atol=1e-6, rtol=0) for k in one)


@pytest.mark.slow
def test_four_ranks_and_a_resume_at_another_world_size_follow_the_same_data(dataset, tmp_path):
    run_here(dataset, tmp_path / "1", **OPTIONS)
    assert torchrun(4, "train.py", *flags(dataset, tmp_path / "4", **OPTIONS | dict(max_iters=25, lr_decay_iters=50)))[0] == 0
    assert torchrun(2, "train.py", *flags(dataset, tmp_path / "4", **OPTIONS | dict(init_from="resume")))[0] == 0
    one, other = (records(tmp_path / n, "step") for n in "14")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, other, strict=True)) < 1e-4


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "ended too early, or stuck"
        time.sleep(0.01)


def test_sigterm_to_torchrun_saves_once_and_leaves_no_process(dataset, tmp_path):
    process = start_torchrun(2, "train.py", *flags(dataset, tmp_path, **OPTIONS | dict(max_iters=10**6, eval_interval=10**6)))
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step", "iter": 5,' in metrics.read_text(), process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert out.count("checkpoint ") == 1
    assert checkpoint.load_newest(tmp_path)["progress"]["iter_num"] >= 5


@pytest.mark.slow
def test_ranks_killed_at_twenty_random_moments_restart_by_themselves_and_end_at_the_same_loss(dataset, tmp_path):
    """No kill may cost more than one of the 20 restarts, so each restart must meet and go on. A checkpoint every 2 iterations."""
    options = OPTIONS | dict(max_iters=1000, eval_interval=500, checkpoint_interval=2, log_interval=10)
    arguments = ["train.py", *flags(dataset, tmp_path / "broken", init_from="auto", **options)]
    random.seed(1)
    log, killed = tmp_path / "log", []
    with open(log, "w") as out:
        process = start_torchrun(2, "--max-restarts=20", *arguments, out=out)

    def workers():
        return [p for p in psutil.Process(process.pid).children() if p.pid not in killed]

    def lines():
        return log.read_text().count("\niter ")

    try:
        while len(killed) < 40:
            began, before = time.monotonic(), lines()
            wait_until(lambda: len(workers()) == 2, process)
            life = workers()
            if len(killed) % 4:  # every other life is ended while it starts up, as long as the first one took
                time.sleep(random.uniform(0, startup_seconds))
            else:
                wait_until(lambda before=before: lines() > before, process)
                startup_seconds = time.monotonic() - began
                time.sleep(random.uniform(0, 0.1))
            random.choice(life).kill()
            killed += [worker.pid for worker in life]
        assert process.wait(timeout=300) == 0
    except BaseException:
        print(log.read_text()[-5000:])
        process.kill()
        raise
    assert torchrun(2, "train.py", *flags(dataset, tmp_path / "straight", **options | dict(checkpoint_interval=0)))[0] == 0
    broken, straight = (records(tmp_path / run, "eval")[-1] for run in ("broken", "straight"))
    assert broken["iter"] == straight["iter"] == 1000
    assert broken["val_loss"] == pytest.approx(straight["val_loss"], abs=1e-5)


def test_an_accumulation_that_cannot_be_shared_is_one_line(dataset, tmp_path):
    code, _, err = torchrun(2, "train.py", *flags(dataset, tmp_path / "run", gradient_accumulation_steps=3))
    assert code != 0
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == ["error: gradient_accumulation_steps: 3 micro-batches cannot be shared out to 2 processes; 2 or 4 can"]
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_are_noticed_before_the_first_iteration(dataset, tmp_path):
    write_dataset(tmp_path / "0" / "data" / "x", [1000])
    write_dataset(tmp_path / "1" / "data" / "x", [1001])
    script = (
        "import os, sys; os.chdir(os.path.join(sys.argv.pop(), os.environ['RANK']))\n"
        "import errors, train; errors.run_main(train.main)"
    )
    (tmp_path / "run.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}")
    arguments = flags("x", tmp_path / "run", **OPTIONS)
    code, _, err = torchrun(2, str(tmp_path / "run.py"), *arguments, str(tmp_path))
    assert code != 0 and "has another dataset than rank 0" in err
    assert not (tmp_path / "run").exists()


def test_gradients_are_exchanged_once_per_iteration(monkeypatch):
    """The bytes of one all-reduce are 4 per parameter; with no_sync on all but the last micro-step that is all."""
    entered = []

    class Wrapped(torch.nn.parallel.DistributedDataParallel):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            return self.w * x.sum()

        def no_sync(self):
            entered.append(True)
            return train.contextlib.nullcontext()

    model = Wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = iter([(torch.ones(1), None)] * 5)
    train.train_step(model, optimizer, torch.amp.GradScaler(enabled=False), batches, 5, 1.0, train.contextlib.nullcontext())
    assert len(entered) == 4


def test_a_process_alone_needs_no_group():
    ranks = Ranks()
    assert ranks.first and ranks.reduce([1, 2]) == [1, 2] and ranks.gather("x") == ["x"]
    assert ranks.from_first(lambda: 3) == 3 and ranks.check_config(None) == [] and not torch.distributed.is_initialized()
