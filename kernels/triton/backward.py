"""The backward kernels in portable Triton: any GPU that Triton supports, and Triton's interpreter on the CPU.

``lse`` and ``delta`` are global, so chunks need no merging: with ``p = exp(s - lse)`` every chunk adds ::

    dv = p^T dout      ds = p * (dout v^T - delta) * s'      dk = ds^T q * scale      dq += ds k * scale

where s' is the derivative of softcap (1 without). Two passes, each with its sums in registers:

    _dkdv   a program owns a tile of keys and walks the queries that see it, over all query heads of its group
    _dq     a program owns a tile of queries and walks the keys it sees

Head dims above 256 have too many columns for that, see backward_large.py.

Each sum belongs to one program, so there are no atomics, and every run gives the same bits. The price is that ``s``
and ``dout v^T`` are computed twice: 7 products instead of 5. On Hopper that is faster than one pass that adds tiles of
dq to memory, which runs out of registers (measured, 16k tokens, head dim 128: 12.9 ms compared with 14.9 ms).

Scores are transposed in ``_dkdv`` (keys are rows), so that p^T and ds^T, results of one product, are left operands of
the next without passing through shared memory.

Shapes and contract: contract.py. Method: Dao 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..contract import Keys, Queries, Score
from ..launch import dispatch
from . import backward_large, primitives
from .backward_inputs import Inputs
from .launch_parameters import Passes, Tiles, WideTiles, padded, row_of
from .primitives import (
    ScoreArguments,
    bound,
    cut_tile,
    dot,
    interval_strides,
    load_span,
    load_tile,
    scores,
    store_tile,
    tables,
    tile_source,
    unsupported,
)
from .strides import elements, numbers, stride_unit, strides_in

__all__ = ["backward", "unsupported"]


def choose_tiles(q: Tensor, v: Tensor) -> Passes | WideTiles:
    """Return the tile sizes of the kernels for dk and dv and for dq, or those of backward_large.py."""
    return row_of(q, v, primitives.capability(q.device)).backward


def backward(queries: Queries, keys: Keys, score: Score, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one chunk of keys and add to dq, see :meth:`..backends.Backend.backward`."""
    inputs = Inputs.of(queries, keys, score)
    tiles = choose_tiles(inputs.q, inputs.v)
    if isinstance(tiles, WideTiles):
        return backward_large.gradients(inputs, tiles, dq)
    gradients = _key_gradients(inputs, tiles.dkdv)
    _query_gradients(inputs, tiles.dq, dq)
    return gradients


def query_gradients(queries: Queries, keys: Keys, score: Score, dq: Tensor) -> None:
    """Add to dq, see :meth:`..backends.Backend.query_gradients`."""
    inputs = Inputs.of(queries, keys, score)
    tiles = choose_tiles(inputs.q, inputs.v)
    if isinstance(tiles, WideTiles):
        backward_large.add_gradients(inputs, tiles, dq, None)
    else:
        _query_gradients(inputs, tiles.dq, dq)


def key_gradients(queries: Queries, keys: Keys, score: Score) -> tuple[Tensor, Tensor]:
    """Return dk and dv, see :meth:`..backends.Backend.key_gradients`."""
    inputs = Inputs.of(queries, keys, score)
    tiles = choose_tiles(inputs.q, inputs.v)
    if isinstance(tiles, WideTiles):
        return backward_large.gradients(inputs, tiles, None)
    return _key_gradients(inputs, tiles.dkdv)


