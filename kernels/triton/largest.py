"""The largest score of each head in portable Triton: the products and masks of the forward, without its softmax.

A forward does not know it: a point of reference may lie near the largest score, and what it moves past is forgotten.
So calls that ask for it pay for one more product per visible pair, and others nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..contract import Keys, Score
from ..launch import dispatch
from . import forward, primitives
from .launch_parameters import padded
from .primitives import (
    LN2,
    ScoreArguments,
    bound,
    cut_tile,
    dot,
    interval_strides,
    load_span,
    load_tile,
    scores,
    tables,
    tile_source,
)
from .strides import elements, stride_unit, strides_in


def largest(q: Tensor, keys: Keys, score: Score) -> Tensor:
    """Return the largest score of each query head, (q_heads,) float32, see :meth:`..backends.Backend.forward`."""
    block = keys.block
    q, k = (primitives.last_contiguous(x) for x in (q, keys.k))
    batch, _, heads, dim = q.shape
    tiles = forward.choose_tiles(q, keys.v)
    rows, span, start, end = tables(block, "query", tiles, q.device)
    positions_q, positions_k = (None, None) if score.alibi_slopes is None else block.positions(q.device)
    tma = all(primitives.has_tma(x) for x in (q, k))
    s, n_tiles, unit = ScoreArguments.of(score), rows.shape[0], stride_unit(q, k)
    top = q.new_empty(batch, heads, n_tiles, dtype=torch.float32)
    with torch.cuda.device_of(q):
        dispatch(
            _largest, (n_tiles * heads * batch,), tile_source(q, tiles.block_m, tma), *strides_in(unit, q),
            tile_source(k, tiles.block_n, tma), *strides_in(unit, k), top,
            rows, span, *interval_strides(span)[:1], start, *interval_strides(start), end, *interval_strides(end),
            positions_q, positions_k,
            s.scale, s.cap, s.slopes, s.slopes_stride,
            k.shape[1], n_tiles, heads,
            HEADS_PER_KV=heads // k.shape[2], DIM=dim, DIM_P2=padded(dim),
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, SOFTCAP=s.SOFTCAP, TMA=tma,
            PRECISION=primitives.dot_precision(q.dtype), STAGES=tiles.num_stages, UNIT=unit,
            num_stages=tiles.num_stages, num_warps=tiles.num_warps,
        )  # fmt: skip
    return top.amax((0, 2))


@triton.jit
def _rows_of_range(
    top, query, k, past, begin, full_begin, full_end, b, h_kv, start, end, pos_q, positions_k, slope, k_b, k_s, k_h,
    scale, cap, seq_k,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    CUT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Raise ``top``, of each row, by the keys ``[full_begin, full_end)``, which all rows see; with CUT by the two cut
    ranges laid end to end, ``past`` keys in all."""
    for i in tl.range(0, bound(past), BLOCK_N, num_stages=STAGES):
        n = full_begin + i
        if CUT:
            n = cut_tile(i, begin, full_begin, full_end)
        key = load_tile(k, b, h_kv, n, seq_k, k_b, k_s, k_h, BLOCK_N, DIM, DIM_P2, CUT, TMA)
        s = dot(query, tl.trans(key), None, PRECISION)
        nth = tl.arange(0, BLOCK_N)
        distance = s
        if ALIBI:
            distance = pos_q[:, None] - tl.load(positions_k + n + nth, mask=nth < seq_k - n, other=0)[None, :]
        s, _ = scores(s, distance, scale, cap, slope, False, SOFTCAP, ALIBI)
        if CUT:
            s = tl.where(((start - n)[:, None] <= nth[None, :]) & (nth[None, :] < (end - n)[:, None]), s, float("-inf"))
        top = tl.maximum(top, tl.max(s, 1))
    return top


# These vary with the sequence length. Do not compile a second kernel when one happens to be divisible by 16.
_NUMBERS = (
    "seq_k", "n_tiles", "heads", "span_b", "starts_b", "ends_b", "slopes_b",
    *(f"{x}_{dim}" for x in "qk" for dim in "bsh"),
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _largest(
    q, q_b, q_s, q_h, k, k_b, k_s, k_h, out,
    rows, span, span_b,
    starts, starts_b, starts_s, ends, ends_b, ends_s,
    positions_q, positions_k,
    scale, cap, slopes, slopes_b,
    seq_k, n_tiles, heads,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    ALIBI: tl.constexpr = slopes is not None
    q_b, q_s, q_h = elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT)
    k_b, k_s, k_h = elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT)
    pid = tl.program_id(0)
    tile, h, b = n_tiles - 1 - pid % n_tiles, pid // n_tiles % heads, pid // n_tiles // heads
    h_kv = h // HEADS_PER_KV
    row, past, begin, full_begin, full_end, stop = load_span(rows, span, tile, b, span_b)
    offs = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    alive = offs < past
    pos_q, slope = offs, 0.0
    if ALIBI:
        pos_q = tl.load(positions_q + offs, mask=alive, other=0)
        slope = tl.load(slopes + b * slopes_b + h)
    query = load_tile(q, b, h, row, past, q_b, q_s, q_h, BLOCK_M, DIM, DIM_P2, True, TMA)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top = _rows_of_range(
        top, query, k, full_end - full_begin, begin, full_begin, full_end, b, h_kv, None, None, pos_q, positions_k,
        slope, k_b, k_s, k_h, scale, cap, seq_k,
        DIM, DIM_P2, BLOCK_N, SOFTCAP, ALIBI, False, TMA, PRECISION, STAGES,
    )  # fmt: skip
    start = tl.load(starts + b.to(tl.int64) * starts_b + offs * starts_s, mask=alive, other=0)
    end = tl.load(ends + b.to(tl.int64) * ends_b + offs * ends_s, mask=alive, other=0)
    top = _rows_of_range(
        top, query, k, full_begin - begin + stop - full_end, begin, full_begin, full_end, b, h_kv, start, end, pos_q,
        positions_k, slope, k_b, k_s, k_h, scale, cap, seq_k,
        DIM, DIM_P2, BLOCK_N, SOFTCAP, ALIBI, True, TMA, PRECISION, STAGES,
    )  # fmt: skip
    top = tl.where(alive, top, float("-inf"))  # the last tile of a segment reads rows of the next one
    tl.store(out + (b.to(tl.int64) * heads + h) * n_tiles + tile, tl.max(top, 0) * LN2)
