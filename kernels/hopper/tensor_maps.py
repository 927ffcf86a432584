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

__all__ = ["readable", "view"]

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32}
_KEPT = 4096  # shapes, strides and boxes that are remembered; lengths may differ from batch to batch

_known: dict[tuple, dict[str, Any]] = {}


def readable(x: Tensor) -> bool:
    """Is ``x`` in steps of 16 bytes, and without gaps in its last dimension? The stride of a dimension of size 1 may be
    anything, because :func:`view` gives it another."""
    return x.data_ptr() % 16 == 0 and _in_steps(x.shape, x.stride(), x.dtype)


@functools.lru_cache(_KEPT)
def _in_steps(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = 16 // dtype.itemsize
    outer = [stride for stride, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(s > 0 and s % step == 0 for s in outer)


def view(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """TMA's view of ``x``. Past its end TMA reads zeros and writes nothing.

    Args:
        x: (batch, seq, heads, head_dim), or (rows, numbers), which are read back by ordinary loads.
        box: what one copy moves, as many elements of each dimension of x.

    Returns:
        Triton's descriptor, with a ``kind`` besides: the dtype, the box and its layout in shared memory, for which a
        kernel is compiled.

    Raises:
        ValueError: x does not begin at a multiple of 16 bytes.
        AssertionError: from Triton, if x is not :func:`readable` otherwise, or the box is none.
    """
    if x.data_ptr() % 16:
        raise ValueError(f"TMA reads from multiples of 16 bytes, and this tensor of {tuple(x.shape)} begins elsewhere")
    key = (x.shape, x.stride(), x.dtype, box)
    fields = _known.get(key)
    if fields is None:
        if len(_known) >= _KEPT:
            _known.clear()
        fields = _known[key] = _fields(x, box)
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=x)
    return made


def _fields(x: Tensor, box: tuple[int, ...]) -> dict[str, Any]:
    """Of the view of every tensor like x; not x itself, which it would keep."""
    if len(box) == 2:
        layout = gl.NVMMASharedLayout(0, 8 * x.element_size(), 2)  # no swizzle
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[x.dtype])
    step = 16 // x.element_size()
    sides = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [-(-stride // step) * step if size == 1 else stride for size, stride in sides]
    made = TensorDescriptor(x, list(x.shape), [*strides, x.stride(-1)], list(box), layout)
    fields = {**vars(made), "kind": f"{x.dtype} {made.block_shape} {layout.mangle()}"}
    del fields["base"]
    return fields
