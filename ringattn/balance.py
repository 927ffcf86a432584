"""The layout "balanced": equal tokens and equal work on every rank for any mask, and few keys to fetch.

Method: peel the row from two ends. Parts of the row that see nothing of each other (documents) are sorted by work per
token. Rank after rank takes the tail of the heaviest part that is left and fills up with the lightest parts, whole, in
the proportion that makes both its tokens and its work one Nth:

    lightest [doc][doc][document] ... [document][a long document][the longest document] heaviest
             |<- n - t tokens ->|                                           |<- t ->|

A causal document has its most expensive queries at its end, so that tails cut it into as few pieces as balance allows,
and each piece fetches only what is before it. There is always such a t: with t = 0 a rank would have too little work,
with t = n too much, and what is left keeps the mean. One causal document becomes a zigzag, a full mask or a window
contiguous runs.

Kernels compute tiles of queries, from the beginning of each run. Where a tail is cut inside a document, a last tile
that is not full would cost all the keys of a long document. So a tail is shortened to whole tiles, and heavier parts
than the lightest ones make up for it. A few such choices have nearly the same pairs; the one whose number of tiles is
nearest to the mean is taken.

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from .mask import Mask
from .work import Work

TILE = 128  # queries in a tile of the kernels
GROUP = 512  # neighbouring documents are kept together up to so many tokens, for few runs per rank
FLAT = 1000  # work that differs from the mean by less than a part in so many is equal
UNEVEN = 100  # the same for parts that need not be taken block by block
TAILS = 4  # lengths of a tail to choose from
SURPLUS = 1  # percent of tiles that cuts make
SLACK = 250  # the same for work that whole tiles of queries cannot match exactly


def peel(mask: Mask, world_size: int) -> list[list[range]]:
    """Return the pieces of every rank, in any order: as many tokens as on any other, within one, and as many visible
    pairs, nearly."""
    work = Work(mask)
    group = max(1, min(GROUP, mask.seq_len // (16 * world_size)))
    row = _Row(work, _grouped(work.cuts, group), group, world_size)
    cuts = [mask.seq_len * i // world_size for i in range(world_size + 1)]
    shards = [row.peel(b - a, world_size - rank) for rank, (a, b) in enumerate(itertools.pairwise(cuts))]
    return shards[::-1]  # the first pieces come from the end of a row that is one document


def _grouped(cuts: list[int], size: int) -> list[range]:
    """Return the parts between cuts, those of less than ``size`` tokens together with their neighbours."""
    parts, begin = [], 0
    for a, b in itertools.pairwise(cuts):
        if b - begin > size and begin < a:
            parts.append(range(begin, a))
            begin = a
        if b - begin >= size:
            parts.append(range(begin, b))
            begin = b
    return [*parts, range(begin, cuts[-1])] if begin < cuts[-1] else parts


class _Part(NamedTuple):
    """A run of neighbouring positions and its pairs; sorted by the first field, ``density``: pairs per 1024 tokens."""

    density: int
    start: int
    stop: int
    pairs: int


class _End:
    """The parts at one end of a row, and sums of their tokens and pairs: ``tokens[i]`` in the first i of them."""

    def __init__(self, work: Work, parts: Iterable[_Part], limit: int, tail: bool) -> None:
        self.work, self.tail = work, tail
        self.parts: list[_Part] = []
        self.tokens, self.pairs = [0], [0]
        for part in parts:
            if self.tokens[-1] >= limit:
                break
            self.parts.append(part)
            self.tokens.append(self.tokens[-1] + part.stop - part.start)
            self.pairs.append(self.pairs[-1] + part.pairs)

    def count(self, tokens: int) -> int:
        """Return how many parts the first ``tokens`` tokens touch."""
        return bisect_left(self.tokens, tokens)

    def piece(self, index: int, tokens: int) -> range:
        """Return the first ``tokens`` tokens of a part, seen from this end."""
        _, start, stop, _ = self.parts[index]
        return range(max(start, stop - tokens), stop) if self.tail else range(start, min(stop, start + tokens))

    def work_of(self, tokens: int, skip: int = 0) -> int:
        """Return the pairs of ``tokens`` tokens after the first ``skip`` parts."""
        past = self.tokens[skip] + tokens
        last = self.count(past) - 1
        if last < skip:
            return 0
        return self.pairs[last] - self.pairs[skip] + self.work.of(self.piece(last, past - self.tokens[last]))

    def take(self, tokens: int, skip: int = 0) -> list[tuple[_Part, range]]:
        """Return the pieces that make up ``tokens`` tokens after the first ``skip`` parts, and their parts."""
        past = self.tokens[skip] + tokens
        return [(self.parts[i], self.piece(i, past - self.tokens[i])) for i in range(skip, self.count(past))]


class _Row:
    """What is left of a row, sorted by work per token."""

    def __init__(self, work: Work, parts: list[range], block: int, ranks: int) -> None:
        self.work, self.block, self.blocks = work, block, False
        self.parts = sorted(map(self._part, parts))
        self.pairs = work.total
        self.tiles = _tiles(work.cuts, parts) * (100 + SURPLUS) // (100 * ranks)

    def _part(self, run: range) -> _Part:
        pairs = self.work.of(run)
        return _Part(pairs * 1024 // len(run), run.start, run.stop, pairs)

    def peel(self, tokens: int, ranks: int) -> list[range]:
        """Remove and return the pieces of the next of ``ranks`` ranks that are left."""
        target = self.pairs // ranks
        heavy = _End(self.work, reversed(self.parts), tokens, True)
        light = _End(self.work, self.parts, 6 * tokens, False)
        near = target // UNEVEN
        if not self.blocks and not light.work_of(tokens) - near <= target <= heavy.work_of(tokens) + near:
            # The work inside the parts rises and falls, as in rows of a batch that differ: take it block by block.
            self.blocks = True
            blocks = [
                range(i, min(i + self.block, p.stop)) for p in self.parts for i in range(p.start, p.stop, self.block)
            ]
            self.parts = sorted(map(self._part, blocks))
            return self.peel(tokens, ranks)
        pieces = _choose(heavy, light, tokens, target, self.tiles, len(self.parts))
        self._remove(pieces)
        return [piece for _, piece in pieces]

    def _remove(self, pieces: list[tuple[_Part, range]]) -> None:
        left: dict[_Part, range] = {}
        for part, piece in pieces:
            self.pairs -= self.work.of(piece)
            rest = left.get(part, range(part.start, part.stop))
            tail = piece.stop == rest.stop
            left[part] = range(rest.start, piece.start) if tail else range(piece.stop, rest.stop)
        for part, rest in left.items():
            del self.parts[bisect_left(self.parts, part)]
            if rest:
                insort(self.parts, self._part(rest))


def _choose(heavy: _End, light: _End, tokens: int, target: int, tiles: int, parts: int) -> list[tuple[_Part, range]]:
    """Return pieces of ``tokens`` tokens from both ends, whose pairs are about ``target`` and, as far as there is a
    choice, whose tiles are about ``tiles``.

    Args:
        parts: the number of parts in the row.
    """
    if abs(heavy.work_of(tokens) - target) <= target // FLAT:
        return heavy.take(tokens)
    low, high = 0, tokens
    while low < high:
        t = (low + high) // 2
        if heavy.work_of(t) + light.work_of(tokens - t) < target:
            low = t + 1
        else:
            high = t
    choices = [[*heavy.take(low), *light.take(tokens - low)]]
    cut = heavy.count(low) - 1
    if cut >= 0 and low < heavy.tokens[cut + 1]:
        inside = (low - heavy.tokens[cut]) // TILE * TILE
        for t in range(heavy.tokens[cut] + inside, heavy.tokens[cut] - 1, -TILE)[:TAILS]:
            for skip in _windows(light, tokens - t, target - heavy.work_of(t), parts - cut - 1):
                if abs(heavy.work_of(t) + light.work_of(tokens - t, skip) - target) <= target // SLACK:
                    choices.append([*heavy.take(t), *light.take(tokens - t, skip)])
    cuts = light.work.cuts
    return min(choices, key=lambda pieces: abs(_tiles(cuts, [piece for _, piece in pieces]) - tiles))


def _windows(light: _End, tokens: int, target: int, limit: int) -> list[int]:
    """Return how many of the lightest parts to skip so that ``tokens`` tokens after them, in the first ``limit`` parts,
    have about ``target`` pairs: the two nearest numbers, as far as there are any."""
    limit = min(limit, len(light.parts))
    most = bisect_left(light.tokens, light.tokens[limit] - tokens + 1) - 1  # parts that can be skipped
    if most < 0:
        return []
    low, high = 0, most
    while low < high:
        skip = (low + high) // 2
        if light.work_of(tokens, skip) < target:
            low = skip + 1
        else:
            high = skip
    return [*range(max(0, low - 1), low + 1)]


def _tiles(cuts: list[int], pieces: list[range]) -> int:
    """Return about how many tiles of queries and keys a rank computes: as if queries saw their document up to
    themselves, and in pieces with several documents two tiles of keys each."""
    tiles = keys = past = 0
    for piece in sorted(pieces, key=lambda r: r.start):
        document = bisect_right(cuts, piece.start) - 1
        first = cuts[document]
        at = keys - max(0, past - first)  # of the first key in the buffer
        keys, past = at + piece.stop - first, piece.stop
        if piece.stop > cuts[document + 1]:
            tiles += 2 * -(-len(piece) // TILE)
            continue
        full = len(piece) // TILE
        offset = at % TILE + piece.start - first
        tiles += full * -(-offset // TILE) + full * (full + 1) // 2
        tiles += -(-(offset + len(piece)) // TILE) if len(piece) % TILE else 0
    return tiles
