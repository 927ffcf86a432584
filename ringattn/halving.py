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
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from .documents import TILE, Array, joined
from .work import Work

ITEMS = 8  # of a division, at most
LONGEST = 4
RUN = 64  # tokens to fetch that one run less is worth
PRICE = 5  # of tiles or pairs above the mean, each as a share of a rank's, in a rank's tokens
EXACT = 6  # ways whose tiles are counted
CHEAP = 8  # two items are cut if one costs more keys to fetch than a rank's tokens over this
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


_Sides = tuple[list[_Piece], list[_Piece]]


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
        self.cuts = np.array(work.cuts, np.int64)

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
        ranks, shares = len(first) + len(second), (sum(first), sum(second))
        pairs = sum(piece.pairs for piece in pieces)
        target = pairs * shares[0] // sum(shares)
        slack = max(0, self.max_pairs - pairs // ranks)  # each division takes its part of it
        near = min(len(first), len(second)) * slack // (ranks - 1).bit_length()
        exact = EXACT if ranks == 2 else 1
        options = []
        for some, fixed in _selections(pieces, shares):
            items = _Items(some, self.tokens, self.max_pairs)
            tokens, target_left = (
                whole - sum(map(of, fixed[0]))
                for whole, of in ((shares[0], lambda piece: piece.stop - piece.start), (target, attrgetter("pairs")))
            )
            ways = items.best(_Aim(tokens, target_left, near, (1 << len(some)) - 1))[:exact]
            options += [(way, items, fixed) for way in ways]
            if ways and not ways[0].over:
                break
        options.sort(key=itemgetter(0))
        sides = [self._sides(items, way, fixed) for way, items, fixed in options[:exact]]
        if len(sides) == 1:
            return sides[0]
        runs = [joined(range(x.start, x.stop) for x in side) for both in sides for side in both]
        tiles = _tiles(self.cuts, runs)
        costs = [
            (way.over, way.cost + 2 * PRICE * self.tokens * max(a, b) // (a + b))
            for (way, *_), a, b in zip(options, tiles[::2], tiles[1::2], strict=False)
        ]
        return sides[costs.index(min(costs))]

    def _sides(self, items: _Items, way: _Way, fixed: _Sides) -> _Sides:
        """Return the pieces of both sides."""
        sides = list(fixed[0]), list(fixed[1])
        cuts = dict(way.cuts)
        for index, piece in enumerate(items.pieces):
            length = piece.stop - piece.start
            tokens = cuts.get(index, length if way.subset >> index & 1 else 0)
            if 0 < tokens < length:
                cut = piece.start + tokens
                sides[0].append(_piece(self.work, range(piece.start, cut)))
                sides[1].append(_piece(self.work, range(cut, piece.stop)))
            else:
                sides[0 if tokens else 1].append(piece)
        return sides


def _tiles(cuts: Array, ranks: Sequence[list[range]]) -> list[int]:
    """Return the tiles of each rank with these runs. Tiles of queries begin where runs begin."""
    spans = np.array([(run.start, run.stop, rank) for rank, runs in enumerate(ranks) for run in runs], np.int64)
    start, stop, rank = spans.T
    count = -(-(stop - start) // TILE)
    run = np.repeat(np.arange(len(start)), count)
    begin = start[run] + TILE * (np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count))
    last = np.minimum(begin + TILE, stop[run]) - 1
    shift = (-start % TILE)[run]  # tiles of keys begin where those of queries do: see :mod:`.alignment`
    low = cuts[np.searchsorted(cuts, begin, side="right") - 1] + shift
    past = cuts[np.searchsorted(cuts, last, side="right")] + shift
    return np.bincount(rank[run], -(-past // TILE) - low // TILE, len(ranks)).astype(np.int64).tolist()


class _Items:
    """Pieces, by growing reach, of which one, two or three are cut to divide them."""

    def __init__(self, pieces: list[_Piece], tokens: int, max_pairs: int) -> None:
        """``tokens``, ``max_pairs``: of a rank."""
        self.pieces, self.mean, self.max_pairs = pieces, tokens, max_pairs
        self.reach, starts, stops, self.offset, pairs = np.array(pieces, np.int64).T
        self.size = stops - starts
        count = len(pieces)
        self.subsets, self.index = np.arange(1 << count), np.arange(count)
        bits = self.subsets[:, None] >> self.index & 1
        self.sums = bits @ self.size, bits @ pairs

    def best(self, aim: _Aim) -> list[_Way]:
        """Return some of the best ways, the best one first."""
        ways = self._one_cut(aim)
        if ways and not ways[0].over and ways[0].cost * CHEAP <= self.mean:
            return ways
        ways = sorted([*ways, *self._two_cuts(aim)])
        if ways and not ways[0].over:
            return ways
        total = int(self.size.sum())
        for i in range(len(self.pieces) - 1, -1, -1)[:HEAVY]:
            size, reach, offset = int(self.size[i]), int(self.reach[i]), int(self.offset[i])
            middle = size * aim.tokens // total
            middle -= (offset + middle) % TILE
            for x in range(middle - NEARBY * TILE, middle + (NEARBY + 2) * TILE, TILE):
                if 0 < x < min(size, aim.tokens):
                    cost = int(self._cost(np.array([i]), np.array([x]))[0])
                    rest = _Aim(aim.tokens - x, aim.pairs - x * reach, aim.near, aim.free & ~(1 << i), cost, ((i, x),))
                    ways += [*self._one_cut(rest), *self._two_cuts(rest)]
        return sorted(ways)

    def _cost(self, items: Array, tokens: Array) -> Array:
        """Return the cost of cuts of items after some tokens: of keys to fetch, runs, and tiles that are not full."""
        reach = self.reach[items]
        waste = -(tokens + self.offset[items]) % TILE * reach
        cost = reach + RUN + PRICE * self.mean * waste // self.max_pairs
        return np.where((tokens > 0) & (tokens < self.size[items]), cost, 0)

    def _one_cut(self, aim: _Aim) -> list[_Way]:
        """Return the best ways with one more cut."""
        tokens, pairs = self.sums
        need = aim.tokens - tokens[:, None]
        free = (self.subsets & ~aim.free == 0)[:, None] & (aim.free >> self.index & 1 == 1)
        free &= self.subsets[:, None] >> self.index & 1 == 0
        rows, items = np.nonzero(free & (need >= 0) & (need <= self.size))
        cuts = need[rows, 0]
        return self._ways(aim, rows, pairs[rows] + cuts * self.reach[items] - aim.pairs, (items, cuts))

    def _two_cuts(self, aim: _Aim) -> list[_Way]:
        """Return the best ways with two more cuts."""
        one, two = np.triu_indices(len(self.pieces), 1)  # tokens of the second item have more work
        some = (aim.free >> one & aim.free >> two & 1 == 1) & (self.reach[one] < self.reach[two])
        one, two = one[some], two[some]
        tokens, pairs = self.sums
        free = (self.subsets & ~aim.free == 0)[:, None] & (self.subsets[:, None] & (1 << one | 1 << two) == 0)
        need = aim.tokens - tokens[:, None]
        work = aim.pairs - pairs[:, None] - need * self.reach[one]
        more = self.reach[two] - self.reach[one]
        least, most = np.maximum(0, need - self.size[one]), np.minimum(self.size[two], need)
        rows, columns = np.nonzero(
            free & (least <= most) & (least * more <= work + aim.near) & (work - aim.near <= most * more)
        )
        one, two, need, work, more = one[columns], two[columns], need[rows, 0], work[rows, columns], more[columns]
        least, most = least[rows, columns], most[rows, columns]
        exact = work // more
        down = exact - (exact + self.offset[two]) % TILE
        up = exact + (need - exact + self.offset[one]) % TILE
        x = np.minimum(np.maximum(np.concatenate([exact, down, down + TILE, up, up - TILE]), np.tile(least, 5)), np.tile(most, 5))
        rows, one, two, need, work, more = (np.tile(array, 5) for array in (rows, one, two, need, work, more))
        return self._ways(aim, rows, x * more - work, (one, need - x), (two, x))

    def _ways(self, aim: _Aim, subsets: Array, away: Array, *cuts: tuple[Array, Array]) -> list[_Way]:
        """Return the best of some ways, each with cuts of some items at some tokens."""
        away = abs(away)
        over = np.maximum(0, away - aim.near)
        if len(over) > EXACT:
            some = np.flatnonzero(over <= max(0, np.partition(over, EXACT)[EXACT]))
            over, away, subsets = over[some], away[some], subsets[some]
            cuts = tuple((items[some], tokens[some]) for items, tokens in cuts)
        cost = aim.cost + PRICE * self.mean * np.minimum(away, aim.near) // (4 * self.max_pairs)
        for items, tokens in cuts:
            cost += self._cost(items, tokens)
        return [
            _Way(int(over[i]), int(cost[i]), int(subsets[i]), (*aim.cuts, *((int(x[i]), int(y[i])) for x, y in cuts)))
            for i in np.lexsort((cost, over))[:EXACT].tolist()
        ]


def _selections(pieces: list[_Piece], shares: tuple[int, int]) -> Iterator[tuple[list[_Piece], _Sides]]:
    """Yield pieces that may be cut, by growing reach, and those that either side has already."""
    for longest in (LONGEST,) if len(pieces) > ITEMS else (ITEMS,):
        last = len(pieces) - longest - 1  # some of the others, from the shortest to the longest one
        few = {last * i // (ITEMS - longest - 1) for i in range(ITEMS - longest)} if last >= 0 else set()
        fixed: _Sides = ([], [])
        tokens = [0, 0]
        for index in range(last, -1, -1):
            if index not in few:
                piece = pieces[index]
                side = int(tokens[0] * shares[1] > tokens[1] * shares[0])
                fixed[side].append(piece)
                tokens[side] += piece.stop - piece.start
        yield [piece for i, piece in enumerate(pieces) if i > last or i in few], fixed
