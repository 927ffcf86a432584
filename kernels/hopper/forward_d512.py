"""The forward kernel for Hopper (sm_90) at head dim 512, in Gluon: pairs of CTAs that exchange P.

Started by forward_kernel.py, with the tables, order of the work, points of reference and sums of forward_d256.py; a
query tile is 128 rows.

Registers of two consumers hold sums of 128 queries and 256 columns, half of a head dim of 512. So two CTAs, a cluster
(clusters.py), share a query tile: each computes the scores of half of the 128 keys of a step, sends its P to the other
one, and multiplies the P of all keys by half of the columns of V::

    producer        Q | K K V K V ... in units of 8 KB: 64 keys x 64 columns of K, 16 keys x 256 columns of V
    consumer, step  S = Q K[j]^T, own keys ; P[j-1] of the other CTA ; O += P V[j-1], own keys ; S done: row max, exp2,
                    row sums ; P[j] to the other CTA ; O += P V[j-1], its keys ; O done
    consumer, end   O += P V of the last step ; l of the other CTA ; store 256 columns of O, and lse

* Q takes 128 KB of shared memory. The rest has 8 units, and two buffers of P from the other CTA for each consumer. A
  unit is released when the product that reads it has ended in both consumers. The softmax is in the middle of the
  products with V: there are enough of them in flight to last until its end, and enough units free to be loaded
  meanwhile.
* Each thread sends its registers of P to the thread of the other CTA that needs them (:func:`.clusters.send_pairs`).
  No signal says that a buffer is free: a consumer sends message x after it has received message x - 1,
  which the other one has sent after it has read x - 2, from the same buffer.
* Both CTAs know m of the step before. Each may move it for its own keys, and sends the result along with P. The larger
  one of the two is the m of the step; P is multiplied by 2^(its own - m) where that is not 1. After a few steps it
  always is.
* l is a sum over own keys until the end of the query tile.
* The producer of the first CTA takes the numbers of query tiles and sends them to the other one.
* A CTA starts to send when the other one has initialized its barriers, and ends when the other one does.
* Descriptors are computed again in each step (``late``): ptxas would keep them, in local memory. And see
  ``forward_d256._q_again``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .clusters import (
    cluster_arrive,
    cluster_wait,
    fence_barriers,
    offset_of,
    receive_pairs,
    receive_rows,
    send_number,
    send_pairs,
    send_rows,
)
from .forward_d256 import (
    GRID,
    INFO,
    INFO_LAYOUT,
    ROWS,
    SLACK,
    SLOTS,
    QueryTile,
    Rows,
    Score,
    Sizes,
    alibi_of,
    changed,
    enter,
    finite,
    flush,
    hide,
    intervals_of,
    lane_sum,
    number_of,
    pack,
    scaled,
    scratch,
    seen_from_zero,
    softmax,
    span_of,
    store,
    tile_info,
    unpack,
    with_flushed,
)
from .primitives import (
    FREE_BARRIERS,
    async_load,
    barrier_arrive,
    barrier_sync,
    barriers,
    expect_at,
    keep_alive,
    numbers_in_shared_memory,
    reinterpret,
    scale_pairs,
    scale_rows,
    tiles_like,
    wait_at,
    wait_row,
)
from .scores import exponentials_of_capped, pairs
from .work_counter import take_number

CTAS = gl.constexpr(2)  # of a query tile
CONSUMERS = gl.constexpr(2)  # of a CTA, each with 64 rows
DIM = gl.constexpr(512)
WIDTH = gl.constexpr(256)  # columns of V and of the output of a CTA
KEYS = gl.constexpr(64)  # of a CTA in a step
STEP = gl.constexpr(128)  # keys of a step
COLUMNS = gl.constexpr(64)  # of Q and K in a unit
VALUES = gl.constexpr(16)  # keys in a unit of V
UNITS = gl.constexpr(8)  # of K in a step, of V in a step, and in shared memory
HALF = gl.constexpr(4)
UNIT_BYTES = gl.constexpr(8192)

# What the other CTA writes to. A message has one of two buffers, by turns: P of each consumer; their points of
# reference. After them the numbers of query tiles.
P_BYTES = gl.constexpr(8192)
ROWS_BYTES = gl.constexpr(256)  # points of reference
LANES_BYTES = gl.constexpr(1024)  # l
ROWS_AT = gl.constexpr(4 * 8192)
NUMBERS_AT = gl.constexpr(4 * 8192 + 4 * 256)
BOXES = gl.constexpr(17)  # of 2 KB, of all that

# Mbarriers that are waited for at an offset: a message has arrived (of two buffers and consumers), a number has (of
# four slots), a unit is full.
NUMBERED, FULL, BARRIERS = gl.constexpr(4), gl.constexpr(8), gl.constexpr(16)
BARRIERS_FROM = gl.constexpr(168 * 1024)  # they are not before this offset in shared memory

# Named barriers: from this id on, a unit is free.
UNIT_FREE = FREE_BARRIERS
UNIT_THREADS = gl.constexpr(384)  # of both consumers and the producer


PENDING = gl.constexpr(2)  # units of K whose products may be in flight before the next one is issued

S_L = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS.value, 16]))
S_ROW = gl.constexpr(gl.SliceLayout(1, S_L.value))
O_L = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH.value, 16]))
P_L = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=O_L.value, k_width=2))


class Sums(NamedTuple):
    """What a step carries to the next one."""

    acc: gl.tensor  # O
    m: gl.tensor  # the point of reference of O
    mine: gl.tensor  # and of P, before both CTAs have agreed on one
    l: gl.tensor  # of own keys, of each lane of a quad
    packed: gl.tensor  # P of own keys, not yet multiplied by V


class Shared(NamedTuple):
    """Shared memory: tiles, mbarriers, and the offsets of what the other CTA writes to and signals."""

    q: Any  # boxes of 64 columns, of both consumers
    units: Any  # of K and V
    info: Any  # descriptions of query tiles
    numbers: Any  # the box with the numbers of query tiles, int32
    q_full: Any
    q_free: Any
    info_full: Any
    barriers: Any
    messages_at: gl.tensor
    barriers_at: gl.tensor


@gluon.jit
def send(C: gl.constexpr, x, packed, reference, shared, FIXED: gl.constexpr):
    """Send P, and its points of reference if they are not all 0, to consumer C of the other CTA as message x."""
    buffer = (x & 1) * CONSUMERS + C
    full = shared.barriers_at + buffer * 8
    send_pairs(packed, shared.messages_at + buffer * P_BYTES, full)
    if FIXED is None:
        send_rows(reference, shared.messages_at + ROWS_AT + buffer * ROWS_BYTES, full)


@gluon.jit
def receive(C: gl.constexpr, x, packed, reference, shared, FIXED: gl.constexpr):
    """Return what the other CTA has sent as message x, tensors like these, as soon as it is here."""
    buffer = _await(C, x, shared, P_BYTES + (ROWS_BYTES if FIXED is None else 0))
    packed = receive_pairs(packed, shared.messages_at + buffer * P_BYTES)
    if FIXED is None:
        reference = receive_rows(reference, shared.messages_at + ROWS_AT + buffer * ROWS_BYTES)
    return packed, reference


@gluon.jit
def send_sums(C: gl.constexpr, x, l, shared):
    """Send l, in the place of P, as message x."""
    buffer = (x & 1) * CONSUMERS + C
    send_rows(l, shared.messages_at + buffer * P_BYTES, shared.barriers_at + buffer * 8)


@gluon.jit
def receive_sums(C: gl.constexpr, x, l, shared):
    """Return the l that the other CTA has sent as message x, as soon as it is here."""
    return receive_rows(l, shared.messages_at + _await(C, x, shared, LANES_BYTES) * P_BYTES)


@gluon.jit
def _await(C: gl.constexpr, x, shared, BYTES: gl.constexpr):
    """Wait for message x of the other CTA and return its buffer. Bytes may arrive before they are expected: the phase
    of the mbarrier cannot complete without that."""
    buffer = (x & 1) * CONSUMERS + C
    expect_at(shared.barriers_at + buffer * 8, BYTES)
    wait_at(shared.barriers_at + buffer * 8, (x >> 1) & 1)
    return buffer


# --- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_keys(desc, shared, batch, row, head, used):
    """Load 64 keys, one unit after the other, as soon as the consumers have released it, if it has been used."""
    for u in gl.static_range(UNITS):
        full = shared.barriers.index(FULL + u)
        if used:
            barrier_sync(UNIT_FREE + u, UNIT_THREADS)
        mbarrier.expect(full, UNIT_BYTES)
        async_load(desc, [batch, row, head, u * COLUMNS], full, shared.units.index(u))


@gluon.jit
def _load_values(desc, shared, batch, row, head, FIRST: gl.constexpr):
    """Load this CTA's columns of the values of 64 keys, as units FIRST to FIRST + 3."""
    column = gl.program_id(0) % CTAS * WIDTH
    for u in gl.static_range(HALF):
        full = shared.barriers.index(FULL + FIRST + u)
        unit = shared.units.index(FIRST + u)
        barrier_sync(UNIT_FREE + FIRST + u, UNIT_THREADS)
        mbarrier.expect(full, UNIT_BYTES)
        unit = reinterpret(unit, unit.dtype, [1, VALUES, 1, WIDTH], desc.layout)
        async_load(desc, [batch, row + u * VALUES, head, column], full, unit)


