"""The backward kernel for Hopper (sm_90), in Gluon. Contract and shapes: contract.py.

``lse`` and ``delta`` are global, so chunks need no merging. A CTA owns a tile of 128 keys of one key head and walks the
tiles of 64 queries that see it, for every query head of the group. dk and dv stay in registers and are stored once::

    consumers 0, 1  64 keys each, scores transposed (keys are rows), one query tile a step:
                    dP^T = V dO^T - delta  during  P = exp2(S^T c - lse) ; dV += P dO ; dS = P dP^T, to shared memory
                    dQ of the step before (its dS is complete) ; S^T of the step after ; dK += dS Q ; then dQ
                    to shared memory
    producer        one warp: K, V, then Q, lse (and start, end of cut tiles), dO, delta of every step by TMA
    writers 0, 1    one warp each: add the staged half of dQ to global memory, float32, by TMA

* P and dS feed dV and dK from registers. dQ = dS K needs all 128 keys: a consumer computes half of its columns and
  reads the other consumer's dS, for which it waits only a whole step later: the two may drift half a step apart.
* The last fence of a step serves the dS of the step and the dQ of the step before, which a writer then sends.
* P carries the factor ``softmax_scale`` (bfloat16: the exponent has room), folded into ``lse``: dS, dQ and dK then
  need no factor, and dV is divided once. float16 multiplies dQ and dK instead.
* Tiles have powers of two of columns. Head dim 96 is two tiles side by side, 64 + 32, as are dk and dv; consumer 0
  computes the first 64 columns of dQ and consumer 1 the last 32 (the two share the tensor cores).
* Head dims 64, 192 (128 of v) and 256 have kernels of their own, backward_tall.py, backward_lean.py and
  backward_pair.py (where clusters cannot be launched backward_wide.py); all are launched from here.
* CTAs walk the full tiles from staggered starts: they do not add to the same tile of dQ at the same time.
* The query heads of a group are divided between CTAs (``work.split_groups``). They add to the same dk and dv, each
  after the part before it, which counts in ``turns`` that it has stored. This cannot deadlock: CTAs start in the order
  of their numbers, as stream-K products rely on too (Osama et al. 2023, arXiv:2301.03598).
* The order of the CTAs is the order in which gradients complete: ``work.sweep`` parts at a time, and within them the
  tiles with most queries first, all parts of a tile together. Under a causal mask those are the earliest positions, so
  that whole segments (the runs of one owner) complete one after the other for all heads of the sweep, each about when
  the next one starts; :func:`completion_counts` counts them. Under a dense mask tiles are in the order of the keys.
* A key tile meets the query tiles that a mask cuts first, for all heads, and then the full ones: two loops without a
  branch, one with a mask.
* dP's sum starts at -delta, so that dS is P times it.
* The addresses of tiles that stay in shared memory for the whole loop are computed again in each step
  (``pieces.tile_at``); otherwise the second consumer would reload descriptors from the stack.
* dQ is staged without bank conflicts: odd rows exchange columns 16 apart (``pieces.stage_dq``).

The order of the additions to dQ is not fixed: dk and dv have the same bits on every run, dq differs by rounding. With
``sums_ptr`` (a deterministic backward) it is: key tiles add to a tile of dQ in the order of the keys, by a counter for
each half of it (``pieces.wait_for_turn``), as FlashAttention does. CTAs then take key tiles in that order, and all walk
the queries from the last to the first, each tile for all query heads in turn: a CTA is a step late at first and then
finds each tile ready. The cut tiles of a walk that end it come last, in a third loop.

Named barriers: 4 to 7 half of dS written (two per consumer, even and odd steps), 8, 9 Q read, 10, 11 dO read,
12, 13 dQ staged (once more when dk and dv are stored and to be counted), 14, 15 dQ sent.
Method: Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608).
What was tried: NOTES.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..contract import Block, CompletionCounts, Keys, Queries, Score, int32
from ..launch import Launches, capability, dispatch, on_device
from ..long_sums import LEAST_HEADS
from . import backward_lean as lean
from . import backward_pair as pair
from . import backward_pieces as pieces
from . import backward_tall as tall
from . import backward_wide as wide
from . import scores, work
from .backward_pieces import BM, BN, LOADERS, PAIR, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    multiply_pairs,
    reinterpret,
    tma_reduce_add,
)
from .tensor_maps import readable, view
from .work import Split

__all__ = ["HEAD_DIMS", "IN_ORDER", "PORTABLE", "backward", "completion_counts", "unsupported"]

PORTABLE = ((512, 512),)  # head dims whose backward runs on the portable kernels
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # of q, k and of v
IN_ORDER = (64, 96, 128)  # head dims of q whose dq may be added in a fixed order

DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = (gl.constexpr(i) for i in (4, 8, 10, 12, 14))


# ---------------------------------------------------------------- device


@gluon.jit
def _writer(
    C: gl.constexpr, dq_desc, dq_first: gl.constexpr, info_ptr, dq_s, heads, tiles, kv_heads, parts, turns_ptr,
    counters_ptr, segments, order, sweep, BATCHED: gl.constexpr,
):  # fmt: skip
    """Send the dQ of each step two steps later, for consumer C: the first two times there is nothing to send yet."""
    batch, kv_head, part, info = pieces.place(info_ptr, heads, tiles, kv_heads, parts, sweep, BATCHED)
    ORDERED: gl.constexpr = len(order) > 0
    if ORDERED:
        steps, _, _ = pieces.ordered_visits(info, heads)
        j = gl.load(info + 3) - 1
        rank = gl.load(info + 6)
        rows = batch * (kv_heads * parts * heads)
        bounds_row = 0
        if BATCHED:
            bounds_row = batch * order[2]
    else:
        steps, cut_steps, j, stops = pieces.visit_order(info, heads)
    first_head = (kv_head * parts + part) * heads
    head = first_head
    for _ in range(0, 2):
        barrier_sync(DQ_STAGED + C, STAGING, warps=1)
        barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for i in range(0, steps):
        if ORDERED:
            counter = pieces.wait_for_turn(order, rows + head, bounds_row, j, rank, C)
        barrier_sync(DQ_STAGED + C, STAGING, warps=1)
        tma_reduce_add(dq_desc, [batch, j * BM, head, C * dq_first], dq_s)
        tma.store_wait(0)
        pieces.signal_sent(DQ_SENT + C, i == steps - 1, turns_ptr, tiles, part, parts, sweep)
        if ORDERED:
            pieces.end_turn(counter, rank)
            j, head = pieces.ordered_next(j, head, first_head, heads)
        else:
            j, head = pieces.next_tile(i, j, head, cut_steps, heads, stops)
    pieces.finish_writer(DQ_STAGED + C, turns_ptr, counters_ptr, info, tiles, part, parts, segments, sweep)


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
    batch, kv_head, part, info = pieces.place(info_ptr, heads, tiles, kv_heads, parts, sweep, BATCHED)
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
def _kernel(
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
            (_writer, (0, dq_descs[0], W, info_ptr, dq_t[0], heads, tiles, kv_heads, parts, turns_ptr, counters_ptr,
                        segments, order, sweep, BATCHED)),
            (_writer, (1, dq_descs[1], W, info_ptr, dq_t[1], heads, tiles, kv_heads, parts, turns_ptr, counters_ptr,
                        segments, order, sweep, BATCHED)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["seq_q", "q_tiles"])
def _row_statistics(lse_ptr, delta_ptr, lse_out, delta_out, seq_q, q_tiles, shift, ROWS: tl.constexpr):
    """Store lse in base 2 minus ``shift``, and -delta, padded to whole tiles. A row that sees nothing, or is padding,
    gets lse = +inf, so that its p is 0."""
    tile = tl.program_id(0)
    head = (tile // q_tiles).to(tl.int64)
    row = tile % q_tiles * ROWS + tl.arange(0, ROWS)
    inside = row < seq_q
    lse = tl.load(lse_ptr + head * seq_q + row, mask=inside, other=float("-inf"))
    delta = tl.load(delta_ptr + head * seq_q + row, mask=inside, other=0.0)
    at = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(lse_out + at, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634 - shift))
    tl.store(delta_out + at, -delta)


# ---------------------------------------------------------------- host


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    if not q.is_cuda or capability(q.device)[0] != 9:
        return "it needs a Hopper GPU (sm_90); use 'triton'"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"dtype {q.dtype} is not bfloat16 or float16; use 'triton'"
    dims = (q.shape[-1], v.shape[-1])
    if dims not in HEAD_DIMS + PORTABLE:
        return f"head dims {dims[0]} of q, k and {dims[1]} of v; it has {HEAD_DIMS + PORTABLE}; use 'triton'"
    return None


def backward(
    queries: Queries, keys: Keys, score: Score, dq: Tensor, into: tuple[Tensor, Tensor] | None,
    counters: Tensor | None, deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk and dv of one chunk of keys and add to dq, see :meth:`..backends.Backend.backward`. The order in which
    dq is added differs from run to run unless ``deterministic``, which head dims of :data:`IN_ORDER` have."""
    q = queries.q
    split = work.split_groups(q, keys.k, keys.block)
    direct = into if into is not None and not split.apart and _can_store_into(*into) else None
    if counters is not None and (split.apart or direct is not into):
        raise ValueError(
            "counters need gradients that the kernel stores itself: completion_counts(), float32, equal strides"
        )
    target = dq if readable(dq) else torch.zeros_like(dq, memory_format=torch.contiguous_format)
    with on_device(q):
        dk, dv = launch(queries, keys, score, target, split, direct, counters, deterministic)
    if target is not dq:
        dq += target
    if direct is not None:
        return direct
    dk, dv = (dk.sum(0), dv.sum(0)) if split.apart else (dk[0], dv[0])
    return (dk, dv) if into is None else (into[0].copy_(dk), into[1].copy_(dv))


