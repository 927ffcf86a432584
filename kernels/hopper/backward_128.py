"""The backward kernel for Hopper (sm_90) at head dims 96 and 128, in Gluon. Launched by backward.py.

A CTA owns a tile of 128 keys of one key head and walks the tiles of 64 queries that see it, for every query head of its
part of the group. dk and dv stay in registers and are stored once::

    consumers 0, 1  64 keys each, scores transposed (keys are rows), one query tile a step:
                    dP^T = V dO^T - delta  during  P = exp2(S^T c - lse) ; dV += P dO ; dS = P dP^T, to shared memory
                    dQ of the step before (its dS is complete) ; S^T of the step after ; dK += dS Q ; then dQ
                    to shared memory
    producer        one warp: K, V, then Q, lse (and start, end of cut tiles), dO, delta of every step by TMA
    writers 0, 1    one warp each: add the staged half of dQ to global memory, float32, by TMA

* P and dS feed dV and dK from registers. dQ = dS K needs all 128 keys: a consumer computes half of its columns and
  reads the other consumer's dS, for which it waits only a whole step later: the two may drift half a step apart.
* The last fence of a step serves the dS of the step and the dQ of the step before, which a writer then sends.
* Tiles have powers of two of columns. Head dim 96 is two tiles side by side, 64 + 32, as are dk and dv; consumer 0
  computes the first 64 columns of dQ and consumer 1 the last 32 (the two share the tensor cores).
* dP's sum starts at -delta, so that dS is P times it.
* The addresses of tiles that stay in shared memory for the whole loop are computed again in each step
  (``pieces.tile_at``); otherwise the second consumer would reload descriptors from the stack.
* dQ is staged without bank conflicts: odd rows exchange columns 16 apart (``pieces.stage_dq``).

Named barriers: 4 to 7 half of dS written (two per consumer, even and odd steps), 8, 9 Q read, 10, 11 dO read,
12, 13 dQ staged (once more when dk and dv are stored and to be counted), 14, 15 dQ sent.
Method: Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608).
What was tried: NOTES.md.
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
from .backward_pieces import BM, BN, LOADERS, PAIR, STAGING
from .primitives import barrier_arrive, barrier_sync, multiply_pairs, reinterpret

DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 8, 10, 12, 14))


@gluon.jit
def _scores(i, k, q_s, q_full, S_L: gl.constexpr):
    """Issue S^T of step i, unscaled: (64 keys, 64 queries), asynchronous."""
    mbarrier.wait(q_full.index(i % 2), (i // 2) & 1)
    return pieces.keys_times_queries(k, q_s, i % 2, S_L)


@gluon.jit
def _dq(C: gl.constexpr, i, k_s, ds_s):
    """Issue consumer C's columns of dQ of step i, half of them or piece C: both halves of dS times K, two asynchronous
    products."""
    stage = i % (ds_s.shape[0] // 2) * 2
    WHOLE: gl.constexpr = len(k_s) == 1
    W: gl.constexpr = k_s[0].shape[2] // 2 if WHOLE else k_s[C].shape[2]
    if WHOLE:
        own = k_s[0].index(C).slice(C * W, W, dim=1)
        other = k_s[0].index(1 - C).slice(C * W, W, dim=1)
    else:
        own = k_s[C].index(C)
        other = k_s[C].index(1 - C)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    dq = gl.zeros([BM, W], gl.float32, L)
    dq = warpgroup_mma(ds_s.index(stage + C).permute((1, 0)), own, dq, use_acc=False, is_async=True)
    return warpgroup_mma(ds_s.index(stage + 1 - C).permute((1, 0)), other, dq, is_async=True)


@gluon.jit
def _step(
    C: gl.constexpr, CUT: gl.constexpr, i, last, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v,
    ds_s, dq_s, q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, head,
    FOLD: gl.constexpr,
):  # fmt: skip
    """Process one query tile. ``s`` is complete on entry, and on return that of the next tile is; no wgmma crosses a
    step."""
    PIECES: gl.constexpr = len(k_s)  # of the columns; a product over them, or into them, is one product for each
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = k_s[0].dtype
    DS_STAGES: gl.constexpr = ds_s.shape[0] // 2
    stage = i % 2
    mbarrier.wait(dout_full.index(stage), (i // 2) & 1)
    minus_delta = delta_v.index(stage).load(gl.SliceLayout(0, S_L))
    dp = pieces.keys_times_queries(pieces.tile_at(v_s, C, i), dout_s, stage, S_L, minus_delta)
    if inner is None:
        s = pieces.scores_to_base_2(s, scale_log2, alibi, head, bounds_v, stage, key, past, S_L, CUT)
        p = gl.exp2(s - lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
        p16 = gl.convert_layout(p.to(dtype), A_L)
    else:
        p16, slope16 = pieces.capped_probabilities(
            s, lse_v, scale_log2, inner, alibi, head, bounds_v, stage, key, past, S_L, CUT, dtype
        )
        p16 = gl.convert_layout(p16, A_L)
    dv = pieces.accumulate(p16, dout_s, stage, dv)
    dp = warpgroup_mma_wait(PIECES, deps=[dp])
    ds = (p * dp).to(dtype) if inner is None else multiply_pairs(slope16, dp, dtype)
    barrier_sync(DS_READY + 2 - 2 * C + ((i + 1) & 1), PAIR)  # the other half of the previous dS
    ds_s.index(i % DS_STAGES * 2 + C).store(ds)
    ds16 = gl.convert_layout(ds, A_L)
    fence_async_shared()
    barrier_arrive(DS_READY + 2 * C + (i & 1), PAIR)
    barrier_arrive(DQ_STAGED + C, STAGING)
    dq = _dq(C, i + DS_STAGES - 1, k_s, ds_s)
    dv, p16 = pieces.wait_sums(2, dv, p16)
    barrier_arrive(DO_FREE + stage, LOADERS)
    s = _scores(gl.minimum(i + 1, last), pieces.tile_at(k_s, C, i), q_s, q_full, S_L)
    dk = pieces.accumulate(ds16, q_s, stage, dk)
    dq = warpgroup_mma_wait(2 * PIECES, deps=[dq])
    if not FOLD:
        dq = dq * dq_scale
    barrier_sync(DQ_SENT + C, STAGING)
    pieces.stage_dq(dq_s, dq)
    if PIECES == 1:
        first, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], ds16, s])
        dk = (first,)
    else:
        first, second, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], dk[1], ds16, s])
        dk = (first, second)
    barrier_arrive(Q_FREE + stage, LOADERS)
    return s, dk, dv


@gluon.jit
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, last, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v,
    delta_v, bounds_v, ds_s, dq_s, q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, heads,
    FOLD: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        s, dk, dv = _step(
            C, CUT, i, last, s, dk, dv, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s, dq_s,
            q_full, dout_full, scale_log2, dq_scale, key, past, inner, alibi, head, FOLD,
        )  # fmt: skip
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
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    batch, kv_head, part, info = pieces.place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    first = gl.load(info)
    past = gl.load(info + 1)
    if ORDERED:
        steps, cut_steps, late_steps = pieces.ordered_visits(info, heads)
    else:
        steps, cut_steps, _, _ = pieces.visit_order(info, heads)
        late_steps = steps
    key = first + C * (BN // 2)
    dk = pieces.zero_sums(k_s)
    dv = pieces.zero_sums(v_s)
    alibi = scores.of_keys(alibi, batch, (kv_head * parts + part) * heads, first, past, key, S_L)
    ds_s.index(ds_s.shape[0] - 2 + C).store(gl.zeros([BN // 2, BM], k_s[0].dtype, S_L))  # "dS of step -1"
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
    # dQ of the last step, after that of the step before
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)
    barrier_sync(DS_READY + 2 - 2 * C + ((steps - 1) & 1), PAIR)
    dq = warpgroup_mma_wait(0, deps=[_dq(C, steps - 1, k_s, ds_s)])
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
    q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc, dq_rest_desc,  # None if the head dim is a power of two
    dk_ptr, dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches, stride_b, stride_s, stride_h,
    q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    first_ptr, sums_ptr,  # None if dQ may be added in any order
    BATCHED: gl.constexpr, FOLD: gl.constexpr, FIXED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq.

    ``heads``: query heads of a CTA; ``parts``: CTAs that share a group. ``turns_ptr``: (batch * kv_heads, tiles)
    int32, zeros, where parts that add to the same dk, dv count whose turn it is; None if each part has its own.
    ``stride_*`` are those of dk and dv. ``flags_ptr`` or ``counters_ptr`` None: nothing to wait for or to count.
    ``FIXED``: :attr:`scores.Changes.fixed`, constants that take the place of ``inner``, or None."""
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN // 2, BM], dtype)
    ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WHOLE: gl.constexpr = q_rest_desc is None
    q_descs = (q_desc,) if WHOLE else (q_desc, q_rest_desc)
    dout_descs = (dout_desc,) if WHOLE else (dout_desc, dout_rest_desc)
    k_descs = (k_desc,) if WHOLE else (k_desc, k_rest_desc)
    v_descs = (v_desc,) if WHOLE else (v_desc, v_rest_desc)
    k_t = (pieces.boxes(k_desc),) if WHOLE else (pieces.boxes(k_desc), pieces.boxes(k_rest_desc))
    v_t = (pieces.boxes(v_desc),) if WHOLE else (pieces.boxes(v_desc), pieces.boxes(v_rest_desc))
    q_t = (pieces.boxes(q_desc),) if WHOLE else (pieces.boxes(q_desc), pieces.boxes(q_rest_desc))
    dout_t = (pieces.boxes(dout_desc),) if WHOLE else (pieces.boxes(dout_desc), pieces.boxes(dout_rest_desc))
    DS_STAGES: gl.constexpr = 4 if positions_desc is None else 3  # 3 are needed; positions take the place of one
    ds_s = gl.allocate_shared_memory(dtype, [2 * DS_STAGES, BN // 2, BM], DS_L)
    # Consumer 0 and its writer have the first half or the first piece of dQ's columns.
    W: gl.constexpr = dq_desc.block_type.shape[3]
    if WHOLE:
        dq_t = gl.allocate_shared_memory(gl.float32, [2, 1, BM, 1, W], dq_desc.layout)
        dq_descs = (dq_desc, dq_desc)
        dq_t = (dq_t.index(0), dq_t.index(1))
    else:
        dq_descs = (dq_desc, dq_rest_desc)
        dq_t = (pieces.allocate_staging(dq_desc), pieces.allocate_staging(dq_rest_desc))
    dq_s = (pieces.staging_matrix(dq_t[0]), pieces.staging_matrix(dq_t[1]))
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
    order = () if sums_ptr is None else (first_ptr, sums_ptr, q_tiles)
    gl.warp_specialize(
        [
            (_consumer, (0, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s, dq_s[0],
                         kv_full, q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s,
                         stride_h, scale_log2, dk_scale, dv_scale, inner if FIXED is None else FIXED, alibi, sweep,
                         BATCHED, FOLD, turns_ptr is not None, counters_ptr is not None, sums_ptr is not None)),
            (_consumer, (1, dk_ptr, dv_ptr, info_ptr, k_s, v_s, q_s, dout_s, lse_v, delta_v, bounds_v, ds_s, dq_s[1],
                         kv_full, q_full, dout_full, heads, tiles, kv_heads, parts, batches, stride_b, stride_s,
                         stride_h, scale_log2, dk_scale, dv_scale, inner if FIXED is None else FIXED, alibi, sweep,
                         BATCHED, FOLD, turns_ptr is not None, counters_ptr is not None, sums_ptr is not None)),
            (pieces.producer, (q_descs, dout_descs, k_descs, v_descs, lse_desc, delta_desc, bounds_desc, positions_desc,
                         info_ptr, k_t, v_t, q_t, dout_t, lse_t, delta_t, bounds_t, positions_t, kv_full, q_full,
                         dout_full, heads, tiles, kv_heads, parts, q_tiles,
                         flags_ptr, epoch, timed_out_ptr, Q_FREE, DO_FREE, sweep, BATCHED,
                         sums_ptr is not None)),
            (pieces.writer, (0, DQ_STAGED, DQ_SENT, BM, 0, W, dq_descs[0], info_ptr, dq_t[0], heads, tiles, kv_heads,
                         parts, turns_ptr, counters_ptr, segments, order, sweep, BATCHED)),
            (pieces.writer, (1, DQ_STAGED, DQ_SENT, BM, 0, W, dq_descs[1], info_ptr, dq_t[1], heads, tiles, kv_heads,
                         parts, turns_ptr, counters_ptr, segments, order, sweep, BATCHED)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip
