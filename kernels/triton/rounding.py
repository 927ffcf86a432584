"""What a backward ends with, in Triton: gradients in parts are added up and rounded, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import triton
import triton.language as tl

from ..launch import dispatch, on_device
from .primitives import bound
from .strides import elements, numbers, stride_unit, strides_in

_ROWS = 32


def sum_parts(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Write the sums over the first dimension of one or two tensors, (parts, batch, seq, heads, dim) float32, into
    others, (batch, seq, heads, dim) of any floating dtype. All differ in ``dim`` at most, and in strides; the last
    stride is 1."""
    count, batch, seq, heads, _ = parts[0].shape
    if not into[0].numel():
        return
    unit = stride_unit(*(x[0] for x in parts), *into)
    args = []
    for i in range(2):
        x, y = (parts[i], into[i]) if i < len(parts) else (None, None)
        one = None if x is None else x[0]
        args += [x, 0 if x is None else x.stride(0), *strides_in(unit, one), y, *strides_in(unit, y)]
    dims = [x.shape[-1] for x in into] + [1]
    tiles = triton.cdiv(seq, _ROWS)
    with on_device(into[0]):
        dispatch(
            _sum_parts, (tiles * heads * batch,), *args, count, seq, heads, tiles, dims[0], dims[1],
            DIM=triton.next_power_of_2(max(dims)), ROWS=_ROWS, UNIT=unit,
        )  # fmt: skip


@triton.jit
def _sum_tile(
    x, x_p, x_b, x_s, x_h, y, y_b, y_s, y_h, count, b, h, row, exists, dim, DIM: tl.constexpr, UNIT: tl.constexpr
):
    """Add up the parts of one tile of rows."""
    d = tl.arange(0, DIM)
    inside = exists[:, None] & (d < dim)[None, :]
    x += b * elements(x_b, UNIT) + h * elements(x_h, UNIT)
    at = x + row[:, None] * elements(x_s, UNIT) + d[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    for part in tl.range(1, bound(count)):
        total += tl.load(at + part * x_p.to(tl.int64), mask=inside, other=0.0)
    y += b * elements(y_b, UNIT) + h * elements(y_h, UNIT)
    tl.store(y + row[:, None] * elements(y_s, UNIT) + d[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=numbers("x_p x_bsh y_bsh u_p u_bsh w_bsh count seq heads tiles"))
def _sum_parts(
    x, x_p, x_b, x_s, x_h, y, y_b, y_s, y_h, u, u_p, u_b, u_s, u_h, w, w_b, w_s, w_h, count, seq, heads, tiles,
    dim, dim_u, DIM: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """``u``, ``w``: None if there is only one tensor."""
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)
    b = (pid // heads // tiles).to(tl.int64)
    row = (pid // heads % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < seq
    _sum_tile(x, x_p, x_b, x_s, x_h, y, y_b, y_s, y_h, count, b, h, row, exists, dim, DIM, UNIT)
    if u is not None:
        _sum_tile(u, u_p, u_b, u_s, u_h, w, w_b, w_s, w_h, count, b, h, row, exists, dim_u, DIM, UNIT)
