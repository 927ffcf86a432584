"""Divide the pieces of two ranks between them once more: the last step of the layout "balanced", for causal documents.

:mod:`.balance` finds the pieces of one rank after another, so that the last ones get what is left: many cuts. Here two
ranks put their pieces together. What joins up becomes one item again, the smallest items are bundled, and all ways to
give each of at most ITEMS items to either rank are compared at once. In each way one item is cut where tokens become
equal: a long document at a whole tile, the few tokens that are then missing from a short one. Of the ways with equal
pairs, those that fetch least are counted exactly, tiles and runs included, and the best is kept if it costs less than
what the two ranks had.

First, ranks divide their pieces that share most, so that less is fetched. Then the rank with most tiles divides its
pieces with others, until no rank has many more than the mean.

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .documents import Array, Documents, Item, Rank, joined

ITEMS = 10  # of two ranks, at most
GROUPS = 4  # of them, of bundled small ones
ROUNDS = 48  # pairs of ranks that are divided again to fetch less, at most
PATIENCE = 12  # of them in vain, one after another
WORTH = 16  # they are divided again where they may gain a rank's tokens over this
MANY = 30  # two ranks with more runs seldom gain: only much that they share counts, and tiles do not
RUN = 64  # tokens to fetch that one run less is worth
EXACT = 5  # ways whose tiles are counted ...
MORE_EXACT = 20  # ... where tiles are to become even
EVEN = 5  # tiles above the mean that cost nothing, per mille
PRICE = 10  # tokens per tile above that, each as a share of a rank's
UNEVEN = 11  # a rank with more tiles above the mean, per mille, divides its pieces with others
BUSY = 16  # times that some rank does so, at most ...
TRIES = 8  # ... with at most this many others, until one way costs less
GAIN = 256  # a way is kept if it costs less by a rank's tokens over this


class _Limits(NamedTuple):
    """What every rank may have at most (``pairs``), and has on average (``tokens``, ``tiles``)."""

    pairs: int
    tokens: int
    tiles: int


class _Way(NamedTuple):
    """The items that the first of two ranks gets, by bits, and the one of which it gets what is before ``cut``."""

    owners: int
    item: int
    cut: int
    missing: int  # tokens that the first rank still needs


def redivide(documents: Documents, shards: Sequence[Sequence[range]], max_pairs: int) -> list[list[range]]:
    """Return shards that fetch less and have more even tiles, with as many tokens on every rank as before.

    Args:
        max_pairs: no rank gets more visible pairs than this, or than the most that a rank had.
    """
    ranks = documents.ranks(shards)
    n = len(ranks)
    limits = _Limits(max_pairs, sum(rank.tokens for rank in ranks) // n, sum(rank.tiles for rank in ranks) // n)
    if n > 1 and limits.tokens:
        every = _Ranks(documents, ranks, limits)
        every.fetch_less()
        every.even_out()
    return [rank.runs for rank in ranks]


class _Ranks:
    """All ranks of a row, of which two at a time divide their pieces again.

    Attributes:
        shares: what each rank has of the long documents that its runs cut (:meth:`.documents.Documents.shares`).
        above: the cost of its tiles above the mean.
        changes: how often it has got other pieces.
    """

    def __init__(self, documents: Documents, ranks: list[Rank], limits: _Limits) -> None:
        self.documents, self.ranks, self.limits = documents, ranks, limits
        self.shares = [documents.shares(rank.runs) for rank in ranks]
        self.above = [_above(rank, limits) for rank in ranks]
        self.changes = [0] * len(ranks)

    def divide(self, a: int, b: int, exact: int = EXACT) -> bool:
        """Divide the pieces of two ranks again if that costs less, and return whether it does."""
        both = _divide(self.documents, self.ranks[a], self.ranks[b], self.limits, exact)
        for index, rank in zip((a, b), both or (), strict=False):
            self.ranks[index], self.shares[index] = rank, self.documents.shares(rank.runs)
            self.above[index] = _above(rank, self.limits)
            self.changes[index] += 1
        return both is not None

    def gain(self, a: int, b: int) -> int:
        """Return what two ranks may gain, about, in tokens to fetch."""
        tokens = self.shared(a, b)
        if len(self.ranks[a].runs) + len(self.ranks[b].runs) > MANY:
            return tokens // 4
        above = self.above
        return tokens + max(0, min(above[a], -above[b]), min(above[b], -above[a]))

    def shared(self, a: int, b: int) -> int:
        """Return the keys that are not fetched if one of two ranks gets the shares of documents that both have."""
        theirs = self.shares[b]
        if theirs.keys().isdisjoint(self.shares[a]):
            return 0
        tokens = 0
        for first, one in self.shares[a].items():
            if first in theirs:
                other = theirs[first]
                fits = one.tokens + other.tokens <= self.limits.tokens and one.pairs + other.pairs <= self.limits.pairs
                tokens += fits * min(one.reach, other.reach)
        return tokens

    def fetch_less(self) -> None:
        """Divide the pieces of the two ranks that may gain most, again and again."""
        order: list[tuple[int, int, int, int]] = []  # what two ranks may gain, and how often they had changed then

        def compare(a: int, b: int) -> None:
            gain = self.gain(a, b)
            if gain * WORTH > self.limits.tokens:
                heapq.heappush(order, (-gain, a, b, self.changes[a] + self.changes[b]))

        for a, b in itertools.combinations(range(len(self.ranks)), 2):
            compare(a, b)
        rounds = in_vain = 0
        while order and rounds < ROUNDS and in_vain < PATIENCE:
            _, a, b, state = heapq.heappop(order)
            if state != self.changes[a] + self.changes[b]:
                continue
            rounds += 1
            if not self.divide(a, b):
                in_vain += 1
                continue
            in_vain = 0
            for other in range(len(self.ranks)):
                if other not in (a, b):
                    compare(min(a, other), max(a, other))
                    compare(min(b, other), max(b, other))

    def even_out(self) -> None:
        """Divide the pieces of the rank with most tiles and another one, as long as it has many more than the mean."""
        n = len(self.ranks)
        for _ in range(BUSY):
            a = max(range(n), key=lambda rank: self.ranks[rank].tiles)
            if 1000 * self.ranks[a].tiles <= (1000 + UNEVEN) * self.limits.tiles:
                return
            room = MANY - len(self.ranks[a].runs)
            others = [b for b in range(n) if b != a and len(self.ranks[b].runs) <= room]
            others.sort(key=lambda b: -self.gain(a, b))
            if not any(self.divide(a, b, MORE_EXACT) for b in others[:TRIES]):
                return


def _above(rank: Rank, limits: _Limits) -> int:
    """Return what the tiles of a rank above the mean cost, in tokens to fetch; negative where there is room."""
    above = 1000 * rank.tiles - (1000 + EVEN) * limits.tiles
    return above * PRICE * limits.tokens // (1000 * max(1, limits.tiles))


def _divide(documents: Documents, a: Rank, b: Rank, limits: _Limits, exact: int) -> tuple[Rank, Rank] | None:
    """Return two ranks with the pieces of these, or None if none of ``exact`` ways costs less."""
    most = max(limits.pairs, a.pairs, b.pairs)
    least = _cost(a, limits) + _cost(b, limits) - limits.tokens // GAIN
    ranks = documents.ranks([side for way in _Search(documents, a, b, limits).ways(exact) for side in way])
    both = [x for x in zip(ranks[::2], ranks[1::2], strict=True) if max(x[0].pairs, x[1].pairs) <= most]
    costs = [_cost(x, limits) + _cost(y, limits) for x, y in both]
    return both[costs.index(min(costs))] if costs and min(costs) < least else None


def _cost(rank: Rank, limits: _Limits) -> int:
    return rank.fetched + RUN * len(rank.runs) + max(0, _above(rank, limits))


class _Search:
    """The ways to divide the items of two ranks."""

    def __init__(self, documents: Documents, a: Rank, b: Rank, limits: _Limits) -> None:
        self.documents, self.tokens = documents, a.tokens
        self.high = max(limits.pairs, a.pairs, b.pairs)
        self.low = a.pairs + b.pairs - self.high
        items = sorted(documents.items(joined([*a.runs, *b.runs])), key=lambda item: (item.start - item.stop, item))
        self.bundles = [[item] for item in items]
        if len(items) > ITEMS:  # the smallest ones together, in groups of about as many tokens
            few, rest = items[: ITEMS - GROUPS], items[ITEMS - GROUPS :]
            total = sum(item.stop - item.start for item in rest)
            self.bundles, tokens = [*([item] for item in few), *([] for _ in range(GROUPS))], 0
            for item in rest:
                self.bundles[len(few) + tokens * GROUPS // total].append(item)
                tokens += item.stop - item.start
            self.bundles = [bundle for bundle in self.bundles if bundle]

    def ways(self, exact: int) -> Iterator[tuple[list[range], list[range]]]:
        """Yield the pieces of both ranks, what fetches least first."""
        for way in self._best(exact):
            sides: tuple[list[Item], list[Item]] = ([], [])
            for index, bundle in enumerate(self.bundles):
                if index == way.item:
                    item = bundle[0]
                    sides[0].append(item._replace(stop=way.cut))
                    sides[1].append(item._replace(start=way.cut))
                else:
                    sides[1 - (way.owners >> index & 1)].extend(bundle)
            if not way.missing or self._move(way.missing, *sides):
                first, second = ([range(x.start, x.stop) for x in side if x.start < x.stop] for side in sides)
                yield first, second

    def _move(self, tokens: int, to: list[Item], source: list[Item]) -> bool:
        """Move some tokens from one side to the other, of a document as short as possible, and return whether there are
        as many."""
        options = []
        for index, item in enumerate(source):
            if item.stop - item.start >= tokens:
                head, tail = item.start + tokens, item.stop - tokens
                uneven = item.stop - item.first if item.first >= 0 else 0  # its last tile will not be full
                options.append((uneven + head - self.documents.first(head), index, head, True))
                options.append((uneven + tail - self.documents.first(tail), index, tail, False))
        if not options:
            return False
        _, index, cut, head = min(options)
        item = source.pop(index)
        parts = item._replace(stop=cut), item._replace(start=cut)
        to.append(parts[0 if head else 1])
        source.append(parts[1 if head else 0])
        return True

    def _best(self, exact: int) -> list[_Way]:
        """Return the ways that fetch least, about."""
        bundles = self.bundles
        spans = np.array([(x.start, x.stop) for bundle in bundles for x in bundle], np.int64)
        sums = self.documents.before(spans)
        heads = np.cumsum([0, *map(len, bundles[:-1])])
        tokens, pairs = (np.add.reduceat(x[:, 1] - x[:, 0], heads) for x in (spans, sums))
        rows = np.arange(1 << len(bundles))
        bits = rows[:, None] >> np.arange(len(bundles)) & 1
        cut = [i for i, bundle in enumerate(bundles) if len(bundle) == 1]
        some = np.stack([rows[bits[:, i] == 0] for i in cut])  # the first rank gets only a part of item i
        start, stop = (spans[heads[cut], i, None] for i in (0, 1))
        first = np.array([bundles[i][0].first for i in cut])[:, None]
        want = self.tokens - (bits @ tokens)[some]
        fits = (want >= 0) & (want <= stop - start)
        where = np.clip(start + want, start, stop)
        tile = self.documents.tile
        where = np.where(first >= 0, np.maximum(start, stop - (stop - where + tile - 1) // tile * tile), where)
        missing = start + want - where
        fits &= missing < tile
        begins = np.broadcast_to(first, where.shape).copy()
        short = [i for i in range(len(cut)) if first[i, 0] < 0]
        inside = where - first
        head = inside * (inside + 1) // 2 - (start - first) * (start - first + 1) // 2
        if short:
            index = np.searchsorted(self.documents.table, where[short], side="right") - 1
            begins[short] = self.documents.table[index]
            head[short] = self.documents.before(where[short]) - self.documents.before(start[short])
        first_pairs = (bits @ pairs)[some] + head
        fits &= (self.low <= first_pairs) & (first_pairs <= self.high)
        inner = (where > start) & (where < stop)
        cost = np.where(inner, where - begins + RUN, 0) + (missing > 0) * RUN
        cost += self._together(bits, some, cut, where, start, stop)
        ways = np.flatnonzero(fits)
        costs = cost.ravel()[ways]
        if len(ways) > exact:
            few = costs <= np.partition(costs, exact)[exact]
            ways, costs = ways[few], costs[few]
        return [
            _Way(int(some.flat[i]), cut[i // some.shape[1]], int(where.flat[i]), int(missing.flat[i]))
            for i in ways[np.argsort(costs, kind="stable")][:exact].tolist()
        ]

    def _together(self, bits: Array, some: Array, cut: list[int], where: Array, start: Array, stop: Array) -> Array:
        """Return the keys of documents with several items that the ranks hold or fetch, and the cost of runs."""
        singles = [bundle[0] if len(bundle) == 1 else None for bundle in self.bundles]
        cost = np.zeros(len(bits), np.int64)
        order = sorted((x.start, x.stop, i) for i, x in enumerate(singles) if x)
        for (_, past, i), (begin, _, j) in itertools.pairwise(order):
            if past == begin:
                cost += RUN * (bits[:, i] != bits[:, j])
        documents: dict[int, list[int]] = {}
        for index, item in enumerate(singles):
            if item and item.first >= 0:
                documents.setdefault(item.first, []).append(index)
        result = cost[some]
        for first, members in documents.items():
            if len(members) < 2:
                continue
            reach = np.array([singles[i].stop - first for i in members])  # type: ignore[union-attr]
            mine = (bits[:, members] * reach).max(1)
            others = ((1 - bits[:, members]) * reach).max(1)
            both = mine + others
            for row, index in enumerate(cut):
                if index not in members:
                    result[row] += both[some[row]]
                    continue
                rest = [i for i in members if i != index]
                reach_rest = np.array([singles[i].stop - first for i in rest])  # type: ignore[union-attr]
                chosen = bits[some[row]][:, rest]
                a, b = (chosen * reach_rest).max(1), ((1 - chosen) * reach_rest).max(1)
                at = where[row]
                a = np.maximum(a, np.where(at > start[row], at - first, 0))
                b = np.maximum(b, np.where(at < stop[row], stop[row] - first, 0))
                inner = (at > start[row]) & (at < stop[row])
                result[row] += a + b - np.where(inner, at - first, 0)
        return result
