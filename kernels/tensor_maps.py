"""TMA's view of a tensor, made quickly: what Triton checks of a view it checks once for each shape, strides and box.

A launch makes four views (forward) or eight (backward), and a short kernel does not wait for the host to check each one
again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["Box", "box", "view"]

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32}
_KEPT = 4096  # views of other tensors of the same shape, at most; lengths may differ from batch to batch


class Box:
    """What one copy moves: ``shape``, as many dimensions as the tensor, and its ``layout`` in shared memory. ``kind``
    names both and the dtype: what a kernel is compiled for."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = list(shape)
        if len(shape) == 2:  # rows of numbers, read back by ordinary loads: no swizzle
            self.layout = gl.NVMMASharedLayout(0, 8 * dtype.itemsize, 2)
        else:
            self.layout = gl.NVMMASharedLayout.get_default_for(self.shape, _DTYPES[dtype])
        self.kind = f"{dtype} {self.shape} {self.layout.mangle()}"


@functools.cache
def box(shape: tuple[int, ...], dtype: torch.dtype) -> Box:
    return Box(shape, dtype)


_views: dict[tuple, dict[str, Any]] = {}


def view(x: Tensor, shape: tuple[int, ...]) -> TensorDescriptor:
    """``x`` in boxes of ``shape``. Past its end TMA reads zeros and writes nothing.

    Raises:
        ValueError: x does not begin at a multiple of 16 bytes.
        AssertionError: from Triton, if the strides are no multiples of 16 bytes either, or the box is none.
    """
    if x.data_ptr() % 16:
        raise ValueError(f"TMA reads from multiples of 16 bytes, and this tensor of {tuple(x.shape)} begins elsewhere")
    dtype = x.dtype
    key = (x.shape, x.stride(), dtype, shape)
    fields = _views.get(key)
    if fields is None:
        of = box(shape, dtype)
        step = 16 // x.element_size()
        # The stride of a dimension of size 1 may be anything; TMA wants steps of 16 bytes.
        *outer, last = zip(x.shape, x.stride(), strict=True)
        strides = [-(-stride // step) * step if size == 1 else stride for size, stride in outer] + [last[1]]
        made = TensorDescriptor(x, list(x.shape), strides, of.shape, of.layout)
        fields = {**vars(made), "kind": of.kind}
        del fields["base"]  # the view of this tensor shall not keep it
        if len(_views) >= _KEPT:
            _views.clear()
        _views[key] = fields
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=x)
    return made
