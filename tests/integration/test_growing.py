"""
Train on a folder while it is being prepared: the same losses as on the finished folder, how a run
waits and ends, and what it refuses. test_losses.py checks the order of the windows, and
test_ranks.py checks two ranks.
"""

import json
import signal
import time
from pathlib import Path

import pytest
from cases import slow_but
from documents import (
    GrowingFolder,
    documents,
    wait_until_it_waits,
    write_parquet,
)
from program import (
    ROOT,
    TINY_RUN,
    assert_same_run,
    checkpoints,
    finish,
    flags,
    needs_signals,
    refused,
    run,
    start,
    train,
    write_tokens,
)

pytestmark = needs_signals
TINY = TINY_RUN | dict(
    n_layer=1,
    max_iters=60,
    warmup_iters=2,
    lr_decay_iters=60,
    eval_interval=20,
    eval_tokens=256,
    checkpoint_interval=5,
    stream=True,
    init_from="auto",
    dropout=0.1,
)
SIZES = dict(tokenizer="byte", val_fraction=0.05, shard_tokens=5000, tokens="120k", workers=1)


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_finished() -> Path:
    """Write 1,763 tokens, which 60 iterations read more than four times."""
    return write_tokens(Path("finished"), [8 * 16, 8 * 16, 1000, 7, 500], [300, 200])


def start_run(**changes):
    words = flags(**TINY | dict(dataset="x", out_dir="out") | changes)
    return start(str(ROOT / "train.py"), *words, cwd=Path.cwd())


@pytest.mark.parametrize("killed", slow_but(True, of=[False, True]), ids=["straight", "killed"])
def test_a_run_on_a_growing_folder_equals_one_on_the_finished_folder(killed):
    """
    Let the run wait for each shard, even if only the last target of a window is missing. Kill it
    with kill -9 while it waits for some of the shards.
    """
    finished = write_finished()
    train(**TINY, dataset=finished, out_dir="whole")
    growing = GrowingFolder(finished, Path("x"))
    manifest, process = Path("x/manifest.json"), start_run()
    while growing.left:
        wait_until_it_waits(process)
        if killed and len(growing.left) % 2:
            process.kill()
            process.communicate()
            process = start_run()
            wait_until_it_waits(process)
        manifest.rename("away")  # as if the share of the folder were away
        time.sleep(0.5)
        Path("away").rename(manifest)
        growing.add()
    growing.finish()
    result = finish(process)
    assert result.code == 0, result.err
    assert_same_run(Path("whole"), Path("out"), 60, log_has_gaps=killed)


def test_a_preparation_that_ended_too_early_ends_the_run_with_a_checkpoint():
    finished = write_finished()
    growing = GrowingFolder(finished, Path("x"))
    growing.add(2)
    process = start_run()
    wait_until_it_waits(process)
    growing.release()
    result = finish(process)
    assert result.code == 1
    (error,) = result.err.splitlines()
    assert "/x: " in error and "its preparation has ended" in error
    assert checkpoints(Path("out"))[-1] > 5
    growing.finish()
    train(**TINY, dataset="x", out_dir="out")
    train(**TINY, dataset=finished, out_dir="whole")
    assert_same_run(Path("whole"), Path("out"), 60)


@pytest.mark.parametrize("number", slow_but(signal.SIGINT, of=[signal.SIGTERM, signal.SIGINT]))
def test_a_run_that_waits_for_data_saves_and_ends_at_a_signal(number):
    growing = GrowingFolder(write_finished(), Path("x"))
    growing.add(2)
    process = start_run()
    wait_until_it_waits(process)
    time.sleep(0.5)  # the run still trains on what it has read
    process.send_signal(number)
    result = finish(process)
    assert result.code == 128 + number and "stopping after" in result.err
    assert checkpoints(Path("out"))[-1] > 5
    growing.release()


FROM_A_FILE = """
import os, runpy, sys
import data.files
data.files.hub_files = lambda *_: (["a.parquet"], "a" * 40)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_beside_a_preparation_killed_and_continued_equals_one_on_the_finished_folder(work):
    write_parquet(work / "a.parquet", documents(3000))
    words = flags(dataset="org/name", **SIZES | dict(tokens="300k"))
    command = ["-c", FROM_A_FILE, str(ROOT / "data/prepare_fineweb.py"), *words]
    assert finish(start(*command, "--out=finished", cwd=work)).code == 0
    keys = TINY | dict(batch_size=32, max_iters=300, lr_decay_iters=300, log_interval=30)
    train(**keys, dataset="finished", out_dir="whole")
    preparation = start(*command, "--out=x", cwd=work)
    manifest = work / "x/manifest.json"
    while not manifest.exists() or not json.loads(manifest.read_text())["shards"]:
        time.sleep(0.005)
    preparation.send_signal(signal.SIGSTOP)
    process = start_run(**keys)
    wait_until_it_waits(process)
    preparation.kill()
    preparation.communicate()
    assert finish(process).code == 1
    preparation = start(*command, "--out=x", cwd=work)
    process = start_run(**keys)
    for started in (preparation, process):
        result = finish(started)
        assert result.code == 0, result.err
    assert_same_run(Path("whole"), Path("out"), 300)


# -----------------------------------------------------------------------------
# Refusals


def refusal(**changes) -> str:
    result = run("train.py", *flags(**TINY | dict(out_dir="out") | changes))
    refused(result)
    return result.err


def test_a_folder_that_cannot_be_trained_on_yet_is_refused():
    growing = GrowingFolder(write_finished(), Path("x"))
    assert "x: is unfinished; " in refusal(dataset="x", stream=False)
    asked = "x: is unfinished, and has 500 validation tokens so far; wait until there are more than"
    assert f"{asked} 500, or lower --eval_tokens" in refusal(dataset="x", eval_tokens=500)
    val = [shard for shard in growing.manifest["shards"] if "val" in shard["name"]]
    growing.write(growing.manifest | dict(shards=val, complete=False))
    assert "x: is unfinished, and has 500 validation tokens" in refusal(dataset="x")
    assert not Path("out").exists()
