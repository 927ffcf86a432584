"""The forward kernel for Hopper (sm_90), in Gluon. Contract and shapes: contract.py.

One CTA per SM: a producer warpgroup that moves tiles by TMA, and two or three consumer warpgroups, each
with 64 query rows. The consumers of a CTA share the key and value tiles, two stages deep::

    producer        Q(i) K V K V K V ... | next tile: Q(i+1) K V K V ...
    consumer, step  wait K[j] ; take the turn ; S = Q K[j]^T ; O *= alpha ; wait V[j-1] ; O += P V[j-1] ; give the turn
                    S done: free K[j] ; row max, exp2, row sums ; O done: free V[j-1] ; P to 16 bit
    consumer, end   O += P V[0] ; O done: free V[0] ; first S of the next query tile ; meanwhile store O and lse

* Both products of a step are asynchronous: the softmax of tile j overlaps the product with V of tile j-1,
  and the turn, passed from consumer to consumer, makes one consumer's products overlap another one's softmax.
* The keys of a query tile are walked from the last to the first. Of its span (see ``TileMap``) only the cut parts
  and the very first key tile apply the intervals; the loop over full key tiles is straight-line code without a mask.
* The producer runs ahead into the next query tile: Q has two buffers, and the description of the next tile is loaded
  while the producer waits for free stages for the last keys of this one.
* Query tiles are handed out by an atomic counter (work_counter.py), heaviest first within a few heads at a time:
  balanced for any mask, few heads' keys in L2 at once, and robust if other work slows some SMs down.
* With ``ready`` the producer waits for the flag of a head's keys and values before their first tile. The heads are
  swept in the order of arrival; the consumers are the same with and without flags. Tiles of this rank's own keys
  (``ready.own``) are read where they are and wait for no flag: only the first tile with fetched keys does.
* Tiles have powers of two of columns. Head dims 96 and 192 of q and k are two tiles side by side, 64 + 32 and 128 + 64;
  a value of 96 is read as 128, the last 32 zeros that TMA fills in.
* m is a point of reference near the maximum, not the maximum: it moves when a score is more than ``SLACK`` above it.
  So p is at most 2^8, with the same relative error, and where m stays, as it does after a few key tiles, O is not
  rescaled. (The idea: Zadouri et al. 2026, FlashAttention-4, arXiv:2603.05451.) Fewer multiplications draw less power,
  and at the power limit that is speed. The first key tile of a call moves a carried m to any score above it: its p is
  exactly 1, as with all keys in one call, so that few keys over several calls are as exact.
* Tensor cores truncate when they add to an accumulator, so O loses a little with every product, always towards zero:
  0.7 % of itself after five million keys. If a query may see that many (``Block.period``), O is flushed every PERIOD
  key tiles: added in float32 to a sum in memory, and started again at zero. A carried O starts in that sum. (The same
  loss in FP8, and the same remedy: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.)
* A head dim of 512 is two launches, each for half of the columns of v: registers hold sums of 128 x 256. Both compute
  the scores, so there are 3 products for 2.
* Scores stay unscaled until the exponent, which is taken to the base 2: p = 2^(s c - m) with c = scale log2(e).
  m is in that unit here; the state in memory is in natural logarithms, see ``_store``.

Schedule: Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608). What was tried: NOTES.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...partial import Partial
from ..contract import GRID as _GRID
from ..contract import PERIOD, Block, Keys, OwnKeys, Result, Score, int32
from ..launch import Launches, capability, dispatch, on_device
from . import ramp
from .primitives import (
    FREE_BARRIERS,
    async_load,
    async_store,
    barrier_arrive,
    barrier_sync,
    hide_columns,
    keep_alive,
    scale_rows,
    wait_row,
)
from .scores import (
    LOG2E,
    Changes,
    capped,
    exponentials_of_capped,
    middle,
    padded_positions,
    pairs,
    penalties,
    relative,
    scaled_and_capped,
)
from .tensor_maps import readable, view
from .work import head_sweeps, processors, query_tile_table
from .work_counter import take_number, work_counter

SLACK = gl.constexpr(8.0)  # the most that a score may exceed its point of reference, to the base 2
LN2 = gl.constexpr(0.6931471805599453)
LOG2E_HI = gl.constexpr(1.44269502162933349609375)  # float32(log2 e), and its rounding error
LOG2E_LO = gl.constexpr(LOG2E - 1.44269502162933349609375)

GRID = gl.constexpr(_GRID)  # keys of a tile that a rank's own keys are read in, see OwnKeys
ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one wgmma
INFO = gl.constexpr(8)  # int32 numbers that describe a query tile, see work.query_tile_table
SLOTS = gl.constexpr(4)  # descriptions in shared memory: one is read until two tiles later
INFO_LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # every thread holds all of them


class Config(NamedTuple):
    """Tile sizes and buffers for one pair of head dims.

    Args:
        registers: per consumer thread; the producer gets the rest.
        q_buffers, staged: two buffers of queries, and tiles of ``out`` staged for TMA, if shared memory has room.
        staged_with_ramp: the same next to the operand of :mod:`.ramp`.
        value_parts: launches, each for a part of the columns of v, of which registers do not hold all sums.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    q_buffers: int = 2
    staged: bool = True
    staged_with_ramp: bool = True
    value_parts: int = 1

    @property
    def block_m(self) -> int:
        return self.consumers * ROWS.value


CONFIGS = {  # by the head dims of q, k and of v
    (64, 64): Config(consumers=3, block_n=128, stages=2, registers=160),
    (96, 96): Config(consumers=2, block_n=128, stages=2, registers=240),
    (128, 128): Config(consumers=2, block_n=128, stages=2, registers=240, staged_with_ramp=False),
    (192, 128): Config(consumers=2, block_n=128, stages=2, registers=240, q_buffers=1, staged=False),
    (256, 256): Config(consumers=2, block_n=64, stages=2, registers=240, q_buffers=1, staged=False),
    (512, 512): Config(consumers=2, block_n=32, stages=2, registers=240, q_buffers=1, staged=False, value_parts=2),
}


# ---------------------------------------------------------------- device: shared pieces


@gluon.jit
def _number(info, i: gl.constexpr):
    """Return element i of a query tile's description, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, INFO, INFO_LAYOUT) == i, info, 0), axis=0)


@gluon.jit
def _rows(tiles, i):
    """Return tile i of (tiles, 1, rows, 1, D) in shared memory as a matrix (rows, D)."""
    return tiles.index(i).reshape([tiles.shape[2], tiles.shape[4]])


@gluon.jit
def _q_buffer(i, BUFFERS: gl.constexpr):
    """Return the buffer of query tile i of this CTA, and its phase there. One or two buffers."""
    return i & (BUFFERS - 1), (i >> (BUFFERS - 1)) & 1


@gluon.jit
def _keys(tiles, i):
    return _rows(tiles, i).permute((1, 0))


@gluon.jit
def _scaled(x, factor):
    """Return x times a factor for each row, which is in the layout of the scores."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _q_pieces(q_s, i):
    PIECES: gl.constexpr = len(q_s)
    return (_rows(q_s[0], i),) if PIECES == 1 else (_rows(q_s[0], i), _rows(q_s[1], i))


