"""results/: an index of questions, entries that answer first, and data that somebody cites."""

import json
import re

import pytest
from helpers import ROOT

RESULTS = ROOT / "results"
INDEX = RESULTS / "README.md"
TOPICS = sorted(page for page in RESULTS.glob("*.md") if page != INDEX)
PARTS = ["Answer", "Setup", "Caveat"]


def entries() -> list[tuple[str, str]]:
    """(name, text) of every entry of the topic files, from its heading on."""
    found = []
    for page in TOPICS:
        for entry in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
            found.append((f"{page.stem}: {entry.splitlines()[0][3:]}", entry.rstrip()))
    return found


def index_rows() -> list[list[str]]:
    """The cells of every row of the index: question, answer, date, data, still true?"""
    lines = re.findall(r"^\| (.*) \|$", INDEX.read_text(encoding="utf-8"), re.M)
    return [
        cells
        for cells in (line.split(" | ") for line in lines)
        if cells[0] != "question" and not cells[0].startswith("---")
    ]


@pytest.mark.parametrize("entry", [pytest.param(text, id=name) for name, text in entries()])
def test_an_entry_is_a_question_with_its_answer_first(entry):
    lines = entry.splitlines()
    assert re.fullmatch(r"## .*\?( \((negative|simulated)\))?", lines[0])
    assert re.findall(r"^\*\*(\w+)\.\*\*", entry, re.M) == PARTS
    assert lines[2].startswith("**Answer.**")
    assert re.search(r"2026-\d\d-\d\d", entry.partition("**Setup.**")[2])
    assert len(lines) <= 25
    assert len(re.findall(r"^\| ---", entry, re.M)) <= 1  # tables


def test_results_stay_short_enough_to_look_through():
    pages = [INDEX, *TOPICS]
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= 700


@pytest.mark.parametrize("page", [INDEX, *TOPICS], ids=lambda page: page.stem)
def test_no_line_of_prose_is_wider_than_100_characters(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in index_rows()])
def test_a_row_of_the_index_has_a_date_a_source_and_a_state(row):
    question, answer, date, data, state = row
    assert answer and state
    assert question.endswith(("?", "(negative)"))
    assert re.fullmatch(r"2026-\d\d-\d\d", date)
    files = re.findall(r"[\w/]+\.(?:json|md|png)", data)
    assert files or data in ("full log", "the same")
    assert all((RESULTS / name).is_file() for name in files)


def test_every_data_file_is_in_the_index():
    text = INDEX.read_text(encoding="utf-8")
    files = [path for path in RESULTS.rglob("*") if path.suffix in (".json", ".png")]
    names = {path.relative_to(RESULTS).as_posix() for path in files}
    assert names
    assert {name for name in names if f"`{name}`" not in text} == set()


STUDIES = ["transfer", "transfer_again", "transfer_sources"]  # the columns of the table, two each


def ratios(study: str, of: str, by: str) -> dict[tuple[str, str], float]:
    """(size, tokens per parameter) of the recipe `of` -> the part of them that `by` needs"""
    rows = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["shares"]
    rows = [row for row in rows if (row["of"], row["by"]) == (of, by)]
    return {(f"{r['matrices'] / 1e6:.2f}M", f"{r['length']:g}"): r["share"] for r in rows}


def table_rows(pattern: str) -> list[list[str]]:
    """The cells of the rows of recipe.md that match, from their beginning on."""
    text = (RESULTS / "recipe.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^\| ({pattern}.*) \|$", text, re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f}%"


def test_the_token_ratios_are_those_of_the_data():
    rows = table_rows(r"[\d.]+M \| \d")
    assert len(rows) == 7
    for size, length, *cells in rows:
        key = size, length.split()[0]
        measured = [
            shown(ratios(study, "classic", by).get(key))
            for study in STUDIES
            for by in ("fast", "no_tables")
        ]
        assert [cell if cell != "below 13%" else "" for cell in cells] == measured, key


GROUPS = {
    "both tables and the key offset": ("no_tables", "fast"),
    "value embeddings alone": ("no_values", "fast"),
    "bigram embedding and key offset alone": ("no_pairs", "fast"),
    "all else, against Muon on a GPT-2": ("muon", "no_tables"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_components_save_is_what_was_measured(group):
    ((_, *header),) = table_rows("group")
    ((_, *cells),) = table_rows(group)
    found = ratios("transfer", *GROUPS[group])
    for column, cell in zip(header, cells, strict=True):
        size, length = re.match(r"([\d.]+M), (\d)", column).groups()
        ratio = found.get((size, length))
        assert cell == ("not known" if ratio is None else shown(1 - ratio)), column
