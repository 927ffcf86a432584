"""The backward for head dims above 256 in portable Triton: the weights and their gradients pass through memory.

With so many columns registers do not hold the sums of a tile of useful size, and kernels that compute the weights again
for every gradient take 8 products for 5. But a score of such heads costs so much arithmetic that it may be
stored: :func:`_weights` computes p and ds of a piece of queries and keys once, in the 16 bits in which they are
multiplied anyway, and every gradient is then a product of matrices ::

    dv += p^T dout      dk += ds^T q * scale      dq += ds k * scale

p and ds of a piece, some heads times some queries times some keys, take at most ``BYTES``; tiles without a visible pair
are skipped, but for a few next to others. Each sum belongs to one program of one launch, and launches add in a fixed
order, so every run gives the same bits. For an ordered block a launch continues the sums of the one before in the same
accumulators, as if there were one: where pieces begin changes no bit.

Shapes and contract: contract.py. Notation: backward.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..contract import Block
from ..launch import dispatch
from . import primitives
from .backward_inputs import Inputs
from .launch_parameters import WideTiles
from .primitives import (
    ScoreArguments,
    Strided,
    bound,
    dot,
    interval_strides,
    load_part,
    load_span,
    row_pointers,
    scores,
    tile_source,
)
from .strides import elements, numbers, stride_unit, strides_in

BYTES = 512 << 20  # of p and ds
HEADS = 8  # of a piece that does not hold all queries and keys
P_SCALE = tl.constexpr(2.0**15)  # p <= 1 times this fits into float16, with all of its mantissa down to 2^-29


def gradients(inputs: Inputs, tiles: WideTiles, dq: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dk and dv, float32, of one chunk of keys and add to dq if given."""
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (inputs.k, inputs.v))
    add_gradients(inputs, tiles, dq, (dk, dv))
    return dk, dv


class _Piece(NamedTuple):
    """Heads, counted over all batch elements, tiles of queries and tiles of keys, each ``[first, past)``."""

    heads: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]


def add_gradients(
    inputs: Inputs, tiles: WideTiles, dq: Tensor | None, key_gradients: tuple[Tensor, Tensor] | None
) -> None:
    """Add to those gradients that are given."""
    q, block, size = inputs.q, inputs.block, tiles.size
    heads, tables = q.shape[0] * q.shape[2], _tables(block, size, q.device)
    most_heads, most_q, most_k = _largest_piece(inputs, tiles, tables.rows.shape[0], triton.cdiv(block.seq_k, size))
    p, ds = (q.new_empty(most_heads, most_q * size, 1, most_k * size) for _ in range(2))
    run = _Launches(inputs, tiles, tables, p, ds)
    ordered, scale = block.ordered, inputs.score.softmax_scale
    sums = None
    if dq is not None:
        sums = torch.zeros(dq.shape, device=dq.device) if ordered else primitives.last_contiguous(dq)
    with torch.cuda.device_of(q):
        for head in range(0, heads, most_heads):
            for queries, keys in _visible(block, size, most_q, most_k):
                piece = _Piece((head, min(head + most_heads, heads)), queries, keys)
                run.weights(piece)
                if key_gradients is not None:
                    run.key_sums(piece, ds, q, key_gradients[0], scale)
                    run.key_sums(piece, p, inputs.dout, key_gradients[1], 1.0)
                if sums is not None:
                    run.query_sums(piece, sums)
    if ordered and key_gradients is not None:
        key_gradients[0].mul_(scale)
    if dq is not None and sums is not None:
        if ordered:
            dq.add_(sums, alpha=scale)
        elif sums is not dq:
            dq.copy_(sums)


