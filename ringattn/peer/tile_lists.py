"""CSR tables from tiles of tokens to the runs that overlap them, built in time linear in the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.upload import upload


class TileTable(NamedTuple):
    """Runs of tokens, by the tiles of a kernel that they meet.

    Attributes:
        edges: (tiles + 1,) int32; the runs of tile t are ``runs[edges[t] : edges[t + 1]]``.
        runs: (n, numbers) int64, what the kernel needs of each. A run is there once for each of its tiles.
    """

    edges: Tensor
    runs: Tensor


def tile_table(
    runs: Sequence[tuple[int, ...]], spans: Sequence[tuple[int, int]], tokens: int, tile: int, device: torch.device
) -> TileTable:
    """Return the table of ``runs``, whose tokens are ``spans``, in the order of the runs: see :func:`tile_lists`.

    Call it outside of CUDA-graph capture: a table is copied from the host.
    """
    edges, index = tile_lists(spans, tokens, tile)
    numbers = np.array(runs, dtype=np.int64).reshape(len(runs), len(runs[0]) if runs else 1)
    return TileTable(*upload((torch.from_numpy(edges), torch.from_numpy(numbers[index])), device))


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
