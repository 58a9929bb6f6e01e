"""
Several processes (gloo, CPU): the same training as alone, decisions taken together, nobody left
behind.

Most tests start the ranks themselves, with the environment that torchrun would give them. Its own
part, starting, stopping and restarting, is tested with the real one.
"""

import contextlib
import datetime
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from documents import documents, write_parquet
from helpers import (
    ROOT,
    assert_same_state,
    flags,
    load,
    load_newest,
    needs_signals,
    records,
    run_here,
    run_process,
    start_process,
    write_dataset,
)

from configurator import Config
from training import ranks
from training.ranks import Ranks

RECIPES = dict(classic=dict(), fast=dict(model="fast", optimizer="muon", tie_weights=False))
# otherwise gloo looks up this machine's name, which a network may not know; lo is Linux's word
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
OPTIONS = dict(gradient_accumulation_steps=4, max_iters=50, eval_interval=25, log_interval=1)


def start_torchrun(
    n: int, *arguments: str, out=subprocess.PIPE, prefix=(), cwd=ROOT, **environment
) -> subprocess.Popen:
    command = [
        *prefix,
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={n}",
        *arguments,
    ]
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | LOOPBACK | environment
    )
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=out, text=True)


def torchrun(n: int, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of n ranks under torchrun."""
    process = start_torchrun(n, "--standalone", *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def free_port() -> int:
    """Of none that the system gives to outgoing connections, which could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(n: int, *arguments: str) -> list:
    """n ranks without torchrun, as processes."""
    port = free_port()
    return [
        start_process(
            *arguments,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(n),
            LOCAL_WORLD_SIZE=str(n),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            **LOOPBACK,
        )
        for rank in range(n)
    ]


def run_ranks(n: int, *arguments: str) -> tuple[list[int], str, str]:
    """n ranks without torchrun: (exit codes, stdout, stderr), each text from all ranks."""
    processes = start_ranks(n, *arguments)
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:  # none is left behind that waits for another one
        for process in processes:
            process.kill()
    out, err = ("".join(texts) for texts in zip(*outputs, strict=True))
    return [process.returncode for process in processes], out, err


def start_run(dataset, out_dir, **options) -> None:
    """A run that ranks resume; in a process of its own, which gives the folder back as it ends."""
    code, _, err = run_process("train.py", *flags(dataset, out_dir, **options))
    assert code == 0, err


def assert_same_run(one: Path, two: Path) -> None:
    """The losses of one process and of two as far as the first went, up to the order of sums."""
    for kind, loss in (("step", "loss"), ("eval", "val_loss")):
        alone = records(one, kind)
        together = records(two, kind)[: len(alone)]
        assert alone and [r["iter"] for r in alone] == [r["iter"] for r in together]
        for a, b in zip(alone, together, strict=True):
            assert a[loss] == pytest.approx(b[loss], abs=1e-4)
            assert a.get("tokens") == b.get("tokens")


@pytest.fixture(scope="module")
def stopped_torchrun(dataset, tmp_path_factory) -> tuple[Path, str, list]:
    """
    A run of two ranks that gets SIGTERM after 50 iterations, as most seconds of torchrun are its
    start: its folder, what it printed, and the workers that were there.
    """
    out_dir = tmp_path_factory.mktemp("stopped") / "2"
    options = OPTIONS | dict(max_iters=10**6, lr_decay_iters=50, checkpoint_interval=10**6)
    arguments = flags(dataset, out_dir, **options, recompute=True, always_save_checkpoint=False)
    process = start_torchrun(2, "--standalone", "train.py", *arguments)
    metrics = out_dir / "metrics.jsonl"
    try:
        begun = '"step", "iter": 55,'
        wait_until(lambda: metrics.exists() and begun in metrics.read_text(), process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:  # it would train for ever
            for worker in psutil.Process(process.pid).children(recursive=True):
                worker.kill()
            process.kill()
    return out_dir, out, workers


@pytest.mark.slow
def test_two_ranks_under_torchrun_train_as_one(stopped_torchrun, dataset, tmp_path):
    out_dir, out, _ = stopped_torchrun
    run_here(dataset, tmp_path, **OPTIONS)
    assert out.count("step 50:") == 1 and out.count("\niter 49:") == 1  # one voice
    assert len(records(tmp_path, "step")) == 50
    assert_same_run(tmp_path, out_dir)


def test_two_ranks_train_the_fast_recipe_as_one(dataset, tmp_path):
    options = OPTIONS | RECIPES["fast"] | dict(max_iters=20, eval_interval=10)
    run_here(dataset, tmp_path / "1", **options)
    codes, _, err = run_ranks(2, "train.py", *flags(dataset, tmp_path / "2", **options))
    assert codes == [0, 0], err
    assert_same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_agree_after_one_iteration(recipe, dataset, tmp_path):
    # Adam divides by |gradient|, which magnifies rounding
    options = OPTIONS | RECIPES[recipe] | dict(max_iters=1, learning_rate=6e-4)
    run_here(dataset, tmp_path / "1", **options)
    codes, _, err = run_ranks(2, "train.py", *flags(dataset, tmp_path / "2", **options))
    assert codes == [0, 0], err
    one, two = (load(tmp_path / n, 1)["model"] for n in "12")
    assert all(torch.allclose(one[k], two[k], atol=1e-6, rtol=0) for k in one)


def test_ranks_without_a_window_of_their_own_evaluate_with_the_others(dataset, tmp_path):
    """15 windows one by one: the second rank has none in the last batch."""
    options = OPTIONS | dict(max_iters=1, batch_size=1, eval_tokens=15 * 16)
    run_here(dataset, tmp_path / "1", **options)
    codes, _, err = run_ranks(2, "train.py", *flags(dataset, tmp_path / "2", **options))
    assert codes == [0, 0], err
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_a_run_that_diverges_says_so_once_for_all_ranks(dataset, tmp_path):
    options = OPTIONS | dict(learning_rate=1e30, max_iters=40)
    codes, _, err = run_ranks(2, "train.py", *flags(dataset, tmp_path, **options))
    assert codes == [1, 1] and err.count("error: 20 updates in a row skipped") == 1


@pytest.mark.slow
def test_four_ranks_and_a_resume_at_another_world_size_follow_the_same_data(dataset, tmp_path):
    run_here(dataset, tmp_path / "1", **OPTIONS)
    assert (
        torchrun(
            4,
            "train.py",
            *flags(dataset, tmp_path / "4", **OPTIONS | dict(max_iters=25, lr_decay_iters=50)),
        )[0]
        == 0
    )
    assert (
        torchrun(
            2, "train.py", *flags(dataset, tmp_path / "4", **OPTIONS | dict(init_from="resume"))
        )[0]
        == 0
    )
    one, other = (records(tmp_path / n, "step") for n in "14")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, other, strict=True)) < 1e-4