def completion_counts(q: Tensor, keys: Keys) -> CompletionCounts | None:
    """Return the counts of finished rows that the kernel signals.

    None if each part of a group has its own dk and dv, which are summed after the kernel, or if k or v must be copied
    before the kernel reads it."""
    k, v, block, _ = keys
    split = work.split_groups(q, k, block)
    if split.apart or not (readable(k) and readable(v)):
        return None

    def count() -> CompletionCounts:
        tiles, ctas = work.tiles_of_groups(block, work.keys_per_tile(q)), work.ctas_per_tile(q)
        swept = work.sweep(k.shape[0] * k.shape[2], sum(tiles), work.processors(q) // ctas, split.parts)
        rows = max(1, swept // split.parts)
        # Both consumers of the last part's CTAs count.
        return CompletionCounts(rows, tuple(2 * ctas * rows * n for n in tiles), block.groups_k)

    return block.memo.once(("completion counts", split, q.shape, k.shape), count)


class _Operands(NamedTuple):
    """The tensors of a launch that change from call to call. The first four are readable by TMA."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # in base 2, padded to whole tiles of queries, as is minus_delta
    minus_delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    flags: Tensor | None
    timed_out: Tensor | None
    turns: Tensor | None
    counters: Tensor | None
    slopes: Tensor | None
    sums: Tensor | None  # how often each half of each tile of dq has been added to, where that is counted


def launch(
    queries: Queries, keys: Keys, score: Score, dq: Tensor, split: Split,
    into: tuple[Tensor, Tensor] | None = None, counters: Tensor | None = None, deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernels and return dk and dv, (parts or 1, batch, seq_k, kv_heads, head_dim): one of each per part of
    a group if the parts are apart; or ``into``, unchanged in shape."""
    k, v, block, ready = keys
    if ready is not None and not (readable(k) and readable(v)):
        raise ValueError("keys and values that are still arriving cannot be copied first: 16-byte strides are needed")
    # Not contiguous(), which returns a tensor that begins at an unaligned address as it is.
    inputs = (queries.q, k, v, queries.dout)
    q, k, v, dout = (x if readable(x) else x.clone(memory_format=torch.contiguous_format) for x in inputs)
    dk, dv = into or _empty_gradients(k, v, split)
    flags, timed_out, epoch = (None, None, 0) if ready is None else (ready.flags, ready.timed_out, int32(ready.epoch))
    turns = None
    if split.parts > 1 and not split.apart:
        tiles = _tables(q, block, deterministic)[0].shape[1]
        turns = torch.zeros(q.shape[0] * k.shape[2], tiles, dtype=torch.int32, device=q.device)
    launches = block.memo.once("hopper backward", Launches)
    statistics = _padded_statistics(queries, score, launches)
    changes = scores.Changes.of(score, q)
    sums = None
    if deterministic:
        sums = torch.zeros(*statistics[0].shape[:1], 2, dtype=torch.int32, device=q.device)
    operands = _Operands(
        q, k, v, dout, *statistics, dq, dk, dv, flags, timed_out, turns, counters, changes.slopes, sums
    )  # fmt: skip
    key = (
        split, score.softmax_scale, score.softcap, changes.slopes_stride, changes.slopes is None, q.dtype, q.shape,
        q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.dtype, dout.stride(), dq.stride(), dk.stride(),
        flags is None, None if counters is None else counters.shape[1], deterministic,
    )  # fmt: skip
    tensors = [x for x in operands if x is not None]
    if not launches.again(key, tensors, epoch):
        kernel, grid, args, constants = _arguments(operands, block, score, changes, split, epoch)
        launched = dispatch(kernel, grid, *args, variants=lambda: _variants(operands), **constants)
        fixed = _tables(q, block, deterministic)
        if changes.slopes is not None:
            fixed += _positions(q, block)
        launches.remember(key, tensors, launched, fixed, None if flags is None else kernel.arg_names.index("epoch"))
    return dk, dv


def _padded_statistics(queries: Queries, score: Score, launches: Launches) -> tuple[Tensor, Tensor]:
    """Return lse in base 2 and -delta, (batch * q_heads * tiles, queries) float32, see :func:`_row_statistics`."""
    q, lse, delta = queries.q, queries.lse.contiguous(), queries.delta.contiguous()
    batch, seq_q, q_heads, _ = q.shape
    height = work.queries_per_step(q)
    q_tiles = -(-seq_q // height)
    fold = _folded_scale(q, score)
    shift = math.log2(fold) if fold else 0.0
    rows = batch * q_heads * q_tiles
    padded, negated = torch.empty(2, rows, height, dtype=torch.float32, device=q.device).unbind()
    key, tensors = ("statistics", q.shape, shift), [lse, delta, padded, negated]
    if not launches.again(key, tensors):
        launched = dispatch(_row_statistics, (rows,), *tensors, seq_q, q_tiles, shift, ROWS=height, num_warps=2)
        launches.remember(key, tensors, launched)
    return padded, negated


def _empty_gradients(k: Tensor, v: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """Return uninitialized dk and dv of equal strides, (parts or 1, batch, seq_k, kv_heads, head_dim or head_dim_v)."""
    shape = (split.parts if split.apart else 1, *k.shape[:3])
    dim, dim_v = k.shape[-1], v.shape[-1]
    if dim == dim_v:
        dk, dv = torch.empty(2, *shape, dim, dtype=torch.float32, device=k.device)
        return dk, dv
    dk, dv = torch.empty(*shape, dim + dim_v, dtype=torch.float32, device=k.device).split((dim, dim_v), -1)
    return dk, dv


def _arguments(
    x: _Operands, block: Block, score: Score, changes: scores.Changes, split: Split, epoch: int
) -> tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the kernel, its grid, arguments and constants."""
    q, k, v, dout, dq, dk = x.q, x.k, x.v, x.dout, x.dq, x.dk
    batch, seq_q, q_heads, dim = q.shape
    kv_heads, dim_v = v.shape[2:]
    info, bounds, *first = _tables(q, block, x.sums is not None)
    rows, ctas = work.queries_per_step(q), work.ctas_per_tile(q)
    tiles, parts, scale, fold = info.shape[1], split.parts, score.softmax_scale, _folded_scale(q, score)
    fixed = _fixed(q, score)
    sweep = work.sweep if x.sums is None else work.sweep_in_order
    alibi: tuple[Any, ...] = (None, None, None, None)
    if x.slopes is not None:
        of_queries, of_keys = _positions(q, block)
        alibi = view(of_queries, (1, rows)), x.slopes, changes.slopes_stride, of_keys
    numbers = (
        dk, x.dv, info, q_heads // kv_heads // parts, tiles, kv_heads, parts, batch, *dk.stride()[-4:-1],
        -(-seq_q // rows), changes.scale, scale, 1 / fold if fold else 1.0,
        x.flags, epoch, x.timed_out, x.turns, x.counters, 0 if x.counters is None else x.counters.shape[1],
        sweep(batch * kv_heads, tiles, work.processors(q) // ctas, parts),
        None if fixed else changes.inner, *alibi,
    )  # fmt: skip
    order = (*first, x.sums) if first else (None, None)
    constants = dict(BATCHED=info.shape[0] > 1, FOLD=fold > 0.0, REGISTERS=240, num_warps=4)
    statistics = view(x.lse, (1, rows)), view(x.minus_delta, (1, rows)), view(bounds, (1, 2 * rows))

    def box(tensor: Tensor, columns: int, height: int = BM.value) -> TensorDescriptor | None:
        return view(tensor, (1, height, 1, columns)) if columns else None

    grid = (batch * kv_heads * parts * tiles,)
    if dim == 64:
        boxes = (box(q, dim, rows), box(dout, dim, rows), box(k, dim), box(v, dim), *statistics, box(dq, dim))
        return tall.kernel, grid, (*boxes, *numbers, *order), dict(FIXED=fixed, **constants)
    if dim == 192:
        boxes = (
            *(box(t, 128) for t in (q, dout, k, v)), *statistics, box(dq, 64), box(q, 64), box(k, 64), box(dq, 32)
        )  # fmt: skip
        return lean.kernel, grid, (*boxes, *numbers), constants
    if dim > 128 and ctas > 1:
        boxes = (*(box(t, pair.HALF.value) for t in (q, dout, k, v)), *statistics, box(dq, pair.UNIT.value))
        return pair.kernel, grid, (*boxes, *numbers), dict(cluster=ctas, FIXED=fixed, **constants)
    if dim > 128:
        boxes = (
            *(box(t, 128) for t in (q, dout, k, v)), *statistics, box(dq, wide.UNIT.value),
            box(q, dim - 128), box(k, dim - 128), box(dout, dim_v - 128), box(v, dim_v - 128),
        )  # fmt: skip
        return wide.kernel, grid, (*boxes, *numbers), dict(
            DO_STAGES=2 if dim + dim_v <= 320 else 1, FIXED=fixed, **constants
        )  # fmt: skip
    whole = 2 ** (dim.bit_length() - 1)  # columns of the first piece of a tile, a power of two
    rest = dim - whole  # of the second piece: a power of two, or 0
    boxes = (
        *(box(t, whole) for t in (q, dout, k, v)), *statistics, box(dq, whole if rest else dim // 2),
        *(box(t, rest) for t in (q, dout, k, v)), box(dq, rest),
    )  # fmt: skip
    return _kernel, grid, (*boxes, *numbers, *order), dict(FIXED=fixed, **constants)


def _variants(x: _Operands) -> list[dict[str, Any]]:
    """Return how a launch may differ with other documents, which decide how groups of query heads are divided: in parts
    that take turns, or, where there are few key tiles, in parts that are apart and not counted."""
    group = x.q.shape[2] // x.k.shape[2]
    some = x.q.new_empty(4, dtype=torch.int32)
    variants: list[dict[str, Any]] = []
    for heads in (n for n in range(1, group + 1) if group % n == 0):
        parts = dict(parts=group // heads, heads=heads)
        if heads == group:
            variants.append(dict(parts, turns_ptr=None))
        elif heads >= LEAST_HEADS:
            variants.append(dict(parts, turns_ptr=some))
        # Queries see themselves, so there are at least as many keys.
        if heads < group and work.few_tiles(x.q, x.k, x.q.shape[1]):
            variants.append(dict(parts, turns_ptr=None, flags_ptr=None, timed_out_ptr=None, counters_ptr=None))
    return variants


def _tables(q: Tensor, block: Block, ordered: bool) -> tuple[Tensor, ...]:
    table = work.ordered_key_tile_table if ordered else work.key_tile_table
    return table(block, work.keys_per_tile(q), work.queries_per_step(q), q.device)


def _positions(q: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and keys, padded to whole tiles and one more."""
    return scores.padded_positions(block, work.queries_per_step(q), work.keys_per_tile(q), q.device)


def _fixed(q: Tensor, score: Score) -> tuple[float, float] | None:
    """Return :attr:`scores.Changes.fixed` if P can carry a factor; at 192/128 registers do not suffice."""
    can = q.dtype == torch.bfloat16 and score.softmax_scale > 0.0 and q.shape[-1] != 192
    return scores.Changes.of(score, q).fixed if can else None


def _folded_scale(q: Tensor, score: Score) -> float:
    """Return the factor that P carries, so that dS needs none, or 0: the exponent of bfloat16 has room for it. It is
    ``softmax_scale`` over what the derivative of the softcap is times (:func:`scores.square_of_scale`)."""
    if q.dtype != torch.bfloat16 or score.softmax_scale <= 0.0:
        return 0.0
    fixed = _fixed(q, score)
    return score.softmax_scale / (fixed[0] ** 2 if fixed else 1.0)


def _can_store_into(dk: Tensor, dv: Tensor) -> bool:
    """Return whether the kernel can store into these tensors: it has one set of strides for both."""
    return dk.stride() == dv.stride() and dk.stride(-1) == 1 and dk.dtype == dv.dtype == torch.float32
