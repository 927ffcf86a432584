"""What the forward kernel for Hopper (forward.py) reads at the beginning of a query tile and stores at its end: out and
lse, a state (m, l, o), and sums that are flushed to memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..triton.primitives import LN2, LOG2E, LOG2E_REST
from .forward_pieces import INFO_LAYOUT, ROWS, finite, matrix_of, number_of, scaled
from .primitives import async_store


@gluon.jit
def _row_offsets(info, C: gl.constexpr, seq_q, q_heads, layout: gl.constexpr):
    """Return the offsets of the rows of consumer C in (batch, q_heads, seq_q), and which of them belong to the tile."""
    row = number_of(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, layout)
    first = (number_of(info, 6).to(gl.int64) * q_heads + number_of(info, 7)) * seq_q + row
    return first + rows, row + rows < number_of(info, 1)


@gluon.jit
def _values(ptr, info, C: gl.constexpr, seq_q, q_heads, D: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the values of consumer C in (batch, seq_q, q_heads, D), a tile W wide, and which of them
    belong to the query tile."""
    row = number_of(info, 0) + C * ROWS
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    ptr += ((number_of(info, 6).to(gl.int64) * seq_q + row) * q_heads + number_of(info, 7)) * D
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    inside = (row + rows < number_of(info, 1))[:, None]
    if D < W:
        inside = inside & (columns < D)[None, :]
    return (ptr + rows * (q_heads * D))[:, None] + columns[None, :], inside


