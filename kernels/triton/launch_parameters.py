"""Launch parameters of the Triton kernels, one table for each family of GPUs.

Those of Hopper are measured (docs/lab). The others are made to fit: tests/test_triton_targets.py compiles the kernels
for GPUs of every family and compares shared memory with what they have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """Tile sizes of a kernel, ``block_m`` queries and ``block_n`` keys, and options of the compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group: int = 1  # query heads that walk their tiles at the same time, to share keys in the L2 cache


class Passes(NamedTuple):
    """Tiles of the two passes of backward.py: for dk and dv, and for dq."""

    dkdv: Tiles
    dq: Tiles


class WideTiles(NamedTuple):
    """Tiles of the backward for head dims above 256 (backward_large.py).

    Args:
        size: queries of a tile of weights, and rows of a tile of a gradient.
        keys: keys of a tile of weights, ``size`` or twice as many.
        depth: length of the products of one step.
        columns: columns of a tile of a gradient.
        stages_of_weights, stages: tiles in flight, of the kernel for weights and of those for gradients.
    """

    size: int
    keys: int
    depth: int
    columns: int
    stages_of_weights: int
    stages: int


class Row(NamedTuple):
    """Tiles of the kernels for inputs of this many bits and head dims up to these, padded to a power of two.

    Args:
        dim: the larger head dim, of q and k or of v.
        dim_v: that of v.
        backward: of the kernels of backward.py or, where registers do not hold their sums, of backward_large.py.
    """

    bits: int
    dim: int
    dim_v: int
    forward: Tiles
    backward: Passes | WideTiles


# Two programs of 4 warps per multiprocessor: one computes exponentials while the other multiplies.
_HOPPER = (
    Row(16, 64, 64, Tiles(64, 128, 4, 3, 2), Passes(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 3))),
    Row(16, 128, 128, Tiles(128, 64, 4, 2, 2), Passes(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3))),
    Row(16, 256, 128, Tiles(128, 64, 8, 2, 2), Passes(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2))),
    Row(16, 256, 256, Tiles(128, 64, 8, 2, 2), Passes(Tiles(64, 64, 8, 2), Tiles(128, 32, 8, 2))),
    Row(16, 512, 512, Tiles(64, 32, 8, 2), WideTiles(128, 256, 64, 256, 4, 4)),
    Row(32, 64, 64, Tiles(64, 32, 4, 2), Passes(Tiles(32, 64, 4, 1), Tiles(64, 64, 4, 1))),
    Row(32, 128, 128, Tiles(64, 32, 4, 2), Passes(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1))),
    Row(32, 256, 256, Tiles(64, 32, 4, 2), Passes(Tiles(32, 64, 8, 1), Tiles(64, 16, 4, 1))),
)
# With tensor memory dk and dv spill 2.4 KB in 4 warps, 800 bytes in 8, and nothing in one stage (ptxas 12.9, not run).
_SM_100 = tuple(
    Row(16, 128, 128, row.forward, Passes(Tiles(64, 64, 8, 1), Tiles(128, 64, 8, 3)))
    if (row.bits, row.dim) == (16, 128)
    else row
    for row in _HOPPER
)
_99_KB = (
    Row(16, 64, 64, Tiles(128, 64, 4, 2), Passes(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2))),
    Row(16, 128, 128, Tiles(128, 32, 8, 2), Passes(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2))),
    Row(16, 256, 256, Tiles(64, 32, 8, 1), Passes(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1))),
    Row(16, 512, 512, Tiles(32, 16, 8, 1), WideTiles(128, 128, 32, 128, 3, 3)),
    Row(32, 128, 128, Tiles(64, 32, 4, 2), Passes(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1))),
    Row(32, 256, 256, Tiles(32, 32, 4, 1), Passes(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))),
)
_64_KB_CHANGES: dict[tuple[int, int], dict[str, Any]] = {
    (32, 128): dict(forward=Tiles(64, 32, 4, 1)),
    (16, 512): dict(backward=WideTiles(64, 64, 64, 128, 2, 2)),
}
_64_KB = tuple(row._replace(**_64_KB_CHANGES.get((row.bits, row.dim), {})) for row in _99_KB)

# By the first number of the compute capability; 0 for the interpreter and for GPUs that are not NVIDIA's.
TABLES = {0: _64_KB, 8: _99_KB, 9: _HOPPER, 10: _SM_100, 12: _99_KB}


def row_of(q: Tensor, v: Tensor, capability: tuple[int, int]) -> Row:
    """Return the first row that has room for the head dims of q and v, on a GPU of this compute capability: that of the
    smallest GPUs if it is unknown."""
    dim_v = padded(v.shape[-1])
    dim = max(padded(q.shape[-1]), dim_v)
    bits = 32 if q.dtype == torch.float32 else 16
    rows = TABLES.get(capability[0], _64_KB)
    return next(r for r in rows if r.bits == bits and dim <= r.dim and dim_v <= r.dim_v)


def padded(dim: int) -> int:
    """Return the number of columns of a tile for ``dim``: the next power of two, at least 16."""
    return 1 << (max(dim, 16) - 1).bit_length()
