"""What training asked of simulated cards (tests/nullgpu), and that the docs say just that."""

import pytest
from helpers import ROOT
from nullgpu import run

ROWS = run.read_results()


def test_every_row_has_run():
    assert list(ROWS) == list(run.ROWS)
    for name, row in run.ROWS.items():
        assert ROWS[name]["command"] == run.command_of(row)


@pytest.mark.parametrize("name", ROWS)
def test_an_iteration_waits_nowhere_and_compiles_nothing_again(name):
    """A whole run has a graph to train and one to evaluate, the step alone has one."""
    row, compiled = ROWS[name], "compiled_gb" in ROWS[name]
    assert row["waits"] == 0
    assert row["graphs"] == compiled * (2 if run.ROWS[name].whole else 1)
    assert row["graph_breaks"] == row["recompilations"] == 0


@pytest.mark.parametrize("page", run.TABLES)
def test_the_docs_tables_are_those_of_the_rows(page):
    """`python tests/nullgpu/run.py --docs` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert run.with_tables(text, run.TABLES[page]) == text
