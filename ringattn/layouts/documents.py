"""Causal documents that are packed into a row: what runs of their tokens cost a rank.

A rank with some runs computes tiles of TILE queries and TILE keys, and fetches the keys before its queries that it does
not hold. Tiles of queries begin where runs begin, and tiles of keys where those of queries do (:mod:`.alignment`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 128  # queries in a tile of the kernels, and keys
LONG = 1024  # documents of this many tokens or more are cut at whole tiles

Array = NDArray[np.int64]


class Rank(NamedTuple):
    """The runs of a rank, growing, and what they cost.

    Attributes:
        tokens, pairs: of its queries; visible ones.
        tiles: of TILE queries and TILE keys.
        fetched: keys that its queries see and no run of it holds.
    """

    runs: list[range]
    tokens: int
    pairs: int
    tiles: int
    fetched: int


class Item(NamedTuple):
    """Neighbouring positions that stay together, unless they are cut.

    ``first``: where their document begins if it is long; -1 for neighbouring short ones.
    """

    start: int
    stop: int
    first: int


class Share(NamedTuple):
    """What a rank holds of a document: tokens, their pairs, and how many tokens of the document end with the last of
    them."""

    reach: int
    tokens: int
    pairs: int


def joined(pieces: Iterable[range]) -> list[range]:
    """Return runs of neighbouring positions, growing, from pieces in any order, none of which is empty."""
    runs: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if runs and runs[-1].stop == piece.start:
            piece = range(runs.pop().start, piece.stop)
        runs.append(piece)
    return runs


class Documents:
    """Causal documents, by their boundaries; long ones are cut at multiples of ``tile`` tokens before their end."""

    def __init__(self, cuts: Sequence[int], tile: int = TILE) -> None:
        self.cuts, self.tile = cuts, tile
        self.table = np.array(cuts, np.int64)
        lengths = np.diff(self.table)
        self.sums = np.concatenate([[0], np.cumsum(lengths * (lengths + 1) // 2)])

    def first(self, position: int) -> int:
        """Return where the document of a position begins."""
        return self.cuts[bisect_right(self.cuts, position) - 1]

    def before(self, positions: Array) -> Array:
        """Return the visible pairs of all queries before each position."""
        document = np.searchsorted(self.table, positions, side="right") - 1
        inside = positions - self.table[document]
        return self.sums[document] + inside * (inside + 1) // 2

    def tiles(self, run: range) -> int:
        """Return the tiles of a run."""
        start, stop = run.start, run.stop
        shift = -start % TILE  # tiles of keys begin where those of queries do: see :mod:`.alignment`
        count = -(-(stop - start) // TILE)
        tiles = count * ((start + shift) // TILE) + count * (count + 1) // 2  # before the ends of all tiles of queries
        index = 0
        while start < stop:
            index = bisect_right(self.cuts, start, index)
            begin, past = self.cuts[index - 1], min(self.cuts[index], stop)
            count = -(-(past - start) // TILE)  # tiles of queries that begin in this document
            tiles -= count * ((begin + shift) // TILE)
            start += count * TILE
        return tiles

    def ranks(self, shards: Sequence[Iterable[range]]) -> list[Rank]:
        """Return ranks with these pieces."""
        runs = [joined(pieces) for pieces in shards]
        spans = np.array([(run.start, run.stop) for some in runs for run in some], np.int64).reshape(-1, 2)
        start, stop = spans[:, 0], spans[:, 1]
        counts = [len(some) for some in runs]
        owner = np.repeat(np.arange(len(runs)), counts)
        opens = np.concatenate([[True], owner[1:] != owner[:-1]])[: len(owner)]  # the first run of a rank
        document = np.searchsorted(self.table, start, side="right") - 1
        last = np.searchsorted(self.table, stop, side="right") - 1
        first = self.table[document]
        inside, past = start - first, stop - self.table[last]
        pairs = self.sums[last] - self.sums[document] + (past * (past + 1) - inside * (inside + 1)) // 2
        keys = np.where(opens, first, np.maximum(first, np.roll(stop, 1)))  # the first that no run before sees
        seen = stop - keys
        shift = -start % TILE  # tiles of keys begin where those of queries do: see :mod:`.alignment`
        # Tiles of queries begin where runs begin.
        count = (stop - start + TILE - 1) // TILE
        run = np.repeat(np.arange(len(start)), count)
        begin = start[run] + TILE * (np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count))
        end = np.minimum(begin + TILE, stop[run]) + shift[run]
        low = self.table[np.searchsorted(self.table, begin, side="right") - 1] + shift[run]
        tiles = (end + TILE - 1) // TILE - low // TILE
        sums = np.zeros((3, len(runs)), np.int64)
        for row, numbers in zip(sums, (stop - start, pairs, seen), strict=True):
            np.add.at(row, owner, numbers)
        tiles_of = np.bincount(owner[run], tiles, len(runs)).astype(np.int64).tolist()
        return [
            Rank(some, tokens, count, tiles, keys - tokens)
            for some, (tokens, count, keys), tiles in zip(runs, sums.T.tolist(), tiles_of, strict=True)
        ]

    def shares(self, runs: Sequence[range]) -> dict[int, Share]:
        """Return what the runs of a rank have of the long documents that they cut, by where those begin."""
        shares: dict[int, Share] = {}
        for run in runs:
            for index in {bisect_right(self.cuts, run.start), bisect_right(self.cuts, run.stop - 1)}:
                first, past = self.cuts[index - 1], self.cuts[index]
                start, stop = max(run.start, first) - first, min(run.stop, past) - first
                if past - first >= LONG and stop >= TILE and (stop < past - first or start >= TILE):
                    _, tokens, pairs = shares.get(first, Share(0, 0, 0))
                    pairs += (stop * (stop + 1) - start * (start + 1)) // 2
                    shares[first] = Share(stop, tokens + stop - start, pairs)
        return shares

    def items(self, runs: Sequence[range]) -> Iterator[Item]:
        """Yield the items of runs: parts of long documents, and what is between them."""
        for run in runs:
            at = start = run.start
            while at < run.stop:
                index = bisect_right(self.cuts, at)
                first, past = self.cuts[index - 1], self.cuts[index]
                if past - first >= LONG:
                    begin = max(at, first + (past - first) % self.tile)  # tiles are counted from its end
                    stop = min(past, run.stop)
                    if begin < stop:
                        if start < begin:
                            yield Item(start, begin, -1)
                        yield Item(begin, stop, first)
                        start = stop
                at = past
            if start < run.stop:
                yield Item(start, run.stop, -1)
