"""Summation of contributions to gradients, each for a run of this rank's tokens, in a fixed order, in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import dispatch, on_device
from ..kernels.triton.primitives import bound
from ..kernels.triton.strides import elements, stride_unit, strides_in
from .tile_lists import TileTable, tile_table

TOKENS = 16  # of a tile


class Piece(NamedTuple):
    """Contributions to the tokens from ``begin`` to ``end``.

    Attributes:
        own: 1 if they are in the memory ``own``, 0 if they are in ``landed``.
        offset: where they begin there, in bytes; each has head_dim + head_dim_v numbers.
        stride: numbers from one row (batch element and head) to the next.
    """

    own: int
    offset: int
    stride: int
    begin: int
    end: int


def sum_table(pieces: Sequence[Piece], tokens: int, device: torch.device) -> TileTable:
    """Return the pieces of the sums of ``tokens`` tokens for :func:`sum_runs`, which adds them up in their order."""
    return tile_table(pieces, [(piece.begin, piece.end) for piece in pieces], tokens, TOKENS, device)


def sum_runs(table: TileTable, own: Tensor, landed: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the sums of all pieces into dk and dv, (batch, tokens, heads, head_dim or head_dim_v).

    The sum is made in the dtype of ``own`` and ``landed`` and rounded once.
    """
    batch, tokens, heads, dim = dk.shape
    if not dk.numel():
        return
    with on_device(dk):
        unit = stride_unit(dk, dv)
        dispatch(
            _sum_runs, (triton.cdiv(tokens, TOKENS) * batch * heads,), *table, own, landed,
            dk, *strides_in(unit, dk), dv, *strides_in(unit, dv), tokens, heads, dim,
            dv.shape[3], WIDTH=triton.next_power_of_2(dim + dv.shape[3]), TOKENS=TOKENS, UNIT=unit,
        )  # fmt: skip


@triton.jit(do_not_specialize=["dk_b", "dk_s", "dk_h", "dv_b", "dv_s", "dv_h", "tokens", "heads"])
def _sum_runs(
    edges, pieces, own, landed, dk, dk_b, dk_s, dk_h, dv, dv_b, dv_s, dv_h, tokens, heads, dim, dim_v,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = own.dtype.element_ty
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, TOKENS)
    row = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    t = tile * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, WIDTH)
    total = tl.zeros([TOKENS, WIDTH], DTYPE)
    for i in tl.range(bound(tl.load(edges + tile)), bound(tl.load(edges + tile + 1))):
        piece = pieces + 5 * i
        memory = tl.where(tl.load(piece) != 0, own.to(tl.int64), landed.to(tl.int64))
        base = (memory + tl.load(piece + 1)).to(tl.pointer_type(DTYPE))
        stride, begin, end = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
        at = (t - begin) * (dim + dim_v)
        inside = ((t >= begin) & (t < end))[:, None] & (c < dim + dim_v)[None, :]
        total += tl.load(base + row * stride + at[:, None] + c[None, :], mask=inside, other=0.0)
    b, h, t = row // heads, row % heads, t.to(tl.int64)
    inside = (t < tokens)[:, None]
    to_k = dk + b * elements(dk_b, UNIT) + h * elements(dk_h, UNIT) + t[:, None] * elements(dk_s, UNIT) + c[None, :]
    tl.store(to_k, total.to(dk.dtype.element_ty), mask=inside & (c < dim)[None, :])
    to_v = dv + b * elements(dv_b, UNIT) + h * elements(dv_h, UNIT) + t[:, None] * elements(dv_s, UNIT)
    to_v += (c - dim)[None, :]
    tl.store(to_v, total.to(dv.dtype.element_ty), mask=inside & ((c >= dim) & (c < dim + dim_v))[None, :])
