"""The forward kernel for Hopper (sm_90) at head dims up to 256, in Gluon. Started by forward_kernel.py.

One CTA per SM, or three: a producer warpgroup that moves tiles by TMA, and one to three consumer warpgroups, each with
64 query rows. The consumers of a CTA share the key and value tiles, two stages deep::

    producer        Q(i) K V K V K V ... | next tile: Q(i+1) K V K V ...
    consumer, step  wait K[j] ; take the turn ; S = Q K[j]^T ; O *= alpha ; wait V[j-1] ; O += P V[j-1] ; give the turn
                    S done: free K[j] ; row max, exp2, row sums ; O done: free V[j-1] ; P to 16 bit
    consumer, end   O += P V[0] ; O done: free V[0] ; first S of the next query tile ; meanwhile store O and lse

* Both products of a step are asynchronous: the softmax of tile j overlaps the product with V of tile j-1,
  and the turn, passed from consumer to consumer, makes one consumer's products overlap another one's softmax.
* The keys of a query tile are walked from the last to the first. Of its span (see ``TileMap``) only the cut parts
  and the very first key tile apply the intervals; the loop over full key tiles is straight-line code without a mask.
* A query tile may lie across documents. With three consumers (head dim 64) each walks the key tiles that one of its
  rows sees, and only takes its turns in the others (:func:`_own_span`).
* The producer runs ahead into the next query tile: Q has two buffers, and the description of the next tile is loaded
  while the producer waits for free stages for the last keys of this one.
* Query tiles are handed out by an atomic counter (work_counter.py), heaviest first within a few heads at a time:
  balanced for any mask, few heads' keys in L2 at once, and robust if other work slows some SMs down.
* With ``arrival`` the producer waits for the flag of a head's keys and values before their first tile. The heads are
  swept in the order of arrival; the consumers are the same with and without flags. Tiles of this rank's own keys
  (``own``) are read where they are and wait for no flag: only the first tile with fetched keys does.
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
* Scores stay unscaled until the exponent, which is taken to the base 2: p = 2^(s c - m) with c = scale log2(e).
  m is in that unit here; the state in memory is in natural logarithms, see :func:`store`.
* Split-KV for the last wave, against wave quantization: query tiles that are fewer than SMs are divided, and each part
  of their keys is a piece of work like a query tile, as in Flash-Decoding
  (https://pytorch.org/blog/flash-decoding/) and Stream-K (Osama et al. 2023, arXiv:2301.03598). The sums of a part go
  to memory, and the last part to arrive adds up all, in their order: the bits are the same each time (:func:`_joined`).

Schedule: Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608). What was tried: docs/lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..contract import GRID as _GRID
from ..triton.primitives import LN2, LOG2E, LOG2E_REST
from . import alibi_product
from .primitives import (
    FREE_BARRIERS,
    async_load,
    async_store,
    barrier_arrive,
    barrier_sync,
    barriers,
    buffer_of,
    bytes_of,
    fence_memory,
    hide_columns,
    keep_alive,
    load_pieces,
    numbers_in_shared_memory,
    round_asm,
    scale_rows,
    tiles_like,
    wait_row,
)
from .scores import capped, exponentials_of_capped, middle, pairs, penalties, relative, scaled_and_capped
from .work_counter import take_number

ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one wgmma
INFO = gl.constexpr(8)  # int32 numbers that describe a query tile, see forward.query_tile_table
SLOTS = gl.constexpr(4)  # descriptions in shared memory: one is read until two tiles later
INFO_LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # every thread holds all of them
GRID = gl.constexpr(_GRID)  # keys of a tile that a rank's own keys are read in, see OwnKeys
SLACK = gl.constexpr(8.0)  # the most that a score may exceed its point of reference, to the base 2
COUNTERS_AT = gl.constexpr(8)  # the counters of parts that have arrived, behind the work counter


# --- arguments that travel together; a field in capitals is a constexpr ---------------------------------------------


class Options(NamedTuple):
    N: gl.constexpr  # consumers of a CTA
    STAGES: gl.constexpr  # of keys and values
    Q_BUFFERS: gl.constexpr
    DV: gl.constexpr  # columns of the output in memory
    HAS_STATE: gl.constexpr
    HAS_SINK: gl.constexpr
    FINALIZE: gl.constexpr  # the output is stored, and not the state
    STAGED: gl.constexpr  # it is stored by TMA
    PERIOD: gl.constexpr  # key tiles after which O is flushed; 0 for never
    FIXED: gl.constexpr  # scores.Changes.fixed, or None


class Inputs(NamedTuple):
    """TMA descriptors of queries, keys and values; of q and k one for each piece of the columns."""

    q: tuple
    k: tuple
    v: Any
    own: tuple  # those of this rank's own keys and values, and the places of tiles in them; () if all are in the chunk


class Work(NamedTuple):
    """The division of the work, see :func:`tile_info`."""

    table_ptr: gl.tensor
    table_batch_stride: gl.tensor
    counter_ptr: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    q_heads: gl.tensor
    ratio: gl.tensor  # query heads of a key head
    group: gl.tensor
    early: gl.tensor


class Parts(NamedTuple):
    """The division of the last query tiles, see :class:`.forward.Division`."""

    numbers: Any  # of the parts whose descriptions are in shared memory, negative for a whole query tile
    undivided: gl.tensor
    of_tile: gl.tensor
    in_all: gl.tensor
    sums_ptr: gl.tensor  # (in_all, N, ROWS, columns) float32, followed by m and l, (in_all, N, 2, ROWS)
    counter_ptr: gl.tensor  # the work counter, followed by the counts of arrived parts of each consumer


class Rows(NamedTuple):
    """Tensors with rows of queries."""

    out_desc: Any
    out_ptr: gl.tensor  # out, lse, - or o, m, l
    lse_ptr: gl.tensor
    l_ptr: gl.tensor
    m_in_ptr: gl.tensor
    l_in_ptr: gl.tensor
    o_in_ptr: gl.tensor
    aside_ptr: gl.tensor  # flushed sums
    sink_ptr: gl.tensor
    start_ptr: gl.tensor
    end_ptr: gl.tensor


class Sizes(NamedTuple):
    seq_q: gl.tensor
    q_heads: gl.tensor
    batch_stride: gl.tensor  # of the intervals of rows; 0 if they are the same for all batch elements


class Score(NamedTuple):
    """What becomes of the products of q and k, see scores.py."""

    scale: gl.tensor  # to the base 2
    inner: Any  # of the softcap, or None
    alibi: tuple  # see alibi_of(); () without ALiBi


class Shared(NamedTuple):
    """Shared memory: tiles, those of q and k in one or two pieces, and mbarriers."""

    q: Sequence[Any]
    k: Sequence[Any]
    v: Any
    out: Any
    info: Any  # descriptions of query tiles
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    info_full: Any


class QueryTile(NamedTuple):
    """What all steps of a query tile read."""

    q: tuple  # its matrices; () if each loop finds them, see _q_again()
    at: gl.tensor  # their place in shared memory
    slot: Any  # its description
    rows: Rows
    sizes: Sizes
    score: Score


class Sums(NamedTuple):
    """What a step carries to the next one."""

    acc: gl.tensor  # O
    m: gl.tensor
    l: gl.tensor  # of each lane of a quad
    alpha: gl.tensor  # what O is still to be multiplied by
    packed: gl.tensor  # P, not yet multiplied by V


@gluon.jit
def number_of(info, i: gl.constexpr):
    """Return element i of a query tile's description, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, INFO, INFO_LAYOUT) == i, info, 0), axis=0)


