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
from .backward_pieces import BM, LOADERS, PAIR, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    reinterpret,
    tma_reduce_add,
)

KEYS = gl.constexpr(64)  # of a CTA
UNIT = gl.constexpr(64)  # columns of dQ that are computed and sent at a time
UNITS_0 = gl.constexpr(1)  # units of consumer 0; consumer 1 has the others

P_READY, DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 5, 6, 8, 10, 12))


@gluon.jit
def _writer(
    C: gl.constexpr, UNITS: gl.constexpr, dq_desc, info_ptr, dq_s, heads, tiles, kv_heads, parts, turns_ptr,
    counters_ptr, segments, sweep, BATCHED: gl.constexpr,
):  # fmt: skip
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    steps, cut_steps, j, stops = pieces.visit_order(info, heads)
    head = (kv_head * parts + part) * heads
    barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for i in range(0, steps):
        for unit in gl.static_range(UNITS):
            barrier_sync(DQ_STAGED + C, STAGING, warps=1)
            tma_reduce_add(dq_desc, [batch, j * BM, head, (C * UNITS_0 + unit) * UNIT], dq_s)
            tma.store_wait(0)
            pieces.signal_sent(
                DQ_SENT + C, (i == steps - 1) & (unit == UNITS - 1), turns_ptr, tiles, part, parts, sweep
            )  # fmt: skip
        j, head = pieces.next_tile(i, j, head, cut_steps, heads, stops)
    pieces.finish_writer(DQ_STAGED + C, turns_ptr, counters_ptr, info, tiles, part, parts, segments, sweep)


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
def _send(C: gl.constexpr, dq, dq_s, dq_scale, FOLD: gl.constexpr):
    if not FOLD:
        dq = dq * dq_scale
    barrier_sync(DQ_SENT + C, STAGING)
    pieces.stage_dq(dq_s, dq)
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)


