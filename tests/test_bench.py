"""
bench.py and its modes: plan against numbers computed by hand, the measurements against train.py's
own log, one line for bad input.
"""

import json
import math
import re
import statistics
from datetime import datetime
from itertools import pairwise

import psutil
import pytest
import torch
from helpers import ROOT, records, run_here, run_process, start_process, write_dataset

import bench
import train
from common.console import UserError
from configurator import Config, load_config
from data.shards import open_dataset
from reports import plan
from reports.plan import count_pauses
from training import hardware
from training.gpus import read_gpu_table, row_peak, short_name

GPT40M, GPT124M = f"{ROOT}/config/gpt40m_4070.py", f"{ROOT}/config/gpt124m_4070.py"
FAST124M = f"{ROOT}/config/fast124m_4070.py"


def run(tmp_path, mode, *arguments) -> dict:
    """A mode in this process; what it wrote with --json."""
    assert bench.main([mode, *map(str, arguments), f"--json={tmp_path}/new/result.json"]) == 0
    return json.loads((tmp_path / "new/result.json").read_text())


# -----------------------------------------------------------------------------
# plan


def test_plan_of_the_users_40m_run(tmp_path, capsys):
    """
    16 * 1024 * 32 = 524,288; times 20,000 = 10,485,760,000; / 3.68e9 = 2.849; 20,000 * 3.9 s =
    21.67 h; N = 50304 * 384 + 12 * (12 * 384^2 + 2 * 384) + 384 = 40,560,000; 6 N + 12 * 12 * 384 *
    1024 = 299,983,104 per token; 524,288 / 3.9 * 299,983,104 / 58.3e12 = 69.2 %; 21.67 h * 200 W =
    4.33 kWh. torch counts no norms, 6 * 25 * 384 FLOPs.
    """
    flags = ("--gpu=4070", "--iter_seconds=3.9", "--dataset_tokens=3.68B", "--watts=200")
    p = run(tmp_path, "plan", GPT40M, *flags)
    assert (p["tokens_per_iter"], p["total_tokens"]) == (524_288, 10_485_760_000)
    assert p["epochs"] == pytest.approx(2.849, abs=1e-3) and p["dataset_tokens"] == 3.68e9
    assert p["params"] == 40_560_000 + 1024 * 384
    assert p["flops_per_token"] == 299_983_104 - 6 * 25 * 384
    assert p["total_flops"] == pytest.approx(3.15e18, rel=2e-3)
    assert p["hours"] == pytest.approx(21.667, abs=1e-3)
    assert p["tokens_per_sec"] == pytest.approx(134_433, abs=1)
    assert p["mfu"] == pytest.approx(0.692, abs=5e-4)
    assert p["kwh"] == pytest.approx(4.333, abs=1e-3)
    # see test_gpus: 1.01 * (0.74 + 16384 * (12 * (32 * 384 + 40) + 4 * 384)
    # + 2 * 50304 * (2 * 4096 + 4 * 384)) + 0.55 = 4.76 GB
    assert p["vram_gib"] == pytest.approx(4.76e9 / 2**30, abs=0.02) and p["fits"]
    out = capsys.readouterr().out
    for words in ("2.85 epochs of 3.68B", "mfu 69.2%", "21.7 h", "134,433 tok/s"):
        assert words in out


@pytest.mark.parametrize("iter_seconds, hours", [(2.5, 13.9), (3, 16.7), (3.5, 19.4), (4, 22.2)])
def test_hours_of_the_planner_note(iter_seconds, hours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no data set is
    p = run(tmp_path, "plan", GPT40M, f"--iter_seconds={iter_seconds}")
    assert round(p["hours"], 1) == hours and p["hours_range"] == [p["hours"]] * 2
    assert p["epochs"] is None and p["kwh"] is None and p["cost"] is None  # no data set, no watts


def test_plan_of_the_users_124m_run(tmp_path):
    """
    20,000 * 9.34 s = 51.9 h; 854.8 MFLOP/token * 10.49e9 = 8.96e18; 56,134 tok/s are 82.3 % of 58.3
    TFLOP/s.
    """
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--iter_seconds=9.34", "--max_iters=20000")
    assert round(p["hours"], 1) == 51.9
    assert p["total_flops"] == pytest.approx(8.96e18, rel=1e-3)
    assert p["tokens_per_sec"] == pytest.approx(56_134, abs=1)
    assert p["mfu"] == pytest.approx(0.823, abs=5e-4)


def test_a_plan_for_a_dataset_that_is_missing_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "config/gpt124m_4070.py")
    make = "make it with: python data/prepare_fineweb.py --tokens=10B --out=data/fineweb_edu"
    vocabulary = "vocabulary 50,257, GPT-2's, as dataset fineweb_edu is missing\n"
    elsewhere = "or give its folder, such as nanoGPT's: --dataset=PATH"
    missing = f"{vocabulary}dataset: there is no folder data/fineweb_edu; {make}; {elsewhere}\n"
    run(tmp_path, "plan", config, "--gpu=4070")
    assert capsys.readouterr().err == missing
    run(tmp_path, "plan", config, "--gpu=4070", "--dataset_tokens=10B")
    assert capsys.readouterr().err == vocabulary
    # as many as the hours hold at the fastest speed of the range, rounded up
    for hours, tokens in ((8, "2B"), (1, "200M")):
        p = run(tmp_path, "plan", FAST124M, "--gpu=4070", f"--hours={hours}")
        assert capsys.readouterr().err == missing.replace("10B", tokens)
        assert 0.8 < p["tokens_range"][1] / float(tokens.replace("B", "e9").replace("M", "e6")) <= 1


