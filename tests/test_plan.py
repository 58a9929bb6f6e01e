"""
Compare the figures of bench.py plan with numbers computed by hand, and with what a run does.

All figures are from --json. N = 124,373,760 is the number of parameters of GPT-2 124M with 50,304
rows: 50304 * 768 + 1024 * 768 + 12 * (12 * 768^2 + 2 * 768) + 768.
"""

import pytest
from doc_pages import plan
from program import ROOT, InProcessRun, Run, flags, run, train

N = 124_373_760
GIB = 2**30
LINK = 2 * 4 * N  # bytes of all gradients, sent and received
SAVE = 12 * N / 0.5e9  # seconds of a checkpoint of GPT-2 124M

FIGURES = {
    "the users' 40M run": (
        # N = 50304 * 384 + 12 * (12 * 384^2 + 2 * 384) + 384 = 40,560,000, and 1024 * 384
        # positions; 6 N + 12 * 12 * 384 * 1024 = 299,983,104 FLOPs, less the norms' 6 * 25 * 384
        ("gpt40m_4070", "--gpu=4070", "--iter_seconds=3.9", "--dataset_tokens=3.68B")
        + ("--watts=200", "--price_kwh=0.2", "--checkpoint_interval=250"),
        dict(
            tokens_per_iter=16 * 1024 * 32,
            total_tokens=10_485_760_000,
            epochs=2.849,
            params=40_560_000 + 1024 * 384,
            flops_per_token=299_925_504,
            total_flops=3.145e18,
            tokens_per_sec=134_433,
            mfu=0.6916,
            hours=21.667,
            hours_range=[21.667, 21.667],
            cost=4.3555 * 0.2,
            # 1.01 * (18 N - 2 * 1024 * 384 + 16384 * (12 * (32 * 384 + 40) + 4 * 384)
            # + 2 * 50304 * (2 * 4096 + 4 * 384)) + 0.55e9
            vram_gib=4.756e9 / GIB,
        ),
    ),
    "a narrow model reaches less of the peak": (
        # 14.984 h at the peak; half the width reaches 2^-0.25 of the likely MFU, and 2^-0.4 of the
        # lowest
        ("gpt40m_4070", "--gpu=4070"),
        dict(
            mfu=0.822 * 0.8409,
            hours=14.984 / 0.822 / 0.8409,
            hours_range=[14.984 / 0.847, 14.984 / 0.822 / 0.7579],
            epochs=None,
        ),
    ),
    "evaluations and checkpoints are on the bill": (
        # Evaluations at 0, 300, 600, 900, 1000, forward alone, of 2/3 s; checkpoints at the last
        # four, and at 200, 400, 800. On the disk two of them, the best, and tokens of two bytes
        ("gpt124m_4070", "--gpu=4070", "--iter_seconds=1", "--max_iters=1000", "--watts=100")
        + ("--eval_interval=300", "--eval_tokens=524288", "--checkpoint_interval=200")
        + ("--price_kwh=0.5", "--dataset_tokens=10B"),
        dict(
            hours=1000 / 3600,
            evaluations=5,
            checkpoints=7,
            hours_total=(1000 + 5 * 2 / 3 + 7 * SAVE) / 3600,
            kwh_total=0.1 * 1024.2 / 3600,
            cost=0.05 * 1024.2 / 3600,
            checkpoint_gb=12 * N / 1e9,
            disk_gb=20 + 3 * 1.4925,
        ),
    ),
    "max_iters ends before the hours": (
        ("fast", "--gpu=4070", "--hours=8", "--max_iters=1000"),
        # 854.7 MFLOP * 524,288 / 58.3 TFLOP/s = 7.686 s at the peak, 4.5% more for this recipe
        dict(total_tokens=1000 * 524_288, hours=1.045 * 7.686 / 0.822 / 3.6),
    ),
    "the hours end before max_iters": (
        # Evaluations at 0, 250 ... 2750 of (10,485,760 + 2^20) / 3 / 52,428.8 = 73.33 s; saves
        # at the last 11, and at 60, 120 ... 2760, but 1500 is in both, of 2.258 / 0.5 s. After
        # these 1,133 s, 2,766.7 iterations fit into the 28,800. One evaluation and one save follow
        ("fast", "--gpu=4070", "--hours=8", "--iter_seconds=10", "--max_iters=3000"),
        dict(
            max_iters=2767,
            evaluations=13,
            checkpoints=57,
            hours=2767 / 360,
            hours_range=[2767 / 360, 2767 / 360],
            hours_total=(27_670 + 13 * 73.33 + 57 * 4.517) / 3600,
        ),
    ),
}


