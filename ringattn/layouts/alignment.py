"""Rows of gathered keys: tiles of keys begin where tiles of queries do.

A kernel's tiles of queries begin where a run of queries begins, its tiles of keys at multiples of their size in the
buffer. Where the two do not agree, the diagonal of a causal document is one tile wider for every tile of queries:

    rank 1 has the tail qqqqqqqq of a document of 14 tokens, tiles of 4 x 4

    keys, without space   |x o o o|o o o o|o o q q|q q q q|q q . .     q's first tile ends at row 12, in a fourth tile
    keys after a space    |. . . x|. . o o|o o o o|q q q q|q q q q|    it ends at row 16, at the end of its tile

Keys of different documents may be apart, for no query sees both. So each *group* of runs that queries see together
begins after as much space as brings its longest run of queries to a multiple of the tile, if that is less than the
group: at most 127 rows. The rows of the space are zeros that no query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.contract import GRID

Integers = np.ndarray[Any, np.dtype[np.int64]]


def first_rows(keys: Integers, queries: Integers, cuts: Sequence[int]) -> Integers:
    """Return the rows at which the runs of keys begin, each in the buffer of its rank: (runs,).

    Args:
        keys: a rank, and the first and past the last position of each run of neighbours that its queries see: (runs,
            3), disjoint and growing.
        queries: those of the ranks' queries, growing; the same positions as keys.
        cuts: positions from 0 to the end, growing, such that no query sees keys on both sides of one
            (:attr:`..masks.pairs.Work.cuts`).
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    rank, start, stop = keys.T
    bounds, line = np.array(cuts), cuts[-1] + 1  # ranks one after another on one line
    new = (rank[1:] != rank[:-1]) | (bounds[np.searchsorted(bounds, stop[:-1])] <= start[1:])
    group = np.concatenate([[0], np.flatnonzero(new) + 1])  # of runs that queries may see together: the first of each
    past = np.append(group[1:], len(keys))
    offset = np.concatenate([[0], np.cumsum(stop - start)])
    size, rank, low, high = offset[past] - offset[group], rank[group], start[group], stop[past - 1]
    of_queries = queries[:, 0] * line + queries[:, 1]
    first = np.searchsorted(of_queries, rank * line + low, side="right") - 1
    first = np.maximum(first, np.searchsorted(queries[:, 0], rank))
    some = np.searchsorted(of_queries, rank * line + high) > first
    longest = _longest(queries, first, np.searchsorted(of_queries, rank * line + high), low, high)
    begin = np.where(some, queries[np.where(some, longest, 0), 1], low)
    # Rows from the first key to the first tile of queries; it may begin before the keys.
    before = begin - low
    last = np.searchsorted(keys[:, 0] * line + start, rank * line + begin) - 1
    inside = offset[last + 1] - offset[group] - np.maximum(stop[last] - begin, 0)
    before = np.where(before > 0, inside, before)
    rows, row, at = list[int](), 0, -1
    for owner, length, shift in zip(rank.tolist(), size.tolist(), before.tolist(), strict=True):
        row, at = row * (owner == at), owner
        space = -(row + shift) % GRID
        if space <= length:  # else keys would be few among zeros
            row += space
        rows.append(row)
        row += length
    return offset[:-1] + (np.array(rows) - offset[group]).repeat(past - group)


def _longest(queries: Integers, first: Integers, past: Integers, low: Integers, high: Integers) -> Integers:
    """Return which run of queries from ``first`` to ``past`` has most of the positions from ``low`` to ``high``."""
    result = first.copy()
    for i in np.flatnonzero(past - first > 1).tolist():
        some = queries[first[i] : past[i]]
        result[i] += np.argmax(np.minimum(some[:, 2], high[i]) - np.maximum(some[:, 1], low[i]))
    return result
