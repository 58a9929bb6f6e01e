"""
Train on a small text of your own: what is held out for validation, the documented commands, and
fine-tuning.
"""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from doc_pages import README, command_lines
from documents import check_folder, write_jsonl
from hf_reference import random_gpt2
from program import ROOT, Run, refused, run, write_tokens

import train
from configurator import load_config
from data.shards import open_dataset

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
        write_jsonl(Path("in/a.jsonl"), texts)
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


# -----------------------------------------------------------------------------
# Training on your text


def test_the_documented_commands_prepare_train_and_sample_your_own_text():
    Path("my_notes.txt").write_text(LINES * 300)
    shutil.copytree(ROOT / "config", "config")
    page = [command for command in command_lines(README) if "my_notes" in " ".join(command)]
    (script, *prepares), (trains, *words), (samples, *flags) = page
    prepare(*prepares)
    short = ["--max_iters=2", "--eval_tokens=4096", "--sample_tokens=5", *CPU]
    assert run(trains, *words, *short).code == 0
    result = run(samples, *flags, "--start=To", "--max_new_tokens=9", "--device=cpu")
    assert (script, result.code) == ("data/prepare_text.py", 0) and result.out.startswith("To")


@pytest.mark.parametrize(
    "tokenizer, letters, layers, most, dropout",
    [
        ("byte", 300_000, 3, 5_000_000, 0.2),
        ("byte", 800_000, 3, 5_000_000, 0.1),
        ("byte", 1_100_000, 3, 5_000_000, 0.0),
        ("bpe:260", 800_000, 4, 3_150_000, 0.2),
    ],
)
def test_the_shipped_config_suits_the_texts_size(tokenizer, letters, layers, most, dropout):
    """The last line of a preparation is the command that trains."""
    shutil.copytree(ROOT / "config", "config")
    Path("mine.txt").write_text("ab" * (letters // 2))
    said = prepare("mine.txt", f"--tokenizer={tokenizer}")
    assert said == "next: python train.py config/own_text.py --dataset=mine"
    c = load_config(said.split()[3:])
    assert (c.dataset, c.out_dir, c.n_layer, c.dropout) == ("mine", "out/mine", layers, dropout)
    tokens = len(open_dataset("mine").train)
    assert c.max_iters == 1 + min(most, 10 * tokens) // 2048
    assert (c.block_size, c.eval_interval) == (256, 1 + c.max_iters // 10)


@pytest.mark.parametrize(
    "dataset, folder", [("mine", "data/mine"), ("elsewhere/mine", "elsewhere/mine")]
)
def test_the_shipped_config_refuses_to_guess_the_size_of_no_text(dataset, folder):
    result = run("train.py", f"{ROOT}/config/own_text.py", f"--dataset={dataset}")
    refused(result, f"there is no {folder}/manifest.json", "give --dataset=NAME")


# -----------------------------------------------------------------------------
# Fine-tuning on your text


def test_the_documented_fine_tuning_of_gpt2_runs(monkeypatch):
    """
    Use a small random model in GPT-2's place, so that nothing is downloaded. Then resume the run as
    docs/own_text.md says.
    """
    Path("config").mkdir()
    shutil.copy(ROOT / "config" / "finetune_gpt2.py", "config")
    random_gpt2(Path("hub"), vocab_size=384)
    monkeypatch.setattr("run.pretrained.fetch", lambda name: Path("hub"))
    pages = (README, ROOT / "docs" / "own_text.md")
    commands = [command[1:] for page in pages for command in command_lines(page)]
    commands = [words for words in commands if words[:1] == ["config/finetune_gpt2.py"]]
    commands = [words for words in commands if "--init_from" not in " ".join(words)]
    assert commands
    for number, arguments in enumerate(commands):
        (dataset,) = [word for word in arguments if word.startswith("--dataset=")]
        folder = write_tokens(Path("data", dataset.partition("=")[2]), [3000], [700], vocab=256)
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest.replace('"byte"', '"unknown"'))
        small = ["--tokens_per_iter=128", "--warmup_iters=0", "--eval_tokens=256", *CPU]
        steps = ["--eval_interval=3", "--learning_rate=1e-3", "--compile=False", "--max_iters=6"]
        ran = Run(f"run{number}")
        words = [*arguments, *small, *steps, "--sample_tokens=0", f"--out_dir={ran.out_dir}"]
        assert train.main(words) == 0
        before, *_, after = ran.evals("val_loss")
        assert after < before
        assert train.main([*words, "--max_iters=7"]) == 0
        assert ran.end["iters"] == 7
