"""
The scripts where Windows is simulated (tests/notwindows): what they find there, and what it refuses
them. And what the program says and does only there, or on a Mac.
"""

import json
import signal
import sys
from pathlib import PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import pytest
from helpers import FAST, ROOT, TINY, assert_same_state, flags, load, records, start_process

import bench
import train
from common import child, console
from training import checkpoint, hardware

simulated = pytest.mark.skipif(sys.platform != "linux", reason="simulates Windows on Linux")

# run(SCRIPT, ARGUMENT, ...) does what `python SCRIPT.py ARGUMENT ...` does, and returns its exit
# code. This code itself is none of the project's and sees Linux.
BEGIN = f"""
import importlib, sys, threading, time
sys.path[:0] = [{str(ROOT / "tests/notwindows")!r}, {str(ROOT)!r}]
import notwindows
notwindows.install()
from common.console import run_main

def run(name, *arguments):
    sys.argv = [name.replace(".", "/") + ".py", *arguments]
    try:
        run_main(importlib.import_module(name).main)
    except SystemExit as exit:
        return exit.code
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes of the simulated Windows in tmp_path, with sys.argv[1:] for the code."""
    processes = []

    def start(code: str, *arguments):
        process = start_process("-c", BEGIN + code, *arguments, cwd=tmp_path, only_torch=True)
        process.stdout.reconfigure(encoding="cp1252")
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def run(start):
    """The same, to the end: stdout and stderr."""

    def run(code: str, *arguments) -> tuple[str, str]:
        process = start(code, *arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out, err

    return run


SMALL = ["--dtype=float32", "--n_layer=1", "--n_embd=32", "--eval_tokens=2048", "--eval_interval=4"]
SMALL += ["--sample_tokens=5", "--lr_decay_iters=8", "--max_iters=8", "--out_dir=out/my run"]
TRAIN = """
print("code:", run("train", *sys.argv[1:]), "calls:", notwindows.Recorder.calls)
"""
SCRIPTS = """
config, *small = sys.argv[1:]
import sample
from training import log
log.SHORTEST_RUN = 0.0
with open("out/my run/loss.png", "wb") as viewer:  # which lets nobody replace what it shows
    codes = [run("train", config, *small, "--init_from=resume")]
original = sample.print_growing
def print_growing(*arguments):
    print("held:", notwindows.holders("out/my run/best.pt"))
    original(*arguments)
sample.print_growing = print_growing
run_dir, prompt = "--out_dir=out/my run", "--start=caf\u00e9 \u2603"
codes.append(run("sample", run_dir, prompt, "--num_samples=1", "--max_new_tokens=5"))
codes.append(run("compare", "out/my run"))
codes.append(run("convert", "ckpt-to-hf", "out/my run", "exported"))
codes.append(run("bench", "step", config, *small, "--trials=1"))
print("codes:", codes)
"""


@simulated
def test_quickstart_resume_sample_compare_convert_and_bench(run, tmp_path, monkeypatch):
    config = str(ROOT / "config/quickstart.py")
    out, err = run(TRAIN, config, *SMALL, "--max_iters=4")
    # winbase.h's ES_CONTINUOUS | ES_SYSTEM_REQUIRED
    assert f"code: 0 calls: [({0x80000001},)]" in out, err
    out, err = run(SCRIPTS, config, *SMALL)
    assert "codes: [0, 0, 0, 0, 0]" in out, out + err
    assert "held: []" in out and "caf\u00e9 ?" in out
    assert "mem n/a" in out and "mem nan" not in out
    # the picture that was open costs one warning, and compare.py draws it
    assert [line for line in err.splitlines() if line.startswith("warning: loss.png")]
    assert err.count("loss.png") == 1
    assert (tmp_path / "out/my run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "exported/model.safetensors").exists()
    assert list(tmp_path.rglob("*.tmp")) == []
    # the resumed run there ends with the bits of an unbroken one here
    monkeypatch.chdir(tmp_path)
    assert train.main([config, *SMALL, "--out_dir=straight"]) == 0
    assert_same_state(load(tmp_path / "out/my run", 8), load(tmp_path / "straight", 8))


PREPARE = """
import data.writer
flags, end = sys.argv[2:], int(sys.argv[1])
original = data.writer.write_shard
def write_shard(path, tokens):
    if int(path.stem[-6:]) == end:
        print("waiting", flush=True)
        time.sleep(600)
    return original(path, tokens)
data.writer.write_shard = write_shard
if end < 0 and data.writer.Path(flags[-1][6:], "manifest.json").exists():
    reader = open(flags[-1][6:] + "/manifest.json")  # as a virus scanner
    threading.Timer(0.5, reader.close).start()
print("code:", run("data.prepare_fineweb", *flags), "calls:", notwindows.Recorder.calls)
"""


@simulated
def test_a_preparation_that_is_killed_continues_and_a_second_one_is_refused(start, run, tmp_path):
    rows = [json.dumps(dict(text=f"{n} " * (n % 50))) for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    arguments = ["--source=rows.jsonl", "--tokenizer=byte", "--tokens=20k", "--val_tokens=2k"]
    arguments += ["--shard_tokens=4k", "--workers=1"]
    killed = start(PREPARE, "3", *arguments, "--out=killed")
    assert killed.stdout.readline() == "waiting\n"
    out, err = run(PREPARE, "-1", *arguments, "--out=killed")
    assert "code: 2" in out and "another preparation is writing to it" in err
    killed.kill()
    killed.communicate()
    out, err = run(PREPARE, "-1", *arguments, "--out=killed")
    assert f"code: 0 calls: [({0x80000001},)]" in out, err
    assert "next: python train.py " in out and "'" not in out.partition("next:")[2]
    run(PREPARE, "-1", *arguments, "--out=straight")
    files = {path.name for path in (tmp_path / "straight").iterdir()}
    assert len(files) > 5 and files == {path.name for path in (tmp_path / "killed").iterdir()}
    for name in files:
        straight, continued = (tmp_path / folder / name for folder in ("straight", "killed"))
        assert straight.read_bytes() == continued.read_bytes()


@simulated
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (21, 149)])
def test_ctrl_c_and_ctrl_break_save_and_until_then_a_second_run_is_refused(
    number, code, start, dataset, tmp_path
):
    """Ctrl-Break, which is signal 21 there."""
    options = dict(max_iters=10**6, eval_interval=10**6, init_from="auto", checkpoint_interval=4)
    arguments = flags(dataset, tmp_path / "my run", **options)
    begin = 'sys.exit(run("train", *sys.argv[1:]))'
    process = start(begin, *arguments)
    while not process.stdout.readline().startswith("checkpoint 4"):
        assert process.poll() is None
    second = start(begin, *arguments)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2 and "another run is writing to" in err
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "stopping after this iteration" in err
    iter_num = checkpoint.load(checkpoint.find_newest(tmp_path / "my run"))["progress"]["iter_num"]
    assert f"checkpoint {iter_num}: " in out
    # in double quotes, which cmd and PowerShell both know
    command = out.partition("to continue: ")[2]
    assert command.startswith("python train.py ") and f'"--out_dir={tmp_path}/my run"' in command


HELD = """
from training import checkpoint
folder, *flags = sys.argv[1:]
save, opened = checkpoint.save, []
def hold(name):
    opened.append(open(folder + "/" + name, "rb"))
    return opened[-1]
def save_while_others_look(content, path):
    save(content, path)
    iter_num = content["progress"]["iter_num"]
    if iter_num == 4:
        threading.Timer(0.5, hold("best.pt").close).start()  # a virus scanner
    if iter_num == 7:
        hold("ckpt-00000007.pt")  # to the end: somebody's own program
checkpoint.save = save_while_others_look
sys.exit(run("train", *flags))
"""


@simulated
def test_a_file_that_others_have_open_costs_no_save(run, dataset, tmp_path):
    options = dict(eval_interval=2, checkpoint_interval=1, keep_checkpoints=1, warmup_iters=0)
    arguments = flags(dataset, tmp_path, **options)
    _, err = run(HELD, str(tmp_path), *arguments)
    assert [r["iter"] for r in records(tmp_path, "checkpoint")] == [*range(1, 9)]
    assert load(tmp_path, 8)["progress"]["best_iter"] == 8
    assert (tmp_path / "best.pt").samefile(tmp_path / "ckpt-00000008.pt")
    (line,) = err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/ckpt-00000007.pt: cannot be deleted now: ")


@simulated
def test_the_fast_recipe_streams_and_resumes(run, tmp_path):
    """Its text is prepared beside it, by a process that replaces a file that the run reads."""
    row = json.dumps(dict(text="A text with more than one line.\n" * 20))
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 40)
    options = TINY | FAST | dict(dataset="rows.jsonl", stream=True, tokenizer="byte", out_dir="out")
    arguments = [f"--{key}={value}" for key, value in options.items()]
    for more in ([], ["--init_from=resume", "--max_iters=12"]):
        out, err = run(TRAIN, *arguments, *more)
        assert "code: 0" in out, err
    assert checkpoint.load(checkpoint.find_newest(tmp_path / "out"))["progress"]["iter_num"] == 12


