"""
The house: which module may import which, what ruff and mypy check, and that every script starts.
"""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, start_process

from configurator import FIELDS

KEYS = 60


def files_of_the_house() -> list[str]:
    """Tracked, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout", allow_module_level=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


FILES = files_of_the_house()
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
# tests and config files are long lists, which nobody reads from end to end
CODE = [name for name in FILES if not name.startswith(("tests/", "config/"))]
TREES = {name: ast.parse(TEXTS[name]) for name in CODE}

# -----------------------------------------------------------------------------
# Imports

LIBRARY = ["common", "configurator", "data", "model", "model_fast", "training", "reports"]
# A folder, or a module of the root, and what it may import besides itself.
MAY_IMPORT = {
    "common": [],
    "configurator": ["common"],
    "data": ["configurator", "common"],
    "model": [],
    "model_fast": ["model"],
    "training": ["model", "model_fast", "data", "configurator", "common"],
    "reports": ["train", "training", "model", "model_fast", "data", "configurator", "common"],
    "train": LIBRARY,
    "sample": LIBRARY,
    "compare": LIBRARY,
    "convert": LIBRARY,
    "bench": ["train", *LIBRARY],
    "docs": ["train", *LIBRARY],
}
SCRIPTS = ["sample", "compare", "convert", "bench", "data.prepare_fineweb", "data.prepare_text"]
# imported where they are used, so that a machine with prepared shards can train without them
OPTIONAL = {"tiktoken", "datasets", "tokenizers", "matplotlib", "wandb", "tensorboard"}


def owner(file: str) -> str:
    """data/loader.py -> data, train.py -> train"""
    return file.split("/")[0].removesuffix(".py")


def imported_by(node: ast.AST) -> list[str]:
    """The modules that one statement imports, with their dots; `from data import x` is data.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where a name comes from"
        if (ROOT / node.module).is_dir():
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def imports(file: str) -> list[str]:
    """All modules that a file imports, also inside of functions."""
    return [module for node in ast.walk(TREES[file]) for module in imported_by(node)]


def is_part_of(module: str, names: list[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


@pytest.mark.upstream
def test_modules_import_only_what_the_design_allows():
    ours = {owner(file) for file in CODE}
    for file in CODE:
        allowed = [owner(file), *MAY_IMPORT[owner(file)]]
        for module in imports(file):
            if module.split(".")[0] in ours:
                assert is_part_of(module, allowed), f"{file} imports {module}"


def test_no_library_module_imports_a_script():
    for file in CODE:
        if owner(file) in [*LIBRARY, "train"]:
            found = [module for module in imports(file) if is_part_of(module, SCRIPTS)]
            assert not found, f"{file} imports {found}"


def test_common_needs_only_the_standard_library():
    for file in CODE:
        if owner(file) == "common":
            packages = {module.split(".")[0] for module in imports(file)}
            assert packages <= {*sys.stdlib_module_names, "common"}, file


def test_preparing_text_needs_no_torch():
    """Importing torch takes seconds, at each of the commands that prepare data."""
    for file in CODE:
        if owner(file) == "data" and file != "data/loader.py":
            assert not [module for module in imports(file) if module.split(".")[0] == "torch"], file
    code = "import sys, data.prepare_text, data.prepare_fineweb; sys.exit('torch' in sys.modules)"
    process = start_process("-c", code, cold=True)
    assert process.wait(60) == 0, "imports torch by way of another module"


def test_compare_needs_no_torch():
    """It is arithmetic: half of the time went to this import."""
    code = "import sys, compare; sys.exit('torch' in sys.modules)"
    process = start_process("-c", code, cold=True)
    assert process.wait(60) == 0, process.stderr.read()


def test_what_not_every_machine_has_is_imported_where_it_is_used():
    for file in CODE:
        top = [module for node in TREES[file].body for module in imported_by(node)]
        assert OPTIONAL.isdisjoint(module.split(".")[0] for module in top), file


# -----------------------------------------------------------------------------
# The root, the keys and the tools


@pytest.mark.upstream
def test_the_root_holds_what_people_type_and_read_first():
    assert sorted(name for name in FILES if "/" not in name) == [
        "bench.py",
        "compare.py",
        "configurator.py",
        "convert.py",
        "model.py",
        "model_fast.py",
        "sample.py",
        "train.py",
    ]


@pytest.mark.upstream
def test_every_key_costs_each_reader_of_help():
    assert len(FIELDS) <= KEYS


def test_ruff_checks_the_width_of_every_line_and_formats_all():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["line-length"] == 100 and "E" in ruff["lint"]["select"]
    ignored = [rules for rules in ruff["lint"].get("per-file-ignores", {}).values()]
    for rules in [ruff["lint"].get("ignore", []), *ignored]:
        assert "E501" not in rules and "E" not in rules
    assert "exclude" not in ruff and "exclude" not in ruff.get("format", {})
    # in two parts, or this line would be one of them
    switches = ["fmt" + ": off", "fmt" + ": skip", "noqa" + ": E501", "ruff" + ": noqa"]
    for file, text in TEXTS.items():
        if file == "tests/faults_planted.py":  # lines of the program, made longer
            continue
        found = [switch for switch in switches if "# " + switch in text]
        assert not found, f"{file} has {found}"


def test_mypy_checks_all_code_and_lines_are_left_out_each_with_a_reason():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert {path.partition("/")[0] for path in CODE if "/" in path} <= {*settings["files"]}
    assert "*.py" in settings["files"] and settings["check_untyped_defs"]
    left_out = "type: " + "ignore"
    lines = [line for file in CODE for line in TEXTS[file].splitlines() if left_out in line]
    for line in lines:
        assert re.search(left_out + r"\[[a-z-]+\]  # \w+ \w+", line), line


# -----------------------------------------------------------------------------
# Scripts


def test_every_script_starts_where_nothing_of_this_project_is_imported():
    """
    Most tests fork their processes, which would hide an import that is missing. Here only torch is
    there, seconds for each. train.py's own fresh start is the quickstart in test_train.py.
    """
    commands = {name: [name, "--help"] for name in ("sample.py", "compare.py", "convert.py")}
    commands["bench.py"] = ["bench.py", "--help"]
    commands["configurator.py"] = ["configurator.py", "config/quickstart.py"]
    for path in ROOT.glob("data/prepare_*.py"):
        commands[path.name] = [f"data/{path.name}", "--help"]
    # all at once, as most of their time is one processor's
    processes = {name: start_process(*words, only_torch=True) for name, words in commands.items()}
    for name, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out and not err, f"{name}: {err}"
