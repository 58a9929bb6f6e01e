"""bench.py: the bill against hand-computed numbers, the measurements against train.py's own log, one line for bad input."""

import json

import pytest
from conftest import ROOT, records, run_here

import bench
from configurator import Config, UserError
from gpus import read_gpu_table
from plan import count_pauses

GPT40M, GPT124M = f"{ROOT}/config/gpt40m_4070.py", f"{ROOT}/config/gpt124m_4070.py"


def run(tmp_path, mode, *arguments) -> dict:
    """A mode in this process; what it wrote with --json."""
    assert bench.main([mode, *map(str, arguments), f"--json={tmp_path}/new/result.json"]) == 0
    return json.loads((tmp_path / "new/result.json").read_text())


# -----------------------------------------------------------------------------
# plan


def test_plan_of_the_users_40m_run(tmp_path, capsys):
    """16 * 1024 * 32 = 524,288; times 20,000 = 10,485,760,000; / 3.68e9 = 2.849; 20,000 * 3.9 s = 21.67 h;
    N = 50304 * 384 + 12 * (12 * 384^2 + 2 * 384) + 384 = 40,560,000; 6 N + 12 * 12 * 384 * 1024 = 299,983,104 per token;
    524,288 / 3.9 * 299,983,104 / 58.3e12 = 69.2 %; 21.67 h * 200 W = 4.33 kWh."""
    p = run(tmp_path, "plan", GPT40M, "--gpu=4070", "--iter_seconds=3.9", "--dataset_tokens=3.68e9", "--watts=200",
            "--price_kwh=0.30")  # fmt: skip
    assert (p["tokens_per_iter"], p["total_tokens"]) == (524_288, 10_485_760_000)
    assert p["epochs"] == pytest.approx(2.849, abs=1e-3) and p["dataset_tokens"] == 3.68e9
    assert (p["params_in_products"], p["params"]) == (40_560_000, 40_560_000 + 1024 * 384)
    assert p["flops_per_token"] == 299_983_104
    assert p["flops_6nd"] == pytest.approx(2.55e18, rel=2e-3) and p["total_flops"] == pytest.approx(3.15e18, rel=2e-3)
    assert p["hours"] == pytest.approx(21.667, abs=1e-3)
    assert p["tokens_per_sec"] == pytest.approx(134_433, abs=1)
    assert p["mfu"] == pytest.approx(0.692, abs=5e-4)
    assert p["kwh"] == pytest.approx(4.333, abs=1e-3)
    # 12 (36.08 C + ...) see test_gpus: 0.73 + 16384 * (12 * (36 * 384 + 40) + 6 * 384 + 4 * 50304) + 0.6 = 7.40 GB
    assert p["vram_gib"] == pytest.approx(7.40e9 / 2**30, abs=0.02) and p["fits"]
    out = capsys.readouterr().out
    assert "2.85 epochs of 3.68B" in out and "mfu 69.2%" in out and "21.7 h" in out and "134,433 tok/s" in out


@pytest.mark.parametrize("iter_seconds, hours", [(2.5, 13.9), (3, 16.7), (3.5, 19.4), (4, 22.2)])
def test_hours_of_the_planner_note(iter_seconds, hours, tmp_path):
    p = run(tmp_path, "plan", GPT40M, f"--iter_seconds={iter_seconds}")
    assert round(p["hours"], 1) == hours and p["hours_range"] == [p["hours"]] * 2
    assert p["epochs"] is None and p["kwh"] is None and p["cost"] is None  # no data set, no watts


def test_plan_of_the_users_124m_run(tmp_path):
    """20,000 * 9.34 s = 51.9 h; 854.8 MFLOP/token * 10.49e9 = 8.96e18; 56,134 tok/s are 82.3 % of 58.3 TFLOP/s."""
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--iter_seconds=9.34", "--max_iters=20000")
    assert round(p["hours"], 1) == 51.9
    assert p["total_flops"] == pytest.approx(8.96e18, rel=1e-3)
    assert p["tokens_per_sec"] == pytest.approx(56_134, abs=1)
    assert p["mfu"] == pytest.approx(0.823, abs=5e-4)


def test_evaluations_and_checkpoints_are_on_the_bill(tmp_path):
    """1000 iterations of 1 s; evaluations at 0, 300, 600, 900 and 1000, each of 2 * 524,288 tokens forward alone, so
    2/3 s; checkpoints at 300, 600, 900, 1000 and at 200, 400, 800, each of 12 * 124.4 MB at 0.5 GB/s."""
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--iter_seconds=1", "--max_iters=1000", "--eval_interval=300",
            "--checkpoint_interval=200", "--eval_tokens=524288", "--watts=100", "--price_kwh=0.5")  # fmt: skip
    assert (p["evaluations"], p["checkpoints"]) == (5, 7)
    seconds = 1000 + 5 * 2 / 3 + 7 * 12 * 124_373_760 / 0.5e9
    assert p["hours"] == pytest.approx(1000 / 3600)
    assert p["hours_total"] == pytest.approx(seconds / 3600)
    assert p["cost"] == pytest.approx(seconds / 3600 * 0.1 * 0.5)


