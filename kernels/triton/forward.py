"""The forward kernel in portable Triton: any GPU that Triton supports, and Triton's interpreter on the CPU.

One program owns a tile of queries of one head and walks the keys that the tile sees::

    full tiles   [full_begin, full_end)                      no mask in the loop
    cut tiles    [begin, full_begin) and [full_end, end)     masked by the queries' intervals

with ``(m, l, o)`` in registers from the first key to the last: read from the carried state (or empty, or holding the
sink), and written back as the state, or divided and rounded to ``out`` and ``lse``. Neither needs a second pass.
Causal, windows, documents and padding are all expressed by the ranges and the intervals.

Tiles with the latest queries start first: under a causal mask these are the long ones. The tiles of one head run next
to each other, and the heads of one group after each other, because they read the same keys.

Shapes and contract: contract.py. Method: Dao 2023 (arXiv:2307.08691); Triton's fused attention tutorial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl

from ...partial import Partial
from .. import rehearsal
from ..contract import PERIOD, Block, Keys, Result, Score
from ..launch import dispatch
from . import primitives
from .launch_parameters import Tiles, row_of
from .primitives import (
    LN2,
    LOG2E,
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
    softmax_step,
    store_tile,
    tables,
    tile_source,
    to_base2,
    to_natural,
    unsupported,
)
from .strides import elements, numbers, stride_unit, strides_in

__all__ = ["forward", "unsupported"]


def choose_tiles(q: Tensor, v: Tensor) -> Tiles:
    """Return the launch parameters for these tensors."""
    return row_of(q, v, primitives.capability(q.device)).forward


def forward(q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`..backends.Backend.forward`. A carried state is updated in place."""
    batch, seq_q, heads, _ = q.shape
    dim_v = keys.v.shape[-1]
    carried = None if state is None else Partial(state.m, state.l, primitives.last_contiguous(state.o))
    result: Partial | Result
    if finalize:
        lse = q.new_empty(batch, heads, seq_q, dtype=torch.float32)
        result = Result(q.new_empty(batch, seq_q, heads, dim_v), lse)
        outputs: tuple[Tensor | None, ...] = (lse, None, result.out)
    elif carried is not None:
        result, outputs = carried, tuple(carried)
    else:
        m = q.new_empty(batch, heads, seq_q, dtype=torch.float32)
        result = Partial(m, torch.empty_like(m), q.new_empty(batch, seq_q, heads, dim_v, dtype=torch.float32))
        outputs = tuple(result)
    _launch(q, keys, primitives.last_contiguous(keys.v), score, carried, outputs, finalize)
    return result


def largest(q: Tensor, keys: Keys, score: Score) -> Tensor:
    """Return the largest score of each query head, (q_heads,) float32: the forward's walk over keys without values.

    A forward does not tell: a point of reference may lie near the largest score only. So calls that ask for it pay for
    one more product per visible pair, and others nothing."""
    top = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    _launch(q, keys, None, score.without_sink(), None, (top, None, None), False)
    return top.amax((0, 2))


def _launch(
    q: Tensor, keys: Keys, v: Tensor | None, score: Score, carried: Partial | None, outputs: tuple[Tensor | None, ...],
    finalize: bool,
) -> None:  # fmt: skip
    """Launch the kernel, which stores (m, l, o), or (lse, None, out), in ``outputs``; without values m alone."""
    block, sink = keys.block, score.sink if carried is None else None
    q, k = (primitives.last_contiguous(x) for x in (q, keys.k))
    batch, _, heads, _ = q.shape
    tiles = choose_tiles(q, keys.v)
    rows, span, start, end = tables(block, "query", tiles, q.device)
    positions_q, positions_k = (None, None) if score.alibi_slopes is None else block.positions(q.device)
    tma = all(primitives.has_tma(x) for x in (q, k, v) if x is not None)
    s = ScoreArguments.of(score)
    group = tiles.group if heads % tiles.group == 0 else 1
    unit = stride_unit(q, k, v, None if carried is None else carried.o, outputs[2])
    # float32 products are accumulated outside of the tensor cores, with rounding
    period = 0 if q.dtype == torch.float32 or v is None else block.period
    n_tiles = rows.shape[0]
    with torch.cuda.device_of(q):
        dispatch(
            _forward, (n_tiles * heads * batch,), tile_source(q, tiles.block_m, tma), *strides_in(unit, q),
            tile_source(k, tiles.block_n, tma), *strides_in(unit, k),
            None if v is None else tile_source(v, tiles.block_n, tma), *strides_in(unit, v),
            *_with_strides(unit, *(carried or (None, None, None))), *_with_strides(unit, *outputs),
            sink if sink is None else sink.contiguous(),
            rows, span, *interval_strides(span)[:1], start, *interval_strides(start), end, *interval_strides(end),
            positions_q, positions_k,
            s.scale, s.cap, s.slopes, s.slopes_stride,
            k.shape[1], n_tiles, heads,
            GROUP=group, HEADS_PER_KV=heads // k.shape[2], FINALIZE=finalize, PERIOD=period, UNIT=unit,
            C=Constants.of(q, keys.v, tiles, s, tma), num_stages=tiles.num_stages, num_warps=tiles.num_warps,
            variants=None if v is None else lambda: _variants(q, block, score),
            rehearse=None if v is None else lambda: rehearsal.backward("triton", q, keys, score),
        )  # fmt: skip


