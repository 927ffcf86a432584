"""A kernel that only loads the keys and values that attention to pages would: the measure of bandwidth of bench_decode.

Pages are moved by TMA into a ring of buffers in shared memory, from which nothing is read: a buffer is filled again as
soon as it is full. Shares of the work are those of ringattn's Hopper kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.hopper.primitives import async_load, tiles_like
from ringattn.kernels.hopper.tensor_maps import view
from ringattn.kernels.launch import dispatch, multiprocessors
from ringattn.kernels.paged.hopper_pieces import part_of, share_of
from ringattn.kernels.paged.operands import Pool, Tables, tile_size


class Shape(NamedTuple):
    """How the reader is launched: CTAs of a multiprocessor, and buffers of a CTA for keys and for values."""

    ctas: int
    stages: int


SHAPES = (Shape(1, 3), Shape(1, 6), Shape(2, 2), Shape(2, 3))  # the fastest of them counts


def reader(pool: Pool, tables: Tables, shape: Shape) -> Callable[[], Tensor]:
    """Return a launch that loads all that the step's rows see, from one layer."""
    tile = tile_size(pool.page_size)
    kv_heads, _, dim = pool.k.shape
    batch, new = tables.start.shape
    views = view(pool.k, (1, tile, dim)), view(pool.v, (1, tile, pool.v.shape[-1]))
    done = torch.zeros(1, dtype=torch.int32, device=pool.k.device)

    def launch() -> Tensor:
        dispatch(
            _read, (shape.ctas * multiprocessors(pool.k.device),), *views, tables.table, tables.table.stride(0),
            tables.start, tables.tiles, done, batch, HEADS=kv_heads, NEW=new, PAGE=pool.page_size, TILE=tile,
            STAGES=shape.stages, BATCH_P2=max(128, 1 << (batch - 1).bit_length()), num_warps=4,
        )  # fmt: skip
        return done

    return launch


@gluon.jit(do_not_specialize=("table_b", "batch"))
def _read(
    k_desc, v_desc, table_ptr, table_b, starts_ptr, tiles_ptr, done_ptr, batch,
    HEADS: gl.constexpr, NEW: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    BATCH_P2: gl.constexpr,
):  # fmt: skip
    k_s = tiles_like(k_desc, STAGES)
    v_s = tiles_like(v_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    share, past, _, unit, past_unit, _ = share_of(tiles_ptr, batch, HEADS, BATCH_P2)
    g = 0
    for u in range(unit, past_unit):
        b, _, _, lo, hi = part_of(u, share, past, tiles_ptr, HEADS)
        begin = gl.load(starts_ptr + b * NEW) // TILE
        for tile in range(lo, hi):
            slot = (begin + tile) * TILE
            at = gl.load(table_ptr + b.to(gl.int64) * table_b + slot // PAGE) * PAGE + slot % PAGE
            stage = g % STAGES
            if g >= STAGES:
                mbarrier.wait(full.index(stage), (g // STAGES - 1) & 1)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            async_load(k_desc, [u % HEADS, at, 0], full.index(stage), k_s.index(stage))
            async_load(v_desc, [u % HEADS, at, 0], full.index(stage), v_s.index(stage))
            g += 1
    for last in gl.static_range(STAGES):
        n = g - STAGES + last
        if n >= 0:
            mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
    if g < 0:  # never: a use, so that nothing is left out
        gl.store(done_ptr, g)
