"""A backward in pieces, so that no sum of products is too long for tensor cores.

Tensor cores truncate when they accumulate, so a sum over more than 2^18 products drifts towards zero (see
``Block.period``). The gradient of a key is a sum over all queries that see it, that of a query a sum over all its keys.
A long backward is split into pieces of queries and keys; each is accumulated on tensor cores, and the pieces are added
in float32 in a fixed order. Pieces are long enough that launch overhead is negligible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from .contract import GRID, LONGEST_SUM, Block

QUERY_PRODUCTS = 1 << 17  # products of one sum over the queries of a piece
KEYS = 1 << 16  # keys of a piece
LEAST_HEADS = 2  # query heads of a group that the Hopper kernel adds up, if the group has as many


class Piece(NamedTuple):
    """Some queries and some keys of a block, and the block between them; ``first``: the first piece of these keys."""

    queries: slice
    keys: slice
    block: Block
    first: bool


def must_split(block: Block, heads: int, sums_keys: bool) -> bool:
    """Return whether a backward has a sum that is too long.

    Args:
        heads: number of query heads whose queries are in one sum of a key's gradient.
        sums_keys: True if dq is one sum over all keys.
    """
    return block.seq_q * heads > LONGEST_SUM or (sums_keys and block.seq_k > LONGEST_SUM)


def heads_together(group: int) -> int:
    """Return how many of the ``group`` query heads of a key head the Hopper kernel adds up in one sum: a divisor."""
    return next((n for n in range(LEAST_HEADS, group) if group % n == 0), group)


def queries_per_piece(heads: int) -> int:
    """Return the number of queries of a piece: whole tiles."""
    count = QUERY_PRODUCTS // heads
    return max(1, count - count % 128 if count > 128 else count)


def queries_per_ordered_piece(seq_len: int, heads: int) -> int:
    """Return the number of positions after which a sum over queries of an ordered block begins again, whole tiles; 0
    for never.

    Args:
        seq_len: global number of queries.
        heads: as for :func:`must_split`.
    """
    return max(GRID, queries_per_piece(heads)) if seq_len * heads > LONGEST_SUM else 0


def split(block: Block, heads: int) -> Iterator[Piece]:
    """Yield all pieces in which anything is visible, those of the same keys one after another.

    Blocks are made one at a time: together they would be larger than their inputs.
    """
    size = queries_per_piece(heads)
    ranges = _key_ranges(block, size)
    for low in range(0, block.seq_k, KEYS):
        keys = slice(low, min(low + KEYS, block.seq_k))
        first = True
        for i, (begin, stop) in enumerate(ranges):
            if begin < keys.stop and keys.start < stop:
                queries = slice(i * size, min((i + 1) * size, block.seq_q))
                yield Piece(queries, keys, sub_block(block, queries, keys), first)
                first = False


def _key_ranges(block: Block, size: int) -> list[list[int]]:
    """Return [first, past the last] of the keys that each run of ``size`` queries sees. Read from the device once."""

    def read() -> list[list[int]]:
        sees = block.end > block.start
        start = torch.where(sees, block.start, block.seq_k).amin(0).split(size)
        end = torch.where(sees, block.end, 0).amax(0).split(size)
        both = torch.stack([torch.stack([a.amin(), b.amax()]) for a, b in zip(start, end, strict=True)])
        return both.tolist()

    return block.memo.once(("key ranges", size), read)


def sub_block(block: Block, queries: slice, keys: slice) -> Block:
    """Return the block between some queries and some keys."""
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
    """Return the lengths of consecutive runs, restricted to a range; runs outside of it vanish."""
    left, first = [], 0
    for length in lengths:
        n = min(first + length, inside.stop) - max(first, inside.start)
        left += [n] if n > 0 else []
        first += length
    return tuple(left)
