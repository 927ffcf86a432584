"""The layout "balanced": equal tokens and equal work on every rank for any mask, and few keys to fetch.

Method: peel the row from two ends. Parts of the row that see nothing of each other (documents) are sorted by work per
token. Rank after rank takes the tail of the heaviest part that is left and fills up with the lightest parts, whole, in
the proportion that makes both its tokens and its work one Nth:

    lightest [doc][doc][document] ... [document][a long document][the longest document] heaviest
             |<- n - t tokens ->|                                           |<- t ->|

A causal document has its most expensive queries at its end, so that tails cut it into as few pieces as balance allows,
and each piece fetches only what is before it. Such a t always exists: with t = 0 a rank would have too little work,
with t = n too much, and what is left keeps the mean. One causal document becomes a zigzag, a full mask or a window
contiguous runs. The row is peeled for hosts first; then the share of each host is peeled for its ranks.

Kernels compute tiles of queries, from the beginning of each run, and a last tile that is not full costs all the keys of
its document. So long documents are cut at whole tiles, counted from their end; the tokens before the first whole one
go with the document before. With whole tiles no t matches the mean exactly. Of the choices (:class:`_Choice`) that come
near enough, the best is the one whose number of tiles is nearest to the mean and whose cuts add few keys to fetch.

The last ranks get what is left: many cuts. So of causal documents the pieces of two ranks are put together and peeled
again, where that costs less (:mod:`.pairwise`). Documents whose tokens all see each other are not peeled, but
halved (:mod:`.halving`).

All arithmetic is in integers, so that every rank finds the same shards without a message.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..masks.intervals import Mask
from ..masks.pairs import Work
from .documents import LONG, TILE, joined, tiles_of, tiles_of_each
from .halving import halve
from .pairwise import Pairwise
from .schedule import records

GROUP = 1024  # neighbouring documents are kept together up to this many tokens, for few runs per rank
FLAT = 1000  # work that differs from the mean by less than the mean over this is equal
UNEVEN = 100  # the same for parts that need not be taken block by block
NEAR = 160  # the same for work that whole tiles of queries cannot match exactly
FAR = 130  # no rank has more than the mean by more than the mean over this
EVEN = 12  # tiles that differ from the mean by as much are even enough, per mille
EVEN_PAIR = 5  # the same where only two ranks are left
FETCH = 8  # weight of keys to fetch, per mille of a rank's tokens, next to the square of uneven tiles, per mille
REACH = 4  # light parts to choose from: this many times the tokens of a rank
DEEP = 16  # heavy parts to choose from
WIDE = 4  # how far to look where tiles are uneven ...
MANY = 10  # ... and a rank has no more parts than these, or no choice is near enough
FEW = 12  # choices with the nearest numbers of pairs, whose tiles are counted


def peel(mask: Mask, world_size: int, local_size: int) -> list[list[range]]:
    """Return the runs of every rank, growing, with equal tokens (within one) and nearly equal visible pairs."""
    work = Work.of_mask(mask)
    group = max(1, min(GROUP, mask.seq_len // (16 * world_size)))
    cuts = [mask.seq_len * i // world_size for i in range(world_size + 1)]
    ranks = [b - a for a, b in itertools.pairwise(cuts)]
    hosts = [ranks[i : i + local_size] for i in range(0, world_size, local_size)]
    if work.full and len(work.cuts) > 2:
        most = work.total * (FAR + 1) // (FAR * world_size)
        return halve(work, _parts(work.cuts, group, mask.seq_len + 1), ranks, local_size, most)
    shares = [_parts(work.cuts, group, LONG)]
    if len(hosts) > 1:
        whole = _Row(work, _parts(work.cuts, group, mask.seq_len), local_size)
        shares = [_cut(work.cuts, share, group) for share in whole.divide(list(map(sum, hosts)))]

    def again(runs: list[range], tokens: list[int]) -> list[list[range]]:
        return _Row(work, _cut(work.cuts, runs, group), even=EVEN_PAIR).divide(tokens)

    shards: list[list[range]] = []
    for share, host in zip(shares, hosts, strict=True):
        row = _Row(work, share)
        peeled = row.divide(host)
        shards += Pairwise(work, peeled, row.max_pairs, again).improve() if work.causal else map(joined, peeled)
    return shards[::-1]  # the first pieces come from the end of a row that is one document


def _parts(cuts: Sequence[int], size: int, long: int) -> list[range]:
    """Return the parts between cuts, those of less than ``size`` tokens together with their neighbours. Those of
    ``long`` tokens begin whole tiles before their end."""
    begins = [a + (b - a) % TILE * (b - a >= long and a > cuts[0]) for a, b in itertools.pairwise(cuts)]
    parts, begin = [], cuts[0]
    for a, b in itertools.pairwise([*begins, cuts[-1]]):
        if b - begin > size and begin < a:
            parts.append(range(begin, a))
            begin = a
        if b - begin >= size:
            parts.append(range(begin, b))
            begin = b
    return [*parts, range(begin, cuts[-1])] if begin < cuts[-1] else parts


def _cut(cuts: Sequence[int], pieces: list[range], size: int) -> list[range]:
    """Return the parts of a host's pieces."""
    parts = []
    for run in joined(pieces):
        inside = cuts[bisect_right(cuts, run.start) : bisect_left(cuts, run.stop)]
        parts += _parts([run.start, *inside, run.stop], size, LONG)
    return parts


