"""Passes over keys, for blocks with several intervals per query: which queries and which keys each pass covers.

A forward need not carry a state for queries that see something in one pass only, and a backward need not add up the
gradients of keys that are seen in one pass only. A prompt with answers is both: its own tokens are in one pass, the
answers in two, and those go over keys of the prompt and over keys of the answers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from .contract import Block
from .long_sums import sub_block

LEAST_SHARE = 8  # each run of queries has at least this part of all, or they are not divided: a run is a launch more


def of_queries(block: Block) -> list[tuple[slice, Block]]:
    """Return runs of neighbouring queries that see something in the same passes, and the block of each; one run for all
    queries if some would be short."""

    def make() -> list[tuple[slice, Block]]:
        every, n = block.passes, block.seq_q
        sees = torch.stack([(one.end > one.start).any(0) for one in every]).cpu()
        changes = (sees[:, 1:] != sees[:, :-1]).any(0).nonzero().flatten() + 1
        bounds = list(itertools.pairwise([0, *changes.tolist(), n]))
        if len(bounds) == 1 or any(LEAST_SHARE * (past - first) < n for first, past in bounds):
            return [(slice(0, n), block)]
        runs = []
        for first, past in bounds:
            rows, seen = slice(first, past), sees[:, first].tolist()
            those = [part(one, rows, slice(0, block.seq_k)) for one, some in zip(every, seen, strict=True) if some]
            one, *others = those or [part(block, rows, slice(0, block.seq_k))]
            runs.append((rows, replace(one, others=tuple(others))))
        return runs

    return block.memo.once("runs of queries", make)


def of_keys(block: Block) -> list[tuple[slice, Block]]:
    """Return for each pass the keys from the first to the last that any query sees, and the block of these. The first
    keys come first, and of those the longest run."""

    def make() -> list[tuple[slice, Block]]:
        each = []
        for one in block.passes if block.seq_q else ():
            sees = one.end > one.start
            first = int(torch.where(sees, one.start, block.seq_k).amin())
            past = int(torch.where(sees, one.end, 0).amax())
            if first < past:
                keys = slice(first, past)
                each.append((keys, part(one, slice(0, block.seq_q), keys)))
        return sorted(each, key=lambda x: (x[0].start, -x[0].stop))

    return block.memo.once("runs of keys", make)


def most_keys(block: Block) -> int:
    """Return the largest number of keys of a pass: portable kernels make gradients of their own before they add or
    store them."""
    return max((keys.stop - keys.start for keys, _ in of_keys(block)), default=0)


def folded(block: Block, pieces: int) -> Block:
    """Return the block of one pass with ``pieces`` runs of queries in the place of batch elements."""
    n = block.seq_q // pieces

    def make() -> Block:
        start, end = (x.reshape(pieces, n) for x in (block.start, block.end))
        pairs = None if block.pairs is None else block.pairs / pieces
        return replace(block, start=start, end=end, positions_q=block.positions_q[:n], segments_q=(n,), pairs=pairs)

    return block.memo.once(("folded", pieces), make)


def part(block: Block, queries: slice, keys: slice) -> Block:
    """Return the block of one pass between some queries and some keys, with its number of pairs."""
    some = sub_block(block, queries, keys)
    return replace(some, pairs=float((some.end - some.start).sum()) / some.start.shape[0])