def test_the_quickstart_is_planned_and_measured_with_bytes_before_its_dataset_is_made(
    tmp_path, monkeypatch, capsys
):
    """256 * 128 + 4 * (12 * 128^2 + 2 * 128) + 128 = 820,352, and 64 positions of 128."""
    monkeypatch.chdir(tmp_path)
    quickstart = str(ROOT / "config/quickstart.py")
    p = run(tmp_path, "plan", quickstart, "--iter_seconds=0.07")
    assert (p["vocab_size"], p["params"]) == (256, 820_352 + 64 * 128)
    data = bench.real_or_random_data(load_config([quickstart]))
    assert data.vocab == 256 and data.train.tokens.max() == 255
    assert capsys.readouterr().err == ""


def test_plan_refuses_gpus_that_train_cannot_share_the_work_out_to(tmp_path):
    said = "gradient_accumulation_steps: 64 micro-batches cannot be divided among 3 processes"
    for gpu in ("4070", "all"):
        with pytest.raises(UserError, match=said):
            run(tmp_path, "plan", GPT124M, f"--gpu={gpu}", "--gpus=3")


def test_max_iters_bound_what_the_hours_hold(tmp_path, monkeypatch):
    """
    At 9.04 to 17.08 s an iteration 8 hours hold 1,600 to 3,100: 2,500 are reached at the fastest
    speed alone, and 1,000 at each.
    """
    monkeypatch.chdir(tmp_path)  # where no data set is
    command = ("plan", FAST124M, "--gpu=4070", "--hours=8")
    free, some, few = (run(tmp_path, *command, f"--max_iters={n}") for n in (10_000, 2_500, 1_000))
    assert free["tokens_range"][1] > 3000 * 524_288
    assert some["tokens_range"] == [pytest.approx(free["tokens_range"][0]), 2_500 * 524_288]
    assert some["shards_gb"] == pytest.approx(2 * 2_500 * 524_288 / 1e9)
    assert few["tokens_range"] == [1_000 * 524_288] * 2
    assert few["hours_range"] == pytest.approx([n * 1000 / 3600 for n in few["iter_seconds_range"]])


def test_evaluations_and_checkpoints_are_on_the_bill(tmp_path, capsys):
    """
    1000 iterations of 1 s; evaluations at 0, 300, 600, 900 and 1000, each of 2 * 524,288 tokens
    forward alone, so 2/3 s; checkpoints at 300, 600, 900, 1000 and at 200, 400, 800, each of 12 *
    124.4 MB at 0.5 GB/s.
    """
    flags = ["--gpu=4070", "--iter_seconds=1", "--max_iters=1000", "--eval_interval=300"]
    flags += ["--checkpoint_interval=200", "--eval_tokens=524288"]
    p = run(tmp_path, "plan", GPT124M, *flags, "--watts=100", "--price_kwh=0.5")
    assert (p["evaluations"], p["checkpoints"]) == (5, 7)
    seconds = 1000 + 5 * 2 / 3 + 7 * 12 * 124_373_760 / 0.5e9
    assert p["hours"] == pytest.approx(1000 / 3600)
    assert p["hours_total"] == pytest.approx(seconds / 3600)
    assert p["cost"] == pytest.approx(seconds / 3600 * 0.1 * 0.5)
    assert "time     16m40s of iterations; " in capsys.readouterr().out


@pytest.mark.parametrize(
    "n, evals, saves", [(7, 3, 2), (8, 4, 0), (1, 5, 3), (12, 4, 6), (10, 3, 5)]
)
def test_pauses_are_those_that_train_makes(n, evals, saves, dataset, tmp_path):
    keys = dict(max_iters=n, eval_interval=evals, checkpoint_interval=saves)
    run_here(dataset, tmp_path, keep_checkpoints=20, **keys)
    counted = count_pauses(Config(**keys), 1e-3)
    assert counted == (len(records(tmp_path, "eval")), len(records(tmp_path, "checkpoint")))


def test_plan_says_what_fits(tmp_path, capsys):
    flags = ("--gpu=4070", "--batch_size=32", "--gradient_accumulation_steps=16")
    p = run(tmp_path, "plan", GPT124M, *flags)
    assert p["fits"] is False and p["batch_size_that_fits"] == 16
    advice = "--batch_size=16 --gradient_accumulation_steps=32"
    line = f"does not fit in 10.8 GiB; the largest that fits: {advice}"
    assert line in capsys.readouterr().out
    run(tmp_path, "plan", GPT124M, "--gpu=4070", "--n_embd=7680", "--n_layer=24")
    assert "not even with batch_size=1" in capsys.readouterr().out


def test_estimate_names_its_mfu_and_gives_a_range(tmp_path, capsys):
    p = run(tmp_path, "plan", GPT124M, "--gpu=a100")
    assert p["mfu"] == pytest.approx((0.52 + 0.57) / 2)
    assert "others measured 52-57% in bfloat16 on this GPU" in capsys.readouterr().out
    low, high = p["hours_range"]
    assert low / p["hours"] == pytest.approx(0.545 / (1.1 * 0.57))
    assert high / p["hours"] == pytest.approx(0.545 / (0.9 * 0.52))
    again = run(tmp_path, "plan", GPT124M, "--gpu=a100", "--recompute=True")
    # the blocks' share of the FLOPs, a third of which is their forward pass
    blocks = 1 - 6 * 768 * 50304 / p["flops_per_token"]
    assert again["hours"] / p["hours"] == pytest.approx(1 + blocks / 3)


