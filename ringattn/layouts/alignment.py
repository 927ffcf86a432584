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

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from ..kernels.contract import GRID


def first_rows(keys: Sequence[range], queries: Sequence[range], cuts: Sequence[int]) -> list[int]:
    """Return the row of a buffer at which each run of keys begins.

    Args:
        keys: runs of neighbouring positions, disjoint and growing.
        queries: the runs of a rank's queries, growing; the same positions as keys.
        cuts: positions from 0 to the end, growing, such that no query sees keys on both sides of one
            (:attr:`..masks.pairs.Work.cuts`).
    """
    rows, row, starts = list[int](), 0, [run.start for run in queries]
    for group in _groups(keys, cuts):
        low, high = group[0].start, group[-1].stop
        first = max(bisect_right(starts, low) - 1, 0)
        past = bisect_left(starts, high, first)
        if past - first > 1:
            first = max(range(first, past), key=lambda i: min(queries[i].stop, high) - max(starts[i], low))
        begin = starts[first] if first < past else low
        before = begin - low  # rows from the first key to the first tile of queries; it may begin before the keys
        if before > 0:
            before = sum(min(run.stop, begin) - run.start for run in group if run.start < begin)
        space = -(row + before) % GRID
        if space <= sum(map(len, group)):  # else keys would be few among zeros
            row += space
        for run in group:
            rows.append(row)
            row += len(run)
    return rows


def _groups(keys: Sequence[range], cuts: Sequence[int]) -> Iterator[Sequence[range]]:
    """Yield runs of keys that queries may see together."""
    begin = cut = 0
    for i in range(1, len(keys)):
        cut = bisect_left(cuts, keys[i - 1].stop, cut)
        if cuts[cut] <= keys[i].start:
            yield keys[begin:i]
            begin = i
    if keys:
        yield keys[begin:]
