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

from .. import contract
from ..contract import Keys, Score
from ..launch import dispatch
from . import backward_large, primitives
from .backward_inputs import Inputs
from .launch_parameters import Passes, Tiles, WideTiles, row_of
from .primitives import (
    Constants,
    Queries,
    ScoreArguments,
    Strided,
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


def backward(queries: contract.Queries, keys: Keys, score: Score, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one chunk of keys and add to dq, see :meth:`..backends.Backend.backward`."""
    return key_gradients(queries, keys, score, dq)


def query_gradients(queries: contract.Queries, keys: Keys, score: Score, dq: Tensor) -> None:
    """Add to dq, see :meth:`..backends.Backend.query_gradients`."""
    inputs = Inputs.of(queries, keys, score)
    tiles = choose_tiles(inputs.q, inputs.v)
    if isinstance(tiles, WideTiles):
        backward_large.add_gradients(inputs, tiles, dq, None)
    else:
        _add_query_gradients(inputs, tiles.dq, dq)


def key_gradients(
    queries: contract.Queries, keys: Keys, score: Score, dq: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return dk and dv, see :meth:`..backends.Backend.key_gradients`, and add to dq if given."""
    inputs = Inputs.of(queries, keys, score)
    tiles = choose_tiles(inputs.q, inputs.v)
    if isinstance(tiles, WideTiles):
        return backward_large.gradients(inputs, tiles, dq)
    dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (inputs.k, inputs.v))
    _launch(_dkdv, "key", inputs, tiles.dkdv, dk, dv)
    if dq is not None:
        _add_query_gradients(inputs, tiles.dq, dq)
    return dk, dv


def _add_query_gradients(inputs: Inputs, tiles: Tiles, dq: Tensor) -> None:
    contiguous = primitives.last_contiguous(dq)
    _launch(_dq, "query", inputs, tiles, contiguous)
    if contiguous is not dq:
        dq.copy_(contiguous)


def _launch(kernel: Any, side: str, inputs: Inputs, tiles: Tiles, *outputs: Tensor) -> None:
    """Launch one of the kernels, whose programs own tiles of queries or of keys."""
    q, k, v, dout, lse2, delta, block, score = inputs
    rows, span, start, end = tables(block, side, tiles, q.device)
    unit, s = stride_unit(q, k, v, dout, *outputs), ScoreArguments.of(score)
    heads, others = (q.shape[2], k.shape[1]) if side == "query" else (k.shape[2], q.shape[1])
    sources = ((q, tiles.block_m), (k, tiles.block_n), (v, tiles.block_n), (dout, tiles.block_m))
    with torch.cuda.device_of(q):
        dispatch(
            kernel, (rows.shape[0] * heads * q.shape[0],),
            *(arg for x, n in sources for arg in (tile_source(x, n, inputs.tma), *strides_in(unit, x))),
            lse2, delta, q.shape[2] * q.shape[1], q.shape[1],
            start, *interval_strides(start), end, *interval_strides(end),
            *((None, None) if s.slopes is None else block.positions(q.device)),
            s.scale, s.cap, s.slopes, s.slopes_stride, score.softmax_scale,
            *(arg for x in outputs for arg in (x, *strides_in(unit, x))),
            rows, span, *interval_strides(span)[:1], others, rows.shape[0], heads,
            HEADS_PER_KV=q.shape[2] // k.shape[2], UNIT=unit, C=Constants.of(q, v, tiles, s, inputs.tma),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip


@triton.jit
def _add_queries(dk, dv, keys, queries, lse, delta, m, b, h, slope, scale, cap, C: tl.constexpr, CUT: tl.constexpr):
    """Add one tile of queries to dk and dv."""
    key, value, n, pos_k = keys
    q, dout, starts, starts_s, ends, ends_s, positions_q, seq_q = queries
    query = load_tile(q, b, h, m, seq_q, C.BLOCK_M, C.DIM, C.DIM_P2, CUT, C.TMA)
    s = dot(key, tl.trans(query), None)  # transposed: keys are rows
    nth = m + tl.arange(0, C.BLOCK_M)
    alive = nth < seq_q
    distance = s
    if C.ALIBI:
        distance = tl.load(positions_q + nth, mask=alive, other=0)[None, :] - pos_k[:, None]
    s, slope_of_score = scores(s, distance, scale, cap, slope, C.SIMPLE, C.SOFTCAP, C.ALIBI)
    if CUT:
        start = tl.load(starts + nth.to(tl.int64) * starts_s, mask=alive, other=0)
        end = tl.load(ends + nth.to(tl.int64) * ends_s, mask=alive, other=0)
        columns = n + tl.arange(0, C.BLOCK_N)
        visible = (start[None, :] <= columns[:, None]) & (columns[:, None] < end[None, :])
        s = tl.where(visible, s, float("-inf"))
        lse_m = tl.load(lse + nth, mask=alive, other=float("inf"))
    else:
        lse_m = tl.load(lse + nth)
    p = tl.exp2(s * (scale if C.SIMPLE else 1.0) - lse_m[None, :])
    dout_m = load_tile(dout, b, h, m, seq_q, C.BLOCK_M, C.DIM_V, C.DIM_V_P2, CUT, C.TMA)
    dp = dot(value, tl.trans(dout_m), None)
    dv = dot(p.to(dout_m.dtype), dout_m, dv)
    delta_m = tl.load(delta + nth, mask=alive, other=0.0) if CUT else tl.load(delta + nth)
    ds = p * (dp - delta_m[None, :])
    if C.SOFTCAP:
        ds *= slope_of_score
    dk = dot(ds.to(query.dtype), query, dk)
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
    HEADS_PER_KV: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = C.BLOCK_N
    DIM_P2: tl.constexpr = C.DIM_P2
    DIM_V_P2: tl.constexpr = C.DIM_V_P2
    q = Strided(q, elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT))
    k = Strided(k, elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT))
    v = Strided(v, elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT))
    dout = Strided(dout, elements(do_b, UNIT), elements(do_s, UNIT), elements(do_h, UNIT))
    pid = tl.program_id(0)
    tile = pid % n_tiles  # the earliest keys, which most queries see, start first
    h_kv = pid // n_tiles
    b, h_kv = h_kv // kv_heads, h_kv % kv_heads
    n, past, begin, full_begin, full_end, stop = load_span(rows, span, tile, b, span_b)

    b64 = b.to(tl.int64)
    starts += b64 * starts_b
    ends += b64 * ends_b
    key = load_tile(k, b, h_kv, n, past, BLOCK_N, C.DIM, DIM_P2, True, C.TMA)
    value = load_tile(v, b, h_kv, n, past, BLOCK_N, C.DIM_V, DIM_V_P2, True, C.TMA)
    pos_k, slope = n, 0.0
    if C.ALIBI:
        keys = n + tl.arange(0, BLOCK_N)
        pos_k = tl.load(positions_k + keys, mask=keys < past, other=0)
    of_keys = (key, value, n, pos_k)
    dk = tl.zeros([BLOCK_N, DIM_P2], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM_V_P2], tl.float32)
    for g in tl.range(0, HEADS_PER_KV):
        h = h_kv * HEADS_PER_KV + g
        row_of_head = b64 * rows_b + h.to(tl.int64) * rows_h
        if C.ALIBI:
            slope = tl.load(slopes + b * slopes_b + h)
        for CUT in tl.static_range(2):  # full tiles, then those that the mask cuts
            past_last = full_begin - begin + stop - full_end if CUT else full_end
            for i in tl.range(0 if CUT else bound(full_begin), bound(past_last), C.BLOCK_M, num_stages=C.STAGES):
                m = cut_tile(i, begin, full_begin, full_end) if CUT else i
                dk, dv = _add_queries(
                    dk, dv, of_keys, (q, dout, starts, starts_s, ends, ends_s, positions_q, seq_q), lse + row_of_head,
                    delta + row_of_head, m, b, h, slope, scale, cap, C, CUT,
                )  # fmt: skip
    dk_out = Strided(dk_out, elements(dk_b, UNIT), elements(dk_s, UNIT), elements(dk_h, UNIT))
    dv_out = Strided(dv_out, elements(dv_b, UNIT), elements(dv_s, UNIT), elements(dv_h, UNIT))
    store_tile(dk_out, dk * softmax_scale, b, h_kv, n, past, BLOCK_N, C.DIM, DIM_P2)
    store_tile(dv_out, dv, b, h_kv, n, past, BLOCK_N, C.DIM_V, DIM_V_P2)


