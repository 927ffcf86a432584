"""Parts of a mask that kernels of others have: full, causal and windowed attention of one rectangle of queries and
keys, or of many, one after another.

The keys of a query are an interval here whose ends never fall. While each of them stands still, or moves by one key a
query, queries are one part:

    start     end       part
    still     still     full
    still     moves     causal: the last query sees the last key, and each one before it one key less
    moves     moves     a window of as many keys for all
    moves     still     a window that ends with the part

So a causal zigzag is two parts, documents are one each, prefixes, chunks and images one or two.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import PERIOD, Block
from .long_sums import sub_block

SINGLE = 4  # parts that get a launch each; more of them are launched together
LAUNCHES = 8  # of one batch element, at most
LEAST = 64  # queries of a part on average, if there are many: tiles have 64 or 128


class Part(NamedTuple):
    """Queries and keys, as (first, past the last). ``causal``: query i of n sees keys up to number
    ``i + keys - n`` only; ``left``: and only as many before that one. None: all."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    left: int | None


class Lengths(NamedTuple):
    """Many parts one after another: where each begins, (parts + 1,) int32, and the largest lengths."""

    q: Tensor
    k: Tensor
    most_q: int
    most_k: int


def parts_of(start: Tensor, end: Tensor, most: int) -> list[Part] | None:
    """Return the parts of one row of a mask, (queries,) int64 each; None if there are more than ``most``."""
    n = len(start)
    sees = end > start
    step_start, step_end = start.diff(), end.diff()
    code = 2 * step_start + step_end
    regular = (step_start >= 0) & (step_start <= 1) & (step_end >= 0) & (step_end <= 1) & (sees[1:] == sees[:-1])
    code[~regular] = -1
    changes = [*((code[1:] != code[:-1]).nonzero()[:, 0] + 1).tolist(), n - 1]
    parts: list[Part] = []
    row = 0
    while row < n:
        same = row < n - 1 and int(code[row]) >= 0
        past = changes[bisect.bisect_right(changes, row)] + 1 if same else row + 1
        if sees[row]:
            if len(parts) == most:
                return None
            causal, moves = (bool(int(code[row]) & 1), bool(int(code[row]) & 2)) if same else (True, False)
            low, high = int(start[row]), int(end[past - 1])
            parts.append(Part((row, past), (low, high), causal, high - low - (past - row) if moves else None))
        row = past
    return parts


class Side(NamedTuple):
    """The queries or the keys of parts: where each begins and ends, the largest number, and the slice of all of them;
    None if they are not neighbours."""

    bounds: tuple[tuple[int, int], ...]
    most: int
    inside: slice | None

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]]) -> Side:
        neighbours = all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        most = max(past - first for first, past in bounds)
        return cls(tuple(bounds), most, slice(bounds[0][0], bounds[-1][1]) if neighbours else None)


class Launch:
    """One call of an operator, for one part or many. ``batch``: elements; ``rows``: from the first query to the last
    one."""

    _numbers = itertools.count()

    def __init__(self, operator: Any, batch: tuple[int, int], parts: Sequence[Part]) -> None:
        self.operator, self.part, self.several = operator, parts[0], len(parts) > 1
        self.batch, self.rows = slice(*batch), slice(parts[0].rows[0], parts[-1].rows[1])
        self._sides = Side.of([part.rows for part in parts]), Side.of([part.keys for part in parts])
        self._number = next(self._numbers)  # of its tables

    def tables(self, block: Block, device: torch.device) -> tuple[Lengths | None, list[slice | Tensor]]:
        """Return the lengths of many parts, and which queries and keys of the block they have."""
        if not self.several:
            return None, [slice(*side.bounds[0]) for side in self._sides]

        def make() -> tuple[Tensor, ...]:
            ends = [torch.tensor([0, *(past - first for first, past in x.bounds)]).cumsum(0) for x in self._sides]
            apart = [x.bounds for x in self._sides if x.inside is None]
            places = [torch.cat([torch.arange(first, past) for first, past in bounds]) for bounds in apart]
            return tuple(x.to(torch.int32) for x in (*ends, *places))

        ends_q, ends_k, *places = block.on(device, ("torch", self._number), make)
        where = [x.inside or places.pop(0) for x in self._sides]
        return Lengths(ends_q, ends_k, self._sides[0].most, self._sides[1].most), where


