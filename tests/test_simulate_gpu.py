"""
Check the recorded results of training on simulated GPUs (dev/simulate_gpu), and that the docs show
them.
"""

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
