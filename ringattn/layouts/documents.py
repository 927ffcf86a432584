"""Documents that are packed into a row: the tiles that runs of their tokens cost a rank.

A kernel computes tiles of TILE queries and TILE keys. Tiles of queries begin where runs begin, and tiles of keys where
those of queries do (:mod:`.alignment`). A tile of queries costs all tiles of keys from the beginning of its first
query's document: a causal one to its own last query, another one to the end of its last query's document.

    a run of two causal documents, tiles of 4 x 4    |q . . .|. . . .|           1 tile
    queries down, keys across                        |q q q q|q q q .|           2
                                                     |       |    q q|q q . .    2: both documents
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]

TILE = 128  # queries in a tile of the kernels, and keys
LONG = 1024  # documents of this many tokens or more are cut at whole tiles


def tiles_of(runs: Iterable[range], cuts: Sequence[int], causal: bool) -> int:
    """Count the tiles of TILE queries and TILE keys of a rank.

    Args:
        runs: runs of neighbouring queries.
        cuts: boundaries of the documents, from 0 to the end of the row.
        causal: queries see their document up to themselves, not all of it.
    """
    tiles = 0
    for run in runs:
        start, stop, index = run.start, run.stop, 0
        shift = -start % TILE  # from a position to its row
        while start < stop:
            index = bisect_right(cuts, start, index)
            past = min(cuts[index], stop)
            count = -(-(past - start) // TILE)  # tiles of queries that begin in this document
            tiles -= count * ((cuts[index - 1] + shift) // TILE)
            if causal:
                tiles += count * ((start + shift) // TILE) + count * (count + 1) // 2
            else:
                last = cuts[bisect_left(cuts, min(start + count * TILE, stop), index)]
                tiles += (count - 1) * -(-(cuts[index] + shift) // TILE) + -(-(last + shift) // TILE)
            start += count * TILE
    return tiles


def tiles_of_each(start: Array, stop: Array, bounds: Array) -> Array:
    """Count the tiles of each of many runs of causal documents, as :func:`tiles_of` does of one."""
    tiles, shift = np.zeros_like(start), -start % TILE
    some = np.arange(len(start))
    while some.size:
        index = np.searchsorted(bounds, start, side="right")
        count = -((start - np.minimum(bounds[index], stop)) // TILE)
        above = (start + shift) // TILE - (bounds[index - 1] + shift) // TILE
        tiles[some] += count * above + count * (count + 1) // 2
        start = start + count * TILE
        left = start < stop
        some, start, stop, shift = (x[left] for x in (some, start, stop, shift))
    return tiles


def joined(pieces: Iterable[range]) -> list[range]:
    """Return runs of neighbouring positions, growing, from pieces in any order, none of which is empty."""
    runs: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if runs and runs[-1].stop == piece.start:
            piece = range(runs.pop().start, piece.stop)
        runs.append(piece)
    return runs
