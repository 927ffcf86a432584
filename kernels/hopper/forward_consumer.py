"""A consumer of the forward kernel for Hopper (forward.py): scores, softmax and products with V of 64 query rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from . import alibi_product
from .forward_parts import joined
from .forward_pieces import INFO_LAYOUT, ROWS, SLOTS, matrix_of, number_of, scaled
from .forward_scores import (
    SLACK,
    alibi_of,
    changed,
    hide,
    intervals_of,
    lane_sum,
    pack,
    rescaled,
    seen_from_zero,
    softmax,
    span_of,
    unpack,
)
from .forward_state import enter, flush, scratch, store, with_flushed
from .primitives import FREE_BARRIERS, barrier_arrive, barrier_sync, buffer_of, keep_alive
from .scores import exponentials_of_capped, pairs


@gluon.constexpr_function
def _chains(consumers):
    """Return the ``CHAINS`` of :func:`.forward_scores.row_max`. Two consumers have it at the same time as exponentials
    of their other rows; three find it sooner in more chains, and the others have exponentials meanwhile."""
    return 2 if consumers == 3 else 1


@gluon.jit
def _take_turn(C: gl.constexpr, N: gl.constexpr):
    """Wait until the consumer before has issued its products; a consumer that is alone has all turns."""
    if N > 1:
        barrier_sync(FREE_BARRIERS + C, 256)


@gluon.jit
def _give_turn(C: gl.constexpr, N: gl.constexpr):
    """Let the next consumer issue its products."""
    if N > 1:
        barrier_arrive(FREE_BARRIERS + (C + 1) % N, 256)


@gluon.jit
def _keys(tiles, i):
    return matrix_of(tiles, i).permute((1, 0))


@gluon.jit
def _q_pieces(q_s, i):
    PIECES: gl.constexpr = len(q_s)
    return (matrix_of(q_s[0], i),) if PIECES == 1 else (matrix_of(q_s[0], i), matrix_of(q_s[1], i))


@gluon.jit
def _q_again(q_s, i, late):
    """Return the queries for one of the loops over keys, with their addresses computed again.

    ptxas 12.8 bug: if three loops share descriptors, one may read a uniform register that is only written inside
    another loop, which may not have run (tests/sass.py checks for it). ``late >> 30`` is 0, but ptxas cannot know that,
    so that each loop computes descriptors of its own."""
    return _q_pieces(q_s, i + (late >> 30))


@gluon.jit
def _scores(q, k_s, stage, layout: gl.constexpr):
    """Issue the product of the queries and of the key tile in this stage, piece by piece."""
    BN: gl.constexpr = k_s[0].shape[2]
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    s = warpgroup_mma(q[0], _keys(k_s[0], stage), s, use_acc=False, is_async=True)
    PIECES: gl.constexpr = len(k_s)
    if PIECES == 2:
        s = warpgroup_mma(q[1], _keys(k_s[1], stage), s, is_async=True)
    return s


@gluon.jit
def _first_scores(
    some, q_s, k_s, q_full, k_full, i, g, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    Q_BUFFERS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Issue the product of query tile i and key tile g of this CTA, without a product with V. If there is no such tile,
    take the turn all the same: the operands are stale and the scores are not used."""
    buffer, phase = buffer_of(i, Q_BUFFERS)
    ks, k_phase = buffer_of(g, STAGES)
    if some:
        mbarrier.wait(q_full.index(buffer * N + C), phase)
        mbarrier.wait(k_full.index(ks), k_phase)
    _take_turn(C, N)
    s = _scores(_q_pieces(q_s, buffer * N + C), k_s, ks, layout)
    _give_turn(C, N)
    return s


