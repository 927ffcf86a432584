"""The kernel in plain torch: any device, any dtype up to float64. The executable specification.

Blocked over queries and keys, so that no seq_q x seq_k matrix ever exists. Shapes and contract: :mod:`.contract`.

The products of a BLAS round differently for other numbers of rows, but not for other contents of the other rows. So in
ordered blocks every tile is whole: what is shorter is padded with rows that see nothing and are not returned. On AMD's
processors they need ``MKL_CBWR=COMPATIBLE``, set before torch is loaded, for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..partial import Partial, initial
from .contract import GRID, Block, Keys, Queries, Result, Score, accumulation_dtype

_BLOCK = 512  # queries and keys per tile


class _Tile(NamedTuple):
    """Queries and keys of which a pair is visible. ``hidden``: the others, (batch or 1, 1, m, n), None if there are
    none."""

    rows: slice
    cols: slice
    hidden: Tensor | None


def forward(q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`.backends.Backend.forward`. The carried state is not overwritten."""
    v, block, rows_of_q = keys.v, keys.block, q.shape[1]
    if block.ordered:
        assert state is None
        q, keys = _whole(q, 1), keys._replace(block=_whole_tiles_of_queries(block))
        block = keys.block
    if state is None:
        state = initial(q, v, score.sink)
    m, l, o = (x.clone() for x in state)
    dtype = m.dtype
    for tile in _tiles(block, q.device):
        rows, cols, _ = tile
        s, _ = _scores(q, keys, score, tile)
        m_old = m[:, :, rows]
        m_new = torch.maximum(m_old, s.amax(-1))
        reference = torch.where(m_new == float("-inf"), 0.0, m_new)  # empty + empty stays empty
        p = torch.exp(s - reference[..., None])
        alpha = torch.exp(m_old - reference)
        m[:, :, rows] = m_new
        l[:, :, rows] = l[:, :, rows] * alpha + p.sum(-1)
        o[:, rows] = o[:, rows] * _per_row(alpha) + _grouped(p, v[:, cols].to(dtype)).transpose(1, 2)

    if not finalize:
        return Partial(m[..., :rows_of_q], l[..., :rows_of_q], o[:, :rows_of_q])
    out, lse = Partial(m, l, o).finalize()
    return Result(out[:, :rows_of_q].to(q.dtype), lse[..., :rows_of_q])


def largest(q: Tensor, keys: Keys, score: Score) -> Tensor:
    """Return the largest score of each query head, (q_heads,), -inf where no pair is visible."""
    dtype = accumulation_dtype(q)
    top = torch.full((q.shape[2],), float("-inf"), dtype=dtype, device=q.device)
    for tile in _tiles(keys.block, q.device) if 0 not in q.shape else ():
        s, _ = _scores(q, keys, score, tile)
        top = torch.maximum(top, s.amax((0, 2, 3)))
    return top


