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

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
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




def parts_of(start: np.ndarray, end: np.ndarray, most: int) -> list[Part] | None:
    """Return the parts of one row of a mask, (queries,) each; None if there are more than ``most``."""
    n = len(start)
    sees = end > start
    step_start, step_end = np.diff(start), np.diff(end)
    code = 2 * step_start + step_end
    regular = (step_start >= 0) & (step_start <= 1) & (step_end >= 0) & (step_end <= 1) & (sees[1:] == sees[:-1])
    code[~regular] = -1
    changes = np.append(np.flatnonzero(code[1:] != code[:-1]) + 1, n - 1)
    parts: list[Part] = []
    row = 0
    while row < n:
        same = row < n - 1 and code[row] >= 0
        past = int(changes[np.searchsorted(changes, row, "right")]) + 1 if same else row + 1
        if sees[row]:
            if len(parts) == most:
                return None
            causal, moves = (bool(code[row] & 1), bool(code[row] & 2)) if same else (True, False)
            low, high = int(start[row]), int(end[past - 1])
            parts.append(Part((row, past), (low, high), causal, high - low - (past - row) if moves else None))
        row = past
    return parts


class Operator(Protocol):
    """What attends to parts. ``many``: parts in one launch. ``split``: the parts that it takes instead of one, None if
    it has no such mask."""

    name: str
    many: bool

    def split(self, part: Part) -> list[Part] | None: ...


@dataclass(frozen=True)
class Launch:
    """One call of an operator. ``number``: among those of the block; ``batch``: elements."""

    operator: Operator
    number: int
    batch: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> tuple[int, int]:
        return self.parts[0].rows[0], self.parts[-1].rows[1]

    def tables(self, block: Block, device: torch.device) -> tuple[Lengths | None, list[slice | Tensor]]:
        """Return the lengths of many parts, and where their queries and keys are."""
        sides = [[part.rows for part in self.parts], [part.keys for part in self.parts]]
        if len(self.parts) == 1:
            return None, [slice(*side[0]) for side in sides]
        joined = [all(a[1] == b[0] for a, b in itertools.pairwise(side)) for side in sides]

        def make() -> tuple[Tensor, ...]:
            lengths = [[past - first for first, past in side] for side in sides]
            cumulated = [torch.tensor([0, *x]).cumsum(0) for x in lengths]
            places = [torch.cat([torch.arange(*x) for x in side]) for side, one in zip(sides, joined, strict=True)
                      if not one]  # fmt: skip
            return tuple(x.to(torch.int32) for x in (*cumulated, *places))

        cu_q, cu_k, *places = block.on(device, ("torch", self.operator.name, self.number), make)
        most_q, most_k = (max(past - first for first, past in side) for side in sides)
        where = [
            slice(side[0][0], side[-1][1]) if one else places.pop(0) for side, one in zip(sides, joined, strict=True)
        ]
        return Lengths(cu_q, cu_k, most_q, most_k), where


class Work(NamedTuple):
    """What runs a block: launches, or why there are none. ``once``, ``every``: no query is in two of them, every query
    is in one."""

    launches: tuple[Launch, ...]
    once: bool
    every: bool
    why: str = ""


def work_of(block: Block, batch: int, operators: tuple[Operator, ...]) -> Work:
    """Return what runs a block with these operators, of which the first one that has a mask takes it. Made once."""
    key = "torch", batch, *(operator.name for operator in operators)
    return block.memo.once(key, lambda: _work(block, batch, operators))


def _work(block: Block, batch: int, operators: tuple[Operator, ...]) -> Work:
    def portable(why: str) -> Work:
        return Work((), False, False, why)

    if block.ordered:
        return portable("sums in a fixed order")
    launches: list[Launch] = []
    seen = np.zeros((batch, block.seq_q), dtype=np.int64)
    most = max(SINGLE, block.seq_q // LEAST)
    size = PERIOD if block.period else max(block.seq_k, 1)
    for first in range(0, block.seq_k, size):  # sums of more keys than that are not exact on tensor cores
        keys = slice(first, min(first + size, block.seq_k))
        some = block if keys.stop - first == block.seq_k else sub_block(block, slice(0, block.seq_q), keys)
        start, end = (x.cpu().numpy().astype(np.int64) for x in (some.start, some.end))
        for row in range(len(start)):
            elements = (row, row + 1) if len(start) > 1 else (0, batch)
            parts = parts_of(start[row], end[row], most)
            if parts is None:
                return portable(f"more than {most} parts: tiles would be mostly empty")
            parts = [part._replace(keys=(part.keys[0] + first, part.keys[1] + first)) for part in parts]
            alone = [next(((o, x) for o in operators if (x := o.split(part))), None) for part in parts]
            if len(parts) <= SINGLE and None in alone:
                return portable(f"{operators[0].name} has no windows, and no lengths that are not whole tiles")
            if len(parts) <= SINGLE:
                new = [(operator, elements, [part]) for operator, pieces in filter(None, alone) for part in pieces]
            else:
                several = next((operator for operator in operators if operator.many), None)
                if several is None:
                    return portable(f"{operators[0].name} takes one part at a time, and here are {len(parts)}")
                kinds: dict[tuple[bool, int | None], list[Part]] = {}
                for part in parts:
                    kinds.setdefault(part[2:], []).append(part)
                new = [(several, (b, b + 1), kind) for b in range(*elements) for kind in kinds.values()]
                if len(kinds) > LAUNCHES:
                    return portable(f"{len(kinds)} kinds of parts")
            for operator, which, taken in new:
                launches.append(Launch(operator, len(launches), which, tuple(taken)))
                for part in taken:
                    seen[slice(*which), slice(*part.rows)] += 1
    return Work(tuple(launches), bool((seen <= 1).all()), bool((seen > 0).all()))