class _Part(NamedTuple):
    """A run of neighbouring positions; sorted by the first field.

    Attributes:
        density: pairs per 1024 tokens.
        pairs, tiles: visible pairs, and 128ths of tiles that a kernel computes; those of other masks than causal
            documents are an estimate.
        first, last: pairs of its first and of its most expensive query.
        before: pairs of all queries before it.
    """

    density: int
    start: int
    stop: int
    pairs: int
    tiles: int
    first: int
    last: int
    before: int


class _End:
    """The parts at one end of a row, and sums of what is in them: ``tokens[i]`` in the first i of them."""

    def __init__(self, row: _Row, limit: int, tail: bool) -> None:
        """``limit``: tokens that they have at least, if the row has as many."""
        self.row, self.tail, self.before = row, tail, row.work.before
        self.amounts: dict[tuple[int, int], tuple[int, int]] = {}
        self.tokens = tokens = [0]
        for total in itertools.accumulate(reversed(row.sizes) if tail else row.sizes):
            tokens.append(total)
            if total >= limit:
                break
        some = slice(None, -len(tokens), -1) if tail else slice(len(tokens) - 1)
        self.parts = row.parts[some]
        self.pairs = [0, *itertools.accumulate(row.pairs[some])]
        self.tiles = [0, *itertools.accumulate(row.tiles[some])]

    def count(self, tokens: int) -> int:
        """Return how many parts the first ``tokens`` tokens touch."""
        return bisect_left(self.tokens, tokens)

    def piece(self, index: int, tokens: int) -> range:
        """Return the first ``tokens`` tokens of a part, seen from this end."""
        part = self.parts[index]
        return range(part.stop - tokens, part.stop) if self.tail else range(part.start, part.start + tokens)

    def pairs_of(self, tokens: int, skip: int = 0) -> int:
        """Return the pairs of ``tokens`` tokens after the first ``skip`` parts."""
        sums, pairs = self.tokens, self.pairs
        past = sums[skip] + tokens
        last = bisect_left(sums, past, skip) - 1
        if last < skip:
            return 0
        if past == sums[last + 1]:
            return pairs[last + 1] - pairs[skip]
        part, inside = self.parts[last], past - sums[last]
        if self.tail:
            return pairs[last + 1] - pairs[skip] - self.before(part.stop - inside) + part.before
        return pairs[last] - pairs[skip] + self.before(part.start + inside) - part.before

    def amount(self, tokens: int, skip: int = 0) -> tuple[int, int]:
        """Return the tiles of ``tokens`` tokens after the first ``skip`` parts, and the keys that are fetched because
        the last part is cut."""
        known = self.amounts.get((tokens, skip))
        if known is None:
            whole, cut = self.split(tokens, skip)
            tiles, fetched = self.tiles[whole] - self.tiles[skip], 0
            for _, piece in cut:
                more, first = self.row.amount(piece)
                tiles, fetched = tiles + more, first if self.tail else len(piece)
            known = self.amounts[tokens, skip] = tiles, fetched
        return known

    def split(self, tokens: int, skip: int = 0) -> tuple[int, list[tuple[_Part, range]]]:
        """Return up to which part ``tokens`` tokens after the first ``skip`` parts are whole parts, and the part and
        the piece of it that they end with, if any."""
        past = self.tokens[skip] + tokens
        whole = bisect_right(self.tokens, past) - 1
        rest = past - self.tokens[whole]
        return whole, [(self.parts[whole], self.piece(whole, rest))] if rest else []


