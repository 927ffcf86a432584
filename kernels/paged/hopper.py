"""The paged attention kernel for Hopper (sm_90), in Gluon: bulk copies through a ring of buffers, products swapped.

The division of work, the pieces and their sum are those of :mod:`.attend`. A CTA has a warp that moves tiles of 64 or
128 slots of keys and values by TMA, and four or eight that compute; a multiprocessor has 128 to 192 KB in flight, far
more than its latency times its share of the bandwidth (35 KB)::

    producer    K(i) V(i) K(i+1) V(i+1) ...            page numbers are read ahead of the buffers
    consumer    S^T = K Q^T ; softmax down the columns ; O^T += V^T P^T

* There are few rows of queries: 4 for one token of a group of 4. wgmma has 64 rows at least, but as few as 8 columns.
  So the slots are the rows of the first product, and the columns of values those of the second.
* Sums of the softmax are kept per thread and added up once per piece; only the maximum crosses warps for each tile.
* A tile of values with slots that no row sees, of which any may be NaN, is cleared there in shared memory.
* Which CTAs, warps and tiles: :func:`_shape`.
* It begins while the new tokens are still being stored (programmatic dependent launch): tables and older tiles are
  read, then it waits for that launch before it reads the queries and the tiles that the new tokens are in.

Pages of e4m3 are moved as they are, and are widened to 16 bits in registers, the first operands of both products:
:mod:`.hopper_e4m3`.

Only the long sums of :data:`LONGEST_SUM` keys and more, fixed splits, ALiBi and other head dims are left to
:mod:`.attend`. Contract: operands.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..contract import Score
from ..hopper.primitives import async_load, let_next_launch_begin, reinterpret, tiles_like, wait_for_launch_before
from ..hopper.tensor_maps import view
from ..launch import Launches, dispatch, multiprocessors, on_device
from . import hopper_e4m3 as e4m3
from .combine import ALONE, combine
from .grid import Grid, scratch
from .hopper_pieces import (
    barrier,
    capped,
    declined,
    finite,
    intervals,
    part_of,
    query_rows,
    scale_and_cap,
    share_of,
    sum_layout,
    sum_pieces,
)
from .operands import Call, Pool, Tables
from .pieces import store_result

TILE = gl.constexpr(64)

_launches = Launches()

# ---------------------------------------------------------------- device: producer


@gluon.jit
def _producer(
    args, HEADS: gl.constexpr, BLOCKS: gl.constexpr, NEW: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr
):
    """Move the tiles of this CTA's share, in the order of the list."""
    (
        k_desc, v_desc, k_s, v_s, scales_t, k_full, v_full, k_free, v_free, table_ptr, table_b, starts_ptr,
        firsts_new_ptr, tiles_ptr, work,
    ) = args  # fmt: skip
    QUANTIZED: gl.constexpr = len(scales_t) > 0
    OF_SCALES: gl.constexpr = scales_t[0].block_type.nbytes if QUANTIZED else 0
    SLOTS: gl.constexpr = k_desc.block_type.shape[1]
    WIDE: gl.constexpr = SLOTS // TILE
    share, past, _, unit, past_unit, _ = work
    g = 0
    for u in range(unit, past_unit):
        b, _, _, lo, hi = part_of(u, share, past, tiles_ptr, HEADS)
        head = u % HEADS // BLOCKS
        begin = gl.load(starts_ptr + b * NEW) // TILE
        first_new = gl.load(firsts_new_ptr + b)
        pages = table_ptr + b.to(gl.int64) * table_b
        for i in range((begin + lo) // WIDE, (begin + hi + WIDE - 1) // WIDE):
            slot = i * SLOTS
            if slot + SLOTS > first_new:
                wait_for_launch_before()  # it stores the new tokens
            at = gl.load(pages + slot // PAGE) * PAGE + slot % PAGE
            stage = g % STAGES
            phase = (g // STAGES) & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes + OF_SCALES)
            async_load(k_desc, [head, at, 0], k_full.index(stage), k_s.index(stage))
            if QUANTIZED:
                async_load(scales_t[0], [head, at], k_full.index(stage), scales_t[2].index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes + OF_SCALES)
            async_load(v_desc, [head, at, 0], v_full.index(stage), v_s.index(stage))
            if QUANTIZED:
                async_load(scales_t[1], [head, at], v_full.index(stage), scales_t[3].index(stage))
            g += 1


# ---------------------------------------------------------------- device: consumer


@gluon.jit
def _rows(tiles, i):
    """Return tile i of (tiles, 1, rows, D) in shared memory as a matrix (rows, D)."""
    return tiles.index(i).reshape([tiles.shape[2], tiles.shape[3]])


@gluon.jit
def _clear_unseen(tile, first, past):
    """Set the rows of a tile of values in shared memory to zero, but ``[first, past)``."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    x = tile.load(L)
    nth = gl.arange(0, tile.shape[0], gl.SliceLayout(1, L))
    tile.store(gl.where(((nth >= first) & (nth < past))[:, None], x, 0.0))
    fence_async_shared()


@gluon.jit
def _tile(
    m, l, o, slot, g, q_s, p_s, k_s, v_s, scales_s, k_full, v_full, k_free, v_free, first, past, full_first,
    full_past, s0, s1, bits, first_new, scale, inner, TREE: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the tile of slots from ``slot`` on to m, l (SLOTS, ROWS) and o (DV, ROWS)."""
    S_L: gl.constexpr = l.type.layout
    SLOT: gl.constexpr = gl.SliceLayout(1, S_L)
    QUANTIZED: gl.constexpr = len(scales_s) > 0
    SLOTS: gl.constexpr = l.shape[0]
    ROWS: gl.constexpr = l.shape[1]
    stage = g % STAGES
    phase = (g // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = gl.zeros([SLOTS, ROWS], gl.float32, S_L)
    if QUANTIZED:
        keys = e4m3.keys(_rows(k_s, stage), S_L, q_s.dtype)
        k_scale = scales_s[0].index(stage).load(SLOT)
        mbarrier.arrive(k_free.index(stage), count=1)
        s = warpgroup_mma(keys, q_s.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)  # values are widened while the product runs
        values = e4m3.values(_rows(v_s, stage), S_L)
        v_scale = scales_s[1].index(stage).load(SLOT)
        mbarrier.arrive(v_free.index(stage), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        e4m3.keep_alive(keys)
        s = s * k_scale[:, None]
    else:
        s = warpgroup_mma(_rows(k_s, stage), q_s.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(stage), count=1)
    if SOFTCAP:
        s = capped(s, inner)
    if (slot < full_first) | (slot + SLOTS > full_past):
        at = slot + gl.arange(0, SLOTS, SLOT)
        seen = (at[:, None] >= s0[None, :]) & (at[:, None] < s1[None, :])
        if TREE:
            bit = at - first_new
            branch = (bits[None, :] >> gl.minimum(gl.maximum(bit, 0), 63).to(gl.int64)[:, None]) & 1
            seen = seen & ((bit < 0)[:, None] | (branch > 0))
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, axis=0) * scale)
    reference = finite(top)
    p = gl.exp2(s * scale - reference[None, :])
    kept = gl.exp2(m - reference)
    l = l * kept[None, :] + p
    if QUANTIZED:
        at = slot + gl.arange(0, SLOTS, SLOT)
        p = p * gl.where((at >= first) & (at < past), v_scale, 0.0)[:, None]  # others may be NaN
    p_s.permute((1, 0)).store(p.to(p_s.dtype))
    fence_async_shared()
    o = o * gl.convert_layout(kept, gl.SliceLayout(0, o.type.layout))[None, :]
    if QUANTIZED:
        o = warpgroup_mma(values, p_s.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        e4m3.keep_alive(values)
    else:
        mbarrier.wait(v_full.index(stage), phase)
        values = _rows(v_s, stage)
        if (slot < first) | (slot + SLOTS > past):
            _clear_unseen(values, first - slot, past - slot)
        o = warpgroup_mma(values.permute((1, 0)), p_s.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(stage), count=1)
    return top, l, o


@gluon.jit
def _consumer(
    args, NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr,
    SOME: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, AT_ONCE: gl.constexpr, TREE: gl.constexpr,
    SOFTCAP: gl.constexpr, FINAL: gl.constexpr, STAGES: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, arrived_ptr,
        out_ptr, lse_ptr, sink_ptr, q_s, p_s, k_s, v_s, scales_s, k_full, v_full, k_free, v_free, batch,
        scale, inner, work,
    ) = args  # fmt: skip
    QUANTIZED: gl.constexpr = len(scales_s) > 0
    share, past_share, per, unit, past_unit, empty = work
    HEADS: gl.constexpr = KV_HEADS * BLOCKS
    Q_HEADS: gl.constexpr = KV_HEADS * GROUP
    SLOTS: gl.constexpr = k_s.shape[2]
    WIDE: gl.constexpr = SLOTS // TILE
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, ROWS, 16]
    )
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    SUM_O: gl.constexpr = gl.SliceLayout(0, sum_layout(AT_ONCE, SOME, DV, gl.num_warps()))
    SUM_L: gl.constexpr = gl.SliceLayout(1, SUM_O)
    SUM_COLS: gl.constexpr = gl.SliceLayout(0, SUM_O)
    programs = gl.num_programs(0)
    wait_for_launch_before()
    if not (ALONE and FINAL):
        let_next_launch_begin()  # it adds the pieces, or the states of all ranks
    if ALONE:  # noqa: SIM102  (an `and` would compile it where it is not used)
        if empty > 0:
            for u in range(gl.program_id(0), batch * HEADS, programs):
                b = u // HEADS
                if gl.load(tiles_ptr + b + 1) == gl.load(tiles_ptr + b):
                    new, nth, some = query_rows(u % BLOCKS * (ROWS // SOME), NEW, GROUP, SOME, SUM_L)
                    none = gl.full([SOME], float("-inf"), gl.float32, SUM_L)
                    zeros = gl.zeros([SOME, DV], gl.float32, SUM_O)
                    store_result(
                        none, gl.zeros([SOME], gl.float32, SUM_L), zeros, out_ptr, lse_ptr, sink_ptr, b, new,
                        u % HEADS // BLOCKS * GROUP + nth, some, Q_HEADS, NEW, DV, gl.arange(0, DV, SUM_COLS), False,
                    )  # fmt: skip
    g = 0
    for u in range(unit, past_unit):
        b, base, count, lo, hi = part_of(u, share, past_share, tiles_ptr, HEADS)
        if lo < hi:
            h = u % HEADS // BLOCKS
            block = u % BLOCKS
            first = gl.load(starts_ptr + b * NEW)
            past = gl.load(ends_ptr + b * NEW + NEW - 1)
            first_new = gl.load(firsts_new_ptr + b)
            begin = first // TILE
            # Queries.
            new, nth, alive = query_rows(block, NEW, GROUP, ROWS, gl.SliceLayout(1, Q_L))
            cols = gl.arange(0, D, gl.SliceLayout(0, Q_L))
            if QUANTIZED:
                cols = e4m3.placed(cols, e4m3.key_order(D))
            at = q_ptr + b.to(gl.int64) * q_b + new.to(gl.int64) * q_n + (h * GROUP + nth).to(gl.int64) * q_h
            q_s.store(gl.load(at[:, None] + cols[None, :], mask=alive[:, None], other=0.0))
            fence_async_shared()
            # Intervals of the rows.
            new, nth, alive = query_rows(block, NEW, GROUP, ROWS, COLUMN)
            bits, s0, s1, full_first, full_past = intervals(
                starts_ptr, ends_ptr, tree_ptr, b, new, alive, first_new, NEW, ROWS, TREE, COLUMN
            )
            if WIDE > 1:  # a share may begin and end in the middle of a tile
                low = (begin + lo) * TILE
                high = (begin + hi) * TILE
                s0 = gl.maximum(s0, low)
                s1 = gl.minimum(s1, high)
                full_first = gl.maximum(full_first, low)
                full_past = gl.minimum(full_past, high)
            m = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
            l = gl.zeros([SLOTS, ROWS], gl.float32, S_L)
            o = gl.zeros([DV, ROWS], gl.float32, S_L)
            for i in range((begin + lo) // WIDE, (begin + hi + WIDE - 1) // WIDE):
                m, l, o = _tile(
                    m, l, o, i * SLOTS, g, q_s, p_s, k_s, v_s, scales_s, k_full, v_full, k_free, v_free,
                    first, past, full_first, full_past, s0, s1, bits, first_new, scale, inner, TREE, SOFTCAP, STAGES,
                )  # fmt: skip
                g += 1
            # The piece.
            slot = (gl.program_id(0) + u).to(gl.int64) * ROWS
            d = gl.arange(0, DV, gl.SliceLayout(1, S_L))
            if QUANTIZED:
                d = e4m3.placed(d, e4m3.value_order(DV, gl.num_warps()))
            at = pieces_ptr + (slot + gl.arange(0, ROWS, COLUMN)) * (DV + 2)
            gl.store(at[None, :] + d[:, None], o, mask=alive[None, :])
            gl.store(at + DV, m, mask=alive)
            gl.store(at + DV + 1, gl.sum(l, axis=0), mask=alive)
            if ALONE:
                barrier()
                number = gl.atomic_add(arrived_ptr + u, 1, sem="acq_rel", scope="gpu")
                expected = (base + count - 1) // per - base // per + 1
                if number == expected - 1:
                    gl.store(arrived_ptr + u, 0)
                    token, of_group, some = query_rows(block * (ROWS // SOME), NEW, GROUP, SOME, SUM_L)
                    m_sum, l_sum, o_sum = sum_pieces(
                        pieces_ptr, base // per + u, expected, some, ROWS, SOME, DV, AT_ONCE
                    )
                    store_result(
                        m_sum, l_sum, o_sum, out_ptr, lse_ptr, sink_ptr, b, token, h * GROUP + of_group, some, Q_HEADS,
                        NEW, DV, gl.arange(0, DV, SUM_COLS), False,
                    )  # fmt: skip


# ---------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=("q_b", "q_n", "q_h", "table_b", "batch"))
def _attend(
    q_ptr, q_b, q_n, q_h, k_desc, v_desc, k_scale_desc, v_scale_desc, table_ptr, table_b, starts_ptr, ends_ptr,
    firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, arrived_ptr, out_ptr, lse_ptr, sink_ptr, batch, scale, inner,
    NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr,
    SOME: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr, BATCH_P2: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, ALONE: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = KV_HEADS * BLOCKS
    TREE: gl.constexpr = tree_ptr is not None
    FINAL: gl.constexpr = lse_ptr is not None
    SOFTCAP: gl.constexpr = inner is not None
    k_s = tiles_like(k_desc, STAGES)
    v_s = tiles_like(v_desc, STAGES)
    SLOTS: gl.constexpr = k_desc.block_type.shape[1]
    scales_t = ()
    scales_s = ()
    if k_scale_desc is not None:
        k_scale_t = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SLOTS], k_scale_desc.layout)
        v_scale_t = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SLOTS], v_scale_desc.layout)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales_t = (k_scale_desc, v_scale_desc, k_scale_t, v_scale_t)  # type: ignore[assignment]
        scales_s = (  # type: ignore[assignment]
            reinterpret(k_scale_t, gl.float32, [STAGES, SLOTS], FLAT),
            reinterpret(v_scale_t, gl.float32, [STAGES, SLOTS], FLAT),
        )
    # Scales of values are factors of p: their range is bfloat16's.
    Q_DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    P_DTYPE: gl.constexpr = Q_DTYPE if k_scale_desc is None else gl.bfloat16
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], Q_DTYPE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLOTS], P_DTYPE)
    q_s = gl.allocate_shared_memory(Q_DTYPE, [ROWS, D], Q_SHARED)
    p_s = gl.allocate_shared_memory(P_DTYPE, [ROWS, SLOTS], P_SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=1)
    work = share_of(tiles_ptr, batch, HEADS, BATCH_P2, STEP)
    consumer = (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, arrived_ptr,
        out_ptr, lse_ptr, sink_ptr, q_s, p_s, k_s, v_s, scales_s, k_full, v_full, k_free, v_free, batch,
        scale, inner, work,
    )  # fmt: skip
    producer = (
        k_desc, v_desc, k_s, v_s, scales_t, k_full, v_full, k_free, v_free, table_ptr, table_b, starts_ptr,
        firsts_new_ptr, tiles_ptr, work,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (consumer, NEW, GROUP, KV_HEADS, ROWS, BLOCKS, SOME, D, DV, AT_ONCE, TREE, SOFTCAP, FINAL,
                         STAGES, ALONE)),
            (_producer, (producer, HEADS, BLOCKS, NEW, PAGE, STAGES)),
        ],
        [1],
        [32],
    )  # fmt: skip


