"""Divide documents that are not causal among ranks by halving: for the layout "balanced".

Each token of such a document costs the document's length, whatever its place, and a rank that holds some of its tokens
fetches all others. So few documents are cut, and short ones rather than long ones: documents are divided between one
half of the ranks and the other half, and each half is divided in the same way, until every rank has its own.

To divide them, most documents go to the two sides by turns, by decreasing length. Of ITEMS others, the longest among
them, all ways to give each to either side are compared at once. In each way one is cut where tokens become equal, and
the way counts if work does, too; or two of different lengths are cut, where both become equal:

    one side   [document][doc][docu|
    the other                      |ment][document][doc][doc]

The best way cuts the shortest documents, long ones at whole tiles. If none has equal work, a third one is cut at whole
tiles near its middle. Of the best ways for two single ranks, one is chosen by their tiles.

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..masks.pairs import Work
from .documents import TILE, Array, joined, tiles_of

ITEMS = 8  # documents that may be cut to divide them once
LONGEST = 4  # of them: the longest ones; the others are of all lengths
RUN = 64  # tokens to fetch that one run less is worth
PRICE = 5  # of tiles that are not full, and of uneven ones, each as a share of a rank's, in a rank's tokens
EXACT = 6  # ways whose tiles are counted
CHEAP = 8  # two documents are cut if one cut costs more than a rank's tokens over this
SKEW = 64  # of the others, a side gets as many more or less as ...
SKEWS = (0, -1, 1, -3, 3, -8, 8)  # ... one of these over SKEW, until some way has equal work
NEARBY = 2  # whole tiles before and after the middle where a third one may be cut
HEAVY = 2  # the third one is one of so many of the longest


def halve(
    work: Work, parts: Sequence[range], shares: Sequence[int], local_size: int, max_pairs: int
) -> list[list[range]]:
    """Return the runs of every rank, with equal work.

    Args:
        work: of documents that are not causal (:attr:`..masks.pairs.Work.full`).
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


_pairs = attrgetter("pairs")
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
        pairs = sum(map(_pairs, pieces))
        slack = max(0, self.max_pairs - pairs // ranks)  # each division takes its part of it
        near = min(len(first), len(second)) * slack // (ranks - 1).bit_length()
        options = []
        for skew in SKEWS if len(pieces) > ITEMS else SKEWS[:1]:
            some, sides, tokens = _selection(pieces, shares, skew)
            aim = _Aim(
                shares[0] - tokens,
                pairs * shares[0] // sum(shares) - sum(map(_pairs, sides[0])),
                near,
                (1 << len(some)) - 1,
            )
            options.append((_Items(some, self.tokens, self.max_pairs).best(aim), some, sides))
            if not options[-1][0][0].over:
                break
        ways, some, sides = min(options, key=lambda option: option[0][0])
        ways = ways[: EXACT if ranks == 2 else 1]
        both = [self._sides(some, way, sides) for way in ways]
        if len(both) == 1:
            return both[0]
        costs = []
        for way, pair in zip(ways, both, strict=True):
            a, b = (tiles_of(joined(range(x.start, x.stop) for x in side), self.work.cuts, False) for side in pair)
            costs.append((way.over, way.cost + 2 * PRICE * self.tokens * max(a, b) // (a + b)))
        return both[costs.index(min(costs))]

    def _sides(self, items: list[_Piece], way: _Way, others: _Sides) -> _Sides:
        """Return the pieces of both sides."""
        sides = list(others[0]), list(others[1])
        cuts = dict(way.cuts)
        for index, piece in enumerate(items):
            length = piece.stop - piece.start
            tokens = cuts.get(index, length if way.subset >> index & 1 else 0)
            if 0 < tokens < length:
                cut = piece.start + tokens
                sides[0].append(_piece(self.work, range(piece.start, cut)))
                sides[1].append(_piece(self.work, range(cut, piece.stop)))
            else:
                sides[0 if tokens else 1].append(piece)
        return sides


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
        x = np.minimum(
            np.maximum(np.concatenate([exact, down, down + TILE, up, up - TILE]), np.tile(least, 5)), np.tile(most, 5)
        )
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


def _selection(pieces: list[_Piece], shares: tuple[int, int], skew: int) -> tuple[list[_Piece], _Sides, int]:
    """Return pieces that may be cut, by growing reach; the others, divided in the proportion of the shares, the first
    side's part larger by ``skew`` / SKEW; and the tokens of that part."""
    chosen = set(range(len(pieces)))
    if len(pieces) > ITEMS:  # the last ones, and some of the others from the first one on
        last, some = len(pieces) - LONGEST - 1, ITEMS - LONGEST - 1
        chosen = {*range(last + 1, len(pieces)), *(last * i // some for i in range(some + 1))}
    sides: _Sides = ([], [])
    tokens = [0, 0]
    for index in range(len(pieces) - 1, -1, -1):
        if index in chosen:
            continue
        piece = pieces[index]
        length = piece.stop - piece.start
        side = int(tokens[0] * shares[1] * SKEW > tokens[1] * shares[0] * (SKEW + skew))
        if tokens[side] + length > shares[side]:
            side = 1 - side
        if tokens[side] + length > shares[side]:
            chosen.add(index)  # fits nowhere; after it, all others fit
            continue
        sides[side].append(piece)
        tokens[side] += length
    return [pieces[index] for index in sorted(chosen)], sides, tokens[0]