@pytest.mark.parametrize(
    ("gpu", "flags", "seconds", "link"),
    [
        ("a100", ["--gpus=8"], 0.004, "230 GB/s (without --link_gbits: 1 machine)"),
        ("4070", ["--gpus=2"], 0.041, "12 GB/s (without --link_gbits: 1 machine)"),
        (
            "a100",
            ["--gpus=16"],
            0.093,
            "10 GB/s (without --link_gbits: 8 GPUs per machine, 100 G",
        ),
        ("a100", ["--gpus=16", "--link_gbits=3200"], 0.003, "320 GB/s ("),
    ],
)
def test_several_gpus_average_their_gradients_in_the_planned_time(
    gpu, flags, seconds, link, tmp_path, capsys
):
    """124.4M parameters: 4 * 124.4e6 * 2 * 15 / 16 / 10e9 = 0.093 s."""
    one = run(tmp_path, "plan", GPT124M, f"--gpu={gpu}")
    assert "link " not in capsys.readouterr().out
    p = run(tmp_path, "plan", GPT124M, f"--gpu={gpu}", *flags)
    n, exchange = p["gpus"], p["exchange_seconds"]
    share = f"{exchange / p['iter_seconds']:.0%}"
    assert exchange == pytest.approx(seconds, abs=6e-4)
    assert p["iter_seconds"] == pytest.approx(one["iter_seconds"] / n + exchange)
    line = f"averaging gradients takes {exchange:.3f} s of an iteration ({share}), at {link}"
    assert f"\nlink     {line}" in capsys.readouterr().out
    # the range: a link twice as fast, and half as fast
    low, high = (hours / n for hours in one["hours_range"])
    assert p["hours_range"] == pytest.approx(
        [low + p["max_iters"] * exchange / 7200, high + p["max_iters"] * exchange / 1800]
    )


@pytest.mark.parametrize(
    ("gpu", "mfu", "basis"),
    [
        ("4070", 0.65, "no measurement in training/gpus.csv"),
        ("5090", 0.80, "others measured 80% in bfloat16 on this GPU"),
        ("A30", 0.35, "no measurement in training/gpus.csv"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 0.50, "a laptop's power limit decides"),
    ],
)
def test_an_estimate_says_what_it_rests_on(gpu, mfu, basis, tmp_path, capsys):
    assert run(tmp_path, "plan", GPT124M, f"--gpu={gpu}")["mfu"] == pytest.approx(mfu)
    assert basis in capsys.readouterr().out


def test_the_disk_of_a_run_by_the_clock_is_for_its_upper_end(tmp_path, monkeypatch, capsys):
    """A token is two bytes; two checkpoints and best.pt, 12 * 124,373,760 bytes each."""
    monkeypatch.chdir(tmp_path)  # where no data set is
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--hours=8", "--keep_checkpoints=2")
    _, most = p["tokens_range"]
    assert most > p["total_tokens"] and p["shards_gb"] == pytest.approx(2 * most / 1e9)
    assert p["disk_gb"] == pytest.approx(p["shards_gb"] + 3 * 12 * 124_373_760 / 1e9)
    out = capsys.readouterr().out
    most = re.search(r"([\d.]+B) by the range of speeds", out)[1]
    assert f"GB of shards ({most} tokens)" in out


def test_all_cards_in_one_table(tmp_path, capsys):
    plans = run(tmp_path, "plan", GPT124M, "--gpu=all")["plans"]
    lines = capsys.readouterr().out.splitlines()
    # the config asks for bfloat16, which a T4 only emulates
    known = [row for row in read_gpu_table() if row_peak(row, "bfloat16", True)]
    assert [p["gpu"] for p in plans] == [short_name(row) for row in known]
    assert len(lines) == len(known) + 2 and "Tesla T4" not in {p["gpu"] for p in plans}
    found = [line.split("  ")[0] for line in lines if "3080 Ti" in line]
    assert sorted(found) == ["GeForce RTX 3080 Ti", "GeForce RTX 3080 Ti Laptop GPU"]


def test_many_epochs_are_warned_of(tmp_path, capsys):
    """20 * 524,288 tokens of 300,000 are 34.95 epochs; 2 iterations are 3.5."""
    run(tmp_path, "plan", GPT124M, "--gpu=4070", "--max_iters=20", "--dataset_tokens=300k")
    err = capsys.readouterr().err
    assert "\nwarning: 35.0 epochs" in err
    assert err.endswith("prepare a larger dataset, or add --dropout=0.1\n")
    run(tmp_path, "plan", GPT124M, "--gpu=4070", "--max_iters=2", "--dataset_tokens=300k")
    assert "warning" not in capsys.readouterr().err


def test_without_a_known_peak_plan_asks_for_a_card(tmp_path, capsys):
    for more in ([], ["--hours=8"]):
        with pytest.raises(UserError, match="gpu: unknown peak of .*, as in --gpu=4070"):
            bench.main(["plan", GPT124M, "--device=cpu", *more])
    p = run(tmp_path, "plan", GPT124M, "--device=cpu", "--iter_seconds=1")
    assert p["hours"] > 0 and p["mfu"] is None
    assert "peak unknown" in capsys.readouterr().out


