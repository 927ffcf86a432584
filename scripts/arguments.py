"""Types of arguments that several scripts take: argparse says which option it is, these say what is wrong with it."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A number of tokens, ranks, repeats, ..."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return found


def head_counts(text: str) -> tuple[int, int]:
    """ "32/8": query heads and key heads; "32": as many of both."""
    q, _, k = text.partition("/")
    try:
        found = int(q), int(k or q)
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY_HEADS/KEY_HEADS, each at least 1, as in 32/8")
    if found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: key heads must divide query heads")
    return found
