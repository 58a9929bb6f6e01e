"""Check the tokens per iteration that configs, flags and resumes lead to."""

import sys
from pathlib import Path
from unittest import mock

import pytest
from program import ROOT, column, flags, printed_config, run, write_tokens

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    max_iters=4,
    eval_interval=2,
    eval_tokens=64,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
BATCH = "batch_size = 4\nblock_size = 16\ntokens_per_iter = 512\ngradient_accumulation_steps = 8\n"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [900], [150])


@pytest.fixture
def config(tmp_path, tokens) -> Path:
    """Write a config file with tokens_per_iter and the accumulation that follows from it."""
    path = tmp_path / "mine.py"
    path.write_text(f"dataset = {str(tokens)!r}\n{BATCH}", "utf-8")
    return path


def run_tiny(*files, **changes):
    return run("train.py", *files, *flags(**TINY | changes))


@pytest.mark.parametrize(
    "after, processes, accumulation",
    [
        ([], 1, 8),
        (["--batch_size=8"], 1, 4),
        (["--batch_size=3"], 1, 11),  # 512 / 48 = 10.67
        (["--batch_size=3"], 4, 12),
        (["--batch_size=32"], 4, 4),  # a micro-batch each, though that is four times the tokens
        (["--gradient_accumulation_steps=3", "--batch_size=3"], 1, 3),
    ],
)
def test_recomputes_accumulation_for_flags_after_a_config(
    after, processes, accumulation, config, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with mock.patch("os._exit", sys.exit):  # how one of several processes ends
        values = printed_config(config, *after)
    assert values["gradient_accumulation_steps"] == accumulation


def test_a_resume_keeps_the_tokens_per_iteration_of_its_run(config, tmp_path):
    out_dir = tmp_path / "run"
    first = run_tiny(config, "--batch_size=3", out_dir=out_dir, max_iters=2)
    assert [
        line for line in first.out.splitlines() if ": 528 = 11 x 3 x 16 " in line and "512" in line
    ]
    resume = dict(out_dir=out_dir, init_from="resume")
    refused = run_tiny(config, "--batch_size=5", **resume)
    assert refused.code == 2
    assert "use 3 or 11" in refused.err
    again = run_tiny(config, "--batch_size=11", **resume)
    assert again.code == 0, again.err
    assert set(column(out_dir, "start", "tokens_per_iter")) == {528}
    assert column(out_dir, "step", "tokens_after")[-1] == 4 * 528


GPU_CONFIGS = [*(ROOT / "config").glob("gpt*m_*.py")]
NINE_SUBJECTS = """
    batch_size gradient_accumulation_steps learning_rate compile tf32 dtype flash
    pad_vocab_multiple tie_weights
""".split()


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: path.stem)
def test_every_gpt2_config_for_a_gpu_spells_out_nine_important_settings(path):
    shown: dict = {}
    exec(path.read_text("utf-8"), shown)
    assert not [name for name in NINE_SUBJECTS if name not in shown]


def test_a_resume_keeps_the_tokens_per_iteration_that_its_accumulation_gave(tokens, tmp_path):
    """
    Resume a run whose config, like nanoGPT's, has no tokens_per_iter, with a larger micro-batch.
    """
    (tmp_path / "x.py").write_text(
        f"dataset = {str(tokens)!r}\nbatch_size = 4\nblock_size = 16\n"
        "gradient_accumulation_steps = 3\n",
        "utf-8",
    )
    keys = dict(out_dir=tmp_path / "run")
    assert run_tiny(tmp_path / "x.py", **keys, max_iters=2).code == 0
    again = run_tiny(tmp_path / "x.py", "--batch_size=6", **keys, init_from="resume")
    assert again.code == 0, again.err
    assert set(column(tmp_path / "run", "start", "tokens_per_iter")) == {4 * 16 * 3}
