"""
Do the tests see? Plants the faults of faults.py one by one in copies of the program, and
runs the test that must fail there.

    python dev/mutants/plant.py                    all of them
    python dev/mutants/plant.py --only=clip        those with this in their names
    python dev/mutants/plant.py --jobs=2           two at a time

Prints a row for each: its name, the test that saw it, after how many seconds and by what, or NOT
SEEN. A test that hangs or takes its process down has seen it too, and the row says so. Before that,
all of these tests must pass on the unchanged program. Exit code 1 if they do not, or if a fault is
not seen.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100  # one fault's test may take
FAILED = 1  # pytest's exit code


def copy_program(folder: Path) -> None:
    """Program, tests and pages, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():  # git also lists one that was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str], seconds: float) -> tuple[int | None, str]:
    """pytest's exit code on these tests in a copy, None if it took longer; and its output."""
    options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests have started ends with them
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def is_plantable(fault: Fault) -> bool:
    count = (ROOT / fault.file).read_text("utf-8").count(fault.old)
    if count != 1:
        print(f"{fault.name}: {fault.file} has {count} times: {fault.old}")
    return count == 1


def plant(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    path.write_text(path.read_text("utf-8").replace(fault.old, fault.new), "utf-8")


def verdict(code: int | None, output: str) -> tuple[bool, str]:
    """Whether a fault was seen, and what to say about it."""
    if code is None:
        return True, f"hung for {SECONDS} s"
    if code == FAILED:
        errors = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
        return True, errors[0][:80] if errors else ""
    if code == 0:
        return False, "NOT SEEN"
    if code < 0 or code > 5:  # beyond pytest's own: the test's process has ended
        return True, f"ended the process with {code}"
    return False, f"NO TEST RUN: {output.strip().splitlines()[-1]}"


def look(fault: Fault, unchanged: Path, folder: Path) -> bool:
    """Plant it in a copy, run its test, print its row. Returns whether it was seen."""
    shutil.copytree(unchanged, folder)
    plant(fault, folder)
    began = time.perf_counter()
    seen, remark = verdict(*run_tests(folder, [fault.test], SECONDS))
    seconds = time.perf_counter() - began
    shutil.rmtree(folder, ignore_errors=True)
    print(" | ".join([fault.name, fault.test, f"{seconds:.0f}", remark]), flush=True)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n\n")[0])
    parser.add_argument("--only", default="", help="faults with this in their names")
    parser.add_argument("--jobs", type=int, default=1, help="copies tested at the same time")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if not faults:
        parser.error(f"no fault has {arguments.only!r} in its name")
    moved = [fault for fault in faults if not is_plantable(fault)]
    faults = [fault for fault in faults if fault not in moved]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        unchanged = Path(folder) / "unchanged"
        copy_program(unchanged)
        tests = list(dict.fromkeys(fault.test for fault in faults))
        code, output = run_tests(unchanged, tests, seconds=SECONDS * len(tests))
        if code != 0:
            print(output)
            print(f"not planted: these tests do not pass on the unchanged program ({code})")
            return 1
        print(f"{len(faults)} faults; all {len(tests)} tests pass without them")
        print("fault | test | seconds | what it saw")

        def look_at(fault: Fault) -> bool:
            return look(fault, unchanged, Path(folder) / fault.name)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            seen = list(pool.map(look_at, faults))
    print(f"{sum(seen)} of {len(faults)} seen; {len(moved)} not planted, because their text moved")
    return 0 if all(seen) and not moved else 1


if __name__ == "__main__":
    sys.exit(main())
