"""Small tables from the host to a GPU, without making the host wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; that of torch's allocator, so that kernels are compiled for aligned addresses only


def upload(tables: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return the tables on ``device``, in one copy from pinned memory that is queued on the current stream.

    Tables that are there already are returned as they are, and those of another GPU are copied one by one.

    Raises:
        RuntimeError: a graph is being captured: it would repeat the copy from memory that is used for other things.
    """
    if all(x.device == device for x in tables):
        return tuple(tables)
    if device.type != "cuda" or not all(x.device.type == "cpu" for x in tables):
        return tuple(x.to(device) for x in tables)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call with a plan makes tables, which a CUDA graph cannot capture; run the same calls once "
            "before the capture"
        )
    sizes = [x.numel() * x.element_size() for x in tables]
    offsets = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    pinned = torch.empty(offsets[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for x, offset, size in zip(tables, offsets, sizes, strict=False):
        pinned[offset : offset + size].view(x.dtype).copy_(x.reshape(-1))
    # torch gives the pinned memory to another tensor only after the copy.
    whole = pinned.to(device, non_blocking=True)
    return tuple(
        whole[offset : offset + size].view(x.dtype).view(x.shape)
        for x, offset, size in zip(tables, offsets, sizes, strict=False)
    )
