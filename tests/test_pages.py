"""
Check README, docs/ and results/: links lead somewhere, commands parse, the files and flags that
they name exist.
"""

import ast
import itertools
import re
from pathlib import Path

import doc_pages
import pytest
from doc_pages import GUIDES, PAGES, page_name, read
from program import FOLDERS, ROOT

from configurator import load_config

# -----------------------------------------------------------------------------
# Links, commands, names


def anchors(page: Path) -> set[str]:
    """
    Return the anchors that GitHub makes of the headings: lower case, no punctuation, hyphens for
    spaces.
    """
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_relative_link_on_a_page_leads_to_a_file_and_heading_that_exist(page):
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", read(page))]
    here = [(page.parent / file if file else page, anchor) for file, _, anchor in links]
    lost = [
        (file, anchor)
        for (file, anchor), (name, *_) in zip(here, links, strict=True)
        if not name.startswith(("http://", "https://"))
        and not (file.exists() and (not anchor or anchor in anchors(file)))
    ]
    assert lost == []


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_every_command_on_a_page_has_scripts_configs_and_flags_that_exist(page):
    commands = doc_pages.command_lines(page)
    made = [file for c in commands for mark, file in itertools.pairwise(c) if mark == ">"]
    made += re.findall(r"^cp \S+ (\S+)$", read(page), re.MULTILINE)
    for command in commands:
        script, *words = command
        assert (ROOT / script).is_file(), command
        flags = [word for word in words if word.startswith("--")]
        unknown = {flag[2:].partition("=")[0] for flag in flags} - doc_pages.flags_of(command)
        assert not unknown, command
        configs = [w for w in words if w.startswith("config/") and w not in made]
        assert all((ROOT / config).is_file() for config in configs), command
        if script == "train.py" and flags != ["--help"] and page.name != "hacking.md":
            # own_text.py looks at a text, which is not here
            files = [str(ROOT / config) for config in configs if config != "config/own_text.py"]
            load_config([*files, *flags])


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_every_project_file_that_a_page_names_with_its_folder_exists(page):
    """Leave out config/ and data/, in which the pages' commands also make new files."""
    folder = r"(?<![\w/])(?:common|dev|machine|results|run|tests|docs)/"
    named = {*re.findall(rf"{folder}[\w/]+\.(?:py|md|csv|json|png)\b", read(page))}
    assert [file for file in named if not (ROOT / file).exists()] == []


def strings(node: ast.AST) -> list[str]:
    """Return the strings in a program without its docstrings, with ... for an f-string's values."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
        return ["".join(parts)]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    children = [child for child in ast.iter_child_nodes(node) if not is_docstring(child)]
    return [text for child in children for text in strings(child)]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_troubleshooting_quotes_messages_that_the_program_prints():
    """Other programs' messages have the program's name before them."""
    page = read(ROOT / "docs/troubleshooting.md")
    tables = re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \| ", "".join(tables), re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall("`(.*?)`", cell)]
    paths = [path for name in FOLDERS for path in (ROOT / name).glob("*.py")]
    printed = [text for path in paths for text in strings(ast.parse(read(path)))]
    assert len(quoted) >= 3
    for message in quoted:
        said = message.removeprefix("error: ")
        assert any(said in text for text in printed), message
