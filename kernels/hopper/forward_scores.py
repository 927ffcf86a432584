"""What a consumer of the forward kernels for Hopper (forward.py, forward_pair.py) does with a tile of scores: what it
hides, softcap and ALiBi, softmax, and P in 16 bits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.primitives import LOG2E
from . import alibi_product
from .forward_pieces import INFO_LAYOUT, ROWS, finite, number_of, scaled
from .primitives import hide_columns, scale_rows
from .scores import capped, middle, penalties, relative, scaled_and_capped

SLACK = gl.constexpr(8.0)  # the most that a score may exceed its point of reference, to the base 2


@gluon.jit
def span_of(slot, BN: gl.constexpr):
    """Return whether there is a query tile, its last key tile and its span."""
    info = slot.load(INFO_LAYOUT)
    begin = number_of(info, 2)
    end = gl.maximum(number_of(info, 5), begin + BN)
    return number_of(info, 0) >= 0, end - BN, begin, number_of(info, 3), number_of(info, 4)


@gluon.jit
def intervals_of(slot, C: gl.constexpr, start_ptr, end_ptr, rows_batch_stride, layout: gl.constexpr):
    """Return the first and past-the-last key that each row of consumer C sees."""
    info = slot.load(INFO_LAYOUT)
    row = number_of(info, 0) + C * ROWS + gl.arange(0, ROWS, layout)
    inside = row < number_of(info, 1)
    row_start = gl.load(start_ptr + number_of(info, 6) * rows_batch_stride + row, mask=inside, other=0)
    row_end = gl.load(end_ptr + number_of(info, 6) * rows_batch_stride + row, mask=inside, other=0)
    return row_start, row_end


@gluon.jit
def alibi_of(slot, C: gl.constexpr, alibi, c2, BN: gl.constexpr, layout: gl.constexpr):
    """Return what scores of a query tile need for ALiBi: positions of its rows, slope, the position that they are
    relative to and where the positions of keys are, then what :func:`alibi_product.of_rows` adds; nothing if there is
    no ALiBi."""
    if len(alibi) > 0:
        slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr, even = alibi
        info = slot.load(INFO_LAYOUT)
        row = number_of(info, 0)
        latest = number_of(info, 1) - 1
        slope = gl.load(slopes_ptr + number_of(info, 6) * slopes_stride + number_of(info, 7)) * LOG2E
        base = middle(gl.load(positions_q_ptr + row), gl.load(positions_q_ptr + latest))
        row += C * ROWS
        rows = relative(gl.load(positions_q_ptr + row + gl.arange(0, ROWS, layout)), base)
        alibi = (rows, slope, base, positions_k_ptr)
        if len(even) > 0:
            lowest = gl.load(positions_q_ptr + gl.minimum(row, latest))
            highest = gl.load(positions_q_ptr + gl.minimum(row + ROWS - 1, latest))
            alibi = alibi_product.of_rows(rows, slope, base, positions_k_ptr, c2, even, lowest, highest, BN)
    return alibi


@gluon.jit
def changed(s, c2, changes, column, FIXED: gl.constexpr):
    """Return scores after softcap and ALiBi, and what they are times, to the base 2."""
    inner, alibi = changes
    if FIXED is not None:
        return scaled_and_capped(s, FIXED), 1.0
    s = capped(s, inner)
    if alibi_product.is_product(alibi):
        s = alibi_product.taken_off(s, alibi, column)
    elif len(alibi) > 0:
        rows, slope, base, positions_k_ptr = alibi
        columns = gl.load(positions_k_ptr + column + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))
        s = s * c2 - penalties(slope, rows, relative(columns, base))
        c2 = 1.0
    return s, c2


@gluon.jit
def hide(s, column, start, end):
    """Return s with -inf where the row does not see the key. ``column``: the tile's first key."""
    return hide_columns(s, start - column, end - column)


@gluon.jit
def row_max(s, CHAINS: gl.constexpr):
    """Return the maximum of each row. A thread finds that of its numbers one after the other, or, for a power of two
    ``CHAINS``, in twice as many chains of instructions of which none waits for another."""
    if CHAINS == 1:
        return gl.max(s, axis=1)
    columns = gl.reshape(s, [s.shape[0], CHAINS, s.shape[1] // (8 * CHAINS), 4, 2])
    top = gl.max(gl.max(gl.max(gl.max(columns, axis=2), axis=1), axis=2), axis=1)
    return gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def softmax(s, m, l, rest, c2, part, slack: gl.constexpr, FIXED: gl.constexpr, CHAINS: gl.constexpr = 1):
    """Move m to the maximum if that is more than ``slack`` above it; alpha rescales earlier sums. ``rest``: the
    rounding error of m, see ``enter``. ``part``: what is added to all scores of a row, or nothing. ``FIXED``: m stays
    0. ``CHAINS``: see :func:`row_max`."""
    L_L: gl.constexpr = l.type.layout
    if FIXED is not None:
        x = gl.exp2(s)
        return m, l + gl.convert_layout(lane_sum(x), L_L), m, x
    top = row_max(s, CHAINS) * c2
    if len(part) > 0:
        top = top + part[0]
    m_new = gl.where(top - m > slack, top, m)
    reference = finite(m_new)
    alpha = gl.exp2(m - reference + rest)
    if len(part) > 0:
        reference = reference - part[0]
    x = gl.exp2(s * c2 - reference[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, L_L))[:, None] + gl.convert_layout(lane_sum(x), L_L)
    return m_new, l, alpha, x


@gluon.jit
def lane_sum(p):
    """Return the sums of each lane of a quad: (R, N) in wgmma layout -> (R, 4). Without a shuffle: the quad is summed
    once per query tile."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def rescaled(acc, alpha, FIXED: gl.constexpr):
    if FIXED is None:
        acc = scale_rows(acc, alpha)
    return acc


@gluon.jit
def seen_from_zero(acc, m, l, FINALIZE: gl.constexpr):
    """Return acc, m and l of sums whose point of reference is 0, with m = -inf for a row that sees nothing. A state
    gets an m that is near the largest score, which is a power of two away: l and o stay exact."""
    total = gl.convert_layout(gl.sum(l, axis=1), m.type.layout)
    if not FINALIZE:
        L_L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        m = gl.floor(gl.log2(gl.where(total == 0.0, 1.0, total)))
        l = l * gl.convert_layout(gl.exp2(-m), L_L)[:, None]
        acc = scaled(acc, gl.exp2(-m))
    return acc, gl.where(total == 0.0, float("-inf"), m), l


@gluon.jit
def pack(low, high, dtype: gl.constexpr):
    """Return the float32 numbers of :func:`pairs` as int32 of 16-bit pairs. A loop that carries 16-bit elements holds
    halves of registers and needs a PRMT for each pair before the wgmma."""
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    return x


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2]), layout)
