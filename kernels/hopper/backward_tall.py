"""The backward of the block kernel for Hopper (sm_90) at head dim 64, in Gluon. Launched by backward.py, in the
same order of the CTAs and of their query tiles, with tables for its taller tiles.

A consumer has 64 keys, as in backward_128.py, but a step has 128 queries: half as many fences, barriers and waits per
product, which limit the speed at a head dim of 64. One query tile a step::

    consumers 0, 1  dP^T = V dO^T  under  P = exp2(S^T c - lse), in 16 bits ; dV += P dO ; dS = P (dP^T - delta), to
                    shared memory ; dQ of the step before ; dK += dS Q ; S^T of the step after ; then dQ to shared
                    memory
    producer        one warp: K, V, then Q, lse (and start, end of cut tiles), dO, delta of every step by TMA
    writers 0, 1    one warp each: add the staged half of dQ to global memory, float32, by TMA

* K and V are read from shared memory: with 128 queries a product of 64 keys has enough to do for that, and there are no
  registers for them.
* P stays in 16 bits, two to a register, and dS is made of it, with one more rounding than at head dim 128.
* Consumer 0 makes dQ of the first 64 queries and consumer 1 of the others, both from all 128 keys.
* There are two buffers of dS. So a consumer signals that its half is written only after it has also read the dS of the
  step before, which the other one overwrites next.

Named barriers: 4 to 7 half of dS written and the dS before read (two per consumer, even and odd steps), 8, 9 Q read,
10, 11 dO read, 12, 13 dQ staged (once more when dk and dv are stored and to be counted), 14, 15 dQ sent.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import backward_pieces as pieces
from . import scores
from .backward_pieces import LOADERS, PAIR, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    multiply_pairs,
    reinterpret,
    round_pairs,
)

ROWS = gl.constexpr(128)  # queries of a step
HALF = gl.constexpr(64)  # a consumer's keys, and the queries whose dQ it makes
DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 8, 10, 12, 14))


@gluon.jit
def _scores(i, k, q_s, q_full, S_L: gl.constexpr):
    """Issue S^T of step i, unscaled: (64 keys, 128 queries), asynchronous."""
    mbarrier.wait(q_full.index(i & 1), (i >> 1) & 1)
    s = gl.zeros([HALF, ROWS], gl.float32, S_L)
    return warpgroup_mma(k[0], q_s[0].index(i & 1).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _dq(C: gl.constexpr, step, i, k_s, ds_s):
    """Issue half C of the queries of dQ of ``step``: an asynchronous product for each half of the keys. ``i`` is the
    current step, see ``pieces.tile_at``."""
    stage = (step & 1) * 2
    late = i >> 30
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros([HALF, 64], gl.float32, L)
    own = ds_s.index(stage + C).slice(C * HALF, HALF, dim=1).permute((1, 0))
    other = ds_s.index(stage + 1 - C).slice(C * HALF, HALF, dim=1).permute((1, 0))
    dq = warpgroup_mma(own, k_s[0].index(C + late), dq, use_acc=False, is_async=True)
    return warpgroup_mma(other, k_s[0].index(1 - C + late), dq, is_async=True)


@gluon.jit
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, last, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v,
    delta_v, bounds_v, ds_s, dq_s, q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, heads,
    FOLD: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Walk the query tiles. ``s`` is complete on entry, and on return that of the next step is; no wgmma crosses a
    step."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = k_s[0].dtype
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i & 1
        mbarrier.wait(dout_full.index(stage), (i >> 1) & 1)
        dp = gl.zeros([HALF, ROWS], gl.float32, S_L)
        own = pieces.tile_at(v_s, C, i)[0]
        dp = warpgroup_mma(own, dout_s[0].index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
        if inner is None:
            s = pieces.scores_to_base_2(s, scale_log2, alibi, head, bounds_v, stage, key, past, S_L, CUT)
            p = gl.exp2(s - lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p16 = gl.convert_layout(round_pairs(p, dtype), A_L)
        else:
            p16, slope16 = pieces.capped_probabilities(
                s, lse_v, scale_log2, inner, alibi, head, bounds_v, stage, key, past, S_L, CUT, dtype, False
            )
            p16 = gl.convert_layout(p16, A_L)
        dv = pieces.accumulate(p16, dout_s, stage, dv)
        dp = warpgroup_mma_wait(1, deps=[dp])
        dp += delta_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
        ds = multiply_pairs(gl.convert_layout(p16, S_L) if inner is None else slope16, dp, dtype)
        barrier_sync(DS_READY + 2 - 2 * C + ((i + 1) & 1), PAIR)  # there is the other half of the previous dS
        ds_s.index(stage * 2 + C).store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        barrier_arrive(DQ_STAGED + C, STAGING)
        dq = _dq(C, i + 1, i, k_s, ds_s)
        dv, p16 = pieces.wait_sums(2, dv, p16)
        barrier_arrive(DO_FREE + stage, LOADERS)
        dk = pieces.accumulate(ds16, q_s, stage, dk)
        s = _scores(gl.minimum(i + 1, last), pieces.tile_at(k_s, C, i), q_s, q_full, S_L)
        dq = warpgroup_mma_wait(2, deps=[dq])
        barrier_arrive(DS_READY + 2 * C + (i & 1), PAIR)
        if not FOLD:
            dq = dq * dq_scale
        barrier_sync(DQ_SENT + C, STAGING)
        pieces.stage_dq(dq_s, dq)
        first_dk, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], ds16, s])
        dk = (first_dk,)
        barrier_arrive(Q_FREE + stage, LOADERS)
        if ORDERED:
            head = pieces.ordered_next_head(alibi, head, heads)
        else:
            head, inside = scores.next_head(alibi, head, inside, steps_of_head)
    return s, dk, dv


@gluon.jit
def _consumer(
    C: gl.constexpr, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s, dq_s, kv_full,
    q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale,
    dv_scale, inner, alibi, sweep, BATCHED: gl.constexpr, FOLD: gl.constexpr, IN_TURNS: gl.constexpr,
    COUNTED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    first = gl.load(info)
    past = gl.load(info + 1)
    if ORDERED:
        steps, cut_steps, late_steps = pieces.ordered_visits(info, heads)
    else:
        steps, cut_steps, _, _ = pieces.visit_order(info, heads)
        late_steps = steps
    key = first + C * HALF
    dk = pieces.zero_sums(k_s)
    dv = pieces.zero_sums(v_s)
    alibi = scores.of_keys(alibi, batch, (kv_head * parts + part) * heads, first, past, key, S_L)
    ds_s.index(2 + C).store(gl.zeros([HALF, ROWS], k_s[0].dtype, S_L))  # "dS of step -1"
    fence_async_shared()
    barrier_arrive(DS_READY + 1 + 2 * C, PAIR)
    mbarrier.wait(kv_full.index(C), 0)
    mbarrier.wait(kv_full.index(1 - C), 0)
    s = _scores(0, pieces.tile_at(k_s, C, 0), q_s, q_full, S_L)
    s = warpgroup_mma_wait(0, deps=[s])
    s, dk, dv = _walk(
        C, True, 0, cut_steps, steps - 1, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
        ds_s, dq_s, q_full, dout_full, scale_log2, dk_scale, key, past, inner, alibi, heads, FOLD, ORDERED,
    )  # fmt: skip
    s, dk, dv = _walk(
        C, False, cut_steps, late_steps, steps - 1, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
        ds_s, dq_s, q_full, dout_full, scale_log2, dk_scale, key, past, inner, alibi, heads, FOLD, ORDERED,
    )  # fmt: skip
    if ORDERED:
        s, dk, dv = _walk(
            C, True, late_steps, steps, steps - 1, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
            ds_s, dq_s, q_full, dout_full, scale_log2, dk_scale, key, past, inner, alibi, heads, FOLD, ORDERED,
        )  # fmt: skip
    # dQ of the last step, sent after that of the step before
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)
    barrier_sync(DS_READY + 2 - 2 * C + ((steps - 1) & 1), PAIR)
    dq = warpgroup_mma_wait(0, deps=[_dq(C, steps - 1, 0, k_s, ds_s)])
    if not FOLD:
        dq = dq * dk_scale
    barrier_sync(DQ_SENT + C, STAGING)
    pieces.stage_dq(dq_s, dq)
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)
    if IN_TURNS or COUNTED:
        barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.buffer_of(batch, part, batches, IN_TURNS).to(gl.int64) * stride_b + kv_head.to(gl.int64) * stride_h
    pieces.store_sums(dv_ptr, dv, head, stride_s, key, past, part, dv_scale, True, IN_TURNS)
    pieces.store_sums(dk_ptr, dk, head, stride_s, key, past, part, dk_scale, not FOLD, IN_TURNS)
    if IN_TURNS or COUNTED:
        barrier_sync(DQ_STAGED + C, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit(do_not_specialize=pieces.NUMBERS)
def kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, bounds_desc, dq_desc,
    dk_ptr, dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h,
    q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    first_ptr, sums_ptr,  # None if dQ may be added in any order
    BATCHED: gl.constexpr, FOLD: gl.constexpr, FIXED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq. Arguments: as of ``backward_128.kernel``."""
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype)
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_t = (pieces.boxes(k_desc),)
    v_t = (pieces.boxes(v_desc),)
    q_t = (pieces.boxes(q_desc),)
    dout_t = (pieces.boxes(dout_desc),)
    ds_s = gl.allocate_shared_memory(dtype, [4, HALF, ROWS], DS_L)
    dq_t_0 = pieces.allocate_staging(dq_desc)
    dq_t_1 = pieces.allocate_staging(dq_desc)
    lse_t = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS], lse_desc.layout)
    delta_t = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS], delta_desc.layout)
    bounds_t = gl.allocate_shared_memory(gl.int32, [2, 1, 2 * ROWS], bounds_desc.layout)
    positions_t = pieces.positions_of(positions_desc)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_s = pieces.matrices(k_t)
    v_s = pieces.matrices(v_t)
    q_s = pieces.matrices(q_t)
    dout_s = pieces.matrices(dout_t)
    lse_v = reinterpret(lse_t, gl.float32, [2, ROWS], ROW_L)
    delta_v = reinterpret(delta_t, gl.float32, [2, ROWS], ROW_L)
    alibi = pieces.alibi_of(slopes_ptr, slopes_stride, positions_k_ptr, positions_t)
    bounds_v = reinterpret(bounds_t, gl.int32, [4, ROWS], ROW_L)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    order = () if sums_ptr is None else (first_ptr, sums_ptr, q_tiles)
    gl.warp_specialize(
        [
            (_consumer, (0, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s,
                         pieces.staging_matrix(dq_t_0), kv_full, q_full, dout_full, heads, tiles, kv_heads,
                         parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale, dv_scale,
                         inner if FIXED is None else FIXED, alibi, sweep, BATCHED, FOLD, turns_ptr is not None,
                         counters_ptr is not None, sums_ptr is not None)),
            (_consumer, (1, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s,
                         pieces.staging_matrix(dq_t_1), kv_full, q_full, dout_full, heads, tiles, kv_heads,
                         parts, batches, stride_b, stride_s, stride_h, scale_log2, dk_scale, dv_scale,
                         inner if FIXED is None else FIXED, alibi, sweep, BATCHED, FOLD, turns_ptr is not None,
                         counters_ptr is not None, sums_ptr is not None)),
            (pieces.producer, ((q_desc,), (dout_desc,), (k_desc,), (v_desc,), lse_desc, delta_desc,
                         bounds_desc, positions_desc, info_ptr, k_t, v_t, q_t, dout_t, lse_t, delta_t, bounds_t,
                         positions_t, kv_full, q_full,
                         dout_full, heads, tiles, kv_heads, parts, q_tiles, flags_ptr, epoch, timed_out_ptr,
                         Q_FREE, DO_FREE, sweep, BATCHED, sums_ptr is not None)),
            (pieces.writer, (0, DQ_STAGED, DQ_SENT, ROWS, HALF, 0, dq_desc, info_ptr, dq_t_0, heads, tiles, kv_heads,
                         parts, turns_ptr, counters_ptr, segments, order, sweep, BATCHED)),
            (pieces.writer, (1, DQ_STAGED, DQ_SENT, ROWS, HALF, 0, dq_desc, info_ptr, dq_t_1, heads, tiles, kv_heads,
                         parts, turns_ptr, counters_ptr, segments, order, sweep, BATCHED)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip
