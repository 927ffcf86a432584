"""What ./scripts/test runs, and what it leaves to ./scripts/test --long.

By default properties are tried on 25 examples, matrices of cases have worlds of 1, 2 and 4 ranks, and tests marked
``long`` do not run: those that start processes for long, compile many kernels, or read other libraries. conftest.py
sets :data:`LONG` before it imports the test modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

EXAMPLES = 25
LONG = False


def examples(long: int) -> Callable[[Any], Any]:
    """Return a decorator: hypothesis tries ``long`` examples with --long, and without at most 25."""
    from hypothesis import settings

    return settings(max_examples=long if LONG else min(long, EXAMPLES))


def world_sizes(*default: int, long: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of ranks of a matrix of cases: ``default``, and with --long also those of ``long``."""
    return default + long if LONG else default


def few(values: Sequence[Any], keep: int = 1) -> Sequence[Any]:
    """Return the values of a parameter: with --long all, by default the first ones."""
    return values if LONG else values[:keep]


def calls(run: Callable[[], object]) -> int:
    """Return how many functions of Python and of C a run calls in this thread: a time that no other process changes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
