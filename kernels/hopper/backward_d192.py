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
from .backward_pieces import BM, BN, LOADERS, PAIR, S_L, STAGING
from .primitives import (
    barrier_arrive,
    barrier_sync,
    multiply_pairs,
    reinterpret,
    round_pairs,
    tma_reduce_add,
)

DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = pieces.BARRIERS


@gluon.jit
def _writer(C: gl.constexpr, descs, dq_s, grid, gradients):
    """Send the dQ of each step one step later, for consumer C: in the first step there is nothing to send yet."""
    FIRST: gl.constexpr = 2 * descs[0].block_type.shape[3]
    at = pieces.place(grid)
    steps, cut_steps, j, stops = pieces.visit_order(at.info, grid.heads)
    head = (at.kv_head * grid.parts + at.part) * grid.heads
    barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for _ in range(0, 2):
        barrier_sync(DQ_STAGED + C, STAGING, warps=1)
        barrier_arrive(DQ_SENT + C, STAGING, warps=1)
    for i in range(0, steps):
        for unit in gl.static_range(2):
            barrier_sync(DQ_STAGED + C, STAGING, warps=1)
            column = unit * FIRST + C * descs[unit].block_type.shape[3]
            tma_reduce_add(descs[unit], [at.batch, j * BM, head, column], dq_s[unit])
            tma.store_wait(0)
            pieces.signal_sent(DQ_SENT + C, (i == steps - 1) & (unit == 1), gradients, grid, at)
        j, head = pieces.next_tile(i, j, head, cut_steps, grid.heads, stops)
    pieces.finish_writer(DQ_STAGED + C, gradients, grid, at)


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
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, last, s, dk, dv, tiles, score, keys, heads,
):  # fmt: skip
    """Walk the query tiles. ``s`` is complete on entry, and on return that of the next step is; no wgmma crosses a
    step."""
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = tiles.k[0].dtype
    DO_STAGES: gl.constexpr = tiles.dout[0].shape[0]
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i & 1
        if score.inner is None:
            s = pieces.scores_to_base_2(s, score, keys, tiles, stage, head, CUT)
            p = gl.exp2(s - tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p16 = gl.convert_layout(round_pairs(p, dtype), A_L)
        else:
            p16, slope16 = pieces.capped_probabilities(
                s, score, keys, tiles, stage, head, CUT, dtype, SHORT=False
            )  # fmt: skip
            p16 = gl.convert_layout(p16, A_L)
        do_stage = stage if DO_STAGES == 2 else i >> 30
        mbarrier.wait(tiles.dout_full.index(do_stage), (i >> 1) & 1 if DO_STAGES == 2 else stage)
        if score.inner is None:
            minus_delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_L))
            dp = pieces.keys_times_queries(pieces.tile_at(tiles.v, C, i), tiles.dout, do_stage, minus_delta)
            dv = pieces.accumulate(p16, tiles.dout, do_stage, dv)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = multiply_pairs(gl.convert_layout(p16, S_L), dp, dtype)
        else:  # P with and without the factor of dS, and dP at the same time, would be too many registers
            dv = pieces.accumulate(p16, tiles.dout, do_stage, dv)
            dv, p16 = pieces.wait_sums(0, dv, p16)
            minus_delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_L))
            dp = pieces.keys_times_queries(pieces.tile_at(tiles.v, C, i), tiles.dout, do_stage, minus_delta)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = multiply_pairs(slope16, dp, dtype)
        barrier_sync(DS_READY + 2 - 2 * C + ((i + 1) & 1), PAIR)  # there is the other half of the previous dS
        tiles.ds.index(stage * 2 + C).store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        if score.inner is None:
            dv, p16 = pieces.wait_sums(0, dv, p16)
        barrier_arrive(DO_FREE + do_stage, LOADERS)
        dk = pieces.accumulate(ds16, tiles.q, stage, dk)
        dk, ds16 = pieces.wait_sums(0, dk, ds16)
        first_dq = _dq(C, 0, i + 1, i, tiles.k, tiles.ds)
        barrier_arrive(Q_FREE + stage, LOADERS)
        first_dq = warpgroup_mma_wait(0, deps=[first_dq])
        pieces.send(first_dq, tiles.dq[C][0], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
        second_dq = _dq(C, 1, i + 1, i, tiles.k, tiles.ds)
        s = pieces.scores_of_step(gl.minimum(i + 1, last), pieces.tile_at(tiles.k, C, i), tiles)
        second_dq = warpgroup_mma_wait(2, deps=[second_dq])
        barrier_arrive(DS_READY + 2 * C + (i & 1), PAIR)
        pieces.send(second_dq, tiles.dq[C][1], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
        s = warpgroup_mma_wait(0, deps=[s])
        head, inside = pieces.next_head(keys.alibi, head, inside, steps_of_head, heads)
    return s, dk, dv


@gluon.jit
def _consumer(C: gl.constexpr, grid, tiles, score, gradients):
    at = pieces.place(grid)
    first = gl.load(at.info)
    past = gl.load(at.info + 1)
    steps, cut_steps, _, _ = pieces.visit_order(at.info, grid.heads)
    key = first + C * (BN // 2)
    head = pieces.head_of_gradients(gradients, at)
    dk = pieces.zero_sums(tiles.k)
    dv = pieces.zero_sums(tiles.v)
    keys = pieces.keys_of(score, tiles.positions, grid, at, first, past, key, S_L)
    pieces.begin(C, tiles.ds, S_L)
    mbarrier.wait(tiles.kv_full.index(C), 0)
    mbarrier.wait(tiles.kv_full.index(1 - C), 0)
    s = pieces.scores_of_step(0, pieces.tile_at(tiles.k, C, 0), tiles)
    s = warpgroup_mma_wait(0, deps=[s])
    last = steps - 1
    s, dk, dv = _walk(C, True, 0, cut_steps, last, s, dk, dv, tiles, score, keys, grid.heads)
    s, dk, dv = _walk(C, False, cut_steps, steps, last, s, dk, dv, tiles, score, keys, grid.heads)
    barrier_sync(DS_READY + 2 - 2 * C + (last & 1), PAIR)
    for unit in gl.static_range(2):  # of the last step
        dq = warpgroup_mma_wait(0, deps=[_dq(C, unit, last, 0, tiles.k, tiles.ds)])
        pieces.send(dq, tiles.dq[C][unit], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
    barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
    buffer = tiles.v[0].index(C)  # this consumer's half, which the other one does not read
    pieces.store_sums(gradients.dv, dv, score.dv_scale, (buffer,), head, gradients, grid, at, keys)
    pieces.store_sums(gradients.dk, dk, score.dk_scale, (buffer, buffer), head, gradients, grid, at, keys)
    if gradients.turns_ptr is not None or gradients.counters_ptr is not None:
        barrier_sync(DQ_STAGED + C, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def _both(staging, desc):
    """Return the memory that columns of the first piece of dQ are staged in, and the same for those of the second."""
    return staging, reinterpret(staging, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def _staging_matrices(dq_s):
    return pieces.staging_matrix(dq_s[0]), pieces.staging_matrix(dq_s[1])


@gluon.jit
def start(grid, descs, score, gradients, arrival, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps."""
    # Positions take the place of one tile of dO.
    boxes = pieces.allocate(descs, (descs.dq[0], descs.dq[0]), 4, 2 if len(descs.positions) == 0 else 1)
    dq_s = [_both(x, descs.dq[1]) for x in boxes.dq]
    tiles = pieces.matrices(boxes, [_staging_matrices(x) for x in dq_s])
    pieces.initialize(tiles)
    gl.warp_specialize(
        [
            (_consumer, (0, grid, tiles, score, gradients)),
            (_consumer, (1, grid, tiles, score, gradients)),
            (pieces.producer, (grid, descs, boxes, arrival)),
            (_writer, (0, descs.dq, dq_s[0], grid, gradients)),
            (_writer, (1, descs.dq, dq_s[1], grid, gradients)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )
