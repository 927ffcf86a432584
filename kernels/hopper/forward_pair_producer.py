"""The producer of the forward kernel for Hopper at head dim 512 (forward_pair.py)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .clusters import cluster_arrive, cluster_wait, send_number
from .forward_pair_pieces import (
    COLUMNS,
    CONSUMERS,
    CTAS,
    FULL,
    HALF,
    KEYS,
    NUMBERED,
    NUMBERS_AT,
    STEP,
    UNIT_BYTES,
    UNIT_FREE,
    UNIT_THREADS,
    UNITS,
    VALUES,
    WIDTH,
)
from .forward_pieces import INFO, INFO_LAYOUT, ROWS, SLOTS, number_of
from .forward_producer import GRID, tile_info
from .primitives import async_load, barrier_sync, reinterpret, wait_row
from .work_counter import take_number


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
def _wait_for_row(row, arrived, flags):
    """Wait for the flag of a row of keys and values, unless it is the one that was waited for last."""
    if row != arrived:
        flags_ptr, epoch, timed_out_ptr = flags
        wait_row(flags_ptr, row, epoch, timed_out_ptr, 4)
    return row


@gluon.jit
def _load_keys_of_step(desc, own, flags, arrived, shared, batch, column, kv_head, row, used):
    """Load this CTA's keys of a step, from this rank's own ones, or as soon as their flag is up. Return the latest row
    whose flag was waited for."""
    key = gl.program_id(0) % CTAS * KEYS
    place = _place(own, column)
    if len(own) == 0:
        _load_keys(desc, shared, batch, column + key, kv_head, used)
    else:
        if place >= 0:
            _load_keys(own[0], shared, batch, place + key, kv_head, used)
        else:
            arrived = _wait_for_row(row, arrived, flags)
            _load_keys(desc, shared, batch, column + key, kv_head, used)
    return arrived


@gluon.jit
def _load_values_of_step(desc, own, shared, batch, column, kv_head):
    """Load the values of a step, whose keys have been loaded: those of this CTA's keys first."""
    place = _place(own, column)
    for part in gl.static_range(2):
        key = (gl.program_id(0) % CTAS ^ part) * KEYS
        if len(own) == 0:
            _load_values(desc, shared, batch, column + key, kv_head, part * HALF)
        else:
            if place >= 0:
                _load_values(own[1], shared, batch, place + key, kv_head, part * HALF)
            else:
                _load_values(desc, shared, batch, column + key, kv_head, part * HALF)


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
            info = _info_of(w, work)
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
            info = _info_of(w, work)
    return w, info


@gluon.jit
def _info_of(w, work):
    return tile_info(
        work.table_ptr, w, work.n_tiles, work.n_heads, work.q_heads, work.group, work.early, work.table_batch_stride
    )


@gluon.jit
def producer(q_desc, k_desc, v_desc, own, flags, work, shared, SKIP_EMPTY: gl.constexpr, READY: gl.constexpr):
    """Run the producer: take query tiles, announce them, and load queries, keys and values, until none is left."""
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
                async_load(q_desc, at, shared.q_full.index(c), shared.q.index(c * UNITS + u))
        row = 0
        if READY:
            row = (batch * work.q_heads + head) // work.ratio
            if len(own) == 0:
                arrived = _wait_for_row(row, arrived, flags)
        arrived = _load_keys_of_step(k_desc, own, flags, arrived, shared, batch, end - STEP, kv_head, row, i > 0)
        for column in range(end - 2 * STEP, begin - STEP, -STEP):
            arrived = _load_keys_of_step(k_desc, own, flags, arrived, shared, batch, column, kv_head, row, True)
            _load_values_of_step(v_desc, own, shared, batch, column + STEP, kv_head)
        number = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        if gl.program_id(0) % CTAS == 0:
            number = take_number(work.counter_ptr, total)
        _load_values_of_step(v_desc, own, shared, batch, begin, kv_head)
        i += 1
        w, info = _next_tile(gl.sum(number, axis=0) + gl.num_programs(0) // CTAS, i, work, shared, SKIP_EMPTY)
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(shared.q_free.index(c), (i & 1) ^ 1)
    shared.info.index(i % SLOTS).store(gl.full([INFO], -1, gl.int32, INFO_LAYOUT))
    mbarrier.arrive(shared.info_full.index(i % SLOTS), count=1)
    cluster_arrive(4)
    cluster_wait(4)
