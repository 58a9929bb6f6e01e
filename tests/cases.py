"""Choose the cases that `pytest -m "not slow"` leaves out, and pick another value for a key."""

from collections.abc import Iterable
from dataclasses import Field
from typing import Any

import pytest

from configurator import key_type


def slow_but(*kept, of: Iterable) -> list:
    """Mark all cases but `kept` as slow. A case of several arguments is a tuple."""
    cases = list(of)
    assert all(case in cases for case in kept), kept
    return [case if case in kept else slow(case) for case in cases]


def slow(case):
    arguments = case if isinstance(case, tuple) else (case,)
    return pytest.param(*arguments, marks=pytest.mark.slow)


def another_value(key: Field, value: Any) -> Any:
    """Return a value of the key that differs from `value`."""
    *_, choices = key_type(key)
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, str):  # a loss_chunk
        return "16"
    return {bool: not value, int: 2 * value or 7, float: value / 2 or 0.5}[type(value)]
