"""
Print to the console, format and parse numbers, and define errors and exit codes.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import NoReturn

from common.process import local_rank, world_size

# -----------------------------------------------------------------------------
# Lines

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # Unicode's Cc, except newline and tab

transcript: Callable[[str], None] | None = None  # writes a copy of every line to a run's log.txt


def keep_transcript(write_line: Callable[[str], None] | None) -> None:
    global transcript
    transcript = write_line


def say(*lines: str, console: str = "stdout") -> None:
    """
    Print lines to stdout or stderr and copy them to the transcript. Control characters are escaped,
    so that a terminal shows them instead of obeying them. A closed console does not stop the run.
    """
    text = "\n".join(lines)
    text = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    try:
        print(text, file=getattr(sys, console), flush=True)
    except OSError:
        setattr(sys, console, open(os.devnull, "w", errors="replace"))
    if transcript:
        transcript(text)


def warn(message: str) -> None:
    say(f"warning: {message}", console="stderr")


def command_line(*arguments) -> str:
    """Quote a command line for this system's shell."""
    join = subprocess.list2cmdline if sys.platform == "win32" else shlex.join
    return join([*map(str, arguments)])


def table_lines(rows: list[list[str]]) -> list[str]:
    """Format a table's rows as lines, the first column flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


# -----------------------------------------------------------------------------
# Numbers


def short(number: float, digits: int = 3) -> str:
    """Format a number with a unit: 52428800 -> 52.4M."""
    number = float(f"{number:.{digits}g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def percent(fraction: float | None) -> str:
    """Format 0.4217 as 42.2%; None as n/a."""
    return "n/a" if fraction is None else f"{fraction:.1%}"


def parse_count(text: str) -> int:
    """
    Parse a whole number above 0, such as 8, 10_000_000, 10M or 1e7. Raises ArgumentTypeError, which
    argparse turns into an error line.
    """
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    try:
        # Decimal, because the float 8.2 times a million need not be a whole number
        number = Decimal(text[:-1] if factor > 1 else text) * factor
        if 1 <= number < 2**63 and number == int(number):
            return int(number)
    except InvalidOperation:
        pass
    problem = f"needs a whole number above 0, such as 8 or 10M, got {text!r}"
    raise argparse.ArgumentTypeError(problem)


def parse_fraction(text: str) -> float:
    """Parse a number above 0 and at most 0.5. Raises ArgumentTypeError, as parse_count() does."""
    with contextlib.suppress(ValueError):
        if 0 < (fraction := float(text)) <= 0.5:
            return fraction
    raise argparse.ArgumentTypeError(f"needs a number between 0 and 0.5, got {text!r}")


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes: 11520 -> 3h12m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes}m{seconds % 60:02}s" if hours == 0 else f"{hours}h{minutes % 60:02}m"


# -----------------------------------------------------------------------------
# Errors and exit codes


BELOW = "\n    "  # puts a command on a line of its own below a problem, so that it can be copied


class UserError(Exception):
    """
    Raised for an error that the user can fix. Its arguments are its problems, each a line, perhaps
    with a command BELOW it. Scripts print them and exit with 1.
    """


def one_line(error: BaseException) -> str:
    """
    Return an error of the system, such as a full disk, or of a library, whose message may have
    several lines, in one line.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message[:300].rstrip('.')}"


def raise_if_any(problems: list[str]) -> None:
    """Raise a UserError with one line per problem, if there are any."""
    if problems:
        raise UserError(*dict.fromkeys(problems))


class Parser(argparse.ArgumentParser):
    """Parses flags with argparse, raises UserErrors, and accepts no abbreviated flags."""

    def __init__(self, **kwargs):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **kwargs)
        # Shells do not expand the ~ in --out=~/x.
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def error(self, message: str):
        # argparse puts "argument" before a flag's name
        raise UserError(message.removeprefix("argument "))


def did_you_mean(name: str, known, dashes: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {dashes}{close[0]}?" if close else ""


# How torch, cuBLAS, Triton and the system say that memory ran out; the last two alternatives are
# Windows' and MPS's
OUT_OF_MEMORY = "out of memory|ALLOC_FAILED|allocate memory|not enough memory|Invalid buffer size"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that it wraps, says that memory ran out."""
    while error is not None:
        is_named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")  # torch's, Python's
        if is_named or re.search(OUT_OF_MEMORY, str(error)):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def exit_with(code: int) -> NoReturn:
    """
    Exit with `code`. After Ctrl-C, end as Python does after a KeyboardInterrupt, killed by SIGINT:
    a shell also calls that 130, and then ends its loop, too. One of several ranks runs no
    destructors, because that of the gloo group can wait forever for the GIL.
    """
    if world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == 128 + signal.SIGINT and sys.platform != "win32":
        sys.excepthook = lambda *error: None  # print no traceback
        raise KeyboardInterrupt
    sys.exit(code)


def run_main(
    main: Callable[[list[str]], int | None], memory_hint: str = "close other programs"
) -> None:
    """
    Run a script's main(argv) and exit: with 0 or what main() returns, with 1 after any error. A
    UserError or an OSError prints one `error:` line per problem. If memory ran out, the line says
    `memory_hint`; any other error prints a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what stdout cannot encode
    try:
        code = main(sys.argv[1:]) or 0
    except SystemExit as error:  # --help
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        if world_size() > 1:
            # Let torchrun end this rank if another one has printed this error, or caused it by
            # exiting
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2 + local_rank())
        lines: list = []  # none: a traceback
        if isinstance(error, (UserError, OSError)):
            lines = [*error.args] if isinstance(error, UserError) else [one_line(error)]
        elif is_out_of_memory(error):
            lines = [f"out of memory; {memory_hint}"]
        text = [f"error: {line}" for line in lines] or [traceback.format_exc().rstrip()]
        say(*text, console="stderr")
        code = 1
    exit_with(code)
