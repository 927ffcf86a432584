"""CSR tables from tiles of tokens to the runs that overlap them, built in time linear in the runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def tile_lists(runs: Sequence[tuple[int, int]], tokens: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs that meet each tile of ``tile`` tokens, in the order of the runs.

    Args:
        runs: (first token, past the last) of each; they may overlap.

    Returns:
        edges: (tiles + 1,) int32.
        index: int32; the runs of tile t are ``index[edges[t] : edges[t + 1]]``.
    """
    begin, end = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    first = begin // tile
    count = np.where(end > begin, -(-end // tile) - first, 0)  # tiles of each run
    index = np.repeat(np.arange(len(begin)), count)
    tiles = np.repeat(first - count.cumsum() + count, count) + np.arange(len(index))
    order = tiles.argsort(kind="stable")
    edges = np.searchsorted(tiles[order], np.arange(-(-tokens // tile) + 1))
    return edges.astype(np.int32), index[order].astype(np.int32)