# ---------------------------------------------------------------- host


def unsupported(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is neither bfloat16 nor float16"
    if (q.shape[-1], pool.v.shape[-1]) not in ((64, 64), (128, 128)):
        return f"head dims {q.shape[-1]} of q, k and {pool.v.shape[-1]} of v; it has (64, 64) and (128, 128)"
    return declined(q, pool, tables, score, call, TILE.value)


def launch(
    q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, result: tuple[Tensor, Tensor | None]
) -> None:
    """Attend to this rank's visible keys, see :func:`.attend.launch`."""
    batch, new, q_heads, dim = q.shape
    if 0 in q.shape:
        return
    q = q if q.stride(-1) == 1 else q.contiguous()
    kv_heads, dim_v = pool.k.shape[0], pool.v.shape[-1]
    key = (
        q.device, q.dtype, q.shape, q.stride(), pool.k.shape, pool.k.stride(), pool.v.stride(), pool.page_size,
        tables.table.stride(0), score.softmax_scale, score.softcap, result[1] is None, call.tree is None,
        None if score.sink is None else score.sink.dtype, pool.quantized,
    )  # fmt: skip

    def divide() -> tuple[int, int, Grid, tuple[Tensor, Tensor]]:
        ctas, wide = _shape(new * q_heads // kv_heads, batch * kv_heads, pool, tables.table.shape[1] * pool.page_size)
        grid = Grid.of(q, pool, tables, call, ctas * multiprocessors(q.device), least_rows=8, step=wide)
        return ctas, wide, grid, scratch(tables, grid, batch * kv_heads * grid.blocks, dim_v)

    ctas, wide, grid, (pieces, arrived) = tables.memo.once(key, divide)
    tensors = (
        q, pool.k, pool.v, tables.table, tables.start, tables.end, tables.first_new, tables.tiles, pieces, arrived,
        *result, call.tree, score.sink, pool.k_scale, pool.v_scale,
    )  # fmt: skip
    group, tile = q_heads // kv_heads, TILE.value * wide
    some = grid.some(new * group)
    at_once = min(64, 64 * 128 * wide // (some * dim_v))  # pieces that are added: 64 numbers of o for each thread
    with on_device(q):
        _launches.repeat(key, tensors, lambda: dispatch(
            _attend, (grid.programs,), q, *q.stride()[:3], view(pool.k, (1, tile, dim)), view(pool.v, (1, tile, dim_v)),
            *(None if x is None else view(x, (1, tile)) for x in (pool.k_scale, pool.v_scale)),
            tables.table, tables.table.stride(0), tables.start, tables.end, tables.first_new, tables.tiles, call.tree,
            pieces, arrived, *result, score.sink, batch, *scale_and_cap(score),
            NEW=new, GROUP=group, KV_HEADS=kv_heads, ROWS=grid.rows, BLOCKS=grid.blocks, SOME=some, D=dim, DV=dim_v,
            PAGE=pool.page_size, BATCH_P2=grid.batch_p2(batch), AT_ONCE=at_once,
            ALONE=some <= ALONE, STEP=grid.step, STAGES=_stages(pool, grid.rows, ctas, tile),
            num_warps=4 * wide, maxnreg=_registers(ctas, wide), launch_pdl=True,
        ))  # fmt: skip
        if some > ALONE:
            combine(q, pieces, pool, tables, score, call, grid, result)


def _shape(rows: int, units: int, pool: Pool, keys: int) -> tuple[int, int]:
    """Return the CTAs of a multiprocessor, and the boxes of 64 slots of a tile, for a number of query rows and of
    (row, key head) pairs, and for the most keys that a pair can have.

    A tile of two boxes takes two warpgroups: each has half of the accumulators, and what a tile costs besides its
    products counts half. Half as many CTAs leave half as many pieces. With many short sequences, two CTAs hide the
    beginning and end of each other's; with e4m3, which takes longer to compute on and less to read, each other's
    products, and three CTAs do so better, from some thousand keys for each on."""
    small = rows <= 8 and max(pool.k.shape[-1], pool.v.shape[-1]) <= 128  # 80 registers are enough
    if pool.quantized and small and units * keys >= 3 * 1024 * multiprocessors(pool.k.device):
        return 3, 1
    if pool.page_size % (2 * TILE.value) == 0 and (rows > 32 or (units <= 16 and not pool.quantized)):
        return 1, 2
    return (2, 1) if rows <= 32 else (1, 1)


def _stages(pool: Pool, rows: int, ctas: int, slots: int) -> int:
    """Return the buffers of tiles of keys and of values that fit in a CTA's share of the shared memory, 226 KB."""
    dim, dim_v = pool.k.shape[-1], pool.v.shape[-1]
    room = 226 * 1024 // ctas - 1024 - 2 * rows * (dim + slots)
    token = (dim + dim_v) * pool.k.element_size() + (8 if pool.quantized else 0)
    return min(8 if pool.quantized else 6, room // (slots * token))


def _registers(ctas: int, wide: int) -> int:
    """Return the registers of a thread: of ``wide`` warpgroups that compute and one that moves tiles."""
    return min(248, 65536 // (ctas * 128 * (wide + 1)) // 8 * 8)
