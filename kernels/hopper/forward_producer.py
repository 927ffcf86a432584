"""The producer of the forward kernel for Hopper (forward.py): takes query tiles from the counter and moves tiles of
queries, keys and values to shared memory by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..contract import GRID as _GRID
from .forward_parts import keys_of_part, tile_of
from .forward_pieces import INFO, INFO_LAYOUT, ROWS, SLOTS, number_of
from .primitives import FREE_BARRIERS, async_load, barrier_sync, buffer_of, wait_row
from .work_counter import take_number

GRID = gl.constexpr(_GRID)  # keys of a tile that a rank's own keys are read in, see OwnKeys


@gluon.jit
def tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride):
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
def _piece_info(w, division, table_ptr, n_tiles, n_heads, q_heads, group, early, table_batch_stride, BN: gl.constexpr):
    """Return the description of piece of work ``w``: a query tile, or a part of the keys of one."""
    if len(division) > 0:
        undivided, parts, _ = division
        w, part = tile_of(w, undivided, parts)
        info = tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride)
        info = keys_of_part(info, part, parts, BN)
    else:
        info = tile_info(table_ptr, w, n_tiles, n_heads, q_heads, group, early, table_batch_stride)
    return info


@gluon.jit
def _numbered_piece(
    taken, total, division, counter_ptr, table_ptr, n_tiles, n_heads, q_heads, group, early, table_batch_stride,
    BN: gl.constexpr, SKIP_EMPTY: gl.constexpr,
):  # fmt: skip
    """Return number and description of the piece of work that was taken, or of the next one that is not empty."""
    w = total
    info = gl.full([INFO], -1, gl.int32, INFO_LAYOUT)
    again = True
    while again:
        w = taken + gl.num_programs(0)
        again = False
        if w < total:
            info = _piece_info(w, division, table_ptr, n_tiles, n_heads, q_heads, group, early, table_batch_stride, BN)
            if SKIP_EMPTY:
                again = number_of(info, 5) == 0
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
    stage, _ = buffer_of(g, STAGES)
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
def producer(
    args, N: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr,
    SKIP_EMPTY: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    """Run the producer: take query tiles, announce them, and load queries, keys and values, until none is left."""
    (
        q_desc, k_desc, v_desc, own, table_ptr, counter_ptr, division, flags,
        q_s, k_s, v_s, info_s, q_full, q_free, k_full, v_full, info_full,
        n_tiles, n_heads, q_heads, ratio, group, early, table_batch_stride,
    ) = args  # fmt: skip
    total = n_tiles * n_heads
    if len(division) > 0:
        undivided, parts, part_s = division
        total = undivided + (total - undivided) * parts
    w = gl.program_id(0)
    info = _piece_info(w, division, table_ptr, n_tiles, n_heads, q_heads, group, early, table_batch_stride, BN)
    if SKIP_EMPTY:  # noqa: SIM102
        if number_of(info, 5) == 0:
            w, info = _numbered_piece(
                gl.sum(take_number(counter_ptr, total), axis=0), total, division, counter_ptr, table_ptr, n_tiles,
                n_heads, q_heads, group, early, table_batch_stride, BN, SKIP_EMPTY,
            )  # fmt: skip
    g = 0  # key tiles moved so far
    i = 0  # query tiles moved so far
    arrived = -1  # the latest row of keys and values whose flag was waited for
    while w < total:
        slot, phase = buffer_of(i, Q_BUFFERS)
        for c in gl.static_range(N):
            mbarrier.wait(q_free.index(slot * N + c), phase ^ 1)
        info_s.index(i % SLOTS).store(info)
        if len(division) > 0:
            part_s.index(i % SLOTS).store(gl.full([INFO], w - undivided, gl.int32, INFO_LAYOUT))
        mbarrier.arrive(info_full.index(i % SLOTS), count=1)
        first = number_of(info, 0)
        begin = number_of(info, 2)
        end = gl.maximum(number_of(info, 5), begin + BN)  # nothing to see: one tile, all hidden
        batch = number_of(info, 6)
        head = number_of(info, 7)
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
        w, info = _numbered_piece(
            gl.sum(number, axis=0), total, division, counter_ptr, table_ptr, n_tiles, n_heads, q_heads, group, early,
            table_batch_stride, BN, SKIP_EMPTY,
        )  # fmt: skip
        arrived = _load_keys(
            k_desc, v_desc, own, flags, arrived, k_s, v_s, k_full, v_full, batch, begin, kv_head, row, g, N, STAGES
        )
        g += 1
        i += 1
    slot, phase = buffer_of(i, Q_BUFFERS)
    for c in gl.static_range(N):
        mbarrier.wait(q_free.index(slot * N + c), phase ^ 1)
    info_s.index(i % SLOTS).store(gl.full([INFO], -1, gl.int32, INFO_LAYOUT))
    mbarrier.arrive(info_full.index(i % SLOTS), count=1)
