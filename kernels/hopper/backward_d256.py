"""The backward kernel for Hopper (sm_90) at head dim 256, in Gluon: pairs of CTAs that exchange dS.

Launched by backward.py, with the same tables of 128 keys, order of the tiles and order of their query tiles.

dk and dv of 64 keys need 256 registers per thread, more than there are. So a CTA owns 64 keys, and its two consumers
divide the work by gradient, not by keys. With 64 keys a CTA would send 64 KiB of float32 dQ per step, which is what
limits it (docs/lab). So two CTAs with 128 neighbouring keys walk the same query tiles, in a cluster (clusters.py): each
sends its dS to the other one and computes half of the columns of dQ, over all 128 keys. One query tile per step::

    consumer 0      P = exp2(S^T c - lse), 16 bit, to shared memory ; dV += P dO ; S^T of the step after
    consumer 1      dS = P dP^T, in its place ; dK += dS Q ; dP^T = V dO^T - delta of the step after
    both            64 columns of dQ: own dS times own K + other dS times other K, to shared memory
    producer        one warp: K, V, half of the other K, then Q, lse (and start, end of cut tiles), dO, delta by TMA
    sender          one warp: copies dS to the other CTA
    writers 0, 1    one warp each: add the staged columns of dQ to global memory, float32, by TMA

* P and dS feed dV and dK from registers, as in backward_d128.py. dS is computed from the rounded P, which only adds a
  rounding of the same size as its own.
* P and dS of a step share a buffer. There are two, for even and odd steps, and two more for the dS of the other CTA. No
  signal says that one is free. The other CTA sends its dS of step i + 1 after its dQ of step i, for which it has
  received and used the dS of step i from here. Here dQ of step i + 1 waits for that dS. So P of step i + 2, which comes
  later, may overwrite the dS of step i here, and its dS the copy of it there.
* dS takes about as long to the other CTA as a product. Consumer 1 issues dP^T of the step after before it waits for
  the other dS.
* There is room for one staged tile of dQ: consumer 0 stages first, consumer 1 when that has been read.
* Tiles of 256 columns are two of 128: with one, ptxas runs out of registers for the sums.
* Shared memory has room for one tile of dO. It is read last by dV(i), in the first part of a step, and needed
  next by dP(i + 1), in the last.
* A CTA starts to send when the other one has initialized its barriers, and ends when the other one does.

Named barriers: 4 P written, 5 dS written, 6, 7 Q read, 8 dO read, 10, 11 dQ staged (once more when dk and dv are
stored and to be counted), 12, 13 the staged dQ of the other consumer sent, 14 the last one (for consumer 1, if dk is to
be counted).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import backward_pieces as pieces
from .backward_arguments import Keys, Tiles
from .backward_pieces import BM, LOADERS, PAIR, S_L, STAGING
from .clusters import cluster_arrive, cluster_wait, fence_barriers, offset_of, send_to_peer
from .primitives import (
    async_load,
    barrier_arrive,
    barrier_sync,
    barriers,
    reinterpret,
    tiles_like,
    tma_reduce_add,
)

CTAS = gl.constexpr(2)  # of a tile of keys
KEYS = gl.constexpr(64)  # of a CTA
UNIT = gl.constexpr(64)  # columns of dQ of a consumer
HALF = gl.constexpr(128)  # columns of dQ of a CTA, and of the tiles in shared memory

DS_BYTES = gl.constexpr(2 * 64 * 64)  # of the dS of a step
SMALL_AT = gl.constexpr(222 * 1024)  # mbarriers and rows are not before this offset in shared memory

P_READY, DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_FREE, MAY_STORE = (gl.constexpr(i) for i in (4, 5, 6, 8, 10, 12, 14))


@gluon.jit
def _sender(grid, ds_at, arrived, arrived_at):
    """Send the dS of each step. That of the next step may arrive as soon as this one has been sent."""
    cluster_arrive(1)
    at = pieces.place(grid)
    steps = (gl.load(at.info + 3) - gl.load(at.info + 2)) * grid.heads
    mbarrier.expect(arrived.index(0), DS_BYTES)
    cluster_wait(1)
    for i in range(0, steps):
        barrier_sync(DS_READY, LOADERS, warps=1)
        stage = i & 1
        if i + 1 < steps:
            mbarrier.expect(arrived.index(1 - stage), DS_BYTES)
        send_to_peer(ds_at + (2 + stage) * DS_BYTES, ds_at + stage * DS_BYTES, arrived_at + stage * 8, DS_BYTES)
    cluster_arrive(1)
    cluster_wait(1)


@gluon.jit
def _producer(grid, descs, tiles, arrival):
    cluster_arrive(1)
    at = pieces.place(grid)
    rank = gl.program_id(0) % CTAS
    first = gl.load(at.info)
    visits = pieces.visits_of(at, grid)
    pieces.wait_for_keys(arrival, grid, at)
    k_desc, v_desc, full = descs.k[0], descs.v[0], tiles.kv_full.index(0)
    mbarrier.expect(full, 3 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
    for piece in gl.static_range(2):
        row = [at.batch, first + rank * KEYS, at.kv_head, piece * HALF]
        async_load(k_desc, row, full, tiles.k[0].index(piece))
        async_load(v_desc, row, full, tiles.v[0].index(piece))
    async_load(k_desc, [at.batch, first + (1 - rank) * KEYS, at.kv_head, rank * HALF], full, tiles.k[0].index(2))
    pieces.load_queries(grid, at, visits, descs, tiles, Q_FREE, DO_FREE)
    cluster_wait(1)
    cluster_arrive(1)
    cluster_wait(1)


@gluon.jit
def _writer(C: gl.constexpr, dq_desc, dq_s, grid, gradients):
    """Send what consumer C has staged, and let the other consumer stage. At the end writer 1 lets both store."""
    cluster_arrive(1)
    at = pieces.place(grid)
    steps, cut_steps, j, stops = pieces.visit_order(at.info, grid.heads)
    head = (at.kv_head * grid.parts + at.part) * grid.heads
    column = gl.program_id(0) % CTAS * HALF + C * UNIT
    if C == 1:
        barrier_arrive(DQ_FREE, STAGING, warps=1)
    for i in range(0, steps):
        barrier_sync(DQ_STAGED + C, STAGING, warps=1)
        tma_reduce_add(dq_desc, [at.batch, j * BM, head, column], dq_s)
        tma.store_wait(0)
        if C == 0:
            barrier_arrive(DQ_FREE + 1, STAGING, warps=1)
        else:
            pieces.signal_sent(DQ_FREE, i == steps - 1, gradients, grid, at)
        j, head = pieces.next_tile(i, j, head, cut_steps, grid.heads, stops)
    if C == 1 and (gradients.turns_ptr is not None or gradients.counters_ptr is not None):
        barrier_sync(MAY_STORE, STAGING, warps=1)
    pieces.finish_writer(DQ_STAGED + C, gradients, grid, at)
    cluster_wait(1)
    cluster_arrive(1)
    cluster_wait(1)


@gluon.jit
def _tiles(tiles, i):
    """Return the tiles of this CTA's keys, their addresses computed again in step i, see ``pieces.tile_at``."""
    late = i >> 30
    return tiles.index(late), tiles.index(late + 1)


