"""The paged attention kernel in portable Triton: any GPU that Triton supports, and Triton's interpreter on the CPU.

Work is listed as (row of the step, key head, tile of slots), and every program of a fixed grid takes an equal share of
the list, found from prefix sums of tiles that lie on the device: any lengths in one launch, no table of splits, and the
same grid for a captured graph. (Stream-K: Osama et al. 2023, arXiv:2301.03598; split keys: Dao et al. 2023,
"Flash-Decoding".) A share is cut into pieces at the ends of (row, key head); the last program of a (row, key head) adds
its pieces (:mod:`.pieces`)::

    list       row 0 head 0 | row 0 head 1 | row 1 head 0 | ...
    programs   0000000000000011111111111111222222222222223333333
    pieces     (0, 0)        (0, 1)  (1, 1)  ...

The query heads of a group and the new tokens are the rows of one tile, so keys are read once per key head (once per
ROWS rows, where there are more). Full tiles have no mask; cut tiles are masked by the rows' intervals of slots, and of
these nothing is loaded that no row sees: it may be NaN.

``fixed_split`` gives each program one cut of a fixed number of slots instead, so that the bits of a row do not depend
on the other rows.

Contract and shapes: operands.py. Each 2^16 keys o is flushed (``Block.period``), see kernels/contract.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import PERIOD, Score
from ..launch import Launches, capability, dispatch, multiprocessors, on_device
from ..triton.launch_parameters import padded
from ..triton.primitives import (
    INTERPRETED,
    ScoreArguments,
    bound,
    dot,
    has_tma,
    last_contiguous,
    scores,
    softmax_step,
)
from .combine import ALONE, combine
from .grid import Grid, scratch
from .operands import Call, Pool, Tables, tile_size
from .pieces import query_rows, store_piece, store_result, sum_pieces, tree_depth

_PIECE = 8192  # numbers of pieces that are added at once

_launches = Launches()


def unsupported(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
    """Return None if the kernels can run, otherwise the reason."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if pool.quantized and q.is_cuda and capability(q.device) < (8, 9):
        return f"a cache of {pool.k.dtype} needs compute capability 8.9, and {q.device} has less"
    if max(q.shape[-1], pool.v.shape[-1]) > 1024:
        return f"head dims {q.shape[-1]} of q and {pool.v.shape[-1]} of v, at most 1024 is possible"
    if not q.is_cuda and not INTERPRETED.value:
        return f"tensors on {q.device.type} need Triton's interpreter (TRITON_INTERPRET=1 before the first import)"
    return None


