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
* Without a descriptor of dQ there are no writers, and of five products four: dk and dv alone, of ordered blocks.

Named barriers: 4 to 7 half of dS written (two per consumer, even and odd steps), 8, 9 Q read, 10, 11 dO read,
12, 13 dQ staged (once more when dk and dv are stored and to be counted), 14, 15 dQ sent.
Method: Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608).
What was tried: docs/lab.
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
from .backward_pieces import BM, BN, LOADERS, PAIR, S_L, STAGING
from .primitives import barrier_arrive, barrier_sync, buffer_of, multiply_pairs

DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = pieces.BARRIERS


@gluon.jit
def _ds_stage(i, STAGES: gl.constexpr):
    """Return the stage of dS of step i, of three or four."""
    return i & 3 if STAGES == 4 else i % STAGES


@gluon.jit
def _dq(C: gl.constexpr, i, k_s, ds_s):
    """Issue consumer C's columns of dQ of step i, half of them or piece C: both halves of dS times K, two asynchronous
    products."""
    stage = _ds_stage(i, ds_s.shape[0] // 2) * 2
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
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, last, s, dk, dv, tiles, score, keys, heads,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Walk query tiles. ``s`` is complete on entry, and on return that of the next step is; no wgmma crosses a step."""
    PIECES: gl.constexpr = len(tiles.k)  # of the columns; a product over them, or into them, is one product for each
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = tiles.k[0].dtype
    HAS_DQ: gl.constexpr = len(tiles.dq) > 0
    DS_STAGES: gl.constexpr = tiles.ds.shape[0] // 2 if HAS_DQ else 0
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage, phase = buffer_of(i, 2)
        mbarrier.wait(tiles.dout_full.index(stage), phase)
        minus_delta = tiles.delta.index(stage).load(gl.SliceLayout(0, S_L))
        dp = pieces.keys_times_queries(pieces.tile_at(tiles.v, C, i), tiles.dout, stage, minus_delta)
        if score.inner is None:
            s = pieces.scores_to_base_2(s, score, keys, tiles, stage, head, CUT)
            p = gl.exp2(s - tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p16 = gl.convert_layout(p.to(dtype), A_L)
        else:
            p16, slope16 = pieces.capped_probabilities(s, score, keys, tiles, stage, head, CUT, dtype)
            p16 = gl.convert_layout(p16, A_L)
        dv = pieces.accumulate(p16, tiles.dout, stage, dv)
        dp = warpgroup_mma_wait(PIECES, deps=[dp])
        ds = (p * dp).to(dtype) if score.inner is None else multiply_pairs(slope16, dp, dtype)
        if HAS_DQ:
            barrier_sync(DS_READY + 2 - 2 * C + ((i + 1) & 1), PAIR)  # the other half of the previous dS
            tiles.ds.index(_ds_stage(i, DS_STAGES) * 2 + C).store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        if HAS_DQ:
            fence_async_shared()
            barrier_arrive(DS_READY + 2 * C + (i & 1), PAIR)
            barrier_arrive(DQ_STAGED + C, STAGING)
            dq = _dq(C, i + DS_STAGES - 1, tiles.k, tiles.ds)
            dv, p16 = pieces.wait_sums(2, dv, p16)
            barrier_arrive(DO_FREE + stage, LOADERS)
        s = pieces.scores_of_step(gl.minimum(i + 1, last), pieces.tile_at(tiles.k, C, i), tiles)
        dk = pieces.accumulate(ds16, tiles.q, stage, dk)
        if HAS_DQ:
            dq = warpgroup_mma_wait(2 * PIECES, deps=[dq])
            pieces.stage(dq, tiles.dq[C], score.dk_scale, DQ_SENT + C)
        else:
            dv, p16 = pieces.wait_sums(2 * PIECES, dv, p16)
            barrier_arrive(DO_FREE + stage, LOADERS)
        if PIECES == 1:
            first_dk, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], ds16, s])
            dk = (first_dk,)
        else:
            first_dk, second_dk, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], dk[1], ds16, s])
            dk = (first_dk, second_dk)
        barrier_arrive(Q_FREE + stage, LOADERS)
        head, inside = pieces.next_head(keys.alibi, head, inside, steps_of_head, heads, ORDERED)
    return s, dk, dv


@gluon.jit
def _consumer(C: gl.constexpr, grid, tiles, score, gradients):
    SIGNALS: gl.constexpr = gradients.turns_ptr is not None or gradients.counters_ptr is not None
    ORDERED: gl.constexpr = grid.descending is not None
    at = pieces.place(grid)
    first = gl.load(at.info)
    past = gl.load(at.info + 1)
    steps, cut_steps, late_steps, _, _ = pieces.visits_of(at, grid)
    key = first + C * (BN // 2)
    dk = pieces.zero_sums(tiles.k)
    dv = pieces.zero_sums(tiles.v)
    keys = pieces.keys_of(score, tiles.positions, grid, at, first, past, key, S_L)
    HAS_DQ: gl.constexpr = len(tiles.dq) > 0
    if HAS_DQ:
        pieces.begin(C, tiles.ds, S_L)
    mbarrier.wait(tiles.kv_full.index(C), 0)
    mbarrier.wait(tiles.kv_full.index(1 - C), 0)
    s = pieces.scores_of_step(0, pieces.tile_at(tiles.k, C, 0), tiles)
    s = warpgroup_mma_wait(0, deps=[s])
    last = steps - 1
    s, dk, dv = _walk(C, True, 0, cut_steps, last, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    s, dk, dv = _walk(C, False, cut_steps, late_steps, last, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    if ORDERED:
        s, dk, dv = _walk(C, True, late_steps, steps, last, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    if HAS_DQ:  # that of the last step, after that of the step before
        fence_async_shared()
        barrier_arrive(DQ_STAGED + C, STAGING)
        barrier_sync(DS_READY + 2 - 2 * C + (last & 1), PAIR)
        dq = warpgroup_mma_wait(0, deps=[_dq(C, last, tiles.k, tiles.ds)])
        pieces.send(dq, tiles.dq[C], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
    if SIGNALS:
        barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
    head = pieces.head_of_gradients(gradients, at)
    buffer = pieces.tile_at(tiles.v, C, 0)  # this consumer's half, which the other one does not read
    pieces.store_sums(gradients.dv, dv, score.dv_scale, buffer, head, gradients, grid, at, keys)
    pieces.store_sums(gradients.dk, dk, score.dk_scale, buffer, head, gradients, grid, at, keys)
    if SIGNALS:
        barrier_sync(DQ_STAGED + C, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def start(grid, descs, score, gradients, arrival, order, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps."""
    HAS_DQ: gl.constexpr = len(descs.dq) > 0
    # Of the stages of dS three are needed; positions take the place of the fourth.
    DS_TILES: gl.constexpr = 0 if not HAS_DQ else 8 if len(descs.positions) == 0 else 6
    boxes = pieces.allocate(descs, descs.dq, DS_TILES)
    tiles = pieces.matrices(boxes, [pieces.staging_matrix(x) for x in boxes.dq])
    pieces.initialize(tiles)
    if HAS_DQ:  # consumer 0 and its writer have the first half or the first piece of dQ's columns
        W: gl.constexpr = descs.dq[0].block_type.shape[3]
        gl.warp_specialize(
            [
                (_consumer, (0, grid, tiles, score, gradients)),
                (_consumer, (1, grid, tiles, score, gradients)),
                (pieces.producer, (grid, descs, boxes, arrival)),
                (
                    pieces.writer,
                    (0, DQ_STAGED, DQ_SENT, BM, 0, W, descs.dq[0], boxes.dq[0], grid, gradients, order, ()),
                ),
                (
                    pieces.writer,
                    (1, DQ_STAGED, DQ_SENT, BM, 0, W, descs.dq[1], boxes.dq[1], grid, gradients, order, ()),
                ),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, grid, tiles, score, gradients)),
                (_consumer, (1, grid, tiles, score, gradients)),
                (pieces.producer, (grid, descs, boxes, arrival)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
