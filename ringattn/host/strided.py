"""Strided (pitched 2-D) copies between pinned host memory and a GPU.

Some of the heads of a tensor (batch, seq, heads, head_dim) are rows with gaps: each token has a run of these heads, and
the runs are as far apart as all heads take. For such tensors torch gathers the rows on the host first, into memory that
is not pinned. Copy engines take a *pitch*, the distance between rows, so that one copy moves all rows:

    host   [ token 0:  h0 h1 | h2 h3 ] [ token 1:  h0 h1 | h2 h3 ] ...      heads 2 and 3: width 2, pitch 4
                         \\_____  _____________________/
    GPU    [ h2 h3 ] [ h2 h3 ] ...                                           width 2, pitch 2

Reference: CUDA Driver API, "Memory Management", cuMemcpy2DAsync.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..peer import driver
from ..peer.driver import Rows

_MAX_PITCH = 2**31 - 1  # bytes, CU_DEVICE_ATTRIBUTE_MAX_PITCH: heads of 16 million tokens are farther apart


class _Dim(NamedTuple):
    """A dimension of both tensors, strides in elements."""

    source: int
    target: int
    size: int


def copy(target: Tensor, source: Tensor) -> None:
    """Copy between the host and a GPU on the GPU's current stream, without waiting: both must stay alive, and the
    source unchanged, until the stream has done it. Memory of the host that is not pinned is copied as torch does."""
    host, other = (target, source) if source.is_cuda else (source, target)
    rows = rows_of(target, source) if other.is_cuda and host.is_pinned() else None
    if rows is None:
        target.copy_(source, non_blocking=True)
        return
    with torch.cuda.device(other.device):
        stream = torch.cuda.current_stream()
        for several in rows:
            driver.copy_rows(stream, several)
    # Of its own copies torch remembers that they use pinned memory, which is then not given away until they are done.
    first = (0,) * source.ndim
    target[first].copy_(source[first], non_blocking=True)


def rows_of(target: Tensor, source: Tensor) -> list[Rows] | None:
    """Return the copies of rows that copy a tensor, or None where torch's own copy is as good, or no such copies
    exist: both tensors are one piece of memory, elements are not adjacent, or dtypes differ."""
    if target.shape != source.shape or target.dtype != source.dtype or not source.numel():
        return None
    dims = _merged([_Dim(*d) for d in zip(source.stride(), target.stride(), source.shape, strict=True) if d[2] > 1])
    if len(dims) < 2 or dims[0][:2] != (1, 1):
        return None
    width, *outer = dims
    if any(dim.source < width.size or dim.target < width.size for dim in outer):
        return None  # rows that overlap, such as those of an expanded tensor
    unit = source.element_size()
    near = [dim for dim in outer if unit * max(dim.source, dim.target) <= _MAX_PITCH]
    height = max(near, key=lambda dim: dim.size, default=_Dim(width.size, width.size, 1))
    others = [dim for dim in outer if dim is not height]
    copies = []
    for index in itertools.product(*(range(dim.size) for dim in others)):
        from_source = sum(i * dim.source for i, dim in zip(index, others, strict=True))
        from_target = sum(i * dim.target for i, dim in zip(index, others, strict=True))
        copies.append(
            Rows(
                target=target.data_ptr() + unit * from_target,
                source=source.data_ptr() + unit * from_source,
                width=unit * width.size,
                height=height.size,
                target_pitch=unit * height.target,
                source_pitch=unit * height.source,
            )
        )
    return copies


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Return the dimensions from the innermost outwards, those that are one run in both tensors as one."""
    merged: list[_Dim] = []
    for dim in sorted(dims):
        last = merged[-1] if merged else None
        if last is not None and dim[:2] == (last.source * last.size, last.target * last.size):
            merged[-1] = last._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged
