"""
Train on a small text of your own: what is held out for validation, the config that prepare_text.py
writes, a sample, and the documented fine-tuning.
"""

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest
from cases import slow_but
from char_dataset import train_short
from doc_pages import README, command_lines
from documents import check_folder, write_parquet
from hf_reference import random_gpt2
from program import ROOT, Run, refused, run, write_tokens

import train
from configurator import load_config
from data import prepare_text

LINES = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer\n"
CPU = ["--device=cpu", "--dtype=float32"]


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(*arguments) -> str:
    """Run prepare_text.py in this process and return the last line it prints."""
    result = run("data/prepare_text.py", *arguments)
    assert (result.code, result.err) == (0, ""), result
    return result.out.splitlines()[-1]


# -----------------------------------------------------------------------------
# What is held out for validation


@pytest.mark.parametrize(
    "text, begins",
    [
        ("\n\n".join(f"paragraph {i} " * 5 + "\nand a line" for i in range(40)), ("paragraph",)),
        ("\n".join(f"line {i} " * 5 for i in range(100)), ("line",)),
        ("two words, " * 300, ("two", "words")),
        ("x" * 3000, ("x",)),
    ],
    ids=["paragraphs", "lines", "words", "letters"],
)
def test_the_end_held_out_from_a_single_document_starts_at_a_paragraph_line_or_word(text, begins):
    """Split a text that has none of these between two letters."""
    Path("book.txt").write_text(text)
    prepare("book.txt", "--out=out", "--val_fraction=0.25")
    (val,) = check_folder(Path("out"), [text])
    assert val.startswith(begins)
    # up to half as much again is held out, to begin at a good place
    assert 0.25 <= len(val) / len(text) <= 0.375


TEXTS = {
    # in six made-up languages, one after the other: the first texts alone would all be in one
    "files": [f"{letter}{i} " * (100 + 30 * i) for letter in "abcdef" for i in range(8)],
    "files of equal size": [f"{i} " * 5000 for i in range(10)],
    "short rows of a file": [f"{i // 100} row {i} " * (i % 7 + 2) for i in range(1000)],
}


@pytest.mark.parametrize("name", TEXTS)
def test_validation_is_spread_over_the_whole_text(name):
    texts = TEXTS[name]
    if "rows" in name:
        write_parquet(Path("in/a.parquet"), texts)
    else:
        Path("in").mkdir()
        for i, text in enumerate(texts):
            Path(f"in/{i:02}.txt").write_text(text)
    prepare("in", "--out=out")
    val = check_folder(Path("out"), texts)
    assert {text[0] for text in val} == {text[0] for text in texts}
    # at the end, up to a sixteenth of the 5% is still owed, or is an advance
    assert 0.045 <= sum(map(len, val)) / sum(map(len, texts)) < 0.055
    if "rows" in name:  # short documents are held out whole
        assert set(val) < set(texts)
        numbers = [texts.index(text) for text in val]
        assert max(b - a for a, b in pairwise([0, *numbers, 1000])) < 150


def test_a_text_too_small_for_the_quickstart_is_refused_and_leaves_no_dataset():
    assert load_config([str(ROOT / "config/quickstart.py")]).block_size == 128
    Path("a.txt").write_text("x" * 300)
    said = "16 tokens for validation and 286 for training", "about 2,600 tokens in all"
    refused(run("data/prepare_text.py", "a.txt"), *said)
    Path("a.txt").write_text("x" * 3000)
    few = run("data/prepare_text.py", "a.txt", "--val_fraction=0.01")
    refused(few, "each needs at least 129; give more text", ", or --val_fraction=0.086")
    assert not list(Path("data").glob("*"))
    prepare("a.txt", "--val_fraction=0.086")


# -----------------------------------------------------------------------------
# A config for your text


@pytest.mark.parametrize("tokenizer", slow_but("byte", of=["byte", "bpe:300"]))
def test_the_documented_commands_prepare_train_and_sample_your_own_text(tokenizer):
    """
    Type README's commands with another file name and fewer iterations. Preparing again must not
    overwrite the config.
    """
    Path("my text.txt").write_text(LINES * 300)
    given = ["my text.txt", f"--tokenizer={tokenizer}", "--write=config/my.py"]
    assert prepare(*given) == "next: python train.py config/my.py"
    written = Path("config/my.py").read_text()
    result = run("train.py", "config/my.py", "--max_iters=2", "--sample_tokens=5", *CPU)
    assert result.code == 0
    (command,) = re.findall("^# python (sample.*)$", written, re.MULTILINE)
    words = shlex.split(command)
    result = run(*words, "--start=To", "--max_new_tokens=9", "--device=cpu")
    assert result.code == 0 and result.out.startswith("To")
    refused(run("data/prepare_text.py", "my text.txt", "--write=config/my.py"), "another name")
    assert Path("config/my.py").read_text() == written


@pytest.mark.parametrize(
    "name, flags, folder",
    [
        ("my_notes", [], "my_notes"),
        ("notes_bpe", ["--tokenizer=bpe:300"], "notes_bpe"),
        ("elsewhere", ["--out=data/my_notes"], "my_notes"),
        *((name, [], name) for name in ('a"b', "it's", "a{b}", "$(x) y")),
    ],
)
def test_a_written_config_names_its_dataset_and_run_after_its_own_file(name, flags, folder):
    """Name the dataset after --out instead, if it is given."""
    Path("my_notes.txt").write_text(LINES * 300)
    prepare("my_notes.txt", f"--write=new/config/{name}.py", *flags)
    c = load_config([f"new/config/{name}.py"])
    assert (c.dataset, c.out_dir) == (f"data/{folder}", f"out/{name}")
    assert [path.name for path in Path("data").iterdir()] == [folder]


def written(kind: str, tokens: int):
    """Return the config that is written for a dataset with this many training tokens."""
    tokenizer = SimpleNamespace(kind=kind, vocab=dict(byte=256, bpe=4096)[kind])
    dataset = PureWindowsPath("data") / "my_notes"
    prepare_text.write_config(Path("my.py"), dataset, tokenizer, tokens)
    return load_config(["my.py"])


@pytest.mark.parametrize("tokens, most", [(250, 1), (20_000, 10), (10_000_000, 245)])
def test_a_written_config_evaluates_about_ten_times_or_after_each_iteration(tokens, most):
    """Find the best model, although the validation loss of a small text soon rises again."""
    c = written("byte", tokens)
    assert 1 <= c.eval_interval <= most and c.max_iters < 11 * c.eval_interval
    assert c.eval_tokens == 2**18  # all of validation, up to 5 MB of text


@pytest.mark.parametrize(
    "tokens, kind, dropout, iterations, width",
    [
        (300_000, "byte", 0.2, 1465, 128),  # ten epochs
        (499_999, "byte", 0.2, 2442, 128),
        (500_000, "byte", 0.1, 2442, 128),  # 5M tokens
        (850_000, "byte", 0.0, 2442, 128),
        (499_999, "bpe", 0.2, 1539, 160),
        (849_999, "bpe", 0.1, 1539, 160),
    ],
)
def test_a_written_config_sets_model_size_dropout_and_iterations_by_tokenizer_and_tokens(
    tokens, kind, dropout, iterations, width
):
    c = written(kind, tokens)
    assert c.dataset == "data/my_notes"  # without a Windows path's backslashes
    assert (c.dropout, c.max_iters) == (dropout, iterations)
    assert (c.n_layer, c.n_embd) == ({128: 3, 160: 4}[width], width)
    assert (c.iter_tokens, c.block_size) == (2048, prepare_text.LEAST_TOKENS_WRITTEN - 1)