@gluon.jit
def _q_again(q_s, i, late):
    """Return the queries for one of the loops over keys, with their addresses computed again.

    ptxas 12.8 bug: if three loops share descriptors, one may read a uniform register that is only written inside
    another loop, which may not have run (tests/sass.py checks for it). ``late >> 30`` is 0, but ptxas cannot know that,
    so that each loop computes descriptors of its own."""
    return _q_pieces(q_s, i + (late >> 30))


@gluon.jit
def _scores(q, k_s, stage, layout: gl.constexpr):
    """Issue the product of the queries and of the key tile in this stage, piece by piece."""
    BN: gl.constexpr = k_s[0].shape[2]
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    s = warpgroup_mma(q[0], _keys(k_s[0], stage), s, use_acc=False, is_async=True)
    PIECES: gl.constexpr = len(k_s)
    if PIECES == 2:
        s = warpgroup_mma(q[1], _keys(k_s[1], stage), s, is_async=True)
    return s


@gluon.jit
def _lane_sum(p):
    """Return the sums of each lane of a quad: (R, N) in wgmma layout -> (R, 4). Without a shuffle: the quad is summed
    once per query tile."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _pack(low, high, dtype: gl.constexpr):
    """Return the float32 numbers of :func:`pairs` as int32 of 16-bit pairs. A loop that carries 16-bit elements holds
    halves of registers and needs a PRMT for each pair before the wgmma."""
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    return x


@gluon.jit
def _unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2]), layout)


@gluon.jit
def _finite(m):
    """Return m as a point of reference: 0 where nothing was seen, so that -inf - m stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def _hide(s, column, start, end):
    """Return s with -inf where the row does not see the key. ``column``: the tile's first key."""
    return hide_columns(hide_columns(s, start - column, True), end - column, False)


# ---------------------------------------------------------------- device: producer


@gluon.jit
def _tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride):
    """Return the description of query tile ``w`` in the order of work, with the batch and the head filled in.

    The first ``early`` heads are swept ``group`` at a time, the others all together; the heaviest tiles come first.
    """
    first = gl.minimum(w // (group * n_tiles) * group, early)
    heads = gl.where(first < early, group, n_heads - early)
    rest = w - first * n_tiles
    head = first + rest % heads
    rank = rest // heads
    batch = head // q_heads
    i = gl.arange(0, INFO, INFO_LAYOUT)
    info = gl.load(table_ptr + batch * table_batch_stride + rank * INFO + i)
    return gl.where(i == 6, batch, gl.where(i == 7, head % q_heads, info))


@gluon.jit
def _numbered_tile(
    taken, counter_ptr, table_ptr, n_tiles, n_heads, q_heads, group, early, table_batch_stride,
    SKIP_EMPTY: gl.constexpr,
):  # fmt: skip
    """Return number and description of the query tile that was taken, or of the next one that is not empty."""
    total = n_tiles * n_heads
    w = total
    info = gl.full([INFO], -1, gl.int32, INFO_LAYOUT)
    again = True
    while again:
        w = taken + gl.num_programs(0)
        again = False
        if w < total:
            info = _tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride)
            if SKIP_EMPTY:
                again = _number(info, 5) == 0
                if again:
                    taken = gl.sum(take_number(counter_ptr, total), axis=0)
    return w, info


@gluon.jit
def _load_pieces(desc, tiles, full, batch, row, head, i):
    """Load rows of one head into tile i of each piece."""
    PIECES: gl.constexpr = len(desc)
    if PIECES == 1:
        mbarrier.expect(full.index(i), desc[0].block_type.nbytes)
    else:
        mbarrier.expect(full.index(i), desc[0].block_type.nbytes + desc[1].block_type.nbytes)
    async_load(desc[0], [batch, row, head, 0], full.index(i), tiles[0].index(i))
    if PIECES == 2:
        FIRST: gl.constexpr = tiles[0].shape[4]
        async_load(desc[1], [batch, row, head, FIRST], full.index(i), tiles[1].index(i))


