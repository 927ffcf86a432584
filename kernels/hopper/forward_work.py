"""The division of the Hopper forward's work, planned on the host: the table of query tiles, their order, their parts.

See :mod:`.work` for what it has in common with the backward's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Block

STEPS_OF_A_PART = 4  # of key tiles, in the time in which a part of a query tile begins and ends
MOST_PARTS = 3  # of query tiles, for each processor: 50 MB at head dim 256
COVER = 1.5  # heads of the forward's last sweep, over work.heads_of_longest()


def query_tile_table(block: Block, block_m: int, block_n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return descriptions of the query tiles, heaviest first, and the intervals ``start`` and ``end``, contiguous.

    A description, (batch or 1, tiles, 8) int32: first row, past-the-last row, the span (see ``TileMap``), and two
    numbers that the kernel fills in (batch and head).
    """

    def make() -> tuple[Tensor, Tensor, Tensor]:
        rows, span = block.query_tiles(block_m, block_n)
        order = torch.argsort(span[..., 0] - span[..., 3], dim=-1, stable=True)[..., None]
        table = torch.cat([rows.expand(span.shape[0], -1, -1), span, torch.zeros_like(span[..., :2])], -1)
        table = table.gather(1, order.expand(-1, -1, table.shape[-1])).contiguous()
        return table, block.start.contiguous(), block.end.contiguous()

    table, start, end = block.on(device, ("hopper query tiles", block_m, block_n), make)
    return table, start, end


def head_sweeps(
    n_tiles: int, n_heads: int, workers: int, longest: float = 0.0, arriving: bool = False
) -> tuple[int, int]:
    """Return how many heads the forward sweeps together, and how many heads come before its last sweep.

    Few heads at a time keep their keys in L2; a sweep has about one tile per worker. The last sweep has at least two
    groups, so that light tiles fill the gaps that heavy ones leave. Where tiles are unequal it has at least
    :data:`COVER` times ``longest`` heads, so that the longest tiles of all heads that are left start first.

    Args:
        longest: see :func:`.work.heads_of_longest`.
        arriving: keys come from other ranks during the kernel, head by head: a long last sweep would wait for the last
            ones, so it has no more than half of the heads.
    """
    group = 2 ** max(0, math.ceil(math.log2(0.95 * workers / n_tiles)))
    groups = n_heads // group
    last = max(2, min(groups // 2 if arriving else groups, math.ceil(COVER * longest / group)))
    return group, max(0, groups - last) * group


class Division(NamedTuple):
    """The division of the last query tiles, whose keys are in parts of equal length for different CTAs.

    Args:
        undivided: number of query tiles, of all heads, that are not divided. They come first.
        parts: of each of the others.
        all_parts: number of parts of all of them.
    """

    undivided: int
    parts: int
    all_parts: int


def divide_last(block: Block, block_m: int, block_n: int, n_heads: int, workers: int, worth: float) -> Division | None:
    """Return how the keys of the last query tiles are divided, those that are fewer than processors; None if that would
    save less than a share ``worth`` of the time, or if query tiles differ, so that light ones come last and fill gaps.

    Not for ordered blocks, and only for those on the CPU: the host does not wait for a GPU."""

    def make() -> Division | None:
        rows, span = block.query_tiles(block_m, block_n)
        key_tiles = ((span[..., 3] - span[..., 0]) // block_n).unique().tolist()
        if len(key_tiles) != 1:
            return None
        return best_division(rows.shape[0] * n_heads, key_tiles[0], workers, worth)

    if block.ordered or block.start.is_cuda or worth >= 1.0:
        return None
    return block.memo.once(("last query tiles", block_m, block_n, n_heads, workers), make)


def best_division(query_tiles: int, key_tiles: int, workers: int, worth: float) -> Division | None:
    """Return the division of so many query tiles that have so many key tiles each, see :func:`divide_last`."""
    turns, last = -(-query_tiles // workers), query_tiles % workers

    def steps(parts: int) -> int:
        """Return the steps of a processor with the last query tiles, the last of which adds up its parts."""
        return -(-last * parts // workers) * (-(-key_tiles // parts) + STEPS_OF_A_PART) + parts

    choices = [n for n in range(2, key_tiles // 2 + 1) if last * n <= MOST_PARTS * workers]
    if last == 0 or not choices:
        return None
    parts = min(choices, key=steps)
    if key_tiles - steps(parts) < worth * turns * key_tiles:
        return None
    return Division(query_tiles - last, parts, last * parts)