@gluon.jit
def _dq_of_own(C: gl.constexpr, i, rank, k_s, ds_s):
    """Issue the product of this CTA's keys for consumer C's columns of dQ of step i, asynchronous."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, UNIT, 16])
    stage = i & 1
    late = i >> 30
    own = k_s.index(rank + late).slice(C * UNIT, UNIT, dim=1)
    dq = gl.zeros([BM, UNIT], gl.float32, L)
    return warpgroup_mma(ds_s.index(2 + stage).permute((1, 0)), own, dq, use_acc=False, is_async=True)


@gluon.jit
def _add_other(C: gl.constexpr, i, k_s, ds_s, arrived, dq):
    """Issue that of the other CTA's keys, when their dS has arrived."""
    stage = i & 1
    late = i >> 30
    other = k_s.index(2 + late).slice(C * UNIT, UNIT, dim=1)
    mbarrier.wait(arrived.index(stage), (i >> 1) & 1)
    return warpgroup_mma(ds_s.index(stage).permute((1, 0)), other, dq, is_async=True)


@gluon.jit
def _walk_values(CUT: gl.constexpr, first, past_step, last, rank, s, dv, tiles, arrived, score, keys, heads):
    """Walk the query tiles as consumer 0. ``s`` is complete on entry, and on return that of the next step is."""
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv[0].type.layout, k_width=2)
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i & 1
        p, slope16 = pieces.probabilities(s, score, keys, tiles, stage, head, CUT, tiles.ds.dtype)
        tiles.ds.index(2 + stage).store(slope16)
        barrier_arrive(P_READY, PAIR)
        barrier_arrive(Q_FREE + stage, LOADERS)
        p16 = gl.convert_layout(p, A_L)
        mbarrier.wait(tiles.dout_full.index(0), i & 1)
        dv = pieces.accumulate(p16, tiles.dout, 0, dv)
        after = gl.minimum(i + 1, last)
        mbarrier.wait(tiles.q_full.index(after & 1), (after >> 1) & 1)
        s = pieces.keys_times_queries(_tiles(tiles.k[0], i), tiles.q, after & 1)
        dv, p16 = pieces.wait_sums(2, dv, p16)
        barrier_arrive(DO_FREE, LOADERS)
        barrier_sync(DS_READY, LOADERS)
        dq = _dq_of_own(0, i, rank, tiles.k[0], tiles.ds)
        dq = _add_other(0, i, tiles.k[0], tiles.ds, arrived, dq)
        dq, s = warpgroup_mma_wait(0, deps=[dq, s])
        pieces.send(dq, tiles.dq[0], score.dk_scale, DQ_FREE, DQ_STAGED)
        head, inside = pieces.next_head(keys.alibi, head, inside, steps_of_head, heads)
    return s, dv


