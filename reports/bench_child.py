"""
Run train.py for bench.py, in a process that ends when bench.py does.

    python reports/bench_child.py CONFIG.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Import from the repository's root. Python would look in reports/ first.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import train
from common.child import end_with_parent
from common.console import run_main


def main() -> None:
    end_with_parent()
    run_main(train.main)


if __name__ == "__main__":
    main()
