"""What the paged kernels for Hopper share: refusals, and in Gluon shares of the tiles, rows of queries, sums of pieces.

The division of the work and the pieces are those of :mod:`.attend`, and :mod:`.pieces` has the like in Triton. Scores
and maxima are to the base 2. Contract: operands.py.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..contract import LONGEST_SUM, Score
from ..hopper.tensor_maps import readable
from ..launch import capability, multiprocessors
from ..triton.primitives import ScoreArguments
from .operands import Call, Pool, Tables, tile_size
from .pieces import tree_depth

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of a warpgroup's threads; Triton 3.6 has the second name

# ---------------------------------------------------------------- host


def declined(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call, tile: int, blocks: int = 1) -> str | None:
    """Return None if these kernels can run, as far as that does not follow from dtypes and head dims, otherwise the
    reason.

    Args:
        blocks: tiles of rows that run side by side.
    """
    if tile_size(pool.page_size) != tile:
        return f"pages of {pool.page_size} slots; it has multiples of {tile}"
    if score.alibi_slopes is not None or score.softmax_scale <= 0:
        return "ALiBi, or a scale that is not positive"
    if call.fixed_split:
        return "fixed_split"
    if capability(q.device) != (9, 0):
        return f"device {q.device} does not have compute capability 9.0"
    for name, x in (("k", pool.k), ("v", pool.v), ("k_scale", pool.k_scale), ("v_scale", pool.v_scale)):
        if x is not None and not readable(x):
            return f"{name} with strides {tuple(x.stride())} is not laid out in steps of 16 bytes, as TMA needs"
    keys = tables.table.shape[1] * pool.page_size
    programs = max(1, multiprocessors(q.device) // max(1, blocks))
    if keys > LONGEST_SUM and len(q) * pool.k.shape[0] * keys > LONGEST_SUM * programs:
        return f"sums of more than {LONGEST_SUM} keys in a program"
    return None


def scale_and_cap(score: Score) -> tuple[float, float | None]:
    """Return the factor of scores to the base 2, and that of products inside of the tanh of a softcap, if there is
    one."""
    s = ScoreArguments.of(score)
    return (s.cap, s.scale) if s.SOFTCAP else (s.scale, None)


# ---------------------------------------------------------------- the division of work


@gluon.jit
def share_of(tiles_ptr, batch, HEADS: gl.constexpr, BATCH_P2: gl.constexpr, STEP: gl.constexpr = 1):
    """Return this CTA's share of the list of tiles: (first, past, tiles of a share, first unit, past the last unit),
    and whether a row sees nothing. A unit is a (row, key head, tile of query rows); a share is a multiple of STEP."""
    # With 4 numbers for each thread, no sum crosses warps.
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    nth = gl.arange(0, BATCH_P2, L)
    past_of = gl.load(tiles_ptr + 1 + nth, mask=nth < batch, other=2**31 - 1)
    first_of = gl.load(tiles_ptr + nth, mask=nth < batch, other=0)
    empty = gl.max(gl.where((past_of == first_of) & (nth < batch), 1, 0), axis=0)
    total = gl.load(tiles_ptr + batch) * HEADS
    programs = gl.num_programs(0)
    per = gl.maximum((total + programs * STEP - 1) // (programs * STEP), 1) * STEP
    share = gl.program_id(0) * per
    past = gl.minimum(share + per, total)
    last = gl.maximum(past - 1, 0)
    row = gl.sum(gl.where(past_of <= share // HEADS, 1, 0), axis=0)
    last_row = gl.sum(gl.where(past_of <= last // HEADS, 1, 0), axis=0)
    unit = row * 0
    past_unit = row * 0
    if share < past:
        t = gl.load(tiles_ptr + row)
        unit = row * HEADS + (share - t * HEADS) // (gl.load(tiles_ptr + row + 1) - t)
        t = gl.load(tiles_ptr + last_row)
        past_unit = last_row * HEADS + (last - t * HEADS) // (gl.load(tiles_ptr + last_row + 1) - t) + 1
    return share, past, per, unit, past_unit, empty


@gluon.jit
def part_of(u, share, past, tiles_ptr, HEADS: gl.constexpr):
    """Return the part of unit u in a share: (row, first tile of the unit in the list, its tiles, lo, hi)."""
    b = u // HEADS
    t = gl.load(tiles_ptr + b)
    count = gl.load(tiles_ptr + b + 1) - t
    base = t * HEADS + (u % HEADS) * count
    lo = gl.maximum(share, base) - base
    hi = gl.minimum(past, base + count) - base
    return b, base, count, lo, hi


# ---------------------------------------------------------------- rows and their pieces


@gluon.jit
def query_rows(block, NEW: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Return the new token and the query head of its group for each row of a block of rows, and which rows exist."""
    r = block * ROWS + gl.arange(0, ROWS, L)
    return r // GROUP, r % GROUP, r < NEW * GROUP