@pytest.mark.slow
def test_compiled_ranks_resume_and_are_compiled_once(dataset, tmp_path):
    run_here(dataset, tmp_path / "1", max_iters=8)
    for max_iters in (4, 8):
        options = dict(
            init_from="auto", compile=True, recompute=True, max_iters=max_iters, lr_decay_iters=8
        )
        code, out, err = torchrun(2, "train.py", *flags(dataset, tmp_path / "2", **options))
        assert code == 0 and out.count("compile: ") == 1, err
    one, two = (records(tmp_path / n, "step") for n in "12")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two, strict=True)) < 1e-4
    # nothing was compiled again inside DistributedDataParallel
    assert not records(tmp_path / "2", "event")


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "ended too early, or stuck"
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_once_and_leaves_no_process(stopped_torchrun):
    out_dir, out, workers = stopped_torchrun
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    (end,) = records(out_dir, "end")
    assert end["reason"] == "SIGTERM" and out.count(f"checkpoint {end['iters']}: ") == 1
    assert load_newest(out_dir)["progress"]["iter_num"] == end["iters"] >= 55


@pytest.fixture
def machines():
    """
    Two machines: command prefix of each, the first's address, network device; this one twice where
    there is no other.
    """
    names = [f"gpt-{os.getpid()}-{x}" for x in "ab"]
    commands = [
        *(f"netns add {name}" for name in names),
        f"link add eth9 netns {names[0]} type veth peer name eth9 netns {names[1]}",
        *(f"-n {name} addr add 10.77.0.{i}/24 dev eth9" for i, name in enumerate(names, 1)),
        *(f"-n {name} link set {device} up" for name in names for device in ("lo", "eth9")),
        f"netns exec {names[1]} true",
    ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        yield [["ip", "netns", "exec", name] for name in names], "10.77.0.1", "eth9"
    except (OSError, subprocess.CalledProcessError):  # no iproute2, or not root
        yield [[], []], "127.0.0.1", "lo"
    for name in names if shutil.which("ip") else ():
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_machines(machines, out_dirs, dataset, log: Path) -> list[subprocess.Popen]:
    """A rank on each machine, started in a folder of its own."""
    prefixes, address, interface = machines
    options = OPTIONS | dict(max_iters=20, eval_interval=10)
    port = free_port()
    nodes = []
    for rank, (prefix, out_dir) in enumerate(zip(prefixes, out_dirs, strict=True)):
        folder = log.parent / str(rank)
        folder.mkdir()
        with open(log, "a") as out:
            node = start_torchrun(
                1,
                *("--nnodes=2", f"--node_rank={rank}"),
                *(f"--master_addr={address}", f"--master_port={port}"),
                *(str(ROOT / "train.py"), *flags(dataset, out_dir, **options)),
                out=out,
                prefix=prefix,
                cwd=folder,
                GLOO_SOCKET_IFNAME=interface,
            )
        nodes.append(node)
    return nodes


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_two_machines_train_as_one_or_are_refused_without_a_shared_out_dir(
    shared, dataset, tmp_path, machines
):
    log = tmp_path / "log"
    out_dirs = [str(tmp_path / "run"), str(tmp_path / "run")] if shared else ["run", "run"]
    nodes = start_machines(machines, out_dirs, dataset, log)
    try:
        codes = [node.wait(timeout=200) for node in nodes]
    except BaseException:
        for node in nodes:
            node.terminate()
        raise
    if shared:
        assert codes == [0, 0], log.read_text()
        run_here(dataset, tmp_path / "alone", **OPTIONS | dict(max_iters=20, eval_interval=10))
        assert_same_run(tmp_path / "alone", tmp_path / "run")
    else:
        (line,) = (line for line in log.read_text().splitlines() if line.startswith("error: "))
        assert all(codes) and line.endswith("several machines need one shared --out_dir")


def run_with_kills(kills: int, log: Path, *arguments: str, **environment: str) -> None:
    """
    Two ranks under torchrun, one of them killed at so many random moments, of which every other is
    while they start up. No kill may cost more than one restart.
    """
    random.seed(1)
    killed, startup_seconds = [], 0.0
    with open(log, "w") as out:
        command = ["--standalone", f"--max-restarts={kills}", *arguments]
        process = start_torchrun(2, *command, out=out, **environment)

    def workers():
        return [p for p in psutil.Process(process.pid).children() if p.pid not in killed]

    def lines():
        return log.read_text().count("\niter ")

    try:
        while len(killed) < 2 * kills:
            began, before = time.monotonic(), lines()
            wait_until(lambda: len(workers()) == 2, process)
            life = workers()
            moment = began + (random.uniform(0, startup_seconds) if len(killed) % 4 else math.inf)
            wait_until(lambda m=moment, n=before: time.monotonic() > m or lines() > n, process)
            if lines() > before:  # it trains
                startup_seconds = time.monotonic() - began
                time.sleep(random.uniform(0, 0.1))
            random.choice(life).kill()
            killed += [worker.pid for worker in life]
        assert process.wait(timeout=300) == 0
    except BaseException:
        print(log.read_text()[-5000:])
        process.terminate()
        raise


@pytest.mark.slow
def test_ranks_killed_at_twenty_random_moments_restart_by_themselves_and_end_at_the_same_loss(
    dataset, tmp_path
):
    options = OPTIONS | dict(
        max_iters=1000, eval_interval=500, checkpoint_interval=2, log_interval=10
    )
    arguments = flags(dataset, tmp_path / "broken", init_from="auto", **options)
    run_with_kills(20, tmp_path / "log", "train.py", *arguments)
    assert (
        torchrun(
            2,
            "train.py",
            *flags(dataset, tmp_path / "straight", **options | dict(checkpoint_interval=0)),
        )[0]
        == 0
    )
    broken, straight = (records(tmp_path / run, "eval")[-1] for run in ("broken", "straight"))
    assert broken["iter"] == straight["iter"] == 1000
    assert broken["val_loss"] == pytest.approx(straight["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_ranks_of_a_stream_killed_at_ten_random_moments_go_on_by_themselves(parquet, tmp_path):
    options = STREAM | dict(
        max_iters=600, eval_interval=300, checkpoint_interval=2, log_interval=10, batch_size=4
    )
    options |= dict(gradient_accumulation_steps=2)
    script = tmp_path / "train_here.py"
    main = "if __name__ == '__main__':\n    console.run_main(train.main, train.explain)"
    here = f"import os, train\nfrom common import console\nos.chdir({str(tmp_path)!r})\n"
    script.write_text(f"{here}{main}\n")
    straight = flags(parquet, tmp_path / "straight", **options | dict(checkpoint_interval=0))
    assert run_process(str(script), *straight, PYTHONPATH=str(ROOT), cold=True)[0] == 0
    arguments = flags(parquet, tmp_path / "broken", init_from="auto", **options)
    log = tmp_path / "log"
    run_with_kills(10, log, str(script), *arguments, PYTHONPATH=str(ROOT))
    assert "Traceback" not in log.read_text()
    broken, straight = (records(tmp_path / run, "eval")[-1] for run in ("broken", "straight"))
    assert broken["iter"] == straight["iter"] == 600
    assert broken["val_loss"] == pytest.approx(straight["val_loss"], abs=1e-4)


def patched(code: str) -> list[str]:
    """Arguments for Python: train.py after some code, which finds its rank in RANK."""
    return [
        "-c",
        "import os, signal, sys, time, train\n"
        "from common import console; from training import ranks\n"
        f"RANK = os.environ['RANK']\n{code}\nconsole.run_main(train.main, train.explain)",
    ]


def test_rank_0_chooses_the_dtype_for_all(dataset, tmp_path):
    """Two machines of which each would choose another one."""
    code = """
from training import hardware
best = hardware.torch.bfloat16 if RANK == "0" else hardware.torch.float32
hardware.best_dtype = lambda device: best
original = hardware.set_up
def set_up(*args):
    hw = original(*args)
    print("computes in", hw.dtype_name, file=sys.stderr)
    return hw
hardware.set_up = set_up
"""
    options = OPTIONS | dict(dtype="auto", max_iters=1)
    codes, _, err = run_ranks(2, *patched(code), *flags(dataset, tmp_path / "run", **options))
    assert codes == [0, 0], err
    assert err.count("computes in bfloat16") == 2


def test_gradients_are_exchanged_once_per_iteration(dataset, tmp_path):
    count = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
original = ranks.Ranks.data_parallel
def counted(self, model):
    model = original(self, model)
    def hook(group, bucket):
        print("exchanged", bucket.buffer().nbytes, file=sys.stderr)
        return allreduce_hook(group, bucket)
    model.register_comm_hook(None, hook)
    return model
ranks.Ranks.data_parallel = counted
"""
    # three micro-steps on each rank
    options = OPTIONS | dict(gradient_accumulation_steps=6, max_iters=4)
    codes, _, err = run_ranks(2, *patched(count), *flags(dataset, tmp_path / "run", **options))
    assert codes == [0, 0], err
    exchanged = [int(line.split()[1]) for line in err.splitlines() if line.startswith("exchanged ")]
    # 64 ids padded to 128, 2 layers of 32, no biases
    parameters = 128 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 2 * 32) + 32
    # 2 ranks, 4 iterations, 4 bytes for each parameter
    assert sum(exchanged) == 2 * 4 * 4 * parameters


STREAM = dict(OPTIONS, stream=True, tokenizer="byte", batch_size=16, block_size=128)


def streaming(work: Path, other_work: Path | None = None, code: str = "") -> list[str]:
    """As `patched`, in that folder, with small shards; all ranks but the first may be elsewhere."""
    places = [str(work), str(other_work or work)]
    shards = "from data import stream; stream.SHARD_TOKENS, stream.TOKENS_AHEAD = 9000, 50_000"
    return patched(f"os.chdir({places}[RANK != '0'])\n{shards}\n{code}")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """Some 100,000 byte tokens, in row groups of 100 documents."""
    return write_parquet(tmp_path_factory.mktemp("source") / "a.parquet", documents(1000))


def test_two_ranks_train_on_a_stream_as_one(parquet, tmp_path):
    """And one process goes on where they stopped."""
    options = STREAM | dict(gradient_accumulation_steps=2, max_iters=16, eval_interval=8)
    run = flags(parquet, tmp_path / "1", **options)
    code, _, err = run_process(*streaming(tmp_path), *run, RANK="0")
    assert code == 0, err
    half = flags(parquet, tmp_path / "2", **options | dict(max_iters=8, lr_decay_iters=16))
    codes, _, err = run_ranks(2, *streaming(tmp_path), *half)
    assert codes == [0, 0], err
    rest = flags(parquet, tmp_path / "2", init_from="resume", **options)
    code, _, err = run_process(*streaming(tmp_path), *rest, RANK="0")
    assert code == 0, err
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_machines_that_share_no_folder_for_a_stream_are_refused(parquet, tmp_path):
    """One that an earlier run has left there is no shared one either."""
    (tmp_path / "other").mkdir()
    code = "stream.PATIENCE = 2"
    for has_copy in (False, True):
        run = flags(parquet, tmp_path / "run", **STREAM)
        codes, _, err = run_ranks(2, *streaming(tmp_path, tmp_path / "other", code), *run)
        (line,) = error_lines(err)
        assert codes == [2, 2] and "on rank 0; several machines need one shared folder" in line
        if not has_copy:
            shutil.copytree(tmp_path / "data", tmp_path / "other" / "data")


@pytest.mark.parametrize("batch_size", [15, pytest.param(16, marks=pytest.mark.slow)])
def test_a_stream_that_fails_midway_ends_all_ranks_with_one_line_and_a_checkpoint(
    batch_size, tmp_path
):
    """The source ends between the batches of the two ranks, sooner or later."""
    source = tmp_path / "source"
    write_parquet(source / "a.parquet", documents(1100))  # enough to judge the field by
    (source / "b.parquet").write_bytes(b"PAR1 damaged")
    options = STREAM | dict(batch_size=batch_size, max_iters=10**6, eval_interval=10**6)
    run = flags(source, tmp_path / "run", **options)
    codes, _, err = run_ranks(2, *streaming(tmp_path), *run)
    (line,) = error_lines(err)
    assert codes == [1, 1] and "b.parquet" in line and "resume continues the run" in line, err
    assert load_newest(tmp_path / "run")["progress"]["iter_num"] > 2


def start_streaming(source, work, **changes) -> list:
    """Two ranks that train on and on, on a source that is never all prepared."""
    for number in range(60):
        os.link(source, work / f"{number}.parquet")
    options = STREAM | dict(max_iters=10**6, eval_interval=10**6, log_interval=20)
    arguments = flags(work, work / "run", **options | changes)
    processes = start_ranks(2, *streaming(work), *arguments)
    metrics = work / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"iter": 20,' in metrics.read_text(), processes[0])
    return processes


def preparations(process) -> list:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "--run_id=" in " ".join(child.cmdline())]


def end_of(processes: list) -> tuple[list[int], str]:
    errors = [process.communicate(timeout=180)[1] for process in processes]
    return [process.returncode for process in processes], "".join(errors)


@pytest.mark.slow
def test_a_killed_preparation_ends_all_ranks_with_one_line_and_a_checkpoint(parquet, tmp_path):
    processes = start_streaming(parquet, tmp_path)
    (preparation,) = preparations(processes[0])
    assert not preparations(processes[1])  # it reads what the first one prepares
    preparation.kill()
    codes, err = end_of(processes)
    (line,) = error_lines(err)
    assert codes == [1, 1] and "the preparation of data/streamed/" in line
    assert load_newest(tmp_path / "run")["progress"]["iter_num"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_a_stream_with_one_line(killed, parquet, tmp_path):
    processes = start_streaming(parquet, tmp_path)
    children = preparations(processes[0])
    processes[killed].kill()
    codes, err = end_of(processes)
    (line,) = error_lines(err)
    assert codes[1 - killed] == 1 and "another rank is gone" in line
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@needs_signals
@pytest.mark.slow
def test_sigterm_while_all_ranks_wait_for_a_stream_saves_and_ends(parquet, tmp_path):
    processes = start_streaming(parquet, tmp_path)
    (preparation,) = preparations(processes[0])
    preparation.suspend()  # no more data comes
    steps = 0
    while steps != (steps := len(records(tmp_path / "run", "step"))):
        time.sleep(0.5)
    began = time.monotonic()
    processes[1].send_signal(signal.SIGTERM)
    codes, err = end_of(processes)
    assert codes == [143, 143] and time.monotonic() - began < 10, err
    assert load_newest(tmp_path / "run")["progress"]["iter_num"] > 20


# what each rank holds of the model and of the optimizer after its last update
WHAT_EACH_HOLDS = """
import hashlib
from torch.utils._pytree import tree_leaves
from model_fast import Muon
step, updates = Muon.step, 0
def counted(self):
    global updates
    step(self)
    updates += 1
    if updates == 2:
        weights = [group["params"] for group in self.param_groups]
        held = tree_leaves([weights, self.state_dict()["state"]])
        words = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in held)).hexdigest()
        print("holds", words, file=sys.stderr)
Muon.step = counted
"""


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_of_muon_hold_the_same_bits_and_one_process_goes_on(n, dataset, tmp_path):
    """Nothing but gradients is exchanged, so their weights could drift apart."""
    options = OPTIONS | RECIPES["fast"] | dict(max_iters=4, eval_interval=2, lr_decay_iters=4)
    run_here(dataset, tmp_path / "1", **options)
    half = flags(dataset, tmp_path / "n", **options | dict(max_iters=2))
    codes, _, err = run_ranks(n, *patched(WHAT_EACH_HOLDS), *half)
    assert codes == [0] * n, err
    held = [line for line in err.splitlines() if line.startswith("holds ")]
    assert len(held) == n and len(set(held)) == 1
    run_here(dataset, tmp_path / "n", **options | dict(init_from="resume"))
    one, other = (load(tmp_path / name, 4) for name in "1n")
    for name, weights in one["model"].items():
        torch.testing.assert_close(other["model"][name], weights, atol=1e-3, rtol=0)
    for number, state in one["optimizer"]["state"].items():
        assert state.keys() == other["optimizer"]["state"][number].keys()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_and_half_of_three_ranks_equals_the_whole_bit_for_bit(recipe, dataset, tmp_path):
    options = OPTIONS | RECIPES[recipe] | dict(gradient_accumulation_steps=3, lr_decay_iters=8)
    options |= dict(max_iters=8, eval_interval=4, dropout=0.1)
    parts = [("whole", options), ("halves", options | dict(max_iters=4))]
    for name, part in [*parts, ("halves", options | dict(init_from="resume"))]:
        codes, _, err = run_ranks(3, "train.py", *flags(dataset, tmp_path / name, **part))
        assert codes == [0] * 3, err
    assert_same_state(load(tmp_path / "whole", 8), load(tmp_path / "halves", 8))


# the second rank is on a machine of its own, and sees nothing of the first one's
APART = """
if RANK == "1":
    os.environ["LOCAL_RANK"] = "0"
    os.chdir("elsewhere")
"""


@pytest.mark.parametrize("init_from", ["scratch", "resume"])
def test_machines_without_a_shared_out_dir_are_refused_in_one_line(init_from, dataset, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    if init_from == "resume":
        start_run(dataset, tmp_path / "run", **OPTIONS | dict(max_iters=4))
    before = sorted(tmp_path.rglob("*.pt"))
    arguments = flags(dataset, "run", **OPTIONS, init_from=init_from)
    code = f"os.chdir({str(tmp_path)!r})\n{APART}"
    codes, _, err = run_ranks(2, *patched(code), *arguments)
    (line,) = error_lines(err)
    assert codes == [2, 2] and "one shared --out_dir" in line
    assert sorted(tmp_path.rglob("*.pt")) == before


def test_a_damaged_newest_checkpoint_is_named_once_for_all_ranks(dataset, tmp_path):
    options = OPTIONS | dict(max_iters=6, eval_interval=2, lr_decay_iters=8)
    start_run(dataset, tmp_path, **options | dict(max_iters=4))
    with open(tmp_path / "ckpt-00000004.pt", "r+b") as file:
        file.truncate(5000)
    resumed = flags(dataset, tmp_path, **options | dict(init_from="resume"))
    codes, out, err = run_ranks(2, "train.py", *resumed)
    assert codes == [0, 0] and err.count("trying the one before") == 1, err
    assert out.count("iteration 2") == 1 and load(tmp_path, 6)["progress"]["iter_num"] == 6


# torchrun ends with one of its own where a rank has failed
ITS_TRACEBACK = 'Traceback (most recent call last):\n  File "<frozen runpy>"'


def error_lines(err: str) -> list[str]:
    assert "Traceback" not in err.partition(ITS_TRACEBACK)[0]
    return [line for line in err.splitlines() if line.startswith("error: ")]


# what each rank does first, changes of the options, the error line
BAD_STARTS = {
    "an accumulation that cannot be shared": (
        "",
        dict(gradient_accumulation_steps=3),
        "gradient_accumulation_steps: 3 micro-batches cannot be divided among 2 processes; "
        "a multiple of 2 can",
    ),
    "a wrong flag": ("", dict(n_hed=3), "--n_hed: unknown key; did you mean n_head?"),
    "GPUs where there are none": (
        "ranks.torch.cuda.is_available = lambda: False",
        dict(device="cuda"),
        "device: ",
    ),
    "other data": (
        "os.chdir(RANK)",  # where each has another dataset x
        {},
        "dataset: ",
    ),
}


@pytest.mark.parametrize("case", BAD_STARTS)
def test_a_bad_start_is_one_line_before_the_first_iteration(case, dataset, tmp_path):
    code, changes, message = BAD_STARTS[case]
    data = "x" if case == "other data" else dataset
    for rank in "01":
        write_dataset(tmp_path / rank / "data" / "x", [1000 + int(rank)])
    arguments = flags(data, tmp_path / "run", **OPTIONS | changes)
    code = f"os.chdir({str(tmp_path)!r})\n{code}"
    codes, _, err = run_ranks(2, *patched(code), *arguments)
    (line,) = error_lines(err)
    assert line.startswith("error: " + message) and codes == [2, 2]
    assert not (tmp_path / "run").exists()


# -----------------------------------------------------------------------------
# Whatever happens to one of them ends all of them


@pytest.fixture(params=["ranks", pytest.param("torchrun", marks=pytest.mark.slow)])
def start_two(request, tmp_path):
    """start_two(code, *arguments): train.py after that code on two ranks; a list of processes."""

    def start(code, *arguments):
        if request.param == "ranks":
            return start_ranks(2, *patched(code), *arguments)
        script = tmp_path / "patched.py"
        script.write_text(patched(code)[1])
        command = ("--standalone", str(script), *arguments)
        return [start_torchrun(2, *command, PYTHONPATH=str(ROOT))]

    return start


# what keeps rank 1 from reading on, by the last iteration
SHORT = {
    15: """
from common.console import RunError
from data.loader import ShuffledWindows
read = ShuffledWindows.read
def reading(windows, first, count):
    if RANK == "1" and first >= 60 * count:  # four micro-batches an iteration
        raise RunError("train_000002.bin: cut short")
    return read(windows, first, count)
ShuffledWindows.read = reading
""",
    25: """
from common.console import RunError
from data import loader
original, calls = loader.eval_batches, iter(range(10**9))
def batches(*arguments):
    if RANK == "1" and next(calls) == 3:  # of the val split, after 25 iterations
        raise RunError("val_000000.bin: cut short")
    yield from original(*arguments)
loader.eval_batches = batches
""",
}


@pytest.mark.parametrize("iteration", SHORT)
def test_a_shard_that_one_rank_cannot_read_ends_all_with_one_line_and_a_checkpoint(
    iteration, start_two, dataset, tmp_path
):
    arguments = flags(dataset, tmp_path / "run", **OPTIONS | dict(max_iters=100))
    codes, err = end_of(start_two(SHORT[iteration], *arguments))
    assert all(code == 1 for code in codes)
    (line,) = error_lines(err)
    assert line.endswith(".bin: cut short")
    assert "stopping" not in err  # torchrun ends the others when one has failed
    assert load_newest(tmp_path / "run")["progress"]["iter_num"] == iteration
    (end,) = records(tmp_path / "run", "end")
    assert end["reason"] == "data" and end["iters"] == iteration


# where rank 1 gets a signal
MOMENTS = {
    "in an iteration": """
original, calls = train.train_step, iter(range(10**9))
def step(*arguments):
    if RANK == "1" and next(calls) == 10:
        signal.raise_signal(15)
    return original(*arguments)
train.train_step = step
""",
    "in an evaluation": """
original, calls = train.evaluate, iter(range(10**9))
def evaluate(*arguments):
    if RANK == "1" and next(calls) == 3:  # of the val split, after 10 iterations
        signal.raise_signal(15)
    return original(*arguments)
train.evaluate = evaluate
""",
    "while another one waits for data": """
import threading
from data.loader import ShuffledWindows
read, close, closed = ShuffledWindows.read, train.Batches.close, threading.Event()
def reading(windows, first, count):
    if first >= 40 * count and RANK == "0":
        closed.wait(60)
    return read(windows, first, count)
ShuffledWindows.read = reading
train.Batches.close = lambda batches: (closed.set(), close(batches))
original, calls = train.wait_for_data, iter(range(10**9))
def wait(*arguments):
    if RANK == "1" and next(calls) == 10:
        signal.raise_signal(15)
    return original(*arguments)
train.wait_for_data = wait
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_to_one_rank_ends_all_after_saving(moment, start_two, dataset, tmp_path):
    options = OPTIONS | dict(max_iters=20, eval_interval=10)
    arguments = flags(dataset, tmp_path / "run", **options)
    codes, err = end_of(start_two(MOMENTS[moment], *arguments))
    # torchrun's own code is 1
    assert codes in ([143, 143], [1]) and not error_lines(err)
    iteration = 11 if moment == "in an iteration" else 10
    (end,) = records(tmp_path / "run", "end")
    assert end["reason"] == "SIGTERM" and end["iters"] == iteration
    progress = load_newest(tmp_path / "run")["progress"]
    assert progress["iter_num"] == iteration
    # what was interrupted is dropped, and the resumed run begins with it
    assert progress["evaluated_at"] == (10 if moment == "in an iteration" else 0)
    run_here(dataset, tmp_path / "run", init_from="resume", **options)
    run_here(dataset, tmp_path / "alone", **options)
    assert_same_run(tmp_path / "alone", tmp_path / "run")


KILLED_ONCE = """
if RANK == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    original, calls = train.train_step, iter(range(10**9))
    def step(*arguments):
        if next(calls) == 13:
            os.kill(os.getpid(), 9)
        return original(*arguments)
    train.train_step = step
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_and_it_resumes(dataset, tmp_path):
    script = tmp_path / "patched.py"
    script.write_text(patched(KILLED_ONCE)[1])
    options = OPTIONS | dict(max_iters=20, eval_interval=10, checkpoint_interval=5)
    arguments = flags(dataset, tmp_path / "run", init_from="auto", **options)
    command = ("--standalone", "--max-restarts=1", str(script), *arguments)
    process = start_torchrun(2, *command, PYTHONPATH=str(ROOT))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("iteration 10") == 1
    run_here(dataset, tmp_path / "alone", **options)
    assert_same_run(tmp_path / "alone", tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_said_once(dataset, tmp_path):
    (tmp_path / "file").write_text("in the way")
    arguments = flags(dataset, tmp_path / "file" / "run", **OPTIONS)
    codes, _, err = run_ranks(2, "train.py", *arguments)
    assert codes == [2, 2] and len(error_lines(err)) == 1, err


# A disk that is full for `tries` saves; ranks wait `seconds` for each other in the last one
FULL = """
import datetime
from torch.distributed.distributed_c10d import _set_pg_timeout
from training import checkpoint
save, tries = checkpoint.save, {tries}
def full(state, path):
    global tries
    tries -= 1
    if tries >= 0:
        raise OSError(28, "No space left on device")
    return save(state, path)
checkpoint.save, train.RETRY_SECONDS = full, 1
original = train.save
def last_save(*arguments, **named):
    _set_pg_timeout(datetime.timedelta(seconds={seconds}))
    saved = original(*arguments, **named)
    _set_pg_timeout(ranks.TIMEOUT)  # a busy machine may take longer for the rest
    return saved
train.save = last_save
"""


def test_ranks_wait_together_for_room_longer_than_for_each_other(dataset, tmp_path):
    arguments = flags(dataset, tmp_path / "run", **OPTIONS | dict(max_iters=8))
    codes, _, err = run_ranks(2, *patched(FULL.format(tries=3, seconds=2)), *arguments)
    assert codes == [0, 0] and not error_lines(err)
    assert err.count("checkpoint 8 is not saved: No space left on device") == 3
    assert load(tmp_path / "run", 8)["progress"]["iter_num"] == 8


@needs_signals
def test_a_signal_to_any_rank_ends_the_wait_for_room_with_one_line(dataset, tmp_path):
    arguments = flags(dataset, tmp_path / "run", **OPTIONS | dict(max_iters=8))
    processes = start_ranks(2, *patched(FULL.format(tries=10**6, seconds=60)), *arguments)
    for line in processes[0].stderr:
        if "checkpoint 8 is not saved" in line:
            break
    processes[1].send_signal(signal.SIGTERM)
    codes, err = end_of(processes)
    (line,) = error_lines(err)
    assert codes == [1, 1] and "checkpoint 8 is not saved: No space left on device; " in line


def test_a_rank_that_hangs_is_not_waited_for_for_ever(dataset, tmp_path):
    hang = """
import datetime
from torch.distributed.distributed_c10d import _set_pg_timeout
original = train.train_step
def step(*arguments):
    if RANK == "1":
        time.sleep(600)
    _set_pg_timeout(datetime.timedelta(seconds=1))  # not before: a busy machine starts slowly
    return original(*arguments)
train.train_step = step
"""
    assert ranks.TIMEOUT <= datetime.timedelta(minutes=10)
    arguments = flags(dataset, tmp_path / "run", **OPTIONS)
    waiting, hanging = start_ranks(2, *patched(hang), *arguments)
    _, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 1 and hanging.poll() is None
    hanging.kill()
    hanging.communicate()
    (line,) = error_lines(err)
    assert "another rank is gone" in line
    assert "look at that one's last lines, or at the network" in line


def test_a_process_alone_needs_no_group():
    alone = Ranks()
    assert alone.is_main and alone.sum(1, 2) == [1, 2] and alone.gather("x") == ["x"]
    assert alone.on_main(lambda n: n + 1, 2) == 3
    alone.check_same("dtype", "float32", "")
    assert ranks.check_shares(Config(), 1) == [] and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "gpu, built, backend",
    [(True, True, "cpu:gloo,cuda:nccl"), (True, False, "gloo"), (False, True, "gloo")],
)
def test_nccl_is_used_only_where_it_is_built(gpu, built, backend, monkeypatch):
    """torch for Windows comes without it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(ranks.dist, "is_nccl_available", lambda: built)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks.dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    asked = []
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda name, **_: asked.append(name))
    Ranks()
    assert asked == [backend]
