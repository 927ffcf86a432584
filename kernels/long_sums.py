"""A backward cut into spans of queries and of keys, so that no sum of products is too long for tensor cores.

Their additions cut off what does not fit instead of rounding it (see ``Block.period``). A key's gradient is a sum over
all queries that see it, a query's one over all keys. Here each is made of sums over one span after the other, and these
are added in float32, in a fixed order. A span is so long that the kernel's beginning and end do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .contract import Block

LONGEST = 1 << 18  # products in a sum that is not cut, here and in the forward
SPAN, KEYS = 1 << 17, 1 << 16  # products of a sum over the queries of a span; keys of a span
LEAST_HEADS = 2  # query heads of a group that the Hopper kernel adds up, if the group has as many


class Span(NamedTuple):
    """Some queries and some keys of a block, and what the ones see of the others; ``first`` of these keys."""

    queries: slice
    keys: slice
    block: Block
    first: bool


def long(block: Block, heads: int, sums_keys: bool) -> bool:
    """Must its backward be cut? ``heads``: query heads whose queries are in one sum of a key's gradient.
    ``sums_keys``: is dq one sum over all keys?"""
    return block.seq_q * heads > LONGEST or (sums_keys and block.seq_k > LONGEST)


def heads_together(group: int) -> int:
    """Of the ``group`` query heads of a key head those whose queries the Hopper kernel adds up: a divisor."""
    return next((n for n in range(LEAST_HEADS, group) if group % n == 0), group)


def queries_of(heads: int) -> int:
    """Queries of a span: whole tiles."""
    most = SPAN // heads
    return max(1, most - most % 128 if most > 128 else most)


def spans(block: Block, heads: int) -> Iterator[Span]:
    """All spans in which anything is visible, those of the same keys one after the other. Blocks are made when they are
    asked for: together they would be larger than their inputs."""
    size = queries_of(heads)
    ranges = _ranges(block, size)
    for low in range(0, block.seq_k, KEYS):
        keys = slice(low, min(low + KEYS, block.seq_k))
        first = True
        for i, (begin, stop) in enumerate(ranges):
            if begin < keys.stop and keys.start < stop:
                queries = slice(i * size, min((i + 1) * size, block.seq_q))
                yield Span(queries, keys, part(block, queries, keys), first)
                first = False


def _ranges(block: Block, size: int) -> list[list[int]]:
    """The keys that ``size`` queries after the other see: from the first to past the last. Read from the device once
    per block."""
    key = ("spans", size)
    if key not in block.known:
        sees = block.end > block.start
        start = torch.where(sees, block.start, block.seq_k).amin(0).split(size)
        end = torch.where(sees, block.end, 0).amax(0).split(size)
        both = torch.stack([torch.stack([a.amin(), b.amax()]) for a, b in zip(start, end, strict=True)])
        block.known[key] = both.tolist()
    return block.known[key]


def part(block: Block, queries: slice, keys: slice) -> Block:
    """Some queries and keys of a block, as a block of their own."""
    count = keys.stop - keys.start
    return replace(
        block,
        start=(block.start[:, queries] - keys.start).clamp(0, count),
        end=(block.end[:, queries] - keys.start).clamp(0, count),
        positions_q=block.positions_q[queries],
        positions_k=block.positions_k[keys],
        segments_q=_cut(block.segments_q, queries),
        segments_k=_cut(block.segments_k, keys),
        pairs=None,
    )


def _cut(lengths: tuple[int, ...], inside: slice) -> tuple[int, ...]:
    """Of runs one after the other, what is left of each inside of a range."""
    left, first = [], 0
    for length in lengths:
        n = min(first + length, inside.stop) - max(first, inside.start)
        left += [n] if n > 0 else []
        first += length
    return tuple(left)