class Work(NamedTuple):
    """What runs a block: launches, or why there are none. ``once``, ``every``: no query lies between the first and the
    last one of two launches, every query of one."""

    launches: tuple[Launch, ...]
    once: bool
    every: bool
    why: str = ""


def work_of(block: Block, batch: int, operators: tuple[Any, ...]) -> Work:
    """Return what runs a block with these operators, of which the first one that has a mask takes it. Made once."""
    key = "torch", batch, *operators
    return block.memo.once(key, lambda: _work(block, batch, operators))


def _work(block: Block, batch: int, operators: tuple[Any, ...]) -> Work:
    def portable(why: str) -> Work:
        return Work((), False, False, why)

    if block.ordered:
        return portable("sums in a fixed order")
    launches: list[Launch] = []
    seen = torch.zeros(batch, block.seq_q, dtype=torch.int64)
    most = max(SINGLE, block.seq_q // LEAST)
    size = PERIOD if block.period else max(block.seq_k, 1)
    for first in range(0, block.seq_k, size):  # sums of more keys than that are not exact on tensor cores
        keys = slice(first, min(first + size, block.seq_k))
        some = block if keys.stop - first == block.seq_k else sub_block(block, slice(0, block.seq_q), keys)
        start, end = (x.cpu().long() for x in (some.start, some.end))
        for row in range(len(start)):
            elements = (row, row + 1) if len(start) > 1 else (0, batch)
            parts = parts_of(start[row], end[row], most)
            if parts is None:
                return portable(f"more than {most} parts of {block.seq_q} queries, whose tiles would be mostly empty")
            parts = [part._replace(keys=(part.keys[0] + first, part.keys[1] + first)) for part in parts]
            alone = [next(((o, x) for o in operators if (x := o.split(part))), None) for part in parts]
            if len(parts) <= SINGLE and None in alone:
                return portable(f"{operators[0].name} has no windows, and no lengths that are not whole tiles")
            if len(parts) <= SINGLE:
                new = [(operator, elements, [part]) for operator, pieces in filter(None, alone) for part in pieces]
            else:
                several = next((o for o in operators if o.many and all(map(o.split, parts))), None)
                if several is None:
                    what = "has no windows" if operators[0].many else "takes one part at a time"
                    return portable(f"{operators[0].name} {what}, and here are {len(parts)} parts")
                kinds: dict[tuple[bool, int | None], list[Part]] = {}
                for part in parts:
                    kinds.setdefault(part[2:], []).append(part)
                new = [(several, (b, b + 1), kind) for b in range(*elements) for kind in kinds.values()]
                if len(kinds) > LAUNCHES:
                    return portable(f"{len(kinds)} kinds of parts")
            for operator, which, those in new:
                launches.append(Launch(operator, which, those))
                seen[launches[-1].batch, launches[-1].rows] += 1
    return Work(tuple(launches), bool((seen <= 1).all()), bool((seen > 0).all()))


def taken(x: Tensor, at: slice | Tensor, lengths: Lengths | None, dim: int = 1) -> Tensor:
    """Return some tokens, without the batch if there are lengths."""
    x = x[(slice(None),) * dim + (at,)] if isinstance(at, slice) else x.index_select(dim, at)
    return x if lengths is None else x[0]


def add(total: Tensor, at: slice | Tensor, x: Tensor) -> None:
    """Add to some tokens."""
    if isinstance(at, slice):
        total[:, at].add_(x)
    else:
        total.index_add_(1, at, x.to(total.dtype))