def _key_gradients(inputs: Inputs, tiles: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v, dout = inputs[:4]
    dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    unit, kv_heads = stride_unit(q, k, v, dout, dk, dv), k.shape[2]
    rows, span, start, end = tables(inputs.block, "key", tiles, q.device)
    n_tiles = rows.shape[0]
    with torch.cuda.device_of(q):
        dispatch(
            _dkdv, (n_tiles * kv_heads * q.shape[0],), *_arguments(inputs, tiles, unit, start, end),
            dk, *strides_in(unit, dk), dv, *strides_in(unit, dv),
            rows, span, *interval_strides(span)[:1],
            q.shape[1], n_tiles, kv_heads,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, **_constants(inputs, unit),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return dk, dv


def _query_gradients(inputs: Inputs, tiles: Tiles, dq: Tensor) -> None:
    q, k, v, dout = inputs[:4]
    dq_strided, dq = dq, primitives.last_contiguous(dq)
    rows, span, start, end = tables(inputs.block, "query", tiles, q.device)
    unit = stride_unit(q, k, v, dout, dq)
    n_tiles, heads = rows.shape[0], q.shape[2]
    with torch.cuda.device_of(q):
        dispatch(
            _dq, (n_tiles * heads * q.shape[0],), *_arguments(inputs, tiles, unit, start, end),
            dq, *strides_in(unit, dq),
            rows, span, *interval_strides(span)[:1],
            k.shape[1], n_tiles, heads,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, **_constants(inputs, unit),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    if dq is not dq_strided:
        dq_strided.copy_(dq)


def _arguments(inputs: Inputs, tiles: Tiles, unit: int, start: Tensor, end: Tensor) -> tuple[Any, ...]:
    """Return the arguments of both kernels before their outputs."""
    q, k, v, dout, lse2, delta, block, score = inputs
    counts = (tiles.block_m, tiles.block_n, tiles.block_n, tiles.block_m)
    s = ScoreArguments.of(score)
    return (
        *(
            argument
            for x, n in zip((q, k, v, dout), counts, strict=True)
            for argument in (tile_source(x, n, inputs.tma), *strides_in(unit, x))
        ),
        lse2, delta, q.shape[2] * q.shape[1], q.shape[1],
        start, *interval_strides(start), end, *interval_strides(end),
        *((None, None) if s.slopes is None else block.positions(q.device)),
        s.scale, s.cap, s.slopes, s.slopes_stride, score.softmax_scale,
    )  # fmt: skip


def _constants(inputs: Inputs, unit: int) -> dict[str, Any]:
    s, dim, dim_v = ScoreArguments.of(inputs.score), inputs.q.shape[-1], inputs.v.shape[-1]
    return dict(
        HEADS_PER_KV=inputs.q.shape[2] // inputs.k.shape[2],
        DIM=dim, DIM_P2=padded(dim),
        DIM_V=dim_v, DIM_V_P2=padded(dim_v),
        SIMPLE=s.SIMPLE, SOFTCAP=s.SOFTCAP, TMA=inputs.tma,
        PRECISION=primitives.dot_precision(inputs.q.dtype), UNIT=unit,
    )  # fmt: skip


@triton.jit
def _queries(
    dk, dv, key, value, q, dout, lse, delta, m, b, h, n, seq_q,
    starts, starts_s, ends, ends_s, positions_q, pos_k, slope,
    q_b, q_s, q_h, do_b, do_s, do_h,
    scale, cap,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CUT: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv."""
    query = load_tile(q, b, h, m, seq_q, q_b, q_s, q_h, BLOCK_M, DIM, DIM_P2, CUT, TMA)
    s = dot(key, tl.trans(query), None, PRECISION)  # transposed: keys are rows
    queries = m + tl.arange(0, BLOCK_M)
    alive = queries < seq_q
    distance = s
    if ALIBI:
        distance = tl.load(positions_q + queries, mask=alive, other=0)[None, :] - pos_k[:, None]
    s, slope_of_score = scores(s, distance, scale, cap, slope, SIMPLE, SOFTCAP, ALIBI)
    if CUT:
        start = tl.load(starts + queries.to(tl.int64) * starts_s, mask=alive, other=0)
        end = tl.load(ends + queries.to(tl.int64) * ends_s, mask=alive, other=0)
        keys = n + tl.arange(0, BLOCK_N)
        visible = (start[None, :] <= keys[:, None]) & (keys[:, None] < end[None, :])
        s = tl.where(visible, s, float("-inf"))
        lse_m = tl.load(lse + queries, mask=alive, other=float("inf"))
    else:
        lse_m = tl.load(lse + queries)
    p = tl.exp2(s * (scale if SIMPLE else 1.0) - lse_m[None, :])
    dout_m = load_tile(dout, b, h, m, seq_q, do_b, do_s, do_h, BLOCK_M, DIM_V, DIM_V_P2, CUT, TMA)
    dp = dot(value, tl.trans(dout_m), None, PRECISION)
    dv = dot(p.to(dout_m.dtype), dout_m, dv, PRECISION)
    delta_m = tl.load(delta + queries, mask=alive, other=0.0) if CUT else tl.load(delta + queries)
    ds = p * (dp - delta_m[None, :])
    if SOFTCAP:
        ds *= slope_of_score
    dk = dot(ds.to(query.dtype), query, dk, PRECISION)
    return dk, dv


_NUMBERS = "n_tiles span_b starts_b ends_b slopes_b rows_b rows_h q_bsh k_bsh v_bsh do_bsh "  # of both


@triton.jit(do_not_specialize=numbers(_NUMBERS + "dk_bsh dv_bsh seq_q kv_heads"))
def _dkdv(
    q, q_b, q_s, q_h, k, k_b, k_s, k_h, v, v_b, v_s, v_h, dout, do_b, do_s, do_h,
    lse, delta, rows_b, rows_h,
    starts, starts_b, starts_s, ends, ends_b, ends_s,
    positions_q, positions_k,
    scale, cap, slopes, slopes_b, softmax_scale,
    dk_out, dk_b, dk_s, dk_h, dv_out, dv_b, dv_s, dv_h,
    rows, span, span_b,
    seq_q, n_tiles, kv_heads,
    HEADS_PER_KV: tl.constexpr,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    ALIBI: tl.constexpr = slopes is not None
    q_b, q_s, q_h = elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT)
    k_b, k_s, k_h = elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT)
    v_b, v_s, v_h = elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT)
    do_b, do_s, do_h = elements(do_b, UNIT), elements(do_s, UNIT), elements(do_h, UNIT)
    pid = tl.program_id(0)
    tile = pid % n_tiles  # the earliest keys, which most queries see, start first
    h_kv = pid // n_tiles
    b, h_kv = h_kv // kv_heads, h_kv % kv_heads
    n, past, begin, full_begin, full_end, stop = load_span(rows, span, tile, b, span_b)

    b64 = b.to(tl.int64)
    starts += b64 * starts_b
    ends += b64 * ends_b
    key = load_tile(k, b, h_kv, n, past, k_b, k_s, k_h, BLOCK_N, DIM, DIM_P2, True, TMA)
    value = load_tile(v, b, h_kv, n, past, v_b, v_s, v_h, BLOCK_N, DIM_V, DIM_V_P2, True, TMA)
    pos_k, slope = n, 0.0
    if ALIBI:
        keys = n + tl.arange(0, BLOCK_N)
        pos_k = tl.load(positions_k + keys, mask=keys < past, other=0)
    dk = tl.zeros([BLOCK_N, DIM_P2], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM_V_P2], tl.float32)
    for g in tl.range(0, HEADS_PER_KV):
        h = h_kv * HEADS_PER_KV + g
        row_of_head = b64 * rows_b + h.to(tl.int64) * rows_h
        if ALIBI:
            slope = tl.load(slopes + b * slopes_b + h)
        for CUT in tl.static_range(2):  # full tiles, then those that the mask cuts
            past_last = full_begin - begin + stop - full_end if CUT else full_end
            for i in tl.range(0 if CUT else bound(full_begin), bound(past_last), BLOCK_M, num_stages=STAGES):
                m = cut_tile(i, begin, full_begin, full_end) if CUT else i
                dk, dv = _queries(
                    dk, dv, key, value, q, dout, lse + row_of_head, delta + row_of_head, m, b, h, n, seq_q,
                    starts, starts_s, ends, ends_s, positions_q, pos_k, slope,
                    q_b, q_s, q_h, do_b, do_s, do_h, scale, cap,
                    DIM, DIM_P2, DIM_V, DIM_V_P2, BLOCK_M, BLOCK_N,
                    SIMPLE, SOFTCAP, ALIBI, CUT, TMA, PRECISION,
                )  # fmt: skip
    dk_b, dk_s, dk_h = elements(dk_b, UNIT), elements(dk_s, UNIT), elements(dk_h, UNIT)
    dv_b, dv_s, dv_h = elements(dv_b, UNIT), elements(dv_s, UNIT), elements(dv_h, UNIT)
    store_tile(dk_out, dk * softmax_scale, b, h_kv, n, past, dk_b, dk_s, dk_h, BLOCK_N, DIM, DIM_P2)
    store_tile(dv_out, dv, b, h_kv, n, past, dv_b, dv_s, dv_h, BLOCK_N, DIM_V, DIM_V_P2)


@triton.jit
def _keys(
    dq, query, dout, k, v, lse, delta, n, b, h_kv, seq_k,
    start, end, pos_q, positions_k, slope,
    k_b, k_s, k_h, v_b, v_s, v_h, scale, cap,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr, BLOCK_N: tl.constexpr,
    SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CUT: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq."""
    key = load_tile(k, b, h_kv, n, seq_k, k_b, k_s, k_h, BLOCK_N, DIM, DIM_P2, CUT, TMA)
    s = dot(query, tl.trans(key), None, PRECISION)
    value = load_tile(v, b, h_kv, n, seq_k, v_b, v_s, v_h, BLOCK_N, DIM_V, DIM_V_P2, CUT, TMA)
    dp = dot(dout, tl.trans(value), None, PRECISION)
    keys = n + tl.arange(0, BLOCK_N)
    distance = s
    if ALIBI:
        distance = pos_q[:, None] - tl.load(positions_k + keys, mask=keys < seq_k, other=0)[None, :]
    s, slope_of_score = scores(s, distance, scale, cap, slope, SIMPLE, SOFTCAP, ALIBI)
    if CUT:
        s = tl.where((start[:, None] <= keys[None, :]) & (keys[None, :] < end[:, None]), s, float("-inf"))
    p = tl.exp2(s * (scale if SIMPLE else 1.0) - lse[:, None])
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds *= slope_of_score
    return dot(ds.to(key.dtype), key, dq, PRECISION)


@triton.jit(do_not_specialize=numbers(_NUMBERS + "dq_bsh seq_k heads"))
def _dq(
    q, q_b, q_s, q_h, k, k_b, k_s, k_h, v, v_b, v_s, v_h, dout, do_b, do_s, do_h,
    lse, delta, rows_b, rows_h,
    starts, starts_b, starts_s, ends, ends_b, ends_s,
    positions_q, positions_k,
    scale, cap, slopes, slopes_b, softmax_scale,
    dq_out, dq_b, dq_s, dq_h,
    rows, span, span_b,
    seq_k, n_tiles, heads,
    HEADS_PER_KV: tl.constexpr,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    ALIBI: tl.constexpr = slopes is not None
    q_b, q_s, q_h = elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT)
    k_b, k_s, k_h = elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT)
    v_b, v_s, v_h = elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT)
    do_b, do_s, do_h = elements(do_b, UNIT), elements(do_s, UNIT), elements(do_h, UNIT)
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles  # the latest queries, which see most keys, start first
    h = pid // n_tiles
    b, h = h // heads, h % heads
    h_kv = h // HEADS_PER_KV
    row, past, begin, full_begin, full_end, stop = load_span(rows, span, tile, b, span_b)
    if begin == stop:
        return

    offs = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    alive = offs < past
    b64 = b.to(tl.int64)
    pos_q, slope = offs, 0.0
    if ALIBI:
        pos_q = tl.load(positions_q + offs, mask=alive, other=0)
        slope = tl.load(slopes + b * slopes_b + h)
    row_of_head = b64 * rows_b + h.to(tl.int64) * rows_h
    lse_m = tl.load(lse + row_of_head + offs, mask=alive, other=float("inf"))
    delta_m = tl.load(delta + row_of_head + offs, mask=alive, other=0.0)
    query = load_tile(q, b, h, row, past, q_b, q_s, q_h, BLOCK_M, DIM, DIM_P2, True, TMA)
    dout_m = load_tile(dout, b, h, row, past, do_b, do_s, do_h, BLOCK_M, DIM_V, DIM_V_P2, True, TMA)

    dq = tl.zeros([BLOCK_M, DIM_P2], tl.float32)
    for n in tl.range(bound(full_begin), bound(full_end), BLOCK_N, num_stages=STAGES):
        dq = _keys(
            dq, query, dout_m, k, v, lse_m, delta_m, n, b, h_kv, seq_k, None, None, pos_q, positions_k, slope,
            k_b, k_s, k_h, v_b, v_s, v_h, scale, cap,
            DIM, DIM_P2, DIM_V, DIM_V_P2, BLOCK_N, SIMPLE, SOFTCAP, ALIBI, False, TMA, PRECISION,
        )  # fmt: skip
    # Only the cut tiles read the intervals; loaded here, they take no registers in the loop above.
    start = tl.load(starts + b64 * starts_b + offs * starts_s, mask=alive, other=0)
    end = tl.load(ends + b64 * ends_b + offs * ends_s, mask=alive, other=0)
    for i in tl.range(0, bound(full_begin - begin + stop - full_end), BLOCK_N, num_stages=STAGES):
        n = cut_tile(i, begin, full_begin, full_end)
        dq = _keys(
            dq, query, dout_m, k, v, lse_m, delta_m, n, b, h_kv, seq_k, start, end, pos_q, positions_k, slope,
            k_b, k_s, k_h, v_b, v_s, v_h, scale, cap,
            DIM, DIM_P2, DIM_V, DIM_V_P2, BLOCK_N, SIMPLE, SOFTCAP, ALIBI, True, TMA, PRECISION,
        )  # fmt: skip
    dq_b, dq_s, dq_h = elements(dq_b, UNIT), elements(dq_s, UNIT), elements(dq_h, UNIT)
    earlier = load_tile(dq_out, b, h, row, past, dq_b, dq_s, dq_h, BLOCK_M, DIM, DIM_P2, True, False)
    store_tile(dq_out, earlier + dq * softmax_scale, b, h, row, past, dq_b, dq_s, dq_h, BLOCK_M, DIM, DIM_P2)
