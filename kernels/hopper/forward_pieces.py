"""Sizes, and small pieces that the partitions of the forward kernel for Hopper (forward.py) share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one wgmma
INFO = gl.constexpr(8)  # int32 numbers that describe a query tile, see forward_work.query_tile_table
SLOTS = gl.constexpr(4)  # descriptions in shared memory: one is read until two tiles later
INFO_LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # every thread holds all of them


@gluon.jit
def number_of(info, i: gl.constexpr):
    """Return element i of a query tile's description, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, INFO, INFO_LAYOUT) == i, info, 0), axis=0)


@gluon.jit
def matrix_of(tiles, i):
    """Return tile i of (tiles, 1, rows, 1, D) in shared memory as a matrix (rows, D)."""
    return tiles.index(i).reshape([tiles.shape[2], tiles.shape[4]])


@gluon.jit
def scaled(x, factor):
    """Return x times a factor for each row, which is in the layout of the scores."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def finite(m):
    """Return m as a point of reference: 0 where nothing was seen, so that -inf - m stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)