@gluon.jit
def matrix_of(tiles, i):
    """Return tile i of (tiles, 1, rows, 1, D) in shared memory as a matrix (rows, D)."""
    return tiles.index(i).reshape([tiles.shape[2], tiles.shape[4]])


@gluon.jit
def scaled(x, factor):
    """Return x times a factor for each row, which is in the layout of the scores."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def finite(m):
    """Return m as a point of reference: 0 where nothing was seen, so that -inf - m stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


# --- scores, softmax, and P in 16 bits ------------------------------------------------------------------------------


@gluon.jit
def span_of(slot, BN: gl.constexpr):
    """Return whether there is a query tile, its last key tile and its span."""
    info = slot.load(INFO_LAYOUT)
    begin = number_of(info, 2)
    end = gl.maximum(number_of(info, 5), begin + BN)
    return number_of(info, 0) >= 0, end - BN, begin, number_of(info, 3), number_of(info, 4)


@gluon.jit
def intervals_of(slot, C: gl.constexpr, rows, sizes, layout: gl.constexpr):
    """Return the first and past-the-last key that each row of consumer C sees."""
    info = slot.load(INFO_LAYOUT)
    row = number_of(info, 0) + C * ROWS + gl.arange(0, ROWS, layout)
    inside = row < number_of(info, 1)
    row_start = gl.load(rows.start_ptr + number_of(info, 6) * sizes.batch_stride + row, mask=inside, other=0)
    row_end = gl.load(rows.end_ptr + number_of(info, 6) * sizes.batch_stride + row, mask=inside, other=0)
    return row_start, row_end


@gluon.jit
def alibi_of(slot, C: gl.constexpr, score, BN: gl.constexpr, layout: gl.constexpr):
    """Return what scores of a query tile need for ALiBi: positions of its rows, slope, the position that they are
    relative to and where the positions of keys are, then what :func:`alibi_product.of_rows` adds; nothing if there is
    no ALiBi."""
    alibi = score.alibi
    if len(alibi) > 0:
        slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr = alibi[:4]
        info = slot.load(INFO_LAYOUT)
        row = number_of(info, 0)
        latest = number_of(info, 1) - 1
        slope = gl.load(slopes_ptr + number_of(info, 6) * slopes_stride + number_of(info, 7)) * LOG2E
        base = middle(gl.load(positions_q_ptr + row), gl.load(positions_q_ptr + latest))
        row += C * ROWS
        rows = relative(gl.load(positions_q_ptr + row + gl.arange(0, ROWS, layout)), base)
        if len(alibi) > 4:
            lowest = gl.load(positions_q_ptr + gl.minimum(row, latest))
            highest = gl.load(positions_q_ptr + gl.minimum(row + ROWS - 1, latest))
            even = alibi[4]
            alibi = alibi_product.of_rows(rows, slope, base, positions_k_ptr, score.scale, even, lowest, highest, BN)
        else:
            alibi = (rows, slope, base, positions_k_ptr)
    return alibi


@gluon.jit
def changed(s, score, column, FIXED: gl.constexpr):
    """Return scores after softcap and ALiBi, and what they are times, to the base 2."""
    alibi = score.alibi
    if FIXED is not None:
        return scaled_and_capped(s, FIXED), 1.0
    c2 = score.scale
    s = capped(s, score.inner)
    if alibi_product.is_product(alibi):
        s = alibi_product.taken_off(s, alibi, column)
    elif len(alibi) > 0:
        rows, slope, base, positions_k_ptr = alibi
        columns = gl.load(positions_k_ptr + column + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))
        s = s * c2 - penalties(slope, rows, relative(columns, base))
        c2 = 1.0
    return s, c2


@gluon.jit
def hide(s, column, start, end):
    """Return s with -inf where the row does not see the key. ``column``: the tile's first key."""
    return hide_columns(s, start - column, end - column)


