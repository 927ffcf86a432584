"""Summation of contributions to gradients, each for a run of this rank's tokens, in a fixed order, in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import Launches, dispatch, on_device
from ..kernels.triton.primitives import bound
from ..memo import Memo

_TOKENS = 16

_launches = Launches()
_tables: Memo[Tensor] = Memo(256)


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


def piece_table(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return the pieces as a table for :func:`sum_runs`, which sums in their order.

    Call it outside of CUDA-graph capture: a new table is copied from the host. Equal tables are kept and shared.
    """
    key = (device, *pieces)
    columns = len(Piece._fields)
    return _tables.once(key, lambda: torch.tensor(pieces, dtype=torch.int64).reshape(-1, columns).to(device))


def sum_runs(table: Tensor, own: Tensor, landed: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the sums of all pieces into dk and dv, (batch, tokens, heads, head_dim or head_dim_v).

    The sum is made in the dtype of ``own`` and ``landed`` and rounded once.
    """
    batch, tokens, heads, dim = dk.shape
    if not dk.numel():
        return
    key = (dk.device, own.dtype, landed.dtype, dk.dtype, dk.shape, dk.stride(), dv.shape, dv.stride(), table.shape[0])
    tensors = (table, own, landed, dk, dv)
    with on_device(dk):
        if _launches.again(key, tensors):
            return
        launched = dispatch(
            _sum_runs, (triton.cdiv(tokens, _TOKENS) * batch * heads,), table, table.shape[0], own, landed,
            dk, *dk.stride()[:3], dv, *dv.stride()[:3], tokens, heads, dim,
            dv.shape[3], WIDTH=triton.next_power_of_2(dim + dv.shape[3]), TOKENS=_TOKENS,
        )  # fmt: skip
        _launches.remember(key, tensors, launched)


@triton.jit(do_not_specialize=["n_pieces", "tokens", "heads"])
def _sum_runs(
    table, n_pieces, own, landed, dk, dk_b, dk_s, dk_h, dv, dv_b, dv_s, dv_h, tokens, heads, dim, dim_v,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = own.dtype.element_ty
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, TOKENS)
    row = (pid // tiles).to(tl.int64)
    first = pid % tiles * TOKENS
    t = first + tl.arange(0, TOKENS)
    c = tl.arange(0, WIDTH)
    total = tl.zeros([TOKENS, WIDTH], DTYPE)
    for i in tl.range(0, bound(n_pieces)):
        begin = tl.load(table + 5 * i + 3)
        end = tl.load(table + 5 * i + 4)
        if (begin < first + TOKENS) & (end > first):
            memory = tl.where(tl.load(table + 5 * i) != 0, own.to(tl.int64), landed.to(tl.int64))
            base = (memory + tl.load(table + 5 * i + 1)).to(tl.pointer_type(DTYPE))
            stride = tl.load(table + 5 * i + 2)
            at = (t - begin) * (dim + dim_v)
            inside = ((t >= begin) & (t < end))[:, None] & (c < dim + dim_v)[None, :]
            total += tl.load(base + row * stride + at[:, None] + c[None, :], mask=inside, other=0.0)
    b, h, t = row // heads, row % heads, t.to(tl.int64)
    inside = (t < tokens)[:, None]
    to_k = dk + b * dk_b + h * dk_h + t[:, None] * dk_s + c[None, :]
    tl.store(to_k, total.to(dk.dtype.element_ty), mask=inside & (c < dim)[None, :])
    to_v = dv + b * dv_b + h * dv_h + t[:, None] * dv_s + (c - dim)[None, :]
    tl.store(to_v, total.to(dv.dtype.element_ty), mask=inside & ((c >= dim) & (c < dim + dim_v))[None, :])
