"""States and finished attention are joined in one pass over memory, in Triton (:meth:`.partial.Partial.add_`)."""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

from ...partial import Partial
from ..contract import Result
from ..launch import dispatch, on_device
from .strides import elements, numbers, stride_unit, strides_in

_TILE = 2048  # elements of a program


def join(total: Partial, part: tuple[Tensor, Tensor] | None, into: Result | None, fresh: bool) -> None:
    """Add out (batch, seq, heads, dim) and lse (batch, heads, seq) to a state, in its memory; or write the finished sum
    of both.

    Args:
        total: float32, the last dimension of ``o`` contiguous.
        part: None for the state alone.
        into: where the sum is written, else into ``total``; the last dimensions contiguous.
        fresh: ``total`` is uninitialized memory, and the part is the sum.
    """
    m, l, o = total
    batch, seq, heads, dim = o.shape
    if not o.numel():
        return
    out, lse = (None, None) if part is None else part
    result, result_lse = (None, None) if into is None else into
    dim_p2 = triton.next_power_of_2(dim)
    rows_of_tile = max(_TILE // dim_p2, 1)
    unit, tiles = stride_unit(m, l, o, out, lse, result, result_lse), triton.cdiv(seq, rows_of_tile)
    rows = [strides_in(unit, x) for x in (m, l, lse, result_lse)]
    # (batch, heads, seq) with contiguous rows, and (batch, seq, heads, dim)
    assert all(x is None or x.stride(-1) == 1 for x in (m, l, o, out, lse, result, result_lse))
    with on_device(o):
        dispatch(
            _join, (tiles * heads * batch,), m, *rows[0][:2], l, *rows[1][:2], o, *strides_in(unit, o),
            out, *strides_in(unit, out), lse, *rows[2][:2], result, *strides_in(unit, result),
            result_lse, *rows[3][:2], seq, heads, tiles, dim, FRESH=fresh, DIM=dim_p2,
            ROWS=rows_of_tile, UNIT=unit,
        )  # fmt: skip


@triton.jit(do_not_specialize=numbers("m_b m_h l_b l_h o_bsh x_bsh lse_b lse_h y_bsh y_lse_b y_lse_h seq heads tiles"))
def _join(
    m, m_b, m_h, l, l_b, l_h, o, o_b, o_s, o_h, x, x_b, x_s, x_h, lse, lse_b, lse_h, y, y_b, y_s, y_h,
    y_lse, y_lse_b, y_lse_h, seq, heads, tiles, dim,
    FRESH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """``x`` and ``lse``; ``y`` and ``y_lse``: None if there are none."""
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)  # heads of one row lie next to each other in memory
    b = (pid // heads // tiles).to(tl.int64)
    row = (pid // heads % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    exists = row < seq
    inside = exists[:, None] & (d < dim)[None, :]
    m += b * elements(m_b, UNIT) + h * elements(m_h, UNIT) + row
    l += b * elements(l_b, UNIT) + h * elements(l_h, UNIT) + row
    o += b * elements(o_b, UNIT) + h * elements(o_h, UNIT)
    at = o + row[:, None] * elements(o_s, UNIT) + d[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    if not FRESH:
        top = tl.load(m, mask=exists, other=float("-inf"))
        count = tl.load(l, mask=exists, other=0.0)
        total = tl.load(at, mask=inside, other=0.0)
    if x is not None:
        lse += b * elements(lse_b, UNIT) + h * elements(lse_h, UNIT) + row
        x += b * elements(x_b, UNIT) + h * elements(x_h, UNIT)
        new = tl.load(lse, mask=exists, other=float("-inf"))
        part = tl.load(x + row[:, None] * elements(x_s, UNIT) + d[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(top, new)
        reference = tl.where(largest == float("-inf"), 0.0, largest)  # empty + empty stays empty
        old_factor, factor = tl.exp(top - reference), tl.exp(new - reference)
        part = tl.where((new == float("-inf"))[:, None], 0.0, part)
        total = total * old_factor[:, None] + part * factor[:, None]
        count = count * old_factor + factor
        top = largest
    if y is None:
        tl.store(m, top, mask=exists)
        tl.store(l, count, mask=exists)
        tl.store(at, total, mask=inside)
    else:
        y_lse += b * elements(y_lse_b, UNIT) + h * elements(y_lse_h, UNIT) + row
        y += b * elements(y_b, UNIT) + h * elements(y_h, UNIT)
        nonempty = count != 0
        out = total / tl.where(nonempty, count, 1.0)[:, None]
        tl.store(y + row[:, None] * elements(y_s, UNIT) + d[None, :], out.to(y.dtype.element_ty), mask=inside)
        tl.store(y_lse, tl.where(nonempty, top + tl.log(count), float("-inf")), mask=exists)
