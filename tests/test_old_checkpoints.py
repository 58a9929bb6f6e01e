"""
Checkpoints that commit c336bd1 wrote: today's program resumes them, on the tokens that they were
trained on.

gpt2 and fast were saved after 5 of 10 iterations; losses.json has what c336bd1 then logged. hours
was stopped after half of its hour (of a clock that a script turned), until a minute before its end,
which is long past. Whatever a checkpoint looks like one day, these must stay as they are.
"""

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from helpers import load, needs_signals, records, run_process, start_process
from same_run import write_dataset

SAVED = Path(__file__).with_name("checkpoints_c336bd1")
COMMON = dict(
    n_layer=2,
    n_head=2,
    n_embd=16,
    pad_vocab_multiple=32,  # the files are to be small
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    eval_tokens=256,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
# no dropout: other machines draw other random numbers
BY_ITERATIONS = dict(max_iters=10, lr_decay_iters=10, eval_interval=5, checkpoint_interval=5)
FAST = dict(
    model="fast",
    value_tables=1,
    bigram_rows=100,
    optimizer="muon",
    learning_rate=0.025,
    warmup_iters=0,
    grad_clip=0.0,
    min_lr=0.0,
    beta1=0.8,
)
BY_CLOCK = dict(lr_schedule="linear", learning_rate=1e-2, warmup_iters=0, min_lr=0.0)
RUNS = dict(
    gpt2=dict(BY_ITERATIONS, learning_rate=1e-2, warmup_iters=2),
    fast=dict(BY_ITERATIONS, **FAST),
    hours=dict(BY_CLOCK, hours=1),
    until=dict(BY_CLOCK, until="07:15"),
)
SAVED_AT = dict(gpt2=5, fast=5, hours=18, until=158)
SEQUENCES = COMMON["batch_size"] * COMMON["gradient_accumulation_steps"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tokens", vocab=90)


@pytest.fixture
def command(tokens, tmp_path):
    """The command that resumes a checkpoint, which lies in tmp_path then."""

    def resume(name: str, **changes) -> list[str]:
        it = SAVED_AT[name]
        shutil.copy(SAVED / f"{name}-{it:08}.pt", tmp_path / f"ckpt-{it:08}.pt")
        keys = COMMON | RUNS[name] | dict(dataset=tokens, out_dir=tmp_path, init_from="resume")
        return ["train.py", *(f"--{key}={value}" for key, value in (keys | changes).items())]

    return resume


@pytest.mark.parametrize("name", ["gpt2", "fast"])
def test_a_run_by_iterations_goes_on_with_its_data_and_moments(name, command, tmp_path):
    code, _, err = run_process(*command(name))
    assert code == 0, err
    steps = records(tmp_path, "step")
    assert [step["iter"] for step in steps] == [5, 6, 7, 8, 9]
    # other data, moments or rates differ by 1e-3 and more, other processors by less than 1e-6
    expected = json.loads((SAVED / "losses.json").read_text())[name]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-4)
    progress = load(tmp_path, 10)["progress"]
    assert progress["iter_num"] == 10 and progress["sequences"] == 10 * SEQUENCES
    assert progress["tokens"] == 10 * SEQUENCES * COMMON["block_size"]


@needs_signals
def test_hours_go_on_counting_where_the_run_stopped(command, tmp_path):
    process = start_process(*command("hours"))
    for line in process.stdout:
        if line.startswith("iter "):
            break
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + 15
    first = records(tmp_path, "step")[0]
    assert first["iter"] == 18 and first["tokens"] == 18 * SEQUENCES * COMMON["block_size"]
    # half of the hour is used, so the rate is half of the highest
    assert first["lr"] == pytest.approx(0.5e-2, rel=0.1)


def test_hours_that_are_used_up_end_the_run_at_once(command, tmp_path):
    code, _, err = run_process(*command("hours", hours=0.4, max_minutes=1))
    assert code == 0, err
    (end,) = records(tmp_path, "end")
    assert end["reason"] == "hours" and 18 <= end["iters"] <= 20
    assert records(tmp_path, "eval")[-1]["iter"] == end["iters"]


def test_until_keeps_its_deadline_which_has_passed(command, tmp_path):
    """And does not train until the next 07:15."""
    code, _, err = run_process(*command("until", max_minutes=1))
    assert code == 0, err
    (end,) = records(tmp_path, "end")
    assert end["reason"] == "until" and 158 <= end["iters"] <= 160
    assert load(tmp_path, end["iters"])["progress"]["sequences"] == end["iters"] * SEQUENCES


def test_another_until_goes_on(command, tmp_path):
    later = datetime.now() + timedelta(hours=12)
    later = later.replace(minute=later.minute // 2 * 2)  # never 07:15
    code, _, err = run_process(*command("until", until=f"{later:%H:%M}", max_iters=161))
    assert code == 0, err
    assert [step["iter"] for step in records(tmp_path, "step")] == [158, 159, 160]
    assert load(tmp_path, 161)["progress"]["sequences"] == 161 * SEQUENCES