def test_a_written_config_trains_on_the_smallest_text_that_is_accepted():
    """Train for one iteration with one window per split. One byte less of text is refused."""
    least = prepare_text.LEAST_TOKENS_WRITTEN
    half = ["a.txt", "--val_fraction=0.5", "--write=my.py"]
    Path("a.txt").write_text("x" * (2 * least - 3))  # plus two end-of-text tokens
    refused(run("data/prepare_text.py", *half), f"each needs at least {least}; give more text")
    assert not Path("my.py").exists()
    Path("a.txt").write_text("x" * (2 * least - 2))
    prepare(*half)
    assert train.main(["my.py", "--sample_tokens=0", "--max_iters=1", *CPU]) == 0


def test_a_run_that_is_never_better_than_its_initial_weights_leaves_no_best_pt():
    data, ran = write_tokens(Path("data"), [3000], [700]), Run("run")
    harmful = dict(max_iters=4, eval_interval=2, learning_rate=1.0, grad_clip=0.0)
    train_short(data, ran.out_dir, **harmful)
    before, *others = ran.evals("val_loss")
    assert min(others) > before and not Path("run/best.pt").exists()


# -----------------------------------------------------------------------------
# Fine-tuning on your text


def fine_tuning(weights: str) -> list[list[str]]:
    """
    Return the arguments of each command in README and docs/own_text.md that starts from these
    weights.
    """
    pages = (README, ROOT / "docs" / "own_text.md")
    commands = [command[1:] for page in pages for command in command_lines(page)]
    flag, found = "--init_from=", []
    for command in commands:
        given = [word.removeprefix(flag) for word in command if word.startswith(flag)]
        if not given and command[:1] == ["config/finetune_gpt2.py"]:
            given = ["gpt2"]
        if given == [weights]:
            found.append(command)
    assert found
    return found


def test_the_documented_fine_tuning_of_gpt2_runs(monkeypatch):
    """
    Use a small random model with GPT-2's vocabulary, so that nothing is downloaded. Then resume the
    run as docs/own_text.md says.
    """
    Path("config").mkdir()
    shutil.copy(ROOT / "config" / "finetune_gpt2.py", "config")
    random_gpt2(Path("hub"), vocab_size=50257)
    monkeypatch.setattr("training.pretrained.fetch", lambda name: Path("hub"))
    commands = [command for command in fine_tuning("gpt2") if "config/finetune_gpt2.py" in command]
    assert commands
    for number, arguments in enumerate(commands):
        (dataset,) = [word for word in arguments if word.startswith("--dataset=")]
        folder = write_tokens(Path("data", dataset.partition("=")[2]), [3000], [700], vocab=50257)
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest.replace('"byte"', '"gpt2"'))
        small = ["--tokens_per_iter=128", "--warmup_iters=0", "--eval_tokens=256", *CPU]
        steps = ["--eval_interval=3", "--learning_rate=1e-3", "--compile=False", "--max_iters=6"]
        ran = Run(f"run{number}")
        words = [*arguments, *small, *steps, "--sample_tokens=0", f"--out_dir={ran.out_dir}"]
        assert train.main(words) == 0
        before, *_, after = ran.evals("val_loss")
        assert after < before
        assert train.main([*words, "--max_iters=7"]) == 0
        assert ran.end["iters"] == 7


@pytest.mark.slow
def test_the_documented_fine_tuning_of_your_own_model_runs():
    steps = ["--max_iters=8", "--eval_interval=4", "--batch_size=2", "--eval_tokens=512"]
    short = [*steps, "--sample_tokens=0", *CPU]
    for name, text in (("my", LINES * 100), ("letters", LINES[::-1] * 100)):
        Path(f"{name}.txt").write_text(text)
    prepare("my.txt", "--write=config/my.py", "--val_fraction=0.2")
    assert train.main(["config/my.py", *short]) == 0
    prepare("letters.txt", "--val_fraction=0.2")
    (arguments,) = fine_tuning("out/my/best.pt")
    assert train.main([*arguments, *short]) == 0
    before, *_, after = Run("out/letters").evals("val_loss")
    assert after < before


def test_a_config_name_with_a_line_break_is_refused():
    Path("a.txt").write_text(LINES * 300)
    refused(run("data/prepare_text.py", "a.txt", "--write=a\nb.py"), "--write")
    assert not Path("data").exists()
