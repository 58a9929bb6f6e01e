"""Check what other programs read from a run: its log lines, metrics.jsonl and the loss curve."""

import itertools
import re
import shutil
from datetime import datetime
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from char_dataset import SHORT_RUN, T
from program import (
    column,
    records,
    run,
    train,
)

N = r"-?[\d.]+"
ITER = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms, mfu ({N})%", re.MULTILINE)
STEP = re.compile(rf"^step (\d+): train loss ({N}), val loss ({N})", re.MULTILINE)
FIELDS = dict(
    start="commit config data_fingerprint device device_type dtype flops_per_token iter parameters"
    " peak_source peak_tflops tokenizer tokens_per_iter torch val_fingerprint"
    " val_text_sha256 train_tokens val_tokens world_size",
    step="compile_seconds cpu_ms data_wait_ms epoch grad_norm hours iter loss lr mem_gib mfu"
    " step_ms tokens tokens_after tokens_per_sec",
    eval="bits_per_byte hours iter perplexity seconds tokens train_loss val_loss",
    checkpoint="bytes iter path seconds",
    sample="iter text",
    event="iter message",
    end="hours iters ledger reason tokens",
)


@pytest.fixture(scope="module")
def logged(corpus, tmp_path_factory) -> tuple[Path, str]:
    """
    Train a run with all kinds of records, which skips the update of iteration 4, and return its
    folder and output.
    """
    out_dir = tmp_path_factory.mktemp("logged") / "run"
    backward = torch.Tensor.backward
    calls = itertools.count()

    def spoilt(loss):
        is_bad = next(calls) == 4 * 2  # two micro-batches an iteration
        backward(loss * torch.nan if is_bad else loss)

    changes = dict(sample_tokens=5, peak_tflops=0.01, log_interval=2)
    with mock.patch.object(torch.Tensor, "backward", spoilt):
        result = train(**SHORT_RUN | changes, dataset=corpus, out_dir=out_dir)
    return out_dir, result.out


def test_scripts_that_parse_nanogpts_log_lines_can_parse_ours(logged):
    out_dir, out = logged
    lines = ITER.findall(out)
    fields = ("iter", "loss", "step_ms", "mfu")
    expected = [
        (str(it), f"{loss:.4f}", f"{ms:.2f}", f"{100 * mfu:.2f}")
        for it, loss, ms, mfu in column(out_dir, "step", *fields)
    ]
    assert lines == expected
    assert [int(line[0]) for line in lines] == [0, 2, 4, 6, 7]
    evaluations = [
        (str(it), f"{train_loss:.4f}", f"{val_loss:.4f}")
        for it, train_loss, val_loss in column(out_dir, "eval", "iter", "train_loss", "val_loss")
    ]
    assert STEP.findall(out) == evaluations
    assert [int(line[0]) for line in evaluations] == [0, 4, 8]
    assert f"tokens per iteration will be: {4 * 2 * T:,}" in out


def test_each_kind_of_record_in_metrics_jsonl_has_its_fields(logged):
    out_dir, _ = logged
    found: dict[str, set] = {}
    for record in records(out_dir):
        names = frozenset(record) - {"kind", "time"}
        found.setdefault(record["kind"], set()).add(names)
        assert datetime.fromisoformat(record["time"]).tzinfo
    assert found.keys() == FIELDS.keys()
    for kind, sets in found.items():
        (names,) = sets
        assert names == set(FIELDS[kind].split()), kind


def test_log_txt_holds_what_the_console_showed(logged):
    out_dir, out = logged
    lines = (out_dir / "log.txt").read_text().splitlines()
    assert set(ITER.findall(out)) == set(ITER.findall("\n".join(lines)))
    assert set(out.splitlines()) <= set(lines) | {""}


def assert_is_picture(path: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(path)
    assert min(pixels.shape[:2]) > 200
    colours = np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)
    assert len(colours) > 20  # not a blank page


@pytest.mark.slow
def test_compare_py_draws_a_runs_loss_curve(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    assert run("compare.py", tmp_path / "run").code == 0
    assert_is_picture(tmp_path / "run" / "loss.png")
