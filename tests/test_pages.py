"""
Check README, docs/ and results/: links lead somewhere, commands parse, the files and flags that
they name exist.
"""

import ast
import itertools
import re
import tomllib
from pathlib import Path

import doc_pages
import pytest
import yaml
from doc_pages import GUIDES, PAGES, README, page_name, read
from packaging.requirements import Requirement
from program import ROOT

from configurator import load_config

FOLDERS = ("common", "data", "machine", "run")  # with the program's modules

# -----------------------------------------------------------------------------
# Links, commands, names


def anchors(page: Path) -> set[str]:
    """
    Return the anchors that GitHub makes of the headings: lower case, no punctuation, hyphens for
    spaces.
    """
    headings = re.findall(r"^#+ (.*)$", doc_pages.without_blocks(page), re.MULTILINE)
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
        configs = [word for word in words if word.startswith("config/")]
        assert all(config in made or (ROOT / config).is_file() for config in configs), command
        if script == "train.py" and flags != ["--help"] and page.name != "hacking.md":
            # a config that the page makes is much like shakespeare_char.py, and so is one that
            # looks at a text
            others = [*made, "config/own_text.py"]
            files = [
                "config/shakespeare_char.py" if config in others else config for config in configs
            ]
            load_config([*(str(ROOT / file) for file in files), *flags])


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_every_project_file_that_a_page_names_with_its_folder_exists(page):
    """Leave out config/ and data/, in which the pages' commands also make new files."""
    folder = r"(?<![\w/])(?:common|dev|machine|results|run|tests|docs)/"
    named = {*re.findall(rf"{folder}[\w/]+\.(?:py|md|csv|json|png)\b", read(page))}
    assert [file for file in named if not (ROOT / file).exists()] == []


def strings(path: Path) -> set[str]:
    """Return the strings in a Python file, of f-strings the text around values. No docstrings."""
    nodes = [*ast.walk(ast.parse(read(path)))]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = {node for node in nodes if isinstance(node, ast.Constant)} - docstrings
    return {node.value for node in constants if isinstance(node.value, str)}


def test_troubleshooting_quotes_messages_that_the_program_prints():
    """Other programs' messages have the program's name before them."""
    page = read("docs/troubleshooting.md")
    tables = re.findall(r"^\| message \|.*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    quoted = [message for cell in cells for message in re.findall("`(.*?)`", cell)]
    paths = [path for name in (".", *FOLDERS) for path in (ROOT / name).glob("*.py")]
    printed = {text for path in paths for text in strings(path)}
    assert quoted
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        assert all(any(part in text for text in printed) for part in parts), message


# -----------------------------------------------------------------------------
# Installing and testing


def test_pip_uv_and_ci_install_and_test_the_same():
    """
    Leave torch unpinned on Windows, where pip would replace a build with CUDA by PyPI's, which has
    none. Bound Python for uv, which would take one that the tested torch does not support.
    """
    pins = [line for line in read("constraints.txt").splitlines() if not line.startswith("#")]
    (torch,) = [pin for pin in map(Requirement, pins) if pin.name == "torch"]
    binds = [torch.marker.evaluate({"sys_platform": name}) for name in ("linux", "darwin", "win32")]
    assert binds == [True, True, False]
    code = (ROOT / "machine").glob("*.py")
    texts = "".join(map(read, [*GUIDES, ".github/workflows/ci.yml", *code]))
    versions = re.findall(r"torch==([\d.]+)", texts)
    assert len(versions) >= 4 and {f"=={version}" for version in versions} == {str(torch.specifier)}

    (command,) = re.findall("^pytest .*$", read(README), re.MULTILINE)
    assert command in read(".ci/run") and command in read("CONTRIBUTING.md")
    assert f"\nuv run --extra dev {command}\n" in read(README)
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    steps = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in steps["linux"] and command in steps["others"]

    settings = tomllib.loads(read("pyproject.toml"))
    project = settings["project"]
    assert settings["tool"]["uv"]["constraint-dependencies"] == pins
    groups = {"": project["dependencies"], "-dev": project["optional-dependencies"]["dev"]}
    for name, ours in groups.items():
        lines = [
            line.partition("#")[0].strip() for line in read(f"requirements{name}.txt").splitlines()
        ]
        assert ours == [line for line in lines if line and not line.startswith("-r")]
    (oldest, newest) = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", read("docs/install.md"))[0]
    assert project["requires-python"] == f">=3.{oldest},<3.{int(newest) + 1}"