@gluon.jit
def _step(
    q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, limits, changes, even,
    C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of key tile g + 1, and the product of P and V of key tile g.

    Args:
        limits: first and past-the-last key that each row sees; not read without ``MASK``.
        even: side and first position of keys whose scores get ALiBi by a product, or nothing.
    """
    BN: gl.constexpr = k_s[0].shape[2]
    DTYPE: gl.constexpr = v_s.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    vs, v_phase = buffer_of(g, STAGES)
    g += 1
    ks, k_phase = buffer_of(g, STAGES)
    mbarrier.wait(k_full.index(ks), k_phase)
    _take_turn(C, N)
    s = _scores(q, k_s, ks, S_L)
    if len(even) > 0:  # the product that adds ALiBi
        A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
        side, first = even
        s = warpgroup_mma(unpack(side[0], gl.bfloat16, A_L), alibi_product.columns_of(changes[1]), s, is_async=True)
    acc = rescaled(acc, alpha, FIXED)  # overlaps the product with K
    mbarrier.wait(v_full.index(vs), v_phase)
    p = unpack(packed, DTYPE, P_L)
    acc = warpgroup_mma(p, matrix_of(v_s, vs), acc, is_async=True)
    _give_turn(C, N)
    s = warpgroup_mma_wait(1, deps=[s])
    barrier_arrive(K_FREE + ks, THREADS)
    if FIXED is not None and not MASK:
        low, high, sums = exponentials_of_capped(s, FIXED, 2 if N == 2 else 0)  # three consumers have fewer registers
        l += gl.convert_layout(sums, l.type.layout)
    else:
        part = ()
        if len(even) > 0:
            keep_alive(side[0])
            part = (alibi_product.part_of_rows(changes[1], side, first),)  # type: ignore[assignment]
            unit = c2
        else:
            s, unit = changed(s, c2, changes, column, FIXED)
        if MASK:
            start, end = limits
            s = hide(s, column, start, end)
        m, l, alpha, x = softmax(s, m, l, 0.0, unit, part, SLACK, FIXED, _chains(N))
        low, high = pairs(x)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    keep_alive(packed)
    barrier_arrive(V_FREE + vs, THREADS)
    packed = gl.convert_layout(pack(low, high, DTYPE), packed.type.layout)
    return acc, m, l, alpha, packed


@gluon.jit
def _limits(intervals, C: gl.constexpr, BN: gl.constexpr):
    """Read the first and past-the-last key that each row of consumer C sees."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    slot, start_ptr, end_ptr, rows_batch_stride = intervals
    return intervals_of(slot, C, start_ptr, end_ptr, rows_batch_stride, gl.SliceLayout(1, S_L))


@gluon.jit
def _walk_part(
    past, begin, late, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals, changes,
    C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, EARLY: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """Walk the key tiles below ``past`` down to ``begin``, all cut (``MASK``) or all full. ``late``: a number that is
    computed before this loop, see :func:`_q_again`."""
    BN: gl.constexpr = k_s[0].shape[2]
    if EARLY:
        q = _q_again(q_s, at, late)
    limits = ()
    if MASK:  # read again: held all the time they would take registers from the loop over full tiles
        limits = _limits(intervals, C, BN)
    for column in range(past - BN, begin - BN, -BN):
        acc, m, l, alpha, packed = _step(
            q, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, limits, changes, (), C, N,
            STAGES, MASK, FIXED,
        )  # fmt: skip
        g += 1
    return g, acc, m, l, alpha, packed


@gluon.jit
def _walk(
    last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals,
    changes, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Walk the key tiles below ``last`` down to ``begin``, each with the product of P and V of the tile before: cut,
    full, cut."""
    if alibi_product.is_product(changes[1]):
        return _walk_with_alibi(
            last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2,
            intervals, changes, C, N, STAGES, EARLY, FIXED,
        )  # fmt: skip
    g, acc, m, l, alpha, packed = _walk_part(
        last, full_end, last, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals,
        changes, C, N, STAGES, True, EARLY, FIXED,
    )  # fmt: skip
    g, acc, m, l, alpha, packed = _walk_part(
        gl.minimum(full_end, last), full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha,
        packed, c2, intervals, changes, C, N, STAGES, False, EARLY, FIXED,
    )  # fmt: skip
    g, acc, m, l, alpha, packed = _walk_part(
        gl.minimum(full_begin, last), begin, begin, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha,
        packed, c2, intervals, changes, C, N, STAGES, True, EARLY, FIXED,
    )  # fmt: skip
    return g, acc, m, l, alpha, packed


@gluon.jit
def _walk_with_alibi(
    last, begin, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, intervals,
    changes, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Walk the same key tiles where ALiBi is a product: by turns those that are cut or not even, and others."""
    BN: gl.constexpr = k_s[0].shape[2]
    alibi = changes[1]
    column = last - BN
    first = alibi_product.first_before(alibi, last, BN)
    even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
    while column >= begin:
        queries = _q_again(q_s, at, column) if EARLY else q
        limits = _limits(intervals, C, BN)
        while (column >= begin) & (not even):
            first = alibi_product.first_before(alibi, column, BN)
            acc, m, l, alpha, packed = _step(
                queries, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, limits, changes, (), C,
                N, STAGES, True, FIXED,
            )  # fmt: skip
            g += 1
            column -= BN
            even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
        queries = _q_again(q_s, at, column + BN) if EARLY else q
        side = alibi_product.side_of(alibi, first)
        while even:
            following = alibi_product.first_before(alibi, column, BN)
            acc, m, l, alpha, packed = _step(
                queries, k_s, v_s, k_full, v_full, g, acc, m, l, alpha, packed, c2, column, (), changes,
                (side, first), C, N, STAGES, False, FIXED,
            )  # fmt: skip
            g += 1
            column -= BN
            first = following
            even = (column >= full_begin) & alibi_product.is_on(side, first)
        even = (column >= full_begin) & (column < full_end) & alibi_product.is_even(alibi, first)
    return g, acc, m, l, alpha, packed


@gluon.jit
def _outer_rows(slot, C: gl.constexpr, start_ptr, end_ptr, rows_batch_stride, some):
    """Read the start and the end of the first row of consumer C, and of its last one, four int32 numbers; zeros if it
    has none."""
    info = slot.load(INFO_LAYOUT)
    row = number_of(info, 0) + C * ROWS
    latest = gl.minimum(row + ROWS, number_of(info, 1)) - 1
    some = some & (row <= latest)
    start_ptr += number_of(info, 6) * rows_batch_stride
    end_ptr += number_of(info, 6) * rows_batch_stride
    return (
        gl.load(start_ptr + row, mask=some, other=0),
        gl.load(end_ptr + row, mask=some, other=0),
        gl.load(start_ptr + latest, mask=some, other=0),
        gl.load(end_ptr + latest, mask=some, other=0),
    )


@gluon.jit
def _own_span(outer, last, begin, BN: gl.constexpr):
    """Return which key tiles of a query tile, from ``begin`` to ``last``, a consumer with these :func:`_outer_rows`
    walks, ``[first, past)``, one at least, and in which of them it hides nothing, ``[full_begin, full_end)``.

    Consumers see different keys at the diagonal, and where a query tile lies across documents. Neither start nor end
    decreases along the rows: the first row's start and the last one's end are the limits of what any of them sees, and
    the other two of what all of them see; if some row sees nothing there is nothing between these.
    """
    first, full_end, full_begin, past = outer
    first = gl.minimum(gl.maximum(first // BN * BN, begin), last)
    past = gl.maximum(gl.minimum((past + BN - 1) // BN * BN, last + BN), first + BN)
    full_begin = gl.minimum(gl.maximum((full_begin + BN - 1) // BN * BN, first), past)
    full_end = gl.minimum(gl.maximum(full_end // BN * BN, full_begin), past)
    return first, past, full_begin, full_end


@gluon.jit
def _pass_turns(count, k_full, v_full, g, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    """Take the turns of ``count`` key tiles of which this consumer sees nothing: wait for and release their keys and
    values. Return g after them."""
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    for _ in range(0, count):
        stage, phase = buffer_of(g, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        _take_turn(C, N)
        _give_turn(C, N)
        barrier_arrive(K_FREE + stage, THREADS)
        mbarrier.wait(v_full.index(stage), phase)
        barrier_arrive(V_FREE + stage, THREADS)
        g += 1
    return g


@gluon.jit
def _to_own_span(
    outer, some, last, begin, k_full, v_full, g, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Pass the turns before this consumer's first key tile, if there is ``some`` query tile. Return its
    :func:`_own_span` and g."""
    first, past, full_begin, full_end = _own_span(outer, last, begin, BN)
    g = _pass_turns(gl.where(some, (last + BN - past) // BN, 0), k_full, v_full, g, C, N, STAGES)
    return first, past, full_begin, full_end, g


@gluon.jit
def _part(division, i):
    """Return the number of the part that query tile i of this CTA is, negative if it is whole."""
    return number_of(division[0].index(i % SLOTS).load(INFO_LAYOUT), 0)


@gluon.jit
def _is_first(division, i):
    """Return whether query tile i of this CTA is whole or the first of its parts, which begins with the carried
    state."""
    first = True
    if len(division) > 0:
        part = _part(division, i)
        first = (part < 0) | (part % division[1] == 0)
    return first


@gluon.jit
def consumer(
    args, C: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr, DV: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr, STAGED: gl.constexpr,
    PERIOD: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Run consumer C: scores, softmax and products with V of its rows of each query tile, until there are none."""
    (
        out_desc, out_ptr, lse_ptr, l_ptr, m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr, start_ptr, end_ptr,
        q_s, k_s, v_s, o_s, info_s, q_full, q_free, k_full, v_full, info_full,
        seq_q, q_heads, rows_batch_stride, c2, inner, alibi, division,
    ) = args  # fmt: skip
    BN: gl.constexpr = k_s[0].shape[2]
    W: gl.constexpr = v_s.shape[4]
    DTYPE: gl.constexpr = v_s.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    THREADS: gl.constexpr = 128 * (N + 1)
    K_FREE: gl.constexpr = FREE_BARRIERS + N
    V_FREE: gl.constexpr = K_FREE + STAGES
    OWN: gl.constexpr = V_FREE + STAGES + C  # the barrier of this consumer
    # With two consumers it takes as much as it saves. Divided query tiles have equally many key tiles, at most the ends
    # of which are cut.
    OWN_SPAN: gl.constexpr = N > 2 and len(division) == 0 and PERIOD == 0
    EARLY: gl.constexpr = Q_BUFFERS > 1  # the next queries can be loaded before this query tile is stored
    if C == N - 1:
        _give_turn(C, N)  # consumer 0 goes first

    g = 0  # number of key tiles before the current one
    i = 0  # number of query tiles before the current one
    mbarrier.wait(info_full.index(0), 0)
    slot = info_s.index(0)
    some, last, begin, full_begin, full_end = span_of(slot, BN)
    first, past = begin, last + BN  # of the keys that this consumer walks
    if OWN_SPAN:
        outer = _outer_rows(slot, C, start_ptr, end_ptr, rows_batch_stride, some)
        first, past, full_begin, full_end, g = _to_own_span(
            outer, some, last, begin, k_full, v_full, g, C, N, STAGES, BN
        )
    if EARLY:
        start, end = intervals_of(slot, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
        s = _first_scores(some, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
        if HAS_STATE:
            m, rest, l_in, acc = enter(
                slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L, _is_first(division, i)
            )
        s = warpgroup_mma_wait(0, deps=[s])
        if some:
            barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
    while some:
        # The first key tile of the walk, whose scores are there already where EARLY.
        buffer, _ = buffer_of(i, Q_BUFFERS)
        at = buffer * N + C
        if not EARLY:
            start, end = intervals_of(slot, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
            q = _q_pieces(q_s, at)
            s = _first_scores(True, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
            if HAS_STATE:
                m, rest, l_in, acc = enter(
                    slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L, _is_first(division, i)
                )
            s = warpgroup_mma_wait(0, deps=[s])
            barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
        l = lane_sum(gl.zeros([ROWS, BN], gl.float32, S_L))
        if HAS_STATE:
            l = l + gl.convert_layout(l_in, gl.SliceLayout(1, l.type.layout))[:, None]
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            rest = gl.zeros([ROWS], gl.float32, S_ROW)
            acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if PERIOD:
            m_aside = m
            if HAS_STATE:
                gl.store(scratch(aside_ptr, C, N, W, O_L), scaled(acc, gl.exp2(rest)))
                acc = gl.zeros([ROWS, W], gl.float32, O_L)
        if FIXED is not None:
            m = gl.zeros([ROWS], gl.float32, S_ROW)
        changes = (inner, alibi_of(slot, C, alibi, c2, BN, S_ROW))
        s, unit = changed(s, c2, changes, past - BN, FIXED)
        s = hide(s, past - BN, start, end)
        m, l, alpha, x = softmax(s, m, l, rest, unit, (), 0.0, FIXED)
        low, high = pairs(x)
        packed = pack(low, high, DTYPE)

        intervals = (slot, start_ptr, end_ptr, rows_batch_stride)
        if EARLY:
            q = ()
        if PERIOD:  # all key tiles, of which those are hidden that this consumer does not see
            for above in range(last, begin, -BN * PERIOD):
                down = gl.maximum(above - BN * PERIOD, begin)
                g, acc, m, l, alpha, packed = _walk(
                    above, down, gl.maximum(full_begin, down), gl.maximum(full_end, down), q, q_s, at, k_s, v_s, k_full,
                    v_full, g, acc, m, l, alpha, packed, c2, intervals, changes, C, N, STAGES, EARLY, FIXED,
                )  # fmt: skip
                acc, m_aside = flush(rescaled(acc, alpha, FIXED), m, aside_ptr, m_aside, C, N)
        else:
            g, acc, m, l, alpha, packed = _walk(
                past - BN, first, full_begin, full_end, q, q_s, at, k_s, v_s, k_full, v_full, g, acc, m, l, alpha,
                packed, c2, intervals, changes, C, N, STAGES, EARLY, FIXED,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(at), count=1)

        # The last product with V, and where EARLY the first scores of the next query tile.
        vs, v_phase = buffer_of(g, STAGES)
        mbarrier.wait(v_full.index(vs), v_phase)
        acc = rescaled(acc, alpha, FIXED)
        p = unpack(packed, DTYPE, P_L)
        acc = warpgroup_mma(p, matrix_of(v_s, vs), acc, is_async=True)
        g += 1
        i += 1
        if OWN_SPAN:  # the producer announces the next query tile when all keys of this one have had room
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            keep_alive(packed)
            barrier_arrive(V_FREE + vs, THREADS)
            g = _pass_turns((first - begin) // BN, k_full, v_full, g, C, N, STAGES)
        mbarrier.wait(info_full.index(i % SLOTS), (i // SLOTS) & 1)
        following = info_s.index(i % SLOTS)
        some, last, begin, full_begin, full_end = span_of(following, BN)
        first, past = begin, last + BN
        if OWN_SPAN:
            outer = _outer_rows(following, C, start_ptr, end_ptr, rows_batch_stride, some)
        if EARLY:
            start, end = intervals_of(following, C, start_ptr, end_ptr, rows_batch_stride, S_ROW)
        if not OWN_SPAN:
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            keep_alive(packed)
            barrier_arrive(V_FREE + vs, THREADS)
        if PERIOD:
            acc = with_flushed(acc, m, aside_ptr, m_aside, C, N)
        complete = True
        if len(division) > 0:
            _, parts, all_parts, sums_ptr, counter_ptr = division
            part = _part(division, i - 1)
            acc, m, l, complete = joined(part, parts, all_parts, sums_ptr, counter_ptr, acc, m, l, C, N, OWN)
        if OWN_SPAN:
            first, past, full_begin, full_end, g = _to_own_span(
                outer, some, last, begin, k_full, v_full, g, C, N, STAGES, BN
            )
        if EARLY:
            s = _first_scores(some, q_s, k_s, q_full, k_full, i, g, C, N, STAGES, Q_BUFFERS, S_L)
        if FIXED is not None:
            acc, m, l = seen_from_zero(acc, m, l, FINALIZE)
        if complete:
            store(
                acc, m, l, slot, out_desc, out_ptr, lse_ptr, l_ptr, sink_ptr, o_s,
                seq_q, q_heads, C, DTYPE, DV, HAS_SINK, FINALIZE, STAGED, S_ROW,
            )  # fmt: skip
        slot = following
        if EARLY:
            if HAS_STATE:
                m, rest, l_in, acc = enter(
                    slot, C, m_in_ptr, l_in_ptr, o_in_ptr, seq_q, q_heads, DV, W, S_ROW, O_L, _is_first(division, i)
                )
            s = warpgroup_mma_wait(0, deps=[s])
            if some:
                barrier_arrive(K_FREE + buffer_of(g, STAGES)[0], THREADS)
    if FINALIZE and STAGED:
        tma.store_wait(0)
