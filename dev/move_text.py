"""
Do the tests depend on the wording? Writes a copy of the repository with one more word in each
comment, error and paragraph, three locals of train.main renamed, and two functions of train.py
swapped.

    python dev/move_text.py ../moved && cd ../moved && pytest -m "not slow" -n 2 -q

All default tests must pass there.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORD = "indeed"
ERRORS = ("UserError", "RunError")
DIRECTIVE = re.compile(r"# *(noqa|type:|ruff|fmt|pragma|!)")
# row (counted from 1), column (from 0), old text, new text
Edit = tuple[int, int, str, str]


def apply(text: str, edits: list[Edit]) -> str:
    lines = text.splitlines(keepends=True)
    for row, column, old, new in sorted(edits, reverse=True):
        line = lines[row - 1].encode()  # ast counts bytes
        assert line[column:].startswith(old.encode()), (line, old)
        rest = line[column + len(old.encode()) :]
        lines[row - 1] = (line[:column] + new.encode() + rest).decode()
    return "".join(lines)


def longer_comments(text: str) -> str:
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            column = len(token.line[: token.end[1]].encode())
            edits.append((token.end[0], column, "", f" {WORD}"))
    return apply(text, edits)


def longer_errors(text: str) -> str:
    edits = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
            message = node.args[0]
            if not isinstance(message, ast.Starred):
                edits.append((message.lineno, message.col_offset, "", "("))
                edits.append((message.end_lineno, message.end_col_offset, "", f') + " {WORD}"'))
    return apply(text, edits)


def other_locals(text: str, function: str, count: int = 3) -> str:
    (node,) = [n for n in ast.parse(text).body if getattr(n, "name", "") == function]
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    shown = {
        n.id  # before Python 3.12, the parser does not know the positions of these
        for string in ast.walk(node)
        if isinstance(string, ast.JoinedStr)
        for n in ast.walk(string)
        if isinstance(n, ast.Name)
    }
    assigned = [n.id for n in names if isinstance(n.ctx, ast.Store) and n.id not in shown]
    chosen = [*dict.fromkeys(assigned)][:count]
    edits = [(n.lineno, n.col_offset, n.id, f"{n.id}_{WORD}") for n in names if n.id in chosen]
    return apply(text, edits)


def other_order(text: str) -> str:
    """Swap the first two functions that follow each other."""
    body, lines = ast.parse(text).body, text.splitlines(keepends=True)
    for first, second in zip(body, body[1:], strict=False):
        if all(isinstance(n, ast.FunctionDef) and not n.decorator_list for n in (first, second)):
            a, b = (slice(n.lineno - 1, n.end_lineno) for n in (first, second))
            between = lines[a.stop : b.start]
            lines[a.start : b.stop] = [*lines[b], *between, *lines[a]]
            return "".join(lines)
    raise ValueError("no two functions")


def longer_paragraphs(text: str) -> str:
    """Lengthen all paragraphs, but not code, tables, headings, pictures or lists."""
    parts = re.split(r"(^```.*?^```$|\n{2,})", text, flags=re.MULTILINE | re.DOTALL)
    plain = [re.match(r"[A-Z*>]", part) and not part.endswith(":") for part in parts]
    return "".join(
        f"{part.rstrip()} {WORD}.\n"
        if ok and part.endswith("\n")
        else f"{part} {WORD}."
        if ok
        else part
        for part, ok in zip(parts, plain, strict=True)
    )


def main() -> None:
    folder = Path(sys.argv[1])
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        content = (ROOT / name).read_bytes()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".py") and not name.startswith(("tests/", "dev/")):
            text = content.decode()
            if name == "train.py":
                text = other_order(other_locals(text, "main"))
            content = longer_comments(longer_errors(text)).encode()
        elif name.endswith(".md"):
            content = longer_paragraphs(content.decode()).encode()
        (folder / name).write_bytes(content)
    # tests look at the files that git knows
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=folder, check=True)


if __name__ == "__main__":
    main()
