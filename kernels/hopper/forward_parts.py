"""Query tiles whose keys are divided between CTAs (forward.py): what is left for the processors when there are fewer
query tiles than processors.

All query tiles of a full mask take the same time. 16 heads of 16,384 queries are 2,048 of them, for 132 processors
15.5 each: for half of the last one of 16 turns a processor would have nothing to do. So the keys of these last ones
are divided (:func:`.forward_work.divide_last`), as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/) and
Stream-K (Osama et al. 2023, arXiv:2301.03598). A part is a piece of work like a query tile. Its sums go to memory, and
the last one to arrive adds up those of all parts, in their order, so that the result has the same bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_pieces import INFO, INFO_LAYOUT, ROWS, finite, number_of, scaled
from .primitives import barrier_sync, fence_memory
from .work_counter import take_number

COUNTERS_AT = gl.constexpr(8)  # the counters of parts that have arrived, behind the work counter


def memory(parts: int, consumers: int, width: int, device: torch.device) -> Tensor:
    """Return memory for the sums of so many parts, (parts, consumers, ROWS, width) float32, and behind it for their m
    and l, (parts, consumers, 2, ROWS)."""
    return torch.empty(parts * consumers * ROWS.value * (width + 2), dtype=torch.float32, device=device)


def counters(tiles: int, consumers: int) -> int:
    """Return the length of a work counter with the counters of so many divided query tiles."""
    return COUNTERS_AT.value + tiles * consumers


@gluon.jit
def tile_of(w, undivided, parts):
    """Return the query tile that piece of work w belongs to, and the number of its part among all, negative if it is
    whole."""
    part = w - undivided
    return gl.where(part < 0, w, undivided + part // parts), part


@gluon.jit
def keys_of_part(info, part, parts, BN: gl.constexpr):
    """Return the description of a query tile with the keys of a part."""
    begin = number_of(info, 2)
    tiles = (number_of(info, 5) - begin) // BN
    first = begin + tiles * (part % parts) // parts * BN
    past = begin + tiles * (part % parts + 1) // parts * BN
    i = gl.arange(0, INFO, INFO_LAYOUT)
    inside = gl.minimum(gl.maximum(info, first), past)
    return gl.where((part >= 0) & (i >= 2) & (i < 6), inside, info)


@gluon.jit
def _sums(ptr, part, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the sums of a part, (parts, N, ROWS, W) float32."""
    rows = (part * N + C) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return (ptr + rows.to(gl.int64) * W)[:, None] + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _rows(ptr, part, all_parts, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Return pointers to m and l of a part, (parts, N, 2, ROWS) float32 behind the sums of all parts."""
    ptr += all_parts.to(gl.int64) * (N * ROWS * W) + (part * N + C) * 2 * ROWS
    m_ptr = ptr + gl.arange(0, ROWS, layout)
    return m_ptr, m_ptr + ROWS


@gluon.jit
def joined(
    part, parts, all_parts, sums_ptr, counter_ptr, acc, m, l, C: gl.constexpr, N: gl.constexpr, BARRIER: gl.constexpr
):
    """Return acc, m and l of a query tile, and whether it is to be stored: as they are if it is whole, otherwise the
    sums of all parts in the CTA that is the last to arrive here. By the four warps of a consumer.

    Args:
        part: number of this part, negative if the query tile is whole.
        parts, all_parts: number of those of a query tile, and of all.
        sums_ptr: where their sums go, see :func:`memory`.
        counter_ptr: the work counter and, behind it, those of the parts of each consumer that have arrived.
        BARRIER: of this consumer alone.
    """
    L: gl.constexpr = acc.type.layout
    S_ROW: gl.constexpr = m.type.layout
    W: gl.constexpr = acc.shape[1]
    complete = part < 0
    if part >= 0:
        gl.store(_sums(sums_ptr, part, C, N, W, L), acc)
        m_ptr, l_ptr = _rows(sums_ptr, part, all_parts, C, N, W, S_ROW)
        gl.store(m_ptr, m)
        gl.store(l_ptr, gl.convert_layout(gl.sum(l, axis=1), S_ROW))
        fence_memory()
        barrier_sync(BARRIER, 128)
        tile = part // parts
        number = gl.sum(take_number(counter_ptr + COUNTERS_AT + tile * N + C, parts), axis=0)
        fence_memory()
        complete = number == parts - 1
        if complete:
            acc = gl.zeros([ROWS, W], gl.float32, L)
            m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
            total = gl.zeros([ROWS], gl.float32, S_ROW)
            for i in range(tile * parts, (tile + 1) * parts):
                m_ptr, l_ptr = _rows(sums_ptr, i, all_parts, C, N, W, S_ROW)
                of_part = gl.load(m_ptr, cache_modifier=".cg")  # L1 may not have what other processors store
                larger = gl.maximum(m, of_part)
                before = gl.exp2(m - finite(larger))
                now = gl.exp2(of_part - finite(larger))
                total = total * before + gl.load(l_ptr, cache_modifier=".cg") * now
                x = gl.load(_sums(sums_ptr, i, C, N, W, L), cache_modifier=".cg")
                acc = scaled(acc, before) + scaled(x, now)
                m = larger
            l = gl.convert_layout(total * 0.25, gl.SliceLayout(1, l.type.layout))[:, None] + gl.zeros_like(l)
    return acc, m, l, complete
