"""Work: how many keys each query sees, summed over the rows of a mask, as a function of the position.

Between neighbouring *edges* (the first queries of pieces, and where a bound of a mask begins or ceases to matter) that
number is linear, so the work of any run of queries is the difference of two values of a sum of squares. Everything here
is exact, in integers, in time O(pieces log pieces) and whatever the length of the sequence.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import torch
from torch import Tensor

from .mask import Mask


class Work:
    """The visible pairs of a mask by position.

    Attributes:
        total: visible pairs of all queries.
        rows: of the mask.
        cuts: positions, from 0 to seq_len, that divide the row into parts which see nothing of each other: documents.
            Where queries and keys are not the same positions, there is one part.
    """

    def __init__(self, mask: Mask) -> None:
        with torch.device("cpu"):
            edges = _edges(mask)
            past = torch.cat([edges[1:], edges.new_tensor([mask.seq_len])])
            start, end = (x.long() for x in mask.intervals(edges))
            last_start, last_end = (x.long() for x in mask.intervals((past - 1).clamp(min=0)))
            at_first, at_last = (end - start).sum(0), (last_end - last_start).sum(0)
            steps = (past - edges - 1).clamp(min=1)
            sums = (past - edges) * (at_first + at_last) // 2
            cuts = [0, mask.seq_len]
            if mask.offset == 0 and len(edges) > 1:
                apart = (start[:, 1:].amin(0) >= edges[1:]) & (last_end[:, :-1].amax(0) <= edges[1:])
                cuts = [0, *edges[1:][apart].tolist(), mask.seq_len]
        self._edges: list[int] = [*edges.tolist(), mask.seq_len + 1]
        self._first: list[int] = at_first.tolist()
        self._slope: list[int] = ((at_last - at_first) // steps).tolist()
        self._sums = [0, *itertools.accumulate(sums.tolist())]
        self.total = self._sums[-1]
        self.rows = mask.rows
        self.cuts = cuts if mask.seq_len else [0]

    def before(self, position: int) -> int:
        """Return the visible pairs of all queries before ``position``."""
        k = bisect_right(self._edges, position) - 1
        n = position - self._edges[k]
        return self._sums[k] + n * self._first[k] + self._slope[k] * (n * (n - 1) // 2)

    def at(self, position: int) -> int:
        """Return the visible pairs of a query."""
        k = bisect_right(self._edges, position) - 1
        return self._first[k] + self._slope[k] * (position - self._edges[k])

    def of(self, run: range) -> int:
        """Return the visible pairs of a run of neighbouring queries."""
        start, stop = run.start, run.stop
        k = bisect_right(self._edges, start) - 1
        if stop <= self._edges[k + 1]:
            n, slope = stop - start, self._slope[k]
            return n * (self._first[k] + slope * (start - self._edges[k])) + slope * (n * (n - 1) // 2)
        return self.before(stop) - self.before(start)


def _edges(mask: Mask) -> Tensor:
    """Return the positions, growing from 0, between which both ends of every row's interval are linear."""
    first, past, low, high, left, right = mask.first, mask.past, mask.low, mask.high, mask.left, mask.right
    # Aligned positions at which one of the bounds overtakes another, or an end of the sequence of keys.
    starts = (low + left, left, mask.seq_len_k + left, high + left)
    ends = (high - right - 1, -right - 1, mask.seq_len_k - right - 1, low - right - 1)
    inside = [x - mask.offset for x in (*starts, *ends)]
    bends = [x[(x > first) & (x < past)] for x in inside]
    return torch.cat([first.new_zeros(1), first[first < mask.seq_len], *bends]).unique()
