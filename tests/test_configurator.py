"""Configuration: files, flags, and every way to get them wrong."""

import math
import sys

import pytest
from helpers import ROOT, run_process
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import UserError
from configurator import FIELDS, Config, load_config, main, nearest_divisor, print_config


def write(tmp_path, text, name="c.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def problems_of(*argv):
    with pytest.raises(UserError) as error:
        load_config(list(argv))
    return error.value.problems


def test_later_files_and_flags_win(tmp_path):
    a = write(tmp_path, "batch_size = 3\nn_layer = 2", "a.py")
    b = write(tmp_path, "batch_size = 5", "b.py")
    config = load_config([a, "--n_layer=4", b])
    assert (config.batch_size, config.n_layer) == (5, 4)
    assert load_config([a, b, a]).batch_size == 3
    assert load_config(["--batch_size=5", a, "--batch_size=5"]).batch_size == 5


def test_the_last_of_two_settings_wins_so_that_scripts_can_append_flags(tmp_path):
    twice = write(tmp_path, "batch_size = 2\nbatch_size = 3")
    assert load_config([twice]).batch_size == 3
    assert load_config([twice, "--batch_size=4", "--batch_size=8"]).batch_size == 8


def test_a_file_sees_the_values_so_far(tmp_path):
    config = load_config(["--max_iters=50", write(tmp_path, "lr_decay_iters = max_iters * 2")])
    assert config.lr_decay_iters == 100


def test_modules_functions_and_underscored_names_in_a_file_are_ignored(tmp_path):
    text = (
        "import math\nfrom math import pi, sqrt\nfrom os import environ\n"
        "from typing import Any, Optional as Maybe\n_tokens = 4\n"
        "def double(x):\n    return 2 * x\nbatch_size = double(_tokens)"
    )
    config = load_config([write(tmp_path, text)])
    assert config.batch_size == 8 and config.given == {"batch_size"}


def test_a_file_may_take_keys_from_a_file_beside_it(tmp_path, monkeypatch):
    write(tmp_path, "n_layer, batch_size = 3, 12", "base_config.py")
    text = (
        "import pathlib, sys\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n"
        "from base_config import n_layer, batch_size"
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    config = load_config([write(tmp_path, text)])
    assert config.n_layer == 3 and config.given == {"n_layer"}


def test_an_absurdly_long_value_is_one_short_line():
    (problem,) = problems_of("--max_iters=" + "-" * 100_000)
    assert len(problem) < 200


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


@pytest.mark.parametrize(
    "given, accumulation, tokens",
    [
        (["--tokens_per_iter=4096", "--gradient_accumulation_steps=8"], 8, 0),
        (["--gradient_accumulation_steps=8", "--tokens_per_iter=4096"], 4, 4096),
        (["FILE", "--gradient_accumulation_steps=8"], 8, 0),
        (["--gradient_accumulation_steps=8", "FILE"], 4, 4096),
        (["FILE", "--gradient_accumulation_steps=8", "--tokens_per_iter=8192"], 8, 8192),
        (["FILE", "--gradient_accumulation_steps=8", "FILE"], 4, 4096),
        (["FILE", "--gradient_accumulation_steps=8", "--gradient_accumulation_steps=2"], 2, 0),
        (["FILE", "--tokens_per_iter=0", "--gradient_accumulation_steps=5"], 5, 0),
        (["TOKENS LAST"], 4, 4096),
        (["STEPS LAST"], 8, 0),
    ],
)
def test_of_accumulation_and_tokens_per_iter_the_last_one_wins(
    tmp_path, capsys, given, accumulation, tokens
):
    steps_line, tokens_line = "gradient_accumulation_steps = 8\n", "tokens_per_iter = 4096\n"
    files = {
        "FILE": write(tmp_path, tokens_line, "a.py"),
        "TOKENS LAST": write(tmp_path, steps_line + tokens_line, "b.py"),
        "STEPS LAST": write(tmp_path, tokens_line + steps_line, "c.py"),
    }
    argv = ["--batch_size=16", "--block_size=64", *(files.get(name, name) for name in given)]
    config = load_config(argv)
    assert (config.gradient_accumulation_steps, config.tokens_per_iter) == (accumulation, tokens)
    err = capsys.readouterr().err
    switched_off = tokens == 0 and "--tokens_per_iter=0" not in given
    assert err.count("tokens_per_iter: switched off by the later") == switched_off
    assert load_config([write(tmp_path, print_config(config), "printed.py")]) == config


def test_the_printed_config_file_is_all_that_stdout_gets(tmp_path, script):
    code, out, err = script(
        main, "--tokens_per_iter=98304", "--batch_size=8", "--gradient_accumulation_steps=4"
    )
    assert code == 0 and err == [
        "tokens_per_iter: switched off by the later gradient_accumulation_steps=4"
    ]
    assert load_config([write(tmp_path, out)]).gradient_accumulation_steps == 4
    assert "--batch_size=12" in script(main, "--help")[1]


def test_every_key_of_nanogpts_train_py_is_taken_as_flag_and_in_a_file(tmp_path):
    defaults = dict(
        out_dir="out",
        eval_interval=2000,
        log_interval=1,
        eval_iters=200,
        eval_only=False,
        always_save_checkpoint=True,
        init_from="scratch",
        wandb_log=False,
        wandb_project="owt",
        wandb_run_name="gpt2",
        dataset="openwebtext",
        gradient_accumulation_steps=40,
        batch_size=12,
        block_size=1024,
        n_layer=12,
        n_head=12,
        n_embd=768,
        dropout=0.0,
        bias=False,
        learning_rate=6e-4,
        max_iters=600000,
        weight_decay=1e-1,
        beta1=0.9,
        beta2=0.95,
        grad_clip=1.0,
        decay_lr=True,
        warmup_iters=2000,
        lr_decay_iters=600000,
        min_lr=6e-5,
        backend="nccl",
        device="cuda",
        dtype="bfloat16",
        compile=True,
    )
    file = write(tmp_path, "\n".join(f"{name} = {value!r}" for name, value in defaults.items()))
    for config in (
        load_config([file]),
        load_config([f"--{name}={value}" for name, value in defaults.items()]),
    ):
        assert {name: getattr(config, name) for name in defaults} == defaults
    assert load_config(["--backend=gloo"]).backend == "gloo"
    differing = {name for name in defaults if FIELDS[name].default != defaults[name]}
    assert differing == {"lr_decay_iters", "device", "dtype"}  # which are found automatically


def test_a_mistake_in_a_name_hides_what_may_only_follow_from_it(tmp_path):
    def check(config):
        return ["dataset: there is no folder data/openwebtext"]

    for argument in (
        "--batch_siz=4",
        "--n_embd=wide",
        "config/quikstart.py",
        write(tmp_path, "n_layer = = 2"),
        write(tmp_path, "datset = 'x'", "d.py"),
    ):
        with pytest.raises(UserError) as error:
            load_config([argument, "--n_head=7"], checks=(check,))
        assert len(error.value.problems) == 1, argument
    with pytest.raises(UserError) as error:
        load_config(["--n_head=7"], checks=(check,))
    assert len(error.value.problems) == 2


def test_the_nearest_divisor_is_named():
    assert [nearest_divisor(768, n) for n in (7, 13, 1, 5000)] == [6, 12, 1, 768]
    assert problems_of("--n_head=7") == [
        "n_head: 7 does not divide n_embd 768; nearest that does: 6"
    ]


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
    values["value_tables"] = 0
    values["bigram_rows"] = values["bigram_rows"] if values["model"] == "fast" else 0
    if values["model"] == "fast":
        values |= dict(tie_weights=False, dropout=0.0, flash=True)
        values["value_tables"] = values["n_layer"] // 2
    values["n_head"] = min(values["n_head"], 8192)
    values["n_embd"] = values["n_head"] * 8
    values["tokens_per_iter"] = 0
    if not values["stream"]:
        values["tokenizer"] = "gpt2"
    values["loss_chunk"] = draw(st.sampled_from(["auto", "off", "512"]))
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
    assert len(FIELDS) <= 66


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
    on_a_gpu = path.stem.startswith(("gpt", "fast")) and path.stem not in (
        "gpt124m_cpu",
        "fast_quickstart",
    )
    if on_a_gpu:  # the recipe's tokens per iteration, whatever micro-batch the card can hold
        assert config.iter_tokens == 524_288
        small = load_config([str(path), "--batch_size=4"])
        assert small.iter_tokens == 524_288 and small.gradient_accumulation_steps == 128


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
    "layers beyond memory": "--n_layer=65536",
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
    "negative": "n_layer = -3",
    "bad choice": "dtype = 'half'",
    "assert": "assert batch_size == 1, 'one only'",
    "bad import": "import no_such_module",
    "not text": "batch_size = 4\n\0",
    "too long to print": "keep_checkpoints = 10**5000",
    "far too negative": "eval_tokens = -(10**5000)",
    "beyond any float": "warmup_iters = 10**400",
    "beyond any exact float": "lr_decay_iters = 2**53 + 1",
    "a function for a key": "max_iters = lambda: 4",
    "a class for a key": "class dataset:\n    pass",
    "a module for a key": "import math as model",
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


def test_a_rate_below_min_lr_does_not_rise():
    assert load_config(["--learning_rate=1e-5"]).min_lr == pytest.approx(1e-6)
    # token pairs learn at a tenth of embed_lr
    assert load_config(["--optimizer=muon", "--embed_lr=1e-5"]).min_lr == pytest.approx(1e-7)
    assert load_config(["--learning_rate=1e-5", "--min_lr=6e-5"]).min_lr == 6e-5


def test_bad_command_line_exits_2_without_a_traceback_and_writes_nothing(tmp_path):
    """
    One real process: heads that do not divide, missing dataset, missing device, indivisible
    tokens, all at once. Where a file's name is misspelt, that alone.
    """
    code, out, err = run_process(
        str(ROOT / "train.py"),
        "--n_head=7",
        "--dataset=nowhere",
        "--device=cuda:99",
        "--tokens_per_iter=1000",
        f"--out_dir={tmp_path / 'out'}",
        cwd=tmp_path,
    )
    lines = err.splitlines()
    assert code == 2 and out == ""
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)
    assert any("prepare_" in line for line in lines)
    code, out, err = run_process("train.py", "config/quikstart.py")
    assert (code, out) == (2, "")
    assert err == (
        "error: config/quikstart.py: no such config file; did you mean config/quickstart.py?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_floats_survive_printing_to_the_last_bit(tmp_path):
    config = load_config([])
    config.learning_rate = math.nextafter(6e-4, 1)
    loaded = load_config([write(tmp_path, print_config(config))])
    assert loaded.learning_rate == config.learning_rate


def test_home_is_meant_by_a_tilde_in_a_flag(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    # shells leave it alone behind a =
    assert load_config(["--out_dir=~/runs/a"]).out_dir == "/home/somebody/runs/a"


@pytest.mark.parametrize(
    "content", ["a\0b", "raise BaseException('x\\ny')", "(" * 500, "1/0", "\N{BELL}"]
)
def test_a_config_file_that_fails_in_any_way_is_one_line(tmp_path, content, script):
    (tmp_path / "odd.py").write_text(content)
    code, _, err = script(main, tmp_path / "odd.py")
    assert code == 2 and len(err) == 1 and err[0].startswith(f"error: {tmp_path / 'odd.py'}:1: ")


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.stdout.close()",
        "import sys\nsys.stderr.close()",
        "import sys\nsys.stdout.detach()",
        "import sys\nsys.stderr.detach()",
        "class _X:\n    def __repr__(self):\n        return 1 / 0\nn_layer = _X()",
        "class _X:\n    def __eq__(self, other):\n        return 1 / 0\nn_layer = _X()",
        "class _X(Exception):\n    def __str__(self):\n        return 1 / 0\nraise _X",
    ],
    ids=[
        "no stdout",
        "no stderr",
        "no output",
        "no errors",
        "no repr",
        "no comparison",
        "no message",
    ],
)
def test_a_hostile_config_file_is_one_line_that_names_it(text, tmp_path):
    code, _, err = run_process("configurator.py", write(tmp_path, text), cold=True)
    assert code == 2 and err.startswith(f"error: {tmp_path}/c.py:") and err.count("\n") == 1


def test_a_config_file_that_replaces_the_console_costs_no_line(tmp_path):
    path = write(tmp_path, "import sys\nsys.stdout, sys.stderr = 3, None")
    code, out, _ = run_process("configurator.py", path)
    assert code == 0 and "n_layer = 12" in out
    code, _, err = run_process("configurator.py", path, "--n_layer=x")
    assert code == 2 and "n_layer" in err


@pytest.mark.parametrize(
    "typed, meant",
    [
        (["--max_iters", "100"], "--max_iters=100"),
        (["--min_lr", "-1"], "--min_lr=-1"),
        (["--compile", "False"], "--compile=False"),
        (["--lr", "3e-4"], "did you mean learning_rate?"),
    ],
)
def test_a_value_typed_without_its_equals_sign_is_one_line(typed, meant):
    (problem,) = problems_of(*typed)
    assert meant in problem


def test_a_switch_before_a_config_file_takes_no_value(tmp_path):
    assert load_config(["--bias", write(tmp_path, "n_layer = 3"), "--compile"]).n_layer == 3


@pytest.mark.parametrize(
    "flag, meant",
    [("--lr=1", "learning_rate"), ("--bs=8", "batch_size"), ("--epochs=1", "max_iters")],
)
def test_other_trainers_names_lead_to_ours(flag, meant):
    assert problems_of(flag)[0].endswith(f"did you mean {meant}?")
