"""
measure_gpu.py: the file that people with a GPU send, made here on a CPU with tiny models, and by
rows that fail, hang or have run before.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from program import ROOT

from dev import measure_gpu

PYTHON = sys.executable


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """main() with these rows in place of its own and a folder of its own: (output, the file)."""
    monkeypatch.setattr(measure_gpu, "OUT", tmp_path)
    # asks a fresh Python for torch, and git for the commit: seconds
    monkeypatch.setattr(measure_gpu, "output_of", lambda *_: "there")

    def run(rows: dict[str, tuple[int, list[str]]], *flags: str) -> tuple[str, dict]:
        monkeypatch.setattr(measure_gpu, "rows", lambda *_: rows)
        assert measure_gpu.main(["--dry_run", *flags]) == 0
        (path,) = tmp_path.glob("*.json")
        return capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))["rows"]

    return run


def says(code: str) -> list[str]:
    return [PYTHON, "-c", code]


def test_a_row_that_fails_hangs_or_is_not_there_does_not_stop_the_next_one(measured):
    """Of one that hangs, what it has printed is kept: which tests have passed."""
    hangs = says("import time; print('passed'); time.sleep(100)")
    rows = {"hangs": (2, hangs), "missing": (9, ["no-such-program"])}
    rows |= {"fails": (60, says("raise SystemExit('no memory')")), "last": (60, says("print(1)"))}
    _, found = measured(rows)
    assert list(found) == list(rows)
    assert found["hangs"]["exit"] == "ended after 2 s" and found["hangs"]["log"] == ["passed"]
    assert found["missing"]["exit"] not in (0, 1) and not found["missing"]["log"]
    assert (found["fails"]["exit"], found["fails"]["log"]) == (1, ["no memory"])
    assert (found["last"]["exit"], found["last"]["log"]) == (0, ["1"])


def test_the_next_call_goes_on_with_the_rows_that_are_missing(measured):
    ends_here = {"done": (60, says("print(1)")), "killed": (60, says("raise SystemExit(3)"))}
    measured(ends_here)
    again = {"done": (60, says("print(2)")), "killed": (60, says("print(3)"))}
    output, found = measured(again | {"new": (60, says("print(4)"))})
    assert "done: measured before" in output
    assert [row["log"] for row in found.values()] == [["1"], ["3"], ["4"]]


def test_when_the_time_is_up_no_further_row_begins(measured):
    rows = {"long": (60, says("import time; time.sleep(100)")), "late": (60, says("print(1)"))}
    output, found = measured(rows, "--minutes=0.01")
    assert found["long"]["exit"] == "ended after 1 s" and "late" not in found
    assert "late: no time left" in output


def test_the_file_names_no_folder_of_the_person_who_sends_it(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "somebody")
    monkeypatch.setattr("getpass.getuser", lambda: "somebody")
    paths = [str(tmp_path / "somebody" / "cache"), str(ROOT / "train.py")]
    paths += [
        f"{tmp_path}\\\\SOMEBODY\\\\a",
        f"{tmp_path / 'somebodyelse'}",
        "/tmp/pytest-of-somebody/b",
    ]
    paths += ["C:\\TEMP\\SOMEBO~1\\c"]
    _, found = measured({"row": (60, says(f"print(*{paths}, sep='\\n')"))})
    home, root, doubled, other, temporary, short = found["row"]["log"]
    assert (home, root) == (f"~{os.sep}cache", f".{os.sep}train.py")
    assert doubled.startswith("~") and other.endswith("somebodyelse")
    assert temporary == "/tmp/pytest-of-USER/b" and short == "C:\\TEMP\\USER\\c"


def test_where_torch_sees_no_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(measure_gpu, "output_of", lambda *words: words[-1].count("version"))
    assert measure_gpu.main([]) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no GPU here")


@pytest.mark.slow
def test_a_dry_run_brings_back_every_row_and_keeps_no_checkpoint(tmp_path, monkeypatch, capsys):
    """The rows themselves, each with a command that this project has."""
    monkeypatch.setattr(measure_gpu, "OUT", tmp_path)
    assert measure_gpu.main(["--dry_run", "--minutes=30"]) == 0, capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    failed = {name: row for name, row in rows.items() if row["exit"] != 0 and name != "driver"}
    assert not failed
    first_hour = ["check", "step", "train", "resume", "plan", "gpu_tests"]
    others = ["sweep", "fast_step", "real_shapes", "compiled_sweep"]
    assert list(rows) == ["machine", "driver", *first_hour, *others]
    assert rows["check"]["figures"]["verdict"].startswith("this machine trains right")
    for name in ("step", "fast_step"):
        assert rows[name]["figures"]["tokens_per_sec"] > 0
    steps = [r["iter"] for r in rows["resume"]["figures"] if r["kind"] == "step"]
    assert steps == sorted({*steps, 0, 35, 45, 49})  # of both processes, none twice
    assert any("resum" in line for line in rows["resume"]["log"])
    assert not list(path.with_suffix("").glob("run/*.pt"))
