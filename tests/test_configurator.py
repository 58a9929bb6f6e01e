"""Configuration: files, flags, and every way to get them wrong."""

import math

import pytest
from helpers import ROOT, run_process
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import UserError
from configurator import FIELDS, Config, config_values, load_config, main, print_config


def write(tmp_path, text, name="c.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def problems_of(*argv):
    with pytest.raises(UserError) as error:
        load_config(list(argv))
    return error.value.problems


def test_later_files_and_flags_win(tmp_path):
    a, b = (
        write(tmp_path, "batch_size = 3\nn_layer = 2", "a.py"),
        write(tmp_path, "batch_size = 5", "b.py"),
    )
    config = load_config([a, "--n_layer=4", b])
    assert (config.batch_size, config.n_layer) == (5, 4)


def test_a_file_sees_the_values_so_far(tmp_path):
    config = load_config(["--max_iters=50", write(tmp_path, "lr_decay_iters = max_iters * 2")])
    assert config.lr_decay_iters == 100


def test_modules_functions_and_underscored_names_in_a_file_are_ignored(tmp_path):
    text = (
        "import math\n_tokens = 4\ndef double(x):\n    return 2 * x\nbatch_size = double(_tokens)"
    )
    assert load_config([write(tmp_path, text)]).batch_size == 8


@pytest.mark.parametrize(
    "flag, name, value",
    [
        ("--batch_size=1e1", "batch_size", 10),
        ("--max_iters=524_288", "max_iters", 524288),
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning_rate=6e-4", "learning_rate", 6e-4),
        ("--compile=false", "compile", False),
        ("--compile=NO", "compile", False),
        ("--bias", "bias", True),
        ("--bias=on", "bias", True),
        ("--wandb_run_name=a=b", "wandb_run_name", "a=b"),
        ("--wandb_run_name=3", "wandb_run_name", "3"),
    ],
)
def test_flags_nanogpt_stumbles_over(flag, name, value):
    """
    nanoGPT #439, PR#412, #64, PR#29: --learning_rate=1, --compile=false, 1e4 and = in a value.
    """
    found = getattr(load_config([flag]), name)
    assert found == value and type(found) is type(value)


def test_all_problems_are_reported_together(tmp_path):
    found = problems_of(
        "--batch_siz=4", "--n_embd=abc", "--dtype=bf16", "--n_layer=0", str(tmp_path / "none.py")
    )
    assert len(found) == 5
    assert "did you mean batch_size?" in found[0]


def test_tokens_per_iter_sets_accumulation_and_names_what_would_divide():
    config = load_config(["--tokens_per_iter=524288", "--batch_size=8"])
    assert config.gradient_accumulation_steps == 64
    (problem,) = problems_of("--tokens_per_iter=500000", "--batch_size=12")
    assert "491520 or 503808" in problem


def test_nanogpt_habits_are_no_errors():
    """
    A warm-up longer than the run and a constant rate below the usual min_lr (its
    finetune_shakespeare.py).
    """
    config = load_config(["--warmup_iters=100", "--max_iters=10"])
    assert config.warmup_iters > config.max_iters
    assert load_config(["--learning_rate=3e-5", "--decay_lr=False"]).learning_rate == 3e-5


@st.composite
def configs(draw):
    values = {}
    for name, f in FIELDS.items():
        low, high = f.metadata["low"], f.metadata["high"]
        if f.type is bool:
            values[name] = draw(st.booleans())
        elif f.metadata["choices"]:
            values[name] = draw(st.sampled_from(f.metadata["choices"]))
        elif f.type is str:
            values[name] = draw(st.text(min_size=1).filter(str.strip))
        elif f.type is int:
            values[name] = draw(st.integers(int(max(low, 0)), int(min(high, 10**6))))
        else:
            values[name] = draw(st.floats(max(low, 0.0), min(high, 1e6), allow_nan=False))
    values["n_embd"] = values["n_head"] * 4 * draw(st.integers(1, 8))
    if values["model"] == "fast":
        values |= dict(tie_weights=False, dropout=0.0, flash=True)
    values["n_head"], values["n_embd"] = (
        min(values["n_head"], 8192),
        min(values["n_head"], 8192) * 8,
    )
    values["tokens_per_iter"], values["loss_chunk"] = (
        0,
        draw(st.sampled_from(["auto", "off", "512"])),
    )
    values["overwrite"] = values["overwrite"] and values["init_from"] not in ("resume", "auto")
    values["tracker"] = "wandb" if values["wandb_log"] else values["tracker"]
    return Config(**values)


@settings(max_examples=100, deadline=None)
@given(config=configs())
def test_a_printed_config_loads_back_as_itself(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "c.py"
    path.write_text(print_config(config), encoding="utf-8")
    assert load_config([str(path)]) == config


def test_a_config_that_leaves_everything_alone_gives_nothing_as_given(tmp_path):
    config = load_config([write(tmp_path, "batch_size = 12\n")])
    assert config.given == {"batch_size"}


def test_every_key_has_a_meaning_and_help_lists_it():
    code, out, _ = run_process("train.py", "--help")
    assert code == 0
    for name, f in FIELDS.items():
        assert f.metadata["meaning"] and f"--{name}=" in out
    assert len(FIELDS) <= 65


def test_configurator_prints_the_resolved_configuration(tmp_path):
    code, out, _ = run_process(
        "configurator.py", "config/gpt124m_4070.py", "--batch_size=4", "--tokens_per_iter=524288"
    )
    assert code == 0
    config = load_config([write(tmp_path, out)])
    assert config.gradient_accumulation_steps == 128 and config.batch_size == 4


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.stem)
def test_every_committed_config_is_valid(path):
    config = load_config([str(path)])
    assert config_values(config)["dataset"]
    if path.stem.startswith(("gpt124m", "gpt40m")) and path.stem != "gpt124m_cpu":
        assert config.batch_size * config.block_size * config.gradient_accumulation_steps == 524_288


BAD_FLAGS = {
    "unknown key": "--batch_siz=4",
    "one dash": "-batch_size=4",
    "no dashes": "batch_size=4",
    "no value": "--batch_size",
    "empty value": "--batch_size=",
    "word for int": "--batch_size=four",
    "fraction for int": "--batch_size=1.5",
    "bool for int": "--batch_size=True",
    "list for int": "--batch_size=[4]",
    "infinite int": "--max_iters=1e400",
    "zero batch": "--batch_size=0",
    "negative batch": "--batch_size=-4",
    "negative layers": "--n_layer=-1",
    "zero heads": "--n_head=0",
    "zero width": "--n_embd=0",
    "absurd width": "--n_embd=1e12",
    "heads do not divide": "--n_head=7",
    "zero block": "--block_size=0",
    "negative seed": "--seed=-1",
    "nan": "--learning_rate=nan",
    "inf": "--learning_rate=inf",
    "negative lr": "--learning_rate=-1",
    "word for float": "--learning_rate=high",
    "dropout of 1": "--dropout=1",
    "negative dropout": "--dropout=-0.1",
    "beta of 1": "--beta2=1",
    "negative decay": "--weight_decay=-1",
    "negative clip": "--grad_clip=-1",
    "number for bool": "--compile=2",
    "word for bool": "--compile=maybe",
    "bad dtype": "--dtype=bf16",
    "bad schedule": "--lr_schedule=cosin",
    "bad tracker": "--tracker=tensorbord",
    "bad device": "--device=gpu",
    "bad device number": "--device=cuda:x",
    "empty dataset": "--dataset=",
    "empty out_dir": "--out_dir= ",
    "zero interval": "--eval_interval=0",
    "zero log interval": "--log_interval=0",
    "zero eval_iters": "--eval_iters=0",
    "negative eval_tokens": "--eval_tokens=-1",
    "negative warm-up": "--warmup_iters=-1",
    "negative iterations": "--max_iters=-1",
    "negative minutes": "--max_minutes=-1",
    "indivisible tokens": "--tokens_per_iter=1000",
    "tokens below a micro-batch": "--tokens_per_iter=1",
    "keep none": "--keep_checkpoints=0",
    "zero skips": "--max_skips=0",
    "decay beyond all": "--decay_fraction=1.5",
    "zero padding": "--pad_vocab_multiple=0",
    "missing config": "config/gpt124m_4071.py",
    "a folder for a config": "config",
}
BAD_FILES = {
    "syntax error": "batch_size = = 4",
    "unclosed": "n_layer = (1,",
    "undefined name": "batch_size = bach",
    "raises": "raise ValueError('no')",
    "exits": "import sys\nsys.exit(0)",
    "divides by zero": "n_layer = 1 // 0",
    "unknown key": "learning_rat = 1e-3",
    "helper without underscore": "tokens = 5",
    "string for int": "batch_size = '4'",
    "fraction for int": "batch_size = 4.5",
    "None": "dropout = None",
    "list": "n_layer = [12]",
    "int for string": "out_dir = 5",
    "nan": "learning_rate = float('nan')",
    "inf": "learning_rate = float('inf')",
    "number for bool": "compile = 2",
    "duplicate key": "batch_size = 4\nn_layer = 2\nbatch_size = 8",
    "negative": "n_layer = -3",
    "bad choice": "dtype = 'half'",
    "assert": "assert batch_size == 1, 'one only'",
    "bad import": "import no_such_module",
    "not text": "batch_size = 4\n\0",
}


@pytest.mark.parametrize("flag", BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_bad_flag_is_one_clear_line(flag):
    from training.hardware import check_device

    with pytest.raises(UserError) as error:
        load_config([flag], checks=(check_device,))
    (line,) = error.value.problems
    assert "\n" not in line and flag.lstrip("-").partition("=")[0] in line


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_config_file_is_one_clear_line_that_names_the_file(text, tmp_path):
    path = write(tmp_path, text)
    (line,) = problems_of(path)
    assert "\n" not in line and line.startswith(path)


def test_a_later_argument_wins_even_if_it_is_there_twice(tmp_path):
    small, large = (tmp_path / name for name in ("small.py", "large.py"))
    small.write_text("batch_size = 2")
    large.write_text("batch_size = 9")
    assert load_config([str(small), str(large), str(small)]).batch_size == 2
    assert load_config(["--batch_size=5", str(small), "--batch_size=5"]).batch_size == 5


def test_a_rate_below_min_lr_does_not_rise():
    assert load_config(["--learning_rate=1e-5"]).min_lr == pytest.approx(1e-6)
    assert load_config(["--optimizer=muon", "--embed_lr=1e-5"]).min_lr == pytest.approx(1e-6)
    assert load_config(["--learning_rate=1e-5", "--min_lr=6e-5"]).min_lr == 6e-5


def test_duplicate_flags_are_an_error_unless_equal():
    assert problems_of("--seed=1", "--seed=2") == [
        "--seed: given twice with different values; keep one"
    ]
    assert load_config(["--seed=1", "--seed=1"]).seed == 1


def test_bad_command_line_exits_2_without_a_traceback_and_writes_nothing(tmp_path):
    """
    One real process: misspelt key, wrong type, missing dataset, missing device, indivisible tokens,
    all at once.
    """
    code, out, err = run_process(
        str(ROOT / "train.py"),
        "--batch_siz=4",
        "--n_embd=x",
        "--dataset=nowhere",
        "--device=cuda:99",
        "--tokens_per_iter=1000",
        f"--out_dir={tmp_path / 'out'}",
        cwd=tmp_path,
    )
    lines = err.splitlines()
    assert code == 2 and out == ""
    assert len(lines) == 5 and all(line.startswith("error: ") for line in lines)
    assert any("prepare_" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_floats_survive_printing_to_the_last_bit(tmp_path):
    config = load_config([])
    config.learning_rate = math.nextafter(6e-4, 1)
    assert (
        load_config([write(tmp_path, print_config(config))]).learning_rate == config.learning_rate
    )


def test_home_is_meant_by_a_tilde_in_a_flag(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert (
        load_config(["--out_dir=~/runs/a"]).out_dir == "/home/somebody/runs/a"
    )  # shells leave it alone behind a =


@pytest.mark.parametrize(
    "content", ["a\0b", "raise BaseException('x\\ny')", "(" * 500, "1/0", "\N{BELL}"]
)
def test_a_config_file_that_fails_in_any_way_is_one_line(tmp_path, content, script):
    (tmp_path / "odd.py").write_text(content)
    code, _, err = script(main, tmp_path / "odd.py")
    assert code == 2 and len(err) == 1 and err[0].startswith(f"error: {tmp_path / 'odd.py'}:1: ")