@pytest.mark.parametrize("words, figures", FIGURES.values(), ids=FIGURES)
def test_figures_of_a_plan_equal_those_computed_by_hand(words, figures):
    """Allow a relative difference of 0.05%."""
    p = plan(*words)
    for name, value in figures.items():
        assert p[name] == (value if value is None else pytest.approx(value, rel=5e-4)), name


# -----------------------------------------------------------------------------
# Memory, in bytes; machine/cost.py has the formulas, which test_gpus.py checks for
# GPT-2 with AdamW


@pytest.mark.parametrize("gpu, fits", [("4070", True), ("3070", False)])
def test_says_whether_the_micro_batch_fits(gpu, fits):
    """GPT-2 124M with 16 sequences takes 8.8 GiB; 90% of 12 and 8 GiB are usable."""
    p = plan("gpt124m_4070", f"--gpu={gpu}", "--batch_size=16")
    assert p["fits"] is fits and ("does not fit" in p["out"]) is not fits


def test_fine_tuning_a_run_is_planned_with_the_runs_size(tiny):
    train(**tiny | dict(n_embd=64, max_iters=0))
    sources = (f"--dataset={tiny['dataset']}", f"--init_from={tiny['out_dir']}")
    p = plan("finetune_gpt2", "--gpu=4070", *sources)
    assert p["params"] == Run(tiny["out_dir"]).records("start")[0]["parameters"]


# -----------------------------------------------------------------------------
# The pace, and where it is from


PACES = [
    ("4070", 0.822, "published, compiled: 82% "),
    ("a100", 0.655, "published, compiled: 57% "),
    ("5060 Ti", 0.84, "published, compiled: 84% "),
    ("3060", 0.75, "assumed: 75% (57% to 84%) "),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", 0.50, "assumed: 50% (34% to 67%) "),
]


@pytest.mark.parametrize("gpu, mfu, source", PACES)
def test_a_plan_says_whether_its_mfu_is_published_or_assumed(gpu, mfu, source):
    """A model wider than GPT-2 124M reaches as much."""
    p, wide = (plan("gpt124m_4070", f"--gpu={gpu}", f"--n_embd={width}") for width in (768, 1536))
    assert (p["mfu"], wide["mfu"]) == pytest.approx((mfu, mfu))
    assert p["pace"].startswith(source) and p["pace"] in p["out"]


def test_a_plan_for_a_cpu_has_an_mfu_by_a_measured_peak_but_no_hours_by_it():
    """No MFU is known of CPUs, so --iter_seconds must be given."""
    p = plan("quickstart", "--device=cpu", "--iter_seconds=0.07")
    assert p["mfu"] * p["peak_tflops"] * 1e12 == pytest.approx(
        p["flops_per_token"] * p["tokens_per_sec"]
    )
    assert "TFLOP/s dense peak (measured)" in p["out"]
    refused = run("bench.py", "plan", "config/quickstart.py", "--device=cpu")
    assert refused.code == 1 and "--iter_seconds=S" in refused.err


