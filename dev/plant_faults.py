"""
Plant faults in a file of the program, one at a time, and print which of them its tests do not see.

    python dev/plant_faults.py run/clock.py $(git grep -lw clock 'tests/*.py')

Do this before you delete or shorten a test, and again afterwards. With the same --seed the faults
are the same, and those that only this test saw are now UNSEEN. A fault turns a comparison, a
condition or an operator round, changes a number or a switch, or leaves a statement out. Some change
nothing that anyone could notice. Slow tests do not run, and a test that never ends has seen the
fault. Works on a copy of the checkout, with all that you have not committed.
"""

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.console import Parser, UserError, run_main, say  # noqa: E402

OPPOSITES = dict(Lt="GtE", GtE="Lt", Gt="LtE", LtE="Gt", Eq="NotEq", NotEq="Eq", In="NotIn")
OPPOSITES |= dict(NotIn="In", Is="IsNot", IsNot="Is", And="Or", Or="And", Add="Sub", Sub="Add")
OPPOSITES |= dict(Mult="Div", Div="Mult", FloorDiv="Mult", Mod="Mult", Pow="Mult")
TIMEOUT = 600  # seconds


def fault(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Return the part of a node that a fault replaces, and by what, or None if there is none."""

    def turned(operator: ast.AST) -> ast.AST:
        return getattr(ast, OPPOSITES.get(type(operator).__name__, "Sub"))()

    match node:
        case ast.Compare(left, [operator], right):
            return node, ast.unparse(ast.Compare(left, [turned(operator)], right))
        case ast.BoolOp(operator, values):
            return node, ast.unparse(ast.BoolOp(turned(operator), values))
        case ast.BinOp(left, operator, right) if not isinstance(operator, ast.BitOr):  # a type
            return node, ast.unparse(ast.BinOp(left, turned(operator), right))
        case ast.Constant(bool() | int() | float() as value):
            return node, repr(not value if isinstance(value, bool) else value + 1)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            return test, f"not ({ast.unparse(test)})"
        case ast.Expr(ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Return():
            return node, "pass"
    return None


def faults(text: bytes) -> list[tuple[int, str, bytes]]:
    """Return all faults that can be planted in a file: the line, the change, the changed file."""
    found = []
    lines = [0, *(end.end() for end in re.finditer(b"\n", text))]  # where each begins
    for old, new in filter(None, map(fault, ast.walk(ast.parse(text)))):
        begin, end = lines[old.lineno - 1] + old.col_offset, lines[old.end_lineno - 1]
        end += old.end_col_offset
        code = new if isinstance(old, ast.stmt) else f"({new})"
        what = f"{' '.join(text[begin:end].decode().split())} -> {new}"
        found.append((old.lineno, what, text[:begin] + code.encode() + text[end:]))
    return found


def first_failure(program: Path, tests: list[str]) -> str:
    """Return the first of these tests that fails in a copy of the program, or ""."""
    command = [sys.executable, *"-m pytest -xq --tb=no -p no:cacheprovider -m".split(), "not slow"]
    process = subprocess.Popen(
        [*command, *tests], cwd=program, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "a test that does not end"
    failed = re.search("^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
    return failed[1] if failed else output if process.returncode else ""


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("file", help="of the program")
    parser.add_argument("tests", nargs="+", help="files, or single tests, as pytest takes them")
    parser.add_argument("--faults", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="chooses them (default: 1)")
    arguments = parser.parse_args(argv)
    text = (ROOT / arguments.file).read_bytes()
    possible = faults(text)
    number = min(arguments.faults, len(possible))
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in names.split("\0"):
            if (ROOT / name).is_file():  # and not deleted
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        if failed := first_failure(Path(folder), arguments.tests):
            raise UserError(f"without a fault, this fails: {failed}")
        unseen = 0
        for line, what, faulty in sorted(random.Random(arguments.seed).sample(possible, number)):
            (Path(folder) / arguments.file).write_bytes(faulty)
            seen_by = first_failure(Path(folder), arguments.tests)
            unseen += not seen_by
            say(f"{arguments.file}:{line}: {what}: {seen_by or 'UNSEEN'}")
    say(f"{unseen} of {number} faults are seen by no test")
    return 0


if __name__ == "__main__":
    run_main(main)