@gluon.jit
def _walk_values(
    CUT: gl.constexpr, first, past_step, last, s, dv, k_s, q_s, dout_s, lse_v, bounds_v, p_s, ds_s,
    dq_s, q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, steps_of_head,
    FOLD: gl.constexpr,
):  # fmt: skip
    """Walk the query tiles as consumer 0. ``s`` is complete on entry, and on return that of the next step is."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv[0].type.layout, k_width=2)
    PIECES: gl.constexpr = len(k_s)
    DO_STAGES: gl.constexpr = dout_s[0].shape[0]
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i % 2
        do_stage = i % DO_STAGES
        p, slope16 = pieces.probabilities(
            s, lse_v, scale_log2, inner, alibi, head, bounds_v, stage, key, past, S_L, CUT, p_s.dtype
        )
        p_s.store(slope16)
        barrier_arrive(P_READY, PAIR)
        barrier_arrive(Q_FREE + stage, LOADERS)
        p16 = gl.convert_layout(p, A_L)
        mbarrier.wait(dout_full.index(do_stage), (i // DO_STAGES) & 1)
        dv = pieces.accumulate(p16, dout_s, do_stage, dv)
        after = gl.minimum(i + 1, last)
        mbarrier.wait(q_full.index(after % 2), (after // 2) & 1)
        s = pieces.keys_times_queries(pieces.tile_at(k_s, 0, i), q_s, after % 2, S_L)
        dv, p16 = pieces.wait_sums(PIECES, dv, p16)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        barrier_sync(DS_READY, PAIR)
        dq = _dq(0, k_s, ds_s)
        dq, s = warpgroup_mma_wait(0, deps=[dq, s])
        _send(0, dq, dq_s, dq_scale, FOLD)
        head, inside = scores.next_head(alibi, head, inside, steps_of_head)
    return s, dv


@gluon.jit
def _values(
    dv_ptr, info_ptr, k_s, q_s, dout_s, lse_v, bounds_v, p_s, ds_s, dq_s, kv_full, q_full, dout_full,
    heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h, scale_log2, dq_scale, dv_scale,
    inner, alibi, sweep, BATCHED: gl.constexpr, FOLD: gl.constexpr, IN_TURNS: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    """Run consumer 0: S, P, dV and the first columns of dQ."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    key = gl.load(info)
    past = gl.load(info + 1)
    steps, cut_steps, _, _ = pieces.visit_order(info, heads)
    dv = pieces.zero_sums(dout_s)
    alibi = scores.of_keys(alibi, batch, (kv_head * parts + part) * heads, key, past, key, S_L)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[pieces.keys_times_queries(pieces.tile_at(k_s, 0, 0), q_s, 0, S_L)])
    s, dv = _walk_values(
        True, 0, cut_steps, steps - 1, s, dv, k_s, q_s, dout_s, lse_v, bounds_v, p_s, ds_s, dq_s, q_full, dout_full,
        scale_log2, dq_scale, key, past, inner, alibi, cut_steps // heads, FOLD,
    )  # fmt: skip
    s, dv = _walk_values(
        False, cut_steps, steps, steps - 1, s, dv, k_s, q_s, dout_s, lse_v, bounds_v, p_s, ds_s, dq_s, q_full,
        dout_full, scale_log2, dq_scale, key, past, inner, alibi, (steps - cut_steps) // heads, FOLD,
    )  # fmt: skip
    barrier_sync(DQ_SENT, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.buffer_of(batch, part, batches, IN_TURNS).to(gl.int64) * stride_b + kv_head.to(gl.int64) * stride_h
    pieces.store_sums(dv_ptr, dv, head, stride_s, key, past, part, dv_scale, True, IN_TURNS)
    if IN_TURNS or COUNTED:
        barrier_sync(DQ_STAGED, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def _keys(
    dk_ptr, info_ptr, k_s, v_s, q_s, dout_s, delta_v, p_s, ds_s, dq_s, kv_full, q_full, dout_full,
    heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h, dk_scale,
    UNITS: gl.constexpr, sweep, BATCHED: gl.constexpr, FOLD: gl.constexpr, IN_TURNS: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    """Run consumer 1: dP, dS, dK and the last columns of dQ, one unit of them or two."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    PIECES: gl.constexpr = len(v_s)
    DO_STAGES: gl.constexpr = dout_s[0].shape[0]
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    key = gl.load(info)
    past = gl.load(info + 1)
    steps = (gl.load(info + 3) - gl.load(info + 2)) * heads
    dk = pieces.zero_sums(q_s)
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(dout_full.index(0), 0)
    minus_delta = delta_v.index(0).load(gl.SliceLayout(0, S_L))
    dp = warpgroup_mma_wait(0, deps=[pieces.keys_times_queries(pieces.tile_at(v_s, 0, 0), dout_s, 0, S_L, minus_delta)])
    for i in range(0, steps):
        stage = i % 2
        do_stage = i % DO_STAGES
        barrier_sync(P_READY, PAIR)
        ds = (p_s.load(S_L).to(gl.float32) * dp).to(p_s.dtype)
        ds_s.store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        barrier_arrive(DS_READY, PAIR)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        mbarrier.wait(q_full.index(stage), (i // 2) & 1)
        dk = pieces.accumulate(ds16, q_s, stage, dk)
        dq = _dq(UNITS_0, k_s, ds_s)
        dk, ds16 = pieces.wait_sums(1, dk, ds16)
        barrier_arrive(Q_FREE + stage, LOADERS)
        for unit in gl.static_range(1, UNITS):
            dq = warpgroup_mma_wait(0, deps=[dq])
            _send(1, dq, dq_s, dk_scale, FOLD)
            dq = _dq(UNITS_0 + unit, k_s, ds_s)
        after = gl.minimum(i + 1, steps - 1)
        mbarrier.wait(dout_full.index(after % DO_STAGES), (after // DO_STAGES) & 1)
        minus_delta = delta_v.index(after % DO_STAGES).load(gl.SliceLayout(0, S_L))
        dp = pieces.keys_times_queries(pieces.tile_at(v_s, 0, i), dout_s, after % DO_STAGES, S_L, minus_delta)
        dq = warpgroup_mma_wait(PIECES, deps=[dq])
        _send(1, dq, dq_s, dk_scale, FOLD)
        dp = warpgroup_mma_wait(0, deps=[dp])
    barrier_sync(DQ_SENT + 1, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.buffer_of(batch, part, batches, IN_TURNS).to(gl.int64) * stride_b + kv_head.to(gl.int64) * stride_h
    pieces.store_sums(dk_ptr, dk, head, stride_s, key, past, part, dk_scale, not FOLD, IN_TURNS)
    if IN_TURNS or COUNTED:
        barrier_sync(DQ_STAGED + 1, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit(do_not_specialize=pieces.NUMBERS)
def kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, bounds_desc, dq_desc,
    q_rest_desc, k_rest_desc, dout_rest_desc, v_rest_desc,  # columns from 128 on; None for v if there are none
    dk_ptr, dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h,
    q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    DO_STAGES: gl.constexpr, BATCHED: gl.constexpr, FOLD: gl.constexpr, FIXED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq. Arguments: as of ``backward_128.kernel``."""
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype)
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WHOLE_V: gl.constexpr = v_rest_desc is None
    Q_BYTES: gl.constexpr = q_desc.block_type.nbytes + q_rest_desc.block_type.nbytes
    DIM: gl.constexpr = Q_BYTES // (2 * BM)
    UNITS_1: gl.constexpr = DIM // UNIT - UNITS_0
    dout_descs = (dout_desc,) if WHOLE_V else (dout_desc, dout_rest_desc)
    v_descs = (v_desc,) if WHOLE_V else (v_desc, v_rest_desc)
    k_t = (pieces.boxes(k_desc, 1), pieces.boxes(k_rest_desc, 1))
    v_t = (pieces.boxes(v_desc, 1),) if WHOLE_V else (pieces.boxes(v_desc, 1), pieces.boxes(v_rest_desc, 1))
    q_t = (pieces.boxes(q_desc, 2), pieces.boxes(q_rest_desc, 2))
    N: gl.constexpr = DO_STAGES
    dout_t = (pieces.boxes(dout_desc, N),) if WHOLE_V else (pieces.boxes(dout_desc, N), pieces.boxes(dout_rest_desc, N))
    p_s = gl.allocate_shared_memory(dtype, [KEYS, BM], DS_L)
    ds_s = gl.allocate_shared_memory(dtype, [KEYS, BM], DS_L)
    dq_t = (pieces.allocate_staging(dq_desc), pieces.allocate_staging(dq_desc))
    lse_t = gl.allocate_shared_memory(gl.float32, [2, 1, BM], lse_desc.layout)
    delta_t = gl.allocate_shared_memory(gl.float32, [2, 1, BM], delta_desc.layout)
    bounds_t = gl.allocate_shared_memory(gl.int32, [2, 1, 2 * BM], bounds_desc.layout)
    positions_t = pieces.positions_of(positions_desc)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_s = pieces.matrices(k_t)
    v_s = pieces.matrices(v_t)
    q_s = pieces.matrices(q_t)
    dout_s = pieces.matrices(dout_t)
    lse_v = reinterpret(lse_t, gl.float32, [2, BM], ROW_L)
    delta_v = reinterpret(delta_t, gl.float32, [2, BM], ROW_L)
    alibi = pieces.alibi_of(slopes_ptr, slopes_stride, positions_k_ptr, positions_t)
    bounds_v = reinterpret(bounds_t, gl.int32, [4, BM], ROW_L)
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    gl.warp_specialize(
        [
            (_values, (dv_ptr, info_ptr, k_s, q_s, dout_s, lse_v, bounds_v, p_s, ds_s, pieces.staging_matrix(dq_t[0]),
                       kv_full, q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s,
                       stride_h, scale_log2, dk_scale, dv_scale, inner if FIXED is None else FIXED, alibi, sweep,
                       BATCHED, FOLD, turns_ptr is not None, counters_ptr is not None)),
            (_keys, (dk_ptr, info_ptr, k_s, v_s, q_s, dout_s, delta_v, p_s, ds_s, pieces.staging_matrix(dq_t[1]),
                     kv_full, q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s,
                     stride_h, dk_scale, UNITS_1, sweep, BATCHED, FOLD, turns_ptr is not None,
                     counters_ptr is not None)),
            (pieces.producer, ((q_desc, q_rest_desc), dout_descs, (k_desc, k_rest_desc), v_descs, lse_desc, delta_desc,
                         bounds_desc, positions_desc, info_ptr, k_t, v_t, q_t, dout_t, lse_t, delta_t, bounds_t,
                         positions_t, kv_full, q_full,
                         dout_full, heads, tiles, kv_heads, parts, q_tiles, flags_ptr, epoch, timed_out_ptr,
                         Q_FREE, DO_FREE, sweep, BATCHED)),
            (_writer, (0, UNITS_0, dq_desc, info_ptr, dq_t[0], heads, tiles, kv_heads, parts, turns_ptr, counters_ptr,
                       segments, sweep, BATCHED)),
            (_writer, (1, UNITS_1, dq_desc, info_ptr, dq_t[1], heads, tiles, kv_heads, parts, turns_ptr, counters_ptr,
                       segments, sweep, BATCHED)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip
