"""Packing of keys and values from (batch, tokens, heads, head_dim) into rows (batch, heads, places, head_dim +
head_dim_v), in Triton: some runs of tokens, each to its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import dispatch, on_device
from ..kernels.triton.primitives import bound
from ..kernels.triton.strides import elements, stride_unit, strides_in
from ..kernels.upload import upload
from .tile_lists import tile_lists

_TOKENS = 32


class RunTable(NamedTuple):
    """Runs of tokens, by the tiles of the kernel that they meet.

    Attributes:
        edges: (tiles + 1,) int32; the runs of tile t are ``runs[edges[t] : edges[t + 1]]``.
        runs: (n, 3) int32: offset, length, first place. A run is there once for each of its tiles.
    """

    edges: Tensor
    runs: Tensor


def run_table(
    runs: Sequence[tuple[int, int, int]],
    tokens: int,
    device: torch.device,
    zeros: Sequence[tuple[int, int]] = (),
) -> RunTable:
    """Return disjoint runs of ``tokens`` tokens, each (offset, length, first place), for :func:`pack_rows`.

    Call it outside of CUDA-graph capture: a table is copied from the host.

    Args:
        zeros: places (first, past) that become zero: runs of tokens past the last one.
    """
    lengths = [past - first for first, past in zeros]
    offsets = itertools.accumulate(lengths, initial=tokens)
    runs = [*runs, *((at, n, first) for at, n, (first, _) in zip(offsets, lengths, zeros, strict=False))]
    numbers = np.array(runs, dtype=np.int32).reshape(-1, 3)
    spans = [(offset, offset + length) for offset, length, _ in runs]
    edges, index = tile_lists(spans, tokens + sum(lengths), _TOKENS)
    return RunTable(*upload((torch.from_numpy(edges), torch.from_numpy(numbers[index])), device))


def pack_rows(k: Tensor, v: Tensor, into: Tensor, table: RunTable) -> None:
    """Write some runs of tokens of k and v, and zeros, to their places in ``into``.

    Args:
        k, v: (batch, tokens, heads, head_dim) and (..., head_dim_v), the last dimension contiguous.
        into: (batch, heads, places, head_dim + head_dim_v), contiguous.
        table: see :func:`run_table`.
    """
    batch, tokens, heads, dim = k.shape
    if not k.numel() or not into.numel():
        return
    places, tiles = into.shape[2], table.edges.shape[0] - 1
    with on_device(k):
        unit = stride_unit(k, v)
        dispatch(
            _pack_rows, (heads * tiles * batch,), k, *strides_in(unit, k),
            v, *strides_in(unit, v), into, *table, tokens, tiles, heads, places, dim, v.shape[3],
            DIM=triton.next_power_of_2(dim), DIM_V=triton.next_power_of_2(v.shape[3]), TOKENS=_TOKENS, UNIT=unit,
        )  # fmt: skip


@triton.jit(do_not_specialize=["k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "tokens", "tiles", "heads", "places"])
def _pack_rows(
    k, k_b, k_s, k_h, v, v_b, v_s, v_h, into, edges, runs, tokens, tiles, heads, places, dim, dim_v,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    h = pid % heads  # neighbouring programs read heads of the same tokens, which are neighbours in memory
    b = (pid // heads // tiles).to(tl.int64)
    tile = pid // heads % tiles
    begin, end = tl.load(edges + tile), tl.load(edges + tile + 1)
    if begin == end:
        return
    t = tile * TOKENS + tl.arange(0, TOKENS)
    t64 = t.to(tl.int64)[:, None]
    inside = (t < tokens)[:, None]
    width = dim + dim_v
    d_k, d_v = tl.arange(0, DIM)[None, :], tl.arange(0, DIM_V)[None, :]
    from_k = k + b * elements(k_b, UNIT) + t64 * elements(k_s, UNIT) + h.to(tl.int64) * elements(k_h, UNIT)
    from_v = v + b * elements(v_b, UNIT) + t64 * elements(v_s, UNIT) + h.to(tl.int64) * elements(v_h, UNIT)
    x_k = tl.load(from_k + d_k, mask=inside & (d_k < dim), other=0.0)
    x_v = tl.load(from_v + d_v, mask=inside & (d_v < dim_v), other=0.0)
    t = t[:, None]
    place = tl.full([TOKENS, 1], -1, tl.int32)
    for i in tl.range(bound(begin), bound(end)):  # while k and v are loaded
        offset, length, first = tl.load(runs + 3 * i), tl.load(runs + 3 * i + 1), tl.load(runs + 3 * i + 2)
        place = tl.where((t >= offset) & (t < offset + length), first + t - offset, place)
    packed = place >= 0
    to = into + ((b * heads + h) * places + place.to(tl.int64)) * width
    tl.store(to + d_k, x_k, mask=packed & (d_k < dim))
    tl.store(to + dim + d_v, x_v, mask=packed & (d_v < dim_v))
