"""Check configuration: files, flags, and every way to get them wrong."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program import ROOT, flags, run

from common.console import UserError
from configurator import FIELDS, Config, config_text, load_config, parse_value, read_config


def write(tmp_path, text: str, name: str = "c.py") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_later_files_and_flags_win(tmp_path):
    """Let the last file or flag on the command line decide."""
    a = write(tmp_path, "batch_size = 2\nbatch_size = 3\nn_layer = 2", "a.py")
    b = write(tmp_path, "batch_size = 5", "b.py")
    config = load_config([a, "--n_layer=4", b])
    assert (config.batch_size, config.n_layer) == (5, 4)
    assert load_config([a, b, a]).batch_size == 3
    assert load_config([a, "--batch_size=4", "--batch_size=8"]).batch_size == 8


def test_a_config_file_can_read_earlier_files_and_all_flags(tmp_path):
    """Let a file compute with --max_iters, and remember which keys were set."""
    text = "lr_decay_iters = max_iters * 2\nbatch_size = 12"
    for argv in (
        ["--max_iters=50", write(tmp_path, text)],
        [write(tmp_path, text), "--max_iters=50"],
    ):
        config = load_config(argv)
        assert (config.max_iters, config.lr_decay_iters) == (50, 100)
        assert config.set_keys == {"max_iters", "lr_decay_iters", "batch_size"}  # default counts
    # what a file sets itself does not follow a flag, as in nanoGPT
    own = write(tmp_path, f"max_iters = 7\n{text}", "own.py")
    config = load_config([own, "--max_iters=50"])
    assert (config.max_iters, config.lr_decay_iters) == (50, 14)
    assert load_config(["--max_iters=50", own]) == config  # a flag wins wherever it stands
    assert load_config([own, write(tmp_path, "max_iters = 8")]).max_iters == 8
    # where no micro-batch is set, a file computes with nanoGPT's
    computed = write(tmp_path, "warmup_iters = 1200 // batch_size", "computed.py")
    assert load_config([computed]).warmup_iters == 100
    assert load_config([computed, "--batch_size=6"]).warmup_iters == 200


@pytest.mark.parametrize(
    "text, expected",
    [
        ("layers = 2\nn_layer = n_head = layers", dict(n_layer=2, n_head=2)),  # nanoGPT's way
        ("def f():\n    return n_layer + 1\nn_layer = 5\nn_head = f()", dict(n_layer=5, n_head=6)),
        ("n_head = 2\nn_embd = [n_head * n for n in range(9)][-1]", dict(n_head=2, n_embd=16)),
        ("for n_layer in (3, 4):\n    n_head = 2 * n_layer", dict(n_layer=4, n_head=8)),
        ("if (n_layer := 3) > 2:\n    globals()['n_head'] = 4", dict(n_layer=3, n_head=4)),
    ],
)
def test_a_config_file_may_compute_its_keys_with_python_code(text, expected, tmp_path):
    """Take keys from functions, loops, comprehensions and globals."""
    config = read_config([write(tmp_path, text)])
    assert config.set_keys == expected.keys()
    assert {name: getattr(config, name) for name in expected} == expected


def test_ignores_modules_functions_classes_and_underscored_names_in_a_config_file(tmp_path):
    """Set only two keys from a file that also runs as __main__, as nanoGPT's do."""
    text = (
        "import math\nfrom math import sqrt\nfrom typing import Any, Optional as Maybe\n"
        "_tokens = 4\nclass Size:\n    n = 3\n"
        "def double(x):\n    return 2 * x\nbatch_size = double(_tokens)\n"
        "if __name__ == '__main__':\n    n_layer = Size.n"
    )
    config = load_config([write(tmp_path, text)])
    assert (config.batch_size, config.n_layer) == (8, 3)
    assert config.set_keys == {"batch_size", "n_layer"}


@pytest.mark.parametrize(
    "flag, name, value",
    [
        ("--batch_size=1e1", "batch_size", 10),
        ("--max_iters=524_288", "max_iters", 524288),
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--compile=False", "compile", False),
        ("--bias=1", "bias", True),
        ("--wandb_project=a=b", "wandb_project", "a=b"),
        ("--wandb_project=3", "wandb_project", "3"),
        ("--out_dir='quoted'", "out_dir", "quoted"),
    ],
)
def test_converts_flag_values_to_the_types_of_their_keys(flag, name, value):
    """
    Accept --learning_rate=1, 1e1 and = in a value, which nanoGPT rejects: #439,
    PR#412, #64, PR#29.
    """
    found = getattr(load_config([flag]), name)
    assert found == value and type(found) is type(value)


