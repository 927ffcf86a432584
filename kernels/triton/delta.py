"""rowsum(dout * out) in one pass over memory, in Triton; every backward starts with it."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..launch import Launches, dispatch, on_device
from .strides import elements, stride_unit, strides_in

_ROWS = 32

_launches = Launches()


def row_dot(out: Tensor, dout: Tensor) -> Tensor:
    """Return the sums over the last dimension of ``out * dout``, (batch, heads, seq) float32.

    Both are (batch, seq, heads, dim) with any strides.
    """
    batch, seq, heads, dim = out.shape
    delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=out.device)
    if delta.numel():
        key = (out.device, out.dtype, dout.dtype, out.shape, out.stride(), dout.stride())
        tensors = (out, dout, delta)
        with on_device(out):
            if _launches.again(key, tensors):
                return delta
            tiles, unit = triton.cdiv(seq, _ROWS), stride_unit(out, dout)
            launched = dispatch(
                _row_dot, (tiles * heads * batch,), out, *strides_in(unit, out), out.stride(3),
                dout, *strides_in(unit, dout), dout.stride(3), delta, seq, heads, tiles,
                dim, DIM_P2=triton.next_power_of_2(dim), ROWS=_ROWS, UNIT=unit,
            )  # fmt: skip
            _launches.remember(key, tensors, launched)
    return delta


@triton.jit(do_not_specialize=["x_b", "x_s", "x_h", "y_b", "y_s", "y_h", "seq", "heads", "tiles"])
def _row_dot(
    x, x_b, x_s, x_h, x_d, y, y_b, y_s, y_h, y_d, delta, seq, heads, tiles, dim,
    DIM_P2: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)  # heads of one row lie next to each other in memory
    tile = pid // heads % tiles
    b = (pid // heads // tiles).to(tl.int64)
    s = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_P2).to(tl.int64)
    inside = (s < seq)[:, None] & (d < dim)[None, :]
    x += b * elements(x_b, UNIT) + h * elements(x_h, UNIT)
    y += b * elements(y_b, UNIT) + h * elements(y_h, UNIT)
    a = tl.load(x + s[:, None] * elements(x_s, UNIT) + d[None, :] * x_d, mask=inside, other=0.0)
    c = tl.load(y + s[:, None] * elements(y_s, UNIT) + d[None, :] * y_d, mask=inside, other=0.0)
    tl.store(delta + (b * heads + h) * seq + s, tl.sum(a.to(tl.float32) * c.to(tl.float32), 1), mask=s < seq)