# -----------------------------------------------------------------------------
# What needs no simulation


def test_commands_are_quoted_as_the_systems_own_shell_wants_it(monkeypatch):
    words = ["python", "train.py", PurePosixPath("config/mine.py"), "--out_dir=R&D 1"]
    monkeypatch.setattr(console, "sys", SimpleNamespace(platform="linux"))
    assert console.command_line(*words) == "python train.py config/mine.py '--out_dir=R&D 1'"
    monkeypatch.setattr(console, "sys", SimpleNamespace(platform="win32"))
    words[2] = PureWindowsPath("config/mine.py")
    assert console.command_line(*words) == r'python train.py config\mine.py "--out_dir=R&D 1"'


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 137438953472 bytes.",  # c10's on Windows
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes.",
        "Invalid buffer size: 128.00 GiB",  # MPS
    ],
)
def test_memory_that_runs_out_is_known_by_what_each_system_says(text):
    assert hardware.is_out_of_memory(RuntimeError(text))


def test_memory_that_is_not_known_is_not_a_number_for_bench():
    row = dict(tokens_per_sec=1.0, step_ms=1.0, mfu=None, mem_gib=None)
    assert bench.speed_text(row) == "1.0 ms/iteration, 1 tok/s, mfu n/a, mem n/a GiB"


def test_a_process_beside_the_run_keeps_its_pipe_out_of_the_way_of_libraries():
    """On Windows whoever looks at a pipe that a thread reads has to wait for its next line."""
    code = (
        "import os, sys, threading, time; from common.child import end_with_parent\n"
        "threading.Timer(60, os._exit, [3]).start()\n"
        "end_with_parent(lambda line: os.write(2, line.upper().encode()))\n"
        "os.write(2, repr(sys.stdin.read()).encode() + b'\\n')\n"
        "time.sleep(600)"
    )
    process = child.start_child("-c", code, cwd=ROOT, stderr=-1)
    assert process.stderr.readline() == b"''\n"
    process.stdin.write(b"line\n")
    assert process.stderr.readline() == b"LINE\n"
    process.stdin.close()
    assert process.wait(20) == 1