class _Row:
    """What is left of a row, sorted by work per token."""

    def __init__(self, work: Work, parts: list[range], ranks: int = 1, even: int = EVEN) -> None:
        """``ranks``: that share what is peeled; ``even``: per mille of tiles above or below the mean that are even."""
        self.work, self.ranks, self.even, self.blocks = work, ranks, even, False
        self._set(self._sorted(parts))

    def _set(self, parts: list[_Part]) -> None:
        self.parts, self.sizes = parts, [part.stop - part.start for part in parts]
        self.pairs, self.tiles = [part.pairs for part in parts], [part.tiles for part in parts]
        self.pairs_left, self.tiles_left = sum(self.pairs), sum(self.tiles)

    def _sorted(self, runs: list[range]) -> list[_Part]:
        """Return the parts that runs are, sorted: :meth:`_part` of many."""
        work = self.work
        if not work.causal:
            return sorted(map(self._part, runs))
        start, stop = (np.array(x, np.int64) for x in ([run.start for run in runs], [run.stop for run in runs]))
        bounds = np.array(work.cuts)
        document = np.searchsorted(bounds, start, side="right")
        begin, past = bounds[document - 1], bounds[document]
        last = stop - bounds[np.searchsorted(bounds, stop - 1, side="right") - 1]
        longer = (past < stop) & (past - begin >= LONG)
        last = np.where(longer, np.maximum(last, past - begin), last)
        before, length = work.before_all(start), stop - start
        pairs = work.before_all(stop) - before
        density = pairs // length * 1024 + pairs % length * 1024 // length
        tiles = TILE * tiles_of_each(start, stop, bounds)
        columns = density, start, stop, pairs, tiles, start - begin + 1, last, before
        order = np.lexsort((start, density))
        return records(_Part, *(column[order] for column in columns))

    def _part(self, run: range) -> _Part:
        work, start, stop = self.work, run.start, run.stop
        pairs, first, last = work.about(run)
        document = bisect_right(work.cuts, start)
        past = work.cuts[document]
        if past < stop and past - work.cuts[document - 1] >= LONG:
            last = max(last, work.at(past - 1))
        if work.causal:
            tiles = TILE * tiles_of((run,), work.cuts, True)
        else:
            count = -(-len(run) // TILE)
            # The last tile is not full, or a tile begins in one document and ends in another.
            waste = last * (count * TILE - len(run)) // TILE if past >= stop else TILE * count * work.rows
            tiles = TILE * count * work.rows + pairs // TILE + (last - first) // 2 + waste
        return _Part(pairs * 1024 // len(run), start, stop, pairs, tiles, first, last, work.before(start))

    def amount(self, run: range) -> tuple[int, int]:
        """Return the tiles of a piece, and the pairs of its first query."""
        if self.work.causal:
            return TILE * tiles_of((run,), self.work.cuts, True), self.work.at(run.start)
        part = self._part(run)
        return part.tiles, part.first

    def end(self, start: int) -> int:
        """Return where the document of a position ends."""
        return self.work.cuts[bisect_right(self.work.cuts, start)]

    def divide(self, shares: Sequence[int]) -> list[list[range]]:
        """Return pieces of as many tokens as each share has, and of equal work."""
        self.max_pairs = self.pairs_left * (FAR * self.ranks + 1) // (FAR * self.ranks * max(1, len(shares)))
        return [self.peel(tokens, len(shares) - index) for index, tokens in enumerate(shares)]

    def peel(self, tokens: int, ranks: int) -> list[range]:
        """Remove and return the pieces of the next of ``ranks`` ranks that are left."""
        if ranks == 1:
            return [range(part.start, part.stop) for part in self.parts]
        target = self.pairs_left // ranks
        heavy, light = _End(self, tokens, True), _End(self, REACH * tokens, False)
        near = target // UNEVEN
        if not self.blocks and not light.pairs_of(tokens) - near <= target <= heavy.pairs_of(tokens) + near:
            # The work inside the parts rises and falls, as in rows of a batch that differ: take it block by block.
            self.blocks = True
            size = max(1, min(GROUP, tokens // 16))
            blocks = [range(i, min(i + size, p.stop)) for p in self.parts for i in range(p.start, p.stop, size)]
            self._set(self._sorted(blocks))
            return self.peel(tokens, ranks)
        return self._remove(heavy, light, _Search(self, heavy, light, tokens, ranks).best())

    def _remove(self, heavy: _End, light: _End, choice: _Choice) -> list[range]:
        """Remove and return the pieces of a choice."""
        t, lightest, skip, window, lower, of = choice
        parts, pieces = self.parts, list[range]()
        columns: tuple[list[Any], ...] = parts, self.sizes, self.pairs, self.tiles
        cuts = [(of, lower)] if of else []
        for end, tokens, first in ((heavy, t, 0), (light, window, skip), (light, lightest, 0)):
            if not tokens:
                continue
            past, cut = end.split(tokens, first)
            cuts += cut
            self.pairs_left -= end.pairs[past] - end.pairs[first]
            self.tiles_left -= end.tiles[past] - end.tiles[first]
            whole = slice(len(parts) - past, None) if end.tail else slice(first, past)
            pieces += [range(part.start, part.stop) for part in parts[whole]]
            for column in columns:
                del column[whole]
        left: dict[_Part, list[range]] = {}  # of parts that are cut
        for part, piece in cuts:
            rests = left.get(part, [range(part.start, part.stop)])
            halves = [
                (range(r.start, min(r.stop, piece.start)), range(max(r.start, piece.stop), r.stop)) for r in rests
            ]
            left[part] = [rest for rest in itertools.chain(*halves) if rest]
        for part, rests in left.items():
            index = bisect_left(parts, part)
            for column in columns:
                del column[index]
            self.pairs_left -= part.pairs
            self.tiles_left -= part.tiles
            for rest in map(self._part, rests):
                index = bisect_left(parts, rest)
                for column, value in zip(columns, (rest, rest.stop - rest.start, rest.pairs, rest.tiles), strict=True):
                    column.insert(index, value)
                self.pairs_left += rest.pairs
                self.tiles_left += rest.tiles
        return pieces + [piece for _, piece in cuts]


class _Choice(NamedTuple):
    """Tokens of a rank: the first ``heavy`` ones of the heaviest parts and ``light`` ones of the lightest, ``window``
    ones after the ``skip`` lightest parts, and a piece ``lower`` of some part ``of``."""

    heavy: int
    light: int
    skip: int = 0
    window: int = 0
    lower: range = range(0)
    of: _Part | None = None


class _Cost(NamedTuple):
    """The cost of a choice: the square of ``uneven``, the difference of its tiles from the mean, per mille, and the
    price of keys to fetch because of cuts, per mille of the tokens."""

    total: int
    uneven: int
    choice: _Choice


class _Search:
    """A search for the pieces of one rank."""

    def __init__(self, row: _Row, heavy: _End, light: _End, tokens: int, ranks: int) -> None:
        self.row, self.heavy, self.light, self.tokens, self.ranks = row, heavy, light, tokens, ranks
        self.pairs, self.tiles = row.pairs_left // ranks, row.tiles_left // ranks

    def best(self) -> _Choice:
        """Return the best choice."""
        heavy, light, tokens, target = self.heavy, self.light, self.tokens, self.pairs
        if abs(heavy.pairs_of(tokens) - target) <= target // FLAT:
            return _Choice(tokens, 0)
        low, high = 0, tokens
        while high - low > tokens >> 11:  # more precisely than by pairs that choices differ by anyway
            t = (low + high) // 2
            if heavy.pairs_of(t) + light.pairs_of(tokens - t) < target:
                low = t + 1
            else:
                high = t
        best: _Cost | None = None
        many = light.count(tokens - low) > MANY
        plain = many and 4 * heavy.parts[0].last < tokens * self.row.work.rows
        limit_above = self.row.max_pairs - target  # so that neither this rank nor those to come have more
        limit_below = (self.ranks - 1) * (target - self.row.max_pairs)
        for wide in (1, WIDE):
            choices = [
                (abs(away), x) for away, x in self._choices(low, wide, plain) if limit_below <= away <= limit_above
            ]
            choices.sort(key=itemgetter(0))
            near = NEAR * self.row.ranks
            limit = target // near if choices and choices[0][0] * near <= target else target
            few = FEW // 2 if plain else wide * FEW
            found: _Cost | None = None
            for away, x in choices[:few]:
                if away <= limit:
                    found = self._cheaper(x, found)
            best = found or best
            if best and (many or best.uneven <= self.row.even):
                break
        return best.choice if best else _Choice(low, tokens - low)

    def _choices(self, low: int, wide: int, plain: bool) -> Iterator[tuple[int, _Choice]]:
        """Yield choices and by how many pairs they differ from the mean.

        Args:
            low: the number of heavy tokens that matches exactly.
            wide: how far to look.
            plain: whether a rank has many parts and none is long, so that fewer choices will do.
        """
        heavy, tokens = self.heavy, self.tokens
        cut = heavy.count(low) - 1
        if cut < 0:
            yield from self._fills(0, wide)
            return
        part, before = heavy.parts[cut], heavy.tokens[cut]
        end = min(part.stop, self.row.end(part.start))
        tile = TILE if end - part.start >= TILE and part.last >= LONG and tokens >= 16 * TILE else 1
        whole = (end - part.start) // tile * tile  # tiles are counted from the end of the document
        up = (end - (part.stop - (low - before))) // tile * tile  # nearest numbers of whole tiles
        lengths = {before}
        for inside in range(up - (wide - 1) * tile, up + tile + 1, tile):
            t = before + inside + part.stop - end
            if 0 <= inside <= whole and t <= tokens:
                lengths.add(t)
        if heavy.tokens[cut + 1] <= tokens:
            lengths.add(heavy.tokens[cut + 1])
        for t in sorted(lengths, key=lambda t: (abs(t - low), t))[: 2 if plain else 4]:
            yield from self._fills(t, 0 if plain else wide)
        if tile > 1 and not plain:
            for inside in range(up + tile, up + (wide + 1) * tile + 1, tile):
                t = before + inside + part.stop - end
                if 0 <= inside <= whole and t <= tokens:
                    yield from self._splits(t, cut, inside // tile)

    def _fills(self, t: int, wide: int) -> Iterator[tuple[int, _Choice]]:
        """Yield choices of t heavy tokens, with lighter parts of about the right work, whole."""
        light, want = self.light, self.tokens - t
        target = self.pairs - self.heavy.pairs_of(t)
        yield light.pairs_of(want) - target, _Choice(t, want)
        limit = min(len(light.parts), len(self.row.parts) - self.heavy.count(t))
        last_skip = bisect_left(light.tokens, light.tokens[limit] - want + 1) - 1  # parts that can be skipped
        if not want or last_skip <= 0:
            return
        low = bisect_left(range(last_skip), target, key=functools.partial(light.pairs_of, want))
        for skip in range(max(1, low - wide), min(last_skip, low + wide) + 1):
            yield light.pairs_of(want, skip) - target, _Choice(t, 0, skip, want)
            last = bisect_right(light.tokens, light.tokens[skip] + want) - 1
            window = light.tokens[last] - light.tokens[skip]
            if 0 < want - window <= light.tokens[skip]:  # the lightest parts, too, instead of a piece of a heavier one
                away = light.pairs[last] - light.pairs[skip] + light.pairs_of(want - window) - target
                yield away, _Choice(t, want - window, skip, window)

    def _splits(self, t: int, cut: int, tiles: int) -> Iterator[tuple[int, _Choice]]:
        """Yield choices of t heavy tokens, of which some whole tiles are taken from lighter parts."""
        heavy, work, parts = self.heavy, self.row.work, self.row.parts
        light = self.tokens - t
        rest = self.pairs - self.light.pairs_of(light)
        last = len(parts) - 1 - cut
        first = max(self.light.count(light), last - DEEP)
        near = self.pairs // NEAR
        for count in {max(1, tiles // 2), 1, max(1, tiles // 4)}:
            below = count * TILE
            need = rest - heavy.pairs_of(t - below)
            yielded = 0
            for index in range(last, first - 1, -1):
                part = parts[index]
                if yielded == 2 or not part.first * below - near <= need <= part.last * below + near:
                    continue
                yielded += 1
                top = min(part.stop, self.row.end(part.start)) - (tiles if index == last else count) * TILE
                if top < part.start:
                    continue
                pieces = range(top, part.start + TILE - 1, -TILE)  # where each but the last one may begin
                index_ = bisect_left(pieces, -need, key=lambda begin: -work.of(range(begin, begin + below)))
                lower = range(top - index_ * TILE, top - index_ * TILE + below)
                yield work.of(lower) - need, _Choice(t - below, light, 0, 0, lower, part)

    def _cheaper(self, choice: _Choice, best: _Cost | None) -> _Cost:
        """Return the cost of a choice, from the sums of whole parts, or the best one before if that is no more."""
        t, light, skip, window, lower, part = choice
        tiles, fetched = self.heavy.amount(t)
        price, tokens = FETCH * self.row.ranks, max(1, self.row.work.rows * self.tokens)
        if best and price * (1000 * fetched // tokens) >= best.total:  # without what else it costs
            return best
        for length, after in ((light, 0), (window, skip)):
            more, keys = self.light.amount(length, after)
            tiles, fetched = tiles + more, fetched + keys
        if part:
            more, first = self.row.amount(lower)
            tiles += more
            cut = self.heavy.count(t + 1) - 1
            if cut < len(self.heavy.parts) and self.heavy.parts[cut] == part:
                fetched = max(fetched, first)
            else:
                fetched += first + part.last
        uneven = abs(1000 * (tiles - self.tiles) // max(1, self.tiles))
        total = uneven * uneven + price * (1000 * fetched // tokens)
        return best if best and best.total <= total else _Cost(total, uneven, choice)
