"""
benchmarks/transfer.py: shares of tokens from the studies of results/transfer.sh.
"""

import json
import math

import pytest
from matplotlib.figure import Figure

from benchmarks import transfer

MATRICES = {"4x128": 12 * 4 * 128**2, "5x192": 12 * 5 * 192**2}
HEADER = dict(commit="0123456", torch="2.13.0", date="2026-11-22")
HEAD_START = dict(classic=1, muon=2, no_tables=4, no_values=5, no_pairs=6, fast=8)


@pytest.fixture
def ladder(tmp_path):
    """
    Studies in which a recipe's loss is 10 less the logarithm of its tokens times its head start.
    """
    for size, matrices in MATRICES.items():
        for length in (1, 2, 4) if size == "4x128" else (0.25, 1, 2):
            rows = []
            for name, times in HEAD_START.items():
                loss = 10 - math.log(times * length * matrices / 1000)
                rows.append(dict(name=name, tokens=length * matrices, val_loss=loss))
            folder = tmp_path / f"{size}-{length}"
            folder.mkdir()
            (folder / "ablation.json").write_text(json.dumps(dict(HEADER, variants=rows)))
    return tmp_path


def test_shares_are_those_of_the_curves(ladder, script):
    code, out, _ = script(transfer.main, ladder)
    assert code == 0
    shares = json.loads((ladder / "transfer.json").read_text())["shares"]
    for row in shares:
        assert row["share"] == pytest.approx(HEAD_START[row["of"]] / HEAD_START[row["by"]])
    found = {
        (row["by"], row["matrices"], row["length"]) for row in shares if row["of"] == "classic"
    }
    small, large = MATRICES.values()
    # fast would need half a token a parameter there, and its shortest run has one
    assert ("no_tables", small, 4) in found and ("fast", small, 4) not in found
    assert ("fast", large, 2) in found and ("no_tables", large, 0.25) not in found
    assert "no_values" in out and "0.625" in out
    assert (ladder / "transfer.png").stat().st_size > 10_000


def test_each_line_of_the_picture_is_in_its_legend(ladder, tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(Figure, "legend", lambda self, handles, labels, **_: named.extend(labels))
    rows = transfer.compare(transfer.read_runs(ladder))
    transfer.draw(tmp_path / "x.png", [("a", rows), ("b", rows)])
    lengths = {row["length"] for row in rows if row["of"] == "classic"}
    assert sorted(named) == [
        f"{length:g} tokens a parameter, {name}" for length in sorted(lengths) for name in "ab"
    ]


def test_a_single_rung_is_drawn_too(ladder, script):
    for folder in ladder.glob("5x192-*"):
        (folder / "ablation.json").unlink()
    assert script(transfer.main, ladder)[0] == 0


def test_several_ladders_are_read_apart_and_drawn_together(ladder, script, tmp_path):
    again = tmp_path / "again"
    study = json.loads((ladder / "4x128-2" / "ablation.json").read_text())
    for length in (1, 2, 4):
        folder = again / f"4x128-{length}"
        folder.mkdir(parents=True)
        for row in study["variants"]:
            row["tokens"] = length * MATRICES["4x128"]
            row["val_loss"] = 9 - math.log(HEAD_START[row["name"]] * row["tokens"] / 1000)
        (folder / "ablation.json").write_text(json.dumps(study))
    assert script(transfer.main, ladder, again)[0] == 0
    for folder, count in (ladder, 2), (again, 1):
        shares = json.loads((folder / "transfer.json").read_text())["shares"]
        assert len({row["matrices"] for row in shares}) == count
    assert (ladder / "transfer.png").exists() and not (again / "transfer.png").exists()


def test_a_folder_without_studies_is_one_line(tmp_path, script):
    code, _, err = script(transfer.main, tmp_path)
    assert code == 2 and len(err) == 1 and "no share is known" in err[0]