@gluon.jit
def _values(grid, boxes, arrived, score, gradients):
    """Run consumer 0: S, P, dV and the first columns of dQ."""
    cluster_arrive(4)
    tiles = pieces.matrices(boxes, (pieces.staging_matrix(boxes.dq[0]),))
    at = pieces.place(grid)
    rank = gl.program_id(0) % CTAS
    first = gl.load(at.info)
    past = gl.load(at.info + 1)
    key = first + rank * KEYS
    steps, cut_steps, _, _ = pieces.visit_order(at.info, grid.heads)
    dv = pieces.zero_sums(tiles.dout)
    keys = pieces.keys_of(score, tiles.positions, grid, at, first, past, key, S_L)
    mbarrier.wait(tiles.kv_full.index(0), 0)
    mbarrier.wait(tiles.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[pieces.keys_times_queries(_tiles(tiles.k[0], 0), tiles.q, 0)])
    last = steps - 1
    s, dv = _walk_values(True, 0, cut_steps, last, rank, s, dv, tiles, arrived, score, keys, grid.heads)
    s, dv = _walk_values(False, cut_steps, steps, last, rank, s, dv, tiles, arrived, score, keys, grid.heads)
    barrier_sync(DQ_FREE, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.head_of_gradients(gradients, at)
    buffer = pieces.tile_at(tiles.q, steps & 1, 0)  # of the step before the last one, which has been read
    pieces.store_sums(gradients.dv, dv, score.dv_scale, buffer, head, gradients, grid, at, keys)
    if gradients.turns_ptr is not None or gradients.counters_ptr is not None:
        barrier_sync(DQ_STAGED, STAGING)  # not arrive: sync alone is documented to order the stores for the writer
    cluster_wait(4)
    cluster_arrive(4)
    cluster_wait(4)


@gluon.jit
def _keys(grid, boxes, arrived, score, gradients):
    """Run consumer 1: dP, dS, dK and the last columns of dQ."""
    cluster_arrive(4)
    SIGNALS: gl.constexpr = gradients.turns_ptr is not None or gradients.counters_ptr is not None
    tiles = pieces.matrices(boxes, (pieces.staging_matrix(boxes.dq[0]),))
    at = pieces.place(grid)
    rank = gl.program_id(0) % CTAS
    keys = Keys(gl.load(at.info) + rank * KEYS, gl.load(at.info + 1), ())
    steps = (gl.load(at.info + 3) - gl.load(at.info + 2)) * grid.heads
    dk = pieces.zero_sums(tiles.q)
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    mbarrier.wait(tiles.kv_full.index(0), 0)
    mbarrier.wait(tiles.dout_full.index(0), 0)
    minus_delta = tiles.delta.index(0).load(gl.SliceLayout(0, S_L))
    dp = pieces.keys_times_queries(_tiles(tiles.v[0], 0), tiles.dout, 0, minus_delta)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for i in range(0, steps):
        stage = i & 1
        p_s = tiles.ds.index(2 + stage)
        barrier_sync(P_READY, PAIR)
        ds = (p_s.load(S_L).to(gl.float32) * dp).to(p_s.dtype)
        p_s.store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        barrier_arrive(DS_READY, LOADERS)
        barrier_arrive(DO_FREE, LOADERS)
        mbarrier.wait(tiles.q_full.index(stage), (i >> 1) & 1)
        dk = pieces.accumulate(ds16, tiles.q, stage, dk)
        dq = _dq_of_own(1, i, rank, tiles.k[0], tiles.ds)
        dk, ds16 = pieces.wait_sums(1, dk, ds16)
        barrier_arrive(Q_FREE + stage, LOADERS)
        after = gl.minimum(i + 1, steps - 1)
        mbarrier.wait(tiles.dout_full.index(0), after & 1)
        minus_delta = tiles.delta.index(0).load(gl.SliceLayout(0, S_L))
        dp = pieces.keys_times_queries(_tiles(tiles.v[0], i), tiles.dout, 0, minus_delta)
        dq = _add_other(1, i, tiles.k[0], tiles.ds, arrived, dq)
        dq, dp = warpgroup_mma_wait(0, deps=[dq, dp])
        pieces.send(dq, tiles.dq[0], score.dk_scale, DQ_FREE + 1, DQ_STAGED + 1)
    if SIGNALS:
        barrier_sync(MAY_STORE, STAGING)
    head = pieces.head_of_gradients(gradients, at)
    buffer = _tiles(tiles.v[0], 0)  # read by this consumer alone
    pieces.store_sums(gradients.dk, dk, score.dk_scale, buffer, head, gradients, grid, at, keys)
    if SIGNALS:
        barrier_sync(DQ_STAGED + 1, STAGING)  # not arrive: sync alone is documented to order the stores for the writer
    cluster_wait(4)
    cluster_arrive(4)
    cluster_wait(4)


@gluon.jit
def start(grid, descs, score, gradients, arrival, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps."""
    dtype: gl.constexpr = descs.k[0].dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype)
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ds_s = gl.allocate_shared_memory(dtype, [4, KEYS, BM], DS_L)  # of the other CTA two, of this one two
    arrived = barriers(2)  # dS of the other CTA
    kv_full, q_full, dout_full = barriers(1), barriers(2), barriers(1)
    boxes = Tiles(
        k=pieces.boxes(descs.k, 3),  # the columns of this CTA's keys in two tiles, and half of those of the other's
        v=pieces.boxes(descs.v, 2),
        q=pieces.boxes(descs.q),
        dout=pieces.boxes(descs.dout, 1),
        ds=ds_s,
        dq=(pieces.allocate_staging(descs.dq[0]),),
        lse=tiles_like(descs.lse, 2),
        delta=tiles_like(descs.delta, 1),
        bounds=pieces.boxes(descs.bounds),
        positions=pieces.boxes(descs.positions),
        kv_full=kv_full,
        q_full=q_full,
        dout_full=dout_full,
        programs=(),
        seen=(),
    )
    ds_at = offset_of(reinterpret(ds_s.index(0), gl.int32, [DS_BYTES // 4], ROW_L), 0, 1024)
    arrived_at = offset_of(reinterpret(arrived, gl.int32, [4], ROW_L), SMALL_AT, 16)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(dout_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
    fence_barriers()
    gl.warp_specialize(
        [
            (_values, (grid, boxes, arrived, score, gradients)),
            (_keys, (grid, boxes, arrived, score, gradients)),
            (_producer, (grid, descs, boxes, arrival)),
            (_sender, (grid, ds_at, arrived, arrived_at)),
            (_writer, (0, descs.dq[0], boxes.dq[0], grid, gradients)),
            (_writer, (1, descs.dq[0], boxes.dq[0], grid, gradients)),
        ],
        [4, 1, 1, 1, 1],
        [REGISTERS, 24, 24, 24, 24],
    )
