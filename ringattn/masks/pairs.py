"""Work: how many keys each query sees, summed over the rows of a mask, as a function of the position.

Between neighbouring *edges* (the first queries of pieces, and where a bound of a mask begins or ceases to matter) that
number is linear, so the work of any run of queries is the difference of two values of a sum of squares. Everything here
is exact, in integers, in time O(pieces log pieces) and whatever the length of the sequence.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memo import Memo
from .intervals import Integers, Mask

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Work:
    """The visible pairs of a mask by position.

    Attributes:
        total: visible pairs of all queries.
        rows: of the mask.
        cuts: positions, from 0 to seq_len, that divide the row into parts which see nothing of each other: documents.
            Where queries and keys are not the same positions, there is one part.
        causal: each query sees as many keys as there are up to it in its part, in the only row.
        full: each query sees all keys of its part, in the only row.
    """

    @classmethod
    def of_mask(cls, mask: Mask) -> Work:
        """Return the work of a mask, made once for equal masks."""
        return _works.once(mask.digest(), lambda: cls(mask))

    def __init__(self, mask: Mask) -> None:
        edges, seq_len = mask.edges().numpy(), mask.seq_len
        past = np.append(edges[1:], seq_len)
        at_first, at_last = np.zeros_like(edges), np.zeros_like(edges)
        # The first key that queries from each edge on see, and past the last that queries before each edge do.
        lowest, highest = np.full_like(edges, seq_len), np.zeros_like(edges)
        for member in mask.members:
            both = torch.from_numpy(np.concatenate([edges, np.maximum(past - 1, 0)]))
            bounds = (np.split(x.numpy().astype(np.int64), 2, 1) for x in member.intervals(both))
            (start, last_start), (end, last_end) = bounds
            at_first += (end - start).sum(0)
            at_last += (last_end - last_start).sum(0)
            some = (end > start) | (last_end > last_start)
            lowest = np.minimum(lowest, np.where(some, start, seq_len).min(0))
            highest = np.maximum(highest, np.where(some, last_end, 0).max(0))
        steps = np.maximum(past - edges - 1, 1)
        sums = (past - edges) * (at_first + at_last) // 2
        apart = (np.minimum.accumulate(lowest[::-1])[::-1][1:] >= edges[1:]) & (
            np.maximum.accumulate(highest)[:-1] <= edges[1:]
        )
        slopes = (at_last - at_first) // steps
        self._tables = edges, at_first, slopes, sums.cumsum() - sums
        begins = np.append(0, edges[1:][apart])
        ends = np.append(begins[1:], seq_len)
        part = np.searchsorted(begins, edges, side="right") - 1
        begins, ends = begins[part], ends[part]
        one = mask.rows == 1 and mask.offset == 0
        self.causal = one and bool((at_first == edges - begins + 1).all() and (at_last == past - begins).all())
        self.full = one and bool((at_first == ends - begins).all() and (at_last == ends - begins).all())
        cuts = [0, *(edges[1:][apart].tolist() if mask.offset == 0 else []), seq_len]
        self._edges: list[int] = [*edges.tolist(), seq_len + 1]
        self._first: list[int] = at_first.tolist()
        self._slope: list[int] = slopes.tolist()
        self._sums = [0, *itertools.accumulate(sums.tolist())]
        self.total = self._sums[-1]
        self.rows = mask.rows
        self.cuts = cuts if seq_len else [0]

    def before(self, position: int) -> int:
        """Return the visible pairs of all queries before ``position``."""
        k = bisect_right(self._edges, position) - 1
        n = position - self._edges[k]
        return self._sums[k] + n * self._first[k] + self._slope[k] * (n * (n - 1) // 2)

    def before_all(self, positions: Integers) -> Integers:
        """Return the visible pairs of all queries before each position."""
        edges, first, slope, sums = self._tables
        k = np.searchsorted(edges, positions, side="right") - 1
        n = positions - edges[k]
        return sums[k] + n * first[k] + slope[k] * (n * (n - 1) // 2)

    def at(self, position: int) -> int:
        """Return the visible pairs of a query."""
        k = bisect_right(self._edges, position) - 1
        return self._first[k] + self._slope[k] * (position - self._edges[k])

    def about(self, run: range) -> tuple[int, int, int]:
        """Return the visible pairs of a run of neighbouring queries, of its first query and of its last."""
        start, last = run.start, run.stop - 1
        k = bisect_right(self._edges, start) - 1
        n, slope = start - self._edges[k], self._slope[k]
        at_edge = self._first[k]
        first = at_edge + slope * n
        if last < self._edges[k + 1]:
            more = last - start
            return (more + 1) * first + slope * (more * (more + 1) // 2), first, first + slope * more
        j = bisect_right(self._edges, last, k) - 1
        m, first_last, slope_last = last - self._edges[j], self._first[j], self._slope[j]
        before = self._sums[k] + n * at_edge + slope * (n * (n - 1) // 2)
        past = self._sums[j] + (m + 1) * first_last + slope_last * (m * (m + 1) // 2)
        return past - before, first, first_last + slope_last * m

    def of(self, run: range) -> int:
        """Return the visible pairs of a run of neighbouring queries."""
        return self.before(run.stop) - self.before(run.start)


_works: Memo[Work] = Memo(8)


def estimate_pairs(mask: Mask, shards: Sequence[Sequence[range]], shards_k: Sequence[Sequence[range]]) -> Numbers:
    """Return about how many (query, key) pairs of any two ranks are visible, from a sample of each rank's queries, on
    average over the mask's rows: ``pairs[q_rank, k_rank]``."""
    n = len(shards)
    sample = max(8, 512 // n)
    positions, owners, weights = [], [], []
    for rank, shard in enumerate(shards):
        length = sum(map(len, shard))
        count = min(length, sample)
        queries = [_position(shard, (2 * i + 1) * length // (2 * count)) for i in range(count)]
        positions += queries
        owners += [rank] * len(queries)
        weights += [length / max(count, 1) / mask.rows] * count
    runs = [(owner, run) for owner, shard in enumerate(shards_k) for run in shard]
    if not positions or not runs:
        return np.zeros((n, n))
    with torch.device("cpu"):
        first, step, size = (torch.tensor(x) for x in zip(*((r.start, r.step, len(r)) for _, r in runs), strict=True))
        seen = torch.zeros(len(positions), len(runs), dtype=torch.float64)
        for member in mask.members:
            below = [b[..., None] - first for b in member.intervals(torch.tensor(positions))]
            if bool((step > 1).any()):  # a division takes longer than all the rest
                below = [(b + step - 1) // step for b in below]
            below = [b.clamp(min=0).minimum(size) for b in below]
            seen += (below[1] - below[0]).sum(0)
        seen *= torch.tensor(weights, dtype=torch.float64)[:, None]
        pairs = torch.zeros(n, len(runs), dtype=torch.float64).index_add_(0, torch.tensor(owners), seen)
        whole = torch.zeros(n, n, dtype=torch.float64)
        numbers: Numbers = whole.index_add_(1, torch.tensor([o for o, _ in runs]), pairs).numpy()
    return numbers


def _position(shard: Sequence[range], index: int) -> int:
    for run in shard:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


def count_below(run: range, bound: Tensor) -> Tensor:
    """Return how many members of ``run`` are smaller than each bound."""
    return ((bound - run.start + run.step - 1) // run.step).clamp(0, len(run))
