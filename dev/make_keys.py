"""
Write the list of keys in docs/keys.md from the comments and defaults in configurator.Config.

    python dev/make_keys.py
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import FIELDS, Config, describe_keys  # noqa: E402

PAGE = ROOT / "docs" / "keys.md"
HEADING = "## All keys\n"


def list_keys() -> str:
    """Return the keys by heading, one line each, in Markdown."""
    text = "\nEach key has its default in brackets, followed by its other values if they are few.\n"
    for heading, meanings in describe_keys(Config).items():
        if heading:
            text += f"\n### {heading}\n\n"
        for name, (default, meaning) in meanings.items():
            values = dict.fromkeys([default, *get_args(FIELDS[name].type)])
            text += f"- **`{name}`** ({', '.join(f'`{value}`' for value in values)}): {meaning}\n"
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    written_by_hand = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(written_by_hand + HEADING + list_keys(), encoding="utf-8")