@pytest.mark.parametrize("gpu, gpus, speed", [("a100", 8, 230e9), ("4070", 2, 12e9)])
def test_the_time_on_several_gpus_is_the_divided_work_plus_the_gradient_exchange(gpu, gpus, speed):
    """Each of n GPUs sends and receives (n - 1) / n of the float32 gradients twice."""
    exchange = (gpus - 1) / gpus * LINK / speed
    one = plan("gpt124m_4070", f"--gpu={gpu}")
    p = plan("gpt124m_4070", f"--gpu={gpu}", f"--gpus={gpus}", "--watts=300")
    assert p["iter_seconds"] == pytest.approx(one["iter_seconds"] / gpus + exchange)
    assert p["kwh_total"] == pytest.approx(0.3 * gpus * p["hours_total"])


# -----------------------------------------------------------------------------
# What a run does, and what it prints


def test_a_plan_of_the_downloaded_dataset_counts_what_is_downloaded():
    p = plan("fast", "--gpu=4090", "--hours=2")
    assert p["disk_gb"] == pytest.approx(4.2 + 3 * p["checkpoint_gb"])  # 21 shards of 0.2 GB


PUBLIC = [  # with 2**20 tokens of train, an evaluation reads 2 x 3,276,800 and 2 x 1,638,400
    (21.89, "gpt40m_4070", "--eval_tokens=5505024 --max_iters=20000"),
    (28.69, "gpt124m_4070", "--eval_tokens=2228224 --max_iters=11000"),
]


@pytest.mark.parametrize("hours, config, words", PUBLIC)
def test_planned_hours_of_public_runs_are_close_to_the_hours_in_their_logs(hours, config, words):
    """Include evaluations and saves. The hours are those in results/public_runs/README.md."""
    words += " --eval_interval=500 --checkpoint_interval=500"
    p = plan(config, "--gpu=4070", *words.split())
    assert p["hours_total"] == pytest.approx(hours, rel=0.01)


@pytest.mark.parametrize("iters, hours, evals, saves", [(7, 0, 3, 2), (100, 0.021, 3, 2)])
def test_plan_counts_the_iterations_evaluations_and_checkpoints_of_a_run(
    iters, hours, evals, saves, tiny
):
    """Compare the size of a checkpoint too, within 5%, because the file also holds settings."""
    keys = tiny | dict(max_iters=iters, hours=hours, eval_interval=evals, checkpoint_interval=saves)
    keys |= dict(n_embd=64, eval_tokens=96)
    out = keys["out_dir"]
    # plan before the clock is faked, because its imports would keep the faked one
    p = plan("quickstart", *flags(**keys), "--iter_seconds=10")
    trainer = InProcessRun(fake_clock=True)
    trainer.seconds = dict(iteration=10.0, evaluation=10 * 2 * 96 / 128 / 3)
    assert trainer.launch(ROOT / "config/quickstart.py", **keys).code == 0
    (end,) = Run(out).records("end")
    assert p["tokens_per_iter"] == 128
    assert p["max_iters"] == Run(out).steps("iter")[-1] + 1
    assert p["evaluations"] == len(Run(out).records("eval"))
    assert p["checkpoints"] == len(Run(out).records("checkpoint"))
    assert p["hours_total"] == pytest.approx(end["hours"], rel=1e-3)
    size = (out / f"ckpt-{p['max_iters']:08}.pt").stat().st_size
    assert size / 1e9 == pytest.approx(p["checkpoint_gb"], rel=0.05)


def test_plan_reads_the_sizes_of_a_datasets_vocabulary_and_splits(tokens):
    sizes = ("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--eval_tokens=99999")
    p = plan("quickstart", f"--dataset={tokens}", "--iter_seconds=1", *sizes)
    # 128 ids in the embedding and in the head with its biases; two blocks; the last norm
    assert p["params"] == 2 * 128 * 32 + 128 + 2 * (12 * 32**2 + 11 * 32) + 2 * 32
    assert p["epochs"] == pytest.approx(p["total_tokens"] / 1237)
    # both splits are evaluated on as many tokens as the smaller has, in a third of the time
    seconds = 3600 * (p["hours_total"] - p["hours"]) / p["evaluations"]
    assert seconds == pytest.approx(2 * 400 / p["tokens_per_sec"] / 3, rel=2e-3)
