"""The backward of the block kernel for Hopper (sm_90) at head dims 192 of q and k and 128 of v, in Gluon. Launched by
backward.py, with the same tables, order of the CTAs and order of their query tiles.

dk and dv of 64 keys are 160 registers a thread, which leaves a consumer some 48. A step never needs more, at the price
of waiting more often; meanwhile the other consumer multiplies. 128 keys a CTA, not 64, halve the dQ that is sent, and
the Q and dO that are read, for each product::

    consumers 0, 1  64 keys each, scores transposed (keys are rows), one query tile a step; registers in flight:
                    P = exp2(S^T c - lse), in 16 bits                                              32 -> 16
                    dP^T = V dO^T - delta ; dV += P dO ; dS = P dP^T, to shared memory             48 -> 16
                    dK += dS Q                                                                     16
                    64 columns of dQ of the step before, to shared memory                          32
                    32 columns of it, the same way, together with S^T of the step after            48
    producer        one warp: K, V, then Q, lse (and start, end of cut tiles), dO, delta of every step by TMA
    writers 0, 1    one warp each: add the staged columns of dQ to global memory, float32, by TMA

* P stays in 16 bits, two to a register, and dS is made of it, with one more rounding than at head dim 128.
* dQ = dS K needs all 128 keys. A consumer makes half of the columns of each piece, 64 + 32, one after the other in the
  same staging memory, from both halves of dS of the step before.
* There are two buffers of dS. So a consumer signals that its half is written only after it has also read the dS of the
  step before, which the other one overwrites next. The two may be half a step apart, and are.
* Shared memory is full: K and V 80 KiB, two tiles of Q and dO 80, dS 32, dQ 32, row statistics 2, of 227.
* ``i & 1``, not ``i % 2``: from the latter LLVM makes addresses that grow from step to step, a register each.

Named barriers: 4 to 7 half of dS written and the dS before read (two per consumer, even and odd steps), 8, 9 Q read,
10, 11 dO read, 12, 13 dQ staged (once more when dk and dv are stored and to be counted), 14, 15 dQ sent.
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
from .backward_pieces import BM, BN, LOADERS, PAIR, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    multiply_pairs,
    reinterpret,
    round_pairs,
    tma_reduce_add,
)

DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 8, 10, 12, 14))


@gluon.jit
def _writer(
    C: gl.constexpr, dq_descs, dq_t, info_ptr, heads, tiles, kv_heads, parts, turns_ptr,
    counters_ptr, segments, sweep, BATCHED: gl.constexpr,
):  # fmt: skip
    """Send the dQ of each step one step later, for consumer C: in the first step there is nothing to send yet."""
    FIRST: gl.constexpr = 2 * dq_descs[0].block_type.shape[3]
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    steps, cut_steps, j, stops = pieces.visit_order(info, heads)
    head = (kv_head * parts + part) * heads
    barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for _ in range(0, 2):
        barrier_sync(DQ_STAGED + C, STAGING, warps=1)
        barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for i in range(0, steps):
        for unit in gl.static_range(2):
            barrier_sync(DQ_STAGED + C, STAGING, warps=1)
            column = unit * FIRST + C * dq_descs[unit].block_type.shape[3]
            tma_reduce_add(dq_descs[unit], [batch, j * BM, head, column], dq_t[unit])
            tma.store_wait(0)
            pieces.signal_sent(DQ_SENT + C, (i == steps - 1) & (unit == 1), turns_ptr, tiles, part, parts, sweep)
        j, head = pieces.next_tile(i, j, head, cut_steps, heads, stops)
    pieces.finish_writer(DQ_STAGED + C, turns_ptr, counters_ptr, info, tiles, part, parts, segments, sweep)


@gluon.jit
def _scores(i, k, q_s, q_full, S_L: gl.constexpr):
    """Issue S^T of step i, unscaled: (64 keys, 64 queries), asynchronous."""
    mbarrier.wait(q_full.index(i & 1), (i >> 1) & 1)
    return pieces.keys_times_queries(k, q_s, i & 1, S_L)


@gluon.jit
def _dq(C: gl.constexpr, UNIT: gl.constexpr, step, i, k_s, ds_s):
    """Issue half C of the columns of piece UNIT of dQ of ``step``: an asynchronous product for each half of the keys.
    ``i`` is the current step, see ``pieces.tile_at``."""
    stage = (step & 1) * 2
    W: gl.constexpr = k_s[UNIT].shape[2] // 2
    late = i >> 30
    own = k_s[UNIT].index(C + late).slice(C * W, W, dim=1)
    other = k_s[UNIT].index(1 - C + late).slice(C * W, W, dim=1)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    dq = gl.zeros([BM, W], gl.float32, L)
    dq = warpgroup_mma(ds_s.index(stage + C).permute((1, 0)), own, dq, use_acc=False, is_async=True)
    return warpgroup_mma(ds_s.index(stage + 1 - C).permute((1, 0)), other, dq, is_async=True)


@gluon.jit
def _send(C: gl.constexpr, dq, dq_s, dq_scale, FOLD: gl.constexpr):
    """Stage columns of dQ and tell the writer."""
    if not FOLD:
        dq = dq * dq_scale
    barrier_sync(DQ_SENT + C, STAGING)
    pieces.stage_dq(dq_s, dq)
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)


@gluon.jit
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, last, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v,
    delta_v, bounds_v, ds_s, dq_s, q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, steps_of_head,
    FOLD: gl.constexpr,
):  # fmt: skip
    """Walk the query tiles. ``s`` is complete on entry, and on return that of the next step is; no wgmma crosses a
    step."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = k_s[0].dtype
    DO_STAGES: gl.constexpr = dout_s[0].shape[0]
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i & 1
        if inner is None:
            s = pieces.scores_to_base_2(s, scale_log2, alibi, head, bounds_v, stage, key, past, S_L, CUT)
            p = gl.exp2(s - lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p16 = gl.convert_layout(round_pairs(p, dtype), A_L)
        else:
            p16, slope16 = pieces.capped_probabilities(
                s, lse_v, scale_log2, inner, alibi, head, bounds_v, stage, key, past, S_L, CUT, dtype, SHORT=False
            )
            p16 = gl.convert_layout(p16, A_L)
        do_stage = stage if DO_STAGES == 2 else i >> 30
        mbarrier.wait(dout_full.index(do_stage), (i >> 1) & 1 if DO_STAGES == 2 else stage)
        if inner is None:
            minus_delta = delta_v.index(do_stage).load(gl.SliceLayout(0, S_L))
            dp = pieces.keys_times_queries(pieces.tile_at(v_s, C, i), dout_s, do_stage, S_L, minus_delta)
            dv = pieces.accumulate(p16, dout_s, do_stage, dv)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = multiply_pairs(gl.convert_layout(p16, S_L), dp, dtype)
        else:  # P with and without the factor of dS, and dP at the same time, would be too many registers
            dv = pieces.accumulate(p16, dout_s, do_stage, dv)
            dv, p16 = pieces.wait_sums(0, dv, p16)
            minus_delta = delta_v.index(do_stage).load(gl.SliceLayout(0, S_L))
            dp = pieces.keys_times_queries(pieces.tile_at(v_s, C, i), dout_s, do_stage, S_L, minus_delta)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = multiply_pairs(slope16, dp, dtype)
        barrier_sync(DS_READY + 2 - 2 * C + ((i + 1) & 1), PAIR)  # there is the other half of the previous dS
        ds_s.index(stage * 2 + C).store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        if inner is None:
            dv, p16 = pieces.wait_sums(0, dv, p16)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        dk = pieces.accumulate(ds16, q_s, stage, dk)
        dk, ds16 = pieces.wait_sums(0, dk, ds16)
        first_dq = _dq(C, 0, i + 1, i, k_s, ds_s)
        barrier_arrive(Q_FREE + stage, LOADERS)
        first_dq = warpgroup_mma_wait(0, deps=[first_dq])
        _send(C, first_dq, dq_s[0], dq_scale, FOLD)
        second_dq = _dq(C, 1, i + 1, i, k_s, ds_s)
        s = _scores(gl.minimum(i + 1, last), pieces.tile_at(k_s, C, i), q_s, q_full, S_L)
        second_dq = warpgroup_mma_wait(2, deps=[second_dq])
        barrier_arrive(DS_READY + 2 * C + (i & 1), PAIR)
        _send(C, second_dq, dq_s[1], dq_scale, FOLD)
        s = warpgroup_mma_wait(0, deps=[s])
        head, inside = scores.next_head(alibi, head, inside, steps_of_head)
    return s, dk, dv


@gluon.jit
def _consumer(
    C: gl.constexpr, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s, dq_s, kv_full,
    q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale,
    dv_scale, inner, alibi, sweep, BATCHED: gl.constexpr, FOLD: gl.constexpr, IN_TURNS: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    first = gl.load(info)
    past = gl.load(info + 1)
    steps, cut_steps, _, _ = pieces.visit_order(info, heads)
    key = first + C * (BN // 2)
    head = pieces.buffer_of(batch, part, batches, IN_TURNS).to(gl.int64) * stride_b + kv_head.to(gl.int64) * stride_h
    dk = pieces.zero_sums(k_s)
    dv = pieces.zero_sums(v_s)
    alibi = scores.of_keys(alibi, batch, (kv_head * parts + part) * heads, first, past, key, S_L)
    ds_s.index(2 + C).store(gl.zeros([BN // 2, BM], k_s[0].dtype, S_L))  # "dS of step -1"
    fence_async_shared()
    barrier_arrive(DS_READY + 1 + 2 * C, PAIR)
    mbarrier.wait(kv_full.index(C), 0)
    mbarrier.wait(kv_full.index(1 - C), 0)
    s = _scores(0, pieces.tile_at(k_s, C, 0), q_s, q_full, S_L)
    s = warpgroup_mma_wait(0, deps=[s])
    s, dk, dv = _walk(
        C, True, 0, cut_steps, steps - 1, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
        ds_s, dq_s, q_full, dout_full, scale_log2, dk_scale, key, past, inner, alibi, cut_steps // heads, FOLD,
    )  # fmt: skip
    s, dk, dv = _walk(
        C, False, cut_steps, steps, steps - 1, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
        ds_s, dq_s, q_full, dout_full, scale_log2, dk_scale, key, past, inner, alibi,
        (steps - cut_steps) // heads, FOLD,
    )  # fmt: skip
    barrier_sync(DS_READY + 2 - 2 * C + ((steps - 1) & 1), PAIR)
    for unit in gl.static_range(2):  # of the last step
        dq = warpgroup_mma_wait(0, deps=[_dq(C, unit, steps - 1, 0, k_s, ds_s)])
        _send(C, dq, dq_s[unit], dk_scale, FOLD)
    barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
    pieces.store_sums(dv_ptr, dv, head, stride_s, key, past, part, dv_scale, True, IN_TURNS)
    pieces.store_sums(dk_ptr, dk, head, stride_s, key, past, part, dk_scale, not FOLD, IN_TURNS)
    if IN_TURNS or COUNTED:
        barrier_sync(DQ_STAGED + C, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit(do_not_specialize=pieces.NUMBERS)
def kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, bounds_desc, dq_desc,
    q_rest_desc, k_rest_desc, dq_rest_desc,  # columns from 128 on
    dk_ptr, dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h,
    q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    BATCHED: gl.constexpr, FOLD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq. Arguments: as of ``backward_128.kernel``."""
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN // 2, BM], dtype)
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_t = (pieces.boxes(k_desc), pieces.boxes(k_rest_desc))
    v_t = (pieces.boxes(v_desc),)
    q_t = (pieces.boxes(q_desc), pieces.boxes(q_rest_desc))
    dout_t = (pieces.boxes(dout_desc, 2 if positions_desc is None else 1),)  # positions take the place of one tile
    ds_s = gl.allocate_shared_memory(dtype, [4, BN // 2, BM], DS_L)
    REST: gl.constexpr = [1, BM, 1, dq_rest_desc.block_type.shape[3]]
    dq_t_0 = pieces.allocate_staging(dq_desc)
    dq_t_1 = pieces.allocate_staging(dq_desc)
    dq_r_0 = reinterpret(dq_t_0, gl.float32, REST, dq_rest_desc.layout)
    dq_r_1 = reinterpret(dq_t_1, gl.float32, REST, dq_rest_desc.layout)
    dq_s_0 = (pieces.staging_matrix(dq_t_0), pieces.staging_matrix(dq_r_0))
    dq_s_1 = (pieces.staging_matrix(dq_t_1), pieces.staging_matrix(dq_r_1))
    lse_t = gl.allocate_shared_memory(gl.float32, [2, 1, BM], lse_desc.layout)
    delta_t = gl.allocate_shared_memory(gl.float32, [2, 1, BM], delta_desc.layout)
    bounds_t = gl.allocate_shared_memory(gl.int32, [2, 1, 2 * BM], bounds_desc.layout)
    positions_t = pieces.positions_of(positions_desc)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
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
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    gl.warp_specialize(
        [
            (_consumer, (0, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s,
                         dq_s_0, kv_full, q_full, dout_full, heads, tiles, kv_heads,
                         parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale, dv_scale, inner,
                         alibi, sweep, BATCHED, FOLD, turns_ptr is not None, counters_ptr is not None)),
            (_consumer, (1, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s,
                         dq_s_1, kv_full, q_full, dout_full, heads, tiles, kv_heads,
                         parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale, dv_scale, inner,
                         alibi, sweep, BATCHED, FOLD, turns_ptr is not None, counters_ptr is not None)),
            (pieces.producer, ((q_desc, q_rest_desc), (dout_desc,), (k_desc, k_rest_desc), (v_desc,), lse_desc,
                         delta_desc, bounds_desc, positions_desc, info_ptr, k_t, v_t, q_t, dout_t, lse_t, delta_t,
                         bounds_t, positions_t, kv_full, q_full, dout_full, heads, tiles, kv_heads, parts, q_tiles,
                         flags_ptr, epoch, timed_out_ptr, Q_FREE, DO_FREE, sweep, BATCHED)),
            (_writer, (0, (dq_desc, dq_rest_desc), (dq_t_0, dq_r_0), info_ptr, heads, tiles, kv_heads, parts,
                       turns_ptr, counters_ptr, segments, sweep, BATCHED)),
            (_writer, (1, (dq_desc, dq_rest_desc), (dq_t_1, dq_r_1), info_ptr, heads, tiles, kv_heads, parts,
                       turns_ptr, counters_ptr, segments, sweep, BATCHED)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip
