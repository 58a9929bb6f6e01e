"""
Each script imports this before torch: an old Python, or a package that is missing, is one line.
Parses on Pythons that do not know this program's syntax.
"""

import os
import re
import sys
from pathlib import Path

if sys.hexversion < 0x030B0000:
    mend = "install 3.11 or newer: docs/install.md"
    print(f"error: {sys.executable} is Python {sys.version.split()[0]}; {mend}", file=sys.stderr)
    sys.exit(2)


def end_in_one_line(kind, error, trace):
    """Python's way to show an error that nothing has caught, but for a package of ours."""
    needed = Path(__file__).parents[1].joinpath("requirements.txt").read_text("utf-8")
    name = str(getattr(error, "name", "")).partition(".")[0]
    if kind is not ModuleNotFoundError or name not in re.findall(r"^\w+", needed, re.MULTILINE):
        return sys.__excepthook__(kind, error, trace)
    mend = "activate its environment, or: pip install -r requirements.txt -c constraints.txt"
    print(f"error: {sys.executable} lacks the package {name}; {mend}", file=sys.stderr, flush=True)
    os._exit(2)  # Python's own code here would be 1


sys.excepthook = end_in_one_line
# on Windows most users may not make symbolic links; the hub's library would warn at length
os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
