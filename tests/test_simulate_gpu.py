"""
Check the recorded results of training on simulated GPUs (dev/simulate_gpu), and that the docs show
them.
"""

import subprocess
import sys

import pytest
from program import ROOT

from dev.simulate_gpu import run

ROWS = run.read_results()


def test_the_results_hold_every_simulated_row_with_its_current_command():
    assert list(ROWS) == list(run.ROWS)
    for name, row in run.ROWS.items():
        assert ROWS[name]["command"] == run.command_of(row)


@pytest.mark.parametrize("name", ROWS)
def test_training_on_a_simulated_gpu_never_waits_or_recompiles(name):
    """
    Expect two compiled graphs in a whole run, to train and to evaluate, and one in a row that only
    trains. Rows without torch.compile have none.
    """
    row, compiled = ROWS[name], "compiled_gb" in ROWS[name]
    assert row["waits"] == 0
    assert row["graphs"] == compiled * (2 if run.ROWS[name].whole else 1)
    assert row["graph_breaks"] == row["recompilations"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", run.TABLES)
def test_the_tables_in_the_docs_show_the_simulated_rows(page):
    """Check that the tables are up to date. `python dev/simulate_gpu/run.py --docs` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert run.with_tables(text, run.TABLES[page]) == text


def test_the_nanogpt_row_says_what_it_needs_and_downloads_nothing(tmp_path):
    folder = tmp_path / "folder"
    command = [
        sys.executable,
        ROOT / "dev/simulate_gpu/run.py",
        "4070-nanogpt",
        f"--folder={folder}",
    ]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert "--nanogpt= (git clone https://github.com/karpathy/nanoGPT)" in process.stdout
    assert not folder.exists()


def test_a_row_is_stale_when_its_configuration_or_code_changes(tmp_path, monkeypatch):
    """Keep a row when only a comment changes."""
    row, names = run.ROWS["4070-fast"], ["train.py", "model.py", "model_fast.py", "data/loader.py"]
    names += [f"training/{name}.py" for name in ("compiled", "hardware")]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    today = run.fingerprint(row)
    assert run.fingerprint(run.Row("4070", "fast124m_3060", whole=True)) != today
    code = (tmp_path / "model_fast.py").read_text()
    (tmp_path / "model_fast.py").write_text(code + "# more\n")
    assert run.fingerprint(row) == today
    (tmp_path / "model_fast.py").write_text(code + "more = 1\n")
    assert run.fingerprint(row) != today