@gluon.jit
def _load_keys(
    k_desc, v_desc, own, flags, arrived, k_s, v_s, k_full, v_full, batch, column, kv_head, row, g, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load key tile number g of this CTA, as soon as the consumers have released its stage: one of this rank's own
    where it is, another one of ``row`` after its flag. Return the latest row whose flag was waited for."""
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    stage = g % STAGES
    if len(own) == 0:
        if g >= STAGES:
            barrier_sync(K_FREE + stage, 128 * (N + 1))
        _load_pieces(k_desc, k_s, k_full, batch, column, kv_head, stage)
        if g >= STAGES:
            barrier_sync(V_FREE + stage, 128 * (N + 1))
        _load_values(v_desc, v_s, v_full, batch, column, kv_head, stage)
    else:
        own_k_desc, own_v_desc, places_ptr = own
        place = gl.load(places_ptr + column // GRID)
        if g >= STAGES:
            barrier_sync(K_FREE + stage, 128 * (N + 1))
        if place >= 0:
            _load_pieces(own_k_desc, k_s, k_full, batch, place + column % GRID, kv_head, stage)
        else:
            if row != arrived:
                flags_ptr, epoch, timed_out_ptr = flags
                wait_row(flags_ptr, row, epoch, timed_out_ptr, 4)
                arrived = row
            _load_pieces(k_desc, k_s, k_full, batch, column, kv_head, stage)
        if g >= STAGES:
            barrier_sync(V_FREE + stage, 128 * (N + 1))
        if place >= 0:
            _load_values(own_v_desc, v_s, v_full, batch, place + column % GRID, kv_head, stage)
        else:
            _load_values(v_desc, v_s, v_full, batch, column, kv_head, stage)
    return arrived


@gluon.jit
def _load_values(desc, tiles, full, batch, row, head, i):
    mbarrier.expect(full.index(i), desc.block_type.nbytes)
    async_load(desc, [batch, row, head, 0], full.index(i), tiles.index(i))


@gluon.jit
def _producer(
    args, N: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr,
    SKIP_EMPTY: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    (
        q_desc, k_desc, v_desc, own, table_ptr, counter_ptr, flags,
        q_s, k_s, v_s, info_s, q_full, q_free, k_full, v_full, info_full,
        n_tiles, n_heads, q_heads, ratio, group, early, table_batch_stride,
    ) = args  # fmt: skip
    total = n_tiles * n_heads
    w = gl.program_id(0)
    info = _tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride)
    if SKIP_EMPTY:  # noqa: SIM102
        if _number(info, 5) == 0:
            w, info = _numbered_tile(
                gl.sum(take_number(counter_ptr, total), axis=0), counter_ptr, table_ptr, n_tiles, n_heads, q_heads,
                group, early, table_batch_stride, SKIP_EMPTY,
            )  # fmt: skip
    g = 0  # key tiles moved so far
    i = 0  # query tiles moved so far
    arrived = -1  # the latest row of keys and values whose flag was waited for
    while w < total:
        slot, phase = _q_buffer(i, Q_BUFFERS)
        for c in gl.static_range(N):
            mbarrier.wait(q_free.index(slot * N + c), phase ^ 1)
        info_s.index(i % SLOTS).store(info)
        mbarrier.arrive(info_full.index(i % SLOTS), count=1)
        first = _number(info, 0)
        begin = _number(info, 2)
        end = gl.maximum(_number(info, 5), begin + BN)  # nothing to see: one tile, all hidden
        batch = _number(info, 6)
        head = _number(info, 7)
        kv_head = head // ratio
        for c in gl.static_range(N):
            _load_pieces(q_desc, q_s, q_full, batch, first + c * ROWS, head, slot * N + c)
        row = 0
        if READY:
            row = (batch * q_heads + head) // ratio
        if READY and len(own) == 0:  # noqa: SIM102
            if row != arrived:
                flags_ptr, epoch, timed_out_ptr = flags
                wait_row(flags_ptr, row, epoch, timed_out_ptr, 4)
                arrived = row
        for column in range(end - BN, begin + BN, -BN):
            arrived = _load_keys(
                k_desc, v_desc, own, flags, arrived, k_s, v_s, k_full, v_full, batch, column, kv_head, row, g, N, STAGES
            )
            g += 1
        # Request the next tile's number, then its description, while waiting to load the last two key tiles: memory
        # latency is about the time until the consumers need a key tile.
        number = take_number(counter_ptr, total)
        for column in range(gl.minimum(begin, end - 2 * BN) + BN, begin, -BN):
            arrived = _load_keys(
                k_desc, v_desc, own, flags, arrived, k_s, v_s, k_full, v_full, batch, column, kv_head, row, g, N, STAGES
            )
            g += 1
        w, info = _numbered_tile(
            gl.sum(number, axis=0), counter_ptr, table_ptr, n_tiles, n_heads, q_heads, group, early,
            table_batch_stride, SKIP_EMPTY,
        )  # fmt: skip
        arrived = _load_keys(
            k_desc, v_desc, own, flags, arrived, k_s, v_s, k_full, v_full, batch, begin, kv_head, row, g, N, STAGES
        )
        g += 1
        i += 1
    slot, phase = _q_buffer(i, Q_BUFFERS)
    for c in gl.static_range(N):
        mbarrier.wait(q_free.index(slot * N + c), phase ^ 1)
    info_s.index(i % SLOTS).store(gl.full([INFO], -1, gl.int32, INFO_LAYOUT))
    mbarrier.arrive(info_full.index(i % SLOTS), count=1)


# ---------------------------------------------------------------- device: consumer


@gluon.jit
def _span(slot, BN: gl.constexpr):
    """Return whether there is a query tile, its last key tile and its span."""
    info = slot.load(INFO_LAYOUT)
    begin = _number(info, 2)
    end = gl.maximum(_number(info, 5), begin + BN)
    return _number(info, 0) >= 0, end - BN, begin, _number(info, 3), _number(info, 4)


@gluon.jit
def _intervals(slot, C: gl.constexpr, start_ptr, end_ptr, rows_batch_stride, layout: gl.constexpr):
    """Return the first and past-the-last key that each row of consumer C sees."""
    info = slot.load(INFO_LAYOUT)
    row = _number(info, 0) + C * ROWS + gl.arange(0, ROWS, layout)
    inside = row < _number(info, 1)
    row_start = gl.load(start_ptr + _number(info, 6) * rows_batch_stride + row, mask=inside, other=0)
    row_end = gl.load(end_ptr + _number(info, 6) * rows_batch_stride + row, mask=inside, other=0)
    return row_start, row_end


@gluon.jit
def _enter_rows(slot, C: gl.constexpr, m_ptr, l_ptr, seq_q, q_heads, layout: gl.constexpr):
    """Return m of the carried state to the base 2, its rounding error, and a quarter of l for each lane of a quad."""
    rows, inside = _row_offsets(slot.load(INFO_LAYOUT), C, seq_q, q_heads, layout)
    m_nat = gl.load(m_ptr + rows, mask=inside, other=float("-inf"))
    l = gl.load(l_ptr + rows, mask=inside, other=0.0)
    m = m_nat * LOG2E_HI
    rest = gl.fma(m_nat, LOG2E_LO, gl.fma(m_nat, LOG2E_HI, -m))
    return m, gl.where(m_nat == float("-inf"), 0.0, rest), l * 0.25


@gluon.jit
def _enter(
    slot, C: gl.constexpr, m_ptr, l_ptr, o_ptr, seq_q, q_heads, D: gl.constexpr, W: gl.constexpr,
    rows_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return the carried state of a query tile; see _enter_rows."""
    m, rest, l = _enter_rows(slot, C, m_ptr, l_ptr, seq_q, q_heads, rows_layout)
    values, inside = _values(o_ptr, slot.load(INFO_LAYOUT), C, seq_q, q_heads, D, W, layout)
    return m, rest, l, gl.load(values, mask=inside, other=0.0)


@gluon.jit
def _row_offsets(info, C: gl.constexpr, seq_q, q_heads, layout: gl.constexpr):
    """Return the offsets of the rows of consumer C in (batch, q_heads, seq_q), and which of them belong to the tile."""
    row = _number(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, layout)
    first = (_number(info, 6).to(gl.int64) * q_heads + _number(info, 7)) * seq_q + row
    return first + rows, row + rows < _number(info, 1)


@gluon.jit
def _values(ptr, info, C: gl.constexpr, seq_q, q_heads, D: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the values of consumer C in (batch, seq_q, q_heads, D), a tile W wide, and which of them
    belong to the query tile."""
    row = _number(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    ptr += ((_number(info, 6).to(gl.int64) * seq_q + row) * q_heads + _number(info, 7)) * D
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    inside = (row + rows < _number(info, 1))[:, None]
    if D < W:
        inside = inside & (columns < D)[None, :]
    return (ptr + rows * (q_heads * D))[:, None] + columns[None, :], inside


@gluon.jit
def _store_values(ptr, x, info, C: gl.constexpr, seq_q, q_heads, DTYPE: gl.constexpr, D: gl.constexpr):
    L: gl.constexpr = x.type.layout
    values, inside = _values(ptr, info, C, seq_q, q_heads, D, x.shape[1], L)
    gl.store(values, x.to(DTYPE), mask=inside)


@gluon.jit
def _store(
    acc, m, l, slot, out_desc, out_ptr, lse_ptr, l_ptr, sink_ptr, o_s, seq_q, q_heads,
    C: gl.constexpr, DTYPE: gl.constexpr, D: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr,
    STAGED: gl.constexpr, S_ROW: gl.constexpr,
):  # fmt: skip
    """Store a query tile: as out, divided by l, and lse, or as the state."""
    info = slot.load(INFO_LAYOUT)  # loaded again: in registers it would slow the steps down
    rows, inside = _row_offsets(info, C, seq_q, q_heads, S_ROW)
    l = gl.convert_layout(gl.sum(l, axis=1), S_ROW)
    factor = gl.full([ROWS], 1.0, gl.float32, S_ROW)
    if HAS_SINK:  # a key with this score and a value of zero
        sink = gl.load(sink_ptr + _number(info, 7)) * LOG2E_HI
        joined = gl.maximum(m, sink)
        factor = gl.exp2(m - _finite(joined))
        l = l * factor + gl.exp2(sink - _finite(joined))
        m = joined
    if FINALIZE:
        seen = l != 0.0
        lse = gl.where(seen, gl.fma(m, LN2, gl.log(l)), float("-inf"))
        gl.store(lse_ptr + rows, lse, mask=inside)
        factor = factor / gl.where(seen, l, 1.0)
        acc = _scaled(acc, factor)
        if STAGED:
            row = _number(info, 0) + C * ROWS
            past = _number(info, 1)
            if (row + ROWS <= past) | (past == seq_q):  # TMA stops at the end of the tensor, not of a segment
                tma.store_wait(0)
                _rows(o_s, C).store(acc.to(DTYPE))
                fence_async_shared()
                async_store(out_desc, [_number(info, 6), row, _number(info, 7), 0], o_s.index(C))
            else:
                _store_values(out_ptr, acc, info, C, seq_q, q_heads, DTYPE, D)
        else:
            _store_values(out_ptr, acc, info, C, seq_q, q_heads, DTYPE, D)
    else:
        # As a natural logarithm m is rounded: adapt l and o to the rounded point of reference.
        m_nat = m * LN2
        exact = gl.exp2(gl.fma(m_nat, -LOG2E_LO, gl.fma(m_nat, -LOG2E_HI, m)))
        exact = gl.where(m == float("-inf"), 1.0, exact)
        gl.store(lse_ptr + rows, m_nat, mask=inside)
        gl.store(l_ptr + rows, l * exact, mask=inside)
        _store_values(out_ptr, _scaled(acc, factor * exact), info, C, seq_q, q_heads, gl.float32, D)


@gluon.jit
def _scratch(ptr, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the flushed sums of consumer C: (CTAs, N, ROWS, W) float32, private to each thread."""
    row = (gl.program_id(0) * N + C) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return (ptr + row * W)[:, None] + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _with_flushed(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Return acc, whose point of reference is m, plus the flushed sum, whose point of reference is m_aside."""
    L: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    kept = gl.convert_layout(gl.exp2(m_aside - _finite(m)), ROW)[:, None]
    any_aside = gl.convert_layout(m_aside, ROW)[:, None] != float("-inf")
    W: gl.constexpr = acc.shape[1]
    before = gl.load(_scratch(aside_ptr, C, N, W, L), mask=any_aside, other=0.0)
    return before * kept + acc


@gluon.jit
def _flush(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Flush acc, whose point of reference is m: add it to the sum in memory. Return zeros and the sum's new m_aside."""
    L: gl.constexpr = acc.type.layout
    W: gl.constexpr = acc.shape[1]
    gl.store(_scratch(aside_ptr, C, N, W, L), _with_flushed(acc, m, aside_ptr, m_aside, C, N))
    return gl.zeros([ROWS, W], gl.float32, L), m


@gluon.jit
def _softmax(s, m, l, rest, c2, part, slack: gl.constexpr, FIXED: gl.constexpr):
    """Move m to the maximum if that is more than ``slack`` above it; alpha rescales earlier sums. ``rest``: the
    rounding error of m, see _enter_rows. ``part``: what is added to all scores of a row, or nothing. ``FIXED``: m stays
    0."""
    L_L: gl.constexpr = l.type.layout
    if FIXED is not None:
        alpha = gl.zeros(l.shape, gl.int32, L_L)
        x = gl.exp2(s)
        return m, l + gl.convert_layout(_lane_sum(x), L_L), m, x
    top = gl.max(s, axis=1) * c2
    if len(part) > 0:
        top = top + part[0]
    m_new = gl.where(top - m > slack, top, m)
    reference = _finite(m_new)
    alpha = gl.exp2(m - reference + rest)
    if len(part) > 0:
        reference = reference - part[0]
    x = gl.exp2(s * c2 - reference[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, L_L))[:, None] + gl.convert_layout(_lane_sum(x), L_L)
    return m_new, l, alpha, x


@gluon.jit
def _rescaled(acc, alpha, FIXED: gl.constexpr):
    if FIXED is None:
        acc = scale_rows(acc, alpha)
    return acc


@gluon.jit
def _seen(acc, m, l, FINALIZE: gl.constexpr):
    """Return acc, m and l of sums whose point of reference is 0, with m = -inf for a row that sees nothing. A state
    gets an m that is near the largest score, which is a power of two away: l and o stay exact."""
    total = gl.convert_layout(gl.sum(l, axis=1), m.type.layout)
    if not FINALIZE:
        L_L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        m = gl.floor(gl.log2(gl.where(total == 0.0, 1.0, total)))
        l = l * gl.convert_layout(gl.exp2(-m), L_L)[:, None]
        acc = _scaled(acc, gl.exp2(-m))
    return acc, gl.where(total == 0.0, float("-inf"), m), l


@gluon.jit
def _alibi(slot, C: gl.constexpr, alibi, c2, BN: gl.constexpr, layout: gl.constexpr):
    """Return what scores of a query tile need for ALiBi: positions of its rows, slope, the position that they are
    relative to and where the positions of keys are, then what :func:`ramp.of_rows` adds; nothing if there is no
    ALiBi."""
    if len(alibi) > 0:
        slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr, even = alibi
        info = slot.load(INFO_LAYOUT)
        row = _number(info, 0)
        latest = _number(info, 1) - 1
        slope = gl.load(slopes_ptr + _number(info, 6) * slopes_stride + _number(info, 7)) * LOG2E_HI
        base = middle(gl.load(positions_q_ptr + row), gl.load(positions_q_ptr + latest))
        row += C * ROWS
        rows = relative(gl.load(positions_q_ptr + row + gl.arange(0, ROWS, layout)), base)
        alibi = (rows, slope, base, positions_k_ptr)
        if len(even) > 0:
            lowest = gl.load(positions_q_ptr + gl.minimum(row, latest))
            highest = gl.load(positions_q_ptr + gl.minimum(row + ROWS - 1, latest))
            alibi = ramp.of_rows(rows, slope, base, positions_k_ptr, c2, even, lowest, highest, BN)
    return alibi


@gluon.jit
def _changed(s, c2, changes, column, FIXED: gl.constexpr):
    """Return scores after softcap and ALiBi, and what they are times, to the base 2."""
    inner, alibi = changes
    if FIXED is not None:
        return scaled_and_capped(s, FIXED), 1.0
    s = capped(s, inner)
    if ramp.is_ramp(alibi):
        s = ramp.taken_off(s, alibi, column)
    elif len(alibi) > 0:
        rows, slope, base, positions_k_ptr = alibi
        columns = gl.load(positions_k_ptr + column + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))
        s = s * c2 - penalties(slope, rows, relative(columns, base))
        c2 = 1.0
    return s, c2


@gluon.jit
def _first_scores(
    some, q_s, k_s, q_full, k_full, i, g, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    Q_BUFFERS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Issue the product of query tile i and key tile g of this CTA, without a product with V. If there is no such tile,
    take the turn all the same: the operands are stale and the scores are not used."""
    TURN: gl.constexpr = FREE_BARRIERS
    buffer, phase = _q_buffer(i, Q_BUFFERS)
    ks = g % STAGES
    if some:
        mbarrier.wait(q_full.index(buffer * N + C), phase)
        mbarrier.wait(k_full.index(ks), (g // STAGES) & 1)
    barrier_sync(TURN + C, 256)
    s = _scores(_q_pieces(q_s, buffer * N + C), k_s, ks, layout)
    barrier_arrive(TURN + (C + 1) % N, 256)
    return s


@gluon.jit
def _step(
    q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes, even,
    C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of key tile g + 1, and the product of P and V of key tile g. ``even``: side and first
    position of keys whose scores get ALiBi by a product, or nothing."""
    BN: gl.constexpr = k_s[0].shape[2]
    DTYPE: gl.constexpr = v_s.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    TURN: gl.constexpr = FREE_BARRIERS
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    vs = g % STAGES
    v_phase = (g // STAGES) & 1
    g += 1
    ks = g % STAGES
    mbarrier.wait(k_full.index(ks), (g // STAGES) & 1)
    barrier_sync(TURN + C, 256)
    s = _scores(q, k_s, ks, S_L)
    if len(even) > 0:  # the product that adds ALiBi
        A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
        side, first = even
        s = warpgroup_mma(_unpack(side[0], gl.bfloat16, A_L), changes[1][10].permute((1, 0)), s, is_async=True)
    acc = _rescaled(acc, alpha, FIXED)  # overlaps the product with K
    mbarrier.wait(v_full.index(vs), v_phase)
    p = _unpack(packed, DTYPE, P_L)
    acc = warpgroup_mma(p, _rows(v_s, vs), acc, is_async=True)
    barrier_arrive(TURN + (C + 1) % N, 256)
    s = warpgroup_mma_wait(1, deps=[s])
    barrier_arrive(K_FREE + ks, THREADS)
    if FIXED is not None and not MASK:
        low, high, sums = exponentials_of_capped(s, FIXED)
        l += gl.convert_layout(sums, l.type.layout)
    else:
        part = ()
        if len(even) > 0:
            keep_alive(side[0])
            part = (ramp.part_of_rows(changes[1], side, first),)  # type: ignore[assignment]
            unit = c2
        else:
            s, unit = _changed(s, c2, changes, column, FIXED)
        if MASK:
            slot, start_ptr, end_ptr, rows_batch_stride = intervals
            start, end = _intervals(slot, C, start_ptr, end_ptr, rows_batch_stride, gl.SliceLayout(1, S_L))
            s = _hide(s, column, start, end)
        m, l, alpha, x = _softmax(s, m, l, 0.0, unit, part, SLACK, FIXED)
        low, high = pairs(x)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    keep_alive(packed)
    barrier_arrive(V_FREE + vs, THREADS)
    packed = gl.convert_layout(_pack(low, high, DTYPE), packed.type.layout)
    return acc, m, l, alpha, packed


@gluon.jit
def _walk(
    last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals,
    changes, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Walk the key tiles below ``last`` down to ``begin``, each with the product of P and V of the tile before: cut,
    full, cut."""
    if ramp.is_ramp(changes[1]):
        return _walk_with_ramps(
            last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2,
            intervals, changes, C, N, STAGES, EARLY, FIXED,
        )  # fmt: skip
    BN: gl.constexpr = k_s[0].shape[2]
    if EARLY:
        q = _q_again(q_s, at, last)
    for column in range(last - BN, full_end - BN, -BN):
        acc, m, l, alpha, packed = _step(
            q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes, (), C, N,
            STAGES, True, FIXED,
        )  # fmt: skip
        g += 1
    if EARLY:
        q = _q_again(q_s, at, full_end)
    for column in range(gl.minimum(full_end, last) - BN, full_begin - BN, -BN):
        acc, m, l, alpha, packed = _step(
            q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes, (), C, N,
            STAGES, False, FIXED,
        )  # fmt: skip
        g += 1
    if EARLY:
        q = _q_again(q_s, at, begin)
    for column in range(gl.minimum(full_begin, last) - BN, begin - BN, -BN):
        acc, m, l, alpha, packed = _step(
            q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes, (), C, N,
            STAGES, True, FIXED,
        )  # fmt: skip
        g += 1
    return g, acc, m, l, alpha, packed


@gluon.jit
def _walk_with_ramps(
    last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals,
    changes, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Walk the same key tiles where ALiBi is a product: by turns those that are cut or not even, and others."""
    BN: gl.constexpr = k_s[0].shape[2]
    alibi = changes[1]
    column = last - BN
    first = ramp.first_before(alibi, last, BN)
    even = (column >= full_begin) & (column < full_end) & ramp.is_even(alibi, first)
    while column >= begin:
        queries = _q_again(q_s, at, column) if EARLY else q
        while (column >= begin) & (not even):
            first = ramp.first_before(alibi, column, BN)
            acc, m, l, alpha, packed = _step(
                queries, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes, (), C,
                N, STAGES, True, FIXED,
            )  # fmt: skip
            g += 1
            column -= BN
            even = (column >= full_begin) & (column < full_end) & ramp.is_even(alibi, first)
        queries = _q_again(q_s, at, column + BN) if EARLY else q
        side = ramp.side_of(alibi, first)
        while even:
            following = ramp.first_before(alibi, column, BN)
            acc, m, l, alpha, packed = _step(
                queries, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, intervals, changes,
                (side, first), C, N, STAGES, False, FIXED,
            )  # fmt: skip
            g += 1
            column -= BN
            first = following
            even = (column >= full_begin) & ramp.is_on(side, first)
        even = (column >= full_begin) & (column < full_end) & ramp.is_even(alibi, first)
    return g, acc, m, l, alpha, packed


@gluon.jit
def _consumer(
    args, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr, DV: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr, STAGED: gl.constexpr,
    PERIOD: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    (
        out_desc, out_ptr, lse_ptr, l_ptr, m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr, start_ptr, end_ptr,
        q_s, k_s, v_s, o_s, info_s, q_full, q_free, k_full, v_full, info_full,
        seq_q, q_heads, rows_batch_stride, c2, inner, alibi,
    ) = args  # fmt: skip
    BN: gl.constexpr = k_s[0].shape[2]
    W: gl.constexpr = v_s.shape[4]
    DTYPE: gl.constexpr = v_s.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    TURN: gl.constexpr = FREE_BARRIERS
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    EARLY: gl.constexpr = Q_BUFFERS > 1  # the next queries can be loaded before this query tile is stored
    if C == N - 1:
        barrier_arrive(TURN, 256)  # consumer 0 goes first

    g = 0  # number of key tiles before the current one
    i = 0  # number of query tiles before the current one
    mbarrier.wait(info_full.index(0), 0)
    slot = info_s.index(0)
    some, last, begin, full_begin, full_end = _span(slot, BN)
    if EARLY:
        start, end = _intervals(slot, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
        s = _first_scores(some, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
        if HAS_STATE:
            m, rest, l_in, acc = _enter(slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L)
        s = warpgroup_mma_wait(0, deps=[s])
        if some:
            barrier_arrive(K_FREE, THREADS)
    while some:
        # The last key tile, whose scores are there already where EARLY.
        buffer, _ = _q_buffer(i, Q_BUFFERS)
        at = buffer * N + C
        if not EARLY:
            start, end = _intervals(slot, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
            q = _q_pieces(q_s, at)
            s = _first_scores(True, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
            if HAS_STATE:
                m, rest, l_in, acc = _enter(slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier_arrive(K_FREE + g % STAGES, THREADS)
        l = _lane_sum(gl.zeros([ROWS, BN], gl.float32, S_L))
        if HAS_STATE:
            l = l + gl.convert_layout(l_in, gl.SliceLayout(1, l.type.layout))[:, None]
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            rest = gl.zeros([ROWS], gl.float32, S_ROW)
            acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if PERIOD:
            m_aside = m
            if HAS_STATE:
                gl.store(_scratch(aside_ptr, C, N, W, O_L), _scaled(acc, gl.exp2(rest)))
                acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if FIXED is not None:
            m = gl.zeros([ROWS], gl.float32, S_ROW)
        changes = (inner, _alibi(slot, C, alibi, c2, BN, S_ROW))
        s, unit = _changed(s, c2, changes, last, FIXED)
        s = _hide(s, last, start, end)
        m, l, alpha, x = _softmax(s, m, l, rest, unit, (), 0.0, FIXED)
        low, high = pairs(x)
        packed = _pack(low, high, DTYPE)

        intervals = (slot, start_ptr, end_ptr, rows_batch_stride)
        if EARLY:
            q = ()
        if PERIOD:
            for above in range(last, begin, -BN * PERIOD):
                down = gl.maximum(above - BN * PERIOD, begin)
                g, acc, m, l, alpha, packed = _walk(
                    above, down, gl.maximum(full_begin, down), gl.maximum(full_end, down), q, q_s, at, k_s, v_s, k_full,
                    v_full, g, acc, m, l, alpha, packed, c2, intervals, changes, C, N, STAGES, EARLY, FIXED,
                )  # fmt: skip
                acc, m_aside = _flush(_rescaled(acc, alpha, FIXED), m, aside_ptr, m_aside, C, N)
        else:
            g, acc, m, l, alpha, packed = _walk(
                last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed,
                c2, intervals, changes, C, N, STAGES, EARLY, FIXED,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(at), count=1)

        # The last product with V, and where EARLY the first scores of the next query tile.
        vs = g % STAGES
        mbarrier.wait(v_full.index(vs), (g // STAGES) & 1)
        acc = _rescaled(acc, alpha, FIXED)
        p = _unpack(packed, DTYPE, P_L)
        acc = warpgroup_mma(p, _rows(v_s, vs), acc, is_async=True)
        g += 1
        i += 1
        mbarrier.wait(info_full.index(i % SLOTS), (i // SLOTS) & 1)
        following = info_s.index(i % SLOTS)
        some, last, begin, full_begin, full_end = _span(following, BN)
        if EARLY:
            start, end = _intervals(following, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        keep_alive(packed)
        barrier_arrive(V_FREE + vs, THREADS)
        if PERIOD:
            acc = _with_flushed(acc, m, aside_ptr, m_aside, C, N)
        if EARLY:
            s = _first_scores(some, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
        if FIXED is not None:
            acc, m, l = _seen(acc, m, l, FINALIZE)
        _store(
            acc, m, l, slot, out_desc, out_ptr, lse_ptr, l_ptr, sink_ptr, o_s,
            seq_q, q_heads, C, DTYPE, DV, HAS_SINK, FINALIZE, STAGED, S_ROW,
        )  # fmt: skip
        slot = following
        if EARLY:
            if HAS_STATE:
                m, rest, l_in, acc = _enter(slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L)
            s = warpgroup_mma_wait(0, deps=[s])
            if some:
                barrier_arrive(K_FREE + g % STAGES, THREADS)
    if FINALIZE and STAGED:
        tma.store_wait(0)


@gluon.jit
def _tiles(desc, count: gl.constexpr):
    """Allocate shared memory for ``count`` boxes of a descriptor."""
    SHAPE: gl.constexpr = [count, 1, desc.block_type.shape[1], 1, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


_NUMBERS = (
    "rows_batch_stride", "table_batch_stride", "seq_q", "q_heads", "ratio", "n_tiles", "n_heads", "group", "early",
    "epoch", "slopes_stride",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)  # one compiled kernel for all shapes
def _forward_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc,  # the rest: None if the head dim is a power of two
    v_desc, out_desc, out_ptr, lse_ptr, l_ptr,  # out, lse, - or o, m, l
    m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr,
    start_ptr, end_ptr, rows_batch_stride,
    table_ptr, table_batch_stride, counter_ptr,
    seq_q, q_heads, ratio, n_tiles, n_heads, group, early, c2,
    flags_ptr, epoch, timed_out_ptr,  # None if all keys have arrived
    own_k_desc, own_k_rest_desc, own_v_desc, places_ptr,  # None if all keys are in the chunk
    inner, slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr,  # None without softcap; without ALiBi
    firsts_ptr,  # None without ALiBi as a product
    N: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, Q_BUFFERS: gl.constexpr,
    STAGED: gl.constexpr, DV: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr, READY: gl.constexpr,
    PERIOD: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    WHOLE: gl.constexpr = q_rest_desc is None
    q_descs = (q_desc,) if WHOLE else (q_desc, q_rest_desc)
    k_descs = (k_desc,) if WHOLE else (k_desc, k_rest_desc)
    Q: gl.constexpr = Q_BUFFERS * N
    q_s = (_tiles(q_desc, Q),) if WHOLE else (_tiles(q_desc, Q), _tiles(q_rest_desc, Q))
    k_s = (_tiles(k_desc, STAGES),) if WHOLE else (_tiles(k_desc, STAGES), _tiles(k_rest_desc, STAGES))
    v_s = _tiles(v_desc, STAGES)
    o_s = _tiles(out_desc, N)
    info_s = gl.allocate_shared_memory(gl.int32, [SLOTS, INFO], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * N, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * N, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    info_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(Q_BUFFERS * N):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(info_full.index(slot), count=1)
    # The producer is the default partition: it keeps the registers that the consumers leave.
    own_k_descs = (own_k_desc,) if WHOLE else (own_k_desc, own_k_rest_desc)
    own = () if places_ptr is None else (own_k_descs, own_v_desc, places_ptr)
    flags = (flags_ptr, epoch, timed_out_ptr)
    producer = (
        q_descs, k_descs, v_desc, own, table_ptr, counter_ptr, flags,
        q_s, k_s, v_s, info_s, q_full, q_free, k_full, v_full, info_full,
        n_tiles, n_heads, q_heads, ratio, group, early, table_batch_stride,
    )  # fmt: skip
    even = () if firsts_ptr is None else (firsts_ptr, ramp.columns_in_shared_memory(BN))
    alibi = () if slopes_ptr is None else (slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr, even)
    consumer = (
        out_desc, out_ptr, lse_ptr, l_ptr, m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr, start_ptr, end_ptr,
        q_s, k_s, v_s, o_s, info_s, q_full, q_free, k_full, v_full, info_full,
        seq_q, q_heads, rows_batch_stride, c2, inner, alibi,
    )  # fmt: skip
    SKIP_EMPTY: gl.constexpr = HAS_STATE and not HAS_SINK and not FINALIZE
    if N == 2:
        gl.warp_specialize(
            [
                (_producer, (producer, N, BN, STAGES, Q_BUFFERS, SKIP_EMPTY, READY)),
                (
                    _consumer,
                    (consumer, 0, N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
                ),
                (
                    _consumer,
                    (consumer, 1, N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
                ),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_producer, (producer, N, BN, STAGES, Q_BUFFERS, SKIP_EMPTY, READY)),
                (
                    _consumer,
                    (consumer, 0, N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
                ),
                (
                    _consumer,
                    (consumer, 1, N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
                ),
                (
                    _consumer,
                    (consumer, 2, N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
                ),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


# ---------------------------------------------------------------- host


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is neither bfloat16 nor float16"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v differ in dtype"
    if (q.shape[-1], v.shape[-1]) not in CONFIGS:
        return f"head dims {q.shape[-1]} of q, k and {v.shape[-1]} of v; it has {sorted(CONFIGS)}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not readable(x):
            return f"{name} with strides {tuple(x.stride())} is not laid out in steps of 16 bytes, as TMA needs"
    if not q.is_cuda:
        return f"device {q.device} is not a CUDA device"
    if capability(q.device) != (9, 0):
        return f"it needs compute capability 9.0; {torch.cuda.get_device_name(q.device)} is another"
    return None


def forward(
    q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool, into: Tensor | None = None
) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`..backends.Backend.forward`. A carried state is updated in place.

    Args:
        into: with ``finalize``, where the output is written, contiguous; a new tensor if absent.
    """
    v, sink = keys.v, None if score.sink is None or state is not None else score.sink.contiguous()
    batch, seq_q, q_heads, _ = q.shape
    shape = (batch, seq_q, q_heads, v.shape[-1])
    if state is not None:
        state = Partial(*(x.contiguous() for x in state))
    if finalize:
        out = q.new_empty(shape) if into is None else into
        lse = q.new_empty(batch, q_heads, seq_q, dtype=torch.float32)
        outputs = (out, lse, lse)
    elif state is not None:
        outputs = (state.o, state.m, state.l)  # each tile reads its rows of the state before it writes them
    else:
        rows = q.new_empty(2, batch, q_heads, seq_q, dtype=torch.float32)
        outputs = (q.new_empty(shape, dtype=torch.float32), rows[0], rows[1])
    config = CONFIGS[q.shape[-1], v.shape[-1]]
    if config.value_parts == 1:
        _run(_Operands(q, keys, sink, state, outputs, finalize), score, config)
    else:
        if state is not None and not finalize:
            state = Partial(state.m.clone(), state.l.clone(), state.o)  # each launch starts from them
        for first in range(0, v.shape[-1], v.shape[-1] // config.value_parts):
            columns = slice(first, first + v.shape[-1] // config.value_parts)
            o = outputs[0][..., columns]
            carried = None
            if state is not None:
                carried = Partial(state.m, state.l, state.o[..., columns] if finalize else o)
            part = _Operands(q, _values_of(keys, columns), sink, carried, (o, *outputs[1:]), finalize)
            _run(part, score, config)
    return Result(outputs[0], outputs[1]) if finalize else Partial(outputs[1], outputs[2], outputs[0])


def _values_of(keys: Keys, columns: slice) -> Keys:
    """Return the same keys with some of the columns of their values."""
    ready = keys.ready
    if ready is not None and ready.own is not None:
        ready = ready._replace(own=ready.own._replace(v=ready.own.v[..., columns]))
    return keys._replace(v=keys.v[..., columns], ready=ready)


class _Operands(NamedTuple):
    """The tensors of a launch. ``outputs``: where it writes out and, twice, lse, or o, m and l."""

    q: Tensor
    keys: Keys
    sink: Tensor | None
    state: Partial | None
    outputs: tuple[Tensor, ...]
    finalize: bool


def _run(x: _Operands, score: Score, config: Config) -> None:
    """Launch the kernel, again if a launch with such tensors has been remembered."""
    q, (k, v, block, ready), sink, state, outputs, finalize = x
    changes = Changes.of(score, q)
    own = None if ready is None else ready.own
    own_strides = () if own is None else (own.k.shape, own.k.stride(), own.v.stride())
    key = (
        q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), state is None, sink is None,
        finalize, ready is None, *own_strides, changes.scale, changes.inner, changes.slopes_stride,
        changes.slopes is None,
    )  # fmt: skip
    launches = block.memo.once("hopper forward", Launches)
    with on_device(q):
        counter = work_counter(q.device)
        tensors = [q, k, v, *(outputs[:2] if finalize else outputs), counter]
        tensors += [t for t in (sink, changes.slopes) if t is not None]
        tensors += [t for t in state or () if not any(t is y for y in outputs)]
        epoch = 0
        if ready is not None:
            tensors += [ready.flags, ready.timed_out]
            epoch = int32(ready.epoch)
        if own is not None:
            tensors += own[:2]
        if not launches.again(key, tensors, epoch):
            bounded = _fixed(q, changes, False)
            grid, args, constants = _launch(x, changes, config, counter)
            launched = dispatch(
                _forward_kernel, grid, *args,
                variants=lambda: _variants(q, block, score, outputs[1], constants["BN"], bounded), **constants,
            )  # fmt: skip
            if not block.period:  # otherwise each launch allocates memory of its own, and takes long
                fixed: tuple[Tensor, ...] = query_tile_table(block, config.block_m, config.block_n, q.device)
                if changes.slopes is not None:
                    fixed += tuple(t for t in _positions(q, block, config, changes) if t is not None)
                if own is not None:
                    fixed += (own.places(block, own.k.device),)
                number_at = None if ready is None else _forward_kernel.arg_names.index("epoch")
                launches.remember(key, tensors, launched, fixed, number_at)


def _launch(
    x: _Operands, changes: Changes, config: Config, counter: Tensor
) -> tuple[tuple[int, int, int], tuple, dict[str, Any]]:
    """Return grid, arguments and constants of the kernel."""
    q, (k, v, block, ready), sink, state, outputs, finalize = x
    own = None if ready is None else ready.own
    batch, seq_q, q_heads, head_dim = q.shape
    head_dim_v = v.shape[-1]
    table, start, end = query_tile_table(block, config.block_m, config.block_n, q.device)
    n_tiles, n_heads = table.shape[1], batch * q_heads
    workers = min(processors(q), n_tiles * n_heads)
    first = 2 ** (head_dim.bit_length() - 1)  # the columns of the first piece of q and k
    width = 2 ** (head_dim_v - 1).bit_length()  # TMA reads zeros past the head dim, and writes nothing there
    out, lse, l = outputs
    m_in, l_in, o_in = state or (lse, lse, lse)
    period = block.period // config.block_n
    aside = lse.new_empty(workers, config.block_m, width) if period else lse
    staged = out if finalize else q  # a state is stored without TMA, and this descriptor is not used
    args = (
        *_pieces(q, ROWS.value, first), *_pieces(k, config.block_n, first),
        view(v, (1, config.block_n, 1, width)), view(staged, (1, ROWS.value, 1, width)), out, lse, l,
        m_in, l_in, o_in, aside, lse if sink is None else sink,
        start, end, start.stride(0) if start.shape[0] > 1 else 0,
        table, table.stride(0) if table.shape[0] > 1 else 0, counter,
        seq_q, q_heads, q_heads // k.shape[2], n_tiles, n_heads,
        *head_sweeps(n_tiles, n_heads, workers), changes.scale,
        *((None, None, None) if ready is None else (ready.flags, int32(ready.epoch), ready.timed_out)),
        *((None, None, None, None) if own is None else _own(own, block, config, first, width)),
        changes.inner, changes.slopes, changes.slopes_stride,
        *((None, None, None) if changes.slopes is None else _positions(q, block, config, changes)),
    )  # fmt: skip
    constants = dict(
        N=config.consumers, BN=config.block_n, STAGES=config.stages, REGISTERS=config.registers,
        Q_BUFFERS=config.q_buffers, DV=head_dim_v * config.value_parts,
        STAGED=config.staged and (config.staged_with_ramp or not ramp.usable(changes)),
        HAS_STATE=state is not None, HAS_SINK=sink is not None, FINALIZE=finalize,
        READY=ready is not None, PERIOD=period,
        FIXED=_fixed(q, changes, state is not None),
    )  # fmt: skip
    return (workers, 1, 1), args, constants


def _own(own: OwnKeys, block: Block, config: Config, first: int, width: int) -> tuple[Any, ...]:
    """Return the views of this rank's own keys and values, and where the tiles of the chunk are in them."""
    places = own.places(block, own.k.device)
    return *_pieces(own.k, config.block_n, first), view(own.v, (1, config.block_n, 1, width)), places


def _positions(q: Tensor, block: Block, config: Config, changes: Changes) -> tuple[Tensor | None, ...]:
    """Return the positions of queries and keys, padded so that a tile need not end where they do, and the first ones of
    tiles of keys if ALiBi is a product."""
    padded = padded_positions(block, config.block_m, config.block_n, q.device)
    if not ramp.usable(changes):
        return *padded, None
    return *padded, ramp.steps_of_tiles(block, config.block_m, config.block_n, q.device)


def _fixed(q: Tensor, changes: Changes, has_state: bool) -> tuple[float, float] | None:
    """Return :attr:`Changes.fixed` if p can have its range and no other point of reference is carried in."""
    return None if has_state or q.dtype != torch.bfloat16 else changes.fixed


def _variants(
    q: Tensor, block: Block, score: Score, row: Tensor, block_n: int, fixed: tuple[float, float] | None
) -> list[dict[str, Any]]:
    """Return how a launch may differ with other documents: with and without a state, complete or not, a longer sum.

    Args:
        row: any float32 tensor.
        fixed: of launches without a state.
    """
    periods = [dict(PERIOD=period // block_n) for period in ((0, PERIOD) if block.long else ())]
    if not block.chunked:
        return periods
    sink = score.sink is not None
    states = [
        dict(HAS_STATE=state, HAS_SINK=sink and not state, FIXED=None if state else fixed) for state in (False, True)
    ]
    outputs = [dict(FINALIZE=True, out_ptr=q), dict(FINALIZE=False, out_ptr=row)]
    return [{**a, **b, **c} for a in states for b in outputs for c in periods or [{}]]


def _pieces(x: Tensor, rows: int, first: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return boxes for the first columns, a power of two, and for the remaining ones, if any."""
    rest = x.shape[-1] - first
    return view(x, (1, rows, 1, first)), view(x, (1, rows, 1, rest)) if rest else None
