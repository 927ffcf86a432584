"""Masks: for every query an interval of visible keys, ``start <= key < end``, in global positions.

Functions make masks, ``&`` intersects them, ``print(mask.draw())`` shows one (queries down, keys to the right):

>>> n = 8
>>> masks = causal(n), causal(n) & window(n, 2, -1), causal(n) & packed([0, 3, 8], n)
>>> for rows in zip(*(m.draw().splitlines() for m in masks)):
...     print("   ".join(rows))
# . . . . . . .   # . . . . . . .   # . . . . . . .
# # . . . . . .   # # . . . . . .   # # . . . . . .
# # # . . . . .   # # # . . . . .   # # # . . . . .
# # # # . . . .   . # # # . . . .   . . . # . . . .
# # # # # . . .   . . # # # . . .   . . . # # . . .
# # # # # # . .   . . . # # # . .   . . . # # # . .
# # # # # # # .   . . . . # # # .   . . . # # # # .
# # # # # # # #   . . . . . # # #   . . . # # # # #

A mask is a list of pieces per row of the batch. For a query at position i in piece p, with
``a = i + seq_len_k - seq_len`` (sequences of different lengths are aligned at their ends, as in flash-attn),

    start = max(low[p],  a - left[p])           end = min(high[p], a + right[p] + 1)

so a full mask is one piece without bounds, causal is ``right = 0``, a packed document is a piece with ``low`` and
``high``, and intersecting two masks is a maximum of starts and a minimum of ends. ``start`` and ``end`` never fall as i
grows: kernels rely on it (kernels/contract.py). :func:`pieces` makes a mask that has no function here; pass it as
``ringattn.plan(seq_len, mask=...)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FAR = 1 << 40  # further than any position, and i + _FAR does not overflow


@dataclass(frozen=True, eq=False)
class Mask:
    """Pieces of (queries x keys): fields are (rows, pieces) int64 CPU tensors, rows = 1 or the batch size.

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
    def rows(self) -> int:
        return self.first.shape[0]

    @property
    def offset(self) -> int:
        """Aligned position of query 0: the ends of both sequences coincide."""
        return self.seq_len_k - self.seq_len

    @property
    def max_keys_per_query(self) -> int:
        """The largest number of keys that any query sees, or a bound on it."""
        seen = torch.minimum(self.high - self.low, self.left + self.right + 1)
        return int(seen.amax().clamp(0, self.seq_len_k))

    def check(self) -> None:
        """Check what kernels rely on.

        Raises:
            ValueError: pieces that do not begin at query 0 in growing order, or an end of the interval of keys that
                falls from one query to the next.
        """
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

    def draw(self, row: int = 0) -> str:
        """Return a picture of a small mask: a line per query, # where a key is visible."""
        visible = self.dense()[row if self.rows > 1 else 0]
        return "\n".join(" ".join("#" if seen else "." for seen in line) for line in visible.tolist())

    def __and__(self, other: Mask) -> Mask:
        """Return the mask of the keys that are visible under both."""
        if (self.seq_len, self.seq_len_k) != (other.seq_len, other.seq_len_k):
            raise ValueError(
                f"masks are for different lengths: ({self.seq_len}, {self.seq_len_k}) and "
                f"({other.seq_len}, {other.seq_len_k})"
            )
        rows = max(self.rows, other.rows)
        if {self.rows, other.rows} - {1, rows}:
            raise ValueError(f"masks have {self.rows} and {other.rows} rows; use 1 or the batch size")
        first = torch.cat([self.first.expand(rows, -1), other.first.expand(rows, -1)], 1).sort(1).values
        a, b = self._fields(first), other._fields(first)
        return Mask(
            self.seq_len,
            self.seq_len_k,
            first,
            torch.maximum(a[0], b[0]),
            torch.minimum(a[1], b[1]),
            torch.minimum(a[2], b[2]),
            torch.minimum(a[3], b[3]),
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

    def dense(self) -> Tensor:
        """Return the whole mask, (rows, seq_len, seq_len_k) bool, True where visible. For tests and pictures."""
        start, end = self.intervals(torch.arange(self.seq_len, device="cpu"))
        keys = torch.arange(self.seq_len_k, device="cpu")
        return (start[..., None] <= keys) & (keys < end[..., None])

    def sees(self, queries: Sequence[range], key_shards: Sequence[Sequence[range]]) -> list[bool]:
        """Return for each shard of keys whether any of the queries sees any of its keys, in any row. Exact.

        Runs of neighbouring positions are decided piece by piece, in time O(pieces); strided ones
        position by position.
        """
        seen = [False] * len(key_shards)
        runs = [(o, r) for o, shard in enumerate(key_shards) for r in shard]
        if not runs or not any(queries):
            return seen
        if all(r.step == 1 for r in queries) and all(r.step == 1 for _, r in runs):
            hits = self._runs_meet(queries, [r for _, r in runs])
        else:
            hits = self._strided_meet(queries, [r for _, r in runs])
        for (o, _), hit in zip(runs, hits, strict=True):
            seen[o] = seen[o] or hit
        return seen

    def _runs_meet(self, queries: Sequence[range], keys: Sequence[range]) -> list[bool]:
        key_first = torch.tensor([r.start for r in keys], device="cpu")[:, None]
        key_past = torch.tensor([r.stop for r in keys], device="cpu")[:, None]
        past = torch.cat([self.first[:, 1:], torch.full((self.rows, 1), self.seq_len, device="cpu")], 1)
        hits = torch.zeros(len(keys), dtype=torch.bool, device="cpu")
        for run in queries:
            i0, i1 = self.first.clamp(min=run.start), past.clamp(max=run.stop)
            inside = i1 > i0
            i0, i1, low, high, left, right = (x[inside] for x in (i0, i1, self.low, self.high, self.left, self.right))
            j0, j1 = torch.maximum(low, key_first), torch.minimum(high, key_past)  # (runs, pieces)
            # Key j is seen by aligned positions j - right <= a <= j + left, and these ranges of neighbouring
            # keys join up, because left + right >= 0 unless the piece is empty.
            meets = (torch.maximum(i0, j0 - right - self.offset) < torch.minimum(i1, j1 + left - self.offset)) & (
                left + right >= 0
            )
            hits |= (meets & (j1 > j0)).any(1)
        return hits.tolist()

    def _strided_meet(self, queries: Sequence[range], keys: Sequence[range]) -> list[bool]:
        start, end = self.intervals(torch.cat([torch.arange(r.start, r.stop, r.step, device="cpu") for r in queries]))
        return [bool((count_below(r, end) > count_below(r, start)).any()) for r in keys]

    def digest(self) -> int:
        """Return a 63-bit hash of the mask's value, the same in every process."""
        h = hashlib.blake2b(f"{self.seq_len} {self.seq_len_k} {tuple(self.first.shape)}".encode(), digest_size=8)
        for x in (self.first, self.low, self.high, self.left, self.right):
            h.update(x.contiguous().numpy().tobytes())
        return int.from_bytes(h.digest(), "little") >> 1


def estimate_pairs(
    mask: Mask, shards: Sequence[Sequence[range]], shards_k: Sequence[Sequence[range]]
) -> list[list[float]]:
    """Return about how many (query, key) pairs of any two ranks are visible, from a sample of each rank's queries, on
    average over the mask's rows: ``pairs[q_rank][k_rank]``."""
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
        return [[0.0] * n for _ in range(n)]
    with torch.device("cpu"):
        bounds = mask.intervals(torch.tensor(positions))
        first, step, size = (torch.tensor(x) for x in zip(*((r.start, r.step, len(r)) for _, r in runs), strict=True))
        below = [((b[..., None] - first + step - 1) // step).clamp(min=0).minimum(size) for b in bounds]
        seen = (below[1] - below[0]).sum(0) * torch.tensor(weights, dtype=torch.float64)[:, None]  # (queries, runs)
        pairs = torch.zeros(n, len(runs), dtype=torch.float64).index_add_(0, torch.tensor(owners), seen)
        whole = torch.zeros(n, n, dtype=torch.float64)
        return whole.index_add_(1, torch.tensor([o for o, _ in runs]), pairs).tolist()


def _position(shard: Sequence[range], index: int) -> int:
    for run in shard:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


def count_below(run: range, bound: Tensor) -> Tensor:
    """Return how many members of ``run`` are smaller than each bound."""
    return ((bound - run.start + run.step - 1) // run.step).clamp(0, len(run))


def pieces(
    seq_len: int,
    seq_len_k: int,
    *,
    first: Tensor | None = None,
    low: int | Tensor = -_FAR,
    high: int | Tensor = _FAR,
    left: int | Tensor = _FAR,
    right: int | Tensor = _FAR,
) -> Mask:
    """Return a mask of pieces, the way to write one of your own.

    For a query at position i in piece p, with ``a = i + seq_len_k - seq_len``, keys j are visible with ``low[p] <= j <
    high[p]`` and ``a - left[p] <= j <= a + right[p]``. Neither end of that interval may fall as i grows.

    Args:
        first: (rows, pieces) integers, the first query of each piece, growing from 0; one piece if absent. ``rows`` is
        1
            or the batch size.
        low, high, left, right: numbers, or tensors like ``first``; absent ones hide nothing.

    Raises:
        TypeError: not integers.
        ValueError: a shape that is not (rows, pieces).
    """
    first = torch.as_tensor([[0]] if first is None else first, device="cpu")
    fields = []
    for name, bound in (("first", first), ("low", low), ("high", high), ("left", left), ("right", right)):
        x = torch.as_tensor(bound, device="cpu").detach()
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {x.dtype}; pass integers")
        if (name == "first" and (x.ndim != 2 or 0 in x.shape)) or (x.ndim and x.shape != first.shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (rows, pieces), at least (1, 1) and that of `first`"
            )
        fields.append(x.to(torch.int64).expand_as(first).contiguous())
    return Mask(seq_len, seq_len_k, *fields)


def full(seq_len: int, seq_len_k: int | None = None) -> Mask:
    """Return the mask in which every query sees every key."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k)


def causal(seq_len: int, seq_len_k: int | None = None) -> Mask:
    """Return the causal mask: key j is visible to aligned position a iff j <= a."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k, right=0)


def window(seq_len: int, left: int, right: int, seq_len_k: int | None = None) -> Mask:
    """Return a sliding window: ``a - left <= j <= a + right``; -1 means unbounded, as in flash-attn.

    Raises:
        ValueError: a bound below -1.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound < -1:
            raise ValueError(f"window_size {name} is {bound}; use -1 for unbounded or a number of keys >= 0")
    return pieces(
        seq_len,
        seq_len if seq_len_k is None else seq_len_k,
        left=_FAR if left == -1 else min(left, _FAR),
        right=_FAR if right == -1 else min(right, _FAR),
    )


def prefix(seq_len: int, length: int, seq_len_k: int | None = None) -> Mask:
    """Return the mask of a prefix-LM: the first ``length`` keys are visible to every query, the others causally.

    Raises:
        ValueError: length outside 0..seq_len_k.
    """
    seq_len_k = seq_len if seq_len_k is None else seq_len_k
    if not 0 <= length <= seq_len_k:
        raise ValueError(f"prefix is {length}; it must be between 0 and the number of keys, {seq_len_k}")
    # Queries before the end of the prefix see up to it, the others up to themselves.
    inside = min(max(length - (seq_len_k - seq_len), 0), seq_len)
    first = torch.tensor([[0, inside]], device="cpu")
    return pieces(
        seq_len,
        seq_len_k,
        first=first,
        high=torch.tensor([[length, _FAR]], device="cpu"),
        right=torch.tensor([[_FAR, 0]], device="cpu"),
    )


def packed(cu_seqlens: Sequence[int] | Tensor, seq_len: int) -> Mask:
    """Return the mask of packed documents: queries see keys of their own document. ``cu_seqlens`` are the global
    boundaries
    ``[0, end of document 0, ..., seq_len]``; empty documents are allowed.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, not starting at 0, falling, or not ending at seq_len.
    """
    bounds = torch.as_tensor(cu_seqlens, device="cpu").detach()
    if bounds.is_floating_point() or bounds.is_complex() or bounds.dtype == torch.bool:
        raise TypeError(f"cu_seqlens has dtype {bounds.dtype}; pass integers")
    if bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(bounds.shape)}; it must be (documents + 1,), at least [0, {seq_len}]"
        )
    bounds = bounds.to(torch.int64)
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts with {bounds[0].item()}; it must start with 0")
    falls = (bounds[1:] < bounds[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"cu_seqlens falls from {bounds[at].item()} to {bounds[at + 1].item()} at index {at + 1}; "
            "it must be sorted: boundaries of the packed documents, not their lengths"
        )
    if bounds[-1] != seq_len:
        raise ValueError(f"cu_seqlens ends with {bounds[-1].item()}; it must end with seq_len = {seq_len}")
    bounds = bounds.unique()  # sorted; empty documents vanish
    if seq_len == 0:
        return full(0)
    return pieces(seq_len, seq_len, first=bounds[None, :-1], low=bounds[None, :-1], high=bounds[None, 1:])


def documents(ids: Tensor, seq_len: int) -> Mask:
    """Return the mask of packed documents that differ by row: ``ids`` (batch, seq_len) integers, -1 for padding.

    Neighbouring positions with the same id are one document; padding sees nothing and is not seen.

    Raises:
        TypeError: not integers.
        ValueError: wrong shape, ids below -1, or a document that is interrupted and goes on later.
    """
    ids = torch.as_tensor(ids, device="cpu").detach()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"documents has dtype {ids.dtype}; pass integer ids, -1 for padding")
    if ids.ndim != 2 or ids.shape[1] != seq_len:
        raise ValueError(
            f"documents has shape {tuple(ids.shape)}; it must be (batch, seq_len) with seq_len = {seq_len}"
        )
    if ids.numel() and int(ids.min()) < -1:
        raise ValueError(f"documents has the id {int(ids.min())}; ids are >= 0, and -1 is padding")
    rows = []
    for b, row in enumerate(ids):
        runs, lengths = torch.unique_consecutive(row, return_counts=True)
        real = runs[runs >= 0]
        values, counts = real.unique(return_counts=True)
        if len(values) != len(real):
            broken = int(values[counts > 1][0])
            raise ValueError(
                f"documents[{b}] has the id {broken} in {int(counts.max())} separate runs; "
                "give each run of neighbouring tokens its own id"
            )
        past = lengths.cumsum(0)
        rows.append((past - lengths, past, runs >= 0))
    count = max((len(r[0]) for r in rows), default=0)
    if not count:
        return pieces(seq_len, seq_len, first=torch.zeros(max(1, len(ids)), 1, dtype=torch.int64, device="cpu"))
    shape = (len(rows), count)
    first = torch.full(shape, seq_len, device="cpu")  # unused pieces begin where no query is
    low, high = torch.zeros(shape, dtype=torch.int64, device="cpu"), torch.zeros(shape, dtype=torch.int64, device="cpu")
    left, right = torch.full(shape, _FAR, device="cpu"), torch.full(shape, _FAR, device="cpu")
    for b, (begin, past, real) in enumerate(rows):
        n = len(begin)
        first[b, :n] = begin
        # A padding token sees [i, i): empty, and in order with its neighbours' intervals.
        low[b, :n], high[b, :n] = torch.where(real, begin, -_FAR), torch.where(real, past, _FAR)
        left[b, :n], right[b, :n] = torch.where(real, _FAR, 0), torch.where(real, _FAR, -1)
    return Mask(seq_len, seq_len, first, low, high, left, right)
