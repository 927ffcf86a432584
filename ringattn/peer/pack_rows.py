"""Packing of keys and values, or of their gradients, from (batch, tokens, heads, head_dim) into rows of head_dim +
head_dim_v numbers, in Triton: some runs of tokens, each to its places, which may be in the memory of other GPUs; and a
signal to these when all is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import dispatch, on_device
from ..kernels.triton.primitives import bound, store_release
from ..kernels.triton.strides import elements, stride_unit, strides_in
from .link import Signal
from .tile_lists import TileTable, tile_table

_TOKENS = 32


class Run(NamedTuple):
    """Neighbouring tokens and where they go. Row ``b * heads + h`` is one head of one batch element.

    Attributes:
        offset: the first token; -1: no tokens, zeros.
        length: tokens.
        address: the place of the first token of row 0.
        row: bytes from one row to the next; places are neighbours.
        slot: bytes from slot 0 to slot 1, where places take turns.
    """

    offset: int
    length: int
    address: int
    row: int
    slot: int = 0


def run_table(runs: Sequence[Run], tokens: int, device: torch.device) -> TileTable:
    """Return runs of ``tokens`` tokens for :func:`pack_rows`; a token may be in several. Zeros are runs of tokens past
    the last one."""
    placed = []
    for run in runs:
        if run.offset < 0:
            run, tokens = run._replace(offset=tokens), tokens + run.length
        placed.append(run)
    spans = [(run.offset, run.offset + run.length) for run in placed]
    return tile_table(placed, spans, max(1, tokens), _TOKENS, device)


def pack_rows(k: Tensor, v: Tensor, table: TileTable, slot: int = 0, signal: Signal | None = None) -> None:
    """Write some runs of tokens of k and v, and zeros, to their places, and signal that they are there.

    Args:
        k, v: (batch, tokens, heads, head_dim) and (..., head_dim_v), the last dimension contiguous.
        table: see :func:`run_table`. Places are of the dtype of k and v, a token's k before its v, and begin at
            multiples of 16 bytes where rows of both are.
    """
    batch, tokens, heads, dim = k.shape
    rows, tiles, dim_v = batch * heads, table.edges.shape[0] - 1, v.shape[3]
    if not rows and signal is None:
        return
    words, which, stored, number = signal or (None, 0, None, 0)
    ranks = 0 if words is None else words.shape[1]
    with on_device(k):
        unit = stride_unit(k, v)
        dispatch(
            _pack_rows, (max(1, rows * tiles),), k, *strides_in(unit, k), v, *strides_in(unit, v), *table, tokens,
            tiles, heads, rows, slot, dim, dim_v, words, which, stored, number, DIM=triton.next_power_of_2(dim),
            DIM_V=triton.next_power_of_2(dim_v), TOKENS=_TOKENS, UNIT=unit,
            ALIGNED=not (dim * k.element_size() % 16 or dim_v * k.element_size() % 16), RANKS=ranks,
            RANKS_P2=triton.next_power_of_2(ranks),
        )  # fmt: skip


_NUMBERS = ["tokens", "tiles", "heads", "rows", "slot", "which", "number"]


@triton.jit(do_not_specialize=["k_b", "k_s", "k_h", "v_b", "v_s", "v_h", *_NUMBERS])
def _pack_rows(
    k, k_b, k_s, k_h, v, v_b, v_s, v_h, edges, runs, tokens, tiles, heads, rows, slot, dim, dim_v, words, which,
    stored, number, DIM: tl.constexpr, DIM_V: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr, RANKS: tl.constexpr, RANKS_P2: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if rows > 0:
        h = pid % heads  # neighbouring programs read heads of the same tokens, which are neighbours in memory
        b = (pid // heads // tiles).to(tl.int64)
        tile = pid // heads % tiles
        begin, end = tl.load(edges + tile), tl.load(edges + tile + 1)
        if begin < end:
            t = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
            inside = t < tokens
            d_k, d_v = tl.arange(0, DIM)[None, :], tl.arange(0, DIM_V)[None, :]
            from_k = k + b * elements(k_b, UNIT) + t * elements(k_s, UNIT) + h.to(tl.int64) * elements(k_h, UNIT)
            from_v = v + b * elements(v_b, UNIT) + t * elements(v_s, UNIT) + h.to(tl.int64) * elements(v_h, UNIT)
            x_k = tl.load(from_k + d_k, mask=inside & (d_k < dim), other=0.0)
            x_v = tl.load(from_v + d_v, mask=inside & (d_v < dim_v), other=0.0)
            for i in tl.range(bound(begin), bound(end)):
                run = runs + 5 * i
                offset, length = tl.load(run), tl.load(run + 1)
                at = tl.load(run + 2) + (b * heads + h) * tl.load(run + 3) + slot * tl.load(run + 4)
                places = at.to(tl.pointer_type(k.dtype.element_ty))
                if ALIGNED:
                    places = tl.multiple_of(places, 16)
                to = places + (t - offset) * (dim + dim_v)
                packed = (t >= offset) & (t < offset + length)
                tl.store(to + d_k, x_k, mask=packed & (d_k < dim))
                tl.store(to + dim + d_v, x_v, mask=packed & (d_v < dim_v))
    if RANKS > 0:
        tl.debug_barrier()  # what all threads have stored is released together
        if tl.atomic_add(stored, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
            tl.store(stored, 0)
            to = tl.arange(0, RANKS_P2)
            addresses = tl.load(words + which * RANKS + to, mask=to < RANKS, other=0)
            store_release(addresses, number, addresses != 0)