def _largest_piece(inputs: Inputs, tiles: WideTiles, tiles_q: int, tiles_k: int) -> tuple[int, int, int]:
    """Return the heads, tiles of queries and tiles of keys of a piece, at most.

    Both gradients want long sums in many programs: with grouped queries, whose sums for keys go over several heads, a
    piece has more keys than queries. In an ordered block a head's queries come before those of the next head, so that
    pieces have one head.
    """
    q, ratio = inputs.q, tiles.keys // tiles.size
    room = BYTES // (2 * q.element_size() * tiles.size**2)
    heads = 1 if inputs.block.ordered else q.shape[0] * q.shape[2]
    per_head = max(room // min(heads, HEADS), ratio)
    side = math.isqrt(per_head * (4 if min(heads, q.shape[2] // inputs.k.shape[2]) >= 4 else 1))
    most_k = max(side // ratio, 1) * ratio
    whole_k = triton.cdiv(tiles_k, ratio) * ratio
    most_q = max(min(max(per_head // most_k, per_head // whole_k), tiles_q), 1)
    most_k = min(max(per_head // most_q // ratio, 1) * ratio, whole_k)
    return max(min(heads, room // (most_q * most_k)), 1), most_q, most_k


class _Tables(NamedTuple):
    """``rows`` and ``span``: the TileMap of tiles of queries. ``range`` (batch or 1, tiles of keys, 2): the tiles of
    queries ``[first, past)`` that meet a tile of keys."""

    rows: Tensor
    span: Tensor
    range: Tensor
    start: Tensor
    end: Tensor


def _tables(block: Block, size: int, device: torch.device) -> _Tables:
    def make() -> tuple[Tensor, ...]:
        rows, span = block.query_tiles(size, size)
        first = torch.arange(0, max(block.seq_k, 1), size, dtype=torch.int32, device=span.device)
        begin, end = span[..., 0], span[..., 3]
        # Both grow along the queries, but for tiles that see nothing.
        begin = torch.where(begin < end, begin, block.seq_k).flip(-1).cummin(-1).values.flip(-1)
        end = end.cummax(-1).values
        first = first.expand(span.shape[0], -1).contiguous()
        past = torch.searchsorted(begin.contiguous(), first, right=True)
        meets = torch.stack([torch.searchsorted(end.contiguous(), first, right=True), past], -1)
        return rows, span, meets.to(torch.int32), block.start.contiguous(), block.end.contiguous()

    return _Tables(*block.on(device, ("wide", size), make))


def _visible(block: Block, size: int, most_q: int, most_k: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the runs of at most ``most_q`` tiles of queries and ``most_k`` tiles of keys with a visible pair. If the
    block is on a GPU, all of them: to ask would make the host wait."""

    def make() -> list[tuple[tuple[int, int], tuple[int, int]]]:
        rows, span = block.query_tiles(size, size)
        tiles_q, tiles_k = rows.shape[0], -(-block.seq_k // size)
        runs = [
            ((i, min(i + most_q, tiles_q)), (j, min(j + most_k, tiles_k)))
            for i in range(0, tiles_q, most_q)
            for j in range(0, tiles_k, most_k)
        ]
        if span.device.type != "cpu":
            return runs
        begin, end = span[..., 0] // size, span[..., 3] // size
        return [
            (queries, keys)
            for queries, keys in runs
            if bool(((begin < keys[1]) & (end > keys[0]) & (begin < end))[:, slice(*queries)].any())
        ]

    return block.memo.once(("wide", size, most_q, most_k), make)


class _Launches(NamedTuple):
    """The launches for one piece after another."""

    inputs: Inputs
    tiles: WideTiles
    tables: _Tables
    p: Tensor
    ds: Tensor

    def weights(self, piece: _Piece) -> None:
        """Store p and ds."""
        q, k, v, dout, lse2, delta, block, score = self.inputs
        tiles, size, keys, s = self.tiles, self.tiles.size, self.tiles.keys, ScoreArguments.of(score)
        rows, span, meets, start, end = self.tables
        unit = stride_unit(q, k, v, dout)
        tma = self.inputs.tma
        positions = (None, None) if s.slopes is None else block.positions(q.device)
        (head, past_head), (first_q, past_q), (first_k, past_k) = piece
        dispatch(
            _weights,
            ((past_q - first_q) * triton.cdiv((past_k - first_k) * size, keys), past_head - head),
            *_sources([(x, n, tiles.depth) for x, n in ((q, size), (k, keys), (v, keys), (dout, size))], unit, tma),
            lse2, delta, q.shape[2] * q.shape[1], q.shape[1],
            start, *interval_strides(start), end, *interval_strides(end), *positions,
            s.scale, s.cap, s.slopes, s.slopes_stride,
            *(tile_source(x, size, tma, keys) for x in (self.p, self.ds)), self.p.stride(0), self.p.stride(1),
            rows, span, *interval_strides(span)[:1], meets, *interval_strides(meets)[:1],
            q.shape[1], k.shape[1], q.shape[2], head, first_q, past_q, first_k, past_k,
            HEADS_PER_KV=q.shape[2] // k.shape[2], DIM=q.shape[3], DIM_V=v.shape[3], T=tiles, SIMPLE=s.SIMPLE,
            SOFTCAP=s.SOFTCAP, TMA=tma, UNIT=unit, num_warps=8, num_stages=tiles.stages_of_weights,
        )  # fmt: skip

    def key_sums(self, piece: _Piece, weights: Tensor, x: Tensor, out: Tensor, scale: float) -> None:
        """Add weights^T x times scale."""
        q, k, tiles = self.inputs.q, self.inputs.k, self.tiles
        (head, past_head), (first_q, past_q), (first_k, past_k) = piece
        group = q.shape[2] // k.shape[2]
        heads = (past_head - 1) // group - head // group + 1
        numbers = (q.shape[1], k.shape[1], q.shape[2], scale, head, past_head, first_q, past_q, first_k)
        box = (tiles.depth, tiles.size)
        self._sums(_key_sums, past_k - first_k, heads, weights, box, x, out, self.tables.range, numbers)

    def query_sums(self, piece: _Piece, dq: Tensor) -> None:
        """Add ds k times the scale of the softmax."""
        q, k, scale, tiles = self.inputs.q, self.inputs.k, self.inputs.score.softmax_scale, self.tiles
        (head, past_head), (first_q, past_q), (first_k, past_k) = piece
        numbers = (k.shape[1], q.shape[2], scale, head, first_q, past_q, first_k, past_k)
        box = (tiles.size, tiles.depth)
        self._sums(_query_sums, past_q - first_q, past_head - head, self.ds, box, k, dq, self.tables.span, numbers)

    def _sums(
        self, kernel: Any, count: int, heads: int, weights: Tensor, box: tuple[int, int], x: Tensor, out: Tensor,
        meets: Tensor, numbers: tuple[float, ...],
    ) -> None:  # fmt: skip
        """Launch a kernel for so many tiles of ``out`` and heads, which reads ``box`` of the weights at a time."""
        tiles, unit, tma = self.tiles, stride_unit(x, out), primitives.has_tma(x)
        dispatch(
            kernel, (triton.cdiv(x.shape[3], tiles.columns) * count, heads),
            tile_source(weights, box[0], tma, box[1]), *weights.stride()[:2],
            *_sources([(x, tiles.depth, tiles.columns)], unit, tma), out, *strides_in(unit, out),
            self.tables.rows, meets, *interval_strides(meets)[:1], *numbers,
            HEADS_PER_KV=self.inputs.q.shape[2] // self.inputs.k.shape[2], DIM=x.shape[3], T=tiles, TMA=tma, UNIT=unit,
            CONTINUES=self.inputs.block.ordered, num_warps=8, num_stages=tiles.stages,
        )  # fmt: skip


def _sources(parts: Iterable[tuple[Tensor, int, int]], unit: int, tma: bool) -> Iterator[Any]:
    """Yield the arguments from which kernels read parts of some rows and columns of tensors."""
    for x, rows, columns in parts:
        yield tile_source(x, rows, tma, columns)
        yield from strides_in(unit, x)


@triton.jit
def _product(
    x, y, b, h, h_y, row, past, row_y, past_y,
    DIM: tl.constexpr, ROWS: tl.constexpr, ROWS_Y: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return rows of x times rows of y, transposed, (ROWS, ROWS_Y)."""
    total = tl.zeros([ROWS, ROWS_Y], tl.float32)
    for column in tl.range(0, DIM, DEPTH, num_stages=STAGES):
        of_x = load_part(x, b, h, row, past, column, ROWS, DEPTH, DIM, TMA)
        of_y = load_part(y, b, h_y, row_y, past_y, column, ROWS_Y, DEPTH, DIM, TMA)
        total = dot(of_x, tl.trans(of_y), total)
    return total


@triton.jit
def store_part(x, tile, h, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Store a tile of weights."""
    if TMA:
        x.source.store([h, 0, row, column], tl.reshape(tile.to(x.source.dtype), [1, 1, ROWS, COLUMNS]))
    else:
        tl.store(row_pointers(x, h, 0, row, ROWS, COLUMNS) + column, tile.to(x.source.dtype.element_ty))


@triton.jit(
    do_not_specialize=numbers(
        "q_bsh k_bsh v_bsh do_bsh rows_b rows_h starts_b ends_b slopes_b w_h w_s span_b meets_b seq_q seq_k heads head "
        "first_q past_q first_k past_k"
    )
)
def _weights(
    q, q_b, q_s, q_h, k, k_b, k_s, k_h, v, v_b, v_s, v_h, dout, do_b, do_s, do_h,
    lse, delta, rows_b, rows_h,
    starts, starts_b, starts_s, ends, ends_b, ends_s, positions_q, positions_k,
    scale, cap, slopes, slopes_b,
    p_out, ds_out, w_h, w_s,
    rows, span, span_b, meets, meets_b,
    seq_q, seq_k, heads, head, first_q, past_q, first_k, past_k,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, T: tl.constexpr, SIMPLE: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store p and ds of one tile of SIZE queries and KEYS keys."""
    ALIBI: tl.constexpr = slopes is not None
    q = Strided(q, elements(q_b, UNIT), elements(q_s, UNIT), elements(q_h, UNIT))
    k = Strided(k, elements(k_b, UNIT), elements(k_s, UNIT), elements(k_h, UNIT))
    v = Strided(v, elements(v_b, UNIT), elements(v_s, UNIT), elements(v_h, UNIT))
    dout = Strided(dout, elements(do_b, UNIT), elements(do_s, UNIT), elements(do_h, UNIT))
    local = tl.program_id(1)
    b, h = (head + local) // heads, (head + local) % heads
    # Programs that run at the same time share tiles: they go through a few rows of tiles column by column.
    RATIO: tl.constexpr = T.keys // T.size
    across = (past_k - first_k + RATIO - 1) // RATIO
    i, j = tl.swizzle2d(tl.program_id(0) // across, tl.program_id(0) % across, past_q - first_q, across, 8)
    tile, first = first_q + i, first_k + j * RATIO
    n, last = first * T.size, tl.minimum(first + RATIO, past_k) - 1
    meets += b.to(tl.int64) * meets_b
    if (tile < tl.load(meets + first * 2)) | (tile >= tl.load(meets + last * 2 + 1)):
        return
    row, past, _, full_begin, full_end, _ = load_span(rows, span, tile, b, span_b)

    queries, keys = row + tl.arange(0, T.size), n + tl.arange(0, T.keys)
    alive = queries < past
    b64 = b.to(tl.int64)
    h_kv = h // HEADS_PER_KV
    s = _product(q, k, b, h, h_kv, row, past, n, seq_k, DIM, T.size, T.keys, T.depth, TMA, T.stages_of_weights)
    distance, slope = s, 0.0
    if ALIBI:
        slope = tl.load(slopes + b * slopes_b + h)
        pos_q = tl.load(positions_q + queries, mask=alive, other=0)
        distance = pos_q[:, None] - tl.load(positions_k + keys, mask=keys < seq_k, other=0)[None, :]
    s, slope_of_score = scores(s, distance, scale, cap, slope, SIMPLE, SOFTCAP, ALIBI)
    if (n < full_begin) | (n + T.keys > full_end):
        start = tl.load(starts + b64 * starts_b + queries.to(tl.int64) * starts_s, mask=alive, other=0)
        end = tl.load(ends + b64 * ends_b + queries.to(tl.int64) * ends_s, mask=alive, other=0)
        s = tl.where((start[:, None] <= keys[None, :]) & (keys[None, :] < end[:, None]), s, float("-inf"))
    row_of_head = b64 * rows_b + h.to(tl.int64) * rows_h
    lse_m = tl.load(lse + row_of_head + queries, mask=alive, other=float("inf"))
    p = tl.exp2(s * (scale if SIMPLE else 1.0) - lse_m[:, None])
    store_part(Strided(p_out, w_h, w_s, 0), p, local, i * T.size, j * T.keys, T.size, T.keys, TMA)
    # Registers hold one sum of this size and p in 16 bits: of float16, scaled, because it has the longer mantissa.
    small = (p * slope_of_score * P_SCALE).to(tl.float16)
    dp = _product(dout, v, b, h, h_kv, row, past, n, seq_k, DIM_V, T.size, T.keys, T.depth, TMA, T.stages_of_weights)
    delta_m = tl.load(delta + row_of_head + queries, mask=alive, other=0.0)
    ds = small.to(tl.float32) * (dp - delta_m[:, None]) * (1 / P_SCALE)
    store_part(Strided(ds_out, w_h, w_s, 0), ds, local, i * T.size, j * T.keys, T.size, T.keys, TMA)


@triton.jit
def _places(out, b, h, row, past, column, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    """Return pointers to a tile of sums, and which of its rows are before ``past`` and columns before DIM."""
    inside = (row + tl.arange(0, SIZE) < past)[:, None] & (column + tl.arange(0, COLUMNS) < DIM)[None, :]
    return row_pointers(out, b, h, row, SIZE, COLUMNS) + column, inside


@triton.jit
def _begin(
    out, b, h, row, past, column, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, CONTINUES: tl.constexpr
):
    """Return a tile of sums (SIZE, COLUMNS), float32: what is there, or zeros."""
    total = tl.zeros([SIZE, COLUMNS], tl.float32)
    if CONTINUES:
        at, inside = _places(out, b, h, row, past, column, SIZE, COLUMNS, DIM)
        total = tl.load(at, mask=inside, other=0.0)
    return total


@triton.jit
def _end(
    out, total, scale, b, h, row, past, column,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, CONTINUES: tl.constexpr,
):  # fmt: skip
    """Store what :func:`_begin` returned, which has grown; or add it times the scale to what is there."""
    at, inside = _places(out, b, h, row, past, column, SIZE, COLUMNS, DIM)
    if not CONTINUES:
        total = tl.load(at, mask=inside, other=0.0) + total * scale
    tl.store(at, total, mask=inside)


@triton.jit(
    do_not_specialize=numbers("w_h w_s x_bsh o_bsh meets_b seq_q seq_k heads head past_head first_q past_q first_k")
)
def _key_sums(
    weights, w_h, w_s, x, x_b, x_s, x_h, out, o_b, o_s, o_h,
    rows, meets, meets_b,
    seq_q, seq_k, heads, scale, head, past_head, first_q, past_q, first_k,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, T: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr,
    CONTINUES: tl.constexpr,
):  # fmt: skip
    """Add weights^T x for one tile of keys and some columns."""
    x = Strided(x, elements(x_b, UNIT), elements(x_s, UNIT), elements(x_h, UNIT))
    out = Strided(out, elements(o_b, UNIT), elements(o_s, UNIT), elements(o_h, UNIT))
    PARTS: tl.constexpr = (DIM + T.columns - 1) // T.columns
    STEPS: tl.constexpr = T.size // T.depth
    column, tile = tl.program_id(0) % PARTS * T.columns, tl.program_id(0) // PARTS
    kv = head // HEADS_PER_KV + tl.program_id(1)
    first_head, last_head = tl.maximum(head, kv * HEADS_PER_KV), tl.minimum(past_head, (kv + 1) * HEADS_PER_KV)
    kv_heads = heads // HEADS_PER_KV
    b, h_kv = kv // kv_heads, kv % kv_heads
    n = (first_k + tile) * T.size
    meets += b.to(tl.int64) * meets_b + (first_k + tile) * 2
    low, high = tl.maximum(tl.load(meets), first_q), tl.minimum(tl.load(meets + 1), past_q)
    steps = tl.maximum(high - low, 0) * STEPS
    if steps == 0:
        return
    total = _begin(out, b, h_kv, n, seq_k, column, T.size, T.columns, DIM, CONTINUES)
    row = tl.load(rows + low * 2)  # of the next step, loaded one step ahead so that the loop needs not wait for it
    for step in tl.range(0, bound((last_head - first_head) * steps), num_stages=T.stages):
        g = first_head + step // steps
        i = low + step % steps // STEPS
        inside = step % STEPS * T.depth
        w = load_part(
            Strided(weights, w_h, w_s, 0), g - head, 0, (i - first_q) * T.size + inside, (past_q - first_q) * T.size,
            tile * T.size, T.depth, T.size, 1 << 30, TMA,
        )  # fmt: skip
        y = load_part(x, b, g % heads, row + inside, seq_q, column, T.depth, T.columns, DIM, TMA)
        total = dot(tl.trans(w), y, total)
        row = tl.load(rows + (low + (step + 1) % steps // STEPS) * 2)
    _end(out, total, scale, b, h_kv, n, seq_k, column, T.size, T.columns, DIM, CONTINUES)


@triton.jit(do_not_specialize=numbers("w_h w_s x_bsh o_bsh span_b seq_k heads head first_q past_q first_k past_k"))
def _query_sums(
    weights, w_h, w_s, x, x_b, x_s, x_h, out, o_b, o_s, o_h,
    rows, span, span_b,
    seq_k, heads, scale, head, first_q, past_q, first_k, past_k,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, T: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr,
    CONTINUES: tl.constexpr,
):  # fmt: skip
    """Add weights x for one tile of queries and some columns."""
    x = Strided(x, elements(x_b, UNIT), elements(x_s, UNIT), elements(x_h, UNIT))
    out = Strided(out, elements(o_b, UNIT), elements(o_s, UNIT), elements(o_h, UNIT))
    PARTS: tl.constexpr = (DIM + T.columns - 1) // T.columns
    # The last queries begin, whose sums are the longest under a causal mask.
    column, tile = tl.program_id(0) % PARTS * T.columns, past_q - first_q - 1 - tl.program_id(0) // PARTS
    local = tl.program_id(1)
    b, h = (head + local) // heads, (head + local) % heads
    row, past, begin, _, _, stop = load_span(rows, span, first_q + tile, b, span_b)
    begin, stop = tl.maximum(begin, first_k * T.size), tl.minimum(stop, past_k * T.size)
    if begin >= stop:
        return
    total = _begin(out, b, h, row, past, column, T.size, T.columns, DIM, CONTINUES)
    for n in tl.range(bound(begin), bound(stop), T.depth, num_stages=T.stages):
        w = load_part(
            Strided(weights, w_h, w_s, 0), local, 0, tile * T.size, (past_q - first_q) * T.size, n - first_k * T.size,
            T.size, T.depth, 1 << 30, TMA,
        )  # fmt: skip
        y = load_part(x, b, h // HEADS_PER_KV, n, seq_k, column, T.depth, T.columns, DIM, TMA)
        total = dot(w, y, total)
    _end(out, total, scale, b, h, row, past, column, T.size, T.columns, DIM, CONTINUES)
