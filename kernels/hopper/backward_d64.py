"""The backward of the block kernel for Hopper (sm_90) at head dim 64, in Gluon. Launched by backward.py, in the
same order of the programs and of their query tiles, with tables for its taller tiles.

A consumer has 64 keys, as in backward_d128.py, but a step has 128 queries: half as many fences, barriers and waits per
product, which limit the speed at a head dim of 64. One query tile a step::

    consumers 0, 1  dP^T = V dO^T  under  P = exp2(S^T c - lse), in 16 bits ; dV += P dO ; dS = P (dP^T - delta), to
                    shared memory ; dQ of the step before ; dK += dS Q ; S^T of the step after ; then dQ to shared
                    memory
    producer        one warp: K, which queries see each key, V, then dO, delta, Q, lse of every step by TMA
    writers 0, 1    one warp each: add the staged half of dQ to global memory, float32, by TMA

* K and V are read from shared memory: with 128 queries a product of 64 keys has enough to do for that, and there are no
  registers for them.
* P stays in 16 bits, two to a register, and dS is made of it, with one more rounding than at head dim 128.
* Consumer 0 makes dQ of the first 64 queries and consumer 1 of the others, both from all 128 keys.
* A cut tile is hidden by key: intervals do not decrease, so that a key is seen by an interval of queries, too. Keys are
  the rows of S^T, and ``primitives.hide_columns`` hides the columns of a row by two numbers, as in the forward; by
  queries each element would be compared with two. The two numbers of each key come with K, and the first query of a
  cut step is stored by the producer. At other head dims, where masks are by query, nothing is faster by key (docs/lab).
* There are two buffers of dS. So a consumer signals that its half is written only after it has also read the dS of the
  step before, which the other one overwrites next.

With queries that see few keys, the beginning and the end of a program take longer than its steps. So a CTA takes one
program after the other (backward_programs.py), and its steps are counted through all of them::

    producer        K of the next program, in the other of two buffers, while this one has its last steps; the number
                    of the next program when these have been loaded, or before, if there are few
    consumers       dQ of the last step ; the first S^T of the next program, while dv and dk are stored, which is
                    while dQ of the step before is sent
    writers         the last dQ during the first step of the next program

A consumer signals its dS once more between two programs, as if there were a step: else it might arrive at a barrier
twice. Where dQ is added in order, a CTA has one program: key tiles take turns in the order in which programs start, and
the next one would wait with all its queries loaded (docs/lab).

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
from .backward_pieces import LOADERS, PAIR, STAGING
from .backward_programs import announce, announced, first_program, take
from .primitives import barrier_arrive, barrier_sync, multiply_pairs, round_pairs, wait_for_launch_before

ROWS = gl.constexpr(128)  # queries of a step
HALF = gl.constexpr(64)  # a consumer's keys, and the queries whose dQ it makes
ENOUGH_STEPS = gl.constexpr(3)  # of a program, to take the next one in
LAST_WAVES = gl.constexpr(4)  # programs for each CTA that are taken as late as possible
DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = pieces.BARRIERS
S_L = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS.value, 16]))


@gluon.jit
def _scores(i, k, tiles):
    """Issue S^T of step i, whose queries are there, unscaled: (64 keys, 128 queries), asynchronous."""
    s = gl.zeros([HALF, ROWS], gl.float32, S_L)
    return warpgroup_mma(k[0], tiles.q[0].index(i & 1).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _dq(C: gl.constexpr, step, n, i, k_s, ds_s):
    """Issue half C of the queries of dQ of ``step``, of program n: an asynchronous product for each half of the keys.
    ``i`` is the current step, see ``pieces.tile_at``."""
    stage = (step & 1) * 2
    late = i >> 30
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros([HALF, 64], gl.float32, L)
    own = ds_s.index(stage + C).slice(C * HALF, HALF, dim=1).permute((1, 0))
    other = ds_s.index(stage + 1 - C).slice(C * HALF, HALF, dim=1).permute((1, 0))
    dq = warpgroup_mma(own, k_s[0].index(_keys_at(C, n) + late), dq, use_acc=False, is_async=True)
    return warpgroup_mma(other, k_s[0].index(_keys_at(1 - C, n) + late), dq, is_async=True)


@gluon.jit
def _walk(
    C: gl.constexpr, CUT: gl.constexpr, first, past_step, begin, last, n, s, dk, dv, tiles, score, keys, heads,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Walk query tiles of program n of this CTA. ``s`` is complete on entry, and on return that of the next step is; no
    wgmma crosses a step.

    Args:
        first, past_step: the steps. last: the last one of the program.
        begin: the first step of the program, which does not signal DQ_STAGED, because nothing has been staged; -1: each
            step signals.
        ORDERED: cut tiles of a walk that ends it, and an order of heads, see ``pieces.ordered_visits``."""
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    dtype: gl.constexpr = tiles.k[0].dtype
    steps_of_head = (past_step - first) // heads
    head, inside = 0, 0
    for i in range(first, past_step):
        stage = i & 1
        mbarrier.wait(tiles.dout_full.index(stage), (i >> 1) & 1)
        dp = gl.zeros([HALF, ROWS], gl.float32, S_L)
        own = pieces.tile_at(tiles.v, C, i)[0]
        dp = warpgroup_mma(own, tiles.dout[0].index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
        if score.inner is None:
            s = pieces.scores_to_base_2(s, score, keys, tiles, stage, head, CUT)
            p = gl.exp2(s - tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p16 = gl.convert_layout(round_pairs(p, dtype), A_L)
        else:
            p16, slope16 = pieces.capped_probabilities(s, score, keys, tiles, stage, head, CUT, dtype, False)
            p16 = gl.convert_layout(p16, A_L)
        dv = pieces.accumulate(p16, tiles.dout, stage, dv)
        dp = warpgroup_mma_wait(1, deps=[dp])
        dp += tiles.delta.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
        ds = multiply_pairs(gl.convert_layout(p16, S_L) if score.inner is None else slope16, dp, dtype)
        barrier_sync(DS_READY + 2 - 2 * C + ((i + n + 1) & 1), PAIR)  # there is the other half of the previous dS
        tiles.ds.index(stage * 2 + C).store(ds)
        ds16 = gl.convert_layout(ds, A_L)
        fence_async_shared()
        if i > begin:
            barrier_arrive(DQ_STAGED + C, STAGING)
        dq = _dq(C, i + 1, n, i, tiles.k, tiles.ds)
        dv, p16 = pieces.wait_sums(2, dv, p16)
        barrier_arrive(DO_FREE + stage, LOADERS)
        dk = pieces.accumulate(ds16, tiles.q, stage, dk)
        following = gl.minimum(i + 1, last)
        mbarrier.wait(tiles.q_full.index(following & 1), (following >> 1) & 1)
        # Not tile_at(): with the address computed in each step full masks are up to 1 % slower (docs/lab).
        s = _scores(following, (tiles.k[0].index(_keys_at(C, n)),), tiles)
        dq = warpgroup_mma_wait(2, deps=[dq])
        barrier_arrive(DS_READY + 2 * C + ((i + n) & 1), PAIR)
        pieces.stage(dq, tiles.dq[C], score.dk_scale, DQ_SENT + C)
        first_dk, ds16, s = warpgroup_mma_wait(0, deps=[dk[0], ds16, s])
        dk = (first_dk,)
        barrier_arrive(Q_FREE + stage, LOADERS)
        head, inside = pieces.next_head(keys.alibi, head, inside, steps_of_head, heads, ORDERED)
    return s, dk, dv


@gluon.jit
def _last_dq(C: gl.constexpr, last, n, tiles):
    """Send dQ of the step before the last one, and issue that of the last one."""
    fence_async_shared()
    barrier_arrive(DQ_STAGED + C, STAGING)
    barrier_sync(DS_READY + 2 - 2 * C + ((last + n) & 1), PAIR)
    return _dq(C, last, n, 0, tiles.k, tiles.ds)


@gluon.jit
def _store(dk, dv, buffer, gradients, score, grid, at, keys):
    head = pieces.head_of_gradients(gradients, at)
    pieces.store_sums(gradients.dv, dv, score.dv_scale, buffer, head, gradients, grid, at, keys)
    pieces.store_sums(gradients.dk, dk, score.dk_scale, buffer, head, gradients, grid, at, keys)


@gluon.jit
def _consumer_of_one(C: gl.constexpr, grid, tiles, score, gradients):
    """Run consumer C of a CTA with one program."""
    SIGNALS: gl.constexpr = gradients.turns_ptr is not None or gradients.counters_ptr is not None
    ORDERED: gl.constexpr = grid.descending is not None
    at = pieces.place(grid)
    first = gl.load(at.info)
    past = gl.load(at.info + 1)
    steps, cut_steps, late_steps, _, _ = pieces.visits_of(at, grid)
    dk = pieces.zero_sums(tiles.k)
    dv = pieces.zero_sums(tiles.v)
    keys = pieces.keys_of(score, tiles.positions, grid, at, first, past, first + C * HALF, S_L, C)
    pieces.begin(C, tiles.ds, S_L)
    mbarrier.wait(tiles.kv_full.index(C), 0)
    mbarrier.wait(tiles.kv_full.index(1 - C), 0)
    mbarrier.wait(tiles.q_full.index(0), 0)
    s = _scores(0, pieces.tile_at(tiles.k, C, 0), tiles)
    s = warpgroup_mma_wait(0, deps=[s])
    last = steps - 1
    s, dk, dv = _walk(C, True, 0, cut_steps, -1, last, 0, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    s, dk, dv = _walk(C, False, cut_steps, late_steps, -1, last, 0, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    if ORDERED:
        s, dk, dv = _walk(C, True, late_steps, steps, -1, last, 0, s, dk, dv, tiles, score, keys, grid.heads, ORDERED)
    dq = warpgroup_mma_wait(0, deps=[_last_dq(C, last, 0, tiles)])
    pieces.send(dq, tiles.dq[C], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
    if SIGNALS:
        barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
    # This consumer's half of V, which the other one does not read
    _store(dk, dv, pieces.tile_at(tiles.v, C, 0), gradients, score, grid, at, keys)
    if SIGNALS:
        barrier_sync(DQ_STAGED + C, STAGING)  # not arrive: sync alone is documented to order the stores for the writer


@gluon.jit
def _consumer(C: gl.constexpr, EARLY: gl.constexpr, grid, tiles, score, gradients):
    """Run consumer C. ``EARLY``: the scores of the next program may be waited for before this one is stored; keys that
    arrive during the kernel may be a long time coming."""
    SIGNALS: gl.constexpr = gradients.turns_ptr is not None or gradients.counters_ptr is not None
    pieces.begin(C, tiles.ds, S_L)
    n, i = 0, 0  # programs and steps so far
    program = announced(tiles.programs, 0, 4)
    at, first, past, steps, cut_steps = _description(program, grid)
    if gradients.turns_ptr is None:
        s = _first_scores(C, True, 0, 0, tiles)
    else:  # the first number is from the counter, too, and other CTAs may have taken all
        s = _first_scores(C, program >= 0, 0, 0, tiles)
    s = warpgroup_mma_wait(0, deps=[s])
    while program >= 0:
        last, full = i + steps - 1, i + cut_steps
        dk = pieces.zero_sums(tiles.k)
        dv = pieces.zero_sums(tiles.v)
        keys = pieces.keys_of(score, tiles.positions, grid, at, first, past, first + C * HALF, S_L, _keys_at(C, n))
        mbarrier.wait(tiles.programs.v_full.index(0), n & 1)
        s, dk, dv = _walk(C, True, i, full, i, last, n, s, dk, dv, tiles, score, keys, grid.heads, False)
        s, dk, dv = _walk(C, False, full, last + 1, i, last, n, s, dk, dv, tiles, score, keys, grid.heads, False)
        dq = _last_dq(C, last, n, tiles)
        this = at
        program = announced(tiles.programs, n + 1, 4)
        at, first, past, steps, cut_steps = _description(program, grid)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(tiles.programs.k_free.index(n & 1), count=1)
        barrier_arrive(DS_READY + 2 * C + ((last + n + 1) & 1), PAIR)  # as in one more step
        if EARLY:
            s = _first_scores(C, program >= 0, last + 1, n + 1, tiles)
        # This consumer's half of the dS of the step before, which the other one has read
        buffer = (tiles.ds.index(((last + 1) & 1) * 2 + C),)
        if not SIGNALS:  # while dQ of the step before is sent
            _store(dk, dv, buffer, gradients, score, grid, this, keys)
        pieces.send(dq, tiles.dq[C], score.dk_scale, DQ_SENT + C, DQ_STAGED + C)
        if SIGNALS:
            barrier_sync(DQ_SENT + C, STAGING)  # and if the group has several parts, it is this one's turn
            _store(dk, dv, buffer, gradients, score, grid, this, keys)
            barrier_sync(DQ_STAGED + C, STAGING)  # as in _consumer_of_one
        if not EARLY:
            s = _first_scores(C, program >= 0, last + 1, n + 1, tiles)
        s = warpgroup_mma_wait(0, deps=[s])
        i = last + 1
        n += 1


@gluon.jit
def _description(program, grid):
    """Return place, first key and the one past the last of a program, its steps, and those of them with cut tiles; of
    program 0 if there is none."""
    at = pieces.place_of(grid, gl.maximum(program, 0))
    steps, cut_steps, _, _ = pieces.visit_order(at.info, grid.heads)
    return at, gl.load(at.info), gl.load(at.info + 1), steps, cut_steps


@gluon.jit
def _first_scores(C: gl.constexpr, some, i, n, tiles):
    """Issue S^T of step i, the first one of program n. If there is not ``some`` program, nothing is loaded, and the
    scores are not used."""
    if some:
        mbarrier.wait(tiles.kv_full.index(n & 1), (n >> 1) & 1)
        mbarrier.wait(tiles.q_full.index(i & 1), (i >> 1) & 1)
    return _scores(i, pieces.tile_at(tiles.k, _keys_at(C, n), i), tiles)


@gluon.jit
def _keys_at(C: gl.constexpr, n):
    """Return the tile of K that consumer C has of program n: programs use one half and the other in turns."""
    return (n & 1) * 2 + C


@gluon.jit
def _producer(grid, descs, tiles, arrival, WAIT: gl.constexpr):
    """Load what each program needs. K has two buffers, and comes first. V has one, which is free when both consumers
    have used dO of the last step of the program before. ``WAIT``: programs wait for others."""
    total = grid.batches * grid.kv_heads * grid.parts * grid.tiles
    program = first_program(grid, total, WAIT)
    announce(tiles.programs, 0, program, total)
    n, g = 0, 0  # programs and steps so far
    while program < total:
        at = pieces.place_of(grid, program)
        first = gl.load(at.info)
        steps, cut_steps, j, onward = pieces.visit_order(at.info, grid.heads)
        pieces.wait_for_keys(arrival, grid, at)
        mbarrier.wait(tiles.programs.k_free.index(n & 1), ((n >> 1) & 1) ^ 1)
        pieces.load_k(descs, tiles, tiles.kv_full.index(n & 1), grid, at, first, _keys_at(0, n))
        if n == 0:
            pieces.load_v(descs, tiles, tiles.programs.v_full.index(0), at, first)
        wait_for_launch_before()  # which makes lse, delta, and zeros in dq, which is added to after these loads
        head = pieces.first_head_of(grid, at)
        # The steps whose loads have been issued hide the time that the counter takes, unless there are few of them. The
        # last programs are taken late, by the CTA that is free first.
        early = (steps < ENOUGH_STEPS) & (program + LAST_WAVES * gl.num_programs(0) < total)
        following = total
        for i in range(0, steps):
            stage = g & 1
            pieces.load_dout(j, head, stage, grid, at, descs, tiles)
            if g >= 2:
                barrier_sync(Q_FREE + stage, LOADERS, warps=1)
            pieces.load_q(i, j, head, cut_steps, steps, stage, grid, at, descs, tiles)
            if early & (i == 0):
                following = take(grid, total, WAIT)
            if g >= 1:
                barrier_sync(DO_FREE + 1 - stage, LOADERS, warps=1)  # for dO of the next step
            if (i == 0) & (n > 0):
                pieces.load_v(descs, tiles, tiles.programs.v_full.index(0), at, first)
            j, head = pieces.next_tile(i, j, head, cut_steps, grid.heads, onward)
            g += 1
        n += 1
        program = following
        if not early:
            program = take(grid, total, WAIT)
        announce(tiles.programs, n, program, total)


@gluon.jit
def start(grid, descs, score, gradients, arrival, order, REGISTERS: gl.constexpr):
    """Allocate shared memory and start the warps."""
    SEVERAL: gl.constexpr = grid.counter_ptr is not None
    EARLY: gl.constexpr = arrival.flags_ptr is None
    boxes = pieces.allocate(descs, (descs.dq[0], descs.dq[0]), 4, SEVERAL=SEVERAL)
    tiles = pieces.matrices(boxes, [pieces.staging_matrix(x) for x in boxes.dq])
    pieces.initialize(tiles)
    dq_desc, programs = descs.dq[0], tiles.programs
    writer_0 = (0, DQ_STAGED, DQ_SENT, ROWS, HALF, 0, dq_desc, boxes.dq[0], grid, gradients, order, programs)
    writer_1 = (1, DQ_STAGED, DQ_SENT, ROWS, HALF, 0, dq_desc, boxes.dq[1], grid, gradients, order, programs)
    if SEVERAL:
        gl.warp_specialize(
            [
                (_consumer, (0, EARLY, grid, tiles, score, gradients)),
                (_consumer, (1, EARLY, grid, tiles, score, gradients)),
                (_producer, (grid, descs, boxes, arrival, gradients.turns_ptr is not None)),
                (pieces.writer, writer_0),
                (pieces.writer, writer_1),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer_of_one, (0, grid, tiles, score, gradients)),
                (_consumer_of_one, (1, grid, tiles, score, gradients)),
                (pieces.producer, (grid, descs, boxes, arrival)),
                (pieces.writer, writer_0),
                (pieces.writer, writer_1),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
