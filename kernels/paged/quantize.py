"""Keys and values in e4m3, with a float32 scale for each token and key head: the specification.

The largest element of a head's key becomes 448, the largest number of e4m3, so that an element of it is rounded by a
relative 2^-4 at most, or an absolute 2^-10 of the scale. Products see the stored numbers, exactly, in 16 bits; the
scales of keys multiply scores, those of values multiply p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import E4M3

LARGEST = 448.0
LEAST_SCALE = 2.0**-126  # of a head of zeros, too


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (..., head_dim) in e4m3, rounded to nearest even, and its scales (...) float32."""
    x = x.float()
    # On a GPU torch divides by a Python number by multiplying with its reciprocal. Where the largest element is a
    # multiple of 7, many elements lie halfway between two numbers of e4m3: one unit in the scale rounds all one way.
    largest = torch.full((), LARGEST, device=x.device)
    scale = (x.abs().amax(-1) / largest).clamp(min=LEAST_SCALE)
    return (x / scale[..., None]).to(E4M3), scale


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 (..., head_dim) times its scales (...), multiplied in float32 and rounded to ``dtype``."""
    return (x.float() * scale[..., None]).to(dtype)


def stored(x: Tensor, scales: Tensor | None, at: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return some slots of the pages of a pool, (kv_heads, slots, head_dim), as numbers of ``dtype``: a view, where
    slots are a slice and nothing is converted."""
    if isinstance(at, slice):
        part = x[:, at]
    else:  # torch indexes no e4m3
        part = x.view(torch.uint8).index_select(1, at).view(E4M3) if x.dtype == E4M3 else x.index_select(1, at)
    return part.to(dtype) if scales is None else dequantize(part, scales[:, at], dtype)
