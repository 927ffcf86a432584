"""Improve shards of causal documents by pairs of ranks: the last step of the layout "balanced".

Ranks that are peeled one after another leave the last ones what is left: many cuts. Here the pieces of two ranks are
put together, what joins up becomes one piece again, and both are peeled from it like a row of two ranks:

    rank 3  [doc][the tail of a docu|              [doc][a document]
    rank 5  [its head              ][doc]    ->    [its head][the tail of a docu|[doc]

They keep what costs less: keys to fetch, runs, and tiles above the mean. First ranks with neighbouring parts of a
document are paired, so that less is fetched; then the rank with most tiles and one of those with fewest, until no rank
has many more than the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ..masks.intervals import table
from ..masks.pairs import Work
from .documents import joined, tiles_of_each

SHARED = 16  # ranks are paired that share documents with a cut after a rank's tokens over this, or more
ROUNDS = 4  # times that all of these are, at most
UNEVEN = 5  # a rank with more tiles above the mean, per mille, is paired ...
OTHERS = 24  # ... with one of at most this many others that have fewest
RUNS = 30  # two ranks with more seldom gain
RUN = 64  # tokens to fetch that one run less is worth
PRICE = 10  # tokens per tile above the mean, each as a share of a rank's ...
EVEN_PRICE = 80  # ... where tiles are to become even
GAIN = 256  # two ranks keep pieces that cost less by a rank's tokens over this

Divide = Callable[[list[range], list[int]], list[list[range]]]


class Pairwise:
    """Shards of causal documents, improved two at a time.

    Args:
        work: of the row.
        shards: pieces of each rank, in any order.
        max_pairs: no rank gets more visible pairs than this, or than the most that one of the two had.
        divide: returns the pieces of as many ranks as it gets numbers of tokens, from runs.

    Attributes:
        shards: runs of each rank, growing.
        tiles: of each rank; ``mean``: on average.
        fetched: keys that each rank fetches, and the price of its runs.
        costs: of each rank, in tokens to fetch.
        in_vain: two ranks, with their costs, that kept their pieces.
    """

    def __init__(self, work: Work, shards: Sequence[Sequence[range]], max_pairs: int, divide: Divide) -> None:
        self.work, self.max_pairs, self.divide = work, max_pairs, divide
        self.shards = [joined(pieces) for pieces in shards]
        self.tokens = sum(map(len, itertools.chain(*self.shards))) // len(shards)
        self.bounds = np.array(work.cuts)
        self.in_vain = set[tuple[int, int, int, int]]()

    def improve(self) -> list[list[range]]:
        """Return shards that fetch less and have more even tiles, with as many tokens on every rank as before."""
        if sum(sorted(map(len, self.shards))[:2]) > RUNS:
            return self.shards
        self.tiles, self.fetched = self._measured(self.shards)
        self.mean = max(1, sum(self.tiles) // len(self.shards))
        self._set_price(PRICE)
        for _ in range(ROUNDS):
            done = set[int]()
            for a, b in self._sharing():
                if not done & {a, b} and self._again(a, b):
                    done |= {a, b}
            if not done:
                break
        self._set_price(EVEN_PRICE)
        order = sorted(range(len(self.shards)), key=self.tiles.__getitem__)
        for _ in range(len(order)):
            busiest = order[-1]
            even = 1000 * self.tiles[busiest] <= (1000 + UNEVEN) * self.mean
            if even or not any(self._again(busiest, other) for other in order[:-1][:OTHERS]):
                break
            order.sort(key=self.tiles.__getitem__)
        return self.shards

    def _set_price(self, price: int) -> None:
        self.price = price
        self.costs = list(map(self._cost, self.tiles, self.fetched))

    def _sharing(self) -> list[tuple[int, int]]:
        """Return ranks with neighbouring parts of documents, those first that fetch most because of that."""
        ranks, start, *_ = table(self.shards)
        order = start.argsort()
        ranks, start = ranks[order], start[order[1:]]
        pairs = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
        fetched = np.zeros((len(self.shards),) * 2, np.int64)
        np.add.at(fetched, pairs, start - self.bounds[np.searchsorted(self.bounds, start, side="right") - 1])
        np.fill_diagonal(fetched, 0)  # a host's tokens have gaps: a rank may follow itself
        a, b = np.nonzero(fetched * SHARED >= max(1, self.tokens))
        order = (-fetched[a, b]).argsort(kind="stable")
        return list(zip(a[order].tolist(), b[order].tolist(), strict=True))

    def _again(self, a: int, b: int) -> bool:
        """Divide the pieces of two ranks again if that costs less, and return whether it does."""
        old, of = [self.shards[a], self.shards[b]], self.work.of
        state = a, b, self.costs[a], self.costs[b]
        if len(old[0]) + len(old[1]) > RUNS or state in self.in_vain:
            return False
        new = [joined(pieces) for pieces in self.divide([*old[0], *old[1]], [sum(map(len, runs)) for runs in old])]
        tiles, fetched = self._measured(new)
        costs = list(map(self._cost, tiles, fetched))
        before, after = (max(sum(map(of, runs)) for runs in both) for both in (old, new))
        gain = self.costs[a] + self.costs[b] - sum(costs)
        if gain * GAIN <= self.tokens or after > max(self.max_pairs, before):
            self.in_vain.add(state)
            return False
        for index, rank in enumerate((a, b)):
            self.shards[rank], self.tiles[rank] = new[index], tiles[index]
            self.fetched[rank], self.costs[rank] = fetched[index], costs[index]
        return True

    def _measured(self, shards: Sequence[Sequence[range]]) -> tuple[list[int], list[int]]:
        """Return the tiles of each rank, and the keys that it fetches and the price of its runs."""
        ranks, start, stop, _ = table(shards)
        held = np.append(0, np.where(ranks[1:] == ranks[:-1], stop[:-1], 0))[: len(start)]  # up to the run before
        begin = self.bounds[np.searchsorted(self.bounds, start, side="right") - 1]
        sums = np.zeros((len(shards), 2), np.int64)
        runs = np.stack([tiles_of_each(start, stop, self.bounds), start - np.maximum(begin, held) + RUN], 1)
        np.add.at(sums, ranks, runs)
        tiles, fetched = sums.T.tolist()
        return tiles, fetched

    def _cost(self, tiles: int, fetched: int) -> int:
        """Return the cost of a rank: that of its keys and runs, and the price of its tiles above the mean."""
        above = max(0, 1000 * tiles - (1000 + UNEVEN) * self.mean)
        return fetched + self.price * self.tokens * above // (1000 * self.mean)
