"""
What people read and type: lines on the console, numbers short and long.
"""

import argparse
import os
import sys
from decimal import Decimal, InvalidOperation


def say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # the console has gone, or its disk is full: the run is worth more, and metrics.jsonl goes on
        sys.stdout = open(os.devnull, "w")


def complain(line: str) -> None:
    """To stderr, with the same care."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")


def warn(message: str) -> None:
    complain(f"warning: {message}")


def count(number: float, digits: int = 3) -> str:
    """52428800 -> 52.4M"""
    number = float(f"{number:.{digits}g}")
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), ("", 1))
    return f"{number / size:g}{unit}"


def parse_count(text: str) -> int:
    """A whole number above 0: 8, 10_000_000, 10M or 1e7. Raises what argparse makes an error line of."""
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    try:
        number = Decimal(text[:-1] if factor > 1 else text) * factor  # 8.2 million is no whole number in binary
        if 1 <= number < 2**63 and number == int(number):
            return int(number)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"needs a whole number above 0, such as 8 or 10M, got {text!r}")


def duration(seconds: float) -> str:
    """11520 -> 3h12m"""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes}m{seconds % 60:02}s" if hours == 0 else f"{hours}h{minutes % 60:02}m"
