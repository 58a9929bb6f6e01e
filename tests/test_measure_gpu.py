"""
Check the file that people with a GPU send: dev/measure_gpu.py makes it here on a CPU with tiny
models, and with rows that fail, hang or have run before.
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
    """
    Return a function that runs main() with the given rows in its own folder and returns the output
    and the file's rows.
    """
    monkeypatch.setattr(measure_gpu, "OUT", tmp_path)
    # the real output_of asks a fresh Python for torch and git for the commit, which takes seconds
    monkeypatch.setattr(measure_gpu, "output_of", lambda *_: "there")

    def run(rows: dict[str, tuple[int, list[str]]], *flags: str) -> tuple[str, dict]:
        monkeypatch.setattr(measure_gpu, "rows", lambda *_: rows)
        assert measure_gpu.main(["--dry_run", *flags]) == 0
        (path,) = tmp_path.glob("*.json")
        return capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))["rows"]

    return run


def says(code: str) -> list[str]:
    return [PYTHON, "-c", code]


def test_a_row_that_fails_or_hangs_ends_no_other_and_the_next_call_measures_the_missing(measured):
    """Record how each row ended, and keep what a hanging one had printed."""
    hangs = says("import time; print('passed', flush=True); time.sleep(100)")
    rows = {"hangs": (2, hangs), "missing": (9, ["no-such-program"])}
    rows |= {"fails": (60, says("raise SystemExit('no memory')")), "last": (60, says("print(1)"))}
    _, found = measured(rows)
    assert found["hangs"]["exit"] == "ended after 2 s" and found["hangs"]["log"] == ["passed"]
    assert found["missing"]["exit"] not in (0, 1) and not found["missing"]["log"]
    assert (found["fails"]["exit"], found["fails"]["log"]) == (1, ["no memory"])
    again = {"last": (60, says("print(2)")), "fails": (60, says("print(3)")), "hangs": (60, hangs)}
    output, found = measured(again | {"late": (60, says("print(4)"))}, "--minutes=0.03")
    assert "last: measured before" in output and found["last"]["log"] == ["1"]
    assert found["fails"]["log"] == ["3"]
    assert "late: no time left" in output and "late" not in found


def test_the_file_hides_the_senders_name_and_home_folder(measured, tmp_path, monkeypatch):
    """
    Write ~ for the home folder and USER for the name in other paths, also in Windows' spellings.
    """
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


@pytest.mark.slow
def test_a_dry_run_measures_every_row_and_keeps_no_checkpoint(tmp_path, monkeypatch, capsys):
    """Run the real rows on a CPU with tiny models. All commands but nvidia-smi must succeed."""
    monkeypatch.setattr(measure_gpu, "OUT", tmp_path)
    assert measure_gpu.main(["--dry_run", "--minutes=30"]) == 0, capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    failed = {name: row for name, row in rows.items() if row["exit"] != 0 and name != "driver"}
    assert not failed
    assert rows["check"]["figures"]["verdict"].startswith("this machine trains correctly")
    for name in ("step", "step_twice_the_batch", "fast_step"):
        assert rows[name]["figures"]["tokens_per_sec"] > 0
    assert rows["matmul"]["log"][-1].startswith("float16 on cpu: ")
    steps = [r["iter"] for r in rows["resume"]["figures"] if r["kind"] == "step"]
    assert steps == sorted({*steps, 0, 35, 45, 49})  # steps of both processes, none twice
    assert any("resum" in line for line in rows["resume"]["log"])
    assert not list(path.with_suffix("").glob("run/*.pt"))