@triton.jit
def _add_keys(dq, queries, dout, lse, delta, keys, n, b, h_kv, scale, cap, C: tl.constexpr, CUT: tl.constexpr):
    """Add one tile of keys to dq."""
    k, v, positions_k, seq_k = keys
    key = load_tile(k, b, h_kv, n, seq_k, C.BLOCK_N, C.DIM, C.DIM_P2, CUT, C.TMA)
    s = dot(queries.q, tl.trans(key), None)
    value = load_tile(v, b, h_kv, n, seq_k, C.BLOCK_N, C.DIM_V, C.DIM_V_P2, CUT, C.TMA)
    dp = dot(dout, tl.trans(value), None)
    nth = n + tl.arange(0, C.BLOCK_N)
    distance = s
    if C.ALIBI:
        distance = queries.positions[:, None] - tl.load(positions_k + nth, mask=nth < seq_k, other=0)[None, :]
    s, slope_of_score = scores(s, distance, scale, cap, queries.slope, C.SIMPLE, C.SOFTCAP, C.ALIBI)
    if CUT:
        visible = (queries.start[:, None] <= nth[None, :]) & (nth[None, :] < queries.end[:, None])
        s = tl.where(visible, s, float("-inf"))
    p = tl.exp2(s * (scale if C.SIMPLE else 1.0) - lse[:, None])
    ds = p * (dp - delta[:, None])
    if C.SOFTCAP:
        ds *= slope_of_score
    return dot(ds.to(key.dtype), key, dq)


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
    HEADS_PER_KV: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = C.BLOCK_M
    DIM_P2: tl.constexpr = C.DIM_P2
    q = Strided(q, elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT))
    k = Strided(k, elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT))
    v = Strided(v, elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT))
    dout = Strided(dout, elements(do_b, UNIT), elements(do_s, UNIT), elements(do_h, UNIT))
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
    if C.ALIBI:
        pos_q = tl.load(positions_q + offs, mask=alive, other=0)
        slope = tl.load(slopes + b * slopes_b + h)
    row_of_head = b64 * rows_b + h.to(tl.int64) * rows_h
    lse_m = tl.load(lse + row_of_head + offs, mask=alive, other=float("inf"))
    delta_m = tl.load(delta + row_of_head + offs, mask=alive, other=0.0)
    query = load_tile(q, b, h, row, past, BLOCK_M, C.DIM, DIM_P2, True, C.TMA)
    dout_m = load_tile(dout, b, h, row, past, BLOCK_M, C.DIM_V, C.DIM_V_P2, True, C.TMA)

    dq = tl.zeros([BLOCK_M, DIM_P2], tl.float32)
    keys, queries = (k, v, positions_k, seq_k), Queries(query, None, None, pos_q, slope)
    for n in tl.range(bound(full_begin), bound(full_end), C.BLOCK_N, num_stages=C.STAGES):
        dq = _add_keys(dq, queries, dout_m, lse_m, delta_m, keys, n, b, h_kv, scale, cap, C, False)
    # Only the cut tiles read the intervals; loaded here, they take no registers in the loop above.
    start = tl.load(starts + b64 * starts_b + offs * starts_s, mask=alive, other=0)
    end = tl.load(ends + b64 * ends_b + offs * ends_s, mask=alive, other=0)
    queries = Queries(query, start, end, pos_q, slope)
    for i in tl.range(0, bound(full_begin - begin + stop - full_end), C.BLOCK_N, num_stages=C.STAGES):
        n = cut_tile(i, begin, full_begin, full_end)
        dq = _add_keys(dq, queries, dout_m, lse_m, delta_m, keys, n, b, h_kv, scale, cap, C, True)
    dq_out = Strided(dq_out, elements(dq_b, UNIT), elements(dq_s, UNIT), elements(dq_h, UNIT))
    earlier = load_tile(dq_out, b, h, row, past, BLOCK_M, C.DIM, DIM_P2, True, False)
    store_tile(dq_out, earlier + dq * softmax_scale, b, h, row, past, BLOCK_M, C.DIM, DIM_P2)