@gluon.constexpr_function
def _vector_store_layout(width):
    """Return the layout of the sums of a product, (64, width), after four lanes have exchanged pairs of columns: each
    has eight in a row, which it stores by 16 bytes. By pairs it would store 4, and four lanes half a sector."""
    more = [[0, 1 << i] for i in range(5, width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *more],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def _store_values(ptr, x, info, C: gl.constexpr, seq_q, q_heads, D: gl.constexpr, layout: gl.constexpr):
    """Store the rows of consumer C, (64, columns), in the dtype there, from registers in this layout."""
    values, inside = _values(ptr, info, C, seq_q, q_heads, D, x.shape[1], layout)
    gl.store(values, gl.convert_layout(x.to(ptr.dtype.element_ty), layout), mask=inside)


@gluon.jit
def _enter_rows(slot, C: gl.constexpr, m_ptr, l_ptr, seq_q, q_heads, layout: gl.constexpr, some=True):
    """Return m of the carried state to the base 2, its rounding error, and a quarter of l for each lane of a quad."""
    rows, inside = _row_offsets(slot.load(INFO_LAYOUT), C, seq_q, q_heads, layout)
    inside = inside & some
    m_nat = gl.load(m_ptr + rows, mask=inside, other=float("-inf"))
    l = gl.load(l_ptr + rows, mask=inside, other=0.0)
    m = m_nat * LOG2E
    rest = gl.fma(m_nat, LOG2E_REST, gl.fma(m_nat, LOG2E, -m))
    return m, gl.where(m_nat == float("-inf"), 0.0, rest), l * 0.25


@gluon.jit
def enter(
    slot, C: gl.constexpr, m_ptr, l_ptr, o_ptr, seq_q, q_heads, D: gl.constexpr, W: gl.constexpr,
    rows_layout: gl.constexpr, layout: gl.constexpr, some=True,
):  # fmt: skip
    """Return the carried state of a query tile: m to the base 2, its rounding error, a quarter of l for each lane of a
    quad, and o; nothing seen unless ``some``."""
    m, rest, l = _enter_rows(slot, C, m_ptr, l_ptr, seq_q, q_heads, rows_layout, some)
    values, inside = _values(o_ptr, slot.load(INFO_LAYOUT), C, seq_q, q_heads, D, W, layout)
    return m, rest, l, gl.load(values, mask=inside & some, other=0.0)


@gluon.jit
def store(
    acc, m, l, slot, out_desc, out_ptr, lse_ptr, l_ptr, sink_ptr, o_s, seq_q, q_heads,
    C: gl.constexpr, DTYPE: gl.constexpr, D: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr,
    STAGED: gl.constexpr, S_ROW: gl.constexpr,
):  # fmt: skip
    """Store a query tile: as out, divided by l, and lse, or as the state."""
    O_L: gl.constexpr = acc.type.layout
    # An exchange goes through shared memory, which has no room where acc has a part of the columns.
    OUT_L: gl.constexpr = O_L if acc.shape[1] < D else _vector_store_layout(acc.shape[1])
    info = slot.load(INFO_LAYOUT)  # loaded again: in registers it would slow the steps down
    rows, inside = _row_offsets(info, C, seq_q, q_heads, S_ROW)
    l = gl.convert_layout(gl.sum(l, axis=1), S_ROW)
    factor = gl.full([ROWS], 1.0, gl.float32, S_ROW)
    if HAS_SINK:  # a key with this score and a value of zero
        sink = gl.load(sink_ptr + number_of(info, 7)) * LOG2E
        joined = gl.maximum(m, sink)
        factor = gl.exp2(m - finite(joined))
        l = l * factor + gl.exp2(sink - finite(joined))
        m = joined
    if FINALIZE:
        seen = l != 0.0
        lse = gl.where(seen, gl.fma(m, LN2, gl.log(l)), float("-inf"))
        gl.store(lse_ptr + rows, lse, mask=inside)
        factor = factor / gl.where(seen, l, 1.0)
        acc = scaled(acc, factor)
        if STAGED:
            row = number_of(info, 0) + C * ROWS
            past = number_of(info, 1)
            if (row + ROWS <= past) | (past == seq_q):  # TMA stops at the end of the tensor, not of a segment
                tma.store_wait(0)
                matrix_of(o_s, C).store(acc.to(DTYPE))
                fence_async_shared()
                async_store(out_desc, [number_of(info, 6), row, number_of(info, 7), 0], o_s.index(C))
            else:
                _store_values(out_ptr, acc, info, C, seq_q, q_heads, D, O_L)
        else:
            _store_values(out_ptr, acc, info, C, seq_q, q_heads, D, OUT_L)
    else:
        # As a natural logarithm m is rounded: adapt l and o to the rounded point of reference.
        m_nat = m * LN2
        exact = gl.exp2(gl.fma(m_nat, -LOG2E_REST, gl.fma(m_nat, -LOG2E, m)))
        exact = gl.where(m == float("-inf"), 1.0, exact)
        gl.store(lse_ptr + rows, m_nat, mask=inside)
        gl.store(l_ptr + rows, l * exact, mask=inside)
        _store_values(out_ptr, scaled(acc, factor * exact), info, C, seq_q, q_heads, D, O_L)


@gluon.jit
def scratch(ptr, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the flushed sums of consumer C: (CTAs, N, ROWS, W) float32, private to each thread."""
    row = (gl.program_id(0) * N + C) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return (ptr + row * W)[:, None] + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def with_flushed(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Return acc, whose point of reference is m, plus the flushed sum, whose point of reference is m_aside."""
    L: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    kept = gl.convert_layout(gl.exp2(m_aside - finite(m)), ROW)[:, None]
    any_aside = gl.convert_layout(m_aside, ROW)[:, None] != float("-inf")
    W: gl.constexpr = acc.shape[1]
    before = gl.load(scratch(aside_ptr, C, N, W, L), mask=any_aside, other=0.0)
    return before * kept + acc


@gluon.jit
def flush(acc, m, aside_ptr, m_aside, C: gl.constexpr, N: gl.constexpr):
    """Flush acc, whose point of reference is m: add it to the sum in memory. Return zeros and the sum's new m_aside."""
    L: gl.constexpr = acc.type.layout
    W: gl.constexpr = acc.shape[1]
    gl.store(scratch(aside_ptr, C, N, W, L), with_flushed(acc, m, aside_ptr, m_aside, C, N))
    return gl.zeros([ROWS, W], gl.float32, L), m
