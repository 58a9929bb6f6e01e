"""
Each script imports this before torch, so that an old Python or a missing package is a one-line
error. Uses only syntax that old Pythons can parse.
"""

import os
import re
import sys
from pathlib import Path

if sys.hexversion < 0x030B0000:
    hint = "install 3.11 or newer: docs/install.md"
    print(f"error: {sys.executable} is Python {sys.version.split()[0]}; {hint}", file=sys.stderr)
    sys.exit(2)


def end_in_one_line(kind, error, trace):
    """Shows uncaught errors as Python does, except for a missing package that we require."""
    needed = Path(__file__).parents[1].joinpath("requirements.txt").read_text("utf-8")
    name = str(getattr(error, "name", "")).partition(".")[0]
    if kind is not ModuleNotFoundError or name not in re.findall(r"^\w+", needed, re.MULTILINE):
        return sys.__excepthook__(kind, error, trace)
    hint = "activate its environment, or: pip install -r requirements.txt -c constraints.txt"
    print(f"error: {sys.executable} has no package {name}; {hint}", file=sys.stderr, flush=True)
    os._exit(2)  # Python's own code here would be 1


sys.excepthook = end_in_one_line
# on Windows most users may not make symbolic links; the hub's library would warn at length
os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
