"""What a mask is: for every query an interval of visible keys, ``start <= key < end``, in global positions.

A mask is a list of pieces per row of the batch. For a query at position i in piece p, with
``a = i + seq_len_k - seq_len`` (sequences of different lengths are aligned at their ends, as in flash-attn),

    start = max(low[p],  a - left[p])           end = min(high[p], a + right[p] + 1)

so a full mask is one piece without bounds, causal is ``right = 0``, a packed document is a piece with ``low`` and
``high``, and intersecting two masks is a maximum of starts and a minimum of ends. ``start`` and ``end`` never fall as i
grows: kernels rely on it (kernels/contract.py), and maximum and minimum keep it. :mod:`.mask` makes masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FAR = 1 << 40  # further than any position, and i + FAR does not overflow


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
    def past(self) -> Tensor:
        """The first query after each piece, (rows, pieces)."""
        return torch.cat([self.first[:, 1:], torch.full_like(self.first[:, :1], self.seq_len)], 1)

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

    def seen(self, shards: Sequence[Sequence[range]]) -> list[list[range]]:
        """Return for each shard of queries the runs of keys that any of them sees in any row, growing, as long and as
        few as possible. Exact.

        Runs of neighbouring positions take time O(runs + pieces), strided ones O(positions).
        """
        runs = [(owner, r) for owner, shard in enumerate(shards) for r in shard if r]
        if not runs:
            return [[] for _ in shards]
        with torch.device("cpu"):
            if all(r.step == 1 for _, r in runs):
                owner, start, end = self._seen_by_runs(runs)
            else:
                at = torch.cat([torch.arange(r.start, r.stop, r.step) for _, r in runs])
                start, end = (x.long() for x in self.intervals(at))
                owner = torch.cat([torch.full((len(r),), o) for o, r in runs]).expand(self.rows, -1)
            some = end > start
            owner, start, end = owner[some], start[some], end[some]
            # Shards one after another on one line, with a gap between them, so that they are merged together.
            line = owner * (self.seq_len_k + 1)
            order = (line + start).argsort()
            owner, line, start, end = owner[order], line[order], start[order], end[order]
            if not len(owner):
                return [[] for _ in shards]
            reach = (line + end).cummax(0).values
            opens = torch.cat([reach.new_ones(1, dtype=torch.bool), (line + start)[1:] > reach[:-1]])
            closes = torch.cat([opens[1:], opens.new_ones(1)])
            merged: list[list[range]] = [[] for _ in shards]
            table = torch.stack([owner[opens], start[opens], (reach - line)[closes]], 1)
        for index, first, past in table.tolist():
            merged[index].append(range(first, past))
        return merged

    def _seen_by_runs(self, runs: Sequence[tuple[int, range]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (owner, start, end), each (rows, n), of the keys that runs of neighbouring queries see, one for every
        part of a run that is in one piece. Inside a piece the intervals of neighbouring queries join up.

        Args:
            runs: (owner, run), in any order.
        """
        runs = sorted(runs, key=lambda x: x[1].start)
        owners = torch.tensor([o for o, _ in runs])
        begins, stops = torch.tensor([r.start for _, r in runs]), torch.tensor([r.stop for _, r in runs])
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

    def digest(self) -> int:
        """Return a 63-bit hash of the mask's value, the same in every process."""
        h = hashlib.blake2b(f"{self.seq_len} {self.seq_len_k} {tuple(self.first.shape)}".encode(), digest_size=8)
        for x in (self.first, self.low, self.high, self.left, self.right):
            h.update(x.contiguous().numpy().tobytes())
        return int.from_bytes(h.digest(), "little") >> 1