@gluon.jit
def row_max(s, CHAINS: gl.constexpr):
    """Return the maximum of each row. A thread finds that of its numbers one after the other, or, for a power of two
    ``CHAINS``, in twice as many chains of instructions of which none waits for another."""
    if CHAINS == 1:
        return gl.max(s, axis=1)
    columns = gl.reshape(s, [s.shape[0], CHAINS, s.shape[1] // (8 * CHAINS), 4, 2])
    top = gl.max(gl.max(gl.max(gl.max(columns, axis=2), axis=1), axis=2), axis=1)
    return gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def softmax(s, m, l, rest, c2, part, slack: gl.constexpr, FIXED: gl.constexpr, CHAINS: gl.constexpr = 1):
    """Move m to the maximum if that is more than ``slack`` above it; alpha rescales earlier sums. ``rest``: the
    rounding error of m, see ``enter``. ``part``: what is added to all scores of a row, or nothing. ``FIXED``: m stays
    0. ``CHAINS``: see :func:`row_max`."""
    L_L: gl.constexpr = l.type.layout
    if FIXED is not None:
        x = gl.exp2(s)
        return m, l + gl.convert_layout(lane_sum(x), L_L), m, x
    top = row_max(s, CHAINS) * c2
    if len(part) > 0:
        top = top + part[0]
    m_new = gl.where(top - m > slack, top, m)
    reference = finite(m_new)
    alpha = gl.exp2(m - reference + rest)
    if len(part) > 0:
        reference = reference - part[0]
    x = gl.exp2(s * c2 - reference[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, L_L))[:, None] + gl.convert_layout(lane_sum(x), L_L)
    return m_new, l, alpha, x


@gluon.jit
def lane_sum(p):
    """Return the sums of each lane of a quad: (R, N) in wgmma layout -> (R, 4). Without a shuffle: the quad is summed
    once per query tile."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def rescaled(acc, alpha, FIXED: gl.constexpr):
    if FIXED is None:
        acc = scale_rows(acc, alpha)
    return acc


@gluon.jit
def seen_from_zero(acc, m, l, FINALIZE: gl.constexpr):
    """Return acc, m and l of sums whose point of reference is 0, with m = -inf for a row that sees nothing. A state
    gets an m that is near the largest score, which is a power of two away: l and o stay exact."""
    total = gl.convert_layout(gl.sum(l, axis=1), m.type.layout)
    if not FINALIZE:
        L_L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        m = gl.floor(gl.log2(gl.where(total == 0.0, 1.0, total)))
        l = l * gl.convert_layout(gl.exp2(-m), L_L)[:, None]
        acc = scaled(acc, gl.exp2(-m))
    return acc, gl.where(total == 0.0, float("-inf"), m), l


@gluon.jit
def pack(low, high, dtype: gl.constexpr):
    """Return the float32 numbers of :func:`pairs` as int32 of 16-bit pairs. A loop that carries 16-bit elements holds
    halves of registers and needs a PRMT for each pair before the wgmma."""
    return gl.inline_asm_elementwise(round_asm(dtype), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(dtype.value, dtype.value), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2]), layout)


# --- what is read at the beginning of a query tile and stored at its end --------------------------------------------


@gluon.jit
def _row_offsets(info, C: gl.constexpr, sizes, layout: gl.constexpr):
    """Return the offsets of the rows of consumer C in (batch, q_heads, seq_q), and which of them belong to the tile."""
    row = number_of(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, layout)
    first = (number_of(info, 6).to(gl.int64) * sizes.q_heads + number_of(info, 7)) * sizes.seq_q + row
    return first + rows, row + rows < number_of(info, 1)


@gluon.jit
def _values(ptr, info, C: gl.constexpr, sizes, D: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the values of consumer C in (batch, seq_q, q_heads, D), a tile W wide, and which of them
    belong to the query tile."""
    row = number_of(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    q_heads = sizes.q_heads
    ptr += ((number_of(info, 6).to(gl.int64) * sizes.seq_q + row) * q_heads + number_of(info, 7)) * D
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    inside = (row + rows < number_of(info, 1))[:, None]
    if D < W:
        inside = inside & (columns < D)[None, :]
    return (ptr + rows * (q_heads * D))[:, None] + columns[None, :], inside


@gluon.constexpr_function
def _vector_store_layout(width):
    """Return the layout of the sums of a product, (64, width), after four lanes have exchanged pairs of columns: each
    has eight in a row, which it stores by 16 bytes. By pairs it would store 4, and four lanes half a sector."""
    more = [[0, 1 << i] for i in range(5, width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *more],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def _store_values(ptr, x, info, C: gl.constexpr, sizes, D: gl.constexpr, layout: gl.constexpr):
    """Store the rows of consumer C, (64, columns), in the dtype there, from registers in this layout."""
    values, inside = _values(ptr, info, C, sizes, D, x.shape[1], layout)
    gl.store(values, gl.convert_layout(x.to(ptr.dtype.element_ty), layout), mask=inside)


@gluon.jit
def _enter_rows(slot, C: gl.constexpr, tensors, sizes, layout: gl.constexpr, some=True):
    """Return m of the carried state to the base 2, its rounding error, and a quarter of l for each lane of a quad."""
    rows, inside = _row_offsets(slot.load(INFO_LAYOUT), C, sizes, layout)
    inside = inside & some
    m_nat = gl.load(tensors.m_in_ptr + rows, mask=inside, other=float("-inf"))
    l = gl.load(tensors.l_in_ptr + rows, mask=inside, other=0.0)
    m = m_nat * LOG2E
    rest = gl.fma(m_nat, LOG2E_REST, gl.fma(m_nat, LOG2E, -m))
    return m, gl.where(m_nat == float("-inf"), 0.0, rest), l * 0.25


@gluon.jit
def enter(
    slot, C: gl.constexpr, tensors, sizes, D: gl.constexpr, W: gl.constexpr, rows_layout: gl.constexpr,
    layout: gl.constexpr, some=True,
):  # fmt: skip
    """Return the carried state of a query tile: m to the base 2, its rounding error, a quarter of l for each lane of a
    quad, and o; nothing seen unless ``some``."""
    m, rest, l = _enter_rows(slot, C, tensors, sizes, rows_layout, some)
    values, inside = _values(tensors.o_in_ptr, slot.load(INFO_LAYOUT), C, sizes, D, W, layout)
    return m, rest, l, gl.load(values, mask=inside & some, other=0.0)


@gluon.jit
def store(acc, m, l, slot, tensors, sizes, out_s, C: gl.constexpr, options):
    """Store a query tile: as out, divided by l, and lse, or as the state."""
    D: gl.constexpr = options.DV
    O_L: gl.constexpr = acc.type.layout
    S_ROW: gl.constexpr = m.type.layout
    # An exchange goes through shared memory, which has no room where acc has a part of the columns.
    OUT_L: gl.constexpr = O_L if acc.shape[1] < D else _vector_store_layout(acc.shape[1])
    info = slot.load(INFO_LAYOUT)  # loaded again: in registers it would slow the steps down
    rows, inside = _row_offsets(info, C, sizes, S_ROW)
    l = gl.convert_layout(gl.sum(l, axis=1), S_ROW)
    factor = gl.full([ROWS], 1.0, gl.float32, S_ROW)
    if options.HAS_SINK:  # a key with this score and a value of zero
        sink = gl.load(tensors.sink_ptr + number_of(info, 7)) * LOG2E
        joined = gl.maximum(m, sink)
        factor = gl.exp2(m - finite(joined))
        l = l * factor + gl.exp2(sink - finite(joined))
        m = joined
    if options.FINALIZE:
        seen = l != 0.0
        lse = gl.where(seen, gl.fma(m, LN2, gl.log(l)), float("-inf"))
        gl.store(tensors.lse_ptr + rows, lse, mask=inside)
        factor = factor / gl.where(seen, l, 1.0)
        acc = scaled(acc, factor)
        if options.STAGED:
            row = number_of(info, 0) + C * ROWS
            past = number_of(info, 1)
            if (row + ROWS <= past) | (past == sizes.seq_q):  # TMA stops at the end of the tensor, not of a segment
                tma.store_wait(0)
                matrix_of(out_s, C).store(acc.to(out_s.dtype))
                fence_async_shared()
                async_store(tensors.out_desc, [number_of(info, 6), row, number_of(info, 7), 0], out_s.index(C))
            else:
                _store_values(tensors.out_ptr, acc, info, C, sizes, D, O_L)
        else:
            _store_values(tensors.out_ptr, acc, info, C, sizes, D, OUT_L)
    else:
        # As a natural logarithm m is rounded: adapt l and o to the rounded point of reference.
        m_nat = m * LN2
        exact = gl.exp2(gl.fma(m_nat, -LOG2E_REST, gl.fma(m_nat, -LOG2E, m)))
        exact = gl.where(m == float("-inf"), 1.0, exact)
        gl.store(tensors.lse_ptr + rows, m_nat, mask=inside)
        gl.store(tensors.l_ptr + rows, l * exact, mask=inside)
        _store_values(tensors.out_ptr, scaled(acc, factor * exact), info, C, sizes, D, O_L)


@gluon.jit
def scratch(ptr, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the flushed sums of consumer C: (CTAs, N, ROWS, W) float32, private to each thread."""
    row = (gl.program_id(0) * N + C) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return (ptr + row * W)[:, None] + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def with_flushed(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Return acc, whose point of reference is m, plus the flushed sum, whose point of reference is m_aside."""
    L: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    kept = gl.convert_layout(gl.exp2(m_aside - finite(m)), ROW)[:, None]
    any_aside = gl.convert_layout(m_aside, ROW)[:, None] != float("-inf")
    W: gl.constexpr = acc.shape[1]
    before = gl.load(scratch(aside_ptr, C, N, W, L), mask=any_aside, other=0.0)
    return before * kept + acc


@gluon.jit
def flush(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Flush acc, whose point of reference is m: add it to the sum in memory. Return zeros and the sum's new m_aside."""
    L: gl.constexpr = acc.type.layout
    W: gl.constexpr = acc.shape[1]
    gl.store(scratch(aside_ptr, C, N, W, L), with_flushed(acc, m, aside_ptr, m_aside, C, N))
    return gl.zeros([ROWS, W], gl.float32, L), m


# --- query tiles whose keys are divided -----------------------------------------------------------------------------


@gluon.jit
def _tile_of(w, division):
    """Return the query tile that piece of work w belongs to, and the number of its part among all, negative if it is
    whole."""
    part = w - division.undivided
    return gl.where(part < 0, w, division.undivided + part // division.of_tile), part


@gluon.jit
def _keys_of_part(info, part, parts, BN: gl.constexpr):
    """Return the description of a query tile with the keys of a part."""
    begin = number_of(info, 2)
    tiles = (number_of(info, 5) - begin) // BN
    first = begin + tiles * (part % parts) // parts * BN
    past = begin + tiles * (part % parts + 1) // parts * BN
    i = gl.arange(0, INFO, INFO_LAYOUT)
    inside = gl.minimum(gl.maximum(info, first), past)
    return gl.where((part >= 0) & (i >= 2) & (i < 6), inside, info)


@gluon.jit
def _sums_of_part(ptr, part, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the sums of a part, (parts, N, ROWS, W) float32."""
    rows = (part * N + C) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return (ptr + rows.to(gl.int64) * W)[:, None] + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _rows_of_part(ptr, part, in_all, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to m and l of a part, (parts, N, 2, ROWS) float32 behind the sums of all parts."""
    ptr += in_all.to(gl.int64) * (N * ROWS * W) + (part * N + C) * 2 * ROWS
    m_ptr = ptr + gl.arange(0, ROWS, layout)
    return m_ptr, m_ptr + ROWS


@gluon.jit
def _joined(part, division, acc, m, l, C: gl.constexpr, N: gl.constexpr, BARRIER: gl.constexpr):
    """Return acc, m and l of a query tile, and whether it is to be stored: as they are if it is whole, otherwise the
    sums of all parts in the CTA that is the last to arrive here. By the four warps of a consumer.

    Args:
        part: number of this part, negative if the query tile is whole.
        BARRIER: of this consumer alone.
    """
    L: gl.constexpr = acc.type.layout
    S_ROW: gl.constexpr = m.type.layout
    W: gl.constexpr = acc.shape[1]
    complete = part < 0
    if part >= 0:
        gl.store(_sums_of_part(division.sums_ptr, part, C, N, W, L), acc)
        m_ptr, l_ptr = _rows_of_part(division.sums_ptr, part, division.in_all, C, N, W, S_ROW)
        gl.store(m_ptr, m)
        gl.store(l_ptr, gl.convert_layout(gl.sum(l, axis=1), S_ROW))
        fence_memory()
        barrier_sync(BARRIER, 128)
        parts = division.of_tile
        tile = part // parts
        number = gl.sum(take_number(division.counter_ptr + COUNTERS_AT + tile * N + C, parts), axis=0)
        fence_memory()
        complete = number == parts - 1
        if complete:
            acc = gl.zeros([ROWS, W], gl.float32, L)
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            total = gl.zeros([ROWS], gl.float32, S_ROW)
            for i in range(tile * parts, (tile + 1) * parts):
                m_ptr, l_ptr = _rows_of_part(division.sums_ptr, i, division.in_all, C, N, W, S_ROW)
                of_part = gl.load(m_ptr, cache_modifier=".cg")  # L1 may not have what other processors store
                larger = gl.maximum(m, of_part)
                before = gl.exp2(m - finite(larger))
                now = gl.exp2(of_part - finite(larger))
                total = total * before + gl.load(l_ptr, cache_modifier=".cg") * now
                x = gl.load(_sums_of_part(division.sums_ptr, i, C, N, W, L), cache_modifier=".cg")
                acc = scaled(acc, before) + scaled(x, now)
                m = larger
            l = gl.convert_layout(total * 0.25, gl.SliceLayout(1, l.type.layout))[:, None] + gl.zeros_like(l)
    return acc, m, l, complete


# --- producer -------------------------------------------------------------------------------------------------------


@gluon.jit
def tile_info(work, w):
    """Return the description of query tile ``w`` in the order of work, with the batch and the head filled in.

    The first ``early`` heads are swept ``group`` at a time, the others all together; the heaviest tiles come first.
    """
    first = gl.minimum(w // (work.group * work.n_tiles) * work.group, work.early)
    heads = gl.where(first < work.early, work.group, work.n_heads - work.early)
    rest = w - first * work.n_tiles
    head = first + rest % heads
    rank = rest // heads
    batch = head // work.q_heads
    i = gl.arange(0, INFO, INFO_LAYOUT)
    info = gl.load(work.table_ptr + batch * work.table_batch_stride + rank * INFO + i)
    return gl.where(i == 6, batch, gl.where(i == 7, head % work.q_heads, info))


@gluon.jit
def _piece_info(w, division, work, BN: gl.constexpr):
    """Return the description of piece of work ``w``: a query tile, or a part of the keys of one."""
    if len(division) > 0:
        w, part = _tile_of(w, division)
        info = _keys_of_part(tile_info(work, w), part, division.of_tile, BN)
    else:
        info = tile_info(work, w)
    return info


@gluon.jit
def _numbered_piece(taken, total, division, work, BN: gl.constexpr, SKIP_EMPTY: gl.constexpr):
    """Return number and description of the piece of work that was taken, or of the next one that is not empty."""
    w = total
    info = gl.full([INFO], -1, gl.int32, INFO_LAYOUT)
    again = True
    while again:
        w = taken + gl.num_programs(0)
        again = False
        if w < total:
            info = _piece_info(w, division, work, BN)
            if SKIP_EMPTY:
                again = number_of(info, 5) == 0
                if again:
                    taken = gl.sum(take_number(work.counter_ptr, total), axis=0)
    return w, info


@gluon.jit
def _load_pieces(desc, tiles, full, batch, row, head, i):
    """Load rows of one head into tile i of each piece."""
    mbarrier.expect(full.index(i), bytes_of(desc))
    load_pieces(desc, [batch, row, head], full.index(i), tiles, i)


@gluon.jit
def _load_keys(inputs, arrival, arrived, shared, batch, column, kv_head, row, g, options):
    """Load key tile number g of this CTA, as soon as the consumers have released its stage: one of this rank's own
    where it is, another one of ``row`` after its flag. Return the latest row whose flag was waited for."""
    THREADS: gl.constexpr = 128 * (options.N + 1)
    STAGES: gl.constexpr = options.STAGES
    K_FREE: gl.constexpr = FREE_BARRIERS + options.N
    V_FREE: gl.constexpr = K_FREE + STAGES
    OWN: gl.constexpr = len(inputs.own) > 0
    stage, _ = buffer_of(g, STAGES)
    place = gl.load(inputs.own[2] + column // GRID) if OWN else -1
    if g >= STAGES:
        barrier_sync(K_FREE + stage, THREADS)
    if OWN and (place >= 0):
        _load_pieces(inputs.own[0], shared.k, shared.k_full, batch, place + column % GRID, kv_head, stage)
    else:
        if OWN:  # noqa: SIM102
            if row != arrived:
                wait_row(row, arrival, 4)
                arrived = row
        _load_pieces(inputs.k, shared.k, shared.k_full, batch, column, kv_head, stage)
    if g >= STAGES:
        barrier_sync(V_FREE + stage, THREADS)
    if OWN and (place >= 0):
        _load_values(inputs.own[1], shared, batch, place + column % GRID, kv_head, stage)
    else:
        _load_values(inputs.v, shared, batch, column, kv_head, stage)
    return arrived


@gluon.jit
def _load_values(desc, shared, batch, row, head, i):
    mbarrier.expect(shared.v_full.index(i), desc.block_type.nbytes)
    async_load(desc, [batch, row, head, 0], shared.v_full.index(i), shared.v.index(i))


@gluon.jit
def _producer(inputs, work, division, arrival, shared, options, BN: gl.constexpr):
    """Run the producer: take query tiles, announce them, and load queries, keys and values, until none is left."""
    N: gl.constexpr = options.N
    Q_BUFFERS: gl.constexpr = options.Q_BUFFERS
    READY: gl.constexpr = arrival.flags_ptr is not None
    SKIP_EMPTY: gl.constexpr = options.HAS_STATE and not options.HAS_SINK and not options.FINALIZE
    total = work.n_tiles * work.n_heads
    if len(division) > 0:
        total = division.undivided + (total - division.undivided) * division.of_tile
    w = gl.program_id(0)
    info = _piece_info(w, division, work, BN)
    if SKIP_EMPTY:  # noqa: SIM102
        if number_of(info, 5) == 0:
            taken = gl.sum(take_number(work.counter_ptr, total), axis=0)
            w, info = _numbered_piece(taken, total, division, work, BN, SKIP_EMPTY)
    g = 0  # key tiles moved so far
    i = 0  # query tiles moved so far
    arrived = -1  # the latest row of keys and values whose flag was waited for
    while w < total:
        slot, phase = buffer_of(i, Q_BUFFERS)
        for c in gl.static_range(N):
            mbarrier.wait(shared.q_free.index(slot * N + c), phase ^ 1)
        shared.info.index(i % SLOTS).store(info)
        if len(division) > 0:
            slots = division.numbers
            slots.index(i % SLOTS).store(gl.full([INFO], w - division.undivided, gl.int32, INFO_LAYOUT))
        mbarrier.arrive(shared.info_full.index(i % SLOTS), count=1)
        first = number_of(info, 0)
        begin = number_of(info, 2)
        end = gl.maximum(number_of(info, 5), begin + BN)  # nothing to see: one tile, all hidden
        batch = number_of(info, 6)
        head = number_of(info, 7)
        kv_head = head // work.ratio
        for c in gl.static_range(N):
            _load_pieces(inputs.q, shared.q, shared.q_full, batch, first + c * ROWS, head, slot * N + c)
        row = 0
        if READY:
            row = (batch * work.q_heads + head) // work.ratio
            if len(inputs.own) == 0:  # noqa: SIM102
                if row != arrived:
                    wait_row(row, arrival, 4)
                    arrived = row
        for column in range(end - BN, begin + BN, -BN):
            arrived = _load_keys(inputs, arrival, arrived, shared, batch, column, kv_head, row, g, options)
            g += 1
        # Request the next tile's number, then its description, while waiting to load the last two key tiles: memory
        # latency is about the time until the consumers need a key tile.
        number = take_number(work.counter_ptr, total)
        for column in range(gl.minimum(begin, end - 2 * BN) + BN, begin, -BN):
            arrived = _load_keys(inputs, arrival, arrived, shared, batch, column, kv_head, row, g, options)
            g += 1
        w, info = _numbered_piece(gl.sum(number, axis=0), total, division, work, BN, SKIP_EMPTY)
        arrived = _load_keys(inputs, arrival, arrived, shared, batch, begin, kv_head, row, g, options)
        g += 1
        i += 1
    slot, phase = buffer_of(i, Q_BUFFERS)
    for c in gl.static_range(N):
        mbarrier.wait(shared.q_free.index(slot * N + c), phase ^ 1)
    shared.info.index(i % SLOTS).store(gl.full([INFO], -1, gl.int32, INFO_LAYOUT))
    mbarrier.arrive(shared.info_full.index(i % SLOTS), count=1)


# --- consumers ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _chains(consumers):
    """Return the ``CHAINS`` of :func:`row_max`. Two consumers have it at the same time as exponentials
    of their other rows; three find it sooner in more chains, and the others have exponentials meanwhile."""
    return 2 if consumers == 3 else 1


@gluon.jit
def _take_turn(C: gl.constexpr, N: gl.constexpr):
    """Wait until the consumer before has issued its products; a consumer that is alone has all turns."""
    if N > 1:
        barrier_sync(FREE_BARRIERS + C, 256)


@gluon.jit
def _give_turn(C: gl.constexpr, N: gl.constexpr):
    """Let the next consumer issue its products."""
    if N > 1:
        barrier_arrive(FREE_BARRIERS + (C + 1) % N, 256)


@gluon.jit
def _keys(tiles, i):
    return matrix_of(tiles, i).permute((1, 0))


@gluon.jit
def _q_pieces(q_s, i):
    return [matrix_of(piece, i) for piece in q_s]


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
def _first_scores(some, shared, i, g, C: gl.constexpr, options, layout: gl.constexpr):
    """Issue the product of query tile i and key tile g of this CTA, without a product with V. If there is no such tile,
    take the turn all the same: the operands are stale and the scores are not used."""
    N: gl.constexpr = options.N
    buffer, phase = buffer_of(i, options.Q_BUFFERS)
    ks, k_phase = buffer_of(g, options.STAGES)
    if some:
        mbarrier.wait(shared.q_full.index(buffer * N + C), phase)
        mbarrier.wait(shared.k_full.index(ks), k_phase)
    _take_turn(C, N)
    s = _scores(_q_pieces(shared.q, buffer * N + C), shared.k, ks, layout)
    _give_turn(C, N)
    return s


@gluon.jit
def _step(q, tile, shared, g, sums, column, limits, even, C: gl.constexpr, options, MASK: gl.constexpr):
    """Compute scores and softmax of key tile g + 1, and the product of P and V of key tile g.

    Args:
        limits: first and past-the-last key that each row sees; not read without ``MASK``.
        even: side and first position of keys whose scores get ALiBi by a product, or nothing.
    """
    N: gl.constexpr = options.N
    STAGES: gl.constexpr = options.STAGES
    FIXED: gl.constexpr = options.FIXED
    BN: gl.constexpr = shared.k[0].shape[2]
    DTYPE: gl.constexpr = shared.v.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.acc.type.layout, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    acc, m, l, alpha, packed = sums
    vs, v_phase = buffer_of(g, STAGES)
    g += 1
    ks, k_phase = buffer_of(g, STAGES)
    mbarrier.wait(shared.k_full.index(ks), k_phase)
    _take_turn(C, N)
    s = _scores(q, shared.k, ks, S_L)
    if len(even) > 0:  # the product that adds ALiBi
        A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
        side, first = even
        rows = unpack(side[0], gl.bfloat16, A_L)
        s = warpgroup_mma(rows, alibi_product.columns_of(tile.score.alibi), s, is_async=True)
    acc = rescaled(acc, alpha, FIXED)  # overlaps the product with K
    mbarrier.wait(shared.v_full.index(vs), v_phase)
    p = unpack(packed, DTYPE, P_L)
    acc = warpgroup_mma(p, matrix_of(shared.v, vs), acc, is_async=True)
    _give_turn(C, N)
    s = warpgroup_mma_wait(1, deps=[s])
    barrier_arrive(K_FREE + ks, THREADS)
    if FIXED is not None and not MASK:
        low, high, lanes = exponentials_of_capped(s, FIXED, 2 if N == 2 else 0)  # three consumers have fewer registers
        l += gl.convert_layout(lanes, l.type.layout)
    else:
        part = ()
        if len(even) > 0:
            keep_alive(side[0])
            part = (alibi_product.part_of_rows(tile.score.alibi, side, first),)  # type: ignore[assignment]
            unit = tile.score.scale
        else:
            s, unit = changed(s, tile.score, column, FIXED)
        if MASK:
            start, end = limits
            s = hide(s, column, start, end)
        m, l, alpha, x = softmax(s, m, l, 0.0, unit, part, SLACK, FIXED, _chains(N))
        low, high = pairs(x)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    keep_alive(packed)
    barrier_arrive(V_FREE + vs, THREADS)
    packed = gl.convert_layout(pack(low, high, DTYPE), packed.type.layout)
    return Sums(acc, m, l, alpha, packed)


@gluon.jit
def _limits(tile, C: gl.constexpr, BN: gl.constexpr):
    """Read the first and past-the-last key that each row of consumer C sees."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    return intervals_of(tile.slot, C, tile.rows, tile.sizes, gl.SliceLayout(1, S_L))


@gluon.jit
def _walk_part(past, begin, late, tile, shared, g, sums, C: gl.constexpr, options, MASK: gl.constexpr):
    """Walk the key tiles below ``past`` down to ``begin``, all cut (``MASK``) or all full. ``late``: a number that is
    computed before this loop, see :func:`_q_again`."""
    BN: gl.constexpr = shared.k[0].shape[2]
    q = tile.q
    if len(q) == 0:
        q = _q_again(shared.q, tile.at, late)
    limits = ()
    if MASK:  # read again: held all the time they would take registers from the loop over full tiles
        limits = _limits(tile, C, BN)
    for column in range(past - BN, begin - BN, -BN):
        sums = _step(q, tile, shared, g, sums, column, limits, (), C, options, MASK)
        g += 1
    return g, sums


@gluon.jit
def _walk(last, begin, full_begin, full_end, tile, shared, g, sums, C: gl.constexpr, options):
    """Walk the key tiles below ``last`` down to ``begin``, each with the product of P and V of the tile before: cut,
    full, cut."""
    if alibi_product.is_product(tile.score.alibi):
        return _walk_with_alibi(last, begin, full_begin, full_end, tile, shared, g, sums, C, options)
    g, sums = _walk_part(last, full_end, last, tile, shared, g, sums, C, options, True)
    past = gl.minimum(full_end, last)
    g, sums = _walk_part(past, full_begin, full_end, tile, shared, g, sums, C, options, False)
    past = gl.minimum(full_begin, last)
    g, sums = _walk_part(past, begin, begin, tile, shared, g, sums, C, options, True)
    return g, sums


@gluon.jit
def _walk_with_alibi(last, begin, full_begin, full_end, tile, shared, g, sums, C: gl.constexpr, options):
    """Walk the same key tiles where ALiBi is a product: by turns those that are cut or not even, and others."""
    BN: gl.constexpr = shared.k[0].shape[2]
    EARLY: gl.constexpr = len(tile.q) == 0
    alibi = tile.score.alibi
    column = last - BN
    first = alibi_product.first_before(alibi, last, BN)
    even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
    while column >= begin:
        q = _q_again(shared.q, tile.at, column) if EARLY else tile.q
        limits = _limits(tile, C, BN)
        while (column >= begin) & (not even):
            first = alibi_product.first_before(alibi, column, BN)
            sums = _step(q, tile, shared, g, sums, column, limits, (), C, options, True)
            g += 1
            column -= BN
            even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
        q = _q_again(shared.q, tile.at, column + BN) if EARLY else tile.q
        side = alibi_product.side_of(alibi, first)
        while even:
            following = alibi_product.first_before(alibi, column, BN)
            sums = _step(q, tile, shared, g, sums, column, (), (side, first), C, options, False)
            g += 1
            column -= BN
            first = following
            even = (column >= full_begin) & alibi_product.is_on(side, first)
        even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
    return g, sums


@gluon.jit
def _outer_rows(slot, C: gl.constexpr, rows, sizes, some):
    """Read the start and the end of the first row of consumer C, and of its last one, four int32 numbers; zeros if it
    has none."""
    info = slot.load(INFO_LAYOUT)
    row = number_of(info, 0) + C * ROWS
    latest = gl.minimum(row + ROWS, number_of(info, 1)) - 1
    some = some & (row <= latest)
    start_ptr = rows.start_ptr + number_of(info, 6) * sizes.batch_stride
    end_ptr = rows.end_ptr + number_of(info, 6) * sizes.batch_stride
    return (
        gl.load(start_ptr + row, mask=some, other=0),
        gl.load(end_ptr + row, mask=some, other=0),
        gl.load(start_ptr + latest, mask=some, other=0),
        gl.load(end_ptr + latest, mask=some, other=0),
    )


@gluon.jit
def _own_span(outer, last, begin, BN: gl.constexpr):
    """Return which key tiles of a query tile, from ``begin`` to ``last``, a consumer with these :func:`_outer_rows`
    walks, ``[first, past)``, one at least, and in which of them it hides nothing, ``[full_begin, full_end)``.

    Consumers see different keys at the diagonal, and where a query tile lies across documents. Neither start nor end
    decreases along the rows: the first row's start and the last one's end are the limits of what any of them sees, and
    the other two of what all of them see; if some row sees nothing there is nothing between these.
    """
    first, full_end, full_begin, past = outer
    first = gl.minimum(gl.maximum(first // BN * BN, begin), last)
    past = gl.maximum(gl.minimum((past + BN - 1) // BN * BN, last + BN), first + BN)
    full_begin = gl.minimum(gl.maximum((full_begin + BN - 1) // BN * BN, first), past)
    full_end = gl.minimum(gl.maximum(full_end // BN * BN, full_begin), past)
    return first, past, full_begin, full_end


@gluon.jit
def _pass_turns(count, shared, g, C: gl.constexpr, options):
    """Take the turns of ``count`` key tiles of which this consumer sees nothing: wait for and release their keys and
    values. Return g after them."""
    N: gl.constexpr = options.N
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + options.STAGES
    for _ in range(0, count):
        stage, phase = buffer_of(g, options.STAGES)
        mbarrier.wait(shared.k_full.index(stage), phase)
        _take_turn(C, N)
        _give_turn(C, N)
        barrier_arrive(K_FREE + stage, THREADS)
        mbarrier.wait(shared.v_full.index(stage), phase)
        barrier_arrive(V_FREE + stage, THREADS)
        g += 1
    return g


@gluon.jit
def _to_own_span(outer, some, last, begin, shared, g, C: gl.constexpr, options, BN: gl.constexpr):
    """Pass the turns before this consumer's first key tile, if there is ``some`` query tile. Return its
    :func:`_own_span` and g."""
    first, past, full_begin, full_end = _own_span(outer, last, begin, BN)
    g = _pass_turns(gl.where(some, (last + BN - past) // BN, 0), shared, g, C, options)
    return first, past, full_begin, full_end, g


@gluon.jit
def _part(division, i):
    """Return the number of the part that query tile i of this CTA is, negative if it is whole."""
    return number_of(division.numbers.index(i % SLOTS).load(INFO_LAYOUT), 0)


@gluon.jit
def _is_first(division, i):
    """Return whether query tile i of this CTA is whole or the first of its parts, which begins with the carried
    state."""
    first = True
    if len(division) > 0:
        part = _part(division, i)
        first = (part < 0) | (part % division.of_tile == 0)
    return first


@gluon.jit
def _consumer(C: gl.constexpr, rows, shared, sizes, score, division, options):
    """Run consumer C: scores, softmax and products with V of its rows of each query tile, until there are none."""
    N: gl.constexpr = options.N
    STAGES: gl.constexpr = options.STAGES
    HAS_STATE: gl.constexpr = options.HAS_STATE
    PERIOD: gl.constexpr = options.PERIOD
    FIXED: gl.constexpr = options.FIXED
    DV: gl.constexpr = options.DV
    BN: gl.constexpr = shared.k[0].shape[2]
    W: gl.constexpr = shared.v.shape[4]
    DTYPE: gl.constexpr = shared.v.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    OWN: gl.constexpr = V_FREE + STAGES + C  # the barrier of this consumer
    # With two consumers it takes as much as it saves. Divided query tiles have equally many key tiles, at most the ends
    # of which are cut.
    OWN_SPAN: gl.constexpr = N > 2 and len(division) == 0 and PERIOD == 0
    EARLY: gl.constexpr = options.Q_BUFFERS > 1  # the next queries can be loaded before this query tile is stored
    if C == N - 1:
        _give_turn(C, N)  # consumer 0 goes first

    g = 0  # number of key tiles before the current one
    i = 0  # number of query tiles before the current one
    mbarrier.wait(shared.info_full.index(0), 0)
    slot = shared.info.index(0)
    some, last, begin, full_begin, full_end = span_of(slot, BN)
    first, past = begin, last + BN  # of the keys that this consumer walks
    if OWN_SPAN:
        outer = _outer_rows(slot, C, rows, sizes, some)
        first, past, full_begin, full_end, g = _to_own_span(outer, some, last, begin, shared, g, C, options, BN)
    if EARLY:
        start, end = intervals_of(slot, C, rows, sizes, S_ROW)
        s = _first_scores(some, shared, i, g, C, options, S_L)
        if HAS_STATE:
            m, rest, l_in, acc = enter(slot, C, rows, sizes, DV, W, S_ROW, O_L, _is_first(division, i))
        s = warpgroup_mma_wait(0, deps=[s])
        if some:
            barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
    while some:
        # The first key tile of the walk, whose scores are there already where EARLY.
        buffer, _ = buffer_of(i, options.Q_BUFFERS)
        at = buffer * N + C
        q = ()
        if not EARLY:
            start, end = intervals_of(slot, C, rows, sizes, S_ROW)
            q = _q_pieces(shared.q, at)
            s = _first_scores(True, shared, i, g, C, options, S_L)
            if HAS_STATE:
                m, rest, l_in, acc = enter(slot, C, rows, sizes, DV, W, S_ROW, O_L, _is_first(division, i))
            s = warpgroup_mma_wait(0, deps=[s])
            barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
        l = lane_sum(gl.zeros([ROWS, BN], gl.float32, S_L))
        if HAS_STATE:
            l = l + gl.convert_layout(l_in, gl.SliceLayout(1, l.type.layout))[:, None]
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            rest = gl.zeros([ROWS], gl.float32, S_ROW)
            acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if PERIOD:
            m_aside = m
            if HAS_STATE:
                gl.store(scratch(rows.aside_ptr, C, N, W, O_L), scaled(acc, gl.exp2(rest)))
                acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if FIXED is not None:
            m = gl.zeros([ROWS], gl.float32, S_ROW)
        alibi = alibi_of(slot, C, score, BN, S_ROW)
        tile = QueryTile(q, at, slot, rows, sizes, Score(score.scale, score.inner, alibi))
        s, unit = changed(s, tile.score, past - BN, FIXED)
        s = hide(s, past - BN, start, end)
        m, l, alpha, x = softmax(s, m, l, rest, unit, (), 0.0, FIXED)
        low, high = pairs(x)
        packed = pack(low, high, DTYPE)

        if PERIOD:  # all key tiles, of which those are hidden that this consumer does not see
            for above in range(last, begin, -BN * PERIOD):
                down = gl.maximum(above - BN * PERIOD, begin)
                cut, past_full = gl.maximum(full_begin, down), gl.maximum(full_end, down)
                sums = Sums(acc, m, l, alpha, packed)
                g, sums = _walk(above, down, cut, past_full, tile, shared, g, sums, C, options)
                acc, m, l, alpha, packed = sums
                acc, m_aside = flush(rescaled(acc, alpha, FIXED), m, rows.aside_ptr, m_aside, C, N)
        else:
            sums = Sums(acc, m, l, alpha, packed)
            g, sums = _walk(past - BN, first, full_begin, full_end, tile, shared, g, sums, C, options)
            acc, m, l, alpha, packed = sums
        mbarrier.arrive(shared.q_free.index(at), count=1)

        # The last product with V, and where EARLY the first scores of the next query tile.
        vs, v_phase = buffer_of(g, STAGES)
        mbarrier.wait(shared.v_full.index(vs), v_phase)
        acc = rescaled(acc, alpha, FIXED)
        p = unpack(packed, DTYPE, P_L)
        acc = warpgroup_mma(p, matrix_of(shared.v, vs), acc, is_async=True)
        g += 1
        i += 1
        if OWN_SPAN:  # the producer announces the next query tile when all keys of this one have had room
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            keep_alive(packed)
            barrier_arrive(V_FREE + vs, THREADS)
            g = _pass_turns((first - begin) // BN, shared, g, C, options)
        mbarrier.wait(shared.info_full.index(i % SLOTS), (i // SLOTS) & 1)
        following = shared.info.index(i % SLOTS)
        some, last, begin, full_begin, full_end = span_of(following, BN)
        first, past = begin, last + BN
        if OWN_SPAN:
            outer = _outer_rows(following, C, rows, sizes, some)
        if EARLY:
            start, end = intervals_of(following, C, rows, sizes, S_ROW)
        if not OWN_SPAN:
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            keep_alive(packed)
            barrier_arrive(V_FREE + vs, THREADS)
        if PERIOD:
            acc = with_flushed(acc, m, rows.aside_ptr, m_aside, C, N)
        complete = True
        if len(division) > 0:
            acc, m, l, complete = _joined(_part(division, i - 1), division, acc, m, l, C, N, OWN)
        if OWN_SPAN:
            first, past, full_begin, full_end, g = _to_own_span(outer, some, last, begin, shared, g, C, options, BN)
        if EARLY:
            s = _first_scores(some, shared, i, g, C, options, S_L)
        if FIXED is not None:
            acc, m, l = seen_from_zero(acc, m, l, options.FINALIZE)
        if complete:
            store(acc, m, l, slot, rows, sizes, shared.out, C, options)
        slot = following
        if EARLY:
            if HAS_STATE:
                m, rest, l_in, acc = enter(slot, C, rows, sizes, DV, W, S_ROW, O_L, _is_first(division, i))
            s = warpgroup_mma_wait(0, deps=[s])
            if some:
                barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
    if options.FINALIZE and options.STAGED:
        tma.store_wait(0)


# --- start ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _allocate(inputs, out_desc, options):
    """Allocate shared memory and initialize the barriers."""
    Q: gl.constexpr = options.Q_BUFFERS * options.N
    STAGES: gl.constexpr = options.STAGES
    shared = Shared(
        q=[tiles_like(desc, Q) for desc in inputs.q],
        k=[tiles_like(desc, STAGES) for desc in inputs.k],
        v=tiles_like(inputs.v, STAGES),
        out=tiles_like(out_desc, options.N),
        info=numbers_in_shared_memory(SLOTS, INFO),
        q_full=barriers(Q),
        q_free=barriers(Q),
        k_full=barriers(STAGES),
        v_full=barriers(STAGES),
        info_full=barriers(SLOTS),
    )
    for c in gl.static_range(Q):
        mbarrier.init(shared.q_full.index(c), count=1)
        mbarrier.init(shared.q_free.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(stage), count=1)
        mbarrier.init(shared.v_full.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.info_full.index(slot), count=1)
    return shared


@gluon.jit
def start(inputs, work, arrival, rows, sizes, score, divided, options, BN: gl.constexpr, REGISTERS: gl.constexpr):
    """Allocate shared memory, and start a producer and the consumers. The producer is the default partition: it keeps
    the registers that the consumers leave."""
    N: gl.constexpr = options.N
    shared = _allocate(inputs, rows.out_desc, options)
    division = ()
    if len(divided) > 0:
        undivided, of_tile, in_all, sums_ptr = divided
        numbers = numbers_in_shared_memory(SLOTS, INFO)
        division = Parts(numbers, undivided, of_tile, in_all, sums_ptr, work.counter_ptr)  # type: ignore[assignment]
    alibi = score.alibi
    if len(alibi) > 4:
        even = (alibi[4], alibi_product.columns_in_shared_memory(BN))
        alibi = (alibi[0], alibi[1], alibi[2], alibi[3], even)
    score = Score(score.scale, score.inner, alibi)
    gl.warp_specialize(
        [
            (_producer, (inputs, work, division, arrival, shared, options, BN)),
            (_consumer, (0, rows, shared, sizes, score, division, options)),
            (_consumer, (1, rows, shared, sizes, score, division, options)),
            (_consumer, (2, rows, shared, sizes, score, division, options)),
        ][: N + 1],
        [4, 4, 4][:N],
        [REGISTERS, REGISTERS, REGISTERS][:N],
    )