def _with_strides(unit: int, m: Tensor | None, l: Tensor | None, o: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments for m, l and o: each with three strides."""
    return m, *strides_in(1, m), l, *strides_in(1, l), o, *strides_in(unit, o)


def _variants(q: Tensor, block: Block, score: Score) -> list[dict[str, Any]]:
    """Return how a launch may differ with other documents: with and without a state, complete or not, a longer sum."""
    periods = [dict(PERIOD=period) for period in ((0, PERIOD) if block.long and q.dtype != torch.float32 else ())]
    if not block.chunked:
        return periods
    row = torch.empty(4, dtype=torch.float32, device=q.device)
    out = torch.empty(4, dtype=q.dtype, device=q.device)
    carried: dict[str, Any] = dict(m_in=row, l_in=row, o_in=row, sink=None)
    sink = None if score.sink is None else score.sink.contiguous()
    first: dict[str, Any] = dict(m_in=None, l_in=None, o_in=None, sink=sink)
    complete = dict(m_out=row, l_out=None, o_out=out, FINALIZE=True)
    partial = dict(m_out=row, l_out=row, o_out=row, FINALIZE=False)
    return [{**a, **b, **c} for a in (first, carried) for b in (partial, complete) for c in periods or [{}]]


@triton.jit
def _keys(m, l, o, queries, keys, n, b, h_kv, scale, cap, C: tl.constexpr, CUT: tl.constexpr):
    """Update (m, l, o) with one tile of keys, m alone without values. ``queries``: see :class:`Queries`."""
    k, v, positions_k, seq_k = keys
    key = load_tile(k, b, h_kv, n, seq_k, C.BLOCK_N, C.DIM, C.DIM_P2, CUT, C.TMA)
    s = dot(queries.q, tl.trans(key), None)
    nth = tl.arange(0, C.BLOCK_N)
    distance = s
    if C.ALIBI:
        distance = queries.positions[:, None] - tl.load(positions_k + n + nth, mask=nth < seq_k - n, other=0)[None, :]
    s, _ = scores(s, distance, scale, cap, queries.slope, C.SIMPLE, C.SOFTCAP, C.ALIBI)
    if CUT:
        visible = ((queries.start - n)[:, None] <= nth[None, :]) & (nth[None, :] < (queries.end - n)[:, None])
        s = tl.where(visible, s, float("-inf"))
    if v.source is None:
        m = tl.maximum(m, tl.max(s, 1) * (scale if C.SIMPLE else 1.0))
    else:
        p, kept, m = softmax_step(s, m, scale if C.SIMPLE else 1.0)
        o = o * kept[:, None]
        value = load_tile(v, b, h_kv, n, seq_k, C.BLOCK_N, C.DIM_V, C.DIM_V_P2, CUT, C.TMA)
        o = dot(p.to(value.dtype), value, o)
        l = l * kept + tl.sum(p, 1)  # overlaps the product, which is asynchronous
    return m, l, o


@triton.jit
def _range_of_keys(
    m, l, o, flushed, queries, keys, first, past, cut, b, h_kv, scale, cap, C: tl.constexpr, PERIOD: tl.constexpr
):
    """Update (m, l, o) with keys ``[first, past)``, which every row sees; or, if ``cut`` has the numbers of
    :func:`cut_tile`, with those of the two cut ranges laid end to end, of which each row sees those from ``start`` to
    ``end``. After each PERIOD keys, if not 0, o is flushed into ``flushed``, see Block.period."""
    if PERIOD:
        for some in tl.range(first, bound(past), PERIOD):
            m_flushed = m
            stop = tl.minimum(some + PERIOD, past)
            m, l, o, _ = _range_of_keys(m, l, o, flushed, queries, keys, some, stop, cut, b, h_kv, scale, cap, C, 0)
            # The point of reference of the flushed sum is the earlier m, that of o the current one.
            kept = tl.exp2(m_flushed - tl.where(m == float("-inf"), 0.0, m))
            flushed = flushed * kept[:, None] + o
            o = tl.zeros_like(o)
    else:
        for i in tl.range(first, bound(past), C.BLOCK_N, num_stages=C.STAGES):
            n = i
            if len(cut) > 0:
                n = cut_tile(i, *cut)
            m, l, o = _keys(m, l, o, queries, keys, n, b, h_kv, scale, cap, C, len(cut) > 0)
    return m, l, o, flushed


_NUMBERS = (
    "seq_k n_tiles heads span_b starts_b ends_b slopes_b q_bsh k_bsh v_bsh m_in_bsh l_in_bsh o_in_bsh m_bsh l_bsh o_bsh"
)


@triton.jit(do_not_specialize=numbers(_NUMBERS))
def _forward(
    q, q_b, q_s, q_h, k, k_b, k_s, k_h, v, v_b, v_s, v_h,
    m_in, m_in_b, m_in_h, m_in_s, l_in, l_in_b, l_in_h, l_in_s, o_in, o_in_b, o_in_s, o_in_h,
    m_out, m_b, m_h, m_s, l_out, l_b, l_h, l_s, o_out, o_b, o_s, o_h,
    sink,
    rows, span, span_b,
    starts, starts_b, starts_s, ends, ends_b, ends_s,
    positions_q, positions_k,
    scale, cap, slopes, slopes_b,
    seq_k, n_tiles, heads,
    GROUP: tl.constexpr, HEADS_PER_KV: tl.constexpr, FINALIZE: tl.constexpr, PERIOD: tl.constexpr, UNIT: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    CARRIED: tl.constexpr = m_in is not None
    BLOCK_M: tl.constexpr = C.BLOCK_M
    DIM_V_P2: tl.constexpr = C.DIM_V_P2
    q = Strided(q, elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT))
    k = Strided(k, elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT))
    v = Strided(v, elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT))
    keys = (k, v, positions_k, seq_k)
    o_in = Strided(o_in, elements(o_in_b, UNIT), elements(o_in_s, UNIT), elements(o_in_h, UNIT))
    o_out = Strided(o_out, elements(o_b, UNIT), elements(o_s, UNIT), elements(o_h, UNIT))
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid // GROUP % n_tiles
    h = pid // GROUP // n_tiles * GROUP + pid % GROUP
    b, h = h // heads, h % heads
    h_kv = h // HEADS_PER_KV
    row, past, begin, full_begin, full_end, stop = load_span(rows, span, tile, b, span_b)
    if CARRIED and not FINALIZE and sink is None and begin == stop:
        return  # a carried state that sees nothing here stays as it is

    offs = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    alive = offs < past
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    pos_q, slope = offs, 0.0
    if C.ALIBI:
        pos_q = tl.load(positions_q + offs, mask=alive, other=0)
        slope = tl.load(slopes + b * slopes_b + h)
    query = load_tile(q, b, h, row, past, BLOCK_M, C.DIM, C.DIM_P2, True, C.TMA)

    if CARRIED:
        m = tl.load(m_in + b64 * m_in_b + h64 * m_in_h + offs * m_in_s, mask=alive, other=float("-inf"))
        l = tl.load(l_in + b64 * l_in_b + h64 * l_in_h + offs * l_in_s, mask=alive, other=0.0)
        o = load_tile(o_in, b, h, row, past, BLOCK_M, C.DIM_V, DIM_V_P2, True, False)
        m, factor = to_base2(m)
        l *= factor
        o *= factor[:, None]
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, DIM_V_P2], tl.float32)
    if sink is not None:  # a key with this score and a value of zero
        logit = tl.load(sink + h).to(tl.float32) * LOG2E
        p, kept, m = softmax_step(tl.zeros([BLOCK_M, 1], tl.float32) + logit, m, 1.0)
        l = l * kept + tl.sum(p, 1)
        o = o * kept[:, None]

    flushed = o
    if PERIOD:
        o = tl.zeros_like(o)
    queries = Queries(query, None, None, pos_q, slope)
    m, l, o, flushed = _range_of_keys(
        m, l, o, flushed, queries, keys, bound(full_begin), full_end, (), b, h_kv, scale, cap, C, PERIOD
    )
    # Only the cut tiles read the intervals; loaded here, they take no registers in the loop above.
    start = tl.load(starts + b64 * starts_b + offs * starts_s, mask=alive, other=0)
    end = tl.load(ends + b64 * ends_b + offs * ends_s, mask=alive, other=0)
    queries = Queries(query, start, end, pos_q, slope)
    cut = (begin, full_begin, full_end)
    m, l, o, flushed = _range_of_keys(
        m, l, o, flushed, queries, keys, 0, full_begin - begin + stop - full_end, cut, b, h_kv, scale, cap, C, PERIOD
    )
    if PERIOD:
        o = flushed

    m_ptr = m_out + b64 * m_b + h64 * m_h + offs * m_s
    if FINALIZE:
        tl.store(m_ptr, tl.where(l == 0, float("-inf"), (m + tl.log2(l)) * LN2), mask=alive)
        o = o / tl.where(l == 0, 1.0, l)[:, None]
    else:
        m, factor = to_natural(m)
        tl.store(m_ptr, m, mask=alive)
        if l_out is not None:
            tl.store(l_out + b64 * l_b + h64 * l_h + offs * l_s, l * factor, mask=alive)
        o *= factor[:, None]
    if o_out.source is not None:
        store_tile(o_out, o, b, h, row, past, BLOCK_M, C.DIM_V, DIM_V_P2)
