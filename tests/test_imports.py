"""
Check which module may import which, which modules a script must not load, and that every script
starts.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from program import ROOT, finish, start

LIBRARY = ["common", "configurator", "data", "model", "model_fast", "machine"]
# a folder, a module of the root or one file -> what it may import besides itself
MAY_IMPORT = {
    "common": [],
    "configurator": ["common"],
    "data": ["configurator", "common"],
    "model": [],
    "model_fast": ["model"],
    "machine": LIBRARY,
    "machine/cost.py": ["optimizer", *LIBRARY],
    "optimizer": ["configurator", "model", "model_fast", "common"],
    "run": LIBRARY,
    "train": ["optimizer", "run", *LIBRARY],
    "sample": ["run", *LIBRARY],
    "convert": ["run", *LIBRARY],
    "compare": ["run", *LIBRARY],
    "bench": ["run", *LIBRARY],
    "night": ["common"],
    "docs": ["optimizer", "run", *LIBRARY],
}
PREPARATIONS = ["data.prepare_text", "data.prepare_fineweb"]  # nobody imports these
# imported where they are used, because a machine with prepared shards trains without them
OPTIONAL = {"tiktoken", "datasets", "tokenizers", "matplotlib", "wandb", "tensorboard"}


def project_code(root: Path = ROOT) -> dict[str, ast.Module]:
    """
    Parse tracked files and new ones that git does not ignore, except in tests/, dev/, config/ and
    virtual environments.
    """
    command = [
        "git",
        "--git-dir=.git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.py",
    ]
    command += [f"--exclude={path.parent.name}/" for path in root.glob("*/pyvenv.cfg")]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout", allow_module_level=True)
    names = [name for name in listed.stdout.splitlines() if (root / name).exists()]
    code = [name for name in names if not name.startswith(("tests/", "dev/", "config/"))]
    return {name: ast.parse((root / name).read_text("utf-8")) for name in code}


CODE = project_code()


def owner(file: str) -> str:
    """Return data for data/loader.py, and train for train.py."""
    return file.split("/")[0].removesuffix(".py")


def imported_by(node: ast.AST) -> list[str]:
    """
    Return the modules that one statement imports, with their dots; `from data import x` is data.x.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where a name comes from"
        if (ROOT / node.module).is_dir():
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def imports(file: str) -> list[str]:
    """Return all modules that a file imports, also inside functions."""
    return [module for node in ast.walk(CODE[file]) for module in imported_by(node)]


@pytest.mark.parametrize("file", CODE)
def test_a_module_imports_only_what_the_design_allows(file):
    ours = {owner(name) for name in CODE}
    allowed = [owner(file), *MAY_IMPORT.get(file, MAY_IMPORT[owner(file)])]
    found = [module for module in imports(file) if module.split(".")[0] in ours]
    assert [m for m in found if m.split(".")[0] not in allowed or m in PREPARATIONS] == []


def test_common_needs_only_the_standard_library():
    used = {m.split(".")[0] for file in CODE if owner(file) == "common" for m in imports(file)}
    assert used <= {*sys.stdlib_module_names, "common"}


def test_imports_optional_packages_only_where_they_are_used():
    """
    Import none of these packages at the top of a file, because a machine with prepared shards
    trains without them.
    """
    for file, tree in CODE.items():
        top = {module.split(".")[0] for node in tree.body for module in imported_by(node)}
        assert not OPTIONAL & top, file


# scripts -> what they must not load. torch takes seconds to import
SCRIPTS: dict[str, set[str]] = {
    "train.py": {
        *OPTIONAL,
        "transformers",
        "pyarrow",
        "data.writer",  # imports tqdm
        "huggingface_hub",
        "run.curves",
        "run.plan",
        "run.pretrained",
        "run.tracker",
        "run.modeling_fast",
        "compare",
        "bench",
        "sample",
    },
    "sample.py": set(),
    "convert.py": set(),
    "bench.py": set(),
    "configurator.py": {"torch"},
    "compare.py": {"torch"},
    "night.py": {"torch"},
    "data/prepare_text.py": {"torch"},
    "data/prepare_fineweb.py": {"torch"},
}
# runs a script with --help, then prints which modules it has loaded
HELP = """
import os, runpy, sys
script = sys.argv[1]
sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(os.path.abspath(script))
try:
    runpy.run_path(script, run_name="__main__")
finally:
    print("modules:", *sys.modules)
"""


def test_every_script_prints_its_help_and_loads_all_it_needs_and_nothing_else():
    """
    Start each script where at most torch has been imported. Most tests fork a process that has
    already imported this project, which would hide a missing import.
    """
    # all at once, because each uses mostly one core
    started = {
        name: start("-c", HELP, name, cold="torch" in never) for name, never in SCRIPTS.items()
    }
    for name, process in started.items():
        code, out, err = finish(process)
        told, _, modules = out.partition("modules:")
        assert code == 0 and told and not err, f"{name}: {err}"
        assert not SCRIPTS[name] & {*modules.split()}, name
