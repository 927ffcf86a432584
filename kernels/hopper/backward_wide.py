"""The backward kernel for Hopper (sm_90) at head dim 256, in Gluon, where CTAs cannot be launched in pairs.

Launched by backward.py, with the same tables, order of the CTAs and order of their query tiles.

dk and dv of 64 keys need 256 registers per thread, more than there are. So a CTA owns 64 keys, not
128, and its two consumers divide the work by gradient, not by keys. One query tile per step::

    consumer 0      P = exp2(S^T c - lse), 16 bit, to shared memory ; dV += P dO ; S^T of the step after
    consumer 1      dS = P dP^T, to shared memory ; dK += dS Q ; dP^T = V dO^T - delta of the step after
    both            dQ = dS K, 64 columns at a time, to shared memory: consumer 0 the first 64, consumer 1 the others
    producer        one warp: K, V, then Q, lse (and start, end of cut tiles), dO, delta of every step by TMA
    writers 0, 1    one warp each: add the staged columns of dQ to global memory, float32, by TMA

* P and dS feed dV and dK from registers, as in backward_128.py. dS is computed from the rounded P, which only adds a
  rounding of the same size as its own.
* P(i), dS(i), P(i + 1), ... are handed over in turn, so one buffer and one barrier of each are enough: consumer 1 has
  read P(i) when it signals dS(i); consumer 0 has read dS(i) when it signals P(i + 1).
* While consumer 0 computes P, consumer 1 multiplies, and while consumer 1 computes dS, consumer 0 multiplies. Consumer
  0 has less to multiply, so that it is at P(i + 1) when the other one still multiplies.
* Tiles of 256 columns are two of 128: with one, ptxas runs out of registers for the sums.
* Shared memory has room for one tile of dO. It is read last by dV(i), in the first part of a step, and needed
  next by dP(i + 1), in the last.

Named barriers: 4 P written, 5 dS written, 6, 7 Q read, 8, 9 dO read, 10, 11 dQ staged (once more when dk and dv are
stored and to be counted), 12, 13 dQ sent.
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
from . import scores
from .backward_arguments import Arrival, Descriptors, Gradients, Grid, Keys, Score, Tiles
from .backward_pieces import BM, LOADERS, PAIR, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    buffer_of,
    tma_reduce_add,
)

KEYS = gl.constexpr(64)  # of a CTA
UNIT = gl.constexpr(64)  # columns of dQ that are computed and sent at a time
UNITS_0 = gl.constexpr(1)  # units of consumer 0; consumer 1 has the others

P_READY, DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 5, 6, 8, 10, 12))


@gluon.jit
def _writer(C: gl.constexpr, UNITS: gl.constexpr, dq_desc, dq_s, grid, gradients):
    at = pieces.place(grid)
    steps, cut_steps, j, stops = pieces.visit_order(at.info, grid.heads)
    head = (at.kv_head * grid.parts + at.part) * grid.heads
    barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for i in range(0, steps):
        for unit in gl.static_range(UNITS):
            barrier_sync(DQ_STAGED + C, STAGING, warps=1)
            tma_reduce_add(dq_desc, [at.batch, j * BM, head, (C * UNITS_0 + unit) * UNIT], dq_s)
            tma.store_wait(0)
            pieces.signal_sent(DQ_SENT + C, (i == steps - 1) & (unit == UNITS - 1), gradients, grid, at)
        j, head = pieces.next_tile(i, j, head, cut_steps, grid.heads, stops)
    pieces.finish_writer(DQ_STAGED + C, gradients, grid, at)


@gluon.jit
def _dq(UNIT_AT: gl.constexpr, k_s, ds_s):
    """Issue the product for one unit of columns of dQ, asynchronous."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, UNIT, 16])
    FIRST: gl.constexpr = k_s[0].shape[2]
    if UNIT_AT * UNIT < FIRST:
        k = k_s[0].index(0).slice(UNIT_AT * UNIT, UNIT, dim=1)
    else:
        k = k_s[1].index(0).slice(UNIT_AT * UNIT - FIRST, UNIT, dim=1)
    dq = gl.zeros([BM, UNIT], gl.float32, L)
    return warpgroup_mma(ds_s.permute((1, 0)), k, dq, use_acc=False, is_async=True)


@gluon.jit
def _send(C: gl.constexpr, dq, dq_s, scale):
    if scale is not None:
        dq = dq * scale
    barrier_sync(DQ_SENT + C, STAGING)
    pieces.stage_dq(dq_s, dq)
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)


