"""TMA views of tensors, made quickly: Triton checks each combination of shape, strides and box only once.

A launch needs four views (forward) or eight (backward). Checking each one again would take longer than a short kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...memo import Memo

__all__ = ["copied_if_unreadable", "readable", "view"]

LIMIT = 4096  # shapes, strides and boxes that are kept; lengths may differ from batch to batch

_DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip
_fields_of_views: Memo[dict[str, Any]] = Memo(LIMIT)


def readable(x: Tensor) -> bool:
    """Return whether TMA can read ``x``: its address and strides are multiples of 16 bytes, and its last dimension is
    contiguous. The stride of a dimension of size 1 may be anything, because :func:`view` replaces it."""
    return x.data_ptr() % 16 == 0 and _has_readable_strides(x.shape, x.stride(), x.dtype)


def copied_if_unreadable(*tensors: Tensor, arriving: bool = False) -> list[Tensor]:
    """Return tensors that TMA can read: these, or copies. Not by contiguous(), which returns a tensor that begins at an
    unaligned address as it is.

    Args:
        arriving: the last two are keys and values that are still being written.

    Raises:
        ValueError: one that is still arriving would have to be copied.
    """
    if arriving and not all(map(readable, tensors[-2:])):
        raise ValueError("keys and values that are still arriving cannot be copied first: 16-byte strides are needed")
    return [x if readable(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


@functools.lru_cache(LIMIT)
def _has_readable_strides(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = 16 // dtype.itemsize
    outer = [stride for stride, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(s > 0 and s % step == 0 for s in outer)


def view(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return TMA's view of ``x``. Past the end of ``x`` TMA reads zeros and writes nothing.

    Args:
        x: (batch, seq, heads, head_dim), or (rows, numbers), which kernels read from shared memory by ordinary loads.
        box: the number of elements of each dimension of x that one copy moves.

    Returns:
        Triton's descriptor with one more attribute, ``kind``: a text of the dtype, the box and its layout in shared
        memory; a kernel is compiled for these.

    Raises:
        ValueError: the address of x is not a multiple of 16 bytes.
        AssertionError: from Triton, if x is not :func:`readable` for another reason, or the box is impossible.
    """
    if x.data_ptr() % 16:
        raise ValueError(
            f"TMA needs addresses that are multiples of 16 bytes; that of this tensor of shape {tuple(x.shape)} is not"
        )
    key = (x.shape, x.stride(), x.dtype, box)
    fields = _fields_of_views.get(key)
    if fields is None:
        fields = _fields_of_views.put(key, _fields(x, box))
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=x)
    return descriptor


def _fields(x: Tensor, box: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of the view of every tensor like x, without x itself, which they would keep alive."""
    if len(box) == 2:
        layout = gl.NVMMASharedLayout(0, 8 * x.element_size(), 2)  # no swizzle
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[x.dtype])
    step = 16 // x.element_size()
    sides = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [-(-stride // step) * step if size == 1 else stride for size, stride in sides]
    descriptor = TensorDescriptor(x, list(x.shape), [*strides, x.stride(-1)], list(box), layout)
    fields = {**vars(descriptor), "kind": f"{x.dtype} {descriptor.block_shape} {layout.mangle()}"}
    del fields["base"]
    return fields