def test_without_a_gpu_plan_measures_ten_iterations_of_a_small_model(tmp_path, monkeypatch, capsys):
    """With a clock that each iteration moves by two seconds: a first one, then ten, in a child."""
    steps = tmp_path / "steps"
    code = f"""
import time
def step(side):
    open({str(steps)!r}, "a").write("x")
bench.Trainee.step = step
bench.time.perf_counter = lambda: 2.0 * len(open({str(steps)!r}).read())
"""
    flags = [*small(dataset="none", max_iters=1800), "--gpus=2"]
    exit_code, _, p = run_forking(tmp_path, "plan", *flags, code=code)
    assert exit_code == 0 and steps.read_text() == 11 * "x"
    assert (p["pace"], p["mfu"]) == ("measured here, ten iterations", None)
    assert p["iter_seconds"] >= 1.0


@pytest.mark.parametrize("gpu", ["T4", "2080", "V100-SXM2-16GB"])
def test_a_card_without_bfloat16_is_told_float16(gpu, tmp_path):
    with pytest.raises(UserError, match="dtype: a .* only emulates bfloat16; --dtype=float16"):
        bench.main(["plan", GPT124M, f"--gpu={gpu}"])
    assert run(tmp_path, "plan", GPT124M, f"--gpu={gpu}", "--dtype=float16")["hours"] > 0


def test_a_plan_until_a_clock_time_says_that_it_counts_from_now(tmp_path, monkeypatch, capsys):
    evening = datetime(2026, 3, 4, 22, 30).timestamp()
    monkeypatch.setattr(plan.time, "time", lambda: evening)
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--until=07:00")
    assert p["hours_total"] == pytest.approx(8.5, rel=0.01)
    assert capsys.readouterr().out.startswith("until    07:00, 8.5 h from now\n")


