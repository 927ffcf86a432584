"""The block allocator of a paged cache: the page tables of all ranks.

Every rank keeps the tables of all ranks. Operations run in the same order everywhere, and each choice is a function of
the tables, so that ranks know all counts, page tables and free pages without a message. No torch, nothing on a device.

The tokens of a sequence on a rank are a dense list of *slots* in the order of positions; slot s is in page
``pages[s // page_size]``. Chunks are dealt out by the layout of a plan. The new tokens of a step go whole to the rank
whose *turn* it is: a turn lasts until ``page_size`` tokens, then the rank with the fewest tokens has it; ties go to the
first rank from ``sequence % world_size`` on. So ranks' counts stay within ``page_size`` and a step of each other.

Layers of one *kind* (a sliding window, or none) have a pool of pages on each rank. Pages are shared by counting
references: a fork shares all of them, and a page that is written gets a copy of its own first.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pages import NONE, CacheFull, Copy, Kind, Pages
from .tokens import Shard, Tokens, before

SLACK = 64  # tokens that a sequence can be cut back by at any time, though a window has passed


@dataclass
class Record:
    """A sequence.

    Attributes:
        tokens: of every rank.
        pages: ``pages[kind][rank]``, the page table.
        passed: ``passed[kind][rank]``, how many of its first pages were freed, or stay for the sinks in them.
        turn, turn_tokens: the rank that takes new tokens, and those that it has taken in its turn.
        reserved: slots of every rank that :meth:`Slots.reserve` made room for.
    """

    number: int
    tokens: list[Tokens]
    pages: list[list[array[int]]]
    passed: list[list[int]]
    turn: int
    turn_tokens: int
    reserved: list[int]

    @property
    def length(self) -> int:
        return sum(tokens.count for tokens in self.tokens)

    @property
    def tables(self) -> Iterator[tuple[int, int, array[int]]]:
        """The page tables, each with its kind and rank."""
        return ((kind, rank, table) for kind, tables in enumerate(self.pages) for rank, table in enumerate(tables))


class Row(NamedTuple):
    """A sequence as it was before a step."""

    sequence: int
    counts: tuple[int, ...]
    turn: int
    turn_tokens: int

    @property
    def length(self) -> int:
        return sum(self.counts)


class Placed(NamedTuple):
    """Where slots are in a pool: ``nth`` says which of them have a page, ``physical`` where these are. Slots in pages
    that neighbour each other are a slice, and ``nth`` is None."""

    nth: NDArray[np.int64] | None
    physical: NDArray[np.int64] | slice

    @property
    def indices(self) -> NDArray[np.int64]:
        """The slots one by one."""
        slots = self.physical
        return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


class _Growth(NamedTuple):
    """Slots of a sequence on a rank that need pages: of each kind from ``first[kind]`` up to ``past``."""

    sequence: Record
    rank: int
    first: tuple[int, ...]
    past: int


class _Want(NamedTuple):
    """The pages that a growth takes of one kind: ``copied`` is the index of a shared page that it will write, or -1,
    ``passed`` the first ones of its table, which nothing sees any longer."""

    growth: _Growth
    kind: int
    new: int
    copied: int
    passed: range


class Slots:
    """The page tables of all ranks. What needs room raises CacheFull where there is none, and has changed nothing then.

    Attributes:
        world_size, page_size: of the cache.
        kinds: of its layers.
        pools: ``pools[kind][rank]``.
        history: 32 bits, of all that was asked for, by which ranks that were once asked for different things differ.
    """

    def __init__(self, world_size: int, page_size: int, kinds: Sequence[Kind]) -> None:
        self.world_size, self.page_size, self.kinds = world_size, page_size, tuple(kinds)
        self.pools = [[Pages(kind.pages) for _ in range(world_size)] for kind in kinds]
        self._sequences: dict[int, Record] = {}
        self._next = self.history = 0

    def note(self, *what: object) -> None:
        """Note what was asked for."""
        self.history = zlib.crc32(repr(what).encode(), self.history)

    def __getitem__(self, number: int) -> Record:
        """Return a sequence. Raise ValueError for one that was freed, or is of another cache."""
        record = self._sequences.get(number) if type(number) is int else None
        if record is None:
            if type(number) is int and 0 <= number < self._next:
                raise ValueError(f"sequence {number} was freed; use one that KVCache.add() or fork() returned since")
            raise ValueError(f"the cache has no sequence {number!r}; pass what its add() or fork() returned")
        return record

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every sequence, on all ranks together."""
        return {number: sequence.length for number, sequence in self._sequences.items()}

    def add(self) -> int:
        """Return the number of a new sequence without tokens."""
        number, ranks, zeros = self._next, range(self.world_size), [0] * self.world_size
        pages, passed = [[array("i") for _ in ranks] for _ in self.kinds], [zeros.copy() for _ in self.kinds]
        home = number % self.world_size
        self._sequences[number] = Record(number, [Tokens() for _ in ranks], pages, passed, home, 0, zeros)
        self._next += 1
        self.note("add")
        return number

    def fork(self, number: int) -> tuple[int, list[Copy]]:
        """Return a sequence that begins with another one's tokens, and pages to copy.

        All pages with tokens are shared. Where the last one has room that is reserved, which a captured step may fill
        without telling the allocator, the fork gets a copy of it at once."""
        old = self[number]
        filled = [
            [table[: -(-tokens.count // self.page_size)] for table, tokens in zip(tables, old.tokens, strict=True)]
            for tables in old.pages
        ]
        reserved = [r for r, t in enumerate(old.tokens) if t.count % self.page_size and old.reserved[r] > t.count]
        self._check_room({(kind, rank): 1 for kind in range(len(self.kinds)) for rank in reserved})
        new = self[self.add()]
        new.tokens = [tokens.copy() for tokens in old.tokens]
        new.turn, new.turn_tokens = old.turn, old.turn_tokens
        new.pages, new.passed = filled, [passed.copy() for passed in old.passed]
        copies = []
        for kind, rank, table in new.tables:
            self.pools[kind][rank].share(table)
            if rank in reserved:
                copies.append(self._copied(kind, rank, table, len(table) - 1))
        self.note("fork", number)
        return new.number, copies

    def free(self, number: int) -> None:
        """Forget a sequence and give its pages back."""
        for kind, rank, table in self[number].tables:
            self.pools[kind][rank].release(table)
        del self._sequences[number]
        self.note("free", number)

    def check_extend(self, number: int, shards: Sequence[Shard]) -> None:
        """Raise CacheFull if there is no room for :meth:`extend`."""
        self._wanted(self._chunk(self[number], shards))

    def extend(self, number: int, shards: Sequence[Shard]) -> list[Copy]:
        """Add a chunk of tokens; return the pages to copy first.

        Args:
            shards: for every rank the runs of its new tokens; all together follow the tokens of the sequence.
        """
        sequence = self[number]
        copies = self._make_room(self._chunk(sequence, shards))
        for tokens, shard in zip(sequence.tokens, shards, strict=True):
            tokens.append(shard)
        self.note("extend", number, sequence.length)
        return copies

    def step(self, numbers: Sequence[int], new: int) -> tuple[list[Row], list[Copy]]:
        """Add ``new`` tokens to each sequence; return the sequences as they were, and the pages to copy first."""
        rows = [self.row(number) for number in numbers]
        copies = self._make_room([self._growth(self[row.sequence], row.turn, new) for row in rows])
        for row in rows:
            self.count(row, new)
        self.note("step", *numbers, new)
        return rows, copies

    def row(self, number: int) -> Row:
        """Return a sequence as the next step finds it."""
        sequence = self[number]
        counts = tuple(tokens.count for tokens in sequence.tokens)
        turn = sequence.turn if sequence.turn_tokens else self._fewest(counts, number)
        return Row(number, counts, turn, sequence.turn_tokens)

    def count(self, row: Row, new: int) -> None:
        """Record that a sequence has had ``new`` tokens added in one step since it was as ``row`` says; their slots
        have pages."""
        sequence, taken = self[row.sequence], row.turn_tokens + new
        tokens = sequence.tokens[row.turn]
        tokens.cut(row.counts[row.turn])
        tokens.append([range(row.length, row.length + new)])
        sequence.turn, sequence.turn_tokens = row.turn, taken if taken < self.page_size else 0

    def replay(self, number: int, new: int, steps: int) -> None:
        """Record that a sequence has had steps of ``new`` tokens added, whose slots have pages."""
        sequence = self[number]
        for rank, turn in self._turns(sequence, new):
            taken, length = min(turn, steps) * new, sequence.length
            if not taken:
                break
            sequence.tokens[rank].append([range(length, length + taken)])
            in_turn = sequence.turn_tokens + taken  # 0 before a turn that begins here
            sequence.turn, sequence.turn_tokens = rank, in_turn if in_turn < self.page_size else 0
            steps -= taken // new

    def reserve(self, numbers: Sequence[int], tokens: int, new: int) -> list[Copy]:
        """Make room for ``tokens`` more tokens of each sequence in steps of ``new``; return the pages to copy first."""
        growths = []
        for sequence in map(self.__getitem__, numbers):
            left, more = -(-tokens // new), [0] * self.world_size
            for rank, steps in self._turns(sequence, new):
                more[rank] += min(left, steps) * new
                left -= min(left, steps)
                if not left:
                    break
            growths += [self._growth(sequence, rank, count) for rank, count in enumerate(more)]
        copies = self._make_room(growths)
        for growth in growths:
            growth.sequence.reserved[growth.rank] = max(growth.past, growth.sequence.reserved[growth.rank])
        return copies

    def steps_left(self, number: int, new: int) -> int:
        """Return how many steps of ``new`` tokens fit into the pages that a sequence has."""
        sequence, total = self[number], 0
        counts = [tokens.count for tokens in sequence.tokens]
        room = [min(len(tables[rank]) for tables in sequence.pages) * self.page_size for rank in range(self.world_size)]
        for rank, steps in self._turns(sequence, new):
            fits = min(steps, max(0, room[rank] - counts[rank]) // new)
            total += fits
            counts[rank] += steps * new
            if fits < steps:
                break
        return total

    def cut(self, number: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence. Raise ValueError if it has fewer, or if a window that passed
        has taken what its next token would see."""
        sequence = self[number]
        if type(length) is not int or not 0 <= length <= sequence.length:
            raise ValueError(
                f"length is {length!r}; pass how many tokens sequence {number} keeps of its {sequence.length}"
            )
        counts = [tokens.before(length) for tokens in sequence.tokens]
        pages = [-(-count // self.page_size) for count in counts]
        for kind, rank, table in sequence.tables:
            window = self.kinds[kind].window
            unseen = min(counts[rank], sequence.tokens[rank].before(length - window)) if window >= 0 else 0
            needed = table[unseen // self.page_size : pages[rank]]
            if NONE in needed or len(needed) < pages[rank] - unseen // self.page_size:
                raise ValueError(
                    f"sequence {number} cannot be cut from {sequence.length} tokens to {length}: layers with a "
                    f"window of {window} keep only the last {window + SLACK}; fork it before it grows"
                )
        for kind, rank, table in sequence.tables:
            self.pools[kind][rank].release(table[pages[rank] :])
            del table[pages[rank] :]
            sequence.passed[kind][rank] = min(sequence.passed[kind][rank], len(table))
        for tokens, count in zip(sequence.tokens, counts, strict=True):
            tokens.cut(count)
        sequence.turn_tokens, sequence.reserved = 0, [0] * self.world_size
        self.note("cut", number, length)

    def physical(self, kind: int, rank: int, number: int, slots: range, early: int = 0) -> Placed:
        """Return where some slots are in a rank's pool, after the first ``early`` ones."""
        if early:
            parts = [self.physical(kind, rank, number, part) for part in (range(early), slots)]
            where = [part.indices for part in parts]
            which = [np.arange(len(x)) if nth is None else nth for (nth, _), x in zip(parts, where, strict=True)]
            return Placed(np.concatenate([which[0], which[1] + early]), np.concatenate(where))
        size, table = self.page_size, self[number].pages[kind][rank]
        past = -(-slots.stop // size)
        pages = np.array(table[slots.start // size : past], np.int64)
        pages = np.append(pages, np.full(past - slots.start // size - len(pages), NONE))
        if len(slots) and pages[0] >= 0 and (np.diff(pages) == 1).all():
            first = int(pages[0]) * size + slots.start % size
            return Placed(None, slice(first, first + len(slots)))
        nth = np.arange(slots.start, slots.stop)
        page = pages[nth // size - slots.start // size]
        (there,) = np.nonzero(page >= 0)
        return Placed(there, (page * size + nth % size)[there])

    def state(self) -> object:
        """Return the tables as plain numbers, equal on all ranks: what checking mode compares a digest of."""
        return [
            (s.number, s.turn, s.turn_tokens, [t.runs for t in s.tokens], [[t.tolist() for t in p] for p in s.pages])
            for s in self._sequences.values()
        ]

    # Turns

    def _fewest(self, counts: Sequence[int], number: int) -> int:
        """Return the rank whose turn begins."""
        return min(range(self.world_size), key=lambda rank: (counts[rank], (rank - number) % self.world_size))

    def _turns(self, sequence: Record, new: int) -> Iterator[tuple[int, int]]:
        """Yield the turns to come, as the rank and the number of steps."""
        counts = [tokens.count for tokens in sequence.tokens]
        rank, taken = sequence.turn, sequence.turn_tokens
        while True:
            rank = rank if taken else self._fewest(counts, sequence.number)
            steps = -(-(self.page_size - taken) // new)
            yield rank, steps
            counts[rank] += steps * new
            taken = 0

    # Room

    def _growth(self, sequence: Record, rank: int, more: int) -> _Growth:
        """Return what ``more`` slots after those of a rank need."""
        count = sequence.tokens[rank].count
        return _Growth(sequence, rank, (count,) * len(self.kinds), count + more)

    def _chunk(self, sequence: Record, shards: Sequence[Shard]) -> list[_Growth]:
        """Return the pages a chunk needs; windowed layers store only tokens that later queries can see."""
        lengths = [sum(map(len, shard)) for shard in shards]
        after = sequence.length + sum(lengths)
        growths = []
        sinks = max(kind.sinks for kind in self.kinds)
        for rank, (shard, length) in enumerate(zip(shards, lengths, strict=True)):
            start = count = sequence.tokens[rank].count
            if early := sum(before(run, sinks) for run in shard):
                # Sinks get pages first, whatever is skipped after them.
                growths.append(self._growth(sequence, rank, early))
                start = -(-(count + early) // self.page_size) * self.page_size
            unseen = [self._unseen(kind, after) for kind in self.kinds]
            skipped = [sum(before(run, position) for run in shard) for position in unseen]
            # From the beginning of a page on, so that every page holds tokens from its first slot to its last.
            firsts = (max(start, (count + n) // self.page_size * self.page_size) for n in skipped)
            growths.append(_Growth(sequence, rank, tuple(firsts), count + length))
        return growths

    def _unseen(self, kind: Kind, length: int) -> int:
        """Return the position before which no token sees anything that is added to a sequence of this length."""
        return max(0, length - kind.window - SLACK) if kind.window >= 0 else 0

    def _make_room(self, growths: Sequence[_Growth]) -> list[Copy]:
        wants = self._wanted(growths)
        for growth, kind, _, _, passed in wants:
            table = growth.sequence.pages[kind][growth.rank]
            self.pools[kind][growth.rank].release(table[passed.start : passed.stop])
            table[passed.start : passed.stop] = array("i", [NONE]) * len(passed)
            growth.sequence.passed[kind][growth.rank] = passed.stop
        copies = []
        for growth, kind, new, copied, _ in wants:
            table = growth.sequence.pages[kind][growth.rank]
            if copied >= 0:
                copies.append(self._copied(kind, growth.rank, table, copied))
            if new:
                table.extend([NONE] * (growth.first[kind] // self.page_size - len(table)))
                table.extend(self.pools[kind][growth.rank].take(new, table[-1] if table else NONE))
        return copies

    def _copied(self, kind: int, rank: int, table: array[int], index: int) -> Copy:
        """Replace a shared page of a table by one of its own."""
        pool, source = self.pools[kind][rank], table[index]
        (target,) = pool.take(1, table[index - 1] if index else NONE)
        pool.release([source])
        table[index] = target
        return Copy(kind, rank, source, target)

    def _wanted(self, growths: Sequence[_Growth]) -> list[_Want]:
        """Return what growths take. Raises CacheFull if it is not there."""
        wants: list[_Want] = []
        needed: Counter[tuple[int, int]] = Counter()
        left: Counter[tuple[int, int, int]] = Counter()  # references that are given up, by kind, rank and page
        for growth in growths:
            for kind, first in enumerate(growth.first):
                table, pool = growth.sequence.pages[kind][growth.rank], self.pools[kind][growth.rank]
                have, index, key = len(table), first // self.page_size, (kind, growth.rank)
                new = max(0, -(-growth.past // self.page_size) - max(have, index))
                copied = -1
                if first < growth.past and index < have:
                    others = pool.references[table[index]] - left[*key, table[index]]
                    copied = index if others > 1 else -1
                if not new and copied < 0:
                    continue
                passed = self._passed(growth, kind)
                if copied >= 0:
                    left[*key, table[index]] += 1
                for page in table[passed.start : passed.stop]:
                    if page != NONE:
                        left[*key, page] += 1
                        needed[key] -= int(pool.references[page] == left[*key, page])
                needed[key] += new + (copied >= 0)
                wants.append(_Want(growth, kind, new, copied, passed))
        self._check_room(needed)
        return wants

    def _passed(self, growth: _Growth, kind: int) -> range:
        """Return the pages of a table that no later token sees, whichever of the last tokens are cut off."""
        sequence, rank = growth.sequence, growth.rank
        tokens = sequence.tokens[rank]
        unseen = tokens.before(self._unseen(self.kinds[kind], sequence.length))
        first = max(sequence.passed[kind][rank], -(-tokens.before(self.kinds[kind].sinks) // self.page_size))
        return range(first, max(first, min(len(sequence.pages[kind][rank]), unseen // self.page_size)))

    def _check_room(self, needed: Mapping[tuple[int, int], int]) -> None:
        lacking = {key: count - self.pools[key[0]][key[1]].free for key, count in needed.items()}
        if not lacking or max(lacking.values()) <= 0:
            return
        kind, rank = max(lacking, key=lambda key: (lacking[key], -key[0], -key[1]))
        used = {s.number: sum(p != NONE for p in s.pages[kind][rank]) for s in self._sequences.values()}
        holders = {number: pages for number, pages in used.items() if pages}
        raise CacheFull(rank, self.kinds[kind].window, needed[kind, rank], self.pools[kind][rank].free, holders)
