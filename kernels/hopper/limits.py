"""The limits of the forward and of the backward for Hopper, in the same words."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..launch import capability


def unsupported(q: Tensor, k: Tensor, v: Tensor, head_dims: Collection[tuple[int, int]]) -> str | None:
    """Return None if a kernel can run, otherwise the reason. Tensors that TMA cannot read are copied first.

    Args:
        head_dims: those of q, k and of v that it has.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is neither bfloat16 nor float16"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if (q.shape[-1], v.shape[-1]) not in head_dims:
        return f"head dims {q.shape[-1]} of q, k and {v.shape[-1]} of v; it has {sorted(head_dims)}"
    if not q.is_cuda or capability(q.device) != (9, 0):
        device = torch.cuda.get_device_name(q.device) if q.is_cuda else q.device
        return f"it needs compute capability 9.0 (sm_90), which {device} does not have"
    return None