@pytest.mark.parametrize(
    "mode, flag",
    [("plan", "--watts"), ("plan", "--hours"), ("plan", "--until"), ("sweep", "--write")],
)
def test_help_of_a_mode_lists_its_flags(mode, flag, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main([mode, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and flag in out and "--n_layer" not in out


def test_plan_from_a_run(dataset, tmp_path):
    """Twice the tokens per iteration take twice the time of the run's median iteration."""
    run_here(dataset, tmp_path / "run", max_iters=5)
    tiny = ["--n_layer=2", "--n_head=2", "--block_size=16", "--batch_size=8", "--max_iters=10"]
    tiny += ["--gradient_accumulation_steps=2", f"--dataset={dataset}"]
    tiny += [f"--from_run={tmp_path}/run"]
    p = run(tmp_path, "plan", *tiny, "--n_embd=32")
    median = sorted(r["step_ms"] for r in records(tmp_path / "run", "step"))[2]
    assert p["iter_seconds"] == pytest.approx(2 * median / 1000)
    assert p["dataset_tokens"] == 1537 and p["epochs"] == pytest.approx(10 * 256 / 1537)
    two = run(tmp_path, "plan", *tiny, "--n_embd=32", "--gpus=2")
    alone = two["iter_seconds"] - two["exchange_seconds"]
    assert alone == pytest.approx(median / 1000)  # the run had one
    with pytest.raises(UserError, match="give the run's own config file"):
        run(tmp_path, "plan", *tiny, "--n_embd=64")
    # logs until November 2026 have FLOPs by a formula, which counts norms too
    log = tmp_path / "run/metrics.jsonl"
    flops = records(tmp_path / "run", "start")[0]["flops_per_token"]
    log.write_text(log.read_text().replace(str(flops), str(round(1.005 * flops))))
    assert run(tmp_path, "plan", *tiny, "--n_embd=32")["iter_seconds"] == p["iter_seconds"]


def test_plan_from_a_run_on_several_gpus_counts_their_exchange_once(dataset, tmp_path, capsys):
    """
    An exchange of two GPUs sends all gradients once, so at 4 P / s bytes per second it takes s; one
    of four sends them 1.5 times.
    """
    run_here(dataset, tmp_path / "run", max_iters=5)
    log, speeds = tmp_path / "run/metrics.jsonl", records(tmp_path / "run", "step")
    log.write_text(log.read_text().replace('"world_size": 1', '"world_size": 2'))
    params = records(tmp_path / "run", "start")[0]["parameters"]
    seconds = 128 / sorted(r["tokens_per_sec"] for r in speeds)[2]
    tiny = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2"]
    tiny += [f"--dataset={dataset}", f"--from_run={tmp_path}/run", "--max_iters=10000"]
    tiny += ["--gradient_accumulation_steps=4"]
    exchange = seconds / 4
    link = f"--link_gbits={10 * 4 * params / exchange / 1e9:.9f}"  # ten bits per byte
    p = run(tmp_path, "plan", *tiny, link, "--gpus=2")
    assert p["iter_seconds"] == pytest.approx(seconds)
    assert p["exchange_seconds"] == pytest.approx(exchange, rel=1e-3)
    assert p["hours_range"] == pytest.approx(2 * [p["hours"]])
    assert " to " not in re.search("^time .*", capsys.readouterr().out, re.MULTILINE)[0]
    p = run(tmp_path, "plan", *tiny, link, "--gpus=1")
    assert p["iter_seconds"] == pytest.approx(2 * 0.75 * seconds, rel=1e-3)
    p = run(tmp_path, "plan", *tiny, link, "--gpus=4")
    assert p["iter_seconds"] == pytest.approx((0.75 / 2 + 1.5 / 4) * seconds, rel=1e-3)
    with pytest.raises(UserError, match="s for its gradients at .* GB/s; try --link_gbits="):
        run(tmp_path, "plan", *tiny, "--link_gbits=1e-9", "--gpus=2")


def test_a_plan_evaluates_no_more_tokens_than_the_dataset_has(dataset, tmp_path):
    """Of two splits, forward alone: a third of training's work."""
    tiny = [*small(dataset=str(dataset)), "--iter_seconds=1", "--gradient_accumulation_steps=2"]
    val = len(open_dataset(str(dataset)).val)
    for asked, read in ((val // 2, val // 2), (10 * val, val)):
        p = run(tmp_path, "plan", *tiny, f"--eval_tokens={asked}")
        assert p["eval_seconds"] == pytest.approx(2 * read / p["tokens_per_sec"] / 3)


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("plam", "plam: no such mode; one of .*; did you mean plan\\?"),
        ("plan --gpu=4071", "gpu: '4071' is not in gpus.csv; python bench.py plan --gpu=all lists"),
        ("plan --watts=200W", "watts: invalid float value: '200W'"),
        ("plan --dataset_tokens=inf", "dataset_tokens: needs a whole number above 0, such as 8"),
        ("plan --gpus=1.5", "gpus: needs a whole number"),
        ("plan --max_iters=-1", "--max_iters: must be 0 or more, got -1"),
        ("plan --tokens_per_iter=500000", "tokens_per_iter: 500,000 is not a multiple"),
        ("plan --gpu=all --iter_seconds=1", "gpu: .* are not for all; name one GPU"),
        ("plan --gpu=4070 --hours=0.003", "hours: 0.003 hold no iteration of .* s"),
        ("plan --gpu=all --watts=200", "gpu: .* are not for all; name one GPU"),
        ("plan --from_run=nowhere", "from_run: nowhere/metrics.jsonl holds no iteration"),
        ("plan --gpu_count=2", "--gpu_count: unknown key"),
        ("plan --gpu", "--gpu: expected one argument"),
        ("plan config/none.py", "config/none.py: no such config file"),
        ("step --batch_size=0", "--batch_size: must be 1 or more, got 0"),
        ("step --trials=0", "trials: needs a whole number above 0"),
        ("step --device=cuda:99", "device: "),
        ("sweep --write=train.py", "write: train.py exists; remove it or choose another name"),
        ("peer", "nanogpt: None; --nanogpt= needs a clone of karpathy/nanoGPT"),
        ("peer --nanogpt=config", "nanogpt: config; --nanogpt= needs a clone of karpathy/nanoGPT"),
        ("peer --nanogpt=. --tie_weights=False", "the work is not the same"),
        ("peer --gpu=4070", "--gpu: unknown key"),
    ],
)
def test_bad_input_is_one_line(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message) as error:
        bench.main(arguments.split())
    assert len(error.value.problems) == 1 and error.value.exit_code == 2


def test_bad_input_exits_with_2_and_no_traceback():
    code, out, err = run_process("bench.py", "plan", "--gpu=4071", "--gpus=x")
    assert (
        code == 2
        and out == ""
        and err == "error: --gpus: needs a whole number above 0, such as 8 or 10M, got 'x'\n"
    )


# -----------------------------------------------------------------------------
# step, sweep, ladder

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4)
SMALL |= dict(gradient_accumulation_steps=2, device="cpu", dtype="float32", compile=False)


def small(**changes) -> list[str]:
    return [f"--{key}={value}" for key, value in (SMALL | changes).items()]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(bench, "WINDOW_SECONDS", 0.1)
    # new processes: on a busy machine, models this small only wait for a second thread
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# bench.py spawns its processes, which import for seconds; here they fork, and measure briefly
FORKING = """
import multiprocessing, resource
from concurrent.futures import ProcessPoolExecutor
import bench
from common import console
bench.WINDOW_SECONDS = 0.1
bench.new_process = lambda: ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
"""


def run_forking(tmp_path, mode, *arguments, code="") -> tuple[int, list[str], dict | None]:
    """A mode after that code, in a process: (exit code, its last lines, what --json holds)."""
    pytest.importorskip("resource", reason="needs fork, and limits of memory")
    script, result = f"{FORKING}{code}\nconsole.run_main(bench.main)", tmp_path / "result.json"
    exit_code, out, err = run_process("-c", script, mode, *arguments, f"--json={result}")
    lines = out.splitlines()[-2:] if exit_code == 0 else err.splitlines()
    return exit_code, lines, json.loads(result.read_text()) if result.exists() else None


def test_step_measures_and_explains_itself(tmp_path, monkeypatch, capsys):
    """Without a dataset: random tokens. 4 * 32 * 2 = 256 tokens an iteration."""
    calls, train_step = [], train.train_step
    assert bench.train_step is train_step  # the very step of train.py
    monkeypatch.setattr(bench, "train_step", lambda *args: calls.append(1) or train_step(*args))
    flags = ["--trials=3", "--peak_tflops=0.5", f"--profile={tmp_path}/trace.json"]
    r = run(tmp_path, "step", *small(dataset="none"), *flags)
    assert {"step_ms", "tokens_per_sec", "mfu", "mem_gib", "compile_seconds", "machine"} <= r.keys()
    assert r["tokens_per_iter"] == 256 and r["compile_seconds"] == 0
    assert r["tokens_per_sec"] == pytest.approx(256 / r["step_ms"] * 1000)
    # 50304 * 32 + 2 * 12 * 32^2 = 1,634,304 weights in products, and 12 L C T = 24,576
    assert r["mfu"] == pytest.approx((6 * 1_634_304 + 24_576) * r["tokens_per_sec"] / 0.5e12)
    slowest, fastest = r["tokens_per_sec_range"]
    assert slowest <= r["tokens_per_sec"] <= fastest
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    console = capsys.readouterr()
    assert console.err == "vocabulary 50,257, GPT-2's, as dataset none is missing\n"
    first, *lines = console.out.splitlines()
    assert first == "warming up"  # before the first measurement, which takes long
    assert any("aten::mm" in line for line in lines)  # what most of the time goes to
    assert calls


def paired_step_ms(tmp_path, monkeypatch, iters: int, **shape) -> list[tuple[float, float]]:
    """
    (bench.py's, train.py's) milliseconds for the same iteration, measured in turn: bench.py's in
    the run's evaluations, one before each iteration.
    """
    data = write_dataset(tmp_path / "data", [50_000], vocab=512, val_tokens=200)
    argv = small(dataset=data, out_dir=tmp_path / "run", eval_interval=1, max_iters=iters, **shape)
    argv += ["--eval_tokens=64", "--log_interval=1", "--always_save_checkpoint=False"]
    config = load_config(argv)
    trainee = bench.Trainee(config)
    trainee.step()
    benched = []

    def evaluate(*_):
        benched.append(1000 * trainee.timed(1))
        return 64.0, 64  # a loss of 1, never better: no checkpoint

    monkeypatch.setattr(train, "evaluate", evaluate)
    train.main(argv)
    logged = {r["iter"]: r["step_ms"] for r in records(tmp_path / "run", "step")}
    # two splits are evaluated before each iteration; the second stands right before it
    return [(benched[2 * i + 1], logged[i]) for i in sorted(logged) if i > 0]


def test_step_agrees_with_the_log_of_train(tmp_path, monkeypatch):
    """A loose bound here, as other tests may keep the machine busy; 3 % in the slow test."""
    pairs = paired_step_ms(tmp_path, monkeypatch, 8, n_embd=128)
    assert 0.5 < statistics.median(bench / log for bench, log in pairs) < 2


@pytest.mark.slow
def test_step_agrees_with_train_in_turn(tmp_path, monkeypatch):
    """Within 3 %, as far as a machine that does other things too can tell."""
    pairs = paired_step_ms(tmp_path, monkeypatch, 60, n_embd=128, block_size=64)
    ratios = sorted(bench / log for bench, log in pairs)
    assert len(ratios) == 59
    # the true median lies between these two with a probability of 99 %
    low, high = ratios[19], ratios[39]
    print(f"bench / train.py: median {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")
    assert low <= 1.03 and high >= 0.97


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_step_without_memory_names_the_next_smaller_micro_batch(monkeypatch):
    """3, as it divides the 12 sequences of an iteration."""
    monkeypatch.setattr(bench, "train_step", out_of_memory)
    sizes = dict(batch_size=4, gradient_accumulation_steps=3)
    advice = "the next smaller: --batch_size=3 --gradient_accumulation_steps=4 --eval_tokens=25600"
    with pytest.raises(UserError) as error:
        bench.main(["step", *small(dataset="none", **sizes)])
    assert error.value.problems == [f"out of memory with batch_size=4; {advice}"]
    sizes = dict(batch_size=1, gradient_accumulation_steps=3)
    with pytest.raises(UserError, match="out of memory with batch_size=1; --recompute=True, a sm"):
        bench.main(["step", *small(dataset="none", **sizes)])


def test_a_compiler_that_fails_is_one_line(monkeypatch):
    def fail(*_):
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler\nand a long trace")

    monkeypatch.setattr(bench, "train_step", fail)
    said = r"^torch.compile does not work here \(no C\+\+ compiler\); --compile=False$"
    with pytest.raises(UserError, match=said) as error:
        bench.main(["step", *small(dataset="none")])
    assert error.value.exit_code == 1


def test_step_rejects_a_dataset_that_is_too_small(dataset):
    with pytest.raises(UserError, match="block_size: the val split of .* has only 700 tokens"):
        bench.main(["step", *small(dataset=dataset, block_size=1024)])


def test_sweep_measures_for_real(tmp_path):
    """One point, in a process that starts from nothing, as users have it."""
    r = run(tmp_path, "sweep", *small(batch_size=1, gradient_accumulation_steps=1), "--trials=1")
    (row,) = r["rows"]
    assert (row["batch_size"], row["gradient_accumulation_steps"]) == (1, 1)
    assert row["tokens_per_iter"] == 32 and row["tokens_per_sec"] > 0
    assert len(set(row["tokens_per_sec_range"])) == 1  # one trial
    assert r["fastest"] == 1


IDLE = f"""
import os
import sys
import time
sys.path.insert(0, {str(ROOT)!r})
import bench
if __name__ == "__main__":
    pool = bench.new_process()
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_measurements_process_ends_with_bench(tmp_path):
    (tmp_path / "idle.py").write_text(IDLE)
    ways = ("terminate", "kill")
    # both at a time, as most of theirs is spent on imports
    started = [(way, start_process(str(tmp_path / "idle.py"))) for way in ways]
    for way, process in started:
        child = psutil.Process(int(process.stdout.readline()))
        getattr(process, way)()
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs([child], timeout=60)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], way


def test_sweep_writes_the_fastest_as_a_config_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        bench, "measure_apart", fake_measurement(lambda config: 1000 / config.batch_size)
    )
    mine = tmp_path / "config/mine.py"
    arguments = [*small(out_dir="out/measured"), f"--write={mine}"]
    r = run(tmp_path, "sweep", *arguments, f"--png={tmp_path}/sweep.png")
    pairs = [(p["batch_size"], p["gradient_accumulation_steps"]) for p in r["rows"]]
    assert pairs == [(1, 8), (2, 4), (4, 2), (8, 1)] and r["fastest"] == 1
    written = load_config([str(mine)])
    assert (written.batch_size, written.gradient_accumulation_steps) == (1, 8)
    assert (written.n_embd, written.compile) == (32, False)
    # train.py with it must not meet the run of the config that was measured
    assert written.out_dir == "out/mine"
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert "<- fastest" in capsys.readouterr().out


def test_a_picture_shows_the_range_of_each_row(monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    fits = dict(name="1 x 2", tokens_per_sec=100, tokens_per_sec_range=[80, 130])
    bench.draw("x.png", "title", [fits, dict(name="2 x 1", tokens_per_sec=None)])
    (bars,) = [c for c in figures[0].axes[0].containers if getattr(c, "errorbar", None)]
    _, _, (spans,) = bars.errorbar.lines
    assert [span[:, 0].tolist() for span in spans.get_segments()] == [[80, 130], [0, 0]]


def test_sweep_sizes_divide_the_sequences_of_an_iteration():
    config = Config(batch_size=12, gradient_accumulation_steps=40)
    assert bench.sweep_sizes(config) == [3, 6, 12, 24, 48]
    config = Config(batch_size=2, gradient_accumulation_steps=3)
    assert bench.sweep_sizes(config) == [1, 2]


def test_every_point_out_of_memory_is_one_line(tmp_path):
    """
    509 * 256 tokens * 50,304 logits of 4 bytes are 26.2 GB, and a process gets 24 GiB. A prime
    number of sequences leaves one point.
    """
    huge = dict(block_size=256, n_embd=16, n_layer=1, batch_size=509, loss_chunk="off")
    huge = small(gradient_accumulation_steps=1, **huge)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, 24 * 2**30))"
    code, err, _ = run_forking(tmp_path, "sweep", *huge, code=limit)
    said = "batch_size: 509 all ran out of memory; try a smaller"
    assert code == 2 and [said in line for line in err if line.startswith("error: ")] == [True]


KILLED = """
import os
def killed(*_):
    os.kill(os.getpid(), 9)
bench.build_and_measure = killed
"""


def test_a_measurement_that_the_system_kills_was_out_of_memory(tmp_path):
    """Linux ends a process that takes too much, and the pool says only that it is broken."""
    one = small(batch_size=1, gradient_accumulation_steps=1)
    code, err, _ = run_forking(tmp_path, "sweep", *one, code=KILLED)
    assert code == 2
    assert "batch_size: 1 all ran out of memory" in err[-1]


def test_out_of_memory_in_the_middle_of_a_sweep_is_marked(tmp_path, monkeypatch, capsys):
    fake = fake_measurement(lambda config: 1000 * config.batch_size, most=4)
    monkeypatch.setattr(bench, "measure_apart", fake)
    r = run(tmp_path, "sweep", *small())
    assert [p["tokens_per_sec"] for p in r["rows"]] == [1000, 2000, 4000, None]
    assert r["fastest"] == 4
    assert "8 x 1  out of memory" in capsys.readouterr().out


def fake_measurement(rate, most=math.inf):
    """
    Stands for a measurement: `rate` tokens/s for a config, out of memory above `most` sequences.
    """

    def attempt(config, trials, **_):
        fits = config.batch_size <= most
        return dict(
            batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            tokens_per_sec=rate(config) if fits else None,
            tokens_per_sec_range=[0.9 * rate(config), 1.2 * rate(config)] if fits else [0, 0],
            step_ms=1.0,
            mfu=None,
            mem_gib=1.0,
            machine=dict(device="test", dtype="float32", torch="0", date="today"),
        )

    return attempt


def test_ladder_changes_one_thing_a_row_and_multiplies_the_gains(tmp_path, monkeypatch, capsys):
    """
    100 -> 100 (no sync) -> AMP 200 -> compile 300 -> flash 600 -> padded 630 -> tied 600 -> loader
    600, so 6.0x in all.
    """
    seen = []

    def rate(config):
        padded = config.pad_vocab_multiple > 1
        seen.append([config.dtype, config.compile, config.flash, padded, config.tie_weights])
        rate = 200 if config.dtype == "bfloat16" else 100
        if config.compile:
            rate *= 1.5
        if config.flash:
            rate *= 2
        return rate * 1.05 if padded and not config.tie_weights else rate

    monkeypatch.setattr(bench, "measure_apart", fake_measurement(rate))
    monkeypatch.setattr(hardware, "best_dtype", lambda device: torch.bfloat16)
    r = run(tmp_path, "ladder", *small(dtype="bfloat16"), f"--png={tmp_path}/ladder.png")
    rows = {row["name"]: row for row in r["rows"]}
    assert "TF32" not in rows  # needs a GPU
    rates = [row["tokens_per_sec"] for row in rows.values()]
    assert rates == [100, 100, 200, 300, 600, 630, 600, 600]
    assert rows["AMP"]["gain"] == 2 and rows["flash attention"]["total_gain"] == 6
    assert rows["padded vocabulary"]["gain"] == pytest.approx(1.05)
    assert all(sum(a != b for a, b in zip(*pair, strict=True)) <= 1 for pair in pairwise(seen))
    out = capsys.readouterr().out
    assert re.search(r"^loader thread +4 +600 +1.00x +6.00x +1.0 +n/a$", out, re.MULTILINE)
    assert (tmp_path / "ladder.png").stat().st_size > 5000


def test_a_ladder_row_out_of_memory_is_marked_and_gains_skip_it(tmp_path, monkeypatch, capsys):
    """float32 does not fit; the rows from AMP on run at 200 and 300, so the total gain is 1.5x."""

    def attempt(config, trials, **how):
        rate = 300 if config.compile else 200
        most = 0 if config.dtype == "float32" else math.inf
        return fake_measurement(lambda config: rate, most)(config, trials, **how)

    monkeypatch.setattr(bench, "measure_apart", attempt)
    monkeypatch.setattr(hardware, "best_dtype", lambda device: torch.bfloat16)
    rows = run(tmp_path, "ladder", *small(dtype="bfloat16"))["rows"]
    assert "gain" not in rows[0] and rows[-1]["total_gain"] == 1.5
    assert "float32                4 out of memory" in capsys.readouterr().out


def test_ladder_measures_for_real(tmp_path):
    first = "rows = bench.ladder_rows; bench.ladder_rows = lambda *arguments: rows(*arguments)[:1]"
    arguments = [*small(dtype="bfloat16"), "--trials=1"]
    code, lines, r = run_forking(tmp_path, "ladder", *arguments, code=first)
    assert code == 0, lines
    (row,) = r["rows"]
    assert row["name"] == "float32" and row["machine"]["dtype"] == "float32"
    assert row["tokens_per_sec"] > 0 and row["total_gain"] == 1


def test_host_sync_and_late_reading_change_no_number(dataset):
    """What the ladder's lower rows leave out costs time, not results."""
    config = load_config(small(dataset=dataset, block_size=16))
    plain = bench.Trainee(config)
    late = bench.Trainee(config, read_ahead=False, host_sync=True)
    assert all(torch.equal(plain.step(), late.step()) for _ in range(3))


# -----------------------------------------------------------------------------
# peer

NANOGPT = """
import torch
from dataclasses import dataclass
from model import GPT as Ours, GPTConfig as OurConfig
@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int
    dropout: float; bias: bool
class GPT(Ours):
    def __init__(self, c):
        super().__init__(OurConfig(**vars(c)))
        print(1)
        self.ours, self.config = self.config, c  # nanoGPT's cannot be hashed
    def forward(self, x, y):
        self.config, theirs = self.ours, self.config
        loss = super().forward(x, y)
        self.config = theirs
        return None, SCALE * loss
    def configure_optimizers(self, decay, lr, betas, device_type):
        groups = [
            dict(params=[p for p in self.parameters() if p.dim() >= 2], weight_decay=decay),
            dict(params=[p for p in self.parameters() if p.dim() < 2], weight_decay=0.0),
        ]
        return torch.optim.AdamW(groups, lr=lr)
"""


def test_peer_compares_equal_work(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT.replace("SCALE", "1"))
    arguments = [*small(), f"--nanogpt={tmp_path}", "--trials=1"]
    code, lines, r = run_forking(tmp_path, "peer", *arguments)
    assert code == 0, lines
    # our loss is made in chunks
    assert r["first_loss"]["ours"] == pytest.approx(r["first_loss"]["nanoGPT"], rel=1e-6)
    assert r["first_loss"]["ours"] == pytest.approx(math.log(50304), abs=0.2)
    assert 0.5 < r["memory_ratio"] < 2  # the same work in two processes
    assert r["speed_ratio_range"][0] <= r["speed_ratio"] <= r["speed_ratio_range"][1]
    assert "median of 1 pairs" in lines[0] + lines[1]


@pytest.mark.slow
def test_peer_refuses_another_loss(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT.replace("SCALE", "1.1"))
    code, lines, _ = run_forking(tmp_path, "peer", *small(), f"--nanogpt={tmp_path}")
    assert code == 2
    assert ["other work: first loss 10.8" in x for x in lines if x.startswith("error: ")] == [True]


@pytest.mark.slow
def test_peer_says_which_side_is_out_of_memory(tmp_path):
    fails = NANOGPT.replace("print(1)", "raise torch.OutOfMemoryError('CUDA out of memory')")
    (tmp_path / "model.py").write_text(fails)
    advice = "the next smaller: --batch_size=2 --gradient_accumulation_steps=4 --eval_tokens=25600"
    code, lines, _ = run_forking(tmp_path, "peer", *small(), f"--nanogpt={tmp_path}")
    assert code == 1
    assert lines[-1] == f"error: nanoGPT: out of memory with batch_size=4; {advice}"


def test_the_rent_has_the_range_of_the_hours(tmp_path, capsys):
    """16 GPUs of 2 an hour; 1,000 iterations of 36 s on one are 10 hours."""
    flags = ("--gpu=a100", "--max_iters=1000", "--price_hour=2")
    p = run(tmp_path, "plan", GPT124M, *flags, "--iter_seconds=36")
    assert p["rent"] == pytest.approx(2 * p["hours_total"]) and p["hours"] == pytest.approx(10)
    assert f"\nrent     {p['rent']:.2f} for {p['hours_total']:.1f} GPU hours\n" in (
        capsys.readouterr().out
    )
    p = run(tmp_path, "plan", GPT124M, *flags, "--gpus=8")
    assert p["rent"] == pytest.approx(16 * p["hours_total"])
    extra = p["hours_total"] - p["hours"]
    low, high = (16 * (hours + extra) for hours in p["hours_range"])
    assert f"\nrent     {p['rent']:.2f} ({low:.2f} to {high:.2f}) for " in capsys.readouterr().out
