"""
Check which module may import which, which modules a script must not load, and that every script
starts.
"""

import ast
import sys

import pytest
from program import ROOT, finish, start

# each may import those before it, and a script may import all of them
LAYERS = ["common", "configurator", "data", "model", "model_fast", "optimizer", "machine"]
LAYERS += ["run", "tools"]
PREPARATIONS = ["data.prepare_text", "data.prepare_fineweb"]  # nobody imports these
# imported where they are used, because a machine with prepared shards trains without them
OPTIONAL = {"tiktoken", "datasets", "tokenizers", "matplotlib", "wandb", "tensorboard"}


FILES = [*ROOT.glob("*.py"), *(p for name in [*LAYERS, "docs"] for p in (ROOT / name).glob("*.py"))]
CODE = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in FILES}


def owner(file: str) -> str:
    """Return data for data/loader.py, and train for train.py."""
    return file.split("/")[0].removesuffix(".py")


def imported_by(node: ast.AST) -> list[str]:
    """Return the modules that one statement imports; `from data import x` is data.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    is_folder = (ROOT / node.module).is_dir()
    return [f"{node.module}.{alias.name}" for alias in node.names] if is_folder else [node.module]


@pytest.mark.parametrize("file", CODE)
def test_a_module_imports_only_what_the_design_allows(file):
    """A machine with prepared shards trains without the optional packages: none is at the top."""
    tree, ours = CODE[file], {owner(name) for name in CODE}
    layer = LAYERS.index(owner(file)) if owner(file) in LAYERS else len(LAYERS)
    allowed = [owner(file), *LAYERS[:layer]]
    found = [module for node in ast.walk(tree) for module in imported_by(node)]
    others = {m.split(".")[0] for m in found} - ours
    found = [m for m in found if m.split(".")[0] in ours]
    assert [m for m in found if m.split(".")[0] not in allowed or m in PREPARATIONS] == []
    assert owner(file) != "common" or others <= {*sys.stdlib_module_names}
    assert not OPTIONAL & {m.split(".")[0] for node in tree.body for m in imported_by(node)}


# scripts -> what they must not load. torch takes seconds to import
SCRIPTS: dict[str, set[str]] = {
    "train.py": {*OPTIONAL, "transformers", "pyarrow", "huggingface_hub"},
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


def test_every_script_prints_its_help_without_the_slow_imports():
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
