"""What a backward begins with, in one pass over memory, in Triton: delta, dq = 0, and the rows' numbers for Hopper."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..contract import Outputs, Queries
from ..launch import dispatch, on_device
from .primitives import INTERPRETED, LOG2E
from .strides import elements, numbers, stride_unit, strides_in

_ROWS = 32


class Statistics(NamedTuple):
    """What the kernels for Hopper read of each row, (batch * heads * tiles, rows of a tile) float32: lse to the base 2
    minus ``shift``, and -delta. A row that sees nothing, or is past the end of the sequence, has lse = +inf, so that
    its p is 0."""

    lse: Tensor
    minus_delta: Tensor
    shift: float


def row_dot(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return the sums over the last dimension of ``out * dout``, minus dlse, (batch, heads, seq) float32.

    Both are (batch, seq, heads, dim) with any strides.
    """
    batch, seq, heads, _ = out.shape
    delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=out.device)
    _launch(Outputs(out, dlse), dout, delta, None, None, None)
    return delta


def begin_backward(queries: Queries, outputs: Outputs, dq: Tensor, statistics: Statistics | None = None) -> None:
    """Fill ``queries.delta``, whose last dimension is contiguous, and set dq to 0, float32 both; and fill the
    ``statistics``, in a launch that the next one need not wait for before it begins (``launch_pdl=True``)."""
    lse = None if statistics is None else queries.lse.contiguous()
    _launch(outputs, queries.dout, queries.delta, dq, lse, statistics)


def _launch(
    outputs: Outputs, dout: Tensor, delta: Tensor, dq: Tensor | None, lse: Tensor | None, statistics: Statistics | None
) -> None:
    """Launch the kernel for what is not None."""
    out, dlse = outputs
    batch, seq, heads, dim_v = out.shape
    if not delta.numel():
        return
    dlse = None if dlse is None else dlse.float().contiguous()
    padded, minus_delta, shift = (None, None, 0.0) if statistics is None else statistics
    with on_device(out):
        rows = seq if padded is None else padded.numel() // (batch * heads)
        tiles, unit = triton.cdiv(rows, _ROWS), stride_unit(out, dout, dq)
        dim, dq_d = (1, 1) if dq is None else (dq.shape[3], dq.stride(3))
        dispatch(
            _begin, (tiles * heads * batch,), out, *strides_in(unit, out), out.stride(3), dout,
            *strides_in(unit, dout), dout.stride(3), dlse, delta, *delta.stride()[:2], dq, *strides_in(unit, dq), dq_d,
            lse, padded, minus_delta, shift, seq, rows, heads, tiles, dim_v, dim,
            DIM_V_P2=triton.next_power_of_2(dim_v), DIM_P2=triton.next_power_of_2(dim), ROWS=_ROWS, UNIT=unit,
        )  # fmt: skip


@triton.jit
def lse_of_kernels(lse, shift):
    """Return :attr:`Statistics.lse` of these rows."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E - shift)


@triton.jit(do_not_specialize=numbers("out_bsh dout_bsh delta_b delta_h dq_bsh shift seq rows heads tiles"))
def _begin(
    out, out_b, out_s, out_h, out_d, dout, dout_b, dout_s, dout_h, dout_d, dlse, delta, delta_b, delta_h,
    dq, dq_b, dq_s, dq_h, dq_d, lse, padded, minus_delta, shift, seq, rows, heads, tiles, dim_v, dim,
    DIM_V_P2: tl.constexpr, DIM_P2: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """``dlse``, ``dq``; ``lse``, ``padded`` and ``minus_delta``: None if there are none. ``rows``: of a head of
    ``padded``, else ``seq``."""
    if padded is not None and not INTERPRETED:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)  # heads of one row lie next to each other in memory
    tile = pid // heads % tiles
    b = (pid // heads // tiles).to(tl.int64)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_V_P2).to(tl.int64)
    exists = row < seq
    inside = exists[:, None] & (d < dim_v)[None, :]
    out += b * elements(out_b, UNIT) + h * elements(out_h, UNIT)
    dout += b * elements(dout_b, UNIT) + h * elements(dout_h, UNIT)
    x = tl.load(out + row[:, None] * elements(out_s, UNIT) + d[None, :] * out_d, mask=inside, other=0.0)
    y = tl.load(dout + row[:, None] * elements(dout_s, UNIT) + d[None, :] * dout_d, mask=inside, other=0.0)
    if dq is not None:
        c = tl.arange(0, DIM_P2).to(tl.int64)
        dq += b * elements(dq_b, UNIT) + h * elements(dq_h, UNIT)
        at = dq + row[:, None] * elements(dq_s, UNIT) + c[None, :] * dq_d
        tl.store(at, tl.zeros([ROWS, DIM_P2], tl.float32), mask=exists[:, None] & (c < dim)[None, :])
    sums = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    head = b * heads + h
    if dlse is not None:
        sums -= tl.load(dlse + head * seq + row, mask=exists, other=0.0)
    tl.store(delta + b * delta_b.to(tl.int64) + h * delta_h.to(tl.int64) + row, sums, mask=exists)
    if padded is not None:
        m = tl.load(lse + head * seq + row, mask=exists, other=float("-inf"))
        tl.store(padded + head * rows + row, lse_of_kernels(m, shift), mask=row < rows)
        tl.store(minus_delta + head * rows + row, -sums, mask=row < rows)
