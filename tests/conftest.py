"""Define the fixtures and settings that all tests share."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from common.process import ASK_TO_STOP

pytest.register_assert_rewrite("program")  # so that a failed assert there shows its values
import program  # noqa: E402

# A shell's background job ignores Ctrl-C, and so would the processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup, those processes would ignore SIGHUP too. With a handler the tests still outlive the
# terminal, but child processes do not inherit the handler.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# Each run asks git for its commit, which takes a fifth of a tiny run's time. With more threads,
# models this small only wait, and wait longer on a busy machine.
os.environ |= dict(GIT_DIR=os.devnull, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
torch.set_num_threads(1)


def fsync(file: int) -> None:
    """
    Do nothing instead of waiting for the disk. Only a power cut would show the difference, and no
    test cuts the power; integration/test_disks.py checks the calls. Processes started cold do wait.
    """


os.fsync = fsync


@pytest.fixture(autouse=True, scope="session")
def own_compiler_cache(tmp_path_factory):
    """Spare the user's cache of compiled code, because tests make the compiler fail."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def restored_process_state(request):
    """Restore the signal handlers and reset the torch settings that train.main changes."""
    handlers = {number: signal.getsignal(number) for number in ASK_TO_STOP}
    # A fixture of module scope may have trained and left its run's handler in place.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.node.get_closest_marker("slow"):
        torch._dynamo.reset()  # after some compiled models, Dynamo would run the next one eagerly
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if torch.are_deterministic_algorithms_enabled():  # the call takes a second, for an import
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """Kill what program.start() started. The processes of a failed test would slow down others."""
    yield
    while program.started:
        program.started.pop().kill()


@pytest.fixture
def make_disk(tmp_path):
    """Return a function that mounts a disk of `size` bytes and returns its folder."""
    mounted = []

    def make(size: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs to be root, to mount a disk")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Write a small dataset: three shards of tokens for training, two for validation."""
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return program.write_tokens(folder, [700, 37, 500], [250, 150])


@pytest.fixture(scope="session")
def gpt2_bpe():
    """Return GPT-2's BPE, which tiktoken downloads or reads from TIKTOKEN_CACHE_DIR, or skip."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(str(error))


@pytest.fixture
def tiny(request, tokens, tmp_path) -> dict:
    """Return the keys of a tiny run on `tokens`, with those that the test module has in TINY."""
    module = getattr(request.module, "TINY", {})
    return program.TINY_RUN | module | dict(dataset=tokens, out_dir=tmp_path / "out")


@pytest.fixture
def ran(tiny) -> program.Run:
    """Read what a run with the keys of `tiny` has left."""
    return program.Run(tiny["out_dir"])


@pytest.fixture(scope="module")
def straight(request, tokens, tmp_path_factory) -> Path:
    """Train a run with the keys that the test module has in TINY, and return its folder."""
    out_dir = tmp_path_factory.mktemp("straight")
    program.train(**program.TINY_RUN | request.module.TINY, dataset=tokens, out_dir=out_dir)
    return out_dir


def pytest_collection_modifyitems(items):
    """Skip gpu tests if CUDA is missing."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
