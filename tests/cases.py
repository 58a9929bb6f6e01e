"""Choose the cases of a test that `pytest -m "not slow"` leaves out."""

from collections.abc import Iterable

import pytest


def slow_but(*kept, of: Iterable) -> list:
    """Mark all cases but `kept` as slow. A case of several arguments is a tuple."""
    cases = list(of)
    assert all(case in cases for case in kept), kept
    return [case if case in kept else slow(case) for case in cases]


def slow(case):
    arguments = case if isinstance(case, tuple) else (case,)
    return pytest.param(*arguments, marks=pytest.mark.slow)
