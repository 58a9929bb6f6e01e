"""
Check the estimated figures on the pages against `bench.py plan`.
"""

import re
import shlex

import pytest
from doc_pages import GUIDES, code_blocks, holds, numbers, page_name, plan, read
from program import ROOT

from configurator import load_config
from tools.curves import open_run


def test_the_fast_config_has_all_settings_of_the_public_runs():
    """Keep these runs comparable: compare.py does not compare runs with other settings."""
    band = open_run(ROOT / "results/public_runs/fineweb_124m_fast_h200.csv")
    config = load_config([str(ROOT / "config/fast.py")])
    assert band.config["optimizer"] == "muon"
    assert {key: getattr(config, key) for key in band.config} == band.config
    # no token is read twice
    assert band.start["train_tokens"] == config.max_iters * config.tokens_per_iter


# -----------------------------------------------------------------------------
# Estimated, in table rows that name a config: words of a column's head, and its values


def hours_with_range(p: dict) -> list[float]:
    """Return the hours, followed by their range if the source of the pace has one."""
    low, high = p["hours_range"]
    return [p["hours"]] if low == high else [p["hours"], low, high]


def total_or_range(p: dict) -> list[float]:
    """Return the total hours or, if the published speeds differ by a tenth, their range."""
    low, high = (hours / p["hours"] * p["hours_total"] for hours in p["hours_range"])
    return [p["hours_total"]] if high < 1.1 * low else [low, high]


COLUMNS = {
    "hours": hours_with_range,
    "to the end": total_or_range,
    "memory": lambda p: [p["vram_gib"]],
    "parameters": lambda p: [p["params"] / 1e6],
}
CONFIG = re.compile(r"(?<=[`/])(fast|gpt\d+m_\w+)\b(?:\.py)?((?: --\w+=\w+)*)")


def planned_cells():
    """
    Yield (page, config and flags, column, cell) for each cell that plan computes, in the table rows
    that name a config, or whose head names one. A cell that says "measured" is left out.
    """
    for page in GUIDES:
        for table in re.findall(r"(?:^\|.*\n)+", read(page), re.MULTILINE):
            head, _, *rows = table.splitlines()
            for row in rows:
                if not (named := CONFIG.search(row) or CONFIG.search(head)):
                    continue
                # without --gpu, the row's first cell names the GPU, or else it is a 4070
                card = re.match(r"\| ([A-Z][\w ]*\w)", row)
                words = (named[1], f"--gpu={card[1] if card else '4070'}", *named[2].split())
                for title, cell in zip(head.split("|"), row.split("|"), strict=True):
                    for column in COLUMNS:
                        if column in title and numbers(cell) and "measured" not in cell:
                            yield page_name(page), words, column, cell


PLANNED = [*planned_cells()]


@pytest.mark.parametrize("page, words, column, cell", PLANNED)
def test_a_planned_figure_in_a_table_is_what_plan_computes(page, words, column, cell):
    figures = COLUMNS[column](plan(*words))
    assert holds(cell, figures) and len(numbers(cell)) == len(figures)


def examples_of_plan():
    """
    Yield (page, config and flags, lines shown) for each code block that begins with a plan command.
    """
    mark = "$ python bench.py plan config/"
    for page in GUIDES:
        for block in code_blocks(page):
            if block.startswith(mark):
                command, *shown = block.removeprefix(mark).splitlines()
                yield page_name(page), shlex.split(command), shown


EXAMPLES = [*examples_of_plan()]


@pytest.mark.parametrize("page, words, shown", EXAMPLES)
def test_an_example_of_plan_on_a_page_shows_the_figures_that_the_command_prints(page, words, shown):
    config, *flags = words
    printed = plan(config.removesuffix(".py"), *flags)["out"].splitlines()
    assert {(*numbers(line),) for line in shown} <= {(*numbers(line),) for line in printed}