STEPS = "--gradient_accumulation_steps"
FILES = dict(
    ours="batch_size = 4\nblock_size = 64\ntokens_per_iter = 4096\n",
    nanogpts="batch_size = 8\nblock_size = 64\ngradient_accumulation_steps = 5\n",
)
FILES["both"] = FILES["nanogpts"] + "tokens_per_iter = 8 * 64 * gradient_accumulation_steps\n"


@pytest.mark.parametrize(
    "given, tokens",
    [
        ("", 12 * 1024 * 40),
        ("--batch_size=4 --block_size=128 ours", 4096),
        ("nanogpts", 8 * 64 * 5),
        ("nanogpts --batch_size=2 --block_size=32", 2 * 32 * 5),  # those at the end
        (f"nanogpts {STEPS}=9", 8 * 64 * 9),
        ("ours nanogpts", 8 * 64 * 5),
        ("nanogpts ours", 4096),
        ("both --batch_size=2", 8 * 64 * 5),
        (f"{STEPS}=9 --tokens_per_iter=6144", 6144),
        # a flag may count micro-batches of a file's tokens, if both mean the same
        (f"ours {STEPS}=16", 4096),
        (f"ours {STEPS}=4 --batch_size=16", 4096),
    ],
)
def test_the_tokens_of_an_iteration_have_two_names(tmp_path, given, tokens):
    """
    Let flags win over files, a later file over an earlier one, and tokens_per_iter where both are
    set. test_bad_input.py has a flag's accumulation that means other tokens than a file sets.
    """
    files = {name: write(tmp_path, text, f"{name}.py") for name, text in FILES.items()}
    argv = [files.get(word, word) for word in given.split()]
    config = load_config(argv)
    assert config.tokens_per_iter == tokens
    assert load_config([write(tmp_path, config_text(config), "printed.py")]) == config


def test_configurator_prints_a_config_file_and_nothing_else(tmp_path):
    result = run("configurator.py", "--batch_size=6", "--gradient_accumulation_steps=4")
    assert (result.code, result.err) == (0, "")
    assert load_config([write(tmp_path, result.out)]).tokens_per_iter == 6 * 1024 * 4


def test_accepts_every_nanogpt_key_as_a_flag_and_in_a_file(tmp_path):
    """
    Use nanoGPT's defaults, except for device, dtype and lr_decay_iters, which are worked out for
    each run.
    """
    defaults = dict(out_dir="out", eval_interval=2000, log_interval=1)
    defaults |= dict(eval_only=False, init_from="scratch")
    defaults |= dict(wandb_project="owt", dataset="openwebtext")
    defaults |= dict(block_size=1024, tokens_per_iter=40 * 12 * 1024)
    defaults |= dict(n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False)
    defaults |= dict(learning_rate=6e-4, max_iters=600000, weight_decay=1e-1, beta1=0.9, beta2=0.95)
    defaults |= dict(grad_clip=1.0, warmup_iters=2000, min_lr=6e-5, compile=True)
    assert load_config([]) == Config(**defaults)
    defaults |= dict(batch_size=12)  # the machine chooses one if none is set
    defaults |= dict(lr_decay_iters=600000, device="cuda", dtype="bfloat16")
    all_keys = defaults | dict(eval_iters=200, wandb_log=False, decay_lr=True, backend="nccl")
    all_keys |= dict(always_save_checkpoint=True, wandb_run_name="gpt2")
    all_keys |= dict(gradient_accumulation_steps=40)
    lines = [f"{name} = {value!r}" for name, value in all_keys.items()]
    assert load_config([write(tmp_path, "\n".join(lines))]) == Config(**defaults)
    assert load_config(flags(**all_keys)) == Config(**defaults)


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--wandb_log=True"], dict(tracker="wandb")),
        (["--wandb_log=True", "--wandb_log=False"], dict(tracker="none")),
        (["--wandb_log=True", "--tracker=tensorboard"], dict(tracker="tensorboard")),
        (["--decay_lr=False"], dict(lr_schedule="wsd", decay_fraction=0.0, warmup_iters=0)),
        (["--decay_lr=False", "--lr_schedule=wsd"], dict(lr_schedule="wsd")),
        (["--lr_schedule=wsd", "--decay_lr=True"], dict(lr_schedule="wsd")),
        (["--eval_iters=3", "--batch_size=2"], dict(eval_tokens=3 * 2 * 1024)),
        (["--eval_iters=3", "--eval_tokens=77"], dict(eval_tokens=77)),
        (["--model=gpt2"], dict(tie_weights=True)),
        (["--model=fast"], dict(tie_weights=False)),
    ],
)
def test_translates_nanogpts_flags(argv, expected):
    """
    Read --wandb_log as tracker and --decay_lr as lr_schedule, where ours wins. The fast model has
    its own head.
    """
    config = load_config(argv)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_config_file_can_read_nanogpts_keys(tmp_path):
    sized = write(tmp_path, "eval_tokens = 77\nbatch_size = 2")
    assert load_config([sized, "--eval_iters=3"]).eval_tokens == 3 * 2 * 1024
    text = "lr_schedule = 'wsd' if decay_lr and not wandb_log and backend == 'nccl' else 'cosine'"
    assert load_config([write(tmp_path, text)]).lr_schedule == "wsd"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_reads_config_files_written_by_notepad_and_powershell(encoding, tmp_path):
    """
    Read UTF-8 with or without a byte-order mark, and the UTF-16 with CRLF that PowerShell writes
    for python configurator.py config/quickstart.py > mine.py.
    """
    config = Config(out_dir="out/Größe", n_layer=3, eval_tokens=64, tokens_per_iter=8192)
    path = tmp_path / "mine.py"
    path.write_text(config_text(config), encoding=encoding, newline="\r\n")
    assert load_config([str(path)]) == config


