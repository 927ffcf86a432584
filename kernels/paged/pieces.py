"""Device functions of the paged kernels: the rows of a tile, and the sum of the pieces of one (row, key head).

A piece is the part of one (row of the step, key head) that one program attends to. It leaves its state in float32 in a
slot of scratch memory that no other piece has. The program whose piece arrives last adds all of them, in their order,
so that the bits do not depend on which one that is.

:func:`tree_depth` and :func:`store_result` make no tensor of their own, so that kernels in Gluon call them, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.primitives import LN2, LOG2E, bound


@triton.jit
def query_rows(block, NEW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the new token and the query head of its group for each row of a block of rows, and which rows exist."""
    r = block * ROWS + tl.arange(0, ROWS)
    return r // GROUP, r % GROUP, r < NEW * GROUP


@triton.jit
def tree_depth(bits, new):
    """Return the number of set bits below bit ``new``: the depth of this node."""
    x = bits & (((bits * 0 + 1) << new.to(tl.int64)) - 1)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def store_piece(pieces, slot, m, l, o, alive, ROWS: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr):
    """Store the state of a piece: (ROWS, DIM_V + 2) float32."""
    cols = tl.arange(0, DIM_V_P2)
    at = pieces + (slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)) * (DIM_V + 2)
    tl.store(at[:, None] + cols[None, :], o, mask=alive[:, None] & (cols < DIM_V)[None, :])
    tl.store(at + DIM_V, m, mask=alive)
    tl.store(at + DIM_V + 1, l, mask=alive)


@triton.jit
def sum_pieces(
    pieces, first, count, row, alive,
    ROWS: tl.constexpr, SOME: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, col=0,
):  # fmt: skip
    """Return (m, l, o) of SOME rows from ``row`` on and COLUMNS columns from ``col`` on: the sum of ``count`` pieces in
    neighbouring slots, AT_ONCE of them at a time so that their loads overlap. Other programs have stored them: read
    past the L1 cache."""
    cols, r, nth = col + tl.arange(0, COLUMNS), tl.arange(0, SOME), tl.arange(0, AT_ONCE)
    m = tl.full([SOME], float("-inf"), tl.float32)
    l = tl.zeros([SOME], tl.float32)
    o = tl.zeros([SOME, COLUMNS], tl.float32)
    for i in tl.range(0, bound(count), AT_ONCE):
        exists = (i + nth < count)[:, None] & alive[None, :]
        at = pieces + ((first + i + nth).to(tl.int64)[:, None] * ROWS + row + r[None, :]) * (DIM_V + 2)
        mi = tl.load(at + DIM_V, mask=exists, other=float("-inf"), cache_modifier=".cg")
        li = tl.load(at + DIM_V + 1, mask=exists, other=0.0, cache_modifier=".cg")
        inside = exists[:, :, None] & (cols < DIM_V)[None, None, :]
        oi = tl.load(at[:, :, None] + cols[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(mi, 0))
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, kept = tl.exp2(mi - reference[None, :]), tl.exp2(m - reference)
        l = l * kept + tl.sum(li * weight, 0)
        o = o * kept[:, None] + tl.sum(oi * weight[:, :, None], 0)
        m = m_new
    return m, l, o


@triton.jit
def store_result(
    m, l, o, out, lse, sink, row, new, head, alive, Q_HEADS, NEW: tl.constexpr, DIM_V: tl.constexpr, cols,
    CUT: tl.constexpr = True,
):  # fmt: skip
    """Store columns of a finished (m, l, o), with CUT those before DIM_V: with ``lse`` as out (batch, NEW, Q_HEADS,
    DIM_V) and lse (batch, Q_HEADS, NEW), with the sink; without it as a state (batch, NEW, Q_HEADS, DIM_V + 2)."""
    token = row.to(tl.int64) * NEW + new
    if CUT:
        inside = alive[:, None] & (cols < DIM_V)[None, :]
    if lse is None:
        at = out + (token * Q_HEADS + head) * (DIM_V + 2)
        tl.store(at[:, None] + cols[None, :], o, mask=inside if CUT else alive[:, None])
        tl.store(at + DIM_V, m, mask=alive)
        tl.store(at + DIM_V + 1, l, mask=alive)
    else:
        if sink is not None:
            logit = tl.load(sink + head, mask=alive, other=0.0).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, logit)
            kept = tl.exp2(m - m_new)
            l = l * kept + tl.exp2(logit - m_new)
            o = o * kept[:, None]
            m = m_new
        some = tl.where(l == 0, 1.0, l)
        at = out + (token * Q_HEADS + head) * DIM_V
        tl.store(
            at[:, None] + cols[None, :],
            (o / some[:, None]).to(out.dtype.element_ty),
            mask=inside if CUT else alive[:, None],
        )
        at = lse + (row.to(tl.int64) * Q_HEADS + head) * NEW + new
        tl.store(at, tl.where(l == 0, float("-inf"), (m + tl.log2(some)) * LN2), mask=alive)