@gluon.jit
def intervals(
    starts_ptr, ends_ptr, tree_ptr, b, new, alive, first_new, NEW: gl.constexpr, ROWS: gl.constexpr,
    TREE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return which new tokens each row sees, as bits of a tree, its slots ``[s0, s1)``, and those ``[full_first,
    full_past)`` that every row sees."""
    bits = gl.zeros([ROWS], gl.int64, L)
    depth = new
    last = new
    if TREE:
        bits = gl.load(tree_ptr + b * NEW + new, mask=alive, other=0)
        depth = tree_depth(bits, new)
        last = new * 0 + NEW - 1
    s0 = gl.load(starts_ptr + b * NEW + depth, mask=alive, other=0)
    s1 = gl.load(ends_ptr + b * NEW + last, mask=alive, other=0)
    full_first = gl.max(gl.where(alive, s0, 0), axis=0)
    full_past = gl.min(gl.where(alive, s1, 2**31 - 1), axis=0)
    if TREE:
        full_past = gl.minimum(full_past, first_new)
    return bits, s0, s1, full_first, full_past


@gluon.jit
def capped(s, inner):
    """Return tanh(s * inner)."""
    x = s * inner
    e = gl.exp2(gl.abs(x) * -2.8853900817779268)
    t = (1 - e) / (1 + e)
    return gl.where(x < 0, -t, t)


@gluon.jit
def finite(m):
    """Return m as a point of reference: 0 where nothing was seen, so that -inf - m stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.constexpr_function
def sum_layout(count, rows, dim, warps):
    """Return the layout of ``count`` pieces (count, rows, dim) of which a warp has whole runs of 64 numbers: rows go to
    different warps, then halves of the columns, then pieces."""
    of_rows = min(rows, warps)
    of_columns = min(max(dim // 64, 1), warps // of_rows)
    of_pieces = warps // of_rows // of_columns
    return gl.BlockedLayout([max(count // of_pieces, 1), 1, 2], [1, 1, 32], [of_pieces, of_rows, of_columns], [2, 1, 0])


@gluon.jit
def sum_pieces(
    pieces_ptr, first, count, alive, ROWS: gl.constexpr, SOME: gl.constexpr, DV: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Return (m, l, o) of the first SOME rows: the sum of pieces in neighbouring slots, AT_ONCE at a time. All loads of
    o are on their way before the first is needed; each warp reads m and l once, its lanes those of different pieces."""
    L: gl.constexpr = sum_layout(AT_ONCE, SOME, DV, gl.num_warps())
    PAIR: gl.constexpr = gl.SliceLayout(2, L)
    ML: gl.constexpr = gl.BlockedLayout([1, SOME], [32, 1], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(0, ML)
    OF_O: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L))
    nth = gl.arange(0, AT_ONCE, gl.SliceLayout(1, PAIR))
    r = gl.arange(0, SOME, gl.SliceLayout(0, PAIR))
    cols = gl.arange(0, DV, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    nth_ml = gl.arange(0, AT_ONCE, gl.SliceLayout(1, ML))
    exists_o = gl.convert_layout(alive, gl.SliceLayout(0, PAIR))
    exists_ml = gl.convert_layout(alive, ROW)
    m = gl.full([SOME], float("-inf"), gl.float32, ROW)
    l = gl.zeros([SOME], gl.float32, ROW)
    o = gl.zeros([SOME, DV], gl.float32, gl.SliceLayout(0, L))
    for i in range(0, count, AT_ONCE):
        at = pieces_ptr + ((first + i + nth_ml).to(gl.int64)[:, None] * ROWS + gl.arange(0, SOME, ROW)[None, :]) * (
            DV + 2
        )
        exists = (i + nth_ml < count)[:, None] & exists_ml[None, :]
        mi = gl.load(at + DV, mask=exists, other=float("-inf"), cache_modifier=".cg")
        li = gl.load(at + DV + 1, mask=exists, other=0.0, cache_modifier=".cg")
        at = pieces_ptr + ((first + i + nth).to(gl.int64)[:, None] * ROWS + r[None, :]) * (DV + 2)
        exists = (i + nth < count)[:, None] & exists_o[None, :]
        oi = gl.load(at[:, :, None] + cols[None, None, :], mask=exists[:, :, None], other=0.0, cache_modifier=".cg")
        top = gl.maximum(m, gl.max(mi, axis=0))
        reference = finite(top)
        weight = gl.exp2(mi - reference[None, :])
        kept = gl.exp2(m - reference)
        l = l * kept + gl.sum(li * weight, axis=0)
        o = o * gl.convert_layout(kept, OF_O)[:, None] + gl.sum(
            oi * gl.convert_layout(weight, PAIR)[:, :, None], axis=0
        )
        m = top
    return gl.convert_layout(m, OF_O), gl.convert_layout(l, OF_O), o
