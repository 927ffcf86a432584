"""Device functions that the backward kernels for Hopper share.

Tiles, in one piece or in two pieces side by side (96 and 192 columns, which are no power of two, and 256), products and
sums over them, the producer, the writer of head dims 64, 96 and 128, and the order in which programs visit tiles.
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

from . import scores
from .backward_arguments import Keys, Place, Tiles
from .backward_programs import allocate_programs, announced
from .primitives import (
    async_load,
    barrier_arrive,
    barrier_sync,
    barriers,
    buffer_of,
    bytes_of,
    exchange_blocks,
    fence_async_global,
    hide_columns,
    load_pieces,
    look_at,
    numbers_in_shared_memory,
    raise_counter,
    raise_when_sent,
    reinterpret,
    round_pairs,
    tiles_like,
    tma_reduce_add,
    wait_count,
    wait_for_launch_before,
    wait_row,
)

BM = gl.constexpr(64)  # queries of a step; backward_d64.py has more
BN = gl.constexpr(128)  # keys of a CTA; 64 in backward_d256.py, and of tiles in registers
INFO = gl.constexpr(8)  # int32 numbers that describe a key tile, see tile_scheduler.key_tile_table

# Numbers that vary with lengths and documents: one compiled kernel for all of them. (So do ``heads`` and ``parts``, but
# they cost registers; there are few of them, which are compiled together.)
NUMBERS = ("tiles", "kv_heads", "batches", "q_tiles", "epoch", "segments", "sweep", "slopes_stride", "descending")
COUNTS = ("heads", "parts")  # kernels are compiled for 1 of them, and not for multiples of 16

LOADERS = gl.constexpr(288)  # threads at a barrier of both consumers and the producer
PAIR = gl.constexpr(256)  # both consumers
STAGING = gl.constexpr(160)  # one consumer and its writer
# Named barriers of head dims up to 192, the first ones: half of dS written (two per consumer), Q and dO read, dQ staged
# and sent. Those of the kernel for pairs of CTAs are in its file.
BARRIERS = DS_READY, Q_FREE, DO_FREE, DQ_STAGED, DQ_SENT = tuple(gl.constexpr(i) for i in (4, 8, 10, 12, 14))
S_L = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM.value, 16]))


@gluon.jit
def keys_descend(grid, program):
    """Return whether key tiles add to dQ from the last to the first, see :func:`wait_for_turn`."""
    return program < grid.descending


@gluon.jit
def place(grid):
    """Return the :class:`Place` of the program of this CTA, if it has only one."""
    return place_of(grid, gl.program_id(0) // grid.CTAS)


@gluon.jit
def place_of(grid, program):
    """Return the :class:`Place` of a program: ``grid.sweep`` parts are walked at the same time, tile by tile."""
    inside = program % (grid.sweep * grid.tiles)
    row = program // (grid.sweep * grid.tiles) * grid.sweep + inside % grid.sweep
    tile = inside // grid.sweep
    if (grid.descending is not None) and keys_descend(grid, program):
        tile = grid.tiles - 1 - tile
    batch = row // (grid.parts * grid.kv_heads)
    info = grid.info_ptr + _described(grid, batch, tile) * INFO
    return Place(program, row, tile, batch, row // grid.parts % grid.kv_heads, row % grid.parts, info)


@gluon.jit
def _described(grid, batch, tile):
    """Return the row of the table of key tiles that describes this one."""
    row = tile
    if grid.BATCHED:
        row += batch * grid.tiles
    return row


@gluon.jit
def _turns_of(turns_ptr, grid, at):
    """Return the address of the counter of stored parts of this program's group, one per key tile of a key head."""
    return turns_ptr + (at.row // grid.parts * grid.tiles + at.tile)


@gluon.jit
def signal_sent(sent: gl.constexpr, last, gradients, grid, at):
    """Signal to a writer's consumer, at barrier ``sent``, that the staged tile has been read. Before the ``last``
    signal wait until all consumers of the previous part have stored: parts add to the same dk and dv in order, so that
    these have the same bits on every run. The previous part has a smaller program number and has started earlier."""
    if (gradients.turns_ptr is not None) and last:
        wait_count(_turns_of(gradients.turns_ptr, grid, at), 2 * grid.CTAS * at.part, 0)
        barrier_sync(sent, STAGING, warps=1)  # not arrive: sync alone is documented to order memory
    else:
        barrier_arrive(sent, STAGING, warps=1)


@gluon.jit
def finish_writer(staged: gl.constexpr, gradients, grid, at):
    """End a writer, after barrier ``staged`` with its consumer, which has stored: signal to the next part, or after the
    last part raise the completion counter of dk and dv. In the writer, because it would cost the consumer registers."""
    if gradients.turns_ptr is not None or gradients.counters_ptr is not None:
        barrier_sync(staged, STAGING, warps=1)
    if gradients.turns_ptr is not None:
        raise_counter(_turns_of(gradients.turns_ptr, grid, at), "gpu")
    if (gradients.counters_ptr is not None) and (at.part == grid.parts - 1):
        chunk = at.row // gl.maximum(grid.parts, grid.sweep)  # rows of keys that complete together
        raise_counter(gradients.counters_ptr + (chunk * gradients.segments + gl.load(at.info + 7)), "sys")


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
def ordered_visits(info, heads, descend):
    """Return the order of the query tiles where the sums of dQ have one: from the first to the last if keys
    ``descend`` (:func:`wait_for_turn`), else from the last to the first, each for every head before the next one. If a
    head came after the other, one program would be done first with its part of the first head under a causal mask, and
    wait at the second.

    Returns: steps of all heads, the steps at which the full tiles begin and end, the first tile, and what the number
        of a tile grows by to the next one, 1 or -1."""
    begin = gl.load(info + 2)
    end = gl.load(info + 3)
    full_begin = gl.load(info + 4)
    full_end = gl.load(info + 5)
    cut, late, first = end - full_end, end - full_begin, end - 1
    if descend:
        cut, late, first = full_begin - begin, full_end - begin, begin
    return (end - begin) * heads, cut * heads, late * heads, first, gl.where(descend, 1, -1)


@gluon.jit
def ordered_next(j, head, stride, first_head, heads):
    """Return the tile and the head of the next step; ``first_head``: that of this program."""
    head += 1
    if head == first_head + heads:
        head = first_head
        j += stride
    return j, head


@gluon.jit
def next_head(alibi, head, inside, steps_of_head, heads, ORDERED: gl.constexpr = False):
    """Return the number of the head of the next step, counted from 0, and its steps before that one; unchanged without
    ALiBi. ``ORDERED``: a step of each head, by turns (:func:`ordered_visits`)."""
    if len(alibi) > 0:
        if ORDERED:
            head += 1
            if head == heads:
                head = 0
        else:
            inside += 1
            if inside == steps_of_head:
                inside = 0
                head += 1
    return head, inside


@gluon.jit
def turn_at(order, grid, row, ends_row, j, rank, C: gl.constexpr):
    """Return the turn of a key tile at tile j of queries of ``row`` (batch element and query head), for
    :func:`wait_for_turn` and :func:`end_turn`: the counter of the key tiles that have added to it, how many come before
    this one, and what the counter says now. Both loads arrive while the previous tile is sent. Next to the last tile
    there may be none: that turn is not taken.

    Args:
        rank: of the key tile, in the order of the keys; -1: no query sees it, and it takes no turns.
    """
    j = gl.minimum(gl.maximum(j, 0), grid.q_tiles - 1)
    counter = order.sums_ptr + ((row.to(gl.int64) * grid.q_tiles + j) * 2 + C)
    end = gl.load(order.ends_ptr + ends_row + j)
    before = gl.where(rank < 0, 0, gl.maximum(rank - end, end - rank))
    return counter, before, look_at(counter)


@gluon.jit
def wait_for_turn(turn):
    """Wait, in a writer, until all key tiles before this one have added to a tile of dQ; :func:`end_turn` of its
    previous turn comes between the look at the counter and this, and its fence orders what the look has seen.

    Key tiles add in the order of the programs: a program waits for programs with smaller numbers, which have started
    earlier, and so for none that waits for it. That order is the one of the keys, or the opposite, with the queries the
    other way round (``tile_scheduler.order_of_sums``):

    * From the first key to the last, queries from the last to the first: all programs begin with the same queries, so
      program n waits n turns at first and never again: it stays behind its predecessor. But under a causal mask each
      program has fewer steps than its predecessor, so the processors of later programs become free first, and their
      next programs wait again. At any time all programs read and add to the same few tiles.
    * From the last key to the first, queries from the first to the last: under a causal mask or a window, tile n of
      keys begins at queries that n + 1 does not see, and stays behind it: no program waits. But the longest tiles of a
      head come last, and programs read and add to tiles all over their heads, which must fit into L2."""
    counter, before, seen = turn
    wait_count(counter, before, seen)
    fence_async_global()


@gluon.jit
def end_turn(turn, rank):
    """Wait until what this warp has sent is in memory, and let the next key tile add."""
    if rank >= 0:
        raise_when_sent(turn[0])


@gluon.jit
def writer(
    C: gl.constexpr, staged: gl.constexpr, sent: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr,
    COLUMN: gl.constexpr, dq_desc, dq_s, grid, gradients, order, programs,
):  # fmt: skip
    """Send dQ for consumer C. Head dims 64, 96 and 128.

    Args:
        staged, sent: barriers of consumer 0; those of consumer 1 are the next ones.
        ROWS: queries of a step. ROW, COLUMN: where what consumer 1 sends begins in the tile of dQ.
        order: None if key tiles add in any order.
        programs: :class:`.backward_programs.Programs`; empty if the CTA has one program.
    """
    if len(programs) == 0:
        _send_dq(C, staged, sent, ROWS, ROW, COLUMN, dq_desc, dq_s, grid, gradients, order, place(grid), 0, False)
    else:
        n = 0
        program = announced(programs, n, 1)
        while program >= 0:
            at = place_of(grid, program)
            _send_dq(C, staged, sent, ROWS, ROW, COLUMN, dq_desc, dq_s, grid, gradients, order, at, n, True)
            n += 1
            program = announced(programs, n, 1)


@gluon.jit
def _send_dq(
    C: gl.constexpr, staged: gl.constexpr, sent: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr,
    COLUMN: gl.constexpr, dq_desc, dq_s, grid, gradients, order, at, n, ONE_OF_SEVERAL: gl.constexpr,
):  # fmt: skip
    """Send the dQ of each step of program n two steps later. What the first one stages is nothing, and before that
    nothing is staged, which a consumer with several programs does not say. That the last dQ has been sent is awaited
    before dk and dv are stored, if something is signalled then, or else by the first step of the next program."""
    SIGNALS: gl.constexpr = gradients.turns_ptr is not None or gradients.counters_ptr is not None
    steps, cut_steps, _, j, onward = visits_of(at, grid)
    if order is not None:
        rank = gl.load(at.info + 6)
        rows = at.batch * (grid.kv_heads * grid.parts * grid.heads)
        ends_row = gl.where(keys_descend(grid, at.program), grid.q_tiles, 0)
        if grid.BATCHED:
            ends_row += at.batch * (2 * grid.q_tiles)
    first = first_head_of(grid, at)
    head = first
    if not ONE_OF_SEVERAL:
        barrier_sync(staged + C, STAGING, warps=1)
    if SIGNALS or not ONE_OF_SEVERAL or n == 0:
        barrier_arrive(sent + C, STAGING, warps=1)
    barrier_sync(staged + C, STAGING, warps=1)
    barrier_arrive(sent + C, STAGING, warps=1)
    if order is not None:
        counter, before, seen = turn_at(order, grid, rows + head, ends_row, j, rank, C)
        turn = counter, before, gl.minimum(seen, -1)  # no fence after this look
    for i in range(0, steps):
        if order is not None:
            wait_for_turn(turn)
        barrier_sync(staged + C, STAGING, warps=1)
        tma_reduce_add(dq_desc, [at.batch, j * ROWS + C * ROW, head, C * COLUMN], dq_s)
        j, head = visit_after(i, j, head, first, cut_steps, onward, grid)
        if order is not None:
            sending = turn
            turn = turn_at(order, grid, rows + head, ends_row, j, rank, C)
        tma.store_wait(0)
        signal_sent(sent + C, i == steps - 1, gradients, grid, at)
        if order is not None:
            end_turn(sending, rank)
    finish_writer(staged + C, gradients, grid, at)


@gluon.jit
def producer(grid, descs, tiles, arrival):
    """Load K and V, in as many tiles of 64 keys as ``kv_full`` has barriers, then the queries."""
    BYTES: gl.constexpr = bytes_of(descs.k) + bytes_of(descs.v) + bytes_of(descs.seen)
    KEY_TILES: gl.constexpr = tiles.kv_full.shape[0]
    at = place(grid)
    first = gl.load(at.info)
    visits = visits_of(at, grid)
    wait_for_keys(arrival, grid, at)
    for c in gl.static_range(KEY_TILES):
        full = tiles.kv_full.index(c)
        mbarrier.expect(full, BYTES)
        load_pieces(descs.k, [at.batch, first + c * (BN // 2), at.kv_head], full, tiles.k, c)
        _load_seen(descs, tiles, full, grid, at, c, c)
        load_pieces(descs.v, [at.batch, first + c * (BN // 2), at.kv_head], full, tiles.v, c)
    load_queries(grid, at, visits, descs, tiles, Q_FREE, DO_FREE)


@gluon.jit
def _load_seen(descs, tiles, full, grid, at, half, i):
    """Load the interval of queries that see each of the 64 keys of ``half`` of a key tile, as mask i."""
    if len(descs.seen) > 0:
        row = _described(grid, at.batch, at.tile) * 2 + half
        async_load(descs.seen[0], [row, 0], full, tiles.seen[0].index(i))


@gluon.jit
def load_k(descs, tiles, full, grid, at, first, i):
    """Load the keys of a program, those from ``first`` on, into tiles i and i + 1 of 64 of them."""
    mbarrier.expect(full, 2 * (bytes_of(descs.k) + bytes_of(descs.seen)))
    for c in gl.static_range(2):
        load_pieces(descs.k, [at.batch, first + c * (BN // 2), at.kv_head], full, tiles.k, i + c)
        _load_seen(descs, tiles, full, grid, at, c, i + c)


@gluon.jit
def load_v(descs, tiles, full, at, first):
    """Load the values of a program, into tiles 0 and 1."""
    mbarrier.expect(full, 2 * bytes_of(descs.v))
    for c in gl.static_range(2):
        load_pieces(descs.v, [at.batch, first + c * (BN // 2), at.kv_head], full, tiles.v, c)


@gluon.jit
def wait_for_keys(arrival, grid, at):
    """Wait, in one warp, until the keys and values of this program's key head have arrived."""
    if arrival.flags_ptr is not None:
        wait_row(at.batch * grid.kv_heads + at.kv_head, arrival, 1)


@gluon.jit
def visits_of(at, grid):
    """Return the visits of a key tile, for :func:`load_queries`: before anything is waited for.

    Returns: steps of all heads, the steps at which the full tiles begin and end, the first tile, and what
        :func:`ordered_next` or :func:`next_tile` goes on by."""
    if grid.descending is not None:
        steps, cut_steps, late_steps, j, onward = ordered_visits(at.info, grid.heads, keys_descend(grid, at.program))
    else:
        steps, cut_steps, j, onward = visit_order(at.info, grid.heads)
        late_steps = steps
    return steps, cut_steps, late_steps, j, onward


@gluon.jit
def load_queries(grid, at, visits, descs, tiles, q_free: gl.constexpr, dout_free: gl.constexpr):
    """Load Q and dO, and what belongs to them, of every step."""
    DO_STAGES: gl.constexpr = tiles.dout[0].shape[0]
    steps, cut_steps, late_steps, j, onward = visits
    wait_for_launch_before()  # which makes lse, delta, and zeros in dq, which is added to after these loads
    first = first_head_of(grid, at)
    head = first
    for i in range(0, steps):
        stage, _ = buffer_of(i, 2)
        do_stage, _ = buffer_of(i, DO_STAGES)
        if i >= 2:
            barrier_sync(q_free + stage, LOADERS, warps=1)
        load_q(i, j, head, cut_steps, late_steps, stage, grid, at, descs, tiles)
        if i >= DO_STAGES:
            barrier_sync(dout_free + do_stage, LOADERS, warps=1)
        load_dout(j, head, do_stage, grid, at, descs, tiles)
        j, head = visit_after(i, j, head, first, cut_steps, onward, grid)


@gluon.jit
def first_head_of(grid, at):
    """Return the first query head of a program."""
    return (at.kv_head * grid.parts + at.part) * grid.heads


@gluon.jit
def visit_after(i, j, head, first_head, cut_steps, onward, grid):
    """Return the tile and the head of the step after step i."""
    if grid.descending is not None:
        j, head = ordered_next(j, head, onward, first_head, grid.heads)
    else:
        j, head = next_tile(i, j, head, cut_steps, grid.heads, onward)
    return j, head


@gluon.jit
def _row(j, head, grid, at):
    """Return the row of lse and delta: a tile of queries of one head."""
    return (at.batch * (grid.kv_heads * grid.parts * grid.heads) + head) * grid.q_tiles + j


@gluon.jit
def load_q(i, j, head, cut_steps, late_steps, stage, grid, at, descs, tiles):
    """Load Q and lse of step i of a program, with ALiBi the positions, and what :func:`hide` reads of a cut tile."""
    ROWS: gl.constexpr = descs.lse.block_type.shape[1]
    BYTES: gl.constexpr = bytes_of(descs.q) + bytes_of(descs.positions) + descs.lse.block_type.nbytes
    bounds_row = 0
    if grid.BATCHED:
        bounds_row = at.batch * grid.q_tiles
    cut = i < cut_steps
    if grid.descending is not None:
        cut |= i >= late_steps
    full = tiles.q_full.index(stage)
    if len(descs.seen) > 0:
        if cut:
            first_query = gl.full([1], j * ROWS, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
            tiles.seen[1].index(stage).store(first_query)
        mbarrier.expect(full, BYTES)
    elif cut:
        mbarrier.expect(full, BYTES + bytes_of(descs.bounds))
        async_load(descs.bounds[0], [bounds_row + j, 0], full, tiles.bounds[0].index(stage))
    else:
        mbarrier.expect(full, BYTES)
    load_pieces(descs.q, [at.batch, j * ROWS, head], full, tiles.q, stage)
    async_load(descs.lse, [_row(j, head, grid, at), 0], full, tiles.lse.index(stage))
    if len(descs.positions) > 0:
        async_load(descs.positions[0], [j, 0], full, tiles.positions[0].index(stage))


@gluon.jit
def load_dout(j, head, stage, grid, at, descs, tiles):
    """Load dO and delta of a step."""
    ROWS: gl.constexpr = descs.lse.block_type.shape[1]
    full = tiles.dout_full.index(stage)
    mbarrier.expect(full, bytes_of(descs.dout) + descs.delta.block_type.nbytes)
    load_pieces(descs.dout, [at.batch, j * ROWS, head], full, tiles.dout, stage)
    async_load(descs.delta, [_row(j, head, grid, at), 0], full, tiles.delta.index(stage))


@gluon.jit
def keys_of(score, positions, grid, at, first, past, key, S_L: gl.constexpr, which=0):
    """Return the :class:`Keys` from ``key`` on, of a key tile that has those from ``first`` to before ``past``."""
    alibi = ()
    if score.slopes_ptr is not None:
        positions_k_ptr, head = score.positions_k_ptr, first_head_of(grid, at)
        base = scores.middle(gl.load(positions_k_ptr + first), gl.load(positions_k_ptr + past - 1))
        mine = gl.load(positions_k_ptr + key + gl.arange(0, BN // 2, gl.SliceLayout(1, S_L)))
        slope_ptr = score.slopes_ptr + at.batch * score.slopes_stride + head
        alibi = (slope_ptr, base, scores.relative(mine, base), positions[0])  # type: ignore[assignment]
    return Keys(key, past, alibi, which)


@gluon.jit
def hide(s, tiles, stage, keys, HIDDEN: gl.constexpr = float("-inf"), SKIP: gl.constexpr = True):
    """Return s, whose rows are keys, with ``HIDDEN`` where a query of this stage does not see the key: by the interval
    of keys that each query sees, or of queries that see each key. ``SKIP``: see :func:`.primitives.hide_columns`."""
    S_L: gl.constexpr = s.type.layout
    if len(tiles.seen) > 0:
        seen, first_query = tiles.seen
        first = gl.sum(first_query.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        begin = seen.index(2 * keys.which).load(gl.SliceLayout(1, S_L))
        end = seen.index(2 * keys.which + 1).load(gl.SliceLayout(1, S_L))
        s = hide_columns(s, begin - first, end - first, HIDDEN, SKIP)
    else:
        from_key = tiles.bounds[0].index(2 * stage).load(gl.SliceLayout(0, S_L))
        to_key = gl.minimum(tiles.bounds[0].index(2 * stage + 1).load(gl.SliceLayout(0, S_L)), keys.past)
        key = gl.arange(0, BN // 2, gl.SliceLayout(1, S_L)) + keys.first
        visible = (key[:, None] >= from_key[None, :]) & (key[:, None] < to_key[None, :])
        s = gl.where(visible, s, HIDDEN)
    return s


@gluon.jit
def scores_to_base_2(s, score, keys, tiles, stage, head, CUT: gl.constexpr):
    """Return scores without softcap to the base 2. Only those of plain products may be hidden before they are scaled,
    which is faster: by a negative scale -inf would become +inf. ``head``: see :func:`.scores.penalties_of_step`."""
    S_L: gl.constexpr = s.type.layout
    PLAIN: gl.constexpr = len(keys.alibi) == 0
    if CUT and PLAIN:
        s = hide(s, tiles, stage, keys, float("-inf"), False)
    s = s * score.scale
    if not PLAIN:
        s = s - scores.penalties_of_step(keys.alibi, head, stage, S_L)
    if CUT and not PLAIN:
        s = hide(s, tiles, stage, keys, float("-inf"), False)
    return s


# Hides a score of Changes.fixed: those, their lse and the logarithm of P's factor are far above it, so that its P is 0;
# but its derivative is a number, and 0 times that is 0.
HIDDEN_AND_FINITE = gl.constexpr(-1024.0)


@gluon.jit
def capped_probabilities(
    s, score, keys, tiles, stage, head, CUT: gl.constexpr, dtype: gl.constexpr, FUSED: gl.constexpr = True,
    SHORT: gl.constexpr = True,
):  # fmt: skip
    """Return P of scores with softcap, and P times the derivative of the softcap, both in 16 bits. ``FUSED``: fewer
    registers, except at head dim 64, where tiles are twice as wide. ``SHORT``: also by the short polynomial, if
    scale and inner are not constants."""
    S_L: gl.constexpr = s.type.layout
    ONE: gl.constexpr = scores.square_of_scale(score.inner)
    if scores.is_fixed(score.inner) and FUSED and not CUT:
        offset = tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
        p, slope = scores.probabilities_of_capped(s, offset, score.inner)
    else:
        if scores.is_fixed(score.inner):
            t = scores.scaled_and_capped(s, score.inner)
            unit = 1.0
            if CUT and not FUSED:
                t = hide(t, tiles, stage, keys, HIDDEN_AND_FINITE)
        else:
            t = scores.capped(s, score.inner, SHORT)
            unit = score.scale
        if FUSED:
            offset, _ = gl.broadcast(tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :], t)
            if len(keys.alibi) > 0:
                offset = offset + scores.penalties_of_step(keys.alibi, head, stage, S_L)
            if CUT:
                offset = hide(offset, tiles, stage, keys, float("inf"))
            p, slope = scores.probabilities(t, unit, offset, dtype, ONE)
        else:
            s = t * unit
            if len(keys.alibi) > 0:
                s = s - scores.penalties_of_step(keys.alibi, head, stage, S_L)
            if CUT and not scores.is_fixed(score.inner):
                s = hide(s, tiles, stage, keys)
            p32 = gl.exp2(s - tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :])
            p = round_pairs(p32, dtype)
            slope = round_pairs(p32 * gl.fma(-t, t, ONE), dtype)
    return p, slope


@gluon.jit
def probabilities(s, score, keys, tiles, stage, head, CUT: gl.constexpr, dtype: gl.constexpr):
    """Return P in 16 bits, and what dP is multiplied by to be dS: P, times the derivative of the softcap."""
    if score.inner is None:
        s = scores_to_base_2(s, score, keys, tiles, stage, head, CUT)
        p = gl.exp2(s - tiles.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :]).to(dtype)
        slope = p
    else:
        p, slope = capped_probabilities(s, score, keys, tiles, stage, head, CUT, dtype)
    return p, slope


@gluon.jit
def tile_at(tiles, which, i):
    """Return tile ``which`` of each piece, its address computed again in step i. ``i >> 30`` is 0, but ptxas does not
    know: it would move descriptors of tiles that stay in shared memory out of the loop, and run out of registers."""
    late = which + (i >> 30)
    return [tile.index(late) for tile in tiles]


@gluon.jit
def keys_times_queries(a, b, stage, minus=None):
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
    return [_sums(tile.shape[2]) for tile in tiles]


@gluon.jit
def _offsets(head, stride_s, keys, WIDTH: gl.constexpr, L: gl.constexpr):
    """Return the offsets of a consumer's keys in dk or dv, (64, WIDTH) int64 in layout L, and which of the rows belong
    to its key tile, (64, 1)."""
    rows = gl.arange(0, BN // 2, gl.SliceLayout(1, L)) + keys.first
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    return (head + rows.to(gl.int64) * stride_s)[:, None] + cols[None, :], (rows < keys.past)[:, None]


@gluon.jit
def _store(ptr, x, buffer, head, stride_s, keys):
    """Store sums, (64, columns) float32, in the dtype there. Rounded ones go by way of shared memory and leave by 16
    bytes: from the registers of a product a lane would store 4, and four lanes half a sector of memory."""
    WIDTH: gl.constexpr = x.shape[1]
    X_L: gl.constexpr = x.type.layout
    if ptr.dtype.element_ty == gl.float32:
        at, inside = _offsets(head, stride_s, keys, WIDTH, X_L)
        gl.store(ptr + at, x, mask=inside)
    else:
        LANES: gl.constexpr = WIDTH // 8  # of a row
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        tile = buffer if buffer.shape[1] == WIDTH else buffer.slice(0, WIDTH, dim=1)
        tile.store(x.to(ptr.dtype.element_ty))
        at, inside = _offsets(head, stride_s, keys, WIDTH, L)
        gl.store(ptr + at, tile.load(L), mask=inside)


@gluon.jit
def _store_piece(ptr, last_ptr, x, scale, buffer, head, stride_s, keys, part, parts, IN_TURNS: gl.constexpr):
    L: gl.constexpr = x.type.layout
    if scale is not None:
        x = x * scale
    if IN_TURNS and (part > 0):
        at, inside = _offsets(head, stride_s, keys, x.shape[1], L)
        x += gl.load(ptr + at, mask=inside, other=0.0)
    if (last_ptr is not None) and (part == parts - 1):
        _store(last_ptr, x, buffer, head, stride_s, keys)
    else:
        _store(ptr, x, buffer, head, stride_s, keys)


@gluon.jit
def head_of_gradients(gradients, at):
    """Return the offset of a key head in dk and dv. Each part of a group has its own, unless they take turns."""
    buffer = at.batch
    if gradients.turns_ptr is None:
        buffer = at.part * gradients.batches + at.batch
    return buffer.to(gl.int64) * gradients.stride_b + at.kv_head.to(gl.int64) * gradients.stride_h


@gluon.jit
def store_sums(to, sums, scale, buffer, head, gradients, grid, at, keys):
    """Store sums ``to`` a field of ``gradients``, times ``scale`` if it is not None, and rounded to the dtype there.

    Args:
        buffer: tiles in shared memory that nothing reads any more, (64, columns) in the dtype of k, one for each piece
            of the columns, at least as wide; pieces may share one.
        head: :func:`head_of_gradients`. Where the parts of a group take turns, all but the first one add to memory."""
    IN_TURNS: gl.constexpr = gradients.turns_ptr is not None
    ptr, last_ptr = to
    stride_s = gradients.stride_s
    _store_piece(ptr, last_ptr, sums[0], scale, buffer[0], head, stride_s, keys, at.part, grid.parts, IN_TURNS)
    if len(sums) == 2:
        WIDTH: gl.constexpr = sums[0].shape[1]
        ptr += WIDTH
        if last_ptr is not None:
            last_ptr += WIDTH
        _store_piece(ptr, last_ptr, sums[1], scale, buffer[1], head, stride_s, keys, at.part, grid.parts, IN_TURNS)


@gluon.jit
def allocate(descs, dq_descs, DS_TILES: gl.constexpr, DOUT: gl.constexpr = 2, SEVERAL: gl.constexpr = False):
    """Allocate shared memory for tiles as TMA moves them, and mbarriers: two of each, but ``DS_TILES`` halves of dS,
    ``DOUT`` tiles of dO, and a tile of dQ for each of ``dq_descs``. ``SEVERAL``: a CTA has several programs."""
    dtype: gl.constexpr = descs.k[0].dtype
    ROWS: gl.constexpr = descs.lse.block_type.shape[1]
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN // 2, ROWS], dtype)
    KEY_TILES: gl.constexpr = 4 if SEVERAL else 2
    return Tiles(
        k=boxes(descs.k, KEY_TILES),
        v=boxes(descs.v),
        q=boxes(descs.q),
        dout=boxes(descs.dout, DOUT),
        ds=gl.allocate_shared_memory(dtype, [DS_TILES, BN // 2, ROWS], DS_L) if DS_TILES > 0 else (),
        dq=[allocate_staging(desc) for desc in dq_descs],
        lse=tiles_like(descs.lse, 2),
        delta=tiles_like(descs.delta, 2),
        bounds=boxes(descs.bounds),
        positions=boxes(descs.positions),
        kv_full=barriers(2),
        q_full=barriers(2),
        dout_full=barriers(2),
        programs=allocate_programs() if SEVERAL else (),
        seen=() if len(descs.seen) == 0 else (tiles_like(descs.seen[0], KEY_TILES), numbers_in_shared_memory(2)),
    )


@gluon.jit
def initialize(tiles):
    """Initialize the mbarriers of :func:`allocate`."""
    for i in gl.static_range(2):
        mbarrier.init(tiles.kv_full.index(i), count=1)
        mbarrier.init(tiles.q_full.index(i), count=1)
        mbarrier.init(tiles.dout_full.index(i), count=1)


@gluon.jit
def boxes(descs, COUNT: gl.constexpr = 2):
    """Allocate shared memory for ``COUNT`` boxes of each descriptor."""
    return [tiles_like(desc, COUNT) for desc in descs]


@gluon.jit
def _without_ones(tiles):
    """Return the same memory without the dimensions of length one that TMA needs."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tiles.shape[2], tiles.shape[4]], tiles.dtype)
    return reinterpret(tiles, tiles.dtype, [tiles.shape[0], tiles.shape[2], tiles.shape[4]], L)


@gluon.jit
def _matrices(tiles):
    """Return each piece of the columns as (tiles, rows, columns)."""
    return [_without_ones(piece) for piece in tiles]


@gluon.jit
def _vectors(x, WIDTH: gl.constexpr):
    """Return rows of numbers as (rows, WIDTH)."""
    COUNT: gl.constexpr = x.shape[0] * x.shape[2] // WIDTH
    return reinterpret(x, x.dtype, [COUNT, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def matrices(tiles, dq):
    """Return the tiles as consumers use them: matrices for products, rows of one number per query, and ``dq``."""
    ROWS: gl.constexpr = tiles.lse.shape[2]
    bounds = [_vectors(x, ROWS) for x in tiles.bounds]
    seen = () if len(tiles.seen) == 0 else (_vectors(tiles.seen[0], BN // 2), tiles.seen[1])
    return Tiles(
        k=_matrices(tiles.k),
        v=_matrices(tiles.v),
        q=_matrices(tiles.q),
        dout=_matrices(tiles.dout),
        ds=tiles.ds,
        dq=dq,
        lse=_vectors(tiles.lse, ROWS),
        delta=_vectors(tiles.delta, ROWS),
        positions=[_vectors(x, ROWS) for x in tiles.positions],
        bounds=bounds,
        seen=seen,
        kv_full=tiles.kv_full,
        q_full=tiles.q_full,
        dout_full=tiles.dout_full,
        programs=tiles.programs,
    )


@gluon.jit
def allocate_staging(desc):
    """Allocate shared memory for one tile of dQ, from which TMA adds it to global memory."""
    return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


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


@gluon.jit
def begin(C: gl.constexpr, ds, layout: gl.constexpr):
    """Store zeros as consumer C's half of dS of step -1, and say so."""
    QUERIES: gl.constexpr = ds.shape[2]
    zeros = gl.zeros([BN // 2, QUERIES], ds.dtype, layout)
    ds.index(ds.shape[0] - 2 + C).store(zeros)
    fence_async_shared()
    barrier_arrive(DS_READY + 1 + 2 * C, PAIR)


@gluon.jit
def scores_of_step(i, k, tiles):
    """Issue S^T of step i, unscaled: (64 keys, 64 queries), asynchronous."""
    stage, phase = buffer_of(i, 2)
    mbarrier.wait(tiles.q_full.index(stage), phase)
    return keys_times_queries(k, tiles.q, stage)


@gluon.jit
def stage(dq, dq_s, scale, sent):
    """Store a tile of dQ, times ``scale`` if it is not None, when its writer has sent the one before (a barrier)."""
    if scale is not None:
        dq = dq * scale
    barrier_sync(sent, STAGING)
    stage_dq(dq_s, dq)


@gluon.jit
def send(dq, dq_s, scale, sent, staged):
    """Do so, and tell the writer, at barrier ``staged``."""
    stage(dq, dq_s, scale, sent)
    fence_async_shared()
    barrier_arrive(staged, STAGING)
