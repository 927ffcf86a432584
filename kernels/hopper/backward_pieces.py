"""Device functions that the backward kernels for Hopper share.

Tiles, in one piece or in two pieces side by side (96 and 192 columns, which are no power of two, and 256), products and
sums over them, the producer, the writer of head dims 64, 96 and 128, and the order in which programs visit tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from . import scores
from .primitives import (
    async_load,
    barrier_arrive,
    barrier_sync,
    exchange_blocks,
    fence_async_global,
    raise_counter,
    reinterpret,
    round_pairs,
    tma_reduce_add,
    wait_count,
    wait_row,
    wait_sent,
)

BM = gl.constexpr(64)  # queries of a step; backward_tall.py has more
BN = gl.constexpr(128)  # keys of a CTA; 64 in backward_pair.py and backward_wide.py, and of tiles in registers
INFO = gl.constexpr(8)  # int32 numbers that describe a key tile, see work.key_tile_table

# Numbers that vary with lengths and documents: one compiled kernel for all of them. (So do ``heads`` and ``parts``, but
# they cost registers; there are few of them, which are compiled together.)
NUMBERS = ("tiles", "q_tiles", "epoch", "segments", "sweep", "slopes_stride")

LOADERS = gl.constexpr(288)  # threads at a barrier of both consumers and the producer
PAIR = gl.constexpr(256)  # both consumers
STAGING = gl.constexpr(160)  # one consumer and its writer


@gluon.jit
def _load_pieces(desc, row, full, tiles, i):
    """Load rows of one head into tile i of each piece of the columns."""
    async_load(desc[0], [row[0], row[1], row[2], 0], full, tiles[0].index(i))
    if len(desc) == 2:
        FIRST: gl.constexpr = desc[0].block_type.shape[3]
        async_load(desc[1], [row[0], row[1], row[2], FIRST], full, tiles[1].index(i))


@gluon.constexpr_function
def _bytes(desc):
    """Return the bytes of one tile: of all pieces of its columns."""
    return sum(piece.block_type.nbytes for piece in desc)


@gluon.jit
def _order(tiles, sweep, CTAS: gl.constexpr = 1):
    """Return the part of a group, numbered over all batch elements and key heads, and the key tile of this program.
    ``sweep`` parts are walked at the same time, tile by tile; ``CTAS`` programs in a row share a tile."""
    program = gl.program_id(0) // CTAS
    inside = program % (sweep * tiles)
    return program // (sweep * tiles) * sweep + inside % sweep, inside // sweep


@gluon.jit
def place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED: gl.constexpr, CTAS: gl.constexpr = 1):
    """Return batch, key head, part of the group's query heads and address of the key tile's description."""
    head, tile = _order(tiles, sweep, CTAS)
    batch = head // (parts * kv_heads)
    if BATCHED:
        tile += batch * tiles
    return batch, head // parts % kv_heads, head % parts, info_ptr + tile * INFO


@gluon.jit
def buffer_of(batch, part, batches, IN_TURNS: gl.constexpr):
    """Return the index of the dk and dv that a part of a group adds to: those of the batch element, or its own."""
    if not IN_TURNS:
        batch = part * batches + batch
    return batch


@gluon.jit
def _turns_of(turns_ptr, tiles, parts, sweep, CTAS: gl.constexpr = 1):
    """Return the address of the counter of stored parts of this program's group, one per key tile of a key head."""
    head, tile = _order(tiles, sweep, CTAS)
    return turns_ptr + (head // parts * tiles + tile)


@gluon.jit
def signal_sent(sent: gl.constexpr, last, turns_ptr, tiles, part, parts, sweep, CTAS: gl.constexpr = 1):
    """Signal to a writer's consumer, at barrier ``sent``, that the staged tile has been read. Before the ``last``
    signal wait until all consumers of the previous part have stored: parts add to the same dk and dv in order, so that
    these have the same bits on every run. The previous part has a smaller program number and has started earlier."""
    if (turns_ptr is not None) and last:
        wait_count(_turns_of(turns_ptr, tiles, parts, sweep, CTAS), 2 * CTAS * part)
        barrier_sync(sent, STAGING, warps=1)  # not arrive: sync alone is documented to order memory
    else:
        barrier_arrive(sent, STAGING, warps=1)


@gluon.jit
def finish_writer(
    staged: gl.constexpr, turns_ptr, counters_ptr, info, tiles, part, parts, segments, sweep, CTAS: gl.constexpr = 1,
):  # fmt: skip
    """End a writer, after barrier ``staged`` with its consumer, which has stored: signal to the next part, or after the
    last part raise the completion counter of dk and dv. In the writer, because it would cost the consumer registers."""
    if (turns_ptr is not None) or (counters_ptr is not None):
        barrier_sync(staged, STAGING, warps=1)
    if turns_ptr is not None:
        raise_counter(_turns_of(turns_ptr, tiles, parts, sweep, CTAS), "gpu")
    if (counters_ptr is not None) and (part == parts - 1):
        head, _ = _order(tiles, sweep, CTAS)
        chunk = head // gl.maximum(parts, sweep)  # rows of keys that complete together
        raise_counter(counters_ptr + (chunk * segments + gl.load(info + 7)), "sys")


@gluon.jit
def visit_order(info, heads):
    """Return the order of the query tiles that a key tile visits: the cut ones for every head, then the full ones for
    every head, starting at ``start``. So the consumers have one loop for each, without a branch.

    Returns: steps of all heads, those of them with cut tiles, the first tile, and arguments of :func:`next_tile`.
    """
    begin = gl.load(info + 2)
    end = gl.load(info + 3)
    full_begin = gl.load(info + 4)
    full_end = gl.load(info + 5)
    start = gl.load(info + 6)
    steps = (end - begin) * heads
    cut_steps = steps - (full_end - full_begin) * heads
    first_cut = begin
    if full_begin == begin:
        first_cut = full_end
    j = start
    if cut_steps > 0:
        j = first_cut
    return steps, cut_steps, j, (full_begin, full_end, end, start, first_cut)


@gluon.jit
def next_tile(i, j, head, cut_steps, heads, stops):
    """Return the tile and the head that follow those of step i."""
    full_begin, full_end, end, start, first_cut = stops
    j += 1
    if i < cut_steps:
        if j == full_begin:
            j = full_end
        if j == end:
            j = first_cut
            head += 1
        if i + 1 == cut_steps:
            j = start
            head -= heads
    else:
        if j == full_end:
            j = full_begin
        if j == start:
            head += 1
    return j, head


@gluon.jit
def ordered_visits(info, heads):
    """Return the order of the query tiles where the sums of dQ have one (:func:`wait_for_turn`): from the last to the
    first, each for every head before the next one. If a head came after the other, the program of later keys would be
    done first with its part of the first head under a causal mask, and wait at the second.

    Returns: steps of all heads, and the steps at which the full tiles begin and end; the first tile is ``end - 1``."""
    begin = gl.load(info + 2)
    end = gl.load(info + 3)
    return (end - begin) * heads, (end - gl.load(info + 5)) * heads, (end - gl.load(info + 4)) * heads


@gluon.jit
def ordered_next(j, head, first_head, heads):
    """Return the tile and the head of the next step; ``first_head``: that of this program."""
    head += 1
    if head == first_head + heads:
        head = first_head
        j -= 1
    return j, head


@gluon.jit
def ordered_next_head(alibi, head, heads):
    """Return the number of the head of the next step, counted from 0; unchanged without ALiBi."""
    if len(alibi) > 0:
        head += 1
        if head == heads:
            head = 0
    return head


@gluon.jit
def wait_for_turn(order, row, bounds_row, j, rank, C: gl.constexpr):
    """Wait, in a writer, until all key tiles before this one have added to tile j of queries of ``row`` (batch element
    and query head). Return the counter to raise after this one has, by :func:`end_turn`; a tile that no query sees
    takes no turn.

    Key tiles add in the order of their keys, which is that of the programs: a program waits for programs with smaller
    numbers, which have started earlier, and so for none that waits for it."""
    first_ptr, sums_ptr, q_tiles = order
    counter = sums_ptr + ((row.to(gl.int64) * q_tiles + j) * 2 + C)
    if rank >= 0:
        wait_count(counter, rank - gl.load(first_ptr + bounds_row + j))
        fence_async_global()
    return counter


@gluon.jit
def end_turn(counter, rank):
    """Wait until what this warp has sent is in memory, and let the next key tile add."""
    if rank >= 0:
        wait_sent()
        raise_counter(counter, "gpu")


@gluon.jit
def writer(
    C: gl.constexpr, staged: gl.constexpr, sent: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr,
    COLUMN: gl.constexpr, dq_desc, info_ptr, dq_s, heads, tiles, kv_heads, parts, turns_ptr, counters_ptr, segments,
    order, sweep, BATCHED: gl.constexpr,
):  # fmt: skip
    """Send the dQ of each step two steps later, for consumer C: the first two times there is nothing to send yet. Head
    dims 64, 96 and 128.

    Args:
        staged, sent: barriers of consumer 0; those of consumer 1 are the next ones.
        ROWS: queries of a step. ROW, COLUMN: where what consumer 1 sends begins in the tile of dQ.
        order: nothing, or if key tiles add in order: their first one, the counters, and tiles of queries.
    """
    batch, kv_head, part, info = place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    ORDERED: gl.constexpr = len(order) > 0
    if ORDERED:
        steps, _, _ = ordered_visits(info, heads)
        j = gl.load(info + 3) - 1
        rank = gl.load(info + 6)
        rows = batch * (kv_heads * parts * heads)
        bounds_row = 0
        if BATCHED:
            bounds_row = batch * order[2]
    else:
        steps, cut_steps, j, stops = visit_order(info, heads)
    first_head = (kv_head * parts + part) * heads
    head = first_head
    for _ in range(0, 2):
        barrier_sync(staged + C, STAGING, warps=1)
        barrier_arrive(sent + C, STAGING, warps=1)
    for i in range(0, steps):
        if ORDERED:
            counter = wait_for_turn(order, rows + head, bounds_row, j, rank, C)
        barrier_sync(staged + C, STAGING, warps=1)
        tma_reduce_add(dq_desc, [batch, j * ROWS + C * ROW, head, C * COLUMN], dq_s)
        tma.store_wait(0)
        signal_sent(sent + C, i == steps - 1, turns_ptr, tiles, part, parts, sweep)
        if ORDERED:
            end_turn(counter, rank)
            j, head = ordered_next(j, head, first_head, heads)
        else:
            j, head = next_tile(i, j, head, cut_steps, heads, stops)
    finish_writer(staged + C, turns_ptr, counters_ptr, info, tiles, part, parts, segments, sweep)


@gluon.jit
def producer(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, bounds_desc, positions_desc, info_ptr,
    k_s, v_s, q_s, dout_s, lse_s, delta_s, bounds_s, positions_s, kv_full, q_full, dout_full,
    heads, tiles, kv_heads, parts, q_tiles, flags_ptr, epoch, timed_out_ptr,
    q_free: gl.constexpr, dout_free: gl.constexpr, sweep, BATCHED: gl.constexpr, ORDERED: gl.constexpr = False,
):  # fmt: skip
    """Load K and V, in as many tiles of 64 keys as ``kv_full`` has barriers, then the queries."""
    KV_BYTES: gl.constexpr = _bytes(k_desc) + _bytes(v_desc)
    KEY_TILES: gl.constexpr = kv_full.shape[0]
    batch, kv_head, part, info = place(info_ptr, tiles, kv_heads, parts, sweep, BATCHED)
    first = gl.load(info)
    visits = visits_of(info, heads, ORDERED)
    if flags_ptr is not None:
        wait_row(flags_ptr, batch * kv_heads + kv_head, epoch, timed_out_ptr, 1)
    for c in gl.static_range(KEY_TILES):
        mbarrier.expect(kv_full.index(c), KV_BYTES)
        _load_pieces(k_desc, [batch, first + c * (BN // 2), kv_head], kv_full.index(c), k_s, c)
        _load_pieces(v_desc, [batch, first + c * (BN // 2), kv_head], kv_full.index(c), v_s, c)
    load_queries(
        q_desc, dout_desc, lse_desc, delta_desc, bounds_desc, positions_desc, visits, q_s, dout_s, lse_s, delta_s,
        bounds_s, positions_s, q_full, dout_full, heads, batch, kv_head, part, kv_heads, parts, q_tiles,
        q_free, dout_free, BATCHED, ORDERED,
    )  # fmt: skip


@gluon.jit
def visits_of(info, heads, ORDERED: gl.constexpr = False):
    """Return the visits of a key tile, for :func:`load_queries`: before anything is waited for."""
    if ORDERED:
        steps, cut_steps, late_steps = ordered_visits(info, heads)
        j = gl.load(info + 3) - 1
        stops = ()
    else:
        steps, cut_steps, j, stops = visit_order(info, heads)
        late_steps = steps
    return steps, cut_steps, late_steps, j, stops


@gluon.jit
def load_queries(
    q_desc, dout_desc, lse_desc, delta_desc, bounds_desc, positions_desc, visits, q_s, dout_s, lse_s, delta_s,
    bounds_s, positions_s, q_full, dout_full, heads, batch, kv_head, part, kv_heads, parts, q_tiles,
    q_free: gl.constexpr, dout_free: gl.constexpr, BATCHED: gl.constexpr, ORDERED: gl.constexpr = False,
):  # fmt: skip
    """Load Q, lse (with ALiBi the positions, and the intervals of cut tiles), dO and delta of every step."""
    ROWS: gl.constexpr = lse_desc.block_type.shape[1]
    Q_BYTES: gl.constexpr = _bytes(q_desc) + (0 if positions_desc is None else positions_desc.block_type.nbytes)
    DO_BYTES: gl.constexpr = _bytes(dout_desc)
    DO_STAGES: gl.constexpr = dout_s[0].shape[0]
    steps, cut_steps, late_steps, j, stops = visits
    first_head = (kv_head * parts + part) * heads
    head = first_head
    q_heads = kv_heads * parts * heads
    bounds_row = 0
    if BATCHED:
        bounds_row = batch * q_tiles
    for i in range(0, steps):
        stage = i % 2
        do_stage = i % DO_STAGES
        row = (batch * q_heads + head) * q_tiles + j
        if i >= 2:
            barrier_sync(q_free + stage, LOADERS, warps=1)
        cut = i < cut_steps
        if ORDERED:
            cut |= i >= late_steps
        if cut:
            mbarrier.expect(q_full.index(stage), Q_BYTES + lse_desc.block_type.nbytes + bounds_desc.block_type.nbytes)
            async_load(bounds_desc, [bounds_row + j, 0], q_full.index(stage), bounds_s.index(stage))
        else:
            mbarrier.expect(q_full.index(stage), Q_BYTES + lse_desc.block_type.nbytes)
        _load_pieces(q_desc, [batch, j * ROWS, head], q_full.index(stage), q_s, stage)
        async_load(lse_desc, [row, 0], q_full.index(stage), lse_s.index(stage))
        if positions_desc is not None:
            async_load(positions_desc, [j, 0], q_full.index(stage), positions_s[0].index(stage))
        if i >= DO_STAGES:
            barrier_sync(dout_free + do_stage, LOADERS, warps=1)
        mbarrier.expect(dout_full.index(do_stage), DO_BYTES + delta_desc.block_type.nbytes)
        _load_pieces(dout_desc, [batch, j * ROWS, head], dout_full.index(do_stage), dout_s, do_stage)
        async_load(delta_desc, [row, 0], dout_full.index(do_stage), delta_s.index(do_stage))
        if ORDERED:
            j, head = ordered_next(j, head, first_head, heads)
        else:
            j, head = next_tile(i, j, head, cut_steps, heads, stops)


@gluon.jit
def hide(s, bounds_v, stage, key, past, S_L: gl.constexpr, HIDDEN: gl.constexpr = float("-inf")):
    """Return s, whose rows are keys from ``key`` on, with ``HIDDEN`` where a query does not see the key."""
    from_key = bounds_v.index(2 * stage).load(gl.SliceLayout(0, S_L))
    to_key = gl.minimum(bounds_v.index(2 * stage + 1).load(gl.SliceLayout(0, S_L)), past)
    keys = gl.arange(0, BN // 2, gl.SliceLayout(1, S_L)) + key
    seen = (keys[:, None] >= from_key[None, :]) & (keys[:, None] < to_key[None, :])
    return gl.where(seen, s, HIDDEN)


@gluon.jit
def scores_to_base_2(
    s, scale, alibi, head, bounds_v, stage, key, past, S_L: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Return scores without softcap to the base 2. Only those of plain products may be hidden before they are scaled,
    which is faster: by a negative scale -inf would become +inf."""
    PLAIN: gl.constexpr = len(alibi) == 0
    if CUT and PLAIN:
        s = hide(s, bounds_v, stage, key, past, S_L)
    s = s * scale
    if not PLAIN:
        s = s - scores.penalties_of_step(alibi, head, stage, S_L)
    if CUT and not PLAIN:
        s = hide(s, bounds_v, stage, key, past, S_L)
    return s


# Hides a score of Changes.fixed: those, their lse and the logarithm of P's factor are far above it, so that its P is 0;
# but its derivative is a number, and 0 times that is 0.
HIDDEN_AND_FINITE = gl.constexpr(-1024.0)


@gluon.jit
def capped_probabilities(
    s, lse_v, scale, inner, alibi, head, bounds_v, stage, key, past, S_L: gl.constexpr, CUT: gl.constexpr,
    dtype: gl.constexpr, FUSED: gl.constexpr = True, SHORT: gl.constexpr = True,
):  # fmt: skip
    """Return P of scores with softcap, and P times the derivative of the softcap, both in 16 bits. ``FUSED``: fewer
    registers, except at head dim 64, where tiles are twice as wide. Without ``SHORT``, the short polynomial, too."""
    ONE: gl.constexpr = scores.square_of_scale(inner)
    if scores.is_fixed(inner) and FUSED and not CUT:
        offset = lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
        p, slope = scores.probabilities_of_capped(s, offset, inner)
    else:
        if scores.is_fixed(inner):
            t = scores.scaled_and_capped(s, inner)
            unit = 1.0
            if CUT and not FUSED:
                t = hide(t, bounds_v, stage, key, past, S_L, HIDDEN_AND_FINITE)
        else:
            t = scores.capped(s, inner, SHORT)
            unit = scale
        if FUSED:
            offset, _ = gl.broadcast(lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :], t)
            if len(alibi) > 0:
                offset = offset + scores.penalties_of_step(alibi, head, stage, S_L)
            if CUT:
                offset = hide(offset, bounds_v, stage, key, past, S_L, float("inf"))
            p, slope = scores.probabilities(t, unit, offset, dtype, ONE)
        else:
            s = t * unit
            if len(alibi) > 0:
                s = s - scores.penalties_of_step(alibi, head, stage, S_L)
            if CUT and not scores.is_fixed(inner):
                s = hide(s, bounds_v, stage, key, past, S_L)
            p32 = gl.exp2(s - lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p = round_pairs(p32, dtype)
            slope = round_pairs(p32 * gl.fma(-t, t, ONE), dtype)
    return p, slope


@gluon.jit
def probabilities(
    s, lse_v, scale, inner, alibi, head, bounds_v, stage, key, past, S_L: gl.constexpr, CUT: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Return P in 16 bits, and what dP is multiplied by to be dS: P, times the derivative of the softcap."""
    if inner is None:
        s = scores_to_base_2(s, scale, alibi, head, bounds_v, stage, key, past, S_L, CUT)
        p = gl.exp2(s - lse_v.index(stage).load(gl.SliceLayout(0, S_L))[None, :]).to(dtype)
        slope = p
    else:
        p, slope = capped_probabilities(
            s, lse_v, scale, inner, alibi, head, bounds_v, stage, key, past, S_L, CUT, dtype
        )  # fmt: skip
    return p, slope


@gluon.jit
def tile_at(tiles, which, i):
    """Return tile ``which`` of each piece, its address computed again in step i. ``i >> 30`` is 0, but ptxas does not
    know: it would move descriptors of tiles that stay in shared memory out of the loop, and run out of registers."""
    late = which + (i >> 30)
    return (tiles[0].index(late),) if len(tiles) == 1 else (tiles[0].index(late), tiles[1].index(late))


@gluon.jit
def keys_times_queries(a, b, stage, S_L: gl.constexpr, minus=None):
    """Issue the products of the keys (left operands, piece by piece of the columns) and the queries' tile in ``stage``,
    asynchronous, added to ``minus``, a number for each query."""
    ADDS: gl.constexpr = minus is not None
    x = gl.zeros([BN // 2, BM], gl.float32, S_L)
    if ADDS:
        x, _ = gl.broadcast(minus[None, :], x)
    x = warpgroup_mma(a[0], b[0].index(stage).permute((1, 0)), x, use_acc=ADDS, is_async=True)
    if len(a) == 2:
        x = warpgroup_mma(a[1], b[1].index(stage).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def accumulate(x, tiles, stage, sums):
    """Issue sums += x times the tile in ``stage``, asynchronous: one product per piece of its columns."""
    A_0: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums[0].type.layout, k_width=2)
    first = warpgroup_mma(gl.convert_layout(x, A_0), tiles[0].index(stage), sums[0], is_async=True)
    if len(sums) == 1:
        sums = (first,)
    else:
        A_1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums[1].type.layout, k_width=2)
        sums = (first, warpgroup_mma(gl.convert_layout(x, A_1), tiles[1].index(stage), sums[1], is_async=True))
    return sums


@gluon.jit
def wait_sums(pending: gl.constexpr, sums, x):
    """Wait until at most ``pending`` products are in flight; return the sums and their left operand."""
    if len(sums) == 1:
        first, x = warpgroup_mma_wait(pending, deps=[sums[0], x])
        sums = (first,)
    else:
        first, second, x = warpgroup_mma_wait(pending, deps=[sums[0], sums[1], x])
        sums = (first, second)
    return sums, x


@gluon.jit
def _sums(D: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    return gl.zeros([BN // 2, D], gl.float32, L)


@gluon.jit
def zero_sums(tiles):
    """Return sums of zero with the columns of these tiles."""
    return (_sums(tiles[0].shape[2]),) if len(tiles) == 1 else (_sums(tiles[0].shape[2]), _sums(tiles[1].shape[2]))


@gluon.jit
def _store_piece(ptr, x, head, stride_s, key, past, part, scale, SCALED: gl.constexpr, ADDS: gl.constexpr):
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, BN // 2, gl.SliceLayout(1, L)) + key
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    at = (head + rows.to(gl.int64) * stride_s)[:, None] + cols[None, :]
    if SCALED:
        x = x * scale
    if ADDS and (part > 0):
        x += gl.load(ptr + at, mask=(rows < past)[:, None], other=0.0)
    gl.store(ptr + at, x, mask=(rows < past)[:, None])


@gluon.jit
def store_sums(ptr, sums, head, stride_s, key, past, part, scale, SCALED: gl.constexpr, ADDS: gl.constexpr):
    """Store sums. ``ADDS``: all parts but the first add to memory."""
    _store_piece(ptr, sums[0], head, stride_s, key, past, part, scale, SCALED, ADDS)
    if len(sums) == 2:
        _store_piece(ptr + sums[0].shape[1], sums[1], head, stride_s, key, past, part, scale, SCALED, ADDS)


@gluon.jit
def boxes(desc, COUNT: gl.constexpr = 2):
    """Allocate shared memory for ``COUNT`` boxes of a descriptor."""
    SHAPE: gl.constexpr = [COUNT, 1, desc.block_type.shape[1], 1, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def positions_of(desc):
    """Allocate shared memory for the positions of the queries of two steps, or for nothing if ``desc`` is None."""
    if desc is None:
        tiles = ()
    else:
        tiles = (gl.allocate_shared_memory(gl.int32, [2, 1, desc.block_type.shape[1]], desc.layout),)  # type: ignore[assignment]
    return tiles


@gluon.jit
def alibi_of(slopes_ptr, slopes_stride, positions_k_ptr, positions_t):
    """Return the arguments of :func:`.scores.of_keys`."""
    alibi = ()
    if slopes_ptr is not None:
        ROW_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        positions_v = reinterpret(positions_t[0], gl.int32, [2, positions_t[0].shape[2]], ROW_L)
        alibi = (slopes_ptr, slopes_stride, positions_k_ptr, positions_v)  # type: ignore[assignment]
    return alibi


@gluon.jit
def _without_ones(tiles):
    """Return the same memory without the dimensions of length one that TMA needs."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tiles.shape[2], tiles.shape[4]], tiles.dtype)
    return reinterpret(tiles, tiles.dtype, [tiles.shape[0], tiles.shape[2], tiles.shape[4]], L)


@gluon.jit
def matrices(tiles):
    """Return each piece of the columns as (tiles, rows, columns)."""
    return (_without_ones(tiles[0]),) if len(tiles) == 1 else (_without_ones(tiles[0]), _without_ones(tiles[1]))


@gluon.jit
def allocate_staging(desc):
    """Allocate shared memory for one tile of dQ, from which TMA adds it to global memory."""
    return gl.allocate_shared_memory(gl.float32, [1, BM, 1, desc.block_type.shape[3]], desc.layout)


@gluon.constexpr_function
def _exchanged_layout(rows, columns):
    """Return the layout of a staged tile as TMA reads it (boxes of 32 columns, swizzled by 128 bytes), in which odd
    rows have exchanged columns c and c ^ 16."""

    def place(word):
        box, word = divmod(word, rows * 32)
        row, word = divmod(word, 32)
        return [row, (box * 32 + (word ^ 4 * (row & 7))) ^ 16 * (row & 1)]

    return gl.SharedLinearLayout([place(1 << b) for b in range((rows * columns - 1).bit_length())], alignment=1024)


@gluon.jit
def staging_matrix(tile):
    """Return the memory of :func:`allocate_staging` as a matrix for :func:`stage_dq`."""
    L: gl.constexpr = _exchanged_layout(tile.shape[1], tile.shape[3])
    return reinterpret(tile, gl.float32, [tile.shape[1], tile.shape[3]], L)


@gluon.jit
def stage_dq(dq_s, dq):
    """Store a tile of dQ for TMA without bank conflicts. Half a warp stores 32 bytes of each of four rows at a time;
    with TMA's swizzle alone two neighbouring rows would use the same banks."""
    dq_s.store(exchange_blocks(dq))
