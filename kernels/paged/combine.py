"""Adds the pieces of every (row, key head) in a launch of its own, for calls with many rows of queries.

With few rows the last program of a (row, key head) adds its pieces (:mod:`.attend`). With many that would be the work
of one multiprocessor, up to a megabyte per key head, while the others wait. Contract: operands.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..contract import Score
from ..launch import Launches, capability, dispatch
from ..triton.launch_parameters import padded
from .grid import Grid
from .operands import Call, Pool, Tables, tile_size
from .pieces import query_rows, store_result, sum_pieces

ALONE = 4  # rows up to which the attending kernel adds its pieces itself
_COLUMNS = 128  # of a program, at most: those of a row of 512 go to four programs
_AT_ONCE, _MANY = 16, 32  # pieces that a program reads at once, where a few and where many lie side by side
_NUMBERS = 8192  # of these, at most

_launches = Launches()


def combine(
    q: Tensor, pieces: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, grid: Grid,
    result: tuple[Tensor, Tensor | None],
) -> None:  # fmt: skip
    """Add the pieces that a launch with this grid has left, and store out and lse, or the state."""
    batch, new, q_heads, _ = q.shape
    kv_heads, dim_v, tile = pool.k.shape[0], pool.v.shape[-1], tile_size(pool.page_size)
    group, wide = q_heads // kv_heads, padded(dim_v)
    columns = min(wide, _COLUMNS)
    sink = score.sink
    key = (q.device, q.shape, kv_heads, dim_v, tile, grid, call.fixed_split, result[0].dtype, result[1] is None,
           sink is None or sink.dtype)  # fmt: skip
    units = batch * kv_heads * grid.blocks
    early = capability(q.device) >= (9, 0)
    some = 4 if columns == wide else 1
    many = not call.fixed_split and grid.programs >= 2 * _AT_ONCE * units
    at_once = min(_MANY if many else _AT_ONCE, _NUMBERS // (some * columns))
    _launches.repeat(key, (pieces, tables.start, tables.tiles, *result, sink), lambda: dispatch(
        _combine, (units, triton.cdiv(grid.some(new * group), some), wide // columns), pieces, tables.start,
        tables.tiles, *result, sink, batch, grid.programs,
        NEW=new, GROUP=group, KV_HEADS=kv_heads, ROWS=grid.rows, BLOCKS=grid.blocks, SOME=some, DIM_V=dim_v,
        COLUMNS=columns, AT_ONCE=at_once, TILE=tile,
        SPLIT=call.fixed_split // tile, SPLITS=grid.splits, STEP=grid.step, EARLY=early, num_warps=4, launch_pdl=early,
    ))  # fmt: skip


@triton.jit(do_not_specialize=("batch", "programs"))
def _combine(
    pieces, starts, tiles, out, lse, sink, batch, programs,
    NEW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    SOME: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # the next layer's store or attention: both wait for this one before they write
    HEADS: tl.constexpr = KV_HEADS * BLOCKS
    u, part = tl.program_id(0), tl.program_id(1)
    b, h = u // HEADS, u % HEADS
    t = tl.load(tiles + b)
    tile_count = tl.load(tiles + b + 1) - t
    if SPLIT > 0:
        begin = tl.load(starts + b * NEW) // TILE
        first = u * SPLITS + begin // SPLIT
        count = tl.where(tile_count > 0, (begin + tile_count - 1) // SPLIT - begin // SPLIT + 1, 0)
    else:
        per = tl.maximum(tl.cdiv(tl.load(tiles + batch) * HEADS, programs * STEP), 1) * STEP
        base = t * HEADS + h * tile_count
        first = base // per + u
        count = tl.where(tile_count > 0, (base + tile_count - 1) // per - base // per + 1, 0)
    new, g, alive = query_rows(h % BLOCKS * (ROWS // SOME) + part, NEW, GROUP, SOME)
    col = tl.program_id(2) * COLUMNS
    m, l, o = sum_pieces(pieces, first, count, part * SOME, alive, ROWS, SOME, DIM_V, COLUMNS, AT_ONCE, col)
    cols, head = col + tl.arange(0, COLUMNS), h // BLOCKS * GROUP + g
    store_result(m, l, o, out, lse, sink, b, new, head, alive, KV_HEADS * GROUP, NEW, DIM_V, cols)
