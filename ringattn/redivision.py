"""Divide the pieces of two ranks between them once more, where both hold parts of a document: the last step of the
layout "balanced", for causal documents.

:mod:`.balance` finds the pieces of one rank after another, so that the last ones get what is left: many cuts. Here two
ranks that share long documents put their pieces together. What joins up becomes one item again, the smallest items are
bundled, and all ways to give each of at most ITEMS items to either rank are counted at once, with one item cut where
tokens become equal: a long document at a whole tile, the few tokens that are then missing from a short one. Of the ways
with equal pairs the few that fetch least are counted exactly, tiles and runs included, and the best is kept if it costs
less than what was. Then the next two ranks, those that share most first.

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 128  # queries in a tile of the kernels, and keys
LONG = 1024  # documents of so many tokens are cut at whole tiles
ITEMS = 10  # of two ranks
GROUPS = 4  # of them, of small ones
ROUNDS = 48  # pairs of ranks to divide again, at most
PATIENCE = 12  # of them in vain, one after another
WORTH = 16  # two ranks are divided again where they may gain a part in so many of a rank's tokens
MANY = 30  # runs of two ranks, whose tiles even out, and of which few are divided again by themselves
RUN = 64  # tokens to fetch that one run less is worth
EXACT = 5  # ways whose tiles are counted
BUSY = 16
TRIES = 8
UNEVEN = 6
EVEN = 5  # tiles above the mean that cost nothing, per mille
PRICE = 10  # tokens per tile above that, each as a share of a rank's
GAIN = 256  # a way is kept if it fetches less by a part in so many of a rank's tokens

Array = NDArray[np.int64]


class Rank(NamedTuple):
    """The runs of a rank, growing, and what they cost."""

    runs: list[range]
    tokens: int
    pairs: int
    tiles: int
    fetched: int


class _Item(NamedTuple):
    """Neighbouring positions that stay together, unless they are cut.

    ``first``: where their document begins if it is long; -1 for neighbouring short ones.
    """

    start: int
    stop: int
    first: int


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
    """Return shards that fetch less, with as many tokens on every rank and no more pairs than ``max_pairs``."""
    ranks = documents.ranks(shards)
    n = len(ranks)
    limits = _Limits(max_pairs, sum(rank.tokens for rank in ranks) // n, sum(rank.tiles for rank in ranks) // n)
    if n > 1 and limits.tokens:
        row = _Row(documents, ranks, limits)
        row.fetch_less()
        row.even_out()
    return [rank.runs for rank in ranks]


class _Row:
    """All ranks of a row, of which two at a time divide their pieces again.

    Attributes:
        parts: the long documents of which each rank holds a part (:meth:`Documents.parts`).
        above: what its tiles above the mean cost.
        changes: how often it has got other pieces.
    """

    def __init__(self, documents: Documents, ranks: list[Rank], limits: _Limits) -> None:
        self.documents, self.ranks, self.limits = documents, ranks, limits
        self.parts = [documents.parts(rank.runs) for rank in ranks]
        self.above = [_above(rank, limits) for rank in ranks]
        self.changes = [0] * len(ranks)

    def divide(self, a: int, b: int, exact: int = EXACT) -> bool:
        """Divide the pieces of two ranks again if that costs less, and return whether it does."""
        both = self.documents.divide(self.ranks[a], self.ranks[b], self.limits, exact)
        for index, rank in zip((a, b), both or (), strict=False):
            self.ranks[index], self.parts[index] = rank, self.documents.parts(rank.runs)
            self.above[index] = _above(rank, self.limits)
            self.changes[index] += 1
        return both is not None

    def gain(self, a: int, b: int) -> int:
        """Return about what two ranks may gain, in tokens to fetch."""
        tokens = 0
        if not self.parts[a].keys().isdisjoint(self.parts[b]):
            tokens += _shared(self.parts[a], self.parts[b], self.limits)
        if len(self.ranks[a].runs) + len(self.ranks[b].runs) > MANY:
            return tokens // 4
        above = self.above
        return tokens + max(0, min(above[a], -above[b]), min(above[b], -above[a]))

    def fetch_less(self) -> None:
        """Let the ranks divide their pieces that may gain most, again and again."""
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
        """Let the rank with most tiles divide its pieces with others, as long as it has many more than the mean."""
        n = len(self.ranks)
        for _ in range(BUSY):
            a = max(range(n), key=lambda rank: self.above[rank])
            if self.above[a] * 1000 <= UNEVEN * PRICE * self.limits.tokens:
                return
            room = MANY - len(self.ranks[a].runs)
            others = [b for b in range(n) if b != a and len(self.ranks[b].runs) <= room]
            others.sort(key=lambda b: -self.gain(a, b))
            if not any(self.divide(a, b, 4 * EXACT) for b in others[:TRIES]):
                return


def _shared(parts: dict[int, tuple[int, int, int]], others: dict[int, tuple[int, int, int]], limits: _Limits) -> int:
    """Return the keys that are not fetched if one of two ranks gets the parts of documents that both have."""
    tokens = 0
    for first, (end, count, pairs) in parts.items():
        if first in others:
            other_end, other_count, other_pairs = others[first]
            if count + other_count <= limits.tokens and pairs + other_pairs <= limits.pairs:
                tokens += min(end, other_end)
    return tokens


def _above(rank: Rank, limits: _Limits) -> int:
    """Return what the tiles of a rank above the mean cost, in tokens to fetch; negative where there is room."""
    above = 1000 * rank.tiles - (1000 + EVEN) * limits.tiles
    return above * PRICE * limits.tokens // (1000 * max(1, limits.tiles))


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
        runs = [_joined(pieces) for pieces in shards]
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

    def parts(self, runs: Sequence[range]) -> dict[int, tuple[int, int, int]]:
        """Return the long documents of which a rank holds only a part, by where they begin: how far it reaches into
        them, and the tokens and pairs of that part."""
        parts: dict[int, tuple[int, int, int]] = {}
        for run in runs:
            for index in {bisect_right(self.cuts, run.start), bisect_right(self.cuts, run.stop - 1)}:
                first, past = self.cuts[index - 1], self.cuts[index]
                start, stop = max(run.start, first) - first, min(run.stop, past) - first
                if past - first >= LONG and stop >= TILE and (stop < past - first or start >= TILE):
                    _, tokens, pairs = parts.get(first, (0, 0, 0))
                    parts[first] = stop, tokens + stop - start, pairs + (stop * (stop + 1) - start * (start + 1)) // 2
        return parts

    def items(self, runs: Sequence[range]) -> Iterator[_Item]:
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
                            yield _Item(start, begin, -1)
                        yield _Item(begin, stop, first)
                        start = stop
                at = past
            if start < run.stop:
                yield _Item(start, run.stop, -1)

    def divide(self, a: Rank, b: Rank, limits: _Limits, exact: int) -> tuple[Rank, Rank] | None:
        """Return two ranks with the pieces of these, or None if none of ``exact`` ways costs less."""
        most = max(limits.pairs, a.pairs, b.pairs)
        least = _cost(a, limits) + _cost(b, limits) - limits.tokens // GAIN
        ranks = self.ranks([side for way in _Search(self, a, b, limits).ways(exact) for side in way])
        both = [x for x in zip(ranks[::2], ranks[1::2], strict=True) if max(x[0].pairs, x[1].pairs) <= most]
        costs = [_cost(x, limits) + _cost(y, limits) for x, y in both]
        return both[costs.index(min(costs))] if costs and min(costs) < least else None


def _cost(rank: Rank, limits: _Limits) -> int:
    return rank.fetched + RUN * len(rank.runs) + max(0, _above(rank, limits))


def _joined(pieces: Iterable[range]) -> list[range]:
    runs: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if runs and runs[-1].stop == piece.start:
            piece = range(runs.pop().start, piece.stop)
        runs.append(piece)
    return runs


class _Search:
    """The ways to divide the items of two ranks."""

    def __init__(self, documents: Documents, a: Rank, b: Rank, limits: _Limits) -> None:
        self.documents, self.tokens = documents, a.tokens
        self.high = max(limits.pairs, a.pairs, b.pairs)
        self.low = a.pairs + b.pairs - self.high
        items = sorted(documents.items(_joined([*a.runs, *b.runs])), key=lambda item: (item.start - item.stop, item))
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
            sides: tuple[list[_Item], list[_Item]] = ([], [])
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

    def _move(self, tokens: int, to: list[_Item], source: list[_Item]) -> bool:
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