@pytest.mark.parametrize("n, evals, saves", [(7, 3, 2), (8, 4, 0), (1, 5, 3), (12, 4, 6), (10, 3, 5)])
def test_pauses_are_those_that_train_makes(n, evals, saves, dataset, tmp_path):
    run_here(dataset, tmp_path, max_iters=n, eval_interval=evals, checkpoint_interval=saves, keep_checkpoints=20)
    counted = count_pauses(Config(max_iters=n, eval_interval=evals, checkpoint_interval=saves))
    assert counted == (len(records(tmp_path, "eval")), len(records(tmp_path, "checkpoint")))


def test_plan_says_what_fits(tmp_path, capsys):
    p = run(tmp_path, "plan", GPT124M, "--gpu=4070", "--batch_size=32", "--gradient_accumulation_steps=16")
    assert p["fits"] is False and p["batch_size_that_fits"] == 16
    assert "DOES NOT FIT into 11.4 GiB; the largest that does: --batch_size=16 --gradient_accumulation_steps=32" in (
        capsys.readouterr().out
    )
    run(tmp_path, "plan", GPT124M, "--gpu=4070", "--n_embd=7680", "--n_layer=24")
    assert "nor does batch_size 1" in capsys.readouterr().out


def test_estimate_names_its_mfu_and_gives_a_range(tmp_path, capsys):
    p = run(tmp_path, "plan", GPT124M, "--gpu=a100", "--gpus=8")
    assert p["mfu"] == pytest.approx(0.40) and "estimated at 40% MFU, range 30% to 60%" in capsys.readouterr().out
    low, high = p["hours_range"]
    assert low / p["hours"] == pytest.approx(40 / 60) and high / p["hours"] == pytest.approx(40 / 30)
    one = run(tmp_path, "plan", GPT124M, "--gpu=a100")
    assert one["hours"] == pytest.approx(8 * p["hours"])


def test_all_cards_in_one_table(tmp_path, capsys):
    plans = run(tmp_path, "plan", GPT124M, "--gpu=all")["plans"]
    lines = capsys.readouterr().out.splitlines()
    assert len(plans) == len(read_gpu_table()) == len(lines) - 2
    t4 = next(p for p in plans if p["gpu"] == "Tesla T4")
    assert t4["hours"] is None  # the config asks for bfloat16, which a T4 only emulates
    assert [line.split("  ")[0] for line in lines if "3080 Ti" in line] == ["GeForce RTX 3080 Ti"]


def test_plan_from_a_run(dataset, tmp_path):
    """Twice the tokens per iteration take twice the time of the run's median iteration."""
    run_here(dataset, tmp_path / "run", max_iters=5)
    tiny = ["--n_layer=2", "--n_head=2", "--block_size=16", "--batch_size=8", "--gradient_accumulation_steps=2",
            f"--dataset={dataset}", "--max_iters=10"]  # fmt: skip
    p = run(tmp_path, "plan", *tiny, "--n_embd=32", f"--from_run={tmp_path}/run")
    median = sorted(r["step_ms"] for r in records(tmp_path / "run", "step"))[2]
    assert p["iter_seconds"] == pytest.approx(2 * median / 1000)
    assert p["dataset_tokens"] == 1537 and p["epochs"] == pytest.approx(10 * 256 / 1537)
    with pytest.raises(UserError, match="give the run's own config file"):
        run(tmp_path, "plan", *tiny, f"--from_run={tmp_path}/run", "--n_embd=64")


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("plam", "plam: no such mode; one of .*; did you mean plan\\?"),
        ("plan --gpu=4071", "gpu: '4071' is not in gpus.csv; did you mean 4070\\?"),
        ("plan --iter_seconds=0", "iter_seconds: needs a number above 0, got '0'"),
        ("plan --watts=-5", "watts: needs a number above 0, got '-5'"),
        ("plan --price_kwh=cheap", "price_kwh: needs a number above 0, got 'cheap'"),
        ("plan --dataset_tokens=inf", "dataset_tokens: needs a number above 0, got 'inf'"),
        ("plan --gpus=1.5", "gpus: needs a whole number"),
        ("plan --gpus=3", "gpus: 3 do not divide gradient_accumulation_steps 40"),
        ("plan --max_iters=0", "max_iters: 0 iterations are no run to plan"),
        ("plan --max_iters=-1", "--max_iters: -1 is outside 0 and up"),
        ("plan --tokens_per_iter=500000", "tokens_per_iter: 500,000 is no multiple"),
        ("plan --gpu=all --iter_seconds=1", "gpu: one iteration time cannot serve all"),
        ("plan --from_run=nowhere", "from_run: nowhere/metrics.jsonl holds no iteration"),
        ("plan --gpu_count=2", "--gpu_count: unknown key"),
        ("plan --gpu", "--gpu: expected one argument"),
        ("plan config/none.py", "config/none.py: no such config file"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        bench.main(arguments.split())
    assert len(error.value.problems) == 1 and "\n" not in str(error.value) and error.value.exit_code == 2