@settings(max_examples=20, deadline=None)
@given(
    text=st.text(min_size=1).filter(str.strip),
    rate=st.floats(0, 1e300),
    seed=st.integers(0, 2**63 - 1),
    flash=st.booleans(),
)
def test_a_printed_config_loads_back_as_itself(text, rate, seed, flash, tmp_path_factory):
    """Print any name, rate and seed as a file that loads back to equal values."""
    config = Config(out_dir=text, learning_rate=rate, seed=seed, flash=flash, tokens_per_iter=8192)
    path = tmp_path_factory.mktemp("c") / "c.py"
    path.write_text(config_text(config), encoding="utf-8")
    assert load_config([str(path)]) == config


def test_help_lists_every_key_with_its_meaning_and_default():
    """Every default that --help prints can be typed as the key's value."""
    result = run("train.py", "--help")
    assert result.code == 0
    for name, f in FIELDS.items():
        pattern = rf"^  --{name}=\S+ +\w[^$]+?\(default:\s+(\S+)\)$"
        default = re.search(pattern, result.out, re.MULTILINE)[1]
        assert parse_value(default, type(f.default)) == f.default, name


# own_text.py needs a text: see test_own_text.py
CONFIGS = [p for p in sorted((ROOT / "config").glob("*.py")) if p.stem != "own_text"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_committed_config_is_valid(path):
    """
    Load each config. Those named gpt* or fast* train on 524,288 tokens per iteration, with any
    batch_size.
    """
    config = load_config([str(path)])
    if path.stem.startswith(("gpt", "fast")):
        small = load_config([str(path), "--batch_size=4"])
        assert config.tokens_per_iter == small.tokens_per_iter == 524_288


# test_bad_input.py has more
BAD_FILES = {
    "syntax error": "batch_size = = 4",
    "raises two lines": "raise ValueError('a\\nb')",
    "exits": "import sys\nsys.exit(0)",
    "a name that is only changed": "learning_rat = 1e-3\nlearning_rat *= 2",
    "nan": "learning_rate = float('nan')",
    "number for bool": "compile = 2",
    "not text": "batch_size = 4\n\0",
    "a function for a key": "max_iters = lambda: 4",
    "an unknown tuple": "betas = (0.9, 0.99)",
    "a relative import": "from .base import *",
}


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_config_file_gives_one_line_that_names_the_file(text, tmp_path):
    with pytest.raises(UserError) as error:
        load_config([write(tmp_path, text)])
    (line,) = error.value.args
    assert "\n" not in line and line.startswith(str(tmp_path / "c.py"))


def test_min_lr_becomes_a_tenth_of_a_peak_rate_that_is_below_it():
    """Lower min_lr for a small learning_rate, unless min_lr was set."""
    assert load_config(["--learning_rate=1e-5"]).min_lr == pytest.approx(1e-6)
    assert load_config(["--learning_rate=1e-5", "--min_lr=6e-5"]).min_lr == 6e-5


def test_expands_a_tilde_in_a_flag_or_a_file_to_the_home_folder(tmp_path, monkeypatch):
    """Expand ~ in --out_dir=~/runs, which shells leave alone after a =, and Python does."""
    monkeypatch.setenv("HOME", "/home/somebody")
    file = tmp_path / "a.py"
    file.write_text('out_dir = "~/runs/a"')
    for argument in ("--out_dir=~/runs/a", str(file)):
        assert load_config([argument]).out_dir == "/home/somebody/runs/a"
