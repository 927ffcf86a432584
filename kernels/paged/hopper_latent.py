"""Attention to pages of latent vectors for sm_90, in Gluon: head dims 576 and 512, values the first columns of keys.

One key head serves up to 128 query heads (DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1: decoding with
the projections absorbed), which is 242 operations a byte: the products limit it, not memory. So a CTA has 64 rows of
queries, all 512 columns of their output in registers, and two tiles of 64 slots in shared memory, which are both keys
and values::

    shared memory  Q 64 x 576 (72 KB); 2 x latent 64 x 512: columns 0 to 127, 128 to 255, 256 to 511; 2 x rope 64 x 64
    warpgroup 0    S(i) | softmax(i)                | O(i) of columns 0 to 127  | S(i+1) | softmax(i+1)
    warpgroup 1         | O(i-1) of 128 to 511      |                           |        | O(i) of 128 to 511
    tensor cores   1152 | 768 of warpgroup 1        | 256                       | 1152   | 768      (cycles)
    moved by TMA   each part of tile i+1 as soon as the product that reads it for tile i-1 has ended

* Warpgroup 0 leads: it has all scores and the softmax, and the fewer columns of the output. The other one multiplies
  during the softmax: P(i) is handed over when S(i+1) has been computed, so that the larger product begins after the
  scores, for which the next softmax waits. (DeepSeek's FlashMLA has tiles of 64 slots and moves parts of them, too:
  github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md. Its warpgroups both have scores and take
  turns.)
* P, 64 x 64, takes the place of the rope columns, which only the scores need; ``kept``, 64 factors, goes with it.
* Four of nine blocks of queries are in registers of warpgroup 0: their products read half as much shared memory.
* A tile is prefetched into the L2 cache, two tiles before it is moved, if its slots lie one after another. CTAs with
  other rows of the same keys run at the same time, ``program_id(1)`` is the tile of rows: they take turns to prefetch.
* The point of reference of the softmax moves when a score is more than ``SLACK`` above it, see hopper/forward.py.
* The division of work, the early beginning before new tokens are stored, and the masks are those of :mod:`.hopper`;
  the pieces are added by :mod:`.combine`.

ALiBi, fixed splits, e4m3, long sums and other head dims are left to :mod:`.attend`. Contract: operands.py.
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
from ..hopper.primitives import (
    FREE_BARRIERS,
    async_load,
    barrier_arrive,
    barrier_sync,
    let_next_launch_begin,
    prefetch_bulk,
    reinterpret,
    scale_rows,
    tiles_like,
    wait_for_launch_before,
)
from ..hopper.tensor_maps import view
from ..launch import Launches, dispatch, multiprocessors, on_device
from .combine import combine
from .grid import Grid, scratch
from .hopper_pieces import barrier, capped, declined, finite, intervals, part_of, query_rows, scale_and_cap, share_of
from .operands import Call, Pool, Tables

DIM, DIM_V = 576, 512
BOX = gl.constexpr(64)  # slots of a tile, and slots and columns that one copy moves: 8 KB
ROWS = gl.constexpr(64)  # of queries of a CTA
STAGES = gl.constexpr(2)  # tiles in shared memory
FIRST = gl.constexpr(128)  # columns of the output of the first consumer; the second has as many, and HALF
HALF = gl.constexpr(256)
PAIRS = gl.constexpr(5)  # barriers of a tile: one for 128 columns, the last for the 64 of rope
KEPT = gl.constexpr(4)  # blocks of 64 columns of queries in registers
AHEAD = 2  # tiles between the one that is moved and the one that is prefetched
READY = gl.constexpr(FREE_BARRIERS)  # and the id after it: P of each stage is stored
THREADS = gl.constexpr(256)  # of both consumers
SLACK = gl.constexpr(8.0)  # the most that a score may exceed its point of reference, to the base 2

_launches = Launches()

# ---------------------------------------------------------------- device: producer


@gluon.jit
def _producer(args, KV_HEADS: gl.constexpr, NEW: gl.constexpr, PAGE: gl.constexpr, AHEAD: gl.constexpr):
    """Move the tiles of this CTA's share. ``free``, for each stage: columns 0 to 127, 128 to 255, 256 to 511, and
    rope."""
    k_desc, k_ptr, k_h, parts, full, free, table_ptr, table_b, starts_ptr, firsts_new_ptr, tiles_ptr, work = args
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    first, second, third, rope = parts
    share, past, _, unit, past_unit, _ = work
    g = 0
    for u in range(unit, past_unit):
        b, _, _, lo, hi = part_of(u, share, past, tiles_ptr, KV_HEADS)
        head = u % KV_HEADS
        begin = gl.load(starts_ptr + b * NEW) // BOX
        first_new = gl.load(firsts_new_ptr + b)
        pages = table_ptr + b.to(gl.int64) * table_b
        for i in range(lo, hi):
            slot = (begin + i) * BOX
            if slot + BOX > first_new:
                wait_for_launch_before()  # it stores the new tokens
            at = gl.load(pages + slot // PAGE) * PAGE + slot % PAGE
            if AHEAD > 0:
                later = slot + AHEAD * BOX
                mine = (gl.num_programs(1) == 1) | ((i & 1) == (gl.program_id(1) & 1))
                if mine & (i + AHEAD < hi) & (later + BOX <= first_new):
                    later_at = gl.load(pages + later // PAGE) * PAGE + later % PAGE
                    prefetch_bulk(k_ptr + head.to(gl.int64) * k_h + later_at.to(gl.int64) * (9 * BOX), 9 * BYTES)
            stage = g % STAGES
            phase = ((g // STAGES) & 1) ^ 1
            for nth in gl.static_range(9):
                if nth == 0:
                    mbarrier.wait(free.index(stage), phase)
                elif nth == 2:
                    mbarrier.wait(free.index(STAGES + stage), phase)
                elif nth == 4:
                    mbarrier.wait(free.index(2 * STAGES + stage), phase)
                elif nth == 8:
                    mbarrier.wait(free.index(3 * STAGES + stage), phase)
                if nth % 2 == 0:
                    mbarrier.expect(full.index(stage * PAIRS + nth // 2), BYTES if nth == 8 else 2 * BYTES)
                if nth < 2:
                    target = first.index(stage * 2 + nth)
                elif nth < 4:
                    target = second.index(stage * 2 + nth - 2)
                elif nth < 8:
                    target = third.index(stage * 4 + nth - 4)
                else:
                    target = rope.index(stage)
                async_load(k_desc, [head, at, nth * BOX], full.index(stage * PAIRS + nth // 2), target)
            g += 1


# ---------------------------------------------------------------- device: consumers


@gluon.jit
def _matrix(boxes):
    """Return boxes as matrices of 64 slots and 64 columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(boxes, boxes.dtype, [boxes.shape[0], BOX, BOX], LAYOUT)


