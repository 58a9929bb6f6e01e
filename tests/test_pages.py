"""
The pages for people who train: the keys, flags and figures that they name are the program's, and
their Python blocks run.
"""

import math
import pickle
import re
import shlex
from pathlib import Path

import pytest
from documents import manifest_of
from draw_hours import HOURS, PACES, rates
from helpers import ROOT
from program import run
from test_docs import after, code_blocks, rounds_to
from test_own_text import LINES, written

import bench
from configurator import FIELDS, find_keys
from data.shards import open_dataset
from sample import SampleConfig

DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_keys_page_names_keys_and_their_defaults():
    found = re.findall(r"\*\*`(\w+)`\*\* \(`([^`]*)`\)", page("keys.md"))
    assert len(found) > 30 and len(found) == page("keys.md").count("**`")
    for name, default in found:
        assert str(FIELDS[name].default) == default, name
    assert len(dict(found)) == len(found)


def test_the_sampling_page_lists_the_flags_of_sample_py():
    section = page("sampling.md").partition("## Flags")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", section, re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall(r"--(\w+)", names)}
    keys = find_keys(SampleConfig)
    assert shown.keys() == keys.keys() - {"init_from", "out_dir"}  # in the table before
    for name, default in shown.items():
        assert default.replace("a line end", "\n") == str(keys[name].default), name


def test_the_log_on_the_training_page_follows_from_the_quickstart():
    """32 sequences of 64 bytes in each iteration; see the same of README for the other figures."""
    text = page("training.md")
    (iteration,) = re.findall(r"^iter .*$", text, re.MULTILINE)
    number = int(re.match(r"iter (\d+):", iteration)[1])
    ms = float(re.search(r"time ([\d.]+)ms", iteration)[1])
    speed = float(re.search(r"tok/s ([\d,]+)", iteration)[1].replace(",", ""))
    assert ms / 1000 * speed == pytest.approx(32 * 64, rel=0.01)
    assert rounds_to(number * 32 * 64 / 1e6, re.search(r"tokens ([\d.]+)M", iteration)[1])
    (evaluation,) = re.findall(r"^step \d+: .*$", text, re.MULTILINE)
    loss = float(re.search(r"val loss ([\d.]+)", evaluation)[1])
    perplexity = float(re.search(r"perplexity ([\d.]+),", evaluation)[1])
    assert perplexity == pytest.approx(math.exp(loss), rel=2e-4)
    bits = float(re.search(r"([\d.]+) bits per byte", evaluation)[1])
    assert bits * math.log(2) == pytest.approx(loss * (1 + 1 / 20_000), abs=1e-4)


def test_the_training_page_lists_the_kinds_of_records():
    source = (ROOT / "training" / "log.py").read_text(encoding="utf-8")
    kinds = re.findall(r'self\.record\(\s*"(\w+)"', source)
    (line,) = re.findall(r"of\s+the\s+kinds\s+(.*?\bend`)", page("training.md"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == set(kinds)


def test_with_hours_the_schedule_takes_as_long_at_any_speed():
    """The picture of hours.md: by the clock the three speeds have one curve, otherwise none."""
    assert "](../results/hours.png)" in page("hours.md")
    assert (ROOT / "results" / "hours.png").stat().st_size > 10_000
    for flags, same in (([f"--hours={HOURS}"], True), ([], False)):
        ends = []
        for pace in PACES:
            hours, lr = rates(flags, pace)
            assert lr[0] == 0.025 and lr[-1] < 0.0001
            ends.append(hours[-1])
        assert (max(ends) - min(ends) < 0.01) is same


def test_the_tokens_that_plan_gives_to_eight_hours_are_the_page_s(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = [b for b in code_blocks(DOCS / "hours.md") if b.startswith("$ python bench.py plan")]
    command, line = block.splitlines()
    assert bench.main(shlex.split(command)[3:]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_the_rule_on_the_page_is_that_of_the_written_config(tmp_path):
    """Epochs and dropout at both ends of each row of own_text.md."""
    row = r"(\d+)(?: to (\d+))?"
    least = {"below 500,000": (315_000, 499_999), "below 850,000": (500_000, 849_999)}
    for start, sizes in least.items():
        cells = after("own_text.md", f"| {start} |").strip(" |").split(" | ")
        for cell, kind in zip(cells, ("byte", "bpe"), strict=False):
            epochs = []
            for tokens in sizes:
                c = written(tmp_path / f"{kind}{tokens}.py", kind, tokens)
                assert c.dropout == float(cells[2])
                epochs.append(c.max_iters * c.iter_tokens / tokens)
            first, last = re.fullmatch(row, cell).groups()
            assert [round(e) for e in epochs] == [int(first), int(last or first)]
    cells = after("own_text.md", "| more |").strip(" |").split(" | ")
    for cell, kind in zip(cells, ("byte", "bpe"), strict=False):
        c = written(tmp_path / f"{kind}.py", kind, 4_000_000)
        millions = float(re.fullmatch(r"as many as make ([\d.]+)M tokens", cell)[1])
        assert c.max_iters * c.iter_tokens / 1e6 == pytest.approx(millions, rel=0.001)
        assert c.dropout == float(cells[2])


def test_text_files_become_jsonl_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = code_blocks(DOCS / "data.md", "python")
    Path("texts/deep").mkdir(parents=True)
    texts = [f"{n}\n{LINES * 20}" for n in range(9)]
    for n, text in enumerate(texts):
        Path("texts", "deep" * (n % 2), f"{n}.txt").write_text(text)
    exec(block, {})
    result = run("data/prepare_text.py", "my.jsonl")
    assert result.code == 0, result.err
    shards = manifest_of(Path("data/my"))["shards"]
    assert sum(shard["bytes"] for shard in shards) == sum(map(len, texts))


def test_shakespeares_characters_are_made_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = code_blocks(DOCS / "own_text.md", "python")
    Path("input.txt").write_text(LINES * 20)
    exec(block, {})
    data = open_dataset("shakespeare_char")
    assert len(data.train) == len(LINES * 20) * 9 // 10
    assert pickle.loads(Path("data/shakespeare_char/meta.pkl").read_bytes())["vocab_size"] == (
        data.vocab
    )
