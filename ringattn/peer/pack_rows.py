"""Packing of keys and values from (batch, tokens, heads, head_dim) into rows (batch, heads, tokens, head_dim +
head_dim_v), in Triton. One pass writes two copies: all tokens, for other ranks to pull, and the runs that this rank
needs itself, to their places among the keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import Launches, dispatch, on_device
from ..kernels.triton.primitives import bound
from ..memo import Memo

_TOKENS = 32

_launches = Launches()
_tables: Memo[Tensor] = Memo(256)


def run_table(runs: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return runs of tokens, each (offset, length, first place in ``own``), as a table for :func:`pack_rows`.

    Call it outside of CUDA-graph capture: a new table is copied from the host. Equal tables are kept and shared.
    """
    key = (device, *runs)
    return _tables.once(key, lambda: torch.tensor(runs, dtype=torch.int32).reshape(-1, 3).to(device))


def pack_rows(k: Tensor, v: Tensor, whole: Tensor, own: Tensor, table: Tensor) -> None:
    """Write k and v into ``whole``, and some runs of tokens into ``own``.

    Args:
        k, v: (batch, tokens, heads, head_dim) and (..., head_dim_v), the last dimension contiguous.
        whole: (batch, heads, tokens, head_dim + head_dim_v), contiguous.
        own: (batch, heads, keys, head_dim + head_dim_v), contiguous.
        table: any number of disjoint runs, see :func:`run_table`.
    """
    batch, tokens, heads, dim = k.shape
    if not k.numel():
        return
    key = (k.device, k.dtype, v.dtype, k.shape, k.stride(), v.shape, v.stride(), own.shape, table.shape[0])
    tensors = (k, v, whole, own, table)
    with on_device(k):
        if _launches.again(key, tensors):
            return
        launched = dispatch(
            _pack_rows, (heads * triton.cdiv(tokens, _TOKENS) * batch,), k, *k.stride()[:3], v, *v.stride()[:3],
            whole, own, table, table.shape[0], tokens, heads, own.shape[2], dim, v.shape[3],
            DIM=triton.next_power_of_2(dim), DIM_V=triton.next_power_of_2(v.shape[3]), TOKENS=_TOKENS,
        )  # fmt: skip
        _launches.remember(key, tensors, launched)


@triton.jit(do_not_specialize=["n_runs", "tokens", "heads", "keys"])
def _pack_rows(
    k, k_b, k_s, k_h, v, v_b, v_s, v_h, whole, own, table, n_runs, tokens, heads, keys, dim, dim_v,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, TOKENS)
    h = pid % heads  # neighbouring programs read heads of the same tokens, which are neighbours in memory
    b = (pid // heads // tiles).to(tl.int64)
    t = pid // heads % tiles * TOKENS + tl.arange(0, TOKENS)
    t64 = t.to(tl.int64)[:, None]
    inside = (t < tokens)[:, None]
    row = b * heads + h
    width = dim + dim_v
    d_k, d_v = tl.arange(0, DIM)[None, :], tl.arange(0, DIM_V)[None, :]
    x_k = tl.load(k + b * k_b + t64 * k_s + h.to(tl.int64) * k_h + d_k, mask=inside & (d_k < dim), other=0.0)
    x_v = tl.load(v + b * v_b + t64 * v_s + h.to(tl.int64) * v_h + d_v, mask=inside & (d_v < dim_v), other=0.0)
    # Places in own, computed here so that k and v are loaded at the same time.
    t = t[:, None]
    place = tl.full([TOKENS, 1], -1, tl.int32)
    for i in tl.range(0, bound(n_runs)):
        offset, length, first = tl.load(table + 3 * i), tl.load(table + 3 * i + 1), tl.load(table + 3 * i + 2)
        place = tl.where((t >= offset) & (t < offset + length), first + t - offset, place)
    to_whole = whole + (row * tokens + t64) * width
    tl.store(to_whole + d_k, x_k, mask=inside & (d_k < dim))
    tl.store(to_whole + dim + d_v, x_v, mask=inside & (d_v < dim_v))
    mine = inside & (place >= 0)
    to_own = own + (row * keys + place.to(tl.int64)) * width
    tl.store(to_own + d_k, x_k, mask=mine & (d_k < dim))
    tl.store(to_own + dim + d_v, x_v, mask=mine & (d_v < dim_v))
