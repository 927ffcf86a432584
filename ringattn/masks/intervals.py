"""The class Mask: one or several intervals of visible keys per query, ``start <= key < end``, in global positions.

:class:`Intervals` has one interval per query: a list of pieces per row of the batch. For a query at position i in piece
p, with ``a = i + seq_len_k - seq_len`` (sequences of different lengths are aligned at their ends, as in flash-attn),

    start = max(low[p],  a - left[p])           end = min(high[p], a + right[p] + 1)

so a full mask is one piece without bounds, causal is ``right = 0``, a packed document is a piece with ``low`` and
``high``, and intersecting two masks is a maximum of starts and a minimum of ends. ``start`` and ``end`` never fall as i
grows: kernels rely on it (kernels/contract.py), and maximum and minimum keep it.

:class:`Union` has several disjoint intervals per query: its members. Kernels walk one member
after the other and carry their state, so that a mask is the sum of its members wherever something is counted.
:mod:`.common` and :mod:`.structured` make masks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Integers = np.ndarray[Any, np.dtype[np.int64]]
FAR = 1 << 40  # further than any position, and i + FAR does not overflow


class Mask:
    """Which keys each query sees: the sum of its ``members``, which share no key of any query."""

    seq_len: int
    seq_len_k: int

    @property
    def members(self) -> tuple[Intervals, ...]:
        """The intervals of each query, at least one; all of the same lengths and rows."""
        raise NotImplementedError(f"{type(self).__name__} must define members")

    @property
    def is_union(self) -> bool:
        """True if queries have several intervals, so that a kernel carries states from walk to walk."""
        return len(self.members) > 1

    @property
    def rows(self) -> int:
        """The number of different rows: 1, or the batch size."""
        return max(m.first.shape[0] for m in self.members)

    @property
    def offset(self) -> int:
        """Aligned position of query 0: the ends of both sequences coincide."""
        return self.seq_len_k - self.seq_len

    @property
    def max_keys_per_query(self) -> int:
        """The largest number of keys that any query sees, or a bound on it."""
        return min(sum(m.most_keys for m in self.members), self.seq_len_k)

    def check(self) -> None:
        """Check what kernels rely on.

        Raises:
            ValueError: pieces that do not begin at query 0 in growing order, or an end of the interval of keys that
                falls from one query to the next.
        """
        for member in self.members:
            member.check_order()

    def draw(self, row: int = 0) -> str:
        """Return a picture of a small mask: a line per query, # where a key is visible."""
        visible = self.dense()[row if self.rows > 1 else 0]
        return "\n".join(" ".join("#" if seen else "." for seen in line) for line in visible.tolist())

    def dense(self) -> Tensor:
        """Return the whole mask, (rows, seq_len, seq_len_k) bool, True where visible. For tests and pictures."""
        visible = torch.zeros(self.rows, self.seq_len, self.seq_len_k, dtype=torch.bool, device="cpu")
        keys = torch.arange(self.seq_len_k, device="cpu")
        for member in self.members:
            start, end = member.intervals(torch.arange(self.seq_len, device="cpu"))
            visible |= (start[..., None] <= keys) & (keys < end[..., None])
        return visible

    def edges(self) -> Tensor:
        """Return the positions, growing from 0, between which both ends of every interval of every row are linear."""
        return torch.cat([member.bends() for member in self.members]).unique()

    def __and__(self, other: Mask) -> Mask:
        """Return the mask of the keys that are visible under both."""
        _check_alike(self, other)
        both = [_intersection(a, b) for a in self.members for b in other.members]
        return _sum(both if len(both) == 1 else [m for m in both if m.sees_anything()] or both[:1])

    def __or__(self, other: Mask) -> Mask:
        """Return the mask of the keys that are visible under either.

        Raises:
            ValueError: a query sees a key under both: it would be counted twice. Exact, in time linear in pieces.
        """
        _check_alike(self, other)
        for a, b in itertools.product(self.members, other.members):
            _check_apart(a, b)
        return _sum([m for m in (*self.members, *other.members) if m.sees_anything()] or self.members[:1])

    def seen(self, shards: Sequence[Sequence[range]]) -> list[list[range]]:
        """Return for each shard of queries the runs of keys that any of them sees in any row, growing, as long and as
        few as possible. Exact.

        Runs of neighbouring positions take time O(runs + pieces), strided ones O(positions).
        """
        seen: list[list[range]] = [[] for _ in shards]
        for index, first, past in self.seen_by(table(shards)).T.tolist():
            seen[index].append(range(first, past))
        return seen

    def seen_by(self, runs: Integers) -> Integers:
        """Return what :meth:`seen` does, for the :func:`table` of shards: shard, first key and past the last one of
        each run, (3, runs)."""
        if not runs.size:
            return np.zeros((3, 0), np.int64)
        parts = zip(*(member.seen_apart(runs) for member in self.members), strict=True)
        owner, start, end = (torch.cat(list(map(torch.flatten, x))).numpy() for x in parts)
        owner, start, end = (x[end > start] for x in (owner, start, end))
        # Shards one after another on one line, with a gap between them, so that they are merged together.
        line = owner * (self.seq_len_k + 1)
        order = (line + start).argsort()
        owner, line, start, end = owner[order], line[order], start[order], end[order]
        reach = np.maximum.accumulate(line + end)
        opens = np.ones(len(owner), bool)
        opens[1:] = (line + start)[1:] > reach[:-1]
        closes = np.append(opens[1:], True)[: len(owner)]
        return np.stack([owner[opens], start[opens], (reach - line)[closes]])

    def digest(self) -> int:
        """Return a 63-bit hash of the mask's value, the same in every process."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> int:
        h = hashlib.blake2b(digest_size=8)
        for m in self.members:
            h.update(f"{m.seq_len} {m.seq_len_k} {tuple(m.first.shape)}".encode())
            for x in (m.first, m.low, m.high, m.left, m.right):
                h.update(x.contiguous().numpy().tobytes())
        return int.from_bytes(h.digest(), "little") >> 1


@dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """One interval of keys per query. Fields are (rows, pieces) int64 CPU tensors, rows = 1 or the batch size.

    Piece p of a row covers queries ``first[p] <= i < first[p + 1]`` (the last: up to ``seq_len``).
    """

    seq_len: int
    seq_len_k: int
    first: Tensor
    low: Tensor
    high: Tensor
    left: Tensor
    right: Tensor

    @property
    def members(self) -> tuple[Intervals, ...]:
        return (self,)

    @property
    def past(self) -> Tensor:
        """The first query after each piece, (rows, pieces)."""
        return torch.cat([self.first[:, 1:], torch.full_like(self.first[:, :1], self.seq_len)], 1)

    @property
    def most_keys(self) -> int:
        """The largest number of keys that any query sees, or a bound on it."""
        seen = torch.minimum(self.high - self.low, self.left + self.right + 1)
        return int(seen.amax().clamp(0, self.seq_len_k))

    def check_order(self) -> None:
        """Raise ValueError for pieces that do not begin at query 0 in growing order, or an end that falls."""
        if self.first.numel() and (bool((self.first[:, 0] != 0).any()) or bool((self.first.diff(dim=1) < 0).any())):
            raise ValueError("pieces of a mask must begin at query 0 and grow; sort `first`")
        # Inside a piece neither end falls, so it is enough to look before and at the first query of each piece.
        edges = torch.cat([self.first.flatten() - 1, self.first.flatten()]).unique()
        edges = edges[(edges >= 0) & (edges < self.seq_len)]
        for name, bound in zip(("start", "end"), self.intervals(edges), strict=True):
            falls = (bound.diff(dim=1) < 0).nonzero()
            if len(falls):
                row, column = falls[0].tolist()
                before, after, query = int(bound[row, column]), int(bound[row, column + 1]), int(edges[column + 1])
                raise ValueError(
                    f"the {name} of the visible keys falls from {before} to {after} at query {query} of row {row}; a "
                    "mask is one interval of keys per query, whose ends never fall"
                )

    def _fields(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return low, high, left and right of the pieces at positions (rows, n)."""
        rows = positions.shape[0]
        first = self.first.to(positions.device).expand(rows, -1).contiguous()
        piece = torch.searchsorted(first, positions.contiguous(), right=True) - 1
        low, high, left, right = (
            x.to(positions.device).expand(rows, -1).gather(1, piece)
            for x in (self.low, self.high, self.left, self.right)
        )
        return low, high, left, right

    def intervals(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible keys of queries at positions (n,): start and end, each (rows, n) int32, on the positions'
        device,
        with ``0 <= start <= end <= seq_len_k``; start == end sees nothing."""
        low, high, left, right = self._fields(positions.expand(self.rows, -1))
        aligned = positions + self.offset
        start = torch.maximum(low, aligned - left).clamp(0, self.seq_len_k)
        end = torch.minimum(high, aligned + right + 1).clamp(0, self.seq_len_k)
        return start.to(torch.int32), torch.maximum(start, end).to(torch.int32)

    def bends(self) -> Tensor:
        """Return the positions between which both ends of every row's interval are linear, in any order, 0 included."""
        first, past, low, high, left, right = self.first, self.past, self.low, self.high, self.left, self.right
        # Aligned positions at which one of the bounds overtakes another, or an end of the sequence of keys.
        starts = (low + left, left, self.seq_len_k + left, high + left)
        ends = (high - right - 1, -right - 1, self.seq_len_k - right - 1, low - right - 1)
        inside = [x - self.offset for x in (*starts, *ends)]
        return torch.cat(
            [first.new_zeros(1), first[first < self.seq_len], *(x[(x > first) & (x < past)] for x in inside)]
        )

    def sees_anything(self) -> bool:
        """Return whether any query sees any key."""
        edges = self.edges()  # where both ends are linear, their distance is positive at an end or nowhere
        lasts = torch.cat([edges[1:] - 1, edges.new_full((1,), self.seq_len - 1)])
        start, end = self.intervals(torch.cat([edges, lasts]).clamp(0, max(self.seq_len - 1, 0)))
        return self.seq_len > 0 and bool((end > start).any())

    def seen_apart(self, runs: Integers) -> tuple[Tensor, Tensor, Tensor]:
        """Return (owner, start, end), each (rows, n), of the keys that the queries of runs see (:func:`table`)."""
        owners, starts, stops, steps = runs
        if (steps == 1).all():
            return self._seen_by_neighbours(runs[:, starts.argsort(kind="stable")])
        counts = (stops - starts + steps - 1) // steps
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        at = torch.from_numpy(starts.repeat(counts) + inside * steps.repeat(counts))
        start, end = (x.long() for x in self.intervals(at))
        return torch.from_numpy(owners.repeat(counts)).expand(start.shape[0], -1), start, end

    def _seen_by_neighbours(self, runs: Integers) -> tuple[Tensor, Tensor, Tensor]:
        """Return (owner, start, end), each (rows, n), of the keys that runs of neighbouring queries see, one for every
        part of a run that is in one piece. Inside a piece the intervals of neighbouring queries join up.

        Args:
            runs: growing.
        """
        owners, begins, stops = torch.from_numpy(np.ascontiguousarray(runs[:3]))
        points = torch.cat([self.first, begins.expand(self.rows, -1)], 1).sort(1).values
        run = torch.searchsorted(begins, points, right=True) - 1
        past = torch.cat([points[:, 1:], torch.full_like(points[:, :1], self.seq_len)], 1)
        past = torch.minimum(past, stops[run.clamp(min=0)])
        low, high, left, right = self._fields(points)
        low, high = low.clamp(min=0), high.clamp(max=self.seq_len_k)
        # The first and the last query here that see anything.
        first = torch.maximum(points + self.offset, low - right)
        last = torch.minimum(past + self.offset, high + left) - 1
        start, end = torch.maximum(low, first - left), torch.minimum(high, last + right + 1)
        none = (run < 0) | (past <= points) | (last < first) | (low >= high) | (left + right < 0)
        return owners[run.clamp(min=0)], start, torch.where(none, start, end)


class Union(Mask):
    """Several intervals of keys per query, made by ``a | b``."""

    def __init__(self, members: Sequence[Intervals]) -> None:
        self._members = tuple(members)
        self.seq_len, self.seq_len_k = members[0].seq_len, members[0].seq_len_k

    @property
    def members(self) -> tuple[Intervals, ...]:
        return self._members


def _sum(members: Sequence[Intervals]) -> Mask:
    """Return the sum of members that share no key, all with the same number of rows."""
    if len(members) == 1:
        return members[0]
    rows = max(m.first.shape[0] for m in members)
    return Union([_with_rows(m, rows) for m in members])


def _with_rows(m: Intervals, rows: int) -> Intervals:
    if m.first.shape[0] == rows:
        return m
    fields = (x.expand(rows, -1).contiguous() for x in (m.first, m.low, m.high, m.left, m.right))
    return Intervals(m.seq_len, m.seq_len_k, *fields)


def _check_alike(a: Mask, b: Mask) -> None:
    if not isinstance(b, Mask):
        raise TypeError(f"the other operand of a mask is of type {type(b).__name__}; pass a ringattn.mask.Mask")
    if (a.seq_len, a.seq_len_k) != (b.seq_len, b.seq_len_k):
        raise ValueError(
            f"masks are for {a.seq_len} queries and {a.seq_len_k} keys, and for {b.seq_len} and {b.seq_len_k}; make "
            "both for the whole row"
        )
    if {a.rows, b.rows} - {1, max(a.rows, b.rows)}:
        raise ValueError(f"masks have {a.rows} and {b.rows} rows; use 1 or the batch size")


def _check_apart(a: Intervals, b: Intervals) -> None:
    """Raise ValueError naming a query that sees a key under both.

    Between edges all four ends are linear in the query, so that each of four differences is positive from some query on
    or up to one, and all of them, which is an overlap, in a run of queries.
    """
    if not a.seq_len:
        return
    edges = torch.cat([a.bends(), b.bends()]).unique()
    lasts = torch.cat([edges[1:] - 1, edges.new_full((1,), a.seq_len - 1)])

    def ends(at: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.long() for x in (*a.intervals(at), *b.intervals(at)))

    low, high = edges.clone(), lasts + 1  # queries that may overlap, (rows, edges) below
    for now, then in zip(_gaps(*ends(edges)), _gaps(*ends(lasts)), strict=True):
        slope = (then - now) // (lasts - edges).clamp(min=1)  # -1, 0 or 1
        first = torch.where(now > 0, edges, torch.where(slope > 0, edges - now + 1, lasts + 1))
        past = torch.where(slope < 0, edges + now, lasts + 1)
        low, high = torch.maximum(low, first), torch.minimum(high, past)
    shared = (low < high).nonzero()
    if len(shared):
        row, column = shared[0].tolist()
        query = int(low[row, column])
        start, end, start_b, end_b = (int(x[row % len(x), 0]) for x in ends(torch.tensor([query])))
        raise ValueError(
            f"query {query} of row {row} sees keys {start} to {end - 1} under one mask and {start_b} to {end_b - 1} "
            "under the other; masks of a union share no key, so intersect one of them with what the other hides"
        )


def _gaps(start: Tensor, end: Tensor, start_b: Tensor, end_b: Tensor) -> tuple[Tensor, ...]:
    """Return four differences that are all positive where two intervals overlap."""
    return end - start, end_b - start_b, end_b - start, end - start_b


def _intersection(a: Intervals, b: Intervals) -> Intervals:
    rows = max(a.rows, b.rows)
    first = torch.cat([a.first.expand(rows, -1), b.first.expand(rows, -1)], 1).sort(1).values
    (low, *others), (low_b, *others_b) = a._fields(first), b._fields(first)
    return Intervals(a.seq_len, a.seq_len_k, first, torch.maximum(low, low_b), *map(torch.minimum, others, others_b))


def table(shards: Sequence[Sequence[range]]) -> Integers:
    """Return the shard, start, stop and step of every run that is not empty, in order: (4, runs)."""
    runs = [run for shard in shards for run in shard if run]
    owners = np.arange(len(shards)).repeat([sum(map(bool, shard)) for shard in shards])
    numbers = owners, [run.start for run in runs], [run.stop for run in runs], [run.step for run in runs]
    return np.array(numbers, np.int64)
