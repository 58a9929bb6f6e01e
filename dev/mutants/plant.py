"""
Plant the faults of faults.py one by one in a copy of the program, and run the test that must fail.

    python dev/mutants/plant.py                all of them
    python dev/mutants/plant.py --only=fsync   those with this word in their line

First, all of these tests must pass on the unchanged copy. Then prints a row for each fault: what it
is, its test, the seconds, and whether the test saw it. A test that hangs or whose process dies has
seen it too. Exits with 1 if a fault is not seen or its function has changed.
"""

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100  # one test may take
NOT_SEEN = {0: "NOT SEEN"} | dict.fromkeys(range(2, 6), "NO TEST RUN")  # pytest's exit codes


def copy_program(folder: Path) -> None:
    """Copy program, tests and pages, without what git ignores and without virtual environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command += [f"--exclude={path.parent.name}/" for path in ROOT.glob("*/pyvenv.cfg")]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():  # git also lists one that was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions of a module, each with its name: `save`, or `Saver.save`."""
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            inside = f"{prefix}{child.name}."
        yield from functions(child, inside)


def planted(fault: Fault) -> str:
    """Return the file's text with the fault in its function."""
    code = (ROOT / fault.file).read_text("utf-8")
    function = dict(functions(ast.parse(code))).get(fault.function)
    source = function and ast.get_source_segment(code, function)
    if not source or source.count(fault.old) != 1:
        sys.exit(f"{fault.file}: {fault.function} does not have once: {fault.old}")
    changed = code.replace(source, source.replace(fault.old, fault.new))
    ast.parse(changed)  # an error of syntax would be no fault that a test has to see
    return changed


def run_tests(folder: Path, *tests: str) -> int | None:
    """Return pytest's exit code on these tests in the copy, or None if they hang."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + [f"tests/{test}" for test in tests],
        cwd=folder,
        # compiled code of the fault before could count as up to date
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=sys.stderr if len(tests) > 1 else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that what the tests have started ends with them
    )
    try:
        return process.wait(timeout=SECONDS * len(tests))
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n\n")[0])
    parser.add_argument("--only", default="", help="faults with this word in their line")
    only = parser.parse_args().only
    changed = {f: planted(f) for f in FAULTS if only in f"{f.what} {f.file} {f.function}"}
    if not changed:
        parser.error(f"no fault has {only!r} in its line")
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        copy_program(folder)
        if run_tests(folder, *dict.fromkeys(fault.test for fault in changed)) != 0:
            sys.exit("not planted: these tests do not pass on the unchanged program")
        for fault, code in changed.items():
            began = time.perf_counter()
            (folder / fault.file).write_text(code, "utf-8")
            results.append(NOT_SEEN.get(run_tests(folder, fault.test), "seen"))
            shutil.copy2(ROOT / fault.file, folder / fault.file)
            seconds = f"{time.perf_counter() - began:.0f}"
            print(" | ".join([fault.what, fault.test, seconds, results[-1]]), flush=True)
    print(f"{results.count('seen')} of {len(results)} seen")
    return 0 if results.count("seen") == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