@gluon.jit
def _values(boxes, COLUMNS: gl.constexpr):
    """Return boxes of neighbouring columns as (STAGES, 64, COLUMNS)."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(boxes, boxes.dtype, [STAGES, BOX, COLUMNS], LAYOUT)


@gluon.jit
def _keys(parts, stage, nth: gl.constexpr):
    """Return the ``nth`` 64 columns of a tile, (64, 64)."""
    first, second, third, rope = parts
    if nth < 2:
        keys = _matrix(first).index(stage * 2 + nth)
    elif nth < 4:
        keys = _matrix(second).index(stage * 2 + nth - 2)
    elif nth < 8:
        keys = _matrix(third).index(stage * 4 + nth - 4)
    else:
        keys = _matrix(rope).index(stage)
    return keys


@gluon.jit
def _clear_unseen(parts, full, stage, phase, first, past):
    """Wait for a tile, and set its values to zero but for slots ``[first, past)`` of it: they may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    nth = gl.arange(0, BOX, gl.SliceLayout(1, L))
    seen = ((nth >= first) & (nth < past))[:, None]
    for pair in gl.static_range(PAIRS - 1):
        mbarrier.wait(full.index(stage * PAIRS + pair), phase)
    for block in gl.static_range(8):
        x = _keys(parts, stage, block)
        x.store(gl.where(seen, x.load(L), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _scores(q_s, q_regs, parts, full, stage, phase, S_L: gl.constexpr):
    """Return the products of 64 rows of queries and a tile of keys, (ROWS, BOX)."""
    s = gl.zeros([ROWS, BOX], gl.float32, S_L)
    for nth in gl.static_range(9):
        if nth % 2 == 0:
            mbarrier.wait(full.index(stage * PAIRS + nth // 2), phase)
        keys = _keys(parts, stage, nth).permute((1, 0))
        if nth < len(q_regs):
            s = warpgroup_mma(q_regs[nth], keys, s, use_acc=nth > 0, is_async=True)
        else:
            s = warpgroup_mma(q_s.index(nth), keys, s, use_acc=nth > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _first_consumer(
    args, NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, TREE: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Compute the scores and P, and FIRST columns of the output."""
    (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, q_s, kept_s, parts,
        full, free, scale, inner, work,
    ) = args  # fmt: skip
    share, past_share, _, unit, past_unit, _ = work
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    p_s = _matrix(parts[3])
    values = _values(parts[0], FIRST)
    block = gl.program_id(1)
    wait_for_launch_before()
    let_next_launch_begin()  # it adds the pieces
    g = 0
    for u in range(unit, past_unit):
        b, _, _, lo, hi = part_of(u, share, past_share, tiles_ptr, KV_HEADS)
        if lo < hi:
            h = u % KV_HEADS
            first_new = gl.load(firsts_new_ptr + b)
            begin = gl.load(starts_ptr + b * NEW) // BOX
            low = gl.load(starts_ptr + b * NEW)
            high = gl.load(ends_ptr + b * NEW + NEW - 1)
            # Queries.
            new, nth, alive = query_rows(block, NEW, GROUP, ROWS, gl.SliceLayout(1, Q_L))
            cols = gl.arange(0, BOX, gl.SliceLayout(0, Q_L))
            at = q_ptr + b.to(gl.int64) * q_b + new.to(gl.int64) * q_n + (h * GROUP + nth).to(gl.int64) * q_h
            q = ()
            for i in gl.static_range(9):
                x = gl.load(at[:, None] + (i * BOX + cols)[None, :], mask=alive[:, None], other=0.0)
                q = q + (x,)  # type: ignore[assignment]  # noqa: RUF005
            for i in gl.static_range(9):
                q_s.index(i).store(q[i])
            fence_async_shared()
            barrier()
            Q_REG: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
            q_regs = ()
            for i in gl.static_range(KEPT):
                q_regs = q_regs + (q_s.index(i).load(Q_REG),)  # type: ignore[assignment]  # noqa: RUF005
            # Intervals of the rows.
            new, nth, alive = query_rows(block, NEW, GROUP, ROWS, ROW)
            bits, s0, s1, full_first, full_past = intervals(
                starts_ptr, ends_ptr, tree_ptr, b, new, alive, first_new, NEW, ROWS, TREE, ROW
            )
            m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            l = gl.zeros([ROWS], gl.float32, ROW)
            o = gl.zeros([ROWS, FIRST], gl.float32, O_L)
            for i in range(lo, hi):
                slot = (begin + i) * BOX
                stage = g % STAGES
                phase = (g // STAGES) & 1
                if (slot < low) | (slot + BOX > high):
                    _clear_unseen(parts, full, stage, phase, low - slot, high - slot)
                s = _scores(q_s, q_regs, parts, full, stage, phase, S_L)
                if i > lo:
                    barrier_arrive(
                        READY + (stage ^ 1), THREADS
                    )  # P of the tile before: its product runs next to the softmax
                if SOFTCAP:
                    s = capped(s, inner)
                if (slot < full_first) | (slot + BOX > full_past):
                    place = slot + gl.arange(0, BOX, gl.SliceLayout(0, S_L))
                    seen = (place[None, :] >= s0[:, None]) & (place[None, :] < s1[:, None])
                    if TREE:
                        bit = place - first_new
                        branch = (bits[:, None] >> gl.minimum(gl.maximum(bit, 0), 63).to(gl.int64)[None, :]) & 1
                        seen = seen & ((bit < 0)[None, :] | (branch > 0))
                    s = gl.where(seen, s, float("-inf"))
                largest = gl.max(s, axis=1) * scale
                m_new = gl.where(largest > m + SLACK, largest, m)
                reference = finite(m_new)
                p = gl.exp2(s * scale - reference[:, None])
                kept = gl.exp2(m - reference)
                m = m_new
                kept_s.index(stage).store(kept)
                barrier()  # all warps are done with rope
                p_s.index(stage).store(p.to(p_s.dtype))
                fence_async_shared()
                barrier()
                o = scale_rows(o, kept)
                o = warpgroup_mma(p_s.index(stage), values.index(stage), o, is_async=True)
                l = l * kept + gl.sum(p, axis=1)
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(free.index(stage), count=1)
                mbarrier.arrive(free.index(3 * STAGES + stage), count=1)
                g += 1
            barrier_arrive(READY + ((g + 1) & 1), THREADS)  # the last P
            # The piece.
            r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O_L))
            exists = r < NEW * GROUP
            cols = gl.arange(0, FIRST, gl.SliceLayout(0, O_L))
            piece = (gl.program_id(0) + u).to(gl.int64) * (BLOCKS * ROWS)
            at = pieces_ptr + (piece + r) * (2 * HALF + 2)
            gl.store(at[:, None] + cols[None, :], o, mask=exists[:, None])
            at = pieces_ptr + (piece + block * ROWS + gl.arange(0, ROWS, ROW)) * (2 * HALF + 2) + 2 * HALF
            gl.store(at, m, mask=alive)
            gl.store(at + 1, l, mask=alive)


@gluon.jit
def _second_consumer(args, NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr):
    """Compute the other columns of the output: FIRST and HALF of them."""
    tiles_ptr, pieces_ptr, kept_s, parts, full, free, work = args
    share, past_share, _, unit, past_unit, _ = work
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    U_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    p_s = _matrix(parts[3])
    second = _values(parts[1], FIRST)
    third = _values(parts[2], HALF)
    block = gl.program_id(1)
    wait_for_launch_before()  # the pieces are those of the launch before, too
    g = 0
    for u in range(unit, past_unit):
        _, _, _, lo, hi = part_of(u, share, past_share, tiles_ptr, KV_HEADS)
        if lo < hi:
            o = gl.zeros([ROWS, FIRST], gl.float32, O_L)
            o_upper = gl.zeros([ROWS, HALF], gl.float32, U_L)
            for _ in range(lo, hi):
                stage = g % STAGES
                phase = (g // STAGES) & 1
                for pair in gl.static_range(1, PAIRS - 1):
                    mbarrier.wait(full.index(stage * PAIRS + pair), phase)
                barrier_sync(READY + stage, THREADS)
                kept = kept_s.index(stage).load(gl.SliceLayout(1, O_L))
                o = scale_rows(o, kept)
                o_upper = scale_rows(o_upper, kept_s.index(stage).load(gl.SliceLayout(1, U_L)))
                o = warpgroup_mma(p_s.index(stage), second.index(stage), o, is_async=True)
                o_upper = warpgroup_mma(p_s.index(stage), third.index(stage), o_upper, is_async=True)
                o = warpgroup_mma_wait(1, deps=[o])
                mbarrier.arrive(free.index(STAGES + stage), count=1)
                o_upper = warpgroup_mma_wait(0, deps=[o_upper])
                mbarrier.arrive(free.index(2 * STAGES + stage), count=1)
                mbarrier.arrive(free.index(3 * STAGES + stage), count=1)
                g += 1
            r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O_L))
            exists = r < NEW * GROUP
            piece = (gl.program_id(0) + u).to(gl.int64) * (BLOCKS * ROWS)
            at = pieces_ptr + (piece + r) * (2 * HALF + 2)
            cols = FIRST + gl.arange(0, FIRST, gl.SliceLayout(0, O_L))
            gl.store(at[:, None] + cols[None, :], o, mask=exists[:, None])
            r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, U_L))
            exists = r < NEW * GROUP
            at = pieces_ptr + (piece + r) * (2 * HALF + 2)
            cols = HALF + gl.arange(0, HALF, gl.SliceLayout(0, U_L))
            gl.store(at[:, None] + cols[None, :], o_upper, mask=exists[:, None])


# ---------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=("k_h", "table_b", "batch"))
def _attend(
    q_ptr, q_b, q_n, q_h, k_desc, k_ptr, k_h, table_ptr, table_b, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr,
    tree_ptr, pieces_ptr, batch, scale, inner,
    NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, PAGE: gl.constexpr,
    BATCH_P2: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    parts = (
        tiles_like(k_desc, 2 * STAGES),
        tiles_like(k_desc, 2 * STAGES),
        tiles_like(k_desc, 4 * STAGES),
        tiles_like(k_desc, STAGES),
    )
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_s = gl.allocate_shared_memory(k_desc.dtype, [9, ROWS, BOX], Q_SHARED)
    kept_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PAIRS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * PAIRS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(free.index(i), count=2 if i >= 3 * STAGES else 1)
    work = share_of(tiles_ptr, batch, KV_HEADS, BATCH_P2)
    consumer = (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, q_s, kept_s, parts,
        full, free, scale, inner, work,
    )  # fmt: skip
    second = (tiles_ptr, pieces_ptr, kept_s, parts, full, free, work)
    producer = (k_desc, k_ptr, k_h, parts, full, free, table_ptr, table_b, starts_ptr, firsts_new_ptr, tiles_ptr, work)
    TREE: gl.constexpr = tree_ptr is not None
    SOFTCAP: gl.constexpr = inner is not None
    gl.warp_specialize(
        [
            (_first_consumer, (consumer, NEW, GROUP, KV_HEADS, BLOCKS, TREE, SOFTCAP)),
            (_second_consumer, (second, NEW, GROUP, KV_HEADS, BLOCKS)),
            (_producer, (producer, KV_HEADS, NEW, PAGE, AHEAD)),
        ],
        [4, 1],
        [232, 24],
    )


# ---------------------------------------------------------------- host


def unsupported(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    if q.dtype not in (torch.bfloat16, torch.float16) or pool.k.dtype != q.dtype:
        return f"dtypes {q.dtype} of q and {pool.k.dtype} of pages; it has bfloat16 and float16 for both"
    if (q.shape[-1], pool.v.shape[-1], pool.shared_values) != (DIM, DIM_V, True):
        return f"head dims {q.shape[-1]} and {pool.v.shape[-1]}; it has {DIM} and {DIM_V} with shared values"
    return declined(q, pool, tables, score, call, BOX.value, _blocks(q, pool))


def launch(
    q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, result: tuple[Tensor, Tensor | None]
) -> None:
    """Attend to this rank's visible keys, see :func:`.attend.launch`."""
    batch, new, q_heads, _ = q.shape
    if 0 in q.shape:
        return
    q = q if q.stride(-1) == 1 else q.contiguous()
    kv_heads, grid = pool.k.shape[0], _grid(q, pool)
    pieces, _ = scratch(tables, grid, batch * kv_heads, DIM_V)
    key = (
        q.device, q.dtype, q.shape, q.stride(), pool.k.shape, pool.k.stride(), pool.page_size, tables.table.stride(0),
        score.softmax_scale, score.softcap, call.tree is None,
    )  # fmt: skip
    tensors = (q, pool.k, tables.table, tables.start, tables.end, tables.first_new, tables.tiles, pieces, call.tree)
    blocks = grid.rows // ROWS.value
    with on_device(q):
        _launches.repeat(key, tensors, lambda: dispatch(
            _attend, (grid.programs, blocks), q, *q.stride()[:3], view(pool.k, (1, BOX.value, BOX.value)), pool.k,
            pool.k.stride(0), tables.table, tables.table.stride(0), tables.start, tables.end, tables.first_new,
            tables.tiles, call.tree, pieces, batch, *scale_and_cap(score),
            NEW=new, GROUP=q_heads // kv_heads, KV_HEADS=kv_heads, BLOCKS=blocks, PAGE=pool.page_size,
            BATCH_P2=grid.batch_p2(batch), AHEAD=AHEAD if pool.k.stride(1) == DIM else 0, num_warps=4,
            maxnreg=168, launch_pdl=True,
        ))  # fmt: skip
        combine(q, pieces, pool, tables, score, call, grid, result)


def _grid(q: Tensor, pool: Pool) -> Grid:
    """Return the division of the work as :mod:`.combine` sees it: tiles of rows run side by side, and their pieces are
    one piece of all rows."""
    blocks = _blocks(q, pool)
    programs = max(1, multiprocessors(q.device) // blocks)
    return Grid(blocks * ROWS.value, 1, programs, 0, programs + len(q) * pool.k.shape[0])


def _blocks(q: Tensor, pool: Pool) -> int:
    """Return the tiles of rows of one row of the step and key head."""
    return -(-q.shape[1] * (q.shape[2] // pool.k.shape[0]) // ROWS.value)
