"""Keys and values in e4m3, with a float32 scale for each token and key head: the specification.

The largest element of a head's key becomes 448, the largest number of e4m3, so that an element of it is rounded by a
relative 2^-4 at most, or an absolute 2^-10 of the scale. Products see the stored numbers, exactly, in 16 bits; the
scales of keys multiply scores, those of values multiply p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import E4M3

LARGEST = 448.0
LEAST_SCALE = 2.0**-126  # of a head of zeros, too


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (..., head_dim) in e4m3, rounded to nearest even, and its scales (...) float32."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp(min=LEAST_SCALE)
    return (x / scale[..., None]).to(E4M3), scale


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 (..., head_dim) times its scales (...), multiplied in float32 and rounded to ``dtype``."""
    return (x.float() * scale[..., None]).to(dtype)
