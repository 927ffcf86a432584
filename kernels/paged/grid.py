"""The division of the work of a call, and the scratch memory that it takes: the same for all paged kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from .operands import Call, Pool, Tables

_ROWS = 64  # the most rows of a tile
_BATCH = 128  # prefix sums that a program reads at once, at least


class Grid(NamedTuple):
    """The division of the work of one shape of call.

    Args:
        rows, blocks: rows of a tile, and tiles of rows for each key head.
        programs: of the launch; with a fixed split ``splits`` for each row and tile of rows.
        slots: pieces that scratch memory has room for.
        step: a program's share of the tiles is a multiple of this.
    """

    rows: int
    blocks: int
    programs: int
    splits: int
    slots: int
    step: int = 1

    @staticmethod
    def of(
        q: Tensor, pool: Pool, tables: Tables, call: Call, programs: int, least_rows: int = 16, step: int = 1
    ) -> Grid:
        batch, new, q_heads, _ = q.shape
        kv_heads = pool.k.shape[0]
        alive = new * (q_heads // kv_heads)
        rows = min(_ROWS, max(least_rows, next_power_of_2(alive)))
        blocks = -(-alive // rows)
        units = batch * kv_heads * blocks
        if call.fixed_split:
            splits = -(-tables.table.shape[1] * pool.page_size // call.fixed_split)
            return Grid(rows, blocks, units * splits, splits, units * splits)
        return Grid(rows, blocks, programs, 0, programs + units, step)

    def some(self, alive: int) -> int:
        """Return the rows that the sum of pieces reads, where ``alive`` rows of all tiles exist."""
        return min(self.rows, next_power_of_2(alive))

    def batch_p2(self, batch: int) -> int:
        """Return the number of prefix sums that a program reads at once."""
        return max(_BATCH, next_power_of_2(batch))


def scratch(tables: Tables, grid: Grid, units: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Return memory for the pieces of a launch, and counters of pieces that have arrived, zero before and after it.
    Both are the step's, whose launches do not overlap."""

    def make() -> tuple[Tensor, Tensor]:
        device = tables.table.device
        pieces = torch.empty(grid.slots * grid.rows * (dim_v + 2), dtype=torch.float32, device=device)
        return pieces, torch.zeros(units, dtype=torch.int32, device=device)

    return tables.memo.once(("scratch", grid, units, dim_v), make)
