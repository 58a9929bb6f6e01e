"""Check the tokens per iteration that configs, flags and resumes lead to."""

from pathlib import Path

import pytest
from program import ROOT, flags, refused, run

from configurator import load_config

TINY = dict(n_layer=1, n_embd=16, max_iters=4, eval_interval=2, eval_tokens=64)
# tokens_per_iter, and the accumulation that follows from it
BATCH = "batch_size = 4\nblock_size = 16\ntokens_per_iter = 512\ngradient_accumulation_steps = 8\n"


@pytest.fixture
def keys(tiny) -> dict:
    """Return the keys of a tiny run, without those that a config file sets here."""
    left_out = ("batch_size", "block_size", "gradient_accumulation_steps")
    return {name: value for name, value in tiny.items() if name not in left_out}


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(BATCH)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    "after, processes, accumulation",
    [
        ([], 1, 8),
        (["--batch_size=8"], 1, 4),
        (["--batch_size=3"], 1, 11),  # 512 / 48 = 10.67
        (["--batch_size=3"], 4, 12),
        (["--batch_size=32"], 4, 4),  # a micro-batch each, though that is four times the tokens
        (["--gradient_accumulation_steps=3", "--batch_size=3"], 1, 3),
        ([], 3, 9),  # 528 tokens, the nearest
    ],
)
def test_recomputes_accumulation_for_flags_after_a_config(
    after, processes, accumulation, config, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    loaded = load_config([str(config), *after])
    assert loaded.gradient_accumulation_steps == accumulation


def test_a_resume_keeps_the_tokens_per_iteration_of_its_run(config, keys, ran):
    first = run("train.py", config, "--batch_size=3", *flags(**keys | dict(max_iters=2)))
    lines = [line for line in first.out.splitlines() if ": 528 = 11 x 3 x 16 " in line]
    assert lines and "512" in lines[0]
    resume = flags(**keys, init_from="resume")
    refused(run("train.py", config, "--batch_size=5", *resume), "use 3 or 11")
    again = run("train.py", config, "--batch_size=11", *resume)
    assert again.code == 0, again.err
    assert ran.column("start", "tokens_per_iter") == [528, 528]
    assert ran.steps("tokens_after")[-1] == 4 * 528


def test_a_resume_keeps_the_tokens_per_iteration_that_its_accumulation_gave(config, keys, ran):
    """
    Resume a run whose config, like nanoGPT's, has no tokens_per_iter, with a larger micro-batch.
    """
    config.write_text("batch_size = 4\nblock_size = 16\ngradient_accumulation_steps = 3\n")
    assert run("train.py", config, *flags(**keys | dict(max_iters=2))).code == 0
    again = run("train.py", config, "--batch_size=6", *flags(**keys, init_from="resume"))
    assert again.code == 0, again.err
    assert ran.column("start", "tokens_per_iter") == 2 * [4 * 16 * 3]


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
