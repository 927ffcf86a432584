"""Attention to pages of latent vectors for sm_90, in Gluon: head dims 576 and 512, values the first columns of keys.

One key head serves up to 128 query heads (DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1: decoding with
the projections absorbed), which is 242 operations a byte: the products limit it, not memory. So a CTA has 64 rows of
queries, all 512 columns of their output in registers, and a single tile of 128 slots in shared memory, which is both
keys and values::

    shared memory  Q 64 x 576 (72 KB), latent 128 x 512: columns 0 to 255 (64 KB), 256 to 511 (64 KB); rope 128 x 64
    warpgroup 0    S of slots 0 to 63   | softmax | O of columns 0 to 127 and 256 to 383
    warpgroup 1    S of slots 64 to 127 | softmax | O of columns 128 to 255 and 384 to 511
    tensor cores   S(i) 2304 cycles     |         | P V(i) of 0 to 255: 1024 | of 256 to 511: 1024 | S(i+1) ...
    moved by TMA   rope(i)              |         |                          | 0 to 255 of i+1     | 256 to 511 of i+1

* One tile is enough, because each part of it is filled again while others are used: S(i+1) begins with the columns that
  arrived during the last product of tile i. (DeepSeek's FlashMLA moves parts of tiles of 64 slots for the same reason:
  github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md. Its warpgroups take turns; here they go in
  step, two slots of time for one softmax.)
* P, 64 x 128, takes the place of the rope columns, which only the scores need.
* CTAs with other rows of the same keys run at the same time: ``program_id(1)`` is the tile of rows. They find the
  keys in the L2 cache.
* The point of reference of the softmax moves when a score is more than ``SLACK`` above it, see hopper/forward.py.
* The division of work, the early beginning before new tokens are stored, and the masks are those of :mod:`.hopper`;
  the pieces are added by :mod:`.combine`.

ALiBi, fixed splits, e4m3, long sums and other head dims are left to :mod:`.attend`. Contract: contract.py.
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

from ..contract import LONGEST_SUM, Score
from ..hopper.primitives import (
    async_load,
    let_next_launch_begin,
    reinterpret,
    scale_rows,
    tiles_like,
    wait_for_launch_before,
)
from ..hopper.tensor_maps import readable, view
from ..launch import Launches, capability, dispatch, multiprocessors, on_device
from .combine import combine
from .contract import Call, Pool, Tables, tile_size
from .grid import Grid, scratch
from .hopper_pieces import LOG2E, capped, finite, part_of, query_rows, share_of, tree_depth

DIM, DIM_V = 576, 512
BOX = gl.constexpr(64)  # slots and columns that one copy moves: 8 KB
SLOTS = gl.constexpr(128)  # of a tile
ROWS = gl.constexpr(64)  # of queries of a CTA
HALF = gl.constexpr(256)  # columns of values of one product
PAIRS = gl.constexpr(5)  # barriers: one for 128 columns, the last for the 64 of rope
SLACK = gl.constexpr(8.0)  # the most that a score may exceed its point of reference, to the base 2

_launches = Launches()

# ---------------------------------------------------------------- device: producer


@gluon.jit
def _load_box(k_desc, head, at, nth: gl.constexpr, part: gl.constexpr, parts, full):
    """Move one box: the ``part``-th 64 slots of a tile, the ``nth`` 64 columns."""
    lower, upper, rope = parts
    if nth < 4:
        target = lower.index(2 * nth + part)
    elif nth < 8:
        target = upper.index(2 * (nth - 4) + part)
    else:
        target = rope.index(part)
    async_load(k_desc, [head, at, nth * BOX], full.index(nth // 2), target)


@gluon.jit
def _producer(args, KV_HEADS: gl.constexpr, NEW: gl.constexpr, PAGE: gl.constexpr):
    """Move the tiles of this CTA's share. ``free``: the lower columns, the upper ones, rope."""
    k_desc, parts, full, free, table_ptr, table_b, starts_ptr, firsts_new_ptr, tiles_ptr, work = args
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    share, past, _, unit, past_unit, _ = work
    g = 0
    for u in range(unit, past_unit):
        b, _, _, lo, hi = part_of(u, share, past, tiles_ptr, KV_HEADS)
        head = u % KV_HEADS
        begin = gl.load(starts_ptr + b * NEW) // BOX
        first_new = gl.load(firsts_new_ptr + b)
        pages = table_ptr + b.to(gl.int64) * table_b
        for i in range(lo, hi, 2):
            slot = (begin + i) * BOX
            if slot + SLOTS > first_new:
                wait_for_launch_before()  # it stores the new tokens
            both = i + 1 < hi
            other = gl.where(both, slot + BOX, slot)
            at = gl.load(pages + slot // PAGE) * PAGE + slot % PAGE
            other_at = gl.load(pages + other // PAGE) * PAGE + other % PAGE
            phase = (g & 1) ^ 1
            for nth in gl.static_range(9):
                if nth % 4 == 0:
                    mbarrier.wait(free.index(nth // 4), phase)
                if both:
                    if nth % 2 == 0:
                        mbarrier.expect(full.index(nth // 2), 2 * (BYTES if nth == 8 else 2 * BYTES))
                    _load_box(k_desc, head, at, nth, 0, parts, full)
                    _load_box(k_desc, head, other_at, nth, 1, parts, full)
                else:
                    if nth % 2 == 0:
                        mbarrier.expect(full.index(nth // 2), BYTES if nth == 8 else 2 * BYTES)
                    _load_box(k_desc, head, at, nth, 0, parts, full)
            g += 1


# ---------------------------------------------------------------- device: consumer


@gluon.jit
def _clear_unseen(parts, full, phase, first, past):
    """Wait for a tile, and set its values to zero but for slots ``[first, past)`` of it: they may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    nth = gl.arange(0, SLOTS, gl.SliceLayout(1, L))
    seen = ((nth >= first) & (nth < past))[:, None]
    lower, upper, _ = parts
    for pair in gl.static_range(PAIRS - 1):
        mbarrier.wait(full.index(pair), phase)
    for block in gl.static_range(4):
        for half in gl.static_range(2):
            x = _columns(lower if half == 0 else upper, block)
            x.store(gl.where(seen, x.load(L), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _columns(boxes, nth: gl.constexpr):
    """Return 64 columns of a tile, (SLOTS, 64), from boxes that lie one after another."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(boxes, boxes.dtype, [boxes.shape[0] // 2, SLOTS, BOX], LAYOUT).index(nth)


@gluon.jit
def _values(boxes):
    """Return boxes of 4 x 64 columns as (SLOTS, HALF)."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(boxes, boxes.dtype, [SLOTS, HALF], LAYOUT)


@gluon.jit
def _scores(q_s, parts, full, phase, S_L: gl.constexpr):
    """Return the products of 64 rows of queries and a tile of keys, (ROWS, SLOTS)."""
    lower, upper, rope = parts
    s = gl.zeros([ROWS, SLOTS], gl.float32, S_L)
    for nth in gl.static_range(9):
        if nth % 2 == 0:
            mbarrier.wait(full.index(nth // 2), phase)
        if nth < 4:
            keys = _columns(lower, nth)
        elif nth < 8:
            keys = _columns(upper, nth - 4)
        else:
            keys = _columns(rope, 0)
        s = warpgroup_mma(q_s.index(nth), keys.permute((1, 0)), s, use_acc=nth > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _consumer(
    args, NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, TREE: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, q_s, parts, full,
        free, scale, inner, work,
    ) = args  # fmt: skip
    share, past_share, _, unit, past_unit, _ = work
    lower, upper, rope = parts
    WARPS: gl.constexpr = [4, gl.num_warps() // 4]
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=WARPS, instr_shape=[16, 64, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=WARPS, instr_shape=[16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    p_s = reinterpret(rope, rope.dtype, [ROWS, SLOTS], P_SHARED)
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
            # A share may end in the middle of a tile.
            low = gl.maximum(gl.load(starts_ptr + b * NEW), (begin + lo) * BOX)
            high = gl.minimum(gl.load(ends_ptr + b * NEW + NEW - 1), (begin + hi) * BOX)
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
            # Intervals of the rows.
            new, nth, alive = query_rows(block, NEW, GROUP, ROWS, ROW)
            bits = gl.zeros([ROWS], gl.int64, ROW)
            depth = new
            last = new
            if TREE:
                bits = gl.load(tree_ptr + b * NEW + new, mask=alive, other=0)
                depth = tree_depth(bits, new)
                last = new * 0 + NEW - 1
            s0 = gl.maximum(gl.load(starts_ptr + b * NEW + depth, mask=alive, other=0), low)
            s1 = gl.minimum(gl.load(ends_ptr + b * NEW + last, mask=alive, other=0), high)
            full_first = gl.max(gl.where(alive, s0, low), axis=0)
            full_past = gl.min(gl.where(alive, s1, high), axis=0)
            if TREE:
                full_past = gl.minimum(full_past, first_new)
            m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            l = gl.zeros([ROWS], gl.float32, ROW)
            o_lower = gl.zeros([ROWS, HALF], gl.float32, O_L)
            o_upper = gl.zeros([ROWS, HALF], gl.float32, O_L)
            for i in range(lo, hi, 2):
                slot = (begin + i) * BOX
                phase = g & 1
                if (slot < low) | (slot + SLOTS > high):
                    _clear_unseen(parts, full, phase, low - slot, high - slot)
                s = _scores(q_s, parts, full, phase, S_L)
                if SOFTCAP:
                    s = capped(s, inner)
                if (slot < full_first) | (slot + SLOTS > full_past):
                    place = slot + gl.arange(0, SLOTS, gl.SliceLayout(0, S_L))
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
                p_s.store(p.to(p_s.dtype))  # all warps have met since their products with rope: for the largest score
                fence_async_shared()
                o_lower = scale_rows(o_lower, kept)
                o_upper = scale_rows(o_upper, kept)
                o_lower = warpgroup_mma(p_s, _values(lower), o_lower, is_async=True)
                o_upper = warpgroup_mma(p_s, _values(upper), o_upper, is_async=True)
                l = l * kept + gl.sum(p, axis=1)
                o_lower = warpgroup_mma_wait(1, deps=[o_lower])
                mbarrier.arrive(free.index(0), count=1)
                o_upper = warpgroup_mma_wait(0, deps=[o_upper])
                mbarrier.arrive(free.index(1), count=1)
                mbarrier.arrive(free.index(2), count=1)
                g += 1
            # The piece.
            r = block * ROWS + gl.arange(0, ROWS, ROW_O)
            exists = r < NEW * GROUP
            cols = gl.arange(0, HALF, gl.SliceLayout(0, O_L))
            piece = (gl.program_id(0) + u).to(gl.int64) * (BLOCKS * ROWS)
            at = pieces_ptr + (piece + r) * (2 * HALF + 2)
            gl.store(at[:, None] + cols[None, :], o_lower, mask=exists[:, None])
            gl.store(at[:, None] + (HALF + cols)[None, :], o_upper, mask=exists[:, None])
            at = pieces_ptr + (piece + block * ROWS + gl.arange(0, ROWS, ROW)) * (2 * HALF + 2) + 2 * HALF
            gl.store(at, m, mask=alive)
            gl.store(at + 1, l, mask=alive)


# ---------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=("table_b", "batch"))
def _attend(
    q_ptr, q_b, q_n, q_h, k_desc, table_ptr, table_b, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr,
    pieces_ptr, batch, scale, inner,
    NEW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, PAGE: gl.constexpr,
    BATCH_P2: gl.constexpr,
):  # fmt: skip
    parts = tiles_like(k_desc, 8), tiles_like(k_desc, 8), tiles_like(k_desc, 2)
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_s = gl.allocate_shared_memory(k_desc.dtype, [9, ROWS, BOX], Q_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAIRS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(free.index(i), count=1)
    work = share_of(tiles_ptr, batch, KV_HEADS, BATCH_P2, 2, 1)  # with 4, the loop of trees reloads registers
    consumer = (
        q_ptr, q_b, q_n, q_h, starts_ptr, ends_ptr, firsts_new_ptr, tiles_ptr, tree_ptr, pieces_ptr, q_s, parts, full,
        free, scale, inner, work,
    )  # fmt: skip
    producer = (k_desc, parts, full, free, table_ptr, table_b, starts_ptr, firsts_new_ptr, tiles_ptr, work)
    gl.warp_specialize(
        [
            (_consumer, (consumer, NEW, GROUP, KV_HEADS, BLOCKS, tree_ptr is not None, inner is not None)),
            (_producer, (producer, KV_HEADS, NEW, PAGE)),
        ],
        [1],
        [24],
    )


# ---------------------------------------------------------------- host


def unsupported(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    if q.dtype not in (torch.bfloat16, torch.float16) or pool.k.dtype != q.dtype:
        return f"dtypes {q.dtype} of q and {pool.k.dtype} of pages; it has bfloat16 and float16 for both"
    if (q.shape[-1], pool.v.shape[-1], pool.shared_values) != (DIM, DIM_V, True):
        return f"head dims {q.shape[-1]} and {pool.v.shape[-1]}; it has {DIM} and {DIM_V} with shared values"
    if tile_size(pool.page_size) != BOX.value:
        return f"pages of {pool.page_size} slots; it has multiples of {BOX.value}"
    if score.alibi_slopes is not None or score.softmax_scale <= 0:
        return "ALiBi, or a scale that is not positive"
    if call.fixed_split:
        return "fixed_split"
    if not q.is_cuda or capability(q.device) != (9, 0):
        return f"device {q.device} does not have compute capability 9.0"
    if not readable(pool.k):
        return f"k with strides {tuple(pool.k.stride())} is not laid out in steps of 16 bytes, as TMA needs"
    keys, kv_heads = tables.table.shape[1] * pool.page_size, pool.k.shape[0]
    if keys > LONGEST_SUM and len(q) * kv_heads * keys > LONGEST_SUM * _grid(q, pool).programs:
        return f"sums of more than {LONGEST_SUM} keys in a program"
    return None


def launch(
    q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, result: tuple[Tensor, Tensor | None]
) -> None:
    """Attend to this rank's visible keys.

    Args:
        result: written: a state (batch, new, q_heads, head_dim_v + 2) float32 and None, without a sink; or ``out`` and
            ``lse``, where one rank holds all keys.
    """
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
    tensors = [q, pool.k, tables.table, tables.start, tables.end, tables.first_new, tables.tiles, pieces]
    if call.tree is not None:
        tensors.append(call.tree)
    with on_device(q):
        if not _launches.again(key, tensors):
            scale, inner = score.softmax_scale * LOG2E.value, None
            if score.softcap:
                scale, inner = score.softcap * LOG2E.value, score.softmax_scale / score.softcap
            blocks = grid.rows // ROWS.value
            launched = dispatch(
                _attend, (grid.programs, blocks), q, *q.stride()[:3], view(pool.k, (1, BOX.value, BOX.value)),
                tables.table, tables.table.stride(0), tables.start, tables.end, tables.first_new, tables.tiles,
                call.tree, pieces, batch, scale, inner,
                NEW=new, GROUP=q_heads // kv_heads, KV_HEADS=kv_heads, BLOCKS=blocks, PAGE=pool.page_size,
                BATCH_P2=grid.batch_p2(batch), num_warps=8, maxnreg=168, launch_pdl=True,
            )  # fmt: skip
            _launches.remember(key, tensors, launched)
        combine(q, pieces, pool, tables, score, call, grid, result)


def _grid(q: Tensor, pool: Pool) -> Grid:
    """Return the division of the work as :mod:`.combine` sees it: tiles of rows run side by side, and their pieces are
    one piece of all rows."""
    batch, new, q_heads, _ = q.shape
    kv_heads = pool.k.shape[0]
    blocks = -(-new * (q_heads // kv_heads) // ROWS.value)
    programs = max(1, multiprocessors(q.device) // blocks)
    return Grid(blocks * ROWS.value, 1, programs, 0, programs + batch * kv_heads, step=SLOTS.value // BOX.value)