def backward(queries: Queries, keys: Keys, score: Score, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one chunk of keys and add to dq, with the same bits on every run."""
    dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (keys.k, keys.v))
    _add_gradients(queries, keys, score, dq, (dk, dv))
    return dk, dv


def query_gradients(queries: Queries, keys: Keys, score: Score, dq: Tensor) -> None:
    """Add to dq, see :meth:`.backends.Backend.query_gradients`."""
    count = dq.shape[1]
    queries = Queries(*(_whole(x, dim) for x, dim in zip(queries, (1, 1, 2, 2), strict=True)))
    total = _whole(dq, 1)
    _add_gradients(queries, keys._replace(block=_whole_tiles_of_queries(keys.block)), score, total, None)
    dq.copy_(total[:, :count])


def key_gradients(queries: Queries, keys: Keys, score: Score) -> tuple[Tensor, Tensor]:
    """Return dk and dv, see :meth:`.backends.Backend.key_gradients`."""
    block, count = keys.block, keys.k.shape[1]
    k, v = (_whole(x, 1) for x in (keys.k, keys.v))
    block = replace(block, positions_k=_whole(block.positions_k, 0), segments_k=(k.shape[1],))
    dtype = accumulation_dtype(k)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    _add_gradients(queries, Keys(k, v, block), score, None, (dk, dv))
    return dk[:, :count], dv[:, :count]


def _add_gradients(
    queries: Queries, keys: Keys, score: Score, dq: Tensor | None, dkdv: tuple[Tensor, Tensor] | None
) -> None:
    """Add the gradients of one chunk to those of dq, dk and dv that are asked for."""
    q, dout, lse, delta = queries
    k, v, block, _ = keys
    dtype = accumulation_dtype(q)
    lse = torch.where(lse == float("-inf"), float("inf"), lse)  # rows that see nothing get p = 0
    for tile in _tiles(block, q.device):
        rows, cols, _ = tile
        s, slope = _scores(q, keys, score, tile)
        p = torch.exp(s - lse[:, :, rows, None])
        dout_rows = dout[:, rows].to(dtype).transpose(1, 2)
        dp = _grouped(dout_rows, v[:, cols].to(dtype), transpose=True)
        ds = p * (dp - delta[:, :, rows, None]) * slope * score.softmax_scale
        if dq is not None:
            dq[:, rows] += _grouped(ds, k[:, cols].to(dtype)).transpose(1, 2)
        if dkdv is not None:
            dk, dv = dkdv
            dk[:, cols] += _over_group(ds, q[:, rows].to(dtype).transpose(1, 2), k.shape[2])
            dv[:, cols] += _over_group(p, dout_rows, k.shape[2])


def _whole(x: Tensor, dim: int) -> Tensor:
    """Return x, padded to whole tiles along ``dim``."""
    return pad(x, (0, 0) * (x.ndim - dim - 1) + (0, -x.shape[dim] % GRID))


def _whole_tiles_of_queries(block: Block) -> Block:
    start, end = (_whole(x, 1) for x in (block.start, block.end))
    return replace(block, start=start, end=end, positions_q=_whole(block.positions_q, 0), segments_q=(start.shape[1],))


def _tiles(block: Block, device: torch.device) -> Iterator[_Tile]:
    """Yield the tiles in which any pair of the batch is visible."""
    size = GRID if block.ordered else _BLOCK
    tiles = block.query_tiles(size, size)
    spans = tiles.span.cpu()
    begin, end = spans[..., 0], spans[..., 3]
    nonempty = end > begin
    start, stop = block.intervals(device)
    first = torch.where(nonempty, begin, block.seq_k).amin(0).tolist()
    last = end.amax(0).tolist()
    full_begin, full_end = spans[..., 1].amax(0).tolist(), spans[..., 2].amin(0).tolist()
    for tile, (row, row_end) in enumerate(tiles.rows.tolist()):
        rows = slice(row, row_end)
        for col in range(first[tile], last[tile], size):
            cols = slice(col, min(col + size, block.seq_k))
            if full_begin[tile] <= col and col + size <= full_end[tile]:
                yield _Tile(rows, cols, None)
                continue
            n = torch.arange(cols.start, cols.stop, device=device)
            visible = (start[:, rows, None] <= n) & (n < stop[:, rows, None])
            yield _Tile(rows, cols, ~visible[:, None])


def _scores(q: Tensor, keys: Keys, score: Score, tile: _Tile) -> tuple[Tensor, Tensor | float]:
    """Return scores (batch, q_heads, m, n), -inf where hidden, and their derivative by the scaled product."""
    k, _, block, _ = keys
    rows, cols, hidden = tile
    dtype = accumulation_dtype(q)
    q_rows = q[:, rows].to(dtype).transpose(1, 2)
    s = _grouped(q_rows, k[:, cols].to(dtype), transpose=True) * score.softmax_scale
    slope: Tensor | float = 1.0
    if not score.plain:
        positions_q, positions_k = block.positions(q.device)
        s, slope = changed(s, score, positions_q[rows], positions_k[cols])
    return (s if hidden is None else s.masked_fill(hidden, float("-inf"))), slope


def changed(s: Tensor, score: Score, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return scaled products (batch, q_heads, m, n) after all other changes of a score, and the derivative by them."""
    slope: Tensor | float = 1.0
    if score.softcap:
        t = torch.tanh(s / score.softcap)
        s, slope = score.softcap * t, 1 - t * t
    if score.alibi_slopes is not None:
        distance = (positions_q[:, None] - positions_k).abs().to(s.dtype)
        s = s - score.alibi_slopes.to(s.dtype).reshape(-1, s.shape[1], 1, 1) * distance
    if score.mod is not None:
        s, factor = score.mod.apply(s, positions_q, positions_k)
        slope = slope * factor
    return s, slope


def _grouped(x: Tensor, y: Tensor, transpose: bool = False) -> Tensor:
    """Multiply x (batch, q_heads, m, a) by y (batch, n, kv_heads, b) without repeating y over the group.

    Returns:
        (batch, q_heads, m, b), where a = n; with ``transpose`` (batch, q_heads, m, n), where a = b.
    """
    batch, q_heads, m, a = x.shape
    y = y.transpose(1, 2)  # (batch, kv_heads, n, b)
    kv_heads = y.shape[1]
    folded = x.reshape(batch, kv_heads, q_heads // kv_heads * m, a)
    y = y.mT if transpose else y
    return _product(folded, y).reshape(batch, q_heads, m, y.shape[-1])


def _over_group(x: Tensor, y: Tensor, kv_heads: int) -> Tensor:
    """Return the sum of ``x^T y`` over the query heads of each group, (batch, n, kv_heads, b).

    x: (batch, q_heads, m, n), y: (batch, q_heads, m, b).
    """
    batch, q_heads, m, _ = x.shape
    rows = q_heads // kv_heads * m
    x = x.reshape(batch, kv_heads, rows, x.shape[-1])
    y = y.reshape(batch, kv_heads, rows, y.shape[-1])
    return _product(x.mT, y).transpose(1, 2)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, with the same bits whatever tensors x and y are slices of."""
    return x.contiguous() @ y.contiguous()


def _per_row(x: Tensor) -> Tensor:
    """Return x (batch, heads, seq) as (batch, seq, heads, 1), to scale o."""
    return x.transpose(1, 2)[..., None]
