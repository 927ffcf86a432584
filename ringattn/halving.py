"""Divide documents that are not causal among ranks by halving: for the layout "balanced".

Each token of such a document costs its length, wherever it is, and a rank that holds some of its tokens fetches all
others. So few documents are cut, and short ones if possible: a row's documents are divided between one half of the
ranks and the other, and each half is divided in the same way until every rank has its own.

To divide them, the shorter documents are bundled, sorted by length, so that at most ITEMS items are left. All ways to
give each of them to either side are compared at once. In a way one item is cut where tokens become equal, and counts if
work does, too; or two are cut, where both become equal:

    lightest  [doc doc doc d|oc doc][doc doc doc][document][docu|ment][long document]  heaviest
               <- x tokens ->                               <-y->

Such a way always exists, for a run of items in this order has less work than the mean at one end and more at the other.
Long documents are cut at whole tiles if work allows; a third item is then cut at a whole tile nearby, so that the other
two make up for it. The best way adds least keys to fetch, each document counted as often as it must be cut anyway. Of
the best ways to divide pieces between two single ranks, that with most even tiles is chosen.

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .documents import TILE, Array, joined
from .work import Work

ITEMS = 8  # of a division, at most
GROUPS = 3  # of them, of bundled short documents
RUN = 64  # tokens to fetch that one run less is worth
PRICE = 10  # of tiles or pairs above the mean, each as a share of a rank's, in a rank's tokens
EXACT = 6  # ways whose tiles are counted
CHEAP = 16  # two items are cut if one costs more keys to fetch than a rank's tokens over this
NEARBY = 2  # whole tiles on either side, at which a third item may be cut
HEAVY = 2  # the third one is one of so many of the longest


def halve(
    work: Work, parts: Sequence[range], shares: Sequence[int], local_size: int, max_pairs: int
) -> list[list[range]]:
    """Return the runs of every rank, with equal work.

    Args:
        work: of documents that are not causal (:attr:`.work.Work.full`).
        parts: documents, or several short ones that are neighbours.
        shares: tokens of each rank.
        local_size: ranks of a host: documents are divided among hosts first.
        max_pairs: no rank gets more visible pairs, if cuts at single tokens allow that.
    """
    return _Halving(work, max(1, sum(shares) // len(shares)), max(1, max_pairs), local_size).divide(
        [_piece(work, part) for part in parts], shares
    )


class _Piece(NamedTuple):
    """Neighbouring tokens; sorted by the keys that each of them sees, on average.

    ``offset``: of its first token in its document.
    """

    reach: int
    start: int
    stop: int
    offset: int
    pairs: int


def _piece(work: Work, run: range) -> _Piece:
    pairs = work.of(run)
    first = work.cuts[bisect_right(work.cuts, run.start) - 1]
    return _Piece(pairs // len(run), run.start, run.stop, run.start - first, pairs)


class _Way(NamedTuple):
    """A way to divide items; sorted by the first fields.

    Attributes:
        over: pairs by which it differs from equal work, above what is allowed.
        cost: tokens to fetch, and what else it costs.
        subset: whole items of the first side, by bits.
        cuts: items of which it gets only the first tokens, and how many.
    """

    over: int
    cost: int
    subset: int
    cuts: tuple[tuple[int, int], ...]


class _Aim(NamedTuple):
    """What the first side needs: tokens, and pairs within ``near``. ``free``: items not cut yet, by bits; ``cost`` of
    those that are, ``cuts``."""

    tokens: int
    pairs: int
    near: int
    free: int
    cost: int = 0
    cuts: tuple[tuple[int, int], ...] = ()


class _Halving:
    """The division of a row: what every rank gets at most."""

    def __init__(self, work: Work, tokens: int, max_pairs: int, local_size: int) -> None:
        self.work, self.tokens, self.max_pairs, self.local_size = work, tokens, max_pairs, local_size

    def divide(self, pieces: list[_Piece], shares: Sequence[int]) -> list[list[range]]:
        """Return the runs of as many ranks as there are shares."""
        ranks = len(shares)
        if ranks == 1 or not pieces:
            return [joined(range(piece.start, piece.stop) for piece in pieces)] + [[] for _ in shares[1:]]
        half = ranks // 2 if ranks <= self.local_size else -(-ranks // self.local_size) // 2 * self.local_size
        left, right = self._split(sorted(pieces), shares[:half], shares[half:])
        return [*self.divide(left, shares[:half]), *self.divide(right, shares[half:])]

    def _split(
        self, pieces: list[_Piece], first: Sequence[int], second: Sequence[int]
    ) -> tuple[list[_Piece], list[_Piece]]:
        ranks, tokens = len(first) + len(second), sum(first)
        pairs = sum(piece.pairs for piece in pieces)
        slack = max(0, self.max_pairs - pairs // ranks)  # each division takes its part of it
        near = min(len(first), len(second)) * slack // (ranks - 1).bit_length()
        items = _Items(pieces, self.tokens, self.max_pairs)
        ways = items.best(_Aim(tokens, pairs * tokens // (tokens + sum(second)), near, (1 << items.count) - 1))
        sides = [self._sides(items, way) for way in ways[: EXACT if ranks == 2 else 1]]
        if len(sides) == 1:
            return sides[0]
        costs = []
        for way, both in zip(ways, sides, strict=False):
            tiles = [self._tiles(joined(range(x.start, x.stop) for x in side)) for side in both]
            costs.append((way.over, way.cost + 2 * PRICE * self.tokens * max(tiles) // max(1, sum(tiles))))
        return sides[costs.index(min(costs))]

    def _sides(self, items: _Items, way: _Way) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces of both sides."""
        sides: tuple[list[_Piece], list[_Piece]] = ([], [])
        cuts = dict(way.cuts)
        for index, pieces in enumerate(items.items):
            tokens = cuts.get(index, items.sizes[index] if way.subset >> index & 1 else 0)
            for piece in pieces:
                cut = min(max(piece.start, piece.start + tokens), piece.stop)
                for side, run in zip(sides, (range(piece.start, cut), range(cut, piece.stop)), strict=True):
                    if run:
                        side.append(piece if len(run) == piece.stop - piece.start else _piece(self.work, run))
                tokens -= piece.stop - piece.start
        return sides

    def _tiles(self, runs: list[range]) -> int:
        """Return the tiles of a rank."""
        cuts, tiles = self.work.cuts, 0
        for run in runs:
            shift = -run.start % TILE
            for start in range(run.start, run.stop, TILE):
                last = min(start + TILE, run.stop) - 1
                low, past = cuts[bisect_right(cuts, start) - 1], cuts[bisect_right(cuts, last)]
                tiles += -(-(past + shift) // TILE) - (low + shift) // TILE
        return tiles


class _Items:
    """Items of pieces, by growing reach, and sums of what is before each piece.

    Attributes:
        items: the pieces of each; sizes: their tokens; at: tokens of all items before each.
    """

    def __init__(self, pieces: list[_Piece], tokens: int, max_pairs: int) -> None:
        """``tokens``, ``max_pairs``: of a rank."""
        self.mean, self.max_pairs = tokens, max_pairs
        self.items = list(_bundles(pieces))
        self.count = len(self.items)
        table = np.array([*pieces, (0, 0, 0, 0, 0)], np.int64)
        self.reach, starts, stops, self.offset, pairs = table.T
        self.lengths = stops - starts
        self.tokens = np.cumsum(self.lengths) - self.lengths
        self.pairs = np.cumsum(pairs) - pairs
        begins = np.cumsum([0, *map(len, self.items)])
        self.at, self.work_at = self.tokens[begins][:-1], self.pairs[begins][:-1]
        self.sizes, self.works = np.diff(self.tokens[begins]).tolist(), np.diff(self.pairs[begins]).tolist()
        self.size = np.array(self.sizes)
        self.subsets = np.arange(1 << self.count)
        self.bits = self.subsets[:, None] >> np.arange(self.count) & 1
        self.sums = self.bits @ self.size, self.bits @ np.array(self.works)

    def best(self, aim: _Aim) -> list[_Way]:
        """Return some of the best ways, the best one first."""
        ways = self._one_cut(aim)
        if self._good(ways):
            return ways
        ways = sorted([*ways, *self._two_cuts(aim)])
        if not ways[0].over:
            return ways
        heavy = [i for i in range(self.count) if len(self.items[i]) == 1 and self.sizes[i] > TILE]
        for i in heavy[: -HEAVY - 1 : -1]:
            piece = self.items[i][0]
            middle = self.sizes[i] * aim.tokens // sum(self.sizes)
            middle -= (piece.offset + middle) % TILE
            for x in range(middle - NEARBY * TILE, middle + (NEARBY + 2) * TILE, TILE):
                if 0 < x < min(self.sizes[i], aim.tokens):
                    cost = int(self._cost(self.at[i : i + 1] + x)[0])
                    rest = _Aim(
                        aim.tokens - x, aim.pairs - x * piece.reach, aim.near, aim.free & ~(1 << i), cost, ((i, x),)
                    )
                    ways += [*self._one_cut(rest), *self._two_cuts(rest)]
        return sorted(ways)

    def _good(self, ways: list[_Way]) -> bool:
        return bool(ways) and not ways[0].over and ways[0].cost * CHEAP <= self.mean

    def _first(self, positions: Array) -> Array:
        """Return the pairs of the tokens before some positions in the order of items."""
        index = np.searchsorted(self.tokens, positions, side="right") - 1
        return self.pairs[index] + (positions - self.tokens[index]) * self.reach[index]

    def _cost(self, positions: Array) -> Array:
        """Return the cost of cuts at some positions: of keys to fetch, runs, and tiles that are not full."""
        index = np.searchsorted(self.tokens, positions, side="right") - 1
        reach, head = self.reach[index], positions - self.tokens[index]
        tail = self.lengths[index] - head
        ranks = [np.maximum(-(-x * reach // self.max_pairs), -(-x // self.mean)) for x in (head, tail, head + tail)]
        waste = -(head + self.offset[index]) % TILE * reach
        cost = reach * (ranks[0] + ranks[1] - ranks[2]) + RUN + PRICE * self.mean * waste // self.max_pairs
        return np.where(head > 0, cost, 0)

    def _one_cut(self, aim: _Aim) -> list[_Way]:
        """Return the best ways with one more cut."""
        tokens, pairs = self.sums
        need = aim.tokens - tokens[:, None]
        free = (self.subsets & ~aim.free == 0)[:, None] & (aim.free >> np.arange(self.count) & 1 == 1)
        rows, items = np.nonzero(free & (self.bits == 0) & (need >= 0) & (need <= self.size))
        cuts = need[rows, 0]
        away = pairs[rows] + self._first(self.at[items] + cuts) - self.work_at[items] - aim.pairs
        return self._ways(aim, rows, away, (items, cuts))

    def _two_cuts(self, aim: _Aim) -> list[_Way]:
        """Return the best ways with two more cuts."""
        both = np.array(
            [x for x in itertools.combinations(range(self.count), 2) if all(aim.free >> i & 1 for i in x)], np.int64
        ).reshape(-1, 2)
        one, two = both.T  # tokens of the second item have more work
        tokens, pairs = self.sums
        free = (self.subsets & ~aim.free == 0)[:, None] & (self.subsets[:, None] & (1 << one | 1 << two) == 0)
        need = aim.tokens - tokens[:, None]
        low, high = np.maximum(0, need - self.size[one]), np.minimum(self.size[two], need)
        rows, columns = np.nonzero(free & (low <= high))
        low, high = low[rows, columns], high[rows, columns]
        one, two, need = one[columns], two[columns], need[rows, 0]
        rest = aim.pairs - pairs[rows] + self.work_at[one] + self.work_at[two]

        def away(x: Array) -> Array:
            return self._first(self.at[two] + x) + self._first(self.at[one] + need - x) - rest

        some = (away(low) <= aim.near) & (away(high) >= -aim.near)
        rows, one, two, need, rest, low, high = (x[some] for x in (rows, one, two, need, rest, low, high))
        least, most = low, high
        while len(low) and (high - low).max() > 1:
            middle = (low + high) // 2
            less = away(middle) < 0
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        ways = []
        for x in (low, *self._whole(two, low), *(need - y for y in self._whole(one, need - low))):
            x = np.minimum(np.maximum(x, least), most)
            ways += self._ways(aim, rows, away(x), (one, need - x), (two, x))
        return ways

    def _whole(self, items: Array, tokens: Array) -> Iterator[Array]:
        """Yield tokens of items, rounded down and up to whole tiles, or whole pieces of bundles."""
        positions = self.at[items] + tokens
        index = np.searchsorted(self.tokens, positions, side="right") - 1
        head = positions - self.tokens[index]
        down = np.maximum(0, head - (head + self.offset[index]) % TILE)
        up = np.minimum(self.lengths[index], down + TILE - (down + self.offset[index]) % TILE)
        for rounded in (down, up):
            yield self.tokens[index] + rounded - self.at[items]

    def _ways(self, aim: _Aim, subsets: Array, away: Array, *cuts: tuple[Array, Array]) -> list[_Way]:
        """Return the best of some ways, each with cuts of some items at some tokens."""
        away = abs(away)
        over = np.maximum(0, away - aim.near)
        cost = aim.cost + PRICE * self.mean * np.minimum(away, aim.near) // (4 * self.max_pairs)
        for items, tokens in cuts:
            cost += self._cost(self.at[items] + tokens)
        order = np.lexsort((cost, over))[:EXACT].tolist()
        return [
            _Way(
                int(over[i]), int(cost[i]), int(subsets[i]), (*aim.cuts, *((int(x[i]), int(y[i])) for x, y in cuts))
            )
            for i in order
        ]


def _bundles(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces of each item: those with least reach together."""
    few = len(pieces) - ITEMS + GROUPS if len(pieces) > ITEMS else 0
    total = sum(piece.stop - piece.start for piece in pieces[:few])
    groups: list[list[_Piece]] = [[] for _ in range(GROUPS)]
    tokens = 0
    for piece in pieces[:few]:
        groups[tokens * GROUPS // total].append(piece)
        tokens += piece.stop - piece.start
    yield from filter(None, groups)
    yield from ([piece] for piece in pieces[few:])