@gluon.jit
def _place(own, column):
    """Return where the keys of a step are among this rank's own ones; -1 if they are not."""
    place = -1
    if len(own) > 0:
        place = gl.load(own[2] + column // GRID)
        if place >= 0:
            place += column % GRID
    return place


@gluon.jit
def _load_keys_of_step(inputs, arrival, arrived, shared, batch, column, kv_head, row, used):
    """Load this CTA's keys of a step, from this rank's own ones, or as soon as their flag is up. Return the latest row
    whose flag was waited for."""
    OWN: gl.constexpr = len(inputs.own) > 0
    key = gl.program_id(0) % CTAS * KEYS
    place = _place(inputs.own, column)
    if OWN and (place >= 0):
        _load_keys(inputs.own[0][0], shared, batch, place + key, kv_head, used)
    else:
        if OWN:
            if row != arrived:
                wait_row(row, arrival, 4)
            arrived = row
        _load_keys(inputs.k[0], shared, batch, column + key, kv_head, used)
    return arrived


@gluon.jit
def _load_values_of_step(inputs, shared, batch, column, kv_head):
    """Load the values of a step, whose keys have been loaded: those of this CTA's keys first."""
    place = _place(inputs.own, column)
    for part in gl.static_range(2):
        key = (gl.program_id(0) % CTAS ^ part) * KEYS
        if (len(inputs.own) > 0) and (place >= 0):
            _load_values(inputs.own[1], shared, batch, place + key, kv_head, part * HALF)
        else:
            _load_values(inputs.v, shared, batch, column + key, kv_head, part * HALF)


@gluon.jit
def _next_tile(w, i, work, shared, SKIP_EMPTY: gl.constexpr):
    """Return number and description of query tile i of this pair. The first CTA has its number, ``w``, looks for the
    next one if it is empty, and sends the number to the other CTA. A slot has been read when it is used again: both
    CTAs end a query tile together."""
    total = work.n_tiles * work.n_heads
    slot = i % SLOTS
    info = gl.full([INFO], -1, gl.int32, INFO_LAYOUT)
    if gl.program_id(0) % CTAS == 0:
        again = w < total
        while again:
            info = tile_info(work, w)
            again = False
            if SKIP_EMPTY:
                again = number_of(info, 5) == 0
                if again:
                    w = gl.sum(take_number(work.counter_ptr, total), axis=0) + gl.num_programs(0) // CTAS
                    again = w < total
        send_number(w, shared.messages_at + NUMBERS_AT + slot * 4, shared.barriers_at + (NUMBERED + slot) * 8)
    else:
        arrived = shared.barriers.index(NUMBERED + slot)
        mbarrier.expect(arrived, 4)
        mbarrier.wait(arrived, (i // SLOTS) & 1)
        w = gl.sum(
            shared.numbers.index(NUMBERS_AT % 2048 // 4 + slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0
        )
        if w < total:
            info = tile_info(work, w)
    return w, info


@gluon.jit
def _producer(inputs, work, arrival, shared, options):
    """Run the producer: take query tiles, announce them, and load queries, keys and values, until none is left."""
    READY: gl.constexpr = arrival.flags_ptr is not None
    SKIP_EMPTY: gl.constexpr = options.HAS_STATE and not options.HAS_SINK and not options.FINALIZE
    cluster_arrive(4)
    cluster_wait(4)
    total = work.n_tiles * work.n_heads
    i = 0  # query tiles moved so far
    w, info = _next_tile(gl.program_id(0) // CTAS, i, work, shared, SKIP_EMPTY)
    arrived = -1  # the latest row of keys and values whose flag was waited for
    while w < total:
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(shared.q_free.index(c), (i & 1) ^ 1)
        shared.info.index(i % SLOTS).store(info)
        mbarrier.arrive(shared.info_full.index(i % SLOTS), count=1)
        first = number_of(info, 0)
        begin = number_of(info, 2)
        end = gl.maximum(number_of(info, 5), begin + STEP)  # nothing to see: one step, all hidden
        batch = number_of(info, 6)
        head = number_of(info, 7)
        kv_head = head // work.ratio
        for c in gl.static_range(CONSUMERS):
            mbarrier.expect(shared.q_full.index(c), UNITS * UNIT_BYTES)
            for u in gl.static_range(UNITS):
                at = [batch, first + c * ROWS, head, u * COLUMNS]
                async_load(inputs.q[0], at, shared.q_full.index(c), shared.q.index(c * UNITS + u))
        row = 0
        if READY:
            row = (batch * work.q_heads + head) // work.ratio
            if len(inputs.own) == 0:
                if row != arrived:
                    wait_row(row, arrival, 4)
                arrived = row
        arrived = _load_keys_of_step(inputs, arrival, arrived, shared, batch, end - STEP, kv_head, row, i > 0)
        for column in range(end - 2 * STEP, begin - STEP, -STEP):
            arrived = _load_keys_of_step(inputs, arrival, arrived, shared, batch, column, kv_head, row, True)
            _load_values_of_step(inputs, shared, batch, column + STEP, kv_head)
        number = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        if gl.program_id(0) % CTAS == 0:
            number = take_number(work.counter_ptr, total)
        _load_values_of_step(inputs, shared, batch, begin, kv_head)
        i += 1
        w, info = _next_tile(gl.sum(number, axis=0) + gl.num_programs(0) // CTAS, i, work, shared, SKIP_EMPTY)
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(shared.q_free.index(c), (i & 1) ^ 1)
    shared.info.index(i % SLOTS).store(gl.full([INFO], -1, gl.int32, INFO_LAYOUT))
    mbarrier.arrive(shared.info_full.index(i % SLOTS), count=1)
    cluster_arrive(4)
    cluster_wait(4)


# --- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _release(u: gl.constexpr):
    barrier_arrive(UNIT_FREE + u, UNIT_THREADS)


@gluon.jit
def _wait_for_unit(u: gl.constexpr, shared, PHASE: gl.constexpr):
    """Wait until unit u is full. Its phase is a constant: units are full in turns of keys and values, keys first, and
    2 n times in a query tile of n steps: the first keys and, later, values have phase 0."""
    wait_at(shared.barriers_at, PHASE, (FULL + u) * 8)


@gluon.jit
def _scores(C: gl.constexpr, shared, late, PHASE: gl.constexpr):
    """Issue the product of the queries and this CTA's keys, of which PENDING units are in flight at the end."""
    s = gl.zeros([ROWS, KEYS], gl.float32, S_L)
    for u in gl.static_range(UNITS):
        _wait_for_unit(u, shared, PHASE)
        q = shared.q.index(C * UNITS + u + (late >> 30)).reshape([ROWS, COLUMNS])
        k = shared.units.index(u + (late >> 30)).reshape([KEYS, COLUMNS]).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=u > 0, is_async=True)
        if u >= PENDING:
            s = warpgroup_mma_wait(PENDING, deps=[s])
            _release(u - PENDING)
    return s


@gluon.jit
def _finish_scores(s, OTHERS: gl.constexpr):
    """Wait for scores, while OTHERS products are in flight, and release the last units of keys."""
    s = warpgroup_mma_wait(OTHERS, deps=[s])
    for u in gl.static_range(PENDING):
        _release(UNITS - PENDING + u)
    return s


@gluon.jit
def _quarters(x):
    """Return four tensors of neighbouring columns, without a move between threads."""
    low, high = _halves(x)
    first, second = _halves(low)
    third, fourth = _halves(high)
    return first, second, third, fourth


@gluon.jit
def _halves(x):
    low, high = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
    return low, high


@gluon.jit
def _join(sums, other, others, DTYPE: gl.constexpr, FIXED: gl.constexpr):
    """Bring sums and both P to the larger one of two points of reference, and return that as m."""
    acc, m, mine, l, packed = sums
    if FIXED is None:
        joined = gl.maximum(mine, others)
        reference = finite(joined)
        own = gl.exp2(mine - reference)
        acc = scale_rows(acc, gl.exp2(m - reference))
        packed = scale_pairs(packed, own, DTYPE)
        other = scale_pairs(other, gl.exp2(others - reference), DTYPE)
        l = l * gl.convert_layout(own, gl.SliceLayout(1, l.type.layout))[:, None]
        m = joined
    return acc, l, packed, other, m


@gluon.jit
def _add(acc, packed, u: gl.constexpr, shared, late, PHASE: gl.constexpr):
    """Issue the product of P of 16 keys and unit u of V. Return also its operand."""
    unit = shared.units.index(u + (late >> 30))
    v = reinterpret(unit, unit.dtype, [VALUES, WIDTH], gl.NVMMASharedLayout(128, 16, 2))
    _wait_for_unit(u, shared, PHASE)
    p = unpack(packed, unit.dtype, P_L)
    return warpgroup_mma(p, v, acc, is_async=True), p


@gluon.jit
def _add_own(acc, s, packed, shared, late, PHASE: gl.constexpr, SCORES: gl.constexpr):
    """Issue the products of this CTA's P, and wait for the scores if there are any. Return also the operands."""
    quarters = _quarters(packed)
    used = ()
    for u in gl.static_range(HALF):
        acc, p = _add(acc, quarters[u], u, shared, late, PHASE)
        used = used + (p,)  # type: ignore[assignment]  # noqa: RUF005
        if u == 0 and SCORES:
            s = _finish_scores(s, 1)
    return acc, s, used


@gluon.jit
def _add_other(acc, packed, used, shared, late, PHASE: gl.constexpr):
    """Issue the products of the other CTA's P. Wait for all, and release each unit as soon as its product has ended."""
    quarters = _quarters(packed)
    acc, p0 = _add(acc, quarters[0], HALF, shared, late, PHASE)
    for u in gl.static_range(HALF - 1):
        acc = warpgroup_mma_wait(HALF - u, deps=[acc])
        _release(u)
    acc, p1 = _add(acc, quarters[1], HALF + 1, shared, late, PHASE)
    acc, _0, _1, _2, _3 = warpgroup_mma_wait(2, deps=[acc, used[0], used[1], used[2], used[3]])
    _release(HALF - 1)
    acc, p2 = _add(acc, quarters[2], HALF + 2, shared, late, PHASE)
    acc = warpgroup_mma_wait(2, deps=[acc])
    _release(HALF)
    acc, p3 = _add(acc, quarters[3], HALF + 3, shared, late, PHASE)
    for u in gl.static_range(2):
        acc = warpgroup_mma_wait(2 - u, deps=[acc])
        _release(HALF + 1 + u)
    acc, p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=[acc, p0, p1, p2, p3])
    _release(HALF + 3)
    return acc


@gluon.jit
def _step(C: gl.constexpr, shared, x, sums, column, tile, MASK: gl.constexpr, FIXED: gl.constexpr):
    """Compute the scores and P of a step, and the product of P and V of the step before."""
    DTYPE: gl.constexpr = shared.units.dtype
    s = _scores(C, shared, x, 1)
    mine = sums.mine
    other, others = receive(C, x, sums.packed, mine, shared, FIXED)
    acc, l, packed, other, m = _join(sums, other, others, DTYPE, FIXED)
    acc, s, used = _add_own(acc, s, packed, shared, x, 0, True)
    key = column + gl.program_id(0) % CTAS * KEYS
    if FIXED is not None and not MASK:
        low, high, lanes = exponentials_of_capped(s, FIXED, 2)
        l += gl.convert_layout(lanes, l.type.layout)
    else:
        s, unit = changed(s, tile.score, key, FIXED)
        if MASK:
            start, end = intervals_of(tile.slot, C, tile.rows, tile.sizes, S_ROW)
            s = hide(s, key, start, end)
        mine, l, _, p = softmax(s, m, l, 0.0, unit, (), SLACK, FIXED)
        low, high = pairs(p)
    after = gl.convert_layout(pack(low, high, DTYPE), packed.type.layout)
    x += 1
    send(C, x, after, mine, shared, FIXED)
    acc = _add_other(acc, other, used, shared, x, 0)
    keep_alive(packed)
    keep_alive(other)
    return x, Sums(acc, m, mine, l, after)


@gluon.jit
def _walk_part(C: gl.constexpr, past, begin, shared, x, sums, tile, MASK: gl.constexpr, FIXED: gl.constexpr):
    """Walk the steps below ``past`` down to ``begin``, all cut (``MASK``) or all full."""
    for column in range(past - STEP, begin - STEP, -STEP):
        x, sums = _step(C, shared, x, sums, column, tile, MASK, FIXED)
    return x, sums


@gluon.jit
def _walk(C: gl.constexpr, last, begin, full_begin, full_end, shared, x, sums, tile, FIXED: gl.constexpr):
    """Walk the steps below ``last`` down to ``begin``: cut, full, cut."""
    x, sums = _walk_part(C, last, full_end, shared, x, sums, tile, True, FIXED)
    past = gl.minimum(full_end, last)
    x, sums = _walk_part(C, past, full_begin, shared, x, sums, tile, False, FIXED)
    past = gl.minimum(full_begin, last)
    x, sums = _walk_part(C, past, begin, shared, x, sums, tile, True, FIXED)
    return x, sums


@gluon.jit
def _of_cta(rows, rank):
    """Return the tensors with the columns of the output that a CTA has."""
    return Rows(
        (), rows.out_ptr + rank * WIDTH, rows.lse_ptr, rows.l_ptr, rows.m_in_ptr, rows.l_in_ptr,
        rows.o_in_ptr + rank * WIDTH, rows.aside_ptr, rows.sink_ptr, rows.start_ptr, rows.end_ptr,
    )  # fmt: skip


@gluon.jit
def _consumer(C: gl.constexpr, shared, rows, batch_stride, seq_q, q_heads, score, options):
    """Run consumer C: scores, softmax and products with V of its rows of each query tile, until there are none."""
    cluster_arrive(4)
    DTYPE: gl.constexpr = shared.units.dtype
    HAS_STATE: gl.constexpr = options.HAS_STATE
    PERIOD: gl.constexpr = options.PERIOD
    FIXED: gl.constexpr = options.FIXED
    rank = gl.program_id(0) % CTAS
    rows = _of_cta(rows, rank)
    sizes = Sizes(seq_q, q_heads, batch_stride)

    x = 0  # messages before the current one
    i = 0  # query tiles before the current one
    cluster_wait(4)
    mbarrier.wait(shared.info_full.index(0), 0)
    slot = shared.info.index(0)
    some, last, begin, full_begin, full_end = span_of(slot, STEP)
    while some:
        # The last keys.
        start, end = intervals_of(slot, C, rows, sizes, S_ROW)
        mbarrier.wait(shared.q_full.index(C), i & 1)
        s = _scores(C, shared, i, 0)
        l = lane_sum(gl.zeros([ROWS, KEYS], gl.float32, S_L))
        if HAS_STATE:
            m, rest, l_in, acc = enter(slot, C, rows, sizes, DIM, WIDTH, S_ROW, O_L)
            l_in = gl.where(rank == 0, l_in, 0.0)  # of both CTAs together
            l = l + gl.convert_layout(l_in, gl.SliceLayout(1, l.type.layout))[:, None]
            acc = scaled(acc, gl.exp2(rest))
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            rest = gl.zeros([ROWS], gl.float32, S_ROW)
            acc = gl.zeros([ROWS, WIDTH], gl.float32, O_L)
        s = _finish_scores(s, 0)
        if PERIOD:
            m_aside = m
            if HAS_STATE:
                gl.store(scratch(rows.aside_ptr, C, CONSUMERS, WIDTH, O_L), acc)
                acc = gl.zeros([ROWS, WIDTH], gl.float32, O_L)
        if FIXED is not None:
            m = gl.zeros([ROWS], gl.float32, S_ROW)
        alibi = alibi_of(slot, C, score, STEP, S_ROW)
        tile = QueryTile((), C, slot, rows, sizes, Score(score.scale, score.inner, alibi))
        key = last + rank * KEYS
        s, unit = changed(s, tile.score, key, FIXED)
        s = hide(s, key, start, end)
        mine, l, _alpha, p = softmax(s, m, l, rest, unit, (), 0.0, FIXED)
        low, high = pairs(p)
        packed = pack(low, high, DTYPE)
        send(C, x, packed, mine, shared, FIXED)

        if PERIOD:
            for above in range(last, begin, -STEP * PERIOD):
                down = gl.maximum(above - STEP * PERIOD, begin)
                cut, past_full = gl.maximum(full_begin, down), gl.maximum(full_end, down)
                sums = Sums(acc, m, mine, l, packed)
                x, sums = _walk(C, above, down, cut, past_full, shared, x, sums, tile, FIXED)
                acc, m, mine, l, packed = sums
                acc, m_aside = flush(acc, m, rows.aside_ptr, m_aside, C, CONSUMERS)
        else:
            sums = Sums(acc, m, mine, l, packed)
            x, sums = _walk(C, last, begin, full_begin, full_end, shared, x, sums, tile, FIXED)
            acc, m, mine, l, packed = sums
        mbarrier.arrive(shared.q_free.index(C), count=1)

        # The last product with V, and the sums of the other CTA.
        other, others = receive(C, x, packed, mine, shared, FIXED)
        acc, l, packed, other, m = _join(Sums(acc, m, mine, l, packed), other, others, DTYPE, FIXED)
        acc, _unused, used = _add_own(acc, packed, packed, shared, x, 1, False)
        x += 1
        send_sums(C, x, l, shared)
        i += 1
        mbarrier.wait(shared.info_full.index(i % SLOTS), (i // SLOTS) & 1)
        following = shared.info.index(i % SLOTS)
        some, last, begin, full_begin, full_end = span_of(following, STEP)
        acc = _add_other(acc, other, used, shared, x, 1)
        keep_alive(packed)
        keep_alive(other)
        l = _sum(l, receive_sums(C, x, l, shared))
        x += 1
        if PERIOD:
            acc = with_flushed(acc, m, rows.aside_ptr, m_aside, C, CONSUMERS)
        if FIXED is not None:
            acc, m, l = seen_from_zero(acc, m, l, options.FINALIZE)
        store(acc, m, l, slot, rows, sizes, None, C, options)
        slot = following
    cluster_arrive(4)
    cluster_wait(4)


@gluon.jit
def _sum(x, y):
    """``FADD``, never fused with a product: both CTAs store lse, or m and l, the same bits."""
    constraints: gl.constexpr = "=f,f,f"
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", constraints, [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _allocate(q_desc, k_desc):
    """Allocate shared memory, initialize the barriers, and find what the other CTA writes to."""
    dtype: gl.constexpr = q_desc.dtype
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q, units = tiles_like(q_desc, CONSUMERS * UNITS), tiles_like(k_desc, UNITS)
    messages = gl.allocate_shared_memory(dtype, [BOXES, 16, 64], gl.NVMMASharedLayout(128, 16, 2))
    info = numbers_in_shared_memory(SLOTS, INFO)
    q_full, q_free, info_full, waited = barriers(CONSUMERS), barriers(CONSUMERS), barriers(SLOTS), barriers(BARRIERS)
    messages_at = offset_of(reinterpret(messages.index(0), gl.int32, [512], ROW_L), 0, 1024)
    barriers_at = offset_of(reinterpret(waited, gl.int32, [2 * BARRIERS], ROW_L), BARRIERS_FROM, 16)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(info_full.index(i), count=1)
    for i in gl.static_range(BARRIERS):
        mbarrier.init(waited.index(i), count=1)
    fence_barriers()
    numbers = reinterpret(messages.index(BOXES - 1), gl.int32, [512, 1], ROW_L)
    return Shared(q, units, info, numbers, q_full, q_free, info_full, waited, messages_at, barriers_at)


@gluon.jit
def start(inputs, work, arrival, rows, sizes, score, options, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps. Boxes of q and k have 64 rows and columns, of v 16 rows and 256
    columns."""
    shared = _allocate(inputs.q[0], inputs.k[0])
    gl.warp_specialize(
        [
            (_producer, (inputs, work, arrival, shared, options)),
            (_consumer, (0, shared, rows, sizes.batch_stride, sizes.seq_q, sizes.q_heads, score, options)),
            (_consumer, (1, shared, rows, sizes.batch_stride, sizes.seq_q, sizes.q_heads, score, options)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