@gluon.jit
def _walk_values(CUT: gl.constexpr, first, past_step, last, s, dv, tiles, score, keys, heads):
    """Walk the query tiles as consumer 0. ``s`` is complete on entry, and on return that of the next step is."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv[0].type.layout, k_width=2)
    PIECES: gl.constexpr = len(tiles.k)
    DO_STAGES: gl.constexpr = tiles.dout[0].shape[0]
    p_s, ds_s = tiles.ds
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage, _ = buffer_of(i, 2)
        do_stage, do_phase = buffer_of(i, DO_STAGES)
        p, slope16 = pieces.probabilities(s, score, keys, tiles, stage, head, S_L, CUT, p_s.dtype)
        p_s.store(slope16)
        barrier_arrive(P_READY, PAIR)
        barrier_arrive(Q_FREE + stage, LOADERS)
        p16 = gl.convert_layout(p, A_L)
        mbarrier.wait(tiles.dout_full.index(do_stage), do_phase)
        dv = pieces.accumulate(p16, tiles.dout, do_stage, dv)
        after, q_phase = buffer_of(gl.minimum(i + 1, last), 2)
        mbarrier.wait(tiles.q_full.index(after), q_phase)
        s = pieces.keys_times_queries(pieces.tile_at(tiles.k, 0, i), tiles.q, after, S_L)
        dv, p16 = pieces.wait_sums(PIECES, dv, p16)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        barrier_sync(DS_READY, PAIR)
        dq = _dq(0, tiles.k, ds_s)
        dq, s = warpgroup_mma_wait(0, deps=[dq, s])
        _send(0, dq, tiles.dq[0], score.dk_scale)
        head, inside = scores.next_head(keys.alibi, head, inside, steps_of_head)
    return s, dv


@gluon.jit
def _values(grid, tiles, score, gradients):
    """Run consumer 0: S, P, dV and the first columns of dQ."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    at = pieces.place(grid)
    key = gl.load(at.info)
    past = gl.load(at.info + 1)
    steps, cut_steps, _, _ = pieces.visit_order(at.info, grid.heads)
    dv = pieces.zero_sums(tiles.dout)
    keys = pieces.keys_of(score, tiles.positions, grid, at, key, past, key, S_L)
    mbarrier.wait(tiles.kv_full.index(0), 0)
    mbarrier.wait(tiles.q_full.index(0), 0)
    s = pieces.keys_times_queries(pieces.tile_at(tiles.k, 0, 0), tiles.q, 0, S_L)
    s = warpgroup_mma_wait(0, deps=[s])
    s, dv = _walk_values(True, 0, cut_steps, steps - 1, s, dv, tiles, score, keys, grid.heads)
    s, dv = _walk_values(False, cut_steps, steps, steps - 1, s, dv, tiles, score, keys, grid.heads)
    barrier_sync(DQ_SENT, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.head_of_gradients(gradients, at)
    buffer = pieces.tile_at(tiles.q, steps & 1, 0)  # of the step before the last one, which has been read
    pieces.store_sums(gradients.dv, dv, score.dv_scale, buffer, head, gradients, grid, at, keys)
    if gradients.turns_ptr is not None or gradients.counters_ptr is not None:
        barrier_sync(DQ_STAGED, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def _keys(grid, tiles, score, gradients, UNITS: gl.constexpr):
    """Run consumer 1: dP, dS, dK and the last columns of dQ, one unit of them or two."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    PIECES: gl.constexpr = len(tiles.v)
    DO_STAGES: gl.constexpr = tiles.dout[0].shape[0]
    p_s, ds_s = tiles.ds
    at = pieces.place(grid)
    keys = Keys(gl.load(at.info), gl.load(at.info + 1), ())
    steps = (gl.load(at.info + 3) - gl.load(at.info + 2)) * grid.heads
    dk = pieces.zero_sums(tiles.q)
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    mbarrier.wait(tiles.kv_full.index(0), 0)
    mbarrier.wait(tiles.dout_full.index(0), 0)
    minus_delta = tiles.delta.index(0).load(gl.SliceLayout(0, S_L))
    dp = pieces.keys_times_queries(pieces.tile_at(tiles.v, 0, 0), tiles.dout, 0, S_L, minus_delta)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for i in range(0, steps):
        stage, q_phase = buffer_of(i, 2)
        do_stage, _ = buffer_of(i, DO_STAGES)
        barrier_sync(P_READY, PAIR)
        ds = (p_s.load(S_L).to(gl.float32) * dp).to(p_s.dtype)
        ds_s.store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        barrier_arrive(DS_READY, PAIR)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        mbarrier.wait(tiles.q_full.index(stage), q_phase)
        dk = pieces.accumulate(ds16, tiles.q, stage, dk)
        dq = _dq(UNITS_0, tiles.k, ds_s)
        dk, ds16 = pieces.wait_sums(1, dk, ds16)
        barrier_arrive(Q_FREE + stage, LOADERS)
        for unit in gl.static_range(1, UNITS):
            dq = warpgroup_mma_wait(0, deps=[dq])
            _send(1, dq, tiles.dq[1], score.dk_scale)
            dq = _dq(UNITS_0 + unit, tiles.k, ds_s)
        do_stage, do_phase = buffer_of(gl.minimum(i + 1, steps - 1), DO_STAGES)
        mbarrier.wait(tiles.dout_full.index(do_stage), do_phase)
        minus_delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_L))
        dp = pieces.keys_times_queries(pieces.tile_at(tiles.v, 0, i), tiles.dout, do_stage, S_L, minus_delta)
        dq = warpgroup_mma_wait(PIECES, deps=[dq])
        _send(1, dq, tiles.dq[1], score.dk_scale)
        dp = warpgroup_mma_wait(0, deps=[dp])
    barrier_sync(DQ_SENT + 1, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.head_of_gradients(gradients, at)
    gl.static_assert(len(dk) == PIECES)
    buffer = pieces.tile_at(tiles.v, 0, 0)  # read by this consumer alone
    pieces.store_sums(gradients.dk, dk, score.dk_scale, buffer, head, gradients, grid, at, keys)
    if gradients.turns_ptr is not None or gradients.counters_ptr is not None:
        barrier_sync(DQ_STAGED + 1, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def _start(grid, descs, score, gradients, arrival, DO_STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps."""
    dtype: gl.constexpr = descs.k[0].dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype)
    DIM: gl.constexpr = descs.q[0].block_type.shape[3] + descs.q[1].block_type.shape[3]
    UNITS_1: gl.constexpr = DIM // UNIT - UNITS_0
    boxes = Tiles(
        k=pieces.boxes(descs.k, 1),
        v=pieces.boxes(descs.v, 1),
        q=pieces.boxes(descs.q),
        dout=pieces.boxes(descs.dout, DO_STAGES),
        ds=(
            gl.allocate_shared_memory(dtype, [KEYS, BM], DS_L),  # P
            gl.allocate_shared_memory(dtype, [KEYS, BM], DS_L),
        ),
        dq=(pieces.allocate_staging(descs.dq[0]), pieces.allocate_staging(descs.dq[0])),
        lse=pieces.rows(descs.lse),
        delta=pieces.rows(descs.delta),
        bounds=pieces.rows(descs.bounds),
        positions=() if descs.positions is None else (pieces.rows(descs.positions),),
        kv_full=pieces.barriers(1),
        q_full=pieces.barriers(2),
        dout_full=pieces.barriers(2),
        programs=(),
        seen=(),
    )
    dq = (pieces.staging_matrix(boxes.dq[0]), pieces.staging_matrix(boxes.dq[1]))
    tiles = pieces.matrices(boxes, dq)
    mbarrier.init(tiles.kv_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(tiles.q_full.index(i), count=1)
        mbarrier.init(tiles.dout_full.index(i), count=1)
    gl.warp_specialize(
        [
            (_values, (grid, tiles, score, gradients)),
            (_keys, (grid, tiles, score, gradients, UNITS_1)),
            (pieces.producer, (grid, descs, boxes, arrival, Q_FREE, DO_FREE)),
            (_writer, (0, UNITS_0, descs.dq[0], boxes.dq[0], grid, gradients)),
            (_writer, (1, UNITS_1, descs.dq[0], boxes.dq[1], grid, gradients)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )


@gluon.jit(do_not_specialize=pieces.NUMBERS)
def kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, bounds_desc, dq_desc,
    q_rest_desc, k_rest_desc, dout_rest_desc, v_rest_desc,  # columns from 128 on; None for v if there are none
    dk_ptr, dv_ptr, last_dk_ptr, last_dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches,
    stride_b, stride_s, stride_h, q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    DO_STAGES: gl.constexpr, BATCHED: gl.constexpr, FOLD: gl.constexpr, FIXED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq. Arguments: as of ``backward_128.kernel``."""
    _start(
        Grid(info_ptr, heads, tiles, kv_heads, parts, sweep, q_tiles, BATCHED),
        Descriptors(
            q=(q_desc, q_rest_desc),
            dout=pieces.pieces_of(dout_desc, dout_rest_desc),
            k=(k_desc, k_rest_desc),
            v=pieces.pieces_of(v_desc, v_rest_desc),
            lse=lse_desc,
            delta=delta_desc,
            bounds=bounds_desc,
            positions=positions_desc,
            dq=(dq_desc,),
            seen=(),
        ),
        Score(
            scale_log2, inner if FIXED is None else FIXED, slopes_ptr, slopes_stride, positions_k_ptr,
            None if FOLD else dk_scale, dv_scale,
        ),
        Gradients(
            (dk_ptr, last_dk_ptr), (dv_ptr, last_dv_ptr), batches, stride_b, stride_s, stride_h, turns_ptr,
            counters_ptr, segments,
        ),
        Arrival(flags_ptr, epoch, timed_out_ptr),
        DO_STAGES,
        REGISTERS,
    )  # fmt: skip
