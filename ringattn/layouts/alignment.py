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

import numpy as np

from ..kernels.contract import GRID
from ..masks.intervals import Integers


def first_rows(keys: Integers, queries: Integers, cuts: Sequence[int]) -> Integers:
    """Return the rows at which the runs of keys begin, each in the buffer of its rank: (runs,).

    Args:
        keys: a rank, and the first and past the last position of each run of neighbours that its queries see: (3,
            runs), disjoint and growing.
        queries: the same of the runs of queries that ranks hold; the same positions as keys.
        cuts: positions from 0 to the end, growing, such that no query sees keys on both sides of one
            (:attr:`..masks.pairs.Work.cuts`).
    """
    if not keys.size:
        return np.zeros(0, np.int64)
    rank, start, stop = keys
    bounds, line = np.array(cuts), cuts[-1] + 1  # ranks one after another on one line
    new = (rank[1:] != rank[:-1]) | (bounds[np.searchsorted(bounds, stop[:-1])] <= start[1:])
    group = np.concatenate([[0], np.flatnonzero(new) + 1])  # of runs that queries may see together: the first of each
    past = np.append(group[1:], len(rank))
    offset = np.concatenate([[0], np.cumsum(stop - start)])
    line_of_keys = rank * line + start
    size, rank, low, high = offset[past] - offset[group], rank[group], start[group], stop[past - 1]
    owners, begins, stops = queries
    of_queries = owners * line + begins
    first = np.searchsorted(of_queries, rank * line + low, side="right") - 1
    first = np.maximum(first, np.searchsorted(owners, rank))
    count = np.maximum(np.searchsorted(of_queries, rank * line + high) - first, 0)  # runs of queries that see a group
    ends = np.cumsum(count)
    index = np.arange(ends[-1]) + (first - ends + count).repeat(count)
    begins, stops = begins[index], stops[index]
    inside = np.minimum(stops, high.repeat(count)) - np.maximum(begins, low.repeat(count))
    order = np.lexsort((-inside, np.arange(len(group)).repeat(count)))  # in each group the longest run comes first
    begin, some = low.copy(), count > 0
    begin[some] = begins[order[(ends - count)[some]]]
    # Rows from the first key to the first tile of queries; it may begin before the keys.
    before = begin - low
    last = np.searchsorted(line_of_keys, rank * line + begin) - 1
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