def launch(
    q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, result: tuple[Tensor, Tensor | None]
) -> None:
    """Attend to this rank's visible keys.

    Args:
        result: written: a state (batch, new, q_heads, head_dim_v + 2) float32 and None, without a sink; or ``out`` and
            ``lse``, where one rank holds all keys.
    """
    q = last_contiguous(q)
    batch, new, q_heads, dim = q.shape
    kv_heads, slots, _ = pool.k.shape
    dim_v, tile = pool.v.shape[-1], tile_size(pool.page_size)
    if 0 in q.shape:
        return
    group, s = q_heads // kv_heads, ScoreArguments.of(score)
    main = padded(dim) if padded(dim) <= 256 or padded(dim) == dim else padded(dim) // 2
    tma = main >= dim and tile >= 16 and all(has_tma(x[None]) for x in (pool.k, pool.v))
    bytes_of_slot = (dim if pool.shared_values else dim + dim_v) * pool.k.element_size()
    programs, stages, warps = (1, 2, 8) if bytes_of_slot > 512 + 256 else (2, 4, 4)
    grid = Grid.of(q, pool, tables, call, programs * (multiprocessors(q.device) if q.is_cuda else 4))
    units = batch * kv_heads * grid.blocks
    pieces, arrived = scratch(tables, grid, units, dim_v)
    some = grid.some(new * group)
    key = (
        q.device, q.dtype, q.shape, q.stride(), pool.k.shape, pool.k.stride(), pool.v.shape, pool.v.stride(),
        pool.page_size, pool.shared_values, tables.table.shape, tables.table.stride(0), s[:2], s[3:], call.fixed_split,
        result[1] is None, call.tree is None, None if score.sink is None else score.sink.dtype, s.slopes is None,
        pool.quantized,
    )  # fmt: skip
    v, v_scale = (None, None) if pool.shared_values else (pool.v, pool.v_scale)
    tensors = (
        q, pool.k, v, pool.positions, tables.table, tables.start, tables.end, tables.first_new, tables.position,
        tables.tiles, pieces, arrived, *result, call.tree, score.sink, s.slopes, pool.k_scale, v_scale,
    )  # fmt: skip
    with on_device(q):
        _launches.repeat(key, tensors, lambda: dispatch(
            _attend, (grid.programs,), q, *q.stride()[:3], _source(pool.k, tile, tma),
            _source(pool.k if pool.shared_values else pool.v, tile, tma, dim_v),
            *pool.k.stride()[:2], *pool.v.stride()[:2], pool.k_scale,
            pool.k_scale if pool.shared_values else pool.v_scale, pool.positions, tables.table, tables.table.stride(0),
            tables.start, tables.end, tables.first_new, tables.position, tables.tiles, call.tree, pieces, arrived,
            *result, score.sink, s.scale, s.cap, s.slopes, s.slopes_stride, batch, slots,
            NEW=new, GROUP=group, KV_HEADS=kv_heads, ROWS=grid.rows, BLOCKS=grid.blocks, SOME=some,
            DIM=dim, MAIN=main, REST=0 if main >= dim else padded(dim - main), DIM_V=dim_v, DIM_V_P2=padded(dim_v),
            PAGE=pool.page_size, TILE=tile, BATCH_P2=grid.batch_p2(batch),
            AT_ONCE=max(1, min(16, _PIECE // (some * padded(dim_v)))),
            SPLIT=call.fixed_split // tile, SPLITS=grid.splits, SIMPLE=s.SIMPLE, SOFTCAP=s.SOFTCAP,
            SHARED=pool.shared_values and main == dim_v, TMA=tma,
            PERIOD_TILES=PERIOD // tile, STAGES=stages, ALONE=some <= ALONE,
            num_warps=warps, num_stages=stages,
        ))  # fmt: skip
        if some > ALONE:
            combine(q, pieces, pool, tables, score, call, grid, result)


def _source(x: Tensor, tile: int, tma: bool, dim: int | None = None) -> Any:
    """Return the argument that tiles of x are read from: a descriptor, or x itself. ``dim``: the columns that exist."""
    if not tma:
        return x
    heads, slots, width = x.shape
    return TensorDescriptor(x, [heads, slots, dim or width], list(x.stride()), [1, tile, padded(dim or width)])


@triton.jit
def _slots(x, h, at, first, past, x_h, x_s, COL: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
           TILE: tl.constexpr, CUT: tl.constexpr, TMA: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Load columns from COL on of a tile of neighbouring slots, (TILE, PADDED), as ``dtype``. Without TMA zeros from
    column DIM on, and with CUT outside of the slots ``[first, past)`` of the tile, which are not read."""
    nth, cols = tl.arange(0, TILE), COL + tl.arange(0, PADDED)
    if TMA:
        tile = tl.reshape(x.load([h, at, COL]), [TILE, PADDED]).to(dtype)
        if CUT:
            tile = tl.where(((nth >= first) & (nth < past))[:, None], tile, 0.0)
        return tile
    else:
        x += h.to(tl.int64) * x_h + at.to(tl.int64) * x_s
        pointers = x + nth[:, None] * x_s + cols[None, :]
        if CUT:
            inside = ((nth >= first) & (nth < past))[:, None]
            return tl.load(pointers, mask=inside & (cols < DIM)[None, :], other=0.0).to(dtype)
        elif DIM < COL + PADDED:
            return tl.load(pointers, mask=(cols < DIM)[None, :], other=0.0).to(dtype)
        else:
            return tl.load(pointers).to(dtype)


@triton.jit
def _scales(scale, h, at, first, past, slots, TILE: tl.constexpr, CUT: tl.constexpr):
    """Load the scales of a tile of neighbouring slots, with CUT zeros outside of ``[first, past)``."""
    nth = tl.arange(0, TILE)
    pointers = scale + h.to(tl.int64) * slots + at + nth
    if CUT:
        return tl.load(pointers, mask=(nth >= first) & (nth < past), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _tile(
    m, l, o, pool, rows, h, slot, page, scale, cap,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TREE: tl.constexpr, SHARED: tl.constexpr, CUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the slots ``[slot, slot + TILE)``, which lie in ``page``, to (m, l, o). ``pool``, ``rows``: see
    :func:`_piece`."""
    k, v, k_h, k_s, v_h, v_s, k_scale, v_scale, slots, positions = pool
    query, rest, first, past, s0, s1, bits, first_new, pos_q, slope = rows
    at = page * PAGE + slot % PAGE
    nth = tl.arange(0, TILE)
    dtype: tl.constexpr = query.dtype
    key = _slots(k, h, at, first - slot, past - slot, k_h, k_s, 0, DIM, MAIN, TILE, CUT and not TMA, TMA, dtype)
    s = dot(query, tl.trans(key), None)
    if REST > 0:
        tail = _slots(k, h, at, first - slot, past - slot, k_h, k_s, MAIN, DIM, REST, TILE, CUT, TMA, dtype)
        s = dot(rest, tl.trans(tail), s)
    if k_scale is not None:
        s *= _scales(k_scale, h, at, first - slot, past - slot, slots, TILE, CUT)[None, :]
    distance = s
    if ALIBI:
        inside = (nth >= first - slot) & (nth < past - slot)
        distance = pos_q[:, None] - tl.load(positions + at + nth, mask=inside, other=0)[None, :]
    s, _ = scores(s, distance, scale, cap, slope, SIMPLE, SOFTCAP, ALIBI)
    if CUT:
        seen = ((s0 - slot)[:, None] <= nth[None, :]) & (nth[None, :] < (s1 - slot)[:, None])
        if TREE:
            bit = slot + nth - first_new
            branch = (bits[:, None] >> tl.minimum(tl.maximum(bit, 0), 63).to(tl.int64)[None, :]) & 1
            seen &= (bit < 0)[None, :] | (branch > 0)
        s = tl.where(seen, s, float("-inf"))
    p, kept, m = softmax_step(s, m, scale if SIMPLE else 1.0)
    o = o * kept[:, None]
    l = l * kept + tl.sum(p, 1)
    if k_scale is not None:
        p *= _scales(v_scale, h, at, first - slot, past - slot, slots, TILE, CUT)[None, :]
    # Scales of values are factors of p: their range is bfloat16's.
    of_p: tl.constexpr = tl.bfloat16 if k_scale is not None and dtype == tl.float16 else dtype
    value = key
    if not SHARED:
        value = _slots(v, h, at, first - slot, past - slot, v_h, v_s, 0, DIM_V, DIM_V_P2, TILE, CUT, TMA, of_p)
    elif CUT and TMA:
        value = tl.where(((nth >= first - slot) & (nth < past - slot))[:, None], key, 0.0)
    o = dot(p.to(of_p), value.to(of_p), o)
    return m, l, o


@triton.jit
def _tiles_of_piece(
    m, l, o, lo, hi, jump_at, jump_to, begin, pool, rows, pages, h, scale, cap,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TREE: tl.constexpr, SHARED: tl.constexpr, CUT: tl.constexpr, TMA: tl.constexpr,
    PERIOD_TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add tiles ``[lo, hi)``, counted from ``begin``, to (m, l, o); from tile ``jump_at`` on those from ``jump_to`` on.
    o is flushed after each PERIOD_TILES. The page of a tile is read one tile ahead."""
    for part in tl.range(lo, bound(hi), PERIOD_TILES):
        m_flushed, flushed = m, o
        o = tl.zeros_like(o)
        stop = tl.minimum(part + PERIOD_TILES, hi)
        page = tl.load(pages + (begin + tl.where(part < jump_at, part, part - jump_at + jump_to)) * TILE // PAGE)
        for i in tl.range(part, bound(stop), num_stages=STAGES):
            n = tl.minimum(i + 1, stop - 1)
            n = begin + tl.where(n < jump_at, n, n - jump_at + jump_to)
            next_page = tl.load(pages + n * TILE // PAGE)
            slot = (begin + tl.where(i < jump_at, i, i - jump_at + jump_to)) * TILE
            m, l, o = _tile(
                m, l, o, pool, rows, h, slot, page, scale, cap, DIM, MAIN, REST, DIM_V, DIM_V_P2, PAGE, TILE, SIMPLE,
                SOFTCAP, ALIBI, TREE, SHARED, CUT, TMA,
            )  # fmt: skip
            page = next_page
        kept = tl.exp2(m_flushed - tl.where(m == float("-inf"), 0.0, m))
        o += flushed * kept[:, None]
    return m, l, o


@triton.jit
def _piece(
    q, q_b, q_n, q_h, pool, table, table_b, starts, ends, firsts_new, position, tree, slopes, slopes_b, scale, cap, b,
    h, new, head, alive, first, past, begin, lo, hi,
    NEW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SIMPLE: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, TMA: tl.constexpr,
    PERIOD_TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (m, l, o) of some query rows, ``new`` and ``head`` of row b, for tiles ``[lo, hi)``, counted from
    ``begin``, of its slots ``[first, past)``: first the tiles that every row sees all of, then the others. ``pool``: k
    and v, their strides, the scales and their number for each head, positions."""
    ALIBI: tl.constexpr = slopes is not None
    TREE: tl.constexpr = tree is not None
    bits = tl.zeros([ROWS], tl.int64)
    depth = new
    if TREE:
        bits = tl.load(tree + b * NEW + new, mask=alive, other=0)
        depth = tree_depth(bits, new)
    s0 = tl.load(starts + b * NEW + depth, mask=alive, other=0)
    s1 = tl.load(ends + b * NEW + (new * 0 + NEW - 1 if TREE else new), mask=alive, other=0)
    first_new = tl.load(firsts_new + b)
    slope, pos_q = 0.0, s0
    if ALIBI:
        pos_q = tl.load(position + b * NEW + depth, mask=alive, other=0)
        slope = tl.load(slopes + b * slopes_b + head, mask=alive, other=0.0)[:, None]
    # Every row sees all of the tiles from full_lo to full_hi.
    full_lo = tl.cdiv(tl.max(tl.where(alive, s0, 0), 0), TILE) - begin
    full_past = tl.min(tl.where(alive, s1, 2**31 - 1), 0)
    if TREE:
        full_past = tl.minimum(full_past, first_new)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_past // TILE - begin, full_lo), hi)
    at = q + b.to(tl.int64) * q_b + new.to(tl.int64) * q_n + head.to(tl.int64) * q_h
    cols = tl.arange(0, MAIN)
    query = tl.load(at[:, None] + cols[None, :], mask=alive[:, None] & (cols < DIM)[None, :], other=0.0)
    rest = query
    if REST > 0:
        cols = MAIN + tl.arange(0, REST)
        rest = tl.load(at[:, None] + cols[None, :], mask=alive[:, None] & (cols < DIM)[None, :], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, DIM_V_P2], tl.float32)
    pages = table + b.to(tl.int64) * table_b
    rows = (query, rest, first, past, s0, s1, bits, first_new, pos_q, slope)
    m, l, o = _tiles_of_piece(
        m, l, o, bound(full_lo), full_hi, full_hi, full_hi, begin, pool, rows, pages, h, scale, cap,
        DIM, MAIN, REST, DIM_V, DIM_V_P2, PAGE, TILE, SIMPLE, SOFTCAP, ALIBI, TREE, SHARED, False, TMA,
        PERIOD_TILES, STAGES,
    )  # fmt: skip
    return _tiles_of_piece(
        m, l, o, bound(lo), hi - (full_hi - full_lo), full_lo, full_hi, begin, pool, rows, pages, h, scale, cap,
        DIM, MAIN, REST, DIM_V, DIM_V_P2, PAGE, TILE, SIMPLE, SOFTCAP, ALIBI, TREE, SHARED, True, TMA,
        PERIOD_TILES, 1,
    )  # fmt: skip


@triton.jit
def _equal_share(tiles, past_of, total, pid, programs, HEADS: tl.constexpr):
    """Return the tiles of a share, this program's share ``[share, past_share)`` of the list of ``total`` tiles, and the
    units ``[unit, last_unit)`` that it has pieces of: a unit is a row of the step and a block of query rows."""
    per = tl.maximum(tl.cdiv(total, programs), 1)
    share = pid * per
    past_share = tl.minimum(share + per, total)
    # The units of the first and the last tile of this share.
    row = tl.sum((past_of <= share // HEADS).to(tl.int32), 0)
    last = tl.maximum(past_share - 1, 0)
    last_row = tl.sum((past_of <= last // HEADS).to(tl.int32), 0)
    unit, last_unit = share, share  # no work
    if share < past_share:
        t = tl.load(tiles + row)
        unit = row * HEADS + (share - t * HEADS) // (tl.load(tiles + row + 1) - t)
        t = tl.load(tiles + last_row)
        last_unit = last_row * HEADS + (last - t * HEADS) // (tl.load(tiles + last_row + 1) - t) + 1
    return per, share, past_share, unit, last_unit


@triton.jit
def _add_if_last(
    pieces, arrived, out, lse, sink, u, b, h, block, first, count, expected, NEW: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Count a program that has come to the end of unit u. The last one of ``expected`` adds the ``count`` pieces from
    slot ``first`` on, and stores the result."""
    tl.debug_barrier()
    number = tl.atomic_add(arrived + u, 1, sem="acq_rel")
    if number == expected - 1:
        tl.store(arrived + u, 0)
        new, g, alive = query_rows(block * (ROWS // SOME), NEW, GROUP, SOME)
        m, l, o = sum_pieces(pieces, first, count, 0, alive, ROWS, SOME, DIM_V, DIM_V_P2, AT_ONCE)
        cols = tl.arange(0, DIM_V_P2)
        store_result(m, l, o, out, lse, sink, b, new, h * GROUP + g, alive, KV_HEADS * GROUP, NEW, DIM_V, cols)


# These vary from step to step, or need no kernel of their own.
_NUMBERS = ("q_b", "q_n", "q_h", "table_b", "slopes_b", "batch", "slots")


@triton.jit(do_not_specialize=_NUMBERS)
def _attend(
    q, q_b, q_n, q_h, k, v, k_h, k_s, v_h, v_s, k_scale, v_scale, positions, table, table_b, starts, ends, firsts_new,
    position, tiles, tree, pieces, arrived, out, lse, sink, scale, cap, slopes, slopes_b, batch, slots,
    NEW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    SOME: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_P2: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BATCH_P2: tl.constexpr, AT_ONCE: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    TMA: tl.constexpr, PERIOD_TILES: tl.constexpr, STAGES: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * BLOCKS
    pool = (k, v, k_h, k_s, v_h, v_s, k_scale, v_scale, slots, positions)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if SPLIT > 0:
        share, past_share, unit, last_unit = pid * 0, pid * 0, pid // SPLITS, pid // SPLITS + 1
        per = share
    else:
        nth = tl.arange(0, BATCH_P2)
        past_of = tl.load(tiles + 1 + nth, mask=nth < batch, other=2**31 - 1)
        first_of = tl.load(tiles + nth, mask=nth < batch, other=0)
        total = tl.load(tiles + batch) * HEADS
        if ALONE:  # noqa: SIM102
            if tl.max(((past_of == first_of) & (nth < batch)).to(tl.int32), 0) > 0:
                _store_empty(
                    tiles, out, lse, sink, pid, programs, batch, NEW, GROUP, KV_HEADS, ROWS, BLOCKS, SOME, DIM_V,
                    DIM_V_P2,
                )  # fmt: skip
        per, share, past_share, unit, last_unit = _equal_share(tiles, past_of, total, pid, programs, HEADS)
    for u in tl.range(bound(unit), bound(last_unit)):
        u += pid * 0  # a tensor in the interpreter, too
        b, h_q = u // HEADS, u % HEADS
        h, block = h_q // BLOCKS, h_q % BLOCKS
        t = tl.load(tiles + b)
        count = tl.load(tiles + b + 1) - t
        if SPLIT > 0 or count > 0:
            first = tl.load(starts + b * NEW)
            past = tl.load(ends + b * NEW + NEW - 1)
            begin = first // TILE
            if SPLIT > 0:
                part = pid % SPLITS
                lo = tl.minimum(tl.maximum(part * SPLIT - begin, 0), count)
                hi = tl.minimum(tl.maximum((part + 1) * SPLIT - begin, 0), count)
                slot, slot_of_first, sum_of = pid, u * SPLITS + begin // SPLIT, (begin + count - 1) // SPLIT
                sum_of = tl.where(count > 0, sum_of - begin // SPLIT + 1, 0)
                expected = pid * 0 + SPLITS
            else:
                base = t * HEADS + h_q * count  # the first tile of this unit in the list
                lo, hi = tl.maximum(share, base) - base, tl.minimum(past_share, base + count) - base
                slot, slot_of_first = pid + u, base // per + u
                sum_of = (base + count - 1) // per - base // per + 1
                expected = sum_of
            new, g, alive = query_rows(block, NEW, GROUP, ROWS)
            head = h * GROUP + g
            if lo < hi:
                m, l, o = _piece(
                    q, q_b, q_n, q_h, pool, table, table_b, starts, ends, firsts_new, position, tree, slopes, slopes_b,
                    scale, cap, b, h, new, head, alive, first, past, begin, lo, hi, NEW, ROWS, DIM, MAIN, REST, DIM_V,
                    DIM_V_P2, PAGE, TILE, SIMPLE, SOFTCAP, SHARED, TMA, PERIOD_TILES, STAGES,
                )  # fmt: skip
                store_piece(pieces, slot, m, l, o, alive, ROWS, DIM_V, DIM_V_P2)
            if ALONE:
                _add_if_last(
                    pieces, arrived, out, lse, sink, u, b, h, block, slot_of_first, sum_of, expected, NEW, GROUP,
                    KV_HEADS, ROWS, SOME, DIM_V, DIM_V_P2, AT_ONCE,
                )  # fmt: skip


@triton.jit
def _store_empty(
    tiles, out, lse, sink, pid, programs, batch, NEW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, SOME: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
):  # fmt: skip
    """Store the results of rows that see nothing: every program those of some (row, key head)."""
    for u in tl.range(bound(pid), bound(batch * KV_HEADS * BLOCKS), bound(programs)):
        u += pid * 0
        b, h = u // (KV_HEADS * BLOCKS), u % (KV_HEADS * BLOCKS)
        if tl.load(tiles + b + 1) == tl.load(tiles + b):
            new, g, alive = query_rows(h % BLOCKS * (ROWS // SOME), NEW, GROUP, SOME)
            m = tl.full([SOME], float("-inf"), tl.float32)
            o = tl.zeros([SOME, DIM_V_P2], tl.float32)
            store_result(
                m, tl.zeros([SOME], tl.float32), o, out, lse, sink, b, new, h // BLOCKS * GROUP + g, alive,
                KV_HEADS * GROUP, NEW, DIM_V, tl.arange(0, DIM_V_P2),
            )  # fmt: skip
