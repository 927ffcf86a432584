"""Types for argparse that several commands share. They explain what is wrong; argparse adds the name of the option."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def token_count(text: str) -> int:
    """Parse a number of tokens of at least 1: 4096, 128k (131,072) or 1M (1,048,576)."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    try:
        return factor * positive(text if factor == 1 else text[:-1])
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1, as 1536, 1536k (1,572,864) or 1M (1,048,576)"
        ) from None


def gib(text: str) -> float:
    """Parse a number of GiB above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB above 0, as 100")
    return number


def head_counts(text: str) -> tuple[int, int]:
    """Parse "32/8", query heads and key heads, or "32", the same number of both."""
    query, _, key = text.partition("/")
    try:
        heads = int(query), int(key or query)
    except ValueError:
        heads = 0, 0
    if min(heads) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY_HEADS/KEY_HEADS, each at least 1, as in 32/8")
    if heads[0] % heads[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: key heads must divide query heads")
    return heads
