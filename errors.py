"""
What goes wrong and how it is said: one line per problem with its mend, and the exit code.
"""

import argparse
import difflib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from console import complain


class UserError(Exception):
    """Something the user can mend: `problems` holds one line for each. Scripts print them and exit with `exit_code`."""

    exit_code = 2  # found before any long work
    agreed = False  # whether all processes raise it together

    @property
    def problems(self) -> list[str]:
        return [" ".join(problem.splitlines()) for problem in self.args]  # others' messages may be of several lines

    def __str__(self) -> str:
        return "\n".join(self.args)


class RunError(UserError):
    """A UserError found only while running."""

    exit_code = 1


class Parser(argparse.ArgumentParser):
    """argparse with this project's error line in place of its own, and no abbreviated flags."""

    def __init__(self, description: str | None = None, **kwargs):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        raise UserError(message.removeprefix("argument "))  # which stands before the name of a flag


def did_you_mean(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def run_main(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's main(argv): a UserError becomes one `error:` line per problem and its exit code, no traceback."""
    sys.stdout.reconfigure(errors="replace")  # a console may lack letters that a sample has
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main(sys.argv[1:]) or 0
    except UserError as error:
        # Of several processes on a machine one speaks, unless the trouble may be another's alone
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, RunError) and not error.agreed:
            for problem in error.problems:
                complain(f"error: {problem}")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception:
        complain(traceback.format_exc().rstrip())
        code = 1
    end_process(code)


def end_process(code: int) -> None:
    """Exit; among several processes at once, as torch's gloo group can wait for ever for Python's lock in its destructor."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
