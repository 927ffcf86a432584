"""rowsum(dout * out) in one pass over memory, in Triton; every backward starts with it."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..launch import Launches, dispatch, on_device

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
            tiles = triton.cdiv(seq, _ROWS)
            launched = dispatch(
                _row_dot, (tiles * heads * batch,), out, *out.stride(), dout, *dout.stride(), delta, seq, heads, tiles,
                dim, DIM_P2=triton.next_power_of_2(dim), ROWS=_ROWS,
            )  # fmt: skip
            _launches.remember(key, tensors, launched)
    return delta


@triton.jit(do_not_specialize=["seq", "heads", "tiles"])
def _row_dot(
    x, x_b, x_s, x_h, x_d, y, y_b, y_s, y_h, y_d, delta, seq, heads, tiles, dim,
    DIM_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)  # heads of one row lie next to each other in memory
    tile = pid // heads % tiles
    b = (pid // heads // tiles).to(tl.int64)
    s = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_P2).to(tl.int64)
    inside = (s < seq)[:, None] & (d < dim)[None, :]
    a = tl.load(x + b * x_b + h * x_h + s[:, None] * x_s + d[None, :] * x_d, mask=inside, other=0.0)
    c = tl.load(y + b * y_b + h * y_h + s[:, None] * y_s + d[None, :] * y_d, mask=inside, other=0.0)
    tl.store(delta + (b * heads + h) * seq + s, tl.sum(a.to(tl.float32) * c.to(tl.float32), 1), mask=s < seq)
